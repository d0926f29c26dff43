//! Every operation, and what is wrong with a request, as on every link.

use crate::common::{Options, PATIENCE};
use doorbell_device::layout::CqKind;
use doorbell_hca::verbs::library::abi::event_type;
use doorbell_hca::{Access, Addressing, QpState};
use doorbell_verbs_mock::Config;
use doorbell_wire::cqe::{ErrorCqe, Kind};
use doorbell_wire::{Fence, Key, Remote, Syndrome, Vendor, Wqe, seg};

use crate::pair::*;

#[test]
fn every_operation() {
    both(|config| {
        let mut p = Pair::new(Config {
            max_message: 100,
            ..config
        });
        let (src, dst, old) = (p.rig.region(4096), p.rig.region(4096), p.rig.region(64));
        let bytes = pattern(4096, 1);
        src.fill(0, &bytes);
        // Lengths around what the device takes at once.
        for len in [0u32, 1, 8, 99, 100, 101, 350] {
            dst.fill(0, &[0; 512]);
            p.run(Wqe::write(p.there(&dst, 3), src.local(5, len)).expect("a length"));
            assert_eq!(dst.bytes(3, len as usize), bytes[5..5 + len as usize]);
            assert_eq!(dst.bytes(3 + len as usize, 8), [0; 8]);
            old.fill(0, &[0; 64]);
            let back = p.rig.region(512);
            p.run(Wqe::read(p.there(&dst, 3), back.local(1, len)).expect("a length"));
            assert_eq!(back.bytes(1, len as usize), bytes[5..5 + len as usize]);
        }
        // Inline data: within what the device takes, beyond it, none.
        for len in [1usize, 8, 92] {
            p.run(Wqe::write_inline(p.there(&dst, 0), &bytes[..len]).expect("short"));
            assert_eq!(dst.bytes(0, len), bytes[..len]);
        }
        dst.set_u64(64, 40);
        p.run(Wqe::fetch_add(p.there(&dst, 64), old.local(0, 8), 2).expect("eight bytes"));
        assert_eq!((dst.u64(64), old.u64(0)), (42, 40));
        p.run(Wqe::compare_swap(p.there(&dst, 64), old.local(8, 8), 42, 7).expect("eight bytes"));
        assert_eq!((dst.u64(64), old.u64(8)), (7, 42));
        p.run(Wqe::nop());
        p.run(Wqe::dump(src.local(0, 64)).expect("a length"));
        let c = p.mock.counts();
        assert_eq!(c.overruns, 0);
        assert!(src.canaries_intact() && dst.canaries_intact() && old.canaries_intact());
        assert_eq!(c.regions, 3 + 2, "three regions, and two of bounce buffers");
    });
}

#[test]
fn inline_data_that_the_device_does_not_take_goes_by_memory_that_it_knows() {
    both(|config| {
        let mut p = Pair::new(Config {
            inline: 16,
            ..config
        });
        let dst = p.rig.region(1024);
        for lap in 0..200u8 {
            let bytes = pattern(80 + usize::from(lap % 13), lap);
            p.run(Wqe::write_inline(p.there(&dst, 9), &bytes).expect("fits a WQE"));
            assert_eq!(dst.bytes(9, bytes.len()), bytes);
        }
        let before = p.mock.counts().inline;
        p.run(Wqe::write_inline(p.there(&dst, 0), &[1; 16]).expect("short"));
        assert_eq!(p.mock.counts().inline, before + 1);
    });
}

#[test]
fn sends_and_immediates_fill_and_consume_receives() {
    both(|config| {
        let mut p = Pair::new(config);
        let (src, dst) = (p.rig.region(256), p.rig.region(256));
        src.fill(0, &pattern(256, 3));
        // More receives than the ring has, so that it goes round; posted after the sends, too.
        for lap in 0..40u32 {
            dst.fill(0, &[0; 256]);
            let first = p.b.post_receive(&[dst.local(0, 10), dst.local(50, 100)]);
            p.b.post_receive(&[]);
            let a1 =
                p.a.go(Wqe::send_imm(src.local(0, 60), lap).expect("a length"));
            let wqe = Wqe::write_imm(p.there(&dst, 200), src.local(0, 8), !lap).expect("a length");
            let a2 = p.a.go(wqe);
            p.a.wait(&p.rig, a2);
            assert!(a2 > a1);
            assert!(p.rig.until(|| p.b.received(first + 1).is_some()));
            let (one, two) = (
                p.b.received(first).expect("one"),
                p.b.received(first + 1).expect("two"),
            );
            assert_eq!(
                (one.tail.kind(), one.byte_cnt, one.imm),
                (Some(Kind::ResponderSendImm), 60, lap)
            );
            assert_eq!(
                (two.tail.kind(), two.byte_cnt, two.imm),
                (Some(Kind::ResponderWriteImm), 8, !lap)
            );
            assert_eq!(dst.bytes(0, 10), src.bytes(0, 10));
            assert_eq!(dst.bytes(50, 50), src.bytes(10, 50));
            assert_eq!(dst.bytes(200, 8), src.bytes(0, 8));
        }
        // Without a receive it waits, and goes on when there is one.
        let at = p.a.go(Wqe::send(src.local(0, 4)).expect("a length"));
        for _ in 0..500 {
            p.rig.driver.poll();
        }
        assert!(p.a.completion(at).is_none());
        let number = p.b.post_receive(&[dst.local(0, 4)]);
        p.a.wait(&p.rig, at);
        assert!(p.rig.until(|| p.b.received(number).is_some()));
    });
}

#[test]
fn receives_that_do_not_fit_fail_both_ends_with_their_reasons() {
    both(|config| {
        // Too short.
        let mut p = Pair::new(config);
        let (src, dst) = (p.rig.region(64), p.rig.region(64));
        let number = p.b.post_receive(&[dst.local(0, 4)]);
        let fault = p.fails(Wqe::send(src.local(0, 5)).expect("a length"));
        assert_eq!(fault, (Syndrome::REMOTE_INVAL_REQ, Vendor::NONE));
        assert!(p.rig.until(|| p.b.receive_error(number).is_some()));
        let error = p.b.receive_error(number).expect("just seen");
        assert_eq!(
            (error.syndrome, error.vendor),
            (Syndrome::LOCAL_LENGTH, Vendor::BAD_LENGTH)
        );
        // Memory that may not be written: a WRITE with immediate does not mind, a SEND does.
        p.again();
        let closed = p
            .rig
            .region_with(64, Access::REMOTE_READ, Addressing::Zero, p.rig.pd);
        let number = p.b.post_receive(&[closed.local(0, 64)]);
        let wqe = Wqe::write_imm(p.there(&dst, 0), src.local(0, 8), 1).expect("a length");
        p.run(wqe);
        assert!(p.rig.until(|| p.b.received(number).is_some()));
        let number = p.b.post_receive(&[closed.local(0, 64)]);
        p.fails(Wqe::send(src.local(0, 5)).expect("a length"));
        assert!(p.rig.until(|| p.b.receive_error(number).is_some()));
        let error = p.b.receive_error(number).expect("just seen");
        assert_eq!(
            (error.syndrome, error.vendor),
            (Syndrome::LOCAL_PROT, Vendor::LKEY_ACCESS)
        );
        assert_eq!(p.b.state(), QpState::Error);
    });
}

#[test]
fn what_is_wrong_here_is_said_as_on_every_link() {
    both(|config| {
        let mut p = Pair::new(config);
        let (src, dst) = (p.rig.region(64), p.rig.region(64));
        let to = p.there(&dst, 0);
        let mut expect = |wqe: Wqe, syndrome, vendor| {
            assert_eq!(p.fails(wqe), (syndrome, vendor));
            p.again();
        };
        let local = src.local(0, 8);
        expect(
            Wqe::write(to, src.local(60, 8)).expect("a length"),
            Syndrome::LOCAL_PROT,
            Vendor::LKEY_RANGE,
        );
        expect(
            Wqe::write(
                to,
                doorbell_wire::Local {
                    key: Key(7),
                    ..local
                },
            )
            .expect("a length"),
            Syndrome::LOCAL_PROT,
            Vendor::BAD_LKEY,
        );
        let masked = Wqe::masked_fetch_add4(to, src.local(0, 4), 1, 0).expect("four bytes");
        expect(masked, Syndrome::LOCAL_QP_OP, Vendor::UNSUPPORTED);
    });
    let mut p = Pair::new(Config {
        atomics: false,
        ..Config::default()
    });
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let to = p.there(&dst, 0);
    let fault = p.fails(Wqe::fetch_add(to, src.local(0, 8), 1).expect("eight bytes"));
    assert_eq!(fault, (Syndrome::LOCAL_QP_OP, Vendor::UNSUPPORTED));
}

#[test]
fn a_refused_remote_access_fails_its_own_wqe_and_flushes_the_rest() {
    for kind in [CqKind::Collapsed, CqKind::PerSlot] {
        let options = Options {
            kind,
            ..Options::default()
        };
        let mut p = Pair::with(Config::default(), options, |_| {});
        let (src, dst) = (p.rig.region(64), p.rig.region(64));
        src.set_u64(0, 0x77);
        let to = p.there(&dst, 0);
        let beyond = Remote {
            addr: to.addr + 60,
            ..to
        };
        let write = |to| {
            Wqe::write(to, src.local(0, 8))
                .expect("a length")
                .signalled(true)
        };
        p.a.post(&write(to));
        let bad = p.a.post(&write(beyond));
        let last = p.a.post(&write(Remote {
            addr: to.addr + 8,
            ..to
        }));
        p.a.ring();
        assert!(p.rig.until(|| p.a.state() == QpState::Error));
        assert_eq!(p.a.error_word().wqe_index(), bad as u16);
        let cqe = p.a.wait_any(&p.rig, last);
        assert_eq!(
            ErrorCqe::parse(&cqe).expect("flushed").syndrome,
            Syndrome::WR_FLUSH
        );
        if kind == CqKind::PerSlot {
            assert_eq!(p.error_of(bad), (Syndrome::REMOTE_ACCESS, Vendor::NONE));
        }
        assert_eq!((dst.u64(0), dst.u64(8)), (0x77, 0));
        // The other side learns that it was asked for what it did not grant.
        p.b.post_receive(&[]);
        p.mock.raise(event_type::QP_ACCESS_ERR, 0);
        assert!(p.rig.until(|| {
            let first = p.b.hca_qp().first_error();
            if first.is_none() {
                let end = p.b.hca_qp().prepare(&p.port, PATIENCE).expect("its number");
                p.mock.raise(event_type::QP_ACCESS_ERR, end.qpn);
            }
            first.is_some()
        }));
        assert_eq!(p.b.error_word().syndrome(), Syndrome::LOCAL_ACCESS.0);
    }
}

#[test]
fn a_queue_pair_that_the_peer_broke_without_a_word_is_found_out() {
    let p = Pair::new(Config::default());
    let end = p.b.hca_qp().prepare(&p.port, PATIENCE).expect("its number");
    p.mock.stop(end.qpn);
    assert!(p.rig.until(|| p.b.state() == QpState::Error));
    assert_eq!(p.b.error_word().syndrome(), Syndrome::LOCAL_ACCESS.0);
    assert_eq!(p.a.state(), QpState::Ready);
}

/// What the device got to see of some requests.
fn seen(p: &Pair, before: &doorbell_verbs_mock::Counts) -> [u64; 4] {
    let now = p.mock.counts();
    [
        now.requests - before.requests,
        now.signalled - before.signalled,
        now.inline - before.inline,
        now.fenced - before.fenced,
    ]
}

#[test]
fn requests_whose_keys_are_known_reach_the_device_as_those_that_are_taken_apart() {
    both(|config| {
        let mut p = Pair::new(config);
        let dst = p.rig.region(512);
        let to = p.there(&dst, 8);
        for fence in [Fence::None, Fence::Full, Fence::Small] {
            for operation in 0..8 {
                // The first use of a key takes the request apart, the second does not; inline data never is, if it is short.
                let own = p.rig.region(64);
                let local = own.local(8, 24);
                let eight = own.local(32, 8);
                let wqe = match operation {
                    0 => Wqe::write(to, local),
                    1 => Wqe::write_imm(to, local, 0x0102_0304),
                    2 => Wqe::read(to, local),
                    3 => Wqe::send(local),
                    4 => Wqe::send_imm(local, 0x0a0b_0c0d),
                    5 => Wqe::fetch_add(to, eight, 5),
                    6 => Wqe::compare_swap(to, eight, 77, 99),
                    _ => Wqe::write_inline(to, &pattern(27, 3)),
                };
                let wqe = wqe.expect("a valid request").fence(fence);
                let mut outcomes = Vec::new();
                for _ in 0..2 {
                    own.fill(0, &pattern(64, 1));
                    dst.fill(0, &[9; 512]);
                    dst.set_u64(8, 77);
                    let number = matches!(operation, 1 | 3 | 4)
                        .then(|| p.b.post_receive(&[dst.local(100, 64)]));
                    poll_some(&p.rig);
                    let before = p.mock.counts();
                    let count = p.run(wqe);
                    let got = number.map(|n| {
                        assert!(p.rig.until(|| p.b.received(n).is_some()));
                        let cqe = p.b.received(n).expect("just seen");
                        (cqe.byte_cnt, cqe.imm)
                    });
                    let bytes = (own.bytes(0, 64), dst.bytes(0, 512));
                    outcomes.push((count, got, bytes, seen(&p, &before)));
                }
                assert!(
                    outcomes[0] == outcomes[1],
                    "operation {operation}: {outcomes:?}"
                );
                let fenced = u64::from(fence != Fence::None);
                assert_eq!(outcomes[0].3[3], fenced, "{fence:?}, operation {operation}");
            }
        }
    });
}

#[test]
fn what_is_wrong_with_a_request_whose_key_is_known_is_said_too() {
    both(|config| {
        let mut p = Pair::new(config);
        let dst = p.rig.region(64);
        let to = p.there(&dst, 0);
        let closed = Access::REMOTE_READ;
        for (wrong, expected) in [
            (0, Vendor::LKEY_RANGE),
            (1, Vendor::LKEY_ACCESS),
            (2, Vendor::LKEY_ACCESS),
        ] {
            let own = match wrong {
                1 | 2 => p.rig.region_with(64, closed, Addressing::Zero, p.rig.pd),
                _ => p.rig.region(64),
            };
            // Now it is known.
            p.run(Wqe::write(to, own.local(0, 8)).expect("a length"));
            let wqe = match wrong {
                0 => Wqe::write(to, own.local(60, 8)),
                1 => Wqe::read(to, own.local(0, 8)),
                _ => Wqe::fetch_add(to, own.local(0, 8), 1),
            };
            assert_eq!(
                p.fails(wqe.expect("a valid request")).1,
                expected,
                "{wrong}"
            );
            p.again();
        }
        // Only a hand that writes rings can ask for a word that lies askew.
        let own = p.rig.region(64);
        p.run(Wqe::write(to, own.local(0, 8)).expect("a length"));
        let wqe = Wqe::fetch_add(to, own.local(0, 8), 1).expect("eight bytes");
        let mut chunks = wqe.signalled(true).emit(p.a.pi as u16, p.a.hca_qp().qpn());
        chunks[1] = seg::raddr(to.addr + 4, to.key);
        let at = p.a.post_chunks(&chunks[..4], 1);
        p.a.ring();
        assert_eq!(p.error_of(at).1, Vendor::MISALIGNED);
        p.again();
        // A key that was given back is not known any more.
        let own = p.rig.region(64);
        p.run(Wqe::write(to, own.local(0, 8)).expect("a length"));
        let local = own.local(0, 8);
        drop(own);
        let fault = p.fails(Wqe::write(to, local).expect("a length"));
        assert_eq!(fault.1, Vendor::REVOKED);
    });
}

#[test]
#[ignore = "heavy: a million atomics, one after the other"]
fn heavy_a_million_signals_each_once() {
    both(|config| {
        let options = Options {
            log_depth: 8,
            ..Options::default()
        };
        let mut p = Pair::with(config, options, |_| {});
        let (dst, old) = (p.rig.region(8), p.rig.region(8));
        let wqe = Wqe::fetch_add(p.there(&dst, 0), old.local(0, 8), 1).expect("eight bytes");
        let (laps, lap) = (4000, 250);
        for _ in 0..laps {
            for _ in 1..lap {
                p.a.post(&wqe.signalled(false));
            }
            let at = p.a.go(wqe);
            p.a.wait(&p.rig, at);
        }
        assert_eq!((dst.u64(0), old.u64(0)), (1_000_000, 999_999));
        assert_eq!(p.mock.counts().overruns, 0);
    });
}
