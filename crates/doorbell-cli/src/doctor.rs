//! `doorbell doctor`: which GPU-initiated path the libraries of this node will take, and why.
//!
//! Nothing is opened but files, so it runs where nothing else of this command would. Its exit status
//! is the verdict, hence its own errors are 3 here, not 1.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use doorbell_doctor::tree::{Live, Manifest, Recorder, Tree};
use doorbell_doctor::{examine, screen};

use crate::Ended;

/// Status of a run that could not judge.
const COULD_NOT: u8 = 3;

const AFTER: &str = "\
Examples:
  doorbell doctor                    the screen
  doorbell doctor --json             one JSON object (docs/doctor.md)
  doorbell doctor --capture my.node  what was read, as text to read and send
  doorbell doctor --root my.node     judge somebody else's machine

Exit status: 0 every installed library drives the NIC from the GPU, 1 at least
one falls back, 2 wrong arguments, 3 doctor itself failed, 4 none is installed.";

#[derive(Clone, Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct DoctorArgs {
    /// One JSON object on standard output instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Judge a captured machine: a folder, or a file of --capture
    #[arg(long, value_name = "DIR|FILE")]
    pub(crate) root: Option<PathBuf>,
    /// Also write what was read: text into FILE, or files into the folder DIR.
    /// Of the environment only variables of these libraries are kept
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) capture: Option<PathBuf>,
}

/// Prints it; every error is told here, since status 1 means something else.
pub(crate) fn run(args: &DoctorArgs) -> Result<Ended> {
    let status = judge(args).unwrap_or_else(|error| {
        crate::complain(&format!("doorbell: {}", crate::words(&error)));
        COULD_NOT
    });
    Ok(Ended::Verdict(status))
}

fn judge(args: &DoctorArgs) -> Result<u8> {
    let tree: Box<dyn Tree> = match &args.root {
        None => Box::new(Live::here()),
        Some(root) => open(root)?,
    };
    let report = match &args.capture {
        None => examine(&*tree),
        Some(to) => {
            let recorder = Recorder::new(&*tree);
            let report = examine(&recorder);
            recorder.manifest().write(to)?;
            report
        }
    };
    let mut out = io::stdout().lock();
    let text = if args.json {
        serde_json::to_string_pretty(&report).context("writing JSON")? + "\n"
    } else {
        let colour = crate::is_styled(&io::stdout());
        screen(&report, colour)
    };
    match out.write_all(text.as_bytes()) {
        // Whoever read our output has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        other => other.context("writing to standard output")?,
    }
    Ok(report.verdict.status())
}

fn open(root: &Path) -> Result<Box<dyn Tree>> {
    if root.is_file() {
        let text = std::fs::read_to_string(root).with_context(|| {
            format!(
                "reading {}: give --root a file that --capture wrote",
                root.display()
            )
        })?;
        return Ok(Box::new(Manifest::parse(&text)?));
    }
    Ok(Box::new(Live::under(root)?))
}
