//! A WQE becomes requests of the device and messages to the peer's engine, and waits for whatever it must not overtake.

use doorbell_verbs::abi;
use doorbell_verbs::efa::{SrdOp, SrdWork};
use doorbell_wire::{Ctrl, Local, Payload, Remote, Request, Width};

use super::wire::{Head, Kind};
use super::{Class, Entry, Link};
use crate::engine::Cx;
use crate::engine::exec::{MAX_MESSAGE, Outcome, SIGNAL};
use crate::engine::qp::EngineQp;
use crate::engine::verbs::post::{cut, is_full_for_now, refuses};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::{Access, End, Place};
use crate::verbs::{HEAD, INLINE, WINDOW};

/// What a WQE transfers.
#[derive(Clone, Copy)]
enum Transfer {
    Write { remote: Remote, imm: Option<u32> },
    Read { remote: Remote },
    Send { imm: Option<u32> },
}

impl Transfer {
    /// The right that local memory needs.
    fn need(self) -> Access {
        match self {
            Self::Read { .. } => Access::LOCAL_WRITE,
            Self::Write { .. } | Self::Send { .. } => Access::NONE,
        }
    }
}

impl Link {
    /// May one of this class be posted behind what is under way?
    fn may_go(&self, class: Class, alone: bool) -> bool {
        let nothing = self.writes + self.reads + self.messages == 0;
        match class {
            _ if alone => nothing,
            Class::Write => self.reads == 0,
            Class::Read => self.writes + self.messages == 0,
            Class::Message => self.writes + self.reads == 0,
        }
    }

    fn push(&mut self, entry: Entry, op: SrdOp, pieces: &[abi::Sge]) {
        self.works.push(SrdWork::new(self.posted, op, pieces));
        *self.counted(entry.class) += 1;
        let at = self.index(self.posted);
        self.entries[at] = entry;
        self.posted += 1;
    }

    /// A remote read or write.
    fn transfer(&mut self, at: u64, last: bool, op: SrdOp, piece: abi::Sge) {
        let class = match op {
            SrdOp::Read { .. } => Class::Read,
            _ => Class::Write,
        };
        let entry = Entry {
            at,
            last,
            class,
            answered: true,
            ..Entry::NONE
        };
        self.push(entry, op, &[piece]);
    }

    /// Is the message of that number over?
    fn is_answered(&self, seq: u64) -> bool {
        let number = self.asks[seq as usize % WINDOW];
        number < self.done || self.entries[self.index(number)].is_over()
    }

    /// A message: its head, and a piece of memory behind it. `false`: as many as may be are unanswered.
    fn message(&mut self, entry: Entry, head: Head, payload: Option<abi::Sge>) -> bool {
        // Oldest first, since the peer's answers may overtake each other.
        while self.oldest < self.asked && self.is_answered(self.oldest) {
            self.oldest += 1;
        }
        if self.asked - self.oldest >= WINDOW as u64 || self.room() == 0 {
            return false;
        }
        let Some(peer) = self.nic.peer() else {
            return false;
        };
        let number = self.index(self.posted);
        let Some((to, place)) = self.nic.heads.place(number, HEAD) else {
            return false;
        };
        let head = Head {
            token: peer.ours,
            seq: self.asked,
            ..head
        }
        .encode();
        // SAFETY: the place is this request's until it is over.
        unsafe { core::ptr::copy_nonoverlapping(head.as_ptr(), to, HEAD) };
        self.asks[self.asked as usize % WINDOW] = self.posted;
        self.asked += 1;
        match payload {
            Some(payload) => self.push(entry, SrdOp::Send, &[place, payload]),
            None => self.push(entry, SrdOp::Send, &[place]),
        }
        true
    }

    /// All pieces of a payload as the device knows them; inline ones go by way of the next request's place, behind the head.
    fn gather(&mut self, inner: &Inner, payload: Payload<'_>, need: Access) -> Result<(), Fault> {
        let number = self.index(self.posted);
        let place = self.nic.heads.place(number, HEAD + INLINE);
        let place = place.map(|(to, sge)| {
            let addr = sge.addr + HEAD as u64;
            (to.wrapping_add(HEAD), abi::Sge { addr, ..sge })
        });
        // SAFETY: the place is the next request's until it is over.
        let copied = unsafe {
            self.keys
                .gather(inner, payload, need, place, &mut self.pieces)
        }?;
        // The place belongs to one request, so such a payload has to be one.
        let one = self.nic.part.min(self.nic.device.max_rdma as usize);
        if copied != 0 && (self.pieces.len() > 1 || copied > one) {
            return Err(Fault::Unsupported);
        }
        Ok(())
    }

    /// The piece that byte `from` of the message is in, from there on, of `most` bytes at most.
    fn piece_at(&self, from: u64, most: u64) -> Option<abi::Sge> {
        let mut one = [abi::Sge::default()];
        let (count, _) = cut(&self.pieces, from, most, &mut one);
        (count == 1).then_some(one[0])
    }
}

impl EngineQp {
    /// Hands a request to the device, or to the peer's engine. Every local piece is checked first; the rest is the peer's to check.
    pub(in crate::engine) fn post_srd(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        request: Request<'_>,
    ) -> Result<Outcome, Fault> {
        if self.cold.flight.is_full() {
            return Ok(self.hold());
        }
        let Some(link) = self.srd() else {
            return Err(Fault::NotConnected);
        };
        link.keys.refresh(cx.inner);
        let local_only = matches!(
            request,
            Request::Nop | Request::Wait { .. } | Request::Dump { .. }
        );
        if (link.greeted.is_some() || link.broken) && !local_only {
            return Ok(self.hold());
        }
        let (kind, remote, local, width, operands) = match request {
            Request::Write { remote, local, imm } => {
                return self.post_transfer(cx, ctrl, Transfer::Write { remote, imm }, local);
            }
            Request::Read { remote, local } => {
                if !link.nic.qp.reads() {
                    return Err(Fault::Unsupported);
                }
                return self.post_transfer(cx, ctrl, Transfer::Read { remote }, local);
            }
            Request::Send { local, imm } => {
                return self.post_transfer(cx, ctrl, Transfer::Send { imm }, local);
            }
            Request::Nop => return Ok(self.in_order(ctrl, 0)),
            Request::Wait { index, cqn } => return self.wait_in_order(cx, ctrl, index, cqn),
            Request::Dump { local } => {
                link.keys.piece(cx.inner, &local, Access::NONE)?;
                return Ok(self.in_order(ctrl, local.len));
            }
            Request::FetchAdd { remote, local, add } => {
                // No carry is dropped.
                (Kind::Add, remote, local, Width::Eight, [add, 0, 0, 0])
            }
            Request::CompareSwap {
                remote,
                local,
                swap,
                compare,
            } => {
                let operands = [swap, compare, u64::MAX, u64::MAX];
                (Kind::Swap, remote, local, Width::Eight, operands)
            }
            Request::MaskedFetchAdd {
                remote,
                local,
                width,
                add,
                boundary,
            } => (Kind::Add, remote, local, width, [add, boundary, 0, 0]),
            Request::MaskedCompareSwap {
                remote,
                local,
                width,
                swap,
                compare,
                swap_mask,
                compare_mask,
            } => {
                let operands = [swap, compare, swap_mask, compare_mask];
                (Kind::Swap, remote, local, width, operands)
            }
        };
        let mut head = Head::new(kind, 0, 0);
        (head.addr, head.rkey) = (remote.addr, remote.key.0);
        (head.width, head.operands) = (width, operands);
        self.post_atomic_message(cx, ctrl, head, local)
    }

    fn post_atomic_message(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        head: Head,
        local: Local,
    ) -> Result<Outcome, Fault> {
        if local.len != head.width.bytes() {
            return Err(Fault::BadLength);
        }
        // Whether it may be written is known before the word changes.
        sink(cx.inner, self.cold.shared.pd, &local)?;
        let (at, byte_cnt) = (self.exec, head.width.bytes());
        let Some(link) = self.srd() else {
            return Err(Fault::NotConnected);
        };
        let entry = Entry {
            at,
            last: true,
            class: Class::Message,
            sink: Some((local, head.width)),
            ..Entry::NONE
        };
        if !link.may_go(Class::Message, ctrl.fenced()) || !link.message(entry, head, None) {
            return Ok(self.hold());
        }
        Ok(self.under_way(ctrl, byte_cnt))
    }

    fn post_transfer(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        what: Transfer,
        payload: Payload<'_>,
    ) -> Result<Outcome, Fault> {
        let total = payload.len();
        if total > MAX_MESSAGE {
            return Err(Fault::BadLength);
        }
        let at = self.exec;
        let Some(link) = self.srd() else {
            return Err(Fault::NotConnected);
        };
        let inline = matches!(payload, Payload::Inline(_));
        let (class, alone) = match what {
            Transfer::Write { .. } => {
                let short = inline || (total <= SIGNAL.into() && !link.nic.port.config().relaxed);
                (Class::Write, short || ctrl.fenced())
            }
            Transfer::Read { .. } => (Class::Read, ctrl.fenced()),
            Transfer::Send { .. } => (Class::Message, ctrl.fenced()),
        };
        let begun = link.partly.filter(|(slot, _)| *slot == at);
        let mut from = begun.map_or(0, |(_, from)| from);
        if link.room() == 0 || (begun.is_none() && total != 0 && !link.may_go(class, alone)) {
            return Ok(self.hold());
        }
        link.partly = None;
        // Not for an immediate whose bytes have gone; but one without bytes must not find the pieces of the message before.
        if from < total || total == 0 {
            link.gather(cx.inner, payload, what.need())?;
        }
        let done = match what {
            // A message of no bytes opens no key, and nothing is asked of the device.
            Transfer::Write { imm: None, .. } | Transfer::Read { .. } if total == 0 => {
                return Ok(self.in_order(ctrl, 0));
            }
            Transfer::Write { remote, imm } => {
                let whole = imm.is_none();
                let written = link.cut(at, &mut from, total, whole, |addr| SrdOp::Write {
                    addr: remote.addr.wrapping_add(addr),
                    rkey: remote.key.0,
                });
                let fenced = ctrl.fenced();
                written && imm.is_none_or(|imm| link.immediate(at, imm, total as u32, fenced))
            }
            Transfer::Read { remote } => link.cut(at, &mut from, total, true, |addr| SrdOp::Read {
                addr: remote.addr.wrapping_add(addr),
                rkey: remote.key.0,
            }),
            Transfer::Send { imm } => link.parts(at, &mut from, total, imm, alone),
        };
        if !done {
            if from != 0 {
                link.partly = Some((at, from));
            }
            return Ok(self.hold());
        }
        Ok(self.under_way(ctrl, total as u32))
    }

    /// At the end of a turn, and whenever there is something to say: what was posted goes to the device.
    pub(in crate::engine) fn submit_srd(&mut self, inner: &Inner) {
        let Some(link) = self.srd() else { return };
        if link.works.is_empty() {
            return;
        }
        // SAFETY: one core posts to this queue pair; regions are taken from the device before their memory goes, and the places live as long
        // as the queue pair.
        let errno = match unsafe { link.nic.post(&link.works) } {
            Ok(()) => {
                link.works.clear();
                link.refused = None;
                return;
            }
            Err(errno) => errno,
        };
        // It took none of them: they are offered again, for a while.
        if is_full_for_now(errno, &mut link.refused) {
            return;
        }
        link.works.clear();
        refuses(inner, &link.nic.port, &link.nic, errno);
        self.fail_flight(inner, Fault::PortDown);
    }
}

impl Link {
    /// Posts the bytes from `from` on as remote reads or writes. `whole`: with the last of them the WQE is complete. `false`: no room for the rest.
    fn cut(
        &mut self,
        at: u64,
        from: &mut u64,
        total: u64,
        whole: bool,
        op: impl Fn(u64) -> SrdOp,
    ) -> bool {
        let most = u64::from(self.nic.device.max_rdma.max(1));
        while *from < total {
            if self.room() == 0 {
                return false;
            }
            let Some(piece) = self.piece_at(*from, most) else {
                return false;
            };
            let end = *from + u64::from(piece.length);
            self.transfer(at, whole && end == total, op(*from), piece);
            *from = end;
        }
        true
    }

    /// The end of a WRITE with immediate, when its bytes are in place. `false`: they are not.
    fn immediate(&mut self, at: u64, imm: u32, total: u32, alone: bool) -> bool {
        let entry = Entry {
            at,
            last: true,
            class: Class::Message,
            ..Entry::NONE
        };
        let mut head = Head::new(Kind::Immediate, 0, 0);
        (head.imm, head.total) = (Some(imm), total);
        self.may_go(Class::Message, alone) && self.message(entry, head, None)
    }

    /// Posts the parts of a SEND from `from` on. `false`: the rest has to wait.
    fn parts(
        &mut self,
        at: u64,
        from: &mut u64,
        total: u64,
        imm: Option<u32>,
        alone: bool,
    ) -> bool {
        if total == 0 && !self.may_go(Class::Message, alone) {
            return false;
        }
        loop {
            let piece = self.piece_at(*from, self.nic.part as u64);
            let len = piece.map_or(0, |p| p.length);
            let end = *from + u64::from(len);
            let entry = Entry {
                at,
                last: end == total,
                class: Class::Message,
                ..Entry::NONE
            };
            let mut head = Head::new(Kind::Send, 0, 0);
            (head.imm, head.total) = (imm, total as u32);
            (head.offset, head.count) = (*from as u32, len);
            if !self.message(entry, head, piece) {
                return false;
            }
            *from = end;
            if end == total {
                return true;
            }
        }
    }
}

/// Where the old value of an atomic goes, or a piece of a receive.
pub(super) fn sink(inner: &Inner, pd: u32, local: &Local) -> Result<Place, Fault> {
    // SAFETY: this is an engine in a round, and what is found is used in this round or held by a copy job.
    let span = unsafe {
        inner
            .regions
            .resolve(End::Local, local.key.0, pd, Access::LOCAL_WRITE)
    }?;
    span.at(local.addr, local.len.into())
        .ok_or(Fault::LkeyRange)
}
