//! `doorbell hwtest`: does this host's RDMA hardware carry Doorbell's queue pairs? For someone who has the hardware, to send back.
//!
//! It finds the devices, puts each active port through the [steps](trial) of correctness and a short measurement, with a second host if there is one,
//! and writes one JSON file and one page. It changes nothing on the system: it opens devices, sends between its own queue pairs, and reads files.

mod page;
mod trial;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;

use crate::environment::Machine;
use crate::schema::{Outcome, Report};
use crate::{Ended, lists};

/// The name and version of the result file.
const SCHEMA: &str = "doorbell-hwtest/1";

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
    #[arg(long, value_name = "S", value_parser = lists::seconds, default_value = "30")]
    timeout: Duration,
}

const HWTEST: &str = "\
It changes nothing on the system. Some ten minutes for a device. With a second
host:
  there: doorbell serve          here: doorbell hwtest --peer THAT_HOST
Send doorbell-hwtest.json back: it names devices, their GIDs (which contain IP
addresses), firmware, kernel, CPU, GPU and driver, and no more.
Exit status: 0 all well, 1 no device could be tested, 3 a step failed.";

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Results {
    schema: &'static str,
    version: String,
    started: String,
    kernel: Option<String>,
    cpu: Option<String>,
    gpu_driver: Option<String>,
    gpu: Option<String>,
    /// Devices that cannot be opened, and why.
    refused: Vec<(String, String)>,
    devices: Vec<DeviceResult>,
}

/// One port.
#[derive(Debug, Serialize)]
struct DeviceResult {
    port: String,
    firmware: String,
    vendor: String,
    link_layer: &'static str,
    state: &'static str,
    mtu: u16,
    gid: Option<String>,
    steps: Vec<trial::Step>,
    /// Outcomes of `doorbell perf`, as its JSON has them.
    perf: Vec<Outcome>,
    /// Measurements that failed, and how.
    failed: Vec<String>,
}

/// Runs it.
pub(crate) fn run(args: &HwtestArgs) -> Result<Ended> {
    let started = crate::environment::utc_now();
    let machine = Machine::read();
    let (ports, refused) = doorbell::rdma_ports()?;
    let mut say = |line: &str| {
        // That it cannot be said (a full disk) does not end the test.
        let _ = crate::out::say(&format!("{line}\n"));
    };
    say(&format!("doorbell hwtest {}", crate::VERSION));
    for (device, why) in &refused {
        say(&format!("{device}: cannot be opened: {why}"));
    }
    let wanted: Vec<(String, Option<&doorbell::RdmaPort>)> = match args.device.as_slice() {
        [] => ports
            .iter()
            .filter(|p| p.active)
            .map(|p| (format!("{}:{}", p.device, p.port), Some(p)))
            .collect(),
        named => named
            .iter()
            .map(|name| {
                let (device, port) = plain(name);
                let found = ports.iter().find(|p| p.device == device && p.port == port);
                (name.clone(), found)
            })
            .collect(),
    };
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
    let mut devices = Vec::new();
    for (name, port) in wanted {
        say(&format!("\n{name}"));
        let amount = trial::Amount {
            signals: args.signals,
            timeout: args.timeout,
        };
        let steps = trial::run(&name, amount, &mut |step| say(&page::step(step)));
        let mut result = DeviceResult {
            firmware: port.map_or(String::new(), |p| p.firmware.clone()),
            vendor: port.map_or(String::new(), |p| {
                format!("{:#06x}:{}", p.vendor.0, p.vendor.1)
            }),
            link_layer: port.map_or("", |p| p.link_layer),
            state: port.map_or("", |p| p.state),
            mtu: port.map_or(0, |p| p.mtu),
            gid: port
                .and_then(|p| p.gid.clone())
                .map(|(index, gid, kind)| format!("{gid} (index {index}, {kind})")),
            port: name,
            steps,
            perf: Vec::new(),
            failed: Vec::new(),
        };
        if !args.no_perf && result.steps.iter().any(|s| s.ok) {
            measure(args, &mut result, None, &mut say);
            if let Some(peer) = &args.peer {
                measure(args, &mut result, Some(peer), &mut say);
            }
        }
        devices.push(result);
    }
    let results = Results {
        schema: SCHEMA,
        version: crate::VERSION.to_owned(),
        started,
        kernel: machine.kernel,
        cpu: machine.cpu,
        gpu_driver: crate::environment::nvidia_driver(),
        gpu: gpu_name(),
        refused,
        devices,
    };
    let json = serde_json::to_vec_pretty(&results)?;
    std::fs::write(&args.json, json).with_context(|| format!("writing {}", args.json.display()))?;
    std::fs::write(&args.page, page::text(&results))
        .with_context(|| format!("writing {}", args.page.display()))?;
    say(&format!(
        "\nwritten: {} (to send back) and {} (to read)",
        args.json.display(),
        args.page.display()
    ));
    let well = results
        .devices
        .iter()
        .all(|d| d.failed.is_empty() && d.steps.iter().all(|s| s.ok));
    Ok(match well {
        true => Ended::Well,
        false => Ended::CheckFailed,
    })
}

/// Device and port of `DEVICE[:PORT][?options]`.
fn plain(name: &str) -> (&str, u8) {
    let name = name.split('?').next().unwrap_or(name);
    let (device, port) = name.split_once(':').unwrap_or((name, "1"));
    (device, port.parse().unwrap_or(1))
}

fn gpu_name() -> Option<String> {
    let device = doorbell::Device::open().ok()?;
    device
        .gpu()
        .is_cuda()
        .then(|| device.gpu_info().name.clone())
}

/// The short measurements: each test once, checked, by this very program.
fn measure(
    args: &HwtestArgs,
    result: &mut DeviceResult,
    peer: Option<&String>,
    say: &mut dyn FnMut(&str),
) {
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
    for test in tests {
        let label = format!(
            "{}{}",
            test.join(" "),
            peer.map_or(String::new(), |p| format!(" to {p}"))
        );
        match one(args, &result.port, test, peer) {
            Ok(rows) => {
                for row in &rows {
                    say(&page::row(row));
                }
                result.perf.extend(rows);
            }
            Err(e) => {
                let why = crate::words(&e);
                say(&format!("  FAILED  {label}: {why}"));
                result.failed.push(format!("{label}: {why}"));
            }
        }
    }
}

fn one(
    args: &HwtestArgs,
    port: &str,
    test: &[&str],
    peer: Option<&String>,
) -> Result<Vec<Outcome>> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    command
        .arg("perf")
        .args(test)
        .args(["--link", &format!("verbs:{port}")])
        .args(["--check", "--quick", "--gpu", "host", "--json", "-"])
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
