//! Doorbells: the 64-bit word that is rung, the 32-bit record beside it, and how far a ring advances a queue.
//!
//! The word carries 24 bits of the producer index, the record 16, the producer word of an assisted QP all 64.
//! An older ring can arrive last, so an advance that looks like a step back is ignored, and one beyond the depth is an error of the QP.

use crate::Qpn;

/// The doorbell word: `{be32 pi << 8, be32 qpn << 8}` as one native store (the first 8 bytes of a control segment, without opcode and ds).
#[inline(always)]
#[must_use]
pub const fn doorbell_word(pi: u64, qpn: Qpn) -> u64 {
    ((pi as u32) << 8).swap_bytes() as u64 | ((qpn.get() << 8).swap_bytes() as u64) << 32
}

/// Producer index (24 bits) and QP number of a doorbell word. Opcode and ds bytes, which real BlueFlame writes carry, are ignored.
#[inline(always)]
#[must_use]
pub const fn parse(word: u64) -> (u32, Qpn) {
    (
        (word as u32).swap_bytes() >> 8,
        Qpn::truncate(((word >> 32) as u32).swap_bytes() >> 8),
    )
}

/// The doorbell record: `be32(pi & 0xffff)`, as a native word to store (rdma-core: `qp->db[MLX5_SND_DBR]`).
#[inline(always)]
#[must_use]
pub const fn record(pi: u64) -> u32 {
    (pi as u32 & 0xffff).swap_bytes()
}

/// The producer index (16 bits) in a doorbell record.
#[inline(always)]
#[must_use]
pub const fn parse_record(record: u32) -> u16 {
    record.swap_bytes() as u16
}

/// What a new producer index means for a queue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Advance {
    /// Nothing new: the same index, or an older ring that arrived late.
    None,
    /// This many new slots, 1 to the depth.
    Slots(u16),
    /// Further ahead than the queue is deep: an error of the QP (`Vendor::BAD_DOORBELL`).
    Jump,
}

/// The largest depth of a send queue, in slots: 2^15, so that a step forward and a step back differ in 16 bits.
pub const MAX_DEPTH: u32 = 1 << 15;

/// How far index `new` (the low 16 bits of a word or record) is ahead of `seen`, on a queue of `depth` slots (at most [`MAX_DEPTH`]).
///
/// `(new - seen) mod 2^16`: 1 to `depth` is accepted; 0, and anything else from 2^15 up, is ignored; the rest is a jump. On a queue of
/// exactly 2^15 slots a step of 2^15 counts as forward: a full ring posted at once.
#[inline(always)]
#[must_use]
pub const fn advance16(new: u16, seen: u16, depth: u32) -> Advance {
    let step = new.wrapping_sub(seen);
    let ahead = step as u32;
    if ahead == 0 {
        Advance::None
    } else if ahead <= depth && ahead <= MAX_DEPTH {
        Advance::Slots(step)
    } else if ahead >= MAX_DEPTH {
        Advance::None
    } else {
        Advance::Jump
    }
}

/// [`advance16`] for the full 64-bit producer word of an assisted QP: there a step back is simply a smaller number.
#[inline(always)]
#[must_use]
pub const fn advance64(new: u64, seen: u64, depth: u32) -> Advance {
    let ahead = new.wrapping_sub(seen);
    if new <= seen {
        Advance::None
    } else if ahead <= depth as u64 && ahead <= MAX_DEPTH as u64 {
        Advance::Slots(ahead as u16)
    } else {
        Advance::Jump
    }
}
