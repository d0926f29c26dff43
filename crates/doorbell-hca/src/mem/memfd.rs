//! The memory of our own key table: a memfd sealed in size, which peers may map read-only.
//! Sealed with `F_SEAL_FUTURE_WRITE` after our own mapping: whoever receives the descriptor cannot write the table.

use core::ptr::NonNull;
use std::io;
#[cfg(not(miri))]
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::table::{TableView, table_bytes};

/// Owns the memory of a key table.
#[derive(Debug)]
pub struct TableMemory {
    at: NonNull<u8>,
    bytes: usize,
    view: TableView,
    #[cfg(not(miri))]
    fd: OwnedFd,
}

// SAFETY: the memory holds atomics only and is released by the last owner.
unsafe impl Send for TableMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for TableMemory {}

impl TableMemory {
    /// An empty table of 2^`log_slots` slots.
    ///
    /// # Errors
    /// What the kernel says to `memfd_create`, `ftruncate`, `mmap` or sealing.
    #[cfg(not(miri))]
    pub fn new(log_slots: u32) -> io::Result<Self> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        // A multiple of every page size in use (4, 16 and 64 KiB); unused pages cost nothing.
        let bytes = table_bytes(log_slots).next_multiple_of(1 << 16);
        let fd = memfd_create(
            "doorbell-keys",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        ftruncate(&fd, bytes as u64)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let at = unsafe {
            mmap(
                core::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        }?;
        let at = NonNull::new(at.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap gave address zero"))?;
        fcntl_add_seals(
            &fd,
            SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL,
        )?;
        // SAFETY: the mapping is fresh (zero), page aligned, long enough, and unmapped only when `self` is dropped.
        let view = unsafe { TableView::format(at, log_slots) };
        Ok(Self {
            at,
            bytes,
            view,
            fd,
        })
    }

    /// An empty table of 2^`log_slots` slots (heap memory: this interpreter has no memfds).
    ///
    /// # Errors
    /// None.
    #[cfg(miri)]
    pub fn new(log_slots: u32) -> io::Result<Self> {
        let bytes = table_bytes(log_slots);
        // SAFETY: the size is not zero and the alignment a power of two.
        let at = unsafe { std::alloc::alloc_zeroed(Self::layout(bytes)) };
        let at = NonNull::new(at).ok_or_else(|| io::Error::other("out of memory"))?;
        // SAFETY: fresh zeroed memory, aligned, long enough, freed only when `self` is dropped.
        let view = unsafe { TableView::format(at, log_slots) };
        Ok(Self { at, bytes, view })
    }

    #[cfg(miri)]
    fn layout(bytes: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(bytes, 64).expect("a small power-of-two alignment")
    }

    /// The table.
    pub fn view(&self) -> TableView {
        self.view
    }

    /// First byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.at
    }

    /// Bytes, a multiple of the page size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The sealed descriptor: a peer can map it read-only.
    #[cfg(not(miri))]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for TableMemory {
    fn drop(&mut self) {
        #[cfg(not(miri))]
        // SAFETY: this value owns the mapping; views are used only while the owner lives (their contract).
        unsafe {
            let _ = rustix::mm::munmap(self.at.as_ptr().cast(), self.bytes);
        }
        #[cfg(miri)]
        // SAFETY: allocated in `new` with this layout.
        unsafe {
            std::alloc::dealloc(self.at.as_ptr(), Self::layout(self.bytes));
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_peer_can_read_the_table_but_not_write_it() {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let memory = TableMemory::new(3).expect("table");
        let map = |prot| {
            // SAFETY: a fresh mapping of a sealed descriptor; leaked, which a test may do.
            unsafe {
                mmap(
                    core::ptr::null_mut(),
                    memory.bytes(),
                    prot,
                    MapFlags::SHARED,
                    memory.fd(),
                    0,
                )
            }
        };
        assert!(
            map(ProtFlags::READ | ProtFlags::WRITE).is_err(),
            "the seal forbids new writable mappings"
        );
        let at =
            NonNull::new(map(ProtFlags::READ).expect("readable").cast::<u8>()).expect("not null");
        // SAFETY: mapped above, never unmapped.
        assert!(unsafe { TableView::open(at, memory.bytes()) }.is_ok());
        assert!(
            rustix::fs::ftruncate(memory.fd(), 1).is_err(),
            "sealed in size"
        );
    }
}
