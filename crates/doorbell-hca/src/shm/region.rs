//! Memory that two processes can share: sealed memfds and their mappings.
//!
//! [`SharedRegion`] is made by the process that registers the memory; [`Mapping::of_peer`] maps what a
//! peer sent, after checking the size and the seals, so that no access can raise SIGBUS later.
//! memfds live on the kernel's own tmpfs mount: the size of `/dev/shm` plays no part.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use rustix::{
    fs::{
        MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
        memfd_create,
    },
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap},
};

use super::error::{Refusal, RefusalCode, Result, ShmError};

/// `f_type` of tmpfs, which every memfd without `MFD_HUGETLB` has (`linux/magic.h`).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The seals without which a mapping could lose its pages under us.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Bytes of a page.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// A `MAP_SHARED` mapping, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is address space; it is not tied to a thread. Access to the bytes goes through
// raw pointers and atomics, whose users promise what they need.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out only the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file that this process made.
    pub(crate) fn new(fd: BorrowedFd<'_>, len: usize, writable: bool) -> io::Result<Self> {
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let ptr = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        let ptr =
            NonNull::new(ptr.cast()).ok_or_else(|| io::Error::other("mmap gave address zero"))?;
        Ok(Self { ptr, len })
    }

    /// Maps a descriptor that a peer sent.
    ///
    /// # Errors
    /// A refusal when the descriptor is no memfd, is not sealed against shrinking and growing (then its
    /// pages could vanish and an access raise SIGBUS), or has not exactly `len` bytes.
    pub(crate) fn of_peer(fd: BorrowedFd<'_>, len: u64, writable: bool) -> Result<Self, Refusal> {
        let bytes = check_memfd(fd, len)?;
        Self::new(fd, bytes, writable).map_err(|e| {
            Refusal::new(
                RefusalCode::Map,
                format!(
                    "cannot map a memfd of {len} bytes: {}",
                    crate::limits::told(e)
                ),
            )
        })
    }

    /// First byte.
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Bytes mapped.
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and whoever drops it promises (see the users) that nobody
        // uses its addresses any more.
        if let Err(e) = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) } {
            tracing::error!(len = self.len, "munmap of a shared mapping failed: {e}");
        }
    }
}

/// Checks that `fd` is a memfd of exactly `len` bytes whose size can never change.
pub(crate) fn check_memfd(fd: BorrowedFd<'_>, len: u64) -> Result<usize, Refusal> {
    let unfit = |e: rustix::io::Errno| {
        Refusal::new(
            RefusalCode::NotSealed,
            format!("descriptor is no memfd: {e}"),
        )
    };
    // Order matters: seals first. Once SHRINK and GROW are on, the size read next cannot change.
    let seals = fcntl_get_seals(fd).map_err(unfit)?;
    if !seals.contains(SIZE_SEALS) {
        return Err(Refusal::new(
            RefusalCode::NotSealed,
            format!(
                "memfd has seals {:#x}, F_SEAL_SHRINK and F_SEAL_GROW ({:#x}) are required",
                seals.bits(),
                SIZE_SEALS.bits()
            ),
        ));
    }
    // Huge-page memfds can run out of reserved pages at a fault (SIGBUS), so only tmpfs is taken.
    let kind = fstatfs(fd).map_err(unfit)?.f_type;
    #[allow(
        clippy::unnecessary_cast,
        reason = "f_type has other types on other architectures"
    )]
    if kind as u64 != TMPFS_MAGIC {
        return Err(Refusal::new(
            RefusalCode::NotSealed,
            format!("memfd lies on file system {kind:#x}, only tmpfs ({TMPFS_MAGIC:#x}) is taken"),
        ));
    }
    let found = fstat(fd).map_err(unfit)?.st_size;
    if u64::try_from(found) != Ok(len) || len == 0 {
        return Err(Refusal::new(
            RefusalCode::Size,
            format!("memfd has {found} bytes, the message says {len}"),
        ));
    }
    usize::try_from(len).map_err(|_| {
        Refusal::new(
            RefusalCode::Size,
            format!("memfd of {len} bytes does not fit in this address space"),
        )
    })
}

/// How a [`SharedRegion`] is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct RegionOptions {
    /// Ask for transparent huge pages (`MADV_HUGEPAGE`; takes effect where
    /// `/sys/kernel/mm/transparent_hugepage/shmem_enabled` allows advice).
    pub huge_pages: bool,
    /// Touch every page now, so that no later access pays for a page fault.
    pub populate: bool,
}

/// A sealed memfd of this process with its read-write mapping.
#[derive(Debug)]
pub struct SharedRegion {
    map: Mapping,
    fd: Arc<OwnedFd>,
}

impl SharedRegion {
    /// Makes a region of at least `len` zeroed bytes (rounded up to pages).
    ///
    /// # Errors
    /// [`ShmError::Length`] for zero or absurd sizes, [`ShmError::Os`] when the kernel refuses.
    pub fn new(len: usize) -> Result<Self> {
        Self::with_options(len, RegionOptions::default())
    }

    /// As [`SharedRegion::new`], with options.
    ///
    /// # Errors
    /// As [`SharedRegion::new`].
    pub fn with_options(len: usize, options: RegionOptions) -> Result<Self> {
        let region = Self::unsealed(len)?;
        let object = || format!("{len} bytes");
        if options.huge_pages {
            // SAFETY: advice about our own fresh mapping changes no contents.
            // A kernel without shmem huge pages says EINVAL; the region works all the same.
            if let Err(e) = unsafe {
                madvise(
                    region.map.ptr.as_ptr().cast(),
                    region.map.len,
                    Advice::LinuxHugepage,
                )
            } {
                tracing::debug!("MADV_HUGEPAGE on a shared region: {e}");
            }
        }
        if options.populate {
            // SAFETY: MADV_POPULATE_WRITE faults in our own fresh mapping.
            unsafe {
                madvise(
                    region.map.ptr.as_ptr().cast(),
                    region.map.len,
                    Advice::LinuxPopulateWrite,
                )
            }
            .map_err(|e| ShmError::os("madvise(MADV_POPULATE_WRITE)", object(), e))?;
        }
        region.seal(SIZE_SEALS | SealFlags::SEAL)?;
        Ok(region)
    }

    fn unsealed(len: usize) -> Result<Self> {
        if len == 0 {
            return Err(ShmError::Length {
                len,
                why: "a region has at least one byte",
            });
        }
        let bytes = len
            .checked_next_multiple_of(page_size())
            .filter(|&b| i64::try_from(b).is_ok())
            .ok_or(ShmError::Length {
                len,
                why: "does not fit in a file",
            })?;
        let object = || format!("{bytes} bytes");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // NOEXEC_SEAL came with Linux 6.3; older kernels say EINVAL to the flag.
        let fd = memfd_create("doorbell", flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| memfd_create("doorbell", flags))
            .map_err(|e| ShmError::os("memfd_create", object(), e))?;
        ftruncate(&fd, bytes as u64).map_err(|e| ShmError::os("ftruncate", object(), e))?;
        let map =
            Mapping::new(fd.as_fd(), bytes, true).map_err(|e| ShmError::os("mmap", object(), e))?;
        Ok(Self {
            map,
            fd: Arc::new(fd),
        })
    }

    fn seal(&self, seals: SealFlags) -> Result<()> {
        fcntl_add_seals(&self.fd, seals)
            .map_err(|e| ShmError::os("fcntl(F_ADD_SEALS)", format!("{seals:?}"), e))
    }

    /// First byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.map.ptr
    }

    /// Bytes of the region: what was asked for, rounded up to pages.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.map.len
    }

    /// The sealed memfd.
    pub fn memfd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(len: u64) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, len).unwrap();
        fd
    }

    #[test]
    fn a_region_is_zeroed_sealed_and_seen_by_a_second_mapping() {
        let region = SharedRegion::with_options(
            10_000,
            RegionOptions {
                huge_pages: true,
                populate: true,
            },
        )
        .unwrap();
        assert_eq!(region.len() % page_size(), 0);
        assert!(region.len() >= 10_000);
        let peer = Mapping::of_peer(region.memfd().as_fd(), region.len() as u64, true).unwrap();
        // SAFETY: both mappings live, offset 9999 is inside, no other thread.
        unsafe {
            assert_eq!(peer.ptr().as_ptr().add(9999).read_volatile(), 0);
            region.ptr().as_ptr().add(9999).write_volatile(7);
            assert_eq!(peer.ptr().as_ptr().add(9999).read_volatile(), 7);
        }
        assert!(ftruncate(region.memfd(), 1).is_err());
        assert!(ftruncate(region.memfd(), 1 << 20).is_err());
    }

    #[test]
    fn an_unsealed_or_half_sealed_memfd_is_refused() {
        let fd = memfd(4096);
        for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::GROW] {
            fcntl_add_seals(&fd, seals).unwrap();
            let refusal = Mapping::of_peer(fd.as_fd(), 4096, true).unwrap_err();
            assert_eq!(refusal.code, RefusalCode::NotSealed, "{refusal}");
        }
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        Mapping::of_peer(fd.as_fd(), 4096, true).unwrap();
    }

    #[test]
    fn a_size_that_is_not_the_descriptors_is_refused() {
        let fd = memfd(8192);
        fcntl_add_seals(&fd, SIZE_SEALS).unwrap();
        for len in [0, 4096, 8191, 8193, 1 << 40, u64::MAX] {
            let refusal = Mapping::of_peer(fd.as_fd(), len, true).unwrap_err();
            assert_eq!(refusal.code, RefusalCode::Size, "{refusal}");
        }
    }

    #[test]
    fn what_is_no_memfd_is_refused() {
        let (a, _b) = std::io::pipe().unwrap();
        assert_eq!(
            Mapping::of_peer(a.as_fd(), 4096, true).unwrap_err().code,
            RefusalCode::NotSealed
        );
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(
            Mapping::of_peer(file.as_fd(), 4096, false)
                .unwrap_err()
                .code,
            RefusalCode::NotSealed
        );
    }

    #[test]
    fn absurd_lengths_are_errors() {
        assert!(matches!(SharedRegion::new(0), Err(ShmError::Length { .. })));
        assert!(matches!(
            SharedRegion::new(usize::MAX),
            Err(ShmError::Length { .. })
        ));
        assert!(SharedRegion::new(1 << 62).is_err());
    }
}
