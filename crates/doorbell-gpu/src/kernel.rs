//! Kernels, looked up by name, and images loaded at run time.
//!
//! A kernel keeps the GPU and the image that it came from.

use std::fmt;
use std::sync::Arc;

use doorbell_device::host::HostKernel;

use crate::Result;
use crate::cuda::{CudaGpu, CudaKernel, LoadedModule};

/// A kernel, ready to launch.
#[derive(Clone)]
pub struct Kernel {
    pub(crate) form: KernelForm,
}

#[derive(Clone)]
pub(crate) enum KernelForm {
    Host(HostKernel),
    Cuda(Arc<CudaGpu>, CudaKernel, Option<LoadedImage>),
}

/// What the compiler made of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelUse {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local memory a thread: spills and arrays.
    pub local_bytes: u32,
    /// Most threads a block that the registers allow.
    pub max_threads_per_block: u32,
}

impl Kernel {
    /// Its name in the module.
    pub fn name(&self) -> &str {
        match &self.form {
            KernelForm::Host(kernel) => kernel.name,
            KernelForm::Cuda(_, kernel, _) => &kernel.name,
        }
    }

    /// What it uses, on CUDA.
    pub fn usage(&self) -> Option<KernelUse> {
        match &self.form {
            KernelForm::Host(_) => None,
            KernelForm::Cuda(_, kernel, _) => Some(KernelUse {
                registers: kernel.registers,
                local_bytes: kernel.local_bytes,
                max_threads_per_block: kernel.max_threads,
            }),
        }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.name()).finish()
    }
}

/// An image loaded with [`crate::Gpu::load`]; unloaded when it, its kernels and their launches are gone.
#[derive(Clone)]
pub struct LoadedImage {
    inner: Arc<Loaded>,
}

struct Loaded {
    gpu: Arc<CudaGpu>,
    /// `None` only while dropping.
    module: Option<LoadedModule>,
}

impl LoadedImage {
    pub(crate) fn load(gpu: &Arc<CudaGpu>, image: &[u8]) -> Result<Self> {
        let module = Some(gpu.load(image)?);
        Ok(Self {
            inner: Arc::new(Loaded {
                gpu: Arc::clone(gpu),
                module,
            }),
        })
    }

    /// Looks a kernel up by name.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let gpu = &self.inner.gpu;
        let kernel = match &self.inner.module {
            Some(module) => module.kernel(name)?,
            None => gpu.kernel(name)?,
        };
        Ok(Kernel {
            form: KernelForm::Cuda(Arc::clone(gpu), kernel, Some(self.clone())),
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Some(module) = self.module.take() {
            self.gpu.unload(module);
        }
    }
}

impl fmt::Debug for LoadedImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LoadedImage")
    }
}
