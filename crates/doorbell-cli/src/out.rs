//! Standard output, with one policy for readers that go away: `doorbell … | head -1`.
//!
//! What a status says does not depend on who reads: from the moment that nobody does, what would be printed is dropped, and the command ends as it
//! would have. One that would print for ever asks [`reader_is_gone`], and ends well.

use std::io::{self, IsTerminal as _, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static GONE: AtomicBool = AtomicBool::new(false);

/// Has whoever read closed it?
pub(crate) fn reader_is_gone() -> bool {
    GONE.load(Ordering::Relaxed)
}

/// Standard output.
pub(crate) fn out() -> Out {
    Out(io::stdout())
}

/// See [`out`].
pub(crate) struct Out(io::Stdout);

/// `all` stands for what was written if nobody reads.
fn unless_gone<R>(result: io::Result<R>, all: R) -> io::Result<R> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {
            GONE.store(true, Ordering::Relaxed);
            Ok(all)
        }
        other => other,
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if reader_is_gone() {
            return Ok(bytes.len());
        }
        unless_gone(self.0.write(bytes), bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        match reader_is_gone() {
            true => Ok(()),
            false => unless_gone(self.0.flush(), ()),
        }
    }
}

/// Text that is complete, or a part of it, at once.
pub(crate) fn say(text: &str) -> anyhow::Result<()> {
    use anyhow::Context as _;
    let mut out = out();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("writing to standard output")
}

/// Columns that text is wrapped at: of the terminal, 40 to 80 of them; 80 where there is none. Tables stay as wide as they are.
pub(crate) fn columns() -> usize {
    const ALL: usize = 80;
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return ALL;
    }
    match rustix::termios::tcgetwinsize(&stdout) {
        Ok(size) if size.ws_col > 0 => usize::from(size.ws_col).clamp(40, ALL),
        _ => ALL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reader_that_is_gone_is_no_error() {
        let error = |kind| Err::<usize, _>(io::Error::from(kind));
        assert!(unless_gone(error(io::ErrorKind::StorageFull), 7).is_err());
        assert!(!reader_is_gone());
        assert_eq!(unless_gone(error(io::ErrorKind::BrokenPipe), 7).unwrap(), 7);
        assert!(reader_is_gone());
        GONE.store(false, Ordering::Relaxed);
    }
}
