//! Everything that the hot loops leave: one WQE at a time, read once, checked completely before a byte moves, and then executed,
//! set aside, or refused with its fault.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

use doorbell_wire::{Chunk, Cqn, Ctrl, Key, Local, Payload, Piece, Remote, Request, Width, arith};

use super::Cx;
use super::hot::TURN_BYTES;
use super::keys::{CachedKey, Use};
use super::qp::{EngineQp, Park, Target};
use super::slices::Slices;
use crate::copy::{copy, write};
use crate::dma::{old_bytes, put_old};
use crate::fault::Fault;
use crate::link::Delivery;
use crate::mem::{Access, End, Place, Span};
use crate::qp::QpState;
use crate::raw::Shared;

/// What became of the WQE at the head.
pub(super) enum Step {
    /// Executed (or issued to a copy engine); the next one may follow.
    Done,
    /// Set aside, to be looked at again in a later turn.
    Parked,
    /// Refused.
    Failed(Fault, Option<Ctrl>),
}

/// What executing a request came to.
pub(super) enum Outcome {
    /// Complete; so many bytes moved.
    Complete(u32),
    /// A copy engine has it.
    Issued,
    /// Set aside (`park` says why).
    Parked,
}

/// The largest message (IB's limit).
pub(super) const MAX_MESSAGE: u64 = 1 << 31;
/// A WRITE of so many bytes at most may have been inline: a WQE has no more than 63 chunks of 16 bytes, its segments among them.
pub(super) const SIGNAL: u32 = 63 * 16;

impl EngineQp {
    /// Looks at the WQE in slot `exec`.
    ///
    /// # Safety
    /// The QP is attached, `exec < pi`, and the cached keys are of this round.
    pub(super) unsafe fn one(&mut self, cx: &mut Cx<'_>) -> Step {
        let at = self.exec;
        // SAFETY: `exec` is a slot of the ring.
        let head = unsafe { self.chunk(at, 0) };
        let ctrl = Ctrl::parse(head);
        if !ctrl.matches(at as u16, self.qpn()) {
            return self.stale(cx, ctrl);
        }
        if matches!(self.park, Some(Park::Stale { .. })) {
            self.park = None;
        }
        let slots = ctrl.slots();
        let fault = if ctrl.ds == 0 || u64::from(slots) > self.pi - at {
            Some(Fault::BadDs)
        } else if self.per_slot() && (slots != 1 || !ctrl.signalled()) {
            Some(Fault::UnsignalledPerSlot)
        } else {
            None
        };
        if let Some(fault) = fault {
            return self.refuse(fault, ctrl);
        }
        // SAFETY: `slots` slots are rung; sizes above 63 chunks are refused by `gather`.
        unsafe {
            match slots {
                1 => self.gather::<4>(cx, head, ctrl),
                2 => self.gather::<8>(cx, head, ctrl),
                _ => self.gather::<64>(cx, head, ctrl),
            }
        }
    }

    /// Copies the WQE out of the ring, once, and executes the copy.
    ///
    /// # Safety
    /// As for [`Self::one`]; all slots of the WQE are rung.
    #[inline(always)]
    unsafe fn gather<const CHUNKS: usize>(
        &mut self,
        cx: &mut Cx<'_>,
        head: Chunk,
        ctrl: Ctrl,
    ) -> Step {
        let mut wqe = [Chunk::ZERO; CHUNKS];
        let Some(wqe) = wqe.get_mut(..usize::from(ctrl.ds)) else {
            return self.refuse(Fault::BadDs, ctrl);
        };
        wqe[0] = head;
        for (i, chunk) in wqe.iter_mut().enumerate().skip(1) {
            // SAFETY: the caller's promise.
            *chunk = unsafe { self.chunk(self.exec, i as u64) };
        }
        self.parsed(cx, ctrl, wqe)
    }

    /// Chunk `i` of the WQE at slot `at`, wrapping at the end of the ring.
    ///
    /// # Safety
    /// The ring is mapped.
    #[inline(always)]
    pub(super) unsafe fn chunk(&self, at: u64, i: u64) -> Chunk {
        let slot = (at + i / 4) & self.mask;
        // SAFETY: the slot is inside the ring, the two words inside the slot.
        unsafe {
            let words = self.ring.word((slot * 8 + i % 4 * 2) as usize);
            Chunk([words.load(), words.word(1).load()])
        }
    }

    /// The control segment is not (yet) the one that was rung: look again for a bounded time.
    #[cold]
    fn stale(&mut self, cx: &mut Cx<'_>, ctrl: Ctrl) -> Step {
        self.cold.shared.counters.stale_reads.add(1);
        match self.park {
            Some(Park::Stale { since }) if since.elapsed() < cx.inner.config.stale_limit => {}
            // What is under way completes first.
            Some(Park::Stale { .. }) if self.is_under_way() => {}
            Some(Park::Stale { .. }) => {
                let index_fits = ctrl.idx == self.exec as u16;
                let fault = if index_fits {
                    Fault::BadQpn
                } else {
                    Fault::StaleIndex
                };
                return Step::Failed(fault, None);
            }
            _ => {
                self.park = Some(Park::Stale {
                    since: Instant::now(),
                })
            }
        }
        Step::Parked
    }

    /// A fault waits for the copies before it, which are still to complete.
    fn refuse(&mut self, fault: Fault, ctrl: Ctrl) -> Step {
        if !self.is_under_way() {
            Step::Failed(fault, Some(ctrl))
        } else {
            self.park = Some(Park::Copies);
            Step::Parked
        }
    }

    /// Are copies or messages of earlier WQEs not complete yet?
    pub(super) fn is_under_way(&self) -> bool {
        !self.cold.copies.is_empty() || !self.cold.flight.is_empty()
    }

    fn parsed(&mut self, cx: &mut Cx<'_>, ctrl: Ctrl, wqe: &[Chunk]) -> Step {
        let request = match Request::parse(wqe) {
            Ok(request) => request,
            Err(e) => return self.refuse(e.into(), ctrl),
        };
        // SAFETY: the caller of `one` promises that the QP is attached and its keys are of this round.
        match unsafe { self.execute(cx, ctrl, request, wqe) } {
            Ok(Outcome::Parked) => Step::Parked,
            Ok(outcome) => {
                if let Outcome::Complete(byte_cnt) = outcome {
                    let sop = self.cq.sop(ctrl.opcode);
                    self.complete(self.exec, sop, ctrl.signalled(), byte_cnt);
                }
                self.exec += u64::from(ctrl.slots());
                self.park = None;
                Step::Done
            }
            Err(fault) => self.refuse(fault, ctrl),
        }
    }

    /// Executes a request.
    unsafe fn execute(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        request: Request<'_>,
        wqe: &[Chunk],
    ) -> Result<Outcome, Fault> {
        if matches!(self.cold.target, Target::Roce(_)) {
            return self.post(cx, ctrl, request);
        }
        if matches!(self.cold.target, Target::Verbs(_)) {
            return self.post_verbs(cx, ctrl, request, wqe);
        }
        if matches!(self.cold.target, Target::Srd(_)) {
            return self.post_srd(cx, ctrl, request);
        }
        match request {
            Request::Nop => self.after_copies(0),
            Request::Wait { index, cqn } => match self.waits(cx, index, cqn)? {
                true => Ok(Outcome::Parked),
                false => self.after_copies(0),
            },
            Request::Dump { local } => {
                self.locate(cx, Use::Source, local.key, local.addr, u64::from(local.len))?;
                self.after_copies(local.len)
            }
            // SAFETY: passed on.
            Request::Send { local, imm } => unsafe { self.send(cx, ctrl, local, imm, wqe) },
            // SAFETY: passed on.
            Request::Write { remote, local, imm } => unsafe {
                self.transfer(cx, ctrl, remote, local, imm, false, wqe)
            },
            // SAFETY: passed on.
            Request::Read { remote, local } => unsafe {
                self.transfer(cx, ctrl, remote, local, None, true, wqe)
            },
            Request::FetchAdd { remote, local, add } => {
                // SAFETY: passed on.
                unsafe {
                    self.atomic(cx, ctrl, remote, local, Width::Eight, move |old| {
                        old.wrapping_add(add)
                    })
                }
            }
            Request::CompareSwap {
                remote,
                local,
                swap,
                compare,
            } => {
                // SAFETY: passed on.
                unsafe {
                    self.atomic(cx, ctrl, remote, local, Width::Eight, move |old| {
                        if old == compare { swap } else { old }
                    })
                }
            }
            Request::MaskedFetchAdd {
                remote,
                local,
                width,
                add,
                boundary,
            } => {
                // SAFETY: passed on.
                unsafe {
                    self.atomic(cx, ctrl, remote, local, width, move |old| {
                        arith::masked_add(old, add, boundary)
                    })
                }
            }
            Request::MaskedCompareSwap {
                remote,
                local,
                width,
                swap,
                compare,
                swap_mask,
                compare_mask,
            } => {
                // SAFETY: passed on.
                unsafe {
                    self.atomic(cx, ctrl, remote, local, width, move |old| {
                        arith::masked_swap(old, swap, compare, swap_mask, compare_mask)
                    })
                }
            }
        }
    }

    /// WAIT: `true` while that CQ has not completed so far; the QP is parked then.
    pub(super) fn waits(&mut self, cx: &Cx<'_>, index: u32, cqn: Cqn) -> Result<bool, Fault> {
        let on = match &self.park {
            Some(Park::Wait { on, .. }) if on.cq.cqn == cqn => Arc::clone(on),
            _ => cx.inner.queues.by_cqn(cqn).ok_or(Fault::BadWaitCq)?,
        };
        let waits = !waited(&on, index).ok_or(Fault::BadWaitCq)?;
        if waits {
            self.park = Some(Park::Wait { on, index });
        }
        Ok(waits)
    }

    /// Something that the CPU does at once may be done only when the copies before it are complete.
    fn after_copies(&mut self, byte_cnt: u32) -> Result<Outcome, Fault> {
        Ok(if self.wait_for_copies() {
            Outcome::Parked
        } else {
            Outcome::Complete(byte_cnt)
        })
    }

    pub(super) fn wait_for_copies(&mut self) -> bool {
        if !self.is_under_way() {
            return false;
        }
        self.park = Some(Park::Copies);
        true
    }

    /// WRITE or READ.
    #[allow(clippy::too_many_arguments, reason = "the parts of one request")]
    unsafe fn transfer(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        remote: Remote,
        local: Payload<'_>,
        imm: Option<u32>,
        read: bool,
        wqe: &[Chunk],
    ) -> Result<Outcome, Fault> {
        let total = local.len();
        if total > MAX_MESSAGE {
            return Err(Fault::BadLength);
        }
        let (near, far) = if read {
            (Use::Sink, Use::Read)
        } else {
            (Use::Source, Use::Write)
        };
        let there = match total {
            // A message of no bytes opens no key (IB 9.7.4.1.5).
            0 => None,
            _ => Some(self.locate(cx, far, remote.key, remote.addr, total)?),
        };
        // Every piece is checked before the first byte moves.
        let mut all_host = !matches!(there, Some(Place::Device { .. }));
        let mut lone = None;
        for piece in local.pieces() {
            // Nor does a piece of no bytes.
            if let Piece::Local(l) = piece
                && l.len != 0
            {
                let here = self.locate(cx, near, l.key, l.addr, u64::from(l.len))?;
                all_host &= matches!(here, Place::Host(_));
                lone = Some(here);
            }
        }
        if !all_host {
            let lone = match (there, lone, &local) {
                (Some(there), Some(here), Payload::Local(_)) => Some((there, here)),
                _ => None,
            };
            let issued = self.issue(cx, ctrl, remote, local, imm, read, lone)?;
            return Ok(self.issued_or_parked(issued));
        }
        if self.wait_for_copies() {
            return Ok(Outcome::Parked);
        }
        if total > TURN_BYTES {
            self.park = Some(Park::Slices(Slices::new(ctrl, wqe, total as u32)));
            return Ok(Outcome::Parked);
        }
        if let (Some(Place::Host(there)), Payload::Inline(inline), Some(data)) =
            (&there, &local, wqe.get(2..))
        {
            // The usual inline WRITE: its bytes follow four bytes of header in the third chunk and those behind it.
            // SAFETY: chunks are plain words, so their bytes are initialised; the parser found the payload inside the WQE.
            let bytes = unsafe {
                debug_assert!(inline.len() + 4 <= 16 * data.len());
                core::slice::from_raw_parts(data.as_ptr().cast::<u8>().add(4), inline.len())
            };
            // SAFETY: `locate` found the target inside its region.
            unsafe { write(there.as_ptr(), bytes) };
        } else if let Some(Place::Host(there)) = there {
            let mut offset = 0usize;
            for piece in local.pieces() {
                let len = piece.len() as usize;
                if len == 0 {
                    continue;
                }
                // SAFETY: `offset + len <= total`, which lies inside the remote region.
                let there = unsafe { there.byte_add(offset) }.as_ptr();
                match piece {
                    Piece::Local(l) => {
                        let Place::Host(here) =
                            self.locate(cx, near, l.key, l.addr, u64::from(l.len))?
                        else {
                            return Err(Fault::Unsupported);
                        };
                        // SAFETY: both ranges were located inside regions that this round may use, with the rights for it.
                        unsafe {
                            if read {
                                copy(here.as_ptr(), there, len)
                            } else {
                                copy(there, here.as_ptr(), len)
                            }
                        }
                    }
                    Piece::Inline(inline) => {
                        let mut bytes = [0u8; 1024];
                        let len = inline.copy_to(&mut bytes).ok_or(Fault::BadInline)?;
                        // SAFETY: as above.
                        unsafe { write(there, &bytes[..len]) };
                    }
                }
                offset += len;
            }
        }
        let since = match self.park {
            Some(Park::Receive { since }) => Some(since),
            _ => None,
        };
        Ok(
            match self.deliver(cx, self.exec, imm, total as u32, since)? {
                Ok(()) => Outcome::Complete(total as u32),
                Err(since) => {
                    self.park = Some(Park::Receive { since });
                    Outcome::Parked
                }
            },
        )
    }

    /// The end of a WRITE whose bytes are in place: the immediate, if there is one. `Err(since)`: it waits for a receive.
    pub(super) fn deliver(
        &mut self,
        cx: &mut Cx<'_>,
        at: u64,
        imm: Option<u32>,
        byte_cnt: u32,
        since: Option<Instant>,
    ) -> Result<Result<(), Instant>, Fault> {
        let Some(imm) = imm else { return Ok(Ok(())) };
        let delivery = match &self.cold.target {
            Target::None => return Err(Fault::NotConnected),
            // Messages carry their immediates themselves.
            Target::Roce(_) | Target::Verbs(_) | Target::Srd(_) => return Err(Fault::Unsupported),
            Target::Peer(peer) if !peer.receives() => Delivery::Failed(Fault::NoReceive),
            Target::Peer(peer) => peer.deliver_imm(at, imm, byte_cnt),
            Target::Loopback(peer) => match peer.recv.as_ref().map(std::sync::Mutex::try_lock) {
                None => Delivery::Failed(Fault::NoReceive),
                // Somebody else is delivering to the same QP.
                Some(Err(_)) => Delivery::Pending,
                // SAFETY: an open receive queue's memory is mapped.
                Some(Ok(mut recv)) => match unsafe { recv.deliver(imm, byte_cnt) } {
                    true => Delivery::Delivered,
                    false => Delivery::NoReceive,
                },
            },
        };
        match delivery {
            Delivery::Delivered => Ok(Ok(())),
            Delivery::Failed(fault) => Err(fault),
            Delivery::Pending => patience(cx, since, Fault::PeerDead).map(Err),
            Delivery::NoReceive => patience(cx, since, Fault::NoReceive).map(Err),
        }
    }

    /// An atomic of 4 or 8 bytes. The old value goes to the sink in host order for 8 bytes, big-endian for 4 (as mlx5's do).
    unsafe fn atomic(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        remote: Remote,
        local: Local,
        width: Width,
        new: impl Fn(u64) -> u64 + Send + 'static,
    ) -> Result<Outcome, Fault> {
        let bytes = width.bytes();
        let there = self.locate(cx, Use::Atomic, remote.key, remote.addr, u64::from(bytes))?;
        let here = self.locate(cx, Use::Sink, local.key, local.addr, u64::from(bytes))?;
        let Place::Host(word) = there else {
            let issued = self.issue_atomic(cx, ctrl, there, here, width, new)?;
            return Ok(self.issued_or_parked(issued));
        };
        if !word.is_aligned_to(bytes as usize) {
            return Err(Fault::Misaligned);
        }
        if self.is_under_way() {
            let issued = match here {
                Place::Host(sink) => self.issue_word(cx, ctrl, word, sink, width, new),
                Place::Device { .. } => false,
            };
            return Ok(self.issued_or_parked(issued));
        }
        // SAFETY: the range was located inside a region that this round may use, with the right for it, and is aligned.
        let old = unsafe { modify(word, width, new) };
        match here {
            Place::Host(here) => {
                // SAFETY: as above.
                unsafe { put_old(here, width, old) };
                Ok(Outcome::Complete(bytes))
            }
            here @ Place::Device { .. } => {
                let old = &old_bytes(width, old)[..bytes as usize];
                self.issue_old(cx, ctrl, old, here);
                Ok(Outcome::Issued)
            }
        }
    }

    /// Where `[addr, addr + len)` of a key is; rights and bounds checked.
    pub(super) fn locate(
        &mut self,
        cx: &mut Cx<'_>,
        usage: Use,
        key: Key,
        addr: u64,
        len: u64,
    ) -> Result<Place, Fault> {
        let cached = *self.keys.entry(usage);
        if cached.raw == key.to_be() && cached.len != 0 {
            let (offset, inside) = cached.locate(addr, len);
            if !inside {
                return Err(usage.end().range());
            }
            // SAFETY: the offset lies inside the region.
            let at = unsafe { cached.ptr.add(offset as usize) };
            return Shared::from_ptr(at)
                .map(Place::Host)
                .ok_or(usage.end().range());
        }
        self.cold.shared.counters.key_lookups.add(1);
        let span = self.resolve(cx, usage, key)?;
        let offset = span.offset(addr, len).ok_or(usage.end().range())?;
        match span.place {
            Place::Host(base) => {
                *self.keys.entry(usage) = CachedKey {
                    raw: key.to_be(),
                    base: span.base,
                    len: span.len,
                    ptr: base.as_ptr(),
                };
                // SAFETY: the offset lies inside the region.
                Ok(Place::Host(unsafe { base.byte_add(offset as usize) }))
            }
            Place::Device { addr, dma } => Ok(Place::Device {
                addr: addr + offset,
                dma,
            }),
        }
    }

    pub(super) fn resolve(&self, cx: &Cx<'_>, usage: Use, key: Key) -> Result<Span, Fault> {
        let need = usage.need();
        let regions = &cx.inner.regions;
        match (usage.end(), &self.cold.target) {
            // SAFETY: this is an engine in a round: what is found is used in this round, and cached keys are dropped when the epoch changes.
            (End::Local, _) => unsafe {
                regions.resolve(End::Local, key.0, self.cold.shared.pd, need)
            },
            // SAFETY: as above.
            (End::Remote, Target::Loopback(peer)) => unsafe {
                regions.resolve(End::Remote, key.0, peer.pd, need)
            },
            (End::Remote, Target::Peer(peer)) => peer.resolve(key, need),
            // The peer's keys are the peer's to resolve.
            (End::Remote, Target::Roce(_) | Target::Verbs(_) | Target::Srd(_)) => {
                Err(Fault::Unsupported)
            }
            (End::Remote, Target::None) => Err(Fault::NotConnected),
        }
    }

    fn issued_or_parked(&mut self, issued: bool) -> Outcome {
        if issued {
            return Outcome::Issued;
        }
        self.park = Some(Park::Copies);
        Outcome::Parked
    }
}

/// Since when the target has had no receive; `fault` once that is too long.
pub(super) fn patience(
    cx: &Cx<'_>,
    since: Option<Instant>,
    fault: Fault,
) -> Result<Instant, Fault> {
    let since = since.unwrap_or_else(Instant::now);
    if since.elapsed() < cx.inner.config.rnr_limit {
        Ok(since)
    } else {
        Err(fault)
    }
}

/// Changes a word atomically; returns its old value.
///
/// # Safety
/// `word` is mapped and aligned to its width.
pub(crate) unsafe fn modify(word: Shared<u8>, width: Width, new: impl Fn(u64) -> u64) -> u64 {
    match width {
        Width::Eight => {
            // SAFETY: the caller's promise.
            let word = unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) };
            let mut old = word.load(Ordering::Relaxed);
            while let Err(now) =
                word.compare_exchange_weak(old, new(old), Ordering::AcqRel, Ordering::Relaxed)
            {
                old = now;
            }
            old
        }
        Width::Four => {
            // SAFETY: the caller's promise.
            let word = unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) };
            let mut old = word.load(Ordering::Relaxed);
            while let Err(now) = word.compare_exchange_weak(
                old,
                new(old.into()) as u32,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                old = now;
            }
            old.into()
        }
    }
}

/// Has the QP completed past `index` (32 bits)? `None`: it never will.
pub(super) fn waited(on: &crate::qp::shared::QpShared, index: u32) -> Option<bool> {
    let state = on.state();
    // State first: a QP that fails does not complete anything afterwards.
    let count = on.cq.count.load(Ordering::Acquire);
    if count.wrapping_sub(index.wrapping_add(1)) as i32 >= 0 {
        return Some(true);
    }
    match state {
        QpState::Error | QpState::Destroyed => None,
        QpState::Reset | QpState::Ready => Some(false),
    }
}

impl Use {
    pub(super) fn end(self) -> End {
        match self {
            Self::Source | Self::Sink => End::Local,
            Self::Write | Self::Read | Self::Atomic => End::Remote,
        }
    }

    fn need(self) -> Access {
        match self {
            Self::Source => Access::NONE,
            Self::Sink => Access::LOCAL_WRITE,
            Self::Write => Access::REMOTE_WRITE,
            Self::Read => Access::REMOTE_READ,
            Self::Atomic => Access::REMOTE_ATOMIC,
        }
    }
}
