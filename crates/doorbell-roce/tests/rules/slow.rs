//! Memory that is reached by a copy engine: nothing is said before it can be seen.

use super::rig::*;
use doorbell_roce::Event;
use doorbell_wire::roce::{NakCode, Packet, Place};

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

/// What failed after it was taken is refused, with everything behind it; what settled before is acknowledged first, and receives whose
/// bytes are lost do not complete.
#[test]
fn what_is_lost_later_is_refused() {
    for settled in 0..4 {
        let mut rig = Rig::new();
        rig.host.slow = true;
        rig.host.receives = 2;
        rig.give(&write(THEIRS, 0, &[1; 8]));
        rig.give(&send(THEIRS + 1, Place::Only, b"lost"));
        rig.give(&write(THEIRS + 2, 8, &[2; 8]));
        rig.give(&read(THEIRS + 3, 0, 8));
        rig.host.settled = settled.min(2);
        if settled == 3 {
            // All but the last write.
            rig.events();
        }
        rig.connection.lost(settled.min(2));
        let acks = rig.acks();
        let nak = nak(NakCode::RemoteOperational);
        match settled {
            0 => assert_eq!(acks, [(nak, THEIRS, 4)]),
            1 => assert_eq!(acks, [(ACK, THEIRS, 1), (nak, THEIRS + 1, 4)]),
            _ => assert_eq!(acks, [(ACK, THEIRS + 1, 2), (nak, THEIRS + 2, 4)]),
        }
        assert_eq!(rig.host.received.len(), usize::from(settled >= 2));
        assert_eq!(rig.events(), [Event::Stopped]);
        // It stays so: nothing new is carried out, and whoever missed the refusal hears it again.
        let at = THEIRS + settled.min(2) as u32;
        rig.give(&write(at, 0, &[3; 8]));
        assert_eq!(rig.acks().last().map(|a| (a.0, a.1)), Some((nak, at)));
        assert_eq!(rig.connection.counters().resp_remote_operational_errors, 1);
        // Said once is enough.
        rig.connection.lost(0);
        assert_eq!(rig.acks(), []);
    }
}
