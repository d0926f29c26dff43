//! What the machine does without any of this: copies by one CPU thread, a word sent to and fro.
//!
//! A figure says little alone; beside what the same memory path allows, measured in the same run,
//! it says what the queue, the engine and the checks cost.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::stats;

/// How long a baseline is measured.
const SPAN: Duration = Duration::from_millis(100);

/// Nanoseconds that one thread takes to copy `size` bytes, cycling through `window` messages on
/// each side as the measured case does.
pub(crate) fn memcpy_ns(size: u64, window: u64) -> f64 {
    let (size, window) = (size as usize, window.max(1) as usize);
    let from = vec![0x5a_u8; size * window];
    let mut to = vec![0_u8; size * window];
    let mut copies = 0u64;
    // Once through, so that every page is there.
    to.copy_from_slice(&from);
    let start = Instant::now();
    // The clock is looked at once in about 64 KiB, so that small copies are not measured by it.
    let chunk = (65_536 / size).clamp(1, 1024);
    let mut at = 0;
    while start.elapsed() < SPAN {
        for _ in 0..chunk {
            let range = at * size..(at + 1) * size;
            // Opaque, or the optimiser merges neighbouring copies.
            let source = std::hint::black_box(&from[range.clone()]);
            to[range].copy_from_slice(source);
            at += 1;
            if at == window {
                at = 0;
            }
        }
        copies += chunk as u64;
    }
    std::hint::black_box(&to);
    start.elapsed().as_nanos() as f64 / copies as f64
}

/// A cache line of its own, or two words would travel together.
#[repr(align(128))]
struct Line(AtomicU64);

/// Median nanoseconds of a word's round trip between two CPU threads through memory: the least
/// that two spinning threads can take. The second runs on CPU `other` if this process is bound to
/// one. `None` with one processor, where nothing can spin for another.
pub(crate) fn ping_pong_ns(timeout: Duration, other: Option<usize>) -> Option<f64> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus < 2 && other.is_none() {
        return None;
    }
    const ROUNDS: u64 = 20_000;
    let (there, back) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    let deadline = Instant::now() + timeout;
    let mut samples = Vec::with_capacity(ROUNDS as usize);
    std::thread::scope(|scope| {
        let echo = || {
            if let Some(cpu) = other {
                // Where that is refused, both share a processor, and the figure shows it.
                let _ = crate::pin::to(cpu);
            }
            for round in 1..=ROUNDS {
                if !await_value(&there.0, round, deadline) {
                    return;
                }
                back.0.store(round, Ordering::Release);
            }
        };
        // Without a second thread there is no figure.
        if std::thread::Builder::new()
            .spawn_scoped(scope, echo)
            .is_err()
        {
            return;
        }
        for round in 1..=ROUNDS {
            let start = Instant::now();
            there.0.store(round, Ordering::Release);
            if !await_value(&back.0, round, deadline) {
                return;
            }
            samples.push(start.elapsed().as_nanos() as u64);
        }
    });
    stats::summarise(&mut samples).map(|l| l.p50 as f64)
}

fn await_value(word: &AtomicU64, value: u64, deadline: Instant) -> bool {
    let mut spins = 0u32;
    while word.load(Ordering::Acquire) != value {
        spins += 1;
        if spins.is_multiple_of(1024) {
            if Instant::now() > deadline {
                return false;
            }
            // The other thread may wait for this very processor.
            std::thread::yield_now();
        }
        spin_loop();
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_counted() {
        for (size, window) in [(8, 512), (1 << 20, 1), (100_000, 3)] {
            let ns = memcpy_ns(size, window);
            assert!(ns.is_finite() && ns > 0.0, "{size}: {ns}");
        }
    }

    #[test]
    fn a_round_trip_ends() {
        if let Some(ns) = ping_pong_ns(Duration::from_secs(20), None) {
            assert!(ns > 0.0);
        }
    }
}
