//! RoCE with payloads in memory that only a copy engine reaches, in both roles and mixed with host memory: what a model says, whatever the
//! engine's pace and the network's mistakes; what fails is told to both ends; nothing is used after its end.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/device.rs"]
mod device;
mod model;
#[path = "../common/roce.rs"]
mod net;
#[path = "../common/place.rs"]
mod place;
mod sides;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{MockQp, Options, PATIENCE, Rig};
use device::Device;
use doorbell_hca::roce::transport::{Config, Mtu};
use doorbell_hca::{Fault, HcaError, QpState};
use doorbell_wire::cqe::Kind;
use doorbell_wire::roce::Transport;
use doorbell_wire::{Local, Opcode, Remote, Wqe, seg};
use place::Place;
use rand::{SeedableRng, rngs::StdRng};
use sides::{DEVICE, Side, noise, pair, patient, until};

/// Packets that are as long as a datagram do not end where buffers do.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn long_packets() {
    let config = Config {
        path_mtu: Mtu::Long,
        window_bytes: 1 << 20,
        ..patient()
    };
    let (mut a, b) = pair("", &config);
    let (here, there) = (Device::new(DEVICE, 2, true), Device::new(DEVICE, 2, true));
    let len = 3 << 20;
    let bytes = noise(&mut StdRng::seed_from_u64(2), len);
    for (near, far) in [
        (Some((&here, 0)), Some((&there, 0))),
        (None, Some((&there, 0))),
        (Some((&here, 0)), None),
    ] {
        let near = Place::new(&a.rig, near, len);
        let far = Place::new(&b.rig, far, len);
        near.fill(0, &bytes);
        let put = Wqe::write(far.remote(0), near.local(0, len as u32)).expect("a length");
        let at = a.qp.go(put);
        assert!(until(&a, &b, || a.qp.completion(at).is_some()));
        assert!(far.bytes(0, len) == bytes);
        near.fill(0, &vec![0; len]);
        let get = Wqe::read(far.remote(0), near.local(0, len as u32)).expect("a length");
        let at = a.qp.go(get);
        assert!(until(&a, &b, || a.qp.completion(at).is_some()));
        assert!(near.bytes(0, len) == bytes);
    }
}

/// Large messages are moved by few copies, in both roles and both directions.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn copies_are_large() {
    let (mut a, mut b) = pair("", &patient());
    let (here, there) = (Device::new(DEVICE, 2, true), Device::new(DEVICE, 2, true));
    let len = 2 << 20;
    let near = Place::new(&a.rig, Some((&here, 0)), len);
    let far = Place::new(&b.rig, Some((&there, 0)), len);
    let bytes = noise(&mut StdRng::seed_from_u64(1), len);
    near.fill(0, &bytes);
    let counted = |d: &Device| d.copies.swap(0, Ordering::Relaxed);
    let at =
        a.qp.go(Wqe::write(far.remote(0), near.local(0, len as u32)).expect("a length"));
    assert!(until(&a, &b, || a.qp.completion(at).is_some()));
    assert!(far.bytes(0, len) == bytes);
    // 2,048 packets: 8 pieces are fetched; what arrives in one round is one copy.
    let fetched = counted(&here);
    let written = counted(&there);
    assert_eq!(fetched, 8);
    assert!(
        (8..700).contains(&written),
        "{written} copies of 2,048 packets"
    );

    near.fill(0, &vec![0; len]);
    let at =
        a.qp.go(Wqe::read(far.remote(0), near.local(0, len as u32)).expect("a length"));
    assert!(until(&a, &b, || a.qp.completion(at).is_some()));
    assert!(near.bytes(0, len) == bytes);
    // A READ is asked for in pieces of a quarter of the window.
    let (stored, fetched) = (counted(&here), counted(&there));
    let pieces = len as u64 / (u64::from(Config::default().window) / 4 * 1024);
    assert_eq!(fetched, pieces);
    assert!(
        (8..700).contains(&stored),
        "{stored} copies of 2,048 packets"
    );

    let first = b.qp.post_receive(&[far.local(0, len as u32)]);
    far.fill(0, &vec![0; len]);
    let at =
        a.qp.go(Wqe::send(near.local(0, len as u32)).expect("a length"));
    assert!(until(&a, &b, || a.qp.completion(at).is_some()));
    assert!(far.bytes(0, len) == bytes);
    assert_eq!(b.qp.received(first).map(|r| r.byte_cnt), Some(len as u32));
    assert_eq!(counted(&here), 8);
}

/// A put to the device and a signal in host memory behind it; and the other way round, and a message: in this order for whoever looks.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn signals_follow_what_they_announce() {
    for ordered in [true, false] {
        let (mut a, b) = pair("", &patient());
        let device = Device::new(DEVICE, 5, ordered);
        let src = a.rig.region(8192);
        let data = Place::new(&b.rig, Some((&device, 0)), 8192);
        let flags = [
            Place::new(&b.rig, None, 64),
            Place::new(&b.rig, Some((&device, 8192)), 64),
        ];
        // Whoever looks on the device, between two copies, sees the data with the flag that announces it.
        let early = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&early);
        device.watch(move |memory| {
            let flag = u64::from_le_bytes(memory[8192..8200].try_into().expect("eight"));
            // What comes later is larger.
            if memory[8..8192].iter().any(|byte| *byte < flag as u8) {
                seen.store(true, Ordering::Relaxed);
            }
        });
        for round in 1..=20u64 {
            for (i, flag) in flags.iter().enumerate() {
                let value = round * 4 + i as u64;
                src.fill(0, &vec![value as u8; 8192]);
                a.qp.post(&Wqe::write(data.remote(0), src.local(0, 8192)).expect("a length"));
                let signal = match round % 3 {
                    0 => Wqe::write_inline(flag.remote(0), &value.to_le_bytes()),
                    1 => Wqe::fetch_add(flag.remote(0), src.local(0, 8), value - flag.word(0)),
                    // As long as an inline payload may be, in steps.
                    _ => {
                        src.set_u64(0, value);
                        Wqe::write(flag.remote(0), src.local(0, 8))
                    }
                };
                if round % 3 == 1 {
                    // The result goes elsewhere than the payload.
                    src.fill(0, &vec![value as u8; 8192]);
                }
                let expected = match round % 3 {
                    2 => {
                        let mut bytes = vec![value as u8; 8192];
                        bytes[..8].copy_from_slice(&value.to_le_bytes());
                        bytes
                    }
                    _ => vec![value as u8; 8192],
                };
                let sink = a.rig.region(8);
                let signal = match round % 3 {
                    1 => Wqe::fetch_add(flag.remote(0), sink.local(0, 8), value - flag.word(0)),
                    _ => signal,
                };
                let at = a.qp.go(signal.expect("valid"));
                assert!(until(&a, &b, || {
                    let seen = flag.word(0);
                    assert!(
                        seen != value || data.bytes(0, 8192) == expected,
                        "the signal came first"
                    );
                    seen == value
                }));
                assert!(until(&a, &b, || a.qp.completion(at).is_some()));
            }
        }
        assert!(
            !early.load(Ordering::Relaxed),
            "on the device the signal came first"
        );
    }
}

/// Short WRITEs may each be a signal, so each comes after the one before; and yet those that wait are one submission to the copy engine, not
/// one each: a GPU that is busy with another process takes milliseconds for a submission, whatever is in it.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn short_writes_go_together_and_in_order() {
    const WRITES: u64 = 60;
    let (mut a, b) = pair("", &patient());
    let device = Device::new(DEVICE, 3, true);
    let src = a.rig.region(8 * WRITES as usize);
    let far = Place::new(&b.rig, Some((&device, 0)), 4096);
    // Between two copies, words are there up to some number and none from there on.
    let early = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&early);
    device.watch(move |memory| {
        let there = |i: u64| memory[8 * i as usize] != 0;
        let first = (0..WRITES).take_while(|i| there(*i)).count() as u64;
        seen.fetch_or((first..WRITES).any(there), Ordering::Relaxed);
    });
    device.stuck.store(true, Ordering::Relaxed);
    let mut last = 0;
    for i in 0..WRITES {
        src.set_u64(8 * i as usize, i + 1);
        last =
            a.qp.go(Wqe::write(far.remote(8 * i), src.local(8 * i, 8)).expect("a length"));
        a.rig.driver.poll();
        b.rig.driver.poll();
    }
    // All have come; none is acknowledged.
    let arrived = |side: &Side| {
        let counted = side.qp.hca_qp().roce_counters(PATIENCE).expect("alive");
        counted.expect("connected").rx_write_requests
    };
    assert!(until(&a, &b, || arrived(&b) == WRITES));
    assert_eq!((device.batches(), a.qp.completion(0)), (16, None));
    device.stuck.store(false, Ordering::Relaxed);
    assert!(until(&a, &b, || a.qp.completion(last).is_some()));
    assert!((0..WRITES).all(|i| far.word(8 * i as usize) == i + 1));
    assert!(
        !early.load(Ordering::Relaxed),
        "a later one was there first"
    );
    // Four alone, and this engine takes four copies at a time.
    let (copies, batches) = (device.copies.load(Ordering::Relaxed), device.batches());
    assert_eq!((copies, batches), (WRITES, 4 + (WRITES - 4) / 4));
}

/// Nothing is acknowledged before it is there, and nothing moves on without it.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn completions_wait_for_the_device() {
    // Nine seconds until the first: that nothing is sent again must not depend on how long the rounds below take on a busy machine.
    let config = Config {
        timeout: 26,
        ..Config::default()
    };
    let (mut a, mut b) = pair("", &config);
    let (here, there) = (Device::new(DEVICE, 0, true), Device::new(DEVICE, 0, true));
    let (host, near) = (a.rig.region(64), Place::new(&a.rig, Some((&here, 0)), 64));
    let far = Place::new(&b.rig, Some((&there, 0)), 4096);
    let rounds = |a: &Side, b: &Side| {
        for _ in 0..2_000 {
            a.rig.driver.poll();
            b.rig.driver.poll();
        }
    };
    // The target's engine hangs: a WRITE, a message behind it, an atomic behind both.
    there.stuck.store(true, Ordering::Relaxed);
    let receive = b.qp.post_receive(&[far.local(64, 64)]);
    let next = b.qp.post_receive(&[far.local(128, 64)]);
    let put =
        a.qp.go(Wqe::write(far.remote(0), host.local(0, 64)).expect("a length"));
    a.qp.go(Wqe::send(host.local(0, 64)).expect("a length"));
    let sent = a.qp.go(Wqe::send_inline(b"second").expect("short"));
    let added =
        a.qp.go(Wqe::fetch_add(far.remote(256), near.local(0, 8), 3).expect("valid"));
    rounds(&a, &b);
    assert_eq!(a.qp.completion(put), None);
    assert!(b.qp.received(receive).is_none());
    there.stuck.store(false, Ordering::Relaxed);
    assert!(until(&a, &b, || a.qp.completion(sent).is_some()));
    assert_eq!(b.qp.received(receive).map(|r| r.byte_cnt), Some(64));
    assert_eq!(b.qp.received(next).map(|r| r.byte_cnt), Some(6));
    assert_eq!(far.bytes(128, 6), b"second");
    // The result of the atomic is on its way to a device too.
    here.stuck.store(true, Ordering::Relaxed);
    assert!(until(&a, &b, || far.word(256) == 3));
    let read =
        a.qp.go(Wqe::read(far.remote(256), near.local(8, 8)).expect("a length"));
    rounds(&a, &b);
    assert!(a.qp.completion(read).is_none());
    here.stuck.store(false, Ordering::Relaxed);
    assert!(until(&a, &b, || a.qp.completion(read).is_some()));
    a.qp.wait(&a.rig, added);
    assert_eq!((near.word(0), near.word(8)), (0, 3));
    let counted = a.qp.hca_qp().roce_counters(PATIENCE).expect("alive");
    assert_eq!(counted.expect("connected").retransmitted_packets, 0);
}

/// One WQE whose bytes lie in both kinds of memory.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn pieces_of_both_kinds_are_one_message() {
    let (mut a, b) = pair("", &patient());
    let device = Device::new(DEVICE, 3, false);
    let (host, near) = (
        a.rig.region(3000),
        Place::new(&a.rig, Some((&device, 0)), 3000),
    );
    let far = b.rig.region(6000);
    let bytes = noise(&mut StdRng::seed_from_u64(2), 6000);
    for round in 0..20u64 {
        let (cut, rest) = (150 * round as usize, 3000 - 150 * round as usize);
        host.fill(0, &bytes[..3000]);
        near.fill(0, &bytes[3000..]);
        for opcode in [Opcode::RdmaWrite, Opcode::RdmaRead] {
            let at = a.qp.pi;
            let qpn = a.qp.hca_qp().qpn();
            // Device, host, device; host first; and so on.
            let pieces = [
                near.local(0, cut as u32),
                host.local(0, 3000),
                near.local(cut as u64, rest as u32),
            ];
            let pieces: Vec<Local> = pieces.into_iter().filter(|p| p.len > 0).collect();
            let mut chunks = vec![
                seg::ctrl(at as u16, opcode, 0, qpn, 2 + pieces.len() as u8, 0x08, 0),
                seg::raddr(0, far.key()),
            ];
            chunks.extend(pieces.iter().map(|p| seg::data(p.len, p.key, p.addr)));
            if opcode == Opcode::RdmaRead {
                host.fill(0, &[0; 3000]);
                near.fill(0, &[0; 3000]);
            }
            a.qp.post_chunks(&chunks, chunks.len().div_ceil(4) as u64);
            a.qp.ring();
            assert!(until(&a, &b, || a.qp.completion(at).is_some()));
            let expected = [
                &bytes[3000..3000 + cut],
                &bytes[..3000],
                &bytes[3000 + cut..],
            ];
            assert!(far.bytes(0, 6000) == expected.concat());
            assert!(host.bytes(0, 3000) == bytes[..3000]);
            assert!(near.bytes(0, 3000) == bytes[3000..]);
        }
    }
}

/// What the engine of either end refuses or fails is told to both.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn failures_are_told_to_both_ends() {
    let remote = (QpState::Error, Fault::RemoteOperational);
    let local = (QpState::Error, Fault::DmaFailed);
    for good in [0, 1, 3] {
        for what in 0..6 {
            let (mut a, mut b) = pair("", &patient());
            let (here, there) = (Device::new(DEVICE, 1, true), Device::new(DEVICE, 1, true));
            let (host, near) = (
                a.rig.region(64),
                Place::new(&a.rig, Some((&here, 0)), 1 << 20),
            );
            let far = Place::new(&b.rig, Some((&there, 0)), 1 << 20);
            b.qp.post_receive(&[far.local(0, 4096)]);
            b.qp.post_receive(&[far.local(0, 4096)]);
            // Each in its turn is well so often before.
            let wqe = |i: u64| match what {
                0 => Wqe::write(far.remote(64 * i), host.local(0, 64)),
                1 => Wqe::read(far.remote(64 * i), host.local(0, 64)),
                2 => Wqe::fetch_add(far.remote(64 * i), host.local(0, 8), 1),
                3 => Wqe::send(host.local(0, 64)),
                4 => Wqe::write(far.remote(64 * i), near.local(0, 64)),
                _ => Wqe::read(far.remote(64 * i), near.local(0, 64)),
            };
            let theirs = what < 4;
            let broken = if theirs { &there } else { &here };
            // An atomic is two copies.
            let batches = if what == 2 { 2 * good } else { good };
            let well = if what == 3 { good.min(2) } else { good };
            broken.good.store(
                if what == 3 { batches.min(2) } else { batches },
                Ordering::Relaxed,
            );
            let mut last = 0;
            for i in 0..=well {
                if what == 3 && i == 2 {
                    b.qp.post_receive(&[far.local(0, 4096)]);
                }
                last = a.qp.go(wqe(i).expect("valid"));
                if i < well {
                    assert!(until(&a, &b, || a.qp.completion(last).is_some()));
                    a.qp.wait(&a.rig, last);
                }
            }
            assert!(
                until(&a, &b, || a.qp.state() == QpState::Error
                    && (!theirs || b.qp.state() == QpState::Error)),
                "case {what} after {good}: {:?} {:?}",
                a.qp.state(),
                b.qp.state()
            );
            let seen = |qp: &MockQp| (qp.state(), qp.error_word());
            let ((_, here), (_, there)) = (seen(&a.qp), seen(&b.qp));
            let (expected, at) = if theirs {
                (remote, last)
            } else {
                (local, last)
            };
            assert_eq!(
                (here.syndrome(), here.vendor(), here.wqe_index()),
                (expected.1.syndrome().0, expected.1.vendor().0, at as u16),
                "case {what} after {good}"
            );
            if theirs {
                assert_eq!(
                    there.vendor(),
                    local.1.vendor().0,
                    "case {what} after {good}"
                );
            }
        }
    }
}

/// A queue pair that is reset, fails or goes while copies are under way: they end by themselves, memory is kept until they have, buffers come
/// back, and the next life is as good as the first.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn resets_in_the_middle_lose_nothing() {
    let config = Config {
        timeout: 8,
        retry_cnt: 1,
        ..Config::default()
    };
    let (mut a, mut b) = (Side::new(""), Side::new(""));
    let (here, there) = (Device::new(DEVICE, 1, true), Device::new(DEVICE, 1, true));
    let len = 1 << 20;
    let bytes = noise(&mut StdRng::seed_from_u64(3), len);
    for lap in 0..24 {
        let near = Place::new(&a.rig, Some((&here, 0)), len);
        let far = Place::new(&b.rig, Some((&there, 0)), len);
        near.fill(0, &bytes);
        a.connect(&b, config.clone());
        b.connect(&a, config.clone());
        let wqe = match lap % 3 {
            0 => Wqe::write(far.remote(0), near.local(0, len as u32)),
            1 => Wqe::read(far.remote(0), near.local(0, len as u32)),
            _ => Wqe::fetch_add(far.remote(0), near.local(0, 8), 1),
        };
        a.qp.go(wqe.expect("a length"));
        for _ in 0..lap {
            a.rig.driver.poll();
            b.rig.driver.poll();
        }
        // Copies that were begun hang; the queue pairs go meanwhile.
        here.stuck.store(true, Ordering::Relaxed);
        there.stuck.store(true, Ordering::Relaxed);
        for _ in 0..20 {
            a.rig.driver.poll();
            b.rig.driver.poll();
        }
        if lap % 2 == 0 {
            a.qp.hca_qp()
                .fail(Fault::Destroyed, PATIENCE)
                .expect("fail");
        }
        a.qp.reset();
        b.qp.reset();
        let free = here.batches_under_way() == 0;
        let Place::Device(mr, ..) = near else {
            unreachable!("made above")
        };
        let gone = mr.deregister(Duration::from_millis(20));
        assert!(
            free || matches!(gone, Err(HcaError::StillInUse { .. })),
            "memory was let go under a copy"
        );
        here.stuck.store(false, Ordering::Relaxed);
        there.stuck.store(false, Ordering::Relaxed);
        assert!(until(&a, &b, || here.batches_under_way()
            + there.batches_under_way()
            == 0));
    }
    // Every buffer is back: as much as there was at first can be moved at a time.
    a.connect(&b, patient());
    b.connect(&a, patient());
    let near = Place::new(&a.rig, Some((&here, 0)), len);
    let far = Place::new(&b.rig, Some((&there, 0)), len);
    near.fill(0, &bytes);
    let at =
        a.qp.go(Wqe::write(far.remote(0), near.local(0, len as u32)).expect("a length"));
    assert!(until(&a, &b, || a.qp.completion(at).is_some()));
    assert!(far.bytes(0, len) == bytes);
}

/// More queue pairs than there are buffers, all with large messages from a device, one of them to a receiver that posts no receive for long:
/// the others go on.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn who_waits_for_a_receive_keeps_no_buffers_from_others() {
    let (a, mut b) = (Side::new(""), Side::new(""));
    let device = Device::new(DEVICE, 1, true);
    let len: u32 = 1 << 20;
    let near = Place::new(&a.rig, Some((&device, 0)), len as usize);
    let far = b.rig.region(len as usize);
    // 32 large buffers, four for each: twelve that wait would have more than all of them.
    let mut waiting = Vec::new();
    let config = Config {
        min_rnr_timer: 20,
        rnr_retry: 7,
        ..patient()
    };
    for _ in 0..12 {
        let options = Options {
            receive: true,
            ..Options::default()
        };
        let (one, other) = (a.rig.qp_with(options), b.rig.qp_with(options));
        let mut one = Side {
            rig: Rig::new(),
            port: a.port.clone(),
            qp: one,
        };
        let other = Side {
            rig: Rig::new(),
            port: b.port.clone(),
            qp: other,
        };
        one.connect(&other, config.clone());
        other.connect(&one, config.clone());
        let at = one.qp.go(Wqe::send(near.local(0, len)).expect("a length"));
        waiting.push((one, other, at));
    }
    until(&a, &b, || {
        let refused = |s: &(Side, Side, u64)| {
            let counted = s.0.qp.hca_qp().roce_counters(PATIENCE).expect("alive");
            counted.expect("connected").rnr_nak_retry_err > 0
        };
        waiting.iter().all(refused)
    });
    let mut last = a;
    last.connect(&b, patient());
    b.connect(&last, patient());
    let at = last.qp.go(Wqe::write(
        Remote {
            addr: 0,
            key: far.key(),
        },
        near.local(0, len),
    )
    .expect("a length"));
    assert!(until(&last, &b, || last.qp.completion(at).is_some()));
    // And they end well, when their receives come.
    for (_, other, _) in &mut waiting {
        other.qp.post_receive(&[far.local(0, len)]);
    }
    for (one, other, at) in &waiting {
        assert!(until(&last, &b, || one.qp.completion(*at).is_some()));
        assert!(other.qp.received(0).is_some());
    }
    b.qp.post_receives(1);
}

/// On an Unreliable Connection too, into and out of a device.
#[test]
#[cfg_attr(miri, ignore = "sockets")]
fn unreliable_connections_use_devices_too() {
    let config = Config {
        transport: Transport::Uc,
        ..patient()
    };
    let (mut a, mut b) = pair("", &config);
    let (here, there) = (Device::new(DEVICE, 4, true), Device::new(DEVICE, 4, true));
    let near = Place::new(&a.rig, Some((&here, 0)), 8192);
    let far = Place::new(&b.rig, Some((&there, 0)), 8192);
    let bytes = noise(&mut StdRng::seed_from_u64(4), 8192);
    near.fill(0, &bytes);
    let first = b.qp.post_receive(&[far.local(0, 4096)]);
    b.qp.post_receive(&[]);
    a.qp.go(Wqe::send(near.local(0, 4096)).expect("a length"));
    let remote = far.remote(4096);
    a.qp.go(Wqe::write_imm(remote, near.local(4096, 4096), 9).expect("a length"));
    assert!(until(&a, &b, || b.qp.received(first + 1).is_some()));
    assert!(far.bytes(0, 8192) == bytes);
    let kinds = [first, first + 1].map(|r| b.qp.received(r).and_then(|r| r.tail.kind()));
    assert_eq!(
        kinds,
        [Some(Kind::ResponderSend), Some(Kind::ResponderWriteImm)]
    );
}
