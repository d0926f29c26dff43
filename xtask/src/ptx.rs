//! `cargo xtask ptx`: builds the kernels to PTX, or checks the committed PTX.
//!
//! rustc's own `nvptx64-nvidia-cuda` target makes it, with `RUSTC_BOOTSTRAP=1` on the pinned stable compiler and a core library built from
//! source (rustup component `rust-src`). A no-op linker stands in for `llvm-bitcode-linker`: fat LTO has made one module by then, and
//! `--emit=asm` of it is the PTX. Comments, build paths and mangled names are taken out, so that equal sources give equal bytes.

mod lint;
mod sources;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};

use crate::cargo::{cargo, output, run as run_command};

/// A committed PTX file.
struct Module {
    file: &'static str,
    /// Cargo feature of doorbell-kernels that selects what is in it.
    feature: Option<&'static str>,
}

impl Module {
    /// The header whose functions must be there, all and no others.
    fn declared<'a>(&self, header: &'a str) -> &'a str {
        if self.feature == Some("device-functions") {
            header
        } else {
            ""
        }
    }
}

/// The kernels, which are loaded at run time; the copier's, which whoever opens a GPU loads; and the functions for CUDA C++ code to link, which
/// nobody loads alone.
const MODULES: [Module; 3] = [
    Module {
        file: "crates/doorbell-kernels/ptx/doorbell.ptx",
        feature: None,
    },
    Module {
        file: "crates/doorbell-kernels/ptx/doorbell_copies.ptx",
        feature: Some("copies"),
    },
    Module {
        file: "crates/doorbell-kernels/ptx/doorbell_device.ptx",
        feature: Some("device-functions"),
    },
];
/// The hashes of the sources they were built from.
const SOURCES: &str = "crates/doorbell-kernels/ptx/doorbell.ptx.sources";
const HEADER: &str = "crates/doorbell-kernels/include/doorbell_device.h";

/// The compiler that the committed PTX comes from: another one writes other PTX.
const RUSTC: &str = "1.95.0";
/// What the PTX must assemble for.
const TARGETS: [&str; 4] = ["sm_80", "sm_90", "sm_100", "sm_120"];
/// JumpThreading is off because it may duplicate barriers (rust-lang/rust#137086).
const FLAGS: &str = "-Ctarget-cpu=sm_80 -Ctarget-feature=+ptx84 -Clinker=true \
                     -Zmir-enable-passes=-JumpThreading -Aunreachable_pub -Aunstable_features -Awarnings";

/// What to do with the PTX.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare with the committed PTX instead of replacing it; lint it; assemble it.
    #[arg(long)]
    check: bool,
    /// Print what each function consists of.
    #[arg(long)]
    stats: bool,
    /// NVIDIA's assembler, or the folder that holds it [default: `DOORBELL_PTXAS`, then `ptxas` on PATH; the PyPI wheel
    /// nvidia-cuda-nvcc-cu12 has one].
    #[arg(long)]
    ptxas: Option<PathBuf>,
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let header = fs::read_to_string(root.join(HEADER))?;
    if !args.check {
        for module in &MODULES {
            let ptx = build(root, module)?;
            lint::check(&ptx, module.declared(&header))?;
            fs::write(root.join(module.file), &ptx)?;
            println!("wrote {} ({} lines)", module.file, ptx.lines().count());
        }
        fs::write(root.join(SOURCES), sources::hashes(root)?)?;
    }
    sources::verify(root, &fs::read_to_string(root.join(SOURCES))?)?;
    println!("the PTX belongs to the sources (hashes)");
    let given = args
        .ptxas
        .clone()
        .or_else(|| env::var_os("DOORBELL_PTXAS").map(PathBuf::from));
    let ptxas = find_ptxas(given.as_deref())?;
    for module in &MODULES {
        let file = module.file;
        let committed =
            fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))?;
        lint::check(&committed, module.declared(&header))?;
        println!("{file}: lint passed");
        if args.stats {
            print!("{}", lint::stats(&committed));
        }
        match (args.check, missing(root)) {
            (false, _) => {}
            (true, None) => {
                compare(file, &committed, &build(root, module)?)?;
                println!("{file}: rebuilt, byte for byte the same");
            }
            (true, Some(why)) => {
                println!("{file}: not rebuilt: {why}; the hashes of the sources stand for it");
            }
        }
        match &ptxas {
            Some(ptxas) => assemble(root, file, ptxas)?,
            None => println!("{file}: not assembled: no ptxas on PATH (give --ptxas)"),
        }
    }
    Ok(())
}

/// Why the PTX cannot be rebuilt here.
fn missing(root: &Path) -> Option<String> {
    let version = output(rustc().arg("--version")).ok()?;
    if !version.contains(RUSTC) {
        return Some(format!(
            "it comes from rustc {RUSTC}, this is {}",
            version.trim()
        ));
    }
    let sysroot = output(rustc().current_dir(root).args(["--print", "sysroot"])).ok()?;
    let core = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core");
    (!core.is_dir()).then(|| {
        "the core library's sources are not installed (rustup component add rust-src)".into()
    })
}

fn rustc() -> Command {
    Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
}

/// Builds a module and returns the PTX, cleaned.
fn build(root: &Path, module: &Module) -> Result<String> {
    if let Some(why) = missing(root) {
        bail!("cannot build the PTX: {why}");
    }
    // A folder of its own, so that other builds neither wait for it nor are rebuilt.
    let base = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let target = base.join("ptx");
    let features: &[&str] = match module.feature {
        Some(feature) => &["--features", feature],
        None => &[],
    };
    let asm = target.join("nvptx64-nvidia-cuda/device/deps/doorbell_kernels.s");
    // Cargo does not know of this output, which both modules share, and would not rebuild for its lack.
    let _ = fs::remove_file(&asm);
    let fingerprints = target.join("nvptx64-nvidia-cuda/device/.fingerprint");
    for entry in fs::read_dir(fingerprints).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with("doorbell-kernels-")
        {
            fs::remove_dir_all(entry.path())?;
        }
    }
    run_command(
        cargo(root)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", FLAGS)
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("CARGO_TARGET_DIR", &target)
            .args([
                "rustc",
                "--quiet",
                "--profile",
                "device",
                "-p",
                "doorbell-kernels",
                "--lib",
            ])
            .args([
                "--crate-type",
                "cdylib",
                "--target",
                "nvptx64-nvidia-cuda",
                "-Zbuild-std=core",
            ])
            .args(features)
            .args(["--", "--emit=asm"]),
    )?;
    let raw = fs::read_to_string(&asm).with_context(|| format!("no PTX at {}", asm.display()))?;
    Ok(clean(&raw))
}

/// Takes out what depends on the machine: comments and mangled names. The name's last part stays, with a number.
fn clean(raw: &str) -> String {
    let mut out = String::from(
        "// Doorbell's device code, built by `cargo xtask ptx` from crates/doorbell-{wire,device,kernels}.\n\
         // Do not edit; a test compares it with its sources.\n",
    );
    let mut names: Vec<(String, String)> = Vec::new();
    for line in raw.lines() {
        let line = line.split("//").next().unwrap_or_default().trim_end();
        if line.is_empty() {
            continue;
        }
        let mut rest = line;
        while let Some(at) = rest.find("_RN") {
            let (before, from) = rest.split_at(at);
            let end = from
                .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$'))
                .unwrap_or(from.len());
            let (symbol, after) = from.split_at(end);
            // Parameters are named after their function.
            let (function, parameter) = match symbol.rfind("_param_") {
                Some(p) => symbol.split_at(p),
                None => (symbol, ""),
            };
            let short = match names.iter().find(|(long, _)| long == function) {
                Some((_, short)) => short.clone(),
                None => {
                    let short = format!("db_local_{}_{}", last_identifier(function), names.len());
                    names.push((function.into(), short.clone()));
                    short
                }
            };
            let _ = write!(out, "{before}{short}{parameter}");
            rest = after;
        }
        out.push_str(rest);
        out.push('\n');
    }
    out
}

/// The last identifier of a mangled (v0) name that is not the crate it was instantiated in: `<length><identifier>`.
fn last_identifier(symbol: &str) -> &str {
    let bytes = symbol.as_bytes();
    let mut found = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        let digits = bytes[i..].iter().take_while(|b| b.is_ascii_digit()).count();
        let length: usize = symbol[i..i + digits].parse().unwrap_or(0);
        let start = i + digits;
        let name = symbol.get(start..start + length).unwrap_or("");
        if length > 1 && name.starts_with(|c: char| c.is_ascii_alphabetic()) {
            found.push(name);
            i = start + length;
        } else {
            i += digits.max(1);
        }
    }
    found
        .iter()
        .rev()
        .copied()
        .find(|n| !n.starts_with("doorbell_"))
        .unwrap_or("f")
}

fn compare(file: &str, committed: &str, built: &str) -> Result<()> {
    if committed == built {
        return Ok(());
    }
    let line = committed
        .lines()
        .zip(built.lines())
        .position(|(a, b)| a != b);
    let line = line.unwrap_or_else(|| committed.lines().count().min(built.lines().count()));
    bail!(
        "{file} is not what the sources give: line {} is {:?}, should be {:?}; run `cargo xtask ptx` and commit",
        line + 1,
        committed.lines().nth(line),
        built.lines().nth(line)
    );
}

/// Assembles a committed file for every target; refuses spills.
fn assemble(root: &Path, file: &str, ptxas: &Path) -> Result<()> {
    let out = env::temp_dir().join(format!("doorbell-ptx-{}.cubin", std::process::id()));
    for target in TARGETS {
        let result = Command::new(ptxas)
            .args(["-v", &format!("-arch={target}"), "-o"])
            .args([&out, &root.join(file)])
            .output()
            .with_context(|| format!("cannot start {}", ptxas.display()))?;
        let text = String::from_utf8_lossy(&result.stderr).into_owned()
            + &String::from_utf8_lossy(&result.stdout);
        ensure!(
            result.status.success(),
            "ptxas -arch={target} refuses {file}:\n{text}"
        );
        if let Some(line) = text.lines().find(|l| {
            l.contains("spill") && !l.contains("0 bytes spill stores, 0 bytes spill loads")
        }) {
            bail!("ptxas -arch={target} spills registers: {line}");
        }
        let most = text
            .lines()
            .filter_map(|l| {
                l.split("Used ")
                    .nth(1)?
                    .split(' ')
                    .next()?
                    .parse::<u32>()
                    .ok()
            })
            .max()
            .unwrap_or(0);
        println!("{file}: assembles for {target}, no spills, at most {most} registers");
    }
    let _ = fs::remove_file(out);
    Ok(())
}

fn find_ptxas(given: Option<&Path>) -> Result<Option<PathBuf>> {
    if let Some(given) = given {
        let file = if given.is_dir() {
            given.join("ptxas")
        } else {
            given.to_path_buf()
        };
        ensure!(file.is_file(), "there is no ptxas at {}", file.display());
        return Ok(Some(file));
    }
    let path = env::var_os("PATH").unwrap_or_default();
    Ok(env::split_paths(&path)
        .map(|p| p.join("ptxas"))
        .find(|p| p.is_file()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleaning_takes_out_comments_and_hashes() {
        let raw = "\t// begin inline asm\n\tcall _RNvMNtCsabc_15doorbell_device4waitE11wait_seldomCsxyz_16doorbell_kernels, ();\n\
                   .param .b64 _RNvMNtCsabc_15doorbell_device4waitE11wait_seldomCsxyz_16doorbell_kernels_param_0\n";
        let out = clean(raw);
        assert!(
            out.contains("\tcall db_local_wait_seldom_0, ();\n"),
            "{out}"
        );
        assert!(
            out.contains(".param .b64 db_local_wait_seldom_0_param_0\n"),
            "{out}"
        );
        assert!(!out.contains("begin"), "{out}");
    }

    #[test]
    fn a_difference_names_its_line() {
        let e = compare("f", "a\nb\n", "a\nc\n").expect_err("they differ");
        assert!(e.to_string().contains("line 2"), "{e}");
        compare("f", "a\n", "a\n").expect("equal");
    }
}
