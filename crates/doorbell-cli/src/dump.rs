//! `doorbell dump`: the queue pairs of a running process, and what those that stand still are waiting for.
//!
//! The process itself is asked, or its flight record read if it cannot answer; see `doorbell::report`. A queue pair that is idle takes a line,
//! one that is stuck is shown whole. All processes of this host are looked at for what a wait lacks.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use doorbell::report::moment::span;
use doorbell::report::{DeviceReport, ProcessReport, QpReport, missing, server};

use crate::args::{DumpArgs, Whom};
use crate::{Ended, table};

/// Asks and prints.
pub(crate) fn run(args: &DumpArgs) -> Result<Ended> {
    if let Some(path) = &args.trace {
        return trace(args.pid, path);
    }
    let reports = everything(args.pid)?;
    let styled = crate::is_styled(&io::stdout());
    let mut out = io::BufWriter::new(crate::out::out());
    if args.json {
        serde_json::to_writer_pretty(&mut out, &reports)?;
        writeln!(out)?;
    } else {
        for (i, report) in reports.iter().enumerate() {
            if i > 0 {
                writeln!(out)?;
            }
            print(&mut out, styled, report, args.pid == Whom::All)?;
        }
    }
    out.flush().context("writing to standard output")?;
    let mut devices = reports.iter().flat_map(|r| &r.devices);
    match devices.any(|d| d.damage.is_some()) {
        true => Ok(Ended::Verdict(1)),
        false => Ok(Ended::Well),
    }
}

/// Writes a trace.
fn trace(whom: Whom, path: &Path) -> Result<Ended> {
    let reports = server::traces(match whom {
        Whom::Process(pid) => Some(pid),
        Whom::All => None,
    })?;
    let file =
        doorbell::input::create(path).with_context(|| format!("creating {}", path.display()))?;
    let mut out = io::BufWriter::new(file);
    doorbell::report::trace::write(&reports, &mut out)
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(Ended::Well)
}

/// All that is known of one process, or of all.
fn everything(whom: Whom) -> Result<Vec<ProcessReport>> {
    let (mut reports, errors) = match whom {
        Whom::Process(pid) => (server::find_with_others(pid)?, Vec::new()),
        Whom::All => server::find_all(),
    };
    for error in errors {
        crate::complain(&format!("doorbell: {error}"));
    }
    missing::name(&mut reports);
    match whom {
        Whom::Process(_) => reports.truncate(1),
        // Those that run are what is usually looked for.
        Whom::All => reports.sort_by_key(|r| r.post_mortem.is_some()),
    }
    if reports.is_empty() {
        bail!(
            "no process answers or has left a record: none of this user has an open Doorbell device here, or they run with DOORBELL_REPORT=off"
        );
    }
    Ok(reports)
}

/// The command line of a process, as far as it fits a line.
pub(crate) fn command(pid: u32, room: usize) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> = bytes
        .split(|b| *b == 0)
        .filter(|w| !w.is_empty())
        .map(|w| String::from_utf8_lossy(w).escape_debug().to_string())
        .collect();
    match words.is_empty() {
        true => "its name is not known".to_owned(),
        false => short(&words.join(" "), room),
    }
}

/// A command line without the directory of its program, as far as there is room.
fn short(command: &str, room: usize) -> String {
    let (program, rest) = command.split_once(' ').unwrap_or((command, ""));
    let name = program.rsplit('/').next().unwrap_or(program);
    let text = format!("{name} {rest}")
        .trim_end()
        .escape_debug()
        .to_string();
    match text.char_indices().nth(room) {
        Some(_) => {
            let cut: String = text.chars().take(room.saturating_sub(1)).collect();
            format!("{cut}…")
        }
        None => text,
    }
}

/// `brief`: of one that cannot answer, too, only queue pairs that are stuck are shown whole.
fn print(out: &mut dyn Write, styled: bool, report: &ProcessReport, brief: bool) -> io::Result<()> {
    let bold = |text: String| match styled {
        true => format!("\x1b[1m{text}\x1b[0m"),
        false => text,
    };
    let rank = report.rank.map_or(String::new(), |r| format!("rank {r}, "));
    let (before, after) = (
        format!("{rank}process {} (", report.pid),
        format!("), release {}", report.version),
    );
    let room = 80usize.saturating_sub(before.chars().count() + after.chars().count());
    let name = match report.command.is_empty() {
        true => command(report.pid, room),
        false => short(&report.command, room),
    };
    writeln!(out, "{}", bold(format!("{before}{name}{after}")))?;
    if let Some(why) = &report.post_mortem {
        for line in table::wrap(&format!("read from its flight record: {why}"), 77) {
            writeln!(out, "  {}", bold(line))?;
        }
    }
    if report.devices.is_empty() {
        writeln!(out, "  no open device")?;
    }
    for device in &report.devices {
        head(out, report, device)?;
        for qp in &device.qps {
            let said = device
                .waits
                .iter()
                .any(|w| qp.stuck && w.verdict.contains(&qp.verdict));
            queue_pair(out, styled, report, qp, brief, said)?;
        }
        regions(out, device)?;
    }
    Ok(())
}

/// Wrapped text below what it is about.
fn paragraph(out: &mut dyn Write, text: &str) -> io::Result<()> {
    for line in table::wrap(text, 77) {
        writeln!(out, "  {line}")?;
    }
    Ok(())
}

fn head(out: &mut dyn Write, report: &ProcessReport, device: &DeviceReport) -> io::Result<()> {
    let driver = match device.caller_driven {
        true => "its engine is run by whoever waits",
        false => "its engine has threads of its own",
    };
    writeln!(
        out,
        "\nHCA {:#018x}, GPU {}, {driver}",
        device.id, device.gpu
    )?;
    if let Some(damage) = &device.damage {
        let text = format!("this record is damaged, and nothing of it can be relied on: {damage}");
        paragraph(out, &text)?;
    }
    for core in &device.cores {
        let qps = match core.qps {
            1 => "1 queue pair".to_owned(),
            n => format!("{n} queue pairs"),
        };
        let state = match (&core.dead, core.seen_ns) {
            (Some(reason), _) => format!("dead: {reason}"),
            (None, seen) if report.post_mortem.is_some() && seen != 0 => format!(
                "{} rounds, last seen alive {} ago; {qps}",
                core.rounds,
                span(report.at_ns.saturating_sub(seen)),
            ),
            (None, _) => format!(
                "{} rounds, {} of them while it was looked at; {qps}",
                core.rounds, core.rounds_since
            ),
        };
        paragraph(out, &format!("core {}: {state}", core.number))?;
    }
    counters(out, "port", &device.roce)?;
    if !device.recorded {
        paragraph(
            out,
            "its flight recorder is off (DOORBELL_RECORD=off): regions, waits for words, events, and what is written and not rung are not known",
        )?;
    }
    if device.left_out != (0, 0) {
        let (regions, qps) = device.left_out;
        writeln!(
            out,
            "  of {regions} regions and {qps} queue pairs more there is no record: it was full"
        )?;
    }
    // What a sentence below names as a reason needs no line of its own.
    let named = |rule: &str| {
        let end = rule.find(") ").map_or(rule.len(), |at| at + 1);
        let name = &rule[..end];
        let waits = device.waits.iter().map(|w| &w.verdict);
        let dead = device.cores.iter().filter_map(|c| c.dead.as_ref());
        waits
            .chain(device.qps.iter().map(|q| &q.verdict))
            .chain(dead)
            .chain(&report.post_mortem)
            .any(|text| text.contains(name))
    };
    for rule in device.faults.iter().filter(|r| !named(r)) {
        paragraph(out, rule)?;
    }
    for wait in device.waits.iter().filter(|w| !w.verdict.is_empty()) {
        writeln!(out)?;
        paragraph(out, &format!("WAIT {}", wait.verdict))?;
    }
    Ok(())
}

/// Regions shown at most; what is left out is said.
const REGIONS: usize = 16;

fn regions(out: &mut dyn Write, device: &DeviceReport) -> io::Result<()> {
    if device.regions.is_empty() || !device.qps.iter().any(|q| q.stuck) {
        return Ok(());
    }
    writeln!(out, "\nregions")?;
    for r in device.regions.iter().take(REGIONS) {
        writeln!(
            out,
            "  {:#010x}  {} bytes at {:#x}{}, {}",
            r.key,
            r.len,
            r.addr,
            if r.on_gpu { " (GPU)" } else { "" },
            match r.base == r.addr {
                true => "by address".to_owned(),
                false => format!("from {:#x}", r.base),
            }
        )?;
    }
    match device.regions.len().saturating_sub(REGIONS) {
        0 => Ok(()),
        more => writeln!(out, "  and {more} more"),
    }
}

/// The latest events, with how long ago they were.
fn events(out: &mut dyn Write, at_ns: u64, qp: &QpReport) -> io::Result<()> {
    const SHOWN: usize = 8;
    let skip = qp.events.len().saturating_sub(SHOWN);
    for (i, event) in qp.events.iter().skip(skip).enumerate() {
        let ago = span(at_ns.saturating_sub(event.at_ns));
        let name = if i == 0 { "events" } else { "" };
        let mut before = format!("  {name:6}  {ago:>8} ago  ");
        let indent = before.chars().count();
        for line in table::wrap(&event.text(), 80 - indent) {
            writeln!(out, "{before}{line}")?;
            before = " ".repeat(indent);
        }
    }
    Ok(())
}

fn queue_pair(
    out: &mut dyn Write,
    styled: bool,
    report: &ProcessReport,
    qp: &QpReport,
    brief: bool,
    said: bool,
) -> io::Result<()> {
    let (plain, colour) = match (qp.stuck, qp.moving) {
        (true, _) => ("STUCK", "1;31"),
        (_, true) => ("moving", "32"),
        // Of a process that was stopped or killed at work nobody can say more.
        _ if qp.has_work() => ("unfinished", "33"),
        _ => ("idle", "2"),
    };
    let word = match styled {
        true => format!("\x1b[{colour}m{plain}\x1b[0m"),
        false => plain.to_owned(),
    };
    let shape = format!(
        "{}, {} slots, rung by {}, {} CQ {:#x}{}",
        qp.state,
        qp.depth,
        qp.handler,
        qp.cq,
        qp.cqn,
        qp.core.map_or(String::new(), |c| format!(", core {c}"))
    );
    // The first line begins with the number and a word, of which styles are no part.
    let before = format!("QP {:#08x} {plain}: ", qp.qpn);
    let mut lines = table::wrap(&format!("{before}{shape}"), 80).into_iter();
    let first = lines.next().unwrap_or_default();
    let rest = first.get(before.len()..).unwrap_or_default();
    writeln!(out, "\nQP {:#08x} {word}: {rest}", qp.qpn)?;
    for line in lines {
        writeln!(out, "  {line}")?;
    }
    paragraph(
        out,
        match said {
            true => "as the wait above says",
            false => &qp.verdict,
        },
    )?;
    // Of what is dead everything is of interest.
    if !qp.stuck && !qp.moving && (brief || report.post_mortem.is_none()) {
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
            match report.post_mortem {
                Some(_) => "not in the record: nothing stood in the queue, or it has moved on since the last copy",
                None => "not exported, or in GPU memory, which is not looked at while kernels run",
            }
            .to_owned(),
        ),
    });
    if let Some(engine) = &qp.engine {
        facts.push((
            "engine",
            format!("rung {}, completed {}", engine.rung, engine.completed),
        ));
    }
    if let Some(recv) = &qp.recv {
        facts.push((
            "receive",
            format!("posted {}, filled {}", recv.posted, recv.done),
        ));
    }
    let number = |n: Option<u64>| n.map_or("not known".to_owned(), |n| n.to_string());
    facts.push((
        "words",
        format!(
            "record {}, doorbell {}",
            number(qp.record.map(u64::from)),
            number(qp.doorbell)
        ),
    ));
    match (qp.link.as_str(), qp.peer_qpn, &qp.peer) {
        ("", ..) | (_, None, _) => {}
        (link, _, Some(peer)) => facts.push(("peer", format!("{link}, {peer}"))),
        (link, Some(number), None) => facts.push(("peer", format!("{link}, QP {number:#08x}"))),
    }
    let facts: Vec<(String, String)> = facts
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    table::facts(out, &facts)?;
    counters(out, "done  ", &qp.counters)?;
    counters(out, "RoCE  ", &qp.roce)?;
    bytes(out, "next  ", qp.next.as_deref())?;
    bytes(out, "CQE   ", qp.cqe.as_deref())?;
    events(out, report.at_ns, qp)
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
