//! `results.json` and `report.html`: read, and written so that a reader never sees half of one.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::results::{Results, SCHEMA};

/// What was written.
pub(crate) struct Written {
    pub(crate) results: PathBuf,
    pub(crate) report: PathBuf,
}

/// Makes the folder, and finds out whether it can be written to.
pub(super) fn prepare(folder: &Path) -> Result<()> {
    let remedy = || {
        format!(
            "writing into {}: choose a folder that can be written with --out",
            folder.display()
        )
    };
    std::fs::create_dir_all(folder).with_context(remedy)?;
    let probe = folder.join(temporary("results.json"));
    std::fs::write(&probe, b"").with_context(remedy)?;
    std::fs::remove_file(&probe).with_context(remedy)
}

fn temporary(name: &str) -> String {
    format!(".{name}.{}", std::process::id())
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
    let (to, meanwhile) = (folder.join(name), folder.join(temporary(name)));
    let written = std::fs::File::create(&meanwhile)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| std::fs::rename(&meanwhile, &to));
    if written.is_err() {
        // What is left of it is of no use; that the disk is full is said below.
        let _ = std::fs::remove_file(&meanwhile);
    }
    written.with_context(|| format!("writing {}", to.display()))?;
    Ok(to)
}

/// Reads a result file of a sweep.
pub(crate) fn read(file: &Path) -> Result<Results> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("reading {}: give a results.json", file.display()))?;
    parse(&text).with_context(|| file.display().to_string())
}

/// The same from its text. The schema's name is looked at first: a file of another version is not half understood.
pub(crate) fn parse(text: &str) -> Result<Results> {
    let value: serde_json::Value =
        serde_json::from_str(text).context("it is no JSON: was it cut off?")?;
    match value.get("schema").and_then(|s| s.as_str()) {
        Some(SCHEMA) => {}
        Some(other) => bail!(
            "its schema is {other}, and {SCHEMA} is needed: a results.json of `doorbell sweep`"
        ),
        None => bail!("it names no schema: give a results.json of `doorbell sweep`"),
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
        prepare(&out).unwrap();
        let written = write(&out, &results, "page").unwrap();
        let back = read(&written.results).unwrap();
        assert_eq!(back.points.len(), results.points.len());
        assert_eq!(std::fs::read_to_string(written.report).unwrap(), "page");
        let left: Vec<_> = std::fs::read_dir(&out).unwrap().collect();
        assert_eq!(left.len(), 2, "nothing else is left: {left:?}");
    }

    #[test]
    fn what_is_no_result_file_is_refused_with_what_it_is() {
        for (text, part) in [
            ("", "no JSON"),
            ("{}", "names no schema"),
            ("{\"schema\":\"doorbell-sweep/2\"}", "doorbell-sweep/2"),
            ("{\"schema\":\"doorbell-sweep/1\"}", "and is not"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_refused_at_once() {
        let error = prepare(Path::new("/proc/nothing")).unwrap_err();
        assert!(format!("{error:#}").contains("--out"));
    }
}
