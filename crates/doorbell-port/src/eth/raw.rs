//! Frames on an interface of this host, through an AF_PACKET socket. Needs CAP_NET_RAW.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;

use super::station::{Mac, Station};
use super::{EthPort, Parts};
use crate::error::{PortError, Result};
use crate::sys::{self, Filter};

/// A port of raw frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawOptions {
    /// The interface.
    pub interface: String,
    /// Our IP address; the interface's own IPv4 address if not given. Another one is answered for by us.
    pub ip: Option<IpAddr>,
    /// Our UDP port.
    pub udp_port: u16,
}

impl EthPort {
    /// Opens a port on an interface.
    ///
    /// # Errors
    /// No such interface, no address, no privilege.
    pub fn raw(options: &RawOptions) -> Result<Self> {
        let name = &options.interface;
        let ask = |request, what| {
            sys::interface(name, request).map_err(|e| {
                PortError::system(
                    format!("network interface {name:?}: reading its {what} (`ip link` lists the interfaces)"),
                    e,
                )
            })
        };
        let word = |a: [u8; 24]| u32::from_ne_bytes([a[0], a[1], a[2], a[3]]);
        let index = word(ask(libc::SIOCGIFINDEX, "number")?);
        let mtu = word(ask(libc::SIOCGIFMTU, "MTU")?) as usize;
        let flags = word(ask(libc::SIOCGIFFLAGS, "flags")?) as u16;
        let hardware = ask(libc::SIOCGIFHWADDR, "hardware address")?;
        let loopback = i32::from(flags) & libc::IFF_LOOPBACK != 0;
        let kind = u16::from_ne_bytes([hardware[0], hardware[1]]);
        if kind != libc::ARPHRD_ETHER && !loopback {
            return Err(PortError::BadConfig {
                text: format!("raw:{name}"),
                what: format!(
                    "the interface is no Ethernet (type {kind}): take a UDP port on its address"
                ),
            });
        }
        let mac: Mac = [
            hardware[2],
            hardware[3],
            hardware[4],
            hardware[5],
            hardware[6],
            hardware[7],
        ];
        let ip = match options.ip {
            Some(ip) => ip,
            None => {
                let a = ask(
                    libc::SIOCGIFADDR,
                    "IPv4 address (give it one, or say ip=ADDR)",
                )?;
                IpAddr::V4(Ipv4Addr::new(a[4], a[5], a[6], a[7]))
            }
        };
        // If the address is the kernel's, the kernel answers for it, and would also refuse packets to a UDP port that nobody holds. A
        // socket that takes nothing holds it.
        let claim = UdpSocket::bind((ip, options.udp_port));
        let (claim, udp_port, answers) = match claim {
            Ok(socket) => {
                let nothing = [sys::filter(RETURN, 0, 0, 0)];
                sys::attach_filter(socket.as_fd(), libc::SO_ATTACH_FILTER, &nothing)
                    .map_err(|e| PortError::system("attaching a filter to a socket", e))?;
                let port = socket
                    .local_addr()
                    .map_err(|e| PortError::system("asking a socket for its address", e))?
                    .port();
                (Some(socket), port, false)
            }
            Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => (
                None,
                if options.udp_port == 0 {
                    crate::DEFAULT_PORT
                } else {
                    options.udp_port
                },
                true,
            ),
            Err(e) if e.raw_os_error() == Some(libc::EADDRINUSE) => {
                return Err(PortError::InUse {
                    addr: (ip, options.udp_port).into(),
                    holder: "another socket, perhaps the kernel's (rdma_rxe)".to_owned(),
                    remedy: "take another UDP port, or an address of its own (ip=ADDR)",
                });
            }
            Err(e) => return Err(PortError::system(format!("binding {ip}"), e)),
        };
        let fd = sys::packet_socket(index, &filter(ip, udp_port)).map_err(|e| {
            let why = if e.raw_os_error() == Some(libc::EPERM) {
                ": it needs CAP_NET_RAW (run as root, `setcap cap_net_raw+ep` on the program, or take a UDP port)"
            } else {
                ""
            };
            PortError::system(format!("opening a raw socket on {name}{why}"), e)
        })?;
        for option in [libc::SO_RCVBUFFORCE, libc::SO_SNDBUFFORCE] {
            // Best effort: without the privilege the buffers stay as they are.
            let _ = sys::set_option(fd.as_fd(), libc::SOL_SOCKET, option, 4 << 20);
        }
        Self::new(Parts {
            fd,
            connect: None,
            station: Station::new(mac, ip, answers),
            udp_port,
            ip_mtu: mtu,
            loopback,
            title: format!("raw Ethernet on {name}, as {ip} port {udp_port} (CAP_NET_RAW)"),
            choices: vec![(
                "answers",
                if answers {
                    "ARP, neighbour discovery and ICMP echo for its address, which is not the kernel's"
                } else {
                    "the kernel answers for the address"
                }
                .to_owned(),
            )],
            claim,
        })
    }
}

const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// Lets pass: ARP; ICMP and ICMPv6; UDP to our address and port.
fn filter(ip: IpAddr, port: u16) -> Vec<Filter> {
    let i = sys::filter;
    const ALL: u32 = 0x4_0000;
    // The kernel takes VLAN tags off before we see the frame, and remembers that there was one: such a frame is not of this network.
    let tag = (libc::SKF_AD_OFF + libc::SKF_AD_VLAN_TAG_PRESENT) as u32;
    let mut program = vec![
        i(LOAD_WORD, 0, 0, tag),
        i(IF_EQUAL, 1, 0, 0),
        i(RETURN, 0, 0, 0),
    ];
    program.extend(match ip {
        IpAddr::V4(v4) => vec![
            i(LOAD_HALF, 0, 0, 12),
            i(IF_EQUAL, 8, 0, 0x0806),
            i(IF_EQUAL, 0, 8, 0x0800),
            i(LOAD_WORD, 0, 0, 30),
            i(IF_EQUAL, 0, 6, v4.to_bits()),
            i(LOAD_BYTE, 0, 0, 23),
            i(IF_EQUAL, 3, 0, 1),
            i(IF_EQUAL, 0, 3, 17),
            i(LOAD_HALF, 0, 0, 36),
            i(IF_EQUAL, 0, 1, u32::from(port)),
            i(RETURN, 0, 0, ALL),
            i(RETURN, 0, 0, 0),
        ],
        IpAddr::V6(_) => vec![
            i(LOAD_HALF, 0, 0, 12),
            i(IF_EQUAL, 0, 6, 0x86dd),
            i(LOAD_BYTE, 0, 0, 20),
            i(IF_EQUAL, 3, 0, 58),
            i(IF_EQUAL, 0, 3, 17),
            i(LOAD_HALF, 0, 0, 56),
            i(IF_EQUAL, 0, 1, u32::from(port)),
            i(RETURN, 0, 0, ALL),
            i(RETURN, 0, 0, 0),
        ],
    });
    program
}
