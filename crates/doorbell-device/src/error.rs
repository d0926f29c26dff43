//! What can go wrong with a call of a GPU thread: one non-zero word, so that it stays in a register and crosses the C ABI.

use core::fmt;
use core::num::NonZeroU64;

use crate::layout::{ErrorKind, ErrorWord};

/// Why a post or a wait failed. [`Error::failure`] takes it apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Error(NonZeroU64);

/// An [`Error`], taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure {
    /// A WQE of this QP completed in error: the first one, whichever call reports it. The host can reset the QP and reconnect.
    Completion {
        /// mlx5 syndrome.
        syndrome: u8,
        /// Vendor syndrome (Doorbell's own table).
        vendor: u8,
        /// Index of the WQE, modulo 2^16.
        wqe_index: u16,
    },
    /// The deadline passed. The operation may still complete.
    TimedOut,
    /// The QP is in error, and the record of why is not there (a bare QP).
    QpError,
    /// The host closed the QP.
    Closed,
    /// The engine that executes the QP is gone.
    EngineDown,
    /// The ring stayed full until the deadline; nothing was posted.
    NoSpace,
    /// The arguments cannot be posted on this QP: more slots than the ring has or than one call takes ([`crate::MAX_SLOTS`]), no receive
    /// queue, an unsignalled or two-slot WQE on a per-slot CQ, a length that inline data cannot have, no companion, an extension of another version.
    Invalid,
    /// A thread that reserved slots before this one did not publish them in time: the QP is stuck until the host resets it.
    Stuck,
    /// The host gave the kernel up.
    Aborted,
    /// The completion of a receive was overwritten by that of a later one: its slot was posted again before its message was taken.
    Lapped,
}

impl Error {
    /// See [`Failure::TimedOut`].
    pub const TIMED_OUT: Self = Self::plain(2);
    /// See [`Failure::QpError`].
    pub const QP_ERROR: Self = Self::plain(3);
    /// See [`Failure::Closed`].
    pub const CLOSED: Self = Self::plain(4);
    /// See [`Failure::EngineDown`].
    pub const ENGINE_DOWN: Self = Self::plain(5);
    /// See [`Failure::NoSpace`].
    pub const NO_SPACE: Self = Self::plain(6);
    /// See [`Failure::Invalid`].
    pub const INVALID: Self = Self::plain(7);
    /// See [`Failure::Stuck`].
    pub const STUCK: Self = Self::plain(8);
    /// See [`Failure::Aborted`].
    pub const ABORTED: Self = Self::plain(9);
    /// See [`Failure::Lapped`].
    pub const LAPPED: Self = Self::plain(10);

    const fn plain(kind: u8) -> Self {
        match NonZeroU64::new(kind as u64) {
            Some(v) => Self(v),
            None => Self(NonZeroU64::MIN),
        }
    }

    /// A completion error.
    #[inline(always)]
    pub const fn completion(syndrome: u8, vendor: u8, wqe_index: u16) -> Self {
        Self(NonZeroU64::MIN.saturating_add(
            (syndrome as u64) << 8 | (vendor as u64) << 16 | (wqe_index as u64) << 32,
        ))
    }

    /// The error that an error word reports; `None` for none.
    #[inline(always)]
    pub fn from_word(word: ErrorWord) -> Option<Self> {
        match word.kind() {
            ErrorKind::None => None,
            ErrorKind::Completion => Some(Self::completion(
                word.syndrome(),
                word.vendor(),
                word.wqe_index(),
            )),
            ErrorKind::Closed => Some(Self::CLOSED),
            ErrorKind::EngineDown => Some(Self::ENGINE_DOWN),
        }
    }

    /// The error as the C functions and the kernels' reports give it: the kind in bits 0..8 (1 completion, 2 timed out, 3 QP error,
    /// 4 closed, 5 engine down, 6 no space, 7 invalid, 8 stuck, 9 aborted, 10 lapped); for a completion also syndrome in 8..16, vendor
    /// syndrome in 16..24, and WQE index in 32..48. Never 0, and bit 63 is clear.
    #[inline(always)]
    pub const fn code(self) -> u64 {
        self.0.get()
    }

    /// The error that [`Error::code`] gave; `None` for 0.
    #[inline(always)]
    pub const fn from_code(code: u64) -> Option<Self> {
        match NonZeroU64::new(code & !(1 << 63)) {
            Some(v) => Some(Self(v)),
            None => None,
        }
    }

    /// What it is. A code that no error has counts as [`Failure::QpError`].
    pub const fn failure(self) -> Failure {
        let code = self.0.get();
        match code as u8 {
            1 => Failure::Completion {
                syndrome: (code >> 8) as u8,
                vendor: (code >> 16) as u8,
                wqe_index: (code >> 32) as u16,
            },
            2 => Failure::TimedOut,
            4 => Failure::Closed,
            5 => Failure::EngineDown,
            6 => Failure::NoSpace,
            7 => Failure::Invalid,
            8 => Failure::Stuck,
            9 => Failure::Aborted,
            10 => Failure::Lapped,
            _ => Failure::QpError,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.failure() {
            Failure::Completion {
                syndrome,
                vendor,
                wqe_index,
            } => write!(
                f,
                "WQE {wqe_index:#x} completed in error (syndrome {syndrome:#04x}, vendor syndrome {vendor:#04x}); \
                 reset and reconnect the QP"
            ),
            Failure::TimedOut => f.write_str("the deadline passed before the operation completed"),
            Failure::QpError => f.write_str("the QP is in error; reset and reconnect it"),
            Failure::Closed => f.write_str("the host closed the QP"),
            Failure::EngineDown => f.write_str("the engine that executes the QP is gone"),
            Failure::NoSpace => {
                f.write_str("the queue stayed full until the deadline: is its engine running, do messages come?")
            }
            Failure::Invalid => {
                f.write_str("this QP cannot take such a request (see Failure::Invalid)")
            }
            Failure::Stuck => {
                f.write_str("an earlier thread never published its WQEs; reset the QP")
            }
            Failure::Aborted => f.write_str("the host gave the kernel up"),
            Failure::Lapped => f.write_str(
                "the receive was posted again before its completion was taken; take it first",
            ),
        }
    }
}

impl core::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for (e, failure) in [
            (
                Error::completion(0x13, 0x8b, 0xfffe),
                Failure::Completion {
                    syndrome: 0x13,
                    vendor: 0x8b,
                    wqe_index: 0xfffe,
                },
            ),
            (Error::TIMED_OUT, Failure::TimedOut),
            (Error::QP_ERROR, Failure::QpError),
            (Error::CLOSED, Failure::Closed),
            (Error::ENGINE_DOWN, Failure::EngineDown),
            (Error::NO_SPACE, Failure::NoSpace),
            (Error::INVALID, Failure::Invalid),
            (Error::STUCK, Failure::Stuck),
            (Error::ABORTED, Failure::Aborted),
            (Error::LAPPED, Failure::Lapped),
        ] {
            assert_eq!(e.failure(), failure);
            assert_eq!(Error::from_code(e.code()), Some(e));
        }
        assert_eq!(Error::from_code(0), None);
    }

    #[test]
    fn words_become_errors() {
        assert_eq!(Error::from_word(ErrorWord::NONE), None);
        let word = ErrorWord::completion(0x04, 0x86, 0x10, 9);
        assert_eq!(
            Error::from_word(word),
            Some(Error::completion(0x04, 0x86, 9))
        );
        assert_eq!(
            Error::from_word(ErrorWord::state(ErrorKind::EngineDown)),
            Some(Error::ENGINE_DOWN)
        );
    }
}
