//! The software HCA as a provider.
//!
//! It executes queues that lie in host memory which the GPU reaches; doorbell words come from compact arrays in the same
//! kind of memory, since an engine core scans them eight at a time.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use doorbell_device::layout::{CqKind, EXT_SOFT_ENGINE, ErrorWord};
use doorbell_gpu::{Buffer, Gpu, Keep, MemKind, RelaxHook};
use doorbell_hca as hca;
use doorbell_hca::dma::Dma;
use doorbell_hca::record::Recording;
use doorbell_hca::shm::{DeviceImporter, Shm, ShmConfig, ShmLink, SlotQp};
use doorbell_hca::{
    Access, Cores, CqConfig, DoorbellArray, DoorbellWord, Driver, Event, Fault, Hca, HcaConfig,
    HcaError, HcaQp, RqConfig, Shared,
};
use doorbell_wire::{Qpn, Vendor};

use super::roce::{self, RoceSettings};
use super::verbs::{self, VerbsSettings};
use super::{Piece, Provider, ProviderMr, ProviderQp, QpRequest, RegisterRequest};
use crate::config::{HcaCores, OnError, Recorder, Settings};
use crate::connect::{Destination, Offer, VerbsEnd};
use crate::dma::Engine;
use crate::fork::Here;
use crate::memory::Memory;
use crate::mr::RemoteMr;
use crate::qp::{QpCounters, QpState};
use crate::{AsyncError, Error, QpFault, Result};

/// Doorbell words that are added at a time: eight kilobytes.
const WORDS: usize = 1024;

/// The software HCA with what it needs of the GPU.
pub struct Soft {
    // Before the HCA: it says goodbye to the peers.
    shm: Here<Arc<Shm>>,
    hca: Here<Hca>,
    driver: Option<Driver>,
    gpu: Gpu,
    id: u64,
    /// Device address of each array of doorbell words, in the order the HCA knows them.
    arrays: Mutex<Vec<u64>>,
    dma: Option<Arc<dyn Dma>>,
    /// How RoCE ports are opened.
    roce: RoceSettings,
    /// Which RDMA device is used.
    verbs: Arc<VerbsSettings>,
}

impl Soft {
    /// Starts a software HCA near the GPU.
    pub(crate) fn open(engine: &Arc<Engine>, settings: &Settings) -> Result<Self> {
        let gpu = engine.gpu();
        let caller = settings.hca_cores == HcaCores::Caller;
        let id = rand::random();
        let config = HcaConfig {
            cores: match settings.hca_cores {
                HcaCores::Caller => Cores::CallerDriven,
                HcaCores::Threads(n) => Cores::Threads(n as usize),
            },
            affinity: match gpu.info().numa_node {
                Some(numa) => hca::Affinity::Near { numa },
                None => hca::Affinity::Auto,
            },
            drop_timeout: settings.quiesce,
            record: match settings.record {
                Recorder::Off => Recording::Off,
                Recorder::On(events) => Recording::File {
                    log_events: events.ilog2(),
                    id,
                },
            },
            script: Some(settings.fault.clone()),
            rank: settings.rank,
            ..HcaConfig::default()
        };
        let hca = Here::new(gpu, Hca::new(config)?);
        let roce = RoceSettings::new(settings);
        roce.prepare(&hca)?;
        let importer = Arc::clone(engine) as Arc<dyn DeviceImporter>;
        let times = ShmConfig::default();
        let times = ShmConfig {
            handshake: times.handshake.max(settings.patience),
            step: settings.patience,
            ..times
        };
        let shm = Shm::attach(&hca, times, Some(importer))?;
        Ok(Self {
            shm: Here::new(gpu, shm),
            driver: caller.then(|| hca.driver()),
            dma: engine.dma(),
            id,
            arrays: Mutex::new(Vec::new()),
            gpu: gpu.clone(),
            roce,
            verbs: Arc::new(VerbsSettings::new(settings)),
            hca,
        })
    }

    /// The HCA itself.
    pub fn hca(&self) -> &Hca {
        &self.hca
    }

    /// The shared memory link.
    pub fn shm(&self) -> &Shm {
        &self.shm
    }

    fn arrays(&self) -> MutexGuard<'_, Vec<u64>> {
        self.arrays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A doorbell word and the address at which the GPU rings it.
    fn doorbell(&self, core: Option<usize>) -> Result<(hca::DoorbellSlot, u64)> {
        let mut arrays = self.arrays();
        if arrays.is_empty() {
            self.add_array(&mut arrays)?;
        }
        let slot = match self.hca.reserve_doorbell(core, None) {
            Err(HcaError::Exhausted { .. }) => {
                self.add_array(&mut arrays)?;
                self.hca.reserve_doorbell(core, None)?
            }
            other => other?,
        };
        let at = arrays[slot.array()] + 8 * slot.index() as u64;
        Ok((slot, at))
    }

    fn add_array(&self, arrays: &mut Vec<u64>) -> Result<()> {
        let buffer: Buffer = self.gpu.alloc(MemKind::PinnedHost, WORDS * 8)?;
        let (device, words) = (
            buffer.device_addr(),
            shared(buffer.host_ptr().map(|p| p.as_ptr().cast()))?,
        );
        // SAFETY: the buffer stays mapped as long as the HCA keeps it, and doorbells are single 8-byte stores.
        unsafe {
            self.hca.add_doorbells(DoorbellArray {
                words,
                len: WORDS,
                keep: Arc::new(buffer) as Keep,
            })?
        };
        arrays.push(device);
        Ok(())
    }

    fn memory(&self, memory: &Memory) -> Result<hca::Memory> {
        let (len, keep) = (memory.len(), memory.keep());
        if let (Some(sharable), Some(ptr)) = (memory.sharable(), memory.host_ptr()) {
            return Ok(hca::Memory::Shared {
                ptr: Shared::new(ptr),
                len,
                memfd: Arc::clone(&sharable.memfd),
                offset: sharable.offset as u64,
                keep,
            });
        }
        match (memory.host_ptr(), &self.dma) {
            (Some(ptr), _) => Ok(hca::Memory::Host {
                ptr: Shared::new(ptr),
                len,
                keep,
            }),
            (None, Some(dma)) => Ok(hca::Memory::Device {
                addr: memory.device_addr(),
                len,
                dma: Arc::clone(dma),
                keep,
            }),
            (None, None) => Err(Error::Unsupported {
                what: "registering GPU memory with an HCA that has no copy engine",
                remedy: "use host or shared memory",
            }),
        }
    }
}

impl fmt::Debug for Soft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Soft")
            .field("hca", &*self.hca)
            .field("id", &format_args!("{:#018x}", self.id))
            .finish_non_exhaustive()
    }
}

fn shared<T>(ptr: Option<*mut T>) -> Result<Shared<T>> {
    ptr.and_then(Shared::from_ptr).ok_or(Error::Unsupported {
        what: "a queue in memory that the CPU cannot reach",
        remedy: "the software HCA needs queues in host memory",
    })
}

fn at<T>(piece: &Piece) -> Result<Shared<T>> {
    shared(piece.host.map(|p| p.as_ptr().cast()))
}

impl Provider for Soft {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn queue_memory(&self) -> MemKind {
        MemKind::PinnedHost
    }

    fn alloc_pd(&self) -> Result<u32> {
        self.gpu.check_process()?;
        Ok(self.hca.alloc_pd())
    }

    fn register(&self, request: &RegisterRequest<'_>) -> Result<Box<dyn ProviderMr>> {
        self.gpu.check_process()?;
        let config = hca::MrConfig {
            memory: self.memory(request.memory)?,
            access: request.access,
            addressing: hca::Addressing::At(request.base),
            pd: request.pd,
        };
        // SAFETY: `keep` is the memory itself; `Memory` gives out no references, and imported memory was promised to be used likewise.
        let mr = unsafe { self.hca.register_while(config, request.gives_up)? };
        Ok(Box::new(SoftMr {
            mr: Here::new(&self.gpu, mr),
            verbs: Arc::clone(&self.verbs),
        }))
    }

    fn create_qp(&self, request: QpRequest) -> Result<Box<dyn ProviderQp>> {
        self.gpu.check_process()?;
        let (slot, doorbell) = self.doorbell(request.core)?;
        let log_entries = request.log_depth;
        let rq = match &request.recv {
            Some(recv) => Some(RqConfig {
                ring: at(&recv.ring)?,
                log_entries: recv.log_depth,
                stride: recv.stride,
                record: at(&recv.record)?,
                cq: CqConfig {
                    ring: at(&recv.cq)?,
                    log_entries: recv.log_depth,
                    kind: CqKind::PerSlot,
                    cqn: self.hca.alloc_cqn()?,
                },
            }),
            None => None,
        };
        let signals = request
            .signals
            .iter()
            .map(|(memory, range)| {
                let memory = self.memory(memory)?;
                // SAFETY: `Memory` keeps itself mapped and gives out no references.
                Ok(unsafe { hca::Signals::new(&memory, range.clone()) }?)
            })
            .collect::<Result<Vec<_>>>()?;
        let config = hca::QpConfig {
            pd: request.pd,
            sq: at(&request.ring)?,
            log_depth: request.log_depth,
            cq: CqConfig {
                ring: at(&request.cq)?,
                log_entries,
                kind: request.cq_kind,
                cqn: self.hca.alloc_cqn()?,
            },
            handler: request.handler,
            doorbell: DoorbellWord::Slot(slot.clone()),
            record: Some(at(&request.record)?),
            poll_record: false,
            wait_note: Some(at(&request.note)?),
            error_word: Some(at(&request.error)?),
            rq,
            core: request.core,
            on_error: match request.on_error {
                OnError::Report => hca::OnError::Flush,
                OnError::Release => hca::OnError::Release,
            },
            signals,
            keep: request.keep,
        };
        // SAFETY: the pieces are as long as the host library says (`QueueMemory`), stay mapped as long as `keep`, and nobody
        // knows their addresses yet.
        let qp = unsafe { self.hca.create_qp(config)? };
        Ok(Box::new(SoftQp {
            qpn: qp.qpn().get(),
            cqn: qp.cqn().get(),
            recv_cqn: rq.map(|rq| rq.cq.cqn.get()),
            core: qp.core(),
            doorbell,
            slot,
            gpu: self.gpu.clone(),
            verbs: Arc::clone(&self.verbs),
            remote_access: request.remote_access,
            qp: RwLock::new(Life::Alive(Here::new(&self.gpu, qp))),
        }))
    }

    fn next_error(&self, timeout: Duration) -> Option<AsyncError> {
        // In a forked child nothing happens any more.
        self.gpu.check_process().ok()?;
        let deadline = doorbell_hca::deadline(timeout);
        loop {
            let event = self
                .hca
                .wait_event(deadline.saturating_duration_since(Instant::now()))?;
            return Some(match event {
                // The owner destroyed or failed it, and knows.
                Event::QpError {
                    vendor: Vendor::DESTROYED,
                    ..
                } => continue,
                Event::QpError {
                    qpn,
                    syndrome,
                    vendor,
                    opcode,
                    wqe_index,
                } => {
                    let word = ErrorWord::completion(syndrome.0, vendor.0, opcode, wqe_index);
                    AsyncError::Qp {
                        qpn: qpn.get(),
                        fault: QpFault::new(word),
                    }
                }
                Event::EngineDown { core, reason } => AsyncError::EngineDown { core, reason },
                Event::PeerDown { peer, reason } => AsyncError::PeerDown { peer, reason },
                other => AsyncError::Other {
                    text: format!("{other:?}"),
                },
            });
        }
    }

    fn drive(&self) -> bool {
        self.gpu.is_this_process() && self.driver.as_ref().is_some_and(Driver::poll)
    }

    fn roce_offer(&self, core: Option<usize>) -> Result<Offer> {
        self.gpu.check_process()?;
        self.roce.offer(&self.hca, core.unwrap_or(0))
    }

    fn roce_describe(&self) -> Vec<String> {
        self.roce.describe()
    }

    fn verbs_describe(&self) -> Result<String> {
        self.gpu.check_process()?;
        Ok(self.verbs.port(&self.hca)?.describe())
    }

    fn roce_counters(&self) -> Vec<(&'static str, u64)> {
        match self.gpu.is_this_process() {
            true => self.roce.counters(&self.hca),
            false => Vec::new(),
        }
    }

    fn relax_hook(&self) -> Option<RelaxHook> {
        let driver = self.driver.clone()?;
        Some(Arc::new(move || {
            driver.poll();
        }))
    }
}

struct SoftMr {
    mr: Here<hca::Mr>,
    verbs: Arc<VerbsSettings>,
}

impl ProviderMr for SoftMr {
    fn key(&self) -> u32 {
        self.mr.key().0
    }

    fn verbs(&self) -> Result<RemoteMr> {
        let port = self.verbs.port(self.mr.hca())?;
        Ok(verbs::remote(self.mr.on_port(&port)?, self.mr.len()))
    }

    fn deregister(self: Box<Self>, timeout: Duration) -> Result<()> {
        Ok(self.mr.take()?.deregister(timeout)?)
    }
}

struct SoftQp {
    qpn: u32,
    cqn: u32,
    recv_cqn: Option<u32>,
    core: usize,
    doorbell: u64,
    slot: hca::DoorbellSlot,
    gpu: Gpu,
    verbs: Arc<VerbsSettings>,
    remote_access: Access,
    qp: RwLock<Life>,
}

impl Drop for SoftQp {
    /// The doorbell word goes to another queue pair only when no kernel is left that might still ring this one.
    fn drop(&mut self) {
        if self.gpu.is_this_process() {
            let slot = self.slot.clone();
            self.gpu.defer(move || drop(slot));
        }
    }
}

enum Life {
    Alive(Here<HcaQp>),
    /// What it had done, and its first error.
    Over(QpCounters, ErrorWord),
}

impl SoftQp {
    fn alive<T>(&self, f: impl FnOnce(&HcaQp) -> T) -> Result<T> {
        self.gpu.check_process()?;
        match &*self.qp.read().unwrap_or_else(PoisonError::into_inner) {
            Life::Alive(qp) => Ok(f(qp)),
            Life::Over(..) => Err(Error::State {
                qpn: self.qpn,
                state: QpState::Destroyed,
                remedy: "make a new queue pair",
            }),
        }
    }
}

impl ProviderQp for SoftQp {
    fn qpn(&self) -> u32 {
        self.qpn
    }

    fn cqn(&self) -> u32 {
        self.cqn
    }

    fn recv_cqn(&self) -> Option<u32> {
        self.recv_cqn
    }

    fn doorbell(&self) -> u64 {
        self.doorbell
    }

    fn peek_doorbell(&self) -> Option<u64> {
        // SAFETY: `slot` keeps its array mapped; doorbells are single 8-byte stores.
        Some(unsafe { self.slot.word().load() })
    }

    unsafe fn watch_poster(&self, at: NonNull<u8>, keep: Keep) {
        let at = Shared::new(at.cast());
        // SAFETY: the caller's promise.
        let told = self.alive(|qp| unsafe { qp.watch_poster(at, keep, qp.patience()) });
        if let Ok(Err(e)) = told {
            tracing::debug!("the flight recorder was not told of an export: {e}");
        }
    }

    fn ext_flags(&self) -> u32 {
        EXT_SOFT_ENGINE
    }

    fn core(&self) -> Option<usize> {
        Some(self.core)
    }

    fn verbs_end(&self) -> Result<VerbsEnd> {
        self.alive(|qp| {
            let port = self.verbs.port(qp.hca())?;
            Ok(qp.prepare(&port, qp.hca().limit())?)
        })?
    }

    fn connect(&self, to: &Destination, psn: u32) -> Result<()> {
        let number = |qpn: u32| {
            Qpn::new(qpn).ok_or_else(|| Error::Argument {
                object: "QP number of the peer",
                value: format!("{qpn:#x}"),
                remedy: "QP numbers have 24 bits",
            })
        };
        let to = match to {
            Destination::Loopback { qpn } => hca::Destination::Loopback(number(*qpn)?),
            Destination::Shm { peer, qpn } => {
                let pd = self.alive(HcaQp::pd)?;
                let local = SlotQp {
                    qpn: self.qpn,
                    pd,
                    peer_qpn: number(*qpn)?.get(),
                    receives: self.alive(HcaQp::receives)?,
                };
                hca::Destination::Peer(ShmLink::open(peer.session(), local)?)
            }
            Destination::Roce(target) => {
                hca::Destination::Roce(Box::new(roce::target(target, psn, self.remote_access)?))
            }
            Destination::RoceAnyone { path_mtu } => {
                hca::Destination::RoceAnyone(roce::receiver(*path_mtu, self.remote_access)?)
            }
            Destination::Verbs(target) => {
                hca::Destination::Verbs(Box::new(verbs::target(&self.verbs, target, psn)))
            }
        };
        Ok(self.alive(|qp| qp.connect(to, qp.hca().limit()))??)
    }

    fn reset(&self, timeout: Duration) -> Result<()> {
        Ok(self.alive(|qp| qp.reset(timeout))??)
    }

    fn fail(&self) -> Result<()> {
        Ok(self.alive(|qp| qp.fail(Fault::Destroyed, qp.patience()))??)
    }

    fn destroy(&self, timeout: Duration) -> Result<()> {
        self.gpu.check_process()?;
        let mut life = self.qp.write().unwrap_or_else(PoisonError::into_inner);
        let Life::Alive(qp) = &*life else {
            return Ok(());
        };
        let over = Life::Over(qp.counters(), qp.first_error().unwrap_or_default());
        match std::mem::replace(&mut *life, over) {
            Life::Alive(qp) => Ok(qp.take()?.destroy(timeout)?),
            Life::Over(..) => Ok(()),
        }
    }

    fn state(&self) -> QpState {
        self.alive(|qp| qp.state().into())
            .unwrap_or(QpState::Destroyed)
    }

    fn indexes(&self) -> Option<(u64, u64)> {
        self.alive(HcaQp::indexes).ok()
    }

    fn newest_cqe(&self) -> Option<u64> {
        self.alive(HcaQp::newest_cqe).ok()
    }

    fn target(&self) -> Option<(doorbell_hca::record::Target, u32)> {
        self.alive(HcaQp::target).ok()
    }

    fn receives(&self) -> Option<(u64, u64)> {
        self.alive(HcaQp::receives_so_far).ok().flatten()
    }

    fn error(&self) -> ErrorWord {
        match &*self.qp.read().unwrap_or_else(PoisonError::into_inner) {
            Life::Alive(qp) => qp.first_error().unwrap_or_default(),
            Life::Over(_, word) => *word,
        }
    }

    fn roce_counters(&self) -> Vec<(&'static str, u64)> {
        match self.alive(|qp| qp.roce_counters(qp.patience())) {
            Ok(Ok(Some(counters))) => counters.rows().to_vec(),
            // None, or gone.
            _ => Vec::new(),
        }
    }

    fn counters(&self) -> QpCounters {
        match &*self.qp.read().unwrap_or_else(PoisonError::into_inner) {
            Life::Alive(qp) => qp.counters(),
            Life::Over(counters, _) => *counters,
        }
    }
}
