//! The completion queue of a send queue, for those who look at it from the host.
//!
//! Kernels poll it through the queue pair's export; the engine writes it.

use std::fmt;

use doorbell_device::layout::CqKind;

use super::QpInner;
use crate::Result;

/// The completion queue of a queue pair's send queue.
///
/// Kernels poll it; the host only looks. [`CqKind::PerSlot`] has an entry for every slot and takes signalled one-slot WQEs
/// only, [`CqKind::Collapsed`] has one entry that each completion overwrites.
#[derive(Clone, Copy)]
pub struct Cq<'a> {
    pub(super) qp: &'a QpInner,
}

impl Cq<'_> {
    /// CQ number, 24 bits: what WAIT names.
    pub fn cqn(&self) -> u32 {
        self.qp.provider.cqn()
    }

    /// How completions are written.
    pub fn kind(&self) -> CqKind {
        self.qp.cq_kind
    }

    /// CQEs.
    pub fn entries(&self) -> u32 {
        match self.qp.cq_kind {
            CqKind::PerSlot => self.qp.depth(),
            CqKind::Collapsed => 1,
        }
    }

    /// A copy of one CQE (64 bytes), modulo the number of entries.
    pub fn peek(&self, index: u32) -> Result<[u8; 64]> {
        let mut cqe = [0; 64];
        self.qp
            .queue
            .cq
            .read((index % self.entries()) as usize * 64, &mut cqe)?;
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
