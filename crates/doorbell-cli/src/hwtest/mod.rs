//! `doorbell hwtest`: does this host's RDMA hardware carry Doorbell's queue pairs? For someone who has the hardware, to send back.
//!
//! It [finds](found) the devices, puts each active port through the [steps](trial) of correctness and a short [measurement](measure), with a second
//! host if there is one, and writes one JSON file and one page, whatever comes of it: that nothing could be tried, and why, is a result too.
//! It changes nothing on the system: it opens devices, sends between its own queue pairs, and reads files.

mod found;
pub(crate) mod heard;
mod measure;
mod page;
mod peer;
mod port;
mod system;
mod trial;

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::args::HwtestArgs;
use crate::schema::Outcome;
use crate::{Ended, WrongArguments, files};

/// The name and version of the result file.
const SCHEMA: &str = "doorbell-hwtest/4";

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    version: String,
    started: String,
    /// It came to its end: otherwise this is what was known when it stopped.
    complete: bool,
    /// Why nothing was tried; null: something was.
    nothing: Option<String>,
    host: system::Host,
    /// The second host.
    peer: Option<peer::Peer>,
    devices: Vec<DeviceResult>,
}

/// One port.
#[derive(Debug, Default, Serialize)]
struct DeviceResult {
    port: String,
    /// It was asked for by its name.
    asked: bool,
    /// Why it was not tested; null: it was.
    skipped: Option<String>,
    firmware: String,
    vendor: String,
    hardware: system::Hardware,
    link_layer: &'static str,
    state: &'static str,
    /// The path MTU that is used, in bytes.
    mtu: u16,
    max_message: u32,
    atomics: bool,
    /// The one that was used.
    gid: Option<String>,
    steps: Vec<Step>,
    /// Those to the second host.
    to_peer: Vec<Step>,
    perf: Vec<Measured>,
    /// Measurements that failed, and how.
    failed: Vec<Failed>,
    /// What was left out, and why.
    left_out: Vec<LeftOut>,
    /// Whether the device reaches the GPU's memory: `reached`, or why not; null: there is no CUDA GPU.
    gpu_memory: Option<String>,
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Step {
    name: String,
    /// What was seen, or what is wrong, in a line.
    said: String,
    /// Warnings and errors of the log, and where a program was run that failed, all that it said; null: nothing.
    output: Option<String>,
    ok: bool,
    millis: u64,
}

/// A step or a measurement that was not tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct LeftOut {
    what: String,
    why: String,
}

impl LeftOut {
    fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            why: why.into(),
        }
    }

    /// The others took the time.
    fn for_time(what: impl Into<String>) -> Self {
        Self::new(what, "the others took the time (--time, --perf-time)")
    }
}

/// What came of something that was to be tried.
enum Noted {
    Step(Step),
    LeftOut(LeftOut),
}

/// A measurement that failed.
#[derive(Debug, Serialize)]
struct Failed {
    /// The measurement.
    what: String,
    /// Why, in a line.
    why: String,
    /// All that was said.
    output: String,
}

/// What a measurement gave.
#[derive(Debug, Serialize)]
struct Measured {
    /// The second host; null: between two processes of this one.
    to: Option<String>,
    /// Warnings of its log, with the first of its rows.
    output: Option<String>,
    /// As the JSON of `doorbell perf` has it.
    #[serde(flatten)]
    outcome: Outcome,
}

impl DeviceResult {
    /// On this host: nothing failed, and what was asked for was tested.
    fn is_well(&self) -> bool {
        self.failed.is_empty() && self.steps.iter().all(|s| s.ok) && !self.is_missed()
    }

    /// It was asked for, and was not tested.
    fn is_missed(&self) -> bool {
        self.asked && self.skipped.is_some()
    }
}

impl Results {
    /// What went to the second host, where there is one.
    fn is_well_to_peer(&self) -> bool {
        let reached = self.peer.as_ref().is_none_or(|p| p.why.is_none());
        reached && self.devices.iter().all(|d| d.to_peer.iter().all(|s| s.ok))
    }

    /// Writes what is known by now: something that stops the host, or this program, leaves that.
    fn save(&self, args: &HwtestArgs) -> Result<()> {
        for (path, bytes) in self.files(args)? {
            if !is_stdout(path) {
                whole(path, &bytes)?;
            }
        }
        Ok(())
    }

    /// The last of it: standard output takes it once.
    fn finish(&mut self, args: &HwtestArgs) -> Result<()> {
        self.complete = true;
        self.save(args)?;
        for (path, bytes) in self.files(args)? {
            if is_stdout(path) {
                crate::out::say(&format!("{}\n", String::from_utf8_lossy(&bytes).trim_end()))?;
            }
        }
        Ok(())
    }

    fn files<'a>(&self, args: &'a HwtestArgs) -> Result<[(&'a Path, Vec<u8>); 2]> {
        Ok([
            (args.json.as_path(), serde_json::to_vec_pretty(self)?),
            (args.page.as_path(), page::text(self).into_bytes()),
        ])
    }
}

fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Writes a file that is there whole or as it was before; a pipe or a device takes what it is given.
fn whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = match std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        true => doorbell::input::create(path).and_then(|mut file| file.write_all(bytes)),
        false => files::replace(path, bytes),
    };
    written.with_context(|| {
        format!(
            "writing {}: --json and --page name other places",
            path.display()
        )
    })
}

impl HwtestArgs {
    /// A line about how it goes: beside the results where those go to standard output. That it cannot be said (a full disk) does not end the test.
    fn say(&self, line: &str) {
        match is_stdout(&self.json) || is_stdout(&self.page) {
            true => crate::complain(line),
            false => drop(crate::out::say(&format!("{line}\n"))),
        }
    }
}

/// Runs it.
pub(crate) fn run(args: &HwtestArgs) -> Result<Ended> {
    for name in &args.device {
        doorbell::connect::check_verbs_port(name).context(WrongArguments)?;
    }
    let settings = settings().context(WrongArguments)?;
    let started = crate::environment::utc_now();
    let until = Instant::now() + args.time;
    args.say(&format!("doorbell hwtest {}", crate::VERSION));
    system::raise_memlock();
    let (library, mut devices) = found::devices(&args.device)?;
    for device in &mut devices {
        device.asked = !args.device.is_empty();
        device.mtu = settings.roce_mtu.unwrap_or(u16::MAX).min(device.mtu);
    }
    let mut results = Results {
        schema: SCHEMA,
        version: crate::VERSION.to_owned(),
        started,
        complete: false,
        nothing: found::nothing(&library, &devices),
        host: system::Host::read(library),
        peer: None,
        devices,
    };
    for line in page::host(&results.host) {
        args.say(&line);
    }
    // Before the test, not after it, is when to hear that they cannot be written.
    results.save(args)?;
    if let (None, Some(name)) = (&results.nothing, &args.peer) {
        let peer = peer::Peer::greet(name, args.timeout);
        args.say(&peer.describe());
        results.peer = Some(peer);
        results.save(args)?;
    }
    for at in 0..results.devices.len() {
        let device = &results.devices[at];
        args.say(&format!("\n{}", page::device(device)));
        if device.skipped.is_none() {
            let rest = &results.devices[at..];
            let share = share(until, rest.iter().filter(|d| d.skipped.is_none()).count());
            test(args, &mut results, at, share)?;
            for out in &results.devices[at].left_out {
                args.say(&page::left_out(out));
            }
        }
    }
    results.finish(args)?;
    args.say(&format!("\n{}", page::verdict(&results)));
    args.say(&format!(
        "written: {} and, to read, {}",
        args.json.display(),
        args.page.display()
    ));
    args.say(&page::where_to_send(&args.json));
    let well = results.devices.iter().all(DeviceResult::is_well);
    Ok(match &results.nothing {
        Some(_) => Ended::Verdict(1),
        None if !well => Ended::CheckFailed,
        None if !results.is_well_to_peer() => Ended::Verdict(4),
        None => Ended::Well,
    })
}

/// The settings in force. What plays faults tests no hardware.
fn settings() -> Result<doorbell::Settings> {
    let settings = doorbell::Config::default().resolve()?;
    anyhow::ensure!(
        settings.fault.rules.is_empty(),
        "DOORBELL_FAULT is set: with faults that the engine plays nothing is known of the hardware; unset it"
    );
    Ok(settings)
}

/// When the next of so many devices has had its part of the time that is left `until` the end of the whole.
fn share(until: Instant, devices: usize) -> Instant {
    let now = Instant::now();
    now + until.saturating_duration_since(now) / devices.max(1) as u32
}

/// One port: the steps, those to the second host, and what is measured.
fn test(args: &HwtestArgs, results: &mut Results, at: usize, until: Instant) -> Result<()> {
    let name = results.devices[at].port.clone();
    let amount = trial::Amount {
        signals: args.signals,
        timeout: args.timeout,
        until,
        atomics: results.devices[at].atomics,
    };
    let mut port = port::Watched::new(&name);
    // What was said before is about no step.
    drop(heard::take());
    trial::run(&mut port, amount, &mut |noted| {
        let device = &mut results.devices[at];
        match noted {
            Noted::Step(step) => {
                args.say(&page::step(&step));
                device.steps.push(step);
            }
            Noted::LeftOut(out) => device.left_out.push(out),
        }
        results.save(args)
    })?;
    // Where no step went well, neither does a measurement.
    if results.devices[at].steps.iter().all(|s| !s.ok) {
        return Ok(());
    }
    measure::to_peer(args, results, at, until, &mut port)?;
    if !args.no_perf {
        measure::here(args, results, at, until, &mut port)?;
    }
    Ok(())
}
