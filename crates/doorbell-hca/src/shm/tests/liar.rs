//! A peer that lies, floods or keeps silent: it hears why it was turned away, and others are served.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use super::super::{
    mailbox::Mailbox,
    proto::{Hello, Message, NO_REGION, RegionKind},
    socket::{Listener, Received, Socket},
};
use super::*;

/// A peer that speaks for itself.
struct Liar {
    socket: Socket,
}

impl Liar {
    fn connect(name: &str) -> Self {
        let mut socket = Socket::connect(&address(name));
        assert!(eventually(|| {
            if socket.is_err() {
                socket = Socket::connect(&address(name));
            }
            socket.is_ok()
        }));
        Self {
            socket: socket.unwrap(),
        }
    }

    fn say(&self, message: &Message, fds: &[&OwnedFd]) {
        self.raw(&message.encode(), fds);
    }

    fn raw(&self, bytes: &[u8], fds: &[&OwnedFd]) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
        // Cut off already is fine: the answer is read next.
        let _ = sendmsg(
            &self.socket,
            &[std::io::IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
    }

    fn hello(&self) -> (TableMemory, Mailbox) {
        let (table, mailbox) = (TableMemory::new(4).unwrap(), Mailbox::new(0).unwrap());
        let hello = Hello {
            nonce: 1,
            pid: 1,
            holder: 1,
            table_len: table.bytes() as u64,
            mailbox_len: mailbox.region().len() as u64,
            words_len: mailbox.region().len() as u64,
        };
        let table_fd = table.fd().try_clone_to_owned().unwrap();
        let (mailbox_fd, words) = (mailbox.region().memfd(), mailbox.region().memfd());
        self.say(&Message::Hello(hello), &[&table_fd, mailbox_fd, words]);
        (table, mailbox)
    }

    /// The next message.
    fn hear(&self) -> Message {
        let mut heard = None;
        assert!(eventually(|| match self.socket.receive().unwrap() {
            Received::Nothing => false,
            Received::End => true,
            Received::Message(bytes, _) => {
                heard = Some(Message::decode(&bytes).unwrap());
                true
            }
        }));
        heard.expect("the socket ended without a reason")
    }

    /// The refusal, whatever comes before it.
    fn refusal(&self) -> Refusal {
        loop {
            if let Message::Refuse(refusal) = self.hear() {
                return refusal;
            }
        }
    }
}

#[test]
fn a_peer_that_lies_hears_why_and_others_are_served() {
    let quick = ShmConfig {
        handshake: Duration::from_millis(300),
        ..config()
    };
    let honest = Side::new(config());
    let a = Side::new(quick);
    let listener = a.shm.listen(&address("liar")).unwrap();
    let memfd = SharedRegion::new(4096).unwrap();
    let unsealed = rustix::fs::memfd_create(
        "liar",
        rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING,
    )
    .unwrap();
    rustix::fs::ftruncate(&unsealed, 4096).unwrap();
    let table = TableMemory::new(4).unwrap();
    let table_fd = table.fd().try_clone_to_owned().unwrap();
    let hello = |table_len, mailbox_len| {
        let words_len = 4096;
        Message::Hello(Hello {
            nonce: 1,
            pid: 1,
            holder: 1,
            table_len,
            mailbox_len,
            words_len,
        })
    };
    let add = |id, len, kind| Message::RegionAdd {
        id,
        seq: 0,
        len,
        kind,
    };
    let host = RegionKind::Host { writable: true };

    type Lie<'a> = (&'a str, RefusalCode, Box<dyn Fn(&Liar) + 'a>);
    let lies: Vec<Lie<'_>> = vec![
        (
            "another program",
            RefusalCode::Magic,
            Box::new(|l| l.raw(b"GET / HTTP/1.1\r\n", &[])),
        ),
        (
            "another version",
            RefusalCode::Version,
            Box::new(|l| {
                let mut bytes = hello(0, 0).encode();
                bytes[8] = 9;
                l.raw(&bytes, &[]);
            }),
        ),
        (
            "garbage",
            RefusalCode::Garbage,
            Box::new(|l| l.raw(b"DOORBELL\x02\x00\xff\xff\x10\x00\x00\x00", &[])),
        ),
        (
            "too long",
            RefusalCode::Garbage,
            Box::new(|l| l.raw(&[0x44; 5000], &[])),
        ),
        (
            "no descriptors",
            RefusalCode::Descriptors,
            Box::new(|l| l.say_short(&hello(4096, 4096))),
        ),
        (
            "nine descriptors",
            RefusalCode::Descriptors,
            Box::new(|l| {
                l.raw(&hello(4096, 4096).encode(), &[memfd.memfd().as_ref(); 9]);
            }),
        ),
        (
            "a descriptor where none belongs",
            RefusalCode::Descriptors,
            Box::new(|l| {
                l.hello();
                l.say(&Message::Bye, &[memfd.memfd()]);
            }),
        ),
        (
            "unsealed table",
            RefusalCode::NotSealed,
            Box::new(|l| {
                l.say(
                    &hello(4096, 4096),
                    &[&unsealed, memfd.memfd(), memfd.memfd()],
                )
            }),
        ),
        (
            "a table larger than its memfd",
            RefusalCode::Size,
            Box::new(|l| {
                l.say(
                    &hello(8192, 4096),
                    &[&table_fd, memfd.memfd(), memfd.memfd()],
                )
            }),
        ),
        (
            "a table that is none",
            RefusalCode::Layout,
            Box::new(|l| {
                l.say(
                    &hello(4096, 4096),
                    &[memfd.memfd(), memfd.memfd(), memfd.memfd()],
                )
            }),
        ),
        (
            "a mailbox that is none",
            RefusalCode::Layout,
            Box::new(|l| {
                l.say(
                    &hello(table.bytes() as u64, 4096),
                    &[&table_fd, memfd.memfd(), memfd.memfd()],
                );
            }),
        ),
        (
            "a region before hello",
            RefusalCode::OutOfOrder,
            Box::new(|l| l.say(&add(1, 4096, host.clone()), &[memfd.memfd()])),
        ),
        (
            "hello twice",
            RefusalCode::OutOfOrder,
            Box::new(|l| {
                l.hello();
                l.hello();
            }),
        ),
        (
            "an unsealed region",
            RefusalCode::NotSealed,
            Box::new(|l| {
                l.hello();
                l.say(&add(1, 4096, host.clone()), &[&unsealed]);
            }),
        ),
        (
            "a region larger than its memfd",
            RefusalCode::Size,
            Box::new(|l| {
                l.hello();
                l.say(&add(1, 1 << 40, host.clone()), &[memfd.memfd()]);
            }),
        ),
        (
            "a region number out of range",
            RefusalCode::Limit,
            Box::new(|l| {
                l.hello();
                l.say(&add(u32::MAX, 4096, host.clone()), &[memfd.memfd()]);
            }),
        ),
        (
            "a region twice",
            RefusalCode::OutOfOrder,
            Box::new(|l| {
                l.hello();
                l.say(&add(1, 4096, host.clone()), &[memfd.memfd()]);
                l.say(&add(1, 4096, host.clone()), &[memfd.memfd()]);
            }),
        ),
        (
            "fewer regions than promised",
            RefusalCode::OutOfOrder,
            Box::new(|l| {
                l.hello();
                l.say(&Message::Ready { regions: 1 }, &[]);
            }),
        ),
        (
            "a revocation of nothing",
            RefusalCode::OutOfOrder,
            Box::new(|l| {
                l.hello();
                l.say(
                    &Message::Revoke {
                        epoch: 1,
                        region: 5,
                    },
                    &[],
                );
            }),
        ),
        (
            "an epoch that jumps",
            RefusalCode::OutOfOrder,
            Box::new(|l| {
                l.hello();
                l.say(
                    &Message::Revoke {
                        epoch: 2,
                        region: NO_REGION,
                    },
                    &[],
                );
            }),
        ),
        (
            "an answer nobody asked for",
            RefusalCode::OutOfOrder,
            Box::new(|l| {
                l.hello();
                l.say(
                    &Message::RegionAck {
                        seq: 77,
                        refused: None,
                    },
                    &[],
                );
            }),
        ),
        (
            "an answer to no revocation",
            RefusalCode::OutOfOrder,
            Box::new(|l| {
                l.hello();
                l.say(&Message::RevokeAck { epoch: 1 }, &[]);
            }),
        ),
        (
            "an answer to no goodbye",
            RefusalCode::OutOfOrder,
            Box::new(|l| {
                l.hello();
                l.say(&Message::ByeAck, &[]);
            }),
        ),
        (
            "more application messages than the window",
            RefusalCode::Limit,
            Box::new(|l| {
                l.hello();
                l.say(&Message::Ready { regions: 0 }, &[]);
                // The peer is accepted nowhere and takes nothing.
                let flood = Message::App(vec![1; 10]).encode();
                assert!(eventually(
                    || (0..8).any(|_| l.socket.send(&flood, &[]).is_err())
                ));
            }),
        ),
        ("silence", RefusalCode::Deadline, Box::new(|_| ())),
        (
            "silence after hello",
            RefusalCode::Deadline,
            Box::new(|l| drop(l.hello())),
        ),
    ];
    for (what, code, lie) in &lies {
        let liar = Liar::connect("liar");
        println!("{what}");
        lie(&liar);
        let refusal = liar.refusal();
        assert_eq!(refusal.code, *code, "{what}: {refusal}");
        if *code == RefusalCode::Version {
            assert!(
                refusal.text.contains("version 9") && refusal.text.contains("version 2"),
                "{refusal}"
            );
        }
        // Who waits for somebody to come hears why nobody did, unless a liar got as far as the accept queue.
        let words = match code {
            RefusalCode::Deadline => "the peer did not answer".to_owned(),
            _ => refusal.to_string(),
        };
        let told = eventually(|| match listener.accept(Duration::from_millis(1)) {
            Ok(_) => true,
            Err(e) => e.to_string().contains(&words),
        });
        assert!(told, "{what}: {:?}", listener.trouble());
    }
    // An honest peer that comes afterwards finds everything in order. (Liars that got as far as the accept queue are dead.)
    let _at_b = honest.shm.connect(&address("liar"), SOON).unwrap();
    let served = eventually(|| {
        listener
            .accept(SOON)
            .is_ok_and(|peer| peer.gone().is_none())
    });
    assert!(served);
}

impl Liar {
    /// The message without the descriptors that belong to it.
    fn say_short(&self, message: &Message) {
        self.raw(&message.encode(), &[]);
    }
}

#[test]
fn a_peer_that_floods_without_reading_is_cut_off() {
    let quick = ShmConfig {
        step: Duration::from_millis(200),
        ..config()
    };
    let a = Side::new(quick);
    let listener = a.shm.listen(&address("flood")).unwrap();
    let liar = Liar::connect("flood");
    let _shared = liar.hello();
    liar.say(&Message::Ready { regions: 0 }, &[]);
    let at_a = listener.accept(SOON).unwrap();
    let mut epoch = 0;
    // Revocations are answered one by one; the liar reads none of the answers.
    let cut_off = eventually(|| {
        for _ in 0..64 {
            match liar.socket.send(
                &Message::Revoke {
                    epoch: epoch + 1,
                    region: NO_REGION,
                }
                .encode(),
                &[],
            ) {
                Ok(true) => epoch += 1,
                Ok(false) => break,
                Err(_) => return true,
            }
        }
        at_a.gone().is_some()
    });
    assert!(cut_off, "after {epoch} messages: {:?}", at_a.gone());
    assert!(
        matches!(at_a.gone(), Some(Gone::Late { .. } | Gone::Refused(_))),
        "{:?}",
        at_a.gone()
    );
    assert!(epoch < 100_000, "what is queued is bounded");
}

#[test]
fn a_version_refusal_reaches_the_connecting_side() {
    let a = Side::new(config());
    let listening = Listener::bind(&address("old")).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut accepted = None;
            assert!(eventually(|| {
                accepted = listening.accept().unwrap();
                accepted.is_some()
            }));
            let mut old = Message::Bye.encode();
            old[8] = 200;
            let accepted = accepted.unwrap();
            accepted.send(&old, &[]).unwrap();
            let heard = |m: Received| matches!(m, Received::End);
            assert!(eventually(|| accepted.receive().is_ok_and(heard)));
        });
        match a.shm.connect(&address("old"), SOON) {
            Err(ShmError::Gone(Gone::Refused(refusal))) => {
                assert_eq!(refusal.code, RefusalCode::Version);
                assert!(
                    refusal.text.contains("version 200") && refusal.text.contains("DOORBELL"),
                    "{refusal}"
                );
            }
            other => panic!("{other:?}"),
        }
    });
}
