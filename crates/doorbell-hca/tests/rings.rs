//! Indexes of every width wrap, rings of every depth wrap, doorbells come late or twice: nothing is lost, doubled or torn.

mod common;

use common::{MockQp, Options, Rig};
use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_hca::QpState;
use doorbell_wire::{Wqe, db};

/// Runs `count` puts through a QP, each with its index as payload, `batch` a doorbell; checks every one.
fn stream(rig: &Rig, qp: &mut MockQp, count: u64, batch: u64) {
    let dst = rig.region(8);
    let counter = rig.region(16);
    let mut posted = 0;
    while posted < count {
        let mut last = 0;
        for _ in 0..batch.min(qp.depth()).min(count - posted) {
            let index = qp.pi;
            let wqe = if index.is_multiple_of(3) {
                Wqe::fetch_add(counter.remote(0), counter.local(8, 8), 1)
            } else {
                Wqe::write_inline(dst.remote(0), &index.to_le_bytes())
            };
            last = qp.post(&wqe.expect("valid").signalled(true));
            posted += 1;
        }
        qp.ring();
        qp.wait(rig, last);
        if last % 3 != 0 {
            assert_eq!(dst.u64(0), last);
        }
    }
    let end = qp.pi;
    assert_eq!(
        counter.u64(0),
        (end - count..end).filter(|i| i % 3 == 0).count() as u64,
        "no lost or doubled WQE"
    );
    let done = qp.hca_qp().counters();
    assert_eq!(done.wqes, done.slots_rung);
}

#[test]
fn every_depth_and_way_of_ringing() {
    let depths: &[u8] = if cfg!(miri) {
        &[0, 2]
    } else {
        &[0, 1, 2, 5, 10, 15]
    };
    for &log_depth in depths {
        for handler in [
            NicHandler::ProducerWord,
            NicHandler::DoorbellRecord,
            NicHandler::DoorbellOnly,
        ] {
            for kind in [CqKind::PerSlot, CqKind::Collapsed] {
                let rig = Rig::new();
                let mut qp = rig.loopback(Options {
                    log_depth,
                    handler,
                    kind,
                    ..Options::default()
                });
                let batch = (qp.depth() / 2 + 1).min(100);
                let laps = if cfg!(miri) { 3 } else { 200 };
                let depth = qp.depth();
                stream(&rig, &mut qp, (laps * batch).min(3 * depth + laps), batch);
                // The whole ring at once.
                if !cfg!(miri) || depth <= 4 {
                    stream(&rig, &mut qp, depth, depth);
                }
            }
        }
    }
}

#[test]
fn indexes_of_16_bits_wrap() {
    if cfg!(miri) {
        return; // 200,000 WQEs take an interpreter too long; the arithmetic is tested in doorbell-wire.
    }
    for handler in [
        NicHandler::ProducerWord,
        NicHandler::DoorbellRecord,
        NicHandler::DoorbellOnly,
    ] {
        for kind in [CqKind::PerSlot, CqKind::Collapsed] {
            let rig = Rig::new();
            let mut qp = rig.loopback(Options {
                log_depth: 7,
                handler,
                kind,
                ..Options::default()
            });
            stream(&rig, &mut qp, 200_000, 100);
            assert!(qp.pi > 3 << 16);
        }
    }
}

#[test]
#[ignore = "heavy: .ci/run runs it in release"]
fn heavy_indexes_of_24_bits_wrap() {
    for handler in [NicHandler::ProducerWord, NicHandler::DoorbellOnly] {
        let rig = Rig::new();
        let mut qp = rig.loopback(Options {
            log_depth: 12,
            handler,
            ..Options::default()
        });
        stream(&rig, &mut qp, (1 << 24) + 100_000, 4096);
    }
}

#[test]
fn two_slot_wqes_wrap_at_the_end_of_the_ring() {
    let rig = Rig::new();
    let mut qp = rig.loopback(Options {
        log_depth: 3,
        ..Options::default()
    });
    let dst = rig.region(64);
    for round in 0..if cfg!(miri) { 9 } else { 100u8 } {
        // An odd number of slots a round, so that the two-slot WQE comes at every place, the last slot included.
        let bytes: Vec<u8> = (0..50).map(|i| i ^ round).collect();
        qp.post(
            &Wqe::write_inline(dst.remote(0), &bytes)
                .expect("inline")
                .signalled(true),
        );
        let at = qp.post(&Wqe::nop().signalled(true));
        qp.ring();
        qp.wait(&rig, at);
        assert_eq!(dst.bytes(0, 50), bytes);
    }
}

#[test]
fn late_and_repeated_doorbells_are_ignored() {
    for handler in [
        NicHandler::ProducerWord,
        NicHandler::DoorbellRecord,
        NicHandler::DoorbellOnly,
    ] {
        let rig = Rig::new();
        let mut qp = rig.loopback(Options {
            handler,
            ..Options::default()
        });
        for round in 0..if cfg!(miri) { 3 } else { 20u64 } {
            for _ in 0..3 {
                qp.post(&Wqe::nop().signalled(true));
            }
            let pi = qp.pi;
            for value in [pi - 1, pi, pi, pi.saturating_sub(2), pi - 3, pi] {
                qp.ring_value(value);
                rig.driver.poll();
            }
            qp.wait(&rig, pi - 1);
            let done = qp.hca_qp().counters();
            assert_eq!((done.wqes, done.slots_rung), (pi, pi), "round {round}");
            assert_eq!(qp.state(), QpState::Ready);
        }
    }
}

#[test]
fn a_polled_record_may_run_ahead_of_the_doorbell_and_the_doorbell_of_the_record() {
    let rig = Rig::new();
    let options = Options {
        handler: NicHandler::DoorbellRecord,
        ..Options::default()
    };
    let mut qp = rig.loopback(Options {
        poll_record: false,
        ..options
    });
    qp.post(&Wqe::nop().signalled(true));
    qp.ring();
    qp.wait(&rig, 0);
    // Doorbell rung first (NVIDIA's order), record a moment later.
    let at = qp.post(&Wqe::nop().signalled(true));
    qp.ring_raw(db::doorbell_word(qp.pi, qp.hca_qp().qpn()));
    qp.wait(&rig, at);
    let mut polled = rig.loopback(Options {
        poll_record: true,
        ..options
    });
    for _ in 0..if cfg!(miri) { 3 } else { 50 } {
        polled.run(&rig, Wqe::nop());
    }
}

#[test]
fn thousands_of_queue_pairs() {
    let count = if cfg!(miri) { 20 } else { 4096 };
    let rig = Rig::new();
    let dst = rig.region(8 * count);
    let mut qps: Vec<MockQp> = (0..count)
        .map(|i| {
            rig.loopback(Options {
                log_depth: 1,
                own_word: i % 7 == 0,
                ..Options::default()
            })
        })
        .collect();
    for round in 1..=3u64 {
        for (i, qp) in qps.iter_mut().enumerate() {
            qp.post(
                &Wqe::write_inline(dst.remote(8 * i as u64), &round.to_le_bytes())
                    .expect("inline")
                    .signalled(true),
            );
            qp.ring();
        }
        for qp in &qps {
            qp.wait(&rig, qp.pi - 1);
        }
        assert!((0..count).all(|i| dst.u64(8 * i) == round));
        // Most of them fall idle and are found again by the sweep.
        for _ in 0..if cfg!(miri) { 10 } else { 1000 } {
            rig.driver.poll();
        }
    }
    assert_eq!(rig.hca.health()[0].qps, count);
    drop(qps);
    assert_eq!(rig.hca.health()[0].qps, 0);
}
