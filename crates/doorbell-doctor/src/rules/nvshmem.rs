//! NVSHMEM: which transport device calls take to another node.
//!
//! Unless asked otherwise it takes `ibrc` with a CPU proxy thread. IBGDA and GPUNetIO's GDAKI are off until
//! a variable asks for them; a transport that fails to start is only logged, and what remains is the node.

use super::gates::{
    doorbell, gpu, gpu_memory, libcuda, libverbs, mlx5, node, pass, reliable, said, setting, verbs,
    yes,
};
use super::{library, path, torch_note, variables, version};
use crate::facts::{Facts, Found};
use crate::report::{Gate, Library, Path, Who};

const INIT: &str = "NVSHMEM 3.8 src/host/transport/transport.cpp";
const COMMON: &str = "NVSHMEM 3.5.1 transport_ib_common.cpp";
const IBGDA: &str = "NVSHMEM 3.5.1 ibgda.cpp";
const GPUNETIO: &str = "NVSHMEM 3.8 gpunetio.cpp";
const NEITHER: &str = "NVSHMEM 3.8 src/host/transport/transport.cpp (the two exclude each other)";

pub(super) fn judge(facts: &Facts, found: &Found) -> Library {
    let asked = facts
        .variable("NVSHMEM_REMOTE_TRANSPORT")
        .unwrap_or("ibrc")
        .to_ascii_lowercase();
    let gpunetio_asked = yes(facts, "NVSHMEM_GPUNETIO_ENABLE_GDAKI");
    let ibgda_asked = yes(facts, "NVSHMEM_IB_ENABLE_IBGDA");
    let has = |name: &str| {
        found
            .modules
            .iter()
            .any(|m| m.starts_with(&format!("nvshmem_transport_{name}.so")))
    };
    let module = |name: &str| {
        let file = format!("nvshmem_transport_{name}.so");
        let words = if has(name) {
            "found"
        } else {
            "not in this installation"
        };
        node(
            &file,
            pass(has(name)),
            words,
            "install a build of NVSHMEM that has it",
            INIT,
        )
    };
    let transport = |name: &str| {
        setting(
            &format!("NVSHMEM_REMOTE_TRANSPORT is {name}"),
            asked == name,
            said(facts, "NVSHMEM_REMOTE_TRANSPORT"),
            &format!("NVSHMEM_REMOTE_TRANSPORT={name}"),
            INIT,
        )
    };
    let shared = |source: &'static str| -> Vec<Gate> {
        vec![
            gpu(facts, 70, source),
            libcuda(facts, source),
            gpu_memory(facts, true, COMMON),
        ]
    };

    let mut ibgda = vec![
        module("ibgda"),
        setting(
            "NVSHMEM_IB_ENABLE_IBGDA=1",
            ibgda_asked,
            said(facts, "NVSHMEM_IB_ENABLE_IBGDA"),
            "NVSHMEM_IB_ENABLE_IBGDA=1",
            INIT,
        ),
        setting(
            "GPUNetIO's GDAKI is not asked for at once",
            !gpunetio_asked,
            said(facts, "NVSHMEM_GPUNETIO_ENABLE_GDAKI"),
            "unset one of the two",
            NEITHER,
        ),
        mlx5(facts, IBGDA),
        libverbs(facts, false, IBGDA),
    ];
    ibgda.splice(0..0, shared(IBGDA));
    let mut gdaki = vec![
        module("gpunetio"),
        transport("gpunetio"),
        setting(
            "NVSHMEM_GPUNETIO_ENABLE_GDAKI=1",
            gpunetio_asked,
            said(facts, "NVSHMEM_GPUNETIO_ENABLE_GDAKI"),
            "NVSHMEM_GPUNETIO_ENABLE_GDAKI=1",
            GPUNETIO,
        ),
        setting(
            "IBGDA is not asked for at once",
            !ibgda_asked,
            said(facts, "NVSHMEM_IB_ENABLE_IBGDA"),
            "unset one of the two",
            NEITHER,
        ),
        mlx5(facts, GPUNETIO),
        libverbs(facts, false, GPUNETIO),
    ];
    gdaki.splice(0..0, shared(GPUNETIO));
    let rung =
        |gates: &[Gate]| -> Vec<Gate> { gates.iter().cloned().chain([doorbell(facts)]).collect() };
    let mut ibrc = vec![
        module("ibrc"),
        transport("ibrc"),
        verbs(facts, COMMON),
        reliable(
            facts,
            "NVSHMEM_REMOTE_TRANSPORT=libfabric NVSHMEM_LIBFABRIC_PROVIDER=efa",
            COMMON,
        ),
        prefix(facts, found),
        libverbs(facts, false, COMMON),
    ];
    ibrc.splice(0..0, shared(COMMON));
    let fabric = facts.software("libfabric.so.1").is_some();
    let libfabric = vec![
        gpu(facts, 70, INIT),
        module("libfabric"),
        transport("libfabric"),
        node(
            "libfabric.so.1",
            pass(fabric),
            if fabric { "found" } else { "not found" },
            "install libfabric (EFA: Amazon's EFA installer)",
            INIT,
        ),
        verbs(facts, INIT),
    ];

    let mut paths = vec![
        path("IBGDA, the GPU rings", Who::Native, rung(&ibgda)),
        path("GPUNetIO GDAKI, the GPU rings", Who::Native, rung(&gdaki)),
        path("IBGDA, a CPU thread rings", Who::Assisted, ibgda),
        path("GPUNetIO GDAKI, a CPU thread rings", Who::Assisted, gdaki),
        path("ibrc by the CPU proxy", Who::Assisted, ibrc),
        path("libfabric by the CPU proxy", Who::Assisted, libfabric),
        path(
            "one node only (NVLink and PCIe peers)",
            Who::Nobody,
            vec![gpu(facts, 70, INIT), libcuda(facts, INIT)],
        ),
    ];
    // Shown to who asks for them: nobody else gets them.
    for (name, words) in [
        ("ibdevx", "ibdevx by the CPU proxy"),
        ("ucx", "ucx by the CPU proxy"),
    ] {
        if asked == name {
            let mut gates = shared(COMMON);
            gates.extend([
                module(name),
                if name == "ucx" {
                    verbs(facts, COMMON)
                } else {
                    mlx5(facts, COMMON)
                },
                libverbs(facts, false, COMMON),
            ]);
            let before = paths.len() - 1;
            paths.insert(before, path(words, Who::Assisted, gates));
        }
    }
    let paths = starts(facts, paths, has("gpunetio"), &asked);
    let mut library = library("nvshmem", found, paths);
    library.notes.extend(torch_note(facts, found));
    if found
        .version
        .as_deref()
        .and_then(version)
        .is_some_and(|v| v < (3, 7, 0))
        && !has("gpunetio")
    {
        library.notes.push(
            "GPUNetIO came as a transport of its own after 3.5; here IBGDA is the GPU's path."
                .into(),
        );
    }
    library.notes.push("IBGDA and GPUNetIO also skip adapters without masked and 4-byte atomics (PCI_ATOMIC_MODE of the firmware); only the adapter itself can tell.".into());
    library.variables = variables(
        facts,
        &[
            (
                "NVSHMEM_REMOTE_TRANSPORT",
                "ibrc, ucx, ibdevx, libfabric, gpunetio, none",
            ),
            (
                "NVSHMEM_IB_ENABLE_IBGDA",
                "1 gives device calls to the GPU's own queues",
            ),
            (
                "NVSHMEM_GPUNETIO_ENABLE_GDAKI",
                "1 with gpunetio: the same by GPUNetIO",
            ),
            ("NVSHMEM_IBGDA_NIC_HANDLER", "auto, gpu, cpu: who rings"),
            ("NVSHMEM_HCA_LIST", "which adapters"),
            ("NVSHMEM_IB_DISABLE_DMABUF", "1 needs a peer-memory module"),
        ],
    );
    library
}

/// Settings by which NVSHMEM ends at its start, whatever the node could do: asking for GDAKI by another transport, or for both ways.
fn starts(facts: &Facts, paths: Vec<Path>, knows: bool, asked: &str) -> Vec<Path> {
    let gdaki = knows && yes(facts, "NVSHMEM_GPUNETIO_ENABLE_GDAKI");
    let both = gdaki && yes(facts, "NVSHMEM_IB_ENABLE_IBGDA");
    let other = gdaki && asked != "gpunetio";
    if !both && !other {
        return paths;
    }
    let (found, fix) = match both {
        true => (
            "NVSHMEM_IB_ENABLE_IBGDA=1 and NVSHMEM_GPUNETIO_ENABLE_GDAKI=1".to_owned(),
            "unset one of the two",
        ),
        false => (
            format!("NVSHMEM_GPUNETIO_ENABLE_GDAKI=1 with {asked}"),
            "NVSHMEM_REMOTE_TRANSPORT=gpunetio, or unset NVSHMEM_GPUNETIO_ENABLE_GDAKI",
        ),
    };
    let gate = setting(
        "settings with which NVSHMEM starts",
        false,
        found,
        fix,
        NEITHER,
    );
    let with = |p: Path| {
        let mut gates = p.gates;
        gates.insert(0, gate.clone());
        path(p.name, p.who, gates)
    };
    paths.into_iter().map(with).collect()
}

/// Up to 3.5 the name of an adapter must contain a prefix, `mlx5` unless set; later ones take any.
fn prefix(facts: &Facts, found: &Found) -> Gate {
    let named = found
        .version
        .as_deref()
        .and_then(version)
        .is_some_and(|v| v < (3, 7, 0));
    let wanted = facts.variable("NVSHMEM_HCA_PREFIX").unwrap_or("mlx5");
    let mut names = facts
        .nics
        .iter()
        .filter(|n| n.rdma)
        .map(|n| n.name.as_str())
        .peekable();
    let holds = !named || names.peek().is_none() || names.any(|n| n.contains(wanted));
    setting(
        "a device whose name fits NVSHMEM_HCA_PREFIX",
        holds,
        said(facts, "NVSHMEM_HCA_PREFIX"),
        "NVSHMEM_HCA_PREFIX=the beginning of the device's name",
        "NVSHMEM 3.5.1 env_defs.h",
    )
}
