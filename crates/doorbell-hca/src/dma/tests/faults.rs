//! Engines that stall, refuse and fail; QPs that are cancelled.

use super::*;

#[test]
fn a_stalled_engine_fails_its_qps_with_the_likely_cause_and_no_other() {
    let memory = MockMemory::new(DEVICE);
    for ordered in [true, false] {
        let engine = |device| {
            let mut mock = Mock::build(&memory, device, 5);
            mock.ordered = ordered;
            Arc::new(mock)
        };
        let (sick, well) = (engine(0), engine(1));
        sick.stall(true);
        let mut rig = Rig::new(DmaConfig {
            stall: Duration::from_millis(5),
            ..DmaConfig::default()
        });
        rig.step = Duration::from_micros(10);
        let mut source = [5u8; 64];
        let source = host(&mut source);
        for _ in 0..3 {
            rig.start(
                1,
                copy(source.clone(), device(&sick, memory.addr(0, 0)), 64),
            );
            rig.start(
                2,
                copy(
                    device(&sick, memory.addr(0, 0)),
                    device(&sick, memory.addr(0, 64)),
                    64,
                ),
            );
            rig.start(
                3,
                copy(source.clone(), device(&well, memory.addr(1, 0)), 64),
            );
        }
        for _ in 0..300 {
            rig.poll();
        }
        assert_eq!(rig.good(3), [2, 5, 8], "another engine's QP goes on");
        assert!(rig.completed.is_empty());
        for _ in 0..400 {
            rig.poll();
        }
        for qp in [1, 2] {
            let reported = rig.completed.remove(&qp).unwrap();
            assert_eq!(reported.len(), 1, "after the first error nothing more");
            let failure = reported[0].1.clone().unwrap_err();
            assert!(matches!(*failure, DmaFailure::Stalled { .. }));
            let text = failure.to_string();
            assert!(
                text.contains("CUDA_DEVICE_MAX_CONNECTIONS") && text.contains("within"),
                "{text}"
            );
        }
        // A QP that comes now hears it at once.
        rig.start(
            4,
            copy(source.clone(), device(&sick, memory.addr(0, 0)), 64),
        );
        rig.poll();
        rig.poll();
        assert!(rig.completed.remove(&4).unwrap()[0].1.is_err());
        let before = rig.retired.iter().sum::<usize>();
        assert!(
            before < 10,
            "memory of copies that are still under way is held"
        );
        [1, 2, 4].iter().for_each(|&qp| rig.core.cancel(qp));
        // The kernel ends, the copies too.
        sick.stall(false);
        rig.drain();
        assert_eq!(rig.retired.iter().sum::<usize>(), 10);
        assert!(rig.core.stalled().is_none());
        rig.start(
            1,
            copy(source.clone(), device(&sick, memory.addr(0, 128)), 64),
        );
        rig.drain();
        assert_eq!(rig.good(1).len(), 1, "the engine is used again");
    }
}

#[test]
fn large_copies_have_more_time_and_what_waits_behind_them_has_its_own() {
    let memory = MockMemory::new(DEVICE);
    for ordered in [true, false] {
        let mut mock = Mock::build(&memory, 0, 5);
        mock.ordered = ordered;
        let sick = Arc::new(mock);
        sick.stall(true);
        let mut rig = Rig::new(DmaConfig {
            stall: Duration::from_millis(5),
            ..DmaConfig::default()
        });
        rig.step = Duration::from_millis(1);
        let mut source = vec![5u8; DEVICE / 2];
        let source = host(&mut source);
        // At four seconds a GiB, so many milliseconds more.
        let more = (DEVICE as u64 / 2 * 4000) >> 30;
        assert!(more >= 1, "a copy that is large enough for this test");
        rig.start(
            1,
            copy(source.clone(), device(&sick, memory.addr(0, 0)), DEVICE / 2),
        );
        rig.start(
            2,
            copy(source, device(&sick, memory.addr(0, DEVICE / 2)), 64),
        );
        for _ in 0..5 + more - 1 {
            rig.poll();
        }
        assert!(rig.completed.is_empty(), "{:?}", rig.core.stalled());
        for _ in 0..3 {
            rig.poll();
        }
        for qp in [1, 2] {
            let failure = rig.completed.remove(&qp).unwrap()[0].1.clone().unwrap_err();
            assert!(matches!(*failure, DmaFailure::Stalled { .. }));
        }
        [1, 2].iter().for_each(|&qp| rig.core.cancel(qp));
        sick.stall(false);
        rig.drain();
    }
}

#[test]
fn refused_and_failed_batches_fail_their_jobs_and_the_rest_waits_for_the_engine() {
    let memory = MockMemory::new(DEVICE);
    for dma in engines(&memory, 9) {
        for late in [false, true] {
            let mut rig = Rig::new(DmaConfig::default());
            if late {
                dma.fail_next()
            } else {
                dma.refuse(true)
            }
            let mut source = [5u8; 64];
            let source = host(&mut source);
            for i in 0..4u64 {
                rig.start(
                    1,
                    copy(
                        source.clone(),
                        device(&dma, memory.addr(0, 64 * i as usize)),
                        64,
                    ),
                );
                rig.start(
                    2,
                    copy(
                        device(&dma, memory.addr(0, 0)),
                        device(&dma, memory.addr(0, 4096)),
                        64,
                    ),
                );
            }
            for _ in 0..200 {
                rig.poll();
            }
            dma.refuse(false);
            let failed = rig
                .completed
                .values()
                .flatten()
                .filter(|(_, result)| result.is_err())
                .count();
            assert!(failed >= 1);
            let failures = rig
                .completed
                .values()
                .flatten()
                .filter_map(|(_, result)| result.as_ref().err());
            failures.for_each(|f| assert!(f.to_string().contains("by the mock"), "{f}"));
            for qp in [1, 2] {
                let reported = rig.completed.remove(&qp).unwrap_or_default();
                let first_error = reported.iter().position(|(_, result)| result.is_err());
                assert!(
                    first_error.is_none_or(|at| at + 1 == reported.len()),
                    "nothing after an error"
                );
                rig.core.cancel(qp);
            }
            rig.drain();
            assert_eq!(rig.retired.iter().sum::<usize>(), 8);
            rig.start(1, copy(source.clone(), device(&dma, memory.addr(0, 0)), 64));
            rig.drain();
            assert_eq!(rig.good(1), [8]);
        }
    }
}

#[test]
fn a_cancelled_qp_is_silent_and_everything_is_retired_once() {
    let memory = MockMemory::new(DEVICE);
    for (seed, dma) in (0..).zip(engines(&memory, 4)) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut rig = Rig::new(DmaConfig::default());
        let mut source = vec![5u8; HUGE / 7];
        let source = host(&mut source);
        for round in 0..(if cfg!(miri) { 1 } else { 50 }) {
            let mut jobs = 0;
            for qp in 0..3 {
                for _ in 0..random.random_range(0..20) {
                    let len = random.random_range(1..HUGE / 7);
                    rig.start(
                        qp,
                        match random.random_range(0..3) {
                            0 => copy(source.clone(), device(&dma, memory.addr(0, 0)), len),
                            1 => copy(
                                device(&dma, memory.addr(0, 0)),
                                device(&dma, memory.addr(0, 500_000)),
                                len,
                            ),
                            _ => add(&dma, memory.addr(0, 8), 1, Width::Eight, source.clone()),
                        },
                    );
                    jobs += 1;
                }
            }
            (0..random.random_range(0..10)).for_each(|_| rig.poll());
            (0..3).for_each(|qp| rig.core.cancel(qp));
            assert_eq!((0..3).map(|qp| rig.core.pending(qp)).sum::<usize>(), 0);
            rig.completed.clear();
            rig.drain();
            assert!(
                rig.completed.values().all(VecDeque::is_empty),
                "round {round}"
            );
            assert_eq!(std::mem::take(&mut rig.retired).iter().sum::<usize>(), jobs);
        }
    }
}
