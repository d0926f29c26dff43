//! The host GPU: the same kernels, run by operating system threads of this process.
//!
//! A GPU thread is an OS thread, a block is a group of them, memory is host memory. It is how everything works on a
//! machine without a GPU, and how index and protocol bugs are found; scopes and warp convergence show on a GPU only.

mod launch;
mod memory;

use std::sync::Arc;

use doorbell_device::host::HostKernel;

use crate::graveyard::Graveyard;
use crate::info::{Backend, Capabilities, GpuInfo};
use crate::{Dims, GpuError, LaunchOpts, Result};

pub(crate) use launch::HostLaunch;
pub(crate) use memory::Mapping;

/// Most threads of one host launch. A thread is a kernel object and a stack: beyond this, machines that people run
/// tests on start refusing, and nothing is learnt that fewer threads would not show.
pub const MAX_HOST_THREADS: u32 = 8192;

/// The host GPU's state: only what must outlive a launch.
pub(crate) struct HostGpu {
    kernels: &'static [HostKernel],
    graveyard: Arc<Graveyard>,
}

impl HostGpu {
    pub(crate) fn new(kernels: &'static [HostKernel]) -> Self {
        Self {
            kernels,
            graveyard: Arc::default(),
        }
    }

    pub(crate) fn info(notes: Vec<String>) -> GpuInfo {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        GpuInfo {
            name: "host threads".to_owned(),
            backend: Backend::Host,
            ordinal: None,
            visible: 0,
            sm_count: u32::try_from(cores).unwrap_or(u32::MAX),
            compute_capability: None,
            pci_bus_id: None,
            numa_node: None,
            driver_version: None,
            uuid: None,
            memory_bytes: 0,
            mig: false,
            mps: false,
            gdrdrv: false,
            can: Capabilities {
                max_threads_per_block: 1024,
                max_blocks: MAX_HOST_THREADS,
                max_threads_per_sm: MAX_HOST_THREADS,
                host_native_atomics: true,
                ..Capabilities::default()
            },
            notes,
        }
    }

    pub(crate) fn graveyard(&self) -> &Arc<Graveyard> {
        &self.graveyard
    }

    pub(crate) fn alloc(&self, len: usize) -> Result<Mapping> {
        Mapping::zeroed(len)
    }

    pub(crate) fn free(&self, mapping: Mapping) {
        self.graveyard.bury(move || {
            drop(mapping);
            None
        });
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<HostKernel> {
        self.kernels
            .iter()
            .find(|k| k.name == name)
            .copied()
            .ok_or_else(|| GpuError::UnknownKernel {
                name: name.to_owned(),
                backend: "host",
                known: self
                    .kernels
                    .iter()
                    .map(|k| k.name)
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// Starts a kernel.
    ///
    /// # Safety
    /// As for [`crate::Gpu::launch`].
    pub(crate) unsafe fn launch(
        &self,
        kernel: HostKernel,
        dims: Dims,
        params: &[u8],
        opts: LaunchOpts,
    ) -> Result<HostLaunch> {
        // SAFETY: passed on.
        unsafe { HostLaunch::start(&self.graveyard, kernel, dims, params, opts) }
    }
}
