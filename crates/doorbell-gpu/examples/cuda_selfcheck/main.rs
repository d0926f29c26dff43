//! Checks `doorbell-gpu` on a real CUDA GPU and prints a line a check: `cuda_selfcheck [--list] [NAME ...]`.
//!
//! Exit status 0 when all passed, 1 when one failed, 2 when one hung (a watchdog ends the process, since a call stuck in the
//! driver cannot be ended otherwise). `INFO` lines are measurements, not judgements. No GPU, no checks: that is status 1.

mod coexist;
mod copies;
mod launches;
mod memory;
mod process;
mod raw;
mod small;
mod staying;

use std::process::exit;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use doorbell_gpu::{Buffer, Dims, Gpu, GpuSelect, Kernel, Launch, LaunchOpts, MemKind, Module};

/// What a check says: a remark when it passed, a reason when not.
type Outcome = Result<String, Box<dyn std::error::Error>>;

/// A check: its name and its function.
type Check = (&'static str, fn(&Gpu) -> Outcome);

const CHECKS: &[Check] = &[
    ("memory", memory::kinds),
    ("register", memory::register),
    ("launch", launches::launch),
    ("deadline", launches::deadline),
    ("four-at-once", launches::four_at_once),
    ("abandon", launches::abandon),
    ("load", launches::load),
    ("refusals", launches::refusals),
    ("copy-beside-kernel", copies::beside_a_full_gpu),
    ("copy-within-gpu", copies::within_the_gpu),
    ("free-beside-kernel", copies::free_beside_a_kernel),
    ("copy-rates", copies::rates),
    ("small-copies", small::bytes),
    ("small-copies-steps", small::steps),
    ("small-copies-beside-kernels", small::beside_kernels),
    ("small-copies-rates", small::rates),
    ("small-copies-staying", staying::bytes),
    ("small-copies-synchronize", staying::synchronize),
    ("small-copies-staying-rates", staying::rates),
    ("blocking-calls", coexist::blocking_calls),
    ("context", coexist::context),
    ("capture", coexist::capture),
    ("ipc", process::ipc),
    ("fork", process::fork),
    ("fault", process::fault),
];

/// Longest that one check may take.
const WATCHDOG: Duration = Duration::from_secs(60);
/// Waits inside the checks; far above what they take.
const LONG: Duration = Duration::from_secs(20);

const MODULE: Module = Module {
    ptx: include_str!("kernels.ptx"),
    host: &[],
};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|a| a == "--list") {
        CHECKS.iter().for_each(|(name, _)| println!("{name}"));
        return;
    }
    if args.first().is_some_and(|a| a == "--child") {
        exit(process::child(&args[1..]));
    }
    for name in &args {
        if !CHECKS.iter().any(|(n, _)| n == name) {
            eprintln!("no check `{name}`; see --list");
            exit(1);
        }
    }
    let started = Instant::now();
    let gpu = match open() {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("FAIL open: {error}");
            exit(1);
        }
    };
    println!("PASS open: {:?}", started.elapsed());
    describe(&gpu);
    let mut failed = 0;
    for (name, check) in CHECKS {
        if !args.is_empty() && !args.iter().any(|a| a == name) {
            continue;
        }
        let guard = Watchdog::start(name);
        let started = Instant::now();
        match check(&gpu) {
            Ok(remark) => println!("PASS {name}: {remark} ({:?})", started.elapsed()),
            Err(error) => {
                failed += 1;
                println!("FAIL {name}: {error} ({:?})", started.elapsed());
            }
        }
        drop(guard);
    }
    let guard = Watchdog::start("close");
    drop(gpu);
    drop(guard);
    println!(
        "{}",
        if failed == 0 {
            "PASS all".to_owned()
        } else {
            format!("FAIL {failed} checks")
        }
    );
    exit(i32::from(failed > 0));
}

/// The GPU that `DOORBELL_GPU` names (`cuda:N`), or the first.
fn open() -> Result<Gpu, doorbell_gpu::GpuError> {
    let select = match std::env::var("DOORBELL_GPU").ok().map(|text| text.parse()) {
        Some(Ok(select @ GpuSelect::Cuda(_))) => select,
        _ => GpuSelect::Cuda(None),
    };
    Gpu::open(&select, MODULE)
}

fn describe(gpu: &Gpu) {
    let info = gpu.info();
    println!(
        "INFO {} {:?} {:?}",
        info.name, info.compute_capability, info.uuid
    );
    println!(
        "INFO driver {:?} pci {:?} numa {:?} sms {} memory {} GiB mig {} mps {}",
        info.driver_version,
        info.pci_bus_id,
        info.numa_node,
        info.sm_count,
        info.memory_bytes >> 30,
        info.mig,
        info.mps
    );
    println!("INFO {:?}", info.can);
    for note in &info.notes {
        println!("INFO note: {note}");
    }
}

/// Ends the process when a check hangs.
struct Watchdog {
    done: Arc<Mutex<bool>>,
}

impl Watchdog {
    fn start(name: &'static str) -> Self {
        let done = Arc::new(Mutex::new(false));
        let seen = Arc::clone(&done);
        std::thread::spawn(move || {
            std::thread::sleep(WATCHDOG);
            if !*seen.lock().expect("watchdog") {
                println!("FAIL {name}: hung for {WATCHDOG:?}");
                exit(2);
            }
        });
        Self { done }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.done.lock().expect("watchdog") = true;
    }
}

/// Fails a check with a sentence when something does not hold.
macro_rules! ensure {
    ($cond:expr, $($text:tt)+) => {
        if !$cond {
            return Err(format!($($text)+).into());
        }
    };
}
pub(crate) use ensure;

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn read_u64(buffer: &Buffer, index: usize) -> Result<u64, doorbell_gpu::GpuError> {
    let mut b = [0; 8];
    buffer.read(index * 8, &mut b)?;
    Ok(u64::from_ne_bytes(b))
}

fn launch(
    gpu: &Gpu,
    kernel: &Kernel,
    dims: Dims,
    params: &[u64],
) -> Result<Launch, doorbell_gpu::GpuError> {
    // SAFETY: the parameters are the kernel's (see kernels.ptx), their addresses those of buffers of this GPU.
    unsafe { gpu.launch(kernel, dims, &bytes(params), LaunchOpts::default()) }
}

/// A kernel that waits for a flag or for its time to be over.
struct Spin {
    launch: Launch,
    flag: Buffer,
    out: Buffer,
}

impl Spin {
    /// Starts it with its flag in memory of `kind`, and waits until its first block runs.
    fn start(
        gpu: &Gpu,
        dims: Dims,
        kind: MemKind,
        budget: Duration,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let flag = gpu.alloc(kind, 8)?;
        let out = gpu.alloc(MemKind::PinnedHost, dims.blocks as usize * 8)?;
        let params = [
            flag.device_addr(),
            out.device_addr(),
            budget.as_nanos() as u64,
        ];
        let launch = launch(gpu, &gpu.kernel("spin")?, dims, &params)?;
        let until = Instant::now() + LONG;
        while read_u64(&out, 0)? == 0 {
            ensure!(Instant::now() < until, "the spinning kernel did not start");
        }
        Ok(Self { launch, flag, out })
    }

    /// A kernel that holds every multiprocessor to the last thread.
    fn everywhere(
        gpu: &Gpu,
        kind: MemKind,
        budget: Duration,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let blocks = gpu.resident_blocks(&gpu.kernel("spin")?, 1024)?;
        Self::start(gpu, Dims::new(blocks, 1024), kind, budget)
    }

    /// Ends it through pinned memory.
    fn release(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        self.flag.write(0, &1u64.to_ne_bytes())?;
        self.finish(1)
    }

    /// Waits for its end, and for how it should have come.
    fn finish(&mut self, expect: u64) -> Result<(), Box<dyn std::error::Error>> {
        self.launch.wait(LONG)?;
        for block in 0..self.out.len() / 8 {
            let how = read_u64(&self.out, block)?;
            ensure!(
                how == expect,
                "block {block} ended by {how}, not {expect} (1 flag, 2 time)"
            );
        }
        Ok(())
    }
}
