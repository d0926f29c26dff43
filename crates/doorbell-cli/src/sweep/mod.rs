//! `doorbell sweep`: everything measured once over, several times, into `results.json` and a report to look at.
//!
//! `plan` says what is measured, in `doorbell perf` commands; `run` measures it in passes, each over all points, so that a point's
//! repetitions lie far apart and their spread contains what else the machine did; `results` is the file; `screen`, `html` and `plot`
//! show it. Whatever ends a sweep, what was measured by then is a valid file.

pub(crate) mod files;
mod html;
pub(crate) mod labels;
mod plan;
mod plot;
pub(crate) mod results;
mod run;
mod screen;
mod show;

#[cfg(test)]
pub(crate) mod fixture;

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::args::SweepArgs;
use crate::out::say;
use crate::{Ended, WrongArguments};

/// Exit status of a sweep that a signal ended early.
const INTERRUPTED: u8 = 130;

/// Measures, or draws again what was measured.
pub(crate) fn run(args: &SweepArgs) -> Result<Ended> {
    let folder = args.out.clone().unwrap_or_else(new_folder);
    if let Some(file) = &args.redraw {
        let results = files::read(file)?;
        files::prepare(&folder, args.force)?;
        let written = files::write(&folder, &results, &html::page(&results))?;
        say(&format!("report: {}\n", written.report.display()))?;
        return Ok(Ended::Well);
    }
    if let Some(launched) = doorbell::Launched::detect(None)? {
        let wrong = anyhow::anyhow!(
            "rank {} of {} by {}: every rank would sweep by itself; start one, and it starts its second process, or name a host with --connect",
            launched.rank,
            launched.world,
            launched.launcher
        );
        return Err(wrong.context(WrongArguments));
    }
    // Found out now, not when the results are there and cannot be kept.
    files::prepare(&folder, args.force)?;
    let stop = crate::signals::watch()?;
    let mut sweep = run::Sweep::new(args, stop)?;
    say(&format!("{}\n", screen::heading(sweep.results())))?;
    let ended =
        sweep.all(&mut |results| files::write(&folder, results, &html::page(results)).map(drop))?;
    let results = sweep.results();
    if results.points.iter().all(|p| p.repetitions.is_empty()) && results.notes.is_empty() {
        bail!("nothing was measured: name other --links or experiments");
    }
    let written = files::write(&folder, results, &html::page(results))?;
    let styled = crate::is_styled(&std::io::stdout());
    say(&format!(
        "{}\nresults: {}\nreport:  {}\n",
        screen::summary(results, styled),
        written.results.display(),
        written.report.display()
    ))?;
    let errors: u64 = results.points.iter().map(results::Point::errors).sum();
    Ok(match ended {
        run::End::Interrupted => Ended::Verdict(INTERRUPTED),
        _ if errors > 0 => Ended::CheckFailed,
        run::End::Failed => {
            crate::complain("doorbell: not everything could be measured: see above");
            Ended::Verdict(1)
        }
        run::End::Done | run::End::OutOfTime | run::End::NoTimeForMore => Ended::Well,
    })
}

/// A name that no earlier sweep has: `doorbell-sweep-20260102-030405`.
fn new_folder() -> PathBuf {
    let digits: String = crate::environment::utc_now()
        .chars()
        .filter(char::is_ascii_digit)
        .collect();
    let (day, time) = digits.split_at(8);
    PathBuf::from(format!("doorbell-sweep-{day}-{time}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_folder_has_the_time_in_its_name() {
        let name = new_folder().display().to_string();
        assert_eq!(name.len(), "doorbell-sweep-20260102-030405".len(), "{name}");
    }
}
