//! Why a process says nothing about itself: it is gone, stopped, somebody else's, or has no device. And what would be needed.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

pub use doorbell_hca::record::dir::is_stopped;

use super::{SCHEMA, postmortem};

/// Why a process gave no report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// There is no such process.
    #[error(
        "there is no process {pid} here: it has ended, or it is in another PID namespace (run this in its container)"
    )]
    Gone {
        /// The process.
        pid: u32,
    },
    /// It has no device, or does not listen.
    #[error(
        "process {pid} ({name}) answers no questions: it has no open Doorbell device, runs with DOORBELL_REPORT=off, or is in another network namespace (nsenter -n -t {pid})"
    )]
    Nobody {
        /// The process.
        pid: u32,
        /// The name of its program.
        name: String,
    },
    /// It is another user's.
    #[error(
        "process {pid} belongs to {owner}, and answers to that user and to root alone: run this as one of them (sudo)"
    )]
    Foreign {
        /// The process.
        pid: u32,
        /// Its user, by number and name.
        owner: String,
    },
    /// It is stopped.
    #[error(
        "process {pid} is stopped, by SIGSTOP or a debugger, and answers when it goes on (kill -CONT {pid}); `doorbell dump {pid}` reads its flight record"
    )]
    Stopped {
        /// The process.
        pid: u32,
    },
    /// It runs, and is too busy, or hangs.
    #[error(
        "process {pid} did not answer within {waited:.1?}: it hangs, or this machine has no time for it; `doorbell dump {pid}` reads its flight record"
    )]
    Silent {
        /// The process.
        pid: u32,
        /// How long it was waited for.
        waited: Duration,
    },
    /// It says nothing, and has left nothing.
    #[error(
        "{why}; nor has it left a flight record (of processes that ended badly those of the last {} are kept)",
        postmortem::RECORDS
    )]
    Nothing {
        /// The process.
        pid: u32,
        /// Why it says nothing.
        why: String,
    },
    /// Somebody else has its name.
    #[error(
        "what answers for process {pid} belongs to process {other_pid} of {owner}: nothing of what it says is believed"
    )]
    Stranger {
        /// The process.
        pid: u32,
        /// Who answered.
        other_pid: u32,
        /// Of which user.
        owner: String,
    },
    /// Another release.
    #[error(
        "process {pid} speaks {theirs} and this command {SCHEMA}: use the command of its release, {version}"
    )]
    Version {
        /// The process.
        pid: u32,
        /// Its schema.
        theirs: String,
        /// Its release.
        version: String,
    },
    /// It answered nonsense.
    #[error("process {pid} answered what is no report: {reason}")]
    Nonsense {
        /// The process.
        pid: u32,
        /// What is wrong.
        reason: String,
    },
    /// The system refused, or it ended meanwhile.
    #[error("asking process {pid}: {source}")]
    Os {
        /// The process.
        pid: u32,
        /// What the system said.
        source: io::Error,
    },
}

impl ReportError {
    /// Nobody listens for that process: why?
    pub(super) fn absent(pid: u32) -> Self {
        match owner(pid) {
            None => Self::Gone { pid },
            Some(uid) if is_foreign(uid) => Self::foreign(pid, uid),
            Some(_) => Self::Nobody {
                pid,
                name: name(pid),
            },
        }
    }

    pub(super) fn foreign(pid: u32, uid: u32) -> Self {
        let owner = user(uid);
        Self::Foreign { pid, owner }
    }

    /// Asking it failed after so long.
    pub(super) fn unheard(pid: u32, waited: Duration, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => match is_stopped(pid) {
                true => Self::Stopped { pid },
                false => Self::Silent { pid, waited },
            },
            _ => Self::Os { pid, source },
        }
    }

    /// And there is no record of it.
    pub(super) fn without_record(self) -> Self {
        match self {
            Self::Gone { pid } | Self::Nobody { pid, .. } => Self::Nothing {
                pid,
                why: self.to_string(),
            },
            other => other,
        }
    }

    /// Another user's process is no business of who asks about all of theirs.
    pub fn is_foreign(&self) -> bool {
        matches!(self, Self::Foreign { .. })
    }
}

/// May this process not ask one of that user?
pub(super) fn is_foreign(uid: u32) -> bool {
    let own = rustix::process::geteuid();
    uid != own.as_raw() && !own.is_root()
}

/// Whose it is; `None`: there is no such process, or it may not be seen.
pub(super) fn owner(pid: u32) -> Option<u32> {
    Some(std::fs::metadata(format!("/proc/{pid}")).ok()?.uid())
}

/// `user 1000 (alice)`.
pub(super) fn user(uid: u32) -> String {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let number = uid.to_string();
    let named = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == number).then(|| name.to_owned())
    });
    match named {
        Some(name) => format!("user {uid} ({})", name.escape_debug()),
        None => format!("user {uid}"),
    }
}

fn name(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_told_apart() {
        let own = std::process::id();
        let nobody = ReportError::absent(own);
        assert!(matches!(nobody, ReportError::Nobody { .. }), "{nobody}");
        // Beyond the largest PID that Linux gives.
        let gone = ReportError::absent(1 << 30);
        assert!(matches!(gone, ReportError::Gone { .. }), "{gone}");
        let late = || io::Error::from(io::ErrorKind::WouldBlock);
        let busy = ReportError::unheard(own, Duration::from_secs(1), late());
        assert!(busy.to_string().contains("within 1.0s"), "{busy}");
        let ended = ReportError::unheard(own, Duration::ZERO, io::Error::other("ended"));
        assert!(matches!(ended, ReportError::Os { .. }), "{ended}");
    }

    #[test]
    fn another_users_process_is_named_with_its_owner_and_what_is_needed() {
        let text = ReportError::foreign(7, 0).to_string();
        assert!(
            text.contains("process 7 belongs to user 0 (root)"),
            "{text}"
        );
        assert!(text.contains("sudo"), "{text}");
        assert_eq!(user(u32::MAX - 7), format!("user {}", u32::MAX - 7));
        assert_eq!(
            owner(std::process::id()),
            Some(rustix::process::geteuid().as_raw())
        );
    }

    #[test]
    fn a_stopped_process_is_seen_to_be() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = child.id();
        assert!(!is_stopped(pid));
        let id = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(id, rustix::process::Signal::STOP).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(10);
        while !is_stopped(pid) && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let late = io::Error::from(io::ErrorKind::TimedOut);
        let error = ReportError::unheard(pid, Duration::from_secs(1), late).to_string();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(error.contains(&format!("kill -CONT {pid}")), "{error}");
    }
}
