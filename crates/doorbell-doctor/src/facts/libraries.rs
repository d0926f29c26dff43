//! Installed libraries: those of the system, and those that Python wheels carry.
//!
//! Versions come from file names, wheel metadata and headers, last from a text inside the library;
//! nothing is loaded. Folders that are searched: the loader's, usual vendors', `LD_LIBRARY_PATH`, and
//! the packages of the Pythons that `pythons` finds.

use std::collections::{BTreeMap, BTreeSet};

use super::pythons;
use crate::report::Software;
use crate::tree::View;

/// Which library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Nccl,
    Nvshmem,
    Ucx,
    Nixl,
    Doca,
}

/// One installation.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) kind: Kind,
    pub(crate) version: Option<String>,
    pub(crate) source: &'static str,
    /// The library's folder.
    pub(crate) path: String,
    /// Modules and plug-ins beside it: file names without folders.
    pub(crate) modules: Vec<String>,
    /// The modules of a UCX of its own (NIXL's wheel).
    pub(crate) ucx: Vec<String>,
    /// The version of PyTorch in the same folder of packages.
    pub(crate) torch: Option<String>,
}

type Environment = BTreeMap<String, String>;

const TRIPLES: &[&str] = &["x86_64-linux-gnu", "aarch64-linux-gnu"];

/// Folders of libraries, in the order in which they are searched.
pub(super) fn folders(view: View<'_>, environment: &Environment) -> Vec<String> {
    let mut folders: Vec<String> = Vec::new();
    let listed = environment
        .get("LD_LIBRARY_PATH")
        .map(String::as_str)
        .unwrap_or("");
    folders.extend(
        listed
            .split(':')
            .filter(|f| f.starts_with('/'))
            .map(str::to_owned),
    );
    for file in view.list("/etc/ld.so.conf.d", |n| n.ends_with(".conf")) {
        let text = view
            .text(&format!("/etc/ld.so.conf.d/{file}"))
            .unwrap_or_default();
        folders.extend(
            text.lines()
                .map(str::trim)
                .filter(|l| l.starts_with('/'))
                .map(str::to_owned),
        );
    }
    for triple in TRIPLES {
        folders.push(format!("/lib/{triple}"));
        folders.push(format!("/usr/lib/{triple}"));
        folders.push(format!("/opt/mellanox/doca/lib/{triple}"));
        folders.push(format!("/opt/nvidia/nvda_nixl/lib/{triple}"));
        folders.push(format!("/usr/local/nixl/lib/{triple}"));
        folders.extend(["12", "13"].map(|cuda| format!("/usr/lib/{triple}/nvshmem/{cuda}")));
    }
    let fixed = [
        "/lib64",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/lib64",
        "/usr/local/cuda/lib64",
        "/usr/local/ucx/lib",
        "/opt/ucx/lib",
        "/usr/local/nvshmem/lib",
        "/usr/local/nvidia/lib64",
        "/opt/amazon/ofi-nccl/lib",
        "/opt/aws-ofi-nccl/lib",
        "/opt/amazon/efa/lib",
        "/opt/amazon/efa/lib64",
    ];
    folders.extend(fixed.map(str::to_owned));
    let mut seen = BTreeSet::new();
    folders
        .into_iter()
        .filter_map(|f| view.real(&f))
        .filter(|f| seen.insert(f.clone()))
        .collect()
}

/// Libraries that decide gates, wherever they are.
pub(super) fn software(view: View<'_>, folders: &[String]) -> Vec<Software> {
    const NAMES: &[&str] = &[
        "libcuda.so.1",
        "libnvidia-ml.so.1",
        "libibverbs.so.1",
        "libmlx5.so.1",
        "libefa.so.1",
        "libgdrapi.so.2",
        "libfabric.so.1",
        "libdoca_common.so.2",
        "libdoca_verbs.so.2",
        "libdoca_gpunetio.so.2",
        "libnccl-net.so",
        "libnccl-gin.so",
        "libnccl-rma.so",
    ];
    NAMES
        .iter()
        .map(|name| {
            let path = folders
                .iter()
                .map(|f| format!("{f}/{name}"))
                .find(|p| view.exists(p));
            let version = path.as_ref().and_then(|p| file_version(&view.real(p)?));
            Software {
                name: (*name).to_owned(),
                path,
                version,
            }
        })
        .collect()
}

/// `libnccl.so.2.30.7` is 2.30.7; one number behind `.so.` is an ABI, not a version.
fn file_version(path: &str) -> Option<String> {
    let (_, version) = path.rsplit_once(".so.")?;
    (version.contains('.') && version.starts_with(|c: char| c.is_ascii_digit()))
        .then(|| version.to_owned())
}

pub(super) fn found(view: View<'_>, folders: &[String], environment: &Environment) -> Vec<Found> {
    let mut all = Vec::new();
    for site in pythons::sites(view, environment) {
        let before = all.len();
        wheels(view, &site, &mut all);
        if all.len() > before {
            let torch = pythons::torch(view, &site);
            for found in &mut all[before..] {
                found.torch.clone_from(&torch);
            }
        }
    }
    // A wheel's folder may be one of the loader's too (`LD_LIBRARY_PATH`): what is in it is not there twice.
    let place = |path: &str| view.real(path).unwrap_or_else(|| path.to_owned());
    let wheels: BTreeSet<String> = all.iter().map(|f| place(&f.path)).collect();
    for folder in folders.iter().filter(|f| !wheels.contains(&place(f))) {
        system(view, folder, &mut all);
    }
    all.sort_by_key(|f| f.kind);
    all
}

fn plain(kind: Kind, version: Option<String>, source: &'static str, path: String) -> Found {
    Found {
        kind,
        version,
        source,
        path,
        modules: Vec::new(),
        ucx: Vec::new(),
        torch: None,
    }
}

fn wheels(view: View<'_>, site: &str, all: &mut Vec<Found>) {
    // `nvidia_nccl_cu13-2.32.3.dist-info`
    let infos = view.list(site, |n| {
        let ours = ["nvidia_nccl_", "nvidia_nvshmem_", "libucx_", "nixl"];
        n.ends_with(".dist-info") && ours.iter().any(|o| n.starts_with(o))
    });
    for info in &infos {
        let Some((package, version)) = info.trim_end_matches(".dist-info").split_once('-') else {
            continue;
        };
        let version = Some(version.to_owned());
        if package.starts_with("nvidia_nccl_") {
            all.push(plain(
                Kind::Nccl,
                version,
                "wheel",
                format!("{site}/nvidia/nccl/lib"),
            ));
        } else if package.starts_with("nvidia_nvshmem_") {
            let path = format!("{site}/nvidia/nvshmem/lib");
            let modules = transports(view, &path);
            all.push(Found {
                modules,
                ..plain(Kind::Nvshmem, version, "wheel", path)
            });
        } else if package.starts_with("libucx_") {
            let path = format!("{site}/libucx/lib");
            let modules = view.list(&format!("{path}/ucx"), |n| {
                n.starts_with("libuct_") && n.contains(".so")
            });
            all.push(Found {
                modules,
                ..plain(Kind::Ucx, version, "wheel", path)
            });
        } else if package.starts_with("nixl_cu") {
            let plugins = format!("{site}/.{package}.mesonpy.libs/plugins");
            let modules = view.list(&plugins, |n| n.starts_with("libplugin_"));
            let libs = format!("{site}/{package}.libs");
            let ucx = view.list(&format!("{libs}/ucx"), |n| {
                n.starts_with("libuct_") && n.contains(".so")
            });
            all.push(Found {
                modules,
                ucx,
                ..plain(Kind::Nixl, version, "wheel", plugins)
            });
        }
    }
}

fn transports(view: View<'_>, folder: &str) -> Vec<String> {
    view.list(folder, |n| {
        n.starts_with("nvshmem_transport_") && n.contains(".so")
    })
}

fn system(view: View<'_>, folder: &str, all: &mut Vec<Found>) {
    let names = view.list(folder, |n| {
        let ours = [
            "libnccl.so",
            "libnvshmem_host.so",
            "libucp.so",
            "libnixl.so",
            "libdoca_gpunetio.so",
        ];
        ours.iter().any(|o| n.starts_with(o))
    });
    let mut done: BTreeSet<&str> = BTreeSet::new();
    for name in &names {
        let Some(stem) = name.split(".so").next() else {
            continue;
        };
        if !done.insert(stem) {
            continue;
        }
        // The longest name of a library is the file itself: libnccl.so.2.30.7.
        let longest = names
            .iter()
            .filter(|n| n.starts_with(&format!("{stem}.so")))
            .max_by_key(|n| n.len());
        let file = format!("{folder}/{}", longest.unwrap_or(name));
        let real = view.real(&file).unwrap_or_else(|| file.clone());
        let from_name = file_version(&real);
        let path = folder.to_owned();
        match stem {
            "libnccl" => {
                let version = from_name.or_else(|| view.elf(&file)?.version);
                all.push(plain(Kind::Nccl, version, "system", path));
            }
            "libnvshmem_host" => {
                let version = from_name
                    .filter(|v| v.matches('.').count() > 1)
                    .or_else(|| view.elf(&file)?.version);
                let modules = transports(view, folder);
                all.push(Found {
                    modules,
                    ..plain(Kind::Nvshmem, version, "system", path)
                });
            }
            "libucp" => {
                let version = ["pkgconfig/ucx.pc", "cmake/ucx/ucx-config-version.cmake"]
                    .iter()
                    .find_map(|f| ucx_version(&view.text(&format!("{folder}/{f}"))?))
                    .or_else(|| view.elf(&file)?.version);
                let modules = view.list(&format!("{folder}/ucx"), |n| {
                    n.starts_with("libuct_") && n.contains(".so")
                });
                all.push(Found {
                    modules,
                    ..plain(Kind::Ucx, version, "system", path)
                });
            }
            "libnixl" => {
                let modules = view.list(&format!("{folder}/plugins"), |n| {
                    n.starts_with("libplugin_")
                });
                all.push(Found {
                    modules,
                    ..plain(Kind::Nixl, from_name, "system", path)
                });
            }
            _ => all.push(plain(Kind::Doca, from_name, "system", path)),
        }
    }
}

/// `Version: 1.18.0` of a pkg-config file, `set(PACKAGE_VERSION 1.18.0)` of CMake's.
fn ucx_version(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let line = line.trim();
        let version = line
            .strip_prefix("Version:")
            .or_else(|| line.strip_prefix("set(PACKAGE_VERSION"))?;
        Some(version.trim().trim_matches(['"', ')']).to_owned())
    })
}

/// Plug-in libraries for NCCL that are found by their usual names or by the environment.
pub(crate) fn nccl_plugins(
    view: View<'_>,
    folders: &[String],
    software: &[Software],
    environment: &Environment,
) -> Vec<(String, Vec<String>)> {
    let mut files: Vec<String> = software
        .iter()
        .filter(|s| s.name.starts_with("libnccl-"))
        .filter_map(|s| s.path.clone())
        .collect();
    for kind in ["gin", "rma", "net"] {
        let variable = format!("NCCL_{}_PLUGIN", kind.to_ascii_uppercase());
        let listed = environment.get(&variable).map(String::as_str).unwrap_or("");
        for name in listed.split(',').filter(|n| !n.is_empty()) {
            files.extend(plugin_file(view, folders, kind, name));
        }
    }
    files.sort();
    files.dedup();
    files
        .into_iter()
        .filter_map(|f| Some((f.clone(), view.elf(&f)?.exports)))
        .collect()
}

/// What a name in one of NCCL's plug-in variables stands for: a path, a library that the loader finds, or the middle of
/// `libnccl-gin-NAME.so`.
fn plugin_file(view: View<'_>, folders: &[String], kind: &str, name: &str) -> Option<String> {
    if name.contains('/') {
        return name.starts_with('/').then(|| name.to_owned());
    }
    [name.to_owned(), format!("libnccl-{kind}-{name}.so")]
        .iter()
        .flat_map(|file| folders.iter().map(move |f| format!("{f}/{file}")))
        .find(|path| view.exists(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Manifest;

    #[test]
    fn versions_come_from_names_and_metadata() {
        assert_eq!(
            file_version("/l/libnccl.so.2.30.7").as_deref(),
            Some("2.30.7")
        );
        assert_eq!(file_version("/l/libnccl.so.2"), None);
        assert_eq!(
            ucx_version("Name: ucx\nVersion: 1.18.0\n").as_deref(),
            Some("1.18.0")
        );
        assert_eq!(
            ucx_version("set(PACKAGE_VERSION 1.22.0)").as_deref(),
            Some("1.22.0")
        );
    }

    #[test]
    fn plugins_are_found_by_path_by_name_and_by_the_middle_of_their_name() {
        let tree = Manifest::parse("/usr/lib64/libnccl-gin-x.so:\n/usr/lib64/mine.so:\n").unwrap();
        let folders = ["/usr/lib64".to_owned()];
        let file = |name: &str| plugin_file(View(&tree), &folders, "gin", name);
        assert_eq!(file("x").as_deref(), Some("/usr/lib64/libnccl-gin-x.so"));
        assert_eq!(file("mine.so").as_deref(), Some("/usr/lib64/mine.so"));
        assert_eq!(file("/p/q.so").as_deref(), Some("/p/q.so"));
        assert_eq!((file("none"), file("a/b.so")), (None, None));
    }

    #[test]
    fn wheels_and_system_libraries_are_told_apart_and_each_counted_once() {
        let tree = Manifest::parse(
            "/usr/lib/x86_64-linux-gnu/libnccl.so -> libnccl.so.2\n\
             /usr/lib/x86_64-linux-gnu/libnccl.so.2 -> libnccl.so.2.28.9\n\
             /usr/lib/x86_64-linux-gnu/libnccl.so.2.28.9:\n\
             /usr/lib/python3.12/\n\
             /usr/local/lib/python3.12/dist-packages/nvidia_nccl_cu13-2.32.3.dist-info/\n\
             /lib -> usr/lib\n",
        )
        .unwrap();
        let (view, environment) = (View(&tree), Environment::new());
        let found = found(view, &folders(view, &environment), &environment);
        let seen: Vec<_> = found
            .iter()
            .map(|f| (f.source, f.version.as_deref()))
            .collect();
        assert_eq!(
            seen,
            [("wheel", Some("2.32.3")), ("system", Some("2.28.9"))]
        );
    }
}
