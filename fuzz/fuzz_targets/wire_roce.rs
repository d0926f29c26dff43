//! Any bytes as a RoCEv2 packet and as a frame. `cargo +nightly fuzz run wire_roce`
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/doorbell-wire/tests/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::roce(data));
