//! `doorbell-perf/1`: the result file of `doorbell perf --json`.
//! One object with `schema`, `environment` and `results`; one result a measured case, in the
//! order measured; an absent figure is null, never zero and never left out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The name and version every result file opens with.
pub(crate) const SCHEMA: &str = "doorbell-perf/1";

/// The whole file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) schema: String,
    pub(crate) environment: Environment,
    pub(crate) results: Vec<Outcome>,
}

/// Where and with what the run was made: figures compare only within one environment.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub(crate) struct Environment {
    /// Version of the command, and the git description it was built from.
    pub(crate) version: String,
    pub(crate) git: Option<String>,
    /// Cargo profile (`release` or `debug`) and target triple.
    pub(crate) profile: Option<String>,
    pub(crate) target: Option<String>,
    /// The arguments of this run.
    pub(crate) command: Vec<String>,
    /// Start of the run, UTC, RFC 3339 with seconds.
    pub(crate) started: String,
    pub(crate) kernel: Option<String>,
    pub(crate) cpu: Option<String>,
    /// Processors this process may run on, and the cgroup's CPU quota in cores.
    pub(crate) cpus: u64,
    pub(crate) cpu_quota: Option<f64>,
    pub(crate) memory_bytes: Option<u64>,
    /// The GPU's name (`host` when threads play it), driver and CUDA versions.
    pub(crate) gpu: Option<String>,
    pub(crate) driver: Option<String>,
    pub(crate) cuda: Option<String>,
    /// What is the same for every case of the run.
    pub(crate) handler: Option<String>,
    pub(crate) cq: Option<String>,
    pub(crate) queue_mem: Option<String>,
    /// Engine threads; 0 means that the waiters drive the engine.
    pub(crate) hca_cores: Option<u64>,
    /// Seed of payloads and orders: the same seed repeats the same bytes.
    pub(crate) seed: Option<u64>,
}

/// One measured case.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) test: String,
    pub(crate) gpu: String,
    /// `gpu`, `assisted`, `proxy` or `cpu`; `gpu:FILE` when `--module FILE` posted.
    pub(crate) initiator: String,
    pub(crate) sharing: String,
    pub(crate) link: Option<String>,
    /// Where the payload lies: `host` or `gpu`.
    pub(crate) mem: Option<String>,
    pub(crate) blocks: u64,
    pub(crate) threads: u64,
    pub(crate) qps: u64,
    pub(crate) depth: u64,
    pub(crate) batch: u64,
    /// Bytes a message.
    pub(crate) size: u64,
    /// Messages that were timed, and the seconds they took.
    pub(crate) messages: u64,
    pub(crate) seconds: f64,
    pub(crate) messages_per_s: Option<f64>,
    pub(crate) bytes_per_s: Option<f64>,
    pub(crate) latency_ns: Option<Latency>,
    /// CPU time of every process of the run over the timed seconds.
    pub(crate) cpu_cores_used: Option<f64>,
    /// The test's natural baseline, ns a message (bandwidth) or median ns (latency).
    pub(crate) baseline_ns: Option<f64>,
    /// Every byte of every message was compared with what was sent.
    pub(crate) checked: bool,
    /// Wrong bytes, lost or doubled messages, failed work requests.
    pub(crate) errors: u64,
    /// What RoCE connections and ports counted during the case, by the names of the rdma tool; null on other links.
    pub(crate) roce: Option<Roce>,
}

/// Counters of both sides.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(crate) struct Roce {
    pub(crate) initiator: BTreeMap<String, u64>,
    pub(crate) target: BTreeMap<String, u64>,
}

/// Nanoseconds; each is a sample that was measured.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(crate) struct Latency {
    pub(crate) min: u64,
    pub(crate) p50: u64,
    pub(crate) p99: u64,
    pub(crate) max: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_figures_are_null_and_keys_are_the_schemas() {
        let outcome = Outcome {
            test: "put-bw".into(),
            gpu: "host".into(),
            initiator: "gpu".into(),
            sharing: "exclusive".into(),
            link: None,
            mem: None,
            blocks: 1,
            threads: 1,
            qps: 1,
            depth: 64,
            batch: 1,
            size: 8,
            messages: 10,
            seconds: 0.5,
            messages_per_s: Some(20.0),
            bytes_per_s: None,
            latency_ns: None,
            cpu_cores_used: None,
            baseline_ns: None,
            checked: true,
            errors: 0,
            roce: None,
        };
        let text = serde_json::to_string(&outcome).unwrap();
        let keys = [
            "test",
            "gpu",
            "initiator",
            "sharing",
            "link",
            "mem",
            "blocks",
            "threads",
            "qps",
            "depth",
            "batch",
            "size",
            "messages",
            "seconds",
            "messages_per_s",
            "bytes_per_s",
            "latency_ns",
            "cpu_cores_used",
            "baseline_ns",
            "checked",
            "errors",
            "roce",
        ];
        let mut at = 0;
        for key in keys {
            let found = text[at..]
                .find(&format!("\"{key}\":"))
                .unwrap_or_else(|| panic!("{key} is missing or out of order in {text}"));
            at += found;
        }
        assert!(text.contains("\"latency_ns\":null"));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value.as_object().unwrap().len(), keys.len());
    }
}
