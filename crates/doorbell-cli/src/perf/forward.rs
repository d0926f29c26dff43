//! `forward`: the HCA delivers 32 bytes and a flag in one 64-byte line, the kernel answers with a
//! WRITE whose payload is in the WQEs; and the bare round trip through pinned memory beside it.
//!
//! The thread that measures is the HCA (unless `--hca-cores` says otherwise): the clock runs from
//! before its own work request is built until the kernel's answer has been executed and is in
//! memory. Every answer is compared with the random message that it answers.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use doorbell::cpu::{self, Post};
use doorbell::{Access, CpuQp, Memory, Place, RemoteMr};
use doorbell_device::QpHandle;
use doorbell_gpu::Dims;
use doorbell_kernels::params::{self, Line};

use super::bench::Bench;
use super::check::Stream;
use super::far::Meter;
use super::plan::{Case, Limit};
use super::running::{BARE, Statuses, Watch, first_failure, tell_missing};
use super::tally::{Measured, Tally};
use super::{Context, queues};
use crate::{stats, units};

/// 64-bit words of a message.
const WORDS: usize = 4;
/// Messages of one launch.
const ROUNDS: u64 = 16_384;
/// Messages at the start of a launch that are not counted: the kernel may not run yet.
const WARM_UP: u64 = 64;
/// How many times the limit of one message the kernel of a whole launch may take.
const LAUNCH: u32 = 60;
/// Polls between two looks at the clock.
const LOOK: u32 = 1024;

/// A line that one side writes and the other polls.
fn line(bench: &Bench, place: Place) -> Result<Memory> {
    Ok(bench.device.alloc(place, 64)?)
}

/// A GPU's warp reads a line faster than its thread; a host thread stands for both.
fn lanes(bench: &Bench) -> Dims {
    Dims::new(1, if bench.device.gpu().is_cuda() { 32 } else { 1 })
}

/// A message of a stream.
fn message(stream: Stream, n: u64) -> [u64; WORDS] {
    std::array::from_fn(|i| stream.word(n * WORDS as u64 + i as u64))
}

/// Message `n` as it travels. A launch has fewer messages than a number has values.
fn as_line(words: [u64; WORDS], n: u64) -> Line {
    let mut halves = [0; 2 * WORDS];
    for (i, word) in words.into_iter().enumerate() {
        halves[2 * i] = word as u32;
        halves[2 * i + 1] = (word >> 32) as u32;
    }
    Line::new(halves, n as u32)
}

/// What is in `answer` now. Each unit's number is read before the rest of it, as `Arch::load_unit` does.
fn read_line(answer: &Memory) -> Result<Line> {
    let mut units = [[0; 2]; 3];
    for (i, unit) in units.iter_mut().enumerate() {
        for half in [1, 0] {
            unit[half] = answer.load(16 * i + 8 * half)?;
        }
    }
    Ok(Line::from_units(units))
}

/// Waits until `answer` holds message `n` whole; `poll` is called meanwhile. `None`: not by the deadline.
fn await_answer(
    answer: &Memory,
    n: u64,
    deadline: Instant,
    mut poll: impl FnMut(),
    mut alive: impl FnMut() -> Result<()>,
) -> Result<Option<Line>> {
    let mut polls = 0u32;
    loop {
        let line = read_line(answer)?;
        if line.is(n as u32) {
            return Ok(Some(line));
        }
        poll();
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(LOOK) {
            alive()?;
            if Instant::now() > deadline {
                return Ok(None);
            }
            // Another thread may wait for this very processor.
            std::thread::yield_now();
        }
    }
}

fn compare(answer: Line, n: u64, expected: Line, tally: &mut Tally) {
    for (i, (got, expected)) in answer.0.into_iter().zip(expected.0).enumerate() {
        if got != expected {
            tally.fault(format!(
                "answer {n}: offset {:#x}: expected {expected:#010x}, got {got:#010x}",
                4 * i
            ));
        }
    }
    tally.compared += u64::from(Line::BYTES);
}

/// Measures, and checks if asked to.
pub(crate) fn run(context: &mut Context, case: &Case) -> Result<Measured> {
    let bench = context.benches.of(case)?;
    let mut tally = Tally::default();
    let place = match case.mem {
        crate::args::Place::Host => Place::Host,
        crate::args::Place::Gpu => Place::Gpu,
    };
    let (arrives, answer) = (line(&bench, place)?, line(&bench, Place::Host)?);
    let arrives_mr = bench.pd.register(&arrives, Access::ALL)?;
    let answer_mr = bench.pd.register(&answer, Access::ALL)?;
    let qps = queues::make(&bench, case, 2, None)?;
    let mut to_kernel = CpuQp::new(&qps[0])?;
    let export = queues::export(&qps[1..])?;
    let statuses = Statuses::new(&bench, 1)?;
    let started = Instant::now();
    let mut left = match case.limit {
        Limit::Iters(n) => n,
        Limit::Time(_) => u64::MAX,
    };
    let (all, mut number) = (left, 0);
    while left > 0 && tally.errors == 0 {
        number += 1;
        let n = ROUNDS.min(left);
        arrives.fill(0)?;
        answer.fill(0)?;
        let params = params::Forward {
            qp: export.handle(),
            line: arrives.device_addr(),
            answer_addr: answer_mr.addr(),
            answer: 0,
            answer_key: answer_mr.key(),
            reserved: 0,
            iters: n,
            // The limit is on each message; a failed or closed queue pair ends the kernel before this.
            deadline_ns: (case.timeout * LAUNCH).as_nanos() as u64,
            status: statuses.addr(),
        };
        let stream = Stream::new(case.seed, number);
        let meter = Meter::start(None)?;
        let begun = Instant::now();
        // SAFETY: the structure is this kernel's; queue, lines and status are of this bench and outlive the launch,
        // which is waited for here.
        let mut running =
            unsafe { bench.start("forward", case.foreign.is_some(), lanes(&bench), &params)? };
        let remote = arrives_mr.remote();
        let rounds = rounds(
            &bench,
            &mut to_kernel,
            &remote,
            &answer,
            n,
            stream,
            case,
            &mut tally,
            &mut || running.still_runs(),
        );
        let took = begun.elapsed();
        let mut used = crate::cputime::CpuUse::default();
        meter.stop(None, &mut used)?;
        let ended = running.finish(&mut Watch {
            qps: &qps,
            timeout: if matches!(rounds, Ok(None)) {
                case.timeout
            } else {
                Duration::ZERO
            },
            tick: &mut |_| Ok(()),
        });
        if let Ok(Some(late)) = rounds {
            bail!(late);
        }
        first_failure(&statuses.read()?, |_| qps.get(1))?;
        rounds?;
        ended?;
        tally.cpu.cpu += used.cpu;
        tally.cpu.wall += used.wall;
        tally.seconds += took.as_secs_f64();
        left -= n;
        let share = match case.limit {
            Limit::Iters(_) => 1.0 - left as f64 / all as f64,
            Limit::Time(run) => started.elapsed().as_secs_f64() / run.as_secs_f64(),
        };
        context.progress.at(share, &case.label());
        if share >= 1.0 {
            break;
        }
    }
    tally.messages = tally.samples.len() as u64;
    let mut note = None;
    let mut baseline = None;
    if case.baseline {
        let rounds = tally.messages.clamp(1000, 100_000);
        let bare = stats::summarise(&mut self::bare(&bench, rounds, case.timeout)?);
        baseline = bare.map(|l| l.p50 as f64);
        note = bare.map(|l| {
            let time = |ns: u64| units::time(ns as f64);
            format!(
                "bare round trip through pinned memory, same run: min {}, p50 {}, p99 {}",
                time(l.min),
                time(l.p50),
                time(l.p99)
            )
        });
    }
    let mut measured = tally.measured(case, &bench, baseline);
    if let (Some(mut text), Some(latency), Some(bare)) =
        (note, measured.outcome.latency_ns, baseline)
    {
        text.push_str(&format!(
            "; forward's p50 is {} times its",
            units::three(latency.p50 as f64 / bare)
        ));
        measured.notes.push(text);
    }
    Ok(measured)
}

/// Sends `n` messages, one after another. Why one was not answered in time, if one was not.
#[allow(
    clippy::too_many_arguments,
    reason = "one private call site; a struct would only rename them"
)]
fn rounds(
    bench: &Bench,
    to_kernel: &mut CpuQp,
    remote: &RemoteMr,
    answer: &Memory,
    n: u64,
    stream: Stream,
    case: &Case,
    tally: &mut Tally,
    alive: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<String>> {
    let queue = to_kernel.queue()?;
    let device = &bench.device;
    let drive = device.is_caller_driven();
    let warm_up = WARM_UP.min(n / 4);
    for i in 1..=n {
        let line = as_line(message(stream, i), i);
        let by = cpu::deadline(case.timeout);
        let start = Instant::now();
        queue.put_inline(cpu::remote(remote, 0), line.0, Line::BYTES, Post::by(by))?;
        let poll = || {
            if drive {
                device.poll();
            }
        };
        let Some(got) = await_answer(answer, i, start + case.timeout, poll, &mut *alive)? else {
            return Ok(Some(not_answered(bench, i)));
        };
        let took = start.elapsed();
        if i > warm_up {
            tally.samples.push(took.as_nanos() as u64);
        }
        if case.check {
            compare(got, i, line, tally);
        }
    }
    Ok(None)
}

/// That a message was not answered, and what is missing.
fn not_answered(bench: &Bench, n: u64) -> String {
    let mut text = format!("message {n} was not answered in time");
    if tell_missing(&mut text, &bench.device) {
        text.push_str("; raise --timeout if the machine is that slow");
    }
    text
}

/// Nanoseconds of `rounds` round trips of a line through pinned memory: this thread stores, the
/// kernel `bare_echo` sees it and stores back; no queue, no engine.
pub(crate) fn bare(bench: &Bench, rounds: u64, timeout: Duration) -> Result<Vec<u64>> {
    let (there, back) = (line(bench, Place::Host)?, line(bench, Place::Host)?);
    let statuses = Statuses::new(bench, 1)?;
    let params = params::Forward {
        qp: QpHandle {
            qp: std::ptr::null_mut(),
            ext: std::ptr::null_mut(),
        },
        line: there.device_addr(),
        answer_addr: 0,
        answer: back.device_addr(),
        answer_key: 0,
        reserved: 0,
        iters: rounds,
        // Nothing but its deadline ends this kernel on a GPU; there, its rounds take microseconds.
        deadline_ns: (timeout
            * if bench.device.gpu().is_cuda() {
                2
            } else {
                LAUNCH
            })
        .as_nanos() as u64,
        status: statuses.addr(),
    };
    // SAFETY: the structure is this kernel's; both lines and the status are of this bench and outlive the launch, which is
    // waited for here.
    let mut running = unsafe { bench.start(BARE, false, lanes(bench), &params)? };
    let mut samples = Vec::with_capacity(rounds as usize);
    let mut result = Ok(None);
    for i in 1..=rounds {
        let start = Instant::now();
        let line = as_line([i; WORDS], i);
        for unit in 0..3 {
            for half in [0, 1] {
                let at = 4 * unit + 2 * half;
                let word = u64::from(line.0[at]) | u64::from(line.0[at + 1]) << 32;
                there.store(16 * unit + 8 * half, word)?;
            }
        }
        result = await_answer(&back, i, start + timeout, || {}, || running.still_runs());
        match &result {
            Ok(Some(got)) if *got == line => {}
            Ok(Some(_)) => bail!("the bare echo changed message {i}"),
            Ok(None) => bail!(not_answered(bench, i)),
            Err(_) => break,
        }
        if i > WARM_UP.min(rounds / 4) {
            samples.push(start.elapsed().as_nanos() as u64);
        }
    }
    let ended = running.finish(&mut Watch {
        qps: &[],
        timeout,
        tick: &mut |_| Ok(()),
    });
    first_failure(&statuses.read()?, |_| None)?;
    result?;
    ended?;
    Ok(samples)
}
