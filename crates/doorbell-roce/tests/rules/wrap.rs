//! Packet sequence numbers near their wrap, and the arithmetic that everything rests on (9.7.1).

use doorbell_roce::{Config, Event};
use doorbell_wire::roce::Psn;
use proptest::prelude::*;

use super::rig::*;

const HALF: i32 = 1 << 23;

/// Near zero, near half, and anywhere.
fn any_psn() -> impl Strategy<Value = u32> {
    prop_oneof![
        0_u32..64,
        0xff_ffc0_u32..0x100_0000,
        0x7f_ffc0_u32..0x80_0040,
        0_u32..0x100_0000
    ]
}

proptest! {
    /// Going forward and back again, and measuring it.
    #[test]
    fn distances_are_what_was_gone(start in any_psn(), n in 0_u32..1 << 23) {
        let start = Psn::new(start);
        prop_assert_eq!(start.add(n).since(start), n as i32);
        prop_assert_eq!(start.sub(n).since(start), -(n as i32));
        prop_assert_eq!(start.add(n).sub(n), start);
        prop_assert!(start.add(n).get() < 1 << 24);
    }

    /// Of two different numbers one is later, unless they are half the circle apart.
    #[test]
    fn later_is_the_opposite_of_earlier(a in any_psn(), b in any_psn()) {
        let (a, b) = (Psn::new(a), Psn::new(b));
        let (there, back) = (a.since(b), b.since(a));
        prop_assert_eq!(there == 0, a == b);
        prop_assert!(there == -back || (there, back) == (-HALF, -HALF));
    }

    /// Whatever the first number is, a conversation goes the same way: data, a gap, a duplicate, a READ, an acknowledgement.
    #[test]
    fn a_conversation_does_not_depend_on_its_first_number(ours in any_psn(), theirs in any_psn(), lost in 0_usize..8) {
        let config = Config { sq_psn: Psn::new(ours), rq_psn: Psn::new(theirs), ..config() };
        let mut near = Rig::with(&config);
        let mut far = Rig::with(&Config { sq_psn: config.rq_psn, rq_psn: config.sq_psn, ..config });
        for token in 0..4 {
            near.post(token, WRITE, &[token as u8 + 1; 300]);
        }
        near.post(4, READ, &[0; 600]);
        near.post(5, ADD, &[0; 8]);
        let sent = near.take_all();
        prop_assert_eq!(sent.len(), 10);
        for (n, bytes) in sent.iter().enumerate() {
            if n != lost {
                far.give(bytes);
                far.give(bytes);
            }
        }
        // The NAK, then everything from the lost packet on.
        let said = far.take_all();
        let aeth = said.last().map(|p| (psn(p), p[12]));
        prop_assert_eq!(aeth, Some((Psn::new(ours).add(lost as u32).get(), 0x60)));
        for bytes in &said {
            near.give(bytes);
        }
        let again = near.take_all();
        prop_assert_eq!(again.len(), 10 - lost);
        for bytes in &again {
            far.give(bytes);
        }
        for bytes in &far.take_all() {
            near.give(bytes);
        }
        let last = near.events().pop();
        prop_assert_eq!(last, Some(Event::Done { through: 5 }));
        // The first word may be what the atomic left: only a fence would order it after the READ.
        prop_assert_eq!(&near.host.local[&4][8..300], &[4; 292][..]);
        prop_assert_eq!(far.host.executed.len(), 1);
        prop_assert!(near.connection.is_idle() && far.connection.is_idle());
    }
}
