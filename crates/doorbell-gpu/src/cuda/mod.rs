//! A CUDA GPU, driven through its driver library.
//!
//! Everything that a running kernel could make us wait for (modules, streams, events, staging memory) is made when the GPU
//! is opened; afterwards only what the caller asks for is (a module, and with the first one what launches need). [`types`] and [`driver`] are the foreign interface, the rest is
//! one file a subject.

mod context;
mod copier;
mod device;
mod dmabuf;
mod driver;
mod engine;
mod lane;
mod launch;
mod memops;
mod memory;
mod module;
mod policy;
mod ranges;
mod segment;
mod types;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::graveyard::Graveyard;
use crate::info::GpuInfo;
use crate::{Dims, Export, Keep, MemKind, Result};

use context::{Context, Current};
use copier::CudaCopier;
use driver::Driver;
use launch::Slots;
use memops::MemOps;
use policy::Policy;
pub use policy::check_variables;

pub(crate) use copier::How;
pub(crate) use driver::DEFAULT_PATH;
pub(crate) use launch::CudaLaunch;
pub(crate) use memory::Memory;
pub(crate) use module::{CudaKernel, LoadedModule};

/// How long an idle copier gets to end its copies when the GPU is closed.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// The state of an opened CUDA GPU.
pub(crate) struct CudaGpu {
    context: Arc<Context>,
    graveyard: Graveyard,
    module: Option<LoadedModule>,
    max_blocks: u32,
    rdma_vmm: bool,
    /// Made with the first module: streams that nobody uses would take channels from those of others.
    slots: OnceLock<Slots>,
    // Options only so that `drop` can take them; see there.
    memops: Mutex<Option<MemOps>>,
    copier: Option<CudaCopier>,
}

/// The ordinal of the device whose context is current on this thread, if there is one.
pub(crate) fn current_device(path: Option<&Path>) -> Option<u32> {
    let driver = Driver::load(path.unwrap_or(Path::new(DEFAULT_PATH))).ok()?;
    let mut device: types::CuDevice = -1;
    // SAFETY: an out parameter; without a current context the driver answers an error.
    let code = unsafe { (driver.cuCtxGetDevice?)(&mut device) };
    (code == types::SUCCESS)
        .then(|| u32::try_from(device).ok())
        .flatten()
}

impl CudaGpu {
    /// Loads the driver, retains the device's primary context and loads the module.
    pub(crate) fn open(
        path: Option<&Path>,
        ordinal: Option<u32>,
        ptx: &str,
    ) -> Result<(Arc<Self>, GpuInfo)> {
        let driver = Driver::load(path.unwrap_or(Path::new(DEFAULT_PATH)))?;
        let ordinal = ordinal.unwrap_or(0);
        let device = device::open(&driver, ordinal)?;
        let mut info = device::describe(&driver, device, ordinal)?;
        let attribute = types::attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        let rdma_vmm = device::attribute(&driver, device, attribute) != 0;
        let context = Context::retain(driver, device)?;
        let current = context.enter()?;
        let (policy, note) = Policy::of_environment()?;
        info.notes.extend(note);
        let (stay, note) = policy::stay_of_environment()?;
        info.notes.extend(note.filter(|_| policy != Policy::Engine));
        // First of all the copier: the earlier a stream, the likelier it has a channel of its own.
        let copier = CudaCopier::new(&context, &current, policy)?;
        let memops = MemOps::new(&context, &current)?;
        let slots = match ptx {
            "" => OnceLock::new(),
            _ => OnceLock::from(Slots::new(&context, &current)?),
        };
        match copier.open_lane(&current, stay) {
            Ok(()) => info.can.kernel_copies = policy != Policy::Engine,
            // An older driver, mostly: the copies are made all the same.
            Err(error) => info.notes.push(format!(
                "small copies by the copy engine, since their kernel cannot be loaded: {error}"
            )),
        }
        let module = match ptx {
            "" => None,
            ptx => Some(LoadedModule::load(&context, ptx.as_bytes())?),
        };
        drop(current);
        let gpu = Self {
            context,
            graveyard: Graveyard::default(),
            module,
            max_blocks: info.can.max_blocks,
            rdma_vmm,
            slots,
            memops: Mutex::new(Some(memops)),
            copier: Some(copier),
        };
        Ok((Arc::new(gpu), info))
    }

    fn slots(&self) -> &Slots {
        // Whoever launches has a kernel, from a module that was loaded here.
        self.slots.get().expect("slots of a GPU with a module")
    }

    pub(crate) fn copier(&self) -> &CudaCopier {
        // Emptied only by `drop`, which has the only reference.
        self.copier.as_ref().expect("copier of an open GPU")
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<CudaKernel> {
        match &self.module {
            Some(module) => module.kernel(name),
            None => Err(crate::GpuError::UnknownKernel {
                name: name.to_owned(),
                backend: "cuda",
                known: String::new(),
            }),
        }
    }

    /// Loads a further module.
    pub(crate) fn load(&self, image: &[u8]) -> Result<LoadedModule> {
        if self.slots.get().is_none() {
            let current = self.context.enter()?;
            let slots = Slots::new(&self.context, &current)?;
            if let Err(slots) = self.slots.set(slots) {
                // Another thread was quicker.
                slots.destroy(&current);
            }
        }
        LoadedModule::load(&self.context, image)
    }

    /// Drops a further module once nothing runs.
    pub(crate) fn unload(&self, module: LoadedModule) {
        self.bury(move || {
            drop(module);
            None
        });
    }

    /// Blocks of `threads` threads that can be resident at once.
    pub(crate) fn resident_blocks(
        &self,
        kernel: &CudaKernel,
        threads: u32,
        sms: u32,
    ) -> Result<u32> {
        let current = self.context.enter()?;
        let mut per_sm = 0;
        let threads = i32::try_from(threads).unwrap_or(i32::MAX);
        // SAFETY: an out parameter and a loaded function.
        let code = unsafe {
            (current.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &mut per_sm,
                kernel.function,
                threads,
                0,
            )
        };
        current.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code, || {
            format!("kernel `{}` with {threads} threads", kernel.name)
        })?;
        Ok(u32::try_from(per_sm).unwrap_or(0).saturating_mul(sms))
    }

    /// Allocates zeroed memory.
    pub(crate) fn alloc(&self, kind: MemKind, len: usize) -> Result<Memory> {
        {
            let current = self.context.enter()?;
            self.reap(&current);
        }
        let memory = match kind {
            MemKind::PinnedHost => return Memory::pinned(&self.context, len),
            MemKind::Device => Memory::device(&self.context, len)?,
            MemKind::Vmm => Memory::vmm(&self.context, len, self.rdma_vmm)?,
        };
        // SAFETY: fresh memory of that length; on an error it is not freed at once but buried.
        if let Err(error) = unsafe { self.fill(memory.addr(), 0, len) } {
            // A copy may be under way still: leak rather than pull memory from under it.
            tracing::error!(%error, len, "new device memory could not be zeroed and is leaked");
            return Err(error);
        }
        Ok(memory)
    }

    /// Queues the free of memory until nothing of ours runs.
    pub(crate) fn free(self: &Arc<Self>, memory: Memory, keep: Option<Keep>) {
        if !self.context.is_ours() {
            return;
        }
        self.copier().forget_memory();
        if let Memory::Ipc { addr } = memory {
            self.copier().closed(addr);
        }
        let context = Arc::clone(&self.context);
        self.bury(move || {
            if let Ok(current) = context.enter() {
                memory.free(&current);
            }
            keep
        });
    }

    fn bury(&self, grave: impl FnOnce() -> Option<Keep> + Send + 'static) {
        if let Ok(current) = self.context.enter() {
            self.reap(&current);
        }
        self.graveyard.bury(grave);
    }

    /// See [`crate::Gpu::defer`].
    pub(crate) fn defer(&self, f: impl FnOnce() + Send + 'static) {
        if let Ok(current) = self.context.enter() {
            self.reap(&current);
        }
        self.graveyard.defer(f);
    }

    /// Lets go of abandoned launches that have ended.
    fn reap(&self, current: &Current<'_>) {
        for _ in 0..self.slots.get().map_or(0, |slots| slots.reap(current)) {
            self.graveyard.end();
        }
    }

    /// # Safety
    /// As for [`crate::Gpu::register_host`].
    pub(crate) unsafe fn register(&self, ptr: NonNull<u8>, len: usize) -> Result<(Memory, u64)> {
        // SAFETY: passed on.
        unsafe { Memory::register(&self.context, ptr, len) }
    }

    pub(crate) fn export_fd(&self, handle: u64) -> Result<OwnedFd> {
        Memory::export_fd(&self.context, handle)
    }

    pub(crate) fn export_ipc(&self, addr: u64) -> Result<[u8; 64]> {
        Memory::export_ipc(&self.context, addr)
    }

    pub(crate) fn export_foreign(&self, addr: u64, len: usize) -> Result<(Export, u64)> {
        Memory::export_foreign(&self.context, addr, len)
    }

    pub(crate) fn dmabuf(&self, addr: u64, len: usize) -> Result<(OwnedFd, u64)> {
        dmabuf::export(&self.context, addr, len)
    }

    pub(crate) fn import_fd(&self, fd: &OwnedFd, len: usize) -> Result<Memory> {
        Memory::import_fd(&self.context, fd, len, self.rdma_vmm)
    }

    pub(crate) fn import_ipc(&self, handle: [u8; 64], len: usize) -> Result<Memory> {
        let memory = Memory::import_ipc(&self.context, handle)?;
        // The driver opened it for this context's kernels, whichever GPU it is on.
        self.copier().opened(memory.addr(), len as u64);
        Ok(memory)
    }

    fn memops<T>(&self, work: impl FnOnce(&mut MemOps) -> Result<T>) -> Result<T> {
        let mut memops = self.memops.lock().unwrap_or_else(PoisonError::into_inner);
        // As for the copier.
        work(memops.as_mut().expect("memory operations of an open GPU"))
    }

    /// # Safety
    /// `src` is device memory of at least that size, and stays so (see [`MemOps::read`]).
    pub(crate) unsafe fn read(&self, src: u64, into: &mut [u8]) -> Result<()> {
        // SAFETY: passed on.
        self.memops(|m| unsafe { m.read(&self.context, src, into) })
    }

    /// # Safety
    /// As for [`CudaGpu::read`], with `dst`.
    pub(crate) unsafe fn write(&self, dst: u64, from: &[u8]) -> Result<()> {
        // SAFETY: passed on.
        self.memops(|m| unsafe { m.write(&self.context, dst, from) })
    }

    /// # Safety
    /// As for [`CudaGpu::write`].
    pub(crate) unsafe fn fill(&self, dst: u64, value: u8, len: usize) -> Result<()> {
        // SAFETY: passed on.
        self.memops(|m| unsafe { m.fill(&self.context, dst, value, len) })
    }

    /// # Safety
    /// As for [`crate::Gpu::launch`].
    pub(crate) unsafe fn launch(
        self: &Arc<Self>,
        kernel: &CudaKernel,
        dims: Dims,
        params: &[u8],
    ) -> Result<CudaLaunch> {
        // SAFETY: passed on.
        unsafe { CudaLaunch::start(self, kernel, dims, params) }
    }
}

impl Drop for CudaGpu {
    /// Gives everything back, or nothing: the driver would make the process wait for whatever still runs.
    fn drop(&mut self) {
        let slots = self.slots.take();
        let memops = self
            .memops
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let copier = self.copier.take();
        let module = self.module.take();
        let context = Arc::clone(&self.context);
        let (Some(memops), Some(copier)) = (memops, copier) else {
            return;
        };
        let current = match context.enter() {
            Ok(current) => current,
            Err(_) => {
                // A forked child: nothing of the parent's may be touched.
                std::mem::forget((slots, memops, copier, module, Arc::clone(&context)));
                return;
            }
        };
        let held = if slots.as_ref().is_some_and(|s| s.has_running(&current)) {
            Some("an abandoned kernel runs")
        } else if !copier.is_drained(CLOSE_WAIT) {
            Some("copies, or launches for them, wait for running kernels")
        } else {
            None
        };
        if let Some(held) = held {
            tracing::error!("a CUDA GPU is closed while {held}: all that those may use is leaked");
            // What waits to be freed too: foreign memory kept alive for the kernel among it.
            std::mem::forget(std::mem::take(&mut self.graveyard));
            std::mem::forget((slots, memops, copier, module, Arc::clone(&context)));
            return;
        }
        self.graveyard.end_all();
        copier.destroy(&current);
        memops.destroy(&current);
        if let Some(slots) = slots {
            slots.destroy(&current);
        }
        drop(module);
    }
}
