//! What `--connect`, `--listen` and `--port` take, read before anything is opened.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

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

/// The device, the port and the GID's index, if one is chosen, that `text` names: what [`Config::verbs`](crate::Config::verbs) takes. Nothing is
/// opened.
///
/// # Errors
/// [`Error::Setting`](crate::Error::Setting) with what to give instead.
pub fn check_verbs_port(text: &str) -> crate::Result<(String, u8, Option<u8>)> {
    crate::provider::verbs_port(text).map(|config| (config.device, config.port, config.gid))
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
    if text.contains(char::is_control) {
        return Err(ConnectError::Address {
            value: text.escape_debug().to_string(),
            remedy: "give HOST, HOST:PORT or [IPV6]:PORT".to_owned(),
        });
    }
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
    if let Some((v6, _)) = text.split_once('%')
        && is_v6(v6)
    {
        return Err(wrong(format!(
            "an IPv6 address with a zone needs brackets: give [{text}]; RoCE itself needs an address without one"
        )));
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

/// The addresses of `HOST:PORT` or `[IPV6]:PORT`, asked of the system for no longer than `left`: a resolver that does not answer takes its own time.
///
/// # Errors
/// What the system says of the name, or that it said nothing in time.
pub fn look_up(address: &str, left: Duration) -> io::Result<Vec<SocketAddr>> {
    let (host, port) = address
        .rsplit_once(':')
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let port: u16 = port
        .parse()
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "it has no port"))?;
    // The system takes a zone, and no brackets.
    let host = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .to_owned();
    if let Ok(ip) = host.parse() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let (send, found) = std::sync::mpsc::channel();
    let name = host.clone();
    std::thread::Builder::new()
        .name("doorbell-lookup".to_owned())
        .spawn(move || {
            let all = (name.as_str(), port).to_socket_addrs();
            // Nobody may be waiting any more.
            let _ = send.send(all.map(Iterator::collect));
        })
        .map_err(doorbell_hca::limits::thread)?;
    match found.recv_timeout(left) {
        Ok(found) => found,
        Err(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the system did not look up {host:?} in time"),
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
    fn addresses_are_found_without_asking_and_names_in_time() {
        let long = Duration::from_secs(30);
        for (text, wanted) in [("192.0.2.1:7", "192.0.2.1:7"), ("[::1]:7", "[::1]:7")] {
            assert_eq!(look_up(text, long).unwrap(), [wanted.parse().unwrap()]);
        }
        assert!(!look_up("localhost:7", long).unwrap().is_empty());
        let error = look_up("nosuch.invalid:7", Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(look_up("nosuch.invalid", long).is_err());
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
            ("fe80::1%eth0", "give [fe80::1%eth0]"),
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
