//! A copy engine for tests: "device memory" that only it reaches, copies that happen late, in any order that the
//! contract allows, fail or stall on demand. It refuses what real engines refuse, so a pipeline that asks for it is found out.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

use super::{Dma, DmaOp, Staging, steps_of};

/// Device addresses begin here; far from anything that is mapped.
const DEVICE_BASE: u64 = 0x00d0_0000_0000_0000;

/// Memory of all devices of a test.
pub(super) struct MockMemory {
    bytes: Mutex<Vec<u8>>,
    size: usize,
    /// Called after every single copy with the state of the memory.
    #[allow(clippy::type_complexity, reason = "a test hook")]
    watch: Mutex<Option<Box<dyn FnMut(&[u8]) + Send>>>,
}

impl MockMemory {
    /// `size` bytes for each device (at most 8 devices).
    pub(super) fn new(size: usize) -> Arc<Self> {
        Arc::new(Self {
            bytes: Mutex::new(vec![0; size * 8]),
            size,
            watch: Mutex::new(None),
        })
    }

    /// Address of a byte of a device.
    pub(super) fn addr(&self, device: u64, offset: usize) -> u64 {
        DEVICE_BASE + device * self.size as u64 + offset as u64
    }

    pub(super) fn device_of(&self, addr: u64) -> Option<u64> {
        (addr >= DEVICE_BASE).then(|| (addr - DEVICE_BASE) / self.size as u64)
    }

    pub(super) fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let at = (addr - DEVICE_BASE) as usize;
        self.bytes()[at..at + len].to_vec()
    }

    pub(super) fn write(&self, addr: u64, bytes: &[u8]) {
        let at = (addr - DEVICE_BASE) as usize;
        self.bytes()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn word(&self, addr: u64) -> u64 {
        u64::from_le_bytes(self.read(addr, 8).try_into().unwrap())
    }

    pub(super) fn watch(&self, watch: impl FnMut(&[u8]) + Send + 'static) {
        *self.watch.lock().unwrap() = Some(Box::new(watch));
    }

    fn copy(&self, op: DmaOp) {
        let (device, host) = (
            |addr: u64| (addr - DEVICE_BASE) as usize,
            |addr: u64| addr as usize,
        );
        let len = op.len as usize;
        let mut bytes = self.bytes();
        match (self.device_of(op.src), self.device_of(op.dst)) {
            (Some(_), Some(_)) => {
                bytes.copy_within(device(op.src)..device(op.src) + len, device(op.dst))
            }
            // SAFETY: the pipeline under test got these host ranges from the test, which keeps them alive.
            (Some(_), None) => unsafe {
                let to: *mut u8 = std::ptr::with_exposed_provenance_mut(host(op.dst));
                std::ptr::copy_nonoverlapping(bytes[device(op.src)..].as_ptr(), to, len);
            },
            // SAFETY: as above.
            (None, Some(_)) => unsafe {
                let from: *const u8 = std::ptr::with_exposed_provenance(host(op.src));
                std::ptr::copy_nonoverlapping(from, bytes[device(op.dst)..].as_mut_ptr(), len);
            },
            (None, None) => panic!("a host to host copy was given to a copy engine: {op:?}"),
        }
        if let Some(watch) = &mut *self.watch.lock().unwrap() {
            watch(&bytes);
        }
    }
}

struct Under {
    steps: Vec<Vec<DmaOp>>,
    /// Polls until it is done.
    polls: u32,
}

struct Inner {
    random: StdRng,
    next: u64,
    under: BTreeMap<u64, Under>,
    done: BTreeSet<u64>,
    /// `submit` fails from now on.
    refuse: bool,
    /// `poll` fails for the next batch that would be done.
    fail_next: bool,
    stall: bool,
    batches: u64,
    copies: u64,
}

/// One engine.
pub(super) struct Mock {
    memory: Arc<MockMemory>,
    device: u64,
    pub(super) ordered: bool,
    /// Batches take up to so many polls.
    pub(super) latency: u32,
    /// Devices that it reaches.
    pub(super) peers: Vec<u64>,
    /// Does it reach host memory other than its staging?
    pub(super) pinned: bool,
    pub(super) max_batch: usize,
    /// Host ranges longer than this are not pinned from end to end.
    pub(super) pinned_len: u64,
    staging: Mutex<Vec<(u64, u64)>>,
    inner: Mutex<Inner>,
}

impl Mock {
    pub(super) fn build(memory: &Arc<MockMemory>, device: u64, seed: u64) -> Self {
        Self {
            memory: Arc::clone(memory),
            device,
            ordered: true,
            latency: 3,
            peers: Vec::new(),
            pinned: true,
            max_batch: 256,
            pinned_len: u64::MAX,
            staging: Mutex::default(),
            inner: Mutex::new(Inner {
                random: StdRng::seed_from_u64(seed),
                next: 1,
                under: BTreeMap::new(),
                done: BTreeSet::new(),
                refuse: false,
                fail_next: false,
                stall: false,
                batches: 0,
                copies: 0,
            }),
        }
    }

    pub(super) fn new(memory: &Arc<MockMemory>, seed: u64) -> Arc<Self> {
        Arc::new(Self::build(memory, 0, seed))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stall(&self, on: bool) {
        self.inner().stall = on;
    }

    pub(super) fn refuse(&self, on: bool) {
        self.inner().refuse = on;
    }

    pub(super) fn fail_next(&self) {
        self.inner().fail_next = true;
    }

    /// Batches and copies so far.
    pub(super) fn counts(&self) -> (u64, u64) {
        let inner = self.inner();
        (inner.batches, inner.copies)
    }

    fn check(&self, op: &DmaOp) -> Result<(), String> {
        let (from, to) = (self.memory.device_of(op.src), self.memory.device_of(op.dst));
        let reached = |d: u64| d == self.device || self.peers.contains(&d);
        match (from, to) {
            // An engine with an order sees to them itself; of another they are not asked.
            (Some(a), Some(b)) if a == b && !self.ordered => {
                return Err(format!("a copy within device {a} would never end: {op:?}"));
            }
            (Some(a), Some(b)) if !(reached(a) && reached(b)) => {
                return Err(format!("no way between devices {a} and {b}"));
            }
            (None, None) => return Err("host to host".into()),
            (Some(d), None) | (None, Some(d)) if d != self.device => {
                return Err(format!("device {d} is not this engine's"));
            }
            _ => {}
        }
        let host = if from.is_none() {
            Some(op.src)
        } else {
            to.is_none().then_some(op.dst)
        };
        if let (Some(host), false) = (host, self.pinned) {
            let staged = self
                .staging
                .lock()
                .unwrap()
                .iter()
                .any(|&(at, len)| at <= host && host + op.len <= at + len);
            // A buffer of another engine of the same process is pinned too; the mock cannot see it, so cross tests pin.
            if !staged {
                return Err(format!("host memory at {host:#x} is not pinned"));
            }
        }
        Ok(())
    }
}

impl Dma for Mock {
    fn submit(&self, ops: &[DmaOp], steps: &[usize]) -> Result<u64, String> {
        assert!(!ops.is_empty() && ops.len() <= self.max_batch);
        assert!(
            self.ordered || steps.is_empty(),
            "no order was promised to begin with"
        );
        assert!(
            steps_of(ops, steps).all(|step| !step.is_empty()),
            "{steps:?}"
        );
        for op in ops {
            self.check(op).unwrap_or_else(|why| panic!("{why}"));
        }
        let mut inner = self.inner();
        if inner.refuse {
            return Err("refused by the mock".into());
        }
        let ticket = inner.next;
        inner.next += 1;
        inner.batches += 1;
        inner.copies += ops.len() as u64;
        let polls = inner.random.random_range(0..=self.latency);
        inner.under.insert(
            ticket,
            Under {
                steps: steps_of(ops, steps).map(<[DmaOp]>::to_vec).collect(),
                polls,
            },
        );
        Ok(ticket)
    }

    fn poll(&self, ticket: u64) -> Result<bool, String> {
        let mut inner = self.inner();
        if inner.done.remove(&ticket) {
            return Ok(true);
        }
        if inner.stall {
            return Ok(false);
        }
        let oldest = inner.under.keys().next().copied();
        let Some(under) = inner.under.get_mut(&ticket) else {
            return Err(format!("ticket {ticket} is not known"));
        };
        if under.polls > 0 || (self.ordered && oldest != Some(ticket)) {
            under.polls = under.polls.saturating_sub(1);
            return Ok(false);
        }
        let steps = inner
            .under
            .remove(&ticket)
            .map(|under| under.steps)
            .unwrap_or_default();
        if std::mem::take(&mut inner.fail_next) {
            return Err("failed by the mock".into());
        }
        for mut ops in steps {
            ops.shuffle(&mut inner.random);
            for op in ops {
                self.memory.copy(op);
            }
        }
        Ok(true)
    }

    fn ordered(&self) -> bool {
        self.ordered
    }

    fn max_batch(&self) -> usize {
        self.max_batch
    }

    fn device(&self) -> Option<u64> {
        Some(self.device)
    }

    fn reaches_device(&self, other: &dyn Dma) -> bool {
        other.device().is_some_and(|d| self.peers.contains(&d))
    }

    fn reaches_host(&self, addr: u64, len: u64) -> bool {
        (self.pinned && len <= self.pinned_len)
            || self
                .staging
                .lock()
                .unwrap()
                .iter()
                .any(|&(at, all)| at <= addr && addr + len <= at + all)
    }

    fn staging(&self, len: usize) -> Result<Staging, String> {
        let staging = Staging::heap(len)?;
        self.staging
            .lock()
            .unwrap()
            .push((staging.ptr.as_ptr().expose_provenance() as u64, len as u64));
        Ok(staging)
    }
}
