//! The files that flight records lie in: where, whose, and when they go.
//!
//! `/dev/shm/doorbell-UID/PID.ID` (or below `XDG_RUNTIME_DIR`), readable by the user alone. A process removes its files when it ends
//! well; one that was killed leaves them for `doorbell dump`, and the next start keeps no more than eight of those.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, PoisonError};
use std::time::SystemTime;

use super::layout::head;

/// Files of dead processes that a start leaves.
pub const KEPT: usize = 8;

/// Files of this process, removed when it exits, with the process that made them: a forked child leaves them alone.
static OURS: Mutex<(u32, Vec<PathBuf>)> = Mutex::new((0, Vec::new()));

/// Where records may lie, best first.
pub fn directories() -> Vec<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let mut all = vec![PathBuf::from(format!("/dev/shm/doorbell-{uid}"))];
    if let Some(run) = std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()) {
        all.push(Path::new(&run).join("doorbell"));
    }
    all
}

/// The first directory that exists or can be made, belongs to us, and to nobody else.
pub fn directory() -> io::Result<PathBuf> {
    let mut why: Option<io::Error> = None;
    for dir in directories() {
        match own(&dir) {
            Ok(()) => return Ok(dir),
            Err(e) => {
                why = Some(match why {
                    Some(first) => io::Error::new(first.kind(), format!("{first}; {e}")),
                    None => e,
                });
            }
        }
    }
    Err(why.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

fn own(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            let above = dir.parent().unwrap_or(dir).display();
            let words = format!(
                "{} cannot be made: {e}: make {above} writable",
                dir.display()
            );
            return Err(io::Error::new(e.kind(), words));
        }
        _ => {}
    }
    is_ours(dir)
}

/// Somebody else could have made it first, to read what we write or to have us remove what we should not.
fn is_ours(dir: &Path) -> io::Result<()> {
    let is = fs::symlink_metadata(dir)?;
    let (own, mode) = (rustix::process::geteuid().as_raw(), is.mode() & 0o7777);
    let found = match is.file_type() {
        kind if kind.is_symlink() => "it is a link".to_owned(),
        kind if !kind.is_dir() => "it is no directory".to_owned(),
        _ if is.uid() != own => format!("it is user {}'s, and this is user {own}", is.uid()),
        _ if mode & 0o077 != 0 => format!("its mode is {mode:03o}"),
        _ => return Ok(()),
    };
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "{} is not a directory of this user alone ({found}): remove or rename it",
            dir.display()
        ),
    ))
}

/// Records that lie there: the process of each, and its file. `None`: of every process.
pub fn files(pid: Option<u32>) -> Vec<(u32, PathBuf)> {
    let mut found = Vec::new();
    for dir in directories() {
        if is_ours(&dir).is_err() {
            continue;
        }
        let Ok(entries) = fs::read_dir(&dir) else {
            continue;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let number = name
                .to_str()
                .and_then(|n| n.split_once('.'))
                .and_then(|(pid, _)| pid.parse::<u32>().ok());
            match number {
                Some(number) if pid.is_none_or(|p| p == number) => {
                    found.push((number, entry.path()));
                }
                _ => {}
            }
        }
    }
    found.sort();
    found
}

/// Who wrote a record, or who asks: a process is told from a later one of the same number, and from one of the same number in
/// another container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) pid: u32,
    pub(super) started: u64,
    pub(super) namespace: u64,
    pub(super) boot: [u64; 2],
}

impl Identity {
    /// Of this process.
    pub(super) fn here() -> Self {
        let pid = std::process::id();
        Self {
            pid,
            started: stat(pid).map_or(0, |s| s.started),
            namespace: fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino()),
            boot: boot(),
        }
    }

    pub(super) fn of(head: &[u64]) -> Self {
        let at = |i: usize| head.get(i).copied().unwrap_or(0);
        Self {
            pid: at(head::PID) as u32,
            started: at(head::STARTED),
            namespace: at(head::NAMESPACE),
            boot: [at(head::BOOT), at(head::BOOT + 1)],
        }
    }

    /// The monotonic clock has gone on since.
    pub(super) fn is_of_this_boot(&self) -> bool {
        self.boot == boot()
    }

    /// What has become of it, as seen from `asker`.
    pub(super) fn life(&self, asker: &Self) -> Life {
        if self.boot != asker.boot {
            return Life::Gone;
        }
        if self.namespace != asker.namespace {
            return Life::Elsewhere;
        }
        match stat(self.pid) {
            Some(now) if now.started != self.started => Life::Gone,
            None => Life::Gone,
            Some(now) => match now.state {
                b'Z' | b'X' | b'x' => Life::Gone,
                _ if now.is_stopped() => Life::Stopped,
                _ => Life::Runs,
            },
        }
    }
}

/// What a process does that wrote a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It runs.
    Runs,
    /// It was stopped by a signal or a debugger.
    Stopped,
    /// It is dead: the record is a post-mortem.
    Gone,
    /// It is in another PID namespace, from which nothing is known.
    Elsewhere,
}

struct Stat {
    state: u8,
    started: u64,
}

impl Stat {
    fn is_stopped(&self) -> bool {
        matches!(self.state, b'T' | b't')
    }
}

/// Is that process stopped, by a signal or a debugger?
pub fn is_stopped(pid: u32) -> bool {
    stat(pid).is_some_and(|now| now.is_stopped())
}

/// The state of a process, as proc(5) abbreviates it: `T` stopped by a signal, `t` by a debugger.
pub fn state(pid: u32) -> Option<u8> {
    stat(pid).map(|now| now.state)
}

/// State and start of a process.
fn stat(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let rest = text.rsplit_once(") ")?.1;
    let mut words = rest.split(' ');
    let state = *words.next()?.as_bytes().first()?;
    let started = words.nth(18)?.parse().ok()?;
    Some(Stat { state, started })
}

fn boot() -> [u64; 2] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let half = |range: std::ops::Range<usize>| {
        digits
            .get(range)
            .and_then(|d| u64::from_str_radix(d, 16).ok())
            .unwrap_or(0)
    };
    [half(0..16), half(16..32)]
}

/// Removes records of dead processes, all but the newest few.
pub(super) fn reap(dir: &Path, asker: &Identity) {
    let mut dead: Vec<(SystemTime, PathBuf)> = files(None)
        .into_iter()
        .filter(|(_, path)| path.starts_with(dir))
        .filter_map(|(_, path)| {
            let written = fs::metadata(&path).and_then(|m| m.modified()).ok()?;
            // What is not a record (yet) is left alone for a while.
            let gone = match super::read::head_of(&path) {
                Some(head) => Identity::of(&head).life(asker) == Life::Gone,
                None => written.elapsed().is_ok_and(|age| age.as_secs() > 60),
            };
            gone.then_some((written, path))
        })
        .collect();
    dead.sort();
    let surplus = dead.len().saturating_sub(KEPT);
    for (_, path) in dead.into_iter().take(surplus) {
        let _ = fs::remove_file(path);
    }
}

/// Notes a file of this process, to be removed at its end.
pub(super) fn enter(path: &Path) {
    extern "C" fn at_exit() {
        // No panic may leave this function; a lock that is held, or another process, means leaving them.
        if let Ok(mut ours) = OURS.try_lock()
            && ours.0 == std::process::id()
        {
            for path in ours.1.drain(..) {
                let _ = fs::remove_file(path);
            }
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function neither unwinds nor uses anything that ends before it.
        let _ = unsafe { libc::atexit(at_exit) };
    });
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    if ours.0 != pid {
        // The list of a parent: its files are its own.
        ours.1.clear();
        ours.0 = pid;
    }
    ours.1.push(path.to_owned());
}

/// Removes a file of this process.
pub(super) fn remove(path: &Path) {
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    if ours.0 == std::process::id() {
        ours.1.retain(|p| p != path);
        let _ = fs::remove_file(path);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn this_process_runs_and_a_later_one_of_its_number_does_not() {
        let here = Identity::here();
        assert_eq!(here.life(&here), Life::Runs);
        assert_ne!((here.started, here.namespace), (0, 0));
        let earlier = Identity {
            started: here.started - 1,
            ..here
        };
        assert_eq!(earlier.life(&here), Life::Gone);
        let other_boot = Identity {
            boot: [1, 2],
            ..here
        };
        assert_eq!(other_boot.life(&here), Life::Gone);
        let container = Identity {
            namespace: here.namespace + 1,
            ..earlier
        };
        assert_eq!(container.life(&here), Life::Elsewhere);
    }

    #[test]
    fn a_directory_that_others_may_read_is_not_ours() {
        let dir = tempfile_dir("open");
        fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .expect("chmod");
        let told = own(&dir).expect_err("others may read it").to_string();
        assert!(
            told.contains("(its mode is 755): remove or rename it"),
            "{told}"
        );
        fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .expect("chmod");
        assert!(own(&dir).is_ok());
        let link = dir.with_extension("link");
        std::os::unix::fs::symlink(&dir, &link).expect("symlink");
        let told = own(&link)
            .expect_err("a link may lead anywhere")
            .to_string();
        assert!(told.contains("it is a link"), "{told}");
        let _ = fs::remove_file(link);
        let _ = fs::remove_dir(dir);
    }

    fn tempfile_dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("doorbell-{name}-{}", std::process::id()));
        let _ = fs::create_dir(&dir);
        dir
    }
}
