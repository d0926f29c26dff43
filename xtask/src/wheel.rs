//! `cargo xtask wheel`: the Python wheel, distribution `doorbell-gpu`, module `doorbell`.
//!
//! The portable distribution is built first; its library, headers, PTX and licences go into the package's folder, where
//! `doorbell path` finds them, and maturin adds the command to the wheel's scripts. The files copied into `python/doorbell/` are
//! ignored by git. Needs `pip install maturin ziglang cargo-zigbuild`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::builder::{GLIBC, SHIPPED_PROFILE};
use crate::cargo::{output, run as run_command};
use crate::dist;

/// For which machine, and where to put it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder for the wheel.
    #[arg(long, default_value = "target/wheels")]
    out: PathBuf,
    /// Build for another machine, for example aarch64-unknown-linux-gnu (`rustup target add` it first).
    #[arg(long)]
    target: Option<String>,
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    if output(Command::new("maturin").arg("--version")).is_err() {
        bail!(
            "maturin is not in PATH: `python3 -m pip install maturin ziglang cargo-zigbuild` in a virtual environment"
        );
    }
    let triple = args
        .target
        .clone()
        .unwrap_or_else(|| format!("{}-unknown-linux-gnu", std::env::consts::ARCH));
    let portable = PathBuf::from("target/portable");
    dist::run(
        root,
        &dist::Args {
            out: portable.clone(),
            portable: true,
            target: Some(triple.clone()),
            tar: true,
        },
    )?;
    fill(root, &root.join(&portable), &root.join("python/doorbell"))?;

    let out = root.join(&args.out);
    run_command(
        Command::new("maturin")
            .current_dir(root.join("python"))
            // As for the archive, or everything is built twice.
            .envs(SHIPPED_PROFILE)
            .args([
                "build",
                "--release",
                "--locked",
                "--zig",
                "--target",
                &triple,
            ])
            .arg("--compatibility")
            .arg(format!("manylinux_{}_{}", GLIBC.0, GLIBC.1))
            .arg("--out")
            .arg(&out),
    )?;
    let mut wheels: Vec<PathBuf> = fs::read_dir(&out)
        .with_context(|| format!("cannot read {}", out.display()))?
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "whl"))
        .collect();
    wheels.sort();
    ensure!(
        !wheels.is_empty(),
        "maturin left no wheel in {}",
        out.display()
    );
    for wheel in wheels {
        println!("wheel: {}", wheel.display());
    }
    Ok(())
}

/// Puts what the module carries beside its sources.
fn fill(root: &Path, dist: &Path, package: &Path) -> Result<()> {
    for folder in ["lib", "include", "ptx", "licenses"] {
        let to = package.join(folder);
        if to.exists() {
            fs::remove_dir_all(&to).with_context(|| format!("cannot remove {}", to.display()))?;
        }
        fs::create_dir_all(&to).with_context(|| format!("cannot create {}", to.display()))?;
    }
    for folder in ["include", "ptx"] {
        for entry in fs::read_dir(dist.join(folder))? {
            let entry = entry?;
            fs::copy(entry.path(), package.join(folder).join(entry.file_name()))?;
        }
    }
    let share = package.join(crate::dist::DOCUMENTS);
    if share.exists() {
        fs::remove_dir_all(&share).with_context(|| format!("cannot remove {}", share.display()))?;
    }
    crate::dist::documents(root, &share)?;
    // A wheel has no symbolic links: the loader's name is the file, and the linker's name is a script that gives it.
    fs::copy(
        dist.join("lib/libdoorbell.so.0"),
        package.join("lib/libdoorbell.so.0"),
    )
    .context("the distribution has no lib/libdoorbell.so.0")?;
    for (_, name, _) in crate::dist::PLUGINS {
        fs::copy(dist.join("lib").join(name), package.join("lib").join(name))
            .with_context(|| format!("the distribution has no lib/{name}"))?;
    }
    fs::write(
        package.join("lib/libdoorbell.so"),
        "/* linker script: a wheel carries no symbolic links */\nINPUT(libdoorbell.so.0)\n",
    )?;
    fs::copy(
        dist.join("licenses/README.txt"),
        package.join("licenses/README.txt"),
    )?;
    Ok(())
}
