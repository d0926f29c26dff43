//! The CUDA back end's bookkeeping against a stand-in for the driver library (`mock/libcuda.c`, built with `cc`): what a
//! real driver would answer with a hang, the stand-in counts as a violation.
#![cfg(not(miri))]

use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use doorbell_gpu::{CopyOp, Dims, Export, Gpu, GpuError, GpuSelect, LaunchOpts, MemKind, Module};

mod copies;
mod lane;
#[path = "../mock/mod.rs"]
mod mock;
mod stay;

use mock::{LONG, Mock, PTX, bytes, launch, read_u64};

#[test]
fn everything_made_is_given_back() {
    let mock = Mock::build("lifecycle", &[]);
    let gpu = mock.open();
    assert_eq!(mock.get("streams"), 7, "a channel each: see the copier");
    let info = gpu.info();
    assert!(gpu.is_cuda() && info.ordinal == Some(0) && info.name == "Mock GPU 0");
    assert_eq!((info.sm_count, info.compute_capability), (4, Some((9, 0))));
    assert_eq!(
        (info.driver_version, info.mig, info.mps),
        (Some((13, 0)), false, false)
    );
    assert_eq!(info.pci_bus_id.as_deref(), Some("ffff:10:00.0"));
    assert_eq!(
        info.uuid.as_deref(),
        Some("GPU-01010101-0101-0101-0101-010101010101")
    );
    assert!(info.can.batch_copy && info.can.vmm_fd && info.numa_node.is_none());
    let buffer = gpu.alloc(MemKind::Device, 64).unwrap();
    let kernel = gpu.kernel("store").unwrap();
    assert_eq!(kernel.usage().unwrap().registers, 32);
    assert_eq!(gpu.resident_blocks(&kernel, 512).unwrap(), 16);
    let mut running = launch(&gpu, &kernel, &[buffer.device_addr(), 77]);
    drop(gpu);
    assert_eq!(running.wait(LONG).unwrap(), Duration::from_micros(1500));
    assert_eq!(read_u64(&buffer), 77);
    drop((running, kernel));
    assert_ne!(mock.get("streams"), 0, "a buffer keeps the GPU");
    drop(buffer);
    for figure in ["streams", "events", "live"] {
        assert_eq!(mock.get(figure), 0, "{figure}");
    }
    // The copies' kernel stays, and the context with it.
    let left = || {
        (
            mock.get("modules"),
            mock.get("retains") - mock.get("releases"),
        )
    };
    assert_eq!(left(), (1, 1));
    let gpu = mock.open();
    assert_eq!(mock.get("modules"), 2, "only the caller's is loaded again");
    drop(gpu);
    assert_eq!((left(), mock.get("live")), ((1, 1), 0));
    mock.clean();
}

/// Whoever opens a GPU without kernels of his own, closes it and opens it again loads once: neither waits for the kernels of others then.
#[test]
fn the_copies_kernel_is_loaded_once_a_context() {
    let mock = Mock::build("kept", &[]);
    let open = |ordinal| {
        let module = Module { ptx: "", host: &[] };
        let select = GpuSelect::Cuda(Some(ordinal));
        let gpu = Gpu::open_with_driver(&select, module, &mock.path).unwrap();
        assert!(gpu.info().can.kernel_copies);
    };
    for (ordinal, loaded) in [(0, 1), (0, 1), (1, 2), (0, 2), (1, 2)] {
        open(ordinal);
        assert_eq!(mock.get("modules"), loaded, "GPU {ordinal}");
    }
    // What was loaded before a reset is gone with its context.
    mock.call("mock_reset");
    open(0);
    open(0);
    assert_eq!(mock.get("modules"), 3);
    mock.clean();
}

#[test]
fn streams_for_launches_are_made_when_there_is_something_to_launch() {
    let mock = Mock::build("lazy", &[]);
    let module = Module { ptx: "", host: &[] };
    let gpu = Gpu::open_with_driver(&GpuSelect::Cuda(None), module, &mock.path).unwrap();
    let buffer = gpu.alloc(MemKind::Device, 64).unwrap();
    assert_eq!(mock.get("streams"), 3);
    for _ in 0..2 {
        let image = gpu.load(PTX.as_bytes()).unwrap();
        assert_eq!(mock.get("streams"), 7);
        let kernel = image.kernel("store").unwrap();
        launch(&gpu, &kernel, &[buffer.device_addr(), 9])
            .wait(LONG)
            .unwrap();
        assert_eq!(read_u64(&buffer), 9);
        buffer.write(0, &[0; 8]).unwrap();
    }
    drop((buffer, gpu));
    assert_eq!((mock.get("streams"), mock.get("live")), (0, 0));
    mock.clean();
}

#[test]
fn memory_of_all_kinds_is_zeroed_and_copied() {
    let mock = Mock::build("memory", &[]);
    let gpu = mock.open();
    // Past the staging buffer's megabyte, so that chunks meet.
    let len = (3 << 20) + 77;
    let data: Vec<u8> = (0..len).map(|i| (i * 7 + i / 4096) as u8).collect();
    for kind in [MemKind::Device, MemKind::PinnedHost, MemKind::Vmm] {
        let buffer = gpu.alloc(kind, len).unwrap();
        assert_eq!(buffer.host_ptr().is_some(), kind == MemKind::PinnedHost);
        let mut back = vec![1; len];
        buffer.read(0, &mut back).unwrap();
        assert!(back.iter().all(|&b| b == 0), "{kind}");
        buffer.write(0, &data).unwrap();
        buffer.read(0, &mut back).unwrap();
        assert!(back == data, "{kind}");
        buffer.read((2 << 20) - 3, &mut back[..9]).unwrap();
        assert_eq!(back[..9], data[(2 << 20) - 3..][..9]);
        buffer.fill(0x33).unwrap();
        buffer.read(0, &mut back).unwrap();
        assert!(back.iter().all(|&b| b == 0x33));
        assert!(matches!(
            buffer.write(len, &[0]),
            Err(GpuError::OutOfRange { .. })
        ));
    }
    let error = gpu.alloc(MemKind::Device, 2 << 30).unwrap_err().to_string();
    assert!(
        error.contains("cuMemAlloc") && error.contains("2147483648 bytes"),
        "{error}"
    );
    mock.clean();
}

#[test]
fn memory_that_is_pinned_already_is_taken_as_it_is_and_left_to_its_owner() {
    let mock = Mock::build("pinned_elsewhere", &[]);
    let gpu = mock.open();
    let owner = gpu.alloc(MemKind::PinnedHost, 4096).unwrap();
    let at = owner.host_ptr().unwrap();
    let live = mock.get("live");
    // SAFETY: the owner outlives every registration here.
    let register = |len| unsafe { gpu.register_host(at, len) };
    let mine = register(4096).unwrap();
    assert_eq!(mine.device_addr(), owner.device_addr());
    drop(mine);
    assert_eq!(mock.get("live"), live);
    // Longer than what is pinned: nobody would lock the rest.
    let error = register(8192).unwrap_err();
    assert!(error.to_string().contains("cuMemHostRegister"), "{error}");
    // What was registered is its registrar's to give back: an error as before.
    let foreign = NonNull::from(Box::leak(Box::new([0u64; 8]))).cast();
    // SAFETY: leaked memory is valid for ever.
    let register = || unsafe { gpu.register_host(foreign, 64) };
    let first = register().unwrap();
    let error = register().unwrap_err();
    assert!(error.to_string().contains("registered already"), "{error}");
    drop(first);
}

#[test]
fn frees_wait_for_running_kernels() {
    let mock = Mock::build("deferred", &[]);
    let gpu = mock.open();
    let flag = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let (device, vmm) = (
        gpu.alloc(MemKind::Device, 64).unwrap(),
        gpu.alloc(MemKind::Vmm, 64).unwrap(),
    );
    let foreign = Box::leak(Box::new([0u64; 8]));
    let ended = Arc::new(AtomicBool::new(false));
    struct Flag(Arc<AtomicBool>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let at = NonNull::from(&mut *foreign).cast();
    // SAFETY: leaked memory is valid for ever.
    let registered =
        unsafe { gpu.register_host_keeping(at, 64, Arc::new(Flag(Arc::clone(&ended)))) }.unwrap();
    let image = gpu.load(PTX.as_bytes()).unwrap();
    let live = mock.get("live");
    let kernel = gpu.kernel("spin").unwrap();
    let mut running = launch(&gpu, &kernel, &[flag.device_addr()]);
    assert!(!running.is_done().unwrap());
    let error = running.wait(Duration::from_millis(5)).unwrap_err();
    assert!(matches!(error, GpuError::TimedOut { .. }), "{error}");
    drop((device, vmm, registered, image));
    assert_eq!(
        (mock.get("live"), ended.load(Ordering::Relaxed)),
        (live, false)
    );
    flag.write(0, &[1]).unwrap();
    running.wait(LONG).unwrap();
    assert_eq!(
        (mock.get("live"), ended.load(Ordering::Relaxed)),
        (live - 3, true)
    );
    assert_eq!((mock.get("maps"), mock.get("modules")), (0, 2));
    mock.clean();
}

#[test]
fn an_abandoned_kernel_is_looked_after_by_the_next_call() {
    let mock = Mock::build("abandoned", &[]);
    let gpu = mock.open();
    let flag = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let kernel = gpu.kernel("spin").unwrap();
    drop(launch(&gpu, &kernel, &[flag.device_addr()]));
    let device = gpu.alloc(MemKind::Device, 64).unwrap();
    let live = mock.get("live");
    drop(device);
    assert_eq!(mock.get("live"), live, "freed under an abandoned kernel");
    flag.write(0, &[1]).unwrap();
    drop(gpu.alloc(MemKind::PinnedHost, 8).unwrap());
    assert_eq!(mock.get("live"), live - 1);
    mock.clean();
}

#[test]
fn closing_over_an_abandoned_kernel_leaks() {
    let mock = Mock::build("leak", &[]);
    let gpu = mock.open();
    let flag = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let kernel = gpu.kernel("spin").unwrap();
    let live = mock.get("live");
    drop(launch(&gpu, &kernel, &[flag.device_addr()]));
    drop((kernel, flag, gpu));
    assert_eq!(
        (mock.get("live"), mock.get("releases"), mock.get("streams")),
        (live, 0, 7)
    );
    mock.clean();
}

#[test]
fn launches_are_bounded_and_checked() {
    let mock = Mock::build("slots", &[]);
    let gpu = mock.open();
    let flag = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let kernel = gpu.kernel("spin").unwrap();
    let mut running: Vec<_> = (0..4)
        .map(|_| launch(&gpu, &kernel, &[flag.device_addr()]))
        .collect();
    let try_launch = |gpu: &Gpu, dims, params: &[u8]| {
        // SAFETY: refused before it runs.
        unsafe { gpu.launch(&kernel, dims, params, LaunchOpts::default()) }.unwrap_err()
    };
    let one = Dims::new(1, 1);
    let error = try_launch(&gpu, one, &[]);
    assert!(
        matches!(error, GpuError::TooManyLaunches { limit: 4 }),
        "{error}"
    );
    flag.write(0, &[1]).unwrap();
    for launch in &mut running {
        launch.wait(LONG).unwrap();
    }
    for dims in [
        Dims::new(0, 1),
        Dims::new(1, 0),
        Dims::new(1, 513),
        Dims::new(u32::MAX, 1),
    ] {
        assert!(matches!(
            try_launch(&gpu, dims, &[]),
            GpuError::BadDims {
                max_threads: 512,
                ..
            }
        ));
    }
    let error = try_launch(&gpu, one, &[0; 4097]);
    assert!(matches!(
        error,
        GpuError::ParamsTooLarge {
            len: 4097,
            max: 4096,
            ..
        }
    ));
    let other = mock.try_open(GpuSelect::Cuda(Some(1))).unwrap();
    assert!(matches!(
        try_launch(&other, one, &[]),
        GpuError::WrongGpu { .. }
    ));
    let error = gpu.kernel("spinn").unwrap_err().to_string();
    assert!(error.contains("fault, spin, store"), "{error}");
    mock.clean();
}

#[test]
fn the_callers_context_and_capture_mode_are_left_alone() {
    let mock = Mock::build("context", &[]);
    // Another library's context on the stack, its thread in the strict mode.
    mock.call_int("mock_push", 1);
    let gpu = mock.open();
    let buffer = gpu.alloc(MemKind::Device, 16).unwrap();
    buffer.write(0, &[1; 16]).unwrap();
    let kernel = gpu.kernel("store").unwrap();
    launch(&gpu, &kernel, &[buffer.device_addr(), 5])
        .wait(LONG)
        .unwrap();
    assert_eq!(read_u64(&buffer), 5);
    drop((buffer, kernel, gpu));
    assert_eq!(
        (mock.get("depth"), mock.get("mode"), mock.get("violations")),
        (1, 0, 0)
    );
}

#[test]
fn a_fault_is_reported_and_nothing_hangs() {
    let mock = Mock::build("fault", &[]);
    let gpu = mock.open();
    let buffer = gpu.alloc(MemKind::Device, 16).unwrap();
    let kernel = gpu.kernel("fault").unwrap();
    let params = bytes(&[0]);
    // SAFETY: the stand-in's kernel takes anything.
    let launched = unsafe { gpu.launch(&kernel, Dims::new(1, 1), &params, LaunchOpts::default()) };
    let error = launched
        .and_then(|mut l| l.wait(LONG))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("CUDA_ERROR_ILLEGAL_ADDRESS") && error.contains("compute-sanitizer"),
        "{error}"
    );
    assert!(buffer.read(0, &mut [0; 8]).is_err());
    let copier = gpu.copier().unwrap();
    // SAFETY: no bytes.
    let submitted = unsafe { copier.submit(&[]) };
    assert!(submitted.and_then(|t| copier.poll(t)).is_err());
    drop((buffer, kernel, copier, gpu));
    assert_eq!(mock.get("depth"), 0);
}

#[test]
fn exports_are_opened_again() {
    let mock = Mock::build("ipc", &[]);
    let gpu = mock.open();
    let device = gpu.alloc(MemKind::Device, 100).unwrap();
    device.write(0, b"shared").unwrap();
    let export = device.export().unwrap();
    assert!(matches!(export, Export::CudaIpc { len: 100, .. }));
    let opened = gpu.import(&export).unwrap();
    let mut back = [0; 6];
    opened.read(0, &mut back).unwrap();
    assert_eq!(
        (&back, opened.len(), opened.kind()),
        (b"shared", 100, MemKind::Device)
    );
    let vmm = gpu.alloc(MemKind::Vmm, 100).unwrap();
    let export = vmm.export().unwrap();
    assert!(matches!(export, Export::Fd { len: 100, .. }));
    assert_eq!(gpu.import(&export).unwrap().kind(), MemKind::Vmm);
    for buffer in [opened, gpu.alloc(MemKind::PinnedHost, 8).unwrap()] {
        assert!(matches!(buffer.export(), Err(GpuError::Unsupported { .. })));
    }
    mock.clean();
}

#[test]
fn what_is_missing_is_named() {
    let error = Mock::build("symbol", &["-DWITHOUT_UNMAP"]).try_open(GpuSelect::Cuda(None));
    let error = error.unwrap_err();
    assert!(
        matches!(
            error,
            GpuError::MissingSymbol {
                symbol: "cuMemUnmap",
                ..
            }
        ),
        "{error}"
    );
    let mock = Mock::build("ordinal", &[]);
    let error = mock.try_open(GpuSelect::Cuda(Some(7))).unwrap_err();
    assert!(
        matches!(
            error,
            GpuError::NoSuchDevice {
                ordinal: 7,
                count: 2
            }
        ),
        "{error}"
    );
    let module = Module {
        ptx: "// refuse me\n",
        host: &[],
    };
    let error = Gpu::open_with_driver(&GpuSelect::Auto, module, &mock.path).unwrap_err();
    assert!(
        error.to_string().contains("line 3; fatal: refused"),
        "{error}"
    );
    let nowhere = PathBuf::from("/nonexistent/libcuda.so.1");
    let module = Module { ptx: "", host: &[] };
    let error = Gpu::open_with_driver(&GpuSelect::Cuda(None), module, &nowhere).unwrap_err();
    assert!(matches!(error, GpuError::NoDriver { .. }), "{error}");
}

#[test]
fn auto_takes_the_host_when_there_is_no_device_and_says_why() {
    for (test, flags) in [
        ("nodevice", &["-DINIT_FAILS=100"]),
        ("nodevices", &["-DDEVICES=0"]),
    ] as [(&str, &[&str]); 2]
    {
        let mock = Mock::build(test, flags);
        let gpu = mock.try_open(GpuSelect::Auto).unwrap();
        assert!(!gpu.is_cuda() && gpu.copier().is_none());
        assert!(
            gpu.info().notes[0].contains("CUDA_ERROR_NO_DEVICE"),
            "{:?}",
            gpu.info().notes
        );
        let error = mock
            .try_open(GpuSelect::Cuda(None))
            .unwrap_err()
            .to_string();
        assert!(error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
    }
    // A driver that is broken is not passed over.
    let broken = Mock::build("broken", &["-DINIT_FAILS=803"]);
    assert!(broken.try_open(GpuSelect::Auto).is_err());
    let auto = Mock::build("auto", &[]).try_open(GpuSelect::Auto).unwrap();
    assert!(auto.is_cuda() && auto.info().notes[0].contains("auto"));
}

#[test]
fn a_mig_slice_is_noticed() {
    let gpu = Mock::build("mig", &["-DMIG"]).open();
    assert!(
        gpu.info().mig
            && gpu
                .info()
                .uuid
                .as_deref()
                .unwrap()
                .starts_with("MIG-aa010101")
    );
    assert!(gpu.info().notes.iter().any(|n| n.contains("MIG")));
}

#[test]
fn a_forked_child_is_told() {
    let mock = Mock::build("fork", &[]);
    let gpu = mock.open();
    let buffer = gpu.alloc(MemKind::Device, 16).unwrap();
    // SAFETY: the child makes calls that end in our own check, and leaves without running destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let told = matches!(buffer.read(0, &mut [0; 8]), Err(GpuError::Forked))
            && matches!(gpu.alloc(MemKind::Device, 8), Err(GpuError::Forked));
        drop(buffer);
        drop(gpu);
        let untouched = mock.get("frees") == 0 && mock.get("releases") == 0;
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if told && untouched { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: our own child and an out parameter.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    buffer.write(0, &[1; 16]).unwrap();
    mock.clean();
}

#[test]
fn memory_comes_as_a_dma_buf_of_whole_pages() {
    use std::os::unix::fs::FileExt;
    let mock = Mock::build("dmabuf", &[]);
    let gpu = mock.open();
    let buffer = gpu.alloc(MemKind::Device, 5000).unwrap();
    buffer.write(0, &[7; 5000]).unwrap();
    // From the middle of a page on.
    let (fd, from) = gpu.dmabuf(buffer.device_addr() + 100, 4900).unwrap();
    assert_eq!(from, 100);
    let mut seen = [0; 4900];
    std::fs::File::from(fd)
        .read_exact_at(&mut seen, from)
        .unwrap();
    assert_eq!(seen, [7; 4900]);
    assert!(gpu.dmabuf(1 << 50, 64).is_err(), "no memory of ours");
    assert_eq!(mock.get("violations"), 0);
}

#[test]
fn memory_of_others_is_exported_as_what_it_is_with_its_place() {
    let mock = Mock::build("foreign-export", &[]);
    let gpu = mock.open();
    let plain = mock.foreign(8192, 0);
    let (export, offset) = gpu
        .export_foreign(plain + 4096, 4096)
        .expect("an allocation");
    assert!(
        matches!(export, Export::CudaIpc { len: 8192, .. }),
        "{export:?}"
    );
    assert_eq!(offset, 4096);
    let imported = gpu.import(&export).expect("the whole allocation");
    assert_eq!(imported.len(), 8192);
    let mapped = mock.foreign_vmm(4 << 20, 0);
    let (export, offset) = gpu
        .export_foreign(mapped + 100, 1 << 20)
        .expect("an allocation");
    assert!(
        matches!(export, Export::Fd { len, .. } if len == 4 << 20),
        "{export:?}"
    );
    assert_eq!(offset, 100);
    // Past its end, and what nobody allocated.
    for (addr, len) in [(plain + 4096, 4097), (8, 8)] {
        let error = gpu.export_foreign(addr, len).unwrap_err();
        assert!(
            matches!(error, GpuError::UnknownMemory { .. }),
            "{addr:#x}: {error}"
        );
    }
    drop((imported, gpu));
    mock.clean();
}
