//! Who copies: the copy engine alone, or a kernel too, and how long that stays for more. Decided once, when a GPU is opened; only launches that
//! turn out to wait, under a profiler in the process, change it afterwards ([`super::lane`]). And when single copies are worth a launch.

use std::time::{Duration, Instant};

use super::lane;
use crate::{GpuError, Result};

/// The variable that says it.
const VARIABLE: &str = "DOORBELL_GPU_COPIES";
/// How long the kernel stays for more, in microseconds.
const STAY: &str = "DOORBELL_GPU_COPIES_STAY";
/// In how many channels the driver puts streams, and how many keep ours apart from others': as many as where nobody says anything.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const ENOUGH: u32 = 8;
/// The most that it may be.
const LONGEST: u64 = 10_000;

/// What the variable says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The copy engine, whatever the copies are.
    Engine,
    /// A kernel, wherever it may.
    Kernel,
    /// Whatever is quicker.
    Auto,
}

/// What a kernel is better at, from what `cuda_selfcheck small-copies-rates small-copies-staying-rates` printed on an H200 (bench/results, 2026-11-30-h200-copies and -staying): a launch took
/// 12 to 15 us up to 64 copies of 8 bytes and 18 to 20 us for 256, one that was there 4 to 6 us for one copy of up to 16 KiB and 12 to 17 us for 256 of 8 bytes; the engine 6 to 9 us, 0.4 to 1 us
/// more for each copy after the first, and within one GPU, by way of host memory, about twice that. 256 KiB took a kernel that was there 30 to 39 us, the engine 35 to 102 us in copies of 4 KiB.
/// Beside kernels that poll host memory hosts differ: a copy of 8 bytes took the engine 6 to 7 us on that one and 10 to 16 on another, a kernel that was there 6 to 8 on both.
///
/// Bytes are [weighed](doorbell_kernels::board::CopyJob::weight): a kernel moves what is not aligned alike in smaller pieces.
mod small {
    /// From so many copies on, where none is there; within one GPU one is enough, which is as quick alone, and quicker where others follow.
    pub(super) const COUNT: usize = 8;
    /// Up to so many bytes a copy, on average.
    pub(super) const MEAN: u64 = 4 << 10;
    /// A few in up to so many steps.
    pub(super) const STEPS: usize = 2;
    /// Up to so many bytes in all where a kernel is there: what its threads have under way at a time. A single copy of 16 KiB took it 4 to 6 us and the
    /// engine 7 to 9, one of 32 KiB (by a build that gave it those) 12 to 15 and 7 to 9.
    pub(super) const FEW: u64 = 16 << 10;
    /// Up to so many bytes in all, however they are aligned, where the kernel is wanted wherever it may be.
    pub(super) const MOST: u64 = 256 << 10;
}

/// The copies of a ticket, which go one way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) count: usize,
    /// In so many steps.
    pub(crate) steps: usize,
    /// In all.
    pub(crate) bytes: u64,
    /// The same, weighed.
    pub(crate) weight: u64,
    /// Some have both ends in one GPU.
    pub(crate) within: bool,
}

impl Policy {
    /// Is a kernel to make these copies? `there`: one is there, or will be wanted again so soon that its launch pays.
    pub(crate) fn takes(self, kind: Kind, there: bool) -> bool {
        let mean = small::MEAN * kind.count as u64;
        // A step takes a kernel several trips over PCIe, so a few copies one behind the other are not its own.
        let there = there && kind.steps <= small::STEPS;
        let (least, size, most) = match (self, there) {
            (Self::Engine, _) => return false,
            (Self::Kernel, _) => (1, kind.bytes, small::MOST),
            (Self::Auto, true) => (1, kind.weight, mean.max(small::FEW)),
            (Self::Auto, false) if kind.within => (1, kind.weight, mean),
            (Self::Auto, false) => (small::COUNT, kind.weight, mean),
        };
        kind.count >= least && (1..=most).contains(&size)
    }

    /// From the environment, with a sentence about why it is not what was asked for, or what one would expect.
    pub(crate) fn of_environment() -> Result<(Self, Option<String>)> {
        Self::of(variable)
    }

    fn of(var: impl Fn(&str) -> Option<String>) -> Result<(Self, Option<String>)> {
        let asked = match var(VARIABLE).as_deref().map(str::trim) {
            None | Some("" | "auto") => Self::Auto,
            Some("engine") => {
                let note = format!("{VARIABLE}=engine: small copies by the copy engine too");
                return Ok((Self::Engine, Some(note)));
            }
            Some("kernel") => Self::Kernel,
            Some(value) => {
                return Err(GpuError::BadSetting {
                    name: VARIABLE,
                    value: value.to_owned(),
                    known: "auto, engine or kernel",
                });
            }
        };
        // A launch that waits for its kernel waits for the kernels before it, and those may wait for our copies.
        let blocking = var("CUDA_LAUNCH_BLOCKING").is_some_and(|v| !matches!(v.trim(), "" | "0"));
        if blocking {
            let note =
                "small copies by the copy engine, since CUDA_LAUNCH_BLOCKING makes launches wait";
            return Ok((Self::Engine, Some(note.to_owned())));
        }
        // Profilers and sanitizers let kernels run one at a time.
        const INJECTED: &str = "CUDA_INJECTION64_PATH";
        if asked == Self::Auto && var(INJECTED).is_some_and(|v| !v.trim().is_empty()) {
            let note = format!(
                "small copies by the copy engine, since {INJECTED} is set and a tool may hold launches back; {VARIABLE}=kernel overrules"
            );
            return Ok((Self::Engine, Some(note)));
        }
        Ok((asked, None))
    }
}

/// What is no Unicode is no value that anybody knows, and is shown as far as it can be.
fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
}

/// Whether the variables of this crate can be used, whatever GPU there is.
///
/// # Errors
/// [`GpuError::BadSetting`].
pub fn check_variables(lookup: &dyn Fn(&str) -> Option<String>) -> Result<()> {
    Policy::of(lookup)?;
    stay(lookup).map(drop)
}

/// How long the kernel stays after a job, with a sentence about it if it is not what one would expect.
pub(crate) fn stay_of_environment() -> Result<(Duration, Option<String>)> {
    stay(variable)
}

fn stay(var: impl Fn(&str) -> Option<String>) -> Result<(Duration, Option<String>)> {
    let value = var(STAY).unwrap_or_default();
    let text = value.trim();
    if text.is_empty() {
        // Streams that share a channel stand behind the kernel, whoever they belong to.
        let connections = var(CONNECTIONS).and_then(|text| text.trim().parse::<u32>().ok());
        return Ok(match connections {
            Some(few @ ..ENOUGH) => {
                let note = format!(
                    "the kernel for small copies leaves at once, since streams may stand behind it with {CONNECTIONS}={few}; {STAY} overrules"
                );
                (Duration::ZERO, Some(note))
            }
            _ => (lane::STAY, None),
        });
    }
    match text.parse() {
        Ok(us @ 0..=LONGEST) => {
            let note = match us {
                0 => format!("{STAY}=0: the kernel for small copies leaves at once"),
                us => format!("{STAY}={us}: the kernel for small copies stays {us} us for more"),
            };
            Ok((Duration::from_micros(us), Some(note)))
        }
        _ => Err(GpuError::BadSetting {
            name: STAY,
            value,
            known: "microseconds, from 0 (it leaves at once) to 10000",
        }),
    }
}

/// Whether small copies come so closely that a kernel which stays would be there for the next.
#[derive(Debug, Default)]
pub(crate) struct Habit {
    last: Option<Instant>,
    /// How many came in time, one after another.
    in_time: u32,
}

impl Habit {
    /// So many that came in time make a habit.
    const ENOUGH: u32 = 2;
    /// A kernel stays from the end of a job, some time after it was submitted.
    const TRIP: Duration = Duration::from_micros(10);

    /// Small copies come now: is it a habit? A kernel would have stayed for `stay`.
    pub(crate) fn goes_on(&mut self, now: Instant, stay: Duration) -> bool {
        let in_time =
            |last| !stay.is_zero() && now.saturating_duration_since(last) < stay + Self::TRIP;
        self.in_time = match self.last.is_some_and(in_time) {
            true => self.in_time.saturating_add(1),
            false => 0,
        };
        self.last = Some(now);
        self.in_time >= Self::ENOUGH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(set: &[(&str, &str)]) -> Result<(Policy, Option<String>)> {
        let find = |name: &str| set.iter().find(|(n, _)| *n == name);
        Policy::of(|name| find(name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn the_variable_decides_unless_launches_block() {
        assert_eq!(of(&[]).unwrap(), (Policy::Auto, None));
        assert_eq!(of(&[(VARIABLE, "auto")]).unwrap(), (Policy::Auto, None));
        assert_eq!(of(&[(VARIABLE, "kernel")]).unwrap(), (Policy::Kernel, None));
        assert_eq!(of(&[(VARIABLE, " engine ")]).unwrap().0, Policy::Engine);
        let injected = ("CUDA_INJECTION64_PATH", "/opt/tool.so");
        assert_eq!(of(&[injected]).unwrap().0, Policy::Engine);
        assert_eq!(
            of(&[injected, (VARIABLE, "kernel")]).unwrap().0,
            Policy::Kernel
        );
        for value in ["1", "true"] {
            let (policy, note) =
                of(&[(VARIABLE, "kernel"), ("CUDA_LAUNCH_BLOCKING", value)]).unwrap();
            assert_eq!(policy, Policy::Engine);
            assert!(note.unwrap().contains("CUDA_LAUNCH_BLOCKING"));
        }
        assert_eq!(
            of(&[("CUDA_LAUNCH_BLOCKING", "0")]).unwrap().0,
            Policy::Auto
        );
        let error = of(&[(VARIABLE, "gpu")]).unwrap_err().to_string();
        assert!(
            error.contains("DOORBELL_GPU_COPIES") && error.contains("gpu"),
            "{error}"
        );
    }

    #[test]
    fn the_stay_is_microseconds_up_to_ten_thousand() {
        let of =
            |value: Option<&str>| stay(|name| value.filter(|_| name == STAY).map(str::to_owned));
        assert_eq!(of(None).unwrap(), (lane::STAY, None));
        assert_eq!(of(Some(" ")).unwrap(), (lane::STAY, None));
        for (text, us) in [("0", 0), (" 120 ", 120), ("10000", 10_000)] {
            let (stay, note) = of(Some(text)).unwrap();
            assert_eq!(stay, Duration::from_micros(us));
            assert!(note.unwrap().contains(STAY));
        }
        for (connections, own, us) in [
            ("1", None, 0),
            ("7", None, 0),
            ("8", None, 50),
            ("32", None, 50),
            ("1", Some("50"), 50),
            ("x", None, 50),
        ] {
            let var = |name: &str| match name {
                CONNECTIONS => Some(connections.to_owned()),
                _ => own.map(str::to_owned),
            };
            assert_eq!(
                stay(var).unwrap().0,
                Duration::from_micros(us),
                "{connections}"
            );
        }
        for text in ["-1", "10001", "50us", "5.5", "off"] {
            let error = of(Some(text)).unwrap_err().to_string();
            assert!(error.contains(STAY) && error.contains(text), "{error}");
        }
    }

    #[test]
    fn three_in_a_row_are_a_habit() {
        let (mut habit, start) = (Habit::default(), Instant::now());
        let stay = Duration::from_micros(50);
        for (us, goes_on) in [
            (0, false),
            (40, false),
            (99, true),
            (158, true),
            (218, false),
            (240, false),
            (250, true),
        ] {
            assert_eq!(
                habit.goes_on(start + Duration::from_micros(us), stay),
                goes_on,
                "{us}"
            );
        }
        assert!(!habit.goes_on(start, Duration::ZERO));
        assert!(!habit.goes_on(start, Duration::ZERO));
        assert!(!habit.goes_on(start, Duration::ZERO));
    }

    #[test]
    fn what_a_kernel_takes_depends_on_whether_it_is_there() {
        let (few, mean) = (small::FEW, small::MEAN);
        for (count, bytes, within, takes) in [
            (1, 8, false, [false, true]),
            (1, 8, true, [true, true]),
            (7, 56, false, [false, true]),
            (8, 64, false, [true, true]),
            (1, few, false, [false, true]),
            (1, few + 1, false, [false, false]),
            (1, mean + 1, true, [false, true]),
            (100, 100 * mean, false, [true, true]),
            (100, 100 * mean + 1, false, [false, false]),
            (3, 0, true, [false, false]),
        ] {
            let mut kind = Kind {
                count,
                steps: 1,
                bytes,
                weight: bytes,
                within,
            };
            let of = |policy: Policy, kind| [false, true].map(|there| policy.takes(kind, there));
            assert_eq!(of(Policy::Auto, kind), takes, "{kind:?}");
            assert_eq!(of(Policy::Engine, kind), [false; 2]);
            assert_eq!(
                of(Policy::Kernel, kind),
                [(1..=small::MOST).contains(&bytes); 2]
            );
            kind.steps = 3;
            assert_eq!(of(Policy::Auto, kind), [takes[0]; 2], "{kind:?}");
            kind.weight = 101 * mean;
            assert_eq!(of(Policy::Auto, kind), [false; 2]);
        }
    }
}
