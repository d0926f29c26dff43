//! Ranks of two hosts, which are network namespaces with a cable between them: they meet over TCP, and their links are shared memory within a host
//! and RoCE between the two, as nobody says otherwise.
//!
//! For root, with iproute2:
//!
//!     cargo test -p doorbell-nccl --test peer_hosts -- --ignored peer_hosts_
#![cfg(not(miri))]

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::jobs::{Part, Started, start_by};
use common::scenes::{all_to_all, one_round, refused, whole};
use common::{Gather, LONG, Pages, Rank, config, log_lines, on_the_host, soon};

/// Two namespaces, side 0 and side 1, which end with this.
struct Net([String; 2]);

fn ip(args: &str) {
    let output = Command::new("ip").args(args.split(' ')).output();
    let output = output.expect("ip(8), of iproute2");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {args}, as root: {said}");
}

fn address(side: usize) -> String {
    format!("10.78.0.{}", side + 1)
}

impl Net {
    fn new(name: &str) -> Self {
        let net = Self([0, 1].map(|side| format!("nccl-{}-{name}-{side}", std::process::id())));
        let [a, b] = &net.0;
        ip(&format!("netns add {a}"));
        ip(&format!("netns add {b}"));
        ip(&format!(
            "-n {a} link add v type veth peer name v netns {b}"
        ));
        for (side, space) in net.0.iter().enumerate() {
            ip(&format!("-n {space} addr add {}/24 dev v", address(side)));
            ip(&format!("-n {space} link set lo up"));
            ip(&format!("-n {space} link set v up"));
        }
        net
    }

    /// Four ranks, a process each: the first two on side 0.
    fn start(&self, scene: &str, variables: &[(&str, &str)]) -> (Vec<Started>, tempfile::TempDir) {
        start_by(scene, 4, 1, variables, |rank| {
            let side = rank / 2;
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.0[side]]);
            command.arg(std::env::current_exe().expect("this program"));
            command.env("DOORBELL_NCCL_ADDR", address(side));
            command
        })
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for space in &self.0 {
            // The cable goes with them.
            let _ = Command::new("ip").args(["netns", "del", space]).output();
        }
    }
}

#[test]
#[ignore = "the other tests of this file run it in processes of its own"]
fn peer_process() {
    on_the_host();
    Part::read().play(|rank, gather, scene| match scene {
        "all to all" => {
            whole(rank, gather, |r| {
                all_to_all(r, Pages::shared, 50_000);
                let text = log_lines().join("\n");
                assert!(text.contains("1 by shared memory, 2 by RoCE"), "{text}");
            });
        }
        "dies" => lost(rank, gather, true, &["rank 3"]),
        "cable" => lost(rank, gather, false, &["not been heard of", "gave up"]),
        "refused" => refused(rank, gather, &["set DOORBELL_NCCL_ADDR"]),
        other => panic!("no scene is called {other}"),
    });
}

/// The last rank aborts, or the cable is pulled, when all have signalled all: whoever is left hears of it, in some of these words.
fn lost(rank: usize, gather: &Arc<Gather>, dies: bool, words: &[&str]) {
    let one = Rank::connect(rank, gather);
    let pages = Pages::shared(4096);
    let (_window, win) = one.register(&pages, 0);
    let context = one.create(config(1, 0, 1, 0));
    one_round(&one, context.gin(0), win);
    gather.barrier(rank);
    if dies && rank + 1 == one.ranks {
        std::process::abort();
    }
    std::fs::write(gather.folder().join(format!("ready-{rank}")), b"").expect("written");
    // The test needs a moment to pull the cable; then two seconds of silence are one too many.
    assert!(
        soon(Duration::from_secs(10), || context.has_error()),
        "{:?}",
        log_lines()
    );
    let text = log_lines().join("\n");
    assert!(words.iter().any(|w| text.contains(w)), "{text}");
    // Nobody leaves while others look.
    std::fs::write(gather.folder().join(format!("told-{rank}")), b"").expect("written");
    for other in 0..one.ranks - usize::from(dies) {
        let told = gather.folder().join(format!("told-{other}"));
        assert!(soon(LONG, || told.exists()), "rank {other} was not told");
    }
    context.destroy();
    one.close();
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_hosts_choose_their_links_and_everything_arrives() {
    let net = Net::new("a");
    let (mut children, _folder) = net.start("all to all", &[]);
    for (rank, child) in children.iter_mut().enumerate() {
        assert_eq!(child.ends(), Some(0), "rank {rank}");
    }
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_hosts_refuse_an_address_that_reaches_nobody_else() {
    let net = Net::new("r");
    for variable in [
        ("DOORBELL_NCCL_ADDR", "127.0.0.1"),
        ("DOORBELL_ROCE", "udp://127.0.0.1"),
    ] {
        let (mut children, _folder) = net.start("refused", &[variable]);
        for (rank, child) in children.iter_mut().enumerate() {
            assert_eq!(child.ends(), Some(0), "rank {rank}, {variable:?}");
        }
    }
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_hosts_hear_of_a_rank_that_died_on_one_of_them() {
    let net = Net::new("d");
    let (mut children, _folder) = net.start("dies", &[]);
    assert_eq!(children[3].ends(), None, "it aborted");
    for (rank, child) in children.iter_mut().take(3).enumerate() {
        assert_eq!(child.ends(), Some(0), "rank {rank}");
    }
}

#[test]
#[ignore = "needs PEER namespaces: root and iproute2"]
fn peer_hosts_hear_that_the_cable_between_them_is_out() {
    let net = Net::new("c");
    let (mut children, folder) = net.start("cable", &[("DOORBELL_NCCL_ALIVE", "2")]);
    for rank in 0..4 {
        let ready = folder.path().join(format!("ready-{rank}"));
        assert!(soon(LONG, || ready.exists()), "rank {rank} is not ready");
    }
    ip(&format!("-n {} link set v down", net.0[0]));
    for (rank, child) in children.iter_mut().enumerate() {
        assert_eq!(child.ends(), Some(0), "rank {rank}");
    }
}
