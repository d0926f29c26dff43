//! The headers below the transport, for ports that make whole frames: Ethernet, ARP, IPv4, IPv6, UDP, neighbour discovery.
//! Plain values in and out; options, extension headers and VLAN tags are refused by whoever meets them.

use super::{be16, be32};

/// Ethertype of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// Ethertype of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// Ethertype of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// Ethertype of an 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;
/// IP protocol number of UDP.
pub const PROTOCOL_UDP: u8 = 17;
/// IP protocol number of ICMP.
pub const PROTOCOL_ICMP: u8 = 1;
/// IP protocol number of ICMPv6.
pub const PROTOCOL_ICMPV6: u8 = 58;

/// An Ethernet header (14 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// Destination address.
    pub dst: [u8; 6],
    /// Source address.
    pub src: [u8; 6],
    /// What follows.
    pub ethertype: u16,
}

impl Ethernet {
    /// Bytes of the header.
    pub const LEN: usize = 14;

    /// The header and what follows it; `None` if too short.
    pub fn parse(frame: &[u8]) -> Option<(Self, &[u8])> {
        let (h, rest) = frame.split_first_chunk::<{ Self::LEN }>()?;
        Some((
            Self {
                dst: [h[0], h[1], h[2], h[3], h[4], h[5]],
                src: [h[6], h[7], h[8], h[9], h[10], h[11]],
                ethertype: be16(h, 12),
            },
            rest,
        ))
    }

    /// The bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..6].copy_from_slice(&self.dst);
        out[6..12].copy_from_slice(&self.src);
        out[12..].copy_from_slice(&self.ethertype.to_be_bytes());
        out
    }
}

/// An IPv4 header without options (20 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4 {
    /// Type of service: DSCP and ECN.
    pub tos: u8,
    /// Bytes of the datagram, header included, as received; emitting computes it.
    pub total_len: u16,
    /// Identification.
    pub id: u16,
    /// Don't fragment.
    pub dont_fragment: bool,
    /// Time to live.
    pub ttl: u8,
    /// What follows.
    pub protocol: u8,
    /// Source address.
    pub src: [u8; 4],
    /// Destination address.
    pub dst: [u8; 4],
}

impl Default for Ipv4 {
    /// UDP, not to be fragmented, identification 0, 64 hops.
    fn default() -> Self {
        Self {
            tos: 0,
            total_len: 0,
            id: 0,
            dont_fragment: true,
            ttl: 64,
            protocol: PROTOCOL_UDP,
            src: [0; 4],
            dst: [0; 4],
        }
    }
}

impl Ipv4 {
    /// Bytes of the header.
    pub const LEN: usize = 20;

    /// The header and its payload, cut to the length in the header. `None`: too short, another version, options, a fragment, or a wrong
    /// header checksum.
    pub fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let h = bytes.first_chunk::<{ Self::LEN }>()?;
        let total_len = be16(h, 2);
        let payload = bytes.get(Self::LEN..usize::from(total_len))?;
        let fragment = be16(h, 6) & 0x3fff != 0;
        if h[0] != 0x45 || fragment || checksum(0, h) != 0 {
            return None;
        }
        Some((
            Self {
                tos: h[1],
                total_len,
                id: be16(h, 4),
                dont_fragment: h[6] & 0x40 != 0,
                ttl: h[8],
                protocol: h[9],
                src: [h[12], h[13], h[14], h[15]],
                dst: [h[16], h[17], h[18], h[19]],
            },
            payload,
        ))
    }

    /// The bytes for a payload of `payload_len`, with the checksum left 0.
    #[inline]
    pub(super) fn emit_raw(&self, payload_len: u16) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = 0x45;
        out[1] = self.tos;
        out[2..4].copy_from_slice(&(Self::LEN as u16).wrapping_add(payload_len).to_be_bytes());
        out[4..6].copy_from_slice(&self.id.to_be_bytes());
        out[6] = u8::from(self.dont_fragment) << 6;
        out[8] = self.ttl;
        out[9] = self.protocol;
        out[12..16].copy_from_slice(&self.src);
        out[16..].copy_from_slice(&self.dst);
        out
    }

    /// The bytes for a payload of `payload_len`.
    pub fn emit(&self, payload_len: u16) -> [u8; Self::LEN] {
        let mut out = self.emit_raw(payload_len);
        let sum = checksum(0, &out);
        out[10..12].copy_from_slice(&sum.to_be_bytes());
        out
    }
}

/// An IPv6 header (40 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6 {
    /// Traffic class: DSCP and ECN.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow: u32,
    /// What follows.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub src: [u8; 16],
    /// Destination address.
    pub dst: [u8; 16],
}

impl Default for Ipv6 {
    /// UDP, 64 hops.
    fn default() -> Self {
        Self {
            traffic_class: 0,
            flow: 0,
            next_header: PROTOCOL_UDP,
            hop_limit: 64,
            src: [0; 16],
            dst: [0; 16],
        }
    }
}

impl Ipv6 {
    /// Bytes of the header.
    pub const LEN: usize = 40;

    /// The header and its payload, cut to the length in the header; `None` if too short or of another version.
    pub fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (h, rest) = bytes.split_first_chunk::<{ Self::LEN }>()?;
        let first = be32(h, 0);
        if first >> 28 != 6 {
            return None;
        }
        let payload = rest.get(..usize::from(be16(h, 4)))?;
        let (mut src, mut dst) = ([0; 16], [0; 16]);
        src.copy_from_slice(&h[8..24]);
        dst.copy_from_slice(&h[24..]);
        Some((
            Self {
                traffic_class: (first >> 20) as u8,
                flow: first & 0xf_ffff,
                next_header: h[6],
                hop_limit: h[7],
                src,
                dst,
            },
            payload,
        ))
    }

    /// The bytes for a payload of `payload_len`.
    #[inline]
    pub fn emit(&self, payload_len: u16) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let first = 6 << 28 | u32::from(self.traffic_class) << 20 | self.flow & 0xf_ffff;
        out[..4].copy_from_slice(&first.to_be_bytes());
        out[4..6].copy_from_slice(&payload_len.to_be_bytes());
        out[6] = self.next_header;
        out[7] = self.hop_limit;
        out[8..24].copy_from_slice(&self.src);
        out[24..].copy_from_slice(&self.dst);
        out
    }

    /// The sum over the pseudo header that UDP and ICMPv6 checksums begin with.
    pub fn pseudo_sum(&self, payload_len: u32) -> u32 {
        let mut sum = sum(0, &self.src);
        sum = self::sum(sum, &self.dst);
        sum = self::sum(sum, &payload_len.to_be_bytes());
        self::sum(sum, &[0, 0, 0, self.next_header])
    }
}

/// A UDP header (8 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp {
    /// Source port.
    pub src: u16,
    /// Destination port.
    pub dst: u16,
    /// Checksum; 0: none.
    pub checksum: u16,
}

impl Udp {
    /// Bytes of the header.
    pub const LEN: usize = 8;

    /// The header and its payload, cut to the length in the header; `None` if too short.
    pub fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let h = bytes.first_chunk::<{ Self::LEN }>()?;
        let payload = bytes.get(Self::LEN..usize::from(be16(h, 4)))?;
        Some((
            Self {
                src: be16(h, 0),
                dst: be16(h, 2),
                checksum: be16(h, 6),
            },
            payload,
        ))
    }

    /// The bytes for a payload of `payload_len`.
    pub fn emit(&self, payload_len: u16) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..2].copy_from_slice(&self.src.to_be_bytes());
        out[2..4].copy_from_slice(&self.dst.to_be_bytes());
        out[4..6].copy_from_slice(&(Self::LEN as u16).wrapping_add(payload_len).to_be_bytes());
        out[6..].copy_from_slice(&self.checksum.to_be_bytes());
        out
    }
}

/// An ARP packet for IPv4 over Ethernet (RFC 826).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// 1 request, 2 reply.
    pub operation: u16,
    /// Sender's Ethernet address.
    pub sender_mac: [u8; 6],
    /// Sender's IPv4 address.
    pub sender_ip: [u8; 4],
    /// Target's Ethernet address; zero in a request.
    pub target_mac: [u8; 6],
    /// Target's IPv4 address.
    pub target_ip: [u8; 4],
}

impl Arp {
    /// Bytes of the packet.
    pub const LEN: usize = 28;
    const KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];

    /// Reads it; `None` if too short or for other networks.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let b = bytes.first_chunk::<{ Self::LEN }>()?;
        if b[..6] != Self::KIND {
            return None;
        }
        let mac = |at: usize| [b[at], b[at + 1], b[at + 2], b[at + 3], b[at + 4], b[at + 5]];
        let ip = |at: usize| [b[at], b[at + 1], b[at + 2], b[at + 3]];
        Some(Self {
            operation: be16(b, 6),
            sender_mac: mac(8),
            sender_ip: ip(14),
            target_mac: mac(18),
            target_ip: ip(24),
        })
    }

    /// The bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..6].copy_from_slice(&Self::KIND);
        out[6..8].copy_from_slice(&self.operation.to_be_bytes());
        out[8..14].copy_from_slice(&self.sender_mac);
        out[14..18].copy_from_slice(&self.sender_ip);
        out[18..24].copy_from_slice(&self.target_mac);
        out[24..].copy_from_slice(&self.target_ip);
        out
    }
}

/// Neighbour solicitation (135) or advertisement (136) of ICMPv6, with one link-layer address option (RFC 4861).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// An advertisement, not a solicitation.
    pub advertisement: bool,
    /// The address that is asked for, or answered for.
    pub target: [u8; 16],
    /// The link-layer address in the option: the sender's, or the target's.
    pub mac: Option<[u8; 6]>,
}

impl Neighbour {
    /// Bytes of what is emitted: header, target, one option.
    pub const LEN: usize = 32;

    /// Reads an ICMPv6 message; `None` if it is neither, or too short. The checksum is the caller's to check.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let fixed = bytes.first_chunk::<24>()?;
        let advertisement = match fixed[0] {
            135 => false,
            136 => true,
            _ => return None,
        };
        let mut target = [0; 16];
        target.copy_from_slice(&fixed[8..]);
        let want = 1 + u8::from(advertisement);
        let mut mac = None;
        let mut options = &bytes[24..];
        while let [kind, eighths, ..] = *options
            && eighths != 0
            && let Some(option) = options.get(..usize::from(eighths) * 8)
        {
            if kind == want
                && let Some(address) = option.get(2..8)
            {
                let mut found = [0; 6];
                found.copy_from_slice(address);
                mac = Some(found);
            }
            options = &options[option.len()..];
        }
        Some(Self {
            advertisement,
            target,
            mac,
        })
    }

    /// The bytes, with the checksum for `ip`. An advertisement is solicited and overrides.
    pub fn emit(&self, ip: &Ipv6) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = 135 + u8::from(self.advertisement);
        out[4] = if self.advertisement { 0x60 } else { 0 };
        out[8..24].copy_from_slice(&self.target);
        out[24] = 1 + u8::from(self.advertisement);
        out[25] = 1;
        out[26..].copy_from_slice(&self.mac.unwrap_or_default());
        let sum = checksum(ip.pseudo_sum(Self::LEN as u32), &out);
        out[2..4].copy_from_slice(&sum.to_be_bytes());
        out
    }
}

/// Adds 16-bit words to a one's-complement sum.
pub fn sum(start: u32, bytes: &[u8]) -> u32 {
    let mut total = u64::from(start);
    let mut words = bytes.chunks_exact(2);
    for word in &mut words {
        total += u64::from(be16(word, 0));
    }
    if let [last] = *words.remainder() {
        total += u64::from(last) << 8;
    }
    while total >> 32 != 0 {
        total = (total & 0xffff_ffff) + (total >> 32);
    }
    total as u32
}

/// The internet checksum (RFC 1071) of `bytes`, begun with `start`. Over a header that contains its checksum: 0 if it is right.
pub fn checksum(start: u32, bytes: &[u8]) -> u16 {
    let mut total = sum(start, bytes);
    while total >> 16 != 0 {
        total = (total & 0xffff) + (total >> 16);
    }
    !(total as u16)
}
