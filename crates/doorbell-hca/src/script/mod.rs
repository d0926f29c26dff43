//! Scripted faults: a few lines of text that make the engine do, at a given work request, what hardware does once a month.
//!
//! `wqe=1023: drop-doorbell` loses the doorbell of WQE 1023; `qp=#0, recv=7: withhold-cqe=50ms` keeps a completion back. A [`Script`] is
//! parsed from text ([`FromStr`](core::str::FromStr), with errors that name line, column and word) and given to
//! [`HcaConfig::script`](crate::HcaConfig). It is the same for whoever posts: the engine plays it, so programs need not know.
//!
//! Rules count work requests, not time, so a run can be repeated; only `at=` and durations look at the clock. An engine without a script
//! pays for it with one comparison a doorbell and a few a turn, none a work request: see `engine::script`.

mod parse;
pub(crate) mod run;
#[cfg(test)]
mod tests;

use core::fmt;
use core::ops::Range;
use std::time::Duration;

use doorbell_wire::{Syndrome, Vendor};

pub use parse::ScriptError;
pub(crate) use parse::{action_named, action_number};
pub use run::{Firing, RuleState, ScriptRun, name_rule};

/// A fault script: rules, and a seed for what a rule leaves open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// In the order in which they were written.
    pub rules: Vec<Rule>,
    /// Which bits `corrupt-cqe` turns over, if the rule does not say.
    pub seed: u64,
}

/// One rule: where it applies, and what happens there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// As it was written, without superfluous space.
    pub text: String,
    /// Which queue pairs.
    pub qp: QpSelect,
    /// Which of their send queues' work requests, or receives.
    pub place: Place,
    /// Every so many of them; 1: all.
    pub every: u64,
    /// Not before this time since the HCA was made.
    pub at: Option<Duration>,
    /// So many times in all.
    pub times: Option<u64>,
    /// Only in the process of this rank.
    pub rank: Option<u32>,
    /// What happens.
    pub action: Action,
}

/// Which queue pairs a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpSelect {
    /// All of the process.
    All,
    /// The one of this number.
    Number(u32),
    /// The one that was made after so many others of its HCA. Numbers are drawn at random; this is the same in each run.
    Nth(u64),
}

/// Where in a queue pair a rule applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Work requests of the send queue that begin in these slots, counted from the connection.
    Send(Range<u64>),
    /// Receives, counted likewise.
    Receive(Range<u64>),
    /// The engine itself, once, when the time has come.
    Engine,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The engine does not see the doorbell that announces the work request; a later one that covers it heals that.
    DropDoorbell,
    /// It sees it so much later.
    DelayDoorbell(Duration),
    /// The completion arrives with bits turned over in its last eight bytes: these (byte 56 first), or one chosen by the seed.
    CorruptCqe(Option<u64>),
    /// The work is done and its completion is not written, ever or for a time.
    WithholdCqe(Option<Duration>),
    /// The work request is refused, and its queue pair goes to error.
    Fail(Syndrome, Vendor),
    /// The engine core does nothing for a time.
    StallEngine(Duration),
    /// The engine core dies as if it had panicked.
    KillEngine,
    /// This process is killed (`SIGKILL`).
    KillProcess,
    /// The process at the other end of a shared memory link is killed.
    KillPeer,
    /// The RoCE port loses every packet, both ways, for ever or for a time.
    DropLink(Option<Duration>),
}

impl Action {
    /// Its name, as it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::DropDoorbell => "drop-doorbell",
            Self::DelayDoorbell(_) => "delay-doorbell",
            Self::CorruptCqe(_) => "corrupt-cqe",
            Self::WithholdCqe(_) => "withhold-cqe",
            Self::Fail(..) => "fail",
            Self::StallEngine(_) => "stall-engine",
            Self::KillEngine => "kill-engine",
            Self::KillProcess => "kill-process",
            Self::KillPeer => "kill-peer",
            Self::DropLink(_) => "drop-link",
        }
    }

    /// How long what it does lasts; `None`: for good, or until something else undoes it.
    pub(crate) fn lasts(self) -> Option<Duration> {
        match self {
            Self::DelayDoorbell(by) | Self::StallEngine(by) => Some(by),
            Self::WithholdCqe(by) | Self::DropLink(by) => by,
            _ => None,
        }
    }

    /// It is about how work is announced.
    pub(crate) fn is_of_doorbells(self) -> bool {
        matches!(self, Self::DropDoorbell | Self::DelayDoorbell(_))
    }

    /// It is about how work is reported.
    pub(crate) fn is_of_cqes(self) -> bool {
        matches!(self, Self::CorruptCqe(_) | Self::WithholdCqe(_))
    }

    /// It needs no work request.
    pub(crate) fn is_of_engines(self) -> bool {
        matches!(
            self,
            Self::StallEngine(_) | Self::KillEngine | Self::KillProcess | Self::DropLink(_)
        )
    }
}

impl Script {
    /// No rule?
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}

impl Rule {
    /// The rank that it is for, if that is another than this.
    pub(crate) fn elsewhere(&self, rank: u32) -> Option<u32> {
        self.rank.filter(|theirs| *theirs != rank)
    }

    /// Is it played in the process of this rank?
    pub(crate) fn is_for(&self, rank: u32) -> bool {
        self.elsewhere(rank).is_none()
    }

    /// The first of its places from `from` on.
    pub(crate) fn next(&self, from: u64) -> Option<u64> {
        let (Place::Send(range) | Place::Receive(range)) = &self.place else {
            return None;
        };
        let from = from.max(range.start);
        let skip = (from - range.start) % self.every;
        // The last of each `every`: the first of `wqe=.., every=10` is number 9.
        let at = from.checked_add(self.every - 1 - skip)?;
        (at < range.end).then_some(at)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// As text that parses to the same.
impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.seed != 0 {
            write!(f, "seed={}", self.seed)?;
        }
        for (i, rule) in self.rules.iter().enumerate() {
            if i != 0 || self.seed != 0 {
                f.write_str("; ")?;
            }
            write!(f, "{rule}")?;
        }
        Ok(())
    }
}
