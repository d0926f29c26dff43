//! What every entry needs: errors of the layers below as statuses, arguments as Rust values, results into C's memory.

use std::ffi::{CStr, c_char};
use std::time::Duration;

use doorbell_gpu::GpuError;
use doorbell_hca::HcaError;

use crate::error::{Failure, Result};
use crate::status::Status;

impl From<doorbell::Error> for Failure {
    fn from(error: doorbell::Error) -> Self {
        use doorbell::Error;
        let status = match &error {
            Error::Setting { .. } | Error::Argument { .. } => Status::Invalid,
            Error::Gpu(gpu) => of_gpu(gpu),
            Error::Hca(hca) => of_hca(hca),
            Error::Shm(_) | Error::Bootstrap(_) => Status::Peer,
            Error::Endpoint(_) => Status::Version,
            Error::State { .. } => Status::State,
            Error::Qp { .. } => Status::Completion,
            Error::TimedOut { .. } => Status::TimedOut,
            Error::Unsupported { .. } => Status::Unsupported,
            Error::Os { .. } => Status::System,
            // The enum may grow; what has no status of its own yet is still an error with a text.
            _ => Status::System,
        };
        Self::new(status, error)
    }
}

fn of_gpu(error: &GpuError) -> Status {
    match error {
        GpuError::BadSelection(_)
        | GpuError::BadSetting { .. }
        | GpuError::BadDims { .. }
        | GpuError::ParamsTooLarge { .. } => Status::Invalid,
        GpuError::NoDriver { .. }
        | GpuError::MissingSymbol { .. }
        | GpuError::NoSuchDevice { .. } => Status::NoGpu,
        GpuError::Unsupported { .. } | GpuError::Forked => Status::Unsupported,
        // cuda.h: CUDA_ERROR_OUT_OF_MEMORY.
        GpuError::Driver { code: 2, .. } => Status::NoMemory,
        GpuError::Driver { .. } | GpuError::Module { .. } => Status::NoGpu,
        _ => Status::System,
    }
}

fn of_hca(error: &HcaError) -> Status {
    match error {
        HcaError::BadConfig { .. } | HcaError::BadQp { .. } | HcaError::BadRegion { .. } => {
            Status::Invalid
        }
        HcaError::UnknownQp { .. } => Status::Invalid,
        HcaError::WrongState { .. } => Status::State,
        HcaError::TimedOut { .. } => Status::TimedOut,
        _ => Status::System,
    }
}

/// The error of a device call that the CPU made.
pub(crate) fn of_device(error: doorbell_device::Error) -> Failure {
    use doorbell_device::Failure as Why;
    let status = match error.failure() {
        Why::Completion { .. } | Why::QpError | Why::Closed | Why::EngineDown => Status::Completion,
        Why::TimedOut | Why::NoSpace => Status::TimedOut,
        Why::Invalid => Status::Invalid,
        Why::Stuck | Why::Lapped => Status::State,
        _ => Status::Internal,
    };
    Failure::new(status, error)
}

/// A C duration.
pub(crate) fn timeout(ns: u64) -> Duration {
    Duration::from_nanos(ns)
}

/// A text from C, or `None` for NULL.
///
/// # Safety
/// `at` is null or a terminated string.
pub(crate) unsafe fn string<'a>(name: &str, at: *const c_char) -> Result<Option<&'a str>> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(at) };
    match bytes.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(Failure::invalid(
            name,
            format_args!("{bytes:?}"),
            "give UTF-8",
        )),
    }
}

/// Refuses a NULL result pointer before anything has been done.
pub(crate) fn wanted<T>(name: &str, at: *mut T) -> Result<()> {
    if at.is_null() {
        Err(Failure::invalid(name, "NULL", "say where the result goes"))
    } else {
        Ok(())
    }
}

/// Stores a result, unless the caller does not want it.
///
/// # Safety
/// `at` is null or writable.
pub(crate) unsafe fn store<T>(at: *mut T, value: T) {
    if !at.is_null() {
        // SAFETY: the caller's promise; alignment is not relied upon.
        unsafe { at.write_unaligned(value) };
    }
}
