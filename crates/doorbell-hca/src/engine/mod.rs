//! The engine: one `Core` owns a set of QPs and executes what they ring, in rounds.
//!
//! A round looks at the QPs in use, sweeps some of the idle doorbells, and acknowledges grace periods. Each QP with work gets a *turn*:
//! a batch of WQEs, most of them in the loops of `hot`, the rest one by one in `exec`, then one CQE update. Nothing here waits: a QP that
//! cannot go on is parked and looked at again in the next round.

mod connect;
mod control;
mod counters;
pub(crate) mod cq;
mod exec;
mod hot;
mod jobs;
pub(crate) mod keeper;
mod keys;
mod mail;
mod qp;
pub(crate) mod recv;
mod roce;
mod scan;
pub(crate) mod script;
mod send;
mod slices;
pub(crate) mod thread;
mod verbs;
pub(crate) mod watch;

pub(crate) use control::CoreSlot;
pub use counters::CoreCounters;
pub(crate) use exec::modify;
pub(crate) use qp::EngineQp;

use core::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;

use doorbell_wire::Ctrl;

use exec::Step;
use keys::Keys;
use qp::{Park, Rung, Target};
use scan::Lines;
use script::Says;

use crate::dma::{DmaConfig, DmaCore};
use crate::error::Result;
use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::grace::Acknowledger;
use crate::qp::{DoorbellWord, QpState};
use crate::record::{Beat, Store};

/// A QP without work for so many rounds leaves the list of QPs in use; the sweep finds it again.
const IDLE_TURNS: u32 = 256;

/// QPs whose doorbells are looked at together.
const GROUP: usize = 8;

/// Idle lines swept a round while there is no work.
const SWEEP_IDLE: usize = 64;
/// While there is work, so many lines are swept every so many rounds: thousands of idle QPs then cost a put next to nothing, and
/// one of them waits some tens of microseconds at most until its ring is found.
const SWEEP_BUSY: (usize, u64) = (8, 8);

/// One QP is looked at for the flight record every so many rounds.
const WATCH: u64 = 1024;

/// Copies of one QP that have to keep an order go in one lane of the copy pipeline: those of its WQEs in lane 0, and two more for what goes
/// through buffers (`roce::staged`).
const LANES: u32 = 3;

/// The pipeline's number for a lane of the QP in `slot`.
fn lane(slot: u32, lane: u32) -> u32 {
    slot * LANES + lane
}

/// What a turn needs beside the QP.
pub(super) struct Cx<'a> {
    pub(super) inner: &'a Inner,
    /// Slot of the QP in its core.
    pub(super) slot: u32,
    pub(super) dma: &'a mut DmaCore,
    pub(super) acknowledger: &'a mut Acknowledger,
    /// Slots of QPs whose connections have something to do.
    pub(super) roused: &'a mut Vec<u32>,
}

/// One engine core.
pub(crate) struct Core {
    index: usize,
    qps: Vec<Option<Box<EngineQp>>>,
    free: Vec<u32>,
    lines: Lines,
    /// QPs in use.
    listed: Vec<u32>,
    /// QPs with a receive queue.
    receivers: Vec<u32>,
    /// Slots of QPs that the sweep found; scratch.
    found: Vec<u32>,
    acknowledger: Acknowledger,
    dma: DmaCore,
    /// Slots of QPs whose connections have something to do.
    roused: Vec<u32>,
    /// Its heartbeat in the flight record.
    beat: Option<Beat>,
    /// The QP that was looked at last for the record.
    watched: usize,
    /// Rounds in which a script let the core do nothing.
    stalled: u64,
    /// The packet port, if one was opened.
    roce: Option<Box<roce::CorePort>>,
    /// Queue pairs that RDMA devices carry out.
    verbs: verbs::CoreVerbs,
}

impl Core {
    pub(crate) fn new(index: usize, dma: DmaConfig, record: Option<&Arc<Store>>) -> Self {
        Self {
            index,
            qps: Vec::new(),
            free: Vec::new(),
            lines: Lines::default(),
            listed: Vec::new(),
            receivers: Vec::new(),
            found: Vec::new(),
            acknowledger: Acknowledger::default(),
            dma: DmaCore::new(dma),
            roused: Vec::new(),
            beat: record.and_then(|r| Beat::new(r, index)),
            watched: 0,
            stalled: 0,
            roce: None,
            verbs: verbs::CoreVerbs::default(),
        }
    }

    /// One round. `true` if anything was done.
    pub(crate) fn round(&mut self, inner: &Inner) -> bool {
        if let Some(script) = &inner.script
            && self.play(script)
        {
            self.watch_stalled();
            return false;
        }
        let slot = &inner.cores[self.index];
        if slot.has_mail() {
            slot.run_mail(self, inner);
        }
        let mut turns = 0u64;
        if !self.dma.is_idle() {
            turns += self.collect_copies(inner);
        }
        let Self {
            qps,
            listed,
            dma,
            acknowledger,
            roused,
            ..
        } = &mut *self;
        let mut i = 0;
        let mut peeked = 0;
        while let Some(&index) = listed.get(i) {
            if i >= peeked && listed.len() > 1 {
                // Their doorbell words share cache lines, and their misses overlap.
                peeked = (i + GROUP).min(listed.len());
                for &index in &listed[i..peeked] {
                    if let Some(qp) = qps[index as usize].as_deref_mut() {
                        qp.peek();
                    }
                }
            }
            let Some(qp) = qps[index as usize].as_deref_mut() else {
                listed.swap_remove(i);
                continue;
            };
            let mut cx = Cx {
                inner,
                slot: index,
                dma,
                acknowledger,
                roused,
            };
            // SAFETY: a QP in the table is attached: its memory is mapped.
            if unsafe { qp.turn(&mut cx) } {
                qp.idle_turns = 0;
                turns += 1;
            } else {
                qp.idle_turns += 1;
                if qp.idle_turns > IDLE_TURNS && !qp.has_work() {
                    qp.listed = false;
                    listed.swap_remove(i);
                    continue;
                }
            }
            i += 1;
        }
        if !self.receivers.is_empty() {
            turns += self.receive(inner);
        }
        if self.roce.is_some() {
            turns += self.roce_turn(inner, turns != 0);
        }
        if !self.verbs.is_empty() {
            turns += self.verbs_turn(inner);
        }
        let rounds = slot.rounds.load(Ordering::Relaxed).wrapping_add(1);
        slot.rounds.store(rounds, Ordering::Relaxed);
        self.found.clear();
        if turns == 0 {
            self.sweep(SWEEP_IDLE);
        } else if rounds.is_multiple_of(SWEEP_BUSY.1) {
            self.sweep(SWEEP_BUSY.0);
        }
        self.between_rounds(inner);
        if let Some(beat) = &self.beat {
            beat.round(rounds, turns == 0);
            if rounds.is_multiple_of(WATCH) {
                self.watch();
            }
        }
        if turns != 0 {
            slot.counters.busy_rounds.add(1);
            slot.counters.turns.add(turns);
        }
        turns != 0 || !self.found.is_empty()
    }

    /// Puts rung QPs that are not in use into the list.
    #[inline(always)]
    fn sweep(&mut self, budget: usize) {
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
            .round(&inner.grace, &inner.cores[self.index].ack);
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
        qp.describe();
        self.qps[slot as usize] = Some(Box::new(qp));
        self.tell_load(inner);
        slot
    }

    fn tell_load(&self, inner: &Inner) {
        inner.cores[self.index].set_qps(self.qps.len() - self.free.len());
    }

    pub(crate) fn fail_by_owner(&mut self, inner: &Inner, slot: u32, fault: Fault) {
        self.abandon(inner, slot, fault);
    }

    /// Fails a QP from outside (its owner, a dead peer), whatever is under way.
    pub(super) fn abandon(&mut self, inner: &Inner, slot: u32, fault: Fault) {
        let Self { qps, dma, .. } = self;
        let Some(qp) = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut()) else {
            return;
        };
        match qp.cold.shared.state() {
            QpState::Destroyed | QpState::Error => {}
            QpState::Reset | QpState::Ready => {
                let _ = qp.look();
                qp.drop_copies(dma, slot);
                qp.fail(inner, fault, None);
            }
        }
    }

    /// Back to the beginning. Copies that a copy engine still carries out end by themselves; their memory is protected by grace periods.
    ///
    /// Returns what the caller is to drop: see [`Self::destroy`].
    pub(crate) fn reset(&mut self, inner: &Inner, slot: u32) -> Target {
        self.roce_farewell(inner, slot);
        let Self { qps, dma, .. } = self;
        let Some(qp) = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut()) else {
            return Target::None;
        };
        qp.drop_copies(dma, slot);
        if let Target::Peer(peer) = &qp.cold.target {
            peer.detach();
        }
        let mut target = std::mem::replace(&mut qp.cold.target, Target::None);
        let prepared = std::mem::replace(&mut qp.cold.prepared, Target::None);
        if !matches!(prepared, Target::None) {
            target = prepared;
        }
        self.verbs.forget(slot);
        if let Some(roce) = &mut self.roce {
            roce.forget(slot);
        }
        let Some(qp) = self.qps[slot as usize].as_deref_mut() else {
            return target;
        };
        // SAFETY: the QP is attached, so its memory is mapped; its owner promises that nobody posts during a reset.
        unsafe { qp.initialise() };
        self.receivers.retain(|s| *s != slot);
        self.lines.forget(slot);
        target
    }

    /// Lets go of a QP, and returns it for the caller to drop: what it keeps is foreign, and dropping that may take any time or ask this core
    /// for something.
    pub(crate) fn destroy(&mut self, inner: &Inner, slot: u32) -> Option<Box<EngineQp>> {
        self.roce_farewell(inner, slot);
        // Whoever still waits on it is told; its owner, who asked for it, gets no event.
        if let Some(qp) = self.qp(slot) {
            qp.cold.quiet = true;
        }
        self.abandon(inner, slot, Fault::Destroyed);
        let Self { qps, dma, .. } = self;
        if let Some(qp) = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut()) {
            // Also of one that had failed before.
            qp.unstage(dma, slot);
        }
        let shared = &self.qp(slot)?.cold.shared;
        if let Some(recv) = &shared.recv {
            recv.lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .close();
        }
        shared.set_state(QpState::Destroyed);
        if let Some(qp) = self.qp(slot) {
            qp.changed(QpState::Destroyed);
        }
        self.lines.remove(slot);
        self.listed.retain(|s| *s != slot);
        self.receivers.retain(|s| *s != slot);
        if let Some(roce) = &mut self.roce {
            roce.forget(slot);
        }
        self.verbs.forget(slot);
        let gone = self.qps[slot as usize].take();
        self.free.push(slot);
        self.tell_load(inner);
        gone
    }

    /// A peer process is gone: its QPs fail.
    pub(crate) fn peer_down(&mut self, inner: &Inner, peer: u64) {
        for slot in 0..self.qps.len() as u32 {
            let theirs =
                |qp: &mut EngineQp| matches!(&qp.cold.target, Target::Peer(p) if p.peer() == peer);
            if self.qp(slot).is_some_and(theirs) {
                self.abandon(inner, slot, Fault::PeerDead);
            }
        }
    }

    /// The engine panicked: everybody who waits for one of its QPs is told.
    pub(crate) fn mark_down(&mut self, inner: &Inner, reason: &str) {
        if let Some(beat) = &self.beat {
            beat.dead(self.index, reason);
        }
        for qp in self.qps.iter_mut().flatten() {
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

    /// Of a core that is dead: goes on draining queue pairs whose kernels are to be let go. `false`: there is none.
    pub(crate) fn drain_released(&mut self) -> bool {
        let mut any = false;
        for qp in self.qps.iter_mut().flatten() {
            if qp.releases() && qp.cold.shared.state() == QpState::Error {
                let _ = qp.look();
                qp.flush();
                any = true;
            }
        }
        any
    }
}

impl EngineQp {
    /// Gives the QP its turn. `true` if anything was done.
    ///
    /// # Safety
    /// The QP is attached: its memory is mapped.
    #[inline(always)]
    unsafe fn turn(&mut self, cx: &mut Cx<'_>) -> bool {
        let rung = match self.peeked.take() {
            Some(rung) => rung,
            None => self.look(),
        };
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
                self.drop_copies(cx.dma, cx.slot);
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
        let mut progress = false;
        if self.has_mail() {
            match self.forward(cx) {
                Step::Done => progress = true,
                Step::Parked => {}
                Step::Failed(fault, ctrl) => return self.fail_turn(cx, fault, ctrl),
            }
        }
        if !self.cold.copies.is_empty() {
            match self.drain(cx) {
                Step::Done => progress = true,
                Step::Parked => {}
                Step::Failed(fault, ctrl) => return self.fail_turn(cx, fault, ctrl),
            }
        }
        // SAFETY: passed on.
        if self.exec != self.pi && unsafe { self.execute_some(cx) } {
            return true;
        }
        if progress {
            self.publish();
        }
        progress
    }

    /// Executes what may be executed of what was rung, a batch at most.
    ///
    /// # Safety
    /// The QP is attached: its memory is mapped.
    unsafe fn execute_some(&mut self, cx: &mut Cx<'_>) -> bool {
        if let Some(Park::Wait { on, index }) = &self.park
            && exec::waited(on, *index) == Some(false)
        {
            return false;
        }
        match self.check_target(cx) {
            Ok(true) => {}
            Ok(false) => return false,
            Err(fault) => {
                self.drop_copies(cx.dma, cx.slot);
                self.fail(cx.inner, fault, None);
                return true;
            }
        }
        let mut singly = matches!(
            self.cold.target,
            Target::Roce(_) | Target::Verbs(_) | Target::Srd(_)
        );
        let mut by_device = matches!(self.cold.target, Target::Verbs(_));
        let start = self.exec;
        // A collapsed CQE is written once a turn: a shallow ring gets its slots back early, so that poster and engine overlap.
        let batch = u64::from(cx.inner.config.batch).min(((self.mask + 1) / 16).max(32));
        let mut end = self.pi.min(start + batch);
        if end > self.stop_at {
            // SAFETY: passed on.
            match unsafe { self.script_says(cx) } {
                Says::Until(slot) => end = end.min(slot),
                Says::Alone => (end, singly, by_device) = (start + 1, true, false),
                Says::Nothing => return false,
                Says::Fail(syndrome, vendor, ctrl) => {
                    self.unstage(cx.dma, cx.slot);
                    self.fail_as(cx.inner, syndrome, vendor, ctrl);
                    return true;
                }
            }
        }
        let mut failed = None;
        loop {
            // SAFETY: attached, `end <= pi`, keys checked in `check_target`.
            unsafe {
                if !self.is_under_way() && self.park.is_none() && !singly {
                    if self.per_slot() {
                        self.hot::<true>(end)
                    } else {
                        self.hot::<false>(end)
                    }
                }
                // One that was held for lack of room is as plain as before.
                if by_device && matches!(self.park, None | Some(Park::Copies)) {
                    self.post_plain(cx.inner, end);
                }
                if self.exec >= end || self.bytes >= hot::TURN_BYTES {
                    break;
                }
                let step = match self.park.take() {
                    Some(Park::Slices(slices)) => self.slice(cx, slices),
                    park => {
                        self.park = park;
                        self.one(cx)
                    }
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
        if matches!(self.cold.target, Target::Verbs(_) | Target::Srd(_)) {
            self.submit_verbs(cx.inner);
            self.submit_srd(cx.inner);
            if self.cold.shared.state() != QpState::Ready {
                return true;
            }
        }
        self.publish();
        match failed {
            Some((fault, ctrl)) => self.fail_turn(cx, fault, ctrl),
            None => self.exec != start || sliced,
        }
    }

    /// A WQE failed in this turn, and the QP with it: what was under way through buffers is let go of. `true`: something was done.
    #[cold]
    fn fail_turn(&mut self, cx: &mut Cx<'_>, fault: Fault, ctrl: Option<Ctrl>) -> bool {
        self.unstage(cx.dma, cx.slot);
        self.fail(cx.inner, fault, ctrl);
        true
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
            Target::Roce(_) | Target::Verbs(_) | Target::Srd(_) => (true, (own, own)),
        };
        if self.stamps != (own, theirs) {
            self.stamps = (own, theirs);
            self.keys = Keys::EMPTY;
        }
        if ready {
            self.cold.unready_since = None;
            return Ok(true);
        }
        // The target was reset or is not connected yet: patience, as long as for a missing receive.
        let since = *self.cold.unready_since.get_or_insert_with(Instant::now);
        if since.elapsed() < cx.inner.config.rnr_limit {
            Ok(false)
        } else {
            Err(Fault::PeerDead)
        }
    }

    /// After a panic: error CQEs for whatever was rung, so that pollers of the CQ end too.
    fn write_down(&mut self) {
        let _ = self.look();
        self.flush();
        self.end_waits();
    }
}
