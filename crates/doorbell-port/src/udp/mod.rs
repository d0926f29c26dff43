//! A UDP socket as a port: no privileges, the kernel makes the IP header.
//!
//! The ICRC covers that header, so the socket is set up such that it is predictable: *unconnected* and never fragmenting, for which Linux sends
//! identification 0 (counted up within a train), and with the source address that the path was made for. On receiving, an IPv4
//! identification cannot be seen: see [`receive`].

mod near;
mod receive;
mod send;
mod setup;
mod share;

use std::net::{SocketAddr, UdpSocket};

pub use setup::UdpOptions;

use crate::arrived::RecvBatch;
use crate::batch::SendBatch;
use crate::counters::PortCounters;
use crate::describe::Description;
use crate::error::Result;
use crate::path::{Path, PathRequest};
use crate::sys::Arrival;
use crate::{Port, icrc};

/// A UDP socket.
#[derive(Debug)]
pub struct UdpPort {
    socket: UdpSocket,
    local: SocketAddr,
    options: UdpOptions,
    /// Bytes of the longest transport packet of the interface.
    mtu: usize,
    /// The kernel can take trains apart.
    can_send_trains: bool,
    /// The kernel delivers trains whole.
    gets_trains: bool,
    /// A datagram of this host may be as long as [`crate::LONG_PAYLOAD`] needs.
    takes_long: bool,
    receive_buffer: usize,
    send_buffer: usize,
    flows: receive::Flows,
    counters: PortCounters,
    /// Counter of the socket when it last spoke of dropped datagrams.
    overruns: u32,
    /// Datagrams to ask for in the next call.
    ask: usize,
    arrivals: Box<[Arrival]>,
    /// A socket for one peer on this host.
    near: Option<near::Near>,
    /// Membership, if other processes have the same UDP port.
    share: Option<share::Share>,
}

impl Port for UdpPort {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn mtu(&self) -> usize {
        self.mtu
    }

    fn path(&mut self, request: &PathRequest) -> Result<Path> {
        self.find_path(request)
    }

    fn send(&mut self, batch: &mut SendBatch) -> Result<usize> {
        self.send_batch(batch)
    }

    fn recv(&mut self, batch: &mut RecvBatch) -> Result<usize> {
        self.receive_batch(batch)
    }

    fn recv_batch(&self) -> RecvBatch {
        // A train needs the room of the largest IP packet. The odd cache lines keep the buffers' beginnings out of the same cache set.
        if self.gets_trains {
            RecvBatch::new(65536 + 5 * 64, 16)
        } else {
            RecvBatch::new(4352 + 64, 32)
        }
    }

    fn accepts_trains(&self) -> bool {
        self.gets_trains
    }

    fn accepts_light(&self) -> bool {
        true
    }

    fn accepts_long(&self) -> bool {
        self.takes_long
    }

    fn lends(&self) -> bool {
        true
    }

    fn qpn_class(&self) -> Option<(u32, u32)> {
        self.share.as_ref().map(|s| (share::MASK, s.class()))
    }

    fn counters(&self) -> PortCounters {
        let near = self.near.as_ref().map_or(0, near::Near::overruns);
        PortCounters {
            receive_overruns: self.counters.receive_overruns + near,
            ..self.counters
        }
    }

    fn describe(&self) -> Description {
        let v4 = self.local.is_ipv4();
        let yes = |yes: bool, yes_text: &str, no_text: &str| {
            if yes { yes_text } else { no_text }.to_owned()
        };
        let mut guarantees = vec![
            "every packet that is sent has a right ICRC: the socket is unconnected and never fragments, so the kernel's IP header is known; \
             only between two Doorbells on one host that agreed on it does that of long packets cover the headers alone, and none the identification"
                .to_owned(),
        ];
        if v4 {
            guarantees.push(
                "received packets: a UDP socket hides the IPv4 identification, which the ICRC covers. Doorbell ports send 0 to 63, so 26 \
                 of its 32 bits check the packets of a connected Doorbell; others use any identification, and the one that explains the ICRC is \
                 accepted, which leaves 16 bits (IPv6 and raw ports check all 32)"
                    .to_owned(),
            );
        } else {
            guarantees.push("received packets: the full ICRC is checked".to_owned());
        }
        guarantees
            .push("UDP checksums are sent and, where not zero, checked by the kernel".to_owned());
        let sharing = match &self.share {
            Some(share) => format!(
                "with other processes of this user, by queue pair number: ours are {} modulo {} (SO_REUSEPORT with a BPF program)",
                share.class(),
                share::MASK + 1
            ),
            None => {
                "no: the UDP port is this process's alone (option `share` for others)".to_owned()
            }
        };
        Description {
            title: format!("UDP socket {} (no privileges)", self.local),
            choices: vec![
                ("shared", sharing),
                (
                    "UDP port",
                    yes(
                        self.local.port() == icrc::DEFAULT_PORT,
                        "4791: what other implementations send to",
                        "agreed with each peer; other implementations need 4791",
                    ),
                ),
                (
                    "MTU",
                    format!(
                        "transport packets of {} bytes, InfiniBand path MTU {}",
                        self.mtu,
                        crate::path_mtu(self.mtu)
                    ),
                ),
                (
                    "trains out",
                    yes(
                        self.can_send_trains,
                        "yes (UDP_SEGMENT), to peers that accept them",
                        "no: the kernel has no UDP_SEGMENT, or it was turned off",
                    ),
                ),
                (
                    "trains in",
                    yes(
                        self.gets_trains,
                        "yes (UDP_GRO); the kernel makes none of packets without UDP checksum",
                        "no: the kernel has no UDP_GRO, or it was turned off",
                    ),
                ),
                (
                    "own host",
                    yes(
                        self.takes_long,
                        "light packets, up to a datagram long, if the peer says the same; a connected socket for the first such peer",
                        "light packets, if the peer says the same; a connected socket for the first such peer",
                    ),
                ),
                (
                    "buffers",
                    format!(
                        "{} KiB in, {} KiB out (the limits are net.core.rmem_max and wmem_max)",
                        self.receive_buffer >> 10,
                        self.send_buffer >> 10
                    ),
                ),
            ],
            guarantees,
        }
    }
}
