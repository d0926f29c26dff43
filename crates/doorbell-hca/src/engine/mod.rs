//! The engine: one `Core` owns a set of QPs and executes what they ring, in rounds.
//!
//! A round looks at the QPs in use, sweeps some of the idle doorbells, and acknowledges grace periods. Each QP with work gets a *turn*:
//! a batch of WQEs, most of them in the loops of `hot`, the rest one by one in `exec`, then one CQE update. Nothing here waits: a QP that
//! cannot go on is parked and looked at again in the next round.

mod control;
mod counters;
pub(crate) mod cq;
mod exec;
mod hot;
mod jobs;
mod keys;
mod qp;
pub(crate) mod recv;
mod scan;
pub(crate) mod thread;

pub(crate) use control::CoreSlot;
pub use counters::CoreCounters;
pub(crate) use qp::EngineQp;

use core::sync::atomic::Ordering;
use std::time::Instant;

use exec::Step;
use keys::Keys;
use qp::{Park, Rung, Target};
use scan::Lines;

use crate::error::{HcaError, Result};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::link::Destination;
use crate::mem::grace::{Acknowledger, CopiesUnderWay};
use crate::qp::{DoorbellWord, QpState};

/// A QP without work for so many rounds leaves the list of QPs in use; the sweep finds it again.
const IDLE_TURNS: u32 = 256;

/// Idle lines swept a round while there is work, and while there is none.
const SWEEP_BUSY: usize = 2;
const SWEEP_IDLE: usize = 64;

/// What a turn needs beside the QP.
pub(super) struct Cx<'a> {
    pub(super) inner: &'a Inner,
}

/// One engine core.
#[derive(Default)]
pub(crate) struct Core {
    index: usize,
    qps: Vec<Option<Box<EngineQp>>>,
    free: Vec<u32>,
    lines: Lines,
    /// QPs in use.
    listed: Vec<u32>,
    /// QPs with a receive queue and a peer that may send them immediates.
    receivers: Vec<u32>,
    /// Slots of QPs that the sweep found; scratch.
    found: Vec<u32>,
    acknowledger: Acknowledger,
    copies: NoCopies,
}

/// A core without a copy pipeline.
#[derive(Debug, Default)]
struct NoCopies;

impl CopiesUnderWay for NoCopies {
    fn mark(&self) -> u64 {
        0
    }
    fn passed(&self, _mark: u64) -> bool {
        true
    }
}

impl Core {
    pub(crate) fn new(index: usize) -> Self {
        Self {
            index,
            ..Self::default()
        }
    }

    /// One round. `true` if anything was done.
    pub(crate) fn round(&mut self, inner: &Inner) -> bool {
        let slot = &inner.cores[self.index];
        if slot.has_mail() {
            slot.run_mail(self, inner);
        }
        let mut cx = Cx { inner };
        let mut turns = 0u64;
        let mut i = 0;
        while let Some(&index) = self.listed.get(i) {
            let Some(qp) = self.qps[index as usize].as_deref_mut() else {
                self.listed.swap_remove(i);
                continue;
            };
            // SAFETY: a QP in the table is attached: its memory is mapped.
            if unsafe { qp.turn(&mut cx) } {
                qp.idle_turns = 0;
                turns += 1;
            } else {
                qp.idle_turns += 1;
                if qp.idle_turns > IDLE_TURNS && !qp.has_work() {
                    qp.listed = false;
                    self.listed.swap_remove(i);
                    continue;
                }
            }
            i += 1;
        }
        if !self.receivers.is_empty() {
            turns += self.receive();
        }
        self.sweep(if turns == 0 { SWEEP_IDLE } else { SWEEP_BUSY });
        self.between_rounds(inner);
        slot.rounds.store(
            slot.rounds.load(Ordering::Relaxed).wrapping_add(1),
            Ordering::Relaxed,
        );
        if turns != 0 {
            slot.counters.busy_rounds.add(1);
            slot.counters.turns.add(turns);
        }
        turns != 0 || !self.found.is_empty()
    }

    /// Gives peers' immediates to the receive queues of QPs here.
    #[cold]
    fn receive(&mut self) -> u64 {
        let mut done = 0;
        for &slot in &self.receivers {
            let Some(qp) = self.qps[slot as usize].as_deref_mut() else {
                continue;
            };
            let (Target::Peer(peer), Some(recv)) = (&qp.cold.target, &qp.cold.shared.recv) else {
                continue;
            };
            while let Some(incoming) = peer.incoming() {
                let mut recv = recv
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                // SAFETY: an open receive queue's memory is mapped.
                if !unsafe { recv.deliver(incoming.imm, incoming.bytes) } {
                    peer.no_receive();
                    break;
                }
                peer.reply(Ok(()));
                done += 1;
            }
        }
        done
    }

    /// Puts rung QPs that are not in use into the list.
    #[inline(always)]
    fn sweep(&mut self, budget: usize) {
        self.found.clear();
        let found = &mut self.found;
        let qps = &mut self.qps;
        // SAFETY: every line belongs to an attached QP.
        unsafe {
            self.lines.sweep(budget, |index| {
                if let Some(qp) = qps[index as usize].as_deref_mut()
                    && !qp.listed
                {
                    qp.listed = true;
                    qp.idle_turns = 0;
                    found.push(index);
                }
            });
        }
        if !self.found.is_empty() {
            self.listed.extend_from_slice(&self.found);
        }
    }

    /// Holding no resolved address, acknowledges grace periods.
    #[inline(always)]
    pub(crate) fn between_rounds(&mut self, inner: &Inner) {
        self.acknowledger
            .round(&inner.grace, &inner.cores[self.index].ack, &self.copies);
    }

    fn qp(&mut self, slot: u32) -> Option<&mut EngineQp> {
        self.qps.get_mut(slot as usize)?.as_deref_mut()
    }

    /// Takes a new QP; returns its slot.
    pub(crate) fn attach(&mut self, inner: &Inner, qp: EngineQp) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.qps.push(None);
            (self.qps.len() - 1) as u32
        });
        let config = &qp.cold.config;
        match &config.doorbell {
            _ if config.poll_record => {
                let record = config.record.expect("checked: poll_record has a record");
                self.lines.add_word(record.cast(), true, slot);
            }
            DoorbellWord::Slot(word) => self.lines.add_slot(word.line(), word.word_in_line(), slot),
            DoorbellWord::At(word) => self.lines.add_word(*word, false, slot),
        }
        self.qps[slot as usize] = Some(Box::new(qp));
        self.tell_load(inner);
        slot
    }

    fn tell_load(&self, inner: &Inner) {
        inner.cores[self.index].set_qps(self.qps.len() - self.free.len());
    }

    pub(crate) fn connect(
        &mut self,
        inner: &Inner,
        slot: u32,
        destination: Destination,
    ) -> Result<()> {
        let Some(qp) = self.qp(slot) else {
            return Ok(());
        };
        let shared = &qp.cold.shared;
        if shared.state() != QpState::Reset {
            return Err(HcaError::WrongState {
                qpn: shared.qpn,
                state: shared.state(),
                call: "connect",
                needs: "a queue pair in Reset: reset it first",
            });
        }
        qp.cold.target = match destination {
            Destination::Loopback(qpn) => {
                Target::Loopback(inner.queues.qp(qpn).ok_or(HcaError::UnknownQp { qpn })?)
            }
            Destination::Peer(peer) => Target::Peer(peer),
        };
        qp.keys = Keys::EMPTY;
        qp.cold.shared.set_state(QpState::Ready);
        let receives = matches!(qp.cold.target, Target::Peer(_)) && qp.cold.shared.recv.is_some();
        self.receivers.retain(|s| *s != slot);
        if receives {
            self.receivers.push(slot);
        }
        Ok(())
    }

    pub(crate) fn fail_by_owner(&mut self, inner: &Inner, slot: u32, fault: Fault) {
        if let Some(qp) = self.qp(slot) {
            qp.abandon(inner, fault);
        }
    }

    /// Back to the beginning. `false`: copies are still under way, ask again.
    pub(crate) fn reset(&mut self, _inner: &Inner, slot: u32) -> bool {
        let Some(qp) = self.qp(slot) else { return true };
        if !qp.cold.copies.is_empty() {
            return false;
        }
        if let Target::Peer(peer) = &qp.cold.target {
            peer.detach();
        }
        qp.cold.target = Target::None;
        // SAFETY: the QP is attached, so its memory is mapped; its owner promises that nobody posts during a reset.
        unsafe { qp.initialise() };
        self.receivers.retain(|s| *s != slot);
        self.lines.forget(slot);
        true
    }

    /// Lets go of a QP. `false`: copies are still under way, ask again.
    pub(crate) fn destroy(&mut self, inner: &Inner, slot: u32) -> bool {
        let Some(qp) = self.qp(slot) else { return true };
        qp.abandon(inner, Fault::Destroyed);
        if !qp.cold.copies.is_empty() {
            return false;
        }
        let shared = &qp.cold.shared;
        if let Some(recv) = &shared.recv {
            recv.lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .close();
        }
        shared.set_state(QpState::Destroyed);
        self.lines.remove(slot);
        self.listed.retain(|s| *s != slot);
        self.receivers.retain(|s| *s != slot);
        self.qps[slot as usize] = None;
        self.free.push(slot);
        self.tell_load(inner);
        true
    }

    /// A peer process is gone: its QPs fail.
    pub(crate) fn peer_down(&mut self, inner: &Inner, peer: u64) {
        for qp in self.qps.iter_mut().flatten() {
            if matches!(&qp.cold.target, Target::Peer(p) if p.peer() == peer) {
                qp.abandon(inner, Fault::PeerDead);
            }
        }
    }

    /// The engine panicked: everybody who waits for one of its QPs is told.
    pub(crate) fn mark_down(&mut self, inner: &Inner, reason: &str) {
        for qp in self.qps.iter().flatten() {
            qp.mark_down(inner);
        }
        inner.events.push(crate::Event::EngineDown {
            core: self.index,
            reason: reason.into(),
        });
        for qp in self.qps.iter_mut().flatten() {
            qp.write_down();
        }
    }
}

impl EngineQp {
    /// Gives the QP its turn. `true` if anything was done.
    ///
    /// # Safety
    /// The QP is attached: its memory is mapped.
    #[inline(always)]
    unsafe fn turn(&mut self, cx: &mut Cx<'_>) -> bool {
        let rung = self.look();
        if rung == Rung::Nothing && !self.has_work() {
            return false;
        }
        // SAFETY: passed on.
        unsafe { self.work(cx, rung) }
    }

    unsafe fn work(&mut self, cx: &mut Cx<'_>, rung: Rung) -> bool {
        let state = self.cold.shared.state();
        if let Rung::Bad(fault) = rung {
            if state != QpState::Error {
                self.fail(cx.inner, fault, None);
            }
            return true;
        }
        match state {
            QpState::Ready => {}
            QpState::Reset if self.has_work() => {
                self.fail(cx.inner, Fault::NotConnected, None);
                return true;
            }
            QpState::Reset => return false,
            QpState::Error | QpState::Destroyed => {
                let any = self.exec != self.pi;
                self.flush();
                return any;
            }
        }
        if self.exec == self.pi {
            return false;
        }
        if let Some(Park::Wait { on, index }) = &self.park
            && exec::waited(on, *index) == Some(false)
        {
            return false;
        }
        match self.check_target(cx) {
            Ok(true) => {}
            Ok(false) => return false,
            Err(fault) => {
                self.fail(cx.inner, fault, None);
                return true;
            }
        }
        let start = self.exec;
        let end = self.pi.min(start + u64::from(cx.inner.config.batch));
        let mut failed = None;
        loop {
            // SAFETY: attached, `end <= pi`, keys checked in `check_target`.
            unsafe {
                if self.cold.copies.is_empty() && self.park.is_none() {
                    if self.per_slot() {
                        self.hot::<true>(end)
                    } else {
                        self.hot::<false>(end)
                    }
                }
                if self.exec >= end || self.bytes >= hot::TURN_BYTES {
                    break;
                }
                let step = match self.park {
                    Some(Park::Slices(slices)) => self.slice(cx, slices),
                    _ => self.one(cx),
                };
                match step {
                    Step::Done => {}
                    Step::Parked => {
                        self.cold.shared.counters.parked.add(1);
                        break;
                    }
                    Step::Failed(fault, ctrl) => {
                        failed = Some((fault, ctrl));
                        break;
                    }
                }
            }
        }
        let sliced = matches!(self.park, Some(Park::Slices(_)));
        self.publish();
        if let Some((fault, ctrl)) = failed {
            self.fail(cx.inner, fault, ctrl);
            return true;
        }
        self.exec != start || sliced
    }

    /// # Safety
    /// As for the loops it calls.
    #[inline(always)]
    unsafe fn hot<const PER_SLOT: bool>(&mut self, end: u64) {
        loop {
            let before = self.exec;
            // SAFETY: passed on.
            unsafe {
                self.transfers::<PER_SLOT, false>(end);
                if self.exec >= end || self.bytes >= hot::TURN_BYTES {
                    return;
                }
                // What stopped the loop is usually another opcode: look which, so that the other loops are entered only for theirs.
                let opcode = (self
                    .ring
                    .word(((self.exec & self.mask) * 8) as usize)
                    .load()
                    >> 24) as u8;
                match opcode {
                    x if x == doorbell_wire::Opcode::FetchAdd as u8 => {
                        self.additions::<PER_SLOT>(end)
                    }
                    x if x == doorbell_wire::Opcode::RdmaRead as u8 => {
                        self.transfers::<PER_SLOT, true>(end)
                    }
                    _ => return,
                }
            }
            if self.exec == before || self.exec >= end {
                return;
            }
        }
    }

    /// Is the target there? Drops cached keys when a table's epoch changed.
    #[inline(always)]
    fn check_target(&mut self, cx: &Cx<'_>) -> Result<bool, Fault> {
        let own = cx.inner.regions.view().epoch().load(Ordering::Acquire);
        let (ready, theirs) = match &self.cold.target {
            Target::None => return Err(Fault::NotConnected),
            Target::Loopback(peer) => match peer.state() {
                QpState::Ready => (true, (own, own)),
                QpState::Reset => (false, (own, own)),
                QpState::Error | QpState::Destroyed => return Err(Fault::PeerDead),
            },
            Target::Peer(peer) => (peer.ready()?, peer.stamp()),
        };
        if self.stamps != (own, theirs) {
            self.stamps = (own, theirs);
            self.keys = Keys::EMPTY;
        }
        if ready {
            return Ok(true);
        }
        // The target was reset or is not connected yet: patience, as long as for a missing receive.
        match self.park {
            Some(Park::Target { since }) if since.elapsed() >= cx.inner.config.rnr_limit => {
                Err(Fault::PeerDead)
            }
            Some(_) => Ok(false),
            None => {
                self.park = Some(Park::Target {
                    since: Instant::now(),
                });
                Ok(false)
            }
        }
    }

    /// Fails the QP from outside (its owner, a dead peer), whatever is under way.
    fn abandon(&mut self, inner: &Inner, fault: Fault) {
        match self.cold.shared.state() {
            QpState::Destroyed | QpState::Error => {}
            QpState::Reset | QpState::Ready => {
                let _ = self.look();
                self.fail(inner, fault, None);
            }
        }
    }

    /// After a panic: error CQEs for whatever was rung, so that pollers of the CQ end too.
    fn write_down(&mut self) {
        let _ = self.look();
        self.flush();
    }
}
