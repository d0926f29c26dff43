//! The types and numbers of the CUDA driver interface that this crate uses.
//!
//! Declared here after NVIDIA's `cuda.h` (the CUDA Toolkit's documentation, "CUDA Driver API"); each item keeps its name
//! there, so that it can be looked up. Nothing of CUDA is needed to build.

use std::ffi::{c_int, c_uint, c_void};

/// `CUresult`.
pub(crate) type CuResult = c_int;
/// `CUdevice`: an ordinal-like handle.
pub(crate) type CuDevice = c_int;
/// `CUdeviceptr`.
pub(crate) type CuDevicePtr = u64;
/// `CUmemGenericAllocationHandle`.
pub(crate) type CuMemHandle = u64;

/// Declares an opaque driver handle.
macro_rules! handle {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(transparent)]
        pub(crate) struct $name(pub(crate) *mut c_void);

        impl $name {
            pub(crate) const NULL: Self = Self(std::ptr::null_mut());
        }

        // SAFETY: driver handles are names; the driver locks what they stand for.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handle! {
    /// `CUcontext`.
    CuContext;
    /// `CUmodule`.
    CuModule;
    /// `CUfunction`.
    CuFunction;
    /// `CUstream`.
    CuStream;
    /// `CUevent`.
    CuEvent;
    /// `CUmemoryPool`.
    CuMemPool;
}

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CuUuid(pub(crate) [u8; 16]);

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CuIpcMemHandle(pub(crate) [u8; 64]);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct CuMemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`, with its `allocFlags` spread out.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CuMemAllocationProp {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: CuMemLocation,
    pub(crate) win32_handle_meta_data: *mut c_void,
    pub(crate) compression_type: u8,
    pub(crate) gpu_direct_rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CuMemAccessDesc {
    pub(crate) location: CuMemLocation,
    pub(crate) flags: c_int,
}

/// `CUmemcpyAttributes` (CUDA 12.8).
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct CuMemcpyAttributes {
    pub(crate) src_access_order: c_int,
    pub(crate) src_loc_hint: CuMemLocation,
    pub(crate) dst_loc_hint: CuMemLocation,
    pub(crate) flags: c_uint,
}

const _: () = {
    assert!(size_of::<CuMemAllocationProp>() == 32);
    assert!(size_of::<CuMemAccessDesc>() == 12);
    assert!(size_of::<CuMemcpyAttributes>() == 24);
};

pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const INVALID_VALUE: CuResult = 1;
pub(crate) const ERROR_NO_DEVICE: CuResult = 100;
pub(crate) const ERROR_NOT_FOUND: CuResult = 500;
pub(crate) const ERROR_NOT_READY: CuResult = 600;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const ALLOCATION_PINNED: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const HANDLE_POSIX_FD: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const ACCESS_READ_WRITE: c_int = 3;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
pub(crate) const GRANULARITY_RECOMMENDED: c_int = 1;

/// `CU_MEMHOSTALLOC_PORTABLE`, `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
pub(crate) const HOST_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`, `CU_MEMHOSTREGISTER_DEVICEMAP`: mapped into the device's address space.
pub(crate) const HOST_DEVICE_MAP: c_uint = 2;

/// `CU_STREAM_NON_BLOCKING`: does not synchronise with the legacy default stream.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DEFAULT`.
pub(crate) const EVENT_DEFAULT: c_uint = 0;
/// `CU_EVENT_DISABLE_TIMING`: cheaper to record and to query.
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const CAPTURE_RELAXED: c_int = 2;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
pub(crate) const IPC_LAZY_PEER: c_uint = 1;

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read in stream order.
pub(crate) const SRC_ORDER_STREAM: c_int = 1;
/// `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`.
pub(crate) const COPY_OVERLAP_COMPUTE: c_uint = 1;

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`.
pub(crate) const MEMORY_HOST: c_uint = 1;
/// See [`MEMORY_HOST`].
pub(crate) const MEMORY_DEVICE: c_uint = 2;

/// `CUpointer_attribute`.
pub(crate) mod pointer {
    use std::ffi::c_int;
    pub(crate) const CONTEXT: c_int = 1;
    pub(crate) const MEMORY_TYPE: c_int = 2;
    pub(crate) const DEVICE_POINTER: c_int = 3;
    pub(crate) const IS_MANAGED: c_int = 8;
    pub(crate) const DEVICE_ORDINAL: c_int = 9;
    pub(crate) const RANGE_START_ADDR: c_int = 11;
    pub(crate) const RANGE_SIZE: c_int = 12;
    pub(crate) const MEMPOOL_HANDLE: c_int = 17;
}

/// `CUjit_option`.
pub(crate) mod jit {
    use std::ffi::c_int;
    pub(crate) const ERROR_LOG_BUFFER: c_int = 5;
    pub(crate) const ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;
}

/// `CUfunction_attribute`.
pub(crate) mod function {
    use std::ffi::c_int;
    pub(crate) const MAX_THREADS_PER_BLOCK: c_int = 0;
    pub(crate) const LOCAL_SIZE_BYTES: c_int = 3;
    pub(crate) const NUM_REGS: c_int = 4;
}

/// `CUdevice_attribute`.
pub(crate) mod attribute {
    use std::ffi::c_int;
    pub(crate) const MAX_THREADS_PER_BLOCK: c_int = 1;
    pub(crate) const MAX_GRID_DIM_X: c_int = 5;
    pub(crate) const MULTIPROCESSOR_COUNT: c_int = 16;
    pub(crate) const CAN_MAP_HOST_MEMORY: c_int = 19;
    pub(crate) const MAX_THREADS_PER_MULTIPROCESSOR: c_int = 39;
    pub(crate) const ASYNC_ENGINE_COUNT: c_int = 40;
    pub(crate) const UNIFIED_ADDRESSING: c_int = 41;
    pub(crate) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(crate) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub(crate) const HOST_NATIVE_ATOMIC_SUPPORTED: c_int = 86;
    pub(crate) const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
    pub(crate) const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_int = 103;
    pub(crate) const GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_int = 110;
    pub(crate) const GPU_DIRECT_RDMA_SUPPORTED: c_int = 116;
    pub(crate) const DMA_BUF_SUPPORTED: c_int = 124;
    pub(crate) const IPC_EVENT_SUPPORTED: c_int = 125;
    pub(crate) const MPS_ENABLED: c_int = 133;
}
