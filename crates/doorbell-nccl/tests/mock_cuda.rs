//! The plug-in on a CUDA GPU that is none: the stand-in of doorbell-gpu's tests takes the driver's place. Its memory is the host's, and what the
//! driver would hang on or refuse counts as a violation: copies within one GPU, the legacy stream, calls without a context.
#![cfg(not(miri))]

mod common;

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use common::jobs::{Part, play};
use common::scenes::{all_to_all, strict, whole};
use common::{Gather, Pages, Rank, on_the_host};

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
        run(rank, gather, scene, |len| driver.pages(each, device, len));
    });
    assert_eq!(driver.violation(), "");
}

fn run(rank: usize, gather: &Arc<Gather>, what: &str, pages: impl Fn(usize) -> Pages) {
    whole(rank, gather, |r: &Rank| match what {
        "strict one" | "strict each" => strict(r, &pages, 20),
        _ => all_to_all(r, &pages, 30_000),
    });
}

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
