//! Many threads on shared QPs of every shape, against an engine that trusts nothing: no lost, doubled, torn or misplaced WQE.
//!
//! The kernel is the one that runs on GPUs (`hammer`), with one-lane threads and with emulated warps; indexes start just
//! below 2^16, 2^24 and 2^32.

#[path = "../../doorbell-device/tests/nic/mod.rs"]
mod nic;

use std::sync::atomic::Ordering;

use doorbell_device::host::{Hooks, HostGrid, HostKernel};
use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_kernels::params::{Hammer, Status, sharing};
use nic::{KEY, Nic, Shape, Words};

fn kernel(name: &str) -> HostKernel {
    *doorbell_kernels::HOST
        .iter()
        .find(|k| k.name == name)
        .expect("a kernel of that name")
}

/// Runs `hammer` on `qps` and checks what it must leave behind.
fn hammer(shapes: &[Shape], share: u32, blocks: u32, threads: u32, iters: u64, emulate: bool) {
    let all = (blocks * threads) as usize;
    // Layout of the region: words, signal, sources, sink.
    let words = all + 1 + all * 64 + 1;
    let nics: Vec<Nic> = shapes.iter().map(|s| Nic::new(*s, words)).collect();
    let handles = Words::new(nics.len() * 2, 0);
    for (i, nic) in nics.iter().enumerate() {
        let h = nic.handle();
        handles
            .at(i * 2)
            .store(h.qp.expose_provenance() as u64, Ordering::Relaxed);
        handles
            .at(i * 2 + 1)
            .store(h.ext.expose_provenance() as u64, Ordering::Relaxed);
    }
    let status = Words::new(all * 4, 0);
    // Each QP writes to a region of its own, laid out alike; local memory is the first one's.
    let source = nics[0].memory.addr() + (all as u64 + 1) * 8;
    let params = Hammer {
        qps: handles.addr(),
        qp_count: nics.len() as u32,
        sharing: share,
        iters,
        words: 0,
        signal: all as u64 * 8,
        key: KEY.0,
        source_key: KEY.0,
        source,
        source_addr: (all as u64 + 1) * 8,
        status: status.addr(),
        deadline_ns: nic::LONG.as_nanos() as u64,
        seed: 0x5eed,
        sink: words as u64 * 8 - 8,
    };
    std::thread::scope(|s| {
        for nic in &nics {
            let from = &nics[0];
            s.spawn(move || nic.run_from(from));
        }
        struct Stop<'a>(&'a [Nic]);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.iter().for_each(Nic::stop);
            }
        }
        let _stop = Stop(&nics);
        let kernel = kernel("hammer");
        let p = (&raw const params).cast::<u8>().expose_provenance();
        let go = |block: u32, thread: u32, one: &HostGridOf| {
            let p = std::ptr::with_exposed_provenance(p);
            // SAFETY: the parameters are a `Hammer` whose addresses are those of live words, and outlive the threads.
            match one {
                // SAFETY: as above.
                HostGridOf::Fast(g) => unsafe { (kernel.fast)(&g.thread(block, thread), p) },
                // SAFETY: as above.
                HostGridOf::Warp(g) => unsafe { (kernel.warp)(&g.thread(block, thread), p) },
            }
        };
        let grid = if emulate {
            HostGridOf::Warp(HostGrid::new(blocks, threads, Hooks::default()))
        } else {
            HostGridOf::Fast(HostGrid::new(blocks, threads, Hooks::default()))
        };
        std::thread::scope(|s| {
            for block in 0..blocks {
                for thread in 0..threads {
                    let (go, grid) = (&go, &grid);
                    s.spawn(move || go(block, thread, grid));
                }
            }
        });
    });
    let mut signals = 0;
    for me in 0..all {
        let at = |i: usize| status.at(me * 4 + i).load(Ordering::Relaxed);
        let s = Status {
            error: at(0),
            posted: at(1),
            completed: at(2),
            ns: at(3),
        };
        let error = doorbell_device::Error::from_code(s.error);
        assert_eq!(error, None, "thread {me} of {shapes:?}");
        assert_eq!(s.posted, iters);
        let word = nics[me % nics.len()].memory.at(me).load(Ordering::Relaxed);
        assert_eq!(
            word, iters,
            "thread {me}: its last write is not the last to arrive"
        );
        signals += s.completed;
    }
    let arrived: u64 = nics
        .iter()
        .map(|n| n.memory.at(all).load(Ordering::Relaxed))
        .sum();
    assert_eq!(arrived, signals, "signals lost or doubled");
    for nic in &nics {
        let (rsvd, ready, ci) = (nic.index(0), nic.index(1), nic.index(23));
        assert_eq!(rsvd, ready, "reserved and not published");
        assert!(
            ci <= ready && nic.rung(ready) == ready,
            "published and not rung"
        );
    }
}

enum HostGridOf {
    Fast(std::sync::Arc<HostGrid<1>>),
    Warp(std::sync::Arc<HostGrid<32>>),
}

const HANDLERS: [NicHandler; 3] = [
    NicHandler::ProducerWord,
    NicHandler::DoorbellRecord,
    NicHandler::DoorbellOnly,
];
const CQS: [CqKind; 2] = [CqKind::PerSlot, CqKind::Collapsed];
/// Just below where 16-bit, 24-bit and 32-bit indexes wrap.
const STARTS: [u64; 3] = [(1 << 16) - 40, (1 << 24) - 40, (1 << 32) - 40];

/// Every handler, CQ kind and sort of QP.
fn shapes(depth: u32) -> Vec<Shape> {
    let mut all = Vec::new();
    for handler in HANDLERS {
        for cq in CQS {
            for (ext, soft) in [(true, true), (true, false), (false, false)] {
                let start = STARTS[all.len() % 3];
                all.push(Shape {
                    depth,
                    handler,
                    cq,
                    start,
                    ext,
                    soft,
                    ..Shape::default()
                });
            }
        }
    }
    all
}

#[test]
fn threads_share_one_qp() {
    for shape in shapes(64) {
        hammer(&[shape], sharing::GPU, 2, 4, 400, false);
    }
}

#[test]
fn threads_of_a_block_share_one_qp() {
    for shape in shapes(32) {
        hammer(&[shape], sharing::BLOCK, 1, 6, 300, false);
    }
}

#[test]
fn a_thread_has_a_qp_for_itself() {
    for shape in shapes(16) {
        hammer(&[shape], sharing::EXCLUSIVE, 1, 1, 2000, false);
    }
}

#[test]
fn lanes_of_emulated_warps_share_one_qp() {
    for shape in shapes(128) {
        hammer(&[shape], sharing::GPU, 1, 40, 24, true);
    }
}

#[test]
fn lanes_of_one_warp_use_different_qps() {
    let shape = Shape {
        depth: 64,
        ..Shape::default()
    };
    hammer(
        &[
            shape,
            Shape {
                cq: CqKind::PerSlot,
                ..shape
            },
            shape,
        ],
        sharing::GPU,
        1,
        32,
        40,
        true,
    );
}

#[test]
fn a_ring_smaller_than_a_warp() {
    for depth in [8, 16] {
        hammer(
            &[Shape {
                depth,
                ..Shape::default()
            }],
            sharing::GPU,
            1,
            32,
            12,
            true,
        );
    }
}

#[test]
#[ignore = "heavy: .ci/run runs it in release"]
fn heavy_indexes_wrap_many_times() {
    for shape in shapes(256) {
        hammer(&[shape], sharing::GPU, 2, 8, 12_000, false);
    }
    for shape in shapes(256) {
        hammer(&[shape], sharing::GPU, 2, 32, 60, true);
    }
}
