//! One QP: requester and responder, and which packet is for whom.

use doorbell_wire::roce::{Bth, Ext, Header, Kind, Opcode, Packet, Psn, Transport};

use crate::congestion::CNP_INTERVAL_NS;
use crate::counters::Counters;
use crate::memory::Memory;
use crate::message::{Event, Message, PostError};
use crate::requester::Requester;
use crate::responder::Responder;
use crate::{Config, ConfigError};

/// Packets of one half in a row while the other has some too: neither is held up for long, and a port that hands runs of equal packets to the
/// kernel at once finds runs.
const RUN: u32 = 16;

/// A connected QP. See the crate's documentation for how to drive it.
#[derive(Debug)]
pub struct Connection {
    transport: Transport,
    dest_qpn: u32,
    requester: Requester,
    responder: Responder,
    counters: Counters,
    /// A congestion notification is to be sent.
    notify: bool,
    notified_at: Option<u64>,
    reacted_at: Option<u64>,
    told_stopped: bool,
    /// Whose turn it is when both halves have something to send, and for how many packets more.
    replies_first: bool,
    run: u32,
    /// Acknowledgements are for a later burst.
    quiet: bool,
}

impl Connection {
    /// A connection with nothing under way.
    ///
    /// # Errors
    /// A field of the configuration is out of range.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            transport: config.transport,
            dest_qpn: config.dest_qpn,
            requester: Requester::new(config),
            responder: Responder::new(config),
            counters: Counters::default(),
            notify: false,
            notified_at: None,
            reacted_at: None,
            told_stopped: false,
            replies_first: false,
            run: RUN,
            quiet: false,
        })
    }

    /// Takes a message. Its packets go out with the next calls of [`Self::transmit`].
    ///
    /// # Errors
    /// See [`PostError`]; the message was not taken.
    pub fn post(&mut self, message: Message) -> Result<(), PostError> {
        self.requester.post(message)
    }

    /// Would a small message be taken now?
    pub fn has_room(&self) -> bool {
        self.requester.has_room()
    }

    /// No message under way, nothing to send, nothing to tell.
    pub fn is_idle(&self) -> bool {
        self.requester.is_idle() && self.responder.is_idle() && !self.notify
    }

    /// Has a message failed, or the responder refused a request? Nothing more will be carried out.
    pub fn has_failed(&self) -> bool {
        self.requester.has_failed() || self.responder.has_stopped()
    }

    /// Is a message under way or waiting?
    pub fn is_sending(&self) -> bool {
        self.requester.is_sending()
    }

    /// Unacknowledged bytes of messages that were sent or, by READs, asked for.
    pub fn bytes_under_way(&self) -> u64 {
        self.requester.bytes_under_way()
    }

    /// From now on [`Config::window_bytes`] are those of `sending` connections together, this one among them, of which the others have `others`
    /// under way: for connections whose packets come to one buffer. One packet may always be, and one more that asks for an answer.
    pub fn share_window(&mut self, sending: u64, others: u64) {
        self.requester.window.share(sending, others);
    }

    /// What was counted so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// A packet for this QP arrived. `congested`: its IP header is marked "congestion experienced".
    ///
    /// The caller has checked the CRC and that it came from the peer's address.
    pub fn handle(
        &mut self,
        packet: &Packet<'_>,
        congested: bool,
        now: u64,
        memory: &mut impl Memory,
    ) {
        self.counters.rx_packets += 1;
        if congested && packet.kind != Kind::Cnp {
            self.counters.np_ecn_marked_roce_packets += 1;
            if self
                .notified_at
                .is_none_or(|at| now.saturating_sub(at) >= CNP_INTERVAL_NS)
            {
                self.notified_at = Some(now);
                // A receiver that knows no peer has nobody to tell.
                self.notify = self.dest_qpn != 0;
            }
        }
        match packet.kind {
            Kind::Cnp => {
                if self
                    .reacted_at
                    .is_none_or(|at| now.saturating_sub(at) >= CNP_INTERVAL_NS)
                {
                    self.reacted_at = Some(now);
                    self.counters.rp_cnp_handled += 1;
                    self.requester.window.congested();
                }
            }
            _ if packet.bth.opcode.transport() != Some(self.transport) => {
                self.counters.unexpected_packets += 1;
            }
            Kind::Acknowledge | Kind::ReadResponse | Kind::AtomicAcknowledge => {
                self.requester
                    .answer(packet, now, memory, &mut self.counters);
            }
            _ => match self.transport {
                Transport::Rc => self.responder.request(packet, memory, &mut self.counters),
                Transport::Uc => self
                    .responder
                    .unreliable(packet, memory, &mut self.counters),
            },
        }
        self.responder.settle(memory);
    }

    /// A burst of [`Self::transmit`] begins: messages come before acknowledgements, so that what both ends wait for is first, and what fills up a
    /// train is shorter than what began it. `quietly`: acknowledgements are not sent in this burst, if the peer is owed nothing else; the caller
    /// sees to it that another burst follows soon.
    pub fn begin_burst(&mut self, quietly: bool) {
        self.replies_first = false;
        self.run = RUN;
        self.quiet = quietly && self.responder.only_acknowledges();
    }

    /// Writes the next packet, from base header to padding, to the front of `out` and returns its length. `None`: nothing to send now. Where the
    /// memory [lends](Memory::lend) the payload, only the headers are written and counted.
    ///
    /// `out` needs room for a full packet: [`doorbell_wire::roce::MAX_HEADER`], the path MTU, and 3 bytes.
    pub fn transmit(
        &mut self,
        now: u64,
        memory: &mut impl Memory,
        out: &mut [u8],
    ) -> Option<usize> {
        if self.notify {
            self.notify = false;
            let mut bth = Bth::new(Opcode::CNP, self.dest_qpn, Psn::new(0));
            bth.becn = true;
            let ext = Ext::Cnp;
            let len = Header { bth, ext }.emit(out);
            if len > 0 {
                self.counters.np_cnp_sent += 1;
                return Some(len);
            }
        }
        // The half whose run has ended comes back after the other, if that has nothing.
        for _ in 0..3 {
            if self.run > 0 {
                let sent = match self.replies_first {
                    true if self.quiet => None,
                    true => self.responder.transmit(memory, &mut self.counters, out),
                    false => self
                        .requester
                        .transmit(now, memory, &mut self.counters, out),
                };
                if sent.is_some() {
                    self.run -= 1;
                    return sent;
                }
            }
            self.replies_first = !self.replies_first;
            self.run = RUN;
        }
        None
    }

    /// Something that [`Memory`] took for later failed: of what was written here, nothing after the ticket `settled` ever will be visible.
    /// A reliable peer is refused (remote operational error); [`Event::Stopped`] follows.
    pub fn lost(&mut self, settled: u64) {
        self.responder.lost(settled, &mut self.counters);
    }

    /// When [`Self::on_timeout`] has to be called, in the caller's time; `None`: not at all.
    pub fn timeout(&self) -> Option<u64> {
        self.requester.timeout()
    }

    /// The time of [`Self::timeout`] has come; harmless if it has not. Packets that have already arrived go first, into [`Self::handle`].
    pub fn on_timeout(&mut self, now: u64) {
        self.requester.on_timeout(now, &mut self.counters);
    }

    /// The next thing to tell.
    pub fn poll_event(&mut self, memory: &mut impl Memory) -> Option<Event> {
        self.responder.settle(memory);
        if let Some(event) = self.requester.poll_event(memory) {
            return Some(event);
        }
        if self.responder.has_stopped() && self.responder.is_idle() && !self.told_stopped {
            self.told_stopped = true;
            return Some(Event::Stopped);
        }
        None
    }
}

/// The order that everything rests on: `una`, `next`, `tail`.
pub(crate) fn debug_window(una: Psn, next: Psn, tail: Psn) {
    debug_assert!(
        next.since(una) >= 0 && tail.since(next) >= 0,
        "{una} {next} {tail}"
    );
}
