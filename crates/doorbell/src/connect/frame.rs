//! Frames of the exchange, and the limits that bound what a stranger can make us do.
//!
//! A frame is a 16-byte little-endian header {magic, version, kind, length, zero} and a body. Header and refusals look the
//! same in every version, so that two releases can always tell each other why they do not go together.

use std::io;
use std::time::Instant;

use super::error::{ConnectError, Refusal, RefusalKind};
use crate::bootstrap::frame::{Stream, timed_out};

pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"DBCX");
/// Version of the exchange.
pub const VERSION: u16 = 3;
pub(super) const HEADER: usize = 16;
/// A greeting is small; who has not been let in may not make us allocate more.
pub(super) const MAX_GREETING: usize = 2048;
/// Largest message of a connection.
pub const MAX_MESSAGE: usize = 16 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Hello = 1,
    Welcome = 2,
    Refuse = 3,
    Data = 4,
    /// The process is alive; nothing else.
    Beat = 5,
}

impl Kind {
    fn parse(raw: u16) -> Option<Self> {
        [
            Self::Hello,
            Self::Welcome,
            Self::Refuse,
            Self::Data,
            Self::Beat,
        ]
        .into_iter()
        .find(|k| *k as u16 == raw)
    }
}

/// A header that was read and found in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    pub(super) kind: Kind,
    /// Bytes of the body.
    pub(super) len: usize,
}

/// What is wrong with bytes that should be a frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Wrong {
    /// Another version of the exchange.
    Version(u16),
    /// None of this exchange.
    Protocol { found: String, expected: String },
}

impl Head {
    /// Reads a header whose body may have `limit` bytes; a refusal may always be read.
    pub(super) fn parse(head: &[u8; HEADER], limit: usize) -> Result<Self, Wrong> {
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let u32_at =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if u32_at(0) != MAGIC {
            return Err(Wrong::Protocol {
                found: format!("{} first", printable(head)),
                expected: format!("the magic {:?}", "DBCX"),
            });
        }
        let kind = Kind::parse(u16_at(6));
        if u16_at(4) != VERSION && kind != Some(Kind::Refuse) {
            return Err(Wrong::Version(u16_at(4)));
        }
        let Some(kind) = kind else {
            return Err(Wrong::Protocol {
                found: format!("a message of kind {}", u16_at(6)),
                expected: "kind 1 to 5".to_owned(),
            });
        };
        let limit = match kind {
            Kind::Refuse => MAX_GREETING,
            Kind::Beat => 0,
            _ => limit,
        };
        let len = u32_at(8) as usize;
        if len > limit {
            return Err(Wrong::Protocol {
                found: format!("a message of {len} bytes"),
                expected: format!("at most {limit} bytes here"),
            });
        }
        Ok(Self { kind, len })
    }
}

impl Wrong {
    /// As an error of the connection to `peer`.
    pub(super) fn from(self, peer: &str) -> ConnectError {
        let peer = peer.to_owned();
        match self {
            Self::Version(theirs) => ConnectError::Version {
                peer,
                theirs,
                release: env!("CARGO_PKG_VERSION"),
            },
            Self::Protocol { found, expected } => ConnectError::Protocol {
                peer,
                found,
                expected,
            },
        }
    }
}

/// The bytes of a frame.
pub(super) fn emit(kind: Kind, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend_from_slice(&MAGIC.to_le_bytes());
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(kind as u16).to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(body);
    bytes
}

/// The body of a refusal: what it is about, and as much of the words as is taken.
pub(super) fn refusal_body(refusal: &Refusal) -> Vec<u8> {
    let mut body = (refusal.kind as u16).to_le_bytes().to_vec();
    let room = MAX_GREETING - body.len();
    let mut end = refusal.text.len().min(room);
    while !refusal.text.is_char_boundary(end) {
        end -= 1;
    }
    body.extend_from_slice(&refusal.text.as_bytes()[..end]);
    body
}

/// A stream with the name by which errors call the other side.
pub(super) struct Framed {
    pub(super) stream: Stream,
    pub(super) peer: String,
}

impl Framed {
    pub(super) fn send(
        &mut self,
        kind: Kind,
        body: &[u8],
        step: &'static str,
        deadline: Instant,
    ) -> Result<(), ConnectError> {
        let started = Instant::now();
        let bytes = emit(kind, body);
        self.stream
            .write_all_by(&bytes, deadline)
            .map_err(|e| self.broken(e, step, started))
    }

    /// Reads one frame of at most `limit` bytes.
    pub(super) fn receive(
        &mut self,
        step: &'static str,
        limit: usize,
        deadline: Instant,
    ) -> Result<(Kind, Vec<u8>), ConnectError> {
        let started = Instant::now();
        let mut head = [0u8; HEADER];
        self.stream
            .read_exact_by(&mut head, deadline)
            .map_err(|e| self.broken(e, step, started))?;
        let Head { kind, len } = Head::parse(&head, limit).map_err(|e| e.from(&self.peer))?;
        let mut body = vec![0; len];
        self.stream
            .read_exact_by(&mut body, deadline)
            .map_err(|e| self.broken(e, step, started))?;
        if kind == Kind::Refuse {
            return Err(ConnectError::Refused {
                peer: self.peer.clone(),
                refusal: read_refusal(&body),
            });
        }
        Ok((kind, body))
    }

    /// Tells the other side why not. Best effort: one that cannot be told finds out by the end of the connection.
    pub(super) fn refuse(&mut self, refusal: &Refusal, deadline: Instant) {
        let _ = self.send(
            Kind::Refuse,
            &refusal_body(refusal),
            "hear a refusal",
            deadline,
        );
    }

    pub(super) fn protocol(&self, found: String, expected: String) -> ConnectError {
        ConnectError::Protocol {
            peer: self.peer.clone(),
            found,
            expected,
        }
    }

    fn broken(&self, e: io::Error, step: &'static str, started: Instant) -> ConnectError {
        let peer = self.peer.clone();
        if timed_out(&e) {
            ConnectError::TimedOut {
                peer,
                step,
                after: started.elapsed(),
                remedy: "look whether it is stopped or overloaded",
            }
        } else {
            ConnectError::Lost {
                peer,
                step,
                reason: e.to_string(),
            }
        }
    }
}

pub(super) fn read_refusal(body: &[u8]) -> Refusal {
    let (kind, text) = body.split_first_chunk::<2>().unwrap_or((&[0, 0], &[]));
    // The words of a stranger go to a terminal: nothing but text.
    let text: String = String::from_utf8_lossy(text)
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    Refusal::new(RefusalKind::parse(u16::from_le_bytes(*kind)), text)
}

/// First bytes of something else, for a human.
fn printable(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes.escape_ascii())
}
