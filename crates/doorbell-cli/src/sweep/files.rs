//! `results.json` and `report.html`: read, and written so that a reader never sees half of one.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::results::{Results, SCHEMA};
use crate::{WrongArguments, files, json};

/// What was written.
pub(crate) struct Written {
    pub(crate) results: PathBuf,
    pub(crate) report: PathBuf,
}

/// The files of a sweep.
const NAMES: [&str; 2] = ["results.json", "report.html"];

/// Files of those names that are no sweep's would be lost; one of a sweep is replaced, which is what `--out` is for.
fn foreign(folder: &Path) -> Option<PathBuf> {
    let there = |name: &str| {
        let path = folder.join(name);
        path.symlink_metadata().is_ok().then_some(path)
    };
    let [results, report] = NAMES.map(there);
    let ours = results.as_ref().is_some_and(|path| read(path).is_ok());
    match (ours, results, report) {
        (true, ..) => None,
        (false, Some(path), _) | (false, None, Some(path)) => Some(path),
        (false, None, None) => None,
    }
}

/// Makes the folder, and finds out whether it can be written to, and may be.
pub(super) fn prepare(folder: &Path, force: bool) -> Result<()> {
    if let Some(path) = foreign(folder).filter(|_| !force) {
        let wrong = anyhow::anyhow!(
            "{} is no file of a sweep, and would be replaced: choose another folder with --out, or say --force",
            path.display()
        );
        return Err(wrong.context(WrongArguments));
    }
    let remedy = || {
        format!(
            "writing into {}: choose a folder that can be written with --out",
            folder.display()
        )
    };
    std::fs::create_dir_all(folder).with_context(remedy)?;
    let probe = files::beside(&folder.join(NAMES[0]));
    std::fs::write(&probe, b"").with_context(remedy)?;
    std::fs::remove_file(&probe).with_context(remedy)
}

/// Writes both files.
pub(super) fn write(folder: &Path, results: &Results, page: &str) -> Result<Written> {
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let mut json = serde_json::to_string_pretty(results).context("writing JSON")?;
    json.push('\n');
    Ok(Written {
        results: replace(folder, "results.json", json.as_bytes())?,
        report: replace(folder, "report.html", page.as_bytes())?,
    })
}

fn replace(folder: &Path, name: &str, bytes: &[u8]) -> Result<PathBuf> {
    let to = folder.join(name);
    files::replace(&to, bytes).with_context(|| format!("writing {}", to.display()))?;
    Ok(to)
}

/// Reads a result file of a sweep.
pub(crate) fn read(file: &Path) -> Result<Results> {
    let value = json::read(file, "a results.json of `doorbell sweep`")?;
    parse(value).with_context(|| file.display().to_string())
}

/// The same from what was read. The schema's name is looked at first: a file of another version is not half understood.
pub(crate) fn parse(value: serde_json::Value) -> Result<Results> {
    match json::schema(&value)? {
        SCHEMA => {}
        other => bail!(
            "its schema is {other}, and {SCHEMA} is needed: a results.json of `doorbell sweep`"
        ),
    }
    serde_json::from_value(value).with_context(|| format!("it says {SCHEMA} and is not"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::fixture;

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let (out, results) = (folder.path().join("a/b"), fixture::results());
        prepare(&out, false).unwrap();
        let written = write(&out, &results, "page").unwrap();
        let back = read(&written.results).unwrap();
        assert_eq!(back.points.len(), results.points.len());
        assert_eq!(std::fs::read_to_string(written.report).unwrap(), "page");
        let left: Vec<_> = std::fs::read_dir(&out).unwrap().collect();
        assert_eq!(left.len(), 2, "nothing else is left: {left:?}");
        prepare(&out, false).expect("a sweep replaces a sweep");
    }

    #[test]
    fn what_is_no_result_file_is_refused_with_what_it_is() {
        for (text, part) in [
            ("", "no JSON"),
            ("{}", "names no schema"),
            ("{\"schema\":\"doorbell-sweep/2\"}", "doorbell-sweep/2"),
            ("{\"schema\":\"doorbell-sweep/1\"}", "and is not"),
        ] {
            let error = format!("{:#}", json::parse(text).and_then(parse).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_refused_at_once() {
        let error = prepare(Path::new("/proc/nothing"), false).unwrap_err();
        assert!(format!("{error:#}").contains("--out"));
    }

    #[test]
    fn files_that_are_no_sweeps_are_not_replaced() {
        for name in NAMES {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join(name), "{\"mine\": 1}").unwrap();
            let error = prepare(folder.path(), false).unwrap_err();
            assert!(error.is::<WrongArguments>());
            let text = format!("{error:#}");
            assert!(text.contains(name) && text.contains("--force"), "{text}");
            prepare(folder.path(), true).unwrap();
        }
    }
}
