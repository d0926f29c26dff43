//! A script while it is played: which rule fired how often, where, and when. Shared by the engine cores of one HCA and by who asks.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use doorbell_wire::Qpn;

use super::{Place, QpSelect, Rule, Script};

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
    fired: Box<[AtomicU64]>,
    log: Mutex<VecDeque<Firing>>,
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

/// A rule did what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Firing {
    /// Which rule, from 1.
    pub rule: usize,
    /// The rule's words.
    pub text: String,
    /// At which queue pair; `None`: at the engine.
    pub qpn: Option<Qpn>,
    /// At which work request (`receive`: receive) of it, counted from the connection.
    pub index: Option<u64>,
    /// It is a receive.
    pub receive: bool,
    /// How long after the HCA was made.
    pub after: Duration,
    /// What came of it, where the rule's words do not say.
    pub note: String,
}

impl fmt::Display for Firing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fault script rule {} ({}) fired", self.rule, self.text)?;
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
    /// How often it fired.
    pub fired: u64,
    /// Its first firing, if that is still remembered.
    pub first: Option<Firing>,
}

impl fmt::Display for RuleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.first, self.fired) {
            (_, 0) => write!(
                f,
                "fault script rule {} ({}) has not fired",
                self.rule, self.text
            ),
            (Some(first), 1) => write!(f, "{first}"),
            (Some(first), n) => write!(f, "{first}; {n} times in all"),
            (None, n) => write!(
                f,
                "fault script rule {} ({}) fired {n} times",
                self.rule, self.text
            ),
        }
    }
}

impl ScriptRun {
    pub(crate) fn new(script: Script, cores: usize) -> Self {
        let rules = script.rules.len();
        Self {
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
            .filter(|(_, r)| for_it(r) && place(r))
            .map(|(i, r)| Armed {
                rule: i,
                next: r.next(0).unwrap_or(NEVER),
            })
            .collect()
    }

    /// May the rule fire once more? Counts it if so.
    pub(crate) fn take(&self, rule: usize) -> bool {
        let most = self.script.rules[rule].times.unwrap_or(u64::MAX);
        self.fired[rule]
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                (n < most).then_some(n + 1)
            })
            .is_ok()
    }

    /// Remembers what a rule did that was taken.
    pub(crate) fn fired(
        &self,
        rule: usize,
        qpn: Option<Qpn>,
        at: Option<(u64, bool)>,
        note: String,
    ) {
        let firing = Firing {
            rule: rule + 1,
            text: self.script.rules[rule].text.clone(),
            qpn,
            index: at.map(|a| a.0),
            receive: at.is_some_and(|a| a.1),
            after: self.epoch.elapsed(),
            note,
        };
        match self.fired[rule].load(Ordering::Relaxed) {
            n if n <= LOGGED => tracing::warn!("{firing}"),
            _ => tracing::debug!("{firing}"),
        }
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
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
