//! The host and its limits: kernel, capabilities, memlock, /dev/shm, cgroups, container.

use super::bus::field;
use crate::report::{Container, Limits, Machine};
use crate::tree::{OWN, View};

const CAP_NET_RAW: u32 = 13;
const CAP_SYS_ADMIN: u32 = 21;

pub(super) fn machine(view: View<'_>) -> Machine {
    let status = view.text("/proc/self/status").unwrap_or_default();
    let caps = field(&status, "CapEff")
        .and_then(|c| u64::from_str_radix(c, 16).ok())
        .unwrap_or(0);
    let module = |m: &&str| view.exists(&format!("/sys/module/{m}"));
    let modules = [
        "ib_core",
        "ib_uverbs",
        "rdma_cm",
        "mlx5_core",
        "mlx5_ib",
        "efa",
        "bnxt_re",
        "irdma",
        "ionic_rdma",
        "rdma_rxe",
        "siw",
    ];
    Machine {
        kernel: view.text("/proc/sys/kernel/osrelease"),
        arch: view.text(&format!("{OWN}/arch")),
        cpu: view
            .text("/proc/cpuinfo")
            .and_then(|t| field(&t, "model name").map(str::to_owned)),
        numa_nodes: view
            .list("/sys/devices/system/node", |n| {
                n.strip_prefix("node")
                    .is_some_and(|d| d.parse::<u32>().is_ok())
            })
            .len(),
        root: caps >> CAP_SYS_ADMIN & 1 == 1,
        net_raw: caps >> CAP_NET_RAW & 1 == 1,
        iommu: iommu(view),
        rdma_modules: modules
            .iter()
            .filter(|m| module(m))
            .map(|m| (*m).to_owned())
            .collect(),
    }
}

/// Group types are for everybody to read; without groups no IOMMU is in use.
fn iommu(view: View<'_>) -> Option<bool> {
    if !view.exists("/sys/kernel/iommu_groups") {
        return None;
    }
    let groups = view.list("/sys/kernel/iommu_groups", |_| true);
    Some(groups.iter().any(|g| {
        view.text(&format!("/sys/kernel/iommu_groups/{g}/type"))
            .is_some_and(|t| t.starts_with("DMA"))
    }))
}

pub(super) fn limits(view: View<'_>) -> Limits {
    let text = view.text("/proc/self/limits").unwrap_or_default();
    let memlock = text
        .lines()
        .find_map(|l| l.strip_prefix("Max locked memory"))
        .and_then(|l| l.split_whitespace().next()?.parse().ok());
    let shm = view.text(&format!("{OWN}/statfs/dev/shm"));
    let meminfo = view.text("/proc/meminfo").unwrap_or_default();
    Limits {
        memlock,
        shm: shm.and_then(|t| {
            t.lines()
                .find_map(|l| l.strip_prefix("size ")?.parse().ok())
        }),
        hugepages: field(&meminfo, "HugePages_Total").and_then(|n| n.parse().ok()),
        memory: cgroup(view, "memory.max", |t| t.trim().parse::<u64>().ok()).reduce(u64::min),
        cpus: cgroup(view, "cpu.max", quota).reduce(f64::min),
    }
}

/// `name` of our cgroup and of those above it: the tightest counts.
fn cgroup<T>(
    view: View<'_>,
    name: &str,
    read: impl Fn(&str) -> Option<T>,
) -> impl Iterator<Item = T> {
    let own = view.text("/proc/self/cgroup").unwrap_or_default();
    let mut path = own
        .lines()
        .find_map(|l| l.strip_prefix("0::/"))
        .unwrap_or("")
        .to_owned();
    let mut found = Vec::new();
    loop {
        let folder = format!("/sys/fs/cgroup/{path}");
        found.extend(
            view.text(&format!("{}/{name}", folder.trim_end_matches('/')))
                .and_then(|t| read(&t)),
        );
        if path.is_empty() {
            break found.into_iter();
        }
        path = path.rsplit_once('/').map_or("", |(up, _)| up).to_owned();
    }
}

fn quota(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.trim().parse().ok()?);
    (period > 0.0).then(|| quota / period)
}

pub(super) fn container(view: View<'_>) -> Container {
    let marks = [
        ("/run/secrets/kubernetes.io", "kubernetes"),
        ("/run/.containerenv", "podman"),
        ("/.dockerenv", "docker"),
        ("/.singularity.d", "apptainer"),
    ];
    for (mark, kind) in marks {
        if view.exists(mark) {
            return Container {
                kind: Some(kind.into()),
                why: Some(format!("{mark} is here")),
            };
        }
    }
    let cgroup = view.text("/proc/1/cgroup").unwrap_or_default();
    for (mark, kind) in [
        ("kubepods", "kubernetes"),
        ("docker", "docker"),
        ("lxc", "lxc"),
        ("libpod", "podman"),
    ] {
        if cgroup.contains(mark) {
            return Container {
                kind: Some(kind.into()),
                why: Some(format!("/proc/1/cgroup names {mark}")),
            };
        }
    }
    Container::default()
}
