//! Device code has no panics (`cargo xtask ptx --check` looks for calls), but the language wants a handler.

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // A trap would be no better: there is nobody to tell. Nothing reaches this.
    loop {
        core::hint::spin_loop();
    }
}
