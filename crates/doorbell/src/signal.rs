//! Waiting on the host for a word of memory: a signal that peers count up.
//!
//! Such a wait names itself in the flight record once it lasts, so that `doorbell dump` can say whose add is missing; the same is in the
//! error of one that gives up.

use std::time::{Duration, Instant};

use doorbell_hca::record::WaitKind;

use crate::device::Device;
use crate::mr::Mr;
use crate::{Error, Result};

/// A wait of this length enters itself.
const LASTS: Duration = Duration::from_millis(2);
/// Between two looks at a word that a copy engine has to fetch, and of a long wait.
const PAUSE: Duration = Duration::from_micros(20);

impl Mr {
    /// Waits until the 64-bit word at byte `offset` of the region, counting up, has reached `value`, and returns what it has then. What was put before
    /// the signal by the same queue pair is visible afterwards.
    ///
    /// # Errors
    /// [`Error::TimedOut`], which says what is missing as far as can be told: see [`Device::diagnosis`].
    pub fn wait_at_least(&self, offset: usize, value: u64, timeout: Duration) -> Result<u64> {
        let device = self.pd().device();
        let start = Instant::now();
        let deadline = doorbell_hca::deadline(timeout);
        let at = self.memory().device_addr() + offset as u64;
        let mut entered = None;
        loop {
            let has = self.memory().load(offset)?;
            if has >= value {
                return Ok(has);
            }
            let waited = start.elapsed();
            if waited >= LASTS {
                match &mut entered {
                    None => {
                        entered = device
                            .soft()
                            .and_then(|s| s.hca().waiting(WaitKind::Word, at, value, has));
                    }
                    Some(waiting) => waiting.saw(has),
                }
            }
            if Instant::now() >= deadline {
                return Err(Error::TimedOut {
                    what: format!(
                        "word {} of region {:#010x} >= {value}, which has {has} ({})",
                        offset / 8,
                        self.key(),
                        device.diagnosis().join("; ")
                    ),
                    after: timeout,
                    remedy: "look at the queue pairs of whoever is to signal: `doorbell dump all`",
                });
            }
            if !device.poll() {
                match waited < LASTS {
                    true => std::hint::spin_loop(),
                    false => std::thread::sleep(PAUSE),
                }
            }
        }
    }
}

impl Device {
    /// What is missing, in sentences: each wait of this process that lasts, with the request that it lacks, searched in all processes of this
    /// user on this host; and this device's queue pairs that are stuck. Nothing is missing: says that. Takes a few tenths of a second; for
    /// time-outs.
    pub fn diagnosis(&self) -> Vec<String> {
        crate::report::diagnosis(self.inner.provider.id())
    }
}
