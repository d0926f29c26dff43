//! Who is missing: the request that a wait needs and that is not complete, looked for in the queues of all processes that were reached.
//!
//! A wait names a word of memory. The regions of its process say by which keys and addresses requests name that word; the queues of every
//! process say which requests for it are written and not complete, and how far each has come. The other end of a queue pair is told from two
//! numbers that name each other.

use super::moment::{moment, span};
use super::{DeviceReport, PendingReport, ProcessReport, QpReport, WaitReport};

/// Fills in what each wait lacks, and what each queue pair's other end says.
pub fn name(reports: &mut [ProcessReport]) {
    let mut verdicts = Vec::new();
    let mut peers = Vec::new();
    for report in reports.iter() {
        for device in &report.devices {
            for wait in &device.waits {
                verdicts.push(verdict(reports, report, device, wait));
            }
            for qp in &device.qps {
                peers.push(peer(reports, qp));
            }
        }
    }
    let (mut verdicts, mut peers) = (verdicts.into_iter(), peers.into_iter());
    for device in reports.iter_mut().flat_map(|r| &mut r.devices) {
        for (wait, verdict) in device.waits.iter_mut().zip(&mut verdicts) {
            wait.verdict = verdict;
        }
        for (qp, peer) in device.qps.iter_mut().zip(&mut peers) {
            qp.peer = peer;
        }
    }
}

/// `rank 3 (process 4242)`.
fn who(report: &ProcessReport) -> String {
    match report.rank {
        Some(rank) => format!("rank {rank} (process {})", report.pid),
        None => format!("process {}", report.pid),
    }
}

/// Do they name each other?
fn linked(a: &QpReport, b: &QpReport) -> bool {
    a.peer_qpn == Some(b.qpn) && b.peer_qpn == Some(a.qpn)
}

/// Does it go to that device?
fn targets(qp: &QpReport, own: bool, device: &DeviceReport) -> bool {
    match qp.link.as_str() {
        "loopback" => own,
        "shm" | "roce" => !own && device.qps.iter().any(|other| linked(qp, other)),
        _ => false,
    }
}

/// What the other end says of itself.
fn peer(reports: &[ProcessReport], qp: &QpReport) -> Option<String> {
    if !matches!(qp.link.as_str(), "shm" | "roce") {
        return None;
    }
    let number = qp.peer_qpn?;
    for report in reports {
        for other in report.devices.iter().flat_map(|d| &d.qps) {
            if linked(qp, other) && !std::ptr::eq(qp, other) {
                let dead = match &report.post_mortem {
                    Some(why) => format!(" ({why})"),
                    None => String::new(),
                };
                return Some(format!(
                    "QP {number:#08x} of {}{dead}: {}, {}",
                    who(report),
                    other.state,
                    other.verdict
                ));
            }
        }
    }
    Some(format!(
        "QP {number:#08x}: not reachable, no process of this user on this host has it"
    ))
}

fn verdict(
    reports: &[ProcessReport],
    report: &ProcessReport,
    device: &DeviceReport,
    wait: &WaitReport,
) -> String {
    let since = match (wait.since_ns, wait.over) {
        (0, true) => ", and gave up at its deadline".to_owned(),
        (0, false) => String::new(),
        (ns, over) => format!(
            "{}{}",
            match over {
                true => ", and gave up after ",
                false => ", for ",
            },
            span(report.at_ns.saturating_sub(ns))
        ),
    };
    let thread = wait
        .thread
        .map_or(String::new(), |t| format!(", thread {t},"));
    match wait.kind.as_str() {
        "word" => word(reports, report, device, wait, &thread, &since),
        "receive" => format!(
            "{}{thread} waits for receive {} of QP {:#08x}{since}: {}",
            who(report),
            wait.wanted,
            wait.at,
            own(device, wait.at)
        ),
        _ => format!(
            "{}{thread} waits for WQE {} of QP {:#08x} and {} are complete{since}: {}",
            who(report),
            wait.wanted,
            wait.at,
            wait.have,
            own(device, wait.at)
        ),
    }
}

/// What is said of a queue pair of the waiting process.
fn own(device: &DeviceReport, qpn: u64) -> String {
    device
        .qps
        .iter()
        .find(|q| u64::from(q.qpn) == qpn)
        .map_or("it is gone".to_owned(), |q| q.verdict.clone())
}

fn word(
    reports: &[ProcessReport],
    report: &ProcessReport,
    device: &DeviceReport,
    wait: &WaitReport,
    thread: &str,
    since: &str,
) -> String {
    // As requests name it: key and address.
    let names: Vec<(u32, u64)> = device
        .regions
        .iter()
        .filter_map(|r| {
            let offset = wait.at.checked_sub(r.addr)?;
            (offset < r.len).then(|| (r.key, r.base.wrapping_add(offset)))
        })
        .collect();
    let place = device
        .regions
        .iter()
        .find(|r| wait.at.checked_sub(r.addr).is_some_and(|o| o < r.len))
        .map_or(format!("the word at {:#x}", wait.at), |r| {
            format!(
                "signal {} (word {} of region {:#010x})",
                (wait.at - r.addr) / 8,
                (wait.at - r.addr) / 8,
                r.key
            )
        });
    let head = format!(
        "{}{thread} waits for {place} >= {} and has {}{since}",
        who(report),
        wait.wanted,
        wait.have
    );
    if names.is_empty() {
        return format!("{head}: no region holds that word, so no request can reach it");
    }
    let mut found: Vec<(u64, String)> = Vec::new();
    let mut failed = Vec::new();
    let mut others = 0;
    for their in reports {
        for dev in &their.devices {
            let same = their.pid == report.pid && dev.id == device.id;
            for qp in dev.qps.iter().filter(|q| targets(q, same, device)) {
                let mut hits = qp.pending.iter().filter(|p| {
                    p.writes
                        && names
                            .iter()
                            .any(|&(key, addr)| p.key == Some(key) && inside(p, addr))
                });
                if let Some(first) = hits.next() {
                    others += hits.count();
                    found.push((
                        first.posted_ns.unwrap_or(u64::MAX),
                        format!(
                            "{}, QP {:#08x}, WQE {} ({}), {}",
                            who(their),
                            qp.qpn,
                            first.index,
                            first.what,
                            stage(qp, first)
                        ),
                    ));
                } else if let Some(error) = &qp.error {
                    failed.push(format!("QP {:#08x} of {}: {error}", qp.qpn, who(their)));
                }
            }
        }
    }
    found.sort();
    others += found.len().saturating_sub(1);
    let rest = match others {
        0 => String::new(),
        1 => "; one more request for it is not complete".to_owned(),
        n => format!("; {n} more requests for it are not complete"),
    };
    match (found.first(), failed.first()) {
        (Some((_, text)), _) => format!("{head}: the missing add is {text}{rest}"),
        (None, Some(failure)) => format!(
            "{head}: no request for it is on its way; a queue pair that leads here has failed: {failure}"
        ),
        (None, None) => format!(
            "{head}: no request for it is on its way in any process that was reached{}",
            match idle(reports, report, device) {
                Some(other) => format!("; {other}, which is connected to it, waits itself"),
                None => ": it was not posted, or its poster is on another host or gone".to_owned(),
            }
        ),
    }
}

/// Somebody who is connected to the device and waits too: what is missing there is missing here.
fn idle(reports: &[ProcessReport], own: &ProcessReport, device: &DeviceReport) -> Option<String> {
    reports.iter().find_map(|their| {
        let waits = their.devices.iter().any(|d| {
            let same = their.pid == own.pid && d.id == device.id;
            !same && !d.waits.is_empty() && d.qps.iter().any(|q| targets(q, same, device))
        });
        waits.then(|| who(their))
    })
}

fn inside(request: &PendingReport, addr: u64) -> bool {
    addr.checked_sub(request.addr)
        .is_some_and(|offset| offset < request.len)
}

/// How far a request has come.
fn stage(qp: &QpReport, request: &PendingReport) -> String {
    let posted = request
        .posted_ns
        .map_or(String::new(), |ns| format!("posted at {}, ", moment(ns)));
    let rung = qp.engine.map_or(0, |e| e.rung);
    if let Some(error) = &qp.error {
        return format!("{posted}which will not be executed: {error}");
    }
    if request.index < rung {
        return format!("{posted}rung and not complete: {}", qp.verdict);
    }
    if qp.poster.is_some_and(|p| request.index < p.rung) {
        return format!("{posted}rung, and the engine saw no doorbell for it");
    }
    format!("{posted}not covered by any doorbell")
}

#[cfg(test)]
mod tests {
    use super::super::{RegionReport, Seen};
    use super::*;

    fn qp(qpn: u32, peer: u32, link: &str) -> QpReport {
        let json = serde_json::json!({
            "qpn": qpn, "cqn": 1, "core": 0, "state": "ready", "depth": 1024, "handler": "record", "cq": "collapsed",
            "poster": null, "engine": null, "record": null, "doorbell": null, "next": null, "cqe": null, "error": null,
            "counters": [], "roce": [], "moving": false, "stuck": false, "verdict": "idle",
        });
        QpReport {
            link: link.to_owned(),
            peer_qpn: Some(peer),
            engine: Some(Seen {
                rung: 1023,
                completed: 1023,
            }),
            ..serde_json::from_value(json).unwrap()
        }
    }

    fn process(pid: u32, rank: u32, qps: Vec<QpReport>) -> ProcessReport {
        let json = serde_json::json!({
            "schema": "doorbell-report/1", "version": "0", "pid": pid, "at_ns": 10_000_000_000_u64, "cpu_ns": 0,
            "rank": rank,
            "devices": [{"id": pid, "gpu": "host", "caller_driven": false, "cores": [], "qps": [], "roce": []}],
        });
        let mut report: ProcessReport = serde_json::from_value(json).unwrap();
        report.devices[0].qps = qps;
        report
    }

    fn add(index: u64, key: u32, addr: u64) -> PendingReport {
        PendingReport {
            index,
            what: "ATOMIC_FA of 1".to_owned(),
            key: Some(key),
            addr,
            len: 8,
            writes: true,
            posted_ns: None,
        }
    }

    /// Rank 3 waits for signal 17; rank 1 is connected to it.
    fn job(pending: Vec<PendingReport>) -> Vec<ProcessReport> {
        let mut waits = process(300, 3, vec![qp(0x77, 0x42, "shm")]);
        waits.devices[0].regions.push(RegionReport {
            key: 0x3bd7_0001,
            base: 0,
            len: 4096,
            addr: 0x7000,
            access: String::new(),
            pd: 1,
            on_gpu: false,
        });
        waits.devices[0].waits.push(WaitReport {
            kind: "word".to_owned(),
            at: 0x7000 + 17 * 8,
            wanted: 4096,
            have: 4095,
            since_ns: 7_000_000_000,
            thread: None,
            over: false,
            verdict: String::new(),
        });
        let mut poster = process(100, 1, vec![qp(0x42, 0x77, "shm")]);
        poster.devices[0].qps[0].pending = pending;
        // A third has the same key and address by chance, and is connected to somebody else.
        let mut stranger = process(200, 2, vec![qp(0x42, 0x99, "shm")]);
        stranger.devices[0].qps[0].pending = vec![add(5, 0x3bd7_0001, 17 * 8)];
        let mut all = vec![waits, poster, stranger];
        name(&mut all);
        all
    }

    #[test]
    fn the_missing_add_is_named() {
        let all = job(vec![add(1022, 0x3bd7_0001, 0), add(1023, 0x3bd7_0001, 136)]);
        let verdict = &all[0].devices[0].waits[0].verdict;
        assert_eq!(
            verdict,
            "rank 3 (process 300) waits for signal 17 (word 17 of region 0x3bd70001) >= 4096 and has 4095, for 3.0 s: \
             the missing add is rank 1 (process 100), QP 0x000042, WQE 1023 (ATOMIC_FA of 1), not covered by any doorbell"
        );
        let peer = all[0].devices[0].qps[0].peer.as_deref();
        assert_eq!(
            peer,
            Some("QP 0x000042 of rank 1 (process 100): ready, idle")
        );
        let peer = all[2].devices[0].qps[0].peer.as_deref().unwrap();
        assert!(peer.contains("not reachable"), "{peer}");
    }

    #[test]
    fn a_wait_for_somebody_who_waits_points_there() {
        let mut all = job(Vec::new());
        let wait = all[0].devices[0].waits[0].clone();
        all[1].devices[0].waits.push(wait);
        name(&mut all);
        let verdict = &all[0].devices[0].waits[0].verdict;
        assert!(
            verdict.ends_with("; rank 1 (process 100), which is connected to it, waits itself"),
            "{verdict}"
        );
    }

    #[test]
    fn nobody_is_accused_without_a_request() {
        let all = job(vec![add(1023, 0x3bd7_0001, 8 * 18)]);
        let verdict = &all[0].devices[0].waits[0].verdict;
        assert!(
            verdict.contains("no request for it is on its way"),
            "{verdict}"
        );
    }
}
