//! The C ABI of Doorbell: `libdoorbell.so.0`, declared by `include/doorbell.h`.
//!
//! It converts, calls the `doorbell` crate and maps errors; it decides nothing. Every entry returns a [`Status`], lets no panic
//! out, and every call that can wait takes a time limit. `cargo xtask dist` links the shared object and binds its names to versions.

#![allow(clippy::too_many_arguments, reason = "C has no other way to pass them")]

mod call;
mod convert;
pub mod cpu;
pub mod device;
mod error;
mod handle;
pub mod memory;
pub mod peer;
pub mod qp;
pub mod recv;
mod status;
pub mod types;

pub use error::{doorbell_last_error, doorbell_last_status, doorbell_status_text};
pub use status::{ALL, Status};
