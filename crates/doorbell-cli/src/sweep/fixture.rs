//! Results as a sweep leaves them, for tests: invented figures of every experiment.

use super::results::{Point, Repetition, Results, SCHEMA};
use crate::schema::{Environment, Latency};
use crate::stats::PERCENTILES;

/// A complete sweep of a small machine without a GPU.
pub(crate) fn results() -> Results {
    let mut points = Vec::new();
    for (initiator, base) in [("gpu", 10e6), ("assisted", 8e6), ("proxy", 4e6)] {
        for blocks in [1, 2, 4, 8] {
            let mut p = point("blocks", "put-bw", initiator, "loopback");
            (p.blocks, p.qps) = (blocks, blocks);
            points.push(rate(p, base * (1.0 + blocks as f64 / 10.0)));
        }
    }
    for (experiment, test) in [("sizes", "put-bw"), ("gets", "get-bw")] {
        for (link, base) in [("loopback", 10e6), ("shm", 9e6), ("roce", 1e6)] {
            for size in [8, 4096, 1 << 20] {
                let mut p = point(experiment, test, "gpu", link);
                p.size = size;
                let mut p = rate(p, base / (1.0 + size as f64 / 4096.0));
                for (at, r) in p.repetitions.iter_mut().enumerate() {
                    r.baseline_ns = Some((2.0 + size as f64 / 20.0) * (1.0 + at as f64 / 50.0));
                }
                p.summarise();
                points.push(p);
            }
        }
    }
    for (link, ns) in [("loopback", 400), ("shm", 300), ("roce", 9000)] {
        for test in ["put-lat", "get-lat"] {
            points.push(latency(point("latency", test, "gpu", link), ns));
        }
    }
    for qps in [1, 64] {
        let mut p = point("queues", "put-bw", "gpu", "loopback");
        p.qps = qps;
        points.push(rate(p, 12e6 - qps as f64));
    }
    Results {
        schema: SCHEMA.to_owned(),
        environment: environment(),
        quick: true,
        complete: true,
        repeat: 3,
        seconds: 31.5,
        notes: Vec::new(),
        percentiles: PERCENTILES.to_vec(),
        points,
    }
}

fn environment() -> Environment {
    Environment {
        version: "0.1.0".into(),
        git: Some("abc1234".into()),
        profile: Some("release".into()),
        target: Some("x86_64-unknown-linux-gnu".into()),
        command: vec!["doorbell".into(), "sweep".into(), "--quick".into()],
        started: "2026-01-02T03:04:05Z".into(),
        kernel: Some("Linux 6.12".into()),
        cpu: Some("Some CPU & <more>".into()),
        cpus: 2,
        cpu_quota: None,
        memory_bytes: Some(8 << 30),
        gpu: Some("host".into()),
        driver: None,
        cuda: None,
        handler: None,
        cq: None,
        queue_mem: None,
        hca_cores: Some(1),
        seed: Some(1),
    }
}

fn point(experiment: &str, test: &str, initiator: &str, link: &str) -> Point {
    Point {
        experiment: experiment.into(),
        test: test.into(),
        gpu: "host".into(),
        initiator: initiator.into(),
        sharing: "exclusive".into(),
        link: link.into(),
        mem: "host".into(),
        blocks: 1,
        threads: 1,
        qps: 1,
        depth: 1024,
        batch: 32,
        size: 8,
        command: format!("doorbell perf {test} --initiator {initiator} --link {link}"),
        messages_per_s: None,
        bytes_per_s: None,
        cpu_cores_used: None,
        p50_ns: None,
        p99_ns: None,
        percentiles_ns: Vec::new(),
        baseline_ns: None,
        failed: None,
        repetitions: Vec::new(),
    }
}

fn repetition(at: u32) -> Repetition {
    Repetition {
        at_s: f64::from(at) * 10.0,
        messages: 1_000_000,
        seconds: 0.1,
        messages_per_s: None,
        latency_ns: None,
        cpu_cores_used: Some(1.1),
        errors: 0,
        baseline_ns: None,
        percentiles_ns: Vec::new(),
    }
}

/// Three repetitions, one per cent apart.
fn rate(mut point: Point, per_s: f64) -> Point {
    for at in 0..3 {
        let mut r = repetition(at);
        r.messages_per_s = Some(per_s * (0.99 + 0.01 * f64::from(at)));
        point.repetitions.push(r);
    }
    point.summarise();
    point
}

fn latency(mut point: Point, ns: u64) -> Point {
    for at in 0..3u32 {
        let mut r = repetition(at);
        let ns = ns + ns * u64::from(at) / 100;
        r.latency_ns = Some(Latency {
            min: ns / 2,
            p50: ns,
            p99: 3 * ns,
            max: 90 * ns,
        });
        r.percentiles_ns = (1..=PERCENTILES.len() as u64).map(|i| ns * i / 8).collect();
        point.repetitions.push(r);
    }
    point.summarise();
    point
}
