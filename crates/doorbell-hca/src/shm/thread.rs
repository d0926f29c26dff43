//! The control thread: one `poll` over all sessions, listeners and process descriptors of an HCA.
//!
//! Sockets become messages for the [`Session`] state machines, their answers become sockets' messages, and time
//! passes by deadlines. It sleeps until something happens; only while an engine's grace period is awaited does it look
//! again every millisecond.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    control::{Command, Shared},
    error::{Gone, Refusal, RefusalCode},
    handle::{ListenQueue, Peer, PeerCore, PeerId},
    live::{BATCH, Event, Live},
    peer::PeerRegion,
    proto::{Hello, Message},
    session::{Answered, Limits, Offer, Session, World},
    socket::{Listener, Socket},
};
use crate::dma::words::{Words, own_region};

/// How often engines are asked whether a grace period has passed, while one is awaited.
const GRACE_TICK: Duration = Duration::from_millis(1);

/// A listener that the system gives no descriptors rests so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A peer that was cut off while its process lives: it may still use what it mapped.
struct Zombie {
    pidfd: OwnedFd,
    offered: BTreeSet<u32>,
}

/// Mappings of a session that is over, kept for a grace period.
struct Grave {
    core: Arc<PeerCore>,
    epoch: u64,
    _regions: Vec<PeerRegion>,
}

/// A revocation under way.
struct Ticket {
    waiting: BTreeSet<PeerId>,
    /// The region that goes with the key, if it was the last one.
    region: Option<u32>,
}

struct Listening {
    listener: Listener,
    queue: Arc<ListenQueue>,
    pd: Option<u32>,
    rest_until: Option<Instant>,
}

struct Control<'a> {
    shared: &'a Arc<Shared>,
    sessions: BTreeMap<PeerId, Live>,
    listeners: BTreeMap<u32, Listening>,
    zombies: BTreeMap<PeerId, Zombie>,
    graves: Vec<Grave>,
    /// Every region that new sessions are offered.
    regions: BTreeMap<u32, Offer>,
    /// Revocations that are not answered by everyone.
    tickets: BTreeMap<u64, Ticket>,
    events: Vec<Event>,
    ending: Option<Instant>,
}

/// The body of the thread.
pub(crate) fn run(shared: &Arc<Shared>) {
    let mut control = Control {
        shared,
        sessions: BTreeMap::new(),
        listeners: BTreeMap::new(),
        zombies: BTreeMap::new(),
        graves: Vec::new(),
        regions: BTreeMap::new(),
        tickets: BTreeMap::new(),
        events: Vec::new(),
        ending: None,
    };
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| control.work()));
    shared.set_down();
    for listening in control.listeners.values() {
        listening.queue.close("the control thread has ended".into());
    }
    // Whoever waits for a peer hears that it is gone; engines fail their QPs.
    for id in control.sessions.keys().copied().collect::<Vec<_>>() {
        let live = control.sessions.get_mut(&id);
        let Some(live) = live else { continue };
        live.session.failed("the control thread has ended".into());
        live.effects(shared, &mut control.events)
            .leaving(&Gone::ClosedHere);
        live.answer_all();
        live.core.update(|s| s.finished = true);
    }
    if outcome.is_err() {
        // Mappings may be in use and no grace period can be awaited any more: leave them.
        std::mem::forget(control.sessions);
        std::mem::forget(control.graves);
        tracing::error!("the shared memory control thread panicked; all peers are cut off");
    }
}

impl Control<'_> {
    fn work(&mut self) {
        loop {
            let now = Instant::now();
            if let Some(deadline) = self.ending
                && ((self.sessions.is_empty() && self.graves.is_empty()) || now >= deadline)
            {
                return;
            }
            let timeout = self
                .next_tick(now)
                .map(|t| t.saturating_duration_since(now));
            self.wait(timeout);
            let now = Instant::now();
            for command in self.shared.take_commands() {
                self.command(command, now);
            }
            self.tick(now);
        }
    }

    fn next_tick(&self, now: Instant) -> Option<Instant> {
        self.sessions
            .values()
            .filter_map(|live| live.session.next_tick(now, GRACE_TICK))
            .chain((!self.graves.is_empty()).then(|| now + GRACE_TICK))
            .chain(self.listeners.values().filter_map(|l| l.rest_until))
            .chain(self.ending)
            .min()
    }

    /// Sleeps until a descriptor is ready or the time has come, and serves what is ready.
    fn wait(&mut self, timeout: Option<Duration>) {
        enum Source {
            Wake,
            Listener(u32),
            Session(PeerId),
            Process(PeerId),
            Zombie(PeerId),
        }
        let (mut fds, mut sources) = (Vec::new(), Vec::new());
        let mut watch = |source, fd, flags| {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            sources.push(source);
        };
        watch(Source::Wake, self.shared.wake_fd(), PollFlags::IN);
        for (&id, l) in self
            .listeners
            .iter()
            .filter(|(_, l)| l.rest_until.is_none())
        {
            watch(Source::Listener(id), l.listener.as_fd(), PollFlags::IN);
        }
        for (&id, live) in &self.sessions {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, live.session.wants_read());
            flags.set(PollFlags::OUT, live.session.front().is_some());
            if !flags.is_empty() {
                watch(Source::Session(id), live.socket.as_fd(), flags);
            }
            if let Some(pidfd) = &live.pidfd {
                watch(Source::Process(id), pidfd.as_fd(), PollFlags::IN);
            }
        }
        for (&id, zombie) in &self.zombies {
            watch(Source::Zombie(id), zombie.pidfd.as_fd(), PollFlags::IN);
        }
        // Rounded up, so that a tick is due when the sleep ends.
        let timeout = timeout
            .map(|t| t + Duration::from_micros(50))
            .and_then(|t| Timespec::try_from(t).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                tracing::error!("poll of {} descriptors: {e}", fds.len());
                std::thread::sleep(GRACE_TICK);
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let now = Instant::now();
        for source in sources
            .into_iter()
            .zip(ready)
            .filter_map(|(source, ready)| ready.then_some(source))
        {
            match source {
                Source::Wake => {}
                Source::Listener(id) => self.accept(id, now),
                Source::Session(id) => {
                    if let Some(live) = self.sessions.get_mut(&id) {
                        live.read(self.shared, &mut self.events, now);
                    }
                }
                Source::Process(id) => {
                    if let Some(live) = self.sessions.get_mut(&id) {
                        // What it said before it died still counts (a goodbye, a refusal).
                        live.pidfd = None;
                        live.read(self.shared, &mut self.events, now);
                        live.session.ended();
                    }
                }
                Source::Zombie(id) => {
                    self.zombies.remove(&id);
                    self.let_go(id, None);
                }
            }
        }
    }

    fn command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Listen(id, listener, queue, pd) if self.ending.is_none() => {
                self.listeners.insert(
                    id,
                    Listening {
                        listener,
                        queue,
                        pd,
                        rest_until: None,
                    },
                );
            }
            Command::Listen(_, _, queue, _) => queue.close("the link is closing".into()),
            Command::Unlisten(id) => drop(self.listeners.remove(&id)),
            Command::Connect(socket, core, pd) => self.begin(socket, core, None, pd, now),
            Command::Close(id) => self.close(id, now),
            Command::App(id, bytes) => self.with(id, |s| s.app(bytes)),
            Command::Taken(id) => self.with(id, |s| s.app_taken(1)),
            Command::Add(offer, latch) => {
                let mut waited_for = Vec::new();
                for live in self
                    .sessions
                    .values_mut()
                    .filter(|live| live.session.over().is_none() && offer.concerns(live.pd))
                {
                    live.offered.insert(offer.id);
                    // A session that is coming up is not up before it has mapped this region too: nobody waits for it.
                    if live.session.is_up() {
                        live.latches.push((offer.id, Arc::clone(&latch)));
                        waited_for.push(live.core.credentials.pid);
                    }
                    live.session.add(offer.clone(), now);
                }
                latch.begin(waited_for);
                self.regions.insert(offer.id, offer);
            }
            Command::Revoke {
                ticket,
                region,
                gone,
            } => self.revoke(ticket, region, gone, now),
            Command::Shutdown => {
                self.ending = Some(now + self.shared.config.parting);
                for listening in std::mem::take(&mut self.listeners).into_values() {
                    listening.queue.close("the link is closing".into());
                }
                for id in self.sessions.keys().copied().collect::<Vec<_>>() {
                    self.close(id, now);
                }
            }
        }
    }

    fn with(&mut self, id: PeerId, action: impl FnOnce(&mut Session)) {
        if let Some(live) = self
            .sessions
            .get_mut(&id)
            .filter(|live| live.session.over().is_none())
        {
            action(&mut live.session);
        }
    }

    fn close(&mut self, id: PeerId, now: Instant) {
        if let Some(live) = self.sessions.get_mut(&id) {
            let (session, mut effects) = live.split(self.shared, &mut self.events);
            session.close(now, &mut effects);
        }
    }

    fn revoke(&mut self, ticket: u64, region: u32, gone: bool, now: Instant) {
        if gone {
            self.regions.remove(&region);
        }
        let mut waiting: BTreeSet<PeerId> = self
            .zombies
            .iter()
            .filter(|(_, z)| z.offered.contains(&region))
            .map(|(&id, _)| id)
            .collect();
        for (&id, live) in &mut self.sessions {
            if live.session.over().is_none() && live.offered.contains(&region) {
                waiting.insert(id);
                let (session, mut effects) = live.split(self.shared, &mut self.events);
                session.revoke(ticket, gone.then_some(region), now, &mut effects);
            }
        }
        if waiting.is_empty() {
            self.released(ticket);
        } else {
            self.tickets.insert(
                ticket,
                Ticket {
                    waiting,
                    region: gone.then_some(region),
                },
            );
        }
    }

    fn released(&self, ticket: u64) {
        self.shared
            .exports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .released(ticket);
    }

    /// A peer has let go of what one ticket, or every ticket, waits for.
    fn let_go(&mut self, id: PeerId, only: Option<u64>) {
        if only.is_none() {
            Words::own().free_all_of(id.0);
        }
        let mut done = Vec::new();
        for (&number, ticket) in &mut self.tickets {
            if only.is_some_and(|t| t != number) || !ticket.waiting.remove(&id) {
                continue;
            }
            if let (Some(live), Some(region)) = (self.sessions.get_mut(&id), ticket.region) {
                live.offered.remove(&region);
            }
            if ticket.waiting.is_empty() {
                done.push(number);
            }
        }
        for ticket in done {
            self.tickets.remove(&ticket);
            self.released(ticket);
        }
    }

    fn accept(&mut self, id: u32, now: Instant) {
        for _ in 0..BATCH {
            let Some(listening) = self.listeners.get_mut(&id) else {
                return;
            };
            let pd = listening.pd;
            let socket = match listening.listener.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(e) => {
                    let e = crate::limits::told(e);
                    tracing::warn!("accepting shared memory peers rests for {ACCEPT_PAUSE:?}: {e}");
                    listening.queue.note(e.to_string());
                    listening.rest_until = Some(now + ACCEPT_PAUSE);
                    return;
                }
            };
            let handshakes = self
                .sessions
                .values()
                .filter(|l| l.listener.is_some() && !l.session.is_up())
                .count();
            let config = &self.shared.config;
            let refusal = match self.shared.new_peer(&socket) {
                Err(e) => Refusal::new(RefusalCode::Busy, e.to_string()),
                Ok(_) if handshakes >= config.max_handshakes => Refusal::new(
                    RefusalCode::Busy,
                    format!("{handshakes} handshakes are under way; try again"),
                ),
                Ok(core) => {
                    self.begin(socket, core, Some(id), pd, now);
                    continue;
                }
            };
            turn_away(&socket, &refusal);
            listening.queue.note(refusal.to_string());
        }
    }

    /// Starts a session over a fresh connection.
    fn begin(
        &mut self,
        socket: Socket,
        core: Arc<PeerCore>,
        listener: Option<u32>,
        pd: Option<u32>,
        now: Instant,
    ) {
        let config = &self.shared.config;
        let uid = core.credentials.uid;
        let refusal = if !config.trust.admits(uid) {
            Some(Refusal::new(
                RefusalCode::Credentials,
                format!("user {uid} is not admitted ({:?})", config.trust),
            ))
        } else if self.sessions.len() >= config.max_sessions {
            let text = format!(
                "{} sessions, at most {}",
                self.sessions.len(),
                config.max_sessions
            );
            Some(Refusal::new(RefusalCode::Busy, text))
        } else if self.ending.is_some() {
            Some(Refusal::new(RefusalCode::Busy, "this side is closing"))
        } else {
            None
        };
        let words = refusal.map_or_else(
            || own_region().map_err(|why| Refusal::new(RefusalCode::Busy, why)),
            Err,
        );
        let words = match words {
            Ok(words) => words,
            Err(refusal) => {
                turn_away(&socket, &refusal);
                self.note(listener, refusal.to_string());
                return core.update(|s| s.end(Gone::Refused(refusal)));
            }
        };
        let hello = Message::Hello(Hello {
            nonce: self.shared.nonce,
            pid: std::process::id(),
            holder: core.id.0,
            table_len: self.shared.table.len,
            mailbox_len: core.mailbox.region().len() as u64,
            words_len: words.len() as u64,
        });
        let fds = vec![
            Arc::clone(&self.shared.table.fd),
            Arc::clone(core.mailbox.region().memfd()),
            Arc::clone(words.memfd()),
        ];
        let limits = Limits {
            handshake: config.handshake,
            step: config.step,
            parting: config.parting,
        };
        let all = self.regions.values();
        let offers: Vec<Offer> = all.filter(|offer| offer.concerns(pd)).cloned().collect();
        let offered = offers.iter().map(|offer| offer.id).collect();
        let live = Live {
            session: Session::new(hello, fds, offers, limits, now),
            pidfd: core.credentials.pidfd(),
            socket,
            core: Arc::clone(&core),
            hidden: HashMap::new(),
            listener,
            latches: Vec::new(),
            offered,
            pd,
            told: false,
        };
        self.sessions.insert(core.id, live);
    }

    /// What became of somebody who came to a listener.
    fn note(&self, listener: Option<u32>, trouble: String) {
        if let Some(listening) = listener.and_then(|id| self.listeners.get(&id)) {
            listening.queue.note(trouble);
        }
    }

    /// Time passes for everyone; what is over is cleared away.
    fn tick(&mut self, now: Instant) {
        for listening in self.listeners.values_mut() {
            listening.rest_until = listening.rest_until.filter(|&t| now < t);
        }
        for live in self.sessions.values_mut() {
            let (session, mut effects) = live.split(self.shared, &mut self.events);
            session.tick(now, &mut effects);
            live.write(now);
            // What the writing emptied may have been the last thing owed.
            let (session, mut effects) = live.split(self.shared, &mut self.events);
            session.tick(now, &mut effects);
        }
        for event in std::mem::take(&mut self.events) {
            self.event(event);
        }
        let over: Vec<PeerId> = self
            .sessions
            .iter()
            .filter(|(_, live)| live.session.over().is_some())
            .map(|(&id, _)| id)
            .collect();
        for id in over {
            if let Some(live) = self.sessions.remove(&id) {
                self.bury(id, live);
            }
        }
        for event in std::mem::take(&mut self.events) {
            self.event(event);
        }
        let hooks = &self.shared.hooks;
        self.graves.retain(|grave| {
            let passed = hooks.grace_passed(grave.epoch);
            if passed {
                grave.core.update(|s| s.finished = true);
            }
            !passed
        });
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Up(id) => {
                let Some(live) = self.sessions.get_mut(&id) else {
                    return;
                };
                let queue = match live.listener {
                    None => None,
                    Some(listener) => match self.listeners.get(&listener) {
                        Some(listening) => Some(Arc::clone(&listening.queue)),
                        None => {
                            return live.session.refuse(Refusal::new(
                                RefusalCode::Busy,
                                "the listener was closed",
                            ));
                        }
                    },
                };
                live.core.update(|s| s.up = true);
                if let Some(queue) = queue {
                    let peer = Peer::new(Arc::clone(&live.core), Arc::clone(self.shared));
                    if !queue.push(peer) {
                        let text = format!("{} sessions wait to be accepted", ListenQueue::DEPTH);
                        live.session.refuse(Refusal::new(RefusalCode::Busy, text));
                    }
                }
            }
            Event::Answered(
                id,
                Answered::Added {
                    id: region,
                    refused,
                },
            ) => {
                let Some(live) = self.sessions.get_mut(&id) else {
                    return;
                };
                if let Some(refusal) = refused {
                    tracing::warn!(
                        "{id} (process {}) cannot map region {region}: {refusal}",
                        live.core.credentials.pid
                    );
                }
                let pid = live.core.credentials.pid;
                live.latches.retain(|(waiting, latch)| {
                    let answered = *waiting == region;
                    if answered {
                        latch.answered(pid);
                    }
                    !answered
                });
            }
            Event::Answered(id, Answered::Revoked { ticket }) => self.let_go(id, Some(ticket)),
        }
    }

    /// The session is over: engines and waiters hear of it, mappings go after a grace period.
    fn bury(&mut self, id: PeerId, mut live: Live) {
        live.write(Instant::now());
        let gone = live.session.over().cloned().unwrap_or(Gone::ClosedHere);
        tracing::debug!("{id} (process {}): {gone}", live.core.credentials.pid);
        if !live.core.came_up() {
            let pid = live.core.credentials.pid;
            // What it was told is what it says itself.
            let trouble = match &gone {
                Gone::Refused(refusal) => refusal.to_string(),
                gone => format!("process {pid} came, and {gone}"),
            };
            self.note(live.listener, trouble);
        }
        live.effects(self.shared, &mut self.events).leaving(&gone);
        live.answer_all();
        let view = live.core.view.get();
        let regions = live
            .session
            .theirs()
            .filter_map(|id| view.and_then(|view| view.remove(id)).map(|r| *r));
        let mut regions: Vec<_> = regions.collect();
        regions.extend(live.hidden.drain().map(|(_, region)| *region));
        let epoch = self.shared.hooks.grace_begin();
        let orderly = live.session.parted();
        match live.pidfd.take() {
            // Its process lives (or has not been seen to end) and did not say that it let go.
            Some(pidfd) if !orderly && !live.offered.is_empty() => {
                self.zombies.insert(
                    id,
                    Zombie {
                        pidfd,
                        offered: std::mem::take(&mut live.offered),
                    },
                );
            }
            _ => self.let_go(id, None),
        }
        self.graves.push(Grave {
            core: live.core,
            epoch,
            _regions: regions,
        });
    }
}

/// Says why, and closes.
fn turn_away(socket: &Socket, refusal: &Refusal) {
    tracing::info!("a shared memory peer was turned away: {refusal}");
    let _ = socket.send(&Message::Refuse(refusal.clone()).encode(), &[]);
}
