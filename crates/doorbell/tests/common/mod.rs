//! What the integration tests share: a device on the host GPU, memory, a queue pair, and parameters of kernels.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file includes this and uses a part of it"
)]

pub mod scenes;

use std::time::Duration;

use doorbell::{
    Access, Device, Dims, Endpoint, Export, GpuSelect, Launch, LinkKind, Memory, Mr, Pd, Peer,
    Place, Qp, Ready, RemoteMr, Reset, params,
};

pub const LONG: Duration = Duration::from_secs(30);

pub fn device() -> Device {
    Device::builder()
        .gpu(GpuSelect::Host)
        .hca_cores(1)
        .open()
        .expect("a device on the host GPU")
}

pub fn caller_driven() -> Device {
    Device::builder()
        .gpu(GpuSelect::Host)
        .caller_driven()
        .open()
        .expect("a caller-driven device")
}

/// A protection domain with a source and a target region of `len` bytes each.
pub struct Bench {
    pub device: Device,
    pub pd: Pd,
    pub source: Mr,
    pub target: Mr,
    pub status: Memory,
}

impl Bench {
    pub fn new(device: Device, place: Place, len: usize) -> Self {
        let pd = device.pd().expect("a protection domain");
        let mr = || {
            pd.register(&device.alloc(place, len).expect("memory"), Access::ALL)
                .expect("a region")
        };
        let (source, target) = (mr(), mr());
        let status = device.alloc(Place::Host, 32 * 1024).expect("memory");
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 256) as u8).collect();
        source.write(0, &bytes).expect("in range");
        Self {
            device,
            pd,
            source,
            target,
            status,
        }
    }

    pub fn qp(&self) -> Qp<Ready> {
        self.pd
            .qp()
            .depth(64)
            .build()
            .expect("a queue pair")
            .connect_to_self()
            .expect("connected")
    }

    /// `put_bw` and its like: one thread, one message of `size` bytes from the start of the source to that of the target.
    pub fn rate(&self, export: &Export, size: u64) -> params::Rate {
        params::Rate {
            qps: export.table_addr(),
            qp_count: export.len() as u32,
            size,
            local: params::Area {
                addr: self.source.addr(),
                key: self.source.key(),
                ..Default::default()
            },
            remote: params::Area {
                addr: self.target.addr(),
                key: self.target.key(),
                ..Default::default()
            },
            status: self.status.device_addr(),
            ..one()
        }
    }

    pub fn launch<P: params::Params>(&self, kernel: &str, dims: Dims, params: &P) -> Launch {
        // SAFETY: the tests give each kernel its own parameters, and keep what those name until the launch has ended (the
        // tests of abandoned kernels rely on the device for that).
        unsafe { self.device.launch(kernel, dims, params) }.expect("launched")
    }

    /// Launches, waits, and returns the status of thread `thread`.
    pub fn run<P: params::Params>(
        &self,
        kernel: &str,
        dims: Dims,
        params: &P,
    ) -> Vec<params::Status> {
        self.launch(kernel, dims, params)
            .wait(LONG)
            .expect("the kernel ends");
        (0..dims.total() as usize)
            .map(|t| status(&self.status, t))
            .collect()
    }
}

/// Swaps endpoints with the process at the other end and connects a queue pair to its: both are connected then.
pub fn meet(qp: Qp<Reset>, peer: &Peer, regions: &[RemoteMr]) -> (Qp<Ready>, Endpoint) {
    let mine = qp.endpoint(LinkKind::Shm, regions).expect("an endpoint");
    let theirs = peer
        .exchange_endpoints(&[mine], LONG)
        .expect("endpoints")
        .remove(0);
    let to = peer.destination(&theirs).expect("a way");
    let qp = qp.connect(&to).expect("connected");
    peer.barrier(LONG).expect("both are connected");
    (qp, theirs)
}

pub fn status(memory: &Memory, thread: usize) -> params::Status {
    let word = |i: usize| memory.load(thread * 32 + i * 8).expect("in range");
    params::Status {
        error: word(0),
        posted: word(1),
        completed: word(2),
        ns: word(3),
    }
}

/// One message by one thread that has its queue pair for itself; time enough for a busy machine.
pub fn one() -> params::Rate {
    params::Rate {
        size: 8,
        deadline_ns: 20_000_000_000,
        ..params::Rate::one_message()
    }
}

pub fn read(mr: &Mr, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mr.read(offset, &mut bytes).expect("in range");
    bytes
}
