//! The flight recorder: what an engine did with each queue pair, and when, for whoever asks afterwards.
//!
//! Every queue pair has a ring of its latest events ([`Kind`]), written by its core as it goes: doorbells seen, ranges executed, ranges
//! completed, errors. Beside it stand the indexes, a copy of what waits in the queue, the memory regions, and who waits for what. All of it
//! lies in a file (`dir`) that survives the process, so that one that was killed can be read like one that hangs.
//!
//! * `layout`: where everything is. `store`: the memory. `tape`: what the engine writes.
//! * [`read`]: reading a record, of this process or of another, believing nothing. `sane`: signs that one is damaged.
//! * [`waits`]: waits that name themselves.

mod clock;
pub mod dir;
mod layout;
pub mod read;
mod sane;
mod store;
mod tape;
pub mod waits;

pub use read::{BadRecord, CoreRecord, Event, Park, QpRecord, Record, RegionRecord, Still, Target};
pub use waits::{WaitKind, WaitRecord, Waiting};

pub(crate) use store::Store;
pub(crate) use tape::{Beat, Description, Numbered, Standing, Tape};

/// Nanoseconds of the monotonic clock, which all times of records are in.
pub fn now_ns() -> u64 {
    clock::monotonic_ns()
}

/// What an HCA records, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recording {
    /// Nothing.
    Off,
    /// In memory that goes with the process.
    Memory {
        /// Base-two logarithm of the events kept for a queue pair, 5 to 20.
        log_events: u32,
    },
    /// In a file that survives the process, where there is room for one; see [`dir`].
    File {
        /// As above.
        log_events: u32,
        /// Number by which peers know the HCA; part of the file's name.
        id: u64,
    },
}

impl Recording {
    /// Events of a queue pair unless said otherwise, as a logarithm.
    pub const LOG_EVENTS: u32 = 8;

    pub(crate) fn check(&self) -> Result<(), String> {
        match self {
            Self::Memory { log_events } | Self::File { log_events, .. }
                if !(5..=20).contains(log_events) =>
            {
                Err(format!(
                    "2^{log_events} recorded events a queue pair were asked for, 2^5 to 2^20 are possible"
                ))
            }
            _ => Ok(()),
        }
    }
}

impl Default for Recording {
    fn default() -> Self {
        Self::Memory {
            log_events: Self::LOG_EVENTS,
        }
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $n:literal, $text:literal;)*) => {
        /// What an event says of its slots.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Kind { $($(#[$doc])* $name = $n,)* }

        impl Kind {
            /// One word.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            pub(crate) const fn from_u8(n: u8) -> Option<Self> {
                match n { $($n => Some(Self::$name),)* _ => None }
            }

            /// The kind of that name.
            pub fn named(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// The engine saw them written while no doorbell covered them. Value: none.
    Posted = 1, "posted";
    /// A doorbell announced them.
    Rung = 2, "rung";
    /// Executed and complete. Value: bytes.
    Executed = 3, "executed";
    /// Handed to a copy engine or a connection. Value: bytes.
    Issued = 4, "issued";
    /// What had been issued is complete.
    Completed = 5, "completed";
    /// Rung, executed and complete, all within one reading of the clock. Value: bytes.
    Done = 6, "done";
    /// The first error, at the first slot. Value: syndrome, vendor syndrome << 8, opcode << 16.
    Error = 7, "error";
    /// Completed in error because an earlier one failed.
    Flushed = 8, "flushed";
    /// Set aside. Value: [`Park`].
    Parked = 9, "parked";
    /// A scripted fault was carried out. Value: the number of its rule, from 1.
    Fault = 10, "fault";
    /// The queue pair changed its state. Value: the new one.
    State = 11, "state";
}

impl Kind {
    /// May an event follow another of the same time as one?
    #[inline(always)]
    const fn joins(self) -> bool {
        matches!(
            self,
            Self::Executed | Self::Issued | Self::Completed | Self::Done | Self::Flushed
        )
    }
}
