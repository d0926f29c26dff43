//! Files of which a reader never sees half, whatever stops this program or the host.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Where a file is written before it takes its place.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

/// Writes a file that is there whole or as it was before: beside it first, then in its place.
///
/// # Errors
/// What the system says.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = beside(path);
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    });
    if written.is_err() {
        // What is left of it is of no use, and says less than the error.
        let _ = std::fs::remove_file(&beside);
    }
    written
}
