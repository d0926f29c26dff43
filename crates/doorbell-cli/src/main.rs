//! The `doorbell` command: `info` says what would be used here and why, `perf` measures and checks.

mod args;
mod cputime;
mod environment;
mod lists;
mod perf;
mod progress;
mod schema;
mod stats;
mod table;
mod units;

use clap::Parser;

/// The version with the commit it was built from.
pub(crate) const VERSION: &str = match option_env!("DOORBELL_GIT") {
    Some(git) => git,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() {
    let cli = args::Cli::parse();
    println!("{cli:?}");
}
