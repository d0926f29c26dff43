//! The GPU's copy engine as the HCA wants it, and GPU memory of peer processes.
//!
//! The HCA knows no GPU and the GPU crate no HCA; this adapts one to the other. [`Known`] remembers which memory the copy
//! engine can take as it is: what was not pinned here (a peer's shared memory, say) is staged through pinned memory.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use doorbell_gpu::{Copier, CopyOp, Export, Gpu, MemKind};
use doorbell_hca::dma::{DeviceHandle, Dma, DmaOp, Staging};
use doorbell_hca::shm::{DeviceImporter, DeviceRegion};

/// GPU memory that can be handed to another process.
pub(crate) trait Exportable: Send + Sync {
    fn export(&self) -> doorbell_gpu::Result<Export>;
}

/// The memory of one device that its copy engine can take.
#[derive(Default)]
pub(crate) struct Known {
    /// Pinned host memory: bytes by address.
    pinned: RwLock<BTreeMap<u64, u64>>,
    /// GPU memory of ours, by address.
    gpu: Mutex<BTreeMap<u64, Weak<dyn Exportable>>>,
}

impl Known {
    fn gpu(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<dyn Exportable>>> {
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_pinned(&self, addr: u64, len: u64) {
        self.pinned
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(addr, len);
    }

    pub(crate) fn add_gpu(&self, addr: u64, memory: Weak<dyn Exportable>) {
        self.gpu().insert(addr, memory);
    }

    /// The memory at `addr` is going away.
    pub(crate) fn forget(&self, addr: u64) {
        self.pinned
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&addr);
        self.gpu().remove(&addr);
    }

    fn is_pinned(&self, addr: u64, len: u64) -> bool {
        let pinned = self.pinned.read().unwrap_or_else(PoisonError::into_inner);
        pinned
            .range(..=addr)
            .next_back()
            .is_some_and(|(&start, &size)| {
                // The address is at or after the start, so nothing wraps.
                let offset = addr - start;
                offset <= size && len <= size - offset
            })
    }
}

/// The copy engine of a GPU, or the absence of one.
pub(crate) struct Engine {
    gpu: Gpu,
    dma: Option<Arc<Adapter>>,
    known: Arc<Known>,
}

impl Engine {
    pub(crate) fn new(gpu: &Gpu) -> Self {
        let known = Arc::new(Known::default());
        let adapter = |copier| {
            Arc::new(Adapter {
                copier,
                gpu: gpu.clone(),
                device: device(gpu),
                known: Arc::clone(&known),
            })
        };
        Self {
            gpu: gpu.clone(),
            dma: gpu.copier().map(adapter),
            known,
        }
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn known(&self) -> &Arc<Known> {
        &self.known
    }

    /// For registering GPU memory; `None` on the host GPU, whose memory the CPU reaches.
    pub(crate) fn dma(&self) -> Option<Arc<dyn Dma>> {
        self.dma.clone().map(|d| d as Arc<dyn Dma>)
    }

    /// Foreign GPU memory is freed: what its addresses meant is no longer so.
    pub(crate) fn foreign_freed(&self) {
        if let Some(dma) = &self.dma {
            dma.copier.forget_memory();
        }
    }
}

impl DeviceImporter for Engine {
    fn import(&self, handle: &[u8], fd: Option<OwnedFd>, len: u64) -> Result<DeviceRegion, String> {
        let Some(own) = &self.dma else {
            return Err("this process uses no GPU that could import memory".into());
        };
        let handle = Handle::from_bytes(handle)?;
        if !handle.holds(len) {
            return Err(format!(
                "GPU memory handle: {len} bytes at offset {} of {} are not inside it",
                handle.offset, handle.whole
            ));
        }
        let whole = usize::try_from(handle.whole).map_err(|e| e.to_string())?;
        let export = handle.export(fd, whole)?;
        let buffer = self.gpu.import(&export).map_err(|e| e.to_string())?;
        // Copies are by our engine; the memory belongs to the peer's GPU, which decides whether they need a detour.
        let dma = Arc::new(Adapter {
            copier: own.copier.clone(),
            gpu: self.gpu.clone(),
            device: handle.device,
            known: Arc::clone(&self.known),
        });
        Ok(DeviceRegion {
            addr: buffer.device_addr() + handle.offset,
            len,
            dma,
            keep: Arc::new(buffer),
        })
    }
}

/// What travels to a peer with GPU memory: 96 bytes.
#[derive(Debug, PartialEq, Eq)]
struct Handle {
    device: u64,
    /// Where the memory begins in the allocation that comes.
    offset: u64,
    /// Bytes of that allocation.
    whole: u64,
    /// A `cuIpc` handle; `None`: the memory comes as a descriptor.
    ipc: Option<[u8; 64]>,
}

const HANDLE_MAGIC: [u8; 4] = *b"DBGM";
const HANDLE_VERSION: u8 = 2;

impl Handle {
    fn to_bytes(&self) -> Vec<u8> {
        let mut out = HANDLE_MAGIC.to_vec();
        out.extend_from_slice(&[HANDLE_VERSION, u8::from(self.ipc.is_some()), 0, 0]);
        out.extend_from_slice(&self.device.to_le_bytes());
        out.extend_from_slice(&self.ipc.unwrap_or([0; 64]));
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.whole.to_le_bytes());
        out
    }

    /// Are there `len` bytes from the offset on?
    fn holds(&self, len: u64) -> bool {
        let end = self.offset.checked_add(len);
        end.is_some_and(|end| end <= self.whole)
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        // Magic and version come first: another version may have another length.
        if bytes.len() < 5 || bytes[..4] != HANDLE_MAGIC || bytes[4] != HANDLE_VERSION {
            return Err(format!(
                "GPU memory handle {:02x?} version {}, this release speaks {HANDLE_MAGIC:02x?} version {HANDLE_VERSION}",
                &bytes[..bytes.len().min(4)],
                bytes.get(4).copied().unwrap_or(0)
            ));
        }
        let bytes: &[u8; 96] = bytes
            .try_into()
            .map_err(|_| format!("GPU memory handle of {} bytes, not 96", bytes.len()))?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let mut ipc = [0; 64];
        ipc.copy_from_slice(&bytes[16..80]);
        Ok(Self {
            device: word(8),
            offset: word(80),
            whole: word(88),
            ipc: (bytes[5] == 1).then_some(ipc),
        })
    }

    fn export(&self, fd: Option<OwnedFd>, len: usize) -> Result<Export, String> {
        match (self.ipc, fd) {
            (Some(handle), None) => Ok(Export::CudaIpc { handle, len }),
            (None, Some(fd)) => Ok(Export::Fd { fd, len }),
            _ => Err("GPU memory handle with too many or too few descriptors".into()),
        }
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
    /// The GPU that the memory belongs to.
    device: u64,
    known: Arc<Known>,
}

impl Dma for Adapter {
    fn submit(&self, ops: &[DmaOp], steps: &[usize]) -> Result<u64, String> {
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
        unsafe { self.copier.submit_in_steps(&ops, steps) }.map_err(|e| e.to_string())
    }

    fn poll(&self, ticket: u64) -> Result<bool, String> {
        self.copier.poll(ticket).map_err(|e| e.to_string())
    }

    fn ordered(&self) -> bool {
        // One stream.
        true
    }

    fn device(&self) -> Option<u64> {
        Some(self.device)
    }

    fn reaches_device(&self, _other: &dyn Dma) -> bool {
        // A peer's memory could be imported only because this GPU reaches it.
        true
    }

    fn reaches_host(&self, addr: u64, len: u64) -> bool {
        self.known.is_pinned(addr, len)
    }

    fn staging(&self, len: usize) -> Result<Staging, String> {
        let buffer = self
            .gpu
            .alloc(MemKind::PinnedHost, len)
            .map_err(|e| e.to_string())?;
        let Some(ptr) = buffer.host_ptr() else {
            return Err("pinned memory without a host address".into());
        };
        let known = Arc::clone(&self.known);
        known.add_pinned(ptr.as_ptr().addr() as u64, len as u64);
        let keep = Arc::new(Pinned { buffer, known });
        Ok(Staging { ptr, len, keep })
    }

    fn dmabuf(&self, addr: u64, len: usize) -> Option<(OwnedFd, u64)> {
        let made = self.gpu.dmabuf(addr, len);
        made.inspect_err(|e| tracing::debug!("{e}")).ok()
    }

    fn export(&self, addr: u64, len: u64) -> Result<DeviceHandle, String> {
        let own = self.known.gpu().get(&addr).and_then(Weak::upgrade);
        let exported = match own {
            Some(memory) => memory.export().map(|export| (export, 0)),
            None => {
                let len = usize::try_from(len).map_err(|e| e.to_string())?;
                self.gpu.export_foreign(addr, len)
            }
        };
        let (export, offset) = exported.map_err(|e| e.to_string())?;
        let (ipc, fd, whole) = match export {
            Export::CudaIpc { handle, len } => (Some(handle), None, len),
            Export::Fd { fd, len } => (None, Some(Arc::new(fd)), len),
        };
        Ok(DeviceHandle {
            bytes: Handle {
                device: self.device,
                offset,
                whole: whole as u64,
                ipc,
            }
            .to_bytes(),
            fd,
        })
    }
}

/// Pinned memory that the copy engine knows of, until it goes.
struct Pinned {
    buffer: doorbell_gpu::Buffer,
    known: Arc<Known>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(ptr) = self.buffer.host_ptr() {
            self.known.forget(ptr.as_ptr().addr() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_means_wholly_inside() {
        let known = Known::default();
        known.add_pinned(1000, 100);
        known.add_pinned(2000, 100);
        for (addr, len, want) in [
            (1000, 100, true),
            (1050, 50, true),
            (1050, 51, false),
            (999, 1, false),
            (1100, 0, true),
            (1100, 1, false),
            (2099, 1, true),
            (2000, u64::MAX, false),
            (0, 1, false),
        ] {
            assert_eq!(known.is_pinned(addr, len), want, "{addr}+{len}");
        }
        known.forget(1000);
        assert!(!known.is_pinned(1000, 1) && known.is_pinned(2000, 1));
    }

    #[test]
    fn handles_round_trip_and_garbage_is_refused() {
        for ipc in [None, Some([7; 64])] {
            let h = Handle {
                device: 0x1234_5678_9abc_def0,
                offset: 4096,
                whole: 1 << 21,
                ipc,
            };
            let bytes = h.to_bytes();
            assert_eq!(bytes.len(), 96);
            assert_eq!(Handle::from_bytes(&bytes).unwrap(), h);
            for cut in 0..96 {
                assert!(Handle::from_bytes(&bytes[..cut]).is_err());
            }
            let mut other = bytes.clone();
            other[4] = 9;
            // What another version has behind its number is its own business.
            for len in [80, 96] {
                let e = Handle::from_bytes(&other[..len]).unwrap_err();
                assert!(e.contains("version 9") && e.contains("version 2"), "{e}");
            }
        }
    }

    #[test]
    fn a_handle_holds_what_lies_inside_it() {
        let h = Handle {
            device: 0,
            offset: 4096,
            whole: 8192,
            ipc: None,
        };
        assert!(h.holds(0) && h.holds(4096));
        assert!(!h.holds(4097) && !h.holds(u64::MAX));
        assert!(h.export(None, 1).is_err());
    }
}
