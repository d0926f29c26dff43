//! Memory that only a copy engine reaches, behind a connection.
//!
//! Packets are made and taken at once; such memory takes its time. What arrives is gathered in buffers and goes on in large pieces
//! (`inward`), what leaves is fetched in large pieces ahead of the packets (`outward`). A queue pair has this from the first such region
//! that it meets. Its copies go in two lanes of the core's pipeline, so that neither waits for the other.

use std::sync::Arc;

use super::inward::Inward;
use super::outward::Outward;
use crate::dma::{Buffer, DmaCore, DmaFailure};
use crate::engine::lane;

/// The lane of what is written: one order for all of a queue pair, so that a signal follows what it announces.
pub(super) const IN: u32 = 1;
/// The lane of what is read.
pub(super) const OUT: u32 = 2;

/// The copies of one queue pair.
#[derive(Debug, Default)]
pub(in crate::engine) struct Staged {
    pub(super) inward: Inward,
    pub(super) outward: Outward,
}

/// What a copy's end means for the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Ended {
    /// It goes on.
    Well,
    /// What a request of the peer wrote is lost from this ticket on.
    Lost {
        /// The newest that is not.
        settled: u64,
    },
}

impl Staged {
    /// A copy ended. Returns what that means, and a buffer that nobody needs.
    pub(in crate::engine) fn ended(
        &mut self,
        lane: u32,
        cookie: u64,
        result: &Result<(), Arc<DmaFailure>>,
        old: u64,
        buffer: Option<Buffer>,
    ) -> (Ended, Option<Buffer>) {
        if lane == OUT {
            return (
                Ended::Well,
                self.outward.ended(cookie, result.is_ok(), buffer),
            );
        }
        (self.inward.ended(cookie, result.is_ok(), old), buffer)
    }

    /// A copy failed.
    pub(super) fn has_failed(&self) -> bool {
        self.inward.has_failed() || self.outward.has_failed()
    }

    /// Nothing is under way, and no buffer is kept.
    pub(in crate::engine) fn is_idle(&self) -> bool {
        !self.inward.is_busy() && self.outward.is_empty()
    }

    /// Messages before `oldest` are complete.
    pub(in crate::engine) fn complete(&mut self, oldest: u64, dma: &mut DmaCore) {
        self.outward.complete(oldest, dma);
    }

    /// The queue pair is at its end: copies that run go on by themselves, buffers go back.
    pub(in crate::engine) fn end(&mut self, dma: &mut DmaCore, slot: u32) {
        dma.cancel(lane(slot, IN));
        dma.cancel(lane(slot, OUT));
        if let Some(buffer) = self.inward.abandon() {
            dma.release(buffer);
        }
        self.outward.clear(dma);
    }
}
