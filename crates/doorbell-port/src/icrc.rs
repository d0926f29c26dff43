//! The ICRC, resumable: the part over IP and UDP headers depends on a flow's addresses, the length and the IPv4 identification only, so it is kept
//! per flow and length, and the identification enters by a table. `doorbell_wire::roce::icrc` computes the same in one go; tests compare them.

use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;

use crc32fast::Hasher;
use doorbell_wire::roce::{Bth, ICRC_LEN, PORT, icrc::IdSolver};

use crate::crc;

/// Bytes before the transport headers in the CRC's image of an IPv4 packet: 8 of ones, IP, UDP.
const V4: usize = 8 + 20 + 8;
/// The same for IPv6.
const V6: usize = 8 + 40 + 8;
/// Where the IPv4 identification is in it.
const ID: usize = 8 + 4;

/// Lengths that are remembered.
const KNOWN: usize = 8;

/// What each byte of the identification adds to the CRC of the `V4` bytes: high byte first, then low byte.
static ID_DELTA: LazyLock<[[u32; 256]; 2]> = LazyLock::new(|| {
    let crc = |high: u8, low: u8| {
        let mut image = [0; V4];
        image[ID] = high;
        image[ID + 1] = low;
        crc32fast::hash(&image)
    };
    let zero = crc(0, 0);
    [
        std::array::from_fn(|b| crc(b as u8, 0) ^ zero),
        std::array::from_fn(|b| crc(0, b as u8) ^ zero),
    ]
});

/// The ICRC of the packets of one flow.
#[derive(Clone, Debug)]
pub(crate) struct FlowCrc {
    image: [u8; V6],
    used: usize,
    /// Transport length for which `head` holds; `usize::MAX`: none yet.
    len: usize,
    head: u32,
    /// The same of a few other lengths: messages and what acknowledges them take turns.
    known: [(usize, u32); KNOWN],
    solver: Option<IdSolver>,
}

impl FlowCrc {
    /// For packets from `src` to `dst`. Addresses of different families give a checksum that nobody accepts.
    pub(crate) fn new(src: SocketAddr, dst: SocketAddr) -> Self {
        let mut image = [0xff; V6];
        let udp = match (src.ip(), dst.ip()) {
            (IpAddr::V4(s), IpAddr::V4(d)) => {
                image[8] = 0x45;
                image[ID..ID + 2].fill(0);
                image[14..16].copy_from_slice(&[0x40, 0]);
                image[17] = 17;
                image[20..24].copy_from_slice(&s.octets());
                image[24..28].copy_from_slice(&d.octets());
                V4 - 8
            }
            (s, d) => {
                let v6 = |ip: IpAddr| match ip {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                    IpAddr::V6(v6) => v6.octets(),
                };
                image[8] = 0x6f;
                image[14] = 17;
                image[16..32].copy_from_slice(&v6(s));
                image[32..48].copy_from_slice(&v6(d));
                V6 - 8
            }
        };
        image[udp..udp + 2].copy_from_slice(&src.port().to_be_bytes());
        image[udp + 2..udp + 4].copy_from_slice(&dst.port().to_be_bytes());
        Self {
            image,
            used: udp + 8,
            len: usize::MAX,
            head: 0,
            known: [(usize::MAX, 0); KNOWN],
            solver: None,
        }
    }

    /// The CRC, to be stored least significant byte first. `transport`: base header to padding; `id`: ignored for IPv6.
    #[inline]
    pub(crate) fn compute(&mut self, id: u16, transport: &[u8]) -> u32 {
        // One call for a small packet: the calls cost more than the bytes.
        let (front, rest) = transport.split_at(transport.len().min(Bth::LEN + SMALL));
        self.compute_two(id, front, rest)
    }

    /// The CRC of the headers below the transport's.
    #[inline]
    fn head(&self, id: u16) -> u32 {
        if id == 0 || self.used != V4 {
            return self.head;
        }
        let [high, low] = id.to_be_bytes();
        self.head ^ ID_DELTA[0][usize::from(high)] ^ ID_DELTA[1][usize::from(low)]
    }

    /// The same of a packet in two parts, the first of which is the headers.
    #[inline]
    pub(crate) fn compute_two(&mut self, id: u16, headers: &[u8], payload: &[u8]) -> u32 {
        let len = headers.len() + payload.len();
        if self.len != len {
            self.set_len(len);
        }
        let front = masked(self.head(id), headers);
        if payload.is_empty() {
            return front;
        }
        let mut hasher = Hasher::new_with_initial(front);
        hasher.update(payload);
        hasher.finalize()
    }

    /// The CRC that ends with the base header: what long packets ([`LIGHT`]) carry between two ports that agreed on it
    /// ([`Port::accepts_light`](crate::Port::accepts_light)). `len`: of the whole transport packet, which begins with `front`.
    #[inline]
    pub(crate) fn compute_base(&mut self, id: u16, len: usize, front: &[u8]) -> u32 {
        if self.len != len {
            self.set_len(len);
        }
        masked(self.head(id), &front[..front.len().min(Bth::LEN)])
    }

    /// As [`Self::solve`], for a [`Self::compute_base`].
    pub(crate) fn solve_base(&mut self, received: u32, len: usize, front: &[u8]) -> Option<u16> {
        if self.used != V4 {
            return None;
        }
        let zero = self.compute_base(0, len, front);
        IdSolver::new(Bth::LEN).solve(received, zero)
    }

    /// The identification that explains `received`, if one does. IPv6 has none.
    pub(crate) fn solve(&mut self, received: u32, transport: &[u8]) -> Option<u16> {
        if self.used != V4 {
            return None;
        }
        let zero = self.compute(0, transport);
        let len = transport.len();
        if self.solver.is_none_or(|s| s.transport_len() != len) {
            self.solver = Some(IdSolver::new(len));
        }
        self.solver?.solve(received, zero)
    }

    fn set_len(&mut self, transport: usize) {
        let place = transport / 4 % KNOWN;
        if self.known[place].0 != transport {
            self.known[place] = (transport, self.head_of(transport));
        }
        (self.len, self.head) = self.known[place];
    }

    #[cold]
    fn head_of(&mut self, transport: usize) -> u32 {
        let udp_len = (8 + transport + ICRC_LEN) as u16;
        let total = if self.used == V4 {
            (10, udp_len.wrapping_add(20))
        } else {
            (12, udp_len)
        };
        self.image[total.0..total.0 + 2].copy_from_slice(&total.1.to_be_bytes());
        let at = self.used - 4;
        self.image[at..at + 2].copy_from_slice(&udp_len.to_be_bytes());
        crc32fast::hash(&self.image[..self.used])
    }
}

/// Bytes after the base header that are copied with it to be hashed in one call.
const SMALL: usize = 52;

/// Packets longer than this may carry a CRC of their base header alone; in shorter ones that would save nothing.
pub(crate) const LIGHT: usize = Bth::LEN + SMALL;

/// The CRC `head`, continued over a packet's first bytes, with ones where the base header has its reserved byte.
#[inline]
fn masked(head: u32, front: &[u8]) -> u32 {
    // Shorter than any packet: there is no such byte.
    let ones = if front.len() < Bth::LEN {
        0
    } else {
        0xff << 32
    };
    if front.len() <= LIGHT {
        return crc::update(head, front, ones);
    }
    let (start, rest) = front.split_at(8);
    let mut hasher = Hasher::new_with_initial(crc::update(head, start, ones));
    hasher.update(rest);
    hasher.finalize()
}

/// The port that a RoCEv2 packet goes to unless the peers agreed on another.
pub const DEFAULT_PORT: u16 = PORT;

#[cfg(test)]
mod tests {
    use doorbell_wire::roce::icrc::{self, Ip};
    use doorbell_wire::roce::net::{Ipv4, Ipv6};

    use super::*;

    #[test]
    fn resumed_and_whole_agree() {
        for len in [12, 13, 16, 28, 64, 65, 1052, 4140] {
            let transport: Vec<u8> = (0..len).map(|i: usize| (i * 31 + 5) as u8).collect();
            let src: SocketAddr = "10.1.2.3:49441".parse().unwrap();
            let dst: SocketAddr = "10.9.8.7:4791".parse().unwrap();
            let mut flow = FlowCrc::new(src, dst);
            for id in [0, 1, 63, 255, 256, 0xabcd, 0xffff] {
                let ip = Ip::V4(Ipv4 {
                    src: [10, 1, 2, 3],
                    dst: [10, 9, 8, 7],
                    id,
                    ..Ipv4::default()
                });
                let whole = icrc::compute(&ip, 49441, 4791, &transport);
                assert_eq!(flow.compute(id, &transport), whole, "{len} {id}");
                assert_eq!(flow.solve(whole, &transport), Some(id), "{len} {id}");
                let (head, payload) = transport.split_at(len.min(28));
                assert_eq!(flow.compute_two(id, head, payload), whole, "{len} {id}");
            }
            let (src, dst): (SocketAddr, SocketAddr) = (
                "[fd00::1]:7".parse().unwrap(),
                "[fd00::2]:4791".parse().unwrap(),
            );
            let (IpAddr::V6(s), IpAddr::V6(d)) = (src.ip(), dst.ip()) else {
                unreachable!()
            };
            let ip = Ip::V6(Ipv6 {
                src: s.octets(),
                dst: d.octets(),
                ..Ipv6::default()
            });
            let mut flow = FlowCrc::new(src, dst);
            assert_eq!(
                flow.compute(9, &transport),
                icrc::compute(&ip, 7, 4791, &transport)
            );
        }
    }
}
