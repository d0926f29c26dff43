//! `OnError::Release`: a poster that plays a foreign kernel, which ignores errors and would spin for ever, gets out of every loop of its
//! own; the host was told before; and what it got is not data.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{MockQp, Options, PATIENCE, Region, Rig};
use doorbell_device::layout::{CqKind, ErrorKind, NicHandler};
use doorbell_hca::qp::released;
use doorbell_hca::{Event, Fault, HcaConfig, Memory, OnError, QpState, Shared, Signals};
use doorbell_wire::cqe::{CqeTail, Kind};
use doorbell_wire::{Vendor, Wqe};

fn releasing(kind: CqKind) -> Options {
    Options {
        kind,
        on_error: OnError::Release,
        handler: NicHandler::DoorbellRecord,
        receive: true,
        ..Options::default()
    }
}

fn good(dst: &Region) -> Wqe {
    Wqe::write_inline(dst.remote(0), &7u64.to_le_bytes()).expect("short")
}

fn bad(dst: &Region) -> Wqe {
    Wqe::write_inline(dst.remote(dst.len() as u64), &[1]).expect("short")
}

/// Signals in memory of the test's own.
fn signals(words: usize) -> (Signals, Arc<[std::sync::atomic::AtomicU64]>) {
    let memory: Arc<[std::sync::atomic::AtomicU64]> = (0..words as u64)
        .map(std::sync::atomic::AtomicU64::new)
        .collect();
    let host = Memory::Host {
        ptr: Shared::from_ptr(memory.as_ptr().cast_mut().cast()).expect("not null"),
        len: words * 8,
        keep: Arc::new(Arc::clone(&memory)),
    };
    // SAFETY: `keep` owns the words, which are atomics.
    let signals = unsafe { Signals::new(&host, 0..words * 8) }.expect("aligned");
    (signals, memory)
}

/// What the loops of foreign device code do: look at counter and owner, never at the opcode; and never give up.
fn spin(qp: &MockQp, at: u64, stop: &AtomicBool) {
    while qp.completion(at).is_none() && !stop.load(Ordering::Relaxed) {
        std::thread::yield_now();
    }
}

/// Fails the test, instead of hanging it, if the spinner does not end by itself.
fn ends(stop: &AtomicBool, done: &AtomicBool) {
    let deadline = Instant::now() + PATIENCE;
    while !done.load(Ordering::Acquire) {
        if Instant::now() > deadline {
            stop.store(true, Ordering::Relaxed);
            panic!("the foreign loop did not end");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `kernel` on a thread beside the engine's until it ends.
fn play(kernel: impl FnOnce(&AtomicBool) + Send) {
    let (stop, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (stop, done) = (&stop, &done);
        scope.spawn(move || {
            kernel(stop);
            done.store(true, Ordering::Release);
        });
        ends(stop, done);
    });
}

fn threaded(script: Option<&str>) -> Rig {
    Rig::with(HcaConfig {
        script: script.map(|s| s.parse().expect("a script")),
        ..HcaConfig::default()
    })
}

#[test]
#[cfg_attr(miri, ignore = "spins beside an engine thread")]
fn a_loop_that_ignores_errors_ends_and_the_host_was_told_before() {
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        for _ in 0..20 {
            let rig = threaded(None);
            let (words, memory) = signals(3);
            let mut qp = rig.releasing(releasing(kind), vec![words]);
            let dst = rig.region(64);
            qp.post_receives(3);
            play(|stop| {
                let first = qp.go(good(&dst));
                spin(&qp, first, stop);
                assert_eq!(dst.u64(0), 7);
                // The signal: an error must be known to the host when it passes.
                let failing = qp.go(bad(&dst));
                while memory[2].load(Ordering::Acquire) < 4096 && !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                assert_eq!(qp.error_word().vendor(), Fault::RkeyRange.vendor().0);
                spin(&qp, failing, stop);
                // It goes on posting for several laps of the ring, as if nothing had happened.
                for _ in 0..50 {
                    let at = qp.go(bad(&dst));
                    spin(&qp, at, stop);
                    let tail = CqeTail::of(qp.cqe(at)[3]);
                    assert!(!tail.is_error() || stop.load(Ordering::Relaxed));
                }
                // Its receives.
                while (0..3).any(|i| qp.received(i).is_none()) && !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            assert_eq!(qp.state(), QpState::Error);
            assert!((0..3).all(|i| memory[i].load(Ordering::Relaxed) == released(i as u64)));
            let received = qp.received(1).expect("released");
            assert_eq!(
                (received.tail.kind(), received.byte_cnt),
                (Some(Kind::ResponderSend), 0)
            );
            assert!(matches!(
                rig.hca.poll_event(),
                Some(Event::QpError {
                    vendor: Vendor::RKEY_RANGE,
                    wqe_index: 1,
                    ..
                })
            ));
        }
    }
}

#[test]
fn the_event_is_there_before_the_first_cqe_that_lets_go() {
    // The engine is driven by the test, and looked at after every round.
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let rig = Rig::new();
        let (words, memory) = signals(1);
        let mut qp = rig.releasing(releasing(kind), vec![words]);
        let dst = rig.region(64);
        let at = qp.go(bad(&dst));
        let mut told = false;
        assert!(rig.until(|| {
            let drained = qp.completion(at).is_some() || memory[0].load(Ordering::Acquire) != 0;
            told |= rig.hca.poll_event().is_some();
            assert!(told || !drained, "drained, and the host does not know");
            drained && told
        }));
        assert_eq!(dst.u64(0), 0, "it is not data");
    }
}

#[test]
#[cfg_attr(miri, ignore = "spins beside an engine thread")]
fn an_engine_that_died_still_lets_go() {
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let rig = threaded(Some("wqe=3: kill-engine"));
        let (words, memory) = signals(1);
        let mut qp = rig.releasing(releasing(kind), vec![words]);
        let dst = rig.region(64);
        qp.post_receives(1);
        play(|stop| {
            for _ in 0..100 {
                let at = qp.go(good(&dst));
                spin(&qp, at, stop);
            }
            while (memory[0].load(Ordering::Acquire) == 0 || qp.received(0).is_none())
                && !stop.load(Ordering::Relaxed)
            {
                std::hint::spin_loop();
            }
        });
        assert_eq!(qp.error_word().kind(), ErrorKind::EngineDown);
        assert!(rig.hca.poll_event().is_some());
        // Taking it down does not wait for the engine either.
        drop(qp.qp.take());
    }
}

#[test]
fn a_dead_engine_without_a_thread_lets_go_too() {
    let rig = Rig::with(HcaConfig {
        script: Some("wqe=1: kill-engine".parse().expect("a script")),
        ..HcaConfig::caller_driven()
    });
    let mut qp = rig.releasing(releasing(CqKind::PerSlot), Vec::new());
    let dst = rig.region(64);
    for _ in 0..40 {
        let at = qp.go(good(&dst));
        qp.wait(&rig, at);
    }
    assert_eq!(qp.state(), QpState::Error);
}

#[test]
fn what_a_lost_doorbell_announced_is_let_go_when_the_owner_fails_the_queue() {
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let rig = Rig::with(HcaConfig {
            script: Some("wqe=1: drop-doorbell".parse().expect("a script")),
            ..HcaConfig::caller_driven()
        });
        let mut qp = rig.releasing(releasing(kind), Vec::new());
        let dst = rig.region(64);
        qp.run(&rig, good(&dst));
        let lost = qp.go(good(&dst));
        for _ in 0..1000 {
            rig.driver.poll();
        }
        assert!(qp.completion(lost).is_none());
        qp.hca_qp().fail(Fault::Destroyed, PATIENCE).expect("alive");
        assert!(qp.completion(lost).is_some(), "{kind:?}: the record had it");
    }
}

#[test]
fn signals_that_are_no_words_are_refused() {
    let memory: Arc<[std::sync::atomic::AtomicU64]> =
        (0..4).map(std::sync::atomic::AtomicU64::new).collect();
    let host = Memory::Host {
        ptr: Shared::from_ptr(memory.as_ptr().cast_mut().cast()).expect("not null"),
        len: 32,
        keep: Arc::new(Arc::clone(&memory)),
    };
    for (range, part) in [
        (0..40, "not inside"),
        (8..8, "not inside"),
        (4..12, "aligned"),
        (0..12, "aligned"),
    ] {
        // SAFETY: `keep` owns the words, which are atomics.
        let error = unsafe { Signals::new(&host, range) }
            .expect_err("refused")
            .to_string();
        assert!(error.contains(part), "{error}");
    }
}
