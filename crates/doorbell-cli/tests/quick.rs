//! Every test of `perf`, small, with every byte checked; and the result file field by field.

mod common;
use common::{run, succeed, texts};
use serde_json::Value;

const TESTS: [&str; 10] = [
    "put-bw",
    "put-lat",
    "get-bw",
    "get-lat",
    "atomic-rate",
    "signal-lat",
    "send-bw",
    "send-lat",
    "forward",
    "post",
];

/// Runs with `--json -` and gives the parsed file.
fn results(args: &[&str]) -> Value {
    let mut all = vec!["perf"];
    all.extend(args);
    all.extend(["--json", "-"]);
    let out = succeed(&all);
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}\n{out}"))
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value
        .as_object()
        .expect("object")
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    keys
}

/// Every field of the schema, its type and whether it may be null in this test.
fn check_result(result: &Value, test: &str) {
    let latency = ["put-lat", "get-lat", "signal-lat", "send-lat", "forward"].contains(&test);
    let post = test == "post";
    let text = |key: &str| assert!(result[key].is_string(), "{test}: {key} is {}", result[key]);
    let count = |key: &str| assert!(result[key].is_u64(), "{test}: {key} is {}", result[key]);
    let figure = |key: &str, there: bool| {
        let value = &result[key];
        if there {
            assert!(
                value.as_f64().is_some_and(|v| v > 0.0),
                "{test}: {key} is {value}"
            );
        } else {
            assert!(value.is_null(), "{test}: {key} is {value}");
        }
    };
    let mut wanted = vec![
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
    wanted.sort_unstable();
    assert_eq!(keys(result), wanted);
    assert_eq!(result["test"], test);
    assert_eq!(result["gpu"], "host");
    text("initiator");
    text("sharing");
    assert!(result["roce"].is_null(), "{test}: no packets, no counters");
    if post {
        assert!(result["link"].is_null() && result["mem"].is_null());
    } else {
        text("link");
        text("mem");
    }
    for key in [
        "blocks", "threads", "qps", "depth", "batch", "size", "messages",
    ] {
        count(key);
        assert!(result[key].as_u64() > Some(0), "{test}: {key}");
    }
    figure("seconds", true);
    figure("messages_per_s", !latency);
    figure("bytes_per_s", !latency && !post);
    figure("cpu_cores_used", true);
    let alone = std::thread::available_parallelism().map_or(1, usize::from) < 2;
    figure(
        "baseline_ns",
        !(post || test == "atomic-rate" || latency && alone && test != "forward"),
    );
    if latency {
        let latency = &result["latency_ns"];
        assert_eq!(keys(latency), ["max", "min", "p50", "p99"]);
        let of = |key: &str| latency[key].as_u64().expect("nanoseconds");
        assert!(0 < of("min"), "{latency}");
        assert!(
            of("min") <= of("p50") && of("p50") <= of("p99") && of("p99") <= of("max"),
            "{latency}"
        );
    } else {
        assert!(result["latency_ns"].is_null());
    }
    assert_eq!(result["checked"], true);
    assert_eq!(result["errors"], 0);
}

#[test]
fn every_test_runs_quickly_and_correctly() {
    for test in TESTS {
        let json = results(&[test, "--quick"]);
        assert_eq!(keys(&json), ["environment", "results", "schema"]);
        assert_eq!(json["schema"], "doorbell-perf/1");
        let results = json["results"].as_array().expect("results");
        assert_eq!(results.len(), 1);
        check_result(&results[0], test);
        let environment = &json["environment"];
        for key in [
            "version",
            "started",
            "kernel",
            "gpu",
            "handler",
            "cq",
            "queue_mem",
        ] {
            assert!(
                environment[key].is_string(),
                "{test}: {key} is {}",
                environment[key]
            );
        }
        assert!(environment["cpus"].as_u64() > Some(0));
        assert!(environment["seed"].is_u64());
        assert!(environment["cuda"].is_null() && environment["driver"].is_null());
        assert!(
            environment["command"]
                .as_array()
                .is_some_and(|c| c.len() >= 4)
        );
    }
}

#[test]
fn the_readmes_first_command_says_that_every_byte_was_checked() {
    let out = succeed(&["perf", "put-bw", "--quick"]);
    assert!(out.contains("puts, every byte checked:"), "{out}");
    assert!(out.contains("none wrong"), "{out}");
    assert!(!out.contains('\x1b'), "no escape sequences in a pipe");
    let latency = succeed(&["perf", "put-lat", "--quick"]);
    for line in out.lines().chain(latency.lines()) {
        assert!(line.chars().count() <= 80, "too wide: {line}");
    }
}

/// The smallest queue that messages are taken for (tests/usage.rs has the next smaller one).
#[test]
fn messages_go_through_a_queue_of_sixteen_slots() {
    for poster in ["gpu", "cpu"] {
        let words = ["send-bw", "--check", "--iters", "1500", "--no-baseline"];
        let queue = ["--depth", "16", "--initiator", poster];
        let json = results(&[&words[..], &queue].concat());
        assert_eq!(json["results"][0]["messages"], 1500, "{poster}");
        assert_eq!(json["results"][0]["errors"], 0, "{poster}");
    }
}

#[test]
fn sharing_modes_handlers_and_queues() {
    for words in [
        "--sharing exclusive --blocks 3 --threads 2",
        "--sharing block --blocks 2 --threads 8",
        "--sharing gpu --blocks 2 --threads 8",
        "--sharing gpu --blocks 4 --threads 4 --handler doorbell --cq per-slot --depth 16 --batch 1",
        "--sharing block --blocks 2 --threads 4 --handler producer --depth 64 --batch 7",
        "--qps 300",
        "--hca-cores 0",
        "--hca-cores 2 --blocks 4",
        "--size 1,3,4097,1M",
        "--mem gpu",
    ] {
        let mut args = vec!["put-bw", "--check", "--iters", "1500", "--no-baseline"];
        args.extend(words.split_whitespace());
        let json = results(&args);
        for result in json["results"].as_array().expect("results") {
            let threads = result["blocks"].as_u64().zip(result["threads"].as_u64());
            let posters = threads.map(|(b, t)| b * t).expect("counts");
            assert_eq!(result["messages"], 1500 * posters, "{words}");
            assert_eq!(
                (&result["checked"], &result["errors"]),
                (&true.into(), &0.into()),
                "{words}"
            );
            assert!(result["baseline_ns"].is_null());
        }
    }
}

#[test]
fn initiators_are_compared() {
    let args = [
        "perf",
        "put-bw",
        "--check",
        "--iters",
        "2000",
        "--initiator",
        "gpu,assisted,proxy,cpu",
    ];
    let out = succeed(&args);
    for who in ["gpu", "assisted", "proxy", "cpu"] {
        assert!(
            out.lines().any(|l| l.starts_with(who)),
            "{who} is missing in\n{out}"
        );
    }
    for who in ["x assisted", "x proxy", "x cpu"] {
        assert!(out.contains(who), "{who} is missing in\n{out}");
    }
}

#[test]
fn the_same_seed_says_so_and_time_limits_hold() {
    let json = results(&["get-bw", "--secs", "0.2", "--seed", "7", "--size", "64,128"]);
    assert_eq!(json["environment"]["seed"], 7);
    let results = json["results"].as_array().expect("results");
    assert_eq!(results.len(), 2);
    for result in results {
        assert_eq!(result["checked"], false);
        // It ran for its time, whatever the machine managed to do in it.
        assert!(result["seconds"].as_f64() >= Some(0.2), "{result}");
    }
    let json = self::results(&["put-bw", "--check", "--secs", "0.1", "--no-baseline"]);
    assert_eq!(json["results"][0]["checked"], true);
}

#[test]
fn a_wrong_byte_is_found_told_and_fails_the_run() {
    for test in ["put-bw", "get-bw", "atomic-rate"] {
        for link in ["loopback", "shm"] {
            let args = [
                "perf",
                test,
                "--check",
                "--iters",
                "500",
                "--link",
                link,
                "--sabotage",
                "--json",
                "-",
            ];
            let output = run(&args);
            let (out, err) = texts(&output);
            assert_eq!(output.status.code(), Some(3), "{test} {link}\n{out}\n{err}");
            let json: Value = serde_json::from_str(&out).expect("JSON");
            assert!(json["results"][0]["errors"].as_u64() > Some(0), "{out}");
            assert!(err.contains("WRONG"), "{err}");
            if test != "atomic-rate" {
                assert!(
                    err.contains("expected 0x") && err.contains("got 0x"),
                    "{err}"
                );
                assert_eq!(json["results"][0]["errors"], 1);
            }
        }
    }
}

#[test]
fn counters_say_what_the_engine_did() {
    let out = succeed(&["perf", "put-bw", "--check", "--iters", "1000", "--counters"]);
    assert!(out.contains("engine: 1,000 work requests in"), "{out}");
}

#[test]
fn results_are_written_to_a_file_too() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("out.json");
    let out = succeed(&[
        "perf",
        "post",
        "--iters",
        "1000",
        "--json",
        path.to_str().expect("path"),
    ]);
    assert!(out.contains("puts posted"), "{out}");
    let json: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("the file")).expect("JSON");
    assert_eq!(json["results"][0]["messages"], 1000);
}

#[test]
fn a_run_that_cannot_finish_in_time_says_why_and_fails() {
    // The doorbell of one put is lost: nothing happens from there on, and the time-out is about that.
    let output = run(&[
        "perf",
        "put-lat",
        "--iters",
        "1000000",
        "--timeout",
        "0.5",
        "--gpu",
        "host",
        "--fault",
        "wqe=1000: drop-doorbell",
    ]);
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{out}\n{err}");
    assert!(err.contains("doorbell: put-lat"), "{err}");
}
