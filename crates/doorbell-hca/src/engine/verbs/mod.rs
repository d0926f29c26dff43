//! Verbs in an engine core: queue pairs whose requests an RDMA device carries out.
//!
//! The engine reads and checks WQEs as for every link (`post`), gives them to the device in batches, one a turn, and writes CQEs when the
//! device's completions say so (`done`). Receives are handed on as they are posted (`recv`). Towards the poster everything is as on the other
//! links: completions in order, the first error recorded, what follows flushed. The device's queue never runs over, since the engine counts what it
//! holds; most requests are not signalled there, and a completion stands for all before it.

mod done;
mod keys;
mod plain;
mod post;
mod recv;
pub(in crate::engine) mod srd;

pub(super) use done::stop;

use std::sync::Arc;
use std::time::{Duration, Instant};

use doorbell_verbs::Batch;
use doorbell_verbs::abi::{self, Wc};

use done::BATCH;
use keys::LocalKeys;

use super::qp::{EngineQp, Target};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::qp::QpState;
use crate::verbs::{Half, Nic};

/// Rounds between two looks at a device's events and at queue pairs that are silent.
const LOOK: u32 = 1024;
/// Time between two questions whether a queue pair still works: a peer's request may have broken it without a word.
const ASK: Duration = Duration::from_secs(1);
/// Time between two such questions of a core, at least.
const ASK_PAUSE: Duration = Duration::from_millis(10);
/// Requests that are posted without asking for a completion, at most.
const QUIET: u32 = 16;

/// A request that the device has.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    /// First slot of its WQE.
    at: u64,
    /// Where its bytes begin in the message.
    offset: u64,
    /// It is the WQE's last.
    last: bool,
    /// It belongs to no WQE: it only asks whether all before it are complete.
    marker: bool,
}

impl Sent {
    /// The only request of the WQE at slot `at`.
    #[inline(always)]
    fn whole(at: u64) -> Self {
        Self {
            at,
            offset: 0,
            last: true,
            marker: false,
        }
    }
}

/// The device's side of a queue pair.
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) nic: Arc<Nic>,
    batch: Batch,
    /// Requests given to the device (or in the batch), and those that are complete.
    posted: u64,
    done: u64,
    /// The first request of the batch.
    batched: u64,
    /// Requests since the last that asks for a completion.
    quiet: u32,
    /// What each request is, by its number; a power of two of them, and [`Nic::send`] at a time at most.
    sent: Box<[Sent]>,
    /// A message that is only partly posted: its WQE, and how many bytes are.
    partly: Option<(u64, u64)>,
    /// Local keys used last.
    keys: LocalKeys,
    /// Completions that were taken; kept, since clearing them costs.
    found: Box<[Wc; BATCH]>,
    /// Pieces of the message being posted; kept for its capacity.
    pieces: Vec<abi::Sge>,
    /// When the device last completed something, as far as looked at.
    heard: (u64, Instant),
    /// The device had no room although it should: since when.
    refused: Option<Instant>,
    /// Receives that the device has.
    receiving: u32,
    /// Receives whose memory was refused when they were handed on.
    refused_receives: Vec<(u64, Fault)>,
}

impl Link {
    fn new(nic: Arc<Nic>, pd: u32) -> Self {
        Self {
            keys: LocalKeys::new(&nic.port, pd),
            sent: vec![Sent::default(); nic.send.next_power_of_two() as usize].into(),
            nic,
            batch: Batch::default(),
            posted: 0,
            done: 0,
            batched: 0,
            quiet: 0,
            partly: None,
            found: Box::default(),
            pieces: Vec::new(),
            heard: (0, Instant::now()),
            refused: None,
            receiving: 0,
            refused_receives: Vec::new(),
        }
    }

    /// What request `number` is.
    #[inline(always)]
    fn sent(&self, number: u64) -> Sent {
        self.sent[number as usize & (self.sent.len() - 1)]
    }

    /// The number of the peer's queue pair.
    pub(super) fn peer_qpn(&self) -> u32 {
        self.nic.peer_qpn()
    }

    /// Places in the device's queue.
    #[inline(always)]
    fn room(&self) -> u64 {
        u64::from(self.nic.send) - (self.posted - self.done)
    }
}

/// The queue pairs of a core that devices carry out.
#[derive(Debug, Default)]
pub(crate) struct CoreVerbs {
    /// Their slots.
    links: Vec<u32>,
    rounds: u32,
    /// When one was last asked whether it still works, and which.
    asked: Option<(Instant, usize)>,
    /// Ports that were listened to in this round, by their addresses; scratch.
    heard: Vec<usize>,
}

impl CoreVerbs {
    pub(super) fn add(&mut self, slot: u32) {
        self.forget(slot);
        self.links.push(slot);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    pub(super) fn forget(&mut self, slot: u32) {
        self.links.retain(|s| *s != slot);
    }

    /// The queue pair that is to be asked now whether it still works, if it is time for one: each has its turn within [`ASK`], as far as
    /// [`ASK_PAUSE`] allows, since a device takes its time to answer.
    fn whom_to_ask(&mut self) -> Option<u32> {
        let pause = (ASK / (self.links.len().max(1) as u32)).max(ASK_PAUSE);
        let (since, last) = *self.asked.get_or_insert_with(|| (Instant::now(), 0));
        if since.elapsed() < pause {
            return None;
        }
        let next = (last + 1) % self.links.len().max(1);
        self.asked = Some((Instant::now(), next));
        self.links.get(next).copied()
    }
}

impl super::Core {
    /// Takes the device's queue pair of a queue pair that is not connected yet, and hands its receives on.
    pub(crate) fn prepare_verbs(&mut self, inner: &Inner, slot: u32, half: Half) -> bool {
        let Some(qp) = self.qp(slot) else {
            return false;
        };
        if qp.cold.shared.state() != QpState::Reset {
            return false;
        }
        let shared = &qp.cold.shared;
        qp.cold.prepared = match half {
            Half::Rc(nic) => {
                let mut link = Link::new(nic, shared.pd);
                if let Some(recv) = &shared.recv {
                    link.hand_on(inner, recv);
                }
                Target::Verbs(Box::new(link))
            }
            Half::Srd(nic) => Target::Srd(Box::new(srd::Link::new(nic, shared.pd))),
        };
        true
    }

    /// Completions and events of devices, after the queue pairs' turns.
    #[cold]
    pub(super) fn verbs_turn(&mut self, inner: &Inner) -> u64 {
        let mut done = 0;
        self.verbs.rounds = self.verbs.rounds.wrapping_add(1);
        let look = self.verbs.rounds.is_multiple_of(LOOK);
        let ask = look.then(|| self.verbs.whom_to_ask()).flatten();
        self.verbs.heard.clear();
        let mut i = 0;
        while let Some(&slot) = self.verbs.links.get(i) {
            let ready = self.qp(slot).is_some_and(|qp| {
                qp.cold.shared.state() == QpState::Ready
                    && matches!(qp.cold.target, Target::Verbs(_) | Target::Srd(_))
            });
            if !ready {
                self.verbs.links.swap_remove(i);
                continue;
            }
            i += 1;
            let Some(qp) = self.qp(slot) else { continue };
            done += qp.device_done(inner);
            if matches!(qp.cold.target, Target::Srd(_)) {
                self.run_errands(slot);
            }
            if look {
                done += self.look_at(inner, slot, ask == Some(slot));
            }
        }
        done
    }

    /// Events of a queue pair's device, and its silence.
    fn look_at(&mut self, inner: &Inner, slot: u32, ask: bool) -> u64 {
        let Self { qps, verbs, .. } = self;
        let Some(qp) = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut()) else {
            return 0;
        };
        let (port, alarm) = match &qp.cold.target {
            Target::Verbs(link) => (&link.nic.port, &link.nic.alarm),
            Target::Srd(link) => (&link.nic.port, &link.nic.alarm),
            _ => return 0,
        };
        let at = Arc::as_ptr(port).addr();
        if !verbs.heard.contains(&at) {
            verbs.heard.push(at);
            port.hear();
        }
        if port.is_gone() {
            qp.fail_flight(inner, Fault::PortDown);
            return 1;
        }
        match (alarm.take(), &qp.cold.target) {
            (Some(fault), _) => qp.told(inner, fault),
            (None, Target::Srd(_)) => qp.srd_silence(inner, ask),
            (None, _) => qp.silence(inner, ask),
        }
    }
}

impl EngineQp {
    /// Takes what the device has completed, whichever kind it is.
    fn device_done(&mut self, inner: &Inner) -> u64 {
        match self.cold.target {
            Target::Srd(_) => self.srd_done(inner),
            _ => self.verbs_done(inner),
        }
    }

    /// The link, of a queue pair that has one.
    #[inline]
    fn verbs(&mut self) -> Option<&mut Link> {
        match &mut self.cold.target {
            Target::Verbs(link) => Some(link),
            _ => None,
        }
    }

    /// The device has said that the queue pair is broken. Completions that tell more come first.
    fn told(&mut self, inner: &Inner, fault: Fault) -> u64 {
        self.device_done(inner);
        if self.cold.shared.state() == QpState::Ready {
            self.fail_flight(inner, fault);
        }
        1
    }

    /// Looks at a queue pair whose device has said nothing for long.
    fn silence(&mut self, inner: &Inner, ask: bool) -> u64 {
        let Some(link) = self.verbs() else { return 0 };
        if ask && link.nic.qp.is_broken() {
            return self.told(inner, Fault::PeerRefused);
        }
        let limit = link.nic.port.config().silence;
        if link.posted == link.done || link.heard.0 != link.done {
            link.heard = (link.done, Instant::now());
            return 0;
        }
        if link.heard.1.elapsed() < limit {
            return 0;
        }
        link.heard.1 = Instant::now();
        match link.nic.qp.state() {
            // A peer without a receive may take its time.
            Ok(abi::qp_state::RTS) => {
                tracing::warn!(
                    "{:?}: no completion for {limit:?}, {} requests are under way",
                    link.nic,
                    link.posted - link.done
                );
                0
            }
            state => {
                tracing::error!(
                    "{:?}: it stopped ({state:?}) and completed nothing for {limit:?}",
                    link.nic
                );
                self.fail_flight(inner, Fault::PortDown);
                1
            }
        }
    }
}
