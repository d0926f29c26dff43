//! A machine in one text file: what `--capture` writes, what people can read before they send it,
//! and what the verdicts are tested against.
//!
//! ```text
//! # a comment
//! /sys/class/infiniband/mlx5_0 -> ../../devices/…     a link
//! /sys/module/nvidia_peermem/                         a folder (parents need not be named)
//! /sys/module/nvidia/version: 580.95.05               a file of one line
//! /proc/driver/nvidia/params:                         a file of several, or an empty one
//! | ResmanDebugLevel: 4294967295
//! | RegistryDwords: ""
//! /sys/…/config:x 5e152110                            bytes in hexadecimal
//! /proc/iomem:denied                                  a file that could not be read
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::{Denied, Kind, OWN, Tree};
use crate::error::Error;

/// The last line of a capture: without it, it was cut off on its way.
const END: &str = "# end of capture";

/// What one path holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Folder,
    Link(String),
    Bytes(Vec<u8>),
    Denied,
}

/// A tree in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    pub(super) entries: BTreeMap<String, Entry>,
}

impl Manifest {
    /// Reads a capture, which has to be whole.
    ///
    /// # Errors
    /// [`Error::Cut`], and those of [`Self::parse`].
    pub fn whole(text: &str) -> Result<Self, Error> {
        let last = text.lines().rfind(|line| !line.trim().is_empty());
        // Before anything else: half a line is no fault of its own.
        match last.is_some_and(|line| line.starts_with(END)) {
            true => Self::parse(text),
            false => Err(Error::Cut {
                mark: "the line `# end of capture`",
            }),
        }
    }

    /// The text of a capture: what [`Self::whole`] reads.
    pub fn capture(&self) -> String {
        let head = "# doorbell doctor --capture: read it before you send it; `doorbell doctor --root FILE` judges it.";
        format!("{head}\n{}{END}\n", self.print())
    }

    /// Reads the format of this module's head.
    ///
    /// # Errors
    /// [`Error::Manifest`] with the first line that is none of its forms.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut manifest = Self::default();
        // The file that `| ` lines go on with.
        let mut open: Option<String> = None;
        for (at, line) in text.lines().enumerate() {
            let fault = |what| Error::Manifest { line: at + 1, what };
            if line.is_empty() || line.starts_with('#') {
                open = None;
            } else if let Some(more) = line.strip_prefix('|') {
                let path = open
                    .as_ref()
                    .ok_or_else(|| fault("it goes on with a file that was not begun"))?;
                if let Some(Entry::Bytes(bytes)) = manifest.entries.get_mut(path) {
                    bytes.extend_from_slice(more.strip_prefix(' ').unwrap_or(more).as_bytes());
                    bytes.push(b'\n');
                }
            } else if !line.starts_with('/') {
                return Err(fault("no path stands at its beginning"));
            } else {
                let (path, entry) = entry(line).ok_or_else(|| fault("it has none of the forms"))?;
                if path.split('/').any(|part| part == "..") {
                    return Err(fault("its path leads elsewhere (`..`)"));
                }
                open = matches!(&entry, Entry::Bytes(b) if b.is_empty()).then(|| path.clone());
                manifest.put(path, entry);
            }
        }
        Ok(manifest)
    }

    /// The same as text; [`Self::parse`] reads it back.
    pub fn print(&self) -> String {
        let mut out = String::new();
        for (path, entry) in &self.entries {
            // Writing to a String does not fail.
            let _ = match entry {
                Entry::Folder => writeln!(out, "{path}/"),
                Entry::Link(target) => writeln!(out, "{path} -> {target}"),
                Entry::Denied => writeln!(out, "{path}:denied"),
                Entry::Bytes(bytes) => match std::str::from_utf8(bytes) {
                    Ok(text) if !text.contains(['\0', '\r']) => {
                        let body = text.strip_suffix('\n').unwrap_or(text);
                        if !body.is_empty() && !body.contains('\n') && body.trim() == body {
                            writeln!(out, "{path}: {body}")
                        } else {
                            out.push_str(path);
                            out.push_str(":\n");
                            for line in text.lines() {
                                out.push_str("| ");
                                out.push_str(line);
                                out.push('\n');
                            }
                            Ok(())
                        }
                    }
                    _ => {
                        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
                        writeln!(out, "{path}:x {hex}")
                    }
                },
            };
        }
        out
    }

    pub(super) fn put(&mut self, path: String, entry: Entry) {
        self.entries.insert(path, entry);
    }

    /// Every path below `folder` is in one run of the map.
    fn below<'a>(&'a self, folder: &str) -> impl Iterator<Item = &'a str> {
        let prefix = format!("{}/", folder.trim_end_matches('/'));
        let from = prefix.clone();
        self.entries
            .range(from..)
            .map(|(p, _)| p.as_str())
            .take_while(move |p| p.starts_with(&prefix))
    }
}

fn entry(line: &str) -> Option<(String, Entry)> {
    if let Some((path, target)) = line.split_once(" -> ") {
        return Some((path.to_owned(), Entry::Link(target.to_owned())));
    }
    if let Some(path) = line.strip_suffix(":denied") {
        return Some((path.to_owned(), Entry::Denied));
    }
    if let Some((path, hex)) = line.split_once(":x ") {
        return Some((path.to_owned(), Entry::Bytes(unhex(hex)?)));
    }
    if let Some((path, text)) = line.split_once(": ") {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(b'\n');
        return Some((path.to_owned(), Entry::Bytes(bytes)));
    }
    if let Some(path) = line.strip_suffix(':') {
        return Some((path.to_owned(), Entry::Bytes(Vec::new())));
    }
    line.strip_suffix('/')
        .map(|path| (path.to_owned(), Entry::Folder))
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim().as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}

impl Tree for Manifest {
    fn kind(&self, path: &str) -> Option<Kind> {
        match self.entries.get(path) {
            Some(Entry::Folder) => Some(Kind::Folder),
            Some(Entry::Link(_)) => Some(Kind::Link),
            Some(Entry::Bytes(_) | Entry::Denied) => Some(Kind::File),
            None => self.below(path).next().map(|_| Kind::Folder),
        }
    }

    fn target(&self, path: &str) -> Option<String> {
        match self.entries.get(path) {
            Some(Entry::Link(target)) => Some(target.clone()),
            _ => None,
        }
    }

    fn bytes(&self, path: &str) -> Result<Vec<u8>, Denied> {
        match self.entries.get(path) {
            Some(Entry::Bytes(bytes)) => Ok(bytes.clone()),
            Some(Entry::Denied) => Err(Denied::Permission),
            _ => Err(Denied::Absent),
        }
    }

    fn names(&self, path: &str, want: &dyn Fn(&str) -> bool) -> Vec<String> {
        let prefix = path.trim_end_matches('/').len() + 1;
        let names: BTreeSet<&str> = self
            .below(path)
            .filter_map(|p| p[prefix..].split('/').next())
            .filter(|name| want(name))
            .collect();
        names.into_iter().map(str::to_owned).collect()
    }

    fn elf_text(&self, path: &str) -> Option<String> {
        let bytes = self.bytes(&format!("{OWN}/elf{path}")).ok()?;
        String::from_utf8(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_what_it_reads() {
        let text = "/a/b: one\n/a/c:\n| two\n| \n| three: 3\n/a/d -> ../x\n/e/\n/f:denied\n/g:x 00ff\n/h:\n";
        let manifest = Manifest::parse(text).unwrap();
        assert_eq!(Manifest::parse(&manifest.print()).unwrap(), manifest);
        assert_eq!(manifest.bytes("/a/c").unwrap(), b"two\n\nthree: 3\n");
        assert_eq!(manifest.bytes("/g").unwrap(), [0, 255]);
        assert_eq!(manifest.bytes("/f"), Err(Denied::Permission));
        assert_eq!(manifest.names("/a", &|_| true), ["b", "c", "d"]);
        assert_eq!(manifest.names("/", &|n| n == "e"), ["e"]);
    }

    #[test]
    fn a_capture_that_was_cut_is_refused_wherever_it_was() {
        let text = "/a/b: one\n/a/c:\n| two\n| three\n/a/d -> ../x\n";
        let whole = Manifest::parse(text).unwrap().capture();
        assert_eq!(
            Manifest::whole(&whole).unwrap(),
            Manifest::parse(text).unwrap()
        );
        for at in 0..whole.trim_end().len() {
            let cut = Manifest::whole(&whole[..at]);
            assert!(matches!(cut, Err(Error::Cut { .. })), "cut at {at}");
        }
    }

    #[test]
    fn a_bad_line_is_named() {
        for (text, line) in [
            ("nonsense", 1),
            ("/a: 1\n| more", 2),
            ("\n/a", 2),
            ("/a:x 0", 1),
            ("/a/../b: 1", 1),
        ] {
            let Err(Error::Manifest { line: at, .. }) = Manifest::parse(text) else {
                panic!("{text:?} was accepted")
            };
            assert_eq!(at, line, "{text:?}");
        }
    }
}
