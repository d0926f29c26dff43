//! Where facts come from: a tree of files, live or captured.
//!
//! Everything that doctor knows comes through [`Tree`], so a machine that somebody sends us is as
//! good as the one we run on. Links are resolved here, component by component, so that absolute
//! links stay inside a captured tree. What is not a file (the environment, the size of a mount,
//! the inside of a large library) appears as a small text under [`OWN`].

mod live;
mod manifest;
mod record;

pub use live::Live;
pub use manifest::Manifest;
pub use record::Recorder;

use std::collections::BTreeMap;

use crate::elf::Elf;

/// The folder of what is not a file: `env`, `arch`, `statfs/…`, `elf/…`.
pub const OWN: &str = "/.doorbell";

/// What is at a path, links not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Something to read.
    File,
    /// Something to list.
    Folder,
    /// A link.
    Link,
}

/// A machine's files. Paths are absolute, with `/` between names.
pub trait Tree {
    /// What is there, links not followed; `None` when nothing is, or it may not be seen.
    fn kind(&self, path: &str) -> Option<Kind>;
    /// The target of a link, as it is written there.
    fn target(&self, path: &str) -> Option<String>;
    /// The bytes of a file (at most a megabyte of it), links not followed.
    fn bytes(&self, path: &str) -> Result<Vec<u8>, Denied>;
    /// Names in a folder that `want` takes, sorted, links not followed.
    fn names(&self, path: &str, want: &dyn Fn(&str) -> bool) -> Vec<String>;
    /// What is used of a shared object, as text: what it links to, exports and says of its version.
    fn elf_text(&self, path: &str) -> Option<String>;
}

/// Why there are no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// Nothing is there.
    Absent,
    /// Something is there and may not be read.
    Permission,
}

/// How many links one path may cross.
const LINKS: usize = 40;

/// A tree with links followed.
#[derive(Clone, Copy)]
pub(crate) struct View<'a>(pub(crate) &'a dyn Tree);

impl View<'_> {
    /// The path with every link resolved; `None` when it leads nowhere.
    pub(crate) fn real(self, path: &str) -> Option<String> {
        let mut left: Vec<String> = parts(path).rev().map(str::to_owned).collect();
        let mut real: Vec<String> = Vec::new();
        let mut links = 0;
        while let Some(part) = left.pop() {
            if part == ".." {
                real.pop();
                continue;
            }
            real.push(part);
            let here = join(&real);
            match self.0.kind(&here)? {
                Kind::Link => {
                    links += 1;
                    if links > LINKS {
                        return None;
                    }
                    let target = self.0.target(&here)?;
                    if target.starts_with('/') {
                        real.clear();
                    } else {
                        real.pop();
                    }
                    left.extend(parts(&target).rev().map(str::to_owned));
                }
                Kind::File | Kind::Folder => {}
            }
        }
        Some(join(&real))
    }

    pub(crate) fn exists(self, path: &str) -> bool {
        self.real(path).is_some()
    }

    pub(crate) fn bytes(self, path: &str) -> Result<Vec<u8>, Denied> {
        let real = self.real(path).ok_or(Denied::Absent)?;
        self.0.bytes(&real)
    }

    /// A text file, trailing white space gone and made harmless; `None` when it cannot be read.
    pub(crate) fn text(self, path: &str) -> Option<String> {
        let bytes = self.bytes(path).ok()?;
        Some(harmless(String::from_utf8_lossy(&bytes).trim_end()))
    }

    pub(crate) fn number(self, path: &str) -> Option<u64> {
        self.text(path)?.trim().parse().ok()
    }

    pub(crate) fn list(self, path: &str, want: impl Fn(&str) -> bool) -> Vec<String> {
        match self.real(path) {
            // Nothing of these machines has such a name.
            Some(real) => self
                .0
                .names(&real, &|n| !n.contains(char::is_control) && want(n)),
            None => Vec::new(),
        }
    }

    /// The last name of what a link leads to: `driver -> ../../bus/pci/drivers/mlx5_core`.
    pub(crate) fn leaf(self, path: &str) -> Option<String> {
        let target = self.0.target(&self.beside(path)?)?;
        parts(&target).last().map(harmless)
    }

    /// `path` with every link but the last one resolved.
    fn beside(self, path: &str) -> Option<String> {
        let (folder, name) = path.rsplit_once('/')?;
        let folder = if folder.is_empty() {
            String::new()
        } else {
            self.real(folder)?
        };
        Some(format!("{}/{name}", folder.trim_end_matches('/')))
    }

    pub(crate) fn elf(self, path: &str) -> Option<Elf> {
        let real = self.real(path)?;
        self.0
            .elf_text(&real)
            .map(|text| Elf::parse(&harmless(&text)))
    }

    /// The variables that matter, as the process or the capture has them.
    pub(crate) fn environment(self) -> BTreeMap<String, String> {
        let text = self.text(&format!("{OWN}/env")).unwrap_or_default();
        text.lines()
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }
}

/// What is read may be somebody else's, and is shown on a terminal: characters that would command it are replaced.
fn harmless(text: &str) -> String {
    let shown = |c: char| match c.is_control() && c != '\n' && c != '\t' {
        true => '\u{fffd}',
        false => c,
    };
    text.chars().map(shown).collect()
}

/// Names of a path, without empty ones and `.`.
fn parts(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|p| !p.is_empty() && *p != ".")
}

fn join(parts: &[String]) -> String {
    format!("/{}", parts.join("/"))
}

/// Variables that a capture may carry: what these libraries read, and no others. Names that could
/// hold a secret are left out whatever their prefix.
pub(crate) fn may_carry(name: &str) -> bool {
    const PREFIXES: &[&str] = &[
        "NCCL_",
        "NVSHMEM_",
        "UCX_",
        "NIXL_",
        "DOCA_",
        "DOORBELL_",
        "CUDA_",
        "GDRCOPY_",
    ];
    const NAMES: &[&str] = &[
        "HOME",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "PATH",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYTHONPATH",
    ];
    const SECRET: &[&str] = &["KEY", "TOKEN", "SECRET", "PASS", "CRED", "UNIQUE"];
    (PREFIXES.iter().any(|p| name.starts_with(p)) || NAMES.contains(&name))
        && !SECRET.iter().any(|s| name.contains(s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_stay_in_the_tree_and_loops_end() {
        let tree = Manifest::parse(
            "/sys/class/net/eth0 -> ../../devices/pci0000:00/eth0\n/sys/devices/pci0000:00/eth0/speed: 100\n\
             /abs -> /sys/class\n/loop -> loop\n/dangling -> /nowhere\n",
        )
        .unwrap();
        let view = View(&tree);
        assert_eq!(
            view.real("/abs/net/eth0/speed").as_deref(),
            Some("/sys/devices/pci0000:00/eth0/speed")
        );
        assert_eq!(view.number("/sys/class/net/eth0/speed"), Some(100));
        assert_eq!(view.real("/loop"), None);
        assert_eq!(view.real("/dangling"), None);
        assert_eq!(view.leaf("/abs/net/eth0").as_deref(), Some("eth0"));
    }

    #[test]
    fn what_is_read_commands_no_terminal() {
        let text = "/a/model: x\u{1b}[2Jy\n/a/b\u{9b}c/\n/d -> /a/mo\u{7f}del\n";
        let tree = Manifest::parse(text).unwrap();
        let view = View(&tree);
        assert_eq!(view.text("/a/model").as_deref(), Some("x\u{fffd}[2Jy"));
        assert_eq!(view.list("/a", |_| true), ["model"]);
        assert_eq!(view.leaf("/d").as_deref(), Some("mo\u{fffd}del"));
    }

    #[test]
    fn secrets_are_not_carried() {
        assert!(may_carry("NCCL_GIN_TYPE"));
        assert!(!may_carry("USER"));
        assert!(!may_carry("NIXL_ETCD_PASSWORD"));
        assert!(!may_carry("UCX_TOKEN"));
    }
}
