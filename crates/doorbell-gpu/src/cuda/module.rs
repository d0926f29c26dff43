//! A loaded module: every kernel is loaded to the device at once.
//!
//! Under lazy loading (CUDA's default) the first launch of a kernel loads it, and that load waits for running kernels,
//! with the copy engine behind it: a deadlock when a running kernel waits for a copy. So nothing is left for later.

use std::collections::BTreeMap;
use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use super::context::{Context, Current};
use super::types::*;
use crate::{GpuError, Result};

/// Bytes for the assembler's complaints.
const LOG_BYTES: usize = 16 << 10;

/// A module of the context, with its kernels.
pub(crate) struct LoadedModule {
    context: Arc<Context>,
    raw: CuModule,
    kernels: BTreeMap<String, CudaKernel>,
}

/// A kernel, ready to launch.
#[derive(Clone, Debug)]
pub(crate) struct CudaKernel {
    pub(crate) name: Arc<str>,
    pub(crate) function: CuFunction,
    /// Most threads a block that its registers allow.
    pub(crate) max_threads: u32,
    /// Registers a thread.
    pub(crate) registers: u32,
    /// Bytes of local memory a thread: spills and arrays.
    pub(crate) local_bytes: u32,
}

impl LoadedModule {
    /// Loads an image: PTX text, a cubin or a fatbin. The kernels named in PTX text are all loaded now; those of a binary
    /// when they are looked up.
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self> {
        let current = context.enter()?;
        let mut terminated = Vec::with_capacity(image.len() + 1);
        terminated.extend_from_slice(image);
        terminated.push(0);

        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [jit::ERROR_LOG_BUFFER, jit::ERROR_LOG_BUFFER_SIZE_BYTES];
        // The size goes by value, in the pointer.
        let mut values = [
            log.as_mut_ptr().cast::<c_void>(),
            std::ptr::without_provenance_mut(LOG_BYTES),
        ];
        let mut raw = CuModule::NULL;
        // SAFETY: the image is NUL-terminated, the log has the size said, both outlive the call.
        let code = unsafe {
            (current.cuModuleLoadDataEx)(
                &mut raw,
                terminated.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code != SUCCESS {
            let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
            let log = String::from_utf8_lossy(&log[..end]).trim().to_owned();
            let log = if log.is_empty() {
                current.describe(code).1
            } else {
                log
            };
            return Err(GpuError::Module {
                code,
                name: current.describe(code).0,
                log,
            });
        }
        let mut module = Self {
            context: Arc::clone(context),
            raw,
            kernels: BTreeMap::new(),
        };
        for name in entries(image) {
            if let Some(kernel) = module.look_up(&current, name)? {
                module.kernels.insert(name.to_owned(), kernel);
            }
        }
        Ok(module)
    }

    /// The kernel of that name.
    pub(crate) fn kernel(&self, name: &str) -> Result<CudaKernel> {
        if let Some(kernel) = self.kernels.get(name) {
            return Ok(kernel.clone());
        }
        // A binary's names are not known beforehand.
        let current = self.context.enter()?;
        self.look_up(&current, name)?
            .ok_or_else(|| GpuError::UnknownKernel {
                name: name.to_owned(),
                backend: "cuda",
                known: self.kernels.keys().cloned().collect::<Vec<_>>().join(", "),
            })
    }

    fn look_up(&self, current: &Current<'_>, name: &str) -> Result<Option<CudaKernel>> {
        let Ok(c_name) = CString::new(name) else {
            return Ok(None);
        };
        let mut function = CuFunction::NULL;
        // SAFETY: an out parameter, a live module and a NUL-terminated name.
        let code =
            unsafe { (current.cuModuleGetFunction)(&mut function, self.raw, c_name.as_ptr()) };
        if code == ERROR_NOT_FOUND {
            return Ok(None);
        }
        current.check("cuModuleGetFunction", code, || format!("kernel {name}"))?;
        if let Some(load) = current.cuFuncLoad {
            // SAFETY: a function of a live module.
            current.check("cuFuncLoad", unsafe { load(function) }, || {
                format!("kernel {name}")
            })?;
        }
        // Reading attributes loads the function on drivers without cuFuncLoad.
        let attribute = |which: c_int| {
            let mut value = 0;
            // SAFETY: an out parameter and a function of a live module.
            let code = unsafe { (current.cuFuncGetAttribute)(&mut value, which, function) };
            current.check("cuFuncGetAttribute", code, || format!("kernel {name}"))?;
            Ok::<_, GpuError>(u32::try_from(value).unwrap_or(0))
        };
        Ok(Some(CudaKernel {
            name: name.into(),
            function,
            max_threads: attribute(function::MAX_THREADS_PER_BLOCK)?,
            registers: attribute(function::NUM_REGS)?,
            local_bytes: attribute(function::LOCAL_SIZE_BYTES)?,
        }))
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // Owners drop modules when nothing is in flight (`CudaGpu::drop` leaks them otherwise).
        if let Ok(current) = self.context.enter() {
            // SAFETY: loaded in `load`, and no kernel of it runs.
            unsafe { (current.cuModuleUnload)(self.raw) };
        }
    }
}

/// The names after `.entry` in PTX text; none in anything else.
fn entries(image: &[u8]) -> Vec<&str> {
    let Ok(text) = std::str::from_utf8(image) else {
        return Vec::new();
    };
    text.lines()
        .map(|line| line.split("//").next().unwrap_or(""))
        .filter_map(|line| {
            let (before, after) = line.split_once(".entry")?;
            // Not `.entry_something`, and only linkage before it.
            if !after.starts_with([' ', '\t'])
                || !before
                    .split_whitespace()
                    .all(|w| matches!(w, ".visible" | ".weak" | ".extern"))
            {
                return None;
            }
            let after = after.trim_start();
            let end = after.find(|c: char| !(c.is_ascii_alphanumeric() || "_$%".contains(c)));
            Some(&after[..end.unwrap_or(after.len())]).filter(|name| !name.is_empty())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_in_ptx_only() {
        let ptx = b"
.version 8.2
.target sm_80
// .visible .entry commented(.param .u64 p)
.visible .entry put_bw(
    .param .u64 put_bw_param_0
)
.visible .func not_a_kernel()
.entry  bare$1 (.param .u64 p) { ret; } // .entry no
\t.weak .entry w{";
        assert_eq!(entries(ptx), ["put_bw", "bare$1", "w"]);
        assert!(entries(b"\x7fELF\x02\xff\xfe .entry x(").is_empty());
        assert!(entries(b"").is_empty());
    }
}
