//! `cargo xtask dist`: what is shipped, in one folder.
//!
//! ```text
//! bin/doorbell                 the command
//! lib/libdoorbell.so[.0[.x.y]] the C ABI; SONAME libdoorbell.so.0, symbols bound to versions by doorbell.map
//! lib/libdoorbell.a, lib/pkgconfig/doorbell.pc
//! lib/libnccl-gin-doorbell.so  what NCCL loads
//! lib/libnccl-net-doorbell.so  what NCCL 2.28 and 2.29 load
//! include/                     doorbell.h, doorbell_device.h
//! ptx/                         doorbell.ptx, the kernels; doorbell_device.ptx, the functions that CUDA C++ links
//! share/                       man pages, shell completions, documentation (share/doc/doorbell)
//! licenses/, LICENSE-*         ours, and those of everything linked in
//! ```
//!
//! `--portable` builds for any Linux with glibc 2.28 or later; `--tar` makes one archive of it.
//!
//! rustc gives every cdylib a version script of its own, and a linker takes no second one beside it. So the shared
//! object is linked here, by the C compiler driver that Rust links with anyway, from the static library.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::builder::Builder;
use crate::cargo::{Metadata, output, run as run_command};
use crate::elf::SharedObject;

/// Where to put it, and for which machines.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder to fill; its bin/, lib/, include/, ptx/, share/ and licenses/ are replaced.
    #[arg(long, default_value = "target/dist")]
    pub(crate) out: PathBuf,
    /// Link with zig, for any Linux with glibc 2.28 or later.
    #[arg(long)]
    pub(crate) portable: bool,
    /// Build for another machine (with --portable), for example aarch64-unknown-linux-gnu.
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// Also write doorbell-VERSION-MACHINE-linux.tar.gz beside the folder.
    #[arg(long)]
    pub(crate) tar: bool,
}

/// The major number of the ABI: it changes when a program linked before must not load the library any more.
const SONAME: &str = "libdoorbell.so.0";
/// Where C's side of the project lives.
const C_CRATE: &str = "crates/doorbell-c";
/// The crates whose builds are shipped.
const SHIPPED: &[&str] = &[
    "doorbell-cli",
    "doorbell-c",
    "doorbell-nccl",
    "doorbell-nccl-net",
];
/// Plug-ins that other libraries load: what cargo calls them, what those libraries look for, and the names that they look up.
pub(crate) const PLUGINS: &[(&str, &str, &[&str])] = &[
    (
        "libdoorbell_nccl.so",
        "libnccl-gin-doorbell.so",
        &["ncclGinPlugin_v14", "ncclRmaPlugin_v14"],
    ),
    (
        "libdoorbell_nccl_net.so",
        "libnccl-net-doorbell.so",
        // Rust exports the tables of the crate below, too; newer releases of NCCL find them there.
        &[
            "ncclGinPlugin_v11",
            "ncclNetPlugin_v11",
            "ncclGinPlugin_v14",
            "ncclRmaPlugin_v14",
        ],
    ),
];
/// What a build for this machine may need besides: the library of its compiler.
const COMPILER: &str = "libgcc_s.so.1";
/// What is loaded may need: the system's C library, nothing of a vendor.
const MAY_NEED: &[&str] = &[
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let metadata = Metadata::read(root)?;
    let out = root.join(&args.out);
    let builder = Builder::new(args.portable, args.target.as_deref())?;
    for folder in ["bin", "lib", "include", "ptx", "share", "licenses"] {
        let folder = out.join(folder);
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }

    let built = builder.build(root, &metadata, SHIPPED)?;
    let version = metadata
        .packages
        .iter()
        .find(|p| p.name == "doorbell-c")
        .map(|p| p.version.clone())
        .context("no package doorbell-c in the workspace")?;

    copy(&built.join("doorbell"), &out.join("bin/doorbell"))?;
    copy(
        &built.join("libdoorbell_c.a"),
        &out.join("lib/libdoorbell.a"),
    )?;
    library(root, &out, &version, &builder)?;
    for (built_as, name, _) in PLUGINS {
        copy(&built.join(built_as), &out.join("lib").join(name))?;
    }
    for (from, to) in [
        ("crates/doorbell-c/include/doorbell.h", "include/doorbell.h"),
        (
            "crates/doorbell-kernels/include/doorbell_device.h",
            "include/doorbell_device.h",
        ),
        (
            "crates/doorbell-kernels/ptx/doorbell.ptx",
            "ptx/doorbell.ptx",
        ),
        (
            "crates/doorbell-kernels/ptx/doorbell_device.ptx",
            "ptx/doorbell_device.ptx",
        ),
    ] {
        copy(&root.join(from), &out.join(to))?;
    }
    fs::create_dir_all(out.join("lib/pkgconfig"))?;
    fs::write(out.join("lib/pkgconfig/doorbell.pc"), pkg_config(&version))?;
    licenses(root, &out, &metadata)?;
    documents(root, &out.join(DOCUMENTS))?;

    if builder.runs_here() {
        shares(&out)?;
    }

    check(root, &out, &version, &builder)?;
    println!("dist: {}", out.display());
    if args.tar {
        archive(&out, &version, builder.machine())?;
    }
    Ok(())
}

/// Where the documentation is, as `doorbell path doc` has it.
pub(crate) const DOCUMENTS: &str = "share/doc/doorbell";

/// The pages for users with their pictures, in folders as here, so that their links lead somewhere.
pub(crate) fn documents(root: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.join("docs/images"))?;
    for name in [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "HARDWARE.md",
    ] {
        copy(&root.join(name), &to.join(name))?;
    }
    for (folder, extension) in [("docs", "md"), ("docs/images", "png")] {
        for entry in fs::read_dir(root.join(folder))? {
            let from = entry?.path();
            if let (Some(name), true) = (
                from.file_name(),
                from.extension().is_some_and(|e| e == extension),
            ) {
                copy(&from, &to.join(folder).join(name))?;
            }
        }
    }
    Ok(())
}

/// Man pages and completions, written by the command itself.
fn shares(out: &Path) -> Result<()> {
    let doorbell = || Command::new(out.join("bin/doorbell"));
    let share = out.join("share");
    run_command(
        doorbell()
            .args(["man", "--out"])
            .arg(share.join("man/man1")),
    )?;
    for (shell, file) in [
        ("bash", "bash-completion/completions/doorbell"),
        ("zsh", "zsh/site-functions/_doorbell"),
        ("fish", "fish/vendor_completions.d/doorbell.fish"),
    ] {
        let file = share.join(file);
        fs::create_dir_all(file.parent().unwrap_or(&share))?;
        fs::write(&file, output(doorbell().args(["completions", shell]))?)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// One archive whose only top folder names version and machine.
fn archive(out: &Path, version: &str, machine: &str) -> Result<()> {
    let name = format!("doorbell-{version}-{machine}-linux");
    let folder = out
        .file_name()
        .context("--out has no last part")?
        .to_string_lossy()
        .into_owned();
    let above = out.parent().context("--out has nothing above it")?;
    let file = above.join(format!("{name}.tar.gz"));
    run_command(
        Command::new("tar")
            .args(["--owner=0", "--group=0", "--sort=name", "-C"])
            .arg(above)
            .arg(format!("--transform=flags=r;s,^{folder},{name},"))
            .arg("-czf")
            .arg(&file)
            .arg(&folder),
    )?;
    println!("dist: {}", file.display());
    Ok(())
}

/// Links `lib/libdoorbell.so.VERSION` from the static library, and its two shorter names.
fn library(root: &Path, out: &Path, version: &str, builder: &Builder) -> Result<()> {
    let lib = out.join("lib");
    let file = format!("libdoorbell.so.{version}");
    let map = root.join(C_CRATE).join("doorbell.map");
    run_command(
        builder
            .linker()
            .current_dir(&lib)
            .arg("-shared")
            .args(["-o", &file])
            .arg(format!("-Wl,-soname,{SONAME}"))
            .arg(format!("-Wl,--version-script={}", map.display()))
            .args([
                "-Wl,--whole-archive",
                "libdoorbell.a",
                "-Wl,--no-whole-archive",
            ])
            // Undefined names are an error now, not at the user's first call; relocations are read-only after loading.
            .args([
                "-Wl,--gc-sections",
                "-Wl,--strip-debug",
                "-Wl,--as-needed",
                "-Wl,-z,defs",
                "-Wl,-z,relro",
                "-Wl,-z,now",
                "-Wl,-z,noexecstack",
            ])
            .args([
                "-lgcc_s",
                "-lutil",
                "-lrt",
                "-lpthread",
                "-lm",
                "-ldl",
                "-lc",
            ]),
    )?;
    for name in [SONAME, "libdoorbell.so"] {
        std::os::unix::fs::symlink(&file, lib.join(name))?;
    }
    Ok(())
}

/// Reads a file that is loaded, and checks what it needs of the system, and of which C library.
fn loaded(out: &Path, file: &str, builder: &Builder) -> Result<SharedObject> {
    let so = SharedObject::read(&out.join(file))?;
    for library in so.needed.iter().map(String::as_str) {
        // Not every container has the compiler's library: zig links its own into what is shipped.
        let compiler = library == COMPILER && builder.glibc().is_none();
        ensure!(
            compiler || MAY_NEED.contains(&library),
            "{file} needs {library}: load it at run time instead"
        );
    }
    let (asked, newest) = (so.glibc, builder.glibc().unwrap_or(so.glibc));
    ensure!(
        asked <= newest,
        "{file} asks for GLIBC_{}.{}, a portable build may ask for {}.{} at most",
        asked.0,
        asked.1,
        newest.0,
        newest.1
    );
    Ok(so)
}

/// Checks what can be checked without running it.
fn check(root: &Path, out: &Path, version: &str, builder: &Builder) -> Result<()> {
    loaded(out, "bin/doorbell", builder)?;
    let so = loaded(out, &format!("lib/libdoorbell.so.{version}"), builder)?;
    ensure!(
        so.soname.as_deref() == Some(SONAME),
        "the SONAME is {:?}, not {SONAME}",
        so.soname
    );

    let header = fs::read_to_string(out.join("include/doorbell.h"))?;
    let declared = declared(&header);
    ensure!(
        !declared.is_empty(),
        "doorbell.h declares nothing with DOORBELL_API"
    );
    let exported: BTreeSet<String> = so.exports.keys().cloned().collect();
    differ(
        "doorbell.h declares",
        &declared,
        "libdoorbell.so exports",
        &exported,
    )?;

    let map = fs::read_to_string(root.join(C_CRATE).join("doorbell.map"))?;
    for (symbol, bound) in &so.exports {
        let want =
            version_of(&map, symbol).with_context(|| format!("{symbol} is not in doorbell.map"))?;
        ensure!(
            bound.as_deref() == Some(want.as_str()),
            "{symbol} is bound to {bound:?}, doorbell.map says {want}"
        );
    }

    for (_, name, looked_up) in PLUGINS {
        let so = loaded(out, &format!("lib/{name}"), builder)?;
        let wanted = looked_up.iter().map(|n| (*n).to_owned()).collect();
        let exported = so.exports.keys().cloned().collect();
        differ("what is looked up in it", &wanted, name, &exported)?;
    }

    if builder.runs_here() {
        let said = output(Command::new(out.join("bin/doorbell")).arg("--version"))?;
        // A build from a checkout says which commit instead of the version.
        ensure!(
            said.starts_with("doorbell "),
            "bin/doorbell --version says {said:?}"
        );
        let said = output(Command::new(out.join("bin/doorbell")).args(["path", "c"]))?;
        ensure!(
            Path::new(said.trim()).is_file(),
            "bin/doorbell path c says {said:?}"
        );
    }
    println!(
        "dist: {} symbols of libdoorbell.so are those of doorbell.h, {SONAME}, needs {:?}",
        exported.len(),
        so.needed
    );
    Ok(())
}

fn differ(left: &str, a: &BTreeSet<String>, right: &str, b: &BTreeSet<String>) -> Result<()> {
    let only = |x: &BTreeSet<String>, y: &BTreeSet<String>| {
        x.difference(y).cloned().collect::<Vec<_>>().join(", ")
    };
    if a != b {
        bail!(
            "{left}, beyond the other: [{}]; {right}, beyond the other: [{}]",
            only(a, b),
            only(b, a)
        );
    }
    Ok(())
}

/// The functions that a header declares with `DOORBELL_API`.
fn declared(header: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for piece in header.split(';') {
        let Some(start) = piece.rfind("DOORBELL_API ") else {
            continue;
        };
        let declaration = &piece[start..];
        if piece[..start].trim_end().ends_with("#define") {
            continue;
        }
        if let Some(open) = declaration.find('(') {
            let name = declaration[..open]
                .rsplit(|c: char| !(c.is_alphanumeric() || c == '_'))
                .next();
            names.extend(
                name.filter(|n| n.starts_with("doorbell_"))
                    .map(str::to_owned),
            );
        }
    }
    names
}

/// The version node of `symbol` in a version script of ours: one name a line, `NODE {` opens and `}` closes.
fn version_of(map: &str, symbol: &str) -> Option<String> {
    let mut node = None;
    for line in map.lines().map(str::trim) {
        if let Some(name) = line.strip_suffix('{') {
            node = Some(name.trim().to_owned());
        } else if line.strip_suffix(';') == Some(symbol) {
            return node;
        }
    }
    None
}

fn pkg_config(version: &str) -> String {
    format!(
        "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\n\
         Name: doorbell\nDescription: GPU-initiated networking: queues, memory and their software HCA\nVersion: {version}\n\
         Libs: -L${{libdir}} -ldoorbell\nLibs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc\n\
         Cflags: -I${{includedir}}\n"
    )
}

/// Our licences at the top, those of what is linked in under licenses/.
fn licenses(root: &Path, out: &Path, metadata: &Metadata) -> Result<()> {
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        copy(&root.join(name), &out.join(name))?;
    }
    let mut list = String::from(
        "The programs and libraries of this folder contain the packages below, each under the licence named.\n\
         They also contain the Rust standard library (MIT OR Apache-2.0, https://www.rust-lang.org).\n\n",
    );
    for package in metadata.linked_into(SHIPPED) {
        let name = format!("{}-{}", package.name, package.version);
        list.push_str(&format!(
            "{name}: {}\n",
            package.license.as_deref().unwrap_or("none named")
        ));
        for entry in fs::read_dir(&package.folder)? {
            let entry = entry?;
            let file = entry.file_name().to_string_lossy().into_owned();
            let upper = file.to_uppercase();
            let is_licence = [
                "LICENSE",
                "LICENCE",
                "COPYING",
                "COPYRIGHT",
                "NOTICE",
                "UNLICENSE",
            ]
            .iter()
            .any(|p| upper.starts_with(p));
            if is_licence && entry.file_type()?.is_file() {
                fs::create_dir_all(out.join("licenses").join(&name))?;
                copy(&entry.path(), &out.join("licenses").join(&name).join(file))?;
            }
        }
    }
    fs::write(out.join("licenses/README.txt"), list)?;
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_found_and_macros_are_not() {
        let header = "#define DOORBELL_API __attribute__((visibility(\"default\")))\n\
                      /* doorbell_not_this(); */\nDOORBELL_API const char *doorbell_version(void);\n\
                      DOORBELL_API int doorbell_mr_dereg(\n    doorbell_mr *mr,\n    uint64_t timeout_ns);\n\
                      static inline int doorbell_helper(int x) { return x; }\n";
        let names: Vec<String> = declared(header).into_iter().collect();
        assert_eq!(names, ["doorbell_mr_dereg", "doorbell_version"]);
    }

    #[test]
    fn versions_are_read_from_the_script() {
        let map = "DOORBELL_0.1 {\n  global:\n    doorbell_a;\n  local:\n    *;\n};\n\nDOORBELL_0.2 {\n  global:\n    doorbell_b;\n} DOORBELL_0.1;\n";
        assert_eq!(
            version_of(map, "doorbell_a").as_deref(),
            Some("DOORBELL_0.1")
        );
        assert_eq!(
            version_of(map, "doorbell_b").as_deref(),
            Some("DOORBELL_0.2")
        );
        assert_eq!(version_of(map, "doorbell_c"), None);
    }

    #[test]
    fn a_difference_is_named_on_both_sides() {
        let set = |names: &[&str]| {
            names
                .iter()
                .map(|n| (*n).to_owned())
                .collect::<BTreeSet<_>>()
        };
        assert!(differ("a", &set(&["x"]), "b", &set(&["x"])).is_ok());
        let message = differ("a", &set(&["x", "y"]), "b", &set(&["x", "z"]))
            .expect_err("they differ")
            .to_string();
        assert!(
            message.contains("[y]") && message.contains("[z]"),
            "{message}"
        );
    }
}
