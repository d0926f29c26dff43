//! What a sweep measures: series of cases, each written as the `doorbell perf` command that measures it.
//!
//! A series is a command, so whoever doubts a point of the report can repeat it, and nothing here can be measured that `perf` could
//! not. Which series make sense depends on who plays the GPU: where host threads do, a CPU-initiated put is what they do anyway, and a
//! block of hundreds of threads would measure the scheduler.

use clap::Parser;

use anyhow::{Context as _, Result, bail};

use crate::args::{Cli, Command, Link, PerfArgs};
use crate::args::{Experiment, SWEEP_LINKS, SweepArgs};

/// One `doorbell perf` command and what it is part of.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) experiment: Experiment,
    /// The command to repeat it.
    command: String,
    /// As `perf` takes it.
    pub(crate) args: PerfArgs,
}

impl Series {
    /// `words`: without `doorbell perf`.
    pub(crate) fn new(experiment: Experiment, words: Vec<String>) -> Result<Self> {
        // A fault's rule has spaces in it.
        let quoted = |word: &String| match word.contains(char::is_whitespace) {
            true => format!("'{word}'"),
            false => word.clone(),
        };
        let quoted: Vec<String> = words.iter().map(quoted).collect();
        let command = format!("doorbell perf {}", quoted.join(" "));
        let all = ["doorbell", "perf"].map(str::to_owned);
        let parsed = Cli::try_parse_from(all.into_iter().chain(words));
        match parsed.with_context(|| command.clone())?.command {
            Command::Perf(args) => Ok(Self {
                experiment,
                command,
                args: *args,
            }),
            _ => bail!("{command} is no perf command"),
        }
    }

    /// The command to repeat it.
    pub(crate) fn command(&self) -> &str {
        &self.command
    }
}

/// What the machine allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Here {
    /// Kernels run on a GPU; false: on host threads.
    pub(crate) cuda: bool,
    pub(crate) cpus: u64,
}

/// All series, in the order measured.
pub(crate) fn series(args: &SweepArgs, here: Here) -> Result<Vec<Series>> {
    let mut plan = Plan {
        args,
        here,
        out: Vec::new(),
    };
    for experiment in Experiment::ALL {
        if !args.only.is_empty() && !args.only.contains(&experiment) {
            continue;
        }
        match experiment {
            Experiment::Blocks => plan.blocks(),
            Experiment::Sizes => plan.sizes("put-bw", Experiment::Sizes),
            Experiment::Gets => plan.sizes("get-bw", Experiment::Gets),
            Experiment::Latency => plan.latency(),
            Experiment::Queues => plan.queues(),
        }
    }
    let all = plan.out.into_iter();
    all.map(|(experiment, words)| Series::new(experiment, words))
        .collect()
}

/// What the reader of a report should know about what was left out.
pub(crate) fn notes(here: Here) -> Vec<String> {
    match here.cuda {
        true => Vec::new(),
        false => vec![
            "No GPU: host threads play it. A CPU-initiated put is the same code there, so it has no line of its own.".to_owned(),
        ],
    }
}

struct Plan<'a> {
    args: &'a SweepArgs,
    here: Here,
    out: Vec<(Experiment, Vec<String>)>,
}

impl Plan<'_> {
    fn links(&self) -> Vec<Link> {
        match self.args.links.as_slice() {
            [] => SWEEP_LINKS.to_vec(),
            some => SWEEP_LINKS
                .into_iter()
                .filter(|link| some.contains(link))
                .collect(),
        }
    }

    fn add(&mut self, experiment: Experiment, link: Link, words: &[&str]) {
        let mut all: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        if link != Link::Loopback {
            all.extend(["--link".to_owned(), link.name().to_owned()]);
        }
        if let (Link::Roce, Some(host)) = (link, &self.args.connect) {
            all.extend(["--connect".to_owned(), host.clone()]);
        }
        if !words.contains(&"--iters") {
            let secs = self
                .args
                .secs
                .map_or(if self.args.quick { 0.1 } else { 0.3 }, |s| s.as_secs_f64());
            all.extend(["--secs".to_owned(), secs.to_string()]);
        }
        let device = &self.args.device;
        if let Some(gpu) = device.gpu {
            all.extend(["--gpu".to_owned(), gpu.to_string()]);
        }
        if let Some(cores) = device.hca_cores {
            all.extend(["--hca-cores".to_owned(), cores.to_string()]);
        }
        all.extend(device.fault.words());
        all.extend([
            "--timeout".to_owned(),
            self.args.timeout.as_secs_f64().to_string(),
        ]);
        self.out.push((experiment, all));
    }

    /// Rate against blocks, for each initiator, over loopback: what posting costs, not what a wire does.
    fn blocks(&mut self) {
        if !self.links().contains(&Link::Loopback) {
            return;
        }
        let cuda = self.here.cuda;
        let counts = match (&self.args.blocks, self.args.quick, cuda) {
            (Some(list), _, _) => list.0.clone(),
            (None, true, true) => vec![1, 4, 16, 64],
            (None, true, false) => vec![1, 2, 4, 8],
            (None, false, true) => doubling(1, 128),
            (None, false, false) => doubling(1, 32),
        };
        let all = list(&counts);
        // So many threads on each processor that the scheduler still gets round to all.
        let few = |threads: u64, each: u64| {
            let most = (self.here.cpus * each / threads).max(1);
            list(
                &counts
                    .iter()
                    .copied()
                    .filter(|n| cuda || *n <= most)
                    .collect::<Vec<_>>(),
            )
        };
        let (warps, cpus) = (few(32, 64), list(&self.cpu_counts(&counts)));
        let mut add = |words: &[&str], blocks: &str| {
            if !blocks.is_empty() {
                let mut all = vec!["put-bw", "--blocks", blocks];
                all.extend(words);
                self.add(Experiment::Blocks, Link::Loopback, &all);
            }
        };
        add(&[], &all);
        add(&["--sharing", "block", "--threads", "32"], &warps);
        if cuda {
            add(&["--sharing", "block", "--threads", "256"], &all);
        }
        add(&["--initiator", "assisted"], &all);
        add(&["--initiator", "proxy"], &all);
        if cuda {
            add(&["--initiator", "cpu"], &cpus);
        }
    }

    /// CPU threads beyond the processors measure the scheduler.
    fn cpu_counts(&self, counts: &[u64]) -> Vec<u64> {
        let most = self.here.cpus.max(1);
        counts.iter().copied().filter(|n| *n <= most).collect()
    }

    /// Rate and bandwidth against size, over each link; on a GPU also with payloads in its memory.
    fn sizes(&mut self, test: &str, experiment: Experiment) {
        let sizes = match (&self.args.sizes, self.args.quick) {
            (Some(list), _) => list.0.clone(),
            (None, true) => vec![8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20],
            (None, false) => doubling(8, 4 << 20),
        };
        let sizes = list(&sizes);
        for link in self.links() {
            self.add(experiment, link, &[test, "--size", &sizes]);
        }
        if self.here.cuda && self.links().contains(&Link::Loopback) {
            let words = [test, "--size", &sizes, "--mem", "gpu"];
            self.add(experiment, Link::Loopback, &words);
        }
    }

    fn latency(&mut self) {
        let sizes = match self.args.quick {
            true => list(&[8]),
            false => list(&[8, 64, 512, 4096, 32_768]),
        };
        // Counted and not timed: a launch is not cut short, and over RoCE one is slow.
        let iters = if self.args.quick { "2000" } else { "16000" };
        let tests: &[&str] = match self.args.quick {
            true => &["put-lat", "get-lat"],
            false => &["put-lat", "signal-lat", "get-lat"],
        };
        for link in self.links() {
            for &test in tests {
                let words = [test, "--size", &sizes, "--iters", iters];
                self.add(Experiment::Latency, link, &words);
            }
        }
    }

    /// Queue pairs are not a list of `perf`'s: a command each.
    fn queues(&mut self) {
        if !self.links().contains(&Link::Loopback) {
            return;
        }
        let counts = match self.args.quick {
            true => vec![1, 8, 64, 512],
            false => vec![1, 4, 16, 64, 256, 1024, 4096],
        };
        for count in counts {
            let words = ["put-bw", "--qps", &count.to_string()];
            self.add(Experiment::Queues, Link::Loopback, &words);
        }
    }
}

fn doubling(from: u64, to: u64) -> Vec<u64> {
    std::iter::successors(Some(from), |n| Some(n * 2))
        .take_while(|n| *n <= to)
        .collect()
}

/// As `perf` takes a list; empty for none.
fn list(values: &[u64]) -> String {
    let words: Vec<String> = values.iter().map(u64::to_string).collect();
    words.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> SweepArgs {
        let all = ["doorbell", "sweep"].into_iter();
        match Cli::try_parse_from(all.chain(text.split_whitespace()))
            .unwrap()
            .command
        {
            Command::Sweep(args) => *args,
            _ => unreachable!("the words begin with sweep"),
        }
    }

    #[test]
    fn every_series_is_a_perf_command() {
        for cuda in [false, true] {
            for text in [
                "",
                "--quick",
                "--quick --gpu host --hca-cores 1 --connect h",
                "--sizes 8 --blocks 3",
            ] {
                let all = series(&args(text), Here { cuda, cpus: 2 }).unwrap();
                for experiment in Experiment::ALL {
                    assert!(
                        all.iter().any(|s| s.experiment == experiment),
                        "{text} {experiment:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_was_chosen_is_measured_and_nothing_else() {
        let here = Here {
            cuda: false,
            cpus: 2,
        };
        let all = series(&args("--only sizes --links roce --sizes 8,64"), here).unwrap();
        assert_eq!(all.len(), 1);
        assert!(
            all[0]
                .command()
                .starts_with("doorbell perf put-bw --size 8,64 --link roce")
        );
        // Initiators are compared over loopback.
        assert!(
            series(&args("--only blocks --links shm"), here)
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn host_threads_are_not_asked_for_by_the_thousand() {
        let host = series(
            &args("--blocks 1:64"),
            Here {
                cuda: false,
                cpus: 2,
            },
        )
        .unwrap();
        let warps = host
            .iter()
            .find(|s| s.command().contains("--sharing block"))
            .unwrap();
        assert!(
            warps.command().contains("--blocks 1,2,4 "),
            "{}",
            warps.command()
        );
        assert!(!host.iter().any(|s| s.command().contains("--threads 256")));
    }
}
