//! GPU-initiated RDMA for any NIC and for none (in construction: so far the bootstrap exchange).

pub mod bootstrap;

pub use bootstrap::{Bootstrap, BootstrapError, Rendezvous};
