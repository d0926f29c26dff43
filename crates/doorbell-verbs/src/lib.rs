//! libibverbs, loaded at run time: whatever RDMA device a host has, as safe handles.
//!
//! [`Verbs::load`] finds the library (rdma-core 39 or later); [`Context::open`] opens a device; a [`Pd`] registers memory ([`Mr`]) and makes
//! completion queues ([`Cq`]) and reliable queue pairs ([`Qp`]), which are brought to life by [`Qp::init`], [`Qp::connect`]. Work requests go
//! through a [`Batch`]: by the calls of `ibv_wr_*` where the device has them, by `ibv_post_send` otherwise, with the same outcome.
//!
//! Nothing here is linked: a host without rdma-core starts, and is told what is missing. Every error names the device, the step, what the
//! kernel said, and what to do about it.
//!
//! The inline functions of the C headers are tables of function pointers in structures; [`abi`] declares those anew. A test compiles
//! a C program against the real headers and compares every size and offset. [`efa`] has what Amazon's adapter has instead of RC.

pub mod abi;
mod any;
mod api;
mod batch;
mod device;
pub mod efa;
mod error;
mod event;
mod gid;
mod memory;
mod queue;

pub use any::AnyQp;
pub use api::{Api, DmabufMr, LIBRARY, VARIABLE, Verbs};
pub use batch::{Batch, Data, Op, Refused, Work};
pub use device::{Context, DeviceAttr, DeviceName, PortAttr, Protocol, mtu_bytes, mtu_code};
pub use error::{Result, VerbsError};
pub use event::AsyncEvent;
pub use gid::{GidEntry, GidKind};
pub use memory::{Mr, Pd, Source};
pub use queue::{Connection, Cq, Qp, QpConfig, Remote};
