//! The `doorbell` command: `info` says what would be used here and why, `perf` measures and checks.

// Those macros panic where nobody reads any more.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod args_sweep;
mod args_tools;
mod compare;
mod config;
mod cputime;
mod doctor;
mod dump;
mod environment;
mod explain;
mod foreign;
mod hwtest;
mod info;
mod lists;
mod perf;
mod pin;
mod pingpong;
mod plugins;
mod progress;
mod schema;
mod serve;
mod ship;
mod stat;
mod stats;
mod sweep;
mod table;
mod units;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Cli, Command};

/// The version, with the commit it was built from where that is known.
pub(crate) const VERSION: &str = env!("DOORBELL_VERSION");

/// How a command that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Well,
    /// It ran, and what it moved was not what arrived.
    CheckFailed,
    /// The same, and the other side of the run says so.
    CheckFailedThere,
    /// It ran well, and its capture is not whole.
    CaptureEnded {
        lost: u64,
    },
    /// `doctor`'s verdict is its exit status.
    Verdict(u8),
}

/// Context of errors that are the caller's: options that do not go together.
#[derive(Debug)]
pub(crate) struct WrongArguments;

impl std::fmt::Display for WrongArguments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("wrong arguments")
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log();
    // A file that may not grow further is an error of the write, as a full disk is, and kills nobody: the signal has a handler that does nothing.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let ended = match &cli.command {
        Command::Info(args) => info::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Perf(args) => perf::run(args),
        Command::Path(args) => ship::path(args),
        Command::Completions(args) => ship::completions(args),
        Command::Man(args) => ship::man(args),
        Command::Peer(args) => perf::peer::serve(args).map(|()| Ended::Well),
        Command::Serve(args) => serve::run(args),
        Command::Pingpong(args) => pingpong::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Dump(args) => dump::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Sweep(args) => sweep::run(args),
        Command::Hwtest(args) => hwtest::run(args),
        Command::Compare(args) => compare::run(args),
    };
    match ended {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::CheckFailed) => {
            complain("doorbell: a check failed");
            ExitCode::from(3)
        }
        Ok(Ended::CheckFailedThere) => ExitCode::from(3),
        Ok(Ended::CaptureEnded { lost }) => {
            complain(&format!(
                "doorbell: the run is well, its capture is not: {} packets are missing at its end",
                units::grouped(lost)
            ));
            ExitCode::FAILURE
        }
        Ok(Ended::Verdict(status)) => ExitCode::from(status),
        // Whoever read our output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::FAILURE,
        Err(error) => {
            complain(&format!("doorbell: {}", words(&error)));
            match error.is::<WrongArguments>() {
                true => ExitCode::from(2),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// Whether a stream gets colours and moving bars: a terminal, unless `NO_COLOR` says otherwise. A launcher gives its ranks terminals of
/// its own and passes on what they print, wherever that goes.
pub(crate) fn is_styled(stream: &impl IsTerminal) -> bool {
    let launched = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
    stream.is_terminal()
        && std::env::var_os("NO_COLOR").is_none()
        && !launched.iter().any(|name| std::env::var_os(name).is_some())
}

/// One line on standard error. Who has closed that does not want to know.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// An error and what is behind it, each thing once: many errors of the libraries already name their cause.
pub(crate) fn words(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|e| {
        e.downcast_ref::<std::io::Error>()
            .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    })
}

/// Warnings go to standard error; `DOORBELL_LOG` asks for more.
fn log() {
    let filter = EnvFilter::try_from_env("DOORBELL_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(is_styled(&std::io::stderr()))
        .with_target(false)
        .without_time()
        .init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_was_named_is_not_named_again() {
        let error = doorbell::Error::Os {
            what: "making a thing",
            source: std::io::Error::other("no room"),
        };
        let error = anyhow::Error::new(error).context("put-bw");
        assert_eq!(words(&error), "put-bw: making a thing: no room");
        let error = anyhow::anyhow!("a").context("b").context("a");
        assert_eq!(words(&error), "a: b");
    }
}
