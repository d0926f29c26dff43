//! Ranks as threads of one process: everything that device code does, on one to eight ranks.
#![cfg(not(miri))]

mod common;

use common::gin::{Signal, With};
use common::{LONG, Pages, Rank, config, threads};

/// A pattern that says from whom, to whom and where.
fn pattern(from: usize, to: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i * 7 + from * 31 + to * 101 + i / 256) as u8)
        .collect()
}

/// Every rank puts to every rank, itself included, and signals.
fn all_to_all(rank: &Rank, len: usize) {
    let (me, ranks) = (rank.rank, rank.ranks);
    let (source, target) = (Pages::new(ranks * len), Pages::new(ranks * len));
    for to in 0..ranks {
        source.write(to * len, &pattern(me, to, len));
    }
    let (s, from) = rank.register(&source, 0);
    let (t, to) = rank.register(&target, 0);
    let context = rank.create(config(2, 0, 1, 0));
    let gin = context.gin(0);
    for peer in 0..ranks {
        let (dst, src) = ((to, (me * len) as u64), (from, (peer * len) as u64));
        gin.put(
            peer,
            dst,
            src,
            len as u64,
            With::signal(Signal::Indexed(1), 1),
        );
    }
    gin.wait_signal(1, ranks as u64, LONG);
    for peer in 0..ranks {
        assert!(
            target.read(peer * len, len) == pattern(peer, me, len),
            "from {peer} to {me}"
        );
    }
    gin.flush_all(LONG).expect("complete");
    assert_eq!((gin.read_signal(0), gin.read_signal(1)), (0, ranks as u64));
    assert!(!context.has_error());
    rank.gather.barrier(me);
    context.destroy();
    rank.deregister(t);
    rank.deregister(s);
}

#[test]
fn one_rank_talks_to_itself() {
    threads(1, |rank| all_to_all(rank, 4096));
}

#[test]
fn two_ranks_put_and_signal() {
    threads(2, |rank| all_to_all(rank, 100_003));
}

#[test]
fn eight_ranks_put_and_signal() {
    threads(8, |rank| all_to_all(rank, 1000));
}
