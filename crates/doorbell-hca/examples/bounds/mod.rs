//! What the kernel alone takes, for the figures beside it: a bare UDP echo, a TCP stream, and trains of packets that nobody reads.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use doorbell_port::{Path, PathRequest, Port, PortConfig, SendBatch};

use super::cpu_seconds;

/// Bytes of a write and of a message.
const MESSAGE: usize = 1 << 20;
/// Bytes under way at most, as between two queue pairs.
const WINDOW: u64 = 1 << 20;

fn echo_sockets() -> (UdpSocket, UdpSocket) {
    let bind = || UdpSocket::bind("127.0.0.1:0").expect("a port");
    let (a, b) = (bind(), bind());
    a.connect(b.local_addr().expect("bound")).expect("connect");
    b.connect(a.local_addr().expect("bound")).expect("connect");
    (a, b)
}

/// Nanoseconds of 8 bytes there and back over two sockets, by one thread.
pub(crate) fn echo(seconds: f64) -> f64 {
    let (a, b) = echo_sockets();
    let (start, cpu, mut trips) = (Instant::now(), cpu_seconds(), 0u64);
    let mut bytes = [0u8; 8];
    while start.elapsed().as_secs_f64() < seconds {
        for _ in 0..64 {
            trips += 1;
            a.send(&bytes).expect("send");
            b.recv(&mut bytes).expect("receive");
            b.send(&bytes).expect("send");
            a.recv(&mut bytes).expect("receive");
        }
    }
    (cpu_seconds() - cpu) * 1e9 / trips as f64
}

/// The same, a thread a side, which spin; elapsed time.
pub(crate) fn echo_apart(seconds: f64) -> f64 {
    let (a, b) = echo_sockets();
    a.set_nonblocking(true).expect("a flag");
    b.set_nonblocking(true).expect("a flag");
    let stop = AtomicBool::new(false);
    let (start, mut trips) = (Instant::now(), 0u64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = [0u8; 8];
            while !stop.load(Ordering::Relaxed) {
                if b.recv(&mut bytes).is_ok() {
                    b.send(&bytes).expect("send");
                }
            }
        });
        let mut bytes = [0u8; 8];
        while start.elapsed().as_secs_f64() < seconds {
            for _ in 0..64 {
                trips += 1;
                a.send(&bytes).expect("send");
                while a.recv(&mut bytes).is_err() {}
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    start.elapsed().as_nanos() as f64 / trips as f64
}

/// GB/s of a TCP stream over loopback, a thread a side.
pub(crate) fn tcp(seconds: f64) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("bound");
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut bytes = vec![0; MESSAGE];
            let mut all = 0;
            loop {
                match stream.read(&mut bytes).expect("reading") {
                    0 => break all,
                    n => all += n,
                }
            }
        });
        let mut stream = TcpStream::connect(at).expect("connect");
        let (start, bytes) = (Instant::now(), vec![7; MESSAGE]);
        while start.elapsed().as_secs_f64() < seconds {
            stream.write_all(&bytes).expect("writing");
        }
        drop(stream);
        let all = reader.join().expect("the reader");
        all as f64 / start.elapsed().as_nanos() as f64
    })
}

/// GB/s of payload in packets of `mtu` bytes through two ports, a thread a side, in trains from where it lies: what a queue pair sends, without
/// queue pairs, and nobody takes it on. `touch`: the receiver copies it once, as into a region.
pub(crate) fn trains(seconds: f64, mtu: usize, touch: bool) -> f64 {
    let open = || {
        let config: PortConfig = "udp://127.0.0.1".parse().expect("valid");
        config.open().expect("a port")
    };
    let (mut a, mut b): (Box<dyn Port>, Box<dyn Port>) = (open(), open());
    let way: Path = a
        .path(&PathRequest {
            trains: b.accepts_trains(),
            light: b.accepts_light(),
            long: mtu > 4096,
            ..PathRequest::new(b.local_addr())
        })
        .expect("a path");
    let (came, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let payload = vec![7u8; MESSAGE + mtu];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut arrived = b.recv_batch();
            let mut region = vec![0u8; MESSAGE + mtu];
            let mut at = 0;
            while !stop.load(Ordering::Relaxed) {
                let n = b.recv(&mut arrived).expect("receiving");
                for packet in arrived.iter().filter(|_| touch) {
                    let (_, payload) = packet.bytes.split_at(12);
                    region[at..at + mtu].copy_from_slice(payload);
                    at = (at + mtu) % MESSAGE;
                }
                came.fetch_add(n as u64, Ordering::Release);
            }
        });
        let (mut batch, mut sent) = (SendBatch::new(), 0u64);
        let start = Instant::now();
        while start.elapsed().as_secs_f64() < seconds {
            while (sent - came.load(Ordering::Acquire)) * (mtu as u64) < WINDOW {
                let Some(space) = batch.space(&way) else {
                    break;
                };
                space[..12].fill(0);
                let at = (sent as usize * mtu) % MESSAGE;
                // SAFETY: the payload outlives the batch.
                unsafe { batch.commit_lent(&way, 12, payload[at..].as_ptr(), mtu) };
                sent += 1;
                if sent.is_multiple_of(128) {
                    break;
                }
            }
            a.send(&mut batch).expect("sending");
        }
        let rate = came.load(Ordering::Acquire) as f64 * mtu as f64;
        let rate = rate / start.elapsed().as_nanos() as f64;
        stop.store(true, Ordering::Relaxed);
        rate
    })
}
