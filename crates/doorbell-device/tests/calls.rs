//! What each call writes, and how each wait ends.

mod nic;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use doorbell_device::host::{Hooks, HostGrid, HostThread};
use doorbell_device::layout::{CqKind, ErrorKind, ErrorWord, NicHandler, STATE_ERROR};
use doorbell_device::scope::{Block, Thread, Warp, sharing};
use doorbell_device::{
    Deadline, Error, Failure, Fetch, Key, Local, Masked, Post, Qp, Remote, Ticket, Wr,
};
use doorbell_wire::{Chunk, Fence, Wqe};
use nic::{BAD_KEY, KEY, Nic, Shape, cqn, qpn};

type Queue<'a> = Qp<'a, &'a HostThread<1>, Thread, sharing::Exclusive>;

const SHORT: u64 = 30_000_000;

fn with<R>(nic: &Nic, f: impl FnOnce(Queue<'_>, &HostThread<1>) -> R) -> R {
    let grid = HostGrid::<1>::new(1, 1, Hooks::default());
    let thread = grid.thread(0, 0);
    // SAFETY: the QP and all it names live in `nic`; one value at a time uses it.
    let qp = unsafe { Queue::new(&thread, nic.handle()) }.expect("an extension of this version");
    f(qp.with_sink(64, KEY), &thread)
}

fn by(t: &HostThread<1>, ns: u64) -> Post {
    Post::by(Deadline::after(t, ns))
}

fn long(t: &HostThread<1>) -> Post {
    by(t, nic::LONG.as_nanos() as u64)
}

const REMOTE: Remote = Remote {
    addr: 0x1122_3344_5566_7788,
    key: Key(0xa1b2_c3d4),
};
const TO: Fetch = Fetch {
    addr: 0x5000,
    key: Key(7),
};

fn local(len: u64) -> Local {
    Local {
        addr: 0x9000,
        key: Key(0x55),
        len,
    }
}

fn wire(len: u32) -> doorbell_wire::Local {
    doorbell_wire::Local {
        addr: 0x9000,
        key: Key(0x55),
        len,
    }
}

fn wire_to(len: u32) -> doorbell_wire::Local {
    doorbell_wire::Local {
        addr: TO.addr,
        key: TO.key,
        len,
    }
}

#[test]
fn calls_write_what_the_wire_crate_builds() {
    let sink = doorbell_wire::Local {
        addr: 64,
        key: KEY,
        len: 8,
    };
    let dump = doorbell_wire::Local { len: 1, ..sink };
    let swap = Masked {
        compare: 1_u64,
        compare_mask: 2,
        swap: 3,
        swap_mask: 4,
    };
    let swap32 = Masked {
        compare: 1_u32,
        compare_mask: 2,
        swap: 3,
        swap_mask: 4,
    };
    let signal = Remote {
        addr: 0x40,
        key: Key(9),
    };
    let put = || Wqe::write(REMOTE, wire(100)).expect("a length");
    let add = |r| Wqe::fetch_add(r, sink, 5).expect("8 bytes");
    let cases: Vec<(Wr, Vec<Wqe>)> = vec![
        (Wr::Nop, vec![Wqe::nop()]),
        (
            Wr::Put {
                remote: REMOTE,
                local: local(100),
            },
            vec![put()],
        ),
        (
            Wr::Put {
                remote: REMOTE,
                local: local(0),
            },
            vec![Wqe::nop()],
        ),
        (
            Wr::PutValue {
                remote: REMOTE,
                value: 0x0506_0708,
                len: 4,
            },
            vec![Wqe::write_inline(REMOTE, &[8, 7, 6, 5]).expect("short")],
        ),
        (
            Wr::Get {
                remote: REMOTE,
                local: local(100),
            },
            vec![Wqe::read(REMOTE, wire(100)).expect("a length")],
        ),
        (
            Wr::GetVisible {
                remote: REMOTE,
                local: local(100),
            },
            vec![
                Wqe::read(REMOTE, wire(100)).expect("a length"),
                Wqe::dump(dump).expect("a length").fence(Fence::Reads),
            ],
        ),
        (
            Wr::SignalAdd {
                remote: signal,
                add: 5,
            },
            vec![add(signal)],
        ),
        (
            Wr::PutSignal {
                remote: REMOTE,
                local: local(100),
                signal,
                add: 5,
            },
            vec![put(), add(signal)],
        ),
        (
            Wr::FetchAdd {
                remote: REMOTE,
                add: 5,
                to: TO,
            },
            vec![Wqe::fetch_add(REMOTE, wire_to(8), 5).expect("8 bytes")],
        ),
        (
            Wr::CompareSwap {
                remote: REMOTE,
                compare: 1,
                swap: 2,
                to: TO,
            },
            vec![Wqe::compare_swap(REMOTE, wire_to(8), 1, 2).expect("8 bytes")],
        ),
        (
            Wr::MaskedFetchAdd {
                remote: REMOTE,
                add: 5,
                boundary: 6,
                to: TO,
            },
            vec![Wqe::masked_fetch_add8(REMOTE, wire_to(8), 5, 6).expect("8 bytes")],
        ),
        (
            Wr::MaskedFetchAdd32 {
                remote: REMOTE,
                add: 5,
                boundary: 6,
                to: TO,
            },
            vec![Wqe::masked_fetch_add4(REMOTE, wire_to(4), 5, 6).expect("4 bytes")],
        ),
        (
            Wr::MaskedCompareSwap32 {
                remote: REMOTE,
                swap: swap32,
                to: TO,
            },
            vec![Wqe::masked_compare_swap4(REMOTE, wire_to(4), (1, 2), (3, 4)).expect("4 bytes")],
        ),
        (
            Wr::MaskedCompareSwap {
                remote: REMOTE,
                swap,
                to: TO,
            },
            vec![
                Wqe::masked_compare_swap8(REMOTE, wire_to(8), (1, 2), (3, 4)).expect("8 bytes"),
                Wqe::nop(),
            ],
        ),
        (
            Wr::CountAfter {
                cqn: cqn(),
                completion: 11,
                counter: signal,
                add: 5,
            },
            vec![Wqe::wait(11, cqn()), add(signal)],
        ),
    ];
    for called in [false, true] {
        let nic = Nic::new(
            Shape {
                depth: 64,
                start: 0xfff8,
                ..Shape::default()
            },
            64,
        );
        let mut index = 0xfff8;
        for (wr, wqes) in &cases {
            let ticket = with(&nic, |qp, t| {
                if called {
                    let sink = Some(Fetch { addr: 64, key: KEY });
                    // SAFETY: as `with`; its own value has made no call.
                    unsafe { Queue::submit_at(t, nic.handle(), sink, &[*wr], long(t)) }
                } else {
                    qp.submit(*wr, long(t))
                }
            })
            .unwrap_or_else(|e| panic!("{wr:?}: {e}"));
            for wqe in wqes {
                // The two-slot WQE leaves its completion to the NOP behind it.
                let wqe = wqe.signalled(wqe.slots() == 1);
                let want: Vec<Chunk> = wqe.emit(index as u16, qpn()).to_vec();
                let got: Vec<Chunk> = (0..u64::from(wqe.slots()))
                    .flat_map(|k| nic.slot(index + k))
                    .collect();
                let ds = usize::from(wqe.ds());
                assert_eq!(got[..ds], want[..ds], "{wr:?} at {index:#x}");
                index += u64::from(wqe.slots());
            }
            assert_eq!(ticket, Ticket(index - 1), "{wr:?}");
            assert_eq!(nic.rung(index), index, "{wr:?} was not rung");
        }
    }
}

#[test]
fn a_transfer_beyond_a_gibibyte_is_split() {
    let nic = Nic::new(
        Shape {
            depth: 16,
            ..Shape::default()
        },
        64,
    );
    let gib = 1_u64 << 30;
    let signal = Remote {
        addr: 0x40,
        key: Key(9),
    };
    let ticket = with(&nic, |qp, t| {
        qp.put_signal(REMOTE, local(2 * gib + 5), signal, 1, long(t))
    })
    .expect("room");
    assert_eq!(ticket, Ticket(3));
    for (k, len) in [(0, gib as u32), (1, gib as u32), (2, 5)] {
        let remote = Remote {
            addr: REMOTE.addr + k * gib,
            ..REMOTE
        };
        let from = doorbell_wire::Local {
            addr: 0x9000 + k * gib,
            key: Key(0x55),
            len,
        };
        let want = Wqe::write(remote, from)
            .expect("a length")
            .signalled(true)
            .emit(k as u16, qpn());
        assert_eq!(nic.slot(k)[..3], want[..3], "piece {k}");
    }
    assert_eq!(nic.rung(4), 4);
}

#[test]
fn inline_data_of_any_length_arrives() {
    let nic = Nic::new(Shape::default(), 64);
    let words: [u32; 16] = std::array::from_fn(|i| 0x0101_0101 * (i as u32 + 1));
    let remote = Remote { addr: 0, key: KEY };
    nic.while_running(|| {
        with(&nic, |qp, t| {
            // Whole 8-byte words, since the test's region is made of them; a piece is 28 bytes, so two here need not be aligned.
            for len in [8, 16, 24] {
                let ticket = qp.put_inline(remote, words, len, long(t)).expect("room");
                qp.wait(ticket, Deadline::after(t, nic::LONG.as_nanos() as u64))
                    .expect("done");
                for i in 0..u64::from(len) / 8 {
                    let want = u64::from(words[2 * i as usize])
                        | u64::from(words[2 * i as usize + 1]) << 32;
                    assert_eq!(nic.memory.at(i as usize).load(Ordering::Relaxed), want);
                }
            }
            assert_eq!(
                qp.put_inline(remote, words, 65, long(t)),
                Err(Error::INVALID)
            );
            assert_eq!(
                qp.put_inline(remote, words, 0, long(t)),
                Err(Error::INVALID)
            );
        });
    });
}

#[test]
fn what_a_queue_cannot_take_is_refused() {
    let per_slot = Nic::new(
        Shape {
            cq: CqKind::PerSlot,
            ..Shape::default()
        },
        64,
    );
    let swap = Masked {
        compare: 0_u64,
        compare_mask: 0,
        swap: 0,
        swap_mask: 0,
    };
    with(&per_slot, |qp, t| {
        assert_eq!(
            qp.masked_compare_swap(REMOTE, swap, TO, long(t)),
            Err(Error::INVALID)
        );
        assert_eq!(qp.nop(long(t).signal_last()), Err(Error::INVALID));
        assert_eq!(qp.put_value(REMOTE, 1, 3, long(t)), Err(Error::INVALID));
        assert_eq!(
            qp.put_counter(REMOTE, local(8), REMOTE, 1, long(t)),
            Err(Error::INVALID),
            "no companion"
        );
        assert_eq!(
            qp.puts(65, |_| (REMOTE, local(8)), long(t)),
            Err(Error::INVALID),
            "more than the ring"
        );
        assert_eq!(
            qp.puts(0, |_| (REMOTE, local(8)), long(t)),
            Err(Error::INVALID)
        );
    });
    assert_eq!(per_slot.index(0), 0, "something was reserved");
    let other = Nic::new(Shape::default(), 64);
    other.set_ext_version(doorbell_device::layout::EXT_VERSION + 1);
    let grid = HostGrid::<1>::new(1, 1, Hooks::default());
    let thread = grid.thread(0, 0);
    // SAFETY: as `with`.
    let refused = unsafe { Queue::new(&thread, other.handle()) };
    assert_eq!(
        refused.err(),
        Some(Error::INVALID),
        "an extension of another version"
    );
}

#[test]
fn a_counter_is_posted_on_the_companion() {
    let shape = Shape {
        cq: CqKind::PerSlot,
        ..Shape::default()
    };
    let (main, companion) = (Nic::new(shape, 64), Nic::new(shape, 64));
    main.set_companion(&companion);
    let counter = Remote { addr: 8, key: KEY };
    let ticket = with(&main, |qp, t| {
        qp.put_counter(REMOTE, local(8), counter, 3, long(t))
    })
    .expect("posted");
    assert_eq!(ticket, Ticket(0));
    let wait = Wqe::wait(0, cqn()).signalled(true).emit(0, qpn());
    assert_eq!(companion.slot(0)[..2], wait[..2]);
    // The companion's extension names the last word of its region as its sink.
    let sink = doorbell_wire::Local {
        addr: 63 * 8,
        key: KEY,
        len: 8,
    };
    let add = Wqe::fetch_add(counter, sink, 3)
        .expect("8 bytes")
        .signalled(true)
        .emit(1, qpn());
    assert_eq!(companion.slot(1)[..4], add[..4]);
    assert_eq!((main.rung(1), companion.rung(2)), (1, 2));
}

/// Posts three writes of which the second has a bad key; checks what each wait and a later post say.
fn fails(shape: Shape, silent: bool) {
    let nic = Nic::new(shape, 64);
    nic.silent.store(silent, Ordering::Relaxed);
    let bad = Failure::Completion {
        syndrome: 0x13,
        vendor: 0x89,
        wqe_index: (shape.start + 1) as u16,
    };
    nic.while_running(|| {
        with(&nic, |qp, t| {
            let good = Remote { addr: 0, key: KEY };
            let tickets = [
                good,
                Remote {
                    addr: 0,
                    key: BAD_KEY,
                },
                good,
            ]
            .map(|r| {
                qp.put_value(r, 5, 8, long(t).without_ringing())
                    .expect("room")
            });
            qp.ring(long(t).deadline).expect("rung");
            let wait = |i: usize| {
                qp.wait(tickets[i], long(t).deadline)
                    .map_err(Error::failure)
            };
            assert_eq!(wait(1), Err(bad), "{shape:?}");
            assert_eq!(wait(0), Ok(()), "the one before the error: {shape:?}");
            assert_eq!(
                wait(2),
                Err(bad),
                "the one after it gets the first error: {shape:?}"
            );
            if shape.ext {
                assert_eq!(
                    qp.nop(long(t)).map_err(Error::failure),
                    Err(bad),
                    "a later post"
                );
                let (state, word) = nic.ext_state();
                assert_eq!((state, word.kind()), (STATE_ERROR, ErrorKind::Completion));
                assert_eq!(qp.error().map(Error::failure), Some(bad));
            }
        });
    });
}

#[test]
fn an_error_is_an_answer() {
    for cq in [CqKind::PerSlot, CqKind::Collapsed] {
        for start in [0, 0xfffe] {
            let shape = Shape {
                cq,
                start,
                ..Shape::default()
            };
            fails(shape, false);
        }
    }
    // Without the host's word a per-slot CQ still has the first error; a collapsed one has kept only the last.
    fails(
        Shape {
            cq: CqKind::PerSlot,
            ..Shape::default()
        },
        true,
    );
    fails(
        Shape {
            cq: CqKind::PerSlot,
            ext: false,
            soft: false,
            ..Shape::default()
        },
        true,
    );
}

#[test]
fn waits_end_at_their_deadline_and_nothing_is_lost() {
    let nic = Nic::new(
        Shape {
            depth: 4,
            ..Shape::default()
        },
        64,
    );
    nic.paused.store(true, Ordering::Relaxed);
    nic.while_running(|| {
        with(&nic, |qp, t| {
            let first = qp.nop(long(t)).expect("room");
            assert_eq!(
                qp.wait(first, Deadline::after(t, SHORT)),
                Err(Error::TIMED_OUT)
            );
            assert_eq!(qp.poll(first), Ok(false));
            for _ in 0..3 {
                qp.nop(long(t)).expect("room");
            }
            assert_eq!(qp.nop(by(t, SHORT)), Err(Error::NO_SPACE));
            assert_eq!(nic.index(1), 4, "giving up reserved nothing");
            nic.paused.store(false, Ordering::Relaxed);
            qp.nop(long(t)).expect("room again");
            qp.flush(long(t).deadline).expect("all done");
            assert_eq!(qp.poll(first), Ok(true), "lapped, so complete");
        });
    });
    assert_eq!(nic.executed.load(Ordering::Relaxed), 5);
}

#[test]
fn the_host_ends_waits() {
    for (word, error) in [
        (ErrorWord::state(ErrorKind::Closed), Error::CLOSED),
        (ErrorWord::state(ErrorKind::EngineDown), Error::ENGINE_DOWN),
    ] {
        let nic = Nic::new(Shape::default(), 64);
        with(&nic, |qp, t| {
            let ticket = qp.nop(long(t)).expect("room");
            nic.set_error(word);
            assert_eq!(qp.wait(ticket, long(t).deadline), Err(error));
            assert_eq!(qp.nop(long(t)), Err(error), "later posts fail at once");
        });
    }
    let hooks = Hooks::default();
    hooks.abort.store(true, Ordering::Relaxed);
    let nic = Nic::new(Shape::default(), 64);
    let grid = HostGrid::<1>::new(1, 1, hooks);
    let t = &grid.thread(0, 0);
    // SAFETY: as `with`.
    let qp = unsafe { Queue::new(t, nic.handle()) }.expect("an extension of this version");
    let ticket = qp.nop(long(t)).expect("room");
    assert_eq!(qp.wait(ticket, long(t).deadline), Err(Error::ABORTED));
}

#[test]
fn a_thread_that_died_between_costs_the_qp_and_nothing_else() {
    let nic = Nic::new(Shape::default(), 64);
    // Somebody reserved a slot and never published it.
    nic.set_index(0, 1);
    let grid = HostGrid::<1>::new(1, 1, Hooks::default());
    let t = &grid.thread(0, 0);
    // SAFETY: as `with`.
    let qp = unsafe { Qp::<_, Thread, sharing::Gpu>::new(t, nic.handle()) }
        .expect("an extension of this version");
    let start = Instant::now();
    assert_eq!(qp.nop(by(t, 0)), Err(Error::STUCK));
    assert!(start.elapsed() < nic::LONG, "it took {:?}", start.elapsed());
    assert_eq!(
        qp.nop(long(t)),
        Err(Error::QP_ERROR),
        "later posts fail at once"
    );
    assert_eq!(nic.ext_state().0, STATE_ERROR);
}

#[test]
fn a_warp_or_a_block_makes_one_call() {
    for block in [false, true] {
        let nic = Nic::new(
            Shape {
                handler: NicHandler::ProducerWord,
                ..Shape::default()
            },
            64,
        );
        let grid = HostGrid::<32>::new(1, 64, Hooks::default());
        nic.while_running(|| {
            std::thread::scope(|s| {
                for thread in 0..64 {
                    let (grid, nic) = (&grid, &nic);
                    s.spawn(move || {
                        let t = &grid.thread(0, thread);
                        let how = Post::by(Deadline::after(
                            t,
                            Duration::from_secs(60).as_nanos() as u64,
                        ));
                        let remote = Remote { addr: 0, key: KEY };
                        // SAFETY: as `with`; threads of one block share it.
                        let qp = unsafe { Qp::<_, Thread, sharing::Block>::new(t, nic.handle()) }
                            .expect("version");
                        let ticket = if block {
                            let qp = qp.scoped::<Block>();
                            let ticket = qp.signal_add(remote, 1, how).expect("room");
                            qp.wait(ticket, how.deadline).expect("done");
                            ticket
                        } else {
                            let qp = qp.scoped::<Warp>();
                            let ticket = qp.signal_add(remote, 1, how).expect("room");
                            qp.wait(ticket, how.deadline).expect("done");
                            ticket
                        };
                        assert!(ticket.0 < 2);
                    });
                }
            });
        });
        let calls = if block { 1 } else { 2 };
        assert_eq!(
            nic.memory.at(0).load(Ordering::Relaxed),
            calls,
            "additions by two warps of one block"
        );
    }
}
