//! `--fault` and `--fault-file`: faults that the HCA plays, in every command that opens one.

use std::path::PathBuf;

use clap::Args;
use doorbell::faults::{Script, load};

/// Which faults.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct FaultArgs {
    /// A fault that the HCA plays, such as 'wqe=1023: drop-doorbell'; may be repeated.
    /// faults.md (`doorbell path doc`) has the language [env: DOORBELL_FAULT]
    #[arg(long = "fault", value_name = "RULE", value_parser = rules, help_heading = "Faults")]
    pub(crate) rules: Vec<String>,
    /// The same from a file, a rule a line
    #[arg(long = "fault-file", value_name = "FILE", value_parser = file, conflicts_with = "rules", help_heading = "Faults")]
    pub(crate) file: Option<PathBuf>,
}

/// Rules that can be read, as they were given.
pub(crate) fn rules(text: &str) -> Result<String, String> {
    match text.parse::<Script>() {
        Ok(_) => Ok(text.to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

/// A file of such rules.
fn file(name: &str) -> Result<PathBuf, String> {
    load(&format!("@{name}")).map(|_| name.into())
}

impl FaultArgs {
    /// As the library takes it; `None` leaves it to the environment.
    pub(crate) fn text(&self) -> Option<String> {
        match (&self.file, self.rules.as_slice()) {
            (Some(file), _) => Some(format!("@{}", file.display())),
            (None, []) => None,
            (None, rules) => Some(rules.join("\n")),
        }
    }

    /// The same options again, for a command that this one stands for.
    pub(crate) fn words(&self) -> Vec<String> {
        let file = self
            .file
            .iter()
            .map(|f| format!("--fault-file={}", f.display()));
        let rules = self.rules.iter().map(|r| format!("--fault={r}"));
        file.chain(rules).collect()
    }

    /// Options for a second process that this one starts, whose rank is 1: the rules that are for it alone.
    pub(crate) fn for_second(&self) -> Vec<String> {
        let script = self.text().and_then(|text| load(&text).ok());
        let Some(script) = script else {
            return Vec::new();
        };
        let theirs = script.rules.iter().filter(|r| r.rank == Some(1));
        let mut options: Vec<_> = theirs.map(|r| format!("--fault={}", r.text)).collect();
        if !options.is_empty() {
            options.push(format!("--fault=seed={}", script.seed));
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_checked_when_they_are_given() {
        assert!(rules("wqe=1: drop-doorbell").is_ok());
        let error = rules("wqe=1: drop").unwrap_err();
        assert!(error.contains("column 8"), "{error}");
        assert!(file("/no/such/file").is_err());
    }

    #[test]
    fn the_second_process_gets_its_own() {
        let args = FaultArgs {
            rules: vec![
                "rank=1: kill-process; wqe=2: drop-doorbell".into(),
                "seed=9".into(),
            ],
            file: None,
        };
        assert_eq!(
            args.for_second(),
            ["--fault=rank=1: kill-process", "--fault=seed=9"]
        );
        assert_eq!(load(&args.text().unwrap()).unwrap().rules.len(), 2);
        assert!(
            FaultArgs::default().text().is_none() && FaultArgs::default().for_second().is_empty()
        );
    }
}
