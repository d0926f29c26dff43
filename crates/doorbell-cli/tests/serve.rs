//! `doorbell serve` and its clients: what both print, and what either does when the other stops, dies, or is told to end.

mod common;
use common::{Running, doorbell, run_words, words};
use std::io::{Seek, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Beyond a configured time-out, on however busy a machine.
const SLACK: Duration = Duration::from_secs(8);

fn client(at: &str, args: &str) -> Running {
    let args = format!("perf {args} --no-baseline --link roce --connect {at}");
    Running::start(&words(&args))
}

#[test]
fn a_server_and_its_client_both_print_what_was_negotiated() {
    let (mut server, at) = Running::serve("--once");
    let said = client(&at, "put-bw --quick --mtu 1024").succeed_within(common::PATIENCE);
    assert!(said.contains("negotiated: RoCEv2 127.0.0.1:"), "{said}");
    assert!(said.contains("path MTU 1024"), "{said}");
    let said = server.succeed_within(SLACK);
    assert!(
        said.contains("path MTU 1024 (here 4096, there 1024)"),
        "{said}"
    );
    assert!(said.contains("client 1: done"), "{said}");
}

#[test]
fn a_server_takes_several_clients_refuses_other_jobs_and_ends_on_a_signal() {
    let (mut server, at) = Running::serve("--job red --clients 2");
    for mut client in [(); 2].map(|()| client(&at, "put-bw --quick --job red")) {
        client.succeed_within(common::PATIENCE);
    }
    let (status, said) = client(&at, "put-bw --quick --job blue").end_within(common::PATIENCE);
    assert_eq!(status.code(), Some(1));
    assert!(
        said.contains("\"red\"") && said.contains("\"blue\""),
        "{said}"
    );
    // Somebody who is no client at all does not disturb it.
    let mut stranger = TcpStream::connect(&at).expect("connecting");
    stranger
        .write_all(b"GET / HTTP/1.0\r\n\r\n")
        .expect("writing");
    drop(stranger);
    server.wait_for("GET / HTTP");
    server.signal("-TERM");
    let said = server.succeed_within(SLACK);
    assert!(said.contains("client 2: done"), "{said}");
    assert!(said.contains("a signal came"), "{said}");
}

#[test]
fn who_says_nothing_takes_nobodys_place_and_who_is_too_many_is_told() {
    let (server, at) = Running::serve("--clients 1");
    let silent: Vec<_> = (0..40)
        .map(|_| TcpStream::connect(&at).expect("connecting"))
        .collect();
    let first = client(&at, "put-bw --secs 600");
    server.wait_for("client 1: negotiated");
    let (status, said) = client(&at, "put-bw --quick").end_within(common::PATIENCE);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("--clients"), "{said}");
    drop((silent, first));
    server.wait_for("client 1: it went without a word");
    client(&at, "put-bw --quick").succeed_within(common::PATIENCE);
}

#[test]
fn a_hundred_clients_at_once_are_served_or_refused() {
    let (server, at) = Running::serve("--clients 4 --timeout 60");
    let clients: Vec<_> = (0..100)
        .map(|_| client(&at, "put-bw --iters 100 --timeout 60"))
        .collect();
    let mut served = 0;
    for mut client in clients {
        let (status, said) = client.end_within(common::PATIENCE);
        match status.code() {
            Some(0) => served += 1,
            other => {
                assert_eq!(other, Some(1), "{said}");
                assert!(said.contains("clients already"), "{said}");
            }
        }
    }
    assert!(served >= 4, "{served}");
    client(&at, "put-bw --quick").succeed_within(common::PATIENCE);
    assert!(!server.said().contains("panicked"), "{}", server.said());
}

#[test]
fn a_server_that_dies_ends_its_client_within_the_time_out() {
    let (server, at) = Running::serve("");
    let mut client = client(&at, "put-bw --secs 600 --timeout 5");
    server.wait_for("negotiated");
    drop(server);
    let (status, said) = client.end_within(Duration::from_secs(5) + SLACK);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("peer process at 127.0.0.1"), "{said}");
}

#[test]
fn who_is_stopped_costs_the_other_its_time_out_and_is_named() {
    for test in ["put-bw", "put-lat", "get-bw", "send-bw"] {
        let args = format!("{test} --secs 600 --timeout 2");
        for stops in ["server", "client"] {
            let (mut server, at) = Running::serve("--timeout 2 --once");
            let mut client = client(&at, &args);
            server.wait_for("negotiated");
            std::thread::sleep(Duration::from_millis(300));
            let (stopped, survivor) = match stops {
                "server" => (&mut server, &mut client),
                _ => (&mut client, &mut server),
            };
            stopped.signal("-STOP");
            let began = Instant::now();
            let (status, said) = survivor.end_within(Duration::from_secs(2) + SLACK);
            println!("{test}, the {stops} stopped: {:?}\n{said}", began.elapsed());
            assert_eq!(status.code(), Some(1), "{said}");
            assert!(
                said.contains("127.0.0.1:") && said.contains("has been silent for"),
                "{test}, the {stops} stopped:\n{said}"
            );
            // Once it runs again it learns that it was given up, and why: the other side did not die.
            stopped.signal("-CONT");
            let (status, said) = stopped.end_within(Duration::from_secs(2) + SLACK);
            assert_eq!(status.code(), Some(1), "{said}");
            assert!(
                said.contains("has been silent for") && !said.contains("died"),
                "{test}, the {stops} went on:\n{said}"
            );
        }
    }
}

#[test]
fn who_stops_for_less_than_the_time_out_goes_on() {
    let (server, at) = Running::serve("--timeout 30");
    let mut client = client(&at, "put-bw --check --secs 4 --timeout 30");
    server.wait_for("negotiated");
    server.signal("-STOP");
    std::thread::sleep(Duration::from_millis(1500));
    server.signal("-CONT");
    client.signal("-STOP");
    std::thread::sleep(Duration::from_millis(1500));
    client.signal("-CONT");
    let said = client.succeed_within(common::PATIENCE);
    assert!(said.contains("none wrong"), "{said}");
}

#[test]
fn a_server_that_is_told_to_end_tells_its_client() {
    for test in ["put-bw", "put-lat", "send-lat"] {
        for once in ["--once", ""] {
            let (mut server, at) = Running::serve(&format!("--timeout 60 {once}"));
            let mut client = client(&at, &format!("{test} --secs 600 --timeout 60"));
            server.wait_for("negotiated");
            std::thread::sleep(Duration::from_millis(300));
            server.signal("-INT");
            let (status, said) = server.end_within(SLACK);
            // A server has done what it was told to; one client has not been served to its end.
            let expected = if once.is_empty() { 0 } else { 1 };
            assert_eq!(status.code(), Some(expected), "{said}");
            assert!(said.contains("a signal came"), "{said}");
            let (status, said) = client.end_within(SLACK);
            assert_eq!(status.code(), Some(1), "{said}");
            assert!(said.contains("told to end, by a signal"), "{test}: {said}");
        }
    }
}

#[test]
fn a_client_that_is_interrupted_leaves_a_server_that_serves() {
    let (server, at) = Running::serve("--timeout 60");
    for (n, signal) in ["-INT", "-KILL"].into_iter().enumerate() {
        let client = client(&at, "put-lat --secs 600 --timeout 60");
        server.wait_for(&format!("client {}: negotiated", n + 1));
        client.signal(signal);
        server.wait_for(&format!("client {}: it went without a word", n + 1));
    }
    client(&at, "put-bw --quick").succeed_within(common::PATIENCE);
}

#[test]
fn a_client_that_asks_for_more_memory_than_there_is_for_it_is_told() {
    let (server, at) = Running::serve("--memory 24M");
    let args = "put-bw --size 32M --iters 1";
    let (status, said) = client(&at, args).end_within(common::PATIENCE);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains("25,165,824 together") && said.contains("raise its --memory"),
        "{said}"
    );
    server.wait_for("client 1: the initiator gave up");
    client(&at, "put-bw --size 16M --iters 1").succeed_within(common::PATIENCE);
}

/// Filling gibibytes takes seconds, in which neither a signal nor the other side is kept waiting.
#[test]
fn a_large_window_keeps_nobody_waiting() {
    let (mut server, at) = Running::serve("--memory 2G --timeout 60");
    let large = "put-bw --size 512M --iters 1 --timeout 60";
    for end in ["client", "server"] {
        let mut client = client(&at, large);
        let number = if end == "client" { 1 } else { 2 };
        server.wait_for(&format!("client {number}: negotiated"));
        match end {
            "client" => {
                client.signal("-KILL");
                server.wait_for("client 1: it went without a word");
            }
            _ => {
                server.signal("-TERM");
                server.succeed_within(SLACK);
                let (_, said) = client.end_within(SLACK);
                assert!(said.contains("told to end, by a signal"), "{said}");
            }
        }
    }
}

#[test]
fn a_fixed_pair_of_udp_ports() {
    let (server, at) = Running::serve("--port udp://127.0.0.1:47911");
    let args = format!("perf put-bw --quick --link roce:udp://127.0.0.1:47912 --connect {at}");
    let output = run_words(&args);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("127.0.0.1:47912 <-> 127.0.0.1:47911"),
        "{said}"
    );
    drop(server);
}

/// Orders may be anybody's who can reach the port: numbers that do not fit are refused, in words, and the session goes on.
#[test]
fn orders_whose_numbers_do_not_fit_are_refused_one_by_one() {
    let side = |windows: u64, window: u64, canary: u64| {
        format!(
            r#"{{"Side":{{"layout":{{"windows":{windows},"window":{window},"canary":{canary}}},"on_gpu":false,"shared":false}}}}"#
        )
    };
    let end = |size: u64| format!(r#"{{"End":{{"size":{size},"on_gpu":false,"shared":false}}}}"#);
    let play = |size: u64| {
        format!(
            r#"{{"Play":{{"signal":false,"size":{size},"iters":1,"deadline_ns":1,"seed":1,"number":1,"check":true,"other":{{"addr":0,"key":0}}}}}}"#
        )
    };
    let most = u64::MAX;
    let orders = [
        (side(1, most, 4096), "at most 17179869184 bytes"),
        (side(1, 8, most), "at most 17179869184 bytes"),
        (side(most, 8, 56), "at most 17179869184 bytes"),
        // Both products wrap to a few bytes.
        (
            side(1 << 32, (1 << 32) - 64, 64),
            "at most 17179869184 bytes",
        ),
        (side(0, 8, 64), "at least one"),
        (side(1, 0, 64), "at least one"),
        (end(most), "from 8, a word"),
        (end(1 << 40), "from 8, a word"),
        (end(0), "from 8, a word"),
        (play(8), "no end to play"),
        (end(8), r#""Ok""#),
        (play(1 << 40), "1099511627776 bytes at an end for 8"),
        (play(65_536), "65536 bytes at an end for 8"),
        (play(0), "0 bytes at an end for 8"),
        (play(8), "no queue pair"),
        (r#"{"Goodbye":{"well":true}}"#.to_owned(), r#""Ok""#),
    ];
    let mut input = tempfile::tempfile().expect("a file for orders");
    for (order, _) in &orders {
        writeln!(input, "{order}").expect("an order");
    }
    input.rewind().expect("its start");
    let words = words("peer --gpu host --hca-cores 0 --roce udp://127.0.0.1 --timeout 20");
    let second = Running::reading(doorbell(&words), "the second process", input.into());
    let output = second.finish();
    assert!(output.status.success(), "{:?}", output.status);
    let said = String::from_utf8_lossy(&output.stdout);
    let answers: Vec<_> = said.lines().collect();
    assert_eq!(answers.len(), orders.len(), "{said}");
    for ((order, expected), answer) in orders.iter().zip(answers) {
        assert!(answer.contains(expected), "{order}: {answer}");
    }
}
