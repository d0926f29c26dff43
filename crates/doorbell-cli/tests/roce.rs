//! RoCE from the command line: a child process, a lossy network, foreign exchanges between two of ours.

mod common;
use common::{Running, run_words, succeed, texts, words};

#[test]
fn every_test_over_packets_with_a_second_process() {
    for test in [
        "put-bw",
        "get-bw",
        "atomic-rate",
        "put-lat",
        "get-lat",
        "signal-lat",
        "send-lat",
        "send-bw",
    ] {
        let args = format!("perf {test} --link roce --check --iters 2000 --no-baseline");
        let out = succeed(&words(&args));
        assert!(out.contains("none wrong"), "{test}\n{out}");
    }
}

#[test]
fn the_second_process_takes_an_address_of_the_same_kind() {
    for port in ["udp://[::1]", "udp://127.0.0.2"] {
        let args = format!("perf put-bw --link roce:{port} --check --iters 200 --no-baseline");
        let out = succeed(&words(&args));
        assert!(out.contains("none wrong"), "{port}\n{out}");
    }
}

#[test]
fn a_lossy_network_is_counted_in_the_result_file_and_captured() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name| dir.path().join(name).to_str().expect("text").to_owned();
    let (json, pcap) = (path("r.json"), path("p.pcapng"));
    let args = "perf put-bw --link roce --check --iters 500 --size 3000 --mtu 256 --no-baseline";
    let mut args = words(args);
    args.extend(["--net-fault", "loss=2%,dup=2%,seed=5"]);
    args.extend(["--json", &json, "--pcap", &pcap]);
    let out = succeed(&args);
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

/// Where files may not grow any more, or the disk is full, the transfer goes on; the capture ends with a whole packet, and it is said, by the status
/// too.
#[test]
fn a_capture_that_finds_no_room_ends_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let pcap = dir.path().join("p.pcapng");
    let perf = "perf put-bw --link roce --gpu host --check --iters 200000 --no-baseline --pcap";
    // 20 MiB as dash counts, 40 as bash does; the capture would have 60.
    let output = std::process::Command::new("sh")
        .args([
            "-c",
            "ulimit -f 40960; exec \"$0\" \"$@\"",
            env!("CARGO_BIN_EXE_doorbell"),
        ])
        .args(words(perf))
        .arg(&pcap)
        .output()
        .expect("sh");
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{out}{err}");
    assert!(out.contains("none wrong"), "{out}{err}");
    assert!(out.contains("capture_lost"), "{out}{err}");
    assert!(
        err.contains("has ended")
            && err.contains("too large")
            && err.contains("are missing at its end"),
        "{err}"
    );
    let file = std::fs::read(pcap).expect("a capture");
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("four")) as usize;
    let mut at = 0;
    while at < file.len() {
        let len = word(at + 4);
        assert_eq!(word(at + len - 4), len, "a block at {at} is whole");
        at += len;
    }
    assert!(at > 15 << 20, "{at}");
}

#[test]
fn a_time_out_is_about_nothing_happening() {
    // Each launch takes longer than the time-out, and so does the large message; something happens all the time.
    for args in [
        "perf put-lat --link roce --secs 2 --timeout 1 --no-baseline",
        "perf send-lat --link roce --secs 2 --timeout 1 --no-baseline",
        "perf get-lat --link roce --iters 2000 --timeout 1 --no-baseline --net-fault delay=500us",
        "perf put-lat --link loopback --secs 2 --timeout 1 --no-baseline",
        "perf put-bw --link roce --size 8M --iters 1 --timeout 1 --mtu 256 --no-baseline --net-fault delay=5ms",
    ] {
        succeed(&words(args));
    }
}

/// Messages that take a hundred times what they usually take: fewer of them, and not a hundred times the run's time. Engines are driven by who waits:
/// the initiator runs its own also while the second process ends, whose last message it has to acknowledge.
#[test]
fn a_slow_network_makes_a_quick_run_smaller() {
    for test in ["put-lat", "send-lat"] {
        let args = format!(
            "perf {test} --link roce --gpu host --hca-cores 0 --quick --no-baseline --net-fault delay=3ms --json -"
        );
        let out = succeed(&words(&args));
        let value: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        let (messages, errors) = (
            &value["results"][0]["messages"],
            &value["results"][0]["errors"],
        );
        // A quick run has 10,000 and more otherwise; a slower machine has fewer yet.
        let few = messages.as_u64().is_some_and(|n| (48..6000).contains(&n));
        assert!(few && errors.as_u64() == Some(0), "{test}: {value}");
    }
}

#[test]
fn nobody_to_connect_to_is_said_with_the_address() {
    let output = run_words("perf put-bw --link roce --connect 127.0.0.1:9 --timeout 0.5");
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        err.contains("127.0.0.1:9 within 500 ms") && err.contains("doorbell serve"),
        "{err}"
    );
}

#[test]
fn what_is_about_packets_needs_packets() {
    for (args, part) in [
        ("perf put-bw --pcap /tmp/x", "--link roce"),
        ("perf put-bw --connect h", "--link roce"),
        ("perf put-bw --link ib", "roce"),
        ("perf put-lat --link roce --peer perftest", "put-bw"),
    ] {
        let output = run_words(args);
        let (_, err) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{args}: {err}");
        assert!(err.contains(part), "{args}: {err}");
    }
}

/// UDP port 4791 of this host: shared by those who say so, or somebody's own, not both at a time.
static PORT: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Two of ours in the roles of a foreign program.
fn both(server: &str, client: &str, ready: &str) -> [(Option<i32>, String); 2] {
    let _one_at_a_time = PORT.lock().unwrap_or_else(|e| e.into_inner());
    let mut server = Running::start(&words(server));
    server.wait_for(ready);
    let mut client = Running::start(&words(client));
    [
        client.end_within(common::PATIENCE),
        server.end_within(common::PATIENCE),
    ]
    .map(|(status, said)| (status.code(), said))
}

fn both_well(server: &str, client: &str) -> [String; 2] {
    both(server, client, "waiting on TCP port").map(|(status, said)| {
        assert_eq!(status, Some(0), "{server} and {client}:\n{said}");
        said
    })
}

#[test]
fn pingpong_in_both_roles() {
    // On one host they share UDP port 4791; or they have addresses of their own.
    for (server, client) in [
        ("", ""),
        ("--uc", "--uc"),
        ("--roce udp://127.0.0.1:4791", "--roce udp://127.0.0.2:4791"),
    ] {
        let fixed = "pingpong -p 18615 -n 200 -s 3000";
        let said = both_well(
            &format!("{fixed} {server}"),
            &format!("{fixed} {client} 127.0.0.1"),
        );
        for said in said {
            assert!(said.contains("200 iters"), "{said}");
        }
    }
}

#[test]
fn pingpongs_of_different_sizes_say_what_to_do() {
    for (server, client) in [(64, 4096), (4096, 64)] {
        let ends = both(
            &format!("pingpong -p 18616 -n 5 --timeout 3 -s {server}"),
            &format!("pingpong -p 18616 -n 5 --timeout 3 -s {client} 127.0.0.1"),
            "waiting on TCP port",
        );
        for (status, said) in &ends {
            assert_eq!(*status, Some(1), "{said}");
        }
        assert!(
            ends.iter().any(|(_, said)| said.contains("same -s")),
            "{ends:?}"
        );
    }
}

#[test]
fn perftest_in_both_roles() {
    for test in ["put-bw", "send-bw"] {
        let fixed = format!(
            "perf {test} --peer perftest --iters 300 --size 10000 --no-baseline --link roce"
        );
        let [client, server] = both_well(&fixed, &format!("{fixed} --connect 127.0.0.1"));
        match test {
            "put-bw" => assert!(
                server.contains("reports 300 messages of 10000 bytes"),
                "{server}"
            ),
            _ => assert!(server.contains("300 sends"), "{server}"),
        }
        assert!(
            client.contains("300 puts") || client.contains("300 sends"),
            "{client}"
        );
    }
}

#[test]
#[ignore = "needs PEER tshark"]
fn peer_tshark_dissects_what_runs_sent_and_received() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("run.pcapng");
    let name = file.to_str().expect("text");
    for (args, opcodes) in [
        // Opcodes of InfiniBand's RC: first, middle, last and only WRITE; acknowledgement; SEND; READ; atomics.
        ("put-bw --size 3000 --mtu 256", &["6", "7", "8", "17"][..]),
        ("put-bw --size 8", &["10", "17"]),
        ("send-lat --size 64", &["5", "17"]),
        ("get-bw --size 3000 --mtu 1024", &["12", "13", "14", "15"]),
        ("atomic-rate", &["20", "18"]),
        ("signal-lat", &["10", "20", "18"]),
        (
            "put-bw --size 3000 --mtu 1024 --net-fault loss=2%,dup=2%,reorder=2%,seed=3",
            &["6", "8", "17"],
        ),
    ] {
        let run = format!(
            "perf {args} --iters 200 --no-baseline --link roce:udp://127.0.0.1:47913 --pcap"
        );
        succeed(&[&words(&run)[..], &[name]].concat());
        let output = std::process::Command::new("tshark")
            .args(["-r", name, "-d", "udp.port==47913,infiniband"])
            .args([
                "-o",
                "ip.check_checksum:TRUE",
                "-o",
                "udp.check_checksum:TRUE",
            ])
            .args([
                "-T",
                "fields",
                "-e",
                "infiniband.bth.opcode",
                "-e",
                "_ws.malformed",
            ])
            .args(["-e", "_ws.expert.message", "-e", "frame.protocols"])
            .output()
            .expect("tshark");
        let (out, err) = texts(&output);
        assert!(output.status.success(), "{err}");
        let mut seen = std::collections::BTreeSet::new();
        for line in out.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            assert!(!fields[0].is_empty(), "{args}: no InfiniBand: {line}");
            // Payloads are random, and a few begin like another protocol's, which Wireshark then tries.
            let guessed = fields[3].contains("infiniband:ethertype");
            assert!(fields[1].is_empty() || guessed, "{args}: {line}");
            assert!(!line.to_lowercase().contains("checksum"), "{args}: {line}");
            seen.insert(fields[0].to_owned());
        }
        for opcode in opcodes {
            assert!(seen.contains(*opcode), "{args}: no {opcode} in {seen:?}");
        }
    }
}
