//! RDMA devices of this host, as libibverbs lists them: what there is for [`LinkKind::Verbs`](crate::LinkKind::Verbs). Nothing is changed by looking.

use std::path::PathBuf;

use doorbell_hca::HcaError;
use doorbell_hca::verbs::library::{Context, GidKind, Protocol, Verbs, VerbsError, abi};

use crate::Result;

/// What there is of RDMA on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rdma {
    /// The file of libibverbs.
    pub library: Option<PathBuf>,
    /// The release of rdma-core that it is of, if its file says so: `44.0`.
    pub release: Option<String>,
    /// Every port of every device that can be opened.
    pub ports: Vec<RdmaPort>,
    /// Devices that cannot be opened, and why.
    pub refused: Vec<(String, String)>,
}

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
    /// Why it cannot be used now, and what to do; `None`: it can.
    pub unusable: Option<String>,
    /// `Ethernet`, `InfiniBand`, `EFA` or `iWARP`.
    pub link_layer: &'static str,
    /// Bytes of the path MTU that goes now.
    pub mtu: u16,
    /// Bytes of the longest message; of an EFA, of the longest remote read or write.
    pub max_message: u32,
    /// Atomics of 8 bytes work over it: the device's, or over an EFA the engines'.
    pub atomics: bool,
    /// Its addresses: index, GID, kind.
    pub gids: Vec<(u8, String, &'static str)>,
    /// The index of the one that is used where nobody chooses.
    pub usual_gid: Option<u8>,
}

impl RdmaPort {
    /// The address at an index, or the usual one: index, GID, kind.
    pub fn gid(&self, index: Option<u8>) -> Option<&(u8, String, &'static str)> {
        let index = index.or(self.usual_gid)?;
        self.gids.iter().find(|(i, ..)| *i == index)
    }
}

/// Every port of every device that can be opened, and the devices that cannot, with the reason.
///
/// # Errors
/// libibverbs is not there, or lists nothing.
pub fn rdma() -> Result<Rdma> {
    let library = Verbs::load().map_err(HcaError::from)?;
    let (mut ports, mut refused) = (Vec::new(), Vec::new());
    for device in library.devices().map_err(HcaError::from)? {
        match Context::open(&library, &device.name).and_then(|c| ports_of(&c, &device.node)) {
            Ok(found) => ports.extend(found),
            Err(e) => refused.push((device.name, e.to_string())),
        }
    }
    Ok(Rdma {
        library: library.file(),
        release: library.release(),
        ports,
        refused,
    })
}

fn ports_of(context: &Context, node: &str) -> Result<Vec<RdmaPort>, VerbsError> {
    let attributes = context.attributes()?;
    // Without its library an EFA device is listed all the same; opening it says what is missing.
    let efa = context.efa().ok().flatten();
    let port = |port| {
        let attr = context.port(port)?;
        let usable = context.connectable().and(context.active_port(port));
        let gids = context.gids(port)?.into_iter().map(|g| {
            let kind = match g.kind {
                GidKind::Infiniband => "InfiniBand",
                GidKind::RoceV1 => "RoCE v1",
                GidKind::RoceV2 => "RoCE v2",
                GidKind::Unknown => "unknown",
            };
            let address = std::net::Ipv6Addr::from(g.gid).to_canonical().to_string();
            (g.index, address, kind)
        });
        Ok(RdmaPort {
            device: context.name().to_owned(),
            port,
            node: node.to_owned(),
            firmware: attributes.firmware.clone(),
            vendor: (attributes.vendor, attributes.part),
            state: attr.state_word(),
            unusable: usable.err().map(|e| e.to_string()),
            link_layer: match (&efa, context.protocol(), attr.link_layer) {
                (Some(_), ..) => "EFA",
                (_, Protocol::Iwarp, _) => "iWARP",
                (_, _, abi::link_layer::ETHERNET) => "Ethernet",
                _ => "InfiniBand",
            },
            mtu: attr.mtu,
            max_message: efa.map_or(attr.max_message, |e| e.max_rdma),
            atomics: attributes.atomics || efa.is_some(),
            gids: gids.collect(),
            usual_gid: context.choose_gid(port, None, None).ok().map(|g| g.index),
        })
    };
    (1..=attributes.ports).map(port).collect()
}
