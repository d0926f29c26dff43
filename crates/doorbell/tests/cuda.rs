//! On an NVIDIA GPU: the same scenes as on host threads, with payloads in GPU memory too.
//!
//! Run with `cargo test -p doorbell --test cuda -- --ignored --test-threads 1`.

mod common;

use std::sync::OnceLock;
use std::time::Duration;

use common::scenes::{self, hammer, many, ping_pong};
use common::{Bench, LONG, read, status};
use doorbell::device_api::{Error as DeviceError, Failure};
use doorbell::params::{self, sharing};
use doorbell::{
    CqKind, Device, Dims, GpuSelect, Handler, Place, Proxy, ProxyConfig, QpState, Vendor,
};

const LEN: usize = 1 << 20;

/// One for all tests: assembling the kernels takes the driver longer than the tests.
fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let open = || {
        Device::builder()
            .gpu(GpuSelect::Cuda(None))
            .hca_cores(1)
            .open()
            .expect("a device on a CUDA GPU")
    };
    DEVICE.get_or_init(open).clone()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpu_every_operation_in_every_place() {
    let device = device();
    for place in [Place::Host, Place::Shared, Place::Gpu] {
        let b = Bench::new(device.clone(), place, LEN);
        scenes::every_size(&b);
        scenes::values(&b);
        ping_pong(&b, "get_lat", 0, 512);
        if place != Place::Gpu {
            // One device cannot copy within its own memory while a kernel waits for it, except through the host.
            ping_pong(&b, "put_lat", 1, 8);
            ping_pong(&b, "put_lat", 0, 1024);
            ping_pong(&b, "signal_lat", 0, 64);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpu_every_handler_and_sharing_mode() {
    let device = device();
    let b = Bench::new(device, Place::Host, LEN);
    for handler in [Handler::Record, Handler::Only, Handler::Producer] {
        for cq in [CqKind::PerSlot, CqKind::Collapsed] {
            let qp = |depth| {
                let qp =
                    b.pd.qp()
                        .depth(depth)
                        .handler(handler)
                        .cq(cq)
                        .build()
                        .unwrap();
                qp.connect_to_self().unwrap()
            };
            many(&b, &[&qp(64)], Dims::new(1, 1), sharing::EXCLUSIVE, 1);
            many(&b, &[&qp(64)], Dims::new(1, 1), sharing::EXCLUSIVE, 32);
            many(&b, &[&qp(256)], Dims::new(1, 64), sharing::BLOCK, 1);
            many(&b, &[&qp(1024)], Dims::new(8, 64), sharing::GPU, 1);
            let (x, y) = (qp(128), qp(128));
            hammer(&b, &[&x, &y], Dims::new(4, 64), sharing::GPU, 100);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpu_hammer_with_payloads_in_gpu_memory() {
    let b = Bench::new(device(), Place::Gpu, LEN);
    let (x, y) = (b.qp(), b.qp());
    hammer(&b, &[&x, &y], Dims::new(2, 64), sharing::GPU, 30);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpu_errors_reach_kernel_and_host_and_the_queue_pair_comes_back() {
    let b = Bench::new(device(), Place::Gpu, LEN);
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
    let one = Dims::new(1, 1);
    let s = b.run("put_bw", one, &bad);
    let fault = qp.error().expect("the host sees it");
    assert_eq!(fault.vendor(), Vendor::BAD_RKEY);
    assert_eq!(
        DeviceError::from_code(s[0].error),
        DeviceError::from_word(fault.word())
    );
    assert_eq!(export.device_error(0).unwrap(), Some(fault));
    assert_eq!(qp.state(), QpState::Error);
    let qp = qp.reset(LONG).unwrap().connect_to_self().unwrap();
    assert_eq!(b.run("put_bw", one, &good)[0].error, 0);
    assert_eq!(read(&b.target, 0, 64), read(&b.source, 0, 64));
    qp.check().unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpu_kernels_end_when_their_queue_pair_is_destroyed() {
    let b = Bench::new(device(), Place::Host, LEN);
    let line = b.device.alloc(Place::Host, 64).unwrap();
    let qp = b.qp();
    let export = qp.export().unwrap();
    let p = params::Forward {
        qp: export.handle(),
        line: line.device_addr(),
        answer_addr: b.target.addr(),
        answer: 0,
        answer_key: b.target.key(),
        reserved: 0,
        iters: 1,
        deadline_ns: 20_000_000_000,
        status: b.status.device_addr(),
    };
    let mut launch = b.launch("forward", Dims::new(1, 1), &p);
    assert!(launch.wait(Duration::from_millis(20)).is_err());
    qp.destroy(LONG).unwrap();
    launch.wait(LONG).unwrap();
    let error = DeviceError::from_code(status(&b.status, 0).error).unwrap();
    assert_eq!(error.failure(), Failure::Closed);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpu_abandoned_kernels_keep_what_they_may_touch() {
    let b = Bench::new(device(), Place::Gpu, LEN);
    let line = b.device.alloc(Place::Shared, 64).unwrap();
    let export = b.qp().export().unwrap();
    let p = params::Forward {
        qp: export.handle(),
        line: line.device_addr(),
        answer_addr: 0,
        answer: b.target.memory().device_addr(),
        answer_key: 0,
        reserved: 0,
        iters: 1,
        // Longer than the drop of a launch waits.
        deadline_ns: 4_000_000_000,
        status: b.status.device_addr(),
    };
    let launch = b.launch("bare_echo", Dims::new(1, 1), &p);
    let Bench {
        device,
        pd,
        source,
        target,
        status: words,
    } = b;
    drop((export, line, target, source, pd));
    drop(launch);
    // The kernel is still there, and ends by its own deadline; the device works meanwhile and afterwards.
    std::thread::sleep(Duration::from_secs(3));
    let error = DeviceError::from_code(status(&words, 0).error).expect("it has ended");
    assert_eq!(error.failure(), Failure::TimedOut);
    let b = Bench::new(device, Place::Host, LEN);
    let qp = b.qp();
    let export = qp.export().unwrap();
    assert_eq!(
        b.run("put_bw", Dims::new(1, 1), &b.rate(&export, 64))[0].error,
        0
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gpu_a_proxy_posts_for_kernels() {
    let b = Bench::new(device(), Place::Host, LEN);
    let qps: Vec<_> = (0..4).map(|_| b.qp()).collect();
    let config = ProxyConfig {
        depth: 256,
        threads: 2,
        cpus: Vec::new(),
        local_key: b.source.key(),
        remote_key: b.target.key(),
    };
    let proxy = Proxy::start(&b.device, &qps, &config).unwrap();
    let mut p = params::Proxy {
        ring: 0,
        pi: 0,
        ci_cache: 0,
        ci: 0,
        queues: 0,
        depth: 0,
        iters: 500,
        deadline_ns: 30_000_000_000,
        size: 32,
        local: b.source.addr(),
        remote: b.target.addr(),
        stride: 128,
        mask: 3,
        status: b.status.device_addr(),
        run_ns: 0,
    };
    proxy.fill(&mut p);
    let dims = Dims::new(8, 32);
    let s = b.run("proxy_put", dims, &p);
    assert!(
        s.iter().all(|s| (s.error, s.completed) == (0, 500)),
        "{s:?}"
    );
    let bytes = dims.total() as usize * 128;
    assert_eq!(read(&b.target, 0, bytes), read(&b.source, 0, bytes));
    assert_eq!(proxy.counters().commands, 500 * dims.total());
}
