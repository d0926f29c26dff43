//! Work requests that fail: what the kernel sees, what the host sees, and the way back.

mod common;

use std::time::Duration;

use common::{Bench, LONG, caller_driven, device, read, status};
use doorbell::device_api::{Error as DeviceError, Failure};
use doorbell::{
    Access, AsyncError, Dims, Error, ErrorKind, Export, Memory, Place, Qp, QpState, Syndrome,
    Vendor, params,
};

const ONE: Dims = Dims::new(1, 1);

fn bench() -> Bench {
    Bench::new(device(), Place::Gpu, 1 << 16)
}

/// What the kernel's status says, as the error that it got.
fn failure(s: &params::Status) -> Failure {
    DeviceError::from_code(s.error).expect("an error").failure()
}

/// Runs a put that is to fail as `want`, and checks that kernel, host and event agree. Returns the QP.
fn fails_as(b: &Bench, spoil: impl FnOnce(&mut params::Rate), want: (Syndrome, Vendor)) -> Qp {
    let qp = b.qp();
    let export = qp.export().unwrap();
    let mut put = b.rate(&export, 64);
    put.iters = 3;
    spoil(&mut put);
    let s = b.run("put_bw", ONE, &put);
    let Failure::Completion {
        syndrome,
        vendor,
        wqe_index,
    } = failure(&s[0])
    else {
        panic!("{s:?}")
    };
    assert_eq!(
        (Syndrome(syndrome), Vendor(vendor), wqe_index),
        (want.0, want.1, 0)
    );
    let fault = qp.error().expect("the host sees it too");
    assert_eq!(
        (fault.kind(), fault.syndrome(), fault.vendor()),
        (ErrorKind::Completion, want.0, want.1)
    );
    assert_eq!((fault.wqe_index(), qp.state()), (0, QpState::Error));
    assert_eq!(export.device_error(0).unwrap(), Some(fault));
    match qp.check() {
        Err(Error::Qp { qpn, fault: f }) => assert_eq!((qpn, f), (qp.qpn(), fault)),
        other => panic!("{other:?}"),
    }
    match b.device.next_error(LONG) {
        Some(AsyncError::Qp { qpn, fault: f }) => assert_eq!((qpn, f), (qp.qpn(), fault)),
        other => panic!("{other:?}"),
    }
    assert!(
        read(&b.target, 0, b.target.len()).iter().all(|&b| b == 0),
        "nothing was written"
    );
    drop(export);
    qp
}

#[test]
fn bad_keys_ranges_and_rights_are_reported_alike_to_kernel_and_host() {
    let b = bench();
    fails_as(
        &b,
        |p| p.remote.key ^= 0x5555_0000,
        (Syndrome::REMOTE_ACCESS, Vendor::BAD_RKEY),
    );
    fails_as(
        &b,
        |p| p.local.key ^= 0x5555_0000,
        (Syndrome::LOCAL_PROT, Vendor::BAD_LKEY),
    );
    fails_as(
        &b,
        |p| p.remote.addr += 1 << 16,
        (Syndrome::REMOTE_ACCESS, Vendor::RKEY_RANGE),
    );
    fails_as(
        &b,
        |p| p.local.addr -= 1,
        (Syndrome::LOCAL_PROT, Vendor::LKEY_RANGE),
    );
    let read_only =
        b.pd.register(b.target.memory(), Access::REMOTE_READ)
            .unwrap();
    fails_as(
        &b,
        |p| p.remote.key = read_only.key(),
        (Syndrome::REMOTE_ACCESS, Vendor::RKEY_ACCESS),
    );
    let stranger = b
        .device
        .pd()
        .unwrap()
        .register(b.target.memory(), Access::ALL)
        .unwrap();
    fails_as(
        &b,
        |p| p.remote.key = stranger.key(),
        (Syndrome::REMOTE_ACCESS, Vendor::PD_MISMATCH),
    );
}

#[test]
fn a_deregistered_region_is_revoked_at_once() {
    let b = bench();
    let memory = b.device.alloc(Place::Gpu, 4096).unwrap();
    let mr = b.pd.register(&memory, Access::ALL).unwrap();
    let (addr, key) = (mr.addr(), mr.key());
    let back = mr.deregister(LONG).unwrap();
    assert_eq!(back.device_addr(), memory.device_addr());
    let area = params::Area {
        addr,
        key,
        ..Default::default()
    };
    fails_as(
        &b,
        |p| p.remote = area,
        (Syndrome::REMOTE_ACCESS, Vendor::REVOKED),
    );
    // Memory and region gone altogether: the same, and nothing is touched.
    let mr =
        b.pd.register(&b.device.alloc(Place::Gpu, 4096).unwrap(), Access::ALL)
            .unwrap();
    let area = params::Area {
        addr: mr.addr(),
        key: mr.key(),
        ..Default::default()
    };
    drop(mr);
    fails_as(
        &b,
        |p| p.remote = area,
        (Syndrome::REMOTE_ACCESS, Vendor::REVOKED),
    );
}

#[test]
fn a_failed_queue_pair_refuses_posts_until_it_is_reset_and_reconnected() {
    let b = bench();
    let qp = b.qp();
    let export = qp.export().unwrap();
    let good = b.rate(&export, 64);
    let bad = params::Rate {
        remote: params::Area {
            key: 1,
            ..good.remote
        },
        ..good
    };
    assert_eq!(b.run("put_bw", ONE, &good)[0].error, 0);
    let first = b.run("put_bw", ONE, &bad)[0].error;
    assert_ne!(first, 0);
    // Good work is refused at once with the first error, which is kept.
    let again = b.run("put_bw", ONE, &good);
    assert_eq!((again[0].error, again[0].posted), (first, 0));
    let fault = qp.error().unwrap();
    assert_eq!(
        fault.wqe_index(),
        1,
        "the second work request since the start"
    );

    let qp = qp.reset(LONG).unwrap();
    assert_eq!((qp.state(), qp.error()), (QpState::Reset, None));
    assert_eq!(export.device_error(0).unwrap(), None);
    let qp = qp.connect_to_self().unwrap();
    b.target.memory().fill(0).unwrap();
    assert_eq!(b.run("put_bw", ONE, &good)[0].error, 0);
    assert_eq!(read(&b.target, 0, 64), read(&b.source, 0, 64));
    assert_eq!(
        export.progress(0).unwrap().rung,
        1,
        "slots count from zero again"
    );
    qp.check().unwrap();
}

#[test]
fn what_was_never_connected_says_so() {
    let b = bench();
    let qp = b.pd.qp().depth(16).build().unwrap();
    assert_eq!(qp.state(), QpState::Reset);
    assert!(matches!(
        qp.check(),
        Err(Error::State {
            state: QpState::Reset,
            ..
        })
    ));
    let export = qp.export().unwrap();
    let s = b.run("put_bw", ONE, &b.rate(&export, 8));
    let Failure::Completion { vendor, .. } = failure(&s[0]) else {
        panic!("{s:?}")
    };
    assert_eq!(Vendor(vendor), Vendor::NOT_CONNECTED);
    assert!(
        qp.connect(&doorbell::Destination::Loopback { qpn: 0xff_ffff })
            .is_err()
    );
}

/// The parameters of a kernel that waits for a message that never comes.
fn waits(b: &Bench, export: &Export, line: &Memory) -> params::Forward {
    params::Forward {
        qp: export.handle(),
        line: line.device_addr(),
        answer_addr: b.target.addr(),
        answer: b.target.memory().device_addr(),
        answer_key: b.target.key(),
        reserved: 0,
        iters: 1,
        deadline_ns: 120_000_000_000,
        status: b.status.device_addr(),
    }
}

#[test]
fn failing_or_destroying_a_queue_pair_releases_its_kernels() {
    let b = bench();
    let line = b.device.alloc(Place::Host, 64).unwrap();
    for destroy in [false, true] {
        let qp = b.qp();
        let export = qp.export().unwrap();
        let mut launch = b.launch("forward", ONE, &waits(&b, &export, &line));
        assert!(
            launch.wait(Duration::from_millis(20)).is_err(),
            "a time-out leaves it running"
        );
        if destroy {
            qp.destroy(LONG).unwrap();
        } else {
            qp.fail().unwrap();
            assert_eq!(qp.error().unwrap().kind(), ErrorKind::Closed);
        }
        launch.wait(Duration::from_secs(60)).unwrap();
        assert_eq!(failure(&status(&b.status, 0)), Failure::Closed);
        assert_eq!(
            b.device.next_error(Duration::from_millis(1)),
            None,
            "the owner knows"
        );
    }
}

#[test]
fn an_abandoned_kernel_keeps_what_it_may_touch() {
    for device in [device(), caller_driven()] {
        let b = Bench::new(device, Place::Gpu, 1 << 16);
        let line = b.device.alloc(Place::Shared, 64).unwrap();
        let export = b.qp().export().unwrap();
        // It uses memory only, so nothing but an abort tells it to stop.
        let mut launch = b.launch("bare_echo", ONE, &waits(&b, &export, &line));
        // Everything that it uses goes, in the worst order; it still runs, and reads the line.
        let Bench {
            device,
            pd,
            source,
            target,
            status: words,
        } = b;
        drop((export, line, target, source, pd));
        assert!(launch.wait(Duration::from_millis(50)).is_err());
        launch.abort();
        assert!(launch.wait(LONG).is_err(), "it was aborted");
        assert_eq!(failure(&status(&words, 0)), Failure::Aborted);
        drop(device);
    }
}

/// Where the exported queue pair rings.
fn doorbell_of(export: &Export) -> u64 {
    // SAFETY: on the host GPU an export lies in this process's memory, and no kernel is changing this constant.
    unsafe { (&raw const (*export.handle().qp).sq_db).read() }
}

#[test]
fn queue_memory_is_reused_only_when_no_kernel_runs() {
    let b = bench();
    let line = b.device.alloc(Place::Host, 64).unwrap();
    let qp = b.qp();
    let export = qp.export().unwrap();
    let mut launch = b.launch("bare_echo", ONE, &waits(&b, &export, &line));
    // Nothing that was exported may be handed out again while the kernel might hold a handle to it, its doorbell word included:
    // a late ring would fail whoever had it next.
    let (used, rung) = (export.qps_addr(), doorbell_of(&export));
    drop((export, qp));
    let new: Vec<_> = (0..4).map(|_| b.qp()).collect();
    let exports: Vec<_> = new.iter().map(|q| q.export().unwrap()).collect();
    assert!(exports.iter().all(|e| e.qps_addr() != used), "{used:#x}");
    assert!(exports.iter().all(|e| doorbell_of(e) != rung), "{rung:#x}");
    launch.abort();
    assert!(launch.wait(LONG).is_err());
    drop((exports, new));
    let again: Vec<_> = (0..9).map(|_| b.qp()).collect();
    let exports: Vec<_> = again.iter().map(|q| q.export().unwrap()).collect();
    assert!(
        exports.iter().any(|e| e.qps_addr() == used)
            && exports.iter().any(|e| doorbell_of(e) == rung),
        "and both are reused in the end"
    );
}

#[test]
fn a_launch_that_is_dropped_ends_and_lets_the_device_go() {
    let b = bench();
    let line = b.device.alloc(Place::Host, 64).unwrap();
    let export = b.qp().export().unwrap();
    drop(b.launch("bare_echo", ONE, &waits(&b, &export, &line)));
    assert_eq!(failure(&status(&b.status, 0)), Failure::Aborted);
}

#[test]
fn handles_may_be_dropped_in_any_order() {
    for order in 0..6 {
        let device = device();
        let pd = device.pd().unwrap();
        let memory = device.alloc(Place::Gpu, 4096).unwrap();
        let mr = pd.register(&memory, Access::ALL).unwrap();
        let qp = pd
            .qp()
            .depth(16)
            .companion(16)
            .build()
            .unwrap()
            .connect_to_self()
            .unwrap();
        let export = qp.export().unwrap();
        let mut all: Vec<Box<dyn std::any::Any>> = vec![
            Box::new(device),
            Box::new(pd),
            Box::new(memory),
            Box::new(mr),
            Box::new(qp),
            Box::new(export),
        ];
        all.rotate_left(order);
        if order % 2 == 1 {
            all.reverse();
        }
        for one in all {
            drop(one);
        }
    }
}

#[test]
fn garbage_in_the_ring_and_at_the_doorbell_fails_that_queue_pair_only() {
    let b = bench();
    let bystander = b.qp();
    let quiet = bystander.export().unwrap();
    let slots = b.device.alloc(Place::Host, 64 * 4).unwrap();
    // Slots of ones, a doorbell that jumps, a doorbell of another QP number.
    let cases: [(u8, u64); 3] = [(0xff, 1), (0x00, 100), (0x00, 1)];
    for (fill, pi) in cases {
        slots.fill(fill).unwrap();
        let qp =
            b.pd.qp()
                .depth(16)
                .build()
                .unwrap()
                .connect_to_self()
                .unwrap();
        let export = qp.export().unwrap();
        let number = if (fill, pi) == (0, 1) {
            qp.qpn() ^ 1
        } else {
            qp.qpn()
        };
        let word = u64::from(((pi as u32) << 8).to_be()) | u64::from((number << 8).to_be()) << 32;
        let raw = params::Raw {
            qp: export.handle(),
            slots: slots.device_addr(),
            count: 4,
            first: 0,
            word,
            record: (pi as u32 & 0xffff).to_be(),
            reserved: 0,
        };
        b.launch("raw_post", ONE, &raw).wait(LONG).unwrap();
        let event = b.device.next_error(LONG);
        assert!(
            matches!(event, Some(AsyncError::Qp { qpn, .. }) if qpn == qp.qpn()),
            "{event:?}"
        );
        assert_eq!(qp.state(), QpState::Error);
        assert_eq!(
            b.run("put_bw", ONE, &b.rate(&quiet, 64))[0].error,
            0,
            "the engine lives"
        );
        let qp = qp.reset(LONG).unwrap().connect_to_self().unwrap();
        assert_eq!(
            b.run("put_bw", ONE, &b.rate(&export, 64))[0].error,
            0,
            "and the queue pair can come back"
        );
        qp.check().unwrap();
    }
}

#[test]
fn arguments_that_cannot_be_are_refused_with_a_remedy() {
    let b = bench();
    for depth in [0, 3, 65_536] {
        let e = b.pd.qp().depth(depth).build().unwrap_err().to_string();
        assert!(
            e.contains(&depth.to_string()) && e.contains("power of two"),
            "{e}"
        );
    }
    assert!(
        b.device
            .alloc(Place::Host, 0)
            .unwrap_err()
            .to_string()
            .contains("0 bytes")
    );
    let m = b.device.alloc(Place::Shared, 100).unwrap();
    assert!(
        m.read(90, &mut [0; 20])
            .unwrap_err()
            .to_string()
            .contains("90")
    );
    assert!(m.write(usize::MAX, &[0]).is_err());
    assert!(m.load(4).unwrap_err().to_string().contains("multiple of 8"));
    let e = b
        .device
        .listen("/nonexistent/dir/socket")
        .unwrap_err()
        .to_string();
    assert!(e.contains("/nonexistent/dir/socket"), "{e}");
    // SAFETY: refused before anything is read.
    let e = unsafe { b.device.launch_bytes("no_such_kernel", ONE, &[]) }
        .unwrap_err()
        .to_string();
    assert!(e.contains("no_such_kernel") && e.contains("put_bw"), "{e}");
    let none: [&Qp; 0] = [];
    assert!(doorbell::export_array(&none, doorbell::ExportLayout::Packed).is_err());
    let other = Bench::new(device(), Place::Host, 4096);
    let (x, y) = (b.qp(), other.qp());
    assert!(
        doorbell::export_array(&[&x, &y], doorbell::ExportLayout::Spread)
            .unwrap_err()
            .to_string()
            .contains("another device")
    );
}
