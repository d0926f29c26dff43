//! Scripted faults: `DOORBELL_FAULT` and [`Config::fault`](crate::Config), for any program that uses this library.
//!
//! A [`Script`] makes the software HCA lose a doorbell, keep a completion back, fail a work request, or worse, where its rules say and
//! in the same place in each run; `docs/faults.md` has the language. [`Device::faults`] says which rules have fired.

pub use doorbell_hca::script::{
    Action, Firing, Place, QpSelect, Rule, RuleState, Script, ScriptError, name_rule,
};

use crate::Device;

/// Bytes of a file of rules: thousands of them.
const MOST: u64 = 1 << 20;

/// The rules in `text`, or in the file whose name follows an `@`; `none` and nothing are no rules.
///
/// # Errors
/// What is wrong, with line, column and word, or why the file cannot be read.
pub fn load(text: &str) -> Result<Script, String> {
    let text = text.trim();
    if text.is_empty() || text == "none" {
        return Ok(Script::default());
    }
    let Some(file) = text.strip_prefix('@') else {
        return text
            .parse()
            .map_err(|e: ScriptError| format!("{e}; give rules as in docs/faults.md, or @FILE"));
    };
    match crate::input::read_text(file.as_ref(), MOST) {
        Ok(text) => text
            .parse()
            .map_err(|e: ScriptError| format!("{file}: {e}; give rules as in docs/faults.md")),
        Err(e) => Err(format!(
            "reading the fault script {file}: {e}; give a file that can be read"
        )),
    }
}

/// A script as [`load`] reads it.
pub(crate) fn print(script: &Script) -> String {
    match script.is_empty() {
        true => "none".to_owned(),
        false => script.to_string(),
    }
}

impl Device {
    /// What became of every rule of the fault script so far; nothing if none is played.
    pub fn faults(&self) -> Vec<RuleState> {
        self.inner.faults()
    }
}

impl crate::device::Inner {
    pub(crate) fn faults(&self) -> Vec<RuleState> {
        let script = self.soft.as_ref().and_then(|soft| soft.hca().script());
        script.map(|script| script.rules()).unwrap_or_default()
    }

    /// What the script did, the newest last, as far as it is remembered.
    pub(crate) fn firings(&self) -> Vec<Firing> {
        let script = self.soft.as_ref().and_then(|soft| soft.hca().script());
        script.map(|script| script.firings()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_files_and_nothing_are_read() {
        assert!(load("").unwrap().is_empty() && load(" none ").unwrap().is_empty());
        assert_eq!(print(&Script::default()), "none");
        let two = load("wqe=1: drop-doorbell; wqe=2: kill-engine").unwrap();
        assert_eq!(load(&print(&two)).unwrap(), two);
        let name = std::env::temp_dir().join(format!("doorbell-faults-{}", std::process::id()));
        std::fs::write(&name, "# lost\nwqe=1: drop-doorbell\nwqe=2: kil-engine\n").unwrap();
        let error = load(&format!("@{}", name.display())).unwrap_err();
        assert!(
            error.contains("line 3, column 8") && error.contains("kill-engine?"),
            "{error}"
        );
        std::fs::remove_file(&name).unwrap();
        let error = load(&format!("@{}", name.display())).unwrap_err();
        assert!(error.contains("reading the fault script"), "{error}");
    }
}
