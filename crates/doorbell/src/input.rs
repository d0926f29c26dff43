//! Files that people name: fault scripts, results, captures; for those that are written, [`create`] and [`check`].
//!
//! A name may be anything: a pipe that nobody writes to would be waited for without an end, a device never ends, a disk image fills the memory. So
//! a file is opened without waiting, has to be a regular one, and is read up to a limit.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

pub use doorbell_hca::roce::output::{check, create};

/// The bytes of the regular file at `path`, of which there are at most `most`.
///
/// # Errors
/// What the system says, that it is no regular file, or that it is larger.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let large = || {
        io::Error::other(format!(
            "it is larger than the {} MiB that such a file has at most",
            most >> 20
        ))
    };
    if file.metadata()?.len() > most {
        return Err(large());
    }
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    file.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(large()),
        false => Ok(bytes),
    }
}

/// The same as text.
///
/// # Errors
/// Also that it is no UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read(path, most)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is no text (UTF-8)"))
}

fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
        .open(path)?;
    let kind = file.metadata()?.file_type();
    let what = match kind {
        _ if kind.is_file() => return Ok(file),
        _ if kind.is_dir() => "a folder",
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "a socket",
    };
    Err(io::Error::other(format!("it is {what}, not a file")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        for (path, part) in [
            (pipe.as_path(), "a pipe"),
            (Path::new("/dev/zero"), "a device"),
            (dir.path(), "a folder"),
        ] {
            let error = read(path, 1 << 20).unwrap_err().to_string();
            assert!(error.contains(part), "{}: {error}", path.display());
        }
    }

    #[test]
    fn a_file_has_a_limit() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join("file");
        // Sparse: it takes no room.
        File::create(&name).unwrap().set_len(1 << 30).unwrap();
        let error = read(&name, 16 << 20).unwrap_err().to_string();
        assert!(error.contains("16 MiB"), "{error}");
        std::fs::write(&name, b"text").unwrap();
        assert_eq!(read_text(&name, 4).unwrap(), "text");
        assert!(read_text(&name, 3).is_err());
        std::fs::write(&name, [0xff]).unwrap();
        assert!(read_text(&name, 4).is_err());
    }
}
