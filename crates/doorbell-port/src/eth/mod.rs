//! Ports that make whole Ethernet frames: a raw socket on an interface, and the sockets through which QEMU gives a guest a network.
//!
//! All headers are ours, so the ICRC of what arrives is checked in full, and source ports are chosen per path.

mod dgram;
mod keeper;
mod raw;
mod station;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use doorbell_wire::roce::icrc::{self, Ip};
use doorbell_wire::roce::net::{
    ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ethernet, Ipv4, Ipv6, PROTOCOL_UDP, Udp, checksum,
};
use doorbell_wire::roce::{Bth, ICRC_LEN};

use crate::Port;
use crate::arrived::{Check, Origin, Received, RecvBatch};
use crate::batch::{Outgoing, SendBatch};
use crate::counters::PortCounters;
use crate::describe::Description;
use crate::error::{PortError, Result};
use crate::path::{self, Path, PathRequest};
use crate::sys::{self, Arrival, Control, MESSAGES, Message, Piece};
use station::{Mac, Seen, Station};

pub use dgram::{DgramOptions, Place};
pub use raw::RawOptions;

/// Bytes of a frame with the longest packet.
const FRAME: usize = Ethernet::LEN + Ipv6::LEN + Udp::LEN + 4096 + 64 + ICRC_LEN + 64;
/// Packets that wait for the port while only the keeper looks.
const PARKED: usize = 1024;
/// Frames of one sending call.
const CALL: usize = 32;
/// Time between two questions for a neighbour.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// A port that makes whole frames.
#[derive(Debug)]
pub struct EthPort {
    shared: Arc<Mutex<Inner>>,
    /// The same socket, for those who wait.
    fd: OwnedFd,
    local: SocketAddr,
    mtu: usize,
    title: String,
    choices: Vec<(&'static str, String)>,
    loopback: bool,
    arrivals: Box<[Arrival]>,
    heads: Vec<Head>,
    /// Answers for our address while nobody drives the port.
    _keeper: Option<keeper::Keeper>,
    /// Keeps the kernel from refusing our packets on our behalf.
    _claim: Option<std::net::UdpSocket>,
}

/// What the port and its keeper share.
#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    /// Where a socket that has no peer yet is to be connected to.
    connect: Option<dgram::Place>,
    station: Station,
    counters: PortCounters,
    parked: VecDeque<Vec<u8>>,
    /// Calls of [`Port::recv`]: how the keeper knows that somebody looks.
    looks: u64,
    buffer: Box<[u8]>,
}

/// Ethernet, IP and UDP header of a frame.
#[derive(Debug, Clone, Copy)]
struct Head {
    bytes: [u8; Ethernet::LEN + Ipv6::LEN + Udp::LEN],
    len: usize,
}

/// What is needed to make a port out of a socket for frames.
struct Parts {
    fd: OwnedFd,
    connect: Option<dgram::Place>,
    station: Station,
    udp_port: u16,
    ip_mtu: usize,
    loopback: bool,
    title: String,
    choices: Vec<(&'static str, String)>,
    claim: Option<std::net::UdpSocket>,
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    // The state is valid after every statement; a panic elsewhere is not a reason to stop.
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EthPort {
    fn new(parts: Parts) -> Result<Self> {
        let local = SocketAddr::new(parts.station.ip, parts.udp_port);
        let fd = parts
            .fd
            .try_clone()
            .map_err(|e| PortError::system("duplicating a socket", e))?;
        let answers = parts.station.answers;
        let shared = Arc::new(Mutex::new(Inner {
            fd: parts.fd,
            connect: parts.connect,
            station: parts.station,
            counters: PortCounters::default(),
            parked: VecDeque::new(),
            looks: 0,
            buffer: vec![0; FRAME].into_boxed_slice(),
        }));
        let keeper = if answers {
            Some(keeper::Keeper::start(&shared)?)
        } else {
            None
        };
        Ok(Self {
            fd,
            local,
            mtu: path::transport_mtu(parts.ip_mtu, local.is_ipv6()),
            title: parts.title,
            choices: parts.choices,
            loopback: parts.loopback,
            arrivals: (0..MESSAGES).map(|_| Arrival::new()).collect(),
            heads: Vec::with_capacity(CALL),
            _keeper: keeper,
            _claim: parts.claim,
            shared,
        })
    }
}

impl Inner {
    /// Sends one frame of our own making, if there is anyone to send it to.
    fn send_frame(&mut self, frame: &[u8]) {
        self.connect();
        let message = Message {
            to: None,
            pieces: std::iter::once(Piece::new(frame)),
            count: 1,
            control: Control::new(),
        };
        let _ = sys::send_messages(self.fd.as_fd(), std::iter::once(message));
    }

    fn connect(&mut self) {
        if let Some(place) = &self.connect
            && place.connect(self.fd.as_fd())
        {
            self.connect = None;
        }
    }

    /// Takes what has arrived while nobody looks: answers questions, keeps packets.
    fn pump(&mut self) {
        let mut arrival = [Arrival::new()];
        let mut answers = Vec::new();
        for _ in 0..PARKED {
            match sys::receive_messages(self.fd.as_fd(), &mut self.buffer, FRAME, &mut arrival) {
                Ok(1) => {}
                _ => break,
            }
            let frame = &self.buffer[..arrival[0].len.min(FRAME)];
            match self.station.see(frame, &mut answers) {
                Seen::Data if self.parked.len() < PARKED && !arrival[0].cut => {
                    self.parked.push_back(frame.to_vec());
                }
                Seen::Data => self.counters.receive_overruns += 1,
                Seen::Vlan => self.counters.vlan_frames += 1,
                Seen::Done => {}
            }
            for answer in std::mem::take(&mut answers) {
                self.send_frame(&answer);
            }
        }
    }
}

/// The packet in a frame for `local`, if it is one: where from, and where its transport headers begin and end, without the ICRC.
fn open_frame(
    frame: &[u8],
    local: SocketAddr,
    counters: &mut PortCounters,
) -> Option<(Origin, SocketAddr, usize, usize, u16)> {
    let (ethernet, rest) = Ethernet::parse(frame)?;
    let (ip, datagram, src, tos, id): (Ip, &[u8], IpAddr, u8, u16) = match ethernet.ethertype {
        ETHERTYPE_IPV4 => {
            let (ip, rest) = Ipv4::parse(rest)?;
            if ip.protocol != PROTOCOL_UDP || IpAddr::from(ip.dst) != local.ip() {
                return None;
            }
            (Ip::V4(ip), rest, IpAddr::from(ip.src), ip.tos, ip.id)
        }
        ETHERTYPE_IPV6 => {
            let (ip, rest) = Ipv6::parse(rest)?;
            if ip.next_header != PROTOCOL_UDP || IpAddr::from(ip.dst) != local.ip() {
                return None;
            }
            (Ip::V6(ip), rest, IpAddr::from(ip.src), ip.traffic_class, 0)
        }
        _ => return None,
    };
    let (udp, whole) = Udp::parse(datagram)?;
    if udp.dst != local.port() {
        return None;
    }
    let Some(len) = whole.len().checked_sub(ICRC_LEN).filter(|l| *l >= Bth::LEN) else {
        counters.received_short += 1;
        return None;
    };
    let (transport, crc) = whole.split_at(len);
    let right = icrc::compute(&ip, udp.src, udp.dst, transport);
    if right.to_le_bytes() != *crc {
        counters.icrc_errors += 1;
        return None;
    }
    counters.received_packets += 1;
    counters.received_bytes += whole.len() as u64;
    let origin = Origin {
        src: SocketAddr::new(src, udp.src),
        dst: local.ip(),
        tos,
    };
    let at = whole.as_ptr() as usize - frame.as_ptr() as usize;
    Some((origin, origin.src, at, len, id))
}

/// The headers of a packet.
fn make_head(mac: Mac, to: Mac, packet: &Outgoing<'_>) -> Head {
    let mut head = Head {
        bytes: [0; Ethernet::LEN + Ipv6::LEN + Udp::LEN],
        len: 0,
    };
    let mut push = |bytes: &[u8]| {
        head.bytes[head.len..head.len + bytes.len()].copy_from_slice(bytes);
        head.len += bytes.len();
    };
    let (local, peer) = (packet.path.local, packet.path.peer);
    let payload = (packet.bytes.len() + ICRC_LEN) as u16;
    let mut udp = Udp {
        src: local.port(),
        dst: peer.port(),
        // The ICRC is the check; RoCEv2 sends none (annex A17.3).
        checksum: 0,
    };
    let mut ethernet = Ethernet {
        dst: to,
        src: mac,
        ethertype: ETHERTYPE_IPV4,
    };
    match (local.ip(), peer.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let ip = Ipv4 {
                tos: packet.path.tos,
                id: packet.id,
                src: src.octets(),
                dst: dst.octets(),
                ..Ipv4::default()
            };
            push(&ethernet.emit());
            push(&ip.emit(payload + 8));
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            ethernet.ethertype = ETHERTYPE_IPV6;
            let ip = Ipv6 {
                traffic_class: packet.path.tos,
                src: src.octets(),
                dst: dst.octets(),
                ..Ipv6::default()
            };
            push(&ethernet.emit());
            push(&ip.emit(payload + 8));
            // A socket drops datagrams over IPv6 without a checksum. Packets are a multiple of 4 bytes, so the sum goes piecewise.
            let mut sum = ip.pseudo_sum(u32::from(payload) + 8);
            sum = doorbell_wire::roce::net::sum(sum, &udp.emit(payload));
            sum = doorbell_wire::roce::net::sum(sum, packet.bytes);
            udp.checksum = match checksum(sum, &packet.icrc) {
                0 => 0xffff,
                sum => sum,
            };
        }
        // A path has one family.
        _ => {}
    }
    push(&udp.emit(payload));
    head
}

impl Port for EthPort {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn mtu(&self) -> usize {
        self.mtu
    }

    fn path(&mut self, request: &PathRequest) -> Result<Path> {
        let peer = request.peer;
        if peer.is_ipv4() != self.local.is_ipv4() {
            return Err(PortError::Family {
                local: self.local,
                peer,
            });
        }
        if path::path_mtu(self.mtu) == 0 {
            return Err(PortError::MtuTooSmall {
                peer,
                mtu: self.mtu + 32,
            });
        }
        let begin = Instant::now();
        let mut asked: Option<Instant> = None;
        loop {
            let mut inner = lock(&self.shared);
            if self.loopback {
                let mac = inner.station.mac;
                inner.station.learn(peer.ip(), mac);
            }
            inner.pump();
            if inner.station.neighbour(peer.ip()).is_some() {
                break;
            }
            if begin.elapsed() >= request.deadline {
                return Err(PortError::NoNeighbour {
                    peer,
                    waited: request.deadline,
                });
            }
            if asked.is_none_or(|at| at.elapsed() >= ASK_AGAIN) {
                let question = inner.station.question(peer.ip());
                inner.send_frame(&question);
                asked = Some(Instant::now());
            }
            drop(inner);
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut local = self.local;
        if let Some(port) = request.source_port {
            local.set_port(port);
        }
        Ok(Path::new(request, local, self.mtu, 1))
    }

    fn send(&mut self, batch: &mut SendBatch) -> Result<usize> {
        let mut inner = lock(&self.shared);
        let inner = &mut *inner;
        let before = batch.len();
        inner.connect();
        while !batch.is_empty() {
            self.heads.clear();
            let mut unknown = false;
            for packet in batch.iter().take(CALL) {
                let Some(to) = inner.station.neighbour(packet.path.peer.ip()) else {
                    unknown = true;
                    break;
                };
                self.heads.push(make_head(inner.station.mac, to, &packet));
            }
            if self.heads.is_empty() {
                // Only a path of another port leads here.
                debug_assert!(unknown);
                inner.counters.sent_refused += 1;
                batch.consume(1);
                continue;
            }
            let mut bytes = [0u64; CALL];
            let messages =
                batch
                    .iter()
                    .zip(&self.heads)
                    .zip(&mut bytes)
                    .map(|((packet, head), bytes)| {
                        *bytes = (packet.bytes.len() + ICRC_LEN) as u64;
                        Message {
                            to: None,
                            pieces: [&head.bytes[..head.len], packet.with_icrc()]
                                .into_iter()
                                .map(Piece::new),
                            count: 2,
                            control: Control::new(),
                        }
                    });
            match sys::send_messages(self.fd.as_fd(), messages) {
                Ok(sent) => {
                    inner.counters.sent_calls += 1;
                    inner.counters.sent_packets += sent as u64;
                    inner.counters.sent_bytes += bytes[..sent].iter().sum::<u64>();
                    batch.consume(sent);
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => {
                        inner.counters.sent_full += 1;
                        break;
                    }
                    Some(libc::EINTR) => {}
                    Some(libc::EMSGSIZE) => {
                        inner.counters.sent_too_long += 1;
                        batch.consume(1);
                    }
                    // The interface is down, or the guest is not there (yet, or any more): as if the cable were out.
                    _ => {
                        inner.counters.sent_refused += 1;
                        batch.consume(1);
                    }
                },
            }
        }
        Ok(before - batch.len())
    }

    fn recv(&mut self, batch: &mut RecvBatch) -> Result<usize> {
        batch.clear();
        let mut inner = lock(&self.shared);
        let inner = &mut *inner;
        inner.looks = inner.looks.wrapping_add(1);
        while let Some(frame) = inner.parked.pop_front() {
            if let Some((origin, src, at, len, id)) =
                open_frame(&frame, self.local, &mut inner.counters)
            {
                batch.copy_in(&Received {
                    src,
                    dst: origin.dst,
                    tos: origin.tos,
                    id,
                    check: Check::Exact,
                    bytes: &frame[at..at + len],
                });
            }
        }
        let ask = batch.slots.min(MESSAGES);
        let came = sys::receive_messages(
            self.fd.as_fd(),
            &mut batch.arena,
            batch.slot,
            &mut self.arrivals[..ask],
        )
        .unwrap_or(0);
        if came == 0 {
            inner.counters.received_empty += 1;
        } else {
            inner.counters.received_calls += 1;
        }
        let mut answers = Vec::new();
        for (index, arrival) in self.arrivals[..came].iter().enumerate() {
            let from = index * batch.slot;
            if arrival.cut {
                inner.counters.received_long += 1;
                continue;
            }
            let frame = &batch.arena[from..from + arrival.len];
            match inner.station.see(frame, &mut answers) {
                Seen::Data => {
                    if let Some((origin, _, at, len, id)) =
                        open_frame(frame, self.local, &mut inner.counters)
                    {
                        batch.origin(origin);
                        batch.add(from + at, len, id, Check::Exact);
                    }
                }
                Seen::Vlan => inner.counters.vlan_frames += 1,
                Seen::Done => {}
            }
        }
        for answer in answers {
            inner.send_frame(&answer);
        }
        Ok(batch.len())
    }

    fn recv_batch(&self) -> RecvBatch {
        RecvBatch::new(FRAME.next_multiple_of(64) + 64, MESSAGES)
    }

    fn counters(&self) -> PortCounters {
        lock(&self.shared).counters
    }

    fn describe(&self) -> Description {
        let mut choices = self.choices.clone();
        choices.push((
            "MTU",
            format!(
                "transport packets of {} bytes, InfiniBand path MTU {}",
                self.mtu,
                path::path_mtu(self.mtu)
            ),
        ));
        Description {
            title: self.title.clone(),
            choices,
            guarantees: vec![
                "every packet that is sent has a right ICRC: the whole header is ours".to_owned(),
                "received packets: the full ICRC is checked, the IPv4 identification included".to_owned(),
                "one Ethernet: neighbours are asked for directly, there are no routers and no VLAN tags (tagged frames are counted and dropped)"
                    .to_owned(),
            ],
        }
    }
}
