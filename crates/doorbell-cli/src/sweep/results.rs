//! `doorbell-sweep/1`: the result file of `doorbell sweep`.
//!
//! One object with `schema`, `environment` and `points`. A point is a case that was measured `repetitions` times, spread over the
//! run, so that their spread contains what the machine did meanwhile. Fields may be added within version 1, never renamed or
//! removed; an absent figure is null.

use serde::{Deserialize, Serialize};

use crate::schema::{Environment, Latency};

/// The name and version every result file opens with.
pub(crate) const SCHEMA: &str = "doorbell-sweep/1";

/// The whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) schema: String,
    pub(crate) environment: Environment,
    /// A short sweep (`--quick`).
    pub(crate) quick: bool,
    /// Every point was measured as often as was asked for; false: it was ended early, or a point failed.
    pub(crate) complete: bool,
    /// Times that each point was to be measured.
    pub(crate) repeat: u32,
    /// Seconds that the sweep took.
    pub(crate) seconds: f64,
    /// What a reader should know: why it is not complete, what was left out.
    pub(crate) notes: Vec<String>,
    /// Percentiles at which `points[].percentiles_ns` are given.
    pub(crate) percentiles: Vec<f64>,
    pub(crate) points: Vec<Point>,
}

/// A case and what was measured of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    /// `blocks`, `sizes`, `gets`, `latency` or `queues`.
    pub(crate) experiment: String,
    /// As in `doorbell perf`: what was run.
    pub(crate) test: String,
    /// `host`, or the GPU's name.
    pub(crate) gpu: String,
    pub(crate) initiator: String,
    pub(crate) sharing: String,
    pub(crate) link: String,
    pub(crate) mem: String,
    pub(crate) blocks: u64,
    pub(crate) threads: u64,
    pub(crate) qps: u64,
    pub(crate) depth: u64,
    pub(crate) batch: u64,
    /// Bytes a message.
    pub(crate) size: u64,
    /// The command that measures this point's series once.
    pub(crate) command: String,
    /// Messages a second, bytes a second, and CPU cores kept busy: over the repetitions.
    pub(crate) messages_per_s: Option<Spread>,
    pub(crate) bytes_per_s: Option<Spread>,
    pub(crate) cpu_cores_used: Option<Spread>,
    /// Median and 99th percentile of a latency test, nanoseconds: over the repetitions.
    pub(crate) p50_ns: Option<Spread>,
    pub(crate) p99_ns: Option<Spread>,
    /// The distribution, nanoseconds: at each percentile the median of the repetitions. Empty for rates.
    pub(crate) percentiles_ns: Vec<f64>,
    /// What the machine does without queues: ns to copy one message, or of a word's round trip. The median of the repetitions that measured it.
    pub(crate) baseline_ns: Option<f64>,
    /// Why it could not be measured.
    pub(crate) failed: Option<String>,
    pub(crate) repetitions: Vec<Repetition>,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Repetition {
    /// Seconds since the sweep began.
    pub(crate) at_s: f64,
    pub(crate) messages: u64,
    pub(crate) seconds: f64,
    pub(crate) messages_per_s: Option<f64>,
    pub(crate) latency_ns: Option<Latency>,
    pub(crate) cpu_cores_used: Option<f64>,
    /// Lost, doubled or failed messages.
    pub(crate) errors: u64,
    /// The same without queues, measured beside it; see the point's.
    #[serde(default)]
    pub(crate) baseline_ns: Option<f64>,
    /// The distribution of this repetition; it goes into the point's.
    #[serde(skip)]
    pub(crate) percentiles_ns: Vec<u64>,
}

/// Several measurements of one thing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// How many they are; 0: an older file does not say.
    #[serde(default)]
    pub(crate) times: u64,
}

impl Spread {
    /// Of these; nothing of nothing.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        Some(Self {
            median: median(&values)?,
            min,
            max,
            times: values.len() as u64,
        })
    }

    /// Half of the range, as a share of the median; nothing of a single measurement, which has no range.
    pub(crate) fn relative(&self) -> Option<f64> {
        match self.median > 0.0 {
            _ if self.times == 1 => None,
            true => Some((self.max - self.min) / 2.0 / self.median),
            false => Some(0.0),
        }
    }
}

/// The middle of sorted values, or the mean of the two in the middle.
pub(crate) fn median(sorted: &[f64]) -> Option<f64> {
    let half = sorted.len() / 2;
    let upper = *sorted.get(half)?;
    Some(match sorted.len() % 2 {
        1 => upper,
        _ => f64::midpoint(sorted[half - 1], upper),
    })
}

impl Results {
    /// How often the points were measured, of those that did not fail: `3`, or `1 to 3`.
    pub(crate) fn times(&self) -> String {
        let well = self.points.iter().filter(|p| p.failed.is_none());
        let counts: Vec<usize> = well.map(|p| p.repetitions.len()).collect();
        match (counts.iter().min(), counts.iter().max()) {
            (Some(least), Some(most)) if least != most => format!("{least} to {most}"),
            (_, Some(all)) => all.to_string(),
            _ => "0".to_owned(),
        }
    }

    /// In the middle of all rates and medians: half of the range over the repetitions, as a share.
    pub(crate) fn usual_noise(&self) -> Option<f64> {
        let of = |p: &Point| p.messages_per_s.or(p.p50_ns)?.relative();
        Spread::of(self.points.iter().filter_map(of)).map(|s| s.median)
    }
}

impl Point {
    /// The figures that follow from the repetitions.
    pub(crate) fn summarise(&mut self) {
        let reps = &self.repetitions;
        let of = |f: &dyn Fn(&Repetition) -> Option<f64>| Spread::of(reps.iter().filter_map(f));
        self.messages_per_s = of(&|r| r.messages_per_s);
        self.bytes_per_s = of(&|r| r.messages_per_s.map(|m| m * self.size as f64));
        self.cpu_cores_used = of(&|r| r.cpu_cores_used);
        self.p50_ns = of(&|r| r.latency_ns.map(|l| l.p50 as f64));
        self.p99_ns = of(&|r| r.latency_ns.map(|l| l.p99 as f64));
        self.baseline_ns = self.baseline().map(|s| s.median).or(self.baseline_ns);
        let many = reps
            .iter()
            .map(|r| r.percentiles_ns.len())
            .max()
            .unwrap_or(0);
        self.percentiles_ns = (0..many)
            .filter_map(|at| {
                let column = reps
                    .iter()
                    .filter_map(|r| r.percentiles_ns.get(at).map(|ns| *ns as f64));
                Spread::of(column).map(|s| s.median)
            })
            .collect();
    }

    /// CPU nanoseconds of all processes of the run for each message.
    pub(crate) fn cpu_ns_per_message(&self) -> Option<Spread> {
        Spread::of(self.repetitions.iter().filter_map(|r| {
            let rate = r.messages_per_s.filter(|m| *m > 0.0)?;
            Some(r.cpu_cores_used? * 1e9 / rate)
        }))
    }

    /// What the machine did without queues, over the repetitions.
    pub(crate) fn baseline(&self) -> Option<Spread> {
        Spread::of(self.repetitions.iter().filter_map(|r| r.baseline_ns))
    }

    pub(crate) fn errors(&self) -> u64 {
        self.repetitions.iter().map(|r| r.errors).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ranges() {
        let spread = Spread::of([3.0, 1.0, 2.0, f64::NAN]).unwrap();
        assert_eq!((spread.min, spread.median, spread.max), (1.0, 2.0, 3.0));
        assert_eq!(spread.relative(), Some(0.5));
        assert_eq!(Spread::of([3.0]).unwrap().relative(), None);
        assert_eq!(Spread::of([1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(Spread::of([]), None);
    }

    /// Readers rely on these names.
    #[test]
    fn the_fields_are_the_schemas() {
        let text = serde_json::to_value(sample()).unwrap();
        let keys = |v: &serde_json::Value| -> Vec<String> {
            v.as_object().unwrap().keys().cloned().collect()
        };
        let mut wanted = [
            "experiment",
            "test",
            "gpu",
            "initiator",
            "sharing",
            "link",
            "mem",
            "blocks",
            "threads",
            "qps",
            "depth",
            "batch",
            "size",
            "command",
            "messages_per_s",
            "bytes_per_s",
            "cpu_cores_used",
            "p50_ns",
            "p99_ns",
            "percentiles_ns",
            "baseline_ns",
            "failed",
            "repetitions",
        ];
        wanted.sort_unstable();
        let mut found = keys(&text["points"][0]);
        found.sort_unstable();
        assert_eq!(found, wanted);
        let mut found = keys(&text);
        found.sort_unstable();
        assert_eq!(
            found,
            [
                "complete",
                "environment",
                "notes",
                "percentiles",
                "points",
                "quick",
                "repeat",
                "schema",
                "seconds"
            ]
        );
        let mut found = keys(&text["points"][0]["repetitions"][0]);
        found.sort_unstable();
        assert_eq!(
            found,
            [
                "at_s",
                "baseline_ns",
                "cpu_cores_used",
                "errors",
                "latency_ns",
                "messages",
                "messages_per_s",
                "seconds"
            ]
        );
        let back: Results = serde_json::from_value(text).unwrap();
        assert_eq!(back.points[0].messages_per_s.unwrap().median, 1.1e7);
    }

    fn sample() -> Results {
        super::super::fixture::results()
    }
}
