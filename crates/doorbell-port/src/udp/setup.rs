//! Opening the socket, and finding paths.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::{UdpPort, near::Near, receive::Flows, share::Share};
use crate::counters::PortCounters;
use crate::error::{PortError, Result};
use crate::path::{self, Path, PathRequest, TRAIN};
use crate::sys;

/// How a UDP port is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpOptions {
    /// Trains may be sent (UDP_SEGMENT).
    pub send_trains: bool,
    /// Trains may be received (UDP_GRO).
    pub receive_trains: bool,
    /// Bytes of socket buffer to ask for, in each direction.
    pub buffer: usize,
    /// Other processes of this user may have the same UDP port, if they say so too; then see [`Port::qpn_class`](crate::Port::qpn_class).
    pub share: bool,
}

impl Default for UdpOptions {
    fn default() -> Self {
        Self {
            send_trains: true,
            receive_trains: true,
            buffer: 4 << 20,
            share: false,
        }
    }
}

impl UdpPort {
    /// Opens a port on `addr`; UDP port 0 takes any.
    ///
    /// # Errors
    /// The address is not local, the UDP port is taken, or the kernel refuses what right ICRCs need.
    pub fn open(addr: SocketAddr, options: UdpOptions) -> Result<Self> {
        let family = if addr.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let fd = rustix::net::socket_with(
            family,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(|e| PortError::system("opening a UDP socket", e.into()))?;
        let must = |level, name, value, option, why| {
            sys::set_option(fd.as_fd(), level, name, value).map_err(|source| PortError::Option {
                addr,
                option,
                why,
                source,
            })
        };
        let (option, why) = if addr.is_ipv4() {
            (
                "IP_MTU_DISCOVER",
                "the IP identification, which the ICRC covers, is unknown",
            )
        } else {
            ("IPV6_MTU_DISCOVER", "packets may be fragmented")
        };
        unfragmented(fd.as_fd(), addr.is_ipv4()).map_err(|source| PortError::Option {
            addr,
            option,
            why,
            source,
        })?;
        if addr.is_ipv4() {
            must(
                libc::IPPROTO_IP,
                libc::IP_RECVTOS,
                1,
                "IP_RECVTOS",
                "congestion marks are unseen",
            )?;
        } else {
            must(
                libc::IPPROTO_IPV6,
                libc::IPV6_V6ONLY,
                1,
                "IPV6_V6ONLY",
                "IPv4 peers would arrive with IPv6 addresses that their ICRC does not have",
            )?;
            must(
                libc::IPPROTO_IPV6,
                libc::IPV6_RECVTCLASS,
                1,
                "IPV6_RECVTCLASS",
                "congestion marks are unseen",
            )?;
            // RoCEv2 hardware sends no UDP checksum over IPv6 either.
            must(
                libc::SOL_UDP,
                libc::UDP_NO_CHECK6_RX,
                1,
                "UDP_NO_CHECK6_RX",
                "packets of RoCE hardware are dropped",
            )?;
        }
        if addr.ip().is_unspecified() {
            let (level, name, option) = if addr.is_ipv4() {
                (libc::IPPROTO_IP, libc::IP_PKTINFO, "IP_PKTINFO")
            } else {
                (
                    libc::IPPROTO_IPV6,
                    libc::IPV6_RECVPKTINFO,
                    "IPV6_RECVPKTINFO",
                )
            };
            must(
                level,
                name,
                1,
                option,
                "the destination address, which the ICRC covers, is unknown on a port that listens on all",
            )?;
        }
        // Only a counter: a kernel without it counts nothing.
        let _ = sys::set_option(fd.as_fd(), libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
        buffers(fd.as_fd(), options.buffer);
        if options.share {
            must(
                libc::SOL_SOCKET,
                libc::SO_REUSEPORT,
                1,
                "SO_REUSEPORT",
                "the UDP port cannot be shared",
            )?;
        }
        rustix::net::bind(&fd, &addr).map_err(|e| bind_error(addr, e.into()))?;
        let socket = UdpSocket::from(fd);
        let local = socket
            .local_addr()
            .map_err(|e| PortError::system("asking a UDP socket for its address", e))?;
        let share = match options.share {
            true => Some(Share::join(&socket, local)?),
            false => None,
        };
        let size = |name| {
            sys::get_option(socket.as_fd(), libc::SOL_SOCKET, name).map_or(0, |b| b as usize)
        };
        let can_send_trains = options.send_trains
            && sys::get_option(socket.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT).is_ok();
        let gets_trains = options.receive_trains
            && sys::set_option(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        Ok(Self {
            local,
            options,
            mtu: path::transport_mtu(interface_mtu(local), local.is_ipv6()),
            can_send_trains,
            gets_trains,
            takes_long: gets_trains && path::has_room_for_long(loopback_mtu(), local.is_ipv6()),
            receive_buffer: size(libc::SO_RCVBUF),
            send_buffer: size(libc::SO_SNDBUF),
            flows: Flows::default(),
            counters: PortCounters::default(),
            overruns: 0,
            near: None,
            share,
            ask: 1,
            arrivals: (0..sys::MESSAGES).map(|_| sys::Arrival::new()).collect(),
            socket,
        })
    }

    /// What it was set up with.
    pub fn options(&self) -> UdpOptions {
        self.options
    }

    pub(super) fn find_path(&mut self, request: &PathRequest) -> Result<Path> {
        let peer = request.peer;
        if peer.is_ipv4() != self.local.is_ipv4() {
            return Err(PortError::Family {
                local: self.local,
                peer,
            });
        }
        let (ip, mtu) = route(self.local.ip(), peer).map_err(|source| PortError::NoRoute {
            local: self.local,
            peer,
            source,
        })?;
        let transport = path::transport_mtu(mtu, peer.is_ipv6());
        if path::path_mtu(transport) == 0 {
            return Err(PortError::MtuTooSmall { peer, mtu });
        }
        let mut local = self.local;
        local.set_ip(ip);
        let train = if self.can_send_trains { TRAIN } else { 1 };
        let mut path = Path::new(request, local, transport, train);
        // Whoever asks may have been told anything: what leaves the host is covered whole.
        if request.light && path::within_host(ip, peer.ip()) {
            path.lighten(mtu, request.long);
            self.come_near(&path);
        }
        Ok(path)
    }

    /// Opens a socket for this peer alone, if there is none for another. Everything goes on without it.
    fn come_near(&mut self, path: &Path) {
        if self.near.is_some() || self.share.is_some() {
            return;
        }
        match Near::open(&self.socket, path, self.options.buffer) {
            Ok(near) => self.near = Some(near),
            Err(error) => {
                tracing::debug!(peer = %path.peer(), %error, "no socket for a near peer alone");
            }
        }
    }
}

/// No packet is cut up on its way, and the kernel's IPv4 header says so.
pub(super) fn unfragmented(fd: BorrowedFd<'_>, v4: bool) -> io::Result<()> {
    let (level, name, value) = if v4 {
        (
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            libc::IP_PMTUDISC_DO,
        )
    } else {
        (
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_DO,
        )
    };
    sys::set_option(fd, level, name, value)
}

/// Asks for so many bytes of buffer in each direction. What came of it can be read back.
pub(super) fn buffers(fd: BorrowedFd<'_>, bytes: usize) {
    let wish = bytes.min(1 << 30) as i32;
    for (force, plain) in [
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
    ] {
        // The first needs a privilege and ignores the system's limit.
        if sys::set_option(fd, libc::SOL_SOCKET, force, wish).is_err() {
            let _ = sys::set_option(fd, libc::SOL_SOCKET, plain, wish);
        }
    }
}

/// The source address that the kernel uses towards `peer`, and the bytes of an IP packet on that path: what a connected socket knows. (The port's
/// own socket must stay unconnected.)
fn route(from: IpAddr, peer: SocketAddr) -> io::Result<(IpAddr, usize)> {
    let probe = UdpSocket::bind((from, 0))?;
    probe.connect(peer)?;
    let (level, name) = if peer.is_ipv4() {
        (libc::IPPROTO_IP, libc::IP_MTU)
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU)
    };
    let mtu = sys::get_option(probe.as_fd(), level, name)?;
    Ok((probe.local_addr()?.ip(), mtu.max(0) as usize))
}

/// The MTU of the interface with our address; of all that have one, the smallest, if the port listens on all. 1500 where nothing is known.
fn interface_mtu(local: SocketAddr) -> usize {
    let everywhere = local.ip().is_unspecified();
    let ours = |ip: IpAddr| {
        if everywhere {
            ip.is_ipv4() == local.is_ipv4() && !ip.is_loopback()
        } else {
            // All of 127.0.0.0/8 is loopback's.
            ip == local.ip() || ip.is_loopback() && local.ip().is_loopback()
        }
    };
    smallest_mtu(ours).unwrap_or(1500)
}

/// The MTU of the interface between this host and itself.
fn loopback_mtu() -> usize {
    smallest_mtu(|ip| ip.is_loopback()).unwrap_or(0)
}

/// The smallest MTU of the interfaces with such an address.
fn smallest_mtu(such: impl Fn(IpAddr) -> bool) -> Option<usize> {
    let mtu = |name: &str| {
        let answer = sys::interface(name, libc::SIOCGIFMTU).ok()?;
        let mtu = i32::from_ne_bytes([answer[0], answer[1], answer[2], answer[3]]);
        usize::try_from(mtu).ok()
    };
    sys::interface_addresses()
        .unwrap_or_default()
        .iter()
        .filter(|(_, ip)| such(*ip))
        .filter_map(|(name, _)| mtu(name))
        .min()
}

/// Why a bind failed.
fn bind_error(addr: SocketAddr, source: io::Error) -> PortError {
    match source.raw_os_error() {
        Some(libc::EADDRNOTAVAIL) => PortError::NotLocal { addr },
        Some(libc::EADDRINUSE) => {
            let (holder, remedy) = match inode_of(addr) {
                // Sockets of the kernel itself have no inode.
                Some(0) => (
                    "the kernel itself (most likely the rdma_rxe driver)".to_owned(),
                    "take another UDP port between Doorbell peers, or remove the device (`rdma link`, then `rdma link delete NAME`)",
                ),
                Some(inode) => (
                    match process_of(inode) {
                        Some(process) => format!("process {process}"),
                        None => "a process of another user".to_owned(),
                    },
                    "stop it, take another UDP port (port 0 takes any), or share it (`share` on all of them)",
                ),
                None => (
                    "another socket".to_owned(),
                    "see `ss -ulnp`, or take another UDP port (port 0 takes any)",
                ),
            };
            PortError::InUse {
                addr,
                holder,
                remedy,
            }
        }
        _ => PortError::system(format!("binding a UDP socket to {addr}"), source),
    }
}

/// The inode of a socket that holds the UDP port of `addr`.
fn inode_of(addr: SocketAddr) -> Option<u64> {
    let port = format!("{:04X}", addr.port());
    ["/proc/net/udp", "/proc/net/udp6"]
        .into_iter()
        .find_map(|table| {
            let text = std::fs::read_to_string(table).ok()?;
            text.lines().skip(1).find_map(|line| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let (_, held) = fields.get(1)?.rsplit_once(':')?;
                if held != port {
                    return None;
                }
                fields.get(9)?.parse().ok()
            })
        })
}

/// Number and name of the process that has the socket with this inode open, if this process may look.
fn process_of(inode: u64) -> Option<String> {
    let link = format!("socket:[{inode}]");
    std::fs::read_dir("/proc")
        .ok()?
        .flatten()
        .find_map(|process| {
            let pid: u32 = process.file_name().to_str()?.parse().ok()?;
            let has = std::fs::read_dir(process.path().join("fd"))
                .ok()?
                .flatten()
                .any(|fd| {
                    std::fs::read_link(fd.path()).is_ok_and(|l| l.as_os_str() == link.as_str())
                });
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            has.then(|| format!("{pid} ({})", name.trim()))
        })
}
