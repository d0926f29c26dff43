//! A result file as a set of figures, each with all its measurements.
//!
//! A sweep has repetitions. `doorbell perf --json` measures a case once, unless it is asked for several times (`--size 8,8,8`): rows
//! that are the same case are its repetitions.

use std::path::Path;

use anyhow::{Context as _, Result, bail};

use crate::schema::{self, Environment, Outcome, Report};
use crate::sweep::results::{self, Point};
use crate::sweep::{files, labels};
use crate::{json, units};

/// What was measured of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Metric {
    /// Messages a second.
    Rate,
    /// Median and 99th percentile, nanoseconds.
    P50,
    P99,
}

impl Metric {
    pub(super) const ALL: [Self; 3] = [Self::Rate, Self::P50, Self::P99];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::P50 => "p50",
            Self::P99 => "p99",
        }
    }

    pub(super) fn more_is_better(self) -> bool {
        self == Self::Rate
    }
}

/// One figure.
pub(super) struct Figure {
    /// What makes it the same case in another file.
    pub(super) key: String,
    /// The case in words.
    pub(super) what: String,
    pub(super) metric: Metric,
    pub(super) values: Vec<f64>,
    /// It was tried, and failed.
    pub(super) failed: bool,
}

/// A file.
pub(super) struct Set {
    pub(super) schema: String,
    pub(super) environment: Environment,
    pub(super) figures: Vec<Figure>,
}

/// Reads either kind.
pub(super) fn read(file: &Path) -> Result<Set> {
    let wanted = "a results.json of `doorbell sweep`, or a file of `doorbell perf --json`";
    let value = json::read(file, wanted)?;
    parse(value).with_context(|| file.display().to_string())
}

fn parse(value: serde_json::Value) -> Result<Set> {
    match json::schema(&value)? {
        results::SCHEMA => Ok(of_sweep(files::parse(value)?)),
        schema::SCHEMA => {
            let report: Report = serde_json::from_value(value)
                .with_context(|| format!("it says {} and is not", schema::SCHEMA))?;
            Ok(of_perf(report))
        }
        other => bail!(
            "its schema is {other}: {} and {} can be compared",
            results::SCHEMA,
            schema::SCHEMA
        ),
    }
}

fn of_sweep(results: results::Results) -> Set {
    let mut figures = Vec::new();
    for point in &results.points {
        let (key, what) = (key(point), what(point));
        let latency = point.test.ends_with("-lat");
        let mut add = |metric, f: &dyn Fn(&results::Repetition) -> Option<f64>| {
            figures.push(Figure {
                key: key.clone(),
                what: what.clone(),
                metric,
                values: point.repetitions.iter().filter_map(f).collect(),
                failed: point.failed.is_some(),
            });
        };
        match latency {
            false => add(Metric::Rate, &|r| r.messages_per_s),
            true => {
                add(Metric::P50, &|r| r.latency_ns.map(|l| l.p50 as f64));
                add(Metric::P99, &|r| r.latency_ns.map(|l| l.p99 as f64));
            }
        }
    }
    Set {
        schema: results.schema,
        environment: results.environment,
        figures,
    }
}

fn key(p: &Point) -> String {
    format!(
        "{} {} {} {} {} {} {}x{} {} {} {} {}",
        p.experiment,
        p.test,
        p.initiator,
        p.sharing,
        p.link,
        p.mem,
        p.blocks,
        p.threads,
        p.qps,
        p.depth,
        p.batch,
        p.size
    )
}

fn what(p: &Point) -> String {
    let line = labels::of(p).short;
    match p.experiment.as_str() {
        "blocks" => format!("{line}, {} blocks", p.blocks),
        "queues" => format!("{} open queue pairs", p.qps),
        "latency" => format!("{line}, {}", units::size(p.size)),
        "gets" => format!("get, {line}, {}", units::size(p.size)),
        _ => format!("put, {line}, {}", units::size(p.size)),
    }
}

fn of_perf(report: Report) -> Set {
    let mut figures: Vec<Figure> = Vec::new();
    for outcome in &report.results {
        let (key, what) = (perf_key(outcome), perf_what(outcome));
        let values = [
            (Metric::Rate, outcome.messages_per_s),
            (Metric::P50, outcome.latency_ns.map(|l| l.p50 as f64)),
            (Metric::P99, outcome.latency_ns.map(|l| l.p99 as f64)),
        ];
        for (metric, value) in values {
            let Some(value) = value else { continue };
            match figures
                .iter_mut()
                .find(|f| f.key == key && f.metric == metric)
            {
                Some(figure) => figure.values.push(value),
                None => figures.push(Figure {
                    key: key.clone(),
                    what: what.clone(),
                    metric,
                    values: vec![value],
                    failed: false,
                }),
            }
        }
    }
    Set {
        schema: report.schema,
        environment: report.environment,
        figures,
    }
}

fn perf_key(o: &Outcome) -> String {
    format!(
        "{} {} {} {} {:?} {:?} {}x{} {} {} {} {} {}",
        o.test,
        o.gpu,
        o.initiator,
        o.sharing,
        o.link,
        o.mem,
        o.blocks,
        o.threads,
        o.qps,
        o.depth,
        o.batch,
        o.size,
        o.checked
    )
}

fn perf_what(o: &Outcome) -> String {
    let link = o.link.as_deref().unwrap_or("no engine");
    format!(
        "{} {} {}x{} {}, {link}",
        o.test,
        o.initiator,
        o.blocks,
        o.threads,
        units::size(o.size)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::fixture;

    #[test]
    fn every_point_of_a_sweep_is_a_figure_of_its_own() {
        let results = fixture::results();
        let points = results.points.len();
        let set = of_sweep(results);
        let latencies = set
            .figures
            .iter()
            .filter(|f| f.metric == Metric::P50)
            .count();
        assert_eq!(set.figures.len(), points + latencies);
        let mut keys: Vec<_> = set
            .figures
            .iter()
            .map(|f| (&f.key, f.metric.name()))
            .collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), set.figures.len());
    }

    #[test]
    fn other_files_are_refused_with_what_they_are() {
        for (text, part) in [
            ("[", "no JSON"),
            ("{}", "no schema"),
            (r#"{"schema":"doorbell-doctor/1"}"#, "doorbell-doctor/1"),
            (r#"{"schema":"doorbell-perf/1"}"#, "and is not"),
        ] {
            let error = format!("{:#}", json::parse(text).and_then(parse).err().unwrap());
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
