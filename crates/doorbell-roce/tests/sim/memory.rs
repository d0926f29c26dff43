//! The memory behind one end of a simulated connection: two regions, receives, local buffers; fast, or as slow as a GPU's.

use std::collections::{HashMap, VecDeque};

use doorbell_roce::{Access, Atomic, LocalFault, Memory, Received, Refusal, Status};

use super::random::Random;

/// Keys of the two regions.
pub(crate) const DATA: u32 = 0x1111;
pub(crate) const ROM: u32 = 0x2222;
/// Where the regions begin.
pub(crate) const BASE: u64 = 0x7000_0000_0000;
/// Bytes of each.
pub(crate) const SIZE: usize = 64 << 10;
/// Bytes of a posted receive.
pub(crate) const RECEIVE: usize = 12 << 10;

#[derive(Debug)]
enum Apply {
    Write {
        at: usize,
        bytes: Vec<u8>,
    },
    Scatter {
        receive: usize,
        at: usize,
        bytes: Vec<u8>,
    },
    Store {
        message: u64,
        at: usize,
        bytes: Vec<u8>,
    },
    Atomic {
        id: u64,
        at: usize,
        op: Atomic,
    },
}

#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) data: Vec<u8>,
    rom: Vec<u8>,
    /// Local buffers of messages under way.
    pub(crate) local: HashMap<u64, Vec<u8>>,
    /// Receives posted and not taken.
    pub(crate) posted: usize,
    taken: VecDeque<Vec<u8>>,
    first_taken: usize,
    /// What arrived, in order: what it was, and the bytes of a SEND.
    pub(crate) arrived: Vec<(Received, Vec<u8>)>,
    /// Executed atomics.
    pub(crate) atomics: u64,

    random: Random,
    /// Longest time that anything takes to settle, ns; 0: at once.
    slowness: u64,
    now: u64,
    pipe: VecDeque<(u64, u64, Apply)>,
    ticket: u64,
    settled: u64,
    results: HashMap<u64, u64>,
}

pub(crate) fn rom_byte(at: usize) -> u8 {
    (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]
}

impl Host {
    /// Has whatever is asked for at once, always.
    pub(crate) fn is_prompt(&self) -> bool {
        self.slowness == 0
    }

    pub(crate) fn new(random: Random, slowness: u64) -> Self {
        Self {
            data: vec![0; SIZE],
            rom: (0..SIZE).map(rom_byte).collect(),
            local: HashMap::new(),
            posted: 0,
            taken: VecDeque::new(),
            first_taken: 0,
            arrived: Vec::new(),
            atomics: 0,
            random,
            slowness,
            now: 0,
            pipe: VecDeque::new(),
            ticket: 0,
            settled: 0,
            results: HashMap::new(),
        }
    }

    /// Lets the time pass; returns when the next thing settles.
    pub(crate) fn tick(&mut self, now: u64) -> Option<u64> {
        self.now = now;
        while self.pipe.front().is_some_and(|(due, ..)| *due <= now) {
            let Some((_, ticket, apply)) = self.pipe.pop_front() else {
                break;
            };
            self.apply(apply);
            self.settled = ticket;
        }
        self.pipe.front().map(|(due, ..)| *due)
    }

    fn apply(&mut self, apply: Apply) {
        match apply {
            Apply::Write { at, bytes } => self.data[at..at + bytes.len()].copy_from_slice(&bytes),
            Apply::Scatter { receive, at, bytes } => {
                // A receive that was given back meanwhile: the next message's bytes come after these.
                if let Some(buffer) = self.taken.get_mut(receive - self.first_taken) {
                    buffer[at..at + bytes.len()].copy_from_slice(&bytes);
                }
            }
            Apply::Store { message, at, bytes } => {
                let buffer = self
                    .local
                    .get_mut(&message)
                    .expect("its message is under way");
                buffer[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            Apply::Atomic { id, at, op } => {
                let word: &mut [u8; 8] = (&mut self.data[at..at + 8]).try_into().expect("8 bytes");
                let old = u64::from_le_bytes(*word);
                let new = match op {
                    Atomic::FetchAdd { add } => old.wrapping_add(add),
                    Atomic::CompareSwap { compare, swap } if old == compare => swap,
                    Atomic::CompareSwap { .. } => old,
                };
                *word = new.to_le_bytes();
                self.atomics += 1;
                self.results.insert(id, old);
            }
        }
    }

    /// Now, or through the pipe: never past something that is in it.
    fn submit(&mut self, apply: Apply) -> Status {
        if self.slowness == 0 {
            self.apply(apply);
            return Status::Now;
        }
        let due = self.now + self.random.below(self.slowness);
        let due = self.pipe.back().map_or(due, |(last, ..)| due.max(*last));
        self.ticket += 1;
        self.pipe.push_back((due, self.ticket, apply));
        Status::Later(self.ticket)
    }

    fn range(&self, rkey: u32, va: u64, len: usize, access: Access) -> Result<usize, Refusal> {
        let right = match rkey {
            DATA => true,
            ROM => access == Access::Read,
            _ => false,
        };
        let at = va.wrapping_sub(BASE);
        if !right || at > SIZE as u64 || at as usize + len > SIZE {
            return Err(Refusal::Access);
        }
        Ok(at as usize)
    }
}

impl Memory for Host {
    fn load(&mut self, message: u64, offset: u32, out: &mut [u8]) -> Result<bool, LocalFault> {
        if self.slowness > 0 && self.random.one_in(8) {
            return Ok(false);
        }
        let buffer = self.local.get(&message).ok_or(LocalFault(1))?;
        out.copy_from_slice(&buffer[offset as usize..offset as usize + out.len()]);
        Ok(true)
    }

    fn store(&mut self, message: u64, offset: u32, bytes: &[u8]) -> Result<Status, LocalFault> {
        let buffer = self.local.get(&message).ok_or(LocalFault(2))?;
        assert!(
            offset as usize + bytes.len() <= buffer.len(),
            "outside the message's buffer"
        );
        Ok(self.submit(Apply::Store {
            message,
            at: offset as usize,
            bytes: bytes.to_vec(),
        }))
    }

    fn check(&mut self, rkey: u32, va: u64, len: u32, access: Access) -> Result<(), Refusal> {
        self.range(rkey, va, len as usize, access).map(|_| ())
    }

    fn write(&mut self, rkey: u32, va: u64, bytes: &[u8]) -> Result<Status, Refusal> {
        let at = self.range(rkey, va, bytes.len(), Access::Write)?;
        Ok(self.submit(Apply::Write {
            at,
            bytes: bytes.to_vec(),
        }))
    }

    fn read(&mut self, rkey: u32, va: u64, _: u32, out: &mut [u8]) -> Result<bool, Refusal> {
        let at = self.range(rkey, va, out.len(), Access::Read)?;
        if self.slowness > 0 && self.random.one_in(8) {
            return Ok(false);
        }
        let region = if rkey == ROM { &self.rom } else { &self.data };
        out.copy_from_slice(&region[at..at + out.len()]);
        Ok(true)
    }

    fn atomic(&mut self, id: u64, rkey: u32, va: u64, op: Atomic) -> Result<Option<u64>, Refusal> {
        let at = self.range(rkey, va, 8, Access::Atomic)?;
        assert!(at % 8 == 0, "the transport checks alignment");
        Ok(match self.submit(Apply::Atomic { id, at, op }) {
            Status::Now => self.results.remove(&id),
            Status::Later(_) => None,
        })
    }

    fn atomic_result(&mut self, id: u64) -> Result<Option<u64>, Refusal> {
        Ok(self.results.get(&id).copied())
    }

    fn receive(&mut self) -> bool {
        if self.posted == 0 {
            return false;
        }
        self.posted -= 1;
        self.taken.push_back(vec![0; RECEIVE]);
        true
    }

    fn scatter(&mut self, offset: u32, bytes: &[u8]) -> Result<Status, Refusal> {
        if offset as usize + bytes.len() > RECEIVE {
            return Err(Refusal::Invalid);
        }
        let receive = self.first_taken + self.taken.len() - 1;
        Ok(self.submit(Apply::Scatter {
            receive,
            at: offset as usize,
            bytes: bytes.to_vec(),
        }))
    }

    fn received(&mut self, received: Received) {
        let mut bytes = self.taken.pop_front().expect("one was taken");
        self.first_taken += 1;
        bytes.truncate(received.len as usize);
        self.arrived.push((received, bytes));
    }

    fn unreceive(&mut self) {
        self.taken.pop_back().expect("one was taken");
        self.posted += 1;
    }

    fn settled(&mut self) -> u64 {
        self.settled
    }
}
