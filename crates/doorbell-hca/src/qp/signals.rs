//! Words that a kernel spins on, which [`OnError::Release`](super::OnError::Release) moves past anything that may be awaited.
//!
//! A kernel of foreign device code waits for a signal without looking at errors: `while (*word < expected)`. When the queue pair that
//! was to raise it has failed, bit 62 of the word is set, and with it every comparison for "at least" holds. NCCL's barriers compare the lower 32 bits
//! alone, and as numbers that wrap: those move on by 2^30. What the kernel reads afterwards is not data; the host has been told before.

use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::dma::{Dma, DmaOp, Staging};
use crate::error::{HcaError, Result};
use crate::mem::{Keep, Memory};
use crate::raw::Shared;

/// What a released word has at least: above every value that counts something, and positive as a signed number.
pub const RELEASED: u64 = 1 << 62;

/// How far the lower half moves, for those who compare it alone: further than anything awaited, and less than half of what 32 bits count.
const LOWER: u64 = 1 << 30;

/// What releasing makes of a word; nothing, if it is released already.
pub fn released(word: u64) -> u64 {
    match word & RELEASED {
        0 => word.wrapping_add(LOWER) | RELEASED,
        _ => word,
    }
}

/// Words of 64 bits that a kernel may wait for.
#[derive(Clone)]
pub struct Signals {
    place: Place,
    words: usize,
    _keep: Keep,
}

#[derive(Clone)]
enum Place {
    Host(Shared<u64>),
    /// A copy engine reaches them; what it copies there was made ready when the queue pair was, as nothing may be allocated while a
    /// kernel spins.
    Device {
        addr: u64,
        dma: Arc<dyn Dma>,
        source: Staging,
    },
}

impl fmt::Debug for Signals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Host(at) => write!(f, "{} words at {at:?}", self.words),
            Place::Device { addr, .. } => write!(f, "{} words of a GPU at {addr:#x}", self.words),
        }
    }
}

impl Signals {
    /// The words in bytes `range` of some memory.
    ///
    /// # Errors
    /// [`HcaError::BadQp`] if they are no aligned words inside it, or the copy engine has no memory to copy from.
    ///
    /// # Safety
    /// As for [`Hca::register`](crate::Hca::register): the memory stays mapped until its `keep` is dropped, and whoever else accesses
    /// the words does so with atomics.
    pub unsafe fn new(memory: &Memory, range: Range<usize>) -> Result<Self> {
        let bad = |why: String| HcaError::BadQp {
            what: format!("signals at bytes {range:?}: {why}"),
        };
        let len = memory.len();
        if range.start >= range.end || range.end > len {
            return Err(bad(format!("they are not inside memory of {len} bytes")));
        }
        let size = range.end - range.start;
        let aligned = |addr: u64| (addr | size as u64).is_multiple_of(8);
        let unaligned = "they must be whole words of 8 bytes, aligned to 8".to_owned();
        let (place, keep) = match memory {
            Memory::Host { ptr, keep, .. } | Memory::Shared { ptr, keep, .. } => {
                // SAFETY: inside the memory.
                let at = unsafe { ptr.byte_add(range.start) };
                if !aligned(at.addr() as u64) {
                    return Err(bad(unaligned));
                }
                (Place::Host(at.cast()), keep)
            }
            Memory::Device {
                addr, dma, keep, ..
            } => {
                let addr = addr + range.start as u64;
                if !aligned(addr) {
                    return Err(bad(unaligned));
                }
                let source = dma.staging(size).map_err(bad)?;
                // SAFETY: the staging is ours and has `size` bytes; it is aligned as memory of copy engines is.
                unsafe {
                    for i in 0..size / 8 {
                        source.ptr.cast::<u64>().add(i).write_unaligned(released(0));
                    }
                }
                let dma = Arc::clone(dma);
                (Place::Device { addr, dma, source }, keep)
            }
        };
        Ok(Self {
            place,
            words: size / 8,
            _keep: Arc::clone(keep),
        })
    }

    /// Lets whoever waits go on.
    pub(crate) fn release(&self) {
        match &self.place {
            Place::Host(at) => {
                for i in 0..self.words {
                    // SAFETY: inside the memory, which `_keep` keeps mapped, and aligned; others access it with atomics.
                    let word = unsafe { AtomicU64::from_ptr(at.word(i).as_ptr()) };
                    let (set, get) = (Ordering::AcqRel, Ordering::Acquire);
                    let _ = word.fetch_update(set, get, |old| Some(released(old)));
                }
            }
            Place::Device { addr, dma, source } => {
                let op = DmaOp {
                    dst: *addr,
                    src: source.ptr.addr().get() as u64,
                    len: self.words as u64 * 8,
                };
                if let Err(reason) = dma.submit(&[op], &[]) {
                    tracing::error!(
                        "signals of a failed queue pair could not be released: {reason}"
                    );
                }
            }
        }
    }
}
