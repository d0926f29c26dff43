//! Where Doorbell's kernels run and their memory lives.
//!
//! A [`Gpu`] is a CUDA device, driven through the driver library that is loaded at run time (nothing of CUDA is needed
//! to build), or the *host GPU*: threads of this process that run the same kernels. Nothing here knows of networking.
//!
//! ```
//! use std::time::Duration;
//! use doorbell_gpu::{Gpu, GpuSelect, MemKind, Module};
//!
//! // A module without kernels: enough for memory. `doorbell-kernels` has a real one.
//! let gpu = Gpu::open(&GpuSelect::Host, Module { ptx: "", host: &[] })?;
//! let buffer = gpu.alloc(MemKind::Device, 4096)?;
//! buffer.write(8, b"hello")?;
//! let mut back = [0; 5];
//! buffer.read(8, &mut back)?;
//! assert_eq!(&back, b"hello");
//! # Ok::<(), doorbell_gpu::GpuError>(())
//! ```
//!
//! # What to know before launching
//!
//! - [`Gpu::launch`] never blocks on the kernel; every wait has a deadline. A CUDA kernel cannot be killed without
//!   taking the whole context, PyTorch's included, with it: kernels must end by deadlines of their own. A launch that is
//!   dropped while its kernel runs is *abandoned*: it is logged, and what it may still touch is not freed.
//! - Memory is freed while no kernel of ours runs, and not sooner (the module `graveyard` says why).
//! - On CUDA only the primary context is used, made current around each call and put back after it, with the stream
//!   capture mode relaxed meanwhile; the caller's context, streams and captures are left as they were.

mod buffer;
mod copier;
mod cuda;
mod error;
mod fork;
mod gpu;
mod graveyard;
mod host;
mod info;
mod ipc;
mod kernel;
mod launch;
mod select;
mod shared;
mod wait;

/// What must stay alive as long as some foreign memory is in use; dropped after it was unregistered.
pub type Keep = std::sync::Arc<dyn std::any::Any + Send + Sync>;

pub use buffer::{Buffer, Registered};
pub use copier::{Copier, CopierStats, CopyOp};
pub use cuda::check_variables;
pub use error::{GpuError, Result};
pub use fork::Generation;
pub use gpu::Gpu;
pub use host::MAX_HOST_THREADS;
pub use info::{Backend, Capabilities, GpuInfo};
pub use ipc::Export;
pub use kernel::{Kernel, KernelUse, LoadedImage};
pub use launch::Launch;
pub use select::{Dims, GpuSelect, LaunchOpts, MemKind, Module, RelaxHook};
