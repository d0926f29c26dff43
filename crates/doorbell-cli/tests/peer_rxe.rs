//! Unmodified verbs programs in a Linux guest with soft-RoCE, against the command: `ibv_rc_pingpong`, `ibv_uc_pingpong`, and perftest's
//! `ib_write_bw`, each as client and as server.
//!
//! Needs QEMU and the guest: `peers/rxe/setup.sh target/rxe`, then
//! `DOORBELL_RXE=$PWD/target/rxe cargo test -p doorbell-cli --test peer_rxe -- --ignored`.

mod common;
#[path = "../../doorbell-roce/tests/peer_rxe/guest.rs"]
mod guest;

use std::net::TcpListener;

use common::{PATIENCE, Running};
use guest::{Guest, segment};

/// The packet port that is the other end of the guest's wire.
fn port(mine: u16, wire: u16) -> String {
    format!("dgram:127.0.0.1:{mine},127.0.0.1:{wire}?ip=192.168.77.1")
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .expect("a free port")
        .port()
}

/// Both ends of the segment, released for the command and for QEMU.
fn ends() -> (u16, u16) {
    let (socket, wire, mine) = segment();
    drop(socket);
    (mine, wire)
}

/// The guest's program calls; ours listens.
fn we_serve(guest_command: &str, args: &[&str], control: u16) {
    let (mine, wire) = ends();
    let spec = port(mine, wire);
    let args: Vec<String> = args
        .iter()
        .map(|a| {
            a.replace("PORT", &spec)
                .replace("CONTROL", &control.to_string())
        })
        .collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut ours = Running::start(&args);
    let command = guest_command.replace("CONTROL", &control.to_string());
    let mut guest = Guest::boot(&command, wire, mine, "");
    guest.expect("CMD-END");
    let said = guest.said().join("\n");
    assert!(said.contains("CMD-END rc=0"), "{command}: {said}");
    ours.succeed_within(PATIENCE);
}

/// The guest's program listens; ours calls.
fn we_call(guest_command: &str, args: &[&str], inside: u16) {
    let (mine, wire) = ends();
    let spec = port(mine, wire);
    let control = free_port();
    let mut guest = Guest::boot(guest_command, wire, mine, &format!("{control}:{inside}"));
    // QEMU accepts for a guest whose program does not listen yet, and resets then; the program takes a moment.
    std::thread::sleep(std::time::Duration::from_secs(2));
    let args: Vec<String> = args
        .iter()
        .map(|a| {
            a.replace("PORT", &spec)
                .replace("CONTROL", &control.to_string())
        })
        .collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Running::start(&args).succeed_within(PATIENCE);
    guest.expect("CMD-END");
    let said = guest.said().join("\n");
    assert!(said.contains("CMD-END rc=0"), "{guest_command}: {said}");
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_rc_pingpong_calls() {
    let args = ["pingpong", "-n", "200", "-p", "CONTROL", "--roce", "PORT"];
    we_serve(
        "ibv_rc_pingpong -d rxe0 -g 1 -n 200 -p CONTROL 10.0.2.2",
        &args,
        free_port(),
    );
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_rc_pingpong_listens() {
    let args = [
        "pingpong",
        "-n",
        "200",
        "-p",
        "CONTROL",
        "--roce",
        "PORT",
        "127.0.0.1",
    ];
    we_call("ibv_rc_pingpong -d rxe0 -g 1 -n 200", &args, 18515);
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_uc_pingpong_calls() {
    let args = [
        "pingpong", "--uc", "-n", "200", "-p", "CONTROL", "--roce", "PORT",
    ];
    we_serve(
        "ibv_uc_pingpong -d rxe0 -g 1 -n 200 -p CONTROL 10.0.2.2",
        &args,
        free_port(),
    );
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_uc_pingpong_listens() {
    let args = [
        "pingpong",
        "--uc",
        "-n",
        "200",
        "-p",
        "CONTROL",
        "--roce",
        "PORT",
        "127.0.0.1",
    ];
    we_call("ibv_uc_pingpong -d rxe0 -g 1 -n 200", &args, 18515);
}

/// Options of `perf TEST` that go with `-n 200 -s 4096` of perftest's program.
fn perftest(test: &str) -> [&str; 10] {
    [
        "perf",
        test,
        "--peer",
        "perftest",
        "--iters",
        "200",
        "--size",
        "4096",
        "--link",
        "roce:PORT",
    ]
}

/// The guest's program calls. The port of perftest's exchange is fixed on our side.
fn perftest_calls(program: &str, test: &str) {
    let command = format!("{program} -F -d rxe0 -x 1 -n 200 -s 4096 10.0.2.2");
    we_serve(&command, &perftest(test), 18515);
}

/// The guest's program listens.
fn perftest_listens(program: &str, test: &str) {
    let args = [&perftest(test)[..], &["--connect", "127.0.0.1:CONTROL"]].concat();
    we_call(
        &format!("{program} -F -d rxe0 -x 1 -n 200 -s 4096"),
        &args,
        18515,
    );
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_ib_write_bw_calls() {
    perftest_calls("ib_write_bw", "put-bw");
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_ib_write_bw_listens() {
    perftest_listens("ib_write_bw", "put-bw");
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_ib_send_bw_calls() {
    perftest_calls("ib_send_bw", "send-bw");
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_ib_send_bw_listens() {
    perftest_listens("ib_send_bw", "send-bw");
}
