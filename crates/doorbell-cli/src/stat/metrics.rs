//! Metrics in Prometheus's text format over HTTP: `GET /metrics`.
//!
//! Each connection has a thread and a deadline: whoever dawdles is cut off, and keeps nobody else from being served. Beyond so many at the same time,
//! the next is hung up on.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use doorbell::report::{ProcessReport, quantile};

use super::{Look, latency};
use crate::Ended;
use crate::args::Whom;

/// For all of a connection: question and answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Connections at the same time.
const AT_ONCE: usize = 32;
/// After the system had none to give.
const PAUSE: Duration = Duration::from_millis(100);
/// A question is a few lines.
const QUESTION: usize = 8 << 10;

/// Serves until the process is told to end.
pub(super) fn serve(address: &str, whom: Whom) -> Result<Ended> {
    let listener = TcpListener::bind(address)
        .with_context(|| format!("listening at {address} for --prometheus"))?;
    let local = listener.local_addr().context("asking for the address")?;
    // On standard output, so that whoever gave port 0 can read which one it is.
    crate::out::say(&format!("serving http://{local}/metrics\n"))?;
    let busy = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => {
                    complain(&error);
                    // Such as too many open files: not at full speed.
                    std::thread::sleep(PAUSE);
                    continue;
                }
            };
            if busy.fetch_add(1, Ordering::Relaxed) >= AT_ONCE {
                busy.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let busy = &busy;
            let started = std::thread::Builder::new().spawn_scoped(scope, move || {
                if let Err(error) = answer(stream, whom) {
                    complain(&error);
                }
                busy.fetch_sub(1, Ordering::Relaxed);
            });
            if let Err(error) = started {
                complain(&doorbell::limits::thread(error));
                busy.fetch_sub(1, Ordering::Relaxed);
                std::thread::sleep(PAUSE);
            }
        }
    });
    Ok(Ended::Well)
}

fn complain(error: &std::io::Error) {
    crate::complain(&format!("doorbell: a connection to /metrics: {error}"));
}

fn answer(mut stream: TcpStream, whom: Whom) -> std::io::Result<()> {
    let until = Instant::now() + DEADLINE;
    let left = || {
        let left = until.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(std::io::Error::from(std::io::ErrorKind::TimedOut)),
            false => Ok(left),
        }
    };
    let mut question = Vec::new();
    let mut piece = [0; 1024];
    while !question.windows(4).any(|w| w == b"\r\n\r\n") && question.len() < QUESTION {
        stream.set_read_timeout(Some(left()?))?;
        match stream.read(&mut piece)? {
            0 => break,
            n => question.extend_from_slice(&piece[..n]),
        }
    }
    let (status, body) = match question.split(|b| *b == b'\r').next() {
        Some(line) if line.starts_with(b"GET /metrics ") => match super::look(whom) {
            Ok(looks) => ("200 OK", text(&looks)),
            // A scraper should see that there is nothing to see.
            Err(error) => (
                "503 Service Unavailable",
                format!("{}\n", crate::words(&error)),
            ),
        },
        Some(line) if line.starts_with(b"GET ") => {
            ("404 Not Found", "the metrics are at /metrics\n".to_owned())
        }
        _ => ("405 Method Not Allowed", "GET /metrics\n".to_owned()),
    };
    stream.set_write_timeout(Some(left()?))?;
    stream.write_all(
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .as_bytes(),
    )
}

/// What was seen as metrics. A process that says nothing is one of them.
fn text(looks: &[Look]) -> String {
    let mut page = Page::default();
    for (pid, report) in looks {
        let labels = [("pid", pid.to_string())];
        page.gauge(
            "process_answers",
            &labels,
            f64::from(u8::from(report.is_ok())),
        );
        if let Ok(report) = report {
            process(&mut page, report);
        }
    }
    page.text()
}

fn process(page: &mut Page, report: &ProcessReport) {
    let pid = [("pid", report.pid.to_string())];
    page.counter("process_cpu_seconds", &pid, report.cpu_ns as f64 / 1e9);
    let latencies = latency::of(report);
    for (name, share) in [("latency_p50_seconds", 0.5), ("latency_p99_seconds", 0.99)] {
        if let Some(ns) = quantile(&latencies, share) {
            page.gauge(name, &pid, ns as f64 / 1e9);
        }
    }
    for device in &report.devices {
        let hca = [pid[0].clone(), ("hca", format!("{:016x}", device.id))];
        for (i, core) in device.cores.iter().enumerate() {
            let labels = [hca[0].clone(), hca[1].clone(), ("core", i.to_string())];
            page.counter("core_rounds", &labels, core.rounds as f64);
            page.gauge(
                "core_dead",
                &labels,
                f64::from(u8::from(core.dead.is_some())),
            );
            if let Some(ns) = core.cpu_ns {
                page.counter("core_cpu_seconds", &labels, ns as f64 / 1e9);
            }
            page.counters("core_", &labels, &core.counters);
        }
        page.counters("port_", &hca, &device.roce);
        for qp in &device.qps {
            let labels = [
                hca[0].clone(),
                hca[1].clone(),
                ("qp", format!("{:#08x}", qp.qpn)),
            ];
            page.gauge("qp_stuck", &labels, f64::from(u8::from(qp.stuck)));
            page.counters("qp_", &labels, &qp.counters);
            page.counters("qp_roce_", &labels, &qp.roce);
        }
    }
}

/// A page of the text format: each family together, under what it is.
#[derive(Default)]
struct Page(Vec<Family>);

/// All samples of one name.
struct Family {
    name: String,
    kind: &'static str,
    samples: String,
}

impl Page {
    fn counter(&mut self, name: &str, labels: &[(&str, String)], value: f64) {
        self.add(format!("doorbell_{name}_total"), "counter", labels, value);
    }

    fn counters(&mut self, prefix: &str, labels: &[(&str, String)], all: &[(String, u64)]) {
        for (name, n) in all {
            self.counter(&format!("{prefix}{name}"), labels, *n as f64);
        }
    }

    fn gauge(&mut self, name: &str, labels: &[(&str, String)], value: f64) {
        self.add(format!("doorbell_{name}"), "gauge", labels, value);
    }

    fn add(&mut self, name: String, kind: &'static str, labels: &[(&str, String)], value: f64) {
        let labels: Vec<String> = labels
            .iter()
            .map(|(label, v)| format!("{label}=\"{v}\""))
            .collect();
        let sample = format!("{name}{{{}}} {value}\n", labels.join(","));
        match self.0.iter_mut().find(|f| f.name == name) {
            Some(family) => family.samples.push_str(&sample),
            None => self.0.push(Family {
                name,
                kind,
                samples: sample,
            }),
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for family in &self.0 {
            let (name, kind) = (&family.name, family.kind);
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "# HELP {name} {}\n# TYPE {name} {kind}\n{}",
                help(name),
                family.samples
            );
        }
        text
    }
}

/// What a metric is, in a line.
fn help(name: &str) -> String {
    let stem = name
        .trim_start_matches("doorbell_")
        .trim_end_matches("_total");
    match stem {
        "process_answers" => {
            "1 if the process said what it does; 0 if it is stopped or hangs.".to_owned()
        }
        "process_cpu_seconds" => "Processor time of the process.".to_owned(),
        "latency_p50_seconds" => {
            "Median of the latest second's requests, doorbell to completion; 0: below a microsecond."
                .to_owned()
        }
        "latency_p99_seconds" => {
            "99th percentile of the latest second's requests, doorbell to completion.".to_owned()
        }
        "core_rounds" => "Rounds of an engine core: its heartbeat.".to_owned(),
        "core_dead" => "1 if an engine core has died.".to_owned(),
        "core_cpu_seconds" => "Processor time of an engine core's thread.".to_owned(),
        "qp_stuck" => "1 if a queue pair stands still with work to do, or has failed.".to_owned(),
        other => {
            let (whose, what) = ["qp_roce_", "qp_", "core_", "port_"]
                .into_iter()
                .find_map(|prefix| Some((prefix, other.strip_prefix(prefix)?)))
                .unwrap_or(("", other));
            let whose = match whose {
                "qp_roce_" => "RoCE connection, by the rdma tool's name",
                "qp_" => "Queue pair",
                "core_" => "Engine core",
                "port_" => "RoCE port, by the rdma tool's name",
                _ => "Process",
            };
            format!("{whose}: {}.", what.replace('_', " "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doorbell::report::server::ReportError;
    use std::collections::{BTreeMap, BTreeSet};

    /// The text format as its description has it; an error names the line. Families and their numbers of samples.
    fn parse(text: &str) -> Result<BTreeMap<String, usize>, String> {
        let is_name = |s: &str| {
            !s.is_empty()
                && !s.starts_with(|c: char| c.is_ascii_digit())
                && s.chars()
                    .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
        };
        let (mut families, mut kinds, mut seen) =
            (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let mut current = String::new();
        if !text.ends_with('\n') {
            return Err("the last line does not end".to_owned());
        }
        for line in text.lines() {
            let wrong = |why: &str| Err(format!("{why}: {line}"));
            if let Some(rest) = line.strip_prefix("# ") {
                let mut words = rest.splitn(3, ' ');
                let (what, name, more) = (
                    words.next(),
                    words.next().unwrap_or(""),
                    words.next().unwrap_or(""),
                );
                if !is_name(name) || more.is_empty() {
                    return wrong("no name, or nothing said of it");
                }
                match what {
                    Some("HELP") => {}
                    Some("TYPE") => {
                        if kinds.insert(name.to_owned(), more.to_owned()).is_some() {
                            return wrong("a second TYPE, or samples apart from each other");
                        }
                        current = name.to_owned();
                    }
                    _ => return wrong("neither HELP nor TYPE"),
                }
                continue;
            }
            let Some((series, value)) = line.rsplit_once(' ') else {
                return wrong("no value");
            };
            if value.parse::<f64>().is_err() {
                return wrong("no number");
            }
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let Some(labels) = labels.strip_suffix('}') else {
                return wrong("labels do not end");
            };
            for label in labels.split(',').filter(|l| !l.is_empty()) {
                let Some((key, quoted)) = label.split_once('=') else {
                    return wrong("a label without a value");
                };
                let inner = quoted.strip_prefix('"').and_then(|q| q.strip_suffix('"'));
                if !is_name(key) || inner.is_none_or(|v| v.contains(['"', '\\', '\n'])) {
                    return wrong("a label's name or quotes");
                }
            }
            if name != current || !is_name(name) {
                return wrong("outside of its family");
            }
            if kinds[name] == "counter" && !name.ends_with("_total") {
                return wrong("a counter without _total");
            }
            if !seen.insert(series.to_owned()) {
                return wrong("twice the same series");
            }
            *families.entry(name.to_owned()).or_default() += 1;
        }
        Ok(families)
    }

    #[test]
    fn the_page_is_valid_and_has_what_is_promised() {
        let device = doorbell::Device::builder()
            .gpu(doorbell::GpuSelect::Host)
            .hca_cores(2)
            .open()
            .unwrap();
        let pd = device.pd().unwrap();
        let _qps = [0, 1].map(|_| pd.qp().build().unwrap().connect_to_self().unwrap());
        let mut own = super::super::tests::begun(&device);
        own.qps[0].roce = vec![("packet_seq_err".into(), 3)];
        own.roce = vec![("sent_packets".into(), 4)];
        own.latencies = vec![(12_000, 1)];
        let report = |pid| ProcessReport {
            pid,
            devices: vec![own.clone()],
            ..super::super::tests::report(0, 1_500_000_000)
        };
        let stopped = (3, Err(ReportError::Stopped { pid: 3 }));
        let text = text(&[(1, Ok(report(1))), (2, Ok(report(2))), stopped]);
        let families = parse(&text).unwrap_or_else(|e| panic!("{e}"));
        for (name, samples) in [
            ("doorbell_process_answers", 3),
            ("doorbell_process_cpu_seconds_total", 2),
            ("doorbell_latency_p50_seconds", 2),
            ("doorbell_core_cpu_seconds_total", 4),
            ("doorbell_core_rounds_total", 4),
            ("doorbell_qp_wqes_total", 4),
            ("doorbell_qp_stuck", 4),
            ("doorbell_qp_roce_packet_seq_err_total", 2),
            ("doorbell_port_sent_packets_total", 2),
        ] {
            assert_eq!(families.get(name), Some(&samples), "{name} in {families:?}");
        }
        assert!(text.contains("doorbell_process_cpu_seconds_total{pid=\"1\"} 1.5\n"));
        assert!(text.contains("doorbell_process_answers{pid=\"3\"} 0\n"));
        assert!(
            text.contains("doorbell_latency_p99_seconds{pid=\"1\"} 0.000012\n"),
            "{text}"
        );
        assert_eq!(
            parse(&super::text(&[])),
            Err("the last line does not end".into())
        );
    }

    #[test]
    fn the_parser_finds_what_is_wrong() {
        let head = "# HELP a_total x\n# TYPE a_total counter\n";
        assert!(parse(&format!("{head}a_total{{b=\"c\"}} 1\n")).is_ok());
        for bad in [
            "a_total{b=\"c\"}\n",
            "a_total{b=c} 1\n",
            "b_total 1\n",
            "a_total 1\na_total 1\n",
            "a_total 1",
            "a_total x\n",
        ] {
            assert!(parse(&format!("{head}{bad}")).is_err(), "{bad}");
        }
    }
}
