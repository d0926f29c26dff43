//! What an installed `doorbell` says about its own installation: where its files are, shell completions, man pages.
//! Two layouts are known: the tarball (`bin/`, `lib/`, `include/`, `ptx/` side by side) and the Python wheel (the command among
//! the scripts, the rest inside the package `doorbell`). `DOORBELL_HOME` names any other.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs, ManArgs, PathArgs, Piece};
use crate::{Ended, WrongArguments};

/// The file that every installation has, by which one is recognised.
const MARK: &str = "lib/libdoorbell.so.0";

/// The variable that names it.
const HOME: &str = "DOORBELL_HOME";

/// What is wrong with [`HOME`], if it says anything.
pub(crate) fn check_home() -> Result<()> {
    match std::env::var_os(HOME).filter(|h| !h.is_empty()) {
        Some(_) => home().map(drop),
        None => Ok(()),
    }
}

/// The folder that has `lib/`, `include/` and `ptx/`.
fn home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os(HOME).filter(|h| !h.is_empty()) {
        let home = PathBuf::from(home);
        if home.join(MARK).exists() {
            return Ok(home);
        }
        return Err(anyhow::anyhow!(
            "DOORBELL_HOME={}: there is no {MARK} in it; name the folder of an unpacked distribution, or unset it",
            home.display()
        )
        .context(WrongArguments));
    }
    let exe = std::env::current_exe().context("where this command is")?;
    let prefix = exe.parent().and_then(Path::parent);
    prefix.and_then(find).with_context(|| {
        format!(
            "{} is not part of an installation (no {MARK} beside it, no Python package under it): \
             use the tarball or the wheel, run `cargo xtask dist`, or name the folder with DOORBELL_HOME",
            exe.display()
        )
    })
}

/// A file of `lib/` of this installation, if it is one and has it.
pub(crate) fn installed(file: &str) -> Option<PathBuf> {
    let path = home().ok()?.join("lib").join(file);
    path.exists().then_some(path)
}

/// The installation whose command is in `prefix/bin`.
fn find(prefix: &Path) -> Option<PathBuf> {
    if prefix.join(MARK).exists() {
        return Some(prefix.to_owned());
    }
    // A wheel: PREFIX/bin/doorbell and PREFIX/lib/pythonX.Y/{site,dist}-packages/doorbell.
    let mut pythons: Vec<PathBuf> = std::fs::read_dir(prefix.join("lib"))
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("python3"))
        })
        .collect();
    pythons.sort();
    pythons.iter().rev().find_map(|python| {
        ["site-packages/doorbell", "dist-packages/doorbell"]
            .map(|package| python.join(package))
            .into_iter()
            .find(|package| package.join(MARK).exists())
    })
}

/// `doorbell path PIECE`: one line that a script can use.
pub(crate) fn path(args: &PathArgs) -> Result<Ended> {
    let home = home()?;
    let found = match args.piece {
        Piece::Home => home,
        Piece::C => home.join("lib/libdoorbell.so.0"),
        Piece::Lib => home.join("lib"),
        Piece::Include => home.join("include"),
        Piece::Ptx => home.join("ptx"),
        Piece::Doc => home.join("share/doc/doorbell/docs"),
        Piece::Nccl => plugin(&home, "NCCL", "libnccl-gin-doorbell.so")?,
        Piece::Nvshmem => plugin(&home, "NVSHMEM", "nvshmem_transport_doorbell.so")?,
        Piece::Nixl => plugin(&home, "NIXL", "libplugin_DOORBELL.so")?,
    };
    if !found.exists() {
        bail!(
            "{}: it should be part of this installation and is not there; install it again",
            found.display()
        );
    }
    print_line(&found.display().to_string())?;
    Ok(Ended::Well)
}

/// A plug-in that not every version has: said plainly, so that a script does not set a variable to nothing.
fn plugin(home: &Path, library: &str, file: &str) -> Result<PathBuf> {
    let path = home.join("lib").join(file);
    if !path.exists() {
        bail!(
            "doorbell {} has no plug-in for {library} ({file} is not in {}): its own paths are what `doorbell doctor` shows",
            crate::VERSION,
            home.join("lib").display()
        );
    }
    Ok(path)
}

/// `doorbell completions SHELL`: the script, on standard output.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<Ended> {
    let mut script = Vec::new();
    clap_complete::generate(
        args.shell,
        &mut hinted(Cli::command()),
        "doorbell",
        &mut script,
    );
    crate::out::out().write_all(&script)?;
    Ok(Ended::Well)
}

/// With what each value is: a shell completes the names of files only where the value is a path.
fn hinted(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| {
            let unknown = arg.get_value_hint() == clap::ValueHint::Unknown;
            match arg.get_action().takes_values() && unknown {
                true => arg.value_hint(clap::ValueHint::Other),
                false => arg,
            }
        })
        .mut_subcommands(hinted)
}

/// `doorbell man`: the page of the command on standard output, or the pages of all of them into a folder.
pub(crate) fn man(args: &ManArgs) -> Result<Ended> {
    let command = Cli::command();
    let Some(folder) = &args.out else {
        crate::man::write(command, &mut crate::out::out())?;
        return Ok(Ended::Well);
    };
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    crate::man::all(command, folder)
        .with_context(|| format!("cannot write into {}", folder.display()))?;
    Ok(Ended::Well)
}

fn print_line(line: &str) -> Result<()> {
    crate::out::say(&format!("{line}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, b"").expect("written");
    }

    #[test]
    fn the_tarball_is_found_beside_its_command() {
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(find(dir.path()), None, "nothing there");
        touch(&dir.path().join(MARK));
        assert_eq!(find(dir.path()).as_deref(), Some(dir.path()));
    }

    #[test]
    fn the_wheel_is_found_under_its_prefix() {
        for packages in ["site-packages", "dist-packages"] {
            let dir = tempfile::tempdir().expect("a folder");
            touch(&dir.path().join("lib/python3.9/site-packages/other/x"));
            assert_eq!(find(dir.path()), None, "a Python without us");
            let package = dir
                .path()
                .join("lib/python3.11")
                .join(packages)
                .join("doorbell");
            touch(&package.join(MARK));
            assert_eq!(find(dir.path()), Some(package));
        }
    }

    #[test]
    fn completions_know_values_and_no_hidden_commands() {
        let mut script = Vec::new();
        let mut command = hinted(Cli::command());
        clap_complete::generate(
            clap_complete::Shell::Bash,
            &mut command,
            "doorbell",
            &mut script,
        );
        let script = String::from_utf8(script).expect("text");
        assert!(
            !script.contains("doorbell,peer)"),
            "a command that perf starts"
        );
        for (option, wanted) in [
            ("--link)", "loopback shm roce verbs"),
            ("--gpu)", "auto host cuda"),
            ("--trace)", "compgen -f"),
            ("--size)", "COMPREPLY=(\"${cur}\")"),
        ] {
            let after = script.split(option).nth(1).expect(option);
            let own = after.split(";;").next().expect("it ends");
            assert!(own.contains(wanted), "{option} {own}");
        }
    }

    #[test]
    fn a_missing_plugin_is_named() {
        let dir = tempfile::tempdir().expect("a folder");
        let error = plugin(dir.path(), "NCCL", "libnccl-gin-doorbell.so").expect_err("not there");
        let text = error.to_string();
        assert!(
            text.contains("NCCL") && text.contains("libnccl-gin-doorbell.so"),
            "{text}"
        );
    }
}
