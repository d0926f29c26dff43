//! UDP ports over loopback.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use doorbell_port::{
    Check, LONG_PAYLOAD, Path, PathRequest, Port, PortConfig, PortError, RecvBatch, SendBatch,
    UdpOptions, UdpPort, path_mtu,
};
use doorbell_wire::roce::icrc::{self, Ip};
use doorbell_wire::roce::net::Ipv4;

const LIMIT: Duration = Duration::from_secs(10);

fn port(addr: &str, trains: bool) -> UdpPort {
    let options = UdpOptions {
        send_trains: trains,
        receive_trains: trains,
        ..UdpOptions::default()
    };
    UdpPort::open(addr.parse().unwrap(), options).unwrap()
}

fn path(from: &mut dyn Port, to: SocketAddr, trains: bool) -> Path {
    from.path(&PathRequest {
        trains,
        ..PathRequest::new(to)
    })
    .unwrap()
}

fn light(from: &mut dyn Port, to: SocketAddr, trains: bool) -> Path {
    from.path(&PathRequest {
        trains,
        light: true,
        long: trains,
        ..PathRequest::new(to)
    })
    .unwrap()
}

/// A packet of `len` bytes with a base header whose QP number is `n`.
fn packet(n: usize, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|i| (i * 13 + n) as u8).collect();
    bytes[0] = 4;
    bytes[1] = 0x40;
    bytes[5..8].copy_from_slice(&(n as u32).to_be_bytes()[1..]);
    bytes
}

/// Receives until there are `count` packets; their bytes and checks.
fn receive(port: &mut dyn Port, count: usize) -> Vec<(Vec<u8>, Check, SocketAddr, u8)> {
    let mut batch = port.recv_batch();
    let mut all = Vec::new();
    let end = Instant::now() + LIMIT;
    while all.len() < count && Instant::now() < end {
        port.recv(&mut batch).unwrap();
        all.extend(
            batch
                .iter()
                .map(|p| (p.bytes.to_vec(), p.check, p.src, p.tos)),
        );
    }
    all
}

fn send_all(port: &mut dyn Port, batch: &mut SendBatch) {
    let end = Instant::now() + LIMIT;
    while !batch.is_empty() && Instant::now() < end {
        port.send(batch).unwrap();
    }
    assert!(batch.is_empty());
}

/// On one host, and only where that was asked for, the ICRC of a long packet is that of its base header; every other packet has a right one.
#[test]
fn light_packets_are_covered_up_to_their_base_header() {
    let (mut a, witness) = (
        port("127.0.0.1:0", false),
        UdpSocket::bind("127.0.0.1:0").unwrap(),
    );
    witness.set_read_timeout(Some(LIMIT)).unwrap();
    let there = witness.local_addr().unwrap();
    let whole = path(&mut a, there, false);
    let light = light(&mut a, there, false);
    assert!(a.accepts_light() && light.light() && !whole.light());
    let mut batch = SendBatch::new();
    for len in [16, 64, 65, 4140] {
        for (to, covered) in [(&whole, len), (&light, if len > 64 { 12 } else { len })] {
            assert!(batch.push(to, &packet(len, len)));
            send_all(&mut a, &mut batch);
            let mut bytes = [0; 8192];
            let got = witness.recv(&mut bytes).unwrap();
            let (transport, stored) = bytes[..got].split_at(got - 4);
            assert_eq!(transport, packet(len, len));
            // The headers have the length of the whole packet, whatever part of it is covered.
            let right = covered == len;
            let full = icrc::compute(
                &Ip::V4(Ipv4 {
                    src: [127, 0, 0, 1],
                    dst: [127, 0, 0, 1],
                    ..Ipv4::default()
                }),
                a.local_addr().port(),
                there.port(),
                transport,
            );
            assert_eq!(stored == full.to_le_bytes(), right, "{len} of {covered}");
        }
    }
}

#[test]
fn light_packets_arrive_whatever_becomes_of_trains_and_others_are_refused() {
    for addr in ["127.0.0.1:0", "[::1]:0"] {
        let (mut a, mut b) = (port(addr, true), port(addr, true));
        let mut apart = port(addr, false);
        let packets: Vec<_> = (0..40).map(|n| packet(n, 4108)).collect();
        // The first has a socket of its own at `a`, the second has not, and takes no trains.
        for to in [&mut b, &mut apart] {
            let way = light(&mut a, to.local_addr(), to.accepts_trains());
            let mut batch = SendBatch::new();
            for bytes in &packets {
                assert!(batch.push(&way, bytes));
            }
            send_all(&mut a, &mut batch);
            let got = receive(to, packets.len());
            let exact = |(bytes, check, ..): &(Vec<u8>, _, _, _)| {
                assert_eq!(*check, Check::Exact);
                bytes.clone()
            };
            assert_eq!(got.iter().map(exact).collect::<Vec<_>>(), packets);
            assert_eq!(to.counters().icrc_errors, 0);
            // A base header that is not what the ICRC is of, and an ICRC that is of nothing.
            let mut bytes = packets[0].clone();
            bytes.extend_from_slice(&[1, 2, 3, 4]);
            UdpSocket::bind(addr)
                .unwrap()
                .send_to(&bytes, to.local_addr())
                .unwrap();
            let mut none = to.recv_batch();
            let end = Instant::now() + LIMIT;
            while to.counters().icrc_errors == 0 && Instant::now() < end {
                assert_eq!(to.recv(&mut none).unwrap(), 0);
            }
            assert_eq!(to.counters().icrc_errors, 1);
        }
    }
}

/// A peer on this host has a socket of its own. What comes through it, and from others meanwhile, arrives as before, and nobody else gets the UDP
/// port.
#[test]
fn a_near_peer_and_everybody_else() {
    for (addr, peer) in [
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("[::1]:0", "[::1]:0"),
        ("0.0.0.0:0", "127.0.0.1:0"),
    ] {
        let (mut a, mut b, mut c) = (port(addr, true), port(peer, true), port(peer, true));
        let a_to_b = light(&mut a, b.local_addr(), true);
        let at = a_to_b.local();
        let b_to_a = light(&mut b, at, true);
        let c_to_a = light(&mut c, at, true);
        // Not all queue pairs between two ports need to have agreed on the same.
        let heavy = path(&mut b, at, true);
        // Lone packets, runs of one size and of several, long and short.
        let most = LONG_PAYLOAD + 28;
        assert!(a.accepts_long() && b_to_a.mtu() >= most && heavy.mtu() < 5000);
        let lens = [
            16, 40, 40, 40, 20, 4140, 4140, 4140, most, 20, 2000, most, most, 28, 28,
        ];
        let mut batch = SendBatch::new();
        let mut send = |from: &mut UdpPort, way: &Path| {
            for (n, len) in lens.iter().enumerate() {
                // What does not fit any more is sent first.
                if !batch.push(way, &packet(n, (*len).min(way.mtu()))) {
                    send_all(from, &mut batch);
                    assert!(batch.push(way, &packet(n, (*len).min(way.mtu()))));
                }
            }
            send_all(from, &mut batch);
        };
        for round in 0..100 {
            let (mut expected, mut from_c) = (lens.len(), 0);
            send(&mut b, &b_to_a);
            if round % 3 == 1 {
                send(&mut c, &c_to_a);
                (expected, from_c) = (expected + lens.len(), lens.len());
            }
            if round % 3 == 2 {
                send(&mut b, &heavy);
                expected += lens.len();
            }
            let got = receive(&mut a, expected);
            assert_eq!(got.len(), expected, "{addr}, round {round}");
            let mut next = std::collections::HashMap::<_, usize>::new();
            for (bytes, check, src, _) in &got {
                assert_eq!(*check, Check::Exact);
                let next = next.entry(*src).or_default();
                let n = *next % lens.len();
                let right = [packet(n, lens[n]), packet(n, lens[n].min(heavy.mtu()))];
                assert!(right.contains(bytes), "{addr}, round {round}, {n}");
                *next += 1;
            }
            let c_at = c.local_addr();
            assert_eq!(next.get(&c_at).copied().unwrap_or(0), from_c);
            send(&mut a, &a_to_b);
            assert_eq!(receive(&mut b, lens.len()).len(), lens.len());
        }
        let taken = UdpPort::open(at, UdpOptions::default()).unwrap_err();
        assert!(matches!(taken, PortError::InUse { .. }), "{taken}");
        let (a, b) = (a.counters(), b.counters());
        assert_eq!(a.icrc_errors + b.icrc_errors + a.icrc_explained, 0);
        assert_eq!((a.received_long, a.received_short), (0, 0));
    }
}

/// Payload that is sent from where it lies, alone, in trains, and between packets that lie in the batch.
#[test]
fn payload_that_is_lent_arrives_whole_and_in_order() {
    for addr in ["127.0.0.1:0", "[::1]:0"] {
        for trains in [false, true] {
            let (mut a, mut b) = (port(addr, trains), port(addr, trains));
            assert!(a.lends());
            let to = path(&mut a, b.local_addr(), trains);
            let light = light(&mut a, b.local_addr(), trains);
            let sizes = [
                (28, 4096),
                (12, 4096),
                (12, 4096),
                (12, 100),
                (40, 0),
                (28, 1024),
                (12, 4112),
            ];
            let packets: Vec<_> = sizes
                .iter()
                .cycle()
                .take(60)
                .enumerate()
                .map(|(n, (head, payload))| (*head, packet(n, head + payload)))
                .collect();
            let mut batch = SendBatch::new();
            for (n, (head, bytes)) in packets.iter().enumerate() {
                let to = if n < 30 { &to } else { &light };
                let space = batch.space(to).unwrap();
                space[..*head].copy_from_slice(&bytes[..*head]);
                if bytes.len() == *head {
                    batch.commit(to, *head);
                } else {
                    // SAFETY: the packets live until the batch is sent, below.
                    unsafe {
                        batch.commit_lent(to, *head, bytes[*head..].as_ptr(), bytes.len() - head)
                    };
                }
            }
            assert_eq!(batch.len(), packets.len());
            send_all(&mut a, &mut batch);
            let got = receive(&mut b, packets.len());
            assert_eq!(got.len(), packets.len());
            for ((_, sent), (bytes, check, ..)) in packets.iter().zip(&got) {
                assert!(sent == bytes && *check == Check::Exact);
            }
            let bytes: usize = packets.iter().map(|(_, p)| p.len() + 4).sum();
            assert_eq!(a.counters().sent_bytes, bytes as u64);
        }
    }
}

#[test]
fn packets_of_all_sizes_arrive_whole_and_in_order() {
    for (a, b) in [
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("[::1]:0", "[::1]:0"),
        ("0.0.0.0:0", "127.0.0.1:0"),
        ("[::]:0", "[::1]:0"),
    ] {
        for trains in [false, true] {
            let (mut a, mut b) = (port(a, trains), port(b, trains));
            assert_eq!(
                path_mtu(a.mtu()).min(path_mtu(b.mtu())),
                if a.local_addr().ip().is_unspecified() {
                    path_mtu(a.mtu())
                } else {
                    4096
                }
            );
            let to = path(&mut a, b.local_addr(), trains);
            assert_eq!(to.train() > 1, trains && a.accepts_trains());
            assert!(!to.local().ip().is_unspecified());
            let lens = [
                12,
                13,
                16,
                28,
                40,
                40,
                40,
                40,
                16,
                40,
                1052,
                4140,
                4140,
                4140,
                100,
                to.mtu(),
            ];
            let mut batch = SendBatch::new();
            for (n, len) in lens.iter().enumerate() {
                assert!(batch.push(&to, &packet(n, *len)));
            }
            assert_eq!(batch.len(), lens.len());
            send_all(&mut a, &mut batch);
            let got = receive(&mut b, lens.len());
            assert_eq!(got.len(), lens.len(), "{a:?}");
            for (n, (bytes, check, src, _)) in got.iter().enumerate() {
                assert_eq!(*bytes, packet(n, lens[n]));
                assert_eq!(*check, Check::Exact);
                assert_eq!(*src, to.local());
            }
            // And back to the address that the packets came from, which a port on all addresses learns only so.
            let back = path(&mut b, got[0].2, trains);
            assert!(batch.push(&back, &packet(7, 33)));
            send_all(&mut b, &mut batch);
            assert_eq!(receive(&mut a, 1)[0].0, packet(7, 33));
            let (sent, received) = (a.counters(), b.counters());
            assert_eq!(sent.sent_packets, lens.len() as u64);
            assert_eq!(sent.sent_bytes, received.received_bytes);
            assert_eq!(received.icrc_errors + received.icrc_explained, 0);
            assert_eq!(sent.sent_trains > 0, trains && a.accepts_trains());
        }
    }
}

#[test]
fn many_packets_need_few_calls() {
    let (mut a, mut b) = (port("127.0.0.1:0", true), port("127.0.0.1:0", true));
    if !a.accepts_trains() {
        // An old kernel: the port said so, and single packets are tested above.
        assert!(
            a.describe()
                .to_string()
                .contains("no: the kernel has no UDP_GRO")
        );
        return;
    }
    let to = path(&mut a, b.local_addr(), true);
    let mut batch = SendBatch::new();
    let mut sent = 0;
    let mut got = 0;
    let mut rx = b.recv_batch();
    let end = Instant::now() + LIMIT;
    while got < 4096 && Instant::now() < end {
        while sent < 4096 && batch.push(&to, &packet(sent, 36)) {
            sent += 1;
        }
        a.send(&mut batch).unwrap();
        b.recv(&mut rx).unwrap();
        for p in rx.iter() {
            assert_eq!(p.bytes, packet(got, 36));
            got += 1;
        }
    }
    assert_eq!(got, 4096);
    assert!(a.counters().sent_calls <= 4096 / 64, "{:?}", a.counters());
    assert!(
        b.counters().received_calls <= 4096 / 64,
        "{:?}",
        b.counters()
    );
}

#[test]
fn congestion_marks_and_dscp_cross() {
    for addr in ["127.0.0.1:0", "[::1]:0"] {
        let (mut a, mut b) = (port(addr, true), port(addr, true));
        let mut batch = SendBatch::new();
        for tos in [0u8, 1, 2, 3, 0x68 | 2] {
            let to = a
                .path(&PathRequest {
                    tos,
                    trains: true,
                    ..PathRequest::new(b.local_addr())
                })
                .unwrap();
            assert!(batch.push(&to, &packet(usize::from(tos), 28)));
        }
        send_all(&mut a, &mut batch);
        let got: Vec<u8> = receive(&mut b, 5).into_iter().map(|p| p.3).collect();
        assert_eq!(got, [0, 1, 2, 3, 0x6a]);
    }
}

/// What `from` would put into a packet for `to` with this identification, ICRC included.
fn foreign(from: SocketAddr, to: SocketAddr, id: u16, bytes: &[u8]) -> Vec<u8> {
    let (SocketAddr::V4(src), SocketAddr::V4(dst)) = (from, to) else {
        unreachable!()
    };
    let ip = Ip::V4(Ipv4 {
        src: src.ip().octets(),
        dst: dst.ip().octets(),
        id,
        ..Ipv4::default()
    });
    let mut whole = bytes.to_vec();
    whole.extend_from_slice(&icrc::compute(&ip, from.port(), to.port(), bytes).to_le_bytes());
    whole
}

#[test]
fn a_hidden_identification_is_found_and_damage_is_not_explained() {
    let mut b = port("127.0.0.1:0", true);
    let to = b.local_addr();
    let a = UdpSocket::bind("127.0.0.1:0").unwrap();
    let from = a.local_addr().unwrap();
    // As a foreign implementation counts. The kernel sends what it likes: the receiver does not see it.
    for id in [0u16, 1, 63, 64, 0x1234, 0xffff] {
        let good = foreign(from, to, id, &packet(5, 1052));
        a.send_to(&good, to).unwrap();
        let got = receive(&mut b, 1);
        assert_eq!(got.len(), 1, "{id}");
        let ours = if id < 64 {
            Check::Exact
        } else {
            Check::Explained
        };
        assert_eq!(got[0].1, ours, "{id}");
    }
    assert_eq!(b.counters().icrc_explained, 3);
    // Damage in every byte of a small packet, then things that are no packets.
    let good = foreign(from, to, 0x1234, &packet(5, 36));
    let mut sent = 0;
    for at in (0..good.len()).filter(|at| *at != 4) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        a.send_to(&bad, to).unwrap();
        sent += 1;
    }
    for len in [0, 1, 4, 12, 15] {
        a.send_to(&good[..len], to).unwrap();
    }
    a.send_to(&vec![0; 64_000], to).unwrap();
    // FECN and BECN are outside the CRC: this one is good.
    let mut marked = good.clone();
    marked[4] ^= 0x80;
    a.send_to(&marked, to).unwrap();
    let got = receive(&mut b, 1);
    assert_eq!(got.len(), 1);
    let c = b.counters();
    assert_eq!(
        (c.icrc_errors, c.received_short, c.received_long),
        (sent, 5, 1)
    );
}

#[test]
fn what_cannot_be_is_said_clearly() {
    let a = port("127.0.0.1:0", true);
    let taken = UdpPort::open(a.local_addr(), UdpOptions::default()).unwrap_err();
    assert!(matches!(taken, PortError::InUse { .. }), "{taken}");
    let text = taken.to_string();
    assert!(text.contains(&std::process::id().to_string()), "{text}");
    let nowhere = "udp://192.0.2.77"
        .parse::<PortConfig>()
        .unwrap()
        .open()
        .unwrap_err();
    assert!(matches!(nowhere, PortError::NotLocal { .. }), "{nowhere}");
    let mut a = a;
    let family = a
        .path(&PathRequest::new("[::1]:4791".parse().unwrap()))
        .unwrap_err();
    assert!(matches!(family, PortError::Family { .. }), "{family}");
    let text = a.describe().to_string();
    assert!(
        text.contains("16 bits") && text.contains("path MTU 4096"),
        "{text}"
    );
}

#[test]
fn a_full_socket_keeps_what_it_has_no_room_for() {
    // Nobody reads: a datagram socket over loopback drops at the receiver, so what must hold is that every packet is sent or counted.
    let (mut a, b) = (port("127.0.0.1:0", true), port("127.0.0.1:0", true));
    let to = path(&mut a, b.local_addr(), true);
    let mut batch = SendBatch::new();
    let mut pushed = 0;
    for _ in 0..64 {
        while batch.push(&to, &packet(1, 4140)) {
            pushed += 1;
        }
        a.send(&mut batch).unwrap();
    }
    let c = a.counters();
    assert_eq!(
        c.sent_packets + c.sent_refused + c.sent_too_long + batch.len() as u64,
        pushed
    );
    // The receiver's socket overflowed, and says so once it is read.
    let mut b = b;
    let mut rx = b.recv_batch();
    let mut seen = 0;
    while b.recv(&mut rx).unwrap() > 0 {
        seen += rx.len() as u64;
    }
    let last = a.path(&PathRequest::new(b.local_addr())).unwrap();
    batch.clear();
    assert!(batch.push(&last, &packet(1, 28)));
    send_all(&mut a, &mut batch);
    assert_eq!(receive(&mut b, 1).len(), 1);
    let c = b.counters();
    assert!(
        seen < pushed && c.receive_overruns > 0,
        "{seen} of {pushed}: {c:?}"
    );
}

#[test]
fn an_empty_port_has_nothing() {
    let mut a = port("127.0.0.1:0", true);
    let mut rx: RecvBatch = a.recv_batch();
    assert_eq!(a.recv(&mut rx).unwrap(), 0);
    assert!(rx.is_empty() && rx.iter().next().is_none());
    assert_eq!(a.counters().received_empty, 1);
    assert!(a.next_due().is_none());
}

/// Sends a packet to each QP number from a foreign socket, and gives the numbers that arrive at each port.
fn spread(from: &UdpSocket, ports: &mut [UdpPort], qpns: std::ops::Range<u32>) -> Vec<Vec<u32>> {
    let to = ports[0].local_addr();
    let count = qpns.len();
    for qpn in qpns {
        let whole = foreign(from.local_addr().unwrap(), to, 0, &packet(qpn as usize, 28));
        from.send_to(&whole, to).unwrap();
    }
    let mut got = vec![Vec::new(); ports.len()];
    let mut all = 0;
    let end = Instant::now() + LIMIT;
    while all < count && Instant::now() < end {
        for (port, got) in ports.iter_mut().zip(&mut got) {
            let mut batch = port.recv_batch();
            all += port.recv(&mut batch).unwrap();
            got.extend(
                batch
                    .iter()
                    .map(|p| u32::from_be_bytes([0, p.bytes[5], p.bytes[6], p.bytes[7]])),
            );
        }
    }
    got
}

#[test]
fn processes_that_share_a_port_get_their_own_queue_pairs() {
    let options = UdpOptions {
        share: true,
        ..UdpOptions::default()
    };
    let first = UdpPort::open("127.0.0.1:0".parse().unwrap(), options).unwrap();
    let addr = first.local_addr();
    let again = || UdpPort::open(addr, options).unwrap();
    let mut ports = vec![first, again(), again()];
    let classes = |ports: &[UdpPort]| {
        ports
            .iter()
            .map(|p| p.qpn_class().unwrap().1)
            .collect::<Vec<_>>()
    };
    assert_eq!(classes(&ports), [0, 1, 2]);
    let a = UdpSocket::bind("127.0.0.1:0").unwrap();
    let right = |ports: &[UdpPort], got: &[Vec<u32>]| {
        ports.iter().zip(got).all(|(port, got)| {
            let (mask, class) = port.qpn_class().unwrap();
            got.iter().all(|qpn| qpn & mask == class)
        })
    };
    // Classes 0 to 2, from numbers that end so.
    for base in [0x100, 0xabcd0] {
        let got = spread(&a, &mut ports, base..base + 3);
        assert!(
            right(&ports, &got) && got.iter().all(|g| g.len() == 1),
            "{got:?}"
        );
    }
    // Looks as an engine does, until three bursts in a row arrive where they belong.
    let settle = |ports: &mut [UdpPort], qpns: std::ops::Range<u32>| {
        let end = Instant::now() + LIMIT;
        let mut good = 0;
        while good < 3 {
            let got = spread(&a, ports, qpns.clone());
            let now = right(ports, &got) && got.iter().all(|g| g.len() == 1);
            good = if now { good + 1 } else { 0 };
            assert!(Instant::now() < end, "{got:?}");
            let round = Instant::now();
            while round.elapsed() < Duration::from_millis(300) {
                for port in &mut *ports {
                    let mut batch = port.recv_batch();
                    port.recv(&mut batch).unwrap();
                }
            }
        }
    };
    // The first leaves: the kernel moves the last to its place, which that one finds out and repairs.
    ports.remove(0);
    settle(&mut ports, 0x101..0x103);
    // Its class is free again.
    ports.push(again());
    assert_eq!(classes(&ports), [1, 2, 0]);
    settle(&mut ports, 0x200..0x203);
    // Who does not share is refused, and told how.
    let refused = UdpPort::open(addr, UdpOptions::default())
        .unwrap_err()
        .to_string();
    assert!(refused.contains("share"), "{refused}");
}
