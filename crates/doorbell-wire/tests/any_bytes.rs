//! The fuzz targets on stable Rust: random bytes, and valid WQEs and CQEs with bytes changed.
//!
//! Random bytes alone hardly ever get past the opcode, so most inputs start from something valid.
//! The seed is fixed: a failure here repeats.

mod targets;

use doorbell_wire::cqe::{self, Kind};
use doorbell_wire::{Chunk, Cqn, Key, Local, Opcode, Qpn, Remote, Request, Syndrome, Vendor, Wqe};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let remote = Remote {
        addr: 0x40,
        key: Key(7),
    };
    let local = |len| Local {
        addr: 0x80,
        key: Key(9),
        len,
    };
    let wqes = [
        Ok(Wqe::nop()),
        Wqe::write(remote, local(64)),
        Wqe::write(remote, local(0)),
        Wqe::write_imm(remote, local(64), 5),
        Wqe::write_inline(remote, &[7; 8]),
        Wqe::write_inline(remote, &[7; 92]),
        Wqe::send(local(64)),
        Wqe::send_imm(local(0), 5),
        Wqe::send_inline(&[7; 40]),
        Wqe::read(remote, local(64)),
        Wqe::fetch_add(remote, local(8), 1),
        Wqe::compare_swap(remote, local(8), 1, 2),
        Wqe::masked_fetch_add4(remote, local(4), 1, 2),
        Wqe::masked_fetch_add8(remote, local(8), 1, 2),
        Wqe::masked_compare_swap4(remote, local(4), (1, 2), (3, 4)),
        Wqe::masked_compare_swap8(remote, local(8), (1, 2), (3, 4)),
        Ok(Wqe::wait(1, Cqn::truncate(2))),
        Wqe::dump(local(1)),
    ];
    let bytes = |chunks: &[Chunk]| {
        chunks
            .iter()
            .flat_map(|c| c.to_bytes())
            .collect::<Vec<u8>>()
    };
    let mut seeds: Vec<Vec<u8>> = wqes
        .iter()
        .map(|w| bytes(&w.unwrap().emit(3, Qpn::truncate(5))))
        .collect();
    seeds.push(bytes(&cqe::ok_chunks(Qpn::MAX, 8, 3, 1, 64)));
    seeds.push(bytes(&cqe::recv_chunks(
        Kind::ResponderSendImm,
        Qpn::MAX,
        3,
        1,
        64,
        9,
    )));
    let error = (Syndrome::REMOTE_ACCESS, Vendor::BAD_RKEY);
    seeds.push(bytes(&cqe::error_chunks(
        Kind::RequesterError,
        Qpn::MAX,
        8,
        3,
        1,
        error.0,
        error.1,
    )));
    seeds
}

/// How often each opcode must still parse after mutation, or the test has stopped testing.
const ENOUGH: usize = 500;

#[test]
fn mutated_and_random_inputs() {
    let (seeds, mut random) = (seeds(), Random(0x9e37_79b9_7f4a_7c15));
    let mut parsed = [0usize; Opcode::ALL.len()];
    let mut refused = 0usize;
    for _ in 0..100_000 {
        let mut input = if random.below(8) == 0 {
            (0..random.below(260))
                .map(|_| random.next() as u8)
                .collect()
        } else {
            let pick = random.below(seeds.len());
            seeds[pick].clone()
        };
        if !input.is_empty() {
            for _ in 0..random.below(4) {
                let at = random.below(input.len());
                input[at] = match random.below(3) {
                    0 => random.next() as u8,
                    1 => input[at] ^ 1 << random.below(8),
                    _ => input[at].wrapping_add(1),
                };
            }
            if random.below(16) == 0 {
                input.truncate(random.below(input.len()));
            }
        }
        targets::wqe(&input);
        targets::cqe(&input);
        let slots: Vec<Chunk> = input
            .chunks_exact(16)
            .map(|b| Chunk::from_bytes(b.try_into().unwrap()))
            .collect();
        match Request::parse(&slots) {
            Ok(request) => {
                let at = Opcode::ALL
                    .iter()
                    .position(|op| *op == request.opcode())
                    .unwrap();
                parsed[at] += 1;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(refused > ENOUGH, "{refused}");
    for (op, n) in Opcode::ALL.iter().zip(parsed) {
        assert!(n > ENOUGH, "{op} was parsed only {n} times");
    }
}

#[test]
fn every_opcode_byte_with_every_size() {
    // Zeroed bodies: opcode, opmod and ds alone decide. Few chunks, so that large sizes are truncated ones.
    for opcode in 0..=255u8 {
        for ds in (0..=16u8).chain([62, 63, 64, 65, 127, 128, 255]) {
            for opmod in [0, 1, 8, 9, 10, 0xff] {
                let mut slots = [Chunk::ZERO; 9];
                slots[0] = doorbell_wire::seg::ctrl_raw(
                    1,
                    opcode,
                    opmod,
                    u32::from(ds).swap_bytes(),
                    8,
                    0,
                );
                let bytes: Vec<u8> = slots.iter().flat_map(|c| c.to_bytes()).collect();
                targets::wqe(&bytes);
            }
        }
    }
}

/// Frames of a capture, whole and from each of their layers on, with bytes changed.
#[test]
fn any_bytes_are_a_roce_packet_or_refused() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let pcap = include_bytes!("fixtures/rxe.pcap");
    let mut rest = &pcap[24..];
    while !rest.is_empty() {
        let len = u32::from_le_bytes([rest[8], rest[9], rest[10], rest[11]]) as usize;
        let frame = &rest[16..16 + len];
        rest = &rest[16 + len..];
        for skip in [0, 14, 42] {
            targets::roce(&frame[skip..]);
            for _ in 0..40 {
                let mut bytes = frame[skip..].to_vec();
                for _ in 0..=random.below(4) {
                    let at = random.below(bytes.len().min(64));
                    bytes[at] = random.next() as u8;
                }
                bytes.truncate(bytes.len() - random.below(8).min(bytes.len()));
                targets::roce(&bytes);
            }
        }
    }
}
