//! Work that is taken back from a kernel which does not come to run.
//!
//! A launch starts when the multiprocessors have room, and kernels that fill them may be waiting for the very work of this one. So the host
//! keeps the right to do the work itself: it says so in a word, and then looks whether the kernel has started. The kernel says that it has
//! started, and then looks at that word. Each writes before it looks, so at least one of them sees the other, and the work is never done twice:
//!
//! - the kernel sees that it was cancelled: it does nothing;
//! - the host sees no start: the kernel is certain to see the word, whenever it starts;
//! - the host sees a start: it waits for the answer, which comes as the kernel runs (soon, unless another process has its turn on the GPU).
//!
//! A kernel that has started may stay for more work, which the host [posts](take). When it [leaves](leave) it says so behind all else that it does, so nobody has to
//! decide whose a post is that comes as it leaves: the host sees that it has left and what it has done, and does the rest itself.
//!
//! Over PCIe this holds because a GPU's read of host memory pushes its earlier writes ahead of it.

use doorbell_wire::Chunk;

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

/// Looks once whether work was posted: sixteen bytes, `is_it` by the last eight of them. What the host wrote before it is visible behind this.
///
/// The host's part: write the work, store the first eight bytes, store the last by a release.
///
/// # Safety
/// As for [`Arch::load_unit`].
#[inline(always)]
pub unsafe fn take<A: Arch>(
    a: A,
    post: *const Chunk,
    is_it: impl FnOnce(u64) -> bool,
) -> Option<Chunk> {
    // SAFETY: the caller's promise.
    let unit = unsafe { a.load_unit(post) };
    if !is_it(unit.0[1]) {
        return None;
    }
    a.fence(sites::SIGNAL_FENCE);
    Some(unit)
}

/// The last that a kernel does: says that it takes no more work, by a word that is not 0. All that it did comes before.
///
/// The host's part: load the word by an acquire, and behind that look at what was done; then all is the host's again.
///
/// # Safety
/// As for [`Arch::store64`].
#[inline(always)]
pub unsafe fn leave<A: Arch>(a: A, left: *mut u64, word: u64) {
    // SAFETY: the caller's promise.
    unsafe { a.store64(left, word, sites::LEAVE_STORE) };
}
