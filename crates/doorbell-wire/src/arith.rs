//! What the masked atomics compute, as pure functions on values.
//!
//! Masked (extended) atomics treat a word as fields: an addition whose carries stop at field boundaries, a swap of some bits only.
//! Semantics: IB "masked atomics" as mlx5 implements them (`IB_WR_MASKED_ATOMIC_FETCH_AND_ADD`, `..._CMP_AND_SWP`).

/// `old + add`, where the carry out of every bit set in `boundary` (a field's top bit) is dropped. All ones make it XOR, 0 a plain addition.
///
/// For a 4-byte atomic use the low 32 bits of the result: no carry runs downwards.
#[inline(always)]
#[must_use]
pub const fn masked_add(old: u64, add: u64, boundary: u64) -> u64 {
    // Without the top bits no field can overflow into the next; the top bits then add without carry.
    (old & !boundary).wrapping_add(add & !boundary) ^ ((old ^ add) & boundary)
}

/// The word after a masked compare-and-swap: where `old` and `compare` agree on the bits of `compare_mask`, the bits of `swap_mask` come
/// from `swap`; otherwise `old`.
#[inline(always)]
#[must_use]
pub const fn masked_swap(
    old: u64,
    swap: u64,
    compare: u64,
    swap_mask: u64,
    compare_mask: u64,
) -> u64 {
    if (old ^ compare) & compare_mask == 0 {
        (old & !swap_mask) | (swap & swap_mask)
    } else {
        old
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, bit by bit: a full adder whose carry is cleared after a boundary bit.
    fn ripple(old: u64, add: u64, boundary: u64) -> u64 {
        let (mut sum, mut carry) = (0, 0);
        for bit in 0..64 {
            let (a, b) = (old >> bit & 1, add >> bit & 1);
            sum |= (a ^ b ^ carry) << bit;
            carry = if boundary >> bit & 1 == 1 {
                0
            } else {
                (a & b) | (carry & (a ^ b))
            };
        }
        sum
    }

    #[test]
    fn masked_add_is_the_ripple_adder() {
        // Every pair of bytes under every boundary of 6 bits, moved to both ends of the word.
        for boundary in 0..64u64 {
            for old in 0..64u64 {
                for add in 0..64u64 {
                    for shift in [0, 29, 58] {
                        let (o, a, b) = (old << shift, add << shift, boundary << shift);
                        assert_eq!(masked_add(o, a, b), ripple(o, a, b), "{o:#x} {a:#x} {b:#x}");
                    }
                }
            }
        }
        assert_eq!(masked_add(u64::MAX, 1, 0), 0);
        assert_eq!(masked_add(0xf0, 0xff, u64::MAX), 0x0f);
    }

    #[test]
    fn masked_swap_cases() {
        assert_eq!(masked_swap(5, 9, 5, u64::MAX, u64::MAX), 9);
        assert_eq!(masked_swap(5, 9, 6, u64::MAX, u64::MAX), 5);
        // Compare nothing, swap a byte: an unconditional store of that byte.
        assert_eq!(
            masked_swap(0x1122_3344, 0xaaaa_aaaa, 0, 0xff00, 0),
            0x1122_aa44
        );
        assert_eq!(
            masked_swap(0x1122_3344, 0xaaaa_aaaa, 0x0000_0044, 0xff00, 0xff),
            0x1122_aa44
        );
        assert_eq!(
            masked_swap(0x1122_3344, 0xaaaa_aaaa, 0x0000_0045, 0xff00, 0xff),
            0x1122_3344
        );
    }
}
