//! The CPU as initiator and as proxy: every call of the device library against the software HCA.

mod common;

use common::{Bench, LONG, caller_driven, device, read, status};
use doorbell::cpu::{self, Post, deadline, local, remote};
use doorbell::device_api::{Fetch, Key, Masked, Remote};
use doorbell::{CpuQp, CqKind, Device, Dims, Place, Proxy, ProxyConfig, params};

/// Byte offsets in the target and the source.
const WORD: u64 = 1024;
const OLD: usize = 2048;

struct Cpu {
    b: Bench,
}

impl Cpu {
    fn new(device: Device) -> Self {
        Self {
            b: Bench::new(device, Place::Host, 1 << 16),
        }
    }

    fn at(&self, offset: u64) -> Remote {
        remote(&self.b.target.remote(), offset)
    }

    /// Where old values of atomics go.
    fn old(&self) -> Fetch {
        Fetch {
            addr: self.b.source.addr() + OLD as u64,
            key: Key(self.b.source.key()),
        }
    }

    fn word(&self, offset: u64) -> u64 {
        self.b.target.memory().load(offset as usize).unwrap()
    }

    fn set(&self, offset: u64, value: u64) {
        self.b
            .target
            .memory()
            .store(offset as usize, value)
            .unwrap();
    }

    fn fetched(&self) -> u64 {
        self.b.source.memory().load(OLD).unwrap()
    }
}

#[test]
fn every_operation_of_the_device_library() {
    for device in [device(), caller_driven()] {
        let c = Cpu::new(device);
        let qp = c.b.qp();
        let mut cpu = CpuQp::new(&qp).unwrap();
        let q = cpu.queue().unwrap();
        let by = deadline(LONG);
        let how = Post::by(by);
        let done =
            |t: Result<cpu::Ticket, doorbell::device_api::Error>| q.wait(t.unwrap(), by).unwrap();

        done(q.put(c.at(0), local(&c.b.source, 0, 100), how));
        assert_eq!(read(&c.b.target, 0, 100), read(&c.b.source, 0, 100));
        done(q.put_value(c.at(WORD), 0x1122_3344_5566_7788, 4, how));
        assert_eq!(c.word(WORD), 0x5566_7788);
        done(q.put_inline(c.at(3000), [1, 2, 3, 4, 5, 6, 7], 28, how));
        assert_eq!(
            read(&c.b.target, 3000, 28),
            [1, 2, 3, 4, 5, 6, 7].map(u32::to_le_bytes).concat()
        );
        done(q.get(c.at(0), local(&c.b.source, 500, 100), how));
        assert_eq!(read(&c.b.source, 500, 100), read(&c.b.target, 0, 100));
        done(q.get_visible(c.at(0), local(&c.b.source, 700, 10), how));
        assert_eq!(read(&c.b.source, 700, 10), read(&c.b.target, 0, 10));
        done(q.dump(how));
        done(q.nop(how));

        c.set(WORD, 5);
        done(q.signal_add(c.at(WORD), 3, how));
        assert_eq!(c.word(WORD), 8);
        done(q.put_signal(c.at(200), local(&c.b.source, 0, 50), c.at(WORD), 2, how));
        assert_eq!(
            (c.word(WORD), read(&c.b.target, 200, 50)),
            (10, read(&c.b.source, 0, 50))
        );
        done(q.fetch_add(c.at(WORD), 1, c.old(), how));
        assert_eq!((c.word(WORD), c.fetched()), (11, 10));
        done(q.compare_swap(c.at(WORD), 11, 99, c.old(), how));
        assert_eq!((c.word(WORD), c.fetched()), (99, 11));
        done(q.compare_swap(c.at(WORD), 11, 7, c.old(), how));
        assert_eq!((c.word(WORD), c.fetched()), (99, 99), "it did not hold 11");

        c.set(WORD, 0x0000_00ff_0000_00ff);
        done(q.masked_fetch_add(c.at(WORD), 1 << 32 | 1, 0x8000_0000, c.old(), how));
        assert_eq!(
            (c.word(WORD), c.fetched()),
            (0x0000_0100_0000_0100, 0x0000_00ff_0000_00ff)
        );
        c.set(WORD, 0xffff_ffff);
        done(q.masked_fetch_add32(c.at(WORD), 2, 0, c.old(), how));
        assert_eq!(c.word(WORD), 1, "32 bits wrap, the upper half stays");
        assert_eq!(
            (c.fetched() as u32).swap_bytes(),
            0xffff_ffff,
            "4-byte results are big-endian"
        );
        let swap = Masked {
            compare: 0x01,
            compare_mask: 0xff,
            swap: 0xab00,
            swap_mask: 0xff00,
        };
        done(q.masked_compare_swap32(c.at(WORD), swap, c.old(), how));
        assert_eq!(c.word(WORD), 0xab01);
        let swap = Masked {
            compare: 0xab00,
            compare_mask: 0xff00,
            swap: 7 << 60,
            swap_mask: 15 << 60,
        };
        done(q.masked_compare_swap(c.at(WORD), swap, c.old(), how));
        assert_eq!((c.word(WORD), c.fetched()), (7 << 60 | 0xab01, 0xab01));

        // Nothing happens until the ring.
        let t = q
            .put_value(c.at(WORD), 1, 8, how.without_ringing())
            .unwrap();
        assert!(!q.poll(t).unwrap());
        q.ring(by).unwrap();
        q.wait(t, by).unwrap();
        assert_eq!(c.word(WORD), 1);
        q.flush(by).unwrap();
        qp.check().unwrap();
    }
}

#[test]
fn counters_of_the_companion_count_completions() {
    let c = Cpu::new(device());
    let qp =
        c.b.pd
            .qp()
            .depth(32)
            .cq(CqKind::PerSlot)
            .companion(32)
            .build()
            .unwrap()
            .connect_to_self()
            .unwrap();
    let mut cpu = CpuQp::new(&qp).unwrap();
    let q = cpu.queue().unwrap();
    let by = deadline(LONG);
    let how = Post::by(by);
    for i in 1..=100 {
        q.put_counter(c.at(0), local(&c.b.source, 0, 64), c.at(WORD), 1, how)
            .unwrap();
        let signal = (c.at(WORD + 8), 2);
        q.put_signal_counter(
            c.at(64),
            local(&c.b.source, 64, 64),
            signal,
            (c.at(WORD), 1),
            how,
        )
        .unwrap();
        if i % 10 == 0 {
            q.flush(by).unwrap();
            assert_eq!(c.word(WORD + 8), 2 * i);
        }
    }
    // The companion runs by itself: its last count may still be on the way.
    while c.word(WORD) < 200 {
        assert!(!by.passed(q.arch()), "{} of 200", c.word(WORD));
        std::thread::yield_now();
    }
    assert_eq!(read(&c.b.target, 0, 128), read(&c.b.source, 0, 128));
    assert_eq!(
        qp.companion_counters().unwrap().wqes,
        400,
        "a WAIT and an atomic each"
    );
}

#[test]
fn a_queue_taken_again_goes_on_where_it_stopped() {
    let c = Cpu::new(device());
    let qp = c.b.qp();
    let by = deadline(LONG);
    for round in 0..150 {
        let mut cpu = CpuQp::new(&qp).unwrap();
        let q = cpu.queue().unwrap();
        let t = q.put_value(c.at(WORD), round + 1, 8, Post::by(by)).unwrap();
        assert_eq!(t.0, round);
        q.wait(t, by).unwrap();
        assert_eq!(c.word(WORD), round + 1);
    }
}

fn proxied(device: Device, queues: usize, threads: usize, dims: Dims) {
    const SIZE: u64 = 32;
    const PLACES: u64 = 4;
    const ITERS: u64 = 3000;
    let b = Bench::new(device, Place::Host, 1 << 16);
    let qps: Vec<_> = (0..queues).map(|_| b.qp()).collect();
    let config = ProxyConfig {
        depth: 64,
        threads,
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
        iters: ITERS,
        deadline_ns: 60_000_000_000,
        size: SIZE,
        local: b.source.addr(),
        remote: b.target.addr(),
        stride: SIZE * PLACES,
        mask: PLACES - 1,
        status: b.status.device_addr(),
        run_ns: 0,
    };
    proxy.fill(&mut p);
    let s = b.run("proxy_put", dims, &p);
    assert!(
        s.iter().all(|s| (s.error, s.completed) == (0, ITERS)),
        "{s:?} {:?}",
        proxy.failed()
    );
    let bytes = (dims.total() * SIZE * PLACES) as usize;
    assert_eq!(read(&b.target, 0, bytes), read(&b.source, 0, bytes));
    let counters = proxy.counters();
    assert_eq!(counters.commands, ITERS * dims.total());
    assert!(counters.rings <= counters.commands);
    assert_eq!(
        qps.iter().map(|q| q.counters().wqes).sum::<u64>(),
        counters.commands
    );

    // A queue pair that fails: the kernel gets the error through the command ring.
    p.remote = b.target.addr() + (1 << 20);
    let mut launch = b.launch("proxy_put", Dims::new(1, 1), &p);
    launch.wait(LONG).unwrap();
    let error = doorbell::device_api::Error::from_code(status(&b.status, 0).error).unwrap();
    let (queue, told) = proxy.failed().unwrap();
    assert_eq!((queue, told), (0, error));
    let fault = qps[0].error().unwrap();
    assert_eq!(
        doorbell::device_api::Error::from_word(fault.word()),
        Some(error)
    );
}

#[test]
fn a_proxy_posts_for_kernels() {
    proxied(device(), 1, 1, Dims::new(1, 1));
    proxied(device(), 3, 2, Dims::new(5, 2));
}

#[test]
fn a_proxy_thread_drives_an_engine_without_threads() {
    proxied(caller_driven(), 2, 1, Dims::new(2, 3));
}

#[test]
fn proxies_refuse_what_cannot_be() {
    let b = Bench::new(device(), Place::Host, 4096);
    let qp = b.qp();
    let config = ProxyConfig {
        depth: 64,
        threads: 1,
        cpus: Vec::new(),
        local_key: 0,
        remote_key: 0,
    };
    let none: [&doorbell::Qp; 0] = [];
    assert!(Proxy::start(&b.device, &none, &config).is_err());
    assert!(
        Proxy::start(
            &b.device,
            &[&qp],
            &ProxyConfig {
                threads: 0,
                ..config.clone()
            }
        )
        .is_err()
    );
    for depth in [0, 16, 100, 1 << 21] {
        assert!(
            Proxy::start(
                &b.device,
                &[&qp],
                &ProxyConfig {
                    depth,
                    ..config.clone()
                }
            )
            .is_err(),
            "{depth}"
        );
    }
    let first = Proxy::start(&b.device, &[&qp], &config).unwrap();
    assert!(
        Proxy::start(&b.device, &[&qp], &config).is_err(),
        "the queue pair is taken"
    );
    drop(first);
    Proxy::start(&b.device, &[&qp], &config).unwrap();
}
