//! Grace periods: how a deregistration knows that no engine still uses what it looked up before.
//! An engine acknowledges the current request between two rounds, when it holds no resolved address; a core that nobody drives holds
//! none either. This costs one load and, when something changed, one store a round.

use core::sync::atomic::{AtomicU64, Ordering};

/// The request side, one per HCA.
#[derive(Debug, Default)]
pub(crate) struct GraceClock {
    request: AtomicU64,
}

impl GraceClock {
    /// Starts a grace period; returns its number.
    pub(crate) fn begin(&self) -> u64 {
        // AcqRel: what the caller revoked before is visible to every engine that reads this number.
        self.request.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The newest number, for an engine between two rounds.
    #[inline(always)]
    pub(crate) fn current(&self) -> u64 {
        self.request.load(Ordering::Acquire)
    }
}

/// The acknowledging side, one per core.
///
/// Copies that a DMA engine still carries out count too: a number is acknowledged only when those issued before it was seen are
/// retired. Two colours of outstanding copies suffice: new ones take the other colour while the old ones drain.
#[derive(Debug, Default)]
pub(crate) struct Acknowledger {
    /// Newest number acknowledged.
    acknowledged: u64,
    /// Number waiting for the copies of the colour `!colour`.
    draining: Option<u64>,
    colour: bool,
    outstanding: [u64; 2],
}

impl Acknowledger {
    /// A copy was issued; give its colour back to [`Self::retired`].
    pub(crate) fn issued(&mut self) -> bool {
        self.outstanding[usize::from(self.colour)] += 1;
        self.colour
    }

    /// A copy of that colour is over.
    pub(crate) fn retired(&mut self, colour: bool) {
        let count = &mut self.outstanding[usize::from(colour)];
        debug_assert!(*count > 0, "a copy ended that was never issued");
        *count = count.saturating_sub(1);
    }

    /// Between two rounds: acknowledges what can be.
    #[inline(always)]
    pub(crate) fn round(&mut self, clock: &GraceClock, ack: &AtomicU64) {
        let now = clock.current();
        if now != self.acknowledged {
            self.advance(now, ack);
        }
    }

    #[cold]
    fn advance(&mut self, now: u64, ack: &AtomicU64) {
        if self.draining.is_none() {
            self.draining = Some(now);
            self.colour = !self.colour;
        }
        let old = usize::from(!self.colour);
        if self.outstanding[old] == 0
            && let Some(number) = self.draining.take()
        {
            self.acknowledged = number;
            // Release: everything this engine did with the old resolutions happened before.
            ack.store(number, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_without_copies_acknowledges_at_once() {
        let (clock, ack) = (GraceClock::default(), AtomicU64::new(0));
        let mut side = Acknowledger::default();
        let n = clock.begin();
        side.round(&clock, &ack);
        assert_eq!(ack.load(Ordering::Relaxed), n);
    }

    #[test]
    fn copies_issued_before_hold_it_back_and_later_ones_do_not() {
        let (clock, ack) = (GraceClock::default(), AtomicU64::new(0));
        let mut side = Acknowledger::default();
        let old = side.issued();
        let n = clock.begin();
        side.round(&clock, &ack);
        assert_eq!(
            ack.load(Ordering::Relaxed),
            0,
            "a copy issued before is under way"
        );
        let new = side.issued();
        assert_ne!(old, new);
        side.retired(old);
        side.round(&clock, &ack);
        assert_eq!(
            ack.load(Ordering::Relaxed),
            n,
            "the newer copy does not matter"
        );
        let m = clock.begin();
        side.round(&clock, &ack);
        assert_eq!(ack.load(Ordering::Relaxed), n);
        side.retired(new);
        side.round(&clock, &ack);
        assert_eq!(ack.load(Ordering::Relaxed), m);
    }
}
