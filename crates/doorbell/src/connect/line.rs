//! Dialling, and the greetings that both sides say first.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, recv, sockopt};

use super::address::{look_up, with_port};
use super::channel::Channel;
use super::error::{ConnectError, Refusal, RefusalKind};
use super::frame::{Framed, HEADER, Head, Kind, MAX_GREETING};
use super::greeting::{Greeting, Introduction};
use super::{Connected, keeper::Keeper};
use crate::bootstrap::frame::Stream;

/// Pause between attempts to connect.
const RETRY: Duration = Duration::from_millis(5);
/// How long a refusal may take to be sent.
pub(super) const PARTING: Duration = Duration::from_millis(500);
/// A peer whose host vanished is noticed after this long where no channel notices it sooner: probes begin after a third of it.
const KEEPALIVE: Duration = Duration::from_secs(15);

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
            let (source, passes) = match attempt(&full, left) {
                Ok(stream) => return Self::new(stream),
                Err(Attempt::Lookup(e)) => {
                    let passes = is_temporary(&e);
                    if left <= RETRY || !passes {
                        let host = full.rsplit_once(':').map_or(&*full, |(host, _)| host);
                        return Err(ConnectError::Name {
                            host: host.to_owned(),
                            source: e,
                        });
                    }
                    (e, passes)
                }
                // A server that is about to start refuses at first; a network that is not there may come too.
                Err(Attempt::Connect(e)) => {
                    let passes = may_pass(&e);
                    (e, passes)
                }
            };
            if left <= RETRY || !passes {
                return Err(ConnectError::Unreachable {
                    address: full,
                    after: if passes {
                        timeout
                    } else {
                        timeout.saturating_sub(left)
                    },
                    remedy: remedy(&source),
                    source,
                });
            }
            std::thread::sleep(RETRY);
        }
    }

    pub(super) fn new(stream: TcpStream) -> Connected<Self> {
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

    /// Whether what was said, or the end of the connection, can be read without waiting.
    pub(super) fn is_ready(&self) -> bool {
        let mut bytes = [0; HEADER + MAX_GREETING];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recv(&self.framed.stream, &mut bytes[..], flags) {
            Ok((n @ 1.., _)) => match bytes[..n].first_chunk::<HEADER>() {
                Some(head) => match Head::parse(head, MAX_GREETING) {
                    Ok(head) => n >= HEADER + head.len,
                    Err(_) => true,
                },
                None => false,
            },
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
            // Reading says what it is.
            Ok(_) | Err(_) => true,
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
            Ok(agreed) => {
                let Framed { stream, peer } = self.framed;
                let keeper =
                    Keeper::start(stream, peer.clone()).map_err(|e| ConnectError::Lost {
                        peer,
                        step: "be kept",
                        reason: e.to_string(),
                    })?;
                Ok(Channel::new(keeper, other, agreed))
            }
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

    /// The address of this host by which it came: what its RoCE port should be bound to.
    pub fn local_ip(&self) -> Option<IpAddr> {
        self.line.local_ip()
    }

    /// Its address, as errors name it.
    pub fn peer(&self) -> &str {
        self.line.peer()
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

/// Why an attempt to connect failed.
enum Attempt {
    Lookup(io::Error),
    Connect(io::Error),
}

fn attempt(address: &str, left: Duration) -> Result<TcpStream, Attempt> {
    let mut last = None;
    for address in look_up(address, left).map_err(Attempt::Lookup)? {
        match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = Some(e),
        }
    }
    Err(match last {
        Some(e) => Attempt::Connect(e),
        None => Attempt::Lookup(io::Error::new(
            io::ErrorKind::NotFound,
            "the name has no address",
        )),
    })
}

/// Whether a name that could not be looked up may be found later: the resolver's code for that is in its words only (glibc, musl).
pub(crate) fn is_temporary(e: &io::Error) -> bool {
    let text = e.to_string();
    text.contains("Temporary failure") || text.contains("Try again")
}

/// Whether the next attempt may do better.
fn may_pass(e: &io::Error) -> bool {
    use io::ErrorKind as K;
    !matches!(
        e.kind(),
        K::PermissionDenied | K::InvalidInput | K::AddrNotAvailable | K::Unsupported
    )
}

fn remedy(e: &io::Error) -> &'static str {
    use io::ErrorKind as K;
    match e.kind() {
        K::ConnectionRefused => "is `doorbell serve` running there, on that port?",
        K::NetworkUnreachable | K::HostUnreachable => {
            "this host has no way there: check the address, and `ip route get` it"
        }
        K::TimedOut | K::WouldBlock => {
            "nobody answers: is that host up, and does the firewall let TCP to that port pass?"
        }
        K::PermissionDenied | K::InvalidInput | K::AddrNotAvailable | K::Unsupported => {
            "that is no address to connect to from here: give the address of one host"
        }
        _ => "is `doorbell serve` running there, and does the firewall let TCP to that port pass?",
    }
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
pub(super) fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
