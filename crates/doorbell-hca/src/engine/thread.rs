//! The engine thread of a core: rounds for ever, backing off when there is nothing to do.
//! A GPU cannot wake a sleeper, so sleeps are short and bounded; the first work ends the back-off.

use core::sync::atomic::Ordering;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::IdlePolicy;
use crate::hca::Inner;
use crate::place;

pub(crate) fn spawn(
    inner: Arc<Inner>,
    core: usize,
    cpu: Option<usize>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(format!("doorbell-hca-{core}"))
        .spawn(move || {
            if let Some(cpu) = cpu {
                place::bind_current_thread(cpu);
            }
            run(&inner, core);
        })
        .map_err(crate::limits::thread)
}

fn run(inner: &Inner, index: usize) {
    let slot = &inner.cores[index];
    slot.set_thread();
    // Held for life: callers who find it free know that this thread is gone.
    let mut core = slot.lock_core();
    let lived = slot.guarded(&mut core, inner, |core| {
        let mut idle = Idle::default();
        while !inner.stop.load(Ordering::Relaxed) {
            if core.round(inner) {
                idle = Idle::default();
            } else if idle.pause(&inner.config.idle) {
                slot.counters.sleeps.add(1);
                core.watch();
            }
        }
    });
    drop(core);
    if lived.is_none() {
        // Kernels of foreign code do not look at the error, and go on posting.
        while !inner.stop.load(Ordering::Relaxed) && slot.drain_dead() {
            std::thread::sleep(DRAIN_PAUSE);
        }
    }
}

/// Between two looks of a dead engine at what kernels still post.
const DRAIN_PAUSE: Duration = Duration::from_micros(100);

/// How long there has been nothing to do.
#[derive(Default)]
struct Idle {
    rounds: u32,
    since: Option<Instant>,
    nap: Duration,
}

impl Idle {
    /// `true` if it slept.
    fn pause(&mut self, policy: &IdlePolicy) -> bool {
        core::hint::spin_loop();
        self.rounds = self.rounds.wrapping_add(1);
        // Reading the clock costs as much as a round: only now and then.
        if !self.rounds.is_multiple_of(16) && self.nap.is_zero() {
            return false;
        }
        let idle = self.since.get_or_insert_with(Instant::now).elapsed();
        if idle < policy.spin {
            return false;
        }
        if idle < policy.spin + policy.yield_for || policy.sleep_max.is_zero() {
            std::thread::yield_now();
            return false;
        }
        self.nap = (self.nap * 2).clamp(Duration::from_micros(1), policy.sleep_max);
        std::thread::sleep(self.nap);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backs_off_in_order_and_stays_bounded() {
        let policy = IdlePolicy {
            spin: Duration::ZERO,
            yield_for: Duration::ZERO,
            sleep_max: Duration::from_micros(4),
        };
        let mut idle = Idle::default();
        let slept = (0..64).filter(|_| idle.pause(&policy)).count();
        assert!(slept > 0);
        assert!(idle.nap <= policy.sleep_max);
        let never = IdlePolicy {
            sleep_max: Duration::ZERO,
            ..policy
        };
        let mut idle = Idle::default();
        assert!((0..64).all(|_| !idle.pause(&never)));
    }
}
