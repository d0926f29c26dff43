//! Notes of long waits, for the host: what is waited for, how much of it is there.
//!
//! A GPU thread that waits is silent, and its caller may not come back for hours. So a wait that lasts writes what it waits for to a line of
//! host memory that the queue's extension names ([`QpExt::wait_note`](crate::layout::QpExt::wait_note)), and says there too when it gives up. Only slow
//! paths come here. One line a queue: of several waits the latest is seen.

use core::ptr::addr_of_mut;

use crate::arch::Arch;
use crate::error::Error;
use crate::layout::{QpHandle, WAIT_OVER, WAIT_TICKET, WAIT_WORD, WaitNote};
use crate::qp::{Deadline, Qp};
use crate::recv::RecvQueue;
use crate::scope::{Scope, Sharing, Thread, sharing};
use crate::sites;

/// A wait that gives up after so long since it was first noted tells the host.
const LASTING_NS: u64 = 100_000_000;
/// Polls after which a wait is long.
pub const LONG: u32 = 1 << 14;

impl<A: Arch, S: Scope, M: Sharing> Qp<'_, A, S, M> {
    /// What a loop that waits for a word of memory (a signal at `at` to reach `wanted`) looks at now and then: the error that ends it, if there is
    /// one. A loop of many `polls` notes what it waits for and what it `has`.
    #[inline(always)]
    pub fn look_waiting(
        &self,
        at: *const u64,
        (wanted, has): (u64, u64),
        polls: u32,
        deadline: Deadline,
    ) -> Option<Error> {
        if let Some(e) = self.error() {
            return Some(e);
        }
        if self.arch.aborted() {
            return Some(Error::ABORTED);
        }
        let over = deadline.passed(self.arch);
        if over || polls.is_multiple_of(LONG) {
            let kind = WAIT_WORD | if over { WAIT_OVER } else { 0 };
            Self::note_wait(self.arch, self.handle(), kind, at as u64, wanted, has);
        }
        over.then_some(Error::TIMED_OUT)
    }

    /// A wait of so many polls has ended well.
    #[inline(always)]
    pub fn waited(&self, polls: u32) {
        if polls >= LONG {
            Self::note_wait(self.arch, self.handle(), 0, 0, 0, 0);
        }
    }

    /// The note of a wait for a ticket.
    pub(crate) fn note_ticket(&self, index: u64, over: bool) {
        let kind = WAIT_TICKET | if over { WAIT_OVER } else { 0 };
        let (at, has) = (u64::from(self.qpn.get()), self.consumer());
        Self::note_wait(self.arch, self.handle(), kind, at, index, has);
    }

    /// Writes the note; a queue without an extension, or without a line for it, has none.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_wait(arch: A, handle: QpHandle, kind: u64, at: u64, wanted: u64, has: u64) {
        if handle.ext.is_null() {
            return;
        }
        // SAFETY: the extension is valid, as whoever made the queue promised, and so is the line that it names.
        let lasted = unsafe {
            let line = arch.load_const64(addr_of_mut!((*handle.ext).wait_note));
            if line == 0 {
                return;
            }
            let line: *mut WaitNote = core::ptr::with_exposed_provenance_mut(line as usize);
            let since = arch.load64(addr_of_mut!((*line).since), sites::DATA);
            let was = arch.load64(addr_of_mut!((*line).kind), sites::DATA);
            let same = was & !WAIT_OVER == kind & !WAIT_OVER
                && arch.load64(addr_of_mut!((*line).at), sites::DATA) == at
                && arch.load64(addr_of_mut!((*line).wanted), sites::DATA) == wanted;
            // No note while it changes.
            arch.store64(addr_of_mut!((*line).kind), 0, sites::DATA);
            let now = arch.clock_ns();
            arch.store64(addr_of_mut!((*line).at), at, sites::DATA);
            arch.store64(addr_of_mut!((*line).wanted), wanted, sites::DATA);
            arch.store64(addr_of_mut!((*line).have), has, sites::DATA);
            let since = if same { since } else { now };
            arch.store64(addr_of_mut!((*line).since), since, sites::DATA);
            arch.store64(addr_of_mut!((*line).seen), now, sites::DATA);
            arch.store64(addr_of_mut!((*line).kind), kind, sites::REPORT_STORE);
            now.saturating_sub(since)
        };
        // Who polls with a short deadline is not told.
        if kind & WAIT_OVER != 0 && lasted >= LASTING_NS {
            arch.gave_up();
        }
    }
}

impl<A: Arch, S: Scope, M: Sharing> RecvQueue<'_, A, S, M> {
    /// Notes a wait for a receive: `kind` is what its note begins with, 0 once it has ended.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_receive(arch: A, handle: QpHandle, index: u64, kind: u64) {
        // SAFETY: the structure and the extension are valid, as whoever made the queue promised.
        let (qpn, has) = unsafe {
            (
                arch.load_const32(addr_of_mut!((*handle.qp).sq_num)),
                arch.load64(addr_of_mut!((*handle.ext).rq_ci), sites::DATA),
            )
        };
        Qp::<A, Thread, sharing::Gpu>::note_wait(arch, handle, kind, qpn.into(), index, has);
    }
}
