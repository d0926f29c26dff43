//! What becomes visible when, under engines that copy in any order the contract allows.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

const SEEDS: u64 = if cfg!(miri) { 1 } else { 8 };

/// Random jobs of several QPs. In device memory each QP fills a row of words, one per job, in order; at no moment may a
/// later word be there while an earlier one is not.
fn rows(order: WriteOrder, seed: u64) {
    const QPS: usize = 5;
    const JOBS: usize = if cfg!(miri) { 12 } else { 120 };
    const WORDS: usize = 128;
    let memory = MockMemory::new(DEVICE);
    let kinds = if cfg!(miri) { 2 } else { usize::MAX };
    for dma in engines(&memory, seed).into_iter().take(kinds) {
        memory.bytes().fill(0);
        let mut random = StdRng::seed_from_u64(seed);
        // 0: payload, 1: signal; decided beforehand so that the watcher knows.
        let signals: Vec<Vec<bool>> = (0..QPS)
            .map(|_| (0..JOBS).map(|_| random.random_bool(0.3)).collect())
            .collect();
        memory.watch({
            let signals = signals.clone();
            move |bytes| {
                for (qp, signals) in signals.iter().enumerate() {
                    let there = |i: usize| bytes[(qp * WORDS + i) * 8] != 0;
                    for last in (0..JOBS).filter(|&i| there(i)) {
                        let strict = order == WriteOrder::Strict || signals[last];
                        // What is strict comes after everything; what is not still comes after the last signal before it.
                        let before = if strict {
                            last
                        } else {
                            signals[..last]
                                .iter()
                                .rposition(|&s| s)
                                .map_or(0, |s| s + 1)
                        };
                        for first in 0..before {
                            assert!(
                                there(first),
                                "word {last} of QP {qp} before word {first} ({order:?})"
                            );
                        }
                    }
                }
            }
        });
        let mut rig = Rig::new(DmaConfig {
            order,
            ..DmaConfig::default()
        });
        // Words of the host: sources are all alike, sinks are not looked at.
        let (mut sources, mut sinks) = ([0xabu8; 8], [0u8; 8]);
        let (here, sink) = (host(&mut sources), host(&mut sinks));
        memory.write(memory.addr(0, 900_000), &[0xab; 8]);
        for job in 0..JOBS {
            for (qp, signals) in signals.iter().enumerate() {
                let dst = device(&dma, memory.addr(0, (qp * WORDS + job) * 8));
                let work = match (signals[job], random.random_range(0..2)) {
                    (true, 0) => inline(&[0xab; 8], dst),
                    // Engines before this one left the words zero.
                    (true, _) => {
                        let Place::Device { addr, .. } = dst else {
                            unreachable!()
                        };
                        add(
                            &dma,
                            addr,
                            0xabab_abab_abab_abab,
                            Width::Eight,
                            sink.clone(),
                        )
                    }
                    (false, 0) => copy(device(&dma, memory.addr(0, 900_000)), dst, 8),
                    (false, _) => copy(here.clone(), dst, 8),
                };
                rig.start(qp as u32, work);
            }
            if random.random_bool(0.2) {
                rig.poll();
            }
            // A completion is a promise: the bytes are there.
            for (&qp, done) in &rig.completed {
                for i in 0..done.len() {
                    assert_eq!(
                        memory.word(memory.addr(0, (qp as usize * WORDS + i) * 8)),
                        0xabab_abab_abab_abab
                    );
                }
            }
        }
        rig.drain();
        for qp in 0..QPS {
            let wanted: Vec<u64> = (0..JOBS).map(|job| (job * QPS + qp) as u64).collect();
            assert_eq!(rig.good(qp as u32), wanted);
        }
        assert_eq!(rig.retired.iter().sum::<usize>(), QPS * JOBS);
    }
}

#[test]
fn work_requests_of_a_qp_become_visible_in_order() {
    (0..SEEDS).for_each(|seed| rows(WriteOrder::Strict, seed));
}

#[test]
fn relaxed_writes_may_pass_each_other_but_never_a_signal() {
    (0..SEEDS).for_each(|seed| rows(WriteOrder::Relaxed, seed));
}

#[test]
fn relaxed_writes_to_the_same_bytes_keep_their_order() {
    let memory = MockMemory::new(DEVICE);
    for seed in 0..SEEDS {
        let dma = Mock::new(&memory, seed);
        let mut rig = Rig::new(DmaConfig {
            order: WriteOrder::Relaxed,
            ..DmaConfig::default()
        });
        let mut sources: Vec<[u8; 8]> = (1..=50u8).map(|i| [i; 8]).collect();
        for source in &mut sources {
            rig.start(1, copy(host(source), device(&dma, memory.addr(0, 64)), 8));
        }
        rig.drain();
        assert_eq!(memory.word(memory.addr(0, 64)), 0x3232_3232_3232_3232);
    }
}

#[test]
fn an_ordered_engine_is_fed_ahead_and_relaxed_writes_share_batches() {
    let memory = MockMemory::new(DEVICE);
    let batches = |order| {
        let dma = Mock::new(&memory, 3);
        let mut rig = Rig::new(DmaConfig {
            order,
            ..DmaConfig::default()
        });
        let mut source = [1u8; 4096];
        let source = host(&mut source);
        for i in 0..256 {
            rig.start(
                1,
                copy(
                    offset(&source, i * 8),
                    device(&dma, memory.addr(0, i * 8)),
                    8,
                ),
            );
        }
        rig.drain();
        dma.counts()
    };
    assert_eq!(
        batches(WriteOrder::Strict),
        (1, 256),
        "each a step of its own, all of one submission"
    );
    assert_eq!(batches(WriteOrder::Relaxed), (1, 256));
    // Many QPs share batches in any case.
    let dma = Mock::new(&memory, 3);
    let mut rig = Rig::new(DmaConfig::default());
    let mut source = [1u8; 4096];
    let source = host(&mut source);
    for i in 0..256usize {
        rig.start(
            i as u32,
            copy(
                offset(&source, i * 8),
                device(&dma, memory.addr(0, i * 8)),
                8,
            ),
        );
    }
    rig.drain();
    assert_eq!(dma.counts(), (1, 256));
}

/// What many signals in a row cost: submissions, each of which a GPU that is busy with another process may take milliseconds for.
#[test]
fn signals_that_wait_go_together() {
    const SIGNALS: usize = if cfg!(miri) { 12 } else { 600 };
    let memory = MockMemory::new(DEVICE);
    let signal = |dma: &Arc<Mock>, i: usize| inline(&[1; 8], device(dma, memory.addr(0, i * 8)));
    // They come faster than copies end: the first few go at once, one by one, and the rest when one of those has ended.
    let dma = Mock::new(&memory, 3);
    dma.stall(true);
    let mut rig = Rig::new(DmaConfig::default());
    for i in 0..SIGNALS {
        rig.start(1, signal(&dma, i));
        rig.poll();
    }
    assert_eq!(
        dma.counts(),
        (4 + (SIGNALS / 256) as u64, 4 + (SIGNALS / 256 * 256) as u64)
    );
    dma.stall(false);
    rig.drain();
    let least = 4 + SIGNALS.div_ceil(256) as u64;
    assert!(
        (least - 1..=least + 1).contains(&dma.counts().0),
        "{:?}",
        dma.counts()
    );
    assert_eq!(dma.counts().1, SIGNALS as u64);
    assert_eq!(rig.good(1).len(), SIGNALS);
    // Of an engine that promises no order each waits for the one before.
    let mut mock = Mock::build(&memory, 0, 3);
    mock.ordered = false;
    let dma = Arc::new(mock);
    let mut rig = Rig::new(DmaConfig::default());
    for i in 0..SIGNALS {
        rig.start(1, signal(&dma, i));
    }
    rig.drain();
    assert_eq!(dma.counts(), (SIGNALS as u64, SIGNALS as u64));
}

#[test]
fn full_batches_do_not_wait_for_each_other() {
    const LEN: usize = 64 << 10;
    let memory = MockMemory::new(DEVICE);
    let dma = Mock::new(&memory, 3);
    dma.stall(true);
    let mut rig = Rig::new(DmaConfig::default());
    let mut source = vec![1u8; LEN];
    let source = host(&mut source);
    let write = |rig: &mut Rig, i: u32, len: usize| {
        rig.start(
            i,
            copy(source.clone(), device(&dma, memory.addr(0, 0)), len),
        );
        rig.start(
            i,
            copy(source.clone(), device(&dma, memory.addr(0, 0)), len),
        );
        rig.poll();
    };
    // Two copies to the same bytes are two steps, and together large enough for a submission.
    (0..20).for_each(|i| write(&mut rig, i, LEN));
    assert_eq!(dma.counts(), (16, 32), "as many as may be under way");
    dma.stall(false);
    rig.drain();
    assert_eq!(dma.counts().1, 40);
}

#[test]
fn what_the_cpu_reads_early_has_been_written() {
    let memory = MockMemory::new(DEVICE);
    let mut mock = Mock::build(&memory, 0, 1);
    mock.pinned_len = 64;
    let dma = Arc::new(mock);
    let mut rig = Rig::new(DmaConfig::default());
    let mut buffer = vec![0u8; 128];
    memory.write(memory.addr(0, 0), &[7; 64]);
    let all = host(&mut buffer);
    // The first goes straight into the buffer, the second is filled from it by the CPU.
    rig.start(1, copy(device(&dma, memory.addr(0, 0)), all.clone(), 64));
    rig.start(1, copy(all, device(&dma, memory.addr(0, 4096)), 128));
    rig.drain();
    assert_eq!(memory.read(memory.addr(0, 4096), 64), [7; 64]);
}

/// A word of host memory that grows by one, as a signal does.
fn count(word: &AtomicU64) -> Work {
    Work::Word(Word {
        at: Shared::from_ptr(word.as_ptr().cast()).unwrap(),
        width: Width::Eight,
        sink: None,
        new: Box::new(|old| old + 1),
    })
}

/// A word of the host that outlives what watches it.
fn word() -> &'static AtomicU64 {
    let word: &'static AtomicU64 = Box::leak(Box::default());
    word.as_ptr().expose_provenance();
    word
}

/// `puts` copies to the device, each with a signal behind it; how many batches and copies that took.
fn signalled(
    dma: &Arc<Mock>,
    memory: &Arc<MockMemory>,
    order: WriteOrder,
    puts: usize,
) -> (u64, u64) {
    let signal = word();
    memory.bytes().fill(0);
    let there = move |bytes: &[u8]| (0..puts).take_while(|i| bytes[8 * i] != 0).count() as u64;
    memory.watch(move |bytes| {
        let seen = signal.load(Ordering::Acquire);
        assert!(seen <= there(bytes), "signal {seen} overtook its data");
    });
    let mut rig = Rig::new(DmaConfig {
        order,
        ..DmaConfig::default()
    });
    let mut source = [1u8; 8];
    let source = host(&mut source);
    for i in 0..puts {
        rig.start(
            1,
            copy(source.clone(), device(dma, memory.addr(0, 8 * i)), 8),
        );
        rig.start(1, count(signal));
        let seen = signal.load(Ordering::Acquire);
        assert!(
            seen <= there(&memory.bytes()),
            "signal {seen} overtook its data"
        );
    }
    rig.drain();
    assert_eq!(signal.load(Ordering::Acquire), puts as u64);
    let all: Vec<u64> = (0..2 * puts as u64).collect();
    assert_eq!(rig.good(1), all, "completions come in order");
    dma.counts()
}

#[test]
fn a_signal_follows_its_data_and_holds_up_nothing_behind_it() {
    const PUTS: usize = if cfg!(miri) { 8 } else { 256 };
    let memory = MockMemory::new(DEVICE);
    for seed in 0..SEEDS {
        for dma in engines(&memory, seed) {
            signalled(&dma, &memory, WriteOrder::Relaxed, PUTS);
            let mut strict = Mock::build(&memory, 0, seed);
            strict.ordered = dma.ordered;
            let (batches, _) = signalled(&Arc::new(strict), &memory, WriteOrder::Strict, PUTS);
            assert_eq!(batches, PUTS as u64, "strict order is a batch each");
        }
    }
    let counts = |max_batch| {
        let mut dma = Mock::build(&memory, 0, 1);
        dma.max_batch = max_batch;
        signalled(&Arc::new(dma), &memory, WriteOrder::Relaxed, PUTS)
    };
    assert_eq!(counts(256), (1, PUTS as u64));
    assert_eq!(counts(PUTS / 4), (4, PUTS as u64));
}

#[test]
fn what_touches_a_signal_or_is_one_waits_for_it() {
    let memory = MockMemory::new(DEVICE);
    for seed in 0..SEEDS {
        for dma in engines(&memory, seed) {
            let signal = word();
            memory.bytes().fill(0);
            let mut shown = false;
            memory.watch(move |bytes| {
                // A flag that the device sees, whose write comes behind the signal.
                if bytes[128] != 0 && !std::mem::replace(&mut shown, true) {
                    assert_eq!(signal.load(Ordering::Acquire), 3);
                }
            });
            let mut rig = Rig::new(DmaConfig::default());
            let mut source = [1u8; 8];
            let source = host(&mut source);
            let at = Place::Host(Shared::from_ptr(signal.as_ptr().cast()).unwrap());
            let to = |offset| device(&dma, memory.addr(0, offset));
            for i in 0..3 {
                rig.start(1, copy(source.clone(), to(8 * i), 8));
                rig.start(1, count(signal));
                // The signal's value, to where the device sees it.
                rig.start(1, copy(at.clone(), to(256 + 8 * i), 8));
            }
            rig.start(1, inline(&[1; 8], to(128)));
            rig.start(1, copy(to(512), at.clone(), 8));
            rig.start(1, count(signal));
            rig.drain();
            let seen: Vec<u64> = (0..3)
                .map(|i| memory.word(memory.addr(0, 256 + 8 * i)))
                .collect();
            assert_eq!(seen, [1, 2, 3]);
            assert_eq!(
                signal.load(Ordering::Acquire),
                1,
                "overwritten by zero, then counted"
            );
        }
    }
}

#[test]
fn an_old_value_of_four_or_eight_bytes_goes_where_it_is_asked_for() {
    let memory = MockMemory::new(DEVICE);
    let dma = Mock::new(&memory, 1);
    for (width, want) in [
        (Width::Eight, 7u64.to_ne_bytes()),
        (Width::Four, [0, 0, 0, 7, 0xee, 0xee, 0xee, 0xee]),
    ] {
        let (value, sink) = (word(), word());
        value.store(7, Ordering::Relaxed);
        sink.store(u64::from_ne_bytes([0xee; 8]), Ordering::Relaxed);
        let mut rig = Rig::new(DmaConfig::default());
        let mut source = [1u8; 8];
        rig.start(
            1,
            copy(host(&mut source), device(&dma, memory.addr(0, 0)), 8),
        );
        let add = Word {
            at: Shared::from_ptr(value.as_ptr().cast()).unwrap(),
            width,
            sink: Shared::from_ptr(sink.as_ptr().cast()),
            new: Box::new(|old| old + 1),
        };
        rig.start(1, Work::Word(add));
        assert_eq!(
            value.load(Ordering::Relaxed),
            7,
            "the copy before it has not ended"
        );
        rig.drain();
        assert_eq!(
            (
                value.load(Ordering::Relaxed),
                sink.load(Ordering::Relaxed).to_ne_bytes()
            ),
            (8, want)
        );
    }
}
