//! Running the built command and looking at what it says.
#![allow(dead_code, reason = "each test file uses its part")]

use std::process::{Command, Output};
use std::time::{Duration, Instant};

mod running;
pub(crate) use running::Running;

/// No run of these tests may take longer, on however slow a machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

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
    Running::start(args).finish()
}

/// The same for arguments in one text.
pub(crate) fn run_words(args: &str) -> Output {
    run(&words(args))
}

/// The words of a command line in which nothing is quoted.
pub(crate) fn words(args: &str) -> Vec<&str> {
    args.split_whitespace().collect()
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
