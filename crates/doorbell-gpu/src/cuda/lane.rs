//! The copier's second way: one launch of a kernel that carries out many small copies.
//!
//! A copy of the driver's costs a microsecond or two each; a kernel moves hundreds in the ten microseconds that a launch takes. But a kernel
//! needs room on a multiprocessor, and those that fill the GPU may be waiting for these very copies. So a launch that has not started in
//! [`START`] is taken back ([`doorbell_device::claim`] says why that is safe), its copies go to the copy engine, and no kernel is
//! launched again before all that were taken back have answered, nor for a while, which grows with every time.
//!
//! Launches have a stream of their own: copies behind a launch that does not start would never begin. Which of the two ways is under way at a time
//! is the copier's affair.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use doorbell_kernels::params::{CopyJob, answer};

use super::context::{Context, Current, Identity};
use super::memory::Memory;
use super::module::{CudaKernel, LoadedModule};
use super::segment::Segment;
use super::types::*;
use crate::{GpuError, Result};

/// Launches at a time that have not answered: enough that the next is queued while one runs.
const JOBS: usize = 8;
/// What a launch gets to start in: many times what it takes where there is room.
const START: Duration = Duration::from_micros(200);
/// The pause after launches were taken back; doubled each time that it happens again, up to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(1));
/// How often a launch that runs and does not answer makes us look whether its context is lost.
const SUSPECT: Duration = Duration::from_millis(10);
/// So many calls in a row that took [`START`] or longer are no accident of the scheduler's: a tool in this process, of which no variable tells
/// (a profiler by CUPTI), lets launches wait for kernels, and those may wait for our copies.
const SLOW: u32 = 4;
/// Most threads that copy: one block, so that little room is needed.
const THREADS: u32 = 256;

/// Launches of the copies' kernel.
pub(super) struct Lane {
    kernel: CudaKernel,
    stream: CuStream,
    /// For looking whether the context is lost.
    event: CuEvent,
    jobs: Memory,
    free: Vec<usize>,
    flying: VecDeque<Launch>,
    /// Since when the oldest could have started.
    front_since: Instant,
    suspected: Instant,
    /// Jobs that were taken back and have not answered: their kernels wait to start still.
    owed: Vec<usize>,
    off_until: Option<Instant>,
    pause: Duration,
    /// Calls up to now, one after another, that took long.
    slow: u32,
    /// The driver refused a launch, or lets them wait: there will be no other.
    refused: bool,
}

struct Launch {
    job: usize,
    segment: Segment,
}

/// What has become of the launches.
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

impl Lane {
    /// Loads the kernel, now: a load later would wait for running kernels.
    pub(super) fn new(context: &Arc<Context>, current: &Current<'_>) -> Result<Self> {
        let kernel = kernel(context)?;
        let now = Instant::now();
        Ok(Self {
            kernel,
            stream: current.new_stream(current.best_priority())?,
            event: current.new_event(EVENT_DISABLE_TIMING)?,
            jobs: Memory::pinned(context, JOBS * size_of::<CopyJob>())?,
            free: (0..JOBS).rev().collect(),
            flying: VecDeque::new(),
            front_since: now,
            suspected: now,
            owed: Vec::new(),
            off_until: None,
            pause: PAUSE.0,
            slow: 0,
            refused: false,
        })
    }

    fn job(&self, index: usize) -> &CopyJob {
        let jobs: *const CopyJob = self
            .jobs
            .host()
            .map_or(std::ptr::null(), |p| p.as_ptr().cast_const().cast());
        // SAFETY: pinned memory has a host address, aligned to pages; it holds as many jobs as there are indexes, zeroed when it was made, and
        // lives as long as `self`. All of a job is atomics.
        unsafe { &*jobs.add(index) }
    }

    /// Is something under way that may be doing copies?
    pub(super) fn is_busy(&self) -> bool {
        !self.flying.is_empty()
    }

    /// Are the words that take launches back set? Then all under way have theirs, since no other is launched, and those that have not started will do
    /// nothing.
    fn is_taking_back(&self) -> bool {
        let taken = |launch: &Launch| self.job(launch.job).cancelled.load(Ordering::Relaxed) != 0;
        self.flying.front().is_some_and(taken)
    }

    /// Is it of use at present? Not while launches that were taken back wait to start, nor soon after.
    pub(super) fn is_on(&mut self, now: Instant) -> bool {
        self.reclaim_owed();
        if self.refused
            || self.is_taking_back()
            || !self.owed.is_empty()
            || self.off_until.is_some_and(|t| now < t)
        {
            return false;
        }
        self.off_until = None;
        true
    }

    /// Takes a job back that has answered.
    fn reclaim(&mut self, job: usize) -> bool {
        let answered = self.job(job).answer.load(Ordering::Acquire) != answer::NONE;
        if answered {
            self.free.push(job);
        }
        answered
    }

    fn reclaim_owed(&mut self) {
        let mut owed = std::mem::take(&mut self.owed);
        owed.retain(|&job| !self.reclaim(job));
        self.owed = owed;
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// The oldest ticket under way, and when it was submitted.
    pub(super) fn oldest(&self) -> Option<(u64, Instant)> {
        let front = self.flying.front()?;
        Some((front.segment.ticket, front.segment.born))
    }

    /// Launches the kernel for a piece of one copy or more; gives the piece back if the driver refuses. There is room, and the lane is on.
    ///
    /// # Safety
    /// The GPU can load from and store to all ranges of the piece until it has ended.
    pub(super) unsafe fn launch(
        &mut self,
        current: &Current<'_>,
        segment: Segment,
    ) -> std::result::Result<(), Box<(Segment, GpuError)>> {
        let Some(index) = self.free.pop() else {
            return Ok(());
        };
        let (job, mut threads) = (self.job(index), 1);
        job.reset();
        for i in 0..segment.len() {
            job.set(i, segment.dst[i], segment.src[i], segment.size[i] as u64);
        }
        let mut first = None;
        for (step, word) in segment.steps().zip(&job.steps) {
            let sizes = &segment.size[step.clone()];
            let longest = sizes.iter().copied().max().unwrap_or(0);
            let lanes = CopyJob::lanes_for(longest as u64);
            threads = threads.max(lanes.saturating_mul(step.len() as u32));
            let alike = sizes.iter().all(|&size| size == longest);
            let len = u32::try_from(longest)
                .ok()
                .filter(|&len| alike && len < 1 << 31);
            let is_last = step.end == segment.len();
            let value = CopyJob::step(step.end as u32, lanes, len.unwrap_or(0), is_last);
            word.store(value, Ordering::Relaxed);
            first.get_or_insert(value);
        }
        // One warp beside those that copy.
        let threads = threads.next_multiple_of(32).min(THREADS) + 32;
        let offset = index * size_of::<CopyJob>();
        let (mut job, mut first) = (self.jobs.addr() + offset as u64, first.unwrap_or(0));
        let mut arguments = [
            std::ptr::from_mut(&mut job).cast::<c_void>(),
            std::ptr::from_mut(&mut first).cast(),
        ];
        // What the kernel reads was written before it can start: a full fence, and then the driver's own write to the device.
        fence(Ordering::SeqCst);
        let called = Instant::now();
        // SAFETY: the kernel takes two 8-byte arguments, which the driver copies before it returns; the job stays as it is until the kernel
        // has answered, and the ranges are the caller's promise.
        let code = unsafe {
            (current.cuLaunchKernel)(
                self.kernel.function,
                1,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        let what = || format!("{} small copies", segment.len());
        if let Err(error) = current.check("cuLaunchKernel", code, what) {
            self.free.push(index);
            self.refused = true;
            return Err(Box::new((segment, error)));
        }
        let now = Instant::now();
        let took = now.saturating_duration_since(called);
        self.slow = if took < START { 0 } else { self.slow + 1 };
        if self.slow == SLOW {
            self.refused = true;
            tracing::warn!(
                ?took,
                "launches wait, for kernels it seems (a profiler?): small copies are left to the copy engine from now on"
            );
        }
        if self.flying.is_empty() {
            self.front_since = now;
        }
        let job = index;
        self.flying.push_back(Launch { job, segment });
        Ok(())
    }

    /// What has ended, piece by piece; to be called until it says `None`. An error: the context is lost.
    pub(super) fn poll(&mut self, current: &Current<'_>, now: Instant) -> Result<Option<Ended>> {
        let Some(front) = self.flying.front() else {
            return Ok(None);
        };
        let (job, mut taking_back) = (self.job(front.job), self.is_taking_back());
        match job.answer.load(Ordering::Acquire) {
            answer::NONE => {}
            answer::DECLINED => return Ok(Some(self.take_back(now))),
            _ => {
                self.front_since = now;
                if !taking_back {
                    self.pause = PAUSE.0;
                }
                let done = self.flying.pop_front().map(|launch| {
                    self.free.push(launch.job);
                    Ended::Done(launch.segment)
                });
                return Ok(done);
            }
        }
        let waited = now.saturating_duration_since(self.front_since);
        let has_started = || job.started.load(Ordering::Relaxed) != 0;
        if !taking_back && waited >= START && !has_started() {
            // The newest first: launches run one after another, so when one sees its word those behind it see theirs.
            for launch in self.flying.iter().rev() {
                self.job(launch.job).cancelled.store(1, Ordering::Release);
            }
            fence(Ordering::SeqCst);
            taking_back = true;
        }
        // Looked at behind that fence: it will do nothing, whenever it starts.
        if taking_back && !has_started() {
            return Ok(Some(self.take_back(now)));
        }
        if waited >= SUSPECT && now.saturating_duration_since(self.suspected) >= SUSPECT {
            self.suspected = now;
            // It tells of the context, and never waits.
            current.record(self.event, self.stream)?;
            current.passed(self.event, || "small copies by a kernel".to_owned())?;
        }
        Ok(None)
    }

    /// The oldest launch does nothing, so none behind it does.
    fn take_back(&mut self, now: Instant) -> Ended {
        self.off_until = Some(now + self.pause);
        self.pause = (self.pause * 2).min(PAUSE.1);
        let mut segments = Vec::with_capacity(self.flying.len());
        for launch in std::mem::take(&mut self.flying) {
            if !self.reclaim(launch.job) {
                self.owed.push(launch.job);
            }
            segments.push(launch.segment);
        }
        Ended::TakenBack(segments)
    }

    /// Has every launch answered, also those that were taken back?
    pub(super) fn is_quiet(&mut self) -> bool {
        self.reclaim_owed();
        self.owed.is_empty() && !self.is_busy()
    }

    /// Gives everything back but the kernel. It [is quiet](Lane::is_quiet).
    pub(super) fn destroy(self, current: &Current<'_>) {
        current.destroy_event(self.event);
        current.destroy_stream(self.stream);
        self.jobs.free(current);
    }
}
