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

/// Connections whose packets come to one buffer have no more than a window of bytes under way, but for a packet each; whoever stops has asked for
/// an answer, also where its share became smaller meanwhile; and one alone has all of it again.
#[test]
fn connections_share_a_window_of_bytes() {
    const ALL: u64 = 64 << 10;
    let shared = Config {
        window: 1000,
        window_bytes: ALL as u32,
        ..config()
    };
    let mut rigs: Vec<Rig> = (0..16).map(|_| Rig::with(&shared)).collect();
    for rig in &mut rigs {
        rig.post(0, WRITE, &[0; 512 << 10]);
    }
    // The first one sends alone, but not all that it might.
    let under_way = |rigs: &[Rig]| {
        rigs.iter()
            .map(|r| r.connection.bytes_under_way())
            .sum::<u64>()
    };
    let mut newest = [OURS; 16];
    for _ in 0..70 {
        newest[0] = psn(&rigs[0].take().expect("it sends"));
    }
    for round in 0..50 {
        for n in 0..16 {
            let others = under_way(&rigs) - rigs[n].connection.bytes_under_way();
            rigs[n].connection.share_window(16, others);
            let sent = rigs[n].take_all();
            if let Some(last) = sent.last() {
                newest[n] = psn(last);
                assert!(asks(last), "round {round}, {n}: nobody would answer");
            }
            let all = under_way(&rigs);
            assert!(all <= ALL + 16 * 2 * 256, "round {round}: {all}");
        }
        for (rig, newest) in rigs.iter_mut().zip(newest) {
            rig.give(&answer(ACK, newest));
        }
    }
    assert!(
        rigs.iter()
            .all(|r| r.connection.counters().tx_bytes > 100_000)
    );
    assert!(
        rigs.iter()
            .all(|r| r.connection.counters().retransmitted_packets == 0)
    );
    rigs[3].connection.share_window(1, 0);
    rigs[3].take_all();
    assert_eq!(rigs[3].connection.bytes_under_way(), ALL);
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
