//! Wrappers: fault injection, captures, traces.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use doorbell_port::{Faulty, PathRequest, Pcapng, Port, PortConfig, SendBatch, Tracer};
use doorbell_wire::roce::{Bth, Opcode, Place, Psn, Transport};

fn open(text: &str) -> Box<dyn Port> {
    text.parse::<PortConfig>().unwrap().open().unwrap()
}

fn packet(n: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![n as u8; len];
    let bth = Bth::new(
        Opcode::send(Transport::Rc, Place::Only, false),
        n,
        Psn::new(n),
    );
    bytes[..Bth::LEN].copy_from_slice(&bth.emit());
    bytes
}

/// Sends `count` packets through ports `a` and `b`; the numbers that arrive, in order.
fn run(a: &mut dyn Port, b: &mut dyn Port, count: u32) -> Vec<u32> {
    let to = a
        .path(&PathRequest {
            trains: true,
            ..PathRequest::new(b.local_addr())
        })
        .unwrap();
    let mut batch = SendBatch::new();
    let mut rx = b.recv_batch();
    let mut got = Vec::new();
    let mut sent = 0;
    let mut quiet = Instant::now();
    let end = Instant::now() + Duration::from_secs(20);
    while quiet.elapsed() < Duration::from_millis(50) && Instant::now() < end {
        for _ in 0..32 {
            if sent < count && batch.push(&to, &packet(sent, 40)) {
                sent += 1;
            }
        }
        a.send(&mut batch).unwrap();
        b.recv(&mut rx).unwrap();
        for p in rx.iter() {
            let n = Bth::parse(p.bytes.first_chunk().unwrap()).dest_qp;
            assert_eq!(p.bytes, packet(n, 40));
            got.push(n);
            quiet = Instant::now();
        }
        if sent < count || a.next_due().is_some() || b.next_due().is_some() {
            quiet = Instant::now();
        }
    }
    got
}

#[test]
fn faults_happen_as_often_as_asked_and_are_counted() {
    for side in ["out", "in"] {
        let faults = format!(
            "udp://127.0.0.1?faults=loss=5%,dup=4%,reorder=3%,corrupt=2%,dir={side},seed=9"
        );
        let plain = "udp://127.0.0.1";
        let (a, b) = if side == "out" {
            (faults.as_str(), plain)
        } else {
            (plain, faults.as_str())
        };
        let (mut a, mut b) = (open(a), open(b));
        let count = 20_000;
        let got = run(&mut *a, &mut *b, count);
        let c = if side == "out" {
            a.counters()
        } else {
            b.counters()
        };
        let share = |n: u64| n as f64 / f64::from(count);
        assert!((0.04..0.06).contains(&share(c.injected_loss)), "{c:?}");
        assert!(
            (0.03..0.05).contains(&share(c.injected_duplicates)),
            "{c:?}"
        );
        assert!((0.02..0.04).contains(&share(c.injected_delays)), "{c:?}");
        assert!((0.01..0.03).contains(&share(c.injected_damage)), "{c:?}");
        let expected =
            u64::from(count) - c.injected_loss - c.injected_damage + c.injected_duplicates;
        assert_eq!(got.len() as u64, expected, "{c:?}");
        let overtaken = got.windows(2).filter(|w| w[0] > w[1]).count();
        assert!(overtaken > 300, "{overtaken}");
        if side == "out" {
            assert_eq!(b.counters().icrc_errors, c.injected_damage);
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let faults = |seed: u32| {
        let mut a = open(&format!(
            "udp://127.0.0.1?faults=loss=10%,dup=10%,corrupt=10%,dir=out,seed={seed}"
        ));
        let mut b = open("udp://127.0.0.1");
        run(&mut *a, &mut *b, 2000)
    };
    assert_eq!(faults(3), faults(3));
    assert_ne!(faults(3), faults(4));
}

#[test]
fn delayed_packets_come_late_and_none_is_lost() {
    let mut a = open("udp://127.0.0.1?faults=delay=20ms..40ms,dir=out");
    let mut b = open("udp://127.0.0.1");
    let start = Instant::now();
    let mut got = run(&mut *a, &mut *b, 500);
    assert!(start.elapsed() >= Duration::from_millis(20));
    got.sort_unstable();
    assert!(got.iter().copied().eq(0..500));
}

#[test]
fn a_trace_has_a_line_for_each_packet() {
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let text = Shared::default();
    let mut a = Tracer::new(open("udp://127.0.0.1"), text.clone());
    let mut b = Tracer::new(open("udp://127.0.0.1"), text.clone());
    assert_eq!(run(&mut a, &mut b, 3), [0, 1, 2]);
    let lines = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
    assert_eq!(
        lines.lines().filter(|l| l.contains("-> 127.0.0.1")).count(),
        3,
        "{lines}"
    );
    assert_eq!(
        lines.lines().filter(|l| l.contains("<- 127.0.0.1")).count(),
        3,
        "{lines}"
    );
    assert!(lines.contains("qp 0x000002"), "{lines}");
}

/// Blocks of a pcapng file: type and body.
fn blocks(file: &[u8]) -> Vec<(u32, &[u8])> {
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    let mut all = Vec::new();
    let mut at = 0;
    while at < file.len() {
        let len = word(at + 4) as usize;
        assert_eq!(len % 4, 0);
        assert_eq!(word(at + len - 4) as usize, len);
        all.push((word(at), &file[at + 8..at + len - 4]));
        at += len;
    }
    all
}

#[test]
fn a_capture_has_whole_frames_of_both_directions() {
    use doorbell_wire::roce::icrc::{self, Ip};
    use doorbell_wire::roce::net::{Ethernet, Ipv4, Ipv6, Udp};
    let folder = tempfile::tempdir().unwrap();
    for addr in ["127.0.0.1", "[::1]"] {
        let name = folder.path().join("a.pcapng");
        let mut a = Pcapng::create(open(&format!("udp://{addr}")), &name).unwrap();
        let mut b = open(&format!("udp://{addr}"));
        assert_eq!(run(&mut a, &mut *b, 40).len(), 40);
        assert_eq!(run(&mut *b, &mut a, 40).len(), 40);
        drop(a);
        let file = std::fs::read(&name).unwrap();
        let blocks = blocks(&file);
        assert_eq!(blocks[0].0, 0x0a0d_0d0a);
        assert_eq!(blocks[1].0, 1);
        let frames: Vec<&[u8]> = blocks[2..]
            .iter()
            .map(|(kind, body)| {
                assert_eq!(*kind, 6);
                let len = u32::from_le_bytes(body[12..16].try_into().unwrap()) as usize;
                &body[20..20 + len]
            })
            .collect();
        assert_eq!(frames.len(), 80);
        for frame in frames {
            let (ethernet, rest) = Ethernet::parse(frame).unwrap();
            let (ip, rest) = match ethernet.ethertype {
                0x0800 => Ipv4::parse(rest)
                    .map(|(ip, rest)| (Ip::V4(ip), rest))
                    .unwrap(),
                _ => Ipv6::parse(rest)
                    .map(|(ip, rest)| (Ip::V6(ip), rest))
                    .unwrap(),
            };
            let (udp, rest) = Udp::parse(rest).unwrap();
            let (transport, crc) = rest.split_last_chunk::<4>().unwrap();
            let right = icrc::compute(&ip, udp.src, udp.dst, transport);
            assert_eq!(u32::from_le_bytes(*crc), right);
        }
    }
}

#[test]
fn a_capture_that_cannot_be_made_is_said_clearly() {
    let error = "udp://127.0.0.1?pcap=/nonexistent/x"
        .parse::<PortConfig>()
        .unwrap()
        .open()
        .unwrap_err();
    assert!(error.to_string().contains("/nonexistent/x"), "{error}");
}

/// Who reads a capture through a pipe, and goes: the packets go on, and those that nobody captured are counted.
#[test]
fn a_capture_that_ends_stops_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&name).status();
    assert!(made.unwrap().success());
    let reader = std::thread::spawn({
        let name = name.clone();
        move || {
            let mut start = [0; 12];
            std::io::Read::read_exact(&mut std::fs::File::open(name).unwrap(), &mut start).unwrap();
            start
        }
    });
    let mut a = Pcapng::create(open("udp://127.0.0.1"), &name).unwrap();
    assert_eq!(reader.join().unwrap()[..4], 0x0a0d_0d0au32.to_le_bytes());
    let mut b = open("udp://127.0.0.1");
    assert_eq!(run(&mut a, &mut *b, 3000).len(), 3000);
    assert_eq!(run(&mut *b, &mut a, 3000).len(), 3000);
    assert_eq!(a.counters().capture_lost, 6000);
}

#[test]
fn wrappers_wrap_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join("a.pcapng");
    let mut a = open(&format!(
        "udp://127.0.0.1?faults=loss=1%&pcap={}",
        name.display()
    ));
    let text = a.describe().to_string();
    assert!(
        text.contains("loss=0.01") && text.contains("a.pcapng"),
        "{text}"
    );
    let mut b = Faulty::new(open("udp://127.0.0.1"), "dup=0".parse().unwrap());
    assert!(run(&mut *a, &mut b, 1000).len() > 900);
}

#[test]
#[ignore = "needs PEER: tshark"]
fn peer_wireshark_dissects_a_capture() {
    let folder = tempfile::tempdir().unwrap();
    for addr in ["127.0.0.1", "[::1]"] {
        let name = folder.path().join("a.pcapng");
        // To the well-known port, so that the dissector knows what it is.
        let mut a = Pcapng::create(open(&format!("udp://{addr}")), &name).unwrap();
        let mut b = open(&format!("udp://{addr}:4791"));
        assert_eq!(run(&mut a, &mut *b, 40).len(), 40);
        drop(a);
        let out = std::process::Command::new("tshark")
            .arg("-r")
            .arg(&name)
            .args([
                "-o",
                "udp.check_checksum:TRUE",
                "-o",
                "ip.check_checksum:TRUE",
                "-T",
                "fields",
            ])
            .args(["-e", "infiniband.bth.opcode", "-e", "infiniband.bth.destqp"])
            .args([
                "-e",
                "frame.comment",
                "-e",
                "_ws.malformed",
                "-e",
                "_ws.expert.message",
            ])
            .output()
            .expect("tshark");
        assert!(
            out.status.success(),
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
        let text = String::from_utf8(out.stdout).unwrap();
        assert_eq!(text.lines().count(), 40, "{text}");
        for (n, line) in text.lines().enumerate() {
            let fields: Vec<&str> = line.split('\t').collect();
            assert_eq!(fields[0], "4", "{line}");
            let qp = u32::from_str_radix(fields[1].trim_start_matches("0x"), 16).unwrap();
            assert_eq!(qp as usize, n, "{line}");
            assert!(fields[2].contains("sent to queue pair"), "{line}");
            assert!(fields[3].is_empty(), "malformed: {line}");
            assert!(!fields[4].to_lowercase().contains("checksum"), "{line}");
        }
    }
}
