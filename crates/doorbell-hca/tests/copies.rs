//! Payloads in device memory: the same model, with either side behind a copy engine whose copies take their time.

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/model.rs"]
mod model;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{MockQp, Options, PATIENCE, Region, Replay, Rig, seed};
use device::{BASE, Device};
use doorbell_device::layout::CqKind;
use doorbell_hca::dma::{Dma, DmaConfig};
use doorbell_hca::{
    Access, Addressing, Event, Fault, HcaConfig, HcaError, Memory, Mr, MrConfig, QpState,
};
use doorbell_wire::cqe::ErrorCqe;
use doorbell_wire::{Key, Remote, Wqe};
use model::{LEN, Model, ops, wqe};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// A region of the test, here or there.
enum Side {
    Host(Region),
    Device {
        mr: Mr,
        device: Arc<Device>,
        offset: usize,
    },
}

/// Bytes of the device before and behind each region.
const GAP: usize = 64;

impl Side {
    fn new(rig: &Rig, device: Option<&Arc<Device>>, place: usize) -> Self {
        let Some(device) = device else {
            return Self::Host(rig.region(LEN));
        };
        let offset = GAP + place * (LEN + GAP);
        device.fill(offset - GAP, &[0x99; LEN + 2 * GAP]);
        let dma: Arc<dyn Dma> = device.clone();
        let memory = Memory::Device {
            addr: BASE + offset as u64,
            len: LEN,
            dma,
            keep: Arc::new(()),
        };
        let config = MrConfig {
            memory,
            access: Access::ALL,
            addressing: Addressing::Zero,
            pd: rig.pd,
        };
        // SAFETY: the device checks its own bounds.
        let mr = unsafe { rig.hca.register(config) }.expect("register");
        Self::Device {
            mr,
            device: Arc::clone(device),
            offset,
        }
    }

    fn key(&self) -> Key {
        match self {
            Self::Host(region) => region.key(),
            Self::Device { mr, .. } => mr.key(),
        }
    }

    fn fill(&self, bytes: &[u8]) {
        match self {
            Self::Host(region) => region.fill(0, bytes),
            Self::Device { device, offset, .. } => {
                device.fill(*offset, bytes);
            }
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Host(region) => region.bytes(0, LEN),
            Self::Device { device, offset, .. } => device.bytes(*offset, LEN),
        }
    }

    fn intact(&self) -> bool {
        match self {
            Self::Host(region) => region.canaries_intact(),
            Self::Device { device, offset, .. } => {
                device.bytes(offset - GAP, GAP) == [0x99; GAP]
                    && device.bytes(offset + LEN, GAP) == [0x99; GAP]
            }
        }
    }

    fn remote(&self, addr: u64) -> Remote {
        Remote {
            addr,
            key: self.key(),
        }
    }
}

fn drain(rig: &Rig, qp: &mut MockQp) -> bool {
    let last = qp.post(&Wqe::nop().signalled(true));
    qp.ring();
    ErrorCqe::parse(&qp.wait_any(rig, last)).is_some()
}

#[test]
fn copies_do_what_the_model_does() {
    let seed = seed();
    let _replay = Replay(seed);
    let mut bytes = [0u8; 32];
    StdRng::seed_from_u64(seed).fill(&mut bytes);
    let cases = if cfg!(miri) { 1 } else { 600 };
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let rig = Rig::new();
    let shape = (
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        0..4u32,
        1..12usize,
    );
    let outcome = runner.run(
        &(ops(), shape),
        |(ops, (per_slot, near, far, one, ordered, polls, batch))| {
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
            let device = Device::new(4096, polls, ordered);
            let other = if one {
                Arc::clone(&device)
            } else {
                Device::new(4096, polls, ordered)
            };
            // Two devices at the same addresses cannot be copied between directly; the engine has to know that.
            let src = Side::new(&rig, near.then_some(&device), 0);
            let dst = Side::new(&rig, (far || !near).then_some(&other), 1);
            let initial: Vec<u8> = (0..LEN).map(|i| (i * 31 + 7) as u8).collect();
            src.fill(&initial);
            dst.fill(&initial.iter().rev().copied().collect::<Vec<u8>>());
            let mut model = Model {
                src: src.bytes(),
                dst: dst.bytes(),
            };
            let mut expected = None;
            for (i, op) in ops.iter().enumerate() {
                let Some(wqe) = wqe(op, src.key(), dst.key()) else {
                    continue;
                };
                if per_slot && wqe.slots() != 1 {
                    continue;
                }
                let at = qp.post(&wqe);
                if expected.is_none()
                    && let Err(fault) = model.run(op)
                {
                    expected = Some((at, fault));
                }
                if i % batch == 0 || qp.pi % 16 == 15 {
                    qp.ring();
                    qp.wait_any(&rig, at);
                }
            }
            prop_assert_eq!(drain(&rig, &mut qp), expected.is_some());
            if let Some((at, fault)) = expected {
                let word = qp.error_word();
                prop_assert_eq!(
                    (word.wqe_index(), word.vendor()),
                    (at as u16, fault.vendor().0)
                );
            }
            prop_assert_eq!(src.bytes(), model.src);
            prop_assert_eq!(dst.bytes(), model.dst);
            prop_assert!(src.intact() && dst.intact());
            Ok(())
        },
    );
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_signal_in_host_memory_follows_the_puts_to_the_device() {
    let rig = Rig::new();
    for ordered in [false, true] {
        let device = Device::new(4096, 5, ordered);
        let dst = Side::new(&rig, Some(&device), 0);
        let (src, signal) = (rig.region(LEN), rig.region(64));
        let mut qp = rig.loopback(Options::default());
        for round in 1..=20u64 {
            src.fill(0, &[round as u8; LEN]);
            for i in 0..3 {
                qp.post(&Wqe::write(dst.remote(64 * i), src.local(0, 64)).expect("write"));
            }
            let at = qp.go(Wqe::fetch_add(signal.remote(0), signal.local(8, 8), 1).expect("fa"));
            assert!(rig.until(|| {
                let seen = signal.u64(0);
                assert!(
                    seen < round || dst.bytes()[..192] == [round as u8; 192],
                    "the signal came first"
                );
                seen == round
            }));
            qp.wait(&rig, at);
        }
        assert!(qp.hca_qp().counters().copies >= 60);
    }
}

#[test]
fn puts_with_a_signal_each_share_batches() {
    const PUTS: u64 = 100;
    let rig = Rig::new();
    let device = Device::new(4096, 5, true);
    let dst = Side::new(&rig, Some(&device), 0);
    let (src, signal) = (rig.region(LEN), rig.region(64));
    src.fill(0, &[7; LEN]);
    let mut qp = rig.loopback(Options {
        log_depth: 8,
        ..Options::default()
    });
    let mut last = 0;
    for i in 0..PUTS {
        let to = 8 * (i % (LEN as u64 / 8));
        qp.post(&Wqe::write(dst.remote(to), src.local(0, 8)).expect("write"));
        last = qp.post(
            &Wqe::fetch_add(signal.remote(0), signal.local(8, 8), 1)
                .expect("fa")
                .signalled(true),
        );
    }
    // What is posted while the engine's first batches are under way is a batch, however many signals are in it.
    device.stuck.store(true, Ordering::Relaxed);
    qp.ring();
    for _ in 0..PUTS {
        rig.driver.poll();
    }
    assert_eq!(signal.u64(0), 0);
    device.stuck.store(false, Ordering::Relaxed);
    qp.wait(&rig, last);
    assert_eq!((signal.u64(0), signal.u64(8)), (PUTS, PUTS - 1));
    // Full batches all of them: signals cost none, nor does what waited for room.
    assert_eq!(device.batches(), PUTS / device.max_batch() as u64);
    assert_eq!(device.copies.load(Ordering::Relaxed), PUTS);
    assert_eq!(
        qp.hca_qp().counters().parked,
        0,
        "nothing waited for a signal"
    );
}

#[test]
fn an_immediate_follows_its_data_to_the_device() {
    let rig = Rig::new();
    let device = Device::new(4096, 3, true);
    let dst = Side::new(&rig, Some(&device), 0);
    let src = rig.region(LEN);
    let options = Options {
        receive: true,
        ..Options::default()
    };
    let (mut a, mut b) = (rig.qp_with(options), rig.qp_with(options));
    a.connect(&b);
    b.connect(&a);
    for round in 0..20u64 {
        src.fill(0, &[round as u8; 8]);
        let at = a.go(Wqe::write_imm(dst.remote(8), src.local(0, 8), round as u32).expect("imm"));
        for _ in 0..4 {
            rig.driver.poll();
        }
        assert!(b.received(round).is_none());
        b.post_receives(1);
        assert!(rig.until(|| b.received(round).is_some()));
        assert_eq!(dst.bytes()[8..16], [round as u8; 8]);
        a.wait(&rig, at);
    }
}

#[test]
fn an_atomic_does_not_pass_a_message_that_waits_for_its_receive() {
    let rig = Rig::new();
    let device = Device::new(4096, 3, true);
    let dst = Side::new(&rig, Some(&device), 0);
    let (src, signal) = (rig.region(LEN), rig.region(64));
    let options = Options {
        receive: true,
        ..Options::default()
    };
    for word in [signal.remote(0), dst.remote(64)] {
        let count = || match word == signal.remote(0) {
            true => signal.u64(0),
            false => u64::from_ne_bytes(dst.bytes()[64..72].try_into().expect("eight bytes")),
        };
        let before = count();
        let (mut a, mut b) = (rig.qp_with(options), rig.qp_with(options));
        a.connect(&b);
        b.connect(&a);
        a.post(&Wqe::write_imm(dst.remote(8), src.local(0, 8), 7).expect("imm"));
        let at = a.go(Wqe::fetch_add(word, signal.local(8, 8), 1).expect("fa"));
        // The copy has ended long ago.
        for _ in 0..50 {
            rig.driver.poll();
        }
        assert!(b.received(0).is_none());
        assert_eq!(count(), before, "the atomic came first");
        b.post_receives(1);
        a.wait(&rig, at);
        assert!(b.received(0).is_some());
        assert_eq!(count(), before.wrapping_add(1));
    }
}

#[test]
fn other_queues_go_on_while_copies_are_under_way() {
    let rig = Rig::new();
    let device = Device::new(4096, 0, true);
    device.stuck.store(true, Ordering::Relaxed);
    let dst = Side::new(&rig, Some(&device), 0);
    let (src, other) = (rig.region(LEN), rig.region(LEN));
    src.fill(0, &[5; 8]);
    let mut slow = rig.loopback(Options::default());
    let at = slow.go(Wqe::write(dst.remote(0), src.local(0, 8)).expect("write"));
    let mut fast = rig.loopback(Options::default());
    for _ in 0..100 {
        fast.run(
            &rig,
            Wqe::write_inline(other.remote(0), &[7; 8]).expect("inline"),
        );
    }
    assert_eq!(slow.completion(at), None);
    device.stuck.store(false, Ordering::Relaxed);
    slow.wait(&rig, at);
    assert_eq!(dst.bytes()[..8], [5; 8]);
}

#[test]
fn memory_is_not_let_go_while_a_copy_may_use_it() {
    let rig = Rig::new();
    let device = Device::new(4096, 0, true);
    device.stuck.store(true, Ordering::Relaxed);
    let dst = Side::new(&rig, Some(&device), 0);
    let (src, other) = (rig.region(LEN), rig.region(LEN));
    let mut qp = rig.loopback(Options::default());
    qp.go(Wqe::write(dst.remote(0), src.local(0, 8)).expect("write"));
    for _ in 0..10 {
        rig.driver.poll();
    }
    // The QP may be reset at once: the copy does not use its memory. The region may not.
    qp.reset();
    let err = other
        .mr
        .deregister(Duration::from_millis(30))
        .expect_err("a copy issued before is under way");
    assert!(matches!(err, HcaError::StillInUse { .. }), "{err}");
    device.stuck.store(false, Ordering::Relaxed);
    rig.until(|| !rig.driver.poll());
    src.mr.deregister(PATIENCE).expect("the copy is over");
    qp.connect_to_self();
    qp.run(&rig, Wqe::nop());
}

#[test]
fn copy_engines_that_fail_or_stall_are_reported() {
    for stalls in [false, true] {
        for kind in [CqKind::Collapsed, CqKind::PerSlot] {
            let config = HcaConfig {
                dma: DmaConfig {
                    stall: Duration::from_millis(5),
                    ..DmaConfig::default()
                },
                ..HcaConfig::caller_driven()
            };
            let rig = Rig::with(config);
            let device = Device::new(4096, 0, true);
            let dst = Side::new(&rig, Some(&device), 0);
            let src = rig.region(LEN);
            let mut qp = rig.loopback(Options {
                kind,
                ..Options::default()
            });
            qp.run(
                &rig,
                Wqe::write(dst.remote(0), src.local(0, 8)).expect("write"),
            );
            device.broken.store(!stalls, Ordering::Relaxed);
            device.stuck.store(stalls, Ordering::Relaxed);
            let at = qp.pi;
            for i in 0..4 {
                qp.post(
                    &Wqe::write(dst.remote(8 * i), src.local(0, 8))
                        .expect("write")
                        .signalled(true),
                );
            }
            qp.ring();
            assert!(rig.until(|| qp.state() == QpState::Error));
            let word = qp.error_word();
            assert_eq!(
                (word.vendor(), word.wqe_index()),
                (Fault::DmaFailed.vendor().0, at as u16)
            );
            qp.wait_any(&rig, at + 3);
            let events: Vec<_> = std::iter::from_fn(|| rig.hca.poll_event()).collect();
            let reason = events.iter().find_map(|e| match e {
                Event::CopyFailed { reason, .. } => Some(reason.clone()),
                _ => None,
            });
            let reason = reason.expect("an event says why");
            assert!(
                reason.contains(if stalls {
                    "has not ended"
                } else {
                    "broken on purpose"
                }),
                "{reason}"
            );
            // Repaired and reset, it works again.
            device.broken.store(false, Ordering::Relaxed);
            device.stuck.store(false, Ordering::Relaxed);
            rig.until(|| !rig.driver.poll());
            qp.reset();
            qp.connect_to_self();
            src.fill(0, &[3; 8]);
            let at = qp.go(Wqe::write(dst.remote(8), src.local(0, 8)).expect("write"));
            qp.wait_any(&rig, at);
            if !stalls {
                assert_eq!(dst.bytes()[8..16], [3; 8]);
            }
        }
    }
}
