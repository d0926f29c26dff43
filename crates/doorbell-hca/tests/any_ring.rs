//! The fuzz targets, with random inputs on stable Rust.

#[allow(dead_code, unreachable_pub, reason = "shared with the fuzzers")]
mod targets;

use rand::{Rng, SeedableRng, rngs::StdRng};

#[test]
fn any_bytes_are_a_ring() {
    let seed = targets::seed();
    let _replay = targets::Replay(seed);
    let mut rng = StdRng::seed_from_u64(seed);
    targets::ring(&[]);
    for _ in 0..if cfg!(miri) { 3 } else { 3000 } {
        let mut data = vec![0u8; 1 + 64 * rng.random_range(0..12)];
        rng.fill(&mut data[..]);
        for slot in data[1..].chunks_exact_mut(64) {
            if rng.random_ratio(3, 4) {
                // Likely opcodes and sizes, everything made right.
                slot[0] |= 0x1f;
                slot[3] =
                    [0, 8, 9, 0x0f, 0x10, 0x11, 0x12, 0x14, 0x15, 0x23][rng.random_range(0..10)];
                slot[7] = rng.random_range(1..6);
                slot[11] |= 8;
            }
        }
        targets::ring(&data);
    }
}
