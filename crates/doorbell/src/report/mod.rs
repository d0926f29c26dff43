//! What a process can say about its devices and queue pairs, for who looks at it from outside: `doorbell dump`, `doorbell stat`.
//!
//! A [`DeviceReport`] is a copy of what is there anyway: the engine's counters and indexes, the words and rings in memory, the
//! indexes that device code keeps. Nothing is recorded for it and nothing is stopped, so it costs a running queue pair nothing; a queue
//! pair is looked at twice, and only of one that stands still a [verdict](QpReport::verdict) says what is missing.
//! [`server`] gives reports to other processes of the same user.

use std::collections::HashMap;
use std::time::Duration;

use doorbell_hca as rec;
use doorbell_hca::record::QpRecord;
use serde::{Deserialize, Serialize};

use crate::device::{Device, Inner};
use crate::qp::{QpCore, QpCounters};
use firing::Played;
use queue::Facts;
use verdict::Ground;

mod cqes;
mod firing;
mod latency;
pub mod missing;
pub mod moment;
mod parts;
pub mod postmortem;
mod queue;
pub mod server;
pub mod trace;
mod verdict;
mod who;

pub use firing::FiringReport;
pub use latency::quantile;
pub use parts::{EventReport, KernelReport, PendingReport, RegionReport, WaitReport};
pub use server::disarm;
pub use who::is_stopped;

/// Name and version of the document that [`server`] gives out.
pub const SCHEMA: &str = "doorbell-report/1";

/// The flight records that a process has left, and their files.
pub fn records(pid: u32) -> Vec<(u32, std::path::PathBuf)> {
    doorbell_hca::record::dir::files(Some(pid))
}

/// See [`Device::diagnosis`].
pub(crate) fn diagnosis(id: u64) -> Vec<String> {
    /// Thousands of queue pairs may stand for one reason.
    const MOST_LINES: usize = 8;
    const PATIENCE: Duration = Duration::from_millis(500);
    let own = server::own(true);
    let pid = own.pid;
    let recorded = own.devices.iter().all(|d| d.recorded);
    let mut reports = vec![own];
    reports.extend(server::find_others(Some(pid), server::FULL, PATIENCE).0);
    missing::name(&mut reports);
    let devices = &reports[0].devices;
    let waits: Vec<_> = devices.iter().flat_map(|d| &d.waits).collect();
    // A wait that is not shown has said it as well.
    let mut lines: Vec<_> = waits.iter().map(|w| w.verdict.clone()).collect();
    let stuck = devices.iter().filter(|d| d.id == id);
    let mut more = 0;
    for qp in stuck.flat_map(|d| &d.qps).filter(|q| q.stuck) {
        // A wait for it has said so.
        let said = |verdict: &str| lines.iter().any(|l| l.contains(verdict));
        let told = missing::end(&reports, qp).is_some_and(|(_, _, far)| said(&far.verdict));
        let peer = qp.peer.as_ref().filter(|_| !told);
        let text = match (said(&qp.verdict), peer) {
            (true, None) => continue,
            (true, Some(peer)) => format!("QP {:#08x}: its other end is {peer}", qp.qpn),
            (false, None) => format!("QP {:#08x}: {}", qp.qpn, qp.verdict),
            (false, Some(peer)) => format!(
                "QP {:#08x}: {}; its other end is {peer}",
                qp.qpn, qp.verdict
            ),
        };
        match lines.len() < MOST_LINES {
            true => lines.push(text),
            false => more += 1,
        }
    }
    if waits.len() > MOST_LINES {
        lines.truncate(MOST_LINES);
        lines.push(format!(
            "{} more waits last: `doorbell dump {pid}` shows all",
            waits.len() - MOST_LINES
        ));
    }
    if more > 0 {
        lines.push(format!(
            "{more} more queue pairs are stuck: `doorbell dump {pid}` shows all"
        ));
    }
    if lines.is_empty() {
        lines.push(match recorded {
            true => NOTHING.to_owned(),
            false => format!("{NOTHING}, as far as can be told without a flight recorder (DOORBELL_RECORD=off): who waits for a word, and what is written and not rung, is not seen"),
        });
    }
    lines
}

/// How the only line of a [diagnosis](Device::diagnosis) begins that found nothing.
pub const NOTHING: &str = "no wait and no queue pair of this process lacks anything";

/// What a process does whose report it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    /// It runs, and answered for itself.
    #[default]
    Runs,
    /// It runs and did not answer.
    Silent,
    /// It is stopped, by a signal or a debugger.
    Stopped,
    /// It is dead.
    Ended,
    /// It is in another PID namespace, from which nothing is known.
    Elsewhere,
}

/// Everything that a process has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessReport {
    /// [`SCHEMA`].
    pub schema: String,
    /// Release that the process uses.
    pub version: String,
    /// The process, as it numbers itself.
    pub pid: u32,
    /// Nanoseconds of the monotonic clock.
    pub at_ns: u64,
    /// Processor time that it has used, nanoseconds.
    pub cpu_ns: u64,
    /// Rank in its job, if a launcher gave it one.
    #[serde(default)]
    pub rank: Option<u32>,
    /// Its command line.
    #[serde(default)]
    pub command: String,
    /// Why it did not answer for itself, if this was read from its flight record.
    #[serde(default)]
    pub post_mortem: Option<String>,
    /// What it does.
    #[serde(default)]
    pub condition: Condition,
    /// When it was last seen to be alive, nanoseconds of the monotonic clock; of one that runs, `at_ns`.
    #[serde(default)]
    pub alive_ns: u64,
    /// Open devices.
    pub devices: Vec<DeviceReport>,
}

/// A device and its queue pairs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Number by which peers know its HCA.
    pub id: u64,
    /// `host`, or the GPU's name.
    pub gpu: String,
    /// Whoever waits runs the engine.
    pub caller_driven: bool,
    /// Engine cores.
    pub cores: Vec<CoreReport>,
    /// Queue pairs.
    pub qps: Vec<QpReport>,
    /// Counters of the RoCE port, by the names of the rdma tool.
    pub roce: Vec<(String, u64)>,
    /// Nanoseconds from doorbell to completion of requests of the latest second, and how many took as long: as far as the flight
    /// recorder kept them, in order, 0 for less than a microsecond.
    #[serde(default)]
    pub latencies: Vec<(u64, u64)>,
    /// Memory regions, as far as the flight recorder has room for them.
    #[serde(default)]
    pub regions: Vec<RegionReport>,
    /// Waits that have lasted.
    #[serde(default)]
    pub waits: Vec<WaitReport>,
    /// What became of each rule of the fault script that is played.
    #[serde(default)]
    pub faults: Vec<String>,
    /// Each time that one was played, as far as it is remembered, oldest first.
    #[serde(default)]
    pub firings: Vec<FiringReport>,
    /// A flight recorder is on. Without one regions, waits and what is written and not rung are not known.
    #[serde(default = "yes")]
    pub recorded: bool,
    /// Regions and queue pairs for which it had no room.
    #[serde(default)]
    pub left_out: (u64, u64),
    /// What shows that the flight record of which this was made is damaged: nothing of it can be relied on.
    #[serde(default)]
    pub damage: Option<String>,
    /// The latest kernels.
    #[serde(default)]
    pub kernels: Vec<KernelReport>,
}

fn yes() -> bool {
    true
}

/// An engine core.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreReport {
    /// Its number.
    #[serde(default)]
    pub number: u64,
    /// Why it is dead, if it is.
    pub dead: Option<String>,
    /// Rounds so far: its heartbeat.
    pub rounds: u64,
    /// Rounds since the first look.
    pub rounds_since: u64,
    /// Queue pairs that it owns.
    pub qps: u64,
    /// What it counts.
    pub counters: Vec<(String, u64)>,
    /// When it last worked, or looked around while it idled; nanoseconds of the monotonic clock, 0 if that is not recorded.
    #[serde(default)]
    pub seen_ns: u64,
    /// Processor time of its engine thread, nanoseconds; nothing if whoever waits runs it.
    #[serde(default)]
    pub cpu_ns: Option<u64>,
}

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QpReport {
    /// QP number.
    pub qpn: u32,
    /// Number of its CQ.
    pub cqn: u32,
    /// Engine core.
    pub core: Option<u64>,
    /// `reset`, `ready`, `in error`, `destroyed`.
    pub state: String,
    /// Slots of the send queue.
    pub depth: u32,
    /// How it is rung.
    pub handler: String,
    /// `per-slot` or `collapsed`.
    pub cq: String,
    /// What its poster keeps; nothing if it was not exported, or to memory that the CPU does not reach.
    pub poster: Option<Poster>,
    /// What the engine has seen.
    pub engine: Option<Seen>,
    /// The doorbell record: a producer index modulo 2^16.
    pub record: Option<u16>,
    /// The doorbell word: a producer index modulo 2^24 (of a producer word: 2^64).
    pub doorbell: Option<u64>,
    /// The next WQE that is not complete, decoded, with its bytes; nothing if there is none.
    pub next: Option<String>,
    /// The newest CQE, in words and bytes.
    pub cqe: Option<String>,
    /// First error.
    pub error: Option<String>,
    /// What the engine has done for it.
    pub counters: Vec<(String, u64)>,
    /// What its RoCE connection counts, by the names of the rdma tool.
    pub roce: Vec<(String, u64)>,
    /// Where its requests go: `loopback`, `shm`, `roce`, `verbs`, or nowhere yet.
    #[serde(default)]
    pub link: String,
    /// Number of the queue pair at the other end.
    #[serde(default)]
    pub peer_qpn: Option<u32>,
    /// What the other end says of itself, if it was asked and answered.
    #[serde(default)]
    pub peer: Option<String>,
    /// Slots that the engine has seen written, rung or not.
    #[serde(default)]
    pub posted: Option<u64>,
    /// What the engine has set it aside for.
    #[serde(default)]
    pub parked: Option<String>,
    /// Requests that are written and not complete.
    #[serde(default)]
    pub pending: Vec<PendingReport>,
    /// The latest events, oldest first.
    #[serde(default)]
    pub events: Vec<EventReport>,
    /// A completion that the engine wrote and that is not in the CQ, or not as it was written; and of which slot.
    #[serde(default)]
    pub lacks: Option<String>,
    /// See above.
    #[serde(default)]
    pub lacks_at: Option<u64>,
    /// Its receive queue, if it has one.
    #[serde(default)]
    pub recv: Option<Receives>,
    /// As `lacks`, of a receive.
    #[serde(default)]
    pub recv_lacks: Option<String>,
    /// See above.
    #[serde(default)]
    pub recv_lacks_at: Option<u64>,
    /// What a fault script did to it.
    #[serde(default)]
    pub faults: Vec<String>,
    /// Something changed between two looks.
    pub moving: bool,
    /// It stands still with work to do, or it has failed.
    pub stuck: bool,
    /// For something that the other end is to do.
    #[serde(default)]
    pub waits_for_peer: bool,
    /// What it does, or what it lacks.
    pub verdict: String,
    /// What stands behind that which the verdict tells of, if it is another matter: slots that no doorbell covers behind one whose CQE is
    /// missing.
    #[serde(default)]
    pub later: Option<String>,
}

impl DeviceReport {
    /// The engine core of a queue pair.
    fn core_of(&self, qp: &QpReport) -> Option<&CoreReport> {
        self.cores.iter().find(|c| Some(c.number) == qp.core)
    }
}

impl QpReport {
    /// Does it go to another process?
    fn is_far(&self) -> bool {
        matches!(self.link.as_str(), "shm" | "roce" | "verbs")
    }

    /// Slots are reserved, written or rung, and not complete.
    pub fn has_work(&self) -> bool {
        let done = self.engine.map_or(u64::MAX, |e| e.completed);
        let begun = self.poster.map_or(0, |p| p.reserved);
        let begun = begun.max(self.posted.unwrap_or(0));
        self.state != "destroyed" && done < begun.max(self.engine.map_or(0, |e| e.rung))
    }
}

/// Indexes that the posting side keeps, in slots since the last reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Poster {
    /// Slots handed out.
    pub reserved: u64,
    /// Slots whose WQEs are written.
    pub ready: u64,
    /// Slots rung.
    pub rung: u64,
    /// Slots known to be complete.
    pub consumed: u64,
}

/// Indexes that the engine keeps, in slots since the last reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Slots that a doorbell announced.
    pub rung: u64,
    /// Slots complete.
    pub completed: u64,
}

/// Receives, since the last reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receives {
    /// Posted.
    pub posted: u64,
    /// Filled by messages.
    pub done: u64,
}

impl Device {
    /// Looks at everything twice, `apart` from each other, and says what moves and what does not.
    pub fn report(&self, apart: Duration) -> DeviceReport {
        let first = Motion::of(&self.inner);
        std::thread::sleep(apart);
        look(&self.inner, &first)
    }
}

/// What moves, at a first look.
struct Motion {
    rounds: Vec<u64>,
    qps: HashMap<u32, Indexes>,
}

/// What changes if anything is done with a queue pair.
#[derive(PartialEq)]
struct Indexes {
    poster: Option<Poster>,
    engine: Option<Seen>,
    counters: QpCounters,
}

impl Indexes {
    fn of(qp: &QpCore) -> Self {
        Self {
            poster: qp.inner.progress().map(|p| Poster {
                reserved: p.reserved,
                ready: p.ready,
                rung: p.rung,
                consumed: p.completed,
            }),
            engine: qp
                .inner
                .indexes()
                .map(|(rung, completed)| Seen { rung, completed }),
            counters: qp.counters(),
        }
    }
}

impl Motion {
    fn of(device: &Inner) -> Self {
        let cores = device.soft.iter().flat_map(|soft| soft.hca().health());
        Self {
            rounds: cores.map(|core| core.rounds).collect(),
            qps: device
                .queue_pairs()
                .iter()
                .map(|qp| (qp.qpn(), Indexes::of(qp)))
                .collect(),
        }
    }
}

/// How long an engine core may take to say what its connections counted.
const ANSWER: Duration = Duration::from_millis(100);

/// A look at everything, with what an earlier one told.
fn look(device: &Inner, first: &Motion) -> DeviceReport {
    let info = device.gpu.info();
    let host = info.backend == doorbell_gpu::Backend::Host;
    let record = device.soft.as_ref().and_then(|soft| soft.hca().record());
    let cores = match &device.soft {
        Some(soft) => soft.hca().health(),
        None => Vec::new(),
    };
    // Connections count in their engine core; one that does not answer would be waited for at every queue pair.
    let answers = match (&device.soft, device.provider.roce_describe().is_empty()) {
        (Some(soft), false) => (0..cores.len())
            .map(|core| soft.hca().answers(core, ANSWER))
            .collect(),
        _ => Vec::new(),
    };
    let counts = |core: Option<usize>| core.is_some_and(|c| answers.get(c) == Some(&true));
    let cores: Vec<_> = cores
        .into_iter()
        .enumerate()
        .map(|(i, core)| CoreReport {
            number: i as u64,
            dead: core.dead,
            rounds: core.rounds,
            rounds_since: core
                .rounds
                .saturating_sub(first.rounds.get(i).copied().unwrap_or(0)),
            qps: core.qps as u64,
            counters: named(&[
                ("busy_rounds", core.counters.busy_rounds),
                ("turns", core.counters.turns),
                ("sleeps", core.counters.sleeps),
                ("errors", core.counters.errors),
            ]),
            cpu_ns: core.thread.and_then(thread_cpu_ns),
            seen_ns: record
                .as_ref()
                .and_then(|r| r.cores.get(i))
                .map_or(0, |c| c.seen_ns),
        })
        .collect();
    let fired = device.firings();
    let firings: Vec<_> = fired.iter().map(FiringReport::of).collect();
    // A block that was given back may name the same queue pair.
    let recorded: HashMap<u32, &QpRecord> = record
        .iter()
        .flat_map(|r| &r.qps)
        .filter(|r| r.state != rec::QpState::Destroyed)
        .map(|r| (r.qpn, r))
        .collect();
    let now = doorbell_hca::record::now_ns();
    let caller_driven = device.settings.hca_cores == crate::HcaCores::Caller;
    let qps: Vec<_> = device
        .queue_pairs()
        .iter()
        .map(|one| {
            let indexes = Indexes::of(one);
            let moving = first.qps.get(&one.qpn()).is_some_and(|f| *f != indexes);
            let mut qp = queue_pair(one, indexes, recorded.get(&one.qpn()).copied());
            if counts(one.core()) {
                qp.roce = owned(one.roce_counters());
            }
            let ground = Ground {
                moving,
                core: qp.core.and_then(|c| cores.get(c as usize)),
                caller_driven,
                recorded: record.is_some(),
                condition: Condition::Runs,
                stood_ns: None,
                played: Played::of(&firings, now, Condition::Runs),
            };
            verdict::of(&qp, &ground).onto(&mut qp);
            qp
        })
        .collect();
    let mut report = DeviceReport {
        latencies: latency::of(&qps, now),
        id: device.provider.id(),
        gpu: match host {
            true => "host".to_owned(),
            false => info.name.clone(),
        },
        caller_driven,
        cores,
        kernels: device.kernels(),
        qps,
        roce: match !answers.is_empty() && answers.iter().all(|yes| *yes) {
            true => owned(device.provider.roce_counters()),
            false => Vec::new(),
        },
        regions: record
            .iter()
            .flat_map(|r| &r.regions)
            .map(RegionReport::of)
            .collect(),
        waits: record
            .iter()
            .flat_map(|r| &r.waits)
            .map(WaitReport::of)
            .chain(device.queue_pairs().iter().filter_map(|qp| {
                let note = qp.inner.read_note()?;
                // A GPU's clock is its own; host threads use one that began with the process.
                let clock = host.then(doorbell_device::host::clock_ns);
                WaitReport::noted(note, now, clock)
            }))
            .collect(),
        faults: device.faults().iter().map(ToString::to_string).collect(),
        firings,
        recorded: record.is_some(),
        left_out: record.as_ref().map_or((0, 0), |r| r.left_out),
        damage: None,
    };
    tell_faults(&mut report, &fired);
    report
}

/// What a script did to each queue pair, in words.
fn tell_faults(device: &mut DeviceReport, firings: &[crate::faults::Firing]) {
    for firing in firings {
        let here = |q: &&mut QpReport| firing.qpn.is_some_and(|n| n.get() == q.qpn);
        if let Some(qp) = device.qps.iter_mut().find(here) {
            qp.faults.push(firing.to_string());
        }
    }
}

/// Processor time of a thread of this process: the first number of its `schedstat`.
fn thread_cpu_ns(thread: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

fn named(counters: &[(&str, u64)]) -> Vec<(String, u64)> {
    counters
        .iter()
        .map(|(name, n)| ((*name).to_owned(), *n))
        .collect()
}

fn owned(counters: Vec<(&'static str, u64)>) -> Vec<(String, u64)> {
    named(&counters)
}

/// A queue pair of this process.
fn queue_pair(qp: &QpCore, indexes: Indexes, record: Option<&QpRecord>) -> QpReport {
    let counters = indexes.counters;
    let target = qp.inner.target();
    Facts {
        qpn: qp.qpn(),
        cqn: qp.cq().cqn(),
        core: qp.core().map(|c| c as u64),
        state: qp.state(),
        depth: qp.depth(),
        handler: qp.handler(),
        cq: qp.cq().kind(),
        link: target.map(parts::link).unwrap_or_default(),
        poster: indexes.poster,
        engine: indexes.engine,
        record: qp.peek_record().ok().map(u32::from_ne_bytes),
        doorbell: qp.peek_doorbell().ok().map(u64::from_ne_bytes),
        posted: record.map(|r| r.posted),
        parked: record
            .and_then(|r| r.still.as_ref())
            .and_then(parts::parked),
        error: qp.error(),
        newest: qp.inner.newest_cqe(),
        recv: qp
            .inner
            .receives()
            .map(|(posted, done)| Receives { posted, done }),
        recv_depth: qp.recv_depth(),
        events: record.map(parts::events).unwrap_or_default(),
        counters: named(&[
            ("doorbells", counters.doorbells),
            ("slots_rung", counters.slots_rung),
            ("wqes", counters.wqes),
            ("bytes", counters.bytes),
            ("cqes", counters.cqes),
            ("stale_reads", counters.stale_reads),
            ("parked", counters.parked),
            ("key_lookups", counters.key_lookups),
            ("copies", counters.copies),
            ("flushed", counters.flushed),
            ("faults", counters.faults),
        ]),
        slot: &|at| qp.peek_wqe(at).ok(),
        cqe: &|at| qp.cq().peek(at as u32).ok(),
        recv_cqe: &|at| qp.recv_cq()?.peek(at as u32).ok(),
    }
    .report()
}
