//! `doorbell sweep` and `doorbell compare`, as a user runs them.

mod common;

use std::path::Path;
use std::time::Duration;

use common::{Running, run, succeed, texts, wait_until};
use serde_json::Value;

/// A sweep of a moment.
fn small(out: &Path) -> Vec<String> {
    let out = out.to_str().expect("a path in UTF-8");
    "sweep --only sizes,latency --links loopback,shm --sizes 8,4K --repeat 2 --secs 0.01 --quick --out"
        .split(' ')
        .map(str::to_owned)
        .chain([out.to_owned()])
        .collect()
}

fn words(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

fn results(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join("results.json")).expect("results.json");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn a_sweep_leaves_a_file_and_a_page_and_says_plainly_how_far_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("new/folder");
    let args = small(&out);
    let output = run(&words(&args));
    let (stdout, stderr) = texts(&output);
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stderr.contains("pass 2 of 2: latency"), "{stderr}");
    assert!(
        !stderr.contains('\x1b') && !stdout.contains('\x1b'),
        "no terminal, no colours"
    );
    for line in stdout.lines().filter(|l| !l.contains("folder")) {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let results = results(&out);
    assert_eq!(results["schema"], "doorbell-sweep/1");
    assert_eq!(results["complete"], true);
    let points = results["points"].as_array().expect("points");
    // Two sizes of puts, and two tests of latency, over two links.
    assert_eq!(points.len(), 8, "{stdout}");
    for point in points {
        assert_eq!(
            point["repetitions"].as_array().map(Vec::len),
            Some(2),
            "{point}"
        );
        assert_eq!(point["failed"], Value::Null);
        let latency = point["test"].as_str().is_some_and(|t| t.ends_with("-lat"));
        assert_eq!(point["p50_ns"].is_null(), !latency, "{point}");
        assert_eq!(point["messages_per_s"].is_null(), latency, "{point}");
    }
    let page = std::fs::read_to_string(out.join("report.html")).expect("the page");
    assert!(page.contains("<svg") && page.ends_with("</html>\n"));

    // The page can be drawn again from the file.
    std::fs::remove_file(out.join("report.html")).expect("removed");
    let file = out.join("results.json").display().to_string();
    succeed(&[
        "sweep",
        "--redraw",
        &file,
        "--out",
        out.to_str().expect("UTF-8"),
    ]);
    let again = std::fs::read_to_string(out.join("report.html")).expect("the page");
    assert_eq!(again, page);
}

#[test]
fn a_signal_ends_it_and_what_was_measured_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("UTF-8");
    let args = [
        "sweep",
        "--only",
        "sizes",
        "--links",
        "loopback,shm",
        "--sizes",
        "8,64",
        "--repeat",
        "100",
        "--secs",
        "0.02",
        "--out",
        out,
    ];
    let mut sweep = Running::start(&args);
    let file = folder.path().join("results.json");
    wait_until("the first pass", || file.exists());
    sweep.signal("-INT");
    let (status, said) = sweep.end_within(Duration::from_secs(60));
    assert_eq!(status.code(), Some(130), "{said}");
    let results = results(folder.path());
    assert_eq!(results["complete"], false);
    let points = results["points"].as_array().expect("points");
    assert_eq!(points.len(), 4);
    for point in points {
        assert!(
            !point["repetitions"].as_array().expect("a list").is_empty(),
            "{point}"
        );
        assert!(
            point["messages_per_s"]["median"]
                .as_f64()
                .is_some_and(|r| r > 0.0),
            "{point}"
        );
    }
    assert!(
        results["notes"].to_string().contains("signal"),
        "{}",
        results["notes"]
    );
    let page = std::fs::read_to_string(folder.path().join("report.html")).expect("the page");
    assert!(page.contains("not complete"));
}

#[test]
fn what_cannot_be_reached_fails_and_the_rest_is_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("UTF-8");
    // Nobody listens at this port.
    let args = [
        "sweep",
        "--only",
        "sizes",
        "--links",
        "loopback,roce",
        "--connect",
        "127.0.0.1:1",
        "--sizes",
        "8",
        "--repeat",
        "2",
        "--secs",
        "0.01",
        "--timeout",
        "1",
        "--out",
        out,
    ];
    let output = run(&args);
    let (_, stderr) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("127.0.0.1:1"), "{stderr}");
    let results = results(folder.path());
    assert_eq!(results["complete"], false);
    assert_eq!(results["points"].as_array().map(Vec::len), Some(1));
    assert!(results["notes"].to_string().contains("127.0.0.1:1"));
}

#[test]
fn refusals_name_the_option() {
    for (args, status, part) in [
        (
            vec!["sweep", "--only", "blocks", "--links", "shm"],
            2,
            "--links",
        ),
        (
            vec!["sweep", "--links", "verbs"],
            2,
            "[possible values: loopback, shm, roce]",
        ),
        (vec!["sweep", "--only", "nothing"], 2, "blocks"),
        (vec!["sweep", "--repeat", "1"], 2, "2..=100"),
        (vec!["sweep", "--redraw", "x", "--quick"], 2, "--quick"),
        (vec!["sweep", "--redraw", "/dev/null"], 1, "a device"),
        (vec!["compare", "/dev/zero", "/dev/zero"], 3, "a device"),
        (vec!["doctor", "--root", "/dev/zero"], 3, "a device"),
        (vec!["sweep", "--out", "/proc/nowhere"], 1, "--out"),
        (vec!["compare", "/nowhere", "/nowhere"], 3, "results.json"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = common::doorbell(&args);
        let output = command
            .current_dir(folder.path())
            .output()
            .expect("it runs");
        let (_, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {stderr}");
        assert!(stderr.contains(part), "{args:?}: {stderr}");
    }
}

/// The file of a small sweep with rates of one per cent of noise, and the same with every rate times `factor` and `change` made to it.
fn pair(folder: &Path, factor: f64, change: impl Fn(&mut Value)) -> (String, String) {
    let args = small(&folder.join("a"));
    let output = run(&words(&args));
    assert!(output.status.success(), "{:?}", texts(&output));
    let measured = results(&folder.join("a"));
    let write = |name: &str, factor: f64, change: &dyn Fn(&mut Value)| {
        let mut file = measured.clone();
        for point in file["points"].as_array_mut().expect("points") {
            for (i, repetition) in point["repetitions"]
                .as_array_mut()
                .into_iter()
                .flatten()
                .enumerate()
            {
                // What this machine measured is its own affair.
                if repetition["messages_per_s"].is_number() {
                    repetition["messages_per_s"] = ((100 + i) as f64 * 1e4 * factor).into();
                }
            }
        }
        change(&mut file);
        let path = folder.join(name);
        std::fs::write(&path, file.to_string()).expect("written");
        path.display().to_string()
    };
    (
        write("a.json", 1.0, &|_| {}),
        write("b.json", factor, &change),
    )
}

#[test]
fn compare_finds_what_got_worse_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = pair(folder.path(), 0.9, |_| {});
    let same = run(&["compare", &a, &a]);
    let (stdout, stderr) = texts(&same);
    assert_eq!(same.status.code(), Some(0), "{stderr}");
    assert!(stdout.contains("None of 12 figures changed"), "{stdout}");
    let worse = run(&["compare", &a, &b]);
    let (stdout, _) = texts(&worse);
    assert_eq!(worse.status.code(), Some(1));
    assert!(
        stdout.contains("4 of 12 figures changed beyond noise: 4 worse"),
        "{stdout}"
    );
    for line in stdout.lines().filter(|l| !l.contains("tmp")) {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let json = run(&["compare", &b, &a, "--json"]);
    assert_eq!(json.status.code(), Some(0), "only better");
    let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(json["schema"], "doorbell-compare/1");
    assert_eq!((&json["better"], &json["worse"]), (&4.into(), &0.into()));
    assert_eq!(json["figures"].as_array().map(Vec::len), Some(12));
}

#[test]
fn compare_refuses_other_machines_and_other_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let (a, b) = pair(folder.path(), 1.0, |other| {
        other["environment"]["cpu"] = "Another CPU".into();
        other["environment"]["kernel"] = "Linux 1.0".into();
    });
    let refused = run(&["compare", &a, &b]);
    let (_, stderr) = texts(&refused);
    assert_eq!(refused.status.code(), Some(3), "{stderr}");
    assert!(
        stderr.contains("Another CPU") && stderr.contains("--other-machine"),
        "{stderr}"
    );
    let forced = run(&["compare", &a, &b, "--other-machine"]);
    let (stdout, _) = texts(&forced);
    assert_eq!(forced.status.code(), Some(0), "{stdout}");
    assert!(
        stdout.contains("Linux 1.0") && stdout.contains("Another CPU"),
        "{stdout}"
    );

    // A perf file is of another kind; with itself it compares, and says that one measurement has no noise.
    let perf = folder.path().join("perf.json").display().to_string();
    succeed(&[
        "perf",
        "put-bw",
        "--iters",
        "200",
        "--no-baseline",
        "--size",
        "8,8,64",
        "--json",
        &perf,
    ]);
    let mixed = run(&["compare", &a, &perf]);
    assert_eq!(mixed.status.code(), Some(3));
    let alone = run(&["compare", &perf, &perf]);
    let (stdout, _) = texts(&alone);
    assert_eq!(alone.status.code(), Some(0), "{stdout}");
    assert!(stdout.contains("1 have a single measurement"), "{stdout}");
}

#[test]
fn a_fault_of_the_command_line_strikes_every_point_and_is_the_exit_status() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().to_str().expect("a path in UTF-8");
    let rule = "wqe=20: drop-doorbell";
    let output = run(&[
        "sweep",
        "--quick",
        "--only",
        "latency",
        "--links",
        "loopback",
        "--repeat",
        "2",
        "--timeout",
        "0.5",
        "--fault",
        rule,
        "--out",
        out,
    ]);
    let (stdout, stderr) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{stdout}\n{stderr}");
    let results = results(folder.path());
    assert_eq!(results["complete"], false);
    for point in results["points"].as_array().expect("points") {
        let command = point["command"].as_str().expect("a command");
        assert!(command.contains(&format!("'--fault={rule}'")), "{command}");
        let why = point["failed"].as_str().expect("it failed");
        assert!(why.contains(rule), "{why}");
    }
}
