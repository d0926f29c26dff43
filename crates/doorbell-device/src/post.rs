//! Posting: reserve slots for the lanes that hold the same QP, write their WQEs in parallel, publish in order, one of them rings.
//!
//! `sq_rsvd_index` hands out slots, after room for them is known. `sq_ready_index` says how far the queue is written, in order, and its top
//! bit says that somebody is ringing: one exchange both publishes WQEs and finds out whether to ring for them. Who finds the
//! bit set returns at once: the ringer gives it up with a compare-and-swap that fails if more was published, and then rings again.
//! Posters wait for one another only between reserving and that exchange, so nothing slow happens there: the fence comes before.
//!
//! Lanes write their own WQEs, 16 bytes a store. Exchanging pieces so that a store instruction writes whole 64-byte slots was
//! tried on an H200 and gained nothing (block-shared 64 x 32: 496 M puts/s against 506 M without): the GPU's L2 merges them anyway.
//!
//! Compared with a lock (DOCA's) nobody waits for a ring to end; compared with a counter beside the index there is one
//! atomic less, one fence less, and it works on a bare 296-byte QP. Rings follow one another, so the newest doorbell is the last one written.

use core::ptr::addr_of_mut;

use doorbell_wire::{Chunk, db};

use crate::arch::{Arch, Group};
use crate::error::Error;
use crate::layout::{CqKind, NicHandler, POISON, QpHandle, RINGING};
use crate::qp::{Deadline, Post, Qp, Ticket};
use crate::scope::{Coop, Scope, Sharing};
use crate::sites;
use crate::wr::Slot;

/// Chunks in a slot.
const CHUNKS: usize = 4;
/// Most slots that one call reserves for one thread.
pub const MAX_SLOTS: u32 = 511;
/// How much longer than its own deadline a poster waits for those before it to publish: they have their slots, and only write.
/// It cannot give up harmlessly, so a short deadline must not make it.
pub(crate) const PUBLISH_GRACE_NS: u64 = 2_000_000_000;
/// Spins between two looks at the clock.
const LOOK: u32 = 16;

/// A call that several threads make together, in progress.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    g: Group,
    /// Whether this thread is the one.
    pub(crate) acts: bool,
}

/// Marks an error among values that lanes pass one another; an index never has this bit.
const FAILED: u64 = 1 << 63;

#[inline(always)]
pub(crate) const fn pack(result: Result<u64, Error>) -> u64 {
    match result {
        Ok(v) => v,
        Err(e) => FAILED | e.code(),
    }
}

#[inline(always)]
pub(crate) const fn unpack(v: u64) -> Result<u64, Error> {
    if v & FAILED == 0 {
        return Ok(v);
    }
    match Error::from_code(v) {
        Some(e) => Err(e),
        None => Err(Error::QP_ERROR),
    }
}

/// Begins a call that the threads of the scope make together: one of them acts, after the others' writes.
#[inline(always)]
pub(crate) fn enter<A: Arch, S: Scope>(a: A) -> Turn {
    match S::COOP {
        Coop::Thread => Turn {
            g: Group::alone(),
            acts: true,
        },
        Coop::Warp => {
            let g = a.warp();
            Turn {
                g,
                acts: g.is_leader(),
            }
        }
        Coop::Block => {
            a.block_sync();
            Turn {
                g: Group::alone(),
                acts: a.thread() == 0,
            }
        }
    }
}

/// Ends it: all get the result of the one, packed.
#[inline(always)]
pub(crate) fn leave<A: Arch, S: Scope>(a: A, turn: Turn, result: u64) -> Result<u64, Error> {
    unpack(match S::COOP {
        Coop::Thread => result,
        Coop::Warp => {
            let said = a.broadcast64(turn.g, result);
            // What the one acquired is visible to all.
            a.sync(turn.g);
            said
        }
        Coop::Block => a.block_broadcast64(result),
    })
}

impl<A: Arch, S: Scope, M: Sharing> Qp<'_, A, S, M> {
    /// Posts `n` slots whose k-th has the contents `build(k, index, with completion)`, of which the first `used` chunks matter.
    /// `BULK`: many of them, so worth more code.
    /// The last slot is a WQE of its own, and the ticket is its index.
    #[inline(always)]
    pub(crate) fn post<const BULK: bool>(
        &self,
        n: u32,
        used: u32,
        how: Post,
        build: impl Fn(u32, u64, bool) -> Slot,
    ) -> Result<Ticket, Error> {
        if n > MAX_SLOTS || (!how.signal && self.cq_kind == CqKind::PerSlot) {
            return Err(Error::INVALID);
        }
        match S::COOP {
            Coop::Thread if M::EXCLUSIVE => {
                self.post_in::<BULK>(Group::alone(), n, used, how, build)
            }
            Coop::Thread => {
                let g = self.arch.group(self.key(n, how));
                self.post_in::<BULK>(g, n, used, how, build)
            }
            Coop::Warp | Coop::Block => {
                let turn = self.enter();
                let mut ticket = 0;
                if turn.acts {
                    ticket = pack(
                        self.post_in::<BULK>(Group::alone(), n, used, how, build)
                            .map(|t| t.0),
                    );
                }
                self.leave(turn, ticket).map(Ticket)
            }
        }
    }

    /// See [`enter`].
    #[inline(always)]
    pub(crate) fn enter(&self) -> Turn {
        enter::<A, S>(self.arch)
    }

    /// See [`leave`].
    #[inline(always)]
    pub(crate) fn leave(&self, turn: Turn, result: u64) -> Result<u64, Error> {
        leave::<A, S>(self.arch, turn, result)
    }

    /// Lanes with one key are served together: same queue, same number of slots (so a lane's position gives its place), same options.
    /// The address is 8-byte aligned and below 2^56, which leaves 11 bits: 9 for `n`, 2 for options.
    #[inline(always)]
    fn key(&self, n: u32, how: Post) -> u64 {
        (self.qp as u64) >> 3
            | u64::from(n) << 53
            | u64::from(how.ring) << 62
            | u64::from(how.check) << 63
    }

    #[inline(always)]
    fn post_in<const BULK: bool>(
        &self,
        g: Group,
        n: u32,
        used: u32,
        how: Post,
        build: impl Fn(u32, u64, bool) -> Slot,
    ) -> Result<Ticket, Error> {
        let a = self.arch;
        // A whole warp's WQEs at once only where they leave others room in the ring.
        let g = if n * g.size > self.depth() / 2 {
            Group::alone()
        } else {
            g
        };
        let need = n * g.size;
        let mut first = 0;
        if g.is_leader() {
            first = pack(self.reserve(need, how));
        }
        if g.size > 1 {
            first = a.broadcast64(g, first);
        }
        let first = unpack(first)?;
        let end = first + u64::from(need);
        let mine = first + u64::from(g.rank * n);
        self.write::<BULK>(mine, n, used, |k, index| {
            build(k, index, how.signal || index + 1 == end)
        });
        let mut result = 0;
        if g.size > 1 {
            a.sync(g);
        }
        if g.is_leader() {
            result = pack(self.publish(first, end, how).map(|()| 0));
        }
        if g.size > 1 {
            // All hear what became of it; and all wait, or the lanes would run ahead of their leader and post one by one ever after.
            result = a.broadcast64(g, result);
        }
        unpack(result)?;
        Ok(Ticket(mine + u64::from(n) - 1))
    }

    /// Slots for `need` WQEBBs, which are free.
    #[inline(always)]
    pub(crate) fn reserve(&self, need: u32, how: Post) -> Result<u64, Error> {
        let a = self.arch;
        if need > self.depth() {
            return Err(Error::INVALID);
        }
        let need = u64::from(need);
        let p = self.rsvd();
        if M::EXCLUSIVE {
            let next = self.next.get();
            self.refuse_poisoned(next)?;
            if how.check {
                self.make_room(next, need, how.deadline)?;
            }
            self.next.set(next + need);
            return Ok(next);
        }
        if !how.check {
            // SAFETY: a word of the QP.
            let next = unsafe { a.add64(p, need, M::at(sites::RESERVE_ADD)) };
            self.refuse_poisoned(next)?;
            return Ok(next);
        }
        let mut next = self.load(p, sites::RESERVE_LOAD);
        loop {
            self.refuse_poisoned(next)?;
            if self.make_room(next, need, how.deadline)? {
                // Time has passed: others have reserved meanwhile.
                next = self.load(p, sites::RESERVE_LOAD);
                continue;
            }
            // SAFETY: a word of the QP.
            let seen = unsafe { a.cas64(p, next, next + need, M::at(sites::RESERVE_CAS)) };
            if seen == next {
                return Ok(next);
            }
            next = seen;
        }
    }

    #[inline(always)]
    fn refuse_poisoned(&self, rsvd: u64) -> Result<(), Error> {
        if rsvd & POISON == 0 {
            return Ok(());
        }
        unpack(Self::first_error(self.arch, self.handle())).map(|_| ())
    }

    /// Returns when slots `next .. next + need` are free; true if it had to wait.
    #[inline(always)]
    fn make_room(&self, next: u64, need: u64, deadline: Deadline) -> Result<bool, Error> {
        // All slots below this one must be complete.
        let target = (next + need).saturating_sub(u64::from(self.depth()));
        if target <= self.seen.get() || target <= self.consumer() {
            return Ok(false);
        }
        match unpack(Self::wait_seldom(
            self.arch,
            self.handle(),
            target - 1,
            deadline,
        )) {
            Ok(_) => Ok(true),
            Err(e) if e == Error::TIMED_OUT => Err(Error::NO_SPACE),
            Err(e) => Err(self.note(e)),
        }
    }

    /// Remembers an error of the QP: an exclusive queue's reservations do not look at memory.
    #[inline(always)]
    pub(crate) fn note(&self, e: Error) -> Error {
        if M::EXCLUSIVE && e != Error::TIMED_OUT && e != Error::ABORTED && !self.ext.is_null() {
            self.next.set(self.next.get() | POISON);
        }
        e
    }

    /// The `chunk`-th 16 bytes of slot `index`.
    #[inline(always)]
    fn chunk(&self, index: u64, chunk: u32) -> *mut Chunk {
        let at = (index as u32 & self.mask) as usize * CHUNKS + chunk as usize;
        // SAFETY: inside the ring, which has `mask + 1` slots of four chunks.
        unsafe { self.ring.add(at) }
    }

    /// Writes the chunks of slots that this thread has reserved. Spelt out, not looped over an array: LLVM would put the array
    /// in local memory.
    #[inline(always)]
    fn write<const BULK: bool>(
        &self,
        mine: u64,
        n: u32,
        used: u32,
        build: impl Fn(u32, u64) -> Slot,
    ) {
        let store = |index: u64, j: u32, chunk: Chunk| {
            if j < used {
                // SAFETY: inside the ring, in slots that this thread has reserved.
                unsafe { self.arch.store_chunk(self.chunk(index, j), chunk) };
            }
        };
        let one = |k: u32, [c0, c1, c2, c3]: Slot| {
            let index = mine + u64::from(k);
            store(index, 0, c0);
            store(index, 1, c1);
            store(index, 2, c2);
            store(index, 3, c3);
        };
        let mut k = 0;
        if BULK && M::EXCLUSIVE {
            // A lone thread is bound by the latency of its arithmetic: four slots at a time give it something to overlap.
            while k + 4 <= n {
                let slot = |i: u32| build(k + i, mine + u64::from(k + i));
                let (s0, s1, s2, s3) = (slot(0), slot(1), slot(2), slot(3));
                one(k, s0);
                one(k + 1, s1);
                one(k + 2, s2);
                one(k + 3, s3);
                k += 4;
            }
        }
        while k < n {
            one(k, build(k, mine + u64::from(k)));
            k += 1;
        }
    }

    /// Makes slots `from .. to` part of the queue, and sees to it that they are rung.
    #[inline(always)]
    pub(crate) fn publish(&self, from: u64, to: u64, how: Post) -> Result<(), Error> {
        let a = self.arch;
        let p = self.ready();
        if M::EXCLUSIVE {
            if how.ring {
                self.ring_words(to);
            }
            // For whoever uses the queue next; after the doorbell, so that no fence of ours waits for them.
            // SAFETY: words of the QP, and one thread at a time uses it.
            unsafe {
                a.store_own64(self.rsvd(), to);
                a.store_own64(p, to);
            }
            return Ok(());
        }
        a.fence(M::at(sites::PUBLISH_FENCE));
        let mut spins = 0_u32;
        while self.load(p, sites::PUBLISH_WAIT) & !RINGING != from {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(LOOK) {
                unpack(Self::still_waiting(
                    a,
                    self.handle(),
                    how.deadline.and(PUBLISH_GRACE_NS),
                ))?;
            }
            a.relax();
        }
        // Nobody else publishes now: the index changes only by us, the bit only by a ringer who gives it up.
        if !how.ring || self.ext.is_null() {
            // SAFETY: a word of the QP.
            unsafe { a.add64(p, to - from, M::at(sites::PUBLISH_ADD)) };
            if how.ring {
                let deadline = how.deadline.and(PUBLISH_GRACE_NS);
                unpack(Self::ring_locked(a, self.handle(), to, deadline))?;
            }
            return Ok(());
        }
        // SAFETY: a word of the QP.
        let before = unsafe { a.exch64(p, to | RINGING, M::at(sites::PUBLISH_EXCH)) };
        if before & RINGING == 0 {
            self.ring_until_idle(to);
        }
        Ok(())
    }

    /// Whether to go on waiting for those who reserved earlier.
    #[cold]
    #[inline(never)]
    fn still_waiting(arch: A, handle: QpHandle, deadline: Deadline) -> u64 {
        if arch.aborted() {
            return pack(Err(Error::ABORTED));
        }
        if deadline.passed(arch) {
            if let Ok(qp) = Self::again(arch, handle) {
                qp.poison();
            }
            return pack(Err(Error::STUCK));
        }
        0
    }

    /// Rings for slots below `pi` and for whatever is published meanwhile; the caller has the ringing.
    #[inline(always)]
    fn ring_until_idle(&self, mut pi: u64) {
        loop {
            self.ring_words(pi);
            // SAFETY: a word of the QP.
            let seen = unsafe {
                self.arch
                    .cas64(self.ready(), pi | RINGING, pi, M::at(sites::RING_DONE))
            };
            if seen == pi | RINGING {
                return;
            }
            pi = seen & !RINGING;
        }
    }

    /// Rings a bare QP under DOCA's lock, since foreign code may be ringing it at the same time.
    #[cold]
    #[inline(never)]
    fn ring_locked(arch: A, handle: QpHandle, to: u64, deadline: Deadline) -> u64 {
        let qp = match Self::again(arch, handle) {
            Ok(qp) => qp,
            Err(e) => return pack(Err(e)),
        };
        if qp.handler == NicHandler::ProducerWord {
            arch.fence(sites::RING_FENCE);
            // SAFETY: the producer word of the QP.
            unsafe { arch.max64(qp.db, to, sites::RING_MAX) };
            return 0;
        }
        let mut spins = 0_u32;
        // SAFETY: a word of the QP.
        while unsafe { arch.cas32(qp.lock(), 0, 1, M::at(sites::LOCK_TAKE)) } != 0 {
            arch.relax();
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(LOOK) {
                if arch.aborted() {
                    return pack(Err(Error::ABORTED));
                }
                if deadline.passed(arch) {
                    return pack(Err(Error::STUCK));
                }
            }
        }
        if to > qp.load(qp.rung(), sites::RING_PI) {
            qp.ring_words(to);
        }
        // SAFETY: a word of the QP.
        unsafe { arch.store32(qp.lock(), 0, M::at(sites::LOCK_GIVE)) };
        0
    }

    /// The doorbell for slots below `pi`. The caller takes turns with other ringers.
    #[inline(always)]
    fn ring_words(&self, pi: u64) {
        let a = self.arch;
        // SAFETY: words of the QP, its record and its doorbell.
        unsafe {
            if !M::EXCLUSIVE {
                a.store64(self.rung(), pi, M::at(sites::RING_PI));
            }
            let record = self.handler == NicHandler::DoorbellRecord;
            if record && self.soft {
                a.store32(self.dbrec, db::record(pi), sites::RING_RECORD);
            }
            a.fence(sites::RING_FENCE);
            if record && !self.soft {
                a.store32(self.dbrec, db::record(pi), sites::RING_RECORD);
                a.fence(sites::RING_RECORD_FENCE);
            }
            let word = match self.handler {
                NicHandler::ProducerWord => pi,
                NicHandler::DoorbellRecord | NicHandler::DoorbellOnly => {
                    db::doorbell_word(pi, self.qpn)
                }
            };
            if self.soft || self.handler == NicHandler::ProducerWord {
                a.store64(self.db, word, sites::RING_DOORBELL);
            } else {
                a.store_mmio64(self.db, word);
            }
            if M::EXCLUSIVE {
                a.store_own64(self.rung(), pi);
            }
        }
    }

    /// Rings for everything published so far, unless somebody who is ringing already will.
    ///
    /// # Errors
    /// [`Error::STUCK`] if the lock of a bare QP is not given back by `deadline`.
    #[inline(always)]
    pub fn ring(&self, deadline: Deadline) -> Result<(), Error> {
        let turn = self.enter();
        let done = if turn.acts {
            pack(self.ring_here(deadline).map(|()| 0))
        } else {
            0
        };
        self.leave(turn, done).map(|_| ())
    }

    #[inline(always)]
    pub(crate) fn ring_here(&self, deadline: Deadline) -> Result<(), Error> {
        if M::EXCLUSIVE {
            self.ring_words(self.load(self.ready(), sites::READY_LOAD));
            return Ok(());
        }
        if self.ext.is_null() {
            let to = self.load(self.ready(), sites::READY_LOAD);
            return unpack(Self::ring_locked(
                self.arch,
                self.handle(),
                to & !RINGING,
                deadline,
            ))
            .map(|_| ());
        }
        // SAFETY: a word of the QP.
        let before = unsafe {
            self.arch
                .or64(self.ready(), RINGING, M::at(sites::RING_CLAIM))
        };
        if before & RINGING == 0 {
            self.ring_until_idle(before);
        }
        Ok(())
    }

    /// Refuses later posts on a QP of ours.
    pub(crate) fn poison(&self) {
        if self.ext.is_null() {
            return;
        }
        // SAFETY: words of the QP and of its extension.
        unsafe {
            self.arch
                .or64(self.rsvd(), POISON, M::at(sites::POISON_SET));
            self.arch.store32(
                addr_of_mut!((*self.ext).state),
                crate::layout::STATE_ERROR,
                sites::STATE_SET,
            );
        }
    }
}
