//! Queue pairs that an RDMA device carries out, over a device in memory: every operation, what the device gets to see, and everything that a device
//! may do wrong, with what the poster sees of it.
#![cfg(not(miri))]

#[path = "../common/mod.rs"]
mod common;
mod device;
mod dmabuf;
mod liar;
mod operations;
mod pair;
mod srd;
