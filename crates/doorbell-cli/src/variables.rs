//! The `DOORBELL_*` variables that are set here and are no settings of the library, for `doorbell info`: whether there is such a variable, and whether what it
//! says can be used. Those that are settings need no such list: what they say is in force, or the command has ended with why not.

use std::ffi::OsStr;

use doorbell::{Settings, report::server, variables};
use serde::Serialize;

/// One that is set.
#[derive(Debug, Serialize)]
pub(crate) struct Variable {
    pub(crate) name: String,
    value: String,
    /// False: nothing looks at a variable of this name.
    known: bool,
    /// What is wrong with it.
    wrong: Option<String>,
    /// What it decides.
    why: Option<&'static str>,
}

impl Variable {
    fn of(name: String, value: &OsStr) -> Self {
        let why = variables::what(&name);
        Self {
            wrong: match why {
                Some(_) => wrong(&name, value),
                None => Some(unknown(&name)),
            },
            value: value.to_string_lossy().into_owned(),
            known: why.is_some(),
            name,
            why,
        }
    }

    /// One cell.
    pub(crate) fn words(&self) -> String {
        match (&self.wrong, self.why) {
            // It has the value.
            (Some(wrong), Some(_)) => wrong.clone(),
            (Some(words), None) => format!("{}: {words}", self.value),
            (None, why) => format!("{}: {}", self.value, why.unwrap_or_default()),
        }
    }
}

/// Of this process, without those that are settings.
pub(crate) fn list(settings: &Settings) -> Vec<Variable> {
    let set = std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value));
    let mut list: Vec<Variable> = set
        .filter(|(name, _)| name.starts_with("DOORBELL_"))
        .filter(|(name, _)| !settings.explain().iter().any(|s| s.variable == name))
        .map(|(name, value)| Variable::of(name, &value))
        .collect();
    list.sort_by(|a, b| a.name.cmp(&b.name));
    list
}

fn unknown(name: &str) -> String {
    match variables::meant(name) {
        Some(meant) => format!("there is no such variable: {meant} is one"),
        None => "there is no such variable (docs/variables.md has all)".to_owned(),
    }
}

/// What those whom it concerns would say to it. Others are looked at before anything is listed, or say what they find where they are used.
fn wrong(name: &str, value: &OsStr) -> Option<String> {
    let text = value.to_string_lossy();
    let check = match name {
        _ if value.is_empty() => return None,
        "DOORBELL_LOG" => crate::filter(&text, "warn")
            .map(drop)
            .map_err(|why| format!("{why}: {}; it is taken as warn", crate::LOG_REMEDY)),
        "DOORBELL_REPORT" => server::check_variable(value).map_err(str::to_owned),
        "DOORBELL_HOME" => crate::ship::check_home().map_err(|e| crate::words(&e)),
        "DOORBELL_WORLD" | "DOORBELL_RENDEZVOUS" | "DOORBELL_JOB" => {
            let launched = doorbell::Launched::detect(None);
            launched.map(drop).map_err(|e| e.to_string())
        }
        _ => doorbell_nccl::check_variable(name, &text)?.map_err(|e| e.to_string()),
    };
    check.err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_for_the_plug_in_is_looked_at_and_a_name_that_nobody_reads_is_told() {
        for (name, value, known, part) in [
            ("DOORBELL_NCCL_LINK", "roce", true, "roce: which link"),
            (
                "DOORBELL_NCCL_LINK",
                "verbs",
                true,
                "give auto, shm or roce",
            ),
            ("DOORBELL_NCCL_RELEASE", "new", true, "such as 2.28.9"),
            (
                "DOORBELL_NCCL_TIMEOUTS",
                "9",
                false,
                "DOORBELL_NCCL_TIMEOUT is one",
            ),
            ("DOORBELL_SEED", "9", false, "there is no such variable"),
            ("DOORBELL_LOG", "loud", true, "is taken as warn"),
            ("DOORBELL_REPORT", "maybe", true, "is taken as on"),
            ("DOORBELL_GPU_COPIES", "engine", true, "engine: who makes"),
        ] {
            let variable = Variable::of(name.to_owned(), OsStr::new(value));
            assert_eq!(variable.known, known, "{name}");
            assert!(variable.words().contains(part), "{}", variable.words());
        }
    }

    /// Whatever the plug-in looks at has a row in the library's list, and the other way round.
    #[test]
    fn the_plug_in_knows_its_variables() {
        for (name, _) in variables::VARIABLES {
            let knows = doorbell_nccl::check_variable(name, "").is_some();
            assert_eq!(knows, name.starts_with("DOORBELL_NCCL_"), "{name}");
        }
    }
}
