//! Queue pairs that an RDMA device carries out, over a device in memory: every operation, what the device gets to see, and everything that a device
//! may do wrong, with what the poster sees of it.
#![cfg(not(miri))]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{MockQp, Options, PATIENCE, Region, Rig};
use doorbell_device::layout::CqKind;
use doorbell_hca::verbs::library::abi::{event_type, wc_status};
use doorbell_hca::verbs::{VerbsConfig, VerbsEnd, VerbsPort, VerbsTarget};
use doorbell_hca::{Access, Addressing, Destination, Event, HcaError, QpState};
use doorbell_verbs_mock::{Config, Mock};
use doorbell_wire::cqe::{ErrorCqe, Kind};
use doorbell_wire::{Key, Remote, Syndrome, Vendor, Wqe};

/// Two connected queue pairs of one HCA over one device.
struct Pair {
    rig: Rig,
    mock: Mock,
    port: Arc<VerbsPort>,
    a: MockQp,
    b: MockQp,
}

fn target(peer: VerbsEnd, own: VerbsEnd) -> VerbsTarget {
    VerbsTarget {
        peer,
        mtu: 4096,
        sq_psn: own.qpn,
        rq_psn: peer.qpn,
        timeout: 14,
        retry: 7,
        rnr_retry: 7,
        min_rnr_timer: 12,
    }
}

fn join(a: &MockQp, b: &MockQp, port: &Arc<VerbsPort>) {
    let ends = [a, b].map(|q| {
        q.hca_qp()
            .prepare(port, PATIENCE)
            .expect("a device's queue pair")
    });
    for (qp, i) in [(a, 0), (b, 1)] {
        let to = Destination::Verbs(Box::new(target(ends[1 - i], ends[i])));
        qp.hca_qp().connect(to, PATIENCE).expect("connects");
    }
}

impl Pair {
    fn new(config: Config) -> Self {
        Self::with(config, Options::default(), |_| {})
    }

    fn with(config: Config, options: Options, change: impl FnOnce(&mut VerbsConfig)) -> Self {
        let (rig, mock) = (Rig::new(), Mock::new(config));
        let mut wanted = VerbsConfig::new(mock.name());
        wanted.calls = config.calls;
        change(&mut wanted);
        let port = rig.hca.open_verbs(&mock.verbs(), &wanted).expect("opens");
        let a = rig.qp_with(options);
        let b = rig.qp_with(Options {
            receive: true,
            ..Options::default()
        });
        join(&a, &b, &port);
        Self {
            rig,
            mock,
            port,
            a,
            b,
        }
    }

    /// The region as the other side names it.
    fn there(&self, region: &Region, offset: u64) -> Remote {
        let keys = region.mr.on_port(&self.port).expect("registers");
        Remote {
            addr: keys.base + offset,
            key: Key(keys.rkey),
        }
    }

    fn run(&mut self, wqe: Wqe) -> u32 {
        let at = self.a.go(wqe);
        self.a.wait(&self.rig, at).byte_cnt
    }

    /// Runs a WQE that fails; its syndromes.
    fn fails(&mut self, wqe: Wqe) -> (Syndrome, Vendor) {
        let at = self.a.go(wqe);
        self.error_of(at)
    }

    fn error_of(&self, at: u64) -> (Syndrome, Vendor) {
        let cqe = self.a.wait_any(&self.rig, at);
        let error = ErrorCqe::parse(&cqe).expect("an error");
        assert_eq!(self.a.state(), QpState::Error);
        let word = self.a.error_word();
        assert_eq!(word.wqe_index(), at as u16, "the first error is this WQE's");
        (error.syndrome, error.vendor)
    }

    fn again(&mut self) {
        self.a.reset();
        self.b.reset();
        join(&self.a, &self.b, &self.port);
    }
}

fn both(f: impl Fn(Config)) {
    for calls in [true, false] {
        f(Config {
            calls,
            ..Config::default()
        });
    }
}

/// Long enough for what was rung to be posted.
fn poll_some(rig: &Rig) {
    for _ in 0..200 {
        rig.driver.poll();
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7) ^ seed).collect()
}

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

#[test]
fn requests_go_in_batches_and_few_ask_for_completions() {
    both(|config| {
        let options = Options {
            log_depth: 8,
            ..Options::default()
        };
        let mut p = Pair::with(config, options, |_| {});
        let (src, dst) = (p.rig.region(8192), p.rig.region(8192));
        let to = p.there(&dst, 0);
        let before = p.mock.counts();
        for i in 0..256u64 {
            let wqe = Wqe::write(
                Remote {
                    addr: to.addr + 8 * i,
                    ..to
                },
                src.local(8 * i, 8),
            );
            p.a.post(&wqe.expect("a length").signalled(i == 255));
        }
        p.a.ring();
        p.a.wait(&p.rig, 255);
        let now = p.mock.counts();
        assert_eq!(now.requests - before.requests, 256);
        assert!(
            now.posts - before.posts <= 16,
            "{} calls",
            now.posts - before.posts
        );
        let asked = now.signalled - before.signalled;
        assert!((16..=24).contains(&asked), "{asked} completions");
        // Unsignalled to the end: complete all the same, as whoever waits by count must see.
        for i in 0..3u64 {
            let wqe = Wqe::write(to, src.local(8 * i, 8)).expect("a length");
            p.a.post(&wqe.signalled(false));
        }
        p.a.post(&Wqe::nop().signalled(false));
        p.a.ring();
        assert!(p.rig.until(|| p.a.hca_qp().indexes().1 == 260));
    });
}

#[test]
fn a_small_device_queue_never_runs_over() {
    both(|config| {
        let options = Options {
            log_depth: 7,
            ..Options::default()
        };
        let mut p = Pair::with(
            Config {
                max_work: 8,
                ..config
            },
            options,
            |_| {},
        );
        let (src, dst, old) = (p.rig.region(2048), p.rig.region(2048), p.rig.region(8));
        let to = p.there(&dst, 0);
        for lap in 0..20u64 {
            for i in 0..127u64 {
                let wqe = if i % 3 == 0 {
                    Wqe::fetch_add(to, old.local(0, 8), 1).expect("eight bytes")
                } else {
                    let wqe = Wqe::write(
                        Remote {
                            addr: to.addr + 8 * i,
                            ..to
                        },
                        src.local(8 * i, 8),
                    );
                    wqe.expect("a length")
                };
                p.a.post(&wqe.signalled(false));
            }
            let at = p.a.go(Wqe::nop());
            p.a.wait(&p.rig, at);
            assert_eq!(dst.u64(0), 43 * (lap + 1), "each one once");
        }
        let counts = p.mock.counts();
        assert_eq!(counts.overruns, 0);
        assert!(counts.deepest <= 8, "{}", counts.deepest);
    });
}

#[test]
fn posts_that_are_refused_half_way_are_posted_again_from_there() {
    both(|config| {
        let options = Options {
            log_depth: 6,
            ..Options::default()
        };
        let mut p = Pair::with(
            Config {
                max_message: 64,
                ..config
            },
            options,
            |_| {},
        );
        let (src, dst, old) = (p.rig.region(1024), p.rig.region(1024), p.rig.region(8));
        src.fill(0, &pattern(1024, 9));
        let (word, to) = (p.there(&dst, 0), p.there(&dst, 64));
        let mut adds = 0;
        for nth in 0..40 {
            p.mock.refuse_post(nth, libc_enomem());
            dst.fill(64, &[0; 900]);
            for i in 0..10u64 {
                let wqe = match i % 2 {
                    0 => Wqe::fetch_add(word, old.local(0, 8), 1).expect("eight bytes"),
                    // Cut into pieces, so that the refusal comes within a message too.
                    _ => Wqe::write(to, src.local(0, 300)).expect("a length"),
                };
                p.a.post(&wqe.signalled(false));
            }
            adds += 5;
            let at = p.a.go(Wqe::nop());
            p.a.wait(&p.rig, at);
            assert_eq!(dst.u64(0), adds, "refused at {nth}");
            assert_eq!(dst.bytes(64, 300), src.bytes(0, 300));
        }
        assert!(dst.canaries_intact());
        // A refusal for good ends the queue pair, and says what the device said.
        p.mock.refuse_post(0, 22);
        let at = p.a.go(Wqe::write(to, src.local(0, 8)).expect("a length"));
        assert_eq!(
            p.error_of(at),
            (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN)
        );
        let mut said = false;
        while let Some(event) = p.rig.hca.poll_event() {
            said |= matches!(event, Event::DeviceRefused { .. });
        }
        assert!(said);
    });
}

const fn libc_enomem() -> i32 {
    12
}

#[test]
fn completions_out_of_order_and_lost_ones_change_nothing() {
    both(|config| {
        let options = Options {
            log_depth: 6,
            kind: CqKind::PerSlot,
            ..Options::default()
        };
        let mut p = Pair::with(config, options, |_| {});
        let (old, dst) = (p.rig.region(64), p.rig.region(64));
        let to = p.there(&dst, 0);
        let rounds = |p: &mut Pair, n: u64| {
            for _ in 0..n {
                for _ in 0..40 {
                    let wqe = Wqe::fetch_add(to, old.local(0, 8), 1).expect("eight bytes");
                    p.a.post(&wqe.signalled(true));
                }
                p.a.ring();
                let last = p.a.pi - 1;
                p.a.wait(&p.rig, last);
            }
        };
        p.mock.reverse_completions(true);
        rounds(&mut p, 10);
        p.mock.reverse_completions(false);
        assert_eq!(dst.u64(0), 400);
        // One lost completion: the next stands for it.
        p.mock.lose_completions(true);
        let wqe = Wqe::fetch_add(to, old.local(0, 8), 1).expect("eight bytes");
        let lost = p.a.go(wqe);
        for _ in 0..2000 {
            p.rig.driver.poll();
        }
        assert!(p.a.completion(lost).is_none());
        p.mock.lose_completions(false);
        let next = p.a.go(wqe);
        p.a.wait(&p.rig, next);
        p.a.wait(&p.rig, lost);
        assert_eq!(dst.u64(0), 402);
    });
}

#[test]
fn a_device_that_falls_silent_and_has_stopped_is_found_out() {
    let silence = Duration::from_millis(20);
    let mut p = Pair::with(Config::default(), Options::default(), |c| {
        c.silence = silence
    });
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let to = p.there(&dst, 0);
    // Silent but alive: it is waited for, as long as it takes.
    p.mock.stall(true);
    let at = p.a.go(Wqe::write(to, src.local(0, 8)).expect("a length"));
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        p.rig.driver.poll();
    }
    assert_eq!(p.a.state(), QpState::Ready);
    p.mock.stall(false);
    p.a.wait(&p.rig, at);
    // Stopped without a word.
    p.mock.lose_completions(true);
    let at = p.a.go(Wqe::write(to, src.local(0, 8)).expect("a length"));
    poll_some(&p.rig);
    let end = p.a.hca_qp().prepare(&p.port, PATIENCE).expect("its number");
    p.mock.stop(end.qpn);
    assert_eq!(
        p.error_of(at),
        (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN)
    );
}

#[test]
fn the_devices_statuses_come_out_as_syndromes_at_the_right_wqe() {
    for (status, expected) in [
        (wc_status::RETRY_EXC_ERR, Syndrome::TRANSPORT_RETRY),
        (wc_status::RNR_RETRY_EXC_ERR, Syndrome::RNR_RETRY),
        (wc_status::REM_ACCESS_ERR, Syndrome::REMOTE_ACCESS),
        (wc_status::REM_OP_ERR, Syndrome::REMOTE_OP),
        (wc_status::LOC_QP_OP_ERR, Syndrome::LOCAL_QP_OP),
        (wc_status::GENERAL_ERR, Syndrome::LOCAL_QP_OP),
        (wc_status::REM_ABORT_ERR, Syndrome::REMOTE_ABORTED),
    ] {
        let options = Options {
            kind: CqKind::PerSlot,
            ..Options::default()
        };
        let mut p = Pair::with(Config::default(), options, |_| {});
        let (src, dst) = (p.rig.region(64), p.rig.region(64));
        let to = p.there(&dst, 0);
        p.mock.fail_request(2, status, 0xbad);
        for _ in 0..5 {
            let wqe = Wqe::write(to, src.local(0, 8)).expect("a length");
            p.a.post(&wqe.signalled(true));
        }
        p.a.ring();
        p.a.wait(&p.rig, 1);
        assert_eq!(p.error_of(2), (expected, Vendor::NONE), "status {status}");
        assert!(p.rig.until(|| p.a.completion(4).is_some()));
    }
}

#[test]
fn no_receive_for_too_long_is_said_by_the_device() {
    let mut p = Pair::new(Config {
        rnr_looks: Some(50),
        ..Config::default()
    });
    let src = p.rig.region(64);
    let fault = p.fails(Wqe::send(src.local(0, 8)).expect("a length"));
    assert_eq!(fault, (Syndrome::RNR_RETRY, Vendor::NONE));
}

#[test]
fn a_device_that_is_pulled_fails_its_queue_pairs_and_is_opened_anew() {
    both(|config| {
        let mut p = Pair::new(config);
        let (src, dst) = (p.rig.region(64), p.rig.region(64));
        let to = p.there(&dst, 0);
        p.mock.stall(true);
        let at = p.a.go(Wqe::write(to, src.local(0, 8)).expect("a length"));
        poll_some(&p.rig);
        p.mock.remove();
        assert_eq!(
            p.error_of(at),
            (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN)
        );
        assert!(
            p.rig.until(|| p.b.state() == QpState::Error),
            "idle ones too"
        );
        assert!(p.port.is_gone() && p.port.describe().contains("gone"));
        // Everything can still be taken down, and the next device is opened.
        p.a.reset();
        let next = Mock::new(config);
        let port = p
            .rig
            .hca
            .open_verbs(&next.verbs(), &VerbsConfig::new(next.name()));
        assert!(!port.expect("opens").is_gone());
        drop(src);
    });
}

#[test]
fn memory_is_deregistered_under_traffic() {
    both(|config| {
        let mut p = Pair::new(config);
        let (src, dst) = (p.rig.region(64), p.rig.region(64));
        let to = p.there(&dst, 0);
        p.run(Wqe::write(to, src.local(0, 8)).expect("a length"));
        let before = p.mock.counts().regions;
        p.mock.stall(true);
        let at = p.a.go(Wqe::write(to, src.local(0, 8)).expect("a length"));
        poll_some(&p.rig);
        // The request is with the device; its memory goes.
        drop(src);
        assert_eq!(
            p.mock.counts().regions,
            before - 1,
            "the device has let go of it"
        );
        p.mock.stall(false);
        assert_eq!(p.error_of(at), (Syndrome::LOCAL_PROT, Vendor::NONE));
        // And the next use of the dead key never reaches it.
        p.again();
        let src = p.rig.region(64);
        let local = src.local(0, 8);
        drop(src);
        let fault = p.fails(Wqe::write(to, local).expect("a length"));
        assert_eq!(fault, (Syndrome::LOCAL_PROT, Vendor::REVOKED));
        // A region that peers used is out of their reach when it is gone.
        p.again();
        drop(dst);
        let src = p.rig.region(64);
        let fault = p.fails(Wqe::write(to, src.local(0, 8)).expect("a length"));
        assert_eq!(fault, (Syndrome::REMOTE_ACCESS, Vendor::NONE));
    });
}

#[test]
fn memory_that_the_device_refuses_is_explained() {
    let mut p = Pair::new(Config::default());
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let to = p.there(&dst, 0);
    p.mock.refuse_memory(Some(libc_enomem()));
    let fault = p.fails(Wqe::write(to, src.local(0, 8)).expect("a length"));
    assert_eq!(fault, (Syndrome::LOCAL_QP_OP, Vendor::UNSUPPORTED));
    let mut reasons = Vec::new();
    while let Some(event) = p.rig.hca.poll_event() {
        if let Event::DeviceRefused { reason, .. } = event {
            reasons.push(reason);
        }
    }
    assert!(
        reasons.iter().any(|r| r.contains("ulimit -l")),
        "{reasons:?}"
    );
    let other = p.rig.region(64);
    let error = other.mr.on_port(&p.port).expect_err("refused");
    assert!(error.to_string().contains("ulimit -l"), "{error}");
}

#[test]
fn connecting_in_the_wrong_order_and_failures_of_it_can_be_repeated() {
    let (rig, mock) = (Rig::new(), Mock::new(Config::default()));
    let port = rig
        .hca
        .open_verbs(&mock.verbs(), &VerbsConfig::new(mock.name()))
        .expect("opens");
    let (a, b) = (rig.qp(), rig.qp());
    let end = b
        .hca_qp()
        .prepare(&port, PATIENCE)
        .expect("a device's queue pair");
    assert_eq!(b.hca_qp().prepare(&port, PATIENCE).expect("the same"), end);
    let to = || Destination::Verbs(Box::new(target(end, end)));
    let error = a
        .hca_qp()
        .connect(to(), PATIENCE)
        .expect_err("not prepared");
    assert!(matches!(error, HcaError::BadConfig { .. }), "{error}");
    a.hca_qp()
        .prepare(&port, PATIENCE)
        .expect("a device's queue pair");
    mock.refuse_connection(Some(110));
    let error = a
        .hca_qp()
        .connect(to(), PATIENCE)
        .expect_err("no such address");
    assert!(error.to_string().contains("firewall"), "{error}");
    mock.refuse_connection(None);
    assert_eq!(a.state(), QpState::Reset);
    join(&a, &b, &port);
    assert_eq!((a.state(), b.state()), (QpState::Ready, QpState::Ready));
    let error = a.hca_qp().prepare(&port, PATIENCE);
    assert!(error.is_ok(), "its end can be asked for at any time");
    drop((a, b));
    assert_eq!(mock.counts().qps, 0, "nothing stays behind");
    assert_eq!(mock.counts().regions, 0);
}

#[test]
fn waits_and_nops_keep_their_places() {
    let mut p = Pair::new(Config::default());
    let companion = p.rig.loopback(Options::default());
    let mut companion = companion;
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let to = p.there(&dst, 0);
    src.set_u64(0, 5);
    // WAIT for the companion's first completion, then write.
    let cqn = companion.hca_qp().cqn();
    p.a.post(
        &Wqe::write(to, src.local(0, 8))
            .expect("a length")
            .signalled(false),
    );
    p.a.post(&Wqe::wait(0, cqn).signalled(false));
    let wqe = Wqe::write(
        Remote {
            addr: to.addr + 8,
            ..to
        },
        src.local(0, 8),
    )
    .expect("a length");
    let at = p.a.go(wqe);
    for _ in 0..500 {
        p.rig.driver.poll();
    }
    assert_eq!(
        (dst.u64(0), dst.u64(8)),
        (5, 0),
        "the first went, the third waits"
    );
    companion.run(&p.rig, Wqe::nop());
    p.a.wait(&p.rig, at);
    assert_eq!(dst.u64(8), 5);
    // And the other way: the companion waits for requests of the device.
    let (main, count) = (p.a.hca_qp().cqn(), p.a.pi as u32);
    companion.post(&Wqe::wait(count, main).signalled(false));
    let own = p.rig.region(64);
    let after = companion.go(Wqe::write_inline(own.remote(0), &[9; 8]).expect("short"));
    for _ in 0..200 {
        p.rig.driver.poll();
    }
    assert!(companion.completion(after).is_none());
    p.a.post(
        &Wqe::write(to, src.local(0, 8))
            .expect("a length")
            .signalled(false),
    );
    p.a.ring();
    companion.wait(&p.rig, after);
}
