//! The thread that says to the other ranks that this one lives, for all communicators of a GPU.
//!
//! It calls neither the GPU's driver nor NCCL's log, both of which may keep a caller as long as they like: what stands still there (a copy behind a kernel that
//! waits, a terminal that was paused) is no death of this rank. For the same reason nobody logs while he holds a communicator's connection.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use doorbell::Bootstrap;

use crate::Result;

/// How often it looks whether a beat is due.
const LOOK: Duration = Duration::from_millis(50);

type Mesh = Mutex<Bootstrap>;

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Locked for moments only, and by nobody who waits.
    meshes: Mutex<Vec<Weak<Mesh>>>,
}

impl Shared {
    fn meshes(&self) -> MutexGuard<'_, Vec<Weak<Mesh>>> {
        self.meshes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while !self.stop.load(Ordering::Acquire) {
            let mut meshes = self.meshes();
            meshes.retain(|mesh| mesh.strong_count() > 0);
            let all: Vec<_> = meshes.iter().filter_map(Weak::upgrade).collect();
            drop(meshes);
            for mesh in all {
                // Whoever holds it is in a step, and beats, or lets go of it in a moment.
                if let Ok(mut mesh) = mesh.try_lock() {
                    mesh.beat();
                }
            }
            std::thread::park_timeout(LOOK);
        }
    }
}

/// The thread; it ends with this.
pub(crate) struct Beats {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Beats {
    pub(crate) fn start() -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let seen = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("doorbell-beats".to_owned())
            .spawn(move || seen.run())
            .map_err(|source| doorbell::Error::Os {
                what: "starting the thread that says that this rank lives",
                source: doorbell::limits::thread(source),
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// As long as that connection lives.
    pub(crate) fn add(&self, mesh: &Arc<Mesh>) {
        self.shared.meshes().push(Arc::downgrade(mesh));
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
