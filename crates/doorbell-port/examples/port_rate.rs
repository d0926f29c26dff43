//! Packets per second and nanoseconds per packet of a UDP port over loopback, and its round trip beside a bare UDP echo.
//!
//! `cargo run --release -p doorbell-port --example port_rate [SECONDS]`: two threads, one sends, one receives. The receiver's count is
//! what is printed; losses (the socket overflows when the receiver is slower) are beside it.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use doorbell_port::{Path, PathRequest, Port, PortConfig, SendBatch};

fn open(trains: bool, addr: &str) -> Box<dyn Port> {
    let mut config: PortConfig = format!("udp://{addr}").parse().expect("an address");
    config.trains = trains;
    config.open().expect("a port")
}

fn path(from: &mut dyn Port, to: &dyn Port, trains: bool) -> Path {
    from.path(&PathRequest {
        trains,
        ..PathRequest::new(to.local_addr())
    })
    .expect("a path")
}

/// One way, as fast as it goes.
fn rate(addr: &str, trains: bool, len: usize, batch_len: usize, time: Duration) {
    let (mut a, mut b) = (open(trains, addr), open(trains, addr));
    let to = path(&mut *a, &*b, trains);
    let stop = AtomicBool::new(false);
    let (sent, got, elapsed, counters) = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut batch = SendBatch::new();
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..batch_len {
                    let Some(space) = batch.space(&to) else { break };
                    space[..len].fill(7);
                    space[0] = 4;
                    batch.commit(&to, len);
                }
                a.send(&mut batch).expect("sending");
            }
            a.counters()
        });
        let mut rx = b.recv_batch();
        let mut got = 0u64;
        let mut sum = 0u64;
        let begin = Instant::now();
        while begin.elapsed() < time {
            got += b.recv(&mut rx).expect("receiving") as u64;
            // Touch what arrived, as whoever copies it would.
            sum += rx
                .iter()
                .map(|p| u64::from(p.bytes[p.bytes.len() - 1]))
                .sum::<u64>();
        }
        let elapsed = begin.elapsed();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(sum, got * 7);
        let sender = sender.join().expect("the sender");
        (sender.sent_packets, got, elapsed, b.counters())
    });
    let rate = got as f64 / elapsed.as_secs_f64();
    println!(
        "{addr:<10} trains {:<3} {len:>5} B, {batch_len:>3} a batch: {:>9.0} packets/s {:>7.0} ns each {:>7.2} GB/s  lost {:>4.1}%  {:>5.1} packets a receive call",
        if trains { "yes" } else { "no" },
        rate,
        1e9 / rate,
        rate * len as f64 / 1e9,
        100.0 * (1.0 - got as f64 / sent.max(1) as f64).max(0.0),
        got as f64 / counters.received_calls.max(1) as f64,
    );
}

fn median(mut times: Vec<u64>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2] as f64 / 1000.0
}

/// 8 bytes there and back, both sides spinning; µs.
fn port_echo(addr: &str, trains: bool, rounds: usize) -> f64 {
    let (mut a, mut b) = (open(trains, addr), open(trains, addr));
    let (there, back) = (path(&mut *a, &*b, trains), path(&mut *b, &*a, trains));
    let len = 12 + 16 + 8;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut rx, mut tx) = (b.recv_batch(), SendBatch::new());
            let mut left = rounds;
            while left > 0 {
                b.recv(&mut rx).expect("receiving");
                for p in rx.iter() {
                    assert!(tx.push(&back, p.bytes));
                    left -= 1;
                }
                b.send(&mut tx).expect("sending");
            }
        });
        let (mut rx, mut tx) = (a.recv_batch(), SendBatch::new());
        let bytes = vec![4; len];
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let begin = Instant::now();
            assert!(tx.push(&there, &bytes));
            a.send(&mut tx).expect("sending");
            while a.recv(&mut rx).expect("receiving") == 0 {}
            times.push(begin.elapsed().as_nanos() as u64);
        }
        median(times)
    })
}

/// The same with nothing but sockets.
fn bare_echo(addr: &str, rounds: usize) -> f64 {
    let socket = || {
        let socket = UdpSocket::bind((addr.trim_matches(['[', ']']), 0)).expect("a socket");
        socket.set_nonblocking(true).expect("a flag");
        socket
    };
    let (a, b) = (socket(), socket());
    let (to, back) = (
        b.local_addr().expect("bound"),
        a.local_addr().expect("bound"),
    );
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut buffer = [0; 64];
            for _ in 0..rounds {
                let len = loop {
                    if let Ok((len, _)) = b.recv_from(&mut buffer) {
                        break len;
                    }
                };
                b.send_to(&buffer[..len], back).expect("sending");
            }
        });
        let mut buffer = [0; 64];
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let begin = Instant::now();
            a.send_to(&[0; 8], to).expect("sending");
            while a.recv_from(&mut buffer).is_err() {}
            times.push(begin.elapsed().as_nanos() as u64);
        }
        median(times)
    })
}

fn main() {
    let seconds: f64 = std::env::args()
        .nth(1)
        .map_or(0.5, |s| s.parse().expect("seconds"));
    let time = Duration::from_secs_f64(seconds);
    for addr in ["127.0.0.1", "[::1]"] {
        for trains in [false, true] {
            for (len, batch) in [
                (36, 1),
                (36, 16),
                (36, 64),
                (36, 256),
                (1052, 64),
                (4140, 60),
            ] {
                rate(addr, trains, len, batch, time);
            }
        }
        let rounds = (seconds * 20_000.0) as usize;
        for round in 0..3 {
            let (bare, port, trains) = (
                bare_echo(addr, rounds),
                port_echo(addr, false, rounds),
                port_echo(addr, true, rounds),
            );
            println!(
                "{addr:<10} round trip {round}: bare UDP echo {bare:.2} us, port {port:.2} us ({:.2} times), with trains {trains:.2} us ({:.2} times)",
                port / bare,
                trains / bare
            );
        }
    }
}
