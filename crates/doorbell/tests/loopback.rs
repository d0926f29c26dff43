//! Each operation, posted by kernels on the host GPU and executed by the software HCA; bytes and counts checked.

mod common;

use std::time::{Duration, Instant};

use common::{Bench, LONG, caller_driven, device, read};
use doorbell::params::{self, op, sharing};
use doorbell::{
    Access, CqKind, Device, Dims, ExportLayout, GpuSelect, Handler, Place, Qp, Ready, connect_pair,
    export_array,
};

fn bench() -> Bench {
    Bench::new(device(), Place::Gpu, 1 << 16)
}

#[test]
fn a_kernel_puts() {
    let b = bench();
    let qp = b.qp();
    let export = qp.export().unwrap();
    let status = b.run("put_bw", Dims::new(1, 1), &b.rate(&export, 1000));
    assert_eq!((status[0].error, status[0].completed), (0, 1));
    assert_eq!(read(&b.target, 0, 1000), read(&b.source, 0, 1000));
    assert_eq!(read(&b.target, 1000, 1), [0]);
    qp.check().unwrap();
    let c = qp.counters();
    assert_eq!((c.wqes, c.bytes), (1, 1000));
    let progress = export.progress(0).unwrap();
    assert_eq!(
        (
            progress.reserved,
            progress.ready,
            progress.rung,
            progress.completed
        ),
        (1, 1, 1, 1)
    );
}

#[test]
fn every_size_arrives_whole_and_touches_nothing_else() {
    let b = bench();
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

#[test]
fn values_gets_signals_and_atomics() {
    let b = bench();
    let qp = b.qp();
    let export = qp.export().unwrap();
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
fn many(b: &Bench, qps: &[&Qp<Ready>], dims: Dims, mode: u32, batch: u32) {
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

#[test]
fn every_handler_and_cq_carries_every_sharing_mode() {
    let b = bench();
    for handler in [Handler::Record, Handler::Only, Handler::Producer] {
        for cq in [CqKind::PerSlot, CqKind::Collapsed] {
            let qp = || {
                b.pd.qp()
                    .depth(32)
                    .handler(handler)
                    .cq(cq)
                    .build()
                    .unwrap()
                    .connect_to_self()
                    .unwrap()
            };
            many(&b, &[&qp()], Dims::new(1, 1), sharing::EXCLUSIVE, 1);
            many(&b, &[&qp()], Dims::new(1, 1), sharing::EXCLUSIVE, 5);
            many(&b, &[&qp()], Dims::new(1, 4), sharing::BLOCK, 3);
            many(&b, &[&qp()], Dims::new(3, 2), sharing::GPU, 1);
            let (x, y) = (qp(), qp());
            many(&b, &[&x, &y], Dims::new(2, 1), sharing::EXCLUSIVE, 32);
        }
    }
}

#[test]
fn emulated_warps_share_queue_pairs_by_the_lane() {
    let device = Device::builder()
        .gpu(GpuSelect::Host)
        .hca_cores(1)
        .emulate_warp(true)
        .open()
        .unwrap();
    let b = Bench::new(device, Place::Gpu, 1 << 16);
    let (x, y) = (b.qp(), b.qp());
    many(&b, &[&x], Dims::new(2, 32), sharing::GPU, 1);
    hammer(&b, &[&x, &y], Dims::new(2, 32), sharing::GPU, 60);
}

fn hammer(b: &Bench, qps: &[&Qp<Ready>], dims: Dims, mode: u32, iters: u64) {
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

#[test]
fn a_random_mixture_on_shared_queue_pairs_comes_out_as_expected() {
    let b = bench();
    let (x, y) = (b.qp(), b.qp());
    hammer(&b, &[&x, &y], Dims::new(3, 4), sharing::GPU, 500);
    let z =
        b.pd.qp()
            .depth(64)
            .cq(CqKind::PerSlot)
            .build()
            .unwrap()
            .connect_to_self()
            .unwrap();
    hammer(&b, &[&z], Dims::new(1, 6), sharing::BLOCK, 500);
}

#[test]
fn a_packed_array_is_what_foreign_device_code_indexes() {
    let b = bench();
    let qps: Vec<_> = (0..3).map(|_| b.qp()).collect();
    let refs: Vec<_> = qps.iter().collect();
    let export = export_array(&refs, ExportLayout::Packed).unwrap();
    for i in 0..3 {
        assert_eq!(
            export.handle_of(i).qp as u64,
            export.qps_addr() + 296 * i as u64
        );
    }
    let mut put = b.rate(&export, 8);
    put.local.stride = 8;
    put.remote.stride = 8;
    let status = b.run("put_bw", Dims::new(3, 1), &put);
    assert!(status.iter().all(|s| s.error == 0), "{status:?}");
    assert_eq!(read(&b.target, 0, 24), read(&b.source, 0, 24));
    assert!(qps.iter().all(|q| q.counters().wqes == 1));
}

#[test]
fn a_queue_pair_is_exported_once_at_a_time() {
    let b = bench();
    let qp = b.qp();
    let export = qp.export().unwrap();
    let refusal = qp.export().unwrap_err().to_string();
    assert!(refusal.contains("exported already"), "{refusal}");
    assert!(qp.export_host().is_err());
    drop(export);
    qp.export().unwrap();
}

/// The two ends of a ping-pong: messages in the first half of each region, signals in the second.
fn ping_pong(b: &Bench, kernel: &str, inline: u32, size: u64) {
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

#[test]
fn messages_go_back_and_forth() {
    let b = bench();
    ping_pong(&b, "put_lat", 1, 8);
    ping_pong(&b, "put_lat", 0, 8);
    ping_pong(&b, "put_lat", 0, 1024);
    ping_pong(&b, "signal_lat", 0, 64);
    ping_pong(&b, "get_lat", 0, 512);
}

#[test]
fn whoever_waits_can_run_the_engine() {
    let b = Bench::new(caller_driven(), Place::Host, 1 << 16);
    let qp = b.qp();
    many(&b, &[&qp], Dims::new(2, 2), sharing::GPU, 1);
    ping_pong(&b, "put_lat", 1, 8);
    assert_eq!(b.device.next_error(Duration::from_millis(1)), None);
}

#[test]
fn zero_based_regions_and_several_keys_for_one_memory() {
    let b = bench();
    let memory = b.target.memory();
    let zero =
        b.pd.register_with(memory, Access::ALL, doorbell::Addressing::Zero)
            .unwrap();
    let far =
        b.pd.register_with(memory, Access::ALL, doorbell::Addressing::At(1 << 60))
            .unwrap();
    assert_eq!((zero.addr(), far.addr()), (0, 1 << 60));
    assert_ne!(zero.key(), far.key());
    let qp = b.qp();
    let export = qp.export().unwrap();
    for (mr, offset) in [(&zero, 100), (&far, 200)] {
        let mut put = b.rate(&export, 32);
        put.remote = params::Area {
            addr: mr.addr() + offset,
            key: mr.key(),
            ..Default::default()
        };
        assert_eq!(b.run("put_bw", Dims::new(1, 1), &put)[0].error, 0);
        assert_eq!(read(&b.target, offset as usize, 32), read(&b.source, 0, 32));
    }
}

#[test]
fn several_cores_share_the_queue_pairs() {
    let device = Device::builder()
        .gpu(GpuSelect::Host)
        .hca_cores(2)
        .open()
        .unwrap();
    let b = Bench::new(device, Place::Gpu, 1 << 16);
    let qps: Vec<_> = (0..6).map(|_| b.qp()).collect();
    let cores: std::collections::BTreeSet<_> = qps.iter().filter_map(|q| q.core()).collect();
    assert_eq!(cores.into_iter().collect::<Vec<_>>(), [0, 1]);
    many(
        &b,
        &qps.iter().collect::<Vec<_>>(),
        Dims::new(6, 1),
        sharing::EXCLUSIVE,
        4,
    );
    let pinned = b.pd.qp().core(1).build().unwrap();
    assert_eq!(pinned.core(), Some(1));
    assert!(b.pd.qp().core(2).build().is_err());
}

#[test]
fn an_engine_that_is_given_time_idles_and_wakes() {
    let b = bench();
    let qp = b.qp();
    let export = qp.export().unwrap();
    // Longer than the engine spins and yields: the next doorbell meets a sleeper.
    std::thread::sleep(Duration::from_millis(30));
    let start = Instant::now();
    assert_eq!(
        b.run("put_bw", Dims::new(1, 1), &b.rate(&export, 8))[0].error,
        0
    );
    assert!(start.elapsed() < LONG);
}
