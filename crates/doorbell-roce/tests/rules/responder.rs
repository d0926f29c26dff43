//! The responder of a reliable connection.

use doorbell_roce::{Config, Event, ReceivedKind, Refusal};
use doorbell_wire::roce::{AethKind, Ext, Kind, NakCode, Opcode, Packet, Place, Reth, Transport};

use super::rig::*;

const P: u32 = THEIRS;

/// 9.7.5: an acknowledgement has the PSN of the request that it answers and the count of completed messages.
#[test]
fn a_write_is_acknowledged_with_its_psn_and_the_message_count() {
    let mut rig = Rig::new();
    rig.give(&write(P, 8, &[1, 2, 3]));
    assert_eq!(rig.acks(), [(ACK, P, 1)]);
    assert_eq!(rig.host.region[8..12], [1, 2, 3, 0]);
    rig.give(&write(P + 1, 16, &[4; 8]));
    assert_eq!(rig.acks(), [(ACK, P + 1, 2)]);
}

/// 9.7.5: acknowledgements may be coalesced; a later one speaks for all before it.
#[test]
fn acknowledgements_are_coalesced() {
    let mut rig = Rig::new();
    for n in 0..8 {
        rig.give(&write(P + n, 8, &[1; 8]));
    }
    assert_eq!(rig.acks(), [(ACK, P + 7, 8)]);
}

/// 9.7.5: but never past a READ or atomic, which has an answer of its own.
#[test]
fn no_acknowledgement_goes_past_a_read() {
    let mut rig = Rig::new();
    rig.give(&write(P, 8, &[1; 8]));
    rig.give(&read(P + 1, 8, 8));
    rig.give(&write(P + 2, 8, &[2; 8]));
    let sent = rig.take_all();
    let kinds: Vec<_> = sent
        .iter()
        .map(|p| Packet::parse(p).expect("a packet").kind)
        .collect();
    assert_eq!(
        kinds,
        [Kind::Acknowledge, Kind::ReadResponse, Kind::Acknowledge]
    );
    assert_eq!(
        sent.iter().map(|p| psn(p)).collect::<Vec<_>>(),
        [P, P + 1, P + 2]
    );
}

/// 9.7.3: without AckReq nothing has to be said.
#[test]
fn who_does_not_ask_gets_no_answer() {
    let mut rig = Rig::new();
    let opcode = Opcode::write(Transport::Rc, Place::Only, false);
    rig.give(&packet(opcode, P, reth(0, 8), false, &[7; 8]));
    assert_eq!(rig.acks(), []);
    assert_eq!(rig.host.region[0], 7);
}

/// 9.7.4 and 9.7.5: one NAK for a gap, until what is missing has come.
#[test]
fn one_nak_for_a_gap() {
    let mut rig = Rig::new();
    rig.give(&write(P + 1, 8, &[1; 8]));
    rig.give(&write(P + 2, 8, &[1; 8]));
    assert_eq!(rig.acks(), [(nak(NakCode::PsnSequence), P, 0)]);
    rig.give(&write(P + 3, 8, &[1; 8]));
    assert_eq!(rig.acks(), []);
    assert_eq!(rig.connection.counters().out_of_sequence, 3);
    assert_eq!(rig.host.region[8], 0, "nothing is carried out of order");
    rig.give(&write(P, 8, &[1; 8]));
    assert_eq!(rig.acks(), [(ACK, P, 1)]);
    // The next gap gets a NAK again.
    rig.give(&write(P + 2, 8, &[1; 8]));
    assert_eq!(rig.acks(), [(nak(NakCode::PsnSequence), P + 1, 1)]);
}

/// 9.7.5: a duplicate WRITE or SEND is not executed, and acknowledged with the newest PSN and message count.
#[test]
fn a_duplicate_is_acknowledged_again_and_not_executed() {
    let mut rig = Rig::new();
    rig.give(&write(P, 8, &[1; 8]));
    rig.give(&write(P + 1, 8, &[2; 8]));
    rig.take_all();
    rig.give(&write(P, 8, &[1; 8]));
    assert_eq!(rig.acks(), [(ACK, P + 1, 2)]);
    assert_eq!(rig.host.region[8], 2);
    assert_eq!(rig.connection.counters().duplicate_request, 1);
    assert_eq!(rig.connection.counters().rx_write_requests, 2);
}

/// A requester that lost the NAK and whose window has shrunk below the gap has to hear of what did arrive.
#[test]
fn duplicates_are_acknowledged_while_a_nak_is_out() {
    let mut rig = Rig::new();
    rig.give(&write(P, 8, &[1; 8]));
    rig.give(&write(P + 2, 8, &[1; 8]));
    rig.take_all();
    rig.give(&write(P, 8, &[1; 8]));
    assert_eq!(rig.acks(), [(ACK, P, 1)]);
}

/// 9.7.5: a READ's answer takes one PSN a packet; First and Last carry the acknowledgement, Middle does not.
#[test]
fn a_read_is_answered_in_packets_of_the_path_mtu() {
    let mut rig = Rig::new();
    for (n, byte) in rig.host.region.iter_mut().enumerate() {
        *byte = n as u8;
    }
    rig.give(&read(P, 3, 600));
    let sent = rig.take_all();
    let mut bytes = Vec::new();
    for (n, (packet, place)) in sent
        .iter()
        .zip([Place::First, Place::Middle, Place::Last])
        .enumerate()
    {
        let packet = Packet::parse(packet).expect("a packet");
        assert_eq!((packet.kind, packet.place), (Kind::ReadResponse, place));
        assert_eq!(packet.bth.psn.get(), P + n as u32);
        assert_eq!(
            packet.ext.aeth().map(|a| (a.kind, a.msn)),
            (place != Place::Middle).then_some((ACK, 1))
        );
        bytes.extend_from_slice(packet.payload);
    }
    assert_eq!(bytes, rig.host.region[3..603]);
    // The next request comes after the answer's PSNs.
    rig.give(&write(P + 3, 0, &[1; 8]));
    assert_eq!(rig.acks(), [(ACK, P + 3, 2)]);
}

/// 9.7.5: a duplicate READ reads memory again, and may ask for a part of the first.
#[test]
fn a_duplicate_read_is_executed_again_from_memory() {
    let mut rig = Rig::new();
    rig.give(&read(P, 0, 600));
    assert_eq!(rig.psns(), [P, P + 1, P + 2]);
    rig.host.region[256] = 0xab;
    rig.give(&read(P + 1, 256, 344));
    let sent = rig.take_all();
    let first = Packet::parse(&sent[0]).expect("a packet");
    assert_eq!((first.place, first.bth.psn.get()), (Place::First, P + 1));
    assert_eq!(first.payload[0], 0xab);
    assert_eq!(sent.len(), 2);
    assert_eq!(rig.connection.counters().rx_read_requests, 1);
    // Something else under the PSNs of that READ is nobody's duplicate.
    rig.give(&read(P + 1, 0, 344));
    rig.give(&read(P, 0, 60_000));
    assert_eq!(rig.take_all().len(), 0);
}

/// What is still to be sent of a READ that is asked for again is sent once, before any later acknowledgement.
#[test]
fn a_replay_takes_the_place_of_the_first_answer() {
    let mut rig = Rig::new();
    rig.give(&read(P, 0, 600));
    rig.give(&write(P + 3, 0, &[1; 8]));
    assert_eq!(rig.take().as_deref().map(psn), Some(P));
    rig.give(&read(P + 1, 256, 344));
    assert_eq!(rig.take().as_deref().map(psn), Some(P + 1));
    rig.give(&read(P, 0, 600));
    assert_eq!(
        rig.psns(),
        [P, P + 1, P + 2, P + 3],
        "what was asked for last"
    );
}

/// 9.7.5: an atomic is executed once; its duplicate is answered with the result of the first.
#[test]
fn a_duplicate_atomic_is_answered_from_its_result() {
    let mut rig = Rig::new();
    rig.host.set_word(0, 10);
    rig.give(&fetch_add(P, 0, 5));
    let first = rig.one();
    let result = Packet::parse(&first).expect("a packet");
    assert!(matches!(result.ext, Ext::AtomicAck(_, 10)), "{result}");
    rig.host.set_word(0, 77);
    for _ in 0..3 {
        rig.give(&fetch_add(P, 0, 5));
        let again = rig.one();
        let result = Packet::parse(&again).expect("a packet");
        assert!(matches!(result.ext, Ext::AtomicAck(_, 10)), "{result}");
    }
    assert_eq!(rig.host.executed.len(), 1);
    assert_eq!(rig.host.word(0), 77);
    assert_eq!(rig.connection.counters().rx_atomic_requests, 1);
}

/// 9.7.5: results are kept for as many atomics as were agreed on. Answers to duplicates whose results newer ones have displaced are left out,
/// and what stands behind them is sent at once: an engine that was told "nothing" does not ask again until something comes.
#[test]
fn answers_that_were_forgotten_hold_up_none_behind_them() {
    let mut rig = Rig::with(&Config {
        max_dest_rd_atomic: 4,
        ..config()
    });
    let old = P..P + 4;
    for psn in old.clone() {
        rig.give(&fetch_add(psn, 0, 1));
        rig.one();
    }
    for psn in old {
        rig.give(&fetch_add(psn, 0, 1));
    }
    for psn in P + 4..P + 8 {
        rig.give(&fetch_add(psn, 0, 1));
    }
    assert_eq!(rig.psns(), [P + 4, P + 5, P + 6, P + 7]);
    assert_eq!(rig.host.word(0), 8, "each was carried out once");
}

/// 9.7.4: an atomic's address is a multiple of 8.
#[test]
fn a_crooked_atomic_is_an_invalid_request() {
    let mut rig = Rig::new();
    rig.give(&fetch_add(P, 4, 5));
    assert_eq!(rig.acks(), [(nak(NakCode::InvalidRequest), P, 0)]);
    assert!(rig.host.executed.is_empty());
}

/// 9.7.5: no more READs and atomics than were agreed on; duplicates do not count.
#[test]
fn more_reads_than_agreed_are_an_invalid_request() {
    let mut rig = Rig::with(&Config {
        max_dest_rd_atomic: 2,
        ..config()
    });
    rig.give(&read(P, 0, 8));
    rig.give(&read(P + 1, 0, 8));
    rig.give(&read(P, 0, 8));
    rig.give(&read(P + 2, 0, 8));
    let sent = rig.take_all();
    let last = Packet::parse(sent.last().expect("some")).expect("a packet");
    assert_eq!(
        last.ext.aeth().map(|a| a.kind),
        Some(nak(NakCode::InvalidRequest))
    );
}

/// 9.7.5: a SEND without a receive is answered "not ready" with the configured time, and changes nothing.
#[test]
fn no_receive_is_answered_receiver_not_ready() {
    let mut rig = Rig::with(&Config {
        min_rnr_timer: 14,
        ..config()
    });
    rig.give(&send(P, Place::Only, b"hello"));
    assert_eq!(rig.acks(), [(AethKind::RnrNak { timer: 14 }, P, 0)]);
    // What follows it is dropped, without a word.
    rig.give(&send(P + 1, Place::Only, b"world"));
    assert_eq!(rig.acks(), []);
    assert_eq!(rig.connection.counters().out_of_buffer, 1);
    rig.host.receives = 1;
    rig.give(&send(P, Place::Only, b"hello"));
    assert_eq!(rig.acks(), [(ACK, P, 1)]);
    assert_eq!(rig.host.received[0].1, b"hello");
}

/// 9.7.4: an immediate consumes a receive; its absence leaves the last packet unwritten.
#[test]
fn a_write_with_immediate_needs_a_receive() {
    let mut rig = Rig::new();
    let opcode = Opcode::write(Transport::Rc, Place::Only, true);
    let Ext::Reth(reth) = reth(0, 4) else {
        unreachable!()
    };
    let bytes = packet(opcode, P, Ext::RethImm(reth, 0xcafe), true, b"data");
    rig.give(&bytes);
    assert_eq!(rig.acks(), [(AethKind::RnrNak { timer: 12 }, P, 0)]);
    assert_eq!(rig.host.region[0], 0);
    rig.host.receives = 1;
    rig.give(&bytes);
    assert_eq!(rig.acks(), [(ACK, P, 1)]);
    let (received, _) = &rig.host.received[0];
    assert_eq!(
        (received.kind, received.imm, received.len),
        (ReceivedKind::Write, Some(0xcafe), 4)
    );
}

/// 9.7.4: key, range and rights are looked at once a message, before its first byte.
#[test]
fn a_wrong_key_is_a_remote_access_error_and_stops_the_responder() {
    let mut rig = Rig::new();
    let opcode = Opcode::write(Transport::Rc, Place::First, false);
    let ext = Ext::Reth(Reth {
        va: BASE,
        rkey: 1,
        len: 300,
    });
    rig.give(&packet(opcode, P, ext, false, &[1; 256]));
    assert_eq!(rig.acks(), [(nak(NakCode::RemoteAccess), P, 0)]);
    assert_eq!(rig.events(), [Event::Stopped]);
    // Whoever missed the NAK gets it again; nothing else is carried out.
    rig.give(&write(P, 0, &[1; 8]));
    rig.give(&write(P + 1, 0, &[1; 8]));
    assert_eq!(rig.acks(), [(nak(NakCode::RemoteAccess), P, 0)]);
    assert_eq!(rig.host.region[0], 0);
    assert_eq!(rig.connection.counters().resp_remote_access_errors, 1);
    assert!(rig.connection.has_failed());
}

#[test]
fn a_message_is_checked_once() {
    let mut rig = Rig::new();
    let part = |place| Opcode::write(Transport::Rc, place, false);
    rig.give(&packet(
        part(Place::First),
        P,
        reth(0, 520),
        false,
        &[1; 256],
    ));
    rig.give(&packet(
        part(Place::Middle),
        P + 1,
        Ext::None,
        false,
        &[2; 256],
    ));
    rig.give(&packet(part(Place::Last), P + 2, Ext::None, true, &[3; 8]));
    assert_eq!(rig.acks(), [(ACK, P + 2, 1)]);
    assert_eq!(rig.host.checks, 1);
    assert_eq!(rig.host.region[254..258], [1, 1, 2, 2]);
    assert_eq!(rig.host.region[510..521], [2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 0]);
}

/// 9.7.4: a WRITE or READ of no bytes looks at no key.
#[test]
fn nothing_is_checked_for_no_bytes() {
    let mut rig = Rig::new();
    let ext = Ext::Reth(Reth {
        va: 3,
        rkey: 0xdead,
        len: 0,
    });
    rig.give(&packet(
        Opcode::write(Transport::Rc, Place::Only, false),
        P,
        ext,
        true,
        &[],
    ));
    rig.give(&packet(Opcode::READ_REQUEST, P + 1, ext, true, &[]));
    let sent = rig.take_all();
    assert_eq!(sent.len(), 2);
    let last = Packet::parse(&sent[1]).expect("a packet");
    assert_eq!(
        (last.kind, last.place, last.payload.len()),
        (Kind::ReadResponse, Place::Only, 0)
    );
}

/// 9.7.4: what fails at the responder is a remote operational error.
#[test]
fn a_failure_here_is_a_remote_operational_error() {
    let mut rig = Rig::new();
    rig.host.refusal = Some(Refusal::Operational);
    rig.give(&write(P, 0, &[1; 8]));
    assert_eq!(rig.acks(), [(nak(NakCode::RemoteOperational), P, 0)]);
    assert_eq!(rig.connection.counters().resp_remote_operational_errors, 1);
}

/// 9.7.4: opcodes in an order that no message has, and lengths that do not add up, are invalid requests.
#[test]
fn malformed_messages_are_invalid_requests() {
    let w = |place| Opcode::write(Transport::Rc, place, false);
    let s = |place| Opcode::send(Transport::Rc, place, false);
    let cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        (
            "Middle first",
            vec![packet(w(Place::Middle), P, Ext::None, true, &[0; 256])],
        ),
        (
            "Last first",
            vec![packet(s(Place::Last), P, Ext::None, true, &[0; 8])],
        ),
        (
            "First of less than the MTU",
            vec![packet(w(Place::First), P, reth(0, 600), true, &[0; 100])],
        ),
        (
            "Only of more than the MTU",
            vec![packet(s(Place::Only), P, Ext::None, true, &[0; 257])],
        ),
        (
            "Only whose length says more",
            vec![packet(w(Place::Only), P, reth(0, 9), true, &[0; 8])],
        ),
        (
            "First whose length fits one packet",
            vec![packet(w(Place::First), P, reth(0, 256), true, &[0; 256])],
        ),
        (
            "longer than announced",
            vec![
                packet(w(Place::First), P, reth(0, 300), false, &[0; 256]),
                packet(w(Place::Last), P + 1, Ext::None, true, &[0; 45]),
            ],
        ),
        (
            "an empty last packet",
            vec![
                packet(s(Place::First), P, Ext::None, false, &[0; 256]),
                packet(s(Place::Last), P + 1, Ext::None, true, &[]),
            ],
        ),
        (
            "a SEND within a WRITE",
            vec![
                packet(w(Place::First), P, reth(0, 600), false, &[0; 256]),
                packet(s(Place::Only), P + 1, Ext::None, true, &[0; 8]),
            ],
        ),
        (
            "a READ within a WRITE",
            vec![
                packet(w(Place::First), P, reth(0, 600), false, &[0; 256]),
                read(P + 1, 0, 8),
            ],
        ),
        ("a READ of more than 2^31 bytes", vec![read(P, 0, u32::MAX)]),
    ];
    for (name, packets) in cases {
        let mut rig = Rig::new();
        rig.host.receives = 4;
        for packet in &packets {
            rig.give(packet);
        }
        let at = P + packets.len() as u32 - 1;
        assert_eq!(
            rig.acks(),
            [(nak(NakCode::InvalidRequest), at, 0)],
            "{name}"
        );
        assert_eq!(
            rig.connection.counters().resp_remote_invalid_request,
            1,
            "{name}"
        );
    }
}

/// 9.7.4: a SEND longer than the receive is an invalid request, and an error of the receive.
#[test]
fn a_send_longer_than_the_receive_is_an_invalid_request() {
    let mut rig = Rig::new();
    rig.host.receives = 1;
    rig.host.room = 300;
    rig.give(&send(P, Place::First, &[1; 256]));
    rig.give(&send(P + 1, Place::Last, &[1; 45]));
    assert_eq!(rig.acks(), [(nak(NakCode::InvalidRequest), P + 1, 0)]);
    assert_eq!((rig.host.receive_errors, rig.host.given_back), (1, 0));
    assert!(rig.host.received.is_empty());
}

/// 9.7.7: a NAK carries the count of the last message that was completed.
#[test]
fn a_nak_keeps_the_count_of_the_last_message() {
    let mut rig = Rig::new();
    rig.give(&write(P, 0, &[1; 8]));
    rig.give(&write(P + 1, 0, &[1; 8]));
    rig.take_all();
    rig.give(&write(P + 5, 0, &[1; 8]));
    assert_eq!(rig.acks(), [(nak(NakCode::PsnSequence), P + 2, 2)]);
}

/// A packet of the other transport, or an answer to nothing, is dropped and counted.
#[test]
fn strangers_are_counted_and_dropped() {
    let mut rig = Rig::new();
    rig.give(&packet(
        Opcode::write(Transport::Uc, Place::Only, false),
        P,
        reth(0, 8),
        false,
        &[1; 8],
    ));
    rig.give(&answer(ACK, OURS));
    rig.give(&read_response(OURS, Place::Only, &[1; 8]));
    assert_eq!(rig.take_all().len(), 0);
    assert_eq!(rig.host.region[0], 0);
    assert_eq!(rig.connection.counters().unexpected_packets, 3);
}
