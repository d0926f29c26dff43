//! Bounded waiting.
//!
//! Nothing here waits for ever: each wait has a deadline and a caller that says what happens at it.

use std::time::{Duration, Instant};

/// A point in time, which may be too far away to represent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// `timeout` from now.
    pub(crate) fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    /// Is it past?
    pub(crate) fn passed(self) -> bool {
        self.0.is_some_and(|at| Instant::now() >= at)
    }

    /// Time left, `Duration::MAX` when the deadline is unrepresentably far.
    pub(crate) fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |at| {
            at.saturating_duration_since(Instant::now())
        })
    }
}

/// Asks `done` until it answers `Some` or the deadline passes (`Ok(None)`).
///
/// Spins first since most device work is over in microseconds, then yields, then sleeps up to 200 µs, so that a wait
/// for a long kernel leaves the core to whoever feeds that kernel.
pub(crate) fn poll_until<T, E>(
    deadline: Deadline,
    mut done: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let mut rounds = 0u32;
    loop {
        // The deadline is read before asking: an answer that came in time is never thrown away.
        let late = deadline.passed();
        if let Some(value) = done()? {
            return Ok(Some(value));
        }
        if late {
            return Ok(None);
        }
        rounds = rounds.saturating_add(1);
        match rounds {
            0..256 => std::hint::spin_loop(),
            256..1024 => std::thread::yield_now(),
            _ => {
                let nap = Duration::from_micros(u64::from((rounds - 1000).min(200)));
                std::thread::sleep(nap.min(deadline.left()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_at_least_once_and_keeps_the_answer() {
        let got = poll_until(Deadline::after(Duration::ZERO), || Ok::<_, ()>(Some(7)));
        assert_eq!(got, Ok(Some(7)));
    }

    #[test]
    fn ends_at_the_deadline() {
        let mut asked = 0;
        let got = poll_until(Deadline::after(Duration::from_millis(5)), || {
            asked += 1;
            Ok::<Option<()>, ()>(None)
        });
        assert_eq!(got, Ok(None));
        assert!(asked > 1);
    }

    #[test]
    fn passes_errors_on() {
        let mut asked = 0;
        let got = poll_until(Deadline::after(Duration::MAX), || {
            asked += 1;
            if asked == 2000 {
                Err("broken")
            } else {
                Ok(None::<()>)
            }
        });
        assert_eq!(got, Err("broken"));
    }
}
