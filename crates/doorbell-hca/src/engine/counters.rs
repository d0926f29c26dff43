//! What an engine core counts: one writer, relaxed stores.

use crate::qp::shared::Counter;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// What an engine core has done.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct CoreCounters { $($(#[$doc])* pub $name: u64,)* }

        #[derive(Debug, Default)]
        pub(crate) struct AtomicCoreCounters { $(pub(crate) $name: Counter,)* }

        impl AtomicCoreCounters {
            pub(crate) fn snapshot(&self) -> CoreCounters {
                CoreCounters { $($name: self.$name.get(),)* }
            }
        }
    };
}

counters! {
    /// Rounds in which something was done.
    busy_rounds;
    /// Turns given to QPs that had something to do.
    turns;
    /// Times the engine slept because there was nothing to do.
    sleeps;
    /// QPs that went to error.
    errors;
}
