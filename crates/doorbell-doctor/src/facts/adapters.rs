//! Network controllers on the PCI bus, whether or not anything drives them, and what they lack to be RDMA devices.
//!
//! `/sys/class/infiniband` has only what has come up: a NIC whose RDMA driver is not loaded is absent there, and one without its provider is
//! there and not in libibverbs. Here it is seen all the same.

use super::bus::{DEVICES, hex};
use super::ids;
use crate::report::{Adapter, RdmaSystem};
use crate::tree::View;

/// PCI class of network controllers.
const NETWORK: u64 = 0x02;

/// A NIC's driver, the module that makes it an RDMA device, and the provider of rdma-core that knows this; a module may be of several drivers.
const MODULES: &[(&str, &str, &str)] = &[
    ("mlx5_core", "mlx5_ib", "mlx5"),
    ("mlx4_core", "mlx4_ib", "mlx4"),
    ("bnxt_en", "bnxt_re", "bnxt_re"),
    ("ice", "irdma", "irdma"),
    ("idpf", "irdma", "irdma"),
    ("i40e", "irdma", "irdma"),
    ("cxgb4", "iw_cxgb4", "cxgb4"),
    ("qede", "qedr", "qedr"),
    ("hns3", "hns_roce_hw_v2", "hns"),
    ("be2net", "ocrdma", "ocrdma"),
    ("mana", "mana_ib", "mana"),
    ("ionic", "ionic_rdma", "ionic"),
    ("vmw_pvrdma", "vmw_pvrdma", "vmw_pvrdma"),
    ("efa", "efa", "efa"),
    ("erdma", "erdma", "erdma"),
    ("hfi1", "hfi1", "hfi1verbs"),
];

/// Modules without which those above are nothing, and those of devices without a NIC of their own.
const COMMON: &[&str] = &["ib_core", "ib_uverbs", "rdma_cm", "rdma_rxe", "siw"];

/// A module of this name is loaded, or built into the kernel and seen there.
fn loaded(view: View<'_>, module: &str) -> bool {
    view.exists(&format!("/sys/module/{module}"))
}

fn adapters(view: View<'_>, providers: &[String]) -> Vec<Adapter> {
    let network = |pci: &String| {
        hex(view, &format!("{DEVICES}/{pci}/class")).is_some_and(|c| c >> 16 == NETWORK)
    };
    let all = view.list(DEVICES, |_| true);
    all.into_iter()
        .filter(network)
        .map(|pci| adapter(view, providers, pci))
        .collect()
}

fn adapter(view: View<'_>, providers: &[String], pci: String) -> Adapter {
    let at = format!("{DEVICES}/{pci}");
    let id = |name: &str| hex(view, &format!("{at}/{name}")).unwrap_or(0);
    let (vendor, device) = (id("vendor"), id("device"));
    let driver = view.leaf(&format!("{at}/driver"));
    let mut interfaces = view.list(&format!("{at}/net"), |_| true);
    // A virtio device is below its PCI device.
    for below in view.list(&at, |n| n.starts_with("virtio")) {
        interfaces.extend(view.list(&format!("{at}/{below}/net"), |_| true));
    }
    let rdma = view.list(&format!("{at}/infiniband"), |_| true);
    let name = [ids::vendor(vendor), ids::nic(vendor, device)];
    let name: Vec<&str> = name.into_iter().flatten().collect();
    Adapter {
        id: format!("{vendor:04x}:{device:04x}"),
        board: format!(
            "{:04x}:{:04x}",
            id("subsystem_vendor"),
            id("subsystem_device")
        ),
        name: (!name.is_empty()).then(|| name.join(" ")),
        lacks: lacks(
            view,
            providers,
            (vendor, device),
            driver.as_deref(),
            !rdma.is_empty(),
        ),
        pci,
        driver,
        interfaces,
        rdma,
    }
}

/// What stands between a NIC and an RDMA device, as far as its driver tells; nothing is known of NICs that have no RDMA.
fn lacks(
    view: View<'_>,
    providers: &[String],
    (vendor, device): (u64, u64),
    driver: Option<&str>,
    is_rdma: bool,
) -> Option<String> {
    let Some(driver) = driver else {
        let efa = (vendor, device >> 4) == (0x1d0f, 0xefa);
        let how = match efa {
            true => "`modprobe efa`",
            false => "`modprobe` the vendor's, or see `dmesg` for why it would not",
        };
        return Some(format!("no driver is bound to it: {how}"));
    };
    if matches!(driver, "vfio-pci" | "uio_pci_generic" | "igb_uio") {
        return Some(format!(
            "{driver} keeps it for a virtual machine or a program (DPDK): no RDMA driver can have it"
        ));
    }
    let (_, module, provider) = MODULES.iter().find(|(of, ..)| *of == driver)?;
    if is_rdma {
        let there = providers.is_empty() || providers.iter().any(|p| p == provider);
        return (!there).then(|| {
            format!(
                "its RDMA driver {module} is loaded, and rdma-core has no provider `{provider}`: install ibverbs-providers (Debian) or libibverbs (Fedora, RHEL), of a release that knows this NIC"
            )
        });
    }
    Some(match loaded(view, module) {
        false => format!(
            "{module}, which makes RDMA devices of NICs of this driver that can be some, is not loaded: `modprobe {module}`, from the distribution's kernel modules or the vendor's package"
        ),
        true => format!(
            "{module} is loaded and has made no RDMA device of it: `dmesg` may say why, or it has no RDMA, or its firmware or `devlink dev param show` has that switched off"
        ),
    })
}

/// Names of the providers that rdma-core is told of.
fn providers(view: View<'_>) -> Vec<String> {
    let mut names: Vec<String> = view
        .list("/etc/libibverbs.d", |n| n.ends_with(".driver"))
        .into_iter()
        .map(|n| n.trim_end_matches(".driver").to_owned())
        .collect();
    names.sort();
    names
}

pub(super) fn rdma_system(view: View<'_>) -> RdmaSystem {
    let mut modules: Vec<&'static str> = COMMON.to_vec();
    modules.extend(MODULES.iter().map(|(_, module, _)| *module));
    modules.retain(|m| loaded(view, m));
    modules.dedup();
    let providers = providers(view);
    RdmaSystem {
        adapters: adapters(view, &providers),
        modules,
        providers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Manifest;

    /// A Broadcom NIC whose RDMA driver is not there, a ConnectX that is whole, one that nothing drives, a virtio one, and a disk.
    const MACHINE: &str = "\
/etc/libibverbs.d/mlx5.driver: driver mlx5
/sys/bus/pci/devices/0000:01:00.0/class: 0x020000
/sys/bus/pci/devices/0000:01:00.0/vendor: 0x14e4
/sys/bus/pci/devices/0000:01:00.0/device: 0x1750
/sys/bus/pci/devices/0000:01:00.0/subsystem_vendor: 0x14e4
/sys/bus/pci/devices/0000:01:00.0/subsystem_device: 0x5208
/sys/bus/pci/devices/0000:01:00.0/driver -> ../../../bus/pci/drivers/bnxt_en
/sys/bus/pci/devices/0000:01:00.0/net/eth0/mtu: 1500
/sys/bus/pci/devices/0000:02:00.0/class: 0x020700
/sys/bus/pci/devices/0000:02:00.0/vendor: 0x15b3
/sys/bus/pci/devices/0000:02:00.0/device: 0x1021
/sys/bus/pci/devices/0000:02:00.0/driver -> ../../../bus/pci/drivers/mlx5_core
/sys/bus/pci/devices/0000:02:00.0/infiniband/mlx5_0/x: 1
/sys/bus/pci/devices/0000:03:00.0/class: 0x020000
/sys/bus/pci/devices/0000:03:00.0/vendor: 0x1d0f
/sys/bus/pci/devices/0000:03:00.0/device: 0xefa2
/sys/bus/pci/devices/0000:04:00.0/class: 0x020000
/sys/bus/pci/devices/0000:04:00.0/vendor: 0x1af4
/sys/bus/pci/devices/0000:04:00.0/device: 0x1041
/sys/bus/pci/devices/0000:04:00.0/driver -> ../../../bus/pci/drivers/virtio-pci
/sys/bus/pci/devices/0000:04:00.0/virtio0/net/ens4/mtu: 1500
/sys/bus/pci/devices/0000:05:00.0/class: 0x010802
/sys/bus/pci/devices/0000:05:00.0/vendor: 0x1af4
/sys/bus/pci/devices/0000:06:00.0/class: 0x020000
/sys/bus/pci/devices/0000:06:00.0/vendor: 0x8086
/sys/bus/pci/devices/0000:06:00.0/device: 0x1592
/sys/bus/pci/devices/0000:06:00.0/driver -> ../../../bus/pci/drivers/ice
/sys/bus/pci/devices/0000:06:00.0/infiniband/rocep6s0/x: 1
/sys/bus/pci/drivers/x: 0
/sys/module/ib_core/x: 1
/sys/module/mlx5_ib/x: 1
/sys/module/irdma/x: 1
";

    #[test]
    fn every_network_controller_is_seen_with_what_it_lacks() {
        let tree = Manifest::parse(MACHINE).expect("a machine");
        let seen = rdma_system(View(&tree));
        assert_eq!(seen.modules, ["ib_core", "mlx5_ib", "irdma"]);
        assert_eq!(seen.providers, ["mlx5"]);
        let [broadcom, connectx, efa, virtio, intel] = &seen.adapters[..] else {
            panic!("{:?}", seen.adapters);
        };
        assert_eq!(broadcom.pci, "0000:01:00.0");
        assert_eq!(
            (&*broadcom.id, &*broadcom.board),
            ("14e4:1750", "14e4:5208")
        );
        assert_eq!(broadcom.driver.as_deref(), Some("bnxt_en"));
        assert_eq!(broadcom.interfaces, ["eth0"]);
        let lacks = broadcom.lacks.as_deref().expect("a driver");
        assert!(
            lacks.contains("bnxt_re, which") && lacks.contains("is not loaded"),
            "{lacks}"
        );
        assert_eq!(connectx.rdma, ["mlx5_0"]);
        assert_eq!(connectx.lacks, None);
        assert_eq!(
            connectx.name.as_deref(),
            Some("NVIDIA (Mellanox) ConnectX-7")
        );
        assert!(
            efa.lacks
                .as_deref()
                .expect("a driver")
                .contains("modprobe efa")
        );
        assert_eq!(virtio.interfaces, ["ens4"]);
        assert_eq!(virtio.lacks, None, "nothing makes it an RDMA device");
        let lacks = intel.lacks.as_deref().expect("a provider");
        assert!(lacks.contains("no provider `irdma`"), "{lacks}");
    }

    #[test]
    fn a_driver_that_keeps_it_and_a_module_that_did_nothing_are_named() {
        let with = |driver: &str, module: &str| {
            let text = format!(
                "{DEVICES}/d/class: 0x020000\n{DEVICES}/d/vendor: 0x8086\n{DEVICES}/d/device: 0x1592\n{DEVICES}/d/driver -> ../../drivers/{driver}\n/sys/module/{module}/x: 1\n"
            );
            let tree = Manifest::parse(&text).expect("a machine");
            let adapters = rdma_system(View(&tree)).adapters;
            adapters[0].lacks.clone().expect("a reason")
        };
        assert!(with("vfio-pci", "x").contains("vfio-pci keeps it"));
        assert!(with("ice", "irdma").contains("has made no RDMA device"));
    }
}
