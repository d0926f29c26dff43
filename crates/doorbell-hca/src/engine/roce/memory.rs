//! Registered memory as the transport uses it: every access looks its key up anew, with rights and bounds, in the round that uses it.

use std::sync::PoisonError;

use doorbell_roce::{
    Access as Want, Atomic, LocalFault, Memory, Received, ReceivedKind, Refusal, Status,
};
use doorbell_wire::{Local, Width};

use super::flight::Flight;
use super::inward::Kind;
use super::staged::Staged;
use crate::copy::{copy, write};
use crate::engine::Cx;
use crate::engine::exec::modify;
use crate::fault::{Fault, TABLE};
use crate::mem::{Access, End, Place};
use crate::qp::shared::QpShared;
use crate::raw::Shared;

/// The memory behind one QP's connection, for one call.
pub(in crate::engine) struct QpMemory<'a, 'c> {
    pub(super) cx: &'a mut Cx<'c>,
    pub(super) shared: &'a QpShared,
    pub(super) flight: &'a Flight,
    /// What the peer may do.
    pub(super) access: Access,
    /// Copies to and from memory that the CPU does not reach; nothing if there has been no such memory.
    pub(super) staged: &'a mut Option<Box<Staged>>,
    /// The port takes payload that is not in its batch.
    pub(super) lends: bool,
    /// Payload of the packet that was just made, and its length.
    pub(super) lent: Option<(Shared<u8>, usize)>,
}

/// Payload below this is copied: a piece more costs the kernel as much.
const LEND: u32 = 1024;

/// A fault as the transport carries it, and back.
fn local(fault: Fault) -> LocalFault {
    LocalFault(fault as u32)
}

/// The fault of [`local`].
pub(in crate::engine) fn fault_of(local: LocalFault) -> Fault {
    TABLE
        .get(local.0 as usize)
        .map_or(Fault::Unsupported, |row| row.fault)
}

impl QpMemory<'_, '_> {
    /// Where a range is; used before this core's next grace acknowledgement, or held by a copy job.
    pub(super) fn find(
        &self,
        end: End,
        key: u32,
        addr: u64,
        len: u64,
        need: Access,
    ) -> Result<Place, Fault> {
        let regions = &self.cx.inner.regions;
        // SAFETY: this runs in a round of an engine core, and the answer does not outlive it but in a copy job.
        let span = unsafe { regions.resolve(end, key, self.shared.pd, need) }?;
        span.at(addr, len).ok_or(end.range())
    }

    fn remote(
        &self,
        key: u32,
        va: u64,
        len: usize,
        need: Access,
        want: Want,
    ) -> Result<Place, Refusal> {
        if !self.access.contains(need) {
            return Err(Refusal::Access);
        }
        if want == Want::Atomic && !va.is_multiple_of(8) {
            return Err(Refusal::Invalid);
        }
        self.find(End::Remote, key, va, len as u64, need)
            .map_err(|_| Refusal::Access)
    }

    /// The copies of this queue pair; from now on it has some.
    pub(super) fn staged(&mut self) -> &mut Staged {
        self.staged.get_or_insert_default()
    }

    /// Is anything that was written before not visible yet?
    fn is_behind(&self) -> bool {
        self.staged.as_ref().is_some_and(|s| s.inward.is_busy())
    }

    /// Puts bytes of a message into the receive that was taken last; one that cannot take them completes in error.
    pub(in crate::engine) fn fill_receive(
        &mut self,
        offset: u32,
        bytes: &[u8],
    ) -> Result<Status, Fault> {
        let shared = self.shared;
        let Some(recv) = &shared.recv else {
            return Err(Fault::Destroyed);
        };
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        let mut status = Status::Now;
        let put = |l: &Local, skip: u64, bytes: &[u8]| {
            let (addr, room) = (l.addr.wrapping_add(skip), u64::from(l.len) - skip);
            match self.find(End::Local, l.key.0, addr, room, Access::LOCAL_WRITE)? {
                // SAFETY: the range lies in a region that grants writing, and is at least as long as the bytes.
                Place::Host(to) if !self.is_behind() => unsafe { write(to.as_ptr(), bytes) },
                place => {
                    // How long the message is, is not known. Whoever posted much expects much, but a short one needs no large buffer.
                    let likely = (8 * (offset as usize + bytes.len())).min(room as usize);
                    let ticket = self.deposit(place, bytes, likely, Kind::Send);
                    status = Status::Later(ticket.map_err(|_| Fault::DmaFailed)?);
                }
            }
            Ok(())
        };
        // SAFETY: an open receive queue's memory is mapped.
        unsafe { recv.scatter(offset, bytes, put) }?;
        Ok(status)
    }

    /// Is so much of it waiting that packets are better dropped?
    pub(super) fn is_far_behind(&self) -> bool {
        self.staged.as_ref().is_some_and(|s| s.inward.is_behind())
    }

    /// Did a copy of what arrived fail?
    pub(in crate::engine) fn has_lost(&self) -> bool {
        self.staged.as_ref().is_some_and(|s| s.inward.has_failed())
    }

    /// Is anything gathered that has to go on before the end of the round?
    pub(super) fn is_gathering(&self) -> bool {
        self.staged.as_ref().is_some_and(|s| s.inward.is_open())
    }

    /// A copy engine failed without a copy.
    pub(super) fn report(&self, reason: String) {
        let qpn = self.shared.qpn;
        self.cx
            .inner
            .events
            .push(crate::Event::CopyFailed { qpn, reason });
    }
}

/// The parts of bytes `[offset, offset + len)` in local pieces, each with where it is in the range.
fn parts(
    pieces: &[Local],
    offset: u32,
    len: usize,
) -> impl Iterator<Item = Result<(Local, usize), LocalFault>> {
    let (mut skip, mut done) = (u64::from(offset), 0usize);
    let mut pieces = pieces.iter();
    core::iter::from_fn(move || {
        if done == len {
            return None;
        }
        for piece in pieces.by_ref() {
            let size = u64::from(piece.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            let take = (size - skip).min((len - done) as u64) as usize;
            let part = Local {
                len: take as u32,
                addr: piece.addr.wrapping_add(skip),
                ..*piece
            };
            let at = done;
            (skip, done) = (0, done + take);
            return Some(Ok((part, at)));
        }
        done = len;
        Some(Err(local(Fault::BadLength)))
    })
}

impl Memory for QpMemory<'_, '_> {
    fn load(&mut self, message: u64, offset: u32, out: &mut [u8]) -> Result<bool, LocalFault> {
        let flight = self.flight;
        let Some(one) = flight.find(message) else {
            return Err(local(Fault::Destroyed));
        };
        if let Some(bytes) = one.bytes.as_inline() {
            let from = offset as usize;
            let part = bytes
                .get(from..from + out.len())
                .ok_or(local(Fault::BadLength))?;
            out.copy_from_slice(part);
            return Ok(true);
        }
        for part in parts(one.bytes.pieces(), offset, out.len()) {
            let (part, to) = part?;
            let len = part.len as usize;
            let place = self
                .find(End::Local, part.key.0, part.addr, len as u64, Access::NONE)
                .map_err(local)?;
            let out = &mut out[to..to + len];
            match place {
                // SAFETY: the range lies in a region, the output is as long and ours.
                Place::Host(at) => unsafe { copy(out.as_mut_ptr(), at.as_ptr(), len) },
                Place::Device { .. } => {
                    let from = offset + to as u32;
                    if !self.load_fetched(message, from, out).map_err(local)? {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }

    fn lend(&mut self, message: u64, offset: u32, len: u32) -> bool {
        if !self.lends || len < LEND {
            return false;
        }
        let Some(&[piece]) = self.flight.find(message).map(|one| one.bytes.pieces()) else {
            return false;
        };
        // Whatever is wrong with it is said by `load`.
        let inside = u64::from(offset) + u64::from(len) <= u64::from(piece.len);
        let addr = piece.addr.wrapping_add(u64::from(offset));
        let found = inside.then(|| {
            let need = Access::NONE;
            self.find(End::Local, piece.key.0, addr, u64::from(len), need)
        });
        let Some(Ok(Place::Host(at))) = found else {
            return false;
        };
        self.lent = Some((at, len as usize));
        true
    }

    fn store(&mut self, message: u64, offset: u32, bytes: &[u8]) -> Result<Status, LocalFault> {
        let flight = self.flight;
        let Some(one) = flight.find(message) else {
            return Err(local(Fault::Destroyed));
        };
        let mut status = Status::Now;
        for part in parts(one.bytes.pieces(), offset, bytes.len()) {
            let (part, from) = part?;
            let len = part.len as usize;
            let place = self
                .find(
                    End::Local,
                    part.key.0,
                    part.addr,
                    len as u64,
                    Access::LOCAL_WRITE,
                )
                .map_err(local)?;
            let bytes = &bytes[from..from + len];
            match place {
                // SAFETY: the range lies in a region that grants writing.
                Place::Host(at) => unsafe { write(at.as_ptr(), bytes) },
                place @ Place::Device { .. } => {
                    let rest = one.byte_cnt.saturating_sub(offset) as usize - from;
                    let ticket = self
                        .deposit(place, bytes, rest, Kind::Answer)
                        .map_err(|_| local(Fault::DmaFailed))?;
                    status = Status::Later(ticket);
                }
            }
        }
        Ok(status)
    }

    fn check(&mut self, rkey: u32, va: u64, len: u32, access: Want) -> Result<(), Refusal> {
        if len == 0 {
            // A message of no bytes opens no key (IB 9.7.4.1.5).
            return Ok(());
        }
        let need = match access {
            Want::Write => Access::REMOTE_WRITE,
            Want::Read => Access::REMOTE_READ,
            Want::Atomic => Access::REMOTE_ATOMIC,
        };
        let place = self.remote(rkey, va, len as usize, need, access)?;
        let staged = matches!(place, Place::Device { .. });
        if staged || self.staged.is_some() {
            match access {
                Want::Write => self.begin_write(len),
                Want::Read if staged => self.expect_read(rkey, va, len),
                Want::Read | Want::Atomic => {}
            }
        }
        Ok(())
    }

    fn write(&mut self, rkey: u32, va: u64, bytes: &[u8]) -> Result<Status, Refusal> {
        if bytes.is_empty() {
            return Ok(Status::Now);
        }
        match self.remote(rkey, va, bytes.len(), Access::REMOTE_WRITE, Want::Write)? {
            Place::Host(to) if !self.is_behind() => {
                // SAFETY: the range lies in a region that grants writing. The bytes are ours; the last eight land last.
                unsafe { copy(to.as_ptr(), bytes.as_ptr(), bytes.len()) };
                Ok(Status::Now)
            }
            place => self.deposit_write(place, bytes).map(Status::Later),
        }
    }

    fn read(&mut self, rkey: u32, va: u64, rest: u32, out: &mut [u8]) -> Result<bool, Refusal> {
        if out.is_empty() {
            return Ok(true);
        }
        match self.remote(rkey, va, out.len(), Access::REMOTE_READ, Want::Read)? {
            Place::Host(from) => {
                // SAFETY: the range lies in a region that grants reading; the buffer is ours.
                unsafe { copy(out.as_mut_ptr(), from.as_ptr(), out.len()) };
                Ok(true)
            }
            Place::Device { .. } => self.read_fetched(rkey, va, rest, out),
        }
    }

    fn atomic(&mut self, id: u64, rkey: u32, va: u64, op: Atomic) -> Result<Option<u64>, Refusal> {
        let word = match self.remote(rkey, va, 8, Access::REMOTE_ATOMIC, Want::Atomic)? {
            Place::Host(word) if !word.is_aligned_to(8) => return Err(Refusal::Invalid),
            Place::Device { addr, .. } if addr % 8 != 0 => return Err(Refusal::Invalid),
            Place::Host(word) if !self.is_behind() => word,
            place => {
                self.begin_atomic(id, place, op)?;
                return Ok(None);
            }
        };
        // SAFETY: the word lies in a region that grants atomics, and is aligned.
        let old = unsafe {
            modify(word, Width::Eight, |old| match op {
                Atomic::FetchAdd { add } => old.wrapping_add(add),
                Atomic::CompareSwap { compare, swap } if old == compare => swap,
                Atomic::CompareSwap { .. } => old,
            })
        };
        Ok(Some(old))
    }

    fn atomic_result(&mut self, id: u64) -> Result<Option<u64>, Refusal> {
        match self.staged {
            Some(staged) => staged.inward.result(id),
            // Every atomic so far was executed at once.
            None => Err(Refusal::Operational),
        }
    }

    fn receive(&mut self) -> bool {
        let Some(recv) = &self.shared.recv else {
            return false;
        };
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: an open receive queue's memory is mapped.
        unsafe { recv.take_next() }
    }

    fn scatter(&mut self, offset: u32, bytes: &[u8]) -> Result<Status, Refusal> {
        self.fill_receive(offset, bytes)
            .map_err(|fault| match fault {
                Fault::BadLength => Refusal::Invalid,
                _ => Refusal::Operational,
            })
    }

    fn received(&mut self, received: Received) {
        let Some(recv) = &self.shared.recv else {
            return;
        };
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        let write = received.kind == ReceivedKind::Write;
        // SAFETY: as above.
        unsafe { recv.complete(write, received.imm, received.len) };
    }

    fn unreceive(&mut self) {
        if let Some(recv) = &self.shared.recv {
            recv.lock().unwrap_or_else(PoisonError::into_inner).untake();
        }
    }

    fn settled(&mut self) -> u64 {
        // Without copies nothing is ever left for later.
        self.staged
            .as_ref()
            .map_or(u64::MAX, |s| s.inward.settled())
    }
}
