//! What `doorbell perf` says of a device: this very program, run once for each test, every byte checked.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{Failed, HwtestArgs, Measured, Results, Step, page};
use crate::schema::{Outcome, Report};

/// A test: its arguments, and whose kernels post (`host` or `cuda`).
#[derive(Clone, Copy)]
struct Test {
    gpu: &'static str,
    words: &'static [&'static str],
}

const fn host(words: &'static [&'static str]) -> Test {
    Test { gpu: "host", words }
}

const fn cuda(words: &'static [&'static str]) -> Test {
    Test { gpu: "cuda", words }
}

impl Test {
    /// Its command, and whose kernels post where those are a GPU's.
    fn label(self) -> String {
        let by = match self.gpu {
            "host" => "",
            _ => ", posted by the GPU",
        };
        format!("{}{by}", self.words.join(" "))
    }
}

const HERE: [Test; 8] = [
    host(&["put-bw", "--size", "8,4K,64K,1M"]),
    host(&[
        "put-bw",
        "--size",
        "64",
        "--threads",
        "4",
        "--sharing",
        "gpu",
    ]),
    host(&[
        "put-bw",
        "--size",
        "64",
        "--threads",
        "4",
        "--sharing",
        "block",
    ]),
    host(&["get-bw", "--size", "4K,64K"]),
    host(&["send-bw", "--size", "4K"]),
    host(&["atomic-rate"]),
    host(&["put-lat", "--size", "8"]),
    host(&["signal-lat", "--size", "8"]),
];
const BY_CUDA: [Test; 2] = [
    cuda(&["put-bw", "--size", "8,64K"]),
    cuda(&["put-lat", "--size", "8"]),
];
/// To a second host: each operation once.
const THERE: [(&str, Test); 6] = [
    ("puts", host(&["put-bw", "--size", "8,64K,1M"])),
    ("gets", host(&["get-bw", "--size", "8,64K"])),
    ("messages", host(&["send-bw", "--size", "4K"])),
    ("atomics", host(&["atomic-rate"])),
    ("round trips", host(&["put-lat", "--size", "8"])),
    ("signals", host(&["signal-lat", "--size", "8"])),
];
/// Messages of a test that only checks.
const FEW: &str = "100";

/// Takes what `perf` is to be given besides the test.
enum How<'a> {
    /// For figures.
    Measured(Option<&'a str>),
    /// For being checked.
    Checked(&'a str),
}

/// Each operation to the second host: steps, and figures with them if those are asked for.
pub(super) fn to_peer(
    args: &HwtestArgs,
    results: &mut Results,
    at: usize,
    peer: &str,
) -> Result<()> {
    let budget = Budget::new(args.perf_time / 2);
    for (name, test) in THERE {
        let device = &results.devices[at];
        if name == "atomics" && !device.atomics {
            continue;
        }
        let how = match args.no_perf || budget.is_spent() {
            true => How::Checked(peer),
            false => How::Measured(Some(peer)),
        };
        let started = Instant::now();
        let (ran, measured) = (
            one(args, &device.port, test, &how),
            matches!(how, How::Measured(_)),
        );
        let name = format!("{name} to {peer}");
        let millis = started.elapsed().as_millis() as u64;
        let step = match &ran {
            Ok(rows) => Step {
                name,
                said: match rows.len() {
                    1 => "every byte as it should be".to_owned(),
                    n => format!("{n} sizes, every byte as it should be"),
                },
                output: None,
                ok: true,
                millis,
            },
            Err(output) => Step {
                name,
                said: line_of(output),
                output: Some(output.clone()),
                ok: false,
                millis,
            },
        };
        args.say(&page::step(&step));
        results.devices[at].steps.push(step);
        if let (Ok(rows), true) = (ran, measured) {
            keep(args, results, at, rows, Some(peer));
        }
        results.save(args)?;
    }
    Ok(())
}

/// The measurements between two processes of this host; what the GPU's own kernels post, where there is one.
pub(super) fn here(args: &HwtestArgs, results: &mut Results, at: usize) -> Result<()> {
    let budget = Budget::new(args.perf_time);
    let by_cuda = BY_CUDA.iter().filter(|_| results.host.gpu.is_some());
    let tests: Vec<Test> = HERE.iter().chain(by_cuda).copied().collect();
    for test in tests {
        if test.words == ["atomic-rate"] && !results.devices[at].atomics {
            continue;
        }
        let device = &mut results.devices[at];
        if budget.is_spent() {
            device.left_out.push(test.label());
            continue;
        }
        match one(args, &device.port, test, &How::Measured(None)) {
            Ok(rows) => keep(args, results, at, rows, None),
            Err(output) => {
                let (what, why) = (test.label(), line_of(&output));
                args.say(&format!("  FAILED  {what}: {why}"));
                device.failed.push(Failed { what, why, output });
            }
        }
        results.save(args)?;
    }
    if results.host.gpu.is_some() {
        let said = gpu_memory(args, &results.devices[at].port);
        args.say(&format!("  GPU memory: {said}"));
        results.devices[at].gpu_memory = Some(said);
    }
    Ok(())
}

/// Does the device move GPU memory by itself? A test of its own: without that, payloads in host memory still go.
fn gpu_memory(args: &HwtestArgs, port: &str) -> String {
    let test = cuda(&[
        "put-bw",
        "--size",
        "64K",
        "--mem",
        "gpu",
        "--local-mem",
        "gpu",
    ]);
    match one(args, port, test, &How::Measured(None)) {
        Ok(_) => "reached".to_owned(),
        Err(output) => line_of(&output),
    }
}

fn keep(args: &HwtestArgs, results: &mut Results, at: usize, rows: Vec<Outcome>, to: Option<&str>) {
    for outcome in rows {
        let to = to.map(str::to_owned);
        let row = Measured { to, outcome };
        args.say(&page::row(&row));
        results.devices[at].perf.push(row);
    }
}

/// Runs one; on failure, all that it said.
fn one(args: &HwtestArgs, port: &str, test: Test, how: &How<'_>) -> Result<Vec<Outcome>, String> {
    run(args, port, test, how).map_err(|e| crate::words(&e))
}

fn run(args: &HwtestArgs, port: &str, test: Test, how: &How<'_>) -> Result<Vec<Outcome>> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    command
        .arg("perf")
        .args(test.words)
        .args(["--link", &format!("verbs:{port}")])
        .args(["--check", "--gpu", test.gpu, "--json", "-"])
        .args(["--timeout", &args.timeout.as_secs().max(1).to_string()])
        .stdin(Stdio::null());
    let peer = match how {
        How::Measured(peer) => {
            command.arg("--quick");
            *peer
        }
        How::Checked(peer) => {
            command.args(["--iters", FEW]);
            Some(*peer)
        }
    };
    if let Some(peer) = peer {
        command.args(["--connect", peer]);
    }
    let output = command.output().context("running the measurement")?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(
        output.status.success(),
        "{}\n{}",
        said.trim(),
        output.status
    );
    let report: Report = serde_json::from_slice(&output.stdout)?;
    Ok(report.results)
}

/// The line of a program's last words that says what went wrong.
fn line_of(output: &str) -> String {
    let lines: Vec<&str> = output
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    let own = lines
        .iter()
        .rev()
        .find_map(|l| l.strip_prefix("doorbell: "));
    own.or(lines.last().copied())
        .unwrap_or("it said nothing")
        .to_owned()
}

/// How long measuring may go on.
struct Budget {
    until: Instant,
}

impl Budget {
    fn new(time: Duration) -> Self {
        Self {
            until: Instant::now() + time,
        }
    }

    fn is_spent(&self) -> bool {
        Instant::now() >= self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_all_that_was_said_a_line_says_why() {
        let said = "WARN verbs:x:1: port 1 went down\nposter test size\nhost put-bw 8\ndoorbell: put-bw 8 B: no answer\nexit status: 1";
        assert_eq!(line_of(said), "put-bw 8 B: no answer");
        assert_eq!(line_of("signal: 9 (SIGKILL)"), "signal: 9 (SIGKILL)");
        assert_eq!(line_of(""), "it said nothing");
    }
}
