//! Any bytes as a send ring and its doorbells. `cargo +nightly fuzz run hca_ring`
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/doorbell-hca/tests/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::ring(data));
