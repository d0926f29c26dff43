//! A trace of what flight records remember, for <https://ui.perfetto.dev>: kernels, posters, engine cores and peers on one time line.
//!
//! It is the JSON that trace viewers of browsers read ("trace event format"): an object with an array of events, times in microseconds. A
//! process of the trace is a process of the host; its threads are its kernels, its queue pairs (what their posters did), and its
//! engine cores. An arrow leads from each doorbell to the turn that executed its work.

use std::io::{self, Write};
use std::path::Path;

use doorbell_hca::record::Kind;
use serde_json::{Value, json};

use super::{DeviceReport, EventReport, ProcessReport, QpReport};

/// Threads of a process in the trace: kernels, waits, engine cores from here, queue pairs from there.
const KERNELS: u64 = 1;
const WAITS: u64 = 2;
const CORES: u64 = 100;
const QPS: u64 = 10_000;
/// A slice that has no length of its own is shown this long, nanoseconds, if there is room.
const MARK: u64 = 200;

/// Looks, before there is a trace, whether it could be written there.
///
/// # Errors
/// [`Error::Trace`](crate::Error::Trace), with what the system says.
pub fn check(path: &Path) -> crate::Result<()> {
    crate::input::check(path).map_err(|source| crate::Error::Trace {
        path: path.to_owned(),
        source,
    })
}

/// Writes the trace.
///
/// # Errors
/// What writing says.
pub fn write(reports: &[ProcessReport], out: &mut dyn Write) -> io::Result<()> {
    let mut sink = Sink {
        out,
        first: true,
        base: base(reports),
        flow: 0,
    };
    sink.begin()?;
    for report in reports {
        process(&mut sink, report)?;
    }
    let out = sink.out;
    writeln!(out, "\n],")?;
    writeln!(out, "\"displayTimeUnit\":\"ns\",")?;
    let other = json!({
        "clock": "monotonic, nanoseconds since boot, less the base",
        "base_ns": sink.base.to_string(),
        "by": concat!("doorbell ", env!("CARGO_PKG_VERSION")),
    });
    writeln!(out, "\"otherData\":{other}}}")?;
    out.flush()
}

/// The earliest moment in it: times in a trace are read as floating point numbers, so they should be small.
fn base(reports: &[ProcessReport]) -> u64 {
    let devices = || reports.iter().flat_map(|r| &r.devices);
    let events = devices()
        .flat_map(|d| &d.qps)
        .flat_map(|q| &q.events)
        .map(|e| e.at_ns);
    let kernels = devices().flat_map(|d| &d.kernels).map(|k| k.from_ns);
    events.chain(kernels).min().unwrap_or(0)
}

struct Sink<'a> {
    out: &'a mut dyn Write,
    first: bool,
    base: u64,
    flow: u64,
}

impl Sink<'_> {
    fn begin(&mut self) -> io::Result<()> {
        writeln!(self.out, "{{\"traceEvents\":[")
    }

    fn put(&mut self, event: &Value) -> io::Result<()> {
        if !std::mem::replace(&mut self.first, false) {
            writeln!(self.out, ",")?;
        }
        write!(self.out, "{event}")
    }

    /// Microseconds since the base.
    fn us(&self, ns: u64) -> f64 {
        ns.saturating_sub(self.base) as f64 / 1000.0
    }

    fn name(&mut self, what: &str, pid: u32, tid: u64, name: &str) -> io::Result<()> {
        self.put(&json!({
            "ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name},
        }))?;
        if what == "thread_name" {
            self.put(&json!({
                "ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid},
            }))?;
        }
        Ok(())
    }

    fn slice(
        &mut self,
        at: (u32, u64),
        name: &str,
        (from, to): (u64, u64),
        args: &Value,
    ) -> io::Result<()> {
        let event = json!({
            "ph": "X", "name": name, "cat": "doorbell", "pid": at.0, "tid": at.1,
            "ts": self.us(from), "dur": to.saturating_sub(from) as f64 / 1000.0, "args": args,
        });
        self.put(&event)
    }

    fn instant(&mut self, at: (u32, u64), name: &str, ns: u64) -> io::Result<()> {
        let event = json!({
            "ph": "i", "s": "t", "name": name, "cat": "doorbell", "pid": at.0, "tid": at.1, "ts": self.us(ns),
        });
        self.put(&event)
    }
}

fn process(sink: &mut Sink<'_>, report: &ProcessReport) -> io::Result<()> {
    let pid = report.pid;
    let rank = report.rank.map_or(String::new(), |r| format!("rank {r}: "));
    let (path, rest) = report
        .command
        .split_once(' ')
        .unwrap_or((&report.command, ""));
    let program = format!("{} {rest}", path.rsplit('/').next().unwrap_or(path));
    let program = program.trim_end();
    let ended = if report.post_mortem.is_some() {
        " (from its flight record)"
    } else {
        ""
    };
    sink.name("process_name", pid, 0, &format!("{rank}{program}{ended}"))?;
    let mut kernels = false;
    let mut waits = false;
    for (d, device) in report.devices.iter().enumerate() {
        let d = d as u64;
        for kernel in &device.kernels {
            if !std::mem::replace(&mut kernels, true) {
                sink.name("thread_name", pid, KERNELS, "kernels")?;
            }
            let to = kernel.to_ns.unwrap_or(report.at_ns);
            let args = json!({"running": kernel.to_ns.is_none()});
            sink.slice((pid, KERNELS), &kernel.name, (kernel.from_ns, to), &args)?;
        }
        for wait in device.waits.iter().filter(|w| w.since_ns != 0) {
            if !std::mem::replace(&mut waits, true) {
                sink.name("thread_name", pid, WAITS, "waits that last")?;
            }
            let name = format!("waits for {} {:#x} >= {}", wait.kind, wait.at, wait.wanted);
            let args = json!({"has": wait.have, "verdict": wait.verdict});
            sink.slice((pid, WAITS), &name, (wait.since_ns, report.at_ns), &args)?;
        }
        engine(sink, pid, d, device)?;
    }
    Ok(())
}

/// A range of slots executed in a turn, before it is put on its core's line.
struct Turn {
    qpn: u32,
    /// Rung then, if that is remembered.
    rung: Option<u64>,
    /// Executed by then.
    at: u64,
    from: u64,
    slots: u32,
    bytes: u32,
    what: &'static str,
    /// The arrow that ends here.
    flow: Option<u64>,
}

fn engine(sink: &mut Sink<'_>, pid: u32, d: u64, device: &DeviceReport) -> io::Result<()> {
    let mut turns: Vec<Vec<Turn>> = device.cores.iter().map(|_| Vec::new()).collect();
    for (i, qp) in device.qps.iter().enumerate() {
        // A recycled number must not share a line with its predecessor.
        let tid = QPS + d * 100_000 + i as u64;
        let mut own = Vec::new();
        poster(sink, pid, tid, qp, &mut own)?;
        let core = qp.core.unwrap_or(0) as usize;
        if core >= turns.len() {
            turns.resize_with(core + 1, Vec::new);
        }
        turns[core].extend(own);
    }
    for (i, mut turns) in turns.into_iter().enumerate() {
        let tid = CORES + d * 1000 + i as u64;
        sink.name("thread_name", pid, tid, &format!("engine core {i}"))?;
        turns.sort_by_key(|t| t.at);
        let mut free = 0;
        for turn in &turns {
            // A core does one thing at a time: a turn begins when its work was rung, or when the one before it was over.
            let begin = turn.rung.unwrap_or(turn.at).max(free);
            let (from, to) = match begin < turn.at {
                true => (begin, turn.at),
                // Several turns of one reading of the clock: they are shown one after the other.
                false => (begin, begin + MARK),
            };
            free = to;
            let name = format!("{} {} of QP {:#08x}", turn.what, turn.slots, turn.qpn);
            let args = json!({"first_slot": turn.from, "slots": turn.slots, "bytes": turn.bytes});
            sink.slice((pid, tid), &name, (from, to), &args)?;
            if let Some(flow) = turn.flow {
                let event = json!({
                    "ph": "f", "bp": "e", "name": "doorbell", "cat": "doorbell", "id": flow,
                    "pid": pid, "tid": tid, "ts": sink.us(from),
                });
                sink.put(&event)?;
            }
        }
    }
    Ok(())
}

/// The line of a queue pair: what its poster did, and what became of that; `turns` gets what its core did for it.
fn poster(
    sink: &mut Sink<'_>,
    pid: u32,
    tid: u64,
    qp: &QpReport,
    turns: &mut Vec<Turn>,
) -> io::Result<()> {
    let at = (pid, tid);
    let link = match (qp.link.as_str(), qp.peer_qpn) {
        ("", _) | (_, None) => String::new(),
        (link, Some(peer)) => format!(" to {peer:#x} by {link}"),
    };
    sink.name(
        "thread_name",
        pid,
        tid,
        &format!("QP {:#08x}{link}: posted", qp.qpn),
    )?;
    let counter = format!("QP {:#08x} outstanding", qp.qpn);
    let (mut rung, mut completed) = (0u64, 0u64);
    // Rings whose work is not executed yet: first slot, end, when, arrow.
    let mut rings: Vec<(u64, u64, u64, u64)> = Vec::new();
    let mut free = 0;
    for (i, event) in qp.events.iter().enumerate() {
        let next = qp.events.get(i + 1).map_or(u64::MAX, |e| e.at_ns);
        let end = event.from + u64::from(event.slots);
        let Some(kind) = Kind::named(&event.kind) else {
            continue;
        };
        match kind {
            Kind::Posted => {
                // Until the doorbell that covers it came, or to the end.
                let to = qp.events[i + 1..]
                    .iter()
                    .find(|e| is(e, &[Kind::Rung, Kind::Done]) && e.covers(event.from))
                    .map_or(event.at_ns + MARK, |e| e.at_ns);
                let from = event.at_ns.max(free);
                let to = to.max(from + 1);
                free = to;
                let name = format!("{} written, not rung", event.slots);
                let args = json!({"first_slot": event.from});
                sink.slice(at, &name, (from, to), &args)?;
            }
            Kind::Rung | Kind::Done => {
                rung = end;
                let from = event.at_ns.max(free);
                let to = (from + MARK).min(next.max(from + 1));
                free = to;
                let args = json!({"first_slot": event.from, "slots": event.slots});
                sink.slice(at, &format!("ring {}", event.slots), (from, to), &args)?;
                sink.flow += 1;
                let flow = sink.flow;
                let start = json!({
                    "ph": "s", "name": "doorbell", "cat": "doorbell", "id": flow,
                    "pid": pid, "tid": tid, "ts": sink.us(from),
                });
                sink.put(&start)?;
                if kind == Kind::Rung {
                    rings.push((event.from, end, event.at_ns, flow));
                } else {
                    completed = end;
                    turns.push(turn(qp, event, Some(event.at_ns), "execute", Some(flow)));
                }
            }
            Kind::Executed | Kind::Issued => {
                let ring = rings
                    .iter()
                    .position(|r| r.0 <= event.from && event.from < r.1);
                let (since, flow) = match ring {
                    Some(r) => (
                        Some(rings[r].2),
                        (rings[r].0 == event.from).then_some(rings[r].3),
                    ),
                    None => (None, None),
                };
                rings.retain(|r| r.1 > end);
                let what = match kind {
                    Kind::Executed => "execute",
                    _ => "send off",
                };
                if kind == Kind::Executed {
                    completed = end;
                }
                turns.push(turn(qp, event, since, what, flow));
            }
            Kind::Completed => {
                completed = end;
                sink.instant(at, &event.text(), event.at_ns)?;
            }
            Kind::Flushed => {
                completed = end;
                sink.instant(at, &event.text(), event.at_ns)?;
            }
            Kind::Error | Kind::Parked | Kind::Fault | Kind::State => {
                if kind == Kind::State {
                    (rung, completed) = (event.from.max(rung), completed);
                }
                sink.instant(at, &event.text(), event.at_ns)?;
            }
        }
        let count = json!({
            "ph": "C", "name": counter, "pid": pid, "ts": sink.us(event.at_ns),
            "args": {"requests": rung.saturating_sub(completed)},
        });
        sink.put(&count)?;
    }
    Ok(())
}

fn is(event: &EventReport, kinds: &[Kind]) -> bool {
    Kind::named(&event.kind).is_some_and(|k| kinds.contains(&k))
}

fn turn(
    qp: &QpReport,
    event: &EventReport,
    rung: Option<u64>,
    what: &'static str,
    flow: Option<u64>,
) -> Turn {
    Turn {
        qpn: qp.qpn,
        rung,
        at: event.at_ns,
        from: event.from,
        slots: event.slots,
        bytes: event.value,
        what,
        flow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> ProcessReport {
        let event = |at_ns: u64, kind: &str, from: u64, slots: u32| EventReport {
            at_ns,
            kind: kind.to_owned(),
            from,
            slots,
            value: 8,
        };
        let qp = json!({
            "qpn": 0x42, "cqn": 1, "core": 0, "state": "ready", "depth": 1024, "handler": "record", "cq": "collapsed",
            "poster": null, "engine": null, "record": null, "doorbell": null, "next": null, "cqe": null, "error": null,
            "counters": [], "roce": [], "moving": false, "stuck": false, "verdict": "idle", "link": "shm", "peer_qpn": 0x77,
        });
        let mut qp: QpReport = serde_json::from_value(qp).unwrap();
        qp.events = vec![
            event(1100, "state", 0, 0),
            event(1200, "posted", 0, 2),
            event(3000, "rung", 0, 2),
            event(3500, "executed", 0, 2),
            event(4000, "done", 2, 5),
            event(4000, "issued", 7, 1),
            event(6000, "completed", 7, 1),
            event(6500, "error", 8, 1),
            event(7000, "nonsense", 9, 1),
        ];
        let json = json!({
            "schema": "doorbell-report/1", "version": "0", "pid": 7, "at_ns": 9000, "cpu_ns": 0, "rank": 1,
            "command": "/usr/bin/job --x /tmp/y",
            "devices": [{
                "id": 1, "gpu": "host", "caller_driven": false, "roce": [], "qps": [],
                "cores": [{"dead": null, "rounds": 1, "rounds_since": 1, "qps": 1, "counters": []}],
                "kernels": [{"name": "put_bw", "from_ns": 1000, "to_ns": 8000}],
            }],
        });
        let mut report: ProcessReport = serde_json::from_value(json).unwrap();
        report.devices[0].qps.push(qp);
        report
    }

    /// What a viewer needs: valid JSON, known phases, names for all threads, slices of a thread that do not overlap in part, and arrows with
    /// two ends, each inside a slice.
    #[test]
    fn the_structure_is_what_viewers_take() {
        let mut text = Vec::new();
        write(&[report()], &mut text).unwrap();
        let trace: Value = serde_json::from_slice(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of =
            |phase: &str| -> Vec<&Value> { events.iter().filter(|e| e["ph"] == phase).collect() };
        for event in events {
            let phase = event["ph"].as_str().unwrap();
            assert!(["M", "X", "i", "s", "f", "C"].contains(&phase), "{event}");
            assert!(event["pid"].is_u64(), "{event}");
            if phase != "M" {
                assert!(event["ts"].as_f64().unwrap() >= 0.0, "{event}");
            }
        }
        let names: Vec<_> = of("M")
            .iter()
            .filter(|e| e["name"] == "thread_name")
            .map(|e| e["tid"].as_u64().unwrap())
            .collect();
        let mut slices: Vec<(u64, f64, f64)> = of("X")
            .iter()
            .map(|e| {
                let from = e["ts"].as_f64().unwrap();
                (
                    e["tid"].as_u64().unwrap(),
                    from,
                    from + e["dur"].as_f64().unwrap(),
                )
            })
            .collect();
        slices.sort_by(|a, b| a.partial_cmp(b).unwrap());
        for pair in slices.windows(2) {
            assert!(names.contains(&pair[0].0));
            assert!(
                pair[0].0 != pair[1].0 || pair[1].1 >= pair[0].2 - 1e-6,
                "{pair:?} overlap"
            );
        }
        let (starts, ends) = (of("s"), of("f"));
        assert_eq!(starts.len(), 2);
        for arrow in starts.iter().chain(&ends) {
            assert_eq!(events.iter().filter(|e| e["id"] == arrow["id"]).count(), 2);
            let (tid, ts) = (
                arrow["tid"].as_u64().unwrap(),
                arrow["ts"].as_f64().unwrap(),
            );
            assert!(
                slices.iter().any(|s| s.0 == tid && s.1 <= ts && ts <= s.2),
                "{arrow} is on no slice"
            );
        }
        let text = String::from_utf8(text).unwrap();
        for part in [
            "2 written, not rung",
            "rank 1: job --x /tmp/y",
            "execute 2 of QP 0x000042",
            "QP 0x000042 to 0x77 by shm",
        ] {
            assert!(text.contains(part), "{part}");
        }
        // The requests that were issued are outstanding until they complete.
        let outstanding: Vec<u64> = of("C")
            .iter()
            .map(|e| e["args"]["requests"].as_u64().unwrap())
            .collect();
        assert_eq!(outstanding, [0, 0, 2, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn an_empty_trace_is_one() {
        let mut text = Vec::new();
        write(&[], &mut text).unwrap();
        let trace: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(trace["traceEvents"], json!([]));
    }
}
