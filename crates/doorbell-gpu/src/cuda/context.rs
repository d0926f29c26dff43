//! The device's primary context, made current around each call and never longer.
//!
//! The primary context is the one that the CUDA runtime, and so PyTorch, uses: memory and streams of both sides can meet.
//! Whatever context and stream capture the calling thread had is there again after the call.

use std::ops::Deref;
use std::sync::Arc;

use super::driver::Driver;
use super::types::*;
use crate::Result;
use crate::fork::Generation;

/// A retained primary context.
pub(crate) struct Context {
    driver: Driver,
    device: CuDevice,
    raw: CuContext,
    id: u64,
    born: Generation,
}

/// Which context it is, for as long as the process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Where the driver library lies.
    driver: usize,
    raw: CuContext,
    /// What tells a context from one before a `cudaDeviceReset`; 0 where the driver does not say.
    id: u64,
    born: Generation,
}

impl Context {
    pub(crate) fn retain(driver: Driver, device: CuDevice) -> Result<Arc<Self>> {
        let mut raw = CuContext::NULL;
        // SAFETY: `raw` is an out parameter. No flags are set: they would be another user's too.
        let code = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut raw, device) };
        driver.check("cuDevicePrimaryCtxRetain", code, || {
            format!("device {device}")
        })?;
        let mut id = 0;
        if let Some(get) = driver.cuCtxGetId {
            // SAFETY: the context above and an out parameter, which stays 0 on failure.
            unsafe { get(raw, &mut id) };
        }
        Ok(Arc::new(Self {
            driver,
            device,
            raw,
            id,
            born: Generation::now(),
        }))
    }

    pub(crate) fn device(&self) -> CuDevice {
        self.device
    }

    pub(crate) fn identity(&self) -> Identity {
        Identity {
            driver: self.driver.cuInit as usize,
            raw: self.raw,
            id: self.id,
            born: self.born,
        }
    }

    /// Is this the process that retained it?
    pub(crate) fn is_ours(&self) -> bool {
        self.born.is_current()
    }

    /// Makes the context current until the guard is dropped.
    ///
    /// The thread's capture mode is relaxed meanwhile: another thread's `cudaStreamBeginCapture` in the default global mode
    /// would otherwise make plain queries of ours fail, *and* spoil that capture.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Current<'_>> {
        self.born.check()?;
        let d = &self.driver;
        // SAFETY: `raw` is retained while `self` lives.
        let code = unsafe { (d.cuCtxPushCurrent_v2)(self.raw) };
        d.check("cuCtxPushCurrent", code, || {
            "the primary context".to_owned()
        })?;
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: `mode` is read and replaced by the thread's former mode.
        let exchanged = unsafe { (d.cuThreadExchangeStreamCaptureMode)(&mut mode) } == SUCCESS;
        Ok(Current {
            context: self,
            mode: exchanged.then_some(mode),
            _thread: std::marker::PhantomData,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // SAFETY: retained once in `retain`; everything made in it is gone, see `CudaGpu::drop`.
        let code = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
        if code != SUCCESS {
            tracing::debug!(code, "cuDevicePrimaryCtxRelease failed");
        }
    }
}

/// Proof that the context is current on this thread; derefs to the driver's table.
pub(crate) struct Current<'a> {
    context: &'a Context,
    mode: Option<std::ffi::c_int>,
    /// Current is a property of the thread.
    _thread: std::marker::PhantomData<*mut ()>,
}

impl Deref for Current<'_> {
    type Target = Driver;

    #[inline]
    fn deref(&self) -> &Driver {
        &self.context.driver
    }
}

impl Drop for Current<'_> {
    #[inline]
    fn drop(&mut self) {
        let d = &self.context.driver;
        if let Some(mut mode) = self.mode {
            // SAFETY: gives the thread its former mode back.
            unsafe { (d.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        }
        let mut popped = CuContext::NULL;
        // SAFETY: pops what `enter` pushed; guards of a thread are dropped in reverse order, being values on its stack.
        let code = unsafe { (d.cuCtxPopCurrent_v2)(&mut popped) };
        debug_assert!(
            code != SUCCESS || popped == self.context.raw,
            "unbalanced context stack"
        );
    }
}

impl Current<'_> {
    /// The context's device.
    pub(crate) fn device(&self) -> CuDevice {
        self.context.device
    }

    /// The context itself.
    pub(crate) fn raw(&self) -> CuContext {
        self.context.raw
    }

    /// A stream that never synchronises with the legacy default stream; the lower `priority`, the sooner it runs.
    pub(crate) fn new_stream(&self, priority: i32) -> Result<CuStream> {
        let mut stream = CuStream::NULL;
        // SAFETY: an out parameter.
        let code = unsafe {
            (self.cuStreamCreateWithPriority)(&mut stream, STREAM_NON_BLOCKING, priority)
        };
        self.check("cuStreamCreateWithPriority", code, || {
            format!("priority {priority}")
        })?;
        Ok(stream)
    }

    /// An event; `flags` as in `cuEventCreate`.
    pub(crate) fn new_event(&self, flags: u32) -> Result<CuEvent> {
        let mut event = CuEvent::NULL;
        // SAFETY: an out parameter.
        let code = unsafe { (self.cuEventCreate)(&mut event, flags) };
        self.check("cuEventCreate", code, || "an event".to_owned())?;
        Ok(event)
    }

    /// The best (numerically least) stream priority.
    pub(crate) fn best_priority(&self) -> i32 {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: out parameters. On failure both stay 0, the default priority.
        unsafe { (self.cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) };
        greatest
    }

    /// Marks the present end of a stream.
    #[inline]
    pub(crate) fn record(&self, event: CuEvent, stream: CuStream) -> Result<()> {
        // SAFETY: live handles of this context: they are destroyed with their owners, which lend them here.
        let code = unsafe { (self.cuEventRecord)(event, stream) };
        self.check("cuEventRecord", code, || "an event".to_owned())
    }

    /// Has the stream passed the mark? `what` names the work for the error of a faulted context.
    #[inline]
    pub(crate) fn passed(&self, event: CuEvent, what: impl FnOnce() -> String) -> Result<bool> {
        // SAFETY: as in `record`.
        match unsafe { (self.cuEventQuery)(event) } {
            SUCCESS => Ok(true),
            ERROR_NOT_READY => Ok(false),
            code => Err(self.error("cuEventQuery", code, what())),
        }
    }

    /// Queues one copy. Unified addressing tells the driver what the addresses are.
    ///
    /// # Safety
    /// Both ranges are valid for the driver until the stream has passed the copy.
    #[inline]
    pub(crate) unsafe fn copy(
        &self,
        dst: u64,
        src: u64,
        len: usize,
        stream: CuStream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.cuMemcpyAsync)(dst, src, len, stream) };
        self.check("cuMemcpyAsync", code, || {
            format!("{len} bytes from {src:#x} to {dst:#x}")
        })
    }

    /// Destroys, ignoring errors: there is nothing to do about them.
    pub(crate) fn destroy_stream(&self, stream: CuStream) {
        // SAFETY: the owner gives it up.
        unsafe { (self.cuStreamDestroy_v2)(stream) };
    }

    /// As [`Current::destroy_stream`].
    pub(crate) fn destroy_event(&self, event: CuEvent) {
        // SAFETY: the owner gives it up.
        unsafe { (self.cuEventDestroy_v2)(event) };
    }
}
