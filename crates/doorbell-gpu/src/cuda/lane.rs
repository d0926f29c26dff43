//! The copier's second way: a kernel that carries out small copies, many a launch, and stays a moment for more.
//!
//! A copy of the driver's costs half a microsecond to one each, and six to eight when it is alone; a kernel moves hundreds in the ten microseconds that a launch takes, and one
//! that is there takes four to see a job and do it ([`doorbell_kernels::board`]). So while it stays jobs are posted to it, and when it has left the next is a launch.
//!
//! But a kernel needs room on a multiprocessor, and those that fill the GPU may be waiting for these very copies. So a launch that has not started in
//! [`START`] is taken back ([`doorbell_device::claim`] says why that is safe), its job's copies and those of the jobs posted behind it go to the copy engine, and no kernel is
//! launched again before it has answered, nor for a while, which grows with every time. And others may be waiting for all kernels of the GPU to end: so it stays only
//! [a moment](STAY), if more is expected, and takes no more at the end of its [life](LIFE) however much there is to do.
//!
//! What is posted to a kernel cannot be taken back: to ask whether it was would take two more trips over PCIe, half as long again as the whole. Where processes share the GPU by turns
//! the kernel may stand still for some milliseconds, and the job with it. So once a job was that late no more are posted or launched for a while, as after a take-back.
//!
//! Launches have a stream of their own: copies behind a launch that does not start would never begin. Which of the two ways is under way at a time
//! is the copier's affair.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use doorbell_kernels::board::{CopyBoard, CopyCall, CopyJob, JOBS, Post};

use super::context::{Context, Current, Identity};
use super::memory::Memory;
use super::module::{CudaKernel, LoadedModule};
use super::segment::Segment;
use super::types::*;
use crate::{GpuError, Result};

/// What a launch gets to start in: many times what it takes where there is room.
const START: Duration = Duration::from_micros(200);
/// What a step of a job gets beside it.
const STEP: Duration = Duration::from_micros(100);
/// And a [turn](Share::turns), which is a trip over PCIe or less.
const TURN: Duration = Duration::from_micros(10);
/// The pause after a launch was taken back, or a job late; doubled each time that it happens again, up to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(1));
/// How often a kernel that runs and does not answer makes us look whether its context is lost.
const SUSPECT: Duration = Duration::from_millis(10);
/// So many calls in a row that took [`START`] or longer are hardly an accident of the scheduler's: a tool in this process, of which no variable tells
/// (a profiler by CUPTI), lets launches wait for kernels, and those may wait for our copies.
const SLOW: u32 = 4;
/// The pause after these. The calls may have been slow because this thread was not running.
const SLOW_PAUSE: Duration = Duration::from_secs(1);
/// Threads that copy: a power of two.
const COPIERS: u32 = 256;
/// How many numbers of threads a copy may have: the powers of two up to all.
const WAYS: usize = COPIERS.ilog2() as usize + 1;
/// Threads of the one block: those, and a warp beside them.
const THREADS: u32 = COPIERS + 32;
/// How long the kernel stays after a job, where nobody says otherwise.
pub(super) const STAY: Duration = Duration::from_micros(50);
/// The same where no more is expected.
const BRIEF: Duration = Duration::from_micros(5);
/// How long it takes jobs at most, if it is not to stay longer than that.
const LIFE: Duration = Duration::from_millis(1);

/// The copies' kernel: one launch at a time.
pub(super) struct Lane {
    kernel: CudaKernel,
    stream: CuStream,
    /// For looking whether the context is lost.
    event: CuEvent,
    board: Memory,
    stay: Duration,
    /// More are expected soon: a launch is to stay for them.
    expects_more: bool,
    /// Number of the next job.
    next: u64,
    /// Jobs that have not been seen to be done, oldest first: consecutive numbers.
    flying: VecDeque<Job>,
    /// The launch that has not been seen to have left.
    launch: Option<Launch>,
    /// Since when the oldest job could have been done.
    front_since: Instant,
    /// It should have been done long ago, though its kernel runs.
    late: bool,
    suspected: Instant,
    off_until: Option<Instant>,
    pause: Duration,
    /// Calls up to now, one after another, that took long.
    slow: u32,
    /// Jobs that a kernel did which was there.
    posted: u64,
    /// It was told to leave.
    closing: bool,
    /// The driver refused a launch, or lets them wait: there will be no other.
    refused: bool,
}

struct Job {
    number: u64,
    segment: Segment,
    /// It needed no launch so far.
    posted: bool,
    /// What it may take: far more than it does while the kernel runs.
    allowed: Duration,
}

#[derive(Clone, Copy)]
struct Launch {
    /// When it could start.
    since: Instant,
    /// The word that takes it back is set: if it has not started, it will do nothing.
    taking_back: bool,
}

/// What has become of the jobs.
pub(super) enum Ended {
    /// The oldest: all its copies were made.
    Done(Segment),
    /// None of these was begun, nor will be; oldest first.
    TakenBack(Vec<Segment>),
}

/// The kernel, loaded once a context and never unloaded: loads and unloads wait for running kernels, and whoever closes a GPU and opens it again must
/// not wait for those of others.
fn kernel(context: &Arc<Context>) -> Result<CudaKernel> {
    static KEPT: Mutex<Vec<(Identity, CudaKernel)>> = Mutex::new(Vec::new());
    let kept = || KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let identity = context.identity();
    if let Some((_, kernel)) = kept().iter().find(|(of, _)| *of == identity) {
        return Ok(kernel.clone());
    }
    // Without the lock: where this waits, other GPUs need not. Two threads may both load, which costs a few kilobytes.
    let module = LoadedModule::load(context, doorbell_kernels::COPIES_PTX.as_bytes())?;
    let kernel = module.kernel("copies")?;
    kept().push((identity, kernel.clone()));
    // The context stays retained with it: its handle is good as long as the context is there.
    std::mem::forget(module);
    Ok(kernel)
}

/// What a job of so many steps and turns may take, and no less than its kernel may stay.
fn allowed(stay: Duration, steps: usize, turns: u64) -> Duration {
    let times = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    START.max(stay) + STEP.saturating_mul(times(steps as u64)) + TURN.saturating_mul(times(turns))
}

/// How the threads are shared out among the copies of a step.
#[derive(Debug, PartialEq, Eq)]
struct Share {
    /// Threads a copy.
    lanes: u32,
    /// How often a thread has loads under way and waits for them.
    turns: u64,
}

impl Share {
    /// For copies of these [weights](CopyJob::weight), one or more.
    fn of(weights: impl Iterator<Item = u64>, alike: bool) -> Self {
        // Where so many are dealt out to a power of two: how many one gets at most.
        let dealt = |n: u64, log: usize| ((n + (1 << log) - 1) >> log).max(1);
        // A thread has 64 bytes under way.
        let units = |weight: u64| weight.div_ceil(64);
        let (mut longest, mut sums) = (0, [0; WAYS]);
        for weight in weights {
            longest = longest.max(weight);
            for (log, sum) in sums.iter_mut().enumerate() {
                *sum += dealt(units(weight), log);
            }
        }
        let with = |log: usize| Self {
            lanes: 1 << log,
            turns: dealt(units(longest), log).max(dealt(sums[log], WAYS - 1 - log)),
        };
        if alike {
            return with(CopyJob::lanes_for(longest).ilog2() as usize);
        }
        // By the longest, many short ones beside it would wait for each other; by the shortest, all for it.
        let mut best = with(WAYS - 1);
        for share in (0..WAYS - 1).rev().map(with) {
            if share.turns < best.turns {
                best = share;
            }
        }
        best
    }
}

impl Lane {
    /// Loads the kernel, now: a load later would wait for running kernels.
    pub(super) fn new(
        context: &Arc<Context>,
        current: &Current<'_>,
        stay: Duration,
    ) -> Result<Self> {
        let kernel = kernel(context)?;
        let now = Instant::now();
        Ok(Self {
            kernel,
            stream: current.new_stream(current.best_priority())?,
            event: current.new_event(EVENT_DISABLE_TIMING)?,
            board: Memory::pinned(context, size_of::<CopyBoard>())?,
            stay,
            expects_more: false,
            next: 1,
            flying: VecDeque::new(),
            launch: None,
            front_since: now,
            late: false,
            suspected: now,
            off_until: None,
            pause: PAUSE.0,
            slow: 0,
            posted: 0,
            closing: false,
            refused: false,
        })
    }

    fn board(&self) -> &CopyBoard {
        let board: *const CopyBoard = self
            .board
            .host()
            .map_or(std::ptr::null(), |p| p.as_ptr().cast_const().cast());
        // SAFETY: pinned memory has a host address, aligned to pages; it holds a board, zeroed when it was made, and lives as long as `self`. All of
        // a board is atomics.
        unsafe { &*board }
    }

    /// How long the kernel stays; zero: it leaves when there is nothing more to do.
    pub(super) fn stay(&self) -> Duration {
        self.stay
    }

    pub(super) fn set_stay(&mut self, stay: Duration) {
        self.stay = stay;
    }

    /// Whether the next launch is to stay.
    pub(super) fn expect_more(&mut self, more: bool) {
        self.expects_more = more;
    }

    pub(super) fn posted(&self) -> u64 {
        self.posted
    }

    /// Is something under way that may be doing copies?
    pub(super) fn is_busy(&self) -> bool {
        !self.flying.is_empty()
    }

    /// Has the launch left, or is there none? Behind this all that it did is in `done`.
    fn has_left(&self) -> bool {
        self.launch.is_none() || self.board().left.load(Ordering::Acquire) != 0
    }

    fn has_started(&self) -> bool {
        self.board().started.load(Ordering::Relaxed) != 0
    }

    /// Is a kernel there, or about to be, that sees what is posted?
    pub(super) fn is_there(&self) -> bool {
        let taking_back = self.launch.is_some_and(|launch| launch.taking_back);
        !taking_back && !self.late && !self.closing && !self.has_left()
    }

    /// Is it of use at present? Not while a launch that was taken back waits to start, nor soon after.
    pub(super) fn is_on(&mut self, now: Instant) -> bool {
        if self.flying.is_empty() && self.has_left() {
            self.launch = None;
        }
        if self.refused
            || self.closing
            || self.late
            || self.launch.is_some_and(|launch| launch.taking_back)
            || self.off_until.is_some_and(|t| now < t)
        {
            return false;
        }
        self.off_until = None;
        true
    }

    pub(super) fn has_room(&self) -> bool {
        self.flying.len() < JOBS
    }

    /// The oldest ticket under way, and when it was submitted.
    pub(super) fn oldest(&self) -> Option<(u64, Instant)> {
        let front = self.flying.front()?;
        Some((front.segment.ticket, front.segment.born))
    }

    /// Has the kernel do a piece of one copy or more: the one that is there, or a launch. Gives the piece back if the driver refuses. There is room, and the lane is on.
    ///
    /// # Safety
    /// The GPU can load from and store to all ranges of the piece until it has ended.
    pub(super) unsafe fn submit(
        &mut self,
        current: &Current<'_>,
        segment: Segment,
    ) -> std::result::Result<(), Box<(Segment, GpuError)>> {
        let number = self.next;
        self.next += 1;
        let (post, turns) = self.fill(number, &segment);
        self.board().post(number, post);
        if self.flying.is_empty() {
            self.front_since = Instant::now();
        }
        self.posted += 1;
        self.flying.push_back(Job {
            number,
            posted: true,
            allowed: allowed(self.stay, segment.steps().count(), turns),
            segment,
        });
        match self.attend(current) {
            Ok(()) => Ok(()),
            Err(error) => match self.flying.pop_back() {
                // Those before it are taken back when they are asked for.
                Some(job) => {
                    self.posted -= u64::from(job.posted);
                    Err(Box::new((job.segment, error)))
                }
                None => Ok(()),
            },
        }
    }

    /// Writes what the kernel is to do; returns what it is to see, and in how many turns it is done.
    fn fill(&self, number: u64, segment: &Segment) -> (Post, u64) {
        let (dst, src, size) = (&segment.dst, &segment.src, &segment.size);
        let weight = |i: usize| CopyJob::weight(dst[i], src[i], size[i] as u64);
        if let [len] = size[..]
            && let Some(post) = Post::copy(number, dst[0], src[0], len as u64)
        {
            let turns = Share::of(std::iter::once(weight(0)), true).turns;
            return (post, turns);
        }
        let job = &self.board().jobs[CopyBoard::place(number)];
        for (i, &len) in size.iter().enumerate() {
            job.set(i, dst[i], src[i], len as u64);
        }
        let (mut first, mut turns) = (None, 0);
        for (step, word) in segment.steps().zip(&job.steps) {
            let sizes = &size[step.clone()];
            let longest = sizes.iter().copied().max().unwrap_or(0);
            let alike = sizes.iter().all(|&size| size == longest);
            let len = u32::try_from(longest)
                .ok()
                .filter(|&len| alike && len < 1 << 31);
            let is_last = step.end == segment.len();
            let weights = step.clone().map(weight);
            let alike = alike && weights.clone().max() == weights.clone().min();
            let share = Share::of(weights, alike);
            turns += share.turns;
            let value = CopyJob::step(step.end as u32, share.lanes, len.unwrap_or(0), is_last);
            word.store(value, Ordering::Relaxed);
            first.get_or_insert(value);
        }
        (Post::steps(number, first.unwrap_or(0)), turns)
    }

    /// Sees to it that a kernel is there, or coming, for the jobs that have not been done.
    fn attend(&mut self, current: &Current<'_>) -> Result<()> {
        if !self.has_left() {
            return Ok(());
        }
        self.launch = None;
        let done = self.board().done.load(Ordering::Acquire);
        let Some(job) = self.flying.iter_mut().find(|job| job.number > done) else {
            return Ok(());
        };
        let number = job.number;
        if std::mem::take(&mut job.posted) {
            self.posted -= 1;
        }
        self.launch(current, number)
    }

    /// Launches the kernel with job `number` as its first. None is there.
    fn launch(&mut self, current: &Current<'_>, number: u64) -> Result<()> {
        self.board().reset();
        let Post([mut first, mut last]) = self.board().posted(number);
        let ns = |time: Duration| u32::try_from(time.as_nanos()).unwrap_or(u32::MAX);
        let (mut board, mut number) = (self.board.addr(), number);
        let stay = match self.expects_more {
            true => self.stay,
            false => self.stay.min(BRIEF),
        };
        let mut times = CopyCall::times(ns(stay), ns(stay.max(LIFE)));
        let mut arguments = [&mut board, &mut number, &mut first, &mut last, &mut times]
            .map(|word| std::ptr::from_mut(word).cast::<c_void>());
        // What the kernel reads was written before it can start: a full fence, and then the driver's own write to the device.
        fence(Ordering::SeqCst);
        let called = Instant::now();
        // SAFETY: the kernel takes five 8-byte arguments, which the driver copies before it returns; the board stays until the kernel has left, its jobs as they are until they
        // are done, and their ranges are the promise of who submitted them.
        let code = unsafe {
            (current.cuLaunchKernel)(
                self.kernel.function,
                1,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        let what = || {
            format!(
                "{} small copies",
                self.flying.front().map_or(0, |job| job.segment.len())
            )
        };
        if let Err(error) = current.check("cuLaunchKernel", code, what) {
            self.refused = true;
            return Err(error);
        }
        let now = Instant::now();
        let took = now.saturating_duration_since(called);
        if took < START {
            self.slow = 0;
        } else {
            tracing::debug!(?took, "a launch of the copies' kernel was slow");
            self.slow += 1;
        }
        if self.slow == SLOW {
            // Then a single one is enough for the next pause.
            self.slow -= 1;
            self.off_until = Some(now + SLOW_PAUSE);
            tracing::warn!(
                ?took,
                "launches wait, for kernels it seems (a profiler?): small copies are left to the copy engine for a second"
            );
        }
        self.launch = Some(Launch {
            since: now,
            taking_back: false,
        });
        Ok(())
    }

    /// The oldest piece, if all its copies were made.
    fn done(&mut self, now: Instant) -> Option<Segment> {
        let number = self.flying.front()?.number;
        if self.board().done.load(Ordering::Acquire) < number {
            return None;
        }
        self.front_since = now;
        match &mut self.launch {
            // It has started after all.
            Some(launch) if launch.taking_back => launch.taking_back = false,
            _ if self.late => self.pause_from(now),
            _ => self.pause = PAUSE.0,
        }
        self.late = false;
        self.flying.pop_front().map(|job| job.segment)
    }

    /// Uses no kernel for a while.
    fn pause_from(&mut self, now: Instant) {
        self.off_until = Some(now + self.pause);
        self.pause = (self.pause * 2).min(PAUSE.1);
    }

    /// What has ended, piece by piece; to be called until it says `None`. An error: the context is lost.
    pub(super) fn poll(&mut self, current: &Current<'_>, now: Instant) -> Result<Option<Ended>> {
        if !self.is_busy() {
            return Ok(None);
        }
        // In this order: a kernel that has left has done all that it ever will.
        let left = self.has_left();
        if let Some(segment) = self.done(now) {
            return Ok(Some(Ended::Done(segment)));
        }
        let taking_back = self.launch.is_some_and(|launch| launch.taking_back);
        if left {
            if taking_back || self.refused {
                self.launch = None;
                return Ok(Some(self.take_back(now)));
            }
            // It left as the job came, or at the end of its life.
            return match self.attend(current) {
                Ok(()) => Ok(None),
                Err(error) => {
                    tracing::warn!(%error, "small copies are left to the copy engine from now on");
                    Ok(Some(self.take_back(now)))
                }
            };
        }
        if let Some(launch) = self.launch
            && !self.has_started()
        {
            let late = now.saturating_duration_since(launch.since) >= START;
            if late && !launch.taking_back {
                self.board().cancelled.store(1, Ordering::Release);
                fence(Ordering::SeqCst);
                // Looked at behind that fence: it will do nothing, whenever it starts.
                let has_started = self.has_started();
                self.launch = Some(Launch {
                    taking_back: true,
                    ..launch
                });
                if !has_started {
                    return Ok(Some(self.take_back(now)));
                }
            }
        }
        let waited = now.saturating_duration_since(self.front_since);
        let allowed = self.flying.front().map_or(Duration::MAX, |job| job.allowed);
        self.late |= self.has_started() && waited >= allowed;
        if waited >= SUSPECT && now.saturating_duration_since(self.suspected) >= SUSPECT {
            self.suspected = now;
            self.ask(current)?;
        }
        Ok(None)
    }

    /// An error: the context is lost. One record of the event is under way at most: the driver's queue is not endless, and who finds it full waits for the kernels before.
    fn ask(&self, current: &Current<'_>) -> Result<()> {
        let passed = || current.passed(self.event, || "small copies by a kernel".to_owned());
        if passed()? {
            current.record(self.event, self.stream)?;
            passed()?;
        }
        Ok(())
    }

    /// No job under way was begun, nor will be.
    fn take_back(&mut self, now: Instant) -> Ended {
        self.pause_from(now);
        self.late = false;
        let jobs = std::mem::take(&mut self.flying).into_iter();
        Ended::TakenBack(jobs.map(|job| job.segment).collect())
    }

    /// Has every launch ended? Tells the one that is there to leave, and there will be no other. In a context that is lost none runs, whatever is under way.
    pub(super) fn is_quiet(&mut self, current: &Current<'_>) -> bool {
        if !self.is_busy() && self.has_left() || self.ask(current).is_err() {
            self.launch = None;
            return true;
        }
        if !self.is_busy() && !std::mem::replace(&mut self.closing, true) {
            self.board().post(self.next, Post::leave(self.next));
        }
        false
    }

    /// Gives everything back but the kernel. It [is quiet](Lane::is_quiet).
    pub(super) fn destroy(self, current: &Current<'_>) {
        current.destroy_event(self.event);
        current.destroy_stream(self.stream);
        self.board.free(current);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A large job takes milliseconds by itself, and is not late for that.
    #[test]
    fn what_a_job_may_take_grows_with_its_turns() {
        let us = Duration::from_micros;
        assert_eq!(allowed(STAY, 1, 1), us(310));
        assert_eq!(allowed(us(2_000), 3, 0), us(2_300));
        assert_eq!(allowed(STAY, 1, 512), us(5_420));
    }

    #[test]
    fn threads_are_shared_out_so_that_all_end_early() {
        let share = |lanes, turns| Share { lanes, turns };
        let of = |copies: &[(u64, usize)], alike| {
            let each = copies.iter();
            let weights = each.flat_map(|&(weight, n)| std::iter::repeat_n(weight, n));
            Share::of(weights, alike)
        };
        assert_eq!(of(&[(8, 1)], true), share(1, 1));
        assert_eq!(of(&[(8, 256)], true), share(1, 1));
        assert_eq!(of(&[(16 << 10, 1)], true), share(256, 1));
        assert_eq!(of(&[(4096, 256)], true), share(64, 64));
        // 480 bytes that are not aligned alike, among words: as if all were long, 244 turns.
        assert_eq!(of(&[(7680, 24), (16, 220)], false), share(8, 19));
        // One long one: 128 turns by eight threads, 255 by all of them.
        assert_eq!(of(&[(65_536, 1), (8, 255)], false), share(32, 36));
        assert_eq!(of(&[(8, 3), (12, 2)], false), share(32, 1));
    }
}
