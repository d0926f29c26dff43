//! How long nothing may happen. Time in which the system kept a thread of the run waiting for a CPU is not counted: it is no news of anybody.
//!
//! A machine that has many times more to run than CPUs gives a process of low weight a few milliseconds in a second. The run is slow then, not stuck. Linux
//! counts for each thread how long it was ready to run and did not; where it does not say so, every moment counts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A thread that waited for a CPU for at least so much of a time had next to none...
const WAITED: f64 = 7.0 / 8.0;
/// ...which is the machine's doing where all threads together had less of one than this: those of a large grid take it from each other.
const HAD: f64 = 1.0 / 4.0;
/// Times that a time-out begins anew for that: there are machines on which nothing ever goes on.
const AGAIN: u32 = 8;

/// Waiting for something to happen.
pub(crate) struct Patience {
    limit: Duration,
    since: Instant,
    /// What threads had of a CPU, and waited for one, once a part of the time was over.
    before: Option<(Instant, Threads)>,
    again: u32,
}

/// Nanoseconds on a CPU and ready for one, by thread.
type Threads = BTreeMap<i32, (u64, u64)>;

impl Patience {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            since: Instant::now(),
            before: None,
            again: 0,
        }
    }

    /// Something happened.
    pub(crate) fn restart(&mut self) {
        *self = Self::new(self.limit);
    }

    /// For so long nothing did.
    pub(crate) fn idle(&self) -> Duration {
        self.since.elapsed()
    }

    /// What may pass until [`over`](Patience::over) is asked.
    pub(crate) fn slice(&self) -> Duration {
        let left = self.limit.saturating_sub(self.idle());
        left.min(self.limit / 8).max(Duration::from_millis(1))
    }

    /// Is the time over, of which these processes have had their share?
    pub(crate) fn over(&mut self, processes: &[u32]) -> bool {
        self.is_over(self.idle(), || read(processes))
    }

    fn is_over(&mut self, idle: Duration, read: impl FnOnce() -> Threads) -> bool {
        if idle < self.limit {
            // Reading takes a moment, and most waits are over before.
            if self.before.is_none() && idle >= self.limit / 8 {
                self.before = Some((Instant::now(), read()));
            }
            return false;
        }
        let Some((at, before)) = &self.before else {
            return true;
        };
        let (passed, now) = (at.elapsed(), read());
        if !starved(passed, before, &now) || self.again == AGAIN {
            return true;
        }
        self.again += 1;
        self.since = Instant::now();
        self.before = Some((self.since, now));
        false
    }
}

/// Did these threads get next to no CPU, some of them although they were ready?
fn starved(passed: Duration, before: &Threads, now: &Threads) -> bool {
    let grown = now.iter().map(|(thread, (had, waited))| {
        // One that is new began at zero.
        let (had_before, waited_before) = before.get(thread).copied().unwrap_or_default();
        (
            had.saturating_sub(had_before),
            waited.saturating_sub(waited_before),
        )
    });
    let (had, waited) = grown.fold((0u64, 0), |(sum, most), (had, waited)| {
        (sum.saturating_add(had), most.max(waited))
    });
    Duration::from_nanos(waited) >= passed.mul_f64(WAITED)
        && Duration::from_nanos(had) <= passed.mul_f64(HAD)
}

/// What the threads of these processes have had of a CPU, and how long they have been ready and did not run.
fn read(processes: &[u32]) -> Threads {
    let mut all = Threads::new();
    for process in processes {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else {
            continue;
        };
        for task in tasks.flatten() {
            let thread = task.file_name().to_str().and_then(|n| n.parse().ok());
            let text = std::fs::read_to_string(task.path().join("schedstat"));
            if let (Some(thread), Some(times)) = (thread, text.ok().as_deref().and_then(times)) {
                all.insert(thread, times);
            }
        }
    }
    all
}

/// Nanoseconds on a CPU and on a run queue; what follows is how often.
fn times(schedstat: &str) -> Option<(u64, u64)> {
    let mut words = schedstat.split_whitespace().map(str::parse);
    Some((words.next()?.ok()?, words.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(800);

    /// A wait of `LIMIT` in which each of `threads` had a CPU for a share of it, and waited for one for another; how often it began anew.
    fn began_anew(threads: i32, had: f64, waited: f64) -> u32 {
        let mut patience = Patience::new(LIMIT);
        let after = |times: u32| {
            let ns = |share: f64| (share * f64::from(times) * LIMIT.as_nanos() as f64) as u64;
            Threads::from_iter((0..threads).map(|thread| (thread, (ns(had), ns(waited)))))
        };
        assert!(!patience.is_over(LIMIT / 8, || after(0)));
        for times in 0.. {
            // As if the time had passed.
            let (at, before) = patience.before.take().expect("what they had before");
            patience.before = at.checked_sub(LIMIT).map(|at| (at, before));
            if patience.is_over(LIMIT, || after(times + 1)) {
                return times;
            }
        }
        unreachable!("it ends")
    }

    #[test]
    fn a_time_without_a_cpu_is_not_counted_and_not_for_ever() {
        assert_eq!(began_anew(1, 0.0, 0.0), 0);
        assert_eq!(began_anew(1, 0.5, 0.5), 0);
        assert_eq!(began_anew(3, 0.02, 1.5), AGAIN);
        // A grid on few CPUs: each thread has next to nothing, all together have what there is.
        assert_eq!(began_anew(32, 0.05, 1.5), 0);
    }

    #[test]
    fn what_happens_begins_it_anew_and_a_kernel_that_says_nothing_changes_nothing() {
        let mut patience = Patience::new(LIMIT);
        assert!(patience.is_over(LIMIT, Threads::new));
        patience.restart();
        assert!(!patience.is_over(LIMIT / 2, Threads::new));
        assert!(patience.is_over(LIMIT, Threads::new));
    }

    #[test]
    fn this_kernel_says_how_long_its_threads_waited() {
        assert_eq!(times("297612 48732 1\n"), Some((297_612, 48_732)));
        assert_eq!(times("297612"), None);
        let own = read(&[std::process::id()]);
        let listed = std::path::Path::new("/proc/self/schedstat").exists();
        assert_eq!(!own.is_empty(), listed);
    }
}
