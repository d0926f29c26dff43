//! What `cargo xtask dist` checks of a shared object: its SONAME, what it needs, and the names it exports
//! with their symbol versions.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use object::LittleEndian;
use object::elf::{DT_NEEDED, DT_SONAME, FileHeader64};
use object::read::elf::{Dyn, FileHeader, Sym};

/// The outward face of one shared object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SharedObject {
    pub(crate) soname: Option<String>,
    /// SONAMEs of the libraries it needs, in its order.
    pub(crate) needed: Vec<String>,
    /// Defined dynamic symbols and the version each is bound to (none: unversioned).
    pub(crate) exports: BTreeMap<String, Option<String>>,
    /// The newest GLIBC_x.y that an undefined symbol is bound to; (0, 0) if none is.
    pub(crate) glibc: (u32, u32),
}

/// `GLIBC_2.28` as (2, 28); a third number is left out.
fn glibc_version(name: &str) -> Option<(u32, u32)> {
    let mut numbers = name.strip_prefix("GLIBC_")?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

impl SharedObject {
    /// Reads a little-endian ELF64 shared object.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let data =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&data)
            .with_context(|| format!("{} is not a readable shared object", path.display()))
    }

    fn parse(data: &[u8]) -> Result<Self> {
        let endian = LittleEndian;
        let header = FileHeader64::<LittleEndian>::parse(data)?;
        let sections = header.sections(endian, data)?;

        let mut soname = None;
        let mut needed = Vec::new();
        if let Some((entries, link)) = sections.dynamic(endian, data)? {
            let strings = sections.strings(endian, data, link)?;
            for entry in entries {
                let name = || -> Result<String> {
                    Ok(String::from_utf8(entry.string(endian, strings)?.to_vec())?)
                };
                match entry.d_tag(endian) {
                    DT_SONAME => soname = Some(name()?),
                    DT_NEEDED => needed.push(name()?),
                    _ => {}
                }
            }
        }

        let symbols = sections.symbols(endian, data, object::elf::SHT_DYNSYM)?;
        let versions = sections.versions(endian, data)?;
        let mut exports = BTreeMap::new();
        let mut glibc = (0, 0);
        for (index, symbol) in symbols.enumerate() {
            if symbol.is_undefined(endian)
                && let Some(table) = &versions
                && let Some(version) = table.version(table.version_index(endian, index).index())?
                && let Some(version) = glibc_version(&String::from_utf8_lossy(version.name()))
            {
                glibc = glibc.max(version);
            }
            // Absolute symbols are the names of the versions themselves.
            if symbol.is_undefined(endian) || symbol.is_absolute(endian) || symbol.is_local() {
                continue;
            }
            let name = String::from_utf8(symbols.symbol_name(endian, symbol)?.to_vec())?;
            let version = match &versions {
                Some(table) => table
                    .version(table.version_index(endian, index).index())?
                    .map(|v| String::from_utf8_lossy(v.name()).into_owned()),
                None => None,
            };
            exports.insert(name, version);
        }
        Ok(Self {
            soname,
            needed,
            exports,
            glibc,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_the_c_library_compare_as_numbers() {
        assert_eq!(glibc_version("GLIBC_2.28"), Some((2, 28)));
        assert_eq!(glibc_version("GLIBC_2.3.4"), Some((2, 3)));
        assert_eq!(glibc_version("GLIBC_PRIVATE"), None);
        assert_eq!(glibc_version("GCC_3.0"), None);
        assert!(glibc_version("GLIBC_2.9") < glibc_version("GLIBC_2.28"));
    }
}
