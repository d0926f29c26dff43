//! The operations: what a kernel calls, each one or more WQEs of the mlx5 format.
//!
//! Every call posts and returns a [`Ticket`] without waiting for the operation (waiting for room in the ring it may). Operations of one
//! QP complete in order, and a signal becomes visible at its target only after the puts before it. Addresses are what the key's
//! region says: offsets from its start, or virtual addresses. Encodings are `doorbell-wire`'s; the NIC's view of them is there.

use doorbell_wire::{Chunk, Cqn, Key, Opcode, Remote, Width, flags, seg};

use crate::arch::Arch;
use crate::error::Error;
use crate::layout::{CqKind, GpuQp, QpExt, QpHandle};
use crate::post::{MAX_SLOTS, Slot};
use crate::qp::{Post, Qp, Ticket};
use crate::scope::{Scope, Sharing};

/// Longest transfer of one WQE here: 1 GiB (the format's limit is one byte less than 2 GiB).
pub(crate) const PIECE: u64 = 1 << 30;
/// Longest payload inside a one-slot WQE, in bytes.
pub const MAX_INLINE: u32 = 28;

/// Local memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// Address in its region.
    pub addr: u64,
    /// Key of the region.
    pub key: Key,
    /// Bytes.
    pub len: u64,
}

/// A 64-bit or 32-bit word that an atomic's old value goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Address in its region, aligned to the operand.
    pub addr: u64,
    /// Key of the region.
    pub key: Key,
}

/// WQEs that a transfer of `len` bytes takes: 1 GiB each, and one (a NOP) for none.
#[inline(always)]
fn pieces(len: u64) -> Result<u32, Error> {
    if len <= PIECE {
        return Ok(1);
    }
    let n = len.div_ceil(PIECE);
    // One slot is left for what may follow (a signal, a dump).
    if n < u64::from(MAX_SLOTS) {
        Ok(n as u32)
    } else {
        Err(Error::INVALID)
    }
}

impl<A: Arch, S: Scope, M: Sharing> Qp<'_, A, S, M> {
    /// The `k`-th piece of a transfer.
    #[inline(always)]
    fn transfer(
        &self,
        index: u64,
        cq: u8,
        op: Opcode,
        k: u32,
        remote: Remote,
        local: Local,
    ) -> Slot {
        let at = u64::from(k) << 30;
        let len = (local.len - at).min(PIECE) as u32;
        // Zero bytes: a length field of 0 would mean 2 GiB.
        let (op, ds) = if len == 0 { (Opcode::Nop, 1) } else { (op, 3) };
        [
            self.ctrl(index, op, 0, ds, cq),
            seg::raddr(remote.addr.wrapping_add(at), remote.key),
            seg::data(len, local.key, local.addr.wrapping_add(at)),
            Chunk::ZERO,
        ]
    }

    /// An atomic of one slot.
    #[inline(always)]
    fn atomic(
        &self,
        (index, cq): (u64, u8),
        (op, width): (Opcode, Option<Width>),
        remote: Remote,
        operands: Chunk,
        to: Fetch,
    ) -> Slot {
        let (opmod, len) = match width {
            None => (0, 8),
            Some(Width::Four) => (Width::Four.opmod(), 4),
            Some(Width::Eight) => (Width::Eight.opmod(), 8),
        };
        [
            self.ctrl(index, op, opmod, 4, cq),
            seg::raddr(remote.addr, remote.key),
            operands,
            seg::data(len, to.key, to.addr),
        ]
    }

    #[inline(always)]
    const fn sink(&self) -> Fetch {
        Fetch {
            addr: self.sink.0,
            key: self.sink.1,
        }
    }

    #[inline(always)]
    fn add_slot(&self, index: u64, cq: u8, remote: Remote, add: u64) -> Slot {
        self.atomic(
            (index, cq),
            (Opcode::FetchAdd, None),
            remote,
            seg::atomic(add, add),
            self.sink(),
        )
    }

    /// Writes `local` to `remote`. More than 1 GiB takes several WQEs, up to 509 GiB.
    ///
    /// # Errors
    /// [`Error::INVALID`] for a longer one, or a ring too small for it; the QP's first error; [`Error::NO_SPACE`] at the deadline.
    #[inline(always)]
    pub fn put(&self, remote: Remote, local: Local, how: Post) -> Result<Ticket, Error> {
        let n = pieces(local.len)?;
        self.post::<false>(n, 3, how, |k, index, cq| {
            self.transfer(index, cq, Opcode::RdmaWrite, k, remote, local)
        })
    }

    /// `n` puts with one reservation and one ring: `what(k)` is the k-th, of at most 1 GiB.
    ///
    /// # Errors
    /// As [`Qp::put`].
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
        self.post::<true>(n, 3, how, |k, index, cq| {
            let (remote, local) = what(k);
            self.transfer(index, cq, Opcode::RdmaWrite, 0, remote, local)
        })
    }

    /// Writes the low `len` bytes of `value` (1, 2, 4 or 8) to `remote`; they travel inside the WQE.
    ///
    /// # Errors
    /// [`Error::INVALID`] for another length; as [`Qp::put`].
    #[inline(always)]
    pub fn put_value(
        &self,
        remote: Remote,
        value: u64,
        len: u32,
        how: Post,
    ) -> Result<Ticket, Error> {
        if !matches!(len, 1 | 2 | 4 | 8) {
            return Err(Error::INVALID);
        }
        self.post::<false>(1, 3, how, |_, index, cq| {
            [
                self.ctrl(index, Opcode::RdmaWrite, 0, 3, cq),
                seg::raddr(remote.addr, remote.key),
                seg::inline8(value, len),
                Chunk::ZERO,
            ]
        })
    }

    /// Writes the first `len` bytes of `words`, which hold them in memory order, to `remote`; they travel inside the WQEs: 28 bytes
    /// each, written in order.
    ///
    /// # Errors
    /// [`Error::INVALID`] for a length of 0 or beyond `words`; as [`Qp::put`].
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
        self.post::<false>(n, 4, how, |k, index, cq| {
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
            [
                self.ctrl(index, Opcode::RdmaWrite, 0, 2 + seg::inline_ds(len), cq),
                seg::raddr(remote.addr.wrapping_add(u64::from(at)), remote.key),
                seg::inline_words(len, [w[0], w[1], w[2]]),
                Chunk::from_words(w[3], w[4], w[5], w[6]),
            ]
        })
    }

    /// Reads `remote` into `local`. When it is complete the bytes are visible to this GPU if the engine says so at completion (a software
    /// HCA does); otherwise use [`Qp::get_visible`].
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn get(&self, remote: Remote, local: Local, how: Post) -> Result<Ticket, Error> {
        let n = pieces(local.len)?;
        self.post::<false>(n, 3, how, |k, index, cq| {
            self.transfer(index, cq, Opcode::RdmaRead, k, remote, local)
        })
    }

    /// [`Qp::get`] and a DUMP of the sink behind it, which a NIC completes only when what it wrote before is visible to the GPU.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn get_visible(&self, remote: Remote, local: Local, how: Post) -> Result<Ticket, Error> {
        let n = pieces(local.len)?;
        self.post::<false>(n + 1, 3, how, |k, index, cq| {
            if k < n {
                self.transfer(index, cq, Opcode::RdmaRead, k, remote, local)
            } else {
                self.dump_slot(index, cq)
            }
        })
    }

    /// A DUMP alone: complete when what earlier gets of this QP wrote is visible to the GPU.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn dump(&self, how: Post) -> Result<Ticket, Error> {
        self.post::<false>(1, 2, how, |_, index, cq| self.dump_slot(index, cq))
    }

    #[inline(always)]
    fn dump_slot(&self, index: u64, cq: u8) -> Slot {
        let sink = self.sink();
        [
            self.ctrl(index, Opcode::Dump, 0, 2, cq | flags::FENCE_READS),
            seg::data(1, sink.key, sink.addr),
            Chunk::ZERO,
            Chunk::ZERO,
        ]
    }

    /// Adds to the 64-bit word at `remote`, after all earlier puts of this QP are visible there.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn signal_add(&self, remote: Remote, add: u64, how: Post) -> Result<Ticket, Error> {
        self.post::<false>(1, 4, how, |_, index, cq| {
            self.add_slot(index, cq, remote, add)
        })
    }

    /// [`Qp::put`], then [`Qp::signal_add`], with one ring.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn put_signal(
        &self,
        remote: Remote,
        local: Local,
        signal: Remote,
        add: u64,
        how: Post,
    ) -> Result<Ticket, Error> {
        let n = pieces(local.len)?;
        self.post::<false>(n + 1, 4, how, |k, index, cq| {
            if k < n {
                self.transfer(index, cq, Opcode::RdmaWrite, k, remote, local)
            } else {
                self.add_slot(index, cq, signal, add)
            }
        })
    }

    /// [`Qp::put`], and, when it has completed, adds to a counter through the companion QP: the local side learns of the completion without
    /// polling. `counter` is what the companion reaches (usually a word of this process). The ticket is the put's.
    ///
    /// # Errors
    /// [`Error::INVALID`] without a companion or on a collapsed CQ (whose CQEs a WAIT cannot count); as [`Qp::put`].
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
        self.post::<false>(2, 4, how, |k, index, cq| {
            if k == 0 {
                [
                    self.ctrl(index, Opcode::Wait, 0, 2, cq),
                    seg::wait(ticket.0 as u32, Cqn::truncate(cqn)),
                    Chunk::ZERO,
                    Chunk::ZERO,
                ]
            } else {
                self.add_slot(index, cq, counter, add)
            }
        })
    }

    /// Adds to the 64-bit word at `remote`; its old value goes to `to`, in host order.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn fetch_add(
        &self,
        remote: Remote,
        add: u64,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.post::<false>(1, 4, how, |_, index, cq| {
            self.atomic(
                (index, cq),
                (Opcode::FetchAdd, None),
                remote,
                seg::atomic(add, add),
                to,
            )
        })
    }

    /// Stores `swap` in the 64-bit word at `remote` if it holds `compare`; its old value goes to `to`, in host order.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn compare_swap(
        &self,
        remote: Remote,
        compare: u64,
        swap: u64,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.post::<false>(1, 4, how, |_, index, cq| {
            self.atomic(
                (index, cq),
                (Opcode::CompareSwap, None),
                remote,
                seg::atomic(swap, compare),
                to,
            )
        })
    }

    /// 64-bit fetch and add in fields: carries stop after each bit set in `boundary`. The old value goes to `to`, in host order.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn masked_fetch_add(
        &self,
        remote: Remote,
        add: u64,
        boundary: u64,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.post::<false>(1, 4, how, |_, index, cq| {
            let operands = seg::masked_fa8(add, boundary);
            self.atomic(
                (index, cq),
                (Opcode::MaskedFetchAdd, Some(Width::Eight)),
                remote,
                operands,
                to,
            )
        })
    }

    /// 32-bit [`Qp::masked_fetch_add`] (`boundary` 0: a plain 32-bit fetch and add). The old value goes to `to` **big-endian**, as hardware
    /// delivers 4-byte results.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn masked_fetch_add32(
        &self,
        remote: Remote,
        add: u32,
        boundary: u32,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.post::<false>(1, 4, how, |_, index, cq| {
            let operands = seg::masked_fa4(add, boundary);
            self.atomic(
                (index, cq),
                (Opcode::MaskedFetchAdd, Some(Width::Four)),
                remote,
                operands,
                to,
            )
        })
    }

    /// 32-bit compare and swap of the bits under the masks. The old value goes to `to` **big-endian**.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn masked_compare_swap32(
        &self,
        remote: Remote,
        swap: Masked<u32>,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        self.post::<false>(1, 4, how, |_, index, cq| {
            let operands =
                seg::masked_cs4(swap.swap, swap.compare, swap.swap_mask, swap.compare_mask);
            self.atomic(
                (index, cq),
                (Opcode::MaskedCompareSwap, Some(Width::Four)),
                remote,
                operands,
                to,
            )
        })
    }

    /// 64-bit compare and swap of the bits under the masks, the one WQE of two slots; a NOP follows it, whose completion stands for
    /// both (a completion counter names a WQE's first slot only). The old value goes to `to`, in host order.
    ///
    /// # Errors
    /// [`Error::INVALID`] on a per-slot CQ; as [`Qp::put`].
    #[inline(always)]
    pub fn masked_compare_swap(
        &self,
        remote: Remote,
        swap: Masked<u64>,
        to: Fetch,
        how: Post,
    ) -> Result<Ticket, Error> {
        if self.cq_kind == CqKind::PerSlot {
            return Err(Error::INVALID);
        }
        let [values, masks] =
            seg::masked_cs8(swap.swap, swap.compare, swap.swap_mask, swap.compare_mask);
        self.post::<false>(3, 4, how, |k, index, cq| match k {
            0 => [
                self.ctrl(
                    index,
                    Opcode::MaskedCompareSwap,
                    Width::Eight.opmod(),
                    5,
                    flags::CQ_ERROR_ONLY,
                ),
                seg::raddr(remote.addr, remote.key),
                values,
                masks,
            ],
            1 => [
                seg::data(8, to.key, to.addr),
                Chunk::ZERO,
                Chunk::ZERO,
                Chunk::ZERO,
            ],
            _ => self.nop_slot(index, cq),
        })
    }

    /// A WQE that does nothing but complete in its turn.
    ///
    /// # Errors
    /// As [`Qp::put`].
    #[inline(always)]
    pub fn nop(&self, how: Post) -> Result<Ticket, Error> {
        self.post::<false>(1, 1, how, |_, index, cq| self.nop_slot(index, cq))
    }

    #[inline(always)]
    pub(crate) fn nop_slot(&self, index: u64, cq: u8) -> Slot {
        [
            self.ctrl(index, Opcode::Nop, 0, 1, cq),
            Chunk::ZERO,
            Chunk::ZERO,
            Chunk::ZERO,
        ]
    }
}

/// Operands of a masked compare and swap: where `compare_mask` is set the old value must equal `compare`; then the bits of
/// `swap_mask` take those of `swap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masked<T> {
    /// What to compare with.
    pub compare: T,
    /// Which bits to compare.
    pub compare_mask: T,
    /// What to store.
    pub swap: T,
    /// Which bits to store.
    pub swap_mask: T,
}
