//! Every access the engine makes to memory that somebody else may be writing: rings, doorbells, CQs, error words, payloads.
//! Rules: a word is read once and never re-read after it was checked; nothing read here is trusted; each access is one
//! machine access (a relaxed, acquire or release atomic), so a racing GPU, thread or process can at worst give old bytes.

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// A pointer to memory shared with a device, another process or other threads.
///
/// It is plain data: `Copy`, `Send` and `Sync`. Whoever puts it into a configuration promises (in an `unsafe` call such as
/// [`Hca::create_qp`](crate::Hca::create_qp)) that the memory is mapped, large enough and stays so while it is in use.
#[repr(transparent)]
pub struct Shared<T>(NonNull<T>);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}
impl<T> PartialEq for Shared<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl<T> Eq for Shared<T> {}
impl<T> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

// SAFETY: a `Shared` is an address. Every dereference goes through this module's atomic accesses or through the documented
// copies of `copy.rs`, which are made for memory that others write at the same time.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as for `Send`: no access through `&Shared` is anything but an atomic or a documented racy copy.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Wraps a non-null pointer.
    pub const fn new(ptr: NonNull<T>) -> Self {
        Self(ptr)
    }

    /// Wraps a raw pointer; `None` if it is null.
    pub const fn from_ptr(ptr: *mut T) -> Option<Self> {
        match NonNull::new(ptr) {
            Some(p) => Some(Self(p)),
            None => None,
        }
    }

    /// The pointer.
    pub const fn as_ptr(self) -> *mut T {
        self.0.as_ptr()
    }

    /// The address, for printing and alignment checks.
    pub fn addr(self) -> usize {
        self.0.as_ptr().addr()
    }

    /// Is the address a multiple of `align` (a power of two)?
    pub fn is_aligned_to(self, align: usize) -> bool {
        self.addr() & (align - 1) == 0
    }

    /// The same address seen as another type.
    pub const fn cast<U>(self) -> Shared<U> {
        Shared(self.0.cast())
    }

    /// The address `bytes` further on.
    ///
    /// # Safety
    /// The result must lie inside (or one past the end of) the memory this pointer belongs to.
    pub const unsafe fn byte_add(self, bytes: usize) -> Self {
        // SAFETY: the caller promises the result stays within the same memory.
        Self(unsafe { self.0.byte_add(bytes) })
    }
}

macro_rules! words {
    ($($ty:ty, $atomic:ty;)*) => {$(
        impl Shared<$ty> {
            /// The word as an atomic.
            ///
            /// # Safety
            /// The memory is mapped for `'a`, aligned to the word, and accessed by others only with whole-word accesses.
            #[inline(always)]
            pub unsafe fn atomic<'a>(self) -> &'a $atomic {
                // SAFETY: the caller promises mapped and aligned memory; others access it word by word.
                unsafe { <$atomic>::from_ptr(self.0.as_ptr()) }
            }

            /// One relaxed load.
            ///
            /// # Safety
            /// As for [`Self::atomic`].
            #[inline(always)]
            pub unsafe fn load(self) -> $ty {
                // SAFETY: the caller's promise.
                unsafe { self.atomic() }.load(Ordering::Relaxed)
            }

            /// One acquire load: what was written before the matching release is visible after it.
            ///
            /// # Safety
            /// As for [`Self::atomic`].
            #[inline(always)]
            pub unsafe fn load_acquire(self) -> $ty {
                // SAFETY: the caller's promise.
                unsafe { self.atomic() }.load(Ordering::Acquire)
            }

            /// One relaxed store.
            ///
            /// # Safety
            /// As for [`Self::atomic`].
            #[inline(always)]
            pub unsafe fn store(self, value: $ty) {
                // SAFETY: the caller's promise.
                unsafe { self.atomic() }.store(value, Ordering::Relaxed);
            }

            /// One release store: everything this thread wrote before is visible to whoever acquires it.
            ///
            /// # Safety
            /// As for [`Self::atomic`].
            #[inline(always)]
            pub unsafe fn store_release(self, value: $ty) {
                // SAFETY: the caller's promise.
                unsafe { self.atomic() }.store(value, Ordering::Release);
            }
        }
    )*};
}
words! {
    u8, AtomicU8;
    u32, AtomicU32;
    u64, AtomicU64;
}

impl Shared<u64> {
    /// The word `index` words further on.
    ///
    /// # Safety
    /// That word must lie inside the memory this pointer belongs to.
    #[inline(always)]
    pub unsafe fn word(self, index: usize) -> Self {
        // SAFETY: the caller promises that the word is inside the memory.
        Self(unsafe { self.0.add(index) })
    }
}

/// Sets `words` 64-bit words to `value`, each with a relaxed store.
///
/// # Safety
/// The words are mapped, 8-byte aligned, and nobody uses them as anything but words.
pub(crate) unsafe fn fill_words(at: Shared<u64>, words: usize, value: u64) {
    for i in 0..words {
        // SAFETY: `i < words`, which the caller promises are mapped and aligned.
        unsafe { at.word(i).store(value) };
    }
}

/// Asks for the cache line at `ptr` to be brought near; never faults, whatever the address.
#[inline(always)]
pub(crate) fn prefetch<T>(ptr: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: prefetching has no architectural effect and cannot fault.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(ptr.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = ptr;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_and_written_whole() {
        let mut store = [0u64; 4];
        let p = Shared::from_ptr(store.as_mut_ptr()).expect("not null");
        // SAFETY: `store` outlives the accesses, is aligned, and nobody else uses it meanwhile.
        unsafe {
            fill_words(p, 4, 7);
            p.word(2).store_release(u64::MAX);
            assert_eq!(p.word(1).load(), 7);
            assert_eq!(p.word(2).load_acquire(), u64::MAX);
            assert_eq!(p.cast::<u32>().byte_add(16).load(), u32::MAX);
        }
        assert!(Shared::<u64>::from_ptr(core::ptr::null_mut()).is_none());
    }
}
