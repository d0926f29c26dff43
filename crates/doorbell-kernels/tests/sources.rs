//! The committed PTX belongs to the committed sources: their hashes were written beside it when it was built.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use sha2::{Digest, Sha256};

#[test]
fn ptx_is_as_old_as_its_sources() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.join("../..");
    let recorded =
        fs::read_to_string(here.join("ptx/doorbell.ptx.sources")).expect("written with the PTX");
    let mut files = 0;
    for line in recorded.lines() {
        let (hash, file) = line.split_once("  ").expect("hash, two spaces, path");
        let bytes = fs::read(root.join(file))
            .unwrap_or_else(|e| panic!("{file}: {e}; if it was removed, run `cargo xtask ptx`"));
        let mut now = String::new();
        for byte in Sha256::digest(bytes) {
            write!(now, "{byte:02x}").expect("strings take everything");
        }
        assert_eq!(
            now, hash,
            "{file} is newer than the PTX; run `cargo xtask ptx` and commit"
        );
        files += 1;
    }
    assert!(files > 10, "only {files} sources recorded");
    assert!(doorbell_kernels::PTX.contains(".visible .entry put_bw("));
}

#[test]
fn every_kernel_is_in_the_ptx_and_on_the_host() {
    for kernel in doorbell_kernels::HOST {
        let entry = format!(".visible .entry {}(", kernel.name);
        assert!(
            modules().any(|ptx| ptx.contains(&entry)),
            "{} is not in the PTX",
            kernel.name
        );
    }
    let entries = modules().map(|ptx| ptx.matches(".visible .entry ").count());
    assert_eq!(entries.sum::<usize>(), doorbell_kernels::HOST.len());
}

fn modules() -> impl Iterator<Item = &'static str> {
    [doorbell_kernels::PTX, doorbell_kernels::COPIES_PTX].into_iter()
}
