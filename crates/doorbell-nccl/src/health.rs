//! Whether a communicator is well: what `queryLastError` says.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::log;

/// The health of one communicator.
#[derive(Debug)]
pub(crate) struct Health {
    /// Which communicator and rank, for the log.
    who: String,
    failed: AtomicBool,
}

impl Health {
    pub(crate) fn new(who: String) -> Self {
        Self {
            who,
            failed: AtomicBool::new(false),
        }
    }

    /// Something went wrong: the host is told from now on, and the log says what.
    pub(crate) fn report(&self, what: impl fmt::Display) {
        log::warn(format_args!("{}: {what}", self.who));
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}
