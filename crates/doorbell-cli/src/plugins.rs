//! The plug-ins that other libraries load: where they are, for which installed library, and the variables that make it load them.

use std::ops::Range;
use std::path::Path;

use doorbell_doctor::{NcclFound, nccl_with_plugin, tree::Live};
use serde::Serialize;

/// What our plug-in for NCCL exports.
const GIN: &[&str] = &["ncclGinPlugin_v14"];

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
    /// Null: its version could not be read.
    fits: Option<bool>,
    why: String,
}

impl Plugin {
    /// One cell: what there is, and what to do.
    pub(crate) fn words(&self) -> String {
        let mut lines = vec![self.why.clone()];
        if self.found.is_empty() {
            lines.push(NOWHERE.to_owned());
        }
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
    vec![nccl(
        nccl_with_plugin(&Live::here(), GIN),
        crate::ship::installed("libnccl-gin-doorbell.so"),
    )]
}

/// Where an NCCL may be that is not found.
const NOWHERE: &str = "no NCCL was found in the loader's folders, LD_LIBRARY_PATH and Python's packages (docs/nccl.md: a wheel's will do); one that is linked \
    into a program is not seen";

fn nccl(found: Vec<NcclFound>, path: Option<impl AsRef<Path>>) -> Plugin {
    let path = path.map(|p| p.as_ref().display().to_string());
    // The object for older releases lies beside the plug-in.
    let beside = |path: &String| Path::new(path).with_file_name(OLDER).display().to_string();
    let older = path.as_ref().map_or(OLDER.to_owned(), beside);
    let all_older = !found.is_empty() && found.iter().all(is_older);
    let found: Vec<Found> = found.into_iter().map(|f| judge(f, &older)).collect();
    let variables = match &path {
        Some(path) => vec![
            match all_older {
                true => ("NCCL_NET_PLUGIN", older),
                false => ("NCCL_GIN_PLUGIN", path.clone()),
            },
            ("NCCL_GIN_TYPE", "3".to_owned()),
            ("NCCL_CUMEM_ENABLE", "1".to_owned()),
            // Kernels that wait must not meet the loading of others, nor share their channel.
            ("CUDA_MODULE_LOADING", "EAGER".to_owned()),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "32".to_owned()),
        ],
        None => Vec::new(),
    };
    let why = match &path {
        Some(path) => format!(
            "{path} gives NCCL's kernels queues without a NIC, rung by `producer` unless DOORBELL_HANDLER says otherwise"
        ),
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

/// Releases that look inside a network plug-in. Those of 2.30 before 2.30.7 are refused: their device code has yet other structures.
const OLD: Range<(u32, u32, u32)> = (2, 28, 7)..(2, 30, 0);
const OLDER: &str = "libnccl-net-doorbell.so";

fn is_older(found: &NcclFound) -> bool {
    found.release.is_some_and(|release| OLD.contains(&release))
}

/// The plug-in, or for older releases that other object.
fn judge(found: NcclFound, older: &str) -> Found {
    let (fits, why) = match is_older(&found) {
        true => (
            Some(true),
            format!(
                "it loads NCCL_NET_PLUGIN={older} instead of NCCL_GIN_PLUGIN, for ranks of one host"
            ),
        ),
        false => (found.loads, found.why),
    };
    Found {
        version: found.version,
        path: found.path,
        fits,
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_apart() {
        for (version, fits) in [
            ("2.30.7", true),
            ("2.32.3", true),
            ("2.30.4", false),
            ("2.28.9", true),
            ("2.29.7", true),
            ("2.28.3", false),
            ("2.27.7", false),
        ] {
            let text = format!("/usr/lib64/libnccl.so.{version}:\n");
            let tree = doorbell_doctor::tree::Manifest::parse(&text).expect("a machine");
            let found = nccl(nccl_with_plugin(&tree, GIN), Some("/x/lib/gin.so")).found;
            assert_eq!(found[0].fits, Some(fits), "{version}: {}", found[0].why);
        }
    }

    /// What to set is for the NCCL that is there; for both kinds, each has its own beside it.
    #[test]
    fn an_older_nccl_is_told_what_it_loads() {
        let to_set = |files: &str| {
            let tree = doorbell_doctor::tree::Manifest::parse(files).expect("a machine");
            nccl(nccl_with_plugin(&tree, GIN), Some("/x/lib/gin.so"))
        };
        let (old, new) = (
            "/usr/lib64/libnccl.so.2.28.9:\n",
            "/usr/lib/libnccl.so.2.30.7:\n",
        );
        let object = "NCCL_NET_PLUGIN=/x/lib/libnccl-net-doorbell.so";
        let plugin = to_set(old);
        assert_eq!(
            plugin.variables[0],
            (
                "NCCL_NET_PLUGIN",
                "/x/lib/libnccl-net-doorbell.so".to_owned()
            )
        );
        assert!(!plugin.words().contains("NCCL_GIN_PLUGIN="));
        let plugin = to_set(&format!("{new}{old}"));
        assert_eq!(plugin.found.len(), 2);
        assert_eq!(plugin.variables[0].0, "NCCL_GIN_PLUGIN");
        assert!(plugin.words().contains(object), "{}", plugin.words());
        assert!(!to_set(new).words().contains("NCCL_NET_PLUGIN"));
    }

    #[test]
    fn a_place_without_the_plugin_says_what_to_do() {
        let text = nccl(Vec::new(), None::<&Path>).words();
        assert!(text.contains("DOORBELL_HOME"), "{text}");
        let text = nccl(Vec::new(), Some("/opt/x/lib/p.so")).words();
        assert!(text.contains("NCCL_GIN_PLUGIN=/opt/x/lib/p.so"), "{text}");
        assert!(text.contains("no NCCL was found"), "{text}");
    }

    /// The page names the same variables, both to set and to choose by.
    #[test]
    fn the_page_has_the_same_variables() {
        let page = include_str!("../../../docs/nccl.md");
        let own = |name: &&str| name.starts_with("DOORBELL_NCCL_");
        let known = doorbell::variables::VARIABLES.iter().map(|(name, _)| *name);
        for name in known.clone().filter(own) {
            assert!(page.contains(&format!("| `{name}` |")), "{name}");
        }
        for row in page.lines().filter(|l| l.starts_with("| `DOORBELL_NCCL_")) {
            assert!(known.clone().any(|name| row.contains(name)), "{row}");
        }
        for (name, value) in nccl(Vec::new(), Some("p")).variables {
            let value = if value == "p" { "" } else { &value };
            assert!(page.contains(&format!("{name}={value}")), "{name}");
        }
    }
}
