//! The engine's half of a QP: where its rings are, how far it has got, what it waits for.
//! Hot fields first; everything that only slow paths need is behind a box.

use std::sync::Arc;
use std::time::Instant;

use doorbell_device::layout::{ErrorKind, ErrorWord, NicHandler};
use doorbell_wire::cqe::Kind;
use doorbell_wire::db::{self, Advance};
use doorbell_wire::{Ctrl, Opcode, Qpn, Syndrome, Vendor};

use super::cq::CqWriter;
use super::keys::Keys;
use crate::events::Event;
use crate::fault::Fault;
use crate::hca::Inner;
use crate::link::RemoteQp;
use crate::qp::shared::QpShared;
use crate::qp::{DoorbellWord, OnError, QpConfig, QpState};
use crate::raw::{Shared, fill_words};
use crate::record::{self, Store, Tape};
use crate::script::run::NEVER;

/// Where requests go.
#[derive(Debug)]
pub(crate) enum Target {
    None,
    Loopback(Arc<QpShared>),
    Peer(Arc<dyn RemoteQp>),
    Roce(Box<super::roce::Link>),
    Verbs(Box<super::verbs::Link>),
    /// An RDMA device of another kind: an EFA.
    Srd(Box<super::verbs::srd::Link>),
}

/// What a QP waits for.
#[derive(Debug)]
pub(super) enum Park {
    /// WAIT: until that QP has completed past `index`.
    Wait { on: Arc<QpShared>, index: u32 },
    /// The slot was rung but its control segment is not there yet.
    Stale { since: Instant },
    /// The target has no receive for an immediate.
    Receive { since: Instant },
    /// A long copy, done in slices.
    Slices(Box<super::slices::Slices>),
    /// Copies of the DMA engine.
    Copies,
}

/// A QP as its core has it.
pub(crate) struct EngineQp {
    /// First word of the send ring.
    pub(super) ring: Shared<u64>,
    /// Slots - 1.
    pub(super) mask: u64,
    /// Next slot to execute; everything below is executed (and completed, unless copies are under way).
    pub(super) exec: u64,
    /// Slots announced.
    pub(super) pi: u64,
    /// First eight bytes of a one-slot WRITE (READ, FETCH_ADD) of this QP, with index 0.
    pub(super) want_write: u64,
    pub(super) want_read: u64,
    pub(super) want_add: u64,
    pub(super) cq: CqWriter,
    /// The newest signalled WQE that a collapsed CQE does not show yet: its slot + 1, and the CQE's opcode word.
    pub(super) signalled: u64,
    pub(super) signalled_sop: u32,
    /// CQE opcode words of the hot opcodes.
    pub(super) sop_write: u32,
    pub(super) sop_read: u32,
    pub(super) sop_add: u32,
    /// Counted in this turn.
    pub(super) bytes: u64,
    pub(super) wqes: u64,
    /// Before this slot a fault script is asked; beyond every slot if there is none.
    pub(super) stop_at: u64,
    /// A doorbell that announces this slot is the script's.
    pub(super) bell_stop: u64,
    /// The script has something in mind for a CQE.
    pub(super) tampered: bool,
    pub(super) keys: Keys,
    /// Our table's epoch and the target's stamp when the keys were cached.
    pub(super) stamps: (u64, (u64, u64)),
    bell: Shared<u64>,
    pub(super) bell_seen: u64,
    ring_kind: RingKind,
    /// Turns without anything to do.
    pub(super) idle_turns: u32,
    pub(super) listed: bool,
    /// What the doorbell said when it was last looked at, until the turn.
    pub(super) peeked: Option<Rung>,
    pub(super) park: Option<Park>,
    /// What is written down about it.
    pub(super) tape: Tape,
    pub(super) cold: Box<ColdQp>,
}

/// How a ring is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingKind {
    Producer,
    Doorbell,
    Record,
}

/// What slow paths need.
pub(super) struct ColdQp {
    pub(super) config: QpConfig,
    pub(super) shared: Arc<QpShared>,
    pub(super) target: Target,
    /// Being destroyed: errors are no events any more.
    pub(super) quiet: bool,
    /// Since when the target has not been ready.
    pub(super) unready_since: Option<Instant>,
    pub(super) copies: super::jobs::CopyQueue,
    /// The QP whose receive a SEND of ours has taken, and the number of what was taken.
    pub(super) holding: Option<(Arc<QpShared>, u64)>,
    /// WQEs that are on their way as packets.
    pub(super) flight: super::roce::Flight,
    /// The queue pair of an RDMA device that waits for the peer's description.
    pub(super) prepared: Target,
    pub(super) script: Option<Box<super::script::QpScript>>,
    /// Messages to and from another process.
    pub(super) mail: Option<Box<super::mail::Mail>>,
    /// Copies of a connection's memory, if a copy engine has some to make.
    pub(super) staged: Option<Box<super::roce::Staged>>,
}

// SAFETY: the raw pointers inside are addresses of registered memory (see `keys`), used only by the core that owns the QP.
unsafe impl Send for EngineQp {}

/// What a doorbell said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rung {
    Nothing,
    More,
    Bad(Fault),
}

impl EngineQp {
    /// Takes a checked configuration and initialises its memory.
    ///
    /// # Safety
    /// As for [`Hca::create_qp`](crate::Hca::create_qp).
    pub(crate) unsafe fn new(
        config: QpConfig,
        shared: Arc<QpShared>,
        record: Option<&Arc<Store>>,
    ) -> Self {
        let qpn = shared.qpn;
        let cq = CqWriter::new(&config.cq, qpn);
        let first =
            |opcode: Opcode, ds: u8| doorbell_wire::seg::ctrl(0, opcode, 0, qpn, ds, 0, 0).0[0];
        let (bell, ring_kind) = match (&config.doorbell, config.handler) {
            // The record is kept where a doorbell word's address is, but only ever loaded as the 32-bit word that it is.
            (_, NicHandler::DoorbellRecord) if config.poll_record => (
                config
                    .record
                    .expect("checked: poll_record has a record")
                    .cast(),
                RingKind::Record,
            ),
            (DoorbellWord::At(word), handler) => (*word, RingKind::of(handler)),
            (DoorbellWord::Slot(slot), handler) => (slot.word(), RingKind::of(handler)),
        };
        let mut qp = Self {
            ring: config.sq.cast(),
            mask: u64::from(config.depth()) - 1,
            exec: 0,
            pi: 0,
            want_write: first(Opcode::RdmaWrite, 3),
            want_read: first(Opcode::RdmaRead, 3),
            want_add: first(Opcode::FetchAdd, 4),
            signalled: 0,
            signalled_sop: 0,
            sop_write: cq.sop(Opcode::RdmaWrite as u8),
            sop_read: cq.sop(Opcode::RdmaRead as u8),
            sop_add: cq.sop(Opcode::FetchAdd as u8),
            cq,
            bytes: 0,
            wqes: 0,
            stop_at: NEVER,
            bell_stop: NEVER,
            tampered: false,
            keys: Keys::EMPTY,
            stamps: (0, (0, 0)),
            bell,
            bell_seen: 0,
            ring_kind,
            idle_turns: 0,
            listed: false,
            peeked: None,
            park: None,
            tape: Tape::new(record, shared.core),
            cold: Box::new(ColdQp {
                config,
                shared,
                target: Target::None,
                quiet: false,
                unready_since: None,
                copies: super::jobs::CopyQueue::default(),
                holding: None,
                flight: super::roce::Flight::default(),
                prepared: Target::None,
                script: None,
                mail: None,
                staged: None,
            }),
        };
        // SAFETY: the caller's promise: mapped, and nobody uses it yet.
        unsafe { qp.initialise() };
        qp
    }

    /// Indexes to zero, memory to its initial state.
    ///
    /// # Safety
    /// The QP's memory is mapped and nobody else uses it.
    pub(super) unsafe fn initialise(&mut self) {
        (self.exec, self.pi, self.signalled, self.bell_seen) = (0, 0, 0, 0);
        self.keys = Keys::EMPTY;
        self.park = None;
        self.give_back();
        self.peeked = None;
        self.cold.unready_since = None;
        self.cold.flight.clear();
        let config = &self.cold.config;
        // SAFETY: the caller's promise, and the sizes that `QpConfig::check` checked.
        unsafe {
            // Zeros never pass for a WQE of this QP (its number is not 0), so WQEs of an earlier life are not taken for new ones.
            fill_words(self.ring, (self.mask as usize + 1) * 8, 0);
            self.cq.initialise();
            if let Some(record) = config.record {
                record.store_release(0);
            }
            if let Some(word) = config.error_word {
                word.store_release(0);
            }
            match &config.doorbell {
                DoorbellWord::At(word) => word.store_release(0),
                DoorbellWord::Slot(slot) => slot.word().store_release(0),
            }
            if let Some(recv) = &self.cold.shared.recv {
                recv.lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner)
                    .initialise();
            }
        }
        let shared = &self.cold.shared;
        shared.clear_error();
        shared
            .newest_cqe
            .store(0, core::sync::atomic::Ordering::Relaxed);
        shared
            .cq
            .count
            .store(0, core::sync::atomic::Ordering::Release);
        self.publish_indexes();
        self.restart_script();
        self.cold.shared.set_state(QpState::Reset);
        self.tape.rewind();
        self.changed(QpState::Reset);
    }

    /// Writes a new state down.
    pub(super) fn changed(&mut self, state: QpState) {
        self.tell_state(state);
        self.tape
            .event(record::Kind::State, self.exec, 0, state as u32);
    }

    pub(super) fn qpn(&self) -> Qpn {
        self.cold.shared.qpn
    }

    #[inline(always)]
    pub(super) fn per_slot(&self) -> bool {
        !self.cq.is_collapsed()
    }

    /// Looks at the doorbell word. One load if nothing happened.
    #[inline(always)]
    pub(super) fn look(&mut self) -> Rung {
        // SAFETY: the word is mapped while the QP is attached.
        let raw = unsafe { self.read_bell() };
        if raw == self.bell_seen {
            Rung::Nothing
        } else {
            self.rung(raw)
        }
    }

    /// The doorbell word, the producer word or the record.
    ///
    /// # Safety
    /// The QP is attached.
    #[inline(always)]
    pub(super) unsafe fn read_bell(&self) -> u64 {
        // SAFETY: the caller's promise. Acquire: the WQEs were written before it.
        unsafe {
            match self.ring_kind {
                RingKind::Record => u64::from(self.bell.cast::<u32>().load_acquire()),
                RingKind::Producer | RingKind::Doorbell => self.bell.load_acquire(),
            }
        }
    }

    fn rung(&mut self, raw: u64) -> Rung {
        self.bell_seen = raw;
        let depth = self.mask as u32 + 1;
        let advance = match self.ring_kind {
            RingKind::Producer => db::advance64(raw, self.pi, depth),
            RingKind::Record => db::advance16(db::parse_record(raw as u32), self.pi as u16, depth),
            RingKind::Doorbell => {
                let (pi, qpn) = db::parse(raw);
                if qpn != self.qpn() {
                    return Rung::Bad(Fault::BadQpn);
                }
                db::advance16(pi as u16, self.pi as u16, depth)
            }
        };
        match advance {
            Advance::None => Rung::Nothing,
            // The producer may not run further ahead than the ring is deep, whatever it rang before.
            Advance::Slots(n) if self.pi + u64::from(n) - self.completed() <= u64::from(depth) => {
                let mut n = u64::from(n);
                if self.pi + n > self.bell_stop {
                    n = self.script_bell(n);
                    if n == 0 {
                        return Rung::Nothing;
                    }
                }
                self.pi += n;
                self.tape.rung();
                let counters = &self.cold.shared.counters;
                counters.doorbells.add(1);
                counters.slots_rung.add(n);
                Rung::More
            }
            Advance::Slots(_) | Advance::Jump => Rung::Bad(Fault::BadDoorbell),
        }
    }

    /// Slots completed: what the poster may reuse.
    #[inline(always)]
    pub(super) fn completed(&self) -> u64 {
        let under_way = self
            .cold
            .copies
            .oldest()
            .or_else(|| self.cold.flight.oldest());
        under_way.unwrap_or(self.exec)
    }

    /// Something rung and not executed, or copies under way?
    #[inline(always)]
    pub(super) fn has_work(&self) -> bool {
        self.exec != self.pi || !self.cold.copies.is_empty() || self.has_mail()
    }

    /// Are messages to another process under way?
    #[inline(always)]
    pub(super) fn has_mail(&self) -> bool {
        !self.cold.flight.is_empty() && matches!(self.cold.target, Target::Peer(_))
    }

    /// End of a turn: the collapsed CQE, the completion count, the counters.
    #[inline(always)]
    pub(super) fn publish(&mut self) {
        if self.signalled != 0 {
            if !self.per_slot() {
                let (at, sop) = (self.signalled - 1, self.signalled_sop);
                self.cold
                    .shared
                    .newest_cqe
                    .store(self.signalled, core::sync::atomic::Ordering::Relaxed);
                // SAFETY: the QP is attached, so its CQ is mapped.
                let write = |cq: &CqWriter| unsafe { cq.ok(at, sop) };
                if !(self.tampered && self.script_cqe(at, write)) {
                    write(&self.cq);
                }
                self.cold.shared.counters.cqes.add(1);
            }
            self.signalled = 0;
        }
        let shared = &self.cold.shared;
        // Release: whoever WAITs for this count sees the data of what it counts.
        shared.cq.count.store(
            self.completed() as u32,
            core::sync::atomic::Ordering::Release,
        );
        let counters = &shared.counters;
        counters.wqes.add(self.wqes);
        counters.bytes.add(self.bytes);
        if self.per_slot() {
            counters.cqes.add(self.wqes);
        }
        let (wqes, bytes) = (self.wqes, self.bytes);
        (self.wqes, self.bytes) = (0, 0);
        self.publish_indexes();
        self.tape
            .turn(self.pi, self.exec, self.completed(), wqes, bytes);
    }

    #[inline(always)]
    pub(super) fn publish_indexes(&self) {
        use core::sync::atomic::Ordering::Relaxed;
        self.cold.shared.producer.store(self.pi, Relaxed);
        self.cold.shared.consumer.store(self.completed(), Relaxed);
    }

    /// Completes the WQE at `at` successfully.
    #[inline(always)]
    pub(super) fn complete(&mut self, at: u64, sop: u32, signalled: bool, byte_cnt: u32) {
        if self.per_slot() {
            // SAFETY: the QP is attached, so its CQ is mapped.
            let write = |cq: &CqWriter| unsafe { cq.ok_with_count(at, sop, byte_cnt) };
            if !(self.tampered && self.script_cqe(at, write)) {
                write(&self.cq);
            }
        } else if signalled {
            (self.signalled, self.signalled_sop) = (at + 1, sop);
        }
        self.wqes += 1;
        self.bytes += u64::from(byte_cnt);
    }

    /// Fails the WQE at the head (or the QP as a whole) and flushes what was rung after it.
    #[cold]
    pub(super) fn fail(&mut self, inner: &Inner, fault: Fault, ctrl: Option<Ctrl>) {
        let kind = match fault {
            Fault::Destroyed => Some(ErrorKind::Closed),
            Fault::EngineDown => Some(ErrorKind::EngineDown),
            _ => None,
        };
        self.fail_with(inner, fault.syndrome(), fault.vendor(), ctrl, kind);
    }

    /// Fails it with a syndrome of somebody's choice.
    #[cold]
    pub(super) fn fail_as(
        &mut self,
        inner: &Inner,
        syndrome: Syndrome,
        vendor: Vendor,
        ctrl: Option<Ctrl>,
    ) {
        self.fail_with(inner, syndrome, vendor, ctrl, None);
    }

    fn fail_with(
        &mut self,
        inner: &Inner,
        syndrome: Syndrome,
        vendor: Vendor,
        ctrl: Option<Ctrl>,
        kind: Option<ErrorKind>,
    ) {
        self.publish();
        self.park = None;
        self.give_back();
        let opcode = ctrl.map_or(0, |c| c.opcode);
        // A per-slot CQ has a CQE for every slot; otherwise the WQE is skipped as a whole, as far as it was rung.
        let slots = match ctrl {
            Some(ctrl) if !self.per_slot() => u64::from(ctrl.slots().max(1)),
            _ => 1,
        };
        let mut word = ErrorWord::completion(syndrome.0, vendor.0, opcode, self.exec as u16);
        if let Some(kind) = kind {
            word = ErrorWord(word.0 & !0xff | kind as u64);
        }
        // The host is told before anything lets a kernel go on.
        self.announce(inner, word, opcode, syndrome, vendor);
        self.write_error(self.exec, opcode, syndrome, vendor);
        self.exec = (self.exec + slots).min(self.pi);
        self.flush();
        self.end_waits();
    }

    /// Ends what kernels wait for besides completions of the send queue: receives, and with [`OnError::Release`] signals.
    pub(super) fn end_waits(&mut self) {
        let release = self.releases();
        if let Some(recv) = &self.cold.shared.recv {
            let mut recv = recv
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            // SAFETY: the QP is attached, so its memory is mapped.
            unsafe { recv.flush(release) };
        }
        if release {
            for signals in &self.cold.config.signals {
                signals.release();
            }
        }
    }

    /// Are foreign kernels let go after an error?
    pub(super) fn releases(&self) -> bool {
        self.cold.config.on_error == OnError::Release
    }

    /// First error, state, error word and event, in the order that a waiter needs: who sees the state finds the error, and the CQE comes after
    /// all of them. (To stop a device's queue pair is a command to the device, which may take long.)
    fn announce(
        &mut self,
        inner: &Inner,
        word: ErrorWord,
        opcode: u8,
        syndrome: Syndrome,
        vendor: Vendor,
    ) {
        let shared = &self.cold.shared;
        let first = shared.record_error(word);
        shared.set_state(QpState::Error);
        if let Target::Peer(peer) = &self.cold.target {
            peer.detach();
        }
        super::verbs::stop(&self.cold.target);
        if !first {
            return;
        }
        let value = u32::from(syndrome.0) | u32::from(vendor.0) << 8 | u32::from(opcode) << 16;
        self.tape.failed(word);
        self.tape.event(record::Kind::Error, self.exec, 1, value);
        self.tell_state(QpState::Error);
        let shared = &self.cold.shared;
        if let Some(at) = self.cold.config.error_word {
            // SAFETY: the word is mapped while the QP is attached.
            unsafe { at.store_release(word.0) };
        }
        if self.cold.quiet {
            return;
        }
        inner.cores[shared.core].counters.errors.add(1);
        inner.events.push(Event::QpError {
            qpn: shared.qpn,
            syndrome,
            vendor,
            opcode,
            wqe_index: word.wqe_index(),
        });
        tracing::debug!(qpn = %shared.qpn, index = word.wqe_index(), opcode, "queue pair to error: {syndrome}; {vendor}");
    }

    fn write_error(&mut self, at: u64, opcode: u8, syndrome: Syndrome, vendor: Vendor) {
        let release = self.releases();
        let write = |cq: &CqWriter| {
            // SAFETY: the QP is attached, so its CQ is mapped.
            unsafe {
                if release {
                    cq.ok(at, cq.sop(opcode));
                } else {
                    let (index, kind) = (at as u16, Kind::RequesterError);
                    cq.error(at, index, kind, opcode, syndrome, vendor);
                }
            }
        };
        if !(self.tampered && self.script_cqe(at, write)) {
            write(&self.cq);
        }
        self.cold.shared.counters.cqes.add(1);
    }

    /// In the error state: completes whatever was rung, without looking at it.
    pub(super) fn flush(&mut self) {
        if self.releases() {
            self.take_record();
        }
        let (from, to) = (self.exec, self.pi);
        if from != to {
            let row = Fault::Flushed.row();
            // A collapsed CQE only ever shows the newest.
            let first = if self.per_slot() { from } else { to - 1 };
            for at in first..to {
                self.write_error(at, 0, row.syndrome, row.vendor);
            }
            self.cold.shared.counters.flushed.add(to - from);
            self.exec = to;
            self.tape.flushed(from, to);
        }
        if self.releases() {
            // WAITs of companions are let through as well; they too are announced as failed first.
            self.cold
                .shared
                .cq
                .count
                .store(self.exec as u32, core::sync::atomic::Ordering::Release);
        }
        self.publish_indexes();
    }

    /// A kernel may wait for what a lost doorbell announced: the record has it too.
    fn take_record(&mut self) {
        let Some(record) = self.cold.config.record else {
            return;
        };
        // SAFETY: the QP is attached, so its record is mapped.
        let record = db::parse_record(unsafe { record.load_acquire() });
        let depth = self.mask as u32 + 1;
        if let Advance::Slots(n) = db::advance16(record, self.pi as u16, depth)
            && self.pi + u64::from(n) - self.completed() <= u64::from(depth)
        {
            self.pi += u64::from(n);
        }
    }

    /// Only the words that tell waiters: what may be done about a QP whose engine has just panicked.
    pub(super) fn mark_down(&mut self, inner: &Inner) {
        let row = Fault::EngineDown.row();
        let word = ErrorWord(
            ErrorWord::completion(row.syndrome.0, row.vendor.0, 0, self.exec as u16).0 & !0xff
                | ErrorKind::EngineDown as u64,
        );
        self.announce(inner, word, 0, row.syndrome, row.vendor);
    }
}

impl RingKind {
    fn of(handler: NicHandler) -> Self {
        match handler {
            NicHandler::ProducerWord => Self::Producer,
            NicHandler::DoorbellRecord | NicHandler::DoorbellOnly => Self::Doorbell,
        }
    }
}
