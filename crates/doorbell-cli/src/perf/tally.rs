//! What a case has measured so far, and its result.

use super::bench::Bench;
use super::check::Verdict;
use super::plan::Case;
use crate::args::Test;
use crate::cputime::CpuUse;
use crate::schema::{Outcome, Roce};
use crate::stats;

/// Sums over the rounds of a case.
#[derive(Default)]
pub(crate) struct Tally {
    /// Seconds in which kernels ran.
    pub(crate) seconds: f64,
    pub(crate) messages: u64,
    pub(crate) cpu: CpuUse,
    /// Nanoseconds, one a message, in latency tests.
    pub(crate) samples: Vec<u64>,
    /// Bytes that were compared, canaries included.
    pub(crate) compared: u64,
    pub(crate) errors: u64,
    /// The first faults in words.
    pub(crate) faults: Vec<String>,
    /// What else is worth a line below the row.
    pub(crate) notes: Vec<String>,
    /// What the RoCE link counted.
    pub(crate) roce: Option<Roce>,
}

/// A case's result and what was wrong.
pub(crate) struct Measured {
    pub(crate) outcome: Outcome,
    pub(crate) compared: u64,
    pub(crate) faults: Vec<String>,
    /// What else is worth a line below the row.
    pub(crate) notes: Vec<String>,
    /// Of a latency test: the samples at [`stats::PERCENTILES`].
    pub(crate) percentiles: Vec<u64>,
}

impl Tally {
    /// At most so many faults are told; all are counted.
    pub(crate) const TOLD: usize = 5;

    /// Something was wrong that is not a byte.
    pub(crate) fn fault(&mut self, text: String) {
        self.errors = self.errors.saturating_add(1);
        self.tell(text);
    }

    /// A fault that was counted.
    pub(crate) fn tell(&mut self, text: String) {
        if self.faults.len() < Self::TOLD {
            self.faults.push(text);
        }
    }

    /// A region was compared.
    pub(crate) fn verdict(&mut self, whose: &str, verdict: Verdict) {
        // The far side's numbers may be any: what is wrong never counts up to nothing.
        self.compared = self.compared.saturating_add(verdict.bytes);
        self.errors = self.errors.saturating_add(verdict.wrong);
        if let Some(first) = verdict.first {
            let wrong = crate::units::grouped(verdict.wrong);
            self.tell(format!(
                "{whose}: {wrong} wrong bytes, the first at {first}"
            ));
        }
    }

    /// The result.
    pub(crate) fn measured(
        mut self,
        case: &Case,
        bench: &Bench,
        baseline_ns: Option<f64>,
    ) -> Measured {
        let latency = case.test.is_latency();
        let rate = (!latency && self.seconds > 0.0).then(|| self.messages as f64 / self.seconds);
        let post = case.test == Test::Post;
        let initiator = match (&case.foreign, case.initiator.name()) {
            (None, name) => name.to_owned(),
            (Some(module), name) => format!("{name}:{module}"),
        };
        let outcome = Outcome {
            test: case.test.name().to_owned(),
            gpu: bench.gpu_label(),
            initiator,
            sharing: case.sharing.name().to_owned(),
            link: (!post).then(|| case.link.name().to_owned()),
            mem: (!post).then(|| case.mem.name().to_owned()),
            blocks: case.blocks.into(),
            threads: case.threads.into(),
            qps: case.qps.into(),
            depth: case.depth.into(),
            batch: case.batch.into(),
            size: case.size,
            messages: self.messages,
            seconds: self.seconds,
            messages_per_s: rate,
            bytes_per_s: rate.filter(|_| !post).map(|r| r * case.size as f64),
            latency_ns: stats::summarise(&mut self.samples),
            cpu_cores_used: self.cpu.cores(),
            baseline_ns,
            checked: case.check,
            errors: self.errors,
            roce: self.roce,
        };
        Measured {
            outcome,
            compared: self.compared,
            faults: self.faults,
            notes: self.notes,
            // The summary has sorted them.
            percentiles: stats::percentiles(&self.samples),
        }
    }
}
