//! GPU memory as a dma-buf: how RDMA devices reach it without a kernel module of their own for it.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

use super::context::Context;
use super::types::CuDevicePtr;
use crate::{GpuError, Result};

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF_FD: c_int = 1;

/// A dma-buf of the pages that the memory lies in, and where in it the memory begins.
pub(crate) fn export(context: &Context, addr: CuDevicePtr, len: usize) -> Result<(OwnedFd, u64)> {
    let current = context.enter()?;
    let Some(get) = current.cuMemGetHandleForAddressRange else {
        return Err(GpuError::Unsupported {
            what: "a dma-buf of its memory",
            device: "this GPU".to_owned(),
            remedy: "install a driver of CUDA 11.7 or later",
        });
    };
    // Ranges are whole pages of the host.
    let page = rustix::param::page_size() as u64;
    let before = addr % page;
    let bytes = (before + len as u64).next_multiple_of(page);
    let mut fd: c_int = -1;
    // SAFETY: for this handle type the out parameter is an int; what is no memory of the device is an error code.
    let code = unsafe {
        let out = std::ptr::from_mut(&mut fd).cast();
        get(out, addr - before, bytes as usize, DMA_BUF_FD, 0)
    };
    current.check("cuMemGetHandleForAddressRange", code, || {
        format!("{bytes} bytes of device memory at {:#x}", addr - before)
    })?;
    // SAFETY: a new descriptor that is ours.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, before))
}
