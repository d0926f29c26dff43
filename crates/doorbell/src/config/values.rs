//! The values of settings that have a type of their own, as they are written and read.

use std::fmt;
use std::str::FromStr;

/// Who runs the software HCA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HcaCores {
    /// This many engine threads; queue pairs are spread over them.
    Threads(u32),
    /// Nobody of its own: whoever waits (a kernel thread of the host GPU, [`crate::Launch::wait`],
    /// [`crate::Device::poll`]) runs the engine. For machines with few cores.
    Caller,
}

impl FromStr for HcaCores {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "caller" | "0" => Ok(Self::Caller),
            _ => match text.parse() {
                Ok(n @ 1..=64) => Ok(Self::Threads(n)),
                _ => Err("give a number of threads from 1 to 64, or `caller` (or 0)".to_owned()),
            },
        }
    }
}

impl fmt::Display for HcaCores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Threads(n) => write!(f, "{n}"),
            Self::Caller => f.write_str("caller"),
        }
    }
}

/// What the engine does for foreign device code (which cannot be told of errors) when a QP fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Error CQEs, and nothing else: loops that ignore errors spin until they are aborted.
    #[default]
    Report,
    /// Raise the host error first, then let the kernel drain. What it drains is not data.
    Release,
}

impl FromStr for OnError {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "report" => Ok(Self::Report),
            "release" => Ok(Self::Release),
            _ => Err("give `report` or `release`".to_owned()),
        }
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Report => "report",
            Self::Release => "release",
        })
    }
}

/// What the flight recorder keeps of each queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorder {
    /// Nothing.
    Off,
    /// So many of the latest events, a power of two from 32 to 1048576, in a file that survives the process.
    On(u32),
}

impl Recorder {
    /// The usual size of its rings.
    pub const EVENTS: u32 = 1 << doorbell_hca::record::Recording::LOG_EVENTS;
    /// Their size when a trace is asked for.
    pub const TRACE: u32 = 1 << 13;
}

impl FromStr for Recorder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse::<u32>()) {
            ("off", _) => Ok(Self::Off),
            ("on", _) => Ok(Self::On(Self::EVENTS)),
            (_, Ok(n)) if n.is_power_of_two() && (32..=1 << 20).contains(&n) => Ok(Self::On(n)),
            _ => Err(
                "give on, off, or how many events to keep of a queue pair: a power of two from 32 to 1048576".to_owned(),
            ),
        }
    }
}

impl fmt::Display for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::On(Self::EVENTS) => f.write_str("on"),
            Self::On(n) => write!(f, "{n}"),
        }
    }
}

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The program said so.
    Argument,
    /// The environment variable said so.
    Variable,
    /// Nobody said anything.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Argument => "argument",
            Self::Variable => "environment",
            Self::Default => "default",
        })
    }
}
