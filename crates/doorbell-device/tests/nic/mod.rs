//! A NIC for tests: one QP in ordinary memory, and an engine that executes it and trusts nothing.
//!
//! It reads what a NIC reads (doorbell, record, producer word, ring), panics at a WQE that is stale, torn, misplaced or malformed,
//! overwrites what it has consumed, and completes in order. Memory is one zero-based region of 64-bit words.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "each test file uses a part"
)]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use doorbell_device::QpHandle;
use doorbell_device::layout::{
    CqKind, EXT_SOFT_ENGINE, ErrorWord, GpuQp, MemType, NicHandler, QpExt, QpInit, RqInit,
};
use doorbell_wire::cqe::{self, CqeTail, Kind};
use doorbell_wire::db::{self, Advance};
use doorbell_wire::{Chunk, Cqn, Ctrl, Key, Payload, Qpn, Remote, Request, Syndrome, Vendor};

/// The region's key.
pub const KEY: Key = Key(0x1234_5678);
/// A key that no region has.
pub const BAD_KEY: Key = Key(0xdead);
pub const QPN: u32 = 0x0a_bc_de;

/// How a QP is made.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub depth: u32,
    pub handler: NicHandler,
    pub cq: CqKind,
    /// First index: indexes wrap at 2^16, 2^24 and 2^32 somewhere.
    pub start: u64,
    /// With Doorbell's extension, or a bare 296-byte QP.
    pub ext: bool,
    /// The extension says that only the doorbell triggers.
    pub soft: bool,
    /// Receives of a receive queue; 0: none.
    pub receives: u32,
    /// Pieces of memory of a receive.
    pub pieces: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            depth: 64,
            handler: NicHandler::DoorbellRecord,
            cq: CqKind::Collapsed,
            start: 0,
            ext: true,
            soft: true,
            receives: 0,
            pieces: 1,
        }
    }
}

/// Words that both sides use as atomics, at addresses whose provenance is exposed.
pub struct Words {
    words: Box<[AtomicU64]>,
    skip: usize,
}

impl Words {
    /// `n` words of `value`, 64-byte aligned.
    pub fn new(n: usize, value: u64) -> Self {
        let words: Box<[AtomicU64]> = (0..n + 7).map(|_| AtomicU64::new(value)).collect();
        let at = words.as_ptr().expose_provenance();
        Self {
            words,
            skip: at.next_multiple_of(64) / 8 - at / 8,
        }
    }

    pub fn addr(&self) -> u64 {
        (self.words.as_ptr().expose_provenance() + self.skip * 8) as u64
    }

    pub fn at(&self, i: usize) -> &AtomicU64 {
        &self.words[self.skip + i]
    }
}

/// The same, of 32-bit words: what is read in that size is written in that size.
pub struct Words32 {
    words: Box<[AtomicU32]>,
    skip: usize,
}

impl Words32 {
    pub fn new(n: usize) -> Self {
        let words: Box<[AtomicU32]> = (0..n + 15).map(|_| AtomicU32::new(0)).collect();
        let at = words.as_ptr().expose_provenance();
        Self {
            words,
            skip: (at.next_multiple_of(64) - at) / 4,
        }
    }

    pub fn addr(&self) -> u64 {
        (self.words.as_ptr().expose_provenance() + self.skip * 4) as u64
    }

    pub fn at(&self, i: usize) -> &AtomicU32 {
        &self.words[self.skip + i]
    }
}

/// One QP, its memory, and how far the engine has come.
pub struct Nic {
    pub shape: Shape,
    qp: Words,
    ext: Words,
    pub ring: Words,
    cq: Words32,
    db: Words,
    record: Words32,
    error: Words,
    rq: Words,
    rq_record: Words32,
    rcq: Words32,
    /// Receives consumed.
    received: AtomicU64,
    /// The region.
    pub memory: Words,
    memory_words: usize,
    /// Completions produced.
    pub completed: AtomicU64,
    /// WQEs executed, by opcode.
    pub executed: AtomicU64,
    /// Rings seen.
    pub rings: AtomicU64,
    /// Executes nothing while set.
    pub paused: AtomicBool,
    stop: AtomicBool,
    /// Writes no error word: what a NIC without it does.
    pub silent: AtomicBool,
    fresh: AtomicU32,
}

impl Nic {
    pub fn new(shape: Shape, memory_words: usize) -> Self {
        let depth = shape.depth as usize;
        let nic = Self {
            shape,
            qp: Words::new(296 / 8, 0),
            ext: Words::new(32, 0),
            ring: Words::new(depth * 8, 0x5a5a_5a5a_5a5a_5a5a),
            cq: Words32::new(depth * 16),
            db: Words::new(8, 0),
            record: Words32::new(1),
            error: Words::new(8, 0),
            rq: Words::new((shape.receives * shape.pieces) as usize * 2, 0),
            rq_record: Words32::new(1),
            rcq: Words32::new(shape.receives as usize * 16),
            received: AtomicU64::new(shape.start),
            memory: Words::new(memory_words, 0),
            memory_words,
            completed: AtomicU64::new(0),
            executed: AtomicU64::new(0),
            rings: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            silent: AtomicBool::new(false),
            fresh: AtomicU32::new(0),
        };
        nic.reset(shape.start);
        nic
    }

    /// Writes the structures as a host library does.
    fn reset(&self, start: u64) {
        let mut qp = GpuQp::new(&QpInit {
            qpn: QPN,
            ring: self.ring.addr(),
            depth: self.shape.depth,
            ring_mem: MemType::Host,
            cq: self.cq.addr(),
            cqn: 0x77,
            cq_mem: MemType::Host,
            cq_kind: self.shape.cq,
            dbrec: self.record.addr(),
            db: self.db.addr(),
            handler: self.shape.handler,
        });
        qp.sq_rsvd_index = start;
        qp.sq_ready_index = start;
        qp.sq_wqe_pi = start;
        qp.cq_sq.cqe_ci = start;
        write(&self.qp, &qp.to_bytes());
        let mut ext = QpExt::new();
        if self.shape.soft {
            ext.flags |= EXT_SOFT_ENGINE;
        }
        ext.host_error = self.error.addr();
        ext.sink_addr = (self.memory_words as u64 - 1) * 8;
        ext.sink_key = KEY.0;
        if self.shape.receives != 0 {
            ext.set_rq(&RqInit {
                ring: self.rq.addr(),
                depth: self.shape.receives,
                stride: 16 * self.shape.pieces,
                dbrec: self.rq_record.addr(),
                cq: self.rcq.addr(),
                cqn: 0x78,
                cq_mem: MemType::Host,
            });
            (ext.rq_pi, ext.rq_ready, ext.rq_ci) = (start, start, start);
            // What a CQ holds that has come so far: CQEs of the lap before.
            let lap = u64::from(self.shape.receives);
            for index in start.saturating_sub(lap)..start {
                self.receive_cqe(
                    index,
                    cqe::recv_chunks(
                        Kind::ResponderSend,
                        qpn(),
                        index as u16,
                        (index / lap) as u8 & 1,
                        0,
                        0,
                    ),
                );
            }
            for slot in start as usize..self.shape.receives as usize {
                self.rcq
                    .at(slot * 16 + 15)
                    .store(CqeTail::initial(1).0, Ordering::Relaxed);
            }
            self.rq_record
                .at(0)
                .store(db::record(start), Ordering::Relaxed);
        }
        write(&self.ext, &ext.to_bytes());
        for i in 0..self.shape.depth as usize {
            self.cq
                .at(i * 16 + 15)
                .store(CqeTail::initial(1).0, Ordering::Relaxed);
        }
        let word = match self.shape.handler {
            NicHandler::ProducerWord => start,
            _ => db::doorbell_word(start, qpn()),
        };
        self.db.at(0).store(word, Ordering::Relaxed);
        self.record
            .at(0)
            .store(db::record(start), Ordering::Relaxed);
    }

    pub fn handle(&self) -> QpHandle {
        QpHandle {
            qp: std::ptr::with_exposed_provenance_mut(self.qp.addr() as usize),
            ext: if self.shape.ext {
                std::ptr::with_exposed_provenance_mut(self.ext.addr() as usize)
            } else {
                std::ptr::null_mut()
            },
        }
    }

    /// Names `other` as the companion of this QP.
    pub fn set_companion(&self, other: &Self) {
        self.ext.at(6).store(other.qp.addr(), Ordering::Relaxed);
        self.ext.at(7).store(other.ext.addr(), Ordering::Relaxed);
    }

    /// An index of the exported structure: 0 reserved, 1 ready, 2 rung, 23 consumed.
    pub fn index(&self, word: usize) -> u64 {
        self.qp.at(word).load(Ordering::Relaxed)
    }

    pub fn set_index(&self, word: usize, value: u64) {
        self.qp.at(word).store(value, Ordering::Relaxed);
    }

    /// `QpExt::state` and `QpExt::error`.
    pub fn ext_state(&self) -> (u32, ErrorWord) {
        (
            self.ext.at(1).load(Ordering::Relaxed) as u32,
            ErrorWord(self.ext.at(2).load(Ordering::Relaxed)),
        )
    }

    pub fn set_ext_version(&self, version: u32) {
        let magic = self.ext.at(0).load(Ordering::Relaxed) & 0xffff_ffff;
        self.ext
            .at(0)
            .store(magic | u64::from(version) << 32, Ordering::Relaxed);
    }

    /// The host's error word.
    pub fn set_error(&self, word: ErrorWord) {
        self.error.at(0).store(word.0, Ordering::Release);
    }

    /// Slot `index` of the ring.
    pub fn slot(&self, index: u64) -> [Chunk; 4] {
        let at = (index & u64::from(self.shape.depth - 1)) as usize * 8;
        std::array::from_fn(|c| {
            Chunk(std::array::from_fn(|w| {
                self.ring.at(at + c * 2 + w).load(Ordering::Relaxed)
            }))
        })
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// What has been rung, in full.
    pub fn rung(&self, seen: u64) -> u64 {
        let word = self.db.at(0).load(Ordering::Acquire);
        match self.shape.handler {
            NicHandler::ProducerWord => word,
            NicHandler::DoorbellOnly | NicHandler::DoorbellRecord => {
                let (pi, number) = db::parse(word);
                assert_eq!(number, qpn(), "the doorbell names another QP");
                if self.shape.handler == NicHandler::DoorbellRecord {
                    // The record is never behind what was rung.
                    let record = db::parse_record(self.record.at(0).load(Ordering::Acquire));
                    let ahead = record.wrapping_sub(pi as u16);
                    assert!(ahead < 0x8000, "record {record} behind doorbell {pi}");
                }
                match db::advance16(pi as u16, seen as u16, self.shape.depth) {
                    Advance::None => seen,
                    Advance::Slots(n) => seen + u64::from(n),
                    Advance::Jump => panic!("doorbell {pi} jumps from {seen}"),
                }
            }
        }
    }

    /// Executes until [`Nic::stop`], starting from where the QP starts.
    pub fn run(&self) {
        self.run_from(self);
    }

    /// The same, with local memory in `home`'s region.
    pub fn run_from(&self, home: &Self) {
        let mut seen = self.shape.start;
        while !self.stop.load(Ordering::Relaxed) {
            if !self.paused.load(Ordering::Relaxed) {
                let before = seen;
                seen = self.execute(seen, home);
                if seen != before {
                    continue;
                }
            }
            std::thread::yield_now();
        }
    }

    /// Executes what has been rung beyond `seen`; returns how far it came.
    pub fn execute(&self, seen: u64, home: &Self) -> u64 {
        let end = self.rung(seen);
        if end == seen {
            return seen;
        }
        assert!(
            end - seen <= u64::from(self.shape.depth),
            "{} slots rung at once",
            end - seen
        );
        self.rings.fetch_add(1, Ordering::Relaxed);
        let mut index = seen;
        while index < end {
            index += self.one(index, home);
        }
        assert_eq!(index, end, "a ring ends inside a WQE");
        end
    }

    /// Executes the WQE at `index`; returns its slots.
    fn one(&self, index: u64, home: &Self) -> u64 {
        let mut slots = self.slot(index).to_vec();
        let ctrl = Ctrl::parse(slots[0]);
        assert!(
            ctrl.matches(index as u16, qpn()),
            "slot of WQE {index:#x} holds {ctrl:x?}"
        );
        let n = u64::from(ctrl.slots());
        for k in 1..n {
            slots.extend(self.slot(index + k));
        }
        let failed = self.fresh.load(Ordering::Relaxed) != 0;
        let request = Request::parse(&slots).unwrap_or_else(|e| panic!("WQE {index:#x}: {e}"));
        let fault = if failed {
            Some((Syndrome::WR_FLUSH, Vendor(0)))
        } else {
            self.act(request, home).err()
        };
        // Consumed: whoever reads this again reads garbage.
        for k in 0..n {
            let at = ((index + k) & u64::from(self.shape.depth - 1)) as usize * 8;
            for w in 0..8 {
                self.ring
                    .at(at + w)
                    .store(0xa5a5_a5a5_a5a5_a5a5, Ordering::Relaxed);
            }
        }
        self.executed.fetch_add(1, Ordering::Relaxed);
        if fault.is_some() || ctrl.signalled() {
            self.complete(index, ctrl, fault);
        } else {
            assert_eq!(
                self.shape.cq,
                CqKind::Collapsed,
                "an unsignalled WQE on a per-slot CQ"
            );
        }
        n
    }

    fn complete(&self, index: u64, ctrl: Ctrl, fault: Option<(Syndrome, Vendor)>) {
        let number = self.completed.fetch_add(1, Ordering::Relaxed);
        let (slot, owner) = match self.shape.cq {
            CqKind::Collapsed => (0, 0),
            CqKind::PerSlot => {
                assert_eq!(
                    number,
                    index - self.shape.start,
                    "CQE and WQE indexes differ"
                );
                let depth = u64::from(self.shape.depth);
                ((index % depth) as usize, (index / depth) as u8 & 1)
            }
        };
        let chunks = match fault {
            None => cqe::ok_chunks(qpn(), ctrl.opcode, index as u16, owner, 0),
            Some((syndrome, vendor)) => {
                if self.fresh.swap(1, Ordering::Relaxed) == 0
                    && !self.silent.load(Ordering::Relaxed)
                {
                    self.set_error(ErrorWord::completion(
                        syndrome.0,
                        vendor.0,
                        ctrl.opcode,
                        index as u16,
                    ));
                }
                cqe::error_chunks(
                    Kind::RequesterError,
                    qpn(),
                    ctrl.opcode,
                    index as u16,
                    owner,
                    syndrome,
                    vendor,
                )
            }
        };
        for (c, chunk) in chunks.into_iter().enumerate() {
            for w in 0..4 {
                self.cq
                    .at(slot * 16 + c * 4 + w)
                    .store(chunk.word(w), Ordering::Release);
            }
        }
    }

    fn word(&self, key: Key, addr: u64) -> Result<&AtomicU64, (Syndrome, Vendor)> {
        if key != KEY || !addr.is_multiple_of(8) || addr / 8 >= self.memory_words as u64 {
            return Err((Syndrome::REMOTE_ACCESS, Vendor(0x89)));
        }
        Ok(self.memory.at(addr as usize / 8))
    }

    fn act(&self, request: Request<'_>, home: &Self) -> Result<(), (Syndrome, Vendor)> {
        let remote_word = |r: Remote| self.word(r.key, r.addr);
        match request {
            Request::Nop => {}
            Request::Write {
                remote,
                local: Payload::Inline(bytes),
                ..
            } => {
                let all: Vec<u8> = bytes.bytes().collect();
                assert!(!all.is_empty());
                for (i, eight) in all.chunks(8).enumerate() {
                    let mut word = [0; 8];
                    word[..eight.len()].copy_from_slice(eight);
                    let to = Remote {
                        addr: remote.addr + i as u64 * 8,
                        ..remote
                    };
                    remote_word(to)?.store(u64::from_le_bytes(word), Ordering::Relaxed);
                }
            }
            Request::Write {
                remote,
                local: Payload::Local(local),
                ..
            } => {
                for i in 0..u64::from(local.len).div_ceil(8) {
                    let v = home
                        .word(local.key, local.addr + i * 8)?
                        .load(Ordering::Relaxed);
                    remote_word(Remote {
                        addr: remote.addr + i * 8,
                        ..remote
                    })?
                    .store(v, Ordering::Relaxed);
                }
            }
            Request::Read {
                remote,
                local: Payload::Local(local),
            } => {
                for i in 0..u64::from(local.len).div_ceil(8) {
                    let v = remote_word(Remote {
                        addr: remote.addr + i * 8,
                        ..remote
                    })?
                    .load(Ordering::Relaxed);
                    home.word(local.key, local.addr + i * 8)?
                        .store(v, Ordering::Relaxed);
                }
            }
            Request::FetchAdd { remote, local, add } => {
                let old = remote_word(remote)?.fetch_add(add, Ordering::Relaxed);
                home.word(local.key, local.addr)?
                    .store(old, Ordering::Relaxed);
            }
            Request::CompareSwap {
                remote,
                local,
                swap,
                compare,
            } => {
                let old = match remote_word(remote)?.compare_exchange(
                    compare,
                    swap,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(v) | Err(v) => v,
                };
                home.word(local.key, local.addr)?
                    .store(old, Ordering::Relaxed);
            }
            Request::Dump { local } => assert_eq!(local.len, 1),
            Request::MaskedCompareSwap { remote, local, .. } => {
                let old = remote_word(remote)?.load(Ordering::Relaxed);
                home.word(local.key, local.addr)?
                    .store(old, Ordering::Relaxed);
            }
            other => panic!("not a WQE of these tests: {other}"),
        }
        Ok(())
    }

    fn receive_cqe(&self, index: u64, chunks: [Chunk; 4]) {
        let slot = (index % u64::from(self.shape.receives)) as usize;
        for (c, chunk) in chunks.into_iter().enumerate() {
            for w in 0..4 {
                self.rcq
                    .at(slot * 16 + c * 4 + w)
                    .store(chunk.word(w), Ordering::Release);
            }
        }
    }

    /// Receives posted and not consumed.
    pub fn waiting(&self) -> u64 {
        let record = db::parse_record(self.rq_record.at(0).load(Ordering::Acquire));
        let waiting = record.wrapping_sub(self.received.load(Ordering::Relaxed) as u16);
        assert!(
            u32::from(waiting) <= self.shape.receives,
            "{waiting} receives posted"
        );
        u64::from(waiting)
    }

    /// A message comes: consumes a receive if there is one, and puts `words` into its memory.
    pub fn arrive(&self, kind: Kind, words: &[u64], imm: u32) -> bool {
        if self.waiting() == 0 {
            return false;
        }
        let index = self.received.fetch_add(1, Ordering::Relaxed);
        let per = u64::from(self.shape.pieces);
        let at = (index % u64::from(self.shape.receives)) * per;
        let mut rest = words.iter();
        for i in at..at + per {
            let chunk = Chunk(std::array::from_fn(|w| {
                self.rq.at(i as usize * 2 + w).load(Ordering::Relaxed)
            }));
            let piece = doorbell_wire::Local::parse(chunk);
            if piece.key == Key(0x100) {
                break;
            }
            assert_ne!(piece.len, 0, "2^31 bytes to some devices");
            if kind == Kind::ResponderWriteImm {
                continue;
            }
            for (i, word) in (0..u64::from(piece.len) / 8).zip(&mut rest) {
                self.word(piece.key, piece.addr + i * 8)
                    .expect("a receive in the region")
                    .store(*word, Ordering::Relaxed);
            }
        }
        if kind != Kind::ResponderWriteImm {
            assert_eq!(rest.next(), None, "the receive is too short");
        }
        let owner = (index / u64::from(self.shape.receives)) as u8 & 1;
        let bytes = words.len() as u32 * 8;
        self.receive_cqe(
            index,
            cqe::recv_chunks(kind, qpn(), index as u16, owner, bytes, imm),
        );
        true
    }

    /// The next receives fail.
    pub fn fail_receives(&self, n: u64, syndrome: Syndrome, vendor: Vendor) {
        for _ in 0..n {
            let index = self.received.fetch_add(1, Ordering::Relaxed);
            let owner = (index / u64::from(self.shape.receives)) as u8 & 1;
            let kind = Kind::ResponderError;
            self.receive_cqe(
                index,
                cqe::error_chunks(kind, qpn(), 0, index as u16, owner, syndrome, vendor),
            );
        }
    }

    /// The engine on a thread of its own while `f` runs; stops it however `f` ends.
    pub fn while_running<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Stop<'a>(&'a Nic);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        std::thread::scope(|s| {
            s.spawn(|| self.run());
            let _stop = Stop(self);
            f()
        })
    }
}

pub fn qpn() -> Qpn {
    Qpn::new(QPN).expect("24 bits")
}

pub fn cqn() -> Cqn {
    Cqn::new(0x77).expect("24 bits")
}

fn write(to: &Words, bytes: &[u8]) {
    for (i, eight) in bytes.chunks_exact(8).enumerate() {
        to.at(i).store(
            u64::from_le_bytes(eight.try_into().expect("eight")),
            Ordering::Relaxed,
        );
    }
}

/// Long enough for any of these tests on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);
