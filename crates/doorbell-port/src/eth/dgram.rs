//! The other end of QEMU's `-netdev dgram`: each datagram is an Ethernet frame. No privileges, no network but the guest's.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::{fmt, io};

use rustix::net::SocketAddrUnix;

use super::station::{Mac, Station};
use super::{EthPort, Parts};
use crate::error::{PortError, Result};

/// Where an end of the connection is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A UDP address.
    Udp(SocketAddr),
    /// A UNIX socket.
    Unix(PathBuf),
}

impl Place {
    /// Connects a socket to it. `false`: there is nobody yet.
    pub(super) fn connect(&self, fd: BorrowedFd<'_>) -> bool {
        match self {
            Self::Udp(addr) => rustix::net::connect(fd, addr).is_ok(),
            Self::Unix(path) => {
                SocketAddrUnix::new(path).is_ok_and(|addr| rustix::net::connect(fd, &addr).is_ok())
            }
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp(addr) => addr.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// A port that is the network of a QEMU guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DgramOptions {
    /// Where frames arrive: QEMU's `remote`.
    pub local: Place,
    /// Where frames go: QEMU's `local`.
    pub remote: Place,
    /// Our IP address in the guest's network.
    pub ip: IpAddr,
    /// Our UDP port there.
    pub udp_port: u16,
    /// Our Ethernet address.
    pub mac: Mac,
    /// Bytes of an IP packet; the guest's interface must have the same.
    pub mtu: usize,
}

impl EthPort {
    /// Opens a port that is the network of a QEMU guest. The guest may start later.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn dgram(options: &DgramOptions) -> Result<Self> {
        let made: io::Result<OwnedFd> = match &options.local {
            Place::Udp(addr) => UdpSocket::bind(addr).and_then(|s| {
                s.set_nonblocking(true)?;
                Ok(s.into())
            }),
            Place::Unix(path) => {
                // What a process that died left behind.
                let dead = UnixDatagram::unbound().and_then(|s| s.connect(path));
                if dead.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused) {
                    let _ = std::fs::remove_file(path);
                }
                UnixDatagram::bind(path).and_then(|s| {
                    s.set_nonblocking(true)?;
                    Ok(s.into())
                })
            }
        };
        let fd = made.map_err(|e| {
            PortError::system(
                format!(
                    "opening {} for QEMU's frames (is another process using it?)",
                    options.local
                ),
                e,
            )
        })?;
        Self::new(Parts {
            fd,
            connect: Some(options.remote.clone()),
            station: Station::new(options.mac, options.ip, true),
            udp_port: options.udp_port,
            ip_mtu: options.mtu,
            loopback: false,
            title: format!(
                "Ethernet of a QEMU guest, as {} port {}",
                options.ip, options.udp_port
            ),
            choices: vec![
                (
                    "frames",
                    format!("from {}, to {}", options.local, options.remote),
                ),
                (
                    "answers",
                    "ARP, neighbour discovery and ICMP echo for its address".to_owned(),
                ),
            ],
            claim: None,
        })
    }
}
