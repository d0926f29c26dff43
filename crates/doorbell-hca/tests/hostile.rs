//! Posters that mean harm, one trick each: what the random rings of `garbage` reach only by luck.
//! Each test says what must hold for everybody else, and all of it runs without clocks in the way.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Memory, Options, PATIENCE, Rig};
use doorbell_device::layout::CqKind;
use doorbell_hca::{
    Access, Addressing, Cores, Destination, Fault, HcaConfig, Mr, MrConfig, QpState,
};
use doorbell_wire::cqe::ErrorCqe;
use doorbell_wire::{Chunk, Key, Opcode, Remote, Wqe, flags, seg};

/// The control segment of WQE `at` of that QP, signalled.
fn ctrl(qp: &common::MockQp, opcode: Opcode, ds: u8) -> Chunk {
    seg::ctrl(
        qp.pi as u16,
        opcode,
        0,
        qp.hca_qp().qpn(),
        ds,
        flags::CQ_UPDATE,
        0,
    )
}

/// Registers memory as it is, without canaries.
fn register(rig: &Rig, memory: &Memory) -> Mr {
    let config = MrConfig {
        memory: doorbell_hca::Memory::Host {
            ptr: memory.ptr(),
            len: memory.len(),
            keep: memory.keep(),
        },
        access: Access::ALL,
        addressing: Addressing::Zero,
        pd: rig.pd,
    };
    // SAFETY: `keep` owns the memory, which is all atomics.
    unsafe { rig.hca.register(config) }.expect("register")
}

/// A list may be as long as a plain message, and must not hold the engine longer in one turn.
#[test]
fn long_lists_go_in_slices_too() {
    const HALF: u32 = if cfg!(miri) {
        (2 << 20) + 7
    } else {
        (4 << 20) + 7
    };
    const END: usize = 2 * HALF as usize - 1;
    let rig = Rig::new();
    let mut small = rig.loopback(Options::default());
    for opcode in [Opcode::RdmaWrite, Opcode::RdmaRead] {
        let (list, whole) = (rig.region(2 * HALF as usize), rig.region(2 * HALF as usize));
        let (from, to) = match opcode {
            Opcode::RdmaWrite => (&list, &whole),
            _ => (&whole, &list),
        };
        let edge = HALF as usize;
        for (at, byte) in [(0, 1), (edge - 1, 2), (edge, 3), (END, 4)] {
            from.fill(at, &[byte]);
        }
        let mut big = rig.loopback(Options::default());
        let chunks = [
            ctrl(&big, opcode, 5),
            seg::raddr(whole.at(0), whole.key()),
            seg::data(HALF, list.key(), list.at(0)),
            seg::data(0, list.key(), list.at(0)),
            seg::data(HALF, list.key(), list.at(u64::from(HALF))),
        ];
        let at = big.post_chunks(&chunks, 2);
        big.ring();
        rig.driver.poll();
        rig.driver.poll();
        assert_eq!(to.bytes(END, 1), [0], "{opcode:?}: all of it in one turn");
        // Somebody else gets through meanwhile.
        small.run(&rig, Wqe::nop());
        assert_eq!(to.bytes(END, 1), [0]);
        big.wait(&rig, at);
        assert_eq!(
            [to.bytes(0, 1), to.bytes(edge - 1, 2), to.bytes(END, 1)].concat(),
            [1, 2, 3, 4],
            "{opcode:?}"
        );
        assert!(list.canaries_intact() && whole.canaries_intact());
    }
}

/// An empty piece of a list needs no key, as an empty segment by itself needs none.
#[test]
fn empty_pieces_of_a_list_open_no_key() {
    let rig = Rig::new();
    let (source, target) = (rig.region(64), rig.region(64));
    source.fill(0, b"12345678");
    for opcode in [Opcode::RdmaWrite, Opcode::RdmaRead] {
        let mut qp = rig.loopback(Options::default());
        let chunks = [
            ctrl(&qp, opcode, 5),
            seg::raddr(target.at(0), target.key()),
            seg::data(0, Key(0), u64::MAX),
            seg::data(8, source.key(), source.at(0)),
            seg::data(0, Key(0), 0),
        ];
        let at = qp.post_chunks(&chunks, 2);
        qp.ring();
        qp.wait(&rig, at);
    }
    assert_eq!(source.bytes(0, 8), target.bytes(0, 8));
}

/// Two companions that wait for each other wait for ever, and that is nobody's trouble but theirs.
#[test]
fn a_circle_of_waits_holds_nobody_else() {
    let rig = Rig::new();
    let mut ring: Vec<_> = (0..3).map(|_| rig.loopback(Options::default())).collect();
    let cqns: Vec<_> = ring.iter().map(|q| q.hca_qp().cqn()).collect();
    let mut at = Vec::new();
    for (i, qp) in ring.iter_mut().enumerate() {
        at.push(qp.go(Wqe::wait(0, cqns[(i + 1) % 3])));
    }
    // One that waits for itself as well.
    let mut own = rig.loopback(Options::default());
    let cqn = own.hca_qp().cqn();
    let own_at = own.go(Wqe::wait(0, cqn));
    let mut other = rig.loopback(Options::default());
    for _ in 0..40 {
        other.run(&rig, Wqe::nop());
    }
    assert!(
        ring.iter()
            .zip(&at)
            .all(|(q, at)| q.completion(*at).is_none())
    );
    assert!(own.completion(own_at).is_none());
    // Taking one out of the circle frees all the others: by an error.
    let gone = ring.pop().expect("three");
    drop(gone);
    for (qp, at) in ring.iter().zip(&at) {
        let error = ErrorCqe::parse(&qp.wait_any(&rig, *at)).expect("an error");
        assert_eq!(error.vendor, Fault::BadWaitCq.vendor());
    }
    own.reset();
    assert_eq!(own.state(), QpState::Reset);
}

/// A poster that registered its own ring, CQ and words, and writes over all of them by RDMA.
#[test]
fn queues_that_write_over_themselves() {
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let rig = Rig::new();
        let junk = rig.region(4096);
        junk.fill(0, &[0xff; 4096]);
        for what in 0..3 {
            let mut qp = rig.loopback(Options {
                kind,
                ..Options::default()
            });
            let memory = qp.own_memory()[what].clone();
            let mine = register(&rig, &memory);
            for offset in (0..memory.len() as u64).step_by(64) {
                let to = Remote {
                    addr: mine.addr() + offset,
                    key: mine.key(),
                };
                qp.post(
                    &Wqe::write(to, junk.local(0, 64))
                        .expect("legal")
                        .signalled(true),
                );
                qp.ring();
                for _ in 0..8 {
                    rig.driver.poll();
                }
            }
            let mut other = rig.loopback(Options::default());
            other.run(&rig, Wqe::nop());
            // The QP may be in any state; it can be reset and used again.
            qp.reset();
            qp.connect_to_self();
            qp.run(
                &rig,
                Wqe::write(junk.remote(8), junk.local(0, 8)).expect("legal"),
            );
        }
        assert!(junk.canaries_intact());
    }
}

/// What a queue pair keeps may own others of the same HCA: letting go of them must not wait for the engine that lets go.
#[test]
fn what_a_queue_pair_keeps_may_own_queue_pairs() {
    let rig = Rig::with(HcaConfig {
        cores: Cores::Threads(1),
        ..HcaConfig::default()
    });
    let inner = rig.loopback(Options::default());
    let region = rig.region(64);
    let outer = rig.loopback_keeping(Options::default(), Arc::new((inner, region.mr)));
    outer
        .qp
        .expect("there")
        .destroy(PATIENCE)
        .expect("the engine does not wait for itself");
    let mut other = rig.loopback(Options::default());
    other.run(&rig, Wqe::nop());
}

/// Posters that never look at completions, states or each other, while their queues are reset, destroyed and made.
#[test]
fn resets_and_destroys_under_mad_posters() {
    let rig = Rig::with(HcaConfig {
        cores: Cores::Threads(2),
        stale_limit: std::time::Duration::from_micros(100),
        ..HcaConfig::default()
    });
    let region = rig.region(4096);
    let stop = Arc::new(AtomicBool::new(false));
    let rounds = if cfg!(miri) { 2 } else { 60 };
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let qp = rig.loopback(Options {
            kind,
            own_word: true,
            ..Options::default()
        });
        let posters: Vec<_> = (0..2u64)
            .map(|i| {
                let (ring, bell, stop) = (
                    qp.own_memory()[0].clone(),
                    qp.own_memory()[2].clone(),
                    Arc::clone(&stop),
                );
                let (key, addr, qpn) = (region.key(), region.at(0), qp.hca_qp().qpn());
                std::thread::spawn(move || {
                    let mut pi = i;
                    while !stop.load(Ordering::Relaxed) {
                        let wqe = Wqe::write_inline(
                            Remote {
                                addr: addr + pi % 512 * 8,
                                key,
                            },
                            &[1; 8],
                        )
                        .expect("legal")
                        .signalled(true);
                        for (j, chunk) in wqe
                            .emit(pi as u16, qpn)
                            .iter()
                            .take(usize::from(wqe.ds()))
                            .enumerate()
                        {
                            let word = (pi % 16) as usize * 8 + 2 * j;
                            ring.word(word).store(chunk.0[0], Ordering::Relaxed);
                            ring.word(word + 1).store(chunk.0[1], Ordering::Relaxed);
                        }
                        pi += 1;
                        let ahead = if pi % 1000 == 0 { 1 << 20 } else { 0 };
                        bell.word(common::OWN_BELL)
                            .store(pi + ahead, Ordering::Release);
                        if pi % 64 == 0 {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        for _ in 0..rounds {
            qp.hca_qp().reset(PATIENCE).expect("reset");
            // A ring between reset and connect is an error of its own.
            let _ = qp
                .hca_qp()
                .connect(Destination::Loopback(qp.hca_qp().qpn()), PATIENCE);
            std::thread::yield_now();
            let mut other = rig.loopback(Options::default());
            other.run(&rig, Wqe::nop());
        }
        stop.store(true, Ordering::Relaxed);
        for poster in posters {
            poster.join().expect("poster");
        }
        stop.store(false, Ordering::Relaxed);
        qp.hca_qp().reset(PATIENCE).expect("reset");
    }
    assert!(region.canaries_intact());
    assert!(rig.hca.health().iter().all(|h| h.dead.is_none()));
}
