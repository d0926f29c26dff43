//! Two HCAs of one process over UDP loopback, driven by the test: what a queue pair owes its peer leaves in time, whoever stops when, and
//! receives are filled by messages longer than a packet. (The operations one by one, and the ways to fail, are in `doorbell`'s tests.)

mod common;
#[path = "common/roce.rs"]
mod net;

use std::sync::atomic::{AtomicBool, Ordering};

use common::{MockQp, Options, PATIENCE, Rig};
use doorbell_hca::Access;
use doorbell_hca::roce::RocePort;
use doorbell_hca::roce::transport::Config;
use doorbell_wire::Wqe;
use doorbell_wire::cqe::Kind;
use doorbell_wire::roce::icrc::{self, Ip};
use doorbell_wire::roce::net::Ipv4;
use doorbell_wire::roce::{Bth, Ext, Header, Opcode, Psn, Reth};

/// A rig with a port, and a queue pair with a receive queue.
fn side() -> (Rig, MockQp, RocePort) {
    let rig = Rig::new();
    let port = net::port(&rig, "");
    let qp = rig.qp_with(Options {
        receive: true,
        ..Options::default()
    });
    (rig, qp, port)
}

fn connect(from: &MockQp, to: &MockQp, port: &RocePort) {
    // Half a minute: nothing here may need a second try.
    connect_patient(from, to, port, 20);
}

fn connect_patient(from: &MockQp, to: &MockQp, port: &RocePort, timeout: u8) {
    let config = Config {
        timeout,
        ..Config::default()
    };
    net::connect(from, to, port, Access::ALL, config);
}

/// Drives both until `done`.
fn until(a: &Rig, b: &Rig, mut done: impl FnMut() -> bool) -> bool {
    a.until(|| {
        b.driver.poll();
        done()
    })
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn who_leaves_after_a_ping_pong_has_acknowledged() {
    let ways = [1u64, 2, 5, 6, 16, 17, 18, 25, 40].map(|laps| [(laps, true), (laps, false)]);
    for (laps, destroyed) in ways.into_iter().flatten() {
        let ((rig_a, mut a, port_a), (rig_b, mut b, port_b)) = (side(), side());
        connect(&a, &b, &port_b);
        connect(&b, &a, &port_a);
        let (at_a, at_b) = (rig_a.region(64), rig_b.region(64));
        let mut last = 0;
        for lap in 1..=laps {
            let put = |to, n: u64| Wqe::write_inline(to, &n.to_le_bytes()).expect("short");
            last = a.go(put(at_b.remote(0), lap));
            assert!(until(&rig_a, &rig_b, || at_b.u64(0) == lap));
            if lap < laps {
                b.go(put(at_a.remote(0), lap));
                assert!(until(&rig_b, &rig_a, || at_a.u64(0) == lap));
            }
        }
        // Not driven again, as a caller that has seen all it waited for; the queue pair may outlive its last wait.
        if destroyed {
            b.qp = None;
        }
        a.wait(&rig_a, last);
        let counted = a.hca_qp().roce_counters(PATIENCE).expect("alive");
        assert_eq!(counted.expect("connected").retransmitted_packets, 0);
    }
}

/// In a ping-pong an acknowledgement travels behind the answer, if at all: one call a lap and side, not two.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn acknowledgements_of_a_ping_pong_travel_with_the_answers() {
    let ((rig_a, mut a, port_a), (rig_b, mut b, port_b)) = (side(), side());
    connect(&a, &b, &port_b);
    connect(&b, &a, &port_a);
    let (at_a, at_b) = (rig_a.region(64), rig_b.region(64));
    let laps = 400;
    for lap in 1..=laps {
        let put = |to, n: u64| Wqe::write_inline(to, &n.to_le_bytes()).expect("short");
        a.go(put(at_b.remote(0), lap));
        assert!(until(&rig_a, &rig_b, || at_b.u64(0) == lap));
        b.go(put(at_a.remote(0), lap));
        assert!(until(&rig_b, &rig_a, || at_a.u64(0) == lap));
    }
    for (rig, qp) in [(&rig_a, &a), (&rig_b, &b)] {
        let port = rig
            .hca
            .roce_counters(0)
            .expect("alive")
            .expect("a port")
            .port;
        // The first laps, and those in which the keeper took a thread that was not running for one that had left, have two.
        assert!(port.sent_calls < laps * 3 / 2, "{port:?}");
        let counted = qp.hca_qp().roce_counters(PATIENCE).expect("alive");
        assert_eq!(counted.expect("connected").retransmitted_packets, 0);
    }
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn an_identification_that_our_ports_never_send_is_damage() {
    let ((rig_a, a, port_a), (rig_b, b, port_b)) = (side(), side());
    connect(&a, &b, &port_b);
    connect(&b, &a, &port_a);
    let at_a = rig_a.region(64);
    // Who has the peer's address, and guessed everything else.
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let own = socket.local_addr().expect("its address").port();
    let to = at_a.remote(0);
    let send = |id: u16, psn: u32, value: u64| {
        let qpn = a.hca_qp().qpn().get();
        // RC WRITE only.
        let header = Header {
            bth: Bth::new(Opcode(0x0a), qpn, Psn::new(psn)),
            ext: Ext::Reth(Reth {
                va: to.addr,
                rkey: to.key.0,
                len: 8,
            }),
        };
        let mut bytes = [0; 128];
        let len = header.emit(&mut bytes) + 8;
        bytes[len - 8..len].copy_from_slice(&value.to_le_bytes());
        let addresses = Ip::V4(Ipv4 {
            id,
            src: [127, 0, 0, 1],
            dst: [127, 0, 0, 1],
            ..Ipv4::default()
        });
        let crc = icrc::compute(&addresses, own, port_a.local.port(), &bytes[..len]);
        bytes[len..len + 4].copy_from_slice(&crc.to_le_bytes());
        let sent = socket.send_to(&bytes[..len + 4], port_a.local);
        assert_eq!(sent.expect("sent"), len + 4);
    };
    let first = b.hca_qp().qpn().get();
    let damaged = || {
        let counters = rig_a.hca.roce_counters(0).expect("alive");
        counters.expect("a port").strangers.damaged
    };
    send(1000, first, 7);
    assert!(until(&rig_a, &rig_b, || damaged() == 1));
    assert_eq!(at_a.u64(0), 0);
    send(63, first, 8);
    assert!(until(&rig_a, &rig_b, || at_a.u64(0) == 8));
    assert_eq!(damaged(), 1);
}

#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn messages_of_many_packets_fill_receives() {
    let ((rig_a, mut a, port_a), (rig_b, mut b, port_b)) = (side(), side());
    connect(&a, &b, &port_b);
    connect(&b, &a, &port_a);
    let len = 10_000;
    let (src, dst) = (rig_a.region(len), rig_b.region(len));
    let bytes: Vec<u8> = (0..len).map(|i| (i / 7) as u8).collect();
    src.fill(0, &bytes);
    for lap in 0..50u32 {
        dst.fill(0, &vec![0; len]);
        // Two pieces that meet within a packet, and one of no bytes for a message of none.
        let first = b.post_receive(&[dst.local(0, 1500), dst.local(1500, 8500)]);
        b.post_receive(&[]);
        let one = Wqe::send_imm(src.local(0, len as u32 - lap), lap).expect("a length");
        a.go(one);
        let at = a.go(Wqe::send_inline(&[]).expect("empty"));
        assert!(until(&rig_a, &rig_b, || a.completion(at).is_some()));
        a.wait(&rig_a, at);
        let got = b.received(first).expect("the first");
        let kind = Some(Kind::ResponderSendImm);
        assert_eq!(
            (got.tail.kind(), got.imm, got.byte_cnt),
            (kind, lap, len as u32 - lap)
        );
        assert_eq!(
            dst.bytes(0, len - lap as usize),
            bytes[..len - lap as usize]
        );
        let got = b.received(first + 1).expect("the second");
        assert_eq!(
            (got.tail.kind(), got.byte_cnt),
            (Some(Kind::ResponderSend), 0)
        );
    }
    assert!(src.canaries_intact() && dst.canaries_intact());
}

/// Payload leaves from where it lies. Whoever writes there meanwhile damages packets, which are sent again, from a copy then: the puts end well, and the
/// target has old or new bytes.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn a_source_that_never_rests_is_sent_nevertheless() {
    let ((rig_a, mut a, port_a), (rig_b, b, port_b)) = (side(), side());
    connect_patient(&a, &b, &port_b, 12);
    connect_patient(&b, &a, &port_a, 12);
    let len = 200_000;
    let (src, dst) = (rig_a.region(len), rig_b.region(len));
    (0..len / 512).for_each(|n| src.set_u64(n * 512, 0x55));
    let writing = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0u64;
            while writing.load(Ordering::Relaxed) {
                (0..len / 512).for_each(|at| src.set_u64(at * 512, n | 0x55));
                n += 1 << 8;
            }
        });
        for _ in 0..20 {
            let put = Wqe::write(dst.remote(0), src.local(0, len as u32)).expect("a length");
            let at = a.go(put);
            let ended = until(&rig_a, &rig_b, || a.completion(at).is_some());
            writing.fetch_and(ended, Ordering::Relaxed);
            assert!(ended);
            a.wait(&rig_a, at);
        }
        writing.store(false, Ordering::Relaxed);
    });
    assert!((0..len / 512).all(|n| dst.u64(n * 512) & 0x55 == 0x55));
    assert!(dst.canaries_intact());
}
