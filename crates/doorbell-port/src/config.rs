//! Which port to open, as text or as values.
//!
//! `udp://ADDR[:PORT]`, then options after `?`, with `&` between them: `trains=off`, `buffer=8M`, `faults=SPEC`, `pcap=FILE`, `trace`.
//! Example: `udp://127.0.0.1:4791?faults=loss=1%,seed=7&pcap=/tmp/a.pcapng`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use crate::Port;
use crate::error::{PortError, Result};
use crate::udp::{UdpOptions, UdpPort};
use crate::wrap::{FaultSpec, Faulty, Pcapng, Tracer};

/// The kind of a port, with what only it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortKind {
    /// A UDP socket on an address; UDP port 0 takes any.
    Udp(SocketAddr),
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
        Self {
            kind: PortKind::Udp(addr),
            trains: true,
            buffer: UdpOptions::default().buffer,
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
        let mut port: Box<dyn Port> = match self.kind {
            PortKind::Udp(addr) => Box::new(UdpPort::open(
                addr,
                UdpOptions {
                    send_trains: self.trains,
                    receive_trains: self.trains,
                    buffer: self.buffer,
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

impl FromStr for PortConfig {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |what: String| PortError::BadConfig {
            text: text.to_owned(),
            what,
        };
        let (place, options) = text.split_once('?').unwrap_or((text, ""));
        let Some(addr) = place.strip_prefix("udp://") else {
            return Err(bad("it is none of udp://ADDR[:PORT]".to_owned()));
        };
        let addr = if addr.is_empty() {
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
        } else {
            let bare = addr.strip_prefix('[').and_then(|a| a.strip_suffix(']'));
            addr.parse()
                .or_else(|_| bare.unwrap_or(addr).parse::<IpAddr>().map(|ip| (ip, 0).into()))
                .map_err(|_| {
                    bad(format!(
                        "{addr:?} is no address: write 192.0.2.1, 192.0.2.1:4791, [fd00::1]:4791, or nothing for all of IPv4 (names are not looked up)"
                    ))
                })?
        };
        let mut config = Self::udp(addr);
        for option in options.split('&').filter(|o| !o.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let wrong = |want: &str| bad(format!("option {name}={value:?} is not {want}"));
            match name {
                "trains" => config.trains = switch(value).ok_or_else(|| wrong("on or off"))?,
                "trace" => config.trace = switch(value).ok_or_else(|| wrong("on or off"))?,
                "buffer" => {
                    config.buffer = bytes(value).ok_or_else(|| wrong("a size such as 4M"))?;
                }
                "faults" => config.faults = Some(value.parse()?),
                "pcap" if !value.is_empty() => config.pcap = Some(value.into()),
                "pcap" => return Err(wrong("the name of a file")),
                _ => {
                    return Err(bad(format!(
                        "there is no option {name:?}: trains, buffer, faults, pcap and trace exist"
                    )));
                }
            }
        }
        Ok(config)
    }
}

impl fmt::Display for PortConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PortKind::Udp(addr) = self.kind;
        write!(f, "udp://{addr}")?;
        let mut separator = '?';
        let mut option = |f: &mut fmt::Formatter<'_>, text: String| {
            write!(f, "{separator}{text}")?;
            separator = '&';
            Ok(())
        };
        if !self.trains {
            option(f, "trains=off".to_owned())?;
        }
        if self.buffer != UdpOptions::default().buffer {
            option(f, format!("buffer={}", self.buffer))?;
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
        let text = "udp://127.0.0.1:7?trains=off&buffer=8M&faults=loss=1%,seed=7&pcap=/tmp/x&trace";
        let config: PortConfig = text.parse().unwrap();
        assert!(!config.trains && config.trace && config.buffer == 8 << 20);
        assert_eq!(config.to_string().parse::<PortConfig>().unwrap(), config);
        for wrong in [
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
