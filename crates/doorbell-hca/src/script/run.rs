//! A script while it is played: which rule fired how often, where, and when. Shared by the engine cores of one HCA and by who asks.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use doorbell_wire::Qpn;

use super::{Place, QpSelect, Rule, Script};
use crate::record::{self, Store};

/// Firings kept; a rule that fires always would else fill the memory. Counts are exact.
const KEPT: usize = 256;
/// Firings of one rule that are logged as warnings.
const LOGGED: u64 = 3;
/// A time that never comes.
pub(crate) const NEVER: u64 = u64::MAX;

/// A script while it is played.
#[derive(Debug)]
pub struct ScriptRun {
    script: Script,
    epoch: Instant,
    /// The rank of this process: rules for another are not played.
    rank: u32,
    fired: Box<[AtomicU64]>,
    log: Mutex<VecDeque<Firing>>,
    /// The flight record, which is told of each firing: whoever asks may come when this process is gone.
    record: Option<Arc<Store>>,
    /// Queue pairs made so far.
    made: AtomicU64,
    pub(crate) cores: Box<[CoreRun]>,
}

/// What a script did to an engine core.
#[derive(Debug)]
pub(crate) struct CoreRun {
    /// The core does nothing until then (nanoseconds since the epoch).
    pub(crate) stalled_until: AtomicU64,
    /// Its port loses packets until then.
    pub(crate) link_down_until: AtomicU64,
    /// Rules whose time has come, as far as this core knows.
    pub(crate) awake: Box<[AtomicBool]>,
    /// Doorbells and completions that are kept back for a time.
    pub(crate) held: AtomicUsize,
}

/// A rule was played.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Firing {
    /// Which rule, from 1.
    pub rule: usize,
    /// The rule's words.
    pub text: String,
    /// The name of its action, as it is written.
    pub action: &'static str,
    /// The engine core that played it.
    pub core: usize,
    /// At which queue pair; `None`: at the engine.
    pub qpn: Option<Qpn>,
    /// At which work request (`receive`: receive) of it, counted from the connection.
    pub index: Option<u64>,
    /// It is a receive.
    pub receive: bool,
    /// When, nanoseconds of the monotonic clock.
    pub at_ns: u64,
    /// Until when what it did lasts, likewise; `None`: for good.
    pub until_ns: Option<u64>,
    /// It changed nothing; the note says why.
    pub idle: bool,
    /// What came of it, where the rule's words do not say.
    pub note: String,
}

/// Where a rule is played.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct At {
    pub(crate) core: usize,
    pub(crate) qpn: Option<Qpn>,
    pub(crate) index: Option<u64>,
    pub(crate) receive: bool,
}

impl At {
    /// At a work request.
    pub(crate) fn wqe(core: usize, qpn: Qpn, index: u64) -> Self {
        Self {
            core,
            qpn: Some(qpn),
            index: Some(index),
            receive: false,
        }
    }
}

/// How a rule is named wherever one is: `fault script rule 1 (wqe=7: drop-doorbell)`.
pub fn name_rule(rule: usize, text: &str) -> String {
    format!("fault script rule {rule} ({text})")
}

impl fmt::Display for Firing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name_rule(self.rule, &self.text))?;
        f.write_str(match self.idle {
            true => " did nothing",
            false => " fired",
        })?;
        if let Some(qpn) = self.qpn {
            write!(f, " at QP {:#08x}", qpn.get())?;
        }
        if let Some(index) = self.index {
            let what = if self.receive { "receive" } else { "WQE" };
            write!(f, " {what} {index}")?;
        }
        if !self.note.is_empty() {
            write!(f, ": {}", self.note)?;
        }
        Ok(())
    }
}

/// What became of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleState {
    /// Which, from 1.
    pub rule: usize,
    /// Its words.
    pub text: String,
    /// The rank that it is for, and that of this process, if they differ: it is not played here.
    pub elsewhere: Option<(u32, u32)>,
    /// How often it fired.
    pub fired: u64,
    /// Its first firing, if that is still remembered.
    pub first: Option<Firing>,
}

impl fmt::Display for RuleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = name_rule(self.rule, &self.text);
        match (&self.first, self.fired, self.elsewhere) {
            (_, _, Some((theirs, own))) => {
                write!(f, "{name} is for rank {theirs}, and this is rank {own}")
            }
            (_, 0, _) => write!(f, "{name} has not fired"),
            (Some(first), 1, _) => write!(f, "{first}"),
            (Some(first), n, _) => write!(f, "{first}; {n} times in all"),
            (None, n, _) => write!(f, "{name} fired {n} times"),
        }
    }
}

impl ScriptRun {
    pub(crate) fn new(script: Script, cores: usize, rank: u32, record: Option<Arc<Store>>) -> Self {
        let rules = script.rules.len();
        if let Some(record) = &record {
            for (i, rule) in script.rules.iter().enumerate() {
                record.rule(i, &rule.text, rule.elsewhere(rank));
            }
        }
        Self {
            rank,
            record,
            epoch: Instant::now(),
            fired: (0..rules).map(|_| AtomicU64::new(0)).collect(),
            log: Mutex::default(),
            made: AtomicU64::new(0),
            cores: (0..cores)
                .map(|_| CoreRun {
                    stalled_until: AtomicU64::new(0),
                    link_down_until: AtomicU64::new(0),
                    awake: script
                        .rules
                        .iter()
                        .map(|r| AtomicBool::new(r.at.is_none()))
                        .collect(),
                    held: AtomicUsize::new(0),
                })
                .collect(),
            script,
        }
    }

    /// The script.
    pub fn script(&self) -> &Script {
        &self.script
    }

    /// What became of every rule so far.
    pub fn rules(&self) -> Vec<RuleState> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        self.script
            .rules
            .iter()
            .enumerate()
            .map(|(i, rule)| RuleState {
                rule: i + 1,
                text: rule.text.clone(),
                elsewhere: rule.elsewhere(self.rank).map(|theirs| (theirs, self.rank)),
                fired: self.fired[i].load(Ordering::Relaxed),
                first: log.iter().find(|f| f.rule == i + 1).cloned(),
            })
            .collect()
    }

    /// The firings that are still remembered, oldest first.
    pub fn firings(&self) -> Vec<Firing> {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().cloned().collect()
    }

    pub(crate) fn rule(&self, i: usize) -> &Rule {
        &self.script.rules[i]
    }

    /// Which queue pair this is, in the order in which they are made.
    pub(crate) fn next_nth(&self) -> u64 {
        self.made.fetch_add(1, Ordering::Relaxed)
    }

    /// Nanoseconds since the HCA was made.
    pub(crate) fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    pub(crate) fn later(&self, by: Option<Duration>) -> u64 {
        by.map_or(NEVER, |by| self.now().saturating_add(by.as_nanos() as u64))
    }

    /// Is the port of a core losing every packet?
    pub(crate) fn link_is_down(&self, core: usize) -> bool {
        let until = self.cores[core].link_down_until.load(Ordering::Relaxed);
        until != 0 && self.now() < until
    }

    pub(crate) fn is_awake(&self, core: usize, rule: usize) -> bool {
        self.cores[core].awake[rule].load(Ordering::Relaxed)
    }

    /// Rules for the send queue (`receive`: for the receives) of a queue pair, with the first place of each.
    pub(crate) fn rules_of(&self, qpn: Qpn, nth: u64, receive: bool) -> Vec<Armed> {
        let for_it = |rule: &Rule| match rule.qp {
            QpSelect::All => true,
            QpSelect::Number(n) => n == qpn.get(),
            QpSelect::Nth(n) => n == nth,
        };
        let place = |rule: &Rule| match rule.place {
            Place::Send(_) => !receive,
            Place::Receive(_) => receive,
            Place::Engine => false,
        };
        self.script
            .rules
            .iter()
            .enumerate()
            .filter(|(_, r)| r.is_for(self.rank) && for_it(r) && place(r))
            .map(|(i, r)| Armed {
                rule: i,
                next: r.next(0).unwrap_or(NEVER),
            })
            .collect()
    }

    /// May the rule fire once more? Counts it if so.
    pub(crate) fn take(&self, rule: usize) -> bool {
        if !self.script.rules[rule].is_for(self.rank) {
            return false;
        }
        let most = self.script.rules[rule].times.unwrap_or(u64::MAX);
        self.fired[rule]
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                (n < most).then_some(n + 1)
            })
            .is_ok()
    }

    /// Remembers what a rule did that was taken.
    pub(crate) fn fired(&self, rule: usize, at: At, note: String) {
        self.played(rule, at, Ok(note));
    }

    /// The same, or (`Err`) that it could do nothing, and why.
    pub(crate) fn played(&self, rule: usize, at: At, outcome: Result<String, String>) {
        let (idle, note) = match outcome {
            Ok(note) => (false, note),
            Err(why) => (true, why),
        };
        let at_ns = record::now_ns();
        let action = self.script.rules[rule].action;
        let firing = Firing {
            rule: rule + 1,
            text: self.script.rules[rule].text.clone(),
            action: action.name(),
            core: at.core,
            qpn: at.qpn,
            index: at.index,
            receive: at.receive,
            at_ns,
            until_ns: action
                .lasts()
                .map(|by| at_ns.saturating_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX))),
            idle,
            note,
        };
        match self.fired[rule].load(Ordering::Relaxed) {
            n if n <= LOGGED => tracing::warn!("{firing}"),
            _ => tracing::debug!("{firing}"),
        }
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = &self.record {
            // Under the lock: one at a time.
            record.fired(&firing, self.fired[rule].load(Ordering::Relaxed));
        }
        if log.len() == KEPT {
            // The first firing of each rule stays: it is what began the trouble.
            let old = (1..log.len())
                .find(|&i| (0..i).any(|j| log[j].rule == log[i].rule))
                .unwrap_or(0);
            log.remove(old);
        }
        log.push_back(firing);
    }

    /// Bits that a rule turns over in the last eight bytes of a CQE, byte 56 first: its own, or one drawn by seed, rule and index.
    pub(crate) fn mask(&self, rule: usize, own: Option<u64>, at: u64) -> u64 {
        own.unwrap_or_else(|| {
            let mut x = self.script.seed ^ (rule as u64) << 48 ^ at;
            // One round of a finaliser with good avalanche (the constants are SplitMix64's).
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            1 << ((x ^ x >> 31) % 64)
        })
    }
}

/// A rule that waits for its place in a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Armed {
    pub(crate) rule: usize,
    /// The first place at which it may fire; [`NEVER`].
    pub(crate) next: u64,
}

/// A CQE as words, with what is to be turned over in it.
pub(crate) fn corrupt(words: &mut [u64; 8], mask: u64) {
    words[7] ^= mask.swap_bytes();
}

/// What a corruption did, in words.
pub(crate) fn corruption(before: u64, after: u64) -> String {
    let bytes = |word: u64| word.to_le_bytes().map(|b| format!("{b:02x}")).join(" ");
    format!(
        "bytes 56 to 63 of the CQE are {} instead of {}",
        bytes(after),
        bytes(before)
    )
}
