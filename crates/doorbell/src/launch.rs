//! Launching kernels on a device.
//!
//! What `doorbell-gpu` does, and what it cannot know: a caller-driven HCA has to be run by whoever waits, which is the
//! kernel's own threads on the host GPU, and [`Launch::wait`] everywhere.

use std::fmt;
use std::time::{Duration, Instant};

use doorbell_gpu::{Dims, GpuError, LaunchOpts};
use doorbell_kernels::params::Params;

use crate::device::{Device, KernelNote};
use crate::{Error, Result};

impl Device {
    /// Starts a kernel of the device's module and returns at once. The parameters are copied.
    ///
    /// # Safety
    /// `params` is what this kernel expects, and the addresses and handles in it are valid for what the kernel does with them
    /// until it has ended. Memory, regions and exports of this device stay mapped until then by themselves, even when dropped.
    pub unsafe fn launch<P: Params>(&self, kernel: &str, dims: Dims, params: &P) -> Result<Launch> {
        // SAFETY: passed on.
        unsafe { self.launch_bytes(kernel, dims, params.as_bytes()) }
    }

    /// As [`Device::launch`], with the parameters as bytes: for kernels of your own.
    ///
    /// # Safety
    /// As for [`Device::launch`].
    pub unsafe fn launch_bytes(&self, kernel: &str, dims: Dims, params: &[u8]) -> Result<Launch> {
        let gpu = &self.inner.gpu;
        gpu.check_process()?;
        let kernel = gpu.kernel(kernel)?;
        let opts = LaunchOpts {
            relax: self.inner.provider.relax_hook(),
            emulate_warp: self.inner.settings.emulate_warp,
        };
        // SAFETY: passed on.
        let launch = unsafe { gpu.launch(&kernel, dims, params, opts)? };
        let note = Some(self.note_kernel(launch.kernel_name()));
        Ok(Launch {
            launch,
            note,
            device: self.clone(),
        })
    }
}

/// A running kernel. Dropping it gives it up: it is told to stop, waited for a little, and otherwise left to its own
/// deadlines; nothing that it may still touch is unmapped.
pub struct Launch {
    launch: doorbell_gpu::Launch,
    /// Dropped when its end is known.
    note: Option<KernelNote>,
    device: Device,
}

impl Launch {
    /// Whether the kernel has ended; an error says how it failed.
    pub fn is_done(&mut self) -> Result<bool> {
        let done = self.launch.is_done()?;
        if done {
            self.note = None;
        }
        Ok(done)
    }

    /// Waits for the kernel's end and returns how long it ran. A time-out leaves it running: wait again, or abort.
    pub fn wait(&mut self, timeout: Duration) -> Result<Duration> {
        let ended = self.wait_for_end(timeout);
        if ended.is_ok() {
            self.note = None;
        }
        ended
    }

    fn wait_for_end(&mut self, timeout: Duration) -> Result<Duration> {
        if !self.device.is_caller_driven() {
            let ended = self.launch.wait(timeout);
            if matches!(ended, Err(GpuError::TimedOut { .. })) {
                self.tell_stuck(timeout);
            }
            return Ok(ended?);
        }
        let deadline = doorbell_hca::deadline(timeout);
        loop {
            let worked = self.device.poll();
            match self.launch.wait(Duration::ZERO) {
                Err(GpuError::TimedOut { .. }) if Instant::now() < deadline => {}
                Err(GpuError::TimedOut { .. }) => {
                    self.tell_stuck(timeout);
                    return Err(Error::TimedOut {
                        what: format!("the end of kernel `{}`", self.launch.kernel_name()),
                        after: timeout,
                        remedy: "wait longer, or abort it; if it waits for completions, look at its queue pairs",
                    });
                }
                ended => return Ok(ended?),
            }
            if !worked {
                std::thread::yield_now();
            }
        }
    }

    /// Logs what is missing ([`Device::diagnosis`]): a kernel that does not end mostly waits for one.
    fn tell_stuck(&self, timeout: Duration) {
        // Whoever only looks whether it has ended is told that, and nothing else.
        if timeout < Duration::from_millis(100) {
            return;
        }
        for line in self.device.diagnosis() {
            tracing::warn!("{line}");
        }
    }

    /// Tells the kernel to stop. Ends waits of kernels on the host GPU; a CUDA kernel ends by its deadlines, or when its
    /// queue pairs fail.
    pub fn abort(&self) {
        self.launch.abort();
    }
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.launch.fmt(f)
    }
}
