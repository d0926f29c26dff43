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

pub(super) use done::stop;

use std::sync::Arc;
use std::time::{Duration, Instant};

use doorbell_verbs::abi::{self, Wc};
use doorbell_verbs::{AsyncEvent, Batch};

use done::BATCH;
use keys::LocalKeys;

use super::qp::{EngineQp, Target};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::qp::QpState;
use crate::verbs::Nic;

/// Rounds between two looks at a device's events and at queue pairs that are silent.
const LOOK: u32 = 1024;
/// Time between two questions whether a queue pair still works: a peer's request may have broken it without a word.
const ASK: Duration = Duration::from_secs(1);
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
    /// When it was last asked whether its queue pair still works.
    asked: Instant,
    /// The device had no room although it should: since when.
    refused: Option<Instant>,
    /// Receives that the device has.
    receiving: u32,
    /// Receives whose memory was refused when they were handed on.
    refused_receives: Vec<(u64, Fault)>,
}

impl Link {
    pub(crate) fn new(nic: Arc<Nic>) -> Self {
        Self {
            sent: vec![Sent::default(); nic.send.next_power_of_two() as usize].into(),
            nic,
            batch: Batch::default(),
            posted: 0,
            done: 0,
            batched: 0,
            quiet: 0,
            partly: None,
            keys: LocalKeys::default(),
            found: Box::default(),
            pieces: Vec::new(),
            heard: (0, Instant::now()),
            asked: Instant::now(),
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

    /// The device stops: what it has is flushed, and the peer is told by its transport.
    pub(super) fn stop(&self) {
        if let Err(e) = self.nic.qp.fail() {
            tracing::debug!("{e}");
        }
    }
}

/// The queue pairs of a core that devices carry out.
#[derive(Debug, Default)]
pub(crate) struct CoreVerbs {
    /// Their slots.
    links: Vec<u32>,
    rounds: u32,
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
}

impl super::Core {
    /// Takes the device's queue pair of a queue pair that is not connected yet, and hands its receives on.
    pub(crate) fn prepare_verbs(&mut self, inner: &Inner, slot: u32, nic: Arc<Nic>) -> bool {
        let Some(qp) = self.qp(slot) else {
            return false;
        };
        if qp.cold.shared.state() != QpState::Reset {
            return false;
        }
        let mut link = Link::new(nic);
        let shared = &qp.cold.shared;
        if let Some(recv) = &shared.recv {
            link.hand_on(inner, shared.pd, recv);
        }
        qp.cold.prepared = Some(Box::new(link));
        true
    }

    /// Completions and events of devices, after the queue pairs' turns.
    #[cold]
    pub(super) fn verbs_turn(&mut self, inner: &Inner) -> u64 {
        let mut done = 0;
        self.verbs.rounds = self.verbs.rounds.wrapping_add(1);
        let look = self.verbs.rounds.is_multiple_of(LOOK);
        let mut i = 0;
        while let Some(&slot) = self.verbs.links.get(i) {
            let ready = self.qp(slot).is_some_and(|qp| {
                qp.cold.shared.state() == QpState::Ready
                    && matches!(qp.cold.target, Target::Verbs(_))
            });
            if !ready {
                self.verbs.links.swap_remove(i);
                continue;
            }
            i += 1;
            let Some(qp) = self.qp(slot) else { continue };
            done += qp.verbs_done(inner);
            if look {
                done += self.look_at(inner, slot);
            }
        }
        done
    }

    /// Events of a queue pair's device, and its silence.
    fn look_at(&mut self, inner: &Inner, slot: u32) -> u64 {
        let Some(Target::Verbs(link)) = self.qp(slot).map(|qp| &qp.cold.target) else {
            return 0;
        };
        let port = Arc::clone(&link.nic.port);
        let mut done = 0;
        while let Some(event) = port.context().next_event() {
            tracing::debug!("{port:?}: {event:?}");
            match event {
                AsyncEvent::DeviceFatal => {
                    tracing::error!("{}: the device was removed or has failed", port.config());
                    port.set_gone();
                }
                AsyncEvent::PortDown(number) => {
                    tracing::warn!("{}: port {number} went down", port.config())
                }
                AsyncEvent::PortActive(number) => {
                    tracing::warn!("{}: port {number} is up", port.config())
                }
                AsyncEvent::QpAccess(qpn) => done += self.broken(inner, qpn, Fault::PeerRefused),
                AsyncEvent::QpFatal(qpn) => done += self.broken(inner, qpn, Fault::PortDown),
                AsyncEvent::CqError | AsyncEvent::Other(_) => {}
                other => tracing::debug!("{}: {other:?}", port.config()),
            }
        }
        let Some(qp) = self.qp(slot) else { return done };
        if port.is_gone() {
            qp.fail_flight(inner, Fault::PortDown);
            return done + 1;
        }
        done + qp.silence(inner)
    }

    /// Fails the queue pair of this core that has the device's number `qpn`.
    fn broken(&mut self, inner: &Inner, qpn: u32, fault: Fault) -> u64 {
        for i in 0..self.verbs.links.len() {
            let slot = self.verbs.links[i];
            let Some(qp) = self.qp(slot) else { continue };
            let is_it = matches!(&qp.cold.target, Target::Verbs(link) if link.nic.qp.qpn() == qpn);
            if !is_it {
                continue;
            }
            // Completions that tell more come first.
            qp.verbs_done(inner);
            if qp.cold.shared.state() == QpState::Ready {
                qp.fail_flight(inner, fault);
                return 1;
            }
        }
        0
    }
}

impl EngineQp {
    /// The link, of a queue pair that has one.
    #[inline]
    fn verbs(&mut self) -> Option<&mut Link> {
        match &mut self.cold.target {
            Target::Verbs(link) => Some(link),
            _ => None,
        }
    }

    /// Looks at a queue pair whose device has said nothing for long.
    fn silence(&mut self, inner: &Inner) -> u64 {
        let Some(link) = self.verbs() else { return 0 };
        if link.asked.elapsed() >= ASK {
            link.asked = Instant::now();
            if matches!(
                link.nic.qp.state(),
                Ok(abi::qp_state::ERR | abi::qp_state::SQE)
            ) {
                // What it has to say comes first.
                self.verbs_done(inner);
                if self.cold.shared.state() == QpState::Ready {
                    self.fail_flight(inner, Fault::PeerRefused);
                }
                return 1;
            }
        }
        let Some(link) = self.verbs() else { return 0 };
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
