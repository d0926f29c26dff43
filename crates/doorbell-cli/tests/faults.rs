//! Fault scripts as a user meets them: each action on a run of the command, and what `dump`, the run's own time-out or its end say of it;
//! and that nothing hangs, whatever the action, the link and the sharing.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use common::{Running, doorbell, run, run_words, texts, wait_until};

/// A small run that a fault at its last request leaves hanging.
const SMALL: &str = "perf put-bw --iters 2000 --batch 1 --no-baseline --sharing exclusive";

/// A run with a fault script and more arguments.
fn perf(fault: &str, more: &str) -> Running {
    let fault = format!("--fault={fault}");
    let mut args = common::words(SMALL);
    args.extend(common::words(more));
    args.push(&fault);
    let mut command = doorbell(&args);
    // Dead links are given up on in milliseconds.
    command.env("DOORBELL_ROCE_TIMEOUT", "10");
    command.env("DOORBELL_ROCE_RETRY", "3");
    Running::spawn(command, &args.join(" "))
}

/// What `dump` says of a run, once it says all of `parts`.
fn dumped(running: &Running, parts: &[&str]) -> String {
    let pid = running.pid().to_string();
    let mut text = String::new();
    let mut ok = || {
        text = texts(&run(&["dump", &pid])).0;
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        parts.iter().all(|p| flat.contains(p))
    };
    let until = Instant::now() + Duration::from_secs(60);
    while !ok() {
        assert!(
            Instant::now() < until,
            "{parts:?} is not in\n{text}\n{}",
            running.said()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    text
}

/// The records of processes that were killed.
fn forget(pid: u32) {
    for (_, path) in doorbell::report::records(pid) {
        let _ = std::fs::remove_file(path);
    }
}

/// Ends a run that hangs.
fn end(running: Running) {
    let pid = running.pid();
    drop(running);
    forget(pid);
}

#[test]
fn dump_explains_a_run_that_a_script_made_hang() {
    for (action, more, parts) in [
        (
            "drop-doorbell",
            "--cq per-slot",
            &[
                "STUCK",
                "WQE 1999 was rung and the engine saw no doorbell for it",
                "fault script rule 1 (wqe=1999: drop-doorbell) dropped it",
            ][..],
        ),
        (
            "delay-doorbell=100s",
            "",
            &["STUCK", "the engine saw no doorbell", "keeps it back, for"],
        ),
        (
            "withhold-cqe",
            "--cq per-slot",
            &[
                "STUCK",
                "WQE 1999 was executed, but no CQE was written for it",
            ],
        ),
        (
            "withhold-cqe",
            "--cq collapsed",
            &[
                "STUCK",
                "WQE 1999 was executed, but no CQE was written for it (the CQ shows WQE 1998)",
            ],
        ),
        (
            "corrupt-cqe=0x01",
            "--cq per-slot",
            &["STUCK", "the CQE of WQE 1999 is damaged", "its owner bit"],
        ),
        (
            "corrupt-cqe=0x80000000",
            "--cq collapsed",
            &[
                "STUCK",
                "the CQE of WQE 1999 is damaged",
                "index 34767 instead of 1999",
            ],
        ),
        (
            "stall-engine=100s",
            "",
            &[
                "STUCK",
                "its engine core is stalled: fault script rule 1",
                "stall-engine",
            ],
        ),
    ] {
        let running = perf(
            &format!("wqe=1999: {action}"),
            &format!("--timeout 100 {more}"),
        );
        let text = dumped(&running, parts);
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        // Once: where it is the reason.
        assert_eq!(flat.matches("fault script rule 1").count(), 1, "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        end(running);
    }
}

#[test]
fn a_run_that_times_out_says_the_same_by_itself() {
    for (action, part) in [
        ("drop-doorbell", "the engine saw no doorbell for it"),
        ("withhold-cqe", "was executed, but no CQE was written"),
        ("stall-engine=100s", "its engine core is stalled"),
    ] {
        let mut running = perf(&format!("wqe=1999: {action}"), "--timeout 1 --cq per-slot");
        let (status, said) = running.end_within(Duration::from_secs(60));
        assert_eq!(status.code(), Some(1), "{said}");
        for part in [part, "fault script rule 1", "nothing completed for 1.00 s"] {
            assert!(said.contains(part), "{part}:\n{said}");
        }
        // What is known to be missing does not come by waiting longer.
        assert!(!said.contains("raise --timeout"), "{said}");
    }
}

/// Each of 32 queue pairs and their regions would be waited for in vain when the run is closed: together they are waited for once.
#[test]
fn what_a_stalled_engine_holds_is_waited_for_once() {
    let mut running = perf("wqe=100: stall-engine=10m", "--timeout 5 --blocks 32");
    let (status, said) = running.end_within(Duration::from_secs(40));
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("its engine core is stalled"), "{said}");
    // Thirty-two say the same: some do, and the others are counted.
    assert!(said.contains(" more waits last"), "{said}");
}

#[test]
fn a_second_process_that_is_stopped_is_named_and_not_waited_for() {
    for link in ["shm", "roce"] {
        let args = format!("perf put-lat --link {link} --secs 300 --timeout 1 --no-baseline");
        let mut running = Running::start(&common::words(&args));
        let children = format!("/proc/{0}/task/{0}/children", running.pid());
        let mut second = String::new();
        wait_until("its second process", || {
            second = std::fs::read_to_string(&children).unwrap_or_default();
            !second.trim().is_empty()
        });
        let second: u32 = second.trim().parse().expect("one process");
        // Once messages are on their way.
        running.wait_for("put-lat: ");
        std::thread::sleep(Duration::from_millis(500));
        common::signal(second, "-STOP");
        let (status, said) = running.end_within(Duration::from_secs(30));
        assert_eq!(status.code(), Some(1), "{link}: {said}");
        let named = format!("the peer process (pid {second})");
        assert!(
            said.contains(&named) && said.contains("SIGSTOP"),
            "{link}: {said}"
        );
        forget(second);
    }
}

#[test]
fn failures_and_deaths_are_told_with_the_rule_that_made_them() {
    for (rule, more, parts) in [
        (
            "wqe=100: fail=REMOTE_ACCESS/BAD_RKEY",
            "",
            &[
                "WQE 100 completed in error: REMOTE_ACCESS (0x13)",
                "BAD_RKEY (0x89)",
                "rule 1 (wqe=100: fail=REMOTE_ACCESS/BAD_RKEY) fired at QP",
            ][..],
        ),
        (
            "wqe=100: kill-engine",
            "",
            &[
                "engine core died: panic: fault script rule 1 (wqe=100: kill-engine)",
                "the engine that executes the QP is gone",
            ],
        ),
        (
            "wqe=100: kill-peer",
            "--link shm",
            &[
                "rule 1 (wqe=100: kill-peer) fired",
                "was killed",
                "the peer",
            ],
        ),
        (
            "rank=1, at=200ms: kill-process",
            "--link shm --timeout 20 --iters 100000000",
            &["the peer process"],
        ),
        (
            "wqe=100: drop-link",
            "--link roce",
            &["rule 1 (wqe=100: drop-link) fired", "TRANSPORT_RETRY"],
        ),
    ] {
        let more = match more.contains("--iters") {
            true => more.to_owned(),
            false => format!("--timeout 20 {more}"),
        };
        let mut running = match more.contains("--iters") {
            true => {
                let fault = format!("--fault={rule}");
                let mut args = common::words("perf put-bw --batch 1 --no-baseline");
                args.extend(common::words(&more));
                args.push(&fault);
                Running::start(&args)
            }
            false => perf(rule, &more),
        };
        let (status, said) = running.end_within(Duration::from_secs(60));
        assert_eq!(status.code(), Some(1), "{rule}:\n{said}");
        for part in parts {
            assert!(said.contains(part), "{rule}: {part}:\n{said}");
        }
        for line in said.lines().filter(|l| l.contains("was killed")) {
            let pid = line
                .split("process ")
                .last()
                .and_then(|l| l.split(' ').next()?.parse().ok());
            pid.into_iter().for_each(forget);
        }
    }
}

#[test]
fn a_process_that_a_script_killed_is_explained_by_its_record() {
    let mut running = perf("wqe=1500: kill-process", "--timeout 20");
    let (status, said) = running.end_within(Duration::from_secs(60));
    assert_eq!(status.signal(), Some(9), "{said}");
    let text = dumped(&running, &["post-mortem", "slot 1500: fault rule 1"]);
    assert!(text.contains("QP 0x"), "{text}");
    end(running);
}

#[test]
fn a_link_that_comes_back_costs_nothing_but_time() {
    let mut command = doorbell(&common::words(
        "perf put-bw --iters 2000 --batch 1 --no-baseline --link roce --check --timeout 60 --fault=wqe=500:drop-link=50ms",
    ));
    command.env("DOORBELL_ROCE_TIMEOUT", "12");
    let said = Running::spawn(command, "perf").succeed_within(Duration::from_secs(60));
    assert!(said.contains("drop-link=50ms) fired"), "{said}");
}

#[test]
fn receives_lose_their_completions_too() {
    for (link, rank) in [("loopback", "qp=#1, "), ("roce", "rank=1, ")] {
        let fault = format!("--fault={rank}recv=7: withhold-cqe");
        let mut args =
            common::words("perf send-bw --iters 100 --batch 1 --no-baseline --timeout 2 --link");
        args.extend([link, fault.as_str()]);
        let mut running = Running::start(&args);
        let (status, said) = running.end_within(Duration::from_secs(90));
        assert_eq!(status.code(), Some(1), "{link}: {said}");
        assert!(
            said.contains("receive 7: executed, but no CQE was written"),
            "{link}: {said}"
        );
    }
}

#[test]
fn scripts_come_from_the_environment_and_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lost.fault");
    std::fs::write(
        &file,
        "# a late one\nwqe=10: delay-doorbell=1ms\n\nwqe=20: delay-doorbell=1ms\n",
    )
    .unwrap();
    let named = format!("--fault-file={}", file.display());
    let quick = "perf put-bw --iters 100 --batch 1 --no-baseline";
    let mut args = common::words(quick);
    args.push(&named);
    let (_, err) = texts(&run(&args));
    assert!(
        err.contains("rule 1 (wqe=10: delay-doorbell=1ms) fired") && err.contains("rule 2"),
        "{err}"
    );
    for value in [
        format!("@{}", file.display()),
        "wqe=10: delay-doorbell=1ms".into(),
    ] {
        let mut command = doorbell(&common::words(quick));
        command.env("DOORBELL_FAULT", value);
        let said = Running::spawn(command, quick).succeed_within(Duration::from_secs(60));
        assert!(
            said.contains("rule 1 (wqe=10: delay-doorbell=1ms) fired"),
            "{said}"
        );
    }
    std::fs::write(&file, "wqe=10: delay-doorbell=1ms\nwqe=20: delay=1ms\n").unwrap();
    let output = run(&args);
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(2));
    assert!(err.contains("line 2, column 9: `delay`"), "{err}");
    let (_, err) = texts(&run_words("perf put-bw --fault-file=/no/such/file"));
    assert!(err.contains("/no/such/file"), "{err}");
}

/// Did it end as a run may end that was interfered with?
fn ended_well(status: ExitStatus, action: &str) -> bool {
    match action {
        "kill-process" => status.signal() == Some(9),
        _ => matches!(status.code(), Some(0 | 1 | 3)),
    }
}

#[test]
#[ignore = "heavy: every action, link, sharing and kind of CQ, a process or two each"]
fn heavy_nothing_hangs() {
    let actions = [
        "drop-doorbell",
        "delay-doorbell=20ms",
        "delay-doorbell=100s",
        "corrupt-cqe",
        "corrupt-cqe=0x01",
        "corrupt-cqe=0xd0",
        "withhold-cqe",
        "withhold-cqe=20ms",
        "fail=TRANSPORT_RETRY",
        "stall-engine=20ms",
        "stall-engine=100s",
        "kill-engine",
        "kill-process",
        "kill-peer",
        "drop-link",
    ];
    let sharings = [
        "--sharing exclusive",
        "--sharing block --threads 4",
        "--sharing gpu --threads 4 --blocks 2",
    ];
    // Most of their time they wait for a second to pass.
    std::thread::scope(|scope| {
        for link in ["loopback", "shm", "roce"] {
            scope.spawn(move || {
                for sharing in sharings {
                    for (i, action) in actions.iter().enumerate() {
                        let cq = ["--cq collapsed", "--cq per-slot"][i % 2];
                        interfered(action, &format!("--link {link} {sharing} {cq}"));
                    }
                }
            });
        }
    });
}

/// A run that is interfered with ends by itself, soon, and its second process with it.
fn interfered(action: &str, more: &str) {
    let fault = format!("--fault=wqe=150: {action}");
    let words = format!("perf put-bw --iters 200 --batch 1 --no-baseline --timeout 1 {more}");
    let mut args = common::words(&words);
    args.push(&fault);
    let mut command = doorbell(&args);
    command.env("DOORBELL_ROCE_TIMEOUT", "10");
    command.env("DOORBELL_ROCE_RETRY", "3");
    command.env("DOORBELL_QUIESCE_MS", "500");
    let mut running = Running::spawn(command, &args.join(" "));
    // One second without progress, and what goes with starting and ending.
    let (status, said) = running.end_within(Duration::from_secs(30));
    assert!(
        ended_well(status, action),
        "{words} {action}: {status}\n{said}"
    );
    // A process that is killed says no more; every other says what was done to it.
    assert!(
        action == "kill-process" || said.contains(") fired") || said.contains(") did nothing"),
        "{words} {action}: the rule did not fire\n{said}"
    );
    let pid = running.pid();
    wait_until("its children's end", || common::children(pid).is_empty());
    forget(pid);
}
