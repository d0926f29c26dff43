//! Who is missing: the request that a wait needs and that is not complete, looked for in the queues of all processes that were reached.
//!
//! A wait names a word of memory. The regions of its process say by which keys and addresses requests name that word; the queues of every
//! process say which requests for it are written and not complete, and how far each has come. The other end of a queue pair is told from two
//! numbers that name each other.

use super::firing::Played;
use super::moment::{moment, span};
use super::{Condition, DeviceReport, PendingReport, ProcessReport, QpReport, WaitReport};

/// Fills in what each wait lacks, and what each queue pair's other end says.
pub fn name(reports: &mut [ProcessReport]) {
    // What the other end has to do with it comes first: waits quote it.
    let all: &[ProcessReport] = reports;
    let ends: Vec<_> = all
        .iter()
        .flat_map(|r| &r.devices)
        .flat_map(|d| &d.qps)
        .map(|qp| (peer(all, qp), trouble(all, qp)))
        .collect();
    let killers: Vec<_> = all.iter().map(|r| killer(all, r)).collect();
    let qps = reports
        .iter_mut()
        .flat_map(|r| &mut r.devices)
        .flat_map(|d| &mut d.qps);
    for (qp, (peer, trouble)) in qps.zip(ends) {
        qp.peer = peer;
        if let Some(trouble) = trouble.filter(|t| !qp.verdict.contains(t.as_str())) {
            qp.verdict.push_str("; ");
            qp.verdict.push_str(&trouble);
        }
    }
    for (report, killer) in reports.iter_mut().zip(killers) {
        if let (Some(why), Some(killer)) = (&mut report.post_mortem, killer) {
            why.push_str("; ");
            why.push_str(&killer);
        }
    }
    let all: &[ProcessReport] = reports;
    let mut verdicts = Vec::new();
    for report in all {
        for device in &report.devices {
            for wait in &device.waits {
                verdicts.push(verdict(all, report, device, wait));
            }
        }
    }
    let waits = reports
        .iter_mut()
        .flat_map(|r| &mut r.devices)
        .flat_map(|d| &mut d.waits);
    for (wait, verdict) in waits.zip(verdicts) {
        wait.verdict = verdict;
    }
}

/// What keeps a process from doing anything.
fn ailing(report: &ProcessReport) -> Option<&'static str> {
    match report.condition {
        Condition::Stopped => Some("is stopped (state T)"),
        Condition::Ended => Some("has ended"),
        _ => None,
    }
}

/// `rank 3 (process 4242)`.
fn called(report: &ProcessReport) -> String {
    match report.rank {
        Some(rank) => format!("rank {rank} (process {})", report.pid),
        None => format!("process {}", report.pid),
    }
}

/// The same with its state, if that matters: `process 4242, which is stopped (state T)`.
fn who(report: &ProcessReport) -> String {
    let name = called(report);
    match ailing(report) {
        Some(what) => format!("{name}, which {what}"),
        None => name,
    }
}

/// What a fault script did in a process.
fn played<'a>(report: &ProcessReport, device: &'a DeviceReport) -> Played<'a> {
    Played::of(&device.firings, report.at_ns, report.condition)
}

/// Do they name each other?
fn linked(a: &QpReport, b: &QpReport) -> bool {
    a.peer_qpn == Some(b.qpn) && b.peer_qpn == Some(a.qpn)
}

/// Does it go to that device?
fn targets(qp: &QpReport, own: bool, device: &DeviceReport) -> bool {
    match qp.link.as_str() {
        "loopback" => own,
        _ => qp.is_far() && !own && device.qps.iter().any(|other| linked(qp, other)),
    }
}

/// The queue pair at the other end, its device and process.
pub(super) fn end<'a>(
    reports: &'a [ProcessReport],
    qp: &QpReport,
) -> Option<(&'a ProcessReport, &'a DeviceReport, &'a QpReport)> {
    let devices = reports
        .iter()
        .flat_map(|r| r.devices.iter().map(move |d| (r, d)));
    devices
        .flat_map(|(r, d)| d.qps.iter().map(move |q| (r, d, q)))
        .find(|(_, _, other)| linked(qp, other) && !std::ptr::eq(qp, *other))
}

/// What the other end says of itself.
fn peer(reports: &[ProcessReport], qp: &QpReport) -> Option<String> {
    let number = qp.peer_qpn.filter(|_| qp.is_far())?;
    Some(match end(reports, qp) {
        Some((report, _, other)) => format!(
            "QP {number:#08x} of {}: {}, {}",
            who(report),
            other.state,
            other.verdict
        ),
        None => {
            format!("QP {number:#08x}: not reachable, no process of this user on this host has it")
        }
    })
}

/// What at the other end is to blame for a queue pair that waits for it.
fn trouble(reports: &[ProcessReport], qp: &QpReport) -> Option<String> {
    if !qp.waits_for_peer {
        return None;
    }
    let (report, device, other) = end(reports, qp)?;
    let played = played(report, device);
    let name = format!("its peer, {},", called(report));
    if let Some(what) = ailing(report) {
        return Some(format!("{name} {what}"));
    }
    if let Some(dead) = device.core_of(other).and_then(|c| c.dead.as_ref()) {
        return Some(format!("{name} has lost its engine core: {dead}"));
    }
    if let Some(why) = played.stall(other.core) {
        return Some(format!("{name} has its engine core stalled: {why}"));
    }
    let link = (qp.link == "roce").then(|| played.link(other.core));
    let link = link.flatten()?;
    Some(format!("{name} hears nothing: {link}"))
}

/// Who killed a process.
fn killer(reports: &[ProcessReport], dead: &ProcessReport) -> Option<String> {
    if dead.condition != Condition::Ended {
        return None;
    }
    reports.iter().find_map(|report| {
        let mut devices = report.devices.iter();
        let name = devices.find_map(|d| played(report, d).killed(dead.pid))?;
        Some(format!("{name} of process {} killed it", report.pid))
    })
}

fn verdict(
    reports: &[ProcessReport],
    report: &ProcessReport,
    device: &DeviceReport,
    wait: &WaitReport,
) -> String {
    let ended = report.condition == Condition::Ended;
    let lasted = match (wait.over, ended) {
        (true, _) => wait.lasted_ns,
        (false, true) => report.alive_ns.saturating_sub(wait.since_ns),
        (false, false) => report.at_ns.saturating_sub(wait.since_ns),
    };
    let since = match (wait.over, lasted) {
        (true, 0) => ", and gave up at its deadline".to_owned(),
        (true, ns) => format!(", and gave up after {}", span(ns)),
        (false, 0) => String::new(),
        (false, ns) => format!(", for {}", span(ns)),
    };
    let thread = match (wait.thread, ailing(report)) {
        (Some(t), _) => format!(", thread {t},"),
        // What is said of the process ends here.
        (None, Some(_)) => ",".to_owned(),
        (None, None) => String::new(),
    };
    let waits = match ended || wait.over {
        true => "waited",
        false => "waits",
    };
    let head = format!("{}{thread} {waits} for ", who(report));
    match wait.kind.as_str() {
        "word" => word(reports, report, device, wait, &head, &since),
        "receive" => format!(
            "{head}receive {} of QP {:#08x}{since}: {}",
            wait.wanted,
            wait.at,
            receive(reports, report, device, wait)
        ),
        _ => format!(
            "{head}WQE {} of QP {:#08x}{since}, having seen {} complete: {}",
            wait.wanted,
            wait.at,
            wait.have,
            ticket(device, wait)
        ),
    }
}

/// A queue pair of the waiting process.
fn own(device: &DeviceReport, qpn: u64) -> Option<&QpReport> {
    device.qps.iter().find(|q| u64::from(q.qpn) == qpn)
}

/// Is its sentence what is to be said of any wait for it?
fn failed(device: &DeviceReport, qp: &QpReport) -> bool {
    qp.error.is_some() || device.core_of(qp).is_some_and(|c| c.dead.is_some())
}

fn ticket(device: &DeviceReport, wait: &WaitReport) -> String {
    let Some(qp) = own(device, wait.at) else {
        return "it is gone".to_owned();
    };
    let Some(engine) = qp.engine.filter(|_| !failed(device, qp) && !qp.moving) else {
        return qp.verdict.clone();
    };
    if wait.wanted >= engine.completed {
        return qp.later.as_ref().unwrap_or(&qp.verdict).clone();
    }
    // A collapsed CQ shows its newest CQE alone, which stands for all before it; the others are polled in order.
    let concerns = |at: u64| match qp.cq == "collapsed" {
        true => wait.wanted <= at,
        false => at <= wait.wanted,
    };
    match (&qp.lacks, qp.lacks_at) {
        (Some(lacks), Some(at)) if concerns(at) => lacks.clone(),
        _ => "it is complete, and its waiter has not looked since".to_owned(),
    }
}

/// What a receive that is not filled lacks: the message that was not sent.
fn receive(
    reports: &[ProcessReport],
    report: &ProcessReport,
    device: &DeviceReport,
    wait: &WaitReport,
) -> String {
    let Some(qp) = own(device, wait.at) else {
        return "it is gone".to_owned();
    };
    if failed(device, qp) {
        return qp.verdict.clone();
    }
    let Some(recv) = qp.recv else {
        return "how many receives were posted and filled is not known".to_owned();
    };
    if wait.wanted < recv.done {
        return match (&qp.recv_lacks, qp.recv_lacks_at) {
            (Some(lacks), Some(at)) if at <= wait.wanted => lacks.clone(),
            _ => "it is filled, and its waiter has not looked since".to_owned(),
        };
    }
    if wait.wanted >= recv.posted {
        return format!("it was not posted: {} receives were", recv.posted);
    }
    let had = format!(
        "no message has come for it, {} have for those before",
        recv.done
    );
    let played = played(report, device);
    // Packets and messages of other processes come by way of this one's engine.
    if let Some(why) = played.stall(qp.core).filter(|_| qp.is_far()) {
        let is = played.tense("is", "was");
        return format!("{had}: its own engine core {is} stalled: {why}");
    }
    let sender = match qp.link.as_str() {
        "loopback" => device
            .qps
            .iter()
            .find(|other| other.link == "loopback" && other.peer_qpn == Some(qp.qpn))
            .map(|other| (report, other)),
        _ => end(reports, qp).map(|(report, _, other)| (report, other)),
    };
    let Some((report, sender)) = sender else {
        return match qp.peer_qpn {
            Some(number) => format!(
                "{had}, and its sender, QP {number:#08x}, is not reachable: no process of this user on this host has it"
            ),
            None => format!("{had}, and it is not connected"),
        };
    };
    let name = format!("{}, QP {:#08x}", who(report), sender.qpn);
    if let Some(first) = sender.pending.iter().find(|p| p.takes) {
        return format!(
            "{had}: the missing message is {name}, WQE {} ({}), {}",
            first.index,
            first.what,
            stage(sender, first)
        );
    }
    if sender.stuck {
        return format!("{had}: {name}: {}", sender.verdict);
    }
    let next = sender
        .poster
        .map(|p| p.reserved)
        .max(sender.posted)
        .max(sender.engine.map(|e| e.rung));
    let next = next.map_or(String::new(), |n| format!(" (its next is WQE {n})"));
    format!("{had}: the missing message was not sent: {name}, has not posted it{next}")
}

fn word(
    reports: &[ProcessReport],
    report: &ProcessReport,
    device: &DeviceReport,
    wait: &WaitReport,
    head: &str,
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
        "{head}{place} >= {} and has {}{since}",
        wait.wanted, wait.have
    );
    if names.is_empty() {
        return match (device.recorded, device.left_out.0) {
            (false, _) => format!(
                "{head}: its flight recorder is off (DOORBELL_RECORD=off), so its regions are not known, nor which requests reach that word"
            ),
            (true, 0) => {
                format!("{head}: no region holds that word, so no request can reach it")
            }
            (true, more) => format!(
                "{head}: no region that is recorded holds that word; {more} more had no place in the record"
            ),
        };
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
                } else if qp.error.is_some() {
                    failed.push(format!(
                        "QP {:#08x} of {}: {}",
                        qp.qpn,
                        who(their),
                        qp.verdict
                    ));
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
            neighbour(reports, report, device)
        ),
    }
}

/// Of the processes that are connected to the device, the one that is most likely to be the reason.
fn neighbour(reports: &[ProcessReport], own: &ProcessReport, device: &DeviceReport) -> String {
    let connected = || {
        reports.iter().filter(|their| {
            their.devices.iter().any(|d| {
                let same = their.pid == own.pid && d.id == device.id;
                !same && d.qps.iter().any(|q| targets(q, same, device))
            })
        })
    };
    if let Some(their) = connected().find(|r| ailing(r).is_some()) {
        return format!("; {}, is connected to it", who(their));
    }
    if let Some(their) = connected().find(|r| r.devices.iter().any(|d| !d.waits.is_empty())) {
        return format!("; {}, which is connected to it, waits itself", who(their));
    }
    if let Some(their) = connected().find(|r| r.devices.iter().any(|d| !d.recorded)) {
        return format!(
            "; {}, which is connected to it, has its flight recorder off: what it has written and not rung is not seen",
            who(their)
        );
    }
    ": it was not posted, or its poster is on another host or gone".to_owned()
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
    if let Some(error) = &qp.error {
        return format!("{posted}which will not be executed: {error}");
    }
    let rung = qp.engine.map_or(0, |e| e.rung);
    let by_poster = qp.poster.is_some_and(|p| request.index < p.rung);
    let how = match (request.index < rung, by_poster) {
        (true, _) => "rung and is not complete",
        (false, true) => "rung, and the engine saw no doorbell for it",
        (false, false) => return format!("{posted}not covered by any doorbell"),
    };
    // The queue pair's own sentence says why, and may begin with the same.
    let same = how
        .split(',')
        .next()
        .is_some_and(|h| qp.verdict.contains(h));
    match (same, qp.stuck) {
        (true, _) if posted.is_empty() => qp.verdict.clone(),
        (true, _) => format!("{}: {}", posted.trim_end_matches(", "), qp.verdict),
        (false, true) => format!("{posted}{how}: {}", qp.verdict),
        (false, false) => format!("{posted}{how}"),
    }
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
            takes: false,
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
            lasted_ns: 0,
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

    /// A wait is told what concerns its own request.
    #[test]
    fn a_ticket_that_is_complete_is_not_blamed_on_a_later_slot() {
        let mut all = job(Vec::new());
        let device = &mut all[1].devices[0];
        let one = &mut device.qps[0];
        one.stuck = true;
        one.verdict = "WQE 1023 is written, and not covered by any doorbell".to_owned();
        let mut ask = |wanted: u64, set: fn(&mut QpReport)| {
            set(&mut device.qps[0]);
            let wait = WaitReport {
                kind: "ticket".to_owned(),
                at: 0x42,
                wanted,
                have: 777,
                since_ns: 0,
                thread: None,
                over: false,
                lasted_ns: 0,
                verdict: String::new(),
            };
            ticket(device, &wait)
        };
        assert!(ask(777, |_| ()).starts_with("it is complete"));
        assert!(ask(1023, |_| ()).starts_with("WQE 1023 is written"));
        let lacks = |qp: &mut QpReport| {
            qp.cq = "per-slot".to_owned();
            (qp.lacks, qp.lacks_at) = (Some("no CQE of WQE 777".to_owned()), Some(777));
            qp.later = Some(std::mem::replace(
                &mut qp.verdict,
                "no CQE of WQE 777".to_owned(),
            ));
        };
        assert_eq!(ask(777, lacks), "no CQE of WQE 777");
        assert!(ask(776, |_| ()).starts_with("it is complete"));
        assert!(ask(1023, |_| ()).starts_with("WQE 1023 is written"));
        // A collapsed CQ shows one CQE, which stands for all before it.
        let collapsed = |qp: &mut QpReport| qp.cq = "collapsed".to_owned();
        assert_eq!(ask(776, collapsed), "no CQE of WQE 777");
        assert!(ask(778, |_| ()).starts_with("it is complete"));
    }

    #[test]
    fn a_stopped_process_ends_in_a_comma() {
        let mut all = job(Vec::new());
        all[0].condition = Condition::Stopped;
        name(&mut all);
        let verdict = &all[0].devices[0].waits[0].verdict;
        assert!(
            verdict.starts_with("rank 3 (process 300), which is stopped (state T), waits for "),
            "{verdict}"
        );
    }
}
