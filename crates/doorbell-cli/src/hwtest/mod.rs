//! `doorbell hwtest`: does this host's RDMA hardware carry Doorbell's queue pairs? For someone who has the hardware, to send back.
//!
//! It finds the devices, puts each active port through the [steps](trial) of correctness and a short measurement, with a second host if there is one,
//! and writes one JSON file and one page. It changes nothing on the system: it opens devices, sends between its own queue pairs, and reads files.

mod page;
mod system;
mod trial;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;

use crate::schema::{Outcome, Report};
use crate::{Ended, files, lists};

/// The name and version of the result file.
const SCHEMA: &str = "doorbell-hwtest/2";

#[derive(Debug, Args)]
#[command(after_help = HWTEST)]
pub(crate) struct HwtestArgs {
    /// Only this device, as mlx5_0 or mlx5_0:2?gid=3; may be given several times
    /// [default: every device with an active port]
    #[arg(long, value_name = "DEVICE[:PORT]")]
    device: Vec<String>,
    /// A second host that runs `doorbell serve`: everything is measured to there as well
    #[arg(long, value_name = "HOST[:PORT]")]
    peer: Option<String>,
    /// Where the results go as JSON
    #[arg(long, value_name = "FILE", default_value = "doorbell-hwtest.json")]
    json: PathBuf,
    /// Where they go as a page to read
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
}

const HWTEST: &str = "\
It changes nothing on the system. Some ten minutes for a device. With a second
host:
  there: doorbell serve          here: doorbell hwtest --peer THAT_HOST
Send doorbell-hwtest.json back: it names devices, their GIDs (which contain IP
addresses), PCI numbers, firmware, distribution, kernel, CPU, GPU and drivers.
Exit status: 0 all well, 1 no device could be tested, 3 a step failed.";

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    version: String,
    started: String,
    /// It came to its end: otherwise this is what was known when it stopped.
    complete: bool,
    host: system::Host,
    /// Devices that cannot be opened, and why.
    refused: Vec<(String, String)>,
    devices: Vec<DeviceResult>,
}

/// One port.
#[derive(Debug, Default, Serialize)]
struct DeviceResult {
    port: String,
    firmware: String,
    vendor: String,
    hardware: system::Hardware,
    link_layer: &'static str,
    state: &'static str,
    mtu: u16,
    max_message: u32,
    atomics: bool,
    gid: Option<String>,
    steps: Vec<trial::Step>,
    perf: Vec<Measured>,
    /// Measurements that failed, and how.
    failed: Vec<String>,
    /// Whether the device reaches the GPU's memory: `reached`, or why not. Absent without a CUDA GPU.
    gpu_memory: Option<String>,
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
    fn new(name: String, port: Option<&doorbell::RdmaPort>) -> Self {
        let nothing = Self {
            port: name,
            ..Self::default()
        };
        let Some(port) = port else { return nothing };
        let gid = port.gid.as_ref();
        Self {
            firmware: port.firmware.clone(),
            vendor: format!("{:#06x}:{}", port.vendor.0, port.vendor.1),
            hardware: system::Hardware::read(&port.device, port.port),
            link_layer: port.link_layer,
            state: port.state,
            mtu: port.mtu,
            max_message: port.max_message,
            atomics: port.atomics,
            gid: gid.map(|(index, gid, kind)| format!("{gid} (index {index}, {kind})")),
            ..nothing
        }
    }

    fn is_well(&self) -> bool {
        self.failed.is_empty() && self.steps.iter().all(|s| s.ok)
    }
}

impl Results {
    /// Writes what is known by now: something that stops the host, or this program, leaves that.
    fn save(&self, args: &HwtestArgs) -> Result<()> {
        whole(&args.json, &serde_json::to_vec_pretty(self)?)?;
        whole(&args.page, page::text(self).as_bytes())
    }
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

/// Runs it.
pub(crate) fn run(args: &HwtestArgs) -> Result<Ended> {
    let started = crate::environment::utc_now();
    let (ports, refused) = doorbell::rdma_ports()?;
    let mut say = |line: &str| {
        // That it cannot be said (a full disk) does not end the test.
        let _ = crate::out::say(&format!("{line}\n"));
    };
    say(&format!("doorbell hwtest {}", crate::VERSION));
    for (device, why) in &refused {
        say(&format!("{device}: cannot be opened: {why}"));
    }
    let mut wanted: Vec<(String, Option<&doorbell::RdmaPort>)> = Vec::new();
    for port in ports.iter().filter(|p| p.active && args.device.is_empty()) {
        wanted.push((format!("{}:{}", port.device, port.port), Some(port)));
    }
    for name in &args.device {
        let (device, number) = doorbell::connect::check_verbs_port(name)?;
        let named = |p: &&doorbell::RdmaPort| p.device == device && p.port == number;
        wanted.push((name.clone(), ports.iter().find(named)));
    }
    for port in ports.iter().filter(|p| !p.active) {
        say(&format!(
            "{}:{}: its port is {}: not tested",
            port.device, port.port, port.state
        ));
    }
    if wanted.is_empty() {
        anyhow::bail!(
            "no RDMA device has an active port: see `rdma link`, and `doorbell info` for what is missing"
        );
    }
    let mut results = Results {
        schema: SCHEMA,
        version: crate::VERSION.to_owned(),
        started,
        complete: false,
        host: system::Host::read(),
        refused,
        devices: Vec::new(),
    };
    // Before the test, not after it, is when to hear that they cannot be written.
    results.save(args)?;
    for (name, port) in wanted {
        say(&format!("\n{name}"));
        let at = results.devices.len();
        results.devices.push(DeviceResult::new(name.clone(), port));
        let amount = trial::Amount {
            signals: args.signals,
            timeout: args.timeout,
            atomics: results.devices[at].atomics,
        };
        trial::run(&name, amount, &mut |step| {
            say(&page::step(&step));
            results.devices[at].steps.push(step);
            results.save(args)
        })?;
        if !args.no_perf && results.devices[at].steps.iter().any(|s| s.ok) {
            measure(args, &mut results, at, None, &mut say)?;
            if let Some(peer) = &args.peer {
                measure(args, &mut results, at, Some(peer), &mut say)?;
            }
        }
        if !args.no_perf && results.host.gpu.is_some() {
            let said = gpu_memory(args, &name);
            say(&format!("  GPU memory: {said}"));
            results.devices[at].gpu_memory = Some(said);
        }
    }
    results.complete = true;
    results.save(args)?;
    say(&format!("\n{}", page::verdict(&results)));
    say(&format!(
        "written: {} (to send back) and {} (to read)",
        args.json.display(),
        args.page.display()
    ));
    Ok(match results.devices.iter().all(DeviceResult::is_well) {
        true => Ended::Well,
        false => Ended::CheckFailed,
    })
}

/// Does the device move GPU memory by itself? A test of its own: without that, payloads in host memory still go.
fn gpu_memory(args: &HwtestArgs, port: &str) -> String {
    let test = [
        "put-bw",
        "--size",
        "64K",
        "--mem",
        "gpu",
        "--local-mem",
        "gpu",
    ];
    match one(args, port, "cuda", &test, None) {
        Ok(_) => "reached".to_owned(),
        Err(e) => crate::words(&e),
    }
}

/// The short measurements: each test once, checked, by this very program; and what the GPU's own kernels post, where there is one.
fn measure(
    args: &HwtestArgs,
    results: &mut Results,
    at: usize,
    peer: Option<&String>,
    say: &mut dyn FnMut(&str),
) -> Result<()> {
    let tests: &[&[&str]] = &[
        &["put-bw", "--size", "8,4K,64K,1M"],
        &[
            "put-bw",
            "--size",
            "64",
            "--threads",
            "4",
            "--sharing",
            "gpu",
        ],
        &[
            "put-bw",
            "--size",
            "64",
            "--threads",
            "4",
            "--sharing",
            "block",
        ],
        &["get-bw", "--size", "4K,64K"],
        &["send-bw", "--size", "4K"],
        &["atomic-rate"],
        &["put-lat", "--size", "8"],
        &["signal-lat", "--size", "8"],
    ];
    let by_cuda: &[&[&str]] = &[&["put-bw", "--size", "8,64K"], &["put-lat", "--size", "8"]];
    let by_cuda = match results.host.gpu {
        Some(_) => by_cuda,
        None => &[],
    };
    let all = tests.iter().map(|test| ("host", *test));
    for (gpu, test) in all.chain(by_cuda.iter().map(|test| ("cuda", *test))) {
        let result = &mut results.devices[at];
        match one(args, &result.port, gpu, test, peer) {
            Ok(rows) => {
                for outcome in rows {
                    let to = peer.cloned();
                    let row = Measured { to, outcome };
                    say(&page::row(&row));
                    result.perf.push(row);
                }
            }
            Err(e) => {
                let to = peer.map_or(String::new(), |p| format!(" to {p}"));
                let label = format!("{} (GPU: {gpu}){to}", test.join(" "));
                let why = crate::words(&e);
                say(&format!("  FAILED  {label}: {why}"));
                result.failed.push(format!("{label}: {why}"));
            }
        }
        results.save(args)?;
    }
    Ok(())
}

fn one(
    args: &HwtestArgs,
    port: &str,
    gpu: &str,
    test: &[&str],
    peer: Option<&String>,
) -> Result<Vec<Outcome>> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    command
        .arg("perf")
        .args(test)
        .args(["--link", &format!("verbs:{port}")])
        .args(["--check", "--quick", "--gpu", gpu, "--json", "-"])
        .args(["--timeout", &args.timeout.as_secs().max(1).to_string()])
        .stdin(Stdio::null());
    if let Some(peer) = peer {
        command.args(["--connect", peer]);
    }
    let output = command.output().context("running the measurement")?;
    anyhow::ensure!(
        output.status.success(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let report: Report = serde_json::from_slice(&output.stdout)?;
    Ok(report.results)
}
