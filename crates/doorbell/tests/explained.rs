//! Every action of a fault script, and what three readers say of it: the program itself when its wait is over, another process while it runs
//! (and while it is stopped), and another process when it was killed. All of them name the same stage, and the rule that is to blame.
#![cfg(all(target_os = "linux", not(miri)))]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::{Bench, LONG};
use doorbell::cpu::{Post, deadline, local, remote};
use doorbell::device_api::layout::CqKind;
use doorbell::report::{Condition, ProcessReport, missing, server};
use doorbell::{Config, CpuQp, Device, GpuSelect, HcaCores, LinkKind, Place, Qp, RemoteMr};

/// What the child plays.
const SCENE: &str = "DOORBELL_TEST_SCENE";
const RULE: &str = "DOORBELL_TEST_RULE";
const SOCKET: &str = "DOORBELL_TEST_SOCKET";
/// The request that rules are for.
const LAST: u64 = 7;
/// How long a wait of the child lasts.
const SHORT: Duration = Duration::from_millis(400);

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

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

/// Plays a scene.
#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process() {
    let scene = var(SCENE);
    match scene.split(' ').next().expect("a word") {
        "shm" => play_shm(&scene),
        "mate" => play_mate(&scene),
        _ => play_alone(&scene),
    }
}

fn play_alone(scene: &str) {
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

fn play_shm(scene: &str) {
    let bench = Bench::new(device(scene, &var(RULE)), Place::Shared, 4096);
    let listener = bench.device.listen(&var(SOCKET)).expect("listening");
    let peer = listener.accept(LONG).expect("the mate dials");
    let qp = bench.pd.qp().depth(64).build().expect("a queue pair");
    let mine = qp.endpoint(LinkKind::Shm, &[]).expect("an endpoint");
    let theirs = peer
        .exchange_endpoints(&[mine], LONG)
        .expect("exchanged")
        .remove(0);
    let qp = qp
        .connect(&peer.destination(&theirs).expect("a way"))
        .expect("connected");
    peer.barrier(LONG).expect("both are connected");
    let ended = put_all(&qp, &bench, &theirs.regions[0], SHORT);
    stay(&bench.device, &ended);
}

/// Waits for what never comes: a word, or a message.
fn play_mate(scene: &str) {
    let bench = Bench::new(device("", ""), Place::Shared, 4096);
    bench.target.write(0, &[0; 4096]).expect("in range");
    let peer = bench.device.dial(&var(SOCKET), LONG).expect("dialled");
    let qp = bench.pd.qp().depth(64).receive_queue(16);
    let qp = qp.build().expect("a queue pair");
    let mine = qp
        .endpoint(LinkKind::Shm, &[bench.target.remote()])
        .expect("an endpoint");
    let theirs = peer
        .exchange_endpoints(&[mine], LONG)
        .expect("exchanged")
        .remove(0);
    let qp = qp
        .connect(&peer.destination(&theirs).expect("a way"))
        .expect("connected");
    peer.barrier(LONG).expect("both are connected");
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

/// A child, and what it said.
struct Player {
    child: Child,
    lines: Receiver<String>,
}

impl Player {
    fn start(scene: &str, rule: &str, socket: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "peer_process", "--ignored", "--nocapture"])
            .env(SCENE, scene)
            .env(RULE, rule)
            .env(SOCKET, socket)
            .env("DOORBELL_LOG", "off")
            .env(
                "DOORBELL_RECORD",
                if scene == "word" { "off" } else { "on" },
            )
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a child");
        let out = BufReader::new(child.stdout.take().expect("its output"));
        let (to, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = to.send(line);
            }
        });
        Self { child, lines }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it says of itself.
    fn says(&self) -> String {
        let until = Instant::now() + Duration::from_secs(60);
        let mut said = String::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            let line = line.unwrap_or_else(|e| panic!("it did not come to its end: {e}: {said}"));
            if line == "READY" {
                return said;
            }
            // The test harness says something before.
            if let Some((_, line)) = line.split_once("SAYS ") {
                said.push_str(line);
                said.push('\n');
            }
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it is there");
    }

    fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        let until = Instant::now() + LONG;
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()));
            stat.is_ok_and(|s| s.contains(") T "))
        };
        while !state() {
            assert!(Instant::now() < until, "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        self.kill();
        for (_, path) in doorbell::report::records(self.pid()) {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// What is known of a process from outside, and in words.
fn read(pid: u32) -> (ProcessReport, String) {
    let mut reports = server::find_with_others(pid).expect("there is a report");
    missing::name(&mut reports);
    let report = reports.remove(0);
    let mut said = vec![report.post_mortem.clone().unwrap_or_default()];
    for device in &report.devices {
        assert_eq!(device.damage, None, "a record that nobody damaged");
        said.extend(device.faults.iter().cloned());
        said.extend(device.waits.iter().map(|w| w.verdict.clone()));
        said.extend(device.qps.iter().map(|q| q.verdict.clone()));
    }
    (report, said.join("\n"))
}

fn stuck(report: &ProcessReport) -> bool {
    report.devices.iter().any(|d| d.qps.iter().any(|q| q.stuck))
}

/// A scene, a rule, and what each reader says.
struct Row {
    scene: &'static str,
    rule: &'static str,
    says: &'static [&'static str],
}

const fn row(scene: &'static str, rule: &'static str, says: &'static [&'static str]) -> Row {
    Row { scene, rule, says }
}

const ROWS: &[Row] = &[
    row(
        "per-slot",
        "wqe=7: drop-doorbell",
        &[
            "WQE 7 was rung and the engine saw no doorbell for it (record 8, doorbell 8): fault script rule 1 (wqe=7: drop-doorbell) dropped it",
            "for WQE 7 of QP",
        ],
    ),
    row(
        "collapsed",
        "wqe=7: delay-doorbell=100s",
        &[
            "WQE 7 was rung and the engine saw no doorbell for it (record 8, doorbell 8): fault script rule 1 (wqe=7: delay-doorbell=100s) keeps it back",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: withhold-cqe",
        &[
            "WQE 7 was executed, but no CQE was written for it (its entry holds 00 00 00 00 00 00 00 f1)",
            "fault script rule 1 (wqe=7: withhold-cqe) keeps it back",
        ],
    ),
    row(
        "collapsed",
        "wqe=7: withhold-cqe=100s",
        &[
            "WQE 7 was executed, but no CQE was written for it (the CQ shows WQE 6)",
            "fault script rule 1 (wqe=7: withhold-cqe=100s) keeps it back",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: corrupt-cqe=0xf0",
        &[
            "the CQE of WQE 7 is damaged",
            "its opcode byte says that it is not written yet",
            "fault script rule 1 (wqe=7: corrupt-cqe=0xf0) damaged it",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: corrupt-cqe=0xff",
        &[
            "the CQE of WQE 7 is damaged",
            "its opcode byte says that it is not written yet",
        ],
    ),
    row(
        "collapsed",
        "wqe=7: corrupt-cqe=0x80000000",
        &[
            "the CQE of WQE 7 is damaged",
            "index 32775 instead of 7",
            "damaged it",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: fail=REMOTE_ACCESS/BAD_RKEY",
        &[
            "WQE 7 (RdmaWrite) failed: REMOTE_ACCESS (0x13)",
            "fault script rule 1 (wqe=7: fail=REMOTE_ACCESS/BAD_RKEY) made it fail",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: stall-engine=100s",
        &[
            "WQE 7 was rung and is not complete (7 of 8 slots are): its engine core is stalled: fault script rule 1 (wqe=7: stall-engine=100s) stalls it",
        ],
    ),
    row(
        "caller per-slot",
        "wqe=7: stall-engine=100s",
        &[
            "WQE 7 was rung and is not complete (7 of 8 slots are): its engine core is stalled: fault script rule 1 (wqe=7: stall-engine=100s) stalls it",
        ],
    ),
    row(
        "per-slot",
        "wqe=7: kill-engine",
        &["its engine core died: panic: fault script rule 1 (wqe=7: kill-engine) killed it at QP"],
    ),
    row(
        "roce per-slot",
        "wqe=7: drop-link",
        &[
            "WQE 7 was rung and is not complete (7 of 8 slots are): fault script rule 1 (wqe=7: drop-link) loses every packet of its port",
        ],
    ),
    row(
        "roce soon per-slot",
        "wqe=7: drop-link",
        &[
            "failed: TRANSPORT_RETRY (0x15)",
            "fault script rule 1 (wqe=7: drop-link) loses every packet of its port",
        ],
    ),
    row(
        "receive",
        "recv=1: withhold-cqe",
        &[
            "receive 1 was filled, but no CQE was written for it",
            "fault script rule 1 (recv=1: withhold-cqe) keeps it back",
            "for receive 1 of QP",
        ],
    ),
    row(
        "unsent",
        "",
        &[
            "for receive 1 of QP",
            "no message has come for it, 1 have for those before: the missing message was not sent: process",
            ", has not posted it (its next is WQE 1)",
        ],
    ),
];

/// One row, by all readers.
fn explained(row: &Row) {
    let mut player = Player::start(row.scene, row.rule, "");
    let own = player.says();
    let mut all = vec![("itself", own)];
    let (report, said) = read(player.pid());
    assert_eq!(report.condition, Condition::Runs, "{}", row.rule);
    let hangs = row.scene != "unsent";
    assert_eq!(stuck(&report), hangs, "{}: {said}", row.rule);
    all.push(("live", said));
    player.stop();
    let (report, said) = read(player.pid());
    assert_eq!(report.condition, Condition::Stopped, "{}", row.rule);
    assert_eq!(stuck(&report), hangs, "{}: stopped: {said}", row.rule);
    all.push(("stopped", said));
    player.kill();
    let (report, said) = read(player.pid());
    assert_eq!(report.condition, Condition::Ended, "{}", row.rule);
    assert_eq!(stuck(&report), hangs, "{}: killed: {said}", row.rule);
    all.push(("killed", said));
    for (reader, said) in &all {
        for part in row.says {
            // What goes on is over when its process is.
            let part = match *reader == "killed" {
                true => &*part
                    .replace("is stalled", "was stalled")
                    .replace("stalls it", "stalled it")
                    .replace("keeps it", "kept it")
                    .replace("loses every", "lost every"),
                false => part,
            };
            assert!(
                said.contains(part),
                "{}, {}, {reader}: {part:?} is not in\n{said}\nall: {all:#?}",
                row.scene,
                row.rule
            );
        }
    }
}

#[test]
fn every_action_is_explained_by_the_program_by_others_and_by_its_record() {
    // A few at a time: most of their time they wait.
    for rows in ROWS.chunks(5) {
        std::thread::scope(|scope| {
            for row in rows {
                scope.spawn(move || explained(row));
            }
        });
    }
}

/// A player, and its mate.
fn two(dir: &std::path::Path, rule: &str, mate: &str) -> (Player, Player) {
    let socket = dir.join(format!("{}", rule.len()));
    let socket = socket.to_str().expect("UTF-8").to_owned();
    let player = Player::start("shm", rule, &socket);
    let until = Instant::now() + LONG;
    while !std::path::Path::new(&socket).exists() {
        assert!(Instant::now() < until, "nobody listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    (player, Player::start(mate, "", &socket))
}

/// A process that its own script killed, and one that another's killed: what their peers and their records say.
#[test]
fn a_death_is_explained_by_the_peer_and_by_the_record() {
    let dir = tempfile::tempdir().expect("a directory");
    let start = |rule: &str| two(dir.path(), rule, "mate");
    let rule = "wqe=7: kill-process";
    let (mut player, mate) = start(rule);
    let said = mate.says();
    let killed = format!("fault script rule 1 ({rule}) killed it");
    player.child.wait().expect("it is dead");
    for part in ["which has ended", "is connected to it"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let (report, said) = read(player.pid());
    assert!(
        report.condition == Condition::Ended && !stuck(&report),
        "{said}"
    );
    for part in ["post-mortem", &killed, "WQE 7 was rung and is not complete"] {
        assert!(said.contains(part), "{part}: {said}");
    }

    let rule = "wqe=7: kill-peer";
    let (mut player, mate) = start(rule);
    let own = player.says();
    let victim = format!(
        "fault script rule 1 ({rule}): process {} was killed",
        mate.pid()
    );
    let (_, live) = read(player.pid());
    // Its killer is alive, and says so.
    let (report, dead) = read(mate.pid());
    assert_eq!(report.condition, Condition::Ended, "{dead}");
    let by = format!(
        "fault script rule 1 ({rule}) of process {} killed it",
        player.pid()
    );
    assert!(dead.contains(&by), "{by}: {dead}");
    player.kill();
    let (_, record) = read(player.pid());
    for said in [own, live, record] {
        assert!(said.contains(&victim), "{victim}: {said}");
    }
}

/// Whatever moment a healthy process is stopped or killed at, nothing is called stuck, lost or missing.
#[test]
fn a_busy_process_that_is_stopped_or_killed_is_not_stuck() {
    for scene in ["busy", "busy", "busy"] {
        let mut player = Player::start(scene, "", "");
        player.says();
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(20));
            player.stop();
            let (report, said) = read(player.pid());
            assert_eq!(report.condition, Condition::Stopped);
            assert!(!stuck(&report) && !said.contains("lost"), "{said}");
            player.signal(rustix::process::Signal::CONT);
        }
        std::thread::sleep(Duration::from_millis(50));
        player.kill();
        let (report, said) = read(player.pid());
        assert_eq!(report.condition, Condition::Ended);
        assert!(!stuck(&report) && !said.contains("lost"), "{said}");
        let engine = report.devices[0].qps[0].engine.expect("its indexes");
        if let Some(poster) = report.devices[0].qps[0].poster {
            assert!(poster.rung >= engine.rung, "of two moments: {report:?}");
        }
    }
}

/// A message that its sender never made is named, and a peer that is stopped.
#[test]
fn what_another_process_did_not_do_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let (player, mate) = two(dir.path(), "", "mate receive");
    let own = mate.says();
    player.says();
    let who = format!("process {}", player.pid());
    let missing =
        "no message has come for it, 0 have for those before: the missing message was not sent: ";
    let next = ", has not posted it (its next is WQE 8)";
    let (_, live) = read(mate.pid());
    for said in [own, live] {
        assert!(said.contains(&format!("{missing}{who}, QP ")), "{said}");
        assert!(said.contains(next), "{said}");
    }
    player.stop();
    let (_, said) = read(mate.pid());
    let stopped = format!("{missing}{who}, which is stopped (state T), QP ");
    assert!(said.contains(&stopped), "{said}");

    let (player, mate) = two(dir.path(), " ", "mate long");
    mate.says();
    player.says();
    player.stop();
    let (_, said) = read(mate.pid());
    let stopped = format!(
        "; process {}, which is stopped (state T), is connected to it",
        player.pid()
    );
    assert!(said.contains(&stopped), "{said}");
}

/// Who waits inside of an engine that a script stalled runs it.
#[test]
fn a_waiter_inside_a_stalled_engine_is_not_missed() {
    let rule = "wqe=7: stall-engine=100s";
    let player = Player::start("caller per-slot long", rule, "");
    player.says();
    let (report, said) = read(player.pid());
    let why = format!("its engine core is stalled: fault script rule 1 ({rule}) stalls it");
    assert!(stuck(&report) && said.contains(&why), "{said}");
    assert!(!said.contains("nobody runs"), "{said}");
}

/// Without a recorder it is the recorder that is missed, not a region.
#[test]
fn a_recorder_that_is_off_is_named() {
    let player = Player::start("word", "", "");
    let said = player.says();
    assert!(
        said.contains("as far as can be told without a flight recorder (DOORBELL_RECORD=off)"),
        "{said}"
    );
    let (report, said) = read(player.pid());
    assert!(
        !report.devices[0].recorded && !said.contains("no region"),
        "{said}"
    );
}

/// A record whose bytes were changed says so, and a letter of it that a terminal would obey is none.
#[test]
fn a_damaged_record_is_called_damaged() {
    let mut player = Player::start("per-slot", "", "");
    player.says();
    player.kill();
    let (_, path) = doorbell::report::records(player.pid()).remove(0);
    let whole = std::fs::read(&path).expect("a record");
    // Behind what makes it a record at all, and before the room for queue pairs that it never had.
    let end = whole.iter().rposition(|b| *b != 0).expect("not empty");
    let (from, len) = (64 * 8, end + 1);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for count in [200, 200, 200, 20_000] {
        let mut bytes = whole.clone();
        for _ in 0..count {
            let at = from + next() as usize % (len - from);
            bytes[at] = next() as u8;
        }
        std::fs::write(&path, &bytes).expect("written");
        let mut reports = server::find_with_others(player.pid()).expect("it can be read");
        missing::name(&mut reports);
        let damage = reports[0].devices[0].damage.as_ref();
        assert!(damage.is_some(), "{count} bytes of {len}");
        let json = serde_json::to_value(&reports[0]).expect("JSON");
        assert!(!strange(&json), "{json}");
    }
    let mut bytes = whole;
    // The command line.
    bytes[32 * 8..][..5].copy_from_slice(b"\x1b[31m");
    std::fs::write(&path, &bytes).expect("written");
    let reports = server::find_with_others(player.pid()).expect("it can be read");
    let damage = reports[0].devices[0].damage.clone().unwrap_or_default();
    assert!(damage.contains("its command line is no text"), "{damage}");
    assert!(reports[0].command.starts_with("\u{fffd}[31m"));
}

/// Does a text hold what moves a cursor or changes a colour?
fn strange(value: &serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::String(text) => text.chars().any(|c| c.is_control() && c != '\n'),
        Value::Array(all) => all.iter().any(strange),
        Value::Object(all) => all.values().any(strange),
        _ => false,
    }
}
