//! `advance16` over all steps, and a producer that wraps many times under late and repeated rings.
//!
//! The rule (DESIGN): 1 to depth is accepted, 0 and anything from 2^15 up ignored, the rest is an error of the QP.
//! Restated here with wider integers, so that a slip in the 16-bit arithmetic shows.

use doorbell_wire::db::{Advance, MAX_DEPTH, advance16, advance64};

fn rule(step: u32, depth: u32) -> Advance {
    match step {
        0 => Advance::None,
        s if s <= depth => Advance::Slots(s as u16),
        s if s >= 32768 => Advance::None,
        _ => Advance::Jump,
    }
}

#[test]
fn every_step_from_every_kind_of_place() {
    let depths = (0..=15).map(|log| 1u32 << log).chain([3, 100, 32767]);
    for depth in depths {
        for seen in [0u32, 1, 2, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff] {
            for step in 0..=0xffffu32 {
                let new = ((seen + step) % 65536) as u16;
                assert_eq!(
                    advance16(new, seen as u16, depth),
                    rule(step, depth),
                    "seen {seen} step {step} depth {depth}"
                );
            }
        }
    }
}

#[test]
fn every_pair_at_one_depth() {
    for seen in 0..=u16::MAX {
        // All steps near the edges of the rule, from every index: this is where wrapping could go wrong.
        for step in [1u16, 1023, 1024, 1025, 0x7fff, 0x8000, 0x8001, 0xffff, 0] {
            assert_eq!(
                advance16(seen.wrapping_add(step), seen, 1024),
                rule(step.into(), 1024)
            );
        }
    }
}

#[test]
fn deeper_than_the_limit_is_not_believed() {
    assert_eq!(advance16(0x8000, 0, MAX_DEPTH), Advance::Slots(0x8000));
    assert_eq!(advance16(0x8001, 0, u32::MAX), Advance::None);
    assert_eq!(advance64(1 << 15, 0, u32::MAX), Advance::Slots(1 << 15));
    assert_eq!(advance64((1 << 15) + 1, 0, u32::MAX), Advance::Jump);
}

#[test]
fn producer_words_compare_as_numbers() {
    for seen in [0u64, 1, 0xffff, 0x1_0000, u64::MAX - 2000] {
        assert_eq!(advance64(seen, seen, 1024), Advance::None);
        assert_eq!(advance64(seen + 1, seen, 1024), Advance::Slots(1));
        assert_eq!(advance64(seen + 1024, seen, 1024), Advance::Slots(1024));
        assert_eq!(advance64(seen + 1025, seen, 1024), Advance::Jump);
    }
    assert_eq!(advance64(0, u64::MAX, 1024), Advance::None);
    assert_eq!(advance64(u64::MAX, 0, 1024), Advance::Jump);
    // A step that is a multiple of 2^16 is invisible to 16 bits, not to 64.
    assert_eq!(advance64(0x1_0000, 0, 1024), Advance::Jump);
}

#[test]
fn a_wrapping_producer_loses_and_doubles_nothing() {
    const DEPTH: u64 = 256;
    let (mut rung, mut seen, mut executed, mut random) = (0u64, 0u64, 0u64, 12345u64);
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    while rung < 10 * 65536 {
        let room = DEPTH - (rung - seen);
        rung += next() % (room + 1);
        // What the engine reads: the newest ring, or one that was overtaken up to a depth ago.
        let late = if next() % 4 == 0 { next() % DEPTH } else { 0 };
        let read = rung.saturating_sub(late);
        match advance16(read as u16, seen as u16, DEPTH as u32) {
            Advance::Slots(n) => {
                executed += u64::from(n);
                seen += u64::from(n);
                assert_eq!(seen, read);
            }
            Advance::None => assert!(read <= seen),
            Advance::Jump => panic!("no jump was rung: read {read}, seen {seen}"),
        }
    }
    assert_eq!(executed, seen);
    assert!(rung - seen <= DEPTH);
}
