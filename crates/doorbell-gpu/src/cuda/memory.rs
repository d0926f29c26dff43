//! Memory of a CUDA device, and host memory that it uses: made here, given back by [`Memory::free`].
//!
//! Nothing here frees on drop: the driver makes frees wait for running kernels, so the owner decides when.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use super::context::{Context, Current};
use super::ranges;
use super::types::*;
use crate::ipc::Export;
use crate::{GpuError, Result};

/// One allocation, mapping or registration.
#[derive(Debug)]
pub(crate) enum Memory {
    /// `cuMemAlloc`.
    Device { addr: CuDevicePtr },
    /// `cuMemHostAlloc`.
    Pinned { host: HostPtr, addr: CuDevicePtr },
    /// `cuMemCreate` and what maps it.
    Vmm {
        addr: CuDevicePtr,
        mapped: usize,
        handle: CuMemHandle,
    },
    /// `cuIpcOpenMemHandle`.
    Ipc { addr: CuDevicePtr },
    /// `cuMemHostRegister`.
    Registered { host: HostPtr },
    /// Page-locked by somebody else (`cudaMallocHost`), who will unlock it.
    PinnedElsewhere { host: HostPtr },
}

/// A pointer that may travel between threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostPtr(pub(crate) NonNull<u8>);

// SAFETY: an address; whoever dereferences it brings the synchronisation.
unsafe impl Send for HostPtr {}
// SAFETY: as above.
unsafe impl Sync for HostPtr {}

impl Memory {
    /// `len` bytes of the GPU's own memory; their content is arbitrary.
    pub(crate) fn device(context: &Context, len: usize) -> Result<Self> {
        let current = context.enter()?;
        let mut addr = 0;
        // SAFETY: an out parameter.
        let code = unsafe { (current.cuMemAlloc_v2)(&mut addr, len) };
        current.check("cuMemAlloc", code, || {
            format!("{len} bytes of device memory")
        })?;
        Ok(Self::Device { addr })
    }

    /// `len` bytes of zeroed, page-locked host memory, mapped for the device.
    pub(crate) fn pinned(context: &Context, len: usize) -> Result<Self> {
        let current = context.enter()?;
        let mut host = std::ptr::null_mut::<c_void>();
        // SAFETY: an out parameter. Not write-combined: the CPU polls this memory.
        let code =
            unsafe { (current.cuMemHostAlloc)(&mut host, len, HOST_PORTABLE | HOST_DEVICE_MAP) };
        current.check("cuMemHostAlloc", code, || {
            format!("{len} bytes of pinned host memory")
        })?;
        let null = || current.error("cuMemHostAlloc", SUCCESS, "a null address".to_owned());
        let host = NonNull::new(host.cast::<u8>()).ok_or_else(null)?;
        // SAFETY: just allocated, `len` bytes, nobody else's yet.
        unsafe { host.write_bytes(0, len) };
        match device_addr(&current, host) {
            Ok(addr) => Ok(Self::Pinned {
                host: HostPtr(host),
                addr,
            }),
            Err(error) => {
                // SAFETY: allocated above and not handed out.
                unsafe { (current.cuMemFreeHost)(host.as_ptr().cast()) };
                Err(error)
            }
        }
    }

    /// Page-locks foreign host memory and maps it for the device. What `cudaMallocHost` made (PyTorch's pinned tensors, for instance) is
    /// page-locked and mapped already, and taken as it is.
    ///
    /// # Safety
    /// `host` is valid for `len` bytes until the registration was freed.
    pub(crate) unsafe fn register(
        context: &Context,
        host: NonNull<u8>,
        len: usize,
    ) -> Result<(Self, CuDevicePtr)> {
        let current = context.enter()?;
        // SAFETY: the caller's promise.
        let code = unsafe {
            let flags = HOST_PORTABLE | HOST_DEVICE_MAP;
            (current.cuMemHostRegister_v2)(host.as_ptr().cast(), len, flags)
        };
        let memory = if code == INVALID_VALUE
            && ranges::pinned(&current, host.addr().get() as u64, len as u64)
        {
            Self::PinnedElsewhere {
                host: HostPtr(host),
            }
        } else {
            current.check("cuMemHostRegister", code, || {
                format!("{len} bytes at {host:p}")
            })?;
            Self::Registered {
                host: HostPtr(host),
            }
        };
        match device_addr(&current, host) {
            Ok(addr) => Ok((memory, addr)),
            Err(error) => {
                memory.free(&current);
                Err(error)
            }
        }
    }

    /// At least `len` bytes of exportable device memory; their content is arbitrary.
    pub(crate) fn vmm(context: &Context, len: usize, rdma: bool) -> Result<Self> {
        let current = context.enter()?;
        let prop = exportable(context, rdma);
        let (size, granularity) = rounded(&current, &prop, len)?;
        let mut handle = 0;
        // SAFETY: an out parameter and a filled structure.
        let code = unsafe { (current.cuMemCreate)(&mut handle, size, &prop, 0) };
        current.check("cuMemCreate", code, || {
            format!("{size} bytes of device memory")
        })?;
        map(&current, prop.location, size, granularity, handle)
    }

    /// Maps memory that another process exported, `len` bytes of it at least.
    pub(crate) fn import_fd(
        context: &Context,
        fd: &OwnedFd,
        len: usize,
        rdma: bool,
    ) -> Result<Self> {
        let current = context.enter()?;
        // The exporter rounded its length the same way; mapping more than there is fails in the driver.
        let prop = exportable(context, rdma);
        let (size, granularity) = rounded(&current, &prop, len)?;
        let mut handle = 0;
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: an out parameter; the descriptor goes by value, in the pointer.
        let code = unsafe {
            (current.cuMemImportFromShareableHandle)(&mut handle, number, HANDLE_POSIX_FD)
        };
        current.check("cuMemImportFromShareableHandle", code, || {
            "a file descriptor".to_owned()
        })?;
        map(&current, prop.location, size, granularity, handle)
    }

    /// A descriptor for a [`Memory::Vmm`].
    pub(crate) fn export_fd(context: &Context, handle: CuMemHandle) -> Result<OwnedFd> {
        let current = context.enter()?;
        let mut fd: i32 = -1;
        // SAFETY: for this handle type the out parameter is an int.
        let code = unsafe {
            let out = std::ptr::from_mut(&mut fd).cast();
            (current.cuMemExportToShareableHandle)(out, handle, HANDLE_POSIX_FD, 0)
        };
        current.check("cuMemExportToShareableHandle", code, || {
            "device memory".to_owned()
        })?;
        // SAFETY: a new descriptor that is ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A `cuIpc` handle for a [`Memory::Device`].
    pub(crate) fn export_ipc(context: &Context, addr: CuDevicePtr) -> Result<[u8; 64]> {
        let current = context.enter()?;
        let mut handle = CuIpcMemHandle([0; 64]);
        // SAFETY: an out parameter and a live allocation.
        let code = unsafe { (current.cuIpcGetMemHandle)(&mut handle, addr) };
        current.check("cuIpcGetMemHandle", code, || {
            format!("device memory at {addr:#x}")
        })?;
        Ok(handle.0)
    }

    /// Describes the allocation around somebody else's device memory, and where in it that memory begins. What was made by
    /// `cuMemCreate` comes as a descriptor, if it was made to be exported so; what `cuMemAlloc` made, as a `cuIpc` handle.
    pub(crate) fn export_foreign(
        context: &Context,
        addr: CuDevicePtr,
        len: usize,
    ) -> Result<(Export, u64)> {
        let current = context.enter()?;
        // For mapped memory this is the reserved range, which may be far larger than what is mapped there.
        let (low, bytes) = ranges::allocation(&current, addr, len as u64)?;
        let unknown = || GpuError::UnknownMemory {
            addr,
            len: len as u64,
        };
        let Some(handle) = retain(&current, addr) else {
            let handle = Self::export_ipc(context, low)?;
            let len = usize::try_from(bytes).map_err(|_| unknown())?;
            return Ok((Export::CudaIpc { handle, len }, addr - low));
        };
        let same = |at: u64| has_handle(&current, at, handle);
        let (start, end) = extent(addr, (low, low + bytes), same);
        let fd = Self::export_fd(context, handle);
        release(&current, handle);
        let inside = addr.checked_add(len as u64).is_some_and(|e| e <= end);
        let whole = usize::try_from(end - start).map_err(|_| unknown())?;
        if !inside {
            return Err(unknown());
        }
        Ok((
            Export::Fd {
                fd: fd?,
                len: whole,
            },
            addr - start,
        ))
    }

    /// Opens another process's `cuIpc` handle.
    pub(crate) fn import_ipc(context: &Context, handle: [u8; 64]) -> Result<Self> {
        let current = context.enter()?;
        let mut addr = 0;
        // SAFETY: an out parameter; the driver checks the handle.
        let code = unsafe {
            (current.cuIpcOpenMemHandle_v2)(&mut addr, CuIpcMemHandle(handle), IPC_LAZY_PEER)
        };
        current.check("cuIpcOpenMemHandle", code, || {
            "another process's memory".to_owned()
        })?;
        Ok(Self::Ipc { addr })
    }

    /// The address that kernels use.
    pub(crate) fn addr(&self) -> CuDevicePtr {
        match *self {
            Self::Device { addr }
            | Self::Pinned { addr, .. }
            | Self::Vmm { addr, .. }
            | Self::Ipc { addr } => addr,
            Self::Registered { .. } | Self::PinnedElsewhere { .. } => 0,
        }
    }

    /// The address that the CPU uses.
    pub(crate) fn host(&self) -> Option<NonNull<u8>> {
        match self {
            Self::Pinned { host, .. }
            | Self::Registered { host }
            | Self::PinnedElsewhere { host } => Some(host.0),
            _ => None,
        }
    }

    /// Gives it back to the driver. To be called when no kernel of ours runs.
    pub(crate) fn free(self, current: &Current<'_>) {
        // SAFETY: (all) each handle was made by the call that this one undoes, and `self` is consumed.
        let code = unsafe {
            match self {
                Self::Device { addr } => (current.cuMemFree_v2)(addr),
                Self::Pinned { host, .. } => (current.cuMemFreeHost)(host.0.as_ptr().cast()),
                Self::Ipc { addr } => (current.cuIpcCloseMemHandle)(addr),
                Self::Registered { host } => (current.cuMemHostUnregister)(host.0.as_ptr().cast()),
                Self::PinnedElsewhere { .. } => SUCCESS,
                Self::Vmm {
                    addr,
                    mapped,
                    handle,
                } => {
                    let unmapped = (current.cuMemUnmap)(addr, mapped);
                    let released = (current.cuMemRelease)(handle);
                    let freed = (current.cuMemAddressFree)(addr, mapped);
                    [unmapped, released, freed]
                        .into_iter()
                        .find(|&c| c != SUCCESS)
                        .unwrap_or(SUCCESS)
                }
            }
        };
        if code != SUCCESS {
            // A faulted context, mostly: everything of it is lost, and the fault was reported elsewhere.
            tracing::debug!(code, "memory could not be given back to the driver");
        }
    }
}

/// The physical memory mapped at an address, if it was made by `cuMemCreate`; the driver gives one mapping's handle at each of its addresses.
fn retain(current: &Current<'_>, addr: u64) -> Option<CuMemHandle> {
    let retain = current.cuMemRetainAllocationHandle?;
    let mut handle = 0;
    let at = std::ptr::with_exposed_provenance_mut(addr as usize);
    // SAFETY: an out parameter; any address may be asked about.
    (unsafe { retain(&mut handle, at) } == SUCCESS).then_some(handle)
}

/// Start and end of the mapping around `addr`, within the bounds of its reserved range, and whether kernels of the context's GPU may use it. `None`:
/// it was not made by `cuMemCreate`.
pub(super) fn mapping(
    current: &Current<'_>,
    addr: u64,
    bounds: (u64, u64),
) -> Option<(u64, u64, bool)> {
    let handle = retain(current, addr)?;
    let (start, end) = extent(addr, bounds, |at| has_handle(current, at, handle));
    release(current, handle);
    let here = CuMemLocation {
        kind: LOCATION_DEVICE,
        id: current.device(),
    };
    let mut flags = 0;
    let code = match current.cuMemGetAccess {
        // SAFETY: an out parameter and a filled structure; any address may be asked about.
        Some(access) => unsafe { access(&mut flags, &here, addr) },
        None => ERROR_NOT_FOUND,
    };
    let usable = code == SUCCESS && flags == ACCESS_READ_WRITE as u64;
    Some((start, end, usable))
}

/// Is the memory at `at` that of a handle which the caller has retained?
fn has_handle(current: &Current<'_>, at: u64, handle: CuMemHandle) -> bool {
    let found = retain(current, at);
    if let Some(found) = found {
        release(current, found);
    }
    found == Some(handle)
}

fn release(current: &Current<'_>, handle: CuMemHandle) {
    // SAFETY: retained once by `retain`.
    unsafe { (current.cuMemRelease)(handle) };
}

/// Where the mapping around `addr` begins and ends, within `bounds`: `same` says of an address whether it belongs to it. Mappings begin
/// and end at multiples of 2 MiB.
fn extent(addr: u64, (low, high): (u64, u64), same: impl Fn(u64) -> bool) -> (u64, u64) {
    const STEP: u64 = 2 << 20;
    // The farthest of the pages `0..limit` that belongs to it, by doubling and halving: a mapping has no holes.
    let reach = |limit: u64, page: &dyn Fn(u64) -> u64| {
        let (mut inside, mut outside) = (0, limit);
        let mut step = 1;
        while inside + step < outside {
            match same(page(inside + step)) {
                true => (inside, step) = (inside + step, step * 2),
                false => outside = inside + step,
            }
        }
        while inside + 1 < outside {
            let middle = inside + (outside - inside) / 2;
            match same(page(middle)) {
                true => inside = middle,
                false => outside = middle,
            }
        }
        inside
    };
    let first = addr - addr % STEP;
    let below = (first - low.min(first)) / STEP + 1;
    let above = high.saturating_sub(first).div_ceil(STEP).max(1);
    let start = first - STEP * reach(below, &|n| first - STEP * n);
    let end = first + STEP * (reach(above, &|n| first + STEP * n) + 1);
    (start, end)
}

/// What exportable memory of the context's device is.
fn exportable(context: &Context, rdma: bool) -> CuMemAllocationProp {
    CuMemAllocationProp {
        kind: ALLOCATION_PINNED,
        requested_handle_types: HANDLE_POSIX_FD,
        location: CuMemLocation {
            kind: LOCATION_DEVICE,
            id: context.device(),
        },
        win32_handle_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        gpu_direct_rdma_capable: u8::from(rdma),
        usage: 0,
        reserved: [0; 4],
    }
}

/// `len` rounded up to what can be mapped, and the granularity.
fn rounded(
    current: &Current<'_>,
    prop: &CuMemAllocationProp,
    len: usize,
) -> Result<(usize, usize)> {
    let mut granularity = 0;
    // SAFETY: an out parameter and a filled structure.
    let code = unsafe {
        (current.cuMemGetAllocationGranularity)(&mut granularity, prop, GRANULARITY_RECOMMENDED)
    };
    current.check("cuMemGetAllocationGranularity", code, || {
        "device memory".to_owned()
    })?;
    let size = len
        .checked_next_multiple_of(granularity.max(1))
        .ok_or(GpuError::BadLength {
            len,
            reason: "it does not fit the address space",
        })?;
    Ok((size, granularity))
}

/// Maps physical memory somewhere; takes the handle over, also when it fails.
fn map(
    current: &Current<'_>,
    location: CuMemLocation,
    size: usize,
    granularity: usize,
    handle: CuMemHandle,
) -> Result<Memory> {
    let what = || format!("{size} bytes of device memory");
    let mut addr = 0;
    // SAFETY: an out parameter; the driver picks the address.
    let code = unsafe { (current.cuMemAddressReserve)(&mut addr, size, granularity, 0, 0) };
    if let Err(error) = current.check("cuMemAddressReserve", code, what) {
        // SAFETY: the handle is ours and mapped nowhere.
        unsafe { (current.cuMemRelease)(handle) };
        return Err(error);
    }
    // SAFETY: a fresh reservation of that size, and a handle of at least that size or an error.
    let code = unsafe { (current.cuMemMap)(addr, size, 0, handle, 0) };
    if let Err(error) = current.check("cuMemMap", code, what) {
        // SAFETY: both are ours and unrelated still.
        unsafe {
            (current.cuMemAddressFree)(addr, size);
            (current.cuMemRelease)(handle);
        }
        return Err(error);
    }
    let memory = Memory::Vmm {
        addr,
        mapped: size,
        handle,
    };
    let access = CuMemAccessDesc {
        location,
        flags: ACCESS_READ_WRITE,
    };
    // SAFETY: the range was mapped above; one descriptor.
    let code = unsafe { (current.cuMemSetAccess)(addr, size, &access, 1) };
    if let Err(error) = current.check("cuMemSetAccess", code, what) {
        memory.free(current);
        return Err(error);
    }
    Ok(memory)
}

fn device_addr(current: &Current<'_>, host: NonNull<u8>) -> Result<CuDevicePtr> {
    let mut addr = 0;
    // SAFETY: an out parameter and mapped host memory.
    let code =
        unsafe { (current.cuMemHostGetDevicePointer_v2)(&mut addr, host.as_ptr().cast(), 0) };
    current.check("cuMemHostGetDevicePointer", code, || {
        format!("host memory at {host:p}")
    })?;
    Ok(addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extent_of_a_mapping_is_found_wherever_one_asks() {
        const M: u64 = 2 << 20;
        for (start, pages) in [(0, 1), (0, 7), (5, 1), (5, 2), (3, 64), (90, 10)] {
            let (begin, end) = (M * (1000 + start), M * (1000 + start + pages));
            let bounds = (M * 1000, M * 1100);
            let same = |at: u64| {
                assert!(at >= bounds.0 && at < bounds.1, "asked outside the bounds");
                (begin..end).contains(&at)
            };
            for page in 0..pages {
                for inside in [0, 1, M - 1] {
                    let at = begin + M * page + inside;
                    assert_eq!(
                        extent(at, bounds, same),
                        (begin, end),
                        "{start} {pages} {page}"
                    );
                }
            }
        }
    }
}
