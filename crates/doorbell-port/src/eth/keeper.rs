//! Somebody at home: a thread that answers for our address while nobody drives the port. (A Linux peer looks up our hardware address when it connects a
//! queue pair, which is before the first packet and often before anybody here polls.)

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Inner, lock};
use crate::error::{PortError, Result};

/// How often it looks whether somebody else does.
const ROUND: Duration = Duration::from_millis(10);

/// Stops its thread when dropped.
#[derive(Debug)]
pub(super) struct Keeper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    pub(super) fn start(shared: &Arc<Mutex<Inner>>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (flag, shared) = (Arc::clone(&stop), Arc::clone(shared));
        let thread = std::thread::Builder::new()
            .name("doorbell-keeper".to_owned())
            .spawn(move || {
                let mut looks = 0;
                while !flag.load(Ordering::Relaxed) {
                    std::thread::park_timeout(ROUND);
                    let mut inner = lock(&shared);
                    if inner.looks == looks {
                        inner.pump();
                    }
                    looks = inner.looks;
                }
            })
            .map_err(|e| {
                let e = crate::limits::thread(e);
                PortError::system("starting the thread that answers for the port's address", e)
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It holds no lock for longer than a pump; a panic in it has been reported.
            let _ = thread.join();
        }
    }
}
