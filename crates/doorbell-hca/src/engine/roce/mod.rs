//! RoCE in an engine core: one packet port, and the connections of the queue pairs of this core.
//!
//! A round lets the queue pairs post what was rung (`link`) and sends that; then it takes what arrived to the connections, and asks each for
//! its packets, its time-outs and what became of its messages. So a poster's packets do not wait for a look at the socket, and time-outs come
//! after what arrived. Nothing here waits, and what a stranger sends costs a look-up and a count.
//!
//! An acknowledgement leaves in the round in which its request arrived: a caller that drives the engine may stop at any time, and
//! what was held back for company would then never leave.

mod flight;
mod inward;
mod link;
mod memory;
mod outward;
mod staged;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::time::Instant;

use doorbell_port::{Check, Port, RecvBatch, SendBatch};
use doorbell_roce::{Event, Failure};
use doorbell_wire::roce::{Bth, Packet};

pub(super) use flight::{Flight, InFlight};
pub(crate) use link::Link;
pub(super) use memory::fault_of;
use staged::Ended;
pub(super) use staged::Staged;

use super::Cx;
use super::qp::{EngineQp, Target};
use crate::dma::{Buffer, DmaCore, DmaFailure};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::qp::QpState;
use crate::roce::{RoceCounters, StrangerCounters, plain};

/// Batches taken from the port in one round at most, so that queue pairs get their turns under a flood.
const BATCHES: usize = 4;
/// Packets that one connection may send in one round, before the next has its turn.
const SHARE: usize = 128;
/// A call that brought fewer packets than this has very likely emptied the socket.
const FEW: usize = 16;
/// When connections are asked for packets.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Queue pairs have posted; what arrived since has not been looked at.
    Posted,
    /// What arrived has been handled.
    Heard,
}

/// Queue pair numbers are spread by themselves.
#[derive(Default)]
struct QpnHash(u64);

impl Hasher for QpnHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u32(&mut self, n: u32) {
        // The table takes its bits from both ends.
        self.0 = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// The port of a core.
pub(crate) struct CorePort {
    /// Its engine core.
    core: usize,
    pub(super) port: Box<dyn Port>,
    rx: RecvBatch,
    tx: SendBatch,
    /// The port takes payload where it lies.
    lends: bool,
    /// Slot of each connected queue pair, by number.
    routes: HashMap<u32, u32, BuildHasherDefault<QpnHash>>,
    /// Slots and numbers of connected queue pairs.
    links: Vec<(u32, u32)>,
    /// Slots of queue pairs that gather what arrived; for the time of a round.
    gathering: Vec<u32>,
    /// A queue pair found no buffer for what it is to fetch.
    hungry: bool,
    /// Whose turn to send comes first.
    first: usize,
    epoch: Instant,
    strangers: StrangerCounters,
    /// The port failed; why.
    down: Option<String>,
}

impl std::fmt::Debug for CorePort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CorePort")
            .field("port", &self.port)
            .field("links", &self.links.len())
            .finish_non_exhaustive()
    }
}

impl CorePort {
    pub(crate) fn new(port: Box<dyn Port>, core: usize) -> Self {
        Self {
            core,
            rx: port.recv_batch(),
            lends: port.lends(),
            port,
            tx: SendBatch::new(),
            routes: HashMap::default(),
            links: Vec::new(),
            gathering: Vec::new(),
            hungry: false,
            first: 0,
            epoch: Instant::now(),
            strangers: StrangerCounters::default(),
            down: None,
        }
    }

    fn counters(&self) -> RoceCounters {
        RoceCounters {
            port: self.port.counters(),
            strangers: self.strangers,
        }
    }

    /// A queue pair was connected.
    pub(super) fn add(&mut self, slot: u32, qpn: u32) {
        self.forget(slot);
        self.routes.insert(qpn, slot);
        self.links.push((slot, qpn));
    }

    /// A queue pair is connected no more.
    pub(super) fn forget(&mut self, slot: u32) {
        let Some(at) = self.links.iter().position(|l| l.0 == slot) else {
            return;
        };
        let (_, qpn) = self.links.swap_remove(at);
        self.routes.remove(&qpn);
    }

    /// Is there anything that may send or receive?
    fn is_idle(&self) -> bool {
        self.links.is_empty()
    }

    /// Nanoseconds since the port was opened.
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Gives packets that arrived to their connections. Returns how many there were.
    fn receive(&mut self, qps: &mut [Option<Box<EngineQp>>], cx: &mut Cx<'_>) -> u64 {
        let mut taken = 0;
        if self.down.is_some() {
            return 0;
        }
        for _ in 0..BATCHES {
            let came = match self.port.recv(&mut self.rx) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) => {
                    self.down = Some(e.to_string());
                    break;
                }
            };
            taken += came as u64;
            if self.link_is_down(cx.inner) {
                continue;
            }
            let now = self.now();
            for packet in self.rx.iter() {
                let qp = Bth::peek_dest_qp(packet.bytes)
                    .and_then(|qpn| self.routes.get(&qpn))
                    .and_then(|&slot| Some((slot, qps.get_mut(slot as usize)?.as_deref_mut()?)));
                let Some((slot, qp)) = qp else {
                    self.strangers.unknown_qp += 1;
                    continue;
                };
                cx.slot = slot;
                let state = qp.cold.shared.state();
                let Some((link, mut memory)) = qp.cold.link(cx) else {
                    self.strangers.unknown_qp += 1;
                    continue;
                };
                if state != QpState::Ready {
                    self.strangers.unknown_qp += 1;
                } else if plain(packet.src.ip()) != link.peer {
                    self.strangers.wrong_source += 1;
                } else if link.exact && packet.check != Check::Exact {
                    self.strangers.damaged += 1;
                } else {
                    match Packet::parse(packet.bytes) {
                        Ok(parsed) => {
                            if !parsed.payload.is_empty() && memory.is_far_behind() {
                                self.strangers.memory_behind += 1;
                                continue;
                            }
                            let congested = packet.tos & 3 == 3;
                            link.connection.handle(&parsed, congested, now, &mut memory);
                            if memory.is_gathering() && self.gathering.last() != Some(&slot) {
                                self.gathering.push(slot);
                            }
                        }
                        Err(_) => self.strangers.malformed += 1,
                    }
                }
            }
            if came < FEW {
                break;
            }
        }
        for slot in self.gathering.drain(..) {
            cx.slot = slot;
            let qp = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut());
            if let Some((_, mut memory)) = qp.and_then(|qp| qp.cold.link(cx)) {
                memory.flush();
            }
        }
        taken
    }

    /// One round. `posted`: queue pairs may have posted something.
    fn turn(&mut self, qps: &mut [Option<Box<EngineQp>>], cx: &mut Cx<'_>, posted: bool) -> u64 {
        let mut done = 0;
        if posted {
            done += self.drive(qps, cx, Stage::Posted);
        }
        done += self.receive(qps, cx);
        done + self.drive(qps, cx, Stage::Heard)
    }

    /// Asks every connection for what became of its messages and for its packets, and sends those. Returns how much there was.
    fn drive(&mut self, qps: &mut [Option<Box<EngineQp>>], cx: &mut Cx<'_>, stage: Stage) -> u64 {
        let now = self.now();
        let mut done = 0;
        let mut i = 0;
        // Those that are not connected any more leave, which moves others into their places.
        while let Some(&(slot, qpn)) = self.links.get(i) {
            let ready = qps
                .get(slot as usize)
                .and_then(|q| q.as_deref())
                .is_some_and(|qp| {
                    qp.qpn().get() == qpn
                        && qp.cold.shared.state() == QpState::Ready
                        && matches!(qp.cold.target, Target::Roce(_))
                });
            if ready {
                i += 1;
            } else {
                self.links.swap_remove(i);
                self.routes.remove(&qpn);
                if let Some(qp) = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut()) {
                    qp.unstage(cx.dma, slot);
                }
            }
        }
        self.first = (self.first + 1) % self.links.len().max(1);
        let mut hungry = false;
        for n in 0..self.links.len() {
            let (slot, _) = self.links[(self.first + n) % self.links.len()];
            let Some(qp) = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut()) else {
                continue;
            };
            cx.slot = slot;
            if let Some(reason) = &self.down {
                tracing::error!(qpn = %qp.qpn(), "the RoCE port failed: {reason}");
                qp.fail_flight(cx.inner, Fault::PortDown);
                done += 1;
                continue;
            }
            let sent = self.send_of(qp, cx, now, stage);
            done += sent + qp.reap(cx);
            if qp.cold.staged.is_some() {
                hungry |= qp.look_after_copies(cx, sent == 0 && self.hungry);
            }
        }
        self.hungry = hungry;
        if !self.tx.is_empty() {
            self.flush(cx.inner);
        }
        done
    }

    /// The packets of one connection into the batch.
    fn send_of(&mut self, qp: &mut EngineQp, cx: &mut Cx<'_>, now: u64, stage: Stage) -> u64 {
        let inner = cx.inner;
        let Some((link, mut memory)) = qp.cold.link(cx) else {
            return 0;
        };
        if stage == Stage::Heard && link.connection.timeout().is_some_and(|at| at <= now) {
            link.connection.on_timeout(now);
        }
        memory.lends = self.lends;
        let mut sent = 0;
        for _ in 0..SHARE {
            if self.tx.space(&link.path).is_none() && !self.flush(inner) {
                break;
            }
            let Some(space) = self.tx.space(&link.path) else {
                break;
            };
            match link.connection.transmit(now, &mut memory, space) {
                Some(len) => {
                    match memory.lent.take() {
                        None => self.tx.commit(&link.path, len),
                        // SAFETY: memory that was resolved in this round stays readable until the round ends, and every round that puts
                        // packets into the batch sends it before it ends.
                        Some((at, payload)) => unsafe {
                            self.tx.commit_lent(&link.path, len, at.as_ptr(), payload);
                        },
                    }
                    sent += 1;
                }
                None => break,
            }
        }
        sent
    }

    /// A fault script has cut the link.
    fn link_is_down(&self, inner: &Inner) -> bool {
        inner
            .script
            .as_ref()
            .is_some_and(|run| run.link_is_down(self.core))
    }

    /// Sends the batch; `false` if the kernel has no room for it.
    fn flush(&mut self, inner: &Inner) -> bool {
        if self.link_is_down(inner) {
            self.tx.clear();
            return true;
        }
        match self.port.send(&mut self.tx) {
            Ok(_) => self.tx.is_empty(),
            Err(e) => {
                self.down = Some(e.to_string());
                self.tx.clear();
                false
            }
        }
    }
}

impl EngineQp {
    /// Completes WQEs whose messages the peer has acknowledged, and fails the QP if one failed. Returns how many there were.
    fn reap(&mut self, cx: &mut Cx<'_>) -> u64 {
        let mut done = 0;
        while let Some((link, mut memory)) = self.cold.link(cx) {
            let Some(event) = link.connection.poll_event(&mut memory) else {
                break;
            };
            done += 1;
            match event {
                Event::Done { through } => self.land(Some(through)),
                Event::Failed { token, failure } => {
                    self.land(token.checked_sub(1));
                    let fault = match failure {
                        Failure::Retry => Fault::RetryExceeded,
                        Failure::RnrRetry => Fault::RnrExceeded,
                        Failure::RemoteAccess => Fault::RemoteAccess,
                        Failure::RemoteInvalid => Fault::RemoteInvalid,
                        Failure::RemoteOperational => Fault::RemoteOperational,
                        Failure::BadResponse => Fault::BadResponse,
                        Failure::Local(local) => memory::fault_of(local),
                        // It follows the one that failed, which ended the QP.
                        Failure::Flushed => Fault::Flushed,
                    };
                    self.fail_flight(cx.inner, fault);
                    break;
                }
                Event::Stopped => {
                    let lost = self.cold.staged.as_ref().is_some_and(|s| s.has_failed());
                    let fault = if lost {
                        Fault::DmaFailed
                    } else {
                        Fault::PeerRefused
                    };
                    self.fail_flight(cx.inner, fault);
                    break;
                }
            }
        }
        if self.wqes != 0 {
            self.publish();
        }
        done
    }

    /// Completes what is complete up to `through`.
    pub(in crate::engine) fn land(&mut self, through: Option<u64>) {
        while let Some(one) = self.cold.flight.pop_done(through) {
            let sop = self.cq.sop(one.ctrl.opcode);
            self.complete(one.at, sop, one.ctrl.signalled(), one.byte_cnt);
        }
    }

    /// A copy of the connection's memory ended. Returns a buffer that nobody needs.
    pub(super) fn staged_ended(
        &mut self,
        lane: u32,
        cookie: u64,
        result: &Result<(), Arc<DmaFailure>>,
        old: u64,
        buffer: Option<Buffer>,
    ) -> Option<Buffer> {
        let Some(staged) = &mut self.cold.staged else {
            return buffer;
        };
        let (ended, buffer) = staged.ended(lane, cookie, result, old, buffer);
        if let (Ended::Lost { settled }, Target::Roce(link)) = (ended, &mut self.cold.target) {
            link.connection.lost(settled);
        }
        buffer
    }

    /// After packets: fetches ahead, lets go of what is complete, and ends the queue pair whose copies failed where the connection does not
    /// learn of it. `spare`: others need buffers, and this one has sent nothing. Returns whether it needs some.
    fn look_after_copies(&mut self, cx: &mut Cx<'_>, spare: bool) -> bool {
        let oldest = self.cold.flight.oldest().unwrap_or(u64::MAX);
        let Some(staged) = &mut self.cold.staged else {
            return false;
        };
        let unreliable = matches!(&self.cold.target, Target::Roce(link) if link.unreliable);
        if staged.inward.answer_failed() || (staged.has_failed() && unreliable) {
            self.fail_flight(cx.inner, Fault::DmaFailed);
            return false;
        }
        staged.outward.complete(oldest, cx.dma);
        if spare {
            staged.outward.yield_buffers(cx.dma);
        }
        if staged.outward.is_wanted()
            && let Some((_, mut memory)) = self.cold.link(cx)
        {
            memory.feed();
        }
        match &mut self.cold.staged {
            Some(staged) => staged.outward.take_hunger(),
            None => false,
        }
    }

    /// Ends the copies of the connection's memory, and forgets messages to and from another process.
    pub(super) fn unstage(&mut self, dma: &mut DmaCore, slot: u32) {
        self.cold.mail = None;
        if let Some(mut staged) = self.cold.staged.take() {
            staged.end(dma, slot);
        }
    }

    /// The oldest WQE under way fails, and with it the QP; those behind it are flushed.
    pub(in crate::engine) fn fail_flight(&mut self, inner: &Inner, fault: Fault) {
        let oldest = self.cold.flight.first();
        self.cold.flight.clear();
        let ctrl = oldest.map(|(at, ctrl)| {
            self.exec = at;
            ctrl
        });
        self.fail(inner, fault, ctrl);
    }
}

impl super::Core {
    /// Packets out, packets in, and messages complete, after the queue pairs' turns.
    #[cold]
    pub(super) fn roce_turn(&mut self, inner: &Inner, posted: bool) -> u64 {
        let Self {
            qps,
            roce,
            dma,
            acknowledger,
            ..
        } = self;
        let mut cx = Cx {
            inner,
            slot: 0,
            dma,
            acknowledger,
        };
        match roce {
            Some(roce) if !roce.is_idle() => roce.turn(qps, &mut cx, posted),
            _ => 0,
        }
    }

    /// Sends what a queue pair that goes still owes its peer.
    pub(super) fn roce_farewell(&mut self, inner: &Inner, slot: u32) {
        let Self {
            qps,
            roce,
            dma,
            acknowledger,
            ..
        } = self;
        let mut cx = Cx {
            inner,
            slot,
            dma,
            acknowledger,
        };
        let qp = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut());
        if let (Some(roce), Some(qp)) = (roce, qp)
            && matches!(qp.cold.target, Target::Roce(_))
            && qp.cold.shared.state() == QpState::Ready
        {
            let now = roce.now();
            roce.send_of(qp, &mut cx, now, Stage::Posted);
            roce.flush(inner);
        }
    }

    /// Takes a port.
    pub(crate) fn open_roce(&mut self, port: Box<dyn Port>) {
        self.roce = Some(Box::new(CorePort::new(port, self.index)));
    }

    /// What the port has seen.
    pub(crate) fn roce_counters(&self) -> Option<RoceCounters> {
        self.roce.as_ref().map(|r| r.counters())
    }

    /// What a connection has counted.
    pub(crate) fn link_counters(&mut self, slot: u32) -> Option<doorbell_roce::Counters> {
        match &self.qp(slot)?.cold.target {
            Target::Roce(link) => Some(*link.connection.counters()),
            _ => None,
        }
    }
}
