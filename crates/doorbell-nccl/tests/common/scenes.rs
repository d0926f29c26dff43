//! Scenes that ranks play whether they are threads or processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal as Unix, getpid, kill_process};

use super::gin::{Gin, Signal, Win, With, wait};
use super::{Gather, LONG, Pages, Rank, config, log_lines, soon};

/// A rank from its beginning to its end.
pub fn whole(rank: usize, gather: &Arc<Gather>, body: impl Fn(&Rank)) {
    let one = Rank::connect(rank, gather);
    body(&one);
    one.gather.barrier(rank);
    one.close();
}

/// The communicator does not come about, for a reason that the log names in all of these words.
pub fn refused(rank: usize, gather: &Arc<Gather>, words: &[&str]) {
    let mut one = Rank::init(rank, gather);
    let (listening, handles) = one.listen();
    let begin = Instant::now();
    assert_ne!(one.join(&handles, listening), 0);
    // Not after the time-out of a step, a minute here, nor of a packet.
    assert!(begin.elapsed() < Duration::from_secs(20), "{begin:?}");
    let text = log_lines().join("\n");
    assert!(words.iter().all(|w| text.contains(w)), "{text}");
    gather.barrier(rank);
}

/// This process stops; another has to let it go on ([`stopped`], [`go_on`]).
pub fn stop(gather: &Gather) {
    let named = gather.folder().join("pid");
    std::fs::write(&named, getpid().as_raw_nonzero().to_string()).expect("written");
    kill_process(getpid(), Unix::STOP).expect("stopped");
}

/// The process that stops, once it has.
pub fn stopped(gather: &Gather) -> Pid {
    let named = gather.folder().join("pid");
    let number = || {
        std::fs::read_to_string(&named)
            .ok()
            .and_then(|n| n.parse().ok())
    };
    assert!(soon(LONG, || number().is_some()), "nobody stopped");
    let pid = number().and_then(Pid::from_raw).expect("a process");
    let stopped = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
        stat.is_ok_and(|text| text.contains(") T "))
    };
    assert!(soon(LONG, stopped), "it does not stop");
    pid
}

pub fn go_on(pid: Pid) {
    kill_process(pid, Unix::CONT).expect("it goes on");
}

/// Every rank puts a word with a signal to every rank, itself included, and has all of theirs.
pub fn one_round(one: &Rank, gin: Gin, win: Win) {
    for peer in 0..one.ranks {
        let signal = With::signal(Signal::Indexed(0), 1);
        gin.put(peer, (win, 8), (win, 0), 8, signal);
    }
    gin.wait_signal(0, one.ranks as u64, LONG);
    gin.flush_all(LONG).expect("complete");
}

/// A pattern that says from whom, to whom and where.
pub fn pattern(from: usize, to: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i * 7 + from * 31 + to * 101 + i / 256) as u8)
        .collect()
}

/// Every rank puts to every rank, itself included, signals and counts; then gets back what it put.
pub fn all_to_all(rank: &Rank, pages: impl Fn(usize) -> Pages, len: usize) {
    let (me, ranks) = (rank.rank, rank.ranks);
    let (source, target) = (pages(ranks * len), pages(2 * ranks * len));
    for to in 0..ranks {
        source.write(to * len, &pattern(me, to, len));
    }
    let (s, from) = rank.register(&source, 0);
    let (t, to) = rank.register(&target, 0);
    let context = rank.create(config(2, 1, 1, 0));
    let gin = context.gin(0);
    let at = |r: usize| (r * len) as u64;
    for peer in 0..ranks {
        let with = With {
            counter: Some(0),
            ..With::signal(Signal::Indexed(1), 1)
        };
        gin.put(peer, (to, at(me)), (from, at(peer)), len as u64, with);
    }
    gin.wait_signal(1, ranks as u64, LONG);
    for peer in 0..ranks {
        assert!(
            target.read(peer * len, len) == pattern(peer, me, len),
            "from {peer} to {me}"
        );
    }
    gin.wait_counter(0, ranks as u64, LONG);
    for peer in 0..ranks {
        gin.get(peer, (to, at(me)), (to, at(ranks + peer)), len as u64);
    }
    gin.flush_all(LONG).expect("complete");
    for peer in 0..ranks {
        assert!(
            target.read((ranks + peer) * len, len) == pattern(me, peer, len),
            "back from {peer} to {me}"
        );
    }
    assert_eq!((gin.read_signal(0), gin.read_signal(1)), (0, ranks as u64));
    assert!(!context.has_error());
    rank.gather.barrier(me);
    context.destroy();
    rank.deregister(t);
    rank.deregister(s);
}

/// Data, then a flag, without a signal between them, in a window that asks for that order.
pub fn strict(rank: &Rank, pages: impl Fn(usize) -> Pages, rounds: u64) {
    let pages = pages(1 << 16);
    let (window, win) = rank.register(&pages, 1);
    let context = rank.create(config(1, 0, 1, 0));
    let gin = context.gin(0);
    let peer = (rank.rank + 1) % rank.ranks;
    for round in 1..=rounds {
        pages.write(0, &[round as u8; 1024]);
        pages.write(1024, &round.to_ne_bytes());
        // Rung together, so that they are carried out together where that is possible.
        let later = With {
            opts: super::gin::AGGREGATE,
            ..With::default()
        };
        gin.put(peer, (win, 8192), (win, 0), 1024, later);
        gin.put(peer, (win, 16384), (win, 1024), 8, With::default());
        wait(|| pages.word(16384), round, LONG, "the flag");
        assert!(pages.read(8192, 1024) == [round as u8; 1024], "the data");
        gin.flush_all(LONG).expect("complete");
        rank.gather.barrier(rank.rank);
    }
    assert!(!context.has_error());
    context.destroy();
    rank.deregister(window);
}
