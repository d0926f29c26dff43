//! RoCE of the software HCA: which port a setting means, what it offers to peers, and what a connection is made of.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::{Mutex, PoisonError};

use doorbell_hca::roce::transport::{Config, Mtu};
use doorbell_hca::roce::{
    FaultSpec, PortConfig, PortError, PortKind, RocePort, RoceReceiver, RoceTarget as Target,
};
use doorbell_hca::{Access, Hca, HcaError};
use doorbell_wire::roce::{Psn, Transport};

use crate::config::Settings;
use crate::connect::{LONG_MTU, Offer, RoceTarget};
use crate::{Error, Result};

/// READs and atomics that a connection has open, and answers, at a time.
const READS: u8 = 16;
/// Packets under way at most. The receive buffers of two Doorbell ports hold several such windows; an rxe takes 128.
const WINDOW: u32 = 256;
/// Bytes under way at most: as many as such packets of path MTU 4096 have.
const WINDOW_BYTES: u32 = WINDOW << 12;
/// Unacknowledged packets that a peer of another kind is sent.
const FOREIGN_WINDOW: u32 = 64;

/// How ports are opened, and those that are open.
pub(super) struct RoceSettings {
    settings: Settings,
    open: Mutex<Vec<(usize, RocePort)>>,
}

impl RoceSettings {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            settings: settings.clone(),
            open: Mutex::default(),
        }
    }

    fn config(&self) -> Result<PortConfig> {
        let wrap = &self.settings.roce_wrap;
        let mut config = port_config(&self.settings.roce)?;
        if let Some(pcap) = &wrap.pcap {
            config.pcap = Some(pcap.clone());
        }
        if let Some(fault) = &wrap.fault {
            config.faults = Some(faults(fault)?);
        }
        config.trace |= wrap.trace;
        Ok(config)
    }

    /// Opens what must be open before the first queue pair is made: a UDP port that is shared with other processes, which says what
    /// numbers queue pairs may have.
    pub(super) fn prepare(&self, hca: &Hca) -> Result<()> {
        // What cannot be read is reported to whoever wants to use it.
        if self.config().is_ok_and(|c| c.share) {
            for core in 0..hca.health().len() {
                self.offer(hca, core)?;
            }
        }
        Ok(())
    }

    /// What a core's port can do; opens it.
    pub(super) fn offer(&self, hca: &Hca, core: usize) -> Result<Offer> {
        let settings = &self.settings;
        let port = hca.open_roce(core, &self.config()?).map_err(|e| {
            match &e {
                HcaError::BadConfig { what } => settings.variable_fails("roce", what),
                _ => None,
            }
            .unwrap_or_else(|| e.into())
        })?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if !open.iter().any(|(at, _)| *at == core) {
            open.push((core, port.clone()));
        }
        Ok(Offer {
            address: port.local,
            path_mtu: settings.roce_mtu.unwrap_or(u16::MAX).min(port.path_mtu),
            max_rd_atomic: READS,
            max_dest_rd_atomic: READS,
            ack_timeout: settings.roce_timeout,
            retry_count: settings.roce_retry,
            rnr_retry: 7,
            min_rnr_timer: 12,
            segments: port.segments,
            light: port.light,
            long: port.long && settings.roce_mtu.is_none(),
        })
    }

    pub(super) fn describe(&self) -> Vec<String> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter()
            .map(|(_, port)| port.description.to_string())
            .collect()
    }

    pub(super) fn counters(&self, hca: &Hca) -> Vec<(&'static str, u64)> {
        let cores: Vec<usize> = {
            let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            open.iter().map(|(core, _)| *core).collect()
        };
        let mut sum: Vec<(&'static str, u64)> = Vec::new();
        for core in cores {
            // A core that is gone counts nothing any more.
            let Ok(Some(counters)) = hca.roce_counters(core) else {
                continue;
            };
            let strangers = [
                ("unknown_qp", counters.strangers.unknown_qp),
                ("wrong_source", counters.strangers.wrong_source),
                ("memory_behind", counters.strangers.memory_behind),
                ("icrc_errors", counters.strangers.damaged),
                ("malformed", counters.strangers.malformed),
            ];
            for (name, count) in counters.port.iter().chain(strangers) {
                match sum.iter_mut().find(|(n, _)| *n == name) {
                    Some((_, all)) => *all += count,
                    None => sum.push((name, count)),
                }
            }
        }
        sum
    }
}

pub(crate) fn faults(text: &str) -> Result<FaultSpec> {
    text.parse().map_err(|e| Error::Setting {
        name: "net-fault",
        value: text.to_owned(),
        origin: crate::Source::Argument,
        remedy: inner_words(&e),
    })
}

/// What is wrong with a text that the error would repeat.
fn inner_words(error: &PortError) -> String {
    match error {
        PortError::BadConfig { what, .. } => what.clone(),
        other => other.to_string(),
    }
}

pub(crate) fn port_config(port: &str) -> Result<PortConfig> {
    let wrong = |remedy: String| Error::Setting {
        name: "roce",
        value: port.to_owned(),
        origin: crate::Source::Argument,
        remedy,
    };
    // `udp` alone is the address by which others reach this host.
    let text = match port.split_once('?') {
        Some(("udp", options)) => format!("{}?{options}", own_address()),
        None if port == "udp" => own_address(),
        _ => port.to_owned(),
    };
    let config: PortConfig = text.parse().map_err(|e| wrong(inner_words(&e)))?;
    if let PortKind::Udp(address) = &config.kind
        && let Some(what) = no_host(address.ip())
    {
        return Err(wrong(format!(
            "{} is {what}, and peers send to the address that they are told: give one of this host (`ip addr` lists them), or udp for the one of the default route",
            address.ip()
        )));
    }
    Ok(config)
}

/// What `ip` is if it is not the address of one host.
fn no_host(ip: IpAddr) -> Option<&'static str> {
    if ip.is_unspecified() {
        return Some("every address");
    }
    if ip.is_multicast() {
        return Some("a multicast address");
    }
    if ip == IpAddr::V4(Ipv4Addr::BROADCAST) {
        return Some("a broadcast address");
    }
    // An interface's broadcast address is only known to the kernel, which lets sockets have it but not send to it.
    let probe = match ip {
        IpAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?,
        IpAddr::V6(_) => return None,
    };
    match probe.connect((ip, 9)) {
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Some("a broadcast address"),
        _ => None,
    }
}

/// A port at the address by which packets leave this host for others; nothing is sent to find that out.
fn own_address() -> String {
    let found = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    match found.map(|a| a.ip()) {
        Ok(IpAddr::V4(ip)) if !ip.is_unspecified() => format!("udp://{ip}"),
        _ => "udp://127.0.0.1".to_owned(),
    }
}

/// A connection as the engine makes it. `psn` is the first number that this side sends.
pub(super) fn target(target: &RoceTarget, psn: u32, access: Access) -> Result<Target> {
    let agreed = &target.agreed;
    let path_mtu = match mtu(agreed.path_mtu)? {
        // Nobody waits for what an Unreliable Connection has sent, and few such packets fill a buffer.
        Mtu::Long if target.unreliable => Mtu::M4096,
        mtu => mtu,
    };
    let (local, remote) = (&agreed.local, &agreed.remote);
    Ok(Target {
        peer: remote.address,
        segments: agreed.segments,
        light: agreed.light,
        connection: Config {
            transport: match target.unreliable {
                true => Transport::Uc,
                false => Transport::Rc,
            },
            dest_qpn: target.qpn,
            sq_psn: Psn::new(psn),
            rq_psn: Psn::new(target.psn),
            path_mtu,
            max_rd_atomic: agreed.max_rd_atomic,
            max_dest_rd_atomic: local.max_dest_rd_atomic,
            timeout: local.ack_timeout,
            retry_cnt: local.retry_count,
            rnr_retry: local.rnr_retry,
            min_rnr_timer: local.min_rnr_timer,
            window: if remote.segments {
                WINDOW
            } else {
                FOREIGN_WINDOW
            },
            window_bytes: WINDOW_BYTES,
            ..Config::default()
        },
        access,
    })
}

/// A receiver of what anybody sends.
pub(super) fn receiver(path_mtu: u16, access: Access) -> Result<RoceReceiver> {
    let path_mtu = mtu(path_mtu)?;
    Ok(RoceReceiver { path_mtu, access })
}

fn mtu(path_mtu: u16) -> Result<Mtu> {
    if path_mtu == LONG_MTU {
        return Ok(Mtu::Long);
    }
    Mtu::fitting(path_mtu.into()).ok_or_else(|| Error::Argument {
        object: "path MTU of a RoCE connection",
        value: path_mtu.to_string(),
        remedy: "use 256, 512, 1024, 2048 or 4096",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_could_not_send_to_is_refused_at_once() {
        for (port, part) in [
            ("udp://0.0.0.0", "every address"),
            ("udp://", "every address"),
            ("udp://[::]:4791", "every address"),
            ("udp://224.0.0.1", "multicast"),
            ("udp://[ff02::1]", "multicast"),
            ("udp://255.255.255.255:1", "broadcast"),
            ("udp://127.255.255.255", "broadcast"),
        ] {
            let error = port_config(port).unwrap_err().to_string();
            assert!(
                error.contains(part) && error.contains(port) && error.contains("`ip addr`"),
                "{error}"
            );
        }
        for port in [
            "udp",
            "udp?trains=off",
            "udp://127.0.0.1",
            "udp://[::1]:4791",
            "raw:eth0",
        ] {
            port_config(port).unwrap();
        }
        let error = port_config("raw:").unwrap_err().to_string();
        assert!(error.contains("raw:eth0"), "{error}");
    }

    #[test]
    fn faults_are_refused_as_what_they_are() {
        faults("loss=1%,seed=7").unwrap();
        for (text, part) in [
            ("", "loss=1%"),
            ("los=1%", "one of loss"),
            ("loss=2", "1% or"),
        ] {
            let error = faults(text).unwrap_err().to_string();
            assert!(
                error.contains("net-fault") && error.contains(part),
                "{error}"
            );
            assert!(!error.contains("roce"), "{error}");
        }
    }
}
