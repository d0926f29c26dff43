//! Queue pairs: made from a [`Pd`], connected, exported to kernels, reset, destroyed.
//!
//! The type says how far a queue pair has come: [`Qp<Reset>`] can be connected, [`Qp<Ready>`] carries work requests. That it
//! fails later is not in the type, since it can happen at any moment: ask [`Qp::error`], then [`Qp::reset`] it and connect
//! again. Kernels use it through its [export](Qp::export).

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use doorbell_device::layout::{CqKind, NicHandler};
pub use doorbell_hca::QpCounters;

use crate::connect::Destination;
use crate::device::Inner as DeviceInner;
use crate::endpoint::{Endpoint, LinkKind};
use crate::mr::{Pd, RemoteMr};
use crate::provider::ProviderQp;
use crate::{Error, QpFault, Result};

mod builder;
mod export;
mod queue;

pub use builder::QpBuilder;
pub use export::{Export, ExportLayout, Progress};
pub(crate) use queue::QueueMemory;

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
            "only" => Ok(Self::Only),
            "producer" => Ok(Self::Producer),
            _ => Err("give record, only or producer".to_owned()),
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

mod sealed {
    pub trait State: Send + Sync + 'static {}
}

/// What a [`Qp`]'s type can say.
pub trait State: sealed::State {}

/// Made, or reset: not connected.
#[derive(Debug)]
pub enum Reset {}
/// Connected.
#[derive(Debug)]
pub enum Ready {}

impl sealed::State for Reset {}
impl sealed::State for Ready {}
impl State for Reset {}
impl State for Ready {}

/// A queue pair: a send queue, its completion queue, and the words by which GPU and engine talk.
///
/// It ends when the last of the `Qp` and its exports is dropped, or by [`Qp::destroy`]. Ending waits up to the device's
/// quiesce time for the engine to let go, then leaks the queue memory and logs; it never unmaps under a kernel.
pub struct Qp<S: State = Ready> {
    pub(crate) inner: Arc<QpInner>,
    state: PhantomData<fn() -> S>,
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
    pd: Pd,
}

impl QpInner {
    fn device(&self) -> &Arc<DeviceInner> {
        &self.pd.inner.device
    }

    fn depth(&self) -> u32 {
        1 << self.log_depth
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
            companion.provider.connect(&Destination::Loopback {
                qpn: companion.qpn(),
            })?;
        }
        self.provider.connect(to)
    }

    fn reset(&self, timeout: Duration) -> Result<()> {
        if let Some(companion) = &self.companion {
            companion.reset(timeout)?;
        }
        self.provider.reset(timeout)?;
        // Indices restart at zero on both sides: what kernels hold is written anew.
        self.export().refresh(self)
    }

    fn fault(&self) -> Option<QpFault> {
        QpFault::from_word(self.provider.error())
    }
}

impl Qp<Reset> {
    pub(crate) fn new(inner: QpInner) -> Self {
        Self {
            inner: Arc::new(inner),
            state: PhantomData,
        }
    }

    /// Connects it. What fails is destroyed.
    pub fn connect(self, to: &Destination) -> Result<Qp<Ready>> {
        self.inner.connect(to)?;
        Ok(self.into_state())
    }

    /// Connects it to itself: its work requests act on regions of its own protection domain.
    pub fn connect_to_self(self) -> Result<Qp<Ready>> {
        let qpn = self.qpn();
        self.connect(&Destination::Loopback { qpn })
    }
}

/// Connects two queue pairs of one device to each other.
pub fn connect_pair(a: Qp<Reset>, b: Qp<Reset>) -> Result<(Qp<Ready>, Qp<Ready>)> {
    let (to_a, to_b) = (
        Destination::Loopback { qpn: a.qpn() },
        Destination::Loopback { qpn: b.qpn() },
    );
    Ok((a.connect(&to_b)?, b.connect(&to_a)?))
}

impl Qp<Ready> {
    /// Fails unless it is ready at this moment.
    pub fn check(&self) -> Result<()> {
        match (self.error(), self.state()) {
            (Some(fault), _) => Err(Error::Qp {
                qpn: self.qpn(),
                fault,
            }),
            (None, QpState::Ready) => Ok(()),
            (None, state) => Err(Error::State {
                qpn: self.qpn(),
                state,
                remedy: "reset and reconnect it",
            }),
        }
    }

    /// Puts it into error, as if a work request had failed: kernels that wait get an answer.
    pub fn fail(&self) -> Result<()> {
        self.inner.provider.fail()
    }
}

impl<S: State> Qp<S> {
    fn into_state<T: State>(self) -> Qp<T> {
        Qp {
            inner: self.inner,
            state: PhantomData,
        }
    }

    /// QP number, 24 bits. A reset keeps it.
    pub fn qpn(&self) -> u32 {
        self.inner.qpn()
    }

    /// Its completion queue.
    pub fn cq(&self) -> Cq<'_> {
        Cq { qp: &self.inner }
    }

    /// Slots of the send queue.
    pub fn depth(&self) -> u32 {
        self.inner.depth()
    }

    /// How it is rung.
    pub fn handler(&self) -> Handler {
        self.inner.handler
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.inner.pd
    }

    /// The engine core that executes it.
    pub fn core(&self) -> Option<usize> {
        self.inner.provider.core()
    }

    /// Its state now, as the engine sees it.
    pub fn state(&self) -> QpState {
        self.inner.provider.state()
    }

    /// Its first error since the last reset; kernels read the same word.
    pub fn error(&self) -> Option<QpFault> {
        self.inner.fault()
    }

    /// What the engine has done for it since it was made.
    pub fn counters(&self) -> QpCounters {
        self.inner.provider.counters()
    }

    /// The same for its companion, if it has one.
    pub fn companion_counters(&self) -> Option<QpCounters> {
        self.inner.companion.as_ref().map(|c| c.provider.counters())
    }

    /// What a peer needs to connect to it and to use `regions`.
    pub fn endpoint(&self, link: LinkKind, regions: &[RemoteMr]) -> Endpoint {
        Endpoint {
            link,
            qpn: self.qpn(),
            hca: self.inner.device().provider.id(),
            regions: regions.to_vec(),
        }
    }

    /// Writes the structures that kernels use into GPU memory. A queue pair has one export at a time.
    pub fn export(&self) -> Result<Export> {
        Export::gpu(&[&self.inner], ExportLayout::default())
    }

    /// Writes the structures into host memory, for a CPU that posts (the proxy, perftest's way).
    pub fn export_host(&self) -> Result<Export> {
        Export::host(&[&self.inner], ExportLayout::default())
    }

    /// Stops it, forgets what was posted, and returns it unconnected. Exports stay valid and start again from slot zero:
    /// no kernel may be using them meanwhile.
    pub fn reset(self, timeout: Duration) -> Result<Qp<Reset>> {
        self.inner.reset(timeout)?;
        Ok(self.into_state())
    }

    /// Ends it now: kernels that wait on it get an answer. Its memory stays until exports and kernels are gone.
    pub fn destroy(self, timeout: Duration) -> Result<()> {
        if let Some(companion) = &self.inner.companion {
            companion.provider.destroy(timeout)?;
        }
        self.inner.provider.destroy(timeout)
    }
}

/// Exports many queue pairs side by side: [`Export::table_addr`] is then what kernels take.
pub fn export_array<S: State>(qps: &[&Qp<S>], layout: ExportLayout) -> Result<Export> {
    let inners: Vec<&Arc<QpInner>> = qps.iter().map(|q| &q.inner).collect();
    Export::gpu(&inners, layout)
}

/// As [`export_array`], into host memory.
pub fn export_array_host<S: State>(qps: &[&Qp<S>], layout: ExportLayout) -> Result<Export> {
    let inners: Vec<&Arc<QpInner>> = qps.iter().map(|q| &q.inner).collect();
    Export::host(&inners, layout)
}

impl<S: State> fmt::Debug for Qp<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp")
            .field("qpn", &format_args!("{:#08x}", self.qpn()))
            .field("state", &self.state())
            .field("depth", &self.depth())
            .field("cq", &self.inner.cq_kind)
            .field("handler", &self.inner.handler)
            .finish_non_exhaustive()
    }
}

/// The completion queue of a queue pair's send queue.
///
/// Kernels poll it; the host only looks. [`CqKind::PerSlot`] has an entry for every slot and takes signalled one-slot WQEs
/// only, [`CqKind::Collapsed`] has one entry that each completion overwrites.
#[derive(Clone, Copy)]
pub struct Cq<'a> {
    qp: &'a QpInner,
}

impl Cq<'_> {
    /// CQ number, 24 bits: what WAIT names.
    pub fn cqn(&self) -> u32 {
        self.qp.provider.cqn()
    }

    /// How completions are written.
    pub fn kind(&self) -> CqKind {
        self.qp.cq_kind
    }

    /// CQEs.
    pub fn entries(&self) -> u32 {
        match self.qp.cq_kind {
            CqKind::PerSlot => self.qp.depth(),
            CqKind::Collapsed => 1,
        }
    }

    /// A copy of one CQE (64 bytes), modulo the number of entries.
    pub fn peek(&self, index: u32) -> Result<[u8; 64]> {
        let mut cqe = [0; 64];
        self.qp
            .queue
            .cq
            .read((index % self.entries()) as usize * 64, &mut cqe)?;
        Ok(cqe)
    }
}

impl fmt::Debug for Cq<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq")
            .field("cqn", &self.cqn())
            .field("kind", &self.kind())
            .field("entries", &self.entries())
            .finish()
    }
}
