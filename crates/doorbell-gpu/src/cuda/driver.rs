//! The driver library, loaded at run time, as a table of function pointers.
//!
//! Signatures are those of `cuda.h`; field names are the *exported* names, whose suffixes (`_v2`) the header's macros
//! hide. What a 535 driver lacks is optional. The library is never unloaded: it has threads of its own.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use super::types::*;
use crate::{GpuError, Result};

/// Where the loader finds it unless the caller says otherwise.
pub(crate) const DEFAULT_PATH: &str = "libcuda.so.1";

macro_rules! table {
    (
        required { $(fn $name:ident($($ty:ty),* $(,)?);)* }
        optional { $(fn $opt:ident($($opt_ty:ty),* $(,)?);)* }
    ) => {
        /// The functions. Every call is unsafe: the caller keeps `cuda.h`'s contract of it.
        #[allow(non_snake_case, reason = "the exported names")]
        pub(crate) struct Driver {
            $(pub(crate) $name: unsafe extern "C" fn($($ty),*) -> CuResult,)*
            $(pub(crate) $opt: Option<unsafe extern "C" fn($($opt_ty),*) -> CuResult>,)*
        }

        impl Driver {
            fn resolve(library: &libloading::Library, path: &str) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the function's in cuda.h.
                        let symbol = unsafe {
                            library.get(concat!(stringify!($name), "\0").as_bytes())
                        };
                        *symbol.map_err(|_| GpuError::MissingSymbol {
                            path: path.to_owned(),
                            symbol: stringify!($name),
                        })?
                    },)*
                    $($opt: {
                        // SAFETY: as above.
                        let symbol = unsafe {
                            library.get(concat!(stringify!($opt), "\0").as_bytes())
                        };
                        symbol.ok().map(|s| *s)
                    },)*
                })
            }
        }
    };
}

table! {
    required {
        fn cuInit(c_uint);
        fn cuDriverGetVersion(*mut c_int);
        fn cuGetErrorName(CuResult, *mut *const c_char);
        fn cuGetErrorString(CuResult, *mut *const c_char);

        fn cuDeviceGetCount(*mut c_int);
        fn cuDeviceGet(*mut CuDevice, c_int);
        fn cuDeviceGetName(*mut c_char, c_int, CuDevice);
        fn cuDeviceGetAttribute(*mut c_int, c_int, CuDevice);
        fn cuDeviceTotalMem_v2(*mut usize, CuDevice);
        fn cuDeviceGetPCIBusId(*mut c_char, c_int, CuDevice);
        fn cuDeviceGetUuid(*mut CuUuid, CuDevice);
        fn cuDevicePrimaryCtxRetain(*mut CuContext, CuDevice);
        fn cuDevicePrimaryCtxRelease_v2(CuDevice);
        fn cuCtxPushCurrent_v2(CuContext);
        fn cuCtxPopCurrent_v2(*mut CuContext);
        fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        fn cuThreadExchangeStreamCaptureMode(*mut c_int);

        fn cuModuleLoadDataEx(*mut CuModule, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
        fn cuModuleUnload(CuModule);
        fn cuModuleGetFunction(*mut CuFunction, CuModule, *const c_char);
        fn cuFuncGetAttribute(*mut c_int, c_int, CuFunction);
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CuFunction, c_int, usize);
        fn cuLaunchKernel(
            CuFunction,
            c_uint, c_uint, c_uint,
            c_uint, c_uint, c_uint,
            c_uint,
            CuStream,
            *mut *mut c_void,
            *mut *mut c_void,
        );

        fn cuStreamCreateWithPriority(*mut CuStream, c_uint, c_int);
        fn cuStreamDestroy_v2(CuStream);
        fn cuEventCreate(*mut CuEvent, c_uint);
        fn cuEventDestroy_v2(CuEvent);
        fn cuEventRecord(CuEvent, CuStream);
        fn cuEventQuery(CuEvent);
        fn cuEventElapsedTime(*mut f32, CuEvent, CuEvent);

        fn cuMemAlloc_v2(*mut CuDevicePtr, usize);
        fn cuMemFree_v2(CuDevicePtr);
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        fn cuMemFreeHost(*mut c_void);
        fn cuMemHostGetDevicePointer_v2(*mut CuDevicePtr, *mut c_void, c_uint);
        fn cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        fn cuMemHostUnregister(*mut c_void);
        fn cuMemcpyAsync(CuDevicePtr, CuDevicePtr, usize, CuStream);
        fn cuPointerGetAttributes(c_uint, *mut c_int, *mut *mut c_void, CuDevicePtr);

        fn cuIpcGetMemHandle(*mut CuIpcMemHandle, CuDevicePtr);
        fn cuIpcOpenMemHandle_v2(*mut CuDevicePtr, CuIpcMemHandle, c_uint);
        fn cuIpcCloseMemHandle(CuDevicePtr);
        fn cuMemGetAllocationGranularity(*mut usize, *const CuMemAllocationProp, c_int);
        fn cuMemCreate(*mut CuMemHandle, usize, *const CuMemAllocationProp, u64);
        fn cuMemRelease(CuMemHandle);
        fn cuMemAddressReserve(*mut CuDevicePtr, usize, usize, CuDevicePtr, u64);
        fn cuMemAddressFree(CuDevicePtr, usize);
        fn cuMemMap(CuDevicePtr, usize, usize, CuMemHandle, u64);
        fn cuMemUnmap(CuDevicePtr, usize);
        fn cuMemSetAccess(CuDevicePtr, usize, *const CuMemAccessDesc, usize);
        fn cuMemExportToShareableHandle(*mut c_void, CuMemHandle, c_int, u64);
        fn cuMemImportFromShareableHandle(*mut CuMemHandle, *mut c_void, c_int);
    }
    optional {
        // The MIG-aware form; the unsuffixed one names the whole GPU.
        fn cuDeviceGetUuid_v2(*mut CuUuid, CuDevice);
        // CUDA 11.0: the physical memory behind somebody else's mapping.
        fn cuMemRetainAllocationHandle(*mut CuMemHandle, *mut c_void);
        // CUDA 11.7: a dma-buf of device memory.
        fn cuMemGetHandleForAddressRange(*mut c_void, CuDevicePtr, usize, c_int, u64);
        // CUDA 10.2: may kernels of a device use mapped memory?
        fn cuMemGetAccess(*mut u64, *const CuMemLocation, CuDevicePtr);
        // CUDA 11.2: may kernels of a device use a pool's memory?
        fn cuMemPoolGetAccess(*mut c_int, CuMemPool, *const CuMemLocation);
        // The device of the calling thread's context.
        fn cuCtxGetDevice(*mut CuDevice);
        // CUDA 12.0: a number that no other context of the process has or had.
        fn cuCtxGetId(CuContext, *mut u64);
        // CUDA 12.4: loads a function now, whatever CUDA_MODULE_LOADING says.
        fn cuFuncLoad(CuFunction);
        // CUDA 12.8, with an out parameter for the index of the copy that failed ...
        fn cuMemcpyBatchAsync(
            *mut CuDevicePtr, *mut CuDevicePtr, *mut usize, usize,
            *mut CuMemcpyAttributes, *mut usize, usize,
            *mut usize,
            CuStream,
        );
        // ... which CUDA 13.0 dropped.
        fn cuMemcpyBatchAsync_v2(
            *const CuDevicePtr, *const CuDevicePtr, *const usize, usize,
            *mut CuMemcpyAttributes, *mut usize, usize,
            CuStream,
        );
    }
}

impl Driver {
    /// Loads the library and initialises the driver.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let shown = path.display().to_string();
        // SAFETY: the driver library's initialisers are NVIDIA's; another file is the caller's choice.
        let library =
            unsafe { libloading::Library::new(path) }.map_err(|e| GpuError::NoDriver {
                path: shown.clone(),
                detail: e.to_string(),
            })?;
        let driver = Self::resolve(&library, &shown)?;
        // Pointers into it must stay good, and the driver's own threads with them.
        std::mem::forget(library);
        // SAFETY: cuInit takes no pointers and may be called again.
        driver.check("cuInit", unsafe { (driver.cuInit)(0) }, || shown)?;
        Ok(driver)
    }

    /// Turns a result code into an error that names the call and its object.
    #[inline]
    pub(crate) fn check(
        &self,
        call: &'static str,
        code: CuResult,
        object: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == SUCCESS {
            Ok(())
        } else {
            Err(self.error(call, code, object()))
        }
    }

    #[cold]
    pub(crate) fn error(&self, call: &'static str, code: CuResult, object: String) -> GpuError {
        let (name, message) = self.describe(code);
        GpuError::Driver {
            call,
            object,
            code,
            name,
            message,
        }
    }

    /// The symbolic name of a code, and the driver's sentence for it.
    pub(crate) fn describe(&self, code: CuResult) -> (String, String) {
        let text = |f: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult| {
            let mut ptr = std::ptr::null();
            // SAFETY: the function stores a pointer to a static string, or null.
            let rc = unsafe { f(code, &mut ptr) };
            if rc != SUCCESS || ptr.is_null() {
                return "unknown".to_owned();
            }
            // SAFETY: a static NUL-terminated string of the driver.
            unsafe { CStr::from_ptr(ptr) }
                .to_string_lossy()
                .into_owned()
        };
        (text(self.cuGetErrorName), text(self.cuGetErrorString))
    }
}
