//! Queue memory: many small pieces out of few large allocations.
//!
//! Pinning memory costs a driver call and at least a page each time, and a device may have thousands of queue pairs, so
//! rings, CQs, records and words are cut out of chunks of one [`MemKind`]. A piece is zeroed when it is handed out, and
//! reused only when no kernel runs that might still look at what it was before.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use doorbell_gpu::{Buffer, Gpu, MemKind};

use crate::Error;

/// First chunk; later ones double up to [`LARGEST_CHUNK`], so that one queue pair stays cheap and thousands few calls.
const FIRST_CHUNK: usize = 256 << 10;
const LARGEST_CHUNK: usize = 64 << 20;

/// Pieces never share a cache line: engine and GPU write neighbouring words.
pub(crate) const LINE: usize = 64;

pub(crate) struct Arena {
    gpu: Gpu,
    kind: MemKind,
    chunks: Mutex<Vec<Arc<Chunk>>>,
}

struct Chunk {
    buffer: Buffer,
    free: Mutex<FreeList>,
}

impl Chunk {
    fn free(&self) -> MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Arena {
    pub(crate) fn new(gpu: &Gpu, kind: MemKind) -> Self {
        Self {
            gpu: gpu.clone(),
            kind,
            chunks: Mutex::new(Vec::new()),
        }
    }

    /// `len` zeroed bytes, aligned to `align` (a power of two, at most 256).
    pub(crate) fn alloc(&self, len: usize, align: usize) -> Result<Slice, Error> {
        self.gpu.check_process()?;
        let align = align.max(LINE);
        let len = len.max(1).next_multiple_of(LINE);
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        // The newest chunk is the likeliest to have room.
        for chunk in chunks.iter().rev() {
            if let Some(offset) = chunk.free().take(len, align) {
                return self.slice(Arc::clone(chunk), offset, len);
            }
        }
        let size = (FIRST_CHUNK << chunks.len().min(16))
            .min(LARGEST_CHUNK)
            .max(len);
        let chunk = Arc::new(Chunk {
            buffer: self.gpu.alloc(self.kind, size)?,
            free: Mutex::new(FreeList {
                ranges: vec![(0, size)],
            }),
        });
        chunks.push(Arc::clone(&chunk));
        let offset = chunk.free().take(len, align).unwrap_or(0);
        self.slice(chunk, offset, len)
    }

    fn slice(&self, chunk: Arc<Chunk>, offset: usize, len: usize) -> Result<Slice, Error> {
        let slice = Slice {
            gpu: self.gpu.clone(),
            chunk,
            offset,
            len,
        };
        // Zeroing GPU memory is a copy; whoever takes some writes it whole anyway.
        if slice.host_ptr().is_some() {
            slice.write(0, &vec![0; len])?;
        }
        Ok(slice)
    }
}

/// A piece of an arena; given back on drop, once no kernel runs.
pub(crate) struct Slice {
    gpu: Gpu,
    chunk: Arc<Chunk>,
    offset: usize,
    len: usize,
}

impl Slice {
    pub(crate) fn device_addr(&self) -> u64 {
        self.chunk.buffer.device_addr() + self.offset as u64
    }

    pub(crate) fn host_ptr(&self) -> Option<NonNull<u8>> {
        // SAFETY: the piece lies inside the buffer.
        self.chunk
            .buffer
            .host_ptr()
            .map(|p| unsafe { p.add(self.offset) })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        debug_assert!(offset + bytes.len() <= self.len);
        Ok(self.chunk.buffer.write(self.offset + offset, bytes)?)
    }

    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        debug_assert!(offset + bytes.len() <= self.len);
        Ok(self.chunk.buffer.read(self.offset + offset, bytes)?)
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len, self.device_addr())
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        let (chunk, offset, len) = (Arc::clone(&self.chunk), self.offset, self.len);
        self.gpu.defer(move || chunk.free().give(offset, len));
    }
}

/// Free ranges of one chunk, sorted by offset, never adjacent.
#[derive(Debug)]
struct FreeList {
    ranges: Vec<(usize, usize)>,
}

impl FreeList {
    /// First fit.
    fn take(&mut self, len: usize, align: usize) -> Option<usize> {
        for i in 0..self.ranges.len() {
            let (start, size) = self.ranges[i];
            let at = start.next_multiple_of(align);
            let gap = at - start;
            if gap + len > size {
                continue;
            }
            let tail = (at + len, size - gap - len);
            match (gap, tail.1) {
                (0, 0) => {
                    self.ranges.remove(i);
                }
                (0, _) => self.ranges[i] = tail,
                (_, 0) => self.ranges[i] = (start, gap),
                _ => {
                    self.ranges[i] = (start, gap);
                    self.ranges.insert(i + 1, tail);
                }
            }
            return Some(at);
        }
        None
    }

    fn give(&mut self, offset: usize, len: usize) {
        let i = self.ranges.partition_point(|&(start, _)| start < offset);
        self.ranges.insert(i, (offset, len));
        if let Some(&(next, size)) = self.ranges.get(i + 1)
            && offset + len == next
        {
            self.ranges[i].1 += size;
            self.ranges.remove(i + 1);
        }
        if let Some((start, size)) = i.checked_sub(1).map(|p| self.ranges[p])
            && start + size == offset
        {
            self.ranges[i - 1].1 += self.ranges[i].1;
            self.ranges.remove(i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_disjoint_aligned_and_come_back() {
        let mut list = FreeList {
            ranges: vec![(0, 1 << 16)],
        };
        let mut held = Vec::new();
        // A fixed sequence of sizes and alignments; each take is checked against all that are held.
        for step in 0..400_usize {
            let (len, align) = (64 * (1 + step * 7 % 11), 64 << (step % 3));
            if let Some(at) = list.take(len, align) {
                assert_eq!(at % align, 0);
                assert!(at + len <= 1 << 16);
                assert!(
                    held.iter().all(|&(o, l)| at + len <= o || o + l <= at),
                    "{at} + {len} overlaps"
                );
                held.push((at, len));
            }
            if step % 3 == 2 && !held.is_empty() {
                let (at, len) = held.swap_remove(step * 13 % held.len());
                list.give(at, len);
            }
        }
        assert!(held.len() > 20);
        for (at, len) in held {
            list.give(at, len);
        }
        assert_eq!(list.ranges, [(0, 1 << 16)]);
    }

    #[test]
    fn what_does_not_fit_is_refused_and_what_fits_exactly_is_not() {
        let mut list = FreeList {
            ranges: vec![(64, 128)],
        };
        assert_eq!(list.take(192, 64), None);
        assert_eq!(list.take(128, 256), None);
        assert_eq!(list.take(128, 64), Some(64));
        assert_eq!(list.ranges, []);
    }
}
