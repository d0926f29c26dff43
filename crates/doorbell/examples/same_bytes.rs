//! Do two posters write the same work requests? `same_bytes MODULE` makes the same calls with Doorbell's kernels and with those of
//! MODULE (a cubin or PTX with kernels of the same names, such as `bench/gpu/nvidia_poster.cu`), and compares the rings.
//!
//! Each call goes to two queue pairs that nobody executes meanwhile. Every byte of every slot must be equal, but for what the
//! format leaves open: bytes 8 to 10 and the immediate of the control segment and the last 4 bytes of the remote-address segment, which
//! executors ignore and which DOCA's code leaves uninitialised; and the queue pair's number, which must be each one's own.
//!
//! Exit status 0: equal. 1: not equal, or something failed. 77: skipped, with the reason, where there is no module or no GPU.

#![allow(clippy::print_stdout, reason = "a command that prints its findings")]

use std::process::ExitCode;
use std::time::Duration;

use doorbell::device_api::layout::{GpuQp, QpExt};
use doorbell::kernels::params::{Area, Params, Rate, flags, op, sharing};
use doorbell::{
    Access, CqKind, Device, Dims, Export, Gpu, GpuError, GpuSelect, Handler, Mr, Place,
};
use doorbell_gpu::{CopyOp, Kernel, LaunchOpts};

type Failure = Box<dyn std::error::Error>;

const LONG: Duration = Duration::from_secs(20);
const SLOT: usize = 64;
const DEPTH: usize = 64;
/// Messages a call, so that indexes and addresses differ.
const MESSAGES: u64 = 3;
/// Longest WQE sequence that is compared.
const GIB: u64 = 1 << 30;

/// A call: its name, the kernel that makes it, its operation, bytes a message.
const CALLS: &[(&str, &str, u32, u64)] = &[
    ("put, 8 bytes", "put_bw", op::PUT, 8),
    ("put, 1 MiB less 1", "put_bw", op::PUT, (1 << 20) - 1),
    ("put, nothing", "put_bw", op::PUT, 0),
    (
        "put, 2.5 GiB in three",
        "put_bw",
        op::PUT,
        2 * GIB + GIB / 2,
    ),
    ("put_value", "put_bw", op::PUT_VALUE, 8),
    ("get, 4 KiB", "get_bw", op::GET, 4096),
    ("signal_add / fetch_add", "atomic_rate", op::FETCH_ADD, 8),
    ("put_signal, 8 bytes", "put_bw", op::PUT_SIGNAL, 8),
];

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        println!(
            "SKIP: no module was given (a cubin of bench/gpu/nvidia_poster.cu, which needs NVIDIA's headers)"
        );
        return ExitCode::from(77);
    };
    let device = Device::builder()
        .gpu(GpuSelect::Cuda(None))
        .caller_driven()
        .open();
    let device = match device {
        Ok(device) => device,
        Err(doorbell::Error::Gpu(
            e @ (GpuError::NoDriver { .. } | GpuError::NoSuchDevice { .. }),
        )) => {
            println!("SKIP: no CUDA GPU: {e}");
            return ExitCode::from(77);
        }
        Err(e) => {
            println!("FAIL: opening the device: {e}");
            return ExitCode::FAILURE;
        }
    };
    match run(&device, &path) {
        Ok(0) => {
            println!("PASS: all calls of both posters write the same bytes");
            ExitCode::SUCCESS
        }
        Ok(failed) => {
            println!("FAIL: {failed} calls differ");
            ExitCode::FAILURE
        }
        Err(e) => {
            println!("FAIL: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(device: &Device, path: &str) -> Result<u32, Failure> {
    let image = std::fs::read(path).map_err(|e| format!("reading {path}: {e}"))?;
    let gpu = device.gpu();
    let image = gpu.load(&image)?;
    let pd = device.pd()?;
    let mr = pd.register(&device.alloc(Place::Host, 1 << 16)?, Access::ALL)?;
    let mut failed = 0;
    for handler in [Handler::Record, Handler::Only, Handler::Producer] {
        for (mode, share) in [
            ("exclusive", sharing::EXCLUSIVE),
            ("block", sharing::BLOCK),
            ("gpu", sharing::GPU),
        ] {
            for &(name, kernel, op, size) in CALLS {
                let call = Call {
                    handler,
                    sharing: share,
                    op,
                    size,
                };
                let ours = posted(device, &mr, &gpu.kernel(kernel)?, &call, None)
                    .map_err(|e| format!("{name}, {mode}, ours: {e}"))?;
                let theirs = posted(device, &mr, &image.kernel(kernel)?, &call, Some(ours.sink))
                    .map_err(|e| format!("{name}, {mode}, theirs: {e}"))?;
                match ours.differs(&theirs) {
                    None => println!("PASS {handler} {mode} {name}: {} slots", ours.slots),
                    Some(why) => {
                        failed += 1;
                        println!("FAIL {handler} {mode} {name}: {why}");
                    }
                }
            }
        }
    }
    Ok(failed)
}

/// How a call is made.
struct Call {
    handler: Handler,
    sharing: u32,
    op: u32,
    size: u64,
}

/// What a call left in the ring.
struct Posted {
    /// Address and key of the sink that results of signals went to.
    sink: (u64, u32),
    qpn: u32,
    slots: usize,
    ring: Vec<[u8; SLOT]>,
}

impl Posted {
    /// The first difference that matters.
    fn differs(&self, other: &Self) -> Option<String> {
        if self.slots != other.slots || self.slots == 0 {
            return Some(format!("{} slots and {} slots", self.slots, other.slots));
        }
        let pairs = self.ring.iter().zip(&other.ring).take(self.slots);
        for (index, (a, b)) in pairs.enumerate() {
            let (a, b) = match (plain(a, self.qpn), plain(b, other.qpn)) {
                (Ok(a), Ok(b)) => (a, b),
                (Err(e), _) => return Some(format!("slot {index}, ours: {e}")),
                (_, Err(e)) => return Some(format!("slot {index}, theirs: {e}")),
            };
            if a != b {
                return Some(format!(
                    "slot {index}:\n  ours   {}\n  theirs {}",
                    hex(&a),
                    hex(&b)
                ));
            }
        }
        None
    }
}

fn hex(bytes: &[u8]) -> String {
    let words: Vec<String> = bytes
        .chunks(4)
        .map(|w| w.iter().map(|b| format!("{b:02x}")).collect())
        .collect();
    words.join(" ")
}

/// A slot as far as its WQE goes, without what the format leaves open, and with the queue pair's number taken out.
fn plain(slot: &[u8; SLOT], qpn: u32) -> Result<Vec<u8>, String> {
    let word = |at: usize| u32::from_be_bytes([slot[at], slot[at + 1], slot[at + 2], slot[at + 3]]);
    let (opcode, owner) = (slot[3], word(4) >> 8);
    if owner != qpn {
        return Err(format!("names QP {owner:#x}, not {qpn:#x}"));
    }
    let units = word(4) as usize & 0x3f;
    if !(1..=4).contains(&units) {
        return Err(format!("{units} units of 16 bytes"));
    }
    let mut bytes = slot[..units * 16].to_vec();
    bytes[4..7].fill(0);
    bytes[8..11].fill(0);
    bytes[12..16].fill(0);
    // RDMA_WRITE, RDMA_READ and fetch-and-add have a remote-address segment.
    if matches!(opcode, 0x08 | 0x10 | 0x12) {
        bytes[28..32].fill(0);
    }
    // An inline value of 8 bytes ends 4 bytes before its unit does.
    if opcode == 0x08 && word(32) == 0x8000_0008 {
        bytes.truncate(44);
    }
    Ok(bytes)
}

/// Makes the call on a fresh queue pair and returns what is in its ring. Signals put what they return into `sink`, which foreign
/// posters are told; ours knows the queue pair's own, so it comes first.
fn posted(
    device: &Device,
    mr: &Mr,
    kernel: &Kernel,
    call: &Call,
    sink: Option<(u64, u32)>,
) -> Result<Posted, Failure> {
    let qp = mr
        .pd()
        .qp()
        .depth(DEPTH as u32)
        .handler(call.handler)
        .cq(CqKind::PerSlot)
        .build()?
        .connect_to_self()?;
    let export = qp.export()?;
    let bytes = structures(device, &export)?;
    let sink = sink.unwrap_or((bytes.sink_addr, bytes.sink_key));
    // The foreign kernel takes one local place for both, so the put's source is the sink too.
    let local = if call.op == op::PUT_SIGNAL {
        Area {
            addr: sink.0,
            key: sink.1,
            ..Area::default()
        }
    } else {
        Area {
            addr: mr.addr(),
            key: mr.key(),
            mask: 1,
            ..Area::default()
        }
    };
    let status = device.alloc(Place::Host, 32)?;
    let rate = Rate {
        qps: export.table_addr(),
        sharing: call.sharing,
        op: call.op,
        flags: flags::NO_SPACE_CHECK | flags::NO_WAIT,
        size: call.size,
        iters: MESSAGES,
        local,
        remote: Area {
            addr: mr.addr() + 1024,
            key: mr.key(),
            mask: 3,
            ..Area::default()
        },
        signal: mr.addr() + 32_768,
        signal_key: mr.key(),
        status: status.device_addr(),
        ..Rate::one_message()
    };
    // Through the GPU's own launch: the device's waits would run the engine, which must not touch the ring now.
    let gpu: &Gpu = device.gpu();
    // SAFETY: the parameters are those of these kernels; all that they name outlives the launch, which is waited for.
    let mut launch = unsafe {
        gpu.launch(
            kernel,
            Dims::new(1, 1),
            rate.as_bytes(),
            LaunchOpts::default(),
        )?
    };
    launch.wait(LONG)?;
    let (error, count) = (status.load(0)?, status.load(8)?);
    if error != 0 || count != MESSAGES {
        return Err(format!("the kernel ended with {error} after {count} messages").into());
    }
    let slots = usize::try_from(export.progress(0)?.ready)?;
    if slots > DEPTH {
        return Err(format!("{slots} slots in a ring of {DEPTH}").into());
    }
    let base = std::ptr::with_exposed_provenance::<[u8; SLOT]>(usize::try_from(bytes.ring)?);
    // SAFETY: the ring is pinned host memory, which has one address for both sides; it lives as long as `qp`, the kernel has
    // ended, and nobody drives the engine.
    let ring = (0..DEPTH)
        .map(|i| unsafe { base.add(i).read_volatile() })
        .collect();
    Ok(Posted {
        sink,
        qpn: qp.qpn(),
        slots,
        ring,
    })
}

/// What the exported structures say.
struct Structures {
    ring: u64,
    sink_addr: u64,
    sink_key: u32,
}

fn structures(device: &Device, export: &Export) -> Result<Structures, Failure> {
    let copier = device.gpu().copier().ok_or("no copy engine")?;
    let handle = export.handle();
    let to = device.alloc(Place::Host, 1024)?;
    let op = |dst: u64, src: usize, len: usize| CopyOp {
        dst: to.device_addr() + dst,
        src: src as u64,
        len: len as u64,
    };
    let ops = [
        op(0, handle.qp.addr(), size_of::<GpuQp>()),
        op(512, handle.ext.addr(), size_of::<QpExt>()),
    ];
    // SAFETY: the export and the buffer outlive the copies, which are waited for.
    let ticket = unsafe { copier.submit(&ops) }?;
    copier.wait(ticket, LONG)?;
    let ext = 512;
    Ok(Structures {
        ring: to.load(std::mem::offset_of!(GpuQp, sq_wqe_daddr))?,
        sink_addr: to.load(ext + std::mem::offset_of!(QpExt, sink_addr))?,
        sink_key: to.load(ext + std::mem::offset_of!(QpExt, sink_key))? as u32,
    })
}
