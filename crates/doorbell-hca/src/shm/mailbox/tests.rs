//! QPs come and go, requests are answered in order, and what lies is refused.

use std::os::fd::AsFd;

use super::*;

fn pair(slot_bits: u32) -> (Arc<Mailbox>, Arc<MailboxView>) {
    let mailbox = Mailbox::new(slot_bits).unwrap();
    let map = Mapping::of_peer(
        mailbox.region().memfd().as_fd(),
        mailbox.region().len() as u64,
        true,
    )
    .unwrap();
    (Arc::new(mailbox), Arc::new(MailboxView::new(map).unwrap()))
}

fn qp(qpn: u32) -> SlotQp {
    SlotQp {
        qpn,
        pd: 3,
        peer_qpn: 77,
        receives: true,
    }
}

fn request(n: u32) -> Request {
    Request {
        opcode: 9,
        key: n,
        addr: u64::from(n) << 40,
        len: n,
        imm: !n,
        operands: [1, u64::from(n)],
    }
}

#[test]
fn qps_come_and_go() {
    let (mailbox, view) = pair(1);
    assert!(view.find(100).is_none());
    let a = Outbox::open(&mailbox, qp(100)).unwrap();
    let b = Outbox::open(&mailbox, qp(102)).unwrap();
    assert!(matches!(
        Outbox::open(&mailbox, qp(102)),
        Err(ShmError::InUse { .. })
    ));
    assert!(matches!(
        Outbox::open(&mailbox, qp(104)),
        Err(ShmError::Limit { .. })
    ));
    let seen = view.find(102).unwrap();
    assert_eq!(seen.qp(), qp(102));
    assert!(seen.is_ready());
    drop(b);
    assert!(!seen.is_ready() && view.find(102).is_none());
    let _c = Outbox::open(&mailbox, qp(102)).unwrap();
    assert!(!seen.is_ready(), "a new life is not the old one");
    assert!(view.find(102).unwrap().is_ready());
    drop(a);
}

#[test]
fn requests_are_answered_in_order_and_the_ring_fills() {
    let (mailbox, view) = pair(0);
    let mut out = Outbox::open(&mailbox, qp(5)).unwrap();
    let mut inbox = view.find(5).unwrap().inbox();
    let quiet = view.attention();
    assert_eq!((inbox.request(), out.answer()), (None, None));
    for round in 0..100u32 {
        let numbers: Vec<u32> = (0..RING)
            .map(|i| out.send(&request(round * RING + i)).unwrap())
            .collect();
        assert_eq!(out.send(&request(0)), None, "full");
        for (i, n) in numbers.into_iter().enumerate() {
            let i = round * RING + i as u32;
            assert_eq!(out.answer(), None);
            assert_eq!(inbox.request(), Some(request(i)));
            inbox.accept();
            inbox.reply(Answer {
                status: i,
                result: u64::from(i) << 33,
            });
            assert_eq!(
                out.answer(),
                Some((
                    n,
                    Answer {
                        status: i,
                        result: u64::from(i) << 33
                    }
                ))
            );
        }
    }
    assert_eq!(view.attention(), quiet + 100 * u64::from(RING));
}

#[test]
fn a_new_life_of_a_slot_shows_nothing_of_the_old_one() {
    let (mailbox, view) = pair(0);
    for _ in 0..50 {
        let mut out = Outbox::open(&mailbox, qp(5)).unwrap();
        let inbox = view.find(5).unwrap().inbox();
        assert_eq!(inbox.request(), None);
        assert_eq!(out.answer(), None);
        for n in 0..5 {
            out.send(&request(n)).unwrap();
        }
        let mut late = view.find(5).unwrap().inbox();
        drop(out);
        let mut out = Outbox::open(&mailbox, qp(5)).unwrap();
        out.send(&request(99)).unwrap();
        late.accept();
        late.reply(Answer {
            status: 1,
            result: 1,
        });
        assert_eq!(out.answer(), None, "an answer of the old life");
        assert_eq!(view.find(5).unwrap().inbox().request(), Some(request(99)));
    }
}

#[test]
fn two_threads_exchange_without_loss() {
    let (mailbox, view) = pair(0);
    let mut out = Outbox::open(&mailbox, qp(5)).unwrap();
    let mut inbox = view.find(5).unwrap().inbox();
    const N: u32 = 20_000;
    std::thread::scope(|s| {
        s.spawn(move || {
            for i in 0..N {
                let got = loop {
                    match inbox.request() {
                        Some(r) => break r,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(got, request(i));
                inbox.accept();
                inbox.reply(Answer {
                    status: 0,
                    result: u64::from(i),
                });
            }
        });
        let (mut sent, mut answered) = (0, 0);
        while answered < N {
            while sent < N && out.send(&request(sent)).is_some() {
                sent += 1;
            }
            match out.answer() {
                Some((_, a)) => {
                    assert_eq!(a.result, u64::from(answered));
                    answered += 1;
                }
                None => std::thread::yield_now(),
            }
        }
    });
}

#[test]
fn a_header_that_lies_is_refused() {
    let lie = |change: fn(&mut Header)| {
        let region = SharedRegion::new(bytes_of(2)).unwrap();
        let mut header = Header {
            magic: MAGIC,
            version: u32::from(VERSION),
            slot_bits: 2,
        };
        change(&mut header);
        // SAFETY: our own fresh page.
        unsafe { region.ptr().as_ptr().cast::<Header>().write(header) };
        let map = Mapping::of_peer(region.memfd().as_fd(), region.len() as u64, true).unwrap();
        MailboxView::new(map).map(|_| ()).map_err(|r| r.code)
    };
    assert_eq!(lie(|_| ()), Ok(()));
    assert_eq!(lie(|h| h.magic[7] = 0), Err(RefusalCode::Layout));
    assert_eq!(lie(|h| h.version += 1), Err(RefusalCode::Layout));
    assert_eq!(lie(|h| h.slot_bits = 4), Err(RefusalCode::Layout));
    assert_eq!(lie(|h| h.slot_bits = u32::MAX), Err(RefusalCode::Layout));
}
