//! A progress bar on standard error for runs that take more than a moment.
//! Only on a terminal, and only once a second has passed, so that quick runs and pipes stay clean.

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// The bar that is on the terminal.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// A bar. While it lives, whatever else is written to standard error takes it away first and has a line of its own.
pub(crate) struct Shown(ProgressBar);

impl Shown {
    pub(crate) fn new(bar: ProgressBar) -> Self {
        *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        Self(bar)
    }
}

impl Deref for Shown {
    type Target = ProgressBar;

    fn deref(&self) -> &ProgressBar {
        &self.0
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.0.finish_and_clear();
    }
}

/// Writes beside the bar, if there is one.
pub(crate) fn beside<R>(write: impl FnOnce() -> R) -> R {
    let bar = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Standard error for lines of the log.
pub(crate) struct Log;

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        beside(|| std::io::stderr().write(bytes))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// How long a run may take before it shows a bar.
const PATIENCE: Duration = Duration::from_secs(1);

/// One bar over all cases of a run.
pub(crate) struct Progress {
    bar: Option<Shown>,
    started: Instant,
    /// Of how many cases, and how many are behind us.
    cases: usize,
    done: usize,
}

impl Progress {
    /// A bar over `cases` equal shares.
    pub(crate) fn new(cases: usize) -> Self {
        let bar = crate::is_styled(&std::io::stderr()).then(|| {
            let bar = ProgressBar::hidden();
            bar.set_length(1000 * cases as u64);
            bar.set_style(
                ProgressStyle::with_template("{bar:30} {msg} [{elapsed}]")
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            Shown::new(bar)
        });
        Self {
            bar,
            started: Instant::now(),
            cases,
            done: 0,
        }
    }

    /// None: somebody else shows how far it is.
    pub(crate) fn silent() -> Self {
        Self {
            bar: None,
            started: Instant::now(),
            cases: 0,
            done: 0,
        }
    }

    /// The case at hand is `share` (0 to 1) done.
    pub(crate) fn at(&mut self, share: f64, what: &str) {
        let Some(bar) = &self.bar else { return };
        if bar.is_hidden() && self.started.elapsed() > PATIENCE {
            bar.set_draw_target(indicatif::ProgressDrawTarget::stderr_with_hz(4));
        }
        let (done, cases) = (self.done + 1, self.cases);
        bar.set_message(format!("{what} ({done} of {cases})"));
        bar.set_position((1000.0 * (self.done as f64 + share.clamp(0.0, 1.0))) as u64);
    }

    /// The case at hand is behind us.
    pub(crate) fn next(&mut self) {
        self.done += 1;
    }

    /// It is behind us.
    pub(crate) fn end(&mut self) {
        self.bar = None;
    }
}
