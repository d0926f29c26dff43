//! What can go wrong before there is anything to judge.

use std::path::PathBuf;

/// An input that cannot be read, or an output that cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A captured machine could not be opened.
    #[error(
        "{}: {source}: give --root a folder or a file that `doorbell doctor --capture` wrote",
        path.display()
    )]
    Root {
        /// What was given.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A manifest has a line that is none.
    #[error(
        "line {line} of the manifest: {what}; a line is `/path: content`, `/path -> target`, `/folder/` or `# …`"
    )]
    Manifest {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A capture is not whole.
    #[error(
        "the capture was cut off: {mark} is not there, and what is missing would be taken for not installed; copy it again (older releases wrote no mark: if it is whole, add it)"
    )]
    Cut {
        /// What is written last.
        mark: &'static str,
    },
    /// A capture could not be written.
    #[error("writing the capture to {}: {source}: choose a place that can be written", path.display())]
    Capture {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}
