//! Running the built command and looking at what it says.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// No run of these tests may take longer, on however slow a machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The command, free of the caller's settings.
pub(crate) fn doorbell(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doorbell"));
    command.args(args);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DOORBELL_") {
            command.env_remove(name);
        }
    }
    // A GPU of this machine would make the runs differ.
    command.env("DOORBELL_GPU", "host");
    command
}

/// Runs it to its end; panics when it does not come.
pub(crate) fn run(args: &[&str]) -> Output {
    finish(start(args), args)
}

/// Starts it with its output piped.
pub(crate) fn start(args: &[&str]) -> Child {
    doorbell(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starting doorbell")
}

/// Waits for its end.
pub(crate) fn finish(mut child: Child, args: &[&str]) -> Output {
    let mut pipes = (child.stdout.take(), child.stderr.take());
    // Read while it runs: a full pipe would stop it.
    let reader = std::thread::spawn(move || {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        std::thread::scope(|scope| {
            let errors = pipes.1.take();
            scope.spawn(|| errors.map(|mut p| p.read_to_end(&mut err)));
            if let Some(p) = &mut pipes.0 {
                p.read_to_end(&mut out).expect("reading its output");
            }
        });
        (out, err)
    });
    let until = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().expect("waiting for doorbell") {
            break status;
        }
        if Instant::now() > until {
            child.kill().expect("killing a run that does not end");
            panic!("doorbell {args:?} did not end within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let (stdout, stderr) = reader.join().expect("the reader");
    Output {
        status,
        stdout,
        stderr,
    }
}

/// Runs it, and panics unless it succeeds.
pub(crate) fn succeed(args: &[&str]) -> String {
    let output = run(args);
    let (out, err) = texts(&output);
    assert!(
        output.status.success(),
        "doorbell {args:?}: {:?}\n{out}\n{err}",
        output.status
    );
    out
}

/// Standard output and standard error.
pub(crate) fn texts(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// Processes whose parent is `pid`.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let name = entry.file_name();
        let Some(child) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        // The name in brackets may hold anything; state and parent follow it.
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let mut words = rest.split_whitespace();
        let (state, parent) = (words.next(), words.next());
        if parent.and_then(|p| p.parse().ok()) == Some(pid) && state != Some("Z") {
            found.push(child);
        }
    }
    found
}

/// Is there such a process, other than as a zombie?
pub(crate) fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| {
        !s.rsplit_once(')')
            .is_some_and(|(_, r)| r.trim_start().starts_with('Z'))
    })
}

/// Ends one process for good.
pub(crate) fn kill(pid: u32) {
    signal(pid, "-KILL");
}

/// Sends one process a signal.
pub(crate) fn signal(pid: u32, signal: &str) {
    let status = Command::new("kill")
        .args([signal, &pid.to_string()])
        .status()
        .expect("kill");
    assert!(status.success(), "kill {signal} {pid}");
}

/// Waits until `what` is true.
pub(crate) fn wait_until(why: &str, mut what: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !what() {
        assert!(Instant::now() < until, "{why} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}
