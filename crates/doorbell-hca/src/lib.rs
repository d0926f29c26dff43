//! The software HCA: executes mlx5 work queues that a GPU, or anyone else, wrote into memory.
//!
//! A poster writes WQEs into a send ring and rings a doorbell word. An engine *core* (a thread, or whoever calls [`Driver::poll`]) sees the
//! word, reads each WQE once, checks it completely, moves the bytes, and writes the CQE. What is wrong is answered with the error CQE of
//! the [table of faults](fault), and nothing outside a registered region is ever touched.
//!
//! * [`Hca`] makes memory regions ([`Mr`]) and queue pairs ([`HcaQp`]), reports [`Event`]s, and runs the engine.
//! * [`mem`] is the key table, which a peer process can map read-only, and how regions end.
//! * [`link`] is the seam to whatever reaches the target: loopback, a peer's shared memory ([`shm`]), packets ([`roce`]), RDMA devices
//!   ([`verbs`]).
//! * [`record`] is the flight recorder: what happened to each queue pair, and when.
//! * [`dma`] moves payloads of GPU memory through a copy engine.
//!
//! Memory shared with others comes in as [`Shared`] pointers through `unsafe` calls; everything above them is safe.

pub mod config;
mod copy;
mod deadline;
pub mod dma;
pub mod doorbells;
mod engine;
mod error;
mod events;
pub mod fault;
mod hca;
pub mod link;
pub mod mem;
mod patience;
mod place;
pub mod qp;
mod queues;
mod raw;
pub mod record;
pub mod roce;
pub mod script;
pub mod shm;
pub mod verbs;

pub use config::{Affinity, Cores, HcaConfig, IdlePolicy};
pub use deadline::deadline;
pub use doorbell_port::limits;
pub use doorbells::{DoorbellArray, DoorbellSlot};
pub use engine::CoreCounters;
pub use error::{HcaError, Result};
pub use events::Event;
pub use fault::Fault;
pub use hca::{CoreHealth, Driver, Hca};
pub use link::{Delivery, Destination, RemoteQp};
pub use mem::{Access, Addressing, Keep, Memory, Mr, MrConfig};
pub use place::Placement;
pub use qp::{
    CqConfig, DoorbellWord, HcaQp, OnError, QpConfig, QpCounters, QpState, RqConfig, Signals,
};
pub use raw::Shared;
