//! Files that a command writes: a reader never sees half of one, and no two of a command are one and the same.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::WrongArguments;

/// Where a file is written before it takes its place.
pub(crate) fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

/// Where a path leads, links followed: also to what is not there yet.
fn real(path: &Path) -> PathBuf {
    /// As many as the kernel follows.
    const LINKS: u32 = 40;
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        let Ok(target) = std::fs::read_link(&path) else {
            break;
        };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    path
}

/// Is what is written to the one found in the other?
fn same(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let place = |path: &Path| std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
    match (place(a), place(b)) {
        // What nobody reads takes everything.
        (Some(a), Some(b)) => a == b && place(Path::new("/dev/null")) != Some(a),
        (None, None) => {
            let (a, b) = (real(a), real(b));
            let folder = |path: &Path| match path.parent() {
                Some(folder) if !folder.as_os_str().is_empty() => place(folder),
                _ => place(Path::new(".")),
            };
            let alike = folder(&a) == folder(&b) && a.file_name() == b.file_name();
            a == b || (alike && folder(&a).is_some())
        }
        _ => false,
    }
}

/// Refuses a command of which one file would be written over another.
///
/// # Errors
/// [`WrongArguments`], with the options' names.
pub(crate) fn distinct(outputs: &[(&str, &Path)]) -> anyhow::Result<()> {
    for (i, (one, a)) in outputs.iter().enumerate() {
        for (other, b) in &outputs[i + 1..] {
            if same(a, b) {
                let (a, b) = (a.display(), b.display());
                let wrong = anyhow::anyhow!(
                    "{one} {a} and {other} {b} are one and the same place: name two files"
                );
                return Err(wrong.context(WrongArguments));
            }
        }
    }
    Ok(())
}

/// Writes a file that is there whole or as it was before: beside it first, then in its place. A link stays one: what it leads to is written.
///
/// # Errors
/// What the system says.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let path = &real(path);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn two_names_of_one_place_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("sub")).expect("a folder");
        std::fs::write(at("there"), b"").expect("a file");
        std::fs::hard_link(at("there"), at("hard")).expect("a link");
        symlink("there", at("soft")).expect("a link");
        symlink("new", at("dangling")).expect("a link");
        let pair = |a: &Path, b: &Path| distinct(&[("--json", a), ("--page", b)]);
        for (a, b) in [
            ("new", "new"),
            ("new", "./new"),
            ("new", "sub/../new"),
            ("new", "dangling"),
            ("there", "hard"),
            ("there", "soft"),
        ] {
            let error = pair(&at(a), &at(b)).expect_err(a);
            let text = format!("{error:#}");
            assert!(error.is::<WrongArguments>(), "{text}");
            assert!(text.contains("--json") && text.contains("--page"), "{text}");
        }
        for (a, b) in [("new", "other"), ("new", "sub/new"), ("new", "there")] {
            pair(&at(a), &at(b)).expect(b);
        }
        let (null, dash) = (Path::new("/dev/null"), Path::new("-"));
        pair(null, null).expect("nobody reads it");
        pair(dash, dash).expect_err("standard output takes one");
        // Without a folder in front.
        pair(Path::new("no-such"), Path::new("./no-such")).expect_err("one file");
    }

    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("sub")).expect("a folder");
        symlink("sub/real", at("link")).expect("a link");
        for bytes in [b"one", b"two"] {
            replace(&at("link"), bytes).expect("written");
            assert_eq!(std::fs::read(at("sub/real")).expect("there"), bytes);
        }
        assert!(at("link").is_symlink());
        assert_eq!(std::fs::read_dir(at("sub")).expect("listed").count(), 1);
    }
}
