//! The plug-in on a CUDA GPU that is none: the stand-in of doorbell-gpu's tests takes the driver's place. Its memory is the host's, and what the
//! driver would hang on or refuse counts as a violation: copies within one GPU, the legacy stream, calls without a context.
#![cfg(not(miri))]

mod common;

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use common::gin::{AGGREGATE, Signal, With};
use common::hammer::{Hammer, hammer};
use common::jobs::{Part, play};
use common::rma::{RmaRank, proxy};
use common::scenes::{all_to_all, strict, whole};
use common::{Gather, LONG, Pages, Rank, config, on_the_host};

/// Builds `libcuda.so.1` and returns its folder, for `LD_LIBRARY_PATH`.
fn stand_in() -> &'static str {
    static FOLDER: OnceLock<String> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("mock-cuda");
        std::fs::create_dir_all(&folder).expect("a folder");
        let source = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../doorbell-gpu/tests/mock/libcuda.c"
        );
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(folder.join("libcuda.so.1"))
            .arg(source)
            .status()
            .expect("cc, which Rust links with");
        assert!(status.success());
        folder.to_str().expect("UTF-8").to_owned()
    })
}

/// The stand-in in this process, as the plug-in loads it.
struct Driver(libloading::Library);

impl Driver {
    fn load() -> Self {
        // SAFETY: the library above has no initialisers.
        Self(unsafe { libloading::Library::new("libcuda.so.1") }.expect("the stand-in"))
    }

    /// `cudaSetDevice` on this thread.
    fn set_device(&self, device: c_int) {
        // SAFETY: the function's type in the source.
        unsafe {
            let push = self.0.get::<unsafe extern "C" fn(c_int)>(b"mock_push");
            push.expect("a function")(device);
        }
    }

    /// Memory that somebody else allocates, exportable or not.
    fn pages(&self, exportable: bool, device: c_int, len: usize) -> Pages {
        let name: &[u8] = match exportable {
            true => b"mock_foreign_vmm",
            false => b"mock_foreign_alloc",
        };
        let len = len.next_multiple_of(2 << 20);
        // SAFETY: the function's type in the source.
        let at = unsafe {
            let alloc = self
                .0
                .get::<unsafe extern "C" fn(usize, c_int) -> u64>(name);
            alloc.expect("a function")(len, device)
        };
        Pages::foreign(at, len)
    }

    /// What has been handed to copy engines, and to the copiers' kernels, so far: launches, and copies in them.
    fn launches(&self) -> (u64, u64) {
        // SAFETY: the function's type in the source.
        unsafe {
            let get = self
                .0
                .get::<unsafe extern "C" fn(*const c_char) -> u64>(b"mock_get");
            let get = get.expect("a function");
            let count = |name: &CStr| get(name.as_ptr());
            let (copies, batches) = (count(c"copies"), count(c"batches"));
            let engines = copies - count(c"batched_copies") + batches;
            (
                engines + count(c"launches"),
                copies + count(c"kernel_copies"),
            )
        }
    }

    fn violation(&self) -> String {
        // SAFETY: the function's type in the source; the text is static.
        unsafe {
            let get = self
                .0
                .get::<unsafe extern "C" fn() -> *const c_char>(b"mock_violation");
            CStr::from_ptr(get.expect("a function")())
                .to_string_lossy()
                .into_owned()
        }
    }
}

#[test]
#[ignore = "the other tests of this file run it in processes of its own"]
fn peer_process() {
    on_the_host();
    let driver = Driver::load();
    Part::read().play(|rank, gather, scene| {
        // "… one": every rank on GPU 0. "… each": a GPU for each rank.
        let each = scene.ends_with("each");
        let device = if each { rank as c_int } else { 0 };
        driver.set_device(device);
        if scene.starts_with("proxy") {
            // NCCL's signals cannot be exported; nor can anything of the proxy's, so windows are made as users make them.
            let one = RmaRank::connect(rank, gather, 1);
            let signals = std::cell::Cell::new(0);
            proxy(
                &one,
                |len| {
                    let exportable = signals.replace(1) == 0;
                    driver.pages(exportable, device, len)
                },
                600,
            );
            return one.close();
        }
        run(rank, gather, scene, &driver, |len| {
            driver.pages(each, device, len)
        });
    });
    assert_eq!(driver.violation(), "");
}

fn run(
    rank: usize,
    gather: &Arc<Gather>,
    what: &str,
    driver: &Driver,
    pages: impl Fn(usize) -> Pages,
) {
    whole(rank, gather, |r: &Rank| match what {
        "signals one" | "signals each" => signals(r, driver, &pages),
        "strict one" | "strict each" => strict(r, &pages, 20),
        "hammer one" | "hammer each" => hammer(r, &pages, HAMMER),
        "short hammer each" => hammer(
            r,
            &pages,
            Hammer {
                kernels: 12,
                ..HAMMER
            },
        ),
        _ => all_to_all(r, &pages, 30_000),
    });
}

/// Puts with a signal each, all of them rung at once: nobody sees a signal before its data, and they share launches.
fn signals(rank: &Rank, driver: &Driver, pages: impl Fn(usize) -> Pages) {
    const PUTS: u64 = 64;
    let pages = pages(1 << 16);
    let (window, win) = rank.register(&pages, 0);
    let context = rank.create(config(1, 0, 1, 256));
    let gin = context.gin(0);
    for i in 0..PUTS {
        pages.write(8 * i as usize, &(i + 1).to_ne_bytes());
    }
    // Rank 0 puts to the next rank, or to itself.
    let to = 1 % rank.ranks;
    rank.gather.barrier(rank.rank);
    let before = driver.launches();
    if rank.rank == 0 {
        for i in 0..PUTS {
            let with = With {
                signal: Some((Signal::Indexed(0), 1)),
                opts: if i + 1 < PUTS { AGGREGATE } else { 0 },
                counter: None,
            };
            gin.put(to, (win, 8192 + 8 * i), (win, 8 * i), 8, with);
        }
    }
    if rank.rank == to {
        loop {
            let seen = gin.read_signal(0);
            for i in 0..seen {
                let at = 8192 + 8 * i as usize;
                assert_eq!(pages.word(at), i + 1, "signal {seen} came before its data");
            }
            if seen == PUTS {
                break;
            }
        }
    }
    if rank.rank == 0 {
        gin.flush_all(LONG).expect("complete");
        let after = driver.launches();
        let (launches, copies) = (after.0 - before.0, after.1 - before.1);
        // Within one GPU a copy is two, unless a kernel makes it. An engine's turn may end before the last of them: a few launches more are no trip
        // a signal.
        assert!((PUTS..=2 * PUTS).contains(&copies), "{copies} copies");
        assert!(
            launches <= PUTS / 4,
            "{launches} launches for {PUTS} puts with a signal"
        );
    }
    rank.gather.barrier(rank.rank);
    assert!(!context.has_error());
    context.destroy();
    rank.deregister(window);
}

const HAMMER: Hammer = Hammer {
    kernels: 100,
    blocks: 3,
    depth: 64,
};

fn on_mock(scene: &str, ranks: usize, each: usize, more: &[(&str, &str)]) {
    let mut variables = vec![
        ("LD_LIBRARY_PATH", stand_in()),
        ("DOORBELL_GPU", "cuda"),
        ("MOCK_IPC_ELSEWHERE", "1"),
    ];
    variables.extend(more);
    play(scene, ranks, each, &variables);
}

#[test]
fn one_rank_on_a_gpu_talks_to_itself() {
    on_mock("one", 1, 1, &[]);
}

#[test]
fn two_ranks_share_a_gpu() {
    on_mock("one", 2, 2, &[]);
}

#[test]
fn signals_and_counters_may_lie_in_gpu_memory() {
    on_mock("one", 2, 2, &[("DOORBELL_NCCL_SIGNALS", "gpu")]);
}

#[test]
fn two_gpus_of_one_process_reach_each_other() {
    on_mock("each", 2, 2, &[]);
    on_mock("each", 2, 2, &[("DOORBELL_NCCL_SIGNALS", "gpu")]);
}

#[test]
fn two_processes_reach_each_others_gpu() {
    on_mock("each", 2, 1, &[]);
    on_mock("each", 2, 1, &[("DOORBELL_NCCL_SIGNALS", "gpu")]);
}

#[test]
fn strict_windows_keep_the_order_of_writes_in_gpu_memory() {
    // Both writes are rung at once, and the stand-in carries a batch out from its end.
    let slowly = [("DOORBELL_HANDLER", "record"), ("MOCK_BATCH_US", "2000")];
    on_mock("strict one", 2, 2, &slowly);
    on_mock("strict each", 2, 1, &slowly);
}

#[test]
fn puts_with_a_signal_each_share_launches_and_no_signal_comes_first() {
    let slowly = [("DOORBELL_HANDLER", "record"), ("MOCK_BATCH_US", "2000")];
    on_mock("signals one", 1, 1, &slowly);
    on_mock("signals one", 2, 2, &slowly);
    on_mock("signals each", 2, 1, &slowly);
}

#[test]
fn nccls_own_proxy_signals_memory_that_nobody_can_import() {
    on_mock("proxy one", 1, 1, &[]);
    on_mock("proxy one", 2, 2, &[]);
    on_mock("proxy each", 2, 1, &[]);
    on_mock("proxy each", 2, 2, &[]);
}

#[test]
fn short_kernels_lose_nothing_beside_two_engine_cores() {
    on_mock("short hammer each", 2, 1, &[("DOORBELL_HCA_CORES", "2")]);
}

/// Kernels of several blocks, hundreds of them, beside one engine core and several: nothing may get lost where queues begin, end and fall silent.
#[test]
#[ignore = "heavy: 24 jobs of 100 kernels"]
fn heavy_short_kernels_lose_nothing_whatever_the_engine_cores() {
    for cores in ["1", "2", "3"] {
        for more in [
            &[][..],
            &[("DOORBELL_NCCL_SIGNALS", "gpu")],
            &[("DOORBELL_HANDLER", "record")],
            &[("DOORBELL_GPU_COPIES", "kernel")],
        ] {
            let variables = [&[("DOORBELL_HCA_CORES", cores)], more].concat();
            on_mock("hammer each", 2, 1, &variables);
            on_mock("hammer one", 2, 2, &variables);
        }
    }
}
