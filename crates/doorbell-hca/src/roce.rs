//! The RoCE link as its user sees it: a packet port for each engine core that has one, and queue pairs connected over it.
//!
//! [`Hca::open_roce`](crate::Hca::open_roce) gives a core its port; [`Destination::Roce`](crate::Destination) connects a queue pair of
//! that core. The engine posts what the queue pair rings to a [`doorbell_roce::Connection`], which makes packets, and completes its WQEs
//! when the peer has acknowledged them. Packets for unknown queue pairs, from other addresses than the peer's, or that make no sense
//! are counted and dropped.

use std::net::{IpAddr, SocketAddr};

pub use doorbell_port::FaultSpec;
pub use doorbell_port::output;
pub use doorbell_port::{Description, PortConfig, PortCounters, PortError, PortKind, within_host};
pub use doorbell_roce as transport;

use crate::mem::Access;

/// What a queue pair's connection needs to know of the other end.
#[derive(Clone, Debug)]
pub struct RoceTarget {
    /// The peer's address and UDP port.
    pub peer: SocketAddr,
    /// The peer takes trains of packets (segmentation offload).
    pub segments: bool,
    /// The peer is on this host, and takes packets whose ICRC covers headers alone.
    pub light: bool,
    /// Numbers, sizes and limits. `messages` is set by the engine.
    pub connection: doorbell_roce::Config,
    /// What the peer may do here, whatever the regions grant.
    pub access: Access,
}

/// A receiver of what anybody's packets bring, as an Unreliable Connection that sends nothing: for sources that only know its number, such
/// as sensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoceReceiver {
    /// Payload of a packet at most, and of all but the last of a message.
    pub path_mtu: doorbell_roce::Mtu,
    /// What senders may do here, whatever the regions grant. Atomics and READs do not exist on this transport.
    pub access: Access,
}

/// An opened port.
#[derive(Clone, Debug)]
pub struct RocePort {
    /// Where peers send to.
    pub local: SocketAddr,
    /// The largest path MTU whose packets fit the port.
    pub path_mtu: u16,
    /// It takes trains of packets.
    pub segments: bool,
    /// It takes packets of its own host whose ICRC covers headers alone.
    pub light: bool,
    /// And as long ones as path MTU [`doorbell_roce::Mtu::Long`] has.
    pub long: bool,
    /// Several processes share the UDP port: mask and value that the numbers of this core's queue pairs fit, if they were made after
    /// the port was opened.
    pub qpn_class: Option<(u32, u32)>,
    /// What was chosen, why, and what is guaranteed.
    pub description: Description,
}

/// Packets that reached a port and no queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StrangerCounters {
    /// For a queue pair that is not here or not connected.
    pub unknown_qp: u64,
    /// From another address than the queue pair's peer.
    pub wrong_source: u64,
    /// Dropped because GPU memory that they are for is too far behind; they come again.
    pub memory_behind: u64,
    /// Whose ICRC fits an IPv4 identification that their sender, a port of ours, never uses: damaged.
    pub damaged: u64,
    /// That are no RoCE packets (opcode, length, version, reserved values).
    pub malformed: u64,
}

/// What an engine core's port has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoceCounters {
    /// The port's own.
    pub port: PortCounters,
    /// Dropped above it.
    pub strangers: StrangerCounters,
    /// Times a connection was asked for what it has to send. Connections that have nothing to do are not asked.
    pub asked: u64,
}

/// IPv4 addresses in IPv6 clothes as what they are.
pub(crate) fn plain(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}
