//! What the protocol alone costs: two connections back to back in one thread, no sockets, no checksums.
//!
//! `cargo run --release -p doorbell-roce --example roce_rate`

use std::hint::black_box;
use std::time::{Duration, Instant};

use doorbell_roce::{
    Access, Atomic, Config, Connection, Event, LocalFault, Memory, Message, Mtu, Op, Received,
    Refusal, Status,
};
use doorbell_wire::roce::{MAX_HEADER, Packet};

/// One buffer is everything: what messages come from, go to, and where they land.
struct Flat(Vec<u8>);

impl Memory for Flat {
    fn load(&mut self, _: u64, offset: u32, out: &mut [u8]) -> Result<bool, LocalFault> {
        let from = offset as usize;
        out.copy_from_slice(&self.0[from..from + out.len()]);
        Ok(true)
    }
    fn store(&mut self, _: u64, offset: u32, bytes: &[u8]) -> Result<Status, LocalFault> {
        self.0[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(Status::Now)
    }
    fn check(&mut self, _: u32, va: u64, len: u32, _: Access) -> Result<(), Refusal> {
        if va + u64::from(len) > self.0.len() as u64 {
            return Err(Refusal::Access);
        }
        Ok(())
    }
    fn write(&mut self, _: u32, va: u64, bytes: &[u8]) -> Result<Status, Refusal> {
        let at = self.0.get_mut(va as usize..va as usize + bytes.len());
        at.ok_or(Refusal::Access)?.copy_from_slice(bytes);
        Ok(Status::Now)
    }
    fn read(&mut self, _: u32, va: u64, _: u32, out: &mut [u8]) -> Result<bool, Refusal> {
        let at = self.0.get(va as usize..va as usize + out.len());
        out.copy_from_slice(at.ok_or(Refusal::Access)?);
        Ok(true)
    }
    fn atomic(&mut self, _: u64, _: u32, _: u64, _: Atomic) -> Result<Option<u64>, Refusal> {
        Err(Refusal::Invalid)
    }
    fn atomic_result(&mut self, _: u64) -> Result<Option<u64>, Refusal> {
        Err(Refusal::Invalid)
    }
    fn receive(&mut self) -> bool {
        true
    }
    fn scatter(&mut self, offset: u32, bytes: &[u8]) -> Result<Status, Refusal> {
        self.write(0, u64::from(offset), bytes)
    }
    fn received(&mut self, received: Received) {
        black_box(received);
    }
    fn unreceive(&mut self) {}
    fn settled(&mut self) -> u64 {
        0
    }
}

struct Rate {
    messages: u64,
    packets: u64,
    bytes: u64,
    took: Duration,
}

/// Posts `op` of `len` bytes for `time`, `burst` packets at a time from side to side.
fn measure(op: Op, len: u32, burst: usize, time: Duration) -> Rate {
    let mtu = Mtu::M4096;
    let config = |dest_qpn| Config {
        dest_qpn,
        path_mtu: mtu,
        window: 512,
        ..Config::default()
    };
    let mut ends = [2, 1].map(|peer| {
        let connection = Connection::new(&config(peer)).expect("a valid configuration");
        (connection, Flat(vec![1; 1 << 20]))
    });
    let slot = (MAX_HEADER + mtu.bytes() as usize + 3).next_multiple_of(64);
    let mut wire = vec![0; slot * burst];
    let mut lens = vec![0; burst];
    let mut rate = Rate {
        messages: 0,
        packets: 0,
        bytes: 0,
        took: time,
    };
    let (mut token, mut now) = (0, 0);
    let start = Instant::now();
    loop {
        if now & 0xff == 0 && start.elapsed() >= time {
            break;
        }
        now += 1;
        while ends[0].0.has_room() {
            let message = Message {
                token,
                op,
                len,
                fence: false,
                solicited: false,
            };
            if ends[0].0.post(message).is_err() {
                break;
            }
            token += 1;
        }
        for from in 0..2 {
            let (connection, memory) = &mut ends[from];
            let mut count = 0;
            while count < burst {
                let out = &mut wire[count * slot..][..slot];
                let Some(len) = connection.transmit(now, memory, out) else {
                    break;
                };
                lens[count] = len;
                count += 1;
            }
            rate.packets += count as u64;
            let (connection, memory) = &mut ends[1 - from];
            for (n, len) in lens[..count].iter().enumerate() {
                match Packet::parse(&wire[n * slot..][..*len]) {
                    Ok(packet) => connection.handle(&packet, false, now, memory),
                    Err(error) => panic!("we made a packet that we cannot read: {error}"),
                }
            }
        }
        let (connection, memory) = &mut ends[0];
        while let Some(event) = connection.poll_event(memory) {
            match event {
                Event::Done { through } => rate.messages = through + 1,
                other => panic!("it failed: {other:?}"),
            }
        }
    }
    rate.took = start.elapsed();
    rate.bytes = rate.messages * u64::from(len);
    rate
}

fn main() {
    let time = Duration::from_millis(
        std::env::args()
            .nth(1)
            .and_then(|ms| ms.parse().ok())
            .unwrap_or(500),
    );
    println!("both sides in one thread, path MTU 4096; bursts of 32 packets, or 1:");
    let write = Op::Write {
        va: 0,
        rkey: 1,
        imm: None,
    };
    let read = Op::Read { va: 0, rkey: 1 };
    for (name, op, len, burst) in [
        ("WRITE 8 B", write, 8, 32),
        ("WRITE 8 B", write, 8, 1),
        ("SEND 8 B", Op::Send { imm: None }, 8, 32),
        ("READ 8 B", read, 8, 32),
        ("WRITE 4 KiB", write, 4096, 32),
        ("WRITE 1 MiB", write, 1 << 20, 32),
        ("READ 1 MiB", read, 1 << 20, 32),
    ] {
        let rate = measure(op, len, burst, time);
        let ns = rate.took.as_nanos() as f64;
        println!(
            "{name:<12} burst {burst:>2}: {:>7.1} ns a message, {:>6.1} ns a packet (made, parsed, handled), {:>6.2} GB/s",
            ns / rate.messages as f64,
            ns / rate.packets as f64,
            rate.bytes as f64 / ns,
        );
    }
}
