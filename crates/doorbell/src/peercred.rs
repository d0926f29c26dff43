//! Who is at the other end of a Unix socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// As the system recorded it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerCred {
    /// Its process, where this one can see it: not from another PID name space.
    pub(crate) pid: Option<u32>,
    /// Its user.
    pub(crate) uid: u32,
}

impl PeerCred {
    /// rustix has a process number here that is never 0, which is what the system says of a process of another name space: so it is asked itself.
    pub(crate) fn of(socket: impl AsFd) -> io::Result<Self> {
        let mut cred = libc::ucred {
            pid: 0,
            uid: u32::MAX,
            gid: u32::MAX,
        };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `cred` and `len` are valid for the call, and the system writes at most `len` bytes.
        let rc = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut cred).cast(),
                &raw mut len,
            )
        };
        match rc {
            0 => Ok(Self::from_raw(cred)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn from_raw(cred: libc::ucred) -> Self {
        Self {
            pid: u32::try_from(cred.pid).ok().filter(|pid| *pid > 0),
            uid: cred.uid,
        }
    }

    /// Is it this process's user?
    pub(crate) fn is_own(self) -> bool {
        self.uid == rustix::process::geteuid().as_raw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "no such socket option there")]
    fn who_is_there_and_who_cannot_be_seen() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let cred = PeerCred::of(&one).expect("its other end");
        assert_eq!(cred.pid, Some(std::process::id()));
        assert!(cred.is_own());
        for pid in [0, -1] {
            let unseen = libc::ucred {
                pid,
                uid: 7,
                gid: 7,
            };
            let unseen = PeerCred::from_raw(unseen);
            assert_eq!((unseen.pid, unseen.uid), (None, 7));
        }
    }
}
