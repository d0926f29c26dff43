//! Host memory of the host GPU: anonymous page-aligned mappings, zeroed by the system.
//!
//! Whole pages, so that a later registration with CUDA or a NIC never pins a stranger's bytes on the same page.

use std::ptr::NonNull;

use crate::{GpuError, Result};

/// One owned mapping.
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    /// Bytes mapped: whole pages.
    mapped: usize,
}

// SAFETY: a mapping is plain memory that any thread may touch or unmap; those who share it bring the synchronisation.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// At least `len` bytes of zeroes.
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        if len == 0 {
            return Err(GpuError::BadLength {
                len,
                reason: "a buffer has at least one byte",
            });
        }
        let page = page_size();
        let mapped = len
            .checked_next_multiple_of(page)
            .filter(|&n| isize::try_from(n).is_ok())
            .ok_or(GpuError::BadLength {
                len,
                reason: "it does not fit the address space",
            })?;
        let ptr = os::map(mapped).map_err(|source| GpuError::HostMemory { len, source })?;
        Ok(Self { ptr, mapped })
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `ptr` and `mapped` are those of `map`, and the owner is gone.
        unsafe { os::unmap(self.ptr, self.mapped) };
    }
}

/// The system's page size.
pub(crate) fn page_size() -> usize {
    #[cfg(not(miri))]
    let page = rustix::param::page_size();
    #[cfg(miri)]
    let page = 4096;
    page
}

#[cfg(not(miri))]
mod os {
    use rustix::mm::{MapFlags, ProtFlags};
    use std::ptr::{NonNull, null_mut};

    pub(super) fn map(len: usize) -> std::io::Result<NonNull<u8>> {
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so no existing mapping is replaced.
        let ptr = unsafe { rustix::mm::mmap_anonymous(null_mut(), len, rw, MapFlags::PRIVATE)? };
        NonNull::new(ptr.cast()).ok_or_else(|| std::io::Error::other("mmap gave address 0"))
    }

    /// # Safety
    /// `ptr` and `len` are a mapping of `map` that nobody uses any more.
    pub(super) unsafe fn unmap(ptr: NonNull<u8>, len: usize) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { rustix::mm::munmap(ptr.as_ptr().cast(), len) } {
            tracing::error!(%error, len, "munmap failed: the memory stays mapped");
        }
    }
}

/// Miri has no raw system calls; an allocation of whole pages stands in, so that the rest can be checked.
#[cfg(miri)]
mod os {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    pub(super) fn map(len: usize) -> std::io::Result<NonNull<u8>> {
        let layout = Layout::from_size_align(len, 4096).map_err(std::io::Error::other)?;
        // SAFETY: `len` is not zero.
        NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
    }

    /// # Safety
    /// `ptr` and `len` are an allocation of `map` that nobody uses any more.
    pub(super) unsafe fn unmap(ptr: NonNull<u8>, len: usize) {
        // SAFETY: the layout is that of `map`.
        unsafe { dealloc(ptr.as_ptr(), Layout::from_size_align_unchecked(len, 4096)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_whole_zeroed_pages() {
        let m = Mapping::zeroed(5000).unwrap();
        assert_eq!(m.ptr().as_ptr().addr() % page_size(), 0);
        assert_eq!(m.mapped % page_size(), 0);
        let mut bytes = vec![1; m.mapped];
        // SAFETY: the mapping has that many bytes and no other user.
        unsafe { crate::shared::load(m.ptr().as_ptr(), &mut bytes) };
        assert!(bytes.iter().all(|&b| b == 0));
    }

    #[test]
    fn impossible_lengths_are_refused() {
        assert!(matches!(
            Mapping::zeroed(0),
            Err(GpuError::BadLength { .. })
        ));
        assert!(matches!(
            Mapping::zeroed(usize::MAX),
            Err(GpuError::BadLength { .. })
        ));
        assert!(matches!(
            Mapping::zeroed(isize::MAX as usize),
            Err(GpuError::BadLength { .. })
        ));
    }
}
