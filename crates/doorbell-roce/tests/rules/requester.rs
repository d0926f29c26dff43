//! The requester of a reliable connection.

use doorbell_roce::{Config, Event, Failure, LocalFault, Message, Op, PostError};
use doorbell_wire::roce::{Ext, Kind, NakCode, Opcode, Packet, Place, Transport};

use super::rig::*;

const P: u32 = OURS;

fn done(through: u64) -> Event {
    Event::Done { through }
}

fn failed(token: u64, failure: Failure) -> Event {
    Event::Failed { token, failure }
}

/// 9.7.3: a message becomes packets of the path MTU; the first has the address, the last the immediate and the request for an answer.
#[test]
fn a_message_is_cut_at_the_path_mtu() {
    let mut rig = Rig::new();
    let bytes: Vec<u8> = (0..601).map(|n| n as u8).collect();
    let op = Op::Write {
        va: BASE,
        rkey: KEY,
        imm: Some(0xbeef),
    };
    rig.post(0, op, &bytes);
    let sent = rig.take_all();
    let packets: Vec<_> = sent
        .iter()
        .map(|p| Packet::parse(p).expect("a packet"))
        .collect();
    assert_eq!(packets.len(), 3);
    for (n, (packet, place)) in packets
        .iter()
        .zip([Place::First, Place::Middle, Place::Last])
        .enumerate()
    {
        assert_eq!((packet.kind, packet.place), (Kind::Write, place));
        assert_eq!(packet.bth.psn.get(), P + n as u32);
        assert_eq!(packet.bth.dest_qp, 0x42);
        assert_eq!(
            packet.ext.reth().map(|r| (r.va, r.len)),
            (n == 0).then_some((BASE, 601))
        );
        assert_eq!(packet.ext.imm(), (n == 2).then_some(0xbeef));
        assert_eq!(packet.bth.ack_req, n == 2);
        assert_eq!(packet.payload, &bytes[n * 256..(n * 256 + 256).min(601)]);
    }
    assert_eq!(
        (packets[2].bth.pad, sent[2][sent[2].len() - 3..].to_vec()),
        (3, vec![0; 3])
    );
}

/// 9.7.3: the last packet of a burst asks for an answer, so does every sixteenth message, and what fills the window.
#[test]
fn an_answer_is_asked_for_where_sending_stops() {
    let mut rig = Rig::with(&Config {
        window: 64,
        ..config()
    });
    for token in 0..20 {
        rig.post(token, WRITE, &[1; 8]);
    }
    let sent = rig.take_all();
    let asking: Vec<_> = (0..20).filter(|n| asks(&sent[*n])).collect();
    assert_eq!(asking, [15, 19]);
    // A message longer than the window: before it stops, and four times on the way.
    let mut rig = Rig::with(&Config {
        window: 64,
        ..config()
    });
    rig.post(0, WRITE, &[1; 100 * 256]);
    let sent = rig.take_all();
    assert_eq!(sent.len(), 64, "the window");
    let asking: Vec<_> = (0..64).filter(|n| asks(&sent[*n])).collect();
    assert_eq!(asking, [15, 31, 47, 63]);
    let mut odd = Rig::with(&Config {
        window: 9,
        ..config()
    });
    odd.post(0, WRITE, &[1; 20 * 256]);
    let all = odd.take_all();
    let asking: Vec<_> = (0..9).filter(|n| asks(&all[*n])).collect();
    assert_eq!(asking, [1, 3, 5, 7, 8], "the last of the window, too");
    rig.give(&answer(ACK, P + 15));
    assert_eq!(rig.psns(), (P + 64..P + 80).collect::<Vec<_>>());
}

/// Where packets are long, bytes are what a buffer holds: sending stops at as many, having asked, and small messages are not counted as long ones.
#[test]
fn bytes_under_way_are_bounded() {
    let config = Config {
        window: 64,
        window_bytes: 8 * 256,
        ..config()
    };
    let mut rig = Rig::with(&config);
    rig.post(0, WRITE, &[1; 20 * 256]);
    let sent = rig.take_all();
    let asking: Vec<_> = (0..sent.len()).filter(|n| asks(&sent[*n])).collect();
    assert_eq!((sent.len(), asking), (8, vec![1, 3, 5, 7]));
    rig.give(&answer(ACK, P + 1));
    assert_eq!(rig.psns(), [P + 8, P + 9]);
    // The last packet may reach beyond them.
    let mut rig = Rig::with(&config);
    rig.post(0, WRITE, &[1; 7 * 256 + 8]);
    for token in 1..100 {
        rig.post(token, WRITE, &[1; 8]);
    }
    let sent = rig.take_all();
    assert_eq!(sent.len(), 8 + 31, "248 bytes in messages of 8");
    assert!(asks(&sent[38]));
    // A READ is asked for in pieces of a quarter of them.
    let mut rig = Rig::with(&config);
    rig.post(0, READ, &[0; 20 * 256]);
    let asked: Vec<_> = rig.take_all().iter().map(|bytes| psn(bytes)).collect();
    assert_eq!(asked, [P, P + 2, P + 4, P + 6]);
}

/// Payload is lent for the first sending of a packet, if that ends without padding; what is sent again is copied, and the packets are the same.
#[test]
fn payload_is_lent_once() {
    let bytes: Vec<u8> = (0..3 * 256 + 8).map(|n| n as u8).collect();
    let mut plain = Rig::new();
    plain.post(7, WRITE, &bytes);
    plain.post(8, WRITE, &bytes[..13]);
    let whole = plain.take_all();
    let mut rig = Rig::new();
    rig.host.lends = true;
    rig.post(7, WRITE, &bytes);
    rig.post(8, WRITE, &bytes[..13]);
    let sent = rig.take_all();
    let lent = [(7, 0, 256), (7, 256, 256), (7, 512, 256), (7, 768, 8)];
    assert_eq!(rig.host.lent, lent);
    for ((sent, whole), (_, offset, len)) in sent.iter().zip(&whole).zip(lent) {
        let payload = &bytes[offset as usize..][..len as usize];
        assert_eq!([sent, payload].concat(), *whole);
    }
    assert_eq!(sent[4], whole[4], "padded, so copied");
    rig.give(&answer(nak(NakCode::PsnSequence), P + 1));
    assert_eq!(rig.take_all(), whole[1..], "sent again");
    assert_eq!(rig.host.lent, lent);
}

/// 9.7.3: an event is asked for only where a receive completes.
#[test]
fn solicited_is_for_what_consumes_a_receive() {
    for (op, expected) in [
        (WRITE, false),
        (SEND, true),
        (
            Op::Write {
                va: BASE,
                rkey: KEY,
                imm: Some(1),
            },
            true,
        ),
    ] {
        let mut rig = Rig::new();
        rig.host.local.insert(0, vec![0; 300]);
        let message = Message {
            token: 0,
            op,
            len: 300,
            fence: false,
            solicited: true,
        };
        rig.connection.post(message).expect("taken");
        let flags: Vec<_> = rig
            .take_all()
            .iter()
            .map(|p| Packet::parse(p).expect("a packet").bth.solicited)
            .collect();
        assert_eq!(flags, [false, expected], "{op:?}");
    }
}

/// 9.7.5: one acknowledgement completes everything up to its PSN.
#[test]
fn one_acknowledgement_completes_all_before_it() {
    let mut rig = Rig::new();
    for token in 0..4 {
        rig.post(token, WRITE, &[1; 300]);
    }
    rig.take_all();
    rig.give(&answer(ACK, P + 4));
    assert_eq!(rig.events(), [done(1)], "two whole messages and a half");
    rig.give(&answer(ACK, P + 7));
    assert_eq!(rig.events(), [done(3)]);
    assert!(rig.connection.is_idle());
    assert_eq!(rig.connection.timeout(), None);
}

/// 9.7.6: answers to what was answered, or to what was never sent, are of another time.
#[test]
fn ghosts_are_ignored() {
    let mut rig = Rig::new();
    rig.post(0, WRITE, &[1; 8]);
    rig.post(1, WRITE, &[1; 8]);
    rig.take_all();
    rig.give(&answer(ACK, P + 2));
    rig.give(&answer(nak(NakCode::RemoteAccess), P + 2));
    rig.give(&answer(ACK, P - 1));
    rig.give(&answer(nak(NakCode::PsnSequence), P - 1));
    assert_eq!(rig.events(), []);
    assert_eq!(rig.take_all().len(), 0);
    assert_eq!(rig.connection.counters().unexpected_packets, 4);
    rig.give(&answer(ACK, P));
    rig.give(&answer(ACK, P));
    assert_eq!(rig.events(), [done(0)]);
}

/// 9.7.5: a NAK acknowledges what is before it; sending goes on from there, in the middle of a message if need be.
#[test]
fn a_sequence_nak_goes_back_to_its_psn() {
    let mut rig = Rig::new();
    rig.post(0, WRITE, &[1; 8]);
    rig.post(1, WRITE, &[2; 700]);
    rig.take_all();
    rig.give(&answer(nak(NakCode::PsnSequence), P + 2));
    assert_eq!(rig.events(), [done(0)]);
    let again = rig.take_all();
    let first = Packet::parse(&again[0]).expect("a packet");
    assert_eq!((first.place, first.bth.psn.get()), (Place::Middle, P + 2));
    assert_eq!(again.len(), 2);
    assert_eq!(rig.connection.counters().packet_seq_err, 1);
    assert_eq!(rig.connection.counters().retransmitted_packets, 2);
}

/// 9.7.8: each NAK that is not about order or readiness fails the message, and flushes what is behind it.
#[test]
fn a_refusal_fails_the_message_and_flushes_the_rest() {
    for (code, failure) in [
        (NakCode::InvalidRequest, Failure::RemoteInvalid),
        (NakCode::RemoteAccess, Failure::RemoteAccess),
        (NakCode::RemoteOperational, Failure::RemoteOperational),
        (NakCode::Reserved(9), Failure::BadResponse),
    ] {
        let mut rig = Rig::new();
        for token in 0..4 {
            rig.post(token, WRITE, &[1; 8]);
        }
        rig.take_all();
        rig.give(&answer(nak(code), P + 1));
        let expected = [
            done(0),
            failed(1, failure),
            failed(2, Failure::Flushed),
            failed(3, Failure::Flushed),
        ];
        assert_eq!(rig.events(), expected);
        let late = Message {
            token: 9,
            op: WRITE,
            len: 0,
            fence: false,
            solicited: false,
        };
        assert_eq!(rig.connection.post(late), Err(PostError::Failed));
        assert_eq!((rig.take_all().len(), rig.connection.timeout()), (0, None));
    }
}

/// 9.7.5: a READ's answers are stored where they belong, and complete it with the last.
#[test]
fn a_read_is_stored_and_completed() {
    let mut rig = Rig::new();
    rig.post(0, READ, &[0; 600]);
    let request = rig.one();
    let request = Packet::parse(&request).expect("a packet");
    assert_eq!(
        (request.kind, request.bth.ack_req),
        (Kind::ReadRequest, true)
    );
    assert_eq!(
        request.ext.reth().map(|r| (r.va, r.rkey, r.len)),
        Some((BASE, KEY, 600))
    );
    rig.give(&read_response(P, Place::First, &[1; 256]));
    rig.give(&read_response(P + 1, Place::Middle, &[2; 256]));
    assert_eq!(rig.events(), []);
    rig.give(&read_response(P + 2, Place::Last, &[3; 88]));
    assert_eq!(rig.events(), [done(0)]);
    let local = &rig.host.local[&0];
    assert_eq!(
        (local[255], local[256], local[512], local[599]),
        (1, 2, 3, 3)
    );
    // The next message's PSN is after the answer's.
    rig.post(1, WRITE, &[1; 8]);
    assert_eq!(rig.psns(), [P + 3]);
}

/// A long READ is asked for in pieces of a quarter of the window, each a request that the peer remembers.
#[test]
fn a_long_read_goes_out_in_pieces() {
    let mut rig = Rig::with(&Config {
        window: 16,
        max_rd_atomic: 2,
        ..config()
    });
    rig.post(0, READ, &[0; 12 * 256 - 1]);
    let lens: Vec<_> = rig
        .take_all()
        .iter()
        .map(|p| {
            let packet = Packet::parse(p).expect("a packet");
            (
                packet.bth.psn.get(),
                packet.ext.reth().map(|r| (r.va - BASE, r.len)),
            )
        })
        .collect();
    assert_eq!(
        lens,
        [(P, Some((0, 1024))), (P + 4, Some((1024, 1024)))],
        "two open at a time"
    );
    for n in 0..4 {
        rig.give(&read_response(P + n, Place::Middle, &[1; 256]));
    }
    let last = rig.one();
    let reth = *Packet::parse(&last)
        .expect("a packet")
        .ext
        .reth()
        .expect("has one");
    assert_eq!((psn(&last), reth.va - BASE, reth.len), (P + 8, 2048, 1023));
}

/// 9.7.3: no more READs and atomics are open than were agreed on.
#[test]
fn reads_and_atomics_wait_for_their_turn() {
    let mut rig = Rig::with(&Config {
        max_rd_atomic: 2,
        ..config()
    });
    rig.post(0, READ, &[0; 8]);
    rig.post(1, ADD, &[0; 8]);
    rig.post(2, READ, &[0; 8]);
    rig.post(3, WRITE, &[0; 8]);
    assert_eq!(rig.psns(), [P, P + 1]);
    rig.give(&read_response(P, Place::Only, &[1; 8]));
    assert_eq!(rig.psns(), [P + 2, P + 3], "in order, also what is no READ");
    let mut none = Rig::with(&Config {
        max_rd_atomic: 0,
        ..config()
    });
    none.host.local.insert(0, vec![0; 8]);
    let message = Message {
        token: 0,
        op: READ,
        len: 8,
        fence: false,
        solicited: false,
    };
    assert_eq!(none.connection.post(message), Err(PostError::Unsupported));
}

/// 9.7.5: an atomic brings the value before it.
#[test]
fn an_atomic_brings_the_value_before_it() {
    let mut rig = Rig::new();
    rig.post(0, ADD, &[0; 8]);
    rig.take_all();
    rig.give(&atomic_response(P, 0x1122_3344_5566_7788));
    assert_eq!(rig.events(), [done(0)]);
    assert_eq!(rig.host.local[&0], 0x1122_3344_5566_7788_u64.to_le_bytes());
}

/// 9.7.5: an answer that comes after the one to a READ implies that the latter was lost: it is asked for again, once.
#[test]
fn a_missing_answer_is_asked_for_again() {
    let mut rig = Rig::new();
    rig.post(0, READ, &[0; 600]);
    rig.post(1, WRITE, &[0; 8]);
    rig.take_all();
    rig.give(&read_response(P, Place::First, &[1; 256]));
    rig.give(&read_response(P + 2, Place::Last, &[3; 88]));
    rig.give(&answer(ACK, P + 3));
    assert_eq!(rig.events(), []);
    let again = rig.take_all();
    let request = Packet::parse(&again[0]).expect("a packet");
    assert_eq!(request.bth.psn.get(), P + 1, "only what is missing");
    assert_eq!(
        request.ext.reth().map(|r| (r.va - BASE, r.len)),
        Some((256, 344))
    );
    assert_eq!(again.len(), 2);
    assert_eq!(rig.connection.counters().implied_nak_seq_err, 1);
    rig.give(&read_response(P + 1, Place::First, &[2; 256]));
    rig.give(&read_response(P + 2, Place::Last, &[3; 88]));
    rig.give(&answer(ACK, P + 3));
    assert_eq!(rig.events(), [done(1)]);
    assert_eq!(rig.host.local[&0][256], 2);
}

/// 9.7.5: any answer to a later request acknowledges the WRITEs and SENDs before it.
#[test]
fn a_read_response_acknowledges_what_is_before_it() {
    let mut rig = Rig::new();
    rig.post(0, WRITE, &[0; 8]);
    rig.post(1, READ, &[0; 8]);
    rig.take_all();
    rig.give(&read_response(P + 1, Place::Only, &[1; 8]));
    assert_eq!(rig.events(), [done(1)]);
}

/// 9.7.6: an answer of another length or kind than was asked for.
#[test]
fn an_answer_that_does_not_fit_is_a_bad_response() {
    for bytes in [
        read_response(P, Place::Only, &[1; 7]),
        read_response(P, Place::First, &[1; 256]),
        atomic_response(P, 1),
    ] {
        let mut rig = Rig::new();
        rig.post(0, READ, &[0; 8]);
        rig.take_all();
        rig.give(&bytes);
        assert_eq!(rig.events(), [failed(0, Failure::BadResponse)]);
        assert_eq!(rig.connection.counters().req_bad_responses, 1);
    }
}

/// 10.8.3 (fence): what follows waits for the READs before it, and for what they brought to be there.
#[test]
fn a_fence_waits_for_reads_and_for_what_they_brought() {
    let mut rig = Rig::new();
    rig.host.slow = true;
    rig.post(0, READ, &[0; 8]);
    rig.host.local.insert(1, vec![0; 8]);
    let fenced = Message {
        token: 1,
        op: SEND,
        len: 8,
        fence: true,
        solicited: false,
    };
    rig.connection.post(fenced).expect("taken");
    assert_eq!(rig.psns(), [P]);
    rig.give(&read_response(P, Place::Only, &[1; 8]));
    assert_eq!(rig.take_all().len(), 0, "stored, but not there yet");
    rig.host.settled = 1;
    assert_eq!(rig.psns(), [P + 1]);
}

/// A local fault is told after what was under way before it, whose fate is the peer's to say.
#[test]
fn a_local_fault_waits_for_what_is_under_way() {
    let mut rig = Rig::new();
    rig.host.bad = Some((2, 256));
    rig.post(0, WRITE, &[0; 8]);
    rig.post(1, WRITE, &[0; 8]);
    rig.post(2, WRITE, &[0; 700]);
    rig.post(3, WRITE, &[0; 8]);
    let sent = rig.take_all();
    let asking = sent.iter().filter(|p| asks(p)).count();
    assert_eq!(rig.events(), []);
    assert!(asking > 0, "or nobody would answer");
    assert_eq!(
        psn(sent.last().expect("some")),
        P + 2,
        "nothing goes out from the fault on"
    );
    rig.give(&answer(ACK, P + 1));
    assert_eq!(rig.events(), [done(1)]);
    rig.give(&answer(ACK, P + 2));
    let fault = Failure::Local(LocalFault(9));
    assert_eq!(
        rig.events(),
        [failed(2, fault), failed(3, Failure::Flushed)]
    );
}

/// Nothing that is taken is more than what memory was set aside for.
#[test]
fn a_full_connection_says_so() {
    let mut rig = Rig::with(&Config {
        messages: 2,
        ..config()
    });
    rig.post(0, WRITE, &[0; 8]);
    rig.post(1, WRITE, &[0; 8]);
    assert!(!rig.connection.has_room());
    let message = Message {
        token: 2,
        op: WRITE,
        len: 8,
        fence: false,
        solicited: false,
    };
    assert_eq!(rig.connection.post(message), Err(PostError::Full));
    rig.take_all();
    rig.give(&answer(ACK, P));
    assert_eq!(
        rig.connection.post(Message {
            len: (1 << 31) + 1,
            ..message
        }),
        Err(PostError::Length((1 << 31) + 1))
    );
    assert_eq!(rig.connection.post(message), Ok(()));
}

/// 9.7.6: what is sent again is what was sent, bit for bit.
#[test]
fn a_retransmission_is_the_same_packet_again() {
    let mut rig = Rig::new();
    rig.post(0, Op::Send { imm: Some(7) }, &[5; 257]);
    let first = rig.take_all();
    rig.time_out();
    assert_eq!(rig.take_all(), first);
    let last = Packet::parse(&first[1]).expect("a packet");
    assert_eq!(
        last.bth.opcode,
        Opcode::send(Transport::Rc, Place::Last, true)
    );
    assert_eq!(last.ext, Ext::Imm(7));
}
