//! Names on the wire: memory keys, queue numbers, and the two kinds of address a work request holds.
//!
//! All of these are host-order numbers; only `seg` and `Chunk` know that the wire is big-endian.
//! QP and CQ numbers have 24 bits: the types keep the other 8 out of the neighbouring field.

use crate::Chunk;

/// A memory key (lkey or rkey), in host order. Tables of foreign device code hold keys already big-endian: see [`Key::from_be`].
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Key(pub u32);

impl Key {
    /// A key from a word that is stored big-endian, as NCCL's and DOCA's key tables store it.
    #[inline(always)]
    #[must_use]
    pub const fn from_be(stored: u32) -> Self {
        Self(stored.swap_bytes())
    }

    /// The word that such a table stores.
    #[inline(always)]
    #[must_use]
    pub const fn to_be(self) -> u32 {
        self.0.swap_bytes()
    }
}

impl core::fmt::Display for Key {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

impl core::fmt::Debug for Key {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Key({:#010x})", self.0)
    }
}

macro_rules! number24 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u32);

        impl $name {
            /// The largest number, 2^24 - 1.
            pub const MAX: Self = Self(0xff_ffff);

            /// `None` if `number` needs more than 24 bits.
            #[inline(always)]
            #[must_use]
            pub const fn new(number: u32) -> Option<Self> {
                if number <= Self::MAX.0 { Some(Self(number)) } else { None }
            }

            /// The low 24 bits of `number`, for words that are known to hold one, or are compared afterwards.
            #[inline(always)]
            #[must_use]
            pub const fn truncate(number: u32) -> Self {
                Self(number & Self::MAX.0)
            }

            /// The number, below 2^24.
            #[inline(always)]
            #[must_use]
            pub const fn get(self) -> u32 {
                self.0
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }
    };
}

number24! {
    /// A queue pair number: 24 bits.
    Qpn
}

number24! {
    /// A completion queue number: 24 bits.
    Cqn
}

/// Memory of the peer: an address (or an offset, if the region is zero-based) and the key that opens it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Remote {
    /// Virtual address in the peer's region, or offset into it.
    pub addr: u64,
    /// The peer's rkey.
    pub key: Key,
}

impl Remote {
    /// Reads a remote-address segment; its last four bytes are reserved and ignored.
    #[inline(always)]
    #[must_use]
    pub const fn parse(chunk: Chunk) -> Self {
        Self {
            addr: chunk.be64(0),
            key: Key(chunk.be32(2)),
        }
    }
}

/// Local memory: address (or offset), key and length.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Local {
    /// Virtual address in the region, or offset into it.
    pub addr: u64,
    /// The region's lkey.
    pub key: Key,
    /// Bytes, below 2^31.
    pub len: u32,
}

impl Local {
    /// Reads a data segment. Only meaningful if [`crate::seg::is_inline`] says no; the inline flag is left out of `len`.
    #[inline(always)]
    #[must_use]
    pub const fn parse(chunk: Chunk) -> Self {
        Self {
            addr: chunk.be64(1),
            key: Key(chunk.be32(1)),
            len: chunk.be32(0) & !crate::seg::INLINE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_four_bits() {
        assert_eq!(Qpn::new(0xff_ffff), Some(Qpn::MAX));
        assert_eq!(Qpn::new(0x100_0000), None);
        assert_eq!(Cqn::truncate(0xab12_3456).get(), 0x12_3456);
    }

    #[test]
    fn stored_keys_are_big_endian() {
        assert_eq!(Key(0x0102_0304).to_be().to_ne_bytes(), [1, 2, 3, 4]);
        assert_eq!(Key::from_be(Key(0xfeed_0042).to_be()), Key(0xfeed_0042));
    }
}
