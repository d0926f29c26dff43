//! Every fault of the table: its error CQE and error word, the flush of what follows, nothing else touched, and a QP that works
//! again after a reset.

mod common;

use std::collections::HashSet;
use std::time::Duration;

use common::{MockQp, Options, PATIENCE, Region, Rig};
use doorbell_device::layout::{CqKind, ErrorKind, NicHandler};
use doorbell_hca::{Access, Addressing, Event, Fault, QpState, fault};
use doorbell_wire::cqe::{CqeTail, ErrorCqe, Kind};
use doorbell_wire::{Chunk, Key, Local, Opcode, Remote, Syndrome, Wqe, db, flags, seg};

/// What a case may use. The victim is connected to `peer`.
struct Bed {
    rig: Rig,
    qp: MockQp,
    peer: MockQp,
    /// Source and target regions of the QP's protection domain, all rights.
    src: Region,
    dst: Region,
    /// Regions that lack something.
    bare: Region,
    foreign: Region,
}

impl Bed {
    fn new(kind: CqKind, handler: NicHandler) -> Self {
        let rig = Rig::new();
        let options = Options {
            kind,
            handler,
            ..Options::default()
        };
        let (qp, peer) = (
            rig.qp_with(options),
            rig.qp_with(Options {
                receive: true,
                ..options
            }),
        );
        qp.connect(&peer);
        peer.connect(&qp);
        let region = |access, pd| {
            let region = rig.region_with(256, access, Addressing::Zero, pd);
            region.fill(0, &[0x5a; 256]);
            region
        };
        let other = rig.hca.alloc_pd();
        let (src, dst) = (region(Access::ALL, rig.pd), region(Access::ALL, rig.pd));
        let (bare, foreign) = (region(Access::NONE, rig.pd), region(Access::ALL, other));
        Self {
            qp,
            peer,
            src,
            dst,
            bare,
            foreign,
            rig,
        }
    }

    fn untouched(&self) {
        for region in [&self.src, &self.dst, &self.bare, &self.foreign] {
            assert!(region.canaries_intact());
            assert_eq!(region.bytes(0, 256), [0x5a; 256], "nothing moved");
        }
    }

    fn ctrl(&self, opcode: u8, opmod: u8, ds: u8) -> Chunk {
        let word = self.qp.hca_qp().qpn().get() << 8 | u32::from(ds);
        seg::ctrl_raw(
            self.qp.pi as u16,
            opcode,
            opmod,
            word.swap_bytes(),
            flags::CQ_UPDATE,
            0,
        )
    }

    fn raw(&mut self, chunks: &[Chunk]) {
        self.qp.post_chunks(chunks, 1);
    }

    fn post(&mut self, wqe: Wqe) {
        self.qp.post(&wqe.signalled(true));
    }

    fn write(&mut self, remote: Remote, local: Local) {
        self.post(Wqe::write(remote, local).expect("well formed"));
    }

    fn write_from(&mut self, local: Local) {
        let remote = self.dst.remote(0);
        self.write(remote, local);
    }

    fn write_to(&mut self, remote: Remote) {
        let local = self.src.local(0, 8);
        self.write(remote, local);
    }
}

/// A key that never was.
const NO_KEY: Key = Key(0xdead_0001);

type Case = (&'static str, Fault, fn(&mut Bed));

/// Faults of one WQE, which is posted (not rung) at the producer index.
const WQE_FAULTS: &[Case] = &[
    ("opcode", Fault::BadOpcode, |b| {
        let wqe = [b.ctrl(0x7f, 0, 3), Chunk::ZERO, Chunk::ZERO];
        b.raw(&wqe);
    }),
    ("opmod of a WRITE", Fault::BadOpmod, |b| {
        let wqe = [
            b.ctrl(Opcode::RdmaWrite as u8, 8, 3),
            seg::raddr(0, b.dst.key()),
            seg::data(8, b.src.key(), 0),
        ];
        b.raw(&wqe);
    }),
    ("opmod of a masked atomic", Fault::BadOpmod, |b| {
        let wqe = [
            b.ctrl(Opcode::MaskedFetchAdd as u8, 0, 4),
            seg::raddr(0, b.dst.key()),
            seg::masked_fa8(1, 0),
            seg::data(8, b.src.key(), 0),
        ];
        b.raw(&wqe);
    }),
    ("ds 0", Fault::BadDs, |b| {
        let wqe = [b.ctrl(Opcode::Nop as u8, 0, 0)];
        b.raw(&wqe);
    }),
    ("ds too small", Fault::BadDs, |b| {
        let wqe = [b.ctrl(Opcode::RdmaWrite as u8, 0, 1)];
        b.raw(&wqe);
    }),
    ("WAIT too long", Fault::BadDs, |b| {
        let wqe = [b.ctrl(Opcode::Wait as u8, 0, 3), Chunk::ZERO];
        b.raw(&wqe);
    }),
    ("another QP's number", Fault::BadQpn, |b| {
        let chunks = Wqe::nop()
            .signalled(true)
            .emit(b.qp.pi as u16, b.peer.hca_qp().qpn());
        b.raw(&chunks[..1]);
    }),
    ("an index that never comes", Fault::StaleIndex, |b| {
        let chunks = Wqe::nop()
            .signalled(true)
            .emit(b.qp.pi as u16 ^ 0x100, b.qp.hca_qp().qpn());
        b.raw(&chunks[..1]);
    }),
    ("an atomic's result of 4 bytes", Fault::BadLength, |b| {
        let wqe = [
            b.ctrl(Opcode::FetchAdd as u8, 0, 4),
            seg::raddr(0, b.dst.key()),
            seg::atomic(1, 0),
            seg::data(4, b.src.key(), 0),
        ];
        b.raw(&wqe);
    }),
    ("inline past the WQE", Fault::BadInline, |b| {
        let wqe = [
            b.ctrl(Opcode::RdmaWrite as u8, 0, 3),
            seg::raddr(0, b.dst.key()),
            seg::inline8(1, 13),
        ];
        b.raw(&wqe);
    }),
    ("inline READ", Fault::BadInline, |b| {
        let wqe = [
            b.ctrl(Opcode::RdmaRead as u8, 0, 3),
            seg::raddr(0, b.dst.key()),
            seg::inline8(1, 8),
        ];
        b.raw(&wqe);
    }),
    ("a CQ that does not exist", Fault::BadWaitCq, |b| {
        b.post(Wqe::wait(0, doorbell_wire::Cqn::truncate(0xfff)));
    }),
    ("a CQ number of 32 bits", Fault::BadWaitCq, |b| {
        let wqe = [
            b.ctrl(Opcode::Wait as u8, 0, 2),
            Chunk::from_be32(0, 0, 0, 0x0100_0000),
        ];
        b.raw(&wqe);
    }),
    ("lkey", Fault::BadLkey, |b| {
        b.write_from(Local {
            addr: 0,
            key: NO_KEY,
            len: 8,
        })
    }),
    ("lkey 0", Fault::BadLkey, |b| {
        b.write_from(Local {
            addr: 0,
            key: Key(0),
            len: 8,
        })
    }),
    ("lkey of another domain", Fault::LkeyPd, |b| {
        let local = b.foreign.local(0, 8);
        b.write_from(local);
    }),
    (
        "READ into a region that may not be written",
        Fault::LkeyAccess,
        |b| {
            let wqe = Wqe::read(b.dst.remote(0), b.bare.local(0, 8)).expect("well formed");
            b.post(wqe);
        },
    ),
    ("FETCH_ADD into such a region", Fault::LkeyAccess, |b| {
        let wqe = Wqe::fetch_add(b.dst.remote(0), b.bare.local(0, 8), 1).expect("well formed");
        b.post(wqe);
    }),
    ("local range", Fault::LkeyRange, |b| {
        let local = b.src.local(249, 8);
        b.write_from(local);
    }),
    ("local range that wraps", Fault::LkeyRange, |b| {
        let local = b.src.local(u64::MAX - 3, 8);
        b.write_from(local);
    }),
    ("DUMP out of range", Fault::LkeyRange, |b| {
        let wqe = Wqe::dump(b.src.local(256, 1)).expect("well formed");
        b.post(wqe);
    }),
    ("rkey", Fault::BadRkey, |b| {
        b.write_to(Remote {
            addr: 0,
            key: NO_KEY,
        })
    }),
    ("rkey of another domain", Fault::RkeyPd, |b| {
        let remote = b.foreign.remote(0);
        b.write_to(remote);
    }),
    ("WRITE without the right", Fault::RkeyAccess, |b| {
        let remote = b.bare.remote(0);
        b.write_to(remote);
    }),
    ("READ without the right", Fault::RkeyAccess, |b| {
        let wqe = Wqe::read(b.bare.remote(0), b.src.local(0, 8)).expect("well formed");
        b.post(wqe);
    }),
    ("atomic without the right", Fault::RkeyAccess, |b| {
        let wqe =
            Wqe::compare_swap(b.bare.remote(0), b.src.local(0, 8), 0, 1).expect("well formed");
        b.post(wqe);
    }),
    ("remote range", Fault::RkeyRange, |b| {
        let remote = b.dst.remote(249);
        b.write_to(remote);
    }),
    ("remote range at the very end", Fault::RkeyRange, |b| {
        let remote = b.dst.remote(u64::MAX);
        b.write_to(remote);
    }),
    ("a long WRITE out of range", Fault::RkeyRange, |b| {
        let (remote, local) = (b.dst.remote(0), b.src.local(0, (1 << 31) - 1));
        b.write(remote, local);
    }),
    ("misaligned atomic", Fault::Misaligned, |b| {
        let wqe = [
            b.ctrl(Opcode::FetchAdd as u8, 0, 4),
            seg::raddr(4, b.dst.key()),
            seg::atomic(1, 0),
            seg::data(8, b.src.key(), 0),
        ];
        b.raw(&wqe);
    }),
    ("no receive for an immediate", Fault::NoReceive, |b| {
        let wqe = Wqe::write_imm(b.dst.remote(0), b.dst.local(0, 8), 7).expect("well formed");
        b.post(wqe);
    }),
    ("no receive for a SEND", Fault::NoReceive, |b| {
        let wqe = Wqe::send(b.src.local(0, 8)).expect("well formed");
        b.post(wqe);
    }),
    ("a target in error", Fault::PeerDead, |b| {
        b.peer
            .hca_qp()
            .fail(Fault::Destroyed, PATIENCE)
            .expect("fail");
        b.post(Wqe::nop());
    }),
    ("a target that was reset", Fault::PeerDead, |b| {
        b.peer.reset();
        b.post(Wqe::nop());
    }),
    ("revoked lkey", Fault::LkeyRevoked, |b| {
        let gone = b.rig.region(64);
        let local = gone.local(0, 8);
        gone.mr.deregister(PATIENCE).expect("deregister");
        b.write_from(local);
    }),
    ("revoked rkey", Fault::RkeyRevoked, |b| {
        let gone = b.rig.region(64);
        let remote = gone.remote(0);
        gone.mr.deregister(PATIENCE).expect("deregister");
        b.write_to(remote);
    }),
];

fn expect_error(bed: &mut Bed, at: u64, fault: Fault, what: &str) {
    let (rig, qp) = (&bed.rig, &bed.qp);
    assert!(
        rig.until(|| qp.state() == QpState::Error),
        "{what}: no error"
    );
    let word = qp.error_word();
    assert_eq!(
        (
            word.kind(),
            word.syndrome(),
            word.vendor(),
            word.wqe_index()
        ),
        (
            ErrorKind::Completion,
            fault.syndrome().0,
            fault.vendor().0,
            at as u16
        ),
        "{what}: error word"
    );
    assert_eq!(qp.hca_qp().first_error(), Some(word), "{what}");
    let event = std::iter::from_fn(|| rig.hca.poll_event())
        .find(|e| matches!(e, Event::QpError { qpn, .. } if *qpn == qp.hca_qp().qpn()));
    let Some(Event::QpError {
        syndrome,
        vendor,
        wqe_index,
        ..
    }) = event
    else {
        panic!("{what}: no event");
    };
    assert_eq!(
        (syndrome, vendor, wqe_index),
        (fault.syndrome(), fault.vendor(), at as u16),
        "{what}: event"
    );
}

fn error_of(qp: &MockQp, rig: &Rig, at: u64) -> ErrorCqe {
    let cqe = qp.wait_any(rig, at);
    ErrorCqe::parse(&cqe).expect("an error CQE")
}

fn run_case(kind: CqKind, handler: NicHandler, case: &Case) {
    let (what, fault, post) = *case;
    let mut bed = Bed::new(kind, handler);
    // Some good ones first, so that indexes are not zero.
    for _ in 0..3 {
        bed.qp.run(&bed.rig, Wqe::nop());
    }
    let at = bed.qp.pi;
    post(&mut bed);
    bed.qp.ring();
    expect_error(&mut bed, at, fault, what);
    let error = error_of(&bed.qp, &bed.rig, at);
    assert_eq!(
        (
            error.syndrome,
            error.vendor,
            error.tail.wqe_counter(),
            error.tail.kind()
        ),
        (
            fault.syndrome(),
            fault.vendor(),
            at as u16,
            Some(Kind::RequesterError)
        ),
        "{what}: error CQE"
    );
    // Whatever comes later is flushed, not executed, and the first error stays.
    let remote = bed.dst.remote(0);
    for _ in 0..2 {
        bed.post(Wqe::write_inline(remote, &[1]).expect("inline"));
    }
    let last = bed.qp.pi - 1;
    bed.qp.ring();
    let error = error_of(&bed.qp, &bed.rig, last);
    assert_eq!(
        (error.syndrome, error.tail.wqe_counter()),
        (Syndrome::WR_FLUSH, last as u16),
        "{what}: flush"
    );
    assert_eq!(
        bed.qp.error_word().vendor(),
        fault.vendor().0,
        "{what}: first error kept"
    );
    bed.untouched();
    // After a reset it works again.
    bed.peer.reset();
    bed.qp.reset();
    assert_eq!(
        (bed.qp.state(), bed.qp.error_word().0),
        (QpState::Reset, 0),
        "{what}"
    );
    bed.qp.connect(&bed.peer);
    bed.peer.connect(&bed.qp);
    let (from, to) = (bed.src.local(0, 8), bed.dst.remote(8));
    bed.src.set_u64(0, 99);
    bed.qp.run(&bed.rig, Wqe::write(to, from).expect("write"));
    assert_eq!(bed.dst.u64(8), 99, "{what}: works after a reset");
}

#[test]
fn each_is_answered_and_contained() {
    for (i, case) in WQE_FAULTS.iter().enumerate() {
        if cfg!(miri) && i % 4 != 0 {
            continue; // An interpreter takes seconds for each; the others differ in values only.
        }
        for kind in [CqKind::Collapsed, CqKind::PerSlot] {
            run_case(kind, NicHandler::ProducerWord, case);
        }
        run_case(CqKind::Collapsed, NicHandler::DoorbellRecord, case);
    }
}

#[test]
fn warm_keys_are_checked_as_cold_ones_are() {
    // The hot loop has the keys cached: ranges are still checked, at every alignment of the fault.
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        for (fault, from, to, len) in [
            (Fault::LkeyRange, 250, 0, 8),
            (Fault::LkeyRange, 1 << 40, 0, 8),
            (Fault::RkeyRange, 0, 256, 1),
            (Fault::RkeyRange, 0, u64::MAX - 7, 8),
            (Fault::RkeyRange, 0, 1, 256),
        ] {
            let mut bed = Bed::new(kind, NicHandler::ProducerWord);
            let (src, dst) = (bed.src.local(0, 8), bed.dst.remote(0));
            bed.qp.run(&bed.rig, Wqe::write(dst, src).expect("write"));
            bed.qp.run(&bed.rig, Wqe::write(dst, src).expect("write"));
            let at = bed.qp.pi;
            let (local, remote) = (bed.src.local(from, len), bed.dst.remote(to));
            bed.write(remote, local);
            bed.qp.ring();
            expect_error(&mut bed, at, fault, "warm keys");
            bed.untouched();
        }
        for addr in [249u64, 1 << 63, u64::MAX] {
            let mut bed = Bed::new(kind, NicHandler::ProducerWord);
            let good = Wqe::write_inline(bed.dst.remote(0), &[0x5a; 8]).expect("inline");
            bed.qp.run(&bed.rig, good);
            let at = bed.qp.pi;
            let bad = Wqe::write_inline(bed.dst.remote(addr), &[1; 8]).expect("inline");
            bed.post(bad);
            bed.qp.ring();
            expect_error(&mut bed, at, Fault::RkeyRange, "warm inline");
            bed.untouched();
        }
    }
}

#[test]
fn per_slot_queues_refuse_what_has_no_cqe_of_its_own() {
    let unsignalled: Case = ("unsignalled", Fault::UnsignalledPerSlot, |b| {
        b.qp.post(&Wqe::nop());
    });
    run_case(CqKind::PerSlot, NicHandler::ProducerWord, &unsignalled);
    let unsignalled_write: Case = ("unsignalled WRITE", Fault::UnsignalledPerSlot, |b| {
        let wqe = Wqe::write(b.dst.remote(0), b.src.local(0, 8)).expect("write");
        b.qp.post(&wqe);
    });
    run_case(
        CqKind::PerSlot,
        NicHandler::ProducerWord,
        &unsignalled_write,
    );
    let two_slots: Case = ("two slots", Fault::UnsignalledPerSlot, |b| {
        let wqe = Wqe::write_inline(b.dst.remote(0), &[0; 40]).expect("inline");
        b.post(wqe);
    });
    let mut bed = Bed::new(CqKind::PerSlot, NicHandler::ProducerWord);
    (two_slots.2)(&mut bed);
    bed.qp.ring();
    expect_error(&mut bed, 0, Fault::UnsignalledPerSlot, "two slots");
    let (rig, qp) = (&bed.rig, &bed.qp);
    assert_eq!(
        error_of(qp, rig, 1).syndrome,
        Syndrome::WR_FLUSH,
        "the second slot has its own CQE"
    );
    bed.untouched();
}

#[test]
fn a_wqe_longer_than_what_was_rung() {
    let mut bed = Bed::new(CqKind::Collapsed, NicHandler::ProducerWord);
    let wqe = Wqe::write_inline(bed.dst.remote(0), &[0; 40]).expect("inline");
    bed.post(wqe);
    bed.qp.ring_value(1);
    expect_error(&mut bed, 0, Fault::BadDs, "half rung");
    bed.untouched();
}

#[test]
fn doorbells_that_jump_or_name_another_qp() {
    for handler in [
        NicHandler::ProducerWord,
        NicHandler::DoorbellRecord,
        NicHandler::DoorbellOnly,
    ] {
        for kind in [CqKind::Collapsed, CqKind::PerSlot] {
            let mut bed = Bed::new(kind, handler);
            bed.qp.run(&bed.rig, Wqe::nop());
            bed.qp.ring_value(bed.qp.pi + bed.qp.depth() + 1);
            expect_error(&mut bed, 1, Fault::BadDoorbell, "jump");
            let error = error_of(&bed.qp, &bed.rig, 1);
            assert_eq!(error.vendor, Fault::BadDoorbell.vendor());
            bed.untouched();
        }
    }
    let mut bed = Bed::new(CqKind::Collapsed, NicHandler::DoorbellOnly);
    let other = bed.peer.hca_qp().qpn();
    bed.qp.ring_raw(db::doorbell_word(1, other));
    expect_error(&mut bed, 0, Fault::BadQpn, "doorbell of another QP");
}

#[test]
fn not_connected() {
    let rig = Rig::new();
    let mut qp = rig.qp();
    let at = qp.go(Wqe::nop());
    let error = error_of(&qp, &rig, at);
    assert_eq!(error.vendor, Fault::NotConnected.vendor());
}

#[test]
fn failed_by_the_owner() {
    let rig = Rig::new();
    let mut qp = rig.loopback(Options::default());
    qp.run(&rig, Wqe::nop());
    qp.post(&Wqe::nop().signalled(true));
    qp.post(&Wqe::nop().signalled(true));
    qp.ring();
    qp.hca_qp().fail(Fault::Destroyed, PATIENCE).expect("fail");
    let error = error_of(&qp, &rig, 2);
    assert_eq!(error.syndrome, Syndrome::WR_FLUSH);
    assert_eq!(qp.error_word().kind(), ErrorKind::Closed);
    assert_eq!(qp.error_word().vendor(), Fault::Destroyed.vendor().0);
}

#[test]
fn a_late_control_segment_is_waited_for() {
    let rig = Rig::with(doorbell_hca::HcaConfig {
        stale_limit: Duration::from_secs(60),
        ..doorbell_hca::HcaConfig::caller_driven()
    });
    let mut qp = rig.loopback(Options::default());
    let dst = rig.region(64);
    let wqe = Wqe::write_inline(dst.remote(0), &7u64.to_le_bytes())
        .expect("inline")
        .signalled(true);
    // Rung before it is written: the slot is still empty, then holds an old lap's WQE, then the right one.
    let at = qp.pi;
    qp.pi += 1;
    qp.ring();
    let old = wqe.emit(at as u16 ^ 0x10, qp.hca_qp().qpn());
    rig.driver.poll();
    for _ in 0..10 {
        assert!(
            !rig.driver.poll(),
            "the ring was found, but there is nothing to execute"
        );
    }
    for (i, chunk) in old.iter().enumerate().take(3) {
        qp.write_chunk(at, i, *chunk);
    }
    rig.driver.poll();
    assert_eq!(qp.state(), QpState::Ready);
    for (i, chunk) in wqe
        .emit(at as u16, qp.hca_qp().qpn())
        .iter()
        .enumerate()
        .take(3)
        .rev()
    {
        qp.write_chunk(at, i, *chunk);
    }
    qp.wait(&rig, at);
    assert_eq!(dst.u64(0), 7);
    assert!(qp.hca_qp().counters().stale_reads >= 10);
}

#[test]
fn released_queues_drain_without_executing() {
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let rig = Rig::new();
        let options = Options {
            kind,
            on_error: doorbell_hca::OnError::Release,
            ..Options::default()
        };
        let mut qp = rig.loopback(options);
        let dst = rig.region(64);
        qp.post(
            &Wqe::write_inline(dst.remote(64), &[1])
                .expect("inline")
                .signalled(true),
        );
        for _ in 0..3 {
            qp.post(
                &Wqe::write_inline(dst.remote(0), &[1])
                    .expect("inline")
                    .signalled(true),
            );
        }
        qp.ring();
        qp.wait(&rig, 3);
        assert_eq!(qp.state(), QpState::Error);
        assert_eq!(qp.error_word().vendor(), Fault::RkeyRange.vendor().0);
        assert_eq!(dst.bytes(0, 1), [0], "drained, not executed");
    }
}

#[test]
fn the_cases_cover_the_table() {
    // Raised elsewhere: by other tests of this file (first line), of `lifecycle.rs`, of `sends.rs`, over
    // links that cannot do a request, with a copy engine, and over RoCE (`doorbell`'s tests/roce.rs; the last
    // three need a peer that misbehaves or a port that breaks).
    let elsewhere = [
        Fault::BadDoorbell,
        Fault::UnsignalledPerSlot,
        Fault::NotConnected,
        Fault::Destroyed,
        Fault::Flushed,
        Fault::EngineDown,
        Fault::ReceiveTooShort,
        Fault::ReceiveRefused,
        Fault::Unsupported,
        Fault::DmaFailed,
        Fault::PeerRefused,
        Fault::RemoteAccess,
        Fault::RemoteInvalid,
        Fault::RetryExceeded,
        Fault::RnrExceeded,
        Fault::RemoteOperational,
        Fault::BadResponse,
        Fault::PortDown,
    ];
    let covered: HashSet<Fault> = WQE_FAULTS.iter().map(|c| c.1).chain(elsewhere).collect();
    for row in fault::TABLE {
        assert!(covered.contains(&row.fault), "{:?} has no test", row.fault);
    }
    assert!(!CqeTail::initial(1).is_error());
}
