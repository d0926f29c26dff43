//! What the system's refusals of threads, files and memory mean: which limit it was, and how more is asked for. One place, so that every error has the
//! same words.

use std::io;

use rustix::io::Errno;

/// Threads and processes.
const THREADS: &str = "there may be no more threads and processes: `ulimit -u` (of all of this user's) and pids.max of the cgroup say how many; raise them, or end some";
/// Files of a process: what a process may do that has no room for more.
pub const FILES: &str = "`ulimit -n` says how many files a process may have open: `ulimit -n 65536`, or as much as `ulimit -Hn` allows";
/// Files of the system.
const ALL_FILES: &str = "the system has no more: `sysctl fs.file-max` says how many";
/// Memory.
const MEMORY: &str = "`ulimit -v` and memory.max of the cgroup say how much memory there may be; raise them, or free some";

/// Is it a limit of files or memory that was met?
pub fn is_one(error: &io::Error) -> bool {
    remedy(error).is_some() || error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error())
}

/// The same error, with the limit it comes from and the remedy, where it is one of files or memory.
pub fn told(error: io::Error) -> io::Error {
    match remedy(&error) {
        Some(remedy) => with(error, remedy),
        None => error,
    }
}

fn remedy(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error().map(Errno::from_raw_os_error)? {
        Errno::MFILE => Some(FILES),
        Errno::NFILE => Some(ALL_FILES),
        Errno::NOMEM => Some(MEMORY),
        _ => None,
    }
}

/// The same of a thread or a process that could not be started, of which `EAGAIN` says that there are too many.
pub fn thread(error: io::Error) -> io::Error {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::AGAIN) => with(error, THREADS),
        _ => told(error),
    }
}

fn with(error: io::Error, remedy: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{error}: {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_has_its_remedy_and_keeps_its_kind() {
        for (errno, part) in [
            (Errno::AGAIN, "ulimit -u"),
            (Errno::AGAIN, "pids.max"),
            (Errno::MFILE, "ulimit -n"),
            (Errno::NFILE, "fs.file-max"),
            (Errno::NOMEM, "ulimit -v"),
        ] {
            let plain = io::Error::from(errno);
            let (kind, words) = (plain.kind(), plain.to_string());
            let told = thread(plain);
            assert_eq!(told.kind(), kind);
            let text = told.to_string();
            assert!(text.starts_with(&words) && text.contains(part), "{text}");
        }
        assert!(is_one(&Errno::MFILE.into()) && !is_one(&Errno::ADDRNOTAVAIL.into()));
        let other = thread(Errno::PERM.into());
        assert_eq!(other.raw_os_error(), Some(Errno::PERM.raw_os_error()));
        // Who asks for something else is to try again.
        let other = told(Errno::AGAIN.into());
        assert_eq!(other.raw_os_error(), Some(Errno::AGAIN.raw_os_error()));
        // Once said is enough.
        let twice = told(told(Errno::MFILE.into())).to_string();
        assert_eq!(twice.matches("ulimit -n 65536").count(), 1, "{twice}");
    }
}
