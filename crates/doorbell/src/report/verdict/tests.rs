use doorbell_wire::{Syndrome, Vendor};

use super::super::{FiringReport, Poster, Receives, Seen};
use super::*;

fn qp(poster: [u64; 4], engine: [u64; 2], words: (u16, u64)) -> QpReport {
    let [reserved, ready, rung, consumed] = poster;
    let json = serde_json::json!({
        "qpn": 0x42, "cqn": 1, "core": 0, "state": "ready", "depth": 1024, "handler": "record", "cq": "collapsed",
        "poster": null, "engine": null, "record": words.0, "doorbell": words.1, "next": null, "cqe": null, "error": null,
        "counters": [], "roce": [], "link": "loopback", "moving": false, "stuck": false, "verdict": "",
    });
    QpReport {
        poster: Some(Poster {
            reserved,
            ready,
            rung,
            consumed,
        }),
        engine: Some(Seen {
            rung: engine[0],
            completed: engine[1],
        }),
        ..serde_json::from_value(json).unwrap()
    }
}

fn core(rounds_since: u64) -> CoreReport {
    CoreReport {
        number: 0,
        dead: None,
        rounds: 1000,
        rounds_since,
        qps: 1,
        counters: Vec::new(),
        cpu_ns: None,
        seen_ns: 0,
    }
}

fn ground<'a>(core: &'a CoreReport, firings: &'a [FiringReport]) -> Ground<'a> {
    Ground {
        moving: false,
        core: Some(core),
        caller_driven: false,
        recorded: true,
        condition: Condition::Runs,
        stood_ns: None,
        played: Played {
            all: firings,
            now: 1_000_000_000,
            over: false,
        },
    }
}

fn verdict(qp: &QpReport, rounds: u64) -> (bool, String) {
    let core = core(rounds);
    let verdict = of(qp, &ground(&core, &[]));
    assert!(!verdict.moving);
    (verdict.stuck, verdict.text)
}

fn firing(action: &str, index: u64) -> FiringReport {
    FiringReport {
        rule: 1,
        text: format!("wqe={index}: {action}"),
        action: action.to_owned(),
        core: 0,
        qpn: Some(0x42),
        index: Some(index),
        receive: false,
        at_ns: 500_000_000,
        until_ns: None,
        idle: false,
        note: String::new(),
    }
}

/// Of each stage, what is behind.
fn stages() -> Vec<(QpReport, &'static str)> {
    vec![
        (qp([7, 7, 7, 7], [7, 7], (7, 7)), "idle: all of 7"),
        (
            qp([1025, 1024, 1024, 9], [1024, 1024], (1024, 1024)),
            "slot 1024 was reserved and not published",
        ),
        (
            qp([1024, 1024, 1023, 9], [1023, 1023], (1023, 1023)),
            "WQE 1023 is written and published, and not covered",
        ),
        (
            qp([1024, 1024, 1024, 9], [1023, 1023], (1024, 1023)),
            "WQE 1023 was rung and the engine saw no doorbell for it",
        ),
        (
            qp([1024, 1024, 1024, 9], [1024, 1000], (1024, 1024)),
            "WQE 1000 was rung and is not complete",
        ),
    ]
}

#[test]
fn each_stage_that_is_behind_is_named() {
    for (qp, part) in stages() {
        let (stuck, text) = verdict(&qp, 10);
        assert!(text.contains(part), "{part}: {text}");
        assert_eq!(stuck, !part.starts_with("idle"), "{text}");
        assert_eq!(qp.has_work(), stuck, "{text}");
    }
}

/// A healthy process that is stopped, or was killed at work, lacks nothing; one that its engine had seen stand does.
#[test]
fn a_process_that_stands_still_is_not_blamed_for_it() {
    let core = core(0);
    for condition in [Condition::Stopped, Condition::Ended, Condition::Elsewhere] {
        for (qp, part) in stages() {
            let mut ground = Ground {
                condition,
                ..ground(&core, &[])
            };
            let busy = of(&qp, &ground);
            assert!(!busy.stuck && busy.text.contains(part), "{}", busy.text);
            if !part.starts_with("idle") {
                let why = match condition {
                    Condition::Stopped => ": its process is stopped (state T)",
                    Condition::Ended => ": its process ended before it went on",
                    _ => ": its process is in another PID namespace",
                };
                assert!(busy.text.contains(why), "{}", busy.text);
            }
            assert!(!busy.text.contains("lost"), "{}", busy.text);
            ground.stood_ns = Some(60_000_000);
            let stood = of(&qp, &ground);
            assert_eq!(stood.stuck, !part.starts_with("idle"), "{}", stood.text);
        }
    }
}

#[test]
fn the_reason_is_the_nearest_one() {
    let mut one = qp([8, 8, 8, 0], [8, 7], (8, 8));
    assert!(verdict(&one, 0).1.contains("makes no rounds"));
    let asleep = core(0);
    let caller = Ground {
        caller_driven: true,
        ..ground(&asleep, &[])
    };
    let text = of(&one, &caller).text;
    assert!(text.contains("nobody runs its engine"), "{text}");
    let quiet = CoreReport {
        seen_ns: 1,
        ..core(0)
    };
    let text = of(&one, &ground(&quiet, &[])).text;
    assert!(
        text.contains("makes no rounds; the last that was seen was"),
        "{text}"
    );
    one.next = Some("#3 qp 0x42 ds 3: RDMA_WRITE".into());
    assert!(verdict(&one, 1).1.contains("rung before it was written"));
    one.next = Some("#7 qp 0x42 ds 2: WAIT for completion 9 of cq 5".into());
    assert!(verdict(&one, 1).1.contains("another queue's completion"));
    // Nothing is invented.
    one.next = Some("#7 qp 0x42 ds 3: RDMA_WRITE".into());
    let text = verdict(&one, 1).1;
    assert!(text.ends_with("did not say what it waits for"), "{text}");
    one.link = "roce".into();
    let text = verdict(&one, 1).1;
    assert!(text.ends_with("the peer does not answer"), "{text}");
    // Without the poster's indexes the doorbell and the record are what tells.
    let mut bare = qp([0; 4], [7, 7], (9, 9));
    bare.poster = None;
    let (stuck, text) = verdict(&bare, 1);
    assert!(stuck && text.contains("slots 7 to 8 were rung"), "{text}");
    bare.doorbell = Some(7);
    let (stuck, text) = verdict(&bare, 1);
    assert!(stuck && text.contains("WQE 7 is in the record"), "{text}");
}

#[test]
fn a_rule_is_named_where_it_is_the_reason_and_nowhere_else() {
    let core = core(0);
    let unseen = qp([8, 8, 8, 0], [7, 7], (8, 8));
    let say = |qp: &QpReport, firings: &[FiringReport]| of(qp, &ground(&core, firings)).text;
    let text = say(&unseen, &[firing("stall-engine", 3)]);
    assert!(
        text.ends_with(
            ": its engine core is stalled: fault script rule 1 (wqe=3: stall-engine) stalls it"
        ),
        "{text}"
    );
    // A stall of the past is none.
    let over = FiringReport {
        until_ns: Some(900_000_000),
        ..firing("stall-engine", 3)
    };
    assert!(!say(&unseen, &[over]).contains("stall-engine"));
    let awake = super::tests::core(5);
    let say = |qp: &QpReport, firings: &[FiringReport]| of(qp, &ground(&awake, firings)).text;
    let text = say(&unseen, &[firing("drop-doorbell", 7), firing("fail", 2)]);
    assert!(
        text.ends_with(": fault script rule 1 (wqe=7: drop-doorbell) dropped it"),
        "{text}"
    );
    let late = FiringReport {
        until_ns: Some(3_000_000_000),
        ..firing("delay-doorbell", 7)
    };
    let text = say(&unseen, &[late]);
    assert!(
        text.ends_with(" keeps it back, for 2.0 s more") && !text.contains("lost"),
        "{text}"
    );
    // Another one's loss explains nothing.
    let text = say(&unseen, &[firing("drop-doorbell", 3)]);
    assert!(text.ends_with("its doorbell was lost on the way"), "{text}");
    let idle = qp([8, 8, 8, 0], [8, 8], (8, 8));
    assert!(!say(&idle, &[firing("drop-doorbell", 3)]).contains("rule"));
    let mut lacks = idle.clone();
    (lacks.lacks, lacks.lacks_at) = (
        Some("WQE 7 was executed, but no CQE was written for it (…)".into()),
        Some(7),
    );
    let text = say(&lacks, &[firing("withhold-cqe", 7)]);
    assert!(
        text.ends_with("; fault script rule 1 (wqe=7: withhold-cqe) keeps it back"),
        "{text}"
    );
    let text = say(&lacks, &[firing("corrupt-cqe", 7)]);
    assert!(
        text.starts_with("the CQE of WQE 7 is damaged: it looks as if it had never been written"),
        "{text}"
    );
    let mut failed = idle.clone();
    failed.error = Some("WQE 3 failed".into());
    assert_eq!(say(&failed, &[firing("fail", 4)]), "WQE 3 failed");
    let text = say(&failed, &[firing("fail", 3)]);
    assert_eq!(
        text,
        "WQE 3 failed; fault script rule 1 (wqe=3: fail) made it fail"
    );
    // What came to nothing is no reason.
    let nothing = FiringReport {
        idle: true,
        ..firing("kill-peer", 3)
    };
    assert_eq!(say(&failed, &[nothing]), "WQE 3 failed");
    let mut far = qp([8, 8, 8, 0], [8, 7], (8, 8));
    far.link = "roce".into();
    let text = say(&far, &[firing("drop-link", 3)]);
    assert!(text.ends_with("loses every packet of its port"), "{text}");
    // A process that its own script killed.
    let dead = Ground {
        condition: Condition::Ended,
        ..ground(&core, &[])
    };
    let all = [firing("kill-process", 7)];
    let dead = Ground {
        played: Played {
            all: &all,
            now: 600_000_000,
            over: true,
        },
        ..dead
    };
    let stalled = [firing("stall-engine", 7)];
    let text = of(
        &far,
        &Ground {
            played: Played {
                all: &stalled,
                ..dead.played
            },
            ..dead
        },
    )
    .text;
    assert!(text.contains("its engine core was stalled: "), "{text}");
    assert!(text.ends_with(" stalled it"), "{text}");
    let text = of(&far, &dead).text;
    assert!(
        text.ends_with("its process ended, fault script rule 1 (wqe=7: kill-process) killed it"),
        "{text}"
    );
}

#[test]
fn receives_are_told() {
    let mut one = qp([8, 8, 8, 0], [8, 8], (8, 8));
    one.recv = Some(Receives { posted: 9, done: 7 });
    let (stuck, text) = verdict(&one, 1);
    assert!(
        !stuck && text.ends_with("; receives 7 to 8 wait for messages"),
        "{text}"
    );
    (one.recv_lacks, one.recv_lacks_at) =
        (Some("receive 6 was executed, but no CQE".into()), Some(6));
    assert!(verdict(&one, 1).0);
}

#[test]
fn motion_failure_and_death_come_first() {
    let now = qp([1024, 1024, 1023, 9], [1023, 1023], (1023, 1023));
    let awake = core(5);
    let moving = Ground {
        moving: true,
        ..ground(&awake, &[])
    };
    assert_eq!(of(&now, &moving).text, "moving");
    let mut failed = now.clone();
    failed.error = Some("WQE 3 failed".into());
    let verdict = of(&failed, &moving);
    assert!(verdict.stuck && verdict.text == "WQE 3 failed");
    let dead = CoreReport {
        dead: Some("it panicked".into()),
        ..core(5)
    };
    let text = of(&now, &ground(&dead, &[])).text;
    assert!(text.contains("it panicked"), "{text}");
}

/// Slots that no doorbell covers yet are not why a CQE before them is missing.
#[test]
fn a_missing_cqe_comes_before_what_is_not_rung() {
    let awake = core(5);
    let mut one = qp([1800, 1793, 1792, 777], [1792, 1792], (1792, 1792));
    one.cq = "per-slot".into();
    one.lacks = Some("WQE 777 was executed, but no CQE was written for it (…)".into());
    one.lacks_at = Some(777);
    let firings = [firing("withhold-cqe", 777)];
    let verdict = of(&one, &ground(&awake, &firings));
    let cqe = "WQE 777 was executed, but no CQE was written for it (…); fault script rule 1 (wqe=777: withhold-cqe) keeps it back";
    assert!(verdict.stuck && verdict.text == cqe, "{}", verdict.text);
    verdict.onto(&mut one);
    assert_eq!(one.lacks.as_deref(), Some(cqe));
    let later = one.later.as_deref().unwrap_or_default();
    assert!(
        later.starts_with("WQE 1792 is written and published"),
        "{later}"
    );
    // Nor is a core that stalls afterwards.
    one.lacks = Some("WQE 777 was executed, but no CQE was written for it (…)".into());
    let asleep = core(0);
    let verdict = of(
        &one,
        &ground(&asleep, &[firings[0].clone(), firing("stall-engine", 9)]),
    );
    verdict.onto(&mut one);
    assert_eq!(one.lacks.as_deref(), Some(cqe));
}

/// When and how a queue pair failed says whether a rule did it.
#[test]
fn a_rule_is_not_accused_of_a_later_failure() {
    const MS: u64 = 1_000_000;
    let awake = core(5);
    let event = |kind: &str, value: u32, at_ns: u64| super::super::EventReport {
        at_ns,
        kind: kind.to_owned(),
        from: 300,
        slots: 1,
        value,
    };
    let say = |qp: &QpReport, f: &FiringReport| {
        let firings = [f.clone()];
        let mut ground = ground(&awake, &firings);
        ground.played.now = 20_000 * MS;
        of(qp, &ground).text
    };
    let mut failed = qp([400, 400, 400, 300], [400, 400], (400, 400));
    failed.link = "roce".into();
    let error = format!("WQE 300 (RdmaWrite) failed: {}", Syndrome::TRANSPORT_RETRY);
    failed.error = Some(error.clone());
    // At 500 ms, for so long; the failure comes at that time.
    let lost = |ms: u64| FiringReport {
        until_ns: Some((500 + ms) * MS),
        ..firing("drop-link", 300)
    };
    let mut at = |ms: u64| {
        failed.events = vec![event("error", 0, ms * MS)];
        failed.clone()
    };
    assert_eq!(say(&at(9_000), &lost(20)), error);
    let during = say(&at(1_000), &lost(4_000));
    assert!(
        during.ends_with("(wqe=300: drop-link) lost every packet of its port for 4.0 s"),
        "{during}"
    );
    let lasting = say(&at(9_000), &firing("drop-link", 300));
    assert!(
        lasting.ends_with("loses every packet of its port"),
        "{lasting}"
    );
    assert_eq!(say(&at(100), &firing("drop-link", 300)), error);
    // A request that was refused was not lost.
    let mut refused = at(600);
    refused.error = Some("WQE 300 (RdmaWrite) failed: REMOTE_ACCESS".into());
    assert!(!say(&refused, &firing("drop-link", 300)).contains("rule"));
    assert!(say(&refused, &firing("fail", 300)).ends_with("made it fail"));
    // The same request fails by itself after a reset.
    refused.events = vec![event("state", 0, 5_000 * MS), event("error", 0, 6_000 * MS)];
    assert!(!say(&refused, &firing("fail", 300)).contains("rule"));
    // A peer that was killed is why a peer is dead, and for nothing else.
    let killed = FiringReport {
        note: "process 7 was killed".into(),
        ..firing("kill-peer", 290)
    };
    refused.events = vec![event("error", 0, 700 * MS)];
    assert!(!say(&refused, &killed).contains("rule"));
    refused.error = Some(format!("WQE 300 failed: {}", Vendor::PEER_DEAD));
    assert!(say(&refused, &killed).ends_with(": process 7 was killed"));
    refused.events = vec![event("state", 0, 5_000 * MS), event("error", 0, 6_000 * MS)];
    assert!(!say(&refused, &killed).contains("rule"));
}
