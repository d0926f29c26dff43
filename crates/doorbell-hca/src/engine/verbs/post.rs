//! A WQE becomes requests of the device: one, or several where the message is longer, or has more pieces, than the device takes at once.

use core::fmt;
use std::time::{Duration, Instant};

use doorbell_verbs::{Data, Op, Refused, Work, abi};
use doorbell_wire::{Chunk, Ctrl, Local, Payload, Request};

use super::{Link, QUIET, Sent};
use crate::engine::Cx;
use crate::engine::exec::{MAX_MESSAGE, Outcome};
use crate::engine::qp::{EngineQp, Park};
use crate::engine::roce::InFlight;
use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::Access;
use crate::verbs::{INLINE, VerbsPort};

/// How long a device may have no room that it should have.
const PATIENCE: Duration = Duration::from_secs(2);

impl Link {
    /// Puts a request into the batch. `false`: the device has no such operation.
    ///
    /// # Safety
    /// The pieces are of registered regions, or of the bounce buffers.
    #[inline(always)]
    pub(super) unsafe fn push(
        &mut self,
        sent: Sent,
        mut flags: u32,
        ask: bool,
        op: Op,
        data: Data<'_>,
    ) -> bool {
        self.quiet += 1;
        // Whoever waits for room waits for a completion.
        if ask || self.quiet >= QUIET || self.room() == 1 {
            flags |= abi::send_flags::SIGNALED;
            self.quiet = 0;
        }
        let work = Work {
            id: self.posted,
            flags,
            op,
            data,
        };
        // SAFETY: one core posts to this queue pair, and only through this batch; regions are taken from the device before their memory
        // goes, and the bounce buffers live as long as the queue pair.
        if !unsafe { self.batch.push(&self.nic.qp, &work) } {
            return false;
        }
        let at = self.posted as usize & (self.sent.len() - 1);
        self.sent[at] = sent;
        self.posted += 1;
        true
    }
}

impl EngineQp {
    /// Hands a request to the device. Every local piece is checked first; the rest is the peer's to check.
    pub(in crate::engine) fn post_verbs(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        request: Request<'_>,
        wqe: &[Chunk],
    ) -> Result<Outcome, Fault> {
        if self.cold.flight.is_full() {
            return Ok(self.hold());
        }
        if let Some(link) = self.verbs() {
            link.keys.refresh(cx.inner);
        }
        let (op, payload, inline_at) = match request {
            Request::Write { remote, local, imm } => {
                let op = Op::Write {
                    addr: remote.addr,
                    rkey: remote.key.0,
                    imm,
                };
                (op, local, 2)
            }
            Request::Send { local, imm } => (Op::Send { imm }, local, 1),
            Request::Read { remote, local } => {
                let op = Op::Read {
                    addr: remote.addr,
                    rkey: remote.key.0,
                };
                (op, local, 2)
            }
            Request::FetchAdd { remote, local, add } => {
                let op = Op::FetchAdd {
                    addr: remote.addr,
                    rkey: remote.key.0,
                    add,
                };
                return self.post_atomic(cx, ctrl, remote.addr, op, &local);
            }
            Request::CompareSwap {
                remote,
                local,
                swap,
                compare,
            } => {
                let op = Op::CompareSwap {
                    addr: remote.addr,
                    rkey: remote.key.0,
                    compare,
                    swap,
                };
                return self.post_atomic(cx, ctrl, remote.addr, op, &local);
            }
            // Verbs have no masked atomics, and none of four bytes.
            Request::MaskedFetchAdd { .. } | Request::MaskedCompareSwap { .. } => {
                return Err(Fault::Unsupported);
            }
            Request::Nop => return Ok(self.in_order(ctrl, 0)),
            Request::Wait { index, cqn } => return self.wait_in_order(cx, ctrl, index, cqn),
            Request::Dump { local } => {
                if let Some(link) = self.verbs() {
                    link.keys.piece(cx.inner, &local, Access::NONE)?;
                }
                return Ok(self.in_order(ctrl, local.len));
            }
        };
        self.post_message(cx, ctrl, op, payload, wqe.get(inline_at..).unwrap_or(&[]))
    }

    fn post_atomic(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        addr: u64,
        op: Op,
        local: &Local,
    ) -> Result<Outcome, Fault> {
        let at = self.exec;
        let ask = self.is_last_of_run(at + u64::from(ctrl.slots()));
        let Some(link) = self.verbs() else {
            return Err(Fault::NotConnected);
        };
        if !link.nic.port.device().atomics {
            return Err(Fault::Unsupported);
        }
        if local.len != 8 {
            return Err(Fault::BadLength);
        }
        let sink = link.keys.piece(cx.inner, local, Access::LOCAL_WRITE)?;
        if !addr.is_multiple_of(8) {
            return Err(Fault::Misaligned);
        }
        if link.room() == 0 {
            return Ok(self.hold());
        }
        // SAFETY: the piece is of a registered region.
        if !unsafe {
            link.push(
                Sent::whole(at),
                flags_of(ctrl),
                ask,
                op,
                Data::Pieces(&[sink]),
            )
        } {
            return Err(Fault::Unsupported);
        }
        Ok(self.under_way(ctrl, 8))
    }

    /// The device has it, or will.
    pub(super) fn under_way(&mut self, ctrl: Ctrl, byte_cnt: u32) -> Outcome {
        self.cold
            .flight
            .push(InFlight::elsewhere(self.exec, ctrl, byte_cnt));
        Outcome::Issued
    }

    /// WRITE, READ or SEND. `inline`: the WQE from its first data segment on.
    fn post_message(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        op: Op,
        payload: Payload<'_>,
        inline: &[Chunk],
    ) -> Result<Outcome, Fault> {
        let total = match &payload {
            Payload::Local(local) => local.len.into(),
            Payload::Inline(bytes) => bytes.len() as u64,
            several => several.len(),
        };
        if total > MAX_MESSAGE {
            return Err(Fault::BadLength);
        }
        let at = self.exec;
        let ask = self.is_last_of_run(at + u64::from(ctrl.slots()));
        let Some(link) = self.verbs() else {
            return Err(Fault::NotConnected);
        };
        if link.room() == 0 {
            return Ok(self.hold());
        }
        let need = match op.writes_here() {
            true => Access::LOCAL_WRITE,
            false => Access::NONE,
        };
        // The usual cases: one request.
        let mut flags = flags_of(ctrl);
        let whole = Sent::whole(at);
        let message = u64::from(link.nic.port.port().max_message);
        match &payload {
            Payload::Inline(bytes) if total <= message => {
                let len = bytes.len();
                // SAFETY: chunks are plain words, so their bytes are initialised; the parser found the payload inside the WQE.
                let bytes = unsafe {
                    debug_assert!(len + 4 <= 16 * inline.len());
                    core::slice::from_raw_parts(inline.as_ptr().cast::<u8>().add(4), len)
                };
                let taken = if len <= link.nic.inline as usize {
                    // SAFETY: inline bytes are copied at once.
                    unsafe { link.push(whole, flags, ask, op, Data::Inline(bytes)) }
                } else {
                    let (to, sge) = link.nic.bounce(link.posted, len).ok_or(Fault::BadInline)?;
                    // SAFETY: the buffer is this request's, until it is complete; a WQE's inline data fits.
                    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len.min(INLINE)) };
                    // SAFETY: a bounce buffer.
                    unsafe { link.push(whole, flags, ask, op, Data::Pieces(&[sge])) }
                };
                debug_assert!(taken);
                return Ok(self.under_way(ctrl, total as u32));
            }
            Payload::Local(local) if total <= message => {
                let sge = link.keys.piece(cx.inner, local, need)?;
                // SAFETY: the piece is of a registered region.
                unsafe { link.push(whole, flags, ask, op, Data::Pieces(&[sge])) };
                return Ok(self.under_way(ctrl, total as u32));
            }
            _ => {}
        }
        // Several pieces, or a message longer than the device takes.
        let place = link.nic.bounce(link.posted, INLINE);
        let (keys, pieces) = (&mut link.keys, &mut link.pieces);
        // SAFETY: the buffer is the next request's, until it is complete.
        let copied = unsafe { keys.gather(cx.inner, payload, need, place, pieces) }?;
        let most = link.nic.pieces as usize;
        // The buffer belongs to one request of the device.
        if copied != 0 && payload.pieces().count() > most {
            return Err(Fault::Unsupported);
        }
        let single = total <= message && link.pieces.len() <= most;
        if !single && matches!(op, Op::Send { .. }) {
            // A SEND is one message; it cannot be cut.
            return Err(match total > message {
                true => Fault::BadLength,
                false => Fault::Unsupported,
            });
        }
        let mut from = match link.partly {
            Some((slot, from)) if slot == at => from,
            _ => 0,
        };
        link.partly = None;
        loop {
            if link.room() == 0 {
                link.partly = Some((at, from));
                return Ok(self.hold());
            }
            let mut now = [abi::Sge::default(); 8];
            let (count, bytes) = cut(&link.pieces, from, message, &mut now[..most.min(8)]);
            let last = from + bytes == total;
            let sent = Sent {
                at,
                offset: from,
                last,
                marker: false,
            };
            let op = op.part(from, last);
            // SAFETY: the pieces are of registered regions.
            unsafe { link.push(sent, flags, ask && last, op, Data::Pieces(&now[..count])) };
            // A fence has held the first.
            flags &= !abi::send_flags::FENCE;
            from += bytes;
            if last {
                return Ok(self.under_way(ctrl, total as u32));
            }
        }
    }

    /// At the end of a turn: what was posted goes to the device.
    pub(in crate::engine) fn submit_verbs(&mut self, inner: &Inner) {
        let stuck = self.park.is_some() && self.exec != self.pi;
        let Some(link) = self.verbs() else { return };
        if link.quiet != 0 && stuck && link.room() > 0 {
            // What waits for the requests before it has to hear of them.
            let marker = Sent {
                marker: true,
                ..Sent::default()
            };
            let op = Op::Write {
                addr: 0,
                rkey: 0,
                imm: None,
            };
            // SAFETY: no pieces.
            unsafe { link.push(marker, 0, true, op, Data::Pieces(&[])) };
        }
        if link.batch.is_empty() {
            return;
        }
        let first = link.batched;
        // SAFETY: as for `push`.
        let result = unsafe { link.batch.submit(&link.nic.qp) };
        link.batched = link.posted;
        match result {
            Ok(()) => link.refused = None,
            Err(refused) => self.unpost(inner, first, refused),
        }
    }

    /// The device took only part of a batch: the rest is posted again later, from where it stopped, or the QP fails.
    #[cold]
    fn unpost(&mut self, inner: &Inner, first: u64, refused: Refused) {
        let Some(link) = self.verbs() else { return };
        let stop = first + refused.taken as u64;
        let rest = link.sent(stop);
        link.posted = stop;
        link.batched = stop;
        // The last that was taken may not have asked for a completion; the next one will.
        link.quiet = QUIET;
        let waits = is_full_for_now(refused.errno, &mut link.refused);
        if !rest.marker {
            link.partly = (rest.offset != 0).then_some((rest.at, rest.offset));
            self.cold.flight.give_back(rest.at);
            self.exec = rest.at;
        }
        self.park = Some(Park::Copies);
        if waits {
            return;
        }
        let Some(link) = self.verbs() else { return };
        refuses(inner, &link.nic.port, &link.nic, refused.errno);
        self.fail_flight(inner, Fault::PortDown);
    }
}

/// Has the device only no room, and not for long yet? `since`: since when it takes nothing.
pub(super) fn is_full_for_now(errno: i32, since: &mut Option<Instant>) -> bool {
    let since = *since.get_or_insert_with(Instant::now);
    let full = matches!(errno, libc::ENOMEM | libc::EAGAIN | libc::ENOSPC);
    full && since.elapsed() < PATIENCE
}

/// Tells the user that the device takes no more requests of a queue pair, `nic`.
pub(super) fn refuses(inner: &Inner, port: &VerbsPort, nic: &dyn fmt::Debug, errno: i32) {
    let error = std::io::Error::from_raw_os_error(errno);
    let reason = format!("posting to it: {error}");
    tracing::error!("{nic:?}: {reason}");
    port.tell_refusal(inner, reason);
    if matches!(errno, libc::EIO | libc::ENODEV) {
        port.set_gone();
    }
}

#[inline(always)]
pub(super) fn flags_of(ctrl: Ctrl) -> u32 {
    let mut flags = 0;
    if ctrl.fenced() {
        flags |= abi::send_flags::FENCE;
    }
    if ctrl.solicited() {
        flags |= abi::send_flags::SOLICITED;
    }
    flags
}

/// As many of the bytes from `from` on as one request takes: how many pieces of `out`, and how many bytes.
pub(super) fn cut(
    pieces: &[abi::Sge],
    from: u64,
    message: u64,
    out: &mut [abi::Sge],
) -> (usize, u64) {
    let (mut skip, mut count, mut bytes) = (from, 0, 0);
    for piece in pieces {
        let len = u64::from(piece.length);
        if skip >= len {
            skip -= len;
            continue;
        }
        let take = (len - skip).min(message - bytes);
        let Some(to) = out.get_mut(count).filter(|_| take != 0) else {
            break;
        };
        *to = abi::Sge {
            addr: piece.addr + skip,
            length: take as u32,
            lkey: piece.lkey,
        };
        (count, bytes, skip) = (count + 1, bytes + take, 0);
        if bytes == message {
            break;
        }
    }
    (count, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_by_bytes_and_by_pieces() {
        let piece = |addr, length| abi::Sge {
            addr,
            length,
            lkey: 1,
        };
        let pieces = [piece(0, 10), piece(100, 5), piece(200, 7)];
        let (mut from, mut seen) = (0, Vec::new());
        while from < 22 {
            let mut out = [abi::Sge::default(); 2];
            let (count, bytes) = cut(&pieces, from, 8, &mut out);
            seen.push(
                out[..count]
                    .iter()
                    .map(|s| (s.addr, s.length))
                    .collect::<Vec<_>>(),
            );
            from += bytes;
        }
        assert_eq!(seen, [vec![(0, 8)], vec![(8, 2), (100, 5)], vec![(200, 7)]]);
        assert_eq!(from, 22);
    }
}
