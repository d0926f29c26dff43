//! What is noticed of other ranks, between collectives and in them: failures, deaths, silence; and leaving without being taken for dead.
//!
//! Rank 0 has a connection to everybody, so it notices whoever dies and tells the others; they notice rank 0. Who leaves says so. Who was asked to
//! ([`Bootstrap::keep_alive`]) says now and then that it lives, and is missed when it stops saying so: that finds processes that stand still and hosts that are gone.

use std::time::{Duration, Instant};

use super::conn::send_all;
use super::exchange::conns;
use super::frame::{Frame, Kind};
use super::{Bootstrap, BootstrapError, Result, Role, fail_all};

/// How long saying goodbye may take.
const PARTING: Duration = Duration::from_millis(200);

/// The beats of this rank, and its attention to those of others.
pub(super) struct Pulse {
    /// After so long without any a rank is reported.
    silence: Duration,
    sent: Option<Instant>,
    looked: Instant,
}

impl Pulse {
    /// Others may bear a shorter silence than this rank: a second is the shortest that anybody asks for.
    fn interval(&self) -> Duration {
        (self.silence / 8).clamp(Duration::from_millis(10), Duration::from_millis(200))
    }
}

/// Why a rank is lost to the job.
#[derive(Clone)]
pub(super) enum Trouble {
    /// It said so, and why.
    Failed { rank: u32, reason: String },
    /// Rank 0 gave up, or passed on what it noticed.
    Refused { reason: String },
    /// Its connection ended without goodbye.
    Lost { rank: u32, reason: String },
    /// It has not been heard of for that long.
    Silent {
        rank: u32,
        after: Duration,
        why: String,
    },
}

impl Trouble {
    /// What a frame of kind [`Kind::Fail`] says: rank 0 gave up a collective, or tells of another rank; any other has failed by itself.
    pub(super) fn told(frame: &Frame, from: u32) -> Self {
        let reason = String::from_utf8_lossy(&frame.body).into_owned();
        match if from == 0 { frame.rank } else { from } {
            0 => Self::Refused { reason },
            rank => Self::Failed { rank, reason },
        }
    }

    pub(super) fn error(&self, what: &'static str) -> BootstrapError {
        match self.clone() {
            Self::Failed { rank, reason } => BootstrapError::Failed { rank, reason },
            Self::Refused { reason } => BootstrapError::Refused { reason },
            Self::Lost { rank, reason } => BootstrapError::Lost { what, rank, reason },
            Self::Silent { rank, after, why } => BootstrapError::Silent { rank, after, why },
        }
    }
}

impl Bootstrap {
    /// From now on this rank says that it lives each time it looks ([`Bootstrap::watch`], and all the time in collectives), and reports ranks that do the
    /// same and were not heard of for `silence`. Zero: neither. A rank that itself stood still meanwhile blames nobody, and one that a debugger holds is
    /// not missed on its own host.
    pub fn keep_alive(&mut self, silence: Duration) {
        self.pulse = (!silence.is_zero()).then(|| Pulse {
            silence,
            sent: None,
            looked: Instant::now(),
        });
    }

    /// Looks, without waiting, whether a rank was lost or has failed since the last look; each is an error once. Call it now and then,
    /// and never while a collective is under way (that looks by itself).
    pub fn watch(&mut self) -> Result<()> {
        match self.news(usize::MAX, false)? {
            Some(trouble) => Err(self.settle("watch", trouble)),
            None => Ok(()),
        }
    }

    /// Says that this rank lives, if that is due ([`Bootstrap::keep_alive`]), and nothing else: for a thread that is never kept, where the one that looks
    /// ([`Bootstrap::watch`], which beats too) may be.
    pub fn beat(&mut self) {
        let now = Instant::now();
        let due = self.pulse.as_mut().is_some_and(|pulse| {
            let interval = pulse.interval();
            let due = pulse
                .sent
                .is_none_or(|at| now.saturating_duration_since(at) >= interval);
            if due {
                pulse.sent = Some(now);
            }
            due
        });
        let (rank, gone) = (self.rank, &self.gone);
        for (conn, _) in conns(&mut self.role).filter(|(_, other)| !gone.contains_key(other)) {
            if due {
                conn.beat(rank);
            }
            conn.flush();
        }
    }

    /// Beats, writes what waits to be written, and takes what came on all connections, `most` frames each: the first trouble that it says.
    /// With `done`, who has been written everything may end: nothing more is wanted of it now.
    pub(super) fn news(&mut self, most: usize, done: bool) -> Result<Option<Trouble>> {
        self.beat();
        let now = Instant::now();
        let Self {
            role, gone, pulse, ..
        } = self;
        let (mut excused, mut silence) = (false, None);
        if let Some(pulse) = pulse {
            excused = now.saturating_duration_since(pulse.looked) > pulse.silence / 4;
            silence = Some(pulse.silence);
            pulse.looked = now;
        }
        for (conn, other) in conns(role) {
            if gone.contains_key(&other) {
                continue;
            }
            if excused {
                conn.excuse(now);
            }
            conn.look(other, most)?;
            if let Some(frame) = conn.take(|kind| kind == Kind::Fail) {
                return Ok(Some(Trouble::told(&frame, other)));
            }
            if conn.take(|kind| kind == Kind::Bye).is_some() {
                gone.insert(other, None);
            } else if let Some(how) = conn.ended() {
                if done && !conn.is_behind() {
                    continue;
                }
                let reason = format!("{how} without goodbye");
                gone.insert(other, Some(reason.clone()));
                return Ok(Some(Trouble::Lost {
                    rank: other,
                    reason,
                }));
            } else if let Some((after, why)) = silence.and_then(|s| conn.is_silent(now, s)) {
                return Ok(Some(Trouble::Silent {
                    rank: other,
                    after,
                    why,
                }));
            }
        }
        Ok(None)
    }

    /// Rank 0 tells the others, and hears of it if it is the one that was missed; no collective is begun any more.
    pub(super) fn settle(&mut self, what: &'static str, trouble: Trouble) -> BootstrapError {
        let error = trouble.error(what);
        match &trouble {
            Trouble::Failed { rank, reason } => self.tell(*rank, reason),
            // It may go on one day. What it has no room for now it is not told: nobody waits for who stands still.
            Trouble::Silent { .. } if self.rank > 0 => {
                let (rank, sequence) = (self.rank, self.sequence);
                let text = error.to_string().into_bytes();
                let frame = Frame::of(Kind::Fail, rank, sequence, text);
                conns(&mut self.role).for_each(|(conn, _)| conn.send(&frame));
            }
            _ => self.tell(0, &error.to_string()),
        }
        self.trouble = Some(trouble);
        error
    }

    /// As rank 0, in the name of `from`, to all who are left but that one.
    pub(super) fn tell(&mut self, from: u32, why: &str) {
        if let Role::Hub(peers) = &mut self.role {
            let left = peers.iter_mut().zip(1u32..);
            let left = left.filter(|(_, rank)| *rank != from && !self.gone.contains_key(rank));
            fail_all(left.map(|(peer, _)| peer), from, self.sequence, why);
        }
    }

    /// Ranks that said goodbye, as far as this rank was told.
    pub fn left(&self) -> impl Iterator<Item = u32> + '_ {
        self.gone
            .iter()
            .filter(|(_, reason)| reason.is_none())
            .map(|(rank, _)| *rank)
    }

    /// Tells the others that this rank has failed, and why: [`Bootstrap::watch`] says it there, and collectives fail. Best effort.
    pub fn fail(&mut self, reason: &str) {
        let (rank, sequence) = (self.rank, self.sequence);
        self.tell(0, reason);
        match &mut self.role {
            Role::Leaf(hub) if !self.gone.contains_key(&0) => {
                fail_all(std::iter::once(hub), rank, sequence, reason);
            }
            _ => {}
        }
        self.trouble.get_or_insert(Trouble::Failed {
            rank,
            reason: reason.to_owned(),
        });
    }

    /// Says goodbye: the others do not take it for a death. Nothing is watched any more, and collectives fail.
    pub fn leave(&mut self) {
        let deadline = Instant::now() + PARTING;
        let bye = Frame::of(Kind::Bye, self.rank, self.sequence, Vec::new());
        // Best effort: who is gone needs no goodbye.
        let gone = &self.gone;
        let left = conns(&mut self.role).filter(|(_, rank)| !gone.contains_key(rank));
        send_all(left.map(|(conn, _)| conn), &bye, deadline);
        self.gone = (0..self.world).map(|rank| (rank, None)).collect();
    }
}
