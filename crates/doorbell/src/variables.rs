//! The `DOORBELL_*` variables that there are, and what was meant by one that there is not.
//!
//! Most are settings ([`Config`](crate::Config)); the rest belong to the command, the plug-in for NCCL, the Python package, or a library that is loaded at
//! run time. docs/variables.md has the same table.

use std::sync::Once;

/// Name, and what it decides.
pub const VARIABLES: &[(&str, &str)] = &[
    (
        "DOORBELL_COMMAND",
        "the command that the Python package runs",
    ),
    ("DOORBELL_DEPTH", "64-byte slots of a send queue"),
    ("DOORBELL_FAULT", "faults that the HCA plays"),
    ("DOORBELL_GPU", "which GPU runs kernels"),
    (
        "DOORBELL_GPU_COPIES",
        "who makes small copies of GPU memory",
    ),
    (
        "DOORBELL_GPU_COPIES_STAY",
        "how long the kernel that makes them stays for more",
    ),
    ("DOORBELL_HANDLER", "how queue pairs are rung"),
    ("DOORBELL_HCA_CORES", "who runs the software HCA"),
    ("DOORBELL_HOME", "where the files of this installation are"),
    ("DOORBELL_HOST_WARP", "lanes of a warp on the host GPU"),
    ("DOORBELL_IBVERBS", "the libibverbs.so.1 that is loaded"),
    (
        "DOORBELL_JOB",
        "the name of a job whose ranks are told by hand",
    ),
    ("DOORBELL_LIBEFA", "the libefa.so.1 that is loaded"),
    (
        "DOORBELL_LOG",
        "what the command and the plug-in for NCCL log",
    ),
    (
        "DOORBELL_NCCL_ADDR",
        "the address at which ranks of other hosts find this one",
    ),
    (
        "DOORBELL_NCCL_ALIVE",
        "how long a process may stand still before it is an error",
    ),
    (
        "DOORBELL_NCCL_DEPTH",
        "slots of a queue of the plug-in for NCCL",
    ),
    (
        "DOORBELL_NCCL_LINK",
        "which link reaches ranks of other processes",
    ),
    (
        "DOORBELL_NCCL_RELEASE",
        "which NCCL this is, where it cannot be asked",
    ),
    ("DOORBELL_NCCL_SIGNALS", "where signals and counters lie"),
    (
        "DOORBELL_NCCL_TIMEOUT",
        "how long a step waits for other ranks",
    ),
    (
        "DOORBELL_ON_ERROR",
        "what foreign kernels meet on a failed queue pair",
    ),
    (
        "DOORBELL_QUIESCE_MS",
        "milliseconds that destroying waits before it leaks",
    ),
    ("DOORBELL_RANK", "this process's rank, told by hand"),
    (
        "DOORBELL_RECORD",
        "what is kept of each queue pair for doorbell dump",
    ),
    ("DOORBELL_RENDEZVOUS", "where ranks meet"),
    (
        "DOORBELL_REPORT",
        "whether this process answers doorbell dump and stat",
    ),
    ("DOORBELL_ROCE", "the port of RoCE packets"),
    (
        "DOORBELL_ROCE_MTU",
        "payload of a packet of roce and verbs at most (path MTU)",
    ),
    (
        "DOORBELL_ROCE_RETRY",
        "repetitions before a RoCE QP gives up",
    ),
    ("DOORBELL_ROCE_TIMEOUT", "when a RoCE QP repeats"),
    ("DOORBELL_TRACE", "where a trace for Perfetto goes"),
    (
        "DOORBELL_VERBS",
        "the RDMA device of queue pairs connected over verbs",
    ),
    ("DOORBELL_WORLD", "the number of ranks, told by hand"),
];

const PREFIX: &str = "DOORBELL_";

/// What a variable of that name decides; `None`: there is none.
pub fn what(name: &str) -> Option<&'static str> {
    let found = VARIABLES.iter().find(|(known, _)| *known == name);
    found.map(|(_, what)| *what)
}

/// The variable that was probably meant by a `name` that is none: one or two letters are missing, too many, others or exchanged. A short name is
/// taken for another's own sooner.
pub fn meant(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix(PREFIX)?;
    let near = VARIABLES.iter().filter_map(|(known, _)| {
        let suffix = known.strip_prefix(PREFIX)?;
        let steps = strsim::osa_distance(name, suffix);
        let few = 1 + usize::from(suffix.len() > 7);
        (1..=few).contains(&steps).then_some((steps, *known))
    });
    near.min().map(|(_, known)| known)
}

/// A name that is nearly one of ours does nothing: said once a process.
pub(crate) fn warn_of_near_misses() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if what(&name).is_none()
                && let Some(meant) = meant(&name)
            {
                tracing::warn!("there is no variable {name}: {meant} is one");
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_keys_is_told_and_other_names_are_not() {
        for (name, variable) in [
            ("DOORBELL_ROCE_TIMOUT", Some("DOORBELL_ROCE_TIMEOUT")),
            ("DOORBELL_NCCL_TIMEOUTS", Some("DOORBELL_NCCL_TIMEOUT")),
            ("DOORBELL_ORCE", Some("DOORBELL_ROCE")),
            ("DOORBELL_HCA_CORE", Some("DOORBELL_HCA_CORES")),
            ("DOORBELL_GPU_COPIES_STYA", Some("DOORBELL_GPU_COPIES_STAY")),
            ("DOORBELL_ROCE", None),
            ("DOORBELL_RXE", None),
            ("DOORBELL_SEED", None),
            ("DOORBELL_TEST_RANK", None),
            ("DOORBELL_", None),
            ("ROCE", None),
        ] {
            assert_eq!(meant(name), variable, "{name}");
        }
    }

    #[test]
    fn names_are_sorted_and_each_is_there_once() {
        assert!(VARIABLES.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(what("DOORBELL_ROCE"), Some("the port of RoCE packets"));
    }
}
