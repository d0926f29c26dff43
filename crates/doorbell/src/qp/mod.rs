//! Queue pairs: made from a [`Pd`], connected, exported to kernels, reset, destroyed.
//!
//! The type says how far a queue pair has come: [`Qp<Reset>`] can be connected, [`Qp<Ready>`] carries work requests. That it
//! fails later is not in the type, since it can happen at any moment: ask [`Qp::error`], then [`Qp::reset`] it and connect
//! again. Kernels use it through its [export](Qp::export).

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use doorbell_device::layout::{CqKind, NicHandler};
pub use doorbell_hca::QpCounters;

use crate::connect::Destination;
use crate::device::Inner as DeviceInner;
use crate::mr::Pd;
use crate::provider::ProviderQp;
use crate::{QpFault, Result};

mod any;
mod builder;
mod cq;
mod export;
mod peek;
mod queue;
mod typed;

pub use any::{AnyQp, QpCore};
pub use builder::QpBuilder;
pub use cq::Cq;
pub use export::{Export, ExportLayout, Progress, export_array, export_array_host};
pub(crate) use queue::QueueMemory;
pub use typed::{Qp, Ready, Reset, State, connect_pair};

/// How posted work requests are announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Handler {
    /// Doorbell record, then the doorbell word (DOCA: `GPU_SM_DB`).
    Record,
    /// The doorbell word alone (DOCA: `GPU_SM_NO_DBR`). Device code of ours keeps it monotonous; foreign code that shares a
    /// queue between threads can lose its last ring.
    Only,
    /// A producer index that the engine, or a CPU thread, reads: the *assisted* initiator (DOCA: `CPU_PROXY`).
    Producer,
}

impl Handler {
    /// The value in exported structures.
    pub const fn nic_handler(self) -> NicHandler {
        match self {
            Self::Record => NicHandler::DoorbellRecord,
            Self::Only => NicHandler::DoorbellOnly,
            Self::Producer => NicHandler::ProducerWord,
        }
    }
}

impl FromStr for Handler {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "record" => Ok(Self::Record),
            "only" | "doorbell" => Ok(Self::Only),
            "producer" => Ok(Self::Producer),
            _ => Err("give record, only (or doorbell) or producer".to_owned()),
        }
    }
}

impl fmt::Display for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Record => "record",
            Self::Only => "only",
            Self::Producer => "producer",
        })
    }
}

/// Where a queue pair is in its life, at the moment of asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Not connected.
    Reset,
    /// Connected: work requests are executed.
    Ready,
    /// Failed: work requests are flushed.
    Error,
    /// Gone.
    Destroyed,
}

impl From<doorbell_hca::QpState> for QpState {
    fn from(state: doorbell_hca::QpState) -> Self {
        match state {
            doorbell_hca::QpState::Reset => Self::Reset,
            doorbell_hca::QpState::Ready => Self::Ready,
            doorbell_hca::QpState::Error => Self::Error,
            doorbell_hca::QpState::Destroyed => Self::Destroyed,
        }
    }
}

impl fmt::Display for QpState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "reset",
            Self::Ready => "ready",
            Self::Error => "in error",
            Self::Destroyed => "destroyed",
        })
    }
}

pub(crate) struct QpInner {
    // Fields drop in order: the engine lets go before the queue memory does.
    provider: Box<dyn ProviderQp>,
    queue: Arc<QueueMemory>,
    companion: Option<Arc<QpInner>>,
    log_depth: u8,
    cq_kind: CqKind,
    handler: Handler,
    sink: (u64, u32),
    export: Mutex<export::Place>,
    /// Number of its first packet over RoCE.
    psn: AtomicU32,
    /// Over RoCE it is an Unreliable Connection.
    unreliable: bool,
    recv: Option<queue::RecvShape>,
    pd: Pd,
}

/// A packet number that nobody can guess, 24 bits.
fn draw_psn() -> u32 {
    rand::random::<u32>() >> 8
}

impl QpInner {
    fn device(&self) -> &Arc<DeviceInner> {
        &self.pd.inner.device
    }

    fn depth(&self) -> u32 {
        1 << self.log_depth
    }

    /// What the engine has seen rung and has completed, in slots.
    pub(crate) fn indexes(&self) -> Option<(u64, u64)> {
        self.provider.indexes()
    }

    /// One more than the newest slot whose completion a collapsed CQ ought to show; 0: none yet.
    pub(crate) fn newest_cqe(&self) -> Option<u64> {
        self.provider.newest_cqe()
    }

    /// Where its requests go, and to which queue pair there, if the provider tells.
    pub(crate) fn target(&self) -> Option<(doorbell_hca::record::Target, u32)> {
        self.provider.target()
    }

    /// Receives posted and filled.
    pub(crate) fn receives(&self) -> Option<(u64, u64)> {
        self.provider.receives()
    }

    /// How far its poster is, if that lies in memory which the CPU reaches and nobody is exporting at this moment.
    pub(crate) fn progress(&self) -> Option<Progress> {
        self.export.try_lock().ok()?.progress()
    }

    /// What its device code waits for, if the CPU can read that.
    pub(crate) fn read_note(&self) -> Option<[u64; 6]> {
        self.queue.read_note().ok()
    }

    fn export(&self) -> std::sync::MutexGuard<'_, export::Place> {
        self.export.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn qpn(&self) -> u32 {
        self.provider.qpn()
    }

    fn connect(&self, to: &Destination) -> Result<()> {
        if let Some(companion) = &self.companion {
            // It counts in memory of this process, whatever the main queue is connected to.
            let itself = Destination::Loopback {
                qpn: companion.qpn(),
            };
            companion.provider.connect(&itself, 0)?;
        }
        self.provider.connect(to, self.psn.load(Ordering::Relaxed))
    }

    fn reset(&self, timeout: Duration) -> Result<()> {
        if let Some(companion) = &self.companion {
            companion.reset(timeout)?;
        }
        self.provider.reset(timeout)?;
        self.psn.store(draw_psn(), Ordering::Relaxed);
        self.queue.clear_note()?;
        // Indices restart at zero on both sides: what kernels hold is written anew.
        self.export().refresh(self)
    }

    fn destroy(&self, timeout: Duration) -> Result<()> {
        if let Some(companion) = &self.companion {
            companion.provider.destroy(timeout)?;
        }
        self.provider.destroy(timeout)
    }

    fn fault(&self) -> Option<QpFault> {
        QpFault::from_word(self.provider.error())
    }
}
