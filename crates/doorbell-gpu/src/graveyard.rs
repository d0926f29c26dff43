//! Memory is freed only while no kernel of ours runs.
//!
//! Two reasons. A kernel that outlives its launch object may still touch any buffer. And the CUDA driver makes a free
//! wait for every running kernel, and the copy engine wait for the free: with a kernel that waits for a copy, that is
//! a deadlock. So frees are queued while a launch is in flight, and done by whoever sees the last one end.
//! The kernel that makes small copies is no launch in this sense: it touches no memory but that of copies which have not ended, and a free waits for
//! it a millisecond at most, or as long as it was told to stay.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Keep;
use crate::fork::Generation;

/// Frees, and hands back what the memory's owner asked to keep until then.
type Grave = Box<dyn FnOnce() -> Option<Keep> + Send>;

/// The queue of frees, and the count of launches that hold it back.
pub(crate) struct Graveyard {
    state: Mutex<State>,
    born: Generation,
}

impl Default for Graveyard {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            born: Generation::now(),
        }
    }
}

#[derive(Default)]
struct State {
    in_flight: usize,
    graves: Vec<Grave>,
}

impl Graveyard {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A launch begins. Waits for frees under way, so that none can end up behind the new kernel.
    pub(crate) fn begin(&self) {
        self.lock().in_flight += 1;
    }

    /// A launch that began has ended for good. The last one does the queued frees.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        if state.in_flight == 0 {
            // Freed under the lock on purpose: see `begin`. What was kept goes after it, since its drop may well
            // come back here with a buffer of its own.
            let graves = std::mem::take(&mut state.graves);
            let kept: Vec<_> = graves.into_iter().map(|grave| grave()).collect();
            drop(state);
            drop(kept);
        }
    }

    /// Frees now if nothing is in flight, else later. `grave` itself must not come back here.
    pub(crate) fn bury(&self, grave: impl FnOnce() -> Option<Keep> + Send + 'static) {
        if !self.born.is_current() {
            // In a forked child the lock may be held by a thread that does not exist here, and what is to be freed
            // belongs to the parent.
            std::mem::forget(grave);
            return;
        }
        let mut state = self.lock();
        if state.in_flight == 0 {
            let kept = grave();
            drop(state);
            drop(kept);
        } else {
            state.graves.push(Box::new(grave));
        }
    }

    /// Calls `f` now if nothing is in flight, else when the last launch has ended. `f` may come back here.
    pub(crate) fn defer(&self, f: impl FnOnce() + Send + 'static) {
        self.bury(move || Some(Arc::new(OnDrop(Mutex::new(Some(f)))) as Keep));
    }

    /// Nothing runs any more, whatever was counted: does the queued frees.
    pub(crate) fn end_all(&self) {
        let graves = {
            let mut state = self.lock();
            state.in_flight = 0;
            std::mem::take(&mut state.graves)
        };
        drop(graves.into_iter().map(|grave| grave()).collect::<Vec<_>>());
    }

    /// Launches in flight, frees queued.
    #[cfg(test)]
    pub(crate) fn pending(&self) -> (usize, usize) {
        let state = self.lock();
        (state.in_flight, state.graves.len())
    }
}

/// Calls a function when it is dropped: what is kept is dropped outside the lock.
struct OnDrop<F: FnOnce()>(Mutex<Option<F>>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(f) = self
            .0
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            f();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn frees_wait_for_the_last_launch() {
        let yard = Graveyard::default();
        let freed = Arc::new(AtomicU32::new(0));
        let bury = || {
            let freed = Arc::clone(&freed);
            yard.bury(move || {
                freed.fetch_add(1, Ordering::Relaxed);
                None
            });
        };
        bury();
        assert_eq!(freed.load(Ordering::Relaxed), 1);
        yard.begin();
        yard.begin();
        bury();
        yard.end();
        bury();
        assert_eq!((freed.load(Ordering::Relaxed), yard.pending()), (1, (1, 2)));
        yard.end();
        assert_eq!((freed.load(Ordering::Relaxed), yard.pending()), (3, (0, 0)));
    }

    #[test]
    fn what_was_kept_may_come_back() {
        struct Again(Arc<Graveyard>, Arc<AtomicU32>);
        impl Drop for Again {
            fn drop(&mut self) {
                let count = Arc::clone(&self.1);
                self.0.bury(move || {
                    count.fetch_add(1, Ordering::Relaxed);
                    None
                });
            }
        }
        let yard = Arc::new(Graveyard::default());
        let freed = Arc::new(AtomicU32::new(0));
        let again: Keep = Arc::new(Again(Arc::clone(&yard), Arc::clone(&freed)));
        yard.begin();
        yard.bury(move || Some(again));
        assert_eq!(freed.load(Ordering::Relaxed), 0);
        yard.end();
        assert_eq!(freed.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn what_is_deferred_runs_once_and_may_come_back() {
        let yard = Arc::new(Graveyard::default());
        let ran = Arc::new(AtomicU32::new(0));
        let defer = |yard: &Arc<Graveyard>| {
            let (inner, ran) = (Arc::clone(yard), Arc::clone(&ran));
            yard.defer(move || {
                let again = Arc::clone(&ran);
                inner.defer(move || {
                    again.fetch_add(10, Ordering::Relaxed);
                });
                ran.fetch_add(1, Ordering::Relaxed);
            });
        };
        defer(&yard);
        assert_eq!(ran.load(Ordering::Relaxed), 11);
        yard.begin();
        defer(&yard);
        assert_eq!(ran.load(Ordering::Relaxed), 11);
        yard.end();
        assert_eq!((ran.load(Ordering::Relaxed), yard.pending()), (22, (0, 0)));
    }
}
