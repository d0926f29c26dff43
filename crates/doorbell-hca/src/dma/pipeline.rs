//! The copy pipeline of one engine core: jobs in, events out, in order per QP, nobody waits for another QP.
//!
//! A job starts when its order allows it. On an ordered engine that means "put its copies into a later batch than those
//! of the job before"; where the CPU has a part in it, or engines differ, it means "when the jobs before it have ended".

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Buffer, Dma, DmaOp,
    atomic::Atomic,
    channel::{Channel, Done, JobId, Op, Role},
    job::{DmaFailure, Event, Job, Pieces, Work},
    staging::Slot,
    state::{Pipe, Rest, State, Task},
};

/// How strictly plain writes of one QP follow each other in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WriteOrder {
    /// Plain writes and reads that touch different bytes may become visible in any order until they complete, which they
    /// do in order: a copy engine is fast in batches only, and a batch has no order. Signals (inline writes, writes with
    /// immediate, atomics) come after everything before them, and everything after them, but for an atomic on a word of host memory: that
    /// holds up only what touches the word, and other signals.
    #[default]
    Relaxed,
    /// Each work request after the one before it, at the price of one batch each.
    Strict,
}

impl WriteOrder {
    /// May a copy be visible before or after its neighbours, as long as they do not touch the same bytes?
    pub(super) fn relaxes(self, signal: bool) -> bool {
        self == Self::Relaxed && !signal
    }
}

/// Settings of a [`DmaCore`].
#[derive(Clone, Copy, Debug)]
pub struct DmaConfig {
    /// A batch of copies that has not ended after this time, and four seconds more for each GiB of it, has failed: [`DmaFailure::Stalled`].
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
    /// By QP.
    pub(super) pipes: Vec<Pipe>,
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
            pipes: Vec::new(),
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
        self.pipes
            .get(qp as usize)
            .map_or(0, |pipe| pipe.jobs.len())
    }

    /// What has been done.
    pub fn counters(&self) -> DmaCounters {
        self.counters
    }

    /// Takes a job of a QP (a small number: the pipeline keeps a list). Its copies begin with the next [`DmaCore::poll`].
    pub fn start(&mut self, job: Job, now: Instant) {
        self.start_with(job, None, now);
    }

    /// As [`DmaCore::start`], for a job that copies to or from a buffer of [`DmaCore::buffer`]. The buffer comes back in
    /// [`Event::Completed`]; after a failure, or if the job is cancelled, the pipeline keeps it.
    pub fn start_with(&mut self, job: Job, buffer: Option<Buffer>, now: Instant) {
        let qp = job.qp as usize;
        if self.pipes.len() <= qp {
            self.pipes.resize_with(qp + 1, Pipe::default);
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            (self.jobs.len() - 1) as JobId
        });
        let pipe = &mut self.pipes[qp];
        let ops = match &job.work {
            _ if pipe.listed => None,
            Work::Copy {
                pieces: Pieces::One(piece),
                signal,
            } => self
                .put_at_once(job.qp, id, piece, *signal)
                .ok()
                .map(|()| 1),
            // It is carried out when those before it have ended; there must be some.
            Work::Word(word) if !pipe.jobs.is_empty() => {
                pipe.await_word(word.range());
                Some(0)
            }
            _ => None,
        };
        let waits = ops.is_none() || matches!(job.work, Work::Word(_));
        let rest = waits.then(|| Box::new(Rest::of(job.work, now)));
        self.jobs[id as usize] = Some(State {
            qp: job.qp,
            ops: ops.unwrap_or(0),
            cookie: job.cookie,
            issued: !waits,
            rest,
            failed: None,
            hold: job.hold,
            old: 0,
            buffer,
            closed: false,
        });
        let pipe = &mut self.pipes[qp];
        pipe.jobs.push_back(id);
        if ops.is_some() {
            pipe.started += 1;
        } else if !std::mem::replace(&mut pipe.listed, true) {
            self.waiting.push_back(job.qp);
        }
    }

    /// A buffer that an engine reaches, for `len` bytes or as many as the largest has. `None`: all are in use.
    ///
    /// # Errors
    /// What the copy engine says when it cannot make them.
    pub fn buffer(
        &mut self,
        dma: &Arc<dyn Dma>,
        len: u64,
    ) -> Result<Option<(Buffer, u64)>, String> {
        let index = self.channel(dma);
        self.channels[index].lent.take(&**dma, len)
    }

    /// Takes a buffer back that no job has.
    pub fn release(&mut self, buffer: Buffer) {
        self.give(buffer);
    }

    /// The QP was reset, destroyed or failed: nothing of it is reported any more but [`Event::Retired`]. Copies under way
    /// run to their end.
    pub fn cancel(&mut self, qp: u32) {
        let Some(pipe) = self.pipes.get_mut(qp as usize).map(std::mem::take) else {
            return;
        };
        self.waiting.retain(|&other| other != qp);
        for id in pipe.jobs {
            self.skip(id);
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
        // A handful of engines at most, and nearly always the same object.
        let same = |c: &Channel| std::ptr::addr_eq(Arc::as_ptr(&c.dma), Arc::as_ptr(dma));
        let known = self.channels.iter().position(same);
        let known = known.or_else(|| {
            let identity = dma.identity();
            self.channels
                .iter()
                .position(|c| c.dma.identity() == identity)
        });
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
            for Done { mut ops, result } in done.drain(..) {
                for op in ops.drain(..) {
                    self.ended(op, &result);
                }
                self.channels[me].recycle(ops);
            }
            self.done = done;
        }
    }

    /// One copy has ended.
    fn ended(&mut self, op: Op, result: &Result<(), Arc<DmaFailure>>) {
        let Some(state) = &mut self.jobs[op.job as usize] else {
            return;
        };
        state.ops -= 1;
        let usable = result.is_ok() && !op.skip && state.failed.is_none();
        if let Err(failure) = result {
            self.fail(op.job, failure);
        }
        match op.role {
            Role::Move => {}
            Role::Out(slot) => {
                self.give(slot);
                if usable {
                    self.written(op.job);
                }
            }
            Role::Land(land) => {
                let (slot, dst, len) = *land;
                if usable {
                    // SAFETY: the job's ranges are valid until it is retired; the buffer is ours and no copy writes it any more.
                    unsafe { crate::copy::copy(dst.as_ptr(), slot.ptr(), len as usize) };
                }
                self.give(slot);
            }
            Role::Forward(forward) if usable => {
                let (slot, to, dst, len) = *forward;
                let copy = DmaOp {
                    dst,
                    src: slot.addr(),
                    len,
                };
                self.put_last(to, Op::new(op.job, copy, Role::Out(slot)));
            }
            Role::Modify(slot) if usable => self.modify(op.job, slot),
            Role::Forward(forward) => self.give(forward.0),
            Role::Modify(slot) => self.give(slot),
        }
        self.advance(op.job);
    }

    pub(super) fn give(&mut self, slot: Slot) {
        let channel = &mut self.channels[slot.pool()];
        match slot.is_lent() {
            true => channel.lent.give(slot),
            false => channel.pool.give(slot),
        }
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

    fn skip(&mut self, id: JobId) {
        self.channels
            .iter_mut()
            .for_each(|channel| channel.skip(id));
    }

    /// A job failed: its waiting copies are not made.
    pub(super) fn fail(&mut self, id: JobId, failure: &Arc<DmaFailure>) {
        self.skip(id);
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
    pub(super) fn advance(&mut self, id: JobId) {
        let Some(state) = &self.jobs[id as usize] else {
            return;
        };
        if state.closed {
            return self.retire(id);
        }
        let qp = state.qp;
        let pipe = &mut self.pipes[qp as usize];
        if pipe.jobs.front() != Some(&id) {
            return;
        }
        while let Some(&front) = pipe.jobs.front().filter(|_| !pipe.dead) {
            let slot = &mut self.jobs[front as usize];
            let Some(state) = slot.as_mut() else { return };
            if state.carry_out_word() {
                pipe.word_ended();
            }
            if !state.ended() {
                return;
            }
            pipe.jobs.pop_front();
            pipe.started = pipe.started.saturating_sub(1);
            let result = match &state.failed {
                Some(failure) => Err(Arc::clone(failure)),
                None => Ok(()),
            };
            match &result {
                Ok(()) => self.counters.completed += 1,
                Err(_) => pipe.dead = true,
            }
            let (cookie, hold, old) = (state.cookie, state.hold, state.old);
            let buffer = state.buffer.take_if(|_| result.is_ok());
            self.events.push_back(Event::Completed {
                qp,
                cookie,
                result,
                old,
                buffer,
            });
            state.closed = true;
            if state.ops == 0 {
                let left = slot.take().and_then(|state| state.buffer);
                self.free.push(front);
                self.events.push_back(Event::Retired { hold });
                if let Some(buffer) = left {
                    // Of a job that failed: `pipe` ends here, since nothing is reported after it.
                    return self.give(buffer);
                }
            }
        }
    }

    /// Forgets a job that is closed and of which nothing is under way.
    fn retire(&mut self, id: JobId) {
        let slot = &mut self.jobs[id as usize];
        if let Some(state) = slot.take_if(|state| state.closed && state.ops == 0) {
            self.events.push_back(Event::Retired { hold: state.hold });
            self.free.push(id);
            if let Some(buffer) = state.buffer {
                self.give(buffer);
            }
        }
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

impl Rest {
    fn of(work: Work, since: Instant) -> Self {
        let task = match work {
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
            Work::Word(word) => Task::Word(word),
        };
        Self {
            task,
            plan: None,
            earliest: 0,
            last: 0,
            begun: false,
            since,
        }
    }
}
