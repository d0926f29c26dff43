//! Memory and queue pairs that come and go while work is going on; engines that are threads, or borrowed, or die.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::{Options, PATIENCE, Rig};
use doorbell_device::layout::{CqKind, ErrorKind};
use doorbell_hca::link::Incoming;
use doorbell_hca::mem::Span;
use doorbell_hca::{
    Access, Addressing, Affinity, Cores, Delivery, Destination, Event, Fault, HcaConfig, HcaError,
    QpState, RemoteQp,
};
use doorbell_wire::{Key, Qpn, Wqe};

fn threads(n: usize) -> HcaConfig {
    HcaConfig {
        cores: Cores::Threads(n),
        affinity: Affinity::None,
        ..HcaConfig::default()
    }
}

#[test]
fn engine_threads_execute_what_several_posters_ring() {
    let rig = Rig::with(threads(2));
    let qps_each = if cfg!(miri) { 1 } else { 4 };
    let rounds = if cfg!(miri) { 5 } else { 500 };
    let dst = rig.region(8 * 2 * qps_each);
    std::thread::scope(|scope| {
        for poster in 0..2 {
            let (rig, dst) = (&rig, &dst);
            scope.spawn(move || {
                let mut qps: Vec<_> = (0..qps_each)
                    .map(|_| rig.loopback(Options::default()))
                    .collect();
                for round in 1..=rounds {
                    for (i, qp) in qps.iter_mut().enumerate() {
                        let to = dst.remote(8 * (poster * qps_each + i) as u64);
                        qp.go(Wqe::write_inline(to, &u64::to_le_bytes(round)).expect("inline"));
                    }
                    for (i, qp) in qps.iter().enumerate() {
                        qp.wait(rig, qp.pi - 1);
                        assert_eq!(dst.u64(8 * (poster * qps_each + i)), round);
                    }
                }
            });
        }
    });
    let health = rig.hca.health();
    assert_eq!(health.iter().map(|c| c.qps).sum::<usize>(), 0);
    assert!(
        health
            .iter()
            .all(|c| c.dead.is_none() && c.counters.busy_rounds > 0),
        "both cores had work: {health:?}"
    );
    // Each names a thread of this process, by which whoever watches finds its processor time.
    for core in &health {
        let thread = core.thread.expect("an engine thread");
        let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
        assert!(name.is_ok_and(|n| n.starts_with("doorbell-hca-")));
    }
    let driven = Rig::with(HcaConfig::caller_driven());
    assert_eq!(driven.hca.health()[0].thread, None);
    assert!(dst.canaries_intact());
}

#[test]
fn queue_pairs_spread_over_cores() {
    let rig = Rig::with(threads(3));
    let qps: Vec<_> = (0..9).map(|_| rig.qp()).collect();
    let mut per_core = [0; 3];
    qps.iter().for_each(|qp| per_core[qp.hca_qp().core()] += 1);
    assert_eq!(per_core, [3, 3, 3]);
    let pinned = rig.qp_with(Options {
        core: Some(2),
        ..Options::default()
    });
    assert_eq!(pinned.hca_qp().core(), 2);
}

#[test]
fn deregistering_under_traffic_ends_in_an_error_and_touches_nothing_afterwards() {
    for config in [HcaConfig::caller_driven(), threads(1)] {
        for kind in [CqKind::Collapsed, CqKind::PerSlot] {
            let rig = Rig::with(config.clone());
            let mut qp = rig.loopback(Options {
                kind,
                log_depth: 8,
                ..Options::default()
            });
            let (src, dst) = (rig.region(64), rig.region(64));
            src.set_u64(0, 1);
            // The engine has the keys at hand when they are revoked.
            let write = |dst: &common::Region| {
                Wqe::write(dst.remote(0), src.local(0, 8))
                    .expect("write")
                    .signalled(true)
            };
            for _ in 0..3 {
                qp.run(&rig, write(&dst));
            }
            let memory = dst.mr.memory().clone();
            for _ in 0..100 {
                qp.post(
                    &Wqe::write(dst.remote(0), src.local(0, 8))
                        .expect("write")
                        .signalled(true),
                );
            }
            qp.ring();
            rig.driver.poll();
            let stale = Wqe::write(dst.remote(0), src.local(0, 8))
                .expect("write")
                .signalled(true);
            dst.mr.deregister(PATIENCE).expect("in time, driven or not");
            // The memory is ours again: nobody writes it any more.
            let doorbell_hca::Memory::Host { ptr, .. } = memory else {
                panic!("host memory")
            };
            // SAFETY: `memory` keeps it.
            unsafe { ptr.cast::<u64>().store(77) };
            for _ in 0..20 {
                qp.post(&stale);
            }
            qp.ring();
            assert!(rig.until(|| qp.state() == QpState::Error));
            assert_eq!(qp.error_word().vendor(), Fault::RkeyRevoked.vendor().0);
            // SAFETY: as above.
            assert_eq!(unsafe { ptr.cast::<u64>().load() }, 77);
        }
    }
}

#[test]
fn keys_are_used_again_but_never_the_same() {
    let rig = Rig::with(HcaConfig {
        log_regions: 2,
        ..HcaConfig::caller_driven()
    });
    let mut seen = std::collections::HashSet::new();
    for _ in 0..100 {
        let region = rig.region(8);
        seen.insert(region.key());
    }
    assert!(seen.len() > 90, "tags are random");
    let slots = 1 << rig.hca.config().log_regions;
    let all: Vec<_> = (0..slots).map(|_| rig.region(8)).collect();
    let memory = all[0].mr.memory().clone();
    let config = doorbell_hca::MrConfig {
        memory,
        access: Access::ALL,
        addressing: Addressing::Zero,
        pd: 1,
    };
    // SAFETY: `memory` keeps it.
    let full = unsafe { rig.hca.register(config) };
    assert!(matches!(full, Err(HcaError::NoKeys { .. })));
}

#[test]
fn a_poster_and_the_owner_share_a_caller_driven_core() {
    // Two threads drive the same core: one gets it, the other goes on with its own work.
    let rig = Rig::new();
    let dst = rig.region(16);
    let rounds = if cfg!(miri) { 10 } else { 2000 };
    std::thread::scope(|scope| {
        for i in 0..2 {
            let (rig, dst) = (&rig, &dst);
            scope.spawn(move || {
                let mut qp = rig.loopback(Options::default());
                for round in 1..=rounds {
                    qp.run(
                        rig,
                        Wqe::write_inline(dst.remote(8 * i), &u64::to_le_bytes(round))
                            .expect("inline"),
                    );
                    assert_eq!(dst.u64(8 * i as usize), round);
                }
            });
        }
    });
}

#[test]
fn reset_while_wqes_are_rung_and_use_again() {
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let rig = Rig::new();
        let mut qp = rig.loopback(Options {
            kind,
            ..Options::default()
        });
        let dst = rig.region(64);
        for round in 0..50u64 {
            for _ in 0..round % 7 {
                qp.post(
                    &Wqe::write_inline(dst.remote(0), &[1; 8])
                        .expect("inline")
                        .signalled(true),
                );
            }
            qp.ring();
            if round % 3 == 0 {
                rig.driver.poll();
            }
            qp.reset();
            assert_eq!(qp.hca_qp().indexes(), (0, 0));
            qp.connect_to_self();
            qp.run(
                &rig,
                Wqe::write_inline(dst.remote(8), &round.to_le_bytes()).expect("inline"),
            );
            assert_eq!(dst.u64(8), round);
        }
    }
}

#[test]
fn connecting_is_checked() {
    let rig = Rig::new();
    let qp = rig.qp();
    let nobody = Qpn::new(0xabcdef).expect("24 bits");
    let connect = |to| qp.hca_qp().connect(Destination::Loopback(to), PATIENCE);
    assert!(matches!(connect(nobody), Err(HcaError::UnknownQp { .. })));
    connect(qp.hca_qp().qpn()).expect("itself");
    assert!(matches!(
        connect(qp.hca_qp().qpn()),
        Err(HcaError::WrongState { .. })
    ));
}

#[test]
fn a_driver_that_nobody_calls_does_not_block_anyone() {
    let rig = Rig::new();
    let mut qp = rig.qp();
    let region = rig.region(64);
    qp.connect_to_self();
    qp.post(&Wqe::write_inline(region.remote(0), &[1]).expect("inline"));
    qp.ring();
    region
        .mr
        .deregister(Duration::from_secs(5))
        .expect("nobody holds the core");
    qp.reset();
    qp.qp
        .take()
        .expect("alive")
        .destroy(Duration::from_secs(5))
        .expect("destroyed");
}

/// A peer that does what a test asks.
#[derive(Debug, Default)]
struct Peer {
    panic: AtomicBool,
    unready: AtomicBool,
    stamp: AtomicU64,
    detached: AtomicBool,
    immediates: AtomicU64,
}

impl RemoteQp for Peer {
    fn peer(&self) -> u64 {
        7
    }
    fn qpn(&self) -> Qpn {
        Qpn::MAX
    }
    fn stamp(&self) -> (u64, u64) {
        (self.stamp.load(Ordering::Relaxed), 0)
    }
    fn ready(&self) -> Result<bool, Fault> {
        assert!(!self.panic.load(Ordering::Relaxed), "asked to panic");
        Ok(!self.unready.load(Ordering::Relaxed))
    }
    fn resolve(&self, _key: Key, _need: Access) -> Result<Span, Fault> {
        Err(Fault::BadRkey)
    }
    fn deliver_imm(&self, _position: u64, _imm: u32, _bytes: u32) -> Delivery {
        match self.immediates.fetch_add(1, Ordering::Relaxed) {
            0 => Delivery::Pending,
            1 => Delivery::NoReceive,
            _ => Delivery::Delivered,
        }
    }
    fn incoming(&self) -> Option<Incoming> {
        None
    }
    fn accept(&self) {}
    fn reply(&self, _outcome: Result<(), Fault>) {}
    fn no_receive(&self) {}
    fn detach(&self) {
        self.detached.store(true, Ordering::Relaxed);
    }
}

#[test]
fn an_engine_that_dies_tells_everybody() {
    for config in [HcaConfig::caller_driven(), threads(1)] {
        let rig = Rig::with(config);
        let peer = Arc::new(Peer::default());
        let mut bystander = rig.loopback(Options::default());
        let mut idle = rig.loopback(Options {
            kind: CqKind::PerSlot,
            ..Options::default()
        });
        let mut victim = rig.qp();
        bystander.run(&rig, Wqe::nop());
        idle.run(&rig, Wqe::nop());
        let theirs: Arc<dyn RemoteQp> = peer.clone();
        victim
            .hca_qp()
            .connect(Destination::Peer(theirs), PATIENCE)
            .expect("connect");
        victim.run(&rig, Wqe::nop());
        peer.panic.store(true, Ordering::Relaxed);
        // Rung and never executed: its poster is to learn of the death from the CQ as well.
        let unanswered = victim.go(Wqe::nop());
        assert!(rig.until(|| rig.hca.health()[0].dead.is_some()));
        assert!(
            rig.hca.health()[0]
                .dead
                .as_deref()
                .is_some_and(|r| r.contains("asked to panic"))
        );
        for qp in [&bystander, &idle, &victim] {
            assert!(rig.until(|| qp.error_word().kind() == ErrorKind::EngineDown));
            assert_eq!(qp.state(), QpState::Error);
            assert_eq!(qp.error_word().vendor(), Fault::EngineDown.vendor().0);
        }
        let cqe = victim.wait_any(&rig, unanswered);
        assert!(doorbell_wire::cqe::ErrorCqe::parse(&cqe).is_some());
        let events: Vec<_> = std::iter::from_fn(|| rig.hca.poll_event()).collect();
        assert!(
            events
                .iter()
                .any(|e| matches!(e, Event::EngineDown { core: 0, .. })),
            "{events:?}"
        );
        // Calls answer; nothing hangs. Memory and QPs can still be given back.
        assert!(!rig.driver.poll());
        assert!(matches!(
            bystander.hca_qp().reset(PATIENCE),
            Err(HcaError::EngineDown { .. })
        ));
        let region = rig.region(8);
        region
            .mr
            .deregister(PATIENCE)
            .expect("a dead engine uses nothing");
        bystander
            .qp
            .take()
            .expect("alive")
            .destroy(PATIENCE)
            .expect("a dead engine lets go");
        drop(victim);
    }
}

#[test]
fn peers_that_are_late_stuck_or_gone() {
    let rig = Rig::new();
    let peer = Arc::new(Peer::default());
    let dst = rig.region(64);
    let connect = || {
        let qp = rig.qp();
        let theirs: Arc<dyn RemoteQp> = peer.clone();
        qp.hca_qp()
            .connect(Destination::Peer(theirs), PATIENCE)
            .expect("connect");
        qp
    };
    // Late, within patience.
    let mut qp = connect();
    peer.unready.store(true, Ordering::Relaxed);
    let at = qp.go(Wqe::nop());
    for _ in 0..5 {
        rig.driver.poll();
    }
    assert_eq!(qp.completion(at), None);
    peer.unready.store(false, Ordering::Relaxed);
    qp.wait(&rig, at);
    // An immediate is asked for until it is delivered (a message of no bytes opens no key).
    let chunks = [
        doorbell_wire::seg::ctrl(
            qp.pi as u16,
            doorbell_wire::Opcode::RdmaWriteImm,
            0,
            qp.hca_qp().qpn(),
            2,
            doorbell_wire::flags::CQ_UPDATE,
            5,
        ),
        doorbell_wire::seg::raddr(0, Key(0)),
    ];
    let at = qp.post_chunks(&chunks, 1);
    qp.ring();
    qp.wait(&rig, at);
    assert_eq!(peer.immediates.load(Ordering::Relaxed), 3);
    // A bad key there.
    assert!(!peer.detached.load(Ordering::Relaxed));
    let at = qp.go(Wqe::write_inline(dst.remote(0), &[1]).expect("inline"));
    qp.wait_any(&rig, at);
    assert_eq!(qp.error_word().vendor(), Fault::BadRkey.vendor().0);
    assert!(peer.detached.load(Ordering::Relaxed), "the peer is told");
    // Too late.
    let mut qp = connect();
    peer.unready.store(true, Ordering::Relaxed);
    qp.go(Wqe::nop());
    assert!(rig.until(|| qp.state() == QpState::Error));
    assert_eq!(qp.error_word().vendor(), Fault::PeerDead.vendor().0);
    // Gone while idle.
    let qp = connect();
    let other = rig.loopback(Options::default());
    rig.hca.peer_down(8, "somebody else");
    assert_eq!(qp.state(), QpState::Ready);
    rig.hca.peer_down(7, "killed");
    assert!(rig.until(|| qp.state() == QpState::Error));
    assert_eq!(qp.error_word().vendor(), Fault::PeerDead.vendor().0);
    assert_eq!(other.state(), QpState::Ready);
}

#[test]
fn long_copies_go_in_slices_and_let_others_through() {
    if cfg!(miri) {
        return; // Megabytes take an interpreter too long.
    }
    let rig = Rig::new();
    let len = 8 << 20;
    let (src, dst) = (rig.region(len), rig.region(len));
    for i in (0..len).step_by(4096) {
        src.set_u64(i, i as u64 + 1);
    }
    let mut long = rig.loopback(Options::default());
    let mut short = rig.loopback(Options::default());
    let counter = rig.region(16);
    let at = long.go(Wqe::write(dst.remote(0), src.local(0, len as u32)).expect("write"));
    let mut between = 0;
    while long.completion(at).is_none() {
        let i = short.go(Wqe::fetch_add(counter.remote(0), counter.local(8, 8), 1).expect("fa"));
        rig.driver.poll();
        rig.driver.poll();
        between += u64::from(short.completion(i).is_some());
    }
    assert!(
        between >= 3,
        "{between} atomics got through during the copy"
    );
    assert!((0..len).step_by(4096).all(|i| dst.u64(i) == i as u64 + 1));
    // Revoked half way: the rest is not copied.
    let at = long.go(Wqe::read(src.remote(0), dst.local(0, len as u32)).expect("read"));
    rig.driver.poll();
    rig.driver.poll();
    src.mr.deregister(PATIENCE).expect("between two slices");
    long.wait_any(&rig, at);
    assert_eq!(long.error_word().vendor(), Fault::RkeyRevoked.vendor().0);
}

#[test]
fn dropping_everything_in_any_order_is_clean() {
    let rig = Rig::with(threads(1));
    let mut qp = rig.loopback(Options::default());
    let region = rig.region(64);
    qp.run(
        &rig,
        Wqe::write_inline(region.remote(0), &[1]).expect("inline"),
    );
    // The HCA's handles go first; the queue pair and the region keep it alive.
    let Rig { hca, driver, .. } = rig;
    drop((hca, driver));
    qp.hca_qp().reset(PATIENCE).expect("the engine still runs");
    drop(qp);
    drop(region);
}
