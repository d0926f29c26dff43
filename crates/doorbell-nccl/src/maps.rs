//! What memory of this process is: the kernel's list of mappings.

use std::fs;

/// A mapping of `/proc/self/maps`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) shared: bool,
    pub(crate) offset: usize,
    pub(crate) inode: u64,
    /// What it is of, up to the first space.
    pub(crate) name: Option<String>,
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
            name: words.next().map(str::to_owned),
        })
    }

    /// The one that an address lies in.
    pub(crate) fn at(addr: usize) -> Option<Self> {
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        let mut all = maps.lines().filter_map(Self::parse);
        all.find(|m| (m.start..m.end).contains(&addr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel() {
        let line =
            "7f0000-7f2000 rw-s 00001000 00:01 1027                       /memfd:a b (deleted)";
        let m = Mapping::parse(line).expect("a mapping");
        assert_eq!(
            (m.start, m.end, m.offset, m.inode),
            (0x7f0000, 0x7f2000, 0x1000, 1027)
        );
        assert!(m.shared && m.name.as_deref() == Some("/memfd:a"));
        let m = Mapping::parse("7ffc-7ffd rw-p 00000000 00:00 0    [stack]").expect("one");
        assert!(!m.shared && m.name.as_deref() == Some("[stack]"));
        assert_eq!(Mapping::parse("nonsense"), None);
    }
}
