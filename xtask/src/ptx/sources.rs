//! The hashes of the sources that the PTX was built from, so that a machine that cannot rebuild it still knows that it is current.
//!
//! `crates/doorbell-kernels/tests/sources.rs` makes the same comparison in an ordinary `cargo test`.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

/// Folders whose Rust files go into the PTX.
const FOLDERS: [&str; 3] = [
    "crates/doorbell-wire/src",
    "crates/doorbell-device/src",
    "crates/doorbell-kernels/src",
];
/// What does not: host code, tests, and the packet formats, which a cargo feature hides from the PTX build.
const NOT: [&str; 3] = [
    "crates/doorbell-device/src/host",
    "crates/doorbell-wire/src/roce",
    "tests.rs",
];

/// One line a file, sorted: hash, two spaces, path (`sha256sum -c` reads it).
pub(super) fn hashes(root: &Path) -> Result<String> {
    let mut files = Vec::new();
    for folder in FOLDERS {
        collect(root, Path::new(folder), &mut files)?;
    }
    files.sort();
    let mut out = String::new();
    for file in files {
        let bytes = fs::read(root.join(&file))
            .with_context(|| format!("cannot read {}", file.display()))?;
        for byte in Sha256::digest(bytes) {
            let _ = write!(out, "{byte:02x}");
        }
        let _ = writeln!(out, "  {}", file.display());
    }
    Ok(out)
}

fn collect(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(root.join(folder))
        .with_context(|| format!("cannot read {}", folder.display()))?
    {
        let path = folder.join(entry?.file_name());
        if NOT.iter().any(|n| path.ends_with(n)) {
            continue;
        }
        if root.join(&path).is_dir() {
            collect(root, &path, files)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Refuses sources that are not those recorded.
pub(super) fn verify(root: &Path, recorded: &str) -> Result<()> {
    let now = hashes(root)?;
    if now == recorded {
        return Ok(());
    }
    let changed: Vec<&str> = now
        .lines()
        .filter(|l| !recorded.lines().any(|r| r == *l))
        .chain(recorded.lines().filter(|r| !now.lines().any(|l| l == *r)))
        .filter_map(|l| l.split("  ").nth(1))
        .collect();
    bail!(
        "the PTX is older than its sources ({}); run `cargo xtask ptx` and commit",
        changed.join(", ")
    );
}
