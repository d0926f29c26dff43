//! Measuring: passes over all points, until each was measured as often as asked.
//!
//! A point that fails is not tried again; what it ran on is opened anew for the next one. Nothing here waits without an end: a
//! measurement fails when nothing happens for the time-out, and a quick sweep has a minute.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::plan::{self, Here, Series};
use super::results::{Point, Repetition, Results, SCHEMA};
use super::show::Show;
use crate::WrongArguments;
use crate::args::Experiment;
use crate::args::{Link, Place, SweepArgs};
use crate::environment::Machine;
use crate::perf::lab::Lab;
use crate::perf::plan::Case;
use crate::perf::tally::Measured;
use crate::schema::Environment;

/// What a quick sweep may take, with time to write its report.
const MINUTE: Duration = Duration::from_secs(54);

/// Half of the figures scatter by more than this share: a machine with other work.
const NOISY: f64 = 0.2;

/// What scripts are told: that a point failed counts however the sweep ended, unless a signal ended it.
fn verdict(early: Option<End>, failed: bool) -> End {
    match early {
        Some(End::Interrupted) => End::Interrupted,
        _ if failed => End::Failed,
        early => early.unwrap_or(End::Done),
    }
}

/// How a sweep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    /// A point, or what it would have run on, failed.
    Failed,
    /// A quick sweep's minute was over.
    OutOfTime,
    /// It was not, and another pass would not have ended in it.
    NoTimeForMore,
    /// A signal came.
    Interrupted,
}

/// A sweep under way.
pub(super) struct Sweep<'a> {
    args: &'a SweepArgs,
    stop: Arc<AtomicBool>,
    started: Instant,
    plan: Vec<Planned>,
    results: Results,
    failed: bool,
    /// What was measured without queues in this pass.
    baselines: Vec<(Bare, f64)>,
}

/// What a figure without queues depends on: for a copy size, number of windows and places; nothing for a word to and fro.
type Bare = Option<(u64, u64, Place, Place)>;

fn bare(case: &Case) -> Bare {
    let copy = || {
        (
            case.size,
            case.places() * case.grid(),
            case.local_mem,
            case.mem,
        )
    };
    (!case.test.is_latency()).then(copy)
}

/// A series, and once it was reached its cases with their places among the points.
struct Planned {
    series: Series,
    cases: Option<Vec<(Case, usize)>>,
}

/// What is open in a pass.
#[derive(Default)]
struct Labs(Vec<(Key, Lab)>);

/// Series that can share a second process: it is told how to run its engine when it starts.
type Key = (Link, bool);

fn key(series: &Series) -> Key {
    let link = series.args.link.kind;
    (link, series.args.test.plays_two() && link != Link::Loopback)
}

impl Labs {
    fn of(&mut self, series: &Series) -> Result<&mut Lab> {
        let key = key(series);
        let at = match self.0.iter().position(|(k, _)| *k == key) {
            Some(at) => at,
            None => {
                self.0.push((key, Lab::open(&series.args)?));
                self.0.len() - 1
            }
        };
        Ok(&mut self.0[at].1)
    }

    fn drop_of(&mut self, series: &Series) {
        self.0.retain(|(k, _)| *k != key(series));
    }

    /// Each second process is parted from; one that is gone has been noticed by what it failed.
    fn close(self) {
        for (_, lab) in self.0 {
            let _ = lab.close();
        }
    }
}

impl<'a> Sweep<'a> {
    /// Looks at the machine and plans.
    pub(super) fn new(args: &'a SweepArgs, stop: Arc<AtomicBool>) -> Result<Self> {
        let machine = Machine::read();
        let (environment, cuda) = environment(args, &machine)?;
        let here = Here {
            cuda,
            cpus: machine.cpus,
        };
        let series = plan::series(args, here)?;
        if series.is_empty() {
            let wrong = anyhow::anyhow!(
                "nothing is left to measure: `blocks` and `queues` are about loopback, so leave it among --links, or choose other experiments with --only"
            );
            return Err(wrong.context(WrongArguments));
        }
        let results = Results {
            schema: SCHEMA.to_owned(),
            environment,
            quick: args.quick,
            complete: false,
            repeat: args.repeat.unwrap_or(if args.quick { 3 } else { 7 }),
            seconds: 0.0,
            notes: plan::notes(here),
            percentiles: crate::stats::PERCENTILES.to_vec(),
            points: Vec::new(),
        };
        Ok(Self {
            args,
            stop,
            started: Instant::now(),
            plan: series
                .into_iter()
                .map(|series| Planned {
                    series,
                    cases: None,
                })
                .collect(),
            results,
            failed: false,
            baselines: Vec::new(),
        })
    }

    pub(super) fn results(&self) -> &Results {
        &self.results
    }

    /// All passes; `keep` is given the results after each.
    pub(super) fn all(&mut self, keep: &mut dyn FnMut(&Results) -> Result<()>) -> Result<End> {
        let passes = self.results.repeat;
        let mut show = Show::new(passes, self.expected());
        let mut end = None;
        let mut longest = Duration::ZERO;
        for pass in 0..passes {
            let before = self.started.elapsed();
            // Two are a spread; a third that would be cut off half-way is better left out.
            if self.args.quick && pass >= 2 && before + longest > MINUTE {
                end = Some(End::NoTimeForMore);
                break;
            }
            end = self.pass(pass, &mut show)?;
            longest = longest.max(self.started.elapsed() - before);
            self.summarise();
            // Whoever called keeps the last.
            if end.is_some() || pass + 1 == passes {
                break;
            }
            keep(&self.results)?;
        }
        drop(show);
        let times = self.results.times();
        match end {
            Some(End::Interrupted) => self.remark("A signal ended it early."),
            Some(End::NoTimeForMore) => self.remark(&format!(
                "Every point was measured {times} of {passes} times: a pass took {:.0} s, and one more would not have fitted into the minute of --quick.",
                longest.as_secs_f64()
            )),
            Some(_) => self.remark(&format!(
                "The minute of --quick was over when points had been measured {times} of {passes} times: something else keeps this machine busy."
            )),
            None => {}
        }
        if let Some(noise) = self.results.usual_noise().filter(|n| *n > NOISY) {
            self.remark(&format!(
                "Noisy: half of the figures differ by more than ±{:.0} % between repetitions, so something else used this machine too.",
                100.0 * noise
            ));
        }
        self.results.complete = end.is_none() && !self.failed;
        Ok(verdict(end, self.failed))
    }

    fn remark(&mut self, text: &str) {
        self.results.notes.push(text.to_owned());
    }

    /// Points of a pass, for the bar.
    fn expected(&self) -> usize {
        let points = self.plan.iter().map(|planned| {
            let args = &planned.series.args;
            let sizes = args.size.as_ref().map_or(1, |s| s.0.len());
            sizes * args.blocks.0.len() * args.initiator.len()
        });
        points.sum()
    }

    fn summarise(&mut self) {
        for point in &mut self.results.points {
            point.summarise();
        }
        self.results.seconds = self.started.elapsed().as_secs_f64();
    }

    /// Every point once; why it ended early, if it did.
    fn pass(&mut self, pass: u32, show: &mut Show) -> Result<Option<End>> {
        let mut labs = Labs::default();
        self.baselines.clear();
        for at in 0..self.plan.len() {
            show.series(pass, &self.plan[at].series);
            let lab = labs.of(&self.plan[at].series);
            let ready = match lab {
                Ok(lab) => self.reach(at, lab),
                Err(e) => Err(e),
            };
            if let Err(error) = ready {
                if self.stopped() {
                    return Ok(Some(End::Interrupted));
                }
                self.lost(at, pass, &error);
                labs.drop_of(&self.plan[at].series);
                continue;
            }
            if let Some(end) = self.series(at, pass, &mut labs, show) {
                labs.close();
                return Ok(Some(end));
            }
        }
        labs.close();
        Ok(None)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Plans the cases of a series when it is first reached.
    fn reach(&mut self, at: usize, lab: &mut Lab) -> Result<()> {
        let planned = &self.plan[at];
        if planned.cases.is_some() {
            return Ok(());
        }
        let cases = lab.cases(&planned.series.args)?;
        let mut kept = Vec::new();
        for case in cases {
            kept.push((case.clone(), self.results.points.len()));
            self.results
                .points
                .push(blank(&self.plan[at].series, &case));
        }
        self.plan[at].cases = Some(kept);
        Ok(())
    }

    /// What a series would have run on could not be opened.
    fn lost(&mut self, at: usize, pass: u32, error: &anyhow::Error) {
        self.failed = true;
        let series = &self.plan[at].series;
        let text = format!("{}: {}", series.command(), crate::words(error));
        crate::complain(&format!("doorbell: {text}"));
        match &self.plan[at].cases {
            // It went well before: what was measured stays, and says that there is less of it.
            Some(_) => self.remark(&format!("Pass {}: {text}", pass + 1)),
            None => {
                self.remark(&format!("Could not be measured: {text}"));
                self.plan[at].cases = Some(Vec::new());
            }
        }
    }

    fn series(&mut self, at: usize, pass: u32, labs: &mut Labs, show: &mut Show) -> Option<End> {
        let cases = self.plan[at].cases.clone().unwrap_or_default();
        for (mut case, point) in cases {
            if self.stopped() {
                return Some(End::Interrupted);
            }
            if self.args.quick && self.started.elapsed() > MINUTE {
                return Some(End::OutOfTime);
            }
            if self.results.points[point].failed.is_some() {
                show.step();
                continue;
            }
            show.case(&case);
            // What the machine does without queues is measured once in each pass where it is drawn, whatever the link.
            let known = self.baselines.iter().find(|(b, _)| *b == bare(&case));
            let known = known.map(|(_, ns)| *ns);
            let drawn = matches!(
                self.plan[at].series.experiment,
                Experiment::Sizes | Experiment::Gets | Experiment::Latency
            );
            case.baseline = known.is_none() && (drawn || pass == 0);
            let at_s = self.started.elapsed().as_secs_f64();
            let measured = labs
                .of(&self.plan[at].series)
                .and_then(|lab| lab.measure(&case));
            show.step();
            match measured {
                Ok(mut measured) => {
                    match measured.outcome.baseline_ns {
                        Some(ns) => self.baselines.push((bare(&case), ns)),
                        None => measured.outcome.baseline_ns = known,
                    }
                    self.keep(point, at_s, measured);
                }
                // The terminal signals the second process too: its death is no finding.
                Err(_) if self.stopped() => return Some(End::Interrupted),
                Err(error) => {
                    let text = crate::words(&error);
                    crate::complain(&format!("doorbell: {text}"));
                    self.failed = true;
                    self.results.points[point].failed = Some(text);
                    labs.drop_of(&self.plan[at].series);
                }
            }
        }
        None
    }

    fn keep(&mut self, point: usize, at_s: f64, measured: Measured) {
        let (point, outcome) = (&mut self.results.points[point], measured.outcome);
        point.gpu = outcome.gpu;
        point.repetitions.push(Repetition {
            at_s,
            messages: outcome.messages,
            seconds: outcome.seconds,
            messages_per_s: outcome.messages_per_s,
            latency_ns: outcome.latency_ns,
            cpu_cores_used: outcome.cpu_cores_used,
            errors: outcome.errors,
            baseline_ns: outcome.baseline_ns,
            percentiles_ns: measured.percentiles,
        });
    }
}

/// A point that nothing was measured of.
fn blank(series: &Series, case: &Case) -> Point {
    Point {
        experiment: series.experiment.name().to_owned(),
        test: case.test.name().to_owned(),
        gpu: String::new(),
        initiator: case.initiator.name().to_owned(),
        sharing: case.sharing.name().to_owned(),
        link: case.link.name().to_owned(),
        mem: case.mem.name().to_owned(),
        blocks: case.blocks.into(),
        threads: case.threads.into(),
        qps: case.qps.into(),
        depth: case.depth.into(),
        batch: case.batch.into(),
        size: case.size,
        command: series.command().to_owned(),
        messages_per_s: None,
        bytes_per_s: None,
        cpu_cores_used: None,
        p50_ns: None,
        p99_ns: None,
        percentiles_ns: Vec::new(),
        baseline_ns: None,
        failed: None,
        repetitions: Vec::new(),
    }
}

/// What is measured on, and whether kernels run on a GPU.
fn environment(args: &SweepArgs, machine: &Machine) -> Result<(Environment, bool)> {
    let mut words = vec!["put-bw".to_owned()];
    if let Some(gpu) = args.device.gpu {
        words.extend(["--gpu".to_owned(), gpu.to_string()]);
    }
    if let Some(cores) = args.device.hca_cores {
        words.extend(["--hca-cores".to_owned(), cores.to_string()]);
    }
    let series = Series::new(Experiment::Blocks, words)?;
    let mut lab = Lab::open(&series.args)?;
    let case = lab
        .cases(&series.args)?
        .into_iter()
        .next()
        .context("no case")?;
    let mut environment = lab.environment(&case, machine)?;
    // These differ from point to point.
    (environment.handler, environment.cq, environment.queue_mem) = (None, None, None);
    Ok((environment, lab.gpu_is_cuda(&case)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_that_failed_is_told_however_the_sweep_ended() {
        assert_eq!(verdict(Some(End::OutOfTime), true), End::Failed);
        assert_eq!(verdict(None, true), End::Failed);
        assert_eq!(verdict(Some(End::Interrupted), true), End::Interrupted);
        assert_eq!(verdict(Some(End::OutOfTime), false), End::OutOfTime);
        assert_eq!(verdict(None, false), End::Done);
    }
}
