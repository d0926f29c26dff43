//! What a queue pair that stands still is waiting for, told from its indexes alone.
//!
//! Work goes through stages, each with an index: reserved, written and published, rung, seen by the engine, complete. The
//! earliest stage that has fallen behind the one before it names what is missing.

use super::moment::{moment, span};
use super::{CoreReport, QpReport, parts};

/// Moving, stuck, and what there is to say.
pub(super) fn of(
    qp: &QpReport,
    before: Option<&QpReport>,
    core: Option<&CoreReport>,
    caller_driven: bool,
) -> (bool, bool, String) {
    if let Some(dead) = core.and_then(|c| c.dead.as_ref()) {
        return (false, true, format!("its engine core died: {dead}"));
    }
    if let Some(error) = &qp.error {
        return (false, true, format!("{error}{}", script(qp.faults.first())));
    }
    if qp.state == "destroyed" {
        return (
            false,
            false,
            "destroyed; an export still holds it".to_owned(),
        );
    }
    let moving = before.is_some_and(|b| {
        (&b.poster, &b.engine, &b.counters) != (&qp.poster, &qp.engine, &qp.counters)
    });
    if moving {
        return (true, false, "moving".to_owned());
    }
    let (stuck, text) = still(qp, core, caller_driven);
    (false, stuck, format!("{text}{}", script(qp.faults.last())))
}

/// What a fault script has to do with it.
fn script(firing: Option<&String>) -> String {
    firing.map_or(String::new(), |firing| format!("; {firing}"))
}

/// Whether, and on what, a queue pair without motion waits.
fn still(qp: &QpReport, core: Option<&CoreReport>, caller_driven: bool) -> (bool, String) {
    let Some(engine) = qp.engine else {
        return (false, "its engine does not tell how far it is".to_owned());
    };
    let asleep = core.is_some_and(|c| c.rounds_since == 0);
    let why_asleep = match caller_driven {
        true => "nobody runs its engine: it is caller-driven, and no thread waits or polls",
        false => &format!("its engine core makes no rounds{}", heartbeat(core)),
    };
    let words = match (qp.record, qp.doorbell) {
        (Some(record), Some(word)) if qp.handler == "record" => {
            format!("record {record}, doorbell {word}")
        }
        (_, Some(word)) => format!("doorbell {word}"),
        (_, None) => "the doorbell cannot be read".to_owned(),
    };
    if engine.completed < engine.rung {
        let at = engine.completed;
        let reason = if asleep {
            why_asleep.to_owned()
        } else if qp.state == "reset" {
            "the queue pair is not connected".to_owned()
        } else {
            reason(qp, at)
        };
        return (
            true,
            format!(
                "WQE {at} was rung and is not complete ({} of {} slots are): {reason}",
                at, engine.rung
            ),
        );
    }
    if let Some(poster) = qp.poster {
        if engine.rung < poster.rung {
            let reason = match asleep {
                true => why_asleep,
                false => "its doorbell was lost on the way",
            };
            let (first, last) = (engine.rung, poster.rung - 1);
            let slots = match first == last {
                true => format!("WQE {first} was rung and the engine saw no doorbell for it"),
                false => format!(
                    "slots {first} to {last} were rung and the engine saw no doorbell for them"
                ),
            };
            return (true, format!("{slots} ({words}): {reason}"));
        }
        if poster.rung < poster.ready {
            return (
                true,
                format!(
                    "WQE {} is written and published, and not covered by any doorbell ({words}); {} for one{}",
                    poster.rung,
                    wait(poster.ready - poster.rung),
                    posted(qp, poster.rung)
                ),
            );
        }
        if poster.ready < poster.reserved {
            return (
                true,
                format!(
                    "slot {} was reserved and never published: the thread that has it did not come back; {} for it",
                    poster.ready,
                    wait(poster.reserved - poster.ready)
                ),
            );
        }
    } else if qp.handler == "record" && qp.record.is_some_and(|r| r != engine.rung as u16) {
        return (
            true,
            format!(
                "WQE {} is in the record and no doorbell told the engine ({words}){}",
                engine.rung,
                posted(qp, engine.rung)
            ),
        );
    }
    if let (None, Some(written)) = (qp.poster, qp.posted)
        && written > engine.rung
    {
        return (
            true,
            format!(
                "WQE {} is written, and not covered by any doorbell ({words}); {} for one{}",
                engine.rung,
                wait(written - engine.rung),
                posted(qp, engine.rung)
            ),
        );
    }
    if let Some(lacks) = &qp.lacks {
        return (true, lacks.clone());
    }
    let done = engine.completed;
    (false, format!("idle: all of {done} slots are complete"))
}

/// How long ago an engine core was last seen to be alive, if it is recorded.
fn heartbeat(core: Option<&CoreReport>) -> String {
    match core.map_or(0, |c| c.seen_ns) {
        0 => String::new(),
        seen => {
            let ago = doorbell_hca::record::now_ns().saturating_sub(seen);
            format!("; the last that was seen was {} ago", span(ago))
        }
    }
}

/// When the engine first saw a slot, if it is remembered.
fn posted(qp: &QpReport, slot: u64) -> String {
    parts::first_sight(&qp.events, slot).map_or(String::new(), |ns| {
        format!("; the engine first saw it at {}", moment(ns))
    })
}

fn wait(slots: u64) -> String {
    match slots {
        1 => "1 slot waits".to_owned(),
        n => format!("{n} slots wait"),
    }
}

/// Why the engine does not go on with a WQE that it knows of.
fn reason(qp: &QpReport, at: u64) -> String {
    let Some(next) = &qp.next else {
        return "the slot could not be read".to_owned();
    };
    let index = format!("#{} ", at as u16);
    if !next.starts_with(&index) {
        return "its slot does not hold it: it was rung before it was written".to_owned();
    }
    if next.contains(": WAIT ") {
        return "it waits for another queue's completion".to_owned();
    }
    if let Some(parked) = &qp.parked {
        return format!("the engine has set it aside, it waits for {parked}");
    }
    "the engine has set it aside: copies are under way, the target has no receive, or the peer does not answer".to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::{Poster, Seen};
    use super::*;

    fn qp(poster: [u64; 4], engine: [u64; 2], words: (u16, u64)) -> QpReport {
        let [reserved, ready, rung, consumed] = poster;
        QpReport {
            qpn: 0x42,
            cqn: 1,
            core: Some(0),
            state: "ready".into(),
            depth: 1024,
            handler: "record".into(),
            cq: "collapsed".into(),
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
            record: Some(words.0),
            doorbell: Some(words.1),
            next: None,
            cqe: None,
            error: None,
            counters: Vec::new(),
            roce: Vec::new(),
            link: String::new(),
            peer_qpn: None,
            peer: None,
            posted: None,
            parked: None,
            pending: Vec::new(),
            events: Vec::new(),
            lacks: None,
            faults: Vec::new(),
            moving: false,
            stuck: false,
            verdict: String::new(),
        }
    }

    fn core(rounds_since: u64) -> CoreReport {
        CoreReport {
            dead: None,
            rounds: 1000,
            rounds_since,
            qps: 1,
            counters: Vec::new(),
            cpu_ns: None,
            seen_ns: 0,
        }
    }

    fn verdict(qp: &QpReport, rounds: u64) -> (bool, bool, String) {
        of(qp, Some(qp), Some(&core(rounds)), false)
    }

    #[test]
    fn each_stage_that_is_behind_is_named() {
        let cases = [
            ([7, 7, 7, 7], [7, 7], (7, 7), "idle: all of 7"),
            (
                [1025, 1024, 1024, 9],
                [1024, 1024],
                (1024, 1024),
                "slot 1024 was reserved",
            ),
            (
                [1024, 1024, 1023, 9],
                [1023, 1023],
                (1023, 1023),
                "WQE 1023 is written and published, and not covered",
            ),
            (
                [1024, 1024, 1024, 9],
                [1023, 1023],
                (1024, 1023),
                "WQE 1023 was rung and the engine saw no doorbell for it",
            ),
            (
                [1024, 1024, 1024, 9],
                [1024, 1000],
                (1024, 1024),
                "WQE 1000 was rung and is not complete",
            ),
        ];
        for (poster, engine, words, part) in cases {
            let (moving, stuck, text) = verdict(&qp(poster, engine, words), 10);
            assert!(!moving && text.contains(part), "{part}: {text}");
            assert_eq!(stuck, !part.starts_with("idle"), "{text}");
        }
    }

    #[test]
    fn the_reason_is_the_nearest_one() {
        let mut one = qp([8, 8, 8, 0], [8, 7], (8, 8));
        assert!(verdict(&one, 0).2.contains("makes no rounds"));
        let (_, _, text) = of(&one, Some(&one), Some(&core(0)), true);
        assert!(text.contains("caller-driven"), "{text}");
        one.next = Some("#3 qp 0x42 ds 3: RDMA_WRITE".into());
        assert!(verdict(&one, 1).2.contains("rung before it was written"));
        one.next = Some("#7 qp 0x42 ds 2: WAIT for completion 9 of cq 5".into());
        assert!(verdict(&one, 1).2.contains("another queue's completion"));
        // Without the poster's indexes the record is what tells.
        let mut bare = qp([0; 4], [7, 7], (9, 7));
        bare.poster = None;
        let (_, stuck, text) = verdict(&bare, 1);
        assert!(stuck && text.contains("WQE 7 is in the record"), "{text}");
    }

    #[test]
    fn a_lacking_completion_and_a_script_are_told() {
        let mut one = qp([8, 8, 8, 0], [8, 8], (8, 8));
        one.faults = vec!["rule 1 fired".into(), "rule 2 fired".into()];
        let (_, stuck, text) = verdict(&one, 1);
        assert!(!stuck && text.ends_with("complete; rule 2 fired"), "{text}");
        one.lacks = Some("WQE 7 was executed, but no CQE".into());
        let (_, stuck, text) = verdict(&one, 1);
        assert!(stuck && text.starts_with("WQE 7 was executed"), "{text}");
        one.error = Some("WQE 3 failed".into());
        assert_eq!(verdict(&one, 1).2, "WQE 3 failed; rule 1 fired");
        let quiet = CoreReport {
            seen_ns: 1,
            ..core(0)
        };
        one = qp([8, 8, 8, 0], [8, 7], (8, 8));
        let (_, _, text) = of(&one, Some(&one), Some(&quiet), false);
        assert!(
            text.contains("makes no rounds; the last that was seen was"),
            "{text}"
        );
    }

    #[test]
    fn motion_failure_and_death_come_first() {
        let now = qp([1024, 1024, 1023, 9], [1023, 1023], (1023, 1023));
        let before = qp([1020, 1020, 1020, 9], [1020, 1020], (1020, 1020));
        assert_eq!(of(&now, Some(&before), None, false).2, "moving");
        let mut failed = now.clone();
        failed.error = Some("WQE 3 failed".into());
        assert_eq!(
            of(&failed, Some(&before), None, false),
            (false, true, "WQE 3 failed".into())
        );
        let dead = CoreReport {
            dead: Some("it panicked".into()),
            ..core(5)
        };
        assert!(
            of(&now, Some(&before), Some(&dead), false)
                .2
                .contains("it panicked")
        );
    }
}
