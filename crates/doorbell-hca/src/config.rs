//! How an HCA is set up: engine cores, where they run, how they idle, and the limits that bound every wait.
//! Typed values only; whoever reads arguments or `DOORBELL_*` variables does so above this crate.

use std::time::Duration;

use crate::dma::DmaConfig;
use crate::error::{HcaError, Result};
use crate::mem::table::MAX_LOG_SLOTS;
use crate::record::Recording;
use crate::script::Script;

/// Who runs the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cores {
    /// One core without a thread: whoever waits drives it with [`Driver::poll`](crate::Driver::poll). For hosts whose CPUs are scarce.
    CallerDriven,
    /// So many engine threads, each on a CPU of its own where there are enough.
    Threads(usize),
}

/// Which CPUs engine threads are bound to.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Affinity {
    /// Chosen from the CPUs this process may use: near `numa` if given, one hardware thread a physical core first, no more than the
    /// cgroup's CPU quota allows.
    #[default]
    Auto,
    /// As `Auto`, on this NUMA node (the GPU's).
    Near {
        /// NUMA node.
        numa: u32,
    },
    /// These CPUs, in order.
    Cpus(Vec<usize>),
    /// Wherever the kernel likes.
    None,
}

/// What an engine thread does when it finds nothing to do: spin, then yield, then sleep a little longer each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdlePolicy {
    /// Spin this long after the last work.
    pub spin: Duration,
    /// Then yield between rounds for this long.
    pub yield_for: Duration,
    /// Then sleep between rounds, from 1 µs, doubling up to this. A GPU cannot wake a sleeper, so this bounds the latency.
    pub sleep_max: Duration,
}

impl Default for IdlePolicy {
    fn default() -> Self {
        Self {
            spin: Duration::from_micros(200),
            yield_for: Duration::from_millis(1),
            sleep_max: Duration::from_micros(50),
        }
    }
}

/// How an HCA is set up.
#[derive(Clone, Debug)]
pub struct HcaConfig {
    /// Who runs the engine.
    pub cores: Cores,
    /// Where engine threads run.
    pub affinity: Affinity,
    /// How they idle.
    pub idle: IdlePolicy,
    /// Base-two logarithm of the number of memory keys, 1 to 20. Each takes 64 bytes once used.
    pub log_regions: u32,
    /// WQEs of one QP executed before the next QP gets its turn, 1 to 4096. A collapsed CQE is written once per turn.
    pub batch: u32,
    /// How long a control segment may lag behind its doorbell before the QP gets `StaleIndex`.
    pub stale_limit: Duration,
    /// How long WRITE with immediate waits for a receive before the QP gets `NoReceive`.
    pub rnr_limit: Duration,
    /// Copies of GPU memory: order and patience.
    pub dma: DmaConfig,
    /// Faults to play, for tests and for who looks at them.
    pub script: Option<Script>,
    /// How long dropping a [`Mr`](crate::Mr) or [`HcaQp`](crate::HcaQp) waits before it leaks instead.
    pub drop_timeout: Duration,
    /// The flight recorder.
    pub record: Recording,
    /// Rank of this process in its job, if it has one: written into the record. Of fault scripts, who has none plays the rules of rank 0.
    pub rank: Option<u32>,
}

impl Default for HcaConfig {
    fn default() -> Self {
        Self {
            cores: Cores::Threads(1),
            affinity: Affinity::Auto,
            idle: IdlePolicy::default(),
            log_regions: 16,
            batch: 64,
            stale_limit: Duration::from_millis(20),
            rnr_limit: Duration::from_millis(100),
            dma: DmaConfig::default(),
            script: None,
            drop_timeout: Duration::from_secs(2),
            record: Recording::default(),
            rank: None,
        }
    }
}

impl HcaConfig {
    /// A caller-driven HCA with defaults otherwise.
    pub fn caller_driven() -> Self {
        Self {
            cores: Cores::CallerDriven,
            ..Self::default()
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let bad = |what: String| Err(HcaError::BadConfig { what });
        if !(1..=MAX_LOG_SLOTS).contains(&self.log_regions) {
            return bad(format!(
                "log_regions is {}, it must be 1 to {MAX_LOG_SLOTS}",
                self.log_regions
            ));
        }
        if !(1..=4096).contains(&self.batch) {
            return bad(format!("batch is {}, it must be 1 to 4096", self.batch));
        }
        if let Err(what) = self.record.check() {
            return bad(what);
        }
        match self.cores {
            Cores::Threads(n) if !(1..=256).contains(&n) => bad(format!(
                "{n} engine threads asked for, 1 to 256 are possible"
            )),
            _ => Ok(()),
        }
    }

    /// Number of engine cores.
    pub fn core_count(&self) -> usize {
        match self.cores {
            Cores::CallerDriven => 1,
            Cores::Threads(n) => n,
        }
    }
}
