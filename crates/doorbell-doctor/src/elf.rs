//! What doctor needs of a shared object, without loading it: what it links to, the plug-in symbols it
//! exports, and the version that it prints about itself.
//!
//! Kept as short text so that a captured machine carries this instead of a library of 300 MB:
//! `needs libcuda.so.1`, `exports ncclGinPlugin_v14`, `says NCCL version 2.30.7`.

use std::path::Path;

use object::read::elf::{FileHeader, SectionHeader};
use object::read::{ReadCache, ReadRef};
use object::{Endianness, SectionIndex, elf};

/// Symbols by which a library is recognised as a plug-in.
const EXPORTS: &[&str] = &[
    "ncclGinPlugin_v",
    "ncclRmaPlugin_v",
    "ncclNetPlugin_v",
    "nvshmemt_init",
    "nixl_plugin_init",
    VERSION_CALL,
];
/// Whose library has its version as a text of its own, which this call returns, and nothing in front of it.
const VERSION_CALL: &str = "ucp_get_version_string";
/// Texts that a library carries with its own version behind them.
const SAYS: &[&str] = &["NCCL version ", "NVSHMEM v"];
/// The part of `.rodata` that is searched for [`SAYS`].
const SEARCHED: u64 = 64 << 20;

/// The facts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Elf {
    pub(crate) needs: Vec<String>,
    pub(crate) exports: Vec<String>,
    /// The version after one of [`SAYS`].
    pub(crate) version: Option<String>,
}

impl Elf {
    pub(crate) fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            match line.split_once(' ') {
                Some(("needs", name)) => found.needs.push(name.to_owned()),
                Some(("exports", name)) => found.exports.push(name.to_owned()),
                Some(("says", version)) => found.version = Some(version.to_owned()),
                _ => {}
            }
        }
        found
    }
}

/// Reads a file; `None` when it is no 64-bit ELF file or cannot be read.
pub(crate) fn read(path: &Path) -> Option<String> {
    if !path.is_file() {
        return None;
    }
    let file = std::fs::File::open(path).ok()?;
    let cache = ReadCache::new(file);
    facts(&cache).ok().flatten()
}

fn facts<'a, R: ReadRef<'a>>(data: R) -> object::read::Result<Option<String>> {
    let header = elf::FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let mut out = String::new();
    if let Some((dynamic, link)) = sections.dynamic(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        for entry in dynamic {
            if entry.d_tag.get(endian) == elf::DT_NEEDED
                && let Ok(name) = strings.get(entry.d_val.get(endian) as u32).map_err(drop)
            {
                out.push_str(&format!("needs {}\n", String::from_utf8_lossy(name)));
            }
        }
    }
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    let mut exports = Vec::new();
    for symbol in symbols.iter() {
        if symbol.st_shndx.get(endian) == elf::SHN_UNDEF {
            continue;
        }
        if let Ok(name) = symbols.strings().get(symbol.st_name.get(endian))
            && let Ok(name) = std::str::from_utf8(name)
            && EXPORTS.iter().any(|e| name.starts_with(e))
        {
            exports.push(name.to_owned());
        }
    }
    exports.sort();
    exports.dedup();
    for name in &exports {
        out.push_str(&format!("exports {name}\n"));
    }
    let alone = exports.iter().any(|name| name == VERSION_CALL);
    for index in 1..sections.len() {
        let section = sections.section(SectionIndex(index))?;
        if sections.section_name(endian, section) != Ok(b".rodata") {
            continue;
        }
        if let Some((offset, size)) = section.file_range(endian)
            && let Ok(bytes) = data.read_bytes_at(offset, size.min(SEARCHED))
            && let Some(version) = SAYS
                .iter()
                .find_map(|says| after(bytes, says.as_bytes()))
                .or_else(|| lone(bytes).filter(|_| alone))
        {
            out.push_str(&format!("says {version}\n"));
        }
    }
    Ok(Some(out))
}

/// The version that stands behind `says`: digits and points, at least one of each.
fn after(bytes: &[u8], says: &[u8]) -> Option<String> {
    let mut at = 0;
    while let Some(found) = bytes[at..].windows(says.len()).position(|w| w == says) {
        at += found + says.len();
        let version: String = bytes[at..]
            .iter()
            .take_while(|b| b.is_ascii_digit() || **b == b'.')
            .map(|b| char::from(*b))
            .collect();
        let version = version.trim_end_matches('.');
        if version.contains('.') {
            return Some(version.to_owned());
        }
    }
    None
}

/// The only text of three numbers that ends where a text ends; two of them, and nobody knows which is meant.
fn lone(bytes: &[u8]) -> Option<String> {
    let mut found = None;
    for text in bytes.split(|b| *b == 0) {
        let from = text
            .iter()
            .rposition(|b| !b.is_ascii_digit() && *b != b'.')
            .map_or(0, |at| at + 1);
        let version = String::from_utf8_lossy(&text[from..]).into_owned();
        let numbers: Vec<&str> = version.split('.').collect();
        if numbers.len() == 3 && numbers.iter().all(|n| !n.is_empty()) {
            if found.as_ref().is_some_and(|f| *f != version) {
                return None;
            }
            found = Some(version);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_library_of_this_machine() {
        // The test's own executable is the one ELF file that is surely here.
        let text = read(&std::env::current_exe().unwrap()).expect("an ELF file");
        let elf = Elf::parse(&text);
        assert!(elf.needs.iter().any(|n| n.starts_with("libc.so")), "{text}");
        assert!(read(Path::new("/proc/self/status")).is_none());
    }

    #[test]
    fn a_version_has_a_point() {
        assert_eq!(
            after(
                b"..NCCL version %d NCCL version 2.30.7+cuda",
                b"NCCL version "
            )
            .as_deref(),
            Some("2.30.7")
        );
        assert_eq!(after(b"NCCL version x", b"NCCL version "), None);
        assert_eq!(lone(b"a\0\xcdA1.22.0\0b 1.2\0").as_deref(), Some("1.22.0"));
        assert_eq!(lone(b"1.22.0\0x2.0.1\0"), None);
        assert_eq!(lone(b"1..0\0"), None);
    }
}
