//! Packet ports: how RoCEv2 packets get in and out of a host.
//!
//! A [`Port`] sends and receives *transport packets* (InfiniBand base header to padding) in batches. It owns everything below: addresses, the
//! UDP and IP headers, and the invariant CRC, which it appends on sending and checks on receiving. What is above (queue pairs, acknowledgements,
//! retransmission) is not known here; a port may lose, repeat and reorder, as a network does.
//!
//! * [`PortConfig`] says which port: parse one from a string such as `udp://192.0.2.1` and [`open`](PortConfig::open) it.
//! * [`Path`] is one peer as the port reaches it, made once per queue pair with [`Port::path`].
//! * [`SendBatch`] and [`RecvBatch`] own their buffers: nothing is allocated per packet.
//! * [`Faulty`], [`Pcapng`] and [`Tracer`] wrap any port.
//!
//! Neighbouring packets of one path and one size become a *train*: one call and one trip through the kernel (UDP segmentation offload), where
//! both ends agreed on it.

mod arrived;
mod batch;
mod config;
mod counters;
mod crc;
mod describe;
mod error;
mod eth;
mod icrc;
pub mod limits;
pub mod output;
mod path;
mod sys;
mod udp;
mod wrap;

use std::fmt;
use std::net::SocketAddr;
use std::time::Instant;

pub use arrived::{Check, Received, RecvBatch};
pub use batch::{Outgoing, SendBatch};
pub use config::{PortConfig, PortKind};
pub use counters::PortCounters;
pub use describe::Description;
pub use error::{PortError, Result};
pub use eth::{DgramOptions, EthPort, Place, RawOptions};
pub use icrc::DEFAULT_PORT;
pub use path::{LONG_PAYLOAD, Path, PathRequest, path_mtu, within_host};
pub use udp::{UdpOptions, UdpPort};
pub use wrap::{FaultSpec, Faulty, Pcapng, Tracer};

/// A way in and out for RoCEv2 packets. Used by one thread at a time. No call blocks, except [`Port::path`], which has a deadline.
pub trait Port: Send + fmt::Debug {
    /// Where peers send to. The address is unspecified if the port listens on all; then [`Path::local`] has the one that a peer sees.
    fn local_addr(&self) -> SocketAddr;

    /// Bytes of the longest transport packet (base header to padding) that the port's own network takes. A path's may be smaller.
    fn mtu(&self) -> usize;

    /// How `request.peer` is reached: source address, largest packet, hardware address.
    ///
    /// # Errors
    /// No route, another address family, or no answer to address resolution by the deadline.
    fn path(&mut self, request: &PathRequest) -> Result<Path>;

    /// Sends what is in the batch and returns how many packets it took. What the kernel has no room for stays in the batch for the next call. A
    /// packet that cannot be sent (no route any more, too long) is dropped and counted, as a network would.
    ///
    /// # Errors
    /// Only what makes every further call fail: the port is gone.
    fn send(&mut self, batch: &mut SendBatch) -> Result<usize>;

    /// Replaces the contents of the batch by what has arrived, and returns how many packets that is. 0: nothing there. Packets
    /// with a wrong ICRC are counted and never seen here.
    ///
    /// # Errors
    /// Only what makes every further call fail: the port is gone.
    fn recv(&mut self, batch: &mut RecvBatch) -> Result<usize>;

    /// A batch with buffers as this port needs them.
    fn recv_batch(&self) -> RecvBatch;

    /// When the port wants to be called again although nothing arrives (it holds delayed packets).
    fn next_due(&self) -> Option<Instant> {
        None
    }

    /// Does this end receive trains? Peers exchange the answer; a path sends trains only to who accepts them.
    fn accepts_trains(&self) -> bool {
        false
    }

    /// Does this end take *light* packets from peers on its own host? The ICRC of long ones covers the headers below and the base header alone, that of all
    /// of them an IPv4 identification of 0 whatever the kernel sent; and a train is one datagram of the packets, one behind the other, with two
    /// bytes more: how long each but the last is, least significant byte first. (Packets have a multiple of four bytes.)
    ///
    /// What crosses no wire cannot be damaged on one: it is copied from memory to memory, as with TCP over loopback, whose checksum the kernel
    /// leaves out too. Reading every byte once more at both ends would be most of what a large message costs beside its copies. Peers exchange the
    /// answer; ports that change, keep or show packets say no, so that captures have right ICRCs and injected damage is found.
    fn accepts_light(&self) -> bool {
        false
    }

    /// Does this end take light packets of up to [`LONG_PAYLOAD`] bytes beside their headers? Peers exchange the answer.
    fn accepts_long(&self) -> bool {
        false
    }

    /// May packets lie in memory of others while they wait ([`SendBatch::commit_lent`])? Ports that look at packets themselves say no.
    fn lends(&self) -> bool {
        false
    }

    /// `(mask, value)`: queue pair numbers on this port must satisfy `qpn & mask == value`, because several processes share the UDP port.
    fn qpn_class(&self) -> Option<(u32, u32)> {
        None
    }

    /// What happened so far.
    fn counters(&self) -> PortCounters;

    /// What was chosen, why, and what is guaranteed.
    fn describe(&self) -> Description;
}

impl<P: Port + ?Sized> Port for Box<P> {
    fn local_addr(&self) -> SocketAddr {
        (**self).local_addr()
    }
    fn mtu(&self) -> usize {
        (**self).mtu()
    }
    fn path(&mut self, request: &PathRequest) -> Result<Path> {
        (**self).path(request)
    }
    fn send(&mut self, batch: &mut SendBatch) -> Result<usize> {
        (**self).send(batch)
    }
    fn recv(&mut self, batch: &mut RecvBatch) -> Result<usize> {
        (**self).recv(batch)
    }
    fn recv_batch(&self) -> RecvBatch {
        (**self).recv_batch()
    }
    fn next_due(&self) -> Option<Instant> {
        (**self).next_due()
    }
    fn accepts_trains(&self) -> bool {
        (**self).accepts_trains()
    }
    fn accepts_light(&self) -> bool {
        (**self).accepts_light()
    }
    fn accepts_long(&self) -> bool {
        (**self).accepts_long()
    }
    fn lends(&self) -> bool {
        (**self).lends()
    }
    fn qpn_class(&self) -> Option<(u32, u32)> {
        (**self).qpn_class()
    }
    fn counters(&self) -> PortCounters {
        (**self).counters()
    }
    fn describe(&self) -> Description {
        (**self).describe()
    }
}
