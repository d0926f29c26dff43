//! What the other process plays: a program that posts, or waits, and meets a rule.

use std::time::{Duration, Instant};

use doorbell::cpu::{Post, deadline, local, remote};
use doorbell::device_api::layout::CqKind;
use doorbell::{Config, CpuQp, Device, GpuSelect, HcaCores, LinkKind, Place, Qp, RemoteMr};

use crate::common::{Bench, LONG, meet};
use crate::{RULE, SOCKET, var};

/// The request that rules are for.
const LAST: u64 = 7;
/// How long a wait of the child lasts.
const SHORT: Duration = Duration::from_millis(400);

/// The child's device: `words` are those of the scene.
fn device(words: &str, fault: &str) -> Device {
    let cores = match words.contains("caller") {
        true => HcaCores::Caller,
        false => HcaCores::Threads(1),
    };
    let config = Config {
        gpu: Some(GpuSelect::Host),
        hca_cores: Some(cores),
        roce: Some("udp://127.0.0.1".to_owned()),
        // A dead link: given up on in a moment, or not while anybody looks.
        roce_timeout: Some(if words.contains("soon") { 10 } else { 22 }),
        roce_retry: Some(if words.contains("soon") { 1 } else { 7 }),
        fault: Some(fault.to_owned()).filter(|f| !f.is_empty()),
        ..Config::default()
    };
    Device::builder().config(config).open().expect("a device")
}

fn say(line: &str) {
    println!("SAYS {line}");
}

/// Says how a wait ended, and what is missing; then stays until it is killed.
fn stay(device: &Device, ended: &str) -> ! {
    say(ended);
    for line in device.diagnosis() {
        say(&line);
    }
    // Its engine sees that nothing moves.
    std::thread::sleep(Duration::from_millis(300));
    println!("READY");
    std::thread::sleep(Duration::from_secs(120));
    std::process::exit(0);
}

/// Eight puts, each waited for.
fn put_all(qp: &Qp, bench: &Bench, to: &RemoteMr, patience: Duration) -> String {
    let mut cpu = CpuQp::new(qp).expect("exported");
    let queue = cpu.queue().expect("a queue");
    for n in 0..=LAST {
        let how = Post::by(deadline(patience));
        let ticket = match queue.put(remote(to, 0), local(&bench.source, 0, 8), how) {
            Ok(ticket) => ticket,
            Err(e) => return format!("put {n}: {e}"),
        };
        if let Err(e) = queue.wait(ticket, deadline(patience)) {
            return format!("put {n}: {e}");
        }
    }
    "all are complete".to_owned()
}

/// Two receives, and messages for the first so many of them.
fn receive_all(qp: &Qp, bench: &Bench, messages: u64) -> String {
    let mut cpu = CpuQp::new(qp).expect("exported");
    let (queue, recv) = cpu.queues().expect("both queues");
    let by = || deadline(SHORT);
    let tickets = [0, 1].map(|_| {
        recv.recv_post(local(&bench.target, 0, 64), by())
            .expect("posted")
    });
    for _ in 0..messages {
        let sent = queue
            .send(local(&bench.source, 0, 8), Post::by(by()))
            .expect("posted");
        if let Err(e) = queue.wait(sent, by()) {
            return format!("a send: {e}");
        }
    }
    for (n, ticket) in tickets.into_iter().enumerate() {
        if let Err(e) = recv.recv_wait(ticket, by()) {
            return format!("receive {n}: {e}");
        }
    }
    "all have come".to_owned()
}

pub(crate) fn play_alone(scene: &str) {
    let bench = Bench::new(device(scene, &var(RULE)), Place::Host, 4096);
    let cq = match scene.contains("collapsed") {
        true => CqKind::Collapsed,
        false => CqKind::PerSlot,
    };
    let build = |b: &Bench| {
        let qp = b.pd.qp().depth(64).cq(cq).receive_queue(16);
        qp.build().expect("a queue pair")
    };
    let own = bench.target.remote();
    if !scene.contains("roce") {
        let qp = build(&bench).connect_to_self().expect("connected");
        let ended = match scene {
            "receive" => receive_all(&qp, &bench, 2),
            "unsent" => receive_all(&qp, &bench, 1),
            "busy" => busy(&qp, &bench, &own),
            "word" => {
                let waited = bench.target.wait_at_least(0, u64::MAX, SHORT);
                waited.unwrap_err().to_string()
            }
            _ if scene.contains("long") => {
                ready_soon();
                put_all(&qp, &bench, &own, Duration::from_secs(120))
            }
            _ => put_all(&qp, &bench, &own, SHORT),
        };
        stay(&bench.device, &ended);
    }
    let far = Bench::new(device(scene, ""), Place::Host, 4096);
    let (a, b) = (build(&bench), build(&far));
    let at = |qp: &Qp<doorbell::Reset>, of: &Bench| {
        qp.endpoint(LinkKind::Roce, &[of.target.remote()])
            .expect("an endpoint")
    };
    let (at_a, at_b) = (at(&a, &bench), at(&b, &far));
    let there = at_b.regions[0];
    let to = |of: &Bench, end| of.device.destination(end).expect("a way");
    let a = a.connect(&to(&bench, &at_b)).expect("connected");
    let _b = b.connect(&to(&far, &at_a)).expect("connected");
    let ended = put_all(&a, &bench, &there, SHORT);
    stay(&bench.device, &ended);
}

/// Posts for ever.
fn busy(qp: &Qp, bench: &Bench, to: &RemoteMr) -> String {
    let mut cpu = CpuQp::new(qp).expect("exported");
    let queue = cpu.queue().expect("a queue");
    println!("READY");
    let until = Instant::now() + Duration::from_secs(120);
    while Instant::now() < until {
        for _ in 0..64 {
            let by = deadline(LONG);
            let put = queue
                .put(remote(to, 0), local(&bench.source, 0, 8), Post::by(by))
                .expect("posted");
            queue.wait(put, by).expect("complete");
        }
    }
    "it is over".to_owned()
}

/// It is looked at while it waits.
fn ready_soon() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(1));
        println!("READY");
    });
}

pub(crate) fn play_shm(scene: &str) {
    let bench = Bench::new(device(scene, &var(RULE)), Place::Shared, 4096);
    let listener = bench.device.listen(&var(SOCKET)).expect("listening");
    let peer = listener.accept(LONG).expect("the mate dials");
    let qp = bench.pd.qp().depth(64).build().expect("a queue pair");
    let (qp, theirs) = meet(qp, &peer, &[]);
    let ended = put_all(&qp, &bench, &theirs.regions[0], SHORT);
    stay(&bench.device, &ended);
}

/// Waits for what never comes: a word, or a message.
pub(crate) fn play_mate(scene: &str) {
    let bench = Bench::new(device("", ""), Place::Shared, 4096);
    bench.target.write(0, &[0; 4096]).expect("in range");
    let peer = bench.device.dial(&var(SOCKET), LONG).expect("dialled");
    let qp = bench.pd.qp().depth(64).receive_queue(16);
    let qp = qp.build().expect("a queue pair");
    let (qp, _) = meet(qp, &peer, &[bench.target.remote()]);
    let patience = match scene.contains("long") {
        true => Duration::from_secs(120),
        false => SHORT * 2,
    };
    if scene.contains("long") {
        ready_soon();
    }
    if !scene.contains("receive") {
        // Far from where the puts go.
        let waited = bench.target.wait_at_least(2048, 1, patience);
        stay(&bench.device, &waited.unwrap_err().to_string());
    }
    let mut cpu = CpuQp::new(&qp).expect("exported");
    let (_, recv) = cpu.queues().expect("both queues");
    let memory = local(&bench.source, 0, 64);
    let ticket = recv.recv_post(memory, deadline(LONG)).expect("posted");
    let waited = recv.recv_wait(ticket, deadline(patience));
    stay(&bench.device, &waited.unwrap_err().to_string());
}
