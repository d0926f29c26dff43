//! What others say of a process: of one that was killed, of one at work, and of one that others wait for.

use std::time::Duration;

use doorbell::report::Condition;

use crate::player::{Player, read, stuck, two};

/// A process that its own script killed, and one that another's killed: what their peers and their records say.
#[test]
fn a_death_is_explained_by_the_peer_and_by_the_record() {
    let dir = tempfile::tempdir().expect("a directory");
    let start = |rule: &str| two(dir.path(), rule, "mate");
    let rule = "wqe=7: kill-process";
    let (mut player, mate) = start(rule);
    let said = mate.says();
    let killed = format!("fault script rule 1 ({rule}) killed it");
    player.child.wait().expect("it is dead");
    for part in ["which has ended", "is connected to it"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let (report, said) = read(player.pid());
    assert!(
        report.condition == Condition::Ended && !stuck(&report),
        "{said}"
    );
    for part in ["post-mortem", &killed, "WQE 7 was rung and is not complete"] {
        assert!(said.contains(part), "{part}: {said}");
    }

    let rule = "wqe=7: kill-peer";
    let (mut player, mate) = start(rule);
    let own = player.says();
    let victim = format!(
        "fault script rule 1 ({rule}): process {} was killed",
        mate.pid()
    );
    let (_, live) = read(player.pid());
    // Its killer is alive, and says so.
    let (report, dead) = read(mate.pid());
    assert_eq!(report.condition, Condition::Ended, "{dead}");
    let by = format!(
        "fault script rule 1 ({rule}) of process {} killed it",
        player.pid()
    );
    assert!(dead.contains(&by), "{by}: {dead}");
    player.kill();
    let (_, record) = read(player.pid());
    for said in [own, live, record] {
        assert!(said.contains(&victim), "{victim}: {said}");
    }
}

/// Whatever moment a healthy process is stopped or killed at, nothing is called stuck, lost or missing.
#[test]
fn a_busy_process_that_is_stopped_or_killed_is_not_stuck() {
    for scene in ["busy", "busy", "busy"] {
        let mut player = Player::start(scene, "", "");
        player.says();
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(20));
            player.stop();
            let (report, said) = read(player.pid());
            assert_eq!(report.condition, Condition::Stopped);
            assert!(!stuck(&report) && !said.contains("lost"), "{said}");
            player.signal(rustix::process::Signal::CONT);
        }
        std::thread::sleep(Duration::from_millis(50));
        player.kill();
        let (report, said) = read(player.pid());
        assert_eq!(report.condition, Condition::Ended);
        assert!(!stuck(&report) && !said.contains("lost"), "{said}");
        let engine = report.devices[0].qps[0].engine.expect("its indexes");
        if let Some(poster) = report.devices[0].qps[0].poster {
            assert!(poster.rung >= engine.rung, "of two moments: {report:?}");
        }
    }
}

/// A message that its sender never made is named, and a peer that is stopped.
#[test]
fn what_another_process_did_not_do_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let (player, mate) = two(dir.path(), "", "mate receive");
    let own = mate.says();
    player.says();
    let who = format!("process {}", player.pid());
    let missing =
        "no message has come for it, 0 have for those before: the missing message was not sent: ";
    let next = ", has not posted it (its next is WQE 8)";
    let (_, live) = read(mate.pid());
    for said in [own, live] {
        assert!(said.contains(&format!("{missing}{who}, QP ")), "{said}");
        assert!(said.contains(next), "{said}");
    }
    player.stop();
    let (_, said) = read(mate.pid());
    let stopped = format!("{missing}{who}, which is stopped (state T), QP ");
    assert!(said.contains(&stopped), "{said}");

    let (player, mate) = two(dir.path(), " ", "mate long");
    mate.says();
    player.says();
    player.stop();
    let (_, said) = read(mate.pid());
    let stopped = format!(
        "; process {}, which is stopped (state T), is connected to it",
        player.pid()
    );
    assert!(said.contains(&stopped), "{said}");
}
