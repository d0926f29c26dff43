//! Options about another host, or another program there: `serve`, `pingpong`, and `perf`'s second process.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use doorbell::{ConnectError, Rendezvous};

use super::DeviceArgs;
use crate::lists;

/// Where the second process is.
/// TCP port at which `ibv_rc_pingpong` and the programs of perftest exchange what their queue pairs need.
pub(crate) const EXCHANGE_PORT: u16 = 18_515;

#[derive(Clone, Debug, Args)]
pub(crate) struct RemoteArgs {
    /// The second process is `doorbell serve` on this host (TCP port 4791 unless given)
    #[arg(long, value_name = "HOST[:PORT]", value_parser = far_address, help_heading = "Set-up")]
    pub(crate) connect: Option<String>,
    /// Speak another program's exchange: perftest (ib_write_bw, ib_send_bw), whose client or, without
    /// --connect, server this is then (TCP port 18515)
    #[arg(long, value_enum, value_name = "PROGRAM", help_heading = "Set-up")]
    pub(crate) peer: Option<PeerProgram>,
    /// Path MTU of roce and verbs at most, in bytes of payload: 256, 512, 1024, 2048 or 4096
    /// [env: DOORBELL_ROCE_MTU] [default: what fits both ports]
    #[arg(long, value_name = "BYTES", value_parser = path_mtu, help_heading = "Set-up")]
    pub(crate) mtu: Option<u16>,
    /// Write this side's RoCE packets to FILE (pcapng), for Wireshark
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) pcap: Option<PathBuf>,
    /// Faults of the network on this side's packets, as loss=1%,dup=1%,seed=7
    #[arg(long, value_name = "SPEC", value_parser = faults, help_heading = "Checking")]
    pub(crate) net_fault: Option<String>,
    /// Print every RoCE packet to standard error
    #[arg(long, help_heading = "Output")]
    pub(crate) trace_packets: bool,
    /// Talk only to a peer of the same job, if it names one
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true,
        help_heading = "Set-up"
    )]
    pub(crate) job: String,
    /// Where ranks of a launcher (mpirun, srun, torchrun) meet: unix:PATH or tcp:HOST:PORT
    /// [env: DOORBELL_RENDEZVOUS] [default: from the launcher]
    #[arg(long, value_name = "WHERE", value_parser = rendezvous, help_heading = "Set-up")]
    pub(crate) rendezvous: Option<Rendezvous>,
}

/// Programs whose exchange `perf` speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PeerProgram {
    /// ib_write_bw (put-bw) and ib_send_bw (send-bw) of perftest 4.5
    Perftest,
}

fn rendezvous(text: &str) -> Result<Rendezvous, String> {
    text.parse()
        .map_err(|e: doorbell::BootstrapError| e.to_string())
}

/// Is it a number, and no more? As a host it would be an IPv4 address in one piece, which nobody means.
fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// `HOST[:PORT]`, whose name is looked up later.
fn address(text: &str) -> Result<String, String> {
    if is_number(text) {
        return Err(format!(
            "a port alone is no address: give the host too, as in 127.0.0.1:{text}; to listen at every one, 0.0.0.0:{text}"
        ));
    }
    match doorbell::connect::check_address(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(ConnectError::Address { remedy, .. }) => Err(remedy),
        Err(other) => Err(other.to_string()),
    }
}

/// The same of somebody else, who has no port 0.
pub(crate) fn far_address(text: &str) -> Result<String, String> {
    let text = address(text)?;
    let is_zero = |(host, port): (&str, &str)| {
        // Of an IPv6 address without brackets it is the last group.
        (!host.contains(':') || host.ends_with(']')) && port.parse() == Ok(0u16)
    };
    match text.rsplit_once(':').is_some_and(is_zero) {
        true => Err("port 0 is none to connect to: give 1 to 65535".to_owned()),
        false => Ok(text),
    }
}

/// A RoCE port that could be opened here.
pub(super) fn roce_port(text: &str) -> Result<String, String> {
    checked(text, doorbell::connect::check_roce_port(text))
}

/// A RoCE port, or an RDMA device's behind `verbs:`.
pub(super) fn port(text: &str) -> Result<String, String> {
    match text.strip_prefix("verbs:") {
        None if is_number(text) => Err(format!(
            "a number alone is no port of these: give udp, udp://ADDR:{text}, raw:IFNAME or verbs:DEVICE; the TCP port for clients is --listen's"
        )),
        Some(device) => checked(text, doorbell::connect::check_verbs_port(device).map(drop)),
        None => roce_port(text),
    }
}

fn faults(text: &str) -> Result<String, String> {
    checked(text, doorbell::connect::check_roce_faults(text))
}

/// The text, or what to give instead: option and value are named by whoever reads the command line.
fn checked(text: &str, outcome: Result<(), doorbell::Error>) -> Result<String, String> {
    match outcome {
        Ok(()) => Ok(text.to_owned()),
        Err(doorbell::Error::Setting { remedy, .. }) => Err(remedy),
        Err(other) => Err(other.to_string()),
    }
}

#[derive(Debug, Args)]
#[command(after_help = SERVE)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Address to listen on with TCP; port 0 takes a free one [default: port 4791 of every address]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = address)]
    pub(crate) listen: Option<String>,
    /// Through which port: udp://ADDR[:PORT] or raw:IFNAME for RoCE, verbs:DEVICE[:PORT] for an RDMA device
    /// [default: as the client asks, at the address by which it came]
    #[arg(long, value_name = "PORT", value_parser = port)]
    pub(crate) port: Option<String>,
    /// Serve one client, and end as its run ended
    #[arg(long)]
    pub(crate) once: bool,
    /// Serve only clients of the same job, if they name one
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) job: String,
    /// Clients at a time; others are told to come later
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), default_value = "16")]
    pub(crate) clients: u32,
    /// Memory that clients get together; who asks for more is refused. K, M and G are taken
    /// [default: half of what is free when the server starts]
    #[arg(long, value_name = "BYTES", value_parser = lists::some_bytes)]
    pub(crate) memory: Option<u64>,
    /// Give up when no client comes for this many seconds [default: wait for ever]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds)]
    pub(crate) wait: Option<Duration>,
    /// Give up on a step of a client that came after this many seconds
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "10")]
    pub(crate) timeout: Duration,
}

#[derive(Debug, Args)]
#[command(after_help = PINGPONG)]
pub(crate) struct PingpongArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// The other side, which waits there; without it, this side waits
    pub(crate) host: Option<String>,
    /// Unreliable Connection: the peer of ibv_uc_pingpong
    #[arg(long)]
    pub(crate) uc: bool,
    /// Bytes of a message; K, M and G are taken
    #[arg(short, long, value_name = "N", value_parser = size, default_value = "4096")]
    pub(crate) size: u32,
    /// Messages each way
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), default_value = "1000")]
    pub(crate) iters: u32,
    /// Receives posted at a time
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32_768), default_value = "500")]
    pub(crate) rx_depth: u32,
    /// TCP port of the exchange
    #[arg(short, long, value_name = "PORT", default_value_t = EXCHANGE_PORT)]
    pub(crate) port: u16,
    /// Path MTU: 256, 512, 1024, 2048 or 4096
    #[arg(short, long, value_name = "BYTES", value_parser = path_mtu, default_value = "1024")]
    pub(crate) mtu: u16,
    /// Taken and ignored, as is -d: the GID is the RoCE port's address
    #[arg(short, long, value_name = "INDEX")]
    pub(crate) gid_idx: Option<u32>,
    /// Taken and ignored
    #[arg(short = 'd', long, value_name = "DEV")]
    pub(crate) ib_dev: Option<String>,
    /// Through which RoCE port: udp://ADDR:4791, raw:IFNAME, dgram:LOCAL,REMOTE
    /// [default: udp, at the address of the TCP connection]
    #[arg(long = "roce", value_name = "PORT", value_parser = roce_port)]
    pub(crate) port_spec: Option<String>,
    /// Give up when nobody comes for this many seconds [default: wait for ever]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, conflicts_with = "host")]
    pub(crate) wait: Option<Duration>,
    /// Give up on a step after this many seconds, once both are there (with HOST: also on reaching it)
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = lists::seconds, default_value = "30")]
    pub(crate) timeout: Duration,
}

/// A message that a receive takes.
fn size(text: &str) -> Result<u32, String> {
    match lists::bytes(text)? {
        n @ 1..=0x4000_0000 => Ok(n as u32),
        _ => Err(format!("`{text}` is outside 1 to 1G")),
    }
}

fn path_mtu(text: &str) -> Result<u16, String> {
    text.parse()
        .ok()
        .filter(|mtu| doorbell::connect::PATH_MTUS.contains(mtu))
        .ok_or_else(|| format!("`{text}` is no path MTU: give 256, 512, 1024, 2048 or 4096"))
}

const PINGPONG: &str = "\
Both sides take the same -s, -n and -m. On the other host, with rdma-core:
  ibv_rc_pingpong -g 1                    and here: doorbell pingpong HOST
  ibv_rc_pingpong -g 1 THIS_HOST          and here: doorbell pingpong";

const SERVE: &str = "\
On the other host, one of:
  doorbell perf put-bw --link roce --connect THIS_HOST
  doorbell perf put-bw --link verbs --connect THIS_HOST     an RDMA NIC
  doorbell hwtest --peer THIS_HOST                          to test that
SIGINT and SIGTERM end it.";
