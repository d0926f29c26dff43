//! Receivers of anybody's packets, as sensors need them; what a peer may do; and how little idle connections cost.
#![cfg(not(miri))]

mod common;
#[path = "common/roce.rs"]
mod net;

use common::{MockQp, Options, PATIENCE};
use doorbell_hca::roce::transport::{Config, Mtu};
use doorbell_hca::roce::{PortConfig, RocePort, RoceReceiver, RoceTarget};
use doorbell_hca::{Access, Destination, Fault, QpState};
use doorbell_port::{PathRequest, SendBatch};
use doorbell_wire::cqe::Kind;
use doorbell_wire::roce::{Bth, Ext, Header, Opcode, Place, Psn, Reth, Transport};
use doorbell_wire::{Syndrome, Wqe};

fn receives() -> Options {
    Options {
        receive: true,
        ..Options::default()
    }
}

/// Somebody with a socket and no queue pair.
struct Source {
    port: Box<dyn doorbell_port::Port>,
    path: doorbell_port::Path,
}

impl Source {
    fn new(address: &str, to: &RocePort) -> Self {
        let config: PortConfig = address.parse().expect("valid");
        let mut port = config.open().expect("a port");
        let path = port.path(&PathRequest::new(to.local)).expect("a way");
        Self { port, path }
    }

    /// `change`: what becomes of the packet's bytes before its checksum is made.
    fn send(&mut self, header: &Header, payload: &[u8], change: impl FnOnce(&mut [u8])) {
        let mut batch = SendBatch::new();
        let space = batch.space(&self.path).expect("empty");
        let start = header.emit(space);
        let len = start + payload.len();
        space[start..len].copy_from_slice(payload);
        change(&mut space[..len]);
        batch.commit(&self.path, len);
        self.port.send(&mut batch).expect("sent");
    }
}

fn header(opcode: Opcode, qp: &MockQp, psn: u32, ext: Ext) -> Header {
    let bth = Bth::new(opcode, qp.hca_qp().qpn().get(), Psn::new(psn));
    Header { bth, ext }
}

#[test]
fn a_receiver_takes_what_anybody_sends() {
    let (rig, port) = net::rig_with_port();
    let mut qp = rig.qp_with(receives());
    let region = rig.region(8192);
    let receiver = RoceReceiver {
        path_mtu: Mtu::M1024,
        access: Access::ALL,
    };
    qp.hca_qp()
        .connect(Destination::RoceAnyone(receiver), PATIENCE)
        .expect("connect");
    let mut sources = [
        Source::new("udp://127.0.0.2", &port),
        Source::new("udp://127.0.0.3", &port),
    ];
    let reth = |va, len| Reth {
        va,
        rkey: region.key().0,
        len,
    };
    let put = Opcode::write(Transport::Uc, Place::Only, true);
    let mut psn = 0x00ff_fff0;
    let mut received = 0;
    // Odd lengths without padding, any packet number, two senders in turn, the byte that is reserved set; the CQ laps, and nobody tells it how
    // far it was read.
    for n in 0..40u32 {
        let source = &mut sources[n as usize % 2];
        let len = [1, 3, 30, 184, 385, 1023, 1024][n as usize % 7];
        let payload: Vec<u8> = (0..len).map(|i| (i as u32 * 7 + n) as u8).collect();
        region.fill(100, &vec![0; 1024]);
        let at = qp.post_receive(&[]);
        let ext = Ext::RethImm(reth(100, len as u32), 0xabc0_0000 | n);
        let packet = header(put, &qp, psn & 0xff_ffff, ext);
        source.send(&packet, &payload, |bytes| bytes[4] = n as u8);
        // Gaps as a sender with a counter of its own makes them.
        psn += 1 + n % 3;
        assert!(rig.until(|| qp.received(at).is_some()), "packet {n}");
        let got = qp.received(at).expect("there");
        assert_eq!(
            (got.tail.kind(), got.imm, got.byte_cnt),
            (Some(Kind::ResponderWriteImm), 0xabc0_0000 | n, len as u32)
        );
        assert_eq!(region.bytes(100, len), payload, "packet {n}");
        received = at;
    }
    // Plain WRITEs, and a message of several packets; SENDs.
    let first = Opcode::write(Transport::Uc, Place::First, false);
    let last = Opcode::write(Transport::Uc, Place::Last, true);
    let source = &mut sources[0];
    let at = qp.post_receive(&[]);
    source.send(
        &header(first, &qp, 7, Ext::Reth(reth(0, 1027))),
        &[9; 1024],
        |_| (),
    );
    source.send(&header(last, &qp, 8, Ext::Imm(5)), &[8; 3], |_| ());
    assert!(rig.until(|| qp.received(at).is_some()));
    assert_eq!(
        qp.received(at).map(|r| (r.imm, r.byte_cnt)),
        Some((5, 1027))
    );
    assert_eq!(
        (region.bytes(0, 1024), region.bytes(1024, 3)),
        (vec![9; 1024], vec![8; 3])
    );
    let at = qp.post_receive(&[region.local(2000, 100)]);
    let send = Opcode::send(Transport::Uc, Place::Only, true);
    source.send(&header(send, &qp, 100, Ext::Imm(6)), b"odd", |_| ());
    assert!(rig.until(|| qp.received(at).is_some()));
    assert_eq!(region.bytes(2000, 3), b"odd");
    // Wrong keys, ranges and numbers cost their message and nothing else; without a receive a message is dropped, not kept.
    let wrong = [
        (
            Reth {
                rkey: reth(0, 8).rkey ^ 0x100,
                ..reth(0, 8)
            },
            8,
        ),
        (reth(8190, 8), 8),
        (reth(0, 9), 8),
    ];
    for (reth, len) in wrong {
        source.send(
            &header(put, &qp, 200, Ext::RethImm(reth, 1)),
            &vec![0xee; len],
            |_| (),
        );
    }
    source.send(
        &header(put, &qp, 300, Ext::RethImm(reth(4000, 8), 1)),
        &[0xee; 8],
        |_| (),
    );
    let one = |o| Opcode::write(o, Place::Only, false);
    source.send(
        &header(one(Transport::Rc), &qp, 301, Ext::Reth(reth(4000, 8))),
        &[0xee; 8],
        |_| (),
    );
    source.send(
        &header(one(Transport::Uc), &qp, 302, Ext::Reth(reth(5000, 8))),
        &[0x55; 8],
        |_| (),
    );
    assert!(rig.until(|| region.bytes(5000, 8) == [0x55; 8]));
    assert!(region.canaries_intact());
    let late = qp.post_receive(&[]);
    rig.driver.poll();
    assert!(
        qp.received(late).is_none(),
        "a message that was dropped came back"
    );
    assert_eq!(qp.state(), QpState::Ready);
    let counted = qp
        .hca_qp()
        .roce_counters(PATIENCE)
        .expect("alive")
        .expect("there");
    assert_eq!(
        (
            counted.out_of_buffer,
            counted.tx_packets,
            counted.np_cnp_sent
        ),
        (1, 0, 0)
    );
    assert_eq!(counted.resp_remote_access_errors, 2);
    assert!(counted.out_of_sequence > 0 && counted.unexpected_packets > 0);
    let strangers = rig
        .hca
        .roce_counters(0)
        .expect("alive")
        .expect("open")
        .strangers;
    assert_eq!(strangers.wrong_source, 0);
    assert!(received > 0);
    // It is connected to nobody: what is posted there has nowhere to go.
    let at = qp.go(Wqe::send_inline(b"?").expect("short"));
    assert!(rig.until(|| qp.state() == QpState::Error));
    let word = qp.error_word();
    assert_eq!(
        (word.vendor(), word.wqe_index()),
        (Fault::NotConnected.vendor().0, at as u16)
    );
}

#[test]
fn what_the_source_may_do_is_checked() {
    let (rig, port) = net::rig_with_port();
    let qp = rig.qp_with(receives());
    let region = rig.region(64);
    let receiver = RoceReceiver {
        path_mtu: Mtu::M256,
        access: Access::NONE,
    };
    qp.hca_qp()
        .connect(Destination::RoceAnyone(receiver), PATIENCE)
        .expect("connect");
    let mut source = Source::new("udp://127.0.0.2", &port);
    let reth = Reth {
        va: 0,
        rkey: region.key().0,
        len: 8,
    };
    let put = Opcode::write(Transport::Uc, Place::Only, false);
    source.send(&header(put, &qp, 1, Ext::Reth(reth)), &[7; 8], |_| ());
    let refused = || {
        let counted = qp
            .hca_qp()
            .roce_counters(PATIENCE)
            .expect("alive")
            .expect("there");
        counted.resp_remote_access_errors == 1
    };
    assert!(rig.until(refused));
    assert_eq!(
        (region.bytes(0, 8), qp.state()),
        (vec![0; 8], QpState::Ready)
    );
}

fn connect(from: &MockQp, to: &MockQp, port: &RocePort, access: Access) {
    let config = Config {
        timeout: 20,
        ..Config::default()
    };
    net::connect(from, to, port, access, config);
}

/// Each right alone admits its own operations; the others are refused to the peer as remote access errors, counted, and change nothing.
#[test]
fn a_queue_pair_grants_what_it_was_told_to() {
    let kinds = [
        Access::REMOTE_WRITE,
        Access::REMOTE_READ,
        Access::REMOTE_ATOMIC,
    ];
    for granted in kinds.into_iter().chain([Access::NONE, Access::ALL]) {
        for (kind, needed) in kinds.into_iter().enumerate() {
            let (rig, port) = net::rig_with_port();
            let (mut a, b) = (rig.qp_with(receives()), rig.qp_with(receives()));
            connect(&a, &b, &port, Access::ALL);
            connect(&b, &a, &port, granted);
            let (here, there) = (rig.region(64), rig.region(64));
            there.fill(0, &[1; 64]);
            let wqe = match kind {
                0 => Wqe::write(there.remote(8), here.local(0, 8)),
                1 => Wqe::read(there.remote(8), here.local(8, 8)),
                _ => Wqe::fetch_add(there.remote(8), here.local(8, 8), 1),
            };
            let at = a.go(wqe.expect("valid"));
            let counted = |qp: &MockQp| {
                let counted = qp.hca_qp().roce_counters(PATIENCE).expect("alive");
                counted.expect("connected")
            };
            if granted.contains(needed) {
                a.wait(&rig, at);
                assert_eq!(counted(&b).resp_remote_access_errors, 0);
                continue;
            }
            assert!(rig.until(|| a.state() == QpState::Error && b.state() == QpState::Error));
            let word = a.error_word();
            assert_eq!(
                (word.syndrome(), word.wqe_index()),
                (Syndrome::REMOTE_ACCESS.0, at as u16),
                "{granted:?} {needed:?}"
            );
            assert_eq!(b.error_word().vendor(), Fault::PeerRefused.vendor().0);
            assert_eq!(counted(&b).resp_remote_access_errors, 1);
            assert_eq!(counted(&a).req_remote_access_errors, 1);
            assert_eq!(
                (there.bytes(0, 64), here.bytes(8, 8)),
                (vec![1; 64], vec![0; 8])
            );
        }
    }
}

/// A thousand connections without work are not looked at, whatever the others do; and each wakes up for its own.
#[test]
fn idle_connections_cost_nothing() {
    let (rig, port) = net::rig_with_port();
    let qp = || {
        rig.qp_with(Options {
            log_depth: 4,
            ..Options::default()
        })
    };
    let (mut a, b) = (qp(), qp());
    connect(&a, &b, &port, Access::ALL);
    connect(&b, &a, &port, Access::ALL);
    let (here, there) = (rig.region(64), rig.region(64));
    let asked = || {
        rig.hca
            .roce_counters(0)
            .expect("alive")
            .expect("open")
            .asked
    };
    let mut work = || {
        let before = asked();
        for _ in 0..200 {
            let at = a.go(Wqe::write(there.remote(0), here.local(0, 8)).expect("a length"));
            a.wait(&rig, at);
        }
        // And rounds in which nothing happens at all.
        for _ in 0..64 {
            rig.driver.poll();
        }
        let busy = asked() - before;
        let before = asked();
        for _ in 0..1000 {
            rig.driver.poll();
        }
        (busy, asked() - before)
    };
    let (alone, idle) = work();
    assert_eq!(idle, 0, "nothing to do, and still asked");
    let mut others: Vec<(MockQp, MockQp)> = (0..500).map(|_| (qp(), qp())).collect();
    for (one, other) in &others {
        connect(one, other, &port, Access::ALL);
        connect(other, one, &port, Access::ALL);
    }
    // Each has worked once, so that it has had timers.
    for (one, _) in &mut others {
        let at = one.go(Wqe::write_inline(there.remote(8), &[1; 8]).expect("short"));
        one.wait(&rig, at);
    }
    for _ in 0..64 {
        rig.driver.poll();
    }
    let (busy, idle) = work();
    assert_eq!(idle, 0, "a thousand with nothing to do");
    // The rounds in which packets come are not the same each time; a thousand more connections would be two hundred thousand more.
    assert!(
        busy < 2 * alone + 2000,
        "asked {alone} times alone, {busy} with a thousand idle"
    );
}

/// Time-outs and receiver-not-ready timers of connections that are not looked at otherwise come in time.
#[test]
fn timers_wake_connections() {
    let (rig, port) = net::rig_with_port();
    let mut qps: Vec<(MockQp, MockQp)> = (0..20)
        .map(|_| (rig.qp_with(receives()), rig.qp_with(receives())))
        .collect();
    let here = rig.region(64);
    let mut sent = Vec::new();
    for (a, b) in &mut qps {
        connect(a, b, &port, Access::ALL);
        connect(b, a, &port, Access::ALL);
        sent.push(a.go(Wqe::send(here.local(0, 8)).expect("a length")));
    }
    for _ in 0..200 {
        rig.driver.poll();
    }
    for (_, b) in &mut qps {
        b.post_receive(&[here.local(8, 8)]);
    }
    for ((a, b), at) in qps.iter().zip(&sent) {
        a.wait(&rig, *at);
        assert!(b.received(0).is_some());
        let counted = a.hca_qp().roce_counters(PATIENCE).expect("alive");
        assert!(counted.expect("connected").rnr_nak_retry_err > 0);
    }
    // A peer that is gone: the time-out comes although nothing else happens.
    let (mut a, b) = qps.pop().expect("some");
    drop(b);
    let target = RoceTarget {
        peer: port.local,
        segments: port.segments,
        light: port.light,
        connection: Config {
            dest_qpn: 0x77,
            timeout: 10,
            retry_cnt: 1,
            path_mtu: Mtu::M1024,
            ..Config::default()
        },
        access: Access::ALL,
    };
    a.reset();
    a.hca_qp()
        .connect(Destination::Roce(Box::new(target)), PATIENCE)
        .expect("connect");
    a.go(Wqe::send(here.local(0, 8)).expect("a length"));
    assert!(rig.until(|| a.state() == QpState::Error));
    assert_eq!(a.error_word().syndrome(), Syndrome::TRANSPORT_RETRY.0);
}
