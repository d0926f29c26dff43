//! GPU-initiated networking on mlx5 queues, executed by a software HCA.
//!
//! A GPU thread builds a work request, rings the doorbell and polls the completion itself. This crate is the host's part: it
//! opens a [`Device`] (a GPU and an HCA), registers memory ([`Mr`]), makes and connects queue pairs ([`Qp`]), exports them
//! to kernels, and says what went wrong. Without a NIC a software HCA executes the queues; without a GPU the kernels run on
//! host threads.
//!
//! ```
//! use std::time::Duration;
//! use doorbell::{Access, Device, Dims, GpuSelect, Place, params};
//!
//! // A GPU of host threads and a software HCA; `Device::open()` takes the best there is.
//! let device = Device::builder().gpu(GpuSelect::Host).open()?;
//! // Memory that kernels and the HCA may touch: a source and a target.
//! let pd = device.pd()?;
//! let source = pd.register(&device.alloc(Place::Gpu, 4096)?, Access::ALL)?;
//! let target = pd.register(&device.alloc(Place::Gpu, 4096)?, Access::ALL)?;
//! source.write(0, b"written by a kernel")?;
//! // A queue pair, connected to itself, in a form that kernels use.
//! let qp = pd.qp().depth(64).build()?.connect_to_self()?;
//! let export = qp.export()?;
//! // One thread puts 19 bytes and waits for the completion.
//! let status = device.alloc(Place::Host, 32)?;
//! let put = params::Rate {
//!     qps: export.table_addr(),
//!     size: 19,
//!     local: params::Area { addr: source.addr(), key: source.key(), ..Default::default() },
//!     remote: params::Area { addr: target.addr(), key: target.key(), ..Default::default() },
//!     status: status.device_addr(),
//!     ..params::Rate::one_message()
//! };
//! // SAFETY: the parameters are those of `put_bw`, and all they name outlives the launch.
//! let mut launch = unsafe { device.launch("put_bw", Dims::new(1, 1), &put)? };
//! launch.wait(Duration::from_secs(10))?;
//! qp.check()?;
//! let mut bytes = [0; 19];
//! target.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"written by a kernel");
//! # Ok::<(), doorbell::Error>(())
//! ```
//!
//! # Where to go from here
//!
//! - [`Device`], [`Pd`], [`Mr`], [`Qp`], [`Export`]: the objects, in the order in which one makes them.
//! - [`Peer`] and [`Endpoint`]: two processes of one host; [`connect`]: two hosts; [`Bootstrap`]: ranks that find each
//!   other.
//! - [`CpuQp`]: the CPU posts; [`Proxy`]: a CPU thread posts for kernels.
//! - [`Settings`]: what `DOORBELL_*` variables decide. [`provider`]: what another kind of HCA would implement.
//!
//! # Errors
//!
//! A call that fails says what, with which value, and what to do ([`Error`]). A work request that fails puts its queue pair
//! into error: the kernel's wait returns the syndromes, [`QpCore::error`] returns the same, [`Device::next_error`] reports it
//! once. [`Qp::reset`] and [`Qp::connect`] bring the queue pair back, with the same number and the same export.
//!
//! # Memory, lifetimes, abandoned kernels
//!
//! Registered memory is never seen through Rust references; see [`Memory`]. Everything may be dropped in any order. A key is
//! revoked at once; memory is unmapped when no engine, no peer process and no kernel of the device can still use it. A kernel
//! that was given up ([`Launch`] dropped) keeps what it may touch mapped until it ends; on a GPU nothing can stop it but its
//! own deadlines, and the error that its queue pairs report when they are destroyed.
//!
//! # In a process with PyTorch, with fork, with others
//!
//! On CUDA only the device's primary context is used, which is PyTorch's, and it is current only inside calls of this crate.
//! Kernels run on streams of their own. Tensors are registered through [`Device::import_gpu`]; PyTorch frees memory without
//! asking, so keep the tensor alive as long as the [`Memory`], and deregister before the caching allocator gives memory back.
//! `cudaFree` and the first launch of a kernel stop copies to GPU memory until running kernels end: a stalled copy is reported with
//! this as its likely cause.
//!
//! **Fork:** neither a CUDA context nor threads survive it. Open devices after forking. In a forked child every call on a
//! device of the parent is refused with [`GpuError::Forked`], and dropping its objects does nothing. With Python's
//! `multiprocessing` use the start methods `spawn` or `forkserver`.

mod arena;
pub mod bootstrap;
pub mod config;
pub mod connect;
pub mod cpu;
mod device;
mod dma;
mod endpoint;
mod error;
pub mod faults;
mod fork;
pub mod input;
mod launch;
mod memory;
mod mr;
mod peer;
pub mod provider;
mod proxy;
mod qp;
mod rdma;
pub mod report;
mod signal;
pub mod variables;

pub use bootstrap::{Bootstrap, BootstrapError, Launched, Launcher, Meeting, Rendezvous};
pub use config::{
    Config, HcaCores, OnError, Otherwise, Recorder, RoceWrap, Setting, Settings, Source,
};
pub use connect::{Acceptor, Channel, ConnectError, Destination, Greeting, Line, Offer};
pub use cpu::{CpuQp, CpuQueue, CpuRecvQueue};
pub use device::{AsyncError, Device, DeviceBuilder, KernelNote};
pub use endpoint::{
    ENDPOINT_MAGIC, ENDPOINT_VERSION, Endpoint, EndpointError, LinkKind, MAX_REGIONS, RoceEndpoint,
    VerbsEndpoint,
};
pub use error::{Error, QpFault, Result};
pub use launch::Launch;
pub use memory::{Memory, Place};
pub use mr::{Access, Addressing, Mr, Pd, RemoteMr};
pub use peer::{Listener, Peer};
pub use proxy::{Proxy, ProxyConfig, ProxyCounters};
pub use qp::{
    AnyQp, Cq, Export, ExportLayout, Handler, Progress, Qp, QpBuilder, QpCore, QpCounters, QpState,
    Ready, Reset, State, connect_pair, export_array, export_array_host,
};
pub use rdma::{Rdma, RdmaPort, rdma};

pub use doorbell_device::layout::{CqKind, ErrorKind, QpHandle};
pub use doorbell_gpu::{
    Backend, Dims, Generation, Gpu, GpuError, GpuInfo, GpuSelect, Keep, MAX_HOST_THREADS, MemKind,
    Module,
};
pub use doorbell_hca::limits;
pub use doorbell_kernels::params;
pub use doorbell_wire::{Syndrome, Vendor};

/// The device library, for kernels of your own: build them for the host with [`Module`], or to PTX.
pub use doorbell_device as device_api;
/// The kernels that come with Doorbell.
pub use doorbell_kernels as kernels;
