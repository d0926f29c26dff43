//! Small copies by a kernel: which go that way, in which order with the copy engine's, and what becomes of launches that do not start.

use std::time::Instant;

use doorbell_gpu::{Buffer, Copier};

use super::*;

/// A GPU with a megabyte at both ends, the host's filled.
pub(crate) struct Bench {
    pub(crate) mock: Mock,
    pub(crate) gpu: Gpu,
    pub(crate) copier: Copier,
    pub(crate) host: Buffer,
    pub(crate) device: Buffer,
    pub(crate) data: Vec<u8>,
}

pub(crate) const LEN: usize = 1 << 20;

impl Bench {
    pub(crate) fn new(test: &str) -> Self {
        Self::with(test, &[])
    }

    pub(crate) fn with(test: &str, flags: &[&str]) -> Self {
        let mock = Mock::build(test, flags);
        let gpu = mock.open();
        assert!(gpu.info().can.kernel_copies);
        let copier = gpu.copier().unwrap();
        // Who does what is a matter of time otherwise.
        copier.set_stay(Duration::ZERO);
        let host = gpu.alloc(MemKind::PinnedHost, LEN).unwrap();
        let device = gpu.alloc(MemKind::Device, LEN).unwrap();
        let data: Vec<u8> = (0..LEN).map(|i| (i * 29 + i / 253) as u8).collect();
        host.write(0, &data).unwrap();
        Self {
            mock,
            gpu,
            copier,
            host,
            device,
            data,
        }
    }

    /// To place `to` of the device from place `from` of the host.
    pub(crate) fn op(&self, to: usize, from: usize, len: usize) -> CopyOp {
        self.op_to(self.device.device_addr() + to as u64, from, len)
    }

    /// To any address.
    pub(crate) fn op_to(&self, dst: u64, from: usize, len: usize) -> CopyOp {
        CopyOp {
            dst,
            src: self.host.device_addr() + from as u64,
            len: len as u64,
        }
    }

    pub(crate) fn words(&self, to: usize, from: usize, count: usize) -> Vec<CopyOp> {
        self.words_to(self.device.device_addr() + to as u64, from, count)
    }

    pub(crate) fn words_to(&self, dst: u64, from: usize, count: usize) -> Vec<CopyOp> {
        (0..count)
            .map(|i| self.op_to(dst + i as u64 * 8, from + i * 8, 8))
            .collect()
    }

    pub(crate) fn submit(&self, ops: &[CopyOp]) -> u64 {
        self.steps(ops, &[])
    }

    pub(crate) fn steps(&self, ops: &[CopyOp], steps: &[usize]) -> u64 {
        // SAFETY: ranges of buffers that outlive the copies.
        unsafe { self.copier.submit_in_steps(ops, steps) }.unwrap()
    }

    pub(crate) fn done(&self, ops: &[CopyOp]) {
        self.copier.wait(self.submit(ops), LONG).unwrap();
    }

    /// (launches, copies by the engine) since.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.mock.get("launches"), self.mock.get("copies"))
    }

    pub(crate) fn device_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.device.read(0, &mut bytes).unwrap();
        bytes
    }

    /// Gives everything back; the driver, and how long it took.
    pub(crate) fn close(self) -> (Mock, Duration) {
        let Self {
            mock,
            gpu,
            copier,
            host,
            device,
            ..
        } = self;
        let since = Instant::now();
        drop((gpu, copier, host, device));
        (mock, since.elapsed())
    }

    /// Waits until the kernel is used again.
    pub(crate) fn until_on(&self) {
        let since = Instant::now();
        let before = self.mock.get("launches");
        while self.mock.get("launches") == before {
            self.done(&self.words(0, 0, 16));
            assert!(since.elapsed() < LONG, "it stays off");
        }
    }
}

#[test]
fn many_small_copies_are_one_launch_and_few_or_large_ones_the_engines() {
    let b = Bench::new("lane_which");
    let since = |then: (u64, u64)| {
        let now = b.counts();
        (now.0 - then.0, now.1 - then.1)
    };
    for (ops, launches) in [
        (b.words(0, 0, 256), 1),
        (b.words(0, 0, 600), 3),
        (b.words(0, 0, 8), 1),
        (b.words(0, 0, 7), 0),
        (vec![b.op(0, 0, 4 << 10); 300], 2),
        (vec![b.op(0, 0, 4097); 20], 0),
        (vec![b.op(1, 0, 257); 20], 0),
        // A large one among small ones takes them along.
        (
            [b.words(8, 8, 20), vec![b.op(200 << 10, 0, 190 << 10)]].concat(),
            0,
        ),
    ] {
        let then = b.counts();
        b.done(&ops);
        let engine = if launches == 0 { ops.len() as u64 } else { 0 };
        assert_eq!(since(then), (launches, engine), "{} copies", ops.len());
    }
    // Within the GPU one is enough, since by way of host memory it would be two. Not if the ends of one overlap, or if they are large.
    let d = b.device.device_addr();
    for (count, len, apart, launches) in [
        (4u64, 1000u64, 1000u64, 1),
        (4, 4096, 4096, 1),
        (1, 8, 8, 1),
        (4, 16, 8, 0),
        (1, 4097, 4097, 0),
    ] {
        let (then, before) = (b.counts(), b.device_bytes());
        let ops: Vec<_> = (0..count)
            .map(|i| CopyOp {
                dst: d + i * 8192 + apart,
                src: d + i * 8192,
                len,
            })
            .collect();
        b.done(&ops);
        assert_eq!(since(then).0, launches, "{count} of {len} bytes");
        let after = b.device_bytes();
        for i in 0..count {
            let (from, len) = ((i * 8192) as usize, len as usize);
            assert!(after[from + apart as usize..][..len] == before[from..][..len]);
        }
    }
    // What asks for the engine gets it.
    let then = b.counts();
    // SAFETY: buffers that outlive the copies.
    let ticket = unsafe { b.copier.submit(&b.words(0, 0, 100)) }.unwrap();
    b.copier.wait(ticket, LONG).unwrap();
    assert_eq!(since(then), (0, 100));
    let stats = b.copier.stats();
    assert_eq!(
        (stats.kernel_batches, stats.via_host, stats.taken_back),
        (10, 5, 0)
    );
    assert_eq!(stats.kernel_copies, b.mock.get("kernel_copies"));
    b.mock.clean();
}

#[test]
fn steps_of_a_launch_follow_each_other() {
    let b = Bench::new("lane_steps");
    let mut ops: Vec<_> = (0..700).map(|i| b.op(0, i * 8, 8)).collect();
    ops.extend(b.words(8, 8, 50));
    let steps: Vec<usize> = (1..=700).collect();
    let then = b.counts().1;
    b.copier.wait(b.steps(&ops, &steps), LONG).unwrap();
    assert_eq!(b.counts().1, then, "none by the engine");
    let bytes = b.device_bytes();
    assert_eq!(
        bytes[..8],
        b.data[699 * 8..700 * 8],
        "the last step is last"
    );
    assert_eq!(bytes[8..408], b.data[8..408]);
    b.mock.clean();
}

/// What goes one way begins when all that goes the other has ended.
#[test]
fn the_two_ways_keep_the_order_of_tickets() {
    let b = Bench::new("lane_order");
    b.mock.call_int("mock_hold_copies", 1);
    // Different bytes to one place: engine, kernel, engine, kernel.
    let (large, small) = (
        |from| vec![b.op(0, from, 100 << 10)],
        |from| b.words(0, from, 20),
    );
    let before = b.counts();
    let tickets: Vec<u64> = [large(1000), small(2000), large(3000), small(4000)]
        .iter()
        .map(|ops| b.submit(ops))
        .collect();
    assert!(!b.copier.poll(tickets[0]).unwrap());
    assert_eq!(
        b.counts(),
        (before.0, before.1 + 1),
        "the engine's first and no more"
    );
    b.mock.call_int("mock_hold_launches", 2);
    b.mock.call_int("mock_hold_copies", 0);
    let since = Instant::now();
    while !b.copier.poll(tickets[0]).unwrap() || b.mock.get("launches") == before.0 {
        assert!(since.elapsed() < LONG);
    }
    // The kernel runs; whatever it takes, the engine's next does not begin.
    while since.elapsed() < Duration::from_millis(20) {
        assert!(!b.copier.poll(tickets[1]).unwrap());
    }
    assert_eq!(b.counts(), (before.0 + 1, before.1 + 1));
    assert_eq!(b.copier.oldest().unwrap().0, tickets[1]);
    b.mock.call_int("mock_hold_launches", 0);
    b.copier.wait(tickets[3], LONG).unwrap();
    // The first was late, so the last may be the engine's.
    let now = b.counts();
    assert!(
        now == (before.0 + 2, before.1 + 2) || now == (before.0 + 1, before.1 + 22),
        "{now:?}"
    );
    assert_eq!(b.copier.stats().taken_back, 0);
    let bytes = b.device_bytes();
    assert!(
        bytes[..160] == b.data[4000..4160]
            && bytes[160..100 << 10] == b.data[3160..][..(100 << 10) - 160]
    );
    b.mock.clean();
}

/// Kernels that fill the GPU leave no room: the engine does the work, once, and the launch does nothing when it starts at last.
#[test]
fn launches_that_do_not_start_are_taken_back() {
    let b = Bench::new("lane_back");
    b.mock.call_int("mock_hold_launches", 1);
    let before = b.counts();
    let d = b.device.device_addr();
    let within: Vec<_> = (0..4)
        .map(|i| CopyOp {
            dst: d + (512 << 10) + i * 20,
            src: d + i * 20,
            len: 20,
        })
        .collect();
    // A launch and what is posted behind it; the last reads on the device what the first wrote there.
    let tickets = [
        b.submit(&b.words(0, 0, 300)),
        b.submit(&b.words(4000, 4000, 20)),
        b.submit(&within),
    ];
    assert_eq!(b.mock.get("launches") - before.0, 1);
    b.copier.wait(tickets[2], LONG).unwrap();
    assert!(tickets.iter().all(|&t| b.copier.poll(t).unwrap()));
    let stats = b.copier.stats();
    assert_eq!(
        (stats.taken_back, stats.posted, stats.kernel_copies),
        (4, 3, 0)
    );
    assert_eq!(b.mock.get("kernel_copies"), 0);
    let bytes = b.device_bytes();
    assert!(bytes[..2400] == b.data[..2400] && bytes[512 << 10..][..80] == b.data[..80]);
    // As long as it waits, and a while longer, the engine does all.
    b.done(&b.words(0, 8000, 300));
    std::thread::sleep(Duration::from_millis(5));
    b.done(&b.words(0, 9000, 300));
    assert_eq!(b.mock.get("launches") - before.0, 1);
    // It starts, and does nothing.
    b.mock.call_int("mock_hold_launches", 0);
    assert_eq!(b.mock.get("kernel_copies"), 0);
    assert_eq!(b.device_bytes()[..2400], b.data[9000..11400]);
    b.until_on();
    b.mock.clean();
}

/// It runs when patience ends: its answer is waited for, and what is posted behind is left to it.
#[test]
fn a_launch_that_has_started_is_waited_for() {
    let b = Bench::new("lane_started");
    b.mock.call_int("mock_hold_launches", 2);
    let first = b.submit(&b.words(0, 0, 20));
    b.submit(&b.words(0, 1000, 16));
    let third = b.submit(&b.words(16, 2000, 1));
    let since = Instant::now();
    while since.elapsed() < Duration::from_millis(20) {
        assert!(!b.copier.poll(first).unwrap() && !b.copier.poll(third).unwrap());
    }
    let kernel = b.mock.get("kernel_copies");
    assert_eq!((b.mock.get("launches"), kernel), (1, 0));
    b.mock.call_int("mock_hold_launches", 0);
    b.copier.wait(third, LONG).unwrap();
    assert_eq!(
        (b.mock.get("kernel_copies"), b.copier.stats().taken_back),
        (37, 0)
    );
    let bytes = b.device_bytes();
    assert_eq!(bytes[..16], b.data[1000..1016]);
    assert_eq!(bytes[16..24], b.data[2000..2008]);
    assert_eq!(bytes[24..128], b.data[1024..1128]);
    assert_eq!(bytes[128..160], b.data[128..160]);
    b.mock.clean();
}

/// It starts after all, between the host's two looks, and nothing is behind it: then nothing was taken back, and the kernel is used as before.
#[test]
fn a_launch_that_starts_as_it_is_taken_back_is_waited_for_too() {
    let b = Bench::new("lane_late");
    b.mock.call_int("mock_hold_launches", 3);
    let ticket = b.submit(&b.words(0, 0, 20));
    let since = Instant::now();
    while b.mock.get("late") == 0 || since.elapsed() < Duration::from_millis(20) {
        assert!(!b.copier.poll(ticket).unwrap());
        assert!(since.elapsed() < LONG);
    }
    b.mock.call_int("mock_hold_launches", 0);
    b.copier.wait(ticket, LONG).unwrap();
    assert_eq!(b.mock.get("kernel_copies"), 20);
    assert!(b.device_bytes()[..160] == b.data[..160]);
    b.until_on();
    let stats = b.copier.stats();
    assert_eq!((stats.kernel_batches, stats.taken_back), (2, 0));
    assert_eq!(b.mock.get("kernel_copies"), 36);
    b.mock.clean();
}

/// Launches that start around the moment at which patience ends: whoever does the work, it is done in order.
#[test]
fn whoever_wins_the_race_the_last_ticket_is_last() {
    let b = Bench::new("lane_race");
    let mut taken = 0;
    for round in 0..60 {
        b.copier
            .set_stay(Duration::from_micros(round as u64 % 3 * 50));
        b.mock.call_int("mock_hold_launches", 1);
        let from = |i: usize| (round * 3 + i) * 1000;
        let tickets: Vec<u64> = (0..3).map(|i| b.submit(&b.words(0, from(i), 30))).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(50 + 10 * (round as u64 % 20)));
                b.mock.call_int("mock_hold_launches", 0);
            });
            b.copier.wait(tickets[2], LONG).unwrap();
        });
        assert!(tickets.iter().all(|&t| b.copier.poll(t).unwrap()));
        assert!(
            b.device_bytes()[..240] == b.data[from(2)..][..240],
            "round {round}"
        );
        let now = b.copier.stats().taken_back;
        if now != taken {
            taken = now;
            b.until_on();
        }
    }
    println!("{taken} launches taken back");
    b.mock.clean();
}

/// A profiler in the process lets launches wait for kernels, and says so nowhere.
#[test]
fn launches_that_take_long_time_after_time_are_given_up() {
    let b = Bench::new("lane_slow");
    b.mock.call_int("mock_slow_launches", 1000);
    b.done(&b.words(0, 0, 16));
    assert_eq!(b.mock.get("launches"), 1);
    // Once is chance.
    b.mock.call_int("mock_slow_launches", 0);
    b.until_on();
    b.mock.call_int("mock_slow_launches", 1000);
    let before = b.mock.get("launches");
    for from in 0..10 {
        b.done(&b.words(0, from * 1000, 16));
    }
    let launches = b.mock.get("launches");
    assert!(
        (1..=4).contains(&(launches - before)),
        "{before}, {launches}"
    );
    // For a second.
    b.mock.call_int("mock_slow_launches", 0);
    b.until_on();
    b.done(&b.words(128, 0, 16));
    b.done(&b.words(0, 9000, 16));
    let bytes = b.device_bytes();
    assert!(bytes[..128] == b.data[9000..9128] && bytes[128..256] == b.data[..128]);
    b.mock.clean();
}

/// A kernel's access of memory that is not mapped for its GPU would end the context: only what is known to be is copied so.
#[test]
fn memory_that_kernels_do_not_reach_is_the_engines() {
    let b = Bench::new("lane_reach");
    let (peer, peer_mapped) = (b.mock.foreign(4096, 1), b.mock.foreign_vmm(2 << 20, 1));
    let (own, own_mapped) = (b.mock.foreign(4096, 0), b.mock.foreign_vmm(2 << 20, 0));
    let ours = b.gpu.alloc(MemKind::Vmm, 4096).unwrap();
    for (at, launches) in [
        (peer, 0),
        (peer_mapped, 0),
        (own, 1),
        (own_mapped, 1),
        (ours.device_addr(), 1),
        (b.mock.foreign_owned(4096, 0), 1),
        (b.mock.foreign_owned(4096, 1), 0),
        (b.mock.foreign_owned(4096, 2), 1),
        (b.mock.foreign_owned(4096, 3), 0),
    ] {
        let before = b.counts().0;
        let words = b.words_to(at, 0, 20);
        b.done(&words);
        assert_eq!(b.counts().0 - before, launches, "{at:#x}");
        // Asked anew, the answer is the same.
        b.copier.forget_memory();
        b.done(&words);
        assert_eq!(b.counts().0 - before, 2 * launches, "{at:#x}");
    }
    // Opened for this GPU by another process's handle.
    let export = b.gpu.alloc(MemKind::Device, 4096).unwrap();
    let opened = b.gpu.import(&export.export().unwrap()).unwrap();
    let before = b.counts().0;
    b.done(&b.words_to(opened.device_addr(), 0, 20));
    assert_eq!(b.counts().0 - before, 1);
    b.mock.clean();
    // A mapping without a handle: the driver does not say who may use it.
    let b = Bench::with("lane_reach_mapped", &["-DNO_HANDLES"]);
    let mapped = b.mock.foreign_vmm(2 << 20, 0);
    let before = b.counts().0;
    b.done(&b.words_to(mapped, 0, 20));
    assert_eq!(b.counts().0 - before, 0);
    b.mock.clean();
}

/// What is mapped side by side in one reserved range need not be in one place.
#[test]
fn each_mapping_has_a_place_of_its_own() {
    const SIZE: usize = 2 << 20;
    let b = Bench::new("lane_pair");
    let (mixed, both) = (
        b.mock.foreign_pair(SIZE, true),
        b.mock.foreign_pair(SIZE, false),
    );
    let d = b.device.device_addr();
    let copy = |dst, src, len| vec![CopyOp { dst, src, len }; 1];
    // The host's half first, by which the other must not be judged.
    b.done(&copy(d, mixed, 8));
    let second = mixed + SIZE as u64;
    // SAFETY: refused.
    let error = unsafe { b.copier.submit(&copy(d, second, 8)) }.unwrap_err();
    assert!(matches!(error, GpuError::SameGpuCopy { .. }), "{error}");
    let then = b.counts().0;
    b.done(&copy(d, second, 8));
    assert_eq!(b.counts().0, then + 1, "within the GPU by the kernel");
    // Across the seam: in one place it is a range like any, in two it is none.
    // SAFETY: refused.
    let error = unsafe { b.copier.submit(&copy(d, second - 8, 16)) }.unwrap_err();
    assert!(matches!(error, GpuError::UnknownMemory { .. }), "{error}");
    // SAFETY: a buffer and mappings that outlive the copy.
    let ticket = unsafe {
        let (host, seam) = (b.host.device_addr(), both + SIZE as u64 - 8);
        b.copier.submit(&copy(host, seam, 16))
    };
    b.copier.wait(ticket.unwrap(), LONG).unwrap();
    b.mock.clean();
}

/// A launch that waits to start says that kernels run: then nothing is given back, since every free would wait for them.
#[test]
fn a_gpu_closes_though_a_launch_has_not_started_and_a_copy_is_stuck() {
    for (test, copy_too) in [("lane_close", false), ("lane_close_stuck", true)] {
        let b = Bench::new(test);
        let (live, events) = (b.mock.get("live"), b.mock.get("events"));
        b.mock.call_int("mock_hold_launches", 1);
        b.done(&b.words(0, 0, 20));
        if copy_too {
            b.mock.call_int("mock_hold_copies", 1);
            b.submit(&[b.op(0, 0, 100 << 10)]);
        }
        let (mock, took) = b.close();
        assert!(took < LONG);
        // All but the two buffers, which the caller gave up.
        assert_eq!((mock.get("streams"), mock.get("live")), (7, live - 2));
        assert!(mock.get("events") >= events);
        assert_eq!((mock.get("modules"), mock.get("releases")), (2, 0));
        mock.call_int("mock_hold_copies", 0);
        mock.call_int("mock_hold_launches", 0);
        assert_eq!(mock.get("kernel_copies"), 0);
        mock.clean();
    }
}
