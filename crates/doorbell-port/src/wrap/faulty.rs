//! Fault injection: a port that behaves like a bad network.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::{FaultSpec, pass_on};
use crate::Port;
use crate::arrived::{Check, Received, RecvBatch};
use crate::batch::SendBatch;
use crate::counters::PortCounters;
use crate::describe::Description;
use crate::error::Result;
use crate::path::Path;

/// Packets that overtake a reordered one, at most.
const OVERTAKERS: u64 = 8;
/// A reordered packet that nobody overtakes goes after this time.
const PATIENCE: Duration = Duration::from_millis(2);

/// A port whose packets suffer: losses, copies, damage, delays and changed order, by a seeded sequence of chances.
#[derive(Debug)]
pub struct Faulty<P> {
    inner: P,
    spec: FaultSpec,
    random: Random,
    out: SendBatch,
    arrived: RecvBatch,
    late_out: Late<Path>,
    late_in: Late<Origin>,
    lost: u64,
    copied: u64,
    delayed: u64,
    damaged: u64,
}

#[derive(Clone, Copy, Debug)]
struct Origin {
    src: SocketAddr,
    dst: IpAddr,
    tos: u8,
    id: u16,
    check: Check,
}

/// Splitmix64: the same numbers on every machine and with every version of every crate.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    fn hit(&mut self, chance: f64) -> bool {
        // Always one number, so that one fault's chance does not move the others' sequence.
        ((self.next() >> 11) as f64) < chance * (1u64 << 53) as f64
    }
}

/// Packets that wait.
#[derive(Debug)]
struct Late<T> {
    /// Time, order of arrival, place in `packets`.
    by_time: BinaryHeap<Reverse<(Instant, u64, usize)>>,
    packets: Vec<Option<(T, Vec<u8>)>>,
    free: Vec<usize>,
    /// Packets that passed so far.
    passed: u64,
    /// Packets that wait to be overtaken: count of `passed` at which they go.
    overtaken: Vec<(u64, Instant, usize)>,
}

impl<T: Copy> Late<T> {
    fn new() -> Self {
        Self {
            by_time: BinaryHeap::new(),
            packets: Vec::new(),
            free: Vec::new(),
            passed: 0,
            overtaken: Vec::new(),
        }
    }

    fn store(&mut self, what: T, bytes: &[u8]) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            self.packets.push(None);
            self.packets.len() - 1
        });
        self.packets[place] = Some((what, bytes.to_vec()));
        place
    }

    fn until(&mut self, time: Instant, what: T, bytes: &[u8]) {
        let place = self.store(what, bytes);
        self.passed += 1;
        self.by_time.push(Reverse((time, self.passed, place)));
    }

    fn behind(&mut self, others: u64, latest: Instant, what: T, bytes: &[u8]) {
        let place = self.store(what, bytes);
        self.overtaken.push((self.passed + others, latest, place));
    }

    fn is_empty(&self) -> bool {
        self.by_time.is_empty() && self.overtaken.is_empty()
    }

    fn next_due(&self) -> Option<Instant> {
        let timed = self.by_time.peek().map(|Reverse((at, ..))| *at);
        timed
            .into_iter()
            .chain(self.overtaken.iter().map(|(_, at, _)| *at))
            .min()
    }

    /// Gives every packet whose time has come to `give`, until that says that it has no room.
    fn release(&mut self, now: Instant, mut give: impl FnMut(T, &[u8]) -> bool) {
        let mut due =
            |late: &mut Vec<Option<(T, Vec<u8>)>>, free: &mut Vec<usize>, place: usize| {
                let Some((what, bytes)) = &late[place] else {
                    return true;
                };
                if !give(*what, bytes) {
                    return false;
                }
                late[place] = None;
                free.push(place);
                true
            };
        while let Some(Reverse((at, _, place))) = self.by_time.peek().copied() {
            if at > now || !due(&mut self.packets, &mut self.free, place) {
                break;
            }
            self.by_time.pop();
        }
        let passed = self.passed;
        let (packets, free) = (&mut self.packets, &mut self.free);
        self.overtaken.retain(|(count, at, place)| {
            (*count > passed && *at > now) || !due(packets, free, *place)
        });
    }
}

/// What becomes of a packet.
#[derive(Debug)]
enum Fate {
    Lost,
    Now {
        copies: u8,
        damage: Option<(u64, u32)>,
    },
    At(Instant),
    Behind(u64),
}

impl<P: Port> Faulty<P> {
    /// Wraps a port.
    pub fn new(inner: P, spec: FaultSpec) -> Self {
        Self {
            random: Random(spec.seed),
            out: SendBatch::new(),
            arrived: inner.recv_batch(),
            late_out: Late::new(),
            late_in: Late::new(),
            lost: 0,
            copied: 0,
            delayed: 0,
            damaged: 0,
            inner,
            spec,
        }
    }

    fn fate(&mut self) -> Fate {
        let lost = self.random.hit(self.spec.loss);
        let twice = self.random.hit(self.spec.duplicate);
        let damaged = self.random.hit(self.spec.corrupt);
        let behind = self.random.hit(self.spec.reorder);
        let number = self.random.next();
        if lost {
            self.lost += 1;
            Fate::Lost
        } else if damaged {
            self.damaged += 1;
            Fate::Now {
                copies: 1,
                damage: Some((number >> 32, number as u32 | 1)),
            }
        } else if let Some(delay) = &self.spec.delay {
            self.delayed += 1;
            let spread = (*delay.end() - *delay.start()).as_nanos() as u64;
            let late = *delay.start() + Duration::from_nanos(number % (spread + 1));
            Fate::At(Instant::now() + late)
        } else if behind {
            self.delayed += 1;
            Fate::Behind(1 + self.random.below(OVERTAKERS))
        } else {
            self.copied += u64::from(twice);
            Fate::Now {
                copies: 1 + u8::from(twice),
                damage: None,
            }
        }
    }

    /// Sends what is late and due, and what did not go before.
    fn flush(&mut self) -> Result<()> {
        if !self.late_out.is_empty() {
            let out = &mut self.out;
            self.late_out
                .release(Instant::now(), |path, bytes| out.push(&path, bytes));
        }
        if !self.out.is_empty() {
            self.inner.send(&mut self.out)?;
        }
        Ok(())
    }
}

impl<P: Port> Port for Faulty<P> {
    pass_on!();

    fn send(&mut self, batch: &mut SendBatch) -> Result<usize> {
        self.flush()?;
        if !self.spec.sending {
            return self.inner.send(batch);
        }
        let mut taken = 0;
        let mut trains = 0;
        // Whole trains, so that what has no room stays as it is.
        while trains < batch.waiting().len() {
            let train = batch.waiting()[trains];
            if !self
                .out
                .has_room(train.bytes_twice(), 2 * usize::from(train.count))
            {
                self.inner.send(&mut self.out)?;
                if !self.out.is_empty() {
                    break;
                }
            }
            for packet in batch.packets_of(&batch.waiting()[trains]) {
                let fate = self.fate();
                let (path, bytes) = (packet.path, packet.bytes);
                match fate {
                    Fate::Lost => {}
                    Fate::Now { copies, damage } => {
                        for _ in 0..copies {
                            let Some(space) = self.out.space(path) else {
                                break;
                            };
                            space[..bytes.len()].copy_from_slice(bytes);
                            if let Some((bit, _)) = damage {
                                let bit = bit as usize % (bytes.len() * 8);
                                space[bit / 8] ^= 1 << (bit % 8);
                            }
                            self.out
                                .commit_xor(path, bytes.len(), damage.map_or(0, |d| d.1));
                        }
                        self.late_out.passed += 1;
                    }
                    Fate::At(time) => self.late_out.until(time, *path, bytes),
                    Fate::Behind(others) => {
                        self.late_out
                            .behind(others, Instant::now() + PATIENCE, *path, bytes);
                    }
                }
                taken += 1;
            }
            trains += 1;
        }
        batch.consume(trains);
        self.flush()?;
        Ok(taken)
    }

    fn recv(&mut self, batch: &mut RecvBatch) -> Result<usize> {
        self.flush()?;
        if !self.spec.receiving {
            return self.inner.recv(batch);
        }
        batch.clear();
        let mut arrived = std::mem::replace(&mut self.arrived, RecvBatch::new(0, 0));
        let outcome = self.inner.recv(&mut arrived);
        for packet in arrived.iter() {
            match self.fate() {
                // A damaged packet would have ended at the check below.
                Fate::Lost
                | Fate::Now {
                    damage: Some(_), ..
                } => {}
                Fate::Now { copies, .. } => {
                    for _ in 0..copies {
                        batch.copy_in(&packet);
                    }
                    self.late_in.passed += 1;
                }
                Fate::At(time) => self.late_in.until(time, Origin::of(&packet), packet.bytes),
                Fate::Behind(others) => self.late_in.behind(
                    others,
                    Instant::now() + PATIENCE,
                    Origin::of(&packet),
                    packet.bytes,
                ),
            }
        }
        self.arrived = arrived;
        if !self.late_in.is_empty() {
            self.late_in.release(Instant::now(), |o, bytes| {
                batch.copy_in(&Received {
                    src: o.src,
                    dst: o.dst,
                    tos: o.tos,
                    id: o.id,
                    check: o.check,
                    bytes,
                })
            });
        }
        outcome?;
        Ok(batch.len())
    }

    fn next_due(&self) -> Option<Instant> {
        [
            self.late_out.next_due(),
            self.late_in.next_due(),
            self.inner.next_due(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn counters(&self) -> PortCounters {
        let mut counters = self.inner.counters();
        counters.injected_loss += self.lost;
        counters.injected_duplicates += self.copied;
        counters.injected_delays += self.delayed;
        counters.injected_damage += self.damaged;
        counters
    }

    fn describe(&self) -> Description {
        let mut description = self.inner.describe();
        description
            .choices
            .push(("faults", format!("injected: {}", self.spec)));
        description
    }
}

impl Origin {
    fn of(packet: &Received<'_>) -> Self {
        Self {
            src: packet.src,
            dst: packet.dst,
            tos: packet.tos,
            id: packet.id,
            check: packet.check,
        }
    }
}
