//! Copies between payload buffers that others may be writing: registered memory has no Rust references to it, by contract.
//! What is promised: bytes land in ascending order up to 64 bytes, and above that the last eight come last; an aligned 8-byte word of an aligned, whole-word copy is stored whole;
//! nothing outside `[dst, dst + len)` is written. A racing writer of the source gives old or new bytes, never more.

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// Copies `len` bytes.
///
/// These are ordinary copies, not atomic ones: the memory is foreign (GPU, other processes, raw pointers), reached only through
/// pointers, so the compiler can assume nothing about it across this call but that the bytes move. Words of 8 bytes go through atomics.
///
/// # Safety
/// `src` is valid for reading and `dst` for writing `len` bytes. They may overlap (the result is then that of a forward copy up to 64
/// bytes, of `memmove` above).
#[inline(always)]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if len == 8 {
        // SAFETY: eight bytes on both sides, by the contract.
        unsafe { store8(dst, load8(src)) };
    } else if len <= 64 {
        // SAFETY: the contract.
        unsafe { small(dst, src, len) };
    } else {
        // SAFETY: the contract; the last eight bytes are kept back.
        unsafe {
            let last = load8(src.add(len - 8));
            core::ptr::copy(src, dst, len - 8);
            // Pollers look at the end of a message (perftest, UCX), and memmove writes tails first.
            fence(Ordering::Release);
            store8(dst.add(len - 8), last);
        }
    }
}

/// Writes our own bytes, as [`copy`] would.
///
/// # Safety
/// `dst` is valid for writing that many bytes, none of which are `bytes`.
#[inline(always)]
pub(crate) unsafe fn write(mut dst: *mut u8, bytes: &[u8]) {
    if bytes.len() > 64 {
        // SAFETY: the contract.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), dst, bytes.len()) };
        return;
    }
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        // SAFETY: the contract; the pointer stays inside or one past the end.
        unsafe {
            store8(dst, u64::from_ne_bytes(*word));
            dst = dst.add(8);
        }
    }
    for byte in rest {
        // SAFETY: as above.
        unsafe {
            dst.write(*byte);
            dst = dst.add(1);
        }
    }
}

/// Loads eight bytes, whole if aligned.
///
/// # Safety
/// `src` is valid for reading eight bytes, and belongs to shared memory (not to a reference of ours).
#[inline(always)]
pub(crate) unsafe fn load8(src: *const u8) -> u64 {
    if src.addr() & 7 == 0 {
        // SAFETY: valid and aligned; others access it with whole words or as bytes that may tear, which is theirs to order.
        unsafe { AtomicU64::from_ptr(src.cast_mut().cast()) }.load(Ordering::Relaxed)
    } else {
        // SAFETY: valid for eight bytes.
        unsafe { src.cast::<u64>().read_unaligned() }
    }
}

/// Stores eight bytes, whole if aligned.
///
/// # Safety
/// `dst` is valid for writing eight bytes.
#[inline(always)]
pub(crate) unsafe fn store8(dst: *mut u8, value: u64) {
    if dst.addr() & 7 == 0 {
        // SAFETY: valid and aligned.
        unsafe { AtomicU64::from_ptr(dst.cast()) }.store(value, Ordering::Relaxed);
    } else {
        // SAFETY: valid for eight bytes.
        unsafe { dst.cast::<u64>().write_unaligned(value) };
    }
}

/// Up to 64 bytes, in ascending order: a flag in the last word is never ahead of the words before it (x86 stores stay in order).
///
/// # Safety
/// As for [`copy`], `len <= 64`.
#[inline]
unsafe fn small(mut dst: *mut u8, mut src: *const u8, mut len: usize) {
    // SAFETY: each step moves bytes below `len`, which the caller promises; the pointers stay inside or one past the end.
    unsafe {
        while len >= 8 {
            store8(dst, load8(src));
            (dst, src, len) = (dst.add(8), src.add(8), len - 8);
        }
        if len & 4 != 0 {
            dst.cast::<u32>()
                .write_unaligned(src.cast::<u32>().read_unaligned());
            (dst, src) = (dst.add(4), src.add(4));
        }
        if len & 2 != 0 {
            dst.cast::<u16>()
                .write_unaligned(src.cast::<u16>().read_unaligned());
            (dst, src) = (dst.add(2), src.add(2));
        }
        if len & 1 != 0 {
            dst.write(src.read());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_bytes_too() {
        for len in 0..80 {
            for to in [0, 3, 8] {
                let src: Vec<u8> = (0..len).map(|i| i as u8 + 1).collect();
                let mut dst = vec![0xaau8; 96];
                // SAFETY: `to + len` stays below 96.
                unsafe { write(dst.as_mut_ptr().add(to), &src) };
                assert_eq!(dst[to..to + len], src[..]);
                assert!(dst[..to].iter().chain(&dst[to + len..]).all(|b| *b == 0xaa));
            }
        }
    }

    #[test]
    fn every_length_and_alignment_moves_exactly_its_bytes() {
        let lens = if cfg!(miri) {
            vec![0, 1, 3, 7, 8, 9, 15, 24, 64, 65]
        } else {
            (0..200).collect()
        };
        for len in lens {
            for (from, to) in [(0, 0), (1, 0), (0, 3), (5, 2), (8, 16)] {
                let mut src: Vec<u8> = (0..256).map(|i| (i * 7 + 1) as u8).collect();
                let mut dst = vec![0xaau8; 256];
                // SAFETY: `from + len` and `to + len` stay below 256.
                unsafe { copy(dst.as_mut_ptr().add(to), src.as_mut_ptr().add(from), len) };
                assert_eq!(dst[to..to + len], src[from..from + len]);
                assert!(
                    dst[..to].iter().chain(&dst[to + len..]).all(|b| *b == 0xaa),
                    "{len} bytes: canaries"
                );
            }
        }
    }
}
