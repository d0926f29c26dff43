//! The requester: messages become packets, and answers become completions (volume 1, 9.7.3 and 9.7.8).
//!
//! Every message is given its packet sequence numbers when it is posted; a READ takes as many as its answer has packets. `una` is the
//! oldest number without an answer, `next` the one to send next: going back is setting `next` back.

mod answers;
mod timer;

use std::collections::VecDeque;

use doorbell_wire::roce::{AtomicEth, Bth, Ext, Header, Opcode, Place, Psn, Reth, Transport};

use crate::congestion::Window;
use crate::counters::Counters;
use crate::memory::{LocalFault, Memory};
use crate::message::{Event, Failure, Message, Op, PostError};
use crate::{Config, connection};
use timer::{Expired, Timer};

/// The most bytes of a message (volume 1, 9.7.2).
const MAX_MESSAGE: u32 = 1 << 31;
/// Sequence numbers under way, at most: which of two is later has to be known.
pub(crate) const MAX_PSNS: u32 = (1 << 23) - 1;
/// Message ends without AckReq, at most.
const ENDS_PER_ACK: u32 = 16;

#[derive(Clone, Copy, Debug)]
struct Posted {
    message: Message,
    first: Psn,
    packets: u32,
    /// Bytes of all messages before it.
    start: u64,
}

impl Posted {
    /// Bytes of all packets before the one at `psn`, which is one of its own.
    fn bytes_before(&self, psn: Psn, mtu: u32) -> u64 {
        let index = psn.since(self.first) as u32;
        self.start + u64::from((index * mtu).min(self.message.len))
    }

    fn end(&self) -> Psn {
        self.first.add(self.packets)
    }
}

#[derive(Debug)]
pub(crate) struct Requester {
    transport: Transport,
    dest_qpn: u32,
    mtu: u32,
    max_rd_atomic: usize,
    rnr_retry: u8,
    capacity: usize,
    /// Packets of a READ's answer that are asked for at a time.
    read_piece: u32,
    pub(super) window: Window,

    /// Not complete, oldest first.
    messages: VecDeque<Posted>,
    /// Index in `messages` of the message that `next` belongs to.
    current: usize,
    una: Psn,
    next: Psn,
    /// One after the newest that was ever sent.
    high: Psn,
    /// One after the newest that was posted.
    tail: Psn,
    /// Bytes of all messages that were ever posted.
    posted_bytes: u64,
    /// One after the last answer packet of each READ or atomic under way.
    reads: VecDeque<Psn>,
    /// Packets, bytes and message ends since the last AckReq.
    since_ack: u32,
    bytes_since_ack: u64,
    ends_since_ack: u32,

    timer: Timer,
    rnr_until: Option<u64>,
    rnr_tries: u8,
    /// `una` when we last went back because of an answer: once for each, time-outs do the rest.
    went_back: Option<Psn>,

    /// Local memory failed at this packet. Nothing is sent from here on; the message fails when everything before it has been answered.
    fault: Option<(Psn, LocalFault)>,

    /// What to tell, each after its ticket has settled.
    events: VecDeque<(u64, Event)>,
    /// The newest ticket of [`Memory::store`].
    ticket: u64,
    failed: bool,
}

impl Requester {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            transport: config.transport,
            dest_qpn: config.dest_qpn,
            mtu: config.path_mtu.bytes(),
            max_rd_atomic: usize::from(config.max_rd_atomic),
            rnr_retry: config.rnr_retry,
            capacity: config.messages,
            read_piece: (config.window / 4)
                .min(config.window_bytes / 4 / config.path_mtu.bytes())
                .max(1),
            window: Window::new(config.window, config.window_bytes),
            messages: VecDeque::new(),
            current: 0,
            una: config.sq_psn,
            next: config.sq_psn,
            high: config.sq_psn,
            tail: config.sq_psn,
            posted_bytes: 0,
            reads: VecDeque::new(),
            since_ack: 0,
            bytes_since_ack: 0,
            ends_since_ack: 0,
            timer: Timer::new(config),
            rnr_until: None,
            rnr_tries: 0,
            went_back: None,
            fault: None,
            events: VecDeque::new(),
            ticket: 0,
            failed: false,
        }
    }

    pub(crate) fn post(&mut self, message: Message) -> Result<(), PostError> {
        if self.failed {
            return Err(PostError::Failed);
        }
        let reads = message.op.is_read_like();
        if reads && (self.transport == Transport::Uc || self.max_rd_atomic == 0) {
            return Err(PostError::Unsupported);
        }
        let atomic = matches!(message.op, Op::FetchAdd { .. } | Op::CompareSwap { .. });
        if message.len > MAX_MESSAGE || (atomic && message.len != 8) {
            return Err(PostError::Length(message.len));
        }
        let packets = if atomic {
            1
        } else {
            message.len.div_ceil(self.mtu).max(1)
        };
        let under_way = self.tail.since(self.una) as u32;
        if self.messages.len() >= self.capacity
            // A message may be longer than this alone: then nothing else is under way.
            || (under_way + packets > MAX_PSNS && !self.messages.is_empty())
        {
            return Err(PostError::Full);
        }
        if packets > MAX_PSNS {
            return Err(PostError::Length(message.len));
        }
        self.messages.push_back(Posted {
            message,
            first: self.tail,
            packets,
            start: self.posted_bytes,
        });
        self.posted_bytes += u64::from(message.len);
        self.tail = self.tail.add(packets);
        Ok(())
    }

    pub(crate) fn has_room(&self) -> bool {
        !self.failed && self.messages.len() < self.capacity
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.messages.is_empty() && self.events.is_empty()
    }

    pub(crate) fn is_sending(&self) -> bool {
        !self.messages.is_empty()
    }

    pub(crate) fn bytes_under_way(&self) -> u64 {
        let Some(oldest) = self.messages.front().filter(|_| self.una != self.next) else {
            return 0;
        };
        let next = match self.messages.get(self.current) {
            Some(posted) => posted.bytes_before(self.next, self.mtu),
            None => self.posted_bytes,
        };
        next.saturating_sub(oldest.bytes_before(self.una, self.mtu))
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }

    pub(crate) fn timeout(&self) -> Option<u64> {
        match (self.timer.deadline(), self.rnr_until) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    pub(crate) fn on_timeout(&mut self, now: u64, counters: &mut Counters) {
        if self.rnr_until.is_some_and(|until| now >= until) {
            self.rnr_until = None;
        }
        match self.timer.expire(now) {
            None => {}
            Some(Expired::Retry) => {
                counters.local_ack_timeout_err += 1;
                self.window.congested();
                self.go_back(self.una);
            }
            Some(Expired::Exhausted) => {
                counters.local_ack_timeout_err += 1;
                counters.req_transport_retries_exceeded += 1;
                self.fail(self.una, Failure::Retry);
            }
        }
    }

    pub(crate) fn poll_event(&mut self, memory: &mut impl Memory) -> Option<Event> {
        let &(ticket, event) = self.events.front()?;
        if ticket > 0 && ticket > memory.settled() {
            return None;
        }
        self.events.pop_front();
        Some(event)
    }

    fn tell(&mut self, event: Event) {
        if let (Event::Done { through }, Some((ticket, Event::Done { through: newest }))) =
            (event, self.events.back_mut())
            && *ticket == self.ticket
        {
            *newest = through;
            return;
        }
        self.events.push_back((self.ticket, event));
    }

    /// Sends again from `psn` on, which is not before `una`.
    fn go_back(&mut self, psn: Psn) {
        self.next = psn;
        self.current = self
            .messages
            .iter()
            .position(|m| psn.since(m.end()) < 0)
            .unwrap_or(self.messages.len());
        self.reads.retain(|end| end.since(psn) <= 0);
        self.asked();
    }

    /// Has just asked for an answer, or begins anew.
    fn asked(&mut self) {
        self.since_ack = 0;
        self.bytes_since_ack = 0;
        self.ends_since_ack = 0;
    }

    /// The message that `psn` belongs to failed, and with it everything after it.
    fn fail(&mut self, psn: Psn, failure: Failure) {
        self.failed = true;
        self.timer.stop();
        self.rnr_until = None;
        self.fault = None;
        let mut failure = failure;
        while let Some(posted) = self.messages.pop_front() {
            let token = posted.message.token;
            if psn.since(posted.end()) >= 0 {
                // Everything before the failed request was carried out, or the peer would not have looked at it.
                self.tell(Event::Done { through: token });
                continue;
            }
            self.events
                .push_back((self.ticket, Event::Failed { token, failure }));
            failure = Failure::Flushed;
        }
        self.reads.clear();
        self.current = 0;
        (self.una, self.next, self.high) = (self.tail, self.tail, self.tail);
    }

    /// The next packet, if there is one to send now.
    pub(crate) fn transmit(
        &mut self,
        now: u64,
        memory: &mut impl Memory,
        counters: &mut Counters,
        out: &mut [u8],
    ) -> Option<usize> {
        if self.next == self.tail || self.rnr_until.is_some_and(|until| now < until) {
            return None;
        }
        self.rnr_until = None;
        let posted = *self.messages.get(self.current)?;
        let at = posted.first;
        let index = self.next.since(at) as u32;
        let in_flight = self.next.since(self.una) as u32;
        let room = match self.transport {
            Transport::Rc => {
                let packets = self.window.packets().saturating_sub(in_flight);
                packets.min(self.room_for_bytes())
            }
            Transport::Uc => u32::MAX,
        };
        if room == 0 || self.fault.is_some_and(|(psn, _)| psn == self.next) {
            return None;
        }
        // What a READ before the fence brought may be what is to be sent: it has to be there.
        if posted.message.fence
            && index == 0
            && (!self.reads.is_empty() || self.ticket > memory.settled())
        {
            return None;
        }
        if posted.message.op.is_read_like() {
            return self.transmit_read(now, &posted, (index, room), counters, out);
        }

        let offset = index * self.mtu;
        let last = index + 1 == posted.packets;
        let len = if last {
            posted.message.len - offset
        } else {
            self.mtu
        };
        let place = match (index == 0, last) {
            (true, true) => Place::Only,
            (true, false) => Place::First,
            (false, true) => Place::Last,
            (false, false) => Place::Middle,
        };
        let (opcode, ext) = self.data_header(&posted.message, place);
        let mut bth = Bth::new(opcode, self.dest_qpn, self.next);
        bth.solicited = posted.message.solicited && last && posted.message.op.is_received();
        bth.pad = (len.wrapping_neg() & 3) as u8;
        bth.ack_req = self.transport == Transport::Rc && self.wants_ack(last, room, len);
        let header = Header { bth, ext };
        let start = header.len();
        let body = start + len as usize;
        let total = body + usize::from(bth.pad);
        if out.len() < total {
            return None;
        }
        let lent = len > 0
            && bth.pad == 0
            && self.next.since(self.high) >= 0
            && memory.lend(posted.message.token, offset, len);
        if len > 0 && !lent {
            match memory.load(posted.message.token, offset, &mut out[start..body]) {
                Ok(true) => {}
                Ok(false) => return None,
                Err(fault) => {
                    self.local_fault(fault);
                    return self.transmit(now, memory, counters, out);
                }
            }
        }
        header.emit(out);
        out[body..total].fill(0);

        self.since_ack += 1;
        self.bytes_since_ack += u64::from(len);
        self.ends_since_ack += u32::from(last);
        if bth.ack_req {
            self.asked();
        }
        self.sent(1, len, counters);
        match self.transport {
            Transport::Rc => {
                self.current += usize::from(last);
                self.timer.sent(now);
            }
            Transport::Uc => {
                // Nobody answers: what is sent is done.
                self.una = self.next;
                if last {
                    self.messages.pop_front();
                    self.tell(Event::Done {
                        through: posted.message.token,
                    });
                }
            }
        }
        Some(if lent { start } else { total })
    }

    fn transmit_read(
        &mut self,
        now: u64,
        posted: &Posted,
        (index, room): (u32, u32),
        counters: &mut Counters,
        out: &mut [u8],
    ) -> Option<usize> {
        if self.reads.len() >= self.max_rd_atomic {
            return None;
        }
        let (opcode, ext, packets) = match posted.message.op {
            Op::Read { va, rkey } => {
                // Pieces end at fixed places, so that what is asked for again is always part of one that the responder remembers.
                let packets =
                    (self.read_piece - index % self.read_piece).min(posted.packets - index);
                let offset = index * self.mtu;
                let reth = Reth {
                    va: va.wrapping_add(u64::from(offset)),
                    rkey,
                    len: (posted.message.len - offset).min(packets * self.mtu),
                };
                (Opcode::READ_REQUEST, Ext::Reth(reth), packets)
            }
            Op::FetchAdd { va, rkey, add } => {
                let eth = AtomicEth {
                    va,
                    rkey,
                    swap_add: add,
                    compare: 0,
                };
                (Opcode::FETCH_ADD, Ext::Atomic(eth), 1)
            }
            Op::CompareSwap {
                va,
                rkey,
                compare,
                swap,
            } => {
                let eth = AtomicEth {
                    va,
                    rkey,
                    swap_add: swap,
                    compare,
                };
                (Opcode::COMPARE_SWAP, Ext::Atomic(eth), 1)
            }
            Op::Write { .. } | Op::Send { .. } => return None,
        };
        // Where others have their share, a piece is asked for when there is room for all of it; what is under way makes some.
        if self.window.is_shared() && room < packets && self.since_ack == 0 && self.next != self.una
        {
            return None;
        }
        let mut bth = Bth::new(opcode, self.dest_qpn, self.next);
        bth.ack_req = true;
        let len = Header { bth, ext }.emit(out);
        if len == 0 {
            return None;
        }
        self.asked();
        self.sent(packets, 0, counters);
        self.reads.push_back(self.next);
        self.current += usize::from(self.next == posted.end());
        self.timer.sent(now);
        Some(len)
    }

    /// Opcode and extension headers of a WRITE or SEND packet.
    fn data_header(&self, message: &Message, place: Place) -> (Opcode, Ext) {
        match message.op {
            Op::Write { va, rkey, imm } => {
                let imm = imm.filter(|_| place.ends());
                let opcode = Opcode::write(self.transport, place, imm.is_some());
                let reth = Reth {
                    va,
                    rkey,
                    len: message.len,
                };
                let ext = match (place.begins(), imm) {
                    (true, Some(imm)) => Ext::RethImm(reth, imm),
                    (true, None) => Ext::Reth(reth),
                    (false, Some(imm)) => Ext::Imm(imm),
                    (false, None) => Ext::None,
                };
                (opcode, ext)
            }
            Op::Send { imm } => {
                let imm = imm.filter(|_| place.ends());
                let opcode = Opcode::send(self.transport, place, imm.is_some());
                (opcode, imm.map_or(Ext::None, Ext::Imm))
            }
            // The other operations have requests of their own; see `transmit_read`.
            Op::Read { .. } | Op::FetchAdd { .. } | Op::CompareSwap { .. } => {
                (Opcode::READ_REQUEST, Ext::None)
            }
        }
    }

    /// The packet at `next` cannot be made.
    fn local_fault(&mut self, fault: LocalFault) {
        if self.una == self.next {
            self.fail(self.next, Failure::Local(fault));
            return;
        }
        // Messages before it are under way: what becomes of them is the peer's to say.
        self.fault = Some((self.next, fault));
        if self.since_ack > 0 {
            // The last of them asked for no answer; sent again, it does.
            self.go_back(self.next.sub(1));
        }
    }

    /// How many packets the bytes have room for: one at least when nothing is under way.
    fn room_for_bytes(&self) -> u32 {
        if self.next == self.una {
            return u32::MAX;
        }
        let room = self.window.bytes().saturating_sub(self.bytes_under_way());
        // The window became smaller after a packet that asked for no answer: one more does.
        let room = room.max(u64::from(self.since_ack > 0));
        room.div_ceil(u64::from(self.mtu)).min(u64::from(u32::MAX)) as u32
    }

    /// Whoever stops sending must have asked for an answer, or only a time-out would go on.
    fn wants_ack(&self, last: bool, room: u32, len: u32) -> bool {
        let nothing_follows = (last && self.current + 1 == self.messages.len())
            || self.fault.is_some_and(|(psn, _)| psn == self.next.add(1));
        let quarter = (self.window.packets() / 4).max(1);
        nothing_follows
            || room == 1
            || self.since_ack + 1 >= quarter
            || self.bytes_since_ack + u64::from(len) >= self.window.bytes() / 4
            || (last && self.ends_since_ack + 1 >= ENDS_PER_ACK)
    }

    fn sent(&mut self, psns: u32, payload: u32, counters: &mut Counters) {
        counters.tx_packets += 1;
        counters.tx_bytes += u64::from(payload);
        if self.next.since(self.high) < 0 {
            counters.retransmitted_packets += 1;
        }
        self.next = self.next.add(psns);
        if self.next.since(self.high) > 0 {
            self.high = self.next;
        }
        connection::debug_window(self.una, self.next, self.tail);
    }
}
