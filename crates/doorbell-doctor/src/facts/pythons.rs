//! Where Pythons keep their packages.
//!
//! No interpreter is run. One that is in `PATH` is asked by its place: `PREFIX/bin/python3` has its packages in
//! `PREFIX/lib/python3.*/site-packages`; of a virtual environment, whose interpreter is a link out of it, that is the environment's own
//! folder, and `pyvenv.cfg` says whether the packages below it count too.

use std::collections::{BTreeMap, BTreeSet};

use crate::tree::View;

/// Interpreters by their names in a `bin` folder.
const NAMES: [&str; 2] = ["python3", "python"];

/// Every folder of packages of the interpreters that are in `PATH`, in the environment or in a usual place; first those that a user
/// who types `python3` gets.
pub(super) fn sites(view: View<'_>, environment: &BTreeMap<String, String>) -> Vec<String> {
    let named = |name: &str| environment.get(name).map(String::as_str).unwrap_or("");
    let mut sites: Vec<String> = named("PYTHONPATH")
        .split(':')
        .filter(|p| p.starts_with('/'))
        .map(str::to_owned)
        .collect();
    for prefix in prefixes(view, environment) {
        let lib = format!("{}/lib", prefix.trim_end_matches('/'));
        for python in view.list(&lib, |n| n.starts_with("python3")) {
            sites.push(format!("{lib}/{python}/site-packages"));
            sites.push(format!("{lib}/{python}/dist-packages"));
        }
    }
    let mut seen = BTreeSet::new();
    sites
        .into_iter()
        .filter_map(|s| view.real(&s))
        .filter(|s| seen.insert(s.clone()))
        .collect()
}

fn prefixes(view: View<'_>, environment: &BTreeMap<String, String>) -> Vec<String> {
    let named = |name: &str| environment.get(name).cloned();
    let mut prefixes: Vec<String> = named("VIRTUAL_ENV").into_iter().collect();
    for bin in named("PATH").unwrap_or_default().split(':') {
        if bin.starts_with('/') {
            of_bin(view, bin.trim_end_matches('/'), &mut prefixes);
        }
    }
    prefixes.extend(named("CONDA_PREFIX"));
    let fixed = ["/usr", "/usr/local", "/opt/conda", "/opt/venv"];
    prefixes.extend(fixed.map(str::to_owned));
    // Other people's homes are not looked into.
    if let Some(home) = named("HOME") {
        prefixes.extend(
            [".local", "miniconda3", "miniforge3", "anaconda3"].map(|d| format!("{home}/{d}")),
        );
        for versions in [
            ".pyenv/versions",
            ".local/share/uv/python",
            "miniconda3/envs",
            "miniforge3/envs",
        ] {
            let versions = format!("{home}/{versions}");
            let all = view.list(&versions, |_| true);
            prefixes.extend(all.into_iter().map(|v| format!("{versions}/{v}")));
        }
    }
    prefixes
}

/// The prefixes of the interpreter in a folder of programs.
fn of_bin(view: View<'_>, bin: &str, prefixes: &mut Vec<String>) {
    let Some(program) = NAMES
        .iter()
        .find_map(|name| view.real(&format!("{bin}/{name}")))
    else {
        return;
    };
    let Some((own, _)) = bin.rsplit_once('/') else {
        return;
    };
    prefixes.push(own.to_owned());
    // A link from elsewhere: the packages are where the program really is, unless this is an environment of its own.
    let alone = view
        .text(&format!("{own}/pyvenv.cfg"))
        .is_some_and(|text| !sees_below(&text));
    if !alone && let Some((real, _)) = program.rsplit_once("/bin/") {
        prefixes.push(real.to_owned());
    }
}

/// Does a virtual environment see the packages of the interpreter that it was made with?
fn sees_below(config: &str) -> bool {
    config
        .lines()
        .filter_map(|l| l.split_once('='))
        .any(|(k, v)| {
            k.trim()
                .eq_ignore_ascii_case("include-system-site-packages")
                && v.trim().eq_ignore_ascii_case("true")
        })
}

/// The version of PyTorch in a folder of packages.
pub(super) fn torch(view: View<'_>, site: &str) -> Option<String> {
    let infos = view.list(site, |n| {
        n.starts_with("torch-") && n.ends_with(".dist-info")
    });
    let name = infos.first()?.strip_suffix(".dist-info")?;
    Some(name.strip_prefix("torch-")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Manifest;

    fn found(text: &str, path: &str) -> Vec<String> {
        let tree = Manifest::parse(text).unwrap();
        let environment = [("PATH".to_owned(), path.to_owned())].into();
        sites(View(&tree), &environment)
    }

    const BASE: &str = "/usr/bin/python3 -> python3.12\n/usr/bin/python3.12:\n/usr/lib/python3.12/site-packages/\n";

    #[test]
    fn an_environment_in_the_path_is_found_and_comes_first() {
        let text = format!(
            "{BASE}/opt/x/.venv/bin/python3 -> /usr/bin/python3\n/opt/x/.venv/lib/python3.12/site-packages/\n/opt/x/.venv/pyvenv.cfg: home = /usr/bin\n"
        );
        let sites = found(&text, "/opt/x/.venv/bin:/usr/bin");
        assert_eq!(
            sites,
            [
                "/opt/x/.venv/lib/python3.12/site-packages",
                "/usr/lib/python3.12/site-packages"
            ]
        );
        assert!(!found(&text, "/usr/bin").iter().any(|s| s.contains(".venv")));
    }

    #[test]
    fn a_link_in_the_path_leads_to_the_interpreters_own_packages() {
        let text = "/usr/local/bin/python3 -> /opt/py/3.13/bin/python3.13\n/opt/py/3.13/bin/python3.13:\n/opt/py/3.13/lib/python3.13/site-packages/\n";
        assert_eq!(
            found(text, "/usr/local/bin"),
            ["/opt/py/3.13/lib/python3.13/site-packages"]
        );
        // An environment keeps to itself, unless it was made otherwise.
        for (config, seen) in [
            ("home = /opt/py/3.13/bin", false),
            ("include-system-site-packages = true", true),
        ] {
            let text = format!(
                "{text}/v/bin/python -> /opt/py/3.13/bin/python3.13\n/v/pyvenv.cfg: {config}\n"
            );
            assert_eq!(found(&text, "/v/bin").len(), usize::from(seen), "{config}");
        }
    }

    #[test]
    fn nonsense_in_the_path_is_passed_over() {
        assert_eq!(
            found("/bin/python3:\n", "::relative:/:/bin:/nowhere/bin"),
            [""; 0]
        );
    }
}
