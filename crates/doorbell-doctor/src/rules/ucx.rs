//! UCX: whether its device API (`ucp_device_*`) gets `rc_gda`, the transport that the GPU drives.
//!
//! Unlike NCCL and NVSHMEM it has no CPU to fall back on for the doorbell: without the mapping there is no rc_gda.

use super::gates::{
    doorbell, gpu, gpu_memory, libcuda, libverbs, mlx5, no, node, pass, said, setting, verbs,
};
use super::{library, path, variables};
use crate::facts::{Facts, Found};
use crate::report::{Gate, Library, Path, Who};

const GDA: &str = "UCX 1.23 src/uct/ib/mlx5/gdaki/gdaki.c";
const MODULES: &str = "UCX 1.23 src/ucs/sys/module.c";
const MD: &str = "UCX 1.23 src/uct/ib/base/ib_md.c";

pub(super) fn judge(facts: &Facts, found: &Found) -> Library {
    let mut library = library(
        "ucx",
        found,
        paths(facts, &found.modules, found.source == "wheel"),
    );
    library.variables = variables(
        facts,
        &[
            ("UCX_TLS", "transports that may be used; must allow rc_gda"),
            ("UCX_NET_DEVICES", "adapters that may be used"),
            ("UCX_MODULES", "modules that may be loaded"),
            ("UCX_IB_GDA_DMABUF_ENABLE", "try, y, n"),
            (
                "UCX_IB_GDA_RETAIN_INACTIVE_CTX",
                "y: no CUDA context needed at start",
            ),
        ],
    );
    library
}

/// The paths of a UCX with these modules; NIXL brings its own.
pub(super) fn paths(facts: &Facts, modules: &[String], wheel: bool) -> Vec<Path> {
    let module = |name: &str| {
        let has = modules.iter().any(|m| m.starts_with(&format!("{name}.so")));
        let words = if has { "found" } else { "not in this build" };
        node(
            &format!("{name}.so"),
            pass(has),
            words,
            "use a UCX built with verbs, mlx5 and CUDA (the wheel of NIXL brings one)",
            MODULES,
        )
    };
    // A wheel without verbs modules brings no libibverbs either, and needs none.
    let bundled = wheel && modules.iter().any(|m| m.starts_with("libuct_ib."));
    let mut gda: Vec<Gate> = vec![
        module("libuct_ib_mlx5_gda"),
        tls(facts, &["rc_gda", "rc_gdaki", "rc", "ib"]),
        gpu(facts, 70, GDA),
        libcuda(facts, GDA),
        mlx5(facts, GDA),
        libverbs(facts, bundled, MODULES),
        gpu_memory(facts, true, MD),
        doorbell(facts),
    ];
    if no(facts, "UCX_IB_GPU_DIRECT_RDMA") {
        gda.push(setting(
            "GPUDirect RDMA is not switched off",
            false,
            said(facts, "UCX_IB_GPU_DIRECT_RDMA"),
            "unset it",
            MD,
        ));
    }
    let host = vec![
        module("libuct_ib"),
        verbs(facts, MD),
        libverbs(facts, bundled, MODULES),
    ];
    vec![
        path("rc_gda, the GPU rings", Who::Native, gda),
        path("verbs from the host", Who::Host, host),
        path("tcp and shared memory from the host", Who::Host, Vec::new()),
    ]
}

/// UCX_TLS: absent or `all` takes every transport; `^` turns the list round.
fn tls(facts: &Facts, names: &[&str]) -> Gate {
    let open = match facts.variable("UCX_TLS") {
        None => true,
        Some(list) => {
            let (negated, list) = list.strip_prefix('^').map_or((false, list), |l| (true, l));
            let named = list.split(',').any(|t| names.contains(&t) || t == "all");
            named != negated
        }
    };
    setting(
        "UCX_TLS allows rc_gda",
        open,
        said(facts, "UCX_TLS"),
        "add rc_gda to UCX_TLS, or unset it",
        "UCX 1.23 src/ucp/core/ucp_context.c",
    )
}
