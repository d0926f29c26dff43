//! The session state machine under random messages, half of them nearly right. Replay with `DOORBELL_SEED`.
//!
//! Whatever comes, it answers or refuses, keeps its queues bounded, maps nothing after its end, and accounts for every
//! region: mapped once, unmapped once or still listed.

use std::{collections::BTreeSet, os::fd::OwnedFd, sync::Arc, time::Instant};

use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};

use super::super::{
    proto::{Hello, MAX_MESSAGE, Message, NO_REGION, RegionKind},
    session::{Answered, Limits, Offer, Session, World},
};
use super::*;

#[derive(Default)]
struct Fake {
    mapped: BTreeSet<u32>,
    hidden: BTreeSet<u32>,
    grace: u64,
    acknowledged: u64,
    left: bool,
    up: bool,
    answers: usize,
    inbox: usize,
    refuse_maps: bool,
}

impl World for Fake {
    fn hello(&mut self, _: &Hello, _: [OwnedFd; 3]) -> Result<u32, Refusal> {
        Ok(8)
    }
    fn leaving(&mut self, _: &Gone) {
        self.left = true;
    }
    fn map(&mut self, id: u32, _: u64, _: &RegionKind, _: Option<OwnedFd>) -> Result<(), Refusal> {
        assert!(id < 8);
        if self.refuse_maps {
            return Err(Refusal::new(RefusalCode::Map, "no room"));
        }
        assert!(self.mapped.insert(id), "region {id} is mapped twice");
        Ok(())
    }
    fn hide(&mut self, id: u32) {
        if self.mapped.contains(&id) {
            self.hidden.insert(id);
        }
    }
    fn unmap(&mut self, id: u32) {
        assert!(
            self.acknowledged >= 1,
            "nothing is unmapped before a grace period"
        );
        if self.mapped.remove(&id) {
            assert!(
                self.hidden.remove(&id),
                "region {id} was unmapped in plain sight"
            );
        }
    }
    fn grace_begin(&mut self) -> u64 {
        self.grace += 1;
        self.grace
    }
    fn grace_passed(&mut self, epoch: u64) -> bool {
        assert!(epoch <= self.grace);
        self.acknowledged >= epoch
    }
    fn up(&mut self) {
        assert!(!std::mem::replace(&mut self.up, true), "up twice");
    }
    fn app(&mut self, _: Vec<u8>) {
        self.inbox += 1;
    }
    fn credit(&mut self, _: u32) {}
    fn answered(&mut self, what: Answered) {
        self.answers += 1;
        if let Answered::Added { id, .. } = what {
            assert!(id >= 100, "regions of this side");
        }
    }
}

fn message(random: &mut StdRng, epoch: &mut u64) -> Message {
    let id = random.random_range(0..9);
    match random.random_range(0..14) {
        0 => Message::Hello(Hello {
            nonce: 1,
            pid: 1,
            holder: 1,
            table_len: 1,
            mailbox_len: 1,
            words_len: 1,
        }),
        1 => Message::Refuse(Refusal::new(RefusalCode::Busy, "enough")),
        2 | 3 => Message::RegionAdd {
            id,
            seq: random.next_u32(),
            len: 4096,
            kind: RegionKind::Host { writable: true },
        },
        4 => {
            let kind = RegionKind::Device {
                handle: vec![1; 64],
                fd: random.random(),
                addr: 0,
            };
            Message::RegionAdd {
                id,
                seq: 0,
                len: 1,
                kind,
            }
        }
        5 | 6 => Message::RegionAck {
            seq: random.random_range(0..4),
            refused: None,
        },
        7 => Message::Ready {
            regions: random.random_range(0..2),
        },
        8 | 9 => {
            *epoch += u64::from(random.random_bool(0.9));
            Message::Revoke {
                epoch: *epoch,
                region: if random.random() { id } else { NO_REGION },
            }
        }
        10 => Message::RevokeAck {
            epoch: random.random_range(1..3),
        },
        11 => {
            if random.random_bool(0.3) {
                Message::Bye
            } else {
                Message::AppTaken {
                    count: random.next_u32(),
                }
            }
        }
        12 => {
            if random.random_bool(0.3) {
                Message::ByeAck
            } else {
                Message::AppTaken { count: 1 }
            }
        }
        _ => Message::App(vec![0; random.random_range(0..64)]),
    }
}

/// One session, from its beginning to whatever end.
fn play(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let (mut world, mut epoch) = (Fake::default(), 0);
    let limits = Limits {
        handshake: Duration::from_secs(1),
        step: Duration::from_secs(1),
        parting: Duration::from_secs(1),
    };
    let memfd = || Arc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
    let offer = |id| Offer {
        id,
        pd: 0,
        len: 1,
        kind: RegionKind::Device {
            handle: vec![],
            fd: false,
            addr: 0,
        },
        fd: None,
    };
    let hello = Message::Hello(Hello {
        nonce: 0,
        pid: 0,
        holder: 0,
        table_len: 0,
        mailbox_len: 0,
        words_len: 0,
    });
    let mut now = Instant::now();
    let mut session = Session::new(
        hello,
        vec![memfd(), memfd(), memfd()],
        vec![offer(100)],
        limits,
        now,
    );
    let mut asked = 1;
    // Most peers begin as they should.
    let mut opening = random.random_bool(0.8);
    for _ in 0..random.random_range(1..120) {
        let was_over = session.over().is_some();
        let before = world.mapped.clone();
        match random.random_range(0..10) {
            0..6 => {
                let message = match std::mem::take(&mut opening) {
                    true => Message::Hello(Hello {
                        nonce: 1,
                        pid: 1,
                        holder: 1,
                        table_len: 1,
                        mailbox_len: 1,
                        words_len: 1,
                    }),
                    false => message(&mut random, &mut epoch),
                };
                let mut bytes = message.encode();
                let mut fds = message.fds();
                match random.random_range(0..40) {
                    0 => {
                        let at = random.random_range(0..bytes.len());
                        bytes[at] ^= 1 << random.random_range(0..8);
                    }
                    1 => bytes.truncate(random.random_range(0..=bytes.len())),
                    2 => bytes.resize(random.random_range(0..MAX_MESSAGE), 0x55),
                    3 => fds = random.random_range(0..5),
                    _ => {}
                }
                let fds = (0..fds)
                    .map(|_| Arc::into_inner(memfd()).unwrap())
                    .collect();
                session.receive(&bytes, fds, now, &mut world);
            }
            6 => {
                now += Duration::from_millis(random.random_range(0..400));
                world.acknowledged +=
                    u64::from(world.acknowledged < world.grace && random.random());
                session.tick(now, &mut world);
            }
            7 => {
                while session.front().is_some() && random.random_bool(0.9) {
                    session.sent();
                }
            }
            8 => match random.random_range(0..4) {
                0 if !was_over => {
                    session.add(offer(100 + asked as u32), now);
                    asked += 1;
                }
                1 if !was_over => {
                    session.revoke(9, Some(100), now, &mut world);
                    asked += 1;
                }
                2 => session.stalled(now),
                _ => session.app_taken(1),
            },
            _ if random.random_bool(0.05) => session.close(now, &mut world),
            _ => world.refuse_maps = random.random_bool(0.2),
        }
        assert!(
            !was_over || world.mapped.is_superset(&before) && before.is_superset(&world.mapped),
            "after the end nothing changes"
        );
        assert!(
            session.out_len() <= 400,
            "{} messages wait to be sent",
            session.out_len()
        );
        assert!(world.answers <= asked);
        let listed: BTreeSet<u32> = session.theirs().collect();
        assert!(
            listed.is_superset(&world.mapped),
            "{:?} is mapped, {listed:?} listed",
            world.mapped
        );
        assert!(session.over().is_none() || !session.is_up());
        // It waits for something: for time, for the socket to take a message, or, when all is well, for the peer.
        let timer = session.next_tick(now, Duration::from_millis(1)).is_some();
        assert!(timer || session.front().is_some() || session.over().is_some() || session.is_up());
    }
}

#[test]
fn random_messages_end_in_a_refusal_or_in_order() {
    let seed = match std::env::var("DOORBELL_SEED") {
        Ok(text) => text.parse().expect("DOORBELL_SEED is a number"),
        Err(_) => rand::random(),
    };
    for i in 0..5_000u64 {
        let seed = u64::wrapping_add(seed, i);
        let outcome = std::panic::catch_unwind(|| play(seed));
        if let Err(panic) = outcome {
            eprintln!("replay with DOORBELL_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
