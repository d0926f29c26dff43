//! Two hosts, a network between them that loses, doubles, swaps, delays and damages packets, and a clock that only this file moves.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use doorbell_roce::{Config, Connection, Failure, Mtu};
use doorbell_wire::roce::icrc::{self, Ip};
use doorbell_wire::roce::net::Ipv4;
use doorbell_wire::roce::{ICRC_LEN, Packet, Psn, Transport};

use super::memory::Host;
use super::oracle::Direction;
use super::random::Random;

/// What the network does, each in parts per million.
#[derive(Clone, Debug)]
struct Network {
    loss: u64,
    duplication: u64,
    reordering: u64,
    corruption: u64,
    marking: u64,
    /// One-way delay, ns.
    delay: (u64, u64),
    /// Nothing passes in these intervals.
    partitions: Vec<(u64, u64)>,
}

struct End {
    connection: Connection,
    host: Host,
    direction: Direction,
    /// Operations still to post.
    left: u64,
    /// This end posts its next receive then.
    next_receive: u64,
    qpn: u32,
    /// When something last went forward, and how long the configuration allows it not to.
    progress: u64,
    patience: Option<u64>,
}

/// A packet under way: when it arrives, the order among equals, at which end, the bytes with their CRC, and whether a switch marked it.
type InFlight = (u64, u64, usize, Vec<u8>, bool);

struct World {
    now: u64,
    ends: Vec<End>,
    wire: BinaryHeap<Reverse<InFlight>>,
    order: u64,
    network: Network,
    random: Random,
    mtu: u32,
    receive_gap: u64,
    /// The second host forgets everything then.
    restart: Option<u64>,
    packets: u64,
}

/// What a run was like, so that a test can see that its seeds are not all alike.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Summary {
    pub(crate) completed: u64,
    pub(crate) failed: bool,
    pub(crate) retransmitted: u64,
    pub(crate) packets: u64,
    pub(crate) rnr: u64,
    pub(crate) cnp: u64,
}

fn ip(from: usize) -> Ip {
    Ip::V4(Ipv4 {
        src: [10, 0, 0, from as u8],
        dst: [10, 0, 0, 1 - from as u8],
        ..Ipv4::default()
    })
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let unreliable = random.one_in(6);
        let mtu = *Mtu::ALL.get(random.below(6) as usize).unwrap_or(&Mtu::Long);
        let slow = random.one_in(3);
        // A third of the seeds have a perfect network in each respect, so that faults are met alone and together.
        let rate = |random: &mut Random| {
            if random.one_in(3) {
                0
            } else {
                random.below(50_000)
            }
        };
        let mut network = Network {
            loss: rate(&mut random),
            duplication: rate(&mut random),
            reordering: rate(&mut random),
            corruption: rate(&mut random),
            marking: rate(&mut random),
            delay: (1_000, 1_000 + random.below(20_000)),
            partitions: Vec::new(),
        };
        if unreliable {
            // UC takes any first packet as it comes, so it promises nothing on a network that doubles or swaps.
            (network.duplication, network.reordering) = (0, 0);
        }
        if random.one_in(8) {
            let begin = random.below(20_000_000);
            let length = random.below(1_500_000_000);
            network.partitions.push((begin, begin + length));
        }
        let rd = (random.between(1, 16) as u8, random.between(1, 16) as u8);
        let psns = [random.next() as u32, random.next() as u32];
        // Half of the seeds wrap within the run.
        let psn = |p: u32| Psn::new(if p & 1 == 0 { p } else { 0xff_fff0 | p & 0xf });
        let config = |end: usize, random: &mut Random| Config {
            transport: if unreliable {
                Transport::Uc
            } else {
                Transport::Rc
            },
            dest_qpn: 0x100 + (1 - end) as u32,
            sq_psn: psn(psns[end]),
            rq_psn: psn(psns[1 - end]),
            path_mtu: mtu,
            max_rd_atomic: if end == 0 { rd.0 } else { rd.1 },
            max_dest_rd_atomic: if end == 0 { rd.1 } else { rd.0 },
            timeout: random.between(10, 15) as u8,
            retry_cnt: random.between(4, 7) as u8,
            rnr_retry: if random.one_in(4) {
                random.below(7) as u8
            } else {
                7
            },
            min_rnr_timer: random.between(1, 12) as u8,
            window: random.between(4, 200) as u32,
            window_bytes: match random.below(2) {
                0 => u32::MAX,
                _ => random.between(1, 1 << 20) as u32,
            },
            messages: random.between(1, 64) as usize,
        };
        let ends = (0..2)
            .map(|end| {
                let config = config(end, &mut random);
                let slowness = if slow { random.below(100_000) } else { 0 };
                End {
                    connection: Connection::new(&config).expect("a valid configuration"),
                    host: Host::new(Random::new(seed ^ (end as u64 + 1) << 40), slowness),
                    direction: Direction::new(unreliable),
                    left: random.between(1, 60),
                    next_receive: 0,
                    qpn: 0x100 + end as u32,
                    progress: 0,
                    patience: config.patience_ns(),
                }
            })
            .collect();
        let restart = (!unreliable && random.one_in(12)).then(|| random.below(3_000_000));
        Self {
            now: 0,
            ends,
            wire: BinaryHeap::new(),
            order: 0,
            network,
            mtu: mtu.bytes(),
            receive_gap: if random.one_in(2) {
                1
            } else {
                random.below(400_000)
            },
            random,
            restart,
            packets: 0,
        }
    }

    /// Puts a packet on the wire, with everything that can happen to it there.
    fn send(&mut self, from: usize, transport: &[u8]) {
        self.packets += 1;
        let crc = icrc::compute(&ip(from), 0xc000, 4791, transport);
        let mut bytes = transport.to_vec();
        bytes.extend_from_slice(&crc.to_le_bytes());
        let network = self.network.clone();
        if self.random.chance(network.loss) {
            return;
        }
        if network
            .partitions
            .iter()
            .any(|(b, e)| (*b..*e).contains(&self.now))
        {
            return;
        }
        let copies = 1 + u64::from(self.random.chance(network.duplication));
        for _ in 0..copies {
            let mut bytes = bytes.clone();
            if self.random.chance(network.corruption) {
                for _ in 0..self.random.between(1, 4) {
                    let bit = self.random.below(bytes.len() as u64 * 8);
                    // The congestion byte is outside the CRC; a damaged one is not found, and does no harm.
                    bytes[bit as usize / 8] ^= 1 << (bit % 8);
                }
                if self.random.one_in(8) {
                    bytes.truncate(self.random.below(bytes.len() as u64) as usize);
                }
            }
            let mut at = self.now + network.delay.0;
            if self.random.chance(network.reordering) {
                at += self.random.below(network.delay.1 * 4);
            } else if copies == 2 {
                at += self.random.below(network.delay.1);
            }
            let marked = self.random.chance(network.marking);
            self.order += 1;
            self.wire
                .push(Reverse((at, self.order, 1 - from, bytes, marked)));
        }
    }

    fn deliver(&mut self, to: usize, bytes: &[u8], marked: bool) {
        let Some(split) = bytes.len().checked_sub(ICRC_LEN) else {
            return;
        };
        let (transport, crc) = bytes.split_at(split);
        if icrc::compute(&ip(1 - to), 0xc000, 4791, transport).to_le_bytes() != *crc {
            return;
        }
        let Ok(packet) = Packet::parse(transport) else {
            return;
        };
        let end = &mut self.ends[to];
        if packet.bth.dest_qp == end.qpn {
            end.connection
                .handle(&packet, marked, self.now, &mut end.host);
        }
    }

    /// Posts, transmits, takes events, at both ends; returns whether anything happened.
    fn turn(&mut self) {
        let mut out = vec![0; 1 << 16];
        for index in 0..self.ends.len() {
            let end = &mut self.ends[index];
            end.host.tick(self.now);
            if end.connection.timeout().is_some_and(|at| at <= self.now) {
                end.connection.on_timeout(self.now);
            }
            if end.next_receive <= self.now && end.host.posted < 32 {
                end.host.posted += 1;
                end.next_receive = self.now + 1 + self.random.below(self.receive_gap);
            }
            while end.left > 0 && end.direction.may_post() && end.connection.has_room() {
                let message = end
                    .direction
                    .draw(&mut self.random, self.mtu, &mut end.host);
                match end.connection.post(message) {
                    Ok(()) => end.left -= 1,
                    Err(error) => panic!("a message was refused: {error}"),
                }
                if self.random.one_in(3) {
                    break;
                }
            }
            let before = end.direction.completed();
            while let Some(event) = end.connection.poll_event(&mut end.host) {
                end.direction.event(event, &mut end.host);
            }
            if end.direction.completed() > before || end.direction.is_done() {
                end.progress = self.now;
            }
            // A burst at a time, as an engine does.
            for _ in 0..self.random.between(1, 24) {
                let end = &mut self.ends[index];
                match end.connection.transmit(self.now, &mut end.host, &mut out) {
                    Some(len) => self.send(index, &out[..len]),
                    None => {
                        // An engine that is told "nothing" asks again when something has come, or a time is up: not before.
                        // (Slow memory may say "later" now and have it a moment after.)
                        if end.host.is_prompt() {
                            let again = end.connection.transmit(self.now, &mut end.host, &mut out);
                            assert_eq!(again, None, "what there was to send was withheld");
                        }
                        break;
                    }
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        let settled = self.ends.iter().all(|end| {
            end.direction.is_done()
                && (end.left == 0 || end.direction.failure().is_some())
                && (end.connection.is_idle() || end.connection.has_failed())
        });
        settled && self.wire.is_empty()
    }

    /// The next moment at which anything can happen.
    fn next_time(&mut self) -> u64 {
        let mut next = self.now + 200_000;
        if let Some(Reverse((at, ..))) = self.wire.peek() {
            next = next.min(*at);
        }
        for end in &mut self.ends {
            let times = [end.connection.timeout(), end.host.tick(self.now)];
            for at in times.into_iter().flatten() {
                next = next.min(at);
            }
        }
        // Whoever was refused "later" asks again soon.
        next.clamp(self.now + 500, self.now + 20_000)
    }

    fn restart_second_host(&mut self) {
        let end = &mut self.ends[1];
        let stranger = Config {
            dest_qpn: 0x100,
            sq_psn: Psn::new(self.random.next() as u32),
            rq_psn: Psn::new(self.random.next() as u32),
            ..Config::default()
        };
        end.connection = Connection::new(&stranger).expect("valid");
        // Its memory is not the old one: whatever changes it now is a stranger's doing.
        end.host = Host::new(Random::new(7), 0);
        end.direction = Direction::new(false);
        end.left = 0;
    }

    fn run(mut self) -> Summary {
        let mut quiet_since_restart = None;
        // Far beyond every time-out: whoever has not finished then hangs.
        let end_of_time = 120_000_000_000;
        while !self.is_over() {
            assert!(
                self.now < end_of_time,
                "it hangs: {:?}",
                self.ends
                    .iter()
                    .map(|e| e.direction.completed())
                    .collect::<Vec<_>>()
            );
            if self.restart.is_some_and(|at| at <= self.now) {
                self.restart = None;
                self.restart_second_host();
                quiet_since_restart = Some(self.now);
            }
            self.turn();
            self.now = self.next_time();
            while let Some(Reverse((at, ..))) = self.wire.peek()
                && *at <= self.now
            {
                let Some(Reverse((_, _, to, bytes, marked))) = self.wire.pop() else {
                    break;
                };
                self.deliver(to, &bytes, marked);
            }
            for end in &self.ends {
                if end.direction.failure() == Some(Failure::Retry) {
                    let limit = end.patience.unwrap_or(u64::MAX) + 2_000_000_000;
                    assert!(
                        self.now - end.progress.min(self.now) <= limit,
                        "failed far too late"
                    );
                }
            }
        }
        // Let what is still in a pipe settle.
        self.now += 1_000_000_000;
        self.turn();
        if quiet_since_restart.is_some() {
            let end = &self.ends[1];
            assert!(end.host.data.iter().all(|b| *b == 0), "a stranger wrote");
            assert!(
                end.host.arrived.is_empty() && end.host.atomics == 0,
                "a stranger was served"
            );
        } else {
            for index in 0..2 {
                self.ends[index]
                    .direction
                    .check_end(&self.ends[1 - index].host);
            }
        }
        let mut summary = Summary {
            packets: self.packets,
            ..Summary::default()
        };
        for end in &self.ends {
            let counters = end.connection.counters();
            summary.completed += end.direction.completed() as u64;
            summary.failed |= end.direction.failure().is_some();
            summary.retransmitted += counters.retransmitted_packets;
            summary.rnr += counters.rnr_nak_retry_err;
            summary.cnp += counters.rp_cnp_handled;
        }
        summary
    }
}

/// Runs one seed to its end; panics if anything is wrong.
pub(crate) fn run(seed: u64) -> Summary {
    World::new(seed).run()
}
