//! Ports on the loopback, and queue pairs connected through them.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of several test files, each of which uses a part of it"
)]

use std::net::SocketAddr;

use doorbell_hca::roce::transport::Config;
use doorbell_hca::roce::{PortConfig, RocePort, RoceTarget};
use doorbell_hca::{Access, Destination, HcaConfig};
use doorbell_wire::roce::Psn;

use crate::common::{MockQp, PATIENCE, Rig};

/// A port of a rig's engine; `options` follow its address, as in `?loss=0.1`.
pub fn port(rig: &Rig, options: &str) -> RocePort {
    let config: PortConfig = format!("udp://127.0.0.1{options}").parse().expect("valid");
    rig.hca.open_roce(0, &config).expect("a port")
}

/// An engine with its limits as users have them, and a port.
pub fn rig_with_port() -> (Rig, RocePort) {
    let rig = Rig::with(HcaConfig::caller_driven());
    let port = port(&rig, "");
    (rig, port)
}

/// Connects to another queue pair, which is reached at `port`; packets are numbered from their sender's QP number on.
pub fn connect(from: &MockQp, to: &MockQp, port: &RocePort, access: Access, config: Config) {
    let (ours, theirs) = (from.hca_qp().qpn().get(), to.hca_qp().qpn().get());
    let connection = Config {
        dest_qpn: theirs,
        sq_psn: Psn::new(ours),
        rq_psn: Psn::new(theirs),
        ..config
    };
    attach(from, port.local, port.segments, access, connection);
}

/// Connects to whoever is at an address, in packets of 1024 bytes unless the configuration says otherwise.
pub fn attach(qp: &MockQp, peer: SocketAddr, segments: bool, access: Access, config: Config) {
    let target = RoceTarget {
        peer,
        segments,
        // Ours are all on this host.
        light: segments,
        connection: config,
        access,
    };
    qp.hca_qp()
        .connect(Destination::Roce(Box::new(target)), PATIENCE)
        .expect("connect");
}
