//! Which faults to inject, as text: `loss=1%,dup=0.5%,reorder=1%,delay=1ms..5ms,corrupt=0.1%,seed=7`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use crate::error::PortError;

/// Which faults to inject. Chances are between 0 and 1, and for each packet, each fault and each direction by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultSpec {
    /// Chance that a packet is lost.
    pub loss: f64,
    /// Chance that a packet comes twice.
    pub duplicate: f64,
    /// Chance that a packet is overtaken by later ones.
    pub reorder: f64,
    /// Chance that a packet is damaged, which its ICRC shows.
    pub corrupt: f64,
    /// Every packet is late by a time out of this range.
    pub delay: Option<RangeInclusive<Duration>>,
    /// What is sent suffers.
    pub sending: bool,
    /// What is received suffers.
    pub receiving: bool,
    /// Start of the random numbers: the same seed and the same packets give the same faults.
    pub seed: u64,
}

impl Default for FaultSpec {
    fn default() -> Self {
        Self {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay: None,
            sending: true,
            receiving: true,
            seed: 1,
        }
    }
}

/// Reads `1%` or `0.01`.
fn chance(text: &str) -> Option<f64> {
    let value = match text.strip_suffix('%') {
        Some(percent) => percent.parse::<f64>().ok()? / 100.0,
        None => text.parse().ok()?,
    };
    (0.0..=1.0).contains(&value).then_some(value)
}

/// Reads `5ms`, `20us`, `1s`.
fn time(text: &str) -> Option<Duration> {
    let at = text.find(|c: char| c.is_ascii_alphabetic())?;
    let nanoseconds = match &text[at..] {
        "s" => 1e9,
        "ms" => 1e6,
        "us" => 1e3,
        "ns" => 1.0,
        _ => return None,
    };
    let value: f64 = text[..at].parse().ok()?;
    (0.0..=3600e9)
        .contains(&(value * nanoseconds))
        .then(|| Duration::from_nanos((value * nanoseconds) as u64))
}

impl FromStr for FaultSpec {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        let mut spec = Self::default();
        if text.is_empty() {
            return Err(PortError::BadConfig {
                text: String::new(),
                what: "it names no fault: give some, as in loss=1%,dup=1%,seed=7".to_owned(),
            });
        }
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let bad = |want: &str| PortError::BadConfig {
                text: text.to_owned(),
                what: format!("fault {part:?} is not {want}"),
            };
            let (name, value) = part.split_once('=').ok_or_else(|| bad("NAME=VALUE"))?;
            let percent = || chance(value).ok_or_else(|| bad("a chance such as 1% or 0.01"));
            match name {
                "loss" => spec.loss = percent()?,
                "dup" => spec.duplicate = percent()?,
                "reorder" => spec.reorder = percent()?,
                "corrupt" => spec.corrupt = percent()?,
                "delay" => {
                    let (from, to) = value.split_once("..").unwrap_or((value, value));
                    let range = time(from).zip(time(to)).filter(|(from, to)| from <= to);
                    let (from, to) =
                        range.ok_or_else(|| bad("a time or range such as 1ms..5ms"))?;
                    spec.delay = Some(from..=to);
                }
                "dir" => {
                    (spec.sending, spec.receiving) = match value {
                        "out" => (true, false),
                        "in" => (false, true),
                        "both" => (true, true),
                        _ => return Err(bad("in, out or both")),
                    };
                }
                "seed" => spec.seed = value.parse().map_err(|_| bad("a whole number"))?,
                _ => return Err(bad("one of loss, dup, reorder, delay, corrupt, dir, seed")),
            }
        }
        Ok(spec)
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, chance) in [
            ("loss", self.loss),
            ("dup", self.duplicate),
            ("reorder", self.reorder),
            ("corrupt", self.corrupt),
        ] {
            if chance != 0.0 {
                write!(f, "{name}={chance},")?;
            }
        }
        if let Some(delay) = &self.delay {
            let (from, to) = (delay.start().as_nanos(), delay.end().as_nanos());
            write!(f, "delay={from}ns..{to}ns,")?;
        }
        match (self.sending, self.receiving) {
            (true, false) => write!(f, "dir=out,")?,
            (false, true) => write!(f, "dir=in,")?,
            _ => {}
        }
        write!(f, "seed={}", self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_values() {
        let spec: FaultSpec =
            "loss=1%,dup=0.5%,reorder=0.01,delay=1ms..5ms,corrupt=0.1%,dir=out,seed=7"
                .parse()
                .unwrap();
        assert_eq!(spec.loss, 0.01);
        assert_eq!(spec.duplicate, 0.005);
        assert_eq!(
            spec.delay,
            Some(Duration::from_millis(1)..=Duration::from_millis(5))
        );
        assert!(spec.sending && !spec.receiving && spec.seed == 7);
        assert_eq!(spec.to_string().parse::<FaultSpec>().unwrap(), spec);
        assert!("".parse::<FaultSpec>().is_err(), "nothing is not a fault");
        for wrong in [
            "loss",
            "loss=2",
            "loss=-1%",
            "loss=x",
            "delay=5",
            "delay=5ms..1ms",
            "delay=-1s",
            "dir=up",
            "seed=x",
            "jitter=1",
        ] {
            let error = wrong.parse::<FaultSpec>().unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
