//! The CPU as initiator: posting the way perftest does, with the device code's own posting functions.
//!
//! A [`CpuQp`] is a queue pair whose structures lie in host memory and that one CPU thread at a time uses. Posting from
//! safe code is sound: work requests name memory by keys, the HCA checks those, and registered memory is never seen through
//! Rust references.
//!
//! ```
//! # use std::time::Duration;
//! # use doorbell::{Access, CpuQp, Device, GpuSelect, Place, cpu};
//! # let device = Device::builder().gpu(GpuSelect::Host).open()?;
//! # let pd = device.pd()?;
//! let mr = pd.register(&device.alloc(Place::Host, 4096)?, Access::ALL)?;
//! mr.write(0, b"hello")?;
//! let qp = pd.qp().build()?.connect_to_self()?;
//! let mut cpu = CpuQp::new(&qp)?;
//! let queue = cpu.queue()?;
//! let by = cpu::deadline(Duration::from_secs(5));
//! let ticket = queue.put(cpu::remote(&mr.remote(), 2048), cpu::local(&mr, 0, 5), cpu::Post::by(by))?;
//! queue.wait(ticket, by)?;
//! let mut bytes = [0; 5];
//! mr.read(2048, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With a receive queue it takes messages too. A receive is posted with its memory; the message that takes it is found by its
//! ticket:
//!
//! ```
//! # use std::time::Duration;
//! # use doorbell::{Access, CpuQp, Device, GpuSelect, Place, cpu};
//! # let device = Device::builder().gpu(GpuSelect::Host).open()?;
//! # let pd = device.pd()?;
//! # let mr = pd.register(&device.alloc(Place::Host, 4096)?, Access::ALL)?;
//! mr.write(0, b"a message")?;
//! let qp = pd.qp().receive_queue(16).build()?.connect_to_self()?;
//! let mut cpu = CpuQp::new(&qp)?;
//! let (queue, recv) = cpu.queues()?;
//! let by = cpu::deadline(Duration::from_secs(5));
//! let ticket = recv.recv_post(cpu::local(&mr, 1024, 64), by)?;
//! queue.send_imm(cpu::local(&mr, 0, 9), 42, cpu::Post::by(by))?;
//! let message = recv.recv_wait(ticket, by)?;
//! assert_eq!((message.bytes, message.imm), (9, 42));
//! # let mut bytes = [0; 9];
//! # mr.read(1024, &mut bytes)?;
//! # assert_eq!(&bytes, b"a message");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use doorbell_device::host::{Hooks, HostGrid, HostThread, clock_ns};
use doorbell_device::scope::{Thread, sharing};
use doorbell_wire::Key;

pub use doorbell_device::{Arrival, Deadline, Local, Post, Received, Ticket};
pub use doorbell_wire::Remote;

use crate::mr::{Mr, RemoteMr};
use crate::qp::{Export, QpCore};
use crate::{Error, Result};

/// A queue as one CPU thread posts to it: `doorbell-device`'s own queue pair.
pub type CpuQueue<'a> = doorbell_device::Qp<'a, &'a HostThread<1>, Thread, sharing::Exclusive>;

/// Its receive queue, likewise.
pub type CpuRecvQueue<'a> =
    doorbell_device::RecvQueue<'a, &'a HostThread<1>, Thread, sharing::Exclusive>;

/// A queue pair that the CPU posts to.
pub struct CpuQp {
    export: Export,
    thread: HostThread<1>,
}

impl CpuQp {
    /// Exports `qp` into host memory and takes it for one CPU thread at a time.
    pub fn new(qp: &QpCore) -> Result<Self> {
        let device = &qp.pd().inner.device;
        let relax = device.provider.relax_hook();
        let id = device.provider.id();
        let told = Mutex::new(None);
        // Who polls with short deadlines, again and again, is told once a second.
        let gave_up = move || {
            let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
            if told.is_none_or(|at: Instant| at.elapsed() >= Duration::from_secs(1)) {
                *told = Some(Instant::now());
                for line in crate::report::diagnosis(id) {
                    tracing::warn!("a wait gave up: {line}");
                }
            }
        };
        let grid = HostGrid::new(
            1,
            1,
            Hooks {
                relax,
                abort: Arc::default(),
                gave_up: Some(Arc::new(gave_up)),
            },
        );
        Ok(Self {
            export: qp.export_host()?,
            thread: grid.thread(0, 0),
        })
    }

    /// The queue. Its constants are read here, so take it once and post in a loop.
    pub fn queue(&mut self) -> Result<CpuQueue<'_>> {
        // SAFETY: the export keeps the structures and the queue memory valid for as long as `self`, and they lie in host
        // memory. `&mut self` allows one queue at a time, whose copies cannot leave their thread (`HostThread` is not `Sync`).
        unsafe { CpuQueue::new(&self.thread, self.export.handle()) }.map_err(|e| Error::Argument {
            object: "exported queue pair",
            value: e.to_string(),
            remedy: "export it with the same release",
        })
    }

    /// The queue and its receive queue, which the queue pair must have been made with.
    pub fn queues(&mut self) -> Result<(CpuQueue<'_>, CpuRecvQueue<'_>)> {
        let (thread, handle) = (&self.thread, self.export.handle());
        // SAFETY: as in `queue`; send and receive queue are used independently, one value each.
        let queue = unsafe { CpuQueue::new(thread, handle) }.map_err(|e| Error::Argument {
            object: "exported queue pair",
            value: e.to_string(),
            remedy: "export it with the same release",
        })?;
        // SAFETY: as above.
        let recv = unsafe { CpuRecvQueue::new(thread, handle) }.map_err(|_| Error::Argument {
            object: "exported queue pair",
            value: "no receive queue".to_owned(),
            remedy: "make it with `QpBuilder::receive_queue`",
        })?;
        Ok((queue, recv))
    }

    /// The export.
    pub fn export(&self) -> &Export {
        &self.export
    }
}

impl fmt::Debug for CpuQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuQp")
            .field("export", &self.export)
            .finish_non_exhaustive()
    }
}

/// A moment from now, on the clock of host kernels.
pub fn deadline(after: Duration) -> Deadline {
    Deadline(clock_ns().saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)))
}

/// The target of a work request: `offset` bytes into a peer's region.
pub fn remote(region: &RemoteMr, offset: u64) -> Remote {
    Remote {
        addr: region.addr.wrapping_add(offset),
        key: Key(region.key),
    }
}

/// The target of a work request: address `addr` of the region that the peer told us `key` of.
pub fn remote_at(key: u32, addr: u64) -> Remote {
    Remote {
        addr,
        key: Key(key),
    }
}

/// The local side of a work request: `len` bytes from `offset` of a region.
pub fn local(region: &Mr, offset: u64, len: u64) -> Local {
    Local {
        addr: region.addr().wrapping_add(offset),
        key: Key(region.key()),
        len,
    }
}
