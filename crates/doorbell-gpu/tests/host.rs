//! The host GPU: memory, launches of more threads than cores, panics, aborts, deadlines, abandoning.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use doorbell_device::Arch;
use doorbell_device::host::{HostKernel, HostThread};
use doorbell_gpu::{Dims, Gpu, GpuError, GpuSelect, LaunchOpts, MAX_HOST_THREADS, MemKind, Module};

/// Long enough for a loaded machine; no test asserts how long anything takes.
const LONG: Duration = Duration::from_secs(60);

/// Makes a kernel of a generic function, in both widths.
macro_rules! kernels {
    ($($name:ident($thread:ident, $params:ident: $type:ty) $body:block)*) => {
        $(unsafe fn $name<const L: usize>($thread: &HostThread<L>, params: *const u8)
        where
            for<'a> &'a HostThread<L>: Arch,
        {
            // SAFETY: the launcher passes a parameter structure of this type.
            let $params = unsafe { &*params.cast::<$type>() };
            $body
        })*
        static KERNELS: &[HostKernel] = &[
            $(HostKernel { name: stringify!($name), fast: $name::<1>, warp: $name::<32> }),*
        ];
    };
}

/// Addresses, as a real parameter structure has them.
#[repr(C, align(32))]
struct Words {
    counter: u64,
    slots: u64,
    target: u64,
}

fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: the test passes an address inside a buffer that it keeps until the launch has ended.
    unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(address as usize) }
}

kernels! {
    // Each thread marks its slot; then all wait for all, which needs every thread to be there at once.
    rendezvous(t, p: Words) {
        let index = u64::from(t.block() * t.threads() + t.thread());
        word(p.slots + index * 8).fetch_add(index + 1, Ordering::Relaxed);
        word(p.counter).fetch_add(1, Ordering::AcqRel);
        while word(p.counter).load(Ordering::Acquire) < p.target {
            t.relax();
        }
    }
    // Waits for the counter to reach the target or for an abort.
    wait_for_target(t, p: Words) {
        while word(p.counter).load(Ordering::Acquire) < p.target && !t.aborted() {
            t.relax();
        }
    }
    // Ignores aborts.
    stubborn(t, p: Words) {
        while word(p.counter).load(Ordering::Acquire) < p.target {
            t.relax();
        }
    }
    // The last thread panics, the others wait for what never comes.
    breaks(t, p: Words) {
        let _ = p;
        if t.block() + 1 == t.blocks() && t.thread() + 1 == t.threads() {
            panic!("thread {} gives up", t.thread());
        }
        while !t.aborted() {
            t.relax();
        }
    }
    // Copies its parameters' alignment and a field out.
    params_seen(t, p: Words) {
        let _ = t;
        word(p.slots).store(std::ptr::from_ref(p).addr() as u64, Ordering::Relaxed);
        word(p.counter).store(p.target, Ordering::Relaxed);
    }
}

fn gpu() -> Gpu {
    Gpu::open(
        &GpuSelect::Host,
        Module {
            ptx: "",
            host: KERNELS,
        },
    )
    .unwrap()
}

fn bytes(words: &Words) -> &[u8] {
    // SAFETY: three u64 of a repr(C) structure; the alignment's padding is left out.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(words).cast(), 24) }
}

fn read_u64(buffer: &doorbell_gpu::Buffer, index: usize) -> u64 {
    let mut b = [0; 8];
    buffer.read(index * 8, &mut b).unwrap();
    u64::from_ne_bytes(b)
}

#[test]
fn says_what_it_is() {
    let gpu = gpu();
    assert!(!gpu.is_cuda());
    let info = gpu.info();
    assert_eq!((info.backend.as_str(), info.ordinal), ("host", None));
    assert!(info.sm_count >= 1 && !info.notes.is_empty());
}

#[test]
fn memory_is_zeroed_aligned_and_bounds_are_checked() {
    let gpu = gpu();
    for kind in [MemKind::Device, MemKind::PinnedHost, MemKind::Vmm] {
        let buffer = gpu.alloc(kind, 10_000).unwrap();
        assert_eq!((buffer.kind(), buffer.len()), (kind, 10_000));
        assert_eq!(buffer.device_addr() % 4096, 0);
        assert_eq!(
            buffer.host_ptr().unwrap().as_ptr().addr() as u64,
            buffer.device_addr()
        );
        let mut all = vec![1; 10_000];
        buffer.read(0, &mut all).unwrap();
        assert!(all.iter().all(|&b| b == 0));
        buffer.fill(0x5a).unwrap();
        buffer.write(9_990, b"0123456789").unwrap();
        buffer.read(9_989, &mut all[..11]).unwrap();
        assert_eq!(&all[..11], b"Z0123456789");
        buffer.write(10_000, b"").unwrap();
        for (offset, len) in [(10_000, 1), (9_999, 2), (usize::MAX, 1), (0, 10_001)] {
            let error = buffer.write(offset, &vec![0; len]).unwrap_err();
            assert!(
                matches!(error, GpuError::OutOfRange { size: 10_000, .. }),
                "{error}"
            );
            assert!(buffer.read(offset, &mut vec![0; len]).is_err());
        }
    }
    assert!(matches!(
        gpu.alloc(MemKind::Device, 0),
        Err(GpuError::BadLength { len: 0, .. })
    ));
}

fn meet(dims: Dims, opts: LaunchOpts) {
    let gpu = gpu();
    let total = dims.total();
    let slots = gpu.alloc(MemKind::Device, total as usize * 8).unwrap();
    let counter = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let params = Words {
        counter: counter.device_addr(),
        slots: slots.device_addr(),
        target: total,
    };
    let kernel = gpu.kernel("rendezvous").unwrap();
    assert_eq!(kernel.name(), "rendezvous");
    // SAFETY: the structure is the kernel's, the buffers outlive the launch.
    let mut launch = unsafe { gpu.launch(&kernel, dims, bytes(&params), opts) }.unwrap();
    launch.wait(LONG).unwrap();
    assert!(launch.is_done().unwrap());
    launch.wait(Duration::ZERO).unwrap();
    for index in 0..total {
        assert_eq!(read_u64(&slots, index as usize), index + 1);
    }
}

#[test]
fn more_blocks_than_cores_run_at_once() {
    let cores = std::thread::available_parallelism().unwrap().get() as u32;
    let blocks = if cfg!(miri) { 3 } else { 2 * cores + 3 };
    meet(Dims::new(blocks, 3), LaunchOpts::default());
}

#[test]
#[cfg_attr(miri, ignore = "64 threads are too slow under Miri")]
fn emulated_warps_run() {
    meet(
        Dims::new(2, 32),
        LaunchOpts {
            emulate_warp: true,
            ..LaunchOpts::default()
        },
    );
}

#[test]
fn a_waiting_thread_drives_the_relax_hook() {
    let gpu = gpu();
    let counter = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let address = counter.device_addr();
    let calls = Arc::new(AtomicU32::new(0));
    let hook = {
        let calls = Arc::clone(&calls);
        // Only the hook makes the kernel end: nothing else counts.
        Arc::new(move || {
            calls.fetch_add(1, Ordering::Relaxed);
            word(address).fetch_add(1, Ordering::Release);
        })
    };
    let params = Words {
        counter: address,
        slots: 0,
        target: 5,
    };
    let opts = LaunchOpts {
        relax: Some(hook),
        ..LaunchOpts::default()
    };
    let kernel = gpu.kernel("wait_for_target").unwrap();
    // SAFETY: as in `meet`.
    let mut launch = unsafe { gpu.launch(&kernel, Dims::new(1, 2), bytes(&params), opts) }.unwrap();
    launch.wait(LONG).unwrap();
    assert!(calls.load(Ordering::Relaxed) >= 5);
}

#[test]
fn a_wait_ends_at_its_deadline_and_the_kernel_goes_on() {
    let gpu = gpu();
    let counter = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let params = Words {
        counter: counter.device_addr(),
        slots: 0,
        target: 1,
    };
    let kernel = gpu.kernel("wait_for_target").unwrap();
    // SAFETY: as in `meet`.
    let mut launch = unsafe {
        gpu.launch(
            &kernel,
            Dims::new(2, 2),
            bytes(&params),
            LaunchOpts::default(),
        )
    }
    .unwrap();
    assert!(!launch.is_done().unwrap());
    let error = launch.wait(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, GpuError::TimedOut { .. }), "{error}");
    assert!(error.to_string().contains("wait_for_target"), "{error}");
    counter.write(0, &1u64.to_ne_bytes()).unwrap();
    launch.wait(LONG).unwrap();
}

#[test]
fn abort_ends_a_kernel_and_is_told() {
    let gpu = gpu();
    let counter = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let params = Words {
        counter: counter.device_addr(),
        slots: 0,
        target: 1,
    };
    let kernel = gpu.kernel("wait_for_target").unwrap();
    // SAFETY: as in `meet`.
    let mut launch = unsafe {
        gpu.launch(
            &kernel,
            Dims::new(2, 2),
            bytes(&params),
            LaunchOpts::default(),
        )
    }
    .unwrap();
    launch.abort();
    let error = launch.wait(LONG).unwrap_err();
    assert!(matches!(error, GpuError::Aborted { .. }), "{error}");
}

#[test]
fn a_panic_stops_the_others_and_is_reported() {
    let gpu = gpu();
    let params = Words {
        counter: 0,
        slots: 0,
        target: 0,
    };
    let kernel = gpu.kernel("breaks").unwrap();
    // SAFETY: the kernel dereferences nothing.
    let mut launch = unsafe {
        gpu.launch(
            &kernel,
            Dims::new(2, 3),
            bytes(&params),
            LaunchOpts::default(),
        )
    }
    .unwrap();
    match launch.wait(LONG).unwrap_err() {
        GpuError::KernelPanicked {
            kernel,
            block: 1,
            thread: 2,
            message,
        } => {
            assert_eq!(
                (kernel.as_str(), message.as_str()),
                ("breaks", "thread 2 gives up")
            );
        }
        other => panic!("{other}"),
    }
    // Asked again, it says the same.
    assert!(matches!(
        launch.is_done(),
        Err(GpuError::KernelPanicked { .. })
    ));
}

#[test]
fn params_are_aligned_for_any_structure() {
    let gpu = gpu();
    let out = gpu.alloc(MemKind::PinnedHost, 16).unwrap();
    let params = Words {
        counter: out.device_addr(),
        slots: out.device_addr() + 8,
        target: 0xabcdef,
    };
    let kernel = gpu.kernel("params_seen").unwrap();
    // SAFETY: as in `meet`.
    let mut launch = unsafe {
        gpu.launch(
            &kernel,
            Dims::new(1, 1),
            bytes(&params),
            LaunchOpts::default(),
        )
    }
    .unwrap();
    launch.wait(LONG).unwrap();
    assert_eq!((read_u64(&out, 0), read_u64(&out, 1) % 64), (0xabcdef, 0));
}

#[test]
fn impossible_launches_are_refused_with_a_reason() {
    let gpu = gpu();
    let kernel = gpu.kernel("params_seen").unwrap();
    let launch = |blocks, threads| {
        // SAFETY: refused before anything runs.
        unsafe {
            gpu.launch(
                &kernel,
                Dims::new(blocks, threads),
                &[],
                LaunchOpts::default(),
            )
        }
        .unwrap_err()
    };
    for (blocks, threads) in [(0, 1), (1, 0), (1, 1025)] {
        assert!(matches!(launch(blocks, threads), GpuError::BadDims { .. }));
    }
    for (blocks, threads) in [
        (MAX_HOST_THREADS + 1, 1),
        (MAX_HOST_THREADS, 2),
        (u32::MAX, 1024),
    ] {
        let error = launch(blocks, threads);
        assert!(matches!(error, GpuError::TooManyThreads { .. }), "{error}");
    }
    let error = gpu.kernel("rendezvouz").unwrap_err().to_string();
    assert!(
        error.contains("`rendezvouz`") && error.contains("rendezvous,"),
        "{error}"
    );
}

#[test]
fn registered_memory_is_read_written_and_filled_like_a_buffer() {
    let gpu = gpu();
    let owner: Arc<[AtomicU64; 4]> = Arc::default();
    let ptr = std::ptr::NonNull::from(&*owner).cast();
    // SAFETY: the keep-alive owns the memory, which is used as atomics only.
    let memory = unsafe { gpu.register_host_keeping(ptr, 32, Arc::clone(&owner) as _) }.unwrap();
    memory.fill(0xaa).unwrap();
    memory.write(3, b"hello").unwrap();
    let mut back = [0; 7];
    memory.read(2, &mut back).unwrap();
    assert_eq!(&back, b"\xaahello\xaa");
    assert_eq!(
        owner[3].load(Ordering::Relaxed),
        u64::from_ne_bytes([0xaa; 8])
    );
    for (offset, len) in [(26, 7), (33, 0), (usize::MAX, 2)] {
        assert!(
            memory.read(offset, &mut vec![0; len]).is_err(),
            "{offset}+{len}"
        );
        assert!(
            memory.write(offset, &vec![0; len]).is_err(),
            "{offset}+{len}"
        );
    }
}

#[test]
fn what_is_deferred_waits_for_the_launches_in_flight() {
    let gpu = gpu();
    let counter = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let params = Words {
        counter: counter.device_addr(),
        slots: 0,
        target: 1,
    };
    let kernel = gpu.kernel("stubborn").unwrap();
    // SAFETY: as in `meet`.
    let mut launch = unsafe {
        gpu.launch(
            &kernel,
            Dims::new(1, 1),
            bytes(&params),
            LaunchOpts::default(),
        )
    }
    .unwrap();
    let ran = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ran);
    gpu.defer(move || flag.store(true, Ordering::Release));
    assert!(!ran.load(Ordering::Acquire), "a kernel is still running");
    word(counter.device_addr()).store(1, Ordering::Release);
    launch.wait(LONG).unwrap();
    drop(launch);
    let deadline = std::time::Instant::now() + LONG;
    while !ran.load(Ordering::Acquire) {
        assert!(std::time::Instant::now() < deadline, "never ran");
        std::thread::yield_now();
    }
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    gpu.defer(move || set.store(true, Ordering::Release));
    assert!(flag.load(Ordering::Acquire), "at once when nothing runs");
}

/// Sets its flag when dropped.
struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
#[cfg_attr(miri, ignore = "waits out real seconds")]
fn an_abandoned_kernel_keeps_its_memory() {
    let gpu = gpu();
    let counter = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let freed = Arc::new(AtomicBool::new(false));
    static FOREIGN: AtomicU64 = AtomicU64::new(0);
    // SAFETY: a static is valid for ever.
    let registered = unsafe {
        gpu.register_host_keeping(
            std::ptr::NonNull::from(&FOREIGN).cast(),
            8,
            Arc::new(Flag(Arc::clone(&freed))),
        )
    }
    .unwrap();
    assert_eq!(
        registered.device_addr(),
        registered.host_ptr().as_ptr().addr() as u64
    );
    let address = counter.device_addr();
    let params = Words {
        counter: address,
        slots: 0,
        target: 1,
    };
    let kernel = gpu.kernel("stubborn").unwrap();
    // SAFETY: as in `meet`; the buffer is dropped early, which frees it only after the kernel's end.
    let launch = unsafe {
        gpu.launch(
            &kernel,
            Dims::new(2, 1),
            bytes(&params),
            LaunchOpts::default(),
        )
    }
    .unwrap();
    drop(launch);
    drop(counter);
    drop(registered);
    drop(gpu);
    assert!(
        !freed.load(Ordering::Acquire),
        "freed under a running kernel"
    );
    // Still mapped, still polled: this is what ends the kernel.
    word(address).store(1, Ordering::Release);
    let deadline = std::time::Instant::now() + LONG;
    while !freed.load(Ordering::Acquire) {
        assert!(
            std::time::Instant::now() < deadline,
            "not freed after the kernel's end"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn dropping_a_launch_aborts_it() {
    let gpu = gpu();
    let counter = gpu.alloc(MemKind::PinnedHost, 8).unwrap();
    let params = Words {
        counter: counter.device_addr(),
        slots: 0,
        target: 1,
    };
    let freed = Arc::new(AtomicBool::new(false));
    let kernel = gpu.kernel("wait_for_target").unwrap();
    // SAFETY: as in `meet`.
    let launch = unsafe {
        gpu.launch(
            &kernel,
            Dims::new(2, 2),
            bytes(&params),
            LaunchOpts::default(),
        )
    }
    .unwrap();
    drop(launch);
    static FOREIGN: AtomicU64 = AtomicU64::new(0);
    let keep = Arc::new(Flag(Arc::clone(&freed)));
    // SAFETY: a static is valid for ever.
    drop(unsafe { gpu.register_host_keeping(std::ptr::NonNull::from(&FOREIGN).cast(), 8, keep) });
    assert!(
        freed.load(Ordering::Acquire),
        "the launch still counts as running"
    );
}
