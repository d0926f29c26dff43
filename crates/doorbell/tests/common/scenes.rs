//! What kernels do in the tests, on whichever GPU.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file includes this and uses a part of it"
)]

use doorbell::params::{self, op, sharing};
use doorbell::{Dims, ExportLayout, Place, Qp, Ready, connect_pair, export_array};

use crate::common::{Bench, read};

/// Puts of every size arrive whole and touch nothing else.
pub fn every_size(b: &Bench) {
    let qp = b.qp();
    let export = qp.export().unwrap();
    for size in [0, 1, 3, 8, 15, 16, 63, 64, 65, 4095, 4096, 40_001] {
        b.target.memory().fill(0xee).unwrap();
        let mut put = b.rate(&export, size as u64);
        put.remote.addr += 5;
        let status = b.run("put_bw", Dims::new(1, 1), &put);
        assert_eq!(status[0].error, 0, "{size} bytes");
        assert_eq!(read(&b.target, 0, 5), [0xee; 5]);
        assert_eq!(
            read(&b.target, 5, size),
            read(&b.source, 0, size),
            "{size} bytes"
        );
        assert_eq!(read(&b.target, 5 + size, 8), [0xee; 8], "{size} bytes");
    }
}

/// Inline values, gets, signals, atomics.
pub fn values(b: &Bench) {
    let qp = b.qp();
    let export = qp.export().unwrap();
    // GPU memory comes as its last owner left it.
    b.target.memory().fill(0).unwrap();
    let one = Dims::new(1, 1);
    let run = |kernel, params: &params::Rate| {
        let status = b.run(kernel, one, params);
        assert_eq!(
            (status[0].error, status[0].completed),
            (0, params.iters),
            "{kernel}"
        );
    };
    // Inline values: the message's number, in order, the last one stays.
    run(
        "put_bw",
        &params::Rate {
            op: op::PUT_VALUE,
            iters: 7,
            ..b.rate(&export, 8)
        },
    );
    assert_eq!(b.target.memory().load(0).unwrap(), 7);
    // A get turns the direction round.
    b.target.write(0, b"target's own bytes").unwrap();
    run("get_bw", &b.rate(&export, 18));
    assert_eq!(read(&b.source, 0, 18), b"target's own bytes");
    // A signal after each put.
    let signal = b.target.addr() + 4096;
    let signalled = params::Rate {
        op: op::PUT_SIGNAL,
        iters: 9,
        signal,
        signal_key: b.target.key(),
        ..b.rate(&export, 64)
    };
    run("put_bw", &signalled);
    assert_eq!(b.target.memory().load(4096).unwrap(), 9);
    // Old values of fetch and add come back.
    b.target.memory().store(0, 100).unwrap();
    run(
        "atomic_rate",
        &params::Rate {
            iters: 5,
            ..b.rate(&export, 8)
        },
    );
    assert_eq!(b.target.memory().load(0).unwrap(), 105);
    assert_eq!(b.source.memory().load(0).unwrap(), 104);
    qp.check().unwrap();
}

/// `iters` messages of `threads` threads in `blocks` blocks, each thread to a part of its own.
pub fn many(b: &Bench, qps: &[&Qp<Ready>], dims: Dims, mode: u32, batch: u32) {
    const SIZE: u64 = 16;
    const PLACES: u64 = 8;
    let export = export_array(qps, ExportLayout::Spread).unwrap();
    b.target.memory().fill(0).unwrap();
    let mut put = params::Rate {
        sharing: mode,
        batch,
        iters: 200,
        ..b.rate(&export, SIZE)
    };
    for area in [&mut put.local, &mut put.remote] {
        area.stride = SIZE * PLACES;
        area.mask = PLACES as u32 - 1;
    }
    if mode == sharing::EXCLUSIVE {
        put.flags |= params::flags::QP_BY_THREAD;
    }
    let status = b.run("put_bw", dims, &put);
    assert!(
        status.iter().all(|s| (s.error, s.completed) == (0, 200)),
        "{status:?}"
    );
    let bytes = (dims.total() * SIZE * PLACES) as usize;
    assert_eq!(read(&b.target, 0, bytes), read(&b.source, 0, bytes));
    let wqes: u64 = qps.iter().map(|q| q.counters().wqes).sum();
    assert_eq!(wqes, 200 * dims.total());
    for qp in qps {
        qp.check().unwrap();
    }
}

/// A random mixture whose outcome is known.
pub fn hammer(b: &Bench, qps: &[&Qp<Ready>], dims: Dims, mode: u32, iters: u64) {
    let export = export_array(qps, ExportLayout::Spread).unwrap();
    b.target.memory().fill(0).unwrap();
    let threads = dims.total();
    assert!(threads * 64 * 8 <= b.source.len() as u64);
    let p = params::Hammer {
        qps: export.table_addr(),
        qp_count: export.len() as u32,
        sharing: mode,
        iters,
        words: b.target.addr(),
        signal: b.target.addr() + threads * 8,
        sink: b.target.addr() + threads * 8 + 8,
        key: b.target.key(),
        source_key: b.source.key(),
        source: b.source.memory().device_addr(),
        source_addr: b.source.addr(),
        status: b.status.device_addr(),
        deadline_ns: 25_000_000_000,
        seed: 42,
    };
    let status = b.run("hammer", dims, &p);
    assert!(
        status.iter().all(|s| (s.error, s.posted) == (0, iters)),
        "{status:?}"
    );
    for t in 0..threads as usize {
        assert_eq!(b.target.memory().load(t * 8).unwrap(), iters, "thread {t}");
    }
    let signals: u64 = status.iter().map(|s| s.completed).sum();
    assert_eq!(
        b.target.memory().load(threads as usize * 8).unwrap(),
        signals
    );
}

/// The two ends of a ping-pong: messages in the first half of each region, signals in the second.
pub fn ping_pong(b: &Bench, kernel: &str, inline: u32, size: u64) {
    let new = || b.pd.qp().depth(16).build().unwrap();
    let (x, y) = connect_pair(new(), new()).unwrap();
    let export = export_array(&[&x, &y], ExportLayout::Spread).unwrap();
    let samples = b.device.alloc(Place::Host, 8 * 100).unwrap();
    let end = |i: usize, sends: usize, receives: usize| params::End {
        qp: export.handle_of(i),
        send: b.source.memory().device_addr() + sends as u64,
        send_addr: b.source.addr() + sends as u64,
        remote_addr: b.target.addr() + receives as u64,
        signal_addr: b.target.addr() + 4096 + receives as u64,
        recv: b.target.memory().device_addr() + sends as u64,
        signal: b.target.memory().device_addr() + 4096 + sends as u64,
        send_key: b.source.key(),
        remote_key: b.target.key(),
        signal_key: b.target.key(),
        reserved: 0,
        samples: if i == 0 { samples.device_addr() } else { 0 },
        status: b.status.device_addr() + 32 * i as u64,
    };
    let p = params::Latency {
        ends: [end(0, 0, 2048), end(1, 2048, 0)],
        first: 0,
        inline,
        size,
        iters: 100,
        deadline_ns: 25_000_000_000,
    };
    let blocks = if kernel == "get_lat" { 1 } else { 2 };
    b.target.memory().fill(0).unwrap();
    let status = b.run(kernel, Dims::new(blocks, 1), &p);
    assert!(
        status.iter().all(|s| (s.error, s.completed) == (0, 100)),
        "{kernel}: {status:?}"
    );
    assert_ne!(
        samples.load(8 * 99).unwrap(),
        0,
        "{kernel}: the last round has its time"
    );
}
