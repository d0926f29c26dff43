//! The device's completions become CQEs: a successful one completes its WQE and all before it, a failed one fails the QP at its WQE.

use std::sync::Arc;

use doorbell_verbs::abi::{Wc, wc_status};
use doorbell_wire::{Syndrome, Vendor};

use super::{Link, Sent};
use crate::engine::qp::{EngineQp, Target};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::qp::QpState;
use crate::verbs::RECEIVE;

/// Completions taken from a device at a time.
pub(super) const BATCH: usize = 16;
/// Completions of one queue pair in one round at most, before the next has its turn.
pub(super) const SHARE: usize = 256;

/// The syndrome of a device's status: both follow InfiniBand.
pub(super) fn syndrome(status: u32) -> Syndrome {
    match status {
        wc_status::LOC_LEN_ERR => Syndrome::LOCAL_LENGTH,
        wc_status::LOC_PROT_ERR => Syndrome::LOCAL_PROT,
        wc_status::WR_FLUSH_ERR => Syndrome::WR_FLUSH,
        wc_status::MW_BIND_ERR => Syndrome::MW_BIND,
        wc_status::BAD_RESP_ERR => Syndrome::BAD_RESP,
        wc_status::LOC_ACCESS_ERR => Syndrome::LOCAL_ACCESS,
        wc_status::REM_INV_REQ_ERR => Syndrome::REMOTE_INVAL_REQ,
        wc_status::REM_ACCESS_ERR => Syndrome::REMOTE_ACCESS,
        wc_status::REM_OP_ERR => Syndrome::REMOTE_OP,
        wc_status::RETRY_EXC_ERR | wc_status::RESP_TIMEOUT_ERR => Syndrome::TRANSPORT_RETRY,
        wc_status::RNR_RETRY_EXC_ERR => Syndrome::RNR_RETRY,
        wc_status::REM_ABORT_ERR => Syndrome::REMOTE_ABORTED,
        // LOC_QP_OP_ERR, and what no device should say of a reliable queue pair.
        _ => Syndrome::LOCAL_QP_OP,
    }
}

impl Link {
    /// How far a successful completion of request `number` reaches: the last slot whose WQE is complete, and whether it says anything new.
    fn through(&mut self, number: u64) -> Option<Option<u64>> {
        if number < self.done || number >= self.posted {
            // Late, double, or of nothing that was posted: the device's completions of one queue pair are in order.
            tracing::debug!(
                "{:?}: a completion of request {number} out of order",
                self.nic
            );
            return None;
        }
        let sent = self.before(number);
        self.done = number + 1;
        Some(sent)
    }

    /// The last WQE that is complete when request `number` is.
    fn before(&self, number: u64) -> Option<u64> {
        let mut number = number;
        let mut sent = self.sent(number);
        // A marker says what the request before it says.
        while sent.marker {
            if number == self.done {
                return None;
            }
            number -= 1;
            sent = self.sent(number);
        }
        match sent {
            Sent { at, last: true, .. } => Some(at),
            Sent { at, .. } => at.checked_sub(1),
        }
    }
}

impl EngineQp {
    /// Takes the device's completions, and hands receives on. Returns how many there were.
    pub(super) fn verbs_done(&mut self, inner: &Inner) -> u64 {
        let mut taken = 0;
        while taken < SHARE {
            let Some(link) = self.verbs() else { break };
            let receives = link.receiving != 0;
            if link.posted == link.done && !receives {
                break;
            }
            let got = match link.nic.cq.poll(&mut *link.found) {
                Ok(got) => got,
                Err(_) => {
                    tracing::error!("{:?}: its completions cannot be read", link.nic);
                    self.fail_flight(inner, Fault::PortDown);
                    return taken as u64 + 1;
                }
            };
            taken += got;
            for i in 0..got {
                let Some(link) = self.verbs() else { break };
                let wc = link.found[i];
                if wc.wr_id & RECEIVE != 0 {
                    self.received(inner, &wc);
                } else {
                    self.completed_by_device(inner, &wc);
                }
                if self.cold.shared.state() != QpState::Ready {
                    return taken as u64;
                }
            }
            if got < BATCH {
                break;
            }
        }
        if self.wqes != 0 {
            self.publish();
        }
        taken as u64 + self.hand_receives_on(inner)
    }

    #[inline]
    fn completed_by_device(&mut self, inner: &Inner, wc: &Wc) {
        let Some(link) = self.verbs() else { return };
        if wc.status == wc_status::SUCCESS {
            if let Some(through) = link.through(wc.wr_id) {
                self.land(through);
            }
            return;
        }
        self.failed_by_device(inner, wc);
    }

    #[cold]
    fn failed_by_device(&mut self, inner: &Inner, wc: &Wc) {
        let Some(link) = self.verbs() else { return };
        let port = Arc::clone(&link.nic.port);
        let words = port.context().verbs().status_words(wc.status);
        tracing::debug!(
            "{:?}: request {}: {words} (vendor error {:#x})",
            link.nic,
            wc.wr_id,
            wc.vendor_err
        );
        if wc.wr_id < link.done || wc.wr_id >= link.posted {
            // Of nothing that is under way; but the queue pair is broken all the same.
            self.fail_flight(inner, Fault::PortDown);
            return;
        }
        let sent = link.sent(wc.wr_id);
        // All before it are complete.
        let before = match sent.marker {
            false => sent.at.checked_sub(1),
            true => link.before(wc.wr_id),
        };
        link.done = wc.wr_id;
        self.land(before);
        if wc.status == wc_status::WR_FLUSH_ERR {
            // The first failure was not one of ours: the peer's request was refused here.
            self.fail_flight(inner, Fault::PeerRefused);
            return;
        }
        if sent.marker {
            // Only the question failed, and with it the queue pair: what waits fails with its own fault or with this one.
            self.fail_flight(inner, Fault::PortDown);
            return;
        }
        let (mut syndrome, mut vendor) = (syndrome(wc.status), Vendor::NONE);
        // Some devices send nothing any more then, and others repeat until they give up; a fault of the work request it is with none.
        if syndrome == Syndrome::LOCAL_QP_OP && port.is_down() {
            (syndrome, vendor) = Fault::PortDown.syndromes();
        }
        let ctrl = self.give_up_flight();
        self.fail_as(inner, syndrome, vendor, ctrl);
    }
}

/// The link of a queue pair that is being failed: its device stops too. What it has is flushed, and an RC peer is told by its transport.
pub(in crate::engine) fn stop(target: &Target) {
    let stopped = match target {
        Target::Verbs(link) => link.nic.qp.fail(),
        Target::Srd(link) => link.nic.qp.fail(),
        _ => return,
    };
    if let Err(e) = stopped {
        tracing::debug!("{e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_the_syndrome_of_its_meaning() {
        for (status, expected) in [
            (wc_status::LOC_LEN_ERR, 0x01),
            (wc_status::LOC_QP_OP_ERR, 0x02),
            (wc_status::LOC_PROT_ERR, 0x04),
            (wc_status::WR_FLUSH_ERR, 0x05),
            (wc_status::MW_BIND_ERR, 0x06),
            (wc_status::BAD_RESP_ERR, 0x10),
            (wc_status::LOC_ACCESS_ERR, 0x11),
            (wc_status::REM_INV_REQ_ERR, 0x12),
            (wc_status::REM_ACCESS_ERR, 0x13),
            (wc_status::REM_OP_ERR, 0x14),
            (wc_status::RETRY_EXC_ERR, 0x15),
            (wc_status::RNR_RETRY_EXC_ERR, 0x16),
            (wc_status::REM_ABORT_ERR, 0x22),
            (wc_status::FATAL_ERR, 0x02),
            (wc_status::GENERAL_ERR, 0x02),
        ] {
            assert_eq!(syndrome(status).0, expected, "status {status}");
        }
    }
}
