//! How long requests took in the engine, from what its flight recorder kept: from the doorbell that announced a slot to its completion.
//!
//! The recorder keeps the latest events of each queue pair, and reads its clock about once a microsecond of work; what took less has both
//! ends at one time and counts as 0. So these are samples, good for what goes over a network or through a copy engine, and an upper
//! bound for the rest.

use super::{EventReport, QpReport};

/// How far back completions count.
const WINDOW_NS: u64 = 1_000_000_000;

/// Nanoseconds that requests took which completed in the second before `now_ns`, and how many took as long; in order, and rounded down to
/// four binary digits, so that there are few.
pub(super) fn of(qps: &[QpReport], now_ns: u64) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for qp in qps {
        add(&qp.events, now_ns.saturating_sub(WINDOW_NS), &mut all);
    }
    for (took, _) in &mut all {
        *took = rounded(*took);
    }
    all.sort_unstable();
    all.dedup_by(|next, before| {
        let same = next.0 == before.0;
        if same {
            before.1 += next.1;
        }
        same
    });
    all
}

fn add(events: &[EventReport], since_ns: u64, all: &mut Vec<(u64, u64)>) {
    for (i, done) in events.iter().enumerate() {
        if done.at_ns < since_ns {
            continue;
        }
        match done.kind.as_str() {
            "done" => all.push((0, done.slots.into())),
            "executed" | "completed" => {
                // A completion may end what several doorbells announced.
                for rung in events[..i].iter().filter(|e| e.kind == "rung") {
                    let from = rung.from.max(done.from);
                    let slots = end(rung).min(end(done)).saturating_sub(from);
                    if slots > 0 {
                        all.push((done.at_ns.saturating_sub(rung.at_ns), slots));
                    }
                }
            }
            _ => {}
        }
    }
}

fn end(event: &EventReport) -> u64 {
    event.from.saturating_add(event.slots.into())
}

fn rounded(ns: u64) -> u64 {
    let digits = 64 - ns.leading_zeros();
    let drop = digits.saturating_sub(4);
    ns >> drop << drop
}

/// What `share` (0 to 1) of these requests did not exceed, nanoseconds; nothing of none.
pub fn quantile(latencies: &[(u64, u64)], share: f64) -> Option<u64> {
    let all: u64 = latencies.iter().map(|(_, slots)| slots).sum();
    let wanted = ((share * all as f64).ceil() as u64).max(1);
    let mut seen = 0u64;
    latencies
        .iter()
        .find(|(_, slots)| {
            seen = seen.saturating_add(*slots);
            seen >= wanted
        })
        .map(|(took, _)| *took)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(at_ns: u64, kind: &str, from: u64, slots: u32) -> EventReport {
        EventReport {
            at_ns,
            kind: kind.into(),
            from,
            slots,
            value: 0,
        }
    }

    #[test]
    fn a_completion_is_matched_with_the_doorbells_that_announced_it() {
        let events = [
            event(1000, "rung", 0, 4),
            event(3000, "rung", 4, 4),
            event(4000, "issued", 0, 8),
            event(9000, "completed", 0, 6),
        ];
        let mut all = Vec::new();
        add(&events, 0, &mut all);
        all.sort_unstable();
        assert_eq!(all, [(6000, 2), (8000, 4)]);
        assert_eq!(quantile(&all, 0.5), Some(8000));
        assert_eq!(quantile(&all, 0.3), Some(6000));
        assert_eq!(quantile(&[], 0.5), None);
        let mut later = Vec::new();
        add(&events, 9001, &mut later);
        assert_eq!(later, [], "too long ago");
    }

    #[test]
    fn what_took_less_than_the_clock_tells_is_zero_and_a_doorbell_that_is_forgotten_no_sample() {
        let mut all = Vec::new();
        add(
            &[event(5000, "done", 0, 90), event(6000, "executed", 90, 10)],
            0,
            &mut all,
        );
        assert_eq!(all, [(0, 90)]);
    }

    #[test]
    fn rounding_keeps_four_digits_and_order() {
        assert_eq!(
            [0, 1, 15, 16, 1000, 12_345].map(rounded),
            [0, 1, 15, 16, 960, 12_288]
        );
        let mut last = 0;
        for ns in 0..5000 {
            assert!(rounded(ns) >= last && rounded(ns) <= ns);
            last = rounded(ns);
        }
    }
}
