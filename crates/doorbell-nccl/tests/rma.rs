//! `ncclRmaPlugin_v14`: what NCCL's own CPU proxy calls.
#![cfg(not(miri))]

mod common;

use common::rma::{CUDA, Handle, RmaRank, SIGNALS, proxy, rma_table};
use common::{LONG, Pages, each, log_lines, soon};

#[test]
fn puts_signals_and_gets_of_the_proxy() {
    for ranks in [1, 2, 3] {
        each(ranks, |rank, gather| {
            let one = RmaRank::connect(rank, gather, 2);
            proxy(&one, Pages::new, 2000);
            one.close();
        });
    }
}

#[test]
fn signals_that_may_be_reset_are_words_of_the_region_itself() {
    each(2, |rank, gather| {
        let one = RmaRank::connect(rank, gather, 1);
        let words = Pages::new(4096);
        let signals = one.register(&words, CUDA, 1);
        gather.barrier(rank);
        let add = |value| one.try_put(0, 1 - rank as u32, None, Some(((signals, 64), value, 2)));
        one.wait(add(5).expect("begun")).expect("done");
        one.until("the signal", || words.word(64) == 5);
        gather.barrier(rank);
        words.write(64, &[0; 8]);
        gather.barrier(rank);
        one.wait(add(3).expect("begun")).expect("done");
        one.until("counted anew", || words.word(64) == 3);
        gather.barrier(rank);
        one.deregister(signals);
        one.close();
    });
}

#[test]
fn signals_survive_the_contexts_that_began_to_carry_them_over() {
    each(1, |rank, gather| {
        let mut one = RmaRank::connect(rank, gather, 1);
        let words = Pages::new(4096);
        let signals = one.register(&words, CUDA, SIGNALS);
        let add = |one: &RmaRank, value| {
            let mut left = one
                .try_put(0, 0, None, Some(((signals, 64), value, 2)))
                .ok();
            // Without the progress loop: what is added is still to be carried over.
            while let Some(request) = left {
                left = one.test(request).expect("no error");
            }
        };
        let mut total = 0;
        for round in 0..20 {
            let (status, second) = one.create(1);
            assert_eq!(status, 0, "{:?}", log_lines());
            // Tickets of the first contexts are far beyond those of the second, and the last copy is under way when their queue pairs end.
            for value in 1..=10 + round {
                add(&one, value);
                total += value;
                one.until("carried over", || words.word(64) == total);
            }
            add(&one, 1);
            total += 1;
            one.progress();
            one.destroy(second);
            one.until("carried over by the second", || words.word(64) == total);
            add(&one, 5);
            total += 5;
            one.until("and what came later", || words.word(64) == total);
        }
        one.deregister(signals);
        one.close();
    });
}

#[test]
fn more_than_a_gibibyte_goes_in_pieces_with_the_signal_behind_the_last() {
    each(1, |rank, gather| {
        let one = RmaRank::connect(rank, gather, 1);
        let len = (1usize << 30) + 4096;
        let (source, target, words) = (Pages::new(len), Pages::repeated(len), Pages::new(64));
        source.write(len - 8, &[9; 8]);
        let small = Pages::repeated(1 << 30);
        let from = one.register(&source, CUDA, 0);
        let to = one.register(&target, CUDA, 0);
        let signals = one.register(&words, CUDA, 1);
        let put = one.put(0, (from, 0), (to, 0), len, Some(((signals, 0), 1)));
        one.until("the signal", || words.word(0) == 1);
        assert_eq!(target.read(len - 8, 8), [9; 8]);
        one.wait(put).expect("done");
        // The second piece has no room: what was to be behind it does not come.
        let narrow = one.register(&small, CUDA, 0);
        let put = one.put(0, (from, 0), (narrow, 0), len, Some(((signals, 0), 1)));
        assert_eq!(one.wait(put), Err(6));
        assert_eq!(words.word(0), 1);
        [from, to, signals, narrow]
            .into_iter()
            .for_each(|h| one.deregister(h));
        one.close();
    });
}

#[test]
fn a_wrong_request_fails_its_test_and_is_told_to_the_hosts() {
    each(2, |rank, gather| {
        let one = RmaRank::connect(rank, gather, 1);
        let pages = Pages::new(4096);
        let handle = one.register(&pages, CUDA, 0);
        gather.barrier(rank);
        if rank == 0 {
            let put = one.put(1, (handle, 0), (handle, 4092), 8, None);
            // ncclRemoteError.
            assert_eq!(one.wait(put), Err(6));
        }
        assert!(soon(LONG, || one.has_error()), "rank {rank}");
        gather.barrier(rank);
        one.deregister(handle);
        one.close();
    });
}

#[test]
fn absurd_arguments_are_refused() {
    each(1, |rank, gather| {
        let one = RmaRank::connect(rank, gather, 1);
        let pages = Pages::new(4096);
        let handle = one.register(&pages, CUDA, 0);
        let refused = |status: i32, text: &str| {
            assert_ne!(status, 0);
            let last = log_lines().join("\n");
            assert!(last.contains(text), "{text}: {last}");
        };
        let (here, there) = ((handle, 0), (handle, 64));
        let put = Some((here, there, 8));
        refused(
            one.try_put(1, 0, put, None).expect_err("context"),
            "context is 1 of 1",
        );
        refused(
            one.try_put(-1, 0, put, None).expect_err("context"),
            "context is -1 of 1",
        );
        refused(
            one.try_put(0, 7, put, None).expect_err("rank"),
            "rank is 7 of 1",
        );
        let foreign = Some(((Handle(pages.ptr()), 0), there, 8));
        refused(
            one.try_put(0, 0, foreign, None).expect_err("handle"),
            "the memory handle is 0x",
        );
        let null = Some(((Handle(std::ptr::null_mut()), 0), there, 8));
        refused(
            one.try_put(0, 0, null, None).expect_err("handle"),
            "the memory handle is null",
        );
        let signal = Some((here, 1, 9));
        refused(
            one.try_put(0, 0, put, signal).expect_err("operation"),
            "signalOp is 9",
        );
        refused(one.create(0).0, "nContexts is 0");
        refused(one.create(1 << 30).0, "nContexts is 1073741824");
        let t = rma_table();
        // SAFETY: null is to be refused.
        unsafe {
            let put = t.iput.expect("iput");
            let null = std::ptr::null_mut();
            refused(
                put(null, 0, 0, null, 0, 0, null, 0, null.cast()),
                "the RMA context is null",
            );
            let test = t.test.expect("test");
            let mut done = 0;
            refused(test(null, null, &mut done), "the request is null");
            refused(test(null, null, std::ptr::null_mut()), "done is null");
        }
        assert!(!one.has_error());
        one.deregister(handle);
        one.close();
    });
}
