//! A block's barrier on the host: threads that ended count as arrived, and an aborted launch opens it.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How often a waiter looks at the abort flag.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct Block {
    state: Mutex<State>,
    turn: Condvar,
}

#[derive(Debug)]
struct State {
    live: u32,
    waiting: u32,
    round: u64,
    /// Thread 0's value, of this round and of the one before: a waiter is at most one round behind.
    value: [u64; 2],
}

impl Block {
    pub(super) fn new(threads: u32) -> Self {
        Self {
            state: Mutex::new(State {
                live: threads,
                waiting: 0,
                round: 0,
                value: [0; 2],
            }),
            turn: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, state: &mut State) {
        state.waiting = 0;
        state.round += 1;
        self.turn.notify_all();
    }

    pub(super) fn exit(&self) {
        let mut state = self.lock();
        state.live -= 1;
        if state.waiting > 0 && state.waiting >= state.live {
            self.open(&mut state);
        }
    }

    pub(super) fn sync(&self, abort: &AtomicBool) {
        self.broadcast(false, 0, abort);
    }

    pub(super) fn broadcast(&self, speaks: bool, value: u64, abort: &AtomicBool) -> u64 {
        let mut state = self.lock();
        let round = state.round;
        let slot = (round & 1) as usize;
        if speaks {
            state.value[slot] = value;
        }
        state.waiting += 1;
        if state.waiting >= state.live {
            self.open(&mut state);
        }
        while state.round == round {
            if abort.load(Ordering::Relaxed) {
                self.open(&mut state);
                break;
            }
            state = self
                .turn
                .wait_timeout(state, LOOK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.value[slot]
    }
}
