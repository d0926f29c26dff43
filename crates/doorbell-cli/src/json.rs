//! Result files that people give: read up to a limit, and made harmless before anything of them is shown.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// A sweep of everything has some hundred kilobytes.
const MOST: u64 = 64 << 20;

/// Reads a file; `wanted` says which one to give.
pub(crate) fn read(file: &Path, wanted: &str) -> Result<Value> {
    let text = doorbell::input::read_text(file, MOST)
        .with_context(|| format!("reading {}: give {wanted}", file.display()))?;
    parse(&text).with_context(|| file.display().to_string())
}

/// The same from its text.
pub(crate) fn parse(text: &str) -> Result<Value> {
    let mut value = serde_json::from_str(text).context("it is no JSON: was it cut off?")?;
    doorbell::report::disarm(&mut value);
    Ok(value)
}

/// The schema that a document names.
pub(crate) fn schema(value: &Value) -> Result<&str> {
    let name = value.get("schema").and_then(Value::as_str);
    name.context("it names no schema: give a results.json of `doorbell sweep`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_commands_no_terminal() {
        let value = parse(r#"{"schema": "x", "a": ["\u001b[2J\u009bred\r\n"]}"#).unwrap();
        assert_eq!(value["a"][0], "\u{fffd}[2J\u{fffd}red\u{fffd}\n");
        assert_eq!(schema(&value).unwrap(), "x");
        assert!(schema(&parse("{}").unwrap()).is_err());
    }

    #[test]
    fn what_is_no_file_is_refused_with_what_to_give() {
        let error = format!("{:#}", read(Path::new("/dev/zero"), "a thing").unwrap_err());
        assert!(
            error.contains("a device") && error.contains("give a thing"),
            "{error}"
        );
    }
}
