//! Latencies of a process in few columns.

use doorbell::report::{ProcessReport, quantile};

/// What the recorder's clock does not tell apart, nanoseconds.
const STEP_NS: f64 = 1000.0;

/// Of all devices of a process: nanoseconds, and how many requests of the latest second took as long.
pub(super) fn of(report: &ProcessReport) -> Vec<(u64, u64)> {
    let all = report.devices.iter().flat_map(|d| &d.latencies);
    let mut all: Vec<(u64, u64)> = all.copied().collect();
    all.sort_unstable();
    all
}

/// A quantile in six columns.
pub(super) fn words(latencies: &[(u64, u64)], share: f64) -> String {
    let Some(ns) = quantile(latencies, share) else {
        return "-".to_owned();
    };
    let short = |v: f64| match v {
        v if v < 9.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    };
    match ns as f64 {
        ns if ns < STEP_NS => "<1 µs".to_owned(),
        ns if ns < 999_500.0 => format!("{} µs", short(ns / 1e3)),
        ns if ns < 999_500_000.0 => format!("{} ms", short(ns / 1e6)),
        ns => format!("{} s", short(ns / 1e9)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_columns_are_enough() {
        for (ns, text) in [
            (0, "<1 µs"),
            (1000, "1.0 µs"),
            (23_400, "23 µs"),
            (999_499, "999 µs"),
            (1_200_000, "1.2 ms"),
            (3_000_000_000, "3.0 s"),
        ] {
            assert_eq!(words(&[(ns, 1)], 0.5), text);
            assert!(words(&[(ns, 1)], 0.5).chars().count() <= 6);
        }
        assert_eq!(words(&[], 0.5), "-");
    }
}
