//! A device whose memory only its copy engine reaches. Copies take their time, run in any order that is allowed, get stuck or fail on demand.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use doorbell_hca::dma::{Dma, DmaOp, steps_of};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Device addresses begin here: nothing is mapped there.
pub(crate) const BASE: u64 = 0x00d0_0000_0000_0000;

/// Sees the memory after each single copy, as a thread on the device might.
type Watch = Box<dyn FnMut(&[u8]) + Send>;

/// A batch under way: its ticket, its steps, and polls until it is done.
type Waiting = (u64, Vec<Vec<DmaOp>>, u32);

/// A device with a copy engine that moves a batch when it has been polled often enough.
pub(crate) struct Device {
    memory: Mutex<Vec<u8>>,
    batches: Mutex<Vec<Waiting>>,
    next: AtomicU64,
    polls: u32,
    random: Option<Mutex<StdRng>>,
    ordered: bool,
    watch: Mutex<Option<Watch>>,
    pub(crate) stuck: AtomicBool,
    pub(crate) broken: AtomicBool,
    /// Copies so far, and batches.
    pub(crate) copies: AtomicU64,
    /// So many batches go well before one fails, and all after it.
    pub(crate) good: AtomicU64,
}

impl Device {
    /// `len` bytes; a batch takes `polls` polls.
    pub(crate) fn new(len: usize, polls: u32, ordered: bool) -> Arc<Self> {
        Arc::new(Self::build(len, polls, ordered))
    }

    /// As [`Self::new`], with up to `polls` polls a batch, so that later ones may end first.
    #[allow(dead_code, reason = "not every test program needs it")]
    pub(crate) fn random(len: usize, polls: u32, ordered: bool, seed: u64) -> Arc<Self> {
        let random = Some(Mutex::new(StdRng::seed_from_u64(seed)));
        Arc::new(Self {
            random,
            ..Self::build(len, polls, ordered)
        })
    }

    fn build(len: usize, polls: u32, ordered: bool) -> Self {
        Self {
            memory: Mutex::new(vec![0; len]),
            batches: Mutex::default(),
            next: AtomicU64::new(1),
            polls,
            random: None,
            ordered,
            watch: Mutex::default(),
            stuck: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            copies: AtomicU64::new(0),
            good: AtomicU64::new(u64::MAX),
        }
    }

    #[allow(dead_code, reason = "not every test program needs it")]
    pub(crate) fn watch(&self, watch: impl FnMut(&[u8]) + Send + 'static) {
        *self.watch.lock().expect("not poisoned") = Some(Box::new(watch));
    }

    fn memory(&self) -> MutexGuard<'_, Vec<u8>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copy(&self, op: &DmaOp) {
        let mut memory = self.memory();
        let len = op.len as usize;
        let inside = |addr: u64| (addr >= BASE).then(|| (addr - BASE) as usize);
        match (inside(op.src), inside(op.dst)) {
            (Some(from), Some(to)) => memory.copy_within(from..from + len, to),
            (None, None) => panic!("a copy between host addresses was asked for"),
            (Some(from), None) => {
                // SAFETY: the engine checked the host range against its region, which outlives the copy (that is what is tested).
                unsafe {
                    std::ptr::copy(memory[from..from + len].as_ptr(), op.dst as *mut u8, len)
                };
            }
            (None, Some(to)) => {
                // SAFETY: as above.
                unsafe {
                    std::ptr::copy(op.src as *const u8, memory[to..to + len].as_mut_ptr(), len)
                };
            }
        }
        if let Some(watch) = &mut *self.watch.lock().expect("not poisoned") {
            watch(&memory);
        }
    }

    /// Batches that were asked for so far.
    #[allow(dead_code, reason = "not every test program needs it")]
    pub(crate) fn batches(&self) -> u64 {
        self.next.load(Ordering::Relaxed) - 1
    }

    #[allow(dead_code, reason = "not every test program needs it")]
    pub(crate) fn batches_under_way(&self) -> usize {
        self.batches.lock().expect("not poisoned").len()
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.memory()[offset..offset + len].to_vec()
    }

    pub(crate) fn fill(&self, offset: usize, bytes: &[u8]) {
        self.memory()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

impl Dma for Device {
    fn submit(&self, ops: &[DmaOp], steps: &[usize]) -> Result<u64, String> {
        if self.broken.load(Ordering::Relaxed) {
            return Err("broken on purpose".into());
        }
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        self.copies.fetch_add(ops.len() as u64, Ordering::Relaxed);
        let polls = match &self.random {
            Some(random) => random
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .random_range(0..=self.polls),
            None => self.polls,
        };
        self.batches.lock().expect("not poisoned").push((
            ticket,
            steps_of(ops, steps).map(<[DmaOp]>::to_vec).collect(),
            polls,
        ));
        Ok(ticket)
    }

    fn poll(&self, ticket: u64) -> Result<bool, String> {
        if self.stuck.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let mut batches = self.batches.lock().expect("not poisoned");
        let Some(at) = batches.iter().position(|b| b.0 == ticket) else {
            return Ok(true);
        };
        if batches[at].2 > 0 || (self.ordered && at > 0) {
            batches[at].2 = batches[at].2.saturating_sub(1);
            return Ok(false);
        }
        let (_, steps, _) = batches.remove(at);
        let left = self.good.load(Ordering::Relaxed);
        if left == 0 {
            return Err("failed on purpose".into());
        }
        self.good.store(left.saturating_sub(1), Ordering::Relaxed);
        // Any order is allowed within a step: last first is as good as any.
        steps
            .iter()
            .for_each(|ops| ops.iter().rev().for_each(|op| self.copy(op)));
        Ok(true)
    }

    fn ordered(&self) -> bool {
        self.ordered
    }

    fn max_batch(&self) -> usize {
        4
    }
}
