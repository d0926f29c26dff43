//! Launches: results, times, deadlines, abandoning, images loaded later.

use std::time::{Duration, Instant};

use doorbell_gpu::{Dims, Gpu, GpuError, GpuSelect, MemKind, Module};

use crate::{LONG, MODULE, Outcome, Spin, ensure, read_u64};

/// Every thread runs once.
fn launch_dims(gpu: &Gpu, dims: Dims) -> Result<Duration, Box<dyn std::error::Error>> {
    let total = dims.total() as usize;
    let counter = gpu.alloc(MemKind::Device, 8)?;
    let slots = gpu.alloc(MemKind::Device, total * 8)?;
    let params = [counter.device_addr(), slots.device_addr()];
    let took = crate::launch(gpu, &gpu.kernel("count")?, dims, &params)?.wait(LONG)?;
    ensure!(
        read_u64(&counter, 0)? == total as u64,
        "some threads did not run"
    );
    let mut all = vec![0; total * 8];
    slots.read(0, &mut all)?;
    for (i, word) in all.chunks_exact(8).enumerate() {
        ensure!(
            u64::from_ne_bytes(word.try_into()?) == i as u64 + 1,
            "thread {i} wrote something else"
        );
    }
    Ok(took)
}

/// One thread, and a million; and what a launch costs.
pub(crate) fn launch(gpu: &Gpu) -> Outcome {
    let took = launch_dims(gpu, Dims::new(1, 1))?;
    let large = launch_dims(gpu, Dims::new(1000, 1024))?;
    ensure!(
        took > Duration::ZERO && large > Duration::ZERO,
        "no time was measured"
    );
    let kernel = gpu.kernel("count")?;
    let samples: Result<Vec<_>, _> = (0..200)
        .map(|_| {
            let flag = gpu.alloc(MemKind::PinnedHost, 16)?;
            let params = [flag.device_addr(), flag.device_addr() + 8];
            let started = Instant::now();
            crate::launch(gpu, &kernel, Dims::new(1, 1), &params)?.wait(LONG)?;
            Ok::<_, GpuError>(started.elapsed())
        })
        .collect();
    let mut samples = samples?;
    samples.sort();
    println!("INFO launch and wait, median of 200: {:?}", samples[100]);
    Ok(format!(
        "1 x 1 in {took:?}, 1000 x 1024 in {large:?}, {:?}",
        kernel.usage()
    ))
}

/// A wait ends before its kernel does, and the kernel is not hurt.
pub(crate) fn deadline(gpu: &Gpu) -> Outcome {
    let mut spin = Spin::start(gpu, Dims::new(2, 32), MemKind::PinnedHost, LONG)?;
    let started = Instant::now();
    let waited = spin.launch.wait(Duration::from_millis(20));
    ensure!(
        matches!(waited, Err(GpuError::TimedOut { .. })),
        "a wait of 20 ms gave {waited:?}"
    );
    let late = started.elapsed();
    ensure!(!spin.launch.is_done()?, "the kernel ended by itself");
    spin.release()?;
    Ok(format!("20 ms took {late:?}"))
}

/// As many kernels side by side as there are slots, and not more.
pub(crate) fn four_at_once(gpu: &Gpu) -> Outcome {
    let mut spins = Vec::new();
    for _ in 0..4 {
        spins.push(Spin::start(
            gpu,
            Dims::new(1, 32),
            MemKind::PinnedHost,
            LONG,
        )?);
    }
    let fifth = Spin::start(gpu, Dims::new(1, 32), MemKind::PinnedHost, LONG);
    let refused = fifth.err().and_then(|e| e.downcast::<GpuError>().ok());
    ensure!(
        matches!(refused.as_deref(), Some(GpuError::TooManyLaunches { .. })),
        "a fifth kernel ran"
    );
    for spin in &mut spins {
        spin.release()?;
    }
    Ok("all four ran at once".into())
}

/// Dropping the launch of a running kernel returns, keeps its memory, and lets go later.
pub(crate) fn abandon(gpu: &Gpu) -> Outcome {
    let spin = Spin::start(
        gpu,
        Dims::new(1, 32),
        MemKind::PinnedHost,
        Duration::from_secs(4),
    )?;
    let Spin {
        launch: launched,
        flag,
        out,
    } = spin;
    let started = Instant::now();
    drop(launched);
    let dropped = started.elapsed();
    ensure!(
        dropped < Duration::from_secs(4),
        "the drop waited for the kernel: {dropped:?}"
    );
    let (flag_ptr, out_ptr) = (
        flag.host_ptr().ok_or("no host address")?,
        out.host_ptr().ok_or("no host address")?,
    );
    drop((flag, out));
    ensure!(
        started.elapsed() < Duration::from_secs(4),
        "a free waited for the kernel"
    );
    // SAFETY: this is what is checked: the memory outlives the buffer while the abandoned kernel runs.
    let state = unsafe { out_ptr.cast::<u64>().as_ptr().read_volatile() };
    ensure!(
        state == 3,
        "the abandoned kernel does not wait any more: {state}"
    );
    // SAFETY: as above; ends the kernel.
    unsafe { flag_ptr.cast::<u64>().as_ptr().write_volatile(1) };
    launch_dims(gpu, Dims::new(1, 1))?;
    Ok(format!("the drop took {dropped:?}"))
}

/// A second image, with kernels of the same names.
pub(crate) fn load(gpu: &Gpu) -> Outcome {
    let image = gpu.load(MODULE.ptx.as_bytes())?;
    let kernel = image.kernel("store")?;
    drop(image);
    let buffer = gpu.alloc(MemKind::Device, 8)?;
    crate::launch(gpu, &kernel, Dims::new(1, 1), &[buffer.device_addr(), 5])?.wait(LONG)?;
    ensure!(
        read_u64(&buffer, 0)? == 5,
        "the second image's kernel did not run"
    );
    let broken = gpu.load(
        b".version 8.2\n.target sm_80\n.address_size 64\n.visible .entry x() { nonsense; }\n",
    );
    match broken {
        Err(GpuError::Module { log, .. }) if !log.is_empty() => {
            Ok(format!("bad PTX: {}", log.lines().next().unwrap_or("")))
        }
        other => Err(format!("bad PTX gave {other:?}").into()),
    }
}

/// What cannot be launched or opened says so.
pub(crate) fn refusals(gpu: &Gpu) -> Outcome {
    let kernel = gpu.kernel("count")?;
    for dims in [Dims::new(0, 1), Dims::new(1, 0), Dims::new(1, 1025)] {
        let refused = crate::launch(gpu, &kernel, dims, &[0, 0]);
        ensure!(
            matches!(refused, Err(GpuError::BadDims { .. })),
            "{dims:?} was not refused"
        );
    }
    ensure!(
        matches!(gpu.kernel("no such"), Err(GpuError::UnknownKernel { .. })),
        "an unknown kernel was found"
    );
    let module = Module { ptx: "", host: &[] };
    let beyond = Gpu::open(&GpuSelect::Cuda(Some(99)), module);
    ensure!(
        matches!(beyond, Err(GpuError::NoSuchDevice { .. })),
        "device 99 was opened"
    );
    let huge = gpu.alloc(MemKind::Device, 1 << 46);
    let text = huge.err().ok_or("64 TiB were allocated")?.to_string();
    Ok(format!("64 TiB: {text}"))
}
