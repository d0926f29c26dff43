//! What there is to test, and what stands in the way of all of it: found before anything is tried, so that the first thing said is the cause.

use anyhow::Result;
use doorbell::{Rdma, RdmaPort};

use super::DeviceResult;
use super::system::{Hardware, Library};

/// The library, and every port that was asked for, or that there is; those that cannot be tested say why.
pub(super) fn devices(wanted: &[String]) -> Result<(Library, Vec<DeviceResult>)> {
    let (library, found) = match doorbell::rdma() {
        Ok(rdma) => (Library::of(&rdma), rdma),
        Err(e) => {
            let none = Rdma {
                library: None,
                release: None,
                ports: Vec::new(),
                refused: Hardware::names()
                    .into_iter()
                    .map(|name| (name, "libibverbs lists no devices".to_owned()))
                    .collect(),
            };
            (Library::missing(&crate::words(&e.into())), none)
        }
    };
    if wanted.is_empty() {
        let ports = found.ports.iter().map(|port| {
            let name = format!("{}:{}", port.device, port.port);
            of(name, port, None)
        });
        let refused = found
            .refused
            .iter()
            .map(|(name, why)| closed(name, name, why));
        return Ok((library, ports.chain(refused).collect()));
    }
    let named = wanted.iter().map(|name| {
        let (device, number, gid) = doorbell::connect::check_verbs_port(name)?;
        let port = found
            .ports
            .iter()
            .find(|p| p.device == device && p.port == number);
        let refused = found.refused.iter().find(|(refused, _)| *refused == device);
        Ok(match (port, refused) {
            (Some(port), _) => of(name.clone(), port, gid),
            (None, Some((_, why))) => closed(name, &device, why),
            (None, None) => {
                let all: Vec<_> = found
                    .ports
                    .iter()
                    .map(|p| format!("{}:{}", p.device, p.port))
                    .collect();
                let there = match all.as_slice() {
                    [] => "none".to_owned(),
                    all => all.join(", "),
                };
                closed(
                    name,
                    &device,
                    &format!("there is no such device or port: there is {there}"),
                )
            }
        })
    });
    Ok((library, named.collect::<Result<_>>()?))
}

/// A port that may be tested.
fn of(name: String, port: &RdmaPort, gid: Option<u8>) -> DeviceResult {
    let used = port.gid(gid);
    DeviceResult {
        port: name,
        skipped: port.unusable.clone(),
        firmware: port.firmware.clone(),
        vendor: format!("{:#06x}:{}", port.vendor.0, port.vendor.1),
        hardware: Hardware::read(&port.device, port.port),
        link_layer: port.link_layer,
        state: port.state,
        mtu: port.mtu,
        max_message: port.max_message,
        atomics: port.atomics,
        gid: used.map(|(index, gid, kind)| format!("{gid} (index {index}, {kind})")),
        ..DeviceResult::default()
    }
}

/// A device of which no more is known than what the kernel's files say.
fn closed(name: &str, device: &str, why: &str) -> DeviceResult {
    let hardware = Hardware::read(device, 1);
    DeviceResult {
        port: name.to_owned(),
        skipped: Some(why.to_owned()),
        firmware: hardware.firmware().unwrap_or_default(),
        hardware,
        ..DeviceResult::default()
    }
}

/// Why nothing can be tried, if that is so.
pub(super) fn nothing(library: &Library, devices: &[DeviceResult]) -> Option<String> {
    if let Some(why) = library.why() {
        return Some(why.to_owned());
    }
    if devices.is_empty() {
        return Some(
            "there is no RDMA device: `lspci` names the NIC, `rdma link` its RDMA devices; load the NIC's RDMA driver, and install its provider (Debian: ibverbs-providers)"
                .to_owned(),
        );
    }
    let reasons: Vec<_> = devices.iter().map(|d| d.skipped.as_deref()).collect();
    let all: Option<Vec<&str>> = reasons.into_iter().collect();
    // Each is said beside its device.
    all.map(|all| match all.as_slice() {
        [one] => (*one).to_owned(),
        _ => "none of the devices can be tested, for the reasons beside each".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped(why: Option<&str>) -> DeviceResult {
        DeviceResult {
            skipped: why.map(str::to_owned),
            ..DeviceResult::default()
        }
    }

    #[test]
    fn nothing_is_tried_where_nothing_can_be() {
        let library = Library::of(&Rdma {
            library: None,
            release: Some("44.0".to_owned()),
            ports: Vec::new(),
            refused: Vec::new(),
        });
        assert!(nothing(&library, &[]).unwrap().contains("no RDMA device"));
        let down = skipped(Some("its port is down"));
        assert_eq!(nothing(&library, &[down]).unwrap(), "its port is down");
        let two = [skipped(Some("down")), skipped(Some("iWARP"))];
        assert!(nothing(&library, &two).unwrap().contains("beside each"));
        let one = [skipped(None), skipped(Some("iWARP"))];
        assert_eq!(nothing(&library, &one), None);
        let missing = Library::missing("install rdma-core");
        assert_eq!(nothing(&missing, &[]).unwrap(), "install rdma-core");
    }
}
