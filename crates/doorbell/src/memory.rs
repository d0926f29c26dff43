//! Memory that kernels and the HCA use: where it lives, who else can map it, how the CPU looks at it.
//!
//! [`Memory`] is a cheap handle to one piece. It is never given out as `&[u8]` or `&mut [u8]`, because a kernel, an engine
//! or another process may be writing it: the CPU copies in and out ([`Memory::read`], [`Memory::write`]) or uses whole
//! words ([`Memory::load`], [`Memory::store`]). It stays mapped until its last user, kernels included, is done with it.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use doorbell_gpu::{Buffer, Keep, MemKind, Registered};
use doorbell_hca::shm::{RegionOptions, SharedRegion};

use crate::dma::{Engine, Exportable};
use crate::{Error, Result};

/// Where memory lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// The GPU's own memory; on the host GPU, host memory.
    Gpu,
    /// Host memory that the GPU reads and writes; peers' puts into it are carried out by this process's HCA only.
    Host,
    /// Host memory in a sealed memfd that the GPU reads and writes, and that peer processes map when it is registered: what
    /// the shared memory link copies into directly.
    Shared,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "gpu",
            Self::Host => "host",
            Self::Shared => "shared",
        })
    }
}

/// One piece of memory; clones are handles to the same piece.
#[derive(Clone)]
pub struct Memory {
    inner: Arc<Inner>,
}

struct Inner {
    place: Place,
    len: usize,
    device_addr: u64,
    host: Option<NonNull<u8>>,
    backing: Backing,
    engine: Arc<Engine>,
}

// SAFETY: `host` is an address; whoever dereferences it does so by atomics or says why not.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

enum Backing {
    Buffer(Buffer),
    Registered(Registered, Option<Sharable>),
    /// Somebody else's GPU memory.
    Foreign(
        u64,
        #[expect(dead_code, reason = "held for its drop")] Option<Keep>,
    ),
}

/// The memfd that memory lies in, and where.
#[derive(Clone)]
pub(crate) struct Sharable {
    pub(crate) memfd: Arc<OwnedFd>,
    pub(crate) offset: usize,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.engine.gpu().is_cuda() {
            match &self.backing {
                Backing::Foreign(..) => self.engine.foreign_freed(),
                _ => self
                    .engine
                    .known()
                    .forget(self.host.map_or(self.device_addr, |p| p.as_ptr() as u64)),
            }
        }
    }
}

impl Exportable for Inner {
    fn export(&self) -> doorbell_gpu::Result<doorbell_gpu::Export> {
        match &self.backing {
            Backing::Buffer(buffer) => buffer.export(),
            _ => Err(doorbell_gpu::GpuError::Unsupported {
                what: "exporting this memory",
                device: self.engine.gpu().info().name.clone(),
                remedy: "export GPU memory that was allocated here",
            }),
        }
    }
}

impl Memory {
    pub(crate) fn alloc(engine: &Arc<Engine>, place: Place, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::Argument {
                object: "memory",
                value: "0 bytes".into(),
                remedy: "ask for at least one byte",
            });
        }
        let gpu = engine.gpu();
        gpu.check_process()?;
        let backing = match place {
            Place::Gpu => Backing::Buffer(gpu.alloc(MemKind::Device, len)?),
            Place::Host => Backing::Buffer(gpu.alloc(MemKind::PinnedHost, len)?),
            Place::Shared => {
                // Resident from the start, as pinned memory is: no work request pays for a page fault.
                let options = RegionOptions {
                    huge_pages: true,
                    populate: true,
                };
                let region = Arc::new(SharedRegion::with_options(len, options)?);
                let keep: Keep = Arc::clone(&region) as Keep;
                let sharable = Sharable {
                    memfd: Arc::clone(region.memfd()),
                    offset: 0,
                };
                // SAFETY: the region stays mapped as long as `keep` lives, and is used through atomics only.
                let registered =
                    unsafe { gpu.register_host_keeping(region.ptr(), region.len(), keep)? };
                Backing::Registered(registered, Some(sharable))
            }
        };
        Ok(Self::new(engine, place, len, backing))
    }

    /// GPU memory that is exported by itself, if the GPU can.
    pub(crate) fn alloc_exportable(engine: &Arc<Engine>, len: usize) -> Result<Self> {
        let gpu = engine.gpu();
        if len == 0 || !gpu.info().can.vmm_fd {
            return Self::alloc(engine, Place::Gpu, len);
        }
        gpu.check_process()?;
        let buffer = gpu.alloc(MemKind::Vmm, len)?;
        Ok(Self::new(engine, Place::Gpu, len, Backing::Buffer(buffer)))
    }

    fn new(engine: &Arc<Engine>, place: Place, len: usize, backing: Backing) -> Self {
        let (device_addr, host) = match &backing {
            Backing::Buffer(buffer) => (buffer.device_addr(), buffer.host_ptr()),
            Backing::Registered(registered, _) => {
                (registered.device_addr(), Some(registered.host_ptr()))
            }
            Backing::Foreign(addr, _) => (*addr, None),
        };
        let inner = Arc::new(Inner {
            place,
            len,
            device_addr,
            host,
            backing,
            engine: Arc::clone(engine),
        });
        if engine.gpu().is_cuda() {
            match (host, &inner.backing) {
                (Some(ptr), _) => engine.known().add_pinned(ptr.as_ptr() as u64, len as u64),
                (None, Backing::Buffer(_)) => {
                    let memory = Arc::downgrade(&inner);
                    engine.known().add_gpu(device_addr, memory);
                }
                (None, _) => {}
            }
        }
        Self { inner }
    }

    /// # Safety
    /// As for [`crate::Device::import_host`].
    pub(crate) unsafe fn import_host(
        engine: &Arc<Engine>,
        ptr: NonNull<u8>,
        len: usize,
        keep: Keep,
    ) -> Result<Self> {
        // SAFETY: passed on.
        let registered = unsafe { engine.gpu().register_host_keeping(ptr, len, keep)? };
        Ok(Self::new(
            engine,
            Place::Host,
            len,
            Backing::Registered(registered, None),
        ))
    }

    /// # Safety
    /// As for [`crate::Device::import_shared`].
    pub(crate) unsafe fn import_shared(
        engine: &Arc<Engine>,
        ptr: NonNull<u8>,
        len: usize,
        sharable: Sharable,
        keep: Keep,
    ) -> Result<Self> {
        // SAFETY: passed on.
        let registered = unsafe { engine.gpu().register_host_keeping(ptr, len, keep)? };
        let backing = Backing::Registered(registered, Some(sharable));
        Ok(Self::new(engine, Place::Shared, len, backing))
    }

    /// # Safety
    /// As for [`crate::Device::import_gpu`].
    pub(crate) unsafe fn import_gpu(
        engine: &Arc<Engine>,
        addr: u64,
        len: usize,
        keep: Option<Keep>,
    ) -> Self {
        Self::new(engine, Place::Gpu, len, Backing::Foreign(addr, keep))
    }

    /// Where it lives.
    pub fn place(&self) -> Place {
        self.inner.place
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "memory is never empty")]
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// The address that kernels use.
    pub fn device_addr(&self) -> u64 {
        self.inner.device_addr
    }

    /// The address that the CPU uses, if it can reach the memory.
    pub fn host_ptr(&self) -> Option<NonNull<u8>> {
        self.inner.host
    }

    /// The memfd behind it, if there is one.
    pub(crate) fn sharable(&self) -> Option<&Sharable> {
        match &self.inner.backing {
            Backing::Registered(_, sharable) => sharable.as_ref(),
            _ => None,
        }
    }

    /// Something that keeps the memory alive.
    pub(crate) fn keep(&self) -> Keep {
        Arc::clone(&self.inner) as Keep
    }

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.inner.len => Ok(()),
            _ => Err(Error::Argument {
                object: "range of memory",
                value: format!("{len} bytes at offset {offset} of {}", self.inner.len),
                remedy: "stay inside the memory",
            }),
        }
    }

    /// Copies bytes out; where others write at the same time, each aligned word is old or new, not a mixture. GPU memory
    /// comes through a copy engine, bounded by ten seconds.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.check(offset, into.len())?;
        match &self.inner.backing {
            Backing::Buffer(buffer) => Ok(buffer.read(offset, into)?),
            Backing::Registered(registered, _) => Ok(registered.read(offset, into)?),
            Backing::Foreign(..) => Err(FOREIGN),
        }
    }

    /// Copies bytes in, under the terms of [`Memory::read`]. They are in place when this returns.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.check(offset, from.len())?;
        match &self.inner.backing {
            Backing::Buffer(buffer) => Ok(buffer.write(offset, from)?),
            Backing::Registered(registered, _) => Ok(registered.write(offset, from)?),
            Backing::Foreign(..) => Err(FOREIGN),
        }
    }

    /// Sets every byte.
    pub fn fill(&self, value: u8) -> Result<()> {
        match &self.inner.backing {
            Backing::Buffer(buffer) => Ok(buffer.fill(value)?),
            Backing::Registered(registered, _) => Ok(registered.fill(value)?),
            Backing::Foreign(..) => Err(FOREIGN),
        }
    }

    /// The aligned word at `offset`, if the CPU reaches it.
    fn word(&self, offset: usize) -> Result<Option<&AtomicU64>> {
        self.check(offset, 8)?;
        let Some(ptr) = self.inner.host else {
            return Ok(None);
        };
        let ptr = ptr.as_ptr().wrapping_add(offset).cast::<u64>();
        if !ptr.is_aligned() {
            return Err(Error::Argument {
                object: "word of memory",
                value: format!("offset {offset}"),
                remedy: "use a multiple of 8",
            });
        }
        // SAFETY: in range, aligned, mapped as long as `self`; all other access is by atomics, devices or other processes.
        Ok(Some(unsafe { AtomicU64::from_ptr(ptr) }))
    }

    /// Reads one aligned 64-bit word, with acquire ordering where the CPU reaches it.
    pub fn load(&self, offset: usize) -> Result<u64> {
        match self.word(offset)? {
            Some(word) => Ok(word.load(Ordering::Acquire)),
            None => {
                let mut bytes = [0; 8];
                self.read(offset, &mut bytes)?;
                Ok(u64::from_ne_bytes(bytes))
            }
        }
    }

    /// Writes one aligned 64-bit word, with release ordering where the CPU reaches it.
    pub fn store(&self, offset: usize, value: u64) -> Result<()> {
        match self.word(offset)? {
            Some(word) => {
                word.store(value, Ordering::Release);
                Ok(())
            }
            None => self.write(offset, &value.to_ne_bytes()),
        }
    }
}

const FOREIGN: Error = Error::Unsupported {
    what: "reading or writing imported GPU memory from the CPU",
    remedy: "use the library that the memory came from",
};

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("place", &self.place())
            .field("len", &self.len())
            .field("device_addr", &format_args!("{:#x}", self.device_addr()))
            .finish()
    }
}
