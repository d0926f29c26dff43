//! Is it a change, or noise?
//!
//! A figure was measured several times on each side. It has changed if the two sides' repetitions do not overlap at all, and if their
//! medians are further apart than [`FACTOR`] standard deviations of a single measurement of both sides. The deviation is taken of the
//! logarithms, since noise is a share of what is measured; and a figure whose few repetitions happen to agree is taken to be as noisy as
//! its file's figures of that kind are in the middle.

use serde::Serialize;

use super::Change;
use super::sets::{Figure, Metric};
use crate::sweep::results::{Spread, median};

/// Deviations beyond which a change is no chance.
const FACTOR: f64 = 3.0;

/// What became of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    Worse,
    Better,
    /// Not further apart than noise.
    Same,
    /// One side has a single measurement, and so no noise to compare with, or none.
    Unknown,
    /// It was measured before, and failed after: no change of a figure.
    Failed,
}

/// Knows how noisy figures are in general.
pub(super) struct Judge {
    before: Usual,
    after: Usual,
}

/// The middle deviation of a file's figures, for each metric.
struct Usual(Vec<(Metric, f64)>);

impl Usual {
    fn of(figures: &[Figure]) -> Self {
        let mut usual = Vec::new();
        for metric in Metric::ALL {
            let mut all: Vec<f64> = figures
                .iter()
                .filter(|f| f.metric == metric)
                .filter_map(|f| deviation(&f.values))
                .collect();
            all.sort_by(f64::total_cmp);
            if let Some(middle) = median(&all) {
                usual.push((metric, middle));
            }
        }
        Self(usual)
    }

    /// The deviation of a figure: its own, if that is not less than usual.
    fn deviation(&self, figure: &Figure) -> Option<f64> {
        let own = deviation(&figure.values)?;
        let usual = self.0.iter().find(|(metric, _)| *metric == figure.metric);
        Some(own.max(usual.map_or(0.0, |(_, middle)| *middle)))
    }
}

/// Standard deviation of the logarithms; of a single measurement there is none.
fn deviation(values: &[f64]) -> Option<f64> {
    let logs: Vec<f64> = values
        .iter()
        .filter(|v| **v > 0.0)
        .map(|v| v.ln())
        .collect();
    if logs.len() < 2 {
        return None;
    }
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    let squares: f64 = logs.iter().map(|v| (v - mean).powi(2)).sum();
    Some((squares / (logs.len() - 1) as f64).sqrt())
}

impl Judge {
    pub(super) fn new(before: &[Figure], after: &[Figure]) -> Self {
        Self {
            before: Usual::of(before),
            after: Usual::of(after),
        }
    }

    /// What became of `before`.
    pub(super) fn change(&self, before: &Figure, after: &Figure) -> Change {
        let spread = |f: &Figure| Spread::of(f.values.iter().copied());
        let (a, b) = (spread(before), spread(after));
        let ratio = match (a, b) {
            (Some(a), Some(b)) if a.median > 0.0 && b.median > 0.0 => Some(b.median / a.median),
            _ => None,
        };
        let noise = match (self.before.deviation(before), self.after.deviation(after)) {
            (Some(x), Some(y)) => Some(x.hypot(y)),
            _ => None,
        };
        let verdict = match (a, b, ratio, noise) {
            (Some(_), None, ..) if after.failed => Verdict::Failed,
            (Some(a), Some(b), Some(ratio), Some(noise)) => {
                let apart = a.max < b.min || b.max < a.min;
                let higher = ratio > 1.0;
                match (
                    apart && ratio.ln().abs() > FACTOR * noise,
                    before.metric.more_is_better() == higher,
                ) {
                    (false, _) => Verdict::Same,
                    (true, true) => Verdict::Better,
                    (true, false) => Verdict::Worse,
                }
            }
            _ => Verdict::Unknown,
        };
        Change {
            what: before.what.clone(),
            metric: before.metric.name(),
            before: a,
            after: b,
            repetitions: [before.values.len(), after.values.len()],
            ratio,
            noise,
            verdict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(metric: Metric, values: &[f64]) -> Figure {
        Figure {
            key: "k".into(),
            what: "w".into(),
            metric,
            values: values.to_vec(),
            failed: values.is_empty(),
        }
    }

    fn verdict(metric: Metric, a: &[f64], b: &[f64]) -> Verdict {
        let (a, b) = (figure(metric, a), figure(metric, b));
        Judge::new(std::slice::from_ref(&a), std::slice::from_ref(&b))
            .change(&a, &b)
            .verdict
    }

    #[test]
    fn the_same_noise_is_no_change_and_a_step_is_one() {
        let before = [100.0, 103.0, 98.0];
        assert_eq!(
            verdict(Metric::Rate, &before, &[101.0, 97.0, 104.0]),
            Verdict::Same
        );
        assert_eq!(
            verdict(Metric::Rate, &before, &[50.0, 51.0, 49.0]),
            Verdict::Worse
        );
        assert_eq!(
            verdict(Metric::Rate, &before, &[150.0, 151.0, 149.0]),
            Verdict::Better
        );
        // Of latencies, less is better.
        assert_eq!(
            verdict(Metric::P50, &before, &[50.0, 51.0, 49.0]),
            Verdict::Better
        );
        // Overlapping: never a change, however far apart the medians are.
        assert_eq!(
            verdict(Metric::Rate, &before, &[10.0, 11.0, 99.0]),
            Verdict::Same
        );
        // A wide spread needs a wide step.
        assert_eq!(
            verdict(Metric::Rate, &[100.0, 200.0, 150.0], &[70.0, 40.0, 90.0]),
            Verdict::Same
        );
    }

    #[test]
    fn a_single_measurement_says_nothing_and_a_failure_does() {
        assert_eq!(verdict(Metric::Rate, &[100.0], &[1.0]), Verdict::Unknown);
        assert_eq!(verdict(Metric::Rate, &[100.0, 101.0], &[]), Verdict::Failed);
        assert_eq!(
            verdict(Metric::Rate, &[], &[100.0, 101.0]),
            Verdict::Unknown
        );
        assert_eq!(verdict(Metric::Rate, &[], &[]), Verdict::Unknown);
    }

    #[test]
    fn repetitions_that_agree_by_chance_do_not_make_a_change() {
        // Everything else in the file scatters by ten per cent.
        let noisy = |shift: f64| -> Vec<Figure> {
            (0..9)
                .map(|_| figure(Metric::Rate, &[100.0 * shift, 110.0 * shift, 90.0 * shift]))
                .collect()
        };
        let (mut a, mut b) = (noisy(1.0), noisy(1.0));
        a.push(figure(Metric::Rate, &[100.0, 100.1, 100.2]));
        b.push(figure(Metric::Rate, &[95.0, 95.1, 95.2]));
        let judge = Judge::new(&a, &b);
        assert_eq!(judge.change(&a[9], &b[9]).verdict, Verdict::Same);
    }

    /// Two runs of one machine, thousands of times: how often is noise taken for a change?
    #[test]
    fn noise_is_seldom_taken_for_a_change() {
        use rand::{Rng, SeedableRng};
        let mut random = rand::rngs::StdRng::seed_from_u64(7);
        for (repetitions, per_mille) in [(3, 10), (7, 2)] {
            let mut draw = |n: usize| -> Vec<Figure> {
                (0..n)
                    .map(|_| {
                        let values: Vec<f64> = (0..repetitions)
                            .map(|_| {
                                // A sum of uniform numbers is near enough to a bell.
                                let bell: f64 =
                                    (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
                                (0.05 * bell).exp()
                            })
                            .collect();
                        figure(Metric::Rate, &values)
                    })
                    .collect()
            };
            let (a, b) = (draw(4000), draw(4000));
            let judge = Judge::new(&a, &b);
            let wrong = a
                .iter()
                .zip(&b)
                .filter(|(a, b)| judge.change(a, b).verdict != Verdict::Same)
                .count();
            assert!(
                wrong <= 4 * per_mille,
                "{wrong} of 4000 with {repetitions} repetitions"
            );
        }
    }
}
