//! What the peer's engine asks for: messages in the order of their numbers, each carried out once, and answers for several at a time.
//!
//! A message that comes early stays in its receive until those before it are carried out. One that finds no receive of the poster's waits, for as long as
//! on the other links, and so does everything behind it.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use doorbell_wire::{Syndrome, Vendor, arith};

use super::done::Broken;
use super::errand::{Errand, WORD};
use super::post::sink;
use super::wire::{Head, Kind};
use crate::copy::write;
use crate::dma::Work;
use crate::engine::modify;
use crate::engine::qp::EngineQp;
use crate::fault::Fault;
use crate::hca::Inner;
use crate::mem::{Access, End, Place, Span};
use crate::verbs::WINDOW;

/// How long a last answer may take to leave before the queue pair stops all the same.
const FAREWELL: Duration = Duration::from_millis(200);

/// The peer's requests.
#[derive(Debug, Default)]
pub(super) struct Serve {
    /// The number of the next one to be carried out.
    next: u64,
    /// Those that are here, by their numbers: the receive, and the bytes in it.
    here: [Option<(u32, u32)>; WINDOW],
    /// Results that are not answered yet: of requests before `next`.
    results: Vec<u64>,
    /// What became of the request behind those; nothing is carried out any more.
    failed: Option<(Syndrome, Vendor)>,
    /// The failure has been told.
    told: bool,
    /// Since when the next one waits for a receive.
    dry: Option<Instant>,
    /// A SEND is being filled in: how many bytes of it are there.
    filling: Option<u32>,
    /// The queue pair fails with this when the last answer, in that place, has left, or at that time.
    farewell: Option<Farewell>,
}

#[derive(Clone, Copy, Debug)]
struct Farewell {
    fault: Fault,
    place: Option<u16>,
    until: Instant,
}

/// What became of a request of the peer.
enum Did {
    /// With this result.
    So(u64),
    /// It waits for a receive.
    Later,
    /// A copy engine is about it.
    Copying,
    /// It is refused.
    Refused(Fault),
    /// It is refused, since the receive that it found cannot take it, and this queue pair fails too.
    Both { theirs: Fault, ours: Fault },
}

impl Serve {
    /// Takes a request that arrived. `true`: its receive is kept.
    pub(super) fn keep(&mut self, seq: u64, receive: usize, len: usize) -> Result<bool, Broken> {
        if seq < self.next || seq - self.next >= WINDOW as u64 {
            return Err(Broken::Peer("sends more messages than it may"));
        }
        let place = &mut self.here[seq as usize % WINDOW];
        if place.is_some() {
            return Err(Broken::Peer("sends a message twice"));
        }
        *place = Some((receive as u32, len as u32));
        Ok(true)
    }

    /// A message in that place has left.
    pub(super) fn farewell_left(&mut self, place: u16) {
        if let Some(farewell) = &mut self.farewell
            && farewell.place == Some(place)
        {
            farewell.until = Instant::now();
        }
    }
}

impl EngineQp {
    /// Carries out what may be of the peer's requests, and answers. Returns how many there were.
    pub(super) fn serve_srd(&mut self, inner: &Inner) -> u64 {
        let mut done = 0;
        while let Some(link) = self.srd() {
            let copying = link.errands[WORD].is_open();
            let serve = &mut link.serve;
            if copying || serve.failed.is_some() || serve.results.len() >= WINDOW {
                break;
            }
            let at = serve.next as usize % WINDOW;
            let Some((receive, len)) = serve.here[at] else {
                break;
            };
            let nic = std::sync::Arc::clone(&link.nic);
            let bytes = nic.arrived(receive as usize, len as usize);
            let Some((head, rest)) = Head::parse(bytes) else {
                break;
            };
            let did = match head.kind {
                Kind::Send => self.serve_send(inner, &head, rest),
                Kind::Immediate => self.serve_immediate(&head),
                _ => self.serve_atomic(inner, &head),
            };
            let Some(link) = self.srd() else { break };
            let serve = &mut link.serve;
            match did {
                Did::Copying => break,
                Did::Later => {
                    let since = *serve.dry.get_or_insert_with(Instant::now);
                    // As patient as the devices of the other verbs links, but not for ever.
                    if since.elapsed() < nic.port.config().silence {
                        break;
                    }
                    serve.failed = Some(Fault::NoReceive.syndromes());
                }
                Did::So(result) => {
                    serve.results.push(result);
                    serve.dry = None;
                    serve.here[at] = None;
                    serve.next += 1;
                    if let Err(broken) = link.give_back(receive as usize) {
                        self.srd_broken(inner, broken);
                        return done + 1;
                    }
                }
                Did::Refused(fault) => serve.failed = Some(fault.syndromes()),
                Did::Both { theirs, ours } => {
                    serve.failed = Some(theirs.syndromes());
                    serve.farewell = Some(Farewell {
                        fault: ours,
                        place: None,
                        until: Instant::now() + FAREWELL,
                    });
                }
            }
            done += 1;
        }
        self.answer_srd(inner) + done
    }

    /// Answers what was carried out, if there is a place for the answer.
    fn answer_srd(&mut self, inner: &Inner) -> u64 {
        let Some(link) = self.srd() else { return 0 };
        let Some(peer) = link.nic.peer() else {
            return 0;
        };
        let serve = &mut link.serve;
        let failed = serve.failed.filter(|_| !serve.told);
        if !serve.results.is_empty() || failed.is_some() {
            let results = core::mem::take(&mut serve.results);
            let first = serve.next - results.len() as u64;
            let head = Head {
                count: results.len() as u32,
                failed,
                ..Head::new(Kind::Answer, peer.ours, first)
            };
            let place = link.control(head, &results);
            let serve = &mut link.serve;
            serve.results = results;
            // Without a place it is for later, with what comes meanwhile.
            if let Some(place) = place {
                serve.results.clear();
                serve.told |= failed.is_some();
                if let (Some(farewell), true) = (&mut serve.farewell, failed.is_some()) {
                    farewell.place = Some(place);
                }
            }
        }
        let Some(farewell) = link.serve.farewell else {
            return 0;
        };
        if Instant::now() < farewell.until {
            return 0;
        }
        self.fail_flight(inner, farewell.fault);
        1
    }

    fn serve_immediate(&mut self, head: &Head) -> Did {
        let Some(recv) = &self.cold.shared.recv else {
            return Did::Refused(Fault::NoReceive);
        };
        let mut queue = recv.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: an open receive queue's memory is mapped.
        match unsafe { queue.deliver(head.imm.unwrap_or(0), head.total) } {
            true => Did::So(0),
            false => Did::Later,
        }
    }

    fn serve_send(&mut self, inner: &Inner, head: &Head, bytes: &[u8]) -> Did {
        let pd = self.cold.shared.pd;
        let begun = self.srd().and_then(|link| link.serve.filling);
        let end = head.offset.checked_add(head.count);
        let fits = end.is_some_and(|end| end <= head.total);
        let follows = head.offset == begun.unwrap_or(0);
        if bytes.len() != head.count as usize || !fits || !follows {
            return Did::Refused(Fault::BadResponse);
        }
        let Some(recv) = &self.cold.shared.recv else {
            return Did::Refused(Fault::NoReceive);
        };
        let mut queue = recv.lock().unwrap_or_else(PoisonError::into_inner);
        if begun.is_none() {
            // SAFETY: an open receive queue's memory is mapped.
            if !unsafe { queue.take() } {
                return Did::Later;
            }
            let room: u64 = queue.pieces().iter().map(|p| u64::from(p.len)).sum();
            if room < u64::from(head.total) {
                // SAFETY: as above.
                unsafe { queue.refuse(Fault::BadLength) };
                return Did::Both {
                    theirs: Fault::ReceiveTooShort,
                    ours: Fault::BadLength,
                };
            }
        }
        // SAFETY: as above; `put` writes where a local key with the right for it says, found in this round.
        let filled = unsafe {
            queue.scatter(head.offset, bytes, |piece, offset, bytes| {
                let part = doorbell_wire::Local {
                    addr: piece.addr.wrapping_add(offset),
                    len: bytes.len() as u32,
                    ..*piece
                };
                let Place::Host(to) = sink(inner, pd, &part)? else {
                    return Err(Fault::Unsupported);
                };
                write(to.as_ptr(), bytes);
                Ok(())
            })
        };
        if let Err(ours) = filled {
            return Did::Both {
                theirs: Fault::ReceiveRefused,
                ours,
            };
        }
        let over = end == Some(head.total);
        if over {
            // SAFETY: as above.
            unsafe { queue.complete(false, head.imm, head.total) };
        }
        drop(queue);
        if let Some(link) = self.srd() {
            link.serve.filling = end.filter(|_| !over);
        }
        Did::So(0)
    }

    fn serve_atomic(&mut self, inner: &Inner, head: &Head) -> Did {
        let pd = self.cold.shared.pd;
        let Some(link) = self.srd() else {
            return Did::Refused(Fault::PeerDead);
        };
        match std::mem::take(&mut link.errands[WORD]) {
            Errand::Ended(Ok(old)) => return Did::So(old),
            Errand::Ended(Err(_)) => return Did::Refused(Fault::RemoteOperational),
            _ => {}
        }
        let Some(exported) = link.nic.port.exported(head.rkey) else {
            return Did::Refused(Fault::BadRkey);
        };
        let bytes = u64::from(head.width.bytes());
        // SAFETY: this is an engine in a round, and what is found is used in this round.
        let span = unsafe {
            inner
                .regions
                .resolve(End::Remote, exported.key, pd, Access::REMOTE_ATOMIC)
        };
        // The peer names it as the device does.
        let span = match span {
            Ok(span) => Span {
                base: exported.base,
                ..span
            },
            Err(fault) => return Did::Refused(fault),
        };
        let [a, b, c, d] = head.operands;
        let (kind, width) = (head.kind, head.width);
        let new = move |old| match kind {
            Kind::Add => arith::masked_add(old, a, b),
            _ => arith::masked_swap(old, a, b, c, d),
        };
        match span.at(head.addr, bytes) {
            Some(Place::Host(word)) if word.is_aligned_to(bytes as usize) => {
                // SAFETY: the word lies inside a region that this round may use, with the right for it, and is aligned.
                Did::So(unsafe { modify(word, width, new) })
            }
            Some(Place::Device { addr, dma }) if addr.is_multiple_of(bytes) => {
                link.errands[WORD] = Errand::Begin(Work::Atomic {
                    addr,
                    dma,
                    width,
                    new: Box::new(new),
                    sink: None,
                });
                Did::Copying
            }
            Some(_) => Did::Refused(Fault::Misaligned),
            None => Did::Refused(Fault::RkeyRange),
        }
    }
}
