//! The control segment, read back, and its flag byte.
//!
//! Reading never fails: a control segment is 16 bytes that anyone may have written, and every bit pattern has a meaning or is reserved.
//! Bytes 8 to 10 are ignored (foreign device code leaves them uninitialised), and so is `imm` unless the opcode carries one.

use crate::{Chunk, Opcode, Qpn, UnknownOpcode};

/// Bits of the `fm_ce_se` byte, byte 11 of the control segment (rdma-core `MLX5_WQE_CTRL_*`, PRM "fm_ce_se").
pub mod flags {
    /// Completion mode (bits 3:2): a CQE only if the WQE fails. What a byte of zero means.
    pub const CQ_ERROR_ONLY: u8 = 0x00;
    /// Completion mode: a CQE only for the first WQE that fails.
    pub const CQ_FIRST_ERROR: u8 = 0x04;
    /// Completion mode: a CQE always, that is, the WQE is signalled.
    pub const CQ_UPDATE: u8 = 0x08;
    /// Completion mode: a CQE and an event.
    pub const CQ_UPDATE_EVENT: u8 = 0x0c;
    /// The bits that hold the completion mode.
    pub const CQ_MASK: u8 = 0x0c;
    /// Solicited event at the responder.
    pub const SOLICITED: u8 = 0x02;
    /// Fence mode (bits 7:5): none.
    pub const FENCE_NONE: u8 = 0x00;
    /// Fence mode: wait for earlier local operations (initiator small fence).
    pub const FENCE_SMALL: u8 = 0x20;
    /// Fence mode: wait for earlier READs and atomics.
    pub const FENCE_READS: u8 = 0x40;
    /// Fence mode: strong ordering, wait for everything before.
    pub const FENCE_STRONG: u8 = 0x60;
    /// Fence mode: READs, atomics and local operations; what `IBV_SEND_FENCE` sets.
    pub const FENCE: u8 = 0x80;
    /// The bits that hold the fence mode.
    pub const FENCE_MASK: u8 = 0xe0;
}

/// Fence modes of a WQE: what has to be complete before it starts.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Fence {
    /// Nothing.
    #[default]
    None = flags::FENCE_NONE,
    /// Earlier local operations.
    Small = flags::FENCE_SMALL,
    /// Earlier READs and atomics.
    Reads = flags::FENCE_READS,
    /// Everything earlier.
    Strong = flags::FENCE_STRONG,
    /// Earlier READs, atomics and local operations (`IBV_SEND_FENCE`).
    Full = flags::FENCE,
}

impl Fence {
    /// The mode that the fence bits of an `fm_ce_se` byte stand for; three of the eight patterns are reserved.
    #[inline(always)]
    #[must_use]
    pub const fn from_bits(fm_ce_se: u8) -> Option<Self> {
        Some(match fm_ce_se & flags::FENCE_MASK {
            flags::FENCE_NONE => Self::None,
            flags::FENCE_SMALL => Self::Small,
            flags::FENCE_READS => Self::Reads,
            flags::FENCE_STRONG => Self::Strong,
            flags::FENCE => Self::Full,
            _ => return None,
        })
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Small => "small",
            Self::Reads => "reads",
            Self::Strong => "strong",
            Self::Full => "full",
        }
    }
}

/// A control segment, field by field, in host order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ctrl {
    /// Index of the WQE's first slot, 16 bits of the producer index.
    pub idx: u16,
    /// Opcode byte; [`Ctrl::opcode`] names it.
    pub opcode: u8,
    /// Opcode modifier: the width of an extended atomic, otherwise 0.
    pub opmod: u8,
    /// QP number, 24 bits.
    pub qpn: u32,
    /// Size in 16-byte chunks, the whole byte; valid sizes are 1 to 63.
    pub ds: u8,
    /// Fence, completion and solicited bits: see [`flags`].
    pub fm_ce_se: u8,
    /// Immediate data.
    pub imm: u32,
}

impl Ctrl {
    /// Reads a control segment; every 16 bytes are one.
    #[inline(always)]
    #[must_use]
    pub const fn parse(chunk: Chunk) -> Self {
        let first = chunk.be32(0);
        let second = chunk.be32(1);
        Self {
            idx: (first >> 8) as u16,
            opcode: first as u8,
            opmod: (first >> 24) as u8,
            qpn: second >> 8,
            ds: second as u8,
            fm_ce_se: chunk.byte(11),
            imm: chunk.be32(3),
        }
    }

    /// The chunk this was read from, reserved bytes zeroed.
    #[inline(always)]
    #[must_use]
    pub const fn emit(self) -> Chunk {
        let qpn_ds = (self.qpn << 8 | self.ds as u32).swap_bytes();
        crate::seg::ctrl_raw(
            self.idx,
            self.opcode,
            self.opmod,
            qpn_ds,
            self.fm_ce_se,
            self.imm,
        )
    }

    /// Whether this is the WQE expected at `idx` of QP `qpn`: a slot that was rung but not yet written still holds an older index.
    #[inline(always)]
    #[must_use]
    pub const fn matches(self, idx: u16, qpn: Qpn) -> bool {
        (self.idx ^ idx) as u32 | (self.qpn ^ qpn.get()) == 0
    }

    /// The opcode, if it is one that this crate knows.
    #[inline(always)]
    pub fn opcode(self) -> Result<Opcode, UnknownOpcode> {
        Opcode::try_from(self.opcode)
    }

    /// Whether success produces a CQE (`CQ_UPDATE`, with or without an event).
    #[inline(always)]
    #[must_use]
    pub const fn signalled(self) -> bool {
        self.fm_ce_se & flags::CQ_UPDATE != 0
    }

    /// Whether the responder's completion should raise a solicited event.
    #[inline(always)]
    #[must_use]
    pub const fn solicited(self) -> bool {
        self.fm_ce_se & flags::SOLICITED != 0
    }

    /// Whether any fence mode is set.
    #[inline(always)]
    #[must_use]
    pub const fn fenced(self) -> bool {
        self.fm_ce_se & flags::FENCE_MASK != 0
    }

    /// 64-byte slots that the WQE takes: 0 for a `ds` of 0, which no valid WQE has.
    #[inline(always)]
    #[must_use]
    pub const fn slots(self) -> u16 {
        (self.ds as u16).div_ceil(4)
    }
}
