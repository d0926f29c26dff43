//! Which port to open, as text or as values.
//!
//! | text | port |
//! |---|---|
//! | `udp://ADDR[:PORT]` | a UDP socket; no port: any; option `share` |
//! | `raw:IFNAME` | frames on an interface (CAP_NET_RAW); options `ip`, `port` |
//! | `dgram:LOCAL,REMOTE` | the network of a QEMU guest (`-netdev dgram`); each end `ADDR:PORT` or a path; options `ip` (needed), `port`, `mac`, `mtu` |
//!
//! Options follow after `?`, with `&` between them; for all ports: `trains=off`, `buffer=8M`, `faults=SPEC`, `pcap=FILE`, `trace`.
//! Example: `udp://127.0.0.1:4791?faults=loss=1%,seed=7&pcap=/tmp/a.pcapng`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::{PortError, Result};
use crate::eth::{DgramOptions, EthPort, Place, RawOptions};
use crate::udp::{UdpOptions, UdpPort};
use crate::wrap::{FaultSpec, Faulty, Pcapng, Tracer};
use crate::{DEFAULT_PORT, Port};

/// The kind of a port, with what only it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortKind {
    /// A UDP socket on an address; UDP port 0 takes any.
    Udp(SocketAddr),
    /// Raw frames on an interface of this host.
    Raw(RawOptions),
    /// The network of a QEMU guest.
    Dgram(DgramOptions),
}

/// Which port to open.
#[derive(Clone, Debug, PartialEq)]
pub struct PortConfig {
    /// The kind.
    pub kind: PortKind,
    /// Trains (UDP segmentation offload) may be sent and received, where the kernel can.
    pub trains: bool,
    /// Bytes of socket buffer to ask for, in each direction.
    pub buffer: usize,
    /// Other processes may have the same UDP port (UDP sockets only).
    pub share: bool,
    /// Faults to inject.
    pub faults: Option<FaultSpec>,
    /// Write every packet to this file.
    pub pcap: Option<PathBuf>,
    /// Print every packet to standard error.
    pub trace: bool,
}

impl PortConfig {
    /// A UDP socket on `addr`, everything else as usual.
    pub fn udp(addr: SocketAddr) -> Self {
        Self::new(PortKind::Udp(addr))
    }

    /// A port of some kind, everything else as usual.
    pub fn new(kind: PortKind) -> Self {
        Self {
            kind,
            trains: true,
            buffer: UdpOptions::default().buffer,
            share: false,
            faults: None,
            pcap: None,
            trace: false,
        }
    }

    /// Opens the port, with the wrappers that were asked for: captures and traces show what is on the wire, injected faults included.
    ///
    /// # Errors
    /// Those of the kind, and a capture file that cannot be made.
    pub fn open(&self) -> Result<Box<dyn Port>> {
        let mut port: Box<dyn Port> = match &self.kind {
            PortKind::Raw(options) => Box::new(EthPort::raw(options)?),
            PortKind::Dgram(options) => Box::new(EthPort::dgram(options)?),
            PortKind::Udp(addr) => Box::new(UdpPort::open(
                *addr,
                UdpOptions {
                    send_trains: self.trains,
                    receive_trains: self.trains,
                    buffer: self.buffer,
                    share: self.share,
                },
            )?),
        };
        if let Some(file) = &self.pcap {
            port = Box::new(Pcapng::create(port, file)?);
        }
        if self.trace {
            port = Box::new(Tracer::new(port, std::io::stderr()));
        }
        if let Some(faults) = &self.faults {
            port = Box::new(Faulty::new(port, faults.clone()));
        }
        Ok(port)
    }
}

/// Reads `4096`, `64K`, `8M`.
fn bytes(text: &str) -> Option<usize> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<usize>().ok()?.checked_shl(shift)
}

/// `on` or nothing, or `off`.
fn switch(text: &str) -> Option<bool> {
    match text {
        "" | "on" | "yes" | "1" => Some(true),
        "off" | "no" | "0" => Some(false),
        _ => None,
    }
}

/// Reads `ADDR`, `ADDR:PORT`, `[ADDR]`, or nothing.
fn socket_addr(text: &str) -> Option<SocketAddr> {
    if text.is_empty() {
        return Some((Ipv4Addr::UNSPECIFIED, 0).into());
    }
    let bare = text.strip_prefix('[').and_then(|a| a.strip_suffix(']'));
    text.parse()
        .or_else(|_| {
            bare.unwrap_or(text)
                .parse::<IpAddr>()
                .map(|ip| (ip, 0).into())
        })
        .ok()
}

/// Reads `52:54:00:00:00:02`.
fn mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    // A group address is nobody's.
    (parts.next().is_none() && mac[0] & 1 == 0).then_some(mac)
}

impl PortKind {
    /// Sets an option that only this kind has. `None`: it has no such option; `false`: not with this value.
    fn option(&mut self, name: &str, value: &str) -> Option<bool> {
        fn set<T>(place: &mut T, value: Option<T>) -> bool {
            let good = value.is_some();
            if let Some(value) = value {
                *place = value;
            }
            good
        }
        Some(match (self, name) {
            (Self::Raw(o), "ip") => set(&mut o.ip, value.parse().ok().map(Some)),
            (Self::Raw(o), "port") => set(&mut o.udp_port, value.parse().ok()),
            (Self::Dgram(o), "ip") => set(&mut o.ip, value.parse().ok()),
            (Self::Dgram(o), "port") => set(&mut o.udp_port, value.parse().ok()),
            (Self::Dgram(o), "mac") => set(&mut o.mac, mac(value)),
            (Self::Dgram(o), "mtu") => set(
                &mut o.mtu,
                value.parse().ok().filter(|m| (328..=65_535).contains(m)),
            ),
            _ => return None,
        })
    }
}

impl FromStr for PortConfig {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |what: String| PortError::BadConfig {
            text: text.to_owned(),
            what,
        };
        let (place, options) = text.split_once('?').unwrap_or((text, ""));
        let mut config = if let Some(addr) = place.strip_prefix("udp://") {
            Self::udp(socket_addr(addr).ok_or_else(|| {
                bad(format!(
                    "{addr:?} is no address: write 192.0.2.1, 192.0.2.1:4791, [fd00::1]:4791, or nothing for all of IPv4 (names are not looked up)"
                ))
            })?)
        } else if let Some(interface) = place.strip_prefix("raw:") {
            if interface.is_empty() {
                return Err(bad(
                    "after raw: comes an interface, as in raw:eth0 (`ip link` lists them)"
                        .to_owned(),
                ));
            }
            Self::new(PortKind::Raw(RawOptions {
                interface: interface.to_owned(),
                ip: None,
                udp_port: DEFAULT_PORT,
            }))
        } else if let Some((local, remote)) =
            place.strip_prefix("dgram:").and_then(|p| p.split_once(','))
        {
            let end = |text: &str| {
                if text.contains('/') {
                    return Ok(Place::Unix(text.into()));
                }
                text.parse().map(Place::Udp).map_err(|_| {
                    bad(format!(
                        "{text:?} is neither ADDR:PORT nor the path of a socket"
                    ))
                })
            };
            Self::new(PortKind::Dgram(DgramOptions {
                local: end(local)?,
                remote: end(remote)?,
                ip: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                udp_port: DEFAULT_PORT,
                mac: [2, 0xdb, 0, 0, 0, 1],
                mtu: 1500,
            }))
        } else {
            return Err(bad(
                "it is none of udp://ADDR[:PORT], raw:IFNAME, dgram:LOCAL,REMOTE".to_owned(),
            ));
        };
        for option in options.split('&').filter(|o| !o.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let wrong = |want: &str| bad(format!("option {name}={value:?} is not {want}"));
            match name {
                "trains" => config.trains = switch(value).ok_or_else(|| wrong("on or off"))?,
                "share" => config.share = switch(value).ok_or_else(|| wrong("on or off"))?,
                "trace" => config.trace = switch(value).ok_or_else(|| wrong("on or off"))?,
                "buffer" => {
                    config.buffer = bytes(value).ok_or_else(|| wrong("a size such as 4M"))?;
                }
                "faults" => config.faults = Some(value.parse()?),
                "pcap" if !value.is_empty() => config.pcap = Some(value.into()),
                "pcap" => return Err(wrong("the name of a file")),
                _ => match config.kind.option(name, value) {
                    Some(true) => {}
                    Some(false) => return Err(wrong("a value for it")),
                    None => {
                        return Err(bad(format!(
                            "there is no option {name:?} for this port: trains, buffer, faults, pcap and trace exist for all, ip, port, mac and mtu for ports of frames"
                        )));
                    }
                },
            }
        }
        if let PortKind::Dgram(options) = &config.kind
            && options.ip.is_unspecified()
        {
            return Err(bad(
                "say which address it has in the guest's network: ip=ADDR".to_owned(),
            ));
        }
        Ok(config)
    }
}

impl fmt::Display for PortConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = '?';
        let mut option = |f: &mut fmt::Formatter<'_>, text: String| {
            write!(f, "{separator}{text}")?;
            separator = '&';
            Ok(())
        };
        match &self.kind {
            PortKind::Udp(addr) => write!(f, "udp://{addr}")?,
            PortKind::Raw(o) => {
                write!(f, "raw:{}", o.interface)?;
                if let Some(ip) = o.ip {
                    option(f, format!("ip={ip}"))?;
                }
                if o.udp_port != DEFAULT_PORT {
                    option(f, format!("port={}", o.udp_port))?;
                }
            }
            PortKind::Dgram(o) => {
                write!(f, "dgram:{},{}", o.local, o.remote)?;
                let mac = o.mac.map(|b| format!("{b:02x}")).join(":");
                option(
                    f,
                    format!("ip={}&port={}&mac={mac}&mtu={}", o.ip, o.udp_port, o.mtu),
                )?;
            }
        }
        if !self.trains {
            option(f, "trains=off".to_owned())?;
        }
        if self.buffer != UdpOptions::default().buffer {
            option(f, format!("buffer={}", self.buffer))?;
        }
        if self.share {
            option(f, "share".to_owned())?;
        }
        if let Some(faults) = &self.faults {
            option(f, format!("faults={faults}"))?;
        }
        if let Some(pcap) = &self.pcap {
            option(f, format!("pcap={}", pcap.display()))?;
        }
        if self.trace {
            option(f, "trace".to_owned())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_values() {
        for (text, addr) in [
            ("udp://", "0.0.0.0:0"),
            ("udp://127.0.0.1", "127.0.0.1:0"),
            ("udp://127.0.0.1:4791", "127.0.0.1:4791"),
            ("udp://[::1]", "[::1]:0"),
            ("udp://::1", "[::1]:0"),
            ("udp://[fd00::1]:4791", "[fd00::1]:4791"),
        ] {
            let config: PortConfig = text.parse().unwrap();
            assert_eq!(config, PortConfig::udp(addr.parse().unwrap()), "{text}");
            assert_eq!(config.to_string().parse::<PortConfig>().unwrap(), config);
        }
        let text =
            "udp://127.0.0.1:7?trains=off&share&buffer=8M&faults=loss=1%,seed=7&pcap=/tmp/x&trace";
        let config: PortConfig = text.parse().unwrap();
        assert!(!config.trains && config.trace && config.buffer == 8 << 20);
        assert_eq!(config.to_string().parse::<PortConfig>().unwrap(), config);
        for text in [
            "raw:eth0",
            "raw:eth0?ip=10.0.0.9&port=7",
            "dgram:127.0.0.1:47000,127.0.0.1:47001?ip=192.168.77.1&mac=52:54:00:00:00:01&mtu=4200",
            "dgram:/tmp/a,/tmp/b?ip=fd00::1",
        ] {
            let config: PortConfig = text.parse().unwrap();
            assert_eq!(config.to_string().parse::<PortConfig>().unwrap(), config);
        }
        for wrong in [
            "dgram:/tmp/a",
            "dgram:/tmp/a,/tmp/b",
            "dgram:a,b?ip=10.0.0.1",
            "dgram:/tmp/a,/tmp/b?ip=10.0.0.1&mac=1:2",
            "dgram:/tmp/a,/tmp/b?ip=10.0.0.1&mac=ff:ff:ff:ff:ff:ff",
            "dgram:/tmp/a,/tmp/b?ip=10.0.0.1&mtu=100",
            "raw:eth0?mac=1",
            "raw:",
            "raw:?ip=10.0.0.1",
            "udp://?faults=",
            "udp://127.0.0.1?ip=10.0.0.1",
            "tcp://x",
            "udp://host.example",
            "udp://127.0.0.1:99999",
            "udp://?trains=maybe",
            "udp://?buffer=lots",
            "udp://?faults=loss",
            "udp://?pcap",
            "udp://?mtu=9",
        ] {
            let error = wrong.parse::<PortConfig>().unwrap_err().to_string();
            assert!(error.contains(':'), "{error}");
        }
    }
}
