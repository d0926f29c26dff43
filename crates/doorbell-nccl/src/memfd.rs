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

/// A mapping of `/proc/self/maps`.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    start: usize,
    end: usize,
    shared: bool,
    offset: usize,
    inode: u64,
    memfd: bool,
}

impl Mapping {
    /// `7f00-7f10 rw-s 00000000 00:01 1027 /memfd:name (deleted)`
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let offset = usize::from_str_radix(words.next()?, 16).ok()?;
        let _device = words.next()?;
        let inode = words.next()?.parse().ok()?;
        Some(Self {
            start: usize::from_str_radix(start, 16).ok()?,
            end: usize::from_str_radix(end, 16).ok()?,
            shared: rights.ends_with('s'),
            offset,
            inode,
            memfd: words.next().is_some_and(|name| name.starts_with("/memfd:")),
        })
    }
}

/// The memfd behind `len` bytes at `addr`, and the offset in it; `None` if they lie in no memfd, in more than one mapping, if its size may change, or if
/// the descriptor was closed.
pub(crate) fn behind(addr: usize, len: usize) -> Option<(Arc<OwnedFd>, usize)> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let end = addr.checked_add(len)?;
    let mapping = maps
        .lines()
        .filter_map(Mapping::parse)
        .find(|m| m.start <= addr && addr < m.end)?;
    if !(mapping.shared && mapping.memfd && end <= mapping.end) {
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
    fn lines_of_the_kernel() {
        let line =
            "7f0000-7f2000 rw-s 00001000 00:01 1027                       /memfd:a b (deleted)";
        let m = Mapping::parse(line).expect("a mapping");
        assert_eq!(
            (m.start, m.end, m.offset, m.inode),
            (0x7f0000, 0x7f2000, 0x1000, 1027)
        );
        assert!(m.shared && m.memfd);
        let m = Mapping::parse("7ffc-7ffd rw-p 00000000 00:00 0    [stack]").expect("one");
        assert!(!m.shared && !m.memfd);
        assert_eq!(Mapping::parse("nonsense"), None);
    }

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
