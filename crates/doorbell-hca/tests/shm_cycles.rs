//! A thousand sessions come and go, with a region and a QP each, and leave no descriptor, mapping or thread behind.
//! Alone in its file: it counts what this process has open.
#![cfg(not(miri))]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Options, PATIENCE, Rig};
use doorbell_hca::shm::{Peer, SharedRegion, Shm, ShmAddress, ShmConfig, ShmLink, SlotQp};
use doorbell_hca::{Access, Addressing, Destination, Memory, MrConfig, Shared};
use doorbell_wire::{Local, Remote, Wqe};

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .filter(|line| line.contains("memfd:"))
        .count()
}

/// Descriptors, shared mappings, threads.
fn open() -> (usize, usize, usize) {
    (
        entries("/proc/self/fd"),
        mappings(),
        entries("/proc/self/task"),
    )
}

struct Side {
    rig: Rig,
    shm: Arc<Shm>,
}

impl Side {
    fn new() -> Self {
        let rig = Rig::new();
        let shm = Shm::attach(
            &rig.hca,
            ShmConfig {
                slot_bits: 4,
                ..ShmConfig::default()
            },
            None,
        )
        .unwrap();
        Self { rig, shm }
    }
}

/// A put from one side to the other, then everything is taken down.
fn use_it(a: &Side, b: &Side, at_a: Peer, at_b: Peer) {
    let memory = Arc::new(SharedRegion::new(4096).unwrap());
    let register = |side: &Side| {
        let config = MrConfig {
            memory: Memory::Shared {
                ptr: Shared::new(memory.ptr()),
                len: 4096,
                memfd: memory.memfd().clone(),
                offset: 0,
                keep: memory.clone(),
            },
            access: Access::ALL,
            addressing: Addressing::Zero,
            pd: side.rig.pd,
        };
        // SAFETY: `keep` owns the mapping; nobody else touches it.
        unsafe { side.rig.hca.register(config) }.unwrap()
    };
    let (target, source) = (register(a), register(b));
    let (qa, mut qb) = (
        a.rig.qp_with(Options::default()),
        b.rig.qp_with(Options::default()),
    );
    let connect = |side: &Side, peer: &Peer, own: &common::MockQp, other: &common::MockQp| {
        let (qpn, peer_qpn) = (own.hca_qp().qpn().get(), other.hca_qp().qpn().get());
        let link = ShmLink::open(
            peer,
            SlotQp {
                qpn,
                pd: side.rig.pd,
                peer_qpn,
                receives: true,
            },
        )
        .unwrap();
        own.hca_qp()
            .connect(Destination::Peer(link), PATIENCE)
            .unwrap();
    };
    connect(a, &at_a, &qa, &qb);
    connect(b, &at_b, &qb, &qa);
    let remote = Remote {
        addr: 2048,
        key: target.key(),
    };
    qb.run(
        &b.rig,
        Wqe::write(
            remote,
            Local {
                addr: 0,
                key: source.key(),
                len: 64,
            },
        )
        .unwrap(),
    );
    at_b.close(PATIENCE).unwrap();
    source.deregister(PATIENCE).unwrap();
    target.deregister(PATIENCE).unwrap();
}

#[test]
fn a_thousand_sessions_leave_nothing_behind() {
    let (a, b) = (Side::new(), Side::new());
    let address =
        ShmAddress::Abstract(format!("doorbell-cycles-{}", std::process::id()).into_bytes());
    let listener = a.shm.listen(&address).unwrap();
    let cycle = || {
        let at_b = b.shm.connect(&address, PATIENCE).unwrap();
        let at_a = listener.accept(PATIENCE).unwrap();
        use_it(&a, &b, at_a, at_b);
    };
    // What is made once is made.
    (0..5).for_each(|_| cycle());
    let settled = || {
        // The other side's end of a session is cleared away a moment after this side's.
        let deadline = Instant::now() + PATIENCE;
        let mut last = open();
        while Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
            let now = open();
            if now == last {
                break;
            }
            last = now;
        }
        last
    };
    let before = settled();
    (0..1000).for_each(|_| cycle());
    assert_eq!(settled(), before);
}
