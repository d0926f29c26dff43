//! `cargo xtask aarch64`: the workspace must pass `cargo check` for aarch64 Linux.
//!
//! Where rustup has the target's standard library it is used; elsewhere it is built from source (rust-src),
//! which stable cargo does when `RUSTC_BOOTSTRAP=1` unlocks `-Zbuild-std`. Nothing is linked, so no cross linker is needed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::cargo::{cargo, output, run as run_command};

const TARGET: &str = "aarch64-unknown-linux-gnu";

pub(crate) fn run(root: &Path) -> Result<()> {
    let sysroot = PathBuf::from(output(Command::new("rustc").args(["--print", "sysroot"]))?.trim());
    let mut check = cargo(root);
    check.args([
        "check",
        "--workspace",
        "--exclude",
        "xtask",
        "--target",
        TARGET,
    ]);
    let how = if sysroot.join("lib/rustlib").join(TARGET).is_dir() {
        "with the installed standard library"
    } else if sysroot
        .join("lib/rustlib/src/rust/library/Cargo.lock")
        .is_file()
    {
        check.env("RUSTC_BOOTSTRAP", "1").arg("-Zbuild-std");
        "with a standard library built from source"
    } else {
        bail!(
            "no standard library for {TARGET} under {}: run `rustup target add {TARGET}` or `rustup component add rust-src`",
            sysroot.display()
        );
    };
    run_command(&mut check)?;
    println!("aarch64: cargo check passed {how}");
    Ok(())
}
