//! Every opcode, on both kinds of CQ and every way of ringing.

mod common;

use common::{MockQp, Options, Rig};
use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_hca::{Access, Addressing, QpState};
use doorbell_wire::{Fence, Opcode, Wqe};

const HANDLERS: [NicHandler; 3] = [
    NicHandler::ProducerWord,
    NicHandler::DoorbellRecord,
    NicHandler::DoorbellOnly,
];
const KINDS: [CqKind; 2] = [CqKind::PerSlot, CqKind::Collapsed];

fn each(mut f: impl FnMut(&Rig, MockQp)) {
    for handler in HANDLERS {
        for kind in KINDS {
            for (poll_record, own_word) in [(false, false), (false, true), (true, false)] {
                if poll_record && handler != NicHandler::DoorbellRecord || cfg!(miri) && own_word {
                    continue;
                }
                let rig = Rig::new();
                let options = Options {
                    handler,
                    kind,
                    poll_record,
                    own_word,
                    ..Options::default()
                };
                let qp = rig.loopback(options);
                f(&rig, qp);
            }
        }
    }
}

#[test]
fn nop_and_write_and_read() {
    each(|rig, mut qp| {
        let (a, b) = (rig.region(256), rig.region(256));
        a.fill(0, &(0..=255).collect::<Vec<u8>>());
        let cqe = qp.run(rig, Wqe::nop());
        assert_eq!(
            (cqe.opcode, cqe.qpn),
            (Opcode::Nop as u8, qp.hca_qp().qpn())
        );
        for (len, from, to) in [
            (8, 0, 0),
            (1, 3, 9),
            (64, 8, 16),
            (65, 7, 1),
            (200, 0, 56),
            (0, 0, 0),
        ] {
            b.fill(0, &[0; 256]);
            if len == 0 {
                qp.run(rig, Wqe::write_inline(b.remote(0), &[]).expect("empty"));
            } else {
                qp.run(
                    rig,
                    Wqe::write(b.remote(to), a.local(from, len)).expect("write"),
                );
            }
            let mut want = vec![0; 256];
            want[to as usize..(to + u64::from(len)) as usize]
                .copy_from_slice(&a.bytes(from as usize, len as usize));
            assert_eq!(b.bytes(0, 256), want, "WRITE of {len}");
            if len != 0 {
                b.fill(0, &[0; 256]);
                let cqe = qp.run(
                    rig,
                    Wqe::read(a.remote(from), b.local(to, len)).expect("read"),
                );
                assert_eq!(b.bytes(0, 256), want, "READ of {len}");
                assert_eq!(cqe.opcode, Opcode::RdmaRead as u8);
            }
        }
        assert!(a.canaries_intact() && b.canaries_intact());
        assert_eq!(qp.state(), QpState::Ready);
    });
}

#[test]
fn inline_writes_of_every_length() {
    let rig = Rig::new();
    let mut qp = rig.loopback(Options::default());
    let b = rig.region(128);
    for len in (0..=Wqe::INLINE_MAX).step_by(if cfg!(miri) { 7 } else { 1 }) {
        for to in [0usize, 8, 3] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 3 + len) as u8).collect();
            b.fill(0, &[0xee; 128]);
            qp.run(
                &rig,
                Wqe::write_inline(b.remote(to as u64), &bytes).expect("inline"),
            );
            let mut want = vec![0xee; 128];
            want[to..to + len].copy_from_slice(&bytes);
            assert_eq!(b.bytes(0, 128), want, "{len} bytes at {to}");
        }
    }
}

#[test]
fn atomics_return_the_old_value() {
    each(|rig, mut qp| {
        let (t, s) = (rig.region(64), rig.region(64));
        t.set_u64(8, 40);
        let cqe = qp.run(
            rig,
            Wqe::fetch_add(t.remote(8), s.local(16, 8), 2).expect("fa"),
        );
        assert_eq!(
            (t.u64(8), s.u64(16), cqe.opcode),
            (42, 40, Opcode::FetchAdd as u8)
        );
        // A second one takes the cached keys.
        qp.run(
            rig,
            Wqe::fetch_add(t.remote(8), s.local(0, 8), u64::MAX).expect("fa"),
        );
        assert_eq!((t.u64(8), s.u64(0)), (41, 42));
        qp.run(
            rig,
            Wqe::compare_swap(t.remote(8), s.local(0, 8), 41, 7).expect("cs"),
        );
        assert_eq!((t.u64(8), s.u64(0)), (7, 41));
        qp.run(
            rig,
            Wqe::compare_swap(t.remote(8), s.local(0, 8), 41, 9).expect("cs"),
        );
        assert_eq!((t.u64(8), s.u64(0)), (7, 7), "no match, no swap");
        assert!(t.canaries_intact() && s.canaries_intact());
    });
}

#[test]
fn masked_atomics_of_four_and_eight_bytes() {
    let rig = Rig::new();
    let mut qp = rig.loopback(Options::default());
    let (t, s) = (rig.region(64), rig.region(64));
    t.set_u64(0, 0x0000_00ff_0000_00ff);
    // Two fields of 32 bits: the carry out of the lower one is dropped.
    let boundary = 1 << 31 | 1 << 63;
    qp.run(
        &rig,
        Wqe::masked_fetch_add8(t.remote(0), s.local(0, 8), 1 | 1 << 32, boundary).expect("8"),
    );
    assert_eq!(
        (t.u64(0), s.u64(0)),
        (0x0000_0100_0000_0100, 0x0000_00ff_0000_00ff)
    );
    // Four bytes: the neighbour is not touched, and the old value is big-endian.
    t.set_u64(8, 0x1111_1111_2222_2222);
    qp.run(
        &rig,
        Wqe::masked_fetch_add4(t.remote(12), s.local(8, 4), 1, 0).expect("4"),
    );
    assert_eq!(t.u64(8), 0x1111_1112_2222_2222);
    assert_eq!(s.bytes(8, 4), 0x1111_1111u32.to_be_bytes());
    qp.run(
        &rig,
        Wqe::masked_compare_swap4(
            t.remote(8),
            s.local(8, 4),
            (0x2222_2222, u32::MAX),
            (0xaaaa_aaaa, 0xffff),
        )
        .expect("4"),
    );
    assert_eq!(t.u64(8), 0x1111_1112_2222_aaaa);
    // Two slots, swap under a mask.
    let at = qp.pi;
    qp.run(
        &rig,
        Wqe::masked_compare_swap8(
            t.remote(8),
            s.local(0, 8),
            (0x12, 0xff << 32),
            (u64::MAX, 0xff << 56),
        )
        .expect("8"),
    );
    assert_eq!(qp.pi - at, 2, "the two-slot form");
    assert_eq!(
        t.u64(8),
        0x1111_1112_2222_aaaa,
        "compares 0x12 with byte 4 of 0x...11111112: bits 32 to 39 differ"
    );
    qp.run(
        &rig,
        Wqe::masked_compare_swap8(
            t.remote(8),
            s.local(0, 8),
            (0x12 << 32, 0xff << 32),
            (u64::MAX, 0xff << 56),
        )
        .expect("8"),
    );
    assert_eq!(
        (t.u64(8), s.u64(0)),
        (0xff11_1112_2222_aaaa, 0x1111_1112_2222_aaaa)
    );
}

#[test]
fn dump_checks_its_key_and_fences_are_taken() {
    each(|rig, mut qp| {
        let a = rig.region(64);
        qp.run(rig, Wqe::dump(a.local(63, 1)).expect("dump"));
        for fence in [Fence::Small, Fence::Reads, Fence::Strong, Fence::Full] {
            qp.run(
                rig,
                Wqe::write_inline(a.remote(0), &[fence as u8])
                    .expect("inline")
                    .fence(fence),
            );
            assert_eq!(a.bytes(0, 1), [fence as u8]);
        }
    });
}

#[test]
fn address_based_keys() {
    let rig = Rig::new();
    let mut qp = rig.loopback(Options::default());
    let a = rig.region_with(64, Access::ALL, Addressing::Address, rig.pd);
    let b = rig.region_with(64, Access::ALL, Addressing::At(0x7000_0000_0000), rig.pd);
    assert_ne!(a.at(0), 0);
    a.set_u64(8, 77);
    qp.run(
        &rig,
        Wqe::write(b.remote(16), a.local(8, 8)).expect("write"),
    );
    assert_eq!(b.u64(16), 77);
}

#[test]
fn unsignalled_wqes_complete_with_the_next_signalled_one() {
    let rig = Rig::new();
    let mut qp = rig.loopback(Options::default());
    let a = rig.region(64);
    for round in 0..if cfg!(miri) { 3 } else { 100u64 } {
        for i in 0..5 {
            qp.post(
                &Wqe::write_inline(a.remote(8 * i), &(round + i).to_le_bytes()).expect("inline"),
            );
        }
        let at = qp.post(&Wqe::nop().signalled(true));
        qp.ring();
        qp.wait(&rig, at);
        assert_eq!(a.u64(32), round + 4);
    }
    // An unsignalled one alone is executed but leaves no CQE.
    let before = qp.cqe(0);
    qp.post(&Wqe::write_inline(a.remote(0), &1234u64.to_le_bytes()).expect("inline"));
    qp.ring();
    assert!(rig.until(|| a.u64(0) == 1234));
    rig.driver.poll();
    assert_eq!(qp.cqe(0), before);
}

#[test]
fn gather_and_scatter_lists() {
    use doorbell_wire::{Chunk, seg};
    let rig = Rig::new();
    let mut qp = rig.loopback(Options::default());
    let (a, b) = (rig.region(64), rig.region(64));
    a.fill(0, &(1..=64).collect::<Vec<u8>>());
    let qpn = qp.hca_qp().qpn();
    let head = |at: u64, op, ds| {
        seg::ctrl(
            at as u16,
            op,
            0,
            qpn,
            ds,
            doorbell_wire::flags::CQ_UPDATE,
            0,
        )
    };
    let piece = |r: &common::Region, at, len| seg::data(len, r.key(), r.at(at));
    let inline = seg::inline_first(3, [9, 9, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let wqe: Vec<Chunk> = vec![
        head(qp.pi, Opcode::RdmaWrite, 5),
        seg::raddr(b.at(10), b.key()),
        piece(&a, 0, 4),
        inline,
        piece(&a, 40, 2),
    ];
    let at = qp.post_chunks(&wqe, 2);
    qp.ring();
    qp.wait(&rig, at);
    assert_eq!(b.bytes(9, 11), [0, 1, 2, 3, 4, 9, 9, 9, 41, 42, 0]);
    let wqe = vec![
        head(qp.pi, Opcode::RdmaRead, 4),
        seg::raddr(a.at(0), a.key()),
        piece(&b, 32, 3),
        piece(&b, 40, 2),
    ];
    let at = qp.post_chunks(&wqe, 1);
    qp.ring();
    qp.wait(&rig, at);
    assert_eq!(
        (b.bytes(32, 4), b.bytes(40, 3)),
        (vec![1, 2, 3, 0], vec![4, 5, 0])
    );
    assert!(a.canaries_intact() && b.canaries_intact());
}
