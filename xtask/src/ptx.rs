//! `cargo xtask ptx`: builds the kernels to PTX, or checks the committed PTX.

use std::path::Path;

use anyhow::{Result, bail};

/// What to do with the PTX.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare with the committed PTX instead of replacing it.
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(_root: &Path, args: &Args) -> Result<()> {
    let _ = args.check;
    bail!("the kernels are not there yet")
}
