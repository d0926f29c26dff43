//! What people type wrongly is refused with the option to change; exit statuses tell runs apart.

mod common;
use common::{doorbell, run, succeed, texts, words};

#[test]
fn wrong_arguments_are_refused_with_a_remedy() {
    for (args, status, part) in [
        ("perf", 2, "<TEST>"),
        ("perf nonsense", 2, "put-bw"),
        ("explain", 2, "<OPERATION>"),
        ("explain push", 2, "signal"),
        ("explain put --bad luck", 2, "rkey"),
        ("explain send --bad rkey", 2, "--bad lkey"),
        ("perf put-bw --size 4Q", 2, "1024-based"),
        ("perf put-bw --size 64:8", 2, "backwards"),
        ("perf put-bw --depth 1000", 2, "nearest is 1024"),
        ("perf put-bw --secs 0", 2, "seconds above 0"),
        ("perf put-bw --iters 5 --secs 1", 2, "cannot be used with"),
        ("perf put-bw --blocks 0", 2, "outside 1 to"),
        ("perf put-bw --pin x", 2, "CPU number"),
        ("perf put-bw --blocks 4 --qps 2", 2, "need 4"),
        ("perf put-bw --batch 64 --depth 32", 2, "raise --depth"),
        ("perf send-bw --depth 8", 2, "raise --depth to 16"),
        ("perf put-lat --blocks 2", 2, "leave --blocks"),
        ("perf post --link shm", 2, "leave --link"),
        ("perf forward --initiator cpu", 2, "--initiator"),
        ("perf atomic-rate --size 16", 2, "leave --size"),
        ("perf put-bw --gpu tpu", 2, "cuda:N"),
        ("perf put-bw --link roce:", 2, "udp://"),
        ("perf put-bw --link roce:raw:", 2, "raw:eth0"),
        ("perf put-bw --link roce:tcp:x", 2, "none of udp://"),
        ("perf put-bw --link roce:udp://0.0.0.0", 2, "every address"),
        ("perf put-bw --link roce:udp://224.0.0.5", 2, "multicast"),
        ("perf put-bw --link roce --net-fault=", 2, "--net-fault"),
        (
            "perf put-bw --link roce --net-fault los=1%",
            2,
            "one of loss",
        ),
        (
            "perf put-bw --link roce --connect ::1:4791",
            2,
            "[::1]:4791",
        ),
        ("perf put-bw --link roce --connect h:99999", 2, "1 to 65535"),
        ("serve --listen a:b:c", 2, "brackets"),
        ("serve --listen 5000", 2, "0.0.0.0:5000"),
        ("serve --port 4792", 2, "udp://ADDR:4792"),
        ("serve --memory 0", 2, "too little"),
        (
            "serve --listen 127.0.0.1:0 --port udp://255.255.255.255",
            2,
            "broadcast",
        ),
        (
            "serve --listen 127.0.0.1:0 --port udp://192.0.2.77",
            1,
            "--port udp://192.0.2.77 cannot be opened",
        ),
        (
            "serve --listen 127.0.0.1:0 --port raw:nowhere0",
            1,
            "No such device",
        ),
        ("serve --listen 192.0.2.77", 1, "192.0.2.77:4791"),
        ("pingpong --roce raw:", 2, "raw:eth0"),
        ("pingpong -m 1000", 2, "1024"),
        (
            "perf put-bw --quick --link roce --pcap /nonexistent/x",
            1,
            "/nonexistent/x: No such file",
        ),
        ("perf put-bw --gpu cuda:99 --iters 1", 1, "CUDA"),
        ("perf put-bw --pin 100000 --iters 1", 1, "--pin"),
        (
            "perf put-bw --iters 1 --module /nonexistent.cubin",
            1,
            "/nonexistent.cubin",
        ),
        (
            "perf put-bw --iters 1 --json /nonexistent/x.json",
            1,
            "--json",
        ),
        ("perf put-bw --iters 1 --json /", 1, "--json"),
        (
            "perf put-bw --iters 1 --trace /nonexistent/t.json",
            1,
            "/nonexistent/t.json",
        ),
        ("perf put-bw --iters 1 --trace /", 1, "name another file"),
        (
            "perf put-bw --iters 1 --module /dev/zero",
            1,
            "regular file",
        ),
        (
            "perf put-bw --iters 1 --module Cargo.toml --gpu host",
            1,
            "--gpu cuda",
        ),
        (
            "perf put-bw --iters 1 --blocks 65535 --gpu host",
            2,
            "lower --blocks",
        ),
    ] {
        let args: Vec<&str> = args.split_whitespace().collect();
        let output = run(&args);
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(status), "{args:?}\n{out}\n{err}");
        assert!(
            !out.contains("ok"),
            "{args:?}: refused after the run\n{out}"
        );
        assert!(err.contains(part), "{args:?}: `{part}` is not in\n{err}");
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error_that_says_where() {
    for args in ["info", "perf put-bw --quick"] {
        let full = std::fs::File::options().write(true).open("/dev/full");
        let args: Vec<&str> = args.split_whitespace().collect();
        let output = doorbell(&args)
            .stdout(full.expect("/dev/full"))
            .output()
            .expect("running doorbell");
        let (_, err) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains("standard output"), "{err}");
    }
}

#[test]
fn a_bad_variable_is_an_error_that_names_it() {
    for (args, name, value, status, part) in [
        (&["info"][..], "DOORBELL_HCA_CORES", "many", 1, "many"),
        // A depth that a device may have, and these tests may not.
        (
            &["perf", "signal-lat", "--quick"],
            "DOORBELL_DEPTH",
            "1",
            2,
            "2 to",
        ),
    ] {
        let output = doorbell(args)
            .env(name, value)
            .output()
            .expect("running doorbell");
        let (_, err) = texts(&output);
        assert_eq!(output.status.code(), Some(status), "{err}");
        assert!(err.contains(name) && err.contains(part), "{err}");
    }
}

#[test]
fn help_shows_examples_and_exit_statuses() {
    assert!(succeed(&["--help"]).contains("Exit status"));
    let help = succeed(&["perf", "--help"]);
    for part in [
        "Examples:",
        "put-bw",
        "forward",
        "--initiator",
        "--sharing",
        "--json",
    ] {
        assert!(help.contains(part), "{part} is missing");
    }
    for line in help.lines() {
        assert!(line.chars().count() <= 80, "too wide: {line}");
    }
    assert!(succeed(&["--version"]).starts_with("doorbell "));
}

#[test]
fn info_says_what_was_chosen_and_why() {
    let text = succeed(&["info"]);
    for part in [
        "GPU",
        "HCA",
        "Links",
        "Machine",
        "Settings",
        "memlock",
        "(DOORBELL_GPU)",
        "loopback",
        "shm",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&succeed(&["info", "--json"])).expect("JSON");
    assert_eq!(json["schema"], "doorbell-info/1");
    assert_eq!(json["gpu"]["backend"], "host");
    assert_eq!(json["hca"]["provider"], "soft");
    assert_eq!(json["links"][1]["name"], "shm");
    assert_eq!(json["links"][1]["usable"], true, "{}", json["links"][1]);
    let settings = json["settings"].as_array().expect("settings");
    let gpu = settings.iter().find(|s| s["name"] == "gpu").expect("gpu");
    assert_eq!(
        (&gpu["value"], &gpu["source"]),
        (&"host".into(), &"environment".into())
    );
    let json = succeed(&["info", "--json", "--hca-cores", "0"]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["hca"]["cores"], 0);
}

#[test]
fn a_reader_that_goes_away_is_no_drama() {
    use std::process::Stdio;
    for args in [
        "info",
        "perf put-bw --quick --no-baseline",
        "perf put-bw --quick --link roce --no-baseline",
        "dump --help",
    ] {
        let mut child = doorbell(&words(args))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starting doorbell");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("its end");
        assert_eq!(texts(&output).1, "", "{args}");
    }
    // Nobody reads what went wrong either: that is its status, and no panic.
    for (args, status) in [
        ("perf put-bw --pin 100000 --iters 1", 1),
        ("info --gpu tpu", 2),
    ] {
        let mut child = doorbell(&words(args))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starting doorbell");
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(
            child.wait().expect("its end").code(),
            Some(status),
            "{args}"
        );
    }
}

/// `doorbell … | head -1`: what a status says does not depend on who reads.
#[test]
fn a_reader_that_goes_away_changes_no_status() {
    let machine = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../doorbell-doctor/tests/machines/connectx-peermem.node"
    );
    for (args, status) in [
        (vec!["explain", "put"], 0),
        (vec!["info"], 0),
        (vec!["man"], 0),
        (vec!["completions", "bash"], 0),
        (vec!["doctor", "--root", machine], 1),
        (vec!["perf", "put-bw", "--quick", "--no-baseline"], 0),
        (
            vec!["perf", "put-bw", "--quick", "--no-baseline", "--sabotage"],
            3,
        ),
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = common::doorbell(&args);
        let output = command.stdout(writer).output().expect("it runs");
        let (_, err) = common::texts(&output);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {err}");
        assert!(!err.contains("panicked"), "{args:?}: {err}");
    }
}

#[test]
fn variables_that_mean_nothing_are_named_once_with_what_they_may_be() {
    let mut command = common::doorbell(&["perf", "put-bw", "--quick", "--no-baseline"]);
    command
        .env("DOORBELL_LOG", "garbage")
        .env("DOORBELL_REPORT", "maybe");
    let output = command.output().expect("it runs");
    let (_, err) = common::texts(&output);
    assert!(output.status.success(), "{err}");
    for part in ["DOORBELL_LOG=garbage", "DOORBELL_REPORT=maybe"] {
        assert_eq!(err.matches(part).count(), 1, "{err}");
    }
    assert!(
        err.contains("trace") && err.contains("on (the default) and off"),
        "{err}"
    );
}

/// What cannot go well is said before anything is waited for.
#[test]
fn what_cannot_go_well_is_said_at_once_with_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    let status = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(status.expect("mkfifo").success());
    let pipe = pipe.to_str().expect("text");
    let perf = [
        "perf",
        "put-bw",
        "--quick",
        "--no-baseline",
        "--timeout",
        "100",
    ];
    for (more, env, status, part) in [
        (
            vec!["--link", "roce", "--pcap", pipe],
            vec![],
            1,
            "nobody reads",
        ),
        (vec!["--trace", pipe], vec![], 1, "nobody reads"),
        (vec!["--json", pipe], vec![], 1, "nobody reads"),
        (
            vec!["--link", "roce", "--pcap", "/"],
            vec![],
            1,
            "can be written",
        ),
        (
            vec!["--link", "roce", "--connect", "192.0.2.1:0"],
            vec![],
            2,
            "port 0",
        ),
        (
            vec![
                "--link",
                "roce",
                "--connect",
                "192.0.2.1",
                "--mem",
                "gpu",
                "--initiator",
                "cpu",
            ],
            vec![],
            2,
            "--initiator cpu",
        ),
        (
            vec!["--rendezvous", "unix:@x"],
            vec![],
            2,
            "nobody launched",
        ),
        (
            vec!["--link", "roce"],
            vec![("OMPI_COMM_WORLD_RANK", "x"), ("OMPI_COMM_WORLD_SIZE", "2")],
            2,
            "not a number",
        ),
    ] {
        let args: Vec<&str> = perf.into_iter().chain(more).collect();
        let mut command = common::doorbell(&args);
        let output = command.envs(env).output().expect("it runs");
        let (_, err) = common::texts(&output);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {err}");
        assert!(err.contains(part), "{args:?}: {err}");
    }
    for (args, part) in [
        (
            vec!["perf", "put-bw", "--timeout", "-1"],
            "`-1` is not a time",
        ),
        (
            vec!["perf", "put-bw", "--connect", "fe80::1%eth0"],
            "needs brackets",
        ),
        (vec!["pingpong", "-s", "8Q"], "use K, M, G"),
    ] {
        let (_, err) = common::texts(&run(&args));
        assert!(err.contains(part), "{args:?}: {err}");
    }
}

#[test]
fn half_of_a_launchers_variables_is_named_and_who_waits_may_have_an_end() {
    let mut command = common::doorbell(&["perf", "put-bw", "--quick", "--no-baseline"]);
    let output = command
        .env("OMPI_COMM_WORLD_RANK", "0")
        .output()
        .expect("it runs");
    let (_, err) = common::texts(&output);
    assert!(output.status.success(), "{err}");
    assert!(err.contains("is set without OMPI_COMM_WORLD_SIZE"), "{err}");
    for args in [
        vec!["pingpong", "--wait", "0.2", "--port", "0"],
        vec!["serve", "--wait", "0.2", "--listen", "127.0.0.1:0"],
    ] {
        let output = run(&args);
        let (_, err) = common::texts(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {err}");
        assert!(err.contains("came"), "{args:?}: {err}");
    }
}
