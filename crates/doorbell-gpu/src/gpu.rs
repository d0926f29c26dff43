//! An opened GPU: memory, kernels, launches.
//!
//! [`Gpu`] is a cheap handle; buffers and launches keep what they need alive, so handles may be dropped in any order.

use std::fmt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::buffer::{Buffer, Registered};
use crate::copier::Copier;
use crate::cuda::{CudaGpu, DEFAULT_PATH};
use crate::fork::Generation;
use crate::host::HostGpu;
use crate::info::{Backend, GpuInfo};
use crate::ipc::Export;
use crate::kernel::{Kernel, KernelForm, LoadedImage};
use crate::launch::Launch;
use crate::{Dims, GpuError, GpuSelect, Keep, LaunchOpts, MemKind, Module, Result};

/// A GPU: a CUDA device, or threads of this process.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    info: GpuInfo,
    engine: Engine,
    born: Generation,
}

/// The back end. An enum and not a trait object: there are two, and what they need differs.
#[derive(Clone)]
enum Engine {
    Host(Arc<HostGpu>),
    Cuda(Arc<CudaGpu>),
}

impl Gpu {
    /// Opens a GPU and loads all of `module` for it. The CUDA driver library is `libcuda.so.1`, wherever the dynamic loader
    /// finds it.
    pub fn open(select: &GpuSelect, module: Module) -> Result<Self> {
        Self::open_from(select, module, None)
    }

    /// As [`Gpu::open`], with the driver library at a place that the dynamic loader does not look at.
    pub fn open_with_driver(select: &GpuSelect, module: Module, driver: &Path) -> Result<Self> {
        Self::open_from(select, module, Some(driver))
    }

    /// The ordinal of the CUDA device that the calling thread works with at present (`cudaSetDevice`), if it does.
    pub fn current_cuda() -> Option<u32> {
        crate::cuda::current_device(None)
    }

    fn open_from(select: &GpuSelect, module: Module, driver: Option<&Path>) -> Result<Self> {
        match *select {
            GpuSelect::Host => Ok(Self::host(module, "host: it was asked for".to_owned())),
            GpuSelect::Cuda(ordinal) => {
                Self::cuda(module, driver, ordinal, "cuda: it was asked for")
            }
            GpuSelect::Auto => match Self::cuda(module, driver, None, "cuda: chosen by auto") {
                Err(error) if no_gpu_here(&error) => Ok(Self::host(
                    module,
                    format!("host: chosen by auto, since {error}"),
                )),
                // A GPU that is there and does not work is not passed over in silence.
                other => other,
            },
        }
    }

    fn host(module: Module, why: String) -> Self {
        let engine = Engine::Host(Arc::new(HostGpu::new(module.host)));
        Self {
            inner: Arc::new(Inner {
                info: HostGpu::info(vec![why]),
                engine,
                born: Generation::now(),
            }),
        }
    }

    fn cuda(
        module: Module,
        driver: Option<&Path>,
        ordinal: Option<u32>,
        why: &str,
    ) -> Result<Self> {
        let (gpu, mut info) = CudaGpu::open(driver, ordinal, module.ptx)?;
        let path = driver.unwrap_or(Path::new(DEFAULT_PATH)).display();
        info.notes
            .insert(0, format!("{why}; driver library {path}"));
        Ok(Self {
            inner: Arc::new(Inner {
                info,
                engine: Engine::Cuda(gpu),
                born: Generation::now(),
            }),
        })
    }

    /// Is it a CUDA device?
    pub fn is_cuda(&self) -> bool {
        self.inner.info.backend == Backend::Cuda
    }

    /// What is known about it.
    pub fn info(&self) -> &GpuInfo {
        &self.inner.info
    }

    /// Is this the process that opened it, and not a forked child of that?
    pub fn is_this_process(&self) -> bool {
        self.inner.born.is_current()
    }

    /// [`GpuError::Forked`](crate::GpuError::Forked) in a forked child of the process that opened it. One load.
    pub fn check_process(&self) -> Result<()> {
        self.inner.born.check()
    }

    /// Allocates `len` bytes of zeroes, aligned to at least 256 bytes (host memory: to a page).
    ///
    /// On CUDA do this before launching what waits for others: an allocation may wait for running kernels.
    pub fn alloc(&self, kind: MemKind, len: usize) -> Result<Buffer> {
        if len == 0 {
            return Err(GpuError::BadLength {
                len,
                reason: "a buffer has at least one byte",
            });
        }
        match &self.inner.engine {
            Engine::Host(host) => Ok(Buffer::host(host, kind, host.alloc(len)?, len)),
            Engine::Cuda(cuda) => {
                if kind == MemKind::Vmm && !self.inner.info.can.vmm_fd {
                    return Err(GpuError::Unsupported {
                        what: "exportable device memory",
                        device: self.inner.info.name.clone(),
                        remedy: "use device memory, which cuIpc exports",
                    });
                }
                Ok(Buffer::cuda(cuda, kind, cuda.alloc(kind, len)?, len))
            }
        }
    }

    /// Makes foreign host memory (a mapped memfd, for instance) usable by kernels. On CUDA the pages are pinned, and
    /// the address that kernels use is [`Registered::device_addr`].
    ///
    /// # Safety
    /// `ptr` is valid for reads and writes of `len` bytes until the [`Registered`] is dropped *and* every launch that was
    /// in flight then has ended. [`Gpu::register_host_keeping`] makes the second part easy.
    pub unsafe fn register_host(&self, ptr: NonNull<u8>, len: usize) -> Result<Registered> {
        // SAFETY: passed on.
        unsafe { self.register(ptr, len, None) }
    }

    /// As [`Gpu::register_host`]; `keep` is dropped once the memory is unregistered, which is deferred while launches
    /// are in flight.
    ///
    /// # Safety
    /// `ptr` is valid for reads and writes of `len` bytes as long as `keep` lives.
    pub unsafe fn register_host_keeping(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        keep: Keep,
    ) -> Result<Registered> {
        // SAFETY: passed on.
        unsafe { self.register(ptr, len, Some(keep)) }
    }

    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        keep: Option<Keep>,
    ) -> Result<Registered> {
        if len == 0 {
            return Err(GpuError::BadLength {
                len,
                reason: "there is nothing to register",
            });
        }
        match &self.inner.engine {
            Engine::Host(host) => Ok(Registered::host(host, ptr, len, keep)),
            Engine::Cuda(cuda) => {
                // SAFETY: passed on.
                let (memory, addr) = unsafe { cuda.register(ptr, len) }?;
                Ok(Registered::cuda(cuda, memory, addr, ptr, len, keep))
            }
        }
    }

    /// Calls `f` now if no launch is in flight, else when the last one has ended: for giving back what a kernel may still be
    /// looking at. While an abandoned kernel runs, that is later, or never.
    pub fn defer(&self, f: impl FnOnce() + Send + 'static) {
        match &self.inner.engine {
            Engine::Host(host) => host.graveyard().defer(f),
            Engine::Cuda(cuda) => cuda.defer(f),
        }
    }

    /// Describes device memory that somebody else of this process allocated (PyTorch, NCCL): the allocation that it lies in, and the offset
    /// of `addr` in it. CUDA only. Memory of `cuMemCreate` must have been made for export as a file descriptor.
    pub fn export_foreign(&self, addr: u64, len: usize) -> Result<(Export, u64)> {
        match &self.inner.engine {
            Engine::Host(_) => Err(self.no_ipc()),
            Engine::Cuda(cuda) => cuda.export_foreign(addr, len),
        }
    }

    /// A dma-buf of device memory, by which other devices reach it, and where in it the memory begins. CUDA only, from CUDA 11.7 on and where the
    /// driver's kernel module has dma-bufs (the open one does).
    pub fn dmabuf(&self, addr: u64, len: usize) -> Result<(std::os::fd::OwnedFd, u64)> {
        match &self.inner.engine {
            Engine::Host(_) => Err(self.no_ipc()),
            Engine::Cuda(cuda) => cuda.dmabuf(addr, len),
        }
    }

    /// Opens memory that another process exported with [`Buffer::export`]. CUDA only; `cuIpc` handles cannot be opened in the
    /// process that made them.
    pub fn import(&self, export: &Export) -> Result<Buffer> {
        match (&self.inner.engine, export) {
            (Engine::Host(_), _) => Err(self.no_ipc()),
            (Engine::Cuda(cuda), Export::CudaIpc { handle, len }) => Ok(Buffer::cuda(
                cuda,
                MemKind::Device,
                cuda.import_ipc(*handle, *len)?,
                *len,
            )),
            (Engine::Cuda(cuda), Export::Fd { fd, len }) => Ok(Buffer::cuda(
                cuda,
                MemKind::Vmm,
                cuda.import_fd(fd, *len)?,
                *len,
            )),
        }
    }

    fn no_ipc(&self) -> GpuError {
        crate::ipc::unsupported(&self.inner.info.name)
    }

    /// Looks a kernel up by name.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        Ok(Kernel {
            form: match &self.inner.engine {
                Engine::Host(host) => KernelForm::Host(host.kernel(name)?),
                Engine::Cuda(cuda) => KernelForm::Cuda(Arc::clone(cuda), cuda.kernel(name)?, None),
            },
        })
    }

    /// Loads a further module, known only at run time: PTX text, a cubin or a fatbin with kernels of one pointer argument.
    /// CUDA only. Do it, and look its kernels up, before launching what waits for others: loading waits for running kernels.
    pub fn load(&self, image: &[u8]) -> Result<LoadedImage> {
        match &self.inner.engine {
            Engine::Host(_) => Err(GpuError::Unsupported {
                what: "loading a GPU image",
                device: self.inner.info.name.clone(),
                remedy: "the host GPU runs the functions that it was opened with; use a CUDA GPU",
            }),
            Engine::Cuda(cuda) => LoadedImage::load(cuda, image),
        }
    }

    /// Blocks of `threads` threads of `kernel` that can run at the same time. A kernel whose blocks wait for each other must
    /// not be larger; on the host GPU all blocks of any launch run at once.
    pub fn resident_blocks(&self, kernel: &Kernel, threads: u32) -> Result<u32> {
        match (&self.inner.engine, &kernel.form) {
            (Engine::Cuda(cuda), KernelForm::Cuda(_, kernel, _)) => {
                cuda.resident_blocks(kernel, threads, self.inner.info.sm_count)
            }
            _ => Ok(crate::MAX_HOST_THREADS / threads.max(1)),
        }
    }

    /// Starts `kernel` with a copy of `params` and returns at once. On CUDA, up to four launches are in flight at a time, with
    /// parameters of up to 4096 bytes each; each runs on a stream of its own, never the legacy default stream.
    ///
    /// # Safety
    /// - `params` is the parameter structure that this kernel expects, and every address in it is valid for what the
    ///   kernel does there until the kernel has ended. Buffers of this GPU keep that by themselves, even when dropped
    ///   early, since frees wait for launches; so does memory registered with a keep-alive.
    /// - Whatever else touches that memory meanwhile does so by atomics or in agreement with the kernel.
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        dims: Dims,
        params: &[u8],
        opts: LaunchOpts,
    ) -> Result<Launch> {
        match (&self.inner.engine, &kernel.form) {
            (Engine::Host(host), KernelForm::Host(kernel)) => {
                // SAFETY: passed on.
                unsafe { host.launch(*kernel, dims, params, opts) }.map(Launch::host)
            }
            (Engine::Cuda(cuda), KernelForm::Cuda(owner, form, image))
                if Arc::ptr_eq(cuda, owner) =>
            {
                // SAFETY: passed on.
                let launch = unsafe { cuda.launch(form, dims, params) }?;
                Ok(Launch::cuda(launch, image.clone()))
            }
            _ => Err(GpuError::WrongGpu {
                kernel: kernel.name().to_owned(),
            }),
        }
    }

    /// The copy engine for whoever moves payloads while kernels run; `None` on the host GPU, whose memory the CPU reaches.
    pub fn copier(&self) -> Option<Copier> {
        match &self.inner.engine {
            Engine::Host(_) => None,
            Engine::Cuda(cuda) => Some(Copier {
                gpu: Arc::clone(cuda),
            }),
        }
    }
}

/// Errors that mean "there is no CUDA GPU on this machine", as against "there is one and it does not work".
fn no_gpu_here(error: &GpuError) -> bool {
    /// `CUDA_ERROR_STUB_LIBRARY`, `CUDA_ERROR_NO_DEVICE`.
    const NONE: [i32; 2] = [34, 100];
    match error {
        GpuError::NoDriver { .. } | GpuError::NoSuchDevice { count: 0, .. } => true,
        GpuError::Driver {
            call: "cuInit" | "cuDeviceGetCount",
            code,
            ..
        } => NONE.contains(code),
        _ => false,
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("backend", &self.inner.info.backend)
            .field("name", &self.inner.info.name)
            .finish_non_exhaustive()
    }
}
