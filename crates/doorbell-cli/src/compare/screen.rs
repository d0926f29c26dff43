//! The comparison as text, 80 columns wide.

use std::fmt::Write as _;

use super::noise::Verdict;
use super::{Change, Comparison, Side};
use crate::{table, units};

/// Room for a case in words.
const WHAT: usize = 33;

/// All of it; figures that did not change only if `all`.
pub(super) fn text(c: &Comparison, all: bool, styled: bool) -> String {
    let mut out = String::new();
    for (name, side) in [("before", &c.before), ("after ", &c.after)] {
        for line in wrapped(&format!("{name}  {}", describe(side))) {
            let _ = writeln!(out, "{line}");
        }
    }
    for difference in &c.differences {
        for line in wrapped(&format!("        {difference}")) {
            let _ = writeln!(out, "{line}");
        }
    }
    let shown: Vec<&Change> = [
        Verdict::Failed,
        Verdict::Worse,
        Verdict::Better,
        Verdict::Unknown,
        Verdict::Same,
    ]
    .into_iter()
    .filter(|v| all || *v != Verdict::Same)
    .flat_map(|v| c.figures.iter().filter(move |f| f.verdict == v))
    .collect();
    if !shown.is_empty() {
        let head = format!(
            "{:8}{:WHAT$}{:5}{:>8} {:>8} {:>7} {:>6}",
            "", "", "", "before", "after", "change", "noise"
        );
        let rule = "─".repeat(78);
        let _ = match styled {
            true => writeln!(out, "\n\x1b[1m{head}\x1b[0m\n\x1b[2m{rule}\x1b[0m"),
            false => writeln!(out, "\n{head}\n{rule}"),
        };
    }
    for change in shown {
        let _ = writeln!(out, "{}", row(change, styled));
    }
    let _ = writeln!(out);
    for line in table::wrap(&summary(c), crate::out::columns()) {
        let _ = writeln!(out, "{line}");
    }
    out
}

/// Wrapped, further lines under the first one's words.
fn wrapped(text: &str) -> Vec<String> {
    let (head, rest) = text.split_at(8);
    let mut lines = table::wrap(rest, 72).into_iter();
    let mut out = vec![format!("{head}{}", lines.next().unwrap_or_default())];
    out.extend(lines.map(|line| format!("{:8}{line}", "")));
    out
}

fn describe(side: &Side) -> String {
    let git = side
        .git
        .as_ref()
        .map_or(String::new(), |g| format!(" ({g})"));
    format!(
        "{}, {}, doorbell {}{git}",
        side.file,
        side.started.replace('T', " ").replace('Z', " UTC"),
        side.version
    )
}

fn row(c: &Change, styled: bool) -> String {
    let (word, colour) = match c.verdict {
        Verdict::Worse => ("worse", "31"),
        Verdict::Better => ("better", "32"),
        Verdict::Same => ("same", "2"),
        Verdict::Unknown => ("unsure", "33"),
        Verdict::Failed => ("failed", "31"),
    };
    let value = |s: Option<crate::sweep::results::Spread>| match (s, c.metric) {
        (None, _) => "-".to_owned(),
        (Some(s), "rate") => units::scaled(s.median),
        (Some(s), _) => units::time(s.median),
    };
    let change = c.ratio.map_or("-".to_owned(), percent);
    let noise = c
        .noise
        .map_or("-".to_owned(), |n| format!("±{:.0}%", 100.0 * n));
    let word = match styled {
        true => format!("\x1b[{colour}m{word:8}\x1b[0m"),
        false => format!("{word:8}"),
    };
    format!(
        "{word}{:WHAT$}{:5}{:>8} {:>8} {change:>7} {noise:>6}",
        c.what,
        c.metric,
        value(c.before),
        value(c.after)
    )
}

/// `+12%`; of a large factor the factor.
fn percent(ratio: f64) -> String {
    match ratio {
        r if r >= 3.0 => format!("x{r:.1}"),
        r => format!("{:+.0}%", 100.0 * (r - 1.0)),
    }
}

fn summary(c: &Comparison) -> String {
    let all = c.figures.len();
    let changed = c.worse + c.better;
    let mut text = match changed {
        0 => format!("None of {all} figures changed beyond noise."),
        n => format!(
            "{n} of {all} figures changed beyond noise: {} worse, {} better.",
            c.worse, c.better
        ),
    };
    if c.failed > 0 {
        let _ = write!(text, " {} failed in the second file only.", c.failed);
    }
    if c.unknown > 0 {
        let _ = write!(
            text,
            " {} have a single measurement or none on a side, which has no noise to compare with: repeat them (docs/sweep.md).",
            c.unknown
        );
    }
    let (before, after) = (c.only_before.len(), c.only_after.len());
    if before + after > 0 {
        let _ = write!(
            text,
            " {before} are only in the first file, {after} only in the second."
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::results::Spread;

    #[test]
    fn it_fits_80_columns_and_shows_what_is_worse_first() {
        let spread = |v: f64| {
            Some(Spread {
                median: v,
                min: v,
                max: v,
                times: 3,
            })
        };
        let change = |verdict, what: &str| Change {
            what: what.into(),
            metric: "rate",
            before: spread(123.4e6),
            after: spread(999.9e6),
            repetitions: [3, 3],
            ratio: Some(8.1),
            noise: Some(0.031),
            verdict,
        };
        let side = || Side {
            file: "some/folder/with/a/long/name/results.json".into(),
            started: "2026-01-02T03:04:05Z".into(),
            version: "0.1.0".into(),
            git: Some("abcdef012345".into()),
        };
        let comparison = Comparison {
            schema: super::super::SCHEMA,
            before: side(),
            after: side(),
            differences: vec!["kernel: Linux 6.1, then Linux 6.12 ".repeat(4)],
            worse: 1,
            better: 1,
            same: 1,
            unknown: 1,
            failed: 1,
            only_before: vec!["x".into()],
            only_after: Vec::new(),
            figures: vec![
                change(Verdict::Same, "put, shm, 8 B"),
                change(Verdict::Better, "get, loopback, GPU memory, 256 KiB"),
                change(Verdict::Worse, "put+signal, loopback, 32 KiB"),
                change(Verdict::Unknown, "put, roce, 8 B"),
                change(Verdict::Failed, "put, roce, 64 B"),
            ],
        };
        let some = text(&comparison, false, false);
        for line in some.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert!(some.find("worse ").unwrap() < some.find("better ").unwrap());
        assert!(!some.contains("same "));
        assert!(text(&comparison, true, false).contains("same "));
        assert!(some.contains("2 of 5 figures changed"));
        let flat = some.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains("1 failed in the second file only."), "{some}");
    }
}
