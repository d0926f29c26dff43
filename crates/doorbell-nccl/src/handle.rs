//! The 128 bytes by which ranks find each other: NCCL carries every rank's to every other one, byte for byte.
//!
//! A handle says where its rank listens: a name on its host, an address for other hosts, and a secret without which nobody gets a
//! seat. Only rank 0's place is used; the others' say which hosts there are and that all speak the same version.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use doorbell::Rendezvous;

use crate::abi::HANDLE;
use crate::{Error, Result};

const MAGIC: [u8; 6] = *b"DBNCCL";
/// Changes when the bytes, the names made of them, or what the ranks tell each other afterwards, do.
const VERSION: u16 = 2;

/// What a rank shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Known to the ranks of this communicator alone.
    pub secret: [u8; 16],
    /// Its host and network name space, as one number that both ends derive alike.
    pub host: u64,
    /// Where it listens for ranks of other hosts.
    pub address: SocketAddr,
}

/// FNV-1a: short, and all that is asked of it is that damage shows.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// A number that is the same for processes which reach each other's abstract Unix sockets: one boot, one network name space.
pub(crate) fn host() -> u64 {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let net = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    hash(&[&boot, net.as_os_str().as_encoded_bytes()].concat())
}

impl Handle {
    /// The name of its Unix socket. Every user of the host can read such names, so it tells half as many bits as the secret has, mixed.
    pub fn name(&self) -> String {
        format!("@doorbell-nccl-{:016x}", hash(&self.secret))
    }

    /// Where a rank of `from` finds it.
    pub fn places(&self, from: u64) -> Vec<Rendezvous> {
        match from == self.host {
            true => vec![Rendezvous::Unix(self.name().into())],
            false => vec![Rendezvous::Tcp(self.address.to_string())],
        }
    }

    /// The bytes.
    pub fn encode(&self) -> [u8; HANDLE] {
        let mut out = [0; HANDLE];
        let ip = match self.address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        out[..6].copy_from_slice(&MAGIC);
        out[6..8].copy_from_slice(&VERSION.to_le_bytes());
        out[8..24].copy_from_slice(&self.secret);
        out[24..32].copy_from_slice(&self.host.to_le_bytes());
        out[32..48].copy_from_slice(&ip.octets());
        out[48..50].copy_from_slice(&self.address.port().to_le_bytes());
        let sum = hash(&out[..HANDLE - 8]);
        out[HANDLE - 8..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads rank `rank`'s.
    pub fn decode(bytes: &[u8; HANDLE], rank: usize) -> Result<Self> {
        let bad = |found: String| Error::Handle {
            rank,
            found,
            expected: format!("{} version {VERSION}", MAGIC.escape_ascii()),
        };
        if bytes[..6] != MAGIC {
            return Err(bad(format!(
                "it begins with \"{}\"",
                bytes[..8].escape_ascii()
            )));
        }
        let version = u16::from_le_bytes([bytes[6], bytes[7]]);
        if version != VERSION {
            return Err(bad(format!("it has version {version}")));
        }
        if bytes[HANDLE - 8..] != hash(&bytes[..HANDLE - 8]).to_le_bytes() {
            return Err(bad(
                "its check sum is wrong: it was damaged on the way".to_owned()
            ));
        }
        let (mut secret, mut host, mut ip) = ([0; 16], [0; 8], [0; 16]);
        secret.copy_from_slice(&bytes[8..24]);
        host.copy_from_slice(&bytes[24..32]);
        ip.copy_from_slice(&bytes[32..48]);
        let port = u16::from_le_bytes([bytes[48], bytes[49]]);
        Ok(Self {
            secret,
            host: u64::from_le_bytes(host),
            address: SocketAddr::new(IpAddr::V6(Ipv6Addr::from(ip)).to_canonical(), port),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(address: &str) -> Handle {
        Handle {
            secret: *b"0123456789abcdef",
            host: 0x1122_3344_5566_7788,
            address: address.parse().expect("an address"),
        }
    }

    #[test]
    fn handles_round_trip() {
        for address in ["192.0.2.7:4791", "[2001:db8::1]:65535", "127.0.0.1:1"] {
            let handle = sample(address);
            assert_eq!(Handle::decode(&handle.encode(), 0).expect("ours"), handle);
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed_and_the_rank_is_named() {
        let good = sample("192.0.2.7:4791").encode();
        for at in 0..HANDLE {
            for bit in 0..8 {
                let mut bad = good;
                bad[at] ^= 1 << bit;
                let text = Handle::decode(&bad, 5).expect_err("damaged").to_string();
                assert!(
                    text.contains("rank 5") && text.contains("version 2"),
                    "{text}"
                );
            }
        }
        let text = Handle::decode(&[0; HANDLE], 0)
            .expect_err("nothing")
            .to_string();
        assert!(text.contains("same libnccl-gin-doorbell.so"), "{text}");
    }

    #[test]
    fn a_rank_of_the_same_host_is_found_by_name() {
        let handle = sample("192.0.2.7:4791");
        let name = handle.places(handle.host)[0].to_string();
        let tail = name.strip_prefix("unix:@doorbell-nccl-").expect(&name);
        // 64 bits that are not the secret's own bytes.
        assert_eq!(tail.len(), 16);
        assert_ne!(tail, "3031323334353637");
        assert_eq!(handle.places(handle.host)[0].to_string(), name);
        assert_eq!(handle.places(0)[0].to_string(), "tcp:192.0.2.7:4791");
        assert_eq!(host(), host());
    }
}
