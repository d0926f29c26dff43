//! What users hold: a connected [`Peer`] and a [`ShmListener`].
//!
//! The control thread writes their state under a mutex and signals; callers wait on the condition with a deadline.
//! Dropping the last handle of a peer (QPs connected to it hold one too) closes the session in an orderly way.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use super::{
    control::{Command, Shared},
    error::{Gone, Result, ShmError},
    mailbox::Mailbox,
    peer::PeerView,
    proto::MAX_APP,
    session::APP_WINDOW,
    socket::{Credentials, ShmAddress},
};

/// Names a session within its process; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u32);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer {}", self.0)
    }
}

#[derive(Default)]
pub(crate) struct PeerState {
    pub(crate) up: bool,
    pub(crate) gone: Option<Gone>,
    /// Nothing of the peer is mapped any more.
    pub(crate) finished: bool,
    pub(crate) inbox: VecDeque<Vec<u8>>,
    pub(crate) credits: u32,
}

impl PeerState {
    /// It is over before it was up.
    pub(crate) fn end(&mut self, gone: Gone) {
        self.gone = Some(gone);
        self.finished = true;
    }
}

/// One session, as the control thread, the handles and the engines share it.
pub(crate) struct PeerCore {
    pub(crate) id: PeerId,
    pub(crate) credentials: Credentials,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) view: OnceLock<Arc<PeerView>>,
    state: Mutex<PeerState>,
    changed: Condvar,
}

impl PeerCore {
    pub(crate) fn new(id: PeerId, credentials: Credentials, mailbox: Arc<Mailbox>) -> Self {
        let state = PeerState {
            credits: APP_WINDOW,
            ..PeerState::default()
        };
        Self {
            id,
            credentials,
            mailbox,
            view: OnceLock::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PeerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Was the session ever up?
    pub(crate) fn came_up(&self) -> bool {
        self.lock().up
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut PeerState)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `done` answers.
    fn wait<T>(
        &self,
        what: &'static str,
        timeout: Duration,
        mut done: impl FnMut(&mut PeerState) -> Option<Result<T>>,
    ) -> Result<T> {
        let deadline = crate::deadline(timeout);
        let mut state = self.lock();
        loop {
            if let Some(result) = done(&mut state) {
                return result;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ShmError::Deadline {
                    what,
                    after: timeout,
                    why: None,
                });
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    pub(crate) fn wait_up(&self, timeout: Duration) -> Result<()> {
        self.wait(
            "the handshake with a shared memory peer",
            timeout,
            |s| match (&s.gone, s.up) {
                (Some(gone), _) => Some(Err(ShmError::Gone(gone.clone()))),
                (None, up) => up.then_some(Ok(())),
            },
        )
    }
}

/// Closes the session when the last handle goes.
struct Handle {
    core: Arc<PeerCore>,
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.command(Command::Close(self.core.id));
    }
}

/// A connected process. Clones name the same session, which closes when the last one is dropped.
#[derive(Clone)]
pub struct Peer {
    handle: Arc<Handle>,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.id(), self.credentials())
    }
}

impl Peer {
    pub(crate) fn new(core: Arc<PeerCore>, shared: Arc<Shared>) -> Self {
        Self {
            handle: Arc::new(Handle { core, shared }),
        }
    }

    pub(crate) fn core(&self) -> &Arc<PeerCore> {
        &self.handle.core
    }

    /// The session's name in this HCA.
    pub fn id(&self) -> PeerId {
        self.core().id
    }

    /// Process and user at the other end, as the kernel recorded them.
    pub fn credentials(&self) -> Credentials {
        self.core().credentials
    }

    /// Why the session is over, if it is.
    pub fn gone(&self) -> Option<Gone> {
        self.core().lock().gone.clone()
    }

    /// Sends bytes to the peer's [`Peer::recv`]: at most [`MAX_APP`] bytes a message, in order. For exchanging keys and
    /// QP numbers, not for payload.
    ///
    /// # Errors
    /// [`ShmError::Limit`] for a longer message, [`ShmError::Gone`], or [`ShmError::Deadline`] when the peer does not take
    /// its messages.
    pub fn send(&self, bytes: &[u8], timeout: Duration) -> Result<()> {
        if bytes.len() > MAX_APP {
            return Err(ShmError::Limit {
                what: "bytes of a message to a peer",
                limit: MAX_APP,
                remedy: "send several messages",
            });
        }
        self.core()
            .wait("sending to a shared memory peer", timeout, |s| {
                if let Some(gone) = &s.gone {
                    return Some(Err(ShmError::Gone(gone.clone())));
                }
                s.credits = s.credits.checked_sub(1)?;
                // Inside the lock, so that messages leave in the order in which they took their credits.
                self.handle
                    .shared
                    .command(Command::App(self.id(), bytes.to_vec()));
                Some(Ok(()))
            })
    }

    /// Takes the peer's next message. Messages that came before the peer went are still delivered.
    ///
    /// # Errors
    /// [`ShmError::Gone`] or [`ShmError::Deadline`].
    pub fn recv(&self, timeout: Duration) -> Result<Vec<u8>> {
        let bytes =
            self.core()
                .wait(
                    "receiving from a shared memory peer",
                    timeout,
                    |s| match s.inbox.pop_front() {
                        Some(bytes) => Some(Ok(bytes)),
                        None => s
                            .gone
                            .as_ref()
                            .map(|gone| Err(ShmError::Gone(gone.clone()))),
                    },
                )?;
        self.handle.shared.command(Command::Taken(self.id()));
        Ok(bytes)
    }

    /// Closes in an orderly way and waits until nothing of the peer is mapped here and the peer has let go of what is ours.
    /// QPs connected to it fail with `PEER_DEAD`.
    ///
    /// # Errors
    /// [`ShmError::Deadline`].
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.handle.shared.command(Command::Close(self.id()));
        self.core()
            .wait("closing a shared memory session", timeout, |s| {
                s.finished.then_some(Ok(()))
            })
    }
}

#[derive(Default)]
struct ListenState {
    ready: VecDeque<Peer>,
    closed: Option<String>,
    /// Why the latest of those that came did not come up.
    trouble: Option<String>,
}

/// Sessions that came up at a listener and wait for [`ShmListener::accept`].
#[derive(Default)]
pub(crate) struct ListenQueue {
    state: Mutex<ListenState>,
    changed: Condvar,
}

impl ListenQueue {
    /// Sessions that may wait to be accepted.
    pub(crate) const DEPTH: usize = 64;

    /// `false`: too many wait.
    pub(crate) fn push(&self, peer: Peer) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.ready.len() >= Self::DEPTH || state.closed.is_some() {
            return false;
        }
        state.ready.push_back(peer);
        state.trouble = None;
        self.changed.notify_all();
        true
    }

    /// Somebody came, and could not be accepted: who waits in vain is to know.
    pub(crate) fn note(&self, trouble: String) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.trouble = Some(trouble);
    }

    pub(crate) fn close(&self, why: String) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = Some(why);
        self.changed.notify_all();
    }
}

/// Accepts sessions at one address. Dropping it stops listening; accepted peers stay.
pub struct ShmListener {
    pub(crate) id: u32,
    pub(crate) address: ShmAddress,
    pub(crate) queue: Arc<ListenQueue>,
    pub(crate) shared: Arc<Shared>,
}

impl fmt::Debug for ShmListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shared memory listener at {}", self.address)
    }
}

impl ShmListener {
    /// Where it listens.
    pub fn address(&self) -> &ShmAddress {
        &self.address
    }

    /// What became of who came last, if that did not come up.
    pub fn trouble(&self) -> Option<String> {
        let state = &self.queue.state;
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.trouble.clone()
    }

    /// The next peer whose handshake is complete.
    ///
    /// # Errors
    /// [`ShmError::Deadline`], with what became of who came last if that did not come up, or [`ShmError::Down`] when the control thread is gone.
    pub fn accept(&self, timeout: Duration) -> Result<Peer> {
        let deadline = crate::deadline(timeout);
        let mut state = self
            .queue
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(peer) = state.ready.pop_front() {
                return Ok(peer);
            }
            if state.closed.is_some() {
                return Err(ShmError::Down);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ShmError::Deadline {
                    what: "accepting a shared memory peer",
                    after: timeout,
                    why: state.trouble.clone(),
                });
            }
            state = self
                .queue
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for ShmListener {
    fn drop(&mut self) {
        self.shared.command(Command::Unlisten(self.id));
        // Peers that nobody accepted are dropped outside the lock: dropping them sends commands.
        let waiting = std::mem::take(
            &mut self
                .queue
                .state
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .ready,
        );
        drop(waiting);
    }
}
