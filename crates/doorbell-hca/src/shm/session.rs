//! One shared memory session as a state machine: messages and time in, messages and events out. No I/O, no clock.
//!
//! Both sides send `Hello`, then their regions and `Ready`; a session is up when each side has mapped what the
//! other sent. After that regions come and go, keys are revoked by epochs, the application may talk, and either
//! side says `Bye`. Whatever the peer does out of turn, in excess or too late ends the session with a reason.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    error::{Gone, Refusal, RefusalCode},
    proto::{Hello, Message, NO_REGION, RegionKind},
};

/// Messages of the application that may wait at the receiver.
pub(crate) const APP_WINDOW: u32 = 32;

/// Revocations of the peer that may wait for a grace period at a time.
const MAX_REVOKES: usize = 4096;

/// Above so many unsent messages this side stops reading: a peer that floods must also read.
const OUT_PAUSE: usize = 64;

/// What a session does to the process it lives in.
pub(crate) trait World {
    /// Maps the peer's key table, mailbox and locks. Returns how many regions the peer's keys can name.
    fn hello(&mut self, hello: &Hello, fds: [OwnedFd; 3]) -> Result<u32, Refusal>;
    /// The session is ending: QPs connected to the peer must fail before the next grace period.
    fn leaving(&mut self, why: &Gone);
    /// Makes a region of the peer usable.
    fn map(
        &mut self,
        id: u32,
        len: u64,
        kind: &RegionKind,
        fd: Option<OwnedFd>,
    ) -> Result<(), Refusal>;
    /// Lookups of the region fail from now on; those under way may still use it.
    fn hide(&mut self, id: u32);
    /// A grace period has passed since [`World::hide`]: unmap.
    fn unmap(&mut self, id: u32);
    /// Begins a grace period of this process' engines.
    fn grace_begin(&mut self) -> u64;
    /// Has every engine passed it?
    fn grace_passed(&mut self, epoch: u64) -> bool;
    /// The session has just come up.
    fn up(&mut self);
    /// A message of the peer's application.
    fn app(&mut self, bytes: Vec<u8>);
    /// The peer's application took messages: `count` more may be sent.
    fn credit(&mut self, count: u32);
    /// The answer to a region that this side added or revoked.
    fn answered(&mut self, what: Answered);
}

/// What the peer has confirmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answered {
    /// It mapped the region, or could not.
    Added { id: u32, refused: Option<Refusal> },
    /// Its engines do not use what was revoked.
    Revoked { ticket: u64 },
}

/// A region as it is sent to a peer.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) id: u32,
    /// Whose keys lie in it: sessions that are confined to another protection domain do not hear of it.
    pub(crate) pd: u32,
    pub(crate) len: u64,
    pub(crate) kind: RegionKind,
    pub(crate) fd: Option<Arc<OwnedFd>>,
}

impl Offer {
    /// Does a peer hear of it that is confined to this protection domain? `None`: to none.
    pub(crate) fn concerns(&self, pd: Option<u32>) -> bool {
        pd.is_none_or(|pd| pd == self.pd)
    }
}

/// A message to be sent, with its descriptors.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<Arc<OwnedFd>>,
}

/// Times that a session gives its peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) handshake: Duration,
    pub(crate) step: Duration,
    pub(crate) parting: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waiting for the peer's `Hello`.
    Hello,
    /// Regions are being exchanged.
    Regions,
    Up,
}

struct Pending<T> {
    what: T,
    deadline: Instant,
}

pub(crate) struct Session {
    limits: Limits,
    phase: Phase,
    /// Deadline of the handshake.
    up_by: Instant,
    out: VecDeque<Outgoing>,
    /// Since when the first message of `out` could not be sent.
    stalled: Option<Instant>,
    // What this side offered.
    offers: Vec<Offer>,
    next_seq: u32,
    adds: BTreeMap<u32, Pending<u32>>,
    next_epoch: u64,
    revokes: VecDeque<Pending<(u64, u64)>>,
    // What the peer offered.
    max_theirs: u32,
    adds_seen: u32,
    theirs: BTreeSet<u32>,
    their_epoch: u64,
    their_revokes: VecDeque<(u64, u32, u64)>,
    ready_seen: bool,
    app_waiting: u32,
    // The end.
    /// Set when this side closes: since when, and the grace period after which it says `Bye`.
    closing: Option<(Instant, u64)>,
    bye_sent: bool,
    bye_acked: bool,
    /// Set when the peer said `Bye`: the grace period after which it is answered.
    bye_grace: Option<u64>,
    bye_answered: bool,
    over: Option<Gone>,
}

impl Session {
    /// A new session; `offers` are sent once the peer has said `Hello`.
    pub(crate) fn new(
        hello: Message,
        fds: Vec<Arc<OwnedFd>>,
        offers: Vec<Offer>,
        limits: Limits,
        now: Instant,
    ) -> Self {
        let mut session = Self {
            limits,
            phase: Phase::Hello,
            up_by: now + limits.handshake,
            out: VecDeque::new(),
            stalled: None,
            offers,
            next_seq: 0,
            adds: BTreeMap::new(),
            next_epoch: 0,
            revokes: VecDeque::new(),
            max_theirs: 0,
            adds_seen: 0,
            theirs: BTreeSet::new(),
            their_epoch: 0,
            their_revokes: VecDeque::new(),
            ready_seen: false,
            app_waiting: 0,
            closing: None,
            bye_sent: false,
            bye_acked: false,
            bye_grace: None,
            bye_answered: false,
            over: None,
        };
        session.send_with(&hello, fds);
        session
    }

    /// Why the session is over, if it is and everything that can be sent has been.
    pub(crate) fn over(&self) -> Option<&Gone> {
        self.over.as_ref()
    }

    /// Did the peer confirm that it uses nothing of this side any more?
    pub(crate) fn parted(&self) -> bool {
        self.bye_acked || self.bye_grace.is_some() || self.phase == Phase::Hello
    }

    pub(crate) fn is_up(&self) -> bool {
        self.phase == Phase::Up
            && self.over.is_none()
            && self.closing.is_none()
            && self.bye_grace.is_none()
    }

    /// Regions of the peer that are mapped or hidden.
    pub(crate) fn theirs(&self) -> impl Iterator<Item = u32> + '_ {
        self.theirs.iter().copied()
    }

    /// Should the socket be read? Not while the peer does not read what it is owed.
    pub(crate) fn wants_read(&self) -> bool {
        self.over.is_none() && self.out.len() < OUT_PAUSE
    }

    pub(crate) fn front(&self) -> Option<&Outgoing> {
        self.out.front()
    }

    /// Messages that wait to be sent.
    #[cfg(test)]
    pub(crate) fn out_len(&self) -> usize {
        self.out.len()
    }

    pub(crate) fn sent(&mut self) {
        self.out.pop_front();
        self.stalled = None;
    }

    pub(crate) fn stalled(&mut self, now: Instant) {
        self.stalled.get_or_insert(now);
    }

    fn send(&mut self, message: &Message) {
        self.send_with(message, Vec::new());
    }

    fn send_with(&mut self, message: &Message, fds: Vec<Arc<OwnedFd>>) {
        debug_assert_eq!(message.fds(), fds.len());
        self.out.push_back(Outgoing {
            bytes: message.encode(),
            fds,
        });
    }

    /// Turns the peer away: a refusal is the last thing it hears.
    pub(crate) fn refuse(&mut self, refusal: Refusal) {
        if self.over.is_none() {
            self.out.clear();
            self.send(&Message::Refuse(refusal.clone()));
            self.over = Some(Gone::Refused(refusal));
        }
    }

    fn late(&mut self, step: &'static str, after: Duration) {
        if self.over.is_none() {
            let text = format!("no answer to {step} within {after:.1?}");
            self.refuse(Refusal::new(RefusalCode::Deadline, text));
            self.over = Some(Gone::Late { step, after });
        }
    }

    /// The socket is at its end, or the process has exited.
    pub(crate) fn ended(&mut self) {
        if self.over.is_none() {
            self.over = Some(match (self.closing, self.bye_grace) {
                (Some(_), _) => Gone::ClosedHere,
                (None, Some(_)) => Gone::Closed,
                (None, None) => Gone::Died,
            });
        }
    }

    pub(crate) fn failed(&mut self, why: String) {
        self.over.get_or_insert(Gone::Socket(why));
    }

    /// Offers one more region. The answer comes as [`Answered::Added`].
    pub(crate) fn add(&mut self, offer: Offer, now: Instant) {
        if self.phase == Phase::Hello {
            self.offers.push(offer);
        } else {
            self.offer(offer, now);
        }
    }

    fn offer(&mut self, offer: Offer, now: Instant) {
        let seq = self.next_seq;
        self.next_seq = seq.wrapping_add(1);
        let (id, fds) = (offer.id, offer.fd.into_iter().collect());
        self.send_with(
            &Message::RegionAdd {
                id,
                seq,
                len: offer.len,
                kind: offer.kind,
            },
            fds,
        );
        // The peer answers the handshake's regions one by one; its time for all of them is the handshake's.
        let deadline = self.up_by.max(now + self.limits.step);
        self.adds.insert(seq, Pending { what: id, deadline });
    }

    /// Revokes: the peer answers when its engines have passed. The answer comes as [`Answered::Revoked`].
    pub(crate) fn revoke(
        &mut self,
        ticket: u64,
        region: Option<u32>,
        now: Instant,
        world: &mut impl World,
    ) {
        if self.phase == Phase::Hello {
            // It has seen neither key nor region.
            self.offers.retain(|o| Some(o.id) != region);
            world.answered(Answered::Revoked { ticket });
            return;
        }
        self.next_epoch += 1;
        let epoch = self.next_epoch;
        self.send(&Message::Revoke {
            epoch,
            region: region.unwrap_or(NO_REGION),
        });
        self.revokes.push_back(Pending {
            what: (epoch, ticket),
            deadline: now + self.limits.step,
        });
    }

    /// Sends bytes of the application; the caller keeps to the credits it was given.
    pub(crate) fn app(&mut self, bytes: Vec<u8>) {
        self.send(&Message::App(bytes));
    }

    /// The application here took `count` messages.
    pub(crate) fn app_taken(&mut self, count: u32) {
        self.app_waiting = self.app_waiting.saturating_sub(count);
        self.send(&Message::AppTaken { count });
    }

    /// Begins an orderly end.
    pub(crate) fn close(&mut self, now: Instant, world: &mut impl World) {
        if self.over.is_none() && self.closing.is_none() {
            if self.phase == Phase::Hello {
                self.out.clear();
                self.over = Some(Gone::ClosedHere);
                return;
            }
            world.leaving(&Gone::ClosedHere);
            self.theirs.iter().for_each(|&id| world.hide(id));
            self.closing = Some((now, world.grace_begin()));
        }
    }

    /// Takes one message with its descriptors.
    pub(crate) fn receive(
        &mut self,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
        now: Instant,
        world: &mut impl World,
    ) {
        if self.over.is_some() {
            return;
        }
        let taken = Message::decode(bytes).and_then(|m| self.handle(m, fds, now, world));
        if let Err(refusal) = taken {
            self.refuse(refusal);
        }
        self.come_up(world);
    }

    fn handle(
        &mut self,
        message: Message,
        fds: Vec<OwnedFd>,
        now: Instant,
        world: &mut impl World,
    ) -> Result<(), Refusal> {
        if fds.len() != message.fds() {
            let text = format!(
                "{} descriptors came with a message that carries {}",
                fds.len(),
                message.fds()
            );
            return Err(Refusal::new(RefusalCode::Descriptors, text));
        }
        let early = |what: &str| {
            Err(Refusal::new(
                RefusalCode::OutOfOrder,
                format!("{what} before Hello"),
            ))
        };
        let mut fds = fds.into_iter();
        match message {
            Message::Hello(hello) => {
                let all = (fds.next(), fds.next(), fds.next());
                let (Phase::Hello, (Some(table), Some(mailbox), Some(words))) = (self.phase, all)
                else {
                    return Err(Refusal::new(RefusalCode::OutOfOrder, "a second Hello"));
                };
                self.max_theirs = world.hello(&hello, [table, mailbox, words])?;
                self.phase = Phase::Regions;
                let offers = std::mem::take(&mut self.offers);
                let regions = offers.len() as u32;
                for offer in offers {
                    self.offer(offer, now);
                }
                self.send(&Message::Ready { regions });
                Ok(())
            }
            Message::Refuse(refusal) => {
                self.over = Some(Gone::RefusedByPeer(refusal));
                Ok(())
            }
            _ if self.phase == Phase::Hello => early("a message"),
            Message::RegionAdd { id, seq, len, kind } => {
                self.region(id, seq, len, &kind, fds.next(), world)
            }
            Message::RegionAck { seq, refused } => match self.adds.remove(&seq) {
                Some(add) => {
                    world.answered(Answered::Added {
                        id: add.what,
                        refused,
                    });
                    Ok(())
                }
                None => Err(Refusal::new(
                    RefusalCode::OutOfOrder,
                    format!("an answer to region message {seq}, which does not wait for one"),
                )),
            },
            Message::Ready { regions } => {
                if self.ready_seen {
                    return Err(Refusal::new(RefusalCode::OutOfOrder, "a second Ready"));
                }
                if self.adds_seen < regions {
                    let text = format!("Ready after {} regions, it says {regions}", self.adds_seen);
                    return Err(Refusal::new(RefusalCode::OutOfOrder, text));
                }
                self.ready_seen = true;
                Ok(())
            }
            Message::Revoke { epoch, region } => self.their_revoke(epoch, region, world),
            Message::RevokeAck { epoch } => match self.revokes.pop_front() {
                Some(Pending {
                    what: (waiting, ticket),
                    ..
                }) if waiting == epoch => {
                    world.answered(Answered::Revoked { ticket });
                    Ok(())
                }
                _ => Err(Refusal::new(
                    RefusalCode::OutOfOrder,
                    format!("an answer to epoch {epoch}, which is not the oldest that waits"),
                )),
            },
            Message::Bye => {
                if self.bye_grace.is_some() {
                    return Err(Refusal::new(RefusalCode::OutOfOrder, "a second Bye"));
                }
                world.leaving(&Gone::Closed);
                self.theirs.iter().for_each(|&id| world.hide(id));
                self.bye_grace = Some(world.grace_begin());
                Ok(())
            }
            Message::ByeAck => {
                if !self.bye_sent {
                    return Err(Refusal::new(
                        RefusalCode::OutOfOrder,
                        "an answer to Bye, which was not said",
                    ));
                }
                self.bye_acked = true;
                Ok(())
            }
            Message::App(bytes) => {
                if self.app_waiting >= APP_WINDOW {
                    let text = format!("more than {APP_WINDOW} application messages wait");
                    return Err(Refusal::new(RefusalCode::Limit, text));
                }
                self.app_waiting += 1;
                world.app(bytes);
                Ok(())
            }
            Message::AppTaken { count } => {
                world.credit(count.min(APP_WINDOW));
                Ok(())
            }
        }
    }

    fn region(
        &mut self,
        id: u32,
        seq: u32,
        len: u64,
        kind: &RegionKind,
        fd: Option<OwnedFd>,
        world: &mut impl World,
    ) -> Result<(), Refusal> {
        if id >= self.max_theirs {
            let text = format!(
                "region {id}, the key table names at most {}",
                self.max_theirs
            );
            return Err(Refusal::new(RefusalCode::Limit, text));
        }
        self.adds_seen = self.adds_seen.saturating_add(1);
        if self.closing.is_some() || self.bye_grace.is_some() {
            // Nobody will use it, and what is mapped now would not be hidden for a grace period before it goes.
            let refused = Some(Refusal::new(RefusalCode::Busy, "the session is closing"));
            self.send(&Message::RegionAck { seq, refused });
            return Ok(());
        }
        if !self.theirs.insert(id) {
            return Err(Refusal::new(
                RefusalCode::OutOfOrder,
                format!("region {id} a second time"),
            ));
        }
        let refused = match world.map(id, len, kind, fd) {
            Ok(()) => None,
            // This process cannot: the peer may go on without. Anything else is a lie, and ends the session.
            Err(refusal) if matches!(refusal.code, RefusalCode::Map | RefusalCode::Busy) => {
                Some(refusal)
            }
            Err(refusal) => return Err(refusal),
        };
        self.send(&Message::RegionAck { seq, refused });
        Ok(())
    }

    fn their_revoke(
        &mut self,
        epoch: u64,
        region: u32,
        world: &mut impl World,
    ) -> Result<(), Refusal> {
        if epoch != self.their_epoch + 1 {
            let text = format!("epoch {epoch} after {}", self.their_epoch);
            return Err(Refusal::new(RefusalCode::OutOfOrder, text));
        }
        if self.their_revokes.len() >= MAX_REVOKES {
            return Err(Refusal::new(
                RefusalCode::Limit,
                format!("more than {MAX_REVOKES} revocations at a time"),
            ));
        }
        if region != NO_REGION {
            let parting = self.closing.is_some() || self.bye_grace.is_some();
            if (!self.theirs.contains(&region) && !parting)
                || self.their_revokes.iter().any(|r| r.1 == region)
            {
                return Err(Refusal::new(
                    RefusalCode::OutOfOrder,
                    format!("revocation of region {region}, which is not there"),
                ));
            }
            world.hide(region);
        }
        self.their_epoch = epoch;
        self.their_revokes
            .push_back((epoch, region, world.grace_begin()));
        Ok(())
    }

    fn come_up(&mut self, world: &mut impl World) {
        if self.phase == Phase::Regions
            && self.ready_seen
            && self.adds.is_empty()
            && self.over.is_none()
        {
            self.phase = Phase::Up;
            world.up();
        }
    }

    /// Lets time pass: deadlines and grace periods.
    pub(crate) fn tick(&mut self, now: Instant, world: &mut impl World) {
        if self.over.is_some() {
            return;
        }
        while let Some(&(epoch, region, grace)) = self.their_revokes.front() {
            if !world.grace_passed(grace) {
                break;
            }
            self.their_revokes.pop_front();
            if region != NO_REGION {
                world.unmap(region);
                self.theirs.remove(&region);
            }
            self.send(&Message::RevokeAck { epoch });
        }
        if !self.bye_answered
            && self.their_revokes.is_empty()
            && self
                .bye_grace
                .is_some_and(|grace| world.grace_passed(grace))
        {
            for id in std::mem::take(&mut self.theirs) {
                world.unmap(id);
            }
            self.bye_answered = true;
            self.send(&Message::ByeAck);
        }
        if !self.bye_sent
            && self
                .closing
                .is_some_and(|(_, grace)| world.grace_passed(grace))
        {
            for id in std::mem::take(&mut self.theirs) {
                world.unmap(id);
            }
            self.bye_sent = true;
            self.send(&Message::Bye);
        }
        if let Some(gone) = self.farewell() {
            self.over = Some(gone);
            return;
        }
        let step = self.limits.step;
        let parting = self.limits.parting;
        if self.phase != Phase::Up && now >= self.up_by {
            self.late("the handshake", self.limits.handshake);
        } else if self.stalled.is_some_and(|t| now >= t + step) {
            self.late("reading its messages", step);
        } else if self.adds.values().any(|a| now >= a.deadline) {
            self.late("a new region", step);
        } else if self.revokes.front().is_some_and(|r| now >= r.deadline) {
            self.late("a revocation", step);
        } else if self.closing.is_some_and(|c| now >= c.0 + parting) {
            self.late("Bye", parting);
        }
    }

    /// The session ends when every `Bye` has been answered and the answers have left.
    fn farewell(&self) -> Option<Gone> {
        let here = self.closing.is_some();
        let done_here = !here || self.bye_acked;
        let done_there = self.bye_grace.is_none() || (self.bye_answered && self.out.is_empty());
        match (here, self.bye_grace.is_some()) {
            (true, _) if done_here && done_there => Some(Gone::ClosedHere),
            (false, true) if done_there => Some(Gone::Closed),
            _ => None,
        }
    }

    /// When [`Session::tick`] must run next. `grace` is how often grace periods are looked at.
    pub(crate) fn next_tick(&self, now: Instant, grace: Duration) -> Option<Instant> {
        if self.over.is_some() {
            return None;
        }
        let waiting_for_grace = !self.their_revokes.is_empty()
            || (self.bye_grace.is_some() && !self.bye_answered)
            || (self.closing.is_some() && !self.bye_sent);
        [
            waiting_for_grace.then(|| now + grace),
            // The last answer has left: the end is due.
            self.farewell().map(|_| now),
            (self.phase != Phase::Up).then_some(self.up_by),
            self.stalled.map(|t| t + self.limits.step),
            self.adds.values().map(|a| a.deadline).min(),
            self.revokes.front().map(|r| r.deadline),
            self.closing.map(|(t, _)| t + self.limits.parting),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}
