//! Marks the shared object as one that stays.
//!
//! NCCL closes a plug-in when its last communicator ends. Engine threads would then run code that is no longer mapped, so the
//! loader is told never to unmap it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
        // What is shipped carries names for back traces, and no line tables.
        if std::env::var("PROFILE").as_deref() == Ok("release") {
            println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-debug");
        }
    }
}
