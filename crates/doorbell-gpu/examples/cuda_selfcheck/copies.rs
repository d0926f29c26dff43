//! The copier: beside kernels that fill the GPU, within one GPU, and how fast.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use doorbell_gpu::{Buffer, Copier, CopyOp, Dims, Gpu, GpuError, MemKind};

use crate::raw::{Raw, cu};
use crate::{LONG, Outcome, Spin, ensure, launch, read_u64};

fn copier(gpu: &Gpu) -> Result<Copier, Box<dyn std::error::Error>> {
    gpu.copier().ok_or_else(|| "no copier".into())
}

fn submit(copier: &Copier, ops: &[CopyOp]) -> Result<u64, GpuError> {
    // SAFETY: the checks keep their buffers until their copies have ended.
    unsafe { copier.submit(ops) }
}

fn spread(dst: &Buffer, src: &Buffer, count: u64, len: u64) -> Vec<CopyOp> {
    (0..count)
        .map(|i| CopyOp {
            dst: dst.device_addr() + i * len,
            src: src.device_addr() + i * len,
            len,
        })
        .collect()
}

pub(crate) fn pause(time: Duration) {
    let since = Instant::now();
    while since.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// How long copies took, one after another with a pause between: sorted.
pub(crate) fn trips<E: From<GpuError>>(
    copier: &Copier,
    rounds: usize,
    gap: Duration,
    submit: impl Fn() -> Result<u64, E>,
) -> Result<Vec<Duration>, E> {
    let mut samples = Vec::new();
    for _ in 0..rounds {
        let started = Instant::now();
        let ticket = submit()?;
        while !copier.poll(ticket)? {}
        samples.push(started.elapsed());
        pause(gap);
    }
    samples.sort();
    Ok(samples)
}

/// A kernel that holds every thread of the GPU waits for a word that the copier brings.
pub(crate) fn beside_a_full_gpu(gpu: &Gpu) -> Outcome {
    let copier = copier(gpu)?;
    let host = gpu.alloc(MemKind::PinnedHost, 1 << 20)?;
    let device = gpu.alloc(MemKind::Device, 1 << 20)?;
    let back = gpu.alloc(MemKind::PinnedHost, 1 << 20)?;
    let data: Vec<u8> = (0..1 << 20).map(|i| (i * 11 + i / 777) as u8).collect();
    host.write(0, &data)?;
    let one = gpu.alloc(MemKind::PinnedHost, 8)?;
    one.write(0, &1u64.to_ne_bytes())?;
    let mut spin = Spin::everywhere(gpu, MemKind::Device, LONG)?;
    for _ in 0..20 {
        copier.wait(submit(&copier, &spread(&device, &host, 4096, 256))?, LONG)?;
        copier.wait(submit(&copier, &spread(&back, &device, 1024, 1024))?, LONG)?;
    }
    ensure!(!spin.launch.is_done()?, "the kernel ended early");
    let started = Instant::now();
    let op = CopyOp {
        dst: spin.flag.device_addr(),
        src: one.device_addr(),
        len: 8,
    };
    submit(&copier, &[op])?;
    spin.finish(1)?;
    let took = started.elapsed();
    let mut bytes = vec![0; 1 << 20];
    back.read(0, &mut bytes)?;
    ensure!(bytes == data, "bytes changed on the way in and out");
    Ok(format!(
        "{} blocks x 1024; flag by copy and the kernel's end: {took:?}",
        spin.out.len() / 8
    ))
}

/// Refused as it is; by way of host memory it works, beside a full GPU too.
pub(crate) fn within_the_gpu(gpu: &Gpu) -> Outcome {
    let copier = copier(gpu)?;
    let len = 9 << 20;
    let device = gpu.alloc(MemKind::Device, 2 * len)?;
    let data: Vec<u8> = (0..len).map(|i| (i * 3 + i / 1021) as u8).collect();
    device.write(0, &data)?;
    let a = device.device_addr();
    let op = CopyOp {
        dst: a + len as u64,
        src: a,
        len: len as u64,
    };
    let refused = submit(&copier, &[op]);
    ensure!(
        matches!(refused, Err(GpuError::SameGpuCopy { .. })),
        "gave {refused:?}"
    );
    let mut spin = Spin::everywhere(gpu, MemKind::PinnedHost, LONG)?;
    let started = Instant::now();
    // SAFETY: the buffer outlives the copy.
    let ticket = unsafe { copier.submit_via_host(&[op]) }?;
    copier.wait(ticket, LONG)?;
    let took = started.elapsed();
    spin.release()?;
    let mut back = vec![0; len];
    device.read(len, &mut back)?;
    ensure!(back == data, "bytes changed on the way");
    Ok(format!(
        "9 MiB in {took:?}, {:.1} GB/s",
        len as f64 / took.as_secs_f64() / 1e9
    ))
}

/// Dropping buffers while a kernel runs neither waits nor stops the copier.
pub(crate) fn free_beside_a_kernel(gpu: &Gpu) -> Outcome {
    let copier = copier(gpu)?;
    let host = gpu.alloc(MemKind::PinnedHost, 4096)?;
    let device = gpu.alloc(MemKind::Device, 4096)?;
    let doomed: Vec<_> = [MemKind::Device, MemKind::PinnedHost, MemKind::Vmm]
        .into_iter()
        .map(|kind| gpu.alloc(kind, 1 << 20))
        .collect::<Result<_, _>>()?;
    let mut spin = Spin::everywhere(gpu, MemKind::PinnedHost, LONG)?;
    let started = Instant::now();
    drop(doomed);
    let dropped = started.elapsed();
    copier.wait(submit(&copier, &spread(&device, &host, 64, 64))?, LONG)?;
    ensure!(!spin.launch.is_done()?, "the kernel ended early");
    spin.release()?;
    Ok(format!("three frees queued in {dropped:?}"))
}

/// Rates and latencies, beside the driver's own in the same run.
pub(crate) fn rates(gpu: &Gpu) -> Outcome {
    let copier = copier(gpu)?;
    let raw = Raw::open(gpu.info().ordinal.unwrap_or(0))?;
    let host = gpu.alloc(MemKind::PinnedHost, 1 << 20)?;
    let device = gpu.alloc(MemKind::Device, 1 << 20)?;
    println!("INFO batched: {}", copier.batched());
    let mut worst = f64::INFINITY;
    // Once beside an idle GPU, once beside a full one, as in real use. That one's blocks poll GPU memory: what polling host memory
    // does to copies is no property of the copier, and measured below.
    for full in [false, true] {
        let mut spin = if full {
            Some(Spin::everywhere(
                gpu,
                MemKind::Device,
                Duration::from_secs(30),
            )?)
        } else {
            None
        };
        for (name, dst, src) in [("to device", &device, &host), ("to host", &host, &device)] {
            let beside = if full { "full" } else { "idle" };
            for len in [8, 4096] {
                let one = || submit(&copier, &spread(dst, src, 1, len));
                let samples = trips(&copier, 2000, Duration::ZERO, one)?;
                println!(
                    "INFO {name}, {len} B, one at a time, {beside} GPU: median {:?}, p99 {:?}",
                    samples[1000], samples[1980]
                );
            }
            let ops = spread(dst, src, 256, 64);
            let ours = batches_of_ours(&copier, &ops)?;
            let theirs = batches_of_the_driver(&raw, &ops)?;
            let singles = singles_of_the_driver(&raw, &ops)?;
            println!(
                "INFO {name}, 64 B in batches of 256, {beside} GPU: ours {:.2} M/s, the driver's batches {:.2} M/s, its single calls {:.2} M/s",
                ours / 1e6,
                theirs / 1e6,
                singles / 1e6
            );
            worst = worst.min(ours / theirs.max(singles));
        }
        if let Some(spin) = &mut spin {
            spin.release()?;
        }
    }
    for blocks in [1, 16, 64] {
        let mut spin = Spin::start(
            gpu,
            Dims::new(blocks, 1),
            MemKind::PinnedHost,
            Duration::from_secs(10),
        )?;
        let one = || submit(&copier, &spread(&device, &host, 1, 8));
        let samples = trips(&copier, 200, Duration::ZERO, one)?;
        println!(
            "INFO to device, 8 B, one at a time, beside {blocks} blocks that poll one word of host memory: median {:?}",
            samples[100]
        );
        spin.release()?;
    }
    // A word of GPU memory that a kernel waits for, its answer in host memory: one way and back.
    let mut samples = Vec::new();
    for _ in 0..50 {
        let one = gpu.alloc(MemKind::PinnedHost, 8)?;
        one.write(0, &1u64.to_ne_bytes())?;
        let spin = Spin::start(gpu, Dims::new(1, 1), MemKind::Device, LONG)?;
        let op = CopyOp {
            dst: spin.flag.device_addr(),
            src: one.device_addr(),
            len: 8,
        };
        let started = Instant::now();
        let ticket = submit(&copier, &[op])?;
        while read_u64(&spin.out, 0)? != 1 {
            ensure!(started.elapsed() < LONG, "the kernel does not see the copy");
        }
        samples.push(started.elapsed());
        copier.wait(ticket, LONG)?;
        let mut spin = spin;
        spin.finish(1)?;
    }
    samples.sort();
    println!(
        "INFO a word by copy and the kernel's answer: median {:?}",
        samples[25]
    );
    let stored = gpu.alloc(MemKind::Device, 8)?;
    launch(
        gpu,
        &gpu.kernel("store")?,
        Dims::new(1, 1),
        &[stored.device_addr(), 1],
    )?
    .wait(LONG)?;
    // Printed, not asserted: what a rate is depends on who else uses the machine.
    Ok(format!("at least {worst:.2} of the driver's own rate"))
}

const ROUNDS: usize = 400;

/// As an engine does: four batches in flight.
fn batches_of_ours(copier: &Copier, ops: &[CopyOp]) -> Result<f64, Box<dyn std::error::Error>> {
    let started = Instant::now();
    let mut newest = 0;
    for _ in 0..ROUNDS {
        newest = submit(copier, ops)?;
        while !copier.poll(newest.saturating_sub(4))? {}
    }
    copier.wait(newest, LONG)?;
    Ok((ROUNDS * ops.len()) as f64 / started.elapsed().as_secs_f64())
}

fn batches_of_the_driver(raw: &Raw, ops: &[CopyOp]) -> Result<f64, Box<dyn std::error::Error>> {
    #[repr(C)]
    struct Attributes([c_int; 5], u32);
    type Batch = unsafe extern "C" fn(
        *const u64,
        *const u64,
        *const usize,
        usize,
        *mut Attributes,
        *mut usize,
        usize,
        *mut c_void,
    ) -> c_int;
    // SAFETY: the signature of CUDA 13.0's call.
    let Ok(batch) = (unsafe { raw.get::<Batch>("cuMemcpyBatchAsync_v2") }) else {
        return Ok(0.0);
    };
    let (dst, src): (Vec<_>, Vec<_>) = ops.iter().map(|o| (o.dst, o.src)).unzip();
    let size: Vec<_> = ops.iter().map(|o| o.len as usize).collect();
    let stream = raw.stream()?;
    let started = Instant::now();
    for round in 0..ROUNDS {
        let (mut attributes, mut first) = (Attributes([1, 0, 0, 0, 0], 1), 0);
        // SAFETY: arrays of that many copies between buffers of the check.
        let code = unsafe {
            batch(
                dst.as_ptr(),
                src.as_ptr(),
                size.as_ptr(),
                ops.len(),
                &mut attributes,
                &mut first,
                1,
                stream,
            )
        };
        ensure!(code == 0, "cuMemcpyBatchAsync_v2 gave {code}");
        if round % 4 == 3 {
            raw.synchronize(stream)?;
        }
    }
    raw.synchronize(stream)?;
    let rate = (ROUNDS * ops.len()) as f64 / started.elapsed().as_secs_f64();
    raw.destroy(stream)?;
    Ok(rate)
}

fn singles_of_the_driver(raw: &Raw, ops: &[CopyOp]) -> Result<f64, Box<dyn std::error::Error>> {
    let stream = raw.stream()?;
    let started = Instant::now();
    for _ in 0..ROUNDS / 8 {
        for op in ops {
            cu!(raw, cuMemcpyAsync(u64, u64, usize, *mut c_void)(op.dst, op.src, op.len as usize, stream))?;
        }
        raw.synchronize(stream)?;
    }
    let rate = (ROUNDS / 8 * ops.len()) as f64 / started.elapsed().as_secs_f64();
    raw.destroy(stream)?;
    Ok(rate)
}
