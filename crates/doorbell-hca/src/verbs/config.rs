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
    /// Bytes of the path MTU at most; the least of this, the port's and what the peer says is used.
    pub mtu: u16,
    /// Service level of what is sent, 0 to 15: InfiniBand's, and with RoCE the priority of VLAN frames.
    pub service_level: u8,
    /// Traffic class of what is sent: with RoCE v2 the byte of DSCP and ECN.
    pub traffic_class: u8,
    /// Which entry of the port's table of partition keys.
    pub pkey_index: u16,
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
            mtu: 4096,
            service_level: 0,
            traffic_class: 0,
            pkey_index: 0,
            silence: Duration::from_secs(10),
        }
    }

    /// Takes an option; what is wrong with it otherwise.
    fn option(&mut self, name: &str, value: &str) -> Result<(), String> {
        /// A number up to `most`.
        fn number(what: &str, value: &str, most: u16) -> Result<u16, String> {
            let read = value.parse().ok().filter(|n| *n <= most);
            let value = value.escape_debug();
            read.ok_or_else(|| format!("`{value}` is no {what}, which are 0 to {most}"))
        }
        let word = |values: &str| {
            let value = value.escape_debug();
            format!("`{value}` is no value of `{name}`: give {values}")
        };
        match (name, value) {
            ("gid", _) => self.gid = Some(number("GID index", value, 255)? as u8),
            ("sl", _) => self.service_level = number("service level", value, 15)? as u8,
            ("tc", _) => self.traffic_class = number("traffic class", value, 255)? as u8,
            ("pkey", _) => self.pkey_index = number("index of a P_Key", value, u16::MAX)?,
            ("ip", _) => {
                let ip = value.parse();
                let wrong = |_| format!("`{}` is no address", value.escape_debug());
                self.ip = Some(ip.map_err(wrong)?);
            }
            ("order", "inline") => self.relaxed = true,
            ("order", _) => return Err(word("inline")),
            ("post", "list") => self.calls = false,
            ("post", "calls") => self.calls = true,
            ("post", _) => return Err(word("calls or list")),
            _ => {
                return Err(format!(
                    "`{}` is no option: there are gid, sl, tc, pkey, ip, order and post",
                    name.escape_debug()
                ));
            }
        }
        Ok(())
    }
}

impl FromStr for VerbsConfig {
    type Err = String;

    /// `DEVICE[:PORT][?gid=N][&sl=N][&tc=N][&pkey=N][&ip=ADDRESS][&post=list][&order=inline]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.strip_prefix("verbs:").unwrap_or(text);
        let (name, options) = match text.split_once('?') {
            Some((name, options)) => (name, Some(options)),
            None => (text, None),
        };
        let (device, port) = name.split_once(':').unwrap_or((name, "1"));
        let wrong =
            |what: String| format!("{what}: give DEVICE[:PORT][?gid=N], as rxe0 or mlx5_0:1?gid=3");
        if device.is_empty() {
            return Err(wrong("no device is named".to_owned()));
        }
        if device.contains(|c: char| c.is_control() || c.is_whitespace() || c == '/') {
            let device = device.escape_debug();
            return Err(wrong(format!("`{device}` is no name of a device")));
        }
        let mut config = Self::new(device);
        config.port = match port.parse() {
            Ok(port @ 1..) => port,
            _ => return Err(wrong(format!("`{}` is no port", port.escape_debug()))),
        };
        let mut given: Vec<&str> = Vec::new();
        for option in options.into_iter().flat_map(|o| o.split('&')) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            if option.is_empty() {
                return Err(wrong("an option is missing behind `?` or `&`".to_owned()));
            }
            if given.contains(&name) {
                return Err(wrong(format!("`{name}` is given twice")));
            }
            config.option(name, value).map_err(wrong)?;
            given.push(name);
        }
        Ok(config)
    }
}

/// As it is given, with all that is not as usual.
impl fmt::Display for VerbsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "verbs:{}:{}", self.device, self.port)?;
        let number =
            |name, value: u16, usual: u16| (value != usual).then(|| format!("{name}={value}"));
        let options = [
            self.gid.map(|gid| format!("gid={gid}")),
            number("sl", self.service_level.into(), 0),
            number("tc", self.traffic_class.into(), 0),
            number("pkey", self.pkey_index, 0),
            self.relaxed.then(|| "order=inline".to_owned()),
            (!self.calls).then(|| "post=list".to_owned()),
        ];
        for (i, option) in options.into_iter().flatten().enumerate() {
            write!(f, "{}{option}", if i == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_with_port_and_options() {
        let text = "verbs:mlx5_0:2?gid=3&sl=5&tc=106&pkey=1&order=inline&post=list";
        let config: VerbsConfig = text.parse().expect("valid");
        assert_eq!((config.device.as_str(), config.port), ("mlx5_0", 2));
        assert_eq!((config.gid, config.calls), (Some(3), false));
        assert_eq!((config.service_level, config.traffic_class), (5, 106));
        assert_eq!((config.pkey_index, config.relaxed), (1, true));
        assert_eq!(config.to_string(), text);
        let config: VerbsConfig = "rxe0".parse().expect("valid");
        assert_eq!(config, VerbsConfig::new("rxe0"));
        assert_eq!(config.to_string(), "verbs:rxe0:1");
        for bad in [
            "",
            "verbs:",
            "rxe0:0",
            "rxe0:x",
            "rxe0?gid=300",
            "rxe0?what=1",
            "rxe0?",
            "rxe0?gid=1&",
            "rxe0?&gid=1",
            "rxe0?gid=2&gid=1",
            "rx\x1b[31me0",
            "rxe0?gid=\x1b[31m1",
            "../rxe0",
        ] {
            let text = bad.parse::<VerbsConfig>().expect_err(bad);
            assert!(text.contains("DEVICE[:PORT]"), "{text}");
            assert!(!text.contains('\x1b'), "{text:?}");
        }
    }

    #[test]
    fn a_wrong_value_is_told_which_there_are() {
        for (bad, words) in [
            (
                "rxe0?post=bogus",
                "`bogus` is no value of `post`: give calls or list",
            ),
            ("rxe0?order=x", "give inline"),
            ("rxe0?gid=2&gid=1", "`gid` is given twice"),
            ("rxe0?gid=2&", "an option is missing"),
            ("rxe0?sl=16", "`16` is no service level, which are 0 to 15"),
            ("rxe0?tc=256", "which are 0 to 255"),
            ("rxe0?pkey=-1", "0 to 65535"),
            (
                "rxe0?what=1",
                "there are gid, sl, tc, pkey, ip, order and post",
            ),
        ] {
            let text = bad.parse::<VerbsConfig>().expect_err(bad);
            assert!(text.contains(words), "{text}");
        }
    }
}
