//! Every `DOORBELL_*` variable: where it is looked at, a value that cannot be used is told with its name, the value and what may be given; so is one that is no
//! Unicode. The list of variables is the library's, so that none is left out.

mod common;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::Output;

use common::{doorbell, texts};

/// What becomes of a mistake.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    /// The command ends, before it does anything.
    Refused,
    /// It goes on and says so.
    Said,
}

/// What is run, a value that cannot be used, a part of what may be given, and what becomes of it.
type Case = (&'static [&'static str], &'static str, &'static str, Told);

const INFO: &[&str] = &["info"];
const PERF: &[&str] = &["perf", "put-bw", "--quick", "--no-baseline"];
const RANKS: &[&str] = &["perf", "put-bw", "--quick", "--link", "roce"];

/// `None`: tested elsewhere, as said.
fn case(name: &str) -> Option<Case> {
    use Told::{Refused, Said};
    Some(match name {
        "DOORBELL_DEPTH" => (INFO, "100", "a power of two", Refused),
        "DOORBELL_FAULT" => (INFO, "wqe=1: panic", "give", Refused),
        "DOORBELL_GPU" => (INFO, "tpu", "give auto, host, cuda", Refused),
        "DOORBELL_GPU_COPIES" => (INFO, "gpu", "give auto, engine or kernel", Refused),
        "DOORBELL_GPU_COPIES_STAY" => (INFO, "50us", "give microseconds, from 0", Refused),
        "DOORBELL_HANDLER" => (INFO, "17", "give", Refused),
        "DOORBELL_HCA_CORES" => (INFO, "many", "give a number", Refused),
        "DOORBELL_HOST_WARP" => (INFO, "2", "give 1", Refused),
        "DOORBELL_ON_ERROR" => (INFO, "panic", "give `report`", Refused),
        "DOORBELL_QUIESCE_MS" => (INFO, "0", "give milliseconds", Refused),
        "DOORBELL_RECORD" => (INFO, "33", "give on, off", Refused),
        "DOORBELL_ROCE" => (INFO, "x", "udp://ADDR[:PORT]", Refused),
        "DOORBELL_ROCE_MTU" => (INFO, "1500", "give 256", Refused),
        "DOORBELL_ROCE_RETRY" => (INFO, "8", "give a number", Refused),
        "DOORBELL_ROCE_TIMEOUT" => (INFO, "32", "give a number", Refused),
        "DOORBELL_TRACE" => (INFO, "/no/such/folder/t.json", "name another file", Refused),
        "DOORBELL_VERBS" => (INFO, "rxe0:x", "", Refused),
        "DOORBELL_RANK" => (INFO, "first", "not a number", Refused),
        "DOORBELL_WORLD" => (RANKS, "all", "not a number", Refused),
        "DOORBELL_RENDEZVOUS" => (RANKS, "nowhere", "give tcp:HOST:PORT", Refused),
        // Every text names a job.
        "DOORBELL_JOB" => (RANKS, "", "give a name", Refused),
        "DOORBELL_HOME" => (INFO, "/no/such", "unset it", Said),
        "DOORBELL_IBVERBS" => (INFO, "/no/such.so", "DOORBELL_IBVERBS", Said),
        "DOORBELL_LOG" => (INFO, "loud", "give off, error", Said),
        "DOORBELL_REPORT" => (PERF, "maybe", "on (the default) and off", Said),
        "DOORBELL_NCCL_ADDR" => (INFO, "here", "give an IP address", Said),
        "DOORBELL_NCCL_ALIVE" => (INFO, "long", "give seconds", Said),
        "DOORBELL_NCCL_DEPTH" => (INFO, "100", "a power of two", Said),
        "DOORBELL_NCCL_LINK" => (INFO, "verbs", "give auto, shm or roce", Said),
        "DOORBELL_NCCL_RELEASE" => (INFO, "new", "such as 2.28.9", Said),
        "DOORBELL_NCCL_SIGNALS" => (INFO, "disk", "give host or gpu", Said),
        "DOORBELL_NCCL_TIMEOUT" => (INFO, "0", "give seconds", Said),
        // Of the Python package (python/tests).
        "DOORBELL_COMMAND" => return None,
        // Where an EFA device is (hwtest.rs).
        "DOORBELL_LIBEFA" => return None,
        _ => panic!("{name} is new: say here what becomes of a mistake in it"),
    })
}

fn outcome(words: &[&str], name: &str, value: &OsStr) -> Output {
    let mut command = doorbell(words);
    if words == RANKS && name != "DOORBELL_WORLD" {
        command.envs([("DOORBELL_RANK", "0"), ("DOORBELL_WORLD", "1")]);
    } else if words == RANKS {
        command.env("DOORBELL_RANK", "0");
    }
    command.env(name, value).output().expect("it runs")
}

/// All that was said, in one line: tables are wrapped.
fn plain(out: &str, err: &str) -> String {
    let text = format!("{out}\n{err}");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn judge(name: &str, value: &OsStr, shown: &str, case: Case) {
    let (words, _, part, told) = case;
    let output = outcome(words, name, value);
    let (out, err) = texts(&output);
    let text = plain(&out, &err);
    for part in [name, shown, part] {
        assert!(text.contains(part), "{name}: no {part:?}: {text}");
    }
    if told == Told::Refused {
        let status = output.status.code();
        assert!(matches!(status, Some(1 | 2)), "{name}: {status:?}");
        assert!(err.contains(name) && out.is_empty(), "{name}: {text}");
    }
}

#[test]
fn a_value_that_cannot_be_used_is_told_with_its_name_and_what_may_be_given() {
    for (name, _) in doorbell::variables::VARIABLES {
        if let Some(case) = case(name).filter(|case| !case.1.is_empty()) {
            judge(name, case.1.as_ref(), case.1, case);
        }
    }
}

#[test]
fn what_is_no_unicode_is_no_value() {
    for (name, _) in doorbell::variables::VARIABLES {
        let Some((words, _, part, told)) = case(name) else {
            continue;
        };
        // Replacement characters, or the library's own words about a file of that name.
        let value = OsString::from_vec(b"\xff\xfe".to_vec());
        let part = match *name {
            "DOORBELL_TRACE" => "no Unicode",
            _ => part,
        };
        judge(name, &value, "\u{fffd}", (words, "", part, told));
    }
}

/// What RoCE's and verbs' variables say holds wherever their links are used, and not only where they are listed.
#[test]
fn a_port_by_variable_is_looked_at_by_every_command_that_has_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (json, page) = (file("r.json"), file("p.txt"));
    let perf = [
        "perf",
        "put-bw",
        "--quick",
        "--timeout",
        "3",
        "--link",
        "roce",
    ];
    let commands: [&[&str]; 6] = [
        &["info"],
        &perf,
        &["serve", "--listen", "127.0.0.1:0", "--wait", "0.1"],
        &["pingpong", "--port", "0", "--wait", "0.1"],
        &["sweep", "--quick", "--links", "roce", "--out", &json],
        &["hwtest", "--json", &json, "--page", &page],
    ];
    for words in commands {
        for value in ["x", "udp://256.1.1.1", "udp://0.0.0.0"] {
            let output = outcome(words, "DOORBELL_ROCE", value.as_ref());
            let (_, err) = texts(&output);
            assert!(
                matches!(output.status.code(), Some(1 | 2)),
                "{words:?}: {err}"
            );
            let said = format!("DOORBELL_ROCE={value:?} (from the environment)");
            assert!(err.contains(&said), "{words:?}: {err}");
        }
    }
    // What could be a port, and is none here, shows when it is opened.
    let serve = ["serve", "--listen", "127.0.0.1:0", "--wait", "0.1"];
    for (words, name, value) in [
        (&perf[..], "DOORBELL_ROCE", "raw:nope"),
        (&serve, "DOORBELL_ROCE", "raw:nope"),
        (&["info"], "DOORBELL_ROCE", "raw:nope"),
    ] {
        let output = outcome(words, name, value.as_ref());
        let (out, err) = texts(&output);
        let text = plain(&out, &err);
        let said = format!("{name}={value:?} (from the environment) cannot be used");
        assert!(text.contains(&said), "{words:?}: {text}");
        assert!(text.contains("unset it"), "{words:?}: {text}");
        assert_eq!(output.status.success(), words == ["info"], "{text}");
    }
}

#[test]
fn an_argument_wins_over_a_port_by_variable() {
    let words = [
        "perf",
        "put-bw",
        "--quick",
        "--no-baseline",
        "--link",
        "roce:udp://127.0.0.1",
    ];
    let output = outcome(&words, "DOORBELL_ROCE", "raw:nope".as_ref());
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{out}\n{err}");
}

#[test]
fn a_name_that_is_nearly_a_variable_is_told() {
    let output = outcome(PERF, "DOORBELL_ROCE_TIMOUT", "12".as_ref());
    let (_, err) = texts(&output);
    assert!(output.status.success(), "{err}");
    assert!(err.contains("DOORBELL_ROCE_TIMEOUT is one"), "{err}");
    let output = outcome(INFO, "DOORBELL_SEED", "12".as_ref());
    let (out, err) = texts(&output);
    assert!(out.contains("there is no such variable"), "{out}");
    assert!(!err.contains("DOORBELL_SEED"), "{err}");
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_page_has_every_variable_and_where_more_is_said() {
    let page = fs::read_to_string(root().join("docs/variables.md")).expect("the page");
    let rows: Vec<&str> = page.lines().filter(|l| l.starts_with("| `")).collect();
    assert_eq!(rows.len(), doorbell::variables::VARIABLES.len());
    for ((name, what), row) in doorbell::variables::VARIABLES.iter().zip(rows) {
        let start = format!("| `{name}` | {what} | ");
        assert!(row.starts_with(&start), "{row}: want {start}");
        // What is said there alone needs no page.
        let Some((_, link)) = row.split_once("](") else {
            continue;
        };
        let file = link.split([')', '#']).next().expect("a file");
        let text = fs::read_to_string(root().join("docs").join(file)).expect("a page");
        assert!(text.contains(name), "{file} says nothing of {name}");
    }
}

/// Names in the sources that are no variables of a user's.
const OTHERS: &[&str] = &[
    "GIT", "PROFILE", "TARGET", "VERSION", "SEED", "BLESS", "RXE",
];

/// Whatever the sources look for in the environment is in the list.
#[test]
fn no_variable_is_missing_in_the_list() {
    fn walk(folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).expect("text");
                for part in text.split("\"DOORBELL_").skip(1) {
                    let name: String = part
                        .chars()
                        .take_while(|c| c.is_ascii_uppercase() || *c == '_')
                        .collect();
                    if part[name.len()..].starts_with('"') {
                        found.push(name);
                    }
                }
            }
        }
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join("crates"))
        .expect("crates")
        .flatten()
    {
        // Its names are codes.
        if entry.file_name() != "doorbell-c" {
            walk(&entry.path().join("src"), &mut found);
        }
    }
    assert!(found.len() > 30, "{found:?}");
    for name in found {
        let variable = format!("DOORBELL_{name}");
        let known = doorbell::variables::what(&variable).is_some();
        let prefix = name.is_empty() || name.ends_with('_');
        let slip = doorbell::variables::meant(&variable).is_some();
        assert!(
            known || prefix || slip || name.starts_with("TEST_") || OTHERS.contains(&&*name),
            "{variable} is in no list"
        );
    }
}
