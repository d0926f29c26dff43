//! One error type for the crate.
//!
//! Every variant names the object, the value and what to do about it, because these texts reach people who run a
//! command on a cluster and have no debugger at hand.

use std::time::Duration;

/// What went wrong where kernels run and memory lives.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The text of a GPU selection is none of `auto`, `host`, `cuda`, `cuda:N`.
    #[error("GPU selection `{0}` is not understood: use auto, host, cuda or cuda:N")]
    BadSelection(String),

    /// A variable of the environment has a value that is none of those known.
    #[error("{name}={value} is not understood: give {known}, or unset it")]
    BadSetting {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What may be given, in words that follow "give".
        known: &'static str,
    },

    /// The CUDA driver library could not be loaded.
    #[error(
        "cannot load the CUDA driver library {path}: {detail}; install the NVIDIA driver, or select the host GPU (host)"
    )]
    NoDriver {
        /// The file asked of the dynamic loader.
        path: String,
        /// The loader's words.
        detail: String,
    },

    /// The CUDA driver library lacks a function that this crate cannot do without.
    #[error(
        "the CUDA driver library {path} has no function {symbol}: CUDA driver 12.2 (535) or newer is needed"
    )]
    MissingSymbol {
        /// The library.
        path: String,
        /// The exported name that was looked up.
        symbol: &'static str,
    },

    /// A CUDA device ordinal that does not exist in this process.
    #[error(
        "CUDA device {ordinal} does not exist: this process sees {count} (CUDA_VISIBLE_DEVICES decides which and in what order)"
    )]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// How many devices there are.
        count: u32,
    },

    /// A driver call failed.
    #[error("{call} failed for {object}: {name} ({code}): {message}{}", hint(*.code))]
    Driver {
        /// The driver function.
        call: &'static str,
        /// What it was called for.
        object: String,
        /// `CUresult`.
        code: i32,
        /// The symbolic name of the code.
        name: String,
        /// The driver's sentence for the code.
        message: String,
    },

    /// The process was forked after the GPU was opened; CUDA contexts and host GPU threads do not survive that.
    #[error(
        "this GPU was opened before a fork and is used in the child: open the GPU after the fork, or start the child with exec (in Python: the spawn or forkserver start method)"
    )]
    Forked,

    /// The device cannot do what was asked.
    #[error("{what} is not possible on {device}: {remedy}")]
    Unsupported {
        /// The thing asked for.
        what: &'static str,
        /// The device or back end.
        device: String,
        /// What to do instead.
        remedy: &'static str,
    },

    /// The PTX module was refused by the driver's assembler.
    #[error("the driver refused the embedded PTX: {name} ({code}); its log: {log}")]
    Module {
        /// `CUresult`.
        code: i32,
        /// Its symbolic name.
        name: String,
        /// The assembler's error log.
        log: String,
    },

    /// No kernel of that name.
    #[error("there is no kernel `{name}` for the {backend} GPU; there are: {known}")]
    UnknownKernel {
        /// The name asked for.
        name: String,
        /// `host` or `cuda`.
        backend: &'static str,
        /// The names that exist.
        known: String,
    },

    /// A launch shape that the device cannot take.
    #[error(
        "kernel `{kernel}` cannot be launched as {blocks} x {threads}: at most {max_blocks} blocks of {max_threads} threads, and at least one of each"
    )]
    BadDims {
        /// The kernel.
        kernel: String,
        /// Blocks asked for.
        blocks: u32,
        /// Threads a block asked for.
        threads: u32,
        /// The most blocks.
        max_blocks: u32,
        /// The most threads a block.
        max_threads: u32,
    },

    /// The parameter structure does not fit.
    #[error(
        "the parameters of kernel `{kernel}` are {len} bytes: at most {max} are carried; put the rest in a buffer"
    )]
    ParamsTooLarge {
        /// The kernel.
        kernel: String,
        /// Bytes given.
        len: usize,
        /// Bytes that fit.
        max: usize,
    },

    /// The host GPU was asked for more threads than it runs.
    #[error(
        "kernel `{kernel}` needs {asked} operating system threads on the host GPU, which runs at most {limit}: use fewer blocks or threads, or a CUDA GPU"
    )]
    TooManyThreads {
        /// The kernel.
        kernel: String,
        /// Blocks times threads.
        asked: u64,
        /// [`crate::MAX_HOST_THREADS`].
        limit: u32,
    },

    /// The operating system refused a thread of a host kernel. Nothing of the kernel ran.
    #[error(
        "kernel `{kernel}`: the operating system refused thread {started} of {asked}: {source}; use fewer blocks or threads, or raise the process limit (ulimit -u, pids.max of the cgroup)"
    )]
    Spawn {
        /// The kernel.
        kernel: String,
        /// Threads started before the refusal.
        started: u32,
        /// Threads needed.
        asked: u32,
        /// The system's answer.
        source: std::io::Error,
    },

    /// A kernel of one GPU was given to another.
    #[error("kernel `{kernel}` was looked up on another GPU: look it up on the one that runs it")]
    WrongGpu {
        /// The kernel.
        kernel: String,
    },

    /// Too many kernels of ours in flight on one CUDA GPU.
    #[error(
        "{limit} kernels are in flight on this GPU, which is the most (more streams would share channels with the copy engine's): wait for one, or drop it"
    )]
    TooManyLaunches {
        /// The limit.
        limit: usize,
    },

    /// A thread of a host kernel panicked; the other threads were told to stop.
    #[error("kernel `{kernel}` panicked in block {block}, thread {thread}: {message}")]
    KernelPanicked {
        /// The kernel.
        kernel: String,
        /// Block of the first thread that panicked.
        block: u32,
        /// Its index in the block.
        thread: u32,
        /// The panic's text.
        message: String,
    },

    /// The launch was aborted by its owner and has ended.
    #[error("kernel `{kernel}` was aborted by its owner")]
    Aborted {
        /// The kernel.
        kernel: String,
    },

    /// A wait reached its deadline; what was waited for still goes on.
    #[error("{what} was not done after {after:?}: {remedy}")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
        /// The likely cause and what to do.
        remedy: &'static str,
    },

    /// An access outside a buffer.
    #[error("bytes {offset}..{offset}+{len} are outside the buffer of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: usize,
        /// Bytes asked for.
        len: usize,
        /// Bytes there are.
        size: usize,
    },

    /// A length of zero, or one that the system cannot hold.
    #[error("a buffer of {len} bytes cannot be made: {reason}")]
    BadLength {
        /// Bytes asked for.
        len: usize,
        /// Why not.
        reason: &'static str,
    },

    /// The operating system refused host memory.
    #[error(
        "cannot map {len} bytes of host memory: {source}; lower the size or raise the memory limit"
    )]
    HostMemory {
        /// Bytes asked for.
        len: usize,
        /// The system's answer.
        source: std::io::Error,
    },

    /// A copy from a GPU to itself was given to the copy engine.
    #[error(
        "copy of {len} bytes from {src:#x} to {dst:#x} stays on one GPU: the driver runs it on a multiprocessor, and behind a kernel that fills the GPU it never ends; submit it via host memory (submit_via_host)"
    )]
    SameGpuCopy {
        /// Source address.
        src: u64,
        /// Destination address.
        dst: u64,
        /// Bytes.
        len: u64,
    },

    /// A copy names memory that CUDA does not know, or runs past the end of the memory it starts in.
    #[error(
        "address {addr:#x} (+{len} bytes) is not inside one allocation known to CUDA: register host memory first (register_host), and check that device memory was not freed"
    )]
    UnknownMemory {
        /// First byte.
        addr: u64,
        /// Bytes.
        len: u64,
    },

    /// A ticket that no submission returned.
    #[error("copy batch {ticket} was never submitted: the newest is {newest}")]
    UnknownTicket {
        /// The ticket asked about.
        ticket: u64,
        /// The newest ticket there is.
        newest: u64,
    },

    /// A copy was submitted long ago and has not ended.
    #[error("copy batch {ticket} has not ended after {age:?}: likely cause: {cause}")]
    CopyStalled {
        /// The ticket.
        ticket: u64,
        /// Since submission.
        age: Duration,
        /// The likely cause.
        cause: String,
    },
}

/// A remedy for driver codes whose own text does not say what to do.
fn hint(code: i32) -> &'static str {
    match code {
        2 => "; free memory or ask for less",
        46 => {
            "; the device is in exclusive or prohibited compute mode, see nvidia-smi -q -d COMPUTE"
        }
        100 => "; no device is visible, see CUDA_VISIBLE_DEVICES and nvidia-smi",
        209 | 218 | 222 => "; the driver is older than the PTX needs (CUDA 12.2, driver 535)",
        700 | 702 | 715 | 716 | 717 | 718 | 719 => {
            "; a kernel faulted and the context is lost for the whole process: find the kernel with compute-sanitizer"
        }
        712 => "; the memory is registered already, by this or another library",
        802 | 803 => {
            "; the driver is not ready or does not match its library, see nvidia-smi and dmesg"
        }
        900..=907 => {
            "; a stream capture of another library is in the way: do this outside the capture"
        }
        _ => "",
    }
}

/// Shorthand for this crate.
pub type Result<T, E = GpuError> = std::result::Result<T, E>;
