//! Ranks as threads of one process, one to eight of them, and many.
#![cfg(not(miri))]

mod common;

use common::gin::{Signal, With};
use common::scenes::all_to_all;
use common::{LONG, Pages, config, threads};

#[test]
fn one_rank_talks_to_itself() {
    threads(1, |rank| all_to_all(rank, Pages::new, 4096));
}

#[test]
fn two_ranks_put_signal_count_and_get() {
    threads(2, |rank| all_to_all(rank, Pages::new, 100_003));
}

#[test]
fn eight_ranks_put_signal_count_and_get() {
    threads(8, |rank| all_to_all(rank, Pages::new, 1000));
}

#[test]
fn communicators_come_and_go() {
    for _ in 0..5 {
        threads(3, |rank| all_to_all(rank, Pages::new, 64));
    }
}

/// A process with as many ranks as a large node has GPUs, eight times over.
#[test]
#[ignore = "heavy: 64 ranks, 8320 queue pairs"]
fn heavy_sixty_four_ranks_of_small_contexts() {
    threads(64, |rank| {
        let pages = Pages::new(4096);
        let (window, win) = rank.register(&pages, 0);
        let context = rank.create(config(1, 1, 1, 64));
        let gin = context.gin(0);
        for peer in 0..64 {
            let with = With {
                counter: Some(0),
                ..With::signal(Signal::Indexed(0), 1)
            };
            let to = (win, 8 * (1 + rank.rank as u64));
            gin.put(peer, to, (win, 0), 8, with);
        }
        gin.wait_signal(0, 64, LONG);
        gin.wait_counter(0, 64, LONG);
        gin.flush_all(LONG).expect("complete");
        assert!(!context.has_error());
        rank.gather.barrier(rank.rank);
        context.destroy();
        rank.deregister(window);
    });
}
