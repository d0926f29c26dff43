//! Receiving: posting receives, and learning which message went where.
//!
//! A receive WQE is nothing but 16-byte data segments, so it can stay as it is and be posted again by its record alone
//! ([`RecvQueue::recv_repost`]). Receive number i has the completion number i of a CQ of its own, in slot i modulo its size: threads
//! may poll distinct tickets, in any order, without sharing a word. What a message says (bytes, immediate) is in that CQE, so take it
//! before the slot is posted again; whoever comes too late gets [`Error::LAPPED`].
//!
//! Receives are posted in turns: `rq_pi` hands out slots, and who has the next ones stores the doorbell record when `rq_ready` says that it
//! is their turn. The send queue of the same QP is independent: other threads may use it, in another sharing mode.

mod look;
mod post;

use core::cell::Cell;
use core::marker::PhantomData;
use core::ptr::addr_of_mut;

use doorbell_wire::cqe::{CqeTail, Kind};
use doorbell_wire::{Chunk, Key};

use crate::arch::Arch;
use crate::error::Error;
use crate::layout::{EXT_MAGIC, EXT_VERSION, POISON, QpExt, QpHandle, WAIT_OVER, WAIT_RECEIVE};
use crate::note::LONG;
use crate::post::{Turn, enter, leave, pack, unpack};
use crate::qp::{Deadline, Ticket};
use crate::scope::{Coop, Scope, Sharing, Thread, sharing};
use crate::sites;
use crate::wr::{Local, PIECE};

/// Polls between two looks at the clock and the error words.
const LOOK: u32 = 16;
/// 32-bit words in a CQE.
const CQE_WORDS: usize = 16;
/// The key that ends a receive's list of pieces (mlx5's invalid key).
const END_KEY: Key = Key(0x100);
/// Bytes of a data segment.
const SEGMENT: u32 = 16;

/// How a message came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Arrival {
    /// RDMA WRITE with immediate: the bytes went where the initiator said, the receive's own memory is untouched.
    WriteImm = 1,
    /// SEND.
    Send = 2,
    /// SEND with immediate.
    SendImm = 3,
}

/// A message that took a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its receive.
    pub ticket: Ticket,
    /// How it came.
    pub arrival: Arrival,
    /// Its bytes.
    pub bytes: u32,
    /// Its immediate, in host order; 0 for [`Arrival::Send`].
    pub imm: u32,
}

/// The receive queue of a QP, for calls by threads of scope `S`, shared by threads as `M` says.
///
/// As for [`Qp`](crate::Qp), `M` is a promise, and of an exclusive queue there is one value at a time; it binds posting only. Polling and waiting
/// write nothing but the consumer index, and with [`sharing::Exclusive`] not even that atomically.
pub struct RecvQueue<'a, A: Arch, S: Scope = Thread, M: Sharing = sharing::Gpu> {
    arch: A,
    handle: QpHandle,
    ring: *mut Chunk,
    mask: u32,
    /// Chunks of a receive.
    segments: u32,
    record: *mut u32,
    cq: *const u32,
    cq_mask: u32,
    /// Consumer index as last seen.
    seen: Cell<u64>,
    /// Exclusive use: `rq_pi`, which then changes only through this value.
    next: Cell<u64>,
    _life: PhantomData<(&'a QpExt, S, M)>,
}

/// What a CQE says of one receive.
enum Look {
    NotYet,
    Done(CqeTail),
    Failed,
    Lapped,
}

impl<'a, A: Arch, S: Scope, M: Sharing> RecvQueue<'a, A, S, M> {
    /// The receive queue of the QP that `handle` names.
    ///
    /// # Errors
    /// [`Error::INVALID`] if it has none: a bare QP, an extension of another version, or a QP that was made without.
    ///
    /// # Safety
    /// As [`Qp::new`](crate::Qp::new), for the receive queue's memory and the words of the extension that begin with `rq_`.
    #[inline(always)]
    pub unsafe fn new(arch: A, handle: QpHandle) -> Result<Self, Error> {
        let ext = handle.ext;
        if ext.is_null() {
            return Err(Error::INVALID);
        }
        // SAFETY: the caller's promise: `ext` is an extension, whose words here are constant.
        unsafe {
            let magic = arch.load_const32(addr_of_mut!((*ext).magic));
            let version = arch.load_const32(addr_of_mut!((*ext).version));
            if magic != EXT_MAGIC || version != EXT_VERSION {
                return Err(Error::INVALID);
            }
            let address = |p: *mut u64| arch.load_const64(p) as usize;
            let ring = address(addr_of_mut!((*ext).rq_addr));
            if ring == 0 {
                return Err(Error::INVALID);
            }
            Ok(Self {
                arch,
                handle,
                ring: core::ptr::with_exposed_provenance_mut(ring),
                mask: arch.load_const32(addr_of_mut!((*ext).rq_mask)),
                segments: arch.load_const32(addr_of_mut!((*ext).rq_stride)) / SEGMENT,
                record: core::ptr::with_exposed_provenance_mut(address(addr_of_mut!(
                    (*ext).rq_dbrec
                ))),
                cq: core::ptr::with_exposed_provenance(address(addr_of_mut!(
                    (*ext).rq_cq.cqe_daddr
                ))),
                cq_mask: arch.load_const32(addr_of_mut!((*ext).rq_cq.cqe_mask)),
                seen: Cell::new(0),
                next: Cell::new(if M::EXCLUSIVE {
                    arch.load_own64(addr_of_mut!((*ext).rq_pi))
                } else {
                    0
                }),
                _life: PhantomData,
            })
        }
    }

    /// Receives that can be posted at a time.
    #[inline(always)]
    pub const fn depth(&self) -> u32 {
        self.mask.wrapping_add(1)
    }

    /// Most pieces of memory that one receive can have.
    #[inline(always)]
    pub const fn pieces(&self) -> u32 {
        self.segments
    }

    /// Posts a receive for a message of at most `local.len` bytes; of 0, for messages without bytes (and for WRITE with immediate, which
    /// brings its own address).
    ///
    /// # Errors
    /// [`Error::NO_SPACE`] if there are as many receives posted as the queue is deep until `deadline`; [`Error::INVALID`] above
    /// 1 GiB; the queue's first error, if a call here has seen it; [`Error::STUCK`].
    #[inline(always)]
    pub fn recv_post(&self, local: Local, deadline: Deadline) -> Result<Ticket, Error> {
        self.recv_post_pieces(1, 1, |_, _| local, deadline)
    }

    /// Posts `n` receives together: `what(k)` is the memory of the k-th. The ticket is the last one's; the others' precede it.
    ///
    /// # Errors
    /// As [`RecvQueue::recv_post`]; [`Error::INVALID`] for none, or more than [`MAX_SLOTS`](crate::MAX_SLOTS) or the queue takes.
    #[inline(always)]
    pub fn recv_posts(
        &self,
        n: u32,
        what: impl Fn(u32) -> Local,
        deadline: Deadline,
    ) -> Result<Ticket, Error> {
        self.recv_post_pieces(n, 1, |k, _| what(k), deadline)
    }

    /// Posts `n` receives of `pieces` pieces of memory, filled in order: `what(k, i)` is the i-th of the k-th receive.
    ///
    /// # Errors
    /// As [`RecvQueue::recv_posts`]; [`Error::INVALID`] for more than [`RecvQueue::pieces`].
    #[inline(always)]
    pub fn recv_post_pieces(
        &self,
        n: u32,
        pieces: u32,
        what: impl Fn(u32, u32) -> Local,
        deadline: Deadline,
    ) -> Result<Ticket, Error> {
        let long = |k| (0..pieces).any(|i| what(k, i).len > PIECE);
        if pieces > self.segments || (0..n).any(long) {
            return Err(Error::INVALID);
        }
        self.post(n, deadline, |index, k| {
            self.write(index, pieces, |i| what(k, i))
        })
    }

    /// Posts the next `n` slots as they were written a lap ago, by the record alone.
    ///
    /// # Errors
    /// As [`RecvQueue::recv_posts`]; [`Error::INVALID`] if the queue has not been posted to a full lap yet.
    #[inline(always)]
    pub fn recv_repost(&self, n: u32, deadline: Deadline) -> Result<Ticket, Error> {
        if self.posted() < u64::from(self.depth()) {
            return Err(Error::INVALID);
        }
        self.post(n, deadline, |_, _| {})
    }

    /// Receives handed out since the QP's last reset.
    #[inline(always)]
    pub fn posted(&self) -> u64 {
        let posted = if M::EXCLUSIVE {
            self.next.get()
        } else {
            self.load(self.pi(), sites::RESERVE_LOAD)
        };
        posted & !POISON
    }

    /// The message that took receive `ticket`, if one has; looks once.
    ///
    /// # Errors
    /// The receive's own error, or the QP's first one, if no message will take it; [`Error::LAPPED`].
    #[inline(always)]
    pub fn recv_poll(&self, ticket: Ticket) -> Result<Option<Received>, Error> {
        self.together(|| match self.take(ticket) {
            Ok(None) => match unpack(Self::check_up(self.arch, self.handle, Deadline(u64::MAX))) {
                Ok(_) => Ok(None),
                // What came before the error is there by now.
                Err(e) => self.take(ticket)?.map_or(Err(e), |r| Ok(Some(r))),
            },
            other => other,
        })
    }

    /// Waits for the message that takes receive `ticket`: its bytes are visible to the caller then.
    ///
    /// # Errors
    /// As [`RecvQueue::recv_poll`]; [`Error::TIMED_OUT`] at the deadline; [`Error::ABORTED`].
    #[inline(always)]
    pub fn recv_wait(&self, ticket: Ticket, deadline: Deadline) -> Result<Received, Error> {
        let got = self.together(|| {
            let mut polls = 0_u32;
            loop {
                if let Some(received) = self.take(ticket)? {
                    if polls >= LONG {
                        Self::note_receive(self.arch, self.handle, ticket.0, 0);
                    }
                    return Ok(Some(received));
                }
                polls = polls.wrapping_add(1);
                if polls.is_multiple_of(LONG) {
                    Self::note_receive(self.arch, self.handle, ticket.0, WAIT_RECEIVE);
                }
                if polls.is_multiple_of(LOOK)
                    && let Err(e) = unpack(Self::check_up(self.arch, self.handle, deadline))
                {
                    if e == Error::TIMED_OUT {
                        Self::note_receive(
                            self.arch,
                            self.handle,
                            ticket.0,
                            WAIT_RECEIVE | WAIT_OVER,
                        );
                    }
                    return self.take(ticket)?.map_or(Err(e), |r| Ok(Some(r)));
                }
                self.arch.relax();
            }
        })?;
        got.ok_or(Error::TIMED_OUT)
    }

    /// One thread of the scope acts; all get its answer.
    #[inline(always)]
    fn together(
        &self,
        act: impl FnOnce() -> Result<Option<Received>, Error>,
    ) -> Result<Option<Received>, Error> {
        if matches!(S::COOP, Coop::Thread) {
            return act();
        }
        // Two words carry it: one of kind (0: none), bytes and index, and the immediate.
        let turn: Turn = enter::<A, S>(self.arch);
        let (mut first, mut index, mut imm) = (0, 0, 0);
        if turn.acts {
            match act() {
                Ok(None) => {}
                Ok(Some(r)) => {
                    first = r.arrival as u64 | u64::from(r.bytes) << 8;
                    (index, imm) = (r.ticket.0, u64::from(r.imm));
                }
                Err(e) => first = pack(Err(e)),
            }
        }
        let first = leave::<A, S>(self.arch, turn, first);
        let index = leave::<A, S>(self.arch, turn, index)?;
        let imm = leave::<A, S>(self.arch, turn, imm)?;
        let first = first?;
        let Some(arrival) = Arrival::from_code(first as u8) else {
            return Ok(None);
        };
        Ok(Some(Received {
            ticket: Ticket(index),
            arrival,
            bytes: (first >> 8) as u32,
            imm: imm as u32,
        }))
    }

    #[inline(always)]
    pub(super) fn pi(&self) -> *mut u64 {
        // SAFETY: a field of the extension that `new` was promised; only its address is taken.
        unsafe { addr_of_mut!((*self.handle.ext).rq_pi) }
    }

    #[inline(always)]
    pub(super) fn ready(&self) -> *mut u64 {
        // SAFETY: as `pi`.
        unsafe { addr_of_mut!((*self.handle.ext).rq_ready) }
    }

    #[inline(always)]
    pub(super) fn ci(&self) -> *mut u64 {
        // SAFETY: as `pi`.
        unsafe { addr_of_mut!((*self.handle.ext).rq_ci) }
    }

    #[inline(always)]
    pub(super) fn first_error(&self) -> *mut u64 {
        // SAFETY: as `pi`.
        unsafe { addr_of_mut!((*self.handle.ext).rq_error) }
    }
}

impl Arrival {
    /// From a CQE's code: [`Kind`]'s numbers.
    #[inline(always)]
    const fn from_code(code: u8) -> Option<Self> {
        const WRITE_IMM: u8 = Kind::ResponderWriteImm as u8;
        const SEND: u8 = Kind::ResponderSend as u8;
        const SEND_IMM: u8 = Kind::ResponderSendImm as u8;
        match code {
            WRITE_IMM => Some(Self::WriteImm),
            SEND => Some(Self::Send),
            SEND_IMM => Some(Self::SendImm),
            _ => None,
        }
    }
}

impl<A: Arch, S: Scope, M: Sharing> core::fmt::Debug for RecvQueue<'_, A, S, M> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RecvQueue")
            .field("depth", &self.depth())
            .field("pieces", &self.pieces())
            .finish_non_exhaustive()
    }
}
