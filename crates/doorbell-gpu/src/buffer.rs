//! Memory that kernels use: owned buffers, and foreign host memory registered with the GPU.
//!
//! Dropping either never pulls memory from under a kernel of ours: the free is queued until no launch is in flight.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::cuda::{self, CudaGpu};
use crate::host::{HostGpu, Mapping};
use crate::ipc::{self, Export};
use crate::{GpuError, Keep, MemKind, Result, shared};

/// An owned piece of memory of a GPU, zeroed when made.
pub struct Buffer {
    kind: MemKind,
    len: usize,
    memory: Memory,
}

enum Memory {
    /// `None` only while dropping.
    Host(Arc<HostGpu>, Option<Mapping>),
    /// As above.
    Cuda(Arc<CudaGpu>, Option<cuda::Memory>),
}

impl Buffer {
    pub(crate) fn host(gpu: &Arc<HostGpu>, kind: MemKind, mapping: Mapping, len: usize) -> Self {
        Self {
            kind,
            len,
            memory: Memory::Host(Arc::clone(gpu), Some(mapping)),
        }
    }

    pub(crate) fn cuda(
        gpu: &Arc<CudaGpu>,
        kind: MemKind,
        memory: cuda::Memory,
        len: usize,
    ) -> Self {
        Self {
            kind,
            len,
            memory: Memory::Cuda(Arc::clone(gpu), Some(memory)),
        }
    }

    /// The address that kernels use.
    pub fn device_addr(&self) -> u64 {
        match &self.memory {
            Memory::Cuda(_, memory) => memory.as_ref().map_or(0, cuda::Memory::addr),
            Memory::Host(_, mapping) => mapping
                .as_ref()
                .map_or(0, |m| m.ptr().as_ptr().expose_provenance() as u64),
        }
    }

    /// The address that the CPU uses, if it can reach the memory. Kernels may be at work behind it: access it with
    /// atomics, or with [`Buffer::read`] and [`Buffer::write`].
    pub fn host_ptr(&self) -> Option<NonNull<u8>> {
        match &self.memory {
            Memory::Host(_, mapping) => mapping.as_ref().map(Mapping::ptr),
            Memory::Cuda(_, memory) => memory.as_ref().and_then(cuda::Memory::host),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it lives.
    pub fn kind(&self) -> MemKind {
        self.kind
    }

    /// Copies bytes out, through the copy engine if the CPU cannot reach them; bounded by 10 seconds. Concurrent
    /// writers give old or new words.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.check(offset, into.len())?;
        if let Some(ptr) = self.host_ptr() {
            // SAFETY: the range was checked; concurrent access is by kernels, atomics, or this function and its like.
            unsafe { shared::load(ptr.as_ptr().add(offset), into) };
            return Ok(());
        }
        // SAFETY: the range was checked, and this buffer is freed after the copy has ended.
        self.engine(|gpu, addr| unsafe { gpu.read(addr + offset as u64, into) })
    }

    /// Copies bytes in, as [`Buffer::read`] copies them out. They are in place when this returns.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.check(offset, from.len())?;
        if let Some(ptr) = self.host_ptr() {
            // SAFETY: as in `read`.
            unsafe { shared::store(ptr.as_ptr().add(offset), from) };
            return Ok(());
        }
        // SAFETY: as in `read`.
        self.engine(|gpu, addr| unsafe { gpu.write(addr + offset as u64, from) })
    }

    /// Sets every byte.
    pub fn fill(&self, value: u8) -> Result<()> {
        if let Some(ptr) = self.host_ptr() {
            // SAFETY: as in `read`.
            unsafe { shared::fill(ptr.as_ptr(), value, self.len) };
            return Ok(());
        }
        // SAFETY: as in `read`.
        self.engine(|gpu, addr| unsafe { gpu.fill(addr, value, self.len) })
    }

    /// Describes it for another process. Device and exportable memory of a CUDA GPU only.
    pub fn export(&self) -> Result<Export> {
        match &self.memory {
            Memory::Cuda(gpu, Some(cuda::Memory::Vmm { handle, .. })) => Ok(Export::Fd {
                fd: gpu.export_fd(*handle)?,
                len: self.len,
            }),
            Memory::Cuda(gpu, Some(cuda::Memory::Device { addr })) => Ok(Export::CudaIpc {
                handle: gpu.export_ipc(*addr)?,
                len: self.len,
            }),
            _ => Err(ipc::unsupported("a buffer in host or imported memory")),
        }
    }

    fn engine(&self, work: impl FnOnce(&CudaGpu, u64) -> Result<()>) -> Result<()> {
        match &self.memory {
            Memory::Cuda(gpu, _) => work(gpu, self.device_addr()),
            // Host memory has a host address, and its callers have used it.
            Memory::Host(..) => Ok(()),
        }
    }

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        check(offset, len, self.len)
    }
}

fn check(offset: usize, len: usize, size: usize) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(GpuError::OutOfRange { offset, len, size }),
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match &mut self.memory {
            Memory::Host(gpu, mapping) => {
                if let Some(mapping) = mapping.take() {
                    gpu.free(mapping);
                }
            }
            Memory::Cuda(gpu, memory) => {
                if let Some(memory) = memory.take() {
                    gpu.free(memory, None);
                }
            }
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("kind", &self.kind)
            .field("device_addr", &format_args!("{:#x}", self.device_addr()))
            .field("len", &self.len)
            .finish()
    }
}

/// Foreign host memory that kernels may use; see [`crate::Gpu::register_host`].
pub struct Registered {
    ptr: NonNull<u8>,
    len: usize,
    device_addr: u64,
    owner: Owner,
    keep: Option<Keep>,
}

enum Owner {
    Host(Arc<HostGpu>),
    /// `None` only while dropping.
    Cuda(Arc<CudaGpu>, Option<cuda::Memory>),
}

// SAFETY: `ptr` is only handed out; whoever registered the memory promised it valid for all threads of the kernel.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    pub(crate) fn host(
        gpu: &Arc<HostGpu>,
        ptr: NonNull<u8>,
        len: usize,
        keep: Option<Keep>,
    ) -> Self {
        let device_addr = ptr.as_ptr().expose_provenance() as u64;
        Self {
            ptr,
            len,
            device_addr,
            owner: Owner::Host(Arc::clone(gpu)),
            keep,
        }
    }

    pub(crate) fn cuda(
        gpu: &Arc<CudaGpu>,
        memory: cuda::Memory,
        device_addr: u64,
        ptr: NonNull<u8>,
        len: usize,
        keep: Option<Keep>,
    ) -> Self {
        Self {
            ptr,
            len,
            device_addr,
            owner: Owner::Cuda(Arc::clone(gpu), Some(memory)),
            keep,
        }
    }

    /// The address that kernels use.
    pub fn device_addr(&self) -> u64 {
        self.device_addr
    }

    /// The address that the CPU uses.
    pub fn host_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Is it empty?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes out; concurrent writers give old or new words.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        check(offset, into.len(), self.len)?;
        // SAFETY: the range was checked; whoever registered the memory promised that it is valid, and that concurrent access
        // is by kernels, atomics, or this function and its like.
        unsafe { shared::load(self.ptr.as_ptr().add(offset), into) };
        Ok(())
    }

    /// Copies bytes in, as [`Registered::read`] copies them out.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        check(offset, from.len(), self.len)?;
        // SAFETY: as in `read`.
        unsafe { shared::store(self.ptr.as_ptr().add(offset), from) };
        Ok(())
    }

    /// Sets every byte.
    pub fn fill(&self, value: u8) -> Result<()> {
        // SAFETY: as in `read`.
        unsafe { shared::fill(self.ptr.as_ptr(), value, self.len) };
        Ok(())
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let keep = self.keep.take();
        match &mut self.owner {
            Owner::Host(gpu) => gpu.graveyard().bury(move || keep),
            Owner::Cuda(gpu, memory) => {
                if let Some(memory) = memory.take() {
                    gpu.free(memory, keep);
                }
            }
        }
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("device_addr", &format_args!("{:#x}", self.device_addr))
            .field("len", &self.len)
            .finish()
    }
}
