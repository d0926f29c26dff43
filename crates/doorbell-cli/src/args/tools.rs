//! The command lines of the tools that look at what happened: `explain`, `dump`, `stat`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::args::{Known, rules};
use crate::lists;

/// Which process is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whom {
    Process(u32),
    /// Every one of this user.
    All,
}

fn whom(text: &str) -> Result<Whom, String> {
    match (text, text.parse()) {
        ("all", _) => Ok(Whom::All),
        (_, Ok(pid @ 1..)) => Ok(Whom::Process(pid)),
        _ => Err("give a process ID, or all".into()),
    }
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  doorbell dump 4242
  doorbell dump 4242 --trace job.json      open it at https://ui.perfetto.dev
  doorbell dump all --json | jq '.[].devices[].qps[] | select(.stuck)'
A process that runs answers for itself; of one that was killed, crashed or is
stopped its flight record is read (post-mortem). Those of other users answer
only to them and to root.
Exit status: 0 it was shown, 1 there is nothing of it, 2 wrong arguments.")]
pub(crate) struct DumpArgs {
    /// Process ID, dead or alive, or `all` of this user
    #[arg(value_parser = Known(whom, &["all"]), hide_possible_values = true)]
    pub(crate) pid: Whom,
    /// One JSON array on standard output instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// Write what its flight recorder remembers, and those of its peers here, as a trace for ui.perfetto.dev instead
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub(crate) trace: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  doorbell stat                every process of this user, a line a second
  doorbell stat 4242 --count 10
  doorbell stat --prometheus 127.0.0.1:9477
SIGINT ends it.
Exit status: 0 done, 1 there is nothing to look at, 2 wrong arguments.")]
pub(crate) struct StatArgs {
    /// Process ID, or `all` of this user [default: all]
    #[arg(value_parser = Known(whom, &["all"]), hide_possible_values = true)]
    pub(crate) pid: Option<Whom>,
    /// End after so many rounds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Seconds between two looks
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "1")]
    pub(crate) interval: Duration,
    /// Serve metrics over HTTP at this address instead (GET /metrics; port 0 takes a free one)
    #[arg(long, value_name = "ADDR:PORT", conflicts_with_all = ["count", "interval"])]
    pub(crate) prometheus: Option<String>,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = EXPLAIN)]
pub(crate) struct ExplainArgs {
    /// What to run
    pub(crate) operation: Operation,
    /// The mistake of the second run [default: rkey; send, which carries none: lkey]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) bad: Option<Bad>,
    /// Instead of a mistake, a fault that the HCA plays in the second run, such as drop-doorbell (once) or 'wqe=0: fail=RNR_RETRY';
    /// may be repeated (faults.md has the language)
    #[arg(long, value_name = "RULE", value_parser = rule, conflicts_with = "bad")]
    pub(crate) fault: Vec<String>,
}

/// A rule; an action alone is played once.
fn rule(text: &str) -> Result<String, String> {
    match text.contains(':') || text.starts_with("seed=") {
        true => rules(text),
        false => rules(&format!("n=1: {text}")),
    }
}

const EXPLAIN: &str = "\
Examples:
  doorbell explain put
  doorbell explain atomic --bad access
  doorbell explain put --fault drop-doorbell
  doorbell explain signal | less
It needs no GPU and no NIC. Every byte is read back from the queue that was
used.";

/// What `explain` runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Operation {
    /// RDMA WRITE
    Put,
    /// RDMA READ
    Get,
    /// A put and an addition behind it
    Signal,
    /// FETCH_ADD whose old value comes back
    Atomic,
    /// SEND into memory that the target has posted
    Send,
}

/// What is wrong in the second run of `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bad {
    /// A remote key that no region has
    Rkey,
    /// A local key that no region has
    Lkey,
    /// Bytes behind the end of the target's region
    Range,
    /// A region of the target that grants its peers nothing
    Access,
}
