//! Null, absurd and foreign arguments: each is an error with a reason in NCCL's log, and what was there before goes on working.
#![cfg(not(miri))]

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;

use common::gin::{Signal, With};
use common::{
    Gather, LONG, Pages, Rank, config, log_lines, ok, on_the_host, soon, table, threads, unsafe_one,
};
use doorbell_nccl::{INVALID_ARGUMENT, INVALID_USAGE};

/// The last line of the log is shared by the tests of this program.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    let guard = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    on_the_host();
    guard
}

fn refused(status: c_int, words: &[&str]) {
    assert_eq!(
        status,
        INVALID_ARGUMENT,
        "{words:?}: {:?}",
        log_lines().last()
    );
    let line = log_lines().pop().expect("a reason");
    for word in words {
        assert!(line.contains(word), "{line} says nothing of {word}");
    }
}

#[test]
fn null_is_refused_by_every_entry() {
    let _alone = alone();
    let t = table();
    let gather = Gather::new(1);
    let one = Rank::connect(0, &gather);
    let mut out = null_mut();
    // SAFETY: (all) null where the plug-in has to look first, valid pointers elsewhere.
    unsafe {
        refused(
            t.init.expect("init")(null_mut(), 0, None),
            &["init", "null"],
        );
        refused(
            t.devices.expect("devices")(null_mut()),
            &["devices", "null"],
        );
        refused(
            t.get_properties.expect("getProperties")(0, null_mut()),
            &["props"],
        );
        refused(
            t.get_gin_properties.expect("getGinProperties")(null_mut()),
            &["ginProps"],
        );
        let listen = t.listen.expect("listen");
        refused(
            listen(null_mut(), 0, null_mut(), &mut out),
            &["listen", "handle"],
        );
        let mut handle = [0u8; 128];
        refused(
            listen(null_mut(), 0, handle.as_mut_ptr().cast(), null_mut()),
            &["listenComm"],
        );
        let connect = t.connect.expect("connect");
        refused(
            connect(null_mut(), null_mut(), 1, 0, null_mut(), &mut out),
            &["handles"],
        );
        let mut handles = [null_mut::<c_void>()];
        refused(
            connect(null_mut(), handles.as_mut_ptr(), 1, 0, null_mut(), &mut out),
            &["null at rank 0"],
        );
        handles[0] = handle.as_mut_ptr().cast();
        refused(
            connect(null_mut(), handles.as_mut_ptr(), 1, 0, null_mut(), &mut out),
            &["listening object", "null"],
        );
        let register = t.reg_mr_sym.expect("regMrSym");
        let (mut a, mut b) = (null_mut(), null_mut());
        refused(
            register(null_mut(), null_mut(), 8, 2, 0, &mut a, &mut b),
            &["communicator", "null"],
        );
        refused(
            register(
                one.comm,
                handle.as_mut_ptr().cast(),
                8,
                2,
                0,
                null_mut(),
                &mut b,
            ),
            &["mhandle"],
        );
        refused(
            register(
                one.comm,
                handle.as_mut_ptr().cast(),
                8,
                2,
                0,
                &mut a,
                null_mut(),
            ),
            &["ginHandle"],
        );
        refused(
            register(one.comm, null_mut(), 8, 2, 0, &mut a, &mut b),
            &["data", "null"],
        );
        refused(
            t.dereg_mr_sym.expect("deregMrSym")(one.comm, null_mut()),
            &["window", "null"],
        );
        let create = t.create_context.expect("createContext");
        let mut handle = null_mut();
        refused(
            create(one.comm, null_mut(), &mut a, &mut handle),
            &["config"],
        );
        let mut asked = config(1, 0, 1, 0);
        refused(
            create(one.comm, &mut asked, null_mut(), &mut handle),
            &["ginCtx"],
        );
        refused(
            create(one.comm, &mut asked, &mut a, null_mut()),
            &["devHandle"],
        );
        let mut has = false;
        refused(
            t.query_last_error.expect("queryLastError")(null_mut(), &mut has),
            &["GIN context", "null"],
        );
    }
    for (entry, name) in [
        (t.destroy_context, "GIN context"),
        (t.close_coll, "communicator"),
        (t.close_listen, "listening object"),
        (t.finalize, "plug-in's context"),
    ] {
        refused(unsafe_one(entry, null_mut()), &[name, "null"]);
    }
    // It all goes on.
    let context = one.create(config(1, 0, 1, 0));
    context.gin(0).signal(0, Signal::Indexed(0), 1, None);
    context.gin(0).wait_signal(0, 1, LONG);
    context.destroy();
    one.close();
}

#[test]
fn objects_of_another_kind_are_refused_by_their_name() {
    let _alone = alone();
    let t = table();
    let gather = Gather::new(1);
    let one = Rank::connect(0, &gather);
    let context = one.create(config(1, 0, 1, 0));
    refused(
        unsafe_one(t.close_coll, context.ctx),
        &["communicator", "DB-conte"],
    );
    refused(
        unsafe_one(t.destroy_context, one.comm),
        &["GIN context", "DB-commu"],
    );
    let mut foreign = [7u64; 4];
    refused(
        unsafe_one(t.close_coll, foreign.as_mut_ptr().cast()),
        &["communicator"],
    );
    refused(
        unsafe_one(
            t.close_coll,
            foreign.as_mut_ptr().wrapping_byte_add(1).cast(),
        ),
        &["communicator"],
    );
    // NCCL ends a communicator without the contexts that the application forgot: they still may go later, and the user is told.
    ok(unsafe_one(t.close_coll, one.comm), "closeColl");
    let last = log_lines().pop().expect("a reason");
    assert!(
        last.contains("1 of its context(s)") && last.contains("ncclDevCommDestroy"),
        "{last}"
    );
    context.destroy();
}

#[test]
fn absurd_requests_are_refused_on_every_rank_at_once() {
    let _alone = alone();
    threads(2, |rank| {
        for (asked, word) in [
            (config(-1, 0, 1, 0), "nSignals"),
            (config(i32::MAX, 0, 1, 0), "nSignals"),
            (config(1, -1, 1, 0), "nCounters"),
            (config(1, 0, 0, 0), "nContexts"),
            (config(1, 0, i32::MAX, 0), "nContexts"),
            (config(1, 0, 1, -1), "queueDepth"),
            (config(1, 0, 1, 1 << 20), "queueDepth"),
            // Each of these would do, and together they are absurd.
            (
                config(1 << 20, 0, 1 << 12, 64),
                "nSignals is 1048576 for each of 4096",
            ),
            (
                config(1, 1 << 20, 1 << 12, 64),
                "nCounters is 1048576 for each of 4096",
            ),
            (
                config(1, 1, 1 << 12, 32_768),
                "queueDepth is 32768 for each of 16384",
            ),
        ] {
            let (status, _) = rank.try_create(asked);
            assert_ne!(status, 0, "{word}");
            let said = log_lines().iter().any(|l| l.contains(word));
            assert!(said, "{word}: {:?}", log_lines().last());
        }
        for (version, stride, word) in [
            (0, 1, "backendVersion"),
            (-7, 1, "backendVersion"),
            (2, 0, "rankStride"),
            (2, 3, "rankStride"),
        ] {
            let mut asked = config(1, 0, 1, 0);
            (asked.backend_version, asked.rank_stride) = (version, stride);
            assert_ne!(rank.try_create(asked).0, 0, "{word} {version} {stride}");
        }
        // Versions that came later are taken for the latest known, and depths are rounded up.
        let mut asked = config(1, 0, 1, 100);
        asked.backend_version = 9;
        let context = rank.create(asked);
        assert_eq!(context.gin(0).qp(0).depth(), 128);
        rank.gather.barrier(rank.rank);
        context.destroy();
    });
}

#[test]
fn what_one_rank_cannot_do_fails_on_all_with_its_reason() {
    let _alone = alone();
    threads(2, |rank| {
        let pages = Pages::new(4096);
        let (kind, size) = if rank.rank == 1 { (7, 4096) } else { (2, 4096) };
        let (mut host, mut device) = (null_mut(), null_mut());
        // SAFETY: out parameters, and memory that stays.
        let status = unsafe {
            table().reg_mr_sym.expect("regMrSym")(
                rank.comm,
                pages.ptr(),
                size,
                kind,
                0,
                &mut host,
                &mut device,
            )
        };
        assert_ne!(status, 0);
        let word = if rank.rank == 1 {
            "type is 7"
        } else {
            "rank 1 could not do its part: regMrSym: type is 7"
        };
        let lines = log_lines();
        assert!(lines.iter().any(|l| l.contains(word)), "{lines:?}");
        // And then they do it together.
        let (window, win) = rank.register(&pages, 0);
        let asked = if rank.rank == 0 {
            config(1, 0, 1, 0)
        } else {
            config(1, 0, 3, 0)
        };
        assert_ne!(rank.try_create(asked).0, 0, "another number of contexts");
        let context = rank.create(config(1, 0, 1, 0));
        let gin = context.gin(0);
        gin.put(
            1 - rank.rank,
            (win, 8),
            (win, 0),
            8,
            With::signal(Signal::Indexed(0), 1),
        );
        gin.wait_signal(0, 1, LONG);
        gin.flush_all(LONG).expect("complete");
        rank.gather.barrier(rank.rank);
        context.destroy();
        rank.deregister(window);
    });
}

#[test]
fn a_rank_without_room_for_its_handles_keeps_nobody_waiting() {
    let _alone = alone();
    threads(2, |rank| {
        let pages = Pages::new(4096);
        let (mut host, mut device) = (null_mut(), null_mut());
        let to: *mut *mut c_void = match rank.rank {
            0 => &mut device,
            _ => null_mut(),
        };
        // SAFETY: an out parameter that may be null, another, and memory that stays.
        let status = unsafe {
            let register = table().reg_mr_sym.expect("regMrSym");
            register(rank.comm, pages.ptr(), 4096, 2, 0, &mut host, to)
        };
        assert_ne!(status, 0);
        let words = match rank.rank {
            0 => "rank 1 could not do its part: regMrSym: ginHandle is null",
            _ => "regMrSym: ginHandle is null",
        };
        let lines = log_lines();
        assert!(lines.iter().any(|l| l.contains(words)), "{lines:?}");
    });
}

#[test]
fn a_counter_that_is_not_there_is_known_to_the_hosts_of_all_ranks() {
    let _alone = alone();
    threads(2, |rank| {
        let pages = Pages::new(4096);
        let (window, win) = rank.register(&pages, 0);
        let context = rank.create(config(1, 2, 1, 0));
        if rank.rank == 0 {
            // The put is well: what fails is the companion's count.
            let with = With {
                counter: Some(2),
                ..With::default()
            };
            context.gin(0).put(1, (win, 8), (win, 0), 8, with);
            context.gin(0).flush(1, LONG).expect("complete");
        }
        assert!(soon(LONG, || context.has_error()), "rank {}", rank.rank);
        let said = || log_lines().join("\n").contains("WQE 1 (FetchAdd) failed");
        assert!(soon(LONG, said), "{:?}", log_lines());
        rank.gather.barrier(rank.rank);
        context.destroy();
        rank.deregister(window);
    });
}

#[test]
fn handles_of_another_version_name_the_rank_and_both_versions() {
    let _alone = alone();
    let gather = Gather::new(1);
    let mut one = Rank::init(0, &gather);
    for (at, value) in [(6, 9u8), (0, b'X'), (60, 1)] {
        let (listening, mut handle) = one.listen_only();
        handle[at] = value;
        assert_eq!(one.join(&[handle.to_vec()], listening), INVALID_USAGE);
        let line = log_lines().pop().expect("a reason");
        assert!(
            line.contains("handle of rank 0") && line.contains("version 2"),
            "{line}"
        );
        assert_eq!(unsafe_one(table().close_listen, listening), 0);
    }
    // Another rank's handle in the own place.
    let (first, _) = one.listen_only();
    let (second, handle) = one.listen_only();
    refused(
        one.join(&[handle.to_vec()], first),
        &["the handle of this rank"],
    );
    for listening in [first, second] {
        assert_eq!(unsafe_one(table().close_listen, listening), 0);
    }
    one.finalize();
}

#[test]
fn a_rank_outside_the_world_is_refused() {
    let _alone = alone();
    let t = table();
    // For its log.
    let one = Rank::init(0, &Gather::new(1));
    let mut handles = [null_mut::<c_void>()];
    let mut out = null_mut();
    for (rank, ranks) in [(1, 1), (-1, 1), (0, 0), (0, -5), (0, c_int::MAX)] {
        // SAFETY: refused before the array is looked at.
        let status = unsafe {
            t.connect.expect("connect")(
                null_mut(),
                handles.as_mut_ptr(),
                ranks,
                rank,
                null_mut(),
                &mut out,
            )
        };
        refused(status, &["rank"]);
    }
    let mut handle = [0u8; 128];
    // SAFETY: a buffer and an out parameter.
    let status =
        unsafe { t.listen.expect("listen")(null_mut(), 3, handle.as_mut_ptr().cast(), &mut out) };
    refused(status, &["dev is 3"]);
    one.finalize();
}

#[test]
fn a_wrong_work_request_is_known_to_the_hosts_of_all_ranks() {
    let _alone = alone();
    threads(2, |rank| {
        let pages = Pages::new(4096);
        let (window, win) = rank.register(&pages, 0);
        let context = rank.create(config(1, 0, 1, 0));
        let gin = context.gin(0);
        assert!(!context.has_error());
        if rank.rank == 0 {
            // Past the end of the peer's window.
            gin.put(1, (win, 4092), (win, 0), 8, With::default());
            assert!(gin.flush(1, LONG).is_err());
        }
        // The watch looks every 50 ms; the deadline is for a host that is never told.
        let begin = std::time::Instant::now();
        assert!(
            soon(LONG, || context.has_error()),
            "rank {} is not told",
            rank.rank
        );
        println!("rank {}: told after {:?}", rank.rank, begin.elapsed());
        rank.gather.barrier(rank.rank);
        let lines = log_lines().join("\n");
        assert!(
            lines.contains("rank 0 of 2: QP") && lines.contains("REMOTE_ACCESS"),
            "{lines}"
        );
        // The other rank did nothing wrong, but it may wait for this one.
        assert!(lines.contains("rank 1 of 2: rank 0"), "{lines}");
        context.destroy();
        rank.deregister(window);
    });
}
