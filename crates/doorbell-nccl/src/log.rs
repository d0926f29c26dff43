//! Lines in NCCL's own log, through the function that it passes to `init`.
//!
//! Warnings appear with `NCCL_DEBUG=WARN`, the rest with `NCCL_DEBUG=INFO` (subsystems `INIT` and `NET`). What Doorbell's crates
//! trace goes there too: its warnings, and with `DOORBELL_LOG=info` more than those.

use std::ffi::{CString, c_int, c_ulong};
use std::fmt::{self, Write as _};
use std::sync::{Mutex, Once, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::abi::Logger;

const WARN: c_int = 2;
const INFO: c_int = 3;
/// `NCCL_INIT | NCCL_NET`.
const SUBSYSTEMS: c_ulong = 0x11;

#[derive(Default)]
struct State {
    logger: Logger,
    /// Contexts between `init` and `finalize`: after the last one nobody promises that the function is there.
    users: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    logger: None,
    users: 0,
});

/// A communicator begins, with its log.
pub(crate) fn begin(logger: Logger) {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.users += 1;
    if logger.is_some() {
        state.logger = logger;
    }
    drop(state);
    static BRIDGE: Once = Once::new();
    // A shared object has a tracing of its own, so nobody else's subscriber is in the way.
    BRIDGE.call_once(|| {
        let level = match std::env::var("DOORBELL_LOG").as_deref() {
            Ok("trace") => Level::TRACE,
            Ok("debug") => Level::DEBUG,
            Ok("info") => Level::INFO,
            _ => Level::WARN,
        };
        let _ = tracing::subscriber::set_global_default(Bridge { level });
    });
}

/// A communicator ends.
pub(crate) fn end() {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.users = state.users.saturating_sub(1);
    if state.users == 0 {
        state.logger = None;
    }
}

/// What the user should see.
pub(crate) fn warn(text: impl fmt::Display) {
    write(WARN, &text);
}

/// What explains a run.
pub(crate) fn info(text: impl fmt::Display) {
    write(INFO, &text);
}

fn write(level: c_int, text: &dyn fmt::Display) {
    let line = format!("GIN/Doorbell: {text}").replace('\0', " ");
    let Ok(line) = CString::new(line) else { return };
    // The function is called under the lock: `end` must not return while a line is being written.
    let state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(logger) = state.logger {
        // SAFETY: NCCL's function of this type; constant text for file and format, and the one argument that the format asks for.
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
}

/// Takes what Doorbell's crates trace.
struct Bridge {
    level: Level,
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
        write(level, &text.0);
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
