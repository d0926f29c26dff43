//! Packet sequence numbers: 24 bits that wrap.

use core::fmt;

/// A packet sequence number (volume 1, 9.7.1): 24 bits. Which of two is later is known only within a window of 2^23.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

const MASK: u32 = 0xff_ffff;

impl Psn {
    /// The low 24 bits of `value`.
    #[inline]
    pub const fn new(value: u32) -> Self {
        Self(value & MASK)
    }

    /// The number, below 2^24.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// `n` packets later.
    #[inline]
    #[must_use]
    pub const fn add(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n) & MASK)
    }

    /// `n` packets earlier.
    #[inline]
    #[must_use]
    pub const fn sub(self, n: u32) -> Self {
        Self(self.0.wrapping_sub(n) & MASK)
    }

    /// How many packets this is after `other`: negative if before; -2^23 to 2^23-1.
    #[inline]
    pub const fn since(self, other: Self) -> i32 {
        // The difference's bit 23 becomes the sign.
        ((self.0.wrapping_sub(other.0) << 8) as i32) >> 8
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_wrap_at_24_bits() {
        assert_eq!(Psn::new(2).since(Psn::new(0xff_ffff)), 3);
        assert_eq!(Psn::new(0xff_ffff).since(Psn::new(2)), -3);
        assert_eq!(Psn::new(0).since(Psn::new(0x80_0000)), -0x80_0000);
        assert_eq!(Psn::new(0x7f_ffff).since(Psn::new(0)), 0x7f_ffff);
        assert_eq!(Psn::new(0xff_fffe).add(3), Psn::new(1));
        assert_eq!(Psn::new(1).sub(3), Psn::new(0xff_fffe));
        assert_eq!(Psn::new(0x0100_0005), Psn::new(5));
    }
}
