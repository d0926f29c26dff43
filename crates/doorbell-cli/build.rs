//! Gives the command the git description of what it was built from (`doorbell --version`,
//! `environment.git` of every result file). A source archive without git builds too: the
//! description is then absent, never guessed.

use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    let text = text.trim();
    (out.status.success() && !text.is_empty()).then(|| text.to_owned())
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The head's log changes with every commit, HEAD itself only with the branch.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"])
        && std::path::Path::new(&log).exists()
    {
        println!("cargo:rerun-if-changed={log}");
    }
    let version = env!("CARGO_PKG_VERSION");
    if let Some(describe) = git(&["describe", "--always", "--tags", "--abbrev=12"]) {
        println!("cargo:rustc-env=DOORBELL_GIT={describe}");
        println!("cargo:rustc-env=DOORBELL_VERSION={version} ({describe})");
    } else {
        println!("cargo:rustc-env=DOORBELL_VERSION={version}");
    }
    if let Ok(target) = std::env::var("TARGET") {
        println!("cargo:rustc-env=DOORBELL_TARGET={target}");
    }
    if let Ok(profile) = std::env::var("PROFILE") {
        println!("cargo:rustc-env=DOORBELL_PROFILE={profile}");
    }
}
