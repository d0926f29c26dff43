//! The thread behind a [`Channel`](super::Channel): it reads what comes, and says ten times a second that this process runs.
//!
//! That a process was stopped, or its host lost, does not show on a TCP connection of which nobody wants anything; that its
//! signs of life stay away does, after as long as whoever waits for it wants to wait. The thread also empties the socket, so
//! that the end of a run, or the reason that the other side gives for one, is known at once.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::Connected;
use super::error::ConnectError;
use super::frame::{HEADER, Head, Kind, MAX_MESSAGE, Wrong, emit, read_refusal};
use crate::bootstrap::frame::Stream;

/// Between two signs of life.
const BEAT: Duration = Duration::from_millis(100);
/// A silence shorter than this says nothing: a busy machine has those.
const LEAST: Duration = Duration::from_secs(1);
/// Bytes that may wait to be taken before no more are read.
const ROOM: usize = 2 * MAX_MESSAGE;
const CHUNK: usize = 64 << 10;
/// How long what was said last may take to leave.
const LINGER: Duration = Duration::from_millis(200);

pub(super) struct Keeper {
    shared: Arc<Shared>,
}

struct Shared {
    peer: String,
    stream: Stream,
    /// What could not be sent yet of a frame that was begun.
    rest: Mutex<Vec<u8>>,
    inbox: Mutex<Inbox>,
    changed: Condvar,
    leave: AtomicBool,
    /// Readable once the thread is to leave.
    wake: OwnedFd,
}

struct Inbox {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
    /// When something came last, and up to when it is known that nothing did.
    heard: Instant,
    looked: Instant,
    end: Option<End>,
    /// The thread has ended.
    gone: bool,
}

/// How a connection ended.
enum End {
    Closed(String),
    Said(String),
    Wrong(Wrong),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Keeper {
    /// Takes over a connection on which the greetings have been said.
    pub(super) fn start(stream: Stream, peer: String) -> io::Result<Self> {
        match &stream {
            Stream::Unix(s) => s.set_nonblocking(true)?,
            Stream::Tcp(s) => s.set_nonblocking(true)?,
        }
        let now = Instant::now();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared {
            peer,
            stream,
            rest: Mutex::default(),
            inbox: Mutex::new(Inbox {
                messages: VecDeque::new(),
                bytes: 0,
                heard: now,
                looked: now,
                end: None,
                gone: false,
            }),
            changed: Condvar::new(),
            leave: AtomicBool::new(false),
            wake,
        });
        let kept = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("doorbell-line".to_owned())
            .stack_size(128 << 10)
            .spawn(move || {
                kept.keep();
                lock(&kept.inbox).gone = true;
                kept.changed.notify_all();
            })
            .map_err(doorbell_hca::limits::thread)?;
        Ok(Self { shared })
    }

    pub(super) fn peer(&self) -> &str {
        &self.shared.peer
    }

    /// Sends a frame by `deadline`.
    pub(super) fn send(
        &self,
        kind: Kind,
        body: &[u8],
        step: &'static str,
        timeout: Duration,
    ) -> Connected<()> {
        let deadline = doorbell_hca::deadline(timeout);
        let shared = &*self.shared;
        let mut rest = lock(&shared.rest);
        rest.extend_from_slice(&emit(kind, body));
        loop {
            match shared.push(&mut rest) {
                Ok(()) if rest.is_empty() => return Ok(()),
                Ok(()) => {}
                // Why it ended is better said by what came before.
                Err(e) => {
                    return Err(self.trouble(Duration::MAX).unwrap_or(ConnectError::Lost {
                        peer: shared.peer.clone(),
                        step,
                        reason: e.to_string(),
                    }));
                }
            }
            if let Some(trouble) = self.trouble(timeout) {
                return Err(trouble);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.late(step, timeout));
            }
            shared.ready(PollFlags::OUT, left.min(BEAT));
        }
    }

    /// The next message.
    pub(super) fn next(&self, step: &'static str, timeout: Duration) -> Connected<Vec<u8>> {
        let deadline = doorbell_hca::deadline(timeout);
        let mut inbox = lock(&self.shared.inbox);
        loop {
            if let Some(message) = inbox.messages.pop_front() {
                inbox.bytes -= message.len();
                return Ok(message);
            }
            if let Some(trouble) = inbox.trouble(&self.shared.peer, step, timeout) {
                return Err(trouble);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(inbox);
                return Err(self.late(step, timeout));
            }
            inbox = self.shared.nap(inbox, left.min(BEAT));
        }
    }

    fn late(&self, step: &'static str, after: Duration) -> ConnectError {
        self.trouble(LEAST).unwrap_or(ConnectError::TimedOut {
            peer: self.shared.peer.clone(),
            step,
            after,
            remedy: "it gives signs of life, so it is busy: allow more time",
        })
    }

    /// Whether there is a message, or the end, within `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let deadline = doorbell_hca::deadline(timeout);
        let mut inbox = lock(&self.shared.inbox);
        loop {
            if !inbox.messages.is_empty() || inbox.end.is_some() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            inbox = self.shared.nap(inbox, left);
        }
    }

    /// Nothing more will come.
    pub(super) fn is_closed(&self) -> bool {
        let inbox = lock(&self.shared.inbox);
        inbox.messages.is_empty() && inbox.end.is_some()
    }

    pub(super) fn silence(&self) -> Duration {
        lock(&self.shared.inbox).silent()
    }

    /// How the connection ended, or that nothing came for longer than `patience`.
    pub(super) fn trouble(&self, patience: Duration) -> Option<ConnectError> {
        lock(&self.shared.inbox).trouble(&self.shared.peer, "go on", patience)
    }
}

impl Drop for Keeper {
    /// The thread sees to it that what was said last arrives.
    fn drop(&mut self) {
        self.shared.leave.store(true, Ordering::Release);
        // A thread that is not woken looks ten times a second.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        // The other side may have hung up already.
        let _ = shutdown(&self.shared.stream, Shutdown::Write);
        let until = Instant::now() + LINGER + BEAT;
        let mut inbox = lock(&self.shared.inbox);
        // In a forked child there is no such thread, so the wait is bounded.
        while !inbox.gone && Instant::now() < until {
            inbox = self.shared.nap(inbox, BEAT);
        }
    }
}

impl Inbox {
    fn silent(&self) -> Duration {
        self.looked.saturating_duration_since(self.heard)
    }

    fn trouble(&self, peer: &str, step: &'static str, patience: Duration) -> Option<ConnectError> {
        let peer = || peer.to_owned();
        Some(match &self.end {
            Some(End::Closed(reason)) => ConnectError::Lost {
                peer: peer(),
                step,
                reason: reason.clone(),
            },
            Some(End::Said(reason)) => ConnectError::Ended {
                peer: peer(),
                reason: reason.clone(),
            },
            Some(End::Wrong(wrong)) => wrong.clone().from(&peer()),
            None if self.silent() >= patience.max(LEAST) => ConnectError::Silent {
                peer: peer(),
                silent: self.silent(),
            },
            None => return None,
        })
    }
}

impl Shared {
    fn nap<'a>(&self, inbox: MutexGuard<'a, Inbox>, time: Duration) -> MutexGuard<'a, Inbox> {
        let woken = self.changed.wait_timeout(inbox, time);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until the socket can be read from or written to, or the thread is to leave.
    fn ready(&self, what: PollFlags, time: Duration) -> bool {
        let mut fds = [
            PollFd::new(&self.stream, what),
            PollFd::new(&self.wake, PollFlags::IN),
        ];
        let time = Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        };
        // An error means that reading will say what it is.
        !matches!(poll(&mut fds, Some(&time)), Ok(0))
    }

    /// Sends as much as the socket takes.
    fn push(&self, rest: &mut Vec<u8>) -> io::Result<()> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let mut sent = 0;
        let result = loop {
            if sent == rest.len() {
                break Ok(());
            }
            match send(&self.stream, &rest[sent..], flags) {
                Ok(n) => sent += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break Ok(()),
                Err(e) => break Err(e.into()),
            }
        };
        rest.drain(..sent);
        result
    }

    fn beat(&self) {
        // Whoever is sending gives a sign of life by that.
        let Ok(mut rest) = self.rest.try_lock() else {
            return;
        };
        if rest.is_empty() {
            rest.extend_from_slice(&emit(Kind::Beat, &[]));
        }
        // That the connection is gone shows when it is read.
        let _ = self.push(&mut rest);
    }

    fn keep(&self) {
        let mut came = Vec::new();
        let mut chunk = vec![0; CHUNK];
        let mut next = Instant::now();
        let mut leaving = None;
        loop {
            let now = Instant::now();
            if leaving.is_none() && self.leave.load(Ordering::Acquire) {
                leaving = Some(now + LINGER);
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            }
            match leaving {
                Some(until) if now >= until => return,
                // What comes now is of no interest, but closing over unread bytes would take away what was said last.
                Some(_) => came.clear(),
                None if now >= next => {
                    self.beat();
                    next = now + BEAT;
                }
                None => {}
            }
            if leaving.is_none() && lock(&self.inbox).bytes > ROOM {
                // It is this side that is slow now.
                std::thread::sleep(Duration::from_millis(1));
                let mut inbox = lock(&self.inbox);
                (inbox.heard, inbox.looked) = (now, now);
                continue;
            }
            let slice = match leaving {
                Some(_) => Duration::from_millis(5),
                None => next.saturating_duration_since(now),
            };
            if !self.ready(PollFlags::IN, slice) {
                lock(&self.inbox).looked = Instant::now();
                continue;
            }
            let end = match self.read(&mut chunk) {
                Ok(0) => Some(End::Closed("it closed its connection".to_owned())),
                Ok(n) => {
                    came.extend_from_slice(&chunk[..n]);
                    let now = Instant::now();
                    let mut inbox = lock(&self.inbox);
                    (inbox.heard, inbox.looked) = (now, now);
                    match leaving {
                        Some(_) => None,
                        None => take(&mut came, &mut inbox),
                    }
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => None,
                Err(e) => Some(End::Closed(io::Error::from(e).to_string())),
            };
            let ended = end.is_some();
            if ended {
                lock(&self.inbox).end = end;
            }
            self.changed.notify_all();
            if ended {
                return;
            }
        }
    }

    fn read(&self, chunk: &mut [u8]) -> Result<usize, rustix::io::Errno> {
        recv(&self.stream, chunk, RecvFlags::DONTWAIT).map(|(n, _)| n)
    }
}

/// Takes whole frames off the front of what came.
fn take(came: &mut Vec<u8>, inbox: &mut Inbox) -> Option<End> {
    let mut at = 0;
    let end = loop {
        let Some(head) = came[at..].first_chunk::<HEADER>() else {
            break None;
        };
        let head = match Head::parse(head, MAX_MESSAGE) {
            Ok(head) => head,
            Err(wrong) => break Some(End::Wrong(wrong)),
        };
        let Some(body) = came[at + HEADER..].get(..head.len) else {
            break None;
        };
        match head.kind {
            Kind::Beat => {}
            Kind::Data => {
                inbox.messages.push_back(body.to_vec());
                inbox.bytes += body.len();
            }
            Kind::Refuse => break Some(End::Said(read_refusal(body).text)),
            Kind::Hello | Kind::Welcome => {
                break Some(End::Wrong(Wrong::Protocol {
                    found: format!("{:?}", head.kind),
                    expected: "a message".to_owned(),
                }));
            }
        }
        at += HEADER + head.len;
    };
    came.drain(..at);
    end
}
