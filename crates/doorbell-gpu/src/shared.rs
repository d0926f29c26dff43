//! Reading and writing host memory that kernels and engines touch at the same time.
//!
//! A plain `memcpy` there would be a data race; these use relaxed atomics (words where aligned, bytes at the edges),
//! so a concurrent writer gives old or new words, never undefined behaviour. No ordering is implied.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// Splits `len` bytes at `ptr` into a head of bytes, a body of aligned words and a tail of bytes.
fn split(ptr: *const u8, len: usize) -> (usize, usize) {
    let head = (ptr.addr().wrapping_neg() & 7).min(len);
    (head, (len - head) / 8)
}

/// Copies `dst.len()` bytes out of shared memory.
///
/// # Safety
/// `src` is valid for reads of `dst.len()` bytes, and every concurrent access to them is atomic, by a device, or by
/// another process.
pub(crate) unsafe fn load(src: *const u8, dst: &mut [u8]) {
    let (head, words) = split(src, dst.len());
    // SAFETY: the caller promises the byte.
    let byte = |i: usize| unsafe { (*src.add(i).cast::<AtomicU8>()).load(Relaxed) };
    // SAFETY: the caller promises the bytes, `split` their alignment.
    let word = |i: usize| unsafe { (*src.add(i).cast::<AtomicU64>()).load(Relaxed) };
    let (first, rest) = dst.split_at_mut(head);
    let (body, tail) = rest.split_at_mut(words * 8);
    for (i, b) in first.iter_mut().enumerate() {
        *b = byte(i);
    }
    for (i, w) in body.chunks_exact_mut(8).enumerate() {
        w.copy_from_slice(&word(head + i * 8).to_ne_bytes());
    }
    for (i, b) in tail.iter_mut().enumerate() {
        *b = byte(head + words * 8 + i);
    }
}

/// Copies `src` into shared memory.
///
/// # Safety
/// `dst` is valid for writes of `src.len()` bytes, and every concurrent access to them is atomic, by a device, or by
/// another process.
pub(crate) unsafe fn store(dst: *mut u8, src: &[u8]) {
    let (head, words) = split(dst, src.len());
    // SAFETY: the caller promises the byte.
    let byte = |i: usize, b: u8| unsafe { (*dst.add(i).cast::<AtomicU8>()).store(b, Relaxed) };
    // SAFETY: the caller promises the bytes, `split` their alignment.
    let word = |i: usize, w: u64| unsafe { (*dst.add(i).cast::<AtomicU64>()).store(w, Relaxed) };
    let (first, rest) = src.split_at(head);
    let (body, tail) = rest.split_at(words * 8);
    for (i, &b) in first.iter().enumerate() {
        byte(i, b);
    }
    for (i, w) in body.chunks_exact(8).enumerate() {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(w);
        word(head + i * 8, u64::from_ne_bytes(bytes));
    }
    for (i, &b) in tail.iter().enumerate() {
        byte(head + words * 8 + i, b);
    }
}

/// Sets `len` bytes of shared memory to `value`.
///
/// # Safety
/// As for [`store`].
pub(crate) unsafe fn fill(dst: *mut u8, value: u8, len: usize) {
    let (head, words) = split(dst, len);
    let pattern = u64::from_ne_bytes([value; 8]);
    for i in (0..head).chain(head + words * 8..len) {
        // SAFETY: the caller promises the byte.
        unsafe { (*dst.add(i).cast::<AtomicU8>()).store(value, Relaxed) };
    }
    for i in 0..words {
        // SAFETY: the caller promises the bytes, `split` the alignment.
        unsafe { (*dst.add(head + i * 8).cast::<AtomicU64>()).store(pattern, Relaxed) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_copies_exactly_its_bytes() {
        for start in 0..9 {
            for len in 0..40 {
                let mut memory = [0u64; 8];
                let base = memory.as_mut_ptr().cast::<u8>();
                let data: Vec<u8> = (0..len as u8).map(|i| i ^ 0xa5).collect();
                let mut back = vec![0; len];
                let mut all = [0u8; 64];
                // SAFETY: start + len <= 48 < 64, one thread.
                unsafe {
                    fill(base, 0xee, 64);
                    store(base.add(start), &data);
                    load(base.add(start), &mut back);
                    load(base, &mut all);
                }
                assert_eq!(back, data);
                assert!(
                    all[..start]
                        .iter()
                        .chain(&all[start + len..])
                        .all(|&b| b == 0xee)
                );
                // SAFETY: as above.
                unsafe {
                    fill(base.add(start), 0x11, len);
                    load(base, &mut all);
                }
                for (i, &b) in all.iter().enumerate() {
                    let inside = i >= start && i < start + len;
                    assert_eq!(b, if inside { 0x11 } else { 0xee });
                }
            }
        }
    }
}
