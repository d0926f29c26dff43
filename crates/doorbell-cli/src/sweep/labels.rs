//! What the lines of charts and tables are called, and which points make them up.

use super::results::Point;

/// A line: its names, and the number by which it looks the same in every chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    /// For a legend.
    pub(crate) long: String,
    /// For a table of 80 columns: at most 22 characters.
    pub(crate) short: String,
    pub(crate) style: usize,
}

fn name(long: &str, short: &str, style: usize) -> Name {
    Name {
        long: long.to_owned(),
        short: short.to_owned(),
        style,
    }
}

/// The line that a point belongs to.
pub(crate) fn of(point: &Point) -> Name {
    match point.experiment.as_str() {
        "blocks" | "queues" => poster(point),
        "latency" => {
            let link = link(point);
            let what = match point.test.as_str() {
                "put-lat" => "put",
                "signal-lat" => "put with signal",
                "get-lat" => "get",
                other => other,
            };
            Name {
                long: format!("{what}, {}", link.long),
                short: format!("{}, {}", what.replace(" with ", "+"), link.short),
                style: link.style,
            }
        }
        _ => link(point),
    }
}

/// Who posts.
fn poster(point: &Point) -> Name {
    let host = point.gpu == "host";
    match (
        point.initiator.as_str(),
        point.sharing.as_str(),
        point.threads,
    ) {
        ("assisted", ..) => name(
            "kernel builds, a CPU thread rings (assisted)",
            "assisted",
            3,
        ),
        ("proxy", ..) => name("kernel asks, a CPU thread posts (proxy)", "proxy", 4),
        ("cpu", ..) => name("CPU threads, a queue each", "CPU threads", 5),
        (_, "block", 32) if host => name("host threads, 32 share a queue", "32 threads a queue", 1),
        (_, "block", 32) => name("GPU warps, a queue each", "warps, a queue each", 1),
        (_, "block", n) => name(
            &format!("GPU blocks of {n} threads, a queue each"),
            &format!("{n} threads a queue"),
            2,
        ),
        _ if host => name("host threads, a queue each", "threads, a queue each", 0),
        _ => name("GPU threads, a queue each", "threads, a queue each", 0),
    }
}

/// How bytes travel.
fn link(point: &Point) -> Name {
    match (point.link.as_str(), point.mem.as_str()) {
        ("shm", _) => name("shared memory, two processes", "shm", 1),
        ("roce", _) => name("RoCEv2 packets", "roce", 2),
        (_, "gpu") => name(
            "loopback, payloads in GPU memory",
            "loopback, GPU memory",
            3,
        ),
        _ => name("loopback, one process", "loopback", 0),
    }
}

/// What is varied along a line.
pub(crate) fn x(point: &Point) -> u64 {
    match point.experiment.as_str() {
        "blocks" => point.blocks,
        "queues" => point.qps,
        _ => point.size,
    }
}

/// A line and its points that were measured, in order of what is varied.
pub(crate) struct Line<'a> {
    pub(crate) name: Name,
    pub(crate) points: Vec<&'a Point>,
}

/// The lines of an experiment, those of `test` if one is named, in the order measured.
pub(crate) fn lines<'a>(
    points: &'a [Point],
    experiment: &str,
    test: Option<&str>,
) -> Vec<Line<'a>> {
    let mut lines: Vec<Line<'a>> = Vec::new();
    for point in points {
        let other = point.experiment != experiment || test.is_some_and(|t| t != point.test);
        if other || point.repetitions.is_empty() {
            continue;
        }
        let name = of(point);
        match lines.iter_mut().find(|l| l.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line {
                name,
                points: vec![point],
            }),
        }
    }
    for line in &mut lines {
        line.points.sort_by_key(|p| x(p));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::fixture;

    #[test]
    fn points_of_a_line_are_in_order_and_short_names_fit() {
        let results = fixture::results();
        let all = lines(&results.points, "blocks", None);
        assert!(all.len() >= 2);
        for line in &all {
            assert!(line.points.is_sorted_by_key(|p| x(p)));
            assert!(line.name.short.chars().count() <= 22, "{}", line.name.short);
        }
        let styles: std::collections::BTreeSet<_> = all.iter().map(|l| l.name.style).collect();
        assert_eq!(styles.len(), all.len(), "each line has a look of its own");
    }

    #[test]
    fn what_was_not_measured_is_no_point() {
        let mut results = fixture::results();
        for point in &mut results.points {
            point.repetitions.clear();
        }
        assert!(lines(&results.points, "sizes", None).is_empty());
    }
}
