//! The GPU's copy engine as the HCA wants it, and GPU memory of peer processes.
//!
//! The HCA knows no GPU and the GPU crate no HCA; this adapts one to the other. Host memory that was not pinned here (what
//! a peer shared, say) is staged by the HCA through pinned memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use doorbell_gpu::{Copier, CopyOp, Gpu, MemKind};
use doorbell_hca::dma::{Dma, DmaOp, Staging};
use doorbell_hca::shm::DeviceRegion;

use crate::provider::Imports;

/// The copy engine of a GPU, or the absence of one.
pub(crate) struct Engine {
    dma: Option<Arc<Adapter>>,
}

impl Engine {
    pub(crate) fn new(gpu: &Gpu) -> Self {
        let dma = gpu.copier().map(|copier| {
            Arc::new(Adapter {
                copier,
                gpu: gpu.clone(),
                device: device(gpu),
            })
        });
        Self { dma }
    }

    /// For registering GPU memory; `None` on the host GPU, whose memory the CPU reaches.
    pub(crate) fn dma(&self) -> Option<Arc<dyn Dma>> {
        self.dma.clone().map(|d| d as Arc<dyn Dma>)
    }
}

impl Imports for Engine {
    fn import(
        &self,
        _handle: &[u8],
        _fd: Option<OwnedFd>,
        _len: u64,
    ) -> Result<DeviceRegion, String> {
        Err("this process has no GPU that could import memory".into())
    }
}

/// A number for the GPU that is the same in every process.
fn device(gpu: &Gpu) -> u64 {
    // FNV-1a: short, and equal for equal names, which is all that is asked of it.
    let name = gpu.info().uuid.clone().unwrap_or_default();
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    })
}

struct Adapter {
    copier: Copier,
    gpu: Gpu,
    device: u64,
}

impl Dma for Adapter {
    fn submit(&self, ops: &[DmaOp]) -> Result<u64, String> {
        let ops: Vec<CopyOp> = ops
            .iter()
            .map(|op| CopyOp {
                dst: op.dst,
                src: op.src,
                len: op.len,
            })
            .collect();
        // SAFETY: the HCA keeps every region that it copies to or from until the ticket has ended, and touches the bytes
        // meanwhile by atomics only.
        unsafe { self.copier.submit(&ops) }.map_err(|e| e.to_string())
    }

    fn poll(&self, ticket: u64) -> Result<bool, String> {
        self.copier.poll(ticket).map_err(|e| e.to_string())
    }

    fn ordered(&self) -> bool {
        true
    }

    fn device(&self) -> Option<u64> {
        Some(self.device)
    }

    fn staging(&self, len: usize) -> Result<Staging, String> {
        let buffer = self
            .gpu
            .alloc(MemKind::PinnedHost, len)
            .map_err(|e| e.to_string())?;
        match buffer.host_ptr() {
            Some(ptr) => Ok(Staging {
                ptr,
                len,
                keep: Arc::new(buffer),
            }),
            None => Err("pinned memory without a host address".into()),
        }
    }
}
