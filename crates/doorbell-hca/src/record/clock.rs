//! The one clock of flight records.
//!
//! The processor's time stamp counter where it runs at one rate on all cores (16 ns a reading, and the same in every process of
//! the host, so that their events can be put on one line), else the system's monotonic clock. Readers turn ticks into nanoseconds.

/// What a tick is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum ClockKind {
    /// A nanosecond of the monotonic clock.
    Monotonic = 0,
    /// A tick of the time stamp counter.
    Tsc = 1,
}

impl ClockKind {
    /// The clock of this machine.
    pub(super) fn here() -> Self {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            use std::sync::OnceLock;
            static KIND: OnceLock<ClockKind> = OnceLock::new();
            *KIND.get_or_init(|| {
                use core::arch::x86_64::__cpuid;
                // Bit 8 of 0x8000_0007: the counter's rate does not change with the core's frequency and sleep states.
                let invariant = __cpuid(0x8000_0000).eax >= 0x8000_0007
                    && __cpuid(0x8000_0007).edx & 1 << 8 != 0;
                match invariant {
                    true => Self::Tsc,
                    false => Self::Monotonic,
                }
            })
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        Self::Monotonic
    }

    /// Now, in ticks.
    #[inline(always)]
    pub(super) fn ticks(self) -> u64 {
        match self {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: every x86-64 processor has the counter, and reading it changes nothing.
            Self::Tsc => unsafe { core::arch::x86_64::_rdtsc() },
            #[cfg(not(all(target_arch = "x86_64", not(miri))))]
            Self::Tsc => monotonic_ns(),
            Self::Monotonic => monotonic_ns(),
        }
    }

    pub(super) fn from_word(word: u64) -> Option<Self> {
        match word {
            0 => Some(Self::Monotonic),
            1 => Some(Self::Tsc),
            _ => None,
        }
    }

    /// Ticks and nanoseconds of one moment: the tightest of a few tries.
    pub(super) fn pair(self) -> (u64, u64) {
        (0..5)
            .map(|_| {
                let before = self.ticks();
                let ns = monotonic_ns();
                let after = self.ticks();
                (after.wrapping_sub(before), before.midpoint(after), ns)
            })
            .min()
            .map_or((0, 0), |(_, ticks, ns)| (ticks, ns))
    }
}

/// Nanoseconds of the monotonic clock.
pub(super) fn monotonic_ns() -> u64 {
    #[cfg(not(miri))]
    {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        (t.tv_sec as u64)
            .saturating_mul(1_000_000_000)
            .saturating_add(t.tv_nsec as u64)
    }
    #[cfg(miri)]
    {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// Turns ticks into nanoseconds of the monotonic clock, by two moments of which both are known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    first: (u64, u64),
    second: (u64, u64),
}

impl Scale {
    /// By the moment at which a record was begun, and now.
    pub(super) fn since(kind: ClockKind, ticks: u64, ns: u64) -> Self {
        Self {
            first: (ticks, ns),
            second: kind.pair(),
        }
    }

    /// Nanoseconds; a tick out of all proportion gives a saturated answer, never a panic.
    pub(super) fn ns(&self, ticks: u64) -> u64 {
        let run = i128::from(self.second.0) - i128::from(self.first.0);
        let rise = i128::from(self.second.1) - i128::from(self.first.1);
        if run <= 0 || rise < 0 {
            return self.first.1;
        }
        let ns = i128::from(self.first.1)
            + (i128::from(ticks) - i128::from(self.first.0)).saturating_mul(rise) / run;
        u64::try_from(ns.max(0)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_the_nanoseconds_of_their_moment() {
        let kind = ClockKind::here();
        let (ticks, ns) = kind.pair();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let (then, then_ns) = kind.pair();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let scale = Scale::since(kind, ticks, ns);
        assert!(scale.ns(then).abs_diff(then_ns) < 1_000_000);
        assert_eq!(scale.ns(ticks), ns);
        // Nonsense from another process's memory.
        let mad = Scale {
            first: (u64::MAX, u64::MAX),
            second: (0, 0),
        };
        assert_eq!(mad.ns(7), u64::MAX);
        let steep = Scale {
            first: (0, 0),
            second: (1, u64::MAX),
        };
        assert_eq!(steep.ns(u64::MAX), u64::MAX);
    }
}
