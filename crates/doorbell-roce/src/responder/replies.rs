//! What the responder owes: acknowledgements and answers, in the order of the requests.

use std::collections::VecDeque;

use doorbell_wire::roce::{Aeth, AethKind, Bth, Ext, Header, Opcode, Place, Psn};

use crate::Config;
use crate::counters::Counters;
use crate::memory::{Memory, Refusal};

#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    Acknowledge {
        psn: Psn,
        msn: u32,
        kind: AethKind,
    },
    Read {
        first: Psn,
        packets: u32,
        sent: u32,
        rkey: u32,
        va: u64,
        len: u32,
        msn: u32,
    },
    Atomic {
        psn: Psn,
        id: u64,
        msn: u32,
    },
}

impl Reply {
    fn is_answer(&self) -> bool {
        !matches!(self, Self::Acknowledge { .. })
    }

    fn is_ack(&self) -> bool {
        matches!(
            self,
            Self::Acknowledge {
                kind: AethKind::Ack { .. },
                ..
            }
        )
    }

    /// The PSNs that it answers: first, and one after the last.
    fn range(&self) -> (Psn, Psn) {
        match *self {
            Self::Acknowledge { psn, .. } | Self::Atomic { psn, .. } => (psn, psn.add(1)),
            Self::Read { first, packets, .. } => (first, first.add(packets)),
        }
    }
}

#[derive(Debug)]
pub(super) struct Replies {
    mtu: u32,
    dest_qpn: u32,
    /// Each waits for its ticket: what it says has to be visible first.
    queue: VecDeque<(u64, Reply)>,
    /// PSNs of the answers in the queue that were asked for the first time: duplicates do not count against the peer's limit, since a
    /// network may double a request at any time.
    open: VecDeque<Psn>,
    /// Replies to duplicates beyond this are dropped: the peer asks again.
    limit: usize,
}

impl Replies {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            mtu: config.path_mtu.bytes(),
            dest_qpn: config.dest_qpn,
            queue: VecDeque::new(),
            open: VecDeque::new(),
            limit: usize::from(config.max_dest_rd_atomic) * 2 + 64,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Is all of it positive acknowledgements?
    pub(super) fn only_acknowledges(&self) -> bool {
        self.queue.iter().all(|(_, reply)| reply.is_ack())
    }

    /// Forgets everything that is to be said.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.open.clear();
    }

    /// Forgets the first.
    pub(super) fn skip(&mut self) {
        self.done();
    }

    /// Forgets what comes after `settled`, and says why as the last thing.
    pub(super) fn end(&mut self, settled: u64, psn: Psn, msn: u32, kind: AethKind) {
        self.queue.retain(|(ticket, _)| *ticket <= settled);
        self.open.clear();
        self.queue
            .push_back((0, Reply::Acknowledge { psn, msn, kind }));
    }

    /// READs and atomics not yet answered.
    pub(super) fn answers(&self) -> usize {
        self.open.len()
    }

    pub(super) fn push(&mut self, ticket: u64, reply: Reply) {
        if reply.is_answer() {
            self.open.push_back(reply.range().0);
        }
        self.queue.push_back((ticket, reply));
    }

    /// An acknowledgement; it takes the place of one just before it that waits for the same.
    pub(super) fn acknowledge(&mut self, ticket: u64, psn: Psn, msn: u32, kind: AethKind) {
        let reply = Reply::Acknowledge { psn, msn, kind };
        if let Some((waits, last)) = self.queue.back_mut()
            && *waits == ticket
            && last.is_ack()
            && reply.is_ack()
        {
            *last = reply;
            return;
        }
        if self.queue.len() < self.limit + (1 << 16) {
            self.queue.push_back((ticket, reply));
        }
    }

    /// An answer to a duplicate; it takes the place of what is still to be sent of the first one, before any later acknowledgement.
    pub(super) fn replay(&mut self, ticket: u64, reply: Reply) {
        let (begin, end) = reply.range();
        let same = |queued: &Reply| {
            let (first, last) = queued.range();
            queued.is_answer() && first.since(end) < 0 && begin.since(last) < 0
        };
        let Some(place) = self.queue.iter().position(|(_, queued)| same(queued)) else {
            // What was open before stays so until this, or a later, answer has been sent whole.
            if self.queue.len() < self.limit {
                self.queue.push_back((ticket, reply));
            }
            return;
        };
        let mut index = 0;
        self.queue.retain(|(_, queued)| {
            index += 1;
            index - 1 == place || !same(queued)
        });
        self.queue[place].1 = reply;
    }

    /// Writes the next packet. An error names the request that has to be refused, the first of the queue; nothing was written then.
    pub(super) fn transmit(
        &mut self,
        memory: &mut impl Memory,
        results: &mut VecDeque<(u64, Option<u64>)>,
        counters: &mut Counters,
        out: &mut [u8],
    ) -> Result<Option<usize>, (Refusal, Psn)> {
        loop {
            let Some(&(ticket, _)) = self.queue.front() else {
                return Ok(None);
            };
            let settled = if ticket > 0 { memory.settled() } else { 0 };
            if ticket > settled {
                return Ok(None);
            }
            // One ACK for all that have settled.
            while let (Some((_, first)), Some((next, second))) =
                (self.queue.front(), self.queue.get(1))
                && first.is_ack()
                && second.is_ack()
                && *next <= settled
            {
                self.queue.pop_front();
            }
            let Some(&(_, reply)) = self.queue.front() else {
                return Ok(None);
            };
            let len = match reply {
                Reply::Acknowledge { psn, msn, kind } => {
                    let ext = Ext::Aeth(Aeth { kind, msn });
                    self.emit(Opcode::ACK, psn, ext, out)
                }
                Reply::Atomic { psn, id, msn } => {
                    let Some(slot) = results.iter_mut().find(|(known, _)| *known == id) else {
                        // Forgotten: newer atomics took its place, so nobody can still be asking. What stands behind it goes now: an engine that is
                        // told "nothing" asks again when something comes, which may be a time-out of the other end.
                        self.done();
                        continue;
                    };
                    if slot.1.is_none() {
                        match memory.atomic_result(id) {
                            Ok(value) => slot.1 = value,
                            Err(refusal) => return Err((refusal, psn)),
                        }
                    }
                    let Some(value) = slot.1 else {
                        return Ok(None);
                    };
                    let aeth = Aeth {
                        kind: super::ack(),
                        msn,
                    };
                    self.emit(Opcode::ATOMIC_ACK, psn, Ext::AtomicAck(aeth, value), out)
                }
                Reply::Read { .. } => return self.transmit_read(reply, memory, counters, out),
            };
            if len == 0 {
                return Ok(None);
            }
            counters.tx_packets += 1;
            self.done();
            return Ok(Some(len));
        }
    }

    fn transmit_read(
        &mut self,
        reply: Reply,
        memory: &mut impl Memory,
        counters: &mut Counters,
        out: &mut [u8],
    ) -> Result<Option<usize>, (Refusal, Psn)> {
        let Reply::Read {
            first,
            packets,
            sent,
            rkey,
            va,
            len,
            msn,
        } = reply
        else {
            return Ok(None);
        };
        let psn = first.add(sent);
        let offset = sent * self.mtu;
        let last = sent + 1 == packets;
        let size = if last { len - offset } else { self.mtu };
        let place = match (sent == 0, last) {
            (true, true) => Place::Only,
            (true, false) => Place::First,
            (false, true) => Place::Last,
            (false, false) => Place::Middle,
        };
        let ext = match place {
            Place::Middle => Ext::None,
            _ => Ext::Aeth(Aeth {
                kind: super::ack(),
                msn,
            }),
        };
        let mut bth = Bth::new(Opcode::read_response(place), self.dest_qpn, psn);
        bth.pad = (size.wrapping_neg() & 3) as u8;
        let header = Header { bth, ext };
        let start = header.len();
        let body = start + size as usize;
        let total = body + usize::from(bth.pad);
        if out.len() < total {
            return Ok(None);
        }
        if size > 0 {
            let from = va.wrapping_add(u64::from(offset));
            match memory.read(rkey, from, len - offset, &mut out[start..body]) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(refusal) => return Err((refusal, psn)),
            }
        }
        header.emit(out);
        out[body..total].fill(0);
        counters.tx_packets += 1;
        counters.tx_bytes += u64::from(size);
        if last {
            self.done();
        } else if let Some((_, Reply::Read { sent, .. })) = self.queue.front_mut() {
            *sent += 1;
        }
        Ok(Some(total))
    }

    fn emit(&self, opcode: Opcode, psn: Psn, ext: Ext, out: &mut [u8]) -> usize {
        let bth = Bth::new(opcode, self.dest_qpn, psn);
        Header { bth, ext }.emit(out)
    }

    /// The first reply of the queue is done with, and so is every answer up to its end: the peer reads them in order.
    fn done(&mut self) {
        if let Some((_, reply)) = self.queue.pop_front()
            && reply.is_answer()
        {
            let end = reply.range().1;
            while self.open.front().is_some_and(|psn| psn.since(end) < 0) {
                self.open.pop_front();
            }
        }
    }
}
