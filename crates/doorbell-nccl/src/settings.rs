//! The variables of this plug-in. Those of Doorbell itself (`doorbell info` lists them) hold too.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::Duration;

use doorbell::{Handler, Place};

use crate::{Error, Result};

/// Which link reaches ranks of other processes. Its number travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LinkChoice {
    /// Shared memory within a host, RoCE between hosts.
    #[default]
    Auto,
    /// Shared memory, or an error.
    Shm,
    /// RoCE everywhere, within a process too.
    Roce,
}

impl LinkChoice {
    /// The one of this number.
    pub(crate) fn of(number: u64) -> Option<Self> {
        [Self::Auto, Self::Shm, Self::Roce]
            .into_iter()
            .find(|choice| *choice as u64 == number)
    }
}

impl fmt::Display for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Roce => "roce",
        })
    }
}

/// What the variables say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// How long a step waits for the other ranks (`DOORBELL_NCCL_TIMEOUT`, seconds).
    pub(crate) timeout: Duration,
    /// How long a rank or an engine may stand still before that is an error (`DOORBELL_NCCL_ALIVE`, seconds; zero: for ever).
    pub(crate) alive: Duration,
    /// `DOORBELL_NCCL_LINK`: `auto`, `shm`, `roce`.
    pub(crate) link: LinkChoice,
    /// Slots of a send queue unless the application says (`DOORBELL_NCCL_DEPTH`); `None`: as many as suit so many queues.
    pub(crate) depth: Option<u32>,
    /// Where signals and counters lie (`DOORBELL_NCCL_SIGNALS`: `host`, `gpu`).
    pub(crate) signals: Place,
    /// How queues are rung (`DOORBELL_HANDLER`).
    pub(crate) handler: Handler,
    /// The address at which ranks of other hosts find this one (`DOORBELL_NCCL_ADDR`).
    pub(crate) address: IpAddr,
    /// That of RoCE packets, where it was said, unless `DOORBELL_ROCE` says more: packets find this host where its ranks are found.
    pub(crate) roce: Option<IpAddr>,
}

/// Rings that lose nothing whatever order the posters' stores arrive in. NVIDIA's posters ring by a maximum at this word.
const HANDLER: Handler = Handler::Producer;

impl Settings {
    /// Reads the environment.
    pub(crate) fn read() -> Result<Self> {
        Self::from(&variable)
    }

    /// How long the links bear a process that stands still: as long as the communicator does, and a moment more, so that the one that can say what
    /// is the matter is the first to.
    pub(crate) fn patience(&self) -> Duration {
        match self.alive.is_zero() {
            true => Duration::from_secs(86_400),
            false => self.alive + Duration::from_secs(1),
        }
    }

    /// How long memory is waited for that other processes are to let go of.
    pub(crate) fn letting_go(&self) -> Duration {
        match self.alive.is_zero() {
            true => self.timeout,
            false => self.patience(),
        }
    }

    fn from(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let get = |name| lookup(name).filter(|v| !v.is_empty());
        let bad = |name, value, remedy| Error::Variable {
            name,
            value,
            remedy,
        };
        let seconds = |name, default, least, remedy| {
            let text = get(name).unwrap_or_else(|| format!("{default}"));
            match text.parse() {
                Ok(n) if (least..=86_400).contains(&n) => Ok(Duration::from_secs(n)),
                _ => Err(bad(name, text, remedy)),
            }
        };
        let remedy = "give seconds, from 1 to 86400";
        let timeout = seconds("DOORBELL_NCCL_TIMEOUT", 120, 1, remedy)?;
        let remedy = "give seconds, from 1 to 86400, or 0 to switch it off";
        let alive = seconds("DOORBELL_NCCL_ALIVE", 10, 0, remedy)?;
        let link = match get("DOORBELL_NCCL_LINK").as_deref() {
            None | Some("auto") => LinkChoice::Auto,
            Some("shm") => LinkChoice::Shm,
            Some("roce") => LinkChoice::Roce,
            Some(other) => {
                let remedy = "give auto, shm or roce";
                return Err(bad("DOORBELL_NCCL_LINK", other.to_owned(), remedy));
            }
        };
        let depth = match get("DOORBELL_NCCL_DEPTH") {
            None => None,
            Some(text) => match text.parse::<u32>() {
                Ok(n @ 1..=32_768) if n.is_power_of_two() => Some(n),
                _ => {
                    let remedy = "give a power of two from 1 to 32768";
                    return Err(bad("DOORBELL_NCCL_DEPTH", text, remedy));
                }
            },
        };
        let signals = match get("DOORBELL_NCCL_SIGNALS").as_deref() {
            None | Some("host") => Place::Shared,
            Some("gpu") => Place::Gpu,
            Some(other) => {
                let remedy = "give host or gpu";
                return Err(bad("DOORBELL_NCCL_SIGNALS", other.to_owned(), remedy));
            }
        };
        let handler = match get("DOORBELL_HANDLER") {
            None => HANDLER,
            Some(text) => text
                .parse()
                .map_err(|_| bad("DOORBELL_HANDLER", text, "give record, only or producer"))?,
        };
        let mut roce = None;
        let address = match get("DOORBELL_NCCL_ADDR") {
            None => route()?,
            Some(text) => match text.parse() {
                Ok(ip) if is_own(ip)? => {
                    roce = Some(ip);
                    ip
                }
                _ => {
                    let remedy = "give an IP address of this host, at which other hosts find it (`ip addr` lists them)";
                    return Err(bad("DOORBELL_NCCL_ADDR", text, remedy));
                }
            },
        };
        Ok(Self {
            timeout,
            alive,
            link,
            depth,
            signals,
            handler,
            address,
            roce,
        })
    }

    /// The port of RoCE packets, if it follows from the address of ranks.
    pub(crate) fn roce_port(&self) -> Option<String> {
        Some(match self.roce? {
            IpAddr::V4(ip) => format!("udp://{ip}"),
            IpAddr::V6(ip) => format!("udp://[{ip}]"),
        })
    }
}

/// Whether a variable of this plug-in could have that value here, for whoever lists them; `None`: it looks at none of that name.
pub fn check_variable(name: &str, value: &str) -> Option<Result<()>> {
    const OWN: [&str; 6] = [
        "DOORBELL_NCCL_ADDR",
        "DOORBELL_NCCL_ALIVE",
        "DOORBELL_NCCL_DEPTH",
        "DOORBELL_NCCL_LINK",
        "DOORBELL_NCCL_SIGNALS",
        "DOORBELL_NCCL_TIMEOUT",
    ];
    if name == crate::v11::RELEASE {
        return Some(crate::v11::said(Some(value.to_owned())).map(drop));
    }
    let alone = |asked: &str| (asked == name).then(|| value.to_owned());
    OWN.contains(&name)
        .then(|| Settings::from(&alone).map(drop))
}

/// What a variable says. What is no text is no value that anybody knows, and is named as such.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
}

/// Does exactly this host answer there?
fn is_own(ip: IpAddr) -> Result<bool> {
    let somebodys = !ip.is_unspecified() && !ip.is_multicast() && ip != Ipv4Addr::BROADCAST;
    Ok(somebodys && found(UdpSocket::bind((ip, 0)))?.is_some())
}

/// The address that packets to elsewhere leave from; without a route, the loopback's. Nothing is sent.
fn route() -> Result<IpAddr> {
    let local = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    Ok(found(local)?.map_or(Ipv4Addr::LOCALHOST.into(), |a| a.ip()))
}

/// What the system says about addresses; a limit that is met says nothing about them.
fn found<T>(said: std::io::Result<T>) -> Result<Option<T>> {
    match said {
        Ok(found) => Ok(Some(found)),
        Err(source) if doorbell::limits::is_one(&source) => Err(doorbell::Error::Os {
            what: "looking for this host's address",
            source: doorbell::limits::told(source),
        }
        .into()),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_said_means_defaults_and_nonsense_is_named() {
        let plain = Settings::from(&|_| None).expect("defaults");
        assert_eq!((plain.link, plain.depth), (LinkChoice::Auto, None));
        for (name, value) in [
            ("DOORBELL_NCCL_TIMEOUT", "0"),
            ("DOORBELL_NCCL_ALIVE", "long"),
            ("DOORBELL_NCCL_LINK", "verbs"),
            ("DOORBELL_NCCL_DEPTH", "100"),
            ("DOORBELL_NCCL_SIGNALS", "disk"),
            ("DOORBELL_HANDLER", "bell"),
            ("DOORBELL_NCCL_ADDR", "here"),
            // Everybody's, and nobody's.
            ("DOORBELL_NCCL_ADDR", "0.0.0.0"),
            ("DOORBELL_NCCL_ADDR", "::"),
            ("DOORBELL_NCCL_ADDR", "224.0.0.1"),
            ("DOORBELL_NCCL_ADDR", "255.255.255.255"),
            ("DOORBELL_NCCL_ADDR", "192.0.2.77"),
        ] {
            let text = Settings::from(&|n| (n == name).then(|| value.to_owned()))
                .expect_err("nonsense")
                .to_string();
            assert!(
                text.contains(name) && text.contains(value) && text.contains("give"),
                "{text}"
            );
        }
        let said = Settings::from(&|n| {
            let value = match n {
                "DOORBELL_NCCL_TIMEOUT" => "7",
                "DOORBELL_NCCL_ALIVE" => "0",
                "DOORBELL_NCCL_LINK" => "roce",
                "DOORBELL_NCCL_SIGNALS" => "gpu",
                "DOORBELL_HANDLER" => "record",
                "DOORBELL_NCCL_ADDR" => "127.0.0.2",
                _ => return None,
            };
            Some(value.to_owned())
        })
        .expect("all of it");
        assert_eq!(said.timeout, Duration::from_secs(7));
        assert_eq!(plain.alive, Duration::from_secs(10));
        assert!(said.alive.is_zero());
        // Links bear what the communicator does, and a moment more.
        assert_eq!(plain.patience(), Duration::from_secs(11));
        assert!(said.patience() > Duration::from_secs(3600));
        assert_eq!(plain.letting_go(), Duration::from_secs(11));
        assert_eq!(said.letting_go(), said.timeout);
        assert_eq!((said.link, said.signals), (LinkChoice::Roce, Place::Gpu));
        assert_eq!(said.handler, Handler::Record);
        assert_eq!(said.address, Ipv4Addr::new(127, 0, 0, 2));
        // Packets too.
        assert_eq!(plain.roce_port(), None);
        assert_eq!(said.roce_port().as_deref(), Some("udp://127.0.0.2"));
    }
}
