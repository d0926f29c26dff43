//! A launched kernel: ask, wait with a deadline, abort.
//!
//! Dropping it while the kernel runs aborts it, waits a little, and otherwise abandons it (see [`Launch`]).

use std::fmt;
use std::time::Duration;

use crate::cuda::CudaLaunch;
use crate::host::HostLaunch;
use crate::kernel::LoadedImage;
use crate::wait::Deadline;
use crate::{GpuError, Result};

/// How long a dropped launch waits for its kernel to end after it was told to.
const DROP_WAIT: Duration = Duration::from_secs(2);

/// A kernel that was launched.
///
/// # Abandoning
///
/// [`Launch::abort`] raises a flag that waits of our own device code look at. It ends host kernels; a CUDA kernel has no
/// such flag and ends by its own deadlines. A launch dropped before its kernel has ended waits 2 seconds more, then logs
/// an error and lets go: the kernel's parameters, and every buffer freed since, stay allocated until it does end.
pub struct Launch {
    form: Form,
    /// How it ended, once known.
    ended: Option<std::result::Result<Duration, ()>>,
    /// The code that runs, if it is not the GPU's own module.
    _image: Option<LoadedImage>,
}

enum Form {
    Host(HostLaunch),
    Cuda(CudaLaunch),
}

impl Launch {
    pub(crate) fn host(launch: HostLaunch) -> Self {
        Self {
            form: Form::Host(launch),
            ended: None,
            _image: None,
        }
    }

    pub(crate) fn cuda(launch: CudaLaunch, image: Option<LoadedImage>) -> Self {
        Self {
            form: Form::Cuda(launch),
            ended: None,
            _image: image,
        }
    }

    /// The kernel's name.
    pub fn kernel_name(&self) -> &str {
        match &self.form {
            Form::Host(launch) => launch.kernel_name(),
            Form::Cuda(launch) => launch.kernel_name(),
        }
    }

    /// Has the kernel ended? An error says how it failed: a panic, an abort, or a fault on the GPU.
    pub fn is_done(&mut self) -> Result<bool> {
        if let Some(Ok(_)) = self.ended {
            return Ok(true);
        }
        let polled = match &mut self.form {
            Form::Host(launch) => launch.poll(),
            Form::Cuda(launch) => launch.poll(),
        };
        self.note(polled).map(|took| took.is_some())
    }

    /// Waits for the kernel's end and returns how long it ran: on CUDA between two events on its stream, on the host from
    /// the moment its threads were let go to the end of the last. [`GpuError::TimedOut`] leaves it running; wait again,
    /// or abort.
    pub fn wait(&mut self, timeout: Duration) -> Result<Duration> {
        if let Some(Ok(took)) = self.ended {
            return Ok(took);
        }
        let deadline = Deadline::after(timeout);
        let waited = match &mut self.form {
            Form::Host(launch) => launch.wait(deadline),
            Form::Cuda(launch) => launch.wait(deadline),
        };
        self.note(waited)?.ok_or_else(|| GpuError::TimedOut {
            what: format!("kernel `{}`", self.kernel_name()),
            after: timeout,
            remedy: "wait longer, or abort it; if it waits for completions, look at the queue that it waits on",
        })
    }

    /// Tells a host kernel to stop: its waits return an error. Does not wait. Without effect on a CUDA kernel.
    pub fn abort(&self) {
        match &self.form {
            Form::Host(launch) => launch.abort(),
            Form::Cuda(_) => {}
        }
    }

    fn note(&mut self, outcome: Result<Option<Duration>>) -> Result<Option<Duration>> {
        match &outcome {
            Ok(Some(took)) => self.ended = Some(Ok(*took)),
            Ok(None) => {}
            Err(_) => self.ended = Some(Err(())),
        }
        outcome
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        if self.ended.is_some() || matches!(self.is_done(), Ok(true) | Err(_)) {
            return;
        }
        self.abort();
        if let Err(GpuError::TimedOut { .. }) = self.wait(DROP_WAIT) {
            tracing::error!(
                kernel = self.kernel_name(),
                "abandoned a kernel that does not end: its parameters and all buffers freed from now on stay allocated until it does"
            );
        }
    }
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("kernel", &self.kernel_name())
            .field("ended", &self.ended.is_some())
            .finish_non_exhaustive()
    }
}
