//! Unreliable Connection (9.8): never an answer; what is damaged costs its message and nothing else.

use doorbell_roce::{Config, Event, Message, PostError};
use doorbell_wire::roce::{Ext, Opcode, Packet, Place, Reth, Transport};

use super::rig::*;

const P: u32 = THEIRS;

fn uc_write(place: Place) -> Opcode {
    Opcode::write(Transport::Uc, place, false)
}

fn uc_send(psn: u32, place: Place, payload: &[u8]) -> Vec<u8> {
    packet(
        Opcode::send(Transport::Uc, place, false),
        psn,
        Ext::None,
        false,
        payload,
    )
}

/// A message in one packet is taken whatever its PSN is; the difference is counted.
#[test]
fn a_single_packet_is_taken_with_any_psn() {
    let mut rig = Rig::uc();
    for (n, psn) in [P, 7, 0xff_ffff, 0].into_iter().enumerate() {
        rig.give(&packet(
            uc_write(Place::Only),
            psn,
            reth(n as u64 * 8, 8),
            false,
            &[1; 8],
        ));
    }
    assert_eq!(rig.host.region[..32], [1; 32]);
    assert_eq!(rig.connection.counters().rx_write_requests, 4);
    assert_eq!(
        rig.connection.counters().out_of_sequence,
        2,
        "0 follows 0xffffff"
    );
    assert_eq!(rig.take_all().len(), 0, "no answer");
}

/// A gap drops the message that it is in; the next first packet begins anew.
#[test]
fn a_gap_drops_its_message() {
    let mut rig = Rig::uc();
    rig.host.receives = 2;
    rig.give(&uc_send(P, Place::First, &[1; 256]));
    rig.give(&uc_send(P + 2, Place::Last, &[3; 8]));
    assert_eq!((rig.host.given_back, rig.host.received.len()), (1, 0));
    rig.give(&uc_send(P + 3, Place::First, &[4; 256]));
    rig.give(&uc_send(P + 4, Place::Last, &[5; 8]));
    assert_eq!(rig.host.received.len(), 1);
    assert_eq!(rig.host.received[0].1[255..258], [4, 5, 5]);
    assert_eq!(rig.connection.counters().uc_dropped_messages, 1);
    assert_eq!(rig.take_all().len(), 0);
}

/// A first packet where a middle one should be drops the message before.
#[test]
fn a_new_message_drops_the_one_that_was_not_ended() {
    let mut rig = Rig::uc();
    rig.host.receives = 1;
    rig.give(&uc_send(P, Place::First, &[1; 256]));
    rig.give(&uc_send(P + 9, Place::Only, &[2; 8]));
    assert_eq!((rig.host.given_back, rig.host.received.len()), (1, 1));
    assert_eq!(rig.host.received[0].1, [2; 8]);
}

/// The rest of a message whose beginning was lost is dropped.
#[test]
fn an_end_without_a_beginning_is_dropped() {
    let mut rig = Rig::uc();
    rig.host.receives = 1;
    rig.give(&packet(
        uc_write(Place::Middle),
        P,
        Ext::None,
        false,
        &[1; 256],
    ));
    rig.give(&packet(
        uc_write(Place::Last),
        P + 1,
        Ext::None,
        false,
        &[1; 8],
    ));
    assert_eq!(rig.host.region[0], 0);
    assert_eq!(
        (
            rig.host.receives,
            rig.connection.counters().unexpected_packets
        ),
        (1, 2)
    );
}

/// No receive: the message is dropped, nobody is told, and the next is welcome.
#[test]
fn without_a_receive_the_message_is_dropped() {
    let mut rig = Rig::uc();
    rig.give(&uc_send(P, Place::Only, &[1; 8]));
    assert_eq!(rig.connection.counters().out_of_buffer, 1);
    rig.host.receives = 1;
    rig.give(&uc_send(P + 1, Place::Only, &[2; 8]));
    assert_eq!((rig.host.received.len(), rig.take_all().len()), (1, 0));
}

/// A wrong key, or a length that does not add up: dropped and counted; the connection lives.
#[test]
fn what_would_be_a_nak_is_dropped() {
    let mut rig = Rig::uc();
    let ext = Ext::Reth(Reth {
        va: BASE,
        rkey: 1,
        len: 8,
    });
    rig.give(&packet(uc_write(Place::Only), P, ext, false, &[1; 8]));
    rig.give(&packet(
        uc_write(Place::Only),
        P + 1,
        reth(0, 9),
        false,
        &[1; 8],
    ));
    assert_eq!((rig.host.region[0], rig.take_all().len()), (0, 0));
    let counters = *rig.connection.counters();
    assert_eq!(
        (
            counters.resp_remote_access_errors,
            counters.resp_remote_invalid_request
        ),
        (1, 1)
    );
    assert!(!rig.connection.has_failed());
    rig.give(&packet(
        uc_write(Place::Only),
        P + 2,
        reth(0, 8),
        false,
        &[1; 8],
    ));
    assert_eq!(rig.host.region[0], 1);
}

/// A SEND longer than its receive: the receive was completed in error, and is not given back as well.
#[test]
fn an_over_long_send_ends_its_receive_once() {
    let mut rig = Rig::uc();
    rig.host.receives = 1;
    rig.host.room = 300;
    rig.give(&uc_send(P, Place::First, &[1; 256]));
    rig.give(&uc_send(P + 1, Place::Last, &[1; 100]));
    assert_eq!((rig.host.receive_errors, rig.host.given_back), (1, 0));
    assert_eq!((rig.host.receives, rig.host.received.len()), (0, 0));
}

/// A sender that does not pad (FPGA sensors): the length is the payload's, odd as it may be.
#[test]
fn an_odd_length_without_padding_is_taken() {
    let mut rig = Rig::uc();
    rig.host.receives = 1;
    let mut bytes = packet(
        Opcode::write(Transport::Uc, Place::Only, true),
        P,
        {
            let Ext::Reth(reth) = reth(0, 30) else {
                unreachable!()
            };
            Ext::RethImm(reth, 0xabc)
        },
        false,
        &[7; 30],
    );
    bytes.truncate(bytes.len() - 2);
    bytes[1] &= !0x30;
    rig.give(&bytes);
    assert_eq!(rig.host.region[28..32], [7, 7, 0, 0]);
    assert_eq!(rig.host.received[0].0.imm, Some(0xabc));
}

/// What was sent is done; there is nobody to wait for, and nothing to read with.
#[test]
fn what_is_sent_is_done() {
    let mut rig = Rig::uc();
    rig.post(0, WRITE, &[1; 600]);
    let sent = rig.take_all();
    assert!(sent.iter().all(|p| !asks(p)));
    assert_eq!(
        Packet::parse(&sent[2]).expect("a packet").bth.opcode,
        uc_write(Place::Last)
    );
    assert_eq!(rig.events(), [Event::Done { through: 0 }]);
    assert_eq!(rig.connection.timeout(), None);
    let read = Message {
        token: 1,
        op: READ,
        len: 8,
        fence: false,
        solicited: false,
    };
    assert_eq!(rig.connection.post(read), Err(PostError::Unsupported));
}

/// A receiver that was never told who sends (dest QPN 0) takes what comes, and sends no congestion notifications to nobody.
#[test]
fn a_receiver_without_a_peer_takes_what_comes() {
    let mut rig = Rig::with(&Config {
        transport: Transport::Uc,
        dest_qpn: 0,
        ..config()
    });
    let bytes = packet(uc_write(Place::Only), 0x12_3456, reth(0, 8), false, &[1; 8]);
    let parsed = Packet::parse(&bytes).expect("a packet");
    rig.connection.handle(&parsed, true, rig.now, &mut rig.host);
    assert_eq!((rig.host.region[0], rig.take_all().len()), (1, 0));
    assert_eq!(rig.connection.counters().np_ecn_marked_roce_packets, 1);
}
