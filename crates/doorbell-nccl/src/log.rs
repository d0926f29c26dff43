//! Lines in NCCL's own log, through the function that it passes to `init`.
//!
//! Warnings appear with `NCCL_DEBUG=WARN`, the rest with `NCCL_DEBUG=INFO` (subsystems `INIT` and `NET`). What Doorbell's crates
//! trace goes there too: its warnings, and with `DOORBELL_LOG=info` more than those.
//!
//! That function may keep its caller as long as a terminal is paused or a disk is slow. NCCL's threads wait there as they do for NCCL's own lines;
//! engines and watches must not stand still, so theirs go through a queue that a thread empties, and are left out, and counted, where it is full.

use std::collections::VecDeque;
use std::ffi::{CString, c_int, c_ulong};
use std::fmt::{self, Write as _};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::Result;
use crate::abi::Logger;

const WARN: c_int = 2;
const INFO: c_int = 3;
/// `NCCL_INIT | NCCL_NET`.
const SUBSYSTEMS: c_ulong = 0x11;

/// Lines that wait, at most.
const MOST: usize = 1024;
/// How long somebody waits for the queue: long enough for a log that works, so that lines keep their order and are there when a process ends
/// by what they say.
const PATIENCE: Duration = Duration::from_millis(200);
/// Likewise the last communicator.
const LAST: Duration = Duration::from_secs(5);

struct State {
    logger: Logger,
    /// Contexts between `init` and `finalize`: after the last one nobody promises that the function is there.
    users: usize,
    lines: VecDeque<(c_int, CString)>,
    /// Lines that were queued, and those of them that were written: each counts up to `queued`.
    queued: u64,
    written: u64,
    /// Lines that found no room, since the last one that says so.
    left_out: u64,
    /// A thread empties the queue.
    emptied: bool,
    /// The log keeps a line longer than anybody waits: nobody else does until it goes on.
    late: bool,
}

static STATE: Mutex<State> = Mutex::new(State::NEW);
/// Something was queued or written, or the last communicator has ended.
static CHANGED: Condvar = Condvar::new();

impl State {
    const NEW: Self = Self {
        logger: None,
        users: 0,
        lines: VecDeque::new(),
        queued: 0,
        written: 0,
        left_out: 0,
        emptied: false,
        late: false,
    };

    fn push(&mut self, level: c_int, line: CString) {
        if self.lines.len() >= MOST {
            self.left_out += 1;
            return;
        }
        self.lines.push_back((level, line));
        self.queued += 1;
    }

    /// The next line; whoever made room says behind all others what was left out there.
    fn pop(&mut self) -> Option<(c_int, CString)> {
        let next = self.lines.pop_front()?;
        if self.left_out > 0 {
            let count = std::mem::take(&mut self.left_out);
            let text =
                format_args!("{count} line(s) are missing here: the log took none for so long");
            self.push(WARN, c_line(&text));
        }
        Some(next)
    }
}

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until what is queued by now is written, and not for ever.
fn settle(state: MutexGuard<'static, State>, time: Duration) -> MutexGuard<'static, State> {
    let all = state.queued;
    let waits = |s: &mut State| s.written < all && !s.late;
    let (mut state, waited) = CHANGED
        .wait_timeout_while(state, time, waits)
        .unwrap_or_else(PoisonError::into_inner);
    state.late |= waited.timed_out();
    state
}

/// A communicator begins, with its log.
pub(crate) fn begin(logger: Logger) -> Result<()> {
    let mut state = lock();
    if !state.emptied {
        let thread = std::thread::Builder::new().name("doorbell-log".to_owned());
        if let Err(source) = thread.spawn(empty) {
            let error = doorbell::Error::Os {
                what: "starting the thread that writes to NCCL's log",
                source: doorbell::limits::thread(source),
            };
            drop(state);
            // By itself, since there is nobody who would write it.
            call(logger, WARN, &c_line(&error));
            return Err(error.into());
        }
        state.emptied = true;
    }
    state.users += 1;
    if logger.is_some() {
        state.logger = logger;
    }
    drop(state);
    static BRIDGE: Once = Once::new();
    // A shared object has a tracing of its own, so nobody else's subscriber is in the way.
    BRIDGE.call_once(|| {
        let asked = crate::settings::variable("DOORBELL_LOG").unwrap_or_default();
        let level = level(&asked);
        let _ = tracing::subscriber::set_global_default(Bridge {
            level: level.unwrap_or(LevelFilter::WARN),
        });
        if level.is_none() {
            tracing::warn!(
                "DOORBELL_LOG={asked}: give off, error, warn, info, debug or trace; it is taken as warn"
            );
        }
    });
    Ok(())
}

/// What `DOORBELL_LOG` asks for here, where crates are not told apart.
fn level(text: &str) -> Option<LevelFilter> {
    match text.trim() {
        "" => Some(LevelFilter::WARN),
        // A number would be a level, too.
        text if text.bytes().all(|b| b.is_ascii_alphabetic()) => text.parse().ok(),
        _ => None,
    }
}

/// A communicator ends.
pub(crate) fn end() {
    let mut state = lock();
    state.users = state.users.saturating_sub(1);
    if state.users == 0 {
        state.late = false;
        state = settle(state, LAST);
        // Another may have begun meanwhile.
        if state.users == 0 {
            state.logger = None;
            CHANGED.notify_all();
        }
    }
}

/// The thread that empties the queue, as long as there are communicators, and then until the last of them waits no longer.
fn empty() {
    let mut state = lock();
    while state.users > 0 || state.logger.is_some() {
        let Some((level, line)) = state.pop() else {
            state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let logger = state.logger;
        drop(state);
        call(logger, level, &line);
        state = lock();
        state.written += 1;
        state.late = false;
        CHANGED.notify_all();
    }
    state.lines.clear();
    state.written = state.queued;
    state.emptied = false;
}

/// What the user should see, said on a thread of NCCL's.
pub(crate) fn warn(text: impl fmt::Display) {
    write(WARN, &text);
}

/// What explains a run, said on a thread of NCCL's.
pub(crate) fn info(text: impl fmt::Display) {
    write(INFO, &text);
}

/// A warning of a thread that must go on: it is in the log when this returns if the log takes it soon.
pub(crate) fn warn_apart(text: impl fmt::Display) {
    drop(settle(queue(WARN, &text), PATIENCE));
}

/// The same, and nobody waits for it.
pub(crate) fn warn_later(text: impl fmt::Display) {
    drop(queue(WARN, &text));
}

fn queue(level: c_int, text: &dyn fmt::Display) -> MutexGuard<'static, State> {
    let line = c_line(text);
    let mut state = lock();
    if state.logger.is_some() {
        state.push(level, line);
        CHANGED.notify_all();
    }
    state
}

fn write(level: c_int, text: &dyn fmt::Display) {
    let line = c_line(text);
    // Behind what others had to say before. Not under the lock, for which engines would wait.
    let logger = settle(lock(), PATIENCE).logger;
    call(logger, level, &line);
}

fn c_line(text: &dyn fmt::Display) -> CString {
    let line = format!("GIN/Doorbell: {text}").replace('\0', " ");
    CString::new(line).expect("zeros are replaced")
}

fn call(logger: Logger, level: c_int, line: &CString) {
    let Some(logger) = logger else { return };
    // SAFETY: NCCL's function of this type, which is there while a communicator is; constant text for file and format, and the one argument that
    // the format asks for.
    unsafe {
        logger(
            level,
            SUBSYSTEMS,
            c"doorbell".as_ptr(),
            0,
            c"%s".as_ptr(),
            line.as_ptr(),
        );
    }
}

/// Takes what Doorbell's crates trace.
struct Bridge {
    level: LevelFilter,
}

impl Subscriber for Bridge {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let level = match *event.metadata().level() {
            Level::ERROR | Level::WARN => WARN,
            _ => INFO,
        };
        // Mostly an engine's.
        drop(queue(level, &text.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, c_char};

    use super::*;

    #[test]
    fn a_level_that_is_none_is_told() {
        for (text, means) in [
            ("", Some(LevelFilter::WARN)),
            (" debug ", Some(LevelFilter::DEBUG)),
            ("off", Some(LevelFilter::OFF)),
            ("loud", None),
            ("3", None),
            ("doorbell_hca=debug", None),
            ("\u{fffd}", None),
        ] {
            assert_eq!(level(text), means, "{text}");
        }
    }

    fn text(line: Option<(c_int, CString)>) -> String {
        let (_, line) = line.expect("a line");
        line.into_string().expect("text")
    }

    #[test]
    fn failures_are_not_told_at_the_logs_pace_and_the_last_communicator_leaves_when_all_lines_are_written()
     {
        static WRITTEN: Mutex<Vec<String>> = Mutex::new(Vec::new());
        unsafe extern "C" fn slow(
            _: c_int,
            _: c_ulong,
            _: *const c_char,
            _: c_int,
            _: *const c_char,
            text: *const c_char,
        ) {
            std::thread::sleep(Duration::from_millis(30));
            // SAFETY: a line of `call`.
            let line = unsafe { CStr::from_ptr(text) };
            let mut written = WRITTEN.lock().expect("the log");
            written.push(line.to_string_lossy().into_owned());
        }
        type Plain = unsafe extern "C" fn(
            c_int,
            c_ulong,
            *const c_char,
            c_int,
            *const c_char,
            *const c_char,
        );
        // SAFETY: where there are GPUs, a call with one variable argument arrives as one with six arguments, and `call` passes exactly one.
        let logger = unsafe { std::mem::transmute::<Plain, Logger>(slow) };
        begin(logger).expect("a thread");
        let written = || WRITTEN.lock().expect("the log").clone();
        let health = crate::health::Health::new("rank 0 of 2".to_owned());
        for i in 0..20 {
            health.report(i);
        }
        // The first line is waited for, and not each: then all would be there.
        assert!(written().len() < 20, "{:?}", written());
        assert_eq!(health.failure(), Some("0"));
        end();
        let line = |i| format!("GIN/Doorbell: rank 0 of 2: {i}");
        assert_eq!(written(), (0..20).map(line).collect::<Vec<_>>());
    }

    #[test]
    fn a_full_queue_says_what_it_left_out_and_where() {
        let mut state = State::NEW;
        for i in 0..MOST + 7 {
            state.push(INFO, c_line(&i));
        }
        assert_eq!(state.lines.len(), MOST);
        assert_eq!(text(state.pop()), "GIN/Doorbell: 0");
        // Room for one, which says it; the next finds none again.
        state.push(INFO, c_line(&"after"));
        for i in 1..MOST {
            assert_eq!(text(state.pop()), format!("GIN/Doorbell: {i}"));
        }
        let note = text(state.pop());
        assert!(note.contains("7 line(s) are missing"), "{note}");
        let note = text(state.pop());
        assert!(note.contains("1 line(s) are missing"), "{note}");
        assert!(state.pop().is_none());
        assert_eq!(state.queued, MOST as u64 + 2);
    }
}
