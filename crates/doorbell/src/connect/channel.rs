//! Dialling, listening, and the connection that comes of it.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::error::{ConnectError, Refusal, RefusalKind};
use super::frame::{Framed, Kind, MAX_GREETING, MAX_MESSAGE};
use super::greeting::{Agreed, Greeting, Introduction};
use crate::bootstrap::frame::Stream;
use crate::endpoint::{Endpoint, pack_endpoints, unpack_endpoints};
use crate::{Error, Result};

/// TCP port of the exchange unless another is named: RoCE's own number, so that a firewall has one to open.
pub const DEFAULT_PORT: u16 = 4791;
/// Pause between attempts to connect or to accept.
const RETRY: Duration = Duration::from_millis(5);
/// How long a refusal may take to be sent.
const PARTING: Duration = Duration::from_millis(500);
/// A peer whose host vanished is noticed after this long: probes begin after a third of it.
const KEEPALIVE: Duration = Duration::from_secs(15);

type Connected<T> = std::result::Result<T, ConnectError>;

/// `HOST`, `HOST:PORT`, `[V6]` or `[V6]:PORT` with the port filled in.
fn with_port(text: &str) -> Connected<String> {
    let wrong = || ConnectError::Address {
        value: text.to_owned(),
        remedy: "give HOST, HOST:PORT or [IPV6]:PORT".to_owned(),
    };
    let is_v6 = |t: &str| t.parse::<std::net::Ipv6Addr>().is_ok();
    if is_v6(text) {
        return Ok(format!("[{text}]:{DEFAULT_PORT}"));
    }
    if let Some(inner) = text.strip_prefix('[') {
        let (v6, port) = inner.split_once(']').ok_or_else(wrong)?;
        if v6.is_empty() || !(port.is_empty() || port.starts_with(':')) {
            return Err(wrong());
        }
        return match port.strip_prefix(':').map(str::parse::<u16>) {
            None => Ok(format!("[{v6}]:{DEFAULT_PORT}")),
            Some(Ok(_)) => Ok(text.to_owned()),
            Some(Err(_)) => Err(wrong()),
        };
    }
    match text.split_once(':') {
        None if text.is_empty() => Err(wrong()),
        None => Ok(format!("{text}:{DEFAULT_PORT}")),
        Some((_, port)) if port.parse::<u16>().is_ok() => Ok(text.to_owned()),
        Some(_) => Err(wrong()),
    }
}

/// A connection before anything was said.
pub struct Line {
    framed: Framed,
    ends: Option<(SocketAddr, SocketAddr)>,
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("ends", &self.ends).finish()
    }
}

impl Line {
    /// Connects to `HOST[:PORT]`; waits for somebody to listen there.
    pub fn dial(address: &str, timeout: Duration) -> Connected<Self> {
        let full = with_port(address)?;
        let deadline = doorbell_hca::deadline(timeout);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match attempt(&full, left) {
                Ok(stream) => return Self::new(stream),
                // A server that is about to start refuses at first; a name or a network that is not there may come too.
                Err(_) if left > RETRY => std::thread::sleep(RETRY),
                Err(source) => {
                    return Err(ConnectError::Unreachable {
                        address: full,
                        after: timeout,
                        source,
                    });
                }
            }
        }
    }

    fn new(stream: TcpStream) -> Connected<Self> {
        let ends = stream
            .local_addr()
            .and_then(|local| Ok((local, stream.peer_addr()?)))
            .and_then(|ends| {
                prepare(&stream)?;
                Ok(ends)
            })
            .map_err(|e| ConnectError::Lost {
                peer: "a connection".to_owned(),
                step: "be there",
                reason: e.to_string(),
            })?;
        Ok(Self {
            framed: Framed {
                stream: Stream::Tcp(stream),
                peer: plain(ends.1).to_string(),
            },
            ends: Some((plain(ends.0), plain(ends.1))),
        })
    }

    /// A stream that a bootstrap has made already.
    pub(crate) fn of_stream(stream: Stream, peer: String) -> Self {
        let ends = match &stream {
            Stream::Tcp(s) => s.local_addr().ok().zip(s.peer_addr().ok()),
            Stream::Unix(_) => None,
        };
        if let Stream::Tcp(s) = &stream {
            // Without probes a host that vanished is noticed later, nothing else.
            let _ = prepare(s);
        }
        Self {
            framed: Framed { stream, peer },
            ends: ends.map(|(a, b)| (plain(a), plain(b))),
        }
    }

    /// The address of this host by which the other side is reached: what its RoCE port should be bound to.
    pub fn local_ip(&self) -> Option<IpAddr> {
        self.ends.map(|e| e.0.ip())
    }

    /// The other side's address, as errors name it.
    pub fn peer(&self) -> &str {
        &self.framed.peer
    }

    /// As the side that dialled: says who this is, and hears who the other side is.
    pub fn call(mut self, greeting: &Greeting, timeout: Duration) -> Connected<Channel> {
        let deadline = doorbell_hca::deadline(timeout);
        let body = greeting.encode();
        // One that refuses at once closes its end, and what it said is still to be read.
        let sent = self
            .framed
            .send(Kind::Hello, &body, "take a greeting", deadline);
        let heard = self.greeted(Kind::Welcome, "answer a greeting", deadline);
        let other = match (heard, sent) {
            (Ok(other), Ok(())) => other,
            (Err(refused @ ConnectError::Refused { .. }), _) => return Err(refused),
            (_, Err(e)) | (Err(e), _) => return Err(e),
        };
        self.join(greeting, other)
    }

    /// As the side that listened: hears who the other side is, and says who this is.
    pub fn answer(self, greeting: &Greeting, timeout: Duration) -> Connected<Channel> {
        let deadline = doorbell_hca::deadline(timeout);
        let caller = self.hear(timeout)?;
        let left = deadline.saturating_duration_since(Instant::now());
        caller.welcome(greeting, left)
    }

    /// As the side that listened: hears who the other side is, before anything is set up for it.
    pub fn hear(mut self, timeout: Duration) -> Connected<Caller> {
        let deadline = doorbell_hca::deadline(timeout);
        let other = self.greeted(Kind::Hello, "say who it is", deadline)?;
        Ok(Caller { line: self, other })
    }

    /// Tells the other side why not, and hangs up.
    pub fn refuse(mut self, refusal: &Refusal) {
        self.framed.refuse(refusal, Instant::now() + PARTING);
        // What it has sent meanwhile is read, since closing over unread bytes would take the refusal away from it.
        let mut scrap = [0; MAX_GREETING];
        let until = Instant::now() + PARTING;
        self.framed.stream.drain(&mut scrap, until);
    }

    fn greeted(
        &mut self,
        kind: Kind,
        step: &'static str,
        deadline: Instant,
    ) -> Connected<Introduction> {
        let heard = self.framed.receive(step, MAX_GREETING, deadline);
        let other = match heard {
            Ok((got, body)) if got == kind => Introduction::decode(&body).map_err(|found| {
                self.framed.protocol(
                    format!("a greeting with {found}"),
                    "a greeting of this version".to_owned(),
                )
            }),
            Ok((got, _)) => Err(self
                .framed
                .protocol(format!("{got:?}"), format!("{kind:?}"))),
            Err(e) => Err(e),
        };
        match &other {
            Err(e @ ConnectError::Version { .. }) => {
                self.tell(RefusalKind::Version, e);
            }
            Err(e @ ConnectError::Protocol { .. }) => self.tell(RefusalKind::Protocol, e),
            _ => {}
        }
        other
    }

    /// The other side prints this, so it has to be said from its point of view.
    fn tell(&mut self, kind: RefusalKind, error: &ConnectError) {
        let text = match error {
            ConnectError::Version {
                theirs, release, ..
            } => format!(
                "it speaks version {} of the exchange (release {release}) and got version {theirs}; run the same release on both hosts",
                super::VERSION
            ),
            ConnectError::Protocol {
                found, expected, ..
            } => format!("it got {found} and expected {expected}"),
            other => other.to_string(),
        };
        self.framed
            .refuse(&Refusal::new(kind, text), Instant::now() + PARTING);
    }

    fn join(mut self, greeting: &Greeting, other: Introduction) -> Connected<Channel> {
        match greeting.check(&other.greeting) {
            Ok(agreed) => Ok(Channel {
                framed: self.framed,
                ends: self.ends,
                other,
                agreed,
            }),
            Err(refusal) => {
                let peer = self.framed.peer.clone();
                self.framed.refuse(&refusal, Instant::now() + PARTING);
                Err(ConnectError::Refusing { peer, refusal })
            }
        }
    }
}

/// The side that dialled, once it has said who it is.
#[derive(Debug)]
pub struct Caller {
    line: Line,
    other: Introduction,
}

impl Caller {
    /// Who it is.
    pub fn introduction(&self) -> &Introduction {
        &self.other
    }

    /// Says who this is; refuses by itself where the two do not go together.
    pub fn welcome(mut self, greeting: &Greeting, timeout: Duration) -> Connected<Channel> {
        if greeting.check(&self.other.greeting).is_ok() {
            let deadline = doorbell_hca::deadline(timeout);
            let body = greeting.encode();
            self.line
                .framed
                .send(Kind::Welcome, &body, "take a welcome", deadline)?;
        }
        self.line.join(greeting, self.other)
    }

    /// Tells it why not, and hangs up.
    pub fn refuse(self, refusal: &Refusal) {
        self.line.refuse(refusal);
    }
}

fn attempt(address: &str, left: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// No delays, and probes: a host that vanished must not be waited for for ever.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE / 3)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE / 3)?;
    sockopt::set_tcp_keepcnt(stream, 2)?;
    sockopt::set_tcp_user_timeout(stream, KEEPALIVE.as_millis() as u32)?;
    Ok(())
}

/// IPv4 addresses of an IPv6 socket as what they are.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Waits for other processes to dial.
pub struct Acceptor {
    listener: TcpListener,
    address: SocketAddr,
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor")
            .field("address", &self.address)
            .finish()
    }
}

impl Acceptor {
    /// Listens on `HOST`, `HOST:PORT`, or with `None` on [`DEFAULT_PORT`] of every address. Port 0 takes a free one.
    pub fn bind(address: Option<&str>) -> Connected<Self> {
        let wanted = match address {
            Some(text) => with_port(text)?,
            None => format!("[::]:{DEFAULT_PORT}"),
        };
        let open = |at: &str| -> io::Result<Self> {
            let listener = TcpListener::bind(at)?;
            listener.set_nonblocking(true)?;
            let address = plain(listener.local_addr()?);
            Ok(Self { listener, address })
        };
        match (open(&wanted), address) {
            (Ok(made), _) => Ok(made),
            // A host without IPv6.
            (Err(e), None) if e.kind() != io::ErrorKind::AddrInUse => {
                let v4 = format!("0.0.0.0:{DEFAULT_PORT}");
                open(&v4).map_err(|source| ConnectError::Listen {
                    address: v4,
                    source,
                })
            }
            (Err(source), _) => Err(ConnectError::Listen {
                address: wanted,
                source,
            }),
        }
    }

    #[cfg(test)]
    pub(super) fn raw(&self) -> &TcpListener {
        &self.listener
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection, or `None` when nobody dialled within `timeout`.
    pub fn accept(&self, timeout: Duration) -> Connected<Option<Line>> {
        let deadline = doorbell_hca::deadline(timeout);
        loop {
            match self.listener.accept() {
                // One that is gone again is no news.
                Ok((stream, _)) => match Line::new(stream) {
                    Ok(line) => return Ok(Some(line)),
                    Err(_) => continue,
                },
                Err(e) if is_passing(&e) => {}
                Err(source) => {
                    return Err(ConnectError::Listen {
                        address: self.address.to_string(),
                        source,
                    });
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            wait_readable(&self.listener, left.min(Duration::from_secs(1)));
        }
    }
}

/// Errors of `accept` after which the next call may do better.
fn is_passing(e: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(
        e.kind(),
        K::WouldBlock | K::TimedOut | K::Interrupted | K::ConnectionAborted | K::ConnectionReset
    )
}

fn wait_readable(fd: &impl std::os::fd::AsFd, left: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let time = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    // An error means that reading will say what it is.
    !matches!(poll(&mut fds, Some(&time)), Ok(0))
}

/// A connection between two processes that know each other: messages in order, both ways.
pub struct Channel {
    framed: Framed,
    ends: Option<(SocketAddr, SocketAddr)>,
    other: Introduction,
    agreed: Option<Agreed>,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel")
            .field("ends", &self.ends)
            .field("other", &self.other)
            .finish_non_exhaustive()
    }
}

impl Channel {
    /// Who the other side is.
    pub fn introduction(&self) -> &Introduction {
        &self.other
    }

    /// What holds between the two RoCE ports; `None` if there are none.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// The other side's address, as errors name it.
    pub fn peer(&self) -> &str {
        &self.framed.peer
    }

    /// Sends one message, at most [`MAX_MESSAGE`] bytes.
    pub fn send(&mut self, message: &[u8], timeout: Duration) -> Connected<()> {
        if message.len() > MAX_MESSAGE {
            return Err(ConnectError::TooLarge {
                len: message.len(),
                max: MAX_MESSAGE,
            });
        }
        let deadline = doorbell_hca::deadline(timeout);
        self.framed
            .send(Kind::Data, message, "take a message", deadline)
    }

    /// The next message.
    pub fn recv(&mut self, timeout: Duration) -> Connected<Vec<u8>> {
        let deadline = doorbell_hca::deadline(timeout);
        match self
            .framed
            .receive("send a message", MAX_MESSAGE, deadline)?
        {
            (Kind::Data, body) => Ok(body),
            (other, _) => Err(self
                .framed
                .protocol(format!("{other:?}"), "a message".to_owned())),
        }
    }

    /// Whether a message, or the end of the connection, came within `timeout`. Does not take it.
    pub fn wait(&self, timeout: Duration) -> bool {
        match &self.framed.stream {
            Stream::Unix(s) => wait_readable(s, timeout),
            Stream::Tcp(s) => wait_readable(s, timeout),
        }
    }

    /// Whether the other side has hung up.
    pub fn is_closed(&self) -> bool {
        self.framed.stream.is_closed()
    }

    /// Both sides give bytes and get the other's; both must call it, in the same order as other messages.
    pub fn exchange(&mut self, mine: &[u8], timeout: Duration) -> Connected<Vec<u8>> {
        let deadline = doorbell_hca::deadline(timeout);
        let left = || deadline.saturating_duration_since(Instant::now());
        self.send(&(mine.len() as u64).to_le_bytes(), left())?;
        let head = self.recv(left())?;
        let theirs = <[u8; 8]>::try_from(head.as_slice())
            .ok()
            .map(u64::from_le_bytes)
            .and_then(|n| usize::try_from(n).ok())
            .filter(|&n| n <= MAX_MESSAGE)
            .ok_or_else(|| {
                self.framed.protocol(
                    format!("a first message of {} bytes", head.len()),
                    "exchange() on both sides at the same point".to_owned(),
                )
            })?;
        // Piece by piece and in turn: two that both send more than the sockets hold would wait for each other.
        const PIECE: usize = 32 << 10;
        let mut got = Vec::new();
        let mut pieces = mine.chunks(PIECE);
        loop {
            let piece = pieces.next();
            if let Some(piece) = piece {
                self.send(piece, left())?;
            }
            if got.len() < theirs {
                got.extend_from_slice(&self.recv(left())?);
            } else if piece.is_none() {
                break;
            }
        }
        got.truncate(theirs);
        Ok(got)
    }

    /// Both sides give descriptions of their queue pairs and memory and get the other's.
    pub fn exchange_endpoints(
        &mut self,
        mine: &[Endpoint],
        timeout: Duration,
    ) -> Result<Vec<Endpoint>> {
        let theirs = self
            .exchange(&pack_endpoints(mine), timeout)
            .map_err(Error::from)?;
        Ok(unpack_endpoints(&theirs)?)
    }

    /// Returns when both sides have called it.
    pub fn barrier(&mut self, timeout: Duration) -> Connected<()> {
        self.exchange(&[], timeout).map(|_| ())
    }
}
