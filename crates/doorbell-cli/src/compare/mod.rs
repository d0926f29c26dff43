//! `doorbell compare`: what changed from one sweep to another beyond noise.
//!
//! `sets` reads either kind of result file into figures with their repetitions, `noise` decides, `screen` prints. Figures compare on
//! one machine only, so two of different machines are refused unless that is what was asked for.

mod noise;
mod screen;
mod sets;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use self::noise::{Judge, Verdict};
use self::sets::{Figure, Set};
use crate::Ended;
use crate::args::CompareArgs;
use crate::schema::Environment;
use crate::sweep::results::Spread;

/// The name and version of what `--json` prints.
const SCHEMA: &str = "doorbell-compare/1";
/// Exit statuses: something got worse; nothing could be compared.
const WORSE: u8 = 1;
const COULD_NOT: u8 = 3;

/// What `--json` prints. Fields may be added within version 1, never renamed or removed.
#[derive(Debug, Serialize)]
struct Comparison {
    schema: &'static str,
    before: Side,
    after: Side,
    /// What else is not the same on both sides: kernel, versions, settings.
    differences: Vec<String>,
    /// So many figures of each verdict.
    worse: usize,
    better: usize,
    same: usize,
    unknown: usize,
    failed: usize,
    /// Figures that one side lacks.
    only_before: Vec<String>,
    only_after: Vec<String>,
    figures: Vec<Change>,
}

/// A file.
#[derive(Debug, Serialize)]
struct Side {
    file: String,
    started: String,
    version: String,
    git: Option<String>,
}

/// A figure on both sides.
#[derive(Debug, Serialize)]
struct Change {
    /// Test, poster, link and shape in words.
    what: String,
    /// `rate`, `p50` or `p99`.
    metric: &'static str,
    /// Of one second, or nanoseconds.
    before: Option<Spread>,
    after: Option<Spread>,
    /// Measurements on each side.
    repetitions: [usize; 2],
    /// After to before.
    ratio: Option<f64>,
    /// One standard deviation of a single measurement of both sides together, as a share.
    noise: Option<f64>,
    verdict: Verdict,
}

/// Compares, prints, and ends with the verdict.
pub(crate) fn run(args: &CompareArgs) -> Result<Ended> {
    let status = compare(args).unwrap_or_else(|error| {
        crate::complain(&format!("doorbell: {}", crate::words(&error)));
        COULD_NOT
    });
    Ok(Ended::Verdict(status))
}

fn compare(args: &CompareArgs) -> Result<u8> {
    let (before, after) = (sets::read(&args.before)?, sets::read(&args.after)?);
    if before.schema != after.schema {
        bail!(
            "{} is {} and {} is {}: compare files of one kind",
            args.before.display(),
            before.schema,
            args.after.display(),
            after.schema
        );
    }
    let machines = machines(&before.environment, &after.environment);
    if !machines.is_empty() && !args.other_machine {
        bail!(
            "they are of different machines ({}), and figures compare on one machine only: --other-machine compares them all the same",
            machines.join("; ")
        );
    }
    let mut comparison = changes(args, &before, &after);
    comparison.differences.splice(0..0, machines);
    if comparison.figures.is_empty() {
        bail!("they have no figure in common: sweep with the same options");
    }
    let text = match args.json {
        true => serde_json::to_string_pretty(&comparison).context("writing JSON")? + "\n",
        false => {
            let styled = crate::is_styled(&std::io::stdout());
            screen::text(&comparison, args.all, styled)
        }
    };
    crate::out::say(&text)?;
    let worse = comparison.worse + comparison.failed;
    Ok(if worse > 0 { WORSE } else { 0 })
}

fn changes(args: &CompareArgs, before: &Set, after: &Set) -> Comparison {
    let judge = Judge::new(&before.figures, &after.figures);
    let find = |set: &Set, figure: &Figure| {
        set.figures
            .iter()
            .position(|f| f.key == figure.key && f.metric == figure.metric)
    };
    let missing = |from: &Set, other: &Set| -> Vec<String> {
        from.figures
            .iter()
            .filter(|f| find(other, f).is_none())
            .map(|f| format!("{}, {}", f.what, f.metric.name()))
            .collect()
    };
    let figures: Vec<Change> = before
        .figures
        .iter()
        .filter_map(|figure| {
            let other = &after.figures[find(after, figure)?];
            Some(judge.change(figure, other))
        })
        .collect();
    let count = |verdict| figures.iter().filter(|c| c.verdict == verdict).count();
    Comparison {
        schema: SCHEMA,
        before: side(&args.before, before),
        after: side(&args.after, after),
        differences: differences(&before.environment, &after.environment),
        worse: count(Verdict::Worse),
        better: count(Verdict::Better),
        same: count(Verdict::Same),
        unknown: count(Verdict::Unknown),
        failed: count(Verdict::Failed),
        only_before: missing(before, after),
        only_after: missing(after, before),
        figures,
    }
}

fn side(file: &std::path::Path, set: &Set) -> Side {
    let e = &set.environment;
    Side {
        file: file.display().to_string(),
        started: e.started.clone(),
        version: e.version.clone(),
        git: e.git.clone(),
    }
}

/// A fact of one side and of the other, where they differ.
fn differ<T: PartialEq + std::fmt::Display>(
    name: &str,
    a: Option<&T>,
    b: Option<&T>,
) -> Option<String> {
    let words = |v: Option<&T>| v.map_or("none".to_owned(), T::to_string);
    (a != b).then(|| format!("{name}: {}, then {}", words(a), words(b)))
}

/// What makes two machines different ones.
fn machines(a: &Environment, b: &Environment) -> Vec<String> {
    [
        differ("processor", a.cpu.as_ref(), b.cpu.as_ref()),
        differ("CPUs", Some(&a.cpus), Some(&b.cpus)),
        differ("CPU quota", a.cpu_quota.as_ref(), b.cpu_quota.as_ref()),
        differ("GPU", a.gpu.as_ref(), b.gpu.as_ref()),
        differ("target", a.target.as_ref(), b.target.as_ref()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What else may be behind a change.
fn differences(a: &Environment, b: &Environment) -> Vec<String> {
    [
        differ("version", Some(&a.version), Some(&b.version)),
        differ("commit", a.git.as_ref(), b.git.as_ref()),
        differ("build", a.profile.as_ref(), b.profile.as_ref()),
        differ("kernel", a.kernel.as_ref(), b.kernel.as_ref()),
        differ("driver", a.driver.as_ref(), b.driver.as_ref()),
        differ("CUDA", a.cuda.as_ref(), b.cuda.as_ref()),
        differ("engine cores", a.hca_cores.as_ref(), b.hca_cores.as_ref()),
        differ("handler", a.handler.as_ref(), b.handler.as_ref()),
        differ("CQ", a.cq.as_ref(), b.cq.as_ref()),
        differ("queue memory", a.queue_mem.as_ref(), b.queue_mem.as_ref()),
    ]
    .into_iter()
    .flatten()
    .collect()
}
