//! Frames, and the streams that carry them, under the bootstrap exchange.
//!
//! A frame is a 24-byte little-endian header {magic, version, kind, rank, sequence, length} and a body.
//! Everything here has a deadline and checks what arrives before it allocates for it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::{BootstrapError, Result};

pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"DBBS");
pub(super) const VERSION: u16 = 3;
pub(super) const HEADER: usize = 24;
/// Largest frame: what all ranks send in one collective, together.
pub(super) const MAX_FRAME: usize = 64 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Hello = 1,
    Welcome = 2,
    Gather = 3,
    Scatter = 4,
    Fail = 5,
    Bye = 6,
    /// The sender lives; nothing else.
    Beat = 7,
}

impl Kind {
    fn parse(raw: u16) -> Option<Self> {
        [
            Self::Hello,
            Self::Welcome,
            Self::Gather,
            Self::Scatter,
            Self::Fail,
            Self::Bye,
            Self::Beat,
        ]
        .into_iter()
        .find(|k| *k as u16 == raw)
    }
}

pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) rank: u32,
    /// Counts collectives, so that two ranks in different calls notice.
    pub(super) sequence: u32,
    pub(super) body: Vec<u8>,
}

pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(s) => s.as_fd(),
            Self::Tcp(s) => s.as_fd(),
        }
    }
}

impl Stream {
    fn timeout(&self, left: Duration) -> io::Result<()> {
        // A zero time-out means "for ever" to the system, which is what must never happen.
        let left = Some(left.max(Duration::from_millis(1)));
        match self {
            Self::Unix(s) => s
                .set_read_timeout(left)
                .and_then(|()| s.set_write_timeout(left)),
            Self::Tcp(s) => s
                .set_read_timeout(left)
                .and_then(|()| s.set_write_timeout(left)),
        }
    }

    pub(crate) fn read_exact_by(
        &mut self,
        mut buf: &mut [u8],
        deadline: Instant,
    ) -> io::Result<()> {
        while !buf.is_empty() {
            self.timeout(deadline.saturating_duration_since(Instant::now()))?;
            let got = match self {
                Self::Unix(s) => s.read(buf),
                Self::Tcp(s) => s.read(buf),
            };
            match got {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "it closed its connection",
                    ));
                }
                Ok(n) => buf = &mut buf[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if timed_out(&e) && Instant::now() < deadline => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    pub(crate) fn write_all_by(&mut self, mut buf: &[u8], deadline: Instant) -> io::Result<()> {
        while !buf.is_empty() {
            self.timeout(deadline.saturating_duration_since(Instant::now()))?;
            let put = match self {
                Self::Unix(s) => s.write(buf),
                Self::Tcp(s) => s.write(buf),
            };
            match put {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::WriteZero,
                        "it closed its connection",
                    ));
                }
                Ok(n) => buf = &buf[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if timed_out(&e) && Instant::now() < deadline => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Reads and forgets until the other side hangs up, or until `deadline`.
    pub(crate) fn drain(&mut self, scrap: &mut [u8], deadline: Instant) {
        let _ = match self {
            Self::Unix(s) => s.shutdown(std::net::Shutdown::Write),
            Self::Tcp(s) => s.shutdown(std::net::Shutdown::Write),
        };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.timeout(left).is_err() {
                return;
            }
            let got = match self {
                Self::Unix(s) => s.read(scrap),
                Self::Tcp(s) => s.read(scrap),
            };
            match got {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    pub(super) fn send(&mut self, frame: &Frame, deadline: Instant) -> io::Result<()> {
        self.write_all_by(&frame.to_bytes(), deadline)
    }

    /// Reads one frame; `from` only names the sender in errors.
    pub(super) fn receive(
        &mut self,
        from: u32,
        what: &'static str,
        deadline: Instant,
    ) -> Result<Frame> {
        let lost = |e: io::Error| {
            if timed_out(&e) {
                BootstrapError::Missing {
                    what,
                    missing: vec![from],
                    world: 0,
                    after: Duration::ZERO,
                }
            } else {
                BootstrapError::Lost {
                    what,
                    rank: from,
                    reason: e.to_string(),
                }
            }
        };
        let mut head = [0u8; HEADER];
        self.read_exact_by(&mut head, deadline).map_err(lost)?;
        let (mut frame, len) = Frame::parse(&head, from, MAX_FRAME)?;
        frame.body = vec![0u8; len];
        self.read_exact_by(&mut frame.body, deadline)
            .map_err(lost)?;
        Ok(frame)
    }
}

impl Frame {
    pub(super) fn of(kind: Kind, rank: u32, sequence: u32, body: Vec<u8>) -> Self {
        Self {
            kind,
            rank,
            sequence,
            body,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.body.len());
        bytes.extend_from_slice(&MAGIC.to_le_bytes());
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(self.kind as u16).to_le_bytes());
        bytes.extend_from_slice(&self.rank.to_le_bytes());
        bytes.extend_from_slice(&self.sequence.to_le_bytes());
        bytes.extend_from_slice(&(self.body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// A frame of this header, without its body, and how many bytes that has. `from` only names the sender in errors.
    pub(super) fn parse(head: &[u8; HEADER], from: u32, limit: usize) -> Result<(Self, usize)> {
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let u32_at =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let protocol = |found: String, expected: String| BootstrapError::Protocol {
            rank: from,
            found,
            expected,
        };
        if u32_at(0) != MAGIC {
            return Err(protocol(
                format!("magic {:#010x}", u32_at(0)),
                format!("magic {MAGIC:#010x}"),
            ));
        }
        if u16_at(4) != VERSION {
            return Err(protocol(
                format!("version {}", u16_at(4)),
                format!("version {VERSION}"),
            ));
        }
        let kind = Kind::parse(u16_at(6)).ok_or_else(|| {
            protocol(
                format!("message kind {}", u16_at(6)),
                "kind 1 to 7".to_owned(),
            )
        })?;
        let len = u64::from(u32_at(16)) | u64::from(u32_at(20)) << 32;
        let len = usize::try_from(len)
            .ok()
            .filter(|&l| l <= limit)
            .ok_or_else(|| {
                protocol(
                    format!("a frame of {len} bytes"),
                    format!("at most {limit} bytes"),
                )
            })?;
        Ok((Self::of(kind, u32_at(8), u32_at(12), Vec::new()), len))
    }
}

pub(crate) fn timed_out(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Length-prefixed list: u32 count, then u32 length and bytes of each.
pub(super) fn pack(blobs: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 + blobs.iter().map(|b| 4 + b.len()).sum::<usize>());
    out.extend_from_slice(&(blobs.len() as u32).to_le_bytes());
    for blob in blobs {
        out.extend_from_slice(&(blob.len() as u32).to_le_bytes());
        out.extend_from_slice(blob);
    }
    out
}

pub(super) fn unpack(bytes: &[u8], from: u32) -> Result<Vec<Vec<u8>>> {
    let broken = || BootstrapError::Protocol {
        rank: from,
        found: "a list whose lengths do not add up".to_owned(),
        expected: "count, then length and bytes of each blob".to_owned(),
    };
    let take = |at: &[u8]| {
        at.first_chunk::<4>()
            .map(|b| u32::from_le_bytes(*b) as usize)
    };
    let count = take(bytes).ok_or_else(broken)?;
    let mut rest = &bytes[4..];
    let mut out = Vec::new();
    for _ in 0..count {
        let len = take(rest).ok_or_else(broken)?;
        let (blob, tail) = rest[4..].split_at_checked(len).ok_or_else(broken)?;
        out.push(blob.to_vec());
        rest = tail;
    }
    if rest.is_empty() {
        Ok(out)
    } else {
        Err(broken())
    }
}
