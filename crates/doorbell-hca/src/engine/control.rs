//! How callers reach an engine core: messages with deadlines, carried out between two rounds, on whichever thread has the core.
//! A core is behind a lock that its thread holds for life and a caller-driven core's driver for one round; whoever gets it may run
//! the messages, so nothing hangs on a core that nobody drives or that died.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::Core;
use super::counters::AtomicCoreCounters;
use crate::dma::DmaConfig;
use crate::error::{HcaError, Result};
use crate::hca::{CoreHealth, Inner};
use crate::patience::Patience;
use crate::record::Store;

type Message = Box<dyn FnOnce(&mut Core, &Inner) + Send>;

/// One engine core as everybody sees it.
#[repr(align(128))]
pub(crate) struct CoreSlot {
    /// Newest grace period acknowledged.
    pub(crate) ack: AtomicU64,
    pub(crate) rounds: AtomicU64,
    /// What it has been waited for in vain.
    patience: Patience,
    mail_waiting: AtomicBool,
    /// Something waits for the next round, which has to come.
    holds: AtomicBool,
    qps: AtomicUsize,
    /// Number of the engine thread; 0: there is none.
    thread: AtomicU32,
    index: usize,
    mail: Mutex<VecDeque<Message>>,
    dead: OnceLock<String>,
    pub(crate) counters: AtomicCoreCounters,
    core: Mutex<Core>,
}

impl CoreSlot {
    pub(crate) fn new(index: usize, dma: DmaConfig, record: Option<&Arc<Store>>) -> Self {
        Self {
            ack: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            patience: Patience::default(),
            mail_waiting: AtomicBool::new(false),
            holds: AtomicBool::new(false),
            qps: AtomicUsize::new(0),
            thread: AtomicU32::new(0),
            index,
            mail: Mutex::default(),
            dead: OnceLock::new(),
            counters: AtomicCoreCounters::default(),
            core: Mutex::new(Core::new(index, dma, record)),
        }
    }

    pub(crate) fn load(&self) -> usize {
        if self.dead.get().is_some() {
            usize::MAX
        } else {
            self.qps.load(Ordering::Relaxed)
        }
    }

    pub(crate) fn set_qps(&self, qps: usize) {
        self.qps.store(qps, Ordering::Relaxed);
    }

    /// Does something wait for the next round?
    pub(crate) fn holds(&self) -> bool {
        self.holds.load(Ordering::SeqCst)
    }

    /// Says whether something does.
    pub(crate) fn hold(&self, something: bool) {
        self.holds.store(something, Ordering::SeqCst);
    }

    /// The calling thread runs this core from now on.
    pub(crate) fn set_thread(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.thread.store(thread.unsigned_abs(), Ordering::Relaxed);
    }

    pub(crate) fn health(&self) -> CoreHealth {
        CoreHealth {
            dead: self.dead.get().cloned(),
            rounds: self.rounds.load(Ordering::Relaxed),
            qps: self.qps.load(Ordering::Relaxed),
            thread: match self.thread.load(Ordering::Relaxed) {
                0 => None,
                thread => Some(thread),
            },
            counters: self.counters.snapshot(),
        }
    }

    /// What is left of the time that it may take over all that waits for it, until it answers again.
    pub(crate) fn patience(&self, all: Duration) -> Duration {
        self.patience
            .left(all, Some(self.rounds.load(Ordering::Relaxed)))
    }

    pub(crate) fn waited_in_vain(&self, time: Duration) {
        self.patience
            .in_vain(time, Some(self.rounds.load(Ordering::Relaxed)));
    }

    pub(crate) fn answered(&self) {
        self.patience.answered();
    }

    /// The core, if no other thread has it. A panic is handled where it happens, so a poisoned lock means nothing here.
    fn try_core(&self) -> Option<MutexGuard<'_, Core>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(core)) => Some(core.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The core, for its thread, which keeps it.
    pub(crate) fn lock_core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One round on the calling thread, if no other thread has the core.
    #[inline]
    pub(crate) fn poll(&self, inner: &Inner) -> bool {
        let Some(mut core) = self.try_core() else {
            return false;
        };
        if self.dead.get().is_some() {
            drain_dead(&mut core);
            return false;
        }
        self.guarded(&mut core, inner, |core| core.round(inner))
            .unwrap_or(false)
    }

    /// A round by the keeper. `true`: the core is not to be kept, since it has died.
    pub(crate) fn keep(&self, inner: &Inner) -> bool {
        self.poll(inner);
        self.dead.get().is_some()
    }

    /// The engine has died: drains what is to be let go for kernels. `false`: there is nothing of that kind.
    pub(crate) fn drain_dead(&self) -> bool {
        self.dead.get().is_some() && self.try_core().is_none_or(|mut core| drain_dead(&mut core))
    }

    /// Runs `f`; if it panics, the core is dead: its QPs and its owner are told.
    pub(crate) fn guarded<R>(
        &self,
        core: &mut Core,
        inner: &Inner,
        f: impl FnOnce(&mut Core) -> R,
    ) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(|| f(core))) {
            Ok(result) => Some(result),
            Err(panic) => {
                let reason = if let Some(text) = panic.downcast_ref::<&str>() {
                    format!("panic: {text}")
                } else if let Some(text) = panic.downcast_ref::<String>() {
                    format!("panic: {text}")
                } else {
                    "panic".into()
                };
                tracing::error!(core = self.index, "engine core died: {reason}");
                let _ = self.dead.set(reason.clone());
                // The first half of this touches atomics only and cannot fail; a second panic in the CQE half changes nothing.
                let _ = catch_unwind(AssertUnwindSafe(|| core.mark_down(inner, &reason)));
                None
            }
        }
    }

    #[inline(always)]
    pub(crate) fn has_mail(&self) -> bool {
        self.mail_waiting.load(Ordering::Relaxed)
    }

    /// Carries out what callers asked for.
    #[cold]
    pub(crate) fn run_mail(&self, core: &mut Core, inner: &Inner) {
        self.mail_waiting.store(false, Ordering::Relaxed);
        loop {
            let message = self
                .mail
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop_front();
            match message {
                Some(message) => message(core, inner),
                None => return,
            }
        }
    }

    fn post(&self, message: Message) {
        self.mail
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(message);
        self.mail_waiting.store(true, Ordering::Release);
    }

    /// Runs messages here if no other thread has the core.
    fn help(&self, inner: &Inner) -> bool {
        let Some(mut core) = self.try_core() else {
            return false;
        };
        self.guarded(&mut core, inner, |core| self.run_mail(core, inner));
        true
    }

    /// Has this core acknowledged the grace period? Does it itself if no other thread has the core.
    pub(crate) fn acknowledged(&self, inner: &Inner, number: u64) -> bool {
        if self.ack.load(Ordering::Acquire) >= number {
            return true;
        }
        if let Some(mut core) = self.try_core() {
            self.guarded(&mut core, inner, |core| core.between_rounds(inner));
        }
        self.ack.load(Ordering::Acquire) >= number
    }
}

/// The state behind a panic may be anything; a second panic ends the draining and nothing else.
fn drain_dead(core: &mut Core) -> bool {
    catch_unwind(AssertUnwindSafe(|| core.drain_released())).unwrap_or(false)
}

const PENDING: u8 = 0;
const RUNNING: u8 = 1;
const DONE: u8 = 2;
const WITHDRAWN: u8 = 3;

struct Call<R> {
    state: AtomicU8,
    result: Mutex<Option<R>>,
    ready: Condvar,
}

impl<R> Call<R> {
    fn start(&self) -> bool {
        self.state
            .compare_exchange(PENDING, RUNNING, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn finish(&self, result: R) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.state.store(DONE, Ordering::Release);
        self.ready.notify_all();
    }

    fn withdraw(&self) -> bool {
        self.state
            .compare_exchange(PENDING, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

/// Between two looks at whether a core has answered.
const LOOK: Duration = Duration::from_micros(200);

/// Looks that every core gets before it counts as one that does not answer.
const LOOKS: u32 = 20;

impl Inner {
    /// Carries out `f` on a core and returns its answer. `even_dead`: also on a core whose engine died.
    pub(crate) fn on_core<R: Send + 'static>(
        &self,
        core: usize,
        what: &'static str,
        timeout: Duration,
        even_dead: bool,
        f: impl FnOnce(&mut Core, &Self) -> R + Send + 'static,
    ) -> Result<R> {
        let slot = &self.cores[core];
        let call = Arc::new(Call {
            state: AtomicU8::new(PENDING),
            result: Mutex::new(None),
            ready: Condvar::new(),
        });
        let theirs = Arc::clone(&call);
        slot.post(Box::new(move |core, inner| {
            if theirs.start() {
                let result = f(core, inner);
                theirs.finish(result);
            }
        }));
        let start = Instant::now();
        let mut looks = 0;
        loop {
            looks += 1;
            let dead = slot.dead.get();
            if dead.is_none() || even_dead {
                slot.help(self);
            }
            {
                let guard = call.result.lock().unwrap_or_else(PoisonError::into_inner);
                let mut guard = match dead {
                    None => {
                        call.ready
                            .wait_timeout(guard, LOOK)
                            .unwrap_or_else(PoisonError::into_inner)
                            .0
                    }
                    Some(_) => guard,
                };
                if let Some(result) = guard.take() {
                    slot.answered();
                    return Ok(result);
                }
            }
            let waited = start.elapsed();
            let running = call.state.load(Ordering::Acquire) == RUNNING;
            if let Some(reason) = slot.dead.get()
                && (!even_dead || running)
            {
                // A call that was running when the engine died never answers.
                call.withdraw();
                return Err(HcaError::EngineDown {
                    core,
                    reason: reason.clone(),
                });
            }
            // What runs is bounded, so it is waited for; only an engine that is stopped in a debugger, say, gets past the second limit.
            // Time that passes between two looks is nobody's silence: the whole machine stood still, or this thread.
            let asked = looks >= LOOKS || timeout < LOOK * LOOKS;
            if waited >= timeout
                && asked
                && (call.withdraw() || waited >= timeout + Duration::from_secs(10))
            {
                slot.waited_in_vain(waited);
                return Err(HcaError::TimedOut { core, what, waited });
            }
        }
    }

    /// Asks a core to do something, without waiting.
    pub(crate) fn tell_core(&self, core: usize, f: impl FnOnce(&mut Core, &Self) + Send + 'static) {
        let slot = &self.cores[core];
        slot.post(Box::new(f));
        slot.help(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hca, HcaConfig};
    use std::sync::mpsc;

    const BUSY: Duration = Duration::from_millis(300);

    #[test]
    fn what_was_waited_in_vain_for_an_end_is_not_taken_from_a_beginning() {
        let hca = Hca::new(HcaConfig::caller_driven()).expect("an HCA");
        let (begins, begun) = mpsc::channel();
        let holder = hca.clone();
        let held = std::thread::spawn(move || {
            let busy = move |_: &mut Core, _: &Inner| {
                begins.send(Instant::now()).expect("it is awaited");
                std::thread::sleep(BUSY);
            };
            let inner = holder.inner();
            inner.on_core(0, "be busy", Duration::from_secs(10), false, busy)
        });
        let since = begun.recv().expect("it begins");
        hca.hurry(Duration::from_millis(20));
        let ended = hca
            .inner()
            .on_core(0, "end", hca.patience(0), false, |_, _| ());
        let busy = since.elapsed() < BUSY;
        assert!(
            !busy || matches!(ended, Err(HcaError::TimedOut { .. })),
            "{ended:?}"
        );
        // Were it given what is left for ends, it would be told at once that nobody answers.
        let port = "udp://127.0.0.1:0".parse().expect("a port");
        hca.open_roce(0, &port)
            .expect("the core is waited for while it is busy");
        held.join().expect("no panic").expect("it was carried out");
    }
}
