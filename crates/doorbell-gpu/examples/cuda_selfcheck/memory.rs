//! Memory of every kind, and foreign memory.

use std::ptr::NonNull;
use std::sync::Arc;

use doorbell_gpu::{Dims, Gpu, MemKind};

use crate::{LONG, Outcome, ensure, launch};

/// Zeroed, written, read, filled, seen by kernels.
pub(crate) fn kinds(gpu: &Gpu) -> Outcome {
    let len = (5 << 20) + 123;
    let data: Vec<u8> = (0..len).map(|i| (i * 7 + i / 4099) as u8).collect();
    for kind in [MemKind::Device, MemKind::PinnedHost, MemKind::Vmm] {
        if kind == MemKind::Vmm && !gpu.info().can.vmm_fd {
            continue;
        }
        let buffer = gpu.alloc(kind, len)?;
        ensure!(
            buffer.device_addr() % 256 == 0,
            "{kind} memory at {:#x}",
            buffer.device_addr()
        );
        let mut back = vec![1; len];
        buffer.read(0, &mut back)?;
        ensure!(back.iter().all(|&b| b == 0), "{kind} memory is not zeroed");
        buffer.write(0, &data)?;
        buffer.read(0, &mut back)?;
        ensure!(back == data, "{kind} memory gave other bytes back");
        let at = buffer.device_addr() + 4096;
        launch(
            gpu,
            &gpu.kernel("store")?,
            Dims::new(1, 1),
            &[at, 0x1122_3344_5566_7788],
        )?
        .wait(LONG)?;
        buffer.read(4095, &mut back[..10])?;
        ensure!(
            back[1..9] == 0x1122_3344_5566_7788_u64.to_ne_bytes(),
            "{kind}: a kernel's store is not seen"
        );
        ensure!(
            back[0] == data[4095] && back[9] == data[4104],
            "{kind}: bytes beside a store changed"
        );
        buffer.fill(0x77)?;
        buffer.read(0, &mut back)?;
        ensure!(
            back.iter().all(|&b| b == 0x77),
            "{kind} memory is not filled"
        );
    }
    Ok("device, pinned, exportable".into())
}

/// A mapping of our own, page-locked; the keep-alive goes when it is unlocked.
pub(crate) fn register(gpu: &Gpu) -> Outcome {
    struct Pages(NonNull<u8>, usize);
    // SAFETY: plain memory; its users synchronise.
    unsafe impl Send for Pages {}
    // SAFETY: as above.
    unsafe impl Sync for Pages {}
    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the mapping below, which nobody uses any more.
            let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), self.1) };
        }
    }
    let len = 1 << 20;
    let fd = rustix::fs::memfd_create("selfcheck", rustix::fs::MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&fd, len as u64)?;
    // SAFETY: a new mapping at an address of the system's choice.
    let ptr = unsafe {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        mmap(std::ptr::null_mut(), len, rw, MapFlags::SHARED, &fd, 0)?
    };
    let pages = Arc::new(Pages(
        NonNull::new(ptr.cast()).ok_or("a null mapping")?,
        len,
    ));
    // SAFETY: the keep-alive owns the mapping.
    let registered = unsafe { gpu.register_host_keeping(pages.0, len, pages.clone()) }?;
    let at = registered.device_addr() + 8000;
    launch(gpu, &gpu.kernel("store")?, Dims::new(1, 1), &[at, 99])?.wait(LONG)?;
    let mut word = [0u8; 8];
    rustix::io::pread(&fd, &mut word, 8000)?;
    ensure!(
        u64::from_ne_bytes(word) == 99,
        "a kernel's store is not in the memfd"
    );
    // SAFETY: refused: the memory is registered already.
    let again = unsafe { gpu.register_host(pages.0, len) };
    ensure!(again.is_err(), "registered twice");
    drop(registered);
    ensure!(
        Arc::strong_count(&pages) == 1,
        "the keep-alive outlives the registration"
    );
    Ok("a memfd".into())
}
