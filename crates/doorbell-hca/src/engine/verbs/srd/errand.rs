//! What a queue pair over SRD has a copy engine do, since no CPU reaches the memory: atomics of the peer on GPU memory, and old values that go there.
//! One of each kind at a time: what is behind it waits.

use core::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::Link;
use crate::dma::{DmaCore, DmaFailure, Job, Work};
use crate::engine::qp::Target;
use crate::engine::{Core, lane};
use crate::fault::Fault;

/// The kinds, which are places of [`Link::errands`]: the word of an atomic of the peer.
pub(super) const WORD: usize = 0;
/// Where the old value of an atomic of ours goes.
pub(super) const SINK: usize = 1;

/// One.
#[derive(Default)]
pub(super) enum Errand {
    /// There is none.
    #[default]
    None,
    /// It is for the core to begin.
    Begin(Work),
    UnderWay,
    /// It is over, with the word's old value.
    Ended(Result<u64, Fault>),
}

impl fmt::Debug for Errand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Begin(_) => "Begin",
            Self::UnderWay => "UnderWay",
            Self::Ended(_) => "Ended",
        })
    }
}

impl Errand {
    /// Has somebody to wait for it?
    pub(super) fn is_open(&self) -> bool {
        matches!(self, Self::Begin(_) | Self::UnderWay)
    }

    fn begin(&mut self) -> Option<Work> {
        match std::mem::take(self) {
            Self::Begin(work) => {
                *self = Self::UnderWay;
                Some(work)
            }
            other => {
                *self = other;
                None
            }
        }
    }
}

/// The lane of the copy pipeline for a kind.
fn lane_of(slot: u32, kind: usize) -> u32 {
    lane(slot, 1 + kind as u32)
}

impl Link {
    /// A copy ended.
    pub(in crate::engine) fn errand_ended(
        &mut self,
        lane: u32,
        result: &Result<(), Arc<DmaFailure>>,
        old: u64,
    ) {
        let kind = lane.wrapping_sub(1) as usize;
        if let Some(errand @ Errand::UnderWay) = self.errands.get_mut(kind) {
            let result = result.as_ref().map_err(|_| Fault::DmaFailed);
            *errand = Errand::Ended(result.map(|()| old));
        }
    }

    /// The queue pair is at its end: copies that run go on by themselves. A lane in which one has failed takes others only after that.
    pub(in crate::engine) fn end_errands(&mut self, dma: &mut DmaCore, slot: u32) {
        for (kind, errand) in self.errands.iter_mut().enumerate() {
            *errand = Errand::None;
            dma.cancel(lane_of(slot, kind));
        }
    }
}

impl Core {
    /// Begins what a queue pair wants a copy engine to do. In the round in which its memory was found: the job holds it from here on.
    pub(in crate::engine) fn run_errands(&mut self, slot: u32) {
        let Self {
            qps,
            dma,
            acknowledger,
            ..
        } = self;
        let qp = qps.get_mut(slot as usize).and_then(|q| q.as_deref_mut());
        let Some(Target::Srd(link)) = qp.map(|qp| &mut qp.cold.target) else {
            return;
        };
        for (kind, errand) in link.errands.iter_mut().enumerate() {
            let Some(work) = errand.begin() else { continue };
            let job = Job {
                qp: lane_of(slot, kind),
                cookie: 0,
                hold: acknowledger.issued(),
                work,
            };
            dma.start(job, Instant::now());
        }
    }
}
