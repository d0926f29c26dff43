//! The mlx5 work-queue formats: send WQEs, CQEs, doorbells and doorbell records, as bytes.
//!
//! Everything here is a value in, a value out: no memory is touched, nothing blocks, nothing allocates, nothing can panic.
//! The GPU that posts, the software HCA that executes and the host that dumps a ring all use these same functions.
//!
//! From bottom to top:
//!
//! * [`Chunk`] is 16 bytes in memory order: the unit in which mlx5 counts WQE size and what one 16-byte store writes.
//! * [`seg`] builds one segment per function, [`Ctrl`], [`Remote`] and [`Local`] read one back. Building is branch-free, reading cannot fail.
//! * [`Wqe`] builds a whole, valid WQE; [`Request::parse`] checks a whole WQE that somebody else wrote and says what is wrong with it.
//! * [`cqe`] builds and reads completions, [`Syndrome`] and [`Vendor`] name what went wrong.
//! * `roce` (cargo feature `roce`) has the packets of RoCEv2 and their checksum.
//! * [`db`] has the doorbell word, the doorbell record and the arithmetic between producer indexes.
//!
//! ```
//! use doorbell_wire::{Ctrl, Key, Local, Opcode, Qpn, Remote, Request, Wqe};
//!
//! // 64 bytes from `local` to `remote`, with a completion.
//! let remote = Remote { addr: 0x1000, key: Key(0x1234) };
//! let local = Local { addr: 0x40, key: Key(0x5678), len: 64 };
//! let wqe = Wqe::write(remote, local)?.signalled(true);
//! let qpn = Qpn::new(0x77).expect("24 bits");
//! let slots = wqe.emit(9, qpn);
//!
//! // What the NIC, or the software HCA, makes of it.
//! let ctrl = Ctrl::parse(slots[0]);
//! assert!(ctrl.matches(9, qpn) && ctrl.signalled());
//! assert_eq!(ctrl.opcode(), Ok(Opcode::RdmaWrite));
//! let request = Request::parse(&slots)?;
//! assert_eq!(request.to_string(), "RDMA_WRITE 64 B from 0x40 (lkey 0x00005678) to 0x1000 (rkey 0x00001234)");
//! # Ok::<(), doorbell_wire::WqeError>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!(
    "Doorbell's queues are shared with little-endian devices; big-endian hosts are not supported"
);

#[cfg(test)]
extern crate std;

pub mod arith;
mod chunk;
pub mod cqe;
mod ctrl;
pub mod db;
mod dump;
mod error;
mod key;
mod opcode;
mod request;
#[cfg(feature = "roce")]
pub mod roce;
pub mod seg;
mod syndrome;
mod wqe;

pub use chunk::{Chunk, WQEBB};
pub use ctrl::{Ctrl, Fence, flags};
pub use dump::Dump;
pub use error::WqeError;
pub use key::{Cqn, Key, Local, Qpn, Remote};
pub use opcode::{Opcode, UnknownOpcode, Width};
pub use request::{Inline, Payload, Piece, Pieces, Request};
pub use syndrome::{Syndrome, Vendor};
pub use wqe::Wqe;

/// Compiles the example of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
