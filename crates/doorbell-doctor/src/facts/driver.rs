//! NVIDIA's kernel driver, its options, and the ways to GPU memory that follow from them.

use super::bus::field;
use crate::report::{Driver, Gpu, Machine, Memory, Software};
use crate::tree::View;

/// First CUDA release of each driver branch (NVIDIA's release notes); the last that is not above counts.
const CUDA: &[(u32, &str)] = &[
    (450, "11.0"),
    (455, "11.1"),
    (460, "11.2"),
    (465, "11.3"),
    (470, "11.4"),
    (495, "11.5"),
    (510, "11.6"),
    (515, "11.7"),
    (520, "11.8"),
    (525, "12.0"),
    (530, "12.1"),
    (535, "12.2"),
    (545, "12.3"),
    (550, "12.4"),
    (555, "12.5"),
    (560, "12.6"),
    (565, "12.7"),
    (570, "12.8"),
    (575, "12.9"),
    (580, "13.0"),
    (590, "13.1"),
    (595, "13.2"),
];

/// The number before the first point of a version.
pub(crate) fn branch(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

pub(super) fn driver(view: View<'_>, software: &[Software]) -> Option<Driver> {
    let banner = view.text("/proc/driver/nvidia/version");
    let version = view.text("/sys/module/nvidia/version").or_else(|| {
        // "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build …"
        let banner = banner.as_deref()?.lines().next()?;
        banner
            .split_whitespace()
            .find(|w| w.contains('.') && w.starts_with(|c: char| c.is_ascii_digit()))
            .map(str::to_owned)
    })?;
    let params = view.text("/proc/driver/nvidia/params");
    let params = params.as_deref();
    let number = |name: &str| params.and_then(|p| field(p, name)?.parse::<u64>().ok());
    let keys = |name: &str| params.and_then(|p| field(p, name));
    let overridden = params.is_some().then(|| {
        ["RegistryDwords", "RegistryDwordsPerDevice"]
            .iter()
            .filter_map(|name| keys(name))
            .any(|text| text.replace(' ', "").contains("PeerMappingOverride=1"))
    });
    Some(Driver {
        open: banner.map(|b| b.contains("Open Kernel Module")),
        cuda: branch(&version)
            .and_then(|b| CUDA.iter().rev().find(|(first, _)| *first <= b))
            .map(|(_, cuda)| (*cuda).to_owned()),
        libcuda: software
            .iter()
            .find(|s| s.name == "libcuda.so.1")
            .and_then(|s| s.version.clone()),
        peer_mapping_override: overridden,
        dma_remap_peer_mmio: number("DmaRemapPeerMmio").map(|v| v != 0),
        grdma_topo_override: number("GrdmaPciTopoCheckOverride"),
        version,
    })
}

pub(super) fn memory(
    view: View<'_>,
    driver: Option<&Driver>,
    gpus: &[Gpu],
    machine: &Machine,
) -> Memory {
    let (dma_buf, dma_buf_why) = dma_buf(driver, gpus, machine);
    Memory {
        nvidia_peermem: view.exists("/sys/module/nvidia_peermem"),
        nv_peer_mem: view.exists("/sys/module/nv_peer_mem")
            || view.exists("/sys/kernel/mm/memory_peers/nv_mem/version"),
        efa_peermem: view.exists("/sys/module/efa_nv_peermem"),
        gdrdrv: view.exists("/sys/module/gdrdrv"),
        dma_buf,
        dma_buf_why,
    }
}

/// CUDA itself has an attribute for this; without running CUDA it follows from what it needs:
/// open kernel modules of branch 515 or later, Linux 5.12 or later, Turing or later.
fn dma_buf(driver: Option<&Driver>, gpus: &[Gpu], machine: &Machine) -> (Option<bool>, String) {
    let Some(driver) = driver else {
        return (Some(false), "no NVIDIA driver is loaded".into());
    };
    if driver.open == Some(false) {
        return (
            Some(false),
            "the proprietary kernel modules do not export CUDA memory; the open ones do".into(),
        );
    }
    if branch(&driver.version).is_some_and(|b| b < 515) {
        return (
            Some(false),
            format!("driver {} is older than branch 515", driver.version),
        );
    }
    let kernel = machine.kernel.as_deref().and_then(kernel_version);
    if kernel.is_some_and(|k| k < (5, 12)) {
        return (
            Some(false),
            "RDMA drivers take dma-bufs since Linux 5.12".into(),
        );
    }
    if gpus
        .iter()
        .any(|g| g.vendor == "NVIDIA" && g.capability.is_some_and(|c| c < 75))
    {
        return (Some(false), "a GPU is older than Turing".into());
    }
    match (driver.open, kernel) {
        (Some(true), Some(_)) => (
            Some(true),
            "open kernel modules, and the kernel is recent enough".into(),
        ),
        _ => (
            None,
            "the flavour of the kernel modules or the kernel's version could not be read".into(),
        ),
    }
}

/// `6.8.0-45-generic` is (6, 8).
pub(crate) fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
