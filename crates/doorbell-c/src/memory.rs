//! `doorbell_mem_*`, `doorbell_pd_*` and `doorbell_mr_*`: memory, and the right to use it.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use doorbell::{Access, Addressing, Memory, Mr, Pd, Place};

use crate::convert::{store, timeout, wanted};
use crate::device::{CDevice, DEVICES};
use crate::error::{Failure, Result, guard};
use crate::handle::Table;
use crate::status::Status;
use crate::types::{
    DOORBELL_ACCESS_ALL, DOORBELL_ADDRESS_BASED, DOORBELL_MEM_GPU, DOORBELL_MEM_HOST,
    DOORBELL_MEM_SHARED, DOORBELL_ZERO_BASED, doorbell_mr_info, write,
};

/// `struct doorbell_mem`.
#[derive(Debug)]
#[repr(C)]
pub struct CMem(c_void);
/// `struct doorbell_pd`.
#[derive(Debug)]
#[repr(C)]
pub struct CPd(c_void);
/// `struct doorbell_mr`.
#[derive(Debug)]
#[repr(C)]
pub struct CMr(c_void);

static MEMORIES: Table<Memory> = Table::new("doorbell_mem");
pub(crate) static DOMAINS: Table<Pd> = Table::new("doorbell_pd");
/// Deregistering takes the region out; a call that still looks at it then finds nothing.
pub(crate) static REGIONS: Table<Arc<Mutex<Option<Mr>>>> = Table::new("doorbell_mr");

/// See `doorbell.h`.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_mem_alloc(
    device: *mut CDevice,
    kind: u32,
    length: usize,
    out: *mut *mut CMem,
) -> i32 {
    guard("doorbell_mem_alloc", || {
        wanted("out", out)?;
        let place = match kind {
            DOORBELL_MEM_GPU => Place::Gpu,
            DOORBELL_MEM_HOST => Place::Host,
            DOORBELL_MEM_SHARED => Place::Shared,
            _ => return Err(Failure::invalid("kind", kind, "use one of DOORBELL_MEM_*")),
        };
        let memory = DEVICES.get(device)?.alloc(place, length)?;
        // SAFETY: this function's promise.
        unsafe { store(out, MEMORIES.insert(memory)) };
        Ok(())
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `out` is null or writable. `length` bytes at `address` are readable and writable (by the GPU, or by the CPU and the GPU) until the memory and
/// the regions made from it are gone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_mem_import(
    device: *mut CDevice,
    address: u64,
    length: usize,
    is_gpu: i32,
    out: *mut *mut CMem,
) -> i32 {
    guard("doorbell_mem_import", || {
        wanted("out", out)?;
        let device = DEVICES.get(device)?;
        if length == 0 {
            return Err(Failure::invalid("length", 0, "import at least one byte"));
        }
        let memory = if is_gpu != 0 {
            // SAFETY: this function's promise, for as long as anything made from the memory lives.
            unsafe { device.import_gpu(address, length, None) }?
        } else {
            let pointer = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(
                address as usize,
            ))
            .ok_or_else(|| Failure::invalid("address", "0", "import memory that is mapped"))?;
            // Nothing to keep alive on this side: C keeps it.
            // SAFETY: this function's promise.
            unsafe { device.import_host(pointer, length, Arc::new(())) }?
        };
        // SAFETY: this function's promise.
        unsafe { store(out, MEMORIES.insert(memory)) };
        Ok(())
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_mem_free(mem: *mut CMem) -> i32 {
    guard("doorbell_mem_free", || MEMORIES.remove(mem).map(drop))
}

/// See `doorbell.h`.
///
/// # Safety
/// Each out pointer is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_mem_query(
    mem: *mut CMem,
    device_address: *mut u64,
    host_pointer: *mut *mut c_void,
    length: *mut usize,
) -> i32 {
    guard("doorbell_mem_query", || {
        let memory = MEMORIES.get(mem)?;
        // SAFETY: this function's promise.
        unsafe {
            store(device_address, memory.device_addr());
            store(
                host_pointer,
                memory
                    .host_ptr()
                    .map_or(std::ptr::null_mut(), |p| p.as_ptr().cast()),
            );
            store(length, memory.len());
        }
        Ok(())
    })
}

/// Checked before anything is done with the caller's pointer: a length that cannot be right is usually a bug in its computation.
fn inside(memory: &Memory, offset: usize, length: usize) -> Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= memory.len() => Ok(()),
        _ => Err(Failure::invalid(
            "offset and length",
            format_args!("{offset} and {length}"),
            &format!("the memory has {} bytes", memory.len()),
        )),
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `length` bytes at `to` are writable, and nobody else uses them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_mem_read(
    mem: *mut CMem,
    offset: usize,
    to: *mut c_void,
    length: usize,
) -> i32 {
    guard("doorbell_mem_read", || {
        let memory = MEMORIES.get(mem)?;
        if length == 0 {
            return Ok(());
        }
        inside(&memory, offset, length)?;
        wanted("to", to)?;
        // A slice of bytes that C never wrote must not exist, so they are written first.
        // SAFETY: this function's promise.
        let bytes = unsafe {
            std::ptr::write_bytes(to.cast::<u8>(), 0, length);
            std::slice::from_raw_parts_mut(to.cast::<u8>(), length)
        };
        Ok(memory.read(offset, bytes)?)
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `length` bytes at `from` are readable, and nobody writes them meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_mem_write(
    mem: *mut CMem,
    offset: usize,
    from: *const c_void,
    length: usize,
) -> i32 {
    guard("doorbell_mem_write", || {
        let memory = MEMORIES.get(mem)?;
        if length == 0 {
            return Ok(());
        }
        inside(&memory, offset, length)?;
        wanted("from", from.cast_mut())?;
        // SAFETY: this function's promise.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), length) };
        Ok(memory.write(offset, bytes)?)
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_pd_alloc(device: *mut CDevice, out: *mut *mut CPd) -> i32 {
    guard("doorbell_pd_alloc", || {
        wanted("out", out)?;
        let pd = DEVICES.get(device)?.pd()?;
        // SAFETY: this function's promise.
        unsafe { store(out, DOMAINS.insert(pd)) };
        Ok(())
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_pd_free(pd: *mut CPd) -> i32 {
    guard("doorbell_pd_free", || DOMAINS.remove(pd).map(drop))
}

/// See `doorbell.h`.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_mr_register(
    pd: *mut CPd,
    mem: *mut CMem,
    access: u32,
    addressing: u32,
    out: *mut *mut CMr,
) -> i32 {
    guard("doorbell_mr_register", || {
        wanted("out", out)?;
        if access & !DOORBELL_ACCESS_ALL != 0 {
            return Err(Failure::invalid(
                "access",
                format_args!("{access:#x}"),
                "use the bits DOORBELL_ACCESS_*",
            ));
        }
        let addressing = match addressing {
            DOORBELL_ADDRESS_BASED => Addressing::Device,
            DOORBELL_ZERO_BASED => Addressing::Zero,
            _ => {
                return Err(Failure::invalid(
                    "addressing",
                    addressing,
                    "use DOORBELL_ADDRESS_BASED or DOORBELL_ZERO_BASED",
                ));
            }
        };
        let memory = MEMORIES.get(mem)?;
        let mr = DOMAINS
            .get(pd)?
            .register_with(&memory, Access::from_bits(access), addressing)?;
        // SAFETY: this function's promise.
        unsafe { store(out, REGIONS.insert(Arc::new(Mutex::new(Some(mr))))) };
        Ok(())
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `info` is null or a structure whose `size` bytes are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_mr_query(mr: *mut CMr, info: *mut doorbell_mr_info) -> i32 {
    guard("doorbell_mr_query", || {
        let region = REGIONS.get(mr)?;
        let region = region.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(region) = region.as_ref() else {
            return Err(gone());
        };
        let answer = doorbell_mr_info {
            size: 0,
            address: region.addr(),
            length: region.len() as u64,
            key: region.key(),
            access: region.access().bits(),
        };
        // SAFETY: this function's promise.
        unsafe { write(info, answer) }
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_mr_deregister(mr: *mut CMr, timeout_ns: u64) -> i32 {
    guard("doorbell_mr_deregister", || {
        let region = REGIONS
            .remove(mr)?
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match region {
            Some(region) => Ok(region.deregister(timeout(timeout_ns)).map(drop)?),
            None => Err(gone()),
        }
    })
}

/// Another thread deregistered the region between the look-up of its name and its use.
fn gone() -> Failure {
    Failure::new(Status::Handle, "the region was deregistered meanwhile")
}
