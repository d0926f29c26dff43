//! What can be wrong with a WQE: the field, its value, and what would have been allowed.
//!
//! `Wqe` refuses to build such a WQE, and `Request::parse` refuses to read one; [`WqeError::syndrome`] and [`WqeError::vendor`] are what the
//! software HCA answers. Written by hand rather than derived: this crate is compiled for GPUs and has no dependencies.

use crate::{Opcode, Syndrome, Vendor};

/// A WQE that means nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WqeError {
    /// Fewer chunks were given than the control segment counts, or none at all.
    Truncated {
        /// Chunks the WQE says it has.
        ds: u8,
        /// Chunks given.
        have: usize,
    },
    /// The opcode byte is unknown.
    Opcode {
        /// Its value.
        value: u8,
    },
    /// The opcode modifier does not fit the opcode.
    Opmod {
        /// The opcode.
        opcode: Opcode,
        /// Its modifier.
        value: u8,
        /// The modifiers it may have.
        allowed: &'static [u8],
    },
    /// The size does not fit the opcode.
    Ds {
        /// The opcode.
        opcode: Opcode,
        /// The size, in chunks.
        value: u8,
        /// The smallest size of that opcode.
        min: u8,
        /// The largest.
        max: u8,
    },
    /// A data segment's length is out of range.
    Length {
        /// The opcode.
        opcode: Opcode,
        /// The length, in bytes.
        value: u64,
        /// The shortest allowed.
        min: u64,
        /// The longest allowed.
        max: u64,
    },
    /// Inline data longer than its room.
    Inline {
        /// The length, in bytes.
        value: u64,
        /// Bytes that there is room for.
        room: u64,
    },
    /// Inline data in a WQE that cannot have any.
    InlineNotAllowed {
        /// The opcode.
        opcode: Opcode,
    },
    /// An atomic's remote address is not a multiple of its width.
    Misaligned {
        /// The remote address or offset.
        addr: u64,
        /// The width, in bytes.
        align: u32,
    },
    /// The CQ number of a WAIT has more than 24 bits.
    Cqn {
        /// Its value.
        value: u32,
    },
}

impl WqeError {
    /// The syndrome that an HCA answers such a WQE with.
    #[must_use]
    pub const fn syndrome(&self) -> Syndrome {
        match self {
            Self::Length { .. } => Syndrome::LOCAL_LENGTH,
            Self::Misaligned { .. } => Syndrome::REMOTE_INVAL_REQ,
            _ => Syndrome::LOCAL_QP_OP,
        }
    }

    /// The vendor syndrome that Doorbell's software HCA answers such a WQE with.
    #[must_use]
    pub const fn vendor(&self) -> Vendor {
        match self {
            Self::Truncated { .. } | Self::Ds { .. } => Vendor::BAD_DS,
            Self::Opcode { .. } => Vendor::BAD_OPCODE,
            Self::Opmod { .. } => Vendor::BAD_OPMOD,
            Self::Length { .. } => Vendor::BAD_LENGTH,
            Self::Inline { .. } | Self::InlineNotAllowed { .. } => Vendor::BAD_INLINE,
            Self::Misaligned { .. } => Vendor::MISALIGNED,
            Self::Cqn { .. } => Vendor::BAD_WAIT_CQ,
        }
    }
}

impl core::fmt::Display for WqeError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Truncated { ds, have } => {
                write!(
                    f,
                    "ds is {ds}, but only {have} chunks were given; pass every slot of the WQE, in ring order"
                )
            }
            Self::Opcode { value } => write!(
                f,
                "opcode {value:#04x} is unknown; see Opcode for those that are"
            ),
            Self::Opmod {
                opcode,
                value,
                allowed,
            } => {
                write!(f, "opmod {value:#04x} does not fit {opcode}, which takes")?;
                for (i, opmod) in allowed.iter().enumerate() {
                    write!(f, "{} {opmod:#04x}", if i == 0 { "" } else { " or" })?;
                }
                Ok(())
            }
            Self::Ds {
                opcode,
                value,
                min,
                max,
            } if min == max => {
                write!(
                    f,
                    "ds {value} does not fit {opcode}, which takes {min} chunks here"
                )
            }
            Self::Ds {
                opcode,
                value,
                min,
                max,
            } => {
                write!(
                    f,
                    "ds {value} does not fit {opcode}, which takes {min} to {max} chunks"
                )
            }
            Self::Length {
                opcode,
                value,
                min,
                max,
            } if min == max => {
                write!(
                    f,
                    "length {value} does not fit {opcode}, which takes {min} bytes here"
                )
            }
            Self::Length {
                opcode,
                value,
                min,
                max,
            } => {
                write!(
                    f,
                    "length {value} does not fit {opcode}, which takes {min} to {max} bytes a segment"
                )
            }
            Self::Inline { value, room } => {
                write!(
                    f,
                    "inline length {value} exceeds the {room} bytes that there is room for"
                )
            }
            Self::InlineNotAllowed { opcode } => {
                write!(
                    f,
                    "{opcode} cannot have inline data (bit 31 of the length is set); give it a data segment"
                )
            }
            Self::Misaligned { addr, align } => {
                write!(
                    f,
                    "remote address {addr:#x} of a {align}-byte atomic is not a multiple of {align}"
                )
            }
            Self::Cqn { value } => {
                write!(f, "CQ number {value:#x} of a WAIT needs more than 24 bits")
            }
        }
    }
}

impl core::error::Error for WqeError {}
