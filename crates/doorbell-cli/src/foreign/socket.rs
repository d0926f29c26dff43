//! A TCP connection on which every read and write has a deadline, and a listener likewise.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::units::span;

/// Pause between attempts.
const RETRY: Duration = Duration::from_millis(5);

/// A connection to a foreign program.
pub(crate) struct Socket {
    stream: TcpStream,
    peer: String,
    timeout: Duration,
}

impl Socket {
    /// Connects; waits for the other side to listen. IPv4 addresses first, since the programs of this port know no others.
    pub(crate) fn dial(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let until = Instant::now() + timeout;
        loop {
            match attempt(host, port, until) {
                Ok(stream) => return Self::new(stream, timeout),
                Err(e) if Instant::now() >= until => {
                    return Err(e).with_context(|| {
                        format!(
                            "cannot reach {host}:{port} within {}: is the other side running?",
                            span(timeout)
                        )
                    });
                }
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    fn new(stream: TcpStream, timeout: Duration) -> Result<Self> {
        let peer = stream.peer_addr().context("the connection is gone")?;
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        stream.set_nodelay(true).context("the connection is gone")?;
        Ok(Self {
            stream,
            peer: peer.to_string(),
            timeout,
        })
    }

    /// The address of this host by which the other side is reached.
    pub(crate) fn local_ip(&self) -> Result<IpAddr> {
        Ok(self.stream.local_addr()?.ip().to_canonical())
    }

    /// The other side, for humans.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Exactly `N` bytes, within the time-out.
    pub(crate) fn read<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.read_while(what, &mut || Ok(()))
    }

    /// As [`Socket::read`], calling `busy` meanwhile, whose error ends it.
    pub(crate) fn read_while<const N: usize>(
        &mut self,
        what: &str,
        busy: &mut dyn FnMut() -> Result<()>,
    ) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let mut at = 0;
        let mut until = Instant::now() + self.timeout;
        self.stream
            .set_read_timeout(Some(Duration::from_millis(10)))?;
        while at < N {
            match self.stream.read(&mut bytes[at..]) {
                Ok(0) => bail!(
                    "{} closed the connection instead of sending {what}: what it says there is why (give both sides the same -s, -n, -m and --uc)",
                    self.peer
                ),
                Ok(n) => {
                    if at == 0 {
                        until = Instant::now() + self.timeout;
                    }
                    at += n;
                }
                Err(e) if is_waiting(&e) => {
                    busy()?;
                    if Instant::now() >= until {
                        bail!(
                            "{} sent {at} of the {N} bytes of {what} within {}; look whether it is stopped",
                            self.peer,
                            span(self.timeout)
                        );
                    }
                }
                Err(e) => {
                    return Err(e).with_context(|| format!("reading {what} from {}", self.peer));
                }
            }
        }
        Ok(bytes)
    }

    /// All of them, within the time-out.
    pub(crate) fn write(&mut self, bytes: &[u8], what: &str) -> Result<()> {
        self.stream.set_write_timeout(Some(self.timeout))?;
        self.stream
            .write_all(bytes)
            .with_context(|| format!("sending {what} to {}", self.peer))
    }

    /// Waits longer, or shorter, from now on.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }
}

fn attempt(host: &str, port: u16, until: Instant) -> io::Result<TcpStream> {
    let left = until.saturating_duration_since(Instant::now());
    let mut addresses = doorbell::connect::look_up(&format!("{host}:{port}"), left)?;
    addresses.sort_by_key(std::net::SocketAddr::is_ipv6);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        let left = until.saturating_duration_since(Instant::now());
        match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn is_waiting(e: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(e.kind(), K::WouldBlock | K::TimedOut | K::Interrupted)
}

/// Waits for a foreign program to connect.
pub(crate) struct Listener(TcpListener);

impl Listener {
    /// Listens on `port` of every address.
    pub(crate) fn bind(port: u16) -> Result<Self> {
        let listener = TcpListener::bind(("::", port))
            .or_else(|_| TcpListener::bind(("0.0.0.0", port)))
            .with_context(|| {
                format!("cannot listen on TCP port {port}: end whoever listens there, or choose another with -p")
            })?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener))
    }

    /// The port.
    pub(crate) fn port(&self) -> Result<u16> {
        Ok(self.0.local_addr()?.port())
    }

    /// The next connection; `None` once `stop` says so.
    pub(crate) fn accept(
        &self,
        timeout: Duration,
        wait: Option<Duration>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Socket>> {
        let begun = Instant::now();
        while !stop() {
            if let Some(wait) = wait.filter(|w| begun.elapsed() > *w) {
                bail!(
                    "nobody came to TCP port {} within {}",
                    self.port()?,
                    span(wait)
                );
            }
            match self.0.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Socket::new(stream, timeout).map(Some);
                }
                Err(e) if is_waiting(&e) => std::thread::sleep(RETRY),
                Err(e) => return Err(e).context("waiting for the other side to connect"),
            }
        }
        Ok(None)
    }
}
