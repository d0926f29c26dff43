//! The devices of this process, one a GPU, shared by all ranks that use that GPU; and the thread that watches over each.
//!
//! A device lasts as long as some communicator uses it. Its watch takes what goes wrong with queue pairs, engines, peers and
//! ranks, and tells the communicators concerned: [`Health`](crate::health::Health) is what `queryLastError` reads.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use doorbell::{
    AnyQp, AsyncError, Bootstrap, Device, GpuSelect, HcaCores, Memory, Module, OnError, Peer,
    QpFault, QpState, Vendor,
};
use doorbell_hca::qp::released;
use doorbell_hca::shm::Gone;

use crate::beats::Beats;
use crate::health::Health;
use crate::pulse::Pulse;
use crate::settings::Settings;
use crate::{Result, log};

/// How long one look for an event lasts: what happens is known to the host within a few of these.
const LOOK: Duration = Duration::from_millis(50);

/// A GPU with its software HCA, as long as somebody uses it.
pub(crate) struct Node {
    pub(crate) device: Device,
    pub(crate) watch: Arc<Watch>,
    /// Apart from the watch, which the GPU's driver or NCCL's log may keep.
    pub(crate) beats: Beats,
    thread: Option<JoinHandle<()>>,
}

type Nodes = HashMap<String, Weak<Node>>;

fn nodes() -> MutexGuard<'static, Option<Nodes>> {
    static NODES: Mutex<Option<Nodes>> = Mutex::new(None);
    NODES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// The device of the calling thread's GPU. Nothing here waits for another rank. The settings of the first call hold: where its packets come from,
    /// and how long its engine and its peers may stand still without being reported.
    pub(crate) fn get(settings: &Settings) -> Result<Arc<Self>> {
        let select = choose()?;
        let key = select.to_string();
        let mut nodes = nodes();
        let nodes = nodes.get_or_insert_default();
        if let Some(node) = nodes.get(&key).and_then(Weak::upgrade) {
            return Ok(node);
        }
        let node = Arc::new(Self::open(select, settings)?);
        nodes.insert(key, Arc::downgrade(&node));
        Ok(node)
    }

    fn open(select: GpuSelect, settings: &Settings) -> Result<Self> {
        let mut config = doorbell::Config {
            gpu: Some(select),
            // Who stands still for less than `DOORBELL_NCCL_ALIVE` fails nothing, by whatever link.
            patience: Some(settings.patience()),
            otherwise: doorbell::Otherwise {
                roce: settings.roce_port(),
                ..doorbell::Otherwise::default()
            },
            ..doorbell::Config::default()
        };
        // NCCL's kernels run no engine while they wait, so somebody else must.
        if config.resolve()?.hca_cores == HcaCores::Caller {
            config.hca_cores = Some(HcaCores::Threads(1));
        }
        // Nobody launches kernels of ours here, so there is no module. The copier has one of its own (small copies), which each process loads
        // once a GPU, at its first communicator: a load waits for running kernels.
        let device = Device::builder()
            .config(config)
            .module(Module { ptx: "", host: &[] })
            .open()?;
        let info = device.gpu_info();
        log::info(format_args!("{select}: {}, software HCA", info.name));
        for setting in device.settings().explain() {
            tracing::info!(
                "{}={} ({})",
                setting.variable,
                setting.value,
                setting.source
            );
        }
        let watch = Arc::new(Watch {
            lets_go: device.settings().on_error == OnError::Release,
            ..Watch::default()
        });
        let beats = Beats::start()?;
        let (seen, watched, alive) = (device.clone(), Arc::clone(&watch), settings.alive);
        let thread = std::thread::Builder::new()
            .name("doorbell-watch".to_owned())
            .spawn(move || watched.run(&seen, alive))
            .map_err(|source| doorbell::Error::Os {
                what: "starting the thread that watches over a device",
                source: doorbell::limits::thread(source),
            })?;
        Ok(Self {
            device,
            watch,
            beats,
            thread: Some(thread),
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.watch.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // It looks at `stop` after every look for events.
            let _ = thread.join();
        }
    }
}

/// Which GPU the calling thread means: the one that is current, unless the environment names another.
fn choose() -> Result<GpuSelect> {
    let settings = doorbell::Config::default().resolve()?;
    Ok(match settings.gpu {
        GpuSelect::Host => GpuSelect::Host,
        GpuSelect::Cuda(Some(n)) => GpuSelect::Cuda(Some(n)),
        GpuSelect::Cuda(None) | GpuSelect::Auto => match doorbell::Gpu::current_cuda() {
            Some(ordinal) => GpuSelect::Cuda(Some(ordinal)),
            None => settings.gpu,
        },
    })
}

/// Who is to be told of what.
#[derive(Default)]
pub(crate) struct Watch {
    stop: AtomicBool,
    /// Kernels of a communicator that has failed are let go (`DOORBELL_ON_ERROR=release`).
    lets_go: bool,
    lists: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    next: u64,
    qps: HashMap<u32, QpEntry>,
    peers: HashMap<u64, PeerEntry>,
    meshes: Vec<(u64, Weak<Mutex<Bootstrap>>, Arc<Health>)>,
    /// Queue pairs that ended because their peer left in order: an error only if somebody goes on using them.
    idle: Vec<Idle>,
    healths: Vec<(u64, Arc<Health>)>,
    /// Signals and counters that kernels wait for.
    words: Vec<(u64, Arc<Health>, Memory)>,
}

struct QpEntry {
    health: Arc<Health>,
    rank: usize,
    qp: AnyQp,
}

struct PeerEntry {
    health: Arc<Health>,
    rank: usize,
    peer: Peer,
}

impl PeerEntry {
    /// Has it gone in order?
    fn has_left(&self) -> bool {
        matches!(self.peer.gone(), Some(Gone::Closed | Gone::ClosedHere))
    }
}

struct Idle {
    qpn: u32,
    flushed: u64,
}

/// Takes signals and counters off the list when they go.
pub(crate) struct WatchedWords {
    watch: Arc<Watch>,
    number: u64,
}

impl Drop for WatchedWords {
    fn drop(&mut self) {
        let mut lists = self.watch.lists();
        let gone = lists.words.extract_if(.., |(n, ..)| *n == self.number);
        let gone: Vec<_> = gone.collect();
        drop(lists);
        drop(gone);
    }
}

/// Takes a communicator off the lists when it goes.
pub(crate) struct Watched {
    watch: Arc<Watch>,
    number: u64,
    peers: Vec<u64>,
}

impl Watched {
    /// The processes that the communicator reaches by shared memory.
    pub(crate) fn add_peers(&mut self, health: &Arc<Health>, peers: &[(usize, Peer)]) {
        let mut lists = self.watch.lists();
        for (rank, peer) in peers {
            let entry = PeerEntry {
                health: Arc::clone(health),
                rank: *rank,
                peer: peer.clone(),
            };
            lists.peers.insert(peer.id(), entry);
        }
        self.peers.extend(peers.iter().map(|(_, p)| p.id()));
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut lists = self.watch.lists();
        lists.meshes.retain(|(n, ..)| *n != self.number);
        lists.healths.retain(|(n, _)| *n != self.number);
        for peer in &self.peers {
            lists.peers.remove(peer);
        }
    }
}

impl Watch {
    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A communicator, with its connection to the other ranks.
    pub(crate) fn enter(
        self: &Arc<Self>,
        health: &Arc<Health>,
        mesh: &Arc<Mutex<Bootstrap>>,
    ) -> Watched {
        let mut lists = self.lists();
        lists.next += 1;
        let number = lists.next;
        lists.healths.push((number, Arc::clone(health)));
        let entry = (number, Arc::downgrade(mesh), Arc::clone(health));
        lists.meshes.push(entry);
        Watched {
            watch: Arc::clone(self),
            number,
            peers: Vec::new(),
        }
    }

    pub(crate) fn add_qp(&self, health: &Arc<Health>, rank: usize, qp: &AnyQp) {
        let entry = QpEntry {
            health: Arc::clone(health),
            rank,
            qp: qp.clone(),
        };
        self.lists().qps.insert(qp.qpn(), entry);
    }

    /// Words that kernels of a communicator wait for.
    pub(crate) fn add_words(
        self: &Arc<Self>,
        health: &Arc<Health>,
        all: impl IntoIterator<Item = Memory>,
    ) -> WatchedWords {
        let mut lists = self.lists();
        lists.next += 1;
        let number = lists.next;
        let new = all
            .into_iter()
            .map(|memory| (number, Arc::clone(health), memory));
        lists.words.extend(new);
        WatchedWords {
            watch: Arc::clone(self),
            number,
        }
    }

    pub(crate) fn remove_qp(&self, qpn: u32) {
        let mut lists = self.lists();
        // What the entry holds is dropped after the lock was let go of.
        let gone = lists.qps.remove(&qpn);
        lists.idle.retain(|i| i.qpn != qpn);
        drop(lists);
        drop(gone);
    }

    fn run(&self, device: &Device, alive: Duration) {
        let mut pulse = Pulse::new(alive, Instant::now());
        let mut lost = 0;
        while !self.stop.load(Ordering::Acquire) {
            if let Some(event) = device.next_error(LOOK) {
                self.event(&event);
                // More of them mostly follow, and meshes can wait until they are told.
                while let Some(event) = device.next_error(Duration::ZERO) {
                    self.event(&event);
                }
            }
            if let Some(soft) = device.soft() {
                let cores = soft.hca().health();
                // Events that came too fast for the queue between: what they were about is looked at instead.
                let all = soft.hca().lost_events();
                if std::mem::replace(&mut lost, all) < all {
                    self.lists().missed();
                    for (core, health) in cores.iter().enumerate() {
                        if let Some(reason) = health.dead.clone() {
                            self.event(&AsyncError::EngineDown { core, reason });
                        }
                    }
                }
                let rounds = cores.iter().map(|c| c.dead.is_none().then_some(c.rounds));
                if let Some(stall) = pulse.look(rounds, Instant::now()) {
                    self.report_to_all(stall);
                }
            }
            self.look();
        }
    }

    fn report_to_all(&self, what: impl std::fmt::Display) {
        for (_, health) in &self.lists().healths {
            health.report(&what);
        }
    }

    fn event(&self, event: &AsyncError) {
        let mut lists = self.lists();
        match event {
            AsyncError::Qp { qpn, fault } => lists.failed(*qpn, fault),
            AsyncError::PeerDown { peer, reason } => {
                let Some(entry) = lists.peers.get(peer) else {
                    return;
                };
                if !entry.has_left() {
                    let rank = entry.rank;
                    entry
                        .health
                        .report(format_args!("rank {rank} is gone: {reason}"));
                }
            }
            everyone => {
                drop(lists);
                self.report_to_all(everyone);
            }
        }
    }

    fn look(&self) {
        let mut lists = self.lists();
        let Lists {
            qps, idle, meshes, ..
        } = &mut *lists;
        idle.retain(|i| {
            let Some(entry) = qps.get(&i.qpn) else {
                return false;
            };
            let used = entry.qp.counters().flushed > i.flushed;
            if used {
                let (rank, qpn) = (entry.rank, i.qpn);
                entry.health.report(format_args!(
                    "QP {qpn:#08x}: work requests for rank {rank}, which has left"
                ));
            }
            !used
        });
        let meshes: Vec<_> = meshes
            .iter()
            .filter_map(|(_, mesh, health)| Some((mesh.upgrade()?, Arc::clone(health))))
            .collect();
        drop(lists);
        for (mesh, health) in meshes {
            // Whoever holds it is in a collective step, tells the others and hears of them by itself.
            let Ok(mut mesh) = mesh.try_lock() else {
                continue;
            };
            if let Some(reason) = health.to_tell() {
                mesh.fail(reason);
            }
            let seen = mesh.watch();
            // Whoever logs has no connection: others beat meanwhile.
            drop(mesh);
            if let Err(error) = seen {
                health.hear(&error);
            }
        }
        if self.lets_go {
            self.let_go();
        }
    }

    /// Ends what kernels of a failed communicator wait for, now that the host is told: queue pairs complete as if all had gone well, signals and
    /// counters are past anything awaited. Again at every look, for kernels that reset a signal and wait once more.
    fn let_go(&self) {
        let lists = self.lists();
        let qps = lists.qps.values().filter(|entry| entry.health.has_failed());
        let qps: Vec<_> = qps.map(|entry| entry.qp.clone()).collect();
        let words = lists
            .words
            .iter()
            .filter(|(_, health, _)| health.has_failed());
        let words: Vec<_> = words.map(|(_, _, memory)| memory.clone()).collect();
        drop(lists);
        for qp in qps.iter().filter(|qp| qp.state() == QpState::Ready) {
            if let Err(error) = qp.fail() {
                log::warn_apart(format_args!("QP {:#08x} stays as it is: {error}", qp.qpn()));
            }
        }
        for memory in words {
            if let Err(error) = release(&memory) {
                log::warn_apart(format_args!(
                    "kernels that wait for signals are not let go: {error}"
                ));
            }
        }
    }
}

/// Moves all words past anything awaited. What a work request adds at the same moment may be lost: nobody takes these for data.
fn release(memory: &Memory) -> doorbell::Result<()> {
    if memory.host_ptr().is_some() {
        for at in (0..memory.len()).step_by(8) {
            let old = memory.load(at)?;
            if released(old) != old {
                memory.store(at, released(old))?;
            }
        }
        return Ok(());
    }
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes)?;
    let mut fresh = Vec::with_capacity(bytes.len());
    for word in bytes.chunks_exact(8) {
        let mut old = [0; 8];
        old.copy_from_slice(word);
        fresh.extend_from_slice(&released(u64::from_ne_bytes(old)).to_ne_bytes());
    }
    match fresh == bytes {
        true => Ok(()),
        false => memory.write(0, &fresh),
    }
}

impl Lists {
    /// Whatever has failed without an event that was seen. Queue pairs of a peer that is gone are among them.
    fn missed(&mut self) {
        let idle: HashSet<u32> = self.idle.iter().map(|i| i.qpn).collect();
        let failed = self.qps.iter().filter_map(|(qpn, entry)| {
            let fault = entry.qp.error()?;
            // Failed or destroyed by its owner, who knows.
            let owner = fault.vendor() == Vendor::DESTROYED;
            (!owner && !idle.contains(qpn)).then_some((*qpn, fault))
        });
        let failed: Vec<_> = failed.collect();
        for (qpn, fault) in failed {
            self.failed(qpn, &fault);
        }
    }

    fn failed(&mut self, qpn: u32, fault: &QpFault) {
        let Some(entry) = self.qps.get(&qpn) else {
            return;
        };
        let rank = entry.rank;
        let left = || {
            let same = |p: &&PeerEntry| p.rank == rank && Arc::ptr_eq(&p.health, &entry.health);
            let peer = self.peers.values().find(same);
            peer.is_some_and(PeerEntry::has_left)
        };
        if fault.vendor() == Vendor::PEER_DEAD && left() {
            let flushed = entry.qp.counters().flushed;
            self.idle.push(Idle { qpn, flushed });
            return;
        }
        if fault.vendor() == Vendor::DESTROYED && entry.health.has_failed() {
            // By `let_go`.
            return;
        }
        entry
            .health
            .report(format_args!("QP {qpn:#08x} to rank {rank}: {fault}"));
    }
}
