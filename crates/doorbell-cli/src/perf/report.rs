//! What a run says: a heading, a table row as each case ends, ratios between initiators, and
//! the result file. Standard output carries the table, or the JSON with `--json -`.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};

use super::plan::Case;
use super::tally::Measured;
use crate::args::{Place, Test};
use crate::schema::{Environment, Latency, Outcome, Report, SCHEMA};
use crate::table::{Column, Table};
use crate::units;

/// A result and the case it came from.
struct Row {
    case: Case,
    outcome: Outcome,
    compared: u64,
}

/// Prints rows as they come and keeps them.
pub(crate) struct Reporter {
    table: Table,
    /// The table goes to standard error when standard output carries the JSON.
    quiet_stdout: bool,
    rows: Vec<Row>,
    latency: bool,
}

/// Can the result file be written?
pub(crate) fn check_json(to: &Path) -> Result<()> {
    if to.as_os_str() == "-" {
        return Ok(());
    }
    doorbell::input::check(to).with_context(|| unwritable(to))
}

fn unwritable(to: &Path) -> String {
    format!(
        "writing results to {}: choose a file that can be written with --json",
        to.display()
    )
}

impl Reporter {
    pub(crate) fn new(test: Test, json_on_stdout: bool) -> Self {
        let latency = test.is_latency();
        let mut columns = vec![Column::left("poster", 8)];
        if latency {
            columns.extend([
                Column::right("size", 7),
                Column::right("samples", 9),
                Column::right("min", 7),
                Column::right("p50", 7),
                Column::right("p99", 7),
                Column::right("base", 7),
            ]);
        } else {
            columns.extend([
                Column::right("grid", 7),
                Column::right("QPs", 4),
                Column::right("batch", 5),
                Column::right("size", 7),
                Column::right("msg/s", 6),
                Column::right("B/s", 6),
                Column::right("base", 6),
            ]);
        }
        columns.extend([Column::right("CPUs", 4), Column::left("check", 5)]);
        let styled = match json_on_stdout {
            true => crate::is_styled(&io::stderr()),
            false => crate::is_styled(&io::stdout()),
        };
        Self {
            table: Table::new(columns, styled),
            quiet_stdout: json_on_stdout,
            rows: Vec::new(),
            latency,
        }
    }

    fn out(&self) -> Box<dyn Write> {
        if self.quiet_stdout {
            Box::new(io::stderr())
        } else {
            Box::new(crate::out::out())
        }
    }

    /// Lines that say what is about to be measured, then the table's heading.
    pub(crate) fn heading(&self, lines: &[String]) -> io::Result<()> {
        let mut out = self.out();
        for line in lines {
            for part in crate::table::wrap(line, crate::out::columns()) {
                writeln!(out, "{part}")?;
            }
        }
        writeln!(out)?;
        self.table.header(&mut out)
    }

    /// One row, with what was found wrong and other remarks below it.
    pub(crate) fn row(&mut self, case: Case, measured: Measured) -> io::Result<()> {
        let row = Row {
            case,
            outcome: measured.outcome,
            compared: measured.compared,
        };
        let mut out = self.out();
        self.table.row(&mut out, &self.cells(&row))?;
        for fault in &measured.faults {
            self.lines(&mut out, &format!("WRONG: {fault}"))?;
        }
        for note in &measured.notes {
            self.lines(&mut out, note)?;
        }
        self.rows.push(row);
        Ok(())
    }

    fn lines(&self, out: &mut dyn Write, text: &str) -> io::Result<()> {
        for part in crate::table::wrap(text, 76) {
            writeln!(out, "    {part}")?;
        }
        Ok(())
    }

    /// Wrong bytes and other faults of all rows.
    pub(crate) fn errors(&self) -> u64 {
        let errors = self.rows.iter().map(|r| r.outcome.errors);
        errors.fold(0, u64::saturating_add)
    }

    /// The last line: how much was done, and whether it was right.
    pub(crate) fn summary(&self) -> io::Result<()> {
        let Some(first) = self.rows.first() else {
            return Ok(());
        };
        let messages: u64 = self.rows.iter().map(|r| r.outcome.messages).sum();
        let compared = self.rows.iter().map(|r| r.compared);
        let compared = compared.fold(0, u64::saturating_add);
        let what = match first.case.test {
            Test::PutBw | Test::PutLat => "puts",
            Test::GetBw | Test::GetLat => "gets",
            Test::AtomicRate => "fetch-and-adds",
            Test::SignalLat => "puts with signal",
            Test::SendBw | Test::SendLat => "sends",
            Test::Forward => "messages forwarded",
            Test::Post => "puts posted",
        };
        let count = units::grouped(messages);
        let line = match (self.errors(), first.outcome.checked) {
            (0, true) if first.case.test == Test::Post => {
                format!("{count} {what}; rings and doorbells are as they must be.")
            }
            (0, true) => format!(
                "{count} {what}, every byte checked: {} bytes compared, none wrong.",
                units::grouped(compared)
            ),
            (0, false) => format!("{count} {what}."),
            (errors, _) => format!("{count} {what}: {} ERRORS.", units::grouped(errors)),
        };
        let mut out = self.out();
        writeln!(out)?;
        if let Some(legend) = self.legend() {
            for part in crate::table::wrap(&legend, 80) {
                writeln!(out, "{part}")?;
            }
        }
        writeln!(out, "{line}")
    }

    /// What `base` stands for.
    fn legend(&self) -> Option<String> {
        let row = self.rows.iter().find(|r| r.outcome.baseline_ns.is_some())?;
        let (case, cuda) = (&row.case, row.outcome.gpu != "host");
        let on_gpu = case.mem == Place::Gpu || case.local_mem == Place::Gpu;
        let what = match (self.latency, cuda) {
            (true, true) => {
                "a word's round trip from CPU to GPU and back through pinned memory (p50)"
            }
            (true, false) => "a word's round trip between two CPU threads through memory (p50)",
            (false, true) if on_gpu => "the same copies by the GPU's copy engine alone",
            (false, _) => "memcpy by one CPU thread over as many bytes",
        };
        Some(format!("base: {what}, measured in this run."))
    }

    fn cells(&self, row: &Row) -> Vec<String> {
        let (case, outcome) = (&row.case, &row.outcome);
        let mut cells = vec![case.who().to_owned()];
        let or_dash = |v: Option<String>| v.unwrap_or_else(|| "-".to_owned());
        if self.latency {
            let latency = outcome.latency_ns.as_ref();
            let time = |f: fn(&Latency) -> u64| or_dash(latency.map(|l| units::time(f(l) as f64)));
            cells.extend([
                units::size(outcome.size),
                units::grouped(outcome.messages),
                time(|l| l.min),
                time(|l| l.p50),
                time(|l| l.p99),
                or_dash(outcome.baseline_ns.map(units::time)),
            ]);
        } else {
            let rate = |v: Option<f64>| or_dash(v.map(units::scaled));
            let base = outcome.baseline_ns.filter(|ns| *ns > 0.0);
            cells.extend([
                format!("{}x{}", case.blocks, case.threads),
                case.qps.to_string(),
                case.batch.to_string(),
                units::size(outcome.size),
                rate(outcome.messages_per_s),
                rate(outcome.bytes_per_s),
                rate(base.map(|ns| outcome.size as f64 * 1e9 / ns)),
            ]);
        }
        cells.push(
            outcome
                .cpu_cores_used
                .map_or("-".to_owned(), |c| format!("{c:.1}")),
        );
        cells.push(match (outcome.checked, outcome.errors) {
            (_, 1..) => "WRONG".to_owned(),
            (true, 0) => "ok".to_owned(),
            (false, 0) => "-".to_owned(),
        });
        cells
    }

    /// Where cases differ only in who posts: each against the first.
    pub(crate) fn ratios(&self) -> io::Result<()> {
        let mut out = self.out();
        let mut first: Option<&Row> = None;
        let mut line = String::new();
        let mut any = false;
        for row in &self.rows {
            let same = first
                .is_some_and(|f| (f.case.blocks, f.case.size) == (row.case.blocks, row.case.size));
            if !same {
                any |= flush(&mut out, &mut line, any)?;
                first = Some(row);
                continue;
            }
            let Some(base) = first else { continue };
            if let Some(ratio) = ratio(base, row) {
                if line.is_empty() {
                    line = format!(
                        "  {}x{} {}:",
                        row.case.blocks,
                        row.case.threads,
                        units::size(row.case.size)
                    );
                }
                line.push_str(&format!(
                    " {} = {} x {};",
                    base.case.who(),
                    units::three(ratio),
                    row.case.who()
                ));
            }
        }
        flush(&mut out, &mut line, any)?;
        Ok(())
    }

    /// The result file; `-` is standard output.
    pub(crate) fn write_json(&self, to: &Path, environment: Environment) -> Result<()> {
        let report = Report {
            schema: SCHEMA.to_owned(),
            environment,
            results: self.rows.iter().map(|r| r.outcome.clone()).collect(),
        };
        let mut text = serde_json::to_string_pretty(&report).context("writing JSON")?;
        text.push('\n');
        if to.as_os_str() == "-" {
            crate::out::say(&text)
        } else {
            doorbell::input::create(to)
                .and_then(|mut file| file.write_all(text.as_bytes()))
                .with_context(|| unwritable(to))
        }
    }
}

fn flush(out: &mut dyn Write, line: &mut String, any: bool) -> io::Result<bool> {
    if line.is_empty() {
        return Ok(false);
    }
    if !any {
        writeln!(
            out,
            "\nWho posts, compared (rate ratio; for latencies, inverse of the medians'):"
        )?;
    }
    writeln!(out, "{}", line.trim_end_matches(';'))?;
    line.clear();
    Ok(true)
}

/// How many times faster `base` is than `row`.
fn ratio(base: &Row, row: &Row) -> Option<f64> {
    match (&base.outcome.latency_ns, &row.outcome.latency_ns) {
        (Some(a), Some(b)) if a.p50 > 0 => Some(b.p50 as f64 / a.p50 as f64),
        (None, None) => {
            let (a, b) = (base.outcome.messages_per_s?, row.outcome.messages_per_s?);
            (b > 0.0).then(|| a / b)
        }
        _ => None,
    }
}
