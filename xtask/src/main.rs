//! The project's own build steps and checks, run as `cargo xtask NAME`.
//!
//! Each subcommand is one module with an `Args` and a `run`; this file only dispatches.
//! Nothing here is needed to use Doorbell: the committed PTX and headers are enough.

mod aarch64;
mod builder;
mod cargo;
mod dist;
mod elf;
mod layers;
mod licenses;
mod ptx;
mod wheel;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Doorbell's build steps and checks.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the kernels to PTX, or check the committed PTX.
    Ptx(ptx::Args),
    /// Build what is shipped: bin/, lib/, include/, ptx/, share/ and the licences.
    Dist(dist::Args),
    /// Build the Python wheel (distribution doorbell-gpu, module doorbell).
    Wheel(wheel::Args),
    /// Check that crates use only the crates above them.
    Layers,
    /// Check the licences of every dependency.
    Licenses,
    /// `cargo check` for aarch64 Linux, with a standard library built from source.
    Aarch64,
}

fn main() -> Result<()> {
    let root = root();
    match Cli::parse().command {
        Command::Ptx(args) => ptx::run(&root, &args),
        Command::Dist(args) => dist::run(&root, &args),
        Command::Wheel(args) => wheel::run(&root, &args),
        Command::Layers => layers::run(&root),
        Command::Licenses => licenses::run(&root),
        Command::Aarch64 => aarch64::run(&root),
    }
}

/// The workspace's root: the folder above this crate's.
fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map(PathBuf::from).unwrap_or(here)
}
