//! The copy pipeline of one engine core: jobs in, events out, in order per QP, nobody waits for another QP.
//!
//! A job starts when its order allows it. On an ordered engine that means "put its copies into a later batch than those
//! of the job before"; where the CPU has a part in it, or engines differ, it means "when the jobs before it have ended".

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Dma, DmaOp,
    atomic::Atomic,
    channel::{Channel, Done, JobId, Op, Role},
    job::{DmaFailure, Event, Job, Work},
    staging::Slot,
    state::{Pipe, State, Task},
};

/// How strictly plain writes of one QP follow each other in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WriteOrder {
    /// Each work request after the one before it.
    #[default]
    Strict,
    /// Plain writes and reads that do not overlap may become visible in any order (as with verbs' relaxed ordering); signals
    /// (inline writes, immediates, atomics) still after everything before them, and everything after them.
    Relaxed,
}

/// Settings of a [`DmaCore`].
#[derive(Clone, Copy, Debug)]
pub struct DmaConfig {
    /// A copy that has not ended after this time has failed: [`DmaFailure::Stalled`].
    pub stall: Duration,
    /// See [`WriteOrder`].
    pub order: WriteOrder,
}

impl Default for DmaConfig {
    fn default() -> Self {
        Self {
            stall: Duration::from_secs(2),
            order: WriteOrder::default(),
        }
    }
}

/// What has been done, for reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmaCounters {
    /// Jobs that ended well.
    pub completed: u64,
    /// Jobs that failed.
    pub failed: u64,
    /// Pieces that went through a staging buffer.
    pub bounced: u64,
    /// Pieces that the CPU copied through a mapping of device memory.
    pub mapped: u64,
}

/// The pipeline.
pub struct DmaCore {
    pub(super) config: DmaConfig,
    pub(super) channels: Vec<Channel>,
    pub(super) jobs: Vec<Option<State>>,
    pub(super) free: Vec<JobId>,
    pub(super) pipes: HashMap<u32, Pipe>,
    /// QPs with jobs that have not been put into batches entirely.
    pub(super) waiting: VecDeque<u32>,
    pub(super) done: Vec<Done>,
    pub(super) events: VecDeque<Event>,
    pub(super) counters: DmaCounters,
}

impl DmaCore {
    /// An empty pipeline.
    pub fn new(config: DmaConfig) -> Self {
        Self {
            config,
            channels: Vec::new(),
            jobs: Vec::new(),
            free: Vec::new(),
            pipes: HashMap::new(),
            waiting: VecDeque::new(),
            done: Vec::new(),
            events: VecDeque::new(),
            counters: DmaCounters::default(),
        }
    }

    /// Nothing waits, nothing is under way, nothing is to be reported.
    pub fn is_idle(&self) -> bool {
        self.free.len() == self.jobs.len() && self.events.is_empty()
    }

    /// Jobs of a QP that have not been reported. While there are any, a work request of that QP that the CPU executes
    /// must wait.
    pub fn pending(&self, qp: u32) -> usize {
        self.pipes.get(&qp).map_or(0, |pipe| pipe.jobs.len())
    }

    /// What has been done.
    pub fn counters(&self) -> DmaCounters {
        self.counters
    }

    /// Takes a job. Its copies begin with the next [`DmaCore::poll`].
    pub fn start(&mut self, job: Job, now: Instant) {
        let (task, qp) = (job.work, job.qp);
        let task = match task {
            Work::Copy { pieces, signal } => Task::Copy {
                pieces,
                signal,
                piece: 0,
                offset: 0,
            },
            Work::Atomic {
                addr,
                dma,
                width,
                new,
                sink,
            } => Task::Atomic(Atomic {
                addr,
                dma,
                width,
                new: Some(new),
                sink,
                old: 0,
                lock: None,
                written: false,
            }),
        };
        let state = State {
            qp,
            cookie: job.cookie,
            hold: job.hold,
            task,
            plan: None,
            earliest: 0,
            earliest_read: 0,
            last: 0,
            ops: 0,
            started: false,
            issued: false,
            failed: None,
            closed: false,
            since: now,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.jobs[id as usize] = Some(state);
                id
            }
            None => {
                self.jobs.push(Some(state));
                (self.jobs.len() - 1) as JobId
            }
        };
        let pipe = self.pipes.entry(qp).or_default();
        pipe.jobs.push_back(id);
        if !std::mem::replace(&mut pipe.listed, true) {
            self.waiting.push_back(qp);
        }
    }

    /// The QP was reset, destroyed or failed: nothing of it is reported any more but [`Event::Retired`]. Copies under way
    /// run to their end.
    pub fn cancel(&mut self, qp: u32) {
        let Some(pipe) = self.pipes.remove(&qp) else {
            return;
        };
        self.waiting.retain(|&other| other != qp);
        for id in pipe.jobs {
            self.channels
                .iter_mut()
                .for_each(|channel| channel.skip(id));
            if let Some(state) = &mut self.jobs[id as usize] {
                state.issued = true;
                state.closed = true;
            }
            self.retire(id);
        }
    }

    /// Moves everything on: collects copies that ended, starts what may start, submits batches, and reports.
    pub fn poll(&mut self, now: Instant, mut report: impl FnMut(Event)) {
        self.collect(now);
        for _ in 0..self.waiting.len() {
            let Some(qp) = self.waiting.pop_front() else {
                break;
            };
            self.issue(qp, now);
        }
        for channel in &mut self.channels {
            channel.submit(now);
        }
        while let Some(event) = self.events.pop_front() {
            report(event);
        }
    }

    pub(super) fn channel(&mut self, dma: &Arc<dyn Dma>) -> usize {
        // A handful of engines at most.
        let identity = dma.identity();
        let known = self
            .channels
            .iter()
            .position(|c| c.dma.identity() == identity);
        known.unwrap_or_else(|| {
            self.channels
                .push(Channel::new(self.channels.len(), Arc::clone(dma)));
            self.channels.len() - 1
        })
    }

    fn collect(&mut self, now: Instant) {
        for me in 0..self.channels.len() {
            let mut done = std::mem::take(&mut self.done);
            let channel = &mut self.channels[me];
            let stalls = channel.collect(now, self.config.stall, &mut done);
            if stalls && let Some(failure) = channel.stalled.clone() {
                for id in channel.jobs() {
                    self.fail(id, &failure);
                }
            }
            for ended in done.drain(..) {
                self.ended(ended);
            }
            self.done = done;
        }
    }

    /// One copy has ended.
    fn ended(&mut self, done: Done) {
        let Done { op, result } = done;
        let Some(state) = &mut self.jobs[op.job as usize] else {
            return;
        };
        state.ops -= 1;
        let usable = result.is_ok() && !op.skip && state.failed.is_none();
        if let Err(failure) = &result {
            self.fail(op.job, failure);
        }
        match op.role {
            Role::Move | Role::Gather => {}
            Role::Out(slot) => {
                self.give(slot);
                if usable {
                    self.written(op.job);
                }
            }
            Role::Land(slot, dst, len) => {
                if usable {
                    // SAFETY: the job's ranges are valid until it is retired; the buffer is ours and no copy writes it any more.
                    unsafe { crate::copy::copy(dst.as_ptr(), slot.ptr(), len as usize) };
                }
                self.give(slot);
            }
            Role::Forward(slot, to, dst, len) if usable => {
                let copy = DmaOp {
                    dst,
                    src: slot.addr(),
                    len,
                };
                self.put_last(
                    to,
                    Op {
                        copy,
                        job: op.job,
                        role: Role::Out(slot),
                        skip: false,
                    },
                );
            }
            Role::Modify(slot) if usable => self.modify(op.job, slot),
            Role::Forward(slot, ..) | Role::Modify(slot) => self.give(slot),
        }
        self.advance(op.job);
    }

    pub(super) fn give(&mut self, slot: Slot) {
        self.channels[slot.pool].pool.give(slot);
    }

    /// Puts a second half into the next batch with room.
    pub(super) fn put_last(&mut self, channel: usize, op: Op) {
        if let Some(state) = &mut self.jobs[op.job as usize] {
            state.ops += 1;
        }
        let job = op.job;
        let number = self.channels[channel].room_at_last();
        self.channels[channel].put(number, op);
        if let Some(failure) = self.channels[channel].stalled.clone() {
            self.fail(job, &failure);
        }
    }

    /// A job failed: its waiting copies are not made.
    pub(super) fn fail(&mut self, id: JobId, failure: &Arc<DmaFailure>) {
        self.channels
            .iter_mut()
            .for_each(|channel| channel.skip(id));
        if let Some(state) = &mut self.jobs[id as usize] {
            state.issued = true;
            if state.failed.is_none() {
                state.failed = Some(Arc::clone(failure));
                self.counters.failed += 1;
            }
        }
        self.advance(id);
    }

    /// Reports what can be reported after a change of this job.
    fn advance(&mut self, id: JobId) {
        let Some(state) = &self.jobs[id as usize] else {
            return;
        };
        if state.closed {
            return self.retire(id);
        }
        let qp = state.qp;
        loop {
            let Some(pipe) = self.pipes.get_mut(&qp).filter(|pipe| !pipe.dead) else {
                return;
            };
            let Some(&front) = pipe.jobs.front() else {
                return;
            };
            let Some(state) = self.jobs[front as usize]
                .as_mut()
                .filter(|state| state.ended())
            else {
                return;
            };
            pipe.jobs.pop_front();
            pipe.started = pipe.started.saturating_sub(1);
            state.closed = true;
            let result = match &state.failed {
                Some(failure) => Err(Arc::clone(failure)),
                None => Ok(()),
            };
            match &result {
                Ok(()) => self.counters.completed += 1,
                Err(_) => pipe.dead = true,
            }
            self.events.push_back(Event::Completed {
                qp,
                cookie: state.cookie,
                result,
            });
            self.retire(front);
        }
    }

    /// Forgets a job that is closed and of which nothing is under way.
    fn retire(&mut self, id: JobId) {
        let slot = &mut self.jobs[id as usize];
        if let Some(state) = slot.take_if(|state| state.closed && state.ops == 0) {
            self.events.push_back(Event::Retired { hold: state.hold });
            self.free.push(id);
        }
    }

    /// Starts and continues jobs of a QP as far as possible.
    fn issue(&mut self, qp: u32, now: Instant) {
        loop {
            let Some(pipe) = self.pipes.get(&qp) else {
                return;
            };
            let next = (!pipe.dead)
                .then(|| pipe.jobs.get(pipe.started).copied())
                .flatten();
            let next = next.filter(|&id| {
                self.jobs[id as usize]
                    .as_ref()
                    .is_some_and(|state| state.failed.is_none())
            });
            let Some(id) = next else {
                if let Some(pipe) = self.pipes.get_mut(&qp) {
                    pipe.listed = false;
                }
                return;
            };
            if !self.begin(qp, id, now) {
                break;
            }
            let outcome = self.put_pieces(id);
            if let Err(why) = outcome {
                self.fail(id, &why);
                continue;
            }
            let Some(state) = &mut self.jobs[id as usize] else {
                continue;
            };
            let (issued, last) = (state.issued, state.last);
            if let Some(pipe) = self.pipes.get_mut(&qp) {
                pipe.last = pipe.last.max(last);
                pipe.started += usize::from(issued);
            }
            if !issued {
                break;
            }
            self.advance(id);
        }
        self.waiting.push_back(qp);
    }

    /// The text of a stall that lasts, for reports.
    pub fn stalled(&self) -> Option<Arc<DmaFailure>> {
        self.channels
            .iter()
            .find_map(|channel| channel.stalled.clone())
    }

    /// Is nothing under way in any engine?
    pub fn engines_idle(&self) -> bool {
        self.channels.iter().all(Channel::is_idle)
    }
}
