//! `doorbell pingpong`: the peer of `ibv_rc_pingpong` and `ibv_uc_pingpong`, in both roles.
//!
//! Each side SENDs a message and answers the one it receives, so many times. The options that must be alike on both sides
//! are those of the programs; so is the exchange ([`crate::foreign::pingpong`]). Messages are compared where both
//! sides are Doorbell: the programs send whatever their buffers hold.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, ensure};
use doorbell::connect::gid_of_ip;
use doorbell::cpu::{self, Post, deadline};
use doorbell::{Access, Config, CpuQp, Device, HcaCores, LinkKind, Mr, Place, Qp, Reset};

use crate::Ended;
use crate::args::PingpongArgs;
use crate::foreign::{Foreign, Listener, ROCE_PORT, Socket, pingpong};

/// What one side is made of.
struct Side {
    device: Device,
    memory: Mr,
    qp: Qp<Reset>,
    mine: Foreign,
}

fn config(args: &PingpongArgs, usual: Option<&str>) -> Config {
    let mut config = crate::config::of(&args.device, args.port_spec.as_deref(), usual);
    // One message at a time: whoever waits for it runs the engine.
    config.otherwise.hca_cores = Some(HcaCores::Caller);
    config
}

impl Side {
    fn new(args: &PingpongArgs, socket: &Socket) -> Result<Self> {
        let ip = socket.local_ip()?;
        let config = config(args, Some(&crate::foreign::port_at(ip)));
        let device = Device::builder().config(config).open()?;
        let pd = device.pd()?;
        let memory = device.alloc(Place::Host, 2 * args.size as usize)?;
        let memory = pd.register(&memory, Access::ALL)?;
        let qp = pd
            .qp()
            .depth(64)
            .receive_queue(args.rx_depth.next_power_of_two())
            .unreliable(args.uc)
            .build()?;
        let offer = qp.endpoint(LinkKind::Roce, &[])?.roce.context("no port")?;
        ensure!(
            offer.port.address.port() == ROCE_PORT,
            "the port is at {}: the other side sends to UDP port {ROCE_PORT} and no other: give `{}` to --roce or DOORBELL_ROCE, or neither",
            offer.port.address,
            crate::foreign::port_at(offer.port.address.ip())
        );
        ensure!(
            args.mtu <= offer.port.path_mtu,
            "-m {} does not fit this side's port, whose packets carry at most {}: give both sides a smaller one",
            args.mtu,
            offer.port.path_mtu
        );
        let mine = Foreign {
            qpn: qp.qpn(),
            psn: qp.first_psn(),
            gid: gid_of_ip(offer.port.address.ip()),
        };
        Ok(Self {
            device,
            memory,
            qp,
            mine,
        })
    }

    /// Connected to what the other side said.
    fn connect(self, args: &PingpongArgs, theirs: &Foreign) -> Result<(Device, Mr, Qp)> {
        let mine = self.device.roce_offer()?;
        let to = theirs.destination(&mine, args.mtu, args.uc)?;
        tell(&format!(
            "  local address:  QPN {:#08x}, PSN {:#08x}, {}",
            self.mine.qpn, self.mine.psn, mine.address
        ))?;
        tell(&format!(
            "  remote address: QPN {:#08x}, PSN {:#08x}, {}",
            theirs.qpn,
            theirs.psn,
            doorbell::connect::ip_of_gid(theirs.gid)
        ))?;
        tell(&format!("  path MTU {}", args.mtu))?;
        Ok((self.device, self.memory, self.qp.connect(&to)?))
    }
}

/// Runs to its end.
pub(crate) fn run(args: &PingpongArgs) -> Result<Ended> {
    // What cannot be used is said before anybody is waited for.
    config(args, None).resolve()?;
    let socket = match &args.host {
        Some(host) => Socket::dial(host, args.port, args.timeout)?,
        None => {
            let stop = crate::signals::watch()?;
            let listener = Listener::bind(args.port)?;
            tell(&format!(
                "waiting on TCP port {} for the other side",
                listener.port()?
            ))?;
            let come = listener.accept(args.timeout, args.wait, &|| {
                stop.load(std::sync::atomic::Ordering::Relaxed)
            })?;
            let Some(socket) = come else {
                return Ok(Ended::Well);
            };
            socket
        }
    };
    let mut socket = socket;
    let side = Side::new(args, &socket)?;
    // The answer is the word to begin, so a server is connected, with receives posted, before it gives it.
    let mine = side.mine;
    let theirs = match args.host {
        Some(_) => pingpong::call(&mut socket, &mine)?,
        None => pingpong::hear(&mut socket)?,
    };
    let (device, memory, qp) = side.connect(args, &theirs)?;
    let mut cpu = CpuQp::new(&qp)?;
    let (queue, recv) = cpu.queues()?;
    let size = u64::from(args.size);
    let (sink, source) = (
        cpu::local(&memory, 0, size),
        cpu::local(&memory, size, size),
    );
    memory.write(size as usize, &vec![0x7b; args.size as usize])?;
    let mut posted = VecDeque::new();
    let by = deadline(args.timeout);
    for _ in 0..args.rx_depth.min(args.iters) {
        posted.push_back(recv.recv_post(sink, by).map_err(told)?);
    }
    match args.host {
        Some(_) => pingpong::ready(&mut socket)?,
        None => pingpong::answer(&mut socket, &mine)?,
    }
    let started = Instant::now();
    let send = || -> Result<()> {
        let by = deadline(args.timeout);
        let ticket = queue.send(source, Post::by(by)).map_err(told)?;
        queue.wait(ticket, by).map_err(told)
    };
    for i in 0..args.iters {
        if args.host.is_some() {
            send().with_context(|| format!("sending message {i}"))?;
        }
        let ticket = posted.pop_front().context("no receive is posted")?;
        let by = deadline(args.timeout);
        let received = recv
            .recv_wait(ticket, by)
            .map_err(told)
            .with_context(|| format!("waiting for message {i} of {}", args.iters))?;
        ensure!(
            received.bytes == args.size,
            "message {i} has {} bytes instead of {}: give both sides the same -s",
            received.bytes,
            args.size
        );
        if u64::from(i) + posted.len() as u64 + 1 < u64::from(args.iters) {
            posted.push_back(recv.recv_post(sink, by).map_err(told)?);
        }
        if args.host.is_none() {
            send().with_context(|| format!("answering message {i}"))?;
        }
    }
    let took = started.elapsed();
    let bytes = 2 * size * u64::from(args.iters);
    tell(&format!(
        "{bytes} bytes in {:.2} seconds = {:.2} Mbit/sec",
        took.as_secs_f64(),
        bytes as f64 * 8e-6 / took.as_secs_f64()
    ))?;
    tell(&format!(
        "{} iters in {:.2} seconds = {:.2} usec/iter",
        args.iters,
        took.as_secs_f64(),
        took.as_secs_f64() * 1e6 / f64::from(args.iters)
    ))?;
    let counters = crate::perf::counters::read(&device, std::slice::from_ref(&qp));
    if let Some(line) = crate::perf::counters::line(&counters) {
        tell(&format!("RoCE: {line}"))?;
    }
    linger(&device, &qp);
    Ok(Ended::Well)
}

/// Our last ACK may be lost: a peer that repeats its last message gets another one.
fn linger(device: &Device, qp: &Qp) {
    let until = Instant::now() + std::time::Duration::from_millis(200);
    while Instant::now() < until && qp.error().is_none() {
        if !device.poll() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

fn told(error: doorbell::device_api::Error) -> anyhow::Error {
    anyhow!(crate::foreign::explain(error.code()))
}

/// One line, at once: whoever waits for it may read it through a pipe.
fn tell(line: &str) -> Result<()> {
    crate::out::say(&format!("{line}\n"))
}
