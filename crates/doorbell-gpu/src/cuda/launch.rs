//! Launches: a fixed set of slots, each a stream, two events and room for parameters.
//!
//! Nothing is allocated when a kernel is launched, since an allocation may wait for the kernels that already run. The
//! parameters go to device memory by a copy on the kernel's own stream, so they arrive before it starts.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::CudaGpu;
use super::context::{Context, Current};
use super::memory::Memory;
use super::module::CudaKernel;
use super::types::*;
use crate::wait::{Deadline, poll_until};
use crate::{Dims, GpuError, Result};

/// Launches in flight at a time. With the copier's two streams and the private one this makes seven (three where there is no module): beyond eight
/// (`CUDA_DEVICE_MAX_CONNECTIONS`) streams share channels, and a copy may land behind a kernel that waits for it.
pub(crate) const SLOTS: usize = 4;
/// Bytes of parameters a launch.
pub(crate) const MAX_PARAMS: usize = 4096;

/// The slots.
pub(crate) struct Slots {
    /// One pinned and one device block, `MAX_PARAMS` a slot.
    host: Memory,
    device: Memory,
    slots: [Slot; SLOTS],
    state: Mutex<[State; SLOTS]>,
}

#[derive(Clone, Copy)]
struct Slot {
    stream: CuStream,
    started: CuEvent,
    ended: CuEvent,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Free,
    Taken,
    /// Its launch was dropped while the kernel ran: free once it has ended.
    Abandoned,
}

impl Slots {
    pub(crate) fn new(context: &Context, current: &Current<'_>) -> Result<Self> {
        let host = Memory::pinned(context, MAX_PARAMS * SLOTS)?;
        let device = Memory::device(context, MAX_PARAMS * SLOTS)?;
        let mut slots = [Slot {
            stream: CuStream::NULL,
            started: CuEvent::NULL,
            ended: CuEvent::NULL,
        }; SLOTS];
        for slot in &mut slots {
            slot.stream = current.new_stream(0)?;
            slot.started = current.new_event(EVENT_DEFAULT)?;
            slot.ended = current.new_event(EVENT_DEFAULT)?;
        }
        Ok(Self {
            host,
            device,
            slots,
            state: Mutex::new([State::Free; SLOTS]),
        })
    }

    fn state(&self) -> MutexGuard<'_, [State; SLOTS]> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Result<usize> {
        let mut state = self.state();
        let index = state.iter().position(|&s| s == State::Free);
        let index = index.ok_or(GpuError::TooManyLaunches { limit: SLOTS })?;
        state[index] = State::Taken;
        Ok(index)
    }

    /// Looks at abandoned launches; returns how many have ended since.
    pub(crate) fn reap(&self, current: &Current<'_>) -> usize {
        let mut state = self.state();
        let mut ended = 0;
        for (slot, state) in self.slots.iter().zip(state.iter_mut()) {
            if *state == State::Abandoned
                && !matches!(current.passed(slot.ended, String::new), Ok(false))
            {
                *state = State::Free;
                ended += 1;
            }
        }
        ended
    }

    /// Does a kernel still run?
    pub(crate) fn has_running(&self, current: &Current<'_>) -> bool {
        self.reap(current);
        self.state().iter().any(|&s| s != State::Free)
    }

    /// Gives everything back. No kernel runs any more.
    pub(crate) fn destroy(self, current: &Current<'_>) {
        for slot in self.slots {
            current.destroy_event(slot.started);
            current.destroy_event(slot.ended);
            current.destroy_stream(slot.stream);
        }
        self.host.free(current);
        self.device.free(current);
    }
}

/// A kernel in flight.
pub(crate) struct CudaLaunch {
    gpu: Arc<CudaGpu>,
    kernel: Arc<str>,
    slot: usize,
    done: bool,
}

impl CudaLaunch {
    /// Queues the parameters' copy and the kernel.
    ///
    /// # Safety
    /// As for [`crate::Gpu::launch`].
    pub(crate) unsafe fn start(
        gpu: &Arc<CudaGpu>,
        kernel: &CudaKernel,
        dims: Dims,
        params: &[u8],
    ) -> Result<Self> {
        let (max_blocks, max_threads) = (gpu.max_blocks, kernel.max_threads);
        if !(1..=max_blocks).contains(&dims.blocks) || !(1..=max_threads).contains(&dims.threads) {
            let kernel = kernel.name.to_string();
            let Dims { blocks, threads } = dims;
            return Err(GpuError::BadDims {
                kernel,
                blocks,
                threads,
                max_blocks,
                max_threads,
            });
        }
        if params.len() > MAX_PARAMS {
            let kernel = kernel.name.to_string();
            return Err(GpuError::ParamsTooLarge {
                kernel,
                len: params.len(),
                max: MAX_PARAMS,
            });
        }
        let current = gpu.context.enter()?;
        gpu.reap(&current);
        let index = gpu.slots().take()?;
        gpu.graveyard.begin();
        // From here on, dropping the launch gives the slot back.
        let launch = Self {
            gpu: Arc::clone(gpu),
            kernel: Arc::clone(&kernel.name),
            slot: index,
            done: false,
        };
        // SAFETY: passed on.
        match unsafe { launch.queue(&current, kernel, dims, params) } {
            Ok(()) => Ok(launch),
            Err(error) => Err(error),
        }
    }

    unsafe fn queue(
        &self,
        current: &Current<'_>,
        kernel: &CudaKernel,
        dims: Dims,
        params: &[u8],
    ) -> Result<()> {
        let slots = self.gpu.slots();
        let slot = slots.slots[self.slot];
        let offset = self.slot * MAX_PARAMS;
        if let Some(host) = slots.host.host() {
            // SAFETY: the slot's part of the block is `MAX_PARAMS` long, ours, and its last copy has ended.
            unsafe {
                let to = host.as_ptr().add(offset);
                std::ptr::copy_nonoverlapping(params.as_ptr(), to, params.len());
            }
        }
        let mut argument = slots.device.addr() + offset as u64;
        if !params.is_empty() {
            let from = slots.host.addr() + offset as u64;
            // SAFETY: both blocks live until the slots are destroyed.
            unsafe { current.copy(argument, from, params.len(), slot.stream) }?;
        }
        current.record(slot.started, slot.stream)?;
        let mut arguments = [std::ptr::from_mut(&mut argument).cast::<c_void>()];
        // SAFETY: the kernel takes one 8-byte argument, which the driver copies before it returns; what is behind the
        // address is the caller's promise.
        let code = unsafe {
            (current.cuLaunchKernel)(
                kernel.function,
                dims.blocks,
                1,
                1,
                dims.threads,
                1,
                1,
                0,
                slot.stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        // Recorded in any case: the slot is free when the event has passed, whatever was queued before it.
        let recorded = current.record(slot.ended, slot.stream);
        let shape = || {
            format!(
                "kernel `{}` as {} x {}",
                kernel.name, dims.blocks, dims.threads
            )
        };
        current.check("cuLaunchKernel", code, shape)?;
        recorded
    }

    pub(crate) fn kernel_name(&self) -> &str {
        &self.kernel
    }

    /// The kernel's time once it has ended.
    pub(crate) fn poll(&mut self) -> Result<Option<Duration>> {
        let context = Arc::clone(&self.gpu.context);
        let current = context.enter()?;
        self.ask(&current)
    }

    /// Waits until `deadline`.
    pub(crate) fn wait(&mut self, deadline: Deadline) -> Result<Option<Duration>> {
        let context = Arc::clone(&self.gpu.context);
        let current = context.enter()?;
        poll_until(deadline, || self.ask(&current))
    }

    fn ask(&mut self, current: &Current<'_>) -> Result<Option<Duration>> {
        let slot = self.gpu.slots().slots[self.slot];
        match current.passed(slot.ended, || format!("kernel `{}`", self.kernel)) {
            Ok(false) => Ok(None),
            Ok(true) => {
                let mut ms = 0f32;
                // SAFETY: both events are of this launch and have passed.
                let code =
                    unsafe { (current.cuEventElapsedTime)(&mut ms, slot.started, slot.ended) };
                self.give_back();
                current.check("cuEventElapsedTime", code, || {
                    format!("kernel `{}`", self.kernel)
                })?;
                Ok(Some(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3)))
            }
            Err(error) => {
                // A faulted context: no kernel runs in it any more.
                self.give_back();
                Err(error)
            }
        }
    }

    fn give_back(&mut self) {
        if !std::mem::replace(&mut self.done, true) {
            self.gpu.slots().state()[self.slot] = State::Free;
            self.gpu.graveyard.end();
        }
    }
}

impl Drop for CudaLaunch {
    fn drop(&mut self) {
        if self.done || !self.gpu.context.is_ours() {
            return;
        }
        let context = Arc::clone(&self.gpu.context);
        if let Ok(current) = context.enter()
            && !matches!(self.ask(&current), Ok(None))
        {
            return;
        }
        // Whoever launches, allocates or frees next looks after it.
        self.gpu.slots().state()[self.slot] = State::Abandoned;
    }
}
