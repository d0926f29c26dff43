//! Running cargo, and reading what `cargo metadata` says about the workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A `cargo` command in the workspace, with the environment of an outer cargo taken away
/// where it would leak into the inner build.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(root)
        .env_remove("CARGO_MANIFEST_DIR")
        .env_remove("CARGO_PKG_NAME");
    command
}

/// Runs `command` to its end; an exit status other than 0 is an error that shows the command.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    let status = command
        .status()
        .with_context(|| format!("cannot start {shown}"))?;
    if !status.success() {
        bail!("{shown} ended with {status}");
    }
    Ok(())
}

/// Runs `command` and returns its standard output as text.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let out = command
        .output()
        .with_context(|| format!("cannot start {shown}"))?;
    if !out.status.success() {
        bail!(
            "{shown} ended with {}: {}",
            out.status,
            String::from_utf8_lossy(&out.stderr)
        );
    }
    String::from_utf8(out.stdout)
        .with_context(|| format!("{shown} printed something that is not text"))
}

/// What this tool needs to know of one package.
#[derive(Debug, Clone)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    /// The folder of its manifest.
    pub(crate) folder: PathBuf,
    /// SPDX expression, as the manifest has it.
    pub(crate) license: Option<String>,
    /// Direct dependencies: name, and whether it is for tests and examples only.
    pub(crate) dependencies: Vec<(String, bool)>,
}

/// The whole answer of `cargo metadata`.
#[derive(Debug)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) members: Vec<String>,
    pub(crate) target_dir: PathBuf,
    /// Which packages a package is linked with: (user, used), both as ids; builds of tests left out.
    links: Vec<(String, String)>,
}

impl Metadata {
    /// Reads the metadata of the workspace at `root`, with the dependencies that Linux has.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let text = output(cargo(root).args([
            "metadata",
            "--format-version",
            "1",
            "--filter-platform",
            &platform,
        ]))?;
        Self::parse(&serde_json::from_str(&text).context("cargo metadata printed no JSON")?)
    }

    fn parse(json: &Value) -> Result<Self> {
        let text = |v: &Value, key: &str| -> Result<String> {
            v[key]
                .as_str()
                .map(str::to_owned)
                .with_context(|| format!("cargo metadata: a package without {key}"))
        };
        let mut packages = Vec::new();
        for p in json["packages"]
            .as_array()
            .context("cargo metadata: no packages")?
        {
            let mut dependencies = Vec::new();
            for d in p["dependencies"]
                .as_array()
                .context("cargo metadata: no dependencies")?
            {
                dependencies.push((text(d, "name")?, d["kind"].as_str() == Some("dev")));
            }
            packages.push(Package {
                id: text(p, "id")?,
                name: text(p, "name")?,
                version: text(p, "version")?,
                folder: PathBuf::from(text(p, "manifest_path")?)
                    .parent()
                    .map(PathBuf::from)
                    .unwrap_or_default(),
                license: p["license"].as_str().map(str::to_owned),
                dependencies,
            });
        }
        let mut links = Vec::new();
        for node in json["resolve"]["nodes"]
            .as_array()
            .context("cargo metadata: nothing resolved")?
        {
            for dep in node["deps"].as_array().into_iter().flatten() {
                // `kind` is null for an ordinary dependency, else "dev" or "build".
                if dep["dep_kinds"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .any(|k| k["kind"].is_null())
                {
                    links.push((text(node, "id")?, text(dep, "pkg")?));
                }
            }
        }
        let members = json["workspace_members"]
            .as_array()
            .context("cargo metadata: no members")?;
        Ok(Self {
            packages,
            members: members
                .iter()
                .filter_map(|m| m.as_str().map(str::to_owned))
                .collect(),
            target_dir: text(json, "target_directory")?.into(),
            links,
        })
    }

    /// The packages that end up in a build of the members named in `roots`, sorted by name, ours left out.
    pub(crate) fn linked_into(&self, roots: &[&str]) -> Vec<&Package> {
        let mut open: Vec<&str> = self
            .packages
            .iter()
            .filter(|p| roots.contains(&p.name.as_str()))
            .map(|p| p.id.as_str())
            .collect();
        let mut seen: Vec<&str> = Vec::new();
        while let Some(id) = open.pop() {
            if !seen.contains(&id) {
                seen.push(id);
                open.extend(
                    self.links
                        .iter()
                        .filter(|(user, _)| user == id)
                        .map(|(_, used)| used.as_str()),
                );
            }
        }
        let mut linked: Vec<&Package> = self
            .packages
            .iter()
            .filter(|p| seen.contains(&p.id.as_str()) && !self.is_member(p))
            .collect();
        linked.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
        linked
    }

    /// Whether `package` is one of ours.
    pub(crate) fn is_member(&self, package: &Package) -> bool {
        self.members.contains(&package.id)
    }
}
