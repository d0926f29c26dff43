//! The receive side of a QP: count receives, consume one, write its CQE.
//! Initiators on any core deliver here, one at a time (try-lock). A WRITE with immediate consumes a receive at once and does not use its
//! memory, as it carries its own address. A SEND *takes* a receive, fills its memory, and completes it; meanwhile nobody else gets one.
//! Messages that come in packets take theirs one after the other too, but where a copy engine fills them, several wait to be completed.

use doorbell_wire::cqe::Kind;
use doorbell_wire::db::{self, Advance};
use doorbell_wire::{Chunk, Local, Qpn};

use super::cq::CqWriter;
use super::script::RecvScript;
use crate::fault::Fault;
use crate::qp::RqConfig;
use crate::raw::Shared;
use crate::record::Numbered;

/// The key that ends a receive WQE's list of pieces before its stride does (mlx5: the invalid key).
const END_KEY: u32 = 0x100;

/// A receive queue.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    config: RqConfig,
    cq: CqWriter,
    /// Receives posted, as far as the record was read.
    pi: u64,
    /// Receives consumed.
    ci: u64,
    /// Receives handed to an RDMA device.
    handed: u64,
    /// The pieces of memory of the receive that a SEND is filling.
    taken: Option<Vec<Local>>,
    /// It was taken by a message that comes in packets.
    packets: bool,
    /// Receives before that one, from `ci` on, that are filled and wait to be completed.
    filled: u64,
    /// The one behind those is to complete in error, with this.
    refused: Option<Fault>,
    /// Counts what was taken: who comes back late finds another number.
    serial: u64,
    /// Does the memory still belong to us? Closed before it is let go, by whoever holds the lock around this queue.
    open: bool,
    pub(super) script: Option<Box<RecvScript>>,
}

impl RecvQueue {
    pub(crate) fn new(config: RqConfig, qpn: Qpn) -> Self {
        Self {
            cq: CqWriter::new(&config.cq, qpn),
            config,
            pi: 0,
            ci: 0,
            handed: 0,
            taken: None,
            packets: false,
            filled: 0,
            refused: None,
            serial: 0,
            open: true,
            script: None,
        }
    }

    /// Receives, and pieces of one.
    pub(crate) fn shape(&self) -> (u32, u32) {
        (1 << self.config.log_entries, self.config.stride / 16)
    }

    /// Initialises record and CQ.
    ///
    /// # Safety
    /// The memory is mapped and nobody uses it.
    pub(crate) unsafe fn initialise(&mut self) {
        (self.pi, self.ci, self.handed, self.taken) = (0, 0, 0, None);
        if let Some(script) = &mut self.script {
            script.restart();
        }
        (self.filled, self.refused) = (0, None);
        // SAFETY: the caller's promise.
        unsafe {
            self.config.record.store_release(0);
            self.cq.initialise();
        }
    }

    /// Nothing touches the memory afterwards.
    pub(crate) fn close(&mut self) {
        self.open = false;
    }

    /// Reads the record. A record that jumps is taken as "nothing new": its QP has a poster gone wrong, which is not the initiator's fault.
    unsafe fn refresh(&mut self) {
        // SAFETY: the caller (of each caller) promises that the QP is attached, so that its record is mapped.
        let record = db::parse_record(unsafe { self.config.record.load_acquire() });
        if let Advance::Slots(n) =
            db::advance16(record, self.pi as u16, 1 << self.config.log_entries)
            && self.pi + u64::from(n) - self.ci <= 1 << self.config.log_entries
        {
            self.pi += u64::from(n);
        }
    }

    /// Receives posted and filled; and with `lacking`, the first whose CQE is not as it was written, with its words. Nothing once it is closed.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn standing(
        &mut self,
        lacking: bool,
    ) -> (Option<(u64, u64)>, Option<Numbered>) {
        if !self.open {
            return (None, None);
        }
        let from = self.ci.saturating_sub(1 << self.config.log_entries);
        // SAFETY: the caller's promise.
        let lacks = unsafe {
            self.refresh();
            lacking
                .then(|| {
                    self.cq
                        .first_lacking(from..self.ci, CqWriter::shows_receive)
                })
                .flatten()
        };
        (Some((self.pi, self.ci)), lacks)
    }

    /// Consumes a receive for an immediate; `false` if there is none.
    ///
    /// # Safety
    /// The QP's memory is mapped as long as this queue is open.
    pub(crate) unsafe fn deliver(&mut self, imm: u32, byte_cnt: u32) -> bool {
        // SAFETY: the caller's promise.
        if self.filled > 0 || !unsafe { self.has_one() } {
            return false;
        }
        // SAFETY: the caller's promise.
        unsafe { self.received(Kind::ResponderWriteImm, byte_cnt, imm) };
        true
    }

    /// Whether there is a receive that nobody has taken.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    unsafe fn has_one(&mut self) -> bool {
        if !self.open || self.taken.is_some() || self.refused.is_some() {
            return false;
        }
        let next = self.ci + self.filled;
        if self.pi == next {
            // SAFETY: the caller's promise.
            unsafe { self.refresh() };
        }
        self.pi != next
    }

    /// As [`Self::take`], for messages that come in packets: the one before, whose bytes have all been handed over, may still wait to be
    /// completed.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn take_next(&mut self) -> bool {
        let before = self.taken.take_if(|_| self.packets);
        self.filled += u64::from(before.is_some());
        // SAFETY: the caller's promise.
        if unsafe { self.take() } {
            self.packets = true;
            return true;
        }
        if before.is_some() {
            self.filled -= 1;
            self.taken = before;
        }
        false
    }

    /// Takes the next posted receive for a message; `false` if there is none, or it is taken. Its WQE is read here, once.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn take(&mut self) -> bool {
        // SAFETY: the caller's promise.
        if !unsafe { self.has_one() } {
            return false;
        }
        // SAFETY: as above; the receive is posted.
        self.taken = Some(unsafe { self.read(self.ci + self.filled) });
        self.packets = false;
        self.serial += 1;
        true
    }

    /// The pieces of receive number `number`. Its WQE is read here, once.
    ///
    /// # Safety
    /// As for [`Self::deliver`]; the receive is posted.
    unsafe fn read(&self, number: u64) -> Vec<Local> {
        let entries = 1u64 << self.config.log_entries;
        let stride = u64::from(self.config.stride);
        let at = (number & (entries - 1)) * stride;
        let mut pieces = Vec::new();
        for i in 0..stride / 16 {
            // SAFETY: the entry is one of the ring's, the chunk inside its stride; both are aligned to 16 bytes.
            let chunk = unsafe {
                let words: Shared<u64> = self.config.ring.byte_add((at + i * 16) as usize).cast();
                Chunk([words.load(), words.word(1).load()])
            };
            let piece = Local::parse(chunk);
            if piece.key.0 == END_KEY {
                break;
            }
            if piece.len != 0 {
                pieces.push(piece);
            }
        }
        pieces
    }

    /// The next receive that no device has yet: its number and its pieces. From then on an RDMA device has it.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn hand_on(&mut self) -> Option<(u64, Vec<Local>)> {
        if !self.open {
            return None;
        }
        if self.handed == self.pi {
            // SAFETY: the caller's promise.
            unsafe { self.refresh() };
        }
        if self.handed == self.pi {
            return None;
        }
        let number = self.handed;
        self.handed += 1;
        // SAFETY: the caller's promise; it is posted.
        Some((number, unsafe { self.read(number) }))
    }

    /// The device did not take it.
    pub(crate) fn take_back(&mut self, number: u64) {
        self.handed = number;
    }

    /// A device has filled a receive. Its receives complete in order.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn completed_by_device(
        &mut self,
        number: u64,
        write: bool,
        imm: Option<u32>,
        byte_cnt: u32,
    ) {
        if number == self.ci {
            self.taken = Some(Vec::new());
            // SAFETY: the caller's promise.
            unsafe { self.complete(write, imm, byte_cnt) };
        }
    }

    /// A device could not fill a receive: it completes in error.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn refused_by_device(&mut self, number: u64, fault: Fault) {
        if number == self.ci {
            self.taken = Some(Vec::new());
            // SAFETY: the caller's promise.
            unsafe { self.refuse(fault) };
        }
    }

    /// The number of what was taken last.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// Whether it is still that one that is taken.
    pub(crate) fn holds(&self, serial: u64) -> bool {
        self.open && self.taken.is_some() && self.serial == serial
    }

    /// The memory of the receive that is taken.
    pub(crate) fn pieces(&self) -> &[Local] {
        self.taken.as_deref().unwrap_or_default()
    }

    /// Gives it back: its message did not come to its end.
    pub(crate) fn untake(&mut self) {
        self.taken = None;
    }

    /// Puts bytes of a message that comes in packets into the receive that was taken; `offset` is where they are in the message. `put` puts
    /// some of them so far behind the beginning of a piece. What does not fit, or may not be written, completes the receive in error.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn scatter(
        &mut self,
        offset: u32,
        bytes: &[u8],
        mut put: impl FnMut(&Local, u64, &[u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let Some(pieces) = self.taken.as_deref().filter(|_| self.open) else {
            return Err(Fault::Destroyed);
        };
        let (mut skip, mut rest) = (u64::from(offset), bytes);
        let mut failed = None;
        for piece in pieces {
            let size = u64::from(piece.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at(((size - skip) as usize).min(rest.len()));
            if let Err(fault) = put(piece, skip, now) {
                failed = Some(fault);
                break;
            }
            (skip, rest) = (0, later);
        }
        if failed.is_none() && !rest.is_empty() {
            failed = Some(Fault::BadLength);
        }
        let Some(fault) = failed else {
            return Ok(());
        };
        // SAFETY: the caller's promise.
        unsafe { self.refuse(fault) };
        Err(fault)
    }

    /// Completes the oldest receive that was taken, by a WRITE with immediate (`write`) or a SEND.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn complete(&mut self, write: bool, imm: Option<u32>, byte_cnt: u32) {
        if !self.open || !(self.filled > 0 || self.taken.is_some()) {
            return;
        }
        match self.filled.checked_sub(1) {
            Some(left) => self.filled = left,
            None => self.taken = None,
        }
        let kind = match (write, imm) {
            (true, _) => Kind::ResponderWriteImm,
            (false, None) => Kind::ResponderSend,
            (false, Some(_)) => Kind::ResponderSendImm,
        };
        // SAFETY: the caller's promise.
        unsafe { self.received(kind, byte_cnt, imm.unwrap_or(0)) };
    }

    /// Writes the CQE of the next receive.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    unsafe fn received(&mut self, kind: Kind, byte_cnt: u32, imm: u32) {
        let at = self.ci;
        // SAFETY: the caller's promise.
        let write = |cq: &CqWriter| unsafe { cq.received(at, at as u16, kind, byte_cnt, imm) };
        match &mut self.script {
            None => write(&self.cq),
            Some(script) => script.cqe(at, self.cq, write),
        }
        self.ci += 1;
        if let (0, Some(fault)) = (self.filled, self.refused) {
            // SAFETY: the caller's promise.
            unsafe { self.fault(fault) };
        }
    }

    /// A script's completions whose time has come.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(super) unsafe fn script_due(&mut self, now: u64) {
        if let (true, Some(script)) = (self.open, &mut self.script) {
            // SAFETY: the caller's promise.
            unsafe { script.due(now, self.cq) };
        }
    }

    /// A script is played on this queue.
    pub(crate) fn adopt(&mut self, script: Option<Box<RecvScript>>) {
        self.script = script;
    }

    /// Completes the receive that was taken in error: it cannot hold the message. Its QP is to fail.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn refuse(&mut self, fault: Fault) {
        if !self.open || self.taken.take().is_none() {
            return;
        }
        self.refused = Some(fault);
        if self.filled == 0 {
            // SAFETY: the caller's promise.
            unsafe { self.fault(fault) };
        }
    }

    /// The error CQE of the next receive.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    unsafe fn fault(&mut self, fault: Fault) {
        self.refused = None;
        let (at, row) = (self.ci, fault.row());
        // SAFETY: the caller's promise.
        unsafe {
            self.cq.error(
                at,
                at as u16,
                Kind::ResponderError,
                0,
                row.syndrome,
                row.vendor,
            );
        }
        self.ci += 1;
    }

    /// Completes every posted receive in error, or (`release`) as if it had got a message of no bytes.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn flush(&mut self, release: bool) {
        if !self.open {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.refresh() };
        self.taken = None;
        let refused = self.refused.take().map(|f| (self.ci + self.filled, f));
        self.filled = 0;
        while self.ci != self.pi {
            if release {
                // SAFETY: the caller's promise.
                unsafe { self.received(Kind::ResponderSend, 0, 0) };
                continue;
            }
            let row = match refused {
                Some((at, fault)) if at == self.ci => fault.row(),
                _ => Fault::Flushed.row(),
            };
            // SAFETY: the caller's promise.
            unsafe {
                self.cq.error(
                    self.ci,
                    self.ci as u16,
                    Kind::ResponderError,
                    0,
                    row.syndrome,
                    row.vendor,
                )
            };
            self.ci += 1;
        }
    }
}
