//! `doorbell doctor` as scripts use it: exit statuses, JSON, captures that judge the same.

use std::path::PathBuf;
use std::process::{Command, Output};

fn doctor(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_doorbell"))
        .arg("doctor")
        .args(args)
        .output()
        .unwrap()
}

/// A captured machine of the crate that judges.
fn node(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../doorbell-doctor/tests/machines");
    path.join(format!("{name}.node"))
        .to_str()
        .unwrap()
        .to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn the_status_is_the_verdict() {
    for (name, status) in [("connectx-ready", 0), ("connectx-peermem", 1), ("rxe", 4)] {
        let out = doctor(&["--root", &node(name)]);
        assert_eq!(
            out.status.code(),
            Some(status),
            "{name}: {}",
            text(&out.stderr)
        );
        assert!(!text(&out.stdout).contains('\x1b'), "colour in a pipe");
    }
    assert_eq!(doctor(&["--nonsense"]).status.code(), Some(2));
    let missing = doctor(&["--root", "/nowhere/at/all"]);
    assert_eq!(missing.status.code(), Some(3));
    assert!(
        text(&missing.stderr).contains("--capture"),
        "{}",
        text(&missing.stderr)
    );
}

#[test]
fn json_opens_with_its_schema() {
    let out = doctor(&["--root", &node("efa"), "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["schema"], "doorbell-doctor/1");
    assert_eq!(json["verdict"], "falls-back");
    assert!(text(&out.stdout).starts_with("{\n  \"schema\""));
}

#[test]
fn a_capture_judges_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("my.node");
    let file = file.to_str().unwrap();
    let here = doctor(&["--capture", file]);
    assert!(
        matches!(here.status.code(), Some(0 | 1 | 4)),
        "{}",
        text(&here.stderr)
    );
    let there = doctor(&["--root", file]);
    assert_eq!(text(&there.stdout), text(&here.stdout));
    assert_eq!(there.status.code(), here.status.code());
    let unwritable = doctor(&["--capture", "/nowhere/at/all"]);
    assert_eq!(unwritable.status.code(), Some(3));
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let unread = doctor(&["--capture", pipe.to_str().unwrap()]);
    assert_eq!(unread.status.code(), Some(3));
    let said = text(&unread.stderr);
    assert!(said.contains("nobody reads"), "{said}");
}
