//! Whoever starts a thread or a process tells a refusal with the limit behind it, by `limits::thread`.

use std::fs;
use std::path::Path;

/// Those that have words of their own, or go on without the thread.
const OTHERS: &[&str] = &["host/launch.rs", "report/server.rs", "perf/baseline.rs"];

#[test]
fn a_thread_that_cannot_be_started_is_told_with_its_limit() {
    let mut found = 0;
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    for entry in fs::read_dir(crates).expect("crates").flatten() {
        walk(&entry.path().join("src"), &mut found);
    }
    assert!(found > 8, "{found} threads");
}

fn walk(folder: &Path, found: &mut u32) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for path in entries.flatten().map(|e| e.path()) {
        if path.is_dir() {
            walk(&path, found);
            continue;
        }
        let name = path.display().to_string();
        if !name.ends_with(".rs")
            || name.contains("test")
            || OTHERS.iter().any(|o| name.ends_with(o))
        {
            continue;
        }
        let text = fs::read_to_string(&path).expect("text");
        for part in text.split("thread::Builder::new()").skip(1) {
            let near: String = part.chars().take(1200).collect();
            assert!(near.contains("limits::thread"), "{name}: {near}");
            *found += 1;
        }
    }
}
