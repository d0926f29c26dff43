//! What Doorbell itself can do on this node.

use crate::facts::Facts;
use crate::report::Here;

pub(super) fn judge(facts: &Facts) -> Vec<Here> {
    let gpu = facts.driver.is_some() && facts.software("libcuda.so.1").is_some();
    // Queues and buffers of one small program; the default of many containers is 64 MiB.
    const SHM: u64 = 16 << 20;
    let shm = facts.limits.shm;
    vec![
        Here {
            what: "software HCA",
            can: true,
            why: "plays the NIC on a CPU core; no adapter, module or root needed".into(),
        },
        Here {
            what: "GPU kernels",
            can: gpu,
            why: match (&facts.driver, gpu) {
                (Some(d), true) => format!("driver {}; queues in pinned host memory", d.version),
                (Some(_), false) => "libcuda.so.1 is missing; kernels run on host threads".into(),
                (None, _) => "no NVIDIA driver; kernels run on host threads".into(),
            },
        },
        Here {
            what: "shared memory",
            can: true,
            why: match shm {
                Some(size) if size < SHM => format!(
                    "memory files of its own, so /dev/shm of {} MiB does not bound it",
                    size >> 20
                ),
                _ => "two processes of this node, by sealed memory files".into(),
            },
        },
        Here {
            what: "RoCE over UDP",
            can: true,
            why: "any UDP port between Doorbells; with other RoCE peers port 4791".into(),
        },
        Here {
            what: "raw Ethernet",
            can: facts.machine.net_raw,
            why: if facts.machine.net_raw {
                "CAP_NET_RAW is here".into()
            } else {
                "needs CAP_NET_RAW: setcap cap_net_raw+ep on the command, or root".into()
            },
        },
    ]
}
