//! Times in words: a moment of the monotonic clock as wall-clock time, and how long ago.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// `3.2 s`, `45.0 ms`, `7.1 µs`.
pub fn span(ns: u64) -> String {
    match ns {
        0..1000 => format!("{ns} ns"),
        1000..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        1_000_000_000..100_000_000_000 => format!("{:.1} s", ns as f64 / 1e9),
        _ => format!("{} s", ns / 1_000_000_000),
    }
}

/// `08:59:01.123456 UTC, 3.2 s ago`.
pub fn moment(at_ns: u64) -> String {
    let ago = doorbell_hca::record::now_ns().saturating_sub(at_ns);
    format!("{}, {} ago", clock(ago), span(ago))
}

/// The time of day so many nanoseconds ago, UTC.
fn clock(ago: u64) -> String {
    let then = SystemTime::now()
        .checked_sub(Duration::from_nanos(ago))
        .and_then(|t| t.duration_since(UNIX_EPOCH).ok())
        .unwrap_or_default();
    let day = then.as_secs() % 86_400;
    format!(
        "{:02}:{:02}:{:02}.{:06} UTC",
        day / 3600,
        day / 60 % 60,
        day % 60,
        then.subsec_micros()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_at_a_glance() {
        for (ns, text) in [
            (7, "7 ns"),
            (12_345, "12.3 µs"),
            (45_000_000, "45.0 ms"),
            (3_210_000_000, "3.2 s"),
            (u64::MAX, "18446744073 s"),
        ] {
            assert_eq!(span(ns), text);
        }
        let text = moment(doorbell_hca::record::now_ns());
        assert!(text.contains(" UTC, ") && text.ends_with(" ago"), "{text}");
    }
}
