//! One queue pair in a report: from all that is known of it, wherever that was read.
//!
//! The process itself, a record, and the memory of a process that stands still know the same things; what is made of them is the same.

use doorbell_device::layout::CqKind;
use doorbell_wire::cqe::{Cqe, CqeTail, ErrorCqe};
use doorbell_wire::{Chunk, Ctrl, Dump, Opcode};

use super::{EventReport, Poster, QpReport, Receives, Seen, cqes, parts};
use crate::QpFault;
use crate::qp::{Handler, QpState};

/// Reads a slot of a ring, or an entry of a CQ, by its number.
pub(super) type Entries<'a> = &'a dyn Fn(u64) -> Option<[u8; 64]>;

/// What is known of a queue pair, all of one moment as far as it stands still.
pub(super) struct Facts<'a> {
    pub(super) qpn: u32,
    pub(super) cqn: u32,
    pub(super) core: Option<u64>,
    pub(super) state: QpState,
    pub(super) depth: u32,
    pub(super) handler: Handler,
    pub(super) cq: CqKind,
    pub(super) link: (String, Option<u32>),
    pub(super) poster: Option<Poster>,
    pub(super) engine: Option<Seen>,
    /// The record's bytes and the doorbell word, as numbers of the host.
    pub(super) record: Option<u32>,
    pub(super) doorbell: Option<u64>,
    pub(super) posted: Option<u64>,
    pub(super) parked: Option<String>,
    pub(super) error: Option<QpFault>,
    pub(super) newest: Option<u64>,
    pub(super) recv: Option<Receives>,
    pub(super) recv_depth: u32,
    pub(super) events: Vec<EventReport>,
    pub(super) counters: Vec<(String, u64)>,
    pub(super) slot: Entries<'a>,
    pub(super) cqe: Entries<'a>,
    pub(super) recv_cqe: Entries<'a>,
}

impl Facts<'_> {
    /// The report, without a verdict.
    pub(super) fn report(self) -> QpReport {
        let (slot, depth) = (self.slot, u64::from(self.depth));
        let written = self.poster.map_or(0, |p| p.ready);
        let end = self.engine.map(|engine| {
            let seen = engine.rung.max(written).max(self.posted.unwrap_or(0));
            seen.min(engine.completed.saturating_add(depth))
        });
        let pending = self.engine.zip(end).map_or(Vec::new(), |(engine, end)| {
            parts::pending(self.qpn, (engine.completed, end), &self.events, slot)
        });
        let reserved = self.poster.map_or(0, |p| p.reserved);
        let next = self
            .engine
            .zip(end)
            .filter(|(engine, end)| engine.completed < (*end).max(reserved))
            .and_then(|(engine, _)| next_text(|n| slot(engine.completed.wrapping_add(n))));
        let last = self.engine.and_then(|e| e.completed.checked_sub(1));
        let place = |at: u64| match self.cq {
            CqKind::PerSlot => at,
            CqKind::Collapsed => 0,
        };
        let cqe = last.and_then(|at| Some(cqe_text(&(self.cqe)(place(at))?)));
        let look = cqes::Look {
            qpn: self.qpn,
            entries: match self.cq {
                CqKind::PerSlot => self.depth,
                CqKind::Collapsed => 1,
            },
            entry: self.cqe,
        };
        let consumed = self.poster.map(|p| p.consumed);
        let lacks = self
            .engine
            .and_then(|e| cqes::lacking(&look, self.cq, e, consumed, self.newest));
        let look = cqes::Look {
            qpn: self.qpn,
            entries: self.recv_depth,
            entry: self.recv_cqe,
        };
        let recv_lacks = self.recv.and_then(|r| cqes::lacking_receive(&look, r));
        let (lacks_at, lacks) = lacks.unzip();
        let (recv_lacks_at, recv_lacks) = recv_lacks.unzip();
        let (link, peer_qpn) = self.link;
        QpReport {
            qpn: self.qpn,
            cqn: self.cqn,
            core: self.core,
            state: self.state.to_string(),
            depth: self.depth,
            handler: self.handler.to_string(),
            cq: match self.cq {
                CqKind::PerSlot => "per-slot",
                CqKind::Collapsed => "collapsed",
            }
            .to_owned(),
            poster: self.poster,
            engine: self.engine,
            record: self.record.map(doorbell_wire::db::parse_record),
            doorbell: self.doorbell.map(|word| match self.handler {
                Handler::Producer => word,
                Handler::Record | Handler::Only => doorbell_wire::db::parse(word).0.into(),
            }),
            next,
            cqe,
            error: match self.state {
                QpState::Destroyed => None,
                _ => self.error.map(|fault| fault.to_string()),
            },
            counters: self.counters,
            roce: Vec::new(),
            link,
            peer_qpn,
            peer: None,
            posted: self.posted,
            parked: self.parked,
            pending,
            events: self.events,
            lacks,
            lacks_at,
            recv: self.recv,
            recv_lacks,
            recv_lacks_at,
            faults: Vec::new(),
            moving: false,
            stuck: false,
            waits_for_peer: false,
            verdict: String::new(),
            later: None,
        }
    }
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
        None if CqeTail::of(chunks[3]).is_invalid() => {
            "says that nothing was written yet".to_owned()
        }
        None => {
            let cqe = Cqe::parse(&chunks);
            let opcode = Opcode::try_from(cqe.opcode).map_or("unknown opcode", Opcode::name);
            format!("WQE {} completed: {opcode}", cqe.tail.wqe_counter())
        }
    };
    format!("{words}\n  30: {:?}", chunks[3])
}
