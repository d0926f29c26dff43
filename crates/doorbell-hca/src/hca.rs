//! The software HCA as its owner sees it: make one, give it memory, make queue pairs, listen to its events.
//! `Hca` is a cheap handle; engine threads stop when the last handle, region and queue pair is gone.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use doorbell_wire::Cqn;
use rand::Rng;

use crate::config::{Cores, HcaConfig};
use crate::doorbells::{DoorbellArray, DoorbellSlot, Doorbells, host_array};
use crate::engine::keeper::{self, Keeper};
use crate::engine::{self, CoreCounters, CoreSlot};
use crate::error::{HcaError, Result};
use crate::events::{Event, Events};
use crate::mem::grace::GraceClock;
use crate::mem::regions::{self, Regions};
use crate::mem::{Exporter, GivesUp, Memory, Mr, MrConfig, Region, TableMemory};
use crate::patience::Patience;
use crate::place::{self, Placement};
use crate::qp::shared::QpShared;
use crate::qp::{DoorbellWord, HcaQp, QpConfig};
use crate::queues::Queues;
use crate::record::{self, Store, WaitKind, Waiting};
use crate::roce::{PortConfig, RoceCounters, RocePort};
use crate::script::ScriptRun;
use crate::verbs::{VerbsConfig, VerbsPort};

/// A software HCA.
#[derive(Clone)]
pub struct Hca(Arc<Handle>);

impl fmt::Debug for Hca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Hca({:?}, {} regions)",
            self.config().cores,
            self.inner().regions.used()
        )
    }
}

/// Owns the engine threads; dropped with the last `Hca`, region and queue pair.
struct Handle {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    placement: Placement,
    /// Dropped after the threads have ended.
    _claims: place::Claims,
}

/// Everything that engine threads and callers share.
pub(crate) struct Inner {
    pub(crate) config: HcaConfig,
    pub(crate) regions: Regions,
    pub(crate) grace: GraceClock,
    pub(crate) cores: Box<[CoreSlot]>,
    pub(crate) queues: Queues,
    pub(crate) events: Events,
    pub(crate) exporter: OnceLock<Arc<dyn Exporter>>,
    pub(crate) stop: AtomicBool,
    /// What peers have been waited for in vain.
    pub(crate) peers: Patience,
    /// Nanoseconds that closing waits for one who does not answer: at first [`HcaConfig::drop_timeout`].
    closing_ns: AtomicU64,
    /// Looks after cores that callers drive, once there is one with a packet port.
    keeper: OnceLock<Arc<Keeper>>,
    /// The flight record, if one is kept.
    pub(crate) record: Option<Arc<Store>>,
    /// The fault script that is being played.
    pub(crate) script: Option<Arc<ScriptRun>>,
    /// Packet ports, by core.
    ports: Mutex<HashMap<usize, RocePort>>,
    /// Opened ports of RDMA devices.
    devices: Mutex<Vec<Arc<VerbsPort>>>,
    doorbells: Doorbells,
    next_pd: AtomicU32,
    next_core: AtomicU32,
}

impl Hca {
    /// Makes an HCA and starts its engine threads.
    ///
    /// # Errors
    /// [`HcaError::BadConfig`], [`HcaError::Os`].
    pub fn new(config: HcaConfig) -> Result<Self> {
        config.check()?;
        let count = config.core_count();
        let (placement, claims) = place::choose(&config);
        let regions = Regions::new(config.log_regions).map_err(|source| HcaError::Os {
            what: "making the key table in shared memory (ulimit -f bounds that too)",
            source,
        })?;
        let caller = config.cores == Cores::CallerDriven;
        let record = Store::new(&config.record, count, caller, config.rank);
        let script = config.script.clone().filter(|s| !s.is_empty());
        let script = script.map(|script| {
            let rank = config.rank.unwrap_or(0);
            Arc::new(ScriptRun::new(script, count, rank, record.clone()))
        });
        let cores = (0..count)
            .map(|i| CoreSlot::new(i, config.dma, record.as_ref()))
            .collect();
        let inner = Arc::new(Inner {
            regions,
            grace: GraceClock::default(),
            cores,
            queues: Queues::starting_anywhere(),
            events: Events::default(),
            exporter: OnceLock::new(),
            stop: AtomicBool::new(false),
            peers: Patience::default(),
            closing_ns: AtomicU64::new(
                u64::try_from(config.drop_timeout.as_nanos()).unwrap_or(u64::MAX),
            ),
            keeper: OnceLock::new(),
            record,
            script,
            ports: Mutex::default(),
            devices: Mutex::default(),
            doorbells: Doorbells::default(),
            next_pd: AtomicU32::new(1),
            next_core: AtomicU32::new(0),
            config,
        });
        let hca = Self(Arc::new(Handle {
            inner: Arc::clone(&inner),
            threads: Mutex::default(),
            placement,
            _claims: claims,
        }));
        if let Cores::Threads(n) = inner.config.cores {
            for core in 0..n {
                let cpu = hca.0.placement.cpus.get(core).copied();
                let thread =
                    engine::thread::spawn(Arc::clone(&inner), core, cpu).map_err(|source| {
                        HcaError::Os {
                            what: "starting an engine thread",
                            source,
                        }
                    })?;
                hca.0
                    .threads
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(thread);
            }
        }
        tracing::debug!("HCA started: {}", hca.0.placement.why);
        Ok(hca)
    }

    /// How it was set up.
    pub fn config(&self) -> &HcaConfig {
        &self.0.inner.config
    }

    /// Where its engine threads run, and why there.
    pub fn placement(&self) -> &Placement {
        &self.0.placement
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.0.inner
    }

    /// A number for a protection domain: memory and QPs of different domains do not mix.
    pub fn alloc_pd(&self) -> u32 {
        self.0.inner.next_pd.fetch_add(1, Ordering::Relaxed)
    }

    /// A number for a CQ.
    ///
    /// # Errors
    /// [`HcaError::Exhausted`].
    pub fn alloc_cqn(&self) -> Result<Cqn> {
        self.0.inner.queues.alloc_cqn()
    }

    /// Registers memory.
    ///
    /// # Errors
    /// [`HcaError::BadRegion`], [`HcaError::NoKeys`], [`HcaError::Export`].
    ///
    /// # Safety
    /// The memory is mapped and stays so until `keep` is dropped. Whoever else accesses it meanwhile does so with atomics, or is ordered with
    /// the work requests that touch it (device code and raw pointers included; Rust references to it must not exist).
    pub unsafe fn register(&self, config: MrConfig) -> Result<Mr> {
        // SAFETY: passed on.
        unsafe { self.register_while(config, &|| None) }
    }

    /// As [`Hca::register`], which waits until peers have mapped the region: no longer than until `gives_up` says why.
    ///
    /// # Errors
    /// Those of [`Hca::register`]; [`HcaError::Export`] with that reason, and with the processes that were waited for.
    ///
    /// # Safety
    /// As for [`Hca::register`].
    pub unsafe fn register_while(&self, config: MrConfig, gives_up: GivesUp<'_>) -> Result<Mr> {
        let base = regions::check(&config)?;
        let region = Arc::new(Region {
            memory: config.memory,
            access: config.access,
            base,
            pd: config.pd,
            devices: crate::verbs::Devices::default(),
        });
        let inner = self.inner();
        let exporter = match region.memory {
            Memory::Shared { .. } | Memory::Device { .. } => inner.exporter.get(),
            Memory::Host { .. } => None,
        };
        let number = match exporter {
            Some(e) => e
                .registering(&region, gives_up)
                .map_err(|reason| HcaError::Export { reason })?,
            None => 0,
        };
        let random = rand::rng().random();
        let Some(key) = inner.regions.insert(&region, number, random) else {
            if let Some(e) = exporter {
                e.abandoned(number);
            }
            return Err(HcaError::NoKeys {
                slots: inner.regions.view().slots(),
            });
        };
        region.devices.set_key(key);
        if let Some(e) = exporter {
            e.registered(key, &region);
        }
        if let Some(record) = &inner.record {
            record.registered(key.0, &region);
        }
        Ok(Mr::new(self.clone(), key, region))
    }

    /// Adds memory for doorbell words; returns its number. A host-only user needs none: see [`Hca::reserve_doorbell`].
    ///
    /// # Errors
    /// [`HcaError::BadConfig`].
    ///
    /// # Safety
    /// The array is mapped until its `keep` is dropped, and written only with whole 8-byte stores or atomics.
    pub unsafe fn add_doorbells(&self, array: DoorbellArray) -> Result<usize> {
        self.0.inner.doorbells.add(array)
    }

    /// Reserves a doorbell word, on the least loaded core unless one is named, in array `array` or any.
    ///
    /// When no array was ever added, words in heap memory of this process are made (for posters on this host).
    ///
    /// # Errors
    /// [`HcaError::Exhausted`]: add another array.
    pub fn reserve_doorbell(
        &self,
        core: Option<usize>,
        array: Option<usize>,
    ) -> Result<DoorbellSlot> {
        let inner = &self.0.inner;
        let core = core.unwrap_or_else(|| inner.least_loaded());
        if core >= inner.cores.len() {
            return Err(HcaError::BadConfig {
                what: format!("core {core} was asked for, there are {}", inner.cores.len()),
            });
        }
        inner.doorbells.reserve(core, array)
    }

    /// Adds an array of doorbell words in heap memory of this process, for posters on this host (CPU threads, the host GPU).
    ///
    /// # Errors
    /// None so far.
    pub fn add_host_doorbells(&self, words: usize) -> Result<usize> {
        self.0.inner.doorbells.add(host_array(words))
    }

    /// Makes a queue pair in [`QpState::Reset`](crate::QpState::Reset). Its rings, CQ, record and words are initialised: zeros, and
    /// "invalid" in every CQE.
    ///
    /// # Errors
    /// [`HcaError::BadQp`], [`HcaError::CqnInUse`], [`HcaError::Exhausted`], [`HcaError::TimedOut`], [`HcaError::EngineDown`].
    ///
    /// # Safety
    /// All memory named in `config` is mapped, readable and writable, large enough for the sizes given, and stays so until `keep` is dropped.
    /// Nobody else accesses it during this call, and only with atomics or device accesses afterwards.
    pub unsafe fn create_qp(&self, config: QpConfig) -> Result<HcaQp> {
        let inner = self.inner();
        config.check(inner.cores.len())?;
        let core = match (&config.doorbell, config.core) {
            (DoorbellWord::Slot(slot), _) => slot.core(),
            (DoorbellWord::At(_), Some(core)) => core,
            (DoorbellWord::At(_), None) => inner.least_loaded(),
        };
        // Packets of a shared UDP port find their process by these bits.
        let class = inner
            .ports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&core)
            .and_then(|port| port.qpn_class);
        let script = inner
            .script
            .as_ref()
            .map(|run| (Arc::clone(run), run.next_nth()));
        let shared = inner.queues.enter(config.cq.cqn, class, |qpn| {
            let recv = config.rq.map(|rq| {
                let mut recv = engine::recv::RecvQueue::new(rq, qpn);
                if let Some((run, nth)) = &script {
                    recv.adopt(engine::script::RecvScript::new(run, qpn, *nth, core));
                }
                recv
            });
            QpShared::new(qpn, (config.pd, core, config.depth()), config.cq.cqn, recv)
        })?;
        // SAFETY: this function's contract is that of `EngineQp::new`.
        let mut qp =
            unsafe { engine::EngineQp::new(config, Arc::clone(&shared), inner.record.as_ref()) };
        if let Some((run, nth)) = &script {
            qp.adopt(run, *nth);
        }
        let timeout = self.limit();
        match inner.on_core(
            core,
            "take the queue pair",
            timeout,
            false,
            move |core, inner| core.attach(inner, qp),
        ) {
            Ok(slot) => Ok(HcaQp::new(self.clone(), shared, slot)),
            Err(e) => {
                inner.queues.forget(&shared);
                Err(e)
            }
        }
    }

    /// Drives a caller-driven core (or helps a thread's core: then it does nothing).
    pub fn driver(&self) -> Driver {
        Driver {
            hca: self.clone(),
            core: 0,
        }
    }

    /// Gives an engine core a packet port, if it has none, and says what it is. RoCE queue pairs are connected through the port of their
    /// core.
    ///
    /// # Errors
    /// [`HcaError::BadConfig`] with the port's own words, [`HcaError::TimedOut`], [`HcaError::EngineDown`].
    pub fn open_roce(&self, core: usize, config: &PortConfig) -> Result<RocePort> {
        let inner = self.inner();
        let bad = |what: String| HcaError::BadConfig { what };
        if core >= inner.cores.len() {
            return Err(bad(format!(
                "core {core} was asked for, there are {}",
                inner.cores.len()
            )));
        }
        let mut ports = inner.ports.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = ports.get(&core) {
            return Ok(open.clone());
        }
        let port = config
            .open()
            .map_err(|e| bad(format!("the RoCE port {config}: {e}")))?;
        let open = RocePort {
            local: port.local_addr(),
            path_mtu: doorbell_port::path_mtu(port.mtu()) as u16,
            segments: port.accepts_trains(),
            light: port.accepts_light(),
            long: port.accepts_long(),
            qpn_class: port.qpn_class(),
            description: port.describe(),
        };
        if open.path_mtu == 0 {
            return Err(bad(format!(
                "the RoCE port {config} takes packets of {} bytes, too small for a path MTU of 256: raise the interface's MTU",
                port.mtu()
            )));
        }
        let keeper = self.0.keeper()?;
        let timeout = self.limit();
        inner.on_core(
            core,
            "take the RoCE port",
            timeout,
            false,
            move |core, _| core.open_roce(port, keeper),
        )?;
        ports.insert(core, open.clone());
        Ok(open)
    }

    /// Opens a port of an RDMA device, or gives the one that was opened alike. One that is gone is opened anew.
    ///
    /// # Errors
    /// [`HcaError::Verbs`].
    pub fn open_verbs(
        &self,
        library: &doorbell_verbs::Verbs,
        config: &VerbsConfig,
    ) -> Result<Arc<VerbsPort>> {
        let inner = self.inner();
        let mut open = inner.devices.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|port| !port.is_gone());
        if let Some(port) = open.iter().find(|port| port.config() == config) {
            return Ok(Arc::clone(port));
        }
        let port = Arc::new(VerbsPort::open(library, config)?);
        open.push(Arc::clone(&port));
        Ok(port)
    }

    /// What an engine core's packet port has seen; `None` if it has none.
    ///
    /// # Errors
    /// [`HcaError::TimedOut`], [`HcaError::EngineDown`].
    pub fn roce_counters(&self, core: usize) -> Result<Option<RoceCounters>> {
        let inner = self.inner();
        let timeout = self.patience(core);
        inner.on_core(
            core,
            "say what the RoCE port counted",
            timeout,
            false,
            |core, _| core.roce_counters(),
        )
    }

    /// The next event, if there is one.
    pub fn poll_event(&self) -> Option<Event> {
        self.0.inner.events.poll()
    }

    /// The next event; waits for one up to `timeout`. It does not drive the engine.
    pub fn wait_event(&self, timeout: Duration) -> Option<Event> {
        self.0.inner.events.wait(timeout)
    }

    /// The fault script that is being played, and what it has done so far.
    pub fn script(&self) -> Option<&ScriptRun> {
        self.0.inner.script.as_deref()
    }

    /// Events that were dropped because nobody took them.
    pub fn lost_events(&self) -> u64 {
        self.0.inner.events.lost()
    }

    /// How long a call that makes or connects something waits for an engine core: [`HcaConfig::drop_timeout`], however long others waited before.
    pub fn limit(&self) -> Duration {
        self.inner().config.drop_timeout
    }

    /// How long a call that ends something, or looks at it, waits for an engine core now: [`HcaConfig::drop_timeout`], less what the core has been
    /// waited for in vain since it last answered or made a round.
    pub fn patience(&self, core: usize) -> Duration {
        let inner = self.inner();
        let slot = inner.cores.get(core);
        slot.map_or(Duration::ZERO, |slot| slot.patience(inner.closing()))
    }

    /// From now on, waits for no one longer than that when queue pairs and regions go: a run that has failed is over.
    pub fn hurry(&self, most: Duration) {
        let most = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        self.inner().closing_ns.fetch_min(most, Ordering::Relaxed);
    }

    /// Does an engine core carry out what it is asked within `patience`? One that is stalled or dead does not.
    pub fn answers(&self, core: usize, patience: Duration) -> bool {
        let inner = self.inner();
        core < inner.cores.len()
            && inner
                .on_core(core, "answer", patience, false, |_, _| ())
                .is_ok()
    }

    /// State of every engine core.
    pub fn health(&self) -> Vec<CoreHealth> {
        self.0.inner.cores.iter().map(CoreSlot::health).collect()
    }

    /// What the flight recorder has; `None` if it is off.
    pub fn record(&self) -> Option<record::Record> {
        self.inner().record.as_ref()?.read()
    }

    /// Enters a wait into the flight record, until what is returned is dropped. For waits that last.
    pub fn waiting(&self, kind: WaitKind, at: u64, wanted: u64, have: u64) -> Option<Waiting> {
        Waiting::enter(self.inner().record.as_ref()?, kind, at, wanted, have)
    }

    /// Who tells peers about regions. Set once, before the first region is registered.
    ///
    /// # Errors
    /// [`HcaError::BadConfig`] if one was set already.
    pub fn set_exporter(&self, exporter: Arc<dyn Exporter>) -> Result<()> {
        self.0
            .inner
            .exporter
            .set(exporter)
            .map_err(|_| HcaError::BadConfig {
                what: "an exporter was set before; an HCA has one".into(),
            })
    }

    /// The memory of the key table: peers of this host map it read-only.
    pub fn table_memory(&self) -> &TableMemory {
        self.0.inner.regions.memory()
    }

    /// Starts a grace period: see [`Hca::grace_passed`].
    pub fn grace_begin(&self) -> u64 {
        self.0.inner.grace_begin()
    }

    /// Has every engine core let go of what it had resolved before the grace period began? Never blocks; a core that nobody drives counts.
    pub fn grace_passed(&self, number: u64) -> bool {
        self.0.inner.grace_lagging(number).is_none()
    }

    /// Puts every QP that is connected to that peer process into error ([`Fault::PeerDead`](crate::Fault::PeerDead)) and raises an event.
    pub fn peer_down(&self, peer: u64, reason: &str) {
        let inner = &self.0.inner;
        inner.events.push(Event::PeerDown {
            peer,
            reason: reason.into(),
        });
        for core in 0..inner.cores.len() {
            inner.tell_core(core, move |core, inner| core.peer_down(inner, peer));
        }
    }
}

impl Handle {
    /// The keeper, where callers drive the cores. The lock of the ports is held: there will be one.
    fn keeper(&self) -> Result<Option<Arc<Keeper>>> {
        let inner = &self.inner;
        if inner.config.cores != Cores::CallerDriven || inner.keeper.get().is_some() {
            return Ok(inner.keeper.get().cloned());
        }
        let (keeper, thread) = keeper::spawn(Arc::clone(inner)).map_err(|source| HcaError::Os {
            what: "starting the thread that looks after caller-driven cores",
            source,
        })?;
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.push(thread);
        Ok(Some(Arc::clone(inner.keeper.get_or_init(|| keeper))))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::Release);
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            thread.thread().unpark();
            // Engine rounds are bounded and the threads look at `stop` between them; one that was dropped by itself cannot join itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Inner {
    /// The core with the fewest QPs; ties go round, so that QPs made at the same time spread as well.
    fn least_loaded(&self) -> usize {
        let count = self.cores.len();
        let first = self.next_core.fetch_add(1, Ordering::Relaxed) as usize;
        (0..count)
            .map(|i| (first + i) % count)
            .min_by_key(|&i| self.cores[i].load())
            .unwrap_or(0)
    }

    /// How long closing waits for one who does not answer.
    pub(crate) fn closing(&self) -> Duration {
        Duration::from_nanos(self.closing_ns.load(Ordering::Relaxed))
    }

    pub(crate) fn grace_begin(&self) -> u64 {
        self.grace.begin()
    }

    /// A core that has not acknowledged that number, if there is one. Cores that nobody drives are acknowledged here.
    pub(crate) fn grace_lagging(&self, number: u64) -> Option<usize> {
        self.cores
            .iter()
            .position(|core| !core.acknowledged(self, number))
    }
}

/// State of an engine core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreHealth {
    /// Why it is dead, if it is.
    pub dead: Option<String>,
    /// Rounds so far: a number that stands still while work is pending means a stuck (or undriven) core.
    pub rounds: u64,
    /// QPs it owns.
    pub qps: usize,
    /// The engine thread that runs it, as the kernel numbers threads; `None` if whoever waits does.
    pub thread: Option<u32>,
    /// What it has done.
    pub counters: CoreCounters,
}

/// Runs the engine on the calling thread.
#[derive(Clone, Debug)]
pub struct Driver {
    hca: Hca,
    core: usize,
}

impl Driver {
    /// One round of the engine, if no other thread is driving it. `true` if something was done.
    ///
    /// On an HCA with engine threads this does nothing and answers `false`.
    #[inline]
    pub fn poll(&self) -> bool {
        let inner = self.hca.inner();
        inner.cores[self.core].poll(inner)
    }

    /// The HCA.
    pub fn hca(&self) -> &Hca {
        &self.hca
    }
}
