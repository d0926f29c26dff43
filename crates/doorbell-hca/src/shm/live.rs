//! One live session of the control thread: its state machine, its socket, and what it does to this process.

use std::{
    collections::{BTreeSet, HashMap},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use super::{
    control::{Latch, Shared},
    error::{Gone, Refusal, RefusalCode},
    handle::{PeerCore, PeerId},
    peer::{PeerRegion, PeerView},
    proto::{Hello, RegionKind},
    region::Mapping,
    session::{APP_WINDOW, Answered, Session, World},
    socket::{Received, Socket},
};

/// Messages taken from one session before the others have their turn.
pub(super) const BATCH: usize = 16;

/// A session with its socket.
pub(super) struct Live {
    pub(super) session: Session,
    pub(super) socket: Socket,
    pub(super) core: Arc<PeerCore>,
    pub(super) pidfd: Option<OwnedFd>,
    /// Taken out of the engines' sight, waiting for a grace period.
    pub(super) hidden: HashMap<u32, Box<PeerRegion>>,
    /// Where it was accepted.
    pub(super) listener: Option<u32>,
    /// Registrations that wait for this peer.
    pub(super) latches: Vec<(u32, Arc<Latch>)>,
    /// Regions of ours that this peer has been sent.
    pub(super) offered: BTreeSet<u32>,
    /// The protection domain whose regions it is offered; `None`: all.
    pub(super) pd: Option<u32>,
    pub(super) told: bool,
}

/// What sessions did, to be acted on once their borrow has ended.
pub(super) enum Event {
    Up(PeerId),
    Answered(PeerId, Answered),
}

impl Live {
    /// Nobody waits for this peer any more.
    pub(super) fn answer_all(&self) {
        let pid = self.core.credentials.pid;
        self.latches
            .iter()
            .for_each(|(_, latch)| latch.answered(pid));
    }

    pub(super) fn effects<'a>(
        &'a mut self,
        shared: &'a Shared,
        events: &'a mut Vec<Event>,
    ) -> Effects<'a> {
        self.split(shared, events).1
    }

    pub(super) fn split<'a>(
        &'a mut self,
        shared: &'a Shared,
        events: &'a mut Vec<Event>,
    ) -> (&'a mut Session, Effects<'a>) {
        let Self {
            session,
            core,
            hidden,
            pidfd,
            told,
            ..
        } = self;
        (
            session,
            Effects {
                core,
                hidden,
                pidfd,
                told,
                shared,
                events,
            },
        )
    }

    /// Reads what waits, at most [`BATCH`] messages.
    pub(super) fn read(&mut self, shared: &Shared, events: &mut Vec<Event>, now: Instant) {
        for _ in 0..BATCH {
            if !self.session.wants_read() {
                return;
            }
            match self.socket.receive() {
                Ok(Received::Nothing) => return,
                Ok(Received::End) => return self.session.ended(),
                Ok(Received::Message(bytes, fds)) => {
                    let (session, mut effects) = self.split(shared, events);
                    session.receive(&bytes, fds, now, &mut effects);
                }
                Err(refusal) => return self.session.refuse(refusal),
            }
        }
    }

    /// Writes what can be written.
    pub(super) fn write(&mut self, now: Instant) {
        while let Some(out) = self.session.front() {
            let fds: Vec<BorrowedFd<'_>> = out.fds.iter().map(|fd| fd.as_fd()).collect();
            match self.socket.send(&out.bytes, &fds) {
                Ok(true) => self.session.sent(),
                Ok(false) => return self.session.stalled(now),
                Err(e)
                    if matches!(
                        e.kind(),
                        std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset
                    ) =>
                {
                    // The peer may have said why before it closed: read first.
                    return;
                }
                Err(e) => return self.session.failed(e.to_string()),
            }
        }
    }
}

/// A session's effects on this process.
pub(super) struct Effects<'a> {
    pub(super) core: &'a Arc<PeerCore>,
    pub(super) hidden: &'a mut HashMap<u32, Box<PeerRegion>>,
    pub(super) pidfd: &'a mut Option<OwnedFd>,
    pub(super) told: &'a mut bool,
    pub(super) shared: &'a Shared,
    pub(super) events: &'a mut Vec<Event>,
}

impl World for Effects<'_> {
    fn hello(
        &mut self,
        hello: &Hello,
        [table, mailbox, words]: [OwnedFd; 3],
    ) -> Result<u32, Refusal> {
        if u32::try_from(self.core.credentials.pid) != Ok(hello.pid) {
            // The socket was made by another process (a launcher), or the peer lives in another PID namespace: its end
            // cannot be learnt from that descriptor, only from the socket.
            *self.pidfd = None;
        }
        let table = Mapping::of_peer(table.as_fd(), hello.table_len, false)?;
        let mailbox = Mapping::of_peer(mailbox.as_fd(), hello.mailbox_len, true)?;
        let words = Mapping::of_peer(words.as_fd(), hello.words_len, true)?;
        let view = Arc::new(PeerView::new(table, mailbox, words, hello.holder)?);
        let regions = view.max_regions();
        let _ = self.core.view.set(view);
        Ok(regions)
    }

    fn leaving(&mut self, why: &Gone) {
        if std::mem::replace(self.told, true) {
            return;
        }
        if let Some(view) = self.core.view.get() {
            view.set_down();
        }
        self.core.update(|s| {
            s.gone.get_or_insert_with(|| why.clone());
        });
        self.shared.hooks.peer_down(self.core.id, why);
    }

    fn map(
        &mut self,
        id: u32,
        len: u64,
        kind: &RegionKind,
        fd: Option<OwnedFd>,
    ) -> Result<(), Refusal> {
        let Some(view) = self.core.view.get() else {
            return Err(Refusal::new(
                RefusalCode::OutOfOrder,
                "a region before Hello",
            ));
        };
        let region = match (kind, fd) {
            (RegionKind::Host { writable }, Some(fd)) => PeerRegion::Host {
                map: Mapping::of_peer(fd.as_fd(), len, *writable)?,
                writable: *writable,
            },
            (RegionKind::Host { .. }, None) => {
                return Err(Refusal::new(
                    RefusalCode::Descriptors,
                    "a host region without a memfd",
                ));
            }
            (RegionKind::Device { handle, addr, .. }, fd) => {
                let import = self.shared.hooks.import(handle, fd, len);
                let device = import.map_err(|why| Refusal::new(RefusalCode::Map, why))?;
                PeerRegion::Device(view.guard(device, *addr)?)
            }
        };
        view.insert(id, region);
        Ok(())
    }

    fn hide(&mut self, id: u32) {
        if let Some(region) = self.core.view.get().and_then(|view| view.remove(id)) {
            self.hidden.insert(id, region);
        }
    }

    fn unmap(&mut self, id: u32) {
        self.hidden.remove(&id);
    }

    fn grace_begin(&mut self) -> u64 {
        self.shared.hooks.grace_begin()
    }

    fn grace_passed(&mut self, epoch: u64) -> bool {
        self.shared.hooks.grace_passed(epoch)
    }

    fn up(&mut self) {
        self.events.push(Event::Up(self.core.id));
    }

    fn app(&mut self, bytes: Vec<u8>) {
        self.core.update(|s| s.inbox.push_back(bytes));
    }

    fn credit(&mut self, count: u32) {
        self.core
            .update(|s| s.credits = s.credits.saturating_add(count).min(APP_WINDOW));
    }

    fn answered(&mut self, what: Answered) {
        self.events.push(Event::Answered(self.core.id, what));
    }
}
