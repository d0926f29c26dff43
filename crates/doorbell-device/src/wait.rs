//! Waiting: every wait ends by completion, by error, or by its deadline.
//!
//! A ticket is compared with the consumer index before any CQE is looked at: a CQE that was overwritten by a later lap says nothing of
//! it. An error CQE is an answer: the waiter gets the *first* error of the QP, kept in [`QpExt::error`](crate::layout::QpExt::error),
//! since the flush completions after it overwrite a collapsed CQE; operations before the first error still count as complete.
//!
//! Functions off the hot path are not inlined, and take a handle, not `&self`: a reference would force the queue's constants
//! out of registers.

use core::ptr::addr_of_mut;

use doorbell_wire::Chunk;
use doorbell_wire::cqe::{CqeTail, ErrorCqe};

use crate::arch::Arch;
use crate::error::Error;
use crate::layout::{CqKind, ErrorKind, ErrorWord, QpHandle, RINGING};
use crate::note::LONG;
use crate::post::{pack, unpack};
use crate::qp::{Deadline, Qp, Ticket};
use crate::scope::{Scope, Sharing};
use crate::sites;

/// Polls between two looks at the clock, the error words and the abort flag.
const LOOK: u32 = 16;
/// Bytes in a CQE, and the offset of its last word.
const CQE_WORDS: usize = 16;

impl<A: Arch, S: Scope, M: Sharing> Qp<'_, A, S, M> {
    /// Whether the operation is complete; looks once.
    ///
    /// # Errors
    /// The QP's first error, unless the operation completed before it.
    #[inline(always)]
    pub fn poll(&self, ticket: Ticket) -> Result<bool, Error> {
        let turn = self.enter();
        let done = if turn.acts {
            pack(self.poll_here(ticket.0))
        } else {
            0
        };
        self.leave(turn, done).map(|v| v != 0)
    }

    #[inline(always)]
    fn poll_here(&self, index: u64) -> Result<u64, Error> {
        if self.look(index).map_err(|e| self.note(e))? {
            return Ok(1);
        }
        unpack(Self::check_up(
            self.arch,
            self.handle(),
            index,
            Deadline(u64::MAX),
            1,
        ))
    }

    /// Waits until the operation is complete: what it wrote is visible at its target, what it fetched is visible here.
    ///
    /// # Errors
    /// The QP's first error, unless the operation completed before it; [`Error::TIMED_OUT`] at the deadline; [`Error::ABORTED`].
    #[inline(always)]
    pub fn wait(&self, ticket: Ticket, deadline: Deadline) -> Result<(), Error> {
        let turn = self.enter();
        let done = if turn.acts {
            pack(self.wait_index(ticket.0, deadline).map(|()| 0))
        } else {
            0
        };
        self.leave(turn, done).map(|_| ())
    }

    /// Rings what was posted without ringing and waits for everything published so far.
    ///
    /// # Errors
    /// As [`Qp::wait`] and [`Qp::ring`].
    #[inline(always)]
    pub fn flush(&self, deadline: Deadline) -> Result<(), Error> {
        let turn = self.enter();
        let done = if turn.acts {
            pack(self.flush_here(deadline))
        } else {
            0
        };
        self.leave(turn, done).map(|_| ())
    }

    #[inline(always)]
    fn flush_here(&self, deadline: Deadline) -> Result<u64, Error> {
        let ready = self.load(self.ready(), sites::READY_LOAD) & !RINGING;
        if self.load(self.rung(), sites::RING_PI) < ready {
            self.ring_here(deadline)?;
        }
        match ready.checked_sub(1) {
            Some(last) => self.wait_index(last, deadline).map(|()| 0),
            None => Ok(0),
        }
    }

    /// The QP's first error, if it has one: seen by a thread of ours, or written down by the host. For loops that wait for something
    /// other than a ticket.
    #[inline(always)]
    pub fn error(&self) -> Option<Error> {
        unpack(Self::look_for_error(self.arch, self.handle()))
            .map_err(|e| self.note(e))
            .err()
    }

    #[cold]
    #[inline(never)]
    fn look_for_error(arch: A, handle: QpHandle) -> u64 {
        pack(
            Self::again(arch, handle).and_then(|qp| match qp.hidden_error(u64::MAX) {
                Some(verdict) => verdict.map(|()| 0),
                None => Ok(0),
            }),
        )
    }

    /// The wait of one thread for the WQE at `index`.
    #[inline(always)]
    pub(crate) fn wait_index(&self, index: u64, deadline: Deadline) -> Result<(), Error> {
        let mut polls = 0_u32;
        while !self.look(index).map_err(|e| self.note(e))? {
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(LOOK) {
                let verdict = unpack(Self::check_up(
                    self.arch,
                    self.handle(),
                    index,
                    deadline,
                    polls,
                ));
                if verdict.map_err(|e| self.note(e))? != 0 {
                    return Ok(());
                }
            }
            self.arch.relax();
        }
        self.waited(polls);
        Ok(())
    }

    /// [`Qp::wait_index`] for whoever does not expect to wait.
    #[cold]
    #[inline(never)]
    pub(crate) fn wait_seldom(arch: A, handle: QpHandle, index: u64, deadline: Deadline) -> u64 {
        pack(
            Self::again(arch, handle)
                .and_then(|qp| qp.wait_index(index, deadline))
                .map(|()| 0),
        )
    }

    /// What a wait looks at now and then: errors that no CQE of ours tells of, the abort flag, the clock. 1 if the wait is over.
    #[cold]
    #[inline(never)]
    fn check_up(arch: A, handle: QpHandle, index: u64, deadline: Deadline, polls: u32) -> u64 {
        let qp = match Self::again(arch, handle) {
            Ok(qp) => qp,
            Err(e) => return pack(Err(e)),
        };
        if let Some(verdict) = qp.hidden_error(index) {
            return pack(verdict.map(|()| 1));
        }
        if arch.aborted() {
            return pack(Err(Error::ABORTED));
        }
        let over = deadline.passed(arch);
        if over || polls.is_multiple_of(LONG) {
            qp.note_ticket(index, over);
        }
        pack(if over { Err(Error::TIMED_OUT) } else { Ok(0) })
    }

    /// Whether the WQE at `index` is complete, as far as the consumer index and one look at the CQ tell.
    #[inline(always)]
    fn look(&self, index: u64) -> Result<bool, Error> {
        if index < self.seen.get() {
            return Ok(true);
        }
        let ci = self.consumer();
        if index < ci {
            return Ok(true);
        }
        let slot = match self.cq_kind {
            CqKind::PerSlot => index as u32 & self.mask,
            CqKind::Collapsed => 0,
        };
        let tail = self.tail(slot);
        let (fresh, next) = match self.cq_kind {
            CqKind::PerSlot => {
                let owner = u8::from(index & u64::from(self.depth()) != 0);
                (!tail.is_invalid() && tail.owner() == owner, index + 1)
            }
            CqKind::Collapsed => {
                // The counter's distance from the consumer index, which is at most a ring behind it.
                let ahead = tail.wqe_counter().wrapping_add(1).wrapping_sub(ci as u16);
                let next = ci + u64::from(ahead);
                let fresh = ahead != 0 && u32::from(ahead) <= self.depth();
                (!tail.is_invalid() && (fresh || tail.is_error()), next)
            }
        };
        if !fresh {
            return Ok(false);
        }
        if tail.is_error() {
            return unpack(Self::fail(self.arch, self.handle(), ci, slot, index)).map(|_| true);
        }
        if next <= index {
            return Ok(false);
        }
        self.raise(next);
        self.seen.set(next);
        Ok(true)
    }

    #[inline(always)]
    fn tail(&self, slot: u32) -> CqeTail {
        // SAFETY: the last word of a CQE inside the CQ.
        CqeTail(unsafe {
            self.arch
                .load32(self.cq.add(slot as usize * CQE_WORDS + 15), sites::CQE_LOAD)
        })
    }

    /// Everything below `next` is complete.
    #[inline(always)]
    fn raise(&self, next: u64) {
        // SAFETY: a word of the QP; exclusive use makes the plain store right.
        unsafe {
            if M::EXCLUSIVE {
                self.arch.store_own64(self.ci(), next);
            } else {
                self.arch.max64(self.ci(), next, M::at(sites::CI_MAX));
            }
        }
    }

    /// What the error CQE in `slot` means for the WQE at `index`.
    #[cold]
    #[inline(never)]
    fn fail(arch: A, handle: QpHandle, ci: u64, slot: u32, index: u64) -> u64 {
        pack(
            Self::again(arch, handle)
                .and_then(|qp| qp.first_of(ci, slot).verdict(index))
                .map(|()| 1),
        )
    }

    /// Records the QP's first error if nobody has, and refuses later posts.
    fn first_of(&self, ci: u64, slot: u32) -> FirstError {
        let mut word = self.recorded();
        if word == ErrorWord::NONE {
            word = self.host_error();
        }
        if word == ErrorWord::NONE {
            word = self.error_in_cq(ci, slot);
        }
        self.settle(ci, word)
    }

    /// Sets the record unless it is set, refuses later posts, and lets everything before the error count as complete.
    fn settle(&self, ci: u64, mut word: ErrorWord) -> FirstError {
        if !self.ext.is_null() {
            // SAFETY: a word of the extension.
            let seen = unsafe {
                self.arch
                    .cas64(addr_of_mut!((*self.ext).error), 0, word.0, sites::ERROR_SET)
            };
            if seen != 0 {
                word = ErrorWord(seen);
            }
            self.poison();
        }
        let first = FirstError::new(ci, word);
        if word.kind() == ErrorKind::Completion {
            self.raise(first.index);
        }
        first
    }

    /// The first error in the CQ. On a per-slot CQ the CQE we saw may be that of a flushed WQE; the first error is the first from
    /// the consumer index on.
    fn error_in_cq(&self, ci: u64, slot: u32) -> ErrorWord {
        let mut slot = slot;
        if self.cq_kind == CqKind::PerSlot {
            let mut index = ci;
            while index as u32 & self.mask != slot
                && !self.tail(index as u32 & self.mask).is_error()
            {
                index += 1;
            }
            slot = index as u32 & self.mask;
        }
        let mut last = [0_u32; 4];
        for (i, word) in last.iter_mut().enumerate() {
            // SAFETY: inside a CQE of the CQ.
            *word = unsafe {
                self.arch.load32(
                    self.cq.add(slot as usize * CQE_WORDS + 12 + i),
                    sites::CQE_BODY,
                )
            };
        }
        match ErrorCqe::parse_last(Chunk::from_words(last[0], last[1], last[2], last[3])) {
            Some(e) => {
                ErrorWord::completion(e.syndrome.0, e.vendor.0, e.opcode, e.tail.wqe_counter())
            }
            // Overwritten meanwhile; cannot be read any more.
            None => ErrorWord::NONE,
        }
    }

    /// An error that no CQE of ours tells of: another thread saw it, or the host wrote it down.
    fn hidden_error(&self, index: u64) -> Option<Result<(), Error>> {
        if self.ext.is_null() {
            return None;
        }
        let mut word = self.recorded();
        if word == ErrorWord::NONE {
            word = self.host_error();
        }
        if word == ErrorWord::NONE {
            return None;
        }
        Some(self.settle(self.consumer(), word).verdict(index))
    }

    /// The QP's first error as device code or the host wrote it down; nothing is recorded by asking.
    pub(crate) fn why(arch: A, handle: QpHandle) -> ErrorWord {
        Self::again(arch, handle).map_or(ErrorWord::NONE, |qp| match qp.recorded() {
            ErrorWord::NONE => qp.host_error(),
            word => word,
        })
    }

    fn recorded(&self) -> ErrorWord {
        if self.ext.is_null() {
            return ErrorWord::NONE;
        }
        // SAFETY: a word of the extension.
        ErrorWord(unsafe {
            self.arch
                .load64(addr_of_mut!((*self.ext).error), sites::ERROR_LOAD)
        })
    }

    fn host_error(&self) -> ErrorWord {
        if self.ext.is_null() {
            return ErrorWord::NONE;
        }
        // SAFETY: a constant of the extension, and the word that it names, which lives as long as the QP.
        unsafe {
            let at = self.arch.load_const64(addr_of_mut!((*self.ext).host_error));
            if at == 0 {
                return ErrorWord::NONE;
            }
            let p = core::ptr::with_exposed_provenance(at as usize);
            ErrorWord(self.arch.load64(p, sites::HOST_ERROR_LOAD))
        }
    }

    /// The error to refuse a post with.
    #[cold]
    #[inline(never)]
    pub(crate) fn first_error(arch: A, handle: QpHandle) -> u64 {
        pack(Err(match Self::again(arch, handle) {
            Ok(qp) => Error::from_word(qp.recorded()).unwrap_or(Error::QP_ERROR),
            Err(e) => e,
        }))
    }
}

/// A QP's first error, and the index of its WQE.
struct FirstError {
    word: ErrorWord,
    index: u64,
}

impl FirstError {
    /// The 16-bit index of the record, made whole: the first error is at or after the consumer index, by less than a ring.
    #[inline(always)]
    fn new(ci: u64, word: ErrorWord) -> Self {
        Self {
            word,
            index: ci + u64::from(word.wqe_index().wrapping_sub(ci as u16)),
        }
    }

    /// What became of the WQE at `index`.
    #[inline(always)]
    fn verdict(&self, index: u64) -> Result<(), Error> {
        if self.word.kind() == ErrorKind::Completion && index < self.index {
            return Ok(());
        }
        Err(Error::from_word(self.word).unwrap_or(Error::QP_ERROR))
    }
}
