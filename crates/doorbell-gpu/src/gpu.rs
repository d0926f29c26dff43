//! An opened GPU: memory, kernels, launches.
//!
//! [`Gpu`] is a cheap handle; buffers and launches keep what they need alive, so handles may be dropped in any order.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use doorbell_device::host::HostKernel;

use crate::buffer::{Buffer, Registered};
use crate::host::HostGpu;
use crate::info::{Backend, GpuInfo};
use crate::launch::Launch;
use crate::{Dims, GpuSelect, Keep, LaunchOpts, MemKind, Module, Result};

/// A GPU: a CUDA device, or threads of this process.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    info: GpuInfo,
    engine: Engine,
}

/// The back end. An enum and not a trait object: there are two, and what they need differs.
#[derive(Clone)]
pub(crate) enum Engine {
    Host(Arc<HostGpu>),
}

/// A kernel of the module that a GPU was opened with.
#[derive(Clone)]
pub struct Kernel {
    form: KernelForm,
}

#[derive(Clone)]
enum KernelForm {
    Host(HostKernel),
}

impl Kernel {
    /// Its name in the module.
    pub fn name(&self) -> &str {
        match &self.form {
            KernelForm::Host(kernel) => kernel.name,
        }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.name()).finish()
    }
}

impl Gpu {
    /// Opens a GPU and loads all of `module` for it.
    pub fn open(select: &GpuSelect, module: Module) -> Result<Self> {
        match select {
            GpuSelect::Host => Ok(Self::open_host(
                module,
                vec!["the host GPU was asked for".into()],
            )),
            GpuSelect::Auto | GpuSelect::Cuda(_) => {
                Ok(Self::open_host(module, vec!["no CUDA support yet".into()]))
            }
        }
    }

    fn open_host(module: Module, notes: Vec<String>) -> Self {
        let engine = Engine::Host(Arc::new(HostGpu::new(module.host)));
        Self {
            inner: Arc::new(Inner {
                info: HostGpu::info(notes),
                engine,
            }),
        }
    }

    /// Is it a CUDA device?
    pub fn is_cuda(&self) -> bool {
        self.inner.info.backend == Backend::Cuda
    }

    /// What is known about it.
    pub fn info(&self) -> &GpuInfo {
        &self.inner.info
    }

    /// Allocates `len` bytes of zeroes, aligned to at least 256 bytes (host memory: to a page).
    pub fn alloc(&self, kind: MemKind, len: usize) -> Result<Buffer> {
        match &self.inner.engine {
            Engine::Host(host) => Ok(Buffer::host(host, kind, host.alloc(len)?, len)),
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
        match &self.inner.engine {
            Engine::Host(host) => Ok(Registered::host(host, ptr, len, keep)),
        }
    }

    /// Looks a kernel up by name.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        match &self.inner.engine {
            Engine::Host(host) => Ok(Kernel {
                form: KernelForm::Host(host.kernel(name)?),
            }),
        }
    }

    /// Starts `kernel` with a copy of `params` and returns at once.
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
        }
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
