//! `doorbell.h` says what the library does: a C compiler confirms every size, offset, number and name.
//!
//! Needs the C compiler driver that Rust links with (`cc`, or what `CC` names).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use doorbell_c::types::{CONSTANTS, LAYOUTS};

const HEADER: &str = include_str!("../include/doorbell.h");
const MAP: &str = include_str!("../doorbell.map");

fn compile(name: &str, language: &str, source: &str) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join(name);
    std::fs::write(&file, source).expect("the folder for tests can be written");
    let out = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args([
            "-x",
            language,
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-fsyntax-only",
        ])
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"))
        .arg(file)
        .output()
        .expect("a C compiler driver: Rust links with one too");
    if out.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&out.stderr).into_owned())
    }
}

#[test]
fn sizes_offsets_and_numbers_are_equal() {
    let mut source = String::from("#include \"doorbell.h\"\n");
    for layout in LAYOUTS {
        writeln!(
            source,
            "_Static_assert(sizeof({0}) == {1}, \"size of {0}\");",
            layout.name, layout.size
        )
        .unwrap();
        for (field, offset) in layout.fields {
            writeln!(
                source,
                "_Static_assert(offsetof({0}, {field}) == {offset}, \"{0}.{field}\");",
                layout.name
            )
            .unwrap();
        }
    }
    for (name, value) in CONSTANTS {
        writeln!(source, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
    for (status, name, _) in doorbell_c::ALL {
        writeln!(
            source,
            "_Static_assert({name} == {}, \"{name}\");",
            *status as i32
        )
        .unwrap();
    }
    compile("layout.c", "c", &source).unwrap();
    // The check can fail: a wrong number is noticed.
    source.push_str("_Static_assert(DOORBELL_ACCESS_ALL == 14, \"wrong\");\n");
    assert!(
        compile("wrong.c", "c", &source)
            .unwrap_err()
            .contains("wrong")
    );
}

#[test]
fn every_number_of_the_header_is_known() {
    let known: BTreeSet<&str> = CONSTANTS
        .iter()
        .map(|(n, _)| *n)
        .chain(doorbell_c::ALL.iter().map(|(_, n, _)| *n))
        .collect();
    for line in HEADER.lines().filter_map(|l| l.strip_prefix("#define ")) {
        let name = line.split_whitespace().next().unwrap();
        let ours = ["DOORBELL_H", "DOORBELL_API", "DOORBELL_QP_T"].contains(&name)
            || name.ends_with("_INIT")
            || name.starts_with("DOORBELL_ENDPOINT_SIZE(");
        assert!(
            ours || known.contains(name),
            "{name} is in doorbell.h and in no list of the library"
        );
    }
}

/// The functions that the header declares.
fn declared() -> BTreeSet<String> {
    HEADER
        .split("\nDOORBELL_API ")
        .skip(1)
        .map(|rest| {
            let before = &rest[..rest.find('(').expect("a parameter list")];
            before
                .rsplit(|c: char| !(c.is_alphanumeric() || c == '_'))
                .next()
                .unwrap()
                .to_owned()
        })
        .collect()
}

#[test]
fn the_version_script_names_what_the_header_declares() {
    let mapped: BTreeSet<String> = MAP
        .lines()
        .filter_map(|l| l.trim().strip_suffix(';'))
        .filter(|n| n.starts_with("doorbell_"))
        .map(str::to_owned)
        .collect();
    assert_eq!(declared(), mapped);
}

#[test]
fn the_header_stands_alone_in_c_and_in_cpp() {
    compile(
        "alone.c",
        "c",
        "#include \"doorbell.h\"\nint used(void);\nint used(void) { return DOORBELL_OK; }\n",
    )
    .unwrap();
    // Where only a C compiler is installed, the driver cannot do C++; the C check above still holds.
    let probe = compile("probe.cpp", "c++", "int used;\n");
    let real = compile(
        "alone.cpp",
        "c++",
        "#include \"doorbell.h\"\nint used() { return DOORBELL_OK; }\n",
    );
    assert_eq!(probe.is_ok(), real.is_ok(), "{real:?}");
}
