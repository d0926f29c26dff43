//! The second process of a run: does what the initiator's orders say, one after the other.
//!
//! It has a device of its own. Payload memory it offers is in sealed memory files that the
//! initiator's engine copies into; it sleeps unless it plays an end of a ping-pong.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell::{CqKind, Endpoint, Export, LinkKind, Peer, Qp, QpHandle};
use doorbell_gpu::Dims;
use serde::Serialize;

use super::bench::{Bench, Benches};
use super::counters;
use super::end::{End, Faults};
use super::far::{Order, Over};
use super::latency::{PlayOrder, alone, end_params};
use super::messages::{EchoOrder, Echoing};
use super::pipe::Answer;
use super::running::{Running, Statuses, Watch, first_failure};
use super::side::{PIECE, Side, SideSpec, Step};
use super::tally::Tally;
use super::terms::{Share, Terms};
use crate::args::PeerArgs;
use crate::cputime::CpuClock;
use crate::units::span;

mod work;
use work::Work;

#[cfg(test)]
mod tests;

/// What the orders have made so far.
struct State<'b> {
    // Dropped first: a kernel uses what follows.
    playing: Option<Playing<'b>>,
    echoing: Option<Echoing<'b>>,
    bench: &'b Bench,
    timeout: Duration,
    terms: &'b Terms,
    sessions: HashMap<u32, Peer>,
    side: Option<Side>,
    end: Option<End>,
    qps: Vec<Qp>,
    export: Option<Export>,
    clock: Option<CpuClock>,
    /// What the windows, the end and the queue pairs take. Given back last.
    side_share: Option<Share>,
    end_share: Option<Share>,
    qp_shares: Vec<Share>,
}

/// An end that is being played.
struct Playing<'b> {
    order: PlayOrder,
    running: Running<'b>,
    statuses: Statuses,
}

/// Where orders come from and answers go to.
pub(crate) trait Orders {
    /// The next order; `None` when there will be none. Meanwhile `turn` is called again and again: packets come while
    /// nothing is ordered.
    fn next(&mut self, turn: &mut dyn FnMut() -> Turn) -> Result<Option<Vec<u8>>>;

    /// Answers it; `false` when there is nobody to tell.
    fn answer(&mut self, answer: Vec<u8>) -> bool;

    /// An error ends what is being done, such as playing an end or filling memory.
    fn interrupted(&self) -> Result<()>;

    /// Why there are no more orders, if more is known than that the initiator is gone.
    fn lost(&self) -> Option<String>;

    /// This side ends, and why.
    fn tell(&self, why: &str);
}

/// Who runs the engine of this process, and what came of a look at it.
pub(crate) enum Turn {
    /// The caller, who found work or did not.
    Ours { worked: bool },
    /// Somebody else, whose CPU is not to be taken; worth asking again after so long.
    Others(Duration),
}

impl Turn {
    /// Runs the engine of a device for some rounds.
    pub(crate) fn of(device: &doorbell::Device) -> Self {
        let mut worked = false;
        for _ in 0..ROUNDS {
            worked |= device.poll();
        }
        Self::Ours { worked }
    }
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// The initiator said goodbye, and whether it is content.
    Goodbye { well: bool },
    /// It is gone: how that showed.
    Lost(String),
}

/// Standard input and output.
struct Stdio {
    /// How long the initiator may be stopped.
    timeout: Duration,
    /// For how long it has been, as far as this process ran meanwhile: both are stopped by one key, and go on by one command.
    stopped: Duration,
}

impl Stdio {
    /// Looks at the initiator, every [`GLANCE`].
    fn glance(&mut self, parent: u32) {
        self.stopped = match doorbell::report::is_stopped(parent) {
            true => self.stopped + GLANCE,
            false => Duration::ZERO,
        };
    }
}

/// Between two looks whether the initiator is stopped: it may give no orders for as long as it measures.
const GLANCE: Duration = Duration::from_millis(500);

impl Orders for Stdio {
    fn next(&mut self, turn: &mut dyn FnMut() -> Turn) -> Result<Option<Vec<u8>>> {
        // One order at a time is under way, so what is buffered is never a second one.
        let parent = std::os::unix::process::parent_id();
        while !wait_driving(turn, GLANCE, |time| readable(&std::io::stdin(), time)) {
            self.glance(parent);
            if self.stopped > self.timeout {
                bail!(
                    "the first process of this run (process {parent}) has been stopped (SIGSTOP, or a debugger) for more than {}: this one ends; raise --timeout for longer",
                    span(self.timeout)
                );
            }
        }
        let mut line = Vec::new();
        let got = std::io::stdin()
            .lock()
            .read_until(b'\n', &mut line)
            .context("reading orders")?;
        Ok((got > 0).then_some(line))
    }

    fn answer(&mut self, mut answer: Vec<u8>) -> bool {
        answer.push(b'\n');
        let mut out = std::io::stdout();
        out.write_all(&answer).and_then(|()| out.flush()).is_ok()
    }

    fn interrupted(&self) -> Result<()> {
        Ok(())
    }

    fn lost(&self) -> Option<String> {
        None
    }

    // Its initiator started it, and reads its standard error.
    fn tell(&self, _why: &str) {}
}

/// Between two looks while there is work, and the longest nap without.
const ROUNDS: u32 = 256;
const NAP: Duration = Duration::from_micros(100);
/// Without work for so long, naps begin.
const SPIN: Duration = Duration::from_millis(2);
const HOUR: Duration = Duration::from_secs(3600);
/// Bytes that are read for the initiator at a time: answers are short.
const MOST_READ: u64 = PIECE as u64;
/// A queue pair at most, beside its slots and receives.
const QP_BYTES: u64 = 256 << 10;
/// A slot of its queue, and of its completion queue; a receive.
const SLOT_BYTES: u64 = 128;
/// Between two looks whether the threads that run the engine have ended: what the other side repeats meanwhile waits for so long.
const LOOK: Duration = Duration::from_millis(10);

/// Waits until `ready` within `limit`, running the engine meanwhile; whether it is.
pub(crate) fn wait_driving(
    turn: &mut dyn FnMut() -> Turn,
    limit: Duration,
    ready: impl Fn(Duration) -> bool,
) -> bool {
    let start = Instant::now();
    let mut busy = start;
    loop {
        let turn = turn();
        let now = Instant::now();
        let nap = match turn {
            Turn::Others(nap) => nap,
            Turn::Ours { worked } => {
                if worked {
                    busy = now;
                }
                match now - busy < SPIN {
                    true => Duration::ZERO,
                    false => NAP,
                }
            }
        };
        if ready(nap.min(limit)) {
            return true;
        }
        if now - start >= limit {
            return false;
        }
    }
}

/// Is there something to read, or the end?
fn readable(fd: &impl std::os::fd::AsFd, time: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let time = Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: time.subsec_nanos().into(),
    };
    !matches!(poll(&mut fds, Some(&time)), Ok(0))
}

/// Serves orders from standard input until it ends.
pub(crate) fn serve(args: &PeerArgs) -> Result<()> {
    if let Some(cpu) = args.pin {
        crate::pin::to(cpu)?;
    }
    let mut config = crate::config::of(&args.device, args.roce.as_deref(), None);
    // For rules of fault scripts: the initiator is the first.
    config.rank = Some(1);
    let bench: Rc<Bench> = Benches::new(config, None)?.main()?;
    let mut orders = Stdio {
        timeout: args.timeout,
        stopped: Duration::ZERO,
    };
    session(&bench, args.timeout, &Terms::own(), &mut orders).map(drop)
}

/// Does what is ordered until there are no more orders.
pub(crate) fn session(
    bench: &Bench,
    timeout: Duration,
    terms: &Terms,
    orders: &mut dyn Orders,
) -> Result<Parting> {
    let mut state = State {
        bench,
        timeout,
        terms,
        sessions: HashMap::new(),
        side: None,
        end: None,
        qps: Vec::new(),
        export: None,
        playing: None,
        echoing: None,
        clock: None,
        side_share: None,
        end_share: None,
        qp_shares: Vec::new(),
    };
    let outcome = attend(&mut state, orders);
    // Said before the regions go, by whose end the initiator's requests fail.
    if let Err(e) = &outcome {
        orders.tell(&crate::words(e));
    }
    outcome
}

/// What is known of an initiator that hung up: it was told of a failure here, or nothing.
fn gone(told: Option<String>) -> String {
    match told {
        Some(why) => format!("it went after it was told: {why}"),
        None => "it went without a word: the run failed there (it says why), a signal ended it (^C), or it was killed".to_owned(),
    }
}

fn attend(state: &mut State<'_>, orders: &mut dyn Orders) -> Result<Parting> {
    // The last answer, if it was a failure.
    let mut told = None;
    while let Some(text) = orders.next(&mut || state.turn())? {
        let order: Order = serde_json::from_slice(&text).with_context(|| {
            format!(
                "`{}` is not an order: this side is for `doorbell perf`",
                beginning(&text)
            )
        })?;
        if let Order::Goodbye { well } = order {
            orders.answer(ok(())?);
            return Ok(Parting::Goodbye { well });
        }
        let answer = match state.obey(order, orders) {
            Ok(answer) => {
                told = None;
                answer
            }
            Err(e) => {
                let words = crate::words(&e);
                // Work that ended since it is gone, or this process is to end, is no failure.
                told = orders.interrupted().is_ok().then(|| words.clone());
                serde_json::to_vec(&Answer::<()>::Err(words))?
            }
        };
        // An initiator that is gone reads nothing: there is nobody left to tell.
        if !orders.answer(answer) {
            break;
        }
    }
    let how = orders.lost();
    // One that was stopped reads it once it runs again.
    if let Some(how) = &how {
        orders.tell(how);
    }
    Ok(Parting::Lost(how.unwrap_or_else(|| gone(told))))
}

/// Of a message that is none, for a human: it may have megabytes.
pub(crate) fn beginning(message: &[u8]) -> String {
    const SHOWN: usize = 200;
    let text = message.trim_ascii();
    let cut = String::from_utf8_lossy(&text[..text.len().min(SHOWN)]);
    match text.len() > SHOWN {
        true => format!("{cut}… ({} bytes)", text.len()),
        false => cut.into_owned(),
    }
}

fn ok<T: Serialize>(answer: T) -> Result<Vec<u8>> {
    Ok(serde_json::to_vec(&Answer::Ok(answer))?)
}

impl State<'_> {
    /// Runs the engine for a while, where nobody else does. Threads of a kernel on the host GPU do, while they wait: a second
    /// driver beside them takes time slices of a CPU that they need.
    fn turn(&mut self) -> Turn {
        let device = &self.bench.device;
        if !device.is_caller_driven() {
            return Turn::Others(HOUR);
        }
        let playing = self.playing.iter_mut().map(|p| &mut p.running);
        let echoing = self.echoing.iter_mut().map(|e| &mut e.running);
        if playing.chain(echoing).any(|r| r.runs_engine()) {
            return Turn::Others(LOOK);
        }
        Turn::of(device)
    }

    /// While a kernel uses queue pairs and memory, they stay as they are.
    fn is_possible(&self, order: &Order) -> Result<()> {
        let during = match order {
            Order::ClockStart
            | Order::ClockStop
            | Order::Counters
            | Order::Gpu
            | Order::Played
            | Order::Echoed
            | Order::Goodbye { .. } => true,
            Order::Dial { .. }
            | Order::Side(_)
            | Order::End(_)
            | Order::Connect { .. }
            | Order::Paint(_)
            | Order::Verify(_)
            | Order::Sabotage
            | Order::Read { .. }
            | Order::Play(_)
            | Order::Echo(_)
            | Order::Clear => false,
        };
        ensure!(
            during || (self.playing.is_none() && self.echoing.is_none()),
            "an end is being played here: its end is to be waited for first"
        );
        Ok(())
    }

    /// Memory for `spec`, if this process gives so much.
    fn share(&self, spec: &SideSpec) -> Result<Share> {
        if spec.shared {
            self.terms.one_host()?;
        }
        self.terms.take(spec.total()?)
    }

    fn obey(&mut self, order: Order, orders: &mut dyn Orders) -> Result<Vec<u8>> {
        self.is_possible(&order)?;
        match order {
            Order::Dial { session, address } => {
                self.terms.one_host()?;
                let peer = self.bench.device.dial(&address, self.timeout)?;
                self.sessions.insert(session, peer);
                ok(())
            }
            Order::Side(spec) => {
                (self.side, self.side_share) = (None, None);
                let share = self.share(&spec)?;
                let side = Side::new(&self.bench.pd, &self.bench.device, &spec)?;
                let reach = side.abroad()?;
                (self.side, self.side_share) = (Some(side), Some(share));
                ok(reach)
            }
            Order::End(spec) => {
                (self.end, self.end_share) = (None, None);
                let share = self.share(&spec.side()?)?;
                let end = End::new(self.bench, &spec)?;
                let reach = end.abroad()?;
                (self.end, self.end_share) = (Some(end), Some(share));
                ok(reach)
            }
            Order::Connect {
                over,
                depth,
                receives,
                endpoints,
            } => {
                let mut work = Work::new(orders);
                let own = self.connect((over, depth, receives), &endpoints, &mut || work.step())?;
                ok(own)
            }
            Order::Paint(picture) => {
                let mut work = Work::new(orders);
                ok(self.side()?.paint_by(&picture, &mut || work.step())?)
            }
            Order::Verify(picture) => {
                let mut work = Work::new(orders);
                ok(self.side()?.verify_by(&picture, &mut || work.step())?)
            }
            Order::Sabotage => ok(self.side()?.sabotage()?),
            Order::Read { offset, len } => {
                ensure!(
                    len <= MOST_READ,
                    "{len} bytes to be read at a time: at most {MOST_READ}"
                );
                ok(self.side()?.read(offset, len)?)
            }
            Order::ClockStart => {
                self.clock = Some(CpuClock::start());
                ok(())
            }
            Order::ClockStop => {
                let (cpu, _) = self
                    .clock
                    .take()
                    .context("the clock was not started")?
                    .elapsed();
                ok(cpu.as_nanos() as u64)
            }
            Order::Play(order) => ok(self.play(*order, orders)?),
            Order::Played => ok(self.played(orders)?),
            Order::Echo(order) => ok(self.echo(&order)?),
            Order::Echoed => ok(self.echoed(orders)?),
            Order::Gpu => ok(self.bench.device.gpu_info().uuid.as_ref()),
            Order::Counters => ok(counters::read(&self.bench.device, &self.qps)),
            // Handled by whoever reads the orders.
            Order::Goodbye { .. } => ok(()),
            Order::Clear => {
                self.export = None;
                self.qps.clear();
                (self.side, self.end) = (None, None);
                (self.side_share, self.end_share) = (None, None);
                self.qp_shares.clear();
                ok(())
            }
        }
    }

    fn side(&self) -> Result<&Side> {
        self.side.as_ref().context("there is no memory yet")
    }

    fn connect(
        &mut self,
        (over, depth, receives): (Over, u32, u32),
        endpoints: &[Vec<u8>],
        step: Step<'_>,
    ) -> Result<Vec<Vec<u8>>> {
        let each = (u64::from(depth) + u64::from(receives)) * SLOT_BYTES + QP_BYTES;
        let share = self.terms.take(each * endpoints.len() as u64)?;
        self.qp_shares.push(share);
        let builder = self.bench.pd.qp().depth(depth).cq(CqKind::Collapsed);
        let builder = builder.receive_queue(receives);
        let mut own = Vec::new();
        for bytes in endpoints {
            step()?;
            let theirs = Endpoint::from_bytes(bytes)?;
            let qp = builder.clone().build()?;
            let (kind, to) = match over {
                Over::Shm(session) => {
                    let peer = self
                        .sessions
                        .get(&session)
                        .context("there is no session with the initiator")?;
                    (LinkKind::Shm, peer.destination(&theirs)?)
                }
                Over::Roce => (LinkKind::Roce, self.bench.device.destination(&theirs)?),
                Over::Verbs => (LinkKind::Verbs, self.bench.device.destination(&theirs)?),
            };
            own.push(qp.endpoint(kind, &[])?.to_bytes());
            self.qps.push(qp.connect(&to)?);
        }
        Ok(own)
    }

    /// The first queue pair, exported.
    fn handle(&mut self) -> Result<QpHandle> {
        let Some(qp) = self.qps.first() else {
            bail!("there is no queue pair yet");
        };
        if self.export.is_none() {
            self.export = Some(qp.export()?);
        }
        let export = self.export.as_ref();
        Ok(export
            .context("the queue pair could not be exported")?
            .handle())
    }

    fn echo(&mut self, order: &EchoOrder) -> Result<()> {
        let handle = self.handle()?;
        let side = self.side()?;
        order.fits(side.layout())?;
        let statuses = Statuses::new(self.bench, 1)?;
        let (reach, status) = (side.reach(), statuses.addr());
        // SAFETY: queue, memory and status are of this bench and stay until the launch was waited for (`echoed`), or it is
        // dropped, which waits.
        let running = unsafe { order.start(self.bench, handle, &reach, status)? };
        self.echoing = Some(Echoing { running, statuses });
        Ok(())
    }

    fn echoed(&mut self, orders: &mut dyn Orders) -> Result<()> {
        let echoing = self.echoing.take().context("nothing is being received")?;
        let mut watch = Work::new(orders).watch();
        echoing.finish(&self.qps, self.timeout, &mut watch)
    }

    fn play(&mut self, order: PlayOrder, orders: &mut dyn Orders) -> Result<()> {
        let end = self.end.as_ref().context("there is no end to play yet")?;
        end.takes(&order)?;
        let handle = self.handle()?;
        let end = self.end.as_ref().context("there is no end to play yet")?;
        let mut work = Work::new(orders);
        end.paint(&order, 1, &mut || work.step())?;
        let statuses = Statuses::new(self.bench, 1)?;
        let params = end_params(end, handle, &order.other, 0, statuses.addr());
        let params = alone(&order, 1, params);
        // SAFETY: the structure is this kernel's; queue, memory and status are of this bench and stay until the
        // launch was waited for (`played`), or it is dropped, which waits.
        let running = unsafe {
            self.bench
                .start(order.kernel(), false, Dims::new(1, 1), &params)?
        };
        self.playing = Some(Playing {
            order,
            running,
            statuses,
        });
        Ok(())
    }

    fn played(&mut self, orders: &mut dyn Orders) -> Result<Faults> {
        let playing = self.playing.take().context("nothing is being played")?;
        playing.running.finish(&mut Watch {
            qps: &self.qps,
            timeout: self.timeout,
            tick: &mut Work::new(orders).watch(),
        })?;
        first_failure(&playing.statuses.read()?, |_| self.qps.first())?;
        let mut tally = Tally::default();
        let end = self.end.as_ref().context("there is no end")?;
        let mut work = Work::new(orders);
        end.verify(&playing.order, 1, &mut tally, &mut || work.step())?;
        Ok(Faults::of(tally))
    }
}
