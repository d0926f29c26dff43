//! The end of the page: every figure as a number, the machine, and how to repeat it all.

use std::fmt::Write as _;

use super::super::labels;
use super::super::plot::escape;
use super::super::results::{Point, Results, Spread};
use super::plus_minus;
use crate::units;

pub(super) fn write(out: &mut String, results: &Results) {
    figures(out, results);
    machine(out, results);
    repeat(out, results);
}

fn figures(out: &mut String, results: &Results) {
    out.push_str("<section>\n<h2>All figures</h2>\n<p class=\"lead\">Medians of the repetitions, and half of their range. results.json has every repetition.</p>\n");
    for (experiment, title, what) in [
        ("blocks", "Puts against blocks", "blocks"),
        ("queues", "Puts against open queue pairs", "queue pairs"),
        ("sizes", "Puts against size", "size"),
        ("gets", "Gets against size", "size"),
        ("latency", "Latency", "size"),
    ] {
        let lines = labels::lines(&results.points, experiment, None);
        if lines.is_empty() {
            continue;
        }
        let latency = experiment == "latency";
        let heads: &[&str] = match latency {
            true => &["median", "", "99 %", "", "CPUs", "word to and fro", ""],
            false => &[
                "messages/s",
                "",
                "bytes/s",
                "CPU time each",
                "CPUs",
                "copy alone",
                "",
            ],
        };
        let _ = write!(
            out,
            "<details><summary>{title}</summary>\n<div class=\"scroll\"><table>\n<thead><tr><th></th><th class=\"r\">{what}</th>"
        );
        for head in heads {
            let _ = write!(out, "<th class=\"r\">{head}</th>");
        }
        out.push_str("</tr></thead>\n<tbody>\n");
        for line in &lines {
            for (i, point) in line.points.iter().enumerate() {
                let name = if i == 0 { line.name.long.as_str() } else { "" };
                let _ = write!(
                    out,
                    "<tr{}><td>{}</td><td class=\"r\">{}</td>",
                    if i == 0 { " class=\"first\"" } else { "" },
                    escape(name),
                    x_words(point)
                );
                for cell in if latency {
                    of_latency(point)
                } else {
                    of_rate(point)
                } {
                    let _ = write!(out, "<td class=\"r\">{}</td>", escape(&cell));
                }
                out.push_str("</tr>\n");
            }
        }
        out.push_str("</tbody>\n</table></div></details>\n");
    }
    out.push_str("</section>\n");
}

fn x_words(point: &Point) -> String {
    match point.experiment.as_str() {
        "blocks" | "queues" => units::grouped(labels::x(point)),
        _ => units::size(point.size),
    }
}

fn words(s: Option<Spread>, f: &dyn Fn(f64) -> String) -> String {
    s.map_or("–".to_owned(), |s| f(s.median))
}

fn noise(s: Option<Spread>) -> String {
    s.map_or(String::new(), |s| plus_minus(s.relative()))
}

fn cpus(point: &Point) -> String {
    words(point.cpu_cores_used, &|v| format!("{v:.2}"))
}

/// With its range, which says whether a comparison with it means something.
fn baseline(point: &Point) -> [String; 2] {
    let words = point.baseline_ns.map_or("–".to_owned(), units::time);
    [words, noise(point.baseline())]
}

fn of_rate(point: &Point) -> Vec<String> {
    let [copy, copy_noise] = baseline(point);
    vec![
        words(point.messages_per_s, &units::scaled),
        noise(point.messages_per_s),
        words(point.bytes_per_s, &units::scaled),
        words(point.cpu_ns_per_message(), &units::time),
        cpus(point),
        copy,
        copy_noise,
    ]
}

fn of_latency(point: &Point) -> Vec<String> {
    let [word, word_noise] = baseline(point);
    vec![
        words(point.p50_ns, &units::time),
        noise(point.p50_ns),
        words(point.p99_ns, &units::time),
        noise(point.p99_ns),
        cpus(point),
        word,
        word_noise,
    ]
}

fn machine(out: &mut String, results: &Results) {
    let e = &results.environment;
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64);
    let cores = match e.hca_cores {
        Some(0) => "driven by whoever waits".to_owned(),
        Some(n) => format!("{n} (where two ends share two processors: driven by whoever waits)"),
        None => "–".to_owned(),
    };
    let build = [
        Some(e.version.clone()),
        e.git.clone().map(|g| format!("({g})")),
        e.profile.clone(),
        e.target.clone(),
    ];
    let facts = [
        ("Processor", e.cpu.clone()),
        ("CPUs to run on", Some(e.cpus.to_string())),
        ("CPU quota", e.cpu_quota.map(|q| format!("{q} CPUs"))),
        ("Memory", e.memory_bytes.map(gib)),
        ("Kernel", e.kernel.clone()),
        (
            "GPU",
            e.gpu.clone().map(|g| {
                if g == "host" {
                    "none: host threads play it".to_owned()
                } else {
                    g
                }
            }),
        ),
        ("NVIDIA driver", e.driver.clone()),
        ("CUDA", e.cuda.clone()),
        ("HCA engine cores", Some(cores)),
        (
            "Doorbell",
            Some(build.into_iter().flatten().collect::<Vec<_>>().join(" ")),
        ),
        (
            "Took",
            Some(format!(
                "{:.0} s, every point measured {} of {} times",
                results.seconds,
                results.times(),
                results.repeat
            )),
        ),
    ];
    out.push_str("<section>\n<h2>The machine</h2>\n<table class=\"facts\"><tbody>\n");
    for (name, value) in facts {
        if let Some(value) = value {
            let _ = writeln!(out, "<tr><th>{name}</th><td>{}</td></tr>", escape(&value));
        }
    }
    out.push_str("</tbody></table>\n</section>\n");
}

fn repeat(out: &mut String, results: &Results) {
    let mut command = results.environment.command.clone();
    if let Some(first) = command.first_mut() {
        *first = first.rsplit('/').next().unwrap_or("doorbell").to_owned();
    }
    let mut commands: Vec<&str> = Vec::new();
    for point in &results.points {
        if !commands.contains(&point.command.as_str()) {
            commands.push(&point.command);
        }
    }
    let _ = write!(
        out,
        "<section>\n<h2>Repeat it</h2>\n<p class=\"lead\">All of it, and what changed since:</p>\n<pre>{}\ndoorbell compare results.json NEW/results.json</pre>\n\
         <details><summary>Each series alone</summary><pre>{}</pre></details>\n</section>\n",
        escape(&command.join(" ")),
        escape(&commands.join("\n"))
    );
}
