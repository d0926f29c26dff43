//! RoCE from the command line: a child process, a server and its client, a lossy network, foreign exchanges between two of ours.

mod common;
use common::{doorbell, finish, run, signal, start, succeed, texts};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

#[test]
fn every_test_over_packets_with_a_second_process() {
    for test in [
        "put-bw",
        "get-bw",
        "atomic-rate",
        "put-lat",
        "get-lat",
        "signal-lat",
    ] {
        let out = succeed(&[
            "perf",
            test,
            "--link",
            "roce",
            "--check",
            "--iters",
            "2000",
            "--no-baseline",
        ]);
        assert!(out.contains("none wrong"), "{test}\n{out}");
    }
}

#[test]
fn a_lossy_network_is_counted_in_the_result_file_and_captured() {
    let dir = tempfile::tempdir().expect("a folder");
    let (json, pcap) = (dir.path().join("r.json"), dir.path().join("p.pcapng"));
    let out = succeed(&[
        "perf",
        "put-bw",
        "--link",
        "roce",
        "--check",
        "--iters",
        "500",
        "--size",
        "3000",
        "--mtu",
        "256",
        "--net-fault",
        "loss=2%,dup=2%,seed=5",
        "--no-baseline",
        "--json",
        json.to_str().expect("text"),
        "--pcap",
        pcap.to_str().expect("text"),
    ]);
    assert!(out.contains("none wrong"), "{out}");
    assert!(
        out.contains("retransmitted_packets"),
        "one line says so: {out}"
    );
    let text = std::fs::read_to_string(json).expect("results");
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let roce = &value["results"][0]["roce"];
    assert!(
        roce["initiator"]["injected_loss"].as_u64() > Some(0),
        "{roce}"
    );
    assert!(
        roce["target"]["rx_write_requests"].as_u64() >= Some(500),
        "{roce}"
    );
    assert!(std::fs::metadata(pcap).expect("a capture").len() > 100_000);
}

/// A server on a free port, and the address that it printed.
fn server(more: &[&str]) -> (Child, BufReader<std::process::ChildStdout>, String) {
    let args: Vec<&str> = ["serve", "--listen", "127.0.0.1:0"]
        .into_iter()
        .chain(more.iter().copied())
        .collect();
    let mut child = doorbell(&args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starting a server");
    let mut out = BufReader::new(child.stdout.take().expect("its output"));
    let mut line = String::new();
    out.read_line(&mut line).expect("its first line");
    let at = line
        .split_whitespace()
        .find(|w| w.starts_with("127.0.0.1:"))
        .expect("an address")
        .trim_end_matches(';')
        .to_owned();
    (child, out, at)
}

fn rest(mut out: BufReader<std::process::ChildStdout>) -> String {
    let mut text = String::new();
    std::io::Read::read_to_string(&mut out, &mut text).expect("its output");
    text
}

#[test]
fn a_server_and_its_client_both_print_what_was_negotiated() {
    let (child, out, at) = server(&["--once"]);
    let args = [
        "perf",
        "put-bw",
        "--link",
        "roce",
        "--connect",
        &at,
        "--quick",
        "--no-baseline",
        "--mtu",
        "1024",
    ];
    let client = succeed(&args);
    assert!(client.contains("negotiated: RoCEv2 127.0.0.1:"), "{client}");
    assert!(client.contains("path MTU 1024"), "{client}");
    let output = finish(child, &args);
    let said = rest(out);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("path MTU 1024 (here 4096, there 1024)"),
        "{said}"
    );
    assert!(said.contains("client 1: done"), "{said}");
}

#[test]
fn a_server_takes_several_clients_refuses_other_jobs_and_ends_on_a_signal() {
    let (child, out, at) = server(&["--job", "red", "--clients", "2"]);
    let args = |job: &'static str| {
        [
            "perf",
            "put-bw",
            "--link",
            "roce",
            "--connect",
            &at,
            "--quick",
            "--no-baseline",
            "--job",
            job,
        ]
        .map(str::to_owned)
    };
    let (red, blue) = (args("red"), args("blue"));
    fn words(args: &[String]) -> Vec<&str> {
        args.iter().map(String::as_str).collect()
    }
    let both = [start(&words(&red)), start(&words(&red))];
    for client in both {
        let output = finish(client, &words(&red));
        assert_eq!(output.status.code(), Some(0), "{:?}", texts(&output));
    }
    let (_, err) = texts(&run(&words(&blue)));
    assert!(err.contains("\"red\"") && err.contains("\"blue\""), "{err}");
    // Somebody who is no client at all does not disturb it.
    let mut stranger = std::net::TcpStream::connect(&at).expect("connecting");
    std::io::Write::write_all(&mut stranger, b"GET / HTTP/1.0\r\n\r\n").expect("writing");
    drop(stranger);
    std::thread::sleep(std::time::Duration::from_millis(300));
    signal(child.id(), "-TERM");
    let output = finish(child, &["serve"]);
    assert_eq!(output.status.code(), Some(0));
    let said = rest(out);
    assert!(said.contains("client 2: done"), "{said}");
    assert!(said.contains("GET / HTTP"), "{said}");
    assert!(said.contains("a signal came"), "{said}");
}

#[test]
fn a_server_that_dies_ends_its_client_within_the_time_out() {
    let (mut child, _out, at) = server(&[]);
    let args = [
        "perf",
        "put-bw",
        "--link",
        "roce",
        "--connect",
        &at,
        "--secs",
        "600",
        "--timeout",
        "5",
    ];
    let client = start(&args);
    std::thread::sleep(std::time::Duration::from_millis(1200));
    child.kill().expect("killing");
    child.wait().expect("reaping");
    let output = finish(client, &args);
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{out}\n{err}");
    assert!(err.contains("doorbell: "), "{err}");
}

#[test]
fn nobody_to_connect_to_is_said_with_the_address() {
    let output = run(&[
        "perf",
        "put-bw",
        "--link",
        "roce",
        "--connect",
        "127.0.0.1:9",
        "--timeout",
        "0.5",
    ]);
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        err.contains("127.0.0.1:9") && err.contains("doorbell serve"),
        "{err}"
    );
}

#[test]
fn what_is_about_packets_needs_packets() {
    for (args, part) in [
        (&["perf", "put-bw", "--pcap", "/tmp/x"][..], "--link roce"),
        (&["perf", "put-bw", "--connect", "h"][..], "--link roce"),
        (&["perf", "put-bw", "--link", "roce:"][..], "udp://"),
        (&["perf", "put-bw", "--link", "ib"][..], "roce"),
        (
            &["perf", "put-lat", "--link", "roce", "--peer", "perftest"][..],
            "put-bw",
        ),
        (&["pingpong", "-m", "1000"][..], "1024"),
    ] {
        let output = run(args);
        let (_, err) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains(part), "{args:?}: {err}");
    }
}

/// Two of ours in the roles of a foreign program: addresses of their own, since both use UDP port 4791.
fn both(server: &[&str], client: &[&str]) -> (String, String) {
    let waiting = start(server);
    std::thread::sleep(std::time::Duration::from_millis(500));
    let client = run(client);
    let server = finish(waiting, server);
    for output in [&client, &server] {
        assert!(output.status.success(), "{:?}", texts(output));
    }
    (texts(&server).0, texts(&client).0)
}

#[test]
fn foreign_exchanges_in_both_roles() {
    for kind in [&[][..], &["--uc"][..]] {
        let port = [
            "pingpong", "-p", "18615", "-n", "200", "-s", "3000", "--roce",
        ];
        let server: Vec<&str> = port
            .iter()
            .chain(&["udp://127.0.0.1:4791"])
            .chain(kind)
            .copied()
            .collect();
        let client: Vec<&str> = port
            .iter()
            .chain(&["udp://127.0.0.2:4791", "127.0.0.1"])
            .chain(kind)
            .copied()
            .collect();
        let (a, b) = both(&server, &client);
        assert!(
            a.contains("200 iters") && b.contains("200 iters"),
            "{a}\n{b}"
        );
    }
    for test in ["put-bw", "send-bw"] {
        let perf = [
            "perf",
            test,
            "--peer",
            "perftest",
            "--iters",
            "300",
            "--size",
            "10000",
            "--no-baseline",
            "--link",
        ];
        let server: Vec<&str> = perf
            .iter()
            .chain(&["roce:udp://127.0.0.1:4791"])
            .copied()
            .collect();
        let client: Vec<&str> = perf
            .iter()
            .chain(&["roce:udp://127.0.0.2:4791", "--connect", "127.0.0.1"])
            .copied()
            .collect();
        let (a, b) = both(&server, &client);
        match test {
            "put-bw" => assert!(a.contains("reports 300 messages of 10000 bytes"), "{a}"),
            _ => assert!(a.contains("300 sends"), "{a}"),
        }
        assert!(b.contains("300 puts") || b.contains("300 sends"), "{b}");
    }
}
