//! Waits that hang say what is missing: on the host and in kernels, in one process and between two, and when the other was killed.
#![cfg(all(target_os = "linux", not(miri)))]

mod common;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Bench, LONG, caller_driven, device, meet};
use doorbell::cpu::{self, Post, deadline};
use doorbell::report::{WaitReport, missing, server};
use doorbell::{CpuQp, Device, Dims, Place, params};

const ROLE: &str = "DOORBELL_TEST_ROLE";
const SOCKET: &str = "DOORBELL_TEST_SOCKET";
/// Where the signal is.
const SIGNAL: usize = 17;

/// Adds 1 to word 17 of `to`; rung or not.
fn add(cpu: &mut CpuQp, to: doorbell::RemoteMr, ring: bool) -> doorbell::cpu::Ticket {
    let how = Post::by(deadline(LONG));
    let how = if ring { how } else { how.without_ringing() };
    let remote = cpu::remote(&to, 8 * SIGNAL as u64);
    cpu.queue()
        .expect("a queue")
        .signal_add(remote, 1, how)
        .expect("posted")
}

#[test]
fn a_wait_for_an_add_that_was_not_rung_names_it() {
    let b = Bench::new(caller_driven(), Place::Host, 4096);
    b.target.write(0, &[0; 4096]).expect("in range");
    let qp = b.qp();
    let mut cpu = CpuQp::new(&qp).expect("exported");
    for _ in 0..3 {
        add(&mut cpu, b.target.remote(), true);
    }
    assert_eq!(
        b.target.wait_at_least(8 * SIGNAL, 3, LONG).expect("rung"),
        3
    );
    add(&mut cpu, b.target.remote(), false);
    let short = Duration::from_millis(60);
    let error = b.target.wait_at_least(8 * SIGNAL, 4, short).unwrap_err();
    let text = error.to_string();
    let pid = std::process::id();
    for part in [
        format!("waits for signal {SIGNAL} "),
        ">= 4 and has 3, for ".to_owned(),
        format!(
            "the missing add is process {pid}, QP {:#08x}, WQE 3 (",
            qp.qpn()
        ),
        "not covered by any doorbell".to_owned(),
    ] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    // It has left the record.
    let own = server::own(true);
    let here = |d: &&doorbell::report::DeviceReport| d.id == b.device.provider().id();
    let own = own.devices.iter().find(here).expect("it").waits.len();
    assert_eq!(own, 0);
    // Rung after all.
    cpu.queue()
        .expect("a queue")
        .ring(deadline(LONG))
        .expect("rung");
    assert_eq!(
        b.target.wait_at_least(8 * SIGNAL, 4, LONG).expect("rung"),
        4
    );
}

fn waits_of(device: &Device) -> Vec<WaitReport> {
    let mut all = vec![server::own(true)];
    missing::name(&mut all);
    let id = device.provider().id();
    all.remove(0)
        .devices
        .into_iter()
        .find(|d| d.id == id)
        .expect("the device")
        .waits
}

#[test]
fn a_ticket_that_gives_up_is_noted_by_device_code() {
    let b = Bench::new(device(), Place::Host, 4096);
    let qp = b.qp();
    let mut cpu = CpuQp::new(&qp).expect("exported");
    let ticket = add(&mut cpu, b.target.remote(), false);
    let queue = cpu.queue().expect("a queue");
    queue
        .wait(ticket, deadline(Duration::from_millis(20)))
        .expect_err("it was not rung");
    let waits = waits_of(&b.device);
    assert_eq!(waits.len(), 1, "{waits:?}");
    assert!(waits[0].over && waits[0].kind == "ticket", "{waits:?}");
    let verdict = &waits[0].verdict;
    assert!(
        verdict.contains("waited for WQE 0 of QP")
            && verdict.contains("not covered by any doorbell"),
        "{verdict}"
    );
    // What is complete is not waited for.
    queue.ring(deadline(LONG)).expect("rung");
    queue.wait(ticket, deadline(LONG)).expect("complete");
    let qp = qp.reset(LONG).expect("reset");
    assert!(waits_of(&b.device).is_empty());
    drop(qp);
}

/// A kernel whose messages are never answered is seen while it waits.
#[test]
fn a_kernel_that_waits_for_a_word_is_seen_from_outside() {
    let b = Bench::new(device(), Place::Host, 4096);
    b.target.write(0, &[0; 4096]).expect("in range");
    let qp = b.qp();
    let export = qp.export().expect("exported");
    let end = params::End {
        qp: export.handle(),
        send: b.source.memory().device_addr(),
        send_addr: b.source.addr(),
        remote_addr: b.target.addr(),
        signal_addr: 0,
        // Its own messages go elsewhere than where it looks for answers.
        recv: b.target.memory().device_addr() + 1024,
        signal: 0,
        send_key: b.source.key(),
        remote_key: b.target.key(),
        signal_key: 0,
        reserved: 0,
        samples: 0,
        status: b.status.device_addr(),
    };
    let latency = params::Latency {
        ends: [end, end],
        first: 0,
        inline: 0,
        size: 8,
        iters: 1,
        deadline_ns: 3_000_000_000,
    };
    let mut launch = b.launch("put_lat", Dims::new(1, 1), &latency);
    let until = Instant::now() + LONG;
    let wait = loop {
        if let Some(wait) = waits_of(&b.device).into_iter().find(|w| w.kind == "word") {
            break wait;
        }
        assert!(Instant::now() < until, "it does not show");
    };
    assert_eq!(
        (wait.at, wait.wanted),
        (b.target.memory().device_addr() + 1024, 1)
    );
    assert!(
        wait.verdict.contains("signal 128") && wait.verdict.contains("no request for it"),
        "{}",
        wait.verdict
    );
    launch.abort();
    let _ = launch.wait(LONG);
}

/// Posts an add to the parent and never rings it.
#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process() {
    let b = Bench::new(device(), Place::Shared, 4096);
    let socket = std::env::var(SOCKET).expect("a socket");
    let peer = b.device.dial(&socket, LONG).expect("dialled");
    let qp = b.pd.qp().depth(64).build().expect("a queue pair");
    let (qp, theirs) = meet(qp, &peer, &[b.target.remote()]);
    let mut cpu = CpuQp::new(&qp).expect("exported");
    let ticket = add(&mut cpu, theirs.regions[0], true);
    cpu.queue().unwrap().wait(ticket, deadline(LONG)).unwrap();
    add(&mut cpu, theirs.regions[0], false);
    // Its engine has seen it, so that it is in the record.
    let until = Instant::now() + LONG;
    while b.device.report(Duration::ZERO).qps[0].posted != Some(2) {
        assert!(Instant::now() < until);
    }
    std::thread::sleep(Duration::from_millis(300));
    peer.barrier(LONG).expect("it is posted");
    if std::env::var(ROLE).as_deref() == Ok("die") {
        std::process::abort();
    }
    let _ = peer.barrier(LONG);
}

struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        for (_, path) in doorbell::report::records(self.0.id()) {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn missing_of_a_peer(role: &str, parts: &[&str]) {
    let b = Bench::new(device(), Place::Shared, 4096);
    b.target.write(0, &[0; 4096]).expect("in range");
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("s").to_str().expect("UTF-8").to_owned();
    let listener = b.device.listen(&socket).expect("listening");
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "peer_process", "--ignored", "--nocapture"])
        .env(ROLE, role)
        .env(SOCKET, &socket)
        .env("DOORBELL_RANK", "1")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a child");
    let mut child = Started(child);
    let peer = listener.accept(LONG).expect("the peer dials");
    let qp = b.pd.qp().depth(64).build().expect("a queue pair");
    let (_qp, theirs) = meet(qp, &peer, &[b.target.remote()]);
    let posted = peer.barrier(LONG);
    if role == "die" {
        // Its death may be seen before its last word.
        child.0.wait().expect("it dies");
    } else {
        posted.expect("it is posted");
    }
    let short = Duration::from_millis(60);
    let text = b
        .target
        .wait_at_least(8 * SIGNAL, 2, short)
        .unwrap_err()
        .to_string();
    let ended = if role == "die" {
        ", which has ended"
    } else {
        ""
    };
    let who = format!(
        "the missing add is rank 1 (process {}){ended}, QP {:#08x}, WQE 1 (",
        child.0.id(),
        theirs.qpn
    );
    assert!(text.contains(&who), "{who}: {text}");
    for part in parts {
        assert!(text.contains(part), "{part}: {text}");
    }
    if role != "die" {
        peer.barrier(LONG).expect("done");
    }
}

#[test]
fn the_missing_add_of_another_process_is_named() {
    missing_of_a_peer("hang", &["posted at ", "not covered by any doorbell"]);
}

#[test]
fn the_missing_add_of_a_process_that_died_is_named() {
    missing_of_a_peer("die", &["posted at ", "not covered by any doorbell"]);
}
