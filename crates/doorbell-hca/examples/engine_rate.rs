//! What a put costs the engine: nanoseconds and cycles of one core per WQE, beside a bare copy loop of the same bytes in the same run.
//!
//! WQEs are built beforehand by the same thread and the engine is caller-driven, so only the engine is measured. Usage:
//! `cargo run --release -p doorbell-hca --example engine_rate [-- --count N | --only NAME]`; `--only record` puts the flight recorder's
//! cost beside an engine without it, in turns; to count instructions: `valgrind --tool=callgrind --toggle-collect='*measured*'
//! target/release/examples/engine_rate --only inline8 --count 200000 [--record off]`.

mod common;

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::Block;
use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_hca::dma::{Dma, DmaOp};
use doorbell_hca::{
    Access, Addressing, Cores, CqConfig, Destination, DoorbellWord, Driver, Hca, HcaConfig, HcaQp,
    Memory, Mr, MrConfig, OnError, QpConfig, Shared, record::Recording,
};
use doorbell_wire::{Cqn, Local, Remote, Wqe};

struct Bench {
    hca: Hca,
    driver: Driver,
    pd: u32,
    count: u64,
}

struct Qp {
    _qp: HcaQp,
    ring: Block,
    cq: Block,
    bell: Shared<u64>,
    depth: u64,
    pi: u64,
}

impl Qp {
    /// Writes a WQE of one slot.
    fn write(&self, at: u64, wqe: &Wqe) {
        for (j, chunk) in wqe
            .emit(at as u16, self._qp.qpn())
            .iter()
            .take(4)
            .enumerate()
        {
            let word = ((at & (self.depth - 1)) * 8) as usize + 2 * j;
            self.ring.word(word).store(chunk.0[0], Ordering::Relaxed);
            self.ring
                .word(word + 1)
                .store(chunk.0[1], Ordering::Relaxed);
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Op {
    Inline8,
    Write(u32),
    Read(u32),
    FetchAdd,
    Nop,
    PutSignal,
}

impl Bench {
    fn mr(&self, bytes: usize) -> (Mr, Block) {
        let block = Block::new(bytes);
        let config = MrConfig {
            memory: Memory::Host {
                ptr: block.ptr(),
                len: bytes,
                keep: Arc::new(block.clone()),
            },
            access: Access::ALL,
            addressing: Addressing::Zero,
            pd: self.pd,
        };
        // SAFETY: `keep` owns the memory, which is all atomics.
        (
            unsafe { self.hca.register(config) }.expect("register"),
            block,
        )
    }

    fn qp(&self, log_depth: u8, kind: CqKind) -> Qp {
        let depth = 1u64 << log_depth;
        let (ring, cq) = (Block::new(64 << log_depth), Block::new(64 << log_depth));
        let slot = self.hca.reserve_doorbell(None, None).expect("doorbell");
        let bell = slot.word();
        let cqn: Cqn = self.hca.alloc_cqn().expect("cqn");
        let config = QpConfig {
            pd: self.pd,
            sq: ring.ptr(),
            log_depth,
            cq: CqConfig {
                ring: cq.ptr(),
                log_entries: log_depth,
                kind,
                cqn,
            },
            handler: NicHandler::ProducerWord,
            doorbell: DoorbellWord::Slot(slot),
            record: None,
            poll_record: false,
            wait_note: None,
            error_word: None,
            rq: None,
            core: None,
            on_error: OnError::Flush,
            signals: Vec::new(),
            keep: Arc::new((ring.clone(), cq.clone())),
        };
        // SAFETY: `keep` owns all of it, sized as `config` says, and all of it is atomics.
        let qp = unsafe { self.hca.create_qp(config) }.expect("qp");
        qp.connect(Destination::Loopback(qp.qpn()), Duration::from_secs(1))
            .expect("connect");
        Qp {
            _qp: qp,
            ring,
            cq,
            bell,
            depth,
            pi: 0,
        }
    }

    /// Fills the whole ring for the lap that begins at `qp.pi`.
    fn build(&self, qp: &mut Qp, op: Op, src: &Mr, dst: &Mr, window: u64, every: u64) {
        for i in 0..qp.depth {
            let at = qp.pi + i;
            let (remote, len) = match op {
                Op::Write(len) | Op::Read(len) => (at * u64::from(len) % window, len),
                _ => (at * 8 % window, 8),
            };
            let remote = Remote {
                addr: remote,
                key: dst.key(),
            };
            let local = Local {
                addr: remote.addr,
                key: src.key(),
                len,
            };
            let wqe = match op {
                Op::Inline8 => Wqe::write_inline(remote, &at.to_le_bytes()),
                Op::Write(_) => Wqe::write(remote, local),
                Op::Read(_) => Wqe::read(remote, local),
                Op::FetchAdd => Wqe::fetch_add(remote, local, 1),
                Op::PutSignal if at % 2 == 1 => Wqe::fetch_add(remote, local, 1),
                Op::PutSignal => Wqe::write(remote, local),
                Op::Nop => Ok(Wqe::nop()),
            };
            let wqe = wqe.expect("valid").signalled(at % every == every - 1);
            qp.write(at, &wqe);
        }
    }

    /// Rings `batch` at a time and drives the engine until all `depth` WQEs are complete; returns the time of that.
    #[inline(never)]
    fn measured_lap(&self, qp: &mut Qp, batch: u64, kind: CqKind) -> Duration {
        let end = qp.pi + qp.depth;
        let start = Instant::now();
        while qp.pi < end {
            qp.pi += batch;
            // SAFETY: the word belongs to the QP, which lives.
            unsafe { qp.bell.store_release(qp.pi) };
            let last = qp.pi - 1;
            let word = match kind {
                CqKind::Collapsed => 7,
                CqKind::PerSlot => ((last & (qp.depth - 1)) * 8) as usize + 7,
            };
            let want = u64::from((last as u16).swap_bytes());
            // Bytes 60 and 61 are the counter.
            while qp.cq.word(word).load(Ordering::Acquire) >> 32 & 0xffff != want {
                self.driver.poll();
            }
        }
        start.elapsed()
    }

    /// Nanoseconds per WQE, best of many laps.
    fn run(&self, op: Op, log_depth: u8, batch: u64, kind: CqKind, every: u64) -> f64 {
        let window = match op {
            Op::Write(len) | Op::Read(len) => (u64::from(len) * 64).max(1 << 16),
            _ => 1 << 16,
        };
        let ((src, _a), (dst, _b)) = (self.mr(window as usize), self.mr(window as usize));
        let mut qp = self.qp(log_depth, kind);
        // Two laps find the state in which everything is warm; then the best of the rest: the machine is shared.
        let laps = (self.count / qp.depth).max(3);
        let mut best = f64::INFINITY;
        for lap in 0..laps {
            self.build(&mut qp, op, &src, &dst, window, every);
            let time = self.measured_lap(&mut qp, batch, kind);
            if lap > 0 {
                best = best.min(time.as_nanos() as f64 / qp.depth as f64);
            }
        }
        best
    }
}

/// A copy engine of GPUs that copies nothing; a batch ends when it has been looked at so often that others have gathered behind it.
struct Gpu {
    device: u64,
    under_way: Mutex<VecDeque<(u64, u32)>>,
    next: AtomicU64,
    copies: AtomicU64,
}

impl Dma for Gpu {
    fn submit(&self, ops: &[DmaOp], _: &[usize]) -> Result<u64, String> {
        self.copies.fetch_add(ops.len() as u64, Ordering::Relaxed);
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        let mut under_way = self.under_way.lock().map_err(|e| e.to_string())?;
        under_way.push_back((ticket, 8));
        Ok(ticket)
    }

    fn poll(&self, _: u64) -> Result<bool, String> {
        let mut under_way = self.under_way.lock().map_err(|e| e.to_string())?;
        match under_way.front_mut() {
            Some((_, 0)) => Ok(under_way.pop_front().is_some()),
            Some((_, left)) => {
                *left -= 1;
                Ok(false)
            }
            None => Ok(true),
        }
    }

    fn ordered(&self) -> bool {
        true
    }

    fn device(&self) -> Option<u64> {
        Some(self.device)
    }

    fn reaches_device(&self, _: &dyn Dma) -> bool {
        true
    }
}

/// Puts of 8 bytes from GPU to GPU with a signal each: nanoseconds a put with its signal, and copies a batch. The copy engine costs nothing here.
fn gpu_signals(bench: &Bench, log_depth: u8) -> (f64, f64) {
    let window = 4096usize;
    let gpu = |device| {
        let under_way = Mutex::default();
        let (next, copies) = (AtomicU64::new(1), AtomicU64::new(0));
        Arc::new(Gpu {
            device,
            under_way,
            next,
            copies,
        })
    };
    let near = gpu(1);
    let region = |dma: Arc<dyn Dma>, addr| {
        let memory = Memory::Device {
            addr,
            len: window,
            dma,
            keep: Arc::new(()),
        };
        let config = MrConfig {
            memory,
            access: Access::ALL,
            addressing: Addressing::Zero,
            pd: bench.pd,
        };
        // SAFETY: nothing is ever copied.
        unsafe { bench.hca.register(config) }.expect("register")
    };
    let src = region(near.clone(), 1 << 40);
    let dst = region(gpu(2), 2 << 40);
    let (signal, _words) = bench.mr(64);
    let mut qp = bench.qp(log_depth, CqKind::PerSlot);
    let mut best = f64::INFINITY;
    for lap in 0..(bench.count / qp.depth).max(3) {
        for i in 0..qp.depth {
            let at = qp.pi + i;
            let addr = at / 2 * 8 % window as u64;
            let there = Remote {
                addr,
                key: dst.key(),
            };
            let word = Remote {
                addr: 0,
                key: signal.key(),
            };
            let local = |key, addr| Local { addr, key, len: 8 };
            let wqe = match at % 2 {
                0 => Wqe::write(there, local(src.key(), addr)),
                _ => Wqe::fetch_add(word, local(signal.key(), 8), 1),
            };
            let wqe = wqe.expect("valid").signalled(true);
            qp.write(at, &wqe);
        }
        let time = bench.measured_lap(&mut qp, 64.min(1 << log_depth), CqKind::PerSlot);
        if lap > 0 {
            best = best.min(time.as_nanos() as f64 / (qp.depth / 2) as f64);
        }
    }
    let (copies, batches) = (&near.copies, near.next.load(Ordering::Relaxed) - 1);
    (best, copies.load(Ordering::Relaxed) as f64 / batches as f64)
}

/// An engine whose recorder is on and one whose recorder is off, lap about: nanoseconds per WQE of each, and the median of the laps' ratios.
/// Each pair of laps is measured within a moment, and their order changes, so what else the machine does hits both.
fn recorded(count: u64, op: Op, log_depth: u8, batch: u64) -> (f64, f64, f64) {
    let bench = |record| {
        let hca = Hca::new(HcaConfig {
            record,
            ..HcaConfig::caller_driven()
        })
        .expect("hca");
        hca.add_host_doorbells(8).expect("doorbells");
        let pd = hca.alloc_pd();
        Bench {
            driver: hca.driver(),
            hca,
            pd,
            count,
        }
    };
    let log_events = Recording::LOG_EVENTS;
    let benches = [
        bench(Recording::File {
            log_events,
            id: rand::random(),
        }),
        bench(Recording::Off),
    ];
    let memory: Vec<_> = benches
        .iter()
        .map(|b| (b.mr(1 << 16), b.mr(1 << 16)))
        .collect();
    let kind = CqKind::Collapsed;
    let mut qps: Vec<Qp> = benches.iter().map(|b| b.qp(log_depth, kind)).collect();
    let (mut best, mut ratios) = ([f64::INFINITY; 2], Vec::new());
    for lap in 0..(count >> log_depth).max(64) {
        let mut ns = [0.0; 2];
        for turn in 0..2 {
            let i = (lap + turn) as usize % 2;
            let (src, dst) = (&memory[i].0.0, &memory[i].1.0);
            benches[i].build(&mut qps[i], op, src, dst, 1 << 16, batch.min(64));
            let time = benches[i].measured_lap(&mut qps[i], batch, kind);
            ns[i] = time.as_nanos() as f64 / qps[i].depth as f64;
        }
        if lap > 3 {
            ratios.push(ns[0] / ns[1]);
            best = [best[0].min(ns[0]), best[1].min(ns[1])];
        }
    }
    ratios.sort_by(f64::total_cmp);
    (best[0], best[1], ratios[ratios.len() / 2])
}

/// A poster on one CPU, an engine thread on another: WQEs come from the poster's cache. Nanoseconds per put.
fn across(count: u64, batch: u64) -> f64 {
    let config = HcaConfig {
        cores: Cores::Threads(1),
        ..HcaConfig::default()
    };
    let hca = Hca::new(config).expect("hca");
    hca.add_host_doorbells(8).expect("doorbells");
    let pd = hca.alloc_pd();
    let bench = Bench {
        driver: hca.driver(),
        hca,
        pd,
        count,
    };
    let ((src, _a), (dst, _b)) = (bench.mr(1 << 16), bench.mr(1 << 16));
    let mut qp = bench.qp(10, CqKind::Collapsed);
    let qpn = qp._qp.qpn();
    let start = Instant::now();
    let mut done = 0;
    while qp.pi < count {
        while qp.pi + batch - done > qp.depth {
            // The collapsed CQE's 16-bit counter, as device code reads it.
            let tail = qp.cq.word(7).load(Ordering::Acquire);
            let newest = ((tail >> 32) as u16).swap_bytes();
            if tail >> 60 == 0 {
                done += u64::from(newest.wrapping_add(1).wrapping_sub(done as u16));
            }
            std::hint::spin_loop();
        }
        for i in 0..batch {
            let at = qp.pi + i;
            let (remote, local) = (
                Remote {
                    addr: at * 8 % (1 << 16),
                    key: dst.key(),
                },
                Local {
                    addr: at * 8 % (1 << 16),
                    key: src.key(),
                    len: 8,
                },
            );
            let wqe = Wqe::write(remote, local)
                .expect("valid")
                .signalled(i + 1 == batch);
            for (j, chunk) in wqe.emit(at as u16, qpn).iter().take(3).enumerate() {
                let word = ((at & (qp.depth - 1)) * 8) as usize + 2 * j;
                qp.ring.word(word).store(chunk.0[0], Ordering::Relaxed);
                qp.ring.word(word + 1).store(chunk.0[1], Ordering::Relaxed);
            }
        }
        qp.pi += batch;
        // SAFETY: the word belongs to the QP, which lives.
        unsafe { qp.bell.store_release(qp.pi) };
    }
    start.elapsed().as_nanos() as f64 / qp.pi as f64
}

/// The baseline: descriptors of 64 bytes are read and `len` bytes copied for each, with no check at all.
#[inline(never)]
fn measured_copies(ring: &Block, depth: u64, src: *const u8, dst: *mut u8, len: usize) -> Duration {
    let start = Instant::now();
    for i in 0..depth {
        let offset = ring.word((i * 8 + 2) as usize).load(Ordering::Relaxed) as usize;
        // SAFETY: the offsets were written by `baseline`: inside both blocks.
        unsafe { std::ptr::copy_nonoverlapping(src.add(offset), dst.add(offset), black_box(len)) };
    }
    start.elapsed()
}

fn baseline(log_depth: u8, len: usize, count: u64) -> f64 {
    let depth = 1u64 << log_depth;
    let window = (len * 64).max(1 << 16);
    let (ring, src, dst) = (
        Block::new(64 << log_depth),
        Block::new(window),
        Block::new(window),
    );
    let mut best = f64::INFINITY;
    for _ in 0..(count / depth).max(3) {
        for i in 0..depth {
            ring.word((i * 8 + 2) as usize)
                .store(i * len as u64 % window as u64, Ordering::Relaxed);
        }
        let time = measured_copies(&ring, depth, src.ptr().as_ptr(), dst.ptr().as_ptr(), len);
        best = best.min(time.as_nanos() as f64 / depth as f64);
    }
    best
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        args.iter()
            .position(|a| a == name)
            .and_then(|i| args.get(i + 1))
            .cloned()
    };
    let count: u64 =
        value("--count").map_or(4_000_000, |v| v.parse().expect("--count takes a number"));
    let only = value("--only");
    let mut config = HcaConfig::caller_driven();
    if value("--record").is_some_and(|v| v == "off") {
        config.record = Recording::Off;
    }
    let hca = Hca::new(config).expect("hca");
    hca.add_host_doorbells(4096 + 64).expect("doorbells");
    let pd = hca.alloc_pd();
    let bench = Bench {
        driver: hca.driver(),
        hca,
        pd,
        count,
    };
    let llc = 15;
    let l2 = 10;
    println!(
        "{:<44} {:>9} {:>11}",
        "engine, one core, caller-driven", "ns/WQE", "M WQE/s"
    );
    let show = |name: &str, what: String, f: &dyn Fn() -> f64| {
        if only.as_deref().is_none_or(|o| o == name) {
            let ns = f();
            println!("{what:<44} {ns:>9.2} {:>11.1}", 1e3 / ns);
        }
    };
    use CqKind::{Collapsed, PerSlot};
    for (name, depth) in [("2 MiB ring", llc), ("64 KiB ring", l2)] {
        show("copy8", format!("bare copy loop, 8 bytes, {name}"), &|| {
            baseline(depth, 8, count)
        });
        show(
            "inline8",
            format!("put inline 8, batch 1024, {name}"),
            &|| bench.run(Op::Inline8, depth, 1024, Collapsed, 64),
        );
        show("write8", format!("put 8, batch 1024, {name}"), &|| {
            bench.run(Op::Write(8), depth, 1024, Collapsed, 64)
        });
    }
    show("perslot", "put 8, batch 1024, per-slot CQ".into(), &|| {
        bench.run(Op::Write(8), llc, 1024, PerSlot, 1)
    });
    show("batch32", "put 8, batch 32".into(), &|| {
        bench.run(Op::Write(8), l2, 32, Collapsed, 32)
    });
    show("batch1", "put 8, batch 1".into(), &|| {
        bench.run(Op::Write(8), l2, 1, Collapsed, 1)
    });
    show("copy64", "bare copy loop, 64 bytes".into(), &|| {
        baseline(llc, 64, count)
    });
    show("write64", "put 64, batch 1024".into(), &|| {
        bench.run(Op::Write(64), llc, 1024, Collapsed, 64)
    });
    show("read8", "get 8, batch 1024".into(), &|| {
        bench.run(Op::Read(8), llc, 1024, Collapsed, 64)
    });
    show("add", "fetch-and-add, batch 1024".into(), &|| {
        bench.run(Op::FetchAdd, llc, 1024, Collapsed, 64)
    });
    show(
        "putsignal",
        "put 8 and signal alternating, batch 1024".into(),
        &|| bench.run(Op::PutSignal, llc, 1024, Collapsed, 64),
    );
    if only.as_deref().is_none_or(|o| o == "gpusignal") {
        for log_depth in [8, 10] {
            let (ns, each) = gpu_signals(&bench, log_depth);
            let what = format!("put 8 GPU to GPU and signal, {} slots", 1 << log_depth);
            let rate = 1e3 / ns;
            println!("{what:<44} {ns:>9.2} {rate:>11.1}   the pair; {each:.0} copies a batch");
        }
    }
    show("nop", "NOP, batch 1024".into(), &|| {
        bench.run(Op::Nop, llc, 1024, Collapsed, 64)
    });
    for log in [12u32, 16, 20] {
        let len = 1usize << log;
        let bytes = count.min((4u64 << 30) >> log).max(1 << 12);
        let big = Bench {
            count: bytes,
            hca: bench.hca.clone(),
            driver: bench.driver.clone(),
            pd,
        };
        show("copylarge", format!("bare copy loop, {len} bytes"), &|| {
            baseline(8, len, bytes)
        });
        show("large", format!("put {len}, batch 16"), &|| {
            big.run(Op::Write(len as u32), 8, 16, Collapsed, 16)
        });
    }
    for batch in [32, 1] {
        show(
            "across",
            format!("put 8, poster and engine thread, batch {batch}"),
            &|| {
                (0..3)
                    .map(|_| across(count, batch))
                    .fold(f64::INFINITY, f64::min)
            },
        );
    }
    if only.as_deref().is_none_or(|o| o == "record") {
        println!(
            "{:<44} {:>9} {:>11} {:>8}",
            "flight recorder", "on, ns/WQE", "off, ns/WQE", "ratio"
        );
        for (what, op, log_depth, batch) in [
            ("put inline 8, batch 1024", Op::Inline8, 12, 1024),
            ("put 8, batch 1024", Op::Write(8), 12, 1024),
            ("put 8, batch 32", Op::Write(8), l2, 32),
            ("put 8, batch 1", Op::Write(8), l2, 1),
            ("put 64, batch 1024", Op::Write(64), l2, 1024),
        ] {
            let (on, off, ratio) = recorded(count, op, log_depth, batch);
            println!("{what:<44} {on:>10.2} {off:>11.2} {ratio:>8.3}");
        }
    }
    if only.as_deref().is_none_or(|o| o == "idle") {
        println!(
            "{:<44} {:>9} {:>11}",
            "with idle QPs", "ns/WQE", "ratio to 1"
        );
        for batch in [32u64, 1] {
            let alone = bench.run(Op::Write(8), l2, batch, Collapsed, batch);
            let idle: Vec<Qp> = (0..4096).map(|_| bench.qp(0, Collapsed)).collect();
            let crowded = bench.run(Op::Write(8), l2, batch, Collapsed, batch);
            println!(
                "{:<44} {alone:>9.2} {:>11.2}",
                format!("1 QP, batch {batch}"),
                1.0
            );
            println!(
                "{:<44} {crowded:>9.2} {:>11.2}",
                format!("1 QP and {} idle, batch {batch}", idle.len()),
                crowded / alone
            );
        }
    }
}
