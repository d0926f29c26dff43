//! Copies to and from GPU memory, by the copy engine or many small ones by a kernel, while kernels run.
//!
//! For an HCA whose payloads are in GPU memory: submit a batch, poll its ticket. Nothing here blocks.

use std::sync::Arc;
use std::time::Duration;

use crate::Result;
use crate::cuda::{CudaGpu, How};

/// One copy. Either side is GPU memory or host memory registered with CUDA; addresses are those that kernels use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOp {
    /// Destination.
    pub dst: u64,
    /// Source.
    pub src: u64,
    /// Bytes; zero is allowed and does nothing.
    pub len: u64,
}

/// What a [`Copier`] has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopierStats {
    /// Copies submitted.
    pub copies: u64,
    /// Bytes submitted.
    pub bytes: u64,
    /// Copies that went through host memory because both ends are on one GPU.
    pub via_host: u64,
    /// What went to the driver at once, with one event behind it: up to 256 copies of a ticket, in one or several steps.
    pub batches: u64,
    /// What went to a kernel, up to 256 copies of a ticket at once: launches, and `posted`.
    pub kernel_batches: u64,
    /// Copies that it made, or will.
    pub kernel_copies: u64,
    /// Those of `kernel_batches` that needed no launch, since a kernel was still there.
    pub posted: u64,
    /// Those of `kernel_batches` whose launch, or that before them, had not started in time, and whose copies the copy engine made.
    pub taken_back: u64,
}

/// The copy engine of a CUDA GPU, and a kernel for small copies. All clones share one order.
///
/// # What can make copies wait for a kernel
///
/// Copies run beside kernels except for hazards of the driver, seen on real devices: a copy within one GPU needs a
/// multiprocessor (refused, or sent [via host memory](Copier::submit_via_host)); with more than 8 streams in the process
/// (`CUDA_DEVICE_MAX_CONNECTIONS`) channels are shared, and a copy may be behind the kernel that waits for it (this crate uses
/// seven, or three where it has no kernels to launch); and freeing memory, or the first launch of a kernel under lazy loading, makes later copies wait until running
/// kernels end. None of them can be prevented in other people's code, so a copy that has not ended for
/// [10 seconds](Copier::set_stall_limit) (the HCA has a limit of its own: 2, and more for large ones) is reported by [`Copier::poll`], with its likely cause.
///
/// # What makes copies slow
///
/// Kernels that poll **one word of host memory** from many blocks: the GPU serves loads of one line of host memory one after
/// another, and the copy engine's own reads and flags wait in the same line. On an H200 (`examples/cuda_selfcheck`,
/// bench/results/2026-11-30-h200/tests.txt) a copy of 8 bytes took 6.6 us beside a kernel that fills the GPU and polls its own memory, 41 us beside 16
/// blocks that poll one host word, 136 us beside 64.
///
/// And small copies: those of 64 bytes in batches of 256 ended at 1.0 to 2.4 million a second there, the driver's own at 1.2 to 2.6. That is
/// what [`Copier::submit_in_steps`] has a kernel for: 256 of 8 bytes took 18 to 20 us, at 24 to 26 million a second with four tickets under way
/// (small-copies-rates, bench/results/2026-11-30-h200-copies/selfcheck.txt). It is not used while kernels leave it no room, and `DOORBELL_GPU_COPIES=engine` turns it off.
/// It [stays a moment](Copier::set_stay), so that copies which follow each other closely, single ones too, need no launch of their own.
#[derive(Clone)]
pub struct Copier {
    pub(crate) gpu: Arc<CudaGpu>,
}

impl Copier {
    /// Submits copies to the copy engine and returns their ticket, from 1 up. Copies of one call run in any order; calls run one after another.
    /// An error means that nothing of the call was submitted.
    ///
    /// # Safety
    /// Every range stays allocated (and registered) until the ticket has ended; one that was reported as stalled may still
    /// run. Whatever else touches those bytes meanwhile does so by atomics or in agreement.
    pub unsafe fn submit(&self, ops: &[CopyOp]) -> Result<u64> {
        // SAFETY: passed on.
        unsafe { self.gpu.copier().submit(ops, &[], How::Engine) }
    }

    /// As [`Copier::submit`]; copies within one GPU go through pinned host memory, twice over PCIe, instead of being refused.
    ///
    /// # Safety
    /// As for [`Copier::submit`].
    pub unsafe fn submit_via_host(&self, ops: &[CopyOp]) -> Result<u64> {
        // SAFETY: passed on.
        unsafe { self.gpu.copier().submit(ops, &[], How::ViaHost) }
    }

    /// Submits copies to be made as is quickest: many small ones by a kernel, all others as
    /// [`Copier::submit_via_host`] has it. And in steps: `steps` are indexes into `ops`, ascending, at each of which a step begins that runs after all
    /// copies before it. Many small copies that follow each other are one ticket and one event so, instead of one each.
    ///
    /// # Safety
    /// As for [`Copier::submit`].
    pub unsafe fn submit_in_steps(&self, ops: &[CopyOp], steps: &[usize]) -> Result<u64> {
        // SAFETY: passed on.
        unsafe { self.gpu.copier().submit(ops, steps, How::Any) }
    }

    /// Has the ticket ended? Then its bytes are visible to kernels and to the CPU. Errors: the driver refused the copy (told
    /// once), the context is lost, or the oldest batch has stalled (the ticket stays pending).
    pub fn poll(&self, ticket: u64) -> Result<bool> {
        self.gpu.copier().poll(ticket)
    }

    /// Waits for a ticket.
    pub fn wait(&self, ticket: u64, timeout: Duration) -> Result<()> {
        self.gpu.copier().wait(ticket, timeout)
    }

    /// The oldest ticket that has not ended, and how long ago it was submitted.
    pub fn oldest(&self) -> Option<(u64, Duration)> {
        self.gpu.copier().oldest()
    }

    /// After how long [`Copier::poll`] reports a copy as stalled.
    pub fn set_stall_limit(&self, limit: Duration) {
        self.gpu.copier().set_stall_limit(limit);
    }

    /// How long the kernel for small copies stays after it has made some, for more: 50 us, or what `DOORBELL_GPU_COPIES_STAY` said when the GPU was opened. Longer than about 4 seconds is that.
    /// From the next launch on. While it stays, whoever waits for all kernels of the GPU to end (`cudaDeviceSynchronize`, `cudaFree`) waits for it too.
    pub fn set_stay(&self, stay: Duration) {
        self.gpu.copier().set_stay(stay);
    }

    /// Forgets what memory addresses are in. To be called when foreign memory that was copied (PyTorch's, say) is freed;
    /// buffers of this crate do it themselves.
    pub fn forget_memory(&self) {
        self.gpu.copier().forget_memory();
    }

    /// Does the driver take batches (CUDA 12.8)? If not, each copy is a call.
    pub fn batched(&self) -> bool {
        self.gpu.copier().batched()
    }

    /// What it has done so far.
    pub fn stats(&self) -> CopierStats {
        self.gpu.copier().stats()
    }
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copier")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
