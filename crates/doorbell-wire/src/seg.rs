//! Building a WQE segment by segment: one function, one 16-byte chunk.
//!
//! These are what the GPU calls between reserving a slot and ringing, so they are branch-free, inlined, and check nothing:
//! whoever wants checking uses [`crate::Wqe`]. Arguments are host-order; the functions swap.
//!
//! Layouts: rdma-core `mlx5_wqe_{ctrl,raddr,data,inl_data,atomic}_seg`; DOCA's wait and extended atomic segments.
//! A WQE is the control segment followed by:
//!
//! | opcode | segments | ds |
//! |---|---|---|
//! | NOP | none | 1 |
//! | WRITE, READ | raddr, data (WRITE: or inline) | 3 |
//! | SEND | data or inline | 2 |
//! | FETCH_ADD, COMPARE_SWAP, masked ones of one chunk | raddr, atomic, data | 4 |
//! | masked COMPARE_SWAP of 8 bytes | raddr, swap and compare, their masks, data | 5 (two slots) |
//! | WAIT | wait | 2 |
//! | DUMP | data | 2 |

use crate::{Chunk, Cqn, Key, Opcode, Qpn};

/// Bit 31 of a data segment's first word: payload follows in the WQE itself (rdma-core `MLX5_INLINE_SEG`).
pub const INLINE: u32 = 0x8000_0000;

/// The control segment. `idx` is the WQE's first slot (16 bits of the producer index), `ds` its size in chunks, this one included;
/// `fm_ce_se` is made of [`crate::flags`].
#[inline(always)]
#[must_use]
pub const fn ctrl(
    idx: u16,
    opcode: Opcode,
    opmod: u8,
    qpn: Qpn,
    ds: u8,
    fm_ce_se: u8,
    imm: u32,
) -> Chunk {
    ctrl_raw(
        idx,
        opcode as u8,
        opmod,
        (qpn.get() << 8 | ds as u32).swap_bytes(),
        fm_ce_se,
        imm,
    )
}

/// The control segment from a ready-made `qpn << 8 | ds` word, big-endian, which a QP structure keeps per `ds`.
#[inline(always)]
#[must_use]
pub const fn ctrl_raw(
    idx: u16,
    opcode: u8,
    opmod: u8,
    qpn_ds_be: u32,
    fm_ce_se: u8,
    imm: u32,
) -> Chunk {
    let first = (opmod as u32) << 24 | (idx as u32) << 8 | opcode as u32;
    // Bytes 8 to 10 (signature, stream channel) are zero; byte 11 is fm_ce_se.
    Chunk::from_words(
        first.swap_bytes(),
        qpn_ds_be,
        (fm_ce_se as u32) << 24,
        imm.swap_bytes(),
    )
}

/// The remote-address segment: `{be64 addr, be32 rkey, reserved}`.
#[inline(always)]
#[must_use]
pub const fn raddr(addr: u64, rkey: Key) -> Chunk {
    Chunk([addr.swap_bytes(), rkey.0.swap_bytes() as u64])
}

/// The data segment: `{be32 len, be32 lkey, be64 addr}`. `len` is below 2^31: bit 31 means inline. A `len` of 0
/// is no bytes to ConnectX but was 2^31 bytes to ConnectX-3: rather leave the segment out.
#[inline(always)]
#[must_use]
pub const fn data(len: u32, lkey: Key, addr: u64) -> Chunk {
    Chunk([
        len.swap_bytes() as u64 | (lkey.0.swap_bytes() as u64) << 32,
        addr.swap_bytes(),
    ])
}

/// Header and first 12 bytes of an inline payload of `len` bytes; the rest follows raw in further chunks ([`inline_ds`] of them in all).
#[inline(always)]
#[must_use]
pub const fn inline_first(len: u32, bytes: [u8; 12]) -> Chunk {
    let [a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3] = bytes;
    inline_words(
        len,
        [
            u32::from_le_bytes([a0, a1, a2, a3]),
            u32::from_le_bytes([b0, b1, b2, b3]),
            u32::from_le_bytes([c0, c1, c2, c3]),
        ],
    )
}

/// [`inline_first`] with the payload as three native words, as loaded from memory.
#[inline(always)]
#[must_use]
pub const fn inline_words(len: u32, words: [u32; 3]) -> Chunk {
    Chunk::from_words((len | INLINE).swap_bytes(), words[0], words[1], words[2])
}

/// An inline payload that is one native value of `len` = 1, 2, 4 or 8 bytes: the `len` low bytes of `value`.
#[inline(always)]
#[must_use]
pub const fn inline8(value: u64, len: u32) -> Chunk {
    inline_words(len, [value as u32, (value >> 32) as u32, 0])
}

/// Chunks that an inline payload of `len` bytes takes, header included.
#[inline(always)]
#[must_use]
pub const fn inline_ds(len: u32) -> u32 {
    // 4 bytes of header, rounded up to 16; written so that no length overflows.
    len / 16 + (len % 16 + 4).div_ceil(16)
}

/// Whether a payload chunk is an inline header rather than a data segment.
#[inline(always)]
#[must_use]
pub const fn is_inline(chunk: Chunk) -> bool {
    chunk.be32(0) & INLINE != 0
}

/// The atomic segment: FETCH_ADD `(add, ignored)`, COMPARE_SWAP `(swap, compare)`.
#[inline(always)]
#[must_use]
pub const fn atomic(swap_add: u64, compare: u64) -> Chunk {
    Chunk::from_be64(swap_add, compare)
}

/// Masked FETCH_ADD of 8 bytes: a carry out of a bit that is set in `boundary` is dropped.
#[inline(always)]
#[must_use]
pub const fn masked_fa8(add: u64, boundary: u64) -> Chunk {
    Chunk::from_be64(add, boundary)
}

/// Masked FETCH_ADD of 4 bytes: `{be32 add, be32 boundary, reserved}`.
#[inline(always)]
#[must_use]
pub const fn masked_fa4(add: u32, boundary: u32) -> Chunk {
    Chunk::from_be32(add, boundary, 0, 0)
}

/// Masked COMPARE_SWAP of 4 bytes: `{be32 swap, be32 compare, be32 swap_mask, be32 compare_mask}`.
#[inline(always)]
#[must_use]
pub const fn masked_cs4(swap: u32, compare: u32, swap_mask: u32, compare_mask: u32) -> Chunk {
    Chunk::from_be32(swap, compare, swap_mask, compare_mask)
}

/// Masked COMPARE_SWAP of 8 bytes: `{be64 swap, be64 compare}`, then `{be64 swap_mask, be64 compare_mask}`. The data segment
/// then falls into the WQE's second slot.
#[inline(always)]
#[must_use]
pub const fn masked_cs8(swap: u64, compare: u64, swap_mask: u64, compare_mask: u64) -> [Chunk; 2] {
    [
        Chunk::from_be64(swap, compare),
        Chunk::from_be64(swap_mask, compare_mask),
    ]
}

/// The wait segment: `{reserved 8 bytes, be32 index, be32 cqn}`. The queue goes on once CQ `cqn` has produced completion `index`.
#[inline(always)]
#[must_use]
pub const fn wait(index: u32, cqn: Cqn) -> Chunk {
    Chunk::from_be32(0, 0, index, cqn.get())
}
