//! The copies' kernel stays for more: what is posted to it, jobs that come as it leaves, the bounds of its stay, and closing while it is there.

use std::time::Instant;

use super::lane::Bench;
use super::*;

/// Longer than any test takes, and than the kernel can be told.
const EVER: Duration = Duration::from_secs(100);

/// (launches, jobs that a kernel did which stayed, copies by the engine).
fn counts(b: &Bench) -> (u64, u64, u64) {
    let (launches, engine) = b.counts();
    (launches, b.mock.get("staying_jobs"), engine)
}

/// Where a kernel that stays does so for ever.
fn for_ever(test: &str) -> Bench {
    let b = Bench::new(test);
    b.copier.set_stay(EVER);
    b
}

/// With a kernel that is there, and stays.
fn that_stays(test: &str) -> Bench {
    let b = for_ever(test);
    until_stays(&b);
    b
}

/// Until a kernel is there that stays: the first launches do not, since nothing tells that more is to come.
fn until_stays(b: &Bench) {
    let since = Instant::now();
    loop {
        b.done(&b.words(0, 0, 20));
        // Far longer than it stays otherwise.
        std::thread::sleep(Duration::from_millis(5));
        // One that was to leave may not have had a processor since.
        if b.mock.get("staying") == 1 && b.mock.get("stay_ns") > 1_000_000 {
            return;
        }
        assert!(since.elapsed() < LONG, "it does not stay");
    }
}

#[test]
fn while_it_stays_small_copies_are_posted_to_it() {
    let b = that_stays("stay_posted");
    let d = b.device.device_addr();
    let within = |len: u64| {
        vec![CopyOp {
            dst: d + (512 << 10),
            src: d,
            len,
        }]
    };
    let base = counts(&b);
    for (ops, jobs) in [
        (b.words(0, 0, 1), 1),
        (b.words(800, 8, 7), 1),
        (b.words(0, 3000, 600), 3),
        (vec![b.op(4096, 0, 8 << 10)], 1),
        (vec![b.op(4096, 16, 16_383)], 1),
        (vec![b.op(4096, 32, 16 << 10)], 1),
        (vec![b.op(4097, 0, 512); 2], 1),
        (vec![b.op(4112, 0, 4 << 10); 300], 2),
        (within(8), 1),
        (within(16 << 10), 1),
        // As large as the engine's.
        (vec![b.op(4096, 0, (16 << 10) + 1)], 0),
        (vec![b.op(0, 0, 4097); 9], 0),
        (within((16 << 10) + 1), 0),
        // Not aligned alike, these take a kernel as long.
        (vec![b.op(4097, 0, (1 << 10) + 1)], 0),
        (vec![b.op(4, 0, (4 << 10) + 1)], 0),
        (vec![b.op(8, 0, (8 << 10) + 1)], 0),
    ] {
        let then = counts(&b);
        b.done(&ops);
        let now = counts(&b);
        assert_eq!(
            (now.0 - then.0, now.1 - then.1),
            (0, jobs),
            "{} copies",
            ops.len()
        );
        assert_eq!(now.2 == then.2, jobs != 0);
        let (to, from, len) = (ops[0].dst, ops[0].src, ops[0].len as usize);
        if jobs == 1 && from >= b.host.device_addr() && from < b.host.device_addr() + (1 << 20) {
            let (to, from) = ((to - d) as usize, (from - b.host.device_addr()) as usize);
            assert!(b.device_bytes()[to..to + len] == b.data[from..from + len]);
        }
    }
    // A few in many steps take it longer.
    let then = counts(&b);
    b.copier
        .wait(b.steps(&b.words(0, 0, 3), &[1, 2]), LONG)
        .unwrap();
    b.copier
        .wait(b.steps(&b.words(0, 0, 3), &[1]), LONG)
        .unwrap();
    let now = counts(&b);
    assert_eq!((now.1 - then.1, now.2 - then.2), (1, 3));
    // Several under way, in order: each word of the second row comes from the first, which comes from the host.
    let tickets: Vec<u64> = (0..8)
        .map(|i| {
            b.submit(&b.words(0, 64 * i, 1));
            b.submit(&[CopyOp {
                dst: d + 4096 + i as u64 * 8,
                src: d,
                len: 8,
            }])
        })
        .collect();
    b.copier.wait(tickets[7], LONG).unwrap();
    let bytes = b.device_bytes();
    for i in 0..8 {
        assert_eq!(bytes[4096 + i * 8..][..8], b.data[64 * i..][..8]);
    }
    let stats = b.copier.stats();
    assert_eq!(stats.posted, counts(&b).1);
    assert_eq!(stats.kernel_batches - stats.posted, base.0);
    assert_eq!(stats.kernel_copies, b.mock.get("kernel_copies"));
    // It is told to leave, and waited for.
    let (mock, took) = b.close();
    assert!(took < EVER / 2);
    assert_eq!(mock.get("staying"), 0);
    assert_eq!((mock.get("streams"), mock.get("live")), (0, 0));
    mock.clean();
}

/// A single copy is the engine's, which is as quick; but the third in a row that a kernel would have been there for is a launch.
#[test]
fn single_copies_that_follow_each_other_are_worth_a_launch() {
    let b = for_ever("stay_habit");
    for (from, want) in [(0, (0, 0)), (8, (0, 0)), (16, (1, 0)), (24, (1, 1))] {
        b.done(&b.words(0, from, 1));
        let now = counts(&b);
        assert_eq!((now.0, now.1), want);
        assert_eq!(b.device_bytes()[..8], b.data[from..from + 8]);
    }
    // Large ones are no reason to stay.
    let b = for_ever("stay_no_habit");
    for _ in 0..4 {
        b.done(&[b.op(0, 0, 100 << 10)]);
    }
    b.done(&b.words(0, 0, 1));
    assert_eq!(b.mock.get("launches"), 0);
    b.mock.clean();
}

/// What follows a copy of the engine's closely is the engine's too, though a kernel is there: it need not wait until somebody has seen that one's end.
#[test]
fn a_few_copies_behind_the_engines_are_its_own() {
    let b = that_stays("stay_behind");
    b.mock.call_int("mock_hold_copies", 1);
    let then = counts(&b);
    b.submit(&[b.op(0, 0, 100 << 10)]);
    let few = b.submit(&b.words(0, 400, 3));
    assert_eq!(counts(&b), (then.0, then.1, then.2 + 4));
    // Many are worth the wait, and what follows them is posted behind them.
    b.submit(&b.words(0, 800, 20));
    let last = b.submit(&b.words(0, 1200, 1));
    assert_eq!(counts(&b), (then.0, then.1, then.2 + 4));
    assert!(!b.copier.poll(few).unwrap());
    b.mock.call_int("mock_hold_copies", 0);
    b.copier.wait(last, LONG).unwrap();
    assert_eq!(counts(&b), (then.0, then.1 + 2, then.2 + 4));
    let bytes = b.device_bytes();
    assert_eq!(bytes[..8], b.data[1200..1208]);
    assert_eq!(bytes[8..160], b.data[808..960]);
    b.mock.clean();
}

/// Jobs that it does not look at any more when they come: they are launched, in order, and once.
#[test]
fn jobs_that_come_as_it_leaves_are_launched() {
    let b = that_stays("stay_leaves");
    for round in 1..=3 {
        b.mock.call_int("mock_deaf", 1);
        for i in 0..5 {
            b.submit(&b.words(0, round * 1000 + i * 100, 10));
        }
        let (launches, kernel) = (b.mock.get("launches"), b.mock.get("kernel_copies"));
        b.mock.call_int("mock_deaf", 2);
        let since = Instant::now();
        while b.mock.get("staying") != 0 {
            assert!(since.elapsed() < LONG);
        }
        b.mock.call_int("mock_deaf", 0);
        assert_eq!(b.mock.get("kernel_copies"), kernel);
        // Another job, before anyone has looked at those: they come first.
        let last = b.submit(&b.words(8, round * 1000 + 777, 1));
        assert_eq!(b.mock.get("launches"), launches + 1);
        b.copier.wait(last, LONG).unwrap();
        assert_eq!(b.mock.get("kernel_copies") - kernel, 51);
        let bytes = b.device_bytes();
        assert_eq!(bytes[..8], b.data[round * 1000 + 400..][..8]);
        assert_eq!(bytes[8..16], b.data[round * 1000 + 777..][..8]);
        assert_eq!(bytes[16..80], b.data[round * 1000 + 416..][..64]);
    }
    let stats = b.copier.stats();
    assert_eq!(stats.kernel_batches - stats.posted, b.mock.get("launches"));
    assert_eq!(stats.taken_back, 0);
    b.mock.clean();
}

/// Gaps about as long as the stay: whether posted or launched, each job is done once.
#[test]
fn gaps_about_as_long_as_its_stay_lose_nothing() {
    const ROUNDS: usize = 2000;
    let b = Bench::new("stay_gaps");
    b.copier.set_stay(Duration::from_micros(100));
    let before = counts(&b).2;
    let mut random = 88_172_645_463_325_252_u64;
    for round in 0..ROUNDS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let gap = Duration::from_nanos(random % 200_000);
        let since = Instant::now();
        while since.elapsed() < gap {
            std::hint::spin_loop();
        }
        b.done(&b.words(0, round * 8, 8));
        let mut bytes = [0; 64];
        b.device.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, b.data[round * 8..][..64], "round {round}");
    }
    let (launches, posted, engine) = counts(&b);
    let stats = b.copier.stats();
    println!(
        "{launches} launches, {posted} posted, {} taken back",
        stats.taken_back
    );
    // A machine that holds a thread up for long has launches taken back, and the engine do those.
    assert_eq!(stats.kernel_copies, b.mock.get("kernel_copies"));
    let reads = ROUNDS as u64;
    assert_eq!(stats.kernel_copies + engine - before - reads, stats.copies);
    assert_eq!(stats.kernel_batches - stats.posted, launches);
    b.mock.clean();
}

/// However much there is to do, it leaves at the end of its life.
#[test]
fn its_life_is_bounded_though_jobs_do_not_end() {
    let b = Bench::new("stay_life");
    // It lives no longer than it may stay.
    b.copier.set_stay(Duration::from_millis(500));
    until_stays(&b);
    let (since, launches) = (Instant::now(), b.mock.get("launches"));
    while b.mock.get("launches") < launches + 2 {
        b.done(&b.words(0, 0, 16));
        assert!(since.elapsed() < LONG, "it does not leave");
    }
    assert!(counts(&b).1 > 0);
    b.mock.clean();
}

/// A kernel that runs and does not come to its job, since another process has the GPU: nothing more is posted to it, and the engine does what comes meanwhile and for a while.
#[test]
fn a_job_that_is_late_is_the_last_for_a_while() {
    let b = that_stays("stay_late");
    // The next: what is late depends on it.
    b.copier.set_stay(Duration::from_millis(1));
    let then = counts(&b);
    b.mock.call_int("mock_deaf", 1);
    let late = b.submit(&b.words(0, 0, 1));
    let since = Instant::now();
    while since.elapsed() < Duration::from_millis(20) {
        assert!(!b.copier.poll(late).unwrap());
    }
    // It keeps its turn.
    let next = b.submit(&b.words(0, 400, 20));
    b.mock.call_int("mock_deaf", 0);
    b.copier.wait(next, LONG).unwrap();
    assert_eq!(counts(&b), (then.0, then.1 + 1, then.2 + 20));
    assert_eq!(b.device_bytes()[..160], b.data[400..560]);
    // Used again, where it still is.
    let since = Instant::now();
    while counts(&b).1 == then.1 + 1 {
        b.done(&b.words(0, 0, 20));
        assert!(since.elapsed() < LONG, "it stays unused");
    }
    assert_eq!(b.copier.stats().taken_back, 0);
    b.mock.clean();
}

/// What comes alone leaves no kernel behind.
#[test]
fn a_launch_that_nothing_is_expected_after_leaves() {
    let b = for_ever("stay_alone");
    b.done(&b.words(0, 0, 20));
    let since = Instant::now();
    while b.mock.get("staying") != 0 {
        assert!(since.elapsed() < EVER / 2, "it stays");
    }
    assert_eq!(counts(&b).0, 1);
    b.mock.clean();
}

/// A context that was lost while the kernel stayed holds nobody up, not even with a job under way: nothing runs in it any more.
#[test]
fn a_lost_context_with_a_kernel_that_stayed_is_closed_at_once() {
    for (test, busy) in [("stay_lost", false), ("stay_lost_busy", true)] {
        let b = that_stays(test);
        b.mock.call_int("mock_deaf", 1);
        if busy {
            b.submit(&b.words(0, 0, 1));
        }
        let fault = b.gpu.kernel("fault").unwrap();
        // SAFETY: the stand-in's kernel takes no more than this.
        let launched = unsafe {
            b.gpu
                .launch(&fault, Dims::new(1, 1), &bytes(&[0]), LaunchOpts::default())
        };
        assert!(launched.is_err());
        drop(fault);
        let (mock, took) = b.close();
        assert!(
            took < Duration::from_secs(2),
            "{test}: it was waited for, {took:?}"
        );
        mock.call_int("mock_deaf", 0);
    }
}
