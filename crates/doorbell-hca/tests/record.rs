//! The flight recorder: what it says of a queue pair that runs, that stands, that failed, and of a process that was killed.
#![cfg(all(target_os = "linux", not(miri)))]

mod common;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Options, PATIENCE, Rig};
use doorbell_hca::record::dir::{self, Life};
use doorbell_hca::record::{
    BadRecord, Event, Kind, Park, QpRecord, Record, Recording, Target, WaitKind,
};
use doorbell_hca::{Cores, HcaConfig, QpState};
use doorbell_wire::{Chunk, Ctrl, Wqe};

const LOG: u32 = Recording::LOG_EVENTS;

fn of(record: &Record, qp: &common::MockQp) -> QpRecord {
    let qpn = qp.hca_qp().qpn().get();
    let found = record.qps.iter().find(|q| q.qpn == qpn);
    found.expect("it is in the record").clone()
}

/// Kinds and ranges, without states.
fn ranges(qp: &QpRecord) -> Vec<(Kind, u64, u32)> {
    qp.events
        .iter()
        .filter(|e| e.kind != Kind::State)
        .map(|e| (e.kind, e.from, e.slots))
        .collect()
}

fn file_rig(id: u64) -> (Rig, PathBuf) {
    let rig = Rig::with(HcaConfig {
        record: Recording::File {
            log_events: LOG,
            id,
        },
        ..HcaConfig::caller_driven()
    });
    let path = dir::files(Some(std::process::id()))
        .into_iter()
        .map(|(_, path)| path)
        .find(|p| p.to_string_lossy().ends_with(&format!(".{id:016x}")));
    (rig, path.expect("its file"))
}

#[test]
fn a_put_is_rung_executed_and_complete() {
    let rig = Rig::new();
    let dst = rig.region(64);
    let mut qp = rig.loopback(Options::default());
    let before = doorbell_hca::record::now_ns();
    for n in 0..5u64 {
        qp.run(
            &rig,
            Wqe::write_inline(dst.remote(0), &n.to_le_bytes()).expect("inline"),
        );
    }
    let record = rig.hca.record().expect("it is on");
    let after = doorbell_hca::record::now_ns();
    let seen = of(&record, &qp);
    assert_eq!((seen.rung, seen.executed, seen.completed), (5, 5, 5));
    assert_eq!(
        (seen.state, seen.target),
        (QpState::Ready, (Target::Loopback, seen.qpn))
    );
    // Whatever events they were joined to, each slot was rung once and completed once.
    for (kinds, what) in [
        ([Kind::Rung, Kind::Done], "rung"),
        ([Kind::Executed, Kind::Done], "complete"),
    ] {
        let covered: u32 = seen
            .events
            .iter()
            .filter(|e| kinds.contains(&e.kind))
            .map(|e| e.slots)
            .sum();
        assert_eq!(covered, 5, "{what}: {:?}", seen.events);
    }
    let bytes: u32 = seen
        .events
        .iter()
        .filter(|e| matches!(e.kind, Kind::Executed | Kind::Done))
        .map(|e| e.value)
        .sum();
    assert_eq!(bytes, 40);
    for event in &seen.events {
        let slack = 1_000_000;
        assert!(
            (before.saturating_sub(100 * slack)..after + slack).contains(&event.at_ns),
            "{event:?} is not between {before} and {after}"
        );
    }
    let region = record.regions.iter().find(|r| r.key == dst.key().0);
    let region = region.expect("its region");
    assert_eq!((region.len, region.base), (64, 0));
    drop(dst);
    let gone = rig.hca.record().expect("it is on");
    assert!(gone.regions.iter().all(|r| r.key != region.key));
}

#[test]
fn what_is_written_and_not_rung_is_seen_and_copied() {
    let rig = Rig::new();
    let dst = rig.region(64);
    let mut qp = rig.loopback(Options::default());
    let put = Wqe::write_inline(dst.remote(8), &7u64.to_le_bytes()).expect("inline");
    qp.run(&rig, put);
    for _ in 0..3 {
        qp.post(&put.signalled(true));
    }
    assert!(rig.until(|| of(&rig.hca.record().expect("on"), &qp).posted == 4));
    let seen = of(&rig.hca.record().expect("on"), &qp);
    assert_eq!((seen.rung, seen.completed), (1, 1));
    assert_eq!(ranges(&seen).last(), Some(&(Kind::Posted, 1, 3)));
    assert!(rig.until(|| {
        of(&rig.hca.record().expect("on"), &qp)
            .still
            .is_some_and(|s| s.slots.len() == 3)
    }));
    let still = of(&rig.hca.record().expect("on"), &qp)
        .still
        .expect("taken");
    assert_eq!((still.first, still.parked), (1, Park::None));
    for (i, slot) in still.slots.iter().enumerate() {
        let ctrl = Ctrl::parse(Chunk([slot[0], slot[1]]));
        assert!(ctrl.matches(1 + i as u16, qp.hca_qp().qpn()));
    }
    // Once it is rung, it is done, and nothing stands there any more.
    qp.ring();
    qp.wait(&rig, 3);
    assert!(rig.until(|| {
        of(&rig.hca.record().expect("on"), &qp)
            .still
            .is_some_and(|s| s.slots.is_empty())
    }));
    assert_eq!(of(&rig.hca.record().expect("on"), &qp).completed, 4);
}

#[test]
fn a_wait_that_is_not_satisfied_and_a_failure_are_named() {
    let rig = Rig::new();
    let main = rig.loopback(Options::default());
    let mut qp = rig.loopback(Options::default());
    qp.post(&Wqe::wait(1000, main.hca_qp().cqn()).signalled(true));
    qp.ring();
    assert!(rig.until(|| {
        of(&rig.hca.record().expect("on"), &qp)
            .still
            .is_some_and(|s| s.parked == Park::Wait)
    }));
    let seen = of(&rig.hca.record().expect("on"), &qp);
    assert_eq!(ranges(&seen), [(Kind::Rung, 0, 1), (Kind::Parked, 0, 1)]);
    let dst = rig.region(64);
    let mut other = rig.loopback(Options::default());
    let mut far = dst.remote(0);
    far.key.0 ^= 1 << 31;
    let put = Wqe::write_inline(far, &[0; 8]).expect("inline");
    for _ in 0..3 {
        other.post(&put);
    }
    other.ring();
    assert!(rig.until(|| other.state() == QpState::Error));
    let seen = of(&rig.hca.record().expect("on"), &other);
    assert_eq!(seen.error.syndrome(), 0x13, "{seen:?}");
    assert_eq!(
        ranges(&seen),
        [
            (Kind::Rung, 0, 3),
            (Kind::Error, 0, 1),
            (Kind::Flushed, 1, 2)
        ]
    );
    assert_eq!(seen.state, QpState::Error);
}

#[test]
fn off_is_off() {
    let rig = Rig::with(HcaConfig {
        record: Recording::Off,
        ..HcaConfig::caller_driven()
    });
    let mut qp = rig.loopback(Options::default());
    qp.run(&rig, Wqe::nop());
    assert!(rig.hca.record().is_none());
    assert!(rig.hca.waiting(WaitKind::Word, 1, 2, 3).is_none());
}

#[test]
fn waits_enter_and_leave() {
    let rig = Rig::new();
    let mut wait = rig
        .hca
        .waiting(WaitKind::Word, 0x1000, 4096, 4094)
        .expect("a place");
    wait.saw(4095);
    let waits = rig.hca.record().expect("on").waits;
    assert_eq!(waits.len(), 1);
    assert_eq!(
        (waits[0].at, waits[0].wanted, waits[0].have),
        (0x1000, 4096, 4095)
    );
    assert!(waits[0].seen_ns >= waits[0].since_ns);
    let many: Vec<_> = (0..100)
        .map_while(|i| rig.hca.waiting(WaitKind::Ticket, i, 0, 0))
        .collect();
    assert_eq!(many.len(), 63, "the places are bounded");
    drop((wait, many));
    assert!(rig.hca.record().expect("on").waits.is_empty());
}

/// A reader while the core writes as fast as it can: whatever it sees is whole, in order, and without gaps.
#[test]
fn a_reader_sees_whole_events_while_the_core_writes() {
    let rig = Rig::with(HcaConfig {
        cores: Cores::Threads(1),
        record: Recording::Memory { log_events: 5 },
        ..HcaConfig::default()
    });
    let dst = rig.region(64);
    let mut qp = rig.loopback(Options::default());
    let stop = AtomicBool::new(false);
    let put = Wqe::write_inline(dst.remote(0), &[1; 8]).expect("inline");
    let qpn = qp.hca_qp().qpn().get();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut reads, mut newest) = (0, 0);
            while !stop.load(Ordering::Relaxed) {
                let record = rig.hca.record().expect("on");
                let seen = record.qps.iter().find(|q| q.qpn == qpn).expect("in it");
                let mut rung: Option<u64> = None;
                for Event {
                    kind, from, slots, ..
                } in &seen.events
                {
                    if matches!(kind, Kind::Rung | Kind::Done) {
                        if let Some(rung) = rung {
                            assert_eq!(*from, rung, "{:?}", seen.events);
                        }
                        rung = Some(from + u64::from(*slots));
                    }
                }
                assert!(seen.events.is_sorted_by_key(|e| e.at_ns) || seen.events.len() < 2);
                newest = newest.max(seen.completed);
                reads += 1;
            }
            (reads, newest)
        });
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until {
            qp.run(&rig, put);
        }
        stop.store(true, Ordering::Relaxed);
        let (reads, newest) = reader.join().expect("reader");
        assert!(reads > 0 && newest > 0, "{reads} reads up to slot {newest}");
    });
}

#[test]
fn a_file_is_there_while_the_process_needs_it() {
    let (rig, path) = file_rig(0x0123_4567_89ab_cdef);
    let mut qp = rig.loopback(Options::default());
    qp.run(&rig, Wqe::nop());
    let record = Record::open(&path).expect("readable");
    assert_eq!(record.life(), Life::Runs);
    assert_eq!(
        (record.pid, record.id),
        (std::process::id(), 0x0123_4567_89ab_cdef)
    );
    assert_eq!(of(&record, &qp).completed, 1);
    assert!(record.command.contains("record"), "{}", record.command);
    use std::os::unix::fs::MetadataExt;
    assert_eq!(
        std::fs::metadata(&path).expect("there").mode() & 0o777,
        0o600
    );
    drop((qp, rig));
    assert!(!path.exists(), "it goes when the HCA goes");
}

/// Whatever is in a file, reading it ends in a record or a refusal.
#[test]
fn garbage_is_refused_or_read() {
    let (rig, path) = file_rig(rand::random());
    let mut qp = rig.loopback(Options::default());
    qp.post(&Wqe::nop());
    qp.run(&rig, Wqe::nop());
    let good = std::fs::read(&path).expect("bytes");
    let copy = std::env::temp_dir().join(format!("doorbell-garbage-{}", std::process::id()));
    let mut rng = common::Replay(common::seed());
    let mut random = move || {
        // xorshift64*
        rng.0 ^= rng.0 >> 12;
        rng.0 ^= rng.0 << 25;
        rng.0 ^= rng.0 >> 27;
        rng.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let used = good.len().min(144 << 10);
    let mut read = 0;
    for round in 0..200 {
        let mut bytes = good[..used].to_vec();
        for _ in 0..1 + random() % 64 {
            // Mostly where the numbers are.
            let at = match random() % 3 {
                0 => random() as usize % 512,
                1 => (88 << 10) + random() as usize % (40 << 10),
                _ => random() as usize % used,
            };
            bytes[at] = random() as u8;
        }
        if round % 5 == 0 {
            bytes.truncate(random() as usize % used);
        }
        std::fs::write(&copy, &bytes).expect("write");
        match Record::open(&copy) {
            Ok(record) => {
                read += 1;
                let _ = (record.life(), format!("{record:?}"));
            }
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
    assert!(read > 0);
    let mut other = good[..used].to_vec();
    other[8] = 9;
    std::fs::write(&copy, &other).expect("write");
    let refused = Record::open(&copy).expect_err("another version");
    assert!(
        matches!(refused, BadRecord::Version { theirs: 9, .. }),
        "{refused}"
    );
    let _ = std::fs::remove_file(copy);
}

/// A process with something posted that is never rung; it says when, and waits to be killed.
#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process() {
    let (rig, _) = file_rig(rand::random());
    let dst = rig.region(64);
    let mut qp = rig.loopback(Options::default());
    let put = Wqe::write_inline(dst.remote(24), &9u64.to_le_bytes()).expect("inline");
    qp.run(&rig, put);
    qp.post(&put);
    let seen = |qp: &common::MockQp| of(&rig.hca.record().expect("on"), qp).still.is_some();
    assert!(rig.until(|| seen(&qp)));
    println!("\nready {}", qp.hca_qp().qpn().get());
    std::thread::sleep(PATIENCE * 10);
}

#[test]
fn a_killed_process_leaves_its_record_and_a_later_start_clears_up() {
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "peer_process", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("start");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let qpn: u32 = loop {
        let line = lines.next().expect("it says so").expect("text");
        if let Some(n) = line.strip_prefix("ready ") {
            break n.parse().expect("a number");
        }
    };
    let (_, path) = dir::files(Some(child.id())).pop().expect("its file");
    let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("pid");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("stop");
    let until = Instant::now() + PATIENCE;
    while Record::open(&path).expect("readable").life() != Life::Stopped {
        assert!(Instant::now() < until, "it does not stop");
    }
    child.kill().expect("kill");
    child.wait().expect("gone");
    let record = Record::open(&path).expect("it survives");
    assert_eq!(record.life(), Life::Gone);
    let qp = record.qps.iter().find(|q| q.qpn == qpn).expect("its QP");
    assert_eq!((qp.completed, qp.posted), (1, 2));
    let still = qp.still.as_ref().expect("what stood there");
    assert_eq!(still.slots.len(), 1);
    assert!(qp.events.iter().any(|e| e.kind == Kind::Posted));
    assert!(record.regions.iter().any(|r| r.len == 64));
    let _ = std::fs::remove_file(path);
}
