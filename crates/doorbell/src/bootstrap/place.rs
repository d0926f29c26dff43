//! Where ranks meet: listening at a place, and dialling one.
//!
//! Names in a directory of all users, and in the abstract name space, can be taken by others. So both sides ask the kernel who is at the other end, nothing but a
//! socket is ever removed, and no call waits for a queue that somebody else keeps full.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use doorbell_hca::shm::Credentials;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Rendezvous;
use super::frame::{Stream, timed_out};
use crate::connect::look_up;

/// Processes of other users that are refused in one look at who is knocking: they keep nobody out, and the look ends.
const STRANGERS: usize = 256;

/// A place where rank 0 listens.
pub(super) enum Listener {
    Unix(UnixPlace),
    Tcp(TcpListener),
}

/// Its file, if it has one, goes with it.
pub(super) struct UnixPlace {
    socket: UnixListener,
    file: Option<PathBuf>,
    /// A process of another user was told of.
    warned: AtomicBool,
}

impl Listener {
    pub(super) fn open(at: &Rendezvous) -> io::Result<Self> {
        match at {
            Rendezvous::Unix(path) => UnixPlace::open(path).map(Self::Unix),
            Rendezvous::Tcp(addr) => {
                let listener = TcpListener::bind(addr)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener))
            }
        }
    }

    /// Where it listens, with the port that the system chose for port 0.
    pub(super) fn address(&self, asked: &Rendezvous) -> io::Result<Rendezvous> {
        match self {
            Self::Unix(_) => Ok(asked.clone()),
            Self::Tcp(l) => Ok(Rendezvous::Tcp(l.local_addr()?.to_string())),
        }
    }

    /// One attempt; `None` when nobody of this user is knocking.
    pub(super) fn accept(&self) -> io::Result<Option<Stream>> {
        let accepted = match self {
            Self::Unix(place) => place.accept(),
            Self::Tcp(l) => l.accept().and_then(|(s, _)| {
                s.set_nonblocking(false)?;
                s.set_nodelay(true)?;
                Ok(Some(Stream::Tcp(s)))
            }),
        };
        match accepted {
            Err(e) if timed_out(&e) || e.kind() == io::ErrorKind::ConnectionAborted => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(None),
            accepted => accepted,
        }
    }
}

impl UnixPlace {
    fn open(path: &Path) -> io::Result<Self> {
        let address = address(path)?;
        let file = (!is_abstract(path)).then(|| path.to_owned());
        // A socket that a dead rank 0 left behind refuses connections; a live one accepts them, or is busy. What is no socket refuses them too.
        let is_socket = |path: &PathBuf| {
            std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket())
        };
        if let Some(file) = file.as_ref().filter(|file| is_socket(file))
            && dial(&address).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
        {
            std::fs::remove_file(file)?;
        }
        let fd = socket()?;
        net::bind(&fd, &address)?;
        let place = Self {
            socket: UnixListener::from(fd),
            file,
            warned: AtomicBool::new(false),
        };
        net::listen(&place.socket, -1)?;
        Ok(place)
    }

    fn accept(&self) -> io::Result<Option<Stream>> {
        for _ in 0..STRANGERS {
            let (stream, _) = self.socket.accept()?;
            stream.set_nonblocking(false)?;
            let peer = Credentials::of(&stream)?;
            if peer.is_own() {
                return Ok(Some(Stream::Unix(stream)));
            }
            if !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    uid = peer.uid,
                    "bootstrap: refused a process of another user; others are refused without a word"
                );
            }
        }
        Ok(None)
    }
}

impl Drop for UnixPlace {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // The name is only a meeting point; if it is gone already, nothing is lost.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// `@NAME`: a name that needs no file and goes with its socket.
fn is_abstract(path: &Path) -> bool {
    path.as_os_str().as_bytes().starts_with(b"@")
}

fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    let address = match path.as_os_str().as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name),
        None => SocketAddrUnix::new(path),
    };
    Ok(address?)
}

/// Calls on it do not wait.
fn socket() -> io::Result<std::os::fd::OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

/// Connects at once or not at all.
fn dial(address: &SocketAddrUnix) -> io::Result<UnixStream> {
    let fd = socket()?;
    net::connect(&fd, address).map_err(|e| match e {
        Errno::AGAIN => io::Error::new(
            io::ErrorKind::WouldBlock,
            "nobody takes the connections that wait there: is its place another process's?",
        ),
        e => e.into(),
    })?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A name that the system does not know, and will not in a moment either.
#[derive(Debug, thiserror::Error)]
#[error("its name cannot be looked up: {0}")]
pub(super) struct Unknown(io::Error);

impl Unknown {
    fn of(error: io::Error) -> io::Error {
        match crate::connect::is_temporary(&error) || timed_out(&error) {
            true => error,
            false => io::Error::other(Self(error)),
        }
    }

    /// Is it why?
    pub(super) fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|e| e.is::<Self>())
    }
}

pub(super) fn connect_once(at: &Rendezvous, left: Duration) -> io::Result<Stream> {
    match at {
        Rendezvous::Unix(path) => {
            let stream = dial(&address(path)?)?;
            let peer = Credentials::of(&stream)?;
            if !peer.is_own() {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "the socket is another user's",
                ));
            }
            Ok(Stream::Unix(stream))
        }
        Rendezvous::Tcp(addr) => {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            for addr in look_up(addr, left).map_err(Unknown::of)? {
                match TcpStream::connect_timeout(&addr, left.max(Duration::from_millis(1))) {
                    Ok(s) => return s.set_nodelay(true).map(|()| Stream::Tcp(s)),
                    Err(e) => last = e,
                }
            }
            Err(last)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::time::Instant;

    use super::super::{Bootstrap, BootstrapError, Meeting};
    use super::*;

    const SOON: Duration = Duration::from_millis(300);
    const LONG: Duration = Duration::from_secs(20);

    fn place() -> (tempfile::TempDir, PathBuf, Rendezvous) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("meet");
        let at = Rendezvous::Unix(path.clone());
        (dir, path, at)
    }

    fn open(at: &Rendezvous) -> super::super::Result<Meeting> {
        Meeting::open(std::slice::from_ref(at))
    }

    #[test]
    fn what_is_no_socket_stays_as_it_is() {
        let (_dir, path, at) = place();
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(open(&at), Err(BootstrapError::Open { .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        let (_dir, link, at) = place();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(open(&at).is_err());
        assert_eq!(std::fs::read_to_string(&link).unwrap(), "precious");
    }

    #[test]
    fn a_socket_of_the_dead_is_replaced_and_one_of_the_living_is_not() {
        let (_dir, path, at) = place();
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let meeting = open(&at).unwrap();
        assert!(open(&at).is_err());
        assert!(path.exists());
        drop(meeting);
        assert!(!path.exists());
    }

    #[test]
    fn a_meeting_that_fails_leaves_nothing_behind() {
        let (_dir, path, at) = place();
        let error = Bootstrap::join(&at, 0, 2, SOON).unwrap_err();
        assert!(matches!(error, BootstrapError::Missing { .. }), "{error}");
        assert!(!path.exists());
    }

    /// Who listens and takes no connection keeps nobody longer than it asked to wait.
    #[test]
    fn a_full_queue_is_not_waited_for() {
        let (_dir, path, at) = place();
        let fd = OwnedFd::from(UnixListener::bind(&path).unwrap());
        net::listen(&fd, 0).unwrap();
        let address = address(&path).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match dial(&address) {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let since = Instant::now();
        let error = Bootstrap::join(&at, 1, 2, SOON).unwrap_err().to_string();
        assert!(error.contains("nobody takes the connections"), "{error}");
        // As rank 0: the place is taken.
        assert!(open(&at).is_err());
        assert!(path.exists());
        assert!(since.elapsed() < LONG);
    }

    /// As a thread of another user.
    fn as_another<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
        let other = std::thread::spawn(|| {
            let nobody = rustix::process::Uid::from_raw(65_534);
            // It holds for this thread alone, as the system sees it.
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root");
            body()
        });
        other.join().unwrap()
    }

    fn unseen(name: &str) -> (PathBuf, Rendezvous) {
        let path = PathBuf::from(format!("@doorbell-{name}-{}", std::process::id()));
        (path.clone(), Rendezvous::Unix(path))
    }

    #[test]
    #[ignore = "needs PEER user: root, which may become another one"]
    fn peer_user_another_users_place_is_not_dialled() {
        let (path, at) = unseen("taken");
        let address = address(&path).unwrap();
        let held = as_another(move || {
            let fd = socket().unwrap();
            net::bind(&fd, &address).unwrap();
            net::listen(&fd, 16).unwrap();
            fd
        });
        let error = connect_once(&at, LONG).err().expect("refused");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        let error = Bootstrap::join(&at, 1, 2, SOON).unwrap_err().to_string();
        assert!(error.contains("another user's"), "{error}");
        drop(held);
    }

    /// However many come: they are refused, and ranks are let in.
    #[test]
    #[ignore = "needs PEER user: root, which may become another one"]
    fn peer_user_a_crowd_of_another_user_keeps_no_rank_out() {
        let (path, at) = unseen("crowd");
        let meeting = open(&at).unwrap();
        let address = address(&path).unwrap();
        let crowd: Vec<_> =
            as_another(move || (0..500).map_while(|_| dial(&address).ok()).collect());
        assert!(crowd.len() > STRANGERS, "{} came", crowd.len());
        let rank = std::thread::spawn(move || Bootstrap::join(&at, 1, 2, LONG).map(drop));
        let hub = Bootstrap::preside(&meeting, &[], 2, LONG);
        assert!(hub.is_ok(), "{:?}", hub.err());
        rank.join().unwrap().unwrap();
        // Nor is any of them let in.
        assert!(meeting.accept().unwrap().is_none());
    }
}
