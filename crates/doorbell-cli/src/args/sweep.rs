//! The command lines of `sweep` and `compare`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};

use crate::args::{DeviceArgs, Link};
use crate::lists::{self, List};

#[derive(Clone, Debug, Args)]
#[command(after_help = SWEEP)]
pub(crate) struct SweepArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// A short one: fewer points, less than a minute
    #[arg(long)]
    pub(crate) quick: bool,
    /// Folder for results.json and report.html
    /// [default: a new one, doorbell-sweep-DATE-TIME]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Replace a results.json or report.html in that folder that is no sweep's
    #[arg(long)]
    pub(crate) force: bool,
    /// Only these experiments, a list [default: all]
    #[arg(long, value_enum, value_name = "LIST", value_delimiter = ',')]
    pub(crate) only: Vec<Experiment>,
    /// Only these links, a list of loopback, shm, roce [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = link())]
    pub(crate) links: Vec<Link>,
    /// The far side of roce is `doorbell serve` on this host (TCP port 4791 unless given)
    /// [default: a second process here]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = crate::args::far_address)]
    pub(crate) connect: Option<String>,
    /// Sizes of `sizes` and `gets`, a list [default: 8:4M; quick: seven of them]
    #[arg(long, value_name = "LIST", value_parser = lists::sizes)]
    pub(crate) sizes: Option<List>,
    /// Blocks of `blocks`, a list [default: 1:32, GPU 1:128; quick: four of them]
    #[arg(long, value_name = "LIST", value_parser = lists::blocks)]
    pub(crate) blocks: Option<List>,
    /// Times that each point is measured [default: 7; quick: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=100))]
    pub(crate) repeat: Option<u32>,
    /// Seconds of a measurement [default: 0.3; quick: 0.1]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds)]
    pub(crate) secs: Option<Duration>,
    /// A point fails when nothing happens for this many seconds
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "5")]
    pub(crate) timeout: Duration,
    /// Measure nothing: draw the report of this results.json again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "only", "links", "connect", "sizes", "blocks", "repeat", "secs"])]
    pub(crate) redraw: Option<PathBuf>,
}

const SWEEP: &str = "\
Examples:
  doorbell sweep --quick                  everything in small: within a minute
  doorbell sweep --out before             some ten minutes
  doorbell sweep --only sizes --links roce --connect HOST
  doorbell sweep --redraw before/results.json --out before
  doorbell compare before/results.json after/results.json

Open report.html in a browser; it needs no network. SIGINT ends a sweep early:
what was measured by then is written.
Exit status: 0 all was measured, 1 a point failed, 2 wrong arguments,
3 messages were lost or wrong, 130 ended early.";

/// What is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Experiment {
    /// 8-byte puts: rate against blocks, for each initiator
    Blocks,
    /// Puts: rate and bandwidth against size, over each link
    Sizes,
    /// Gets: the same
    Gets,
    /// Latency and its distribution, over each link
    Latency,
    /// 8-byte puts: rate against queue pairs that are open, one of them posted to
    Queues,
}

/// Links that a sweep measures, all of them where nobody chose some.
pub(crate) const SWEEP_LINKS: [Link; 3] = [Link::Loopback, Link::Shm, Link::Roce];

fn link() -> impl TypedValueParser<Value = Link> {
    let names = SWEEP_LINKS.iter().filter_map(Link::to_possible_value);
    PossibleValuesParser::new(names).try_map(|name| Link::from_str(&name, false))
}

impl Experiment {
    pub(crate) const ALL: [Self; 5] = [
        Self::Blocks,
        Self::Sizes,
        Self::Gets,
        Self::Latency,
        Self::Queues,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::Sizes => "sizes",
            Self::Gets => "gets",
            Self::Latency => "latency",
            Self::Queues => "queues",
        }
    }
}

#[derive(Clone, Debug, Args)]
#[command(after_help = COMPARE)]
pub(crate) struct CompareArgs {
    /// results.json of `doorbell sweep`, or a file of `doorbell perf --json`: before
    pub(crate) before: PathBuf,
    /// The same, after
    pub(crate) after: PathBuf,
    /// One JSON object on standard output instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Also list what did not change
    #[arg(long)]
    pub(crate) all: bool,
    /// Compare although the machines differ
    #[arg(long)]
    pub(crate) other_machine: bool,
}

const COMPARE: &str = "\
Examples:
  doorbell compare before/results.json after/results.json
  doorbell compare a.json b.json --json | jq '.figures[] | select(.ratio<0.9)'
  doorbell perf put-bw --size 8,8,8 --json a.json    measures one case thrice

A change counts when the repetitions of both sides do not overlap and their
medians are further apart than three times the noise of both (sweep.md).
Exit status: 0 nothing got worse, 1 something did or failed, 2 wrong
arguments, 3 the files cannot be compared.";
