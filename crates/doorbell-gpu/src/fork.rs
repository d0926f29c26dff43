//! Has this process been forked since?
//!
//! Neither a CUDA context nor the threads of a host kernel exist in a forked child, and the driver's own answer there
//! is a cryptic error or a hang. A counter bumped in every child makes the check one load.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{GpuError, Result};

static FORKS: AtomicU32 = AtomicU32::new(0);
static HOOK: Once = Once::new();

/// Where in the family tree of forks something was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(u32);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

impl Generation {
    /// The present generation. The first call installs the `pthread_atfork` hook.
    pub fn now() -> Self {
        // Miri has neither fork nor the hook.
        #[cfg(not(miri))]
        HOOK.call_once(|| {
            // SAFETY: `in_child` touches one atomic, which is allowed in a forked child of a threaded process.
            let rc = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if rc != 0 {
                tracing::warn!(
                    rc,
                    "no fork hook could be installed: use in a forked child goes undetected"
                );
            }
        });
        #[cfg(miri)]
        let _ = (&HOOK, in_child as extern "C" fn());
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Is this still the process that made it?
    pub fn is_current(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// The same as a result.
    ///
    /// # Errors
    /// [`GpuError::Forked`] in a forked child.
    pub fn check(self) -> Result<()> {
        if self.is_current() {
            Ok(())
        } else {
            Err(GpuError::Forked)
        }
    }
}
