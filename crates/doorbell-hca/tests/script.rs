//! Fault scripts in the engine: every action on its own, per-slot and collapsed CQs, receive CQs, all three ways to ring, WQEs that are
//! set aside, and what is left alone.

mod common;

use std::time::{Duration, Instant};

use common::{Options, PATIENCE, Region, Rig};
use doorbell_device::layout::{CqKind, ErrorKind, NicHandler};
use doorbell_hca::{Event, HcaConfig, QpState};
use doorbell_wire::cqe::ErrorCqe;
use doorbell_wire::{Syndrome, Vendor, Wqe};

const BOTH: [CqKind; 2] = [CqKind::Collapsed, CqKind::PerSlot];

fn rig(script: &str) -> Rig {
    Rig::with(HcaConfig {
        script: Some(script.parse().expect("a script")),
        ..HcaConfig::caller_driven()
    })
}

fn kind(kind: CqKind) -> Options {
    Options {
        kind,
        ..Options::default()
    }
}

/// A plain put of eight bytes.
fn put(dst: &Region, n: u64) -> Wqe {
    Wqe::write_inline(dst.remote(0), &n.to_le_bytes()).expect("short")
}

fn idle(rig: &Rig) {
    for _ in 0..2000 {
        rig.driver.poll();
    }
}

/// What the rules did, in words.
fn told(rig: &Rig) -> String {
    let run = rig.hca.script().expect("a script");
    let rules: Vec<_> = run.rules().iter().map(ToString::to_string).collect();
    rules.join("\n")
}

#[test]
fn a_dropped_doorbell_hides_what_it_announced_until_the_next() {
    let ways = [
        (NicHandler::ProducerWord, false),
        (NicHandler::DoorbellRecord, false),
        (NicHandler::DoorbellRecord, true),
        (NicHandler::DoorbellOnly, false),
    ];
    for (handler, poll_record) in ways {
        let rig = rig("qp=#0, wqe=2: drop-doorbell");
        let options = Options {
            handler,
            poll_record,
            ..Options::default()
        };
        let (mut qp, mut other) = (rig.loopback(options), rig.loopback(options));
        let dst = rig.region(64);
        for n in 0..2 {
            qp.run(&rig, put(&dst, n));
        }
        let lost = qp.go(put(&dst, 2));
        idle(&rig);
        assert_eq!(qp.hca_qp().indexes(), (2, 2), "{handler:?}");
        assert!(qp.completion(lost).is_none());
        assert_eq!(dst.u64(0), 1);
        // The other queue pair is none of the rule's business.
        for n in 10..14 {
            other.run(&rig, put(&dst, n));
        }
        let next = qp.go(put(&dst, 3));
        qp.wait(&rig, next);
        assert_eq!((dst.u64(0), qp.hca_qp().indexes()), (3, (4, 4)));
        assert_eq!(qp.hca_qp().counters().faults, 1);
        let told = told(&rig);
        assert!(
            told.contains("WQE 2: slot 2 is not seen, unless a later doorbell covers it"),
            "{told}"
        );
    }
}

#[test]
fn what_a_dropped_doorbell_announced_before_the_named_wqe_is_executed() {
    let rig = rig("wqe=5..7: drop-doorbell");
    let mut qp = rig.loopback(Options::default());
    let dst = rig.region(64);
    for n in 0..8 {
        qp.post(&put(&dst, n).signalled(true));
    }
    qp.ring();
    idle(&rig);
    assert_eq!(qp.hca_qp().indexes(), (5, 5));
    let told = told(&rig);
    assert!(
        told.contains("slots 5 to 7 are not seen, unless a later doorbell covers them"),
        "{told}"
    );
    let last = qp.go(put(&dst, 8));
    qp.wait(&rig, last);
    assert_eq!(dst.u64(0), 8);
}

#[test]
fn a_delayed_doorbell_comes_by_itself() {
    let rig = rig("wqe=1: delay-doorbell=30ms");
    let mut qp = rig.loopback(Options::default());
    let dst = rig.region(64);
    qp.run(&rig, put(&dst, 1));
    let before = Instant::now();
    let late = qp.go(put(&dst, 2));
    idle(&rig);
    let seen = qp.completion(late).is_some();
    assert!(!seen || before.elapsed() >= Duration::from_millis(30));
    qp.wait(&rig, late);
    assert!(before.elapsed() >= Duration::from_millis(30));
    assert_eq!(dst.u64(0), 2);
}

#[test]
fn a_withheld_cqe_is_not_there_though_the_work_is_done() {
    for cq in BOTH {
        let rig = rig("wqe=2: withhold-cqe");
        let mut qp = rig.loopback(kind(cq));
        let dst = rig.region(64);
        for n in 1..=3 {
            qp.post(&put(&dst, n).signalled(true));
        }
        qp.ring();
        idle(&rig);
        assert_eq!((dst.u64(0), qp.hca_qp().indexes()), (3, (3, 3)), "{cq:?}");
        assert!(qp.completion(1).is_some() && qp.completion(2).is_none());
        let told = told(&rig);
        assert!(
            told.contains("WQE 2: executed, but no CQE was written"),
            "{told}"
        );
        // A collapsed CQE stands for all before it: the next one heals that.
        let next = qp.go(put(&dst, 4));
        qp.wait(&rig, next);
        assert_eq!(qp.completion(2).is_some(), cq == CqKind::Collapsed);
    }
}

#[test]
fn a_cqe_withheld_for_a_time_comes_unless_a_newer_one_did() {
    for cq in BOTH {
        let rig = rig("wqe=1..: withhold-cqe=20ms");
        let mut qp = rig.loopback(kind(cq));
        let dst = rig.region(64);
        qp.run(&rig, put(&dst, 1));
        let before = Instant::now();
        let late = qp.go(put(&dst, 2));
        qp.wait(&rig, late);
        assert!(before.elapsed() >= Duration::from_millis(20), "{cq:?}");
    }
    let rig = rig("wqe=0: withhold-cqe=20ms");
    let mut qp = rig.loopback(Options::default());
    let dst = rig.region(64);
    qp.go(put(&dst, 1));
    idle(&rig);
    let newer = qp.go(put(&dst, 2));
    qp.wait(&rig, newer);
    std::thread::sleep(Duration::from_millis(25));
    idle(&rig);
    assert!(qp.completion(newer).is_some(), "the CQE went back");
}

#[test]
fn a_corrupt_cqe_differs_in_the_bits_of_the_rule_or_of_the_seed() {
    for cq in BOTH {
        let mut seen = Vec::new();
        for script in [
            "wqe=1: corrupt-cqe=0x8000",
            "wqe=1: corrupt-cqe; seed=3",
            "wqe=1: corrupt-cqe; seed=3",
            "wqe=1: corrupt-cqe; seed=4",
            "seed=1",
        ] {
            let rig = rig(script);
            let mut qp = rig.loopback(kind(cq));
            let dst = rig.region(64);
            qp.run(&rig, put(&dst, 1));
            qp.go(put(&dst, 2));
            idle(&rig);
            let word = qp.cqe(1)[3].0[1];
            let sane =
                u64::from(qp.hca_qp().qpn().get()) << 32 | 0x0800_0000_0000_0000 | 1 << 24 >> 8;
            seen.push(word.swap_bytes() ^ sane);
            assert_eq!(dst.u64(0), 2);
        }
        let good = seen.pop().expect("the last");
        let flips: Vec<u64> = seen.iter().map(|s| s ^ good).collect();
        assert_eq!(flips[0], 0x8000, "{cq:?}");
        assert_eq!(flips[1], flips[2], "the same seed, the same bit");
        assert_ne!(flips[1], flips[3], "another seed, another bit");
        assert!(flips.iter().all(|f| f.count_ones() == 1), "{flips:x?}");
    }
}

#[test]
fn a_wqe_fails_with_the_syndrome_of_the_rule() {
    for cq in BOTH {
        let rig = rig("wqe=2: fail=TRANSPORT_RETRY/0xc3");
        let mut qp = rig.loopback(kind(cq));
        let dst = rig.region(64);
        for n in 1..=4 {
            qp.post(&put(&dst, n).signalled(true));
        }
        qp.ring();
        assert!(rig.until(|| qp.state() == QpState::Error));
        assert_eq!(
            dst.u64(0),
            2,
            "what came before is done, what follows is not"
        );
        let word = qp.error_word();
        assert_eq!(
            (word.syndrome(), word.vendor(), word.wqe_index()),
            (0x15, 0xc3, 2)
        );
        let event = rig.hca.poll_event().expect("told");
        assert!(
            matches!(
                event,
                Event::QpError {
                    syndrome: Syndrome::TRANSPORT_RETRY,
                    vendor: Vendor(0xc3),
                    wqe_index: 2,
                    opcode: 8,
                    ..
                }
            ),
            "{event:?}"
        );
        if cq == CqKind::PerSlot {
            let error = ErrorCqe::parse(&qp.cqe(2)).expect("an error CQE");
            assert_eq!(
                (error.syndrome, error.vendor),
                (Syndrome::TRANSPORT_RETRY, Vendor(0xc3))
            );
            let error = ErrorCqe::parse(&qp.cqe(3)).expect("an error CQE");
            assert_eq!(error.syndrome, Syndrome::WR_FLUSH);
        }
        // Once more from the beginning: WQE 2 of the next connection fails likewise.
        qp.reset();
        qp.connect_to_self();
        for n in 1..=2 {
            qp.run(&rig, put(&dst, n));
        }
        qp.go(put(&dst, 3));
        assert!(rig.until(|| qp.state() == QpState::Error));
    }
}

#[test]
fn an_error_cqe_can_be_withheld_too_and_the_error_word_still_tells() {
    for cq in BOTH {
        let rig = rig("wqe=0: withhold-cqe; wqe=0: fail=REMOTE_OP");
        let mut qp = rig.loopback(kind(cq));
        let dst = rig.region(64);
        let at = qp.go(put(&dst, 1));
        assert!(rig.until(|| qp.state() == QpState::Error));
        idle(&rig);
        assert!(qp.completion(at).is_none());
        assert_eq!(qp.error_word().syndrome(), Syndrome::REMOTE_OP.0);
    }
}

#[test]
fn a_stalled_engine_makes_no_rounds_and_goes_on() {
    let rig = rig("wqe=1: stall-engine=40ms");
    let mut qp = rig.loopback(Options::default());
    let dst = rig.region(64);
    qp.run(&rig, put(&dst, 1));
    let before = Instant::now();
    let at = qp.go(put(&dst, 2));
    rig.driver.poll();
    let rounds = || rig.hca.health()[0].rounds;
    let then = rounds();
    idle(&rig);
    let (now, after) = (rounds(), before.elapsed());
    assert!(now == then || after >= Duration::from_millis(40));
    qp.wait(&rig, at);
    assert!(before.elapsed() >= Duration::from_millis(40));
}

#[test]
fn an_engine_stalls_when_its_time_has_come() {
    let before = Instant::now();
    let rig = rig("at=10ms: stall-engine=30ms");
    assert!(rig.until(|| told(&rig).contains("engine core 0")));
    assert!(before.elapsed() < PATIENCE);
    let rounds = rig.hca.health()[0].rounds;
    rig.driver.poll();
    assert_eq!(rig.hca.health()[0].rounds, rounds);
    assert!(rig.until(|| rig.hca.health()[0].rounds != rounds));
    assert!(before.elapsed() >= Duration::from_millis(30));
}

#[test]
fn a_rule_with_a_time_does_not_fire_before() {
    let before = Instant::now();
    let rig = rig("at=50ms, n=1: fail=REMOTE_OP");
    let mut qp = rig.loopback(Options::default());
    let dst = rig.region(64);
    while qp.state() == QpState::Ready {
        let at = qp.go(put(&dst, 1));
        qp.wait_any(&rig, at);
    }
    assert!(before.elapsed() >= Duration::from_millis(50));
    let told = told(&rig);
    assert!(told.contains(&format!("WQE {}", qp.pi - 1)), "{told}");
}

#[test]
fn a_killed_engine_is_down_and_says_who_did_it() {
    for cq in BOTH {
        let rig = rig("wqe=1: kill-engine");
        let mut qp = rig.loopback(kind(cq));
        let dst = rig.region(64);
        qp.run(&rig, put(&dst, 1));
        let at = qp.go(put(&dst, 2));
        qp.wait_any(&rig, at);
        assert_eq!((qp.state(), dst.u64(0)), (QpState::Error, 1));
        assert_eq!(qp.error_word().kind(), ErrorKind::EngineDown);
        let dead = rig.hca.health()[0].dead.clone().expect("dead");
        assert!(
            dead.contains("fault script rule 1 (wqe=1: kill-engine)") && dead.contains("WQE 1"),
            "{dead}"
        );
    }
}

#[test]
fn receives_are_tampered_with_by_their_own_number() {
    let rig = rig(
        "qp=#1, recv=1: withhold-cqe; qp=#1, recv=2: corrupt-cqe=0xf0; recv=3: withhold-cqe=20ms",
    );
    let options = Options {
        receive: true,
        ..Options::default()
    };
    let (mut a, mut b) = (rig.qp(), rig.qp_with(options));
    a.connect(&b);
    b.connect(&b);
    b.post_receives(4);
    let dst = rig.region(64);
    for n in 0..3u32 {
        a.run(
            &rig,
            Wqe::write_imm(dst.remote(0), rig_local(&dst), n).expect("a length"),
        );
    }
    assert!(b.received(0).is_some() && b.received(1).is_none());
    let error = b.receive_error(2);
    assert!(
        error.is_some(),
        "opcode 1 became 0xe, a receive that failed"
    );
    let before = Instant::now();
    a.run(
        &rig,
        Wqe::write_imm(dst.remote(0), rig_local(&dst), 3).expect("a length"),
    );
    assert!(rig.until(|| b.received(3).is_some()));
    assert!(before.elapsed() >= Duration::from_millis(20));
    let told = told(&rig);
    assert!(
        told.contains("receive 1: executed, but no CQE was written"),
        "{told}"
    );
    assert!(told.contains("receive 2: bytes 56 to 63"), "{told}");
}

fn rig_local(dst: &Region) -> doorbell_wire::Local {
    dst.local(8, 8)
}

#[test]
fn a_wqe_that_is_set_aside_keeps_its_fate() {
    for cq in BOTH {
        let rig = rig("qp=#1, wqe=1: withhold-cqe; qp=#1, wqe=2: corrupt-cqe=0x01");
        let (mut first, mut qp) = (rig.loopback(kind(cq)), rig.loopback(kind(cq)));
        let dst = rig.region(4 << 20);
        qp.run(&rig, put(&dst, 1));
        let waits = Wqe::wait(0, first.hca_qp().cqn()).signalled(true);
        let at = qp.post(&waits);
        qp.ring();
        idle(&rig);
        assert_eq!(qp.hca_qp().indexes(), (2, 1));
        first.run(&rig, put(&dst, 2));
        assert!(rig.until(|| qp.hca_qp().indexes() == (2, 2)));
        assert!(qp.completion(at).is_none(), "{cq:?}");
        // A copy of several turns.
        let long = Wqe::write(dst.remote(0), dst.local(2 << 20, 2 << 20)).expect("a length");
        qp.go(long);
        assert!(rig.until(|| qp.hca_qp().indexes() == (3, 3)));
        let told = told(&rig);
        assert!(
            told.contains("rule 2") && told.contains("WQE 2: bytes 56"),
            "{told}"
        );
    }
}

#[test]
fn every_nth_of_thousands_fires_and_nothing_else_is_harmed() {
    for cq in BOTH {
        let rig = rig("every=100, n=5: delay-doorbell=1us; wqe=50.., every=64: corrupt-cqe=0x0100");
        let mut qp = rig.loopback(Options {
            log_depth: 6,
            ..kind(cq)
        });
        let dst = rig.region(64);
        let mut last = 0;
        for burst in 0..100u64 {
            for n in 0..32 {
                last = qp.post(&put(&dst, burst * 32 + n).signalled(true));
            }
            qp.ring();
            assert!(
                rig.until(|| qp.hca_qp().indexes().1 > last),
                "{}",
                told(&rig)
            );
        }
        assert_eq!(dst.u64(0), 3199);
        let fired: Vec<u64> = rig
            .hca
            .script()
            .expect("a script")
            .rules()
            .iter()
            .map(|r| r.fired)
            .collect();
        assert_eq!(fired, [5, (3200 - 50) / 64], "{cq:?}");
    }
}

#[test]
fn killing_a_peer_that_is_nobody_says_so() {
    let rig = rig("wqe=0: kill-peer");
    let mut qp = rig.loopback(Options::default());
    let dst = rig.region(64);
    qp.run(&rig, put(&dst, 1));
    let told = told(&rig);
    assert!(
        told.contains(" did nothing at QP ") && told.contains("kill-process"),
        "{told}"
    );
}
