//! What the engine hands to the copy pipeline, and what comes back.

use std::{fmt, sync::Arc};

use doorbell_wire::Width;

use super::{Buffer, Dma};
use crate::{mem::Place, raw::Shared};

/// One work request whose bytes a copy engine moves. The ranges have been checked; they stay valid until
/// [`Event::Retired`].
pub struct Job {
    /// The QP: its jobs complete in the order in which they were started.
    pub qp: u32,
    /// Comes back in [`Event::Completed`] (the WQE's position).
    pub cookie: u64,
    /// Comes back in [`Event::Retired`] (the colour of the core's grace acknowledger).
    pub hold: bool,
    /// What is to be done.
    pub work: Work,
}

/// What a [`Job`] does.
pub enum Work {
    /// A WRITE or READ.
    Copy {
        /// Its pieces; they may be copied in any order.
        pieces: Pieces,
        /// Is this a signal, that is: must everything before it be visible first, and it before everything after it, even
        /// where writes are relaxed ([`super::WriteOrder::Relaxed`])? Inline writes and writes with immediate are.
        signal: bool,
    },
    /// An atomic on a word of device memory.
    Atomic {
        /// The word's device address.
        addr: u64,
        /// The engine that reaches it.
        dma: Arc<dyn Dma>,
        /// 4 or 8 bytes.
        width: Width,
        /// The new value from the old one.
        new: Box<dyn FnOnce(u64) -> u64 + Send>,
        /// Where the old value goes, if not only into [`Event::Completed`]: in host order for 8 bytes, big-endian for 4 (as mlx5's do).
        sink: Option<Place>,
    },
    /// An atomic on a word of host memory, by the CPU as soon as everything before it has ended. It holds nothing back: relaxed copies behind it
    /// may begin earlier ([`super::WriteOrder::Relaxed`]) unless they touch the word. The old value is in [`Event::Completed`].
    Word(Word),
}

/// An atomic by the CPU.
pub struct Word {
    /// The word, aligned.
    pub at: Shared<u8>,
    /// 4 or 8 bytes.
    pub width: Width,
    /// Where the old value goes, if not only into [`Event::Completed`]: in host order for 8 bytes, big-endian for 4.
    pub sink: Option<Shared<u8>>,
    /// The new value from the old one; called again if the word changed meanwhile.
    pub new: Box<dyn Fn(u64) -> u64 + Send>,
}

impl Word {
    pub(super) fn range(&self) -> Range {
        let start = self.at.addr() as u64;
        Range {
            start,
            end: start.saturating_add(u64::from(self.width.bytes())),
        }
    }
}

/// The pieces of a copy; nearly always one.
pub enum Pieces {
    /// One.
    One(Piece),
    /// Several.
    Many(Vec<Piece>),
}

impl Pieces {
    pub(super) fn get(&self, index: usize) -> Option<&Piece> {
        match self {
            Self::One(piece) => (index == 0).then_some(piece),
            Self::Many(pieces) => pieces.get(index),
        }
    }
}

/// A piece of a copy.
pub struct Piece {
    /// From.
    pub src: Source,
    /// To.
    pub dst: Place,
    /// Bytes.
    pub len: u64,
}

/// Addresses from `start` up to and without `end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Range {
    pub(super) fn is_apart(self, other: Self) -> bool {
        self.end <= other.start || other.end <= self.start
    }

    /// The smallest range that holds both; an empty one holds nothing.
    pub(super) fn hull(self, other: Self) -> Self {
        if self.start >= self.end {
            return other;
        }
        Self {
            start: self.start.min(other.start),
            end: self.end.max(other.end),
        }
    }
}

/// Ranges that do not overlap, in order.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    list: Vec<Range>,
    hull: Range,
}

impl Ranges {
    pub(super) fn clear(&mut self) {
        self.list.clear();
        self.hull = Range::default();
    }

    fn after(&self, start: u64) -> usize {
        self.list.partition_point(|r| r.end <= start)
    }

    pub(super) fn overlaps(&self, range: Range) -> bool {
        !self.hull.is_apart(range)
            && self
                .list
                .get(self.after(range.start))
                .is_some_and(|r| r.start < range.end)
    }

    /// Adds a range that overlaps none. Neighbours become one, so a run of puts in order stays short.
    pub(super) fn insert(&mut self, range: Range) {
        let at = if range.start >= self.hull.end {
            self.list.len()
        } else {
            self.after(range.start)
        };
        self.hull = self.hull.hull(range);
        if let Some(before) = at.checked_sub(1).and_then(|at| self.list.get_mut(at))
            && before.end == range.start
        {
            before.end = range.end;
        } else if let Some(after) = self.list.get_mut(at)
            && after.start == range.end
        {
            after.start = range.start;
        } else {
            self.list.insert(at, range);
        }
    }
}

impl Piece {
    /// What is read and what is written.
    pub(super) fn ranges(&self) -> (Range, Range) {
        let range = |place: &Place| {
            let start = match place {
                Place::Host(ptr) => ptr.addr() as u64,
                Place::Device { addr, .. } => *addr,
            };
            Range {
                start,
                end: start.saturating_add(self.len),
            }
        };
        let from = match &self.src {
            Source::Place(place) => range(place),
            Source::Inline(_) => Range::default(),
        };
        (from, range(&self.dst))
    }

    /// Does it read or write any of these bytes?
    pub(super) fn touches(&self, bytes: Range) -> bool {
        let (from, to) = self.ranges();
        !from.is_apart(bytes) || !to.is_apart(bytes)
    }
}

/// Where bytes come from.
pub enum Source {
    /// A registered region.
    Place(Place),
    /// The WQE itself.
    Inline(Box<[u8]>),
}

/// What the pipeline reports.
#[derive(Debug)]
pub enum Event {
    /// The oldest job of a QP ended: its bytes are visible. Write its CQE. After an error nothing more is reported for
    /// the QP until [`super::DmaCore::cancel`].
    Completed {
        /// The QP.
        qp: u32,
        /// The job.
        cookie: u64,
        /// How it ended.
        result: Result<(), Arc<DmaFailure>>,
        /// The value before an atomic.
        old: u64,
        /// The buffer that the job was given, if it ended well; otherwise the pipeline has it back.
        buffer: Option<Buffer>,
    },
    /// Nothing of a job is under way any more: its memory may go. Comes for every job once, possibly long after an error.
    Retired {
        /// Of the job.
        hold: bool,
    },
}

/// Why a copy failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaFailure {
    /// The copy engine refused or failed the batch.
    #[error("the copy engine failed: {0}")]
    Engine(String),
    /// The batch did not end in time.
    #[error(
        "a copy of {bytes} bytes ({what}) has not ended within {waited:.1?}. Likely causes: a kernel that spins while the copy needs an SM (a copy \
         within one GPU) or shares its stream's channel (more streams than CUDA_DEVICE_MAX_CONNECTIONS), another thread in cudaFree or \
         cudaMalloc, or a module that is loaded lazily while the kernel runs (set CUDA_MODULE_LOADING=EAGER)"
    )]
    Stalled {
        /// Direction and addresses.
        what: String,
        /// Bytes of the first copy of the batch.
        bytes: u64,
        /// The time it had.
        waited: std::time::Duration,
    },
    /// Another core or process held the word's lock all the time.
    #[error(
        "an atomic on device memory at {addr:#x} waited {waited:.1?} for another one on the same words"
    )]
    Locked {
        /// The word.
        addr: u64,
        /// The time it had.
        waited: std::time::Duration,
    },
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.work {
            Work::Copy { .. } => "copy",
            Work::Atomic { .. } | Work::Word(_) => "atomic",
        };
        write!(f, "{what} {:#x} of QP {:#08x}", self.cookie, self.qp)
    }
}

/// Writes the old value of an atomic to host memory.
///
/// # Safety
/// `at` is mapped for the width's bytes.
pub(crate) unsafe fn put_old(at: Shared<u8>, width: Width, old: u64) {
    let bytes = old_bytes(width, old);
    // SAFETY: the caller's promise.
    unsafe { crate::copy::write(at.as_ptr(), &bytes[..width.bytes() as usize]) };
}

/// The old value as the sink gets it.
pub(crate) fn old_bytes(width: Width, old: u64) -> [u8; 8] {
    match width {
        Width::Eight => old.to_ne_bytes(),
        Width::Four => {
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&(old as u32).to_be_bytes());
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn ranges_overlap_as_their_bytes_do(all in prop::collection::vec((0u64..200, 1u64..20), 1..60)) {
            let (mut ranges, mut bytes) = (Ranges::default(), [false; 256]);
            for (start, len) in all {
                let range = Range { start, end: start + len };
                let taken = (start..start + len).any(|b| bytes[b as usize]);
                prop_assert_eq!(ranges.overlaps(range), taken);
                if !taken {
                    ranges.insert(range);
                    (start..start + len).for_each(|b| bytes[b as usize] = true);
                }
            }
        }
    }
}
