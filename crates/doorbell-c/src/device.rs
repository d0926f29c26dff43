//! `doorbell_device_*`: opening, asking, driving.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use doorbell::{Config, Device, GpuSelect, HcaCores};

use crate::convert::{store, string, timeout, wanted};
use crate::error::{Failure, Result, guard};
use crate::handle::Table;
use crate::status::Status;
use crate::types::{
    DOORBELL_DEVICE_CALLER_DRIVEN, doorbell_device_attr, doorbell_device_info, read, text, write,
};

/// `struct doorbell_device`.
#[derive(Debug)]
#[repr(C)]
pub struct CDevice(c_void);

pub(crate) static DEVICES: Table<Device> = Table::new("doorbell_device");

/// "0.1.0": the version of this library. Never NULL, valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

fn config(attr: &doorbell_device_attr) -> Result<Config> {
    let unknown = attr.flags & !DOORBELL_DEVICE_CALLER_DRIVEN;
    if unknown != 0 {
        return Err(Failure::invalid(
            "attr.flags",
            format_args!("{:#x}", attr.flags),
            "only DOORBELL_DEVICE_CALLER_DRIVEN is known",
        ));
    }
    // SAFETY: doorbell.h asks for NULL or a terminated string.
    let gpu = match unsafe { string("attr.gpu", attr.gpu) }? {
        Some(name) => Some(
            name.parse::<GpuSelect>()
                .map_err(|e| Failure::new(Status::Invalid, e))?,
        ),
        None => None,
    };
    let hca_cores = match (
        attr.flags & DOORBELL_DEVICE_CALLER_DRIVEN != 0,
        attr.hca_cores,
    ) {
        (true, 0) => Some(HcaCores::Caller),
        (true, n) => {
            return Err(Failure::invalid(
                "attr.hca_cores",
                n,
                "a caller-driven device has no engine threads: give 0",
            ));
        }
        (false, 0) => None,
        (false, n) => Some(HcaCores::Threads(n)),
    };
    // SAFETY: as above.
    let fault = unsafe { string("attr.fault", attr.fault) }?.map(str::to_owned);
    let quiesce = (attr.quiesce_ns != 0).then(|| Duration::from_nanos(attr.quiesce_ns));
    Ok(Config {
        gpu,
        hca_cores,
        quiesce,
        fault,
        ..Config::default()
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `attr` is null or a structure whose `size` bytes are readable; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_open(
    attr: *const doorbell_device_attr,
    out: *mut *mut CDevice,
) -> i32 {
    guard("doorbell_device_open", || {
        wanted("out", out)?;
        let config = if attr.is_null() {
            Config::default()
        } else {
            // SAFETY: this function's promise.
            config(&unsafe { read(attr) }?)?
        };
        let device = Device::builder().config(config).open()?;
        // SAFETY: this function's promise.
        unsafe { store(out, DEVICES.insert(device)) };
        Ok(())
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_device_close(device: *mut CDevice) -> i32 {
    guard("doorbell_device_close", || DEVICES.remove(device).map(drop))
}

/// See `doorbell.h`.
///
/// # Safety
/// `info` is null or a structure whose `size` bytes are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_query(
    device: *mut CDevice,
    info: *mut doorbell_device_info,
) -> i32 {
    guard("doorbell_device_query", || {
        let device = DEVICES.get(device)?;
        let gpu = device.gpu_info();
        let signed = |n: Option<u32>| n.and_then(|n| i32::try_from(n).ok()).unwrap_or(-1);
        let (compute_major, compute_minor) = gpu.compute_capability.unwrap_or_default();
        let (driver_major, driver_minor) = gpu.driver_version.unwrap_or_default();
        let answer = doorbell_device_info {
            size: 0,
            name: text(&gpu.name),
            pci_bus_id: text(gpu.pci_bus_id.as_deref().unwrap_or_default()),
            is_cuda: i32::from(device.gpu().is_cuda()),
            ordinal: signed(gpu.ordinal),
            numa_node: signed(gpu.numa_node),
            sm_count: gpu.sm_count,
            compute_major,
            compute_minor,
            driver_major,
            driver_minor,
            hca_cores: match device.settings().hca_cores {
                HcaCores::Threads(n) => n,
                HcaCores::Caller => 0,
            },
            reserved: 0,
        };
        // SAFETY: this function's promise.
        unsafe { write(info, answer) }
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `worked` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_poll(device: *mut CDevice, worked: *mut i32) -> i32 {
    guard("doorbell_device_poll", || {
        let did = DEVICES.get(device)?.poll();
        // SAFETY: this function's promise.
        unsafe { store(worked, i32::from(did)) };
        Ok(())
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `text` is null with a `capacity` of 0, or `capacity` bytes are writable there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_device_next_error(
    device: *mut CDevice,
    text: *mut c_char,
    capacity: usize,
    timeout_ns: u64,
) -> i32 {
    guard("doorbell_device_next_error", || {
        let device = DEVICES.get(device)?;
        if capacity > 0 {
            wanted("text", text)?;
        }
        let Some(error) = device.next_error(timeout(timeout_ns)) else {
            return Err(Failure::new(
                Status::TimedOut,
                format_args!("no error within {timeout_ns} ns"),
            ));
        };
        if capacity > 0 {
            let words = error.to_string();
            let length = words.len().min(capacity - 1);
            // SAFETY: this function's promise: `capacity` bytes, of which `length` and a terminator are used.
            unsafe {
                std::ptr::copy_nonoverlapping(words.as_ptr(), text.cast::<u8>(), length);
                text.add(length).write(0);
            }
        }
        Ok(())
    })
}
