//! What the copy pipeline costs the CPU: nanoseconds per work request with an engine that copies nothing.
//!
//! The copy engine of a GPU takes some millions of small copies a second, so the pipeline must cost well below 100 ns.
//! `cargo run --release -p doorbell-hca --example dma_rate`

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use doorbell_hca::Shared;
use doorbell_hca::dma::{
    Dma, DmaConfig, DmaCore, DmaOp, Event, Job, Piece, Pieces, Source, Work, WriteOrder,
};
use doorbell_hca::mem::Place;

/// Ends every batch at once, and counts.
#[derive(Default)]
struct Nothing {
    batches: AtomicU64,
    copies: AtomicU64,
}

impl Dma for Nothing {
    fn submit(&self, ops: &[DmaOp], _: &[usize]) -> Result<u64, String> {
        self.copies.fetch_add(ops.len() as u64, Ordering::Relaxed);
        Ok(self.batches.fetch_add(1, Ordering::Relaxed))
    }
    fn poll(&self, _: u64) -> Result<bool, String> {
        Ok(true)
    }
    fn ordered(&self) -> bool {
        true
    }
    fn device(&self) -> Option<u64> {
        Some(1)
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    HostToGpu,
    Inline,
    WithinGpu,
}

fn run(kind: Kind, order: WriteOrder, qps: u32, stride: u64) {
    const JOBS: u64 = 1_000_000;
    let nothing = Arc::new(Nothing::default());
    let dma: Arc<dyn Dma> = nothing.clone();
    let mut host = [0u64; 8];
    let here = Place::Host(Shared::from_ptr(host.as_mut_ptr().cast()).expect("not null"));
    let mut core = DmaCore::new(DmaConfig {
        order,
        ..DmaConfig::default()
    });
    let (mut started, mut completed) = (0u64, 0u64);
    let begin = cpu_time();
    while completed < JOBS {
        let now = Instant::now();
        // A ring of 1,024 slots a QP.
        while started < JOBS && started - completed < u64::from(qps) * 1024 {
            let qp = started as u32 % qps;
            let at = 0x1_0000_0000 + (started.wrapping_mul(stride) & 0xff_ffff) * 8;
            let device = |addr| Place::Device {
                addr,
                dma: dma.clone(),
            };
            let (src, signal) = match kind {
                Kind::HostToGpu => (Source::Place(here.clone()), false),
                Kind::Inline => (Source::Inline([1; 8].into()), true),
                Kind::WithinGpu => (Source::Place(device(0x9_0000_0000)), false),
            };
            let piece = Piece {
                src,
                dst: device(at),
                len: 8,
            };
            let work = Work::Copy {
                pieces: Pieces::One(piece),
                signal,
            };
            core.start(
                Job {
                    qp,
                    cookie: started,
                    hold: false,
                    work,
                },
                now,
            );
            started += 1;
        }
        core.poll(now, |event| {
            completed += u64::from(matches!(event, Event::Completed { .. }))
        });
    }
    let ns = (cpu_time() - begin).as_nanos() as f64 / JOBS as f64;
    let (batches, copies) = (
        nothing.batches.load(Ordering::Relaxed),
        nothing.copies.load(Ordering::Relaxed),
    );
    println!(
        "{:44} {ns:6.1} ns   {:5.1} copies a batch",
        format!("{kind:?}, {order:?}, {qps} QPs, stride {stride}"),
        copies as f64 / batches as f64
    );
}

/// Of this thread: the figure is the same on a busy machine.
fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn main() {
    for order in [WriteOrder::Strict, WriteOrder::Relaxed] {
        for kind in [Kind::HostToGpu, Kind::Inline, Kind::WithinGpu] {
            for (qps, stride) in [(1, 1), (16, 1), (1, 7919)] {
                run(kind, order, qps, stride);
            }
        }
    }
}
