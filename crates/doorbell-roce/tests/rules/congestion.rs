//! Explicit congestion notification (annex A17.9).

use doorbell_roce::Config;
use doorbell_wire::roce::{Ext, Opcode, Packet};

use super::rig::*;

/// Marked packets are counted and answered with notifications, one in 50 µs at most.
#[test]
fn marks_are_answered_at_a_limited_rate() {
    let mut rig = Rig::new();
    let mut sent = Vec::new();
    for n in 0..100 {
        let bytes = write(THEIRS + n, 0, &[1; 8]);
        let parsed = Packet::parse(&bytes).expect("a packet");
        rig.connection.handle(&parsed, true, rig.now, &mut rig.host);
        sent.extend(rig.take_all());
        rig.now += 1_000;
    }
    let cnps: Vec<_> = sent.iter().filter(|p| p[0] == Opcode::CNP.0).collect();
    assert_eq!(cnps.len(), 2, "in 100 us");
    let cnp = Packet::parse(cnps[0]).expect("a packet");
    assert!(cnp.bth.becn);
    assert_eq!(
        (cnp.bth.dest_qp, cnp.ext, cnps[0].len()),
        (0x42, Ext::Cnp, 28)
    );
    let counters = rig.connection.counters();
    assert_eq!(
        (counters.np_ecn_marked_roce_packets, counters.np_cnp_sent),
        (100, 2)
    );
    assert_eq!(sent.len(), 102, "the acknowledgements go out all the same");
}

/// A notification halves the packets that may be under way, once in 50 µs; acknowledgements give them back.
#[test]
fn a_notification_halves_the_window() {
    let mut rig = Rig::with(&Config {
        window: 64,
        ..config()
    });
    let cnp = packet(Opcode::CNP, 0, Ext::Cnp, false, &[]);
    rig.give(&cnp);
    rig.give(&cnp);
    assert_eq!(rig.connection.counters().rp_cnp_handled, 1);
    rig.post(0, WRITE, &[0; 400 * 256]);
    assert_eq!(rig.take_all().len(), 32);
    for _ in 0..10 {
        rig.now += 50_000;
        rig.give(&cnp);
    }
    let mut acknowledged = OURS + 32;
    rig.give(&answer(ACK, acknowledged - 1));
    assert_eq!(
        rig.take_all().len(),
        19,
        "never fewer than sixteen, and one and an eighth for what was acknowledged"
    );
    let mut largest = 0;
    for _ in 0..40 {
        acknowledged += 4;
        rig.give(&answer(ACK, acknowledged - 1));
        let sent = rig.take_all().len() as u32;
        largest = largest.max(sent);
    }
    assert!(largest > 4, "it grows again");
}
