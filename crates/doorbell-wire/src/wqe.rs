//! Building a whole WQE, checked: what comes out of [`Wqe::emit`] always parses back as the request that went in.
//!
//! Constructors refuse what no HCA could execute (a length of 2^31, a misaligned atomic, inline data that does not fit) and nothing else;
//! whether keys are valid only the HCA knows. Device code that has checked already may use [`crate::seg`] directly.

use crate::{Chunk, Cqn, Fence, Local, Opcode, Qpn, Remote, Width, WqeError, flags, seg};

/// A complete send WQE of at most two slots, without its index and QP, which [`Wqe::emit`] adds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wqe {
    opcode: Opcode,
    opmod: u8,
    ds: u8,
    fm_ce_se: u8,
    imm: u32,
    body: [Chunk; 7],
}

/// Longest data segment, in bytes: bit 31 of the length is the inline flag.
pub(crate) const MAX_LEN: u32 = seg::INLINE - 1;

impl Wqe {
    /// Inline bytes that fit a WRITE of one slot: 64 less control, remote address and inline header.
    pub const INLINE_ONE_SLOT: usize = 28;
    /// Inline bytes that fit a WRITE of two slots, the most that [`Wqe::write_inline`] takes.
    pub const INLINE_MAX: usize = 92;
    /// Inline bytes that fit a SEND of two slots.
    pub const SEND_INLINE_MAX: usize = 108;

    const fn new(opcode: Opcode, opmod: u8, ds: u8, body: [Chunk; 7]) -> Self {
        Self {
            opcode,
            opmod,
            ds,
            fm_ce_se: flags::CQ_ERROR_ONLY,
            imm: 0,
            body,
        }
    }

    /// Does nothing, in order.
    #[must_use]
    pub const fn nop() -> Self {
        Self::new(Opcode::Nop, 0, 1, [Chunk::ZERO; 7])
    }

    /// `local` to `remote`. A length of 0 moves nothing and is checked against no key: the data segment is left out.
    pub fn write(remote: Remote, local: Local) -> Result<Self, WqeError> {
        Self::transfer(Opcode::RdmaWrite, remote, local)
    }

    /// [`Wqe::write`] that also consumes a receive of the peer and delivers `imm` with it.
    pub fn write_imm(remote: Remote, local: Local, imm: u32) -> Result<Self, WqeError> {
        Ok(Self {
            imm,
            ..Self::transfer(Opcode::RdmaWriteImm, remote, local)?
        })
    }

    /// `remote` to `local`.
    pub fn read(remote: Remote, local: Local) -> Result<Self, WqeError> {
        Self::transfer(Opcode::RdmaRead, remote, local)
    }

    /// `bytes`, carried in the WQE itself, to `remote`: at most [`Wqe::INLINE_MAX`], one slot up to [`Wqe::INLINE_ONE_SLOT`].
    pub fn write_inline(remote: Remote, bytes: &[u8]) -> Result<Self, WqeError> {
        let inline = pack_inline::<6>(bytes)?;
        let mut body = [Chunk::ZERO; 7];
        let (first, rest) = body.split_at_mut(1);
        first.copy_from_slice(&[seg::raddr(remote.addr, remote.key)]);
        rest.copy_from_slice(&inline);
        // At most 6 chunks of inline data: see the constant above.
        let ds = 2 + seg::inline_ds(bytes.len() as u32) as u8;
        Ok(Self::new(Opcode::RdmaWrite, 0, ds, body))
    }

    /// `local` into the peer's next receive. A length of 0 is an empty message.
    pub fn send(local: Local) -> Result<Self, WqeError> {
        let mut body = [Chunk::ZERO; 7];
        let ds = 1 + u8::from(local.len != 0);
        body[0] = data(Opcode::Send, local)?;
        Ok(Self::new(Opcode::Send, 0, ds, body))
    }

    /// [`Wqe::send`] with immediate data.
    pub fn send_imm(local: Local, imm: u32) -> Result<Self, WqeError> {
        Ok(Self {
            opcode: Opcode::SendImm,
            imm,
            ..Self::send(local)?
        })
    }

    /// `bytes`, carried in the WQE itself, into the peer's next receive: at most [`Wqe::SEND_INLINE_MAX`].
    pub fn send_inline(bytes: &[u8]) -> Result<Self, WqeError> {
        let body = pack_inline::<7>(bytes)?;
        let ds = 1 + seg::inline_ds(bytes.len() as u32) as u8;
        Ok(Self::new(Opcode::Send, 0, ds, body))
    }

    /// Adds `add` to the 8-byte word at `remote`; the old value goes to `local` (8 bytes), in host order.
    pub fn fetch_add(remote: Remote, local: Local, add: u64) -> Result<Self, WqeError> {
        // The second half is unused; device code of others repeats the operand there, and so do we, for equal bytes.
        Self::atomic1(Opcode::FetchAdd, None, remote, local, seg::atomic(add, add))
    }

    /// Stores `swap` into the 8-byte word at `remote` if it equals `compare`; the old value goes to `local` (8 bytes), in host order.
    pub fn compare_swap(
        remote: Remote,
        local: Local,
        compare: u64,
        swap: u64,
    ) -> Result<Self, WqeError> {
        Self::atomic1(
            Opcode::CompareSwap,
            None,
            remote,
            local,
            seg::atomic(swap, compare),
        )
    }

    /// 8-byte fetch and add whose carries stop at the bits set in `boundary` ([`crate::arith::masked_add`]).
    pub fn masked_fetch_add8(
        remote: Remote,
        local: Local,
        add: u64,
        boundary: u64,
    ) -> Result<Self, WqeError> {
        Self::atomic1(
            Opcode::MaskedFetchAdd,
            Some(Width::Eight),
            remote,
            local,
            seg::masked_fa8(add, boundary),
        )
    }

    /// 4-byte [`Wqe::masked_fetch_add8`]. The old value goes to `local` (4 bytes) **big-endian**, as hardware delivers 4-byte results.
    pub fn masked_fetch_add4(
        remote: Remote,
        local: Local,
        add: u32,
        boundary: u32,
    ) -> Result<Self, WqeError> {
        Self::atomic1(
            Opcode::MaskedFetchAdd,
            Some(Width::Four),
            remote,
            local,
            seg::masked_fa4(add, boundary),
        )
    }

    /// 4-byte compare and swap under masks ([`crate::arith::masked_swap`]). The old value goes to `local` (4 bytes) **big-endian**.
    pub fn masked_compare_swap4(
        remote: Remote,
        local: Local,
        (compare, compare_mask): (u32, u32),
        (swap, swap_mask): (u32, u32),
    ) -> Result<Self, WqeError> {
        let operands = seg::masked_cs4(swap, compare, swap_mask, compare_mask);
        Self::atomic1(
            Opcode::MaskedCompareSwap,
            Some(Width::Four),
            remote,
            local,
            operands,
        )
    }

    /// 8-byte [`Wqe::masked_compare_swap4`], the one atomic of two slots. The old value goes to `local` (8 bytes) in host order.
    pub fn masked_compare_swap8(
        remote: Remote,
        local: Local,
        (compare, compare_mask): (u64, u64),
        (swap, swap_mask): (u64, u64),
    ) -> Result<Self, WqeError> {
        let opcode = Opcode::MaskedCompareSwap;
        let result = atomic_result(opcode, Width::Eight, remote, local)?;
        let [values, masks] = seg::masked_cs8(swap, compare, swap_mask, compare_mask);
        let raddr = seg::raddr(remote.addr, remote.key);
        let z = Chunk::ZERO;
        Ok(Self::new(
            opcode,
            Width::Eight.opmod(),
            5,
            [raddr, values, masks, result, z, z, z],
        ))
    }

    /// Holds the queue until CQ `cqn` has produced completion number `index` (32 bits, wrapping).
    #[must_use]
    pub const fn wait(index: u32, cqn: Cqn) -> Self {
        let mut body = [Chunk::ZERO; 7];
        body[0] = seg::wait(index, cqn);
        Self::new(Opcode::Wait, 0, 2, body)
    }

    /// Reads `local` and drops it: completes when everything before it on the queue is visible.
    pub fn dump(local: Local) -> Result<Self, WqeError> {
        if local.len == 0 {
            return Err(WqeError::Length {
                opcode: Opcode::Dump,
                value: 0,
                min: 1,
                max: MAX_LEN.into(),
            });
        }
        let mut body = [Chunk::ZERO; 7];
        body[0] = data(Opcode::Dump, local)?;
        Ok(Self::new(Opcode::Dump, 0, 2, body))
    }

    /// Whether success produces a CQE; without this call it does not.
    #[must_use]
    pub const fn signalled(self, yes: bool) -> Self {
        let mode = if yes {
            flags::CQ_UPDATE
        } else {
            flags::CQ_ERROR_ONLY
        };
        Self {
            fm_ce_se: self.fm_ce_se & !flags::CQ_MASK | mode,
            ..self
        }
    }

    /// Whether the responder's completion raises a solicited event.
    #[must_use]
    pub const fn solicited(self, yes: bool) -> Self {
        let bit = if yes { flags::SOLICITED } else { 0 };
        Self {
            fm_ce_se: self.fm_ce_se & !flags::SOLICITED | bit,
            ..self
        }
    }

    /// What must be complete before this WQE starts.
    #[must_use]
    pub const fn fence(self, fence: Fence) -> Self {
        Self {
            fm_ce_se: self.fm_ce_se & !flags::FENCE_MASK | fence as u8,
            ..self
        }
    }

    /// The opcode.
    #[must_use]
    pub const fn opcode(&self) -> Opcode {
        self.opcode
    }

    /// Size in 16-byte chunks, 1 to 8.
    #[must_use]
    pub const fn ds(&self) -> u8 {
        self.ds
    }

    /// Size in 64-byte slots, 1 or 2.
    #[must_use]
    pub const fn slots(&self) -> u16 {
        (self.ds as u16).div_ceil(4)
    }

    /// The bytes of this WQE at slot `idx` of QP `qpn`: the first [`Wqe::ds`] chunks; the rest is zero and need not be written.
    #[must_use]
    pub const fn emit(&self, idx: u16, qpn: Qpn) -> [Chunk; 8] {
        let [a, b, c, d, e, f, g] = self.body;
        let ctrl = seg::ctrl(
            idx,
            self.opcode,
            self.opmod,
            qpn,
            self.ds,
            self.fm_ce_se,
            self.imm,
        );
        [ctrl, a, b, c, d, e, f, g]
    }

    fn transfer(opcode: Opcode, remote: Remote, local: Local) -> Result<Self, WqeError> {
        let mut body = [Chunk::ZERO; 7];
        body[0] = seg::raddr(remote.addr, remote.key);
        body[1] = data(opcode, local)?;
        Ok(Self::new(opcode, 0, 2 + u8::from(local.len != 0), body))
    }

    /// An atomic whose operands take one chunk; without a width it is a plain one of 8 bytes.
    fn atomic1(
        opcode: Opcode,
        width: Option<Width>,
        remote: Remote,
        local: Local,
        operands: Chunk,
    ) -> Result<Self, WqeError> {
        let result = atomic_result(opcode, width.unwrap_or(Width::Eight), remote, local)?;
        let z = Chunk::ZERO;
        let raddr = seg::raddr(remote.addr, remote.key);
        Ok(Self::new(
            opcode,
            width.map_or(0, Width::opmod),
            4,
            [raddr, operands, result, z, z, z, z],
        ))
    }
}

/// A data segment of any allowed length. A length of 0 gives zeroes, which the caller's `ds` then leaves out.
fn data(opcode: Opcode, local: Local) -> Result<Chunk, WqeError> {
    match local.len {
        0 => Ok(Chunk::ZERO),
        1..=MAX_LEN => Ok(seg::data(local.len, local.key, local.addr)),
        _ => Err(WqeError::Length {
            opcode,
            value: local.len.into(),
            min: 0,
            max: MAX_LEN.into(),
        }),
    }
}

/// The data segment for an atomic's old value, its width and the remote alignment checked.
fn atomic_result(
    opcode: Opcode,
    width: Width,
    remote: Remote,
    local: Local,
) -> Result<Chunk, WqeError> {
    let bytes = width.bytes();
    if local.len != bytes {
        return Err(WqeError::Length {
            opcode,
            value: local.len.into(),
            min: bytes.into(),
            max: bytes.into(),
        });
    }
    if !remote.addr.is_multiple_of(bytes.into()) {
        return Err(WqeError::Misaligned {
            addr: remote.addr,
            align: bytes,
        });
    }
    Ok(seg::data(bytes, local.key, local.addr))
}

/// Inline header and payload in `N` chunks.
fn pack_inline<const N: usize>(bytes: &[u8]) -> Result<[Chunk; N], WqeError> {
    let room = 16 * N - 4;
    if bytes.len() > room {
        return Err(WqeError::Inline {
            value: bytes.len() as u64,
            room: room as u64,
        });
    }
    let (head, tail) = bytes.split_at(bytes.len().min(12));
    let mut first = [0; 12];
    first[..head.len()].copy_from_slice(head);
    let mut chunks = [Chunk::ZERO; N];
    chunks[0] = seg::inline_first(bytes.len() as u32, first);
    for (chunk, part) in chunks.iter_mut().skip(1).zip(tail.chunks(16)) {
        let mut raw = [0; 16];
        raw[..part.len()].copy_from_slice(part);
        *chunk = Chunk::from_bytes(&raw);
    }
    Ok(chunks)
}
