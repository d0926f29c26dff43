//! The top of the page: what it is, on what it was measured, the figures that are quoted.

use std::fmt::Write as _;

use super::super::labels;
use super::super::plot::escape;
use super::super::results::{Point, Results, Spread};
use super::plus_minus;
use crate::units;

pub(super) fn write(out: &mut String, results: &Results) {
    let e = &results.environment;
    let gpu = match e.gpu.as_deref() {
        Some("host") | None => "GPU played by host threads",
        Some(name) => name,
    };
    let kind = if results.quick {
        "Quick sweep"
    } else {
        "Sweep"
    };
    let _ = write!(
        out,
        "<header>\n<p class=\"brand\">Doorbell</p>\n<h1>{kind}</h1>\n<p class=\"sub\">{} · {} · {} CPUs · {}</p>\n",
        escape(gpu),
        escape(e.cpu.as_deref().unwrap_or("unknown processor")),
        e.cpus,
        escape(&e.started.replace('T', " ").replace('Z', " UTC"))
    );
    notes(out, results);
    out.push_str("</header>\n");
    let cards = cards(results);
    if !cards.is_empty() {
        out.push_str("<section class=\"cards\" aria-label=\"Headline figures\">\n");
        for card in cards {
            let _ = writeln!(
                out,
                "<div class=\"card\"><p class=\"what\">{}</p><p class=\"value\">{}<span>{}</span></p><p class=\"how\">{}</p></div>",
                escape(card.what),
                escape(&card.value),
                escape(card.unit),
                escape(&card.how)
            );
        }
        out.push_str("</section>\n");
    }
}

/// What a reader has to know before believing a figure.
fn notes(out: &mut String, results: &Results) {
    let failed: Vec<&Point> = results
        .points
        .iter()
        .filter(|p| p.failed.is_some())
        .collect();
    let errors: u64 = results.points.iter().map(Point::errors).sum();
    let mut warnings = Vec::new();
    if results.environment.profile.as_deref() == Some("debug") {
        warnings.push(
            "A debug build was measured: its figures say nothing about a release.".to_owned(),
        );
    }
    if errors > 0 {
        warnings.push(format!(
            "{} messages were lost, doubled or wrong.",
            units::grouped(errors)
        ));
    }
    if !results.complete {
        warnings.push("This sweep is not complete.".to_owned());
    }
    for point in failed {
        warnings.push(format!(
            "{}: {}",
            point.command,
            point.failed.as_deref().unwrap_or_default()
        ));
    }
    if !warnings.is_empty() {
        out.push_str("<ul class=\"warn\">\n");
        for warning in &warnings {
            let _ = writeln!(out, "<li>{}</li>", escape(warning));
        }
        out.push_str("</ul>\n");
    }
    for note in &results.notes {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(note));
    }
}

struct Card {
    what: &'static str,
    value: String,
    unit: &'static str,
    how: String,
}

/// The best of each kind.
fn cards(results: &Results) -> Vec<Card> {
    let mut cards = Vec::new();
    let all = || results.points.iter().filter(|p| !p.repetitions.is_empty());
    let best =
        |experiment: &[&str], f: &dyn Fn(&Point) -> Option<Spread>| -> Option<(&Point, Spread)> {
            all()
                .filter(|p| experiment.contains(&p.experiment.as_str()))
                .filter_map(|p| Some((p, f(p)?)))
                .max_by(|a, b| a.1.median.total_cmp(&b.1.median))
        };
    if let Some((p, s)) = best(&["blocks", "sizes"], &|p| {
        p.messages_per_s.filter(|_| p.size == 8)
    }) {
        let (value, unit) = split(s.median, "puts/s");
        let who = match p.experiment.as_str() {
            "blocks" => format!(
                "{}, {} block{}",
                labels::of(p).long,
                p.blocks,
                plural(p.blocks)
            ),
            _ => labels::of(p).long,
        };
        cards.push(Card {
            what: "8-byte puts",
            value,
            unit,
            how: format!("{who} · {}", plus_minus(s.relative())),
        });
    }
    if let Some((p, s)) = best(&["sizes"], &|p| p.bytes_per_s) {
        let (value, unit) = split(s.median, "B/s");
        cards.push(Card {
            what: "Bandwidth",
            value,
            unit,
            how: format!(
                "{} each, {} · {}",
                units::size(p.size),
                labels::of(p).long,
                plus_minus(s.relative())
            ),
        });
    }
    let fastest = |link: &str| {
        all()
            .filter(|p| p.test == "put-lat" && p.link == link)
            .filter_map(|p| Some((p, p.p50_ns?)))
            .min_by(|a, b| a.1.median.total_cmp(&b.1.median))
    };
    for (link, what) in [
        ("shm", "Put latency, two processes"),
        ("roce", "Put latency, RoCE"),
    ] {
        if let Some((p, s)) = fastest(link) {
            let words = units::time(s.median);
            let (value, unit) = words.split_once(' ').unwrap_or((&words, ""));
            cards.push(Card {
                what,
                value: value.to_owned(),
                unit: match unit {
                    "ns" => " ns",
                    "µs" => " µs",
                    "ms" => " ms",
                    _ => " s",
                },
                how: format!(
                    "{}, median one way · {}",
                    units::size(p.size),
                    plus_minus(s.relative())
                ),
            });
        }
    }
    cards
}

fn plural(n: u64) -> &'static str {
    if n == 1 { "" } else { "s" }
}

/// `12.1` and ` M puts/s`, so that the number can be large and the unit small.
fn split(value: f64, of: &'static str) -> (String, &'static str) {
    let words = units::scaled(value);
    let (number, prefix) = words.split_once(' ').unwrap_or((&words, ""));
    let unit = match (prefix, of) {
        ("T", "B/s") => " TB/s",
        ("G", "B/s") => " GB/s",
        ("M", "B/s") => " MB/s",
        ("k", "B/s") => " kB/s",
        (_, "B/s") => " B/s",
        ("T", _) => " T puts/s",
        ("G", _) => " G puts/s",
        ("M", _) => " M puts/s",
        ("k", _) => " k puts/s",
        _ => " puts/s",
    };
    (number.to_owned(), unit)
}
