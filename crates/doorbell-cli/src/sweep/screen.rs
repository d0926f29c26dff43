//! What a sweep prints when it is done: a table an experiment, 80 columns wide.

use std::fmt::Write as _;

use super::labels::{self, Line};
use super::results::{Point, Results, Spread};
use crate::{table, units};

/// Figures in a row at most.
const COLUMNS: usize = 6;
/// Room for a line's name.
const NAME: usize = 22;

/// On what it runs.
pub(super) fn heading(results: &Results) -> String {
    let e = &results.environment;
    let gpu = match e.gpu.as_deref() {
        Some("host") | None => "GPU played by host threads".to_owned(),
        Some(name) => name.to_owned(),
    };
    let text = format!(
        "sweep: {gpu}, {} CPUs{}, {}; every point {}{} times",
        e.cpus,
        e.cpu.as_ref().map_or(String::new(), |c| format!(" ({c})")),
        e.kernel.as_deref().unwrap_or("unknown kernel"),
        // A minute may be too short for all of them.
        if results.quick { "up to " } else { "" },
        results.repeat
    );
    table::wrap(&text, crate::out::columns()).join("\n")
}

/// All experiments.
pub(super) fn summary(results: &Results, styled: bool) -> String {
    let mut out = String::new();
    let rate = |p: &Point| p.messages_per_s;
    let bytes = |p: &Point| p.bytes_per_s;
    let mut show = |title: &str,
                    lines: Vec<Line<'_>>,
                    head: &dyn Fn(&Point) -> String,
                    f: &dyn Fn(&Point) -> Option<Spread>| {
        if !lines.is_empty() {
            block(&mut out, title, styled, &lines, head, f, &units::scaled);
        }
    };
    let of = |experiment: &str| labels::lines(&results.points, experiment, None);
    let size = |p: &Point| units::size(p.size).replace("iB", "").replace(' ', "");
    show(
        "8-byte puts a second, against blocks",
        of("blocks"),
        &|p| p.blocks.to_string(),
        &rate,
    );
    show("Puts a second, against size", of("sizes"), &size, &rate);
    show(
        "Bytes a second by puts, against size",
        of("sizes"),
        &size,
        &bytes,
    );
    show(
        "Bytes a second by gets, against size",
        of("gets"),
        &size,
        &bytes,
    );
    show(
        "8-byte puts a second, against open queue pairs",
        of("queues"),
        &|p| p.qps.to_string(),
        &rate,
    );
    latency(&mut out, results, styled);
    let _ = writeln!(
        out,
        "\n± is half of the range over the repetitions, of the noisiest figure in the row."
    );
    for note in &results.notes {
        for line in table::wrap(note, crate::out::columns()) {
            let _ = writeln!(out, "{line}");
        }
    }
    for point in &results.points {
        if let Some(error) = &point.failed {
            for line in table::wrap(&format!("FAILED: {error}"), crate::out::columns()) {
                let _ = writeln!(out, "{line}");
            }
        }
    }
    out
}

fn title(out: &mut String, text: &str, styled: bool) {
    let _ = match styled {
        true => writeln!(out, "\n\x1b[1m{text}\x1b[0m"),
        false => writeln!(out, "\n{text}"),
    };
}

/// Lines below each other, what is varied across: as many figures as fit, the first and the last among them.
fn block(
    out: &mut String,
    text: &str,
    styled: bool,
    lines: &[Line<'_>],
    head: &dyn Fn(&Point) -> String,
    value: &dyn Fn(&Point) -> Option<Spread>,
    words: &dyn Fn(f64) -> String,
) {
    title(out, text, styled);
    let mut at: Vec<(u64, String)> = Vec::new();
    for point in lines.iter().flat_map(|l| &l.points) {
        let x = labels::x(point);
        if !at.iter().any(|(other, _)| *other == x) {
            at.push((x, head(point)));
        }
    }
    at.sort();
    let at = thin(&at, COLUMNS);
    let mut row = format!("  {:NAME$}", "");
    for (_, head) in &at {
        let _ = write!(row, "{head:>8}");
    }
    let _ = match styled {
        true => writeln!(out, "\x1b[2m{row}\x1b[0m"),
        false => writeln!(out, "{row}"),
    };
    for line in lines {
        let mut row = format!("  {:NAME$}", line.name.short);
        let mut noise = None::<f64>;
        for (x, _) in &at {
            let point = line.points.iter().find(|p| labels::x(p) == *x);
            match point.and_then(|p| value(p)) {
                Some(spread) => {
                    noise = noise.into_iter().chain(spread.relative()).reduce(f64::max);
                    let _ = write!(row, "{:>8}", words(spread.median));
                }
                None => {
                    let _ = write!(row, "{:>8}", "");
                }
            }
        }
        let _ = writeln!(out, "{}", ending(row, noise, at.len()));
    }
}

fn ending(row: String, noise: Option<f64>, columns: usize) -> String {
    let wide = 2 + NAME + 8 * columns;
    format!("{row:wide$} {:>5}", plus_minus(noise))
}

/// `±3%`; beyond all measure, that it is; of single measurements, that they are.
fn plus_minus(share: Option<f64>) -> String {
    match share.map(|s| 100.0 * s) {
        None => "once".to_owned(),
        Some(p) if p < 99.5 => format!("±{p:.0}%"),
        _ => ">±99%".to_owned(),
    }
}

/// At most `most` of them, evenly, with both ends.
fn thin<T: Clone>(all: &[T], most: usize) -> Vec<T> {
    let step = |i: usize| i * (all.len() - 1) / (most - 1);
    match all.len() <= most {
        true => all.to_vec(),
        false => (0..most).map(|i| all[step(i)].clone()).collect(),
    }
}

/// Smallest messages: the distribution.
fn latency(out: &mut String, results: &Results, styled: bool) {
    let lines = labels::lines(&results.points, "latency", None);
    let Some(size) = lines.iter().flat_map(|l| &l.points).map(|p| p.size).min() else {
        return;
    };
    title(out, &format!("Latency of {}", units::size(size)), styled);
    let wanted = [0.0, 50.0, 90.0, 99.0, 99.9];
    let mut head = format!("  {:NAME$}", "");
    for p in wanted {
        let word = match p {
            0.0 => "min".to_owned(),
            p => format!("p{p}"),
        };
        let _ = write!(head, "{word:>9}");
    }
    let _ = match styled {
        true => writeln!(out, "\x1b[2m{head}\x1b[0m"),
        false => writeln!(out, "{head}"),
    };
    for line in &lines {
        let Some(point) = line.points.iter().find(|p| p.size == size) else {
            continue;
        };
        let mut row = format!("  {:NAME$}", line.name.short);
        for p in wanted {
            let at = results.percentiles.iter().position(|q| *q == p);
            let ns = at.and_then(|at| point.percentiles_ns.get(at));
            let word = ns.map_or("-".to_owned(), |ns| units::time(*ns));
            let _ = write!(row, "{word:>9}");
        }
        let noise = point.p50_ns.and_then(|s| s.relative());
        let _ = writeln!(out, "{row} {:>5}", plus_minus(noise));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::fixture;

    #[test]
    fn it_fits_80_columns_and_names_what_failed() {
        let mut results = fixture::results();
        results.points[0].failed = Some("it broke ".repeat(20));
        results
            .notes
            .push("A note that is long enough to be wrapped at some place: ".repeat(3));
        let text = summary(&results, false);
        for line in text.lines().chain(heading(&results).lines()) {
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert!(text.contains("FAILED: it broke"));
        assert!(text.contains("99.9"));
        for point in &mut results.points {
            point.repetitions.truncate(1);
            point.summarise();
        }
        let text = summary(&results, false);
        assert!(text.contains(" once\n") && !text.contains("±0%"), "{text}");
        assert_eq!(results.times(), "1");
    }

    #[test]
    fn many_columns_are_thinned_and_keep_their_ends() {
        let all: Vec<u32> = (0..20).collect();
        let few = thin(&all, 6);
        assert_eq!((few.len(), few[0], few[5]), (6, 0, 19));
        assert_eq!(thin(&all[..3], 6), [0, 1, 2]);
    }
}
