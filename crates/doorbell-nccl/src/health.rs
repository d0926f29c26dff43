//! Whether a communicator is well: what `queryLastError` says, and what the other ranks and waiting kernels are told.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use doorbell::BootstrapError;

use crate::log;

/// The health of one communicator.
#[derive(Debug)]
pub(crate) struct Health {
    /// Which communicator and rank, for the log.
    who: String,
    /// What went wrong first.
    failure: OnceLock<String>,
    /// Whoever has the connection to the other ranks looks at it, so its order pairs with nothing.
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
        let line = format_args!("{}: {text}", self.who);
        // Only the first counts, and is in the log before the host is told, if the log takes it soon: what follows is mostly its consequence, and may
        // be much, of which other communicators' failures must not wait for a line each.
        if self.has_failed() {
            log::warn_later(line);
        } else {
            log::warn_apart(line);
            let _ = self.failure.set(text);
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// What went wrong first, if something has.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// What the other ranks are to be told: once, and only what they do not have from one of them.
    pub(crate) fn to_tell(&self) -> Option<&str> {
        let failure = self.failure.get()?;
        (!self.told.swap(true, Ordering::Relaxed)).then_some(failure)
    }

    /// What came of a look at the other ranks, or of a step with them: that one of them has failed concerns this rank, and the others know.
    pub(crate) fn hear(&self, error: &BootstrapError) {
        let remedy = match error {
            BootstrapError::Silent { .. } => {
                " (DOORBELL_NCCL_ALIVE sets the time; 0 switches this off, for debuggers on other hosts)"
            }
            BootstrapError::Failed { .. }
            | BootstrapError::Refused { .. }
            | BootstrapError::Lost { .. } => "",
            // A step that this rank alone cannot take.
            _ => return,
        };
        self.told.store(true, Ordering::Relaxed);
        // What this rank told the others ends its step, too.
        let own = matches!(error, BootstrapError::Failed { reason, .. } if self.failure.get() == Some(reason));
        if !own {
            self.report(format_args!("{error}{remedy}"));
        }
    }
}
