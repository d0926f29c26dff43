//! What `--connect`, `--listen` and `--port` take, read before anything is opened.

use std::net::Ipv6Addr;

use super::Connected;
use super::error::ConnectError;

/// TCP port of the exchange unless another is named: RoCE's own number, so that a firewall has one to open.
pub const DEFAULT_PORT: u16 = 4791;

/// Whether `text` is `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`. Names are not looked up.
///
/// # Errors
/// [`ConnectError::Address`], which says what to write.
pub fn check_address(text: &str) -> Connected<()> {
    with_port(text).map(drop)
}

/// Whether `text` names a RoCE port that could be opened here: what [`Config::roce`](crate::Config::roce) takes. Nothing is opened.
///
/// # Errors
/// [`Error::Setting`](crate::Error::Setting) with what to give instead.
pub fn check_roce_port(text: &str) -> crate::Result<()> {
    crate::provider::roce_port(text).map(drop)
}

/// The device and port that `text` names: what [`Config::verbs`](crate::Config::verbs) takes. Nothing is opened.
///
/// # Errors
/// [`Error::Setting`](crate::Error::Setting) with what to give instead.
pub fn check_verbs_port(text: &str) -> crate::Result<(String, u8)> {
    crate::provider::verbs_port(text).map(|config| (config.device, config.port))
}

/// Whether `text` says which faults to inject: what [`RoceWrap::fault`](crate::RoceWrap::fault) takes.
///
/// # Errors
/// [`Error::Setting`](crate::Error::Setting) with what to give instead.
pub fn check_roce_faults(text: &str) -> crate::Result<()> {
    crate::provider::roce_faults(text).map(drop)
}

/// The same with the port filled in.
pub(super) fn with_port(text: &str) -> Connected<String> {
    let wrong = |remedy: String| ConnectError::Address {
        value: text.to_owned(),
        remedy,
    };
    let usual = || wrong("give HOST, HOST:PORT or [IPV6]:PORT".to_owned());
    let is_v6 = |t: &str| t.parse::<Ipv6Addr>().is_ok();
    let port = |digits: &str| {
        digits
            .parse::<u16>()
            .map_err(|_| wrong(format!("{digits:?} is no TCP port: give 1 to 65535")))
    };
    if is_v6(text) {
        // What follows the last colon is a group of the address, and may have been meant as a port.
        if let Some((host, last)) = text.rsplit_once(':')
            && is_v6(host)
            && last.parse::<u16>().is_ok()
        {
            return Err(wrong(format!(
                "an IPv6 address needs brackets where a port may follow: give [{host}]:{last} or [{text}]"
            )));
        }
        return Ok(format!("[{text}]:{DEFAULT_PORT}"));
    }
    if let Some(inner) = text.strip_prefix('[') {
        let (v6, rest) = inner.split_once(']').ok_or_else(usual)?;
        // A zone, as in fe80::1%eth0, is the system's to read.
        if !is_v6(v6.split('%').next().unwrap_or(v6)) {
            return Err(wrong(format!("{v6:?} is no IPv6 address")));
        }
        return match rest.strip_prefix(':') {
            None if rest.is_empty() => Ok(format!("[{v6}]:{DEFAULT_PORT}")),
            None => Err(usual()),
            Some(digits) => port(digits).map(|_| text.to_owned()),
        };
    }
    if text.chars().any(|c| c.is_whitespace() || c == '/') {
        return Err(usual());
    }
    match text.split_once(':') {
        None if text.is_empty() => Err(usual()),
        None => Ok(format!("{text}:{DEFAULT_PORT}")),
        Some(("", _)) => Err(usual()),
        Some((_, digits)) if !digits.contains(':') => port(digits).map(|_| text.to_owned()),
        Some(_) => Err(wrong(
            "an IPv6 address with a port needs brackets: give [IPV6]:PORT".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports() {
        for (text, full) in [
            ("host", "host:4791"),
            ("host:1", "host:1"),
            ("192.0.2.1", "192.0.2.1:4791"),
            ("::1", "[::1]:4791"),
            ("fd00::", "[fd00::]:4791"),
            ("[::1]", "[::1]:4791"),
            ("[::1]:7", "[::1]:7"),
            ("[fe80::1%eth0]:7", "[fe80::1%eth0]:7"),
            ("1:2:3:4:5:6:7:8", "[1:2:3:4:5:6:7:8]:4791"),
        ] {
            assert_eq!(with_port(text).unwrap(), full);
        }
    }

    #[test]
    fn what_is_none_is_refused_with_what_to_write() {
        for (text, part) in [
            ("", "HOST:PORT"),
            (":4791", "HOST:PORT"),
            ("host:port", "1 to 65535"),
            ("h:70000", "1 to 65535"),
            ("::1:4791", "[::1]:4791"),
            ("fe80::1:2", "[fe80::1]:2 or [fe80::1:2]"),
            ("a:b:c", "brackets"),
            ("[::1", "HOST:PORT"),
            ("[::1]x", "HOST:PORT"),
            ("[::1]:", "1 to 65535"),
            ("[host]:1", "no IPv6 address"),
            ("http://host", "HOST:PORT"),
            ("two words", "HOST:PORT"),
        ] {
            let error = with_port(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
