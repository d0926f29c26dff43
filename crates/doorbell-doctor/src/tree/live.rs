//! The files of this machine, or of a folder that somebody captured from theirs.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{Denied, Kind, OWN, Tree, may_carry};
use crate::error::Error;

/// No fact needs more of a file than this; libraries are read through `elf_text`.
const MOST: u64 = 1 << 20;

/// What a captured folder's [`OWN`] has when it is whole.
pub(super) const END_FILE: &str = "end";

/// A real folder as the root of a tree.
#[derive(Debug)]
pub struct Live {
    root: PathBuf,
    /// The machine we run on: the process adds its environment and mounts.
    own: bool,
}

impl Live {
    /// The machine that this process runs on.
    pub fn here() -> Self {
        Self {
            root: PathBuf::from("/"),
            own: true,
        }
    }

    /// A captured tree.
    ///
    /// # Errors
    /// [`Error::Root`] when it is not a folder that can be read, [`Error::Cut`] for a capture that is not whole.
    pub fn under(root: &Path) -> Result<Self, Error> {
        fs::read_dir(root).map_err(|source| Error::Root {
            path: root.to_owned(),
            source,
        })?;
        let own = root.join(OWN.trim_start_matches('/'));
        // The root of another machine, mounted here, is no capture and has none.
        if own.exists() && !own.join(END_FILE).exists() {
            return Err(Error::Cut {
                mark: "the file `.doorbell/end`",
            });
        }
        Ok(Self {
            root: root.to_owned(),
            own: false,
        })
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// What the process knows and no file says.
    fn own(&self, path: &str) -> Option<String> {
        let name = path.strip_prefix(OWN)?.trim_start_matches('/');
        if !self.own {
            return None;
        }
        if let Some(mount) = name.strip_prefix("statfs/") {
            let stat = rustix::fs::statvfs(format!("/{mount}")).ok()?;
            return Some(format!(
                "size {}\nfree {}\n",
                stat.f_frsize * stat.f_blocks,
                stat.f_frsize * stat.f_bavail
            ));
        }
        match name {
            "arch" => Some(std::env::consts::ARCH.to_owned()),
            "env" => {
                let mut lines: Vec<String> = std::env::vars_os()
                    .filter_map(|(n, v)| Some((n.into_string().ok()?, v.into_string().ok()?)))
                    .filter(|(n, v)| may_carry(n) && !v.contains('\n'))
                    .map(|(n, v)| format!("{n}={v}\n"))
                    .collect();
                lines.sort();
                Some(lines.concat())
            }
            _ => None,
        }
    }
}

impl Tree for Live {
    fn kind(&self, path: &str) -> Option<Kind> {
        if self.own && path.starts_with(OWN) {
            // The two upper levels of our own folder are folders; what is asked for below is a file.
            return match path.strip_prefix(OWN)? {
                "" | "/statfs" | "/statfs/dev" => Some(Kind::Folder),
                _ => self.own(path).map(|_| Kind::File),
            };
        }
        let meta = fs::symlink_metadata(self.at(path)).ok()?;
        Some(if meta.is_symlink() {
            Kind::Link
        } else if meta.is_dir() {
            Kind::Folder
        } else {
            Kind::File
        })
    }

    fn target(&self, path: &str) -> Option<String> {
        fs::read_link(self.at(path))
            .ok()?
            .into_os_string()
            .into_string()
            .ok()
    }

    fn bytes(&self, path: &str) -> Result<Vec<u8>, Denied> {
        if let Some(text) = self.own(path) {
            return Ok(text.into_bytes());
        }
        let denied = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::PermissionDenied => Denied::Permission,
            _ => Denied::Absent,
        };
        let at = self.at(path);
        // Devices and pipes are looked at, never read: reading some of them has an effect.
        if !fs::metadata(&at).map_err(denied)?.is_file() {
            return Err(Denied::Absent);
        }
        let mut bytes = Vec::new();
        fs::File::open(at)
            .and_then(|f| f.take(MOST).read_to_end(&mut bytes))
            .map_err(denied)?;
        Ok(bytes)
    }

    fn names(&self, path: &str, want: &dyn Fn(&str) -> bool) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.at(path)) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .filter_map(|e| e.ok()?.file_name().into_string().ok())
            .filter(|name| want(name))
            .collect();
        names.sort();
        names
    }

    fn elf_text(&self, path: &str) -> Option<String> {
        if !self.own
            && let Ok(text) = self.bytes(&format!("{OWN}/elf{path}"))
        {
            return Some(String::from_utf8_lossy(&text).into_owned());
        }
        crate::elf::read(&self.at(path))
    }
}
