//! Finding a CUDA device and reading what it is.
//!
//! Ordinals are CUDA's own, which `CUDA_VISIBLE_DEVICES` defines. What the driver does not say (the NUMA node) comes from
//! sysfs.

use std::ffi::{c_char, c_int};

use super::driver::Driver;
use super::types::*;
use crate::info::{Backend, Capabilities, GpuInfo};
use crate::{GpuError, Result};

/// Devices that this process sees.
pub(crate) fn count(driver: &Driver) -> Result<u32> {
    let mut count = 0;
    // SAFETY: an out parameter.
    let code = unsafe { (driver.cuDeviceGetCount)(&mut count) };
    driver.check("cuDeviceGetCount", code, || "this process".to_owned())?;
    if count <= 0 {
        return Err(driver.error(
            "cuDeviceGetCount",
            ERROR_NO_DEVICE,
            "this process".to_owned(),
        ));
    }
    Ok(count.unsigned_abs())
}

/// The device of an ordinal.
pub(crate) fn open(driver: &Driver, ordinal: u32) -> Result<CuDevice> {
    let count = count(driver)?;
    let index = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
    let index = index.ok_or(GpuError::NoSuchDevice { ordinal, count })?;
    let mut device = 0;
    // SAFETY: an out parameter.
    let code = unsafe { (driver.cuDeviceGet)(&mut device, index) };
    driver.check("cuDeviceGet", code, || format!("ordinal {ordinal}"))?;
    Ok(device)
}

/// One attribute; 0 where an older driver does not know it.
pub(crate) fn attribute(driver: &Driver, device: CuDevice, which: c_int) -> u32 {
    let mut value = 0;
    // SAFETY: an out parameter; unknown attributes are an error code.
    let code = unsafe { (driver.cuDeviceGetAttribute)(&mut value, which, device) };
    if code == SUCCESS {
        u32::try_from(value).unwrap_or(0)
    } else {
        0
    }
}

/// Reads everything, and refuses devices that cannot do the work.
pub(crate) fn describe(driver: &Driver, device: CuDevice, ordinal: u32) -> Result<GpuInfo> {
    let get = |which| attribute(driver, device, which);
    let mut notes = Vec::new();
    let name = text(|buffer, len| {
        // SAFETY: the buffer has `len` bytes.
        unsafe { (driver.cuDeviceGetName)(buffer, len, device) }
    })
    .unwrap_or_else(|| "an unnamed CUDA device".to_owned());
    for (which, what) in [
        (attribute::UNIFIED_ADDRESSING, "unified addressing"),
        (attribute::CAN_MAP_HOST_MEMORY, "mapping of host memory"),
    ] {
        if get(which) == 0 {
            let remedy = "use a GPU that has it (any since Pascal), or the host GPU";
            return Err(GpuError::Unsupported {
                what,
                device: name,
                remedy,
            });
        }
    }
    let pci_bus_id = text(|buffer, len| {
        // SAFETY: the buffer has `len` bytes.
        unsafe { (driver.cuDeviceGetPCIBusId)(buffer, len, device) }
    })
    .map(|id| id.to_ascii_lowercase());
    let (uuid, slice) = uuid(driver, device);
    let mig = slice || name.contains(" MIG ");
    let mps = get(attribute::MPS_ENABLED) != 0;
    let mut memory = 0usize;
    // SAFETY: an out parameter.
    unsafe { (driver.cuDeviceTotalMem_v2)(&mut memory, device) };
    let async_engines = get(attribute::ASYNC_ENGINE_COUNT);
    if mig {
        notes.push(
            "a MIG slice: figures of the whole GPU do not apply, and peer access is off".into(),
        );
    }
    if mps {
        notes.push(
            "under the Multi-Process Service: a fault of one client can end the others".into(),
        );
    }
    if async_engines == 0 {
        notes.push("no copy engine: copies to GPU memory wait for running kernels".into());
    }
    notes.extend(environment_notes(|name| std::env::var(name).ok()));
    Ok(GpuInfo {
        name,
        backend: Backend::Cuda,
        ordinal: Some(ordinal),
        visible: count(driver)?,
        sm_count: get(attribute::MULTIPROCESSOR_COUNT),
        compute_capability: Some((
            get(attribute::COMPUTE_CAPABILITY_MAJOR),
            get(attribute::COMPUTE_CAPABILITY_MINOR),
        )),
        numa_node: pci_bus_id.as_deref().and_then(numa_node),
        pci_bus_id,
        driver_version: version(driver),
        uuid,
        memory_bytes: memory as u64,
        mig,
        mps,
        gdrdrv: std::path::Path::new("/dev/gdrdrv").exists(),
        can: Capabilities {
            max_threads_per_block: get(attribute::MAX_THREADS_PER_BLOCK),
            max_blocks: get(attribute::MAX_GRID_DIM_X),
            max_threads_per_sm: get(attribute::MAX_THREADS_PER_MULTIPROCESSOR),
            async_engines,
            vmm_fd: get(attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0
                && get(attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0,
            ipc: get(attribute::IPC_EVENT_SUPPORTED) != 0,
            gpu_direct_rdma: get(attribute::GPU_DIRECT_RDMA_SUPPORTED) != 0,
            dma_buf: get(attribute::DMA_BUF_SUPPORTED) != 0,
            batch_copy: driver.cuMemcpyBatchAsync_v2.is_some()
                || driver.cuMemcpyBatchAsync.is_some(),
            kernel_copies: false,
            host_native_atomics: get(attribute::HOST_NATIVE_ATOMIC_SUPPORTED) != 0,
        },
        notes,
    })
}

/// What the environment is likely to break; see the hazards in `copier`.
fn environment_notes(var: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(n) = var("CUDA_DEVICE_MAX_CONNECTIONS").and_then(|v| v.trim().parse::<u32>().ok())
        && n < 8
    {
        notes.push(format!(
            "CUDA_DEVICE_MAX_CONNECTIONS={n}: streams share channels, and copies of GPU memory may wait for a running \
             kernel; unset it or make it 8 or more"
        ));
    }
    if var("CUDA_LAUNCH_BLOCKING").is_some_and(|v| v.trim() == "1") {
        notes.push(
            "CUDA_LAUNCH_BLOCKING=1: launches wait for their kernels, which never end if they wait for us".into(),
        );
    }
    notes
}

fn version(driver: &Driver) -> Option<(u32, u32)> {
    let mut version = 0;
    // SAFETY: an out parameter.
    let code = unsafe { (driver.cuDriverGetVersion)(&mut version) };
    let version = u32::try_from(version).ok().filter(|_| code == SUCCESS)?;
    Some((version / 1000, version % 1000 / 10))
}

/// The printed UUID, and whether it is a slice's: then the MIG-aware call answers otherwise than the old one.
fn uuid(driver: &Driver, device: CuDevice) -> (Option<String>, bool) {
    let get = |f: unsafe extern "C" fn(*mut CuUuid, CuDevice) -> CuResult| {
        let mut uuid = CuUuid::default();
        // SAFETY: an out parameter.
        let code = unsafe { f(&mut uuid, device) };
        (code == SUCCESS).then_some(uuid)
    };
    let whole = get(driver.cuDeviceGetUuid);
    let own = driver.cuDeviceGetUuid_v2.and_then(get);
    let slice = matches!((own, whole), (Some(a), Some(b)) if a != b);
    let prefix = if slice { "MIG" } else { "GPU" };
    (
        own.or(whole)
            .map(|uuid| format!("{prefix}-{}", hyphenated(uuid.0))),
        slice,
    )
}

fn hyphenated(bytes: [u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The NUMA node of a PCI device; sysfs writes -1 where there is none.
fn numa_node(pci_bus_id: &str) -> Option<u32> {
    let path = format!("/sys/bus/pci/devices/{pci_bus_id}/numa_node");
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn text(fill: impl FnOnce(*mut c_char, c_int) -> CuResult) -> Option<String> {
    let mut buffer = [0u8; 256];
    let code = fill(buffer.as_mut_ptr().cast(), 255);
    let end = buffer.iter().position(|&b| b == 0)?;
    let text = String::from_utf8_lossy(&buffer[..end]).trim().to_owned();
    (code == SUCCESS && !text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_printed_as_nvidia_smi_does() {
        let bytes = std::array::from_fn(|i| (i as u8) * 17);
        assert_eq!(hyphenated(bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn the_environment_is_read_for_trouble() {
        let with = |name: &'static str, value: &'static str| {
            environment_notes(move |n| (n == name).then(|| value.to_owned()))
        };
        assert!(environment_notes(|_| None).is_empty());
        assert!(with("CUDA_DEVICE_MAX_CONNECTIONS", "32").is_empty());
        assert!(with("CUDA_DEVICE_MAX_CONNECTIONS", "many").is_empty());
        assert!(with("CUDA_DEVICE_MAX_CONNECTIONS", "1")[0].contains("=1"));
        assert!(with("CUDA_LAUNCH_BLOCKING", "1")[0].contains("CUDA_LAUNCH_BLOCKING"));
    }
}
