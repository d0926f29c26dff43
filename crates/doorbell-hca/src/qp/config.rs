//! What a queue pair is made of: the addresses of its rings and words, their sizes, how it rings and completes.
//! Everything is checked once, at creation; the engine relies on it afterwards.

use core::fmt;

use doorbell_device::layout::{CqKind, NicHandler};
use doorbell_wire::{Cqn, WQEBB, db};

use super::signals::Signals;
use crate::doorbells::DoorbellSlot;
use crate::error::{HcaError, Result};
use crate::mem::Keep;
use crate::raw::Shared;

/// Where a queue pair's doorbell (or producer) word is.
#[derive(Debug)]
pub enum DoorbellWord {
    /// A word reserved with [`Hca::reserve_doorbell`](crate::Hca::reserve_doorbell): scanned eight at a time.
    Slot(DoorbellSlot),
    /// A word anywhere: scanned by itself.
    At(Shared<u64>),
}

/// What the engine answers after a QP's first error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnError {
    /// Later WQEs complete with error CQEs (`WR_FLUSH`), as hardware does.
    #[default]
    Flush,
    /// Later WQEs complete *successfully* without being executed, posted receives complete with nothing in them, and the
    /// [signals](QpConfig::signals) are moved past anything awaited, so that foreign device code, whose loops ignore errors, gets out
    /// of them; also if the engine itself has died. The first error is in the error word and the event queue before the first of
    /// these. What is drained is not data.
    Release,
}

/// A completion queue: one per send queue, one per receive queue.
#[derive(Clone, Copy, Debug)]
pub struct CqConfig {
    /// CQEs of 64 bytes, 64-byte aligned; one suffices for a collapsed CQ.
    pub ring: Shared<u8>,
    /// Base-two logarithm of the number of entries (ignored for a collapsed CQ).
    pub log_entries: u8,
    /// How completions are written.
    pub kind: CqKind,
    /// Its number, from [`Hca::alloc_cqn`](crate::Hca::alloc_cqn).
    pub cqn: Cqn,
}

/// A receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RqConfig {
    /// Receive WQEs, each beginning with a 16-byte data segment.
    pub ring: Shared<u8>,
    /// Base-two logarithm of the number of receive WQEs.
    pub log_entries: u8,
    /// Bytes from one receive WQE to the next; a power of two from 16.
    pub stride: u32,
    /// Doorbell record: big-endian count of receives posted, 16 bits.
    pub record: Shared<u32>,
    /// Where responder completions go.
    pub cq: CqConfig,
}

/// A queue pair.
pub struct QpConfig {
    /// Protection domain.
    pub pd: u32,
    /// Send ring: 64-byte slots, 64-byte aligned, in memory the CPU loads.
    pub sq: Shared<u8>,
    /// Base-two logarithm of the number of slots, 0 to 15.
    pub log_depth: u8,
    /// Completion queue of the send queue.
    pub cq: CqConfig,
    /// How the poster rings.
    pub handler: NicHandler,
    /// Doorbell word, or producer word for [`NicHandler::ProducerWord`]. The engine zeroes it at creation and reset and never
    /// writes it in between.
    pub doorbell: DoorbellWord,
    /// Send doorbell record, if there is one.
    pub record: Option<Shared<u32>>,
    /// Poll the record instead of the doorbell word: for software whose doorbell page several QPs share.
    pub poll_record: bool,
    /// A line in which device code notes long waits, a [`doorbell_device::layout::WaitNote`], for the flight record.
    pub wait_note: Option<Shared<u64>>,
    /// Where the first error goes before its CQE: a [`doorbell_device::layout::ErrorWord`] that the GPU can read.
    pub error_word: Option<Shared<u64>>,
    /// Receive queue, for SEND and WRITE with immediate.
    pub rq: Option<RqConfig>,
    /// Engine core; `None`: the one of the doorbell slot, else the least loaded.
    pub core: Option<usize>,
    /// What happens after an error.
    pub on_error: OnError,
    /// Words that [`OnError::Release`] moves past anything awaited.
    pub signals: Vec<Signals>,
    /// Keeps all this memory mapped; dropped when the engine has let go of the QP.
    pub keep: Keep,
}

impl fmt::Debug for QpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QpConfig")
            .field("pd", &self.pd)
            .field("sq", &self.sq)
            .field("log_depth", &self.log_depth)
            .field("cq", &self.cq)
            .field("handler", &self.handler)
            .field("doorbell", &self.doorbell)
            .field("rq", &self.rq)
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}

impl QpConfig {
    pub(crate) fn check(&self, cores: usize) -> Result<()> {
        let bad = |what: String| Err(HcaError::BadQp { what });
        if 1u32
            .checked_shl(self.log_depth.into())
            .is_none_or(|d| d > db::MAX_DEPTH)
        {
            return bad(format!(
                "log_depth is {}, at most 15 (32768 slots) is possible",
                self.log_depth
            ));
        }
        aligned("send ring", self.sq, WQEBB)?;
        check_cq("send CQ", &self.cq)?;
        if self.cq.kind == CqKind::PerSlot && self.cq.log_entries < self.log_depth {
            return bad(format!(
                "the send CQ has 2^{} entries for 2^{} slots: a per-slot CQ needs one entry a slot",
                self.cq.log_entries, self.log_depth
            ));
        }
        match &self.doorbell {
            DoorbellWord::At(word) => aligned("doorbell word", *word, 8)?,
            DoorbellWord::Slot(slot) => {
                if self.core.is_some_and(|c| c != slot.core()) {
                    return bad(format!(
                        "core {:?} was asked for, but the doorbell slot belongs to core {}",
                        self.core,
                        slot.core()
                    ));
                }
            }
        }
        if let Some(record) = self.record {
            aligned("doorbell record", record, 4)?;
        } else if self.poll_record {
            return bad("poll_record needs a doorbell record: give its address".into());
        }
        if self.poll_record && self.handler != NicHandler::DoorbellRecord {
            return bad(format!(
                "poll_record needs a poster that writes the record, {:?} does not",
                self.handler
            ));
        }
        if let Some(note) = self.wait_note {
            aligned("wait note", note, 64)?;
        }
        if let Some(word) = self.error_word {
            aligned("error word", word, 8)?;
        }
        if let Some(rq) = &self.rq {
            check_cq("receive CQ", &rq.cq)?;
            if rq.cq.cqn == self.cq.cqn {
                return bad(format!(
                    "send and receive queue share CQ {}: give each its own",
                    rq.cq.cqn
                ));
            }
            if !rq.stride.is_power_of_two() || rq.stride < 16 {
                return bad(format!(
                    "the receive stride is {} bytes, it must be a power of two from 16",
                    rq.stride
                ));
            }
            if rq.log_entries > 15 || rq.cq.log_entries < rq.log_entries {
                return bad(format!(
                    "the receive queue has 2^{} entries and its CQ 2^{}: at most 2^15, and a CQE for each",
                    rq.log_entries, rq.cq.log_entries
                ));
            }
            if rq.cq.kind == CqKind::Collapsed {
                return bad("the receive CQ is collapsed: receives need one CQE each".into());
            }
            aligned("receive ring", rq.ring, 16)?;
            aligned("receive doorbell record", rq.record, 4)?;
        }
        match self.core {
            Some(core) if core >= cores => {
                bad(format!("core {core} was asked for, there are {cores}"))
            }
            _ => Ok(()),
        }
    }

    /// Slots in the send ring.
    pub fn depth(&self) -> u32 {
        1 << self.log_depth
    }
}

fn aligned<T>(what: &str, at: Shared<T>, to: usize) -> Result<()> {
    if at.is_aligned_to(to) {
        return Ok(());
    }
    Err(HcaError::BadQp {
        what: format!("the {what} is at {at:?}, it must be {to}-byte aligned"),
    })
}

fn check_cq(what: &str, cq: &CqConfig) -> Result<()> {
    aligned(what, cq.ring, 64)?;
    if cq.log_entries > 22 {
        return Err(HcaError::BadQp {
            what: format!(
                "the {what} has 2^{} entries, at most 2^22 are possible",
                cq.log_entries
            ),
        });
    }
    Ok(())
}
