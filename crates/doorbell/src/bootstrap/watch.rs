//! Between collectives: noticing ranks that die, and leaving without being taken for one.
//!
//! Rank 0 has a connection to everybody, so it notices whoever dies and tells the others; they notice rank 0. Who leaves says so.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::frame::{Frame, Kind, MAX_FRAME, Stream};
use super::{Bootstrap, BootstrapError, Result, Role, fail_all, given_up};

/// How long saying goodbye may take.
const PARTING: Duration = Duration::from_millis(200);

impl Bootstrap {
    /// Looks, without waiting, whether a rank was lost since the last look; each loss is an error once. Call it now and then,
    /// and never while a collective is under way.
    pub fn watch(&mut self) -> Result<()> {
        let sequence = self.sequence;
        match &mut self.role {
            Role::Leaf(hub) => {
                if self.gone.contains_key(&0) {
                    return Ok(());
                }
                let reason = match news(hub) {
                    Some(News::Failed) => {
                        let frame = hub.receive(0, "watch", MAX_FRAME, Instant::now() + PARTING)?;
                        return Err(given_up(&frame));
                    }
                    Some(News::Left) => None,
                    Some(News::Lost) => Some(LOST.to_owned()),
                    None => return Ok(()),
                };
                self.gone.insert(0, reason.clone());
                reason.map_or(Ok(()), |reason| Err(lost(0, reason)))
            }
            Role::Hub(peers) => {
                let mut found = None;
                for (peer, rank) in peers.iter_mut().zip(1u32..) {
                    if self.gone.contains_key(&rank) {
                        continue;
                    }
                    match news(peer) {
                        Some(News::Failed) => {
                            let end = Instant::now() + PARTING;
                            let frame = peer.receive(rank, "watch", MAX_FRAME, end)?;
                            let reason = String::from_utf8_lossy(&frame.body).into_owned();
                            let error = BootstrapError::Failed {
                                rank,
                                reason: reason.clone(),
                            };
                            found = Some((rank, reason, error));
                            break;
                        }
                        Some(News::Left) => {
                            self.gone.insert(rank, None);
                        }
                        Some(News::Lost) => {
                            self.gone.insert(rank, Some(LOST.to_owned()));
                            let error = lost(rank, LOST.to_owned());
                            found = Some((0, error.to_string(), error));
                            break;
                        }
                        None => {}
                    }
                }
                let Some((from, text, error)) = found else {
                    return Ok(());
                };
                tell(peers, &self.gone, from, sequence, &text);
                Err(error)
            }
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
        let (gone, rank, sequence) = (&self.gone, self.rank, self.sequence);
        match &mut self.role {
            Role::Leaf(_) if gone.contains_key(&0) => {}
            Role::Leaf(hub) => fail_all(std::iter::once(hub), rank, sequence, reason),
            Role::Hub(peers) => tell(peers, gone, rank, sequence, reason),
        }
    }

    /// Says goodbye: the others do not take it for a death. Nothing is watched any more, and collectives fail.
    pub fn leave(&mut self) {
        let deadline = Instant::now() + PARTING;
        let bye = Frame {
            kind: Kind::Bye,
            rank: self.rank,
            sequence: self.sequence,
            body: Vec::new(),
        };
        let streams = match &mut self.role {
            Role::Hub(peers) => peers.iter_mut().collect(),
            Role::Leaf(hub) => vec![hub],
        };
        for stream in streams {
            // Best effort: who is gone needs no goodbye.
            let _ = stream.send(&bye, deadline);
        }
        self.gone = (0..self.world).map(|rank| (rank, None)).collect();
    }
}

/// How a connection that ended without goodbye is reported.
const LOST: &str = "it closed its connection without goodbye";

fn lost(rank: u32, reason: String) -> BootstrapError {
    BootstrapError::Lost {
        what: "watch",
        rank,
        reason,
    }
}

/// What a connection says between collectives.
enum News {
    /// The rank has failed, and its words are there to be read.
    Failed,
    /// It said goodbye.
    Left,
    /// It ended without a word.
    Lost,
}

fn news(peer: &Stream) -> Option<News> {
    // In this order: what was sent before the end is there by then.
    let ended = peer.hung_up();
    match peer.peek_kind() {
        Some(Kind::Fail) => Some(News::Failed),
        Some(Kind::Bye) => Some(News::Left),
        _ => ended.then_some(News::Lost),
    }
}

/// Rank 0 tells the ranks that are left, except for the one that it is `from`.
fn tell(
    peers: &mut [Stream],
    gone: &BTreeMap<u32, Option<String>>,
    from: u32,
    sequence: u32,
    why: &str,
) {
    let left = peers.iter_mut().zip(1u32..);
    let left = left.filter(|(_, rank)| *rank != from && !gone.contains_key(rank));
    fail_all(left.map(|(peer, _)| peer), from, sequence, why);
}
