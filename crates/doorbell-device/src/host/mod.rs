//! The host as a GPU: blocks of threads on OS threads, running the same kernel source.
//!
//! A [`HostGrid`] is what the threads of one launch share; each OS thread takes its [`HostThread`], whose reference is an [`Arch`].
//! With `LANES` = 1 every thread is its own warp (speed); with 32, warps are emulated, to test the code that lanes share.
//! Addresses in queues and parameters are ordinary pointers; whoever fills them in has exposed their provenance.

mod block;
mod warp;

use core::cell::Cell;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use std::vec::Vec;

use doorbell_wire::Chunk;

use crate::arch::{Arch, At, Group, Order};
use block::Block;
use warp::Warp;

/// What the launcher lets the threads call.
#[derive(Clone, Default)]
pub struct Hooks {
    /// Called by every spin, to drive an engine that has no thread of its own. Must return soon.
    pub relax: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Set by the launcher to give the kernel up: waits end with [`crate::Error::ABORTED`], barriers open.
    pub abort: Arc<AtomicBool>,
    /// Called by a thread whose wait gave up at its deadline, after it noted what it waited for.
    pub gave_up: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks")
            .field("relax", &self.relax.is_some())
            .field("abort", &self.abort)
            .finish()
    }
}

/// What the threads of one launch share.
#[derive(Debug)]
pub struct HostGrid<const LANES: usize> {
    blocks: u32,
    threads: u32,
    hooks: Hooks,
    block: Vec<Block>,
    warps: Vec<Warp>,
}

impl<const LANES: usize> HostGrid<LANES> {
    /// A grid of `blocks` blocks of `threads` threads. Every thread must be taken once ([`HostGrid::thread`]): barriers wait for it.
    ///
    /// # Panics
    /// If a dimension is 0, or `LANES` is not from 1 to 32.
    pub fn new(blocks: u32, threads: u32, hooks: Hooks) -> Arc<Self> {
        assert!(
            blocks > 0 && threads > 0,
            "a grid of {blocks} blocks of {threads} threads is empty"
        );
        const { assert!(LANES >= 1 && LANES <= 32, "a warp has 1 to 32 lanes") };
        let warps = threads.div_ceil(LANES as u32);
        Arc::new(Self {
            blocks,
            threads,
            block: (0..blocks).map(|_| Block::new(threads)).collect(),
            warps: (0..blocks * warps)
                .map(|w| Warp::new((threads - (w % warps) * LANES as u32).min(LANES as u32)))
                .collect(),
            hooks,
        })
    }

    /// The thread `thread` of block `block`; its drop ends it.
    ///
    /// # Panics
    /// If there is no such thread.
    pub fn thread(self: &Arc<Self>, block: u32, thread: u32) -> HostThread<LANES> {
        assert!(
            block < self.blocks && thread < self.threads,
            "no thread {thread} of block {block} in a grid of {} x {}",
            self.blocks,
            self.threads
        );
        HostThread {
            grid: Arc::clone(self),
            block,
            thread,
            spins: Cell::new(0),
        }
    }

    /// Blocks in the grid.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Threads in a block.
    pub fn threads(&self) -> u32 {
        self.threads
    }
}

/// One GPU thread, run by the OS thread that holds it. Its reference is the [`Arch`].
#[derive(Debug)]
pub struct HostThread<const LANES: usize> {
    grid: Arc<HostGrid<LANES>>,
    block: u32,
    thread: u32,
    spins: Cell<u32>,
}

impl<const LANES: usize> HostThread<LANES> {
    fn warp(&self) -> &Warp {
        let warps = self.grid.threads.div_ceil(LANES as u32);
        &self.grid.warps[(self.block * warps + self.thread / LANES as u32) as usize]
    }

    fn lane(&self) -> u32 {
        self.thread % LANES as u32
    }

    /// The value that the lane of rank `rank` passes.
    #[inline(always)]
    fn shfl64(&self, g: Group, v: u64, rank: u32) -> u64 {
        if LANES == 1 || g.size == 1 {
            v
        } else {
            self.warp().exchange(self.lane(), g, v, rank)
        }
    }

    fn abort(&self) -> &AtomicBool {
        &self.grid.hooks.abort
    }
}

impl<const LANES: usize> Drop for HostThread<LANES> {
    fn drop(&mut self) {
        if LANES > 1 {
            HostThread::warp(self).exit(self.lane());
        }
        self.grid.block[self.block as usize].exit();
    }
}

/// A kernel built for the host, in both shapes.
#[derive(Clone, Copy)]
pub struct HostKernel {
    /// Name of the PTX entry that has the same source.
    pub name: &'static str,
    /// One lane a warp. The pointer is to the kernel's parameters.
    pub fast: unsafe fn(&HostThread<1>, *const u8),
    /// 32 emulated lanes a warp.
    pub warp: unsafe fn(&HostThread<32>, *const u8),
}

impl fmt::Debug for HostKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostKernel")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Nanoseconds since the first call in this process: [`Arch::clock_ns`] of the host, monotonic.
pub fn clock_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

#[inline(always)]
const fn rmw(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcqRel => Ordering::AcqRel,
        Order::SeqCst => Ordering::SeqCst,
    }
}

#[inline(always)]
const fn on_load(order: Order) -> Ordering {
    match order {
        Order::Relaxed | Order::Release => Ordering::Relaxed,
        Order::Acquire | Order::AcqRel | Order::SeqCst => Ordering::Acquire,
    }
}

#[inline(always)]
const fn on_store(order: Order) -> Ordering {
    match order {
        Order::Relaxed | Order::Acquire => Ordering::Relaxed,
        Order::Release | Order::AcqRel | Order::SeqCst => Ordering::Release,
    }
}

/// The word at `p` as an atomic.
///
/// # Safety
/// `p` is valid and aligned for `'a`, and used only through atomics meanwhile ([`Arch`]'s contract).
#[inline(always)]
unsafe fn word64<'a>(p: *const u64) -> &'a AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(p.cast_mut()) }
}

/// As [`word64`].
///
/// # Safety
/// As [`word64`].
#[inline(always)]
unsafe fn word32<'a>(p: *const u32) -> &'a AtomicU32 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU32::from_ptr(p.cast_mut()) }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block forwards the contract of the trait's memory operations"
)]
impl<const LANES: usize> Arch for &HostThread<LANES> {
    const LANES: u32 = LANES as u32;

    #[inline(always)]
    fn thread(self) -> u32 {
        self.thread
    }
    #[inline(always)]
    fn threads(self) -> u32 {
        self.grid.threads
    }
    #[inline(always)]
    fn block(self) -> u32 {
        self.block
    }
    #[inline(always)]
    fn blocks(self) -> u32 {
        self.grid.blocks
    }

    #[inline(always)]
    unsafe fn load8(self, p: *const u8) -> u8 {
        unsafe { AtomicU8::from_ptr(p.cast_mut()) }.load(Ordering::Relaxed)
    }
    #[inline(always)]
    unsafe fn store8(self, p: *mut u8, v: u8) {
        unsafe { AtomicU8::from_ptr(p) }.store(v, Ordering::Relaxed);
    }
    #[inline(always)]
    unsafe fn load32(self, p: *const u32, at: At) -> u32 {
        unsafe { word32(p) }.load(on_load(at.order))
    }
    #[inline(always)]
    unsafe fn load64(self, p: *const u64, at: At) -> u64 {
        unsafe { word64(p) }.load(on_load(at.order))
    }
    #[inline(always)]
    unsafe fn store32(self, p: *mut u32, v: u32, at: At) {
        unsafe { word32(p) }.store(v, on_store(at.order));
    }
    #[inline(always)]
    unsafe fn store64(self, p: *mut u64, v: u64, at: At) {
        unsafe { word64(p) }.store(v, on_store(at.order));
    }
    #[inline(always)]
    unsafe fn add64(self, p: *mut u64, v: u64, at: At) -> u64 {
        unsafe { word64(p) }.fetch_add(v, rmw(at.order))
    }
    #[inline(always)]
    unsafe fn max64(self, p: *mut u64, v: u64, at: At) -> u64 {
        unsafe { word64(p) }.fetch_max(v, rmw(at.order))
    }
    #[inline(always)]
    unsafe fn or64(self, p: *mut u64, v: u64, at: At) -> u64 {
        unsafe { word64(p) }.fetch_or(v, rmw(at.order))
    }
    #[inline(always)]
    unsafe fn exch64(self, p: *mut u64, v: u64, at: At) -> u64 {
        unsafe { word64(p) }.swap(v, rmw(at.order))
    }
    #[inline(always)]
    unsafe fn cas64(self, p: *mut u64, expect: u64, new: u64, at: At) -> u64 {
        match unsafe { word64(p) }.compare_exchange(expect, new, rmw(at.order), on_load(at.order)) {
            Ok(v) | Err(v) => v,
        }
    }
    #[inline(always)]
    unsafe fn cas32(self, p: *mut u32, expect: u32, new: u32, at: At) -> u32 {
        match unsafe { word32(p) }.compare_exchange(expect, new, rmw(at.order), on_load(at.order)) {
            Ok(v) | Err(v) => v,
        }
    }
    #[inline(always)]
    fn fence(self, at: At) {
        if at.order != Order::Relaxed {
            fence(rmw(at.order));
        }
    }

    #[inline(always)]
    unsafe fn load_const32(self, p: *const u32) -> u32 {
        unsafe { p.read() }
    }
    #[inline(always)]
    unsafe fn load_const64(self, p: *const u64) -> u64 {
        unsafe { p.read() }
    }
    #[inline(always)]
    unsafe fn load_own64(self, p: *const u64) -> u64 {
        unsafe { word64(p) }.load(Ordering::Relaxed)
    }
    #[inline(always)]
    unsafe fn store_own64(self, p: *mut u64, v: u64) {
        unsafe { word64(p) }.store(v, Ordering::Relaxed);
    }
    /// Two 8-byte stores: an engine in another thread reads the ring the same way, so neither tears nor races. The second is a release,
    /// so that whoever sees it sees the first: a 16-byte store of a GPU arrives whole.
    #[inline(always)]
    unsafe fn store_chunk(self, p: *mut Chunk, c: Chunk) {
        let p = p.cast::<u64>();
        unsafe { word64(p) }.store(c.0[0], Ordering::Relaxed);
        unsafe { word64(p.add(1)) }.store(c.0[1], Ordering::Release);
    }
    #[inline(always)]
    unsafe fn store_mmio64(self, p: *mut u64, v: u64) {
        unsafe { word64(p) }.store(v, Ordering::Relaxed);
    }

    #[inline(always)]
    fn clock_ns(self) -> u64 {
        clock_ns()
    }
    /// Drives the hook if there is one; spins a little; gives the CPU away now and then, since there may be more threads than CPUs.
    #[inline]
    fn relax(self) {
        const SPINS_BEFORE_YIELD: u32 = 32;
        if let Some(hook) = &self.grid.hooks.relax {
            hook();
        }
        let n = self.spins.get().wrapping_add(1);
        self.spins.set(n);
        if LANES > 1 || n.is_multiple_of(SPINS_BEFORE_YIELD) {
            std::thread::yield_now();
        } else {
            core::hint::spin_loop();
        }
    }
    #[inline(always)]
    fn aborted(self) -> bool {
        self.abort().load(Ordering::Relaxed)
    }

    fn gave_up(self) {
        if let Some(hook) = &self.grid.hooks.gave_up {
            hook();
        }
    }

    #[inline(always)]
    fn warp(self) -> Group {
        if LANES == 1 {
            Group::alone()
        } else {
            HostThread::warp(self).whole(self.lane())
        }
    }
    #[inline(always)]
    fn group(self, key: u64) -> Group {
        if LANES == 1 {
            Group::alone()
        } else {
            HostThread::warp(self).group(self.lane(), key)
        }
    }
    #[inline(always)]
    fn broadcast64(self, g: Group, v: u64) -> u64 {
        self.shfl64(g, v, 0)
    }
    #[inline(always)]
    fn shfl_xor64(self, g: Group, v: u64, xor: u32) -> u64 {
        self.shfl64(g, v, g.rank ^ xor)
    }
    #[inline(always)]
    fn sync(self, g: Group) {
        if LANES > 1 && g.size > 1 {
            HostThread::warp(self).exchange(self.lane(), g, 0, 0);
        }
    }
    fn block_sync(self) {
        self.grid.block[self.block as usize].sync(self.abort());
    }
    fn block_broadcast64(self, v: u64) -> u64 {
        self.grid.block[self.block as usize].broadcast(self.thread == 0, v, self.abort())
    }
}

#[cfg(test)]
mod tests;
