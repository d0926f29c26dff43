//! SEND in one process: receives of every shape, several initiators, no receive, a receive that is too short or may not be written,
//! rings that wrap many times, records that lie.

mod common;

use std::time::Duration;

use common::{MockQp, Options, Region, Rig};
use doorbell_hca::{Access, Addressing, Fault, HcaConfig, QpState};
use doorbell_wire::cqe::Kind;
use doorbell_wire::{Key, Local, Syndrome, Wqe};

fn receiver() -> Options {
    Options {
        receive: true,
        ..Options::default()
    }
}

/// A rig that waits as long as a test may need for receives.
fn patient() -> Rig {
    Rig::with(HcaConfig {
        rnr_limit: common::PATIENCE,
        ..HcaConfig::caller_driven()
    })
}

/// An initiator and its target.
fn pair(rig: &Rig) -> (MockQp, MockQp) {
    let (a, b) = (rig.qp(), rig.qp_with(receiver()));
    a.connect(&b);
    b.connect(&b);
    (a, b)
}

fn pattern(region: &Region, salt: u8) -> Vec<u8> {
    let bytes: Vec<u8> = (0..region.len()).map(|i| (i as u8) ^ salt).collect();
    region.fill(0, &bytes);
    bytes
}

#[test]
fn messages_fill_their_receives_in_order() {
    let rig = patient();
    let (mut a, mut b) = pair(&rig);
    let (src, dst) = (rig.region(256), rig.region(256));
    let bytes = pattern(&src, 0x5a);
    // Far more than the receive ring, its CQ and 16 bits of a record hold.
    let laps = if cfg!(miri) { 3 } else { 20_000 };
    for lap in 0..laps {
        let first = b.post_receive(&[dst.local(0, 16), dst.local(64, 100)]);
        b.post_receive(&[dst.local(200, 8)]);
        b.post_receive(&[]);
        let whole = Wqe::send_imm(src.local(3, 50), lap).expect("a length");
        a.run(&rig, whole);
        a.run(&rig, Wqe::send_inline(&bytes[..8]).expect("short"));
        a.run(&rig, Wqe::send_inline(&[]).expect("empty"));
        assert_eq!(dst.bytes(0, 16), bytes[3..19]);
        assert_eq!(dst.bytes(64, 34), bytes[19..53]);
        assert_eq!(dst.bytes(200, 8), bytes[..8]);
        let got = b.received(first).expect("the first");
        assert_eq!(
            (got.tail.kind(), got.imm, got.byte_cnt),
            (Some(Kind::ResponderSendImm), lap, 50)
        );
        assert_eq!(got.tail.wqe_counter(), first as u16);
        let got = b.received(first + 1).expect("the second");
        assert_eq!(
            (got.tail.kind(), got.byte_cnt),
            (Some(Kind::ResponderSend), 8)
        );
        let got = b.received(first + 2).expect("the third");
        assert_eq!(
            (got.tail.kind(), got.byte_cnt),
            (Some(Kind::ResponderSend), 0)
        );
    }
    assert!(src.canaries_intact() && dst.canaries_intact());
}

#[test]
fn long_messages_come_whole_and_do_not_mix() {
    let rig = patient();
    let (mut a, mut b) = pair(&rig);
    let mut c = rig.qp();
    c.connect(&b);
    let len = if cfg!(miri) { 4096 } else { 5 << 20 };
    let (one, two) = (rig.region(len), rig.region(len));
    let (to, then) = (rig.region(len), rig.region(len));
    let (x, y) = (pattern(&one, 1), pattern(&two, 2));
    let half = len as u32 / 2;
    b.post_receive(&[to.local(0, half), to.local(u64::from(half), half)]);
    b.post_receive(&[then.local(0, len as u32)]);
    let at = a.go(Wqe::send(one.local(0, len as u32)).expect("a length"));
    rig.driver.poll();
    let other = c.go(Wqe::send_imm(two.local(0, len as u32), 7).expect("a length"));
    a.wait(&rig, at);
    c.wait(&rig, other);
    let (first, second) = (b.received(0).expect("one"), b.received(1).expect("two"));
    let (ours, theirs) = if first.tail.kind() == Some(Kind::ResponderSend) {
        (&to, &then)
    } else {
        (&then, &to)
    };
    assert_eq!(ours.bytes(0, len), x);
    assert_eq!(theirs.bytes(0, len), y);
    assert_eq!((first.byte_cnt, second.byte_cnt), (len as u32, len as u32));
}

#[test]
fn many_initiators_share_one_receive_queue() {
    let rig = patient();
    let mut b = rig.qp_with(receiver());
    b.connect_to_self();
    let dst = rig.region(64);
    let src = rig.region(64);
    let mut senders: Vec<MockQp> = (0..8).map(|_| rig.qp()).collect();
    for sender in &senders {
        sender.connect(&b);
    }
    let rounds = if cfg!(miri) { 2 } else { 500 };
    let mut next = [0_u32; 8];
    let mut seen = 0;
    for round in 0..rounds {
        for (id, sender) in senders.iter_mut().enumerate() {
            let imm = round << 8 | id as u32;
            let wqe = match id % 2 {
                0 => Wqe::send_imm(src.local(0, 8), imm),
                _ => Wqe::write_imm(dst.remote(32), src.local(0, 8), imm),
            };
            sender.post(&wqe.expect("a length").signalled(true));
            sender.ring();
        }
        for _ in 0..8 {
            b.post_receive(&[dst.local(0, 8)]);
            assert!(rig.until(|| b.received(seen).is_some()), "message {seen}");
            let imm = b.received(seen).expect("just seen").imm;
            let id = (imm & 0xff) as usize;
            assert_eq!(imm >> 8, next[id], "messages of one initiator are in order");
            next[id] += 1;
            seen += 1;
        }
        for sender in &senders {
            sender.wait(&rig, u64::from(round));
        }
    }
    assert_eq!(next, [rounds; 8]);
}

#[test]
fn without_a_receive_it_waits_and_then_fails() {
    let rig = Rig::new();
    let (mut a, mut b) = pair(&rig);
    let src = rig.region(64);
    let at = a.go(Wqe::send(src.local(0, 8)).expect("a length"));
    let cqe = a.wait_any(&rig, at);
    let e = doorbell_wire::cqe::ErrorCqe::parse(&cqe).expect("an error");
    assert_eq!(e.syndrome, Syndrome::RNR_RETRY);
    assert_eq!(b.state(), QpState::Ready, "not the target's fault");
    // With patience, a receive that comes late is taken.
    a.reset();
    a.connect(&b);
    let patient = patient();
    let (mut c, mut d) = pair(&patient);
    let (src, dst) = (patient.region(64), patient.region(64));
    src.fill(0, b"late but here");
    let at = c.go(Wqe::send(src.local(0, 13)).expect("a length"));
    for _ in 0..100 {
        patient.driver.poll();
    }
    assert!(c.completion(at).is_none());
    d.post_receive(&[dst.local(0, 64)]);
    c.wait(&patient, at);
    assert_eq!(dst.bytes(0, 13), b"late but here");
    b.post_receives(0);
    // No receive queue at all.
    let none = rig.qp();
    none.connect_to_self();
    let mut e = rig.qp();
    e.connect(&none);
    let at = e.go(Wqe::send_inline(b"x").expect("short"));
    assert!(rig.until(|| e.state() == QpState::Error));
    assert!(e.completion(at).is_some());
}

#[test]
fn what_is_wrong_with_a_receive_fails_both_ends() {
    type Piece = fn(&Rig, &Region) -> Local;
    let bad: [(Piece, Fault, Fault); 4] = [
        (
            |_, dst| dst.local(0, 7),
            Fault::BadLength,
            Fault::ReceiveTooShort,
        ),
        (
            |_, dst| dst.local(60, 8),
            Fault::LkeyRange,
            Fault::ReceiveRefused,
        ),
        (
            |_, dst| Local {
                key: Key(0x7777_7700),
                ..dst.local(0, 8)
            },
            Fault::BadLkey,
            Fault::ReceiveRefused,
        ),
        (
            |rig, _| {
                let read_only = rig.region_with(64, Access::NONE, Addressing::Zero, rig.pd);
                let local = read_only.local(0, 8);
                // Kept registered: it is the access that is refused.
                std::mem::forget(read_only);
                local
            },
            Fault::LkeyAccess,
            Fault::ReceiveRefused,
        ),
    ];
    for (piece, theirs, ours) in bad {
        let rig = Rig::new();
        let (mut a, mut b) = pair(&rig);
        let (src, dst) = (rig.region(64), rig.region(64));
        dst.fill(0, &[0xee; 64]);
        b.post_receive(&[piece(&rig, &dst)]);
        b.post_receive(&[dst.local(0, 8)]);
        let at = a.go(Wqe::send(src.local(0, 8)).expect("a length"));
        let cqe = a.wait_any(&rig, at);
        let e = doorbell_wire::cqe::ErrorCqe::parse(&cqe).expect("an error");
        assert_eq!((e.syndrome, e.vendor), (ours.syndrome(), ours.vendor()));
        assert!(rig.until(|| b.state() == QpState::Error), "{theirs:?}");
        let e = b.receive_error(0).expect("an error CQE");
        assert_eq!((e.syndrome, e.vendor), (theirs.syndrome(), theirs.vendor()));
        let e = b.receive_error(1).expect("flushed");
        assert_eq!(e.syndrome, Syndrome::WR_FLUSH);
        assert_eq!(dst.bytes(0, 64), [0xee; 64], "nothing was written");
        assert!(dst.canaries_intact());
    }
}

#[test]
fn what_is_wrong_with_the_message_takes_no_receive() {
    let rig = Rig::new();
    let (mut a, mut b) = pair(&rig);
    let (src, dst) = (rig.region(64), rig.region(64));
    b.post_receive(&[dst.local(0, 64)]);
    let at = a.go(Wqe::send(src.local(60, 8)).expect("a length"));
    a.wait_any(&rig, at);
    assert_eq!(a.state(), QpState::Error);
    assert_eq!((b.state(), b.received(0)), (QpState::Ready, None));
    a.reset();
    a.connect(&b);
    let at = a.go(Wqe::send(src.local(0, 8)).expect("a length"));
    a.wait(&rig, at);
    assert_eq!(b.received(0).map(|c| c.byte_cnt), Some(8));
}

#[test]
fn a_sender_that_dies_in_mid_message_gives_the_receive_back() {
    let rig = patient();
    let (mut a, mut b) = pair(&rig);
    let len = 8 << 20;
    let (src, dst) = (rig.region(len), rig.region(len));
    b.post_receive(&[dst.local(0, len as u32)]);
    let at = a.go(Wqe::send(src.local(0, len as u32)).expect("a length"));
    src.fill(0, &[0x77]);
    assert!(rig.until(|| dst.bytes(0, 1) == [0x77]));
    assert!(a.completion(at).is_none(), "it is under way");
    a.hca_qp()
        .fail(Fault::Destroyed, Duration::from_secs(5))
        .expect("failed");
    let mut c = rig.qp();
    c.connect(&b);
    c.run(&rig, Wqe::send_inline(b"after").expect("short"));
    assert_eq!(dst.bytes(0, 5), b"after");
    assert_eq!(b.received(0).map(|c| c.byte_cnt), Some(5));
}

#[test]
fn a_receiver_that_is_reset_in_mid_message_fails_the_sender() {
    let rig = patient();
    let (mut a, mut b) = pair(&rig);
    let len = 8 << 20;
    let (src, dst) = (rig.region(len), rig.region(len));
    b.post_receive(&[dst.local(0, len as u32)]);
    let at = a.go(Wqe::send(src.local(0, len as u32)).expect("a length"));
    src.fill(0, &[0x77]);
    assert!(rig.until(|| dst.bytes(0, 1) == [0x77]));
    assert!(a.completion(at).is_none(), "it is under way");
    b.reset();
    b.connect_to_self();
    b.post_receive(&[dst.local(0, 16)]);
    let cqe = a.wait_any(&rig, at);
    assert!(doorbell_wire::cqe::ErrorCqe::parse(&cqe).is_some());
    assert_eq!(b.received(0), None, "a receive of another life");
    assert!(dst.canaries_intact());
}

#[test]
fn records_that_lie_hurt_nobody_else() {
    let rig = Rig::new();
    let (mut a, b) = pair(&rig);
    let src = rig.region(64);
    // The ring holds four: more, or going back, counts for nothing.
    for record in [5_u32, 0x8000, 0xffff, 100] {
        b.lie_about_receives(record.to_be());
        let at = a.go(Wqe::send(src.local(0, 8)).expect("a length"));
        let cqe = a.wait_any(&rig, at);
        let e = doorbell_wire::cqe::ErrorCqe::parse(&cqe).expect("an error");
        assert_eq!(e.syndrome, Syndrome::RNR_RETRY, "record {record:#x}");
        assert_eq!(b.state(), QpState::Ready);
        a.reset();
        a.connect(&b);
    }
    // Four receives that nobody wrote: zeros are pieces of no bytes.
    b.lie_about_receives(4_u32.to_be());
    let at = a.go(Wqe::send_inline(&[]).expect("empty"));
    a.wait(&rig, at);
    assert_eq!(b.received(0).map(|c| c.byte_cnt), Some(0));
}
