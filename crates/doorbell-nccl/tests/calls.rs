//! Every call of NCCL's device interface, with every sharing mode and flag, between two ranks and to oneself.
#![cfg(not(miri))]

mod common;

use common::gin::{AGGREGATE, Gin, SKIP_CREDIT, Sharing, Signal, Win, With, wait};
use common::scenes::strict;
use common::{LONG, Pages, Rank, config, threads};

const LEN: usize = 1 << 16;

/// A rank with a window, a context or more, and what it takes to end them.
struct Bench<'a> {
    rank: &'a Rank,
    pages: Pages,
    window: *mut std::ffi::c_void,
    win: Win,
    context: common::Context,
}

impl<'a> Bench<'a> {
    fn new(rank: &'a Rank, contexts: i32, depth: i32, flags: u64) -> Self {
        let pages = Pages::new(LEN);
        let (window, win) = rank.register(&pages, flags);
        let context = rank.create(config(8, 8, contexts, depth));
        Self {
            rank,
            pages,
            window,
            win,
            context,
        }
    }

    fn gin(&self) -> Gin {
        self.context.gin(0)
    }

    fn next(&self) -> usize {
        (self.rank.rank + 1) % self.rank.ranks
    }

    fn barrier(&self) {
        self.rank.gather.barrier(self.rank.rank);
    }

    fn end(self) {
        assert!(!self.context.has_error());
        self.barrier();
        self.context.destroy();
        self.rank.deregister(self.window);
    }
}

fn bench(ranks: usize, body: impl Fn(&Bench<'_>) + Sync) {
    threads(ranks, |rank| {
        let b = Bench::new(rank, 1, 0, 0);
        body(&b);
        b.end();
    });
}

#[test]
fn values_of_every_width_arrive_where_they_were_sent() {
    bench(2, |b| {
        let gin = b.gin().shared(Sharing::Thread);
        let me = b.rank.rank as u8;
        for (width, offset) in [(1, 0), (2, 10), (4, 20), (8, 32)] {
            let value: Vec<u8> = (0..width).map(|i| me * 16 + i + 1).collect();
            gin.put_value(
                b.next(),
                (b.win, offset),
                &value,
                Some((Signal::Indexed(0), 1)),
            );
        }
        gin.wait_signal(0, 4, LONG);
        let other = b.next() as u8;
        for (width, offset) in [(1, 0), (2, 10), (4, 20), (8, 32)] {
            let want: Vec<u8> = (0..width).map(|i| other * 16 + i + 1).collect();
            assert_eq!(b.pages.read(offset, width as usize), want);
            // Not a byte more than that.
            assert_eq!(b.pages.read(offset + width as usize, 2), [0, 0]);
        }
        gin.flush_all(LONG).expect("complete");
    });
}

#[test]
fn signals_add_and_may_be_any_word_of_a_window() {
    bench(2, |b| {
        let gin = b.gin();
        let peer = b.next();
        gin.signal(peer, Signal::Indexed(7), u64::MAX - 4, None);
        gin.signal(peer, Signal::Indexed(7), 10, None);
        // 5 after a wrap: the whole word is added, not its lower half.
        wait(
            || u64::from(gin.read_signal(7) == 5),
            1,
            LONG,
            "signal 7 is 5",
        );
        gin.signal(peer, Signal::Va(b.win, 4096), 1 << 40, None);
        gin.signal(peer, Signal::Va(b.win, 4096), 3, None);
        wait(
            || b.pages.word(4096),
            (1 << 40) + 3,
            LONG,
            "a word of the window",
        );
        assert_eq!(gin.read_signal(6), 0);
        gin.reset_signal(7);
        b.barrier();
        gin.signal(peer, Signal::Indexed(7), 2, None);
        assert_eq!(gin.wait_signal(7, 2, LONG), 2, "counted anew after a reset");
        gin.flush_all(LONG).expect("complete");
    });
}

#[test]
fn counters_count_what_is_complete_and_nothing_else() {
    bench(2, |b| {
        let gin = b.gin();
        for round in 1..=50u64 {
            let with = With {
                counter: Some(3),
                signal: (round % 2 == 0).then_some((Signal::Indexed(1), 1)),
                ..With::default()
            };
            b.pages.write(0, &round.to_ne_bytes());
            gin.put(b.next(), (b.win, 1024), (b.win, 0), 8, with);
            gin.wait_counter(3, round, LONG);
            // The source is free again: the counter says so.
            assert_eq!(gin.read_counter(3), round);
        }
        gin.signal(b.next(), Signal::Indexed(2), 1, Some(4));
        gin.wait_counter(4, 1, LONG);
        gin.wait_signal(1, 25, LONG);
        gin.wait_signal(2, 1, LONG);
        assert_eq!(b.pages.word(1024), 50);
        assert_eq!((0..8).map(|i| gin.read_counter(i)).sum::<u64>(), 51);
        gin.reset_counter(3);
        gin.put(
            b.next(),
            (b.win, 1024),
            (b.win, 0),
            8,
            With {
                counter: Some(3),
                ..With::default()
            },
        );
        gin.wait_counter(3, 1, LONG);
    });
}

#[test]
fn gets_are_visible_after_a_flush() {
    bench(2, |b| {
        let me = b.rank.rank;
        let fill: Vec<u8> = (0..4096).map(|i| (i * 3 + me * 77) as u8).collect();
        b.pages.write(0, &fill);
        b.barrier();
        let gin = b.gin();
        for (n, size) in [0u64, 1, 8, 100, 4096].into_iter().enumerate() {
            let to = 8192 + 8192 * n as u64;
            gin.get(b.next(), (b.win, 0), (b.win, to), size);
            gin.flush(b.next(), LONG).expect("complete");
            let want: Vec<u8> = (0..size as usize)
                .map(|i| (i * 3 + b.next() * 77) as u8)
                .collect();
            assert_eq!(b.pages.read(to as usize, size as usize), want);
            assert_eq!(b.pages.read(to as usize + size as usize, 1), [0]);
        }
        gin.flush_all(LONG).expect("nothing is left");
        b.barrier();
    });
}

#[test]
fn puts_of_nothing_complete_and_signal() {
    bench(2, |b| {
        let gin = b.gin();
        let with = With {
            signal: Some((Signal::Indexed(0), 1)),
            counter: Some(0),
            ..With::default()
        };
        gin.put(b.next(), (b.win, 0), (b.win, 0), 0, with);
        gin.put(b.next(), (b.win, 0), (b.win, 0), 0, With::default());
        gin.get(b.next(), (b.win, 0), (b.win, 0), 0);
        gin.wait_signal(0, 1, LONG);
        gin.wait_counter(0, 1, LONG);
        gin.flush_all(LONG).expect("complete");
    });
}

/// Many threads of one rank post to one queue, which wraps many times; the sum of the signals says that nothing was lost.
fn hammer(sharing: Sharing, threads_each: usize, opts: u32) {
    threads(2, |rank| {
        // Less than one lap: this is about the wrap.
        let b = Bench::new(rank, 1, 64, 0);
        let each = 400;
        std::thread::scope(|scope| {
            for thread in 0..threads_each {
                let (gin, win, peer) = (b.gin().shared(sharing), b.win, b.next());
                let at = 8 * thread as u64;
                scope.spawn(move || {
                    for _ in 0..each {
                        let with = With {
                            signal: Some((Signal::Indexed(0), 1)),
                            opts,
                            counter: None,
                        };
                        gin.put(peer, (win, 4096 + at), (win, at), 8, with);
                    }
                });
            }
        });
        let gin = b.gin();
        gin.wait_signal(0, (each * threads_each) as u64, LONG);
        gin.flush_all(LONG).expect("complete");
        assert_eq!(gin.read_signal(0), (each * threads_each) as u64);
        b.end();
    });
}

#[test]
fn a_ring_wraps_in_every_sharing_mode() {
    for (sharing, threads) in [(Sharing::Gpu, 4), (Sharing::Cta, 3), (Sharing::Thread, 1)] {
        hammer(sharing, threads, 0);
    }
}

#[test]
fn flags_that_skip_the_credit_check_or_the_bell_lose_nothing() {
    threads(2, |rank| {
        let b = Bench::new(rank, 1, 256, 0);
        let gin = b.gin();
        // As many as fit without looking, rung by the last alone where the handler honours that.
        for i in 0..100u64 {
            let opts = SKIP_CREDIT | if i < 99 { AGGREGATE } else { 0 };
            b.pages.write(8 * i as usize, &(i + 1).to_ne_bytes());
            let with = With {
                signal: Some((Signal::Indexed(0), 1)),
                opts,
                counter: None,
            };
            gin.put(b.next(), (b.win, 4096 + 8 * i), (b.win, 8 * i), 8, with);
        }
        gin.wait_signal(0, 100, LONG);
        for i in 0..100 {
            assert_eq!(b.pages.word(4096 + 8 * i), i as u64 + 1);
        }
        gin.flush_all(LONG).expect("complete");
        b.end();
    });
}

#[test]
fn contexts_have_their_own_queues_signals_and_counters() {
    threads(2, |rank| {
        let b = Bench::new(rank, 4, 0, 0);
        for c in 0..4u32 {
            let gin = b.context.gin(c as usize);
            for _ in 0..=c {
                let with = With {
                    signal: Some((Signal::Indexed(5), 1)),
                    counter: Some(2),
                    ..With::default()
                };
                gin.put(b.next(), (b.win, 4096), (b.win, 0), 16, with);
            }
        }
        for c in 0..4u32 {
            let gin = b.context.gin(c as usize);
            gin.wait_signal(5, u64::from(c) + 1, LONG);
            gin.wait_counter(2, u64::from(c) + 1, LONG);
        }
        b.barrier();
        let mut numbers: Vec<u32> = Vec::new();
        for c in 0..4usize {
            let gin = b.context.gin(c);
            assert_eq!(
                (gin.read_signal(5), gin.read_counter(2)),
                (c as u64 + 1, c as u64 + 1)
            );
            assert_eq!(
                (0..8).map(|i| gin.read_signal(i)).sum::<u64>(),
                c as u64 + 1
            );
            numbers.extend((0..2).flat_map(|p| [gin.qp(p).number(), gin.companion(p).number()]));
            assert!(gin.qp(0).depth() >= 64);
        }
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 16, "every queue pair is another one");
        b.end();
    });
}

#[test]
fn contexts_for_older_headers_lie_closer_together() {
    threads(2, |rank| {
        let pages = Pages::new(4096);
        let (window, win) = rank.register(&pages, 0);
        let mut config = config(4, 0, 3, 0);
        config.backend_version = 1;
        let context = rank.create(config);
        let peer = (rank.rank + 1) % 2;
        for c in 0..3 {
            let gin = context.gin(c);
            gin.put(
                peer,
                (win, 8),
                (win, 0),
                8,
                With::signal(Signal::Indexed(c as u32), 1),
            );
            gin.wait_signal(c as u32, 1, LONG);
        }
        rank.gather.barrier(rank.rank);
        context.destroy();
        rank.deregister(window);
    });
}

#[test]
fn several_device_communicators_share_windows() {
    threads(2, |rank| {
        let pages = Pages::new(4096);
        let (window, win) = rank.register(&pages, 0);
        let peer = (rank.rank + 1) % 2;
        let contexts: Vec<_> = (0..3).map(|_| rank.create(config(1, 1, 2, 0))).collect();
        // A window that comes later is known to those that are there.
        let late = Pages::new(4096);
        let (late_window, late_win) = rank.register(&late, 0);
        for (n, context) in contexts.iter().enumerate() {
            let gin = context.gin(1);
            pages.write(0, &[n as u8 + 1; 8]);
            gin.put(
                peer,
                (late_win, 16),
                (win, 0),
                8,
                With::signal(Signal::Indexed(0), 1),
            );
            gin.wait_signal(0, 1, LONG);
            assert_eq!(late.read(16, 8), [n as u8 + 1; 8]);
            rank.gather.barrier(rank.rank);
        }
        for context in contexts {
            context.destroy();
        }
        rank.deregister(late_window);
        rank.deregister(window);
    });
}

#[test]
fn strictly_ordered_windows_show_writes_in_their_order() {
    threads(2, |rank| strict(rank, Pages::new, 200));
}

/// One byte more than two requests carry, from memory of zeroes with a mark at its end.
fn beyond_one_request(target: impl Fn(usize) -> Pages + Sync, marks: &[usize]) {
    let len = (1usize << 30) + 4096;
    threads(1, |rank| {
        let (source, target) = (Pages::new(len), target(len));
        for (n, at) in marks.iter().enumerate() {
            source.write(*at, &[n as u8 + 1; 8]);
        }
        let (s, from) = rank.register(&source, 0);
        let (t, to) = rank.register(&target, 0);
        let context = rank.create(config(1, 1, 1, 0));
        let gin = context.gin(0);
        let with = With {
            signal: Some((Signal::Indexed(0), 1)),
            counter: Some(0),
            ..With::default()
        };
        gin.put(0, (to, 0), (from, 0), len as u64, with);
        gin.wait_signal(0, 1, LONG);
        gin.wait_counter(0, 1, LONG);
        gin.flush_all(LONG).expect("complete");
        for (n, at) in marks.iter().enumerate() {
            assert_eq!(target.read(*at, 8), [n as u8 + 1; 8], "at {at}");
        }
        context.destroy();
        rank.deregister(t);
        rank.deregister(s);
    });
}

#[test]
fn more_than_a_gibibyte_goes_in_pieces() {
    // Zeroes that are only read take no memory, and the target is the same 2 MiB again and again.
    beyond_one_request(Pages::repeated, &[(1 << 30) + 4088]);
}

#[test]
#[ignore = "heavy: a GiB of memory that is written"]
fn heavy_every_piece_of_more_than_a_gibibyte_is_where_it_belongs() {
    beyond_one_request(
        Pages::new,
        &[0, 4096, (1 << 30) - 8, 1 << 30, (1 << 30) + 4088],
    );
}
