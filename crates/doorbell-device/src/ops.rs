//! The operations: what a kernel calls, each one or more WQEs of the mlx5 format.
//!
//! Every call posts and returns a [`Ticket`] without waiting for the operation (waiting for room in the ring it may). Operations of one
//! QP complete in order, and a signal becomes visible at its target only after the puts before it. Addresses are what the key's
//! region says: offsets from its start, or virtual addresses. The WQEs are built in `wr.rs`.

use core::cell::Cell;

use doorbell_wire::{Chunk, Cqn, Opcode, Remote, flags, seg};

use crate::arch::Arch;
use crate::error::Error;
use crate::layout::{CqKind, GpuQp, QpExt, QpHandle};
use crate::post::{pack, unpack};
use crate::qp::{Deadline, Post, Qp, Ticket};
use crate::scope::{Coop, Scope, Sharing, Thread};
use crate::wr::{Fetch, Local, MAX_INLINE, MAX_SEND_INLINE, Masked, PIECE, Wr, begins, place};

impl<A: Arch, S: Scope, M: Sharing> Qp<'_, A, S, M> {
    /// Posts `wr`. A transfer of more than 1 GiB becomes several posts, of 1 GiB each, rung together.
    ///
    /// # Errors
    /// [`Error::INVALID`] for what this QP cannot take (see the call of that name); the QP's first error, if it has one;
    /// [`Error::NO_SPACE`] if the ring is full until the deadline (of a long transfer, a part may have been posted).
    #[inline(always)]
    pub fn submit(&self, wr: Wr, how: Post) -> Result<Ticket, Error> {
        wr.check(self.cq_kind)?;
        if !wr.is_long() {
            let maker = self.maker();
            return self.post::<false>(wr.slots(), wr.used(), how, |k, index, signal| {
                let slot = maker.slot(&wr, k);
                if begins(&wr, k) {
                    place(slot, index, signal)
                } else {
                    slot
                }
            });
        }
        // One thread makes the detour: functions that are not inlined must not hold what several threads do together.
        let turn = self.enter();
        let mut ticket = 0;
        if turn.acts {
            let of = Qp::<A, Thread, M>::submit_called;
            ticket = of(
                self.arch,
                self.handle(),
                Some(self.maker().sink),
                &[wr],
                how,
            );
            self.reload();
        }
        self.leave(turn, ticket).map(Ticket)
    }

    /// [`Qp::submit`] as a function that is not inlined, on a queue that no [`Qp`] value holds at the moment: for code
    /// with many calls, or whose calls are not known when it is compiled. Several operations are posted with one reservation and one
    /// ring; the ticket is the last one's. `sink` as [`Qp::with_sink`] takes it, for a bare QP.
    ///
    /// # Errors
    /// [`Error::INVALID`] for none, for more than [`crate::MAX_SLOTS`] slots, or for one of several that is longer than 1 GiB; as
    /// [`Qp::submit`] and [`Qp::new`].
    ///
    /// # Safety
    /// As [`Qp::new`].
    #[inline(always)]
    pub unsafe fn submit_at(
        arch: A,
        handle: QpHandle,
        sink: Option<Fetch>,
        wrs: &[Wr],
        how: Post,
    ) -> Result<Ticket, Error> {
        const { assert!(matches!(S::COOP, Coop::Thread), "a call of one thread") };
        unpack(Self::submit_called(arch, handle, sink, wrs, how)).map(Ticket)
    }

    #[inline(never)]
    fn submit_called(arch: A, handle: QpHandle, sink: Option<Fetch>, wrs: &[Wr], how: Post) -> u64 {
        pack(Self::again(arch, handle).and_then(|qp| {
            let qp = match sink {
                Some(sink) => qp.with_sink(sink.addr, sink.key),
                None => qp,
            };
            let mut n = 0;
            for wr in wrs {
                wr.check(qp.cq_kind)?;
                n += wr.slots();
                if wr.is_long() && wrs.len() > 1 {
                    return Err(Error::INVALID);
                }
            }
            let [first, ..] = *wrs else {
                return Err(Error::INVALID);
            };
            let (mut piece, mut rest) = (first, first);
            let maker = qp.maker();
            loop {
                // The pieces of a long transfer, but for the last, are posts of their own.
                let more = rest.is_long();
                let (mut now, mut slots, mut how) = (wrs, n, how);
                if more {
                    (piece, rest) = rest.split();
                    (slots, how) = (1, how.without_ringing());
                } else if first.is_long() {
                    piece = rest;
                }
                if first.is_long() {
                    now = core::slice::from_ref(&piece);
                }
                // Which operation, and how many of its slots are done: slots are asked for in order.
                let at = Cell::new((0_usize, 0_u32));
                let ticket = qp.post::<false>(slots, 4, how, |_, index, signal| {
                    let (which, k) = at.get();
                    let Some(wr) = now.get(which) else {
                        return [Chunk::ZERO; 4];
                    };
                    at.set(if k + 1 == wr.slots() {
                        (which + 1, 0)
                    } else {
                        (which, k + 1)
                    });
                    let mut slot = [Chunk::ZERO; 4];
                    maker.fill(wr, k, &mut slot);
                    if begins(wr, k) {
                        place(slot, index, signal)
                    } else {
                        slot
                    }
                })?;
                if !more {
                    return Ok(ticket.0);
                }
            }
        }))
    }

    /// [`Qp::wait`] as a function that is not inlined; see [`Qp::submit_at`].
    ///
    /// # Errors
    /// As [`Qp::wait`] and [`Qp::new`].
    ///
    /// # Safety
    /// As [`Qp::new`].
    #[inline(always)]
    pub unsafe fn wait_at(
        arch: A,
        handle: QpHandle,
        ticket: Ticket,
        deadline: Deadline,
    ) -> Result<(), Error> {
        const { assert!(matches!(S::COOP, Coop::Thread), "a call of one thread") };
        unpack(Self::wait_seldom(arch, handle, ticket.0, deadline)).map(|_| ())
    }

    /// Writes `local` to `remote`.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn put(&self, remote: Remote, local: Local, how: Post) -> Result<Ticket, Error> {
        self.submit(Wr::Put { remote, local }, how)
    }

    /// `n` puts with one reservation and one ring: `what(k)` is the k-th, of at most 1 GiB.
    ///
    /// # Errors
    /// [`Error::INVALID`] for a longer one, or more than [`crate::MAX_SLOTS`]; as [`Qp::submit`].
    #[inline(always)]
    pub fn puts(
        &self,
        n: u32,
        what: impl Fn(u32) -> (Remote, Local),
        how: Post,
    ) -> Result<Ticket, Error> {
        if n == 0 || (0..n).any(|k| what(k).1.len > PIECE) {
            return Err(Error::INVALID);
        }
        let maker = self.maker();
        self.post::<true>(n, 3, how, |k, index, signal| {
            let (remote, local) = what(k);
            place(
                maker.transfer(Opcode::RdmaWrite, remote, local),
                index,
                signal,
            )
        })
    }

    /// Writes the low `len` bytes of `value` (1, 2, 4 or 8) to `remote`; they travel inside the WQE.
    ///
    /// # Errors
    /// [`Error::INVALID`] for another length; as [`Qp::submit`].
    #[inline(always)]
    pub fn put_value(
        &self,
        remote: Remote,
        value: u64,
        len: u32,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(Wr::PutValue { remote, value, len }, how)
    }

    /// Writes the first `len` bytes of `words`, which hold them in memory order, to `remote`; they travel inside the WQEs: 28 bytes
    /// each, written in order.
    ///
    /// # Errors
    /// [`Error::INVALID`] for a length of 0 or beyond `words`; as [`Qp::submit`].
    #[inline(always)]
    pub fn put_inline<const W: usize>(
        &self,
        remote: Remote,
        words: [u32; W],
        len: u32,
        how: Post,
    ) -> Result<Ticket, Error> {
        if len == 0 || len > 4 * W as u32 {
            return Err(Error::INVALID);
        }
        // Loops over `words` end at a constant, so that it stays in registers.
        let word = |i: usize| if i < W { words[i] } else { 0 };
        let n = len.div_ceil(MAX_INLINE);
        let maker = self.maker();
        self.post::<false>(n, 4, how, |k, index, signal| {
            let mut w = [0_u32; 7];
            for piece in 0..W.div_ceil(7) {
                for (i, w) in w.iter_mut().enumerate() {
                    *w = if piece as u32 == k {
                        word(7 * piece + i)
                    } else {
                        *w
                    };
                }
            }
            let at = k * MAX_INLINE;
            let len = (len - at).min(MAX_INLINE);
            let slot = [
                maker.ctrl(
                    Opcode::RdmaWrite,
                    0,
                    2 + seg::inline_ds(len),
                    flags::CQ_UPDATE,
                ),
                seg::raddr(remote.addr.wrapping_add(u64::from(at)), remote.key),
                seg::inline_words(len, [w[0], w[1], w[2]]),
                Chunk::from_words(w[3], w[4], w[5], w[6]),
            ];
            place(slot, index, signal)
        })
    }

    /// [`Qp::put`] of one message of at most 1 GiB, whose end takes a receive of the peer and hands it `imm`
    /// ([`crate::RecvQueue`]); of no bytes too.
    ///
    /// # Errors
    /// [`Error::INVALID`] for a longer one; as [`Qp::submit`].
    #[inline(always)]
    pub fn write_imm(
        &self,
        remote: Remote,
        local: Local,
        imm: u32,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(Wr::PutImm { remote, local, imm }, how)
    }

    /// Sends `local`, at most 1 GiB, to the memory of the peer's next receive; of no bytes too.
    ///
    /// # Errors
    /// [`Error::INVALID`] for a longer one; as [`Qp::submit`].
    #[inline(always)]
    pub fn send(&self, local: Local, how: Post) -> Result<Ticket, Error> {
        self.submit(Wr::Send { local }, how)
    }

    /// [`Qp::send`] with an immediate.
    ///
    /// # Errors
    /// As [`Qp::send`].
    #[inline(always)]
    pub fn send_imm(&self, local: Local, imm: u32, how: Post) -> Result<Ticket, Error> {
        self.submit(Wr::SendImm { local, imm }, how)
    }

    /// Sends the first `len` bytes of `words`, which hold them in memory order; they travel inside the WQE, at most
    /// [`crate::MAX_SEND_INLINE`].
    ///
    /// # Errors
    /// [`Error::INVALID`] for a length beyond that or beyond `words`; as [`Qp::submit`].
    #[inline(always)]
    pub fn send_inline<const W: usize>(
        &self,
        words: [u32; W],
        len: u32,
        imm: Option<u32>,
        how: Post,
    ) -> Result<Ticket, Error> {
        if len > MAX_SEND_INLINE || len > 4 * W as u32 {
            return Err(Error::INVALID);
        }
        let word = |i: usize| if i < W { words[i] } else { 0 };
        let maker = self.maker();
        let (op, value) = match imm {
            Some(imm) => (Opcode::SendImm, imm),
            None => (Opcode::Send, 0),
        };
        let ds = if len == 0 { 1 } else { 1 + seg::inline_ds(len) };
        self.post::<false>(1, ds, how, |_, index, signal| {
            let slot = [
                maker.ctrl_imm(op, ds, value),
                seg::inline_words(len, [word(0), word(1), word(2)]),
                Chunk::from_words(word(3), word(4), word(5), word(6)),
                Chunk::from_words(word(7), word(8), word(9), word(10)),
            ];
            place(slot, index, signal)
        })
    }

    /// Reads `remote` into `local`. When it is complete the bytes are visible to this GPU if the engine says so at completion (a software
    /// HCA does); otherwise use [`Qp::get_visible`].
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn get(&self, remote: Remote, local: Local, how: Post) -> Result<Ticket, Error> {
        self.submit(Wr::Get { remote, local }, how)
    }

    /// [`Qp::get`] and a DUMP of the sink behind it, which a NIC completes only when what it wrote before is visible to the GPU.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn get_visible(&self, remote: Remote, local: Local, how: Post) -> Result<Ticket, Error> {
        self.submit(Wr::GetVisible { remote, local }, how)
    }

    /// A DUMP alone: complete when what earlier gets of this QP wrote is visible to the GPU.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn dump(&self, how: Post) -> Result<Ticket, Error> {
        self.submit(Wr::Dump, how)
    }

    /// Adds to the 64-bit word at `remote`, after all earlier puts of this QP are visible there.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn signal_add(&self, remote: Remote, add: u64, how: Post) -> Result<Ticket, Error> {
        self.submit(Wr::SignalAdd { remote, add }, how)
    }

    /// [`Qp::put`], then [`Qp::signal_add`], with one ring.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn put_signal(
        &self,
        remote: Remote,
        local: Local,
        signal: Remote,
        add: u64,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(
            Wr::PutSignal {
                remote,
                local,
                signal,
                add,
            },
            how,
        )
    }

    /// [`Qp::put`], and, when it has completed, adds to a counter through the companion QP: the local side learns of the completion without
    /// polling. `counter` is what the companion reaches (usually a word of this process). The ticket is the put's.
    ///
    /// # Errors
    /// [`Error::INVALID`] without a companion or on a collapsed CQ (whose CQEs a WAIT cannot count); as [`Qp::submit`].
    #[inline(always)]
    pub fn put_counter(
        &self,
        remote: Remote,
        local: Local,
        counter: Remote,
        add: u64,
        how: Post,
    ) -> Result<Ticket, Error> {
        let companion = self.companion()?;
        let ticket = self.put(remote, local, how)?;
        companion.count(self, ticket, counter, add, how)?;
        Ok(ticket)
    }

    /// [`Qp::put_signal`] with the counter of [`Qp::put_counter`].
    ///
    /// # Errors
    /// As [`Qp::put_counter`].
    #[inline(always)]
    pub fn put_signal_counter(
        &self,
        remote: Remote,
        local: Local,
        signal: (Remote, u64),
        counter: (Remote, u64),
        how: Post,
    ) -> Result<Ticket, Error> {
        let companion = self.companion()?;
        let ticket = self.put_signal(remote, local, signal.0, signal.1, how)?;
        companion.count(self, ticket, counter.0, counter.1, how)?;
        Ok(ticket)
    }

    #[inline(always)]
    fn companion(&self) -> Result<Self, Error> {
        if self.ext.is_null() || self.cq_kind != CqKind::PerSlot {
            return Err(Error::INVALID);
        }
        // SAFETY: constants of the extension, which names a companion that lives as long as this QP, or none.
        unsafe {
            let qp = self
                .arch
                .load_const64(core::ptr::addr_of!((*self.ext).companion_qp));
            let ext = self
                .arch
                .load_const64(core::ptr::addr_of!((*self.ext).companion_ext));
            if qp == 0 {
                return Err(Error::INVALID);
            }
            Self::new(
                self.arch,
                QpHandle {
                    qp: core::ptr::with_exposed_provenance_mut::<GpuQp>(qp as usize),
                    ext: core::ptr::with_exposed_provenance_mut::<QpExt>(ext as usize),
                },
            )
        }
    }

    /// On a companion: when `of`'s CQ has the completion of `ticket`, add to `counter`.
    #[inline(always)]
    fn count(
        &self,
        of: &Self,
        ticket: Ticket,
        counter: Remote,
        add: u64,
        how: Post,
    ) -> Result<Ticket, Error> {
        // SAFETY: a constant of the QP that `of` was made for.
        let cqn = unsafe {
            self.arch
                .load_const32(core::ptr::addr_of!((*of.qp).cq_sq.cq_num))
        };
        let wr = Wr::CountAfter {
            cqn: Cqn::truncate(cqn),
            completion: ticket.0 as u32,
            counter,
            add,
        };
        self.submit(wr, how)
    }

    /// Adds to the 64-bit word at `remote`; its old value goes to `to`, in host order.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn fetch_add(
        &self,
        remote: Remote,
        add: u64,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(Wr::FetchAdd { remote, add, to }, how)
    }

    /// Stores `swap` in the 64-bit word at `remote` if it holds `compare`; its old value goes to `to`, in host order.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn compare_swap(
        &self,
        remote: Remote,
        compare: u64,
        swap: u64,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(
            Wr::CompareSwap {
                remote,
                compare,
                swap,
                to,
            },
            how,
        )
    }

    /// 64-bit fetch and add in fields: carries stop after each bit set in `boundary`. The old value goes to `to`, in host order.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn masked_fetch_add(
        &self,
        remote: Remote,
        add: u64,
        boundary: u64,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(
            Wr::MaskedFetchAdd {
                remote,
                add,
                boundary,
                to,
            },
            how,
        )
    }

    /// 32-bit [`Qp::masked_fetch_add`] (`boundary` 0: a plain 32-bit fetch and add). The old value goes to `to` **big-endian**, as hardware
    /// delivers 4-byte results.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn masked_fetch_add32(
        &self,
        remote: Remote,
        add: u32,
        boundary: u32,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(
            Wr::MaskedFetchAdd32 {
                remote,
                add,
                boundary,
                to,
            },
            how,
        )
    }

    /// 32-bit compare and swap of the bits under the masks. The old value goes to `to` **big-endian**.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn masked_compare_swap32(
        &self,
        remote: Remote,
        swap: Masked<u32>,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(Wr::MaskedCompareSwap32 { remote, swap, to }, how)
    }

    /// 64-bit compare and swap of the bits under the masks, the one WQE of two slots; a NOP follows it, whose completion stands for
    /// both (a completion counter names a WQE's first slot only). The old value goes to `to`, in host order.
    ///
    /// # Errors
    /// [`Error::INVALID`] on a per-slot CQ; as [`Qp::submit`].
    #[inline(always)]
    pub fn masked_compare_swap(
        &self,
        remote: Remote,
        swap: Masked<u64>,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.submit(Wr::MaskedCompareSwap { remote, swap, to }, how)
    }

    /// A WQE that does nothing but complete in its turn.
    ///
    /// # Errors
    /// As [`Qp::submit`].
    #[inline(always)]
    pub fn nop(&self, how: Post) -> Result<Ticket, Error> {
        self.submit(Wr::Nop, how)
    }
}
