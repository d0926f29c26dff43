//! Over SRD: the device carries requests out in whatever order it draws, and the poster sees nothing of it.

use std::time::{Duration, Instant};

use crate::common::{Options, PATIENCE, Rig};
use doorbell_device::layout::CqKind;
use doorbell_hca::verbs::VerbsConfig;
use doorbell_hca::verbs::library::abi::wc_status;
use doorbell_hca::{Access, Addressing, Destination, QpState};
use doorbell_verbs_mock::{Config, Mock, Srd};
use doorbell_wire::cqe::Kind;
use doorbell_wire::{Key, Remote, Syndrome, Vendor, Wqe};

use crate::pair::*;

fn efa(seed: u64) -> Config {
    Config {
        srd: Some(Srd {
            seed,
            ..Srd::default()
        }),
        ..Config::default()
    }
}

fn deep(kind: CqKind) -> Options {
    Options {
        log_depth: 8,
        kind,
        ..Options::default()
    }
}

/// With several orders of things.
fn seeds(f: impl Fn(Config)) {
    for seed in [1, 7, 99] {
        f(efa(seed));
    }
}

#[test]
fn every_operation_does_what_it_does_elsewhere() {
    seeds(|config| {
        let mut p = Pair::new(config);
        assert!(p.port.describe().contains("untested on hardware"));
        let (src, dst, old) = (p.rig.region(4096), p.rig.region(4096), p.rig.region(64));
        src.fill(0, &pattern(4096, 5));
        for len in [0, 1, 8, 48, 1000, 4096] {
            dst.fill(0, &[0; 4096]);
            let to = p.there(&dst, 0);
            p.run(Wqe::write(to, src.local(0, len)).expect("a length"));
            assert_eq!(dst.bytes(0, len as usize), src.bytes(0, len as usize));
            src.fill(0, &pattern(4096, len as u8));
            p.run(Wqe::read(to, src.local(0, len)).expect("a length"));
            assert_eq!(dst.bytes(0, len as usize), src.bytes(0, len as usize));
        }
        let inline = pattern(90, 3);
        p.run(Wqe::write_inline(p.there(&dst, 11), &inline).expect("fits"));
        assert_eq!(dst.bytes(11, 90), inline);
        dst.set_u64(64, 40);
        let word = p.there(&dst, 64);
        p.run(Wqe::fetch_add(word, old.local(0, 8), 2).expect("eight bytes"));
        assert_eq!((dst.u64(64), old.u64(0)), (42, 40));
        p.run(Wqe::compare_swap(word, old.local(8, 8), 42, 7).expect("eight bytes"));
        assert_eq!((dst.u64(64), old.u64(8)), (7, 42));
        p.run(Wqe::compare_swap(word, old.local(8, 8), 42, 9).expect("eight bytes"));
        assert_eq!((dst.u64(64), old.u64(8)), (7, 7));
        // Masked ones and those of four bytes are the engine's, so they are there too.
        p.run(Wqe::masked_fetch_add4(word, old.local(16, 4), 5, 0).expect("four bytes"));
        assert_eq!(dst.u64(64), 12);
        assert_eq!(old.bytes(16, 4), [0, 0, 0, 7], "big-endian, as mlx5's");
        p.run(Wqe::nop());
        p.run(Wqe::dump(src.local(0, 64)).expect("a length"));
        assert_eq!(p.mock.counts().overruns, 0);
        assert!(src.canaries_intact() && dst.canaries_intact() && old.canaries_intact());
    });
}

/// Puts and a signal behind them: whenever the signal is seen, the puts are there.
fn signals_follow_puts(config: Config, signal: impl Fn(&Pair, Remote, u64) -> Wqe) {
    let mut p = Pair::with(config, deep(CqKind::Collapsed), |_| {});
    let (src, dst) = (p.rig.region(64 * 1024), p.rig.region(64 * 1024));
    let flag = p.rig.region(64);
    let to = p.there(&dst, 0);
    let word = p.there(&flag, 0);
    for lap in 1..=60u64 {
        src.fill(0, &pattern(16 * 2048, lap as u8));
        for i in 0..16u64 {
            let to = Remote {
                addr: to.addr + 2048 * i,
                ..to
            };
            let wqe = Wqe::write(to, src.local(2048 * i, 2048)).expect("a length");
            p.a.post(&wqe.signalled(false));
        }
        let wqe = signal(&p, word, lap);
        let last = p.a.go(wqe);
        let start = Instant::now();
        while flag.u64(0) != lap {
            p.rig.driver.poll();
            assert!(start.elapsed() < PATIENCE, "signal {lap} never came");
        }
        assert!(
            dst.bytes(0, 16 * 2048) == src.bytes(0, 16 * 2048),
            "the signal of lap {lap} came before what it announces"
        );
        p.a.wait(&p.rig, last);
    }
    assert!(p.mock.counts().overtaken > 100, "the device kept the order");
}

#[test]
fn atomic_signals_come_after_the_puts_before_them() {
    seeds(|config| {
        let old = std::cell::RefCell::new(None);
        signals_follow_puts(config, |p, word, _| {
            let mut old = old.borrow_mut();
            let old = old.get_or_insert_with(|| p.rig.region(8));
            Wqe::fetch_add(word, old.local(0, 8), 1).expect("eight bytes")
        });
    });
}

#[test]
fn inline_signals_come_after_the_puts_before_them() {
    seeds(|config| {
        signals_follow_puts(config, |_, word, lap| {
            Wqe::write_inline(word, &lap.to_ne_bytes()).expect("eight bytes")
        });
    });
}

#[test]
fn short_writes_keep_their_order_unless_it_was_waived() {
    for relaxed in [false, true] {
        let mut in_order = true;
        for seed in 1..20 {
            let change = |c: &mut VerbsConfig| c.relaxed = relaxed;
            let mut p = Pair::with(efa(seed), deep(CqKind::Collapsed), change);
            let (src, dst) = (p.rig.region(512), p.rig.region(64));
            let to = p.there(&dst, 0);
            for i in 0..64u64 {
                src.set_u64(8 * i as usize, i + 1);
                let wqe = Wqe::write(to, src.local(8 * i, 8)).expect("a length");
                p.a.post(&wqe.signalled(false));
            }
            p.a.ring();
            let (mut seen, last) = (0, p.a.go(Wqe::nop()));
            while p.a.completion(last).is_none() {
                p.rig.driver.poll();
                in_order &= dst.u64(0) >= seen;
                seen = dst.u64(0);
            }
        }
        assert_eq!(in_order, !relaxed);
    }
}

#[test]
fn reads_see_what_was_written_before_and_writes_wait_for_them() {
    seeds(|config| {
        let mut p = Pair::with(config, deep(CqKind::Collapsed), |_| {});
        let (src, dst, back) = (p.rig.region(8192), p.rig.region(4096), p.rig.region(4096));
        src.fill(4096, &[0xee; 4096]);
        for lap in 0..40u8 {
            src.fill(0, &pattern(4096, lap));
            let to = p.there(&dst, 0);
            let write = |at| Wqe::write(to, src.local(at, 4096)).expect("a length");
            p.a.post(&write(0).signalled(false));
            let read = Wqe::read(to, back.local(0, 4096)).expect("a length");
            p.a.post(&read.signalled(false));
            // Overwrites what is being read.
            let last = p.a.go(write(4096));
            p.a.wait(&p.rig, last);
            assert!(back.bytes(0, 4096) == src.bytes(0, 4096), "lap {lap}");
            assert!(dst.bytes(0, 4096) == [0xee; 4096]);
        }
    });
}

#[test]
fn completions_come_in_the_order_of_the_queue() {
    seeds(|config| {
        let mut p = Pair::with(config, deep(CqKind::PerSlot), |_| {});
        let (src, dst, old) = (p.rig.region(65536), p.rig.region(65536), p.rig.region(8));
        let to = p.there(&dst, 0);
        for _ in 0..8 {
            let first = p.a.pi;
            for i in 0..100u64 {
                let wqe = match i % 10 {
                    9 => Wqe::fetch_add(to, old.local(0, 8), 1).expect("eight bytes"),
                    4 => Wqe::nop(),
                    _ => Wqe::write(to, src.local(0, 2048)).expect("a length"),
                };
                p.a.post(&wqe.signalled(true));
            }
            p.a.ring();
            let mut next = first;
            let start = Instant::now();
            while next < first + 100 {
                p.rig.driver.poll();
                let complete = |at| p.a.completion(at).is_some();
                while next < first + 100 && complete(next) {
                    next += 1;
                }
                let later = (next + 1..first + 100).find(|at| complete(*at));
                assert_eq!(later, None, "complete before {next}");
                assert!(start.elapsed() < PATIENCE);
            }
        }
    });
}

#[test]
fn sends_and_immediates_find_receives_in_their_order() {
    seeds(|config| {
        let mut p = Pair::with(config, deep(CqKind::Collapsed), |_| {});
        let (src, dst, data) = (
            p.rig.region(20_000),
            p.rig.region(20_000),
            p.rig.region(4096),
        );
        src.fill(0, &pattern(20_000, 3));
        let mut number = 0;
        for lap in 0..20u32 {
            dst.fill(0, &[0; 20_000]);
            data.fill(0, &[0; 4096]);
            // Longer than the device's messages: it goes in parts.
            p.b.post_receive(&[dst.local(0, 10), dst.local(100, 19_000)]);
            p.b.post_receive(&[]);
            p.b.post_receive(&[dst.local(19_500, 100)]);
            p.a.post(&Wqe::send_imm(src.local(0, 15_000), lap).expect("a length"));
            let wqe = Wqe::write_imm(p.there(&data, 0), src.local(0, 4096), !lap);
            p.a.post(&wqe.expect("a length"));
            let last = p.a.go(Wqe::send_inline(&[7; 60]).expect("fits"));
            assert!(p.rig.until(|| p.b.received(number + 1).is_some()));
            assert!(
                data.bytes(0, 4096) == src.bytes(0, 4096),
                "data, then its immediate"
            );
            p.a.wait(&p.rig, last);
            assert!(p.rig.until(|| p.b.received(number + 2).is_some()));
            let got = [0, 1, 2].map(|i| p.b.received(number + i).expect("complete"));
            let kinds = got.map(|c| (c.tail.kind(), c.byte_cnt));
            assert_eq!(kinds[0], (Some(Kind::ResponderSendImm), 15_000));
            assert_eq!(kinds[1], (Some(Kind::ResponderWriteImm), 4096));
            assert_eq!(kinds[2], (Some(Kind::ResponderSend), 60));
            assert_eq!((got[0].imm, got[1].imm), (lap, !lap));
            assert_eq!(dst.bytes(0, 10), src.bytes(0, 10));
            assert!(dst.bytes(100, 14_990) == src.bytes(10, 14_990));
            assert_eq!(dst.bytes(19_500, 60), [7; 60]);
            number += 3;
        }
        assert!(dst.canaries_intact());
    });
}

#[test]
fn messages_without_bytes_have_none_whatever_was_sent_before() {
    let mut p = Pair::new(efa(13));
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    src.fill(0, &[9; 64]);
    for len in [64, 0, 5, 0] {
        dst.fill(0, &[0; 64]);
        let number = p.b.post_receive(&[dst.local(0, 64)]);
        p.run(Wqe::send_imm(src.local(0, len), len).expect("a length"));
        assert!(p.rig.until(|| p.b.received(number).is_some()));
        let got = p.b.received(number).expect("just seen");
        assert_eq!((got.byte_cnt, got.imm), (len, len));
        let rest = 64 - len as usize;
        assert_eq!(dst.bytes(len as usize, rest), vec![0; rest]);
        let number = p.b.post_receive(&[]);
        let wqe = Wqe::write_imm(p.there(&dst, 0), src.local(0, 0), 3).expect("a length");
        p.run(wqe);
        assert!(p.rig.until(|| p.b.received(number).is_some()));
        assert_eq!(p.b.received(number).expect("just seen").byte_cnt, 0);
    }
}

#[test]
fn a_send_waits_for_its_receive_and_not_for_ever() {
    let change = |c: &mut VerbsConfig| c.silence = Duration::from_millis(500);
    let mut p = Pair::with(efa(3), Options::default(), change);
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let at = p.a.go(Wqe::send(src.local(0, 4)).expect("a length"));
    poll_some(&p.rig);
    assert!(p.a.completion(at).is_none());
    let number = p.b.post_receive(&[dst.local(0, 4)]);
    p.a.wait(&p.rig, at);
    assert!(p.rig.until(|| p.b.received(number).is_some()));
    // None at all.
    let fault = p.fails(Wqe::send(src.local(0, 4)).expect("a length"));
    assert_eq!(fault, (Syndrome::RNR_RETRY, Vendor::NO_RECEIVE));
    assert_eq!(p.b.state(), QpState::Ready);
}

#[test]
fn receives_that_do_not_fit_fail_both_ends() {
    seeds(|config| {
        let mut p = Pair::new(config);
        let (src, dst) = (p.rig.region(64), p.rig.region(64));
        let number = p.b.post_receive(&[dst.local(0, 4)]);
        let fault = p.fails(Wqe::send(src.local(0, 5)).expect("a length"));
        assert_eq!(fault, (Syndrome::REMOTE_INVAL_REQ, Vendor::BAD_LENGTH));
        assert!(p.rig.until(|| p.b.receive_error(number).is_some()));
        let error = p.b.receive_error(number).expect("just seen");
        let both = (error.syndrome, error.vendor);
        assert_eq!(both, (Syndrome::LOCAL_LENGTH, Vendor::BAD_LENGTH));
        assert!(p.rig.until(|| p.b.state() == QpState::Error));
        p.again();
        let closed = p
            .rig
            .region_with(64, Access::REMOTE_READ, Addressing::Zero, p.rig.pd);
        let number = p.b.post_receive(&[closed.local(0, 64)]);
        let fault = p.fails(Wqe::send(src.local(0, 5)).expect("a length"));
        assert_eq!(fault, (Syndrome::REMOTE_OP, Vendor::LKEY_ACCESS));
        assert!(p.rig.until(|| p.b.receive_error(number).is_some()));
        let error = p.b.receive_error(number).expect("just seen");
        let both = (error.syndrome, error.vendor);
        assert_eq!(both, (Syndrome::LOCAL_PROT, Vendor::LKEY_ACCESS));
    });
}

#[test]
fn what_the_peer_does_not_grant_is_refused_and_told() {
    let mut p = Pair::new(efa(5));
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let old = p.rig.region(64);
    let to = p.there(&dst, 0);
    let mut expect = |wqe: Wqe, syndrome, vendor| {
        assert_eq!(p.fails(wqe), (syndrome, vendor));
        assert_eq!(p.b.state(), QpState::Ready, "the peer goes on");
        p.again();
    };
    let at = |addr| Remote { addr, ..to };
    let write = |to| Wqe::write(to, src.local(0, 8)).expect("a length");
    let add = |to| Wqe::fetch_add(to, old.local(0, 8), 1).expect("eight bytes");
    expect(
        write(at(to.addr + 60)),
        Syndrome::REMOTE_ACCESS,
        Vendor::NONE,
    );
    let refused = Syndrome::REMOTE_ACCESS;
    expect(add(at(to.addr + 64)), refused, Vendor::RKEY_RANGE);
    expect(add(Remote { key: Key(5), ..to }), refused, Vendor::BAD_RKEY);
    let local = Syndrome::LOCAL_PROT;
    let wqe = Wqe::write(to, src.local(60, 8)).expect("a length");
    expect(wqe, local, Vendor::LKEY_RANGE);
    let wqe = Wqe::fetch_add(to, old.local(60, 8), 1).expect("eight bytes");
    expect(wqe, local, Vendor::LKEY_RANGE);
    // Without the right, of another domain, and gone.
    let closed = p
        .rig
        .region_with(64, Access::REMOTE_READ, Addressing::Zero, p.rig.pd);
    let there = p.there(&closed, 0);
    assert_eq!(p.fails(add(there)), (refused, Vendor::RKEY_ACCESS));
    p.again();
    let elsewhere = p.rig.hca.alloc_pd();
    let foreign = p
        .rig
        .region_with(64, Access::ALL, Addressing::Zero, elsewhere);
    let there = p.there(&foreign, 0);
    assert_eq!(p.fails(add(there)), (refused, Vendor::PD_MISMATCH));
    p.again();
    p.run(add(to));
    drop(dst);
    assert_eq!(p.fails(add(to)), (refused, Vendor::REVOKED));
}

#[test]
fn the_first_error_is_the_first_of_the_queue_whatever_comes_first() {
    for seed in 1..12 {
        let mut p = Pair::with(efa(seed), deep(CqKind::PerSlot), |_| {});
        let (src, dst) = (p.rig.region(65536), p.rig.region(65536));
        let to = p.there(&dst, 0);
        for i in 0..30u64 {
            // Two that fail; the later one may well be told first.
            let addr = match i {
                11 | 13 => to.addr + 65_000,
                _ => to.addr + 2048 * i,
            };
            let wqe = Wqe::write(Remote { addr, ..to }, src.local(0, 2048));
            p.a.post(&wqe.expect("a length").signalled(true));
        }
        p.a.ring();
        assert_eq!(p.error_of(11), (Syndrome::REMOTE_ACCESS, Vendor::NONE));
        for at in 0..11 {
            p.a.wait(&p.rig, at);
        }
        let flushed = p.a.wait_any(&p.rig, 29);
        let flushed = doorbell_wire::cqe::ErrorCqe::parse(&flushed).expect("flushed");
        assert_eq!(flushed.syndrome, Syndrome::WR_FLUSH);
        p.again();
        p.run(Wqe::write(to, src.local(0, 8)).expect("a length"));
    }
}

#[test]
fn the_devices_own_failures_come_out_at_the_right_request() {
    for (status, vendor, expected) in [
        (
            wc_status::REM_INV_RD_REQ_ERR,
            9,
            (Syndrome::TRANSPORT_RETRY, Vendor::PEER_DEAD),
        ),
        (
            wc_status::RESP_TIMEOUT_ERR,
            13,
            (Syndrome::TRANSPORT_RETRY, Vendor::NONE),
        ),
        (
            wc_status::REM_OP_ERR,
            14,
            (Syndrome::REMOTE_OP, Vendor::NONE),
        ),
        (
            wc_status::LOC_LEN_ERR,
            6,
            (Syndrome::LOCAL_LENGTH, Vendor::NONE),
        ),
        (
            wc_status::REM_ABORT_ERR,
            8,
            (Syndrome::REMOTE_ABORTED, Vendor::NONE),
        ),
    ] {
        let mut p = Pair::with(efa(2), deep(CqKind::PerSlot), |_| {});
        let (src, dst, old) = (p.rig.region(4096), p.rig.region(4096), p.rig.region(8));
        let to = p.there(&dst, 0);
        p.run(
            Wqe::write(to, src.local(0, 8))
                .expect("a length")
                .signalled(true),
        );
        p.mock.fail_request(2, status, vendor);
        let first = p.a.pi;
        for i in 0..5 {
            let wqe = match i {
                // The failure is of a message to the peer's engine.
                2 => Wqe::fetch_add(to, old.local(0, 8), 1).expect("eight bytes"),
                _ => Wqe::write(to, src.local(0, 2048)).expect("a length"),
            };
            p.a.post(&wqe.signalled(true));
        }
        p.a.ring();
        p.a.wait(&p.rig, first + 1);
        assert_eq!(p.error_of(first + 2), expected, "vendor error {vendor}");
    }
}

#[test]
fn the_device_never_runs_over_and_is_never_asked_for_what_it_has_not() {
    seeds(|config| {
        let config = Config {
            max_work: 96,
            srd: Some(Srd {
                max_rdma: 1000,
                packet: 600,
                ..config.srd.expect("an EFA device")
            }),
            ..config
        };
        let mut p = Pair::with(config, deep(CqKind::Collapsed), |_| {});
        let (src, dst, old) = (p.rig.region(8192), p.rig.region(8192), p.rig.region(8));
        src.fill(0, &pattern(8192, 1));
        let (to, word) = (p.there(&dst, 8), p.there(&dst, 0));
        let mut adds = 0;
        for _ in 0..10 {
            dst.fill(8, &[0; 8184]);
            for i in 0..60 {
                let wqe = match i % 3 {
                    0 => Wqe::fetch_add(word, old.local(0, 8), 1).expect("eight bytes"),
                    // More than the device writes at once.
                    _ => Wqe::write(to, src.local(0, 5000)).expect("a length"),
                };
                p.a.post(&wqe.signalled(false));
            }
            adds += 20;
            let last = p.a.go(Wqe::nop());
            p.a.wait(&p.rig, last);
            assert_eq!(dst.u64(0), adds, "each once");
            assert!(dst.bytes(8, 5000) == src.bytes(0, 5000));
        }
        let counts = p.mock.counts();
        assert_eq!(counts.overruns, 0);
        assert!(counts.deepest <= 96, "{}", counts.deepest);
    });
}

#[test]
fn posts_that_are_refused_for_now_are_made_again_and_others_end_the_queue_pair() {
    let mut p = Pair::with(efa(4), deep(CqKind::Collapsed), |_| {});
    let (src, dst, old) = (p.rig.region(4096), p.rig.region(4096), p.rig.region(8));
    let (to, word) = (p.there(&dst, 8), p.there(&dst, 0));
    for nth in 0..30 {
        p.mock.refuse_post(nth, libc::ENOMEM);
        for i in 0..10 {
            let wqe = match i % 2 {
                0 => Wqe::fetch_add(word, old.local(0, 8), 1).expect("eight bytes"),
                _ => Wqe::write(to, src.local(0, 2000)).expect("a length"),
            };
            p.a.post(&wqe.signalled(false));
        }
        let last = p.a.go(Wqe::nop());
        p.a.wait(&p.rig, last);
        assert_eq!(dst.u64(0), 5 * (nth + 1));
    }
    p.mock.refuse_post(0, libc::EINVAL);
    let fault = p.fails(Wqe::write(to, src.local(0, 8)).expect("a length"));
    assert_eq!(fault, (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN));
    assert!(!p.refusals().is_empty());
}

#[test]
fn many_signals_are_each_carried_out_once() {
    signals(10_000);
}

#[test]
#[ignore = "heavy: a million signals"]
fn heavy_a_million_signals_are_each_carried_out_once() {
    signals(1_000_000);
}

fn signals(count: u64) {
    let mut p = Pair::with(efa(11), deep(CqKind::Collapsed), |_| {});
    let (dst, old) = (p.rig.region(64), p.rig.region(8));
    let word = p.there(&dst, 0);
    let (mut posted, mut last) = (0, 0);
    while posted < count {
        let burst = 200.min(count - posted);
        for _ in 0..burst {
            let wqe = Wqe::fetch_add(word, old.local(0, 8), 1).expect("eight bytes");
            last = p.a.post(&wqe.signalled(true));
        }
        p.a.ring();
        posted += burst;
        p.a.wait(&p.rig, last);
        // Each found what the one before it had left.
        assert_eq!((dst.u64(0), old.u64(0)), (posted, posted - 1));
    }
}

#[test]
fn devices_that_lack_something_say_so() {
    let rig = Rig::new();
    let open = |srd: Srd| {
        let mock = Mock::new(Config {
            srd: Some(srd),
            ..Config::default()
        });
        let config = VerbsConfig::new(mock.name());
        let port = rig.hca.open_verbs(&mock.verbs(), &config).expect("opens");
        (mock, port)
    };
    // An EFA of the first generation writes nothing remotely.
    let (_mock, port) = open(Srd {
        writes: false,
        ..Srd::default()
    });
    let qp = rig.qp();
    let error = qp.hca_qp().prepare(&port, PATIENCE).expect_err("no writes");
    let text = error.to_string();
    assert!(text.contains("does not write remotely"), "{text}");
    // Without remote reads, only those are missing.
    let mut p = Pair::new(Config {
        srd: Some(Srd {
            reads: false,
            rnr_retry: false,
            ..Srd::default()
        }),
        ..Config::default()
    });
    assert!(p.port.describe().contains("no remote reads"));
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let to = p.there(&dst, 0);
    p.run(Wqe::write(to, src.local(0, 8)).expect("a length"));
    let fault = p.fails(Wqe::read(to, src.local(0, 8)).expect("a length"));
    assert_eq!(fault, (Syndrome::LOCAL_QP_OP, Vendor::UNSUPPORTED));
    // SRD and RC do not reach each other.
    let (_efa, srd) = open(Srd::default());
    let mock = Mock::new(Config::default());
    let rc = rig
        .hca
        .open_verbs(&mock.verbs(), &VerbsConfig::new(mock.name()))
        .expect("opens");
    let (a, b) = (rig.qp(), rig.qp());
    let ends = [
        a.hca_qp().prepare(&srd, PATIENCE).expect("SRD"),
        b.hca_qp().prepare(&rc, PATIENCE).expect("RC"),
    ];
    for (qp, i) in [(&a, 0), (&b, 1)] {
        let to = Destination::Verbs(Box::new(target(ends[1 - i], ends[i])));
        let error = qp.hca_qp().connect(to, PATIENCE).expect_err("other kinds");
        assert!(error.to_string().contains("EFA devices only"), "{error}");
    }
}

#[test]
fn whoever_connects_first_waits_for_the_other() {
    let (rig, mock) = (Rig::new(), Mock::new(efa(8)));
    let port = rig
        .hca
        .open_verbs(&mock.verbs(), &VerbsConfig::new(mock.name()))
        .expect("opens");
    let (mut a, b) = (rig.qp(), rig.qp());
    let [ea, eb] = [&a, &b].map(|q| q.hca_qp().prepare(&port, PATIENCE).expect("SRD"));
    let to = Destination::Verbs(Box::new(target(eb, ea)));
    a.hca_qp().connect(to, PATIENCE).expect("connects");
    let (src, dst) = (rig.region(64), rig.region(64));
    let keys = dst.mr.on_port(&port).expect("registers");
    let there = Remote {
        addr: keys.base,
        key: Key(keys.rkey),
    };
    src.set_u64(0, 0x5151);
    let at = a.go(Wqe::write(there, src.local(0, 8)).expect("a length"));
    poll_some(&rig);
    assert!(a.completion(at).is_none() && dst.u64(0) == 0);
    let to = Destination::Verbs(Box::new(target(ea, eb)));
    b.hca_qp().connect(to, PATIENCE).expect("connects");
    a.wait(&rig, at);
    assert_eq!(dst.u64(0), 0x5151);
}

#[test]
fn a_peer_that_never_comes_or_goes_is_missed() {
    let (rig, mock) = (Rig::new(), Mock::new(efa(8)));
    let mut config = VerbsConfig::new(mock.name());
    config.silence = Duration::from_millis(50);
    let port = rig.hca.open_verbs(&mock.verbs(), &config).expect("opens");
    let (mut a, b) = (rig.qp(), rig.qp());
    let [ea, eb] = [&a, &b].map(|q| q.hca_qp().prepare(&port, PATIENCE).expect("SRD"));
    let to = Destination::Verbs(Box::new(target(eb, ea)));
    a.hca_qp().connect(to, PATIENCE).expect("connects");
    let src = rig.region(64);
    let nowhere = Remote {
        addr: 0,
        key: Key(1),
    };
    a.go(Wqe::write(nowhere, src.local(0, 8)).expect("a length"));
    assert!(rig.until(|| a.state() == QpState::Error));
    assert_eq!(a.error_word().syndrome(), Syndrome::TRANSPORT_RETRY.0);
    drop(b);
    // One that was there and is reset.
    let mut p = Pair::new(efa(9));
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let to = p.there(&dst, 0);
    p.run(Wqe::write(to, src.local(0, 8)).expect("a length"));
    p.b.reset();
    let fault = p.fails(Wqe::write(to, src.local(0, 8)).expect("a length"));
    assert_eq!(fault, (Syndrome::TRANSPORT_RETRY, Vendor::PEER_DEAD));
}

#[test]
fn a_device_that_is_pulled_or_stops_fails_its_queue_pairs() {
    let mut p = Pair::new(efa(6));
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let to = p.there(&dst, 0);
    p.run(Wqe::write(to, src.local(0, 8)).expect("a length"));
    let end = p.b.hca_qp().prepare(&p.port, PATIENCE).expect("its number");
    p.mock.stop(end.qpn);
    assert!(p.rig.until(|| p.b.state() == QpState::Error));
    p.again();
    p.mock.stall(true);
    let at = p.a.go(Wqe::write(to, src.local(0, 8)).expect("a length"));
    poll_some(&p.rig);
    p.mock.remove();
    let gone = (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN);
    assert_eq!(p.error_of(at), gone);
    assert!(p.rig.until(|| p.b.state() == QpState::Error));
    p.a.reset();
    p.b.reset();
}

#[test]
fn memory_goes_under_traffic() {
    let mut p = Pair::new(efa(12));
    let (src, dst) = (p.rig.region(4096), p.rig.region(4096));
    let to = p.there(&dst, 0);
    p.run(Wqe::write(to, src.local(0, 8)).expect("a length"));
    p.mock.stall(true);
    let at =
        p.a.go(Wqe::write(to, src.local(0, 4096)).expect("a length"));
    poll_some(&p.rig);
    drop(src);
    p.mock.stall(false);
    assert_eq!(p.error_of(at), (Syndrome::LOCAL_PROT, Vendor::NONE));
    p.again();
    let src = p.rig.region(64);
    drop(dst);
    let fault = p.fails(Wqe::write(to, src.local(0, 8)).expect("a length"));
    assert_eq!(fault, (Syndrome::REMOTE_ACCESS, Vendor::NONE));
}
