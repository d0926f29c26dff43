//! A process that a test started: what it says, how it ends, and that it does not outlive the test.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use super::{PATIENCE, doorbell, wait_until};

/// What it says goes to files, so that it never waits for somebody to read it.
pub(crate) struct Running {
    child: Child,
    folder: tempfile::TempDir,
    what: String,
}

impl Running {
    /// Starts `command`, which errors call `what`.
    pub(crate) fn spawn(command: Command, what: &str) -> Self {
        Self::reading(command, what, Stdio::null())
    }

    /// The same of one that reads `input`.
    pub(crate) fn reading(mut command: Command, what: &str, input: Stdio) -> Self {
        let folder = tempfile::tempdir().expect("a folder for its output");
        let file = |name| File::create(folder.path().join(name)).expect("a file for its output");
        // Tests that run in the background of a shell are born with SIGINT ignored, and so would this be.
        // SAFETY: signal(2) may be called between fork and exec, and nothing else is.
        unsafe {
            command.pre_exec(|| match libc::signal(libc::SIGINT, libc::SIG_DFL) {
                libc::SIG_ERR => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let child = command
            .stdin(input)
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn()
            .unwrap_or_else(|e| panic!("starting {what}: {e}"));
        Self {
            child,
            folder,
            what: what.to_owned(),
        }
    }

    /// The command with these arguments.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::spawn(doorbell(args), &format!("doorbell {}", args.join(" ")))
    }

    /// A server on a free port of the loopback interface, and where it listens.
    pub(crate) fn serve(more: &str) -> (Self, String) {
        Self::serve_with(doorbell(&[]), more)
    }

    /// The same of a `command` that has no arguments yet.
    pub(crate) fn serve_with(mut command: Command, more: &str) -> (Self, String) {
        command
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(more.split_whitespace());
        let server = Self::spawn(command, &format!("doorbell serve {more}"));
        server.wait_for("listening on");
        let said = server.out();
        let at = said
            .split_whitespace()
            .find(|w| w.starts_with("127.0.0.1:"))
            .expect("an address");
        let at = at.trim_end_matches(';').to_owned();
        (server, at)
    }

    fn read(&self, name: &str) -> String {
        let bytes = std::fs::read(self.folder.path().join(name)).expect("its output");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Its standard output so far.
    pub(crate) fn out(&self) -> String {
        self.read("out")
    }

    /// Its standard error so far.
    pub(crate) fn err(&self) -> String {
        self.read("err")
    }

    /// Both.
    pub(crate) fn said(&self) -> String {
        self.out() + &self.err()
    }

    pub(crate) fn wait_for(&self, text: &str) {
        let why = format!("{} saying `{text}`", self.what);
        wait_until(&why, || self.said().contains(text));
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal, as in `-STOP`.
    pub(crate) fn signal(&self, signal: &str) {
        super::signal(self.pid(), signal);
    }

    /// Waits for its end, for so long and no longer.
    pub(crate) fn end_within(&mut self, limit: Duration) -> (ExitStatus, String) {
        let until = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().expect("its status") {
                return (status, self.said());
            }
            assert!(
                Instant::now() < until,
                "{} did not end within {limit:?}; it said:\n{}",
                self.what,
                self.said()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its end has to be a good one.
    pub(crate) fn succeed_within(&mut self, limit: Duration) -> String {
        let (status, said) = self.end_within(limit);
        assert!(status.success(), "{}: {status}\n{said}", self.what);
        said
    }

    /// Its end, whatever it is, on however slow a machine.
    pub(crate) fn finish(mut self) -> Output {
        let (status, _) = self.end_within(PATIENCE);
        Output {
            status,
            stdout: self.out().into_bytes(),
            stderr: self.err().into_bytes(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already if all went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
