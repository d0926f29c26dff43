//! What Linux really puts on a wire: a UDP port against a raw port, which sees whole frames and so checks the ICRC with the IPv4
//! identification in it. In a network namespace of its own, between the ends of a veth pair.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use doorbell_port::{Check, PathRequest, Port, PortConfig, SendBatch};

const LIMIT: Duration = Duration::from_secs(10);
const INSIDE: &str = "DOORBELL_TEST_INSIDE";

/// Runs the test `name` again inside a new network namespace. `true`: this is inside.
fn inside(name: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    // Root needs no namespace of users, which a machine may not permit.
    let root = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap()) == 0;
    let status = Command::new("unshare")
        .args(if root { &["-n"][..] } else { &["-r", "-n"] })
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", name])
        .env(INSIDE, "1")
        .status()
        .expect("unshare(1) of util-linux");
    assert!(status.success(), "the test failed inside the namespace");
    false
}

fn ip(command: &str) {
    let status = Command::new("ip").args(command.split_whitespace()).status();
    assert!(status.expect("ip(8) of iproute2").success(), "ip {command}");
}

fn veth() {
    ip("link set lo up");
    ip("link add va type veth peer name vb");
    ip("addr add 10.9.0.1/24 dev va");
    ip("-6 addr add fd00::1/64 dev va nodad");
    ip("link set va up");
    ip("link set vb up");
    // Trains are taken apart before they leave, as for a network card that cannot.
    ip("link set va gso_max_segs 1");
}

fn open(text: &str) -> Box<dyn Port> {
    text.parse::<PortConfig>().unwrap().open().unwrap()
}

fn packet(n: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![n as u8; len];
    bytes[0] = 4;
    bytes[4] = 0;
    bytes
}

/// Sends trains of every size; the identifications that arrive.
fn trains(from: &mut dyn Port, to: &mut dyn Port, peer: SocketAddr) -> Vec<u16> {
    let path = from
        .path(&PathRequest {
            trains: true,
            deadline: LIMIT,
            ..PathRequest::new(peer)
        })
        .unwrap();
    let mut lens = vec![40; 200];
    lens.extend([1000; 5]);
    lens.extend([path.mtu(), path.mtu(), 28, 12]);
    let mut batch = SendBatch::new();
    for (n, len) in lens.iter().enumerate() {
        assert!(batch.push(&path, &packet(n, *len)));
    }
    let mut rx = to.recv_batch();
    let mut ids = Vec::new();
    let end = Instant::now() + LIMIT;
    while ids.len() < lens.len() && Instant::now() < end {
        from.send(&mut batch).unwrap();
        to.recv(&mut rx).unwrap();
        for p in rx.iter() {
            let n = ids.len();
            assert_eq!(p.bytes, packet(n, lens[n]));
            assert_eq!(p.check, Check::Exact);
            ids.push(p.id);
        }
    }
    let (a, b) = (from.counters(), to.counters());
    assert_eq!(ids.len(), lens.len(), "{a:?}\n{b:?}");
    assert_eq!(b.icrc_errors, 0, "{a:?}\n{b:?}");
    ids
}

#[test]
#[ignore = "needs PEER: network namespaces (root, or unprivileged user namespaces)"]
fn peer_identifications_are_what_the_sender_said() {
    if !inside("peer_identifications_are_what_the_sender_said") {
        return;
    }
    veth();
    for (kernel, raw) in [("10.9.0.1", "10.9.0.2"), ("[fd00::1]", "fd00::2")] {
        let mut udp = open(&format!("udp://{kernel}:4791"));
        let mut frames = open(&format!("raw:vb?ip={raw}"));
        let peer = frames.local_addr();
        let ids = trains(&mut *udp, &mut *frames, peer);
        assert!(udp.counters().sent_trains >= 4, "{:?}", udp.counters());
        if peer.is_ipv4() {
            // Trains of 64: the kernel counts from 0 in each.
            assert!(ids[..64].iter().copied().eq(0..64), "{ids:?}");
            assert!(ids[64..128].iter().copied().eq(0..64), "{ids:?}");
        }
        // And back: frames of our making into the kernel's socket.
        let back = udp.local_addr();
        trains(&mut *frames, &mut *udp, back);
    }
    // Loopback, where the raw port claims a UDP port of the kernel's own address.
    ip("link set lo gso_max_segs 1");
    let mut udp = open("udp://127.0.0.1");
    let mut frames = open("raw:lo?ip=127.0.0.1&port=4790");
    let peer = frames.local_addr();
    let ids = trains(&mut *udp, &mut *frames, peer);
    assert!(ids[..64].iter().copied().eq(0..64), "{ids:?}");
}

#[test]
#[ignore = "needs PEER: network namespaces (root, or unprivileged user namespaces)"]
fn peer_a_link_that_goes_down_costs_packets_only() {
    if !inside("peer_a_link_that_goes_down_costs_packets_only") {
        return;
    }
    veth();
    let mut udp = open("udp://10.9.0.1:4791");
    assert_eq!(doorbell_port::path_mtu(udp.mtu()), 1024);
    // There is no default route here: what counts is the interface.
    for (mtu, path_mtu) in [(800, 512), (4200, 4096), (1500, 1024)] {
        ip(&format!("link set va mtu {mtu}"));
        let port = open("udp://10.9.0.1");
        assert_eq!(doorbell_port::path_mtu(port.mtu()), path_mtu);
    }
    let mut frames = open("raw:vb?ip=10.9.0.2");
    let mut request = PathRequest::new(frames.local_addr());
    request.deadline = LIMIT;
    let path = udp.path(&request).unwrap();
    let mut batch = SendBatch::new();
    let mut round = |udp: &mut dyn Port, frames: &mut dyn Port, len: usize| {
        assert!(batch.push(&path, &packet(1, len)));
        let end = Instant::now() + Duration::from_millis(300);
        let mut rx = frames.recv_batch();
        let mut got = 0;
        while Instant::now() < end && got == 0 {
            udp.send(&mut batch).unwrap();
            got += frames.recv(&mut rx).unwrap();
        }
        assert!(batch.is_empty());
        got
    };
    assert_eq!(round(&mut *udp, &mut *frames, 1400), 1);
    ip("link set va down");
    assert_eq!(round(&mut *udp, &mut *frames, 1400), 0);
    assert!(udp.counters().sent_refused > 0, "{:?}", udp.counters());
    ip("link set va up");
    let end = Instant::now() + LIMIT;
    while round(&mut *udp, &mut *frames, 1400) == 0 {
        assert!(Instant::now() < end, "{:?}", udp.counters());
    }
    ip("link set va mtu 1280");
    assert_eq!(round(&mut *udp, &mut *frames, 1400), 0);
    assert_eq!(udp.counters().sent_too_long, 1);
    assert_eq!(round(&mut *udp, &mut *frames, 1200), 1);
}
