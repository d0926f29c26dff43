//! What an engine core writes about one queue pair. One writer, plain stores, no call, no lock.
//!
//! Events are ranges of slots, one a doorbell and one a turn, not one a WQE. Reading the clock costs as much as ten WQEs, so a core reads it
//! once for about a microsecond of work, and turns of one reading that follow one another are one event. A core that finds nothing to
//! do reads it at the next event.

use core::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::Arc;

use doorbell_device::layout::{CqKind, ErrorWord, NicHandler};

use super::clock::ClockKind;
use super::layout::{self, core as at_core, qp, still};
use super::store::{Store, Words};
use super::{Kind, Park};
use crate::mem::Keep;
use crate::qp::QpState;
use crate::raw::Shared;

/// Work, in nanoseconds or so, for which one reading of the clock is good.
const CREDIT: u64 = 1024;
/// What a turn and a WQE count for; a byte counts for a sixteenth.
const TURN: u64 = 24;
const WQE: u64 = 2;

/// The clock of one core, read now and then. In the core's place in the record, whence the last reading can be read by others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreClock {
    kind: ClockKind,
    /// `NOW` and `CREDIT` of the core.
    words: Shared<u64>,
}

impl CoreClock {
    #[inline(always)]
    fn word(&self, i: usize) -> &AtomicU64 {
        // SAFETY: the words of a core in the head, which whoever has this keeps.
        unsafe { self.words.word(i).atomic() }
    }

    /// The time after `work`.
    #[inline(always)]
    fn after(&self, work: u64) -> u64 {
        let credit = self.word(at_core::CREDIT);
        let left = credit.load(Ordering::Relaxed);
        if left > work {
            credit.store(left - work, Ordering::Relaxed);
            return self.word(at_core::NOW).load(Ordering::Relaxed);
        }
        self.read()
    }

    /// The time now.
    #[inline(always)]
    pub(crate) fn read(&self) -> u64 {
        let now = self.kind.ticks();
        self.word(at_core::NOW).store(now, Ordering::Relaxed);
        self.word(at_core::CREDIT).store(CREDIT, Ordering::Relaxed);
        now
    }
}

/// The heartbeat of one core.
#[derive(Debug)]
pub(crate) struct Beat {
    clock: CoreClock,
    store: Arc<Store>,
}

impl Beat {
    /// Of a core that has a place in the record.
    pub(crate) fn new(store: &Arc<Store>, core: usize) -> Option<Self> {
        Some(Self {
            clock: CoreClock {
                kind: store.clock(),
                words: store.core(core)?,
            },
            store: Arc::clone(store),
        })
    }

    /// The number of a round; one without work makes the next event read the clock.
    #[inline(always)]
    pub(crate) fn round(&self, rounds: u64, idle: bool) {
        self.clock
            .word(at_core::ROUNDS)
            .store(rounds, Ordering::Relaxed);
        if idle {
            self.clock.word(at_core::CREDIT).store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn clock(&self) -> CoreClock {
        self.clock
    }

    /// The core died.
    pub(crate) fn dead(&self, core: usize, why: &str) {
        self.store.died(core, why);
        self.clock.word(at_core::DEAD).store(1, Ordering::Release);
    }
}

/// The event that the next one may be joined to.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    time: u64,
    from: u64,
    slots: u64,
    value: u64,
    kind: u64,
}

/// The record of one queue pair, if there is one.
#[derive(Debug)]
pub(crate) struct Tape {
    on: Option<On>,
    mask: u64,
    /// Events so far.
    head: u64,
    /// What the record says of the engine's indexes.
    rung: u64,
    executed: u64,
    completed: u64,
    rung_at: u64,
    last: Last,
    posted: u64,
    kept: Option<Box<Kept>>,
}

/// Where it is written, and by which clock.
#[derive(Clone, Copy, Debug)]
struct On {
    block: Shared<u64>,
    clock: CoreClock,
}

/// What keeps the block.
struct Kept {
    words: Words,
    number: usize,
    store: Arc<Store>,
    /// Address of the poster's structure in host memory, and what keeps it.
    poster: Option<(Shared<u64>, Keep)>,
    /// The reason for which the QP was last seen set aside.
    parked: Park,
}

/// What a QP is.
pub(crate) struct Description {
    pub(crate) qpn: u32,
    pub(crate) cqn: u32,
    pub(crate) core: usize,
    pub(crate) log_depth: u8,
    /// Of its receive queue, if it has one.
    pub(crate) log_receives: Option<u8>,
    pub(crate) handler: NicHandler,
    pub(crate) cq: CqKind,
    pub(crate) pd: u32,
    /// Ring, CQ, record, doorbell word.
    pub(crate) addresses: [u64; 4],
}

impl core::fmt::Debug for Kept {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "block {}", self.number)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.store.give(self.number);
    }
}

impl Tape {
    /// A block of `store` for a QP of `core`.
    pub(crate) fn new(store: Option<&Arc<Store>>, core: usize) -> Self {
        let mut tape = Self {
            on: None,
            mask: 0,
            head: 0,
            rung: 0,
            executed: 0,
            completed: 0,
            rung_at: 0,
            last: Last::default(),
            posted: 0,
            kept: None,
        };
        let Some((store, beat)) = store.and_then(|s| Some((s, Beat::new(s, core)?))) else {
            return tape;
        };
        let (number, words) = store.take();
        tape.on = Some(On {
            block: words.at(),
            clock: beat.clock,
        });
        tape.mask = (1 << store.log_events()) - 1;
        tape.kept = Some(Box::new(Kept {
            words,
            number,
            store: Arc::clone(store),
            poster: None,
            parked: Park::None,
        }));
        tape
    }

    /// Word `i` of the block.
    ///
    /// # Safety
    /// `i` is inside the block.
    #[inline(always)]
    unsafe fn word<'a>(block: Shared<u64>, i: u64) -> &'a AtomicU64 {
        // SAFETY: inside a block that `kept` keeps.
        unsafe { block.word(i as usize).atomic() }
    }

    /// A doorbell announced something.
    #[inline(always)]
    pub(crate) fn rung(&mut self) {
        if let Some(on) = self.on {
            self.rung_at = on.clock.after(0);
        }
    }

    /// A turn is over: what is rung, executed and complete now, and what the turn came to.
    #[inline(always)]
    pub(crate) fn turn(&mut self, rung: u64, executed: u64, completed: u64, wqes: u64, bytes: u64) {
        if let Some(On { block, clock }) = self.on {
            let now = clock.after(TURN + WQE * wqes + bytes / 16);
            self.note(block, now, rung, executed, completed, bytes);
        }
    }

    #[inline(always)]
    fn note(
        &mut self,
        block: Shared<u64>,
        now: u64,
        rung: u64,
        executed: u64,
        completed: u64,
        bytes: u64,
    ) {
        let settled = self.rung == self.completed;
        // The usual turn of a short queue: everything that was rung is complete, and nothing was before.
        if settled && rung == completed && rung > self.rung && self.rung_at == now {
            let (from, slots) = (self.rung, rung - self.rung);
            (self.rung, self.executed, self.completed) = (rung, rung, rung);
            return self.put(block, Kind::Done, now, from, slots, bytes);
        }
        self.note_apart(block, now, rung, executed, completed, bytes);
    }

    /// Each index by itself.
    fn note_apart(
        &mut self,
        block: Shared<u64>,
        now: u64,
        rung: u64,
        executed: u64,
        completed: u64,
        bytes: u64,
    ) {
        if rung != self.rung {
            let (from, slots) = (self.rung, rung.saturating_sub(self.rung));
            self.rung = rung;
            let at = self.rung_at;
            self.put(block, Kind::Rung, at, from, slots, 0);
        }
        let at_once = self.executed == self.completed && executed == completed;
        if executed > self.executed {
            let (from, slots) = (self.executed, executed - self.executed);
            let kind = match at_once {
                true => Kind::Executed,
                false => Kind::Issued,
            };
            self.put(block, kind, now, from, slots, bytes);
        }
        if completed > self.completed && !at_once {
            let (from, slots) = (self.completed, completed - self.completed);
            self.put(block, Kind::Completed, now, from, slots, 0);
        }
        // They go back when what was under way is given up.
        (self.executed, self.completed) = (executed, completed);
        self.indexes(block);
    }

    #[inline(always)]
    fn indexes(&self, block: Shared<u64>) {
        // SAFETY: inside the block.
        unsafe {
            Self::word(block, qp::RUNG as u64).store(self.rung, Ordering::Relaxed);
            Self::word(block, qp::EXECUTED as u64).store(self.executed, Ordering::Relaxed);
            Self::word(block, qp::COMPLETED as u64).store(self.completed, Ordering::Relaxed);
        }
    }

    /// Writes an event, or makes the last one longer.
    #[inline(always)]
    fn put(
        &mut self,
        block: Shared<u64>,
        kind: Kind,
        time: u64,
        from: u64,
        slots: u64,
        value: u64,
    ) {
        let last = &mut self.last;
        let joins = kind.joins()
            && last.kind == kind as u64
            && last.time == time
            && last.from + last.slots == from
            && last.slots + slots < 1 << 24;
        if joins {
            last.slots += slots;
            last.value = last.value.saturating_add(value);
        } else {
            *last = Last {
                time,
                from,
                slots: slots.min((1 << 24) - 1),
                value,
                kind: kind as u64,
            };
            self.head += 1;
        }
        let meta = last.kind | last.slots << 8 | last.value.min(u64::from(u32::MAX)) << 32;
        let at = layout::EVENTS as u64 + ((self.head - 1) & self.mask) * layout::EVENT_WORDS as u64;
        // SAFETY: an event's words in the block.
        unsafe {
            if !joins {
                Self::word(block, at).store(time, Ordering::Relaxed);
                Self::word(block, at + 1).store(from, Ordering::Relaxed);
            }
            Self::word(block, at + 2).store(meta, Ordering::Relaxed);
            // Release: whoever sees the count sees the event. Events that are being overwritten are those a whole ring before it, which
            // readers leave out.
            if !joins {
                Self::word(block, qp::HEAD as u64).store(self.head, Ordering::Release);
            }
        }
        // Of the newest event, if it is that, all indexes can be told.
        if !matches!(kind, Kind::Done) {
            self.indexes(block);
        }
    }

    /// Something that is no progress.
    #[cold]
    pub(crate) fn event(&mut self, kind: Kind, from: u64, slots: u64, value: u32) {
        if let Some(On { block, clock }) = self.on {
            self.put(block, kind, clock.read(), from, slots, value.into());
        }
    }

    /// The QP begins anew.
    #[cold]
    pub(crate) fn rewind(&mut self) {
        (self.rung, self.executed, self.completed, self.posted) = (0, 0, 0, 0);
        self.last = Last::default();
        if let Some(on) = self.on {
            self.indexes(on.block);
        }
        self.set(qp::ERROR, 0);
        self.set(qp::POSTED, 0);
    }

    /// Sets a word of the block.
    fn set(&self, at: usize, value: u64) {
        if let Some(kept) = &self.kept {
            kept.words.set(at, value);
        }
    }

    /// What was rung was flushed.
    #[cold]
    pub(crate) fn flushed(&mut self, from: u64, to: u64) {
        if let Some(On { block, clock }) = self.on {
            (self.rung, self.executed, self.completed) = (to, to, to);
            self.put(block, Kind::Flushed, clock.read(), from, to - from, 0);
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Slots seen written, rung or not.
    pub(crate) fn posted(&self) -> u64 {
        self.posted
    }

    pub(crate) fn see_posted(&mut self, to: u64) {
        self.posted = to;
        self.set(qp::POSTED, to);
    }

    /// Why the QP is set aside; `true` if that is new.
    pub(crate) fn parked(&mut self, why: Park) -> bool {
        match &mut self.kept {
            Some(kept) => core::mem::replace(&mut kept.parked, why) != why,
            None => false,
        }
    }

    /// Its first error.
    pub(crate) fn failed(&self, word: ErrorWord) {
        self.set(qp::ERROR, word.0);
    }

    pub(crate) fn state(&self, state: QpState) {
        self.set(qp::STATE, state as u64);
    }

    pub(crate) fn target(&self, word: u64) {
        self.set(qp::TARGET, word);
    }

    pub(crate) fn watch_poster(&mut self, at: Shared<u64>, keep: Keep) {
        self.set(qp::POSTER, at.addr() as u64);
        if let Some(kept) = &mut self.kept {
            kept.poster = Some((at, keep));
        }
    }

    /// Says what the QP is.
    pub(crate) fn describe(&self, what: &Description) {
        let receives = what.log_receives.map_or(0, |log| u64::from(log) + 1);
        let shape = u64::from(what.log_depth)
            | (what.handler as u64 & 0xff) << 8
            | (what.cq as u64) << 16
            | receives << 32;
        for (at, value) in [
            (qp::OWNER, what.core as u64),
            (qp::SHAPE, shape),
            (qp::PD, what.pd.into()),
            (qp::RING, what.addresses[0]),
            (qp::CQ, what.addresses[1]),
            (qp::RECORD, what.addresses[2]),
            (qp::DOORBELL, what.addresses[3]),
        ] {
            self.set(at, value);
        }
        if let Some(kept) = &self.kept {
            // Last: with it the block is one.
            kept.words.word(qp::NUMBERS).store(
                u64::from(what.qpn) | u64::from(what.cqn) << 32,
                Ordering::Release,
            );
        }
    }

    /// Is a copy to be taken of a queue in which something `waits`? Of one that has emptied, once, to clear it.
    pub(crate) fn wants_still(&self, waits: bool) -> bool {
        self.kept.as_ref().is_some_and(|kept| {
            waits
                || (kept.words.get(layout::STILL + still::SLOTS)
                    | kept.words.get(layout::STILL + still::NOTE))
                    != 0
        })
    }

    /// What the poster's structure says, if it can be read by the host.
    pub(crate) fn poster(&self) -> Option<[u64; 4]> {
        let (poster, _) = self.kept.as_ref()?.poster.as_ref()?;
        // SAFETY: whoever named it promised that it is mapped as long as what keeps it, which is here.
        Some(unsafe { crate::engine::watch::poster(*poster) })
    }

    /// Takes a copy.
    pub(crate) fn still(&self, of: &Standing, slot: impl Fn(u64) -> u64) {
        let (Some(kept), Some(On { clock, .. })) = (&self.kept, self.on) else {
            return;
        };
        let to = &kept.words;
        let at = |i: usize| layout::STILL + i;
        let now = clock.read();
        let before = to.get(at(still::SEQ));
        let count = of.slots.min(still::MAX_SLOTS as u64);
        let poster = of.poster.unwrap_or_default();
        let recv = of.recv.map_or([0, 0], |(posted, done)| [posted + 1, done]);
        let words = [
            (still::FIRST, of.first),
            (still::RUNG, of.rung),
            (still::RECORD, of.record.into()),
            (still::DOORBELL, of.doorbell),
            (still::PARKED, of.parked as u64),
            (still::NEWEST, of.newest),
            (still::POSTER, poster[0]),
            (still::POSTER + 1, poster[1]),
            (still::POSTER + 2, poster[2]),
            (still::POSTER + 3, poster[3]),
            (still::RECV_POSTED, recv[0]),
            (still::RECV_DONE, recv[1]),
        ];
        let same = before != 0 && words.iter().all(|&(i, value)| to.get(at(i)) == value);
        // Odd until it is whole, also if the process dies in between.
        to.set(at(still::SEQ), before | 1);
        fence(Ordering::Release);
        if !same {
            to.set(at(still::SINCE), now);
        }
        to.set(at(still::AT), now);
        to.set(at(still::SLOTS), count);
        for (i, value) in words {
            to.set(at(i), value);
        }
        for (i, word) in of.cqe.into_iter().enumerate() {
            to.set(at(still::CQE + i), word);
        }
        for (i, word) in of.note.into_iter().enumerate() {
            to.set(at(still::NOTE + i), word);
        }
        for (number, words, lacks) in [
            (still::LACKS, still::LACKS_CQE, &of.lacks),
            (still::RECV_LACKS, still::RECV_LACKS_CQE, &of.recv_lacks),
        ] {
            to.set(at(number), lacks.map_or(0, |(index, _)| index + 1));
            for (i, word) in lacks.map_or([0; 8], |(_, cqe)| cqe).into_iter().enumerate() {
                to.set(at(words + i), word);
            }
        }
        for i in 0..count * 8 {
            to.set(at(still::RING + i as usize), slot(i));
        }
        to.word(at(still::SEQ))
            .store((before | 1).wrapping_add(1), Ordering::Release);
    }

    /// Has nothing moved since the last copy, as far as the indexes say? Then it is worth to look for what is missing.
    pub(crate) fn stands(&self, first: u64, rung: u64) -> bool {
        self.kept.as_ref().is_some_and(|kept| {
            kept.words.get(layout::STILL + still::FIRST) == first
                && kept.words.get(layout::STILL + still::RUNG) == rung
        })
    }
}

/// An entry of a CQ, and which.
pub(crate) type Numbered = (u64, [u64; 8]);

/// What stands in the memory of a queue pair at one moment.
#[derive(Debug)]
pub(crate) struct Standing {
    pub(crate) parked: Park,
    /// The record, and the doorbell word.
    pub(crate) record: u32,
    pub(crate) doorbell: u64,
    /// Reserved, ready, rung, consumed.
    pub(crate) poster: Option<[u64; 4]>,
    /// Who waits: a [`doorbell_device::layout::WaitNote`].
    pub(crate) note: [u64; 6],
    /// The first slot that is not complete, how many such there are, and how many were rung.
    pub(crate) first: u64,
    pub(crate) slots: u64,
    pub(crate) rung: u64,
    /// One more than the newest slot that a collapsed CQ ought to show.
    pub(crate) newest: u64,
    /// The newest CQE.
    pub(crate) cqe: [u64; 8],
    /// The first CQE that is not as it was written, and the same of the receives.
    pub(crate) lacks: Option<Numbered>,
    pub(crate) recv_lacks: Option<Numbered>,
    /// Receives posted and filled, if there is a queue of them.
    pub(crate) recv: Option<(u64, u64)>,
}
