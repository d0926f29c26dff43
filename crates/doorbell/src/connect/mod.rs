//! How two processes come to be connected: what a queue pair can be connected to, and the exchange that finds it out.
//!
//! Within one device a queue pair is connected by number ([`Destination::Loopback`], [`crate::Qp::connect_to_self`],
//! [`crate::connect_pair`]); in another process of this host by what it sent ([`crate::Peer::destination`]).
//!
//! Between hosts the two sides speak a small versioned exchange over TCP. One [listens](Acceptor), the other
//! [dials](Line::dial); each says who it is and what its RoCE port can do ([`Greeting`]), and either may refuse with
//! words that the other side prints. Then there is a [`Channel`] that carries messages, such as
//! [`Endpoint`](crate::Endpoint)s. It is a control path: payloads go over the link. Every step has a deadline, and no
//! stranger can make this side wait or allocate for more than a greeting. Both sides of a channel give signs of life, so that
//! one that was stopped or lost its host is noticed after as long as the other wants to wait.
//!
//! The exchange is neither authenticated nor encrypted, like RoCE itself: use it on networks whose hosts you trust.

mod accept;
mod address;
mod channel;
mod error;
mod frame;
mod greeting;
mod keeper;
mod line;
#[cfg(test)]
mod tests;

pub use accept::{Acceptor, Knock};
pub use address::{
    DEFAULT_PORT, check_address, check_roce_faults, check_roce_port, check_verbs_port, look_up,
};
pub use channel::Channel;
pub(crate) use error::brief;
pub use error::{ConnectError, Refusal, RefusalKind};
pub use frame::{MAX_MESSAGE, VERSION};
pub(crate) use greeting::OFFER;
pub use greeting::{
    Agreed, Greeting, Introduction, LONG_MTU, Offer, PATH_MTUS, gid_of_ip, ip_of_gid,
};
pub(crate) use line::is_temporary;
pub use line::{Caller, Line};

pub use doorbell_hca::verbs::VerbsEnd;

use crate::peer::Peer;

pub(crate) type Connected<T> = std::result::Result<T, ConnectError>;

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
    /// A queue pair at the other end of a RoCE link; of another Doorbell by [`Device::destination`](crate::Device::destination),
    /// or of any other implementation.
    Roce(RoceTarget),
    /// Nobody: WRITEs and SENDs that any sender's packets bring are received, as on an Unreliable Connection, and nothing is sent. For sources
    /// that only know a queue pair number and a key, such as sensors; see [`AnyQp::receive_from_anyone`](crate::AnyQp::receive_from_anyone).
    RoceAnyone {
        /// Payload of a packet at most, and of all but the last packet of a message: one of [`PATH_MTUS`].
        path_mtu: u16,
    },
    /// A queue pair at the other end of an RDMA device's link; by [`Device::destination`](crate::Device::destination), or of any verbs program.
    Verbs(VerbsTarget),
}

/// A queue pair at the other end of an RDMA device's link. This side's comes from [`QpCore::endpoint`](crate::QpCore::endpoint), asked before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerbsTarget {
    /// The other end.
    pub peer: VerbsEnd,
    /// Number of its first packet.
    pub psn: u32,
}

/// A queue pair at the other end of a RoCE link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoceTarget {
    /// What holds between the two ports.
    pub agreed: Agreed,
    /// The number there.
    pub qpn: u32,
    /// Number of its first packet.
    pub psn: u32,
    /// Unreliable Connection.
    pub unreliable: bool,
}
