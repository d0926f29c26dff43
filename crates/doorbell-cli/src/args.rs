//! The command line of `doorbell`: what can be asked for and how it is explained.
//! Every option has its default in `--help`; values are checked here as far as they can be
//! without a device, combinations in `perf::plan`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};

use doorbell::GpuSelect;

use crate::lists::{self, List};

mod fault;
mod hwtest;
mod remote;
mod sweep;
mod tools;
pub(crate) use fault::{FaultArgs, rules};
pub(crate) use hwtest::HwtestArgs;
pub(crate) use remote::{
    EXCHANGE_PORT, PeerProgram, PingpongArgs, RemoteArgs, ServeArgs, far_address,
};
pub(crate) use sweep::{CompareArgs, Experiment, SWEEP_LINKS, SweepArgs};
pub(crate) use tools::{Bad, DumpArgs, ExplainArgs, Operation, StatArgs, Whom};

/// Open GPU-initiated networking: GPU threads build and ring mlx5 work queues, a software HCA
/// executes them.
#[derive(Debug, Parser)]
#[command(name = "doorbell", version = crate::VERSION, max_term_width = 80, after_help = EXIT_STATUS)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_STATUS: &str = "\
Exit status: 0 done, 1 the run failed, 2 wrong arguments, 3 a check failed.
A reader that goes away (| head) changes no status.
Documentation: `doorbell path doc`.
DOORBELL_LOG=debug (or a tracing filter) writes what happens to standard error.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what would be used here, and why: GPU, HCA, links, limits, settings
    Info(InfoArgs),
    /// Say which GPU-initiated path NCCL, NVSHMEM, UCX and NIXL will take here, and why
    Doctor(crate::doctor::DoctorArgs),
    /// Measure, and check, what GPU threads can post and the HCA can do
    Perf(Box<PerfArgs>),
    /// Measure everything once over, into results.json and a report to look at
    Sweep(Box<SweepArgs>),
    /// Say what changed between two sweeps beyond noise
    Compare(CompareArgs),
    /// Test this host's RDMA hardware, and write what was found to a file to send back
    Hwtest(HwtestArgs),
    /// Run one operation and show every byte of it, then the same with a mistake
    Explain(ExplainArgs),
    /// Show the queue pairs of a running process, and what a stuck one waits for
    Dump(DumpArgs),
    /// Watch what the queue pairs of running processes do, or serve it to Prometheus
    Stat(StatArgs),
    /// Be the far side of `perf --connect` (roce, verbs) and `hwtest --peer` from other hosts
    Serve(ServeArgs),
    /// Be the peer of `ibv_rc_pingpong` or `ibv_uc_pingpong`, over RoCE
    Pingpong(PingpongArgs),
    /// Print where a piece of this installation is, for a variable or a compiler
    Path(PathArgs),
    /// Print the completion script of a shell
    Completions(CompletionsArgs),
    /// Print the man page, or write all of them into a folder
    Man(ManArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  export LD_LIBRARY_PATH=$(doorbell path lib)
  cc -I$(doorbell path include) main.c -L$(doorbell path lib) -ldoorbell
  cuda=$(doorbell path ptx)/doorbell_device.ptx   # to link into CUDA C++")]
pub(crate) struct PathArgs {
    /// What to look for
    pub(crate) piece: Piece,
}

/// A piece of an installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Piece {
    /// The folder that has all others
    Home,
    /// libdoorbell.so.0, the C library
    C,
    /// The folder of the shared objects
    Lib,
    /// The folder of the C headers
    Include,
    /// The folder of the PTX
    Ptx,
    /// The folder of the documentation
    Doc,
    /// The NCCL plug-in (NCCL_GIN_PLUGIN)
    Nccl,
    /// The NVSHMEM transport
    Nvshmem,
    /// The NIXL plug-in
    Nixl,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  eval \"$(doorbell completions bash)\"     # in ~/.bashrc
  doorbell completions zsh > \"${fpath[1]}/_doorbell\"")]
pub(crate) struct CompletionsArgs {
    /// bash, elvish, fish, powershell or zsh
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  doorbell man | man -l -
  doorbell man --out ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write doorbell.1 and a page for each sub-command into this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// One JSON object on standard output instead of text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// Which GPU and how many HCA cores: shared by `info` and `perf`.
#[derive(Clone, Debug, Args)]
pub(crate) struct DeviceArgs {
    /// Where kernels run: auto, host (threads play the GPU), cuda or cuda:N
    /// [env: DOORBELL_GPU] [default: auto]
    #[arg(long, value_name = "GPU", value_parser = Known(gpu, GPUS), hide_possible_values = true)]
    pub(crate) gpu: Option<GpuSelect>,
    /// HCA engine threads; 0: the waiting thread drives the engine itself
    /// [env: DOORBELL_HCA_CORES] [default: chosen from cores and GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64))]
    pub(crate) hca_cores: Option<u32>,
    #[command(flatten)]
    pub(crate) fault: FaultArgs,
}

/// A value that a function reads, and what a shell may complete it to: there are others.
#[derive(Clone, Copy)]
pub(crate) struct Known<T>(
    pub(crate) fn(&str) -> Result<T, String>,
    pub(crate) &'static [&'static str],
);

/// What a shell completes `--gpu` and `--link` to.
const GPUS: &[&str] = &["auto", "host", "cuda", "cuda:0", "cuda:1"];
const LINKS: &[&str] = &["loopback", "shm", "roce", "verbs"];

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Known<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<T, clap::Error> {
        // The words of a refusal are clap's own for functions.
        self.0.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.1.iter().map(PossibleValue::new)))
    }
}

/// `--gpu`, in the host library's words.
fn gpu(text: &str) -> Result<GpuSelect, String> {
    text.parse().map_err(|e: doorbell::GpuError| e.to_string())
}

/// The second process of `perf --link shm` and `--link roce`, which `perf` starts.
#[derive(Debug, Parser)]
#[command(name = "doorbell peer")]
pub(crate) struct PeerArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Give up on anything after this many seconds
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds)]
    pub(crate) timeout: Duration,
    /// CPU to run on
    #[arg(long, value_name = "CPU")]
    pub(crate) pin: Option<usize>,
    /// Through which RoCE port
    #[arg(long, value_name = "PORT")]
    pub(crate) roce: Option<String>,
}

/// The tests, named as in perftest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Test {
    /// WRITE rate and bandwidth
    PutBw,
    /// WRITE latency: half of a ping-pong between two threads
    PutLat,
    /// READ rate and bandwidth
    GetBw,
    /// READ latency: posted until the bytes are here
    GetLat,
    /// FETCH_ADD rate, sums checked
    AtomicRate,
    /// put with signal, half of a ping-pong
    SignalLat,
    /// SEND rate and bandwidth, received by a thread
    SendBw,
    /// SEND latency: half of a ping-pong between two threads
    SendLat,
    /// 32 bytes and a flag delivered by the HCA, answered by the kernel
    Forward,
    /// Posting alone: no engine, no space check
    Post,
}

impl Test {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PutBw => "put-bw",
            Self::PutLat => "put-lat",
            Self::GetBw => "get-bw",
            Self::GetLat => "get-lat",
            Self::AtomicRate => "atomic-rate",
            Self::SignalLat => "signal-lat",
            Self::SendBw => "send-bw",
            Self::SendLat => "send-lat",
            Self::Forward => "forward",
            Self::Post => "post",
        }
    }

    /// The second end is a thread too.
    pub(crate) fn plays_two(self) -> bool {
        matches!(
            self,
            Self::PutLat | Self::SignalLat | Self::SendLat | Self::SendBw
        )
    }

    /// Figures are latencies (one message at a time), not rates.
    pub(crate) fn is_latency(self) -> bool {
        matches!(
            self,
            Self::PutLat | Self::GetLat | Self::SignalLat | Self::SendLat | Self::Forward
        )
    }
}

/// Who builds WQEs and who rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Initiator {
    /// The kernel builds and rings
    Gpu,
    /// The kernel builds, the CPU rings
    Assisted,
    /// The kernel hands commands to a CPU thread, which builds and rings
    Proxy,
    /// CPU threads build and ring; no kernel
    Cpu,
}

impl Initiator {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Assisted => "assisted",
            Self::Proxy => "proxy",
            Self::Cpu => "cpu",
        }
    }
}

/// How bytes reach the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Link {
    /// Both ends in this process
    Loopback,
    /// A second process on this host, through shared memory
    Shm,
    /// RoCEv2 packets, to another process or another host
    Roce,
    /// An RDMA device, to another process or another host
    Verbs,
}

impl Link {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Shm => "shm",
            Self::Roce => "roce",
            Self::Verbs => "verbs",
        }
    }
}

/// `--link`: which one, and for RoCE through which port. An RDMA device is a port that begins with `verbs:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinkChoice {
    pub(crate) kind: Link,
    pub(crate) port: Option<String>,
}

/// `loopback`, `shm`, `roce` or `roce:PORT`, `verbs` or `verbs:DEVICE`.
fn link(text: &str) -> Result<LinkChoice, String> {
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    let kind = match (name, port) {
        ("loopback", None) => Link::Loopback,
        ("shm", None) => Link::Shm,
        ("roce", Some("")) => {
            return Err(
                "after `roce:` comes a port, as in roce:udp://192.0.2.1 or roce:raw:eth0".into(),
            );
        }
        ("roce", Some(port)) => {
            remote::roce_port(port)?;
            Link::Roce
        }
        ("roce", None) => Link::Roce,
        ("verbs", None) => Link::Verbs,
        ("verbs", Some(_)) => {
            let port = Some(remote::port(text)?);
            return Ok(LinkChoice {
                kind: Link::Verbs,
                port,
            });
        }
        _ => {
            return Err(
                "give loopback, shm, roce, roce:udp://ADDR[:PORT], roce:raw:IFNAME, verbs or verbs:DEVICE[:PORT]"
                    .into(),
            );
        }
    };
    Ok(LinkChoice {
        kind,
        port: port.map(str::to_owned),
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Place {
    Host,
    Gpu,
}

impl Place {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu => "gpu",
        }
    }
}

/// Who shares a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sharing {
    /// Every thread has a QP of its own
    Exclusive,
    /// The threads of a block share one
    Block,
    /// All threads share
    Gpu,
}

impl Sharing {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Block => "block",
            Self::Gpu => "gpu",
        }
    }
}

/// How a poster tells the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Handler {
    /// Doorbell record and doorbell word (handler 2)
    Record,
    /// Doorbell word only (handler 10)
    Doorbell,
    /// 64-bit producer word (handler 1)
    Producer,
}

impl Handler {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Record => "record",
            Self::Doorbell => "doorbell",
            Self::Producer => "producer",
        }
    }
}

/// How completions are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CqMode {
    /// One CQE a WQE, in its slot
    PerSlot,
    /// One CQE, overwritten
    Collapsed,
}

impl CqMode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PerSlot => "per-slot",
            Self::Collapsed => "collapsed",
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  doorbell perf put-bw --quick            a first look: every byte checked
  doorbell perf put-bw --size 8:1M        rates and bandwidth over sizes
  doorbell perf put-bw --initiator gpu,proxy,cpu --blocks 1:128
                                          who should post? rows and ratios
  doorbell perf put-bw --link shm --hca-cores 0 --batch 32
                                          two processes on two cores
  doorbell perf put-bw --link roce --connect HOST
                                          two hosts; there: `doorbell serve`
  doorbell perf put-bw --link verbs:mlx5_0 --connect HOST
                                          the same through an RDMA NIC
  mpirun -n 2 doorbell perf put-bw --link roce
                                          two ranks of a launcher
  doorbell perf forward --gpu cuda        HCA to kernel and back
  doorbell perf post --sharing gpu --blocks 64 --threads 32
                                          cost of posting alone

Lists are comma-separated; A:B doubles from A to B; sizes take K, M, G.";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PerfArgs {
    #[arg(value_enum, hide_possible_values = false)]
    pub(crate) test: Test,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Who posts; a list runs each on the same set-up and prints ratios
    #[arg(
        long,
        value_enum,
        value_name = "WHO",
        value_delimiter = ',',
        default_value = "gpu",
        help_heading = "Load"
    )]
    pub(crate) initiator: Vec<Initiator>,

    /// How the bytes reach the target: loopback (this process), shm (a second process of this
    /// host), roce (RoCEv2 packets: a second process, --connect's host, or a launcher's rank 1),
    /// roce:PORT with udp://ADDR[:PORT] or raw:IFNAME, verbs (an RDMA device, to the same), or
    /// verbs:DEVICE[:PORT] as verbs:mlx5_0 (verbs.md)
    #[arg(long, value_name = "LINK", value_parser = Known(link, LINKS), hide_possible_values = true, default_value = "loopback", help_heading = "Set-up")]
    pub(crate) link: LinkChoice,

    #[command(flatten)]
    pub(crate) remote: RemoteArgs,

    /// Where payloads lie at the target
    #[arg(
        long,
        value_enum,
        value_name = "WHERE",
        default_value = "host",
        help_heading = "Set-up"
    )]
    pub(crate) mem: Place,

    /// Where payloads lie at the initiator [default: as --mem]
    #[arg(long, value_enum, value_name = "WHERE", help_heading = "Set-up")]
    pub(crate) local_mem: Option<Place>,

    /// Where work queues lie (post only: an engine reads them in host memory) [default: host]
    #[arg(long, value_enum, value_name = "WHERE", help_heading = "Set-up")]
    pub(crate) queue_mem: Option<Place>,

    /// Who shares a QP
    #[arg(long, value_enum, default_value = "exclusive", help_heading = "Load")]
    pub(crate) sharing: Sharing,

    /// Blocks of the kernel, a list
    #[arg(long, value_name = "LIST", value_parser = lists::blocks, default_value = "1", help_heading = "Load")]
    pub(crate) blocks: List,

    /// Threads of a block [default: 1 with exclusive QPs, else 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Load")]
    pub(crate) threads: Option<u32>,

    /// Queue pairs [default: one a thread, a block or a GPU, as shared]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Load")]
    pub(crate) qps: Option<u32>,

    /// Slots of each work queue, a power of two
    /// [env: DOORBELL_DEPTH] [default: 1024, more where many threads share]
    #[arg(long, value_name = "N", value_parser = lists::depth, help_heading = "Set-up")]
    pub(crate) depth: Option<u32>,

    /// Messages a doorbell; puts only [default: 32 for put-bw and post, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=511), help_heading = "Load")]
    pub(crate) batch: Option<u32>,

    /// Bytes a message, a list [default: 8; forward: 32]
    #[arg(long, value_name = "LIST", value_parser = lists::sizes, help_heading = "Load")]
    pub(crate) size: Option<List>,

    /// Messages a thread (latencies: samples)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40), conflicts_with = "secs", help_heading = "Load")]
    pub(crate) iters: Option<u64>,

    /// Seconds a case [default: 1]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, help_heading = "Load")]
    pub(crate) secs: Option<Duration>,

    /// Compare every byte with what was sent, look for lost, doubled and stray ones
    #[arg(long, help_heading = "Checking")]
    pub(crate) check: bool,

    /// Do not check (with --quick, which does)
    #[arg(long, conflicts_with = "check", help_heading = "Checking")]
    pub(crate) no_check: bool,

    /// Flip a byte at the target before it is compared: shows that the check can fail
    #[arg(long, help_heading = "Checking")]
    pub(crate) sabotage: bool,

    /// Seed of payloads and order [default: drawn, and printed]
    #[arg(long, value_name = "N", help_heading = "Checking")]
    pub(crate) seed: Option<u64>,

    /// A small run: few messages, a second or two in all, every byte checked
    #[arg(long, conflicts_with_all = ["iters", "secs"], help_heading = "Load")]
    pub(crate) quick: bool,

    /// How completions are reported [default: collapsed]
    #[arg(long, value_enum, value_name = "KIND", help_heading = "Set-up")]
    pub(crate) cq: Option<CqMode>,

    /// How posters tell the engine
    /// [env: DOORBELL_HANDLER] [default: record; assisted: producer]
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Set-up")]
    pub(crate) handler: Option<Handler>,

    /// Give up when nothing happens for this many seconds
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "10", help_heading = "Set-up")]
    pub(crate) timeout: Duration,

    /// Where the second process on this host runs its kernels [default: host, or the next CUDA
    /// device if payloads are in GPU memory; over roce the same one where there is only one]
    #[arg(long, value_name = "GPU", value_parser = Known(gpu, GPUS), hide_possible_values = true, help_heading = "Set-up")]
    pub(crate) peer_gpu: Option<GpuSelect>,

    /// CPUs to bind this process and the second one to, or none
    /// [default: none; two CPUs with --link shm --hca-cores 0]
    #[arg(long, value_name = "A,B", value_parser = lists::pins, help_heading = "Set-up")]
    pub(crate) pin: Option<lists::Pins>,

    /// Run another GPU module's kernels (cubin or PTX, same names and parameters) beside ours
    #[arg(long, value_name = "FILE", help_heading = "For developers")]
    pub(crate) module: Option<PathBuf>,

    /// Leave out the baseline measurement
    #[arg(long, help_heading = "Load")]
    pub(crate) no_baseline: bool,

    /// Write a trace for ui.perfetto.dev: kernels, posters, engine cores and the peer on one time line
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) trace: Option<PathBuf>,

    /// Say below each row what the engine did: where a rate saturates
    #[arg(long, help_heading = "Output")]
    pub(crate) counters: bool,

    /// Write results as JSON to FILE, or to standard output with `-`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_model_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Those lines are printed as they stand, and a terminal has 80 columns.
    #[test]
    fn examples_fit_a_terminal() {
        fn all(command: &clap::Command, wide: &mut Vec<String>) {
            let text = command.get_after_help().map(ToString::to_string);
            let lines = text.as_deref().unwrap_or_default().lines();
            wide.extend(
                lines
                    .filter(|l| l.chars().count() > 79)
                    .map(|l| format!("{}: {l}", command.get_name())),
            );
            for sub in command.get_subcommands() {
                all(sub, wide);
            }
        }
        let mut wide = Vec::new();
        all(&Cli::command(), &mut wide);
        assert!(wide.is_empty(), "{wide:#?}");
    }

    #[test]
    fn lists_and_defaults() {
        let Command::Perf(perf) = Cli::try_parse_from([
            "doorbell",
            "perf",
            "put-bw",
            "--size",
            "8:32",
            "--initiator",
            "gpu,cpu",
        ])
        .unwrap()
        .command
        else {
            panic!("not perf")
        };
        assert_eq!(perf.size.unwrap().0, [8, 16, 32]);
        assert_eq!(perf.initiator, [Initiator::Gpu, Initiator::Cpu]);
        assert_eq!(perf.depth, None);
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (args, part) in [
            (vec!["put-bw", "--depth", "1000"], "nearest is 1024"),
            (vec!["put-bw", "--size", "4Q"], "1024-based"),
            (vec!["nonsense"], "put-bw"),
            (
                vec!["post", "--iters", "5", "--secs", "1"],
                "cannot be used with",
            ),
            (vec!["post", "--threads", "2000"], "1..=1024"),
        ] {
            let all = ["doorbell", "perf"].into_iter().chain(args.iter().copied());
            let error = Cli::try_parse_from(all).unwrap_err().to_string();
            assert!(error.contains(part), "{args:?}: {error}");
        }
    }
}
