//! Files that people name to have something written to: captures, traces, results.
//!
//! A name may be a pipe, as in `--pcap >(wireshark -k -i -)`. One that nobody reads would be waited for without an end; a reader that was started
//! beside this program gets a moment to open it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

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
}
