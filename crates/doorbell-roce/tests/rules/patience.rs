//! How long a requester is patient: with a peer that is not ready, and with one that is silent.

use doorbell_roce::{Config, Event, Failure};
use doorbell_wire::roce::{AethKind, NakCode, rnr_timer_ns};

use super::rig::*;

const P: u32 = OURS;

fn done(through: u64) -> Event {
    Event::Done { through }
}

fn failed(token: u64, failure: Failure) -> Event {
    Event::Failed { token, failure }
}

/// 9.7.5: "receiver not ready" waits for the time that the peer asks for, then goes on from there; what is before it is complete.
#[test]
fn not_ready_waits_and_tries_again() {
    let mut rig = Rig::new();
    rig.post(0, WRITE, &[0; 8]);
    rig.post(1, SEND, &[0; 8]);
    rig.post(2, SEND, &[0; 8]);
    rig.take_all();
    let not_ready = answer(AethKind::RnrNak { timer: 12 }, P + 1);
    rig.give(&not_ready);
    assert_eq!(rig.events(), [done(0)]);
    assert_eq!(rig.take_all().len(), 0);
    assert_eq!(rig.connection.timeout(), Some(rig.now + rnr_timer_ns(12)));
    assert_eq!(rnr_timer_ns(12), 640_000);
    rig.time_out();
    assert_eq!(rig.psns(), [P + 1, P + 2]);
    assert_eq!(rig.connection.counters().local_ack_timeout_err, 0);
}

/// 9.7.5: retry count 7 means for ever.
#[test]
fn not_ready_seven_is_for_ever() {
    let mut rig = Rig::new();
    rig.post(0, SEND, &[0; 8]);
    for _ in 0..1000 {
        assert_eq!(rig.psns(), [P]);
        rig.give(&answer(AethKind::RnrNak { timer: 1 }, P));
        rig.time_out();
    }
    assert_eq!(rig.events(), []);
    assert_eq!(rig.connection.counters().rnr_nak_retry_err, 1000);
}

/// 9.7.5: below seven it is the number of tries after the first; a doubled NAK is none, and progress begins a new count.
#[test]
fn not_ready_is_tried_as_often_as_configured() {
    let mut rig = Rig::with(&Config {
        rnr_retry: 2,
        ..config()
    });
    rig.post(0, SEND, &[0; 8]);
    rig.post(1, SEND, &[0; 8]);
    for message in 0..2 {
        for round in 0..3 {
            assert_eq!(
                rig.take_all().len(),
                2 - message as usize,
                "message {message}, try {round}"
            );
            if round == 2 && message == 0 {
                break;
            }
            let not_ready = answer(AethKind::RnrNak { timer: 1 }, P + message);
            rig.give(&not_ready);
            if round < 2 {
                rig.give(&not_ready);
                rig.time_out();
            }
        }
        if message == 0 {
            // This one is received, the next is not: with one packet, since the NAK says so too.
            rig.give(&answer(ACK, P));
            assert_eq!(rig.events(), [done(0)]);
            rig.time_out();
        }
    }
    assert_eq!(rig.events(), [failed(1, Failure::RnrRetry)]);
    assert_eq!(rig.connection.counters().req_rnr_retries_exceeded, 1);
}

/// 9.7.6: without an answer everything is sent again from the oldest on; after the configured time the message fails, not later.
#[test]
fn silence_costs_the_configured_time_and_no_more() {
    let config = Config {
        timeout: 10,
        retry_cnt: 3,
        ..config()
    };
    let mut rig = Rig::with(&config);
    rig.post(0, WRITE, &[0; 8]);
    rig.post(1, SEND, &[0; 8]);
    let start = rig.now;
    assert_eq!(rig.psns(), [P, P + 1]);
    for _ in 0..3 {
        rig.time_out();
        assert_eq!(rig.psns(), [P, P + 1]);
    }
    rig.time_out();
    assert_eq!(rig.take_all().len(), 0);
    assert_eq!(
        rig.events(),
        [failed(0, Failure::Retry), failed(1, Failure::Flushed)]
    );
    assert_eq!(Some(rig.now - start), config.patience_ns());
    assert_eq!(rig.now - start, (4096 << 10) * 4);
    assert_eq!(rig.connection.counters().local_ack_timeout_err, 4);
    assert_eq!(rig.connection.counters().req_transport_retries_exceeded, 1);
}

/// NAKs that bring nothing forward do not put the end off.
#[test]
fn a_peer_that_only_says_nak_is_given_up_in_time() {
    let config = Config {
        timeout: 10,
        retry_cnt: 2,
        ..config()
    };
    let mut rig = Rig::with(&config);
    rig.post(0, WRITE, &[0; 8]);
    let start = rig.now;
    rig.take_all();
    while rig.connection.timeout().is_some() {
        rig.take_all();
        rig.give(&answer(nak(NakCode::PsnSequence), P));
        rig.take_all();
        rig.time_out();
    }
    assert_eq!(rig.events(), [failed(0, Failure::Retry)]);
    assert_eq!(Some(rig.now - start), config.patience_ns());
}

/// 9.7.6: every answer that brings something forward gives the full time anew.
#[test]
fn progress_starts_the_time_anew() {
    let config = Config {
        timeout: 10,
        retry_cnt: 1,
        ..config()
    };
    let mut rig = Rig::with(&config);
    rig.post(0, WRITE, &[0; 8]);
    rig.post(1, WRITE, &[0; 8]);
    rig.take_all();
    rig.time_out();
    rig.take_all();
    rig.give(&answer(ACK, P));
    let start = rig.now;
    rig.time_out();
    rig.time_out();
    assert_eq!(rig.events(), [done(0), failed(1, Failure::Retry)]);
    assert_eq!(Some(rig.now - start), config.patience_ns());
}
