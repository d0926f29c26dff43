//! An opened device: a GPU, an HCA for it, and memory for queues.
//!
//! Everything made from a [`Device`] keeps what it needs alive, so handles may be dropped in any order; the HCA's threads
//! end with the last of them.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use doorbell_gpu::{Gpu, GpuInfo, GpuSelect, Keep, Module};

use crate::arena::Arena;
use crate::config::{Config, HcaCores, OnError, Settings};
use crate::connect::{ConnectError, Destination, Offer, RoceTarget, VerbsTarget};
use crate::dma::Engine;
use crate::endpoint::Endpoint;
use crate::memory::{Memory, Sharable};
use crate::mr::Pd;
use crate::provider::{Provider, soft::Soft};
use crate::qp::{Handler, QpCore, QpInner};
use crate::report::KernelReport;
use crate::{Error, Place, QpFault, Result, report};

/// How long one look for an event lasts while a caller-driven engine has to be driven too.
const DRIVE_SLICE: Duration = Duration::from_micros(200);

/// An opened device; a cheap handle.
#[derive(Clone)]
pub struct Device {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    // Fields drop in order: the HCA goes before the memory that it reads.
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) soft: Option<Arc<Soft>>,
    /// Rings, CQs and words: memory that GPU and HCA both reach.
    pub(crate) queues: Arena,
    /// Exported structures: memory on which the GPU's atomics work.
    pub(crate) exports: Arena,
    pub(crate) engine: Arc<Engine>,
    pub(crate) gpu: Gpu,
    pub(crate) settings: Settings,
    /// Queue pairs that exist, for reports.
    pub(crate) qps: Mutex<Vec<Weak<QpInner>>>,
    /// The latest kernels, for traces, and the number of the first.
    kernels: Mutex<(u64, VecDeque<KernelReport>)>,
}

impl Inner {
    /// Enters a queue pair.
    pub(crate) fn made(&self, qp: &Arc<QpInner>) {
        let mut qps = self.qps.lock().unwrap_or_else(PoisonError::into_inner);
        // Swept when it would grow, so that making many costs little each.
        if qps.len() == qps.capacity() {
            qps.retain(|q| q.strong_count() > 0);
        }
        qps.push(Arc::downgrade(qp));
    }

    /// The latest kernels.
    pub(crate) fn kernels(&self) -> Vec<KernelReport> {
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.1.iter().cloned().collect()
    }

    fn write_trace(&self, path: &Path) -> Result<()> {
        let fails = |source| Error::Trace {
            path: path.to_owned(),
            source,
        };
        let reports = report::server::trace_with_peers(self);
        let file = doorbell_hca::roce::output::create(path).map_err(fails)?;
        let mut out = std::io::BufWriter::new(file);
        report::trace::write(&reports, &mut out).map_err(fails)
    }

    /// Queue pairs that exist, companions included.
    pub(crate) fn queue_pairs(&self) -> Vec<QpCore> {
        let qps = self.qps.lock().unwrap_or_else(PoisonError::into_inner);
        qps.iter()
            .filter_map(Weak::upgrade)
            .map(QpCore::of)
            .collect()
    }
}

/// A device to be; see [`Device::builder`].
#[derive(Clone, Debug, Default)]
pub struct DeviceBuilder {
    config: Config,
    module: Option<Module>,
}

impl DeviceBuilder {
    /// Which GPU runs kernels.
    #[must_use]
    pub fn gpu(mut self, select: GpuSelect) -> Self {
        self.config.gpu = Some(select);
        self
    }

    /// Engine threads of the software HCA.
    #[must_use]
    pub fn hca_cores(mut self, threads: u32) -> Self {
        self.config.hca_cores = Some(HcaCores::Threads(threads));
        self
    }

    /// No engine threads: whoever waits runs the engine.
    #[must_use]
    pub fn caller_driven(mut self) -> Self {
        self.config.hca_cores = Some(HcaCores::Caller);
        self
    }

    /// How queue pairs are rung by default.
    #[must_use]
    pub fn handler(mut self, handler: Handler) -> Self {
        self.config.handler = Some(handler);
        self
    }

    /// How long destroying something waits before it leaks.
    #[must_use]
    pub fn quiesce(mut self, time: Duration) -> Self {
        self.config.quiesce = Some(time);
        self
    }

    /// Runs host kernels as emulated 32-lane warps.
    #[must_use]
    pub fn emulate_warp(mut self, yes: bool) -> Self {
        self.config.emulate_warp = Some(yes);
        self
    }

    /// What foreign kernels meet on a failed queue pair.
    #[must_use]
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.config.on_error = Some(on_error);
        self
    }

    /// Faults to play, as `DOORBELL_FAULT` has them: see [`crate::faults`].
    #[must_use]
    pub fn fault(mut self, rules: impl Into<String>) -> Self {
        self.config.fault = Some(rules.into());
        self
    }

    /// All settings at once, for programs that have their own argument parser.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Kernels of your own instead of Doorbell's.
    #[must_use]
    pub fn module(mut self, module: Module) -> Self {
        self.module = Some(module);
        self
    }

    /// Opens it.
    pub fn open(self) -> Result<Device> {
        let settings = self.config.resolve()?;
        settings.check_trace()?;
        let module = self.module.unwrap_or(Module {
            ptx: doorbell_kernels::PTX,
            host: doorbell_kernels::HOST,
        });
        let gpu = Gpu::open(&settings.gpu, module)?;
        let engine = Arc::new(Engine::new(&gpu));
        let soft = Arc::new(Soft::open(&engine, &settings)?);
        Ok(Device::assemble(
            engine,
            Arc::clone(&soft) as Arc<dyn Provider>,
            Some(soft),
            settings,
        ))
    }
}

/// Something that happened by itself; see [`Device::next_error`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncError {
    /// A queue pair failed.
    Qp {
        /// Its number.
        qpn: u32,
        /// Its first error.
        fault: QpFault,
    },
    /// An engine core died; its queue pairs are in error.
    EngineDown {
        /// The core.
        core: usize,
        /// Why.
        reason: String,
    },
    /// A peer process is gone; the queue pairs connected to it are in error.
    PeerDown {
        /// The peer, as [`crate::Peer::id`] names it.
        peer: u64,
        /// Why.
        reason: String,
    },
    /// Something that this release has no name for.
    Other {
        /// What the provider says.
        text: String,
    },
}

impl fmt::Display for AsyncError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qp { qpn, fault } => write!(f, "QP {qpn:#08x}: {fault}"),
            Self::EngineDown { core, reason } => write!(f, "engine core {core} died: {reason}"),
            Self::PeerDown { peer, reason } => write!(f, "peer {peer} is gone: {reason}"),
            Self::Other { text } => f.write_str(text),
        }
    }
}

impl Device {
    /// Opens the device that the environment names, or the best there is.
    pub fn open() -> Result<Self> {
        DeviceBuilder::default().open()
    }

    /// Begins a device.
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    /// A device with a provider of your own.
    pub fn with_provider(gpu: Gpu, provider: Arc<dyn Provider>, settings: Settings) -> Self {
        Self::assemble(Arc::new(Engine::new(&gpu)), provider, None, settings)
    }

    fn assemble(
        engine: Arc<Engine>,
        provider: Arc<dyn Provider>,
        soft: Option<Arc<Soft>>,
        settings: Settings,
    ) -> Self {
        let gpu = engine.gpu().clone();
        let queues = Arena::new(&gpu, provider.queue_memory());
        let exports = Arena::new(&gpu, doorbell_gpu::MemKind::Device);
        let inner = Arc::new(Inner {
            provider,
            soft,
            queues,
            exports,
            engine,
            gpu,
            settings,
            qps: Mutex::default(),
            kernels: Mutex::default(),
        });
        report::server::enter(Arc::downgrade(&inner));
        Self { inner }
    }

    /// The settings in force, with where each came from and why.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.inner.gpu
    }

    /// What is known about the GPU.
    pub fn gpu_info(&self) -> &GpuInfo {
        self.inner.gpu.info()
    }

    /// The provider.
    pub fn provider(&self) -> &Arc<dyn Provider> {
        &self.inner.provider
    }

    /// The software HCA, if that is the provider.
    pub fn soft(&self) -> Option<&Soft> {
        self.inner.soft.as_deref()
    }

    /// What this device's RoCE port can do, for a peer; opens the port if it was not. Each engine core has a port of its own:
    /// this is the first one's, and [`crate::QpCore::endpoint`] names the queue pair's.
    pub fn roce_offer(&self) -> Result<Offer> {
        self.inner.gpu.check_process()?;
        self.inner.provider.roce_offer(Some(0))
    }

    /// What the RoCE ports are and guarantee, in words; nothing if none was opened.
    pub fn roce_describe(&self) -> Vec<String> {
        self.inner.provider.roce_describe()
    }

    /// The RDMA device that carries queue pairs connected over verbs, in words; opens it if it was not.
    pub fn verbs_describe(&self) -> Result<String> {
        self.inner.provider.verbs_describe()
    }

    /// What the RoCE ports have counted, by name; nothing if none was opened.
    pub fn roce_counters(&self) -> Vec<(&'static str, u64)> {
        self.inner.provider.roce_counters()
    }

    /// The queue pair that a peer described by [`LinkKind::Roce`](crate::LinkKind::Roce), as something to connect to: what both ports can do is
    /// put together. One described by [`LinkKind::Verbs`](crate::LinkKind::Verbs) is reached by the RDMA device. Another process of this host is reached by [`crate::Peer::destination`].
    pub fn destination(&self, endpoint: &Endpoint) -> Result<Destination> {
        if let Some(verbs) = &endpoint.verbs {
            return Ok(Destination::Verbs(VerbsTarget {
                peer: verbs.end,
                psn: verbs.psn,
            }));
        }
        let Some(roce) = &endpoint.roce else {
            return Err(Error::Argument {
                object: "link of the peer's queue pair",
                value: format!("{:?}", endpoint.link),
                remedy: "describe it with LinkKind::Roce or LinkKind::Verbs, or ask Peer::destination",
            });
        };
        let agreed =
            self.roce_offer()?
                .agree(&roce.port)
                .map_err(|refusal| ConnectError::Refusing {
                    peer: roce.port.address.to_string(),
                    refusal,
                })?;
        Ok(Destination::Roce(RoceTarget {
            agreed,
            qpn: endpoint.qpn,
            psn: roce.psn,
            unreliable: roce.unreliable,
        }))
    }

    /// A new protection domain.
    pub fn pd(&self) -> Result<Pd> {
        Pd::new(&self.inner)
    }

    /// Zeroed memory.
    pub fn alloc(&self, place: Place, len: usize) -> Result<Memory> {
        Memory::alloc(&self.inner.engine, place, len)
    }

    /// As [`Device::alloc`] in [`Place::Gpu`], as an allocation by itself (2 MiB at least) that other processes, and other devices of this process,
    /// can import. `cudaMalloc`'s memory shares its block with others, and this process cannot import it.
    pub fn alloc_exportable(&self, len: usize) -> Result<Memory> {
        Memory::alloc_exportable(&self.inner.engine, len)
    }

    /// Host memory that somebody else made; it is pinned for the GPU.
    ///
    /// # Safety
    /// `ptr` is valid for reads and writes of `len` bytes as long as `keep` lives, and no Rust reference to those bytes exists
    /// meanwhile; whoever else accesses them does so by atomics or is ordered with the work requests that touch them.
    pub unsafe fn import_host(&self, ptr: NonNull<u8>, len: usize, keep: Keep) -> Result<Memory> {
        // SAFETY: passed on.
        unsafe { Memory::import_host(&self.inner.engine, ptr, len, keep) }
    }

    /// As [`Device::import_host`], with the memfd that the memory is a mapping of, from `offset` on: peers of this host then reach it
    /// without help. The memfd must be sealed against shrinking and growing.
    ///
    /// # Safety
    /// As for [`Device::import_host`]; and `ptr` is a shared mapping of those bytes of `memfd`.
    pub unsafe fn import_shared(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        (memfd, offset): (Arc<OwnedFd>, usize),
        keep: Keep,
    ) -> Result<Memory> {
        let sharable = Sharable { memfd, offset };
        // SAFETY: passed on.
        unsafe { Memory::import_shared(&self.inner.engine, ptr, len, sharable, keep) }
    }

    /// GPU memory that somebody else made (a PyTorch tensor, a `cudaMalloc`), of the context that this device uses.
    /// On the host GPU, use [`Device::import_host`].
    ///
    /// # Safety
    /// The GPU can read and write `len` bytes at `addr` until `keep` is dropped (with `None`: for ever).
    pub unsafe fn import_gpu(&self, addr: u64, len: usize, keep: Option<Keep>) -> Result<Memory> {
        if !self.inner.gpu.is_cuda() {
            return Err(Error::Unsupported {
                what: "importing GPU memory on the host GPU",
                remedy: "use import_host",
            });
        }
        // SAFETY: passed on.
        Ok(unsafe { Memory::import_gpu(&self.inner.engine, addr, len, keep) })
    }

    /// Notes that a kernel was launched, for traces; what is returned notes its end when it is dropped. [`Device::launch`] does so by itself.
    pub fn note_kernel(&self, name: &str) -> KernelNote {
        const KEPT: usize = 1024;
        let mut kernels = self
            .inner
            .kernels
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if kernels.1.len() == KEPT {
            kernels.1.pop_front();
            kernels.0 += 1;
        }
        let number = kernels.0 + kernels.1.len() as u64;
        kernels.1.push_back(KernelReport {
            name: name.to_owned(),
            from_ns: doorbell_hca::record::now_ns(),
            to_ns: None,
        });
        KernelNote {
            device: Arc::downgrade(&self.inner),
            number,
        }
    }

    /// Writes what the flight recorder remembers of this device, and of the processes at the other ends of its queue pairs on this host, as
    /// a trace for <https://ui.perfetto.dev>; see [`report::trace`].
    ///
    /// # Errors
    /// [`Error::Trace`].
    pub fn write_trace(&self, path: &Path) -> Result<()> {
        self.inner.write_trace(path)
    }

    /// From now on, waits for no engine core and no peer longer than `most` when queue pairs and regions are dropped: what is left of a run
    /// that has failed is to go. Memory that somebody may still use is then kept mapped (leaked), as after [`Config::quiesce`].
    pub fn hurry(&self, most: Duration) {
        if let Some(soft) = &self.inner.soft {
            soft.hca().hurry(most);
        }
    }

    /// Whether whoever waits has to run the engine.
    pub fn is_caller_driven(&self) -> bool {
        self.inner.settings.hca_cores == HcaCores::Caller
    }

    /// Runs a caller-driven engine once on this thread; `true` if it did something. With engine threads it does nothing.
    pub fn poll(&self) -> bool {
        self.inner.provider.drive()
    }

    /// The next thing that went wrong with any queue pair, engine core or peer; `None` if nothing did within `timeout`.
    /// A queue pair's first error is reported once.
    pub fn next_error(&self, timeout: Duration) -> Option<AsyncError> {
        if !self.is_caller_driven() {
            return self.inner.provider.next_error(timeout);
        }
        let deadline = doorbell_hca::deadline(timeout);
        loop {
            while self.poll() {}
            let left = deadline.saturating_duration_since(Instant::now());
            let found = self.inner.provider.next_error(left.min(DRIVE_SLICE));
            if found.is_some() || left.is_zero() {
                return found;
            }
        }
    }
}

/// A kernel that runs; see [`Device::note_kernel`].
pub struct KernelNote {
    device: Weak<Inner>,
    number: u64,
}

impl fmt::Debug for KernelNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KernelNote").field(&self.number).finish()
    }
}

impl Drop for KernelNote {
    fn drop(&mut self) {
        let Some(device) = self.device.upgrade() else {
            return;
        };
        let mut kernels = device
            .kernels
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let at = self.number.checked_sub(kernels.0).map(|n| n as usize);
        if let Some(kernel) = at.and_then(|at| kernels.1.get_mut(at)) {
            kernel.to_ns = Some(doorbell_hca::record::now_ns());
        }
    }
}

impl Drop for Inner {
    /// Writes the trace that was asked for by a setting: now, all that happened has happened.
    fn drop(&mut self) {
        if let Some(path) = self.settings.trace_file()
            && self.gpu.is_this_process()
            && let Err(e) = self.write_trace(&path)
        {
            let e = self.settings.variable_fails("trace", &e).unwrap_or(e);
            tracing::error!("{e}");
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("gpu", &self.inner.gpu)
            .field("provider", &self.inner.provider)
            .finish_non_exhaustive()
    }
}
