//! What a port can fail with: the object, the value, and what to do about it.

use std::io;
use std::net::SocketAddr;

/// A result of this crate.
pub type Result<T, E = PortError> = std::result::Result<T, E>;

/// An error of a port.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// A configuration that cannot be read.
    #[error("port {text:?}: {what}")]
    BadConfig {
        /// What was given.
        text: String,
        /// Field, value, remedy.
        what: String,
    },
    /// The address is not one of this host.
    #[error("UDP port {addr}: no interface of this host has that address (`ip addr` lists them)")]
    NotLocal {
        /// The address.
        addr: SocketAddr,
    },
    /// Somebody else has the UDP port.
    #[error("UDP port {addr} is taken by {holder}: {remedy}")]
    InUse {
        /// The address.
        addr: SocketAddr,
        /// Who has it, as far as this process may know.
        holder: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The kernel refused an option that packets would be wrong without.
    #[error("UDP port {addr}: the kernel refused {option} ({source}), without which {why}")]
    Option {
        /// The address.
        addr: SocketAddr,
        /// The socket option.
        option: &'static str,
        /// What it is for.
        why: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The peer cannot be reached.
    #[error("no path from {local} to {peer} ({source}): check the address, and `ip route get {}`", peer.ip())]
    NoRoute {
        /// Our address.
        local: SocketAddr,
        /// The peer's.
        peer: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// The peer's address is of the other family.
    #[error(
        "peer {peer} cannot be reached from {local}: one is IPv4, the other IPv6; open a port of the peer's family"
    )]
    Family {
        /// Our address.
        local: SocketAddr,
        /// The peer's.
        peer: SocketAddr,
    },
    /// Not even the smallest InfiniBand packet fits.
    #[error(
        "the network towards {peer} carries IP packets of {mtu} bytes: RoCEv2 needs at least 328 (path MTU 256); raise the interface's MTU"
    )]
    MtuTooSmall {
        /// The peer.
        peer: SocketAddr,
        /// Bytes of an IP packet.
        mtu: usize,
    },
    /// Nobody answered for an address.
    #[error(
        "nobody answered for {peer} within {waited:.1?}: is it up, and on this network (ports with frames of their own use no router)?"
    )]
    NoNeighbour {
        /// The peer.
        peer: SocketAddr,
        /// How long was waited.
        waited: std::time::Duration,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was done to what.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
}

impl PortError {
    pub(crate) fn system(what: impl Into<String>, source: io::Error) -> Self {
        Self::System {
            what: what.into(),
            source,
        }
    }
}
