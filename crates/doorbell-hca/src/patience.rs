//! How long is waited in vain: once for whoever does not answer, not once for each thing that is closed.
//!
//! A queue pair or region that goes waits for an engine core, and one that peers map for them. With thousands of them, a core that is stalled
//! would be waited for thousands of times. So the time that was waited in vain is kept, and what is left of [`HcaConfig::drop_timeout`] shrinks
//! until there is an answer, or the core makes a round again.
//!
//! [`HcaConfig::drop_timeout`]: crate::HcaConfig::drop_timeout

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What is left for somebody who has no pulse to go by: a peer that lives again answers within that.
const LEAST: Duration = Duration::from_millis(1);

/// For one who may not answer.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// Nanoseconds waited since the last answer.
    spent: AtomicU64,
    /// Their pulse when that was last added to.
    pulse: AtomicU64,
}

impl Patience {
    /// What is left of `all` for somebody with that pulse: a number that stands still in who is not there. `None`: they have none.
    pub(crate) fn left(&self, all: Duration, pulse: Option<u64>) -> Duration {
        let spent = self.spent.load(Ordering::Relaxed);
        match pulse {
            _ if spent == 0 => all,
            Some(pulse) if pulse != self.pulse.load(Ordering::Relaxed) => all,
            Some(_) => all.saturating_sub(Duration::from_nanos(spent)),
            None => all.saturating_sub(Duration::from_nanos(spent)).max(LEAST),
        }
    }

    /// There was no answer for so long.
    pub(crate) fn in_vain(&self, waited: Duration, pulse: Option<u64>) {
        let pulse = pulse.unwrap_or(0);
        // What was waited before a round that they made since counts no more.
        if self.pulse.swap(pulse, Ordering::Relaxed) != pulse {
            self.spent.store(0, Ordering::Relaxed);
        }
        self.spent
            .fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }

    /// There was one.
    pub(crate) fn answered(&self) {
        if self.spent.load(Ordering::Relaxed) != 0 {
            self.spent.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Duration = Duration::from_secs(2);
    const ONE: Duration = Duration::from_secs(1);

    #[test]
    fn all_that_goes_shares_what_there_is() {
        let core = Patience::default();
        assert_eq!(core.left(ALL, Some(7)), ALL);
        core.in_vain(ONE, Some(7));
        assert_eq!(core.left(ALL, Some(7)), ONE);
        core.in_vain(ONE, Some(7));
        assert_eq!(core.left(ALL, Some(7)), Duration::ZERO);
        core.answered();
        assert_eq!(core.left(ALL, Some(7)), ALL);
    }

    #[test]
    fn one_who_lives_again_is_waited_for_again() {
        let core = Patience::default();
        core.in_vain(ALL, Some(7));
        assert_eq!(core.left(ALL, Some(8)), ALL);
        core.in_vain(ONE, Some(8));
        assert_eq!(core.left(ALL, Some(8)), ONE);
    }

    #[test]
    fn peers_have_no_pulse_and_are_asked_at_least() {
        let peers = Patience::default();
        peers.in_vain(ALL, None);
        assert_eq!(peers.left(ALL, None), LEAST);
    }
}
