//! `doorbell hwtest` with a device in memory: what it finds, what it writes whatever comes of it, and what it says of what stands in the way.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use common::{PATIENCE, Running, doorbell, texts};
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

impl Run {
    /// A list of what is known of the first device.
    fn list(&self, name: &str) -> &[Value] {
        let list = self.json["devices"][0][name].as_array();
        list.unwrap_or_else(|| panic!("{name}: {}", self.json))
    }

    /// Did every step on this host go well?
    fn is_well(&self) -> bool {
        self.list("steps").iter().all(|s| s["ok"] == true)
    }

    /// The page has these words.
    #[track_caller]
    fn shows(&self, words: &str) {
        assert!(self.page.contains(words), "{words}: {}", self.page);
    }

    /// So has what was said meanwhile.
    #[track_caller]
    fn says(&self, words: &str) {
        assert!(self.said.contains(words), "{words}: {}", self.said);
    }
}

/// The text of a value.
fn words(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value}: no text"))
}

/// This program with a device of that kind.
fn with_device(kind: &str, args: &[&str]) -> Command {
    let mut command = doorbell(args);
    command
        .env("DOORBELL_IBVERBS", library())
        .env("DOORBELL_LIBEFA", library())
        .env("MOCK_RDMA", kind);
    command
}

fn command(kind: &str, folder: &Path) -> Command {
    let mut command = with_device(kind, &["hwtest"]);
    command.current_dir(folder);
    command
}

fn text(output: &Output) -> String {
    let (out, err) = texts(output);
    out + &err
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
        assert_eq!(run.list("steps").len(), 10);
        assert_eq!(
            (&run.json["complete"], &run.json["nothing"]),
            (&true.into(), &Value::Null)
        );
        run.shows("all 10 steps and measurements went well");
        run.shows("every step (10), nothing measured");
        assert!(!run.page.contains("UDP"), "{}", run.page);
        // It is told where to send it, and whose library it was is known or said not to be.
        run.says("send doorbell-hwtest.json");
        let host = &run.json["host"];
        assert_eq!(host["rdma_core"], "unknown");
        assert!(words(&host["library"]["file"]).contains("libmock_rdma"));
        assert!(!words(&host["gpu_why"]).is_empty());
        run.shows("\nGPU none: ");
    }
}

#[test]
fn the_gid_that_was_used_is_recorded() {
    let usual = hwtest("", &SHORT);
    let chosen = hwtest("", &[&SHORT[..], &["--device", "mock1?gid=0"]].concat());
    let [usual, used] = [&usual, &chosen].map(|run| words(&run.json["devices"][0]["gid"]));
    assert!(usual.contains("(index 2, RoCE v2)"), "{usual}");
    assert!(
        used.contains("fe80::") && used.contains("(index 0, "),
        "{used}"
    );
    chosen.shows(used);
}

#[test]
fn an_option_of_another_kind_of_device_is_refused_when_it_is_opened() {
    let args = [&SHORT[..], &["--device", "mock1?order=inline"]].concat();
    let run = hwtest("", &args);
    assert_eq!(run.status, Some(3), "{}", run.said);
    run.shows("order=inline is of an EFA");
    let run = hwtest("efa", &args);
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
        let output = doorbell(args)
            .current_dir(folder.path())
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
        let output = common::run(args);
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
    for (kind, why) in [
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
        let nothing = words(&run.json["nothing"]);
        assert!(nothing.contains(why), "{kind}: {nothing}");
        run.shows("nothing was tested");
        run.says("send doorbell-hwtest.json");
        assert_eq!(run.page.matches(why).count(), 1, "{kind}: {}", run.page);
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
    run.shows("there is no such device or port: there is mock1:1");
    let run = hwtest(
        "",
        &[&SHORT[..], &["--device", "mlx5_7", "--device", "mock1"]].concat(),
    );
    // The other was tested, and what was asked for was not.
    assert_eq!(run.status, Some(3), "{}", run.said);
    run.shows(
        "all 10 steps and measurements went well; mlx5_7 was asked for and NOT TESTED: there is no such device",
    );
    run.shows("not tested: there is no such device");
}

#[test]
fn a_peer_without_a_way_is_told_with_both_addresses_and_nothing_else_is_tried() {
    let run = hwtest("unreachable", &SHORT);
    assert_eq!(run.status, Some(3), "{}", run.said);
    let steps = run.list("steps");
    assert_eq!(steps.len(), 1, "{}", run.page);
    let said = words(&steps[0]["said"]);
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
                let output = with_device(kind, args).output().expect("it runs");
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
        assert_eq!(run.list("steps").len(), 10);
        assert!(run.list("to_peer").is_empty(), "{}", run.json);
        assert!(run.json["peer"]["why"].is_string(), "{}", run.json);
        for words in [
            format!("all 10 steps and measurements went well; second host {peer}: not reached: "),
            "nothing measured; to a second host: not reached: ".to_owned(),
        ] {
            run.shows(&words);
        }
        assert!(!run.page.contains("FAILED"), "{}", run.page);
    }
}

/// A test with a second host, which has a device of that kind; and what `doorbell serve` there said by its end.
fn beside_a_server(there: &str, options: &str, here: &str, args: &[&str]) -> (Run, String) {
    let options = format!("{options} --timeout 5");
    let (mut server, at) = Running::serve_with(with_device(there, &[]), &options);
    let ran = hwtest(here, &[args, &["--peer", &at]].concat());
    server.signal("-TERM");
    server.end_within(PATIENCE);
    (ran, server.out())
}

#[test]
fn a_second_host_is_greeted_once_and_what_goes_wrong_to_it_is_kept_apart() {
    // Devices in memory reach queue pairs of their own process only, so the steps to the second host fail, and those here do not.
    let args = ["--no-perf", "--signals", "100", "--timeout", "5"];
    let (run, served) = beside_a_server("", "--port verbs:mock1", "noatomics", &args);
    assert_eq!(run.status, Some(4), "{}", run.said);
    let who = words(&run.json["peer"]["says"]);
    assert!(who.contains("(doorbell "), "{who}");
    assert!(run.is_well(), "{}", run.page);
    // Of six, two take atomics, and are left out with the reason.
    assert_eq!(run.list("to_peer").len(), 4);
    let left_out = run.list("left_out");
    for (out, what) in left_out.iter().zip(["atomics to ", "signals to "]) {
        assert!(words(&out["what"]).starts_with(what), "{out}");
        assert_eq!(out["why"], "this device has no atomics");
    }
    assert_eq!(left_out.len(), 2);
    run.shows("every step (10), nothing measured; to a second host: 4 of 4 steps failed");
    assert!(
        served.contains("hwtest over verbs") && served.contains("client 1: done"),
        "{served}"
    );
    assert!(!served.contains("lost"), "{served}");
}

#[test]
fn a_second_host_without_an_rdma_device_says_so_once() {
    let args = ["--no-perf", "--signals", "100", "--timeout", "5"];
    let (run, served) = beside_a_server("none", "", "", &args);
    assert_eq!(run.status, Some(4), "{}", run.said);
    let why = words(&run.json["peer"]["why"]);
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
    let (run, _) = beside_a_server("", "--port verbs:mock1 --once", "", &args);
    assert_eq!(run.status, Some(4), "{}", run.said);
    assert_eq!(run.list("to_peer").len(), 1);
    let left_out = run.list("left_out");
    assert_eq!(left_out.len(), 1, "{}", run.page);
    let what = words(&left_out[0]["what"]);
    assert!(what.starts_with("5 steps to "), "{what}");
    assert!(run.json["peer"]["says"].is_string() && run.json["peer"]["why"].is_string());
}

#[test]
fn a_device_without_atomics_takes_every_step() {
    let args = ["--signals", "100", "--timeout", "2", "--perf-time", "0.001"];
    let run = hwtest("noatomics", &args);
    let said = |name: &str| {
        let mut list = run.list("left_out").iter();
        words(&list.find(|o| o["what"] == name).expect(name)["why"])
    };
    for name in ["atomic-rate", "signal-lat --size 8"] {
        assert_eq!(said(name), "this device has no atomics", "{}", run.page);
        run.says(&format!("left out {name}: "));
    }
    let late = said("put-lat --size 8");
    assert!(late.contains("took the time"), "{late}");
    assert!(run.is_well(), "{}", run.page);
}

#[test]
fn a_cable_that_is_pulled_is_the_cause_of_what_fails_from_then_on() {
    let run = hwtest("falls", &["--signals", "100000", "--timeout", "1"]);
    assert_eq!(run.status, Some(3), "{}", run.said);
    let steps = run.list("steps");
    let bad: Vec<_> = steps.iter().filter(|s| s["ok"] == false).collect();
    assert!(steps.len() == 10 && bad.len() >= 8, "{}", run.page);
    let down = "port 1 of RDMA device mock1 is down, not active";
    for step in &bad {
        assert!(words(&step["said"]).contains(down), "{}", run.page);
    }
    let first = words(&bad[0]["said"]);
    assert!(first.starts_with(down), "{first}");
    let log = words(&bad[0]["output"]);
    assert!(
        log.contains("WARN verbs:mock1:1: port 1 went down"),
        "{log}"
    );
    let second = words(&bad[1]["said"]);
    assert!(second.starts_with("not tried: "), "{second}");
    for failed in run.list("failed") {
        let why = words(&failed["why"]);
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
    let steps = slow.list("steps").iter();
    let millis: u64 = steps.filter_map(|s| s["millis"].as_u64()).sum();
    assert!(millis > 5000, "{}", slow.page);
    let cut = hwtest("", &["--no-perf", "--signals", "10000000", "--time", "3"]);
    assert_eq!(cut.status, Some(0), "{}", cut.said);
    cut.shows("signals, as many as there was time for, each once");
    let none = hwtest("", &["--signals", "10", "--time", "0.000001"]);
    assert_eq!(none.list("steps").len(), 1);
    assert!(none.list("left_out").len() > 9);
    none.shows("1 of 10 steps, the others left out");
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
        .args(["--signals", "10000001"])
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
    let failed = run.list("failed");
    assert!(!failed.is_empty(), "{}", run.json);
    for one in failed {
        let why = words(&one["why"]);
        assert!(!why.contains('\n') && words(&one["output"]).contains(why));
    }
    assert!(!run.list("left_out").is_empty());
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
