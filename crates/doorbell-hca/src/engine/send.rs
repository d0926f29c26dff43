//! SEND between QPs of one process (to another process: `mail`): take a receive of the target, check the message against it, fill its memory, complete it.
//!
//! A message that takes several turns (a long one, or one that a copy engine carries) keeps its receive taken meanwhile, and other
//! initiators to the same QP wait: messages never mix, and each receive holds one. What is wrong with the receive fails both ends.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use doorbell_wire::{Chunk, Ctrl, Local, Payload, Piece as WqePiece};

use super::Cx;
use super::exec::{MAX_MESSAGE, Outcome, patience};
use super::hot::TURN_BYTES;
use super::keys::Use;
use super::qp::{EngineQp, Park, Target};
use super::slices::Slices;
use crate::copy::{copy, write};
use crate::dma::{Piece, Source};
use crate::fault::Fault;
use crate::mem::{Access, End, Place};
use crate::qp::shared::QpShared;

/// Whose fault it is that bytes cannot be moved.
enum Refused {
    Mine(Fault),
    Theirs(Fault),
}

impl EngineQp {
    /// SEND.
    ///
    /// # Safety
    /// As for [`Self::one`].
    pub(super) unsafe fn send(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        local: Payload<'_>,
        imm: Option<u32>,
        wqe: &[Chunk],
    ) -> Result<Outcome, Fault> {
        let total = local.len();
        if total > MAX_MESSAGE {
            return Err(Fault::BadLength);
        }
        // What is wrong with our own memory takes no receive.
        for piece in local.pieces() {
            if let WqePiece::Local(l) = piece
                && l.len != 0
            {
                self.locate(cx, Use::Source, l.key, l.addr, u64::from(l.len))?;
            }
        }
        if let Target::Peer(peer) = &self.cold.target {
            let peer = Arc::clone(peer);
            if !self.cold.copies.is_empty() {
                return Ok(self.hold());
            }
            return self.post_mail(cx, ctrl, &peer, local);
        }
        if self.wait_for_copies() {
            return Ok(Outcome::Parked);
        }
        let peer = match &self.cold.target {
            Target::None => return Err(Fault::NotConnected),
            Target::Peer(_) | Target::Roce(_) | Target::Verbs(_) | Target::Srd(_) => {
                return Err(Fault::Unsupported);
            }
            Target::Loopback(peer) => Arc::clone(peer),
        };
        let since = match self.park {
            Some(Park::Receive { since }) => Some(since),
            _ => None,
        };
        let Some(recv) = &peer.recv else {
            return Err(Fault::NoReceive);
        };
        let taken = match recv.try_lock() {
            // SAFETY: an open receive queue's memory is mapped.
            Ok(mut recv) => unsafe { recv.take() }.then(|| (recv.pieces().to_vec(), recv.serial())),
            // Somebody else is delivering to the same QP.
            Err(_) => None,
        };
        let Some((sinks, serial)) = taken else {
            let since = patience(cx, since, Fault::NoReceive)?;
            self.park = Some(Park::Receive { since });
            return Ok(Outcome::Parked);
        };
        self.park = None;
        self.cold.holding = Some((Arc::clone(&peer), serial));
        let room: u64 = sinks.iter().map(|s| u64::from(s.len)).sum();
        if room < total {
            self.refuse_receive(&peer, serial, Fault::BadLength);
            return Err(Fault::ReceiveTooShort);
        }
        // Every piece is checked before the first byte moves.
        let moves = match self.moves(cx, &peer, &sinks, local, (0, total)) {
            Ok(moves) => moves,
            Err(refused) => return Err(self.refused(&peer, serial, refused)),
        };
        if moves.iter().any(on_device) {
            self.issue_send(cx, ctrl, moves, total as u32, imm);
            return Ok(Outcome::Issued);
        }
        if total > TURN_BYTES {
            self.park = Some(Park::Slices(Slices::new(ctrl, wqe, total as u32)));
            return Ok(Outcome::Parked);
        }
        // SAFETY: all ranges were located in this round, with the rights for it.
        unsafe { carry_out(&moves) };
        Ok(match self.finish_send(imm, total as u32)? {
            Ok(()) => Outcome::Complete(total as u32),
            // The bytes are in place; the slices, of which none are left, come back for the completion.
            Err(_) => {
                self.park = Some(Park::Slices(Slices::all_done(ctrl, wqe, total as u32)));
                Outcome::Parked
            }
        })
    }

    /// Moves what one turn may move of a long message, from byte `done` on; returns how far it got.
    ///
    /// # Safety
    /// As for [`Self::one`].
    pub(super) unsafe fn send_slice(
        &mut self,
        cx: &mut Cx<'_>,
        local: Payload<'_>,
        done: u32,
        total: u32,
    ) -> Result<u32, Fault> {
        let (Some((peer, serial)), true) = (self.cold.holding.clone(), done < total) else {
            return Ok(done);
        };
        let sinks = match peer.recv.as_ref().map(|r| r.try_lock()) {
            Some(Ok(recv)) if recv.holds(serial) => recv.pieces().to_vec(),
            // Looked at again in the next turn.
            Some(Err(std::sync::TryLockError::WouldBlock)) => return Ok(done),
            // It was reset or failed meanwhile.
            _ => return Err(Fault::PeerDead),
        };
        let end = total.min(done.saturating_add(TURN_BYTES as u32));
        let range = (u64::from(done), u64::from(end));
        match self.moves(cx, &peer, &sinks, local, range) {
            Ok(moves) if moves.iter().any(on_device) => Err(Fault::Unsupported),
            Ok(moves) => {
                // SAFETY: all ranges were located in this round, with the rights for it.
                unsafe { carry_out(&moves) };
                Ok(end)
            }
            Err(refused) => Err(self.refused(&peer, serial, refused)),
        }
    }

    /// The end of a SEND whose bytes are in place: completes its receive. `Err(since)`: not yet.
    pub(super) fn finish_send(
        &mut self,
        imm: Option<u32>,
        byte_cnt: u32,
    ) -> Result<Result<(), Instant>, Fault> {
        let Some((peer, serial)) = &self.cold.holding else {
            return Err(Fault::PeerDead);
        };
        let Some(recv) = &peer.recv else {
            return Err(Fault::PeerDead);
        };
        match recv.try_lock() {
            Ok(mut recv) if recv.holds(*serial) => {
                // SAFETY: an open receive queue's memory is mapped.
                unsafe { recv.complete(false, imm, byte_cnt) };
            }
            Err(std::sync::TryLockError::WouldBlock) => return Ok(Err(Instant::now())),
            // It was reset, failed or destroyed meanwhile.
            _ => return Err(Fault::PeerDead),
        }
        self.cold.holding = None;
        Ok(Ok(()))
    }

    /// Gives back a receive that was taken for a message that does not come to its end.
    pub(super) fn give_back(&mut self) {
        if let Some((peer, serial)) = self.cold.holding.take()
            && let Some(recv) = &peer.recv
        {
            let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
            if recv.holds(serial) {
                recv.untake();
            }
        }
    }

    fn refused(&mut self, peer: &QpShared, serial: u64, refused: Refused) -> Fault {
        match refused {
            Refused::Mine(fault) => fault,
            Refused::Theirs(fault) => {
                self.refuse_receive(peer, serial, fault);
                Fault::ReceiveRefused
            }
        }
    }

    /// The receive cannot take the message: it completes in error, and its QP fails.
    fn refuse_receive(&mut self, peer: &QpShared, serial: u64, fault: Fault) {
        self.cold.holding = None;
        let Some(recv) = &peer.recv else { return };
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        if recv.holds(serial) {
            // SAFETY: an open receive queue's memory is mapped.
            unsafe { recv.refuse(fault) };
            peer.set_recv_fault(fault);
        }
    }

    /// What to copy so that bytes `from .. to` of the message come into the receive's memory.
    fn moves(
        &mut self,
        cx: &mut Cx<'_>,
        peer: &QpShared,
        sinks: &[Local],
        local: Payload<'_>,
        (from, to): (u64, u64),
    ) -> Result<Vec<Piece>, Refused> {
        let mut moves = Vec::new();
        let mut sinks = sinks.iter();
        let mut sink = sinks.next();
        let (mut sink_start, mut start) = (0u64, 0u64);
        for piece in local.pieces() {
            let (begin, mut at) = (start, start.max(from));
            start += piece.len();
            let end = start.min(to);
            while at < end {
                let Some(s) = sink else {
                    return Err(Refused::Theirs(Fault::BadLength));
                };
                let sink_end = sink_start + u64::from(s.len);
                if at >= sink_end {
                    (sink, sink_start) = (sinks.next(), sink_end);
                    continue;
                }
                let len = end.min(sink_end) - at;
                let dst = theirs(cx, peer, s, at - sink_start, len).map_err(Refused::Theirs)?;
                let src = match &piece {
                    WqePiece::Local(l) => {
                        let addr = l.addr.wrapping_add(at - begin);
                        let place = self.locate(cx, Use::Source, l.key, addr, len);
                        Source::Place(place.map_err(Refused::Mine)?)
                    }
                    WqePiece::Inline(inline) => Source::Inline(
                        inline
                            .bytes()
                            .skip((at - begin) as usize)
                            .take(len as usize)
                            .collect(),
                    ),
                };
                moves.push(Piece { src, dst, len });
                at += len;
            }
        }
        Ok(moves)
    }
}

/// Where `[offset, offset + len)` of a receive's piece is.
fn theirs(
    cx: &Cx<'_>,
    peer: &QpShared,
    sink: &Local,
    offset: u64,
    len: u64,
) -> Result<Place, Fault> {
    let regions = &cx.inner.regions;
    // SAFETY: this is an engine in a round, and what is found is used in this round or held by a copy job.
    let span = unsafe { regions.resolve(End::Local, sink.key.0, peer.pd, Access::LOCAL_WRITE) }?;
    span.at(sink.addr.wrapping_add(offset), len)
        .ok_or(Fault::LkeyRange)
}

fn on_device(piece: &Piece) -> bool {
    matches!(piece.dst, Place::Device { .. })
        || matches!(piece.src, Source::Place(Place::Device { .. }))
}

/// Copies between host memory.
///
/// # Safety
/// Every range was located in this round, with the rights for it.
unsafe fn carry_out(moves: &[Piece]) {
    for piece in moves {
        let Place::Host(to) = &piece.dst else {
            continue;
        };
        match &piece.src {
            // SAFETY: the caller's promise.
            Source::Place(Place::Host(from)) => unsafe {
                copy(to.as_ptr(), from.as_ptr(), piece.len as usize)
            },
            // SAFETY: the caller's promise; a piece is as long as its inline bytes.
            Source::Inline(bytes) => unsafe { write(to.as_ptr(), bytes) },
            Source::Place(Place::Device { .. }) => {}
        }
    }
}
