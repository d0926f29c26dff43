//! Files that people name to have something written to: captures, traces, results.
//!
//! A name may be a pipe, as in `--pcap >(wireshark -k -i -)`. One that nobody reads would be waited for without an end; a reader that was started
//! beside this program gets a moment to open it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Access, OFlags, access, fcntl_getfl, fcntl_setfl};

/// How long a pipe may be without a reader, and between two looks.
const READER: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(5);

/// Makes the file, or empties it.
///
/// # Errors
/// What the system says, and that nobody reads a pipe.
pub fn create(path: &Path) -> io::Result<File> {
    let until = Instant::now() + READER;
    let unread = rustix::io::Errno::NXIO.raw_os_error();
    let file = loop {
        let opened = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(path);
        match opened {
            Err(e) if e.raw_os_error() != Some(unread) => return Err(e),
            Err(_) if Instant::now() < until => std::thread::sleep(LOOK),
            Err(_) => {
                let words = "it is a pipe that nobody reads: start its reader first";
                return Err(io::Error::other(words));
            }
            Ok(file) => break file,
        }
    };
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Looks, before there is something to write, whether [`create`] would be able to. Nothing is made, emptied or opened for longer than the look: another
/// process may be about to write there. Where a link leads to nothing, that shows when it is written.
///
/// # Errors
/// What the system says.
pub fn check(path: &Path) -> io::Result<()> {
    match std::fs::metadata(path) {
        // Who reads a pipe would see it end.
        Ok(there) if !there.is_file() && !there.is_dir() => Ok(()),
        Ok(_) => OpenOptions::new().write(true).open(path).map(drop),
        Err(_) if std::fs::symlink_metadata(path).is_ok() => Ok(()),
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        Err(_) => {
            let folder = path.parent().filter(|f| !f.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            Ok(access(folder, Access::WRITE_OK | Access::EXEC_OK)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_pipe_that_nobody_reads_is_refused_and_one_that_is_read_is_written_to() {
        let pipe = std::env::temp_dir().join(format!("doorbell-pipe-{}", std::process::id()));
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = create(&pipe).unwrap_err().to_string();
        assert!(error.contains("nobody reads"), "{error}");
        let mut reader = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(&pipe)
            .unwrap();
        create(&pipe).unwrap().write_all(b"read").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        std::fs::remove_file(&pipe).unwrap();
        assert_eq!(text, "read");
    }

    #[test]
    fn what_cannot_be_written_is_known_before_and_a_look_changes_nothing() {
        let dir = std::env::temp_dir().join(format!("doorbell-check-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (new, old, pipe) = (dir.join("new"), dir.join("old"), dir.join("pipe"));
        std::fs::write(&old, "old").unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for fine in [&new, &old, &pipe] {
            check(fine).unwrap();
        }
        assert!(!new.exists());
        assert_eq!(std::fs::read(&old).unwrap(), b"old");
        let wrong = [
            (dir.clone(), io::ErrorKind::IsADirectory),
            (dir.join("none/new"), io::ErrorKind::NotFound),
            (old.join("new"), io::ErrorKind::NotADirectory),
        ];
        for (wrong, kind) in wrong {
            assert_eq!(check(&wrong).unwrap_err().kind(), kind, "{wrong:?}");
            assert_eq!(create(&wrong).unwrap_err().kind(), kind, "{wrong:?}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
