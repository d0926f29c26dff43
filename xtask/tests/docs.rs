//! The documents say what the code does: tables of codes are compared with the code, relative links with the files.
//!
//! `DOORBELL_BLESS=1 cargo test -p xtask --test docs` rewrites the tables instead.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use doorbell_hca::fault::TABLE;
use doorbell_wire::{Syndrome, Vendor};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn name(name: Option<&'static str>) -> &'static str {
    name.expect("every code of the table has a name")
}

fn faults() -> String {
    let mut table = String::from("| fault | syndrome | vendor | when |\n|---|---|---|---|\n");
    for row in TABLE {
        writeln!(
            table,
            "| `{:?}` | `{}` {:#04x} | `{}` {:#04x} | {} |",
            row.fault,
            name(row.syndrome.name()),
            row.syndrome.0,
            name(row.vendor.name()),
            row.vendor.0,
            row.when
        )
        .expect("writing to a string");
    }
    table
}

fn codes(codes: impl Iterator<Item = (u8, &'static str, &'static str)>) -> String {
    let mut table = String::from("| value | name | meaning |\n|---|---|---|\n");
    for (value, name, meaning) in codes {
        writeln!(table, "| {value:#04x} | `{name}` | {meaning} |").expect("writing to a string");
    }
    table
}

#[test]
fn tables_of_the_architecture_are_those_of_the_code() {
    let path = root().join("ARCHITECTURE.md");
    let before = fs::read_to_string(&path).expect("ARCHITECTURE.md is there");
    let mut text = before.clone();
    for (which, table) in [
        ("faults", faults()),
        (
            "syndromes",
            codes(
                Syndrome::ALL
                    .iter()
                    .map(|s| (s.0, name(s.name()), s.meaning())),
            ),
        ),
        (
            "vendor",
            codes(
                Vendor::ALL
                    .iter()
                    .map(|v| (v.0, name(v.name()), v.meaning())),
            ),
        ),
    ] {
        let open = format!("<!-- table: {which} -->\n");
        let start = text.find(&open).unwrap_or_else(|| panic!("no {open:?}")) + open.len();
        let end = start
            + text[start..]
                .find("<!-- end -->")
                .unwrap_or_else(|| panic!("{which} has no end"));
        text.replace_range(start..end, &table);
    }
    if text != before && std::env::var_os("DOORBELL_BLESS").is_some() {
        fs::write(&path, &text).expect("ARCHITECTURE.md can be written");
    } else {
        assert!(
            text == before,
            "ARCHITECTURE.md differs from the code: run DOORBELL_BLESS=1 cargo test -p xtask --test docs"
        );
    }
}

/// What git ignores: build outputs, wherever they were put. Nothing, where there is no git or this is no checkout of it.
fn ignored() -> Vec<PathBuf> {
    let listed = Command::new("git")
        .current_dir(root())
        .args(["ls-files", "-z", "--others", "--ignored"])
        .args(["--exclude-standard", "--directory"])
        .output();
    let names = listed.map_or_else(|_| Vec::new(), |output| output.stdout);
    let names = names.split(|b| *b == 0).filter(|name| !name.is_empty());
    names
        .map(|name| root().join(String::from_utf8_lossy(name).as_ref()))
        .collect()
}

/// Every Markdown file of the repository, build outputs left out.
fn documents(folder: &Path, ignored: &[PathBuf], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder that can be read") {
        let path = entry.expect("an entry that can be read").path();
        let hidden = path
            .file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with('.') || n == "target");
        if ignored.contains(&path) {
            continue;
        }
        if path.is_dir() && !hidden {
            documents(&path, ignored, found);
        } else if path.extension().is_some_and(|e| e == "md") {
            found.push(path);
        }
    }
}

#[test]
fn relative_links_lead_somewhere() {
    let mut files = Vec::new();
    documents(&root(), &ignored(), &mut files);
    assert!(
        files.len() >= 4,
        "README, ARCHITECTURE, SECURITY, CONTRIBUTING at least: {files:?}"
    );
    let mut dead = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).expect("a text");
        for piece in text.split("](").skip(1) {
            let target = piece.split([')', '#', ' ']).next().unwrap_or_default();
            if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let folder = file.parent().expect("a file has a folder");
            if !folder.join(target).exists() {
                dead.push(format!("{}: {target}", file.display()));
            }
        }
    }
    assert!(dead.is_empty(), "dead links:\n{}", dead.join("\n"));
}
