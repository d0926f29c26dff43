//! Ranks that fail, or stand still, while others wait for them in a step: nobody waits for the time-out of the step.
#![cfg(not(miri))]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::gin::{Signal, With};
use common::jobs::{Part, play};
use common::scenes::{go_on, stop, stopped};
use common::{Gather, LONG, Pages, Rank, config, log_lines, on_the_host, soon, told};
use doorbell::Bootstrap;
use doorbell_nccl::Handle;

#[test]
#[ignore = "the other tests of this file run it in processes of its own"]
fn peer_process() {
    let part = Part::read();
    if part.scene.starts_with("fails") {
        part.fail_a_request();
    }
    on_the_host();
    part.play(|rank, gather, scene| match scene {
        "fails, awaited" => fails(rank, gather, rank > 0),
        "fails, waiting" => fails(rank, gather, rank == 0),
        "fails, its log stands still" => log_stands_still(rank, gather, "to rank 1: WQE 9"),
        // A line of the engine's own, with DOORBELL_LOG=debug.
        "fails, its engine's log stands still" => {
            log_stands_still(rank, gather, "queue pair to error");
        }
        "too fast" => too_fast(rank, gather),
        "stops" => stops(rank, gather),
        "links, exits" | "links, fails" | "links, stops" => between_steps(rank, gather, scene),
        other => panic!("no scene is called {other}"),
    });
}

/// A work request of rank 0 fails while some ranks are in a step that the others do not come to.
fn fails(rank: usize, gather: &Arc<Gather>, waits: bool) {
    let one = Rank::connect(rank, gather);
    let pages = Pages::shared(4096);
    let (window, win) = one.register(&pages, 0);
    let context = one.create(config(1, 1, 1, 64));
    gather.barrier(rank);
    std::thread::scope(|scope| {
        if rank == 0 {
            let gin = context.gin(0);
            scope.spawn(move || {
                // Those that wait are in their step by then, and this rank too if it is to be.
                std::thread::sleep(Duration::from_millis(300));
                for _ in 0..20 {
                    gin.put(
                        1,
                        (win, 8),
                        (win, 0),
                        8,
                        With::signal(Signal::Indexed(0), 1),
                    );
                }
            });
        }
        let begin = Instant::now();
        if waits {
            let (status, _) = one.try_create(config(1, 0, 1, 0));
            assert_ne!(status, 0);
            // The time-out of a step is a minute here.
            assert!(begin.elapsed() < Duration::from_secs(10), "{begin:?}");
        }
        let who = if rank == 0 { "to rank 1" } else { "rank 0" };
        told(&context, Duration::from_secs(5), &["WQE 9", who]);
        println!("rank {rank}: told after {} ms", begin.elapsed().as_millis());
    });
    gather.barrier(rank);
    context.destroy();
    one.deregister(window);
    one.close();
}

#[test]
fn a_failure_is_heard_by_those_that_wait_in_a_step_and_of_one_that_does() {
    for link in ["shm", "roce"] {
        for scene in ["fails, awaited", "fails, waiting"] {
            play(scene, 3, 1, &[("DOORBELL_NCCL_LINK", link)]);
        }
    }
}

/// The last rank stands still; a slow one is none of that.
fn stops(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    if rank == 1 {
        // Longer than a rank may stand still: the others wait for it in a step.
        std::thread::sleep(Duration::from_secs(5));
    }
    let context = one.create(config(1, 0, 1, 0));
    assert!(!context.has_error(), "{:?}", log_lines());
    gather.barrier(rank);
    let last = one.ranks - 1;
    if rank == last {
        stop(gather);
        // It goes on, and learns what the others think of it.
        told(&context, LONG, &["gave up", "rank 2"]);
    } else {
        let words = [&format!("rank {last} has not been heard of for")[..]];
        told(&context, Duration::from_secs(20), &words);
        if rank == 0 {
            let text = log_lines().join("\n");
            assert!(text.contains("is stopped"), "{text}");
        }
    }
    // Both have heard; then it may go on.
    std::fs::write(gather.folder().join(format!("heard-{rank}")), b"").expect("written");
    if rank == 0 {
        let heard = || gather.folder().join("heard-1").exists();
        assert!(soon(LONG, heard), "rank 1 has not");
        go_on(stopped(gather));
    }
    gather.barrier(rank);
    context.destroy();
    one.close();
}

#[test]
fn a_process_that_stands_still_is_missed_and_a_slow_one_is_not() {
    play("stops", 3, 1, &[("DOORBELL_NCCL_ALIVE", "3")]);
}

/// Rank 1 takes the first step of `connect`, and then the others wait for it to dial, or to answer.
fn between_steps(rank: usize, gather: &Arc<Gather>, scene: &str) {
    let mut one = Rank::init(rank, gather);
    let (listening, handles) = one.listen();
    let begin = Instant::now();
    if rank == 1 {
        let first = handles[0].as_slice().try_into().expect("a handle");
        let first = Handle::decode(first, 0).expect("of this release");
        let world = one.ranks as u32;
        let at = first.places(first.host);
        let mut mesh = Bootstrap::attend(&at, &first.secret, 1, world, LONG).expect("a seat");
        mesh.keep_alive(Duration::from_secs(2));
        // Its card: an HCA of its own, on this host, and a name that nobody has.
        let card = [1, first.host, 2, 0].map(u64::to_le_bytes).concat();
        let step = [&[7][..], b"connect", &[0], &card].concat();
        mesh.all_gather(&step).expect("the first step");
        match scene {
            "links, exits" => std::process::exit(0),
            "links, fails" => mesh.fail("it has no links today"),
            _ => {}
        }
        gather.barrier(rank);
        return;
    }
    let status = one.join(&handles, listening);
    assert_ne!(status, 0);
    // The time-out of a step is a minute here.
    assert!(begin.elapsed() < Duration::from_secs(20), "{begin:?}");
    let text = log_lines().join("\n");
    let says = match scene {
        "links, exits" => "lost rank 1",
        "links, fails" => "rank 1 has failed: it has no links today",
        _ => "rank 1 has not been heard of for",
    };
    assert!(text.contains(says), "{text}");
    if scene != "links, exits" {
        gather.barrier(rank);
    }
}

#[test]
fn a_rank_that_is_lost_while_links_are_made_is_named_at_once() {
    for scene in ["links, exits", "links, fails", "links, stops"] {
        play(scene, 3, 1, &[("DOORBELL_NCCL_ALIVE", "2")]);
    }
}

/// A work request of rank 0 fails, and the log of its host takes a line with these words only after a while: that is no death, and keeps nobody
/// from hearing of the failure.
fn log_stands_still(rank: usize, gather: &Arc<Gather>, words: &'static str) {
    let time = Duration::from_secs(7);
    if rank == 0 {
        let _ = common::HOLD_UP.set((words, time));
    }
    let one = Rank::connect(rank, gather);
    let pages = Pages::shared(4096);
    let (window, win) = one.register(&pages, 0);
    let context = one.create(config(1, 1, 1, 64));
    gather.barrier(rank);
    if rank == 0 {
        let gin = context.gin(0);
        for _ in 0..20 {
            let signal = With::signal(Signal::Indexed(0), 1);
            gin.put(1, (win, 8), (win, 0), 8, signal);
        }
    }
    assert!(soon(time / 2, || context.has_error()), "{:?}", log_lines());
    let logged = |words: &str| log_lines().iter().any(|line| line.contains(words));
    assert!(soon(LONG, || logged("WQE 9")), "{:?}", log_lines());
    assert!(rank > 0 || logged(words), "{:?}", log_lines());
    // All that was said meanwhile is there when the last communicator ends.
    gather.barrier(rank);
    context.destroy();
    one.deregister(window);
    one.close();
    for death in ["has not been heard of", "has stood still"] {
        assert!(!logged(death), "{:?}", log_lines());
    }
}

#[test]
fn a_log_that_stands_still_is_no_death() {
    let alive = ("DOORBELL_NCCL_ALIVE", "2");
    play("fails, its log stands still", 2, 1, &[alive]);
    let variables = [alive, ("DOORBELL_LOG", "debug")];
    play("fails, its engine's log stands still", 2, 1, &variables);
}

/// More queue pairs of one communicator fail than events are kept, while the log holds up who takes them; one of another fails among them.
fn too_fast(rank: usize, gather: &Arc<Gather>) {
    const CONTEXTS: usize = 2600;
    let _ = common::HOLD_UP.set(("failed", Duration::from_millis(190)));
    let other = gather.beside("other");
    let (many, one) = (Rank::connect(rank, gather), Rank::connect(rank, &other));
    let pages = [Pages::shared(4096), Pages::shared(4096)];
    let (_, at) = many.register(&pages[0], 0);
    let (_, alone) = one.register(&pages[1], 0);
    let flood = many.create(config(1, 0, CONTEXTS as i32, 64));
    let context = one.create(config(1, 0, 1, 0));
    gather.barrier(rank);
    if rank == 0 {
        let beyond = |gin: common::gin::Gin, peer, win| {
            gin.put(peer, (win, 5000), (win, 0), 8, With::default());
        };
        beyond(flood.gin(0), 0, at);
        // Its line is being written.
        let written = || log_lines().iter().any(|line| line.contains("failed"));
        assert!(soon(LONG, written), "{:?}", log_lines());
        beyond(context.gin(0), 1, alone);
        assert!(context.gin(0).flush(1, LONG).is_err());
        for k in 1..CONTEXTS {
            beyond(flood.gin(k), 1, at);
            beyond(flood.gin(k), 0, at);
        }
        told(&context, LONG, &["to rank 1"]);
    }
    gather.barrier(rank);
    std::process::exit(0);
}

#[test]
fn a_failure_among_more_than_are_kept_is_told() {
    play("too fast", 2, 2, &[("DOORBELL_NCCL_LINK", "shm")]);
}
