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

/// Copies under way in a DMA engine also use resolved addresses.
pub(crate) trait CopiesUnderWay {
    /// Names the copies issued so far.
    fn mark(&self) -> u64;
    /// Are all copies issued before `mark` was taken done?
    fn passed(&self, mark: u64) -> bool;
}

/// The acknowledging side, one per core.
#[derive(Debug, Default)]
pub(crate) struct Acknowledger {
    /// Newest number acknowledged.
    acknowledged: u64,
    /// Number, and the copies it waits for.
    draining: Option<(u64, u64)>,
}

impl Acknowledger {
    /// Between two rounds: acknowledges what can be.
    #[inline(always)]
    pub(crate) fn round(
        &mut self,
        clock: &GraceClock,
        ack: &AtomicU64,
        copies: &impl CopiesUnderWay,
    ) {
        let now = clock.current();
        if now != self.acknowledged {
            self.advance(now, ack, copies);
        }
    }

    #[cold]
    fn advance(&mut self, now: u64, ack: &AtomicU64, copies: &impl CopiesUnderWay) {
        let (number, mark) = *self.draining.get_or_insert_with(|| (now, copies.mark()));
        if copies.passed(mark) {
            self.draining = None;
            self.acknowledged = number;
            // Release: everything this engine did with the old resolutions happened before.
            ack.store(number, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    #[derive(Default)]
    struct Copies {
        issued: Cell<u64>,
        done: Cell<u64>,
    }

    impl CopiesUnderWay for Copies {
        fn mark(&self) -> u64 {
            self.issued.get()
        }
        fn passed(&self, mark: u64) -> bool {
            self.done.get() >= mark
        }
    }

    #[test]
    fn an_engine_without_copies_acknowledges_at_once() {
        let (clock, ack, mut side) = (
            GraceClock::default(),
            AtomicU64::new(0),
            Acknowledger::default(),
        );
        let n = clock.begin();
        side.round(&clock, &ack, &Copies::default());
        assert_eq!(ack.load(Ordering::Relaxed), n);
    }

    #[test]
    fn copies_issued_before_hold_it_back_and_later_ones_do_not() {
        let (clock, ack, mut side) = (
            GraceClock::default(),
            AtomicU64::new(0),
            Acknowledger::default(),
        );
        let copies = Copies::default();
        copies.issued.set(1);
        let n = clock.begin();
        side.round(&clock, &ack, &copies);
        assert_eq!(
            ack.load(Ordering::Relaxed),
            0,
            "a copy issued before is under way"
        );
        copies.issued.set(2);
        copies.done.set(1);
        side.round(&clock, &ack, &copies);
        assert_eq!(
            ack.load(Ordering::Relaxed),
            n,
            "the newer copy does not matter"
        );
        let m = clock.begin();
        side.round(&clock, &ack, &copies);
        assert_eq!(ack.load(Ordering::Relaxed), n);
        copies.done.set(2);
        side.round(&clock, &ack, &copies);
        assert_eq!(ack.load(Ordering::Relaxed), m);
    }
}
