//! `doorbell dump`: the queue pairs of a running process, and what those that stand still are waiting for.
//!
//! The process itself is asked; see `doorbell::report`. One that is idle takes a line, one that is stuck is shown whole.

use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Result, bail};
use doorbell::report::{DeviceReport, ProcessReport, QpReport, server};

use crate::args::{DumpArgs, Whom};
use crate::{Ended, table};

/// Asks and prints.
pub(crate) fn run(args: &DumpArgs) -> Result<Ended> {
    let reports = gather(args.pid)?;
    let out = io::stdout();
    let styled = out.is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let mut out = io::BufWriter::new(out.lock());
    if args.json {
        serde_json::to_writer_pretty(&mut out, &reports)?;
        writeln!(out)?;
    } else {
        for (i, report) in reports.iter().enumerate() {
            if i > 0 {
                writeln!(out)?;
            }
            print(&mut out, styled, report)?;
        }
    }
    out.flush().context("writing to standard output")?;
    Ok(Ended::Well)
}

/// The reports of one process, or of all that answer.
pub(crate) fn gather(whom: Whom) -> Result<Vec<ProcessReport>> {
    match whom {
        Whom::Process(pid) => Ok(vec![server::ask(pid)?]),
        Whom::All => {
            let pids = server::all().context("listing the sockets of this machine")?;
            let mut reports = Vec::new();
            for pid in pids {
                match server::ask(pid) {
                    Ok(report) => reports.push(report),
                    Err(error) => crate::complain(&format!("doorbell: {error}")),
                }
            }
            if reports.is_empty() {
                bail!(
                    "no process answers: none of this user has an open Doorbell device here, or they run with DOORBELL_REPORT=off"
                );
            }
            Ok(reports)
        }
    }
}

/// The command line of a process, as far as it fits a line.
pub(crate) fn command(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> = bytes
        .split(|b| *b == 0)
        .filter(|w| !w.is_empty())
        .map(|w| String::from_utf8_lossy(w).escape_debug().to_string())
        .collect();
    let text = match words.split_first() {
        Some((program, rest)) => {
            let name = program.rsplit('/').next().unwrap_or(program);
            [&[name.to_owned()], rest].concat().join(" ")
        }
        None => "its name is not known".to_owned(),
    };
    match text.char_indices().nth(52) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

fn print(out: &mut dyn Write, styled: bool, report: &ProcessReport) -> io::Result<()> {
    let bold = |text: String| match styled {
        true => format!("\x1b[1m{text}\x1b[0m"),
        false => text,
    };
    writeln!(
        out,
        "{}",
        bold(format!(
            "process {} ({}), release {}",
            report.pid,
            command(report.pid),
            report.version
        ))
    )?;
    if report.devices.is_empty() {
        writeln!(out, "  no open device")?;
    }
    for device in &report.devices {
        head(out, device)?;
        for qp in &device.qps {
            queue_pair(out, styled, qp)?;
        }
    }
    Ok(())
}

fn head(out: &mut dyn Write, device: &DeviceReport) -> io::Result<()> {
    let driver = match device.caller_driven {
        true => "its engine is run by whoever waits",
        false => "its engine has threads of its own",
    };
    writeln!(
        out,
        "\nHCA {:#018x}, GPU {}, {driver}",
        device.id, device.gpu
    )?;
    for (i, core) in device.cores.iter().enumerate() {
        let state = match &core.dead {
            Some(reason) => format!("dead: {reason}"),
            None => format!(
                "{} rounds, {} of them while it was looked at; {} queue pairs",
                core.rounds, core.rounds_since, core.qps
            ),
        };
        writeln!(out, "  core {i}: {state}")?;
    }
    counters(out, "port", &device.roce)
}

fn queue_pair(out: &mut dyn Write, styled: bool, qp: &QpReport) -> io::Result<()> {
    let (word, colour) = match (qp.stuck, qp.moving) {
        (true, _) => ("STUCK", "1;31"),
        (_, true) => ("moving", "32"),
        _ => ("idle", "2"),
    };
    let word = match styled {
        true => format!("\x1b[{colour}m{word}\x1b[0m"),
        false => word.to_owned(),
    };
    writeln!(
        out,
        "\nQP {:#08x} {word}: {}, {} slots, rung by {}, {} CQ {:#x}{}",
        qp.qpn,
        qp.state,
        qp.depth,
        qp.handler,
        qp.cq,
        qp.cqn,
        qp.core.map_or(String::new(), |c| format!(", core {c}"))
    )?;
    for line in table::wrap(&qp.verdict, 77) {
        writeln!(out, "  {line}")?;
    }
    if !qp.stuck && !qp.moving {
        return Ok(());
    }
    let mut facts = Vec::new();
    facts.push(match &qp.poster {
        Some(p) => (
            "poster",
            format!(
                "reserved {}, ready {}, rung {}, consumed {}",
                p.reserved, p.ready, p.rung, p.consumed
            ),
        ),
        None => (
            "poster",
            "not exported, or in GPU memory, which is not looked at while kernels run".to_owned(),
        ),
    });
    if let Some(engine) = &qp.engine {
        facts.push((
            "engine",
            format!("rung {}, completed {}", engine.rung, engine.completed),
        ));
    }
    let number = |n: Option<u64>| n.map_or("not readable".to_owned(), |n| n.to_string());
    facts.push((
        "words",
        format!(
            "record {}, doorbell {}",
            number(qp.record.map(u64::from)),
            number(qp.doorbell)
        ),
    ));
    let facts: Vec<(String, String)> = facts
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    table::facts(out, &facts)?;
    counters(out, "done  ", &qp.counters)?;
    counters(out, "RoCE  ", &qp.roce)?;
    bytes(out, "next  ", qp.next.as_deref())?;
    bytes(out, "CQE   ", qp.cqe.as_deref())
}

/// Those that are not zero.
fn counters(out: &mut dyn Write, name: &str, counters: &[(String, u64)]) -> io::Result<()> {
    let words: Vec<String> = counters
        .iter()
        .filter(|(_, n)| *n != 0)
        .map(|(name, n)| format!("{name} {n}"))
        .collect();
    if words.is_empty() {
        return Ok(());
    }
    table::facts(out, &[(name.to_owned(), words.join(", "))])
}

/// Words, wrapped, and bytes below them.
fn bytes(out: &mut dyn Write, name: &str, text: Option<&str>) -> io::Result<()> {
    let Some(text) = text else { return Ok(()) };
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default().to_owned();
    table::facts(out, &[(name.to_owned(), first)])?;
    for line in lines {
        writeln!(out, "          {}", line.trim())?;
    }
    Ok(())
}
