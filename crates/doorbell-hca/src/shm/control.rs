//! The caller's side of the link: [`Shm`] hands commands to the control thread and waits for answers with deadlines.
//!
//! Commands go through a queue and an eventfd, so nothing here touches a session; `thread.rs` is the only place that does.

use std::{
    collections::VecDeque,
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, eventfd};

use super::{
    Hooks, ShmConfig, TableExport,
    error::{Gone, Result, ShmError},
    export::Exports,
    handle::{ListenQueue, Peer, PeerCore, PeerId, ShmListener},
    mailbox::Mailbox,
    region::check_memfd,
    session::Offer,
    socket::{Listener, ShmAddress, Socket},
    thread,
};
use crate::record::dir::is_stopped;

/// What the control thread is asked to do.
pub(crate) enum Command {
    /// For peers that hear of the regions of one protection domain, or of all.
    Listen(u32, Listener, Arc<ListenQueue>, Option<u32>),
    Unlisten(u32),
    Connect(Socket, Arc<PeerCore>, Option<u32>),
    Close(PeerId),
    App(PeerId, Vec<u8>),
    Taken(PeerId),
    /// Offer a region to every session.
    Add(Offer, Arc<Latch>),
    /// A key is revoked; `gone`: its region is not offered any more.
    Revoke {
        ticket: u64,
        region: u32,
        gone: bool,
    },
    Shutdown,
}

/// The processes whose answers are still to come, one for each session.
#[derive(Default)]
pub(crate) struct Latch {
    /// `None` until the control thread has begun.
    left: Mutex<Option<Vec<i32>>>,
    changed: std::sync::Condvar,
}

impl Latch {
    pub(crate) fn begin(&self, pids: Vec<i32>) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = Some(pids);
        self.changed.notify_all();
    }

    pub(crate) fn answered(&self, pid: i32) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(left) = &mut *left
            && let Some(at) = left.iter().position(|one| *one == pid)
        {
            left.swap_remove(at);
        }
        self.changed.notify_all();
    }

    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(left, timeout, |left| {
            left.as_ref().is_none_or(|left| !left.is_empty())
        });
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl fmt::Display for Latch {
    /// Who has not answered, and whether it could.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left) = &*left else {
            return f.write_str("the control thread of this process");
        };
        for (n, pid) in left.iter().enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            write!(f, "{comma}process {pid}")?;
            if u32::try_from(*pid).is_ok_and(is_stopped) {
                write!(f, " (it is stopped; kill -CONT {pid} lets it go on)")?;
            }
        }
        Ok(())
    }
}

/// What callers and the control thread share.
pub(crate) struct Shared {
    pub(crate) config: ShmConfig,
    pub(crate) table: TableExport,
    pub(crate) nonce: u64,
    pub(crate) hooks: Arc<dyn Hooks>,
    pub(crate) exports: Mutex<Exports>,
    commands: Mutex<VecDeque<Command>>,
    wake: OwnedFd,
    next_listener: AtomicU32,
    down: AtomicBool,
}

impl Shared {
    pub(crate) fn command(&self, command: Command) {
        // After the thread has ended nobody takes commands; keep none, they hold descriptors.
        if self.down.load(Ordering::Acquire) {
            return;
        }
        self.commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(command);
        // The counter saturates (EAGAIN) only when the thread has long been told to wake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn take_commands(&self) -> VecDeque<Command> {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        std::mem::take(&mut self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub(crate) fn set_down(&self) {
        self.down.store(true, Ordering::Release);
        self.commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire)
    }

    /// The shared state of a new session over `socket`.
    pub(crate) fn new_peer(&self, socket: &Socket) -> Result<Arc<PeerCore>> {
        let credentials = socket
            .credentials()
            .map_err(|e| ShmError::os("getsockopt(SO_PEERCRED)", "session socket", e))?;
        let mailbox = Arc::new(Mailbox::new(self.config.slot_bits)?);
        // One count for all links of the process: the number is also the peer's in the process' locks.
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let id = PeerId(NEXT.fetch_add(1, Ordering::Relaxed));
        Ok(Arc::new(PeerCore::new(id, credentials, mailbox)))
    }
}

/// The shared memory link of one HCA, with its control thread. Dropping it says goodbye to every peer, within
/// [`ShmConfig::step`].
pub struct Shm {
    pub(crate) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Shm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shared memory link {:#018x}", self.shared.nonce)
    }
}

impl Shm {
    /// Starts the control thread.
    ///
    /// # Errors
    /// [`ShmError::Os`] when the system gives no eventfd or thread, [`ShmError::Descriptor`] when `table` is no sealed memfd.
    pub fn new(config: ShmConfig, table: TableExport, hooks: Arc<dyn Hooks>) -> Result<Self> {
        check_memfd(table.fd.as_fd(), table.len).map_err(ShmError::Descriptor)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| ShmError::os("eventfd", "control thread", e))?;
        let shared = Arc::new(Shared {
            config,
            table,
            nonce: rand::random(),
            hooks,
            exports: Mutex::default(),
            commands: Mutex::default(),
            wake,
            next_listener: AtomicU32::new(1),
            down: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new()
            .name("doorbell-shm".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || thread::run(&shared)
            })
            .map_err(|e| {
                ShmError::os(
                    "starting a thread",
                    "control thread",
                    crate::limits::thread(e),
                )
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Listens for peers.
    ///
    /// # Errors
    /// [`ShmError::InUse`] when somebody listens there (a stale socket file is replaced), [`ShmError::Address`],
    /// [`ShmError::Os`].
    pub fn listen(&self, address: &ShmAddress) -> Result<ShmListener> {
        self.listen_for(address, None)
    }

    /// As [`Shm::listen`], for peers that connect queue pairs of one protection domain only: they are not told of other
    /// domains' regions, and nobody waits for them because of these.
    ///
    /// # Errors
    /// Those of [`Shm::listen`].
    pub fn listen_for(&self, address: &ShmAddress, pd: Option<u32>) -> Result<ShmListener> {
        let listener = Listener::bind(address)?;
        if self.shared.is_down() {
            return Err(ShmError::Down);
        }
        let id = self.shared.next_listener.fetch_add(1, Ordering::Relaxed);
        let queue = Arc::new(ListenQueue::default());
        self.shared
            .command(Command::Listen(id, listener, Arc::clone(&queue), pd));
        Ok(ShmListener {
            id,
            address: address.clone(),
            queue,
            shared: Arc::clone(&self.shared),
        })
    }

    /// Connects to a listener, waiting for it to appear.
    ///
    /// # Errors
    /// [`ShmError::Deadline`] when nobody listens or the handshake does not end in time, [`ShmError::Gone`] with the reason
    /// when either side refuses.
    pub fn connect(&self, address: &ShmAddress, timeout: Duration) -> Result<Peer> {
        self.connect_while(address, None, timeout, &mut || true)
    }

    /// As [`Shm::connect`], as long as `goes_on` says so: it is asked all the time. `pd` as for [`Shm::listen_for`].
    ///
    /// # Errors
    /// Those of [`Shm::connect`].
    pub fn connect_while(
        &self,
        address: &ShmAddress,
        pd: Option<u32>,
        timeout: Duration,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Peer> {
        if self.shared.is_down() {
            return Err(ShmError::Down);
        }
        let deadline = crate::deadline(timeout);
        let socket = connect_until(address, deadline, goes_on)?;
        let core = self.shared.new_peer(&socket)?;
        let peer = Peer::new(Arc::clone(&core), Arc::clone(&self.shared));
        self.shared
            .command(Command::Connect(socket, Arc::clone(&core), pd));
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match core.wait_up(left.min(ASK)) {
                Err(ShmError::Deadline { .. }) if left > ASK && goes_on() => {}
                Err(ShmError::Deadline { what, why, .. }) => {
                    return Err(ShmError::Deadline {
                        what,
                        after: timeout,
                        why,
                    });
                }
                other => return other.map(|()| peer),
            }
        }
    }
}

/// How often a caller is asked while it waits for an answer.
pub(crate) const ASK: Duration = Duration::from_millis(50);

/// The listener may be started a moment later than we are: retry while it is not there, or its backlog is full.
fn connect_until(
    address: &ShmAddress,
    deadline: Instant,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<Socket> {
    let mut pause = Duration::from_millis(1);
    loop {
        match Socket::connect(address) {
            Err(ShmError::Os { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::ConnectionRefused
                        | io::ErrorKind::WouldBlock
                ) && Instant::now() + pause < deadline
                    && goes_on() =>
            {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(50));
            }
            other => return other,
        }
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.shared.command(Command::Shutdown);
        if let Some(thread) = self.thread.take() {
            // Bounded: the thread gives its peers `step` to say goodbye and then ends. A QP's link may be dropped by the
            // thread itself, which must not wait for itself.
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!("the shared memory control thread had panicked");
            }
        }
    }
}

impl From<Gone> for ShmError {
    fn from(gone: Gone) -> Self {
        Self::Gone(gone)
    }
}
