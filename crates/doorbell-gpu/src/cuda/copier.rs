//! The copy engine, for whoever moves payloads to and from GPU memory while kernels wait for them.
//!
//! One stream of the best priority, made before any kernel runs; batches where the driver has them; an event a batch.
//! What would block is kept back in a queue of our own, so that `submit` and `poll` return at once.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::context::{Context, Current};
use super::memory::Memory;
use super::ranges::{Place, Ranges};
use super::segment::{Plan, Segment};
use super::types::*;
use crate::copier::{CopierStats, CopyOp};
use crate::wait::{Deadline, poll_until};
use crate::{GpuError, Result};

/// Copies given to the driver and not known to have ended. The driver blocks its caller when its own queue (about a
/// thousand) is full, and a caller blocked behind a kernel that waits for it is a deadlock.
const IN_DRIVER: usize = 512;
/// Bytes of pinned memory through which copies within one GPU go.
pub(super) const BOUNCE: usize = 4 << 20;

/// How batches are given to the driver.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Batching {
    /// One `cuMemcpyAsync` a copy.
    Loop,
    /// CUDA 12.8's call.
    V1,
    /// CUDA 13.0's.
    V2,
}

/// The copier of one GPU.
pub(crate) struct CudaCopier {
    context: Arc<Context>,
    stream: CuStream,
    bounce: Memory,
    born: Instant,
    stall_after_ns: AtomicU64,
    /// The newest ticket that has ended, and all before it.
    done: AtomicU64,
    /// Some ticket failed: look under the lock.
    any_failed: AtomicBool,
    /// When the holder of the lock went into the driver (nanoseconds since `born`, 0: it is not there).
    in_driver_since: AtomicU64,
    state: Mutex<State>,
}

struct State {
    batching: Batching,
    next: u64,
    ranges: Ranges,
    plan: Plan,
    queue: VecDeque<Segment>,
    flying: VecDeque<Flying>,
    flying_ops: usize,
    events: Vec<CuEvent>,
    failed: Vec<(u64, GpuError)>,
    /// A query failed: the context is lost.
    lost: Option<CuResult>,
    stats: CopierStats,
}

/// A segment that the driver has.
struct Flying {
    ticket: u64,
    last: bool,
    ops: usize,
    /// `None`: nothing of it was given to the driver.
    event: Option<CuEvent>,
    born: Instant,
}

impl CudaCopier {
    pub(crate) fn new(context: &Arc<Context>, current: &Current<'_>) -> Result<Self> {
        let batching = match (current.cuMemcpyBatchAsync_v2, current.cuMemcpyBatchAsync) {
            (Some(_), _) => Batching::V2,
            (None, Some(_)) => Batching::V1,
            (None, None) => Batching::Loop,
        };
        Ok(Self {
            context: Arc::clone(context),
            stream: current.new_stream(current.best_priority())?,
            bounce: Memory::pinned(context, BOUNCE)?,
            born: Instant::now(),
            stall_after_ns: AtomicU64::new(10_000_000_000),
            done: AtomicU64::new(0),
            any_failed: AtomicBool::new(false),
            in_driver_since: AtomicU64::new(0),
            state: Mutex::new(State {
                batching,
                next: 1,
                ranges: Ranges::default(),
                plan: Plan::default(),
                queue: VecDeque::new(),
                flying: VecDeque::new(),
                flying_ops: 0,
                events: Vec::new(),
                failed: Vec::new(),
                lost: None,
                stats: CopierStats::default(),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the time spent in the driver under the lock, so that others can tell a stall from contention.
    fn in_driver<T>(&self, work: impl FnOnce() -> T) -> T {
        let now = u64::try_from(self.born.elapsed().as_nanos())
            .unwrap_or(u64::MAX)
            .max(1);
        self.in_driver_since.store(now, Ordering::Relaxed);
        let result = work();
        self.in_driver_since.store(0, Ordering::Relaxed);
        result
    }

    pub(crate) fn forget_memory(&self) {
        self.lock().ranges.clear();
    }

    pub(crate) fn set_stall_limit(&self, limit: Duration) {
        let ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.stall_after_ns.store(ns, Ordering::Relaxed);
    }

    pub(crate) fn batched(&self) -> bool {
        self.lock().batching != Batching::Loop
    }

    pub(crate) fn stats(&self) -> CopierStats {
        self.lock().stats
    }

    /// # Safety
    /// As for [`crate::Copier::submit`].
    pub(crate) unsafe fn submit(
        &self,
        ops: &[CopyOp],
        steps: &[usize],
        via_host: bool,
    ) -> Result<u64> {
        let mut state = self.lock();
        let current = self.context.enter()?;
        if let Some(code) = state.lost {
            return Err(lost(&current, code));
        }
        let State {
            ranges,
            plan,
            queue,
            next,
            ..
        } = &mut *state;
        plan.clear();
        let (ticket, now, already) = (*next, Instant::now(), queue.len());
        let mut steps = steps.iter().peekable();
        for (i, op) in ops.iter().enumerate() {
            if steps.next_if(|&&step| step == i).is_some() {
                plan.step(ticket, now, queue);
            }
            // Checked whole before anything goes to the driver.
            let planned = ranges
                .place(&current, op.src, op.len)
                .and_then(|src| Ok((src, ranges.place(&current, op.dst, op.len)?)))
                .and_then(|places| self.plan(plan, op, places, via_host));
            if let Err(error) = planned {
                for segment in queue.drain(already..) {
                    plan.recycle(segment);
                }
                return Err(error);
            }
        }
        plan.finish(ticket, now, queue);
        *next += 1;
        let bounced = plan.bounced_ops();
        state.stats.copies += ops.len() as u64;
        state.stats.bytes += ops.iter().map(|op| op.len).sum::<u64>();
        state.stats.via_host += bounced;
        self.in_driver(|| self.pump(&mut state, &current));
        Ok(ticket)
    }

    /// Says which way a copy goes.
    fn plan(
        &self,
        plan: &mut Plan,
        op: &CopyOp,
        places: (Place, Place),
        via_host: bool,
    ) -> Result<()> {
        match places {
            (Place::Device(a), Place::Device(b)) if a == b => {
                if !via_host {
                    let CopyOp { dst, src, len } = *op;
                    return Err(GpuError::SameGpuCopy { src, dst, len });
                }
                plan.bounced(op, self.bounce.addr());
            }
            (Place::Host, Place::Host) => {
                return Err(GpuError::Unsupported {
                    what: "a copy from host memory to host memory",
                    device: "the copy engine".to_owned(),
                    remedy: "the CPU does that faster, and CUDA would do it with a thread of its own",
                });
            }
            _ => plan.direct(op),
        }
        Ok(())
    }

    /// Gives the driver as much of the queue as it takes without blocking.
    fn pump(&self, state: &mut State, current: &Current<'_>) {
        while let Some(front) = state.queue.front() {
            let room = state.flying_ops + front.len() <= IN_DRIVER;
            if !(room || state.flying.is_empty()) {
                return;
            }
            let Some(segment) = state.queue.pop_front() else {
                return;
            };
            let event = match state.events.pop() {
                Some(event) => Ok(event),
                None => current.new_event(EVENT_DISABLE_TIMING),
            };
            let (event, failed) = match event {
                Ok(event) => {
                    let issued = self.issue(state, current, &segment);
                    let recorded = current.record(event, self.stream);
                    (Some(event), issued.and(recorded).err())
                }
                // Without an event its end would not be seen, so nothing of it goes to the driver.
                Err(error) => (None, Some(error)),
            };
            let mut last = segment.last;
            if failed.is_some() {
                // The rest of it is pointless, and its end is the end of what did get queued.
                state.queue.retain(|s| s.ticket != segment.ticket);
                last = true;
            }
            state.flying_ops += segment.len();
            let (ticket, ops, born) = (segment.ticket, segment.len(), segment.born);
            state.flying.push_back(Flying {
                ticket,
                last,
                ops,
                event,
                born,
            });
            state.plan.recycle(segment);
            if let Some(error) = failed {
                self.fail(state, ticket, error);
            }
        }
    }

    fn fail(&self, state: &mut State, ticket: u64, error: GpuError) {
        if state.failed.len() >= 1024 {
            // Nobody asks about them.
            state.failed.remove(0);
        }
        state.failed.push((ticket, error));
        self.any_failed.store(true, Ordering::Release);
    }

    fn issue(&self, state: &mut State, current: &Current<'_>, segment: &Segment) -> Result<()> {
        state.stats.batches += 1;
        for step in segment.steps() {
            self.issue_step(&mut state.batching, current, segment, step)?;
        }
        Ok(())
    }

    fn issue_step(
        &self,
        batching: &mut Batching,
        current: &Current<'_>,
        segment: &Segment,
        step: Range<usize>,
    ) -> Result<()> {
        // A lone copy is cheaper as itself.
        if step.len() > 1 && *batching != Batching::Loop {
            // CUDA_ERROR_NOT_SUPPORTED: the function is there, the device or its driver model lacks it.
            const NOT_SUPPORTED: CuResult = 801;
            match self.batch(*batching, current, segment, step.clone()) {
                NOT_SUPPORTED => *batching = Batching::Loop,
                code => {
                    return current.check("cuMemcpyBatchAsync", code, || {
                        format!("{} copies of batch {}", step.len(), segment.ticket)
                    });
                }
            }
        }
        for i in step {
            let (dst, src, len) = (segment.dst[i], segment.src[i], segment.size[i]);
            // SAFETY: the submitter promised both ranges until the ticket has ended.
            unsafe { current.copy(dst, src, len, self.stream) }?;
        }
        Ok(())
    }

    fn batch(
        &self,
        how: Batching,
        current: &Current<'_>,
        segment: &Segment,
        step: Range<usize>,
    ) -> CuResult {
        let mut attributes = CuMemcpyAttributes {
            src_access_order: SRC_ORDER_STREAM,
            flags: COPY_OVERLAP_COMPUTE,
            ..CuMemcpyAttributes::default()
        };
        // One set of attributes, from the first copy on.
        let mut first = 0usize;
        let n = step.len();
        let (dst, src, size) = (
            segment.dst[step.clone()].as_ptr(),
            segment.src[step.clone()].as_ptr(),
            segment.size[step].as_ptr(),
        );
        match (
            how,
            current.cuMemcpyBatchAsync_v2,
            current.cuMemcpyBatchAsync,
        ) {
            (Batching::V2, Some(call), _) => {
                // SAFETY: three arrays of `n`, read before the call returns; the ranges are the submitter's promise.
                unsafe {
                    call(
                        dst,
                        src,
                        size,
                        n,
                        &mut attributes,
                        &mut first,
                        1,
                        self.stream,
                    )
                }
            }
            (_, _, Some(call)) => {
                let mut failed = usize::MAX;
                let (dst, src, size) = (dst.cast_mut(), src.cast_mut(), size.cast_mut());
                // SAFETY: as above; this form takes them as mutable and only reads them.
                unsafe {
                    call(
                        dst,
                        src,
                        size,
                        n,
                        &mut attributes,
                        &mut first,
                        1,
                        &mut failed,
                        self.stream,
                    )
                }
            }
            _ => ERROR_NOT_FOUND,
        }
    }

    /// Notes what has ended.
    fn retire(&self, state: &mut State, current: &Current<'_>) {
        while let Some(front) = state.flying.front() {
            let passed = match front.event {
                Some(event) => current.passed(event, String::new),
                None => Ok(true),
            };
            match passed {
                Ok(false) => return,
                Ok(true) => {}
                Err(GpuError::Driver { code, .. }) => {
                    state.lost = Some(code);
                    return;
                }
                Err(_) => return,
            }
            let Some(ended) = state.flying.pop_front() else {
                return;
            };
            state.flying_ops -= ended.ops;
            state.events.extend(ended.event);
            if ended.last {
                self.done.store(ended.ticket, Ordering::Release);
            }
        }
    }

    pub(crate) fn poll(&self, ticket: u64) -> Result<bool> {
        if ticket <= self.done.load(Ordering::Acquire) && !self.any_failed.load(Ordering::Acquire) {
            return Ok(true);
        }
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.contended(ticket).map(|()| false),
        };
        let current = self.context.enter()?;
        if state.lost.is_none() {
            self.in_driver(|| {
                self.retire(&mut state, &current);
                self.pump(&mut state, &current);
            });
        }
        if let Some(at) = state.failed.iter().position(|(t, _)| *t == ticket)
            && !state.flying.iter().any(|f| f.ticket == ticket)
        {
            let (_, error) = state.failed.swap_remove(at);
            self.any_failed
                .store(!state.failed.is_empty(), Ordering::Release);
            return Err(error);
        }
        if ticket <= self.done.load(Ordering::Acquire) {
            return Ok(true);
        }
        if let Some(code) = state.lost {
            return Err(lost(&current, code));
        }
        if ticket >= state.next {
            return Err(GpuError::UnknownTicket {
                ticket,
                newest: state.next - 1,
            });
        }
        if let Some(oldest) = state.flying.front() {
            self.check_stall(oldest.ticket, oldest.born.elapsed())?;
        }
        Ok(false)
    }

    /// Another thread holds the lock: is it stuck in the driver?
    fn contended(&self, ticket: u64) -> Result<()> {
        match self.in_driver_since.load(Ordering::Relaxed) {
            0 => Ok(()),
            since => {
                let age = self
                    .born
                    .elapsed()
                    .saturating_sub(Duration::from_nanos(since));
                self.check_stall(ticket, age)
            }
        }
    }

    fn check_stall(&self, ticket: u64, age: Duration) -> Result<()> {
        if age <= Duration::from_nanos(self.stall_after_ns.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let connections =
            std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").unwrap_or_else(|_| "unset, 8".into());
        let cause = format!(
            "a running kernel, and beside it one of: memory freed (cudaFree, cuMemFree) in this process, the first launch \
             of another kernel (load modules eagerly: CUDA_MODULE_LOADING=EAGER), or more streams than channels \
             (CUDA_DEVICE_MAX_CONNECTIONS: {connections})"
        );
        Err(GpuError::CopyStalled { ticket, age, cause })
    }

    pub(crate) fn oldest(&self) -> Option<(u64, Duration)> {
        let state = self.lock();
        let flying = state.flying.front().map(|f| (f.ticket, f.born));
        let queued = || state.queue.front().map(|s| (s.ticket, s.born));
        flying
            .or_else(queued)
            .map(|(ticket, born)| (ticket, born.elapsed()))
    }

    pub(crate) fn wait(&self, ticket: u64, timeout: Duration) -> Result<()> {
        let done = poll_until(Deadline::after(timeout), || {
            Ok::<_, GpuError>(self.poll(ticket)?.then_some(()))
        })?;
        done.ok_or_else(|| GpuError::TimedOut {
            what: format!("copy batch {ticket}"),
            after: timeout,
            remedy: "wait longer; if it never ends, the copy engine is stuck behind a running kernel",
        })
    }

    /// Gives everything back if all copies have ended within `timeout`; says whether it did.
    pub(crate) fn destroy(self, current: &Current<'_>, timeout: Duration) -> bool {
        let newest = self.lock().next - 1;
        if !matches!(
            self.wait(newest, timeout),
            Ok(()) | Err(GpuError::Driver { .. })
        ) {
            return false;
        }
        let state = self
            .state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        for event in state
            .events
            .into_iter()
            .chain(state.flying.into_iter().filter_map(|f| f.event))
        {
            current.destroy_event(event);
        }
        current.destroy_stream(self.stream);
        self.bounce.free(current);
        true
    }
}

fn lost(current: &Current<'_>, code: CuResult) -> GpuError {
    current.error("cuEventQuery", code, "the copier's stream".to_owned())
}
