//! The table: each action, and what each reader says of it.

use doorbell::report::Condition;

use crate::player::{Player, read, stuck};

/// A scene, a rule, and what each reader says.
struct Row {
    scene: &'static str,
    rule: &'static str,
    says: &'static [&'static str],
}

const fn row(scene: &'static str, rule: &'static str, says: &'static [&'static str]) -> Row {
    Row { scene, rule, says }
}

const ROWS: &[Row] = &[
    row(
        "per-slot",
        "wqe=7: drop-doorbell",
        &[
            "WQE 7 was rung and the engine saw no doorbell for it (record 8, doorbell 8): fault script rule 1 (wqe=7: drop-doorbell) dropped it",
            "for WQE 7 of QP",
        ],
    ),
    row(
        "collapsed",
        "wqe=7: delay-doorbell=100s",
        &[
            "WQE 7 was rung and the engine saw no doorbell for it (record 8, doorbell 8): fault script rule 1 (wqe=7: delay-doorbell=100s) keeps it back",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: withhold-cqe",
        &[
            "WQE 7 was executed, but no CQE was written for it (its entry holds 00 00 00 00 00 00 00 f1)",
            "fault script rule 1 (wqe=7: withhold-cqe) keeps it back",
        ],
    ),
    row(
        "collapsed",
        "wqe=7: withhold-cqe=100s",
        &[
            "WQE 7 was executed, but no CQE was written for it (the CQ shows WQE 6)",
            "fault script rule 1 (wqe=7: withhold-cqe=100s) keeps it back",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: corrupt-cqe=0xf0",
        &[
            "the CQE of WQE 7 is damaged",
            "its opcode byte says that it is not written yet",
            "fault script rule 1 (wqe=7: corrupt-cqe=0xf0) damaged it",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: corrupt-cqe=0xff",
        &[
            "the CQE of WQE 7 is damaged",
            "its opcode byte says that it is not written yet",
        ],
    ),
    row(
        "collapsed",
        "wqe=7: corrupt-cqe=0x80000000",
        &[
            "the CQE of WQE 7 is damaged",
            "index 32775 instead of 7",
            "damaged it",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: fail=REMOTE_ACCESS/BAD_RKEY",
        &[
            "WQE 7 (RdmaWrite) failed: REMOTE_ACCESS (0x13)",
            "fault script rule 1 (wqe=7: fail=REMOTE_ACCESS/BAD_RKEY) made it fail",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: stall-engine=100s",
        &[
            "WQE 7 was rung and is not complete (7 of 8 slots are): its engine core is stalled: fault script rule 1 (wqe=7: stall-engine=100s) stalls it",
        ],
    ),
    row(
        "caller per-slot",
        "wqe=7: stall-engine=100s",
        &[
            "WQE 7 was rung and is not complete (7 of 8 slots are): its engine core is stalled: fault script rule 1 (wqe=7: stall-engine=100s) stalls it",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: kill-engine",
        &["its engine core died: panic: fault script rule 1 (wqe=7: kill-engine) killed it at QP"],
    ),
    row(
        "roce per-slot",
        "wqe=7: drop-link",
        &[
            "WQE 7 was rung and is not complete (7 of 8 slots are): fault script rule 1 (wqe=7: drop-link) loses every packet of its port",
        ],
    ),
    row(
        "roce soon per-slot",
        "wqe=7: drop-link",
        &[
            "failed: TRANSPORT_RETRY (0x15)",
            "fault script rule 1 (wqe=7: drop-link) loses every packet of its port",
        ],
    ),
    row(
        "receive",
        "recv=1: withhold-cqe",
        &[
            "receive 1 was filled, but no CQE was written for it",
            "fault script rule 1 (recv=1: withhold-cqe) keeps it back",
            "for receive 1 of QP",
        ],
    ),
    row(
        "unsent",
        "",
        &[
            "for receive 1 of QP",
            "no message has come for it, 1 have for those before: the missing message was not sent: process",
            ", has not posted it (its next is WQE 1)",
        ],
    ),
];

/// One row, by all readers.
fn explained(row: &Row) {
    let mut player = Player::start(row.scene, row.rule, "");
    let own = player.says();
    let mut all = vec![("itself", own)];
    let (report, said) = read(player.pid());
    assert_eq!(report.condition, Condition::Runs, "{}", row.rule);
    let hangs = row.scene != "unsent";
    assert_eq!(stuck(&report), hangs, "{}: {said}", row.rule);
    all.push(("live", said));
    player.stop();
    let (report, said) = read(player.pid());
    assert_eq!(report.condition, Condition::Stopped, "{}", row.rule);
    assert_eq!(stuck(&report), hangs, "{}: stopped: {said}", row.rule);
    all.push(("stopped", said));
    player.kill();
    let (report, said) = read(player.pid());
    assert_eq!(report.condition, Condition::Ended, "{}", row.rule);
    assert_eq!(stuck(&report), hangs, "{}: killed: {said}", row.rule);
    all.push(("killed", said));
    for (reader, said) in &all {
        for part in row.says {
            // What goes on is over when its process is.
            let part = match *reader == "killed" {
                true => &*part
                    .replace("is stalled", "was stalled")
                    .replace("stalls it", "stalled it")
                    .replace("keeps it", "kept it")
                    .replace("loses every", "lost every"),
                false => part,
            };
            assert!(
                said.contains(part),
                "{}, {}, {reader}: {part:?} is not in\n{said}\nall: {all:#?}",
                row.scene,
                row.rule
            );
        }
    }
}

#[test]
fn every_action_is_explained_by_the_program_by_others_and_by_its_record() {
    // A few at a time: most of their time they wait.
    for rows in ROWS.chunks(5) {
        std::thread::scope(|scope| {
            for row in rows {
                scope.spawn(move || explained(row));
            }
        });
    }
}

/// Who waits inside of an engine that a script stalled runs it.
#[test]
fn a_waiter_inside_a_stalled_engine_is_not_missed() {
    let rule = "wqe=7: stall-engine=100s";
    let player = Player::start("caller per-slot long", rule, "");
    player.says();
    let (report, said) = read(player.pid());
    let why = format!("its engine core is stalled: fault script rule 1 ({rule}) stalls it");
    assert!(stuck(&report) && said.contains(&why), "{said}");
    assert!(!said.contains("nobody runs"), "{said}");
}
