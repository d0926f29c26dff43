//! Keeps what is read: a capture is exactly what the verdicts were made from, and no more.

use std::cell::RefCell;
use std::path::Path;

use super::live::END_FILE;
use super::manifest::Entry;
use super::{Denied, Kind, Manifest, OWN, Tree};
use crate::error::Error;

/// A tree that notes every answer of another.
pub struct Recorder<'a> {
    tree: &'a dyn Tree,
    kept: RefCell<Manifest>,
}

impl<'a> Recorder<'a> {
    /// Records what is read of `tree`.
    pub fn new(tree: &'a dyn Tree) -> Self {
        Self {
            tree,
            kept: RefCell::default(),
        }
    }

    /// What was read so far.
    pub fn manifest(self) -> Manifest {
        self.kept.into_inner()
    }

    fn keep(&self, path: &str, entry: Entry) {
        let mut kept = self.kept.borrow_mut();
        // Bytes say more than "it is there".
        if !matches!(kept.entries.get(path), Some(Entry::Bytes(b)) if !b.is_empty()) {
            kept.put(path.to_owned(), entry);
        }
    }
}

impl Tree for Recorder<'_> {
    fn kind(&self, path: &str) -> Option<Kind> {
        let kind = self.tree.kind(path)?;
        match kind {
            Kind::Link => {
                if let Some(target) = self.tree.target(path) {
                    self.keep(path, Entry::Link(target));
                }
            }
            Kind::Folder => {
                if path != "/" {
                    self.keep(path, Entry::Folder);
                }
            }
            Kind::File => {
                if !self.kept.borrow().entries.contains_key(path) {
                    self.keep(path, Entry::Bytes(Vec::new()));
                }
            }
        }
        Some(kind)
    }

    fn target(&self, path: &str) -> Option<String> {
        let target = self.tree.target(path)?;
        self.keep(path, Entry::Link(target.clone()));
        Some(target)
    }

    fn bytes(&self, path: &str) -> Result<Vec<u8>, Denied> {
        let answer = self.tree.bytes(path);
        match &answer {
            Ok(bytes) => self.keep(path, Entry::Bytes(needed(path, bytes))),
            Err(Denied::Permission) => self.keep(path, Entry::Denied),
            Err(Denied::Absent) => {}
        }
        answer
    }

    fn names(&self, path: &str, want: &dyn Fn(&str) -> bool) -> Vec<String> {
        let names = self.tree.names(path, want);
        for name in &names {
            // Asking for the kind keeps it.
            self.kind(&format!("{}/{name}", path.trim_end_matches('/')));
        }
        names
    }

    fn elf_text(&self, path: &str) -> Option<String> {
        let text = self.tree.elf_text(path)?;
        self.keep(
            &format!("{OWN}/elf{path}"),
            Entry::Bytes(text.clone().into_bytes()),
        );
        Some(text)
    }
}

/// Of files that say much more than is used, the part that is used.
fn needed(path: &str, bytes: &[u8]) -> Vec<u8> {
    let lines = |want: &dyn Fn(&str) -> bool| -> Vec<u8> {
        let text = String::from_utf8_lossy(bytes);
        text.lines()
            .filter(|l| want(l))
            .flat_map(|l| [l, "\n"])
            .collect::<String>()
            .into_bytes()
    };
    match path {
        "/proc/cpuinfo" => {
            // One processor stands for all.
            let first = bytes
                .windows(2)
                .position(|w| w == b"\n\n")
                .map_or(bytes.len(), |at| at + 1);
            bytes[..first].to_vec()
        }
        "/proc/meminfo" => lines(&|l| l.starts_with("MemTotal") || l.starts_with("HugePages")),
        // `/proc/self` is a link to the number of the process.
        _ if path.starts_with("/proc/") && path.ends_with("/status") => {
            lines(&|l| l.starts_with("CapEff"))
        }
        _ if path.starts_with("/proc/") && path.ends_with("/limits") => {
            lines(&|l| l.starts_with("Limit") || l.starts_with("Max locked memory"))
        }
        _ => bytes.to_vec(),
    }
}

impl Manifest {
    /// Writes the tree into the folder `to`; [`Self::capture`] is the same as text.
    ///
    /// # Errors
    /// [`Error::Capture`] when it cannot be written.
    pub fn write(&self, to: &Path) -> Result<(), Error> {
        let fault = |source| Error::Capture {
            path: to.to_owned(),
            source,
        };
        let is_link = |entry: &Entry| matches!(entry, Entry::Link(_));
        // Links last: nothing is written through one.
        for links in [false, true] {
            for (path, entry) in self.entries.iter().filter(|(_, e)| is_link(e) == links) {
                let at = to.join(path.trim_start_matches('/'));
                if let Some(parent) = at.parent() {
                    std::fs::create_dir_all(parent).map_err(fault)?;
                }
                match entry {
                    Entry::Folder => std::fs::create_dir_all(&at),
                    Entry::Link(target) => std::os::unix::fs::symlink(target, &at),
                    Entry::Bytes(bytes) => std::fs::write(&at, bytes),
                    // Nothing readable is there either way.
                    Entry::Denied => Ok(()),
                }
                .map_err(fault)?;
            }
        }
        let own = to.join(OWN.trim_start_matches('/'));
        std::fs::create_dir_all(&own)
            .and_then(|()| std::fs::write(own.join(END_FILE), b""))
            .map_err(fault)
    }
}
