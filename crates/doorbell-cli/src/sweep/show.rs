//! How far a sweep is: a bar on a terminal, a line now and then where nobody looks at one.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::plan::Series;
use crate::perf::plan::Case;
use crate::progress::Shown;
use crate::units;

/// Progress on standard error.
pub(super) struct Show {
    bar: Option<Shown>,
    passes: u32,
    /// Pass and experiment that were announced last, and since when.
    at: Option<(u32, &'static str)>,
    since: Instant,
    prefix: String,
}

impl Show {
    /// Over `passes` of `points` measurements each.
    pub(super) fn new(passes: u32, points: usize) -> Self {
        let bar = crate::is_styled(&std::io::stderr()).then(|| {
            let bar = ProgressBar::new(u64::from(passes) * points as u64);
            bar.set_style(
                ProgressStyle::with_template("{bar:24} {percent:>3}%  {eta:>3} left  {wide_msg}")
                    .unwrap_or_else(|_| ProgressStyle::default_bar())
                    .progress_chars("━╸─"),
            );
            Shown::new(bar)
        });
        Self {
            bar,
            passes,
            at: None,
            since: Instant::now(),
            prefix: String::new(),
        }
    }

    /// A series begins.
    pub(super) fn series(&mut self, pass: u32, series: &Series) {
        let now = (pass, series.experiment.name());
        if self.at != Some(now) {
            self.line();
            (self.at, self.since) = (Some(now), Instant::now());
        }
        self.prefix = format!("pass {} of {}: {}", pass + 1, self.passes, now.1);
    }

    /// Without a bar: what is behind us.
    fn line(&self) {
        if let (None, Some((pass, what))) = (&self.bar, self.at) {
            crate::complain(&format!(
                "pass {} of {}: {what}, {:.1} s",
                pass + 1,
                self.passes,
                self.since.elapsed().as_secs_f64()
            ));
        }
    }

    /// A case begins.
    pub(super) fn case(&self, case: &Case) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!(
                "{}, {} {} {}x{} {}",
                self.prefix,
                case.link.name(),
                case.who(),
                case.blocks,
                case.threads,
                units::size(case.size)
            ));
        }
    }

    /// A case is behind us.
    pub(super) fn step(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }
}

impl Drop for Show {
    fn drop(&mut self) {
        self.line();
    }
}
