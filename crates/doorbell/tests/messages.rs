//! Messages through the host library: kernels that answer and begin, CPU queues, rings that wrap, errors, resets.

mod common;

use std::time::Duration;

use common::{Bench, LONG, caller_driven, device};
use doorbell::cpu::{self, Arrival, Post, Ticket, deadline, local};
use doorbell::device_api::{Error as DeviceError, Failure};
use doorbell::params::{self, Area, message_flags};
use doorbell::{CpuQp, CqKind, Device, Dims, Place, Syndrome, connect_pair, export_array};

const WINDOW: usize = 1 << 14;

/// `ping` and `echo` on two queue pairs: messages in the first quarter of the source, answers in the second, the echo's buffers in the
/// target.
fn play(b: &Bench, depth: u32, flags: u32, size: u64, window: u64, every: u64, iters: u64) {
    let stride = size.next_multiple_of(8).max(8);
    let places = ((WINDOW as u64 / stride).min(64) as u32).next_power_of_two() / 2;
    let places = places.max(1);
    let new = || b.pd.qp().depth(64).receive_queue(depth).build().unwrap();
    let (x, y) = connect_pair(new(), new()).unwrap();
    let export = export_array(&[&x, &y], doorbell::ExportLayout::Spread).unwrap();
    let area = |mr: &doorbell::Mr, offset: u64| Area {
        addr: mr.addr() + offset,
        stride,
        key: mr.key(),
        mask: places - 1,
    };
    b.target.memory().fill(0).unwrap();
    let echo = params::Echo {
        qp: export.handle_of(1),
        buffers: area(&b.target, 0),
        answer_addr: b.source.addr() + WINDOW as u64,
        answer_key: b.source.key(),
        flags,
        every,
        iters,
        deadline_ns: LONG.as_nanos() as u64,
        status: b.status.device_addr() + 32,
    };
    let ping = params::Ping {
        qp: export.handle_of(0),
        out: area(&b.source, 0),
        back: area(&b.source, WINDOW as u64),
        out_pointer: b.source.memory().device_addr(),
        back_pointer: b.source.memory().device_addr() + WINDOW as u64,
        target_addr: b.target.addr(),
        target_key: b.target.key(),
        flags: flags | message_flags::CHECK,
        size,
        iters,
        window: window.min(if every == 1 { places.into() } else { window }),
        every,
        samples: 0,
        deadline_ns: LONG.as_nanos() as u64,
        status: b.status.device_addr(),
    };
    // SAFETY: the parameters are those of these kernels, and all they name outlives the launches.
    let (mut one, mut two) = unsafe {
        (
            b.device.launch("echo", Dims::new(1, 1), &echo).unwrap(),
            b.device.launch("ping", Dims::new(1, 1), &ping).unwrap(),
        )
    };
    two.wait(LONG).unwrap();
    one.wait(LONG).unwrap();
    let word = |i: usize| b.status.load(8 * i).unwrap();
    let why = |code| DeviceError::from_code(code).map(DeviceError::failure);
    let what =
        format!("depth {depth}, flags {flags}, {size} bytes, window {window}, every {every}");
    assert_eq!((why(word(0)), why(word(4))), (None, None), "{what}");
    assert_eq!((word(1), word(2), word(6)), (iters, iters, iters), "{what}");
    assert_eq!(word(5), iters.div_ceil(every), "{what}");
    let (mut sent, mut came) = (vec![0; size as usize], vec![0; size as usize]);
    for place in 0..iters.min(places.into()) {
        let at = (place * stride) as usize;
        b.source.read(at, &mut sent).unwrap();
        b.target.read(at, &mut came).unwrap();
        assert_eq!(sent, came, "{what}, place {place}");
        if every == 1 {
            b.source.read(WINDOW + at, &mut came).unwrap();
            assert_eq!(sent, came, "{what}, the answer in place {place}");
        }
    }
    let progress = export.progress(0).unwrap();
    assert_eq!(progress.receives_posted, progress.receives_completed);
}

#[test]
fn a_kernel_answers_what_arrives() {
    for make in [device as fn() -> Device, caller_driven] {
        let b = Bench::new(make(), Place::Host, 2 * WINDOW);
        for flags in [0, message_flags::WRITE] {
            for (depth, size, window, every, iters) in [
                (16, 8, 1, 1, 300),
                (1, 8, 1, 1, 50),
                (4, 0, 1, 1, 20),
                (64, 13, 8, 1, 1000),
                (32, 4000, 4, 1, 200),
                (64, 64, 48, 16, 5000),
                (64, 1, 33, 7, 999),
            ] {
                play(&b, depth, flags, size, window, every, iters);
            }
        }
    }
}

#[test]
fn messages_in_the_memory_of_a_gpu() {
    let b = Bench::new(device(), Place::Gpu, 2 * WINDOW);
    for flags in [0, message_flags::WRITE] {
        play(&b, 16, flags, 256, 4, 1, 300);
    }
}

#[test]
fn a_cpu_receives_across_every_wrap() {
    let b = Bench::new(caller_driven(), Place::Host, 4096);
    let qp = b.pd.qp().depth(8).receive_queue(4).build().unwrap();
    let qp = qp.connect_to_self().unwrap();
    assert_eq!(qp.recv_depth(), 4);
    let cq = qp.recv_cq().expect("a receive CQ");
    assert_eq!((cq.kind(), cq.entries()), (CqKind::PerSlot, 4));
    assert_ne!(cq.cqn(), qp.cq().cqn());
    let mut cpu = CpuQp::new(&qp).unwrap();
    let (queue, recv) = cpu.queues().unwrap();
    let by = deadline(LONG);
    let last = recv
        .recv_posts(4, |k| local(&b.target, u64::from(k) * 64, 64), by)
        .unwrap();
    assert_eq!(last, Ticket(3));
    // Past 16 bits of the record and of the CQEs' counters.
    for n in 0..70_000_u64 {
        let from = local(&b.source, n % 1000, 5 + n % 40);
        let sent = queue.send_imm(from, n as u32, Post::by(by)).unwrap();
        let got = recv.recv_wait(Ticket(n), by).unwrap();
        assert_eq!((got.arrival, got.imm), (Arrival::SendImm, n as u32));
        assert_eq!(u64::from(got.bytes), 5 + n % 40);
        queue.wait(sent, by).unwrap();
        assert_eq!(recv.recv_repost(1, by).unwrap(), Ticket(n + 4));
    }
    assert_eq!(cq.peek(0).unwrap()[63] >> 4, 3, "SEND with immediate");
}

#[test]
fn what_fails_is_told_on_both_sides_and_a_reset_repairs_it() {
    let b = Bench::new(device(), Place::Host, 4096);
    let new = || {
        b.pd.qp()
            .receive_queue(8)
            .receive_pieces(2)
            .build()
            .unwrap()
    };
    let (x, y) = connect_pair(new(), new()).unwrap();
    let (mut one, mut two) = (CpuQp::new(&x).unwrap(), CpuQp::new(&y).unwrap());
    let by = deadline(LONG);
    {
        let (queue, _) = one.queues().unwrap();
        let (_, recv) = two.queues().unwrap();
        let first = recv.recv_post(local(&b.target, 0, 16), by).unwrap();
        let second = recv.recv_post(local(&b.target, 0, 16), by).unwrap();
        let sent = queue.send(local(&b.source, 0, 17), Post::by(by)).unwrap();
        let Err(e) = queue.wait(sent, by) else {
            panic!("a message longer than its receive");
        };
        let syndrome = |e: DeviceError| match e.failure() {
            Failure::Completion { syndrome, .. } => Syndrome(syndrome),
            other => panic!("{other:?}"),
        };
        assert_eq!(syndrome(e), Syndrome::REMOTE_INVAL_REQ);
        let e = recv.recv_wait(first, by).unwrap_err();
        assert_eq!(syndrome(e), Syndrome::LOCAL_LENGTH);
        let e = recv.recv_wait(second, by).unwrap_err();
        assert_eq!(syndrome(e), Syndrome::LOCAL_LENGTH, "the first error");
        assert!(recv.recv_post(local(&b.target, 0, 16), by).is_err());
    }
    assert!(two.export().receive_error(0).unwrap().is_some());
    assert!(x.check().is_err() && y.check().is_err());
    // The same numbers, the same exports, from the beginning.
    let (x, y) = (x.reset(LONG).unwrap(), y.reset(LONG).unwrap());
    let (_x, _y) = connect_pair(x, y).unwrap();
    let (queue, _) = one.queues().unwrap();
    let (_, recv) = two.queues().unwrap();
    let ticket = recv
        .recv_post_pieces(1, 2, |_, i| local(&b.target, u64::from(i) * 100, 10), by)
        .unwrap();
    assert_eq!(ticket, Ticket(0));
    queue.send(local(&b.source, 0, 17), Post::by(by)).unwrap();
    assert_eq!(recv.recv_wait(ticket, by).unwrap().bytes, 17);
    let (mut sent, mut came) = ([0; 17], [0; 17]);
    b.source.read(0, &mut sent).unwrap();
    b.target.read(0, &mut came[..10]).unwrap();
    b.target.read(100, &mut came[10..]).unwrap();
    assert_eq!(sent, came);
}

#[test]
fn waiting_for_a_message_ends_at_its_deadline_and_with_the_queue_pair() {
    let b = Bench::new(device(), Place::Host, 4096);
    let qp = b.pd.qp().receive_queue(8).build().unwrap();
    let qp = qp.connect_to_self().unwrap();
    let mut cpu = CpuQp::new(&qp).unwrap();
    let (_, recv) = cpu.queues().unwrap();
    let ticket = recv
        .recv_post(local(&b.target, 0, 16), deadline(LONG))
        .unwrap();
    let soon = deadline(Duration::from_millis(20));
    assert_eq!(recv.recv_wait(ticket, soon), Err(DeviceError::TIMED_OUT));
    assert_eq!(recv.recv_poll(ticket), Ok(None));
    qp.fail().unwrap();
    assert!(recv.recv_wait(ticket, deadline(LONG)).is_err());
    assert!(
        recv.recv_wait(Ticket(1), deadline(LONG)).is_err(),
        "not even posted"
    );
}

#[test]
fn what_a_receive_queue_cannot_be_is_refused() {
    let b = Bench::new(device(), Place::Host, 4096);
    for (depth, pieces) in [(3, 1), (65_536, 1), (8, 3), (8, 64), (8, 0)] {
        let built =
            b.pd.qp()
                .receive_queue(depth)
                .receive_pieces(pieces)
                .build();
        assert!(built.is_err(), "{depth} receives of {pieces} pieces");
    }
    let without = b.qp();
    assert!(without.recv_cq().is_none());
    let mut cpu = CpuQp::new(&without).unwrap();
    let text = cpu.queues().unwrap_err().to_string();
    assert!(text.contains("receive_queue"), "{text}");
    let queue = cpu.queue().unwrap();
    let by = cpu::deadline(LONG);
    let sent = queue.send(local(&b.source, 0, 8), Post::by(by)).unwrap();
    assert!(queue.wait(sent, by).is_err(), "nobody receives");
}
