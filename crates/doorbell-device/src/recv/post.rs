//! Posting receives: reserve slots for the lanes that post to the same queue, write, and publish in turns.

use doorbell_wire::{db, seg};

use super::{END_KEY, LOOK, Look, RecvQueue};
use crate::arch::{Arch, Group};
use crate::error::Error;
use crate::layout::POISON;
use crate::post::{MAX_SLOTS, PUBLISH_GRACE_NS, enter, leave, pack, unpack};
use crate::qp::{Deadline, Ticket};
use crate::scope::{Coop, Scope, Sharing};
use crate::sites;
use crate::wr::Local;

impl<A: Arch, S: Scope, M: Sharing> RecvQueue<'_, A, S, M> {
    #[inline(always)]
    pub(super) fn post(
        &self,
        n: u32,
        deadline: Deadline,
        write: impl Fn(u64, u32),
    ) -> Result<Ticket, Error> {
        if n == 0 || n > MAX_SLOTS || n > self.depth() {
            return Err(Error::INVALID);
        }
        match S::COOP {
            Coop::Thread if M::EXCLUSIVE => self.post_in(Group::alone(), n, deadline, write),
            Coop::Thread => {
                // Lanes that post as many receives to the same queue are served together; see `Qp::key`.
                let key = (self.handle.ext as u64) >> 3 | u64::from(n) << 53;
                self.post_in(self.arch.group(key), n, deadline, write)
            }
            Coop::Warp | Coop::Block => {
                let turn = enter::<A, S>(self.arch);
                let mut ticket = 0;
                if turn.acts {
                    ticket = pack(
                        self.post_in(Group::alone(), n, deadline, write)
                            .map(|t| t.0),
                    );
                }
                leave::<A, S>(self.arch, turn, ticket).map(Ticket)
            }
        }
    }

    #[inline(always)]
    pub(super) fn post_in(
        &self,
        g: Group,
        n: u32,
        deadline: Deadline,
        write: impl Fn(u64, u32),
    ) -> Result<Ticket, Error> {
        let a = self.arch;
        // A whole warp's receives at once only where they leave others room.
        let g = if n * g.size > self.depth() / 2 {
            Group::alone()
        } else {
            g
        };
        let need = u64::from(n * g.size);
        let mut first = 0;
        if g.is_leader() {
            first = pack(self.reserve(need, deadline));
        }
        if g.size > 1 {
            first = a.broadcast64(g, first);
        }
        let first = unpack(first)?;
        let mine = first + u64::from(g.rank * n);
        let mut k = 0;
        while k < n {
            write(mine + u64::from(k), k);
            k += 1;
        }
        let mut result = 0;
        if g.size > 1 {
            a.sync(g);
        }
        if g.is_leader() {
            result = pack(self.publish(first, first + need, deadline).map(|()| 0));
        }
        if g.size > 1 {
            result = a.broadcast64(g, result);
        }
        unpack(result)?;
        Ok(Ticket(mine + u64::from(n) - 1))
    }

    /// Receives `next .. next + need`, whose slots are free.
    #[inline(always)]
    pub(super) fn reserve(&self, need: u64, deadline: Deadline) -> Result<u64, Error> {
        let p = self.pi();
        if M::EXCLUSIVE {
            let next = self.next.get();
            self.refuse_poisoned(next)?;
            self.make_room(next, need, deadline)?;
            self.next.set(next + need);
            return Ok(next);
        }
        let mut next = self.load(p, sites::RESERVE_LOAD);
        loop {
            self.refuse_poisoned(next)?;
            if self.make_room(next, need, deadline)? {
                // Time has passed: others have reserved meanwhile.
                next = self.load(p, sites::RESERVE_LOAD);
                continue;
            }
            // SAFETY: a word of the extension.
            let seen = unsafe {
                self.arch
                    .cas64(p, next, next + need, M::at(sites::RESERVE_CAS))
            };
            if seen == next {
                return Ok(next);
            }
            next = seen;
        }
    }

    #[inline(always)]
    pub(super) fn refuse_poisoned(&self, next: u64) -> Result<(), Error> {
        if next & POISON == 0 {
            return Ok(());
        }
        Err(Error::from_word(self.recorded()).unwrap_or(Error::QP_ERROR))
    }

    /// Returns when slots `next .. next + need` are free; true if it had to wait.
    #[inline(always)]
    pub(super) fn make_room(
        &self,
        next: u64,
        need: u64,
        deadline: Deadline,
    ) -> Result<bool, Error> {
        // All receives below this one must be complete.
        let target = (next + need).saturating_sub(u64::from(self.depth()));
        if target <= self.seen.get() {
            return Ok(false);
        }
        let ci = self.load(self.ci(), sites::CI_LOAD);
        self.seen.set(ci);
        if target <= ci {
            return Ok(false);
        }
        let mut polls = 0_u32;
        loop {
            match self.look(target - 1) {
                // A later lap was completed: so was this one.
                Look::Done(_) | Look::Lapped => {
                    self.raise(target);
                    // What was looked at first may be old news by now, unless nobody waited.
                    return Ok(polls != 0);
                }
                Look::Failed => return Err(self.fail(target - 1)),
                Look::NotYet => {}
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(LOOK) {
                match unpack(Self::check_up(self.arch, self.handle, deadline)) {
                    Ok(_) => {}
                    Err(e) if e == Error::TIMED_OUT => return Err(Error::NO_SPACE),
                    Err(e) => return Err(e),
                }
            }
            self.arch.relax();
        }
    }

    /// Writes a receive: its pieces, and an end if the slot has room for more.
    #[inline(always)]
    pub(super) fn write(&self, index: u64, pieces: u32, what: impl Fn(u32) -> Local) {
        let at = (index as u32 & self.mask) as usize * self.segments as usize;
        let mut used = 0;
        let mut i = 0;
        while i < pieces {
            let local = what(i);
            // A length of 0 would be 2^31 bytes to some devices.
            if local.len != 0 {
                let chunk = seg::data(local.len as u32, local.key, local.addr);
                // SAFETY: inside the ring, in a slot that this thread has reserved.
                unsafe { self.arch.store_chunk(self.ring.add(at + used), chunk) };
                used += 1;
            }
            i += 1;
        }
        if used < self.segments as usize {
            let end = seg::data(0, END_KEY, 0);
            // SAFETY: as above.
            unsafe { self.arch.store_chunk(self.ring.add(at + used), end) };
        }
    }

    /// Makes receives `from .. to` part of the queue.
    #[inline(always)]
    pub(super) fn publish(&self, from: u64, to: u64, deadline: Deadline) -> Result<(), Error> {
        let a = self.arch;
        if M::EXCLUSIVE {
            a.fence(sites::RECV_FENCE);
            // SAFETY: words of the QP, and one thread at a time uses its receive queue.
            unsafe {
                a.store32(self.record, db::record(to), sites::RECV_RECORD);
                a.store_own64(self.pi(), to);
                a.store_own64(self.ready(), to);
            }
            return Ok(());
        }
        let mut spins = 0_u32;
        while self.load(self.ready(), sites::RECV_TURN) != from {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(LOOK) {
                if a.aborted() {
                    return Err(Error::ABORTED);
                }
                if deadline.and(PUBLISH_GRACE_NS).passed(a) {
                    self.poison();
                    return Err(Error::STUCK);
                }
            }
            a.relax();
        }
        a.fence(sites::RECV_FENCE);
        // SAFETY: words of the QP; it is this thread's turn.
        unsafe {
            a.store32(self.record, db::record(to), sites::RECV_RECORD);
            a.store64(self.ready(), to, M::at(sites::RECV_NEXT));
        }
        Ok(())
    }
}
