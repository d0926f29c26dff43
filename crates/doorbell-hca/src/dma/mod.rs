//! Payloads in GPU memory: what the HCA asks of a copy engine, and the pipeline that keeps work requests in order.
//!
//! [`Dma`] is the whole of what the HCA knows of a GPU: batches in, tickets out, nothing that blocks.
//! [`DmaCore`] belongs to one engine core: it turns jobs of many QPs into batches, completes them in order per QP,
//! and never lets one QP wait for another.

mod atomic;
mod channel;
mod issue;
mod job;
#[cfg(test)]
mod mock;
mod pipeline;
mod route;
mod staging;
mod state;
#[cfg(test)]
mod tests;
pub(crate) mod words;

pub use job::{DmaFailure, Event, Job, Piece, Pieces, Source, Word, Work};
pub(crate) use job::{old_bytes, put_old};
pub use pipeline::{DmaConfig, DmaCore, DmaCounters, WriteOrder};
pub(crate) use staging::LARGE;
pub use staging::Slot as Buffer;
pub use words::Words;

use std::{any::Any, fmt, os::fd::OwnedFd, ptr::NonNull, sync::Arc};

/// One copy. Host memory has its own address (unified addressing), device memory its device address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaOp {
    /// To.
    pub dst: u64,
    /// From.
    pub src: u64,
    /// Bytes.
    pub len: u64,
}

/// A copy engine: moves bytes that the CPU cannot touch. None of its methods may wait for a copy.
pub trait Dma: Send + Sync {
    /// Starts a batch. Returns a ticket.
    ///
    /// Its copies may run in any order, but for `steps`: indexes into `ops`, ascending, at each of which a step begins that runs only
    /// after all copies before it have ended ([`steps_of`] cuts a batch there). Only an engine that is [ordered](Dma::ordered) gets any.
    /// They are there so that many small copies that follow each other cost one batch, whose end is looked for once.
    ///
    /// # Errors
    /// Text for the user; the QPs concerned go to error.
    fn submit(&self, ops: &[DmaOp], steps: &[usize]) -> Result<u64, String>;

    /// Is the batch done, and are its bytes visible to CPU and GPU?
    ///
    /// # Errors
    /// Text for the user; the QPs concerned go to error.
    fn poll(&self, ticket: u64) -> Result<bool, String>;

    /// Does every batch begin only after all earlier ones have ended (as on one CUDA stream)? If so, a QP's work
    /// requests follow each other without the CPU waiting in between.
    fn ordered(&self) -> bool {
        false
    }

    /// Copies in one batch at most.
    fn max_batch(&self) -> usize {
        256
    }

    /// Batches under way at most. A quarter of them are for batches of any size; the rest are for full ones, which gain nothing by waiting
    /// for more. While another process has the GPU nothing ends for milliseconds, and whatever was not given to it by then waits a turn more.
    fn max_in_flight(&self) -> usize {
        16
    }

    /// Names the device. `None`: a device of its own. Of an engine that is [ordered](Dma::ordered) copies within one device are asked for
    /// as they are: one that cannot make them (CUDA's needs an SM, which a spinning kernel holds) goes by way of memory of its own. Those
    /// of others go through staging, in two copies.
    fn device(&self) -> Option<u64> {
        None
    }

    /// Can this engine copy straight between its device and that of `other`? Never asked for one and the same device.
    fn reaches_device(&self, _other: &dyn Dma) -> bool {
        false
    }

    /// Can this engine copy to and from this host memory without staging (is it pinned)?
    fn reaches_host(&self, _addr: u64, _len: u64) -> bool {
        true
    }

    /// Host memory for staging, page-locked where that matters. [`Dma::reaches_host`] is true of it.
    ///
    /// # Errors
    /// Text for the user.
    fn staging(&self, len: usize) -> Result<Staging, String> {
        Staging::heap(len)
    }

    /// A dma-buf of device memory, and where the memory begins in it: by which RDMA devices reach it. `None`: there is none.
    fn dmabuf(&self, _addr: u64, _len: usize) -> Option<(std::os::fd::OwnedFd, u64)> {
        None
    }

    /// Where the CPU can load and store device memory (a BAR mapped as GDRCopy does), if anywhere. Stores to it are
    /// posted, so every write is read back before it counts as done. The answer for the same memory is always the same.
    fn cpu_map(&self, _addr: u64, _len: u64) -> Option<NonNull<u8>> {
        None
    }

    /// Engines with the same identity are one: they share batches and staging. Nobody but wrappers needs to change it.
    fn identity(&self) -> usize {
        std::ptr::from_ref(self).cast::<()>().addr()
    }

    /// The locks for atomics on this memory, if another process owns it.
    fn words(&self) -> Option<Arc<Words>> {
        None
    }

    /// A handle by which a peer process can import the memory.
    ///
    /// # Errors
    /// Text for the user: the memory is then not reachable over the shared memory link.
    fn export(&self, _addr: u64, _len: u64) -> Result<DeviceHandle, String> {
        Err("this copy engine exports no memory".into())
    }
}

/// The steps of a batch, as [`Dma::submit`] gets it.
pub fn steps_of<'a>(ops: &'a [DmaOp], steps: &'a [usize]) -> impl Iterator<Item = &'a [DmaOp]> {
    let ends = steps.iter().copied().chain([ops.len()]);
    let mut start = 0;
    ends.map(move |end| {
        let step = &ops[start..end];
        start = end;
        step
    })
}

/// Opaque to the HCA: what [`Dma::export`] gives and the peer's importer takes.
#[derive(Clone, Debug, Default)]
pub struct DeviceHandle {
    /// At most 256 bytes, for example a CUDA IPC handle and an offset.
    pub bytes: Vec<u8>,
    /// A descriptor, if the handle needs one.
    pub fd: Option<Arc<OwnedFd>>,
}

/// Host memory that a copy engine reaches.
#[derive(Clone)]
pub struct Staging {
    /// First byte; its address is also the one for [`DmaOp`].
    pub ptr: NonNull<u8>,
    /// Bytes.
    pub len: usize,
    /// Dropped when the memory is no longer used.
    pub keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `ptr` is an address; `keep` owns the memory and is Send and Sync itself. Only the core that the staging was made
// for, and the copy engine on its behalf, access the bytes.
unsafe impl Send for Staging {}
// SAFETY: `&Staging` gives out only the address.
unsafe impl Sync for Staging {}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of staging at {:p}", self.len, self.ptr)
    }
}

impl Staging {
    /// Ordinary memory, for engines that need nothing else.
    ///
    /// # Errors
    /// When `len` is zero.
    pub fn heap(len: usize) -> Result<Self, String> {
        // Words, so that it is aligned for atomics; interior mutability, because the copy engine writes it too.
        let words: Arc<[std::sync::atomic::AtomicU64]> = (0..len.div_ceil(8))
            .map(|_| std::sync::atomic::AtomicU64::new(0))
            .collect();
        if words.is_empty() {
            return Err("staging of zero bytes".into());
        }
        let ptr = NonNull::new(words.as_ptr().cast_mut().cast::<u8>()).ok_or("address zero")?;
        Ok(Self {
            ptr,
            len,
            keep: Arc::new(words),
        })
    }
}
