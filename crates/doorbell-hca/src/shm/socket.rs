//! The Unix socket of a session: `SOCK_SEQPACKET`, descriptors by `SCM_RIGHTS`, credentials by `SO_PEERCRED`.
//!
//! Sockets here never block; whoever waits polls with a deadline. Whatever descriptors arrive are owned
//! at once, so that none leaks when the message they came with is refused.

use std::{
    fmt, fs, io,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::PermissionsExt},
    },
    path::{Path, PathBuf},
    str::FromStr,
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
    },
    process::{Pid, PidfdFlags, pidfd_open},
};

use super::{
    error::{Refusal, RefusalCode, Result, ShmError},
    proto::{MAX_FDS, MAX_MESSAGE},
};

/// Where a listener is found.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ShmAddress {
    /// A name in the abstract namespace (of the network namespace; no file, gone with its socket).
    Abstract(Vec<u8>),
    /// A path in the file system; the socket is made with mode 0600.
    Path(PathBuf),
}

impl FromStr for ShmAddress {
    type Err = ShmError;

    /// `@name` is abstract, anything else a path.
    fn from_str(s: &str) -> Result<Self> {
        let address = match s.strip_prefix('@') {
            Some(name) => Self::Abstract(name.as_bytes().to_vec()),
            None => Self::Path(PathBuf::from(s)),
        };
        address.unix()?;
        Ok(address)
    }
}

impl fmt::Display for ShmAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Abstract(name) => write!(f, "@{}", name.escape_ascii()),
            Self::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

impl ShmAddress {
    fn unix(&self) -> Result<SocketAddrUnix> {
        let bad = |why| ShmError::Address(self.to_string(), why);
        match self {
            Self::Abstract(name) if name.is_empty() => {
                Err(bad("an abstract name has at least one byte"))
            }
            Self::Path(path) if path.as_os_str().is_empty() => {
                Err(bad("a path has at least one byte"))
            }
            Self::Abstract(name) => {
                SocketAddrUnix::new_abstract_name(name).map_err(|_| bad("at most 107 bytes fit"))
            }
            Self::Path(path) => SocketAddrUnix::new(path.as_os_str().as_bytes())
                .map_err(|_| bad("at most 107 bytes without NUL fit")),
        }
    }
}

fn seqpacket() -> io::Result<OwnedFd> {
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?)
}

/// A listening socket; a path is removed when it is dropped.
pub(crate) struct Listener {
    fd: OwnedFd,
    path: Option<PathBuf>,
}

impl Listener {
    pub(crate) fn bind(address: &ShmAddress) -> Result<Self> {
        let os = |what, e: io::Error| ShmError::os(what, address.to_string(), e);
        let unix = address.unix()?;
        let fd = seqpacket().map_err(|e| os("socket", e))?;
        let mut bound = bind(&fd, &unix);
        if let (Err(Errno::ADDRINUSE), ShmAddress::Path(path)) = (bound, address)
            && is_stale(path, &unix)
        {
            fs::remove_file(path).map_err(|e| os("unlink of a stale socket", e))?;
            bound = bind(&fd, &unix);
        }
        match bound {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => {
                return Err(ShmError::InUse {
                    what: "socket address",
                    value: address.to_string(),
                    remedy: "choose another or end the process that listens there",
                });
            }
            Err(e) => return Err(os("bind", e.into())),
        }
        let path = if let ShmAddress::Path(path) = address {
            // Nobody can connect before listen(), so there is no moment with wider rights.
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))
                .map_err(|e| os("chmod", e))?;
            Some(path.clone())
        } else {
            None
        };
        listen(&fd, 64).map_err(|e| os("listen", e.into()))?;
        Ok(Self { fd, path })
    }

    /// The next connection, if one waits.
    pub(crate) fn accept(&self) -> io::Result<Option<Socket>> {
        match accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(fd) => Ok(Some(Socket { fd })),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// A socket file is stale when nobody listens on it any more.
fn is_stale(path: &Path, unix: &SocketAddrUnix) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    is_socket && seqpacket().is_ok_and(|probe| connect(&probe, unix) == Err(Errno::CONNREFUSED))
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

/// What came in.
pub(crate) enum Received {
    /// A datagram and its descriptors.
    Message(Vec<u8>, Vec<OwnedFd>),
    /// Nothing waits.
    Nothing,
    /// The peer closed or died.
    End,
}

/// Who is at the other end, as the kernel recorded it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process; 0 when it is not visible from this PID namespace.
    pub pid: i32,
    /// User.
    pub uid: u32,
}

impl Credentials {
    /// Those of the other end of a Unix socket.
    ///
    /// # Errors
    /// What the system says; of a connected socket nothing.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        // rustix turns a process of another PID namespace (pid 0) into an error or a niche; ask the kernel.
        let mut cred = libc::ucred {
            pid: 0,
            uid: u32::MAX,
            gid: u32::MAX,
        };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `cred` and `len` are valid for the call, and the kernel writes at most `len` bytes.
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
            0 => Ok(Self {
                pid: cred.pid,
                uid: cred.uid,
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The process, if it is visible.
    pub fn process(&self) -> Option<u32> {
        u32::try_from(self.pid).ok().filter(|pid| *pid > 0)
    }

    /// Is it this process's user?
    pub fn is_own(&self) -> bool {
        self.uid == rustix::process::geteuid().as_raw()
    }

    /// A descriptor that becomes readable when the process exits, if the kernel gives one. A forked child of it may hold the socket open beyond
    /// its death, so end-of-file alone is not enough.
    pub fn pidfd(&self) -> Option<OwnedFd> {
        // Taken while the socket is connected. The peer could have died and its number been reused in between;
        // then the socket is at its end (or a child holds it, a case this cannot tell).
        let pid = Pid::from_raw(self.process()?.cast_signed())?;
        pidfd_open(pid, PidfdFlags::empty()).ok()
    }
}

/// One end of a session.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
}

impl Socket {
    /// Connects. Unix sockets connect at once or not at all; a full backlog says `WouldBlock`.
    pub(crate) fn connect(address: &ShmAddress) -> Result<Self> {
        let unix = address.unix()?;
        let fd = seqpacket().map_err(|e| ShmError::os("socket", address.to_string(), e))?;
        connect(&fd, &unix).map_err(|e| ShmError::os("connect", address.to_string(), e))?;
        Ok(Self { fd })
    }

    pub(crate) fn credentials(&self) -> io::Result<Credentials> {
        Credentials::of(&self.fd)
    }

    /// Sends one message. `Ok(false)`: the socket is full, try again when it is writable.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "too many descriptors for one message",
            ));
        }
        match sendmsg(
            &self.fd,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        ) {
            Ok(n) if n == bytes.len() => Ok(true),
            Ok(n) => Err(io::Error::other(format!(
                "sent {n} of {} bytes",
                bytes.len()
            ))),
            // ETOOMANYREFS: the peer has not yet taken descriptors that were sent earlier.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR | Errno::TOOMANYREFS) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes one message.
    ///
    /// # Errors
    /// A refusal when bytes or descriptors were cut off, or the socket fails.
    pub(crate) fn receive(&self) -> Result<Received, Refusal> {
        // One byte and one descriptor more than allowed, so that too much is seen and not cut silently.
        let mut bytes = [0u8; MAX_MESSAGE + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut read = || {
            recvmsg(
                &self.fd,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                flags,
            )
        };
        let mut got = read();
        if let Err(Errno::CONNRESET) = got {
            // The peer closed with our messages unread. The kernel says so once, ahead of what the peer had sent: its
            // reason may still be in the queue.
            got = read();
        }
        let message = match got {
            Ok(message) => message,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::End),
            Err(e) => return Err(Refusal::new(RefusalCode::Busy, format!("recvmsg: {e}"))),
        };
        let mut fds = Vec::new();
        for m in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = m {
                fds.extend(received);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Refusal::new(
                RefusalCode::Descriptors,
                format!(
                    "descriptors were cut off: too many, or no room: {}",
                    crate::limits::FILES
                ),
            ));
        }
        if message.flags.contains(ReturnFlags::TRUNC) || message.bytes > MAX_MESSAGE {
            return Err(Refusal::new(
                RefusalCode::Garbage,
                format!("message longer than {MAX_MESSAGE} bytes"),
            ));
        }
        // An empty datagram and the end look alike; no message of ours is empty.
        if message.bytes == 0 && fds.is_empty() {
            return Ok(Received::End);
        }
        Ok(Received::Message(bytes[..message.bytes].to_vec(), fds))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "no such socket option there")]
    fn who_is_there_and_who_cannot_be_seen() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let cred = Credentials::of(&one).expect("its other end");
        assert_eq!(cred.process(), Some(std::process::id()));
        assert!(cred.is_own());
        for pid in [0, -1] {
            let unseen = Credentials { pid, uid: 7 };
            assert_eq!((unseen.process(), unseen.uid), (None, 7));
        }
    }
}
