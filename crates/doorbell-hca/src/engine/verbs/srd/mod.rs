//! Queue pairs over SRD, which is reliable and neither ordered nor able to do atomics: the engine restores the one and emulates the other.
//!
//! **Order.** Requests of the device finish in any order. CQEs come in the order of WQEs all the same, since a WQE is complete only when all before it
//! are (`done`). What must not overtake is *held* until what is before it has finished (`post`):
//!
//! | request | waits for |
//! |---|---|
//! | WRITE | READs before it |
//! | WRITE that is inline, or as short as an inline one | everything before it |
//! | READ | everything before it but READs |
//! | SEND, immediate, atomic | WRITEs and READs before it |
//! | anything fenced | everything before it |
//!
//! That a remote write has finished says that its bytes are in the peer's memory: it is what libfabric's EFA provider tells programs that ask for
//! "delivery complete" without an exchange of its own, and what its documents build on. Nobody has tried it here.
//!
//! **Messages.** SENDs, immediates and atomics are messages between the two engines (`wire`), numbered, of which [`WINDOW`] may be unanswered. The peer's
//! engine carries them out in the order of their numbers, each once, and answers several at a time (`serve`). The receives of the device are
//! the engine's, as many as there can be messages, so none finds no receive; those of the poster are taken as on the other links.
//!
//! **GPU memory.** The word of an atomic, and where its old value goes, may be where no CPU reaches: a copy engine is asked (`errand`), and what is behind
//! waits.
//!
//! **Failure.** A request that fails fails its WQE when all before it are complete, so the first error is the first in the queue. What was
//! posted behind it may have been carried out.

mod done;
mod errand;
mod post;
mod serve;
mod wire;

use std::sync::Arc;
use std::time::Instant;

use doorbell_verbs::abi::{self, Wc};
use doorbell_verbs::efa::SrdWork;
use doorbell_wire::{Local, Syndrome, Vendor, Width};

use errand::Errand;

use super::done::BATCH;
use super::keys::LocalKeys;
use crate::engine::qp::{EngineQp, Target};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::verbs::{CONTROLS, SrdNic, WINDOW};

/// The bit of a request's number that says that it is an answer or a greeting.
const CONTROL: u64 = 1 << 62;

/// What a request is, for the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Write,
    Read,
    /// To the peer's engine.
    Message,
}

/// A request that is under way.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// First slot of its WQE.
    at: u64,
    /// It is the WQE's last.
    last: bool,
    class: Class,
    /// The device has finished it.
    sent: bool,
    /// The peer has answered it; nothing else but messages is answered.
    answered: bool,
    failed: Option<(Syndrome, Vendor)>,
    /// Where the old value of an atomic goes.
    sink: Option<(Local, Width)>,
    old: u64,
}

impl Entry {
    const NONE: Self = Self {
        at: 0,
        last: false,
        class: Class::Write,
        sent: false,
        answered: false,
        failed: None,
        sink: None,
        old: 0,
    };

    fn is_over(&self) -> bool {
        self.sent && self.answered
    }
}

/// What this side has to say to begin with.
#[derive(Clone, Copy, Debug)]
enum Hello {
    /// Not under way; to be sent at this time.
    At(Instant),
    /// In this place.
    Sent(u16),
    Arrived,
}

/// The device's side of a queue pair.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) nic: Arc<SrdNic>,
    keys: LocalKeys,
    /// Requests given to the device, or to `works`, and how many from the first on are over.
    posted: u64,
    done: u64,
    /// What each is, by its number.
    entries: Box<[Entry]>,
    /// Requests that are not over, by class.
    writes: u32,
    reads: u32,
    messages: u32,
    /// One has failed: nothing more is posted.
    broken: bool,
    /// Requests that wait for the end of the turn.
    works: Vec<SrdWork>,
    /// The device did not take them although it should: since when.
    refused: Option<Instant>,
    /// A message that is only partly posted: its WQE, and how many bytes are.
    partly: Option<(u64, u64)>,
    /// Pieces of the message being posted; kept for its capacity.
    pieces: Vec<abi::Sge>,
    /// The number of the next message, and the requests that unanswered ones are, by their numbers.
    asked: u64,
    /// The oldest message that is not over, as far as looked at.
    oldest: u64,
    asks: [u64; WINDOW],
    hello: Hello,
    /// Since when the peer is expected to say hello; `None`: it has.
    greeted: Option<Instant>,
    /// Places for answers and greetings that are free.
    controls: Vec<u16>,
    serve: serve::Serve,
    /// What a copy engine is about, by its kind.
    errands: [Errand; 2],
    /// Completions that were taken.
    found: Box<[Wc; BATCH]>,
    /// When something was last over, as far as looked at.
    heard: (u64, Instant),
}

impl Link {
    pub(super) fn new(nic: Arc<SrdNic>, pd: u32) -> Self {
        let now = Instant::now();
        Self {
            entries: vec![Entry::NONE; nic.send as usize].into(),
            keys: LocalKeys::new(&nic.port, pd),
            nic,
            posted: 0,
            done: 0,
            writes: 0,
            reads: 0,
            messages: 0,
            broken: false,
            works: Vec::new(),
            refused: None,
            partly: None,
            pieces: Vec::new(),
            asked: 0,
            oldest: 0,
            asks: [0; WINDOW],
            hello: Hello::At(now),
            greeted: Some(now),
            controls: (0..CONTROLS as u16).collect(),
            serve: serve::Serve::default(),
            errands: Default::default(),
            found: Box::default(),
            heard: (0, now),
        }
    }

    /// Its peer is known: it is time to say hello.
    pub(in crate::engine) fn begin(&mut self) {
        let now = Instant::now();
        (self.hello, self.greeted) = (Hello::At(now), Some(now));
    }

    /// The number of the peer's queue pair.
    pub(in crate::engine) fn peer_qpn(&self) -> u32 {
        self.nic.peer_qpn()
    }

    /// Requests that may still be posted.
    fn room(&self) -> u64 {
        self.entries.len() as u64 - (self.posted - self.done)
    }

    fn index(&self, number: u64) -> usize {
        (number % self.entries.len() as u64) as usize
    }

    fn counted(&mut self, class: Class) -> &mut u32 {
        match class {
            Class::Write => &mut self.writes,
            Class::Read => &mut self.reads,
            Class::Message => &mut self.messages,
        }
    }
}

impl EngineQp {
    /// The link, of a queue pair that has one.
    fn srd(&mut self) -> Option<&mut Link> {
        match &mut self.cold.target {
            Target::Srd(link) => Some(link),
            _ => None,
        }
    }

    /// Looks at a queue pair whose device or peer has said nothing for long.
    pub(super) fn srd_silence(&mut self, inner: &Inner, ask: bool) -> u64 {
        let Some(link) = self.srd() else { return 0 };
        let limit = link.nic.port.config().silence;
        if ask && link.nic.qp.is_broken() {
            return self.told(inner, Fault::PortDown);
        }
        let waiting = self.exec != self.pi;
        let Some(link) = self.srd() else { return 0 };
        if let Some(since) = link.greeted {
            // Who has nothing to send may wait for its peer as long as it likes.
            if waiting && since.elapsed() >= limit {
                tracing::error!("{:?}: the peer has not answered for {limit:?}", link.nic);
                self.fail_flight(inner, Fault::RetryExceeded);
                return 1;
            }
            return 0;
        }
        if link.posted == link.done || link.heard.0 != link.done {
            link.heard = (link.done, Instant::now());
            return 0;
        }
        // An engine that is alive answers when it gives up waiting for a receive, at the latest.
        let limit = 2 * limit;
        if link.heard.1.elapsed() < limit {
            return 0;
        }
        tracing::error!(
            "{:?}: nothing has come back for {limit:?}, {} requests are under way",
            link.nic,
            link.posted - link.done
        );
        self.fail_flight(inner, Fault::RetryExceeded);
        1
    }
}
