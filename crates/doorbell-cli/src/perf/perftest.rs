//! `--peer perftest`: one side of `ib_write_bw` (put-bw) or `ib_send_bw` (send-bw), the other being that program.
//!
//! As the client, the kernel's puts go to the buffer that the program offers, and the program is told the result. As the
//! server, this side offers a buffer, lets its engine serve the program's WRITEs, and prints what the program reports. SENDs
//! are posted and received by the CPU, as perftest does it.
//! What is in the buffers is the program's own affair, so nothing is compared.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell::connect::{Destination, VerbsEnd, VerbsTarget, gid_of_ip};
use doorbell::cpu::{self, Post, deadline};
use doorbell::{Access, CpuQp, Export, LinkKind, Place, Qp, Reset, export_array};
use doorbell_gpu::Dims;
use doorbell_kernels::params;

use super::bench::{Bench, Benches};
use super::plan::{Case, Limit};
use super::queues;
use super::running::{Statuses, Watch, first_failure};
use super::tally::{Measured, Tally};
use crate::WrongArguments;
use crate::args::EXCHANGE_PORT;
use crate::args::{Initiator, Link, PerfArgs, Test};
use crate::foreign::perftest::{CYCLE, Keys, Report, Role, Talk};
use crate::foreign::{Foreign, Listener, ROCE_PORT, Socket};

/// perftest's own defaults for WRITEs.
pub(crate) const SIZE: u64 = 65_536;
const ITERS: u64 = 5000;
/// And for SENDs.
const SENDS: u64 = 1000;
/// SENDs under way at most, as perftest has it.
const SENDING: usize = 128;
/// A client may measure for a long time.
const RUN: Duration = Duration::from_secs(3600);

/// Who this side is, connected by TCP.
pub(crate) struct Peer {
    talk: Talk,
    role: Role,
    local: IpAddr,
}

impl Peer {
    /// Reaches the program, or waits for it.
    pub(crate) fn find(args: &PerfArgs) -> Result<Self> {
        sense(args).map_err(|e| e.context(WrongArguments))?;
        let (socket, role) = match &args.remote.connect {
            Some(host) => {
                let (host, port) = match host.rsplit_once(':') {
                    Some((host, port)) if !host.contains(':') => (
                        host,
                        port.parse()
                            .with_context(|| format!("{port:?} is no TCP port"))?,
                    ),
                    _ => (host.as_str(), EXCHANGE_PORT),
                };
                (Socket::dial(host, port, args.timeout)?, Role::Client)
            }
            None => {
                let stop = crate::signals::watch()?;
                let listener = Listener::bind(EXCHANGE_PORT)?;
                crate::complain(&format!(
                    "waiting on TCP port {EXCHANGE_PORT} for {}",
                    program(args.test)
                ));
                let stop = || stop.load(std::sync::atomic::Ordering::Relaxed);
                let socket = listener.accept(args.timeout, None, &stop)?;
                (
                    socket.context("a signal came before the other side did")?,
                    Role::Server,
                )
            }
        };
        Ok(Self {
            local: socket.local_ip()?,
            talk: Talk::new(socket, role),
            role,
        })
    }

    /// The port to use when `--link` names none: UDP port 4791, where the program sends to.
    pub(crate) fn port(&self, link: Link) -> String {
        if link == Link::Verbs {
            return super::remote::device_at(Some(self.local));
        }
        crate::foreign::port_at(self.local)
    }

    /// The program's address, for humans.
    pub(crate) fn name(&self) -> String {
        format!("peer: perftest at {}", self.talk.socket().peer())
    }

    /// The whole run.
    pub(crate) fn run(
        mut self,
        args: &PerfArgs,
        benches: &mut Benches,
        case: &Case,
    ) -> Result<Measured> {
        let bench = benches.of(case)?;
        let connected = self.connect(&bench, case)?;
        match (case.test, self.role) {
            (Test::SendBw, Role::Client) => self.sender(&bench, case, connected),
            (Test::SendBw, Role::Server) => self.receiver(&bench, case, connected),
            (_, Role::Client) => self.client(&bench, case, connected),
            (_, Role::Server) => self.server(args, &bench, case, connected),
        }
    }

    fn connect(&mut self, bench: &Bench, case: &Case) -> Result<Connected> {
        if case.link == Link::Verbs {
            return self.connect_device(bench, case);
        }
        let offer = bench.device.roce_offer()?;
        ensure!(
            offer.address.port() == ROCE_PORT,
            "the port is at {}: perftest sends to UDP port {ROCE_PORT} and no other: give `{}` to --link roce: or DOORBELL_ROCE, or neither",
            offer.address,
            crate::foreign::port_at(offer.address.ip())
        );
        let path_mtu = self.talk.open(offer.path_mtu)?;
        let qps: Vec<Qp<Reset>> = queues::build(bench, case, 1)?;
        let qp = qps.into_iter().next().context("no queue pair")?;
        let endpoint = qp.endpoint(LinkKind::Roce, &[])?;
        let port = endpoint.roce.context("no RoCE port")?;
        // The program writes into as much as its size, or its cycle buffer if that is larger, from the address on.
        let len = case.size.max(u64::from(CYCLE));
        let memory = bench.device.alloc(Place::Host, len as usize)?;
        let mr = bench.pd.register(&memory, Access::ALL)?;
        let mine = Keys {
            qp: Foreign {
                qpn: qp.qpn(),
                psn: qp.first_psn(),
                gid: gid_of_ip(port.port.address.ip()),
            },
            out_reads: 1,
            rkey: mr.key(),
            vaddr: mr.addr(),
        };
        let theirs = self.talk.keys(mine)?;
        let to = theirs.qp.destination(&offer, path_mtu, false)?;
        let qp = qp.connect(&to)?;
        // Once for each queue pair and once more: both sides are connected then.
        self.talk.sync("its word that it is connected")?;
        self.talk.sync("its word that it is ready")?;
        Ok(Connected {
            qps: vec![qp],
            mr,
            theirs,
        })
    }

    /// The same over an RDMA device, which is what the program itself has.
    fn connect_device(&mut self, bench: &Bench, case: &Case) -> Result<Connected> {
        let qps: Vec<Qp<Reset>> = queues::build(bench, case, 1)?;
        let qp = qps.into_iter().next().context("no queue pair")?;
        let own = qp.endpoint(LinkKind::Verbs, &[])?;
        let own = own.verbs.context("no end of a device")?;
        let mtu = self.talk.open(own.end.mtu)?;
        let len = case.size.max(u64::from(CYCLE));
        let memory = bench.device.alloc(Place::Host, len as usize)?;
        let mr = bench.pd.register(&memory, Access::ALL)?;
        let there = mr.remote_over(LinkKind::Verbs)?;
        let theirs = self.talk.keys(Keys {
            qp: Foreign {
                qpn: own.end.qpn,
                psn: own.psn,
                gid: own.end.gid,
            },
            out_reads: 1,
            rkey: there.key,
            vaddr: there.addr,
        })?;
        let to = Destination::Verbs(VerbsTarget {
            peer: VerbsEnd {
                qpn: theirs.qp.qpn,
                gid: theirs.qp.gid,
                lid: 0,
                mtu,
                reads_open: 1,
                reads_answered: 1,
                ethernet: own.end.ethernet,
                srd: None,
            },
            psn: theirs.qp.psn,
        });
        let qp = qp.connect(&to)?;
        self.talk.sync("its word that it is connected")?;
        self.talk.sync("its word that it is ready")?;
        Ok(Connected {
            qps: vec![qp],
            mr,
            theirs,
        })
    }

    fn client(mut self, bench: &Bench, case: &Case, connected: Connected) -> Result<Measured> {
        let Connected { qps, mr, theirs } = connected;
        let iters = told(case)?;
        let all: Vec<&Qp> = qps.iter().collect();
        let export: Export = export_array(&all, doorbell::ExportLayout::Spread)?;
        let statuses = Statuses::new(bench, 1)?;
        let area = |addr, key| params::Area {
            addr,
            key,
            ..Default::default()
        };
        let rate = params::Rate {
            qps: export.table_addr(),
            qp_count: 1,
            flags: params::flags::QP_BY_THREAD,
            batch: case.batch,
            size: case.size,
            iters,
            deadline_ns: (RUN + case.timeout).as_nanos() as u64,
            local: area(mr.addr(), mr.key()),
            remote: area(theirs.vaddr, theirs.rkey),
            status: statuses.addr(),
            ..params::Rate::one_message()
        };
        let mut tally = Tally::default();
        let before = super::counters::read(&bench.device, &qps);
        // SAFETY: the structure is this kernel's; queue, region and status are of this bench and outlive the launch, which is
        // waited for here. What it writes to is the peer's, by key.
        let running = unsafe { bench.start("put_bw", false, Dims::new(1, 1), &rate)? };
        let took = running.finish(&mut Watch {
            qps: &qps,
            timeout: case.timeout,
            tick: &mut |_| Ok(()),
        })?;
        let all = statuses.read()?;
        first_failure(&all, |_| qps.first())?;
        tally.seconds = took.as_secs_f64();
        tally.messages = all.iter().map(|s| s.completed).sum();
        let now = super::counters::read(&bench.device, &qps);
        if let Some(line) = super::counters::line(&super::counters::since(&now, &before)) {
            tally.notes.push(format!("RoCE: {line}"));
        }
        self.talk.sync("its word that the run is over")?;
        let rate = tally.messages as f64 / tally.seconds.max(1e-9);
        self.talk.report(&Report {
            size: case.size,
            iters,
            peak: 0.0,
            // MiB a second, and millions of messages a second, as perftest prints them.
            average: rate * case.size as f64 / f64::from(1 << 20),
            rate: rate / 1e6,
        })?;
        self.talk.close()?;
        Ok(tally.measured(case, bench, None))
    }

    /// `ib_send_bw` as its client.
    fn sender(mut self, bench: &Bench, case: &Case, connected: Connected) -> Result<Measured> {
        let (qp, iters) = (connected.qp()?, told(case)?);
        // The server has posted its receives now.
        self.talk.sync("its word that it has posted its receives")?;
        let mut cpu = CpuQp::new(qp)?;
        let queue = cpu.queue()?;
        let local = cpu::local(&connected.mr, 0, case.size);
        let mut under_way = VecDeque::new();
        let started = Instant::now();
        for _ in 0..iters {
            let by = deadline(case.timeout);
            if under_way.len() >= SENDING
                && let Some(oldest) = under_way.pop_front()
            {
                queue.wait(oldest, by).map_err(failed)?;
            }
            under_way.push_back(queue.send(local, Post::by(by)).map_err(failed)?);
        }
        queue.flush(deadline(case.timeout)).map_err(failed)?;
        let took = started.elapsed();
        self.talk.close()?;
        Ok(tallied(bench, case, &connected, iters, took))
    }

    /// `ib_send_bw` as its server.
    fn receiver(mut self, bench: &Bench, case: &Case, connected: Connected) -> Result<Measured> {
        let (qp, iters) = (connected.qp()?, told(case)?);
        let mut cpu = CpuQp::new(qp)?;
        let (_queue, recv) = cpu.queues()?;
        let local = cpu::local(&connected.mr, 0, case.size);
        let mut posted = VecDeque::new();
        let mut left = iters;
        while left > 0 && posted.len() < super::messages::RECEIVES as usize {
            let by = deadline(case.timeout);
            posted.push_back(recv.recv_post(local, by).map_err(failed)?);
            left -= 1;
        }
        self.talk.sync("its word that it is about to send")?;
        let mut started = None;
        while let Some(ticket) = posted.pop_front() {
            let by = deadline(case.timeout);
            let received = recv.recv_wait(ticket, by).map_err(failed)?;
            started.get_or_insert_with(Instant::now);
            ensure!(
                u64::from(received.bytes) == case.size,
                "a message of {} bytes came instead of {}: give both sides the same size",
                received.bytes,
                case.size
            );
            if left > 0 {
                posted.push_back(recv.recv_post(local, by).map_err(failed)?);
                left -= 1;
            }
        }
        let took = started.map_or(Duration::ZERO, |s| s.elapsed());
        self.talk.patience(case.timeout);
        // Acknowledgements may still be wanted while the other side ends.
        let mut drive = || {
            while bench.device.poll() {}
            Ok(())
        };
        self.talk
            .sync_while("its word that the run is over", &mut drive)?;
        self.talk.done()?;
        Ok(tallied(bench, case, &connected, iters, took))
    }

    fn server(
        mut self,
        args: &PerfArgs,
        bench: &Bench,
        case: &Case,
        connected: Connected,
    ) -> Result<Measured> {
        let stop = crate::signals::watch()?;
        self.talk.patience(RUN);
        let qp = connected.qps.first().context("no queue pair")?;
        // Its word comes when it has measured; an engine without a thread is driven meanwhile.
        self.talk
            .sync_while("its word that the run is over", &mut || {
                ensure!(
                    !stop.load(std::sync::atomic::Ordering::Relaxed),
                    "a signal came"
                );
                qp.check()?;
                for _ in 0..4096 {
                    bench.device.poll();
                }
                Ok(())
            })?;
        self.talk.patience(args.timeout);
        let theirs = self.talk.report(&Report::default())?;
        self.talk.close()?;
        let messages = theirs.iters;
        let mut tally = Tally {
            messages,
            ..Tally::default()
        };
        if theirs.rate > 0.0 {
            tally.seconds = messages as f64 / (theirs.rate * 1e6);
        }
        tally.notes.push(format!(
            "ib_write_bw reports {} messages of {} bytes, {:.2} MiB/s, {:.6} Mpps",
            theirs.iters, theirs.size, theirs.average, theirs.rate
        ));
        let counters = super::counters::read(&bench.device, &connected.qps);
        if let Some(line) = super::counters::line(&counters) {
            tally.notes.push(format!("RoCE: {line}"));
        }
        Ok(tally.measured(case, bench, None))
    }
}

/// The program's name.
fn program(test: Test) -> &'static str {
    match test {
        Test::SendBw => "ib_send_bw",
        _ => "ib_write_bw",
    }
}

/// How many messages there are.
fn told(case: &Case) -> Result<u64> {
    match case.limit {
        Limit::Iters(iters) => Ok(iters),
        Limit::Time(_) => bail!("perftest is told a number of messages: use --iters"),
    }
}

fn failed(error: doorbell::device_api::Error) -> anyhow::Error {
    anyhow::anyhow!(crate::foreign::explain(error.code()))
}

fn tallied(
    bench: &Bench,
    case: &Case,
    connected: &Connected,
    messages: u64,
    took: Duration,
) -> Measured {
    let mut tally = Tally {
        messages,
        seconds: took.as_secs_f64(),
        ..Tally::default()
    };
    let counters = super::counters::read(&bench.device, &connected.qps);
    if let Some(line) = super::counters::line(&counters) {
        tally.notes.push(format!("RoCE: {line}"));
    }
    tally.measured(case, bench, None)
}

impl Connected {
    fn qp(&self) -> Result<&Qp> {
        self.qps.first().context("no queue pair")
    }
}

/// A queue pair, connected, this side's buffer, and the other's.
struct Connected {
    qps: Vec<Qp>,
    mr: doorbell::Mr,
    theirs: Keys,
}

fn sense(args: &PerfArgs) -> Result<()> {
    ensure!(
        matches!(args.link.kind, Link::Roce | Link::Verbs),
        "--peer perftest speaks RoCE: add --link roce, or --link verbs for an RDMA device"
    );
    ensure!(
        matches!(args.test, Test::PutBw | Test::SendBw),
        "--peer perftest is ib_write_bw or ib_send_bw: the test is put-bw or send-bw"
    );
    ensure!(
        args.initiator == [Initiator::Gpu]
            && args.blocks.0 == [1]
            && args.threads.is_none_or(|t| t == 1),
        "--peer perftest has one queue pair: leave --initiator, --blocks and --threads out"
    );
    ensure!(
        args.size.as_ref().is_none_or(|s| s.0.len() == 1),
        "--peer perftest runs one size: give both sides the same"
    );
    ensure!(
        !args.check && !args.quick && args.secs.is_none(),
        "the bytes are perftest's own, and it counts messages: leave --check, --quick and --secs out"
    );
    Ok(())
}

/// The case with perftest's own defaults where nothing was said.
pub(crate) fn case(args: &PerfArgs, mut case: Case) -> Case {
    if args.size.is_none() {
        case.size = SIZE;
    }
    case.limit = Limit::Iters(args.iters.unwrap_or(match args.test {
        Test::SendBw => SENDS,
        _ => ITERS,
    }));
    case.check = false;
    case
}
