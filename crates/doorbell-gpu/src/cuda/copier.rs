//! The copy engine, for whoever moves payloads to and from GPU memory while kernels wait for them.
//!
//! One stream of the best priority, made before any kernel runs; batches where the driver has them; an event a batch.
//! What would block is kept back in a queue of our own, so that `submit` and `poll` return at once.
//!
//! Many small copies, and single ones that follow each other closely, go to a kernel instead ([`Lane`]). One of the two ways is in use at a time: what is to go the other waits in the queue
//! until everything under way has ended, so that the order of tickets never depends on two streams.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use doorbell_kernels::board::CopyJob;

use super::context::{Context, Current};
use super::engine::Engine;
use super::lane::{Ended, Lane};
use super::memory::Memory;
use super::policy::{Habit, Kind, Policy};
use super::ranges::{Near, Place, Ranges};
use super::segment::{Plan, Segment, Way};
use super::types::*;
use crate::copier::{CopierStats, CopyOp};
use crate::wait::{Deadline, poll_until};
use crate::{GpuError, Result};

/// Copies given to the driver and not known to have ended. The driver blocks its caller when its own queue (about a
/// thousand) is full, and a caller blocked behind a kernel that waits for it is a deadlock.
const IN_DRIVER: usize = 512;
/// Bytes of pinned memory through which copies within one GPU go.
pub(super) const BOUNCE: usize = 4 << 20;

/// How a caller wants copies done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// By the copy engine, which cannot copy within one GPU.
    Engine,
    /// By the copy engine; within one GPU through host memory.
    ViaHost,
    /// As is quickest.
    Any,
}

/// The copier of one GPU.
pub(crate) struct CudaCopier {
    context: Arc<Context>,
    bounce: Memory,
    born: Instant,
    stall_after_ns: AtomicU64,
    /// The newest ticket that has ended, and all before it.
    done: AtomicU64,
    /// Some ticket failed: look under the lock.
    any_failed: AtomicBool,
    /// When the holder of the lock went into the driver (nanoseconds since `born`, 0: it is not there).
    in_driver_since: AtomicU64,
    policy: Policy,
    state: Mutex<State>,
}

struct State {
    lane: Option<Lane>,
    habit: Habit,
    engine: Engine,
    next: u64,
    ranges: Ranges,
    plan: Plan,
    /// Of the ticket that is being planned: the copies with both ends in one GPU.
    within: Vec<bool>,
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
    pub(crate) fn new(
        context: &Arc<Context>,
        current: &Current<'_>,
        policy: Policy,
    ) -> Result<Self> {
        Ok(Self {
            context: Arc::clone(context),
            bounce: Memory::pinned(context, BOUNCE)?,
            born: Instant::now(),
            stall_after_ns: AtomicU64::new(10_000_000_000),
            done: AtomicU64::new(0),
            any_failed: AtomicBool::new(false),
            in_driver_since: AtomicU64::new(0),
            policy,
            state: Mutex::new(State {
                lane: None,
                habit: Habit::default(),
                engine: Engine::new(current)?,
                next: 1,
                ranges: Ranges::default(),
                plan: Plan::default(),
                within: Vec::new(),
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

    /// Loads the kernel for small copies, if it is wanted, which stays as long as the variable says. An error: there will be none.
    pub(crate) fn open_lane(&self, current: &Current<'_>, stay: Duration) -> Result<()> {
        if self.policy != Policy::Engine {
            self.lock().lane = Some(Lane::new(&self.context, current, stay)?);
        }
        Ok(())
    }

    pub(crate) fn set_stay(&self, stay: Duration) {
        if let Some(lane) = &mut self.lock().lane {
            lane.set_stay(stay);
        }
    }

    /// Another process's memory was opened for this GPU's kernels.
    pub(crate) fn opened(&self, start: u64, len: u64) {
        self.lock().ranges.opened(start, len);
    }

    /// It is closed.
    pub(crate) fn closed(&self, start: u64) {
        self.lock().ranges.closed(start);
    }

    pub(crate) fn set_stall_limit(&self, limit: Duration) {
        let ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.stall_after_ns.store(ns, Ordering::Relaxed);
    }

    pub(crate) fn batched(&self) -> bool {
        self.lock().engine.is_batched()
    }

    pub(crate) fn stats(&self) -> CopierStats {
        let state = self.lock();
        let posted = state.lane.as_ref().map_or(0, Lane::posted);
        CopierStats {
            posted,
            ..state.stats
        }
    }

    /// # Safety
    /// As for [`crate::Copier::submit`].
    pub(crate) unsafe fn submit(&self, ops: &[CopyOp], steps: &[usize], how: How) -> Result<u64> {
        let mut state = self.lock();
        let current = self.context.enter()?;
        if let Some(code) = state.lost {
            return Err(lost(&current, code));
        }
        let now = Instant::now();
        // Checked whole before anything is planned.
        let way = self.look(&mut state, &current, ops, steps.len(), how, now)?;
        let State {
            within,
            plan,
            queue,
            next,
            ..
        } = &mut *state;
        plan.begin(way);
        let ticket = *next;
        let mut steps = steps.iter().peekable();
        for (i, (op, &within)) in ops.iter().zip(&*within).enumerate() {
            if steps.next_if(|&&step| step == i).is_some() {
                plan.step(ticket, now, queue);
            }
            match within && way == Way::Engine {
                true => plan.bounced(op, self.bounce.addr()),
                false => plan.direct(op),
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

    /// Looks at where the copies of a ticket go, and says who carries them out: all of them one way.
    fn look(
        &self,
        state: &mut State,
        current: &Current<'_>,
        ops: &[CopyOp],
        cuts: usize,
        how: How,
        now: Instant,
    ) -> Result<Way> {
        let State {
            within,
            ranges,
            lane,
            habit,
            queue,
            flying,
            ..
        } = state;
        within.clear();
        let (mut from, mut to) = (Near::default(), Near::default());
        let (mut bytes, mut weight, mut apart) = (0u64, 0u64, true);
        for op in ops {
            let src = from.place(ranges, current, op.src, op.len)?;
            let dst = to.place(ranges, current, op.dst, op.len)?;
            let same = src == dst && src != Place::Host;
            if same && how == How::Engine {
                let CopyOp { dst, src, len } = *op;
                return Err(GpuError::SameGpuCopy { src, dst, len });
            }
            if src == Place::Host && dst == Place::Host {
                return Err(GpuError::Unsupported {
                    what: "a copy from host memory to host memory",
                    device: "the copy engine".to_owned(),
                    remedy: "the CPU does that faster, and CUDA would do it with a thread of its own",
                });
            }
            within.push(same);
            bytes = bytes.saturating_add(op.len);
            weight = weight.saturating_add(CopyJob::weight(op.dst, op.src, op.len));
            // A kernel writes as it reads; by way of host memory all is read first.
            apart &= op.src.abs_diff(op.dst) >= op.len;
        }
        let kind = Kind {
            count: ops.len(),
            steps: cuts + 1,
            bytes,
            weight,
            within: within.contains(&true),
        };
        let kernel = lane.as_mut().filter(|_| how == How::Any && apart);
        let wanted = kernel.is_some_and(|lane| {
            // Behind copies of the engine's a few more are its own: the kernel's would wait until those are seen to have ended.
            let is_free = match queue.back() {
                Some(segment) => segment.way == Way::Kernel,
                None => flying.is_empty(),
            };
            // Where it is there, and where a kernel would have been there.
            let soon = self.policy.takes(kind, true) && habit.goes_on(now, lane.stay());
            lane.expect_more(soon);
            self.policy
                .takes(kind, is_free && (soon || lane.is_there()))
        });
        let mut reached = |op: &CopyOp| {
            op.len == 0
                || from.is_reached(ranges, current, op.src, op.len)
                    && to.is_reached(ranges, current, op.dst, op.len)
        };
        let by_kernel = wanted
            && lane.as_mut().is_some_and(|lane| lane.is_on(now))
            && ops.iter().all(&mut reached);
        Ok(if by_kernel { Way::Kernel } else { Way::Engine })
    }

    /// Gives the driver as much of the queue as it takes without blocking.
    fn pump(&self, state: &mut State, current: &Current<'_>) {
        while let Some(front) = state.queue.front() {
            let room = state.flying_ops + front.len() <= IN_DRIVER;
            if !(room || state.flying.is_empty()) {
                return;
            }
            let other_way = match front.way {
                Way::Engine => state.lane.as_ref().is_some_and(Lane::is_busy),
                Way::Kernel => !state.flying.is_empty(),
            };
            if other_way {
                return;
            }
            let Some(segment) = state.queue.pop_front() else {
                return;
            };
            if segment.way == Way::Kernel {
                match self.launch(state, current, segment) {
                    true => continue,
                    false => return,
                }
            }
            let event = match state.events.pop() {
                Some(event) => Ok(event),
                None => current.new_event(EVENT_DISABLE_TIMING),
            };
            let (event, failed) = match event {
                Ok(event) => {
                    state.stats.batches += 1;
                    let issued = state.engine.issue(current, &segment);
                    let recorded = current.record(event, state.engine.stream);
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

    /// Gives a piece to the kernel, or turns it into pieces for the engine; `false`: there is no room, and it waits.
    fn launch(&self, state: &mut State, current: &Current<'_>, segment: Segment) -> bool {
        let now = Instant::now();
        let is_on = state.lane.as_mut().is_some_and(|lane| lane.is_on(now));
        let Some(lane) = state.lane.as_mut().filter(|_| is_on) else {
            self.convert(state, current, segment);
            return true;
        };
        if !lane.has_room() {
            state.queue.push_front(segment);
            return false;
        }
        let copies = segment.len() as u64;
        // SAFETY: this GPU's kernels are known to reach the ranges, and the submitter promised them until the ticket has ended.
        match unsafe { lane.submit(current, segment) } {
            Ok(()) => {
                state.stats.kernel_batches += 1;
                state.stats.kernel_copies += copies;
            }
            Err(refused) => {
                let (segment, error) = *refused;
                // The engine reports a context that is lost; anything else is no reason to fail copies that it can do.
                tracing::warn!(%error, "small copies are left to the copy engine from now on");
                self.convert(state, current, segment);
            }
        }
        true
    }

    /// Turns a piece for a kernel into pieces for the engine, at the front of the queue.
    fn convert(&self, state: &mut State, current: &Current<'_>, segment: Segment) {
        let State {
            plan,
            ranges,
            queue,
            ..
        } = state;
        let within = |op: &CopyOp| {
            let mut place = |addr| Some(ranges.place(current, addr, op.len).ok()?.0);
            let src = place(op.src);
            matches!(src, Some(Place::Device(_))) && src == place(op.dst)
        };
        plan.convert(segment, self.bounce.addr(), within, queue);
        state.stats.via_host += plan.bounced_ops();
    }

    fn fail(&self, state: &mut State, ticket: u64, error: GpuError) {
        if state.failed.len() >= 1024 {
            // Nobody asks about them.
            state.failed.remove(0);
        }
        state.failed.push((ticket, error));
        self.any_failed.store(true, Ordering::Release);
    }

    /// Notes what has ended.
    fn retire(&self, state: &mut State, current: &Current<'_>) {
        self.retire_launches(state, current);
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

    fn retire_launches(&self, state: &mut State, current: &Current<'_>) {
        while let Some(lane) = state.lane.as_mut().filter(|lane| lane.is_busy()) {
            match lane.poll(current, Instant::now()) {
                Ok(None) => return,
                Ok(Some(Ended::Done(segment))) => {
                    if segment.last {
                        self.done.store(segment.ticket, Ordering::Release);
                    }
                    state.plan.recycle(segment);
                }
                Ok(Some(Ended::TakenBack(segments))) => {
                    state.stats.taken_back += segments.len() as u64;
                    for segment in segments.into_iter().rev() {
                        state.stats.kernel_copies -= segment.len() as u64;
                        self.convert(state, current, segment);
                    }
                }
                Err(error) => {
                    if let GpuError::Driver { code, .. } = error {
                        state.lost = Some(code);
                    }
                    return;
                }
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
        if let Some((ticket, born)) = state.oldest() {
            self.check_stall(ticket, born.elapsed())?;
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
        let queued = || state.queue.front().map(|s| (s.ticket, s.born));
        state
            .oldest()
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

    /// Have all copies ended, and all launches answered, within `timeout`? If not, running kernels hold them, and every free would wait for those.
    pub(crate) fn is_drained(&self, timeout: Duration) -> bool {
        let deadline = Deadline::after(timeout);
        let newest = self.lock().next - 1;
        let ended = self.wait(newest, timeout);
        let Ok(current) = self.context.enter() else {
            return false;
        };
        let quiet = || {
            let mut state = self.lock();
            let lane = state.lane.as_mut();
            let quiet = lane.is_none_or(|lane| lane.is_quiet(&current));
            Ok::<_, GpuError>(quiet.then_some(()))
        };
        matches!(ended, Ok(()) | Err(GpuError::Driver { .. }))
            && matches!(poll_until(deadline, quiet), Ok(Some(())))
    }

    /// Gives everything back. It [is drained](Self::is_drained).
    pub(crate) fn destroy(self, current: &Current<'_>) {
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
        current.destroy_stream(state.engine.stream);
        self.bounce.free(current);
        if let Some(lane) = state.lane {
            lane.destroy(current);
        }
    }
}

impl State {
    /// The oldest ticket under way, and since when.
    fn oldest(&self) -> Option<(u64, Instant)> {
        let engine = self.flying.front().map(|f| (f.ticket, f.born));
        engine.or_else(|| self.lane.as_ref()?.oldest())
    }
}

fn lost(current: &Current<'_>, code: CuResult) -> GpuError {
    current.error("cuEventQuery", code, "the copier's stream".to_owned())
}
