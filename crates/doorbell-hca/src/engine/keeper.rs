//! Who sees to it that what a core holds back leaves although nobody drives the core any more.
//!
//! A caller-driven core works while its callers wait, and a caller that has seen all it waited for need not come back. What the core holds for its next
//! round (see `roce`) would then never leave. The keeper is a thread that sleeps until something is held, and then looks now and then: a
//! core that holds something and was not driven since the look before gets a round from it. Callers that keep driving notice nothing.

use core::sync::atomic::{AtomicBool, Ordering};
use std::io;
use std::sync::Arc;
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use crate::hca::Inner;

/// How long it sleeps between two looks: what is held and not wanted leaves after one to two of these.
const LOOK: Duration = Duration::from_millis(1);
/// Looks in a row that found nothing held, after which it sleeps until it is called.
const QUIET: u32 = 50;

/// The keeper as the cores see it.
#[derive(Debug)]
pub(crate) struct Keeper {
    thread: Thread,
    awake: Arc<AtomicBool>,
}

impl Keeper {
    /// A core holds something (its [`CoreSlot::hold`](super::CoreSlot::hold) says so): the keeper looks from now on.
    #[inline]
    pub(crate) fn call(&self) {
        if !self.awake.load(Ordering::SeqCst) && !self.awake.swap(true, Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

/// Starts the keeper of an HCA. It ends when the HCA stops and its thread is unparked.
pub(crate) fn spawn(inner: Arc<Inner>) -> io::Result<(Arc<Keeper>, JoinHandle<()>)> {
    let awake = Arc::new(AtomicBool::new(false));
    let shared = Arc::clone(&awake);
    let handle = std::thread::Builder::new()
        .name("doorbell-keeper".to_owned())
        .spawn(move || run(&inner, &shared))
        .map_err(crate::limits::thread)?;
    let thread = handle.thread().clone();
    Ok((Arc::new(Keeper { thread, awake }), handle))
}

fn run(inner: &Inner, awake: &AtomicBool) {
    let mut seen = vec![0; inner.cores.len()];
    let mut quiet = QUIET;
    while !inner.stop.load(Ordering::Acquire) {
        if quiet >= QUIET {
            awake.store(false, Ordering::SeqCst);
            // Whoever held something before that store thinks that we are awake.
            if !inner.cores.iter().any(|core| core.holds()) {
                std::thread::park();
            }
            awake.store(true, Ordering::SeqCst);
            quiet = 0;
            continue;
        }
        std::thread::sleep(LOOK);
        quiet += 1;
        for (core, seen) in inner.cores.iter().zip(&mut seen) {
            let rounds = core.rounds.load(Ordering::Relaxed);
            if core.holds() {
                quiet = 0;
                if rounds == *seen && core.keep(inner) {
                    // A round lets go of what the one before held; a core that died never will.
                    core.hold(false);
                }
            }
            *seen = rounds;
        }
    }
}
