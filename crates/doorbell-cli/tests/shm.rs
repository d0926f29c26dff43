//! Two processes: all tests over shared memory, and either process killed in the middle of a run.

mod common;
use common::{Running, alive, children, kill, succeed, texts, wait_until, words};

#[test]
fn every_test_with_a_second_process() {
    for test in [
        "put-bw",
        "get-bw",
        "atomic-rate",
        "put-lat",
        "get-lat",
        "signal-lat",
        "send-lat",
        "send-bw",
    ] {
        let out = succeed(&[
            "perf",
            test,
            "--link",
            "shm",
            "--check",
            "--iters",
            "3000",
            "--no-baseline",
        ]);
        assert!(out.contains("every byte checked"), "{test}\n{out}");
        assert!(out.contains("shm"), "{test}\n{out}");
    }
}

#[test]
fn caller_driven_engines_and_large_messages() {
    let out = succeed(&[
        "perf",
        "put-bw",
        "--link",
        "shm",
        "--hca-cores",
        "0",
        "--check",
        "--iters",
        "100",
        "--size",
        "8,64K,1M",
        "--initiator",
        "gpu,proxy,cpu",
        "--no-baseline",
    ]);
    assert!(out.contains("none wrong"), "{out}");
}

/// The second process waits for orders as long as the first one measures, and not for ever where that is stopped.
#[test]
fn a_first_process_that_is_stopped_is_given_up_after_the_time_out() {
    let args = words("perf put-bw --link shm --secs 100 --no-baseline --timeout 1");
    let first = Running::start(&args);
    let pid = first.pid();
    wait_until("the second process", || !children(pid).is_empty());
    let second = children(pid)[0];
    common::signal(pid, "-STOP");
    wait_until("its end", || !alive(second));
    common::signal(pid, "-CONT");
    let (_, err) = texts(&first.finish());
    assert!(err.contains("has been stopped (SIGSTOP"), "{err}");
    assert!(err.contains(&format!("process {pid}")), "{err}");
}

/// Where a limit of the system ends it, the limit is in the error, whichever of the two met it, and nobody waits for the other.
#[test]
fn a_limit_that_is_met_while_both_connect_is_named() {
    let run = |limit: String| {
        let line = format!(
            "ulimit {limit} && exec {} perf put-bw --quick --no-baseline --link shm --timeout 300",
            env!("CARGO_BIN_EXE_doorbell")
        );
        let mut command = common::doorbell(&[]);
        let line = ["-c", &line];
        let mut shell = std::process::Command::new("sh");
        shell.args(line);
        for (name, value) in command.env("RUST_BACKTRACE", "0").get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        let output = Running::spawn(shell, "a run under a limit").finish();
        let (_, err) = texts(&output);
        (output.status.success(), err)
    };
    let mut met = 0;
    for files in 12..28 {
        let (well, err) = run(format!("-n {files}"));
        assert!(well || err.contains("ulimit -n 65536"), "{files}: {err}");
        assert!(!err.contains("did not finish"), "{files}: {err}");
        met += u32::from(err.contains("shared memory"));
    }
    assert!(met > 0, "no limit was met by the link");
    for mib in [150, 300, 600] {
        let (well, err) = run(format!("-v {}", mib << 10));
        assert!(!well && err.contains("ulimit -v"), "{mib}: {err}");
        assert!(
            err.contains("could not connect over shared memory"),
            "{err}"
        );
    }
}

#[test]
fn a_killed_peer_is_an_error_within_the_time_out() {
    for test in ["put-bw", "put-lat"] {
        let args = [
            "perf",
            test,
            "--link",
            "shm",
            "--secs",
            "600",
            "--timeout",
            "5",
        ];
        let child = Running::start(&args);
        let pid = child.pid();
        wait_until("the peer process", || !children(pid).is_empty());
        let peer = children(pid)[0];
        // Wherever the run is by now: setting up, or in the middle of it.
        std::thread::sleep(std::time::Duration::from_millis(700));
        kill(peer);
        let output = child.finish();
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{test}\n{out}\n{err}");
        assert!(err.contains("the peer process"), "{test}: {err}");
        assert!(err.contains("died"), "{test}: {err}");
    }
}

#[test]
fn a_stopped_peer_is_an_error_too() {
    let args = words("perf put-lat --link shm --secs 600 --timeout 3");
    let child = Running::start(&args);
    let pid = child.pid();
    wait_until("the peer process", || !children(pid).is_empty());
    let peer = children(pid)[0];
    std::thread::sleep(std::time::Duration::from_millis(700));
    // Alive, and never to answer again.
    common::signal(peer, "-STOP");
    let output = child.finish();
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{out}\n{err}");
    assert!(err.contains("doorbell: put-lat"), "{err}");
    wait_until("the stopped peer's end", || !alive(peer));
}

#[test]
fn a_peer_does_not_outlive_its_parent() {
    let args = words("perf put-lat --link shm --secs 600 --timeout 5");
    let child = Running::start(&args);
    let pid = child.pid();
    wait_until("the peer process", || !children(pid).is_empty());
    let peer = children(pid)[0];
    std::thread::sleep(std::time::Duration::from_millis(300));
    drop(child);
    wait_until("the peer's end", || !alive(peer));
}

#[test]
fn the_peer_subcommand_refuses_what_is_not_an_order() {
    use std::io::Write;
    use std::process::Stdio;
    let mut child = common::doorbell(&["peer", "--timeout", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starting");
    let mut input = child.stdin.take().expect("its input");
    input.write_all(b"hello\n").expect("writing");
    drop(input);
    let (_, err) = texts(&child.wait_with_output().expect("its end"));
    assert!(err.contains("not an order"), "{err}");
}
