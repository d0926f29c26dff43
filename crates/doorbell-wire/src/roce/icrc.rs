//! The invariant CRC (volume 1, 7.8.1; annex A17.3.3): CRC-32 over everything that no router changes.
//!
//! Fields that may change on the way count as ones: IPv4 type of service, time to live and checksum; IPv6 traffic class, flow label
//! and hop limit; the UDP checksum; and the byte of the base header with the congestion bits. Eight bytes of ones stand for the local route
//! header of InfiniBand. **The IPv4 identification and flags are covered**: a sender that does not control them (a UDP socket that lets
//! the kernel fragment) cannot make a valid packet, and a receiver that does not see them has to find them ([`IdSolver`]).

use crc32fast::Hasher;

use super::Bth;
use super::net::{Ipv4, Ipv6};

/// The IP header of a packet, as far as the CRC covers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ip {
    /// IPv4 without options.
    V4(Ipv4),
    /// IPv6 without extension headers.
    V6(Ipv6),
}

/// Bytes of ones in front of the IP header.
const ROUTE: usize = 8;
/// Bytes of the UDP header.
const UDP: usize = 8;

/// The CRC of a packet. `transport` is everything from the base header to the padding. `ip` and the UDP length are computed from its length
/// if the caller sends; they are what was received if the caller checks. To be stored least significant byte first.
#[inline]
pub fn compute(ip: &Ip, udp_src: u16, udp_dst: u16, transport: &[u8]) -> u32 {
    let udp_len = (UDP + transport.len() + super::ICRC_LEN) as u16;
    let mut head = [0xff; ROUTE + Ipv6::LEN + UDP + Bth::LEN];
    let mut at = ROUTE;
    match ip {
        Ip::V4(v4) => {
            let mut header = v4.emit_raw(udp_len);
            header[1] = 0xff;
            header[8] = 0xff;
            header[10..12].fill(0xff);
            head[at..at + Ipv4::LEN].copy_from_slice(&header);
            at += Ipv4::LEN;
        }
        Ip::V6(v6) => {
            let mut header = v6.emit(udp_len);
            header[0] |= 0x0f;
            header[1..4].fill(0xff);
            header[7] = 0xff;
            head[at..at + Ipv6::LEN].copy_from_slice(&header);
            at += Ipv6::LEN;
        }
    }
    head[at..at + 2].copy_from_slice(&udp_src.to_be_bytes());
    head[at + 2..at + 4].copy_from_slice(&udp_dst.to_be_bytes());
    head[at + 4..at + 6].copy_from_slice(&udp_len.to_be_bytes());
    // The UDP checksum stays ones.
    at += UDP;
    let base = transport.len().min(Bth::LEN);
    head[at..at + base].copy_from_slice(&transport[..base]);
    if base > 4 {
        head[at + 4] = 0xff;
    }
    let mut hasher = Hasher::new();
    hasher.update(&head[..at + base]);
    hasher.update(&transport[base..]);
    hasher.finalize()
}

/// Finds the IPv4 identification that a receiver could not see.
///
/// The CRC is linear: changing the identification changes it by a difference that depends on the change and on the number of bytes
/// after it. So the difference between the CRC that came and the CRC for identification 0 gives back the one identification that explains it,
/// or none. Since 2^16 of 2^32 differences are explained, a damaged packet passes with a chance of 2^-16 instead of 2^-32.
#[derive(Clone, Copy, Debug)]
pub struct IdSolver {
    transport_len: usize,
    /// x^-k modulo the polynomial, k the bits from the identification to the end.
    factor: u32,
}

/// CRC-32, reflected.
const POLYNOMIAL: u32 = 0xedb8_8320;
/// x^-1 modulo the polynomial; x^0 is the top bit.
const X_INVERSE: u32 = 0xdb71_0641;

/// The product of two polynomials modulo the CRC's.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 1 << 31;
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = b >> 1 ^ if b & 1 != 0 { POLYNOMIAL } else { 0 };
        bit >>= 1;
    }
    product
}

impl IdSolver {
    /// For packets of `transport_len` bytes from base header to padding. Costs about a microsecond: keep it for the next packet.
    pub fn new(transport_len: usize) -> Self {
        // After the identification come the rest of the IP header, the UDP header and the transport; it is itself 16 bits.
        let bits = (Ipv4::LEN - 6 + UDP + transport_len) * 8 + 16;
        let mut factor = 1 << 31;
        let mut power = X_INVERSE;
        let mut left = bits;
        while left != 0 {
            if left & 1 != 0 {
                factor = multiply(factor, power);
            }
            power = multiply(power, power);
            left >>= 1;
        }
        Self {
            transport_len,
            factor,
        }
    }

    /// The length that it was made for.
    pub const fn transport_len(&self) -> usize {
        self.transport_len
    }

    /// The identification for which the CRC is `received`, if the one for identification 0 is `for_zero`.
    #[inline]
    pub fn solve(&self, received: u32, for_zero: u32) -> Option<u16> {
        let register = multiply(received ^ for_zero, self.factor);
        // The identification entered the register's low half, first byte lowest.
        (register >> 16 == 0).then(|| (register as u16).swap_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_identification_is_found_and_damage_is_not() {
        for len in [12, 28, 37, 1052, 4160] {
            let transport: std::vec::Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let ip = |id| {
                Ip::V4(Ipv4 {
                    src: [10, 0, 0, 1],
                    dst: [10, 0, 0, 2],
                    id,
                    ..Ipv4::default()
                })
            };
            let zero = compute(&ip(0), 50_000, 4791, &transport);
            let solver = IdSolver::new(len);
            assert_eq!(solver.transport_len(), len);
            for id in [0, 1, 2, 0x00ff, 0x0100, 0x1234, 0xffff] {
                let crc = compute(&ip(id), 50_000, 4791, &transport);
                assert_eq!(solver.solve(crc, zero), Some(id), "{len} {id}");
                // A single wrong bit of the CRC is never another identification's: differences of identifications have other shapes.
                let passed = (0..32)
                    .filter(|bit| solver.solve(crc ^ 1 << bit, zero).is_some())
                    .count();
                assert_eq!(passed, 0, "{len} {id}");
            }
        }
    }
}
