//! SEND between processes: messages of every length, in order with everything else, between host and device memory; receives that are too
//! short, not writable or missing; ends that go in the middle of a message; and a peer that does not keep to what was agreed.
#![cfg(not(miri))]

mod common;
#[path = "common/device.rs"]
mod device;
#[path = "common/place.rs"]
mod place;
mod process;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{MockQp, Options, PATIENCE, RQ_LOG, Replay, Rig, seed};
use device::Device;
use doorbell_hca::link::{PART, Part, RemoteQp};
use doorbell_hca::shm::{Peer, Shm, ShmConfig, ShmLink, SlotQp};
use doorbell_hca::{Access, Addressing, Destination, Fault, HcaConfig, QpState};
use doorbell_wire::cqe::Kind;
use doorbell_wire::{Local, Syndrome, Wqe};
use place::Place;
use process::{Other, Side, at, role};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Two HCAs of this process that are peers, with a connected queue pair each.
struct Ends {
    a: Side,
    b: Side,
    near: MockQp,
    far: MockQp,
    peers: (Peer, Peer),
}

fn options() -> Options {
    Options {
        receive: true,
        log_depth: 6,
        ..Options::default()
    }
}

fn side(rnr: Duration) -> Side {
    let rig = Rig::with(HcaConfig {
        rnr_limit: rnr,
        ..HcaConfig::caller_driven()
    });
    let shm = Shm::attach(&rig.hca, ShmConfig::default(), None).expect("attach");
    Side { rig, shm }
}

fn open(side: &Side, peer: &Peer, own: &MockQp, other: &MockQp, receives: bool) -> Arc<ShmLink> {
    let slot = SlotQp {
        qpn: own.hca_qp().qpn().get(),
        pd: side.rig.pd,
        peer_qpn: other.hca_qp().qpn().get(),
        receives,
    };
    ShmLink::open(peer, slot).expect("link")
}

impl Ends {
    fn new(rnr: Duration, near: Options, far: Options) -> Self {
        let (a, b) = (side(rnr), side(rnr));
        let address = a.address("sends");
        let listener = a.shm.listen(&address).expect("listen");
        let peers = std::thread::scope(|scope| {
            let theirs = scope.spawn(|| b.shm.connect(&address, PATIENCE).expect("connect"));
            let ours = listener.accept(PATIENCE).expect("accept");
            (ours, theirs.join().expect("joined"))
        });
        let ends = Self {
            near: a.rig.qp_with(near),
            far: b.rig.qp_with(far),
            a,
            b,
            peers,
        };
        ends.connect(far.receive);
        ends
    }

    fn connect(&self, receives: bool) {
        let (a, b) = &self.peers;
        for (side, peer, own, other, receives) in [
            (&self.a, a, &self.near, &self.far, true),
            (&self.b, b, &self.far, &self.near, receives),
        ] {
            let link = open(side, peer, own, other, receives);
            own.hca_qp()
                .connect(Destination::Peer(link), PATIENCE)
                .expect("connect");
        }
    }

    fn until(&self, mut done: impl FnMut() -> bool) -> bool {
        self.a.rig.until(|| {
            self.b.rig.driver.poll();
            done()
        })
    }

    /// So many rounds of both.
    fn rounds(&self, n: usize) {
        for _ in 0..n {
            self.a.rig.driver.poll();
            self.b.rig.driver.poll();
        }
    }
}

fn ends() -> Ends {
    Ends::new(PATIENCE, options(), options())
}

#[test]
fn messages_of_every_length_arrive_whole_and_in_order() {
    const LEN: usize = 6 * PART * 16;
    let seed = seed();
    let _replay = Replay(seed);
    let mut random = StdRng::seed_from_u64(seed);
    for kinds in 0..4 {
        let mut ends = ends();
        let device = || Device::random(LEN, 4, true, seed);
        let (here, there) = (device(), device());
        let src = Place::new(&ends.a.rig, (kinds & 1 != 0).then_some((&here, 0)), LEN);
        let dst = Place::new(&ends.b.rig, (kinds & 2 != 0).then_some((&there, 0)), LEN);
        let mut bytes = vec![0; LEN];
        random.fill(&mut bytes[..]);
        src.fill(0, &bytes);
        let mut lens = vec![
            0,
            1,
            7,
            64,
            PART - 1,
            PART,
            PART + 1,
            16 * PART,
            16 * PART + 5,
            LEN,
        ];
        lens.extend((0..20).map(|_| random.random_range(0..LEN)));
        // Three at a time: more than a ring of parts, and several receives under way.
        for group in lens.chunks(3) {
            let mut place = 0;
            let mut sent = Vec::new();
            for (i, &len) in group.iter().enumerate() {
                let len = len.min(LEN - place);
                // The receive in two pieces, and longer than the message where there is room.
                let cut = random.random_range(0..=len);
                let first = ends.far.post_receive(&[
                    dst.local(place as u64, cut as u32),
                    dst.local((place + cut) as u64, (len - cut) as u32),
                ]);
                let local = src.local(place as u64, len as u32);
                let wqe = match i {
                    0 => Wqe::send(local),
                    _ => Wqe::send_imm(local, len as u32 ^ 0xabcd),
                };
                let wqe = if len == 0 { Wqe::send_inline(&[]) } else { wqe };
                let imm = (i > 0 && len > 0).then_some(len as u32 ^ 0xabcd);
                sent.push((ends.near.go(wqe.expect("a length")), first, place, len, imm));
                place += len;
            }
            let last = sent.last().expect("some").0;
            assert!(
                ends.until(|| ends.near.completion(last).is_some()),
                "{group:?}"
            );
            ends.near.wait(&ends.a.rig, last);
            for (_, receive, place, len, imm) in sent {
                let got = ends
                    .far
                    .received(receive)
                    .expect("before the sender's completion");
                let kind = if imm.is_some() {
                    Kind::ResponderSendImm
                } else {
                    Kind::ResponderSend
                };
                assert_eq!(
                    (got.tail.kind(), got.byte_cnt, got.imm),
                    (Some(kind), len as u32, imm.unwrap_or(0))
                );
                assert!(
                    dst.bytes(place, len) == bytes[place..place + len],
                    "{len} at {place}"
                );
            }
            dst.fill(0, &vec![0; LEN]);
        }
    }
}

/// What is posted behind a message is executed behind it, and the other way round.
#[test]
fn messages_keep_their_place_among_other_requests() {
    let mut ends = ends();
    let (src, dst) = (ends.a.region(1 << 14), ends.b.region(1 << 14));
    let remote = |word| {
        at(
            doorbell_wire::Remote {
                addr: 0,
                key: dst.key,
            },
            word,
        )
    };
    for round in 1..=40u64 {
        src.word(0).store(round, Ordering::Relaxed);
        src.word(8191).store(round, Ordering::Relaxed);
        let receive = ends.far.post_receive(&[dst.local(0, 8192)]);
        let immediate = ends.far.post_receive(&[]);
        ends.near
            .post(&Wqe::write_inline(remote(8200), &round.to_le_bytes()).expect("short"));
        ends.near
            .post(&Wqe::send(src.local(0, 8192)).expect("a length"));
        ends.near
            .post(&Wqe::fetch_add(remote(8208), src.local(8300, 1), 1).expect("valid"));
        let put = Wqe::write_imm(remote(8216), src.local(0, 1), round as u32).expect("a length");
        let last = ends.near.go(put);
        assert!(ends.until(|| {
            let added = dst.word(8208).load(Ordering::Acquire) >= round;
            assert!(
                !added || ends.far.received(receive).is_some(),
                "the atomic overtook the message"
            );
            let message = ends.far.received(receive).is_some();
            assert!(!message || dst.word(8200).load(Ordering::Acquire) == round);
            ends.near.completion(last).is_some()
        }));
        assert_eq!(dst.word(8191).load(Ordering::Relaxed), round);
        assert_eq!(
            ends.far.received(immediate).map(|r| r.imm),
            Some(round as u32)
        );
    }
}

#[test]
fn receives_that_do_not_fit_fail_both_ends() {
    for (what, near, far) in [
        ("short", Fault::ReceiveTooShort, Fault::BadLength),
        ("read only", Fault::ReceiveRefused, Fault::LkeyAccess),
        ("no such key", Fault::ReceiveRefused, Fault::BadLkey),
        ("broken", Fault::ReceiveRefused, Fault::DmaFailed),
    ] {
        for len in [8u32, 3 * PART as u32] {
            let mut ends = ends();
            let src = ends.a.rig.region(len as usize);
            let dst = ends.b.rig.region(len as usize);
            let rights = Access::REMOTE_READ;
            let closed =
                ends.b
                    .rig
                    .region_with(len as usize, rights, Addressing::Zero, ends.b.rig.pd);
            let device = Device::new(1 << 20, 1, true);
            let place = Place::new(&ends.b.rig, Some((&device, 0)), len as usize);
            let sink = match what {
                "short" => dst.local(0, len - 1),
                "read only" => closed.local(0, len),
                "no such key" => Local {
                    key: doorbell_wire::Key(0x00dd_0000),
                    ..dst.local(0, len)
                },
                _ => place.local(0, len),
            };
            device.broken.store(true, Ordering::Relaxed);
            let receive = ends.far.post_receive(&[sink]);
            let next = ends.far.post_receive(&[dst.local(0, len)]);
            let at = ends
                .near
                .go(Wqe::send(src.local(0, len)).expect("a length"));
            ends.near.go(Wqe::nop());
            let failed = |qp: &MockQp| qp.state() == QpState::Error;
            assert!(
                ends.until(|| failed(&ends.near) && failed(&ends.far)),
                "{what} {len}"
            );
            let word = ends.near.error_word();
            assert_eq!(
                (word.syndrome(), word.vendor(), word.wqe_index()),
                (near.syndrome().0, near.vendor().0, at as u16),
                "{what} {len}"
            );
            let cqe = ends.far.receive_error(receive).expect("completed in error");
            if what != "broken" {
                assert_eq!(
                    (cqe.syndrome, cqe.vendor),
                    (far.syndrome(), far.vendor()),
                    "{what} {len}"
                );
            }
            assert_eq!(
                ends.far.error_word().vendor(),
                far.vendor().0,
                "{what} {len}"
            );
            let flushed = ends.far.receive_error(next).expect("flushed");
            assert_eq!(flushed.syndrome, Syndrome::WR_FLUSH);
            assert!(dst.canaries_intact() && closed.canaries_intact());
        }
    }
}

#[test]
fn a_message_without_a_receive_waits_for_a_bounded_time() {
    let limit = Duration::from_millis(50);
    for receives in [true, false] {
        let far = Options {
            receive: receives,
            ..options()
        };
        let mut ends = Ends::new(limit, options(), far);
        let start = Instant::now();
        let at = ends.near.go(Wqe::send_inline(b"anybody").expect("short"));
        assert!(ends.until(|| ends.near.state() == QpState::Error));
        let word = ends.near.error_word();
        assert_eq!(
            (word.vendor(), word.wqe_index()),
            (Fault::NoReceive.vendor().0, at as u16)
        );
        assert!(!receives || start.elapsed() >= limit, "it gave up early");
    }
    // One that comes in time is found.
    let mut ends = Ends::new(Duration::from_secs(5), options(), options());
    let dst = ends.b.rig.region(64);
    let at = ends.near.go(Wqe::send_inline(b"late").expect("short"));
    ends.rounds(1000);
    assert!(ends.near.completion(at).is_none());
    let receive = ends.far.post_receive(&[dst.local(0, 64)]);
    assert!(ends.until(|| ends.near.completion(at).is_some()));
    assert!(ends.far.received(receive).is_some());
    assert_eq!(dst.bytes(0, 4), b"late");
}

/// The sender fails in its own memory: no receive is lost to it.
#[test]
fn what_is_wrong_at_the_sender_takes_no_receive() {
    let mut ends = ends();
    let (src, dst) = (ends.a.rig.region(64), ends.b.rig.region(64));
    let receive = ends.far.post_receive(&[dst.local(0, 64)]);
    let at = ends
        .near
        .go(Wqe::send(src.local(32, 64)).expect("a length"));
    assert!(ends.until(|| ends.near.state() == QpState::Error));
    let word = ends.near.error_word();
    assert_eq!(
        (word.vendor(), word.wqe_index()),
        (Fault::LkeyRange.vendor().0, at as u16)
    );
    ends.rounds(100);
    assert!(ends.far.received(receive).is_none() && ends.far.receive_error(receive).is_none());
}

/// Whoever goes in the middle of a message: the other learns it, and the receive is there for the next life.
#[test]
fn ends_that_go_in_the_middle_of_a_message() {
    let len = 60 * PART;
    let mut ends = ends();
    let (src, dst) = (ends.a.rig.region(len), ends.b.rig.region(len));
    for (lap, sender_goes) in (1..30).flat_map(|lap| [(lap, true), (lap, false)]) {
        let receive = ends.far.post_receive(&[dst.local(0, len as u32)]);
        ends.near
            .go(Wqe::send(src.local(0, len as u32)).expect("a length"));
        ends.rounds(lap % 6);
        // One half of a round more for one of them.
        if lap % 2 == 0 {
            ends.a.rig.driver.poll();
        }
        if sender_goes {
            ends.near.reset();
            ends.rounds(50);
            let far = &ends.far;
            assert_eq!(far.state(), QpState::Ready);
            // Whether all of it had been handed over or not: the receive is complete, or nobody has it.
            if far.received(receive).is_none() {
                assert!(far.receive_error(receive).is_none());
                // Somebody else may have it.
                let mut third = ends.b.rig.qp_with(options());
                third.connect(far);
                let at = third.go(Wqe::send_inline(b"mine").expect("short"));
                assert!(ends.until(|| third.completion(at).is_some()), "lap {lap}");
                third.wait(&ends.b.rig, at);
                assert_eq!(far.received(receive).map(|r| r.byte_cnt), Some(4));
                let receive = ends.far.post_receive(&[dst.local(0, 8)]);
                ends.far
                    .hca_qp()
                    .fail(Fault::Destroyed, PATIENCE)
                    .expect("fail");
                let flushed = ends.far.receive_error(receive).expect("flushed");
                assert_eq!(flushed.syndrome, Syndrome::WR_FLUSH);
            }
            ends.far.reset();
        } else {
            let done = ends.near.completion(0).is_some();
            ends.far.reset();
            assert!(done || ends.until(|| ends.near.state() == QpState::Error));
            assert!(done || ends.near.error_word().vendor() == Fault::PeerDead.vendor().0);
            ends.near.reset();
        }
        ends.connect(true);
    }
    // The last life is as good as the first.
    let receive = ends.far.post_receive(&[dst.local(0, len as u32)]);
    let at = ends
        .near
        .go(Wqe::send(src.local(0, len as u32)).expect("a length"));
    assert!(ends.until(|| ends.near.completion(at).is_some()));
    assert!(ends.far.received(receive).is_some());
}

/// Parts that are not of one message are refused, take no receive, and leave the queue pair as it was.
#[test]
fn parts_that_do_not_fit_are_refused() {
    let mut ends = ends();
    let dst = ends.b.rig.region(2 * PART);
    let receive = ends.far.post_receive(&[dst.local(0, 2 * PART as u32)]);
    ends.near.reset();
    ends.far.reset();
    let receive_again = ends.far.post_receive(&[dst.local(0, 2 * PART as u32)]);
    assert_eq!(receive, receive_again);
    // Our own hand on the mailbox, in place of an engine.
    let link = open(&ends.a, &ends.peers.0, &ends.near, &ends.far, true);
    let theirs = open(&ends.b, &ends.peers.1, &ends.far, &ends.near, true);
    ends.far
        .hca_qp()
        .connect(Destination::Peer(theirs), PATIENCE)
        .expect("connect");
    let part = |offset, len, total| Part {
        total,
        offset,
        len,
        imm: None,
    };
    let full = PART as u32;
    let answers = |link: &ShmLink, n: usize| {
        let mut all = Vec::new();
        let got = ends.b.rig.until(|| {
            all.extend(link.answer());
            all.len() == n
        });
        assert!(got, "{all:?}");
        all
    };
    assert!(ends.b.rig.until(|| link.has_room() == Ok(true)));
    let bytes = vec![7; PART];
    let no = Err(Fault::Unsupported);
    // Beyond its message; not at its beginning; a message that changes its length, or begins anew, in the middle; a part of nothing.
    for (parts, expected) in [
        (vec![part(0, full, 8)], vec![no]),
        (vec![part(8, 8, 16)], vec![no]),
        (vec![part(u32::MAX, 8, 16)], vec![no]),
        (
            vec![part(0, full, 2 * full), part(full, 8, full + 8)],
            vec![Ok(()), no],
        ),
        (
            vec![part(0, full, 2 * full), part(0, full, 2 * full)],
            vec![Ok(()), no],
        ),
        (
            vec![part(0, full, 2 * full), part(full, 0, 2 * full)],
            vec![Ok(()), no],
        ),
    ] {
        for part in &parts {
            assert!(link.send_part(part, &bytes[..part.len as usize]));
        }
        assert_eq!(answers(&link, parts.len()), expected, "{parts:?}");
        assert!(ends.far.received(receive).is_none());
    }
    assert_eq!(ends.far.state(), QpState::Ready);
    assert!(link.send_part(&part(0, full, full + 3), &bytes));
    assert!(link.send_part(&part(full, 3, full + 3), &bytes[..3]));
    assert_eq!(answers(&link, 2), [Ok(()), Ok(())]);
    assert_eq!(
        ends.far.received(receive).map(|r| r.byte_cnt),
        Some(full + 3)
    );
    assert!(dst.canaries_intact());
}

// ------------------------------------------------------------------------------------------------ two processes

/// The peer's side, when this binary was started as one.
#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process() {
    let (name, address) = role();
    let side = Side::new(ShmConfig::default());
    let peer = side.shm.connect(&address, PATIENCE).expect("connect");
    let region = side.region(1 << 16);
    let mut qp = side.rig.qp_with(options());
    let (_, link) = side.connect(&peer, &qp, region.key);
    match name.as_str() {
        // Sends back what comes.
        "echo" => {
            let words = 1 << 14;
            let mut next = 0;
            qp.post_receive(&[region.local(0, words)]);
            for n in 0..ECHOES {
                assert!(side.rig.until(|| qp.received(n).is_some()), "message {n}");
                let len = qp.received(n).expect("there").byte_cnt;
                let half = (n as usize + 1) % 2 * words;
                next = qp.post_receive(&[region.local(half, words)]);
                let from = n as usize % 2 * words;
                let local = Local {
                    len,
                    ..region.local(from, words)
                };
                let at = qp.go(Wqe::send(local).expect("a length"));
                qp.wait(&side.rig, at);
            }
            assert_eq!(next, ECHOES);
        }
        // Begins messages without end until it is killed.
        "sender" => loop {
            let at = qp.go(Wqe::send(region.local(0, 1 << 16)).expect("a length"));
            let _ = side.rig.until(|| qp.completion(at).is_some());
        },
        other => panic!("role {other}"),
    }
    drop(link);
    let _ = peer.recv(PATIENCE);
}

const ECHOES: u64 = 300;

#[test]
fn two_processes_send_to_and_fro() {
    let side = Side::new(ShmConfig::default());
    let address = side.address("echo");
    let listener = side.shm.listen(&address).expect("listen");
    let other = Other::start("echo", &address);
    let peer = listener.accept(PATIENCE).expect("accept");
    let words = 1 << 14;
    let region = side.region(2 * words);
    let mut qp = side.rig.qp_with(options());
    let (_remote, _link) = side.connect(&peer, &qp, region.key);
    for n in 0..ECHOES {
        let len = 1 + (n as usize * 7919) % words;
        for word in 0..len {
            region
                .word(word)
                .store(n << 32 | word as u64, Ordering::Relaxed);
        }
        let receive = qp.post_receive(&[region.local(words, words)]);
        let at = qp.go(Wqe::send(region.local(0, len)).expect("a length"));
        assert!(
            side.rig.until(|| qp.received(receive).is_some()),
            "message {n}"
        );
        qp.wait(&side.rig, at);
        assert_eq!(
            qp.received(receive).map(|r| r.byte_cnt),
            Some(8 * len as u32)
        );
        for word in 0..len {
            assert_eq!(
                region.word(words + word).load(Ordering::Relaxed),
                n << 32 | word as u64
            );
        }
    }
    peer.send(b"done", PATIENCE).expect("send");
    other.ended_well();
}

/// A sender that is killed while its message comes in: the receive that was taken is flushed with the others.
#[test]
fn a_sender_that_dies_in_the_middle_of_a_message() {
    for lap in 0..6 {
        let side = Side::new(ShmConfig::default());
        let address = side.address("dies");
        let listener = side.shm.listen(&address).expect("listen");
        let other = Other::start("sender", &address);
        let peer = listener.accept(PATIENCE).expect("accept");
        let region = side.region(1 << 16);
        let mut qp = side.rig.qp_with(options());
        let (_remote, _link) = side.connect(&peer, &qp, region.key);
        region.word(0).store(u64::MAX, Ordering::Relaxed);
        let first = qp.post_receive(&[region.local(0, 1 << 16)]);
        // Some of it has come, then nothing is read for a while.
        let begun = || region.word(0).load(Ordering::Relaxed) == 0;
        assert!(side.rig.until(begun));
        for _ in 0..lap * 3 {
            side.rig.driver.poll();
        }
        for _ in 1..1 << RQ_LOG {
            qp.post_receive(&[region.local(0, 1 << 16)]);
        }
        other.signal(libc::SIGKILL);
        // Another thread may be the one that fails it: the last thing it does is flushing receives.
        let last = first + (1 << RQ_LOG) - 1;
        assert!(
            side.rig.until(|| qp.receive_error(last).is_some()),
            "lap {lap}"
        );
        assert_eq!(qp.state(), QpState::Error);
        assert_eq!(qp.error_word().vendor(), Fault::PeerDead.vendor().0);
        let mut flushed = 0;
        for receive in first..first + (1 << RQ_LOG) {
            // Each is complete, or flushed.
            match qp.receive_error(receive) {
                Some(cqe) => {
                    assert_eq!(cqe.syndrome, Syndrome::WR_FLUSH);
                    flushed += 1;
                }
                None => assert!(
                    qp.received(receive).is_some(),
                    "receive {receive} of lap {lap}"
                ),
            }
        }
        assert!(flushed > 0);
        other.ended_by(libc::SIGKILL);
    }
}
