//! The report of a process that cannot answer: killed, stopped, silent, or of another container, made from its flight record.
//!
//! The record holds what the engine last wrote: indexes and events to the end, and copies of what stood in a queue's memory, each of one
//! moment. A copy is used as long as the indexes have not moved since; else that memory is not known. Of a process that stands still and whose
//! memory this one may read (as a debugger may), the memory itself is taken instead. One that runs is looked at twice.

use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use doorbell_device::layout::{CqKind, GpuCq, GpuQp, NicHandler, POISON, RINGING};
use doorbell_hca::QpState as HcaState;
use doorbell_hca::record::dir::{self, KEPT, Life};
use doorbell_hca::record::{BadRecord, QpRecord, Record, Still};

use super::firing::{FiringReport, Played};
use super::parts::{self, RegionReport, WaitReport};
use super::queue::Facts;
use super::verdict::{self, Ground};
use super::{
    Condition, CoreReport, DeviceReport, Poster, ProcessReport, QpReport, Receives, SCHEMA, Seen,
};
use crate::QpFault;
use crate::qp::Handler;

/// Between two looks at the record of a process that runs.
const APART: Duration = Duration::from_millis(50);
/// Records of processes that ended badly which are kept, of each user.
pub const RECORDS: usize = KEPT;

/// The records that a process has left, and what has become of it.
pub(super) struct Left {
    pid: u32,
    pub(super) life: Life,
    records: Vec<Record>,
}

impl Left {
    /// What `pid` has left, if anything can be read. What is no record is told once, if it is `asked` about.
    pub(super) fn by(pid: u32, asked: bool) -> Option<Self> {
        let mut records = Vec::new();
        for (_, path) in dir::files(Some(pid)) {
            match Record::open(&path) {
                Ok(record) => records.push(record),
                Err(e) if asked => warn_once(&path, &e),
                Err(e) => tracing::debug!("{e}"),
            }
        }
        // Of several processes of the same number, the latest.
        let life = records.iter().max_by_key(|r| r.begun_ns)?.life();
        records.retain(|r| r.life() == life);
        Some(Self { pid, life, records })
    }

    /// What they say.
    pub(super) fn report(&self) -> Option<ProcessReport> {
        let condition = match self.life {
            Life::Runs => Condition::Silent,
            Life::Stopped => Condition::Stopped,
            Life::Gone => Condition::Ended,
            Life::Elsewhere => Condition::Elsewhere,
        };
        let later = match condition {
            Condition::Silent | Condition::Elsewhere => {
                std::thread::sleep(APART);
                Self::by(self.pid, false)
            }
            _ => None,
        };
        let (first, records) = match &later {
            Some(later) => (Some(&self.records), &later.records),
            None => (None, &self.records),
        };
        let own = records.first()?;
        let now = doorbell_hca::record::now_ns();
        let memory = match condition {
            Condition::Stopped => File::open(format!("/proc/{}/mem", self.pid)).ok(),
            _ => None,
        };
        let alive = records.iter().filter_map(last_seen).max();
        let devices: Vec<_> = records
            .iter()
            .map(|record| {
                Reader {
                    record,
                    before: first.and_then(|f| {
                        f.iter()
                            .find(|b| b.id == record.id && b.begun_ns == record.begun_ns)
                    }),
                    memory: memory.as_ref(),
                    condition,
                    now: match condition {
                        Condition::Ended => last_seen(record).unwrap_or(now),
                        _ => now,
                    },
                    gone: false,
                }
                .device()
            })
            .collect();
        Some(ProcessReport {
            schema: SCHEMA.to_owned(),
            version: own.release.clone(),
            pid: self.pid,
            at_ns: now,
            cpu_ns: 0,
            rank: own.rank,
            command: own.command.clone(),
            post_mortem: Some(why(condition, &devices, now, alive)),
            condition,
            alive_ns: alive.unwrap_or(now),
            devices,
        })
    }
}

/// Why the process itself did not answer.
fn why(condition: Condition, devices: &[DeviceReport], now: u64, alive: Option<u64>) -> String {
    let why = match condition {
        Condition::Runs | Condition::Silent => "it runs and does not answer",
        Condition::Stopped => "it is stopped (state T) and cannot answer",
        Condition::Ended => "post-mortem: it ended without closing its devices",
        Condition::Elsewhere => "it is in another PID namespace, and may be alive or dead",
    };
    let ago = alive.map_or(String::new(), |ns| {
        let ago = super::moment::span(now.saturating_sub(ns));
        format!(", its engine was last alive {ago} ago")
    });
    let mut dead = devices.iter().filter(|_| condition == Condition::Ended);
    let killed = dead.find_map(|d| Played::of(&d.firings, now, condition).death());
    let killed = killed.map_or(String::new(), |by| format!("; {by}"));
    format!("{why}{ago}{killed}")
}

/// A command may look at the records several times.
fn warn_once(path: &std::path::Path, e: &BadRecord) {
    use std::collections::HashSet;
    use std::path::PathBuf;
    use std::sync::{Mutex, PoisonError};
    static SAID: Mutex<Option<HashSet<PathBuf>>> = Mutex::new(None);
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.get_or_insert_default().insert(path.to_owned()) {
        tracing::warn!("{e}");
    }
}

/// Processes that have left a record.
pub fn all() -> Vec<u32> {
    let mut pids: Vec<u32> = dir::files(None).into_iter().map(|(pid, _)| pid).collect();
    pids.dedup();
    pids
}

/// What an HCA of this process remembers, queue pairs that are gone included: for a trace.
pub(super) fn remembered(record: &Record) -> DeviceReport {
    Reader {
        record,
        before: None,
        memory: None,
        condition: Condition::Runs,
        now: doorbell_hca::record::now_ns(),
        gone: true,
    }
    .device()
}

fn last_seen(record: &Record) -> Option<u64> {
    let cores = record.cores.iter().map(|c| c.seen_ns);
    let stills = record
        .qps
        .iter()
        .filter_map(|q| q.still.as_ref())
        .map(|s| s.at_ns);
    cores.chain(stills).filter(|ns| *ns != 0).max()
}

/// One record, and how it is to be read.
struct Reader<'a> {
    record: &'a Record,
    /// The same, read before.
    before: Option<&'a Record>,
    /// The memory of its process, which stands still.
    memory: Option<&'a File>,
    condition: Condition,
    /// The moment of the report: of a process that has ended, its last.
    now: u64,
    /// With queue pairs that do not exist any more.
    gone: bool,
}

impl Reader<'_> {
    fn device(&self) -> DeviceReport {
        let record = self.record;
        let cores: Vec<_> = record
            .cores
            .iter()
            .enumerate()
            .map(|(i, core)| CoreReport {
                number: i as u64,
                dead: core.dead.clone(),
                rounds: core.rounds,
                rounds_since: self
                    .before
                    .and_then(|b| b.cores.get(i))
                    .map_or(0, |b| core.rounds.saturating_sub(b.rounds)),
                qps: record
                    .qps
                    .iter()
                    .filter(|q| q.core as usize == i && q.state != HcaState::Destroyed)
                    .count() as u64,
                counters: Vec::new(),
                cpu_ns: None,
                seen_ns: core.seen_ns,
            })
            .collect();
        let firings: Vec<_> = record.firings.iter().map(FiringReport::of).collect();
        let qps = record
            .qps
            .iter()
            .filter(|q| self.gone || q.state != HcaState::Destroyed)
            .map(|q| self.queue_pair(q, &cores, &firings))
            .collect();
        let mut report = DeviceReport {
            // It has stopped.
            latencies: Vec::new(),
            id: record.id,
            gpu: "not recorded".to_owned(),
            caller_driven: record.caller_driven,
            cores,
            qps,
            roce: Vec::new(),
            kernels: Vec::new(),
            regions: record.regions.iter().map(RegionReport::of).collect(),
            waits: record
                .waits
                .iter()
                .map(WaitReport::of)
                .chain(record.qps.iter().filter_map(|qp| {
                    let still = qp.still.as_ref()?;
                    WaitReport::noted(still.note, still.at_ns, None)
                }))
                .collect(),
            faults: record.rules.iter().map(ToString::to_string).collect(),
            firings,
            recorded: true,
            left_out: record.left_out,
            damage: record.damage(),
        };
        super::tell_faults(&mut report, &record.firings);
        report
    }

    fn queue_pair(
        &self,
        qp: &QpRecord,
        cores: &[CoreReport],
        firings: &[FiringReport],
    ) -> QpReport {
        // A copy of another moment than that of the indexes says nothing of now.
        let still = qp
            .still
            .as_ref()
            .filter(|s| (s.first, s.rung) == (qp.completed, qp.rung));
        let memory = self.memory.map(|file| Memory { file, qp });
        let words = match &memory {
            Some(memory) => memory.words(),
            None => still.map(Words::of).unwrap_or_default(),
        };
        let stood_ns = still
            .filter(|s| memory.is_none() || Words::of(s) == words)
            .map(|s| s.at_ns.saturating_sub(s.since_ns));
        let slot = |index: u64| match &memory {
            Some(memory) => memory.slot(index),
            None => {
                let still = still?;
                let nth = usize::try_from(index.checked_sub(still.first)?).ok()?;
                still.slots.get(nth).map(bytes_of)
            }
        };
        let cqe = |at: u64| match &memory {
            Some(memory) => memory.cqe(at),
            None => {
                let still = still?;
                let newest = match qp.cq {
                    CqKind::PerSlot => qp.completed.checked_sub(1)?,
                    CqKind::Collapsed => 0,
                };
                match &still.lacks {
                    Some((lacks, words)) if *lacks == at => Some(bytes_of(words)),
                    _ => (at == newest).then(|| bytes_of(&still.cqe)),
                }
            }
        };
        let recv_cqe = |at: u64| {
            let (lacks, words) = still?.recv_lacks.as_ref()?;
            (*lacks == at).then(|| bytes_of(words))
        };
        let recv = still.and_then(|s| s.recv);
        let facts = Facts {
            qpn: qp.qpn,
            cqn: qp.cqn,
            core: Some(qp.core.into()),
            state: qp.state.into(),
            depth: qp.depth,
            handler: match qp.handler {
                NicHandler::ProducerWord => Handler::Producer,
                NicHandler::DoorbellRecord => Handler::Record,
                NicHandler::DoorbellOnly => Handler::Only,
            },
            cq: qp.cq,
            link: parts::link(qp.target),
            poster: words.poster,
            engine: Some(Seen {
                rung: qp.rung,
                completed: qp.completed,
            }),
            record: words.record.filter(|_| qp.addresses[2] != 0),
            doorbell: words.doorbell,
            posted: Some(qp.posted),
            parked: still.and_then(parts::parked),
            error: QpFault::from_word(qp.error),
            newest: still.map(|s| s.newest),
            recv: recv.map(|(posted, done)| Receives { posted, done }),
            recv_depth: qp.receives,
            events: parts::events(qp),
            counters: Vec::new(),
            slot: &slot,
            cqe: &cqe,
            recv_cqe: &recv_cqe,
        };
        let mut report = facts.report();
        let before = self
            .before
            .and_then(|b| b.qps.iter().find(|b| b.qpn == qp.qpn));
        let moving = before.is_some_and(|b| {
            (b.rung, b.executed, b.completed, b.posted)
                != (qp.rung, qp.executed, qp.completed, qp.posted)
        });
        let ground = Ground {
            moving,
            core: cores.get(qp.core as usize),
            caller_driven: self.record.caller_driven,
            recorded: true,
            condition: self.condition,
            stood_ns,
            played: Played::of(firings, self.now, self.condition),
        };
        verdict::of(&report, &ground).onto(&mut report);
        report
    }
}

/// What the posting side writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Words {
    record: Option<u32>,
    doorbell: Option<u64>,
    poster: Option<Poster>,
}

impl Words {
    fn of(still: &Still) -> Self {
        Self {
            record: Some(still.record),
            doorbell: Some(still.doorbell),
            poster: still.poster.map(poster),
        }
    }
}

fn poster([reserved, ready, rung, consumed]: [u64; 4]) -> Poster {
    Poster {
        reserved,
        ready,
        rung,
        consumed,
    }
}

/// The memory of a process, where a queue pair's is.
struct Memory<'a> {
    file: &'a File,
    qp: &'a QpRecord,
}

impl Memory<'_> {
    fn read<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, at).ok()?;
        Some(bytes)
    }

    fn word(&self, at: u64) -> Option<u64> {
        self.read(at).map(u64::from_ne_bytes)
    }

    /// Entry `at` of an array of 64-byte entries.
    fn entry(&self, array: u64, at: u64, entries: u64) -> Option<[u8; 64]> {
        self.read(array.wrapping_add(at % entries.max(1) * 64))
    }

    fn slot(&self, index: u64) -> Option<[u8; 64]> {
        self.entry(self.qp.addresses[0], index, self.qp.depth.into())
    }

    fn cqe(&self, at: u64) -> Option<[u8; 64]> {
        let entries = match self.qp.cq {
            CqKind::PerSlot => self.qp.depth.into(),
            CqKind::Collapsed => 1,
        };
        self.entry(self.qp.addresses[1], at, entries)
    }

    fn words(&self) -> Words {
        let [_, _, record, doorbell] = self.qp.addresses;
        let index = |offset: usize| self.word(self.qp.poster.wrapping_add(offset as u64));
        let indexes = || {
            Some([
                index(offset_of!(GpuQp, sq_rsvd_index))? & !POISON,
                index(offset_of!(GpuQp, sq_ready_index))? & !RINGING,
                index(offset_of!(GpuQp, sq_wqe_pi))?,
                index(offset_of!(GpuQp, cq_sq) + offset_of!(GpuCq, cqe_ci))?,
            ])
        };
        Words {
            record: match record {
                // As a copy has it.
                0 => Some(0),
                at => self.read(at).map(u32::from_ne_bytes),
            },
            doorbell: self.word(doorbell),
            poster: (self.qp.poster != 0).then(indexes).flatten().map(poster),
        }
    }
}

fn bytes_of(words: &[u64; 8]) -> [u8; 64] {
    let mut bytes = [0; 64];
    for (to, from) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&from.to_ne_bytes());
    }
    bytes
}
