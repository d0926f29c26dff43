//! Registered memory as the transport uses it: every access looks its key up anew, with rights and bounds, in the round that uses it.

use std::sync::PoisonError;

use doorbell_roce::{
    Access as Want, Atomic, LocalFault, Memory, Received, ReceivedKind, Refusal, Status,
};
use doorbell_wire::{Local, Width};

use super::flight::Flight;
use crate::copy::{copy, write};
use crate::engine::exec::modify;
use crate::fault::{Fault, TABLE};
use crate::hca::Inner;
use crate::mem::{Access, End, Place};
use crate::qp::shared::QpShared;
use crate::raw::Shared;

/// The memory behind one QP's connection, for one call.
pub(super) struct QpMemory<'a> {
    pub(super) inner: &'a Inner,
    pub(super) shared: &'a QpShared,
    pub(super) flight: &'a Flight,
    /// What the peer may do.
    pub(super) access: Access,
}

/// A fault as the transport carries it, and back.
fn local(fault: Fault) -> LocalFault {
    LocalFault(fault as u32)
}

/// The fault of [`local`].
pub(super) fn fault_of(local: LocalFault) -> Fault {
    TABLE
        .get(local.0 as usize)
        .map_or(Fault::Unsupported, |row| row.fault)
}

impl QpMemory<'_> {
    /// Where a range is in host memory; used before this core's next grace acknowledgement, since it is used at once.
    fn find(
        &self,
        end: End,
        key: u32,
        addr: u64,
        len: u64,
        need: Access,
    ) -> Result<Shared<u8>, Fault> {
        let regions = &self.inner.regions;
        // SAFETY: this runs in a round of an engine core, and the answer does not leave the call.
        let span = unsafe { regions.resolve(end, key, self.shared.pd, need) }?;
        let offset = span.offset(addr, len).ok_or(end.range())?;
        match span.place {
            // SAFETY: the offset lies inside the region.
            Place::Host(base) => Ok(unsafe { base.byte_add(offset as usize) }),
            Place::Device { .. } => Err(Fault::Unsupported),
        }
    }

    fn remote(
        &self,
        key: u32,
        va: u64,
        len: usize,
        need: Access,
        want: Want,
    ) -> Result<Shared<u8>, Refusal> {
        if !self.access.contains(need) {
            return Err(Refusal::Invalid);
        }
        if want == Want::Atomic && !va.is_multiple_of(8) {
            return Err(Refusal::Invalid);
        }
        self.find(End::Remote, key, va, len as u64, need)
            .map_err(|fault| match fault {
                Fault::Unsupported => Refusal::Operational,
                _ => Refusal::Access,
            })
    }

    /// Calls `f` for the parts of `[offset, offset + len)` in local pieces: part, and where it is in the range.
    fn each(
        &self,
        pieces: &[Local],
        offset: u32,
        len: usize,
        need: Access,
        mut f: impl FnMut(Shared<u8>, usize, usize),
    ) -> Result<(), LocalFault> {
        let (mut skip, mut done) = (u64::from(offset), 0usize);
        for piece in pieces {
            let size = u64::from(piece.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            let take = (size - skip).min((len - done) as u64) as usize;
            let addr = piece.addr.wrapping_add(skip);
            let at = self
                .find(End::Local, piece.key.0, addr, take as u64, need)
                .map_err(local)?;
            f(at, done, take);
            (skip, done) = (0, done + take);
            if done == len {
                return Ok(());
            }
        }
        if done == len {
            Ok(())
        } else {
            Err(local(Fault::BadLength))
        }
    }
}

impl Memory for QpMemory<'_> {
    fn load(&mut self, message: u64, offset: u32, out: &mut [u8]) -> Result<bool, LocalFault> {
        let Some(one) = self.flight.find(message) else {
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
        let (len, out) = (out.len(), out.as_mut_ptr());
        self.each(
            one.bytes.pieces(),
            offset,
            len,
            Access::NONE,
            |at, to, take| {
                // SAFETY: `at` is `take` bytes of a region, `to + take <= len` of a buffer of ours.
                unsafe { copy(out.add(to), at.as_ptr(), take) }
            },
        )?;
        Ok(true)
    }

    fn store(&mut self, message: u64, offset: u32, bytes: &[u8]) -> Result<Status, LocalFault> {
        let Some(one) = self.flight.find(message) else {
            return Err(local(Fault::Destroyed));
        };
        let pieces = one.bytes.pieces();
        self.each(
            pieces,
            offset,
            bytes.len(),
            Access::LOCAL_WRITE,
            |at, from, take| {
                // SAFETY: `at` is `take` bytes of a region that grants writing.
                unsafe { write(at.as_ptr(), &bytes[from..from + take]) }
            },
        )?;
        Ok(Status::Now)
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
        self.remote(rkey, va, len as usize, need, access).map(drop)
    }

    fn write(&mut self, rkey: u32, va: u64, bytes: &[u8]) -> Result<Status, Refusal> {
        if bytes.is_empty() {
            return Ok(Status::Now);
        }
        let to = self.remote(rkey, va, bytes.len(), Access::REMOTE_WRITE, Want::Write)?;
        // SAFETY: the range lies in a region that grants writing. The bytes are ours; the last eight land last.
        unsafe { copy(to.as_ptr(), bytes.as_ptr(), bytes.len()) };
        Ok(Status::Now)
    }

    fn read(&mut self, rkey: u32, va: u64, out: &mut [u8]) -> Result<bool, Refusal> {
        if out.is_empty() {
            return Ok(true);
        }
        let from = self.remote(rkey, va, out.len(), Access::REMOTE_READ, Want::Read)?;
        // SAFETY: the range lies in a region that grants reading; the buffer is ours.
        unsafe { copy(out.as_mut_ptr(), from.as_ptr(), out.len()) };
        Ok(true)
    }

    fn atomic(&mut self, _id: u64, rkey: u32, va: u64, op: Atomic) -> Result<Option<u64>, Refusal> {
        let word = self.remote(rkey, va, 8, Access::REMOTE_ATOMIC, Want::Atomic)?;
        if !word.is_aligned_to(8) {
            return Err(Refusal::Invalid);
        }
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

    fn atomic_result(&mut self, _id: u64) -> Result<Option<u64>, Refusal> {
        // Every atomic here is executed at once.
        Err(Refusal::Operational)
    }

    fn receive(&mut self) -> bool {
        let Some(recv) = &self.shared.recv else {
            return false;
        };
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: an open receive queue's memory is mapped.
        unsafe { recv.take() }
    }

    fn scatter(&mut self, offset: u32, bytes: &[u8]) -> Result<Status, Refusal> {
        let Some(recv) = &self.shared.recv else {
            return Err(Refusal::Operational);
        };
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        let find = |l: &Local| {
            self.find(
                End::Local,
                l.key.0,
                l.addr,
                u64::from(l.len),
                Access::LOCAL_WRITE,
            )
        };
        // SAFETY: an open receive queue's memory is mapped; `find` gives memory of this round.
        unsafe { recv.scatter(offset, bytes, find) }.map(|()| Status::Now)
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
        // Nothing is ever left for later.
        u64::MAX
    }
}
