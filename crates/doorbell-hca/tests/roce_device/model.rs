//! Random operations beside a model that is a few arrays.

use doorbell_wire::Wqe;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::common::{PATIENCE, Replay, seed};
use crate::device::Device;
use crate::place::Place;
use crate::sides::*;
use doorbell_hca::roce::transport::Config;

const LEN: usize = 40_000;

/// One run of random operations against the model.
fn run(seed: u64, faults: &str) {
    let mut random = StdRng::seed_from_u64(seed);
    let config = Config {
        // Losses are repaired by sending again, and soon; in all there is a second, as a busy machine may stop this thread for a while.
        timeout: 15,
        min_rnr_timer: 1,
        ..Config::default()
    };
    let (mut a, mut b) = pair(faults, &config);
    let (polls, ordered) = (random.random_range(0..6), random.random());
    let device = |s| Device::random(4 * LEN, polls, ordered, seed ^ s);
    let (here, there) = (device(1), device(2));
    let near = [
        Place::new(&a.rig, None, LEN),
        Place::new(&a.rig, Some((&here, 0)), LEN),
    ];
    let far = [
        Place::new(&b.rig, None, LEN),
        Place::new(&b.rig, Some((&there, LEN)), LEN),
    ];
    let mut near_model = [noise(&mut random, LEN), noise(&mut random, LEN)];
    let mut far_model = [noise(&mut random, LEN), noise(&mut random, LEN)];
    for i in 0..2 {
        near[i].fill(0, &near_model[i]);
        far[i].fill(0, &far_model[i]);
    }
    let mut received = 0;
    for _ in 0..30 {
        let mut last;
        // The queue takes four receives; all have been used when the group is complete.
        let mut receives = 4;
        // Several WRITEs and messages together; then one thing that brings something back.
        for _ in 0..random.random_range(1..8) {
            let (n, f) = (random.random_range(0..2), random.random_range(0..2));
            let len = match random.random_range(0..3) {
                0 => random.random_range(1..64),
                1 => random.random_range(1..3000),
                _ => random.random_range(1..LEN),
            };
            let (from, to) = (
                random.random_range(0..=LEN - len),
                random.random_range(0..=LEN - len),
            );
            let bytes = near_model[n][from..from + len].to_vec();
            far_model[f][to..to + len].copy_from_slice(&bytes);
            let (remote, local) = (
                far[f].remote(to as u64),
                near[n].local(from as u64, len as u32),
            );
            let kind = random.random_range(if receives == 0 { 2..4 } else { 0..4 });
            last = match kind {
                0 => {
                    receives -= 1;
                    received = b.qp.post_receive(&[]);
                    a.qp.go(Wqe::write_imm(remote, local, 7).expect("a length"))
                }
                // Into the same memory by a SEND; the receive is in two pieces.
                1 => {
                    receives -= 1;
                    let cut = random.random_range(0..=len) as u32;
                    received = b.qp.post_receive(&[
                        far[f].local(to as u64, cut),
                        far[f].local(to as u64 + u64::from(cut), len as u32 - cut),
                    ]);
                    a.qp.go(Wqe::send(local).expect("a length"))
                }
                _ => a.qp.go(Wqe::write(remote, local).expect("a length")),
            };
            if random.random_range(0..3) == 0 {
                assert!(until(&a, &b, || a.qp.completion(last).is_some()));
            }
        }
        let (n, f) = (random.random_range(0..2), random.random_range(0..2));
        let at = random.random_range(0..LEN / 8 - 1) * 8;
        let to = random.random_range(0..LEN / 8 - 1) * 8;
        let (remote, local) = (far[f].remote(at as u64), near[n].local(to as u64, 8));
        let word = u64::from_le_bytes(far_model[f][at..at + 8].try_into().expect("eight"));
        let (wqe, len) = match random.random_range(0..3) {
            0 => {
                let new = word.wrapping_add(5);
                far_model[f][at..at + 8].copy_from_slice(&new.to_le_bytes());
                (Wqe::fetch_add(remote, local, 5), 8)
            }
            1 => {
                far_model[f][at..at + 8].copy_from_slice(&[9; 8]);
                (
                    Wqe::compare_swap(remote, local, word, u64::from_le_bytes([9; 8])),
                    8,
                )
            }
            _ => {
                let len = random.random_range(1..LEN - at.max(to));
                (Wqe::read(remote, near[n].local(to as u64, len as u32)), len)
            }
        };
        let brought = match len {
            8 => word.to_le_bytes().to_vec(),
            _ => far_model[f][at..at + len].to_vec(),
        };
        // A READ may bring what was written behind it, an atomic may not; here nothing is.
        near_model[n][to..to + len].copy_from_slice(&brought);
        let at = a.qp.go(wqe.expect("valid"));
        assert!(
            until(&a, &b, || a.qp.completion(at).is_some()),
            "{:?} {:?}",
            a.qp.hca_qp().roce_counters(PATIENCE),
            b.qp.hca_qp().roce_counters(PATIENCE)
        );
        a.qp.wait(&a.rig, at);
        for i in 0..2 {
            assert!(
                far[i].bytes(0, LEN) == far_model[i],
                "what was written, {i}"
            );
            assert!(
                near[i].bytes(0, LEN) == near_model[i],
                "what was brought, {i}"
            );
        }
    }
    if received > 0 {
        assert!(until(&a, &b, || b.qp.received(received).is_some()));
    }
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn it_does_what_the_model_does() {
    let seed = seed();
    let _replay = Replay(seed);
    for n in 0..20 {
        run(seed.wrapping_add(n), "");
    }
}

/// Packets are lost and sent again while the pieces that they are of are under way, kept, or gone.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn it_does_what_the_model_does_although_packets_are_lost() {
    let seed = seed();
    let _replay = Replay(seed);
    for n in 0..12u64 {
        let seed = seed.wrapping_add(n);
        let faults = format!("?faults=loss=2%,dup=2%,reorder=2%,seed={}", seed % 1000);
        run(seed, &faults);
    }
}
