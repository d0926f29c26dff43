//! The memory of a flight record: a file that survives the process, or memory of its own.
//!
//! The pages of a file are reserved before they are written: on a full file system a store would otherwise end the process.
//! What does not fit goes to memory that dies with the process, and the record says how much that is.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::VecDeque;
#[cfg(not(miri))]
use std::os::fd::AsFd;
#[cfg(not(miri))]
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::clock::ClockKind;
use super::dir::{self, Identity};
use super::layout::{self, block_words, firing, head, region, rule};
use super::{Recording, read};
use crate::mem::Region;
use crate::raw::Shared;
use crate::script::{self, Firing};
#[cfg(not(miri))]
use crate::shm::region::Mapping;

/// A file grows to this size at most.
const MAX_BYTES: usize = 64 << 20;
/// Queue pairs that a file holds at most.
const MAX_BLOCKS: usize = 4096;

/// Words that somebody keeps.
#[derive(Clone)]
pub(super) struct Words {
    at: Shared<u64>,
    len: usize,
    _keep: Keep,
}

#[derive(Clone)]
enum Keep {
    Heap(#[allow(dead_code, reason = "kept, not read")] Arc<[AtomicU64]>),
    #[cfg(not(miri))]
    File(#[allow(dead_code, reason = "kept, not read")] Arc<RecordFile>),
}

impl Words {
    fn heap(len: usize) -> Self {
        let words: Arc<[AtomicU64]> = (0..len).map(|_| AtomicU64::new(0)).collect();
        // An `AtomicU64` has the layout of a u64, and only atomics ever touch these.
        let at = Shared::new(NonNull::from(&words[0]).cast::<u64>());
        // The whole slice is reached through it.
        let at = Shared::from_ptr(words.as_ptr().cast_mut().cast::<u64>()).unwrap_or(at);
        Self {
            at,
            len,
            _keep: Keep::Heap(words),
        }
    }

    /// Word `i`.
    #[inline(always)]
    pub(super) fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.len, "word {i} of {}", self.len);
        // SAFETY: inside the words, which are kept as long as `self`.
        unsafe { self.at.word(i).atomic() }
    }

    pub(super) fn set(&self, i: usize, value: u64) {
        self.word(i).store(value, Ordering::Relaxed);
    }

    pub(super) fn get(&self, i: usize) -> u64 {
        self.word(i).load(Ordering::Relaxed)
    }

    /// Address of the first.
    pub(super) fn at(&self) -> Shared<u64> {
        self.at
    }

    /// A copy of all.
    pub(super) fn copy(&self) -> Vec<u64> {
        (0..self.len)
            .map(|i| self.word(i).load(Ordering::Acquire))
            .collect()
    }

    fn text(&self, at: usize, words: usize, text: &str) {
        let mut bytes = text.as_bytes();
        while bytes.len() > words * 8 {
            // Whole characters only.
            let mut end = words * 8;
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            bytes = &text.as_bytes()[..end];
        }
        let mut pieces = bytes.chunks(8);
        for i in 0..words {
            let mut word = [0; 8];
            let piece = pieces.next().unwrap_or_default();
            word[..piece.len()].copy_from_slice(piece);
            self.set(at + i, u64::from_le_bytes(word));
        }
    }
}

/// A record's file, removed when it is dropped.
#[cfg(not(miri))]
struct RecordFile {
    mapping: Mapping,
    file: std::fs::File,
    path: PathBuf,
}

#[cfg(not(miri))]
impl RecordFile {
    /// A new file of `bytes`, of which none are reserved yet.
    fn create(path: &Path, bytes: usize) -> std::io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        let made = file
            .set_len(bytes as u64)
            .and_then(|()| Mapping::new(file.as_fd(), bytes, true));
        match made {
            Ok(mapping) => Ok(Self {
                mapping,
                file,
                path: path.to_owned(),
            }),
            Err(e) => {
                let _ = std::fs::remove_file(path);
                Err(e)
            }
        }
    }

    /// Reserves pages. What is written without that may end the process when the file system is full.
    fn reserve(&self, from: usize, bytes: usize) -> std::io::Result<()> {
        rustix::fs::fallocate(
            &self.file,
            rustix::fs::FallocateFlags::empty(),
            from as u64,
            bytes as u64,
        )?;
        Ok(())
    }
}

#[cfg(not(miri))]
impl Drop for RecordFile {
    fn drop(&mut self) {
        dir::remove(&self.path);
    }
}

/// The flight record of one HCA.
pub(crate) struct Store {
    head: Words,
    clock: ClockKind,
    log_events: u32,
    blocks: Mutex<Blocks>,
    #[cfg(not(miri))]
    file: Option<Arc<RecordFile>>,
}

#[derive(Default)]
struct Blocks {
    /// In use or used, in the order of the file.
    all: Vec<Words>,
    /// Of queue pairs that are gone, oldest first: what they did can be read until the place is needed.
    free: VecDeque<usize>,
    /// Places in the file that could not be reserved end the search for more.
    full: bool,
}

impl core::fmt::Debug for Store {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Store")
            .field("clock", &self.clock)
            .field("events", &(1u64 << self.log_events))
            .finish_non_exhaustive()
    }
}

impl Store {
    /// Begins a record; `None` if none is to be kept.
    pub(crate) fn new(
        recording: &Recording,
        cores: usize,
        caller: bool,
        rank: Option<u32>,
    ) -> Option<Arc<Self>> {
        let log_events = match recording {
            Recording::Off => return None,
            Recording::Memory { log_events } | Recording::File { log_events, .. } => *log_events,
        };
        let here = Identity::here();
        let id: u64 = match recording {
            Recording::File { id, .. } => *id,
            _ => 0,
        };
        #[cfg(not(miri))]
        let file = match recording {
            Recording::File { .. } => match Self::file(&here, id, log_events) {
                Ok(file) => Some(Arc::new(file)),
                Err(e) => {
                    warn_once(&e);
                    None
                }
            },
            _ => None,
        };
        #[cfg(not(miri))]
        let head = match &file {
            Some(file) => Words {
                at: Shared::new(file.mapping.ptr().cast()),
                len: layout::HEAD_WORDS,
                _keep: Keep::File(Arc::clone(file)),
            },
            None => Words::heap(layout::HEAD_WORDS),
        };
        #[cfg(miri)]
        let head = Words::heap(layout::HEAD_WORDS);
        let store = Self {
            head,
            clock: ClockKind::here(),
            log_events,
            blocks: Mutex::default(),
            #[cfg(not(miri))]
            file,
        };
        store.begin(&here, id, cores, caller, rank);
        Some(Arc::new(store))
    }

    #[cfg(not(miri))]
    fn file(here: &Identity, id: u64, log_events: u32) -> std::io::Result<RecordFile> {
        let dir = dir::directory()?;
        dir::reap(&dir, here);
        let path = dir.join(format!("{}.{id:016x}", here.pid));
        let head = layout::HEAD_WORDS * 8;
        let block = block_words(log_events) * 8;
        let blocks = ((MAX_BYTES - head) / block).clamp(1, MAX_BLOCKS);
        let file = RecordFile::create(&path, head + blocks * block)?;
        // Dropped from here on, it removes the file.
        dir::enter(&path);
        file.reserve(0, head)?;
        Ok(file)
    }

    fn begin(&self, here: &Identity, id: u64, cores: usize, caller: bool, rank: Option<u32>) {
        let head = &self.head;
        let (ticks, ns) = self.clock.pair();
        for (at, value) in [
            (head::PID, here.pid.into()),
            (head::STARTED, here.started),
            (head::NAMESPACE, here.namespace),
            (head::BOOT, here.boot[0]),
            (head::BOOT + 1, here.boot[1]),
            (head::ID, id),
            (head::CLOCK, self.clock as u64),
            (head::TICKS, ticks),
            (head::NS, ns),
            (head::CORES, cores as u64),
            (head::LOG_EVENTS, self.log_events.into()),
            (head::RANK, rank.map_or(0, |r| u64::from(r) + 1)),
            (head::CALLER, caller.into()),
            (head::VERSION, layout::VERSION),
            (head::MAGIC, layout::MAGIC),
        ] {
            head.set(at, value);
        }
        head.text(
            head::RELEASE,
            head::RELEASE_WORDS,
            env!("CARGO_PKG_VERSION"),
        );
        let words: Vec<String> = std::env::args_os()
            .map(|a| a.to_string_lossy().into_owned())
            .collect();
        head.text(head::COMMAND, head::COMMAND_WORDS, &words.join(" "));
        head.word(head::COMPLETE).store(1, Ordering::Release);
    }

    pub(super) fn clock(&self) -> ClockKind {
        self.clock
    }

    pub(super) fn head(&self) -> &Words {
        &self.head
    }

    pub(super) fn log_events(&self) -> u32 {
        self.log_events
    }

    /// First word of a core's place; `None` for cores beyond those that have one.
    pub(super) fn core(&self, core: usize) -> Option<Shared<u64>> {
        if core >= layout::MAX_CORES {
            return None;
        }
        // SAFETY: inside the head.
        Some(unsafe { self.head.at.word(layout::CORES + core * layout::CORE_WORDS) })
    }

    /// A block of zeros, and its number.
    pub(super) fn take(&self) -> (usize, Words) {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match blocks.free.len() {
            // A few stay readable, if there is room.
            n if n > 64 || (n > 0 && blocks.full) => blocks.free.pop_front(),
            _ => None,
        };
        if let Some(number) = number {
            let words = blocks.all[number].clone();
            for i in 0..words.len {
                words.set(i, 0);
            }
            return (number, words);
        }
        let number = blocks.all.len();
        let words = self.fresh(number, &mut blocks);
        blocks.all.push(words.clone());
        (number, words)
    }

    #[cfg(not(miri))]
    fn fresh(&self, number: usize, blocks: &mut Blocks) -> Words {
        let len = block_words(self.log_events);
        if let Some(file) = &self.file {
            let from = (layout::HEAD_WORDS + number * len) * 8;
            let fits = !blocks.full
                && from + len * 8 <= file.mapping.len()
                && file.reserve(from, len * 8).is_ok();
            if fits {
                self.head.set(head::BLOCKS, number as u64 + 1);
                // SAFETY: inside the mapping.
                let at = Shared::new(unsafe { file.mapping.ptr().byte_add(from) }.cast());
                return Words {
                    at,
                    len,
                    _keep: Keep::File(Arc::clone(file)),
                };
            }
            blocks.full = true;
            self.head
                .set(head::QPS_LEFT_OUT, self.head.get(head::QPS_LEFT_OUT) + 1);
        }
        Words::heap(len)
    }

    #[cfg(miri)]
    fn fresh(&self, _: usize, _: &mut Blocks) -> Words {
        Words::heap(block_words(self.log_events))
    }

    /// The queue pair of a block is gone.
    pub(super) fn give(&self, number: usize) {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.free.push_back(number);
    }

    /// The first free place of a table of the head: one whose first word is zero.
    fn free(&self, table: usize, places: usize, words: usize) -> Option<usize> {
        (0..places)
            .map(|i| table + i * words)
            .find(|&at| self.head.get(at) == 0)
    }

    /// Notes a region.
    pub(crate) fn registered(&self, key: u32, of: &Region) {
        // One at a time, so that two do not take the same place.
        let _one = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.free(layout::REGIONS, layout::MAX_REGIONS, layout::REGION_WORDS);
        let Some(at) = free else {
            let left = self.head.get(head::REGIONS_LEFT_OUT);
            return self.head.set(head::REGIONS_LEFT_OUT, left + 1);
        };
        let rights = u64::from(of.pd)
            | u64::from(of.access.bits() & 0xff) << 32
            | (of.memory.kind() as u64) << 40;
        self.head.set(at + region::BASE, of.base);
        self.head.set(at + region::LEN, of.memory.len() as u64);
        self.head.set(at + region::ADDR, of.memory.addr());
        self.head.set(at + region::RIGHTS, rights);
        self.head
            .word(at + region::KEY)
            .store(u64::from(key) + 1, Ordering::Release);
    }

    /// Forgets a region.
    pub(crate) fn revoked(&self, key: u32) {
        for i in 0..layout::MAX_REGIONS {
            let at = layout::REGIONS + i * layout::REGION_WORDS + region::KEY;
            if self.head.get(at) == u64::from(key) + 1 {
                self.head.set(at, 0);
            }
        }
    }

    /// Notes a rule of the fault script, number `i`, and the rank that it is for if that is another.
    pub(crate) fn rule(&self, i: usize, text: &str, elsewhere: Option<u32>) {
        self.head.set(head::RULES, i as u64 + 1);
        if i < layout::MAX_RULES {
            let at = layout::RULES + i * layout::RULE_WORDS;
            let elsewhere = elsewhere.map_or(0, |rank| u64::from(rank) + 1);
            self.head.set(at + rule::ELSEWHERE, elsewhere);
            self.head.text(at + rule::TEXT, rule::TEXT_WORDS, text);
        }
    }

    /// Notes a firing of a rule that has fired so often. By one thread at a time.
    pub(crate) fn fired(&self, of: &Firing, times: u64) {
        let number = self.head.get(head::FIRINGS);
        self.head.set(head::FIRINGS, number + 1);
        if of.rule <= layout::MAX_RULES {
            let at = layout::RULES + (of.rule - 1) * layout::RULE_WORDS;
            self.head.set(at + rule::FIRED, times);
        }
        let half = layout::MAX_FIRINGS / 2;
        let place = match usize::try_from(number).unwrap_or(usize::MAX) {
            n if n < half => n,
            n => half + n % half,
        };
        let at = layout::FIRINGS + place * layout::FIRING_WORDS;
        self.head
            .word(at + firing::NUMBER)
            .store(0, Ordering::Release);
        core::sync::atomic::fence(Ordering::Release);
        let flag = |yes: bool, bit: u64| if yes { bit } else { 0 };
        let action = script::action_number(of.action).unwrap_or(0xff) as u64;
        let flags = flag(of.receive, firing::RECEIVE) | flag(of.idle, firing::IDLE) | action << 8;
        for (i, value) in [
            (firing::RULE, of.rule as u64 | (of.core as u64) << 32),
            (firing::QPN, of.qpn.map_or(0, |q| u64::from(q.get()) + 1)),
            (firing::INDEX, of.index.map_or(0, |i| i.saturating_add(1))),
            (firing::FLAGS, flags),
            (firing::AT, of.at_ns),
            (firing::UNTIL, of.until_ns.unwrap_or(0)),
        ] {
            self.head.set(at + i, value);
        }
        self.head
            .text(at + firing::NOTE, firing::NOTE_WORDS, &of.note);
        self.head
            .word(at + firing::NUMBER)
            .store(number + 1, Ordering::Release);
    }

    /// Notes why an engine core died.
    pub(crate) fn died(&self, core: usize, why: &str) {
        let _one = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.free(layout::DEATHS, layout::MAX_DEATHS, layout::DEATH_WORDS);
        if let Some(at) = free {
            self.head.text(at + 1, layout::DEATH_WORDS - 1, why);
            self.head.word(at).store(core as u64 + 1, Ordering::Release);
        }
    }

    /// What the record says now.
    pub(crate) fn read(&self) -> Option<read::Record> {
        let blocks: Vec<Words> = {
            let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
            blocks.all.clone()
        };
        let mut record = read::Record::parse_head(&self.head.copy()).ok()?;
        for words in blocks {
            let copy = words.copy();
            let newest = words.word(layout::qp::HEAD).load(Ordering::Acquire);
            record.add_block(&copy, newest);
        }
        Some(record)
    }
}

/// Said once in a process: who opens many devices knows it by then.
#[cfg(not(miri))]
fn warn_once(e: &std::io::Error) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            "the flight record of this process is kept in its own memory and will not survive it: {e}; or give DOORBELL_RECORD=off"
        );
    });
}
