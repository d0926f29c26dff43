//! Gives a process's report to other processes of the same user, and asks others for theirs.
//!
//! The first device that a process opens starts one thread, which sleeps in `accept` on an abstract UNIX socket until somebody asks;
//! it costs nothing until then, and leaves no file behind however the process ends. `DOORBELL_REPORT=off` leaves it out. Who asks is
//! checked by the kernel's credentials: the same user, or root. A process that is gone cannot be asked.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Mutex, Once, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use doorbell_hca::record::dir::Life;
use doorbell_hca::shm::Credentials;

use super::postmortem::Left;
pub use super::who::ReportError;
use super::who::{is_foreign, is_stopped, owner};
use super::{Condition, DeviceReport, Motion, ProcessReport, SCHEMA, look, postmortem};
use crate::device::Inner;

/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at a queue pair.
const APART: Duration = Duration::from_millis(50);
/// A report of tens of thousands of queue pairs.
const MOST: u64 = 256 << 20;
/// Processes asked at the same time.
const AT_ONCE: usize = 64;
/// What the last of many to be asked has in any case.
const LEAST: Duration = Duration::from_millis(100);
/// A question is one short line.
const LINE: u64 = 128;
/// What it says to be answered with everything.
pub(super) const FULL: &str = " full";
/// What it says to be answered with what the flight recorder remembers, queue pairs that are gone included.
const TRACE: &str = " trace";

/// Devices that are open, and the process whose thread answers.
static OPEN: Mutex<(u32, Vec<Weak<Inner>>)> = Mutex::new((0, Vec::new()));

fn address(pid: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("doorbell-report-{pid}"))
}

/// Enters a device; the first one of a process starts the thread.
pub(crate) fn enter(device: Weak<Inner>) {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.1.retain(|d| d.strong_count() > 0);
    open.1.push(device);
    let pid = std::process::id();
    // In a forked child the thread of the parent is not there.
    if open.0 == pid || off() {
        return;
    }
    open.0 = pid;
    wait_at_exit();
    let listener = match address(pid).and_then(|a| UnixListener::bind_addr(&a)) {
        Ok(listener) => listener,
        Err(e) => return tracing::debug!("no reports to other processes: {e}"),
    };
    let thread = std::thread::Builder::new()
        .name("doorbell-report".into())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                // Whoever hangs up early gets nothing.
                if let Err(e) = answer(&stream) {
                    tracing::debug!("a question about this process: {e}");
                }
            }
        });
    if let Err(e) = thread {
        tracing::debug!("no reports to other processes: {e}");
    }
}

/// Held while this process is looked at for another. A device that is closed meanwhile is gone only when the look is over, on the thread that
/// looked.
static LOOKING: Mutex<()> = Mutex::new(());

/// At its end the process waits for a look at it, so that closing is complete: a trace is written, the flight record removed.
fn wait_at_exit() {
    extern "C" fn wait() {
        const MOST: Duration = Duration::from_secs(1);
        let until = Instant::now() + MOST;
        // In a forked child the thread that looks is not there.
        let ours = OPEN
            .try_lock()
            .is_ok_and(|open| open.0 == std::process::id());
        let looking = || matches!(LOOKING.try_lock(), Err(TryLockError::WouldBlock));
        while ours && looking() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function neither unwinds nor uses anything that ends before it.
        let _ = unsafe { libc::atexit(wait) };
    });
}

fn off() -> bool {
    let Some(value) = std::env::var_os("DOORBELL_REPORT") else {
        return false;
    };
    if let Err(why) = check_variable(&value) {
        // Once: a process has one such thread.
        tracing::warn!("DOORBELL_REPORT={}: {why}", value.display());
    }
    value == "off"
}

/// What is wrong with a value of `DOORBELL_REPORT`.
///
/// # Errors
/// What may be given, and as what this is taken.
pub fn check_variable(value: &OsStr) -> Result<(), &'static str> {
    match value == "on" || value == "off" || value.is_empty() {
        true => Ok(()),
        false => Err("on (the default) and off are known; it is taken as on"),
    }
}

/// The report of this process. Events and waiting requests are left out of one that is not `full`: whoever looks every second does not need
/// them.
pub fn own(full: bool) -> ProcessReport {
    let devices: Vec<_> = {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.1.iter().filter_map(Weak::upgrade).collect()
    };
    let first: Vec<_> = devices.iter().map(|d| Motion::of(d)).collect();
    std::thread::sleep(APART);
    let bare = bare(devices.iter().find_map(|d| d.settings.rank));
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    ProcessReport {
        cpu_ns: (used.tv_sec as u64)
            .saturating_mul(1_000_000_000)
            .saturating_add(used.tv_nsec as u64),
        devices: devices
            .iter()
            .zip(&first)
            .map(|(device, first)| look(device, first))
            .map(|mut report| {
                for qp in report.qps.iter_mut().filter(|_| !full) {
                    qp.events.clear();
                    qp.pending.clear();
                }
                report
            })
            .collect(),
        ..bare
    }
}

/// A report of this process, of the rank that its devices were opened with.
fn bare(rank: Option<u32>) -> ProcessReport {
    let now = doorbell_hca::record::now_ns();
    ProcessReport {
        schema: SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        at_ns: now,
        cpu_ns: 0,
        rank,
        command: command(),
        post_mortem: None,
        condition: Condition::Runs,
        alive_ns: now,
        devices: Vec::new(),
    }
}

/// The command line of this process.
fn command() -> String {
    let words: Vec<String> = std::env::args_os()
        .map(|w| w.to_string_lossy().into_owned())
        .collect();
    words.join(" ")
}

fn answer(stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let asker = Credentials::of(stream)?;
    if !asker.is_own() && asker.uid != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut line = String::new();
    BufReader::new(stream.take(LINE)).read_line(&mut line)?;
    // Whatever was asked is answered with what this release has; the name in it says which that is.
    let report = {
        let _looking = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
        match line.contains(TRACE) {
            true => remembered(None),
            false => own(line.contains(FULL)),
        }
    };
    let mut report = serde_json::to_vec(&report)?;
    report.push(b'\n');
    let mut stream = stream;
    stream.write_all(&report)
}

/// Asks another process (or this one), for everything or for what changes from second to second.
///
/// # Errors
/// [`ReportError`]: nobody answers, a stranger does, another release, nonsense, or the time is up.
pub fn ask(pid: u32, full: bool) -> Result<ProcessReport, ReportError> {
    let more = if full { FULL } else { "" };
    ask_within(pid, more, PATIENCE)
}

fn ask_within(pid: u32, more: &str, patience: Duration) -> Result<ProcessReport, ReportError> {
    let os = |source| ReportError::unheard(pid, patience, source);
    let until = Instant::now() + patience;
    let stream = match connect(pid, patience) {
        Ok(stream) => stream,
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            return Err(ReportError::absent(pid));
        }
        Err(e) => return Err(os(e)),
    };
    let peer = Credentials::of(&stream).map_err(os)?;
    // One of another name space is never the one that is meant.
    let (other_pid, uid) = (peer.process().unwrap_or(0), peer.uid);
    if other_pid != pid {
        return Err(ReportError::Stranger {
            pid,
            other_pid,
            owner: super::who::user(uid),
        });
    }
    if is_foreign(uid) {
        return Err(ReportError::foreign(pid, uid));
    }
    let mut writer = &stream;
    writeln!(writer, "{SCHEMA}{more}").map_err(os)?;
    let mut text = Vec::new();
    read_until(&stream, until, &mut text).map_err(os)?;
    if text.is_empty() {
        let ended = io::Error::new(io::ErrorKind::UnexpectedEof, "it ended while it was asked");
        return Err(os(ended));
    }
    parse(pid, &text)
}

/// Connects. A process that is stopped accepts nobody, and once enough have asked it the next would wait for ever.
fn connect(pid: u32, patience: Duration) -> io::Result<UnixStream> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    for which in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, which, Some(patience))?;
    }
    let name = format!("doorbell-report-{pid}");
    rustix::net::connect(
        &socket,
        &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
    )?;
    Ok(UnixStream::from(socket))
}

/// Reads to the end, until then: whoever says a byte now and then is not waited for.
fn read_until(mut stream: &UnixStream, until: Instant, text: &mut Vec<u8>) -> io::Result<()> {
    let mut piece = vec![0; 1 << 16];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || text.len() as u64 > MOST {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(n) => text.extend_from_slice(&piece[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// What a process answered.
fn parse(pid: u32, text: &[u8]) -> Result<ProcessReport, ReportError> {
    #[derive(serde::Deserialize)]
    struct Name {
        schema: String,
        version: String,
    }
    let nonsense = |e: serde_json::Error| ReportError::Nonsense {
        pid,
        reason: e.to_string(),
    };
    let name: Name = serde_json::from_slice(text).map_err(nonsense)?;
    if name.schema != SCHEMA {
        return Err(ReportError::Version {
            pid,
            theirs: name.schema,
            version: name.version,
        });
    }
    let mut report: serde_json::Value = serde_json::from_slice(text).map_err(nonsense)?;
    disarm(&mut report);
    serde_json::from_value(report).map_err(nonsense)
}

/// What is read from a document is shown on a terminal: characters that would command it are replaced, in its strings and in the names of its fields.
pub fn disarm(value: &mut serde_json::Value) {
    use serde_json::Value;
    let commands = |c: char| c.is_control() && c != '\n';
    let shown = |text: &str| text.replace(commands, "\u{fffd}");
    match value {
        Value::String(text) if text.contains(commands) => *text = shown(text),
        Value::Array(all) => all.iter_mut().for_each(disarm),
        Value::Object(all) => {
            all.values_mut().for_each(disarm);
            if all.keys().any(|name| name.contains(commands)) {
                let fields = std::mem::take(all).into_iter();
                *all = fields.map(|(name, v)| (shown(&name), v)).collect();
            }
        }
        _ => {}
    }
}

/// Processes of this network namespace that would answer.
///
/// # Errors
/// If the system's list of sockets cannot be read.
pub fn all() -> io::Result<Vec<u32>> {
    let text = std::fs::read_to_string("/proc/net/unix")?;
    let mut pids: Vec<u32> = text
        .lines()
        .filter_map(|line| line.rsplit_once("@doorbell-report-")?.1.trim().parse().ok())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    Ok(pids)
}

/// What is known of a process: what it says, or, if it cannot answer, what its flight record says.
///
/// # Errors
/// [`ReportError`] if there is neither.
pub fn find(pid: u32) -> Result<ProcessReport, ReportError> {
    find_within(pid, FULL, PATIENCE, true)
}

/// `asked`: somebody wants to know of this very process, or of all.
fn find_within(
    pid: u32,
    more: &str,
    patience: Duration,
    asked: bool,
) -> Result<ProcessReport, ReportError> {
    let left = Left::by(pid, asked);
    // One that is stopped would not answer however long it is asked.
    if let Some(report) = left
        .as_ref()
        .filter(|l| l.life == Life::Stopped)
        .and_then(Left::report)
    {
        return Ok(report);
    }
    match ask_within(pid, more, patience) {
        Ok(report) => Ok(report),
        // What belongs to somebody else, or speaks otherwise, has no record that could be read either.
        Err(
            error @ (ReportError::Foreign { .. }
            | ReportError::Stranger { .. }
            | ReportError::Version { .. }
            | ReportError::Nonsense { .. }),
        ) => Err(error),
        Err(error) => match left.and_then(|l| l.report()) {
            Some(report) => Ok(report),
            None => Err(error.without_record()),
        },
    }
}

/// One look at a process, or (`None`) at all of this user that have a device, for who looks every second: they are asked at once, and together
/// have `patience`. One that says nothing is in the list with the reason; records of the dead are not read.
///
/// # Errors
/// If the system's list of sockets cannot be read.
pub fn look_at(
    pid: Option<u32>,
    patience: Duration,
) -> io::Result<Vec<(u32, Result<ProcessReport, ReportError>)>> {
    let until = Instant::now() + patience;
    let pids = match pid {
        Some(pid) => vec![pid],
        None => {
            let mut pids = all()?;
            pids.retain(|&pid| !owner(pid).is_some_and(is_foreign));
            pids
        }
    };
    let look = |pid| match is_stopped(pid) {
        true => Err(ReportError::Stopped { pid }),
        false => {
            let left = until.saturating_duration_since(Instant::now());
            ask_within(pid, "", left.max(LEAST))
        }
    };
    let mut found = at_once(&pids, look);
    // Those of other containers are not found by number.
    found.retain(|(_, r)| pid.is_some() || !r.as_ref().is_err_and(ReportError::is_foreign));
    Ok(found)
}

/// Asks many, [`AT_ONCE`] together: those that do not answer are waited for together.
fn at_once<R: Send>(pids: &[u32], ask: impl Fn(u32) -> R + Sync) -> Vec<(u32, R)> {
    let ask = &ask;
    let mut found = Vec::new();
    for some in pids.chunks(AT_ONCE) {
        found.extend(std::thread::scope(|scope| {
            let asked: Vec<_> = some
                .iter()
                .map(|&pid| {
                    // Where there may be no more threads, one asks after the other.
                    let thread = std::thread::Builder::new();
                    (pid, thread.spawn_scoped(scope, move || ask(pid)))
                })
                .collect();
            let all = asked.into_iter();
            all.filter_map(|(pid, asked)| {
                let answer = asked.map_or_else(|_| Some(ask(pid)), |asked| asked.join().ok());
                Some((pid, answer?))
            })
            .collect::<Vec<_>>()
        }));
    }
    found
}

/// All that can be known of processes of this user, and what went wrong with the others.
pub fn find_all() -> (Vec<ProcessReport>, Vec<ReportError>) {
    find_others(None, FULL, PATIENCE)
}

/// The same of a process, and of all others, for what it lacks.
///
/// # Errors
/// [`ReportError`], if there is nothing of it.
pub fn find_with_others(pid: u32) -> Result<Vec<ProcessReport>, ReportError> {
    let mut reports = vec![find(pid)?];
    reports.extend(find_others(Some(pid), FULL, PATIENCE).0);
    Ok(reports)
}

/// As [`find_all`], but for one process.
pub(super) fn find_others(
    but: Option<u32>,
    more: &str,
    patience: Duration,
) -> (Vec<ProcessReport>, Vec<ReportError>) {
    let mut pids = postmortem::all();
    // Without the list of sockets there are still the records.
    pids.extend(all().unwrap_or_default());
    pids.sort_unstable();
    pids.dedup();
    pids.retain(|pid| Some(*pid) != but);
    let (mut reports, mut errors) = (Vec::new(), Vec::new());
    for (_, one) in at_once(&pids, |pid| find_within(pid, more, patience, but.is_none())) {
        match one {
            Ok(report) => reports.push(report),
            Err(error) => errors.push(error),
        }
    }
    (reports, errors)
}

/// What the flight recorders of this process remember; with a device that is being closed, and so cannot be found any more.
fn remembered(closing: Option<&Inner>) -> ProcessReport {
    let open: Vec<_> = {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.1.iter().filter_map(Weak::upgrade).collect()
    };
    let mut devices: Vec<DeviceReport> = Vec::new();
    for device in open.iter().map(|d| &**d).chain(closing) {
        let id = device.provider.id();
        let record = device.soft.as_ref().and_then(|s| s.hca().record());
        if let Some(record) = record.filter(|_| devices.iter().all(|d| d.id != id)) {
            let mut one = postmortem::remembered(&record);
            (one.id, one.kernels) = (id, device.kernels());
            devices.push(one);
        }
    }
    let rank = open.iter().find_map(|d| d.settings.rank);
    ProcessReport {
        devices,
        ..bare(rank.or(closing.and_then(|d| d.settings.rank)))
    }
}

/// What is remembered of this process, and of those at the other ends of its queue pairs.
pub(crate) fn trace_with_peers(device: &Inner) -> Vec<ProcessReport> {
    let own = remembered(Some(device));
    let pid = own.pid;
    let (others, _) = find_others(Some(pid), TRACE, Duration::from_secs(1));
    linked(own, others)
}

/// What is remembered of a process and of those at the other ends of its queue pairs; `None`: of all.
///
/// # Errors
/// [`ReportError`], if it is one process and there is nothing of it.
pub fn traces(pid: Option<u32>) -> Result<Vec<ProcessReport>, ReportError> {
    let (others, _) = find_others(pid, TRACE, PATIENCE);
    match pid {
        Some(pid) => Ok(linked(find_within(pid, TRACE, PATIENCE, true)?, others)),
        None => Ok(others),
    }
}

/// A report and those of `others` that have a queue pair which names one of its, and is named by it.
fn linked(own: ProcessReport, others: Vec<ProcessReport>) -> Vec<ProcessReport> {
    let ends = |r: &ProcessReport| -> Vec<(u32, Option<u32>)> {
        let qps = r.devices.iter().flat_map(|d| &d.qps);
        qps.map(|q| (q.qpn, q.peer_qpn)).collect()
    };
    let ours = ends(&own);
    let peers: Vec<_> = others
        .into_iter()
        .filter(|other| {
            ends(other)
                .iter()
                .any(|&(qpn, peer)| peer.is_some_and(|peer| ours.contains(&(peer, Some(qpn)))))
        })
        .collect();
    std::iter::once(own).chain(peers).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_release_is_refused_by_both_names() {
        let text = br#"{"schema":"doorbell-report/9","version":"7.1.0","more":[]}"#;
        let error = parse(4, text).unwrap_err().to_string();
        assert!(
            error.contains("doorbell-report/9") && error.contains(SCHEMA),
            "{error}"
        );
        assert!(error.contains("7.1.0"), "{error}");
        for text in [
            &b""[..],
            b"{",
            br#"{"schema":"doorbell-report/1","version":"1"}"#,
        ] {
            assert!(matches!(parse(4, text), Err(ReportError::Nonsense { .. })));
        }
    }

    #[test]
    fn what_is_shown_does_not_command_the_terminal() {
        let mut report =
            serde_json::json!({"a": ["\u{1b}[31mred\n", {"b": "fine é"}], "\u{9b}1mn": 7});
        disarm(&mut report);
        let plain = serde_json::json!(
            {"a": ["\u{fffd}[31mred\n", {"b": "fine é"}], "\u{fffd}1mn": 7}
        );
        assert_eq!(report, plain);
    }

    #[test]
    fn who_says_a_byte_now_and_then_is_not_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let dripping = std::thread::spawn(move || {
            while (&theirs).write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let until = Instant::now() + Duration::from_millis(100);
        let mut text = Vec::new();
        assert!(read_until(&ours, until, &mut text).is_err());
        assert!(!text.is_empty() && Instant::now() >= until);
        drop(ours);
        dripping.join().unwrap();
    }

    #[test]
    fn a_process_that_accepts_nobody_is_given_up_on() {
        // As if it were stopped; more ask than the kernel keeps waiting.
        let pid = u32::MAX;
        let listener = UnixListener::bind_addr(&address(pid).unwrap()).unwrap();
        let patience = Duration::from_millis(20);
        let mut waiting = Vec::new();
        let refused = loop {
            match connect(pid, patience) {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
            assert!(waiting.len() < 100_000, "they are all kept");
        };
        assert!(refused.kind() == io::ErrorKind::WouldBlock, "{refused}");
        drop(listener);
    }

    #[test]
    fn nobody_answers_for_no_process() {
        // Beyond the largest PID that Linux gives.
        let error = ask(1 << 30, true).unwrap_err();
        assert!(matches!(error, ReportError::Gone { .. }), "{error}");
    }
}
