//! The proxy initiator: GPU threads write commands, a CPU thread builds the work requests and rings.
//!
//! What NCCL's and NVSHMEM's proxies do, made as fast as we can, because it is the baseline that GPU-initiated posting is
//! compared with. A [`Proxy`] has a ring of 32-byte commands for each queue pair in memory that GPU and CPU share; its threads
//! take what is there, post it in one go with the device code's own functions, ring once, and publish how far the
//! completions have come. The kernel is `proxy_put`.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use doorbell_device::{Deadline, Local, Post, Remote, Ticket};
use doorbell_gpu::{Buffer, MemKind};
use doorbell_kernels::params;
use doorbell_wire::Key;

use crate::cpu::{CpuQp, CpuQueue};
use crate::device::{Device, Inner as DeviceInner};
use crate::fork::Here;
use crate::qp::QpCore;
use crate::{Error, Result};

/// Commands taken from one queue before the next gets its turn.
const BATCH: usize = 64;
/// Send queue slots that one command can take: 4 GiB in pieces of one.
const SLOTS: u64 = 4;
/// Bytes of a command.
const COMMAND: usize = size_of::<params::Command>();
/// Bytes from one queue's words to the next.
const LINE: usize = 64;
/// Marks an error in a consumer index (see [`params::Proxy`]), and the bits of [`doorbell_device::Error::code`].
const FAILED: u64 = 1 << 63;
const CODE: u64 = (1 << 48) - 1;
/// Fruitless passes before a thread yields, and time before it sleeps between passes.
const SPINS: u32 = 2000;
const SLEEP_AFTER: Duration = Duration::from_millis(5);
const SLEEP: Duration = Duration::from_micros(20);

/// How a proxy is set up.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// Commands in each ring: a power of two, at least 32.
    pub depth: u32,
    /// CPU threads; queues are dealt out among them.
    pub threads: usize,
    /// CPUs to bind the threads to, in order; empty leaves them to the system.
    pub cpus: Vec<usize>,
    /// Key of the region that commands read from.
    pub local_key: u32,
    /// Key of the region that commands write to.
    pub remote_key: u32,
}

/// Threads that post for GPU kernels. Dropping it stops them.
pub struct Proxy {
    shared: Arc<Shared>,
    threads: Here<Vec<JoinHandle<()>>>,
    memory: Memory,
    queues: usize,
    depth: u32,
}

struct Memory {
    /// Commands, then consumer indexes: written by one side, read by the other.
    rings: Arc<Buffer>,
    /// Producer indexes, then copies of the consumer indexes: the GPU's own.
    indexes: Buffer,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    commands: AtomicU64,
    rings: AtomicU64,
    /// The first failure: queue number plus one from bit 48 on, [`doorbell_device::Error::code`] below.
    failed: AtomicU64,
}

/// What a proxy has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxyCounters {
    /// Commands taken.
    pub commands: u64,
    /// Doorbells rung.
    pub rings: u64,
}

impl Proxy {
    /// Starts threads that serve one command ring for each of `qps`, which they post to from now on.
    pub fn start<Q: AsRef<QpCore>>(
        device: &Device,
        qps: &[Q],
        config: &ProxyConfig,
    ) -> Result<Self> {
        let (n, depth) = (qps.len(), config.depth);
        let bad = |object, value: String, remedy| {
            Err(Error::Argument {
                object,
                value,
                remedy,
            })
        };
        if n == 0 || config.threads == 0 {
            return bad(
                "proxy",
                format!("{n} queues, {} threads", config.threads),
                "use at least one of each",
            );
        }
        if !depth.is_power_of_two() || !(32..=1 << 20).contains(&depth) {
            return bad(
                "depth of a command ring",
                depth.to_string(),
                "use a power of two from 32 to 1048576",
            );
        }
        let commands = n * depth as usize * COMMAND;
        let gpu = device.gpu();
        let rings = Arc::new(gpu.alloc(MemKind::PinnedHost, commands + n * LINE)?);
        let indexes = gpu.alloc(MemKind::Device, 2 * n * LINE)?;
        let Some(base) = rings.host_ptr() else {
            return Err(Error::Unsupported {
                what: "a command ring",
                remedy: "host memory is needed that GPU and CPU share",
            });
        };
        let mut shares: Vec<Vec<Queue>> = (0..config.threads.min(n)).map(|_| Vec::new()).collect();
        let workers = shares.len();
        for (i, qp) in qps.iter().enumerate() {
            // SAFETY: both offsets are inside the buffer, which is as long as computed above.
            let (ring, ci) = unsafe {
                (
                    base.add(i * depth as usize * COMMAND),
                    base.add(commands + i * LINE),
                )
            };
            shares[i % workers].push(Queue {
                cpu: CpuQp::new(qp.as_ref())?,
                commands: Commands {
                    ring: ring.cast(),
                    ci: ci.cast(),
                    _memory: Arc::clone(&rings),
                },
                number: i,
                depth: u64::from(depth),
                slots: u64::from(qp.as_ref().depth()),
            });
        }
        let shared = Arc::new(Shared::default());
        let mut proxy = Self {
            shared,
            threads: Here::new(gpu, Vec::new()),
            memory: Memory { rings, indexes },
            queues: n,
            depth,
        };
        for (i, queues) in shares.into_iter().enumerate() {
            let (shared, device) = (Arc::clone(&proxy.shared), Arc::clone(&device.inner));
            let cpu = config.cpus.get(i % config.cpus.len().max(1)).copied();
            let keys = (Key(config.local_key), Key(config.remote_key));
            let thread = std::thread::Builder::new()
                .name(format!("doorbell-proxy{i}"))
                .spawn(move || serve(&shared, &device, queues, keys, cpu))
                .map_err(|source| Error::Os {
                    what: "starting a proxy thread",
                    source: doorbell_hca::limits::thread(source),
                })?;
            proxy.threads.push(thread);
        }
        Ok(proxy)
    }

    /// Fills in what the kernel `proxy_put` must know of this proxy; the rest of the parameters is the caller's.
    pub fn fill(&self, params: &mut params::Proxy) {
        let (rings, indexes) = (
            self.memory.rings.device_addr(),
            self.memory.indexes.device_addr(),
        );
        params.ring = rings;
        params.ci = rings + (self.queues * self.depth as usize * COMMAND) as u64;
        params.pi = indexes;
        params.ci_cache = indexes + (self.queues * LINE) as u64;
        params.queues = self.queues as u32;
        params.depth = self.depth;
    }

    /// What it has done so far.
    pub fn counters(&self) -> ProxyCounters {
        ProxyCounters {
            commands: self.shared.commands.load(Ordering::Relaxed),
            rings: self.shared.rings.load(Ordering::Relaxed),
        }
    }

    /// The first queue that failed, by number, if one did. It is served no longer; its kernels are told.
    pub fn failed(&self) -> Option<(usize, doorbell_device::Error)> {
        let word = self.shared.failed.load(Ordering::Acquire);
        let queue = (word >> 48).checked_sub(1)?;
        doorbell_device::Error::from_code(word & CODE).map(|e| (queue as usize, e))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if !self.threads.is_here() {
            return;
        }
        for thread in self.threads.drain(..) {
            // Passes are bounded, and each looks at `stop`.
            if thread.join().is_err() {
                tracing::error!("a proxy thread had panicked");
            }
        }
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy")
            .field("queues", &self.queues)
            .field("depth", &self.depth)
            .field("threads", &self.threads.len())
            .field("counters", &self.counters())
            .finish()
    }
}

struct Queue {
    cpu: CpuQp,
    commands: Commands,
    number: usize,
    depth: u64,
    slots: u64,
}

/// A command ring and its consumer index.
struct Commands {
    ring: NonNull<[AtomicU64; 4]>,
    ci: NonNull<AtomicU64>,
    _memory: Arc<Buffer>,
}

// SAFETY: the pointers are into `_memory`, which is shared by atomics only.
unsafe impl Send for Commands {}

impl Commands {
    /// The command with number `index`, once both its halves are there.
    #[inline(always)]
    fn get(&self, index: u64, mask: u64) -> Option<(u64, u64, u64)> {
        // SAFETY: inside the ring, whose words are atomics; see `_memory`.
        let [local, size, remote, qp] = unsafe { self.ring.add((index & mask) as usize).as_ref() };
        let sequence = (index as u32).wrapping_add(1);
        let size = size.load(Ordering::Acquire);
        if (size >> 32) as u32 != sequence || (qp.load(Ordering::Acquire) >> 32) as u32 != sequence
        {
            return None;
        }
        Some((
            local.load(Ordering::Relaxed),
            size & u64::from(u32::MAX),
            remote.load(Ordering::Relaxed),
        ))
    }

    #[inline(always)]
    fn publish(&self, done: u64) {
        // SAFETY: as in `get`.
        unsafe { self.ci.as_ref() }.store(done, Ordering::Release);
    }
}

/// One queue while its thread runs.
struct Served<'a> {
    queue: CpuQueue<'a>,
    commands: &'a Commands,
    number: usize,
    mask: u64,
    slots: u64,
    /// Commands taken, commands complete.
    taken: u64,
    done: u64,
    /// Slots posted, slots complete.
    posted: u64,
    free_below: u64,
    /// The last slot of each command that is under way.
    last_slot: Box<[u64]>,
    failed: bool,
}

/// Work done in one pass.
struct Pass {
    taken: u64,
    rung: bool,
}

impl Served<'_> {
    #[inline(always)]
    fn pass(&mut self, keys: (Key, Key)) -> Result<Pass, doorbell_device::Error> {
        // Room is known and nothing here waits, so the deadline is never looked at.
        let how = Post::by(Deadline(u64::MAX))
            .without_ringing()
            .without_space_check();
        let start = self.taken;
        for _ in 0..BATCH {
            if self.posted + SLOTS > self.free_below + self.slots {
                break;
            }
            let Some((local, len, remote)) = self.commands.get(self.taken, self.mask) else {
                break;
            };
            let ticket = self.queue.put(
                Remote {
                    addr: remote,
                    key: keys.1,
                },
                Local {
                    addr: local,
                    key: keys.0,
                    len,
                },
                how,
            )?;
            self.last_slot[(self.taken & self.mask) as usize] = ticket.0;
            self.posted = ticket.0 + 1;
            self.taken += 1;
        }
        let taken = self.taken - start;
        if taken > 0 {
            self.queue.ring(Deadline(u64::MAX))?;
        }
        let before = self.done;
        while self.done < self.taken {
            let slot = self.last_slot[(self.done & self.mask) as usize];
            if !self.queue.poll(Ticket(slot))? {
                break;
            }
            self.free_below = slot + 1;
            self.done += 1;
        }
        if self.done != before {
            self.commands.publish(self.done);
        }
        Ok(Pass {
            taken,
            rung: taken > 0,
        })
    }

    fn busy(&self) -> bool {
        self.done < self.taken
    }
}

fn serve(
    shared: &Shared,
    device: &DeviceInner,
    mut queues: Vec<Queue>,
    keys: (Key, Key),
    cpu: Option<usize>,
) {
    if let Some(cpu) = cpu {
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu);
        if let Err(e) = rustix::thread::sched_setaffinity(None, &set) {
            tracing::warn!(cpu, "cannot bind a proxy thread to its CPU: {e}");
        }
    }
    let mut served: Vec<Served<'_>> = Vec::with_capacity(queues.len());
    for q in &mut queues {
        match q.cpu.queue() {
            Ok(queue) => served.push(Served {
                queue,
                commands: &q.commands,
                number: q.number,
                mask: q.depth - 1,
                slots: q.slots,
                taken: 0,
                done: 0,
                posted: 0,
                free_below: 0,
                last_slot: vec![0; q.depth as usize].into_boxed_slice(),
                failed: false,
            }),
            Err(e) => tracing::error!(queue = q.number, "proxy: {e}"),
        }
    }
    let mut idle = 0_u32;
    let mut idle_since = Instant::now();
    while !shared.stop.load(Ordering::Acquire) {
        let mut worked = device.provider.drive();
        for s in &mut served {
            if s.failed {
                continue;
            }
            match s.pass(keys) {
                Ok(pass) => {
                    if pass.rung {
                        shared.commands.fetch_add(pass.taken, Ordering::Relaxed);
                        shared.rings.fetch_add(1, Ordering::Relaxed);
                    }
                    worked |= pass.rung | s.busy();
                }
                Err(e) => {
                    s.failed = true;
                    s.commands.publish(FAILED | e.code());
                    let word = (s.number as u64 + 1) << 48 | (e.code() & CODE);
                    let _ = shared.failed.compare_exchange(
                        0,
                        word,
                        Ordering::AcqRel,
                        Ordering::Acquire,
                    );
                    tracing::error!(queue = s.number, "proxy: {e}");
                }
            }
        }
        if worked {
            idle = 0;
            continue;
        }
        // A GPU cannot wake a sleeper: spin, then yield, then sleep a little.
        idle += 1;
        if idle < SPINS {
            std::hint::spin_loop();
        } else if idle == SPINS {
            idle_since = Instant::now();
        } else if idle_since.elapsed() < SLEEP_AFTER {
            std::thread::yield_now();
        } else {
            std::thread::sleep(SLEEP);
        }
    }
}
