//! Whether a communicator is well: what `queryLastError` says, and what the other ranks and waiting kernels are told.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::log;

/// The health of one communicator.
#[derive(Debug)]
pub(crate) struct Health {
    /// Which communicator and rank, for the log.
    who: String,
    /// What went wrong first.
    failure: OnceLock<String>,
    /// Of the watch's thread alone, so its order pairs with nothing.
    told: AtomicBool,
}

impl Health {
    pub(crate) fn new(who: String) -> Self {
        Self {
            who,
            failure: OnceLock::new(),
            told: AtomicBool::new(false),
        }
    }

    /// Something went wrong: the host is told from now on, and the log says what.
    pub(crate) fn report(&self, what: impl fmt::Display) {
        let text = what.to_string();
        log::warn(format_args!("{}: {text}", self.who));
        // Only the first counts: what follows is mostly its consequence.
        let _ = self.failure.set(text);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// What the other ranks are to be told: once, and only what they do not have from one of them.
    pub(crate) fn to_tell(&self) -> Option<&str> {
        let failure = self.failure.get()?;
        (!self.told.swap(true, Ordering::Relaxed)).then_some(failure)
    }

    /// The other ranks know.
    pub(crate) fn is_known(&self) {
        self.told.store(true, Ordering::Relaxed);
    }
}
