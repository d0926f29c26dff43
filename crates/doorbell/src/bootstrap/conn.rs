//! A connection between rank 0 and another rank, whoever looks at it: frames are taken as they come, whole, and kept until somebody wants them.
//!
//! So a frame that nobody waits for does not hide the one behind it, and who waits in a collective sees everything that a look between collectives would.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use doorbell_hca::shm::Credentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::Result;
use super::frame::{Frame, HEADER, Kind, MAX_FRAME, Stream};

/// Frames that are kept at most: one of a collective that this rank has not come to, and the last words of its sender.
const KEPT: usize = 8;
/// Bytes that one look takes at a time.
const PIECE: usize = 64 << 10;

pub(super) struct Conn {
    stream: Stream,
    /// The process at the other end, where the system says.
    pid: Option<u32>,
    /// Ready once that process has ended, where the system gives one: what it has forked may hold the connection open beyond its death.
    life: Option<OwnedFd>,
    /// What has come of the next frame.
    partial: Vec<u8>,
    inbox: VecDeque<Frame>,
    /// Whole frames, or what is left of them, that the socket had no room for: what is behind another one waits for it.
    outbox: Vec<u8>,
    /// How much of it has been written.
    written: usize,
    /// When something came last; `None` until the first beat.
    heard: Option<Instant>,
    /// How the connection ended.
    ended: Option<String>,
    /// Bytes of a frame's body at most.
    limit: usize,
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Conn {
    pub(super) fn new(stream: Stream) -> Self {
        let peer = match &stream {
            Stream::Unix(s) => Credentials::of(s).ok(),
            Stream::Tcp(_) => None,
        };
        Self {
            stream,
            pid: peer.and_then(|peer| peer.process()),
            life: peer.and_then(|peer| peer.pidfd()),
            partial: Vec::new(),
            inbox: VecDeque::new(),
            outbox: Vec::new(),
            written: 0,
            heard: None,
            ended: None,
            limit: MAX_FRAME,
        }
    }

    /// Of somebody who may not make us allocate more than so much, until it is [let in](Self::let_in).
    pub(super) fn limited(stream: Stream, limit: usize) -> Self {
        Self {
            limit,
            ..Self::new(stream)
        }
    }

    /// It is one of the ranks.
    pub(super) fn let_in(&mut self) {
        self.limit = MAX_FRAME;
    }

    /// The socket, for another protocol. What came and was not taken is lost.
    pub(super) fn into_stream(self) -> Stream {
        self.stream
    }

    /// Sends a frame, as far as the socket has room; the rest goes with the next [`Conn::flush`].
    pub(super) fn send(&mut self, frame: &Frame) {
        self.outbox.extend_from_slice(&frame.to_bytes());
        self.flush();
    }

    /// Says that this rank lives, unless something else is on its way and says so.
    pub(super) fn beat(&mut self, rank: u32) {
        if self.outbox.is_empty() {
            self.send(&Frame::of(Kind::Beat, rank, 0, Vec::new()));
        }
    }

    /// Writes what waits, without waiting itself.
    pub(super) fn flush(&mut self) {
        while self.is_behind() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.stream, &self.outbox[self.written..], flags) {
                Ok(sent) => self.written += sent,
                Err(Errno::INTR) => {}
                // A full socket has room later; one that has ended is found by who reads, with what the other side said before.
                Err(_) => return,
            }
        }
        (self.outbox, self.written) = (Vec::new(), 0);
    }

    /// Is there something that the socket had no room for?
    pub(super) fn is_behind(&self) -> bool {
        self.written < self.outbox.len()
    }

    /// Takes what came, without waiting, until it has `most` frames: who hands the socket on must not take more than what it waits for.
    pub(super) fn look(&mut self, from: u32, most: usize) -> Result<()> {
        // Asked first: all that it sent is there to be read by then.
        let over = self.life.as_ref().is_some_and(has_ended);
        while self.ended.is_none() && self.inbox.len() < most.min(KEPT) {
            let need = match self.partial.first_chunk::<HEADER>() {
                None => HEADER,
                Some(head) => HEADER + Frame::parse(head, from, self.limit)?.1,
            };
            if self.partial.len() < need {
                let old = self.partial.len();
                self.partial.resize(need.min(old + PIECE), 0);
                let got = recv(&self.stream, &mut self.partial[old..], RecvFlags::DONTWAIT);
                let count = got.as_ref().map_or(0, |(count, _)| *count);
                self.partial.truncate(old + count);
                match got {
                    Ok((0, _)) => self.ended = Some("it closed its connection".to_owned()),
                    // A part of a long frame says as much as a beat.
                    Ok(_) => self.heard = self.heard.map(|_| Instant::now()),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => {
                        if let (true, Some(pid)) = (over, self.pid) {
                            self.ended = Some(format!("its process {pid} ended"));
                        }
                        return Ok(());
                    }
                    Err(e) => self.ended = Some(io::Error::from(e).to_string()),
                }
                continue;
            }
            let bytes = std::mem::take(&mut self.partial);
            if let Some(head) = bytes.first_chunk::<HEADER>() {
                let (mut frame, _) = Frame::parse(head, from, self.limit)?;
                if frame.kind == Kind::Beat {
                    self.heard = Some(Instant::now());
                } else {
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

fn has_ended(life: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(life, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Waits until something came from one of them, or there is room for what waits to be written, for `time` at most.
pub(super) fn wait<'a>(all: impl Iterator<Item = &'a Conn>, time: Duration) {
    let mut fds: Vec<_> = all
        .map(|conn| {
            let flags = match conn.is_behind() {
                true => PollFlags::IN | PollFlags::OUT,
                false => PollFlags::IN,
            };
            PollFd::new(conn, flags)
        })
        .collect();
    let time = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    // Interrupted or not: the caller looks.
    let _ = poll(&mut fds, Some(&time));
}

/// Sends the same to all of them, and gives it until `deadline` to leave: one that takes nothing keeps it from nobody else.
pub(super) fn send_all<'a>(
    all: impl Iterator<Item = &'a mut Conn>,
    frame: &Frame,
    deadline: Instant,
) {
    let mut behind: Vec<_> = all.collect();
    for conn in &mut behind {
        conn.send(frame);
    }
    loop {
        behind.retain(|conn| conn.is_behind());
        let left = deadline.saturating_duration_since(Instant::now());
        if behind.is_empty() || left.is_zero() {
            return;
        }
        // Who has ended is always ready, and takes nothing.
        std::thread::sleep(left.min(Duration::from_millis(2)));
        behind.iter_mut().for_each(|conn| conn.flush());
    }
}
