//! What a core looks at now and then, for the flight record: one QP at a time, and only what stands still in its memory.
//!
//! A poster that forgot its doorbell tells nobody, so the engine looks whether the next slot holds a WQE that no doorbell covers. What waits
//! in the queue is copied to the record, which a process that is killed leaves behind.

use core::mem::offset_of;
use core::sync::atomic::Ordering;

use doorbell_device::layout::{GpuCq, GpuQp, POISON, RINGING};
use doorbell_wire::Ctrl;

use super::cq::CqWriter;
use super::qp::{EngineQp, Park, Target};
use crate::mem::Keep;
use crate::qp::{DoorbellWord, QpState};
use crate::raw::Shared;
use crate::record::{self, Kind, Standing};

/// Slots looked at for WQEs that no doorbell covers, in one look.
const AHEAD: u64 = 64;

impl super::Core {
    /// Looks at the next QP.
    #[cold]
    pub(crate) fn watch(&mut self) {
        if let Some(beat) = &self.beat {
            beat.clock().read();
        }
        let slots = self.qps.len();
        // Places of QPs that are gone are passed over.
        for _ in 0..slots.min(64) {
            self.watched = (self.watched + 1) % slots;
            if let Some(qp) = self.qps[self.watched].as_deref_mut() {
                // SAFETY: a QP in the table is attached: its memory is mapped.
                unsafe { qp.watch() };
                return;
            }
        }
    }

    /// A round in which nothing is done: who asks what stands in the queues meanwhile is to be told.
    pub(super) fn watch_stalled(&mut self) {
        self.stalled += 1;
        if self.stalled.is_multiple_of(super::WATCH) {
            self.watch();
        }
    }

    /// Where the poster of a QP keeps its indexes.
    pub(crate) fn watch_poster(&mut self, slot: u32, at: Shared<u64>, keep: Keep) {
        if let Some(qp) = self.qp(slot) {
            qp.tape.watch_poster(at, keep);
        }
    }
}

impl EngineQp {
    /// Notes what is written and not rung, why it is set aside, and what stands in its memory.
    ///
    /// # Safety
    /// The QP is attached: its memory is mapped.
    #[cold]
    pub(super) unsafe fn watch(&mut self) {
        if !self.tape.is_on() {
            return;
        }
        self.tape.turn(self.pi, self.exec, self.completed(), 0, 0);
        let failed = self.cold.shared.state() == QpState::Error;
        if !failed {
            // SAFETY: passed on.
            unsafe { self.find_posted() };
        }
        let parked = self.parked();
        if self.tape.parked(parked) && parked != record::Park::None {
            self.tape.event(Kind::Parked, self.exec, 1, parked as u32);
        }
        // SAFETY: passed on.
        unsafe { self.copy_still(parked, failed) };
    }

    /// WQEs that are written and that no doorbell covers.
    ///
    /// # Safety
    /// As for [`Self::watch`].
    unsafe fn find_posted(&mut self) {
        let from = self.tape.posted().max(self.pi);
        let room = self.completed() + self.mask + 1;
        let (mut at, end) = (from, room.min(from + AHEAD));
        while at < end {
            // SAFETY: a slot of the ring.
            let ctrl = Ctrl::parse(unsafe { self.chunk(at, 0) });
            if !ctrl.matches(at as u16, self.qpn()) || ctrl.ds == 0 {
                break;
            }
            at += u64::from(ctrl.slots());
        }
        let at = at.min(room);
        if at > from {
            self.tape.event(Kind::Posted, from, at - from, 0);
            self.tape.see_posted(at);
        }
    }

    fn parked(&self) -> record::Park {
        match &self.park {
            Some(Park::Wait { .. }) => record::Park::Wait,
            Some(Park::Stale { .. }) => record::Park::Stale,
            Some(Park::Receive { .. }) => record::Park::Receive,
            Some(Park::Slices(_)) => record::Park::Slices,
            Some(Park::Copies) => record::Park::Copies,
            None if self.cold.unready_since.is_some() => record::Park::Target,
            None => record::Park::None,
        }
    }

    /// # Safety
    /// As for [`Self::watch`].
    unsafe fn copy_still(&self, parked: record::Park, failed: bool) {
        let config = &self.cold.config;
        let shared = &self.cold.shared;
        let first = self.completed();
        let slots = self.tape.posted().max(self.pi).saturating_sub(first);
        // SAFETY: the line is mapped while the QP is attached.
        let note: [u64; 6] = core::array::from_fn(|i| unsafe {
            config.wait_note.map_or(0, |note| note.word(i).load())
        });
        let scripted = self.cold.script.is_some();
        if !self
            .tape
            .wants_still(slots != 0 || failed || scripted || note[0] != 0)
        {
            return;
        }
        let poster = self.tape.poster();
        let newest = shared.newest_cqe.load(Ordering::Relaxed);
        // What is missing is looked for once nothing moves any more.
        let stands = !failed && self.tape.stands(first, self.pi);
        // SAFETY: words of the QP's memory, which is mapped while it is attached.
        unsafe {
            let record = config.record.map_or(0, |r| r.load());
            let doorbell = match &config.doorbell {
                DoorbellWord::At(word) => word.load(),
                DoorbellWord::Slot(slot) => slot.word().load(),
            };
            let last = match (self.per_slot(), first.checked_sub(u64::from(!failed))) {
                (true, Some(last)) => last,
                _ => 0,
            };
            let lacks = match (stands, self.per_slot()) {
                (false, _) => None,
                (true, true) => {
                    let from = first.saturating_sub(self.mask + 1);
                    let from = poster.map_or(from, |p| p[3].max(from));
                    self.cq.first_lacking(from..first, CqWriter::shows_send)
                }
                (true, false) => newest
                    .checked_sub(1)
                    .and_then(|at| self.cq.first_lacking(at..newest, CqWriter::shows_send)),
            };
            let (recv, recv_lacks) = match shared.recv.as_ref().map(|r| r.try_lock()) {
                Some(Ok(mut recv)) => recv.standing(stands),
                _ => (None, None),
            };
            let standing = Standing {
                parked,
                record,
                doorbell,
                poster,
                note,
                first,
                slots,
                rung: self.pi,
                newest,
                cqe: self.cq.words(last),
                lacks,
                recv_lacks,
                recv,
            };
            self.tape.still(&standing, |i| {
                self.ring
                    .word((((first + i / 8) & self.mask) * 8 + i % 8) as usize)
                    .load()
            });
        }
    }

    /// Tells the record what this QP is.
    pub(super) fn describe(&self) {
        let config = &self.cold.config;
        let shared = &self.cold.shared;
        let doorbell = match &config.doorbell {
            DoorbellWord::At(word) => word.addr(),
            DoorbellWord::Slot(slot) => slot.word().addr(),
        };
        self.tape.describe(&crate::record::Description {
            qpn: shared.qpn.get(),
            cqn: shared.cq.cqn.get(),
            core: shared.core,
            log_depth: config.log_depth,
            log_receives: config.rq.as_ref().map(|rq| rq.log_entries),
            handler: config.handler,
            cq: config.cq.kind,
            pd: config.pd,
            addresses: [
                config.sq.addr() as u64,
                config.cq.ring.addr() as u64,
                config.record.map_or(0, |r| r.addr() as u64),
                doorbell as u64,
            ],
        });
        self.tell_target();
        self.tell_state(shared.state());
    }

    /// Tells it, and who asks, where its requests go.
    pub(super) fn tell_target(&self) {
        let (kind, qpn) = match &self.cold.target {
            Target::None => (record::Target::None, 0),
            Target::Loopback(peer) => (record::Target::Loopback, peer.qpn.get()),
            Target::Peer(peer) => (record::Target::Shm, peer.qpn().get()),
            Target::Roce(link) => (record::Target::Roce, link.peer_qpn),
            Target::Verbs(link) => (record::Target::Verbs, link.peer_qpn()),
            Target::Srd(link) => (record::Target::Verbs, link.peer_qpn()),
        };
        let word = kind as u64 | u64::from(qpn) << 32;
        self.cold.shared.target.store(word, Ordering::Relaxed);
        self.tape.target(word);
    }

    pub(super) fn tell_state(&self, state: QpState) {
        self.tape.state(state);
    }
}

/// What the posting side keeps in host memory: slots reserved, written, rung, and known to be complete.
///
/// # Safety
/// `qp` is the address of a [`GpuQp`] that is mapped.
pub(crate) unsafe fn poster(qp: Shared<u64>) -> [u64; 4] {
    const CI: usize = offset_of!(GpuQp, cq_sq) + offset_of!(GpuCq, cqe_ci);
    let at = |offset: usize| {
        // SAFETY: a word of the structure.
        unsafe { qp.word(offset / 8).atomic() }.load(Ordering::Relaxed)
    };
    [
        at(offset_of!(GpuQp, sq_rsvd_index)) & !POISON,
        at(offset_of!(GpuQp, sq_ready_index)) & !RINGING,
        at(offset_of!(GpuQp, sq_wqe_pi)),
        at(CI),
    ]
}
