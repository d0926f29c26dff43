//! Collectives: every rank gives something, and gets what all gave, by way of rank 0.

use std::time::{Duration, Instant};

use super::conn::{Conn, wait};
use super::frame::{Frame, Kind, MAX_FRAME, pack, unpack};
use super::watch::Trouble;
use super::{Bootstrap, BootstrapError, GRACE, Result, Role};

/// How long a rank that waits for others goes without looking after itself.
const LOOK: Duration = Duration::from_millis(20);

/// Why this rank cannot go on, if it cannot.
type Check<'a> = &'a mut dyn FnMut() -> Option<String>;

impl Bootstrap {
    /// Every rank gives one blob and gets all of them, in rank order.
    pub fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.all_gather_while(blob, &mut || None)
    }

    /// As [`Bootstrap::all_gather`], with something that may go wrong on this rank meanwhile: it is asked all the time. The others are told, and
    /// the collective fails everywhere.
    pub fn all_gather_while(&mut self, blob: &[u8], check: Check<'_>) -> Result<Vec<Vec<u8>>> {
        self.exchange("all_gather", pack(&[blob]), check, |all| {
            let flat: Vec<&[u8]> = all
                .iter()
                .map(|parts| parts.first().map_or(&[][..], |p| p.as_slice()))
                .collect();
            vec![pack(&flat); all.len()]
        })
    }

    /// Rank `i` gives one blob for each rank and gets, in rank order, what each rank gave for `i`.
    /// `blobs` must have one entry a rank.
    pub fn all_to_all(&mut self, blobs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        self.all_to_all_while(blobs, &mut || None)
    }

    /// As [`Bootstrap::all_to_all`], with something that may go wrong meanwhile ([`Bootstrap::all_gather_while`]).
    pub fn all_to_all_while(
        &mut self,
        blobs: &[Vec<u8>],
        check: Check<'_>,
    ) -> Result<Vec<Vec<u8>>> {
        if blobs.len() != self.world as usize {
            return Err(BootstrapError::Protocol {
                rank: self.rank,
                found: format!("{} blobs", blobs.len()),
                expected: format!("one a rank, {}", self.world),
            });
        }
        let refs: Vec<&[u8]> = blobs.iter().map(Vec::as_slice).collect();
        self.exchange("all_to_all", pack(&refs), check, |all| {
            (0..all.len())
                .map(|to| {
                    let column: Vec<&[u8]> = all
                        .iter()
                        .map(|row| row.get(to).map_or(&[][..], |p| p.as_slice()))
                        .collect();
                    pack(&column)
                })
                .collect()
        })
    }

    /// Returns when every rank has called it.
    pub fn barrier(&mut self) -> Result<()> {
        self.all_gather(&[]).map(|_| ())
    }

    fn exchange(
        &mut self,
        what: &'static str,
        mine: Vec<u8>,
        check: Check<'_>,
        answer: impl FnOnce(&[Vec<Vec<u8>>]) -> Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>> {
        if mine.len() > MAX_FRAME {
            return Err(BootstrapError::TooLarge {
                len: mine.len(),
                max: MAX_FRAME,
            });
        }
        // Whoever has failed does not come, and those who know of it are not waited for.
        if let Some(trouble) = &self.trouble {
            return Err(trouble.error(what));
        }
        self.sequence += 1;
        let deadline = doorbell_hca::deadline(self.timeout);
        let result = match self.role {
            Role::Leaf(_) => self.give_and_wait(what, mine, check, deadline),
            Role::Hub(_) => self
                .collect(what, &mine, check, deadline)
                .and_then(|all| self.scatter(what, answer(&all), check)),
        };
        if let (Err(e), None) = (&result, &self.trouble) {
            self.tell(0, &e.to_string());
        }
        result
    }

    /// As another rank than 0.
    fn give_and_wait(
        &mut self,
        what: &'static str,
        mine: Vec<u8>,
        check: Check<'_>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let (sequence, rank) = (self.sequence, self.rank);
        let frame = Frame::of(Kind::Gather, rank, sequence, mine);
        conns(&mut self.role).for_each(|(hub, _)| hub.send(&frame));
        loop {
            self.look_around(what, 1, false)?;
            if let Some(frame) = conns(&mut self.role).find_map(|(hub, _)| hub.take(|_| true)) {
                expect(&frame, 0, Kind::Scatter, 0, sequence)?;
                return unpack(&frame.body, 0);
            }
            self.in_time(what, vec![0], deadline + GRACE)?;
            self.check(what, check)?;
            self.wait(deadline + GRACE);
        }
    }

    /// As rank 0: what all gave.
    fn collect(
        &mut self,
        what: &'static str,
        mine: &[u8],
        check: Check<'_>,
        deadline: Instant,
    ) -> Result<Vec<Vec<Vec<u8>>>> {
        let mut all = vec![None; self.world as usize];
        all[0] = Some(unpack(mine, 0)?);
        loop {
            self.look_around(what, usize::MAX, false)?;
            for ((peer, rank), part) in conns(&mut self.role).zip(&mut all[1..]) {
                if part.is_none()
                    && let Some(frame) = peer.take(|_| true)
                {
                    expect(&frame, rank, Kind::Gather, rank, self.sequence)?;
                    *part = Some(unpack(&frame.body, rank)?);
                }
            }
            let missing: Vec<u32> = (0..)
                .zip(&all)
                .filter_map(|(rank, part)| part.is_none().then_some(rank))
                .collect();
            if missing.is_empty() {
                return Ok(all.into_iter().flatten().collect());
            }
            self.in_time(what, missing, deadline)?;
            self.check(what, check)?;
            self.wait(deadline);
        }
    }

    /// As rank 0: everybody's answer; the own one is returned. Whoever does not take his is noticed as in any wait, and the others have theirs.
    fn scatter(
        &mut self,
        what: &'static str,
        answers: Vec<Vec<u8>>,
        check: Check<'_>,
    ) -> Result<Vec<Vec<u8>>> {
        if let Some(long) = answers.iter().find(|a| a.len() > MAX_FRAME) {
            return Err(BootstrapError::TooLarge {
                len: long.len(),
                max: MAX_FRAME,
            });
        }
        let mut answers = answers.into_iter();
        let own = answers.next().unwrap_or_default();
        // Sending has a deadline of its own: the last rank may have arrived just in time.
        let deadline = doorbell_hca::deadline(self.timeout);
        for ((conn, _), body) in conns(&mut self.role).zip(answers) {
            conn.send(&Frame::of(Kind::Scatter, 0, self.sequence, body));
        }
        loop {
            let behind = conns(&mut self.role).filter(|(conn, _)| conn.is_behind());
            let missing: Vec<u32> = behind.map(|(_, rank)| rank).collect();
            if missing.is_empty() {
                return unpack(&own, 0);
            }
            self.in_time(what, missing, deadline)?;
            self.look_around(what, usize::MAX, true)?;
            self.check(what, check)?;
            self.wait(deadline);
        }
    }

    /// What came meanwhile, on all connections; an error if somebody cannot go on. With `done`, who has been written everything may go.
    fn look_around(&mut self, what: &'static str, most: usize, done: bool) -> Result<()> {
        if let Some(trouble) = self.news(most, done)? {
            return Err(self.settle(what, trouble));
        }
        let gone = &self.gone;
        let wanted = |conn: &Conn| !done || conn.is_behind();
        let mut left = conns(&mut self.role)
            .filter(|(conn, rank)| matches!(gone.get(rank), Some(None)) && wanted(conn));
        left.next().map_or(Ok(()), |(_, rank)| {
            Err(BootstrapError::Lost {
                what,
                rank,
                reason: "it has left the job".to_owned(),
            })
        })
    }

    /// These are waited for until `deadline`, and then it is an error.
    fn in_time(&self, what: &'static str, missing: Vec<u32>, deadline: Instant) -> Result<()> {
        match Instant::now() < deadline {
            true => Ok(()),
            false => Err(BootstrapError::Missing {
                what,
                missing,
                world: self.world,
                after: self.timeout,
            }),
        }
    }

    /// Something went wrong here: the others are told.
    fn check(&mut self, what: &'static str, check: Check<'_>) -> Result<()> {
        let Some(reason) = check() else { return Ok(()) };
        self.fail(&reason);
        let rank = self.rank;
        Err(Trouble::Failed { rank, reason }.error(what))
    }

    fn wait(&self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now()).min(LOOK);
        match &self.role {
            Role::Leaf(hub) => wait(std::iter::once(hub), left),
            // Once somebody is behind nobody else is waited for, and some may have ended, who are always ready.
            Role::Hub(peers) if peers.iter().any(Conn::is_behind) => {
                wait(peers.iter().filter(|conn| conn.is_behind()), left);
            }
            Role::Hub(peers) => wait(peers.iter(), left),
        }
    }
}

/// Checks that a frame is the one that this rank waits for.
pub(super) fn expect(frame: &Frame, from: u32, kind: Kind, rank: u32, sequence: u32) -> Result<()> {
    if frame.kind == Kind::Fail {
        return Err(Trouble::told(frame, from).error("join"));
    }
    if (frame.kind, frame.rank, frame.sequence) != (kind, rank, sequence) {
        return Err(BootstrapError::Protocol {
            rank: from,
            found: format!(
                "{:?} of rank {}, number {}",
                frame.kind, frame.rank, frame.sequence
            ),
            expected: format!(
                "{kind:?} of rank {rank}, number {sequence} (all ranks make the same calls)"
            ),
        });
    }
    Ok(())
}

pub(super) fn conns(role: &mut Role) -> impl Iterator<Item = (&mut Conn, u32)> {
    match role {
        Role::Leaf(hub) => std::slice::from_mut(hub).iter_mut().zip(0u32..),
        Role::Hub(peers) => peers.iter_mut().zip(1u32..),
    }
}
