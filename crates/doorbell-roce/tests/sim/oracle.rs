//! What must be true at one end: the operations that were posted, what they should have done, and the comparison with what happened.

use doorbell_roce::{Event, Failure, Message, Op, ReceivedKind};

use super::memory::{BASE, DATA, Host, RECEIVE, ROM, SIZE, rom_byte};
use super::random::Random;

/// The first bytes of the data region are words for atomics; WRITEs go behind them.
const WORDS: usize = 8;
const WRITES: usize = WORDS * 8;

#[derive(Clone, Debug)]
struct Posted {
    message: Message,
    bytes: Vec<u8>,
    /// What an atomic has to bring back; `None`: nothing, or unknown.
    expect: Option<u64>,
    /// How it has to fail, if it comes to that.
    refused: Option<Failure>,
    /// The data region after this operation, of the words only.
    words: [u64; WORDS],
}

/// One direction: the requester's view of the peer's memory.
#[derive(Debug)]
pub(crate) struct Direction {
    posted: Vec<Posted>,
    done: usize,
    failed: Option<(usize, Failure)>,
    shadow: Vec<u8>,
    words: [u64; WORDS],
    /// A READ of the data region is under way: nothing may be posted that changes it.
    reading_back: bool,
    unreliable: bool,
}

impl Direction {
    pub(crate) fn new(unreliable: bool) -> Self {
        Self {
            posted: Vec::new(),
            done: 0,
            failed: None,
            shadow: vec![0; SIZE],
            words: [0; WORDS],
            reading_back: false,
            unreliable,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.failed.is_some() || self.done == self.posted.len()
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failed.map(|(_, failure)| failure)
    }

    pub(crate) fn completed(&self) -> usize {
        self.done
    }

    pub(crate) fn may_post(&self) -> bool {
        self.failed.is_none() && !self.reading_back
    }

    /// Draws the next operation, notes what it should do, and puts its bytes into the local memory.
    pub(crate) fn draw(&mut self, random: &mut Random, mtu: u32, local: &mut Host) -> Message {
        let token = self.posted.len() as u64;
        let len = match random.below(8) {
            0 => 0,
            1 => random.between(1, 16) as u32,
            2 => mtu,
            3 => mtu + 1,
            4 => (random.between(1, 4) as u32) * mtu,
            _ => random.below(u64::from(mtu) * 3) as u32,
        }
        .min(RECEIVE as u32 - 1);
        let imm = random.one_in(3).then(|| random.next() as u32);
        // Now and then a request that the peer has to refuse; what is posted behind it must not be carried out.
        let wrong = !self.unreliable && random.one_in(400);
        let kind = if self.unreliable {
            random.below(4)
        } else {
            random.below(10)
        };
        let mut expect = None;
        let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        let at = WRITES as u64 + random.below((SIZE - WRITES) as u64 - u64::from(len));
        let word = random.below(WORDS as u64) as usize;
        let mut refused = None;
        let op = match kind {
            0..=1 if wrong => {
                refused = Some(Failure::RemoteInvalid);
                bytes = vec![0; RECEIVE + 1];
                Op::Send { imm }
            }
            2..=4 if wrong => {
                refused = Some(Failure::RemoteAccess);
                bytes.resize(bytes.len().max(1), 0);
                Op::Write {
                    va: BASE + at,
                    rkey: if random.one_in(2) { ROM } else { 0x3333 },
                    imm,
                }
            }
            0..=1 => Op::Send { imm },
            2..=4 => {
                let range = at as usize..at as usize + bytes.len();
                if !self.unreliable {
                    self.shadow[range].copy_from_slice(&bytes);
                }
                Op::Write {
                    va: BASE + at,
                    rkey: DATA,
                    imm,
                }
            }
            5..=6 => {
                let back = random.one_in(2);
                self.reading_back = back;
                bytes.fill(0xee);
                Op::Read {
                    va: BASE + at,
                    rkey: if back { DATA } else { ROM },
                }
            }
            7..=8 => {
                bytes = vec![0xee; 8];
                let add = random.next();
                expect = Some(self.words[word]);
                self.words[word] = self.words[word].wrapping_add(add);
                Op::FetchAdd {
                    va: BASE + word as u64 * 8,
                    rkey: DATA,
                    add,
                }
            }
            _ => {
                bytes = vec![0xee; 8];
                let old = self.words[word];
                let compare = if random.one_in(2) { old } else { random.next() };
                let swap = random.next();
                expect = Some(old);
                if compare == old {
                    self.words[word] = swap;
                }
                Op::CompareSwap {
                    va: BASE + word as u64 * 8,
                    rkey: DATA,
                    compare,
                    swap,
                }
            }
        };
        let message = Message {
            token,
            op,
            len: bytes.len() as u32,
            fence: random.one_in(6),
            solicited: random.one_in(4),
        };
        local.local.insert(token, bytes.clone());
        self.posted.push(Posted {
            message,
            bytes,
            expect,
            refused,
            words: self.words,
        });
        message
    }

    pub(crate) fn event(&mut self, event: Event, local: &mut Host) {
        match event {
            Event::Done { through } => {
                assert!(self.failed.is_none(), "done after a failure");
                assert!(through as usize >= self.done, "told twice");
                while self.done <= through as usize {
                    self.check_done(local);
                    self.done += 1;
                }
            }
            Event::Failed { token, failure } => match self.failed {
                None => {
                    assert_eq!(
                        token as usize, self.done,
                        "the first that is not done fails"
                    );
                    let allowed = match self.posted[token as usize].refused {
                        Some(refused) => failure == refused,
                        None => false,
                    };
                    assert!(
                        allowed || matches!(failure, Failure::Retry | Failure::RnrRetry),
                        "message {token} failed with {failure:?}"
                    );
                    self.failed = Some((token as usize, failure));
                }
                Some(_) => assert_eq!(failure, Failure::Flushed),
            },
            Event::Stopped => {}
        }
    }

    fn check_done(&mut self, local: &mut Host) {
        let posted = &self.posted[self.done];
        assert_eq!(
            posted.refused, None,
            "message {} had to be refused",
            posted.message.token
        );
        let bytes = local
            .local
            .remove(&posted.message.token)
            .expect("kept until done");
        match posted.message.op {
            Op::Read { va, rkey } => {
                let at = (va - BASE) as usize;
                if rkey == ROM {
                    assert!(
                        bytes
                            .iter()
                            .enumerate()
                            .all(|(i, b)| *b == rom_byte(at + i)),
                        "READ of the ROM"
                    );
                } else {
                    assert!(
                        bytes == self.shadow[at..at + bytes.len()],
                        "READ sees every WRITE before it"
                    );
                    self.reading_back = false;
                }
            }
            Op::FetchAdd { .. } | Op::CompareSwap { .. } => {
                let value = u64::from_le_bytes(bytes.as_slice().try_into().expect("8 bytes"));
                assert_eq!(
                    Some(value),
                    posted.expect,
                    "the value before atomic {}",
                    posted.message.token
                );
            }
            Op::Write { .. } | Op::Send { .. } => {}
        }
    }

    /// Compares the target with what should be there, when nothing moves any more.
    pub(crate) fn check_end(&self, target: &Host) {
        self.check_arrivals(target);
        if self.unreliable {
            return;
        }
        if self.failed.is_none() {
            assert!(
                self.shadow[WRITES..] == target.data[WRITES..],
                "every byte that was written"
            );
        }
        // Of what failed, zero or one executions, and none after one that was not executed: some prefix.
        let words: Vec<u64> = (0..WORDS)
            .map(|w| u64::from_le_bytes(target.data[w * 8..w * 8 + 8].try_into().expect("8 bytes")))
            .collect();
        let start = [0; WORDS];
        let prefixes = self.done..=self.posted.len();
        let matches = prefixes.into_iter().any(|n| {
            let after = if n == 0 {
                &start
            } else {
                &self.posted[n - 1].words
            };
            after[..] == words[..]
        });
        assert!(matches, "atomics were executed once each and in order");
        if self.failed.is_none() {
            assert_eq!(words, self.words);
        }
    }

    /// SENDs and immediates: those that arrived are the first of those posted (RC), or some of them, in order (UC).
    fn check_arrivals(&self, target: &Host) {
        let expected = self.posted.iter().filter(|p| match p.message.op {
            _ if p.refused.is_some() => false,
            Op::Send { .. } => true,
            Op::Write { imm, .. } => imm.is_some(),
            _ => false,
        });
        let mut arrived = target.arrived.iter();
        let mut next = arrived.next();
        for posted in expected {
            let Some((received, bytes)) = next else {
                let must = !self.unreliable && (posted.message.token as usize) < self.done;
                assert!(!must, "message {} never arrived", posted.message.token);
                continue;
            };
            let (kind, imm) = match posted.message.op {
                Op::Send { imm } => (ReceivedKind::Send, imm),
                Op::Write { imm, .. } => (ReceivedKind::Write, imm),
                _ => unreachable!("filtered"),
            };
            let same = received.kind == kind
                && received.imm == imm
                && received.len == posted.message.len
                && received.solicited == posted.message.solicited
                && (kind == ReceivedKind::Write || *bytes == posted.bytes);
            if same {
                next = arrived.next();
            } else {
                assert!(
                    self.unreliable,
                    "message {} arrived as {received:?}",
                    posted.message.token
                );
            }
        }
        if let Some((received, _)) = next {
            panic!("something arrived that was never sent, twice, or out of order: {received:?}");
        }
    }
}
