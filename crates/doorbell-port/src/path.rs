//! One peer as a port reaches it.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use doorbell_wire::roce::ICRC_LEN;

/// The packets of a train at most: the limit of Linux' UDP segmentation offload before 6.9, and enough to make a call cheap.
pub(crate) const TRAIN: u16 = 64;

/// Bytes of transport headers that a data packet has at most: base, RETH, immediate.
const HEADERS: usize = 12 + 16 + 4;

static KEYS: AtomicU32 = AtomicU32::new(1);

/// What to find a path to.
#[derive(Clone, Copy, Debug)]
pub struct PathRequest {
    /// The peer's address and UDP port.
    pub peer: SocketAddr,
    /// Type of service or traffic class of what is sent: DSCP in the upper six bits, ECN in the lower two.
    pub tos: u8,
    /// The peer said that it accepts trains.
    pub trains: bool,
    /// The peer is on this host, and said that it accepts [light](crate::Port::accepts_light) packets.
    pub light: bool,
    /// The peer also said that it accepts [long](crate::Port::accepts_long) ones.
    pub long: bool,
    /// UDP source port for ports that make their own headers; a UDP socket sends from its own.
    pub source_port: Option<u16>,
    /// How long address resolution may take.
    pub deadline: Duration,
}

impl PathRequest {
    /// Plain packets, type of service 0, one second.
    pub fn new(peer: SocketAddr) -> Self {
        Self {
            peer,
            tos: 0,
            trains: false,
            light: false,
            long: false,
            source_port: None,
            deadline: Duration::from_secs(1),
        }
    }
}

/// How a peer is reached. Made by [`Port::path`](crate::Port::path) once per queue pair, then copied about.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    pub(crate) key: u32,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) tos: u8,
    pub(crate) train: u16,
    pub(crate) mtu: u16,
    /// Bytes of a train.
    pub(crate) most: u32,
    /// See [`Port::accepts_light`](crate::Port::accepts_light).
    pub(crate) light: bool,
}

/// Bytes of a train with all its headers: below the 65,535 of an IP packet.
const TRAIN_BYTES: u32 = 65_000;
/// Bytes behind the packets of a light train.
pub(crate) const TAIL: usize = 2;

impl Path {
    pub(crate) fn new(request: &PathRequest, local: SocketAddr, mtu: usize, train: u16) -> Self {
        Self {
            key: KEYS.fetch_add(1, Ordering::Relaxed),
            peer: request.peer,
            local,
            tos: request.tos,
            train: if request.trains { train } else { 1 },
            mtu: mtu.min(LONGEST) as u16,
            most: TRAIN_BYTES,
            light: false,
        }
    }

    /// From now on packets are light, and if `long`, up to that long. `ip_mtu`: bytes of the longest IP packet, which a train has to fit.
    pub(crate) fn lighten(&mut self, ip_mtu: usize, long: bool) {
        let v6 = self.peer.is_ipv6();
        let below = below(v6) - ICRC_LEN + TAIL;
        self.most = (ip_mtu.saturating_sub(below) as u32).min(TRAIN_BYTES);
        self.light = true;
        if long && has_room_for_long(ip_mtu, v6) {
            self.mtu = (LONG_PAYLOAD + HEADERS) as u16;
        }
    }

    /// The peer's address and UDP port.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The address and port that the peer sees.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Bytes of the longest transport packet (base header to padding).
    pub fn mtu(&self) -> usize {
        usize::from(self.mtu)
    }

    /// Do long packets go out with a CRC of their base header alone?
    pub fn light(&self) -> bool {
        self.light
    }

    /// Packets that may go out in one train; 1: no trains.
    pub fn train(&self) -> usize {
        usize::from(self.train)
    }
}

/// Do packets between these two addresses stay inside this host? Where both are one address or both loopback's, they cannot leave it.
pub fn within_host(a: IpAddr, b: IpAddr) -> bool {
    a == b || (a.is_loopback() && b.is_loopback())
}

/// Payload of a packet between two ports of one host that agreed on long ones: about as much as a datagram takes, and 1 MiB is 17 of them.
pub const LONG_PAYLOAD: usize = 61_696;

/// Does an IP packet of `ip_mtu` bytes take a long packet with all its headers?
pub(crate) fn has_room_for_long(ip_mtu: usize, v6: bool) -> bool {
    ip_mtu >= LONG_PAYLOAD + HEADERS + below(v6)
}

/// Bytes of an IP packet that are not the transport's.
const fn below(v6: bool) -> usize {
    let ip = if v6 { 40 } else { 20 };
    ip + 8 + ICRC_LEN
}

/// Nothing that RoCEv2 sends is longer than path MTU 4096 with all headers.
const LONGEST: usize = 4096 + 64;

/// Bytes of the longest transport packet that fits an IP packet of `ip_mtu`.
pub(crate) fn transport_mtu(ip_mtu: usize, v6: bool) -> usize {
    ip_mtu.saturating_sub(below(v6)).min(LONGEST)
}

/// The largest path MTU (256, 512, 1024, 2048, 4096, [`LONG_PAYLOAD`]) whose packets fit `transport` bytes; 0: none does.
pub fn path_mtu(transport: usize) -> usize {
    [LONG_PAYLOAD, 4096, 2048, 1024, 512, 256]
        .into_iter()
        .find(|mtu| mtu + HEADERS <= transport)
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_networks_give_the_usual_path_mtus() {
        // 1500: what rxe announces as 1024; 4200: 4096; loopback.
        assert_eq!(path_mtu(transport_mtu(1500, false)), 1024);
        assert_eq!(path_mtu(transport_mtu(1500, true)), 1024);
        assert_eq!(path_mtu(transport_mtu(4200, false)), 4096);
        assert_eq!(path_mtu(transport_mtu(9000, true)), 4096);
        assert_eq!(path_mtu(transport_mtu(65536, false)), 4096);
        assert_eq!(path_mtu(transport_mtu(68, false)), 0);
        assert_eq!(path_mtu(transport_mtu(0, true)), 0);
    }
}
