//! The calls a GPU thread makes to drive a NIC's queues itself: put, get, signal, atomics, send, receive, wait, flush.
//!
//! One source, generic over [`Arch`], compiles to PTX (rustc's `nvptx64-nvidia-cuda`), to the host (an OS thread is a GPU
//! thread) and under a model checker. It knows mlx5 queues in memory and nothing of CUDA, or of who executes the queue:
//! a ConnectX or a software HCA. Start with [`layout`] (what an exported QP looks like) and [`arch`] (what a machine must offer).
#![no_std]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(asm_experimental_arch, link_llvm_intrinsics)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

#[cfg(not(target_arch = "nvptx64"))]
extern crate std;

pub mod arch;
mod claim;
mod error;
pub mod layout;
mod note;
mod ops;
mod post;
mod qp;
mod recv;
pub mod scope;
pub mod sites;
mod wait;
mod wr;

#[cfg(not(target_arch = "nvptx64"))]
pub mod host;
#[cfg(target_arch = "nvptx64")]
pub mod nvptx;

pub use arch::Arch;
pub use claim::{claim, leave, take};
pub use doorbell_wire::{Chunk, Key, Remote};
pub use error::{Error, Failure};
pub use layout::QpHandle;
pub use note::LONG;
pub use post::MAX_SLOTS;
pub use qp::{Deadline, Post, Qp, Ticket};
pub use recv::{Arrival, Received, RecvQueue};
pub use wr::{Fetch, Local, MAX_INLINE, MAX_SEND_INLINE, Masked, Wr};
