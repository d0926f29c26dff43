//! Memory of the engine's own that a device reads or writes: heads, inline data, what arrives.

use core::cell::UnsafeCell;

use doorbell_verbs::{Mr, Pd, Source, VerbsError, abi};

/// Registered memory in places of one size, each of which belongs to one request or receive at a time.
pub(crate) struct Places {
    // Before the memory: a queue pair that could not be destroyed may still use it, and its device must not know it any more.
    mr: Mr,
    size: usize,
    memory: Box<[UnsafeCell<[u64; 8]>]>,
}

// SAFETY: a place is used by the engine core that owns the queue pair, or by the device; never by both.
unsafe impl Send for Places {}
// SAFETY: as above.
unsafe impl Sync for Places {}

impl Places {
    /// So many of so many bytes. `rights`: the device's ([`abi::access`]).
    pub(super) fn new(
        pd: &Pd,
        count: usize,
        bytes: usize,
        rights: u32,
    ) -> Result<Self, VerbsError> {
        let size = bytes.next_multiple_of(64);
        let memory: Box<[_]> = (0..count * size / 64)
            .map(|_| UnsafeCell::new([0; 8]))
            .collect();
        let at = memory.as_ptr().expose_provenance() as u64;
        // SAFETY: the memory is dropped after its registration.
        let mr = unsafe { pd.register(Source::Host(at), count * size, at, rights) }?;
        Ok(Self { mr, size, memory })
    }

    /// The device's protection domain that it is of.
    pub(super) fn pd(&self) -> &Pd {
        self.mr.pd()
    }

    /// The first byte of a place, and the piece that names `len` bytes of it.
    pub(crate) fn place(&self, number: usize, len: usize) -> Option<(*mut u8, abi::Sge)> {
        let offset = number * self.size;
        if len > self.size || offset + self.size > self.memory.len() * 64 {
            return None;
        }
        let first = self.memory.as_ptr().cast_mut().cast::<u8>();
        // SAFETY: the place lies inside the memory.
        let at = unsafe { first.add(offset) };
        let sge = abi::Sge {
            addr: at.addr() as u64,
            length: len as u32,
            lkey: self.mr.lkey(),
        };
        Some((at, sge))
    }
}
