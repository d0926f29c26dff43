//! A connection between rank 0 and another rank, whoever looks at it: frames are taken as they come, whole, and kept until somebody wants them.
//!
//! So a frame that nobody waits for does not hide the one behind it, and who waits in a collective sees everything that a look between collectives would.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::frame::{Frame, HEADER, Kind, MAX_FRAME, Stream};
use super::{BootstrapError, Result};

/// Frames that are kept at most: one of a collective that this rank has not come to, and the last words of its sender.
const KEPT: usize = 8;
/// Bytes that one look takes at a time.
const PIECE: usize = 64 << 10;

pub(super) struct Conn {
    stream: Stream,
    /// The process at the other end, where the system says.
    pid: Option<u32>,
    /// What has come of the next frame.
    partial: Vec<u8>,
    inbox: VecDeque<Frame>,
    /// What is left of a beat that the socket had no room for.
    outbox: Vec<u8>,
    /// When something came last; `None` until the first beat.
    heard: Option<Instant>,
    /// How the connection ended.
    ended: Option<String>,
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Conn {
    pub(super) fn new(stream: Stream) -> Self {
        let pid = match &stream {
            Stream::Unix(s) => rustix::net::sockopt::socket_peercred(s).ok(),
            Stream::Tcp(_) => None,
        };
        Self {
            stream,
            pid: pid.map(|peer| peer.pid.as_raw_nonzero().get().unsigned_abs()),
            partial: Vec::new(),
            inbox: VecDeque::new(),
            outbox: Vec::new(),
            heard: None,
            ended: None,
        }
    }

    /// The socket, for another protocol. What came and was not taken is lost.
    pub(super) fn into_stream(self) -> Stream {
        self.stream
    }

    pub(super) fn send(&mut self, frame: &Frame, deadline: Instant) -> io::Result<()> {
        let rest = std::mem::take(&mut self.outbox);
        self.stream.write_all_by(&rest, deadline)?;
        self.stream.send(frame, deadline)
    }

    /// Says that this rank lives, if the socket has room.
    pub(super) fn beat(&mut self, rank: u32) {
        if self.outbox.is_empty() {
            self.outbox = Frame::of(Kind::Beat, rank, 0, Vec::new()).to_bytes();
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        // A full socket has room later; one that has ended is found by who reads.
        if let Ok(sent) = send(&self.stream, &self.outbox, flags) {
            self.outbox.drain(..sent);
        }
    }

    /// Takes what came, without waiting, until it has `most` frames: who hands the socket on must not take more than what it waits for.
    pub(super) fn look(&mut self, from: u32, most: usize) -> Result<()> {
        while self.ended.is_none() && self.inbox.len() < most.min(KEPT) {
            let need = match self.partial.first_chunk::<HEADER>() {
                None => HEADER,
                Some(head) => HEADER + Frame::parse(head, from, MAX_FRAME)?.1,
            };
            if self.partial.len() < need {
                let old = self.partial.len();
                self.partial.resize(need.min(old + PIECE), 0);
                let got = recv(&self.stream, &mut self.partial[old..], RecvFlags::DONTWAIT);
                let count = got.as_ref().map_or(0, |(count, _)| *count);
                self.partial.truncate(old + count);
                match got {
                    Ok((0, _)) => self.ended = Some("it closed its connection".to_owned()),
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(e) => self.ended = Some(io::Error::from(e).to_string()),
                }
                continue;
            }
            let bytes = std::mem::take(&mut self.partial);
            if let Some(head) = bytes.first_chunk::<HEADER>() {
                let (mut frame, _) = Frame::parse(head, from, MAX_FRAME)?;
                if frame.kind == Kind::Beat || self.heard.is_some() {
                    self.heard = Some(Instant::now());
                }
                if frame.kind != Kind::Beat {
                    frame.body = bytes[HEADER..].to_vec();
                    self.inbox.push_back(frame);
                }
            }
        }
        Ok(())
    }

    /// The first of the frames that came and are wanted.
    pub(super) fn take(&mut self, wanted: impl Fn(Kind) -> bool) -> Option<Frame> {
        let at = self.inbox.iter().position(|frame| wanted(frame.kind))?;
        self.inbox.remove(at)
    }

    /// How it ended, if it has and everything that came before was taken off the socket.
    pub(super) fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// This rank itself stood still: nobody is to blame for that time.
    pub(super) fn excuse(&mut self, now: Instant) {
        self.heard = self.heard.map(|_| now);
    }

    /// Has the other side, which does beat, not been heard of for that long? Then for how long, and what is known of why. Said once.
    pub(super) fn is_silent(
        &mut self,
        now: Instant,
        silence: Duration,
    ) -> Option<(Duration, String)> {
        let after = now.saturating_duration_since(self.heard?);
        if after < silence {
            return None;
        }
        let why = match (
            self.pid,
            self.pid.and_then(doorbell_hca::record::dir::state),
        ) {
            // Somebody looks at it.
            (_, Some(b't')) => {
                self.heard = Some(now);
                return None;
            }
            (Some(pid), Some(b'T')) => {
                format!("its process {pid} is stopped (kill -CONT {pid} lets it go on)")
            }
            (Some(pid), _) => format!("its process {pid} stands still"),
            (None, _) => {
                "its process stands still, or its host or the network between is gone".to_owned()
            }
        };
        self.heard = None;
        Some((after, why))
    }
}

/// Waits until something came from one of them, for `time` at most.
pub(super) fn wait<'a>(all: impl Iterator<Item = &'a Conn>, time: Duration) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds: Vec<_> = all.map(|conn| PollFd::new(conn, PollFlags::IN)).collect();
    let time = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    // Interrupted or not: the caller looks.
    let _ = poll(&mut fds, Some(&time));
}

/// What `e` says of a rank that could not be written to.
pub(super) fn unwritten(what: &'static str, rank: u32, e: &io::Error) -> BootstrapError {
    BootstrapError::Lost {
        what,
        rank,
        reason: e.to_string(),
    }
}
