//! `doorbell perf`: plan the cases, run each on queues of its own, check, report.
//!
//! `plan` turns arguments into cases; `bench` opens what they run on; `rate`, `latency`, `forward`
//! and `post` each measure one family of tests; `peer` is the second process, and `remote` knows where it is.

mod atomic;
mod baseline;
mod baselines;
pub(crate) mod bench;
mod check;
pub(crate) mod counters;
mod end;
mod engine;
mod far;
mod forward;
pub(crate) mod lab;
mod latency;
mod messages;
mod pace;
mod patience;
pub(crate) mod peer;
mod perftest;
pub(crate) mod pipe;
pub(crate) mod plan;
mod post;
mod proxy;
mod queues;
mod rate;
pub(crate) mod remote;
mod report;
mod running;
mod side;
pub(crate) mod tally;
pub(crate) mod terms;

use std::path::Path;

use anyhow::{Context as _, Result};
use doorbell::{GpuSelect, Source, Syndrome};
use rand::RngCore;

use self::baselines::Baselines;
use self::bench::{Bench, Benches};
use self::pipe::Partner;
use self::plan::{Case, Defaults};
use self::remote::Second;
use self::report::Reporter;
use self::tally::Measured;
use crate::args::{Handler, Initiator, Link, PeerProgram, PerfArgs, Sharing, Test};
use crate::environment::Machine;
use crate::progress::Progress;
use crate::schema::Environment;
use crate::{Ended, WrongArguments, lists, units};

/// What the cases of a run share.
struct Context {
    benches: Benches,
    partner: Option<Partner>,
    baselines: Baselines,
    progress: Progress,
    /// The second process uses the same GPU.
    one_gpu: bool,
}

impl Context {
    /// Meets the second process, if there is one.
    fn meet(
        &mut self,
        second: Second,
        args: &PerfArgs,
        bench: &Bench,
        pin: Option<usize>,
    ) -> Result<()> {
        self.partner = second.partner(args, bench, pin)?;
        let info = bench.device.gpu_info();
        if let (Some(own), Some(partner), false) = (&info.uuid, &mut self.partner, info.mps) {
            let theirs: Option<String> = partner.ask("name its GPU", &far::Order::Gpu)?;
            self.one_gpu = theirs.as_ref() == Some(own);
        }
        Ok(())
    }
}

/// Runs all cases.
pub(crate) fn run(args: &PerfArgs) -> Result<Ended> {
    let machine = Machine::read();
    // Options that do not go together are said before anybody is dialled.
    let settings = crate::config::of_perf(args, None).resolve()?;
    let seed = args.seed.unwrap_or_else(|| rand::rng().next_u64());
    let mut cases =
        plan::cases(args, &defaults(&settings), seed).map_err(|e| e.context(WrongArguments))?;
    let pins = pins(args)?;
    let foreign = match args.remote.peer {
        Some(PeerProgram::Perftest) => Some(perftest::Peer::find(args)?),
        None => None,
    };
    let second = match foreign {
        Some(_) => Second::None,
        None => Second::find(args)?,
    };
    if let Second::Answering(line) = second {
        return remote::answer(args, line, pins.and_then(|p| p.1));
    }
    if let Some((own, _)) = pins {
        crate::pin::to(own)?;
    }
    let usual = match &foreign {
        Some(foreign) => Some(foreign.port(args.link.kind)),
        None => second.port(args.link.kind),
    };
    let config = crate::config::of_perf(args, usual.as_deref());
    if foreign.is_some() {
        cases = cases.into_iter().map(|c| perftest::case(args, c)).collect();
    }
    let cases = cases;
    let Some(first) = cases.first() else {
        return Ok(Ended::Well);
    };
    let started = crate::environment::utc_now();
    let mut context = Context {
        benches: Benches::new(config, args.module.as_deref())?
            .alone(args.link.kind == crate::args::Link::Loopback),
        partner: None,
        baselines: Baselines::new(pins.and_then(|p| p.1)),
        progress: Progress::new(cases.len()),
        one_gpu: false,
    };
    let bench = context.benches.of(first)?;
    fits(&cases, &bench).map_err(|e| e.context(WrongArguments))?;
    context.meet(second, args, &bench, pins.and_then(|p| p.1))?;
    // Found out now, not when the results are there and cannot be kept.
    if let Some(path) = &args.json {
        report::check_json(path)?;
    }
    if let Some(path) = &args.trace {
        doorbell::report::trace::check(path)?;
    }
    let json_on_stdout = args.json.as_deref() == Some(Path::new("-"));
    let mut reporter = Reporter::new(args.test, json_on_stdout);
    const OUTPUT: &str = "writing to standard output";
    let mut lines = heading(first, &bench, &machine);
    if let Some(partner) = &context.partner {
        lines.extend(partner.negotiated());
    }
    lines.extend(context.one_gpu.then(|| ONE_GPU.to_owned()));
    lines.extend(foreign.as_ref().map(perftest::Peer::name));
    reporter.heading(&lines).context(OUTPUT)?;
    let failed = match foreign {
        None => all(&mut context, &cases, &mut reporter).err(),
        Some(foreign) => match foreign.run(args, &mut context.benches, first) {
            Ok(measured) => reporter.row(first.clone(), measured).err().map(Into::into),
            Err(e) => Some(e),
        },
    };
    context.progress.end();
    if failed.is_none() {
        reporter.ratios().context(OUTPUT)?;
    }
    reporter.summary().context(OUTPUT)?;
    if let Some(path) = &args.json {
        let environment = environment(first, &bench, &machine, started, seed);
        reporter.write_json(path, environment)?;
    }
    // While the peer is still there.
    if let Some(path) = &args.trace {
        bench.device.write_trace(path)?;
    }
    if failed.is_none()
        && let Some(partner) = &mut context.partner
    {
        partner.part(reporter.errors() == 0)?;
    }
    match failed {
        Some(error) => {
            if let Some(partner) = context.partner.take() {
                partner.give_up(&format!("the initiator gave up: {}", crate::words(&error)));
            }
            Err(error)
        }
        None if reporter.errors() > 0 => Ok(Ended::CheckFailed),
        None => Ok(captured(&bench.device)),
    }
}

/// What holds where no argument says otherwise.
fn defaults(settings: &doorbell::Settings) -> Defaults {
    Defaults {
        depth: settings.depth,
        depth_free: settings
            .explain()
            .iter()
            .any(|s| s.name == "depth" && s.source == Source::Default),
        handler: match settings.handler {
            doorbell::Handler::Record => Handler::Record,
            doorbell::Handler::Only => Handler::Doorbell,
            doorbell::Handler::Producer => Handler::Producer,
        },
    }
}

/// What the RoCE ports of a device went through, if anything was retried, dropped or refused; `None` if nothing was.
pub(crate) fn roce_line(device: &doorbell::Device) -> Option<String> {
    counters::line(&counters::read::<doorbell::Qp>(device, &[]))
}

/// What to know of a run whose two processes have one GPU.
const ONE_GPU: &str = "one GPU serves both processes, which take turns of milliseconds: what one waits for from the other's kernel or copies takes a \
    turn, whatever its size (--peer-gpu names another GPU; the Multi-Process Service does without turns)";

/// How a run that was well ended: its capture may not be whole.
pub(crate) fn captured(device: &doorbell::Device) -> Ended {
    let counters = counters::read::<doorbell::Qp>(device, &[]);
    match counters.get("capture_lost") {
        None | Some(0) => Ended::Well,
        Some(&lost) => Ended::CaptureCut { lost },
    }
}

/// The host GPU bounds the threads of a kernel, each being one of the system: told before the queues of so many are made.
fn fits(cases: &[Case], bench: &Bench) -> Result<()> {
    let limit = u64::from(doorbell::MAX_HOST_THREADS);
    let most = cases
        .iter()
        .filter(|c| c.initiator != Initiator::Cpu)
        .map(|c| u64::from(c.blocks) * u64::from(c.threads))
        .max()
        .unwrap_or(0);
    anyhow::ensure!(
        bench.device.gpu().is_cuda() || most <= limit,
        "{most} threads are more than the host GPU runs ({limit}): lower --blocks or --threads, or use a CUDA GPU"
    );
    // One that was not given by --depth, which has the same bound: a put with a signal is two work requests.
    anyhow::ensure!(
        cases.iter().all(|c| c.depth >= 2),
        "queues of 1 slot (DOORBELL_DEPTH) are too short for these tests: give --depth, from 2 to 32768"
    );
    Ok(())
}

fn all(context: &mut Context, cases: &[Case], reporter: &mut Reporter) -> Result<()> {
    for case in cases {
        context.progress.at(0.0, &case.label());
        let measured = measure(context, case).map_err(|e| explain(context, case, e))?;
        context.progress.next();
        crate::progress::beside(|| reporter.row(case.clone(), measured))?;
    }
    Ok(())
}

fn measure(context: &mut Context, case: &Case) -> Result<Measured> {
    let bench = context.benches.of(case)?;
    if let Some(partner) = &mut context.partner {
        partner.works_with(&bench.device);
    }
    match case.test {
        Test::PutBw | Test::GetBw | Test::AtomicRate => rate::run(context, case),
        Test::PutLat | Test::GetLat | Test::SignalLat => latency::run(context, case),
        Test::SendBw | Test::SendLat => messages::run(context, case),
        Test::Forward => forward::run(context, case),
        Test::Post => post::run(context, case),
    }
}

/// An error with the case it ended, and with the peer's death if that is what is behind it.
fn explain(context: &mut Context, case: &Case, error: anyhow::Error) -> anyhow::Error {
    // A queue pair fails before the patience with a silent peer ends; that it is silent is what is behind it.
    let error = match context.partner.as_mut().map(Partner::last_word) {
        // The error may be that very end, as somebody who waited for an answer found it.
        Some(Err(_)) if error.is::<pipe::PeerEnd>() => error,
        Some(Err(death)) => error.context(death.to_string()),
        // In words, which is how the peer says what failed there.
        _ if names(&error, Syndrome::TRANSPORT_RETRY) => {
            let heard = context.partner.as_ref().and_then(Partner::heard);
            let refused = context.benches.of(case).ok().and_then(|bench| {
                counters::refused(&counters::read::<doorbell::Qp>(&bench.device, &[]))
            });
            let known = heard.into_iter().chain(refused).collect::<Vec<_>>();
            match known.is_empty() {
                true => error,
                false => error.context(known.join("; ")),
            }
        }
        _ => error,
    };
    error.context(case.label())
}

fn names(error: &anyhow::Error, syndrome: Syndrome) -> bool {
    let name = syndrome.name();
    name.is_some_and(|name| crate::words(error).contains(name))
}

/// CPUs for this process and the second one: as asked, or for two spinning processes one each.
fn pins(args: &PerfArgs) -> Result<Option<(usize, Option<usize>)>> {
    if let Some(lists::Pins(asked)) = args.pin {
        return Ok(asked);
    }
    let host = args.device.gpu == Some(GpuSelect::Host);
    let allowed = crate::pin::allowed();
    let two = args.link.kind != Link::Loopback && args.device.hca_cores == Some(0) && host;
    Ok(match allowed.as_slice() {
        [a, b, ..] if two => Some((*a, Some(*b))),
        _ => None,
    })
}

/// What is about to be measured, in words.
fn heading(case: &Case, bench: &Bench, machine: &Machine) -> Vec<String> {
    let gpu = match bench.device.gpu().is_cuda() {
        true => bench.gpu_label(),
        false => format!("GPU played by host threads ({} CPUs)", machine.cpus),
    };
    let hca = match bench.cores() {
        _ if case.test == Test::Post => "no engine".to_owned(),
        0 => "software HCA driven by whoever waits".to_owned(),
        1 => "software HCA on 1 core".to_owned(),
        n => format!("software HCA on {n} cores"),
    };
    let link = match case.test {
        Test::Post => format!("queues in {} memory", case.queue_mem.name()),
        _ => format!(
            "{}, payloads in {} memory",
            case.link.name(),
            case.mem.name()
        ),
    };
    let checked = match (case.check, case.test) {
        (true, Test::Post) => format!("; rings checked, seed {:#x}", case.seed),
        (true, _) => format!("; every byte checked, seed {:#x}", case.seed),
        (false, _) => String::new(),
    };
    vec![
        format!("{}: {gpu}, {hca}, {link}", case.test.name()),
        format!(
            "{}, {} slots each, handler {}, {} CQ{checked}",
            match case.sharing {
                Sharing::Exclusive => "a QP a thread",
                Sharing::Block => "a QP a block",
                Sharing::Gpu => "one QP for all threads",
            },
            units::grouped(case.depth.into()),
            case.handler.name(),
            case.cq.name()
        ),
    ]
}

fn environment(
    case: &Case,
    bench: &Bench,
    machine: &Machine,
    started: String,
    seed: u64,
) -> Environment {
    let info = bench.device.gpu_info();
    let post = case.test == Test::Post;
    Environment {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        git: option_env!("DOORBELL_GIT").map(str::to_owned),
        profile: option_env!("DOORBELL_PROFILE").map(str::to_owned),
        target: option_env!("DOORBELL_TARGET").map(str::to_owned),
        command: std::env::args_os()
            .map(|word| word.to_string_lossy().into_owned())
            .collect(),
        started,
        kernel: machine.kernel.clone(),
        cpu: machine.cpu.clone(),
        cpus: machine.cpus,
        cpu_quota: machine.cpu_quota,
        memory_bytes: machine.memory_bytes,
        gpu: Some(bench.gpu_label()),
        driver: crate::environment::nvidia_driver().filter(|_| bench.device.gpu().is_cuda()),
        cuda: info
            .driver_version
            .map(|(major, minor)| format!("{major}.{minor}")),
        handler: Some(case.handler.name().to_owned()),
        cq: Some(case.cq.name().to_owned()),
        queue_mem: Some(case.queue_mem.name().to_owned()),
        hca_cores: (!post).then(|| bench.cores().into()),
        seed: Some(seed),
    }
}
