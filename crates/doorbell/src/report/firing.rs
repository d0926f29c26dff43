//! What a fault script has to do with what is missing: of all that it did, the one firing that explains a stage.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::QpReport;
use super::moment::span;
use crate::faults::{Firing, name_rule};

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

    /// An engine core does nothing.
    pub(super) fn stall(self, core: Option<u64>) -> Option<String> {
        let f = self.find(&["stall-engine"], |f| Some(f.core) == core)?;
        Some(format!("{} stalls it{}", f.name(), self.more(f)))
    }

    /// The doorbell of one of these slots does not reach the engine.
    pub(super) fn bell(self, qpn: u32, slots: Range<u64>) -> Option<String> {
        let f = self.find(&["drop-doorbell", "delay-doorbell"], |f| {
            f.qpn == Some(qpn) && f.index.is_some_and(|i| slots.contains(&i))
        })?;
        Some(match f.action.as_str() {
            "drop-doorbell" => format!("{} dropped it", f.name()),
            _ => format!("{} keeps it back{}", f.name(), self.more(f)),
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
            _ => (format!("{} keeps it back{}", f.name(), self.more(f)), false),
        })
    }

    /// Why a queue pair has failed.
    pub(super) fn failure(self, qp: &QpReport) -> Option<String> {
        let own = self.find(&["fail", "kill-peer"], |f| f.qpn == Some(qp.qpn));
        if let Some(f) = own {
            return Some(match f.action.as_str() {
                "fail" => format!("{} made it fail", f.name()),
                _ => format!("{}: {}", f.name(), f.note),
            });
        }
        // Whether packets are still lost does not matter any more.
        let cut = |f: &&FiringReport| {
            f.action == "drop-link" && !f.idle && Some(f.core) == qp.core && qp.link == "roce"
        };
        let f = self.all.iter().rev().find(cut)?;
        Some(format!("{} loses every packet of its port", f.name()))
    }

    /// The packet port of an engine core loses everything.
    pub(super) fn link(self, core: Option<u64>) -> Option<String> {
        let f = self.find(&["drop-link"], |f| Some(f.core) == core)?;
        let more = self.more(f);
        Some(format!("{} loses every packet of its port{more}", f.name()))
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
