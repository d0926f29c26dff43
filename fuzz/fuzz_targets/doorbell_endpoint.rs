//! Any bytes as a peer's endpoint. `cargo +nightly fuzz run doorbell_endpoint`
#![no_main]

#[path = "../../crates/doorbell/tests/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::endpoint(data));
