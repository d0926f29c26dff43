//! SEND between processes of one host: the message goes through chunks of the mailbox that both map, since only the sender's engine reads the
//! sender's memory and only the owner's writes that of a receive.
//!
//! The sender's engine hands over parts as long as there is room, and completes a WQE when its last part was answered. The target's engine
//! takes a receive for the first part, fills it part by part, and completes it with the last, when all bytes are visible. A receive that was
//! taken for a message whose sender goes is given back. Both ends use the same buffers for GPU memory as packets do (`roce::staged`).

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use doorbell_roce::{Memory, Received, ReceivedKind, Status};
use doorbell_wire::{Ctrl, Opcode, Payload};

use super::Cx;
use super::exec::{Outcome, Step};
use super::keys::Use;
use super::qp::{EngineQp, Target};
use super::roce::{InFlight, fault_of};
use crate::fault::Fault;
use crate::hca::Inner;
use crate::link::{Incoming, PART, Part, RemoteQp};

/// Parts taken from one peer in a round, at most.
const SHARE: usize = 64;

/// The messages of a QP that are under way.
#[derive(Debug, Default)]
pub(super) struct Mail {
    /// The message and byte to be handed over next.
    cursor: (u64, u32),
    /// Parts without an answer, oldest first: of those that end a message, which.
    unanswered: VecDeque<Option<u64>>,
    /// Since when nothing has been answered, and whether for want of a receive.
    silent: Option<(Instant, bool)>,
    /// The message that is coming in: its bytes, and where the next part begins.
    coming: Option<(u32, u32)>,
    /// Answers owed, each when its ticket has settled: those that end a message complete its receive.
    owed: VecDeque<(u64, Option<Received>)>,
    /// The newest ticket.
    ticket: u64,
}

impl Mail {
    /// Whether something that came in is not answered yet.
    fn is_receiving(&self) -> bool {
        self.coming.is_some() || !self.owed.is_empty()
    }
}

impl EngineQp {
    /// A SEND to another process; its bytes are handed over in the turns that follow.
    pub(super) fn post_mail(
        &mut self,
        cx: &mut Cx<'_>,
        ctrl: Ctrl,
        peer: &Arc<dyn RemoteQp>,
        local: Payload<'_>,
    ) -> Result<Outcome, Fault> {
        if !peer.receives() {
            return Err(Fault::NoReceive);
        }
        if self.cold.flight.is_full() {
            return Ok(self.hold());
        }
        let (bytes, byte_cnt) = self.gathered(cx, local, Use::Source)?;
        self.cold.flight.push(InFlight {
            at: self.exec,
            ctrl,
            byte_cnt,
            bytes,
            local: false,
            source: true,
        });
        Ok(Outcome::Issued)
    }

    /// Moves messages to another process on. `Done`: something became of it.
    pub(super) fn forward(&mut self, cx: &mut Cx<'_>) -> Step {
        let Target::Peer(peer) = &self.cold.target else {
            return Step::Parked;
        };
        let peer = Arc::clone(peer);
        match self.hand_over(cx, &*peer) {
            Ok(true) => Step::Done,
            Ok(false) => Step::Parked,
            Err(fault) => {
                // Nothing is handed over any more; what was may or may not have been delivered.
                Step::Failed(fault, self.give_up_flight())
            }
        }
    }

    fn hand_over(&mut self, cx: &mut Cx<'_>, peer: &dyn RemoteQp) -> Result<bool, Fault> {
        let mut progress = false;
        while let Some(answer) = peer.answer() {
            let mail = self.cold.mail.get_or_insert_default();
            mail.silent = None;
            answer?;
            if let Some(token) = mail.unanswered.pop_front().flatten() {
                self.land(Some(token));
            }
            progress = true;
        }
        if progress
            && let (Some(staged), Some(oldest)) = (&mut self.cold.staged, self.cold.flight.oldest())
        {
            staged.complete(oldest, cx.dma);
        }
        while peer.has_room()? && self.hand_over_one(cx, peer)? {
            progress = true;
        }
        if !progress {
            self.cold.mail.get_or_insert_default().patience(cx, peer)?;
        }
        Ok(progress)
    }

    /// The next part; `false`: there is none, or its bytes are not there yet.
    fn hand_over_one(&mut self, cx: &mut Cx<'_>, peer: &dyn RemoteQp) -> Result<bool, Fault> {
        let (token, offset) = self.cold.mail.get_or_insert_default().cursor;
        let Some(one) = self.cold.flight.source_message(token) else {
            return Ok(false);
        };
        let (at, total, ctrl) = (one.at, one.byte_cnt, one.ctrl);
        let offset = if at == token { offset } else { 0 };
        let len = (total - offset).min(PART as u32);
        let mut bytes = [0; PART];
        let bytes = &mut bytes[..len as usize];
        if len > 0 {
            let oldest = self.cold.flight.oldest() == Some(at);
            let mut memory = self.cold.memory(cx);
            match memory.load(at, offset, bytes) {
                Ok(true) => {}
                Ok(false) => {
                    memory.feed();
                    return Ok(false);
                }
                // It fails when its turn to complete has come.
                Err(fault) if oldest => return Err(fault_of(fault)),
                Err(_) => return Ok(false),
            }
        }
        let imm = matches!(ctrl.opcode(), Ok(Opcode::SendImm)).then_some(ctrl.imm);
        let part = Part {
            total,
            offset,
            len,
            imm,
        };
        if !peer.send_part(&part, bytes) {
            return Ok(false);
        }
        let mail = self.cold.mail.get_or_insert_default();
        mail.unanswered.push_back(part.ends().then_some(at));
        mail.cursor = if part.ends() {
            (at + 1, 0)
        } else {
            (at, offset + len)
        };
        Ok(true)
    }

    /// Takes what a peer has sent. `Err`: this QP is to fail.
    fn take_mail(&mut self, cx: &mut Cx<'_>, peer: &dyn RemoteQp) -> Result<u64, Fault> {
        let mut done = self.settle_mail(cx, peer)?;
        for _ in 0..SHARE {
            let Some(incoming) = peer.incoming() else {
                break;
            };
            let taken = match incoming {
                Incoming::Immediate { imm, bytes } => self.take_immediate(peer, imm, bytes),
                Incoming::Message(part) => self.take_part(cx, peer, &part)?,
            };
            if !taken {
                break;
            }
            done += 1;
        }
        if let Some(mail) = &mut self.cold.mail
            && mail.coming.is_some()
            && peer.ready().is_err()
        {
            // Its sender is gone, or has begun anew.
            mail.coming = None;
            self.cold.memory(cx).unreceive();
        }
        if self.cold.mail.as_ref().is_some_and(|m| !m.owed.is_empty()) {
            self.cold.memory(cx).flush();
            done += self.settle_mail(cx, peer)?;
        }
        Ok(done)
    }

    fn take_immediate(&mut self, peer: &dyn RemoteQp, imm: u32, bytes: u32) -> bool {
        if self.cold.mail.as_ref().is_some_and(|m| !m.owed.is_empty()) {
            // Receives complete in order.
            return false;
        }
        let Some(recv) = &self.cold.shared.recv else {
            return false;
        };
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: an open receive queue's memory is mapped.
        if !unsafe { recv.deliver(imm, bytes) } {
            peer.no_receive();
            return false;
        }
        peer.accept();
        peer.reply(Ok(()));
        true
    }

    /// A part of a SEND; `false`: it waits for a receive.
    fn take_part(
        &mut self,
        cx: &mut Cx<'_>,
        peer: &dyn RemoteQp,
        part: &Part,
    ) -> Result<bool, Fault> {
        let mail = self.cold.mail.get_or_insert_default();
        let end = part.offset.checked_add(part.len);
        let fits = part.len as usize <= PART && end.is_some_and(|end| end <= part.total);
        let follows = match mail.coming {
            None => part.offset == 0,
            Some((total, next)) => (total, next) == (part.total, part.offset) && part.len > 0,
        };
        if !fits || !follows {
            // Whoever sends this does not keep to what was agreed; it is told so, and gets no receive.
            if mail.coming.take().is_some() {
                self.cold.memory(cx).unreceive();
            }
            self.answer_all(peer, Fault::Unsupported);
            return Ok(true);
        }
        if mail.coming.is_none() {
            if !self.cold.memory(cx).receive() {
                peer.no_receive();
                return Ok(false);
            }
            self.check_room(part.total)
                .inspect_err(|_| self.answer_all(peer, Fault::ReceiveTooShort))?;
        }
        let mut bytes = [0; PART];
        let bytes = &mut bytes[..part.len as usize];
        if !peer.part_bytes(bytes) {
            // Gone meanwhile: the receive is given back with the others.
            self.cold.mail.get_or_insert_default().coming = Some((part.total, part.offset));
            return Ok(false);
        }
        let filled = match bytes.is_empty() {
            true => Ok(Status::Now),
            false => self.cold.memory(cx).fill_receive(part.offset, bytes),
        };
        let status = filled.inspect_err(|_| self.answer_all(peer, Fault::ReceiveRefused))?;
        let mail = self.cold.mail.get_or_insert_default();
        if let Status::Later(ticket) = status {
            mail.ticket = mail.ticket.max(ticket);
        }
        let received = part.ends().then_some(Received {
            kind: ReceivedKind::Send,
            len: part.total,
            imm: part.imm,
            solicited: false,
        });
        // A chunk is free when its bytes are copied; the message is there when they are visible.
        let ticket = if part.ends() { mail.ticket } else { 0 };
        mail.owed.push_back((ticket, received));
        mail.coming = match part.ends() {
            true => None,
            false => Some((part.total, part.offset + part.len)),
        };
        peer.accept();
        self.settle_mail(cx, peer)?;
        Ok(true)
    }

    /// Does the receive that was taken hold so many bytes? Otherwise it completes in error.
    fn check_room(&self, total: u32) -> Result<(), Fault> {
        let Some(recv) = &self.cold.shared.recv else {
            return Err(Fault::Destroyed);
        };
        let mut recv = recv.lock().unwrap_or_else(PoisonError::into_inner);
        let room: u64 = recv.pieces().iter().map(|p| u64::from(p.len)).sum();
        if room >= u64::from(total) {
            return Ok(());
        }
        // SAFETY: an open receive queue's memory is mapped.
        unsafe { recv.refuse(Fault::BadLength) };
        Err(Fault::BadLength)
    }

    /// Answers what has settled, and completes its receives.
    fn settle_mail(&mut self, cx: &mut Cx<'_>, peer: &dyn RemoteQp) -> Result<u64, Fault> {
        let mut done = 0;
        while let Some(&(ticket, received)) = self.cold.mail.as_ref().and_then(|m| m.owed.front()) {
            let mut memory = self.cold.memory(cx);
            if ticket > 0 && ticket > memory.settled() {
                if memory.has_lost() {
                    self.answer_all(peer, Fault::ReceiveRefused);
                    return Err(Fault::DmaFailed);
                }
                break;
            }
            if let Some(received) = received {
                memory.received(received);
            }
            peer.reply(Ok(()));
            if let Some(mail) = &mut self.cold.mail {
                mail.owed.pop_front();
            }
            done += 1;
        }
        Ok(done)
    }

    /// Refuses everything that was taken and not answered, and what is shown.
    fn answer_all(&mut self, peer: &dyn RemoteQp, fault: Fault) {
        peer.accept();
        let owed = self
            .cold
            .mail
            .as_mut()
            .map_or(0, |m| m.owed.drain(..).count());
        for _ in 0..=owed {
            peer.reply(Err(fault));
        }
    }
}

impl Mail {
    /// Nothing was answered: that may take a bounded time.
    fn patience(&mut self, cx: &Cx<'_>, peer: &dyn RemoteQp) -> Result<(), Fault> {
        if self.unanswered.is_empty() {
            self.silent = None;
            return Ok(());
        }
        let waits = peer.waits_for_receive();
        let (since, _) = *self
            .silent
            .take_if(|(_, for_receive)| *for_receive == waits)
            .as_ref()
            .unwrap_or(&(Instant::now(), waits));
        self.silent = Some((since, waits));
        let config = &cx.inner.config;
        let (limit, fault) = if waits {
            (config.rnr_limit, Fault::NoReceive)
        } else {
            // The peer's copy engine has its time, and then the peer to say so.
            (2 * config.dma.stall + config.rnr_limit, Fault::PeerDead)
        };
        if since.elapsed() < limit {
            Ok(())
        } else {
            Err(fault)
        }
    }
}

impl super::Core {
    /// Gives what peers sent to the receive queues of QPs here, and fails those whose receives failed.
    pub(super) fn receive(&mut self, inner: &Inner) -> u64 {
        let mut done = 0;
        for i in 0..self.receivers.len() {
            let slot = self.receivers[i];
            let Self {
                qps,
                dma,
                acknowledger,
                roused,
                ..
            } = self;
            let Some(qp) = qps[slot as usize].as_deref_mut() else {
                continue;
            };
            let fault = match qp.cold.shared.take_recv_fault() {
                Some(fault) => Err(fault),
                None => match &qp.cold.target {
                    // One load unless there is mail: this is asked in every round.
                    Target::Peer(peer)
                        if peer.incoming().is_some()
                            || qp.cold.mail.as_ref().is_some_and(|m| m.is_receiving()) =>
                    {
                        let peer = Arc::clone(peer);
                        let mut cx = Cx {
                            inner,
                            slot,
                            dma,
                            acknowledger,
                            roused,
                        };
                        qp.take_mail(&mut cx, &*peer)
                    }
                    _ => Ok(0),
                },
            };
            match fault {
                Ok(n) => done += n,
                Err(fault) => {
                    self.abandon(inner, slot, fault);
                    done += 1;
                }
            }
        }
        done
    }
}
