//! The description of a QP and of memory that its peer needs: what two processes exchange to connect.
//!
//! An [`Endpoint`] is a small versioned blob. Send it over any byte channel (the session of [`crate::shm`], a
//! [`crate::Channel`], a [`crate::Bootstrap`], a message queue); it holds numbers only and gives no access by itself beyond what its keys do.
//! Treat it as a secret among the peers: whoever knows a remote key and can reach the HCA may use it.

use crate::connect::{OFFER, Offer, VerbsEnd};
use crate::mr::RemoteMr;

/// First four bytes of an encoded endpoint.
pub const ENDPOINT_MAGIC: [u8; 4] = *b"DBEP";
/// Version of the encoding.
pub const ENDPOINT_VERSION: u16 = 4;
/// Most memory regions in one endpoint.
pub const MAX_REGIONS: usize = 1024;

const HEADER: usize = 24;
const REGION: usize = 24;
/// What follows the header for [`LinkKind::Roce`]: PSN, transport, and the port.
const ROCE: usize = 8 + OFFER;
/// What follows it for [`LinkKind::Verbs`]: PSN and the device's end.
const VERBS: usize = 36;

/// Which link reaches a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[non_exhaustive]
pub enum LinkKind {
    /// The same HCA of the same process.
    Loopback = 1,
    /// Shared memory of one host.
    Shm = 2,
    /// Packets of RoCEv2.
    Roce = 3,
    /// An RDMA device.
    Verbs = 4,
}

/// What a RoCE peer must know of a QP besides its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoceEndpoint {
    /// The port that it uses.
    pub port: Offer,
    /// Number of its first packet, 24 bits.
    pub psn: u32,
    /// Unreliable Connection instead of Reliable Connection.
    pub unreliable: bool,
}

/// What a peer over an RDMA device must know of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerbsEndpoint {
    /// The device's queue pair and its address.
    pub end: VerbsEnd,
    /// Number of its first packet, 24 bits.
    pub psn: u32,
}

impl LinkKind {
    fn parse(raw: u16) -> Option<Self> {
        [Self::Loopback, Self::Shm, Self::Roce, Self::Verbs]
            .into_iter()
            .find(|k| *k as u16 == raw)
    }
}

/// How to reach one QP, and which memory its owner offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Over which link.
    pub link: LinkKind,
    /// QP number, 24 bits.
    pub qpn: u32,
    /// The HCA that the QP belongs to; random, so that a description that reached the wrong process is noticed.
    pub hca: u64,
    /// Memory that the peer may use.
    pub regions: Vec<RemoteMr>,
    /// For [`LinkKind::Roce`], and only for it: the port and the first packet's number.
    pub roce: Option<RoceEndpoint>,
    /// For [`LinkKind::Verbs`], and only for it.
    pub verbs: Option<VerbsEndpoint>,
}

/// Why an encoded endpoint was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// It does not begin with the magic.
    #[error(
        "endpoint begins with {found:02x?}, not {ENDPOINT_MAGIC:02x?}: is this channel the right one?"
    )]
    Magic {
        /// The first bytes found.
        found: Vec<u8>,
    },
    /// Another version.
    #[error(
        "endpoint version {found}, this release speaks version {ENDPOINT_VERSION}; run the same release everywhere"
    )]
    Version {
        /// The version found.
        found: u16,
    },
    /// A length, number or link that cannot be.
    #[error(
        "endpoint field {field} is {found}, allowed: {allowed}; the blob was damaged or forged"
    )]
    Field {
        /// Which field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What it may be.
        allowed: &'static str,
    },
}

impl Endpoint {
    /// The bytes to send (little-endian).
    ///
    /// # Panics
    /// With more than [`MAX_REGIONS`] regions, or with a link that [`Endpoint::roce`] does not fit.
    pub fn to_bytes(&self) -> Vec<u8> {
        assert!(
            self.regions.len() <= MAX_REGIONS,
            "an endpoint carries at most {MAX_REGIONS} regions"
        );
        assert_eq!(
            self.roce.is_some(),
            self.link == LinkKind::Roce,
            "an endpoint has a RoCE port if and only if its link is RoCE"
        );
        assert_eq!(
            self.verbs.is_some(),
            self.link == LinkKind::Verbs,
            "an endpoint has an RDMA device's end if and only if its link is verbs"
        );
        let mut out = Vec::with_capacity(HEADER + ROCE + REGION * self.regions.len());
        out.extend_from_slice(&ENDPOINT_MAGIC);
        out.extend_from_slice(&ENDPOINT_VERSION.to_le_bytes());
        out.extend_from_slice(&(self.link as u16).to_le_bytes());
        out.extend_from_slice(&self.hca.to_le_bytes());
        out.extend_from_slice(&self.qpn.to_le_bytes());
        out.extend_from_slice(&(self.regions.len() as u32).to_le_bytes());
        if let Some(roce) = &self.roce {
            out.extend_from_slice(&roce.psn.to_le_bytes());
            out.extend_from_slice(&u32::from(roce.unreliable).to_le_bytes());
            roce.port.encode(&mut out);
        }
        if let Some(verbs) = &self.verbs {
            verbs.encode(&mut out);
        }
        for region in &self.regions {
            out.extend_from_slice(&region.addr.to_le_bytes());
            out.extend_from_slice(&region.len.to_le_bytes());
            out.extend_from_slice(&region.key.to_le_bytes());
            out.extend_from_slice(&[0; 4]);
        }
        out
    }

    /// Reads what a peer sent; accepts exactly what [`Endpoint::to_bytes`] writes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EndpointError> {
        if !bytes.starts_with(&ENDPOINT_MAGIC) {
            return Err(EndpointError::Magic {
                found: bytes.iter().take(4).copied().collect(),
            });
        }
        let field = |field, found, allowed| EndpointError::Field {
            field,
            found,
            allowed,
        };
        let short = || {
            field(
                "length",
                bytes.len() as u64,
                "24 bytes, 40 about RoCE or 36 about verbs, and 24 a region",
            )
        };
        let u16_at = |at: usize| {
            bytes
                .get(at..at + 2)
                .and_then(<[u8]>::first_chunk::<2>)
                .copied()
                .map(u16::from_le_bytes)
        };
        let u32_at = |at: usize| {
            bytes
                .get(at..at + 4)
                .and_then(<[u8]>::first_chunk::<4>)
                .copied()
                .map(u32::from_le_bytes)
        };
        let u64_at = |at: usize| {
            bytes
                .get(at..at + 8)
                .and_then(<[u8]>::first_chunk::<8>)
                .copied()
                .map(u64::from_le_bytes)
        };
        let version = u16_at(4).ok_or_else(short)?;
        if version != ENDPOINT_VERSION {
            return Err(EndpointError::Version { found: version });
        }
        let link = u16_at(6).ok_or_else(short)?;
        let link = LinkKind::parse(link).ok_or(field(
            "link",
            link.into(),
            "1 (loopback), 2 (shared memory), 3 (RoCE) or 4 (verbs)",
        ))?;
        let hca = u64_at(8).ok_or_else(short)?;
        let qpn = u32_at(16).ok_or_else(short)?;
        if qpn >> 24 != 0 {
            return Err(field("qpn", qpn.into(), "24 bits"));
        }
        let count = u32_at(20).ok_or_else(short)? as usize;
        if count > MAX_REGIONS {
            return Err(field("regions", count as u64, "at most 1024"));
        }
        let fixed = HEADER
            + match link {
                LinkKind::Roce => ROCE,
                LinkKind::Verbs => VERBS,
                _ => 0,
            };
        if bytes.len() != fixed + REGION * count {
            return Err(short());
        }
        let roce = match link {
            LinkKind::Roce => {
                let psn = u32_at(HEADER).ok_or_else(short)?;
                if psn >> 24 != 0 {
                    return Err(field("psn", psn.into(), "24 bits"));
                }
                let unreliable = match u32_at(HEADER + 4).ok_or_else(short)? {
                    0 => false,
                    1 => true,
                    other => {
                        let allowed = "0 (reliable) or 1 (unreliable)";
                        return Err(field("transport", other.into(), allowed));
                    }
                };
                let port = bytes
                    .get(HEADER + 8..)
                    .and_then(<[u8]>::first_chunk::<OFFER>)
                    .ok_or_else(short)?;
                let port = Offer::decode(port)
                    .map_err(|(name, found, allowed)| field(name, found, allowed))?;
                Some(RoceEndpoint {
                    port,
                    psn,
                    unreliable,
                })
            }
            _ => None,
        };
        let verbs = match link {
            LinkKind::Verbs => {
                let part = bytes
                    .get(HEADER..)
                    .and_then(<[u8]>::first_chunk::<VERBS>)
                    .ok_or_else(short)?;
                let decoded = VerbsEndpoint::decode(part)
                    .map_err(|(name, found, allowed)| field(name, found, allowed))?;
                Some(decoded)
            }
            _ => None,
        };
        let mut regions = Vec::with_capacity(count);
        for i in 0..count {
            let at = fixed + i * REGION;
            let addr = u64_at(at).ok_or_else(short)?;
            let len = u64_at(at + 8).ok_or_else(short)?;
            let key = u32_at(at + 16).ok_or_else(short)?;
            if addr.checked_add(len).is_none() {
                return Err(field("region length", len, "addr + length below 2^64"));
            }
            regions.push(RemoteMr { addr, len, key });
        }
        Ok(Self {
            link,
            qpn,
            hca,
            regions,
            roce,
            verbs,
        })
    }
}

impl VerbsEndpoint {
    fn encode(&self, out: &mut Vec<u8>) {
        let end = &self.end;
        out.extend_from_slice(&self.psn.to_le_bytes());
        out.extend_from_slice(&end.qpn.to_le_bytes());
        out.extend_from_slice(&end.gid);
        out.extend_from_slice(&end.lid.to_le_bytes());
        out.extend_from_slice(&end.mtu.to_le_bytes());
        let kinds = [end.ethernet.into(), end.srd.is_some().into()];
        out.extend_from_slice(&[end.reads_open, end.reads_answered]);
        out.extend_from_slice(&kinds);
        out.extend_from_slice(&end.srd.unwrap_or(0).to_le_bytes());
    }

    fn decode(bytes: &[u8; VERBS]) -> Result<Self, (&'static str, u64, &'static str)> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u24_at = |at: usize, name| {
            let value = u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
            match value >> 24 {
                0 => Ok(value),
                _ => Err((name, u64::from(value), "24 bits")),
            }
        };
        let (psn, qpn) = (u24_at(0, "psn")?, u24_at(4, "device's qpn")?);
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[8..24]);
        let mtu = u16_at(26);
        if !crate::connect::PATH_MTUS.contains(&mtu) {
            return Err(("path MTU", mtu.into(), "256, 512, 1024, 2048 or 4096"));
        }
        let ethernet = match bytes[30] {
            0 => false,
            1 => true,
            kind => {
                let allowed = "0 (InfiniBand, EFA) or 1 (Ethernet)";
                return Err(("kind of port", kind.into(), allowed));
            }
        };
        let qkey = u32::from(u16_at(32)) | u32::from(u16_at(34)) << 16;
        let srd = match (bytes[31], qkey) {
            (0, 0) => None,
            (1, qkey) => Some(qkey),
            (kind, _) => {
                let allowed = "0 (RC, without a key) or 1 (SRD)";
                return Err(("kind of queue pair", kind.into(), allowed));
            }
        };
        Ok(Self {
            end: VerbsEnd {
                qpn,
                gid,
                lid: u16_at(24),
                mtu,
                reads_open: bytes[28],
                reads_answered: bytes[29],
                ethernet,
                srd,
            },
            psn,
        })
    }
}

/// Several in one message: a length before each.
pub(crate) fn pack_endpoints(endpoints: &[Endpoint]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for endpoint in endpoints {
        let one = endpoint.to_bytes();
        bytes.extend_from_slice(&(one.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&one);
    }
    bytes
}

/// Reads what [`pack_endpoints`] wrote.
pub(crate) fn unpack_endpoints(mut bytes: &[u8]) -> Result<Vec<Endpoint>, EndpointError> {
    let mut endpoints = Vec::new();
    while let Some((len, tail)) = bytes.split_first_chunk::<4>() {
        let len = u32::from_le_bytes(*len) as usize;
        let (one, tail) = tail.split_at_checked(len).unwrap_or((&[], &[]));
        endpoints.push(Endpoint::from_bytes(one)?);
        bytes = tail;
    }
    Ok(endpoints)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Endpoint {
        Endpoint {
            link: LinkKind::Shm,
            qpn: 0xabcdef,
            hca: 0x0123_4567_89ab_cdef,
            regions: vec![
                RemoteMr {
                    addr: 0,
                    len: 4096,
                    key: 7,
                },
                RemoteMr {
                    addr: 1 << 40,
                    len: 1,
                    key: u32::MAX,
                },
            ],
            roce: None,
            verbs: None,
        }
    }

    fn over_verbs() -> Endpoint {
        Endpoint {
            link: LinkKind::Verbs,
            verbs: Some(VerbsEndpoint {
                end: VerbsEnd {
                    qpn: 0x11,
                    gid: [7; 16],
                    lid: 0x1234,
                    mtu: 1024,
                    reads_open: 16,
                    reads_answered: 4,
                    ethernet: true,
                    srd: None,
                },
                psn: 0xfffffe,
            }),
            ..sample()
        }
    }

    fn over_roce() -> Endpoint {
        Endpoint {
            link: LinkKind::Roce,
            roce: Some(RoceEndpoint {
                port: Offer {
                    address: "192.0.2.7:49152".parse().unwrap(),
                    path_mtu: 1024,
                    max_rd_atomic: 16,
                    max_dest_rd_atomic: 4,
                    ack_timeout: 14,
                    retry_count: 7,
                    rnr_retry: 7,
                    min_rnr_timer: 12,
                    segments: true,
                    light: false,
                    long: false,
                },
                psn: 0xfffffe,
                unreliable: true,
            }),
            ..sample()
        }
    }

    #[test]
    fn round_trip() {
        let e = sample();
        assert_eq!(Endpoint::from_bytes(&e.to_bytes()).unwrap(), e);
        let e = over_roce();
        assert_eq!(Endpoint::from_bytes(&e.to_bytes()).unwrap(), e);
        let mut e = over_verbs();
        assert_eq!(Endpoint::from_bytes(&e.to_bytes()).unwrap(), e);
        if let Some(verbs) = &mut e.verbs {
            verbs.end.srd = Some(0x8765_4321);
        }
        assert_eq!(Endpoint::from_bytes(&e.to_bytes()).unwrap(), e);
        let all = [sample(), over_roce(), over_verbs(), sample()];
        assert_eq!(unpack_endpoints(&pack_endpoints(&all)).unwrap(), all);
        assert!(unpack_endpoints(&[9, 0, 0, 0, 1]).is_err());
    }

    #[test]
    fn roce_fields_that_cannot_be_are_named() {
        let good = over_roce().to_bytes();
        for (at, value, name) in [
            (HEADER + 3, 1, "psn"),
            (HEADER + 4, 2, "transport"),
            (HEADER + 8 + 18, 7, "path MTU"),
            (HEADER + 8 + 25, 8, "retry count"),
            (HEADER + 8 + 20, 8, "reserved bits"),
        ] {
            let mut bad = good.clone();
            bad[at] = value;
            let error = Endpoint::from_bytes(&bad).unwrap_err();
            assert!(
                matches!(error, EndpointError::Field { field, .. } if field == name),
                "{error}"
            );
        }
    }

    #[test]
    fn fields_of_devices_that_cannot_be_are_named() {
        let good = over_verbs().to_bytes();
        for (at, value, name) in [
            (HEADER + 3, 1, "psn"),
            (HEADER + 7, 1, "device's qpn"),
            (HEADER + 26, 1, "path MTU"),
            (HEADER + 30, 2, "kind of port"),
            (HEADER + 31, 2, "kind of queue pair"),
            (HEADER + 32, 1, "kind of queue pair"),
        ] {
            let mut bad = good.clone();
            bad[at] = value;
            let error = Endpoint::from_bytes(&bad).unwrap_err();
            assert!(
                matches!(error, EndpointError::Field { field, .. } if field == name),
                "{error}"
            );
        }
    }

    #[test]
    fn refusals_name_what_was_found_and_what_is_spoken() {
        let good = sample().to_bytes();
        let mut v = good.clone();
        v[4] = 9;
        let text = Endpoint::from_bytes(&v).unwrap_err().to_string();
        assert!(
            text.contains("version 9") && text.contains(&format!("version {ENDPOINT_VERSION}")),
            "{text}"
        );
        assert!(matches!(
            Endpoint::from_bytes(b"GET / HTTP"),
            Err(EndpointError::Magic { .. })
        ));
        assert!(matches!(
            Endpoint::from_bytes(b""),
            Err(EndpointError::Magic { .. })
        ));
        let mut v = good.clone();
        v[19] = 1;
        assert!(matches!(
            Endpoint::from_bytes(&v),
            Err(EndpointError::Field { field: "qpn", .. })
        ));
        let mut v = good.clone();
        v[23] = 0xff;
        assert!(matches!(
            Endpoint::from_bytes(&v),
            Err(EndpointError::Field {
                field: "regions",
                ..
            })
        ));
        let mut v = good;
        v[HEADER..HEADER + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(
            Endpoint::from_bytes(&v),
            Err(EndpointError::Field {
                field: "region length",
                ..
            })
        ));
    }

    #[test]
    fn no_truncation_and_no_flipped_byte_panics() {
        for good in [sample(), over_roce(), over_verbs()].map(|e| e.to_bytes()) {
            for cut in 0..good.len() {
                assert!(Endpoint::from_bytes(&good[..cut]).is_err());
            }
            for at in 0..good.len() {
                for bit in 0..8 {
                    let mut bad = good.clone();
                    bad[at] ^= 1 << bit;
                    // What is accepted is what would be written.
                    if let Ok(read) = Endpoint::from_bytes(&bad) {
                        assert_eq!(Endpoint::from_bytes(&read.to_bytes()), Ok(read));
                    }
                }
            }
            let mut long = good;
            long.push(0);
            assert!(Endpoint::from_bytes(&long).is_err());
        }
    }
}
