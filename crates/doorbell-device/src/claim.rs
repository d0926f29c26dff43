//! Work that is taken back from a kernel which does not come to run.
//!
//! A launch starts when the multiprocessors have room, and kernels that fill them may be waiting for the very work of this one. So the host
//! keeps the right to do the work itself: it says so in a word, and then looks whether the kernel has started. The kernel says that it has
//! started, and then looks at that word. Each writes before it looks, so at least one of them sees the other, and the work is never done twice:
//!
//! - the kernel sees that it was cancelled: it does nothing;
//! - the host sees no start: the kernel is certain to see the word, whenever it starts;
//! - the host sees a start: it waits for the answer, which comes soon, since the kernel runs.
//!
//! Over PCIe this holds because a GPU's read of host memory pushes its earlier writes ahead of it.

use crate::arch::Arch;
use crate::sites;

/// Says that the kernel has started; `false` if its work was taken back. For one thread of the kernel, before it does anything.
///
/// The host's part: store 1 to `cancelled`, a sequentially consistent fence, load `started`.
///
/// # Safety
/// Both words are valid and aligned, in memory that the host reads and writes, and accessed as atomics; `started` was 0.
#[inline(always)]
pub unsafe fn claim<A: Arch>(a: A, started: *mut u64, cancelled: *const u64) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        a.store64(started, 1, sites::DATA);
        a.fence(sites::CLAIM_FENCE);
        a.load64(cancelled, sites::DATA) == 0
    }
}
