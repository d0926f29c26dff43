//! One copy engine as one core uses it: batches being filled, batches under way.
//!
//! Batches are numbered. On an ordered engine the number of a batch says what it comes after, so a later copy of the
//! same QP is simply put into a later batch; nobody waits for an earlier one on the CPU. Small ones that wait there go to the
//! engine together, as the steps of one: a hundred signals in a row cost one submission, and their end is looked for once.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Dma, DmaOp,
    job::DmaFailure,
    staging::{Pool, Slot},
};
use crate::raw::Shared;

/// Names a job within its core.
pub(super) type JobId = u32;

/// Batches that may be filled ahead of the one that is submitted next.
const AHEAD: u64 = 8;
/// The same on an ordered engine, where as many signals of one QP, a batch each, may go together.
const AHEAD_ORDERED: u64 = 256;
/// A submission of so many bytes is full: it takes the engine long enough that others gain nothing by going with it.
const FULL: u64 = 128 << 10;

/// Bytes a second below which an engine that copies is taken for one that does not: a slot of PCIe's first generation does four times as much.
const SLOWEST: u64 = 256 << 20;

/// How long so many bytes may take.
fn allowed(patience: Duration, bytes: u64) -> Duration {
    patience.saturating_add(Duration::from_secs_f64(bytes as f64 / SLOWEST as f64))
}

/// What is to be done when a copy has ended.
#[derive(Debug)]
pub(super) enum Role {
    /// Nothing.
    Move,
    /// From a buffer, which is free then.
    Out(Slot),
    /// Into a buffer, from where the CPU copies it to host memory that the engine does not reach.
    Land(Box<(Slot, Shared<u8>, u64)>),
    /// Into a buffer, from where another copy (channel, address, bytes) goes on.
    Forward(Box<(Slot, usize, u64, u64)>),
    /// Into a buffer: the old value of an atomic.
    Modify(Slot),
}

/// A copy with its purpose.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) copy: DmaOp,
    pub(super) job: JobId,
    pub(super) role: Role,
    /// Its job has failed: take its turn, but copy nothing.
    pub(super) skip: bool,
}

impl Op {
    pub(super) fn new(job: JobId, copy: DmaOp, role: Role) -> Self {
        Self {
            copy,
            job,
            role,
            skip: false,
        }
    }
}

/// A batch that ended.
pub(super) struct Done {
    pub(super) ops: Vec<Op>,
    pub(super) result: Result<(), Arc<DmaFailure>>,
}

/// One submission.
struct Batch {
    /// Of the engine; an error if it refused the batch; `None` if there was nothing to copy.
    ticket: Option<Result<u64, Arc<DmaFailure>>>,
    ops: Vec<Op>,
    /// Of all its copies.
    bytes: u64,
    since: Instant,
}

/// A copy engine with its batches.
pub(super) struct Channel {
    pub(super) dma: Arc<dyn Dma>,
    pub(super) ordered: bool,
    pub(super) pool: Pool,
    /// Buffers that are handed out of the pipeline.
    pub(super) lent: Pool,
    /// Why nothing is submitted at present.
    pub(super) stalled: Option<Arc<DmaFailure>>,
    max_batch: usize,
    max_in_flight: usize,
    ahead: u64,
    /// Number of the batch at the front of `queue`.
    base: u64,
    queue: VecDeque<Vec<Op>>,
    in_flight: VecDeque<Batch>,
    copies: Vec<DmaOp>,
    /// Where steps begin in them.
    steps: Vec<usize>,
    /// Empty lists, to be filled again.
    spare: Vec<Vec<Op>>,
}

impl Channel {
    pub(super) fn new(me: usize, dma: Arc<dyn Dma>) -> Self {
        Self {
            ordered: dma.ordered(),
            max_batch: dma.max_batch().max(1),
            max_in_flight: dma.max_in_flight().max(1),
            ahead: if dma.ordered() { AHEAD_ORDERED } else { AHEAD },
            dma,
            pool: Pool::new(me, false),
            lent: Pool::new(me, true),
            stalled: None,
            base: 0,
            queue: VecDeque::new(),
            in_flight: VecDeque::new(),
            copies: Vec::new(),
            steps: Vec::new(),
            spare: Vec::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.queue.iter().all(Vec::is_empty)
    }

    /// The first batch from number `from` on that has room, not too far ahead.
    pub(super) fn room(&self, from: u64) -> Option<u64> {
        Some(self.first_room(from)).filter(|&number| number < self.base + self.ahead)
    }

    /// As [`Channel::room`], however far ahead: for second halves, which others wait for.
    pub(super) fn room_at_last(&self) -> u64 {
        self.first_room(self.base)
    }

    fn first_room(&self, from: u64) -> u64 {
        let mut number = from.max(self.base);
        let full = |batch: &Vec<Op>| batch.len() >= self.max_batch;
        while self
            .queue
            .get((number - self.base) as usize)
            .is_some_and(full)
        {
            number += 1;
        }
        number
    }

    pub(super) fn put(&mut self, number: u64, op: Op) {
        let index = (number - self.base) as usize;
        while self.queue.len() <= index {
            self.queue.push_back(self.spare.pop().unwrap_or_default());
        }
        self.queue[index].push(op);
    }

    /// Takes back an empty list.
    pub(super) fn recycle(&mut self, ops: Vec<Op>) {
        if self.spare.len() < 2 * self.ahead as usize {
            self.spare.push(ops);
        }
    }

    /// Copies of the job that have not been submitted will not be.
    pub(super) fn skip(&mut self, job: JobId) {
        self.queue
            .iter_mut()
            .flatten()
            .filter(|op| op.job == job)
            .for_each(|op| op.skip = true);
    }

    /// Jobs with copies under way or waiting here.
    pub(super) fn jobs(&self) -> Vec<JobId> {
        let under_way = self.in_flight.iter().flat_map(|batch| &batch.ops);
        let mut jobs: Vec<JobId> = under_way
            .chain(self.queue.iter().flatten())
            .map(|op| op.job)
            .collect();
        jobs.sort_unstable();
        jobs.dedup();
        jobs
    }

    /// How many of the waiting batches make the next submission, and whether it is full.
    fn next(&self) -> (usize, bool) {
        let (mut ops, mut bytes) = (0, 0);
        for (count, batch) in self.queue.iter().enumerate() {
            if count > 0 && (!self.ordered || ops + batch.len() > self.max_batch) {
                return (count, self.ordered);
            }
            ops += batch.len();
            bytes += batch.iter().map(|op| op.copy.len).sum::<u64>();
            if ops >= self.max_batch || bytes >= FULL {
                return (count + 1, true);
            }
        }
        (self.queue.len(), false)
    }

    /// Submits what waits, as far as batches may be under way.
    pub(super) fn submit(&mut self, now: Instant) {
        while self.stalled.is_none() && self.in_flight.len() < self.max_in_flight {
            let (count, full) = self.next();
            if count == 0 || !full && self.in_flight.len() >= self.max_in_flight.div_ceil(4) {
                return;
            }
            self.copies.clear();
            self.steps.clear();
            let mut ops = Vec::new();
            for _ in 0..count {
                let Some(mut batch) = self.queue.pop_front() else {
                    break;
                };
                self.base += 1;
                if !self.copies.is_empty() {
                    self.steps.push(self.copies.len());
                }
                self.copies
                    .extend(batch.iter().filter(|op| !op.skip).map(|op| op.copy));
                if ops.is_empty() {
                    ops = batch;
                } else {
                    ops.append(&mut batch);
                    self.recycle(batch);
                }
            }
            if ops.is_empty() {
                self.recycle(ops);
                continue;
            }
            // A step that nothing is left of is none.
            self.steps.dedup();
            self.steps.pop_if(|last| *last == self.copies.len());
            let ticket = (!self.copies.is_empty()).then(|| {
                self.dma
                    .submit(&self.copies, &self.steps)
                    .map_err(|why| Arc::new(DmaFailure::Engine(why)))
            });
            // Also a batch that failed or is empty takes its turn: buffers it gives back may be in use by an earlier one.
            self.in_flight.push_back(Batch {
                ticket,
                ops,
                bytes: self.copies.iter().map(|copy| copy.len).sum(),
                since: now,
            });
        }
    }

    /// Collects what has ended. `true`: the engine has just been found to stall.
    pub(super) fn collect(
        &mut self,
        now: Instant,
        patience: Duration,
        done: &mut Vec<Done>,
    ) -> bool {
        let mut at = 0;
        while let Some(batch) = self.in_flight.get(at) {
            let result = match &batch.ticket {
                None => Some(Ok(())),
                Some(Err(failure)) => Some(Err(Arc::clone(failure))),
                Some(Ok(ticket)) => match self.dma.poll(*ticket) {
                    Ok(true) => Some(Ok(())),
                    Ok(false) => None,
                    Err(why) => Some(Err(Arc::new(DmaFailure::Engine(why)))),
                },
            };
            match result {
                Some(result) => {
                    self.stalled = None;
                    if let Some(batch) = self.in_flight.remove(at) {
                        done.push(Done {
                            ops: batch.ops,
                            result,
                        });
                    }
                    if self.ordered
                        && let Some(next) = self.in_flight.get_mut(at)
                    {
                        // Its own time begins when it can begin.
                        next.since = next.since.max(now);
                    }
                }
                None if self.ordered => break,
                None => at += 1,
            }
        }
        if self.stalled.is_some() {
            return false;
        }
        // The time of a batch on an ordered engine begins with the end of the one before it; others share the engine with all that is under way.
        let late = match self.ordered {
            true => self.in_flight.front().filter(|batch| {
                let waited = now.saturating_duration_since(batch.since);
                waited >= allowed(patience, batch.bytes)
            }),
            false => {
                let bytes = self.in_flight.iter().map(|batch| batch.bytes).sum();
                let limit = allowed(patience, bytes);
                let mut all = self.in_flight.iter();
                all.find(|batch| now.saturating_duration_since(batch.since) >= limit)
            }
        };
        let Some(batch) = late else { return false };
        let first = batch.ops.first().map_or(
            DmaOp {
                dst: 0,
                src: 0,
                len: 0,
            },
            |op| op.copy,
        );
        self.stalled = Some(Arc::new(DmaFailure::Stalled {
            what: format!(
                "{:#x} to {:#x}, first of {} in its batch",
                first.src,
                first.dst,
                batch.ops.len()
            ),
            bytes: first.len,
            waited: now.saturating_duration_since(batch.since),
        }));
        true
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.in_flight.is_empty() {
            // The engine still writes to the buffers.
            tracing::error!(
                "a copy engine is dropped with {} batches under way; its staging memory is left",
                self.in_flight.len()
            );
            for pool in [&mut self.pool, &mut self.lent] {
                std::mem::forget(std::mem::replace(pool, Pool::new(0, false)));
            }
        }
    }
}
