//! The arguments of `doorbell hwtest`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use crate::lists;

#[derive(Debug, Args)]
#[command(after_help = HWTEST)]
pub(crate) struct HwtestArgs {
    /// Only this device, as mlx5_0 or mlx5_0:2?gid=3; may be given several times
    /// [default: every device with an active port]
    #[arg(long, value_name = "DEVICE[:PORT]")]
    pub(crate) device: Vec<String>,
    /// A second host that runs `doorbell serve`: what goes to there is tested and measured as well
    #[arg(long, value_name = "HOST[:PORT]", value_parser = crate::args::far_address)]
    pub(crate) peer: Option<String>,
    /// Where the results go as JSON; - is standard output
    #[arg(long, value_name = "FILE", default_value = "doorbell-hwtest.json")]
    pub(crate) json: PathBuf,
    /// Where they go as a page to read; - is standard output
    #[arg(long, value_name = "FILE", default_value = "doorbell-hwtest.txt")]
    pub(crate) page: PathBuf,
    /// Signals that are counted, 10000000 at most; a slow device counts as many as there is time for
    #[arg(long, value_name = "N", default_value = "1000000", value_parser = clap::value_parser!(u64).range(..=10_000_000))]
    pub(crate) signals: u64,
    /// Correctness only
    #[arg(long)]
    pub(crate) no_perf: bool,
    /// A step fails when nothing happens for this many seconds
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "10")]
    pub(crate) timeout: Duration,
    /// No measurement of a device begins after this many seconds of measuring; half of it to the second host
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "240")]
    pub(crate) perf_time: Duration,
    /// No step and no measurement begins after this many seconds, of all devices together; what is left out is named
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "600")]
    pub(crate) time: Duration,
}

const HWTEST: &str = "\
It changes nothing on the system. About ten minutes at most (--time). With a
second host:
  there: doorbell serve          here: doorbell hwtest --peer THAT_HOST
Please send doorbell-hwtest.json and doorbell-hwtest.txt back, above all when
something failed, or when nothing could be tried: to whoever gave you this
program, or as an issue of its repository; they are all that is wanted. They
name devices, their GIDs (which contain IP addresses), PCI numbers, firmware,
distribution, kernel, CPU, GPU and drivers, the second host as you called it
and as it calls itself, DOORBELL_* variables, and of what failed what was said.
Exit status: 0 all well, 1 nothing could be tested or the results not be
written, 2 wrong arguments or variables, 3 a step or a measurement failed or a
device that was asked for was not tested, 4 all well here, and not to the
second host.";

impl HwtestArgs {
    /// The files that it writes.
    pub(crate) fn outputs(&self) -> [(&'static str, &Path); 2] {
        [("--json", &self.json), ("--page", &self.page)]
    }
}
