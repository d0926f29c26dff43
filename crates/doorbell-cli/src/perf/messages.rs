//! `send-lat` and `send-bw`: messages that take receives.
//!
//! One thread sends from the places of a window, another receives them, here or in the peer process. For latency each message is answered with
//! its own bytes, and the figure is half of the round trip; for bandwidth, so many are under way, and each so many-th is acknowledged.
//! Checked, every launch has fresh bytes, and the target's memory and the answers are compared with what was sent.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use doorbell::QpHandle;
use doorbell_gpu::Dims;
use doorbell_kernels::params::{self, message_flags};
use serde::{Deserialize, Serialize};

use super::bench::Bench;
use super::check::{Layout, Picture};
use super::far::{Far, Meter, Order};
use super::latency::{Samples, alive, rounds};
use super::pace::Pace;
use super::pipe::Partner;
use super::plan::Case;
use super::running::{DEADLINE, Running, Statuses, Watch, first_failure};
use super::side::{Reach, Side, SideSpec, area};
use super::tally::{Measured, Tally};
use super::{Context, counters, queues};
use crate::args::{Link, Place, Test};

/// Receives of a queue pair of these tests.
pub(crate) const RECEIVES: u32 = 512;
/// Messages under way, and of how many one is acknowledged.
const WINDOW: u64 = 256;
const EVERY: u64 = 64;
/// Messages and bytes of a launch at most, so that it ends well within its time-out.
const LAUNCH: u64 = 1 << 18;
const LAUNCH_BYTES: u64 = 1 << 30;

/// What the receiving end must know.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct EchoOrder {
    pub(crate) layout: Layout,
    pub(crate) size: u64,
    pub(crate) places: u64,
    pub(crate) every: u64,
    pub(crate) iters: u64,
    pub(crate) deadline_ns: u64,
}

impl EchoOrder {
    /// Is it one for windows of this layout? Its numbers may be another process's.
    pub(crate) fn fits(&self, own: &Layout) -> Result<()> {
        let Self {
            size,
            places,
            layout,
            ..
        } = *self;
        let bytes = size.checked_mul(places);
        ensure!(
            layout == *own && bytes.is_some_and(|bytes| bytes <= own.window),
            "{places} messages of {size} bytes into memory that was made for others"
        );
        ensure!(
            size > 0 && places.is_power_of_two() && u32::try_from(places - 1).is_ok(),
            "{places} places for messages of {size} bytes: a power of two of them, of a byte at least"
        );
        Ok(())
    }

    /// Starts the kernel that receives.
    ///
    /// # Safety
    /// The queue pair of `qp`, the memory at `reach` and `status` are of this bench and outlive the launch.
    pub(crate) unsafe fn start<'b>(
        &self,
        bench: &'b Bench,
        qp: QpHandle,
        reach: &Reach,
        status: u64,
    ) -> Result<Running<'b>> {
        let params = params::Echo {
            qp,
            buffers: places(area(reach, &self.layout, self.places), self.size),
            answer_addr: 0,
            answer_key: 0,
            flags: 0,
            every: self.every,
            iters: self.iters,
            deadline_ns: self.deadline_ns,
            status,
        };
        // SAFETY: the structure is this kernel's; the rest is the caller's promise.
        unsafe { bench.start("echo", false, Dims::new(1, 1), &params) }
    }
}

/// The places of a window, `size` bytes apart.
fn places(area: params::Area, size: u64) -> params::Area {
    params::Area {
        stride: size,
        ..area
    }
}

/// Messages of a launch.
fn most(case: &Case, left: u64) -> u64 {
    match case.test {
        Test::SendLat => rounds(case, left),
        // Checked, a launch fills each place about once: more launches, more bytes that are new.
        _ if case.check => (4 * case.places()).max(1024).min(left),
        _ => LAUNCH.min((LAUNCH_BYTES / case.size).max(EVERY)).min(left),
    }
}

/// The memory of a case and the queue pairs over which it goes.
struct Stage {
    layout: Layout,
    out: Side,
    back: Side,
    samples: Samples,
    statuses: Statuses,
}

impl Stage {
    fn new(bench: &Bench, case: &Case) -> Result<Self> {
        let layout = Layout::new(1, case.places() * case.size);
        let spec = SideSpec {
            layout,
            on_gpu: case.local_mem == Place::Gpu,
            shared: case.link == Link::Shm,
            verbs: false,
        };
        Ok(Self {
            layout,
            out: Side::new(&bench.pd, &bench.device, &spec)?,
            back: Side::new(&bench.pd, &bench.device, &spec)?,
            samples: Samples::new(bench)?,
            statuses: Statuses::new(bench, 2)?,
        })
    }

    fn ping(&self, case: &Case, qp: QpHandle, order: &EchoOrder) -> params::Ping {
        let lat = case.test == Test::SendLat;
        let pointer = |side: &Side| side.mr().memory().device_addr() + self.layout.lead();
        let area = |side: &Side| places(area(&side.reach(), &self.layout, order.places), case.size);
        params::Ping {
            qp,
            out: area(&self.out),
            back: area(&self.back),
            out_pointer: pointer(&self.out),
            back_pointer: pointer(&self.back),
            target_addr: 0,
            target_key: 0,
            // Words are compared by the kernel where places are aligned to them.
            flags: match lat && case.check {
                true => message_flags::CHECK,
                false => 0,
            },
            size: case.size,
            iters: order.iters,
            window: if lat { 1 } else { WINDOW },
            every: order.every,
            samples: if lat { self.samples.device_addr() } else { 0 },
            deadline_ns: order.deadline_ns,
            status: self.statuses.addr(),
        }
    }
}

/// Measures, and checks if asked to.
pub(crate) fn run(context: &mut Context, case: &Case) -> Result<Measured> {
    let bench = context.benches.of(case)?;
    let mut tally = Tally::default();
    let mut partner = context.partner.take();
    let result = messages(context, &bench, case, partner.as_mut(), &mut tally);
    context.partner = partner;
    result?;
    let baseline = match case.test {
        Test::SendLat => context.baselines.round_trip(case, &bench)?,
        _ => context.baselines.rate(case, &bench)?,
    };
    Ok(tally.measured(case, &bench, baseline))
}

fn messages(
    context: &mut Context,
    bench: &Bench,
    case: &Case,
    mut partner: Option<&mut Partner>,
    tally: &mut Tally,
) -> Result<()> {
    let stage = Stage::new(bench, case)?;
    let spec = SideSpec {
        layout: stage.layout,
        on_gpu: case.mem == Place::Gpu,
        shared: case.link == Link::Shm,
        verbs: case.link == Link::Verbs,
    };
    let here = partner.is_none();
    let qps = queues::messages(bench, case, partner.as_deref_mut())?;
    let mut far = Far::new(bench, partner, &spec)?;
    let watch = counters::Watch::start(&bench.device, &qps, case.link, far.partner())?;
    let export = queues::export(&qps)?;
    let mut pace = Pace::new(case);
    let mut number = 0;
    while pace.left() > 0 && tally.errors == 0 {
        number += 1;
        let n = pace.next(most(case, pace.left()));
        let order = EchoOrder {
            layout: stage.layout,
            size: case.size,
            places: case.places(),
            every: if case.test == Test::SendLat { 1 } else { EVERY },
            iters: n,
            deadline_ns: DEADLINE.as_nanos() as u64,
        };
        let source = Picture::source(case.seed, number);
        if case.check || number == 1 {
            let empty = Picture::sink(case.seed, number, 0);
            stage.out.paint(&source)?;
            stage.back.paint(&empty)?;
            far.paint(&empty)?;
        }
        let meter = Meter::start(far.partner())?;
        let status = stage.statuses.addr_of(1);
        let echo = match here {
            true => {
                let (qp, reach) = (export.handle_of(1), far.reach());
                // SAFETY: queue pairs, memory and statuses are of this bench and outlive the launch, which is waited for here.
                Some(unsafe { order.start(bench, qp, &reach, status)? })
            }
            false => None,
        };
        if let Some(partner) = far.partner() {
            let () = partner.ask("start receiving", &Order::Echo(order))?;
        }
        let ping = stage.ping(case, export.handle_of(0), &order);
        // SAFETY: as above.
        let running =
            unsafe { bench.start("ping", case.foreign.is_some(), Dims::new(1, 1), &ping)? };
        let took = finish(running, &qps, case.timeout, far.partner())?;
        if let Some(echo) = echo {
            finish(echo, &qps, case.timeout, None)?;
        }
        let mut statuses = stage.statuses.read()?;
        statuses.truncate(qps.len());
        first_failure(&statuses, |end| qps.get(end as usize))?;
        meter.stop(far.partner(), &mut tally.cpu)?;
        if let Some(partner) = far.partner() {
            let () = partner.ask("receive", &Order::Echoed)?;
        }
        tally.seconds += took.as_secs_f64();
        tally.messages += n;
        if case.test == Test::SendLat {
            stage.samples.collect(n, 2, &mut tally.samples)?;
        }
        if case.check {
            check(&stage, case, &order, number, &mut far, tally)?;
        }
        pace.took(n, took);
        let share = pace.share();
        context.progress.at(share, &case.label());
        if share >= 1.0 {
            break;
        }
    }
    if case.test == Test::SendLat {
        tally.messages = tally.samples.len() as u64;
    }
    watch.end(&bench.device, &qps, far.partner(), tally)?;
    if let Some(partner) = far.partner() {
        let () = partner.ask("clear up", &Order::Clear)?;
    }
    Ok(())
}

fn finish(
    running: Running<'_>,
    qps: &[doorbell::Qp],
    timeout: Duration,
    mut partner: Option<&mut Partner>,
) -> Result<Duration> {
    running.finish(&mut Watch {
        qps,
        timeout,
        tick: &mut |_| alive(partner.as_deref_mut(), timeout),
    })
}

/// Each place that took a message holds the sender's bytes; the answers to all came back as they went.
fn check(
    stage: &Stage,
    case: &Case,
    order: &EchoOrder,
    number: u64,
    far: &mut Far<'_>,
    tally: &mut Tally,
) -> Result<()> {
    if case.sabotage {
        far.sabotage()?;
    }
    let done = order.iters.min(order.places) * case.size;
    let full = Picture::sink(case.seed, number, done);
    let source = Picture::source(case.seed, number);
    tally.verdict("the sender's memory", stage.out.verify(&source)?);
    tally.verdict("the receiver's memory", far.verify(&full)?);
    let answers = match order.every {
        1 => full,
        _ => Picture::sink(case.seed, number, 0),
    };
    tally.verdict("the answers", stage.back.verify(&answers)?);
    Ok(())
}

/// The receiving end in a peer process.
pub(crate) struct Echoing<'b> {
    pub(crate) running: Running<'b>,
    pub(crate) statuses: Statuses,
}

impl Echoing<'_> {
    /// Waits for its end.
    pub(crate) fn finish(
        self,
        qps: &[doorbell::Qp],
        timeout: Duration,
        tick: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        self.running.finish(&mut Watch { qps, timeout, tick })?;
        first_failure(&self.statuses.read()?, |_| qps.first()).context("receiving")
    }
}
