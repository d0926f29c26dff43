//! Long copies between host regions, done in slices, so that other QPs get their turns and deregistrations end.
//! The WQE's copy is kept until the last byte is in place; each slice resolves its keys anew, as they may have been revoked in between.

use std::time::Instant;

use doorbell_wire::{Chunk, Ctrl, Payload, Piece, Remote, Request};

use super::Cx;
use super::exec::Step;
use super::hot::TURN_BYTES;
use super::keys::Use;
use super::qp::{EngineQp, Park};
use crate::copy::{copy, write};
use crate::fault::Fault;
use crate::mem::Place;

/// A copy under way.
#[derive(Debug)]
pub(super) struct Slices {
    ctrl: Ctrl,
    wqe: Box<[Chunk]>,
    total: u32,
    done: u32,
    /// All bytes are in place, and since when the immediate has been waiting for a receive.
    waiting: Option<Instant>,
}

/// What the WQE says.
struct Transfer<'a> {
    remote: Remote,
    local: Payload<'a>,
    imm: Option<u32>,
    read: bool,
}

impl Slices {
    /// A WRITE or READ of `total` bytes, all of whose ranges were checked. Boxed: it is rare, and lies in a field that every QP has.
    pub(super) fn new(ctrl: Ctrl, wqe: &[Chunk], total: u32) -> Box<Self> {
        Box::new(Self {
            ctrl,
            wqe: wqe.into(),
            total,
            done: 0,
            waiting: None,
        })
    }
}

impl Slices {
    /// A SEND whose bytes are in place and which only has to be completed.
    pub(super) fn all_done(ctrl: Ctrl, wqe: &[Chunk], total: u32) -> Box<Self> {
        let mut slices = Self::new(ctrl, wqe, total);
        slices.done = total;
        slices
    }
}

impl<'a> Transfer<'a> {
    fn of(wqe: &'a [Chunk]) -> Result<Self, Fault> {
        match Request::parse(wqe)? {
            Request::Write { remote, local, imm } => Ok(Self {
                remote,
                local,
                imm,
                read: false,
            }),
            Request::Read { remote, local } => Ok(Self {
                remote,
                local,
                imm: None,
                read: true,
            }),
            _ => Err(Fault::BadOpcode),
        }
    }
}

impl EngineQp {
    /// The next slice of a long copy.
    ///
    /// # Safety
    /// As for [`Self::one`].
    pub(super) unsafe fn slice(&mut self, cx: &mut Cx<'_>, mut slices: Box<Slices>) -> Step {
        // SAFETY: passed on.
        match unsafe { self.advance(cx, &mut slices) } {
            Ok(true) => {
                let sop = self.cq.sop(slices.ctrl.opcode);
                self.complete(self.exec, sop, slices.ctrl.signalled(), slices.total);
                self.exec += u64::from(slices.ctrl.slots());
                self.park = None;
                Step::Done
            }
            Ok(false) => {
                self.park = Some(Park::Slices(slices));
                Step::Parked
            }
            Err(fault) => Step::Failed(fault, Some(slices.ctrl)),
        }
    }

    /// `true` when the WQE is complete.
    unsafe fn advance(&mut self, cx: &mut Cx<'_>, slices: &mut Slices) -> Result<bool, Fault> {
        if let Request::Send { local, imm } = Request::parse(&slices.wqe)? {
            let (done, total) = (slices.done, slices.total);
            // SAFETY: passed on.
            slices.done = unsafe { self.send_slice(cx, local, done, total) }?;
            return match slices.done == total {
                true => Ok(self.finish_send(imm, total)?.is_ok()),
                false => Ok(false),
            };
        }
        let transfer = Transfer::of(&slices.wqe)?;
        if slices.done < slices.total {
            // SAFETY: passed on.
            slices.done = unsafe { self.move_slice(cx, &transfer, slices.done) }?;
            if slices.done < slices.total {
                return Ok(false);
            }
        }
        match self.deliver(cx, self.exec, transfer.imm, slices.total, slices.waiting)? {
            Ok(()) => Ok(true),
            Err(since) => {
                slices.waiting = Some(since);
                Ok(false)
            }
        }
    }

    /// Moves what one turn may move, from byte `done` on; returns how far it got.
    unsafe fn move_slice(
        &mut self,
        cx: &mut Cx<'_>,
        transfer: &Transfer<'_>,
        done: u32,
    ) -> Result<u32, Fault> {
        let (near, far) = if transfer.read {
            (Use::Sink, Use::Read)
        } else {
            (Use::Source, Use::Write)
        };
        let Remote { addr, key } = transfer.remote;
        let mut done = u64::from(done);
        let mut budget = TURN_BYTES;
        let mut start = 0u64;
        for piece in transfer.local.pieces() {
            let (from, end) = (done - start, start + piece.len());
            start = end;
            if done >= end {
                continue;
            }
            let step = (end - done).min(budget);
            let there = self.locate(cx, far, key, addr.wrapping_add(done), step)?;
            let Place::Host(there) = there else {
                return Err(Fault::Unsupported);
            };
            match piece {
                Piece::Local(l) => {
                    let here = self.locate(cx, near, l.key, l.addr.wrapping_add(from), step)?;
                    let Place::Host(here) = here else {
                        return Err(Fault::Unsupported);
                    };
                    let (there, here) = (there.as_ptr(), here.as_ptr());
                    // SAFETY: both ranges were located inside regions that this round may use, with the rights for it.
                    unsafe {
                        if transfer.read {
                            copy(here, there, step as usize)
                        } else {
                            copy(there, here, step as usize)
                        }
                    }
                }
                Piece::Inline(inline) => {
                    let mut bytes = [0u8; 1024];
                    inline.copy_to(&mut bytes).ok_or(Fault::BadInline)?;
                    let part = bytes.get(from as usize..(from + step) as usize);
                    // SAFETY: the target was located for as many bytes.
                    unsafe { write(there.as_ptr(), part.ok_or(Fault::BadInline)?) };
                }
            }
            done += step;
            budget -= step;
            if budget == 0 {
                break;
            }
        }
        Ok(done as u32)
    }
}
