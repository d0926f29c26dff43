//! The report of a process that cannot answer: killed, stopped, or of another container, made from its flight record.
//!
//! The record holds what the engine last wrote. Where the process is alive and this one may look into it (as a debugger may), its queue memory
//! is read as well.

use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;

use doorbell_device::layout::{CqKind, GpuCq, GpuQp, NicHandler, POISON, RINGING};
use doorbell_hca::QpState;
use doorbell_hca::record::dir::{self, Life};
use doorbell_hca::record::{QpRecord, Record};

use super::parts::{self, RegionReport, WaitReport};
use super::{CoreReport, DeviceReport, Poster, ProcessReport, QpReport, SCHEMA, Seen, verdict};
use crate::QpFault;

/// What the records of a process say; nothing if it has left none.
pub fn of(pid: u32) -> Option<ProcessReport> {
    left(pid).and_then(|(life, records)| report(pid, life, &records))
}

/// The records that a process has left, and what has become of it.
pub(super) fn left(pid: u32) -> Option<(Life, Vec<Record>)> {
    let mut records = Vec::new();
    for (_, path) in dir::files(Some(pid)) {
        match Record::open(&path) {
            Ok(record) => records.push(record),
            Err(e) => tracing::warn!("{e}"),
        }
    }
    // Of several processes of the same number, the latest.
    let newest = records.iter().map(|r| r.begun_ns).max()?;
    let life = records.iter().find(|r| r.begun_ns == newest)?.life();
    records.retain(|r| r.life() == life);
    Some((life, records))
}

/// What they say.
pub(super) fn report(pid: u32, life: Life, records: &[Record]) -> Option<ProcessReport> {
    let first = records.first()?;
    let seen = records.iter().filter_map(last_seen).max();
    let now = doorbell_hca::record::now_ns();
    let why = match life {
        Life::Runs => "it runs and does not answer",
        Life::Stopped => "it is stopped and cannot answer",
        Life::Gone => "post-mortem: it ended without closing its devices",
        Life::Elsewhere => "it is in another PID namespace, and may be alive or dead",
    };
    let ago = seen.map_or(String::new(), |ns| {
        format!(
            ", its engine last wrote {} ago",
            super::moment::span(now.saturating_sub(ns))
        )
    });
    let memory = match life {
        Life::Runs | Life::Stopped => File::open(format!("/proc/{pid}/mem")).ok(),
        _ => None,
    };
    Some(ProcessReport {
        schema: SCHEMA.to_owned(),
        version: first.release.clone(),
        pid,
        at_ns: now,
        cpu_ns: 0,
        rank: first.rank,
        command: first.command.clone(),
        post_mortem: Some(format!("{why}{ago}")),
        devices: records
            .iter()
            .map(|r| device(r, memory.as_ref(), false))
            .collect(),
    })
}

/// Processes that have left a record.
pub fn all() -> Vec<u32> {
    let mut pids: Vec<u32> = dir::files(None).into_iter().map(|(pid, _)| pid).collect();
    pids.dedup();
    pids
}

/// What an HCA of this process remembers, queue pairs that are gone included: for a trace.
pub(super) fn remembered(record: &Record) -> DeviceReport {
    device(record, None, true)
}

fn last_seen(record: &Record) -> Option<u64> {
    record
        .cores
        .iter()
        .map(|c| c.seen_ns)
        .filter(|ns| *ns != 0)
        .max()
}

/// `gone`: with queue pairs that do not exist any more.
fn device(record: &Record, memory: Option<&File>, gone: bool) -> DeviceReport {
    DeviceReport {
        // It has stopped.
        latencies: Vec::new(),
        id: record.id,
        gpu: "not recorded".to_owned(),
        caller_driven: record.caller_driven,
        cores: record
            .cores
            .iter()
            .enumerate()
            .map(|(i, core)| CoreReport {
                dead: core.dead.then(|| "it panicked".to_owned()),
                rounds: core.rounds,
                rounds_since: 0,
                qps: record
                    .qps
                    .iter()
                    .filter(|q| q.core as usize == i && q.state != QpState::Destroyed)
                    .count() as u64,
                counters: Vec::new(),
                cpu_ns: None,
                seen_ns: core.seen_ns,
            })
            .collect(),
        qps: record
            .qps
            .iter()
            .filter(|q| gone || q.state != QpState::Destroyed)
            .map(|q| queue_pair(q, memory))
            .collect(),
        roce: Vec::new(),
        kernels: Vec::new(),
        regions: record.regions.iter().map(RegionReport::of).collect(),
        waits: record
            .waits
            .iter()
            .map(WaitReport::of)
            .chain(record.qps.iter().filter_map(|qp| {
                let note = qp.still.as_ref()?.note;
                WaitReport::noted(note, None)
            }))
            .collect(),
        faults: Vec::new(),
    }
}

fn queue_pair(qp: &QpRecord, memory: Option<&File>) -> QpReport {
    let events = parts::events(qp);
    let (link, peer_qpn) = parts::link(qp);
    let peek = |at: u64| -> Option<[u8; 64]> {
        let mut bytes = [0; 64];
        memory?.read_exact_at(&mut bytes, at).ok()?;
        Some(bytes)
    };
    let slot = |index: u64| -> Option<[u8; 64]> {
        let offset = index % u64::from(qp.depth.max(1)) * 64;
        if let Some(bytes) = peek(qp.addresses[0].wrapping_add(offset)) {
            return Some(bytes);
        }
        let still = qp.still.as_ref()?;
        let words = still
            .slots
            .get(usize::try_from(index.checked_sub(still.first)?).ok()?)?;
        Some(bytes_of(words))
    };
    let word = |at: u64, len: usize| -> Option<u64> {
        let mut bytes = [0; 8];
        memory?.read_exact_at(&mut bytes[..len], at).ok()?;
        Some(u64::from_ne_bytes(bytes))
    };
    let still = qp.still.as_ref();
    let record = (qp.addresses[2] != 0)
        .then(|| {
            word(qp.addresses[2], 4)
                .map(|w| w as u32)
                .or(still.map(|s| s.record))
        })
        .flatten()
        .map(doorbell_wire::db::parse_record);
    let doorbell = word(qp.addresses[3], 8)
        .or(still.map(|s| s.doorbell))
        .map(|word| match qp.handler {
            NicHandler::ProducerWord => word,
            _ => doorbell_wire::db::parse(word).0.into(),
        });
    let index = |offset: usize| word(qp.poster.wrapping_add(offset as u64), 8);
    let live = (qp.poster != 0)
        .then(|| {
            Some([
                index(offset_of!(GpuQp, sq_rsvd_index))? & !POISON,
                index(offset_of!(GpuQp, sq_ready_index))? & !RINGING,
                index(offset_of!(GpuQp, sq_wqe_pi))?,
                index(offset_of!(GpuQp, cq_sq) + offset_of!(GpuCq, cqe_ci))?,
            ])
        })
        .flatten();
    let poster = live.or(still.and_then(|s| s.poster)).map(|p| Poster {
        reserved: p[0],
        ready: p[1],
        rung: p[2],
        consumed: p[3],
    });
    let engine = Seen {
        rung: qp.rung,
        completed: qp.completed,
    };
    let end = qp.posted.max(poster.map_or(0, |p| {
        p.ready.min(qp.completed.saturating_add(qp.depth.into()))
    }));
    let per_slot = qp.cq == CqKind::PerSlot;
    let cqe = qp.completed.checked_sub(1).and_then(|last| {
        let offset = match per_slot {
            true => last % u64::from(qp.depth.max(1)) * 64,
            false => 0,
        };
        let bytes =
            peek(qp.addresses[1].wrapping_add(offset)).or(still.map(|s| bytes_of(&s.cqe)))?;
        Some(super::cqe_text(&bytes))
    });
    let mut report = QpReport {
        qpn: qp.qpn,
        cqn: qp.cqn,
        core: Some(qp.core.into()),
        state: match qp.state {
            QpState::Reset => "reset",
            QpState::Ready => "ready",
            QpState::Error => "in error",
            QpState::Destroyed => "destroyed",
        }
        .to_owned(),
        depth: qp.depth,
        handler: match qp.handler {
            NicHandler::ProducerWord => "producer",
            NicHandler::DoorbellRecord => "record",
            NicHandler::DoorbellOnly => "only",
        }
        .to_owned(),
        cq: if per_slot { "per-slot" } else { "collapsed" }.to_owned(),
        poster,
        engine: Some(engine),
        record,
        doorbell,
        next: (qp.completed < end)
            .then(|| super::next_text(|n| slot(qp.completed.wrapping_add(n))))
            .flatten(),
        cqe,
        error: QpFault::from_word(qp.error).map(|fault| fault.to_string()),
        counters: Vec::new(),
        roce: Vec::new(),
        link,
        peer_qpn,
        peer: None,
        posted: Some(qp.posted),
        parked: still
            .filter(|s| s.parked != doorbell_hca::record::Park::None)
            .map(|s| s.parked.text().to_owned()),
        pending: parts::pending(qp.qpn, (qp.completed, end), &events, slot),
        events,
        lacks: None,
        faults: Vec::new(),
        moving: false,
        stuck: false,
        verdict: String::new(),
    };
    let (moving, stuck, text) = verdict::of(&report, None, None, false);
    (report.moving, report.stuck, report.verdict) = (moving, stuck, text);
    report
}

fn bytes_of(words: &[u64; 8]) -> [u8; 64] {
    let mut bytes = [0; 64];
    for (to, from) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&from.to_ne_bytes());
    }
    bytes
}
