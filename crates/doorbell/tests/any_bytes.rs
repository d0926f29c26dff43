//! The fuzz targets on stable Rust: valid messages with bytes changed, cut and repeated, from a fixed seed.

mod targets;

use doorbell::{Endpoint, LinkKind, RemoteMr};

/// SplitMix64: any seed will do, and the same one replays.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

#[test]
fn no_endpoint_from_a_peer_does_harm() {
    let mut random = Random(0x5eed);
    for round in 0..50_000 {
        let regions = random.below(4);
        let endpoint = Endpoint {
            link: if random.below(2) == 0 {
                LinkKind::Loopback
            } else {
                LinkKind::Shm
            },
            qpn: random.next() as u32 >> 8,
            hca: random.next(),
            regions: (0..regions)
                .map(|_| RemoteMr {
                    addr: random.next() >> 1,
                    len: random.next() >> 1,
                    key: random.next() as u32,
                })
                .collect(),
            roce: None,
            verbs: None,
        };
        let mut bytes = endpoint.to_bytes();
        if round % 8 == 0 {
            assert_eq!(Endpoint::from_bytes(&bytes).as_ref(), Ok(&endpoint));
        }
        for _ in 0..random.below(4) {
            let at = random.below(bytes.len());
            match random.below(4) {
                0 => bytes.truncate(at),
                1 => bytes.extend_from_slice(&random.next().to_le_bytes()),
                _ if !bytes.is_empty() => bytes[at] = random.next() as u8,
                _ => {}
            }
        }
        targets::endpoint(&bytes);
    }
}
