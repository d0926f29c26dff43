//! NCCL: which GIN backend a communicator gets.
//!
//! NCCL asks external plug-ins first, then its own GDAKI (mlx5 queues that the GPU rings), then the
//! proxy (the GPU writes descriptors, a CPU thread posts). The first that initialises is taken.

use super::gates::{
    devices, doorbell, gpu, gpu_direct, gpu_memory, libcuda, libverbs, mlx5, no, node, pass,
    reliable, said, setting, verbs,
};
use super::{library, path, torch_note, variables, version};
use crate::facts::{Facts, Found};
use crate::report::{Gate, GateState, Library, Path, Who};

const GIN: &str = "NCCL 2.30.7 src/plugin/gin.cc";
const IB: &str = "NCCL 2.30.7 src/transport/net_ib/gin.cc";
const NET_IB: &str = "NCCL 2.30.7 src/transport/net_ib/init.cc";
const INIT: &str = "NCCL 2.30.7 src/init.cc";
const CUMEM: &str = "NCCL 2.30.7 src/misc/cudawrap.cc";

const GDAKI: &str = "3";
const PROXY: &str = "2";

pub(super) fn judge(facts: &Facts, found: &Found) -> Library {
    let known = found.version.as_deref().and_then(version);
    let mut paths = Vec::new();
    if let Some(plugin) = external(facts, known) {
        paths.push(plugin);
    }
    let gdaki = gdaki(facts, known);
    let mut by_gpu = gdaki.clone();
    by_gpu.push(doorbell(facts));
    paths.push(path("GIN GDAKI, the GPU rings", Who::Native, by_gpu));
    paths.push(path("GIN GDAKI, a CPU thread rings", Who::Assisted, gdaki));
    paths.push(path(
        "GIN proxy over InfiniBand verbs",
        Who::Assisted,
        proxy(facts, known),
    ));
    if known.is_none_or(|v| v >= (2, 32, 0)) {
        paths.push(path(
            "GIN proxy over sockets",
            Who::Assisted,
            sockets(facts),
        ));
    }
    paths.push(path(
        "collectives only, from the host",
        Who::Host,
        Vec::new(),
    ));
    let mut library = library("nccl", found, paths);
    library.notes.extend(torch_note(facts, found));
    if let Some(cross) = facts.variable("NCCL_CROSS_NIC").filter(|v| *v == "0") {
        library.notes.push(format!(
            "NCCL_CROSS_NIC={cross}: GIN connects rails only, not every pair of ranks ({INIT})."
        ));
    }
    if devices(facts, "efa").next().is_some() && external(facts, known).is_none() {
        library.notes.push(
            "EFA has no queues that NCCL itself drives: the aws-ofi-nccl plug-in brings GIN for it (libnccl-net.so that exports ncclGinPlugin or ncclRmaPlugin).".into(),
        );
    }
    library.variables = variables(
        facts,
        &[
            ("NCCL_GIN_TYPE", "-1 any, 2 proxy, 3 GDAKI, 4 GPI, 5 EFA"),
            ("NCCL_GIN_PLUGIN", "external plug-ins that are asked first"),
            ("NCCL_GIN_ENABLE", "0 refuses GIN when it is first used"),
            ("NCCL_GIN_GDAKI_NIC_HANDLER", "0 chooses who rings"),
            ("NCCL_IB_DISABLE", "1 hides every RDMA device"),
            ("NCCL_CUMEM_ENABLE", "0 takes symmetric windows away"),
        ],
    );
    library
}

/// An installation of NCCL, and what it makes of a GIN plug-in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclFound {
    /// Its version, when it could be read.
    pub version: Option<String>,
    /// The same as numbers.
    pub release: Option<(u32, u32, u32)>,
    /// The folder of the library.
    pub path: String,
    /// It loads the plug-in; null: its version is not known.
    pub loads: Option<bool>,
    /// Why, or what to do.
    pub why: String,
}

pub(super) fn with_plugin(found: Found, exports: &[&str]) -> NcclFound {
    let known = found.version.as_deref().and_then(version);
    let (loads, why) = match known {
        None => (
            None,
            "its version could not be read (NCCL_DEBUG=VERSION prints it)".to_owned(),
        ),
        Some(v) if v < GIN_SINCE => (
            Some(false),
            "it has no GIN, which came with 2.28.7".to_owned(),
        ),
        Some(v) => {
            let takes = accepted(Some(v));
            match takes
                .iter()
                .any(|n| exports.contains(&plugin_symbol(n).as_str()))
            {
                true => (Some(true), "it loads the plug-in".to_owned()),
                false => (
                    Some(false),
                    format!(
                        "it has GIN, and takes other plug-ins only (v{}): use 2.28.7 to 2.29.7, or 2.30.7 or later",
                        takes.join(", v")
                    ),
                ),
            }
        }
    };
    NcclFound {
        version: found.version,
        release: known,
        path: found.path,
        loads,
        why,
    }
}

/// The first version with GIN.
const GIN_SINCE: (u32, u32, u32) = (2, 28, 7);

/// Versions of the plug-in interface that a version of NCCL takes.
fn accepted(known: Option<(u32, u32, u32)>) -> &'static [&'static str] {
    match known {
        Some(v) if v < (2, 29, 7) => &["11"],
        Some(v) if v < (2, 30, 3) => &["12", "11"],
        Some(v) if v < (2, 30, 7) => &["13", "12", "11"],
        _ => &["14", "13"],
    }
}

fn plugin_symbol(version: &str) -> String {
    format!("ncclGinPlugin_v{version}")
}

/// Is GIN in this version at all?
fn has_gin(known: Option<(u32, u32, u32)>) -> Gate {
    const WHAT: &str = "NCCL 2.28.7 or later";
    match known {
        None => node(
            WHAT,
            GateState::Unknown,
            "version not known",
            "print it: NCCL_DEBUG=VERSION",
            GIN,
        ),
        Some(v) => node(
            WHAT,
            pass(v >= GIN_SINCE),
            format!("{}.{}.{}", v.0, v.1, v.2),
            "upgrade: GIN came with 2.28.7",
            GIN,
        ),
    }
}

/// What every backend needs.
fn common(facts: &Facts, known: Option<(u32, u32, u32)>) -> Vec<Gate> {
    let cuda = facts
        .driver
        .as_ref()
        .and_then(|d| version(d.cuda.as_deref()?));
    let cumem = match cuda {
        Some(v) => pass(v >= (12, 0, 0)),
        None => GateState::Unknown,
    };
    vec![
        has_gin(known),
        gpu(facts, 70, GIN),
        gpu_direct(facts, INIT),
        libcuda(facts, CUMEM),
        node(
            "a driver for CUDA 12.0 or later (symmetric windows)",
            cumem,
            facts.driver.as_ref().map_or_else(
                || "no driver".to_owned(),
                |d| format!("driver {}", d.version),
            ),
            "upgrade the driver to branch 525 or later",
            CUMEM,
        ),
        setting(
            "cuMem and windows are not switched off",
            !no(facts, "NCCL_CUMEM_ENABLE") && !no(facts, "NCCL_WIN_ENABLE"),
            format!(
                "{}, {}",
                said(facts, "NCCL_CUMEM_ENABLE"),
                said(facts, "NCCL_WIN_ENABLE")
            ),
            "unset them",
            INIT,
        ),
        setting(
            "GIN is not switched off",
            !no(facts, "NCCL_GIN_ENABLE"),
            said(facts, "NCCL_GIN_ENABLE"),
            "unset NCCL_GIN_ENABLE",
            "NCCL 2.30.7 src/gin/gin_host.cc",
        ),
    ]
}

fn wants(facts: &Facts, kind: &str) -> Gate {
    let open = facts
        .variable("NCCL_GIN_TYPE")
        .is_none_or(|v| v == "-1" || v == kind);
    setting(
        "NCCL_GIN_TYPE allows it",
        open,
        said(facts, "NCCL_GIN_TYPE"),
        "unset NCCL_GIN_TYPE",
        GIN,
    )
}

fn not_disabled(facts: &Facts) -> Gate {
    let off = facts.variable("NCCL_IB_DISABLE").is_some_and(|v| v != "0");
    setting(
        "NCCL may use RDMA devices",
        !off,
        said(facts, "NCCL_IB_DISABLE"),
        "unset NCCL_IB_DISABLE",
        NET_IB,
    )
}

fn gdaki(facts: &Facts, known: Option<(u32, u32, u32)>) -> Vec<Gate> {
    let mut gates = common(facts, known);
    gates.extend([
        wants(facts, GDAKI),
        not_disabled(facts),
        mlx5(facts, IB),
        libverbs(facts, false, IB),
        gpu_memory(facts, false, IB),
    ]);
    gates
}

fn proxy(facts: &Facts, known: Option<(u32, u32, u32)>) -> Vec<Gate> {
    let mut gates = common(facts, known);
    gates.extend([
        wants(facts, PROXY),
        not_disabled(facts),
        verbs(facts, IB),
        reliable(
            facts,
            "install aws-ofi-nccl, whose plug-in NCCL asks first",
            NET_IB,
        ),
        libverbs(facts, false, IB),
        gpu_memory(facts, true, IB),
    ]);
    gates
}

/// NCCL 2.32's RMA over sockets, which needs GDRCopy.
fn sockets(facts: &Facts) -> Vec<Gate> {
    const SOURCE: &str = "NCCL 2.32.3 libnccl.so (RMA_SOCKET_PROXY)";
    let mut gates = common(facts, Some((2, 32, 0)));
    let library = facts.software("libgdrapi.so.2").is_some();
    let found = format!(
        "gdrdrv {}, libgdrapi {}",
        there(facts.memory.gdrdrv),
        there(library)
    );
    gates.push(wants(facts, PROXY));
    gates.push(node(
        "GDRCopy: the gdrdrv module and libgdrapi.so.2",
        pass(facts.memory.gdrdrv && library),
        found,
        "install GDRCopy and load gdrdrv",
        SOURCE,
    ));
    gates
}

fn there(yes: bool) -> &'static str {
    if yes { "there" } else { "missing" }
}

/// A plug-in library that exports GIN symbols which this version accepts.
fn external(facts: &Facts, known: Option<(u32, u32, u32)>) -> Option<Path> {
    let off = facts
        .variable("NCCL_GIN_PLUGIN")
        .is_some_and(|v| v.eq_ignore_ascii_case("none"));
    let (file, symbols) = facts
        .plugins
        .iter()
        .find(|p| p.1.iter().any(|s| s.starts_with("ncclGinPlugin_v")))?;
    let fits = accepted(known)
        .iter()
        .any(|v| symbols.contains(&plugin_symbol(v)));
    let has: Vec<&str> = symbols
        .iter()
        .filter(|s| s.starts_with("ncclGin"))
        .map(String::as_str)
        .collect();
    let mut gates = common(facts, known);
    gates.push(setting(
        "external GIN plug-ins are not switched off",
        !off,
        said(facts, "NCCL_GIN_PLUGIN"),
        "unset NCCL_GIN_PLUGIN",
        GIN,
    ));
    gates.push(node(
        "a plug-in whose GIN interface this NCCL accepts",
        pass(fits),
        format!("{file} exports {}", has.join(", ")),
        "install the plug-in's release for this NCCL",
        GIN,
    ));
    // Only the plug-in itself can say its type, at run time.
    gates.push(node(
        "the plug-in finds a device",
        GateState::Unknown,
        "asked when NCCL starts",
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET says \"Assigned plugin … type\": types 3 to 5 are driven by the GPU, 2 by a CPU thread",
        GIN,
    ));
    Some(path("GIN plug-in", Who::Assisted, gates))
}

#[cfg(test)]
mod tests {
    use crate::tree::Manifest;

    #[test]
    fn versions_and_plugins_fit_or_not() {
        for (release, loads) in [
            ("2.27.7", Some(false)),
            ("2.28.9", Some(false)),
            ("2.30.4", Some(false)),
            ("2.30.7", Some(true)),
            ("2.32.3", Some(true)),
        ] {
            let text = format!("/usr/lib64/libnccl.so.{release}:\n");
            let tree = Manifest::parse(&text).unwrap();
            let found = crate::nccl_with_plugin(&tree, &["ncclGinPlugin_v14"]);
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].loads, loads, "{release}: {}", found[0].why);
            assert_eq!(found[0].version.as_deref(), Some(release));
        }
        let tree = Manifest::parse("/usr/lib64/libnccl.so:\n").unwrap();
        assert_eq!(crate::nccl_with_plugin(&tree, &[])[0].loads, None);
    }
}
