//! When to send again: intervals that double, and whose sum is the time that the connection was given.

use crate::Config;

/// The first interval where there is no total ("timeout 0"), ns, and the longest.
const ENDLESS: (u64, u64) = (4_000_000, 1_000_000_000);
/// The first interval need not be longer for the sake of a peer that does not run, ns: what was lost is missed for so long, whatever time there is.
const NAP: u64 = (4096 << 17) / 8;

#[derive(Clone, Debug)]
pub(crate) struct Timer {
    /// First interval.
    unit: u64,
    /// All intervals together; `None`: no end.
    total: Option<u64>,
    /// Tries after the first, at most.
    retries: u32,
    tries: u32,
    /// Since when nothing has come.
    started: u64,
    deadline: Option<u64>,
}

/// What a timer that ran out means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expired {
    Retry,
    Exhausted,
}

impl Timer {
    pub(crate) fn new(config: &Config) -> Self {
        let total = config.patience_ns();
        // 1 + 2 + 4 + … of retry_cnt + 1 intervals; but the first not shorter than an eighth of the configured time-out, or `NAP`: a peer that
        // shares its cores with others may not run for milliseconds, and what is sent again meanwhile is in its way.
        let units = (2_u64 << config.retry_cnt) - 1;
        let shortest = ((4096_u64 << config.timeout) / 8).min(NAP);
        Self {
            unit: total.map_or(ENDLESS.0, |t| (t / units).max(shortest)),
            total,
            retries: u32::from(config.retry_cnt),
            tries: 0,
            started: 0,
            deadline: None,
        }
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    pub(crate) fn stop(&mut self) {
        self.deadline = None;
        self.tries = 0;
    }

    /// A packet goes out: from now on an answer is expected, unless one already is.
    pub(crate) fn sent(&mut self, now: u64) {
        if self.deadline.is_none() {
            self.restart(now);
        }
    }

    /// An answer came, and more are expected.
    pub(crate) fn restart(&mut self, now: u64) {
        self.tries = 0;
        self.started = now;
        self.deadline = Some(now.saturating_add(self.unit));
    }

    /// Has the time run out?
    pub(crate) fn expire(&mut self, now: u64) -> Option<Expired> {
        if now < self.deadline? {
            return None;
        }
        let Some(total) = self.total else {
            self.tries = (self.tries + 1).min(16);
            let interval = (self.unit << self.tries).min(ENDLESS.1);
            self.deadline = Some(now.saturating_add(interval));
            return Some(Expired::Retry);
        };
        let end = self.started.saturating_add(total);
        // Whoever slept through all of it tries once more, a short one: the peer has had no chance.
        let overslept = now >= end && self.tries == 0;
        if self.tries >= self.retries || (now >= end && !overslept) {
            self.deadline = None;
            return Some(Expired::Exhausted);
        }
        self.tries += 1;
        self.deadline = Some(if overslept {
            now.saturating_add(self.unit)
        } else if self.tries == self.retries {
            // What the division into intervals left over is the last one's.
            end
        } else {
            end.min(now.saturating_add(self.unit << self.tries))
        });
        Some(Expired::Retry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum of the intervals is 4.096 µs · 2^timeout · (retry count + 1), to the nanosecond and whatever the retry count.
    #[test]
    fn tries_fill_the_configured_time_exactly() {
        for retry_cnt in 0..8 {
            let config = Config {
                timeout: 14,
                retry_cnt,
                ..Config::default()
            };
            let mut timer = Timer::new(&config);
            timer.sent(1_000);
            let mut tries = 0;
            let end = loop {
                let now = timer.deadline().expect("armed");
                match timer.expire(now).expect("due") {
                    Expired::Retry => tries += 1,
                    Expired::Exhausted => break now,
                }
            };
            assert_eq!(end - 1_000, (4096 << 14) * (u64::from(retry_cnt) + 1));
            // With an eighth of the time-out as the first, five or six fill the time of seven or eight.
            assert!(
                (retry_cnt.min(5)..=retry_cnt).contains(&tries),
                "{tries} of {retry_cnt}"
            );
        }
    }

    #[test]
    fn a_peer_that_is_given_long_is_asked_again_early() {
        for timeout in 17..=19 {
            let config = Config {
                timeout,
                retry_cnt: 7,
                ..Config::default()
            };
            let mut timer = Timer::new(&config);
            timer.sent(0);
            let first = timer.deadline().expect("armed");
            assert!((60_000_000..70_000_000).contains(&first), "{first}");
            let mut end = 0;
            while let Some(now) = timer.deadline() {
                end = now;
                timer.expire(now).expect("due");
            }
            assert_eq!(end, (4096 << timeout) * 8);
        }
    }

    #[test]
    fn timeout_zero_never_gives_up() {
        let config = Config {
            timeout: 0,
            ..Config::default()
        };
        let mut timer = Timer::new(&config);
        timer.sent(0);
        for _ in 0..10_000 {
            let now = timer.deadline().expect("armed");
            assert_eq!(timer.expire(now), Some(Expired::Retry));
            assert!(timer.deadline().expect("armed") - now <= ENDLESS.1);
        }
    }
}
