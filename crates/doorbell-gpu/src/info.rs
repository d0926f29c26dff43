//! What is known about an opened GPU: enough to print, to place threads near it, and to know what it can do.
//!
//! Read once when the GPU is opened. Absent facts are `None`, never guessed.

/// Which back end runs the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// Threads of this process.
    Host,
    /// A GPU driven through the CUDA driver library.
    Cuda,
}

impl Backend {
    /// `host` or `cuda`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Facts about an opened GPU.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GpuInfo {
    /// The product name, or `host threads`.
    pub name: String,
    /// Which back end.
    pub backend: Backend,
    /// CUDA ordinal in this process.
    pub ordinal: Option<u32>,
    /// CUDA devices that this process sees; 0 on the host GPU.
    pub visible: u32,
    /// Streaming multiprocessors; on the host GPU, CPU cores this process may use.
    pub sm_count: u32,
    /// Compute capability (major, minor).
    pub compute_capability: Option<(u32, u32)>,
    /// PCI address, `0000:1b:00.0`, as sysfs writes it.
    pub pci_bus_id: Option<String>,
    /// NUMA node of the host that the GPU hangs on.
    pub numa_node: Option<u32>,
    /// CUDA version of the driver (major, minor), from `cuDriverGetVersion`.
    pub driver_version: Option<(u32, u32)>,
    /// `GPU-…` or, in MIG mode, `MIG-…`.
    pub uuid: Option<String>,
    /// Bytes of GPU memory; on the host GPU 0, meaning that of the host.
    pub memory_bytes: u64,
    /// The device is a MIG slice: fewer multiprocessors and copy engines, and no peer access.
    pub mig: bool,
    /// The process is a client of the Multi-Process Service: a fault in one client can end all of them.
    pub mps: bool,
    /// GDRCopy's kernel driver is loaded (`/dev/gdrdrv`): the CPU could map GPU memory.
    pub gdrdrv: bool,
    /// What the device can do.
    pub can: Capabilities,
    /// What was chosen and why, and what is likely to give trouble; one sentence each.
    pub notes: Vec<String>,
}

/// Device attributes that matter here (`CU_DEVICE_ATTRIBUTE_*` in `cuda.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Most threads a block.
    pub max_threads_per_block: u32,
    /// Most blocks a grid.
    pub max_blocks: u32,
    /// Most resident threads a multiprocessor.
    pub max_threads_per_sm: u32,
    /// Copy engines.
    pub async_engines: u32,
    /// Memory can be exported as a file descriptor ([`crate::MemKind::Vmm`]).
    pub vmm_fd: bool,
    /// `cuIpc` handles work.
    pub ipc: bool,
    /// A NIC can reach GPU memory through `nvidia-peermem`.
    pub gpu_direct_rdma: bool,
    /// A NIC can reach GPU memory through a dma-buf.
    pub dma_buf: bool,
    /// Copies are submitted in batches (`cuMemcpyBatchAsync`, CUDA 12.8).
    pub batch_copy: bool,
    /// Many small copies are carried out by a kernel ([`crate::Copier::submit_in_steps`]).
    pub kernel_copies: bool,
    /// GPU atomics on host memory are atomic with the CPU's (not so over PCIe).
    pub host_native_atomics: bool,
}
