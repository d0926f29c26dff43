//! Reading and writing device memory from the CPU: the copy engine, a pinned staging buffer, a stream of its own.
//!
//! For set-up and checks, not for the data path. Bounded: a stream that does not move is an error, not a hang. Fills are
//! copies too, since the driver's memset runs on a multiprocessor, which a kernel may hold for ever.

use std::time::Duration;

use super::context::{Context, Current};
use super::memory::Memory;
use super::types::*;
use crate::wait::{Deadline, poll_until};
use crate::{GpuError, Result};

/// Bytes of the staging buffer.
const STAGING: usize = 1 << 20;
/// The most that one step may take.
const STEP: Duration = Duration::from_secs(10);

/// The private stream and its staging buffer.
pub(crate) struct MemOps {
    stream: CuStream,
    event: CuEvent,
    staging: Memory,
    /// A copy timed out and may still use the staging buffer.
    busy: bool,
}

impl MemOps {
    pub(crate) fn new(context: &Context, current: &Current<'_>) -> Result<Self> {
        Ok(Self {
            stream: current.new_stream(0)?,
            event: current.new_event(EVENT_DISABLE_TIMING)?,
            staging: Memory::pinned(context, STAGING)?,
            busy: false,
        })
    }

    /// Copies `from` to device memory.
    ///
    /// # Safety
    /// `dst` is device memory of at least that size until this returns, and after a time-out for ever.
    pub(crate) unsafe fn write(&mut self, context: &Context, dst: u64, from: &[u8]) -> Result<()> {
        let current = context.enter()?;
        for (i, chunk) in from.chunks(STAGING).enumerate() {
            self.settle(&current)?;
            let staging = self.staging_ptr();
            // SAFETY: the staging buffer is at least a chunk, and idle after `settle`.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), staging, chunk.len()) };
            let at = dst + (i * STAGING) as u64;
            // SAFETY: the caller's promise for `dst`; the staging buffer is ours.
            unsafe { current.copy(at, self.staging.addr(), chunk.len(), self.stream) }?;
            self.finish(&current)?;
        }
        Ok(())
    }

    /// Copies device memory to `into`.
    ///
    /// # Safety
    /// As for [`MemOps::write`], with `src`.
    pub(crate) unsafe fn read(
        &mut self,
        context: &Context,
        src: u64,
        into: &mut [u8],
    ) -> Result<()> {
        let current = context.enter()?;
        for (i, chunk) in into.chunks_mut(STAGING).enumerate() {
            self.settle(&current)?;
            let at = src + (i * STAGING) as u64;
            // SAFETY: the caller's promise for `src`; the staging buffer is ours and idle.
            unsafe { current.copy(self.staging.addr(), at, chunk.len(), self.stream) }?;
            self.finish(&current)?;
            // SAFETY: the copy has ended; the staging buffer is at least a chunk.
            unsafe {
                std::ptr::copy_nonoverlapping(self.staging_ptr(), chunk.as_mut_ptr(), chunk.len());
            }
        }
        Ok(())
    }

    /// Sets `len` bytes of device memory.
    ///
    /// # Safety
    /// As for [`MemOps::write`].
    pub(crate) unsafe fn fill(
        &mut self,
        context: &Context,
        dst: u64,
        value: u8,
        len: usize,
    ) -> Result<()> {
        let current = context.enter()?;
        self.settle(&current)?;
        // SAFETY: the staging buffer is that large, and idle.
        unsafe { self.staging_ptr().write_bytes(value, STAGING.min(len)) };
        // A bounded number in the stream at a time: the driver blocks when its queue is full.
        const AHEAD: usize = 64;
        for (i, start) in (0..len).step_by(STAGING).enumerate() {
            let n = STAGING.min(len - start);
            // SAFETY: the caller's promise for `dst`; the staging buffer is not changed before `finish`.
            unsafe { current.copy(dst + start as u64, self.staging.addr(), n, self.stream) }?;
            if i % AHEAD == AHEAD - 1 {
                self.finish(&current)?;
            }
        }
        self.finish(&current)
    }

    fn staging_ptr(&self) -> *mut u8 {
        self.staging
            .host()
            .map_or(std::ptr::null_mut(), |p| p.as_ptr())
    }

    /// Waits for the stream, up to [`STEP`].
    fn finish(&mut self, current: &Current<'_>) -> Result<()> {
        current.record(self.event, self.stream)?;
        self.busy = true;
        self.settle(current)
    }

    /// The staging buffer is idle when this returns `Ok`.
    fn settle(&mut self, current: &Current<'_>) -> Result<()> {
        if !self.busy {
            return Ok(());
        }
        let event = self.event;
        let done = poll_until(Deadline::after(STEP), || {
            let passed = current.passed(event, || "a copy of device memory".to_owned())?;
            Ok::<_, GpuError>(passed.then_some(()))
        })?;
        done.ok_or(GpuError::TimedOut {
            what: "a copy between the CPU and device memory".to_owned(),
            after: STEP,
            remedy: "the copy engine waits for a running kernel: let it end; see the hazards in this crate's documentation",
        })?;
        self.busy = false;
        Ok(())
    }

    /// Gives everything back if the stream is idle; else leaves it all to the process's end.
    pub(crate) fn destroy(mut self, current: &Current<'_>) {
        if self.settle(current).is_ok() {
            current.destroy_event(self.event);
            current.destroy_stream(self.stream);
            self.staging.free(current);
        }
    }
}
