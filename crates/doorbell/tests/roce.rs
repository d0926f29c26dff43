//! Two devices of one process, connected by RoCE packets over UDP loopback: every operation, lossy networks, and every way to fail.

mod common;

use std::time::{Duration, Instant};

use common::{Bench, LONG, read};
use doorbell::cpu::{self, Post, deadline, local, remote};
use doorbell::device_api::{Fetch, Key};
use doorbell::{
    Config, CpuQp, Device, Endpoint, Error, GpuSelect, HcaCores, LinkKind, Place, Qp, QpState,
    RemoteMr, Reset, RoceWrap,
};

fn config() -> Config {
    Config {
        gpu: Some(GpuSelect::Host),
        hca_cores: Some(HcaCores::Threads(1)),
        roce: Some("udp://127.0.0.1".to_owned()),
        ..Config::default()
    }
}

fn bench(config: Config, len: usize) -> Bench {
    let device = Device::builder().config(config).open().unwrap();
    Bench::new(device, Place::Host, len)
}

/// One side's queue pair and its description.
fn half(b: &Bench) -> (Qp<Reset>, Endpoint) {
    let qp = b.pd.qp().depth(256).build().unwrap();
    let endpoint = qp.endpoint(LinkKind::Roce, &[b.target.remote()]).unwrap();
    // As it would travel.
    let endpoint = Endpoint::from_bytes(&endpoint.to_bytes()).unwrap();
    (qp, endpoint)
}

/// Two queue pairs that know each other.
fn pair(a: &Bench, b: &Bench) -> (Qp, Qp, RemoteMr) {
    let ((qp_a, at_a), (qp_b, at_b)) = (half(a), half(b));
    let qp_a = qp_a.connect(&a.device.destination(&at_b).unwrap()).unwrap();
    let qp_b = qp_b.connect(&b.device.destination(&at_a).unwrap()).unwrap();
    (qp_a, qp_b, at_b.regions[0])
}

fn bytes(from: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ from ^ (i >> 8) as u8)
        .collect()
}

/// A UDP port that nobody has.
fn free_port() -> u16 {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().port()
}

#[test]
fn devices_share_a_udp_port() {
    let config = Config {
        roce: Some(format!("udp://127.0.0.1:{}?share", free_port())),
        ..config()
    };
    let (a, b) = (bench(config.clone(), 1 << 20), bench(config, 1 << 20));
    let (at_a, at_b) = (half(&a).1, half(&b).1);
    assert_eq!(
        at_a.roce.as_ref().unwrap().port.address,
        at_b.roce.as_ref().unwrap().port.address
    );
    assert_ne!(at_a.qpn & 15, at_b.qpn & 15);
    operations(&a, &b);
}

/// Every operation, in sizes around the path MTU.
fn operations(a: &Bench, b: &Bench) {
    let (qp, _other, there) = pair(a, b);
    let mut cpu = CpuQp::new(&qp).unwrap();
    let q = cpu.queue().unwrap();
    let by = deadline(LONG);
    let how = Post::by(by);
    let done =
        |t: Result<cpu::Ticket, doorbell::device_api::Error>| q.wait(t.unwrap(), by).unwrap();
    for len in [
        1, 7, 8, 255, 256, 257, 1024, 4095, 4096, 4097, 61_695, 61_696, 61_697, 100_000,
    ] {
        let sent = bytes(len as u8, len);
        a.source.write(0, &sent).unwrap();
        b.target.write(0, &vec![0; len + 8]).unwrap();
        done(q.put(remote(&there, 0), local(&a.source, 0, len as u64), how));
        assert_eq!(read(&b.target, 0, len), sent, "put of {len}");
        assert_eq!(
            read(&b.target, len, 8),
            [0; 8],
            "nothing after a put of {len}"
        );
        done(q.get(remote(&there, 0), local(&a.target, 0, len as u64), how));
        assert_eq!(read(&a.target, 0, len), sent, "get of {len}");
    }
    done(q.put_inline(remote(&there, 3000), [1, 2, 3, 4, 5, 6, 7], 25, how));
    assert_eq!(
        read(&b.target, 3000, 25),
        [1u32, 2, 3, 4, 5, 6, 7].map(u32::to_le_bytes).concat()[..25]
    );
    done(q.nop(how));
    done(q.dump(how));
    b.target.memory().store(64, 5).unwrap();
    done(q.signal_add(remote(&there, 64), 3, how));
    let old = Fetch {
        addr: a.source.addr(),
        key: Key(a.source.key()),
    };
    done(q.fetch_add(remote(&there, 64), 2, old, how));
    assert_eq!(a.source.memory().load(0).unwrap(), 8);
    done(q.compare_swap(remote(&there, 64), 10, 99, old, how));
    assert_eq!(
        (
            a.source.memory().load(0).unwrap(),
            b.target.memory().load(64).unwrap()
        ),
        (10, 99)
    );
    // Many in flight, in order: the last word counts.
    for i in 0..2000u64 {
        q.put_value(remote(&there, 128), i, 8, how).unwrap();
    }
    done(q.nop(how));
    assert_eq!(b.target.memory().load(128).unwrap(), 1999);
    qp.check().unwrap();
}

#[test]
fn every_operation_over_packets() {
    operations(&bench(config(), 1 << 17), &bench(config(), 1 << 17));
}

#[test]
fn a_smaller_path_mtu_on_one_side_holds_for_both() {
    let small = Config {
        roce_mtu: Some(256),
        ..config()
    };
    let (a, b) = (bench(small, 1 << 17), bench(config(), 1 << 17));
    let (_, at_b) = half(&b);
    match a.device.destination(&at_b).unwrap() {
        doorbell::Destination::Roce(target) => assert_eq!(target.agreed.path_mtu, 256),
        other => panic!("{other:?}"),
    }
    operations(&a, &b);
}

#[test]
fn losses_duplicates_reordering_and_damage_change_nothing_but_counters() {
    let lossy = |seed| Config {
        roce_wrap: RoceWrap {
            fault: Some(format!("loss=3%,dup=3%,reorder=3%,corrupt=2%,seed={seed}")),
            ..RoceWrap::default()
        },
        ..config()
    };
    let (a, b) = (bench(lossy(1), 1 << 17), bench(lossy(2), 1 << 17));
    operations(&a, &b);
    let counters = a.device.roce_counters();
    let of = |name| counters.iter().find(|(n, _)| *n == name).unwrap().1;
    assert!(
        of("injected_loss") > 0 && of("icrc_errors") > 0,
        "{counters:?}"
    );
}

#[test]
fn ipv6_and_caller_driven_cores() {
    let v6 = Config {
        roce: Some("udp://[::1]".to_owned()),
        hca_cores: Some(HcaCores::Caller),
        ..config()
    };
    let passive = Config {
        hca_cores: Some(HcaCores::Threads(1)),
        ..v6.clone()
    };
    let (a, b) = (bench(v6, 1 << 17), bench(passive, 1 << 17));
    operations(&a, &b);
    let (_, at_v4) = half(&bench(config(), 64));
    let error = a.device.destination(&at_v4).unwrap_err();
    assert!(error.to_string().contains("IPv4"), "{error}");
}

/// Posting itself succeeds: what is wrong shows later.
fn post(posted: Result<cpu::Ticket, doorbell::device_api::Error>) {
    posted.unwrap();
}

/// One put that must fail; the syndrome and what the other queue pair is afterwards.
fn failing(qp: &Qp, put: impl FnOnce(&cpu::CpuQueue<'_>, Post)) -> u8 {
    let mut cpu = CpuQp::new(qp).unwrap();
    let q = cpu.queue().unwrap();
    let by = deadline(LONG);
    put(&q, Post::by(by));
    q.flush(by).unwrap_err();
    assert_eq!(qp.state(), QpState::Error);
    qp.error().expect("an error").syndrome().0
}

#[test]
fn wrong_keys_ranges_and_alignments_are_refused_and_touch_nothing() {
    use doorbell::Syndrome;
    let (a, b) = (bench(config(), 4096), bench(config(), 4096));
    let untouched = read(&b.target, 0, 4096);
    let wrong_key = |there: RemoteMr| RemoteMr {
        key: there.key ^ 0x0101,
        ..there
    };
    type Put<'a> = Box<dyn FnOnce(&cpu::CpuQueue<'_>, Post) + 'a>;
    for case in 0..4 {
        let (qp, other, there) = pair(&a, &b);
        let source = local(&a.source, 0, 64);
        let old = Fetch {
            addr: a.source.addr(),
            key: Key(a.source.key()),
        };
        let (put, syndrome): (Put<'_>, Syndrome) = match case {
            0 => (
                Box::new(move |q, how| post(q.put(remote(&wrong_key(there), 0), source, how))),
                Syndrome::REMOTE_ACCESS,
            ),
            1 => (
                Box::new(move |q, how| post(q.put(remote(&there, 4090), source, how))),
                Syndrome::REMOTE_ACCESS,
            ),
            2 => (
                Box::new(move |q, how| post(q.get(remote(&there, u64::MAX), source, how))),
                Syndrome::REMOTE_ACCESS,
            ),
            _ => (
                Box::new(move |q, how| post(q.fetch_add(remote(&there, 4), 1, old, how))),
                Syndrome::REMOTE_INVAL_REQ,
            ),
        };
        assert_eq!(failing(&qp, put), syndrome.0, "case {case}");
        assert_eq!(read(&b.target, 0, 4096), untouched);
        if case < 3 {
            // As the specification has it, the responder stops as well, and says so.
            let event = b.device.next_error(LONG).expect("an event");
            assert!(event.to_string().contains("0x"), "{event}");
            assert_eq!(other.state(), QpState::Error);
        }
    }
}

#[test]
fn masked_atomics_are_refused_before_a_packet_goes_out() {
    let (a, b) = (bench(config(), 4096), bench(config(), 4096));
    let (qp, other, there) = pair(&a, &b);
    let old = Fetch {
        addr: a.source.addr(),
        key: Key(a.source.key()),
    };
    let syndrome = failing(&qp, |q, how| {
        post(q.masked_fetch_add(remote(&there, 0), 1, 0, old, how));
    });
    assert_eq!(syndrome, doorbell::Syndrome::LOCAL_QP_OP.0);
    assert_eq!(qp.error().unwrap().vendor(), doorbell::Vendor::UNSUPPORTED);
    assert_eq!(other.state(), QpState::Ready);
}

#[test]
fn a_peer_that_vanishes_costs_the_configured_time_and_both_come_back() {
    // 4.096 us * 2^13 * 3: 100 ms.
    let short = Config {
        roce_timeout: Some(13),
        roce_retry: Some(2),
        ..config()
    };
    let (a, b) = (bench(short.clone(), 4096), bench(short, 4096));
    let (qp, other, there) = pair(&a, &b);
    // Connected to one who is not: the same as one who is gone.
    let other = other.reset(LONG).unwrap();
    let started = Instant::now();
    let syndrome = failing(&qp, |q, how| {
        q.put(remote(&there, 0), local(&a.source, 0, 8), how)
            .unwrap();
    });
    assert_eq!(syndrome, doorbell::Syndrome::TRANSPORT_RETRY.0);
    assert!(
        started.elapsed() >= Duration::from_millis(90),
        "{:?}",
        started.elapsed()
    );
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());

    // The same two queue pairs, connected again: new packet numbers, old packets are strangers.
    let before = qp.first_psn();
    let qp = qp.reset(LONG).unwrap();
    assert_ne!((before, before), (qp.first_psn(), other.first_psn()));
    let at_a = qp.endpoint(LinkKind::Roce, &[]).unwrap();
    let at_b = other.endpoint(LinkKind::Roce, &[]).unwrap();
    let qp = qp.connect(&a.device.destination(&at_b).unwrap()).unwrap();
    let _other = other
        .connect(&b.device.destination(&at_a).unwrap())
        .unwrap();
    let mut cpu = CpuQp::new(&qp).unwrap();
    let q = cpu.queue().unwrap();
    let by = deadline(LONG);
    let ticket = q.put_value(remote(&there, 0), 77, 8, Post::by(by)).unwrap();
    q.wait(ticket, by).unwrap();
    assert_eq!(b.target.memory().load(0).unwrap(), 77);
}

#[test]
fn strangers_packets_are_counted_and_change_nothing() {
    let (a, b) = (bench(config(), 4096), bench(config(), 4096));
    let (qp, _other, there) = pair(&a, &b);
    let untouched = read(&b.target, 0, 4096);
    let port = b.device.roce_offer().unwrap().address;
    // From another address of this host, with and without right numbers.
    let socket = std::net::UdpSocket::bind("127.0.0.2:0").unwrap();
    for len in [0, 1, 11, 12, 15, 16, 28, 64, 1500, 9000] {
        for fill in [0u8, 0x55, 0xff] {
            socket.send_to(&vec![fill; len], port).unwrap();
        }
    }
    let by = deadline(LONG);
    let mut cpu = CpuQp::new(&qp).unwrap();
    let q = cpu.queue().unwrap();
    let ticket = q.put_value(remote(&there, 8), 1, 8, Post::by(by)).unwrap();
    q.wait(ticket, by).unwrap();
    let now = read(&b.target, 0, 4096);
    assert_eq!((&now[..8], &now[16..]), (&untouched[..8], &untouched[16..]));
    let counters = b.device.roce_counters();
    let sum: u64 = counters
        .iter()
        .filter(|(n, _)| {
            [
                "icrc_errors",
                "received_short",
                "received_long",
                "unknown_qp",
                "malformed",
            ]
            .contains(n)
        })
        .map(|(_, c)| c)
        .sum();
    assert_eq!(sum, 30, "{counters:?}");
}

#[test]
fn a_port_that_cannot_be_is_refused_with_a_remedy() {
    for (port, part) in [
        ("tcp://127.0.0.1", "udp://"),
        ("udp://192.0.2.77", "192.0.2.77"),
        ("udp://name", "no address"),
    ] {
        let wrong = Config {
            roce: Some(port.to_owned()),
            ..config()
        };
        // What is no port is told at once, what could be one when it is opened.
        let opened = Device::builder().config(wrong).open();
        assert_eq!(opened.is_ok(), port == "udp://192.0.2.77", "{port}");
        let error = opened.and_then(|d| d.roce_offer()).unwrap_err();
        assert!(error.to_string().contains(part), "{port}: {error}");
        assert!(!matches!(error, Error::Unsupported { .. }));
    }
}

/// A receiver that knows no sender: its number and address are all that a source needs.
#[test]
fn anybody_may_send_to_a_receiver_of_anybody() {
    let (a, b) = (bench(config(), 1 << 16), bench(config(), 1 << 16));
    let receiver = a.pd.qp().receive_queue(4).build().unwrap();
    let (receiver, address) = receiver.receive_from_anyone(1024).unwrap();
    let offer = a.device.roce_offer().unwrap();
    assert_eq!(address, offer.address);
    let source = b.pd.qp().unreliable(true).build().unwrap();
    let target = doorbell::connect::RoceTarget {
        agreed: b.device.roce_offer().unwrap().agree(&offer).unwrap(),
        qpn: receiver.qpn(),
        psn: 0,
        unreliable: true,
    };
    let source = source
        .connect(&doorbell::Destination::Roce(target))
        .unwrap();
    let (mut to, mut from) = (CpuQp::new(&receiver).unwrap(), CpuQp::new(&source).unwrap());
    let (_, recv) = to.queues().unwrap();
    let by = deadline(LONG);
    for n in 0..20u32 {
        let ticket = recv.recv_post(local(&a.target, 0, 0), by).unwrap();
        let bytes = bytes(n as u8, 700);
        b.source.memory().write(0, &bytes).unwrap();
        let q = from.queue().unwrap();
        q.write_imm(
            remote(&a.target.remote(), 64),
            local(&b.source, 0, 700),
            n,
            Post::by(by),
        )
        .unwrap();
        let got = recv.recv_wait(ticket, by).unwrap();
        assert_eq!((got.imm, got.bytes), (n, 700));
        assert_eq!(read(&a.target, 64, 700), bytes);
    }
    let wrong = a.pd.qp().receive_queue(4).build().unwrap();
    let error = wrong.receive_from_anyone(100).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("100"), "{error}");
}

/// What a queue pair was not made for is refused to its peer, whatever the key grants.
#[test]
fn a_queue_pair_grants_only_what_it_was_made_for() {
    let (a, b) = (bench(config(), 4096), bench(config(), 4096));
    let made = |b: &Bench, access| {
        let qp = b.pd.qp().remote_access(access).build().unwrap();
        let endpoint = qp.endpoint(LinkKind::Roce, &[]).unwrap();
        (qp, endpoint)
    };
    let ((qp_a, at_a), (qp_b, at_b)) = (
        made(&a, doorbell::Access::NONE),
        made(&b, doorbell::Access::REMOTE_READ),
    );
    let qp_a = qp_a.connect(&a.device.destination(&at_b).unwrap()).unwrap();
    let _qp_b = qp_b.connect(&b.device.destination(&at_a).unwrap()).unwrap();
    let mut cpu = CpuQp::new(&qp_a).unwrap();
    let q = cpu.queue().unwrap();
    let by = deadline(LONG);
    let (there, here) = (remote(&b.target.remote(), 0), local(&a.source, 0, 8));
    let got = q.get(there, here, Post::by(by)).unwrap();
    q.wait(got, by).unwrap();
    let put = q.put(there, here, Post::by(by)).unwrap();
    assert!(q.wait(put, by).is_err());
    let fault = qp_a.error().unwrap();
    assert_eq!(fault.syndrome(), doorbell::Syndrome::REMOTE_ACCESS);
}

/// A receiver that posts no receive costs the tries that were agreed, and whoever waits reads why.
#[test]
fn a_receiver_that_is_never_ready_is_told_to_who_waits() {
    let (a, b) = (bench(config(), 4096), bench(config(), 4096));
    let ((qp_a, at_a), (qp_b, at_b)) = (half(&a), half(&b));
    let doorbell::Destination::Roce(mut to) = a.device.destination(&at_b).unwrap() else {
        panic!("a RoCE endpoint leads to a RoCE destination");
    };
    to.agreed.local.rnr_retry = 1;
    let qp_a = qp_a.connect(&doorbell::Destination::Roce(to)).unwrap();
    let qp_b = qp_b.connect(&b.device.destination(&at_a).unwrap()).unwrap();
    let syndrome = failing(&qp_a, |q, how| {
        q.send(local(&a.source, 0, 8), how).unwrap();
    });
    assert_eq!(syndrome, doorbell::Syndrome::RNR_RETRY.0);
    let text = qp_a.error().unwrap().to_string();
    assert!(text.contains("receive"), "{text}");
    assert_eq!(qp_b.state(), QpState::Ready);
}
