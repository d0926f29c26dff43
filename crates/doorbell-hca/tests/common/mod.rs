//! A mock driver: builds rings by hand, as a GPU would, and looks at what the engine makes of them.
//! Regions have canaries on both sides, so that a test can say that nothing outside was touched.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "a module of each test file, which uses a part of it"
)]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use doorbell_device::layout::{CqKind, ErrorWord, NicHandler};
use doorbell_hca::{
    Access, Addressing, CqConfig, Destination, DoorbellWord, Driver, Hca, HcaConfig, HcaQp,
    Memory as HcaMemory, Mr, MrConfig, OnError, QpConfig, QpState, RqConfig, Shared,
    record::Recording,
};
use doorbell_wire::cqe::{Cqe, CqeTail, ErrorCqe};
use doorbell_wire::{Chunk, Key, Local, Remote, Wqe, db, seg};

pub const PATIENCE: Duration = Duration::from_secs(20);
const CANARY: u8 = 0xc5;
const PAD: usize = 64;

/// 64-byte aligned heap memory, all of it atomics.
#[derive(Clone)]
pub struct Memory(Arc<[Line]>);

#[repr(align(64))]
struct Line([AtomicU64; 8]);

impl Memory {
    pub fn new(bytes: usize) -> Self {
        Self(
            (0..bytes.div_ceil(64).max(1))
                .map(|_| Line(Default::default()))
                .collect(),
        )
    }

    pub fn ptr(&self) -> Shared<u8> {
        Shared::from_ptr(self.0.as_ptr().cast_mut().cast()).expect("not null")
    }

    pub fn keep(&self) -> Arc<dyn std::any::Any + Send + Sync> {
        Arc::new(self.clone())
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len() * 64
    }

    pub fn word(&self, index: usize) -> &AtomicU64 {
        &self.0[index / 8].0[index % 8]
    }

    pub fn get(&self, byte: usize) -> u8 {
        (self.word(byte / 8).load(Ordering::Relaxed) >> (byte % 8 * 8)) as u8
    }

    pub fn set(&self, byte: usize, value: u8) {
        let word = self.word(byte / 8);
        let shift = byte % 8 * 8;
        let old = word.load(Ordering::Relaxed);
        word.store(
            old & !(0xff << shift) | u64::from(value) << shift,
            Ordering::Relaxed,
        );
    }
}

/// A registered region with its canaries.
pub struct Region {
    pub mr: Mr,
    memory: Memory,
    len: usize,
}

impl Region {
    pub fn key(&self) -> Key {
        self.mr.key()
    }

    /// WQE address of byte `offset`.
    pub fn at(&self, offset: u64) -> u64 {
        self.mr.addr() + offset
    }

    pub fn remote(&self, offset: u64) -> Remote {
        Remote {
            addr: self.at(offset),
            key: self.key(),
        }
    }

    pub fn local(&self, offset: u64, len: u32) -> Local {
        Local {
            addr: self.at(offset),
            key: self.key(),
            len,
        }
    }

    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        (0..len)
            .map(|i| self.memory.get(PAD + offset + i))
            .collect()
    }

    pub fn fill(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        for (i, b) in bytes.iter().enumerate() {
            self.memory.set(PAD + offset + i, *b);
        }
    }

    pub fn u64(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.bytes(offset, 8).try_into().expect("eight"))
    }

    pub fn set_u64(&self, offset: usize, value: u64) {
        self.fill(offset, &value.to_le_bytes());
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn canaries_intact(&self) -> bool {
        let end = PAD + self.len;
        (0..PAD)
            .chain(end..end + PAD)
            .all(|i| self.memory.get(i) == CANARY)
    }
}

pub struct Rig {
    pub hca: Hca,
    pub driver: Driver,
    pub pd: u32,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(HcaConfig {
            stale_limit: Duration::from_millis(2),
            // An interpreter is slow: what is patience elsewhere is a blink there.
            rnr_limit: Duration::from_millis(if cfg!(miri) { 3000 } else { 5 }),
            ..HcaConfig::caller_driven()
        })
    }

    pub fn with(config: HcaConfig) -> Self {
        let config = HcaConfig {
            log_regions: if cfg!(miri) {
                6.min(config.log_regions)
            } else {
                config.log_regions
            },
            drop_timeout: PATIENCE,
            // Ten thousand words are nothing, but to an interpreter.
            record: if cfg!(miri) {
                Recording::Off
            } else {
                config.record
            },
            ..config
        };
        let hca = Hca::new(config).expect("hca");
        hca.add_host_doorbells(if cfg!(miri) { 64 } else { 8192 })
            .expect("doorbells");
        let pd = hca.alloc_pd();
        Self {
            driver: hca.driver(),
            hca,
            pd,
        }
    }

    pub fn region(&self, len: usize) -> Region {
        self.region_with(len, Access::ALL, Addressing::Zero, self.pd)
    }

    pub fn region_with(
        &self,
        len: usize,
        access: Access,
        addressing: Addressing,
        pd: u32,
    ) -> Region {
        let memory = Memory::new(len + 2 * PAD);
        for i in (0..PAD).chain(PAD + len..2 * PAD + len) {
            memory.set(i, CANARY);
        }
        let config = MrConfig {
            memory: HcaMemory::Host {
                // SAFETY: inside the memory just made.
                ptr: unsafe { memory.ptr().byte_add(PAD) },
                len,
                keep: memory.keep(),
            },
            access,
            addressing,
            pd,
        };
        // SAFETY: `keep` owns the memory, which is all atomics.
        let mr = unsafe { self.hca.register(config) }.expect("register");
        Region { mr, memory, len }
    }

    pub fn qp(&self) -> MockQp {
        self.qp_with(Options::default())
    }

    pub fn qp_with(&self, options: Options) -> MockQp {
        MockQp::new(self, options, Arc::new(()), Vec::new())
    }

    /// A QP connected to itself.
    pub fn loopback(&self, options: Options) -> MockQp {
        let qp = self.qp_with(options);
        qp.connect_to_self();
        qp
    }

    /// As [`Self::loopback`], and the QP keeps `other` as well as its own memory.
    pub fn loopback_keeping(&self, options: Options, other: Arc<dyn Any + Send + Sync>) -> MockQp {
        let qp = MockQp::new(self, options, other, Vec::new());
        qp.connect_to_self();
        qp
    }

    /// A QP connected to itself that lets kernels go which wait for these signals.
    pub fn releasing(&self, options: Options, signals: Vec<doorbell_hca::Signals>) -> MockQp {
        let qp = MockQp::new(self, options, Arc::new(()), signals);
        qp.connect_to_self();
        qp
    }

    /// Drives the engine until `done` or patience ends.
    pub fn until(&self, mut done: impl FnMut() -> bool) -> bool {
        let deadline = Instant::now() + PATIENCE;
        let mut rounds = 0u64;
        while !done() {
            self.driver.poll();
            rounds += 1;
            if rounds.is_multiple_of(64) {
                if Instant::now() > deadline {
                    return false;
                }
                std::thread::yield_now();
            }
        }
        true
    }
}

#[derive(Clone, Copy)]
pub struct Options {
    pub log_depth: u8,
    pub kind: CqKind,
    pub handler: NicHandler,
    pub on_error: OnError,
    pub receive: bool,
    pub poll_record: bool,
    pub own_word: bool,
    pub pd: Option<u32>,
    pub core: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            log_depth: 4,
            kind: CqKind::Collapsed,
            handler: NicHandler::ProducerWord,
            on_error: OnError::Flush,
            receive: false,
            poll_record: false,
            own_word: false,
            pd: None,
            core: None,
        }
    }
}

pub const RQ_LOG: u8 = 2;
/// Two pieces of memory a receive.
pub const RQ_STRIDE: usize = 32;

pub struct MockQp {
    pub qp: Option<HcaQp>,
    options: Options,
    sq: Memory,
    cq: Memory,
    words: Memory,
    bell: Shared<u64>,
    rq: Memory,
    rcq: Memory,
    pub pi: u64,
    rq_pi: u64,
}

/// Words of the memory `words`.
const RECORD: usize = 8;
const ERROR: usize = 16;
const RQ_RECORD: usize = 24;
pub const OWN_BELL: usize = 32;

impl MockQp {
    fn new(
        rig: &Rig,
        options: Options,
        other: Arc<dyn Any + Send + Sync>,
        signals: Vec<doorbell_hca::Signals>,
    ) -> Self {
        let depth = 1usize << options.log_depth;
        let sq = Memory::new(depth * 64);
        let cq = Memory::new(if options.kind == CqKind::Collapsed {
            64
        } else {
            depth * 64
        });
        let words = Memory::new(64 * 5);
        let rq = Memory::new(RQ_STRIDE << RQ_LOG);
        let rcq = Memory::new(64 << RQ_LOG);
        let at = |word: usize| -> Shared<u64> {
            Shared::from_ptr(words.word(word).as_ptr()).expect("not null")
        };
        let doorbell = if options.own_word {
            DoorbellWord::At(at(OWN_BELL))
        } else {
            DoorbellWord::Slot(
                rig.hca
                    .reserve_doorbell(options.core, None)
                    .expect("free word"),
            )
        };
        let bell = match &doorbell {
            DoorbellWord::Slot(slot) => slot.word(),
            DoorbellWord::At(word) => *word,
        };
        let cqn = rig.hca.alloc_cqn().expect("cqn");
        let rq_config = options.receive.then(|| RqConfig {
            ring: rq.ptr(),
            log_entries: RQ_LOG,
            stride: RQ_STRIDE as u32,
            record: at(RQ_RECORD).cast(),
            cq: CqConfig {
                ring: rcq.ptr(),
                log_entries: RQ_LOG,
                kind: CqKind::PerSlot,
                cqn: rig.hca.alloc_cqn().expect("cqn"),
            },
        });
        let keep = Arc::new((
            sq.clone(),
            cq.clone(),
            words.clone(),
            rcq.clone(),
            rq.clone(),
            other,
        ));
        let config = QpConfig {
            pd: options.pd.unwrap_or(rig.pd),
            sq: sq.ptr(),
            log_depth: options.log_depth,
            cq: CqConfig {
                ring: cq.ptr(),
                log_entries: options.log_depth,
                kind: options.kind,
                cqn,
            },
            handler: options.handler,
            doorbell,
            record: (options.handler == NicHandler::DoorbellRecord).then(|| at(RECORD).cast()),
            poll_record: options.poll_record,
            wait_note: None,
            error_word: Some(at(ERROR)),
            rq: rq_config,
            core: options.core,
            on_error: options.on_error,
            signals,
            keep,
        };
        // SAFETY: `keep` owns all of it, sized as `config` says, and all of it is atomics.
        let qp = unsafe { rig.hca.create_qp(config) }.expect("create");
        Self {
            qp: Some(qp),
            options,
            sq,
            cq,
            words,
            bell,
            rq,
            rcq,
            pi: 0,
            rq_pi: 0,
        }
    }

    pub fn hca_qp(&self) -> &HcaQp {
        self.qp.as_ref().expect("not destroyed")
    }

    /// The QP's own memory: send ring, CQ, and its words (record, error word, doorbell).
    pub fn own_memory(&self) -> [Memory; 3] {
        [self.sq.clone(), self.cq.clone(), self.words.clone()]
    }

    pub fn connect_to_self(&self) {
        self.connect(self);
    }

    pub fn connect(&self, to: &Self) {
        self.hca_qp()
            .connect(Destination::Loopback(to.hca_qp().qpn()), PATIENCE)
            .expect("connect");
    }

    pub fn reset(&mut self) {
        self.hca_qp().reset(PATIENCE).expect("reset");
        self.pi = 0;
        self.rq_pi = 0;
    }

    pub fn depth(&self) -> u64 {
        1 << self.options.log_depth
    }

    /// Writes chunks at the producer index; returns the WQE's index.
    pub fn post_chunks(&mut self, chunks: &[Chunk], slots: u64) -> u64 {
        let at = self.pi;
        for (i, chunk) in chunks.iter().enumerate() {
            self.write_chunk(at, i, *chunk);
        }
        self.pi += slots;
        at
    }

    pub fn write_chunk(&self, at: u64, i: usize, chunk: Chunk) {
        let slot = (at + i as u64 / 4) & (self.depth() - 1);
        let word = slot as usize * 8 + i % 4 * 2;
        self.sq.word(word).store(chunk.0[0], Ordering::Relaxed);
        self.sq.word(word + 1).store(chunk.0[1], Ordering::Relaxed);
    }

    pub fn post(&mut self, wqe: &Wqe) -> u64 {
        let chunks = wqe.emit(self.pi as u16, self.hca_qp().qpn());
        self.post_chunks(&chunks[..usize::from(wqe.ds())], u64::from(wqe.slots()))
    }

    /// Posts signalled and rings; returns the index.
    pub fn go(&mut self, wqe: Wqe) -> u64 {
        let at = self.post(&wqe.signalled(true));
        self.ring();
        at
    }

    pub fn ring(&self) {
        self.ring_value(self.pi);
    }

    pub fn ring_value(&self, pi: u64) {
        fence(Ordering::Release);
        if self.options.handler == NicHandler::DoorbellRecord {
            self.store_record(RECORD, db::record(pi));
        }
        if self.options.poll_record {
            return;
        }
        let word = match self.options.handler {
            NicHandler::ProducerWord => pi,
            _ => db::doorbell_word(pi, self.hca_qp().qpn()),
        };
        self.ring_raw(word);
    }

    /// A record is a word of 32 bits.
    fn store_record(&self, word: usize, record: u32) {
        let at = Shared::from_ptr(self.words.word(word).as_ptr().cast::<u32>());
        // SAFETY: inside `words`, and always accessed as 32 bits.
        unsafe { at.expect("not null").store_release(record) };
    }

    pub fn ring_raw(&self, word: u64) {
        // SAFETY: the word lives as long as the QP (or this mock's memory).
        unsafe { self.bell.store_release(word) };
    }

    pub fn cqe(&self, at: u64) -> [Chunk; 4] {
        let slot = if self.options.kind == CqKind::Collapsed {
            0
        } else {
            at & (self.depth() - 1)
        };
        let base = slot as usize * 8;
        let tail = self.cq.word(base + 7).load(Ordering::Acquire);
        core::array::from_fn(|i| {
            let second = if i == 3 {
                tail
            } else {
                self.cq.word(base + 2 * i + 1).load(Ordering::Relaxed)
            };
            Chunk([self.cq.word(base + 2 * i).load(Ordering::Relaxed), second])
        })
    }

    /// The CQE of WQE `at` if it is complete.
    pub fn completion(&self, at: u64) -> Option<[Chunk; 4]> {
        let cqe = self.cqe(at);
        let tail = CqeTail::of(cqe[3]);
        if tail.is_invalid() {
            return None;
        }
        let here = if self.options.kind == CqKind::Collapsed {
            // As device code does: not behind, in 16 bits.
            tail.wqe_counter().wrapping_sub(at as u16) < 0x8000
        } else {
            tail.owner() == (at >> self.options.log_depth) as u8 & 1
        };
        here.then_some(cqe)
    }

    /// Drives until WQE `at` is complete; panics on an error CQE.
    pub fn wait(&self, rig: &Rig, at: u64) -> Cqe {
        let cqe = self.wait_any(rig, at);
        let tail = CqeTail::of(cqe[3]);
        assert!(!tail.is_error(), "WQE {at}: {:?}", ErrorCqe::parse(&cqe));
        Cqe::parse(&cqe)
    }

    /// Drives until there is a CQE for `at`, of whatever kind.
    pub fn wait_any(&self, rig: &Rig, at: u64) -> [Chunk; 4] {
        assert!(
            rig.until(|| self.completion(at).is_some()),
            "no CQE for WQE {at}: {:?}",
            self.hca_qp().counters()
        );
        self.completion(at).expect("just seen")
    }

    /// Posts signalled, rings, waits.
    pub fn run(&mut self, rig: &Rig, wqe: Wqe) -> Cqe {
        let at = self.go(wqe);
        self.wait(rig, at)
    }

    pub fn error_word(&self) -> ErrorWord {
        ErrorWord(self.words.word(ERROR).load(Ordering::Acquire))
    }

    pub fn state(&self) -> QpState {
        self.hca_qp().state()
    }

    /// Posts `n` receives.
    pub fn post_receives(&mut self, n: u64) {
        self.rq_pi += n;
        self.store_record(RQ_RECORD, db::record(self.rq_pi));
    }

    /// Posts a receive into `pieces`, two at most.
    pub fn post_receive(&mut self, pieces: &[Local]) -> u64 {
        let at = self.rq_pi;
        let slot = (at & ((1 << RQ_LOG) - 1)) as usize * RQ_STRIDE / 8;
        let end = Local {
            addr: 0,
            key: Key(0x100),
            len: 0,
        };
        for i in 0..RQ_STRIDE / 16 {
            let piece = pieces.get(i).unwrap_or(&end);
            let chunk = seg::data(piece.len, piece.key, piece.addr);
            let word = slot + 2 * i;
            self.rq.word(word).store(chunk.0[0], Ordering::Relaxed);
            self.rq.word(word + 1).store(chunk.0[1], Ordering::Relaxed);
        }
        self.post_receives(1);
        at
    }

    /// Stores a receive record that need not be what was posted.
    pub fn lie_about_receives(&self, record: u32) {
        self.store_record(RQ_RECORD, record);
    }

    /// The error CQE of receive `at`, if that is what is there.
    pub fn receive_error(&self, at: u64) -> Option<ErrorCqe> {
        let base = (at & ((1 << RQ_LOG) - 1)) as usize * 8;
        let last = self.rcq.word(base + 7).load(Ordering::Acquire);
        let chunk = Chunk([self.rcq.word(base + 6).load(Ordering::Relaxed), last]);
        let cqe = ErrorCqe::parse_last(chunk)?;
        (cqe.tail.owner() == (at >> RQ_LOG) as u8 & 1).then_some(cqe)
    }

    /// The receive CQE number `at`, if it is there.
    pub fn received(&self, at: u64) -> Option<Cqe> {
        let base = (at & ((1 << RQ_LOG) - 1)) as usize * 8;
        let last = self.rcq.word(base + 7).load(Ordering::Acquire);
        let chunks = core::array::from_fn(|i| {
            let second = if i == 3 {
                last
            } else {
                self.rcq.word(base + 2 * i + 1).load(Ordering::Relaxed)
            };
            Chunk([self.rcq.word(base + 2 * i).load(Ordering::Relaxed), second])
        });
        let cqe = Cqe::parse(&chunks);
        (!cqe.tail.is_invalid() && cqe.tail.owner() == (at >> RQ_LOG) as u8 & 1).then_some(cqe)
    }
}

/// The seed of this run: `DOORBELL_SEED` or a random one; print it in every failure.
pub fn seed() -> u64 {
    match std::env::var("DOORBELL_SEED") {
        Ok(text) => {
            let text = text.trim();
            let parsed = match text.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16),
                None => text.parse(),
            };
            parsed.unwrap_or_else(|e| panic!("DOORBELL_SEED is {text:?}: {e}"))
        }
        Err(_) => rand::random(),
    }
}

/// Prints how to replay when the test fails.
pub struct Replay(pub u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with DOORBELL_SEED={:#x}", self.0);
        }
    }
}
