//! Small copies by a kernel that stays for more: bytes around the moment at which it leaves, who waits for it, and how soon a copy ends.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use doorbell_gpu::{CopyOp, Dims, Gpu, MemKind};

use crate::copies::{pause, trips};
use crate::raw::{Raw, cu};
use crate::small::{End, Ends, Failure};
use crate::{LONG, Outcome, Spin, ensure};

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

/// The longest of these copies, and how far apart their places are.
const LONGEST: u64 = 16 << 10;

/// Tickets of one to three copies, up to two of them under way, with gaps from none to twice the stay: after each the bytes are compared.
fn rounds(ends: &Ends, to: End<'_>, from: End<'_>, rounds: u32) -> Result<(), Failure> {
    const PLACES: u64 = 8;
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let len = (PLACES * LONGEST) as usize;
    let mut source = vec![0; len];
    for (i, byte) in source.iter_mut().enumerate() {
        *byte = (i * 13 + i / 509) as u8;
    }
    from.0.write(from.1, &source)?;
    let mut want = vec![0xee; len];
    to.0.write(to.1, &want)?;
    let mut got = vec![0; len];
    for round in 0..rounds {
        let mut tickets = [0; 2];
        for ticket in tickets.iter_mut().take(1 + round as usize % 2) {
            let ops: Vec<_> = (0..1 + random.below(3))
                .map(|_| {
                    // Mostly words.
                    let len = match random.below(4) {
                        0 => 1 + random.below(LONGEST / 3),
                        1 => 1 + random.below(64),
                        _ => 8,
                    };
                    let dst = random.below(PLACES) * LONGEST + random.below(64);
                    let src = random.below(PLACES) * LONGEST + random.below(64);
                    (dst, src, len)
                })
                .collect();
            // In steps, since they may meet.
            let steps: Vec<usize> = (1..ops.len()).collect();
            let copies: Vec<_> = ops
                .iter()
                .map(|&(dst, src, len)| CopyOp {
                    dst: to.0.device_addr() + to.1 as u64 + dst,
                    src: from.0.device_addr() + from.1 as u64 + src,
                    len,
                })
                .collect();
            *ticket = ends.submit(&copies, &steps)?;
            for (dst, src, len) in ops {
                let (dst, src, len) = (dst as usize, src as usize, len as usize);
                want[dst..dst + len].copy_from_slice(&source[src..src + len]);
            }
        }
        for ticket in tickets.into_iter().filter(|&t| t != 0) {
            ends.copier.wait(ticket, LONG)?;
        }
        // Reading takes longer than the kernel stays, so not always.
        if round % 16 == 15 || round + 1 == rounds {
            to.0.read(to.1, &mut got)?;
            if let Some(at) = (0..len).find(|&i| got[i] != want[i]) {
                let (got, want) = (got[at], want[at]);
                return Err(format!("round {round}: byte {at} is {got:#x}, not {want:#x}").into());
            }
        }
        pause(Duration::from_nanos(random.below(100_000)));
    }
    Ok(())
}

/// On every way, alone and beside kernels that poll, and that fill the GPU.
pub(crate) fn bytes(gpu: &Gpu) -> Outcome {
    let ends = Ends::new(gpu)?;
    let mut remarks = Vec::new();
    for beside in ["alone", "beside 16 blocks", "beside a full GPU"] {
        let before = ends.copier.stats();
        let mut spin = match beside {
            "beside 16 blocks" => Some(Spin::start(gpu, Dims::new(16, 32), MemKind::Device, LONG)?),
            "beside a full GPU" => Some(Spin::everywhere(gpu, MemKind::Device, LONG)?),
            _ => None,
        };
        for (name, to, from) in ends.ways() {
            rounds(&ends, to, from, 2000).map_err(|e| format!("{beside}, {name}: {e}"))?;
        }
        if let Some(spin) = &mut spin {
            ensure!(!spin.launch.is_done()?, "the spinning kernel ended early");
            spin.release()?;
        }
        let after = ends.copier.stats();
        let copies = after.copies - before.copies;
        let kernel = after.kernel_copies - before.kernel_copies;
        let posted = after.posted - before.posted;
        let launches = after.kernel_batches - before.kernel_batches - posted;
        remarks.push(format!(
            "{beside}: {copies} copies, {kernel} by the kernel ({launches} launches, {posted} posted, {} taken back)",
            after.taken_back - before.taken_back
        ));
        ensure!(
            beside == "beside a full GPU" || posted > 0,
            "nothing was posted {beside}"
        );
    }
    Ok(remarks.join("; "))
}

/// Whoever waits for all kernels of the context waits for the one that stays, and no longer than its life: however many copies keep coming.
pub(crate) fn synchronize(gpu: &Gpu) -> Outcome {
    let ends = Ends::new(gpu)?;
    let raw = Raw::open(gpu.info().ordinal.unwrap_or(0))?;
    let word = [CopyOp {
        dst: ends.device().device_addr(),
        src: ends.host().device_addr(),
        len: 8,
    }];
    let mut remarks = Vec::new();
    for busy in [false, true] {
        let stop = AtomicBool::new(false);
        let mut took = Vec::new();
        std::thread::scope(|scope| {
            let copies = scope.spawn(|| {
                while busy && !stop.load(Ordering::Relaxed) {
                    let ticket = ends.submit(&word, &[]).map_err(|e| e.to_string())?;
                    let end = ends.copier.wait(ticket, LONG);
                    end.map_err(|e| e.to_string())?;
                }
                Ok::<_, String>(())
            });
            let mut waits = || {
                for _ in 0..200 {
                    // A kernel is there.
                    for _ in 0..if busy { 0 } else { 4 } {
                        ends.copier.wait(ends.submit(&word, &[])?, LONG)?;
                    }
                    let since = Instant::now();
                    cu!(raw, cuCtxSynchronize()())?;
                    took.push(since.elapsed());
                }
                Ok::<_, Failure>(())
            };
            let waits = waits();
            stop.store(true, Ordering::Relaxed);
            copies.join().expect("a thread")?;
            waits
        })?;
        took.sort();
        remarks.push(format!(
            "{}: cuCtxSynchronize took {:.0?}, at most {:.0?}",
            if busy {
                "while copies keep coming"
            } else {
                "after a copy"
            },
            took[took.len() / 2],
            took[took.len() - 1]
        ));
    }
    Ok(remarks.join("; "))
}

/// Single copies at several gaps and of several lengths, by the engine and as is quickest, in turn.
pub(crate) fn rates(gpu: &Gpu) -> Outcome {
    let ends = Ends::new(gpu)?;
    let mut least = f64::INFINITY;
    for beside in [
        "",
        ", beside 4 blocks that poll host memory",
        ", beside a block on each multiprocessor",
    ] {
        let mut spin = match beside {
            "" => None,
            b if b.contains("host") => Some(Spin::start(
                gpu,
                Dims::new(4, 32),
                MemKind::PinnedHost,
                LONG,
            )?),
            _ => {
                let sms = gpu.info().sm_count;
                Some(Spin::start(
                    gpu,
                    Dims::new(sms, 512),
                    MemKind::Device,
                    LONG,
                )?)
            }
        };
        for (name, to, from) in ends.ways() {
            for (len, gap) in [
                (8, 0),
                (8, 5),
                (8, 20),
                (8, 40),
                (8, 100),
                (1024, 5),
                (4096, 5),
                (16384, 5),
                (32768, 5),
                (2047, 5),
            ] {
                let op = [CopyOp {
                    dst: to.0.device_addr() + to.1 as u64,
                    // One of them not aligned alike.
                    src: from.0.device_addr() + from.1 as u64 + len % 2,
                    len,
                }];
                let before = ends.copier.stats();
                let gap = Duration::from_micros(gap);
                let any = trips(&ends.copier, 500, gap, || ends.submit(&op, &[]))?;
                let after = ends.copier.stats();
                // SAFETY: buffers that outlive the copies.
                let engine = || Ok::<_, Failure>(unsafe { ends.copier.submit_via_host(&op) }?);
                let theirs = trips(&ends.copier, 500, gap, engine)?;
                let ratio = theirs[250].as_secs_f64() / any[250].as_secs_f64();
                let posted = after.posted - before.posted;
                println!(
                    "INFO {name}, {len} B every {gap:?}{beside}: median {:.1?}, p99 {:.1?} ({posted} of 500 posted, {} launches), {:.1?} and {:.1?} by the engine: {ratio:.2} times as quick",
                    any[250],
                    any[495],
                    after.kernel_batches - before.kernel_batches - posted,
                    theirs[250],
                    theirs[495],
                );
                if posted > 400 {
                    least = least.min(ratio);
                }
            }
        }
        if let Some(spin) = &mut spin {
            spin.release()?;
        }
    }
    Ok(format!(
        "posted copies end {least:.2} times as quick as the engine's, or quicker"
    ))
}
