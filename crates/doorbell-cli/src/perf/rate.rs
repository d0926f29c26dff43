//! `put-bw`, `get-bw`, `atomic-rate`: many messages in flight.
//!
//! Unchecked, one launch posts until its time or number is over, cycling through small windows.
//! Checked, launches alternate with the checking: every message of a round has a place of its
//! own with fresh bytes, and every byte of both sides is compared before the next round.

use std::time::{Duration, Instant};

use anyhow::Result;
use doorbell::{Export, Qp};
use doorbell_gpu::Dims;
use doorbell_kernels::params;

use super::bench::Bench;
use super::check::{Layout, Picture};
use super::engine::{self, Engine};
use super::far::{Far, Meter, Order};
use super::latency::alive;
use super::pace::Pace;
use super::plan::{Case, Limit};
use super::running::{DEADLINE, Running, Statuses, Watch, first_failure};
use super::side::{Side, SideSpec, area};
use super::tally::{Measured, Tally};
use super::{Context, atomic, counters, proxy, queues};
use crate::args::{Initiator, Link, Place, Sharing, Test};
use crate::cputime::CpuUse;

/// Measured seconds after which a quick case has no more rounds.
const QUICK: f64 = 0.5;

/// What a case is run with.
struct Rig<'a> {
    case: &'a Case,
    bench: &'a Bench,
    near: Side,
    far: Far<'a>,
    layout: Layout,
    places: u64,
    qps: Vec<Qp>,
    poster: Poster,
    statuses: Statuses,
    /// The target's process uses the same GPU.
    one_gpu: bool,
}

/// Who posts.
enum Poster {
    /// The kernel, on these queue pairs.
    Kernel(Export),
    /// CPU threads that serve these command rings.
    Proxy(doorbell::Proxy),
}

/// A launch's size: messages a thread, or a time.
#[derive(Clone, Copy)]
struct Share {
    iters: u64,
    run: Duration,
}

impl<'a> Rig<'a> {
    /// Starts a launch.
    ///
    /// # Safety
    /// This rig stays until the launch has ended.
    unsafe fn start(&self, share: Share) -> Result<Running<'a>> {
        let case = self.case;
        let dims = Dims::new(case.blocks, case.threads);
        let deadline_ns = (share.run + DEADLINE).as_nanos() as u64;
        let near = area(&self.near.reach(), &self.layout, self.places);
        let far = area(&self.far.reach(), &self.layout, self.places);
        let run_ns = share.run.as_nanos() as u64;
        match &self.poster {
            Poster::Kernel(export) => {
                let mut rate = params::Rate {
                    qps: export.table_addr(),
                    qp_count: export.len() as u32,
                    sharing: sharing(case.sharing),
                    op: params::op::PUT,
                    flags: match case.sharing {
                        Sharing::Exclusive => params::flags::QP_BY_THREAD,
                        Sharing::Block | Sharing::Gpu => 0,
                    },
                    batch: case.batch,
                    reserved: 0,
                    size: case.size,
                    iters: share.iters,
                    run_ns,
                    deadline_ns,
                    local: near,
                    remote: far,
                    signal: 0,
                    signal_key: 0,
                    reserved2: 0,
                    status: self.statuses.addr(),
                };
                let kernel = match case.test {
                    Test::GetBw => "get_bw",
                    Test::AtomicRate => {
                        rate.remote = atomic::words(&self.far.reach(), &self.layout);
                        "atomic_rate"
                    }
                    _ => "put_bw",
                };
                // SAFETY: the structure is this kernel's; queues, windows and status memory are of
                // this bench and live in `self`, which stays.
                unsafe {
                    self.bench
                        .start(kernel, case.foreign.is_some(), dims, &rate)
                }
            }
            Poster::Proxy(proxy) => {
                let params = proxy::params(proxy, &near, &far, case.size, share.iters, |p| {
                    p.run_ns = run_ns;
                    p.deadline_ns = deadline_ns;
                    p.status = self.statuses.addr();
                });
                // SAFETY: as above.
                let running = unsafe {
                    self.bench
                        .start("proxy_put", case.foreign.is_some(), dims, &params)
                };
                Ok(running?.driven_by_others())
            }
        }
    }

    /// One launch, from start to end, into `tally`.
    fn round(
        &mut self,
        share: Share,
        tally: &mut Tally,
        tick: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let before = self.executed();
        let meter = Meter::start(self.far.partner())?;
        // SAFETY: the launch is waited for here; should that fail, dropping it waits.
        let running = unsafe { self.start(share)? };
        let (far, timeout) = (&mut self.far, self.case.timeout);
        let took = running.finish(&mut Watch {
            qps: &self.qps,
            timeout,
            tick: &mut |executed| {
                alive(far.partner(), timeout)?;
                tick(executed)
            },
        });
        let took = took.map_err(|e| self.blame(e))?;
        let statuses = self.statuses.read()?;
        // Before the peer is asked for anything: one that cannot be reached by packets does not answer by TCP either.
        first_failure(&statuses, |thread| self.qp_of(thread))?;
        let mut used = CpuUse::default();
        meter.stop(self.far.partner(), &mut used)?;
        let completed: u64 = statuses.iter().map(|s| s.completed).sum();
        tally.seconds += took.as_secs_f64();
        tally.messages += completed;
        tally.cpu.cpu += used.cpu;
        tally.cpu.wall += used.wall;
        let executed = self.executed() - before;
        if executed != completed {
            tally.fault(format!(
                "{completed} messages were completed but {executed} work requests executed: lost or doubled"
            ));
        }
        Ok(())
    }

    fn executed(&self) -> u64 {
        self.qps.iter().map(|qp| qp.counters().wqes).sum()
    }

    fn qp_of(&self, thread: u64) -> Option<&Qp> {
        let index = match self.case.sharing {
            Sharing::Exclusive => thread,
            Sharing::Block => thread / u64::from(self.case.threads),
            Sharing::Gpu => 0,
        };
        self.qps.get(index as usize)
    }

    /// What the threads and the proxy say about a run that was given up.
    fn blame(&self, error: anyhow::Error) -> anyhow::Error {
        if let Poster::Proxy(proxy) = &self.poster
            && let Some((queue, e)) = proxy.failed()
            // Closed: that is how the run was given up, and no reason.
            && e != doorbell_device::Error::CLOSED
        {
            return error.context(format!("proxy queue {queue}: {e}"));
        }
        error
    }
}

/// The sharing mode as kernels take it.
pub(crate) fn sharing(sharing: Sharing) -> u32 {
    match sharing {
        Sharing::Exclusive => params::sharing::EXCLUSIVE,
        Sharing::Block => params::sharing::BLOCK,
        Sharing::Gpu => params::sharing::GPU,
    }
}

/// Measures, and checks if asked to.
pub(crate) fn run(context: &mut Context, case: &Case) -> Result<Measured> {
    let bench = context.benches.of(case)?;
    let partner = context.partner.as_mut();
    let shared = case.link == Link::Shm;
    let places = case.places();
    let layout = match case.test {
        Test::AtomicRate => Layout::new(case.grid(), places * 8),
        _ => Layout::new(case.grid(), places * case.size),
    };
    let near = SideSpec {
        layout,
        on_gpu: case.local_mem == Place::Gpu,
        shared: false,
        verbs: false,
    };
    let far = SideSpec {
        on_gpu: case.mem == Place::Gpu,
        shared,
        verbs: case.link == Link::Verbs,
        layout: match case.test {
            Test::AtomicRate => atomic::far_layout(),
            _ => layout,
        },
    };
    let near = Side::new(&bench.pd, &bench.device, &near)?;
    let mut far = Far::new(&bench, partner, &far)?;
    let qps = queues::make(&bench, case, case.qps, far.partner())?;
    let needed = case.posters();
    let poster = match case.initiator {
        Initiator::Proxy => Poster::Proxy(proxy::start(
            &bench,
            &qps[..needed],
            case,
            &near,
            &far.reach(),
        )?),
        _ => Poster::Kernel(queues::export(&qps[..needed])?),
    };
    let statuses = Statuses::new(&bench, case.grid())?;
    let mut rig = Rig {
        case,
        bench: &bench,
        near,
        far,
        layout,
        places,
        qps,
        poster,
        statuses,
        one_gpu: context.one_gpu,
    };
    let mut tally = Tally::default();
    let before = Engine::read(&bench.device, &rig.qps);
    let copies = engine::copies(&bench.device);
    let watch = counters::Watch::start(&bench.device, &rig.qps, case.link, rig.far.partner())?;
    let progress = &mut context.progress;
    if case.check {
        checked(&mut rig, &mut tally, &mut |share| {
            progress.at(share, &case.label())
        })?;
    } else {
        unchecked(&mut rig, &mut tally, &mut |share| {
            progress.at(share, &case.label())
        })?;
    }
    tally
        .notes
        .extend(engine::copies_since(&bench.device, copies));
    if case.counters {
        let after = Engine::read(&bench.device, &rig.qps);
        tally.notes.push(after.since(&before));
    }
    watch.end(&bench.device, &rig.qps, rig.far.partner(), &mut tally)?;
    if let Some(partner) = rig.far.partner() {
        let () = partner.ask("clear up", &Order::Clear)?;
    }
    drop(rig);
    let baseline = context.baselines.rate(case, &bench)?;
    Ok(tally.measured(case, &bench, baseline))
}

fn unchecked(rig: &mut Rig<'_>, tally: &mut Tally, show: &mut dyn FnMut(f64)) -> Result<()> {
    let case = rig.case;
    let (source, sink) = (
        Picture::source(case.seed, 0),
        Picture::sink(case.seed, 0, 0),
    );
    paint(rig, &source, &sink)?;
    let share = match case.limit {
        Limit::Iters(iters) => Share {
            iters,
            run: Duration::ZERO,
        },
        Limit::Time(run) => Share {
            iters: u64::MAX >> 8,
            run,
        },
    };
    let total = share.iters.saturating_mul(case.grid());
    let before = rig.executed();
    let started = Instant::now();
    let mut tick = |executed: u64| {
        show(match case.limit {
            Limit::Iters(_) => (executed - before) as f64 / total as f64,
            Limit::Time(run) => started.elapsed().as_secs_f64() / run.as_secs_f64(),
        });
        Ok(())
    };
    rig.round(share, tally, &mut tick)?;
    if case.test == Test::AtomicRate {
        atomic::verify_sum(&mut rig.far, &sink, tally)?;
    }
    Ok(())
}

fn checked(rig: &mut Rig<'_>, tally: &mut Tally, show: &mut dyn FnMut(f64)) -> Result<()> {
    let case = rig.case;
    let mut pace = Pace::new(case);
    let mut round = 0;
    while pace.left() > 0 {
        let most = pace.left().min(rig.places);
        // Elsewhere a window takes a fraction of a second, and painting and comparing it as long however little was moved.
        // A quick run over a network, with packets of which some are lost or a device of whatever speed, is one whose first window could
        // take minutes.
        let network = matches!(case.link, Link::Roce | Link::Verbs);
        let paced = rig.one_gpu || (case.quick && network);
        let iters = if paced { pace.next(most) } else { most };
        let bytes = iters
            * if case.test == Test::AtomicRate {
                8
            } else {
                case.size
            };
        round += 1;
        let source = Picture::source(case.seed, round);
        let empty = Picture::sink(case.seed, round, 0);
        let full = Picture::sink(case.seed, round, bytes);
        paint(rig, &source, &empty)?;
        let share = Share {
            iters,
            run: Duration::ZERO,
        };
        let before = tally.seconds;
        rig.round(share, tally, &mut |_| Ok(()))?;
        pace.took(iters, Duration::from_secs_f64(tally.seconds - before));
        if case.sabotage {
            rig.far.sabotage()?;
        }
        match case.test {
            Test::AtomicRate => atomic::verify(
                &rig.near,
                &mut rig.far,
                &rig.layout,
                case,
                iters,
                round,
                tally,
            )?,
            Test::GetBw => {
                tally.verdict("the initiator's memory", rig.near.verify(&full)?);
                tally.verdict("the target's memory", rig.far.verify(&source)?);
            }
            _ => {
                tally.verdict("the target's memory", rig.far.verify(&full)?);
                tally.verdict("the initiator's memory", rig.near.verify(&source)?);
            }
        }
        if tally.errors > 0 {
            // What follows would be wrong for the same reason.
            break;
        }
        let share = match case.limit {
            // Painting and comparing take their time too, over a network most of it.
            Limit::Iters(_) if case.quick => pace.share().max(tally.seconds / QUICK),
            Limit::Iters(_) => pace.share(),
            // They are no part of the time that was asked for.
            Limit::Time(run) => tally.seconds / run.as_secs_f64(),
        };
        show(share);
        if share >= 1.0 {
            break;
        }
    }
    Ok(())
}

/// Fills both sides: who is read from, and who is written to.
fn paint(rig: &mut Rig<'_>, source: &Picture, sink: &Picture) -> Result<()> {
    match rig.case.test {
        Test::AtomicRate => atomic::paint(&rig.near, &mut rig.far, sink),
        Test::GetBw => {
            rig.near.paint(sink)?;
            rig.far.paint(source)
        }
        _ => {
            rig.near.paint(source)?;
            rig.far.paint(sink)
        }
    }
}
