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
        for (index, symbol) in symbols.enumerate() {
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
        })
    }
}
