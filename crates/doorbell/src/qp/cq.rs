//! The completion queues of a queue pair, for those who look at them from the host.
//!
//! Kernels poll it through the queue pair's export; the engine writes it.

use std::fmt;

use doorbell_device::layout::CqKind;

use super::QpInner;
use crate::Result;

/// The completion queue of a queue pair's send queue, or of its receive queue.
///
/// Kernels poll it; the host only looks. [`CqKind::PerSlot`] has an entry for every slot and takes signalled one-slot WQEs
/// only, [`CqKind::Collapsed`] has one entry that each completion overwrites.
#[derive(Clone, Copy)]
pub struct Cq<'a> {
    pub(super) qp: &'a QpInner,
    /// Of the receive queue: its number and entries.
    pub(super) recv: Option<(u32, u32)>,
}

impl Cq<'_> {
    /// CQ number, 24 bits: what WAIT names.
    pub fn cqn(&self) -> u32 {
        self.recv.map_or_else(|| self.qp.provider.cqn(), |r| r.0)
    }

    /// How completions are written.
    pub fn kind(&self) -> CqKind {
        match self.recv {
            Some(_) => CqKind::PerSlot,
            None => self.qp.cq_kind,
        }
    }

    /// CQEs.
    pub fn entries(&self) -> u32 {
        match (self.recv, self.qp.cq_kind) {
            (Some((_, entries)), _) => entries,
            (None, CqKind::PerSlot) => self.qp.depth(),
            (None, CqKind::Collapsed) => 1,
        }
    }

    /// A copy of one CQE (64 bytes), modulo the number of entries.
    pub fn peek(&self, index: u32) -> Result<[u8; 64]> {
        let mut cqe = [0; 64];
        let queue = &self.qp.queue;
        let cq = match (&self.recv, &queue.recv) {
            (Some(_), Some(recv)) => &recv.cq,
            _ => &queue.cq,
        };
        cq.read((index % self.entries()) as usize * 64, &mut cqe)?;
        Ok(cqe)
    }
}

impl fmt::Debug for Cq<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq")
            .field("cqn", &self.cqn())
            .field("kind", &self.kind())
            .field("entries", &self.entries())
            .finish()
    }
}
