//! 16 bytes of a WQE or CQE, held as they lie in memory.
//!
//! mlx5 counts WQE size in units of 16 bytes, and a GPU writes 16 bytes with one store: hence this unit.
//! Two native `u64`s, not 16 bytes, so that a GPU keeps a chunk in registers and byte swaps are single instructions.

/// Bytes in one WQE basic block: what one producer index counts (PRM "WQEBB"; rdma-core `MLX5_SEND_WQE_BB`).
pub const WQEBB: usize = 64;

/// 16 bytes in memory order: what one 16-byte store writes.
#[repr(C, align(16))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Chunk(pub [u64; 2]);

impl Chunk {
    /// Sixteen zero bytes.
    pub const ZERO: Self = Self([0; 2]);

    /// The chunk whose memory image is `bytes`.
    #[inline(always)]
    #[must_use]
    pub const fn from_bytes(bytes: &[u8; 16]) -> Self {
        let v = u128::from_le_bytes(*bytes);
        Self([v as u64, (v >> 64) as u64])
    }

    /// The memory image.
    #[inline(always)]
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        (self.0[0] as u128 | (self.0[1] as u128) << 64).to_le_bytes()
    }

    /// Four 32-bit fields, given in host order, each laid down big-endian.
    #[inline(always)]
    #[must_use]
    pub const fn from_be32(a: u32, b: u32, c: u32, d: u32) -> Self {
        Self::from_words(
            a.swap_bytes(),
            b.swap_bytes(),
            c.swap_bytes(),
            d.swap_bytes(),
        )
    }

    /// Two 64-bit fields, given in host order, each laid down big-endian.
    #[inline(always)]
    #[must_use]
    pub const fn from_be64(a: u64, b: u64) -> Self {
        Self([a.swap_bytes(), b.swap_bytes()])
    }

    /// Four words exactly as a native 32-bit load of memory would give them.
    #[inline(always)]
    #[must_use]
    pub const fn from_words(a: u32, b: u32, c: u32, d: u32) -> Self {
        Self([a as u64 | (b as u64) << 32, c as u64 | (d as u64) << 32])
    }

    /// The `word`-th native 32-bit word (only the low two bits of `word` count, so there is nothing to check).
    #[inline(always)]
    #[must_use]
    pub const fn word(self, word: usize) -> u32 {
        (self.0[(word >> 1) & 1] >> (32 * (word & 1))) as u32
    }

    /// The big-endian 32-bit field at byte `4 * word`, in host order (only the low two bits of `word` count).
    #[inline(always)]
    #[must_use]
    pub const fn be32(self, word: usize) -> u32 {
        self.word(word).swap_bytes()
    }

    /// The big-endian 64-bit field at byte `8 * half`, in host order (only the low bit of `half` counts).
    #[inline(always)]
    #[must_use]
    pub const fn be64(self, half: usize) -> u64 {
        self.0[half & 1].swap_bytes()
    }

    /// The byte at offset `at` (only the low four bits of `at` count).
    #[inline(always)]
    #[must_use]
    pub const fn byte(self, at: usize) -> u8 {
        (self.0[(at >> 3) & 1] >> (8 * (at & 7))) as u8
    }
}

/// The bytes in memory order, as `xxxxxxxx xxxxxxxx xxxxxxxx xxxxxxxx`.
impl core::fmt::Debug for Chunk {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "{:08x} {:08x} {:08x} {:08x}",
            self.be32(0),
            self.be32(1),
            self.be32(2),
            self.be32(3)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accessors_read_memory_order() {
        let mut bytes = [0u8; 16];
        for (i, b) in bytes.iter_mut().enumerate() {
            *b = i as u8;
        }
        let c = Chunk::from_bytes(&bytes);
        assert_eq!(c.to_bytes(), bytes);
        assert_eq!(c.be32(0), 0x0001_0203);
        assert_eq!(c.be32(3), 0x0c0d_0e0f);
        assert_eq!(c.be64(1), 0x0809_0a0b_0c0d_0e0f);
        assert_eq!(c.word(1), 0x0706_0504);
        for (i, b) in bytes.iter().enumerate() {
            assert_eq!(c.byte(i), *b);
        }
        assert_eq!(std::format!("{c:?}"), "00010203 04050607 08090a0b 0c0d0e0f");
    }

    #[test]
    fn builders_agree() {
        let c = Chunk::from_be32(1, 2, 3, 4);
        assert_eq!(c, Chunk::from_be64(1 << 32 | 2, 3 << 32 | 4));
        assert_eq!(c, Chunk::from_words(1 << 24, 2 << 24, 3 << 24, 4 << 24));
        assert_eq!(core::mem::align_of::<Chunk>(), 16);
        assert_eq!(core::mem::size_of::<Chunk>(), 16);
    }
}
