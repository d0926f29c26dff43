//! The part of a QP that its owner, its peers and its engine all see: state, first error, counters, the receive queue.
//! Plain atomics; the engine is the only writer of the counters, so they cost a store, not a locked operation.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::Mutex;

use doorbell_device::layout::ErrorWord;
use doorbell_wire::{Cqn, Qpn};

use crate::engine::recv::RecvQueue;
use crate::fault::Fault;

/// Where a QP is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum QpState {
    /// Created or reset; not connected.
    Reset = 0,
    /// Connected: work requests are executed.
    Ready = 1,
    /// Failed: work requests are flushed until the QP is reset.
    Error = 2,
    /// Gone.
    Destroyed = 3,
}

impl QpState {
    pub(crate) fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Reset,
            1 => Self::Ready,
            2 => Self::Error,
            _ => Self::Destroyed,
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// What a QP has done since it was created (resets do not clear it).
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct QpCounters { $($(#[$doc])* pub $name: u64,)* }

        #[derive(Debug, Default)]
        pub(crate) struct AtomicCounters { $(pub(crate) $name: Counter,)* }

        impl AtomicCounters {
            pub(crate) fn snapshot(&self) -> QpCounters {
                QpCounters { $($name: self.$name.get(),)* }
            }
        }
    };
}

counters! {
    /// Doorbells (or producer words, or records) that announced something new.
    doorbells;
    /// WQEs announced, in slots.
    slots_rung;
    /// WQEs executed.
    wqes;
    /// Payload bytes moved.
    bytes;
    /// CQEs written (a collapsed CQ's once per batch).
    cqes;
    /// Times a control segment was not there yet and was read again.
    stale_reads;
    /// Times the QP was set aside: WAIT not satisfied, no receive, copies under way.
    parked;
    /// Times a key was looked up because the cached one did not fit.
    key_lookups;
    /// WQEs that went through a copy engine.
    copies;
    /// Slots flushed in the error state.
    flushed;
    /// Times a rule of a fault script fired on its send queue.
    faults;
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline(always)]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(
            self.0.load(Ordering::Relaxed).wrapping_add(n),
            Ordering::Relaxed,
        );
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A CQ as others see it.
#[derive(Debug)]
pub(crate) struct CqShared {
    pub(crate) cqn: Cqn,
    /// Completions produced so far, modulo 2^32: what WAIT compares. Counted in send slots, so that completion number i of a QP means
    /// "WQE i is complete" for per-slot and collapsed CQs alike.
    pub(crate) count: AtomicU32,
}

/// The shared half of a QP.
#[derive(Debug)]
pub(crate) struct QpShared {
    pub(crate) qpn: Qpn,
    pub(crate) pd: u32,
    pub(crate) core: usize,
    /// Slots of the send queue.
    pub(crate) depth: u32,
    /// Receives, and pieces of one.
    pub(crate) receives: u32,
    pub(crate) receive_pieces: u32,
    state: AtomicU8,
    /// First error, an [`ErrorWord`]; 0: none.
    first_error: AtomicU64,
    pub(crate) counters: AtomicCounters,
    /// Latest of what was rung and what was completed, in slots, for reports.
    pub(crate) producer: AtomicU64,
    pub(crate) consumer: AtomicU64,
    /// One more than the newest slot whose completion was written to a collapsed CQ, for reports.
    pub(crate) newest_cqe: AtomicU64,
    /// Where its requests go, for reports: kind, then the number of the queue pair there << 32 (`record::Target`).
    pub(crate) target: AtomicU64,
    pub(crate) cq: CqShared,
    /// The receive side. Engines of other cores deliver immediates through it: taken with try-lock only.
    pub(crate) recv: Option<Mutex<RecvQueue>>,
    /// A receive failed under an initiator's hands, on whichever core: [`crate::fault::Fault`] + 1 that this QP's core is to fail it with.
    recv_fault: AtomicU8,
}

impl QpShared {
    pub(crate) fn new(
        qpn: Qpn,
        (pd, core, depth): (u32, usize, u32),
        cqn: Cqn,
        recv: Option<RecvQueue>,
    ) -> Self {
        let (receives, receive_pieces) = recv.as_ref().map_or((0, 0), RecvQueue::shape);
        Self {
            qpn,
            pd,
            core,
            depth,
            receives,
            receive_pieces,
            state: AtomicU8::new(QpState::Reset as u8),
            first_error: AtomicU64::new(0),
            counters: AtomicCounters::default(),
            producer: AtomicU64::new(0),
            consumer: AtomicU64::new(0),
            newest_cqe: AtomicU64::new(0),
            target: AtomicU64::new(0),
            cq: CqShared {
                cqn,
                count: AtomicU32::new(0),
            },
            recv: recv.map(Mutex::new),
            recv_fault: AtomicU8::new(0),
        }
    }

    /// Its core is to fail this QP, since a receive of it failed.
    pub(crate) fn set_recv_fault(&self, fault: Fault) {
        self.recv_fault.store(fault as u8 + 1, Ordering::Release);
    }

    /// What it is to be failed with, once.
    #[inline(always)]
    pub(crate) fn take_recv_fault(&self) -> Option<Fault> {
        if self.recv_fault.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let at = self.recv_fault.swap(0, Ordering::Acquire).checked_sub(1)?;
        crate::fault::TABLE
            .get(usize::from(at))
            .map(|row| row.fault)
    }

    pub(crate) fn state(&self) -> QpState {
        QpState::from_u8(self.state.load(Ordering::Acquire))
    }

    pub(crate) fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Ordering::Release);
    }

    pub(crate) fn first_error(&self) -> Option<ErrorWord> {
        match self.first_error.load(Ordering::Acquire) {
            0 => None,
            word => Some(ErrorWord(word)),
        }
    }

    /// Records an error if it is the first; `true` if it was.
    pub(crate) fn record_error(&self, word: ErrorWord) -> bool {
        self.first_error
            .compare_exchange(0, word.0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    pub(crate) fn clear_error(&self) {
        self.recv_fault.store(0, Ordering::Relaxed);
        self.first_error.store(0, Ordering::Release);
    }
}
