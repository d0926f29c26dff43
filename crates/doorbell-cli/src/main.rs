//! The `doorbell` command: `info` says what would be used here and why, `perf` measures and checks.

// Those macros panic where nobody reads any more.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod compare;
mod config;
mod cputime;
mod device_error;
mod doctor;
mod dump;
mod environment;
mod explain;
mod files;
mod foreign;
mod hwtest;
mod info;
mod json;
mod lists;
mod man;
mod out;
mod perf;
mod pin;
mod pingpong;
mod plugins;
mod progress;
mod schema;
mod serve;
mod ship;
mod signals;
mod stat;
mod stats;
mod sweep;
mod table;
mod units;
mod variables;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

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
    CaptureCut {
        lost: u64,
    },
    /// `doctor`'s verdict is its exit status; so is that of `dump` on a damaged record.
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
    // A file that may not grow further is an error of the write, as a full disk is, and kills nobody: the signal has a handler that does nothing.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    // The second process of a run, which this command starts itself: no command for people.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == "peer")
    {
        let args = args::PeerArgs::parse_from(std::env::args_os().skip(1));
        log("warn", false);
        return status(perf::peer::serve(&args).map(|()| Ended::Well));
    }
    let cli = Cli::try_parse().unwrap_or_else(|e| {
        let steers = |word: std::ffi::OsString| word.to_string_lossy().contains(char::is_control);
        if std::env::args_os().any(steers) {
            complain(shown(&e.render().to_string()).trim_end());
            std::process::exit(e.exit_code());
        }
        e.exit()
    });
    // What an explanation provokes is on its page.
    match &cli.command {
        Command::Explain(_) => log("error", false),
        command => log("warn", matches!(command, Command::Hwtest(_))),
    }
    status(run(&cli.command))
}

/// Files that a command writes, of those that write several.
fn outputs(command: &Command) -> Vec<(&'static str, &std::path::Path)> {
    match command {
        Command::Perf(args) => [
            ("--json", &args.json),
            ("--trace", &args.trace),
            ("--pcap", &args.remote.pcap),
        ]
        .into_iter()
        .filter_map(|(name, path)| Some((name, path.as_deref()?)))
        .collect(),
        Command::Hwtest(args) => args.outputs().to_vec(),
        _ => Vec::new(),
    }
}

fn run(command: &Command) -> anyhow::Result<Ended> {
    files::distinct(&outputs(command))?;
    match command {
        Command::Info(args) => info::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Perf(args) => perf::run(args),
        Command::Path(args) => ship::path(args),
        Command::Completions(args) => ship::completions(args),
        Command::Man(args) => ship::man(args),
        Command::Serve(args) => serve::run(args),
        Command::Pingpong(args) => pingpong::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Dump(args) => dump::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Sweep(args) => sweep::run(args),
        Command::Hwtest(args) => hwtest::run(args),
        Command::Compare(args) => compare::run(args),
    }
}

/// What a command's end is to who started it.
fn status(ended: anyhow::Result<Ended>) -> ExitCode {
    match ended {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::CheckFailed) => {
            complain("doorbell: a check failed");
            ExitCode::from(3)
        }
        Ok(Ended::CheckFailedThere) => ExitCode::from(3),
        Ok(Ended::CaptureCut { lost }) => {
            complain(&format!(
                "doorbell: the run is well, its capture is not: {} packets are missing at its end",
                units::grouped(lost)
            ));
            ExitCode::FAILURE
        }
        Ok(Ended::Verdict(status)) => ExitCode::from(status),
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
    progress::beside(|| {
        let _ = writeln!(std::io::stderr(), "{line}");
    });
}

/// Text in which something is that a user, a peer or a file gave: a terminal is to be told of it, not steered.
pub(crate) fn shown(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() && !matches!(c, '\n' | '\t') {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
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
    let mut shown = shown(&text);
    let too_many = format!("(os error {})", rustix::io::Errno::MFILE.raw_os_error());
    if shown.contains(&too_many) && !shown.contains("ulimit -n") {
        shown.push_str(": ");
        shown.push_str(doorbell::limits::FILES);
    }
    shown
}

/// What `DOORBELL_LOG` may be.
const LOG_REMEDY: &str =
    "give off, error, warn, info, debug or trace, or a list such as doorbell_hca=debug,warn";

/// Warnings, or whatever is `usual`, go to standard error; `DOORBELL_LOG` asks for more. Whoever is to `keep` them has them in its results, too.
fn log(usual: &str, keep: bool) {
    let asked = std::env::var_os("DOORBELL_LOG").unwrap_or_default();
    let filter = filter(&asked.to_string_lossy(), usual).unwrap_or_else(|why| {
        complain(&format!(
            "doorbell: DOORBELL_LOG={}: {why}: {LOG_REMEDY}; it is taken as {usual}",
            asked.display()
        ));
        EnvFilter::new(usual)
    });
    let shown = tracing_subscriber::fmt::layer()
        .with_writer(|| progress::Log)
        .with_ansi(is_styled(&std::io::stderr()))
        .with_target(false)
        .without_time()
        .with_filter(filter);
    let kept = keep.then(|| {
        tracing_subscriber::fmt::layer()
            .with_writer(|| hwtest::heard::Heard)
            .with_ansi(false)
            .with_target(false)
            .without_time()
            .with_filter(LevelFilter::WARN)
    });
    tracing_subscriber::registry().with(shown).with(kept).init();
}

/// What `DOORBELL_LOG` asks for. A word alone that is no level would be the name of a crate, all of which is shown and nothing else: so every
/// spelling mistake is one.
fn filter(text: &str, usual: &str) -> Result<EnvFilter, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    if text.trim().is_empty() {
        return Ok(EnvFilter::new(usual));
    }
    for part in text.split(',').map(str::trim) {
        let name = part.split(['=', '[']).next().unwrap_or(part);
        let level = LEVELS.contains(&part.to_ascii_lowercase().as_str());
        if !level && (name == part || name.is_empty()) && !name.starts_with("doorbell") {
            return Err(format!("`{part}` is no level"));
        }
    }
    EnvFilter::try_new(text).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_filter_that_means_nothing_is_named() {
        for good in [
            "",
            "debug",
            "WARN",
            "doorbell_hca=debug,warn",
            "doorbell_port",
        ] {
            assert!(filter(good, "warn").is_ok(), "{good}");
        }
        for bad in ["garbage", "info,debgu", "doorbell=loud", "7x"] {
            assert!(filter(bad, "warn").is_err(), "{bad}");
        }
    }

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

    #[test]
    fn what_was_given_does_not_steer_a_terminal() {
        let error = anyhow::anyhow!("no device a\x1b[31mb\u{9b}c\n  see there");
        assert_eq!(
            words(&error),
            "no device a\\u{1b}[31mb\\u{9b}c\n  see there"
        );
    }

    #[test]
    fn too_few_files_are_told_with_the_limit() {
        let error = std::io::Error::from_raw_os_error(24);
        let text = words(&anyhow::Error::new(error).context("opening a port"));
        assert!(text.contains("`ulimit -n 65536`"), "{text}");
    }
}
