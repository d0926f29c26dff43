//! What a machine must offer to run the device code: scoped memory operations, lanes that work together, a clock.
//!
//! Three implementations: PTX (`nvptx.rs`), OS threads ([`crate::host`]), and a model checker's words (`tests/`). Every ordered
//! access takes an [`At`] from the table in [`crate::sites`], so that a test can weaken one of them and show that it is needed.

use doorbell_wire::Chunk;

use crate::sites;

/// Memory order of one access, as in C++ and PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Atomic, orders nothing else.
    Relaxed,
    /// What follows is not seen earlier.
    Acquire,
    /// What precedes is seen by whoever acquires.
    Release,
    /// Both.
    AcqRel,
    /// Both, and of two such fences in two threads one comes first: a store before it is seen by the loads behind the other.
    SeqCst,
}

/// Who takes part in an ordered access: PTX's scopes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemScope {
    /// Threads of one block (`.cta`).
    Block,
    /// Threads of one GPU (`.gpu`).
    Gpu,
    /// Everyone, CPUs and devices too (`.sys`).
    Sys,
}

/// One ordered access of the source: which, how strong, among whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Number of the site in [`crate::sites::ALL`].
    pub site: u8,
    /// Its memory order.
    pub order: Order,
    /// Its scope.
    pub scope: MemScope,
}

/// Lanes of one warp that are converged and hold the same key.
///
/// Valid until the lane calls [`Arch::group`] again. All lanes of a group make the same collective calls in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Lanes in it, one bit each.
    pub mask: u32,
    /// This lane's position among them, from 0.
    pub rank: u32,
    /// How many they are.
    pub size: u32,
    /// Private to the implementation.
    pub tag: u32,
}

impl Group {
    /// Whether this lane speaks for the group: the one with rank 0.
    #[inline(always)]
    pub const fn is_leader(self) -> bool {
        self.rank == 0
    }

    /// A group of one.
    #[inline(always)]
    pub const fn alone() -> Self {
        Self {
            mask: 1,
            rank: 0,
            size: 1,
            tag: 0,
        }
    }
}

/// The machine. A value of it stands for the calling thread.
///
/// # Safety of the memory operations
/// Each takes an address that is valid and aligned for the access, in global (GPU or host) memory, for as long as the call lasts; words
/// used through one operation are not accessed otherwise by safe code at the same time.
#[allow(
    clippy::missing_safety_doc,
    reason = "one contract for all memory operations, stated on the trait"
)]
pub trait Arch: Copy {
    /// Lanes in a warp: 32 on a GPU; 1, or 32 emulated, on the host.
    const LANES: u32;

    /// This thread's index in its block.
    fn thread(self) -> u32;
    /// Threads in a block.
    fn threads(self) -> u32;
    /// This block's index.
    fn block(self) -> u32;
    /// Blocks in the grid.
    fn blocks(self) -> u32;

    /// Load of one byte of a payload ([`sites::DATA`]).
    unsafe fn load8(self, p: *const u8) -> u8;
    /// Store of one.
    unsafe fn store8(self, p: *mut u8, v: u8);
    /// Atomic load.
    unsafe fn load32(self, p: *const u32, at: At) -> u32;
    /// Atomic load.
    unsafe fn load64(self, p: *const u64, at: At) -> u64;
    /// Atomic store.
    unsafe fn store32(self, p: *mut u32, v: u32, at: At);
    /// Atomic store.
    unsafe fn store64(self, p: *mut u64, v: u64, at: At);
    /// Fetch and add.
    unsafe fn add64(self, p: *mut u64, v: u64, at: At) -> u64;
    /// Fetch and maximum.
    unsafe fn max64(self, p: *mut u64, v: u64, at: At) -> u64;
    /// Fetch and or.
    unsafe fn or64(self, p: *mut u64, v: u64, at: At) -> u64;
    /// Exchange.
    unsafe fn exch64(self, p: *mut u64, v: u64, at: At) -> u64;
    /// Compare and swap; returns what was there (success when it equals `expect`).
    unsafe fn cas64(self, p: *mut u64, expect: u64, new: u64, at: At) -> u64;
    /// Compare and swap; returns what was there.
    unsafe fn cas32(self, p: *mut u32, expect: u32, new: u32, at: At) -> u32;
    /// A fence of the site's order and scope.
    fn fence(self, at: At);

    /// Load of a word that nobody writes while the kernel runs.
    unsafe fn load_const32(self, p: *const u32) -> u32;
    /// Load of a word that nobody writes while the kernel runs.
    unsafe fn load_const64(self, p: *const u64) -> u64;
    /// Unordered load of a word that no other thread writes at the same time (exclusive queues).
    unsafe fn load_own64(self, p: *const u64) -> u64;
    /// Unordered store of a word that no other thread touches at the same time (exclusive queues).
    unsafe fn store_own64(self, p: *mut u64, v: u64);
    /// One 16-byte piece of a WQE; ordered by whatever publishes the WQE.
    unsafe fn store_chunk(self, p: *mut Chunk, c: Chunk);
    /// A doorbell register of a device: one 64-bit store, never merged or split.
    unsafe fn store_mmio64(self, p: *mut u64, v: u64);
    /// Sixteen bytes that others may be writing, whose last word says whether they have arrived: who sees that word sees the rest.
    #[inline(always)]
    unsafe fn load_unit(self, p: *const Chunk) -> Chunk {
        // SAFETY: the caller's promise; the word that is written last is read first.
        unsafe {
            let last = self.load64(p.cast::<u64>().add(1), sites::SIGNAL_LOAD);
            Chunk([self.load64(p.cast(), sites::DATA), last])
        }
    }
    /// Stores sixteen bytes so that who sees their last word sees the rest.
    #[inline(always)]
    unsafe fn store_unit(self, p: *mut Chunk, c: Chunk) {
        // SAFETY: the caller's promise.
        unsafe {
            self.store64(p.cast(), c.0[0], sites::DATA);
            self.store64(p.cast::<u64>().add(1), c.0[1], sites::REPORT_STORE);
        }
    }

    /// Nanoseconds of a monotonic clock, the same for all threads of the machine.
    fn clock_ns(self) -> u64;
    /// Called by every spin: yields to whoever must act for the spin to end.
    fn relax(self);
    /// Whether the host gave the kernel up (host threads; a GPU learns it from the QP's error word).
    #[inline(always)]
    fn aborted(self) -> bool {
        false
    }

    /// A wait gave up at its deadline: the host may look why (host threads).
    #[inline(always)]
    fn gave_up(self) {}

    /// All lanes of this warp that have not ended, which all call it; orders their memory accesses among them. Ends the lane's
    /// previous group.
    fn warp(self) -> Group;
    /// The converged lanes of this warp with the same key. Ends the lane's previous group.
    fn group(self, key: u64) -> Group;
    /// The value that the leader passes.
    fn broadcast64(self, g: Group, v: u64) -> u64;
    /// The value of the lane whose rank is this one's `^ xor`; only in a group of a whole warp.
    fn shfl_xor64(self, g: Group, v: u64, xor: u32) -> u64;
    /// Waits for the group; orders the lanes' memory accesses among them.
    fn sync(self, g: Group);
    /// Waits for the block; orders its threads' memory accesses among them. All threads that have not ended must call it.
    fn block_sync(self);
    /// Thread 0's value, for all threads of the block; a [`Arch::block_sync`] too.
    fn block_broadcast64(self, v: u64) -> u64;
    /// The same for sixteen bytes.
    #[inline(always)]
    fn block_broadcast_unit(self, v: Chunk) -> Chunk {
        let Chunk([first, last]) = v;
        Chunk([self.block_broadcast64(first), self.block_broadcast64(last)])
    }
}
