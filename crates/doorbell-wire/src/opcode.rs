//! Send WQE opcodes and the width of an extended atomic.
//!
//! The numbers are rdma-core's `MLX5_OPCODE_*` (providers/mlx5/mlx5dv.h); DUMP and WAIT are the kernel's (include/linux/mlx5).
//! Opcodes outside this list exist on hardware (UMR, LSO, ...) and are refused by the software HCA.

/// What a send WQE asks for: the low byte of the control segment's first word.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Opcode {
    /// Does nothing, completes in order.
    Nop = 0x00,
    /// RDMA WRITE.
    RdmaWrite = 0x08,
    /// RDMA WRITE that also consumes a receive and delivers 32 bits of immediate data.
    RdmaWriteImm = 0x09,
    /// SEND.
    Send = 0x0a,
    /// SEND with 32 bits of immediate data.
    SendImm = 0x0b,
    /// Holds the send queue until a CQ has produced a given completion.
    Wait = 0x0f,
    /// RDMA READ.
    RdmaRead = 0x10,
    /// 8-byte compare and swap.
    CompareSwap = 0x11,
    /// 8-byte fetch and add.
    FetchAdd = 0x12,
    /// Compare and swap under masks, 4 or 8 bytes ("extended atomic").
    MaskedCompareSwap = 0x14,
    /// Fetch and add with carry boundaries, 4 or 8 bytes ("extended atomic").
    MaskedFetchAdd = 0x15,
    /// Reads local memory and drops it: completes after earlier WQEs of the queue are visible.
    Dump = 0x23,
}

impl Opcode {
    /// Every opcode, in numeric order.
    pub const ALL: [Self; 12] = [
        Self::Nop,
        Self::RdmaWrite,
        Self::RdmaWriteImm,
        Self::Send,
        Self::SendImm,
        Self::Wait,
        Self::RdmaRead,
        Self::CompareSwap,
        Self::FetchAdd,
        Self::MaskedCompareSwap,
        Self::MaskedFetchAdd,
        Self::Dump,
    ];

    /// The field's own name, upper case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nop => "NOP",
            Self::RdmaWrite => "RDMA_WRITE",
            Self::RdmaWriteImm => "RDMA_WRITE_IMM",
            Self::Send => "SEND",
            Self::SendImm => "SEND_IMM",
            Self::Wait => "WAIT",
            Self::RdmaRead => "RDMA_READ",
            Self::CompareSwap => "COMPARE_SWAP",
            Self::FetchAdd => "FETCH_ADD",
            Self::MaskedCompareSwap => "MASKED_COMPARE_SWAP",
            Self::MaskedFetchAdd => "MASKED_FETCH_ADD",
            Self::Dump => "DUMP",
        }
    }
}

impl core::fmt::Display for Opcode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.name())
    }
}

/// An opcode byte that is none of [`Opcode`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnknownOpcode(pub u8);

impl core::fmt::Display for UnknownOpcode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "unknown opcode {:#04x}", self.0)
    }
}

impl core::error::Error for UnknownOpcode {}

impl TryFrom<u8> for Opcode {
    type Error = UnknownOpcode;

    #[inline(always)]
    fn try_from(byte: u8) -> Result<Self, UnknownOpcode> {
        Ok(match byte {
            0x00 => Self::Nop,
            0x08 => Self::RdmaWrite,
            0x09 => Self::RdmaWriteImm,
            0x0a => Self::Send,
            0x0b => Self::SendImm,
            0x0f => Self::Wait,
            0x10 => Self::RdmaRead,
            0x11 => Self::CompareSwap,
            0x12 => Self::FetchAdd,
            0x14 => Self::MaskedCompareSwap,
            0x15 => Self::MaskedFetchAdd,
            0x23 => Self::Dump,
            other => return Err(UnknownOpcode(other)),
        })
    }
}

/// Width of an extended (masked) atomic, carried in the opmod byte as `8 | (log2(bytes) - 2)` (UCX `UCT_IB_MLX5_OPMOD_EXT_ATOMIC`).
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Width {
    /// 4 bytes.
    Four = 0x08,
    /// 8 bytes.
    Eight = 0x09,
}

impl Width {
    /// The opmod byte (byte 0 of the control segment).
    #[inline(always)]
    #[must_use]
    pub const fn opmod(self) -> u8 {
        self as u8
    }

    /// The width an opmod byte stands for.
    #[inline(always)]
    #[must_use]
    pub const fn from_opmod(opmod: u8) -> Option<Self> {
        match opmod {
            0x08 => Some(Self::Four),
            0x09 => Some(Self::Eight),
            _ => None,
        }
    }

    /// 4 or 8.
    #[inline(always)]
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_an_opcode_or_refused() {
        let mut known = 0;
        for byte in 0..=255u8 {
            match Opcode::try_from(byte) {
                Ok(op) => {
                    assert_eq!(op as u8, byte);
                    assert!(Opcode::ALL.contains(&op));
                    known += 1;
                }
                Err(e) => assert_eq!(e, UnknownOpcode(byte)),
            }
        }
        assert_eq!(known, Opcode::ALL.len());
    }

    #[test]
    fn widths_are_their_opmods() {
        for opmod in 0..=255u8 {
            match Width::from_opmod(opmod) {
                Some(w) => assert_eq!((w.opmod(), w.bytes()), (opmod, 4 << (opmod & 7))),
                None => assert!(opmod != 8 && opmod != 9),
            }
        }
    }
}
