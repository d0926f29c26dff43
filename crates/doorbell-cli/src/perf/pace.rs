//! How many messages the next launch may have, and how much of the run is over: it ends in its time although a message may take nanoseconds or
//! milliseconds.
//!
//! The first launch is small, and each later one as large as the time that is left allows by the pace of those before it.

use std::time::{Duration, Instant};

use super::plan::{Case, Limit};

/// Seconds after which a quick run has no more launches, whatever they were spent on.
const LOOKED: f64 = 1.0;
/// Messages of the first launch: their time is nothing where messages are fast, and a fraction of a second where each takes milliseconds.
const FIRST: u64 = 64;
/// The next launch has at most so many times the messages of the one before: those of a short one are seldom at their full rate.
const GROWTH: u64 = 64;
/// A launch takes so long at most, so that somebody sees that something happens.
const LAUNCH: f64 = 2.0;

/// The pace of a run so far.
pub(crate) struct Pace {
    started: Instant,
    /// When it is over; `None`: when its messages are.
    time: Option<Duration>,
    /// Messages of the run, and those that are to come; without an end where its time ends it.
    all: u64,
    left: u64,
    last: u64,
    /// Seconds that a message took lately.
    each: f64,
}

impl Pace {
    pub(crate) fn new(case: &Case) -> Self {
        let (time, all) = match case.limit {
            Limit::Iters(n) => (case.quick.then(|| Duration::from_secs_f64(LOOKED)), n),
            Limit::Time(run) => (Some(run), u64::MAX),
        };
        Self {
            started: Instant::now(),
            time,
            all,
            left: all,
            last: 0,
            each: 0.0,
        }
    }

    /// Messages that are to come.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Messages of the next launch, at most `most`, at least one.
    pub(crate) fn next(&self, most: u64) -> u64 {
        let left = match self.time {
            Some(time) => time.saturating_sub(self.started.elapsed()).as_secs_f64(),
            None => LAUNCH,
        };
        self.within(most, left)
    }

    fn within(&self, most: u64, left: f64) -> u64 {
        if self.last == 0 {
            return FIRST.min(most);
        }
        // A float that is too large or not a number becomes the largest number, or zero.
        let fits = (left.min(LAUNCH) / self.each) as u64;
        let grown = self.last.saturating_mul(GROWTH);
        most.min(fits).min(grown).max(FIRST.min(most))
    }

    /// A launch of `messages` took so long.
    pub(crate) fn took(&mut self, messages: u64, time: Duration) {
        self.left -= messages;
        self.last = messages.max(1);
        self.each = time.as_secs_f64() / self.last as f64;
    }

    /// The share of the run that is over, by its time or its messages.
    pub(crate) fn share(&self) -> f64 {
        let messages = 1.0 - self.left as f64 / self.all as f64;
        self.time.map_or(messages, |time| {
            messages.max(self.started.elapsed().as_secs_f64() / time.as_secs_f64())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace() -> Pace {
        Pace {
            started: Instant::now(),
            time: Some(Duration::from_secs(1)),
            all: u64::MAX,
            left: u64::MAX,
            last: 0,
            each: 0.0,
        }
    }

    #[test]
    fn launches_grow_to_what_the_time_allows() {
        let mut pace = pace();
        assert_eq!(pace.within(16_384, 1.0), 64);
        assert_eq!(pace.within(10, 1.0), 10);
        // A microsecond each: as many as there may be.
        pace.took(64, Duration::from_micros(64));
        assert_eq!(pace.within(2_000, 1.0), 2_000);
        assert_eq!(pace.within(16_384, 1.0), 64 * GROWTH);
        pace.took(4096, Duration::from_micros(4096));
        assert_eq!(pace.within(16_384, 1.0), 16_384);
        // Five milliseconds each: what half a second holds, and never less than the first.
        pace.took(64, Duration::from_millis(320));
        assert_eq!(pace.within(16_384, 0.5), 100);
        assert_eq!(pace.within(16_384, 0.0), 64);
        assert_eq!(pace.within(16_384, 3600.0), 400);
    }

    #[test]
    fn a_launch_that_took_no_time_bounds_nothing() {
        let mut pace = pace();
        pace.took(1 << 20, Duration::ZERO);
        assert_eq!(pace.within(u64::MAX, 1.0), 64 << 20);
        assert!(pace.share() < 1.0);
    }
}
