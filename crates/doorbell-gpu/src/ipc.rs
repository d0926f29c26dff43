//! Device memory shared between processes.
//!
//! How the description travels (a socket, a descriptor passed along) is the caller's business.

use std::os::fd::OwnedFd;

use crate::GpuError;

/// Exported device memory; made by [`crate::Buffer::export`], opened by [`crate::Gpu::import`] in another process.
///
/// The exporter keeps its buffer until the importer is done: nothing in CUDA does.
#[derive(Debug)]
pub enum Export {
    /// A `cuIpc` handle of [`crate::MemKind::Device`] memory. It opens the driver's whole block, of up to 2 MiB, in which a small
    /// allocation lives.
    CudaIpc {
        /// `CUipcMemHandle`.
        handle: [u8; 64],
        /// Bytes of the buffer.
        len: usize,
    },
    /// A descriptor of [`crate::MemKind::Vmm`] memory: that allocation and nothing beside it.
    Fd {
        /// The descriptor.
        fd: OwnedFd,
        /// Bytes of the buffer.
        len: usize,
    },
}

pub(crate) fn unsupported(device: &str) -> GpuError {
    GpuError::Unsupported {
        what: "sharing of this memory between processes",
        device: device.to_owned(),
        remedy: "share host memory by a memfd; device memory of a CUDA GPU by MemKind::Device or MemKind::Vmm",
    }
}
