//! Where the second process of a run is: started by this one, `doorbell serve` on another host, or the other rank of a
//! launcher; and what the second rank does.

use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use doorbell::connect::{Agreed, Introduction};
use doorbell::{Channel, ConnectError, GpuSelect, Greeting, Launched, Line};

use super::bench::{Bench, Benches};
use super::peer::{Orders, Parting, Turn, session, wait_driving};
use super::pipe::Partner;
use super::terms::Terms;
use crate::args::{Link, PerfArgs, Place};
use crate::{Ended, WrongArguments};

/// How often a wait for orders looks whether it should end.
const SLICE: Duration = Duration::from_millis(200);

/// Where the second process is.
pub(crate) enum Second {
    /// There is none.
    None,
    /// To be started here.
    Child,
    /// It waits for a greeting at the other end.
    Called(Line),
    /// This is the second process: the initiator is at the other end.
    Answering(Line),
}

impl Second {
    /// Looks at the arguments and at who launched this process, and reaches the other side.
    pub(crate) fn find(args: &PerfArgs) -> Result<Self> {
        let kind = args.link.kind;
        let remote = &args.remote;
        let packets = remote.pcap.is_some() || remote.net_fault.is_some() || remote.trace_packets;
        let mtu = remote.mtu.is_some() && kind != Link::Verbs;
        if (packets || mtu) && kind != Link::Roce {
            let wrong = anyhow::anyhow!(
                "--mtu, --pcap, --net-fault and --trace-packets are about packets: add --link roce"
            );
            return Err(wrong.context(WrongArguments));
        }
        if let Some(host) = &args.remote.connect {
            if !matches!(kind, Link::Roce | Link::Verbs) {
                let wrong = anyhow::anyhow!(
                    "--connect reaches another host by packets: add --link roce, or --link verbs for an RDMA device"
                );
                return Err(wrong.context(WrongArguments));
            }
            return Ok(Self::Called(Line::dial(host, args.timeout)?));
        }
        let launched = Launched::detect(args.remote.rendezvous.as_ref())
            .map_err(|e| anyhow::Error::from(e).context(WrongArguments))?;
        if launched.is_none() && args.remote.rendezvous.is_some() {
            let wrong = anyhow::anyhow!(
                "--rendezvous is where ranks of a launcher meet, and nobody launched this process as one of several: see the variables in roce.md"
            );
            return Err(wrong.context(WrongArguments));
        }
        let Some(launched) = launched else {
            return Ok(match kind {
                Link::Loopback => Self::None,
                Link::Shm | Link::Roce | Link::Verbs => Self::Child,
            });
        };
        sense(&launched, kind).map_err(|e| e.context(WrongArguments))?;
        let line = launched
            .join(args.timeout)
            .with_context(|| launched.to_string())?
            .into_line()
            .context("there are not two ranks")?;
        Ok(match launched.rank {
            0 => Self::Called(line),
            _ => Self::Answering(line),
        })
    }

    /// The port to use where nobody names one: at the address by which the other side is reached.
    pub(crate) fn port(&self, kind: Link) -> Option<String> {
        let own = match self {
            Self::Called(line) | Self::Answering(line) => line.local_ip(),
            Self::None | Self::Child => None,
        };
        port(kind, own)
    }

    /// The partner that takes orders.
    pub(crate) fn partner(
        self,
        args: &PerfArgs,
        bench: &Bench,
        pin: Option<usize>,
    ) -> Result<Option<Partner>> {
        Ok(match self {
            Self::None | Self::Answering(_) => None,
            Self::Child => Some(child(args, bench, pin)?),
            Self::Called(line) => {
                let greeting = greeting(bench, args.link.kind, &args.remote.job, &purpose(args))?;
                let channel = line.call(&greeting, args.timeout)?;
                Some(Partner::over(channel, args.timeout))
            }
        })
    }
}

/// How the purpose of a run over an RDMA device ends.
pub(crate) const OVER_VERBS: &str = " over verbs";

/// A port for two processes of one host.
pub(crate) const LOCAL: &str = "udp://127.0.0.1";

/// The port at the address by which the other side came; a Unix socket means this very host.
pub(crate) fn port_at(own: Option<IpAddr>) -> String {
    match own {
        Some(IpAddr::V4(ip)) => format!("udp://{ip}"),
        Some(IpAddr::V6(ip)) => format!("udp://[{ip}]"),
        None => LOCAL.to_owned(),
    }
}

/// The port of a second process on this host, where ours has the address `own`: packets of IPv4 and IPv6 do not meet.
fn beside(ours: &str, own: IpAddr) -> String {
    match ours.starts_with("udp") {
        true => port_at(Some(own)),
        false => LOCAL.to_owned(),
    }
}

/// The RDMA device at the address by which the other side came, or the first one.
pub(crate) fn device_at(own: Option<IpAddr>) -> String {
    match own {
        Some(ip) => format!("verbs:auto?ip={ip}"),
        None => "verbs:auto".to_owned(),
    }
}

/// Which link a port is of.
pub(crate) fn link_of(port: &str) -> Link {
    match port.starts_with("verbs:") {
        true => Link::Verbs,
        false => Link::Roce,
    }
}

fn sense(launched: &Launched, kind: Link) -> Result<()> {
    let Launched {
        rank,
        world,
        launcher,
        ..
    } = launched;
    if kind == Link::Loopback {
        bail!(
            "rank {rank} of {world} by {launcher}: every rank would measure by itself; add --link roce or --link shm"
        );
    }
    ensure!(
        *world == 2,
        "rank {rank} of {world} by {launcher}: perf takes two ranks, as in -n 2"
    );
    ensure!(
        launched.one_host || kind != Link::Shm,
        "--link shm needs both ranks on one host: use --link roce, or keep the ranks together"
    );
    Ok(())
}

fn purpose(args: &PerfArgs) -> String {
    format!("perf {} over {}", args.test.name(), args.link.kind.name())
}

/// What this side says of itself.
pub(crate) fn greeting(bench: &Bench, kind: Link, job: &str, purpose: &str) -> Result<Greeting> {
    Ok(Greeting {
        job: job.to_owned(),
        purpose: purpose.to_owned(),
        hca: bench.device.provider().id(),
        offer: match kind {
            Link::Roce => Some(bench.device.roce_offer()?),
            // What it needs is in the description of each queue pair.
            Link::Loopback | Link::Shm | Link::Verbs => None,
        },
    })
}

/// Who is at the other end and what was negotiated, in lines to print.
pub(crate) fn negotiated(other: &Introduction, agreed: Option<&Agreed>) -> Vec<String> {
    let mut lines = vec![format!("peer: {other}, process {}", other.pid)];
    if let Some(agreed) = agreed {
        lines.push(format!("negotiated: {agreed}"));
    }
    lines
}

/// Which of the `visible` CUDA devices the second process gets whose first has `own`.
fn next_gpu(own: u32, visible: u32, link: Link) -> Result<u32> {
    match visible {
        // The only one serves both ends where packets are between them. Otherwise a copy within one GPU would wait for its kernels, and for
        // turns with the other process: whoever wants that says so.
        0 | 1 if link == Link::Roce => Ok(own),
        0 | 1 => {
            let same = GpuSelect::Cuda(Some(own));
            bail!(
                "the second process has no GPU of its own for payloads in GPU memory: this process sees one (CUDA_VISIBLE_DEVICES decides); \
                 --peer-gpu {same} lets both use it, in turns of milliseconds; --mem host needs none"
            )
        }
        _ => Ok((own + 1) % visible),
    }
}

/// Starts the second process.
fn child(args: &PerfArgs, bench: &Bench, pin: Option<usize>) -> Result<Partner> {
    let gpu = match (&args.peer_gpu, args.mem) {
        (Some(gpu), _) => *gpu,
        (None, Place::Gpu) if bench.device.gpu().is_cuda() => {
            let gpu = bench.device.gpu_info();
            GpuSelect::Cuda(Some(next_gpu(
                gpu.ordinal.unwrap_or(0),
                gpu.visible,
                args.link.kind,
            )?))
        }
        (None, _) => GpuSelect::Host,
    };
    let mut words: Vec<std::ffi::OsString> = ["peer", "--gpu"].map(Into::into).into();
    words.push(gpu.to_string().into());
    words.push("--hca-cores".into());
    words.push(bench.cores().to_string().into());
    words.push("--timeout".into());
    words.push(args.timeout.as_secs_f64().to_string().into());
    if let Some(cpu) = pin {
        words.push("--pin".into());
        words.push(cpu.to_string().into());
    }
    if args.link.kind == Link::Roce {
        words.push("--roce".into());
        words.push(
            beside(
                &bench.device.settings().roce,
                bench.device.roce_offer()?.address.ip(),
            )
            .into(),
        );
    }
    if args.link.kind == Link::Verbs {
        words.push("--roce".into());
        words.push(format!("verbs:{}", bench.device.settings().verbs).into());
    }
    words.extend(args.device.fault.for_second().into_iter().map(Into::into));
    // A trace shows both, so both remember as much.
    let events = doorbell::Recorder::On(doorbell::Recorder::TRACE);
    let env = args
        .trace
        .as_ref()
        .map(|_| ("DOORBELL_RECORD", events.to_string()));
    Partner::start(&words, env.as_slice(), args.timeout)
}

/// Orders that come over a connection.
pub(crate) struct Over<'a> {
    pub(crate) channel: Channel,
    pub(crate) timeout: Duration,
    /// An error when this side is to end.
    pub(crate) stop: &'a dyn Fn() -> Result<()>,
}

impl Orders for Over<'_> {
    fn next(&mut self, turn: &mut dyn FnMut() -> Turn) -> Result<Option<Vec<u8>>> {
        // The initiator may measure for as long as it likes, while it gives signs of life.
        while !wait_driving(turn, SLICE, |time| self.channel.wait(time)) {
            (self.stop)()?;
            if self.channel.trouble(self.timeout).is_some() {
                return Ok(None);
            }
        }
        match self.channel.recv(self.timeout) {
            Ok(order) => Ok(Some(order)),
            Err(ConnectError::Lost { .. } | ConnectError::Ended { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn answer(&mut self, answer: Vec<u8>) -> bool {
        self.channel.send(&answer, self.timeout).is_ok()
    }

    fn interrupted(&self) -> Result<()> {
        (self.stop)()?;
        match self.channel.trouble(self.timeout) {
            Some(trouble) => Err(trouble.into()),
            None => Ok(()),
        }
    }

    fn lost(&self) -> Option<String> {
        match self.channel.trouble(self.timeout)? {
            ConnectError::Lost { .. } => None,
            ConnectError::Ended { reason, .. } => Some(reason),
            other => Some(other.to_string()),
        }
    }

    fn tell(&self, why: &str) {
        self.channel.tell_end(why);
    }
}

/// A port at `own`, the address by which the other side is reached.
fn port(kind: Link, own: Option<IpAddr>) -> Option<String> {
    match kind {
        Link::Roce => Some(port_at(own)),
        Link::Verbs => Some(device_at(own)),
        Link::Loopback | Link::Shm => None,
    }
}

/// Rank 1: does as rank 0 says, and ends as it does.
pub(crate) fn answer(args: &PerfArgs, line: Line, pin: Option<usize>) -> Result<Ended> {
    if let Some(cpu) = pin {
        crate::pin::to(cpu)?;
    }
    let usual = port(args.link.kind, line.local_ip());
    let config = crate::config::of_perf(args, usual.as_deref());
    let bench: Rc<Bench> = Benches::new(config, None)?.of_peer(args.test.name())?;
    let greeting = greeting(&bench, args.link.kind, &args.remote.job, &purpose(args))?;
    let channel = line.answer(&greeting, args.timeout)?;
    let mut orders = Over {
        channel,
        timeout: args.timeout,
        stop: &|| Ok(()),
    };
    match session(&bench, args.timeout, &Terms::own(), &mut orders)? {
        // What was wrong is rank 0's to say; that something was is in both statuses.
        Parting::Goodbye { well: true } => Ok(Ended::Well),
        Parting::Goodbye { well: false } => Ok(Ended::CheckFailedThere),
        Parting::Lost(how) => bail!("rank 0 is gone: {how}; look at its output"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_process_gets_the_next_gpu_or_the_remedy() {
        assert_eq!(next_gpu(0, 2, Link::Shm).unwrap(), 1);
        assert_eq!(next_gpu(7, 8, Link::Verbs).unwrap(), 0);
        assert_eq!(next_gpu(0, 1, Link::Roce).unwrap(), 0);
        for link in [Link::Shm, Link::Verbs] {
            let text = next_gpu(0, 1, link).unwrap_err().to_string();
            let remedy = format!("--peer-gpu {}", GpuSelect::Cuda(Some(0)));
            assert!(text.contains(&remedy), "{text}");
            assert!(text.contains("CUDA_VISIBLE_DEVICES"), "{text}");
        }
    }
}
