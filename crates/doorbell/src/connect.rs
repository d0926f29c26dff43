//! What a queue pair can be connected to.
//!
//! Within one device by number ([`Destination::Loopback`], [`crate::Qp::connect_to_self`], [`crate::connect_pair`]); in
//! another process of this host by what it sent ([`Peer::destination`]).

use crate::peer::Peer;

/// The other end of a queue pair.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Destination {
    /// A queue pair of the same device.
    Loopback {
        /// Its number.
        qpn: u32,
    },
    /// A queue pair of another process of this host.
    Shm {
        /// The process.
        peer: Peer,
        /// The number there.
        qpn: u32,
    },
}
