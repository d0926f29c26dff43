//! Out-of-band exchange of small byte blobs between the ranks of a job.
//!
//! Rank 0 listens on a Unix socket or a TCP address, every other rank connects to it, and collectives
//! ([`Bootstrap::all_gather`], [`Bootstrap::all_to_all`], [`Bootstrap::barrier`]) pass through rank 0.
//! It exists to swap [`Endpoint`](crate::Endpoint)s at start-up; it is not a data path.
//!
//! Frames carry a magic number and a version, and every wait ends: a rank that does not show up within
//! the time-out is named in the error of *every* rank, because rank 0 tells the others before it gives up.
//!
//! The TCP form is neither authenticated nor encrypted: use it only on a network whose hosts you trust. The
//! Unix form accepts processes of the same user only.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::connect::Line;

pub use launcher::{Launched, Launcher};

pub use meeting::{MAX_SECRET, Meeting};

use conn::{Conn, send_all};
use frame::{Frame, Kind};
use watch::{Pulse, Trouble};

mod conn;
mod exchange;
pub(crate) mod frame;
mod launcher;
mod meeting;
mod place;
#[cfg(test)]
mod tests;
mod watch;

/// How much longer a rank waits for rank 0's verdict than rank 0 waits for the ranks.
const GRACE: Duration = Duration::from_secs(1);

/// What can go wrong while ranks find each other and exchange blobs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// A rendezvous address that cannot be parsed.
    #[error("rendezvous {value:?} is not unix:PATH or tcp:HOST:PORT")]
    Address {
        /// The text that was given.
        value: String,
    },
    /// Rank and world size that do not fit together.
    #[error("rank {rank} is outside a world of {world} rank(s): ranks count from 0")]
    Rank {
        /// This process's rank.
        rank: u32,
        /// Number of ranks.
        world: u32,
    },
    /// A variable of a launcher, or by hand, that cannot be used.
    #[error("{name}={value:?} cannot be used: {remedy}")]
    Variable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What may be given.
        remedy: &'static str,
    },
    /// Several hosts, and nobody says where the ranks meet.
    #[error(
        "{launcher} does not say where ranks of several hosts meet: set DOORBELL_RENDEZVOUS=tcp:HOST:PORT (or --rendezvous), HOST being rank 0's and PORT one that is free there"
    )]
    NoRendezvous {
        /// Who started the ranks.
        launcher: Launcher,
    },
    /// The socket could not be opened.
    #[error(
        "rank {rank} cannot open {address}: {source}; check that the address is free, permitted, and of rank 0's host (MASTER_ADDR under torchrun); another one goes into DOORBELL_RENDEZVOUS=tcp:HOST:PORT"
    )]
    Open {
        /// This process's rank.
        rank: u32,
        /// The rendezvous address.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Some ranks did not arrive in time.
    #[error("{what}: rank(s) {missing:?} of {world} missing after {after}; look at their logs", after = crate::connect::brief(*.after))]
    Missing {
        /// Which step was waiting.
        what: &'static str,
        /// The ranks that did not arrive.
        missing: Vec<u32>,
        /// Number of ranks.
        world: u32,
        /// How long this rank waited.
        after: Duration,
    },
    /// Rank 0 could let nobody in who knocks.
    #[error("join: rank 0 could not let in who is at the door of {address}: {source}")]
    Door {
        /// The rendezvous address.
        address: String,
        /// What the system said, with the limit if it was one.
        source: io::Error,
    },
    /// Rank 0 could not be reached in time.
    #[error("join: rank 0 of {world} was not at {place} within {after}: {source}; start it, or say where it is", after = crate::connect::brief(*.after))]
    Unreachable {
        /// Where it was looked for last.
        place: String,
        /// Number of ranks.
        world: u32,
        /// How long this rank tried.
        after: Duration,
        /// What the system said to the last try.
        source: io::Error,
    },
    /// A rank closed its connection or its connection broke.
    #[error("{what}: lost rank {rank}: {reason}")]
    Lost {
        /// Which step was waiting.
        what: &'static str,
        /// The rank that was lost.
        rank: u32,
        /// How it showed.
        reason: String,
    },
    /// A peer speaks something else, or another version of this.
    #[error("rank {rank} sent {found}, expected {expected}; run the same release everywhere")]
    Protocol {
        /// The rank that sent it.
        rank: u32,
        /// What arrived.
        found: String,
        /// What should have arrived.
        expected: String,
    },
    /// Rank 0 gave up and said why.
    #[error("rank 0 gave up: {reason}")]
    Refused {
        /// Rank 0's words.
        reason: String,
    },
    /// A rank said that it has failed ([`Bootstrap::fail`]).
    #[error("rank {rank} has failed: {reason}")]
    Failed {
        /// Which.
        rank: u32,
        /// Its words.
        reason: String,
    },
    /// A rank that used to say that it lives does not any more ([`Bootstrap::keep_alive`]).
    #[error("rank {rank} has not been heard of for {after}: {why}", after = crate::connect::brief(*.after))]
    Silent {
        /// Which.
        rank: u32,
        /// For how long.
        after: Duration,
        /// What is known of why.
        why: String,
    },
    /// A blob that does not fit into a frame.
    #[error("blob of {len} bytes: a collective carries at most {max} bytes altogether")]
    TooLarge {
        /// Length of the blob.
        len: usize,
        /// The limit.
        max: usize,
    },
}

type Result<T> = std::result::Result<T, BootstrapError>;

/// Where the ranks meet: `unix:PATH` or `tcp:HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// A Unix socket path on this host, or `@NAME` in the abstract name space.
    Unix(PathBuf),
    /// `host:port` at which rank 0 listens.
    Tcp(String),
}

impl FromStr for Rendezvous {
    type Err = BootstrapError;

    fn from_str(text: &str) -> Result<Self> {
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", addr)) if addr.contains(':') => Ok(Self::Tcp(addr.to_owned())),
            _ => Err(BootstrapError::Address {
                value: text.to_owned(),
            }),
        }
    }
}

impl std::fmt::Display for Rendezvous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(addr) => write!(f, "tcp:{addr}"),
        }
    }
}

enum Role {
    /// Rank 0: a connection to every other rank; the first entry is rank 1.
    Hub(Vec<Conn>),
    Leaf(Conn),
}

/// One rank's membership of a job; collectives must be called by all ranks in the same order.
pub struct Bootstrap {
    rank: u32,
    world: u32,
    timeout: Duration,
    sequence: u32,
    role: Role,
    /// Ranks that are gone, and how it showed; those that said goodbye have no reason.
    gone: BTreeMap<u32, Option<String>>,
    /// Why there are no collectives any more.
    trouble: Option<Trouble>,
    /// Where ranks say that they live.
    pulse: Option<Pulse>,
}

impl std::fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bootstrap")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

impl Bootstrap {
    /// Joins the job: returns when all `world` ranks are there, or names those that are not after `timeout`.
    /// The same time-out holds for each later collective.
    pub fn join(at: &Rendezvous, rank: u32, world: u32, timeout: Duration) -> Result<Self> {
        if rank >= world {
            return Err(BootstrapError::Rank { rank, world });
        }
        let at = std::slice::from_ref(at);
        if rank > 0 {
            return Self::enter(at, &[], rank, world, timeout, false);
        }
        Self::preside(&Meeting::open(at)?, &[], world, timeout)
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// With two ranks: the connection between them, to be [greeted](Line) as between any two processes. Rank 0 calls,
    /// rank 1 answers. `None` with another number of ranks.
    pub fn into_line(mut self) -> Option<Line> {
        if self.world != 2 {
            return None;
        }
        let role = std::mem::replace(&mut self.role, Role::Hub(Vec::new()));
        let conn = match role {
            Role::Hub(mut peers) => peers.pop()?,
            Role::Leaf(hub) => hub,
        };
        Some(Line::of_stream(
            conn.into_stream(),
            format!("rank {}", 1 - self.rank),
        ))
    }
}

fn with_context(e: BootstrapError, world: u32, after: Duration) -> BootstrapError {
    match e {
        BootstrapError::Missing { what, missing, .. } => BootstrapError::Missing {
            what,
            missing,
            world,
            after,
        },
        other => other,
    }
}

/// Tells them that the job fails, in the name of `rank`.
fn fail_all<'a>(
    peers: impl Iterator<Item = &'a mut Conn>,
    rank: u32,
    sequence: u32,
    why: impl std::fmt::Display,
) {
    let deadline = Instant::now() + GRACE;
    let frame = Frame::of(Kind::Fail, rank, sequence, why.to_string().into_bytes());
    // Best effort: a peer that cannot be told finds out by its own time-out.
    send_all(peers, &frame, deadline);
}
