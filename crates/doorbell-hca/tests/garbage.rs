//! Rings that nobody should write: random bytes, nearly valid WQEs, doorbells that lie. Nothing outside the regions is touched,
//! the engine lives, every QP ends in completion or error. And a model: valid and nearly valid WQEs do exactly what they say.
//!
//! A failing run prints its seed; `DOORBELL_SEED=... cargo test -p doorbell-hca --test garbage` runs it again.

mod common;
#[path = "common/model.rs"]
mod model;

use common::{MockQp, Options, Region, Replay, Rig, seed};
use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_hca::{Access, Addressing, QpState};
use doorbell_wire::cqe::ErrorCqe;
use doorbell_wire::{Chunk, Key, Opcode, Wqe, flags, seg};
use model::{LEN, Model, ops, wqe};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

struct World {
    rig: Rig,
    regions: Vec<Region>,
    /// Not a right on it, and another domain: must never change.
    untouchable: Vec<Region>,
    control: MockQp,
}

impl World {
    fn new() -> Self {
        let rig = Rig::with(doorbell_hca::HcaConfig {
            stale_limit: std::time::Duration::from_micros(50),
            rnr_limit: std::time::Duration::from_micros(50),
            ..doorbell_hca::HcaConfig::caller_driven()
        });
        let regions = vec![
            rig.region(LEN),
            rig.region_with(LEN, Access::ALL, Addressing::At(0xffff_0000), rig.pd),
            rig.region_with(LEN, Access::REMOTE_WRITE, Addressing::Address, rig.pd),
        ];
        let other = rig.hca.alloc_pd();
        let untouchable = vec![
            rig.region_with(LEN, Access::NONE, Addressing::Zero, rig.pd),
            rig.region_with(LEN, Access::REMOTE_READ, Addressing::Zero, rig.pd),
            rig.region_with(LEN, Access::ALL, Addressing::Zero, other),
        ];
        untouchable.iter().for_each(|r| r.fill(0, &[0x77; LEN]));
        let control = rig.loopback(Options::default());
        Self {
            rig,
            regions,
            untouchable,
            control,
        }
    }

    fn check(&mut self) {
        for region in self.regions.iter().chain(&self.untouchable) {
            assert!(
                region.canaries_intact(),
                "a byte outside a region was written"
            );
        }
        for region in &self.untouchable {
            assert_eq!(
                region.bytes(0, LEN),
                [0x77; LEN],
                "a region without the right was written"
            );
        }
        self.control.run(&self.rig, Wqe::nop());
        assert!(self.rig.hca.health()[0].dead.is_none());
    }

    fn keys(&self) -> Vec<Key> {
        self.regions
            .iter()
            .chain(&self.untouchable)
            .map(Region::key)
            .collect()
    }
}

fn random_options(rng: &mut StdRng) -> Options {
    let handlers = [
        NicHandler::ProducerWord,
        NicHandler::DoorbellRecord,
        NicHandler::DoorbellOnly,
    ];
    Options {
        log_depth: rng.random_range(0..6),
        kind: if rng.random() {
            CqKind::PerSlot
        } else {
            CqKind::Collapsed
        },
        handler: handlers[rng.random_range(0..3)],
        receive: rng.random(),
        own_word: rng.random(),
        ..Options::default()
    }
}

/// A chunk of bytes that looks like something.
fn nasty_chunk(rng: &mut StdRng, world: &World, keys: &[Key]) -> Chunk {
    let key = if rng.random_ratio(9, 10) {
        keys[rng.random_range(0..keys.len())]
    } else {
        Key(rng.random())
    };
    let base = world.regions[rng.random_range(0..world.regions.len())].at(0);
    let addr = match rng.random_range(0..4) {
        0 => rng.random_range(0..LEN as u64),
        1 => base.wrapping_add(rng.random_range(0..LEN as u64)),
        2 => base
            .wrapping_add(LEN as u64)
            .wrapping_sub(rng.random_range(0..16)),
        _ => rng.random(),
    };
    match rng.random_range(0..6) {
        0 | 1 => seg::raddr(addr, key),
        2 => seg::data(
            [0, 1, 4, 8, 8, 16, 64, LEN as u32, 1 << 30, u32::MAX >> 1][rng.random_range(0..10)],
            key,
            addr,
        ),
        3 => seg::inline8(rng.random(), rng.random_range(0..20)),
        4 => seg::data(8, key, addr),
        _ => Chunk([rng.random(), rng.random()]),
    }
}

fn nasty_ring(rng: &mut StdRng, world: &mut World) {
    let keys = world.keys();
    let mut qp = world.rig.loopback(random_options(rng));
    let qpn = qp.hca_qp().qpn();
    for _ in 0..rng.random_range(1..6) {
        for at in qp.pi..qp.pi + qp.depth() {
            let ctrl = match rng.random_range(0..10) {
                0 => Chunk([rng.random(), rng.random()]),
                1 => Chunk::ZERO,
                n => {
                    let opcode = if n == 2 {
                        rng.random()
                    } else {
                        Opcode::ALL[rng.random_range(0..12)] as u8
                    };
                    let ds: u8 = if rng.random_ratio(4, 5) {
                        rng.random_range(1..6)
                    } else {
                        rng.random()
                    };
                    let opmod = if rng.random_ratio(9, 10) {
                        [0, 0, 8, 9][rng.random_range(0..4)]
                    } else {
                        rng.random()
                    };
                    let index = if rng.random_ratio(19, 20) {
                        at as u16
                    } else {
                        rng.random()
                    };
                    let flags = if rng.random_ratio(4, 5) {
                        flags::CQ_UPDATE
                    } else {
                        rng.random()
                    };
                    seg::ctrl_raw(
                        index,
                        opcode,
                        opmod,
                        (qpn.get() << 8 | u32::from(ds)).swap_bytes(),
                        flags,
                        rng.random(),
                    )
                }
            };
            qp.write_chunk(at, 0, ctrl);
            for i in 1..4 {
                let chunk = nasty_chunk(rng, world, &keys);
                qp.write_chunk(at, i, chunk);
            }
        }
        match rng.random_range(0..8) {
            0 => qp.ring_raw(rng.random()),
            1 => qp.ring_value(qp.pi.wrapping_add(rng.random_range(0..100_000))),
            _ => {
                qp.pi += rng.random_range(1..=qp.depth());
                qp.ring();
            }
        }
        let state = |qp: &MockQp| qp.hca_qp().indexes();
        // Whatever was accepted ends: executed, or flushed, or it is a WAIT (which names no CQ that could satisfy it, or does not exist).
        for _ in 0..30 {
            world.rig.driver.poll();
        }
        let (rung, done) = state(&qp);
        let settled = world.rig.until(|| {
            let (rung, done) = qp.hca_qp().indexes();
            rung == done || qp.hca_qp().counters().parked > 50
        });
        assert!(settled, "{rung} rung, {done} done, {:?}", qp.state());
        if qp.state() == QpState::Error {
            let word = qp.error_word();
            let known = doorbell_hca::fault::TABLE
                .iter()
                .any(|r| r.vendor.0 == word.vendor() && r.syndrome.0 == word.syndrome());
            assert!(known, "{word:?} is not in the table of faults");
            if rng.random() {
                qp.reset();
                qp.connect_to_self();
            }
        }
        world.check();
    }
}

#[test]
fn hostile_rings_are_contained() {
    let seed = seed();
    let _replay = Replay(seed);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new();
    for _ in 0..if cfg!(miri) { 3 } else { 400 } {
        nasty_ring(&mut rng, &mut world);
    }
}

#[test]
#[ignore = "heavy: .ci/run runs it in release"]
fn heavy_hostile_rings_are_contained() {
    let seed = seed();
    let _replay = Replay(seed);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while std::time::Instant::now() < end {
        nasty_ring(&mut rng, &mut world);
    }
}

#[test]
fn the_engine_does_what_the_model_does() {
    let seed = seed();
    let _replay = Replay(seed);
    let mut bytes = [0u8; 32];
    StdRng::seed_from_u64(seed).fill(&mut bytes);
    let config = Config {
        cases: if cfg!(miri) { 2 } else { 2000 },
        failure_persistence: None,
        ..Config::default()
    };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let rig = Rig::new();
    let outcome = runner.run(
        &(ops(), any::<bool>(), 1..8usize),
        |(ops, per_slot, batch)| {
            let kind = if per_slot {
                CqKind::PerSlot
            } else {
                CqKind::Collapsed
            };
            let mut qp = rig.loopback(Options {
                kind,
                log_depth: 5,
                ..Options::default()
            });
            let (src, dst) = (rig.region(LEN), rig.region(LEN));
            let initial: Vec<u8> = (0..LEN).map(|i| (i * 31 + 7) as u8).collect();
            src.fill(0, &initial);
            dst.fill(0, &initial[1..]);
            let mut model = Model {
                src: src.bytes(0, LEN),
                dst: dst.bytes(0, LEN),
            };
            let mut expected = None;
            let mut posted = 0;
            for op in &ops {
                let Some(wqe) = wqe(op, src.key(), dst.key()) else {
                    continue;
                };
                if per_slot && wqe.slots() != 1 {
                    continue;
                }
                let at = qp.post(&wqe);
                posted += 1;
                if expected.is_none()
                    && let Err(fault) = model.run(op)
                {
                    expected = Some((at, fault));
                }
                if posted % batch == 0 || qp.pi % 16 == 15 {
                    qp.ring();
                    qp.wait_any(&rig, at);
                }
            }
            let last = qp.post(&Wqe::nop().signalled(true));
            qp.ring();
            let cqe = qp.wait_any(&rig, last);
            prop_assert_eq!(ErrorCqe::parse(&cqe).is_some(), expected.is_some());
            if let Some((at, fault)) = expected {
                let word = qp.error_word();
                prop_assert_eq!(
                    (word.wqe_index(), word.vendor()),
                    (at as u16, fault.vendor().0)
                );
            }
            prop_assert_eq!(src.bytes(0, LEN), model.src);
            prop_assert_eq!(dst.bytes(0, LEN), model.dst);
            prop_assert!(src.canaries_intact() && dst.canaries_intact());
            Ok(())
        },
    );
    outcome.unwrap_or_else(|e| panic!("{e}"));
}
