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

use frame::{Frame, Kind, MAX_FRAME, Stream, pack, unpack};

pub(crate) mod frame;
mod launcher;
mod meeting;
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
    /// A launcher's variable that is no number.
    #[error("{name}={value:?} is not a number: the launcher, or whoever set it, made a mistake")]
    Variable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
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
    /// A rank said that it has failed, between collectives ([`Bootstrap::fail`]).
    #[error("rank {rank} has failed: {reason}")]
    Failed {
        /// Which.
        rank: u32,
        /// Its words.
        reason: String,
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
    /// Rank 0: a stream to every other rank; the first entry is rank 1.
    Hub(Vec<Stream>),
    Leaf(Stream),
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
    /// Removed when rank 0 goes.
    socket: Option<PathBuf>,
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
            return Self::attend(at, &[], rank, world, timeout);
        }
        let mut hub = Self::preside(&Meeting::open(at)?, &[], world, timeout)?;
        if let [Rendezvous::Unix(path)] = at {
            hub.socket = Some(path.clone());
        }
        Ok(hub)
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Every rank gives one blob and gets all of them, in rank order.
    pub fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let copies: Vec<&[u8]> = vec![blob; 1];
        self.exchange("all_gather", pack(&copies), |all| {
            let flat: Vec<&[u8]> = all
                .iter()
                .map(|parts| parts.first().map_or(&[][..], |p| p.as_slice()))
                .collect();
            vec![pack(&flat); all.len()]
        })
    }

    /// Rank `i` gives one blob for each rank and gets, in rank order, what each rank gave for `i`.
    /// `blobs` must have one entry a rank.
    pub fn all_to_all(&mut self, blobs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        if blobs.len() != self.world as usize {
            return Err(BootstrapError::Protocol {
                rank: self.rank,
                found: format!("{} blobs", blobs.len()),
                expected: format!("one a rank, {}", self.world),
            });
        }
        let refs: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
        self.exchange("all_to_all", pack(&refs), |all| {
            (0..all.len())
                .map(|to| {
                    let column: Vec<&[u8]> = all
                        .iter()
                        .map(|row| row.get(to).map_or(&[][..], |p| p.as_slice()))
                        .collect();
                    pack(&column)
                })
                .collect()
        })
    }

    /// Returns when every rank has called it.
    pub fn barrier(&mut self) -> Result<()> {
        self.all_gather(&[]).map(|_| ())
    }

    /// With two ranks: the connection between them, to be [greeted](Line) as between any two processes. Rank 0 calls,
    /// rank 1 answers. `None` with another number of ranks.
    pub fn into_line(mut self) -> Option<Line> {
        if self.world != 2 {
            return None;
        }
        let role = std::mem::replace(&mut self.role, Role::Hub(Vec::new()));
        let stream = match role {
            Role::Hub(mut peers) => peers.pop()?,
            Role::Leaf(hub) => hub,
        };
        Some(Line::of_stream(stream, format!("rank {}", 1 - self.rank)))
    }

    fn exchange(
        &mut self,
        what: &'static str,
        mine: Vec<u8>,
        answer: impl FnOnce(&[Vec<Vec<u8>>]) -> Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>> {
        if mine.len() > MAX_FRAME {
            return Err(BootstrapError::TooLarge {
                len: mine.len(),
                max: MAX_FRAME,
            });
        }
        self.sequence += 1;
        let (sequence, rank, world, timeout) = (self.sequence, self.rank, self.world, self.timeout);
        let deadline = doorbell_hca::deadline(timeout);
        match &mut self.role {
            Role::Leaf(hub) => {
                let lost = |e: io::Error| BootstrapError::Lost {
                    what,
                    rank: 0,
                    reason: e.to_string(),
                };
                hub.send(
                    &Frame {
                        kind: Kind::Gather,
                        rank,
                        sequence,
                        body: mine,
                    },
                    deadline,
                )
                .map_err(lost)?;
                let frame = hub
                    .receive(0, what, MAX_FRAME, deadline + GRACE)
                    .map_err(|e| with_context(e, world, timeout))?;
                expect(&frame, 0, Kind::Scatter, 0, sequence)?;
                unpack(&frame.body, 0)
            }
            Role::Hub(peers) => {
                let result = hub_exchange(
                    peers, what, sequence, world, timeout, deadline, &mine, answer,
                );
                if let Err(e) = &result {
                    fail_all(peers.iter_mut(), 0, sequence, e);
                }
                result
            }
        }
    }
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        if let Some(path) = &self.socket {
            // The name is only a meeting point; if it is gone already, nothing is lost.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn expect(frame: &Frame, from: u32, kind: Kind, rank: u32, sequence: u32) -> Result<()> {
    if frame.kind == Kind::Fail {
        return Err(given_up(frame));
    }
    if frame.kind == Kind::Bye {
        return Err(BootstrapError::Lost {
            what: "a collective",
            rank: from,
            reason: "it has left the job".to_owned(),
        });
    }
    if (frame.kind, frame.rank, frame.sequence) != (kind, rank, sequence) {
        return Err(BootstrapError::Protocol {
            rank: from,
            found: format!(
                "{:?} of rank {}, number {}",
                frame.kind, frame.rank, frame.sequence
            ),
            expected: format!(
                "{kind:?} of rank {rank}, number {sequence} (all ranks make the same calls)"
            ),
        });
    }
    Ok(())
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

/// What a frame of kind [`Kind::Fail`] says: rank 0 gave up a collective, or a rank has failed by itself.
fn given_up(frame: &Frame) -> BootstrapError {
    let (rank, reason) = (
        frame.rank,
        String::from_utf8_lossy(&frame.body).into_owned(),
    );
    match rank {
        0 => BootstrapError::Refused { reason },
        _ => BootstrapError::Failed { rank, reason },
    }
}

fn fail_all<'a>(
    peers: impl Iterator<Item = &'a mut Stream>,
    rank: u32,
    sequence: u32,
    why: impl std::fmt::Display,
) {
    let deadline = Instant::now() + GRACE;
    let why = why.to_string();
    for peer in peers {
        let body = why.clone().into_bytes();
        // Best effort: a peer that cannot be told finds out by its own time-out.
        let _ = peer.send(
            &Frame {
                kind: Kind::Fail,
                rank,
                sequence,
                body,
            },
            deadline,
        );
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "one private call site; a struct would only rename them"
)]
fn hub_exchange(
    peers: &mut [Stream],
    what: &'static str,
    sequence: u32,
    world: u32,
    timeout: Duration,
    deadline: Instant,
    mine: &[u8],
    answer: impl FnOnce(&[Vec<Vec<u8>>]) -> Vec<Vec<u8>>,
) -> Result<Vec<Vec<u8>>> {
    let mut all = vec![unpack(mine, 0)?];
    let mut missing = Vec::new();
    for (peer, rank) in peers.iter_mut().zip(1u32..) {
        match peer.receive(rank, what, MAX_FRAME, deadline) {
            Ok(frame) => {
                expect(&frame, rank, Kind::Gather, rank, sequence)?;
                all.push(unpack(&frame.body, rank)?);
            }
            Err(BootstrapError::Missing { .. }) => missing.push(rank),
            Err(e) => return Err(e),
        }
    }
    if !missing.is_empty() {
        return Err(BootstrapError::Missing {
            what,
            missing,
            world,
            after: timeout,
        });
    }
    let answers = answer(&all);
    if let Some(long) = answers.iter().find(|a| a.len() > MAX_FRAME) {
        return Err(BootstrapError::TooLarge {
            len: long.len(),
            max: MAX_FRAME,
        });
    }
    let mut answers = answers.into_iter();
    let own = answers.next().unwrap_or_default();
    // Sending has a deadline of its own: the last rank may have arrived just in time.
    let deadline = doorbell_hca::deadline(timeout);
    for ((peer, body), rank) in peers.iter_mut().zip(answers).zip(1u32..) {
        peer.send(
            &Frame {
                kind: Kind::Scatter,
                rank: 0,
                sequence,
                body,
            },
            deadline,
        )
        .map_err(|e| BootstrapError::Lost {
            what,
            rank,
            reason: e.to_string(),
        })?;
    }
    unpack(&own, 0)
}
