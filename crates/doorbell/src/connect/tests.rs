//! The exchange with honest, differing, lying, slow and foreign peers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::*;

const SOON: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);

fn offer(port: u16, mtu: u16) -> Offer {
    Offer {
        address: SocketAddr::from(([127, 0, 0, 1], port)),
        path_mtu: mtu,
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        ack_timeout: 14,
        retry_count: 7,
        rnr_retry: 7,
        min_rnr_timer: 12,
        segments: true,
        light: true,
        long: true,
    }
}

fn greeting(job: &str, purpose: &str) -> Greeting {
    Greeting {
        job: job.into(),
        purpose: purpose.into(),
        hca: 7,
        offer: Some(offer(4000, 4096)),
    }
}

fn acceptor() -> Acceptor {
    Acceptor::bind(Some("127.0.0.1:0")).unwrap()
}

fn line(acceptor: &Acceptor) -> Line {
    acceptor.accept(LONG).unwrap().expect("somebody dials")
}

/// Both sides' outcomes.
fn meet(
    caller: &Greeting,
    listener: &Greeting,
) -> (Result<Channel, ConnectError>, Result<Channel, ConnectError>) {
    let acceptor = acceptor();
    let at = acceptor.address().to_string();
    std::thread::scope(|scope| {
        let called = scope.spawn(move || Line::dial(&at, LONG)?.call(caller, LONG));
        let answered = line(&acceptor).answer(listener, LONG);
        (called.join().unwrap(), answered)
    })
}

/// What the listener makes of bytes that a stranger sends, and what the stranger hears.
fn stranger(bytes: &[u8], patience: Duration) -> (ConnectError, Vec<u8>) {
    let acceptor = acceptor();
    let mut socket = TcpStream::connect(acceptor.address()).unwrap();
    socket.write_all(bytes).unwrap();
    let error = line(&acceptor)
        .answer(&greeting("", ""), patience)
        .unwrap_err();
    let mut heard = Vec::new();
    // A connection that is reset was hung up too.
    let _ = socket.read_to_end(&mut heard);
    (error, heard)
}

fn hello(version: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"DBCX".to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&1u16.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(body);
    bytes
}

/// However many come after it and say nothing.
#[test]
fn who_has_greeted_is_not_put_out_for_strangers() {
    let mut acceptor = acceptor();
    let at = acceptor.address();
    // Its greeting is here before the first stranger is.
    let mut first = TcpStream::connect(at).unwrap();
    let body = greeting("early", "").encode();
    first.write_all(&hello(frame::VERSION, &body)).unwrap();
    let mut crowd = Vec::new();
    // As many at a time as a listener's backlog has room for.
    for _ in 0..4 {
        crowd.extend((0..100).map(|_| TcpStream::connect(at).unwrap()));
        acceptor.let_in().unwrap();
    }
    let begin = Instant::now();
    let knock = acceptor.next(LONG).unwrap().expect("somebody is there");
    let Knock::Caller(caller) = knock else {
        panic!("the strangers were heard first");
    };
    assert_eq!(caller.introduction().greeting.job, "early");
    assert!(begin.elapsed() < LONG);
    drop(crowd);
}

#[test]
fn two_sides_agree_on_the_smaller_of_everything() {
    let mut small = greeting("", "perf put-bw");
    small.offer = Some(Offer {
        max_rd_atomic: 9,
        max_dest_rd_atomic: 2,
        segments: false,
        ..offer(5000, 1024)
    });
    let (called, answered) = meet(&greeting("j", ""), &small);
    let (mut called, mut answered) = (called.unwrap(), answered.unwrap());
    let (a, b) = (*called.agreed().unwrap(), *answered.agreed().unwrap());
    assert_eq!((a.path_mtu, b.path_mtu), (1024, 1024));
    assert_eq!((a.max_rd_atomic, b.max_rd_atomic), (2, 9));
    assert!(!a.segments && !b.segments);
    assert!(a.light && b.light);
    assert_eq!((a.local, a.remote), (b.remote, b.local));
    let text = a.to_string();
    assert!(
        text.contains("path MTU 1024 (here 4096, there 1024)"),
        "{text}"
    );
    assert!(text.contains("127.0.0.1:4000 <-> 127.0.0.1:5000"), "{text}");
    assert_eq!(answered.introduction().greeting.job, "j");
    assert_eq!(called.introduction().pid, std::process::id());

    // Messages of any size cross without waiting for each other.
    let (big, small) = (vec![3; 5 << 20], vec![4; 3]);
    std::thread::scope(|scope| {
        let one = scope.spawn(|| called.exchange(&big, LONG).unwrap());
        assert_eq!(answered.exchange(&small, LONG).unwrap(), big);
        assert_eq!(one.join().unwrap(), small);
    });
    assert!(!answered.is_closed());
    drop(called);
    assert!(answered.wait(LONG));
    assert!(answered.is_closed());
    let lost = answered.recv(LONG).unwrap_err();
    assert!(matches!(lost, ConnectError::Lost { .. }), "{lost}");
}

#[test]
fn only_two_on_one_host_leave_payload_out_of_the_checksum() {
    let at = |address: &str, light| Offer {
        address: address.parse().unwrap(),
        light,
        ..offer(1, 1024)
    };
    for (a, b, agreed) in [
        (at("127.0.0.1:1", true), at("127.0.0.2:1", true), true),
        (at("10.9.0.1:1", true), at("10.9.0.1:2", true), true),
        (at("[fd00::1]:1", true), at("[fd00::1]:2", true), true),
        (at("127.0.0.1:1", true), at("127.0.0.1:2", false), false),
        (at("10.9.0.1:1", true), at("10.9.0.2:1", true), false),
        (at("[fd00::1]:1", true), at("[::1]:1", true), false),
    ] {
        for (a, b) in [(a, b), (b, a)] {
            let outcome = a.agree(&b).unwrap();
            assert_eq!(outcome.light, agreed, "{outcome}");
            assert_eq!(outcome.to_string().contains("headers alone"), agreed);
        }
    }
}

#[test]
fn only_two_on_one_host_that_were_told_of_no_path_mtu_have_long_packets() {
    let at = |address: &str, path_mtu, long| Offer {
        address: address.parse().unwrap(),
        long,
        ..offer(1, path_mtu)
    };
    let here = at("127.0.0.1:1", 4096, true);
    for (there, agreed) in [
        (at("127.0.0.1:2", 4096, true), LONG_MTU),
        (at("127.0.0.1:2", 4096, false), 4096),
        (at("127.0.0.1:2", 2048, true), 2048),
        (at("10.9.0.2:2", 4096, true), 4096),
    ] {
        for (a, b) in [(here, there), (there, here)] {
            let outcome = a.agree(&b).unwrap();
            assert_eq!(outcome.path_mtu, agreed, "{outcome}");
            assert!(outcome.to_string().contains(&format!("path MTU {agreed}")));
        }
    }
}

#[test]
fn refusals_name_what_both_sides_said() {
    let mut v6 = greeting("", "");
    v6.offer = Some(Offer {
        address: "[::1]:4791".parse().unwrap(),
        ..offer(1, 1024)
    });
    let none = Greeting {
        offer: None,
        ..greeting("", "")
    };
    let plain = greeting("", "");
    for (caller, listener, kind, parts) in [
        (
            greeting("red", ""),
            greeting("blue", ""),
            RefusalKind::Job,
            ["red", "blue"],
        ),
        (
            greeting("", "put-bw size 8"),
            greeting("", "put-bw size 64"),
            RefusalKind::Purpose,
            ["size 8", "size 64"],
        ),
        (v6, plain.clone(), RefusalKind::Link, ["127.0.0.1", "::1"]),
        (none, plain, RefusalKind::Link, ["port", "same link"]),
    ] {
        let (called, answered) = meet(&caller, &listener);
        let (called, answered) = (called.unwrap_err(), answered.unwrap_err());
        assert!(
            matches!(&called, ConnectError::Refused { refusal, .. } if refusal.kind == kind),
            "{called}"
        );
        assert!(
            matches!(&answered, ConnectError::Refusing { refusal, .. } if refusal.kind == kind),
            "{answered}"
        );
        for part in parts {
            assert!(called.to_string().contains(part), "{called}");
            assert!(answered.to_string().contains(part), "{answered}");
        }
    }
}

#[test]
fn another_version_is_refused_and_both_are_named_on_both_sides() {
    let (error, heard) = stranger(&hello(9, b"whatever a later release says"), LONG);
    let text = error.to_string();
    let own = format!("version {VERSION}");
    assert!(text.contains("version 9") && text.contains(&own), "{text}");
    let heard = String::from_utf8_lossy(&heard).into_owned();
    assert!(
        heard.contains(&own) && heard.contains("version 9"),
        "{heard}"
    );
    assert!(heard.starts_with("DBCX"), "{heard}");

    // And a listener of a later release, whose refusal this one must be able to read.
    let acceptor = acceptor();
    let at = acceptor.address().to_string();
    std::thread::scope(|scope| {
        let called =
            scope.spawn(move || Line::dial(&at, LONG).unwrap().call(&greeting("", ""), LONG));
        let (mut socket, _) = loop {
            match acceptor_socket(&acceptor) {
                Some(found) => break found,
                None => std::thread::yield_now(),
            }
        };
        let mut refusal = hello(9, b"\x01\x00I speak version 9");
        refusal[6] = 3;
        socket.write_all(&refusal).unwrap();
        let error = called.join().unwrap().unwrap_err();
        assert!(
            matches!(&error, ConnectError::Refused { refusal, .. } if refusal.kind == RefusalKind::Version),
            "{error}"
        );
        assert!(error.to_string().contains("I speak version 9"));
    });
}

fn acceptor_socket(acceptor: &Acceptor) -> Option<(TcpStream, SocketAddr)> {
    acceptor.raw().accept().ok()
}

#[test]
fn strangers_and_liars_are_told_what_is_wrong() {
    let (error, _) = stranger(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", LONG);
    assert!(error.to_string().contains("GET / HTTP"), "{error}");

    // A length that nobody may make us allocate.
    let mut huge = hello(VERSION, b"");
    huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let (error, heard) = stranger(&huge, LONG);
    assert!(error.to_string().contains("4294967295"), "{error}");
    assert!(String::from_utf8_lossy(&heard).contains("at most 2048"));

    let mut body = greeting("", "").encode();
    let mtu = body.len() - OFFER + 18;
    body[mtu] = 3;
    let (error, _) = stranger(&hello(VERSION, &body), LONG);
    assert!(error.to_string().contains("path MTU"), "{error}");
    body.truncate(20);
    let (error, _) = stranger(&hello(VERSION, &body), LONG);
    assert!(matches!(error, ConnectError::Protocol { .. }), "{error}");
    // Control characters would reach the terminal.
    let mut sly = greeting("\u{1b}[2J", "").encode();
    let (error, _) = stranger(&hello(VERSION, &sly), LONG);
    assert!(error.to_string().contains("control"), "{error}");
    sly.push(0);
}

#[test]
fn silence_and_dribble_cost_their_time_out_and_no_more() {
    let started = Instant::now();
    let (error, _) = stranger(b"", SOON);
    assert!(matches!(error, ConnectError::TimedOut { .. }), "{error}");

    let acceptor = acceptor();
    let mut socket = TcpStream::connect(acceptor.address()).unwrap();
    let bytes = hello(VERSION, &greeting("", "").encode());
    let error = std::thread::scope(|scope| {
        scope.spawn(move || {
            for byte in bytes {
                if socket.write_all(&[byte]).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        line(&acceptor)
            .answer(&greeting("", ""), SOON)
            .map(drop)
            .unwrap_err()
    });
    assert!(matches!(error, ConnectError::TimedOut { .. }), "{error}");
    assert!(started.elapsed() < LONG, "{:?}", started.elapsed());

    // Nobody there at all: named after the time-out.
    let nobody = format!("127.0.0.1:{}", acceptor.address().port());
    drop(acceptor);
    let error = Line::dial(&nobody, SOON).unwrap_err();
    assert!(error.to_string().contains(&nobody), "{error}");
}

#[test]
fn no_greeting_does_harm() {
    let good = hello(VERSION, &greeting("job", "purpose").encode());
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for _ in 0..100_000 {
        let mut bytes = good[16..].to_vec();
        for _ in 0..random() % 4 {
            let at = random() as usize % bytes.len();
            bytes[at] = random() as u8;
        }
        if random() % 3 == 0 {
            bytes.truncate(random() as usize % bytes.len());
        }
        // What is accepted is what would be written again, but for this side's own name.
        if let Ok(read) = Introduction::decode(&bytes)
            && let Some(offer) = read.greeting.offer
        {
            let mut again = Vec::new();
            offer.encode(&mut again);
            assert!(bytes.ends_with(&again));
        }
    }
}

#[test]
fn damaged_greetings_over_a_socket_end_in_an_error_or_a_connection() {
    let good = hello(VERSION, &greeting("", "").encode());
    let acceptor = acceptor();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x81;
        let mut socket = TcpStream::connect(acceptor.address()).unwrap();
        socket.write_all(&bad).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let outcome = line(&acceptor).answer(&greeting("", ""), LONG);
        // The header is checked, all but its four reserved bytes.
        assert!(outcome.is_err() || at >= 12, "byte {at}");
    }
}

#[test]
fn a_name_that_is_none_and_an_address_of_nobody_are_called_that() {
    // Where there is no resolver, the system says that it may pass, and it is tried for as long as allowed.
    let error = Line::dial("no.such.host.invalid", SOON).unwrap_err();
    assert!(matches!(error, ConnectError::Name { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("no.such.host.invalid") && text.contains("check the name"),
        "{text}"
    );
    let error = Line::dial("255.255.255.255", SOON).unwrap_err();
    assert!(
        error.to_string().contains("the address of one host")
            || error.to_string().contains("no way there"),
        "{error}"
    );
}

/// A process that greets, and then does as `then` says with its socket.
fn greeted(then: impl FnOnce(TcpStream) + Send) -> (Channel, ()) {
    let acceptor = acceptor();
    let mut socket = TcpStream::connect(acceptor.address()).unwrap();
    socket
        .write_all(&hello(VERSION, &greeting("", "").encode()))
        .unwrap();
    let channel = line(&acceptor).answer(&greeting("", ""), LONG).unwrap();
    (channel, then(socket))
}

#[test]
fn who_gives_no_sign_of_life_is_noticed_and_who_does_is_not() {
    // Stopped: the socket stays, and nothing comes.
    let mut kept = None;
    let (mut channel, ()) = greeted(|socket| kept = Some(socket));
    assert!(channel.trouble(LONG).is_none());
    let error = channel.recv(Duration::from_millis(1500)).unwrap_err();
    assert!(matches!(error, ConnectError::Silent { .. }), "{error}");
    let trouble = channel.trouble(SOON).expect("trouble");
    assert!(
        matches!(&trouble, ConnectError::Silent { silent, .. } if *silent >= SOON),
        "{trouble}"
    );
    assert!(trouble.to_string().contains("stopped"), "{trouble}");
    drop(kept);

    // Alive, with nothing to say: that is no silence, whoever waits.
    let (called, answered) = meet(&greeting("", ""), &greeting("", ""));
    let (mut called, answered) = (called.unwrap(), answered.unwrap());
    let error = called.recv(Duration::from_millis(1500)).unwrap_err();
    assert!(
        matches!(&error, ConnectError::TimedOut { remedy, .. } if remedy.contains("busy")),
        "{error}"
    );
    assert!(answered.trouble(Duration::ZERO).is_none());
    assert!(!answered.is_closed());
}

#[test]
fn the_reason_for_an_end_arrives_and_what_was_said_before_it_too() {
    let (called, answered) = meet(&greeting("", ""), &greeting("", ""));
    let (mut called, mut answered) = (called.unwrap(), answered.unwrap());
    answered.send(b"the last message", LONG).unwrap();
    answered.end("it was told to end");
    assert_eq!(called.recv(LONG).unwrap(), b"the last message");
    let error = called.recv(LONG).unwrap_err();
    assert!(
        matches!(&error, ConnectError::Ended { reason, .. } if reason == "it was told to end"),
        "{error}"
    );
    assert!(called.trouble(LONG).is_some() && called.is_closed());
    let error = called.send(&vec![0; MAX_MESSAGE], LONG).unwrap_err();
    assert!(matches!(error, ConnectError::Ended { .. }), "{error}");
}

#[test]
fn garbage_after_the_greeting_is_an_end_in_words() {
    let (mut channel, ()) = greeted(|mut socket| {
        socket
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
    });
    let error = channel.recv(LONG).unwrap_err();
    assert!(error.to_string().contains("GET / HTTP"), "{error}");
    let mut huge = hello(VERSION, b"");
    (huge[6], huge[11]) = (4, 0xff);
    let (mut channel, ()) = greeted(|mut socket| socket.write_all(&huge).unwrap());
    let error = channel.recv(LONG).unwrap_err();
    assert!(error.to_string().contains("at most 16777216"), "{error}");
}

#[test]
fn strangers_that_say_nothing_keep_nobody_waiting() {
    let mut acceptor = acceptor();
    let at = acceptor.address();
    let mut silent = Vec::new();
    // More than are kept; the system's own queue of them is shorter.
    while silent.len() < 300 {
        silent.extend((0..100).map(|_| TcpStream::connect(at).unwrap()));
        assert!(acceptor.next(Duration::ZERO).unwrap().is_none());
    }
    // One of them begins, and does not go on.
    let whole = hello(VERSION, &greeting("", "").encode());
    silent[299].write_all(&whole[..20]).unwrap();
    let started = Instant::now();
    let caller = std::thread::scope(|scope| {
        scope.spawn(move || {
            let line = Line::dial(&at.to_string(), LONG).unwrap();
            line.call(&greeting("j", ""), LONG).map(drop)
        });
        loop {
            match acceptor.next(SOON).unwrap() {
                Some(Knock::Caller(caller)) => {
                    let job = caller.introduction().greeting.job.clone();
                    caller.welcome(&greeting("", ""), LONG).unwrap();
                    break job;
                }
                Some(Knock::Stranger(e)) => {
                    assert!(matches!(e, ConnectError::TimedOut { .. }), "{e}");
                }
                None => {}
            }
            assert!(started.elapsed() < LONG, "nobody was heard");
        }
    });
    assert_eq!(caller, "j");
    // Who said nothing is told of as that, in time.
    loop {
        if let Some(Knock::Stranger(e)) = acceptor.next(LONG).unwrap() {
            assert!(matches!(e, ConnectError::TimedOut { .. }), "{e}");
            break;
        }
    }
}

#[test]
fn addresses() {
    for bad in ["", "host:port", "[::1", "[::1]x", "a:b:c", "h:70000"] {
        let error = Line::dial(bad, SOON).unwrap_err();
        assert!(
            matches!(error, ConnectError::Address { .. }),
            "{bad}: {error}"
        );
    }
    let taken = acceptor();
    let error = Acceptor::bind(Some(&taken.address().to_string())).unwrap_err();
    assert!(error.to_string().contains("cannot listen on"), "{error}");
}
