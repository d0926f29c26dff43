//! Two real processes over shared memory: this test binary starts itself as the peer.
//! Puts, gets, atomics, immediates both ways; a peer killed in mid-transfer, one that is stopped, one whose child
//! holds its socket; memory freed under traffic. In every case the survivor ends in bounded time, with the right error.
#![cfg(not(miri))]

mod common;
mod process;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{MockQp, Options, PATIENCE};
use doorbell_device::layout::ErrorKind;
use doorbell_hca::shm::{Gone, Peer, ShmConfig, ShmError};
use doorbell_hca::{Event, HcaError, QpState};
use doorbell_wire::{Remote, Syndrome, Vendor, Wqe};
use process::{Other, SharedMr, Side, at, role};

const WORDS: usize = 1 << 13;

/// The peer's side, when this binary was started as one.
#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process() {
    let (name, address) = role();
    let side = Side::new(ShmConfig::default());
    let peer = side.shm.connect(&address, PATIENCE).expect("connect");
    match name.as_str() {
        "mirror" => mirror(&side, &peer),
        "target" => target(&side, &peer, || ()),
        "free" => free(&side, &peer),
        "fork" => target(&side, &peer, fork_a_holder),
        "receive" => receive(&side, &peer),
        other => panic!("role {other}"),
    }
}

fn options() -> Options {
    Options {
        log_depth: 6,
        ..Options::default()
    }
}

/// Both sides do the same thing at the same time: fill, put, signal; wait for the other's signal, check what it put; get it
/// back; count together.
fn mirror(side: &Side, peer: &Peer) {
    let region = side.region(4 * WORDS);
    let mut qp = side.rig.qp_with(options());
    let (remote, _link) = side.connect(peer, &qp, region.key);
    let rig = &side.rig;
    // Words: [0, W) mine, [W, 2W) what the other puts, [2W, 3W) what I get back; then signal, counter, sink.
    let (signal, counter, sink) = (3 * WORDS, 3 * WORDS + 8, 3 * WORDS + 16);
    for round in 1..=50u64 {
        let value = |i: usize, who: u64| round << 32 | who << 31 | i as u64;
        // Both fill with the same values: what arrives is known to the receiver.
        for i in 0..WORDS {
            region.word(i).store(value(i, 1), Ordering::Relaxed);
        }
        let words = 1 + (round as usize * 977) % WORDS;
        qp.post(&Wqe::write(at(remote, WORDS), region.local(0, words)).unwrap());
        qp.go(Wqe::fetch_add(at(remote, signal), region.local(sink, 1), 1).unwrap());
        assert!(
            rig.until(|| region.word(signal).load(Ordering::Acquire) >= round),
            "the other's signal"
        );
        for i in 0..words {
            assert_eq!(
                region.word(WORDS + i).load(Ordering::Relaxed),
                value(i, 1),
                "put word {i} of round {round}"
            );
        }
        let last = qp.pi - 1;
        qp.wait(rig, last);
        assert_eq!(region.word(sink).load(Ordering::Relaxed), round - 1);
        qp.run(
            rig,
            Wqe::read(at(remote, WORDS), region.local(2 * WORDS, words)).unwrap(),
        );
        for i in 0..words {
            assert_eq!(
                region.word(2 * WORDS + i).load(Ordering::Relaxed),
                value(i, 1),
                "got word {i} of round {round}"
            );
        }
        qp.run(
            rig,
            Wqe::fetch_add(at(remote, counter), region.local(sink, 1), round).unwrap(),
        );
        // Neither goes on before the other has read: a barrier over the session.
        peer.send(&round.to_le_bytes(), PATIENCE).expect("send");
        assert_eq!(peer.recv(PATIENCE).expect("recv"), round.to_le_bytes());
    }
    // Both hammer one word of each side at once: nothing is lost between processes.
    for _ in 0..1000 {
        qp.run(
            rig,
            Wqe::fetch_add(at(remote, counter), region.local(sink, 1), 1).unwrap(),
        );
        region.word(counter).fetch_add(1, Ordering::Relaxed);
    }
    peer.send(b"done", PATIENCE).expect("send");
    assert_eq!(peer.recv(PATIENCE).expect("recv"), b"done");
    assert_eq!(
        region.word(counter).load(Ordering::Relaxed),
        (1..=50).sum::<u64>() + 2000
    );
    // Neither leaves before the other has looked.
    peer.send(b"bye", PATIENCE).expect("send");
    assert_eq!(peer.recv(PATIENCE).expect("recv"), b"bye");
}

#[test]
fn two_processes_put_get_signal_and_count() {
    let side = Side::new(ShmConfig::default());
    let address = side.address("mirror");
    let listener = side.shm.listen(&address).unwrap();
    let other = Other::start("mirror", &address);
    let peer = listener.accept(PATIENCE).unwrap();
    assert_eq!(peer.credentials().pid, other.0.id() as i32);
    mirror(&side, &peer);
    other.ended_well();
}

/// Offers a region and waits to be told to end.
fn target(side: &Side, peer: &Peer, then: impl FnOnce()) {
    let region = side.region(WORDS);
    let qp = side.rig.qp_with(options());
    let (_remote, _link) = side.connect(peer, &qp, region.key);
    then();
    peer.send(b"ready", PATIENCE).expect("send");
    // Killed, or told to go; longer than any test waits.
    let _ = peer.recv(Duration::from_secs(300));
}

struct Attack {
    side: Side,
    peer: Peer,
    qp: MockQp,
    source: SharedMr,
    remote: Remote,
    other: Other,
}

fn attack(role: &str, config: ShmConfig) -> Attack {
    let side = Side::new(config);
    let address = side.address(role);
    let listener = side.shm.listen(&address).unwrap();
    let other = Other::start(role, &address);
    let peer = listener.accept(PATIENCE).unwrap();
    let source = side.region(WORDS);
    let qp = side.rig.qp_with(options());
    let (remote, _link) = side.connect(&peer, &qp, source.key);
    assert_eq!(peer.recv(PATIENCE).expect("ready"), b"ready");
    Attack {
        side,
        peer,
        qp,
        source,
        remote,
        other,
    }
}

impl Attack {
    /// Puts as fast as the queue takes them until the QP fails; `meanwhile` is called every 64 puts.
    fn put_until_error(
        &mut self,
        words: usize,
        mut meanwhile: impl FnMut(u64),
    ) -> (Syndrome, Vendor) {
        let deadline = Instant::now() + PATIENCE;
        let mut done = 0;
        while self.qp.state() == QpState::Ready {
            assert!(
                Instant::now() < deadline,
                "no error after {done} puts: {:?}",
                self.qp.hca_qp().counters()
            );
            while self.qp.pi - done < self.qp.depth() {
                self.qp.post(
                    &Wqe::write(self.remote, self.source.local(0, words))
                        .unwrap()
                        .signalled(true),
                );
            }
            self.qp.ring();
            let last = self.qp.pi - 1;
            self.side
                .rig
                .until(|| self.qp.completion(last).is_some() || self.qp.state() != QpState::Ready);
            done = self.qp.pi;
            meanwhile(done);
        }
        self.first_error()
    }

    /// The state changes a moment before the error word is written, by another thread perhaps.
    fn first_error(&self) -> (Syndrome, Vendor) {
        let word = || self.qp.error_word();
        assert!(self.side.rig.until(|| word().kind() != ErrorKind::None));
        assert_eq!(word().kind(), ErrorKind::Completion);
        (Syndrome(word().syndrome()), Vendor(word().vendor()))
    }

    fn peer_down_event(&self) -> String {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let event = self.side.rig.hca.wait_event(Duration::from_millis(100));
            if let Some(Event::PeerDown { peer, reason }) = event {
                assert_eq!(peer, u64::from(self.peer.id().0));
                return reason;
            }
        }
        panic!("no event about the peer");
    }
}

#[test]
fn a_peer_killed_in_mid_transfer_fails_the_qp_and_frees_everything() {
    for words in [1, WORDS] {
        let mut a = attack("target", ShmConfig::default());
        let mut killed = false;
        let pid = a.other.0.id() as i32;
        let error = a.put_until_error(words, |done| {
            if done > 2000 && !std::mem::replace(&mut killed, true) {
                // SAFETY: our own child, not yet waited for.
                assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
            }
        });
        assert_eq!(error, (Syndrome::TRANSPORT_RETRY, Vendor::PEER_DEAD));
        assert!(a.peer_down_event().contains("died"));
        assert_eq!(a.peer.gone(), Some(Gone::Died));
        assert!(matches!(
            a.peer.send(b"x", PATIENCE),
            Err(ShmError::Gone(Gone::Died))
        ));
        // What the dead process had mapped is ours alone again.
        a.source
            .mr
            .take()
            .unwrap()
            .deregister(PATIENCE)
            .expect("nobody holds it");
        a.other.ended_by(libc::SIGKILL);
    }
}

#[test]
fn an_idle_qp_fails_too_when_its_peer_dies() {
    let a = attack("target", ShmConfig::default());
    a.other.signal(libc::SIGKILL);
    assert_eq!(a.first_error().1, Vendor::PEER_DEAD);
}

/// A child that does nothing but hold what its parent had open.
fn fork_a_holder() {
    // SAFETY: the child calls nothing but async-signal-safe functions.
    unsafe {
        if libc::fork() == 0 {
            // All but the streams, which the test runner waits for.
            for fd in 0..3 {
                libc::close(fd);
            }
            libc::sleep(30);
            libc::_exit(0);
        }
    }
}

#[test]
fn a_dead_peer_is_noticed_although_its_child_holds_the_socket() {
    let mut a = attack("fork", ShmConfig::default());
    a.other.signal(libc::SIGKILL);
    let error = a.put_until_error(1, |_| ());
    assert_eq!(error.1, Vendor::PEER_DEAD);
    assert_eq!(a.peer.gone(), Some(Gone::Died));
}

#[test]
fn a_stopped_peer_holds_memory_until_it_is_cut_off_and_dead() {
    let quick = ShmConfig {
        step: Duration::from_secs(1),
        ..ShmConfig::default()
    };
    let mut a = attack("target", quick);
    a.other.stop();
    let mr = a.source.mr.take().unwrap();
    let key = mr.key();
    match mr.deregister(Duration::from_secs(4)) {
        Err(HcaError::StillInUse {
            key: named, who, ..
        }) => {
            assert_eq!(named, key);
            assert!(who.contains("peer"), "{who}");
        }
        other => panic!("{other:?}"),
    }
    assert!(
        matches!(a.peer.gone(), Some(Gone::Late { .. })),
        "{:?}",
        a.peer.gone()
    );
    assert!(a.side.rig.until(|| a.qp.state() == QpState::Error));
    // Memory that it was never sent is not held.
    let more = a.side.region(8);
    more.mr
        .unwrap()
        .deregister(PATIENCE)
        .expect("never sent to it");
}

/// Offers a region, and takes it away again and again while the other writes to it.
fn free(side: &Side, peer: &Peer) {
    let region = side.region(WORDS);
    let qp = side.rig.qp_with(options());
    let (_remote, _link) = side.connect(peer, &qp, region.key);
    peer.send(b"ready", PATIENCE).expect("send");
    assert_eq!(peer.recv(PATIENCE).expect("recv"), b"free it");
    let SharedMr { mr, memory, .. } = region;
    mr.unwrap().deregister(PATIENCE).expect("the peer lets go");
    // From here on nobody writes to it.
    let words = memory.len() / 8;
    // SAFETY: our own mapping.
    let word =
        |i: usize| unsafe { AtomicU64::from_ptr(memory.ptr().as_ptr().cast::<u64>().add(i)) };
    (0..words).for_each(|i| word(i).store(0xdead, Ordering::Relaxed));
    std::thread::sleep(Duration::from_millis(20));
    assert!((0..words).all(|i| word(i).load(Ordering::Relaxed) == 0xdead));
    peer.send(b"freed", PATIENCE).expect("send");
    let _ = peer.recv(PATIENCE);
}

#[test]
fn memory_freed_under_traffic_is_an_error_and_no_crash() {
    for words in [1, 64, WORDS] {
        let mut a = attack("free", ShmConfig::default());
        let peer = a.peer.clone();
        let mut told = false;
        let error = a.put_until_error(words, |done| {
            if done > 1000 && !std::mem::replace(&mut told, true) {
                peer.send(b"free it", PATIENCE).expect("send");
            }
        });
        assert_eq!(error, (Syndrome::REMOTE_ACCESS, Vendor::REVOKED));
        assert_eq!(peer.recv(PATIENCE).expect("freed"), b"freed");
        assert_eq!(peer.gone(), None, "the session lives on");
        peer.send(b"go", PATIENCE).expect("send");
        a.other.ended_well();
    }
}

const IMMEDIATES: u32 = 200;

/// Takes immediates, slower than they come.
fn receive(side: &Side, peer: &Peer) {
    let region = side.region(WORDS);
    let mut qp = side.rig.qp_with(Options {
        receive: true,
        ..options()
    });
    let (_remote, _link) = side.connect(peer, &qp, region.key);
    peer.send(b"ready", PATIENCE).expect("send");
    for i in 0..IMMEDIATES {
        qp.post_receives(1);
        assert!(
            side.rig.until(|| qp.received(u64::from(i)).is_some()),
            "immediate {i}"
        );
        let cqe = qp.received(u64::from(i)).unwrap();
        assert_eq!((cqe.imm, cqe.byte_cnt), (i, 8));
        assert_eq!(
            region.word(i as usize).load(Ordering::Acquire),
            u64::from(i) + 1,
            "data before the immediate"
        );
    }
    peer.send(b"done", PATIENCE).expect("send");
    let _ = peer.recv(PATIENCE);
}

#[test]
fn writes_with_immediate_wait_for_receives_of_the_other_process() {
    let mut a = attack("receive", ShmConfig::default());
    for i in 0..IMMEDIATES {
        a.source.word(0).store(u64::from(i) + 1, Ordering::Relaxed);
        let wqe = Wqe::write_imm(at(a.remote, i as usize), a.source.local(0, 1), i).unwrap();
        a.qp.run(&a.side.rig, wqe);
    }
    assert_eq!(a.peer.recv(PATIENCE).expect("done"), b"done");
    a.peer.send(b"go", PATIENCE).expect("send");
    a.other.ended_well();
}
