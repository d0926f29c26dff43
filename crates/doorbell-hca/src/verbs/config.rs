//! Which RDMA device is meant, and how it is to be used: what `verbs:DEVICE[:PORT][?OPTIONS]` says.

use core::fmt;
use core::str::FromStr;
use std::net::IpAddr;
use std::time::Duration;

/// Which device and port, and how to use them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsConfig {
    /// The device's name.
    pub device: String,
    /// Its port, from 1.
    pub port: u8,
    /// Index of the GID; `None`: the best there is (RoCE v2 with an IPv4 address).
    pub gid: Option<u8>,
    /// The address whose GID is preferred.
    pub ip: Option<IpAddr>,
    /// Use `ibv_wr_*` where the device has them.
    pub calls: bool,
    /// Over SRD: only inline WRITEs wait for those before them, not all that are as short ([`Access::ORDERED`](crate::Access::ORDERED) means nothing then).
    pub relaxed: bool,
    /// A queue pair whose completions stay away for so long is looked at.
    pub silence: Duration,
}

impl VerbsConfig {
    /// Port 1 of a device.
    pub fn new(device: &str) -> Self {
        Self {
            device: device.to_owned(),
            port: 1,
            gid: None,
            ip: None,
            calls: true,
            relaxed: false,
            silence: Duration::from_secs(10),
        }
    }
}

impl FromStr for VerbsConfig {
    type Err = String;

    /// `DEVICE[:PORT][?gid=N][&ip=ADDRESS][&post=list][&order=inline]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.strip_prefix("verbs:").unwrap_or(text);
        let (name, options) = text.split_once('?').unwrap_or((text, ""));
        let (device, port) = name.split_once(':').unwrap_or((name, "1"));
        let wrong =
            |what: String| format!("{what}: give DEVICE[:PORT][?gid=N], as rxe0 or mlx5_0:1?gid=3");
        if device.is_empty() {
            return Err(wrong("no device is named".to_owned()));
        }
        let mut config = Self::new(device);
        config.port = match port.parse() {
            Ok(port @ 1..) => port,
            _ => return Err(wrong(format!("`{port}` is no port"))),
        };
        for option in options.split('&').filter(|o| !o.is_empty()) {
            match option.split_once('=') {
                Some(("gid", index)) => {
                    let index = index
                        .parse()
                        .map_err(|_| wrong(format!("`{index}` is no GID index")))?;
                    config.gid = Some(index);
                }
                Some(("ip", ip)) => {
                    let ip = ip
                        .parse()
                        .map_err(|_| wrong(format!("`{ip}` is no address")))?;
                    config.ip = Some(ip);
                }
                Some(("order", "inline")) => config.relaxed = true,
                Some(("post", "list")) => config.calls = false,
                Some(("post", "calls")) => config.calls = true,
                _ => return Err(wrong(format!("`{option}` is no option"))),
            }
        }
        Ok(config)
    }
}

impl fmt::Display for VerbsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "verbs:{}:{}", self.device, self.port)?;
        if let Some(gid) = self.gid {
            write!(f, "?gid={gid}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_with_port_and_gid() {
        let config: VerbsConfig = "verbs:mlx5_0:2?gid=3&post=list".parse().expect("valid");
        assert_eq!((config.device.as_str(), config.port), ("mlx5_0", 2));
        assert_eq!((config.gid, config.calls), (Some(3), false));
        assert_eq!(config.to_string(), "verbs:mlx5_0:2?gid=3");
        let config: VerbsConfig = "rxe0".parse().expect("valid");
        assert_eq!(config, VerbsConfig::new("rxe0"));
        for bad in [
            "",
            "verbs:",
            "rxe0:0",
            "rxe0:x",
            "rxe0?gid=300",
            "rxe0?what=1",
        ] {
            let text = bad.parse::<VerbsConfig>().expect_err(bad);
            assert!(text.contains("DEVICE[:PORT]"), "{text}");
        }
    }
}
