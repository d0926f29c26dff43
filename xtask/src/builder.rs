//! How shipped files are built: with the machine's own C library, or (`--portable`) against an old one, so that the result runs
//! on every Linux of the last years. The portable build links with zig, which carries the symbol lists of old C libraries:
//! `pip install ziglang cargo-zigbuild`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::cargo::{Metadata, cargo, output, run as run_command};

/// The C library of a portable build: that of RHEL 8 and Debian 10, and the one that manylinux_2_28 names.
pub(crate) const GLIBC: (u32, u32) = (2, 28);

/// What is shipped has names for a backtrace, and no line tables: they are most of its size.
pub(crate) const SHIPPED_PROFILE: [(&str, &str); 2] = [
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_STRIP", "debuginfo"),
];

/// One way to build.
pub(crate) enum Builder {
    /// The machine's own linker and C library.
    Native,
    /// zig, for a target triple such as `x86_64-unknown-linux-gnu`.
    Portable { triple: String, python: String },
}

impl Builder {
    /// `portable` asks for the second kind; `target` names another machine than this one.
    pub(crate) fn new(portable: bool, target: Option<&str>) -> Result<Self> {
        let own = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        if !portable {
            if let Some(target) = target.filter(|t| *t != own) {
                bail!(
                    "--target {target}: only a portable build can be made for another machine; add --portable"
                );
            }
            return Ok(Self::Native);
        }
        let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
        let zig = output(Command::new(&python).args(["-m", "ziglang", "version"]));
        let zigbuild = output(Command::new("cargo-zigbuild").arg("--version"));
        if zig.is_err() || zigbuild.is_err() {
            bail!(
                "a portable build needs zig and cargo-zigbuild: `{python} -m pip install ziglang cargo-zigbuild` \
                 (in a virtual environment, with its bin/ in PATH)"
            );
        }
        Ok(Self::Portable {
            triple: target.map_or(own, str::to_owned),
            python,
        })
    }

    /// Builds the packages in release and returns the folder that has the results.
    pub(crate) fn build(
        &self,
        root: &Path,
        metadata: &Metadata,
        packages: &[&str],
    ) -> Result<PathBuf> {
        let mut build = cargo(root);
        let folder = match self {
            Self::Native => {
                build.arg("build");
                metadata.target_dir.join("release")
            }
            Self::Portable { triple, .. } => {
                build.args(["zigbuild", "--target"]);
                build.arg(format!("{triple}.{}.{}", GLIBC.0, GLIBC.1));
                metadata.target_dir.join(triple).join("release")
            }
        };
        if let Self::Portable { .. } = self {
            build.envs(SHIPPED_PROFILE);
        }
        build.args(["--release", "--locked"]);
        for package in packages {
            build.args(["--package", package]);
        }
        run_command(&mut build)?;
        Ok(folder)
    }

    /// The C compiler driver that links.
    pub(crate) fn linker(&self) -> Command {
        match self {
            Self::Native => Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into())),
            Self::Portable { triple, python } => {
                let mut zig = Command::new(python);
                let machine = triple.split('-').next().unwrap_or("x86_64");
                zig.args(["-m", "ziglang", "cc", "-target"]);
                zig.arg(format!("{machine}-linux-gnu.{}.{}", GLIBC.0, GLIBC.1));
                zig
            }
        }
    }

    /// Can this machine run what was built?
    pub(crate) fn runs_here(&self) -> bool {
        match self {
            Self::Native => true,
            Self::Portable { triple, .. } => triple.starts_with(std::env::consts::ARCH),
        }
    }

    /// The machine, as archives and wheels name it.
    pub(crate) fn machine(&self) -> &str {
        match self {
            Self::Native => std::env::consts::ARCH,
            Self::Portable { triple, .. } => triple.split('-').next().unwrap_or("unknown"),
        }
    }

    /// The newest C library that the result may ask for.
    pub(crate) fn glibc(&self) -> Option<(u32, u32)> {
        matches!(self, Self::Portable { .. }).then_some(GLIBC)
    }
}
