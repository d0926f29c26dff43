//! What the machine does without queues, measured in the same run as what stands beside it.
//!
//! A figure says little alone: for bandwidths the baseline is a copy over the same memory path by
//! a CPU thread or the GPU's copy engine, for latencies a word sent to and fro through memory.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use doorbell::Place as Memory;
use doorbell_gpu::{Copier, CopyOp};

use super::bench::Bench;
use super::plan::Case;
use super::{baseline, forward};
use crate::args::{Place, Test};

/// Copies of a batch, as the HCA submits them.
const BATCH: u64 = 256;
/// How long copies are measured.
const SPAN: Duration = Duration::from_millis(200);
/// Bytes on each side beyond which no cache holds them.
const WORKING_SET: u64 = 64 << 20;
/// Rounds of a bare round trip.
const ROUNDS: u64 = 20_000;

/// What a copy's speed depends on: size, places, and where the two sides lie.
type Path = (u64, u64, Place, Place);

/// What was measured already, by what it depends on.
#[derive(Default)]
pub(crate) struct Baselines {
    copies: Vec<(Path, Option<f64>)>,
    round_trips: Vec<(String, Option<f64>)>,
    /// The CPU that the second process is bound to.
    other_cpu: Option<usize>,
}

impl Baselines {
    pub(crate) fn new(other_cpu: Option<usize>) -> Self {
        Self {
            other_cpu,
            ..Self::default()
        }
    }

    /// Nanoseconds to copy one message of `case` over its memory path.
    pub(crate) fn rate(&mut self, case: &Case, bench: &Bench) -> Result<Option<f64>> {
        if !case.baseline || case.test == Test::AtomicRate {
            return Ok(None);
        }
        // As many windows as the threads have, up to where it no longer matters.
        let places = case.places() * case.grid();
        let places = places.min((WORKING_SET / case.size).max(case.places()));
        let key = (case.size, places, case.local_mem, case.mem);
        if let Some((_, found)) = self.copies.iter().find(|(k, _)| *k == key) {
            return Ok(*found);
        }
        let on_gpu = case.mem == Place::Gpu || case.local_mem == Place::Gpu;
        let ns = match bench.device.gpu().copier() {
            Some(copier) if on_gpu => Some(copy_engine(case, bench, &copier)?),
            _ => Some(baseline::memcpy_ns(case.size, places)),
        };
        self.copies.push((key, ns));
        Ok(ns)
    }

    /// Median nanoseconds of a word's round trip: CPU to GPU and back, or between two CPU threads.
    pub(crate) fn round_trip(&mut self, case: &Case, bench: &Bench) -> Result<Option<f64>> {
        if !case.baseline {
            return Ok(None);
        }
        let key = bench.gpu_label();
        if let Some((_, found)) = self.round_trips.iter().find(|(k, _)| *k == key) {
            return Ok(*found);
        }
        let ns = if bench.device.gpu().is_cuda() {
            let mut samples = forward::bare(bench, ROUNDS, case.timeout)?;
            crate::stats::summarise(&mut samples).map(|l| l.p50 as f64)
        } else {
            baseline::ping_pong_ns(case.timeout, self.other_cpu)
        };
        self.round_trips.push((key, ns));
        Ok(ns)
    }
}

/// Nanoseconds a message by the copy engine alone: from GPU memory, into it, or (both ends in one
/// GPU, where copies go through host memory) both.
fn copy_engine(case: &Case, bench: &Bench, copier: &Copier) -> Result<f64> {
    let size = case.size as usize;
    let places = (BATCH as usize).min((64 << 20) / size).max(1);
    let gpu = bench.device.alloc(Memory::Gpu, size * places)?;
    let host = bench.device.alloc(Memory::Host, size * places)?;
    let op = |from: &doorbell::Memory, to: &doorbell::Memory, i: usize| CopyOp {
        dst: to.device_addr() + (i * size) as u64,
        src: from.device_addr() + (i * size) as u64,
        len: size as u64,
    };
    let all = |from: &doorbell::Memory, to: &doorbell::Memory| -> Vec<CopyOp> {
        (0..places).map(|i| op(from, to, i)).collect()
    };
    let (source, target) = match case.test {
        Test::GetBw => (case.mem, case.local_mem),
        _ => (case.local_mem, case.mem),
    };
    let mut batches = Vec::new();
    if source == Place::Gpu {
        batches.push(all(&gpu, &host));
    }
    if target == Place::Gpu {
        batches.push(all(&host, &gpu));
    }
    let mut messages = 0;
    let mut pending = std::collections::VecDeque::new();
    let start = Instant::now();
    while start.elapsed() < SPAN {
        for ops in &batches {
            // SAFETY: both memories are larger than every range and outlive the tickets, which are waited for below.
            pending.push_back(unsafe { copier.submit(ops) }?);
        }
        messages += places;
        // Two rounds under way, as an engine that is not idle has.
        while pending.len() > 2 * batches.len() {
            let ticket = pending.pop_front().context("no copy is under way")?;
            copier.wait(ticket, case.timeout)?;
        }
    }
    for ticket in pending {
        copier.wait(ticket, case.timeout)?;
    }
    Ok(start.elapsed().as_nanos() as f64 / messages as f64)
}
