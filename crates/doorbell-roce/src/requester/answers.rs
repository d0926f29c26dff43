//! What comes back: acknowledgements, NAKs, answers to READs and atomics.

use doorbell_wire::roce::{AethKind, Ext, Kind, NakCode, Packet, Psn, rnr_timer_ns};

use super::{Posted, Requester};
use crate::counters::Counters;
use crate::memory::{Memory, Status};
use crate::message::{Event, Failure, Op};

impl Requester {
    /// An acknowledgement, a NAK, or a packet of an answer.
    pub(crate) fn answer(
        &mut self,
        packet: &Packet<'_>,
        now: u64,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) {
        let psn = packet.bth.psn;
        // Answers to what was never sent, or has been answered: of an earlier life, or duplicates.
        if self.failed || psn.since(self.una) < 0 || psn.since(self.high) >= 0 {
            counters.unexpected_packets += 1;
            return;
        }
        let before = self.una;
        match packet.kind {
            Kind::Acknowledge => self.acknowledge(packet, now, counters),
            Kind::ReadResponse => self.read_response(packet, memory, counters),
            Kind::AtomicAcknowledge => self.atomic_response(packet, memory, counters),
            _ => counters.unexpected_packets += 1,
        }
        self.progressed(before, now);
    }

    /// Bookkeeping after `una` moved.
    fn progressed(&mut self, before: Psn, now: u64) {
        let packets = self.una.since(before);
        if packets <= 0 || self.failed {
            return;
        }
        self.window.acknowledged(packets as u32);
        if self.rnr_until.is_none() {
            self.rnr_tries = 0;
        }
        self.went_back = None;
        if let Some((psn, fault)) = self.fault {
            match self.una.since(psn) {
                0 => {
                    self.fail(psn, Failure::Local(fault));
                    return;
                }
                // It had been sent once before, and arrived.
                1.. => self.fault = None,
                _ => {}
            }
        }
        while self
            .reads
            .front()
            .is_some_and(|end| end.since(self.una) <= 0)
        {
            self.reads.pop_front();
        }
        // A late answer overtook what was to be sent again.
        if self.next.since(self.una) < 0 {
            self.go_back(self.una);
        }
        if self.rnr_until.is_some() || self.high.since(self.una) <= 0 {
            self.timer.stop();
        } else {
            self.timer.restart(now);
        }
    }

    fn acknowledge(&mut self, packet: &Packet<'_>, now: u64, counters: &mut Counters) {
        let psn = packet.bth.psn;
        let Some(aeth) = packet.ext.aeth() else {
            counters.unexpected_packets += 1;
            return;
        };
        match aeth.kind {
            AethKind::Ack { .. } => {
                if !self.advance(psn.add(1)) {
                    self.missing_answer(counters);
                }
            }
            AethKind::RnrNak { timer } => {
                let before = self.una;
                if !self.advance(psn) {
                    counters.rnr_nak_retry_err += 1;
                    self.missing_answer(counters);
                    return;
                }
                if self.una != before {
                    self.rnr_tries = 0;
                } else if self.rnr_until.is_some_and(|until| now < until) {
                    // The network doubled it: nothing was sent since the first.
                    counters.unexpected_packets += 1;
                    return;
                }
                if self.rnr_retry < 7 {
                    if self.rnr_tries >= self.rnr_retry {
                        counters.req_rnr_retries_exceeded += 1;
                        self.fail(psn, Failure::RnrRetry);
                        return;
                    }
                    self.rnr_tries += 1;
                }
                counters.rnr_nak_retry_err += 1;
                self.go_back(psn);
                self.timer.stop();
                self.rnr_until = Some(now.saturating_add(rnr_timer_ns(timer)));
            }
            AethKind::Nak(NakCode::PsnSequence) => {
                counters.packet_seq_err += 1;
                // The peer sends one NAK a gap; a second one for the same place means that the first try was lost too.
                self.window.congested();
                if self.advance(psn) {
                    self.go_back(psn);
                } else {
                    self.missing_answer(counters);
                }
            }
            // A READ before it that was not answered comes first: asked again, the peer answers it and repeats the NAK.
            AethKind::Nak(_) if !self.advance(psn) => self.missing_answer(counters),
            AethKind::Nak(code) => {
                let failure = match code {
                    NakCode::RemoteAccess => {
                        counters.req_remote_access_errors += 1;
                        Failure::RemoteAccess
                    }
                    NakCode::RemoteOperational => Failure::RemoteOperational,
                    NakCode::InvalidRequest => {
                        counters.req_remote_invalid_request += 1;
                        Failure::RemoteInvalid
                    }
                    _ => Failure::BadResponse,
                };
                self.fail(psn, failure);
            }
            AethKind::Reserved(_) => {
                counters.req_bad_responses += 1;
                self.fail(self.una, Failure::BadResponse);
            }
        }
    }

    /// Everything before `through` is acknowledged; `false` if a READ or atomic before it has not been answered.
    fn advance(&mut self, through: Psn) -> bool {
        while self.una.since(through) < 0 {
            let Some(posted) = self.messages.front() else {
                return true;
            };
            if posted.message.op.is_read_like() {
                return false;
            }
            let (end, token) = (posted.end(), posted.message.token);
            if through.since(end) < 0 {
                self.una = through;
            } else {
                self.una = end;
                self.complete(token);
            }
        }
        true
    }

    fn complete(&mut self, token: u64) {
        self.messages.pop_front();
        self.current = self.current.saturating_sub(1);
        self.tell(Event::Done { through: token });
    }

    /// An answer is missing that must have been sent (volume 1, 9.7.5.2.8): ask again, once; then it is the timer's turn.
    fn missing_answer(&mut self, counters: &mut Counters) {
        if self.went_back != Some(self.una) {
            counters.implied_nak_seq_err += 1;
            self.window.congested();
            self.go_back(self.una);
            self.went_back = Some(self.una);
        }
    }

    /// The message whose answer is next, if that is what `psn` is: everything before it is then acknowledged. Otherwise an answer before it is
    /// missing, and is asked for again.
    fn answered(&mut self, psn: Psn, counters: &mut Counters) -> Option<Posted> {
        if !self.advance(psn) || self.una != psn {
            self.missing_answer(counters);
            return None;
        }
        self.messages.front().copied()
    }

    fn read_response(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) {
        let psn = packet.bth.psn;
        let Some(posted) = self.answered(psn, counters) else {
            return;
        };
        let Op::Read { .. } = posted.message.op else {
            counters.req_bad_responses += 1;
            self.fail(psn, Failure::BadResponse);
            return;
        };
        let index = psn.since(posted.first) as u32;
        let offset = index * self.mtu;
        let last = index + 1 == posted.packets;
        let expected = if last {
            posted.message.len - offset
        } else {
            self.mtu
        };
        if packet.payload.len() != expected as usize {
            counters.req_bad_responses += 1;
            self.fail(psn, Failure::BadResponse);
            return;
        }
        if !self.stored(psn, posted.message.token, offset, packet.payload, memory) {
            return;
        }
        counters.rx_bytes += u64::from(expected);
        self.una = psn.add(1);
        if last {
            self.complete(posted.message.token);
        }
    }

    fn atomic_response(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) {
        let psn = packet.bth.psn;
        let Some(posted) = self.answered(psn, counters) else {
            return;
        };
        let (Ext::AtomicAck(_, value), Op::FetchAdd { .. } | Op::CompareSwap { .. }) =
            (packet.ext, posted.message.op)
        else {
            counters.req_bad_responses += 1;
            self.fail(psn, Failure::BadResponse);
            return;
        };
        if self.stored(psn, posted.message.token, 0, &value.to_le_bytes(), memory) {
            self.una = psn.add(1);
            self.complete(posted.message.token);
        }
    }

    /// Stores what came; `false` if that failed, and the message with it.
    fn stored(
        &mut self,
        psn: Psn,
        token: u64,
        offset: u32,
        bytes: &[u8],
        memory: &mut impl Memory,
    ) -> bool {
        if bytes.is_empty() {
            return true;
        }
        match memory.store(token, offset, bytes) {
            Ok(Status::Now) => true,
            Ok(Status::Later(ticket)) => {
                self.ticket = self.ticket.max(ticket);
                true
            }
            Err(fault) => {
                self.fail(psn, Failure::Local(fault));
                false
            }
        }
    }
}
