//! What the device gets to see, and everything that it may do wrong.

use std::time::{Duration, Instant};

use crate::common::{Options, PATIENCE, Rig};
use doorbell_device::layout::CqKind;
use doorbell_hca::verbs::VerbsConfig;
use doorbell_hca::verbs::library::abi::{event_type, wc_status};
use doorbell_hca::{Affinity, Cores, Destination, HcaConfig, HcaError, QpState};
use doorbell_verbs_mock::{Config, Mock, Path, Srd};
use doorbell_wire::{Remote, Syndrome, Vendor, Wqe};

use crate::pair::*;

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
            p.mock.refuse_post(nth, libc::ENOMEM);
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
        p.mock.refuse_post(0, libc::EINVAL);
        let at = p.a.go(Wqe::write(to, src.local(0, 8)).expect("a length"));
        assert_eq!(
            p.error_of(at),
            (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN)
        );
        assert!(!p.refusals().is_empty());
    });
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

/// What becomes of a write of which the device says what soft-RoCE says of the first packet that finds no interface.
fn finds_no_interface(p: &mut Pair) -> (Syndrome, Vendor) {
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let write = Wqe::write(p.there(&dst, 0), src.local(0, 8)).expect("a length");
    p.mock.fail_request(0, wc_status::LOC_QP_OP_ERR, 0);
    p.fails(write)
}

#[test]
fn a_port_that_went_down_is_no_fault_of_the_work_request() {
    let mut p = Pair::new(Config::default());
    p.mock.set_active(false);
    let fault = finds_no_interface(&mut p);
    assert_eq!(fault, (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN));
}

#[test]
fn a_port_that_says_so_after_its_first_failures_went_down_all_the_same() {
    let mut p = Pair::new(Config::default());
    p.mock.go_down_after(3);
    let fault = finds_no_interface(&mut p);
    assert_eq!(fault, (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN));
}

#[test]
fn a_port_that_stays_up_is_waited_for_once() {
    let mut p = Pair::new(Config::default());
    let fault = finds_no_interface(&mut p);
    assert_eq!(fault, (Syndrome::LOCAL_QP_OP, Vendor::NONE));
    // The next failure asks once, and hears that it is up.
    (p.a, p.b) = (p.rig.qp(), p.rig.qp());
    join(&p.a, &p.b, &p.port);
    p.mock.go_down_after(1);
    let fault = finds_no_interface(&mut p);
    assert_eq!(fault, (Syndrome::LOCAL_QP_OP, Vendor::NONE));
}

#[test]
fn service_level_traffic_class_partition_and_path_mtu_reach_the_device() {
    let p = Pair::with(Config::default(), Options::default(), |config| {
        (config.service_level, config.traffic_class) = (3, 106);
        (config.pkey_index, config.mtu) = (2, 1024);
    });
    for qp in [&p.a, &p.b] {
        let end = qp.hca_qp().prepare(&p.port, PATIENCE).expect("it has one");
        assert_eq!(end.mtu, 1024, "the peer hears of it");
        let expected = Path {
            mtu: 3,
            service_level: 3,
            traffic_class: 106,
            pkey_index: 2,
        };
        assert_eq!(p.mock.path(end.qpn), Some(expected));
    }
    // Who is told of less uses less, and who would use more than the port has does not.
    let p = Pair::with(Config::default(), Options::default(), |c| c.mtu = u16::MAX);
    let end = p.a.hca_qp().prepare(&p.port, PATIENCE).expect("it has one");
    assert_eq!(end.mtu, 4096);
}

#[test]
fn devices_that_cannot_be_used_say_why() {
    let refused = |config: Config, change: fn(&mut VerbsConfig)| {
        let (rig, mock) = (Rig::new(), Mock::new(config));
        let mut wanted = VerbsConfig::new(mock.name());
        change(&mut wanted);
        let opened = rig.hca.open_verbs(&mock.verbs(), &wanted);
        opened.expect_err("refused").to_string()
    };
    let iwarp = Config {
        iwarp: true,
        ..Config::default()
    };
    let text = refused(iwarp, |_| {});
    assert!(text.contains("it speaks iWARP"), "{text}");
    let locked = Config {
        refuse_open: libc::EACCES,
        ..Config::default()
    };
    let text = refused(locked, |_| {});
    assert!(
        text.contains("opening it (/dev/infiniband/uverbs"),
        "{text}"
    );
    let efa = Config {
        srd: Some(Srd::default()),
        ..Config::default()
    };
    for change in [
        (|c| c.service_level = 1) as fn(&mut VerbsConfig),
        |c| c.traffic_class = 1,
        |c| c.pkey_index = 1,
    ] {
        let text = refused(efa, change);
        assert!(text.contains("leave out sl, tc and pkey"), "{text}");
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
fn a_receive_into_memory_that_is_gone_never_reaches_the_device() {
    both(|config| {
        let mut p = Pair::new(config);
        let (src, dst) = (p.rig.region(64), p.rig.region(64));
        let send = || Wqe::send(src.local(0, 5)).expect("a length");
        let local = dst.local(0, 64);
        // The receiver sends nothing, so nothing else makes it look at its keys anew.
        let number = p.b.post_receive(&[local]);
        p.run(send());
        assert!(p.rig.until(|| p.b.received(number).is_some()));
        drop(dst);
        // Not even the dead key: the device may have given its number to another region.
        let before = p.mock.counts().receive_pieces;
        let number = p.b.post_receive(&[local]);
        p.fails(send());
        assert_eq!(p.mock.counts().receive_pieces, before);
        assert!(p.rig.until(|| p.b.receive_error(number).is_some()));
        let error = p.b.receive_error(number).expect("just seen");
        assert_eq!(
            (error.syndrome, error.vendor),
            (Syndrome::LOCAL_PROT, Vendor::REVOKED)
        );
    });
}

#[test]
fn memory_that_the_device_refuses_is_explained() {
    let mut p = Pair::new(Config::default());
    let (src, dst) = (p.rig.region(64), p.rig.region(64));
    let to = p.there(&dst, 0);
    p.mock.refuse_memory(Some(libc::ENOMEM));
    let fault = p.fails(Wqe::write(to, src.local(0, 8)).expect("a length"));
    assert_eq!(fault, (Syndrome::LOCAL_QP_OP, Vendor::UNSUPPORTED));
    let reasons = p.refusals();
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
    mock.refuse_connection(Some(libc::ETIMEDOUT));
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
    let mut companion = p.rig.loopback(Options::default());
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

#[test]
fn an_event_reaches_its_queue_pair_whichever_core_reads_it() {
    let rig = Rig::with(HcaConfig {
        cores: Cores::Threads(2),
        affinity: Affinity::None,
        ..HcaConfig::default()
    });
    let mock = Mock::new(Config::default());
    let wanted = VerbsConfig::new(mock.name());
    let port = rig.hca.open_verbs(&mock.verbs(), &wanted).expect("opens");
    let qps: Vec<_> = (0..16)
        .map(|i| {
            rig.qp_with(Options {
                core: Some(i % 2),
                ..Options::default()
            })
        })
        .collect();
    for two in qps.chunks(2) {
        join(&two[0], &two[1], &port);
    }
    // The device's queue pairs work, so nobody finds out by asking.
    for (i, qp) in qps.iter().enumerate() {
        let end = qp.hca_qp().prepare(&port, PATIENCE).expect("its number");
        let (event, expected) = match i % 3 {
            0 => (event_type::QP_FATAL, Syndrome::TRANSPORT_RETRY),
            _ => (event_type::QP_ACCESS_ERR, Syndrome::LOCAL_ACCESS),
        };
        mock.raise(event, end.qpn);
        let until = Instant::now() + PATIENCE;
        // The word that kernels read comes after the state.
        while qp.error_word().syndrome() == 0 {
            assert!(Instant::now() < until, "queue pair {i} was not told");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(qp.error_word().syndrome(), expected.0);
        assert_eq!(qp.state(), QpState::Error);
        let others = qps[i + 1..].iter().all(|q| q.state() == QpState::Ready);
        assert!(others, "only that one");
    }
}
