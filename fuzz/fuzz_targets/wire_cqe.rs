//! Any bytes as a CQE and a doorbell word. `cargo +nightly fuzz run wire_cqe`
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/doorbell-wire/tests/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::cqe(data));
