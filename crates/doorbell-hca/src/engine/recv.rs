//! The receive side of a QP, as far as WRITE with immediate needs it: count receives, consume one, write its CQE.
//! Initiators on any core deliver here, one at a time (try-lock); the receive WQE's memory is not used, as WRITE carries its own address.

use doorbell_wire::Qpn;
use doorbell_wire::cqe::Kind;
use doorbell_wire::db::{self, Advance};

use super::cq::CqWriter;
use crate::fault::Fault;
use crate::qp::RqConfig;

/// A receive queue.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    config: RqConfig,
    cq: CqWriter,
    /// Receives posted, as far as the record was read.
    pi: u64,
    /// Receives consumed.
    ci: u64,
    /// Does the memory still belong to us? Closed before it is let go, by whoever holds the lock around this queue.
    open: bool,
}

impl RecvQueue {
    pub(crate) fn new(config: RqConfig, qpn: Qpn) -> Self {
        Self {
            cq: CqWriter::new(&config.cq, qpn),
            config,
            pi: 0,
            ci: 0,
            open: true,
        }
    }

    /// Initialises record and CQ.
    ///
    /// # Safety
    /// The memory is mapped and nobody uses it.
    pub(crate) unsafe fn initialise(&mut self) {
        (self.pi, self.ci) = (0, 0);
        // SAFETY: the caller's promise.
        unsafe {
            self.config.record.store_release(0);
            self.cq.initialise();
        }
    }

    /// Nothing touches the memory afterwards.
    pub(crate) fn close(&mut self) {
        self.open = false;
    }

    /// Reads the record. A record that jumps is taken as "nothing new": its QP has a poster gone wrong, which is not the initiator's fault.
    unsafe fn refresh(&mut self) {
        // SAFETY: the caller (of each caller) promises that the QP is attached, so that its record is mapped.
        let record = db::parse_record(unsafe { self.config.record.load_acquire() });
        if let Advance::Slots(n) =
            db::advance16(record, self.pi as u16, 1 << self.config.log_entries)
            && self.pi + u64::from(n) - self.ci <= 1 << self.config.log_entries
        {
            self.pi += u64::from(n);
        }
    }

    /// Consumes a receive for an immediate; `false` if there is none.
    ///
    /// # Safety
    /// The QP's memory is mapped as long as this queue is open.
    pub(crate) unsafe fn deliver(&mut self, imm: u32, byte_cnt: u32) -> bool {
        if !self.open {
            return false;
        }
        if self.pi == self.ci {
            // SAFETY: the caller's promise.
            unsafe { self.refresh() };
            if self.pi == self.ci {
                return false;
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            self.cq.received(
                self.ci,
                self.ci as u16,
                Kind::ResponderWriteImm,
                byte_cnt,
                imm,
            )
        };
        self.ci += 1;
        true
    }

    /// Completes every posted receive in error.
    ///
    /// # Safety
    /// As for [`Self::deliver`].
    pub(crate) unsafe fn flush(&mut self) {
        if !self.open {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.refresh() };
        let row = Fault::Flushed.row();
        while self.ci != self.pi {
            // SAFETY: the caller's promise.
            unsafe {
                self.cq.error(
                    self.ci,
                    self.ci as u16,
                    Kind::ResponderError,
                    0,
                    row.syndrome,
                    row.vendor,
                )
            };
            self.ci += 1;
        }
    }
}
