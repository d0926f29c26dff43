//! What a queue pair that stands still is waiting for, told from its indexes alone.
//!
//! Work goes through stages, each with an index: reserved, written and published, rung, seen by the engine, complete. The
//! earliest stage that has fallen behind the one before it names what is missing; why it has, the state of the engine core, of the process,
//! and the firings of a fault script tell. Nothing is said that those do not show: of a process that was stopped or killed a stage is only
//! called stuck if its engine had seen it stand for a while.

use super::firing::Played;
use super::moment::{moment, span};
use super::{Condition, CoreReport, QpReport, parts};

/// What stood for so long, while its engine looked, does not move by itself.
const STANDS_NS: u64 = 50_000_000;

/// What is known beside the queue pair itself.
#[derive(Clone, Copy)]
pub(super) struct Ground<'a> {
    /// It was different at an earlier look.
    pub(super) moving: bool,
    /// Its engine core.
    pub(super) core: Option<&'a CoreReport>,
    /// Whoever waits runs the engine.
    pub(super) caller_driven: bool,
    /// A flight recorder is on.
    pub(super) recorded: bool,
    /// What the process does.
    pub(super) condition: Condition,
    /// How long it had stood as it is when its engine last looked, if that is known; only of a process that was not asked.
    pub(super) stood_ns: Option<u64>,
    /// What a fault script did.
    pub(super) played: Played<'a>,
}

/// What is said of a queue pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) moving: bool,
    pub(super) stuck: bool,
    pub(super) text: String,
    /// It is the other end's turn.
    pub(super) for_peer: bool,
    /// The CQE, and the receive's, that is not as it was written, with who did that: true whatever else is said.
    lacks: [Option<String>; 2],
    /// What is behind after that.
    later: Option<String>,
}

impl Verdict {
    fn stuck(text: String) -> Self {
        Self {
            stuck: true,
            text,
            ..Self::default()
        }
    }

    /// Into the report.
    pub(super) fn onto(self, qp: &mut QpReport) {
        (qp.moving, qp.stuck) = (self.moving, self.stuck);
        (qp.verdict, qp.waits_for_peer) = (self.text, self.for_peer);
        let [lacks, recv_lacks] = self.lacks;
        (qp.lacks, qp.recv_lacks, qp.later) = (lacks, recv_lacks, self.later);
    }

    fn fine(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            ..Self::default()
        }
    }
}

/// The verdict.
pub(super) fn of(qp: &QpReport, ground: &Ground<'_>) -> Verdict {
    let played = &ground.played;
    let send = qp.lacks.as_ref().zip(qp.lacks_at).map(|(lacks, at)| {
        let collapsed = qp.cq == "collapsed";
        let why = played.cqe(qp.qpn, false, at, collapsed);
        lacking(&format!("WQE {at}"), lacks, why)
    });
    let receive = qp.recv_lacks.as_ref().zip(qp.recv_lacks_at);
    let receive = receive.map(|(lacks, at)| {
        let why = played.cqe(qp.qpn, true, at, false);
        lacking(&format!("receive {at}"), lacks, why)
    });
    let lacks = [send, receive];
    Verdict {
        lacks: lacks.clone(),
        ..first(qp, ground, lacks)
    }
}

/// What is said of it, of all that might be.
fn first(qp: &QpReport, ground: &Ground<'_>, lacks: [Option<String>; 2]) -> Verdict {
    if let Some(dead) = ground.core.and_then(|c| c.dead.as_ref()) {
        return Verdict::stuck(format!("its engine core died: {dead}"));
    }
    if let Some(error) = &qp.error {
        let why = ground.played.failure(qp);
        return Verdict {
            for_peer: why.is_none(),
            ..Verdict::stuck(with(error.clone(), why))
        };
    }
    if qp.state == "destroyed" {
        return Verdict::fine("destroyed; an export still holds it");
    }
    if ground.moving {
        return Verdict {
            moving: true,
            ..Verdict::fine("moving")
        };
    }
    still(qp, ground, lacks)
}

/// A sentence, and what a script has to do with it.
fn with(text: String, why: Option<String>) -> String {
    match why {
        Some(why) => format!("{text}; {why}"),
        None => text,
    }
}

/// A reason that does not lie in the queue pair itself, and whether anything is stuck for it.
type Excuse = Option<(String, bool)>;

impl Ground<'_> {
    /// Why nobody can expect anything of the process.
    fn process(&self) -> Excuse {
        let stood = self.stood_ns.is_some_and(|ns| ns >= STANDS_NS);
        match self.condition {
            Condition::Runs | Condition::Silent => None,
            Condition::Stopped if stood => None,
            Condition::Stopped => Some(("its process is stopped (state T)".into(), false)),
            Condition::Ended => match self.played.death() {
                Some(why) => Some((format!("its process ended, {why}"), false)),
                None if stood => None,
                None => Some(("its process ended before it went on".into(), false)),
            },
            Condition::Elsewhere if stood => None,
            Condition::Elsewhere => Some((
                "its process is in another PID namespace, and may be alive or dead".into(),
                false,
            )),
        }
    }

    /// Why nobody can expect anything of the engine core.
    fn engine(&self) -> Excuse {
        let number = self.core.map(|c| c.number);
        if let Some(why) = self.played.stall(number) {
            let is = self.played.tense("is", "was");
            return Some((format!("its engine core {is} stalled: {why}"), true));
        }
        let process = self.process();
        let looked_at = matches!(self.condition, Condition::Runs | Condition::Silent);
        if process.is_some() || !looked_at || self.core.is_none_or(|c| c.rounds_since != 0) {
            return process;
        }
        let text = match self.caller_driven {
            true => {
                "nobody runs its engine: it is caller-driven, and no thread waits or polls".into()
            }
            false => format!("its engine core makes no rounds{}", self.heartbeat()),
        };
        Some((text, true))
    }

    /// How long ago the engine core was last seen to be alive, if it is recorded.
    fn heartbeat(&self) -> String {
        match self.core.map_or(0, |c| c.seen_ns) {
            0 => String::new(),
            seen => {
                let ago = doorbell_hca::record::now_ns().saturating_sub(seen);
                format!("; the last that was seen was {} ago", span(ago))
            }
        }
    }
}

/// A stage that is behind, with its own reason or with the one that excuses it.
fn behind(stage: &str, excuse: Excuse, own: impl FnOnce() -> String) -> Verdict {
    match excuse {
        Some((why, true)) => Verdict::stuck(format!("{stage}: {why}")),
        Some((why, false)) => Verdict::fine(format!("{stage}: {why}")),
        None => {
            let own = own();
            Verdict::stuck(format!("{stage}{own}"))
        }
    }
}

/// On what a queue pair without motion waits.
fn still(qp: &QpReport, ground: &Ground<'_>, lacks: [Option<String>; 2]) -> Verdict {
    let Some(engine) = qp.engine else {
        return Verdict::fine("its engine does not tell how far it is");
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
        let stage = format!(
            "WQE {at} was rung and is not complete ({at} of {} slots are)",
            engine.rung
        );
        let excuse = match qp.state.as_str() {
            "reset" => Some(("the queue pair is not connected".to_owned(), true)),
            _ => ground.engine(),
        };
        let mut for_peer = false;
        let verdict = behind(&stage, excuse, || {
            let why;
            (why, for_peer) = reason(qp, ground, at);
            format!(": {why}")
        });
        return Verdict {
            for_peer,
            ..verdict
        };
    }
    let rung = rung(qp, engine.rung);
    if engine.rung < rung {
        let (first, last) = (engine.rung, rung - 1);
        let slots = match first == last {
            true => format!("WQE {first} was rung and the engine saw no doorbell for it"),
            false => {
                format!("slots {first} to {last} were rung and the engine saw no doorbell for them")
            }
        };
        return behind(&format!("{slots} ({words})"), ground.engine(), || {
            let played = ground.played.bell(qp.qpn, first..rung);
            format!(
                ": {}",
                played.unwrap_or_else(|| "its doorbell was lost on the way".to_owned())
            )
        });
    }
    let later = unrung(qp, ground, engine.rung, &words);
    // A CQE is of a slot that is complete, which is before all that is not rung.
    if let Some(lacks) = lacks.into_iter().flatten().next() {
        return Verdict {
            later: later.map(|l| l.text),
            ..Verdict::stuck(lacks)
        };
    }
    if let Some(later) = later {
        return later;
    }
    let done = engine.completed;
    let receives = match qp.recv {
        Some(recv) if recv.posted > recv.done => {
            format!(
                "; receives {} to {} wait for messages",
                recv.done,
                recv.posted - 1
            )
        }
        _ => String::new(),
    };
    Verdict::fine(format!("idle: all of {done} slots are complete{receives}"))
}

/// Of a queue pair whose engine has done all that it was told: what is reserved, written or in the record, and not rung.
fn unrung(qp: &QpReport, ground: &Ground<'_>, rung: u64, words: &str) -> Option<Verdict> {
    if let Some(poster) = qp.poster {
        if poster.rung < poster.ready {
            let stage = format!(
                "WQE {} is written and published, and not covered by any doorbell ({words}); {} for one",
                poster.rung,
                wait(poster.ready - poster.rung),
            );
            return Some(behind(&stage, ground.process(), || posted(qp, poster.rung)));
        }
        if poster.ready < poster.reserved {
            let stage = format!("slot {} was reserved and not published", poster.ready);
            return Some(behind(&stage, ground.process(), || {
                format!(
                    ": the thread that has it did not come back; {} for it",
                    wait(poster.reserved - poster.ready)
                )
            }));
        }
    } else if qp.handler == "record" && qp.record.is_some_and(|r| r != rung as u16) {
        let stage = format!(
            "WQE {} is in the record and no doorbell told the engine ({words})",
            rung
        );
        return Some(behind(&stage, ground.engine(), || posted(qp, rung)));
    } else if let Some(written) = qp.posted.filter(|w| *w > rung) {
        let stage = format!(
            "WQE {} is written, and not covered by any doorbell ({words}); {} for one",
            rung,
            wait(written - rung)
        );
        return Some(behind(&stage, ground.process(), || posted(qp, rung)));
    }
    None
}

/// What is said of a CQE that is missing or damaged, and what did that. One that was damaged until it looks as if it had never been written
/// is told by whoever damaged it.
fn lacking(what: &str, lacks: &str, played: Option<(String, bool)>) -> String {
    match played {
        Some((why, true)) if lacks.contains("no CQE was written") => format!(
            "the CQE of {what} is damaged: it looks as if it had never been written; the engine has done its part; {why}"
        ),
        Some((why, _)) => format!("{lacks}; {why}"),
        None => lacks.to_owned(),
    }
}

/// Slots rung, as the posting side knows it: its own index, or what it wrote into the doorbell.
fn rung(qp: &QpReport, seen: u64) -> u64 {
    if let Some(poster) = qp.poster {
        return poster.rung;
    }
    let ahead = match (qp.handler.as_str(), qp.doorbell) {
        ("producer", Some(word)) => word.wrapping_sub(seen),
        // What is in the record alone is another matter.
        ("record", Some(word)) if qp.record != Some(word as u16) => 0,
        (_, Some(word)) => u64::from((word as u16).wrapping_sub(seen as u16)),
        (_, None) => 0,
    };
    match ahead <= qp.depth.into() {
        true => seen.saturating_add(ahead),
        false => seen,
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

/// Why the engine does not go on with a WQE that it knows of, and whether the other end is to do something.
fn reason(qp: &QpReport, ground: &Ground<'_>, at: u64) -> (String, bool) {
    let far = qp.is_far();
    if qp.link == "roce"
        && let Some(why) = ground.played.link(qp.core)
    {
        return (why, false);
    }
    let index = format!("#{} ", at as u16);
    match &qp.next {
        None => return ("the slot could not be read".to_owned(), false),
        Some(next) if !next.starts_with(&index) => {
            return (
                "its slot does not hold it: it was rung before it was written".to_owned(),
                false,
            );
        }
        Some(next) if next.contains(": WAIT ") => {
            return ("it waits for another queue's completion".to_owned(), false);
        }
        Some(_) => {}
    }
    match &qp.parked {
        Some(parked) => (
            format!("the engine has set it aside, it waits for {parked}"),
            far,
        ),
        None if far => (
            "it is under way, and the peer does not answer".to_owned(),
            true,
        ),
        None if !ground.recorded => (
            "what it waits for is not recorded, since the flight recorder is off".to_owned(),
            false,
        ),
        None => (
            "the engine has begun it, and did not say what it waits for".to_owned(),
            false,
        ),
    }
}

#[cfg(test)]
mod tests;
