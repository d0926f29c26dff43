//! Receiving, from the near peer's socket and from the port's own, and checking an ICRC that covers what a socket does not show.
//!
//! Over IPv4 the identification is missing. The packets of our own ports have small ones (0, counted up within a train of at most 64), and the
//! one that is due is tried first. Where that does not fit, the one identification that explains the checksum is looked for. If it is below 64,
//! the packet is as good as one of our ports', and damage passes with a chance of 2^-26 ([`Check::Exact`]); if not, with one of 2^-16
//! ([`Check::Explained`]), and whoever knows that the sender is a port of ours drops it. The rest of the header is known: the socket gives the addresses, the kernel checked
//! the lengths, and a fragmented or fragmentable packet (other flags) fails.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use doorbell_wire::roce::{Bth, ICRC_LEN};

use super::UdpPort;
use crate::arrived::{Check, Origin, RecvBatch};
use crate::counters::PortCounters;
use crate::error::{PortError, Result};
use crate::icrc::{FlowCrc, LIGHT};
use crate::path::{LONG_PAYLOAD, TAIL, within_host};
use crate::sys::{self, MESSAGES};

/// Flows whose checksum state is kept. A power of two.
const FLOWS: usize = 64;
/// Longest packet that is looked at: path MTU 4096, all headers.
const LONGEST: usize = 4096 + 64 + ICRC_LEN;
/// The same from this host.
const LONGEST_HERE: usize = LONG_PAYLOAD + 64 + ICRC_LEN;

/// Datagrams of more bytes than this are asked for in small numbers,
const LONG: usize = 16 << 10;
/// which is this.
const FEW: usize = 4;

/// Checksum state of the flows that packets come from.
#[derive(Debug, Default)]
pub(super) struct Flows {
    table: Vec<Option<Flow>>,
}

#[derive(Debug)]
struct Flow {
    src: SocketAddr,
    dst: SocketAddr,
    crc: FlowCrc,
}

impl Flows {
    #[inline]
    fn get(&mut self, src: SocketAddr, dst: SocketAddr) -> &mut FlowCrc {
        if self.table.is_empty() {
            self.table.resize_with(FLOWS, || None);
        }
        let place = hash(src) & (FLOWS - 1);
        let place = &mut self.table[place];
        if place.as_ref().is_none_or(|f| f.src != src || f.dst != dst) {
            *place = None;
        }
        &mut place
            .get_or_insert_with(|| Flow {
                src,
                dst,
                crc: FlowCrc::new(src, dst),
            })
            .crc
    }
}

/// A datagram in the arena, or a train of them.
struct Datagram {
    at: usize,
    len: usize,
    src: SocketAddr,
    dst: SocketAddr,
    tos: u8,
    /// Bytes of each packet, if the kernel says so; 0: it is one, as far as the kernel knows.
    segment: usize,
}

/// The length of each packet but the last, if these are the packets of a light train. What else ends in two bytes beyond a multiple of four has no
/// packet of the length that they say at its front.
fn glued(datagram: &[u8], flow: &mut FlowCrc) -> Option<usize> {
    let (packets, tail) = datagram.split_at_checked(datagram.len().checked_sub(TAIL)?)?;
    if packets.len() % 4 != 0 {
        return None;
    }
    let segment = usize::from(u16::from_le_bytes([tail[0], tail[1]]));
    let first = packets.get(..segment).filter(|f| f.len() < packets.len())?;
    let (packet, stored) = first.split_at_checked(segment.checked_sub(ICRC_LEN)?)?;
    let stored = u32::from_le_bytes(stored.try_into().ok()?);
    let right = packet.len() >= Bth::LEN
        && (packet.len() > LIGHT && flow.compute_base(0, packet.len(), packet) == stored
            || flow.compute(0, packet) == stored);
    right.then_some(segment)
}

fn hash(addr: SocketAddr) -> usize {
    let ip = match addr {
        SocketAddr::V4(v4) => v4.ip().to_bits(),
        SocketAddr::V6(v6) => {
            let bits = v6.ip().to_bits();
            (bits ^ bits >> 32 ^ bits >> 64 ^ bits >> 96) as u32
        }
    };
    let mixed =
        (ip ^ u32::from(addr.port()) << 16 ^ u32::from(addr.port())).wrapping_mul(0x9e37_79b1);
    (mixed >> 16) as usize
}

impl UdpPort {
    pub(super) fn receive_batch(&mut self, batch: &mut RecvBatch) -> Result<usize> {
        batch.clear();
        if self.near.as_mut().is_some_and(|near| !near.rests()) {
            self.receive_near(batch);
            return Ok(batch.len());
        }
        let came = self.receive_own(batch)?;
        if let Some(near) = &mut self.near {
            near.other_found(came != 0);
        }
        Ok(came)
    }

    /// From the near peer.
    fn receive_near(&mut self, batch: &mut RecvBatch) {
        let Some(near) = &mut self.near else { return };
        let ask = near.ask().min(batch.slots);
        let mut came = 0;
        while came < ask {
            let at = came * batch.slot;
            let buffer = &mut batch.arena[at..at + batch.slot];
            // An error is about an earlier packet, or says that nothing is there.
            let Ok(len) = sys::receive_one(near.fd(), buffer) else {
                break;
            };
            came += 1;
            if len > batch.slot {
                self.counters.received_long += 1;
                continue;
            }
            let datagram = Datagram {
                at,
                len,
                src: near.peer,
                dst: near.local,
                tos: 0,
                segment: 0,
            };
            self.flows.take(datagram, batch, &mut self.counters);
        }
        near.found(came == ask);
        match came {
            0 => self.counters.received_empty += 1,
            _ => self.counters.received_calls += 1,
        }
    }

    /// From everybody else.
    fn receive_own(&mut self, batch: &mut RecvBatch) -> Result<usize> {
        if let Some(share) = &mut self.share {
            share.tick();
        }
        let ask = self.ask.min(batch.slots).min(MESSAGES);
        let came = match sys::receive_messages(
            self.socket.as_fd(),
            &mut batch.arena,
            batch.slot,
            &mut self.arrivals[..ask],
        ) {
            Ok(came) => came,
            Err(error) => match error.raw_os_error() {
                Some(libc::EBADF | libc::ENOTSOCK) => {
                    return Err(PortError::system(
                        format!("receiving from UDP port {}", self.local),
                        error,
                    ));
                }
                // Nothing there, or an ICMP message about an earlier packet.
                _ => {
                    self.counters.received_empty += 1;
                    self.ask = 1;
                    return Ok(0);
                }
            },
        };
        self.counters.received_calls += 1;
        // A lone packet is the case where latency counts: a call that asks for more looks at the queue once more than it must. And what a call
        // brings should still be in the cache when it is taken on.
        let bytes: usize = self.arrivals[..came].iter().map(|a| a.len).sum();
        let most = if bytes > came * LONG { FEW } else { MESSAGES };
        self.ask = if came == ask {
            (ask * 4).min(most)
        } else {
            came.clamp(1, most)
        };
        for index in 0..came {
            self.take_own(batch, index);
        }
        Ok(batch.len())
    }

    /// One datagram or train of the port's own socket.
    fn take_own(&mut self, batch: &mut RecvBatch, index: usize) {
        let at = index * batch.slot;
        let arrival = &self.arrivals[index];
        let info = arrival.control.read();
        if let Some(total) = info.overruns {
            self.counters.receive_overruns += u64::from(total.wrapping_sub(self.overruns));
            self.overruns = total;
        }
        let Some(src) = arrival.from.get() else {
            return;
        };
        let mut dst = self.local;
        if let Some(ip) = info.dst {
            dst.set_ip(ip);
        }
        if arrival.cut {
            self.counters.received_long += 1;
            return;
        }
        let len = arrival.len;
        if let Some(share) = &mut self.share
            && share.see(self.socket.as_fd(), &batch.arena[at..at + len])
        {
            return;
        }
        let datagram = Datagram {
            at,
            len,
            src,
            dst,
            tos: info.tos,
            segment: info.segment,
        };
        self.flows.take(datagram, batch, &mut self.counters);
    }
}

impl Flows {
    /// Checks the packets of one datagram or train.
    fn take(&mut self, datagram: Datagram, batch: &mut RecvBatch, counters: &mut PortCounters) {
        let Datagram {
            at,
            len,
            src,
            dst,
            tos,
            segment,
        } = datagram;
        let here = within_host(src.ip(), dst.ip());
        let flow = self.get(src, dst);
        let glued = match segment {
            0 if here => glued(&batch.arena[at..at + len], flow),
            _ => None,
        };
        // What the identification grows by from packet to packet: the kernel counts those of a train that it took apart.
        let (segment, len, step) = match (glued, segment) {
            (Some(segment), _) => (segment, len - TAIL, 0),
            (None, 0) => (len, len, 1),
            (None, segment) => (segment, len, 1),
        };
        counters.received_trains += u64::from(segment < len);
        let longest = if here { LONGEST_HERE } else { LONGEST };
        if segment > longest {
            counters.received_long += 1;
            return;
        }
        if segment < Bth::LEN + ICRC_LEN {
            counters.received_short += 1;
            return;
        }
        batch.origin(Origin {
            src,
            dst: dst.ip(),
            tos,
        });
        // The identification that the next packet should have.
        let mut expected = 0u16;
        let mut from = at;
        let end = at + len;
        while from < end {
            let whole = segment.min(end - from);
            let Some(len) = whole.checked_sub(ICRC_LEN).filter(|l| *l >= Bth::LEN) else {
                counters.received_short += 1;
                break;
            };
            let packet = &batch.arena[from..from + len];
            let mut stored = [0; ICRC_LEN];
            stored.copy_from_slice(&batch.arena[from + len..from + whole]);
            let stored = u32::from_le_bytes(stored);
            let light = here && len > LIGHT;
            let found = if (light && flow.compute_base(expected, len, packet) == stored)
                || flow.compute(expected, packet) == stored
            {
                Some((expected, Check::Exact))
            } else {
                // A piece of a train, the rest of which came apart; or another implementation.
                let ours = |id: &u16| *id < crate::path::TRAIN;
                let mut id = flow.solve(stored, packet);
                if id.is_none() && light {
                    id = flow.solve_base(stored, len, packet).filter(ours);
                }
                id.map(|id| match ours(&id) {
                    true => (id, Check::Exact),
                    false => (id, Check::Explained),
                })
            };
            match found {
                Some((id, check)) => {
                    expected = id.wrapping_add(step);
                    counters.received_packets += 1;
                    counters.received_bytes += whole as u64;
                    counters.icrc_explained += u64::from(check == Check::Explained);
                    batch.add(from, len, id, check);
                }
                None => {
                    expected = expected.wrapping_add(step);
                    counters.icrc_errors += 1;
                }
            }
            from += whole;
        }
    }
}
