//! The device's completions, in whatever order, become CQEs in the order of WQEs; what arrives goes to where it belongs.

use std::time::{Duration, Instant};

use doorbell_verbs::abi::{Wc, wc_status};
use doorbell_verbs::efa::abi::status;
use doorbell_verbs::efa::{SrdOp, SrdWork};
use doorbell_wire::{Local, Syndrome, Vendor, Width};

use super::errand::{Errand, SINK};
use super::post::sink;
use super::wire::{Head, Kind};
use super::{CONTROL, Class, Hello, Link};
use crate::dma::{Piece, Pieces, Source, Work, old_bytes, put_old};
use crate::engine::qp::EngineQp;
use crate::engine::verbs::done::{BATCH, SHARE, syndrome};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::Place;
use crate::qp::QpState;
use crate::verbs::{CONTROLS, HEAD, RECEIVE, WINDOW};

/// Pause before a greeting that found nobody is repeated.
const AGAIN: Duration = Duration::from_millis(2);

/// A request, or an arrival, that ends the connection.
pub(super) enum Broken {
    /// The peer does not keep to what was agreed.
    Peer(&'static str),
    /// The device does not.
    Device(&'static str),
}

impl EngineQp {
    /// Takes the device's completions, carries out what the peer asks for, and answers. Returns how much there was.
    pub(in crate::engine) fn srd_done(&mut self, inner: &Inner) -> u64 {
        let mut taken = 0;
        while taken < SHARE {
            let Some(link) = self.srd() else { break };
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
                let Some(link) = self.srd() else { break };
                let wc = link.found[i];
                let outcome = if wc.wr_id & RECEIVE != 0 {
                    link.arrived(&wc)
                } else if wc.wr_id & CONTROL != 0 {
                    link.control_over(&wc);
                    Ok(())
                } else {
                    link.finished(&wc);
                    Ok(())
                };
                if let Err(broken) = outcome {
                    self.srd_broken(inner, broken);
                    return taken as u64;
                }
            }
            if got < BATCH {
                break;
            }
        }
        self.complete_in_order(inner);
        if self.cold.shared.state() != QpState::Ready {
            return taken as u64 + 1;
        }
        let served = self.serve_srd(inner);
        if self.cold.shared.state() != QpState::Ready {
            return taken as u64 + served + 1;
        }
        if let Some(link) = self.srd() {
            link.greet();
        }
        self.submit_srd(inner);
        if self.wqes != 0 {
            self.publish();
        }
        taken as u64 + served
    }

    pub(super) fn srd_broken(&mut self, inner: &Inner, broken: Broken) {
        let Some(link) = self.srd() else { return };
        let fault = match broken {
            Broken::Peer(why) => {
                tracing::error!("{:?}: the peer {why}", link.nic);
                Fault::BadResponse
            }
            Broken::Device(why) => {
                tracing::error!("{:?}: {why}", link.nic);
                Fault::PortDown
            }
        };
        self.fail_flight(inner, fault);
    }

    /// Completes WQEs whose requests are over, with all before them; the first that failed fails the QP.
    fn complete_in_order(&mut self, inner: &Inner) {
        let pd = self.cold.shared.pd;
        let mut through = None;
        let failed = loop {
            let Some(link) = self.srd() else { return };
            if link.done == link.posted {
                break None;
            }
            let entry = link.entries[link.index(link.done)];
            if !entry.is_over() {
                break None;
            }
            if let Some(failed) = entry.failed {
                break Some((entry.at, failed));
            }
            if let Some((local, width)) = entry.sink {
                // Where it went may have gone meanwhile.
                match link.old_value(inner, pd, &local, width, entry.old) {
                    Ok(true) => {}
                    Ok(false) => break None,
                    Err(fault) => break Some((entry.at, fault.syndromes())),
                }
            }
            link.done += 1;
            if entry.last {
                through = Some(entry.at);
            }
        };
        if through.is_some() {
            // What has no requests follows those before it.
            self.land(through);
        }
        let Some((at, (syndrome, vendor))) = failed else {
            return;
        };
        self.land(at.checked_sub(1));
        let ctrl = self.give_up_flight();
        self.fail_as(inner, syndrome, vendor, ctrl);
    }
}

impl Link {
    /// Puts the old value of an atomic where it goes. `false`: a copy engine is about it.
    fn old_value(
        &mut self,
        inner: &Inner,
        pd: u32,
        local: &Local,
        width: Width,
        old: u64,
    ) -> Result<bool, Fault> {
        if self.errands[SINK].is_open() {
            return Ok(false);
        }
        if let Errand::Ended(result) = std::mem::take(&mut self.errands[SINK]) {
            return result.map(|_| true);
        }
        match sink(inner, pd, local)? {
            // SAFETY: the place was found just now, with its bounds and the right to write it.
            Place::Host(to) => unsafe { put_old(to, width, old) },
            dst @ Place::Device { .. } => {
                let len = width.bytes() as usize;
                let piece = Piece {
                    src: Source::Inline(old_bytes(width, old)[..len].into()),
                    dst,
                    len: len as u64,
                };
                self.errands[SINK] = Errand::Begin(Work::Copy {
                    pieces: Pieces::One(piece),
                    signal: true,
                });
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The device has finished a request.
    fn finished(&mut self, wc: &Wc) {
        let number = wc.wr_id;
        if number < self.done || number >= self.posted {
            tracing::debug!("{:?}: a completion of request {number}", self.nic);
            return;
        }
        let at = self.index(number);
        if self.entries[at].sent {
            tracing::debug!("{:?}: request {number} twice", self.nic);
            return;
        }
        self.entries[at].sent = true;
        if wc.status != wc_status::SUCCESS {
            let words = self.nic.port.context().verbs().status_words(wc.status);
            tracing::debug!(
                "{:?}: request {number}: {words} (vendor error {:#x})",
                self.nic,
                wc.vendor_err
            );
            self.fail_entry(at, failure_of(wc));
        } else if self.entries[at].answered {
            self.over(at);
        }
    }

    fn fail_entry(&mut self, at: usize, failed: (Syndrome, Vendor)) {
        let entry = &mut self.entries[at];
        (entry.sent, entry.answered) = (true, true);
        entry.failed.get_or_insert(failed);
        self.broken = true;
        self.over(at);
    }

    fn over(&mut self, at: usize) {
        let class = self.entries[at].class;
        let left = self.counted(class);
        *left = left.saturating_sub(1);
    }

    /// An answer or a greeting has left, or not.
    fn control_over(&mut self, wc: &Wc) {
        let place = (wc.wr_id & !CONTROL) as u16;
        if usize::from(place) < CONTROLS && !self.controls.contains(&place) {
            self.controls.push(place);
        }
        let greeting = self.greeting() == Some(place);
        let ok = wc.status == wc_status::SUCCESS;
        match (greeting, ok) {
            (true, true) => self.hello = Hello::Arrived,
            // The peer may not be there yet; how long it may stay away is looked at elsewhere.
            (true, false) => self.hello = Hello::At(Instant::now() + AGAIN),
            (false, true) => self.serve.farewell_left(place),
            (false, false) => {
                tracing::debug!(
                    "{:?}: an answer did not arrive: status {}, vendor error {:#x}",
                    self.nic,
                    wc.status,
                    wc.vendor_err
                );
                self.serve.farewell_left(place);
            }
        }
    }

    fn greeting(&self) -> Option<u16> {
        match self.hello {
            Hello::Sent(place) => Some(place),
            _ => None,
        }
    }

    /// Says hello when it is time.
    fn greet(&mut self) {
        let Hello::At(when) = self.hello else { return };
        if Instant::now() < when {
            return;
        }
        let Some(peer) = self.nic.peer() else { return };
        let head = Head {
            count: WINDOW as u32,
            ..Head::new(Kind::Hello, peer.ours, 0)
        };
        if let Some(place) = self.control(head, &[]) {
            self.hello = Hello::Sent(place);
        }
    }

    /// Sends an answer or a greeting; `None`: there is no place for it now.
    pub(super) fn control(&mut self, head: Head, results: &[u64]) -> Option<u16> {
        let place = self.controls.pop()?;
        let len = HEAD + 8 * results.len();
        let Some((to, piece)) = self.nic.controls.place(usize::from(place), len) else {
            self.controls.push(place);
            return None;
        };
        let head = head.encode();
        // SAFETY: the place is this message's until its completion, and has room for it.
        unsafe {
            core::ptr::copy_nonoverlapping(head.as_ptr(), to, HEAD);
            for (i, result) in results.iter().enumerate() {
                let bytes = result.to_le_bytes();
                core::ptr::copy_nonoverlapping(bytes.as_ptr(), to.add(HEAD + 8 * i), 8);
            }
        }
        let id = CONTROL | u64::from(place);
        self.works.push(SrdWork::new(id, SrdOp::Send, &[piece]));
        Some(place)
    }

    /// A receive has completed.
    fn arrived(&mut self, wc: &Wc) -> Result<(), Broken> {
        let number = (wc.wr_id & !RECEIVE) as usize;
        if wc.status != wc_status::SUCCESS {
            return Err(Broken::Device("a receive failed"));
        }
        let keep = self.message_arrived(number, wc)?;
        if !keep {
            self.give_back(number)?;
        }
        Ok(())
    }

    /// The receive may be filled again.
    pub(super) fn give_back(&self, number: usize) -> Result<(), Broken> {
        let posted = self.nic.receive(number);
        posted.map_err(|_| Broken::Device("a receive cannot be posted"))
    }

    /// `true`: its bytes are still needed.
    fn message_arrived(&mut self, number: usize, wc: &Wc) -> Result<bool, Broken> {
        let Some(peer) = self.nic.peer() else {
            return Ok(false);
        };
        let nic = std::sync::Arc::clone(&self.nic);
        let bytes = nic.arrived(number, wc.byte_len as usize);
        let Some((head, rest)) = Head::parse(bytes).filter(|_| wc.src_qp == peer.qpn) else {
            // Who got past the device knows the queue pair's key; a stranger still does not know the token.
            tracing::debug!("{:?}: a message that is not of its peer", self.nic);
            return Ok(false);
        };
        if head.token != peer.theirs {
            tracing::debug!("{:?}: a message of another connection", self.nic);
            return Ok(false);
        }
        match head.kind {
            Kind::Hello if head.count as usize != WINDOW => {
                Err(Broken::Peer("has another window of messages"))
            }
            Kind::Hello => {
                self.greeted = None;
                Ok(false)
            }
            Kind::Answer => {
                self.answer(&head, rest)?;
                Ok(false)
            }
            _ => self.serve.keep(head.seq, number, bytes.len()),
        }
    }

    /// Requests of ours were carried out.
    fn answer(&mut self, head: &Head, results: &[u8]) -> Result<(), Broken> {
        let count = u64::from(head.count);
        let failed = u64::from(head.failed.is_some());
        let end = head.seq.checked_add(count + failed);
        let fits =
            end.is_some_and(|end| end <= self.asked && self.asked - head.seq <= WINDOW as u64);
        if !fits || results.len() as u64 != 8 * count {
            return Err(Broken::Peer("answers what it was not asked"));
        }
        for (seq, result) in (head.seq..).zip(results.chunks_exact(8)) {
            let at = self.unanswered(seq)?;
            let old = result.first_chunk::<8>().copied().unwrap_or_default();
            let entry = &mut self.entries[at];
            entry.old = u64::from_le_bytes(old);
            entry.answered = true;
            if entry.sent {
                self.over(at);
            }
        }
        if let Some(failure) = head.failed {
            let at = self.unanswered(head.seq + count)?;
            // The device may still be busy with its place, which nothing uses any more: the queue pair ends.
            self.fail_entry(at, failure);
        }
        Ok(())
    }
}

impl Link {
    /// The entry of the message of that number, which has no answer yet.
    fn unanswered(&self, seq: u64) -> Result<usize, Broken> {
        let number = self.asks[seq as usize % WINDOW];
        let at = self.index(number);
        let entry = &self.entries[at];
        if number < self.done || entry.class != Class::Message || entry.answered {
            return Err(Broken::Peer("answers a message twice"));
        }
        Ok(at)
    }
}

/// What the device's failure of a request means.
fn failure_of(wc: &Wc) -> (Syndrome, Vendor) {
    match wc.vendor_err {
        // InfiniBand has no status for these, which say that there is nobody.
        status::BAD_DEST_QPN => Fault::PeerDead.syndromes(),
        status::UNREACHABLE => Fault::RetryExceeded.syndromes(),
        // Nothing of this side has failed before: the queue pair did.
        _ if wc.status == wc_status::WR_FLUSH_ERR => Fault::PortDown.syndromes(),
        _ => (syndrome(wc.status), Vendor::NONE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_that_infiniband_does_not_know_are_told_by_the_vendor_error() {
        let of = |status, vendor_err| {
            let (syndrome, vendor) = failure_of(&Wc {
                status,
                vendor_err,
                ..Wc::default()
            });
            (syndrome, vendor)
        };
        let dead = (Syndrome::TRANSPORT_RETRY, Vendor::PEER_DEAD);
        assert_eq!(of(wc_status::REM_INV_RD_REQ_ERR, 9), dead);
        let lost = (Syndrome::TRANSPORT_RETRY, Vendor::NONE);
        assert_eq!(of(wc_status::RESP_TIMEOUT_ERR, 15), lost);
        assert_eq!(of(wc_status::RESP_TIMEOUT_ERR, 13), lost);
        let stopped = (Syndrome::TRANSPORT_RETRY, Vendor::ENGINE_DOWN);
        assert_eq!(of(wc_status::WR_FLUSH_ERR, 1), stopped);
        let refused = (Syndrome::REMOTE_ACCESS, Vendor::NONE);
        assert_eq!(of(wc_status::REM_ACCESS_ERR, 7), refused);
    }
}
