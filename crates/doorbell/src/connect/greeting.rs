//! What each side says of itself, and what follows when both are put together.
//!
//! The greeting names the release, the host and the job, and offers a RoCE port with its limits. [`Offer::agree`] is the
//! negotiation: the smaller path MTU (a larger one than InfiniBand has between two on one host), as many outstanding reads as the other side answers, segmentation offload only
//! between two that know it, checksums of headers alone between two such on one host. Everything is little-endian; strings have one byte of length.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use super::error::{Refusal, RefusalKind};

/// Path MTUs that InfiniBand knows, in bytes of payload.
pub const PATH_MTUS: [u16; 5] = [256, 512, 1024, 2048, 4096];
/// Bytes of an encoded [`Offer`].
pub(crate) const OFFER: usize = 32;
const FLAG_SEGMENTS: u16 = 1;
const FLAG_LIGHT: u16 = 2;
const FLAG_LONG: u16 = 4;
/// Payload of a packet between two Doorbells on one host that both take such, and were not told of a path MTU: as much as a datagram has room for.
pub const LONG_MTU: u16 = 61_696;
/// Longest string of a greeting.
const MAX_TEXT: usize = 255;

/// What one side's RoCE port can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Where its packets are to be sent: its address (the GID) and UDP port.
    pub address: SocketAddr,
    /// Largest payload of a packet that it takes: one of [`PATH_MTUS`].
    pub path_mtu: u16,
    /// READs and atomics that it wants to have outstanding as requester.
    pub max_rd_atomic: u8,
    /// READs and atomics for which it has room as responder.
    pub max_dest_rd_atomic: u8,
    /// Local ACK time-out: 4.096 µs times two to this power (0: none; at most 31).
    pub ack_timeout: u8,
    /// How often it repeats before it gives up, at most 7.
    pub retry_count: u8,
    /// How often it repeats when no receive is posted, at most 7 (7: without end).
    pub rnr_retry: u8,
    /// Code of the time that it asks for when no receive is posted, at most 31.
    pub min_rnr_timer: u8,
    /// It takes segments that the other side's kernel cut (UDP checksums that are not zero, IP ids that count).
    pub segments: bool,
    /// It takes packets of its own host whose ICRC covers the headers alone.
    pub light: bool,
    /// And of path MTU [`LONG_MTU`], where `path_mtu` is 4096 at both ends.
    pub long: bool,
}

/// What holds between two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// This side.
    pub local: Offer,
    /// The other side.
    pub remote: Offer,
    /// Payload of a packet.
    pub path_mtu: u16,
    /// READs and atomics that this side may have outstanding.
    pub max_rd_atomic: u8,
    /// Segmentation offload may be used.
    pub segments: bool,
    /// Both are on one host, and agreed that the ICRC of long packets covers the headers alone.
    pub light: bool,
}

impl Offer {
    /// Puts both sides together, or says why they do not go together.
    pub fn agree(&self, theirs: &Self) -> Result<Agreed, Refusal> {
        if self.address.is_ipv4() != theirs.address.is_ipv4() {
            return Err(Refusal::new(
                RefusalKind::Link,
                format!(
                    "RoCE packets cannot go from {} to {}: use IPv4, or IPv6, on both sides",
                    self.address, theirs.address
                ),
            ));
        }
        let light = self.light
            && theirs.light
            && doorbell_hca::roce::within_host(self.address.ip(), theirs.address.ip());
        Ok(Agreed {
            local: *self,
            remote: *theirs,
            path_mtu: match self.path_mtu.min(theirs.path_mtu) {
                4096 if light && self.long && theirs.long => LONG_MTU,
                mtu => mtu,
            },
            max_rd_atomic: self.max_rd_atomic.min(theirs.max_dest_rd_atomic),
            segments: self.segments && theirs.segments,
            light,
        })
    }

    /// How long this side waits for an acknowledgement before it repeats; `None`: for ever.
    pub fn ack_time(&self) -> Option<Duration> {
        match self.ack_timeout {
            0 => None,
            code => Some(Duration::from_nanos(4096 << code.min(31))),
        }
    }

    /// The bytes.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let ip = match self.address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        out.extend_from_slice(&ip.octets());
        out.extend_from_slice(&self.address.port().to_le_bytes());
        out.extend_from_slice(&self.path_mtu.to_le_bytes());
        let flag = |set, flag| if set { flag } else { 0 };
        let flags = flag(self.segments, FLAG_SEGMENTS)
            | flag(self.light, FLAG_LIGHT)
            | flag(self.long, FLAG_LONG);
        out.extend_from_slice(&flags.to_le_bytes());
        out.extend_from_slice(&[
            self.max_rd_atomic,
            self.max_dest_rd_atomic,
            self.ack_timeout,
            self.retry_count,
            self.rnr_retry,
            self.min_rnr_timer,
            0,
            0,
            0,
            0,
        ]);
    }

    /// Reads and checks the bytes; an error names the field, its value, and what it may be.
    pub(crate) fn decode(bytes: &[u8; OFFER]) -> Result<Self, (&'static str, u64, &'static str)> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[..16]);
        let port = u16_at(16);
        if port == 0 {
            return Err(("UDP port", 0, "1 to 65535"));
        }
        let ip = ip_of_gid(gid);
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(("address", 0, "the address of one host"));
        }
        let path_mtu = u16_at(18);
        if !PATH_MTUS.contains(&path_mtu) {
            return Err(("path MTU", path_mtu.into(), "256, 512, 1024, 2048 or 4096"));
        }
        let flags = u16_at(20);
        let small = |at: usize, name, max: u8, allowed| match bytes[at] {
            value if value <= max => Ok(value),
            value => Err((name, u64::from(value), allowed)),
        };
        if flags & !(FLAG_SEGMENTS | FLAG_LIGHT | FLAG_LONG) != 0 || bytes[28..] != [0; 4] {
            return Err(("reserved bits", flags.into(), "0"));
        }
        Ok(Self {
            address: SocketAddr::new(ip, port),
            path_mtu,
            max_rd_atomic: bytes[22],
            max_dest_rd_atomic: bytes[23],
            ack_timeout: small(24, "ACK time-out", 31, "0 to 31")?,
            retry_count: small(25, "retry count", 7, "0 to 7")?,
            rnr_retry: small(26, "RNR retry count", 7, "0 to 7")?,
            min_rnr_timer: small(27, "RNR timer", 31, "0 to 31")?,
            segments: flags & FLAG_SEGMENTS != 0,
            light: flags & FLAG_LIGHT != 0,
            long: flags & FLAG_LONG != 0,
        })
    }
}

impl fmt::Display for Agreed {
    /// One line that says what was negotiated.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (local, remote) = (&self.local, &self.remote);
        write!(
            f,
            "RoCEv2 {} <-> {}, path MTU {}",
            local.address, remote.address, self.path_mtu
        )?;
        if local.path_mtu != remote.path_mtu {
            write!(f, " (here {}, there {})", local.path_mtu, remote.path_mtu)?;
        }
        write!(f, ", {} reads outstanding", self.max_rd_atomic)?;
        match local.ack_time() {
            Some(time) => write!(
                f,
                ", ACK time-out {:.1} ms, {} retries",
                time.as_secs_f64() * 1e3,
                local.retry_count
            )?,
            None => f.write_str(", no ACK time-out")?,
        }
        f.write_str(match self.segments {
            true => ", segmentation offload",
            false => ", no segmentation offload",
        })?;
        if self.light {
            f.write_str(", one host: ICRCs of long packets cover headers alone")?;
        }
        Ok(())
    }
}

/// The address in a GID of RoCEv2.
pub fn ip_of_gid(gid: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(gid);
    match v6.to_ipv4_mapped() {
        Some(v4) => IpAddr::V4(v4),
        None => IpAddr::V6(v6),
    }
}

/// The GID of an address: IPv4 as `::ffff:a.b.c.d`.
pub fn gid_of_ip(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// What a side says of itself when it connects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Greeting {
    /// The job it belongs to. Two that both name one must name the same.
    pub job: String,
    /// What it wants to do, in words that both sides make alike. Two that both say something must say the same.
    pub purpose: String,
    /// Its HCA; see [`Endpoint::hca`](crate::Endpoint::hca).
    pub hca: u64,
    /// Its RoCE port, if that is the link it wants.
    pub offer: Option<Offer>,
}

/// A greeting as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// Release of the other side.
    pub release: String,
    /// Its host's name.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// What it wants.
    pub greeting: Greeting,
}

fn cut(text: &str) -> &[u8] {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text.as_bytes()[..end]
}

impl Greeting {
    /// The bytes of this side's greeting.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let host = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        let mut out = Vec::new();
        for text in [env!("CARGO_PKG_VERSION"), &host, &self.job, &self.purpose] {
            let text = cut(text);
            out.push(text.len() as u8);
            out.extend_from_slice(text);
        }
        out.extend_from_slice(&std::process::id().to_le_bytes());
        out.extend_from_slice(&self.hca.to_le_bytes());
        out.push(self.offer.is_some().into());
        if let Some(offer) = &self.offer {
            offer.encode(&mut out);
        }
        out
    }

    /// Why this side does not go together with `other`, if so. The words name both sides' values.
    pub(crate) fn check(&self, other: &Self) -> Result<Option<Agreed>, Refusal> {
        let differ = |a: &str, b: &str| !a.is_empty() && !b.is_empty() && cut(a) != cut(b);
        if differ(&self.job, &other.job) {
            return Err(Refusal::new(
                RefusalKind::Job,
                format!(
                    "job {:?} is not job {:?}: connect to the right server, or give both sides the same job",
                    other.job, self.job
                ),
            ));
        }
        if differ(&self.purpose, &other.purpose) {
            return Err(Refusal::new(
                RefusalKind::Purpose,
                format!(
                    "{:?} is not {:?}: give both sides the same test and parameters",
                    other.purpose, self.purpose
                ),
            ));
        }
        match (&self.offer, &other.offer) {
            (Some(mine), Some(theirs)) => mine.agree(theirs).map(Some),
            (None, None) => Ok(None),
            (mine, _) => {
                let (with, without) = match mine {
                    Some(_) => ("this side", "the other side"),
                    None => ("the other side", "this side"),
                };
                Err(Refusal::new(
                    RefusalKind::Link,
                    format!(
                        "{with} has a RoCE port and {without} has none: choose the same link on both sides"
                    ),
                ))
            }
        }
    }
}

impl Introduction {
    /// Reads what arrived; an error says what is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut rest = bytes;
        let mut text = |name: &str| {
            let (&len, tail) = rest.split_first().ok_or(format!("no {name}"))?;
            let (text, tail) = tail
                .split_at_checked(len.into())
                .ok_or(format!("half of its {name}"))?;
            rest = tail;
            let text = std::str::from_utf8(text).map_err(|_| format!("a {name} of no text"))?;
            if text.chars().any(char::is_control) {
                return Err(format!("a {name} with control characters"));
            }
            Ok(text.to_owned())
        };
        let (release, host) = (text("release")?, text("host name")?);
        let (job, purpose) = (text("job")?, text("purpose")?);
        let (pid, rest) = rest.split_first_chunk::<4>().ok_or("no process id")?;
        let (hca, rest) = rest.split_first_chunk::<8>().ok_or("no HCA number")?;
        let (&has_offer, rest) = rest.split_first().ok_or("no word about a port")?;
        let offer = match (has_offer, rest) {
            (0, []) => None,
            (1, rest) => {
                let bytes = <&[u8; OFFER]>::try_from(rest)
                    .map_err(|_| format!("{} bytes about its port", rest.len()))?;
                let offer = Offer::decode(bytes).map_err(|(field, found, allowed)| {
                    format!("{field} {found} (allowed: {allowed})")
                })?;
                Some(offer)
            }
            (other, _) => return Err(format!("{other} as the number of its ports")),
        };
        Ok(Self {
            release,
            host,
            pid: u32::from_le_bytes(*pid),
            greeting: Greeting {
                job,
                purpose,
                hca: u64::from_le_bytes(*hca),
                offer,
            },
        })
    }
}

impl fmt::Display for Introduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (doorbell {})", self.host, self.release)
    }
}
