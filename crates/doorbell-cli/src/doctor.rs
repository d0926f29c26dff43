//! `doorbell doctor`: which GPU-initiated path the libraries of this node will take, and why.
//!
//! Nothing is opened but files, so it runs where nothing else of this command would. Its exit status
//! is the verdict, hence its own errors are 3 here, not 1.

use std::io::{self, Write as _};
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
  doorbell doctor --json             one JSON object (see doctor.md)
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
            write(&recorder.manifest(), to)?;
            report
        }
    };
    let text = if args.json {
        serde_json::to_string_pretty(&report).context("writing JSON")? + "\n"
    } else {
        let colour = crate::is_styled(&io::stdout());
        screen(&report, crate::out::columns(), colour)
    };
    crate::out::say(&text)?;
    Ok(report.verdict.status())
}

/// Into the folder `to` when there is one, else as text into a file of that name.
fn write(capture: &Manifest, to: &Path) -> Result<(), doorbell_doctor::Error> {
    if to.is_dir() {
        return capture.write(to);
    }
    doorbell::input::create(to)
        .and_then(|mut file| file.write_all(capture.capture().as_bytes()))
        .map_err(|source| doorbell_doctor::Error::Capture {
            path: to.to_owned(),
            source,
        })
}

/// A capture of a machine of hundreds of GPUs has some megabytes.
const MOST: u64 = 64 << 20;

fn open(root: &Path) -> Result<Box<dyn Tree>> {
    if root.is_dir() {
        return Ok(Box::new(Live::under(root)?));
    }
    let name = root.display();
    let text = doorbell::input::read_text(root, MOST).with_context(|| {
        format!("reading {name}: give --root a folder, or a file that --capture wrote")
    })?;
    let manifest = Manifest::whole(&text).with_context(|| name.to_string())?;
    Ok(Box::new(manifest))
}
