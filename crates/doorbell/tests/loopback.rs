//! Each operation, posted by kernels on the host GPU and executed by the software HCA; bytes and counts checked.

mod common;

use std::time::{Duration, Instant};

use common::scenes::{self, hammer, many, ping_pong};
use common::{Bench, LONG, caller_driven, device, read};
use doorbell::params::{self, sharing};
use doorbell::{
    Access, CqKind, Device, Dims, ExportLayout, GpuSelect, Handler, Place, export_array,
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
    scenes::every_size(&bench());
}

#[test]
fn values_gets_signals_and_atomics() {
    scenes::values(&bench());
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
