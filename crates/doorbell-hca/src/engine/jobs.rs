//! WQEs whose bytes a copy engine moves: issued in order, completed in order, several under way at a time.
//! The queue remembers what each needs for its CQE. A WQE that the CPU executes itself waits until the queue is empty.

use std::collections::VecDeque;
use std::time::Instant;

use doorbell_wire::{Ctrl, Opcode, Payload, Piece as WqePiece, Remote, Width};

use super::Cx;
use super::exec::Step;
use super::keys::Use;
use super::qp::{EngineQp, Target};
use super::{LANES, lane};
use crate::dma::{self, DmaCore, Job, Piece, Pieces, Source, Word, Work};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::Place;
use crate::raw::Shared;

/// WQEs of one QP under way at most: enough for several full batches of the copy engine.
const LIMIT: usize = 1024;

/// A WQE under way.
#[derive(Clone, Copy, Debug)]
struct Issued {
    /// Its first slot.
    at: u64,
    ctrl: Ctrl,
    byte_cnt: u32,
    imm: Option<u32>,
    /// A SEND: completes the receive that it has taken.
    send: bool,
    result: Option<Result<(), Fault>>,
    /// Since when its immediate has been waiting for a receive.
    waiting: Option<Instant>,
}

/// WQEs under way, oldest first.
#[derive(Debug, Default)]
pub(super) struct CopyQueue {
    issued: VecDeque<Issued>,
    /// So many of the first have their results.
    ended: usize,
    /// So many of them complete a receive: their copies may have ended long before one is posted.
    delivering: usize,
}

impl Issued {
    /// It is executed once it has completed a receive, not when its copy ends.
    fn delivers(&self) -> bool {
        self.send || self.imm.is_some()
    }
}

impl CopyQueue {
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.issued.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.issued.len() >= LIMIT
    }

    /// First slot of the oldest.
    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<u64> {
        self.issued.front().map(|i| i.at)
    }

    /// The copy of the WQE at `at` ended. Copies of one QP end in order, so it is the first without a result.
    pub(super) fn finished(&mut self, at: u64, result: Result<(), Fault>) {
        if let Some(issued) = self.issued.get_mut(self.ended) {
            debug_assert!(issued.at == at && issued.result.is_none());
            issued.result = Some(result);
            self.ended += 1;
        }
    }

    fn push(&mut self, issued: Issued) {
        self.delivering += usize::from(issued.delivers());
        self.issued.push_back(issued);
    }

    /// The oldest, which has a result, is complete.
    fn completed(&mut self) {
        let oldest = self.issued.pop_front();
        self.delivering -= usize::from(oldest.is_some_and(|i| i.delivers()));
        self.ended -= 1;
    }

    pub(super) fn clear(&mut self) {
        self.issued.clear();
        self.ended = 0;
        self.delivering = 0;
    }
}

impl EngineQp {
    /// Completes the WQEs whose copies are done. `Failed`: the QP goes to error at that WQE, which is at `exec` then.
    pub(super) fn drain(&mut self, cx: &mut Cx<'_>) -> Step {
        let mut any = false;
        while let Some(issued) = self.cold.copies.issued.front().copied() {
            let Some(result) = issued.result else { break };
            let delivered = match result {
                Ok(()) if issued.send => self.finish_send(issued.imm, issued.byte_cnt),
                Ok(()) => self.deliver(cx, issued.at, issued.imm, issued.byte_cnt, issued.waiting),
                Err(fault) => Err(fault),
            };
            match delivered {
                Ok(Ok(())) => {
                    self.cold.copies.completed();
                    let sop = self.cq.sop(issued.ctrl.opcode);
                    self.complete(issued.at, sop, issued.ctrl.signalled(), issued.byte_cnt);
                    self.cold.shared.counters.copies.add(1);
                    any = true;
                }
                Ok(Err(since)) => {
                    self.cold.copies.issued[0].waiting = Some(since);
                    break;
                }
                Err(fault) => {
                    // What was issued behind it is not reported any more: it counts as not executed.
                    cx.dma.cancel(lane(cx.slot, 0));
                    self.cold.copies.clear();
                    self.exec = issued.at;
                    return Step::Failed(fault, Some(issued.ctrl));
                }
            }
        }
        if any { Step::Done } else { Step::Parked }
    }

    /// Hands a transfer to or from device memory to the core's copy pipeline; every range has been checked. `lone`: it is one piece, with its places at
    /// the target and here.
    #[allow(clippy::too_many_arguments, reason = "the parts of one request")]
    pub(super) fn issue(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        remote: Remote,
        local: Payload<'_>,
        imm: Option<u32>,
        read: bool,
        lone: Option<(Place, Place)>,
    ) -> Result<bool, Fault> {
        if !self.may_issue(ctrl) {
            return Ok(false);
        }
        let len = local.len();
        let (pieces, inline) = match lone {
            Some((there, here)) => {
                let (src, dst) = if read { (there, here) } else { (here, there) };
                let src = Source::Place(src);
                (Pieces::One(Piece { src, dst, len }), false)
            }
            None => self.pieces(cx, remote, local, read)?,
        };
        // Where writes keep their order each of them is as a signal is: after everything before it.
        let signal = inline
            || imm.is_some()
            || (!read && len > 0 && self.resolve(cx, Use::Write, remote.key)?.ordered);
        let work = Work::Copy { pieces, signal };
        self.start(cx, ctrl, work, len as u32, imm);
        Ok(true)
    }

    /// The pieces of a transfer with their places, and whether any of them is in the WQE.
    fn pieces(
        &mut self,
        cx: &mut Cx<'_>,
        remote: Remote,
        local: Payload<'_>,
        read: bool,
    ) -> Result<(Pieces, bool), Fault> {
        let (near, far) = if read {
            (Use::Sink, Use::Read)
        } else {
            (Use::Source, Use::Write)
        };
        let mut pieces = Vec::new();
        let mut inline = false;
        let mut offset = 0u64;
        for piece in local.pieces() {
            let len = piece.len();
            if len == 0 {
                continue;
            }
            let there = self.locate(cx, far, remote.key, remote.addr.wrapping_add(offset), len)?;
            let here = match piece {
                WqePiece::Local(l) => Source::Place(self.locate(cx, near, l.key, l.addr, len)?),
                WqePiece::Inline(bytes) => {
                    inline = true;
                    Source::Inline(bytes.bytes().collect())
                }
            };
            let (src, dst) = match (read, here) {
                (false, here) => (here, there),
                (true, Source::Place(here)) => (Source::Place(there), here),
                (true, Source::Inline(_)) => return Err(Fault::BadInline),
            };
            pieces.push(Piece { src, dst, len });
            offset += len;
        }
        let pieces = match pieces.len() {
            1 => pieces.pop().map_or(Pieces::Many(Vec::new()), Pieces::One),
            _ => Pieces::Many(pieces),
        };
        Ok((pieces, inline))
    }

    /// Hands an atomic on a word of device memory to the copy pipeline.
    pub(super) fn issue_atomic(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        word: Place,
        sink: Place,
        width: Width,
        new: impl FnOnce(u64) -> u64 + Send + 'static,
    ) -> Result<bool, Fault> {
        let Place::Device { addr, dma } = word else {
            return Err(Fault::Unsupported);
        };
        if addr & u64::from(width.bytes() - 1) != 0 {
            return Err(Fault::Misaligned);
        }
        if !self.may_issue_atomic(ctrl) {
            return Ok(false);
        }
        let work = Work::Atomic {
            addr,
            dma,
            width,
            new: Box::new(new),
            sink: Some(sink),
        };
        self.start(cx, ctrl, work, width.bytes(), None);
        Ok(true)
    }

    /// Hands an atomic on a word of host memory to the copy pipeline, where it waits for the copies before it and those behind it do not wait
    /// for it.
    pub(super) fn issue_word(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        at: Shared<u8>,
        sink: Shared<u8>,
        width: Width,
        new: impl Fn(u64) -> u64 + Send + 'static,
    ) -> bool {
        if !self.may_issue_atomic(ctrl) {
            return false;
        }
        let word = Word {
            at,
            width,
            sink: Some(sink),
            new: Box::new(new),
        };
        self.start(cx, ctrl, Work::Word(word), width.bytes(), None);
        true
    }

    /// Puts the old value of an atomic that the CPU executed into a sink in device memory.
    pub(super) fn issue_old(&mut self, cx: &mut Cx<'_>, ctrl: Ctrl, old: &[u8], sink: Place) {
        let piece = Piece {
            src: Source::Inline(old.into()),
            dst: sink,
            len: old.len() as u64,
        };
        let work = Work::Copy {
            pieces: Pieces::One(piece),
            signal: true,
        };
        self.start(cx, ctrl, work, old.len() as u32, None);
    }

    /// Hands the moves of a SEND to the core's copy pipeline. No other copies of this QP are under way.
    pub(super) fn issue_send(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        pieces: Vec<Piece>,
        byte_cnt: u32,
        imm: Option<u32>,
    ) {
        let work = Work::Copy {
            pieces: Pieces::Many(pieces),
            signal: true,
        };
        self.start(cx, ctrl, work, byte_cnt, imm);
    }

    fn may_issue(&self, ctrl: Ctrl) -> bool {
        let copies = &self.cold.copies;
        // Messages complete before what a copy engine does behind them.
        !copies.is_full() && (copies.is_empty() || !ctrl.fenced()) && self.cold.flight.is_empty()
    }

    /// The pipeline carries out an atomic once the copies before it have ended. That is too early where one of them still has to complete a
    /// receive: the word would change first, and change although the queue pair then fails before it, for want of a receive.
    fn may_issue_atomic(&self, ctrl: Ctrl) -> bool {
        self.may_issue(ctrl) && self.cold.copies.delivering == 0
    }

    fn start(&mut self, cx: &mut Cx<'_>, ctrl: Ctrl, work: Work, byte_cnt: u32, imm: Option<u32>) {
        let at = self.exec;
        let hold = cx.acknowledger.issued();
        cx.dma.start(
            Job {
                qp: lane(cx.slot, 0),
                cookie: at,
                hold,
                work,
            },
            Instant::now(),
        );
        self.cold.copies.push(Issued {
            at,
            ctrl,
            byte_cnt,
            imm,
            send: matches!(ctrl.opcode(), Ok(Opcode::Send | Opcode::SendImm)),
            result: None,
            waiting: None,
        });
    }

    /// Copies under way are not reported any more; their WQEs count as not executed.
    pub(super) fn drop_copies(&mut self, dma: &mut DmaCore, slot: u32) {
        if let Some(oldest) = self.cold.copies.oldest() {
            dma.cancel(lane(slot, 0));
            self.cold.copies.clear();
            self.exec = oldest;
        }
        self.give_up_flight();
        self.unstage(dma, slot);
    }
}

impl super::Core {
    /// Moves the copy pipeline on and hands out what ended; the QPs write their CQEs in their turns.
    #[cold]
    pub(super) fn collect_copies(&mut self, inner: &Inner) -> u64 {
        let Self {
            qps,
            dma,
            acknowledger,
            roused,
            ..
        } = self;
        let mut ended = 0;
        let mut unused = Vec::new();
        dma.poll(Instant::now(), |event| match event {
            dma::Event::Retired { hold } => acknowledger.retired(hold),
            dma::Event::Completed {
                qp,
                cookie,
                result,
                old,
                buffer,
            } => {
                let (slot, lane) = ((qp / LANES) as usize, qp % LANES);
                let Some(qp) = qps.get_mut(slot).and_then(|q| q.as_deref_mut()) else {
                    unused.extend(buffer);
                    return;
                };
                ended += 1;
                if let Err(reason) = &result {
                    let (qpn, reason) = (qp.qpn(), reason.to_string());
                    inner.events.push(crate::Event::CopyFailed { qpn, reason });
                }
                if lane != 0 {
                    if matches!(qp.cold.target, Target::Roce(_)) {
                        roused.push(slot as u32);
                    }
                    unused.extend(qp.staged_ended(lane, cookie, &result, old, buffer));
                } else {
                    let result = result.map_err(|_| Fault::DmaFailed);
                    qp.cold.copies.finished(cookie, result);
                }
            }
        });
        for buffer in unused {
            dma.release(buffer);
        }
        ended
    }
}
