//! Small copies by the copier's kernel: bytes, order, and that kernels which leave it no room do not hold them up.

use std::time::{Duration, Instant};

use doorbell_gpu::{Buffer, Copier, CopyOp, Dims, Gpu, GpuSelect, MemKind, Module};

use crate::copies::trips;
use crate::{LONG, Outcome, Spin, ensure};

/// Memory, and where in it.
pub(crate) type End<'a> = (&'a Buffer, usize);

pub(crate) type Failure = Box<dyn std::error::Error>;

/// Bytes of each buffer.
const LEN: usize = 1 << 20;
/// Bytes from one copy's place to the next.
const PLACE: usize = 9 << 10;
/// Copies a ticket of all lengths; so many words beside them that the mean is small.
const LONG_ONES: usize = 24;
const WORDS: usize = 220;

/// The ends of copies. `peer` is memory of the second GPU, opened for the first as another process's would be.
pub(crate) struct Ends {
    pub(crate) copier: Copier,
    host: Buffer,
    back: Buffer,
    device: Buffer,
    peer: Option<Buffer>,
    /// Of `peer`: dropped after it.
    _owner: Option<(Gpu, Buffer)>,
}

impl Ends {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, Failure> {
        let other = (gpu.info().ordinal.unwrap_or(0) + 1) % gpu.info().visible.max(1);
        let owner = (gpu.info().visible > 1)
            .then(|| {
                let module = Module { ptx: "", host: &[] };
                let gpu = Gpu::open(&GpuSelect::Cuda(Some(other)), module)?;
                let memory = gpu.alloc(MemKind::Vmm, LEN)?;
                Ok::<_, Failure>((gpu, memory))
            })
            .transpose()?;
        let import = |(_, memory): &(Gpu, Buffer)| gpu.import(&memory.export()?);
        Ok(Self {
            copier: gpu.copier().ok_or("no copier")?,
            host: gpu.alloc(MemKind::PinnedHost, LEN)?,
            back: gpu.alloc(MemKind::PinnedHost, LEN)?,
            // Both ends of copies within the GPU.
            device: gpu.alloc(MemKind::Device, 2 * LEN)?,
            peer: owner.as_ref().map(import).transpose()?,
            _owner: owner,
        })
    }

    pub(crate) fn host(&self) -> &Buffer {
        &self.host
    }

    pub(crate) fn device(&self) -> &Buffer {
        &self.device
    }

    /// Name, destination with its offset, source with its offset.
    pub(crate) fn ways(&self) -> Vec<(&'static str, End<'_>, End<'_>)> {
        let (host, back, device) = ((&self.host, 0), (&self.back, 0), (&self.device, 0));
        let mut ways = vec![
            ("host to GPU", device, host),
            ("GPU to host", back, device),
            ("within the GPU", (&self.device, LEN), device),
        ];
        if let Some(peer) = &self.peer {
            ways.push(("GPU to peer", (peer, 0), device));
            ways.push(("peer to GPU", device, (peer, 0)));
            ways.push(("host to peer", (peer, 0), host));
        }
        ways
    }

    /// Submits copies that the kernel may make.
    pub(crate) fn submit(&self, ops: &[CopyOp], steps: &[usize]) -> Result<u64, Failure> {
        // SAFETY: the checks keep the buffers until their copies have ended.
        Ok(unsafe { self.copier.submit_in_steps(ops, steps) }?)
    }
}

/// Copies one after another of every length from `lens`, at offsets of every kind, and compares all bytes of the destination.
fn compare(
    ends: &Ends,
    to: End<'_>,
    from: End<'_>,
    lens: impl Iterator<Item = usize>,
) -> Result<u64, Failure> {
    let (mut source, mut want, mut got) = (vec![0; LEN], vec![0; LEN], vec![0; LEN]);
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut copies = 0;
    let lens: Vec<usize> = lens.collect();
    for (round, lens) in lens.chunks(LONG_ONES).enumerate() {
        for (i, byte) in source.iter_mut().enumerate() {
            *byte = (i * 7 + i / 251 + round * 13) as u8;
        }
        from.0.write(from.1, &source)?;
        want.fill(0xee);
        to.0.write(to.1, &want)?;
        let mut ops = Vec::new();
        let mut add = |dst: usize, src: usize, len: usize| {
            want[dst..dst + len].copy_from_slice(&source[src..src + len]);
            ops.push(CopyOp {
                dst: to.0.device_addr() + (to.1 + dst) as u64,
                src: from.0.device_addr() + (from.1 + src) as u64,
                len: len as u64,
            });
        };
        for word in 0..WORDS {
            let at = LONG_ONES * PLACE + word * 24;
            add(at, at + 8 * (word % 2), 8);
        }
        for (i, &len) in lens.iter().enumerate() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // A third each: aligned, alike, anyhow.
            let (a, b) = ((random >> 20) as usize % 64, (random >> 40) as usize % 64);
            let (a, b) = [(0, 0), (a, a), (a, b)][i % 3];
            let (dst, src) = (i * PLACE + a, i * PLACE + b);
            add(dst, src, len);
        }
        copies += ops.len() as u64;
        ends.copier.wait(ends.submit(&ops, &[])?, LONG)?;
        to.0.read(to.1, &mut got)?;
        if let Some(at) = (0..LEN).find(|&i| got[i] != want[i]) {
            let (place, off) = (at / PLACE, at % PLACE);
            let len = lens.get(place).copied().unwrap_or(0);
            let (got, want) = (got[at], want[at]);
            return Err(format!(
                "byte {off} of the place of copy {place} ({len} bytes) is {got:#x}, not {want:#x}"
            )
            .into());
        }
    }
    Ok(copies)
}

/// Every length up to 8 KiB, on every way, by the kernel.
pub(crate) fn bytes(gpu: &Gpu) -> Outcome {
    let ends = Ends::new(gpu)?;
    ensure!(gpu.info().can.kernel_copies, "there is no kernel for them");
    let before = ends.copier.stats();
    let mut names = Vec::new();
    let mut copies = 0;
    for (name, to, from) in ends.ways() {
        let lens = (1..=1200).chain((1200..=8192).step_by(13));
        copies += compare(&ends, to, from, lens).map_err(|e| format!("{name}: {e}"))?;
        names.push(name);
    }
    let stats = ends.copier.stats();
    let kernel = stats.kernel_copies - before.kernel_copies;
    ensure!(
        kernel * 10 >= copies * 9,
        "{kernel} of {copies} by the kernel"
    );
    Ok(format!(
        "{copies} copies ({}), {kernel} by the kernel in {} launches, {} taken back",
        names.join(", "),
        stats.kernel_batches - before.kernel_batches,
        stats.taken_back - before.taken_back
    ))
}

/// Each step reads what the one before it wrote, along the ways in turn.
pub(crate) fn steps(gpu: &Gpu) -> Outcome {
    let ends = Ends::new(gpu)?;
    let mut places = vec![&ends.host, &ends.device];
    places.extend(&ends.peer);
    // Sixteen words, handed from place to place; never from host to host.
    let mut ops = Vec::new();
    let mut hops = vec![(0, 0)];
    while ops.len() + 16 <= 240 {
        let hop = hops.len();
        let (from, to) = (hops[hop - 1], (hop % places.len(), hop * 128));
        for word in 0..16 {
            ops.push(CopyOp {
                dst: places[to.0].device_addr() + to.1 as u64 + word * 8,
                src: places[from.0].device_addr() + from.1 as u64 + word * 8,
                len: 8,
            });
        }
        hops.push(to);
    }
    let cuts: Vec<usize> = (1..ops.len() / 16).map(|i| i * 16).collect();
    let before = ends.copier.stats().kernel_batches;
    let (mut took, mut got) = (Duration::ZERO, vec![0; 128]);
    for round in 0..200u8 {
        let data: Vec<u8> = (0..128).map(|i| i ^ round).collect();
        ends.host.write(0, &data)?;
        let started = Instant::now();
        ends.copier.wait(ends.submit(&ops, &cuts)?, LONG)?;
        took += started.elapsed();
        for &(place, at) in &hops {
            places[place].read(at, &mut got)?;
            ensure!(
                got == data,
                "round {round}: other bytes at place {place}+{at}"
            );
        }
    }
    let launches = ends.copier.stats().kernel_batches - before;
    Ok(format!(
        "{} steps in {:?}, {launches} launches",
        hops.len() - 1,
        took / 200
    ))
}

/// Beside kernels that spin: few blocks on host memory, and so many that nothing else starts.
pub(crate) fn beside_kernels(gpu: &Gpu) -> Outcome {
    let ends = Ends::new(gpu)?;
    let mut remarks = Vec::new();
    for full in [false, true] {
        let mut spin = if full {
            Spin::everywhere(gpu, MemKind::Device, LONG)?
        } else {
            Spin::start(gpu, Dims::new(4, 32), MemKind::PinnedHost, LONG)?
        };
        let before = ends.copier.stats();
        let started = Instant::now();
        let mut copies = 0;
        for (name, to, from) in ends.ways() {
            let lens = (1..=56).chain((1000..=8192).step_by(130));
            copies += compare(&ends, to, from, lens).map_err(|e| format!("{name}: {e}"))?;
        }
        let took = started.elapsed();
        ensure!(!spin.launch.is_done()?, "the spinning kernel ended early");
        spin.release()?;
        let after = ends.copier.stats();
        let on = Instant::now();
        // It is used again when the GPU has room.
        loop {
            let used = ends.copier.stats().kernel_batches;
            compare(&ends, (&ends.device, 0), (&ends.host, 0), 1..=8)?;
            if ends.copier.stats().kernel_batches > used {
                break;
            }
            ensure!(
                on.elapsed() < Duration::from_secs(5),
                "the kernel stays unused"
            );
        }
        remarks.push(format!(
            "{}: {copies} copies checked in {took:.0?}, {} by the kernel, {} launches taken back, used again after {:.0?}",
            if full { "every thread spins" } else { "4 x 32 spin on host memory" },
            after.kernel_copies - before.kernel_copies,
            after.taken_back - before.taken_back,
            on.elapsed()
        ));
    }
    Ok(remarks.join("; "))
}

/// Trips and rates of both ways in the same run.
pub(crate) fn rates(gpu: &Gpu) -> Outcome {
    let ends = Ends::new(gpu)?;
    let mut worst = f64::INFINITY;
    for (name, to, from) in ends.ways() {
        for (count, len) in [
            (1, 8),
            (4, 8),
            (8, 8),
            (16, 8),
            (32, 8),
            (64, 8),
            (256, 8),
            (256, 64),
            (64, 1024),
            (256, 1024),
            (64, 4096),
        ] {
            let ops: Vec<_> = (0..count)
                .map(|i| CopyOp {
                    dst: to.0.device_addr() + (to.1 + i * len) as u64,
                    src: from.0.device_addr() + (from.1 + i * len) as u64,
                    len: len as u64,
                })
                .collect();
            let before = ends.copier.stats().kernel_batches;
            let any = trips(&ends.copier, 200, Duration::ZERO, || ends.submit(&ops, &[]))?[100];
            let rate = pipelined(&ends.copier, count, || ends.submit(&ops, &[]))?;
            let by_kernel = ends.copier.stats().kernel_batches > before;
            // SAFETY: buffers that outlive the copies.
            let engine = || Ok(unsafe { ends.copier.submit_via_host(&ops) }?);
            let rounds = if count > 16 { 20 } else { 200 };
            let theirs = trips(&ends.copier, rounds, Duration::ZERO, engine)?[rounds / 2];
            let their_rate = pipelined(&ends.copier, count, engine)?;
            println!(
                "INFO {name}, {count} x {len} B: {any:.1?} {}, {theirs:.1?} by the engine; four under way {:.2} and {:.2} M copies/s",
                if by_kernel {
                    "by the kernel"
                } else {
                    "(engine)"
                },
                rate / 1e6,
                their_rate / 1e6
            );
            if by_kernel {
                worst = worst.min(theirs.as_secs_f64() / any.as_secs_f64());
            }
        }
    }
    Ok(format!(
        "the kernel's trips are at worst {worst:.2} of the engine's speed"
    ))
}

/// Copies a second with four tickets under way.
fn pipelined(
    copier: &Copier,
    count: usize,
    submit: impl Fn() -> Result<u64, Failure>,
) -> Result<f64, Failure> {
    const SPAN: Duration = Duration::from_millis(20);
    let (started, mut rounds, mut newest) = (Instant::now(), 0, 0);
    while started.elapsed() < SPAN {
        newest = submit()?;
        rounds += 1;
        while newest > 4 && !copier.poll(newest - 4)? {}
    }
    copier.wait(newest, LONG)?;
    Ok((rounds * count) as f64 / started.elapsed().as_secs_f64())
}
