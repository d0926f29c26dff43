//! Ranks as processes of one host, and the death of one: each test starts this test program again as the other ranks.
#![cfg(not(miri))]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::gin::{Failed, Signal, With};
use common::jobs::{Part, play, start};
use common::scenes::{all_to_all, one_round, whole};
use common::{Context, Gather, LONG, Pages, Rank, config, log_lines, logged, on_the_host, soon};

#[test]
#[ignore = "the other tests of this file run it in processes of its own"]
fn peer_process() {
    let part = Part::read();
    if part.scene.starts_with("fault") {
        part.fail_a_request();
    }
    on_the_host();
    part.play(|rank, gather, scene| match scene {
        "fault report" => fault(rank, gather, false),
        "fault release" => fault(rank, gather, true),
        "shared" => whole(rank, gather, |r| all_to_all(r, Pages::shared, 50_000)),
        "plain" => whole(rank, gather, |r| all_to_all(r, Pages::new, 20_000)),
        "leave" => leave(rank, gather),
        "leave late" => leave_late(rank, gather),
        "dies at work" => dies_at_work(rank, gather),
        "late" => late(rank, gather),
        "dies, its child lives" => dies_and_its_child_lives(rank, gather),
        "a child ends it" => a_child_ends_it(rank, gather),
        "init names it" => init_names_it(gather),
        "no more files" => no_more_files(rank, gather),
        step => dies_between(rank, gather, step.parse().expect("a scene")),
    });
}

#[test]
fn three_processes_reach_each_other_by_shared_memory() {
    play("shared", 3, 1, &[("DOORBELL_NCCL_LINK", "shm")]);
}

#[test]
fn two_processes_of_two_ranks_mix_loopback_and_shared_memory() {
    play("shared", 4, 2, &[]);
}

#[test]
fn two_processes_reach_each_other_by_packets() {
    play("plain", 2, 1, &[("DOORBELL_NCCL_LINK", "roce")]);
}

#[test]
fn ranks_of_one_process_may_use_packets_too() {
    play("plain", 2, 2, &[("DOORBELL_NCCL_LINK", "roce")]);
}

/// Who leaves in order is no error for those that stay a while.
fn leave(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let pages = Pages::shared(4096);
    let (window, win) = one.register(&pages, 0);
    let context = one.create(config(1, 0, 1, 0));
    one_round(&one, context.gin(0), win);
    gather.barrier(rank);
    // One after the other, rank 0 as the second, with time between them for a death to be noticed.
    let turn = (rank + 1) % one.ranks;
    std::thread::sleep(Duration::from_millis(400) * turn as u32);
    assert!(!context.has_error(), "{:?}", log_lines());
    context.destroy();
    one.deregister(window);
    one.close();
    let warnings: Vec<_> = log_lines()
        .into_iter()
        .filter(|l| l.starts_with("2 "))
        .collect();
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn leaving_in_order_is_no_error_for_those_that_stay() {
    for link in ["shm", "roce"] {
        play("leave", 3, 1, &[("DOORBELL_NCCL_LINK", link)]);
    }
}

/// A communicator that is closed before its contexts, which NCCL may never end: that is no death either.
fn leave_late(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let context = one.create(config(1, 0, 1, 0));
    gather.barrier(rank);
    if rank == 1 {
        let status = common::unsafe_one(common::table().close_coll, one.comm);
        assert_eq!(status, 0);
        // Its process ends without another word, when the others have looked.
        gather.barrier(rank);
        return;
    }
    std::thread::sleep(Duration::from_millis(300));
    assert!(!context.has_error(), "{:?}", log_lines());
    gather.barrier(rank);
    std::thread::sleep(Duration::from_millis(200));
    assert!(!context.has_error(), "{:?}", log_lines());
    context.destroy();
    one.close();
}

#[test]
fn a_communicator_that_is_closed_before_its_contexts_has_left_in_order() {
    for link in ["shm", "roce"] {
        play("leave late", 2, 1, &[("DOORBELL_NCCL_LINK", link)]);
    }
}

/// The last rank dies while the others have work for it.
fn dies_at_work(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let pages = Pages::shared(1 << 16);
    let (_, win) = one.register(&pages, 0);
    let context = one.create(config(1, 1, 1, 0));
    let gin = context.gin(0);
    one.gather.barrier(rank);
    let last = one.ranks - 1;
    if rank == last {
        std::process::abort();
    }
    let died = Instant::now();
    assert!(
        soon(Duration::from_secs(5), || context.has_error()),
        "nobody told this rank: {:?}",
        log_lines()
    );
    let text = log_lines().join("\n");
    assert!(text.contains(&format!("rank {last}")), "{text}");
    std::fs::write(
        gather.folder().join(format!("heard-{rank}")),
        format!("{}", died.elapsed().as_millis()),
    )
    .expect("written");
    // Work for the dead ends in an error CQE (over packets when they have been repeated often enough), and the living are still reached.
    gin.put(last, (win, 8), (win, 0), 8, With::default());
    let ended = gin.flush(last, LONG).expect_err("it is dead");
    assert!(matches!(ended, Failed::Cqe(..)), "{ended:?}");
    for peer in 0..last {
        gin.put(
            peer,
            (win, 8),
            (win, 0),
            8,
            With::signal(Signal::Indexed(0), 1),
        );
        gin.flush(peer, LONG).expect("it lives");
    }
    gin.wait_signal(0, last as u64, LONG);
    // Who is in a step with the dead hears its number.
    let (status, _) = one.try_create(config(1, 0, 1, 0));
    assert_ne!(status, 0);
    // Nobody leaves while others still look for signals.
    for peer in 0..last {
        let name = |r: usize| gather.folder().join(format!("done-{r}"));
        std::fs::write(name(rank), b"").expect("written");
        while !name(peer).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    context.destroy();
}

#[test]
fn a_rank_that_dies_is_known_to_the_others() {
    for link in ["shm", "roce"] {
        let variables = [
            ("DOORBELL_NCCL_LINK", link),
            ("DOORBELL_ROCE_TIMEOUT", "12"),
        ];
        let (mut children, folder) = start("dies at work", 3, 1, &variables);
        assert_eq!(children[2].ends(), None, "it aborted");
        for (rank, child) in children.iter_mut().take(2).enumerate() {
            assert_eq!(child.ends(), Some(0), "rank {rank} over {link}");
            let heard = std::fs::read_to_string(folder.path().join(format!("heard-{rank}")));
            let heard: u64 = heard.expect("it heard").parse().expect("milliseconds");
            println!("rank {rank} over {link}: heard after {heard} ms");
        }
    }
}

/// The last rank dies, and a process that it has forked (as loaders of data are) keeps its sockets open. Nobody beats.
fn dies_and_its_child_lives(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let context = one.create(config(1, 0, 1, 0));
    gather.barrier(rank);
    if rank == one.ranks - 1 {
        // SAFETY: the child calls nothing but these, which any child may; it ends by itself.
        unsafe {
            if libc::fork() == 0 {
                libc::sleep(20);
                libc::_exit(0);
            }
        }
        std::process::abort();
    }
    let begin = Instant::now();
    assert!(soon(LONG, || context.has_error()), "{:?}", log_lines());
    assert!(begin.elapsed() < Duration::from_secs(10), "{begin:?}");
    let said = || {
        let text = log_lines().join("\n");
        match std::env::var("DOORBELL_NCCL_LINK").as_deref() {
            Ok("shm") => text.contains("rank 2 is gone"),
            _ => text.contains("lost rank 2: its process"),
        }
    };
    assert!(soon(LONG, said), "{:?}", log_lines());
}

#[test]
fn a_rank_that_dies_is_known_although_a_child_of_it_lives() {
    for link in ["shm", "roce"] {
        let variables = [("DOORBELL_NCCL_LINK", link), ("DOORBELL_NCCL_ALIVE", "0")];
        let (mut children, _folder) = start("dies, its child lives", 3, 1, &variables);
        assert_eq!(children[2].ends(), None, "it aborted");
        for rank in [0, 1] {
            assert_eq!(children[rank].ends(), Some(0), "rank {rank} over {link}");
        }
    }
}

/// A forked child ends what is its parent's, as a handler at its exit may.
fn a_child_ends_it(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    let pages = Pages::shared(4096);
    let (window, win) = one.register(&pages, 0);
    let context = one.create(config(1, 0, 1, 0));
    if rank == 0 {
        // SAFETY: what the child calls next is what is tested; it ends by itself.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = |entry, object| i32::from(common::unsafe_one(entry, object) != 0);
            let table = common::table();
            let all = refused(table.destroy_context, context.ctx)
                + refused(table.close_coll, one.comm)
                + refused(table.finalize, one.instance());
            // SAFETY: (both) as above.
            unsafe { libc::_exit(all) };
        }
        let mut status = 0;
        // SAFETY: a child of this process, and an out parameter.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "the child ended by {status:#x}");
        assert_eq!(libc::WEXITSTATUS(status), 3, "all three are the parent's");
    }
    gather.barrier(rank);
    // Nobody has left.
    one_round(&one, context.gin(0), win);
    let more = Pages::shared(4096);
    let (other, _) = one.register(&more, 0);
    assert!(!context.has_error(), "{:?}", log_lines());
    gather.barrier(rank);
    context.destroy();
    one.deregister(other);
    one.deregister(window);
    one.close();
}

#[test]
fn a_forked_child_ends_nothing_of_its_parents() {
    for link in ["shm", "roce"] {
        let variables = [("DOORBELL_NCCL_LINK", link), ("DOORBELL_NCCL_ALIVE", "0")];
        play("a child ends it", 2, 1, &variables);
    }
}

/// What cannot be used is said in `init`, so that NCCL looks for another backend.
fn init_names_it(gather: &Gather) {
    let mut ctx = std::ptr::null_mut();
    let init = common::table().init.expect("an entry");
    // SAFETY: an out parameter and a logger.
    let status = unsafe { init(&mut ctx, 0, common::logger_arg()) };
    let text = log_lines().join("\n");
    assert!(
        status != 0 && text.contains("DOORBELL_"),
        "{status}: {text}"
    );
    gather.barrier(0);
}

#[test]
fn a_variable_that_cannot_be_used_is_named_before_ranks_meet() {
    for (name, value) in [
        ("DOORBELL_TRACE", "/no/such/folder/trace.json"),
        ("DOORBELL_NCCL_LINK", "verbs"),
        ("DOORBELL_HCA_CORES", "many"),
    ] {
        play("init names it", 1, 1, &[(name, value)]);
    }
}

/// Rank 0 may open no more files when the others come.
fn no_more_files(rank: usize, gather: &Arc<Gather>) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut one = Rank::init(rank, gather);
    let (listening, handles) = one.listen();
    let before = getrlimit(Resource::Nofile);
    if rank == 0 {
        let file = std::fs::File::open("/dev/null").expect("a file");
        let next = std::os::fd::AsRawFd::as_raw_fd(&file);
        let limit = rustix::process::Rlimit {
            // For what is opened and closed again on the way, and for the first of the others.
            current: Some(next as u64 + 1),
            ..before
        };
        drop(file);
        setrlimit(Resource::Nofile, limit).expect("a lower limit");
    }
    let begin = Instant::now();
    assert_ne!(one.join(&handles, listening), 0);
    setrlimit(Resource::Nofile, before).expect("as it was");
    let closed = common::unsafe_one(common::table().close_listen, listening);
    assert_eq!(closed, 0);
    let text = log_lines().join("\n");
    assert!(begin.elapsed() < Duration::from_secs(20), "{text}");
    let words: &[&str] = match rank {
        0 => &["at the door", "ulimit -n"],
        _ => &["rank 0"],
    };
    assert!(words.iter().all(|w| text.contains(w)), "{text}");
    gather.barrier(rank);
}

#[test]
fn who_may_open_no_more_files_names_the_limit() {
    play("no more files", 3, 1, &[]);
}

/// A script fails a work request of rank 0. Kernels look at no error: they are let go if that is asked for. Hosts of all ranks are told.
fn fault(rank: usize, gather: &Arc<Gather>, release: bool) {
    let one = Rank::connect(rank, gather);
    let pages = Pages::shared(4096);
    let (window, win) = one.register(&pages, 0);
    let context = one.create(config(4, 2, 1, 64));
    let gin = context.gin(0);
    let peer = (rank + 1) % one.ranks;
    gather.barrier(rank);
    let begin = Instant::now();
    let ends = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        // NVIDIA's code, which nobody can end. Without release the test looks on for a while, and then plays the end of the process.
        let waits = move |done: &dyn Fn() -> bool| {
            while !done() && !ends.load(Relaxed) {
                std::thread::yield_now();
            }
        };
        let kernel = scope.spawn(move || {
            for _ in 0..20 {
                let with = With {
                    counter: Some(1),
                    ..With::signal(Signal::Indexed(0), 1)
                };
                if ends.load(Relaxed) {
                    return;
                }
                gin.put(peer, (win, 8), (win, 0), 8, with);
            }
            // More than anybody sends; the second as NCCL's barriers compare.
            waits(&|| gin.read_signal(0) as i64 >= 1000);
            waits(&|| gin.read_signal(3) as i32 >= 1000);
            waits(&|| gin.read_counter(1) as i64 >= 1000);
            if release {
                // It resets and waits once more.
                gin.reset_signal(2);
                waits(&|| gin.read_signal(2) as i64 >= 1000);
                gin.flush_all(LONG).expect("everything completes");
            }
        });
        assert!(
            soon(Duration::from_secs(5), || context.has_error()),
            "rank {rank} is not told: {:?}",
            log_lines()
        );
        println!("rank {rank}: told after {} ms", begin.elapsed().as_millis());
        if release {
            assert!(
                soon(LONG, || kernel.is_finished()),
                "the kernel is not let go: {:?}",
                log_lines()
            );
        } else {
            std::thread::sleep(Duration::from_millis(300));
            assert!(!kernel.is_finished(), "the kernel was let go");
            ends.store(true, Relaxed);
        }
    });
    let cause = if rank == 0 {
        "to rank 1: WQE 9"
    } else {
        "rank 0"
    };
    logged(&[cause, "WQE 9"]);
    gather.barrier(rank);
    context.destroy();
    one.deregister(window);
    one.close();
}

#[test]
fn a_fault_of_one_rank_is_told_to_the_hosts_of_all() {
    for link in ["shm", "roce"] {
        play("fault report", 3, 1, &[("DOORBELL_NCCL_LINK", link)]);
    }
}

#[test]
fn kernels_of_all_ranks_are_let_go_if_that_is_asked_for() {
    for (link, signals) in [("shm", "host"), ("roce", "host"), ("roce", "gpu")] {
        let variables = [
            ("DOORBELL_NCCL_LINK", link),
            ("DOORBELL_NCCL_SIGNALS", signals),
            ("DOORBELL_ON_ERROR", "release"),
        ];
        play("fault release", 3, 1, &variables);
    }
}

/// The steps of a rank, in the order in which NCCL takes them.
const STEPS: usize = 7;

/// Rank 1 dies before step `at`; the others end in an error that names it, or do not need it any more.
fn dies_between(rank: usize, gather: &Arc<Gather>, at: usize) {
    let victim = 1;
    let step = |n: usize| {
        if rank == victim && n == at {
            std::process::abort();
        }
    };
    let named = || {
        let text = log_lines().join("\n");
        assert!(text.contains("rank 1") || text.contains("[1]"), "{text}");
    };
    step(0);
    let mut one = Rank::init(rank, gather);
    step(1);
    let (listening, handle) = one.listen_only();
    // The start of a process may take long on a loaded machine; who is dead already is not waited for so long.
    let patience = if at <= 1 {
        Duration::from_secs(1)
    } else {
        LONG
    };
    let Some(handles) = gather.try_all(rank, &handle, patience) else {
        // NCCL's own bootstrap would notice.
        assert!(at <= 1);
        return;
    };
    step(2);
    let status = one.join(&handles, listening);
    if status != 0 {
        assert_eq!(at, 2, "{:?}", log_lines());
        return named();
    }
    common::ok(
        common::unsafe_one(common::table().close_listen, listening),
        "closeListen",
    );
    step(3);
    let pages = Pages::shared(4096);
    let Some((window, win)) = one.try_register(&pages, 0) else {
        assert_eq!(at, 3, "{:?}", log_lines());
        return named();
    };
    step(4);
    let (status, context) = one.try_create(config(1, 0, 1, 0));
    if status != 0 {
        assert_eq!(at, 4, "{:?}", log_lines());
        return named();
    }
    step(5);
    let gin = context.gin(0);
    for peer in 0..one.ranks {
        gin.put(
            peer,
            (win, 8),
            (win, 0),
            8,
            With::signal(Signal::Indexed(0), 1),
        );
    }
    step(6);
    if !hears(&context) {
        panic!(
            "nobody told rank {rank} of the death before step {at}: {:?}",
            log_lines()
        );
    }
    named();
    // The rest of the life of a rank whose peer is dead.
    context.destroy();
    one.deregister(window);
    one.close();
}

fn hears(context: &Context) -> bool {
    soon(Duration::from_secs(10), || context.has_error())
}

#[test]
fn a_rank_may_die_between_any_two_calls() {
    for at in 0..STEPS {
        let (mut children, _folder) =
            start(&at.to_string(), 3, 1, &[("DOORBELL_NCCL_TIMEOUT", "3")]);
        assert_eq!(children[1].ends(), None, "it aborted before step {at}");
        for rank in [0, 2] {
            assert_eq!(
                children[rank].ends(),
                Some(0),
                "rank {rank}, death before step {at}"
            );
        }
    }
}

/// Rank 2 does not come to a step.
fn late(rank: usize, gather: &Arc<Gather>) {
    let one = Rank::connect(rank, gather);
    if rank == 2 {
        std::thread::sleep(Duration::from_secs(4));
        std::process::exit(0);
    }
    let begin = Instant::now();
    let pages = Pages::new(4096);
    assert!(one.try_register(&pages, 0).is_none());
    assert!(begin.elapsed() < Duration::from_secs(4));
    let text = log_lines().join("\n");
    assert!(text.contains("regMrSym") && text.contains("[2]"), "{text}");
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    play("late", 3, 1, &[("DOORBELL_NCCL_TIMEOUT", "1")]);
}
