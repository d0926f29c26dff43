//! Two hosts, as far as Linux can tell: `doorbell serve` in one network namespace, `doorbell perf --connect` in another, a veth pair
//! between them, and what networks and strangers do. Needs root and iproute2.

#[path = "../common/mod.rs"]
mod common;
mod net;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Running, kill, signal};
use doorbell_wire::roce::icrc::{self, Ip};
use doorbell_wire::roce::net::Ipv4;
use doorbell_wire::roce::{Bth, Ext, Header, Opcode, Psn, Reth};
use net::{CLIENT, Net, SERVER, STRANGER};

/// A run that nothing is wrong with, however slow the machine.
const WELL: Duration = Duration::from_secs(90);
/// What is allowed beyond a configured time-out.
const SLACK: Duration = Duration::from_secs(8);

/// A client's run that ends well, and every byte of it.
fn right(running: &mut Running) -> String {
    let said = running.succeed_within(WELL);
    assert!(said.contains("none wrong"), "{said}");
    said
}

/// The number behind `name` in the counters that a run printed; 0 if it has none.
fn counter(said: &str, name: &str) -> u64 {
    let mut words = said.split_whitespace().map(|w| w.trim_end_matches(','));
    let mut sum = 0;
    while let Some(word) = words.next() {
        if word == name {
            sum += words
                .next()
                .and_then(|n| n.replace(',', "").parse::<u64>().ok())
                .unwrap_or(0);
        }
    }
    sum
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_every_test_and_every_byte() {
    let net = Net::new([1500, 1500]);
    let mut server = net.serve(&["--timeout", "60"], &[]);
    for test in [
        "put-bw --quick --size 8,65536",
        "put-lat --iters 300 --check",
        "get-bw --quick --size 8,65536",
        "atomic-rate --quick",
        "signal-lat --iters 300 --check",
        "put-bw --iters 4096 --check --size 8 --net-fault loss=2%,dup=2%,reorder=2%,corrupt=2%,seed=5",
        "get-bw --iters 256 --check --size 16384 --net-fault loss=1%,dup=1%,reorder=1%,corrupt=1%,seed=6",
    ] {
        // A minute: nothing here is about time, and the machine may be busy.
        let said = right(&mut net.perf(&format!("{test} --timeout 60"), &[]));
        println!("{said}");
        if test.contains("loss") {
            assert!(counter(&said, "retransmitted_packets") > 0, "{said}");
            assert!(counter(&said, "icrc_errors") > 0, "{said}");
        }
    }
    signal(server.pid(), "-TERM");
    server.succeed_within(SLACK);
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_a_server_killed_at_any_moment_is_an_error_in_time() {
    let net = Net::new([1500, 1500]);
    for after in [0, 3, 20, 120, 500] {
        let server = net.serve(&["--once"], &[]);
        let mut client = net.perf("put-bw --size 4096 --secs 600 --timeout 3", &[]);
        server.wait_for("negotiated");
        std::thread::sleep(Duration::from_millis(after));
        kill(server.pid());
        let began = Instant::now();
        // 4.3 s of retries, or 3 s of silence on the TCP connection, whichever is waited for.
        let (status, said) = client.end_within(Duration::from_secs(5) + SLACK);
        println!(
            "killed after {after} ms: {status} after {:?}\n{said}",
            began.elapsed()
        );
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(
            said.contains(&format!("peer process at {SERVER}")),
            "{said}"
        );
    }
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_a_client_killed_at_any_moment_leaves_a_server_that_serves() {
    let net = Net::new([1500, 1500]);
    let mut server = net.serve(&["--timeout", "3"], &[]);
    for (n, after) in [0, 5, 50, 500].into_iter().enumerate() {
        let client = net.perf("put-bw --size 4096 --secs 600 --timeout 3", &[]);
        server.wait_for(&format!("client {}: negotiated", n + 1));
        std::thread::sleep(Duration::from_millis(after));
        kill(client.pid());
        server.wait_for(&format!("client {}: it went without a word", n + 1));
    }
    right(&mut net.perf("put-bw --quick", &[]));
    signal(server.pid(), "-TERM");
    server.succeed_within(SLACK);
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_two_seconds_without_a_link_cost_nothing_but_time() {
    let net = Net::new([1500, 1500]);
    let server = net.serve(&["--once"], &[]);
    let mut client = net.perf("put-bw --size 4096 --secs 6 --check", &[]);
    server.wait_for("negotiated");
    net.wait_for_traffic();
    net.link(false);
    std::thread::sleep(Duration::from_secs(2));
    net.link(true);
    let said = right(&mut client);
    println!("{said}");
    assert!(counter(&said, "local_ack_timeout_err") > 0, "{said}");
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_a_link_that_stays_down_costs_the_configured_time() {
    let net = Net::new([1500, 1500]);
    // 4.096 us * 2^15 * 3: 0.4 s.
    let short = [
        ("DOORBELL_ROCE_TIMEOUT", "15"),
        ("DOORBELL_ROCE_RETRY", "2"),
    ];
    let mut server = net.serve(&["--once", "--timeout", "2"], &short);
    let mut client = net.perf("put-bw --size 4096 --secs 600 --timeout 2", &short);
    net.wait_for_traffic();
    net.link(false);
    let began = Instant::now();
    // The client's queue pair after 0.4 s; that the server cannot be asked any more takes the 2 s.
    let (status, said) = client.end_within(Duration::from_secs(2) + SLACK);
    println!("{status} after {:?}\n{said}", began.elapsed());
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("TRANSPORT_RETRY"), "{said}");
    // The server sends nothing that could go unanswered; the client's signs of life stay away.
    let (status, said) = server.end_within(Duration::from_secs(2) + SLACK);
    println!("{status} after {:?}\n{said}", began.elapsed());
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains(CLIENT) && said.contains("has been silent for"),
        "{said}"
    );
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_mtus_that_differ_are_agreed_on_and_one_that_shrinks_is_an_error() {
    let net = Net::new([9000, 1500]);
    let server = net.serve(&[], &[]);
    let said = right(&mut net.perf("put-bw --quick --size 65536", &[]));
    assert!(said.contains("path MTU 1024"), "{said}");
    // Full packets do not fit any more, and nobody says so: the link is one that swallows them.
    let short = [
        ("DOORBELL_ROCE_TIMEOUT", "15"),
        ("DOORBELL_ROCE_RETRY", "2"),
    ];
    let mut client = net.perf("put-bw --size 4096 --secs 600 --timeout 2", &short);
    server.wait_for("client 2: negotiated");
    net.wait_for_traffic();
    net.mtu(0, 800);
    net.mtu(1, 800);
    let (status, said) = client.end_within(Duration::from_secs(2) + SLACK);
    println!("{said}");
    assert_eq!(status.code(), Some(1), "{said}");
    // Whoever connects from now on finds what fits.
    let said = right(&mut net.perf("put-bw --quick --size 65536", &[]));
    assert!(said.contains("path MTU 512"), "{said}");
}

/// Where the server's RoCE port is, from what the client was told.
fn roce_port(said: &str) -> u16 {
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    let at = format!("<-> {SERVER}:");
    let rest = words.split_once(&at).expect("the server's port").1;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect("a port")
}

/// Packets as RoCE has them, with right CRCs, and others: too short, too long, of other versions.
fn disturb(from: &str, to_port: u16, stop: &AtomicBool) -> u64 {
    let socket = UdpSocket::bind((from, 0)).expect("a socket");
    let own_port = socket.local_addr().expect("its address").port();
    let addresses = Ip::V4(Ipv4 {
        src: from.parse::<std::net::Ipv4Addr>().expect("one").octets(),
        dst: SERVER.parse::<std::net::Ipv4Addr>().expect("one").octets(),
        ..Ipv4::default()
    });
    let (mut sent, mut random) = (0, 0x9e37_79b9_7f4a_7c15_u64);
    let mut bytes = [0; 4200];
    while !stop.load(Ordering::Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let opcode = Opcode(random as u8 & 0x3f);
        let qpn = (random >> 8) as u32 & 0xff_ffff;
        let mut bth = Bth::new(opcode, qpn, Psn::new((random >> 32) as u32));
        bth.ack_req = true;
        let rkey = (random >> 16) as u32;
        let reth = Reth {
            va: 0,
            rkey,
            len: 64,
        };
        let mut len = Header {
            bth,
            ext: Ext::Reth(reth),
        }
        .emit(&mut bytes)
            + (random >> 40) as usize % 1024;
        match random % 16 {
            0 => len = (random >> 20) as usize % 12,
            1 => len = 4100,
            _ => {}
        }
        let crc = icrc::compute(&addresses, own_port, to_port, &bytes[..len]);
        bytes[len..len + 4].copy_from_slice(&crc.to_le_bytes());
        // Now and then a wrong one, or none.
        let end = len
            + match random % 7 {
                0 => 0,
                _ => 4,
            };
        // What is too long for the link is cut into fragments by the kernel, or not sent at all.
        sent += u64::from(socket.send_to(&bytes[..end], (SERVER, to_port)).is_ok());
        // No flood: what overruns the server's socket is lost for everybody, whatever it holds.
        if sent % 16 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    sent
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_strangers_are_counted_and_disturb_nothing() {
    let net = Net::new([1500, 1500]);
    let server = net.serve(&["--once"], &[]);
    let mut client = net.perf("put-bw --size 4096 --secs 4 --check", &[]);
    server.wait_for("negotiated");
    client.wait_for("path MTU");
    let port = roce_port(&client.said());
    let stop = AtomicBool::new(false);
    let (said, sent) = std::thread::scope(|scope| {
        // From another address, and from the client's own, where only QPN, PSN and key have to be guessed.
        let disturbers = [STRANGER, CLIENT].map(|from| {
            let (net, stop) = (&net, &stop);
            scope.spawn(move || net.inside(1, || disturb(from, port, stop)))
        });
        let said = client.end_within(WELL);
        stop.store(true, Ordering::Relaxed);
        (said, disturbers.map(|d| d.join().expect("a disturber")))
    });
    println!("{sent:?} packets of strangers\n{}", said.1);
    assert!(said.0.success(), "{}", said.1);
    assert!(said.1.contains("none wrong"), "{}", said.1);
    server.wait_for("done");
    let served = server.said();
    println!("{served}");
    assert!(sent.iter().all(|n| *n > 1000), "{sent:?}");
    assert!(counter(&served, "unknown_qp") > 1000, "{served}");
    assert!(counter(&served, "icrc_errors") > 0, "{served}");
}

/// The shell commands that a page shows after `heading`.
fn commands_of(page: &str, heading: &str) -> String {
    let path = format!("{}/../../{page}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the page");
    let rest = text.split_once(heading).expect("the heading").1;
    let block = rest.split_once("```sh\n").expect("commands").1;
    block.split_once("```").expect("their end").0.to_owned()
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_the_pages_commands_for_one_machine_are_right() {
    let exe = std::path::Path::new(env!("CARGO_BIN_EXE_doorbell"));
    let folder = exe.parent().expect("its folder").display().to_string();
    let path = std::env::var("PATH").unwrap_or_default();
    let commands = commands_of("docs/roce.md", "To try it on one machine");
    let mut shell = std::process::Command::new("sh");
    shell
        .args(["-ec", &commands])
        .env("PATH", format!("{folder}:{path}"))
        .env("DOORBELL_GPU", "host");
    let said = Running::spawn(shell, "the page's commands").succeed_within(WELL);
    assert!(said.contains("none wrong"), "{said}");
    assert!(said.contains("client 1: done"), "{said}");
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_veth_the_readmes_two_hosts() {
    // Side 0 is host A, side 1 host B; the commands are the README's.
    let net = Net::new([1500, 1500]);
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md"));
    let readme = readme.expect("the README");
    let line = |begins: &str| {
        let line = readme.lines().find(|l| l.starts_with(begins));
        let line = line.expect("a command for two hosts");
        line.split('#').next().unwrap_or(line).trim().to_owned()
    };
    let (server, client) = (
        line("doorbell serve"),
        line("doorbell perf put-bw --link roce --connect"),
    );
    let args = |command: &str| -> Vec<String> {
        let words = command.split_whitespace().skip(1);
        words.map(|w| w.replace("HOST_A", SERVER)).collect()
    };
    let (server, client) = (args(&server), args(&client));
    let texts = |args: &[String]| -> Vec<&'static str> {
        args.iter().map(|a| &*a.clone().leak()).collect()
    };
    let mut server = net.start(0, &texts(&server), &[]);
    // Nobody waits for the server to listen: the client tries until it does.
    let said = right(&mut net.start(1, &texts(&client), &[]));
    assert!(said.contains("negotiated: "), "{said}");
    server.wait_for("client 1: done");
    signal(server.pid(), "-INT");
    server.succeed_within(SLACK);
}
