//! NIXL: what its UCX and GPUNETIO plug-ins can do here.

use super::gates::{doorbell, gpu, gpu_memory, libcuda, libverbs, mlx5, node, pass};
use super::{library, path, ucx, variables};
use crate::facts::{Facts, Found};
use crate::report::{Library, Who};

const WHEEL: &str = "nixl_cu13 1.5.1: libplugin_GPUNETIO.so";
const PLUGINS: &str = "NIXL 1.5.1 nixl_plugin_manager.cpp";

pub(super) fn judge(facts: &Facts, found: &Found) -> Library {
    let plugin = |name: &str| {
        let has = found
            .modules
            .iter()
            .any(|m| m.starts_with(&format!("libplugin_{name}.so")));
        let words = if has {
            "found"
        } else {
            "not in this installation"
        };
        node(
            &format!("libplugin_{name}.so"),
            pass(has),
            words,
            "install a NIXL that has it, or point NIXL_PLUGIN_DIR at it",
            PLUGINS,
        )
    };
    let bundled = found.source == "wheel";
    let doca: Vec<&str> = [
        "libdoca_common.so.2",
        "libdoca_verbs.so.2",
        "libdoca_gpunetio.so.2",
    ]
    .into_iter()
    .filter(|n| facts.software(n).is_none())
    .collect();
    let missing = if doca.is_empty() {
        "found".to_owned()
    } else {
        format!("{} not found", doca.join(", "))
    };
    let gpunetio = vec![
        plugin("GPUNETIO"),
        node(
            "the closed DOCA SDK 2.x or 3.x",
            pass(doca.is_empty()),
            missing,
            "install doca-sdk-gpunetio from NVIDIA's repository; no wheel carries it",
            WHEEL,
        ),
        gpu(facts, 70, WHEEL),
        libcuda(facts, WHEEL),
        mlx5(facts, WHEEL),
        libverbs(facts, bundled, WHEEL),
        gpu_memory(facts, false, WHEEL),
        doorbell(facts),
    ];
    let modules = if bundled { &found.ucx } else { &found.modules };
    let mut paths = Vec::new();
    for mut ucx in ucx::paths(facts, modules, bundled) {
        ucx.gates.insert(0, plugin("UCX"));
        let name = match ucx.name {
            "rc_gda, the GPU rings" => "UCX plug-in, rc_gda (nixlPut)",
            "verbs from the host" => "UCX plug-in, verbs from the host",
            _ => "UCX plug-in, tcp and shared memory",
        };
        paths.push(path(name, ucx.who, ucx.gates));
    }
    paths.insert(
        1,
        path(
            "GPUNETIO plug-in (a kernel per transfer)",
            Who::Native,
            gpunetio,
        ),
    );
    let mut library = library("nixl", found, paths);
    library.notes.push(
        "The application chooses the plug-in (create_backend); UCX is what most choose.".into(),
    );
    library.variables = variables(
        facts,
        &[
            ("NIXL_PLUGIN_DIR", "replaces the folder of plug-ins"),
            ("UCX_TLS", "transports of the UCX plug-in"),
            ("UCX_MODULES", "modules of its UCX that may be loaded"),
        ],
    );
    library
}
