//! What became of a receive: its CQE, its error, and the consumer index.

use doorbell_wire::cqe::{CqeTail, ErrorCqe};
use doorbell_wire::{Chunk, Syndrome};

use super::{Arrival, CQE_WORDS, Look, Received, RecvQueue};
use crate::arch::{Arch, At};
use crate::error::Error;
use crate::layout::{ErrorWord, POISON, QpHandle};
use crate::post::{pack, unpack};
use crate::qp::{Deadline, Qp, Ticket};
use crate::scope::{Scope, Sharing, Thread, sharing};
use crate::sites;

impl<A: Arch, S: Scope, M: Sharing> RecvQueue<'_, A, S, M> {
    /// What became of receive `ticket`, as its CQE has it.
    #[inline(always)]
    pub(super) fn take(&self, ticket: Ticket) -> Result<Option<Received>, Error> {
        match self.look(ticket.0) {
            Look::NotYet => Ok(None),
            Look::Lapped => Err(Error::LAPPED),
            Look::Failed => Err(self.fail(ticket.0)),
            Look::Done(tail) => {
                let Some(arrival) = Arrival::from_code(tail.code()) else {
                    return Err(Error::QP_ERROR);
                };
                let (imm, bytes) = (self.body(ticket.0, 9), self.body(ticket.0, 11));
                self.raise(ticket.0 + 1);
                Ok(Some(Received {
                    ticket,
                    arrival,
                    bytes: bytes.swap_bytes(),
                    imm: if matches!(arrival, Arrival::Send) {
                        0
                    } else {
                        imm.swap_bytes()
                    },
                }))
            }
        }
    }

    #[inline(always)]
    pub(super) fn look(&self, index: u64) -> Look {
        // SAFETY: the last word of a CQE inside the CQ.
        let tail = CqeTail(unsafe { self.arch.load32(self.cqe(index, 15), sites::CQE_LOAD) });
        if tail.is_invalid() {
            return Look::NotYet;
        }
        // The owner bit tells this lap from the last one; the counter tells a later one.
        let owner = u8::from(index & (u64::from(self.cq_mask) + 1) != 0);
        let ahead = tail.wqe_counter().wrapping_sub(index as u16);
        if tail.owner() == owner && ahead == 0 {
            if tail.is_error() {
                Look::Failed
            } else {
                Look::Done(tail)
            }
        } else if (1..0x8000).contains(&ahead) {
            Look::Lapped
        } else {
            Look::NotYet
        }
    }

    #[inline(always)]
    pub(super) fn cqe(&self, index: u64, word: usize) -> *const u32 {
        // SAFETY: inside the CQ.
        unsafe {
            self.cq
                .add((index as u32 & self.cq_mask) as usize * CQE_WORDS + word)
        }
    }

    #[inline(always)]
    pub(super) fn body(&self, index: u64, word: usize) -> u32 {
        // SAFETY: a word of a CQE inside the CQ.
        unsafe { self.arch.load32(self.cqe(index, word), sites::CQE_BODY) }
    }

    /// The error of the receive at `index`, whose CQE says that it failed; recorded if it is the queue's first.
    #[inline(always)]
    pub(super) fn fail(&self, index: u64) -> Error {
        let e = unpack(Self::fail_called(self.arch, self.handle, index));
        if M::EXCLUSIVE {
            self.next.set(self.next.get() | POISON);
        }
        e.err().unwrap_or(Error::QP_ERROR)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn fail_called(arch: A, handle: QpHandle, index: u64) -> u64 {
        // SAFETY: the promise was made for the queue whose handle this is.
        pack(unsafe { Self::new(arch, handle) }.and_then(|q| Err(q.failed(index))))
    }

    pub(super) fn failed(&self, index: u64) -> Error {
        let words = core::array::from_fn::<u32, 4, _>(|i| self.body(index, 12 + i));
        let last = Chunk::from_words(words[0], words[1], words[2], words[3]);
        let mut word = match ErrorCqe::parse_last(last) {
            Some(e) => ErrorWord::completion(e.syndrome.0, e.vendor.0, e.opcode, index as u16),
            None => ErrorWord::completion(Syndrome::WR_FLUSH.0, 0, 0, index as u16),
        };
        if word.syndrome() == Syndrome::WR_FLUSH.0 {
            // A flushed receive says nothing of why: the QP's first error does.
            let why = Qp::<A, Thread, sharing::Gpu>::why(self.arch, self.handle);
            if why != ErrorWord::NONE {
                word = why;
            }
        }
        let first = self.recorded();
        if first != ErrorWord::NONE {
            word = first;
        } else {
            // SAFETY: a word of the extension.
            let seen = unsafe {
                self.arch
                    .cas64(self.first_error(), 0, word.0, sites::ERROR_SET)
            };
            if seen != 0 {
                word = ErrorWord(seen);
            }
        }
        self.poison();
        Error::from_word(word).unwrap_or(Error::QP_ERROR)
    }

    pub(super) fn recorded(&self) -> ErrorWord {
        // SAFETY: a word of the extension.
        ErrorWord(unsafe { self.arch.load64(self.first_error(), sites::ERROR_LOAD) })
    }

    /// Refuses later posts.
    pub(super) fn poison(&self) {
        if !M::EXCLUSIVE {
            // SAFETY: a word of the extension.
            unsafe {
                self.arch.or64(self.pi(), POISON, M::at(sites::POISON_SET));
            }
        }
    }

    /// What a wait looks at now and then: errors of the QP, the abort flag, the clock.
    #[cold]
    #[inline(never)]
    pub(super) fn check_up(arch: A, handle: QpHandle, deadline: Deadline) -> u64 {
        let why = Qp::<A, Thread, sharing::Gpu>::why(arch, handle);
        pack(match Error::from_word(why) {
            Some(e) => Err(e),
            None if arch.aborted() => Err(Error::ABORTED),
            None if deadline.passed(arch) => Err(Error::TIMED_OUT),
            None => Ok(0),
        })
    }

    /// Every receive below `next` is complete.
    #[inline(always)]
    pub(super) fn raise(&self, next: u64) {
        // SAFETY: a word of the extension; exclusive use makes the plain store right.
        unsafe {
            if M::EXCLUSIVE {
                if next > self.seen.get() {
                    self.seen.set(next);
                    self.arch.store_own64(self.ci(), next);
                }
            } else {
                self.arch.max64(self.ci(), next, M::at(sites::CI_MAX));
            }
        }
    }

    #[inline(always)]
    pub(super) fn load(&self, p: *const u64, at: At) -> u64 {
        // SAFETY: `p` is a word of the extension that `new` was promised.
        unsafe {
            if M::EXCLUSIVE {
                self.arch.load_own64(p)
            } else {
                self.arch.load64(p, M::at(at))
            }
        }
    }
}
