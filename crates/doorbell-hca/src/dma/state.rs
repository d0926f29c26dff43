//! What the pipeline remembers of a job and of a QP.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use super::{
    atomic::Atomic,
    channel::JobId,
    job::{DmaFailure, Pieces, Range},
};

pub(super) enum Task {
    Copy {
        pieces: Pieces,
        signal: bool,
        piece: usize,
        offset: u64,
    },
    Atomic(Atomic),
}

/// Where a job's copies go, found out once.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    /// The one channel of all its pieces.
    pub(super) channel: Option<usize>,
    /// It needs the CPU, or several channels, between or after copies.
    pub(super) steps: bool,
    /// The CPU reads host memory as soon as the job begins.
    pub(super) eager: bool,
}

pub(super) struct State {
    pub(super) qp: u32,
    pub(super) cookie: u64,
    pub(super) hold: bool,
    pub(super) task: Task,
    pub(super) plan: Option<Plan>,
    /// What it writes goes into this batch or a later one.
    pub(super) earliest: u64,
    /// What it reads into a buffer goes into this batch or a later one.
    pub(super) earliest_read: u64,
    /// Batch of its last copy.
    pub(super) last: u64,
    /// Copies waiting or under way.
    pub(super) ops: u32,
    pub(super) started: bool,
    /// Everything has been put into batches.
    pub(super) issued: bool,
    pub(super) failed: Option<Arc<DmaFailure>>,
    /// The engine does not want to hear of it any more.
    pub(super) closed: bool,
    pub(super) since: Instant,
}

impl State {
    pub(super) fn ended(&self) -> bool {
        self.failed.is_some() || (self.issued && self.ops == 0)
    }
}

#[derive(Default)]
pub(super) struct Pipe {
    /// In order; the first `started` have begun.
    pub(super) jobs: VecDeque<JobId>,
    pub(super) started: usize,
    /// Of the job that started last.
    pub(super) channel: Option<usize>,
    pub(super) steps: bool,
    pub(super) signal: bool,
    pub(super) last: u64,
    /// What was written since the last boundary that everything keeps to.
    pub(super) hull: Range,
    /// What was written since the QP last had nothing under way.
    pub(super) written: Range,
    /// A job failed: nothing more until the QP is cancelled.
    pub(super) dead: bool,
    /// Listed in `waiting`.
    pub(super) listed: bool,
}
