//! Waits that name themselves: which word, which value, since when.
//!
//! A wait that lasts enters itself here, in the record of its process, and leaves when it ends; so a stuck one can be named from outside, and
//! whoever looks can search all processes for the request that is missing. Only slow paths come here.

use core::sync::atomic::{Ordering, fence};
use std::sync::Arc;

use super::clock::Scale;
use super::layout::{self, wait};
use super::store::Store;

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum WaitKind {
    /// A 64-bit word of memory, to reach a value.
    Word = 1,
    /// A queue pair, to complete a slot.
    Ticket = 2,
    /// A queue pair, to receive.
    Receive = 3,
}

/// A wait under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitRecord {
    /// For what.
    pub kind: WaitKind,
    /// Address of the word in the process, or number of the queue pair.
    pub at: u64,
    /// The value that it waits for; of a ticket, the slot.
    pub wanted: u64,
    /// What was there when it last looked.
    pub have: u64,
    /// When it began, and when it last looked; nanoseconds of the monotonic clock.
    pub since_ns: u64,
    /// See above.
    pub seen_ns: u64,
    /// The thread.
    pub thread: u32,
}

impl WaitRecord {
    pub(super) fn parse(words: &[u64], scale: &Scale) -> Option<Self> {
        if words[wait::SEQ] == 0 || words[wait::SEQ] % 2 == 1 {
            return None;
        }
        Some(Self {
            kind: match words[wait::KIND] {
                1 => WaitKind::Word,
                2 => WaitKind::Ticket,
                3 => WaitKind::Receive,
                _ => return None,
            },
            at: words[wait::AT],
            wanted: words[wait::WANTED],
            have: words[wait::HAVE],
            since_ns: scale.ns(words[wait::SINCE]),
            seen_ns: scale.ns(words[wait::SEEN]),
            thread: words[wait::THREAD] as u32,
        })
    }
}

/// A wait's place in the record; given back when it is dropped.
#[derive(Debug)]
pub struct Waiting {
    store: Arc<Store>,
    at: usize,
    seq: u64,
}

impl Waiting {
    /// Enters a wait; `None` if there is no record, or no place left in it.
    pub(crate) fn enter(
        store: &Arc<Store>,
        kind: WaitKind,
        at: u64,
        wanted: u64,
        have: u64,
    ) -> Option<Self> {
        let (place, before) = (0..layout::MAX_WAITS).find_map(|i| {
            let place = layout::WAITS + i * layout::WAIT_WORDS;
            // Odd: taken, and not to be read yet.
            store
                .head()
                .word(place + wait::SEQ)
                .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
                .then_some((place, 1))
        })?;
        #[cfg(not(miri))]
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u64;
        #[cfg(miri)]
        let thread = 0;
        let now = store.clock().ticks();
        let head = store.head();
        for (i, value) in [
            (wait::KIND, kind as u64),
            (wait::AT, at),
            (wait::WANTED, wanted),
            (wait::HAVE, have),
            (wait::SINCE, now),
            (wait::SEEN, now),
            (wait::THREAD, thread),
        ] {
            head.set(place + i, value);
        }
        head.word(place + wait::SEQ)
            .store(before + 1, Ordering::Release);
        Some(Self {
            store: Arc::clone(store),
            at: place,
            seq: before + 1,
        })
    }

    /// It looked, and found this.
    pub fn saw(&mut self, have: u64) {
        let head = self.store.head();
        head.set(self.at + wait::SEQ, self.seq + 1);
        fence(Ordering::Release);
        head.set(self.at + wait::HAVE, have);
        head.set(self.at + wait::SEEN, self.store.clock().ticks());
        self.seq += 2;
        head.word(self.at + wait::SEQ)
            .store(self.seq, Ordering::Release);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let head = self.store.head();
        head.word(self.at + wait::SEQ).store(0, Ordering::Release);
    }
}
