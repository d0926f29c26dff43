//! One launch on the host GPU: a thread per GPU thread, held at a gate until all exist.
//!
//! The gate makes "more blocks than cores" safe: a kernel whose threads wait for each other never starts before its
//! last thread does, and a launch that the system cannot hold has run nothing.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use doorbell_device::host::{Hooks, HostGrid, HostKernel};

use super::MAX_HOST_THREADS;
use crate::fork::Generation;
use crate::graveyard::Graveyard;
use crate::wait::Deadline;
use crate::{Dims, GpuError, LaunchOpts, Result};

/// Stack of a kernel thread. Kernels are `no_std` code with small frames; what needs room is a panic's message. Only
/// touched pages cost memory.
const STACK: usize = 256 << 10;

/// A running or finished kernel.
pub(crate) struct HostLaunch {
    run: Arc<Run>,
    threads: Vec<JoinHandle<()>>,
    born: Generation,
}

/// What the launch and its threads share; lives until the last thread has ended.
struct Run {
    kernel: &'static str,
    params: Params,
    abort: Arc<AtomicBool>,
    graveyard: Arc<Graveyard>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    gate: Gate,
    running: u32,
    started: Option<Instant>,
    took: Option<Duration>,
    panic: Option<(u32, u32, String)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Gate {
    Shut,
    Open,
    /// The launch failed: go home without running.
    Cancelled,
}

impl Run {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_gate(&self, gate: Gate) {
        let mut state = self.lock();
        state.gate = gate;
        state.started = Some(Instant::now());
        self.changed.notify_all();
    }

    /// Waits at the gate; true when the kernel is to run.
    fn pass_gate(&self) -> bool {
        let state = self.lock();
        let state = self
            .changed
            .wait_while(state, |s| s.gate == Gate::Shut)
            .unwrap_or_else(PoisonError::into_inner);
        state.gate == Gate::Open
    }

    /// The body of a kernel thread.
    fn thread(&self, block: u32, thread: u32, kernel: impl FnOnce(*const u8)) {
        if !self.pass_gate() {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| kernel(self.params.ptr())));
        let mut state = self.lock();
        if let Err(payload) = outcome {
            // The others may wait for this thread at a barrier: they look at the flag there.
            self.abort.store(true, Ordering::Release);
            let text = panic_text(payload.as_ref());
            state.panic.get_or_insert((block, thread, text));
        }
        state.running -= 1;
        if state.running == 0 {
            state.took = state.started.map(|at| at.elapsed());
            self.changed.notify_all();
            drop(state);
            // Here and not where the launch is waited for: an abandoned launch may have no one who waits.
            self.graveyard.end();
        }
    }
}

impl HostLaunch {
    /// Starts the threads and opens the gate.
    ///
    /// # Safety
    /// As for [`crate::Gpu::launch`].
    pub(super) unsafe fn start(
        graveyard: &Arc<Graveyard>,
        kernel: HostKernel,
        dims: Dims,
        params: &[u8],
        opts: LaunchOpts,
    ) -> Result<Self> {
        let total = Self::check(kernel.name, dims)?;
        let abort = Arc::new(AtomicBool::new(false));
        let hooks = Hooks {
            gave_up: None,
            relax: opts.relax,
            abort: Arc::clone(&abort),
        };
        let run = Arc::new(Run {
            kernel: kernel.name,
            params: Params::new(params),
            abort,
            graveyard: Arc::clone(graveyard),
            state: Mutex::new(State {
                gate: Gate::Shut,
                running: total,
                started: None,
                took: None,
                panic: None,
            }),
            changed: Condvar::new(),
        });
        let threads = if opts.emulate_warp {
            let grid = HostGrid::<32>::new(dims.blocks, dims.threads, hooks);
            spawn_all(&run, dims, |block, thread| {
                let me = grid.thread(block, thread);
                // SAFETY: the launcher promised that the kernel may run with these parameters and this shape.
                move |params: *const u8| unsafe { (kernel.warp)(&me, params) }
            })
        } else {
            let grid = HostGrid::<1>::new(dims.blocks, dims.threads, hooks);
            spawn_all(&run, dims, |block, thread| {
                let me = grid.thread(block, thread);
                // SAFETY: as above.
                move |params: *const u8| unsafe { (kernel.fast)(&me, params) }
            })
        }?;
        graveyard.begin();
        run.set_gate(Gate::Open);
        Ok(Self {
            run,
            threads,
            born: Generation::now(),
        })
    }

    fn check(kernel: &str, dims: Dims) -> Result<u32> {
        if dims.blocks == 0 || dims.threads == 0 || dims.threads > 1024 {
            return Err(GpuError::BadDims {
                kernel: kernel.to_owned(),
                blocks: dims.blocks,
                threads: dims.threads,
                max_blocks: MAX_HOST_THREADS,
                max_threads: 1024,
            });
        }
        let asked = dims.total();
        u32::try_from(asked)
            .ok()
            .filter(|&n| n <= MAX_HOST_THREADS)
            .ok_or_else(|| GpuError::TooManyThreads {
                kernel: kernel.to_owned(),
                asked,
                limit: MAX_HOST_THREADS,
            })
    }

    pub(crate) fn kernel_name(&self) -> &'static str {
        self.run.kernel
    }

    pub(crate) fn abort(&self) {
        self.run.abort.store(true, Ordering::Release);
    }

    /// `Some` once all threads have ended: the time from the gate to the last thread's end, or how it failed.
    pub(crate) fn poll(&mut self) -> Result<Option<Duration>> {
        self.born.check()?;
        let took = self.run.lock().took;
        took.map(|took| self.outcome(took)).transpose()
    }

    /// Waits until `deadline`; `Ok(None)` when it passes first.
    pub(crate) fn wait(&mut self, deadline: Deadline) -> Result<Option<Duration>> {
        self.born.check()?;
        // A sleeping wait, not a poll: on few cores the kernel's threads need them all.
        let mut state = self.run.lock();
        while state.took.is_none() && !deadline.passed() {
            let nap = deadline.left().min(Duration::from_secs(3600));
            state = self
                .run
                .changed
                .wait_timeout(state, nap)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        let took = state.took;
        drop(state);
        took.map(|took| self.outcome(took)).transpose()
    }

    fn outcome(&mut self, took: Duration) -> Result<Duration> {
        for thread in self.threads.drain(..) {
            // Its work is over, so this waits for the thread's exit only. Panics were caught and kept.
            let _ = thread.join();
        }
        let kernel = || self.run.kernel.to_owned();
        if let Some((block, thread, message)) = &self.run.lock().panic {
            return Err(GpuError::KernelPanicked {
                kernel: kernel(),
                block: *block,
                thread: *thread,
                message: message.clone(),
            });
        }
        if self.run.abort.load(Ordering::Acquire) {
            return Err(GpuError::Aborted { kernel: kernel() });
        }
        Ok(took)
    }
}

fn spawn_all<F: FnOnce(*const u8) + Send + 'static>(
    run: &Arc<Run>,
    dims: Dims,
    mut body: impl FnMut(u32, u32) -> F,
) -> Result<Vec<JoinHandle<()>>> {
    let total = dims.blocks * dims.threads;
    let mut threads = Vec::with_capacity(total as usize);
    for block in 0..dims.blocks {
        for thread in 0..dims.threads {
            let kernel = body(block, thread);
            let shared = Arc::clone(run);
            let spawned = std::thread::Builder::new()
                // Linux keeps 15 bytes.
                .name(format!("gpu b{block} t{thread}"))
                .stack_size(STACK)
                .spawn(move || shared.thread(block, thread, kernel));
            match spawned {
                Ok(handle) => threads.push(handle),
                Err(source) => {
                    let started = threads.len() as u32;
                    run.set_gate(Gate::Cancelled);
                    for handle in threads {
                        let _ = handle.join();
                    }
                    let kernel = run.kernel.to_owned();
                    return Err(GpuError::Spawn {
                        kernel,
                        started,
                        asked: total,
                        source,
                    });
                }
            }
        }
    }
    Ok(threads)
}

/// The parameter structure, copied so that the caller's may go; aligned for any structure of our kernels.
struct Params(Box<[Line]>);

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

impl Params {
    fn new(bytes: &[u8]) -> Self {
        let mut lines = vec![Line([0; 64]); bytes.len().div_ceil(64).max(1)].into_boxed_slice();
        for (line, chunk) in lines.iter_mut().zip(bytes.chunks(64)) {
            line.0[..chunk.len()].copy_from_slice(chunk);
        }
        Self(lines)
    }

    fn ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a text".to_owned()
    }
}
