//! CPU time of this process: what `cpu_cores_used` is made of.
//! The kernel's own account (user and system time of all threads), so spinning engines, host
//! GPU threads and proxies are all in it. Resolution is the scheduler's, well below a millisecond.

use std::time::{Duration, Instant};

/// A span of wall time and the CPU time this process used in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuClock {
    wall: Instant,
    cpu: Duration,
}

impl CpuClock {
    /// Starts now.
    pub(crate) fn start() -> Self {
        Self {
            cpu: process_cpu(),
            wall: Instant::now(),
        }
    }

    /// CPU time and wall time since the start.
    pub(crate) fn elapsed(&self) -> (Duration, Duration) {
        (process_cpu().saturating_sub(self.cpu), self.wall.elapsed())
    }
}

/// CPU time and wall time summed over several spans (rounds, processes).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CpuUse {
    pub(crate) cpu: Duration,
    pub(crate) wall: Duration,
}

impl CpuUse {
    /// Adds a span.
    pub(crate) fn add(&mut self, (cpu, wall): (Duration, Duration)) {
        self.cpu += cpu;
        self.wall += wall;
    }

    /// Cores kept busy on average; `None` when nothing was timed.
    pub(crate) fn cores(&self) -> Option<f64> {
        let wall = self.wall.as_secs_f64();
        (wall > 0.0).then(|| self.cpu.as_secs_f64() / wall)
    }
}

fn process_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_work_and_not_sleep() {
        let clock = CpuClock::start();
        let mut x = 1u64;
        // Work by CPU time, not wall time, so that a busy machine does not fail this.
        while clock.elapsed().0 < Duration::from_millis(20) {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        let (cpu, wall) = clock.elapsed();
        assert!(cpu >= Duration::from_millis(20), "{cpu:?} of {wall:?}");
        let mut used = CpuUse::default();
        assert!(used.cores().is_none());
        used.add((Duration::from_secs(3), Duration::from_secs(2)));
        assert_eq!(used.cores(), Some(1.5));
    }
}
