//! The charts: which there are, and what stands above and below each.

use std::fmt::Write as _;

use super::super::labels::{self, Line};
use super::super::plot::{Chart, Look, Mark, Path, Scale, escape, swatch};
use super::super::results::{Point, Results, Spread};
use super::plus_minus;
use crate::units;

/// A value over the repetitions.
type Value<'a> = &'a dyn Fn(&Point) -> Option<Spread>;
/// A value without repetitions.
type Bare<'a> = &'a dyn Fn(&Point) -> Option<f64>;
/// A number in words.
type Words<'a> = &'a dyn Fn(f64) -> String;

/// What all charts of one kind share.
struct Kind<'a> {
    title: &'a str,
    lead: &'a str,
    x_name: &'a str,
    x_words: Words<'a>,
    y_name: &'a str,
    y_words: Words<'a>,
    /// The values are nanoseconds.
    times: bool,
    value: Value<'a>,
    /// What a machine does without queues, from a point: a dashed line.
    baseline: Option<(&'a str, Bare<'a>)>,
}

fn plain(v: f64) -> String {
    units::grouped(v as u64)
}

fn size(v: f64) -> String {
    units::size(v as u64)
}

/// An axis's value: `10 M`, and not `10.0 M`.
fn round(v: f64) -> String {
    let words = units::scaled(v);
    let (number, unit) = words.split_once(' ').unwrap_or((&words, ""));
    let number = match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => number,
    };
    let number = if number.is_empty() { "0" } else { number };
    format!("{number} {unit}").trim_end().to_owned()
}

fn round_time(ns: f64) -> String {
    let words = units::time(ns);
    let (number, unit) = words.split_once(' ').unwrap_or((&words, ""));
    let number = match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => number,
    };
    match number {
        "0" => "0".to_owned(),
        _ => format!("{number} {unit}"),
    }
}

pub(super) fn write(out: &mut String, results: &Results) {
    let points = &results.points;
    let rate = |p: &Point| p.messages_per_s;
    let bytes = |p: &Point| p.bytes_per_s;
    let per_byte = |p: &Point| {
        p.baseline_ns
            .filter(|ns| *ns > 0.0)
            .map(|ns| p.size as f64 * 1e9 / ns)
    };
    let per_message = |p: &Point| p.baseline_ns.filter(|ns| *ns > 0.0).map(|ns| 1e9 / ns);
    let sizes = |title: &str,
                 lead: &str,
                 experiment: &str,
                 of: &str,
                 value: Value<'_>,
                 base: &dyn Fn(&Point) -> Option<f64>| {
        let kind = Kind {
            title,
            lead,
            x_name: "bytes of a message",
            x_words: &size,
            y_name: of,
            y_words: &round,
            times: false,
            value,
            baseline: Some(("copies by one CPU thread, no queue", base)),
        };
        figure(&kind, &labels::lines(points, experiment, None))
    };
    let blocks = labels::lines(points, "blocks", None);
    let per_blocks = |title: &str, lead: &str, y_name: &str, times: bool, value: Value<'_>| {
        let kind = Kind {
            title,
            lead,
            x_name: "blocks",
            x_words: &plain,
            y_name,
            y_words: if times { &round_time } else { &round },
            times,
            value,
            baseline: None,
        };
        figure(&kind, &blocks)
    };
    section(
        out,
        "Who posts",
        "8-byte puts over loopback: what posting and executing cost, without a wire. One engine core carries all of them out unless said otherwise.",
        &[
            per_blocks(
                "Puts against blocks",
                "More is better.",
                "puts a second",
                false,
                &rate,
            ),
            per_blocks(
                "Processor time of a put",
                "Engine, CPU helpers and, where host threads play the GPU, those. Less is better.",
                "CPU time for each put",
                true,
                &Point::cpu_ns_per_message,
            ),
            per_blocks(
                "Processors kept busy",
                "Of the whole run, all processes.",
                "CPUs",
                false,
                &|p| p.cpu_cores_used,
            ),
            queues(points),
        ],
    );
    section(
        out,
        "How bytes travel: puts",
        "One poster, one queue pair, over each link.",
        &[
            sizes(
                "Rate of puts",
                "More is better.",
                "sizes",
                "puts a second",
                &rate,
                &per_message,
            ),
            sizes(
                "Bandwidth of puts",
                "More is better.",
                "sizes",
                "bytes a second",
                &bytes,
                &per_byte,
            ),
        ],
    );
    section(
        out,
        "How bytes travel: gets",
        "The same, read instead of written: the initiator waits for each one's data.",
        &[
            sizes(
                "Rate of gets",
                "More is better.",
                "gets",
                "gets a second",
                &rate,
                &per_message,
            ),
            sizes(
                "Bandwidth of gets",
                "More is better.",
                "gets",
                "bytes a second",
                &bytes,
                &per_byte,
            ),
        ],
    );
    section(
        out,
        "Latency",
        "One message at a time. A put, with or without a signal, is half of a ping-pong between two threads; a get is the whole way there and back.",
        &latencies(results),
    );
}

/// Figures that there are, under a heading; none, no heading.
fn section(out: &mut String, title: &str, lead: &str, figures: &[Option<String>]) {
    if figures.iter().all(Option::is_none) {
        return;
    }
    let _ = write!(
        out,
        "<section>\n<h2>{}</h2>\n<p class=\"lead\">{}</p>\n<div class=\"grid\">\n",
        escape(title),
        escape(lead)
    );
    for figure in figures.iter().flatten() {
        out.push_str(figure);
    }
    out.push_str("</div>\n</section>\n");
}

fn queues(points: &[Point]) -> Option<String> {
    let kind = Kind {
        title: "Idle queue pairs",
        lead: "One of them is posted to; what do the others cost?",
        x_name: "open queue pairs",
        x_words: &plain,
        y_name: "puts a second",
        y_words: &round,
        times: false,
        value: &|p| p.messages_per_s,
        baseline: None,
    };
    figure(&kind, &labels::lines(points, "queues", None))
}

/// What a mark says.
fn tip(name: &str, x: &str, s: &Spread, words: Words<'_>, times: usize) -> String {
    let range = match times {
        0 | 1 => String::new(),
        n => format!("\n{} to {} in {n} measurements", words(s.min), words(s.max)),
    };
    format!("{name}, {x}: {}{range}", words(s.median))
}

fn figure(kind: &Kind<'_>, lines: &[Line<'_>]) -> Option<String> {
    let mut paths = Vec::new();
    let mut legend = Vec::new();
    // Exact in words where the axis is round.
    let exact = |v: f64| match kind.times {
        true => units::time(v),
        false => units::scaled(v),
    };
    for line in lines {
        let marks: Vec<Mark> = line
            .points
            .iter()
            .filter_map(|p| {
                let s = (kind.value)(p)?;
                let x = labels::x(p) as f64;
                let at = format!("{} {}", (kind.x_words)(x), unit_of(kind.x_name));
                Some(Mark {
                    x,
                    y: s.median,
                    range: Some((s.min, s.max)),
                    tip: tip(
                        &line.name.long,
                        at.trim_end(),
                        &s,
                        &exact,
                        p.repetitions.len(),
                    ),
                })
            })
            .collect();
        if !marks.is_empty() {
            legend.push((Some(line.name.style), line.name.long.clone()));
            paths.push(Path {
                look: Some(line.name.style),
                marks,
            });
        }
    }
    if let (Some((name, value)), Some(line)) = (kind.baseline, lines.first()) {
        let marks: Vec<Mark> = line
            .points
            .iter()
            .filter_map(|p| {
                let (x, y) = (labels::x(p) as f64, value(p)?);
                Some(Mark {
                    x,
                    y,
                    range: None,
                    tip: format!(
                        "{name}, {}: {}{}",
                        (kind.x_words)(x),
                        exact(y),
                        p.baseline()
                            .map_or(String::new(), |s| format!(", {}", plus_minus(s.relative())))
                    ),
                })
            })
            .collect();
        if !marks.is_empty() {
            legend.push((None, name.to_owned()));
            paths.insert(0, Path { look: None, marks });
        }
    }
    let values = || paths.iter().flat_map(|p| &p.marks);
    let chart = Chart {
        about: format!("{}: {} against {}", kind.title, kind.y_name, kind.x_name),
        x: Scale::at(values().map(|m| m.x))?,
        x_name: kind.x_name,
        x_words: kind.x_words,
        y: Scale::fit(values().flat_map(shown))?,
        y_name: kind.y_name,
        y_words: kind.y_words,
        paths,
    };
    Some(framed(kind.title, kind.lead, &legend, &chart.svg(), lines))
}

/// What an axis should have room for: the value, and its range unless it is far out.
fn shown(mark: &Mark) -> [f64; 3] {
    let (low, high) = mark.range.unwrap_or((mark.y, mark.y));
    [mark.y, high.min(1.4 * mark.y), low.max(mark.y / 3.0)]
}

/// What to say after a number of these.
fn unit_of(x_name: &str) -> &str {
    match x_name {
        "bytes of a message" => "",
        other => other,
    }
}

fn framed(
    title: &str,
    lead: &str,
    legend: &[(Look, String)],
    svg: &str,
    lines: &[Line<'_>],
) -> String {
    let mut out = String::new();
    let _ = write!(
        out,
        "<figure>\n<figcaption><h3>{}</h3><p>{}</p></figcaption>\n<ul class=\"legend\">",
        escape(title),
        escape(lead)
    );
    for (look, name) in legend {
        let _ = write!(out, "<li>{}{}</li>", swatch(*look), escape(name));
    }
    let _ = write!(out, "</ul>\n{svg}\n");
    let mut commands: Vec<&str> = Vec::new();
    for point in lines.iter().flat_map(|l| &l.points) {
        if !commands.contains(&point.command.as_str()) {
            commands.push(&point.command);
        }
    }
    let _ = write!(
        out,
        "<details><summary>Commands</summary><pre>{}</pre></details>\n</figure>\n",
        escape(&commands.join("\n"))
    );
    out
}

/// The distributions of the smallest messages, a chart a test; and medians against size where there are several sizes.
fn latencies(results: &Results) -> Vec<Option<String>> {
    let mut out = Vec::new();
    for (test, title) in [
        ("put-lat", "Latency of puts"),
        ("signal-lat", "Latency of puts with a signal"),
        ("get-lat", "Latency of gets"),
    ] {
        let lines = labels::lines(&results.points, "latency", Some(test));
        out.push(distribution(title, results, &lines));
    }
    let puts = labels::lines(&results.points, "latency", Some("put-lat"));
    if puts.iter().any(|l| l.points.len() > 1) {
        let kind = Kind {
            title: "Median latency of puts against size",
            lead: "Less is better.",
            x_name: "bytes of a message",
            x_words: &size,
            y_name: "median latency",
            y_words: &round_time,
            times: true,
            value: &|p| p.p50_ns,
            baseline: None,
        };
        out.push(figure(&kind, &puts));
    }
    out
}

fn distribution(title: &str, results: &Results, lines: &[Line<'_>]) -> Option<String> {
    let smallest = lines.iter().flat_map(|l| &l.points).map(|p| p.size).min()?;
    let (mut paths, mut legend) = (Vec::new(), Vec::new());
    for line in lines {
        let Some(point) = line.points.iter().find(|p| p.size == smallest) else {
            continue;
        };
        let marks: Vec<Mark> = results
            .percentiles
            .iter()
            .zip(&point.percentiles_ns)
            .filter(|(p, _)| seen(**p, point))
            .map(|(p, ns)| Mark {
                x: *p,
                y: *ns,
                range: None,
                tip: match p {
                    0.0 => format!("{}: the fastest took {}", line.name.long, units::time(*ns)),
                    p => format!(
                        "{}: {p} % took {} or less",
                        line.name.long,
                        units::time(*ns)
                    ),
                },
            })
            .collect();
        if marks.is_empty() {
            continue;
        }
        let noise = point.p50_ns.map_or(String::new(), |s| {
            format!(
                ": median {} {}",
                units::time(s.median),
                plus_minus(s.relative())
            )
        });
        legend.push((Some(line.name.style), format!("{}{noise}", line.name.long)));
        paths.push(Path {
            look: Some(line.name.style),
            marks,
        });
    }
    let marks = || paths.iter().flat_map(|p: &Path| &p.marks);
    let max = marks().map(|m| m.x).fold(90.0, f64::max);
    let chart = Chart {
        about: format!("{title}: distribution over percentiles"),
        x: Scale::Nines { max },
        x_name: "percentile",
        x_words: &|p| format!("{p} %"),
        y: log(marks().map(|m| m.y))?,
        y_name: "latency",
        y_words: &round_time,
        paths,
    };
    let lead = format!(
        "{}: so many per cent were at least as fast, each nine as wide as the one before. Low and flat is good.",
        units::size(smallest)
    );
    Some(framed(title, &lead, &legend, &chart.svg(), lines))
}

/// A percentile that as many samples as this have something to say about.
fn seen(percent: f64, point: &Point) -> bool {
    let samples = point.repetitions.iter().map(|r| r.messages).min();
    (1.0 - percent / 100.0) * samples.unwrap_or(0) as f64 >= 0.999
}

/// Tails are about factors.
fn log(values: impl IntoIterator<Item = f64>) -> Option<Scale> {
    match Scale::fit(values.into_iter().flat_map(|v| [v, 20.0 * v]))? {
        Scale::Log { min, max } => Some(Scale::Log {
            min,
            max: max / 20.0,
        }),
        even => Some(even),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_values_are_short() {
        assert_eq!(round(10e6), "10 M");
        assert_eq!(round(2.5e9), "2.5 G");
        assert_eq!(round(0.0), "0");
        assert_eq!(round(100.0), "100");
        assert_eq!(round_time(1000.0), "1 µs");
        assert_eq!(round_time(200.0), "200 ns");
    }
}
