//! Living in a process with another user of CUDA, as PyTorch is one.

use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use doorbell_gpu::{CopyOp, Dims, Gpu, MemKind};

use crate::raw::{Raw, cu};
use crate::{LONG, MODULE, Outcome, Spin, ensure, launch, read_u64};

/// A bit of everything, as the engine and the set-up would do it.
fn exercise(gpu: &Gpu, value: u64) -> Result<(), Box<dyn std::error::Error>> {
    let device = gpu.alloc(MemKind::Device, 64)?;
    let pinned = gpu.alloc(MemKind::PinnedHost, 64)?;
    launch(
        gpu,
        &gpu.kernel("store")?,
        Dims::new(1, 1),
        &[device.device_addr(), value],
    )?
    .wait(LONG)?;
    let copier = gpu.copier().ok_or("no copier")?;
    let op = CopyOp {
        dst: pinned.device_addr(),
        src: device.device_addr(),
        len: 8,
    };
    // SAFETY: buffers that outlive the copy.
    let ticket = unsafe { copier.submit(&[op]) }?;
    copier.wait(ticket, LONG)?;
    ensure!(
        read_u64(&pinned, 0)? == value,
        "the copy brought something else"
    );
    Ok(())
}

/// The caller's current context is what it was: the primary, none, or one of its own.
pub(crate) fn context(gpu: &Gpu) -> Outcome {
    let raw = Raw::open(gpu.info().ordinal.unwrap_or(0))?;
    exercise(gpu, 1)?;
    ensure!(
        raw.current()? == raw.context,
        "the primary context is not current any more"
    );
    cu!(raw, cuCtxSetCurrent(*mut c_void)(std::ptr::null_mut()))?;
    exercise(gpu, 2)?;
    ensure!(raw.current()?.is_null(), "a context was left current");
    cu!(raw, cuCtxSetCurrent(*mut c_void)(raw.context))?;
    // Memory and kernels of both sides meet, since both are of the primary context.
    let mut foreign = 0u64;
    cu!(raw, cuMemAlloc_v2(*mut u64, usize)(&mut foreign, 64))?;
    launch(gpu, &gpu.kernel("store")?, Dims::new(1, 1), &[foreign, 3])?.wait(LONG)?;
    let mut word = 0u64;
    let to = std::ptr::from_mut(&mut word).cast();
    cu!(raw, cuMemcpyDtoH_v2(*mut c_void, u64, usize)(to, foreign, 8))?;
    ensure!(
        word == 3,
        "our kernel's store is not in the other library's memory"
    );
    cu!(raw, cuMemFree_v2(u64)(foreign))?;
    Ok("primary, none; memory of both sides".into())
}

/// Another library's stream capture, in the strict mode, is neither in our way nor spoilt.
pub(crate) fn capture(gpu: &Gpu) -> Outcome {
    let raw = Raw::open(gpu.info().ordinal.unwrap_or(0))?;
    let stream = raw.stream()?;
    cu!(raw, cuStreamBeginCapture_v2(*mut c_void, c_int)(stream, 0))?;
    let here = exercise(gpu, 4);
    let there = std::thread::scope(|s| {
        s.spawn(|| exercise(gpu, 5).map_err(|e| e.to_string()))
            .join()
            .expect("a thread")
    });
    let mut graph = std::ptr::null_mut();
    let ended = cu!(raw, cuStreamEndCapture(*mut c_void, *mut *mut c_void)(stream, &mut graph));
    here?;
    there?;
    ended?;
    cu!(raw, cuGraphDestroy(*mut c_void)(graph))?;
    raw.destroy(stream)?;
    Ok("on the capturing thread and on another".into())
}

/// How long calls take while a kernel runs: which ones wait for it, for the documentation's sake.
pub(crate) fn blocking_calls(gpu: &Gpu) -> Outcome {
    const BUDGET: Duration = Duration::from_millis(300);
    type Step<'a> = (
        &'a str,
        Box<dyn Fn() -> Result<(), Box<dyn std::error::Error>> + 'a>,
    );
    let raw = Raw::open(gpu.info().ordinal.unwrap_or(0))?;
    let forget = |kind| {
        move || {
            // Dropped later: its free is deferred, so this times the allocation.
            gpu.alloc(kind, 1 << 20)?;
            Ok(())
        }
    };
    let raw_free = || {
        let mut addr = 0u64;
        cu!(raw, cuMemAlloc_v2(*mut u64, usize)(&mut addr, 1 << 20))?;
        cu!(raw, cuMemFree_v2(u64)(addr))
    };
    let raw_free_host = || {
        let mut addr = std::ptr::null_mut();
        cu!(raw, cuMemHostAlloc(*mut *mut c_void, usize, c_uint)(&mut addr, 1 << 20, 3))?;
        cu!(raw, cuMemFreeHost(*mut c_void)(addr))
    };
    let steps: [Step<'_>; 6] = [
        ("alloc device", Box::new(forget(MemKind::Device))),
        ("alloc pinned", Box::new(forget(MemKind::PinnedHost))),
        ("alloc exportable", Box::new(forget(MemKind::Vmm))),
        (
            "load an image",
            Box::new(|| Ok(gpu.load(MODULE.ptx.as_bytes()).map(drop)?)),
        ),
        ("cuMemAlloc and cuMemFree", Box::new(raw_free)),
        ("cuMemHostAlloc and cuMemFreeHost", Box::new(raw_free_host)),
    ];
    for (name, step) in &steps {
        let mut spin = Spin::start(gpu, Dims::new(1, 32), MemKind::PinnedHost, BUDGET)?;
        let started = Instant::now();
        step()?;
        let took = started.elapsed();
        let still = !spin.launch.is_done()?;
        println!(
            "INFO beside a kernel, {name}: {took:?}{}",
            if still { "" } else { ", WAITED for the kernel" }
        );
        spin.finish(2)?;
    }
    let mut spin = Spin::start(gpu, Dims::new(1, 32), MemKind::PinnedHost, LONG)?;
    exercise(gpu, 6)?;
    spin.release()?;
    Ok("see above; a launch and a copy go on beside a kernel".into())
}
