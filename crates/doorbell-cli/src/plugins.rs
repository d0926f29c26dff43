//! The plug-ins that other libraries load: where they are, for which installed library, and the variables that make it load them.

use std::path::Path;

use doorbell_doctor::{Report, examine, tree::Live};
use serde::Serialize;

/// One plug-in, for `doorbell info`.
#[derive(Debug, Serialize)]
pub(crate) struct Plugin {
    /// Of which library.
    pub(crate) library: &'static str,
    /// Where it is; null: this is no installation, or one without it.
    path: Option<String>,
    /// What was found of that library, with what the plug-in is for it.
    found: Vec<Found>,
    /// What to set.
    variables: Vec<(&'static str, String)>,
    why: String,
}

#[derive(Debug, Serialize)]
struct Found {
    version: Option<String>,
    path: String,
    fits: bool,
    why: &'static str,
}

impl Plugin {
    /// One cell: what there is, and what to do.
    pub(crate) fn words(&self) -> String {
        let mut lines = vec![self.why.clone()];
        for found in &self.found {
            let version = found.version.as_deref().unwrap_or("of unknown version");
            lines.push(format!("{version} at {}: {}", found.path, found.why));
        }
        for (name, value) in &self.variables {
            lines.push(format!("{name}={value}"));
        }
        lines.join("\n")
    }
}

/// All of them.
pub(crate) fn list() -> Vec<Plugin> {
    let report = examine(&Live::here());
    vec![nccl(
        &report,
        crate::ship::installed("libnccl-gin-doorbell.so"),
    )]
}

fn nccl(report: &Report, path: Option<impl AsRef<Path>>) -> Plugin {
    let path = path.map(|p| p.as_ref().display().to_string());
    let found: Vec<Found> = report
        .libraries
        .iter()
        .filter(|l| l.name == "nccl")
        .map(|l| {
            let (fits, why) = judge(l.version.as_deref());
            Found {
                version: l.version.clone(),
                path: l.path.clone(),
                fits,
                why,
            }
        })
        .collect();
    let variables = match &path {
        Some(path) => vec![
            ("NCCL_GIN_PLUGIN", path.clone()),
            ("NCCL_GIN_TYPE", "3".to_owned()),
        ],
        None => Vec::new(),
    };
    let why = match &path {
        Some(path) => format!("{path} gives NCCL's kernels queues without a NIC"),
        None => "libnccl-gin-doorbell.so is not beside this command: use the tarball or the wheel, or set DOORBELL_HOME".to_owned(),
    };
    Plugin {
        library: "nccl",
        path,
        found,
        variables,
        why,
    }
}

/// What is said of releases that look inside a network plug-in.
const OLDER: &str = "it loads libnccl-net-doorbell.so, beside the plug-in: NCCL_NET_PLUGIN instead of NCCL_GIN_PLUGIN, for ranks of one host";

/// Does that version of NCCL load the plug-in?
fn judge(version: Option<&str>) -> (bool, &'static str) {
    let mut numbers = version.unwrap_or("").split('.').map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok);
    match (next(), next(), next()) {
        (Some(2), Some(30), Some(patch)) if patch >= 7 => (true, "it loads the plug-in"),
        (Some(2), Some(minor), _) if minor > 30 => (true, "it loads the plug-in"),
        (Some(2), Some(28), Some(patch)) if patch >= 7 => (true, OLDER),
        (Some(2), Some(29), _) => (true, OLDER),
        (Some(2), Some(28..=30), _) => (
            false,
            "it has GIN, and takes other plug-ins only: use 2.28.7 to 2.29.7, or 2.30.7 or later",
        ),
        (Some(_), Some(_), _) => (false, "it has no GIN: use 2.30.7 or later"),
        _ => (
            false,
            "its version could not be read; 2.30.7 or later loads the plug-in",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doorbell_doctor::tree::Manifest;

    #[test]
    fn versions_are_told_apart() {
        for (version, fits) in [
            ("2.30.7", true),
            ("2.31.1", true),
            ("2.32.3", true),
            ("2.30.4", false),
            ("2.28.9", true),
            ("2.29.7", true),
            ("2.28.3", false),
            ("2.27.7", false),
            ("new", false),
        ] {
            assert_eq!(judge(Some(version)).0, fits, "{version}");
        }
        assert!(!judge(None).0);
    }

    #[test]
    fn a_place_without_the_plugin_says_what_to_do() {
        let machine = Manifest::parse("/proc/sys/kernel/osrelease: 6.8.0\n").expect("a machine");
        let report = examine(&machine);
        let text = nccl(&report, None::<&Path>).words();
        assert!(text.contains("DOORBELL_HOME"), "{text}");
        let text = nccl(&report, Some("/opt/x/lib/p.so")).words();
        assert!(text.contains("NCCL_GIN_PLUGIN=/opt/x/lib/p.so"), "{text}");
    }
}
