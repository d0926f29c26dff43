//! Whether the engine of this process still goes round.
//!
//! Its threads sleep for moments only, so a count of rounds that stands still means that one waits in a call that does not return, or was stopped.
//! A process that is stopped as a whole blames nobody for that time: then this look stood still too.

use std::time::{Duration, Instant};

/// A look at the engine's cores.
pub(crate) struct Pulse {
    /// How long a core may stand still.
    limit: Duration,
    looked: Instant,
    /// Rounds of each core, and since when it has been so many.
    cores: Vec<(u64, Instant)>,
    told: bool,
}

impl Pulse {
    /// Zero: nothing is ever said.
    pub(crate) fn new(limit: Duration, now: Instant) -> Self {
        Self {
            limit,
            looked: now,
            cores: Vec::new(),
            told: false,
        }
    }

    /// The rounds of all cores, `None` for a dead one (which is told otherwise): what is to be reported, once.
    pub(crate) fn look(
        &mut self,
        rounds: impl Iterator<Item = Option<u64>>,
        now: Instant,
    ) -> Option<String> {
        let stood_still = now.saturating_duration_since(self.looked) > self.limit / 4;
        self.looked = now;
        let mut found = None;
        for (core, rounds) in rounds.enumerate() {
            if self.cores.len() <= core {
                self.cores.push((0, now));
            }
            let (seen, since) = &mut self.cores[core];
            match rounds {
                Some(rounds) if rounds == *seen && !stood_still => {
                    let time = now.saturating_duration_since(*since);
                    if time >= self.limit {
                        found.get_or_insert((core, time));
                    }
                }
                rounds => (*seen, *since) = (rounds.unwrap_or(0), now),
            }
        }
        let (core, time) = found.filter(|_| !self.told && !self.limit.is_zero())?;
        self.told = true;
        Some(format!(
            "engine core {core} of this process has stood still for {:.1} s: it waits in a call of the GPU's driver that does not return (cudaMalloc, cudaFree or \
             the loading of a kernel beside kernels that wait?), or its thread was stopped; DOORBELL_NCCL_ALIVE sets the time, 0 switches this off",
            time.as_secs_f64()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_stands_still_is_told_once_and_nothing_else_is() {
        let start = Instant::now();
        let at = |tenths: u64| start + Duration::from_millis(100 * tenths);
        let mut pulse = Pulse::new(Duration::from_secs(2), start);
        // All go round; then the second does not; the third is dead.
        for t in 0..30 {
            let rounds = [Some(t + 1), Some(1 + t.min(5)), None];
            let said = pulse.look(rounds.into_iter(), at(t));
            assert_eq!(said.is_some(), t == 25, "{t}: {said:?}");
            assert!(said.is_none_or(|s| s.contains("core 1") && s.contains("2.0 s")));
        }
        // Nor is one that goes on after a while, however often.
        let mut pulse = Pulse::new(Duration::from_secs(2), start);
        for t in 0..200 {
            assert_eq!(pulse.look([Some(t / 19)].into_iter(), at(t)), None);
        }
        // All of the process was stopped: its watch too.
        let mut pulse = Pulse::new(Duration::from_secs(2), start);
        for t in [0, 1, 2, 300, 301, 302, 310, 315, 319] {
            assert_eq!(pulse.look([Some(7)].into_iter(), at(t)), None);
        }
        // Switched off.
        let mut pulse = Pulse::new(Duration::ZERO, start);
        for t in 0..50 {
            assert_eq!(pulse.look([Some(7)].into_iter(), at(t)), None);
        }
    }
}
