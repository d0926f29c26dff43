//! What a fault script has to do with what is missing: of all that it did, the one firing that explains a stage.

use std::ops::Range;

use doorbell_hca::QpState;
use doorbell_hca::record::Kind;
use doorbell_wire::{Syndrome, Vendor};
use serde::{Deserialize, Serialize};

use super::moment::span;
use super::{Condition, EventReport, QpReport};
use crate::faults::{Firing, name_rule};

/// Events have the time at which their engine last read the clock, firings that of their own reading.
const CLOCKS_NS: u64 = 100_000_000;
/// A request that a rule fails has failed in the same turn of its engine, however little that is let run.
const AT_ONCE_NS: u64 = 1_000_000_000;

/// A rule of a fault script was played.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FiringReport {
    /// Which rule, from 1.
    pub rule: usize,
    /// Its words.
    pub text: String,
    /// The name of its action.
    pub action: String,
    /// The engine core that played it.
    pub core: u64,
    /// At which queue pair; nothing: at the engine.
    pub qpn: Option<u32>,
    /// At which work request of it, or receive.
    pub index: Option<u64>,
    /// It is a receive.
    pub receive: bool,
    /// When, nanoseconds of the monotonic clock.
    pub at_ns: u64,
    /// Until when it lasts; nothing: for good.
    pub until_ns: Option<u64>,
    /// It changed nothing.
    pub idle: bool,
    /// What came of it.
    pub note: String,
}

impl FiringReport {
    pub(super) fn of(firing: &Firing) -> Self {
        Self {
            rule: firing.rule,
            text: firing.text.clone(),
            action: firing.action.to_owned(),
            core: firing.core as u64,
            qpn: firing.qpn.map(|q| q.get()),
            index: firing.index,
            receive: firing.receive,
            at_ns: firing.at_ns,
            until_ns: firing.until_ns,
            idle: firing.idle,
            note: firing.note.clone(),
        }
    }

    fn name(&self) -> String {
        name_rule(self.rule, &self.text)
    }
}

/// All that was played in a process, at the moment of which a report is.
#[derive(Clone, Copy)]
pub(super) struct Played<'a> {
    pub(super) all: &'a [FiringReport],
    /// Nanoseconds of the monotonic clock: now, or when the process was last seen alive.
    pub(super) now: u64,
    /// The process has ended: nothing lasts any longer.
    pub(super) over: bool,
}

impl<'a> Played<'a> {
    pub(super) fn of(all: &'a [FiringReport], now: u64, condition: Condition) -> Self {
        let over = condition == Condition::Ended;
        Self { all, now, over }
    }

    /// Those with an effect, one of these actions, and a place that fits; the latest first.
    fn find(
        self,
        actions: &'static [&'static str],
        fits: impl Fn(&FiringReport) -> bool,
    ) -> Option<&'a FiringReport> {
        self.all.iter().rev().find(|f| {
            !f.idle
                && actions.contains(&f.action.as_str())
                && f.until_ns.is_none_or(|until| self.now < until)
                && fits(f)
        })
    }

    /// How much longer.
    fn more(self, f: &FiringReport) -> String {
        match f.until_ns {
            Some(until) if !self.over => format!(", for {} more", span(until - self.now)),
            _ => String::new(),
        }
    }

    /// Of what is over nothing is said as if it went on.
    pub(super) fn tense(self, now: &'static str, then: &'static str) -> &'static str {
        if self.over { then } else { now }
    }

    fn keeps(self, f: &FiringReport) -> String {
        let did = self.tense("keeps", "kept");
        format!("{} {did} it back{}", f.name(), self.more(f))
    }

    /// An engine core does nothing.
    pub(super) fn stall(self, core: Option<u64>) -> Option<String> {
        let f = self.find(&["stall-engine"], |f| Some(f.core) == core)?;
        let did = self.tense("stalls", "stalled");
        Some(format!("{} {did} it{}", f.name(), self.more(f)))
    }

    /// The doorbell of one of these slots does not reach the engine.
    pub(super) fn bell(self, qpn: u32, slots: Range<u64>) -> Option<String> {
        let f = self.find(&["drop-doorbell", "delay-doorbell"], |f| {
            f.qpn == Some(qpn) && f.index.is_some_and(|i| slots.contains(&i))
        })?;
        Some(match f.action.as_str() {
            "drop-doorbell" => format!("{} dropped it", f.name()),
            _ => self.keeps(f),
        })
    }

    /// The CQE of a work request, or receive, is not as the engine wrote it; and whether it was damaged. A `collapsed` one stands for what is
    /// before it as well.
    pub(super) fn cqe(
        self,
        qpn: u32,
        receive: bool,
        at: u64,
        collapsed: bool,
    ) -> Option<(String, bool)> {
        let f = self.find(&["withhold-cqe", "corrupt-cqe"], |f| {
            f.qpn == Some(qpn)
                && f.receive == receive
                && f.index.is_some_and(|i| i == at || (collapsed && i < at))
        })?;
        Some(match f.action.as_str() {
            "corrupt-cqe" => (format!("{} damaged it", f.name()), true),
            _ => (self.keeps(f), false),
        })
    }

    /// Why a queue pair has failed: only what fits the kind, the place and the time of the failure.
    pub(super) fn failure(self, qp: &QpReport) -> Option<String> {
        let error = qp.error.as_deref()?;
        let latest = |kind: Kind, value: Option<u32>| {
            let is = |e: &&EventReport| {
                Kind::named(&e.kind) == Some(kind) && value.is_none_or(|v| e.value == v)
            };
            qp.events.iter().rev().find(is).map(|e| e.at_ns)
        };
        let failed = latest(Kind::Error, None);
        // What was before a reset is over.
        let reset = latest(Kind::State, Some(QpState::Reset as u32));
        let before_it = |f: &FiringReport| {
            failed.is_none_or(|ns| f.at_ns <= ns.saturating_add(CLOCKS_NS))
                && reset.is_none_or(|ns| ns <= f.at_ns.saturating_add(CLOCKS_NS))
        };
        let own = |f: &&FiringReport| {
            let here = !f.idle && f.qpn == Some(qp.qpn) && before_it(f);
            match f.action.as_str() {
                "fail" => {
                    let at_once = failed.is_none_or(|ns| ns <= f.at_ns.saturating_add(AT_ONCE_NS));
                    let wqe = f.index.map(|i| format!("WQE {} ", i as u16));
                    here && at_once && wqe.is_some_and(|w| error.starts_with(&w))
                }
                "kill-peer" => here && error.contains(&Vendor::PEER_DEAD.to_string()),
                _ => false,
            }
        };
        if let Some(f) = self.all.iter().rev().find(own) {
            return Some(match f.action.as_str() {
                "fail" => format!("{} made it fail", f.name()),
                _ => format!("{}: {}", f.name(), f.note),
            });
        }
        let retries = Syndrome::TRANSPORT_RETRY.to_string();
        if qp.link != "roce" || !error.contains(&retries) {
            return None;
        }
        // A loss that was over is only to blame if most of the time until the failure was in it: the last repeats were.
        let cut = |f: &&FiringReport| {
            let in_it = match (failed, f.until_ns) {
                (_, None) => true,
                (Some(ns), Some(until)) => {
                    ns <= until.saturating_add(until.saturating_sub(f.at_ns))
                }
                (None, Some(until)) => self.now < until,
            };
            let here = f.action == "drop-link" && !f.idle && Some(f.core) == qp.core;
            here && in_it && failed.is_none_or(|ns| f.at_ns <= ns.saturating_add(CLOCKS_NS))
        };
        let f = self.all.iter().rev().find(cut)?;
        let lasts = !self.over && f.until_ns.is_none_or(|until| self.now < until);
        let span = match f.until_ns {
            Some(until) if !lasts => format!(" for {}", span(until.saturating_sub(f.at_ns))),
            _ => String::new(),
        };
        let did = if lasts { "loses" } else { "lost" };
        Some(format!("{} {did} every packet of its port{span}", f.name()))
    }

    /// The packet port of an engine core loses everything.
    pub(super) fn link(self, core: Option<u64>) -> Option<String> {
        let f = self.find(&["drop-link"], |f| Some(f.core) == core)?;
        let (did, more) = (self.tense("loses", "lost"), self.more(f));
        Some(format!("{} {did} every packet of its port{more}", f.name()))
    }

    /// The process was killed by itself.
    pub(super) fn death(self) -> Option<String> {
        let f = self.find(&["kill-process"], |_| true)?;
        Some(format!("{} killed it", f.name()))
    }

    /// Somebody else's process was killed.
    pub(super) fn killed(self, pid: u32) -> Option<String> {
        let said = format!("process {pid} was killed");
        let f = self.find(&["kill-peer"], |f| f.note == said)?;
        Some(f.name())
    }
}
