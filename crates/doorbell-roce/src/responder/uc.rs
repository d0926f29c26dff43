//! Receiving on an Unreliable Connection (volume 1, 9.8): nothing is answered, a message with a missing packet is dropped, and the next
//! first packet is as good as any.

use doorbell_wire::roce::{Kind, Packet};

use super::{Refused, Responder};
use crate::counters::Counters;
use crate::memory::Memory;

impl Responder {
    /// A packet of an unreliable connection. Whatever is wrong with it costs its message, nothing else.
    pub(crate) fn unreliable(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
        counters: &mut Counters,
    ) {
        if !matches!(packet.kind, Kind::Send | Kind::Write) {
            counters.unexpected_packets += 1;
            return;
        }
        let gap = packet.bth.psn != self.expected;
        if packet.place.begins() {
            if gap {
                counters.out_of_sequence += 1;
            }
            if self.current.is_some() {
                self.drop_message(memory, counters);
            }
        } else if gap || self.current.is_none() {
            if gap {
                counters.out_of_sequence += 1;
            }
            match self.current {
                Some(_) => self.drop_message(memory, counters),
                // The rest of a message that was dropped already.
                None => counters.unexpected_packets += 1,
            }
            self.expected = packet.bth.psn.add(1);
            return;
        }
        self.expected = packet.bth.psn.add(1);
        match self.data(packet, memory, counters) {
            Ok(()) => {}
            Err(refused) => {
                match refused {
                    Refused::NotReady => counters.out_of_buffer += 1,
                    Refused::Because(crate::Refusal::Access) => {
                        counters.resp_remote_access_errors += 1;
                    }
                    Refused::Because(crate::Refusal::Invalid) => {
                        counters.resp_remote_invalid_request += 1;
                    }
                    Refused::Because(crate::Refusal::Operational) => {
                        counters.resp_remote_operational_errors += 1;
                    }
                }
                self.drop_message(memory, counters);
            }
        }
    }

    fn drop_message(&mut self, memory: &mut impl Memory, counters: &mut Counters) {
        counters.uc_dropped_messages += 1;
        if self.current.take().is_some_and(|c| c.holds_receive) {
            memory.unreceive();
        }
    }
}
