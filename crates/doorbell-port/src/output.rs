//! Files that people name to have something written to: captures, traces, results.
//!
//! A name may be a pipe, as in `--pcap >(wireshark -k -i -)`. One that nobody reads would be waited for without an end, so a file is opened without
//! waiting.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// Makes the file, or empties it.
///
/// # Errors
/// What the system says, and that nobody reads a pipe.
pub fn create(path: &Path) -> io::Result<File> {
    let opened = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(path);
    let file = match opened {
        Err(e) if e.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
            return Err(io::Error::other(
                "it is a pipe that nobody reads: start its reader first",
            ));
        }
        other => other?,
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
