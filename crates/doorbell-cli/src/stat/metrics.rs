//! Metrics in Prometheus's text format over HTTP: `GET /metrics`.
//!
//! A listener for one scraper at a time, with a deadline for each connection: whoever dawdles is cut off, and the next one served.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use doorbell::report::ProcessReport;

use crate::args::Whom;
use crate::{Ended, dump};

/// For all of a connection: question and answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// A question is a few lines.
const QUESTION: usize = 8 << 10;

/// Serves until the process is told to end.
pub(super) fn serve(address: &str, whom: Whom) -> Result<Ended> {
    let listener = TcpListener::bind(address)
        .with_context(|| format!("listening at {address} for --prometheus"))?;
    let local = listener.local_addr().context("asking for the address")?;
    // On standard output, so that whoever gave port 0 can read which one it is.
    writeln!(std::io::stdout(), "serving http://{local}/metrics")?;
    for stream in listener.incoming() {
        let answered = stream.and_then(|s| answer(s, whom));
        if let Err(error) = answered {
            crate::complain(&format!("doorbell: a connection to /metrics: {error}"));
        }
    }
    Ok(Ended::Well)
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
        Some(line) if line.starts_with(b"GET /metrics ") => match dump::gather(whom) {
            Ok(reports) => ("200 OK", text(&reports)),
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

/// The reports as metrics, each family together, as the format wants it.
fn text(reports: &[ProcessReport]) -> String {
    let mut families: Vec<Family> = Vec::new();
    let mut add = |name: String, kind: &'static str, labels: String, value: String| {
        let line = format!("{name}{{{labels}}} {value}\n");
        match families.iter_mut().find(|f| f.name == name) {
            Some(family) => family.lines.push_str(&line),
            None => families.push(Family {
                name,
                kind,
                lines: line,
            }),
        }
    };
    for report in reports {
        let pid = format!("pid=\"{}\"", report.pid);
        let seconds = format!("{}", report.cpu_ns as f64 / 1e9);
        add(
            "doorbell_process_cpu_seconds_total".into(),
            "counter",
            pid.clone(),
            seconds,
        );
        for device in &report.devices {
            let hca = format!("{pid},hca=\"{:016x}\"", device.id);
            for (i, core) in device.cores.iter().enumerate() {
                let labels = format!("{hca},core=\"{i}\"");
                add(
                    "doorbell_core_rounds_total".into(),
                    "counter",
                    labels.clone(),
                    core.rounds.to_string(),
                );
                let dead = u8::from(core.dead.is_some()).to_string();
                add("doorbell_core_dead".into(), "gauge", labels.clone(), dead);
                for (name, n) in &core.counters {
                    add(
                        format!("doorbell_core_{name}_total"),
                        "counter",
                        labels.clone(),
                        n.to_string(),
                    );
                }
            }
            for (name, n) in &device.roce {
                add(
                    format!("doorbell_port_{name}_total"),
                    "counter",
                    hca.clone(),
                    n.to_string(),
                );
            }
            for qp in &device.qps {
                let labels = format!("{hca},qp=\"{:#08x}\"", qp.qpn);
                let stuck = u8::from(qp.stuck).to_string();
                add("doorbell_qp_stuck".into(), "gauge", labels.clone(), stuck);
                for (name, n) in &qp.counters {
                    add(
                        format!("doorbell_qp_{name}_total"),
                        "counter",
                        labels.clone(),
                        n.to_string(),
                    );
                }
                for (name, n) in &qp.roce {
                    add(
                        format!("doorbell_qp_roce_{name}_total"),
                        "counter",
                        labels.clone(),
                        n.to_string(),
                    );
                }
            }
        }
    }
    let mut text = String::new();
    for family in families {
        // Writing to a string does not fail.
        let _ = writeln!(text, "# TYPE {} {}", family.name, family.kind);
        text.push_str(&family.lines);
    }
    text
}

/// All lines of one name.
struct Family {
    name: String,
    kind: &'static str,
    lines: String,
}
