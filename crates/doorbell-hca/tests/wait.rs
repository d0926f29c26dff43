//! WAIT: a companion queue goes on when another queue has completed, stands still until then, and never in another's way.

mod common;

use common::{Options, PATIENCE, Rig};
use doorbell_device::layout::CqKind;
use doorbell_hca::{Fault, QpState};
use doorbell_wire::Wqe;

#[test]
fn a_companion_counts_what_its_main_queue_completed() {
    for kind in [CqKind::PerSlot, CqKind::Collapsed] {
        let rig = Rig::new();
        let mut main = rig.loopback(Options {
            kind,
            ..Options::default()
        });
        let mut companion = rig.loopback(Options {
            kind,
            ..Options::default()
        });
        let (dst, counter) = (rig.region(64), rig.region(16));
        let cqn = main.hca_qp().cqn();
        for round in 0..if cfg!(miri) { 2 } else { 50u64 } {
            // The companion is rung first: it has to wait for a WQE that is not even posted.
            let ticket = main.pi + 1;
            companion.post(&Wqe::wait(ticket as u32, cqn).signalled(true));
            let done = companion.post(
                &Wqe::fetch_add(counter.remote(0), counter.local(8, 8), 1)
                    .expect("fa")
                    .signalled(true),
            );
            companion.ring();
            for _ in 0..20 {
                rig.driver.poll();
            }
            assert_eq!(counter.u64(0), round, "not before the main queue");
            assert_eq!(companion.completion(done), None);
            main.run(
                &rig,
                Wqe::write_inline(dst.remote(0), &round.to_le_bytes()).expect("inline"),
            );
            for _ in 0..20 {
                rig.driver.poll();
            }
            assert_eq!(
                counter.u64(0),
                round,
                "the first of two does not satisfy it"
            );
            main.run(&rig, Wqe::nop());
            companion.wait(&rig, done);
            assert_eq!((counter.u64(0), dst.u64(0)), (round + 1, round));
        }
    }
}

#[test]
fn waiting_stalls_nobody_else() {
    let rig = Rig::new();
    let main = rig.loopback(Options::default());
    let mut stuck: Vec<_> = (0..8).map(|_| rig.loopback(Options::default())).collect();
    for qp in &mut stuck {
        qp.post(&Wqe::wait(1_000_000, main.hca_qp().cqn()).signalled(true));
        qp.ring();
    }
    let mut other = rig.loopback(Options::default());
    for _ in 0..if cfg!(miri) { 5 } else { 1000 } {
        other.run(&rig, Wqe::nop());
    }
    assert!(
        stuck
            .iter()
            .all(|qp| qp.completion(0).is_none() && qp.state() == QpState::Ready)
    );
    // They can be reset, and dropped, while they wait.
    stuck[0].reset();
}

#[test]
fn waiting_for_a_queue_that_fails_or_goes_is_an_error() {
    let rig = Rig::new();
    let main = rig.loopback(Options::default());
    let mut a = rig.loopback(Options::default());
    a.post(&Wqe::wait(5, main.hca_qp().cqn()).signalled(true));
    a.ring();
    for _ in 0..10 {
        rig.driver.poll();
    }
    assert_eq!(a.state(), QpState::Ready);
    main.hca_qp()
        .fail(Fault::Destroyed, PATIENCE)
        .expect("fail");
    assert!(rig.until(|| a.state() == QpState::Error));
    assert_eq!(a.error_word().vendor(), Fault::BadWaitCq.vendor().0);

    let mut gone = rig.loopback(Options::default());
    gone.run(&rig, Wqe::nop());
    let mut b = rig.loopback(Options::default());
    let cqn = gone.hca_qp().cqn();
    b.run(&rig, Wqe::wait(0, cqn));
    b.post(&Wqe::wait(1, cqn).signalled(true));
    b.ring();
    rig.driver.poll();
    gone.qp
        .take()
        .expect("alive")
        .destroy(PATIENCE)
        .expect("destroy");
    assert!(rig.until(|| b.state() == QpState::Error));
}

#[test]
fn counts_of_32_bits_wrap() {
    // An index far behind is in the past, one just ahead is not: half the number range each.
    let rig = Rig::new();
    let mut main = rig.loopback(Options::default());
    let mut companion = rig.loopback(Options::default());
    main.run(&rig, Wqe::nop());
    let cqn = main.hca_qp().cqn();
    companion.run(&rig, Wqe::wait(0, cqn));
    companion.run(&rig, Wqe::wait(u32::MAX, cqn));
    companion.run(&rig, Wqe::wait(0x8000_0001, cqn));
    companion.go(Wqe::wait(1, cqn));
    for _ in 0..10 {
        rig.driver.poll();
    }
    assert_eq!(companion.completion(3), None);
}

#[test]
fn immediates_consume_receives_in_order() {
    for kind in [CqKind::PerSlot, CqKind::Collapsed] {
        let rig = Rig::new();
        let options = Options {
            kind,
            receive: true,
            ..Options::default()
        };
        let (mut a, mut b) = (rig.qp_with(options), rig.qp_with(options));
        a.connect(&b);
        b.connect(&a);
        let (src, dst) = (rig.region(64), rig.region(64));
        let rounds = if cfg!(miri) { 5 } else { 40 };
        for round in 0..rounds {
            src.set_u64(0, round);
            let wqe = Wqe::write_imm(dst.remote(8), src.local(0, 8), round as u32).expect("imm");
            let at = a.go(wqe);
            for _ in 0..3 {
                rig.driver.poll();
            }
            assert_eq!(a.completion(at), None, "no receive yet");
            b.post_receives(1);
            a.wait(&rig, at);
            let cqe = b.received(round).expect("a receive CQE");
            assert_eq!(
                (cqe.imm, cqe.byte_cnt, cqe.tail.wqe_counter()),
                (round as u32, 8, round as u16)
            );
            assert_eq!(cqe.qpn, b.hca_qp().qpn());
            assert_eq!(dst.u64(8), round);
        }
        // Posted receives of a QP that fails are flushed.
        b.post_receives(2);
        b.hca_qp().fail(Fault::Destroyed, PATIENCE).expect("fail");
        assert!(b.received(rounds + 1).is_some_and(|c| c.tail.is_error()));
    }
}
