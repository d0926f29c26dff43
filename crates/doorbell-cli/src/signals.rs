//! Ending on SIGINT and SIGTERM, for commands that clean up first.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

/// A word that is true once SIGINT or SIGTERM came. A second one ends the process at once.
pub(crate) fn watch() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("asking for signals, by which this command ends")?;
    }
    Ok(stop)
}
