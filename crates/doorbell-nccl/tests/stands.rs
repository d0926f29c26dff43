//! Ranks that stand still for less than they may, for longer, and that were told different things: what is well goes on, and the rest is named.
#![cfg(not(miri))]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::gin::{Signal, With};
use common::jobs::{Part, play};
use common::scenes::{go_on, refused, stop, stopped};
use common::{Gather, LONG, Pages, Rank, config, log_lines, on_the_host, told};

#[test]
#[ignore = "the other tests of this file run it in processes of its own"]
fn peer_process() {
    let part = Part::read();
    let (scene, rest) = part.scene.split_once(": ").unwrap_or((&part.scene, ""));
    if part.ranks.start == 0
        && let Some((name, value)) = rest.split_once('=')
    {
        // Of rank 0 alone.
        // SAFETY: before any thread that reads the environment.
        unsafe { std::env::set_var(name, value) };
    }
    on_the_host();
    part.play(|rank, gather, _| match scene {
        "stands" => stands(rank, gather),
        "rank 0 stands" => first_stands(rank, gather),
        "beats" => beats(rank, gather),
        "links" => {
            let words = ["DOORBELL_NCCL_LINK is ", "auto", "roce", "alike"];
            refused(rank, gather, &words);
        }
        "engine" => engine(rank, gather),
        "let go" => let_go(rank, gather),
        "registers" => registers(rank, gather, rest),
        "windows" => windows(rank, gather),
        "another's" => of_another(rank, gather),
        other => panic!("no scene is called {other}"),
    });
}

/// Once the other process has stopped: it goes on after so long.
fn goes_on(gather: &Gather, after: Duration) {
    let pid = stopped(gather);
    std::thread::spawn(move || {
        std::thread::sleep(after);
        go_on(pid);
    });
}

/// Longer than a step of a session takes, and than a queue pair repeats by itself.
const STANDS: Duration = Duration::from_secs(6);

/// The last rank stands still for less than it may, while the other writes to it and lets go of memory that it had.
fn stands(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let (pages, more) = (Pages::shared(4096), Pages::shared(4096));
    let (window, win) = one.register(&pages, 0);
    let (extra, _) = one.register(&more, 0);
    let context = one.create(config(1, 1, 1, 0));
    let gin = context.gin(0);
    gather.barrier(rank);
    let begin = Instant::now();
    match rank {
        0 => goes_on(gather, STANDS),
        _ => stop(gather),
    }
    let peer = 1 - rank;
    let signal = With::signal(Signal::Indexed(0), 1);
    gin.put(peer, (win, 8), (win, 0), 8, signal);
    // Memory that the other may be using: it is waited for, and nothing is leaked.
    one.deregister(extra);
    gin.flush(peer, LONG).expect("complete");
    gin.wait_signal(0, 1, LONG);
    assert!(begin.elapsed() >= STANDS);
    // Whoever thinks otherwise says so by now.
    std::thread::sleep(Duration::from_millis(500));
    assert!(!context.has_error(), "{:?}", log_lines());
    gather.barrier(rank);
    context.destroy();
    one.deregister(window);
    one.close();
    let lines = log_lines();
    let warned = lines.iter().any(|line| line.starts_with("2 "));
    assert!(!warned, "{lines:?}");
}

#[test]
fn who_stands_still_for_less_than_he_may_fails_nothing() {
    std::thread::scope(|scope| {
        for link in ["shm", "roce"] {
            scope.spawn(move || play("stands", 2, 1, &[("DOORBELL_NCCL_LINK", link)]));
        }
    });
}

/// Rank 0, through which all others hear of each other, stands still for longer than it may, and then goes on.
fn first_stands(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let context = one.create(config(1, 0, 1, 0));
    gather.barrier(rank);
    match rank {
        0 => stop(gather),
        1 => goes_on(gather, Duration::from_secs(3)),
        _ => {}
    }
    told(&context, LONG, &["rank 0 has not been heard of for"]);
    gather.barrier(rank);
    context.destroy();
    one.close();
}

#[test]
fn rank_0_learns_that_the_others_have_given_it_up() {
    for link in ["shm", "roce"] {
        let variables = [("DOORBELL_NCCL_ALIVE", "1"), ("DOORBELL_NCCL_LINK", link)];
        play("rank 0 stands", 3, 1, &variables);
    }
}

/// One rank bears less than the others: it hears of them often enough.
fn beats(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let context = one.create(config(1, 0, 1, 0));
    std::thread::sleep(Duration::from_secs(3));
    assert!(!context.has_error(), "{:?}", log_lines());
    gather.barrier(rank);
    context.destroy();
    one.close();
}

#[test]
fn ranks_that_bear_different_silences_miss_nobody() {
    for (first, others) in [("60", "1"), ("1", "60"), ("0", "1")] {
        let scene = format!("beats: DOORBELL_NCCL_ALIVE={first}");
        play(&scene, 3, 1, &[("DOORBELL_NCCL_ALIVE", others)]);
    }
}

/// Rank 0 is to use another link than the others.
#[test]
fn ranks_that_are_to_use_different_links_are_told_which() {
    for (first, others) in [("roce", "auto"), ("auto", "roce")] {
        let scene = format!("links: DOORBELL_NCCL_LINK={first}");
        play(&scene, 3, 1, &[("DOORBELL_NCCL_LINK", others)]);
    }
}

/// Rank 0's engine stands still for longer than it may.
fn engine(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let context = one.create(config(1, 0, 1, 0));
    told(
        &context,
        LONG,
        &["engine core 0 of this process has stood still"],
    );
    gather.barrier(rank);
    context.destroy();
    one.close();
}

#[test]
fn an_engine_that_stands_still_is_told_to_the_hosts_of_all_ranks() {
    let scene = "engine: DOORBELL_FAULT=at=1s: stall-engine=4s";
    play(scene, 2, 1, &[("DOORBELL_NCCL_ALIVE", "1")]);
}

/// A kernel waits for what a rank that stands still has not acknowledged, and will not: no queue pair of the two has failed.
fn let_go(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let pages = Pages::shared(4096);
    let (window, win) = one.register(&pages, 0);
    let context = one.create(config(1, 0, 1, 0));
    let gin = context.gin(0);
    gather.barrier(rank);
    if rank == 1 {
        stop(gather);
        told(&context, LONG, &["gave up"]);
    } else {
        let pid = stopped(gather);
        gin.put(1, (win, 8), (win, 0), 8, With::default());
        gin.flush(1, LONG).expect("let go");
        told(&context, LONG, &["rank 1 has not been heard of for"]);
        go_on(pid);
    }
    gather.barrier(rank);
    context.destroy();
    one.deregister(window);
    one.close();
}

#[test]
fn kernels_with_work_for_who_stands_still_are_let_go() {
    let variables = [
        ("DOORBELL_NCCL_ALIVE", "1"),
        ("DOORBELL_NCCL_LINK", "roce"),
        ("DOORBELL_ON_ERROR", "release"),
        // The queue pair itself waits for longer than the test.
        ("DOORBELL_ROCE_TIMEOUT", "24"),
    ];
    play("let go", 2, 1, &variables);
}

/// A communicator of ranks 0 and `with` of this job.
fn pair(rank: usize, with: usize, gather: &Gather) -> Rank {
    let pair = gather.beside(&format!("with-{with}"));
    Rank::connect(usize::from(rank > 0), &pair)
}

/// Rank 0 has a communicator with rank 1, which stands still, and one with rank 2, which that is nothing to.
fn of_another(rank: usize, gather: &Arc<Gather>) {
    let first = (rank < 2).then(|| pair(rank, 1, gather));
    let second = (rank != 1).then(|| pair(rank, 2, gather));
    let early = Pages::shared(4096);
    let early = second.as_ref().map(|one| one.register(&early, 0).0);
    gather.barrier(rank);
    if rank == 1 {
        stop(gather);
    }
    let pid = (rank == 0).then(|| stopped(gather));
    if let Some(one) = second {
        one.gather.barrier(one.rank);
        let begin = Instant::now();
        let pages = Pages::shared(4096);
        let (window, win) = one.register(&pages, 0);
        let context = one.create(config(1, 1, 1, 0));
        let gin = context.gin(0);
        let signal = With::signal(Signal::Indexed(0), 1);
        gin.put(1 - one.rank, (win, 8), (win, 0), 8, signal);
        gin.wait_signal(0, 1, LONG);
        gin.flush_all(LONG).expect("complete");
        one.gather.barrier(one.rank);
        context.destroy();
        one.deregister(window);
        early.into_iter().for_each(|early| one.deregister(early));
        assert!(begin.elapsed() < Duration::from_secs(5), "{begin:?}");
        one.gather.barrier(one.rank);
        one.close();
    }
    pid.into_iter().for_each(go_on);
    gather.barrier(rank);
    if let Some(one) = first {
        one.close();
    }
}

#[test]
fn who_stands_still_holds_up_no_communicator_but_his() {
    play("another's", 3, 1, &[("DOORBELL_NCCL_ALIVE", "20")]);
}

/// Rank 1 stands still for longer than a step may take, while rank 0 makes a context.
fn registers(rank: usize, gather: &Arc<Gather>, words: &str) {
    let one = Rank::connect(rank, gather);
    gather.barrier(rank);
    if rank == 1 {
        stop(gather);
        gather.barrier(rank);
        std::process::exit(0);
    }
    let pid = stopped(gather);
    let begin = Instant::now();
    let (status, _) = one.try_create(config(1, 1, 16, 0));
    assert_ne!(status, 0);
    assert!(begin.elapsed() < Duration::from_secs(12), "{begin:?}");
    let text = log_lines().join("\n");
    let named = format!("process {} (it is stopped", pid.as_raw_nonzero());
    for words in [&named[..], words] {
        assert!(text.contains(words), "{words}: {text}");
    }
    go_on(pid);
    gather.barrier(rank);
    std::process::exit(0);
}

#[test]
fn who_waits_for_memory_to_be_mapped_is_told_who_stands_still() {
    // Nothing but the time-out ends a step; and a rank is missed before it.
    let (none, one) = (("DOORBELL_NCCL_ALIVE", "0"), ("DOORBELL_NCCL_ALIVE", "1"));
    let timeout = ("DOORBELL_NCCL_TIMEOUT", "4");
    let shm = ("DOORBELL_NCCL_LINK", "shm");
    play(
        "registers: DOORBELL_NCCL_TIMEOUT",
        2,
        1,
        &[none, timeout, shm],
    );
    play("registers: rank 1 has not been heard of", 2, 1, &[one, shm]);
}

/// Rank 1 stands still with the windows of rank 0, which has given it up.
fn windows(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let pages: Vec<_> = (0..5).map(|_| Pages::shared(4096)).collect();
    let windows: Vec<_> = pages.iter().map(|p| one.register(p, 0).0).collect();
    let context = one.create(config(1, 0, 1, 0));
    gather.barrier(rank);
    if rank == 1 {
        stop(gather);
    } else {
        let pid = stopped(gather);
        told(&context, LONG, &["rank 1 has not been heard of for"]);
        let begin = Instant::now();
        for window in windows {
            let end = common::table().dereg_mr_sym.expect("deregMrSym");
            // Whether it was let go of or is kept mapped.
            // SAFETY: what `register` gave, once.
            unsafe { end(one.comm, window) };
        }
        // Two seconds for all, not for each.
        assert!(begin.elapsed() < Duration::from_secs(5), "{begin:?}");
        go_on(pid);
    }
    gather.barrier(rank);
    std::process::exit(0);
}

#[test]
fn who_stands_still_is_waited_for_once_however_many_windows_he_has() {
    let shm = ("DOORBELL_NCCL_LINK", "shm");
    play("windows", 2, 1, &[("DOORBELL_NCCL_ALIVE", "1"), shm]);
}
