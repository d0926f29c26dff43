//! The CUDA back end on a real GPU: the checks of the example `cuda_selfcheck`, one a test, each in a process of its own.
//!
//! Counted as ignored unless asked for: `cargo test -p doorbell-gpu -- --ignored`. Asked for on a machine without
//! a CUDA GPU, they fail and say why.
#![cfg(not(miri))]

use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// One at a time: the checks fill the GPU.
static TURN: Mutex<()> = Mutex::new(());

fn selfcheck() -> Command {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.push("examples/cuda_selfcheck");
    // `cargo test -p doorbell-gpu` builds it; `--test cuda` alone does not.
    assert!(
        path.exists(),
        "first: cargo build -p doorbell-gpu --example cuda_selfcheck"
    );
    Command::new(path)
}

fn check(name: &str) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let output = selfcheck().arg(name).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(output.status.success(), "{}: {text}", output.status);
    assert!(
        text.contains(&format!("PASS {name}:")),
        "the check did not run: {text}"
    );
}

macro_rules! checks {
    ($($test:ident = $name:literal),* $(,)?) => {
        $(#[test]
        #[ignore = "needs a CUDA GPU"]
        fn $test() {
            check($name);
        })*

        /// The list below is the example's.
        #[test]
        fn every_check_is_a_test() {
            let source = include_str!("../examples/cuda_selfcheck/main.rs");
            let (_, table) = source.split_once("const CHECKS").unwrap();
            let (table, _) = table.split_once("];").unwrap();
            let listed: Vec<_> = table.split('"').skip(1).step_by(2).collect();
            assert_eq!(listed, [$($name),*]);
        }
    };
}

checks! {
    memory = "memory",
    register = "register",
    launch = "launch",
    deadline = "deadline",
    four_at_once = "four-at-once",
    abandon = "abandon",
    load = "load",
    refusals = "refusals",
    copy_beside_kernel = "copy-beside-kernel",
    copy_within_gpu = "copy-within-gpu",
    free_beside_kernel = "free-beside-kernel",
    copy_rates = "copy-rates",
    small_copies = "small-copies",
    small_copies_steps = "small-copies-steps",
    small_copies_beside_kernels = "small-copies-beside-kernels",
    small_copies_rates = "small-copies-rates",
    small_copies_staying = "small-copies-staying",
    small_copies_synchronize = "small-copies-synchronize",
    small_copies_staying_rates = "small-copies-staying-rates",
    blocking_calls = "blocking-calls",
    context = "context",
    capture = "capture",
    ipc = "ipc",
    fork = "fork",
    fault = "fault",
}
