//! What a process can say about its devices and queue pairs, for who looks at it from outside: `doorbell dump`, `doorbell stat`.
//!
//! A [`DeviceReport`] is a copy of what is there anyway: the engine's counters and indexes, the words and rings in memory, the
//! indexes that device code keeps. Nothing is recorded for it and nothing is stopped, so it costs a running queue pair nothing; a queue
//! pair is looked at twice, and only of one that stands still a [verdict](QpReport::verdict) says what is missing.
//! [`server`] gives reports to other processes of the same user.

use std::time::Duration;

use doorbell_device::layout::CqKind;
use doorbell_hca as rec;
use doorbell_hca::record::QpRecord;
use doorbell_wire::cqe::{Cqe, CqeTail, ErrorCqe};
use doorbell_wire::{Chunk, Ctrl, Dump, Opcode};
use serde::{Deserialize, Serialize};

use crate::device::{Device, Inner};
use crate::faults::Firing;
use crate::qp::{Handler, QpCore, QpCounters, QpState};

mod cqes;
mod latency;
pub mod missing;
pub mod moment;
mod parts;
pub mod postmortem;
pub mod server;
pub mod trace;
mod verdict;

pub use latency::quantile;
pub use parts::{EventReport, KernelReport, PendingReport, RegionReport, WaitReport};

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
    let mut reports = vec![own];
    reports.extend(server::find_others(Some(pid), server::FULL, PATIENCE).0);
    missing::name(&mut reports);
    let mut lines = Vec::new();
    for device in &reports[0].devices {
        lines.extend(device.waits.iter().map(|w| w.verdict.clone()));
    }
    let stuck = reports[0].devices.iter().filter(|d| d.id == id);
    let mut more = 0;
    for qp in stuck.flat_map(|d| &d.qps).filter(|q| q.stuck) {
        // A wait for it has said so.
        let said = lines.iter().any(|l| l.contains(&qp.verdict));
        let text = match (said, &qp.peer) {
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
    if more > 0 {
        lines.push(format!(
            "{more} more queue pairs are stuck: `doorbell dump {pid}` shows all"
        ));
    }
    if lines.is_empty() {
        lines.push("no wait and no queue pair of this process lacks anything".to_owned());
    }
    lines
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
    /// The latest kernels.
    #[serde(default)]
    pub kernels: Vec<KernelReport>,
}

/// An engine core.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreReport {
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
    /// Where its requests go: `loopback`, `shm`, `roce`, or nowhere yet.
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
    /// A completion that the engine wrote and that is not in the CQ, or not as it was written.
    #[serde(default)]
    pub lacks: Option<String>,
    /// What a fault script did to it.
    #[serde(default)]
    pub faults: Vec<String>,
    /// Something changed between two looks.
    pub moving: bool,
    /// It stands still with work to do, or it has failed.
    pub stuck: bool,
    /// What it does, or what it lacks.
    pub verdict: String,
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

impl Device {
    /// Looks at everything twice, `apart` from each other, and says what moves and what does not.
    pub fn report(&self, apart: Duration) -> DeviceReport {
        let first = look(&self.inner);
        std::thread::sleep(apart);
        settle(&first, look(&self.inner))
    }
}

/// How long an engine core may take to say what its connections counted.
const ANSWER: Duration = Duration::from_millis(100);

/// One look.
fn look(device: &Inner) -> DeviceReport {
    let info = device.gpu.info();
    let record = device.soft.as_ref().and_then(|soft| soft.hca().record());
    let cores = match &device.soft {
        Some(soft) => soft.hca().health(),
        None => Vec::new(),
    };
    let firings = device.firings();
    // Connections count in their engine core; one that does not answer would be waited for at every queue pair.
    let answers = match (&device.soft, device.provider.roce_describe().is_empty()) {
        (Some(soft), false) => (0..cores.len())
            .map(|core| soft.hca().answers(core, ANSWER))
            .collect(),
        _ => Vec::new(),
    };
    let counts = |core: Option<usize>| core.is_some_and(|c| answers.get(c) == Some(&true));
    DeviceReport {
        latencies: Vec::new(),
        id: device.provider.id(),
        gpu: match info.backend {
            doorbell_gpu::Backend::Host => "host".to_owned(),
            doorbell_gpu::Backend::Cuda => info.name.clone(),
        },
        caller_driven: device.settings.hca_cores == crate::HcaCores::Caller,
        cores: cores
            .into_iter()
            .enumerate()
            .map(|(i, core)| CoreReport {
                dead: core.dead,
                rounds: core.rounds,
                rounds_since: 0,
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
            .collect(),
        kernels: device.kernels(),
        qps: device
            .queue_pairs()
            .iter()
            .map(|one| {
                // A block that was given back may name the same queue pair.
                let of = |r: &&QpRecord| r.qpn == one.qpn() && r.state != rec::QpState::Destroyed;
                let mut qp = qp(one, record.as_ref().and_then(|r| r.qps.iter().find(of)));
                if counts(one.core()) {
                    qp.roce = owned(one.roce_counters());
                }
                let here = |f: &&Firing| f.qpn.is_some_and(|q| q.get() == qp.qpn);
                qp.faults = firings
                    .iter()
                    .filter(here)
                    .map(ToString::to_string)
                    .collect();
                qp
            })
            .collect(),
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
                let host = info.backend == doorbell_gpu::Backend::Host;
                WaitReport::noted(note, host.then(doorbell_device::host::clock_ns))
            }))
            .collect(),
        faults: device.faults().iter().map(ToString::to_string).collect(),
    }
}

/// The later look, with what the earlier one tells.
fn settle(first: &DeviceReport, mut now: DeviceReport) -> DeviceReport {
    now.latencies = latency::of(&now.qps, doorbell_hca::record::now_ns());
    for (i, core) in now.cores.iter_mut().enumerate() {
        let before = first.cores.get(i).map_or(0, |c| c.rounds);
        core.rounds_since = core.rounds.saturating_sub(before);
    }
    for at in 0..now.qps.len() {
        let qp = &now.qps[at];
        let core = qp.core.and_then(|c| now.cores.get(c as usize));
        let before = first.qps.iter().find(|q| q.qpn == qp.qpn);
        let (moving, stuck, verdict) = verdict::of(qp, before, core, now.caller_driven);
        let qp = &mut now.qps[at];
        (qp.moving, qp.stuck, qp.verdict) = (moving, stuck, verdict);
    }
    now
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

fn qp(qp: &QpCore, record: Option<&QpRecord>) -> QpReport {
    let counters: QpCounters = qp.counters();
    let engine = qp
        .inner
        .indexes()
        .map(|(rung, completed)| Seen { rung, completed });
    let poster = qp.inner.progress().map(|p| Poster {
        reserved: p.reserved,
        ready: p.ready,
        rung: p.rung,
        consumed: p.completed,
    });
    let events = record.map(parts::events).unwrap_or_default();
    let (link, peer_qpn) = record.map(parts::link).unwrap_or_default();
    let posted = record.map(|r| r.posted);
    let pending = engine.map_or(Vec::new(), |engine| {
        let end = engine
            .rung
            .max(poster.map_or(0, |p| p.ready))
            .max(posted.unwrap_or(0))
            .min(engine.completed + u64::from(qp.depth()));
        parts::pending(qp.qpn(), (engine.completed, end), &events, |at| {
            qp.peek_wqe(at).ok()
        })
    });
    QpReport {
        qpn: qp.qpn(),
        cqn: qp.cq().cqn(),
        core: qp.core().map(|c| c as u64),
        state: qp.state().to_string(),
        depth: qp.depth(),
        handler: qp.handler().to_string(),
        cq: match qp.cq().kind() {
            CqKind::PerSlot => "per-slot",
            CqKind::Collapsed => "collapsed",
        }
        .to_owned(),
        poster,
        engine,
        record: qp
            .peek_record()
            .ok()
            .map(|bytes| doorbell_wire::db::parse_record(u32::from_ne_bytes(bytes))),
        doorbell: qp.peek_doorbell().ok().map(|bytes| {
            let word = u64::from_ne_bytes(bytes);
            match qp.handler() {
                Handler::Producer => word,
                Handler::Record | Handler::Only => doorbell_wire::db::parse(word).0.into(),
            }
        }),
        next: next(qp, engine, poster, posted),
        cqe: engine.and_then(|engine| cqe(qp, engine)),
        error: match qp.state() {
            QpState::Destroyed => None,
            _ => qp.error().map(|fault| fault.to_string()),
        },
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
        roce: Vec::new(),
        link,
        peer_qpn,
        peer: None,
        posted,
        parked: record
            .and_then(|r| r.still.as_ref())
            .filter(|s| s.parked != rec::record::Park::None)
            .map(|s| s.parked.text().to_owned()),
        pending,
        events,
        lacks: engine.and_then(|engine| cqes::lacking(qp, engine, poster)),
        faults: Vec::new(),
        moving: false,
        stuck: false,
        verdict: String::new(),
    }
}

/// The first WQE that is not complete, if one was handed out.
fn next(
    qp: &QpCore,
    engine: Option<Seen>,
    poster: Option<Poster>,
    posted: Option<u64>,
) -> Option<String> {
    let engine = engine?;
    let written = poster
        .map_or(0, |p| p.reserved)
        .max(engine.rung)
        .max(posted.unwrap_or(0));
    if engine.completed >= written {
        return None;
    }
    next_text(|slot| qp.peek_wqe(engine.completed + slot).ok())
}

/// A WQE of two slots at most, decoded.
fn next_text(slot: impl Fn(u64) -> Option<[u8; 64]>) -> Option<String> {
    let mut chunks = Vec::new();
    for at in 0..2 {
        // A copy may end behind the first.
        let bytes = slot(at).or((at == 1).then_some([0; 64]))?;
        chunks.extend(bytes.as_chunks::<16>().0.iter().map(Chunk::from_bytes));
    }
    let ds = usize::from(Ctrl::parse(chunks[0]).ds).clamp(1, chunks.len());
    Some(Dump(&chunks[..ds]).to_string().trim_end().to_owned())
}

/// The CQE of the WQE that completed last.
fn cqe(qp: &QpCore, engine: Seen) -> Option<String> {
    let last = engine.completed.checked_sub(1)? as u32;
    let bytes = qp.cq().peek(last).ok()?;
    Some(cqe_text(&bytes))
}

/// A CQE in words, with its last bytes.
fn cqe_text(bytes: &[u8; 64]) -> String {
    let (pieces, _) = bytes.as_chunks::<16>();
    let chunks: [Chunk; 4] = std::array::from_fn(|i| Chunk::from_bytes(&pieces[i]));
    let words = match ErrorCqe::parse(&chunks) {
        Some(e) => format!(
            "WQE {} failed: {}, vendor syndrome {}",
            e.tail.wqe_counter(),
            e.syndrome,
            e.vendor
        ),
        None if CqeTail::of(chunks[3]).is_invalid() => "nothing written yet".to_owned(),
        None => {
            let cqe = Cqe::parse(&chunks);
            let opcode = Opcode::try_from(cqe.opcode).map_or("unknown opcode", Opcode::name);
            format!("WQE {} completed: {opcode}", cqe.tail.wqe_counter())
        }
    };
    format!("{words}\n  30: {:?}", chunks[3])
}
