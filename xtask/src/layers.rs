//! `cargo xtask layers`: dependencies go one way.
//!
//! [`LAYERS`] is the list of ARCHITECTURE.md; a crate may use only crates above it, and the crates
//! named in [`NEVER`] may not see each other although the order would allow it.

use std::path::Path;

use anyhow::{Result, bail};

use crate::cargo::{Metadata, Package};

/// The crates from the bottom of the stack to its top.
const LAYERS: &[&str] = &[
    "doorbell-wire",
    "doorbell-device",
    "doorbell-kernels",
    "doorbell-gpu",
    "doorbell-roce",
    "doorbell-port",
    "doorbell-verbs",
    "doorbell-verbs-mock",
    "doorbell-hca",
    "doorbell",
    "doorbell-c",
    "doorbell-nccl",
    "doorbell-nccl-net",
    "doorbell-doctor",
    "doorbell-cli",
];

/// (crate, what it must not know), beyond the order of [`LAYERS`].
const NEVER: &[(&str, &str)] = &[
    ("doorbell-hca", "doorbell-gpu"),
    ("doorbell-hca", "doorbell-kernels"),
    ("doorbell-nccl", "doorbell-c"),
    ("doorbell-cli", "doorbell-c"),
];

/// Crates for programs and tools, never for a library.
const TOOLS_ONLY: &[&str] = &["anyhow", "clap", "indicatif", "tracing-subscriber"];

/// Crates that may use [`TOOLS_ONLY`].
const TOOLS: &[&str] = &["doorbell-cli", "xtask"];

pub(crate) fn run(root: &Path) -> Result<()> {
    let metadata = Metadata::read(root)?;
    let ours: Vec<&Package> = metadata
        .packages
        .iter()
        .filter(|p| metadata.is_member(p))
        .collect();
    let faults = check(&ours);
    if !faults.is_empty() {
        bail!(
            "layers: {} fault(s)\n  {}",
            faults.len(),
            faults.join("\n  ")
        );
    }
    println!("layers: {} crates, dependencies go one way", ours.len());
    Ok(())
}

fn check(packages: &[&Package]) -> Vec<String> {
    let rank = |name: &str| LAYERS.iter().position(|l| *l == name);
    let mut faults = Vec::new();
    for package in packages {
        let name = package.name.as_str();
        let tool = TOOLS.contains(&name);
        let own = rank(name);
        if own.is_none() && name != "xtask" {
            faults.push(format!(
                "{name} is not in the list of layers: give it a place in xtask/src/layers.rs"
            ));
        }
        for (dependency, dev) in &package.dependencies {
            let dependency = dependency.as_str();
            // A test or an example may look down and sideways: it ships nothing.
            if *dev {
                continue;
            }
            if let (Some(own), Some(other)) = (own, rank(dependency))
                && other >= own
            {
                faults.push(format!("{name} uses {dependency}, which is not below it"));
            }
            if NEVER.contains(&(name, dependency)) {
                faults.push(format!("{name} uses {dependency}, which it must not know"));
            }
            if !tool && TOOLS_ONLY.contains(&dependency) {
                faults.push(format!(
                    "{name} is a library and uses {dependency}: typed errors and no terminal there"
                ));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[(&str, bool)]) -> Package {
        Package {
            id: name.into(),
            name: name.into(),
            version: "0.1.0".into(),
            folder: Default::default(),
            license: None,
            dependencies: dependencies
                .iter()
                .map(|(n, d)| ((*n).into(), *d))
                .collect(),
        }
    }

    #[test]
    fn downward_use_passes_and_upward_use_is_named() {
        let good = package(
            "doorbell-device",
            &[("doorbell-wire", false), ("loom", false)],
        );
        assert_eq!(check(&[&good]), Vec::<String>::new());
        let bad = package("doorbell-wire", &[("doorbell-device", false)]);
        assert_eq!(
            check(&[&bad]),
            ["doorbell-wire uses doorbell-device, which is not below it"]
        );
    }

    #[test]
    fn sideways_use_and_tool_crates_are_named() {
        let hca = package(
            "doorbell-hca",
            &[("doorbell-gpu", false), ("anyhow", false)],
        );
        let faults = check(&[&hca]);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(
            faults[0].contains("must not know") && faults[1].contains("typed errors"),
            "{faults:?}"
        );
    }

    #[test]
    fn tests_may_look_anywhere_and_strangers_need_a_place() {
        let dev = package("doorbell-hca", &[("doorbell-gpu", true), ("anyhow", true)]);
        assert_eq!(check(&[&dev]), Vec::<String>::new());
        let stranger = package("doorbell-new", &[]);
        assert!(check(&[&stranger])[0].contains("not in the list of layers"));
    }
}
