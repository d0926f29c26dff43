//! Conditions that several libraries share.

use crate::facts::Facts;
use crate::report::{Gate, GateState, Nic};

/// A condition of the node.
pub(super) fn node(
    what: &str,
    state: GateState,
    found: impl Into<String>,
    fix: &str,
    source: &'static str,
) -> Gate {
    let fix = if state == GateState::Pass { "" } else { fix };
    Gate {
        what: what.into(),
        state,
        setting: false,
        found: found.into(),
        fix: fix.into(),
        source,
    }
}

/// A condition that a variable decides.
pub(super) fn setting(
    what: &str,
    holds: bool,
    found: impl Into<String>,
    fix: &str,
    source: &'static str,
) -> Gate {
    Gate {
        setting: true,
        ..node(what, pass(holds), found, fix, source)
    }
}

pub(super) fn pass(holds: bool) -> GateState {
    if holds {
        GateState::Pass
    } else {
        GateState::Fail
    }
}

/// The value of a variable in words.
pub(super) fn said(facts: &Facts, name: &str) -> String {
    match facts.variable(name) {
        Some(value) => format!("{name}={value}"),
        None => format!("{name} is not set"),
    }
}

/// Is a variable set to something that means yes?
pub(super) fn yes(facts: &Facts, name: &str) -> bool {
    facts.variable(name).is_some_and(|v| {
        matches!(
            v.to_ascii_lowercase().as_str(),
            "1" | "y" | "yes" | "true" | "on"
        )
    })
}

/// Is it set to something that means no?
pub(super) fn no(facts: &Facts, name: &str) -> bool {
    facts.variable(name).is_some_and(|v| {
        matches!(
            v.to_ascii_lowercase().as_str(),
            "0" | "n" | "no" | "false" | "off"
        )
    })
}

/// An NVIDIA GPU of at least `capability` (times ten), with a driver bound.
pub(super) fn gpu(facts: &Facts, capability: u32, source: &'static str) -> Gate {
    let what = format!(
        "an NVIDIA GPU of compute capability {}.{} or later",
        capability / 10,
        capability % 10
    );
    let ours: Vec<_> = facts.gpus.iter().filter(|g| g.vendor == "NVIDIA").collect();
    let Some(first) = ours.first() else {
        let found = match facts.gpus.first() {
            Some(other) => format!("only {} {}", other.vendor, other.name),
            None => "no GPU on the PCI bus".to_owned(),
        };
        return node(
            &what,
            GateState::Fail,
            found,
            "none on this node: the library drives NVIDIA GPUs only",
            source,
        );
    };
    if facts.driver.is_none() {
        return node(
            &what,
            GateState::Fail,
            format!("{}, but no driver is loaded", first.name),
            "install NVIDIA's driver (in a container: start it with the NVIDIA runtime)",
            source,
        );
    }
    let old = ours
        .iter()
        .find(|g| g.capability.is_some_and(|c| c < capability));
    match old {
        Some(old) => {
            let found = format!("{} ({})", old.name, old.architecture.unwrap_or("?"));
            node(
                &what,
                GateState::Fail,
                found,
                "hide that GPU (CUDA_VISIBLE_DEVICES) or use a newer one",
                source,
            )
        }
        None => {
            let known = ours.iter().all(|g| g.capability.is_some());
            let state = if known {
                GateState::Pass
            } else {
                GateState::Unknown
            };
            node(
                &what,
                state,
                format!("{} x {}", ours.len(), first.name),
                "look it up with nvidia-smi --query-gpu=compute_cap",
                source,
            )
        }
    }
}

/// GPUDirect RDMA of memory that CUDA maps itself: an attribute of the GPU, which GeForce does not have.
pub(super) fn gpu_direct(facts: &Facts, source: &'static str) -> Gate {
    let what = "GPUs with GPUDirect RDMA";
    let mut ours = facts
        .gpus
        .iter()
        .filter(|g| g.vendor == "NVIDIA")
        .peekable();
    if ours.peek().is_none() {
        return node(
            what,
            GateState::Fail,
            "no NVIDIA GPU",
            "none on this node",
            source,
        );
    }
    match ours.find(|g| g.name.contains("GeForce")) {
        Some(gpu) => node(
            what,
            GateState::Fail,
            gpu.name.clone(),
            "none: a data-centre or workstation GPU has it; CUDA_VISIBLE_DEVICES can leave this one out",
            source,
        ),
        None => node(what, GateState::Pass, "not GeForce", "", source),
    }
}

/// libcuda of the same version as the kernel module.
pub(super) fn libcuda(facts: &Facts, source: &'static str) -> Gate {
    let what = "libcuda.so.1 of the loaded driver";
    let module = facts.driver.as_ref().map(|d| d.version.as_str());
    match (facts.software("libcuda.so.1"), module) {
        (None, _) => node(
            what,
            GateState::Fail,
            "not found",
            "install the driver's user-space part (in a container: the NVIDIA runtime mounts it)",
            source,
        ),
        (Some(s), Some(module)) => match &s.version {
            Some(v) if v != module => node(
                what,
                GateState::Fail,
                format!("libcuda is {v}, the kernel module {module}"),
                "reboot, or install both of one version",
                source,
            ),
            Some(v) => node(what, GateState::Pass, v.clone(), "", source),
            None => node(
                what,
                GateState::Unknown,
                "found, version not in its name",
                "compare with /sys/module/nvidia/version",
                source,
            ),
        },
        (Some(_), None) => node(
            what,
            GateState::Fail,
            "found, but no kernel module is loaded",
            "load the nvidia module",
            source,
        ),
    }
}

/// RDMA devices of a driver.
pub(super) fn devices<'f>(facts: &'f Facts, driver: &'static str) -> impl Iterator<Item = &'f Nic> {
    facts
        .nics
        .iter()
        .filter(move |n| n.rdma && n.driver.as_deref() == Some(driver))
}

fn names<'n>(nics: impl Iterator<Item = &'n Nic>) -> String {
    let all: Vec<String> = nics
        .map(|n| format!("{} ({})", n.name, n.driver.as_deref().unwrap_or("?")))
        .collect();
    if all.is_empty() {
        "no RDMA device".to_owned()
    } else {
        all.join(", ")
    }
}

/// A ConnectX or BlueField with an active port whose verbs node is here.
pub(super) fn mlx5(facts: &Facts, source: &'static str) -> Gate {
    let what = "a ConnectX or BlueField (mlx5): active port, verbs device";
    let mut found = devices(facts, "mlx5_core").peekable();
    if found.peek().is_none() {
        let dead = facts
            .nics
            .iter()
            .find(|n| !n.rdma && n.driver.as_deref() == Some("mlx5_core"));
        return match dead {
            Some(nic) => node(
                what,
                GateState::Fail,
                format!("{} is there, but it is no RDMA device", nic.model),
                "modprobe mlx5_ib",
                source,
            ),
            None => node(
                what,
                GateState::Fail,
                names(facts.nics.iter().filter(|n| n.rdma)),
                "none: only mlx5 hardware executes these queues",
                source,
            ),
        };
    }
    usable(what, found.collect(), source)
}

/// Any RDMA device with an active port.
pub(super) fn verbs(facts: &Facts, source: &'static str) -> Gate {
    let what = "an RDMA device: active port, verbs device";
    let all: Vec<&Nic> = facts.nics.iter().filter(|n| n.rdma).collect();
    if all.is_empty() {
        return node(
            what,
            GateState::Fail,
            "none",
            "load the adapter's RDMA module; without an adapter: soft RoCE (rdma link add rxe0 type rxe netdev IF), for tests",
            source,
        );
    }
    usable(what, all, source)
}

fn usable(what: &str, all: Vec<&Nic>, source: &'static str) -> Gate {
    let active: Vec<&Nic> = all
        .iter()
        .copied()
        .filter(|n| n.state.as_deref() == Some("ACTIVE"))
        .collect();
    let state = |n: &Nic| {
        format!(
            "{} is {}",
            n.name,
            n.state.as_deref().unwrap_or("of unknown state")
        )
    };
    let Some(first) = active.first() else {
        let states: Vec<String> = all.iter().map(|n| state(n)).collect();
        return node(
            what,
            GateState::Fail,
            states.join(", "),
            "bring the link up: cable, switch, `ip link set IF up`, subnet manager",
            source,
        );
    };
    if active.iter().all(|n| n.verbs_node == Some(false)) {
        return node(
            what,
            GateState::Fail,
            format!(
                "{} is active, but its /dev/infiniband/uverbs is not here",
                first.name
            ),
            "give the container the devices (--device /dev/infiniband, or the cluster's device plug-in)",
            source,
        );
    }
    node(what, GateState::Pass, names(active.into_iter()), "", source)
}

/// libibverbs, and libmlx5 with it.
pub(super) fn libverbs(facts: &Facts, bundled: bool, source: &'static str) -> Gate {
    let what = "libibverbs.so.1 and libmlx5.so.1";
    if bundled {
        return node(
            what,
            GateState::Pass,
            "the wheel brings its own",
            "",
            source,
        );
    }
    let missing: Vec<&str> = ["libibverbs.so.1", "libmlx5.so.1"]
        .into_iter()
        .filter(|n| facts.software(n).is_none())
        .collect();
    if missing.is_empty() {
        return node(what, GateState::Pass, "found", "", source);
    }
    node(
        what,
        GateState::Fail,
        format!("{} not found", missing.join(", ")),
        "install rdma-core (libibverbs1 ibverbs-providers)",
        source,
    )
}

/// Who may register GPU memory with the NIC: dma-buf, or a peer memory module.
pub(super) fn gpu_memory(facts: &Facts, legacy: bool, source: &'static str) -> Gate {
    let what = if legacy {
        "GPU memory for the NIC: dma-buf, nvidia_peermem or nv_peer_mem"
    } else {
        "GPU memory for the NIC: dma-buf or nvidia_peermem"
    };
    let memory = &facts.memory;
    let taken = [
        (memory.dma_buf == Some(true), "dma-buf"),
        (memory.nvidia_peermem, "nvidia_peermem"),
        (legacy && memory.nv_peer_mem, "nv_peer_mem"),
    ];
    let ways: Vec<&str> = taken.iter().filter(|t| t.0).map(|t| t.1).collect();
    if !ways.is_empty() {
        return node(what, GateState::Pass, ways.join(", "), "", source);
    }
    if memory.dma_buf.is_none() {
        return node(
            what,
            GateState::Unknown,
            memory.dma_buf_why.clone(),
            "modprobe nvidia_peermem makes it sure",
            source,
        );
    }
    node(
        what,
        GateState::Fail,
        format!("no peer-memory module; {}", memory.dma_buf_why),
        "modprobe nvidia_peermem (as root; with an RDMA stack that has peer memory), or the open kernel modules of driver 515 or later on Linux 5.12 or later",
        source,
    )
}

/// May a GPU thread store to the NIC's doorbell? Root may map it, others only with the registry key.
pub(super) fn doorbell(facts: &Facts) -> Gate {
    const WHAT: &str = "the NIC's doorbell mapped into the GPU";
    const FIX: &str = "options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\" in /etc/modprobe.d/nvidia.conf, then reload the driver or reboot";
    const SOURCE: &str =
        "open-gpu-kernel-modules 595.45 osmemdesc.c (osCreateOsDescriptorFromIoMemory)";
    match facts.driver.as_ref().and_then(|d| d.peer_mapping_override) {
        Some(true) => node(WHAT, GateState::Pass, "PeerMappingOverride=1", "", SOURCE),
        Some(false) if facts.machine.root => node(
            WHAT,
            GateState::Pass,
            "root (CAP_SYS_ADMIN); another user would fail",
            "",
            SOURCE,
        ),
        Some(false) => node(
            WHAT,
            GateState::Fail,
            "PeerMappingOverride is not set, and this is not root",
            FIX,
            SOURCE,
        ),
        None => node(
            WHAT,
            GateState::Unknown,
            "/proc/driver/nvidia/params could not be read",
            FIX,
            SOURCE,
        ),
    }
}

/// Reliable connections, which EFA alone of the RDMA devices does not have.
pub(super) fn reliable(facts: &Facts, fix: &str, source: &'static str) -> Gate {
    let what = "a device with reliable connections (RC)";
    let all: Vec<&Nic> = facts.nics.iter().filter(|n| n.rdma).collect();
    let only_efa = !all.is_empty() && all.iter().all(|n| n.driver.as_deref() == Some("efa"));
    let found = if only_efa {
        "EFA has none"
    } else {
        "not EFA alone"
    };
    node(what, pass(!only_efa), found, fix, source)
}
