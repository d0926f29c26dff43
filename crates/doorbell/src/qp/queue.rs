//! The memory of one queue pair: send ring and CQ, receive ring and CQ, doorbell records, error word.
//!
//! All of it lies in memory that GPU and engine both reach, cut from the device's arena. It outlives the queue pair for
//! as long as exports, the engine or a kernel may look at it.

use doorbell_device::layout::CqKind;

use crate::Result;
use crate::arena::{Arena, LINE, Slice};
use crate::provider::Piece;

/// Bytes of a slot and of a CQE.
const SLOT: usize = 64;

#[derive(Debug)]
pub(crate) struct QueueMemory {
    pub(crate) ring: Slice,
    pub(crate) cq: Slice,
    /// The records in the first line, which the GPU writes (mlx5's order: receive, send); the error word in the second, which the
    /// engine writes; in the third, device code notes long waits.
    words: Slice,
    pub(crate) recv: Option<RecvMemory>,
}

/// Receive ring and receive CQ.
#[derive(Debug)]
pub(crate) struct RecvMemory {
    pub(crate) ring: Slice,
    pub(crate) cq: Slice,
}

/// The size of a receive queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecvShape {
    /// Receives.
    pub(crate) depth: u32,
    /// Pieces of memory of each: a power of two.
    pub(crate) pieces: u32,
}

impl RecvShape {
    /// Bytes from one receive to the next.
    pub(crate) const fn stride(self) -> u32 {
        self.pieces * SEGMENT
    }
}

/// Where the send record is in the first line, behind the receive record.
const SEND_RECORD: usize = 4;
/// Bytes of a data segment.
const SEGMENT: u32 = 16;

impl QueueMemory {
    pub(crate) fn new(
        arena: &Arena,
        depth: u32,
        cq: CqKind,
        recv: Option<RecvShape>,
    ) -> Result<Self> {
        let cqes = if cq == CqKind::Collapsed {
            1
        } else {
            depth as usize
        };
        let recv = match recv {
            Some(shape) => Some(RecvMemory {
                ring: arena.alloc(shape.depth as usize * shape.stride() as usize, 256)?,
                cq: arena.alloc(shape.depth as usize * SLOT, 64)?,
            }),
            None => None,
        };
        let memory = Self {
            recv,
            ring: arena.alloc(depth as usize * SLOT, 256)?,
            cq: arena.alloc(cqes * SLOT, 64)?,
            words: arena.alloc(3 * LINE, 64)?,
        };
        Ok(memory)
    }

    pub(crate) fn ring(&self) -> Piece {
        piece(&self.ring, 0, self.ring.len())
    }

    pub(crate) fn cq(&self) -> Piece {
        piece(&self.cq, 0, self.cq.len())
    }

    pub(crate) fn record(&self) -> Piece {
        piece(&self.words, SEND_RECORD, 4)
    }

    pub(crate) fn recv_record(&self) -> Piece {
        piece(&self.words, 0, 4)
    }

    /// The bytes of the send record now.
    pub(crate) fn read_record(&self) -> Result<[u8; 4]> {
        let mut record = [0; 4];
        self.words.read(SEND_RECORD, &mut record)?;
        Ok(record)
    }

    pub(crate) fn error(&self) -> Piece {
        piece(&self.words, LINE, 8)
    }
}

impl QueueMemory {
    /// The line of long waits.
    pub(crate) fn note(&self) -> Piece {
        piece(&self.words, 2 * LINE, LINE)
    }

    /// What it says: kind, place, what is wanted, what is there, since when, when that was written.
    pub(crate) fn read_note(&self) -> Result<[u64; 6]> {
        let mut bytes = [0; 48];
        self.words.read(2 * LINE, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        Ok(std::array::from_fn(|i| u64::from_ne_bytes(words[i])))
    }

    /// Nobody waits.
    pub(crate) fn clear_note(&self) -> Result<()> {
        self.words.write(2 * LINE, &[0; LINE])
    }
}

impl RecvMemory {
    pub(crate) fn ring(&self) -> Piece {
        piece(&self.ring, 0, self.ring.len())
    }

    pub(crate) fn cq(&self) -> Piece {
        piece(&self.cq, 0, self.cq.len())
    }
}

fn piece(slice: &Slice, offset: usize, len: usize) -> Piece {
    Piece {
        // SAFETY: the offset lies inside the slice.
        host: slice.host_ptr().map(|p| unsafe { p.add(offset) }),
        device: slice.device_addr() + offset as u64,
        len,
    }
}
