//! `put-lat`, `signal-lat`, `get-lat`: one message at a time.
//!
//! `put-lat` and `signal-lat` are ping-pongs between two kernel threads, of one process or of two;
//! the figure is half of the round trip, as in perftest. `get-lat` is the time from posting a READ
//! to knowing that its bytes are here. Runs are cut into launches, each short enough for a deadline.
//! Checked, every launch has fresh bytes and both ends' memory is compared after it.

use std::time::{Duration, Instant};

use anyhow::Result;
use doorbell::Memory;
use doorbell_device::QpHandle;
use doorbell_gpu::Dims;
use doorbell_kernels::params;
use serde::{Deserialize, Serialize};

use super::bench::Bench;
use super::check::{Layout, Picture};
use super::end::{End, EndSpec, Faults};
use super::far::{Far, Meter, Order};
use super::pace::Pace;
use super::pipe::Partner;
use super::plan::Case;
use super::running::{DEADLINE, Statuses, Watch, first_failure};
use super::side::{Reach, Side, SideSpec, on};
use super::tally::{Measured, Tally};
use super::{Context, counters, queues};
use crate::args::{Link, Place, Test};

/// Rounds of a launch, unless messages are large.
const ROUNDS: u64 = 16_384;
/// Bytes that a launch moves at most each way, so that it ends well within its time-out.
const LAUNCH_BYTES: u64 = 256 << 20;
/// Rounds at the start of a launch that are not counted: its other block may not run yet.
const WARM_UP: u64 = 16;

/// How many rounds a launch has.
pub(crate) fn rounds(case: &Case, left: u64) -> u64 {
    let most = if case.check && case.size > 8 {
        // Each launch checks one payload: more launches, more payloads.
        256
    } else if case.quick {
        // Short enough to stop in time where messages are slow.
        1024
    } else {
        ROUNDS
    };
    most.min((LAUNCH_BYTES / case.size).max(4)).min(left)
}

/// Samples for which a launch has room.
pub(crate) struct Samples(Memory);

impl Samples {
    pub(crate) fn new(bench: &Bench) -> Result<Self> {
        Ok(Self(
            bench
                .device
                .alloc(doorbell::Place::Host, 8 * ROUNDS as usize)?,
        ))
    }

    /// The pointer that kernels take.
    pub(crate) fn device_addr(&self) -> u64 {
        self.0.device_addr()
    }

    /// The first `n`, without the warm-up, divided by `by`.
    pub(crate) fn collect(&self, n: u64, by: u64, into: &mut Vec<u64>) -> Result<()> {
        let mut bytes = vec![0; 8 * n as usize];
        self.0.read(0, &mut bytes)?;
        let skip = WARM_UP.min(n / 4) as usize;
        let words = bytes.as_chunks::<8>().0.iter().skip(skip);
        into.extend(words.map(|w| u64::from_ne_bytes(*w) / by));
        Ok(())
    }
}

/// Runs launches until the limit is reached.
fn launches(
    context: &mut Context,
    case: &Case,
    tally: &mut Tally,
    mut launch: impl FnMut(&mut Context, u64, u64, &mut Tally) -> Result<()>,
) -> Result<()> {
    let mut pace = Pace::new(case);
    let mut number = 0;
    while pace.left() > 0 && tally.errors == 0 {
        number += 1;
        let n = pace.next(rounds(case, pace.left()));
        let before = Instant::now();
        launch(context, number, n, tally)?;
        pace.took(n, before.elapsed());
        let share = pace.share();
        context.progress.at(share, &case.label());
        if share >= 1.0 {
            break;
        }
    }
    tally.messages = tally.samples.len() as u64;
    Ok(())
}

/// Measures, and checks if asked to.
pub(crate) fn run(context: &mut Context, case: &Case) -> Result<Measured> {
    let bench = context.benches.of(case)?;
    let mut tally = Tally::default();
    match case.test {
        Test::GetLat => gets(context, &bench, case, &mut tally)?,
        _ => ping_pong(context, &bench, case, &mut tally)?,
    }
    let baseline = context.baselines.round_trip(case, &bench)?;
    Ok(tally.measured(case, &bench, baseline))
}

fn blank() -> params::End {
    params::End {
        qp: QpHandle {
            qp: std::ptr::null_mut(),
            ext: std::ptr::null_mut(),
        },
        send: 0,
        send_addr: 0,
        remote_addr: 0,
        signal_addr: 0,
        recv: 0,
        signal: 0,
        send_key: 0,
        remote_key: 0,
        signal_key: 0,
        reserved: 0,
        samples: 0,
        status: 0,
    }
}

fn gets(context: &mut Context, bench: &Bench, case: &Case, tally: &mut Tally) -> Result<()> {
    let layout = Layout::new(1, case.size);
    let shared = case.link == Link::Shm;
    let near = SideSpec {
        layout,
        on_gpu: case.local_mem == Place::Gpu,
        shared: false,
        verbs: false,
    };
    let far = SideSpec {
        layout,
        on_gpu: case.mem == Place::Gpu,
        shared,
        verbs: case.link == Link::Verbs,
    };
    let near = Side::new(&bench.pd, &bench.device, &near)?;
    let mut partner = context.partner.take();
    let mut far = Far::new(bench, partner.as_mut(), &far)?;
    let qps = queues::make(bench, case, case.qps, far.partner())?;
    let watch = counters::Watch::start(&bench.device, &qps, case.link, far.partner())?;
    let export = queues::export(&qps[..1])?;
    let (statuses, samples) = (Statuses::new(bench, 1)?, Samples::new(bench)?);
    let mut end = blank();
    end.qp = export.handle();
    end.send_addr = near.reach().addr + layout.lead();
    end.send_key = near.reach().key;
    end.remote_addr = far.reach().addr + layout.lead();
    end.remote_key = far.reach().key;
    end.samples = samples.device_addr();
    end.status = statuses.addr();
    launches(context, case, tally, |_, number, n, tally| {
        let source = Picture::source(case.seed, number);
        if case.check || number == 1 {
            near.paint(&Picture::sink(case.seed, number, 0))?;
            far.paint(&source)?;
        }
        let params = params::Latency {
            ends: [end, blank()],
            first: 0,
            inline: 0,
            size: case.size,
            iters: n,
            deadline_ns: DEADLINE.as_nanos() as u64,
        };
        let meter = Meter::start(far.partner())?;
        // SAFETY: the structure is this kernel's; queue, windows, samples and status are of this bench and
        // outlive the launch, which is waited for here.
        let running =
            unsafe { bench.start("get_lat", case.foreign.is_some(), Dims::new(1, 1), &params)? };
        let took = running.finish(&mut Watch {
            qps: &qps,
            timeout: case.timeout,
            tick: &mut |_| alive(far.partner(), case.timeout),
        })?;
        first_failure(&statuses.read()?, |_| qps.first())?;
        meter.stop(far.partner(), &mut tally.cpu)?;
        tally.seconds += took.as_secs_f64();
        samples.collect(n, 1, &mut tally.samples)?;
        if case.check {
            let full = Picture::sink(case.seed, number, case.size);
            tally.verdict("the initiator's memory", near.verify(&full)?);
            tally.verdict("the target's memory", far.verify(&source)?);
        }
        Ok(())
    })?;
    watch.end(&bench.device, &qps, far.partner(), tally)?;
    if let Some(partner) = far.partner() {
        let () = partner.ask("clear up", &Order::Clear)?;
    }
    context.partner = partner;
    Ok(())
}

/// What a peer process must know to play the second end of a launch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PlayOrder {
    pub(crate) signal: bool,
    pub(crate) size: u64,
    pub(crate) iters: u64,
    pub(crate) deadline_ns: u64,
    pub(crate) seed: u64,
    pub(crate) number: u64,
    pub(crate) check: bool,
    /// The first end's memory.
    pub(crate) other: Reach,
}

impl PlayOrder {
    /// The kernel that plays it.
    pub(crate) fn kernel(&self) -> &'static str {
        if self.signal { "signal_lat" } else { "put_lat" }
    }
}

/// What a kernel takes for one end.
pub(crate) fn end_params(
    end: &End,
    qp: QpHandle,
    other: &Reach,
    samples: u64,
    status: u64,
) -> params::End {
    let own = end.reach();
    params::End {
        qp,
        send: end.pointer(End::SEND),
        send_addr: own.addr + end.offset(End::SEND),
        remote_addr: other.addr + end.offset(End::RECV),
        signal_addr: other.addr + end.offset(End::SIGNAL),
        recv: end.pointer(End::RECV),
        signal: end.pointer(End::SIGNAL),
        send_key: own.key,
        remote_key: other.key,
        signal_key: other.key,
        reserved: 0,
        samples,
        status,
    }
}

/// The parameters of one end alone.
pub(crate) fn alone(order: &PlayOrder, which: u32, end: params::End) -> params::Latency {
    let mut ends = [blank(), blank()];
    ends[which as usize & 1] = end;
    params::Latency {
        ends,
        first: which,
        inline: 0,
        size: order.size,
        iters: order.iters,
        deadline_ns: order.deadline_ns,
    }
}

fn ping_pong(context: &mut Context, bench: &Bench, case: &Case, tally: &mut Tally) -> Result<()> {
    let mut partner = context.partner.take();
    let spec = EndSpec {
        size: case.size,
        on_gpu: case.mem == Place::Gpu,
        shared: case.link == Link::Shm,
        verbs: case.link == Link::Verbs,
    };
    let near = End::new(bench, &spec)?;
    let signal = case.test == Test::SignalLat;
    let (statuses, samples) = (Statuses::new(bench, 2)?, Samples::new(bench)?);
    let qps = queues::make(bench, case, case.qps.max(2), partner.as_mut())?;
    let watch = counters::Watch::start(&bench.device, &qps, case.link, partner.as_mut())?;
    let export = queues::export(&qps[..2])?;
    // The second end: here, or in the peer process.
    let (far, there) = match &mut partner {
        None => {
            let far = End::new(bench, &spec)?;
            let remote = far.reach();
            (Some(far), remote)
        }
        Some(partner) => {
            let there: Reach = partner.ask("make its end", &Order::End(spec))?;
            (None, there.of(near.total())?)
        }
    };
    let abroad = near.abroad()?;
    let result = launches(context, case, tally, |_, number, n, tally| {
        let order = PlayOrder {
            signal,
            size: case.size,
            iters: n,
            deadline_ns: DEADLINE.as_nanos() as u64,
            seed: case.seed,
            number,
            check: case.check,
            other: abroad,
        };
        // The words that ends wait for count from 1 in every launch.
        near.paint(&order, 0, &mut on)?;
        if let Some(far) = &far {
            far.paint(&order, 1, &mut on)?;
        }
        let first = end_params(
            &near,
            export.handle_of(0),
            &there,
            samples.device_addr(),
            statuses.addr(),
        );
        let (params, blocks) = match &far {
            Some(far) => {
                let second = end_params(
                    far,
                    export.handle_of(1),
                    &near.reach(),
                    0,
                    statuses.addr_of(1),
                );
                let mut both = alone(&order, 0, first);
                both.ends[1] = second;
                (both, 2)
            }
            None => (alone(&order, 0, first), 1),
        };
        if let Some(partner) = &mut partner {
            let () = partner.ask("start its end", &Order::Play(Box::new(order.clone())))?;
        }
        let meter = Meter::start(partner.as_mut())?;
        // SAFETY: the structure is this kernel's; queues, both ends' memory, samples and status are of this
        // bench (or the peer's, by key) and outlive the launch, which is waited for here.
        let running = unsafe {
            bench.start(
                order.kernel(),
                case.foreign.is_some(),
                Dims::new(blocks, 1),
                &params,
            )?
        };
        let took = running.finish(&mut Watch {
            qps: &qps,
            timeout: case.timeout,
            tick: &mut |_| alive(partner.as_mut(), case.timeout),
        })?;
        let mut all = statuses.read()?;
        all.truncate(blocks as usize);
        first_failure(&all, |end| qps.get(end as usize))?;
        meter.stop(partner.as_mut(), &mut tally.cpu)?;
        tally.seconds += took.as_secs_f64();
        samples.collect(n, 2, &mut tally.samples)?;
        near.verify(&order, 0, tally, &mut on)?;
        match (&far, &mut partner) {
            (Some(far), _) => far.verify(&order, 1, tally, &mut on)?,
            (None, Some(partner)) => {
                let faults: Faults = partner.ask("play its end", &Order::Played)?;
                let compared = if order.check { near.total() } else { 0 };
                faults.add_to(tally, compared)?;
            }
            (None, None) => {}
        }
        Ok(())
    });
    if result.is_ok() {
        watch.end(&bench.device, &qps, partner.as_mut(), tally)?;
    }
    if result.is_ok()
        && let Some(partner) = &mut partner
    {
        let () = partner.ask("clear up", &Order::Clear)?;
    }
    context.partner = partner;
    result
}

/// Whether the second process, if there is one, is there and was heard of within `patience`.
pub(crate) fn alive(partner: Option<&mut Partner>, patience: Duration) -> Result<()> {
    partner.map_or(Ok(()), |p| p.alive(patience))
}
