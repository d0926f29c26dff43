//! Who makes a call together, and who shares a QP: type parameters of [`crate::Qp`].
//!
//! A [`Scope`] says how many threads make *one* call: each thread its own, the lanes of a warp one, the threads of a block one.
//! A [`Sharing`] says which threads may use the QP at the same time, and so what the indexes' atomics cost.

use crate::arch::{At, MemScope};

/// How many threads make one call together.
pub trait Scope: Copy + 'static {
    /// Number for the implementation.
    const COOP: Coop;
}

/// The value of a [`Scope`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coop {
    /// Each thread posts for itself; lanes of a warp that call together are served together.
    Thread,
    /// The converged lanes of a warp make one call: all pass the same arguments, all get the result.
    Warp,
    /// The threads of a block make one call.
    Block,
}

/// Each thread makes its own call.
#[derive(Clone, Copy, Debug)]
pub struct Thread;
/// The converged lanes of a warp make one call: all pass the same arguments, all get the result.
#[derive(Clone, Copy, Debug)]
pub struct Warp;
/// All threads of a block make one call: all pass the same arguments, all get the result.
#[derive(Clone, Copy, Debug)]
pub struct Block;

impl Scope for Thread {
    const COOP: Coop = Coop::Thread;
}
impl Scope for Warp {
    const COOP: Coop = Coop::Warp;
}
impl Scope for Block {
    const COOP: Coop = Coop::Block;
}

/// Which threads may use a QP at the same time.
pub trait Sharing: Copy + 'static {
    /// One thread at a time: no atomics.
    const EXCLUSIVE: bool;
    /// The widest scope of an access to the queue's indexes.
    const WIDEST: MemScope;

    /// `at`, no wider than the threads that share the QP. What the engine sees keeps its scope.
    #[inline(always)]
    fn at(at: At) -> At {
        if matches!(at.scope, MemScope::Gpu) {
            At {
                scope: Self::WIDEST,
                ..at
            }
        } else {
            at
        }
    }
}

/// The values of [`Sharing`].
pub mod sharing {
    use super::{MemScope, Sharing};

    /// One thread at a time uses the QP.
    #[derive(Clone, Copy, Debug)]
    pub struct Exclusive;
    /// Threads of one block use the QP.
    #[derive(Clone, Copy, Debug)]
    pub struct Block;
    /// Any threads of the GPU use the QP.
    #[derive(Clone, Copy, Debug)]
    pub struct Gpu;

    impl Sharing for Exclusive {
        const EXCLUSIVE: bool = true;
        const WIDEST: MemScope = MemScope::Block;
    }
    impl Sharing for Block {
        const EXCLUSIVE: bool = false;
        const WIDEST: MemScope = MemScope::Block;
    }
    impl Sharing for Gpu {
        const EXCLUSIVE: bool = false;
        const WIDEST: MemScope = MemScope::Gpu;
    }
}
