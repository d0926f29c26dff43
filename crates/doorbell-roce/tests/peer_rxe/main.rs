//! A Linux kernel that knows nothing of us as the peer: `peers/rxe/wiretest.c` in a guest, in both roles, every operation.
//!
//! Needs QEMU and the guest: `peers/rxe/setup.sh target/rxe`, then
//! `DOORBELL_RXE=$PWD/target/rxe cargo test -p doorbell-roce --test peer_rxe -- --ignored`.

mod end;
mod guest;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use doorbell_roce::{Config, Connection, Event, Failure, Mtu, Op, ReceivedKind};
use doorbell_wire::roce::{Psn, Transport};

use end::{BASE, End, RKEY};
use guest::{Guest, PATIENCE, segment};

const SIZE: usize = 1 << 16;
const RC: usize = 0;
const UC: usize = 1;
const IMM: u32 = 0xcafe_0001;
/// Our GID: ::ffff:192.168.77.1.
const GID: &str = "00000000000000000000ffffc0a84d01";

/// What the other side says of a queue pair.
#[derive(Clone, Copy, Debug)]
struct Peer {
    qpn: u32,
    psn: u32,
    rkey: u32,
    va: u64,
}

/// The text exchange of wiretest.
struct Talk {
    stream: TcpStream,
    lines: std::io::Lines<BufReader<TcpStream>>,
}

impl Talk {
    fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("supported");
        let lines = BufReader::new(stream.try_clone().expect("another handle")).lines();
        Self { stream, lines }
    }

    fn say(&mut self, line: &str) {
        self.stream
            .write_all(format!("{line}\n").as_bytes())
            .expect("the guest listens");
    }

    fn hear(&mut self) -> Option<String> {
        self.lines.next()?.ok()
    }

    fn exchange(&mut self, kind: &str, qpn: u32, psn: u32) -> Peer {
        self.say(&format!(
            "{kind} {qpn:x} {psn:x} {RKEY:x} {BASE:x} {SIZE:x} {GID}"
        ));
        let line = self.hear().expect("its queue pair");
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!((words.len(), words[0]), (7, kind), "{line}");
        let hex = |i: usize| u64::from_str_radix(words[i], 16).expect("hexadecimal");
        Peer {
            qpn: hex(1) as u32,
            psn: hex(2) as u32,
            rkey: hex(3) as u32,
            va: hex(4),
        }
    }
}

fn connection(transport: Transport, psn: u32, peer: Peer) -> Connection {
    let config = Config {
        transport,
        dest_qpn: peer.qpn,
        sq_psn: Psn::new(psn),
        rq_psn: Psn::new(peer.psn),
        path_mtu: Mtu::M1024,
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        timeout: 17,
        ..Config::default()
    };
    Connection::new(&config).expect("valid")
}

/// Exchanges and connects both queue pairs. ARP has to be answered from here on: the guest asks while it connects.
fn connect(end: &mut End, talk: &mut Talk, psns: [u32; 2]) -> [Peer; 2] {
    let rc = talk.exchange("RC", 0x100, psns[0]);
    let uc = talk.exchange("UC", 0x101, psns[1]);
    end.add(0x100, connection(Transport::Rc, psns[0], rc));
    end.add(0x101, connection(Transport::Uc, psns[1], uc));
    [rc, uc]
}

/// Says "ready" and waits for the guest's, answering ARP meanwhile.
fn ready(end: &mut End, mut talk: Talk) -> Talk {
    let waiter = std::thread::spawn(move || {
        talk.say("ready");
        assert_eq!(talk.hear().as_deref(), Some("ready"));
        talk
    });
    end.until("the guest's being ready", PATIENCE, |_| {
        waiter.is_finished()
    });
    waiter.join().expect("it was ready")
}

/// The statuses that the guest printed: (step, status).
fn steps(guest: &mut Guest) -> Vec<(String, String)> {
    guest
        .said()
        .iter()
        .filter_map(|line| {
            let mut words = line.strip_prefix("step ")?.split_whitespace();
            let (name, status) = (words.next()?, words.next()?);
            Some((name.to_owned(), status.to_owned()))
        })
        .collect()
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_we_request() {
    let (socket, wire, mine) = segment();
    let control = TcpListener::bind("127.0.0.1:0")
        .and_then(|l| l.local_addr())
        .expect("a port")
        .port();
    let mut guest = Guest::boot("wiretest rxe0 1", wire, mine, &format!("{control}:18600"));
    let mut end = End::new(socket, (0..SIZE).map(|i| i as u8).collect());
    // QEMU accepts before the guest listens, and resets then.
    let until = Instant::now() + PATIENCE;
    let mut talk = loop {
        assert!(Instant::now() < until, "the guest never listened");
        let talk = Talk::new(TcpStream::connect(("127.0.0.1", control)).expect("QEMU listens"));
        let limit = |ms| {
            talk.stream
                .set_read_timeout(Some(Duration::from_millis(ms)))
        };
        limit(500).expect("supported");
        if matches!(talk.stream.peek(&mut [0]), Ok(1)) {
            limit(PATIENCE.as_millis() as u64).expect("supported");
            break talk;
        }
    };
    let [rc, uc] = connect(&mut end, &mut talk, [0xff_fffa, 0x100]);
    let mut talk = ready(&mut end, talk);

    let done = |event: Event| assert!(matches!(event, Event::Done { .. }), "{event:?}");
    let write = |offset: u64, imm: Option<u32>| Op::Write {
        va: rc.va + offset,
        rkey: rc.rkey,
        imm,
    };
    done(end.run(RC, write(0, None), 0, 8));
    done(end.run(RC, write(0, None), 0, 0));
    done(end.run(RC, write(64, None), 3, 5));
    done(end.run(RC, write(4096, None), 0, 2600));
    let read = Op::Read {
        va: rc.va + 4096,
        rkey: rc.rkey,
    };
    end.buffer.bytes[16384..16384 + 2600].fill(0xee);
    done(end.run(RC, read, 16384, 64));
    done(end.run(RC, read, 16384, 2600));
    assert!(
        end.buffer.bytes[16384..16384 + 2600] == end.buffer.bytes[..2600],
        "what was written is read back"
    );

    let word =
        |end: &End| u64::from_le_bytes(end.buffer.bytes[20480..20488].try_into().expect("8 bytes"));
    let (va, rkey) = (rc.va + 8192, rc.rkey);
    done(end.run(
        RC,
        Op::FetchAdd {
            va,
            rkey,
            add: 0x1122_3344_5566_7788,
        },
        20480,
        8,
    ));
    assert_eq!(word(&end), 100);
    let sum = 0x1122_3344_5566_7788 + 100;
    done(end.run(
        RC,
        Op::CompareSwap {
            va,
            rkey,
            compare: sum,
            swap: 0xa5a5,
        },
        20480,
        8,
    ));
    assert_eq!(word(&end), sum);
    done(end.run(
        RC,
        Op::CompareSwap {
            va,
            rkey,
            compare: 0xdead,
            swap: 0xbeef,
        },
        20480,
        8,
    ));
    assert_eq!(word(&end), 0xa5a5);

    done(end.run(RC, Op::Send { imm: None }, 0, 32));
    done(end.run(RC, Op::Send { imm: Some(IMM) }, 0, 33));
    done(end.run(RC, Op::Send { imm: None }, 0, 1600));
    done(end.run(RC, write(128, Some(IMM)), 0, 16));
    done(end.run(RC, Op::Send { imm: None }, 0, 7));
    // Eight at once: one request for an acknowledgement among them is enough.
    let last = (0..8)
        .map(|_| end.post(RC, write(256, None), 0, 16))
        .last()
        .expect("eight");
    done(end.outcome(RC, last));
    done(end.run(RC, write(16384, None), 0, 16384));

    talk.say("sync");
    let write_uc = |imm| Op::Write {
        va: uc.va + 12288,
        rkey: uc.rkey,
        imm,
    };
    done(end.run(UC, write_uc(None), 0, 2100));
    done(end.run(UC, write_uc(Some(IMM)), 0, 48));
    done(end.run(UC, Op::Send { imm: None }, 0, 24));
    // The server posts its receive 25 ms later: RNR NAKs until then.
    std::thread::sleep(Duration::from_millis(200));
    talk.say("sync2");
    done(end.run(RC, Op::Send { imm: None }, 0, 12));
    assert!(
        end.qps[RC].connection.counters().rnr_nak_retry_err > 0,
        "it was not ready at first"
    );
    guest.expect("mem[0]=00 mem[4096..]=0001 atomic=a5a5 uc[12288]=00");

    let wrong = Op::Write {
        va: rc.va,
        rkey: rc.rkey ^ 0x5500,
        imm: None,
    };
    let event = end.run(RC, wrong, 0, 8);
    assert!(
        matches!(
            event,
            Event::Failed {
                failure: Failure::RemoteAccess,
                ..
            }
        ),
        "{event:?}"
    );
    talk.say("bye");
    assert_eq!(end.bad_icrc, 0);
    let seen = steps(&mut guest);
    assert_eq!(seen.len(), 8, "{seen:?}");
    for (step, status) in seen {
        assert!(status.starts_with("status=0"), "{step}: {status}");
    }
}

#[test]
#[ignore = "needs the soft-RoCE guest of peers/rxe (DOORBELL_RXE)"]
fn peer_we_respond() {
    let (socket, wire, mine) = segment();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let control = listener.local_addr().expect("bound").port();
    let mut guest = Guest::boot(
        &format!("wiretest rxe0 1 10.0.2.2 {control}"),
        wire,
        mine,
        "",
    );
    let mut end = End::new(socket, vec![0x5a; SIZE]);
    let mut talk = Talk::new(listener.accept().expect("the guest calls").0);
    connect(&mut end, &mut talk, [0xbeef, 0x100]);
    end.buffer.bytes[8192..8200].copy_from_slice(&100_u64.to_le_bytes());
    // Both queue pairs share the buffer, and so its receives.
    let post = |end: &mut End, i: usize| end.buffer.receives.push_back((49152 + i * 2048, 2048));
    (0..7).for_each(|i| post(&mut end, i));
    let mut talk = ready(&mut end, talk);

    let heard = |end: &mut End, mut talk: Talk, line: &'static str| {
        let waiter = std::thread::spawn(move || {
            assert_eq!(talk.hear().as_deref(), Some(line));
            talk
        });
        end.until(line, PATIENCE, |_| waiter.is_finished());
        waiter.join().expect("heard")
    };
    talk = heard(&mut end, talk, "sync");
    talk = heard(&mut end, talk, "sync2");
    let before = end.buffer.received.len();
    assert_eq!(before, 7, "five of RC, two of UC");
    // Nothing is posted for the next SEND: it is told so, and comes again.
    let until = Instant::now() + Duration::from_millis(25);
    end.until("25 ms", PATIENCE, |_| Instant::now() > until);
    post(&mut end, 7);
    heard(&mut end, talk, "bye");
    guest.expect("CMD-END rc=0");

    let counters = *end.qps[RC].connection.counters();
    assert!(counters.out_of_buffer > 0, "{counters:?}");
    assert_eq!(counters.resp_remote_access_errors, 1, "{counters:?}");
    assert_eq!(end.bad_icrc, 0);

    let seen = steps(&mut guest);
    assert_eq!(seen.len(), 29, "{seen:?}");
    for (step, status) in &seen {
        let expected = match step.as_str() {
            "rc-bad-rkey" => "status=10",
            "rc-flushed" => "status=5",
            _ => "status=0",
        };
        assert!(status.starts_with(expected), "{step}: {status}");
    }
    assert!(guest.said().iter().any(|l| l == "read back ok"));
    for line in ["fa old=64", "cs old=11223344556677ec", "cs(fail) old=a5a5"] {
        assert!(
            guest.said().iter().any(|l| l == line),
            "{line}: {:?}",
            guest.said()
        );
    }
    let bytes = &end.buffer.bytes;
    let counting = |range: std::ops::Range<usize>| {
        bytes[range.clone()]
            .iter()
            .zip(0_usize..)
            .all(|(b, i)| *b == i as u8)
    };
    assert!(
        counting(0..8) && counting(4096..6696) && counting(16384..32768) && counting(12288..14388)
    );
    let kinds: Vec<_> = end
        .buffer
        .received
        .iter()
        .map(|(r, _)| (r.kind, r.len, r.imm, r.solicited))
        .collect();
    let send = |len, imm, solicited| (ReceivedKind::Send, len, imm, solicited);
    let write = |len| (ReceivedKind::Write, len, Some(IMM), false);
    assert_eq!(
        kinds,
        [
            send(32, None, false),
            send(33, Some(IMM), true),
            send(1600, None, false),
            write(16),
            send(7, None, false),
            write(48),
            send(24, None, false),
            send(12, None, false),
        ]
    );
}
