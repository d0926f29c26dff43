//! What the log said: whoever sends the results back has no terminal to show, so warnings and errors are kept beside the step in which they came.

use std::io;
use std::sync::{Mutex, PoisonError};

/// Lines since the last step.
static KEPT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
/// Bytes that are kept at most: the first say what began it.
const MOST: usize = 16 << 10;

/// Where the log goes as well.
pub(crate) struct Heard;

impl io::Write for Heard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() + bytes.len() <= MOST {
            kept.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What was said since this was asked last.
pub(super) fn take() -> Option<String> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    lines(&String::from_utf8_lossy(&std::mem::take(&mut *kept)))
}

/// The warnings and errors among what a program of ours said.
pub(super) fn lines(said: &str) -> Option<String> {
    let kept: Vec<_> = said
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("WARN ") || line.starts_with("ERROR "))
        .collect();
    (!kept.is_empty()).then(|| kept.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_what_was_said_warnings_and_errors_are_kept() {
        let said = " WARN mock1: port 1 went down\nhost put-bw 8\nERROR it failed\n";
        let kept = "WARN mock1: port 1 went down\nERROR it failed";
        assert_eq!(lines(said).as_deref(), Some(kept));
        assert_eq!(lines("host put-bw 8\n"), None);
    }
}
