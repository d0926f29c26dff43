//! What a put over packets costs: two HCAs of one process over UDP loopback, both driven by this thread, so that nothing but their work
//! (and the kernel's) is measured: no scheduler, no second CPU. The bare UDP echo of the same run is the base of the round trip.
//!
//! `cargo run --release -p doorbell-hca --example roce_link_rate [-- --only NAME] [--seconds S] [--mtu BYTES] [--unrecorded]`; names: `put8`, `put8x1`,
//! `get8`, `put64k`, `put1m`, `get1m`, `trip`, `trip2`, `threads8`, `threads1m`, `pair1m`. One thread's rates are per second of its CPU time; `pair1m` and
//! `trip2` have a thread a side, each driving its own HCA; beside `pair1m` is what the kernel alone takes (see `bounds`).

mod bounds;
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::Block;
use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_hca::roce::transport::{Config, Mtu};
use doorbell_hca::roce::{PortConfig, RoceTarget};
use doorbell_hca::{
    Access, Addressing, Cores, CqConfig, Destination, DoorbellWord, Driver, Hca, HcaConfig, HcaQp,
    Memory, Mr, MrConfig, OnError, QpConfig, Shared, record::Recording,
};
use doorbell_wire::roce::{Psn, Transport};
use doorbell_wire::{Key, Local, Remote, Wqe};

const PATIENCE: Duration = Duration::from_secs(10);
const LOG_DEPTH: u8 = 10;
const DEPTH: u64 = 1 << LOG_DEPTH;

/// An HCA, a queue pair, and the region its peer works on.
struct Side {
    hca: Hca,
    driver: Driver,
    qp: HcaQp,
    port: doorbell_hca::roce::RocePort,
    ring: Block,
    cq: Block,
    bell: Shared<u64>,
    memory: Block,
    mr: Mr,
    pi: u64,
    done: u64,
}

impl Side {
    fn new(cores: Cores, bytes: usize) -> Self {
        let mut config = match cores {
            Cores::CallerDriven => HcaConfig::caller_driven(),
            cores => HcaConfig {
                cores,
                ..HcaConfig::default()
            },
        };
        // Valgrind does not like how its clock is looked up.
        if std::env::args().any(|a| a == "--unrecorded") {
            config.record = Recording::Off;
        }
        let hca = Hca::new(config).expect("hca");
        hca.add_host_doorbells(8).expect("doorbells");
        let port: PortConfig = "udp://127.0.0.1".parse().expect("valid");
        let port = hca.open_roce(0, &port).expect("port");
        let pd = hca.alloc_pd();
        let memory = Block::new(bytes);
        let config = MrConfig {
            memory: Memory::Host {
                ptr: memory.ptr(),
                len: bytes,
                keep: Arc::new(memory.clone()),
            },
            access: Access::ALL,
            addressing: Addressing::Zero,
            pd,
        };
        // SAFETY: `keep` owns the memory, which is all atomics.
        let mr = unsafe { hca.register(config) }.expect("register");
        let (ring, cq) = (Block::new(64 << LOG_DEPTH), Block::new(64));
        let slot = hca.reserve_doorbell(Some(0), None).expect("doorbell");
        let bell = slot.word();
        let config = QpConfig {
            pd,
            sq: ring.ptr(),
            log_depth: LOG_DEPTH,
            cq: CqConfig {
                ring: cq.ptr(),
                log_entries: LOG_DEPTH,
                kind: CqKind::Collapsed,
                cqn: hca.alloc_cqn().expect("cqn"),
            },
            handler: NicHandler::ProducerWord,
            doorbell: DoorbellWord::Slot(slot),
            record: None,
            poll_record: false,
            wait_note: None,
            error_word: None,
            rq: None,
            core: Some(0),
            on_error: OnError::Flush,
            signals: Vec::new(),
            keep: Arc::new((ring.clone(), cq.clone())),
        };
        // SAFETY: `keep` owns all of it, sized as `config` says, and all of it is atomics.
        let qp = unsafe { hca.create_qp(config) }.expect("qp");
        Self {
            driver: hca.driver(),
            hca,
            qp,
            port,
            ring,
            cq,
            bell,
            memory,
            mr,
            pi: 0,
            done: 0,
        }
    }

    fn connect(&self, peer: &Self, mtu: Mtu) {
        let target = RoceTarget {
            peer: peer.port.local,
            segments: peer.port.segments,
            light: peer.port.light,
            connection: Config {
                window_bytes: 1 << 20,
                transport: Transport::Rc,
                dest_qpn: peer.qp.qpn().get(),
                sq_psn: Psn::new(self.qp.qpn().get()),
                rq_psn: Psn::new(peer.qp.qpn().get()),
                path_mtu: mtu,
                window: 256,
                ..Config::default()
            },
            access: Access::ALL,
        };
        self.qp
            .connect(Destination::Roce(Box::new(target)), PATIENCE)
            .expect("connect");
    }

    fn put(&mut self, wqe: Wqe) {
        let at = self.pi;
        for (j, chunk) in wqe
            .emit(at as u16, self.qp.qpn())
            .iter()
            .take(4)
            .enumerate()
        {
            let word = ((at & (DEPTH - 1)) * 8) as usize + 2 * j;
            self.ring.word(word).store(chunk.0[0], Ordering::Relaxed);
            self.ring
                .word(word + 1)
                .store(chunk.0[1], Ordering::Relaxed);
        }
        self.pi += 1;
    }

    fn ring(&self) {
        // SAFETY: the word belongs to the queue pair, which lives.
        unsafe { self.bell.store_release(self.pi) };
    }

    /// Reads the collapsed CQE.
    fn collect(&mut self) {
        let tail = self.cq.word(7).load(Ordering::Acquire);
        let newest = ((tail >> 32) as u16).swap_bytes();
        assert_ne!(tail >> 52 & 0xf, 0xd, "an error CQE");
        if tail >> 60 == 0 {
            self.done += u64::from(newest.wrapping_add(1).wrapping_sub(self.done as u16));
        }
    }
}

struct Bench {
    seconds: f64,
    mtu: Mtu,
}

#[derive(Clone, Copy)]
struct Load {
    len: u32,
    read: bool,
    /// WQEs a doorbell.
    batch: u64,
    /// WQEs under way at most.
    window: u64,
    threads: bool,
    /// The target is driven by a thread of its own.
    apart: bool,
}

/// Seconds of CPU time of this thread.
fn cpu_seconds() -> f64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes one `timespec`.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

impl Bench {
    fn pair(&self, cores: Cores, bytes: usize) -> (Side, Side) {
        let (a, b) = (Side::new(cores, bytes), Side::new(cores, bytes));
        a.connect(&b, self.mtu);
        b.connect(&a, self.mtu);
        (a, b)
    }

    /// Messages a second.
    #[inline(never)]
    fn measured_rate(&self, load: Load) -> (f64, String) {
        let slots = (1u64 << 18).div_ceil(u64::from(load.len)).clamp(2, 1024);
        let bytes = (slots * u64::from(load.len)) as usize;
        let cores = if load.threads {
            Cores::Threads(1)
        } else {
            Cores::CallerDriven
        };
        let (mut a, b) = self.pair(cores, bytes.max(64));
        let stop = AtomicBool::new(false);
        let (key, far) = (b.mr.key(), b.driver.clone());
        let rate = std::thread::scope(|scope| {
            if load.apart {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        far.poll();
                    }
                });
            }
            let rate = self.run(&mut a, &b, load, slots, key);
            stop.store(true, Ordering::Relaxed);
            rate
        });
        let counted = a.qp.roce_counters(PATIENCE).expect("counters");
        let port = a.hca.roce_counters(0).expect("counters");
        let notes = counted.zip(port).map_or_else(String::new, |(c, p)| {
            let calls = |n: &str| p.port.iter().find(|r| r.0 == n).map_or(0, |r| r.1);
            format!(
                "{:.1} packets sent a message, {} sent again, {} time-outs, {} receive calls",
                c.tx_packets as f64 / a.done.max(1) as f64,
                c.retransmitted_packets,
                c.local_ack_timeout_err,
                calls("received_calls"),
            )
        });
        (rate, notes)
    }

    /// Messages a second of [`Self::measured_rate`].
    fn run(&self, a: &mut Side, b: &Side, load: Load, slots: u64, key: Key) -> f64 {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        while start.elapsed().as_secs_f64() < self.seconds {
            for _ in 0..64 {
                if a.pi + load.batch - a.done <= load.window {
                    for i in 0..load.batch {
                        let at = a.pi % slots * u64::from(load.len);
                        let remote = Remote { addr: at, key };
                        let local = Local {
                            addr: at,
                            key: a.mr.key(),
                            len: load.len,
                        };
                        let wqe = if load.read {
                            Wqe::read(remote, local)
                        } else {
                            Wqe::write(remote, local)
                        };
                        a.put(wqe.expect("valid").signalled(i + 1 == load.batch));
                    }
                    a.ring();
                }
                if !load.threads {
                    a.driver.poll();
                }
                if !load.threads && !load.apart {
                    b.driver.poll();
                }
                a.collect();
            }
        }
        if load.threads || load.apart {
            a.done as f64 / start.elapsed().as_secs_f64()
        } else {
            a.done as f64 / (cpu_seconds() - cpu)
        }
    }

    /// Nanoseconds of a put of 8 bytes and a put back, both seen in memory.
    #[inline(never)]
    fn measured_trip(&self) -> f64 {
        let (mut a, mut b) = self.pair(Cores::CallerDriven, 64);
        let put = |from: &mut Side, to: &Side, n: u64| {
            let remote = Remote {
                addr: 0,
                key: to.mr.key(),
            };
            let wqe = Wqe::write_inline(remote, &n.to_le_bytes()).expect("short");
            from.put(wqe.signalled(true));
            from.ring();
        };
        let (start, cpu, mut trips) = (Instant::now(), cpu_seconds(), 0u64);
        while start.elapsed().as_secs_f64() < self.seconds {
            for _ in 0..64 {
                trips += 1;
                put(&mut a, &b, trips);
                while b.memory.word(0).load(Ordering::Acquire) != trips {
                    a.driver.poll();
                    b.driver.poll();
                }
                put(&mut b, &a, trips);
                while a.memory.word(0).load(Ordering::Acquire) != trips {
                    b.driver.poll();
                    a.driver.poll();
                }
            }
        }
        (cpu_seconds() - cpu) * 1e9 / trips as f64
    }

    /// As [`Self::measured_trip`], with a thread a side; elapsed time, not CPU time.
    #[inline(never)]
    fn measured_trip_apart(&self) -> f64 {
        let (mut a, mut b) = self.pair(Cores::CallerDriven, 64);
        let put = |from: &mut Side, key: Key, n: u64| {
            let remote = Remote { addr: 0, key };
            let wqe = Wqe::write_inline(remote, &n.to_le_bytes()).expect("short");
            from.put(wqe.signalled(true));
            from.ring();
        };
        let (key_a, key_b) = (a.mr.key(), b.mr.key());
        let stop = AtomicBool::new(false);
        let (start, mut trips) = (Instant::now(), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 1.. {
                    while b.memory.word(0).load(Ordering::Acquire) != n {
                        b.driver.poll();
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                    put(&mut b, key_a, n);
                }
            });
            while start.elapsed().as_secs_f64() < self.seconds {
                for _ in 0..64 {
                    trips += 1;
                    put(&mut a, key_b, trips);
                    while a.memory.word(0).load(Ordering::Acquire) != trips {
                        a.driver.poll();
                    }
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        start.elapsed().as_nanos() as f64 / trips as f64
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = args.iter().position(|a| a == name)?;
        args.get(at + 1).cloned()
    };
    let only = value("--only");
    let mtu = value("--mtu").map_or(0, |v| v.parse().expect("--mtu takes a number"));
    let bench = Bench {
        seconds: value("--seconds").map_or(1.0, |v| v.parse().expect("--seconds takes a number")),
        mtu: match mtu {
            0 => Mtu::Long,
            _ => Mtu::fitting(mtu).expect("a path MTU is at least 256"),
        },
    };
    let wanted = |name: &str| only.as_deref().is_none_or(|o| o == name);
    println!(
        "path MTU {}, UDP loopback, one connection",
        bench.mtu.bytes()
    );
    let load = |len, read, batch, window, threads| Load {
        len,
        read,
        batch,
        window,
        threads,
        apart: false,
    };
    for (name, what, load) in [
        (
            "put8",
            "put 8, batch 32, one thread",
            load(8, false, 32, 512, false),
        ),
        (
            "put8x1",
            "put 8, batch 1, one thread",
            load(8, false, 1, 512, false),
        ),
        (
            "get8",
            "get 8, batch 32, one thread",
            load(8, true, 32, 512, false),
        ),
        (
            "put64k",
            "put 64 KiB, one thread",
            load(1 << 16, false, 4, 16, false),
        ),
        (
            "put1m",
            "put 1 MiB, one thread",
            load(1 << 20, false, 1, 4, false),
        ),
        (
            "get1m",
            "get 1 MiB, one thread",
            load(1 << 20, true, 1, 4, false),
        ),
        (
            "threads8",
            "put 8, batch 32, engine threads",
            load(8, false, 32, 512, true),
        ),
        (
            "threads1m",
            "put 1 MiB, engine threads",
            load(1 << 20, false, 1, 4, true),
        ),
        (
            "pair1m",
            "put 1 MiB, a thread a side",
            Load {
                apart: true,
                ..load(1 << 20, false, 1, 4, false)
            },
        ),
    ] {
        if wanted(name) {
            let (rate, notes) = bench.measured_rate(load);
            println!(
                "{what:<34} {:>9.3} M/s {:>8.3} GB/s   {notes}",
                rate / 1e6,
                rate * f64::from(load.len) / 1e9
            );
            if name == "pair1m" {
                let (seconds, mtu) = (bench.seconds, bench.mtu.bytes() as usize);
                println!(
                    "beside it, a thread a side: TCP {:.3} GB/s; the port alone {:.3}, and with a copy of what arrived {:.3}",
                    bounds::tcp(seconds),
                    bounds::trains(seconds, mtu, false),
                    bounds::trains(seconds, mtu, true),
                );
            }
        }
    }
    if wanted("trip") {
        let (echo, trip) = (bounds::echo(bench.seconds), bench.measured_trip());
        println!(
            "round trip of 8 bytes: {trip:.0} ns, bare UDP echo {echo:.0} ns, ratio {:.2}",
            trip / echo
        );
    }
    if wanted("trip2") {
        let (echo, trip) = (
            bounds::echo_apart(bench.seconds),
            bench.measured_trip_apart(),
        );
        println!(
            "round trip of 8 bytes, a thread a side: {trip:.0} ns, bare UDP echo {echo:.0} ns, ratio {:.2}",
            trip / echo
        );
    }
}
