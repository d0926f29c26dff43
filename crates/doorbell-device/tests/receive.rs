//! Receives: what is posted, what a message says, how each wait ends, and indexes at every wrap.

mod nic;

use std::sync::atomic::Ordering;

use doorbell_device::host::{Hooks, HostGrid, HostThread};
use doorbell_device::layout::{ErrorKind, ErrorWord};
use doorbell_device::scope::{Block, Scope, Sharing, Thread, Warp, sharing};
use doorbell_device::{
    Arrival, Deadline, Error, Local, MAX_SEND_INLINE, Post, Qp, Received, RecvQueue, Remote,
    Ticket, Wr,
};
use doorbell_wire::cqe::Kind;
use doorbell_wire::{Syndrome, Vendor, Wqe};
use nic::{KEY, Nic, Shape, qpn};

const SHORT: u64 = 20_000_000;

fn shape(receives: u32) -> Shape {
    Shape {
        receives,
        ..Shape::default()
    }
}

fn local(word: u64, words: u64) -> Local {
    Local {
        addr: word * 8,
        key: KEY,
        len: words * 8,
    }
}

fn with<S: Scope, M: Sharing, R>(
    nic: &Nic,
    f: impl FnOnce(RecvQueue<'_, &HostThread<1>, S, M>, &HostThread<1>) -> R,
) -> R {
    let grid = HostGrid::<1>::new(1, 1, Hooks::default());
    let thread = grid.thread(0, 0);
    // SAFETY: the QP and all it names live in `nic`; one value at a time uses it.
    let queue = unsafe { RecvQueue::new(&thread, nic.handle()) }.expect("a receive queue");
    f(queue, &thread)
}

fn long<A: doorbell_device::Arch>(t: A) -> Deadline {
    Deadline::after(t, nic::LONG.as_nanos() as u64)
}

fn received(ticket: u64, arrival: Arrival, bytes: u32, imm: u32) -> Received {
    Received {
        ticket: Ticket(ticket),
        arrival,
        bytes,
        imm,
    }
}

fn messages<M: Sharing>() {
    // Beginnings before each wrap of a counter: 16 bits, 24, 32.
    for start in [0, 0xfffd, 0xff_fffe, 0xffff_fffd] {
        let nic = Nic::new(Shape { start, ..shape(4) }, 64);
        with::<Thread, M, _>(&nic, |q, t| {
            let by = long(t);
            for lap in 0..5 {
                let first = start + lap * 4;
                let last = q
                    .recv_posts(4, |k| local(u64::from(k) * 2, 2), by)
                    .expect("room");
                assert_eq!(last, Ticket(first + 3));
                assert_eq!(nic.waiting(), 4);
                assert_eq!(q.recv_poll(Ticket(first)), Ok(None));
                assert!(nic.arrive(Kind::ResponderSend, &[1, 2], 9));
                assert!(nic.arrive(Kind::ResponderSendImm, &[3], 0xdead_beef));
                assert!(nic.arrive(Kind::ResponderWriteImm, &[0; 5], 7));
                assert_eq!(
                    q.recv_wait(Ticket(first + 1), by),
                    Ok(received(first + 1, Arrival::SendImm, 8, 0xdead_beef)),
                    "in any order"
                );
                assert_eq!(
                    q.recv_poll(Ticket(first)),
                    Ok(Some(received(first, Arrival::Send, 16, 0)))
                );
                assert_eq!(
                    q.recv_wait(Ticket(first + 2), by),
                    Ok(received(first + 2, Arrival::WriteImm, 40, 7))
                );
                assert_eq!(nic.memory.at(1).load(Ordering::Relaxed), 2);
                assert_eq!(nic.memory.at(2).load(Ordering::Relaxed), 3);
                assert_eq!(
                    q.recv_wait(Ticket(first + 3), Deadline::after(t, SHORT)),
                    Err(Error::TIMED_OUT)
                );
                assert!(nic.arrive(Kind::ResponderSend, &[], 0));
                assert_eq!(
                    q.recv_wait(last, by),
                    Ok(received(first + 3, Arrival::Send, 0, 0))
                );
            }
        });
    }
}

#[test]
fn a_message_says_what_came_across_every_wrap() {
    messages::<sharing::Exclusive>();
    messages::<sharing::Gpu>();
}

#[test]
fn receives_hold_none_one_or_several_pieces() {
    let nic = Nic::new(
        Shape {
            pieces: 4,
            ..shape(8)
        },
        64,
    );
    with::<Thread, sharing::Exclusive, _>(&nic, |q, t| {
        let by = long(t);
        q.recv_post(local(0, 0), by).expect("no memory at all");
        q.recv_post_pieces(1, 4, |_, i| local(u64::from(i) * 8, u64::from(i % 2)), by)
            .expect("two of four pieces are empty");
        q.recv_post_pieces(1, 0, |_, _| local(0, 0), by)
            .expect("no pieces");
        assert_eq!(
            q.recv_post_pieces(1, 5, |_, _| local(0, 1), by),
            Err(Error::INVALID)
        );
        assert!(nic.arrive(Kind::ResponderSendImm, &[], 3));
        assert!(nic.arrive(Kind::ResponderSend, &[5, 6], 0));
        assert!(nic.arrive(Kind::ResponderWriteImm, &[1; 8], 4));
        assert_eq!(nic.memory.at(8).load(Ordering::Relaxed), 5);
        assert_eq!(nic.memory.at(24).load(Ordering::Relaxed), 6);
        let last = q.recv_wait(Ticket(2), by).expect("came");
        assert_eq!((last.bytes, last.imm), (64, 4));
    });
}

#[test]
fn the_same_receives_again_by_the_record_alone() {
    let nic = Nic::new(shape(4), 64);
    with::<Thread, sharing::Exclusive, _>(&nic, |q, t| {
        let by = long(t);
        assert_eq!(
            q.recv_repost(1, by),
            Err(Error::INVALID),
            "nothing to repeat"
        );
        q.recv_posts(4, |k| local(u64::from(k), 1), by)
            .expect("room");
        for n in 0..100_000_u64 {
            assert!(nic.arrive(Kind::ResponderSend, &[n + 7], 0));
            assert_eq!(q.recv_wait(Ticket(n), by).map(|r| r.bytes), Ok(8));
            assert_eq!(nic.memory.at(n as usize % 4).load(Ordering::Relaxed), n + 7);
            q.recv_repost(1, by).expect("room");
        }
    });
}

#[test]
fn a_full_queue_takes_no_more_and_gives_up() {
    let nic = Nic::new(shape(4), 64);
    with::<Thread, sharing::Gpu, _>(&nic, |q, t| {
        let by = long(t);
        q.recv_posts(4, |_| local(0, 1), by).expect("room");
        let soon = Deadline::after(t, SHORT);
        assert_eq!(q.recv_post(local(0, 1), soon), Err(Error::NO_SPACE));
        assert_eq!(nic.waiting(), 4, "giving up reserved nothing");
        assert_eq!(q.recv_posts(5, |_| local(0, 1), by), Err(Error::INVALID));
        assert_eq!(q.recv_posts(0, |_| local(0, 1), by), Err(Error::INVALID));
        let long = Local {
            len: (1 << 30) + 1,
            ..local(0, 0)
        };
        assert_eq!(q.recv_post(long, by), Err(Error::INVALID));
        assert!(nic.arrive(Kind::ResponderSend, &[1], 0));
        q.recv_post(local(0, 1), by)
            .expect("room again, without anybody having asked for the message");
        assert!(nic.arrive(Kind::ResponderSend, &[2], 0));
        assert!(nic.arrive(Kind::ResponderSend, &[3], 0));
        assert!(nic.arrive(Kind::ResponderSend, &[4], 0));
        assert!(nic.arrive(Kind::ResponderSend, &[5], 0));
        assert_eq!(q.recv_poll(Ticket(0)), Err(Error::LAPPED));
        assert_eq!(q.recv_wait(Ticket(4), by).map(|r| r.ticket), Ok(Ticket(4)));
    });
    let without = Nic::new(shape(0), 64);
    let grid = HostGrid::<1>::new(1, 1, Hooks::default());
    let t = &grid.thread(0, 0);
    // SAFETY: as `with`.
    let none = unsafe { RecvQueue::<_, Thread, sharing::Gpu>::new(t, without.handle()) };
    assert_eq!(none.err(), Some(Error::INVALID), "no receive queue");
}

fn failures<M: Sharing>() {
    let nic = Nic::new(shape(8), 64);
    with::<Thread, M, _>(&nic, |q, t| {
        let by = long(t);
        q.recv_posts(4, |_| local(0, 1), by).expect("room");
        assert!(nic.arrive(Kind::ResponderSend, &[1], 0));
        nic.fail_receives(1, Syndrome::LOCAL_LENGTH, Vendor(0x8d));
        nic.fail_receives(2, Syndrome::WR_FLUSH, Vendor(0));
        let first = Error::completion(Syndrome::LOCAL_LENGTH.0, 0x8d, 1);
        assert_eq!(q.recv_wait(Ticket(1), by), Err(first));
        assert_eq!(q.recv_wait(Ticket(3), by), Err(first), "not the flush");
        assert_eq!(
            q.recv_wait(Ticket(0), by).map(|r| r.bytes),
            Ok(8),
            "what came before it is good"
        );
        assert_eq!(q.recv_post(local(0, 1), by), Err(first), "at once");
    });
}

#[test]
fn the_first_error_is_the_answer() {
    failures::<sharing::Exclusive>();
    failures::<sharing::Gpu>();
}

#[test]
fn an_error_of_the_qp_ends_the_wait() {
    let nic = Nic::new(shape(4), 64);
    with::<Thread, sharing::Gpu, _>(&nic, |q, t| {
        let by = long(t);
        let ticket = q.recv_posts(2, |_| local(0, 1), by).expect("room");
        assert!(nic.arrive(Kind::ResponderSend, &[1], 0));
        nic.set_error(ErrorWord::state(ErrorKind::Closed));
        assert!(q.recv_wait(Ticket(0), by).is_ok(), "it came before");
        assert_eq!(q.recv_wait(ticket, by), Err(Error::CLOSED));
        assert_eq!(q.recv_poll(ticket), Err(Error::CLOSED));
    });
}

/// Threads of two blocks share a receive queue: each posts, and waits for what took its receive. One that is not scheduled while the others
/// go once around the ring is told that it was lapped; nobody gets another's message.
#[test]
fn threads_share_a_receive_queue() {
    const THREADS: u32 = 8;
    const ROUNDS: u64 = 200;
    let nic = Nic::new(shape(16), 64);
    let grid = HostGrid::<1>::new(2, THREADS / 2, Hooks::default());
    let lapped = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|s| {
        for id in 0..THREADS {
            let (grid, nic, lapped) = (&grid, &nic, &lapped);
            s.spawn(move || {
                let t = &grid.thread(id / 4, id % 4);
                // SAFETY: as `with`; the threads of a GPU share it.
                let q = unsafe { RecvQueue::<_, Thread, sharing::Gpu>::new(t, nic.handle()) }
                    .expect("a receive queue");
                for _ in 0..ROUNDS {
                    let ticket = q.recv_post(local(0, 1), long(t)).expect("room");
                    match q.recv_wait(ticket, long(t)) {
                        Ok(got) => assert_eq!(u64::from(got.imm), ticket.0, "the one that took it"),
                        Err(Error::LAPPED) => {
                            lapped.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        let deadline = std::time::Instant::now() + nic::LONG;
        let mut sent = 0_u32;
        while u64::from(sent) < u64::from(THREADS) * ROUNDS {
            if nic.arrive(Kind::ResponderSendImm, &[1], sent) {
                sent += 1;
            } else {
                assert!(std::time::Instant::now() < deadline, "{sent} messages");
                std::thread::yield_now();
            }
        }
    });
    assert_eq!(nic.waiting(), 0);
    let lapped = lapped.into_inner();
    assert!(
        lapped < u64::from(THREADS) * ROUNDS / 2,
        "{lapped} of them lapped"
    );
}

/// Warps of 32 emulated lanes: each lane posts for itself, a warp makes one call, a block makes one call.
#[test]
fn lanes_warps_and_blocks_receive() {
    let nic = Nic::new(shape(256), 64);
    let grid = HostGrid::<32>::new(1, 64, Hooks::default());
    std::thread::scope(|s| {
        for id in 0..64 {
            let (grid, nic) = (&grid, &nic);
            s.spawn(move || {
                let t = &grid.thread(0, id);
                let by = long(t);
                let handle = nic.handle();
                // SAFETY: as `with`; the threads of a block share it.
                let q = unsafe { RecvQueue::<_, Thread, sharing::Block>::new(t, handle) }
                    .expect("a receive queue");
                let mine = q.recv_posts(2, |_| local(0, 1), by).expect("room");
                let got = q.recv_wait(mine, by).expect("a message");
                assert_eq!(u64::from(got.imm), mine.0);
                // SAFETY: as above.
                let q = unsafe { RecvQueue::<_, Warp, sharing::Block>::new(t, handle) }
                    .expect("a receive queue");
                let ours = q.recv_post(local(0, 1), by).expect("room");
                let got = q.recv_wait(ours, by).expect("a message");
                assert_eq!(u64::from(got.imm), ours.0, "all lanes hear it");
                assert_eq!(got.ticket, ours);
                // SAFETY: as above.
                let q = unsafe { RecvQueue::<_, Block, sharing::Block>::new(t, handle) }
                    .expect("a receive queue");
                let ours = q.recv_post(local(0, 1), by).expect("room");
                let got = q.recv_wait(ours, by).expect("a message");
                assert_eq!(u64::from(got.imm), ours.0, "all threads hear it");
                assert_eq!(q.recv_poll(ours), Ok(Some(got)));
            });
        }
        let deadline = std::time::Instant::now() + nic::LONG;
        // Two for each lane, one for each of two warps, one for the block.
        let mut sent = 0;
        while sent < 64 * 2 + 2 + 1 {
            if nic.arrive(Kind::ResponderSendImm, &[1], sent) {
                sent += 1;
            } else {
                assert!(std::time::Instant::now() < deadline, "{sent} messages");
                std::thread::yield_now();
            }
        }
    });
    assert_eq!(nic.waiting(), 0);
}

#[test]
fn sends_are_what_the_wire_crate_builds() {
    let nic = Nic::new(Shape::default(), 64);
    let grid = HostGrid::<1>::new(1, 1, Hooks::default());
    let t = &grid.thread(0, 0);
    // SAFETY: as `with`.
    let qp = unsafe { Qp::<_, Thread, sharing::Exclusive>::new(t, nic.handle()) }.expect("version");
    let how = Post::by(long(t));
    let remote = Remote {
        addr: 0x1122_3344,
        key: KEY,
    };
    let here = local(3, 2);
    let wire = doorbell_wire::Local {
        addr: here.addr,
        key: KEY,
        len: 16,
    };
    let bytes: Vec<u8> = (0..MAX_SEND_INLINE as u8).collect();
    let words: [u32; 11] = std::array::from_fn(|i| {
        u32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().expect("four"))
    });
    let mut expected = Vec::new();
    qp.send(here, how).expect("room");
    expected.push(Wqe::send(wire).expect("a length"));
    qp.send_imm(here, 0x0102_0304, how).expect("room");
    expected.push(Wqe::send_imm(wire, 0x0102_0304).expect("a length"));
    qp.write_imm(remote, here, 5, how).expect("room");
    expected.push(Wqe::write_imm(remote, wire, 5).expect("a length"));
    for len in [1, 8, 12, 13, 28, 29, 44] {
        qp.send_inline(words, len, None, how).expect("room");
        expected.push(Wqe::send_inline(&bytes[..len as usize]).expect("short"));
    }
    for (index, wqe) in expected.iter().enumerate() {
        let want = wqe.emit(index as u16, qpn());
        let got = nic.slot(index as u64);
        let ds = usize::from(doorbell_wire::Ctrl::parse(got[0]).ds);
        // As text: padding behind inline bytes and the control segment's flags are the poster's business.
        let text = |chunks| format!("{:?}", doorbell_wire::Request::parse(chunks));
        assert_eq!(text(&got[..ds]), text(&want[..ds]), "{index}");
    }
    let too_long = Local {
        len: (1 << 30) + 1,
        ..here
    };
    for wr in [
        Wr::Send { local: too_long },
        Wr::SendImm {
            local: too_long,
            imm: 0,
        },
        Wr::PutImm {
            remote,
            local: too_long,
            imm: 0,
        },
    ] {
        assert_eq!(qp.submit(wr, how), Err(Error::INVALID));
    }
    assert_eq!(qp.send_inline(words, 45, None, how), Err(Error::INVALID));
    assert_eq!(qp.send_inline([0; 2], 9, None, how), Err(Error::INVALID));
    // Messages without bytes are messages.
    let empty = local(0, 0);
    let ticket = qp.send(empty, how).expect("room");
    assert_eq!(doorbell_wire::Ctrl::parse(nic.slot(ticket.0)[0]).ds, 1);
    let ticket = qp.send_inline([0; 1], 0, Some(1), how).expect("room");
    assert_eq!(doorbell_wire::Ctrl::parse(nic.slot(ticket.0)[0]).ds, 1);
    let ticket = qp.write_imm(remote, empty, 1, how).expect("room");
    assert_eq!(doorbell_wire::Ctrl::parse(nic.slot(ticket.0)[0]).ds, 2);
}
