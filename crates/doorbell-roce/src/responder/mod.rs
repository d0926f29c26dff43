//! The responder: requests are checked, carried out once and in order, and answered (volume 1, 9.7.4 and 9.7.5).

mod replies;
mod uc;

use std::collections::VecDeque;

use doorbell_wire::roce::{AethKind, Ext, Kind, NakCode, Packet, Psn};

use crate::Config;
use crate::counters::Counters;
use crate::memory::{Access, Atomic, Memory, Received, ReceivedKind, Refusal, Status};
use crate::requester::MAX_PSNS;
use replies::{Replies, Reply};

/// The message that is being received.
#[derive(Clone, Copy, Debug)]
struct Current {
    kind: Kind,
    rkey: u32,
    va: u64,
    /// Bytes of a WRITE; a SEND's are known at its end.
    total: u32,
    offset: u32,
    /// Does it hold a receive?
    holds_receive: bool,
}

/// A READ or atomic that may be asked for again (volume 1, 9.7.5.1.5).
#[derive(Clone, Copy, Debug)]
enum Resource {
    Read {
        first: Psn,
        packets: u32,
        rkey: u32,
        va: u64,
        len: u32,
    },
    Atomic {
        psn: Psn,
        id: u64,
    },
}

/// What became of a packet's place in the order.
enum Refused {
    /// Try again later: no receive is posted.
    NotReady,
    /// A NAK that ends the connection.
    Because(Refusal),
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self::Because(refusal)
    }
}

#[derive(Debug)]
pub(crate) struct Responder {
    mtu: u32,
    max_dest_rd_atomic: usize,
    min_rnr_timer: u8,
    /// The PSN of the next new packet.
    expected: Psn,
    /// Messages completed, 24 bits.
    msn: u32,
    current: Option<Current>,
    /// A NAK was sent for `expected`; until it comes, nothing else is said.
    told: bool,
    resources: VecDeque<Resource>,
    /// Results of atomics: (id, value), newest last.
    results: VecDeque<(u64, Option<u64>)>,
    next_atomic: u64,
    replies: Replies,
    /// Receives to complete, each after its ticket.
    received: VecDeque<(u64, Received)>,
    /// The newest ticket of anything written here.
    ticket: u64,
    /// Tickets that have not settled, each with the first packet that waits for it.
    unsettled: VecDeque<(u64, Psn)>,
    /// A request was refused, with this. Nothing new is carried out, but what was is still answered, and so is whoever missed the NAK.
    stopped: Option<NakCode>,
}

impl Responder {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            mtu: config.path_mtu.bytes(),
            max_dest_rd_atomic: usize::from(config.max_dest_rd_atomic),
            min_rnr_timer: config.min_rnr_timer,
            expected: config.rq_psn,
            msn: 0,
            current: None,
            told: false,
            resources: VecDeque::new(),
            results: VecDeque::new(),
            next_atomic: 0,
            replies: Replies::new(config),
            received: VecDeque::new(),
            ticket: 0,
            unsettled: VecDeque::new(),
            stopped: None,
        }
    }

    pub(crate) fn has_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// Nothing to send, and nothing waits to settle.
    pub(crate) fn is_idle(&self) -> bool {
        self.replies.is_empty() && self.received.is_empty()
    }

    /// Is nothing owed but positive acknowledgements?
    pub(crate) fn only_acknowledges(&self) -> bool {
        self.stopped.is_none() && self.replies.only_acknowledges()
    }

    /// A request of a reliable connection.
    pub(crate) fn request(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) {
        let ahead = packet.bth.psn.since(self.expected);
        if let Some(code) = self.stopped
            && ahead >= 0
        {
            counters.unexpected_packets += 1;
            if ahead == 0 {
                self.acknowledge(AethKind::Nak(code), self.expected);
            }
            return;
        }
        if ahead > 0 {
            counters.out_of_sequence += 1;
            if !self.told {
                self.told = true;
                self.acknowledge(AethKind::Nak(NakCode::PsnSequence), self.expected);
            }
            return;
        }
        if ahead < 0 {
            counters.duplicate_request += 1;
            self.duplicate(packet);
            return;
        }
        match self.carry_out(packet, memory, counters) {
            Ok(()) => self.told = false,
            Err(Refused::NotReady) => {
                counters.out_of_buffer += 1;
                // What follows will come again with this packet.
                self.told = true;
                let timer = self.min_rnr_timer;
                self.acknowledge(AethKind::RnrNak { timer }, self.expected);
            }
            Err(Refused::Because(refusal)) => self.refuse(refusal, self.expected, counters),
        }
    }

    fn refuse(&mut self, refusal: Refusal, psn: Psn, counters: &mut Counters) {
        let code = self.count(refusal, counters);
        self.acknowledge(AethKind::Nak(code), psn);
        self.stopped = Some(code);
    }

    fn count(&self, refusal: Refusal, counters: &mut Counters) -> NakCode {
        match refusal {
            Refusal::Access => {
                counters.resp_remote_access_errors += 1;
                NakCode::RemoteAccess
            }
            Refusal::Invalid => {
                counters.resp_remote_invalid_request += 1;
                NakCode::InvalidRequest
            }
            Refusal::Operational => {
                counters.resp_remote_operational_errors += 1;
                NakCode::RemoteOperational
            }
        }
    }

    /// A request that was taken turned out to be impossible: it is refused, and everything after it was never here. What is said about
    /// requests before it has settled, or does so by itself.
    fn take_back(&mut self, settled: u64, refusal: Refusal, psn: Psn, counters: &mut Counters) {
        let code = self.count(refusal, counters);
        self.replies
            .end(settled, psn, self.msn, AethKind::Nak(code));
        self.received.retain(|(ticket, _)| *ticket <= settled);
        self.unsettled.clear();
        self.ticket = self.ticket.min(settled);
        self.current = None;
        self.expected = psn;
        self.stopped = Some(code);
    }

    /// What was written and has not settled never will: the peer is told so, where there is an answer.
    pub(crate) fn lost(&mut self, settled: u64, counters: &mut Counters) {
        let first = self.unsettled.iter().find(|(ticket, _)| *ticket > settled);
        if let (Some(&(_, psn)), None) = (first, self.stopped) {
            self.take_back(settled, Refusal::Operational, psn, counters);
        }
    }

    fn acknowledge(&mut self, kind: AethKind, psn: Psn) {
        self.replies.acknowledge(self.ticket, psn, self.msn, kind);
    }

    fn carry_out(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) -> Result<(), Refused> {
        match packet.kind {
            Kind::Send | Kind::Write => {
                self.data(packet, memory, counters)?;
                self.expected = self.expected.add(1);
                if packet.bth.ack_req {
                    self.acknowledge(ack(), packet.bth.psn);
                }
                Ok(())
            }
            Kind::ReadRequest => self.read(packet, memory, counters),
            Kind::CompareSwap | Kind::FetchAdd => self.atomic(packet, memory, counters),
            _ => Err(Refusal::Invalid.into()),
        }
    }

    /// A packet of a WRITE or SEND that is next in order.
    fn data(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) -> Result<(), Refused> {
        let len = packet.payload.len() as u32;
        let (begins, ends) = (packet.place.begins(), packet.place.ends());
        let imm = packet.ext.imm();
        let fits = if ends {
            len <= self.mtu
        } else {
            len == self.mtu
        };
        if !fits || begins != self.current.is_none() {
            return Err(Refusal::Invalid.into());
        }
        let mut current = match self.current {
            None => Current {
                kind: packet.kind,
                rkey: 0,
                va: 0,
                total: 0,
                offset: 0,
                holds_receive: false,
            },
            // The last packet of several is never empty.
            Some(current) if current.kind == packet.kind && len > 0 => current,
            Some(_) => return Err(Refusal::Invalid.into()),
        };
        if let Some(reth) = packet.ext.reth() {
            (current.rkey, current.va, current.total) = (reth.rkey, reth.va, reth.len);
            if packet.place.ends() != (reth.len <= self.mtu) {
                return Err(Refusal::Invalid.into());
            }
            // A WRITE of no bytes touches nothing, so its key is not looked at (9.7.4.1.3).
            if reth.len > 0 {
                memory.check(reth.rkey, reth.va, reth.len, Access::Write)?;
            }
        }
        let write = packet.kind == Kind::Write;
        if write {
            let end = current.offset.checked_add(len);
            let right = match ends {
                true => end == Some(current.total),
                false => end.is_some_and(|end| end < current.total),
            };
            if !right {
                return Err(Refusal::Invalid.into());
            }
        }
        // A receive is taken before anything is written, so that "not ready" leaves no trace.
        let needs_receive = if write { ends && imm.is_some() } else { begins };
        if needs_receive {
            if !memory.receive() {
                return Err(Refused::NotReady);
            }
            current.holds_receive = true;
        }
        if len > 0 {
            let done = if write {
                let va = current.va.wrapping_add(u64::from(current.offset));
                memory.write(current.rkey, va, packet.payload)
            } else {
                memory.scatter(current.offset, packet.payload)
            };
            match done {
                Ok(Status::Now) => {}
                Ok(Status::Later(ticket)) => {
                    if ticket > self.ticket {
                        self.ticket = ticket;
                        self.unsettled.push_back((ticket, packet.bth.psn));
                    }
                }
                Err(refusal) => {
                    if write && current.holds_receive {
                        memory.unreceive();
                    }
                    // A receive that could not be scattered into was completed, in error, by whoever could not.
                    if let Some(current) = &mut self.current {
                        current.holds_receive = false;
                    }
                    return Err(refusal.into());
                }
            }
        }
        counters.rx_bytes += u64::from(len);
        current.offset = current.offset.wrapping_add(len);
        if !ends {
            self.current = Some(current);
            return Ok(());
        }
        self.current = None;
        self.msn = (self.msn + 1) & 0xff_ffff;
        if write {
            counters.rx_write_requests += 1;
        } else {
            counters.rx_send_requests += 1;
        }
        if current.holds_receive {
            let received = Received {
                kind: if write {
                    ReceivedKind::Write
                } else {
                    ReceivedKind::Send
                },
                len: current.offset,
                imm,
                solicited: packet.bth.solicited,
            };
            self.received.push_back((self.ticket, received));
        }
        Ok(())
    }

    fn read(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) -> Result<(), Refused> {
        let Some(&reth) = packet.ext.reth() else {
            return Err(Refusal::Invalid.into());
        };
        let packets = reth.len.div_ceil(self.mtu).max(1);
        if self.current.is_some() || packets > MAX_PSNS || self.is_full() {
            return Err(Refusal::Invalid.into());
        }
        if reth.len > 0 {
            memory.check(reth.rkey, reth.va, reth.len, Access::Read)?;
        }
        counters.rx_read_requests += 1;
        self.expected = self.expected.add(packets);
        self.msn = (self.msn + 1) & 0xff_ffff;
        self.remember(Resource::Read {
            first: packet.bth.psn,
            packets,
            rkey: reth.rkey,
            va: reth.va,
            len: reth.len,
        });
        let msn = self.msn;
        self.replies.push(
            self.ticket,
            Reply::Read {
                first: packet.bth.psn,
                packets,
                sent: 0,
                rkey: reth.rkey,
                va: reth.va,
                len: reth.len,
                msn,
            },
        );
        Ok(())
    }

    fn atomic(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) -> Result<(), Refused> {
        let Ext::Atomic(eth) = packet.ext else {
            return Err(Refusal::Invalid.into());
        };
        if self.current.is_some() || eth.va % 8 != 0 || self.is_full() {
            return Err(Refusal::Invalid.into());
        }
        memory.check(eth.rkey, eth.va, 8, Access::Atomic)?;
        let op = match packet.kind {
            Kind::FetchAdd => Atomic::FetchAdd { add: eth.swap_add },
            _ => Atomic::CompareSwap {
                compare: eth.compare,
                swap: eth.swap_add,
            },
        };
        let id = self.next_atomic;
        let value = memory.atomic(id, eth.rkey, eth.va, op)?;
        self.next_atomic += 1;
        counters.rx_atomic_requests += 1;
        self.expected = self.expected.add(1);
        self.msn = (self.msn + 1) & 0xff_ffff;
        let psn = packet.bth.psn;
        self.remember(Resource::Atomic { psn, id });
        self.results.push_back((id, value));
        let keep = self.max_dest_rd_atomic.max(1);
        while self.results.len() > keep {
            self.results.pop_front();
        }
        let msn = self.msn;
        self.replies
            .push(self.ticket, Reply::Atomic { psn, id, msn });
        Ok(())
    }

    /// As many answers are owed as the peer may have open.
    fn is_full(&self) -> bool {
        self.replies.answers() >= self.max_dest_rd_atomic
    }

    fn remember(&mut self, resource: Resource) {
        if self.resources.len() >= self.max_dest_rd_atomic.max(1) {
            self.resources.pop_front();
        }
        self.resources.push_back(resource);
    }

    /// A request that was carried out before (9.7.5.1.3): WRITEs and SENDs are acknowledged again, READs read again, atomics answered
    /// from memory of their result. Nothing is executed twice.
    fn duplicate(&mut self, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        match packet.kind {
            // Also while a NAK is out: it may have been lost, and a requester whose window has shrunk gets no further than these.
            Kind::Send | Kind::Write => self.acknowledge(ack(), self.expected.sub(1)),
            Kind::ReadRequest => {
                let Some(reth) = packet.ext.reth() else {
                    return;
                };
                let packets = reth.len.div_ceil(self.mtu).max(1);
                let known = self.resources.iter().any(|resource| match *resource {
                    Resource::Read {
                        first,
                        packets: all,
                        rkey,
                        va,
                        len,
                    } => {
                        let skip = psn.since(first);
                        let offset = reth.va.wrapping_sub(va);
                        skip >= 0
                            && skip as u32 + packets <= all
                            && rkey == reth.rkey
                            && offset == skip as u64 * u64::from(self.mtu)
                            && offset + u64::from(reth.len) <= u64::from(len)
                    }
                    Resource::Atomic { .. } => false,
                });
                if known {
                    let msn = self.msn;
                    self.replies.replay(
                        self.ticket,
                        Reply::Read {
                            first: psn,
                            packets,
                            sent: 0,
                            rkey: reth.rkey,
                            va: reth.va,
                            len: reth.len,
                            msn,
                        },
                    );
                }
            }
            Kind::CompareSwap | Kind::FetchAdd => {
                let found = self.resources.iter().find_map(|resource| match *resource {
                    Resource::Atomic { psn: first, id } if first == psn => Some(id),
                    _ => None,
                });
                if let Some(id) = found {
                    let msn = self.msn;
                    self.replies
                        .replay(self.ticket, Reply::Atomic { psn, id, msn });
                }
            }
            _ => {}
        }
    }

    /// Completes the receives whose data has settled.
    pub(crate) fn settle(&mut self, memory: &mut impl Memory) {
        if self.received.is_empty() && self.unsettled.is_empty() {
            return;
        }
        let settled = if self.ticket > 0 { memory.settled() } else { 0 };
        while self.unsettled.front().is_some_and(|(t, _)| *t <= settled) {
            self.unsettled.pop_front();
        }
        while let Some(&(ticket, received)) = self.received.front() {
            if ticket > settled {
                break;
            }
            self.received.pop_front();
            memory.received(received);
        }
    }

    /// The next packet to send, if there is one now.
    pub(crate) fn transmit(
        &mut self,
        memory: &mut impl Memory,
        counters: &mut Counters,
        out: &mut [u8],
    ) -> Option<usize> {
        self.settle(memory);
        match self
            .replies
            .transmit(memory, &mut self.results, counters, out)
        {
            Ok(len) => len,
            Err((refusal, psn)) => {
                match self.stopped {
                    None => {
                        let settled = if self.ticket > 0 { memory.settled() } else { 0 };
                        self.replies.clear();
                        self.take_back(settled, refusal, psn, counters);
                    }
                    Some(_) => self.replies.skip(),
                }
                None
            }
        }
    }
}

/// A positive acknowledgement; nobody keeps credits.
fn ack() -> AethKind {
    AethKind::Ack {
        credit: doorbell_wire::roce::Aeth::NO_CREDITS,
    }
}
