//! `doorbell stat`: what the queue pairs of running processes do, a line a second, or as metrics for Prometheus.
//!
//! The processes are asked (see `doorbell::report`); they count anyway, so being watched costs them one look a second.

mod latency;
mod metrics;

use std::collections::HashSet;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use doorbell::report::ProcessReport;
use doorbell::report::server::{self, ReportError};

use crate::args::{StatArgs, Whom};
use crate::table::{self, Column, Table};
use crate::{Ended, units};

/// Lines below which the heading is printed again.
const SCREEN: u64 = 20;

/// What is counted, summed over the queue pairs of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    wqes: u64,
    bytes: u64,
    doorbells: u64,
    retries: u64,
    errors: u64,
    queue_pairs: u64,
}

/// Watches, or serves metrics.
pub(crate) fn run(args: &StatArgs) -> Result<Ended> {
    let whom = args.pid.unwrap_or(Whom::All);
    match &args.prometheus {
        Some(address) => metrics::serve(address, whom),
        None => watch(args, whom),
    }
}

/// What processes answer within, all together: one that hangs delays the others by no more.
const PATIENCE: Duration = Duration::from_secs(1);

/// One process as it was seen.
type Look = (u32, Result<ProcessReport, ReportError>);

/// A look at all; an error if there is nothing to look at.
fn look(whom: Whom) -> Result<Vec<Look>> {
    let pid = match whom {
        Whom::Process(pid) => Some(pid),
        Whom::All => None,
    };
    let mut looks =
        server::look_at(pid, PATIENCE).context("listing the sockets of this machine")?;
    if looks.is_empty() {
        bail!(
            "no process to look at: none of this user has an open Doorbell device here, or they run with DOORBELL_REPORT=off"
        );
    }
    // One that was named and is not there is the whole answer.
    let absent = |look: &mut Look| pid.is_some() && look.1.as_ref().is_err_and(|e| !is_silent(e));
    match looks.pop_if(absent) {
        Some((_, Err(error))) => Err(error.into()),
        _ => Ok(looks),
    }
}

/// Is it there, and says nothing now?
fn is_silent(error: &ReportError) -> bool {
    matches!(
        error,
        ReportError::Stopped { .. } | ReportError::Silent { .. }
    )
}

fn watch(args: &StatArgs, whom: Whom) -> Result<Ended> {
    let mut out = crate::out::out();
    let table = columns(crate::is_styled(&io::stdout()));
    let mut before = look(whom)?;
    let mut lines = 0;
    for turn in 0.. {
        if args.count.is_some_and(|count| turn >= count) || crate::out::reader_is_gone() {
            break;
        }
        let until = Instant::now() + args.interval;
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        let now = match look(whom) {
            Ok(now) => now,
            // It has ended: that is an answer, once something was seen of it.
            Err(error) if turn > 0 => {
                crate::complain(&format!("doorbell: {}", crate::words(&error)));
                break;
            }
            Err(error) => return Err(error),
        };
        for (pid, report) in &now {
            let old = before.iter().find(|(p, _)| p == pid);
            let between = match (report, old) {
                (Ok(new), Some((_, Ok(old)))) => Ok((old, new)),
                (Err(error), _) => Err(error),
                // At the first look at one there is nothing to compare with.
                (Ok(_), _) => continue,
            };
            if lines % SCREEN == 0 {
                table.header(&mut out).context("writing")?;
            }
            lines += 1;
            match between {
                Ok((old, new)) => {
                    table.row(&mut out, &row(old, new)).context("writing")?;
                    remarks(&mut out, old, new).context("writing")?;
                }
                Err(error) => silent(&mut out, *pid, error).context("writing")?,
            }
        }
        out.flush().context("writing")?;
        before = now;
    }
    Ok(Ended::Well)
}

/// What a row has no column for.
fn remarks(out: &mut dyn Write, old: &ProcessReport, new: &ProcessReport) -> io::Result<()> {
    if let Some(line) = cores_line(old, new) {
        for line in table::wrap(&line, 71) {
            writeln!(out, "{:>7}  {line}", "")?;
        }
    }
    let which = match stuck(old, new) {
        0 => return Ok(()),
        1 => "1 queue pair is".to_owned(),
        n => format!("{n} queue pairs are"),
    };
    writeln!(out, "{:>7}  {which} stuck: doorbell dump {}", "", new.pid)
}

/// Queue pairs that were stuck at both looks and have executed nothing in between: one that repeats lost packets stands still for a moment.
fn stuck<'a>(old: &'a ProcessReport, new: &'a ProcessReport) -> usize {
    let all = |report: &'a ProcessReport| {
        let qps = report.devices.iter().flat_map(|d| &d.qps);
        qps.filter(|q| q.stuck)
            .map(|q| (q.qpn, count(&q.counters, "wqes")))
    };
    let before: HashSet<_> = all(old).collect();
    all(new).filter(|qp| before.contains(qp)).count()
}

/// A counter by its name.
fn count(counters: &[(String, u64)], name: &str) -> u64 {
    counters.iter().find(|(n, _)| n == name).map_or(0, |c| c.1)
}

/// The row of a process that says nothing, and why.
fn silent(out: &mut dyn Write, pid: u32, error: &ReportError) -> io::Result<()> {
    let word = match error {
        ReportError::Stopped { .. } => {
            "stopped: it goes on by kill -CONT, and `doorbell dump` reads its record"
        }
        ReportError::Silent { .. } => {
            "no answer: it hangs or has no time; `doorbell dump` reads its record"
        }
        other => &other.to_string(),
    };
    let mut head = format!("{pid:>7}");
    for line in table::wrap(word, 71) {
        writeln!(out, "{head}  {line}")?;
        head = format!("{:>7}", "");
    }
    Ok(())
}

/// Where a row's figures stand.
fn columns(styled: bool) -> Table {
    Table::new(
        vec![
            Column::right("PID", 7),
            Column::right("QPs", 4),
            Column::right("WQE/s", 6),
            Column::right("B/s", 6),
            Column::right("rings/s", 7),
            Column::right("retry/s", 7),
            Column::right("err", 3),
            Column::right("p50", 6),
            Column::right("p99", 6),
            Column::right("HCA", 4),
            Column::right("CPUs", 4),
        ],
        styled,
    )
}

/// What happened between two looks.
fn row(old: &ProcessReport, new: &ProcessReport) -> Vec<String> {
    let took = Duration::from_nanos(new.at_ns.saturating_sub(old.at_ns).max(1)).as_secs_f64();
    let (before, now) = (sums(old), sums(new));
    // A queue pair that ended takes its counts with it: then less than nothing happened, and nothing is shown.
    let rate = |old: u64, new: u64| new.saturating_sub(old) as f64 / took;
    let scaled = |v: f64| units::scaled(v).replace(".00", "");
    let latencies = latency::of(new);
    let cores: Vec<f64> = cores(old, new)
        .into_iter()
        .map(|ns| ns as f64 / 1e9 / took)
        .collect();
    vec![
        new.pid.to_string(),
        now.queue_pairs.to_string(),
        scaled(rate(before.wqes, now.wqes)),
        scaled(rate(before.bytes, now.bytes)),
        scaled(rate(before.doorbells, now.doorbells)),
        scaled(rate(before.retries, now.retries)),
        now.errors.to_string(),
        latency::words(&latencies, 0.5),
        latency::words(&latencies, 0.99),
        match cores.is_empty() {
            true => "-".to_owned(),
            false => format!("{:.2}", cores.iter().sum::<f64>()),
        },
        format!("{:.2}", rate(old.cpu_ns, new.cpu_ns) / 1e9),
    ]
}

/// Processor time that each engine core with a thread of its own used in between, nanoseconds.
fn cores(old: &ProcessReport, new: &ProcessReport) -> Vec<u64> {
    let mut all = Vec::new();
    for device in &new.devices {
        let before = old.devices.iter().find(|d| d.id == device.id);
        for (i, core) in device.cores.iter().enumerate() {
            let before = before
                .and_then(|d| d.cores.get(i))
                .and_then(|core| core.cpu_ns);
            if let (Some(before), Some(now)) = (before, core.cpu_ns) {
                all.push(now.saturating_sub(before));
            }
        }
    }
    all
}

/// A line of what each engine core used, where there are several.
fn cores_line(old: &ProcessReport, new: &ProcessReport) -> Option<String> {
    let took = new.at_ns.saturating_sub(old.at_ns).max(1) as f64;
    let cores = cores(old, new);
    (cores.len() > 1).then(|| {
        let each: Vec<String> = cores
            .iter()
            .map(|ns| format!("{:.2}", *ns as f64 / took))
            .collect();
        format!("engine cores: {} CPUs", each.join(" "))
    })
}

fn sums(report: &ProcessReport) -> Sums {
    let mut sums = Sums::default();
    for device in &report.devices {
        for core in &device.cores {
            sums.errors += count(&core.counters, "errors");
        }
        for qp in &device.qps {
            sums.queue_pairs += 1;
            sums.wqes += count(&qp.counters, "wqes");
            sums.bytes += count(&qp.counters, "bytes");
            sums.doorbells += count(&qp.counters, "doorbells");
            sums.retries += RETRIES
                .iter()
                .map(|name| count(&qp.roce, name))
                .sum::<u64>();
        }
    }
    sums
}

/// Counters of a RoCE connection that say that something was sent again, by the names of the rdma tool.
const RETRIES: [&str; 3] = [
    "local_ack_timeout_err",
    "packet_seq_err",
    "rnr_nak_retry_err",
];

#[cfg(test)]
pub(in crate::stat) mod tests {
    use super::*;
    use doorbell::report::{DeviceReport, SCHEMA};

    pub(in crate::stat) fn report(at_ns: u64, cpu_ns: u64) -> ProcessReport {
        ProcessReport {
            schema: SCHEMA.into(),
            version: "0".into(),
            pid: 7,
            at_ns,
            cpu_ns,
            rank: None,
            command: String::new(),
            post_mortem: None,
            condition: Default::default(),
            alive_ns: 0,
            devices: Vec::new(),
        }
    }

    /// The report of a device whose engine threads run: one that has not begun has used no CPU time that could be read.
    pub(in crate::stat) fn begun(device: &doorbell::Device) -> DeviceReport {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let report = device.report(Duration::ZERO);
            if report.cores.iter().all(|c| c.cpu_ns.is_some()) {
                return report;
            }
            assert!(Instant::now() < until, "{:?}", report.cores);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The report of a device with a queue pair on which nothing is posted.
    fn idle() -> DeviceReport {
        let device = doorbell::Device::builder()
            .gpu(doorbell::GpuSelect::Host)
            .caller_driven()
            .open()
            .unwrap();
        let pd = device.pd().unwrap();
        let _qp = pd.qp().build().unwrap().connect_to_self().unwrap();
        device.report(Duration::ZERO)
    }

    #[test]
    fn a_row_is_what_happened_in_between() {
        let mut old = report(1_000_000_000, 0);
        old.devices.push(idle());
        let mut new = report(3_000_000_000, 1_000_000_000);
        new.devices.push(old.devices[0].clone());
        for (name, n) in &mut new.devices[0].qps[0].counters {
            if name == "wqes" || name == "bytes" {
                *n += 4_000_000;
            }
        }
        let cells = row(&old, &new);
        assert_eq!(cells[2..4], ["2 M", "2 M"]);
        assert_eq!(cells[7..], ["-", "-", "-", "0.50"]);
        // Backwards (its queue pairs ended): nothing, not a huge number.
        assert_eq!(row(&new, &old)[2], "0");
    }

    #[test]
    fn a_queue_pair_that_moves_is_not_called_stuck() {
        let mut old = report(1, 0);
        old.devices.push(idle());
        old.devices[0].qps[0].stuck = true;
        let mut new = report(2, 0);
        new.devices.push(old.devices[0].clone());
        assert_eq!(stuck(&old, &new), 1);
        for (name, n) in &mut new.devices[0].qps[0].counters {
            *n += u64::from(name == "wqes");
        }
        assert_eq!(stuck(&old, &new), 0);
    }

    #[test]
    fn latencies_and_engine_threads_are_those_of_the_time_in_between() {
        let device = doorbell::Device::builder()
            .gpu(doorbell::GpuSelect::Host)
            .hca_cores(2)
            .open()
            .unwrap();
        let pd = device.pd().unwrap();
        let _qp = pd.qp().build().unwrap().connect_to_self().unwrap();
        let mut old = report(1_000_000_000, 0);
        old.devices.push(begun(&device));
        let mut new = report(2_000_000_000, 0);
        new.devices.push(old.devices[0].clone());
        for (core, ns) in new.devices[0]
            .cores
            .iter_mut()
            .zip([500_000_000, 250_000_000])
        {
            core.cpu_ns = core.cpu_ns.map(|n| n + ns);
        }
        new.devices[0].latencies = vec![(0, 1), (12_000, 8), (90_000, 1)];
        let cells = row(&old, &new);
        assert_eq!(cells[7..], ["12 µs", "90 µs", "0.75", "0.00"]);
        assert_eq!(
            cores_line(&old, &new).as_deref(),
            Some("engine cores: 0.50 0.25 CPUs")
        );
    }

    #[test]
    fn a_process_that_says_nothing_has_a_row_with_the_reason() {
        let waited = PATIENCE;
        for (error, part) in [
            (ReportError::Stopped { pid: 7 }, "      7  stopped: "),
            (
                ReportError::Silent { pid: 7, waited },
                "      7  no answer: ",
            ),
        ] {
            let mut out = Vec::new();
            silent(&mut out, 7, &error).unwrap();
            let text = String::from_utf8(out).unwrap();
            assert!(text.starts_with(part), "{text}");
            assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
            assert!(is_silent(&error));
        }
    }

    #[test]
    fn the_heading_fits_a_terminal() {
        assert!(columns(false).width() <= 80, "{}", columns(false).width());
    }
}
