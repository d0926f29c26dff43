//! `doorbell hwtest`: does this host's RDMA hardware carry Doorbell's queue pairs? For someone who has the hardware, to send back.
//!
//! It [finds](found) the devices, puts each active port through the [steps](trial) of correctness and a short [measurement](measure), with a second
//! host if there is one, and writes one JSON file and one page, whatever comes of it: that nothing could be tried, and why, is a result too.
//! It changes nothing on the system: it opens devices, sends between its own queue pairs, and reads files.

mod found;
mod measure;
mod page;
mod system;
mod trial;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;

use crate::schema::Outcome;
use crate::{Ended, WrongArguments, files, lists};

/// The name and version of the result file.
const SCHEMA: &str = "doorbell-hwtest/3";

#[derive(Debug, Args)]
#[command(after_help = HWTEST)]
pub(crate) struct HwtestArgs {
    /// Only this device, as mlx5_0 or mlx5_0:2?gid=3; may be given several times
    /// [default: every device with an active port]
    #[arg(long, value_name = "DEVICE[:PORT]")]
    device: Vec<String>,
    /// A second host that runs `doorbell serve`: what goes to there is tested and measured as well
    #[arg(long, value_name = "HOST[:PORT]", value_parser = crate::args::far_address)]
    peer: Option<String>,
    /// Where the results go as JSON; - is standard output
    #[arg(long, value_name = "FILE", default_value = "doorbell-hwtest.json")]
    json: PathBuf,
    /// Where they go as a page to read; - is standard output
    #[arg(long, value_name = "FILE", default_value = "doorbell-hwtest.txt")]
    page: PathBuf,
    /// Signals that are counted
    #[arg(long, value_name = "N", default_value = "1000000")]
    signals: u64,
    /// Correctness only
    #[arg(long)]
    no_perf: bool,
    /// A step fails when nothing happens for this many seconds
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "30")]
    timeout: Duration,
    /// No measurement of a device begins after this many seconds of measuring; half of it to the second host
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "240")]
    perf_time: Duration,
}

const HWTEST: &str = "\
It changes nothing on the system. Some ten minutes for a device. With a second
host:
  there: doorbell serve          here: doorbell hwtest --peer THAT_HOST
Please send doorbell-hwtest.json back, above all when something failed, or when
nothing could be tried: attach it to an issue of the project that you have this
program from. It names devices, their GIDs (which contain IP addresses), PCI
numbers, firmware, distribution, kernel, CPU, GPU and drivers, the second host
as you called it, and of what failed what was said.
Exit status: 0 all well, 1 nothing could be tested or the results not be
written, 2 wrong arguments, 3 a step or a measurement failed.";

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
    /// The second host, as it was named.
    peer: Option<String>,
    devices: Vec<DeviceResult>,
}

/// One port.
#[derive(Debug, Default, Serialize)]
struct DeviceResult {
    port: String,
    /// Why it was not tested; null: it was.
    skipped: Option<String>,
    firmware: String,
    vendor: String,
    hardware: system::Hardware,
    link_layer: &'static str,
    state: &'static str,
    mtu: u16,
    max_message: u32,
    atomics: bool,
    /// The one that was used.
    gid: Option<String>,
    steps: Vec<Step>,
    perf: Vec<Measured>,
    /// Measurements that failed, and how.
    failed: Vec<Failed>,
    /// Measurements that were left out, since the others took the time.
    left_out: Vec<String>,
    /// Whether the device reaches the GPU's memory: `reached`, or why not. Absent without a CUDA GPU.
    gpu_memory: Option<String>,
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Step {
    name: String,
    /// What was seen, or what is wrong, in a line.
    said: String,
    /// All that a program said that this one ran; absent where that is all.
    output: Option<String>,
    ok: bool,
    millis: u64,
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
    /// The second host; absent between two processes of this one.
    to: Option<String>,
    /// As the JSON of `doorbell perf` has it.
    #[serde(flatten)]
    outcome: Outcome,
}

impl DeviceResult {
    fn is_well(&self) -> bool {
        self.failed.is_empty() && self.steps.iter().all(|s| s.ok)
    }
}

impl Results {
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
    if is_stdout(&args.json) && is_stdout(&args.page) {
        let wrong =
            anyhow::anyhow!("--json - and --page - are one and the same place: name a file");
        return Err(wrong.context(WrongArguments));
    }
    for name in &args.device {
        doorbell::connect::check_verbs_port(name).context(WrongArguments)?;
    }
    let started = crate::environment::utc_now();
    args.say(&format!("doorbell hwtest {}", crate::VERSION));
    system::raise_memlock();
    let (library, devices) = found::devices(&args.device)?;
    let mut results = Results {
        schema: SCHEMA,
        version: crate::VERSION.to_owned(),
        started,
        complete: false,
        nothing: found::nothing(&library, &devices),
        host: system::Host::read(library),
        peer: args.peer.clone(),
        devices,
    };
    for line in page::host(&results.host) {
        args.say(&line);
    }
    if results.nothing.is_none()
        && let Some(peer) = &args.peer
    {
        results.nothing = found::unreachable(peer);
    }
    // Before the test, not after it, is when to hear that they cannot be written.
    results.save(args)?;
    for at in 0..results.devices.len() {
        let device = &results.devices[at];
        args.say(&format!("\n{}", page::device(device)));
        if device.skipped.is_none() && results.nothing.is_none() {
            test(args, &mut results, at)?;
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
    Ok(
        match (
            &results.nothing,
            results.devices.iter().all(DeviceResult::is_well),
        ) {
            (Some(_), _) => Ended::Verdict(1),
            (None, true) => Ended::Well,
            (None, false) => Ended::CheckFailed,
        },
    )
}

/// One port: the steps, those to the second host, and what is measured.
fn test(args: &HwtestArgs, results: &mut Results, at: usize) -> Result<()> {
    let name = results.devices[at].port.clone();
    let amount = trial::Amount {
        signals: args.signals,
        timeout: args.timeout,
        atomics: results.devices[at].atomics,
    };
    trial::run(&name, amount, &mut |step| {
        args.say(&page::step(&step));
        results.devices[at].steps.push(step);
        results.save(args)
    })?;
    // Where no step went well, neither does a measurement.
    if results.devices[at].steps.iter().all(|s| !s.ok) {
        return Ok(());
    }
    if let Some(peer) = &args.peer {
        measure::to_peer(args, results, at, peer)?;
    }
    if !args.no_perf {
        measure::here(args, results, at)?;
    }
    Ok(())
}
