//! Axes: from values to places along an axis, and where its ticks are.

/// How values are laid out along an axis.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scale {
    /// Even, from zero.
    Linear { max: f64 },
    /// Each step the same factor.
    Log { min: f64, max: f64 },
    /// The same, with ticks at these values only (powers of two look odd at powers of ten).
    LogAt { at: Vec<f64> },
    /// Percentiles, stretched towards 100: each nine as wide as the one before.
    Nines { max: f64 },
}

/// A tick: where, and whether it bears its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tick {
    pub(crate) value: f64,
    pub(crate) labelled: bool,
}

/// Beyond this ratio of the largest value to the smallest, an even axis would hide the small ones.
const EVEN: f64 = 12.0;

impl Scale {
    /// For these values: even if they are close together, else logarithmic. `None` without a positive value.
    pub(crate) fn fit(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut range: Option<(f64, f64)> = None;
        for v in values {
            if v.is_finite() && v > 0.0 {
                let (low, high) = range.unwrap_or((v, v));
                range = Some((low.min(v), high.max(v)));
            }
        }
        let (low, high) = range?;
        Some(if high / low <= EVEN {
            Self::Linear { max: high * 1.06 }
        } else {
            Self::Log {
                min: low / 1.25,
                max: high * 1.25,
            }
        })
    }

    /// Ticks at the values themselves, thinned until they fit.
    pub(crate) fn at(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut at: Vec<f64> = values.into_iter().filter(|v| *v > 0.0).collect();
        at.sort_by(f64::total_cmp);
        at.dedup();
        (!at.is_empty()).then_some(Self::LogAt { at })
    }

    /// Where a value lies: 0 at the low end, 1 at the high one.
    pub(crate) fn place(&self, value: f64) -> f64 {
        let log = |min: f64, max: f64| match max > min {
            true => ((value.max(min * 1e-3)).ln() - min.ln()) / (max.ln() - min.ln()),
            false => 0.5,
        };
        match self {
            Self::Linear { max } => value / max,
            Self::Log { min, max } => log(*min, *max),
            Self::LogAt { at } => {
                let (min, max) = (at[0], at[at.len() - 1]);
                // A little air, so that markers at the ends do not sit on the frame.
                0.03 + 0.94 * log(min, max)
            }
            Self::Nines { max } => nines(value) / nines(*max),
        }
    }

    pub(crate) fn ticks(&self) -> Vec<Tick> {
        match self {
            Self::Linear { max } => linear(*max),
            Self::Log { min, max } => decades(*min, *max),
            Self::LogAt { at } => thinned(at),
            Self::Nines { max } => [0.0, 50.0, 90.0, 99.0, 99.9, 99.99]
                .into_iter()
                .filter(|p| p <= max)
                .map(|value| Tick {
                    value,
                    labelled: true,
                })
                .collect(),
        }
    }
}

/// 0 for none, 1 for 90, 2 for 99, 3 for 99.9.
fn nines(percent: f64) -> f64 {
    -(1.0 - percent.clamp(0.0, 99.999_999) / 100.0).log10()
}

/// Four to seven even steps of 1, 2 or 5 times a power of ten.
fn linear(max: f64) -> Vec<Tick> {
    let rough = max / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|step| *step >= rough * 0.8)
        .unwrap_or(10.0 * power);
    (0..)
        .map(|i| f64::from(i) * step)
        .take_while(|v| *v <= max)
        .map(|value| Tick {
            value,
            labelled: true,
        })
        .collect()
}

/// Powers of ten bear their value; of few, also their doubles and fives.
fn decades(min: f64, max: f64) -> Vec<Tick> {
    let (from, to) = (min.log10().floor() as i32, max.log10().ceil() as i32);
    let few = max / min < 200.0;
    let many = to - from > 6;
    let mut ticks = Vec::new();
    for power in from..=to {
        for digit in 1..10 {
            let value = f64::from(digit) * 10f64.powi(power);
            if value < min || value > max || (many && digit > 1) {
                continue;
            }
            let labelled = digit == 1 || (few && (digit == 2 || digit == 5));
            ticks.push(Tick { value, labelled });
        }
    }
    ticks
}

/// At most eight of the values bear theirs, counted from the first in even steps.
fn thinned(at: &[f64]) -> Vec<Tick> {
    let step = at.len().div_ceil(8);
    at.iter()
        .enumerate()
        .map(|(i, &value)| Tick {
            value,
            labelled: i % step == 0,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_values_are_even_from_zero_and_far_ones_logarithmic() {
        assert_eq!(Scale::fit([1.0, 3.0]), Some(Scale::Linear { max: 3.18 }));
        assert!(matches!(Scale::fit([1.0, 300.0]), Some(Scale::Log { .. })));
        assert_eq!(Scale::fit([0.0, f64::NAN]), None);
    }

    #[test]
    fn places_are_inside_and_in_order() {
        let scales = [
            Scale::fit([2.0, 10.0]).unwrap(),
            Scale::fit([2.0, 10_000.0]).unwrap(),
            Scale::at([2.0, 64.0, 10_000.0]).unwrap(),
            Scale::Nines { max: 99.99 },
        ];
        for scale in scales {
            let mut last = -1.0;
            for value in [2.0, 5.0, 9.5] {
                let place = scale.place(value);
                assert!(
                    (0.0..=1.0).contains(&place) && place > last,
                    "{scale:?} {value} {place}"
                );
                last = place;
            }
        }
        let one = Scale::at([8.0]).unwrap();
        assert_eq!(one.place(8.0), 0.03 + 0.94 * 0.5);
    }

    #[test]
    fn ticks_are_round_and_few() {
        for max in [0.003, 1.0, 7.7, 12e6, 99e9] {
            let ticks = linear(max);
            assert!((4..=8).contains(&ticks.len()), "{max}: {ticks:?}");
        }
        let labelled = |scale: Scale| scale.ticks().iter().filter(|t| t.labelled).count();
        assert_eq!(
            labelled(Scale::Log {
                min: 1.0,
                max: 100.0
            }),
            7
        );
        assert_eq!(
            labelled(Scale::Log {
                min: 900.0,
                max: 1.1e6
            }),
            4
        );
        assert!(labelled(Scale::at((3..23).map(|i| f64::from(1 << i))).unwrap()) <= 8);
        assert!((nines(99.0) - 2.0).abs() < 1e-9);
    }
}
