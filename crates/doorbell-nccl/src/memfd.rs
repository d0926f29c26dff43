//! Which memfd some host memory is a mapping of: the kernel's list of mappings says so, and the descriptor is found among our own.
//!
//! What an allocator made shareable (and keeps open) can so be reached by other processes of the host directly, although NCCL passes
//! nothing but an address.

use std::fs;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{SealFlags, fcntl_get_seals};

use crate::maps::Mapping;

/// The memfd behind `len` bytes at `addr`, and the offset in it; `None` if they lie in no memfd, in more than one mapping, if its size may change, or if
/// the descriptor was closed.
pub(crate) fn behind(addr: usize, len: usize) -> Option<(Arc<OwnedFd>, usize)> {
    let end = addr.checked_add(len)?;
    let mapping = Mapping::at(addr)?;
    let is_memfd = mapping.name.is_some_and(|name| name.starts_with("/memfd:"));
    if !(mapping.shared && is_memfd && end <= mapping.end) {
        return None;
    }
    for entry in fs::read_dir("/proc/self/fd").ok()?.flatten() {
        let Ok(data) = fs::metadata(entry.path()) else {
            continue;
        };
        let name = fs::read_link(entry.path()).unwrap_or_default();
        if data.ino() != mapping.inode
            || !name.as_os_str().as_encoded_bytes().starts_with(b"/memfd:")
        {
            continue;
        }
        if !is_sealed(&entry.path()) {
            return None;
        }
        // Opened anew through the entry: the other descriptor may be closed at any time.
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(entry.path())
            .ok()?;
        // SAFETY: just given up by the file, so ours.
        let fd = unsafe { OwnedFd::from_raw_fd(file.into_raw_fd()) };
        return Some((Arc::new(fd), mapping.offset + (addr - mapping.start)));
    }
    None
}

/// Can its size change no more? Peers map nothing else.
fn is_sealed(path: &Path) -> bool {
    let Ok(file) = fs::File::open(path) else {
        return false;
    };
    let needed = SealFlags::SHRINK | SealFlags::GROW;
    fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(needed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use doorbell_hca::shm::SharedRegion;

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn the_memfd_behind_memory_is_found_and_other_memory_has_none() {
        let region = SharedRegion::new(1 << 16).expect("a region");
        let at = region.ptr().as_ptr() as usize;
        let (fd, offset) = behind(at + 4096, 4096).expect("it lies in a memfd");
        assert_eq!(offset, 4096);
        let same = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("fstat").st_ino;
        assert_eq!(same(&fd), same(region.memfd()));
        assert!(behind(at, (1 << 16) + 4096).is_none(), "past its end");
        let plain = [0u8; 64];
        assert!(behind(plain.as_ptr() as usize, 64).is_none());
    }
}
