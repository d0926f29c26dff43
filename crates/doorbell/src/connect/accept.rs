//! Listening: who dials is heard, and strangers that say nothing keep nobody waiting.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use super::Connected;
use super::address::{DEFAULT_PORT, with_port};
use super::error::ConnectError;
use super::line::{Caller, Line, plain};

/// What somebody who dialled gets to say who it is.
const GREETING: Duration = Duration::from_secs(3);
/// Of those who have not, so many may be there; who has been silent for longest makes room.
const WAITING: usize = 256;
/// Between two looks at them.
const LOOK: Duration = Duration::from_millis(2);
/// Where the system has no more sockets, the next attempt is made after this long.
const PAUSE: Duration = Duration::from_millis(20);

/// Somebody dialled.
#[derive(Debug)]
pub enum Knock {
    /// A process that said who it is.
    Caller(Caller),
    /// Something else, which has been told and hung up on.
    Stranger(ConnectError),
}

/// Waits for other processes to dial.
pub struct Acceptor {
    listener: TcpListener,
    address: SocketAddr,
    /// Who dialled and has not said who it is, the oldest first.
    waiting: VecDeque<(Instant, Line)>,
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
            Ok(Self {
                listener,
                address,
                waiting: VecDeque::new(),
            })
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
                Err(e) if is_shortage(&e) => std::thread::sleep(PAUSE),
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
            readable(&self.listener, left.min(Duration::from_secs(1)));
        }
    }
}

impl Acceptor {
    /// Takes in those who dial. Where too many wait, whoever has been silent for longest goes, and none who has said something.
    pub(super) fn let_in(&mut self) -> Connected<()> {
        loop {
            let mut silent = None;
            if self.waiting.len() == WAITING {
                silent = self.waiting.iter().position(|(_, line)| !line.is_ready());
                if silent.is_none() {
                    return Ok(());
                }
            }
            let Some(line) = self.accept(Duration::ZERO)? else {
                return Ok(());
            };
            if let Some(at) = silent {
                self.waiting.remove(at);
            }
            self.waiting.push_back((Instant::now(), line));
        }
    }

    /// The next one who dialled and has said who it is, or turned out to be none of ours; `None` when there was neither within
    /// `timeout`. Who says nothing keeps nobody else waiting.
    pub fn next(&mut self, timeout: Duration) -> Connected<Option<Knock>> {
        let deadline = doorbell_hca::deadline(timeout);
        loop {
            self.let_in()?;
            let due =
                |(since, line): &(Instant, Line)| since.elapsed() >= GREETING || line.is_ready();
            if let Some(at) = self.waiting.iter().position(due)
                && let Some((since, line)) = self.waiting.remove(at)
            {
                let heard = line.hear(GREETING.saturating_sub(since.elapsed()));
                return Ok(Some(match heard {
                    Ok(caller) => Knock::Caller(caller),
                    Err(ConnectError::TimedOut {
                        peer, step, remedy, ..
                    }) => Knock::Stranger(ConnectError::TimedOut {
                        peer,
                        step,
                        after: since.elapsed(),
                        remedy,
                    }),
                    Err(e) => Knock::Stranger(e),
                }));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            match self.waiting.is_empty() {
                true => readable(&self.listener, left),
                false => readable(&self.listener, left.min(LOOK)),
            }
        }
    }
}

/// The system, or this process, has no room for another socket now.
fn is_shortage(e: &io::Error) -> bool {
    use rustix::io::Errno;
    let code = rustix::io::Errno::from_io_error(e);
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM]
        .iter()
        .any(|of| code == Some(*of))
}

/// Errors of `accept` after which the next call may do better.
fn is_passing(e: &io::Error) -> bool {
    use io::ErrorKind as K;
    matches!(
        e.kind(),
        K::WouldBlock | K::TimedOut | K::Interrupted | K::ConnectionAborted | K::ConnectionReset
    )
}

fn readable(fd: &impl std::os::fd::AsFd, left: Duration) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let time = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    // An error means that the next attempt will say what it is.
    let _ = poll(&mut fds, Some(&time));
}
