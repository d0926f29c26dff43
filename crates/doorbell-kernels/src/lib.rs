//! Doorbell's own kernels: benchmarks and self tests, one source built to PTX and to the host.
//!
//! [`PTX`] is the module to load on a GPU, [`HOST`] the same kernels for host threads, [`params`] what each takes ([`board`]: what the copier's does). The PTX also holds the
//! `extern "C"` functions of `include/doorbell_device.h`, which CUDA C++ code links. `cargo xtask ptx` writes it, and it is committed, so
//! that nobody needs a GPU toolchain; a test checks that it belongs to the sources.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

pub mod board;
mod copies;
mod entry;
mod latency;
mod messages;
pub mod params;
mod proxy;
mod rate;
mod selftest;

#[cfg(all(target_arch = "nvptx64", feature = "device-functions"))]
mod c_abi;
#[cfg(target_arch = "nvptx64")]
mod panic;

#[cfg(not(target_arch = "nvptx64"))]
pub use entry::HOST;

/// The kernel `copies` as PTX, alone: whoever opens a GPU loads it, for its copier.
#[cfg(not(target_arch = "nvptx64"))]
pub const COPIES_PTX: &str = include_str!("../ptx/doorbell_copies.ptx");

/// The kernels as PTX, for sm_80 and later.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/doorbell.ptx");
