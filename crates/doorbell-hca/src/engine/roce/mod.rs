//! RoCE in an engine core: one packet port, and the connections of the queue pairs of this core.
//!
//! A round lets the queue pairs post what was rung (`link`) and sends that; then it takes what arrived to the connections, and asks each for
//! its packets, its time-outs and what became of its messages. So a poster's packets do not wait for a look at the socket, and time-outs come
//! after what arrived. Nothing here waits, and what a stranger sends costs a look-up and a count.
//!
//! In a ping-pong acknowledgements are held back (see `pace`). A thread that runs the core always comes back to send them; where callers run
//! it, and may stop at any time, the keeper (see `keeper`) gives the core the rounds that it takes.

mod flight;
mod inward;
mod link;
mod memory;
mod outward;
mod pace;
mod ready;
mod share;
mod staged;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use doorbell_port::{Check, Port, RecvBatch, SendBatch};
use doorbell_roce::{Event, Failure};
use doorbell_wire::Ctrl;
use doorbell_wire::roce::{Bth, Kind, Packet};

pub(super) use flight::{Flight, InFlight};
pub(crate) use link::Link;
pub(super) use memory::fault_of;
use pace::Leave;
use staged::Ended;
pub(super) use staged::Staged;

use super::Cx;
use super::keeper::Keeper;
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
    /// The queue pair goes: now or never.
    Last,
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
    /// The number of the connected queue pair in each slot; 0: none.
    links: Vec<u32>,
    ready: ready::Ready,
    shares: share::Shares,
    /// Times a connection was asked for its packets.
    asked: u64,
    /// Slots of queue pairs that gather what arrived; for the time of a round.
    gathering: Vec<u32>,
    /// A queue pair found no buffer for what it is to fetch.
    hungry: bool,
    /// Whose turn to send comes first.
    first: usize,
    epoch: Instant,
    round: u64,
    /// Acknowledgements of this round wait for the next.
    held: bool,
    /// All that arrived in this round were requests whose answers are awaited, and the last round was not like that.
    answers_first: bool,
    /// Sees to it that there is one; none where a thread runs the core.
    keeper: Option<Arc<Keeper>>,
    strangers: StrangerCounters,
    /// The port failed; why.
    down: Option<String>,
}

impl std::fmt::Debug for CorePort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CorePort")
            .field("port", &self.port)
            .field("links", &self.routes.len())
            .finish_non_exhaustive()
    }
}

impl CorePort {
    pub(crate) fn new(port: Box<dyn Port>, core: usize, keeper: Option<Arc<Keeper>>) -> Self {
        Self {
            core,
            rx: port.recv_batch(),
            lends: port.lends(),
            port,
            tx: SendBatch::new(),
            routes: HashMap::default(),
            links: Vec::new(),
            ready: ready::Ready::default(),
            shares: share::Shares::default(),
            asked: 0,
            gathering: Vec::new(),
            hungry: false,
            first: 0,
            epoch: Instant::now(),
            round: 1,
            held: false,
            answers_first: false,
            keeper,
            strangers: StrangerCounters::default(),
            down: None,
        }
    }

    fn counters(&self) -> RoceCounters {
        RoceCounters {
            port: self.port.counters(),
            strangers: self.strangers,
            asked: self.asked,
        }
    }

    /// A queue pair was connected; to the port of which peer, if it is known.
    pub(super) fn add(&mut self, slot: u32, qpn: u32, peer: Option<SocketAddr>) {
        self.forget(slot);
        if let Some(peer) = peer {
            self.shares.add(slot, peer);
        }
        self.routes.insert(qpn, slot);
        let at = slot as usize;
        if self.links.len() <= at {
            self.links.resize(at + 1, 0);
        }
        self.links[at] = qpn;
    }

    /// A queue pair is connected no more.
    pub(super) fn forget(&mut self, slot: u32) {
        self.shares.forget(slot);
        let qpn = self.links.get_mut(slot as usize).map(std::mem::take);
        if let Some(qpn) = qpn.filter(|qpn| *qpn != 0) {
            self.routes.remove(&qpn);
        }
    }

    /// Is there nothing that may send or receive, and nothing to let go?
    fn is_idle(&self) -> bool {
        self.routes.is_empty() && !self.held
    }

    /// Nanoseconds since the port was opened.
    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Gives packets that arrived to their connections. Returns how many there were.
    fn receive(&mut self, qps: &mut [Option<Box<EngineQp>>], cx: &mut Cx<'_>) -> u64 {
        let mut taken = 0;
        let mut awaited = 0;
        if self.down.is_some() {
            self.answers_first = false;
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
                } else if link.peer.is_some_and(|peer| plain(packet.src.ip()) != peer) {
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
                            // A peer that sends counts its completions, and may wait for the last one when we are done with ours.
                            if parsed.kind == Kind::Write {
                                link.pace.heard = self.round;
                                awaited += u64::from(link.pace.awaits_answer());
                            }
                            let congested = packet.tos & 3 == 3;
                            link.connection.handle(&parsed, congested, now, &mut memory);
                            self.ready.rouse(slot, &mut link.place);
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
        let all = taken != 0 && taken == awaited && self.gathering.is_empty();
        self.answers_first = all && !self.answers_first;
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
        self.round += 1;
        let held = std::mem::take(&mut self.held);
        let mut done = 0;
        if posted {
            done += self.drive(qps, cx, Stage::Posted);
        }
        done += self.receive(qps, cx);
        if self.answers_first {
            // Whoever drives this core waits for what has come, and nothing is to leave before the answer: that is this thread's next step.
            self.held = true;
        } else {
            done += self.drive(qps, cx, Stage::Heard);
        }
        if held != self.held {
            cx.inner.cores[self.core].hold(self.held);
            if let (true, Some(keeper)) = (self.held, &self.keeper) {
                keeper.call();
            }
        }
        done
    }

    /// Asks every connection for what became of its messages and for its packets, and sends those. Returns how much there was.
    fn drive(&mut self, qps: &mut [Option<Box<EngineQp>>], cx: &mut Cx<'_>, stage: Stage) -> u64 {
        let now = self.now();
        let mut done = 0;
        self.gather_ready(qps, cx, now);
        let list = self.ready.take();
        self.first = (self.first + 1) % list.len().max(1);
        let mut hungry = false;
        for n in 0..list.len() {
            let slot = list[(self.first + n) % list.len()];
            let Some(qp) = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut()) else {
                continue;
            };
            cx.slot = slot;
            if qp.cold.shared.state() != QpState::Ready {
                // It failed elsewhere; it is forgotten when it is reset or destroyed.
                self.shares.set(slot, false, 0);
                qp.unstage(cx.dma, slot);
                continue;
            }
            if let Some(reason) = &self.down {
                tracing::error!(qpn = %qp.qpn(), "the RoCE port failed: {reason}");
                self.shares.set(slot, false, 0);
                qp.fail_flight(cx.inner, Fault::PortDown);
                done += 1;
                continue;
            }
            let (sent, more) = self.send_of(qp, cx, now, stage);
            let reaped = qp.reap(cx);
            done += sent + reaped;
            let mut copies = false;
            if qp.cold.staged.is_some() {
                // Who found no buffer has nothing under way that would wake it.
                copies = qp.look_after_copies(cx, sent == 0 && self.hungry);
                hungry |= copies;
                copies |= qp.cold.staged.as_ref().is_some_and(|s| !s.is_idle());
            }
            let ready = qp.cold.shared.state() == QpState::Ready;
            if let Target::Roce(link) = &mut qp.cold.target {
                if ready && (more || copies || sent + reaped > 0) {
                    self.ready.keep(slot);
                } else {
                    let timeout = link.connection.timeout().filter(|_| ready);
                    self.ready.rest(slot, &mut link.place, timeout);
                }
            }
            if !ready {
                self.shares.set(slot, false, 0);
                qp.unstage(cx.dma, slot);
            }
        }
        self.ready.put_back(list);
        self.hungry = hungry;
        if !self.tx.is_empty() {
            self.flush(cx.inner);
        }
        done
    }

    /// Who has something to do: what posted since, whose time has come, and all of them if the port failed.
    fn gather_ready(&mut self, qps: &mut [Option<Box<EngineQp>>], cx: &mut Cx<'_>, now: u64) {
        for slot in cx.roused.drain(..) {
            if let Some(place) = place_of(qps, slot) {
                self.ready.rouse(slot, place);
            }
        }
        while let Some((slot, at)) = self.ready.due(now) {
            if let Some(place) = place_of(qps, slot) {
                self.ready.rouse_due(slot, at, place);
            }
        }
        if self.down.is_some() {
            for slot in 0..self.links.len() as u32 {
                if let Some(place) = place_of(qps, slot) {
                    self.ready.rouse(slot, place);
                }
            }
        }
    }

    /// The packets of one connection into the batch: how many, and whether there are more.
    fn send_of(
        &mut self,
        qp: &mut EngineQp,
        cx: &mut Cx<'_>,
        now: u64,
        stage: Stage,
    ) -> (u64, bool) {
        let (inner, slot) = (cx.inner, cx.slot);
        self.asked += 1;
        let Some((link, mut memory)) = qp.cold.link(cx) else {
            return (0, false);
        };
        // Who receives from anybody owes nobody anything.
        let Some(path) = &link.path else {
            return (0, false);
        };
        if stage == Stage::Heard && link.connection.timeout().is_some_and(|at| at <= now) {
            link.connection.on_timeout(now);
        }
        let leave = match stage {
            Stage::Last => link.pace.all(),
            _ => link.pace.leave(stage == Stage::Heard, self.round, now),
        };
        let behind = leave != Leave::All;
        self.held |= behind;
        if leave == Leave::Nothing {
            return (0, true);
        }
        memory.lends = self.lends;
        if let Some((sending, others)) = self.shares.of(slot, link.connection.is_sending()) {
            link.connection.share_window(sending, others);
        }
        link.connection.begin_burst(behind);
        let (mut sent, mut more) = (0, true);
        for _ in 0..SHARE {
            if self.tx.space(path).is_none() && !self.flush(inner) {
                break;
            }
            let Some(space) = self.tx.space(path) else {
                break;
            };
            match link.connection.transmit(now, &mut memory, space) {
                Some(len) => {
                    match memory.lent.take() {
                        None => self.tx.commit(path, len),
                        // SAFETY: memory that was resolved in this round stays readable until the round ends, and every round that puts
                        // packets into the batch sends it before it ends.
                        Some((at, payload)) => unsafe {
                            self.tx.commit_lent(path, len, at.as_ptr(), payload);
                        },
                    }
                    sent += 1;
                }
                None => {
                    more = behind;
                    break;
                }
            }
        }
        let connection = &link.connection;
        self.shares
            .set(slot, connection.is_sending(), connection.bytes_under_way());
        (sent, more)
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

/// The place of a slot's connection in the list.
fn place_of(qps: &mut [Option<Box<EngineQp>>], slot: u32) -> Option<&mut ready::Place> {
    match &mut qps.get_mut(slot as usize)?.as_deref_mut()?.cold.target {
        Target::Roce(link) => Some(&mut link.place),
        _ => None,
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
        while let Some((at, ctrl, byte_cnt)) = self.cold.flight.pop_done(through) {
            let sop = self.cq.sop(ctrl.opcode);
            self.complete(at, sop, ctrl.signalled(), byte_cnt);
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
        if let Target::Srd(link) = &mut self.cold.target {
            link.errand_ended(lane, result, old);
            return buffer;
        }
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
        if let Target::Srd(link) = &mut self.cold.target {
            link.end_errands(dma, slot);
        }
    }

    /// The oldest WQE under way fails, and with it the QP; those behind it are flushed.
    pub(in crate::engine) fn fail_flight(&mut self, inner: &Inner, fault: Fault) {
        let ctrl = self.give_up_flight();
        self.fail(inner, fault, ctrl);
    }

    /// Nothing is under way any more, and execution stands at the oldest of it; its control segment.
    pub(in crate::engine) fn give_up_flight(&mut self) -> Option<Ctrl> {
        let (at, ctrl) = self.cold.flight.first()?;
        self.cold.flight.clear();
        self.exec = at;
        Some(ctrl)
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
            roused,
            ..
        } = self;
        let mut cx = Cx {
            inner,
            slot: 0,
            dma,
            acknowledger,
            roused,
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
            roused,
            ..
        } = self;
        let mut cx = Cx {
            inner,
            slot,
            dma,
            acknowledger,
            roused,
        };
        let qp = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut());
        if let (Some(roce), Some(qp)) = (roce, qp)
            && matches!(qp.cold.target, Target::Roce(_))
            && qp.cold.shared.state() == QpState::Ready
        {
            let now = roce.now();
            roce.send_of(qp, &mut cx, now, Stage::Last);
            roce.flush(inner);
        }
    }

    /// Takes a port.
    pub(crate) fn open_roce(&mut self, port: Box<dyn Port>, keeper: Option<Arc<Keeper>>) {
        self.roce = Some(Box::new(CorePort::new(port, self.index, keeper)));
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
