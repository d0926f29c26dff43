//! RDMA devices of this host, as libibverbs lists them: what there is for [`LinkKind::Verbs`](crate::LinkKind::Verbs). Nothing is changed by looking.

use doorbell_hca::HcaError;
use doorbell_hca::verbs::library::{Context, GidKind, Verbs, abi};

use crate::Result;

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaPort {
    /// The device: `mlx5_0`, `rxe0`, …
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// Its node under `/dev/infiniband`.
    pub node: String,
    /// Firmware, in the vendor's words.
    pub firmware: String,
    /// PCI vendor and the vendor's number of the part.
    pub vendor: (u32, u32),
    /// `active`, `down`, …
    pub state: &'static str,
    /// It may be used now.
    pub active: bool,
    /// `Ethernet`, `InfiniBand` or `EFA`.
    pub link_layer: &'static str,
    /// Bytes of the path MTU that goes now.
    pub mtu: u16,
    /// Bytes of the longest message; of an EFA, of the longest remote read or write.
    pub max_message: u32,
    /// Atomics of 8 bytes work over it: the device's, or over an EFA the engines'.
    pub atomics: bool,
    /// The address that would be used: index, GID, kind.
    pub gid: Option<(u8, String, &'static str)>,
}

/// Every port of every device that can be opened, and the devices that cannot, with the reason.
///
/// # Errors
/// libibverbs is not there, or lists nothing.
#[allow(
    clippy::type_complexity,
    reason = "two lists, and the function's documentation says of what"
)]
pub fn rdma_ports() -> Result<(Vec<RdmaPort>, Vec<(String, String)>)> {
    let library = Verbs::load().map_err(HcaError::from)?;
    let (mut ports, mut refused) = (Vec::new(), Vec::new());
    for device in library.devices().map_err(HcaError::from)? {
        let found = Context::open(&library, &device.name).and_then(|context| {
            let attributes = context.attributes()?;
            // Without its library an EFA device is listed all the same; opening it says what is missing.
            let efa = context.efa().ok().flatten();
            for port in 1..=attributes.ports {
                let attr = context.port(port)?;
                let gid = context.choose_gid(port, None, None).ok();
                ports.push(RdmaPort {
                    device: device.name.clone(),
                    port,
                    node: device.node.clone(),
                    firmware: attributes.firmware.clone(),
                    vendor: (attributes.vendor, attributes.part),
                    state: attr.state_word(),
                    active: attr.state == abi::port_state::ACTIVE,
                    link_layer: match (&efa, attr.is_ethernet()) {
                        (Some(_), _) => "EFA",
                        (None, true) => "Ethernet",
                        (None, false) => "InfiniBand",
                    },
                    mtu: attr.mtu,
                    max_message: efa.map_or(attr.max_message, |e| e.max_rdma),
                    atomics: attributes.atomics || efa.is_some(),
                    gid: gid.map(|g| {
                        let kind = match g.kind {
                            GidKind::Infiniband => "InfiniBand",
                            GidKind::RoceV1 => "RoCE v1",
                            GidKind::RoceV2 => "RoCE v2",
                            GidKind::Unknown => "unknown",
                        };
                        (g.index, std::net::Ipv6Addr::from(g.gid).to_string(), kind)
                    }),
                });
            }
            Ok(())
        });
        if let Err(e) = found {
            refused.push((device.name, e.to_string()));
        }
    }
    Ok((ports, refused))
}
