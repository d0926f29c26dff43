//! What can go wrong with a call of a GPU thread. Small, `Copy`, and with a code that crosses the C ABI.

use core::fmt;

use crate::layout::{ErrorKind, ErrorWord};

/// Why a post or a wait failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A WQE of this QP completed in error: the first one, whichever call reports it. The host can reset the QP and reconnect.
    Completion {
        /// mlx5 syndrome.
        syndrome: u8,
        /// Vendor syndrome (Doorbell's own table).
        vendor: u8,
        /// Index of the WQE, modulo 2^16.
        wqe_index: u16,
    },
    /// The deadline passed. After a post: nothing was posted. After a wait: the operation may still complete.
    TimedOut,
    /// The QP is in error, and the record of why is not there (a bare QP).
    QpError,
    /// The host closed the QP.
    Closed,
    /// The engine that executes the QP is gone.
    EngineDown,
    /// The ring stayed full until the deadline.
    NoSpace,
    /// The arguments cannot be posted on this QP: more slots than the ring has, an unsignalled or two-slot WQE on a per-slot CQ, a length
    /// that needs more than 255 WQEs, a payload too long for inline, no companion, an extension of another version.
    Invalid,
    /// A thread that reserved slots before this one did not publish them in time: the QP is stuck until the host resets it.
    Stuck,
    /// The host gave the kernel up.
    Aborted,
}

impl Error {
    /// The error that an error word reports; `None` for none.
    #[inline(always)]
    pub const fn from_word(word: ErrorWord) -> Option<Self> {
        match word.kind() {
            ErrorKind::None => None,
            ErrorKind::Completion => Some(Self::Completion {
                syndrome: word.syndrome(),
                vendor: word.vendor(),
                wqe_index: word.wqe_index(),
            }),
            ErrorKind::Closed => Some(Self::Closed),
            ErrorKind::EngineDown => Some(Self::EngineDown),
        }
    }

    /// The error as one non-zero number, as the C functions and the kernels' reports give it: the kind in bits 0..8 (1
    /// completion, 2 timed out, 3 QP error, 4 closed, 5 engine down, 6 no space, 7 invalid, 8 stuck, 9 aborted); for a completion also
    /// syndrome in 8..16, vendor syndrome in 16..24, and WQE index in 32..48.
    #[inline(always)]
    pub const fn code(self) -> u64 {
        match self {
            Self::Completion {
                syndrome,
                vendor,
                wqe_index,
            } => 1 | (syndrome as u64) << 8 | (vendor as u64) << 16 | (wqe_index as u64) << 32,
            Self::TimedOut => 2,
            Self::QpError => 3,
            Self::Closed => 4,
            Self::EngineDown => 5,
            Self::NoSpace => 6,
            Self::Invalid => 7,
            Self::Stuck => 8,
            Self::Aborted => 9,
        }
    }

    /// The error that [`Error::code`] gave; `None` for 0. A number that no error gives counts as [`Error::QpError`].
    #[inline(always)]
    pub const fn from_code(code: u64) -> Option<Self> {
        Some(match code as u8 {
            0 => return None,
            1 => Self::Completion {
                syndrome: (code >> 8) as u8,
                vendor: (code >> 16) as u8,
                wqe_index: (code >> 32) as u16,
            },
            2 => Self::TimedOut,
            4 => Self::Closed,
            5 => Self::EngineDown,
            6 => Self::NoSpace,
            7 => Self::Invalid,
            8 => Self::Stuck,
            9 => Self::Aborted,
            _ => Self::QpError,
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completion {
                syndrome,
                vendor,
                wqe_index,
            } => write!(
                f,
                "WQE {wqe_index:#x} completed in error (syndrome {syndrome:#04x}, vendor syndrome {vendor:#04x}); \
                 reset and reconnect the QP"
            ),
            Self::TimedOut => f.write_str("the deadline passed before the operation completed"),
            Self::QpError => f.write_str("the QP is in error; reset and reconnect it"),
            Self::Closed => f.write_str("the host closed the QP"),
            Self::EngineDown => f.write_str("the engine that executes the QP is gone"),
            Self::NoSpace => {
                f.write_str("the send queue stayed full until the deadline: is its engine running?")
            }
            Self::Invalid => f.write_str("this QP cannot take such a request (see Error::Invalid)"),
            Self::Stuck => f.write_str("an earlier thread never published its WQEs; reset the QP"),
            Self::Aborted => f.write_str("the host gave the kernel up"),
        }
    }
}

impl core::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for e in [
            Error::Completion {
                syndrome: 0x13,
                vendor: 0x8b,
                wqe_index: 0xfffe,
            },
            Error::TimedOut,
            Error::QpError,
            Error::Closed,
            Error::EngineDown,
            Error::NoSpace,
            Error::Invalid,
            Error::Stuck,
            Error::Aborted,
        ] {
            assert_ne!(e.code(), 0);
            assert_eq!(Error::from_code(e.code()), Some(e));
        }
        assert_eq!(Error::from_code(0), None);
    }
}
