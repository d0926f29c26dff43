//! Memory that is reached by a copy engine: nothing is said before it can be seen.

use super::rig::*;
use doorbell_roce::Event;
use doorbell_wire::roce::{Packet, Place};

/// The acknowledgement, and so the peer's completion, waits for the bytes; those that are there are acknowledged meanwhile.
#[test]
fn an_acknowledgement_waits_for_what_it_says() {
    let mut rig = Rig::new();
    rig.host.slow = true;
    for n in 0..4 {
        rig.give(&write(THEIRS + n, 0, &[1; 8]));
    }
    assert_eq!(rig.acks(), []);
    rig.host.settled = 3;
    assert_eq!(
        rig.acks(),
        [(ACK, THEIRS + 2, 3)],
        "one for all that are there"
    );
    rig.host.settled = 4;
    assert_eq!(rig.acks(), [(ACK, THEIRS + 3, 4)]);
}

/// A receive completes when its bytes are there, and in order.
#[test]
fn a_receive_waits_for_its_bytes() {
    let mut rig = Rig::new();
    rig.host.slow = true;
    rig.host.receives = 2;
    rig.give(&send(THEIRS, Place::Only, b"one"));
    rig.events();
    assert!(rig.host.received.is_empty());
    rig.host.settled = 1;
    rig.events();
    assert_eq!(rig.host.received[0].1, b"one");
}

/// A READ sees the WRITE before it.
#[test]
fn a_read_waits_for_the_write_before_it() {
    let mut rig = Rig::new();
    rig.host.slow = true;
    rig.give(&write(THEIRS, 0, &[9; 8]));
    rig.give(&read(THEIRS + 1, 0, 8));
    assert_eq!(rig.take_all().len(), 0);
    rig.host.settled = 1;
    assert_eq!(rig.psns(), [THEIRS, THEIRS + 1]);
}

/// An answer whose memory is not to be had yet is asked for again, and holds up what is behind it.
#[test]
fn an_answer_waits_for_its_memory() {
    let mut rig = Rig::new();
    rig.host.ready = false;
    rig.give(&fetch_add(THEIRS, 0, 3));
    rig.give(&read(THEIRS + 1, 0, 8));
    rig.give(&write(THEIRS + 2, 0, &[1; 8]));
    assert_eq!(rig.take_all().len(), 0);
    rig.host.ready = true;
    assert_eq!(rig.psns(), [THEIRS, THEIRS + 1, THEIRS + 2]);
    assert_eq!(rig.host.executed.len(), 1);
}

/// A READ is complete when what it brought is there.
#[test]
fn a_read_is_complete_when_its_bytes_are_there() {
    let mut rig = Rig::new();
    rig.host.slow = true;
    rig.post(0, READ, &[0; 300]);
    let request = rig.one();
    assert!(Packet::parse(&request).is_ok());
    rig.give(&read_response(OURS, Place::First, &[1; 256]));
    rig.give(&read_response(OURS + 1, Place::Last, &[1; 44]));
    assert_eq!(rig.events(), []);
    rig.host.settled = 1;
    assert_eq!(rig.events(), []);
    rig.host.settled = 2;
    assert_eq!(rig.events(), [Event::Done { through: 0 }]);
}
