//! Network adapters: RDMA devices from `/sys/class/infiniband`, the rest from `/sys/class/net`.

use super::bus::{hex, numa};
use super::ids;
use crate::report::Nic;
use crate::tree::View;

const RDMA: &str = "/sys/class/infiniband";
const NET: &str = "/sys/class/net";

pub(super) fn nics(view: View<'_>) -> Vec<Nic> {
    let mut nics: Vec<Nic> = view
        .list(RDMA, |_| true)
        .iter()
        .map(|name| rdma(view, name))
        .collect();
    for name in view.list(NET, |n| n != "lo") {
        let device = format!("{NET}/{name}/device");
        // A software device stands on an adapter that is still worth showing.
        let taken = nics
            .iter()
            .any(|n| n.pci.is_some() && n.interfaces.contains(&name));
        // Without a device behind it, it is a bridge, a tunnel, a veth.
        if taken || !view.exists(&device) {
            continue;
        }
        let (vendor, model) = model(view, &device);
        nics.push(Nic {
            driver: view.leaf(&format!("{device}/driver")),
            pci: address(view, &device),
            numa_node: numa(view, &device),
            state: view
                .text(&format!("{NET}/{name}/operstate"))
                .map(|s| s.to_uppercase()),
            rate: view
                .number(&format!("{NET}/{name}/speed"))
                .map(|s| format!("{} Gb/s", s as f64 / 1000.0)),
            link_layer: Some("Ethernet".into()),
            interfaces: vec![name.clone()],
            vendor,
            model,
            name,
            ..Nic::default()
        });
    }
    nics
}

fn rdma(view: View<'_>, name: &str) -> Nic {
    let at = format!("{RDMA}/{name}");
    let device = format!("{at}/device");
    let port = format!("{at}/ports/1");
    let hardware = view.exists(&device);
    let parent = view.text(&format!("{at}/parent"));
    let (driver, vendor, model) = if hardware {
        let (vendor, model) = model(view, &device);
        (view.leaf(&format!("{device}/driver")), vendor, model)
    } else {
        // rxe and siw have no bus device; their names are the administrator's, their modules tell.
        let driver = match name {
            n if n.starts_with("siw") => "siw",
            _ if view.exists("/sys/module/rdma_rxe") => "rdma_rxe",
            _ if view.exists("/sys/module/siw") => "siw",
            _ => "software",
        };
        let model = if driver == "siw" {
            "soft iWARP"
        } else {
            "soft RoCE"
        };
        (
            Some(driver.to_owned()),
            "Linux".to_owned(),
            model.to_owned(),
        )
    };
    let mut interfaces = view.list(&format!("{device}/net"), |_| true);
    interfaces.extend(parent);
    let uverbs = view
        .list("/sys/class/infiniband_verbs", |n| n.starts_with("uverbs"))
        .into_iter()
        .find(|u| {
            view.text(&format!("/sys/class/infiniband_verbs/{u}/ibdev"))
                .as_deref()
                == Some(name)
        });
    Nic {
        name: name.to_owned(),
        rdma: true,
        vendor,
        model,
        driver,
        pci: address(view, &device),
        numa_node: numa(view, &device),
        firmware: view.text(&format!("{at}/fw_ver")).filter(|f| !f.is_empty()),
        link_layer: view.text(&format!("{port}/link_layer")),
        // "4: ACTIVE"
        state: view.text(&format!("{port}/state")).map(|s| {
            s.split_once(": ")
                .map_or(s.clone(), |(_, word)| word.to_owned())
        }),
        rate: view.text(&format!("{port}/rate")),
        interfaces,
        verbs_node: uverbs.map(|u| view.exists(&format!("/dev/infiniband/{u}"))),
    }
}

fn model(view: View<'_>, device: &str) -> (String, String) {
    let ids = (
        hex(view, &format!("{device}/vendor")),
        hex(view, &format!("{device}/device")),
    );
    let (Some(vendor), Some(id)) = ids else {
        return ("?".into(), "no PCI device".into());
    };
    (
        ids::vendor(vendor).map_or_else(|| format!("vendor {vendor:04x}"), str::to_owned),
        ids::nic(vendor, id).map_or_else(|| format!("device {id:04x}"), str::to_owned),
    )
}

/// The PCI address is the name of the folder; other buses (virtio) give their parent's.
fn address(view: View<'_>, device: &str) -> Option<String> {
    let real = view.real(device)?;
    real.rsplit('/')
        .find(|part| part.matches(':').count() == 2)
        .map(str::to_owned)
}
