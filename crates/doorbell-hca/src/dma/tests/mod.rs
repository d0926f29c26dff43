//! The pipeline against the mock engine: bytes, atomics; order in `order.rs`, failures in `faults.rs`.

use std::{
    collections::{BTreeMap, VecDeque},
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use doorbell_wire::Width;
use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};

use super::{
    mock::{Mock, MockMemory},
    *,
};
use crate::{mem::Place, raw::Shared};

mod faults;
mod order;

const DEVICE: usize = 1 << 20;

/// Atomics of each of two cores.
const ATOMICS: u32 = if cfg!(miri) { 8 } else { 100 };

/// Bytes of large copies: more than all large buffers together, but an interpreter has no time.
const HUGE: usize = if cfg!(miri) { 9000 } else { 700_000 };

/// A job as it was reported.
type Reported = (u64, Result<(), Arc<DmaFailure>>);

/// A core with what it reported, and a clock of its own.
struct Rig {
    core: DmaCore,
    now: Instant,
    /// The time from one poll to the next, in the pipeline's eyes.
    step: Duration,
    completed: BTreeMap<u32, VecDeque<Reported>>,
    retired: [usize; 2],
    next: u64,
}

impl Rig {
    fn new(config: DmaConfig) -> Self {
        let core = DmaCore::new(config);
        Self {
            core,
            now: Instant::now(),
            step: Duration::ZERO,
            completed: BTreeMap::new(),
            retired: [0; 2],
            next: 0,
        }
    }

    fn start(&mut self, qp: u32, work: Work) -> u64 {
        let cookie = self.next;
        self.next += 1;
        self.core.start(
            Job {
                qp,
                cookie,
                hold: cookie % 2 == 1,
                work,
            },
            self.now,
        );
        cookie
    }

    fn poll(&mut self) {
        self.now += self.step;
        let (completed, retired) = (&mut self.completed, &mut self.retired);
        self.core.poll(self.now, |event| match event {
            Event::Completed {
                qp, cookie, result, ..
            } => completed.entry(qp).or_default().push_back((cookie, result)),
            Event::Retired { hold } => retired[usize::from(hold)] += 1,
        });
    }

    /// Polls until everything is reported. Other tests of this process may hold the locks of the same words meanwhile.
    fn drain(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.core.is_idle() {
            assert!(
                Instant::now() < deadline,
                "the pipeline does not come to an end"
            );
            for _ in 0..100 {
                self.poll();
            }
            std::thread::yield_now();
        }
    }

    /// The jobs reported for a QP so far, all of them good.
    fn good(&mut self, qp: u32) -> Vec<u64> {
        let all = self.completed.remove(&qp).unwrap_or_default();
        all.into_iter()
            .map(|(cookie, result)| result.map(|()| cookie).unwrap())
            .collect()
    }
}

fn device(dma: &Arc<Mock>, addr: u64) -> Place {
    Place::Device {
        addr,
        dma: dma.clone() as Arc<dyn Dma>,
    }
}

fn host(bytes: &mut [u8]) -> Place {
    let ptr = bytes.as_mut_ptr();
    // The mock and staging reach it by address.
    ptr.expose_provenance();
    Place::Host(Shared::from_ptr(ptr).unwrap())
}

/// A later byte of the same host memory.
fn offset(place: &Place, bytes: usize) -> Place {
    let Place::Host(ptr) = place else {
        panic!("host memory")
    };
    // SAFETY: the tests stay inside their arrays.
    Place::Host(unsafe { ptr.byte_add(bytes) })
}

fn copy(src: Place, dst: Place, len: usize) -> Work {
    piece(Source::Place(src), dst, len, false)
}

fn inline(bytes: &[u8], dst: Place) -> Work {
    piece(Source::Inline(bytes.into()), dst, bytes.len(), true)
}

fn piece(src: Source, dst: Place, len: usize, signal: bool) -> Work {
    Work::Copy {
        pieces: Pieces::One(Piece {
            src,
            dst,
            len: len as u64,
        }),
        signal,
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// Every kind of engine that the pipeline treats differently.
fn engines(memory: &Arc<MockMemory>, seed: u64) -> Vec<Arc<Mock>> {
    let build = |change: fn(&mut Mock)| {
        let mut mock = Mock::build(memory, 0, seed);
        change(&mut mock);
        Arc::new(mock)
    };
    vec![
        build(|_| ()),
        build(|m| m.ordered = false),
        build(|m| m.pinned = false),
        build(|m| (m.ordered, m.pinned, m.latency) = (false, false, 20)),
        build(|m| m.max_batch = 1),
    ]
}

#[test]
fn bytes_arrive_whichever_way_they_go() {
    let memory = MockMemory::new(DEVICE);
    for dma in engines(&memory, 1) {
        // Larger than all large buffers together, odd, small, and one byte.
        let lens = [1, 8, 4097, HUGE / 2, HUGE];
        for len in lens.into_iter().skip(if cfg!(miri) { 3 } else { 0 }) {
            let mut rig = Rig::new(DmaConfig::default());
            let (mut there, mut back) = (pattern(len as u64, len), vec![0; len]);
            let (a, b) = (memory.addr(0, 3), memory.addr(0, 3 + len.min(HUGE / 2)));
            let len_b = len.min(HUGE / 2);
            rig.start(7, copy(host(&mut there), device(&dma, a), len));
            rig.start(7, copy(device(&dma, a), device(&dma, b), len_b.min(len)));
            rig.drain();
            assert_eq!(rig.good(7), [0, 1]);
            rig.start(7, copy(device(&dma, b), host(&mut back), len_b));
            rig.drain();
            assert_eq!(rig.good(7), [2]);
            assert_eq!(back[..len_b], there[..len_b]);
            assert_eq!(rig.retired, [2, 1]);
        }
        let mut rig = Rig::new(DmaConfig::default());
        rig.start(1, inline(&[9; 1008], device(&dma, memory.addr(0, 0))));
        rig.drain();
        assert_eq!(memory.read(memory.addr(0, 0), 1008), [9; 1008]);
        assert!(rig.core.engines_idle());
    }
}

#[test]
fn a_gather_list_of_every_kind_of_piece_is_one_job() {
    let memory = MockMemory::new(DEVICE);
    for dma in engines(&memory, 2) {
        let mut rig = Rig::new(DmaConfig::default());
        let (mut from, mut to) = (pattern(5, 100), vec![0u8; 50]);
        memory.write(memory.addr(0, 5000), &pattern(6, 50));
        let pieces = Pieces::Many(vec![
            Piece {
                src: Source::Place(host(&mut from)),
                dst: device(&dma, memory.addr(0, 0)),
                len: 100,
            },
            Piece {
                src: Source::Inline([3; 12].into()),
                dst: device(&dma, memory.addr(0, 100)),
                len: 12,
            },
            Piece {
                src: Source::Place(device(&dma, memory.addr(0, 5000))),
                dst: host(&mut to),
                len: 50,
            },
            Piece {
                src: Source::Place(device(&dma, memory.addr(0, 5000))),
                dst: device(&dma, memory.addr(0, 112)),
                len: 50,
            },
        ]);
        rig.start(
            1,
            Work::Copy {
                pieces,
                signal: false,
            },
        );
        rig.drain();
        assert_eq!(rig.good(1), [0]);
        let wanted = [&from[..], &[3; 12], &pattern(6, 50)].concat();
        assert_eq!(memory.read(memory.addr(0, 0), 162), wanted);
        assert_eq!(to, pattern(6, 50));
    }
}

#[test]
fn two_devices_are_bridged_or_joined() {
    let memory = MockMemory::new(DEVICE);
    for ordered in [true, false] {
        for peers in [false, true] {
            let engine = |device: u64, other: u64| {
                let mut mock = Mock::build(&memory, device, 5);
                mock.ordered = ordered;
                mock.peers = if peers { vec![other] } else { vec![] };
                Arc::new(mock)
            };
            let (a, b) = (engine(0, 1), engine(1, 0));
            let mut rig = Rig::new(DmaConfig::default());
            let bytes = pattern(1, HUGE);
            memory.write(memory.addr(0, 0), &bytes);
            rig.start(
                1,
                copy(
                    device(&a, memory.addr(0, 0)),
                    device(&b, memory.addr(1, 7)),
                    bytes.len(),
                ),
            );
            rig.start(
                1,
                copy(
                    device(&b, memory.addr(1, 7)),
                    device(&a, memory.addr(0, 100)),
                    HUGE / 2,
                ),
            );
            rig.drain();
            assert_eq!(rig.good(1), [0, 1]);
            assert_eq!(memory.read(memory.addr(1, 7), bytes.len()), bytes);
            assert_eq!(
                memory.read(memory.addr(0, 100), HUGE / 2),
                bytes[..HUGE / 2]
            );
            assert_eq!(rig.core.counters().bounced > 0, !peers);
        }
    }
}

fn add(dma: &Arc<Mock>, addr: u64, by: u64, width: Width, sink: Place) -> Work {
    Work::Atomic {
        addr,
        dma: dma.clone(),
        width,
        new: Box::new(move |old| old.wrapping_add(by)),
        sink: Some(sink),
    }
}

#[test]
fn atomics_of_several_cores_and_qps_lose_nothing() {
    let memory = MockMemory::new(DEVICE);
    for dma in engines(&memory, 6) {
        memory.bytes().fill(0);
        let word = memory.addr(0, 4096);
        let mut rigs = [
            Rig::new(DmaConfig::default()),
            Rig::new(DmaConfig::default()),
        ];
        let all = 2 * u64::from(ATOMICS);
        let mut sinks = vec![[0u8; 8]; all as usize];
        let mut next = sinks.iter_mut();
        for rig in &mut rigs {
            for i in 0..ATOMICS {
                rig.start(
                    i % 4,
                    add(&dma, word, 1, Width::Eight, host(next.next().unwrap())),
                );
            }
        }
        for _ in 0..20_000 {
            rigs.iter_mut().for_each(Rig::poll);
            if rigs.iter().all(|rig| rig.core.is_idle()) {
                break;
            }
        }
        assert!(rigs.iter().all(|rig| rig.core.is_idle()));
        assert_eq!(memory.word(word), all);
        let mut old: Vec<u64> = sinks
            .iter()
            .map(|bytes| u64::from_ne_bytes(*bytes))
            .collect();
        old.sort_unstable();
        assert_eq!(
            old,
            (0..all).collect::<Vec<_>>(),
            "every value was fetched once"
        );
    }
}

#[test]
fn atomics_have_their_width_and_their_sink() {
    let memory = MockMemory::new(DEVICE);
    for dma in engines(&memory, 7) {
        let mut rig = Rig::new(DmaConfig::default());
        let word = memory.addr(0, 16);
        memory.write(word, &[0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4]);
        let sink = memory.addr(0, 128);
        memory.write(sink, &[0; 8]);
        // 4 bytes: the neighbour stays, the old value is big-endian.
        rig.start(1, add(&dma, word, 2, Width::Four, device(&dma, sink)));
        rig.drain();
        assert_eq!(memory.read(word, 8), [1, 0, 0, 0, 1, 2, 3, 4]);
        memory.write(memory.addr(0, 24), &7u64.to_le_bytes());
        assert_eq!(memory.read(sink, 8), [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        // A comparison that fails writes nothing: one copy, not two.
        let before = dma.counts().1;
        let mut old = [0u8; 8];
        let swap = Box::new(|old| if old == 8 { 9 } else { old });
        let (addr, sink) = (memory.addr(0, 24), host(&mut old));
        rig.start(
            1,
            Work::Atomic {
                addr,
                dma: dma.clone(),
                width: Width::Eight,
                new: swap,
                sink: Some(sink),
            },
        );
        rig.drain();
        assert_eq!((memory.word(addr), u64::from_ne_bytes(old)), (7, 7));
        assert_eq!(dma.counts().1, before + 1);
        // After a put, in order.
        rig.start(1, inline(&100u64.to_le_bytes(), device(&dma, addr)));
        rig.start(1, add(&dma, addr, 1, Width::Eight, host(&mut old)));
        rig.drain();
        assert_eq!((memory.word(addr), u64::from_ne_bytes(old)), (101, 100));
        assert_eq!(rig.good(1).len(), 4);
    }
}

/// An engine whose device memory the CPU can map.
struct Mapped {
    inner: Arc<Mock>,
    memory: Arc<MockMemory>,
}

impl Dma for Mapped {
    fn submit(&self, ops: &[DmaOp], steps: &[usize]) -> Result<u64, String> {
        self.inner.submit(ops, steps)
    }
    fn poll(&self, ticket: u64) -> Result<bool, String> {
        self.inner.poll(ticket)
    }
    fn ordered(&self) -> bool {
        true
    }
    fn device(&self) -> Option<u64> {
        Some(0)
    }
    fn cpu_map(&self, addr: u64, _len: u64) -> Option<NonNull<u8>> {
        let offset = (addr - self.memory.addr(0, 0)) as usize;
        NonNull::new(self.memory.bytes()[offset..].as_mut_ptr())
    }
}

#[test]
fn small_copies_use_a_mapping_of_device_memory_in_their_turn() {
    let memory = MockMemory::new(DEVICE);
    let mock = Mock::new(&memory, 8);
    let dma: Arc<dyn Dma> = Arc::new(Mapped {
        inner: mock.clone(),
        memory: memory.clone(),
    });
    let mut rig = Rig::new(DmaConfig::default());
    let place = |offset| Place::Device {
        addr: memory.addr(0, offset),
        dma: dma.clone(),
    };
    let (mut large, mut small, mut old) = (pattern(1, 10_000), pattern(2, 64), [0u8; 8]);
    rig.start(1, copy(host(&mut large), place(0), 10_000));
    rig.start(1, copy(host(&mut small), place(5_000), 64));
    rig.start(1, inline(&[7; 8], place(200_000)));
    let word = memory.addr(0, 200_000);
    let new = Box::new(|old: u64| old + 1);
    rig.start(
        1,
        Work::Atomic {
            addr: word,
            dma: dma.clone(),
            width: Width::Eight,
            new,
            sink: Some(host(&mut old)),
        },
    );
    rig.poll();
    assert_eq!(
        memory.word(word),
        0,
        "the small ones wait for the large one before them"
    );
    rig.drain();
    assert_eq!(rig.good(1), [0, 1, 2, 3]);
    assert_eq!(memory.read(memory.addr(0, 0), 5_000), large[..5_000]);
    assert_eq!(memory.read(memory.addr(0, 5_000), 64), small);
    assert_eq!((memory.word(word), old), (0x0707_0707_0707_0708, [7; 8]));
    assert_eq!(mock.counts().1, 1, "only the large one used the engine");
    assert_eq!(rig.core.counters().mapped, 3);
}
