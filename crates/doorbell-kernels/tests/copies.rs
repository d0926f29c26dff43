//! The copier's kernel on host threads: bytes, bounds, the order of steps, and work that is taken back.
//!
//! The buffers lie between pages that nobody may touch, so that an access outside a range is the end of the test.
#![cfg(not(miri))]

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use doorbell_device::host::{Hooks, HostGrid};
use doorbell_kernels::HOST;
use doorbell_kernels::board::{COPIES, CopyBoard, CopyCall, CopyJob, JOBS, Post, Posted};

/// Bytes between two pages that may not be touched.
struct Fenced {
    map: NonNull<u8>,
    len: usize,
}

const PAGE: usize = 64 << 10;

impl Fenced {
    /// `len` bytes, whole pages.
    fn new(len: usize) -> Self {
        assert!(len.is_multiple_of(PAGE));
        // SAFETY: a new mapping, of which the middle is made accessible.
        unsafe {
            let (flags, all) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, len + 2 * PAGE);
            let map = libc::mmap(std::ptr::null_mut(), all, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(map, libc::MAP_FAILED);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(map.byte_add(PAGE), len, access), 0);
            let map = NonNull::new(map.cast()).unwrap();
            Self { map, len }
        }
    }

    fn start(&self) -> u64 {
        // SAFETY: inside the mapping.
        unsafe { self.map.add(PAGE) }.as_ptr().expose_provenance() as u64
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped, and no kernel runs while the slice is held.
        unsafe { std::slice::from_raw_parts_mut(self.map.add(PAGE).as_ptr(), self.len) }
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.len + 2 * PAGE) };
    }
}

fn board() -> Box<CopyBoard> {
    // SAFETY: atomics; zeroes are values of them.
    unsafe { Box::<CopyBoard>::new_zeroed().assume_init() }
}

/// Destination, source, bytes.
type Op = (u64, u64, u64);

/// Fills a job with steps; returns its post.
fn fill(board: &CopyBoard, number: u64, steps: &[&[Op]]) -> Post {
    let job = &board.jobs[CopyBoard::place(number)];
    let mut end = 0;
    for (number, step) in steps.iter().enumerate() {
        for &(dst, src, len) in *step {
            job.set(end, dst, src, len);
            end += 1;
        }
        let longest = step.iter().map(|op| op.2).max().unwrap_or(0);
        let alike = step.iter().all(|op| op.2 == longest);
        let (lanes, len) = (
            CopyJob::lanes_for(longest),
            if alike { longest as u32 } else { 0 },
        );
        let word = CopyJob::step(end as u32, lanes, len, number + 1 == steps.len());
        job.steps[number].store(word, Ordering::Relaxed);
    }
    Post::steps(number, job.steps[0].load(Ordering::Relaxed))
}

/// Runs the kernel with a block of `threads` threads of emulated warps, or of threads on their own, from job `number` on.
fn launch<const LANES: usize>(
    board: &CopyBoard,
    number: u64,
    post: Post,
    times: u64,
    threads: u32,
) {
    let kernel = HOST.iter().find(|k| k.name == "copies").unwrap();
    let grid = HostGrid::<LANES>::new(1, threads, Hooks::default());
    let call = CopyCall {
        board: std::ptr::from_ref(board).expose_provenance() as u64,
        number,
        post: post.0,
        times,
    };
    std::thread::scope(|scope| {
        for number in 0..threads {
            let (grid, call) = (&grid, &call);
            scope.spawn(move || {
                let thread = grid.thread(0, number);
                let params = std::ptr::from_ref(call).cast();
                // SAFETY: a call as documented; the shape of the thread is the one that the function is for.
                unsafe {
                    match LANES {
                        1 => (kernel.fast)(&*(&raw const thread).cast(), params),
                        _ => (kernel.warp)(&*(&raw const thread).cast(), params),
                    }
                }
            });
        }
    });
}

/// A launch for one job, which leaves at once.
fn run<const LANES: usize>(board: &CopyBoard, steps: &[&[Op]], threads: u32) {
    let number = board.done.load(Ordering::Relaxed) + 1;
    board.reset();
    let post = fill(board, number, steps);
    launch::<LANES>(board, number, post, CopyCall::times(0, u32::MAX), threads);
    assert_eq!(board.done.load(Ordering::Acquire), number);
    assert_eq!(board.left.load(Ordering::Acquire), number + 1);
}

fn pattern(bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i * 31 + (i >> 8) * 7 + 1) as u8;
    }
}

/// Copies each op to a destination that is filled with another byte, and looks at every byte of it.
fn check(lens: &[u64], offsets: &[(u64, u64)], threads: u32) {
    let (mut from, mut to) = (Fenced::new(4 * PAGE), Fenced::new(4 * PAGE));
    pattern(from.bytes());
    let board = board();
    for &(dst, src) in offsets {
        for lens in lens.chunks(COPIES) {
            // Each place is a little larger than its copy; the first begins, and the last of sources and destinations ends, at a page that is not there.
            let (mut ops, mut at) = (Vec::new(), 0);
            let gap = |len: u64| (len + 33).next_multiple_of(16);
            for &len in lens {
                if at + gap(len) > 4 * PAGE as u64 {
                    break;
                }
                ops.push((to.start() + at + dst, from.start() + at + src, len));
                at += gap(len);
            }
            let ends = from.start() + 4 * PAGE as u64;
            let last = ops.len() - 1;
            let (moved, len) = (ops[last].1, ops[last].2);
            ops[last].1 = ends - len - (16 - src) % 16;
            assert!(ops[last].1 >= moved || last == 0);
            to.bytes().fill(0xee);
            run::<1>(&board, &[&ops], threads);
            let mut want = vec![0xee; 4 * PAGE];
            for &(dst, src, len) in &ops {
                let (dst, src) = ((dst - to.start()) as usize, (src - from.start()) as usize);
                want[dst..dst + len as usize].copy_from_slice(&from.bytes()[src..][..len as usize]);
            }
            assert!(
                to.bytes() == want,
                "offsets {dst} and {src}, {threads} threads"
            );
        }
    }
}

#[test]
fn every_length_and_offset_arrives_and_nothing_else_is_touched() {
    let short: Vec<u64> = (0..=140).collect();
    let all: Vec<(u64, u64)> = (0..16).flat_map(|d| (0..16).map(move |s| (d, s))).collect();
    for threads in [1, 2, 4] {
        check(&short, &all, threads);
    }
    let long = [
        255, 256, 257, 1000, 1024, 4095, 4096, 4097, 8191, 8192, 30_000,
    ];
    check(
        &long,
        &[(0, 0), (8, 0), (4, 12), (1, 0), (7, 7), (3, 2), (15, 1)],
        8,
    );
}

/// As a GPU has it: more threads than a copy takes, and warps that are one.
#[test]
fn a_block_of_warps_copies_the_same() {
    let (mut from, mut to) = (Fenced::new(PAGE), Fenced::new(PAGE));
    pattern(from.bytes());
    let board = board();
    for len in [8, 100, 1024, 5000] {
        to.bytes().fill(0);
        let ops: Vec<Op> = (0..10)
            .map(|i| (to.start() + i * 6000, from.start() + i * 6000, len))
            .collect();
        run::<32>(&board, &[&ops], 96);
        for i in 0..10 {
            let (at, len) = (i * 6000, len as usize);
            assert!(to.bytes()[at..at + len] == from.bytes()[at..at + len]);
            assert!(to.bytes()[at + len..at + 6000].iter().all(|&b| b == 0));
        }
    }
}

/// A word passed on from place to place, a step each; and steps of several, each of which reads what others wrote.
#[test]
fn steps_follow_each_other() {
    let mut memory = Fenced::new(PAGE);
    let start = memory.start();
    let board = board();
    memory.bytes()[..8].copy_from_slice(&77u64.to_le_bytes());
    let chain: Vec<[Op; 1]> = (0..COPIES as u64)
        .map(|i| [(start + (i + 1) * 8, start + i * 8, 8)])
        .collect();
    let steps: Vec<&[Op]> = chain.iter().map(|s| &s[..]).collect();
    run::<1>(&board, &steps, 4);
    let last = &memory.bytes()[COPIES * 8..][..8];
    assert_eq!(last, 77u64.to_le_bytes());

    // Eight rows of eight words; each row is the one above turned by one place.
    let place = |row: u64, column: u64| start + (row * 8 + column % 8) * 8;
    pattern(&mut memory.bytes()[..64]);
    let rows: Vec<Vec<Op>> = (0..30)
        .map(|row| {
            let turned = |column| (place(row + 1, column + 1), place(row, column), 8);
            (0..8).map(turned).collect()
        })
        .collect();
    let steps: Vec<&[Op]> = rows.iter().map(|s| &s[..]).collect();
    for threads in [1, 2, 5] {
        memory.bytes()[64..].fill(0);
        run::<1>(&board, &steps, threads);
        for row in 1..=30usize {
            for column in 0..8 {
                let (from, to) = (column * 8, (row * 8 + (column + row) % 8) * 8);
                let bytes = memory.bytes();
                assert_eq!(bytes[from..from + 8], bytes[to..to + 8], "row {row}");
            }
        }
    }
}

#[test]
fn a_step_says_what_it_is_in_a_word() {
    for end in [1, 17, COPIES as u32] {
        for lanes in [1, 2, 64, 256] {
            for len in [0, 8, 0x7fff_ffff] {
                for is_last in [false, true] {
                    let word = CopyJob::step(end, lanes, len, is_last);
                    let parts = CopyJob::parse_step(word);
                    assert_eq!(parts, (end, lanes.ilog2(), len, is_last));
                }
            }
        }
    }
    assert_eq!(
        [0, 1, 64, 65, 4096, 1 << 30].map(CopyJob::lanes_for),
        [1, 1, 1, 2, 64, 256]
    );
}

#[test]
fn a_post_says_what_it_is_in_two_words() {
    let most = (1 << 52) - 1;
    for number in [1, 255, 256, 1000, u64::MAX] {
        for (dst, src, len) in [
            (0, 0, 1),
            (most, most, (1 << 15) - 1),
            (0x7f12_3456_7890, 8, 4096),
        ] {
            let post = Post::copy(number, dst, src, len).unwrap();
            assert_eq!(post.parse(), Posted::Copy { dst, src, len });
            assert!(post.is(number) && !post.is(number.wrapping_sub(JOBS as u64)));
        }
        for (dst, src, len) in [
            (most + 1, 0, 8),
            (0, most + 1, 8),
            (0, 0, 0),
            (0, 0, 1 << 15),
        ] {
            assert_eq!(Post::copy(number, dst, src, len), None);
        }
        for step in [1, u64::MAX, CopyJob::step(1, 1, 0, true)] {
            let post = Post::steps(number, step);
            assert_eq!(post.parse(), Posted::Steps(step));
            assert!(post.is(number) && !post.is(number.wrapping_add(1)));
        }
        let leave = Post::leave(number);
        assert_eq!(leave.parse(), Posted::Leave);
        assert!(leave.is(number));
    }
    // A place that nothing was posted in is nobody's.
    for number in 1..1000 {
        assert!(!Post([0, 0]).is(number));
    }
}

#[test]
fn a_job_that_was_taken_back_is_declined_and_not_begun() {
    let mut memory = Fenced::new(PAGE);
    let start = memory.start();
    pattern(memory.bytes());
    let before = memory.bytes().to_vec();
    let board = board();
    let post = fill(&board, 5, &[&[(start, start + 1000, 500)]]);
    board.cancelled.store(1, Ordering::Relaxed);
    launch::<1>(&board, 5, post, CopyCall::times(u32::MAX, u32::MAX), 4);
    assert_eq!(board.left.load(Ordering::Acquire), 5);
    assert_eq!(board.done.load(Ordering::Relaxed), 0);
    assert_eq!(board.started.load(Ordering::Relaxed), 1);
    assert!(memory.bytes() == before);
}

/// Taken back at whatever moment: either the host saw it start and it answers, or it is not begun.
#[test]
fn kernel_and_host_never_both_do_the_work() {
    let mut memory = Fenced::new(PAGE);
    let start = memory.start();
    let board = board();
    let (mut taken, mut done) = (0, 0);
    for round in 0..2000u64 {
        memory.bytes()[..8].copy_from_slice(&(round + 1).to_le_bytes());
        board.reset();
        let number = round + 1;
        let post = fill(&board, number, &[&[(start + 4096, start, 8)]]);
        let seen = std::thread::scope(|scope| {
            scope.spawn(|| launch::<1>(&board, number, post, CopyCall::times(0, u32::MAX), 1));
            (0..round % 400 * 20).for_each(|_| std::hint::spin_loop());
            board.cancelled.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            board.started.load(Ordering::Relaxed)
        });
        let copied = memory.bytes()[4096..4104] == (round + 1).to_le_bytes();
        let did = board.done.load(Ordering::Acquire) == number;
        assert_eq!(copied, did, "round {round}");
        assert_eq!(
            board.left.load(Ordering::Acquire),
            number + u64::from(did),
            "round {round}"
        );
        assert!(seen == 1 || !copied, "round {round}: done twice");
        taken += u64::from(seen == 0);
        done += u64::from(copied);
    }
    println!("{taken} taken back, {done} done");
}

/// Eight jobs of all kinds, each of which reads what the one before wrote, by one launch; then it is told to leave.
#[test]
fn a_kernel_that_stays_does_what_is_posted_in_order() {
    let mut memory = Fenced::new(PAGE);
    let start = memory.start();
    for threads in [1, 3] {
        pattern(memory.bytes());
        let want = memory.bytes()[..4096].to_vec();
        let board = board();
        let place = |n: u64| start + n * 4096;
        let post = |number: u64| match number % 3 {
            0 => Post::copy(number, place(number), place(number - 1), 4096).unwrap(),
            1 => fill(
                &board,
                number,
                &[&[(place(number), place(number - 1), 4096)]],
            ),
            _ => {
                let half = |at| (place(number) + at, place(number - 1) + at, 2048);
                fill(&board, number, &[&[half(0)], &[half(2048)]])
            }
        };
        let (first, last) = (post(1), JOBS as u64);
        std::thread::scope(|scope| {
            let board = &board;
            scope.spawn(move || {
                launch::<1>(
                    board,
                    1,
                    first,
                    CopyCall::times(u32::MAX, u32::MAX),
                    threads,
                );
            });
            (2..=last).for_each(|number| board.post(number, post(number)));
            until(|| board.done.load(Ordering::Acquire) == last);
            assert_eq!(board.left.load(Ordering::Acquire), 0, "it stays");
            board.post(last + 1, Post::leave(last + 1));
        });
        assert_eq!(board.left.load(Ordering::Acquire), last + 1);
        assert_eq!(board.done.load(Ordering::Acquire), last);
        assert!(memory.bytes()[last as usize * 4096..][..4096] == want);
    }
}

fn until(mut done: impl FnMut() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < Duration::from_secs(60));
        std::hint::spin_loop();
    }
}

/// Jobs posted around the moment at which the kernel leaves, and a life that ends among them: launched again by what it left, none is lost and none done twice.
#[test]
fn jobs_that_come_as_the_kernel_leaves_are_done_once() {
    const ROUNDS: u64 = 3000;
    let mut memory = Fenced::new(PAGE);
    let start = memory.start();
    let board = board();
    memory.bytes().fill(0);
    // Each job moves a counter's value on by a copy, and the host checks and bumps it: a job that ran twice or late would bring an old one.
    let (mut launches, mut posted, mut at_life) = (0u64, 0, 0);
    let word = |at: u64| std::ptr::with_exposed_provenance_mut::<u64>((start + at) as usize);
    // SAFETY: inside the mapping; kernel and host take turns, by `done`.
    let bump = |value: u64| unsafe { word(0).write_volatile(value) };
    // SAFETY: as above.
    let read = || unsafe { word(4096).read_volatile() };
    std::thread::scope(|scope| {
        let mut there = None;
        let start_kernel = |number, post| {
            board.reset();
            // 20 us since the last job, 2 ms in all.
            let times = CopyCall::times(20_000, 2_000_000);
            let board = &board;
            scope.spawn(move || launch::<1>(board, number, post, times, 1))
        };
        for number in 1..=ROUNDS {
            (0..number % 97 * 40).for_each(|_| std::hint::spin_loop());
            bump(number);
            let post = match number % 2 {
                0 => Post::copy(number, start + 4096, start, 8).unwrap(),
                _ => fill(&board, number, &[&[(start + 4096, start, 8)]]),
            };
            board.post(number, post);
            match there {
                Some(_) => posted += 1,
                None => {
                    launches += 1;
                    there = Some(start_kernel(number, post));
                }
            }
            until(|| {
                if board.done.load(Ordering::Acquire) == number {
                    return true;
                }
                let left = board.left.load(Ordering::Acquire);
                if left != 0 && board.done.load(Ordering::Acquire) != number {
                    assert_eq!(left, number, "it left another job than the next");
                    at_life += 1;
                    posted -= 1;
                    launches += 1;
                    there = Some(start_kernel(number, post));
                }
                false
            });
            assert_eq!(read(), number);
            if board.left.load(Ordering::Acquire) != 0 {
                there = None;
            }
        }
    });
    assert_eq!(launches + posted, ROUNDS);
    println!(
        "{launches} launches, {at_life} of them for a job that came as the kernel left; {posted} jobs posted"
    );
}
