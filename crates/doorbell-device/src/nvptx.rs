//! The GPU itself: PTX instructions, for rustc's `nvptx64-nvidia-cuda` target.
//!
//! Two rules that rustc 1.95 forces (its LLVM is 22.1): every atomic is inline assembly with its order and scope spelt out, since
//! read-modify-writes through `core::sync::atomic` lose both; and everything that lanes do together goes through LLVM's intrinsics, which are marked
//! convergent, in functions that are always inlined, since neither `asm!` nor Rust functions are.
//!
//! All addresses are in global memory (GPU memory, or host memory that the GPU maps); never in shared or local memory.

use core::arch::{asm, global_asm};

use doorbell_wire::Chunk;

use crate::arch::{Arch, At, Group, MemScope, Order};

/// The calling GPU thread.
#[derive(Clone, Copy, Debug)]
pub struct Gpu;

mod llvm {
    unsafe extern "C" {
        #[link_name = "llvm.nvvm.read.ptx.sreg.tid.x"]
        pub(super) safe fn tid_x() -> u32;
        #[link_name = "llvm.nvvm.read.ptx.sreg.tid.y"]
        pub(super) safe fn tid_y() -> u32;
        #[link_name = "llvm.nvvm.read.ptx.sreg.tid.z"]
        pub(super) safe fn tid_z() -> u32;
        #[link_name = "llvm.nvvm.read.ptx.sreg.ntid.x"]
        pub(super) safe fn ntid_x() -> u32;
        #[link_name = "llvm.nvvm.read.ptx.sreg.ntid.y"]
        pub(super) safe fn ntid_y() -> u32;
        #[link_name = "llvm.nvvm.read.ptx.sreg.ntid.z"]
        pub(super) safe fn ntid_z() -> u32;
        #[link_name = "llvm.nvvm.read.ptx.sreg.ctaid.x"]
        pub(super) safe fn ctaid_x() -> u32;
        #[link_name = "llvm.nvvm.read.ptx.sreg.nctaid.x"]
        pub(super) safe fn nctaid_x() -> u32;
        #[link_name = "llvm.nvvm.read.ptx.sreg.lanemask.lt"]
        pub(super) safe fn lanemask_lt() -> u32;
        #[link_name = "llvm.nvvm.activemask"]
        pub(super) fn activemask() -> u32;
        #[link_name = "llvm.nvvm.match.any.sync.i64"]
        pub(super) fn match_any_sync_i64(mask: u32, value: u64) -> u32;
        #[link_name = "llvm.nvvm.vote.ballot.sync"]
        pub(super) fn ballot_sync(mask: u32, predicate: bool) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
        pub(super) fn shfl_sync_idx_i32(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
        pub(super) fn shfl_sync_bfly_i32(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
        #[link_name = "llvm.nvvm.bar.warp.sync"]
        pub(super) fn bar_warp_sync(mask: u32);
        #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
        pub(super) fn barrier_cta_sync_aligned_all(id: u32);
    }
}

// Shared memory for `block_broadcast64` and `block_broadcast_unit`. Rust has no statics in shared memory; a module-level declaration does as well.
global_asm!(".shared .align 8 .b64 db_block_word;");
global_asm!(".shared .align 16 .b8 db_block_unit[16];");

/// One instruction `$op.<order>.<scope>.$tail`, chosen by constants.
macro_rules! by_scope {
    ($at:expr, $op:literal, $order:literal, $tail:literal, $($operands:tt)*) => {
        match $at.scope {
            MemScope::Block => asm!(concat!($op, ".", $order, ".cta", $tail), $($operands)*),
            MemScope::Gpu => asm!(concat!($op, ".", $order, ".gpu", $tail), $($operands)*),
            MemScope::Sys => asm!(concat!($op, ".", $order, ".sys", $tail), $($operands)*),
        }
    };
}

macro_rules! ld {
    ($at:expr, $tail:literal, $($operands:tt)*) => {
        match $at.order {
            Order::Acquire | Order::AcqRel | Order::SeqCst => by_scope!($at, "ld", "acquire", $tail, $($operands)*),
            Order::Relaxed | Order::Release => by_scope!($at, "ld", "relaxed", $tail, $($operands)*),
        }
    };
}

macro_rules! st {
    ($at:expr, $tail:literal, $($operands:tt)*) => {
        match $at.order {
            Order::Release | Order::AcqRel | Order::SeqCst => by_scope!($at, "st", "release", $tail, $($operands)*),
            Order::Relaxed | Order::Acquire => by_scope!($at, "st", "relaxed", $tail, $($operands)*),
        }
    };
}

macro_rules! atom {
    ($at:expr, $tail:literal, $($operands:tt)*) => {
        match $at.order {
            Order::Relaxed => by_scope!($at, "atom", "relaxed", $tail, $($operands)*),
            Order::Acquire => by_scope!($at, "atom", "acquire", $tail, $($operands)*),
            Order::Release => by_scope!($at, "atom", "release", $tail, $($operands)*),
            Order::AcqRel | Order::SeqCst => by_scope!($at, "atom", "acq_rel", $tail, $($operands)*),
        }
    };
}

#[inline(always)]
fn halves(v: u64) -> (u32, u32) {
    (v as u32, (v >> 32) as u32)
}

#[inline(always)]
fn whole(lo: u32, hi: u32) -> u64 {
    u64::from(lo) | u64::from(hi) << 32
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "every block forwards the contract of the trait's memory operations"
)]
impl Arch for Gpu {
    const LANES: u32 = 32;

    #[inline(always)]
    fn thread(self) -> u32 {
        llvm::tid_x() + llvm::ntid_x() * (llvm::tid_y() + llvm::ntid_y() * llvm::tid_z())
    }
    #[inline(always)]
    fn threads(self) -> u32 {
        llvm::ntid_x() * llvm::ntid_y() * llvm::ntid_z()
    }
    #[inline(always)]
    fn block(self) -> u32 {
        llvm::ctaid_x()
    }
    #[inline(always)]
    fn blocks(self) -> u32 {
        llvm::nctaid_x()
    }

    /// PTX lets a register be wider than what is loaded into it or stored from it.
    #[inline(always)]
    unsafe fn load8(self, p: *const u8) -> u8 {
        let v: u32;
        unsafe {
            asm!("ld.relaxed.sys.global.u8 {0}, [{1}];", out(reg32) v, in(reg64) p, options(nostack))
        };
        v as u8
    }
    #[inline(always)]
    unsafe fn store8(self, p: *mut u8, v: u8) {
        let v = u32::from(v);
        unsafe {
            asm!("st.relaxed.sys.global.u8 [{0}], {1};", in(reg64) p, in(reg32) v, options(nostack))
        };
    }
    #[inline(always)]
    unsafe fn load32(self, p: *const u32, at: At) -> u32 {
        let v: u32;
        unsafe { ld!(at, ".global.u32 {0}, [{1}];", out(reg32) v, in(reg64) p, options(nostack)) };
        v
    }
    #[inline(always)]
    unsafe fn load64(self, p: *const u64, at: At) -> u64 {
        let v: u64;
        unsafe { ld!(at, ".global.u64 {0}, [{1}];", out(reg64) v, in(reg64) p, options(nostack)) };
        v
    }
    #[inline(always)]
    unsafe fn store32(self, p: *mut u32, v: u32, at: At) {
        unsafe { st!(at, ".global.u32 [{0}], {1};", in(reg64) p, in(reg32) v, options(nostack)) };
    }
    #[inline(always)]
    unsafe fn store64(self, p: *mut u64, v: u64, at: At) {
        unsafe { st!(at, ".global.u64 [{0}], {1};", in(reg64) p, in(reg64) v, options(nostack)) };
    }
    #[inline(always)]
    unsafe fn add64(self, p: *mut u64, v: u64, at: At) -> u64 {
        let old: u64;
        unsafe {
            atom!(at, ".global.add.u64 {0}, [{1}], {2};", out(reg64) old, in(reg64) p, in(reg64) v, options(nostack))
        };
        old
    }
    #[inline(always)]
    unsafe fn max64(self, p: *mut u64, v: u64, at: At) -> u64 {
        let old: u64;
        unsafe {
            atom!(at, ".global.max.u64 {0}, [{1}], {2};", out(reg64) old, in(reg64) p, in(reg64) v, options(nostack))
        };
        old
    }
    #[inline(always)]
    unsafe fn or64(self, p: *mut u64, v: u64, at: At) -> u64 {
        let old: u64;
        unsafe {
            atom!(at, ".global.or.b64 {0}, [{1}], {2};", out(reg64) old, in(reg64) p, in(reg64) v, options(nostack))
        };
        old
    }
    #[inline(always)]
    unsafe fn exch64(self, p: *mut u64, v: u64, at: At) -> u64 {
        let old: u64;
        unsafe {
            atom!(at, ".global.exch.b64 {0}, [{1}], {2};", out(reg64) old, in(reg64) p, in(reg64) v, options(nostack))
        };
        old
    }
    #[inline(always)]
    unsafe fn cas64(self, p: *mut u64, expect: u64, new: u64, at: At) -> u64 {
        let old: u64;
        unsafe {
            atom!(
                at, ".global.cas.b64 {0}, [{1}], {2}, {3};",
                out(reg64) old, in(reg64) p, in(reg64) expect, in(reg64) new, options(nostack)
            )
        };
        old
    }
    #[inline(always)]
    unsafe fn cas32(self, p: *mut u32, expect: u32, new: u32, at: At) -> u32 {
        let old: u32;
        unsafe {
            atom!(
                at, ".global.cas.b32 {0}, [{1}], {2}, {3};",
                out(reg32) old, in(reg64) p, in(reg32) expect, in(reg32) new, options(nostack)
            )
        };
        old
    }
    /// One-way fences where the site asks for one way: `fence.release` does not wait for earlier loads, and measured a third
    /// cheaper than `fence.acq_rel`.
    #[inline(always)]
    fn fence(self, at: At) {
        unsafe {
            match at.order {
                Order::Relaxed => {}
                Order::Acquire => by_scope!(at, "fence", "acquire", ";", options(nostack)),
                Order::Release => by_scope!(at, "fence", "release", ";", options(nostack)),
                Order::AcqRel => by_scope!(at, "fence", "acq_rel", ";", options(nostack)),
                Order::SeqCst => by_scope!(at, "fence", "sc", ";", options(nostack)),
            }
        }
    }

    #[inline(always)]
    unsafe fn load_const32(self, p: *const u32) -> u32 {
        let v: u32;
        unsafe {
            asm!("ld.global.nc.u32 {0}, [{1}];", out(reg32) v, in(reg64) p, options(nostack, pure, readonly))
        };
        v
    }
    #[inline(always)]
    unsafe fn load_const64(self, p: *const u64) -> u64 {
        let v: u64;
        unsafe {
            asm!("ld.global.nc.u64 {0}, [{1}];", out(reg64) v, in(reg64) p, options(nostack, pure, readonly))
        };
        v
    }
    #[inline(always)]
    unsafe fn load_own64(self, p: *const u64) -> u64 {
        let v: u64;
        unsafe { asm!("ld.global.u64 {0}, [{1}];", out(reg64) v, in(reg64) p, options(nostack)) };
        v
    }
    #[inline(always)]
    unsafe fn store_own64(self, p: *mut u64, v: u64) {
        unsafe { asm!("st.global.u64 [{0}], {1};", in(reg64) p, in(reg64) v, options(nostack)) };
    }
    #[inline(always)]
    unsafe fn store_chunk(self, p: *mut Chunk, c: Chunk) {
        unsafe {
            asm!(
                "st.global.v2.u64 [{0}], {{{1}, {2}}};",
                in(reg64) p, in(reg64) c.0[0], in(reg64) c.0[1], options(nostack)
            )
        };
    }
    #[inline(always)]
    unsafe fn store_mmio64(self, p: *mut u64, v: u64) {
        unsafe {
            asm!("st.mmio.relaxed.sys.global.u64 [{0}], {1};", in(reg64) p, in(reg64) v, options(nostack))
        };
    }
    /// One 128-bit access (PTX ISA 8.4), which arrives whole.
    #[inline(always)]
    unsafe fn load_unit(self, p: *const Chunk) -> Chunk {
        let (first, last): (u64, u64);
        unsafe {
            asm!(
                "{{ .reg .b128 unit; ld.relaxed.sys.global.b128 unit, [{2}]; mov.b128 {{{0}, {1}}}, unit; }}",
                out(reg64) first, out(reg64) last, in(reg64) p, options(nostack)
            )
        };
        Chunk([first, last])
    }
    #[inline(always)]
    unsafe fn store_unit(self, p: *mut Chunk, c: Chunk) {
        unsafe {
            asm!(
                "{{ .reg .b128 unit; mov.b128 unit, {{{1}, {2}}}; st.relaxed.sys.global.b128 [{0}], unit; }}",
                in(reg64) p, in(reg64) c.0[0], in(reg64) c.0[1], options(nostack)
            )
        };
    }

    #[inline(always)]
    fn clock_ns(self) -> u64 {
        let v: u64;
        unsafe { asm!("mov.u64 {0}, %globaltimer;", out(reg64) v, options(nostack, nomem)) };
        v
    }
    #[inline(always)]
    fn relax(self) {}

    #[inline(always)]
    fn warp(self) -> Group {
        unsafe {
            let mask = llvm::ballot_sync(u32::MAX, true);
            llvm::bar_warp_sync(mask);
            group_of(mask)
        }
    }
    #[inline(always)]
    fn group(self, key: u64) -> Group {
        unsafe { group_of(llvm::match_any_sync_i64(llvm::activemask(), key)) }
    }
    #[inline(always)]
    fn broadcast64(self, g: Group, v: u64) -> u64 {
        let (lo, hi) = halves(v);
        let leader = g.mask.trailing_zeros();
        unsafe {
            whole(
                llvm::shfl_sync_idx_i32(g.mask, lo, leader, 31),
                llvm::shfl_sync_idx_i32(g.mask, hi, leader, 31),
            )
        }
    }
    #[inline(always)]
    fn shfl_xor64(self, g: Group, v: u64, xor: u32) -> u64 {
        let (lo, hi) = halves(v);
        unsafe {
            whole(
                llvm::shfl_sync_bfly_i32(g.mask, lo, xor, 31),
                llvm::shfl_sync_bfly_i32(g.mask, hi, xor, 31),
            )
        }
    }
    #[inline(always)]
    fn sync(self, g: Group) {
        unsafe { llvm::bar_warp_sync(g.mask) };
    }
    #[inline(always)]
    fn block_sync(self) {
        unsafe { llvm::barrier_cta_sync_aligned_all(0) };
    }
    #[inline(always)]
    fn block_broadcast64(self, v: u64) -> u64 {
        if self.thread() == 0 {
            unsafe { asm!("st.shared.u64 [db_block_word], {0};", in(reg64) v, options(nostack)) };
        }
        self.block_sync();
        let said: u64;
        unsafe { asm!("ld.shared.u64 {0}, [db_block_word];", out(reg64) said, options(nostack)) };
        // Nobody may write the word again before all have read it.
        self.block_sync();
        said
    }
    #[inline(always)]
    fn block_broadcast_unit(self, v: Chunk) -> Chunk {
        if self.thread() == 0 {
            unsafe {
                asm!("st.shared.v2.u64 [db_block_unit], {{{0}, {1}}};", in(reg64) v.0[0], in(reg64) v.0[1], options(nostack))
            };
        }
        self.block_sync();
        let (first, last): (u64, u64);
        unsafe {
            asm!("ld.shared.v2.u64 {{{0}, {1}}}, [db_block_unit];", out(reg64) first, out(reg64) last, options(nostack))
        };
        self.block_sync();
        Chunk([first, last])
    }
}

#[inline(always)]
fn group_of(mask: u32) -> Group {
    Group {
        mask,
        rank: (mask & llvm::lanemask_lt()).count_ones(),
        size: mask.count_ones(),
        tag: 0,
    }
}
