//! Ports of frames: two of them as each other's network.

use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant};

use doorbell_port::{Check, PathRequest, Port, PortConfig, PortError, SendBatch};

const LIMIT: Duration = Duration::from_secs(10);

fn open(text: &str) -> Box<dyn Port> {
    text.parse::<PortConfig>().unwrap().open().unwrap()
}

/// Two UDP addresses of this host that nobody has.
fn two_addresses() -> (String, String) {
    let sockets = [(), ()].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    let [a, b] = sockets.map(|s| s.local_addr().unwrap().to_string());
    (a, b)
}

fn packet(n: u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![n; len];
    bytes[0] = 4;
    bytes[4] = 0;
    bytes
}

/// Sends packets of many lengths from `a` to `b` and checks what arrives.
fn exchange(a: &mut dyn Port, b: &mut dyn Port) {
    let mut request = PathRequest::new(b.local_addr());
    request.source_port = Some(50_001);
    request.tos = 2;
    request.deadline = LIMIT;
    let to = a.path(&request).unwrap();
    let lens = [12, 16, 40, 1052, to.mtu(), 28];
    let mut batch = SendBatch::new();
    for (n, len) in lens.iter().enumerate() {
        assert!(batch.push(&to, &packet(n as u8, *len)));
    }
    let mut rx = b.recv_batch();
    let mut got = 0;
    let end = Instant::now() + LIMIT;
    while got < lens.len() && Instant::now() < end {
        a.send(&mut batch).unwrap();
        b.recv(&mut rx).unwrap();
        for p in rx.iter() {
            assert_eq!(p.bytes, packet(got as u8, lens[got]));
            assert_eq!((p.check, p.tos), (Check::Exact, 2));
            assert_eq!(p.src, (a.local_addr().ip(), 50_001).into());
            assert_eq!(p.dst, b.local_addr().ip());
            got += 1;
        }
    }
    assert_eq!(got, lens.len(), "{:?} {:?}", a.counters(), b.counters());
    assert_eq!(b.counters().icrc_errors, 0);
}

#[test]
fn two_ports_are_each_others_network() {
    let folder = tempfile::tempdir().unwrap();
    let (x, y) = two_addresses();
    let (u, v) = (folder.path().join("u"), folder.path().join("v"));
    let (u, v) = (u.display().to_string(), v.display().to_string());
    for (x, y) in [(x, y), (u, v)] {
        for (ip_a, ip_b) in [("10.9.0.1", "10.9.0.2"), ("fd00::1", "fd00::2")] {
            for mtu in [1500, 4200] {
                let mut a = open(&format!(
                    "dgram:{x},{y}?ip={ip_a}&mac=02:00:00:00:00:0a&mtu={mtu}"
                ));
                // Nobody there yet: that is said by the deadline, and is not an end.
                let peer: IpAddr = ip_b.parse().unwrap();
                let mut request = PathRequest::new((peer, 4791).into());
                request.deadline = Duration::from_millis(5);
                let error = a.path(&request).unwrap_err();
                assert!(matches!(error, PortError::NoNeighbour { .. }), "{error}");
                let mut b = open(&format!(
                    "dgram:{y},{x}?ip={ip_b}&mac=02:00:00:00:00:0b&mtu={mtu}"
                ));
                exchange(&mut *a, &mut *b);
                exchange(&mut *b, &mut *a);
                assert!(a.describe().to_string().contains("full ICRC"));
            }
        }
    }
}

#[test]
fn packets_wait_while_nobody_drives_the_port() {
    let (x, y) = two_addresses();
    let mut a = open(&format!("dgram:{x},{y}?ip=10.9.0.1"));
    let mut b = open(&format!("dgram:{y},{x}?ip=10.9.0.2&mac=02:00:00:00:00:0b"));
    let mut request = PathRequest::new(b.local_addr());
    request.deadline = LIMIT;
    // Nobody calls `b`: its keeper answers.
    let to = a.path(&request).unwrap();
    let mut batch = SendBatch::new();
    for n in 0..100 {
        assert!(batch.push(&to, &packet(n, 64)));
    }
    let end = Instant::now() + LIMIT;
    while !batch.is_empty() && Instant::now() < end {
        a.send(&mut batch).unwrap();
    }
    std::thread::sleep(Duration::from_millis(50));
    let mut rx = b.recv_batch();
    let mut got = 0;
    while got < 100 && Instant::now() < end {
        b.recv(&mut rx).unwrap();
        for p in rx.iter() {
            assert_eq!(p.bytes, packet(got, 64));
            got += 1;
        }
    }
    assert_eq!(got, 100);
}

#[test]
fn what_cannot_be_is_said_clearly() {
    for (text, word) in [
        ("raw:doesnotexist0", "doesnotexist0"),
        ("raw:averyveryverylongname", "averyveryverylongname"),
        (
            "dgram:/nonexistent/a,/nonexistent/b?ip=10.0.0.1",
            "/nonexistent/a",
        ),
    ] {
        let error = text.parse::<PortConfig>().unwrap().open().unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}
