//! Any bytes as a send WQE. `cargo +nightly fuzz run wire_wqe`
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/doorbell-wire/tests/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::wqe(data));
