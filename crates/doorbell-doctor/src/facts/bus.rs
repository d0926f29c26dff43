//! GPUs on the PCI bus, and how far a NIC is from each.
//!
//! Distances follow the words of `nvidia-smi topo -m`. They come from the paths in sysfs, which
//! are the bus: `/sys/devices/pci0000:00/<root port>/<upstream>/<downstream>/<device>`.

use super::ids;
use crate::report::{Distance, Gpu, Nic, Unseen};
use crate::tree::View;

/// Where PCI devices are.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";
/// Extended capability of access control services, and its redirect bits (request, completion, upstream forwarding).
const ACS: u16 = 0x000d;
const ACS_REDIRECTS: u16 = 1 << 2 | 1 << 3 | 1 << 4;

pub(super) fn hex(view: View<'_>, path: &str) -> Option<u64> {
    let text = view.text(path)?;
    u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

/// The NUMA node of a device; -1 (unknown) is none.
pub(super) fn numa(view: View<'_>, device: &str) -> Option<u32> {
    view.text(&format!("{device}/numa_node"))?
        .trim()
        .parse()
        .ok()
}

/// Display and accelerator functions of vendors that make GPUs for computing.
pub(super) fn gpus(view: View<'_>) -> Vec<Gpu> {
    let mut gpus = Vec::new();
    for pci in view.list(DEVICES, |_| true) {
        let at = format!("{DEVICES}/{pci}");
        let class = hex(view, &format!("{at}/class")).unwrap_or(0) >> 16;
        let vendor = hex(view, &format!("{at}/vendor")).unwrap_or(0);
        let device = hex(view, &format!("{at}/device")).unwrap_or(0);
        let kind = matches!((class, vendor), (0x03, 0x10de | 0x1002) | (0x12, 0x1002));
        if !kind {
            continue;
        }
        let known = (vendor == 0x10de).then(|| ids::nvidia(device)).flatten();
        let model = view
            .text(&format!("/proc/driver/nvidia/gpus/{pci}/information"))
            .and_then(|t| field(&t, "Model").map(str::to_owned));
        gpus.push(Gpu {
            vendor: ids::vendor(vendor).unwrap_or("?"),
            name: model.unwrap_or_else(|| format!("device {device:04x}")),
            architecture: known.map(|k| k.0),
            capability: known.map(|k| k.1),
            driver: view.leaf(&format!("{at}/driver")),
            numa_node: numa(view, &at),
            pci,
        });
    }
    gpus
}

/// `Name: value` of a text of such lines.
pub(super) fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

pub(super) fn distances(
    view: View<'_>,
    gpus: &[Gpu],
    nics: &[Nic],
    unseen: &mut Vec<Unseen>,
) -> Vec<Distance> {
    let mut all = Vec::new();
    let mut blind = false;
    for gpu in gpus {
        for nic in nics.iter().filter(|n| n.rdma) {
            let Some(pci) = &nic.pci else { continue };
            let ends = (
                view.real(&format!("{DEVICES}/{}", gpu.pci)),
                view.real(&format!("{DEVICES}/{pci}")),
            );
            let (Some(a), Some(b)) = ends else { continue };
            let (path, bridges) = between(&a, &b, gpu.numa_node, nic.numa_node);
            let acs: Vec<Option<bool>> = bridges
                .iter()
                .map(|bridge| redirects(view, bridge))
                .collect();
            let switched = matches!(path, "PIX" | "PXB");
            let acs_redirect = if acs.contains(&Some(true)) {
                Some(true)
            } else if acs.contains(&None) {
                None
            } else {
                Some(false)
            };
            blind |= switched && acs_redirect.is_none();
            all.push(Distance {
                gpu: gpu.pci.clone(),
                nic: nic.name.clone(),
                path,
                acs_redirect: acs_redirect.filter(|_| switched),
            });
        }
    }
    if blind {
        unseen.push(Unseen {
            what: "whether PCIe switches redirect peer traffic to the host (ACS)".into(),
            how: "run doctor as root: the kernel shows others 64 bytes of a device's configuration"
                .into(),
        });
    }
    all
}

/// The distance, and the bridges below the common one, which decide where peer traffic goes.
fn between(
    a: &str,
    b: &str,
    numa_a: Option<u32>,
    numa_b: Option<u32>,
) -> (&'static str, Vec<String>) {
    let bus = |path: &str| -> Vec<String> {
        path.trim_start_matches("/sys/devices/")
            .split('/')
            .map(str::to_owned)
            .collect()
    };
    let (a, b) = (bus(a), bus(b));
    let common = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    let bridges = |path: &[String]| -> Vec<String> {
        let last = path.len().saturating_sub(1);
        path.get(common..last).unwrap_or_default().to_vec()
    };
    let below: Vec<String> = bridges(&a).into_iter().chain(bridges(&b)).collect();
    let path = match common {
        // Not even the root complex is shared.
        0 => match (numa_a, numa_b) {
            (Some(x), Some(y)) if x == y => "NODE",
            _ => "SYS",
        },
        1 => "PHB",
        _ if a.len() - common <= 2 && b.len() - common <= 2 => "PIX",
        _ => "PXB",
    };
    (path, below)
}

/// Does the bridge redirect? `None` when its extended configuration could not be read.
fn redirects(view: View<'_>, bridge: &str) -> Option<bool> {
    let bytes = view.bytes(&format!("{DEVICES}/{bridge}/config")).ok()?;
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let mut at = 0x100;
    // 4096 bytes hold at most this many headers: a list that goes round ends here.
    for _ in 0..960 {
        let header = word(at)?;
        if header as u16 == ACS {
            return Some((word(at + 4)? >> 16) as u16 & ACS_REDIRECTS != 0);
        }
        at = (header >> 20) as usize & 0xffc;
        if at < 0x100 {
            return Some(false);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Manifest;

    #[test]
    fn distances_are_those_of_nvidia_smi() {
        let far = |a: &str, b: &str, n: (u32, u32)| between(a, b, Some(n.0), Some(n.1)).0;
        let root = "/sys/devices/pci0000:00";
        let under = |s: &str| format!("{root}/{s}");
        assert_eq!(
            far(&under("p/u/d1/gpu"), &under("p/u/d2/nic"), (0, 0)),
            "PIX"
        );
        assert_eq!(
            far(&under("p/u/d1/u1/d/gpu"), &under("p/u/d2/nic"), (0, 0)),
            "PXB"
        );
        assert_eq!(far(&under("p1/gpu"), &under("p2/nic"), (0, 0)), "PHB");
        assert_eq!(
            far(&under("p1/gpu"), "/sys/devices/pci0000:80/p/nic", (0, 0)),
            "NODE"
        );
        assert_eq!(
            far(&under("p1/gpu"), "/sys/devices/pci0000:80/p/nic", (0, 1)),
            "SYS"
        );
    }

    #[test]
    fn acs_is_read_from_the_extended_configuration() {
        let mut config = vec![0u8; 0x110];
        config[0x100..0x104].copy_from_slice(&0x0001_000du32.to_le_bytes());
        config[0x104..0x108].copy_from_slice(&0x001d_0000u32.to_le_bytes());
        let hex: String = config.iter().map(|b| format!("{b:02x}")).collect();
        let text = format!(
            "{DEVICES}/d1/config:x {hex}\n{DEVICES}/d2/config:x {}\n",
            &hex[..128]
        );
        let tree = Manifest::parse(&text).unwrap();
        assert_eq!(redirects(View(&tree), "d1"), Some(true));
        assert_eq!(redirects(View(&tree), "d2"), None);
    }
}
