//! Errors on their way to C: a status, and one line of text kept per thread.
//!
//! Every entry runs under [`guard`]: a panic becomes `DOORBELL_ERR_INTERNAL` instead of crossing into C, and the text
//! of the last failure stays readable until the next failing call of the same thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::status::{ALL, Status};

/// A failure of one call.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(status: Status, text: impl Display) -> Self {
        Self {
            status,
            text: text.to_string(),
        }
    }

    /// An argument that cannot be right: its name, its value, what to do.
    pub(crate) fn invalid(argument: &str, value: impl Display, remedy: &str) -> Self {
        Self::new(
            Status::Invalid,
            format_args!("{argument} is {value}: {remedy}"),
        )
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

thread_local! {
    static LAST: RefCell<Option<(Status, CString)>> = const { RefCell::new(None) };
}

/// Runs the body of one entry point. Nothing unwinds out of it, and a failure is remembered for the calling thread.
pub(crate) fn guard(entry: &str, body: impl FnOnce() -> Result<()>) -> i32 {
    // A body that panicked has left its objects in the hands of locks that recover (see `handle`).
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        Err(Failure::new(
            Status::Internal,
            format_args!("panicked: {}", message(&*panic)),
        ))
    });
    match outcome {
        Ok(()) => Status::Ok as i32,
        Err(failure) => {
            let text: String = format!("{entry}: {}", failure.text)
                .chars()
                .filter(|c| *c != '\0')
                .collect();
            let text = CString::new(text).unwrap_or_default();
            // Not reachable while the thread's storage is being torn down; then the status alone has to do.
            let _ = LAST.try_with(|last| last.replace(Some((failure.status, text))));
            failure.status as i32
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("with no message")
}

/// The text of the last call of this thread that failed; "no error" before the first. Never NULL.
///
/// The pointer is valid until the next call of this thread that fails, or the thread's end.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_last_error() -> *const c_char {
    LAST.try_with(|last| match &*last.borrow() {
        Some((_, text)) => text.as_ptr(),
        None => c"no error".as_ptr(),
    })
    .unwrap_or(c"the thread is ending".as_ptr())
}

/// The status of the last call of this thread that failed; `DOORBELL_OK` before the first.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_last_status() -> i32 {
    LAST.try_with(|last| {
        last.borrow()
            .as_ref()
            .map_or(Status::Ok, |(status, _)| *status)
    })
    .unwrap_or(Status::Ok) as i32
}

/// What a status means, in a few words. Never NULL, valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_status_text(status: i32) -> *const c_char {
    // The texts of `ALL` are Rust strings; these are theirs with a terminator, made once.
    static TEXTS: std::sync::OnceLock<Vec<(i32, CString)>> = std::sync::OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        ALL.iter()
            .map(|(s, name, text)| {
                (
                    *s as i32,
                    CString::new(format!("{name}: {text}")).unwrap_or_default(),
                )
            })
            .collect()
    });
    let unknown: &CStr = c"not a status of this library";
    texts
        .iter()
        .find(|(s, _)| *s == status)
        .map_or(unknown, |(_, text)| text)
        .as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: `doorbell_last_error` gives a terminated string that lives until this thread's next failure.
        unsafe { CStr::from_ptr(doorbell_last_error()) }
            .to_string_lossy()
            .into_owned()
    }

    #[test]
    fn a_failure_is_kept_for_its_thread_only() {
        assert_eq!(last(), "no error");
        assert_eq!(guard("f", || Ok(())), 0);
        let status = guard("doorbell_x", || {
            Err(Failure::invalid("depth", 7, "give a power of two"))
        });
        assert_eq!(status, Status::Invalid as i32);
        assert_eq!(last(), "doorbell_x: depth is 7: give a power of two");
        assert_eq!(doorbell_last_status(), Status::Invalid as i32);
        std::thread::spawn(|| assert_eq!(last(), "no error"))
            .join()
            .expect("the thread ends well");
        // A call that works does not take the text away.
        assert_eq!(guard("f", || Ok(())), 0);
        assert!(last().contains("power of two"));
    }

    #[test]
    fn a_panic_does_not_leave() {
        let status = guard("doorbell_x", || panic!("index {} of 3", 5));
        assert_eq!(status, Status::Internal as i32);
        assert_eq!(last(), "doorbell_x: panicked: index 5 of 3");
    }

    #[test]
    fn every_status_has_a_text() {
        for (status, name, _) in ALL {
            // SAFETY: the texts are static.
            let text = unsafe { CStr::from_ptr(doorbell_status_text(*status as i32)) };
            assert!(text.to_string_lossy().starts_with(name));
            assert_eq!(Status::from_raw(*status as i32), Some(*status));
        }
        // SAFETY: as above.
        let unknown = unsafe { CStr::from_ptr(doorbell_status_text(-999)) };
        assert!(unknown.to_string_lossy().contains("not a status"));
    }
}
