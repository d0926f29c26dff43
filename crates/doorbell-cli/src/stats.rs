//! Latency figures from exact samples: minimum, median, 99th percentile, maximum.
//! All samples are kept and sorted (a run has at most some millions), so no figure is rounded
//! to a bucket. Percentiles are nearest-rank: a value that was really measured.

use crate::schema::Latency;

/// Sorts `samples` and summarises them; `None` when there are none.
pub(crate) fn summarise(samples: &mut [u64]) -> Option<Latency> {
    samples.sort_unstable();
    let (&min, &max) = (samples.first()?, samples.last()?);
    Some(Latency {
        min,
        p50: rank(samples, 50.0),
        p99: rank(samples, 99.0),
        max,
    })
}

/// Where a distribution is looked at: close together in its tail, which a few samples make up.
pub(crate) const PERCENTILES: [f64; 20] = [
    0.0, 1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 98.0, 99.0, 99.5,
    99.8, 99.9, 99.95, 99.99,
];

/// Sorted samples at each of [`PERCENTILES`]; nothing if there are none.
pub(crate) fn percentiles(sorted: &[u64]) -> Vec<u64> {
    if sorted.is_empty() {
        return Vec::new();
    }
    PERCENTILES.iter().map(|p| rank(sorted, *p)).collect()
}

/// Nearest rank in sorted, non-empty samples.
fn rank(sorted: &[u64], percent: f64) -> u64 {
    let at = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted[at.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_ranks() {
        let mut samples: Vec<u64> = (1..=100).rev().collect();
        let latency = summarise(&mut samples).unwrap();
        assert_eq!(
            (latency.min, latency.p50, latency.p99, latency.max),
            (1, 50, 99, 100)
        );
        let one = summarise(&mut [7]).unwrap();
        assert_eq!((one.min, one.p50, one.p99, one.max), (7, 7, 7, 7));
        assert!(summarise(&mut []).is_none());
        let all = percentiles(&samples);
        assert_eq!(all.len(), PERCENTILES.len());
        assert_eq!((all[0], all[7], all[19]), (1, 50, 100));
        assert!(percentiles(&[]).is_empty());
    }
}
