//! `doorbell hwtest` with a device in memory: what it finds, what it writes whatever comes of it, and what it says of what stands in the way.

use std::io::BufRead as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

/// The device in memory as a shared library, built beside this test.
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let own = std::env::current_exe().expect("this program");
        let folder = own.ancestors().nth(2).expect("target/PROFILE");
        let profile = match folder.file_name().and_then(|n| n.to_str()) {
            Some("debug") | None => "dev",
            Some(name) => name,
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
        let built = Command::new(cargo)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["build", "--quiet", "--offline", "-p", "doorbell-verbs-mock"])
            .args([
                "--example",
                "mock_rdma",
                "--profile",
                profile,
                "--target-dir",
            ])
            .arg(folder.parent().expect("target"))
            .status()
            .expect("cargo");
        assert!(built.success(), "the mock is not built");
        folder.join("examples/libmock_rdma.so")
    })
}

/// A run in a folder of its own, and what it wrote.
struct Run {
    status: Option<i32>,
    said: String,
    page: String,
    json: Value,
}

fn command(kind: &str, folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doorbell"));
    command
        .arg("hwtest")
        .current_dir(folder)
        .env("DOORBELL_IBVERBS", library())
        .env("DOORBELL_LIBEFA", library())
        .env("DOORBELL_GPU", "host")
        .env("MOCK_RDMA", kind);
    command
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn hwtest(kind: &str, args: &[&str]) -> Run {
    let folder = tempfile::tempdir().expect("a folder");
    let output = command(kind, folder.path())
        .args(args)
        .output()
        .expect("it runs");
    let said = text(&output);
    let read = |name: &str| {
        std::fs::read_to_string(folder.path().join(name))
            .unwrap_or_else(|e| panic!("{name}: {e}: {said}"))
    };
    Run {
        status: output.status.code(),
        page: read("doorbell-hwtest.txt"),
        json: serde_json::from_str(&read("doorbell-hwtest.json")).expect("JSON"),
        said,
    }
}

const SHORT: [&str; 5] = ["--no-perf", "--signals", "500", "--timeout", "20"];

#[test]
fn every_step_goes_well_on_a_device_that_does_as_it_should() {
    for kind in ["", "infiniband", "efa"] {
        let run = hwtest(kind, &SHORT);
        assert_eq!(run.status, Some(0), "{kind}: {}", run.said);
        let device = &run.json["devices"][0];
        assert_eq!(device["steps"].as_array().expect("steps").len(), 10);
        assert_eq!(
            (&run.json["complete"], &run.json["nothing"]),
            (&true.into(), &Value::Null)
        );
        assert!(
            run.page.contains("all 10 steps and measurements went well"),
            "{}",
            run.page
        );
        assert!(
            run.page.contains("every step (10), nothing measured"),
            "{}",
            run.page
        );
        assert!(!run.page.contains("UDP"), "{}", run.page);
        // It is told where to send it, and whose library it was is known or said not to be.
        assert!(
            run.said.contains("send doorbell-hwtest.json"),
            "{}",
            run.said
        );
        assert_eq!(run.json["host"]["rdma_core"], "unknown");
        assert!(
            run.json["host"]["library"]["file"]
                .as_str()
                .expect("a file")
                .contains("libmock_rdma")
        );
        assert!(
            run.json["host"]["gpu_why"]
                .as_str()
                .is_some_and(|why| !why.is_empty())
        );
        assert!(run.page.contains("\nGPU none: "), "{}", run.page);
    }
}

#[test]
fn the_gid_that_was_used_is_recorded() {
    let usual = hwtest("", &SHORT);
    let chosen = hwtest("", &[&SHORT[..], &["--device", "mock1?gid=0"]].concat());
    let gid = |run: &Run| {
        run.json["devices"][0]["gid"]
            .as_str()
            .expect("a GID")
            .to_owned()
    };
    assert!(
        gid(&usual).contains("(index 2, RoCE v2)"),
        "{}",
        gid(&usual)
    );
    assert!(
        gid(&chosen).contains("fe80::") && gid(&chosen).contains("(index 0, "),
        "{}",
        gid(&chosen)
    );
    assert!(chosen.page.contains(&gid(&chosen)), "{}", chosen.page);
}

#[test]
fn an_option_of_another_kind_of_device_is_refused_when_it_is_opened() {
    let run = hwtest(
        "",
        &[&SHORT[..], &["--device", "mock1?order=inline"]].concat(),
    );
    assert_eq!(run.status, Some(3), "{}", run.said);
    assert!(
        run.page.contains("order=inline is of an EFA"),
        "{}",
        run.page
    );
    let run = hwtest(
        "efa",
        &[&SHORT[..], &["--device", "mock1?order=inline"]].concat(),
    );
    assert_eq!(run.status, Some(0), "{}", run.said);
}

/// What the kernel has on the PCI bus is told even where there is no RDMA device.
#[test]
fn network_controllers_are_listed_whatever_libibverbs_says() {
    let run = hwtest("none", &SHORT);
    let rdma = &run.json["host"]["rdma"];
    let adapters = rdma["adapters"].as_array().expect("a list");
    let count = |words: &str| run.page.lines().filter(|l| l.starts_with(words)).count();
    assert_eq!(count("network controller "), adapters.len(), "{}", run.page);
    assert_eq!(count("RDMA modules "), 1, "{}", run.page);
    assert!(rdma["modules"].is_array() && rdma["providers"].is_array());
}

#[test]
fn two_outputs_of_a_command_are_two_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let status = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_doorbell"))
            .current_dir(folder.path())
            .args(args)
            .output()
            .expect("it runs");
        assert!(
            text(&output).contains("one and the same place"),
            "{}",
            text(&output)
        );
        output.status.code()
    };
    for (a, b) in [("--json", "--page"), ("--page", "--json")] {
        assert_eq!(status(&["hwtest", a, "x", b, "./x"]), Some(2));
    }
    let perf = ["perf", "put-bw", "--quick", "--json", "x"];
    assert_eq!(status(&[&perf[..], &["--trace", "x"]].concat()), Some(2));
    assert_eq!(status(&[&perf[..], &["--pcap", "./x"]].concat()), Some(2));
    assert_eq!(std::fs::read_dir(folder.path()).expect("listed").count(), 0);
}

#[test]
fn what_was_given_does_not_steer_a_terminal() {
    for args in [
        &["hwtest", "--device", "mo\u{1b}[31mck"][..],
        &["hwtest", "--peer", "ho\u{1b}[31mst"],
        &["perf", "put-bw", "--link", "verbs:mo\u{1b}[31mck"],
        &["serve", "--port", "verbs:mo\u{1b}[31mck"],
        &["info", "--gpu", "mo\u{1b}[31mck"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_doorbell"))
            .args(args)
            .output()
            .expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output));
        let bytes = [output.stdout, output.stderr].concat();
        assert!(
            !bytes.contains(&0x1b),
            "{args:?}: {}",
            String::from_utf8_lossy(&bytes)
        );
    }
}

#[test]
fn that_nothing_could_be_tried_is_a_result_too() {
    for (kind, words) in [
        ("down", "port 1 of RDMA device mock1 is down, not active"),
        (
            "iwarp",
            "it speaks iWARP, whose connections are made by rdma_cm",
        ),
        ("locked", "this user may not open /dev/infiniband/uverbs1"),
        ("none", "there is no RDMA device"),
    ] {
        let run = hwtest(kind, &SHORT);
        assert_eq!(run.status, Some(1), "{kind}: {}", run.said);
        assert!(
            run.json["nothing"].as_str().expect("why").contains(words),
            "{kind}: {}",
            run.json
        );
        assert!(
            run.page.contains("nothing was tested") && run.page.contains(words),
            "{kind}: {}",
            run.page
        );
        assert!(
            run.said.contains("send doorbell-hwtest.json"),
            "{kind}: {}",
            run.said
        );
        assert_eq!(run.page.matches(words).count(), 1, "{kind}: {}", run.page);
        // No list has a line of it.
        assert!(!run.page.contains("HARDWARE.md"), "{kind}: {}", run.page);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let output = command("", folder.path())
        .env("DOORBELL_IBVERBS", "/no/such.so")
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let page = std::fs::read_to_string(folder.path().join("doorbell-hwtest.txt")).expect("a page");
    assert!(page.contains("install rdma-core"), "{page}");
}

#[test]
fn a_device_that_is_not_there_is_told_with_those_that_are() {
    let run = hwtest("", &[&SHORT[..], &["--device", "mlx5_7"]].concat());
    assert_eq!(run.status, Some(1), "{}", run.said);
    assert!(
        run.page
            .contains("there is no such device or port: there is mock1:1"),
        "{}",
        run.page
    );
    let run = hwtest(
        "",
        &[&SHORT[..], &["--device", "mlx5_7", "--device", "mock1"]].concat(),
    );
    // The other was tested, and what was asked for was not.
    assert_eq!(run.status, Some(3), "{}", run.said);
    assert!(
        run.page
            .contains("all 10 steps and measurements went well; mlx5_7 was asked for and NOT TESTED: there is no such device"),
        "{}",
        run.page
    );
    assert!(
        run.page.contains("not tested: there is no such device"),
        "{}",
        run.page
    );
}

#[test]
fn a_peer_without_a_way_is_told_with_both_addresses_and_nothing_else_is_tried() {
    let run = hwtest("unreachable", &SHORT);
    assert_eq!(run.status, Some(3), "{}", run.said);
    let steps = run.json["devices"][0]["steps"].as_array().expect("steps");
    assert_eq!(steps.len(), 1, "{}", run.page);
    let said = steps[0]["said"].as_str().expect("words");
    let addresses = "from 10.99.0.1, GID index 2, to peer 10.99.0.1";
    assert!(
        said.contains(addresses) && said.contains("Network is unreachable"),
        "{said}"
    );
    assert_eq!(said.matches("RTR").count(), 1, "{said}");
}

/// What `perf` and `info` say where the only device is of no use, by itself and by name.
#[test]
fn the_reason_is_the_same_wherever_a_device_is_asked_for() {
    for (kind, words) in [
        ("down", "port 1 of RDMA device mock1 is down, not active"),
        ("iwarp", "it speaks iWARP"),
        ("none", "there is no RDMA device"),
    ] {
        for link in ["verbs", "verbs:mock1"] {
            let args = [
                &["perf", "put-bw", "--gpu", "host", "--link", link][..],
                &["info", "--gpu", "host"],
            ];
            for args in &args[..if link == "verbs" { 2 } else { 1 }] {
                let output = Command::new(env!("CARGO_BIN_EXE_doorbell"))
                    .args(*args)
                    .env("DOORBELL_IBVERBS", library())
                    .env("MOCK_RDMA", kind)
                    .output()
                    .expect("it runs");
                // A page wraps its lines.
                let said = text(&output)
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ");
                assert!(said.contains(words), "{kind}, {args:?}: {said}");
            }
        }
    }
}

#[test]
fn a_second_host_that_does_not_answer_is_said_once_and_this_one_is_tested_all_the_same() {
    let mute = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let mute = mute.local_addr().expect("its address").to_string();
    for peer in ["127.0.0.1:1", &mute] {
        let args = ["--no-perf", "--signals", "500", "--timeout", "2"];
        let run = hwtest("", &[&args[..], &["--peer", peer]].concat());
        assert_eq!(run.status, Some(4), "{}", run.said);
        let device = &run.json["devices"][0];
        assert_eq!(device["steps"].as_array().expect("steps").len(), 10);
        assert_eq!(device["to_peer"], Value::Array(Vec::new()));
        assert!(run.json["peer"]["why"].is_string(), "{}", run.json);
        for words in [
            format!("all 10 steps and measurements went well; second host {peer}: not reached: "),
            "nothing measured; to a second host: not reached: ".to_owned(),
        ] {
            assert!(run.page.contains(&words), "{words}: {}", run.page);
        }
        assert!(!run.page.contains("FAILED"), "{}", run.page);
    }
}

/// `doorbell serve` over a device of that kind, and what it said by its end.
fn beside_a_server(kind: &str, port: &[&str], run: impl FnOnce(&str) -> Run) -> (Run, String) {
    let mut server = Command::new(env!("CARGO_BIN_EXE_doorbell"))
        .args(["serve", "--listen", "127.0.0.1:0"])
        .args(port)
        .args(["--gpu", "host", "--timeout", "5"])
        .env("DOORBELL_IBVERBS", library())
        .env("MOCK_RDMA", kind)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = std::io::BufReader::new(server.stdout.take().expect("its output")).lines();
    let first = lines.next().expect("a line").expect("text");
    let at = first
        .split("listening on TCP ")
        .nth(1)
        .and_then(|rest| rest.split(';').next())
        .unwrap_or_else(|| panic!("{first}"))
        .to_owned();
    let ran = run(&at);
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it lives");
    let said: Vec<String> = lines.map_while(Result::ok).collect();
    server.wait().expect("its end");
    (ran, said.join("\n"))
}

#[test]
fn a_second_host_is_greeted_once_and_what_goes_wrong_to_it_is_kept_apart() {
    // Devices in memory reach queue pairs of their own process only, so the steps to the second host fail, and those here do not.
    let args = ["--no-perf", "--signals", "100", "--timeout", "5"];
    let (run, served) = beside_a_server("", &["--port", "verbs:mock1"], |at| {
        hwtest("noatomics", &[&args[..], &["--peer", at]].concat())
    });
    assert_eq!(run.status, Some(4), "{}", run.said);
    assert!(
        run.json["peer"]["says"]
            .as_str()
            .expect("who it is")
            .contains("(doorbell "),
        "{}",
        run.json
    );
    let device = &run.json["devices"][0];
    assert!(
        device["steps"]
            .as_array()
            .expect("steps")
            .iter()
            .all(|s| s["ok"] == true),
        "{}",
        run.page
    );
    // Of six, two take atomics, and are left out with the reason.
    assert_eq!(device["to_peer"].as_array().expect("steps").len(), 4);
    let left_out = device["left_out"].as_array().expect("a list");
    for (out, what) in left_out.iter().zip(["atomics to ", "signals to "]) {
        assert!(
            out["what"].as_str().expect("what").starts_with(what),
            "{out}"
        );
        assert_eq!(out["why"], "this device has no atomics");
    }
    assert_eq!(left_out.len(), 2);
    assert!(
        run.page
            .contains("every step (10), nothing measured; to a second host: 4 of 4 steps failed"),
        "{}",
        run.page
    );
    assert!(
        served.contains("hwtest over verbs") && served.contains("client 1: done"),
        "{served}"
    );
    assert!(!served.contains("lost"), "{served}");
}

#[test]
fn a_second_host_without_an_rdma_device_says_so_once() {
    let args = ["--no-perf", "--signals", "100", "--timeout", "5"];
    let (run, served) = beside_a_server("none", &[], |at| {
        hwtest("", &[&args[..], &["--peer", at]].concat())
    });
    assert_eq!(run.status, Some(4), "{}", run.said);
    let why = run.json["peer"]["why"].as_str().expect("a reason");
    assert!(why.contains("there is no RDMA device"), "{why}");
    assert_eq!(
        run.said.matches("there is no RDMA device").count(),
        2,
        "{}",
        run.said
    );
    assert!(served.contains("there is no RDMA device"), "{served}");
}

#[test]
fn a_second_host_that_goes_is_not_waited_for_again_and_again() {
    let args = ["--no-perf", "--signals", "100", "--timeout", "1"];
    // The greeting is all that it serves.
    let once = ["--port", "verbs:mock1", "--once"];
    let (run, _) = beside_a_server("", &once, |at| {
        hwtest("", &[&args[..], &["--peer", at]].concat())
    });
    assert_eq!(run.status, Some(4), "{}", run.said);
    let device = &run.json["devices"][0];
    assert_eq!(device["to_peer"].as_array().expect("steps").len(), 1);
    let left_out = device["left_out"].as_array().expect("a list");
    assert_eq!(left_out.len(), 1, "{}", run.page);
    let what = left_out[0]["what"].as_str().expect("what");
    assert!(what.starts_with("5 steps to "), "{what}");
    assert!(run.json["peer"]["says"].is_string() && run.json["peer"]["why"].is_string());
}

#[test]
fn a_device_without_atomics_takes_every_step() {
    let args = ["--signals", "100", "--timeout", "2", "--perf-time", "0.001"];
    let run = hwtest("noatomics", &args);
    let device = &run.json["devices"][0];
    let said = |name: &str| {
        let list = device["left_out"].as_array().expect("a list");
        let found = list.iter().find(|o| o["what"] == name).expect(name);
        found["why"].as_str().expect("why").to_owned()
    };
    for name in ["atomic-rate", "signal-lat --size 8"] {
        assert_eq!(said(name), "this device has no atomics", "{}", run.page);
        assert!(
            run.said.contains(&format!("left out {name}: ")),
            "{}",
            run.said
        );
    }
    assert!(
        said("put-lat --size 8").contains("took the time"),
        "{}",
        run.page
    );
    assert!(
        device["steps"]
            .as_array()
            .expect("steps")
            .iter()
            .all(|s| s["ok"] == true),
        "{}",
        run.page
    );
}

#[test]
fn a_cable_that_is_pulled_is_the_cause_of_what_fails_from_then_on() {
    let run = hwtest("falls", &["--signals", "100000", "--timeout", "1"]);
    assert_eq!(run.status, Some(3), "{}", run.said);
    let device = &run.json["devices"][0];
    let steps = device["steps"].as_array().expect("steps");
    let bad: Vec<_> = steps.iter().filter(|s| s["ok"] == false).collect();
    assert!(steps.len() == 10 && bad.len() >= 8, "{}", run.page);
    let down = "port 1 of RDMA device mock1 is down, not active";
    for step in &bad {
        assert!(
            step["said"].as_str().expect("words").contains(down),
            "{}",
            run.page
        );
    }
    let first = bad[0]["said"].as_str().expect("words");
    assert!(first.starts_with(down), "{first}");
    let log = bad[0]["output"].as_str().expect("what the log said");
    assert!(
        log.contains("WARN verbs:mock1:1: port 1 went down"),
        "{log}"
    );
    assert!(
        bad[1]["said"]
            .as_str()
            .expect("words")
            .starts_with("not tried: "),
        "{}",
        run.page
    );
    for failed in device["failed"].as_array().expect("a list") {
        let why = failed["why"].as_str().expect("why");
        assert!(why.contains(down), "{why}");
    }
    assert!(
        !run.page.contains("give the port's network interface"),
        "{}",
        run.page
    );
}

#[test]
fn a_device_that_is_slow_does_not_fail_and_a_whole_that_takes_too_long_is_cut() {
    // It stands still for five times a second, longer in all than one time-out.
    let slow = hwtest(
        "slow",
        &["--no-perf", "--signals", "100000", "--timeout", "3"],
    );
    assert_eq!(slow.status, Some(0), "{}", slow.said);
    let steps = slow.json["devices"][0]["steps"].as_array().expect("steps");
    let millis: u64 = steps.iter().filter_map(|s| s["millis"].as_u64()).sum();
    assert!(millis > 5000, "{}", slow.page);
    let cut = hwtest("", &["--no-perf", "--signals", "10000000", "--time", "3"]);
    assert_eq!(cut.status, Some(0), "{}", cut.said);
    assert!(
        cut.page
            .contains("signals, as many as there was time for, each once"),
        "{}",
        cut.page
    );
    let none = hwtest("", &["--signals", "10", "--time", "0.000001"]);
    let device = &none.json["devices"][0];
    assert_eq!(device["steps"].as_array().expect("steps").len(), 1);
    assert!(device["left_out"].as_array().expect("a list").len() > 9);
    assert!(
        none.page.contains("1 of 10 steps, the others left out"),
        "{}",
        none.page
    );
}

#[test]
fn what_is_set_wrong_is_said_before_anything_begins_and_what_is_set_is_recorded() {
    for (name, value, words) in [
        ("DOORBELL_ROCE_MTU", "abc", "DOORBELL_ROCE_MTU"),
        ("DOORBELL_FAULT", "x", "DOORBELL_FAULT"),
        ("DOORBELL_FAULT", "wqe=1: drop-doorbell", "unset it"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let output = command("", folder.path())
            .args(SHORT)
            .env(name, value)
            .output()
            .expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{}", text(&output));
        assert!(text(&output).contains(words), "{}", text(&output));
        assert!(!folder.path().join("doorbell-hwtest.json").exists());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let output = command("", folder.path())
        .args(
            [&SHORT[..], &["--signals", "10000001"]]
                .concat()
                .iter()
                .skip(3),
        )
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    assert!(text(&output).contains("10000000"), "{}", text(&output));
    let output = command("", folder.path())
        .args([&SHORT[..], &["--json", "-"]].concat())
        .env("DOORBELL_ROCE_MTU", "1024")
        .output()
        .expect("it runs");
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json["devices"][0]["mtu"], 1024);
    assert_eq!(json["host"]["variables"]["DOORBELL_ROCE_MTU"], "1024");
}

#[test]
fn a_measurement_that_fails_is_a_line_of_the_page_and_the_rest_is_in_the_json() {
    // The device reaches queue pairs of its own process only, so what two processes do fails.
    let run = hwtest(
        "",
        &["--signals", "100", "--timeout", "1", "--perf-time", "0.1"],
    );
    assert_eq!(run.status, Some(3), "{}", run.said);
    let device = &run.json["devices"][0];
    let failed = device["failed"].as_array().expect("a list");
    assert!(!failed.is_empty(), "{}", run.json);
    for one in failed {
        let why = one["why"].as_str().expect("a line");
        assert!(!why.contains('\n') && one["output"].as_str().expect("all of it").contains(why));
    }
    assert!(!device["left_out"].as_array().expect("a list").is_empty());
    let lines = run.page.lines().filter(|l| l.contains("FAILED  "));
    assert_eq!(lines.count(), failed.len(), "{}", run.page);
}

#[test]
fn a_dash_is_standard_output() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = command("", folder.path())
        .args(SHORT)
        .args(["--json", "-"])
        .output()
        .expect("it runs");
    let json: Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
    assert_eq!(json["schema"], "doorbell-hwtest/4");
    assert!(folder.path().join("doorbell-hwtest.txt").exists());
    assert!(!folder.path().join("-").exists());
    let both = command("", folder.path())
        .args(["--json", "-", "--page", "-"])
        .output()
        .expect("it runs");
    assert_eq!(both.status.code(), Some(2), "{}", text(&both));
    let wrong = command("", folder.path())
        .args(["--device", "mock1?post=bogus"])
        .output()
        .expect("it runs");
    assert_eq!(wrong.status.code(), Some(2), "{}", text(&wrong));
    assert!(
        text(&wrong).contains("give calls or list"),
        "{}",
        text(&wrong)
    );
}
