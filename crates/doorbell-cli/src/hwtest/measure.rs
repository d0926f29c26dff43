//! What `doorbell perf` says of a device: this very program, run once for each test, every byte checked.

use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::{DeviceResult, Failed, LeftOut, Measured, Results, Step, heard, page, port};
use crate::args::HwtestArgs;
use crate::schema::{Outcome, Report};

/// What a program said is there when it has ended, unless another has its output.
const REST: Duration = Duration::from_secs(5);

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
    /// It adds at the target, which takes a device that does.
    fn is_atomic(self) -> bool {
        matches!(self.words, ["atomic-rate" | "signal-lat", ..])
    }

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
/// Steps to a second host.
pub(super) const STEPS: usize = 6;
/// To a second host: each operation once.
const THERE: [(&str, Test); STEPS] = [
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

/// Whether a test is left out, and why.
fn left_out(test: Test, what: &str, device: &DeviceResult, by: Instant) -> Option<LeftOut> {
    match test.is_atomic() && !device.atomics {
        true => Some(LeftOut::new(what, "this device has no atomics")),
        false => (Instant::now() >= by).then(|| LeftOut::for_time(what)),
    }
}

/// Each operation to the second host, if there is one: steps, and figures with them if those are asked for.
pub(super) fn to_peer(
    args: &HwtestArgs,
    results: &mut Results,
    at: usize,
    until: Instant,
    watched: &mut port::Watched<'_>,
) -> Result<()> {
    let spent = until.min(Instant::now() + args.perf_time / 2);
    for (done, (name, test)) in THERE.into_iter().enumerate() {
        let Some(peer) = results.peer.clone() else {
            return Ok(());
        };
        // What is wrong with it has been said.
        if peer.why.is_some() {
            let what = format!("{} steps to {}", STEPS - done, peer.name);
            let why = "the second host is not reached";
            results.devices[at].left_out.push(LeftOut::new(what, why));
            return results.save(args);
        }
        let name = format!("{name} to {}", peer.name);
        let device = &mut results.devices[at];
        if let Some(left_out) = left_out(test, &name, device, until) {
            device.left_out.push(left_out);
            continue;
        }
        let measured = !args.no_perf && Instant::now() < spent;
        let how = match measured {
            true => How::Measured(Some(&peer.name)),
            false => How::Checked(&peer.name),
        };
        let started = Instant::now();
        let ran = one(args, test, &how, until, watched);
        let (said, output) = match &ran {
            Ok(Ran { rows, warned }) => {
                let said = match rows.len() {
                    1 => "every byte as it should be".to_owned(),
                    n => format!("{n} sizes, every byte as it should be"),
                };
                (said, warned)
            }
            Err(Ended::TimeUp) => {
                device.left_out.push(LeftOut::for_time(name));
                continue;
            }
            Err(Ended::Failed { why, output }) => (why.clone(), output),
        };
        let step = Step {
            name,
            said,
            output: output.clone(),
            ok: ran.is_ok(),
            millis: started.elapsed().as_millis() as u64,
        };
        args.say(&page::step(&step));
        // Whoever is gone is not waited for again and again.
        if let (false, Some(peer)) = (step.ok, &mut results.peer) {
            peer.greet_again(args.timeout);
        }
        results.devices[at].to_peer.push(step);
        if let (Ok(ran), true) = (ran, measured) {
            keep(args, results, at, ran, Some(&peer.name));
        }
        results.save(args)?;
    }
    Ok(())
}

/// The measurements between two processes of this host; what the GPU's own kernels post, where there is one.
pub(super) fn here(
    args: &HwtestArgs,
    results: &mut Results,
    at: usize,
    until: Instant,
    watched: &mut port::Watched<'_>,
) -> Result<()> {
    let spent = until.min(Instant::now() + args.perf_time);
    let by_cuda = BY_CUDA.iter().filter(|_| results.host.gpu.is_some());
    let tests: Vec<Test> = HERE.iter().chain(by_cuda).copied().collect();
    for test in tests {
        let (device, what) = (&mut results.devices[at], test.label());
        if let Some(left_out) = left_out(test, &what, device, spent) {
            device.left_out.push(left_out);
            continue;
        }
        match one(args, test, &How::Measured(None), until, watched) {
            Ok(ran) => keep(args, results, at, ran, None),
            Err(Ended::TimeUp) => device.left_out.push(LeftOut::for_time(what)),
            Err(Ended::Failed { why, output }) => {
                args.say(&format!("  FAILED  {what}: {why}"));
                device.failed.push(Failed {
                    what,
                    why,
                    output: output.unwrap_or_default(),
                });
            }
        }
        results.save(args)?;
    }
    if results.host.gpu.is_some() {
        let said = gpu_memory(args, until, watched);
        args.say(&format!("  GPU memory: {said}"));
        results.devices[at].gpu_memory = Some(said);
    }
    Ok(())
}

/// Does the device move GPU memory by itself? A test of its own: without that, payloads in host memory still go.
fn gpu_memory(args: &HwtestArgs, until: Instant, watched: &mut port::Watched<'_>) -> String {
    let test = cuda(&[
        "put-bw",
        "--size",
        "64K",
        "--mem",
        "gpu",
        "--local-mem",
        "gpu",
    ]);
    match one(args, test, &How::Measured(None), until, watched) {
        Ok(_) => "reached".to_owned(),
        Err(Ended::TimeUp) => "not tried: the others took the time".to_owned(),
        Err(Ended::Failed { why, .. }) => why,
    }
}

fn keep(args: &HwtestArgs, results: &mut Results, at: usize, ran: Ran, to: Option<&str>) {
    let mut output = ran.warned;
    for outcome in ran.rows {
        let row = Measured {
            to: to.map(str::to_owned),
            output: output.take(),
            outcome,
        };
        args.say(&page::row(&row));
        results.devices[at].perf.push(row);
    }
}

/// What a run gave.
struct Ran {
    rows: Vec<Outcome>,
    /// Warnings on the way.
    warned: Option<String>,
}

/// How one ended that gave nothing.
enum Ended {
    /// It was ended, since the time of the whole is up.
    TimeUp,
    Failed {
        /// In a line; the port's words where that is not up any more.
        why: String,
        /// All that it said.
        output: Option<String>,
    },
}

/// Runs one, unless its port is still down.
fn one(
    args: &HwtestArgs,
    test: Test,
    how: &How<'_>,
    until: Instant,
    watched: &mut port::Watched<'_>,
) -> Result<Ran, Ended> {
    if let Some(why) = watched.still_down() {
        return Err(Ended::Failed { why, output: None });
    }
    match run(args, watched.name, test, how, until) {
        Ok(Some(ran)) => Ok(ran),
        Ok(None) => Err(Ended::TimeUp),
        Err(e) => {
            let output = crate::words(&e);
            Err(Ended::Failed {
                why: watched.because(line_of(&output)),
                output: Some(output),
            })
        }
    }
}

/// `None`: the time of the whole was up before it had ended.
fn run(
    args: &HwtestArgs,
    port: &str,
    test: Test,
    how: &How<'_>,
    until: Instant,
) -> Result<Option<Ran>> {
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
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("running the measurement")?;
    // What has begun may end, as long as it does not take another's time.
    let Some(output) = ended_by(child, until + args.timeout)? else {
        return Ok(None);
    };
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(
        output.status.success(),
        "{}\n{}",
        said.trim(),
        output.status
    );
    let report: Report = serde_json::from_slice(&output.stdout)?;
    Ok(Some(Ran {
        rows: report.results,
        warned: heard::lines(&said),
    }))
}

/// A program's end and all that it said; `None`: it had not ended by then, and was ended.
fn ended_by(mut child: Child, by: Instant) -> Result<Option<Output>> {
    let (out, err) = (all(child.stdout.take())?, all(child.stderr.take())?);
    let status = loop {
        match child.try_wait().context("waiting for the measurement")? {
            Some(status) => break status,
            None if Instant::now() >= by => {
                // One that has just ended needs no end. What it said is of no interest, and what it started may still hold the other end.
                let _ = child.kill();
                child.wait().context("ending the measurement")?;
                return Ok(None);
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let read = |bytes: Receiver<std::io::Result<Vec<u8>>>| match bytes.recv_timeout(REST) {
        Ok(bytes) => bytes.context("reading what the measurement said"),
        Err(_) => anyhow::bail!(
            "the measurement ended with {status}, and a process that it started still holds its output: look for it with `ps`, and end it"
        ),
    };
    let (stdout, stderr) = (read(out)?, read(err)?);
    Ok(Some(Output {
        status,
        stdout,
        stderr,
    }))
}

/// Reads all that comes, and then says it.
fn all(from: Option<impl Read + Send + 'static>) -> Result<Receiver<std::io::Result<Vec<u8>>>> {
    let (send, receive) = channel();
    let read = move || {
        let mut bytes = Vec::new();
        let read = from.map_or(Ok(0), |mut from| from.read_to_end(&mut bytes));
        // Nobody may want it any more.
        let _ = send.send(read.map(|_| bytes));
    };
    std::thread::Builder::new()
        .spawn(read)
        .context("starting a thread that reads what the measurement says")?;
    Ok(receive)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a shell")
    }

    /// What a measurement started may outlive it, with the measurement's output in its hands.
    #[test]
    fn nobody_waits_for_what_a_measurement_left_behind() {
        let long = Duration::from_secs(60);
        let (began, now) = (Instant::now(), Instant::now());
        // It is read that it runs, so that it has started what it leaves behind.
        let mut left = shell("sleep 30 & echo $!; exec sleep 30");
        let mut line = String::new();
        let out = left.stdout.as_mut().expect("its output");
        while !line.ends_with('\n') {
            let mut byte = [0];
            out.read_exact(&mut byte).expect("a number");
            line.push(byte[0].into());
        }
        assert!(ended_by(left, now).expect("it was ended").is_none());
        let ended = ended_by(shell("sleep 30 & echo said"), now + long);
        let words = ended.expect_err("its output has no end").to_string();
        assert!(words.contains("still holds its output"), "{words}");
        assert!(began.elapsed() < long / 2, "nobody was waited for");
        let said = ended_by(shell("echo said"), now + long).expect("an end");
        assert_eq!(said.expect("in time").stdout, b"said\n");
    }

    #[test]
    fn of_all_that_was_said_a_line_says_why() {
        let said = "WARN verbs:x:1: port 1 went down\nposter test size\nhost put-bw 8\ndoorbell: put-bw 8 B: no answer\nexit status: 1";
        assert_eq!(line_of(said), "put-bw 8 B: no answer");
        assert_eq!(line_of("signal: 9 (SIGKILL)"), "signal: 9 (SIGKILL)");
        assert_eq!(line_of(""), "it said nothing");
    }
}
