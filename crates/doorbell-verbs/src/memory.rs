//! Protection domains and memory regions.

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use crate::abi::*;
use crate::device::Context;
use crate::error::{Result, Step, VerbsError, errno};

/// A protection domain; a cheap handle.
#[derive(Clone, Debug)]
pub struct Pd(Arc<PdInner>);

#[derive(Debug)]
struct PdInner {
    raw: NonNull<RawPd>,
    context: Context,
}

// SAFETY: libibverbs lets any thread use a protection domain.
unsafe impl Send for PdInner {}
// SAFETY: as above.
unsafe impl Sync for PdInner {}

impl Drop for PdInner {
    fn drop(&mut self) {
        // SAFETY: everything made in it holds it, so it is empty.
        unsafe { (self.context.api().dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// What memory a region is made of.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Host memory at this address.
    Host(u64),
    /// GPU memory at this address, which a kernel module gives to the NIC (nvidia-peermem).
    Gpu(u64),
    /// GPU memory from this offset of a dma-buf.
    Dmabuf {
        /// The dma-buf.
        fd: BorrowedFd<'a>,
        /// Where the region begins in it.
        offset: u64,
    },
}

/// A memory region. Dropping it takes it from the NIC, which does not touch the memory any more when that returns.
#[derive(Debug)]
pub struct Mr {
    raw: NonNull<RawMr>,
    pd: Pd,
    base: u64,
}

// SAFETY: libibverbs lets any thread use a memory region.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Pd {
    /// A new one.
    ///
    /// # Errors
    /// [`VerbsError::Step`].
    pub fn new(context: &Context) -> Result<Self> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.api().alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| context.refused(Step::AllocPd, "", errno()))?;
        Ok(Self(Arc::new(PdInner {
            raw,
            context: context.clone(),
        })))
    }

    /// Its device.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn raw(&self) -> *mut RawPd {
        self.0.raw.as_ptr()
    }

    /// Registers memory that work requests name by addresses from `base` on. `rights` are [`access`] bits; the NIC needs the right to write
    /// locally wherever it lets others write, and gets it.
    ///
    /// A `base` whose place in its page is not that of the memory is not what devices are made for: the answer's
    /// [`Mr::base`] is then the memory's own address.
    ///
    /// # Errors
    /// [`VerbsError::Step`], [`VerbsError::Unsupported`].
    ///
    /// # Safety
    /// The memory is mapped, or the dma-buf's, as long as the region lives; who else accesses it is ordered with the NIC, or does not mind.
    pub unsafe fn register(
        &self,
        source: Source<'_>,
        len: usize,
        base: u64,
        rights: u32,
    ) -> Result<Mr> {
        let api = self.context().api();
        let rights = match rights & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) {
            0 => rights,
            _ => rights | access::LOCAL_WRITE,
        };
        let (raw, base, step) = match source {
            Source::Host(addr) | Source::Gpu(addr) => {
                let at = core::ptr::with_exposed_provenance_mut::<c_void>(addr as usize);
                let step = match source {
                    Source::Gpu(_) => Step::RegisterGpu,
                    _ => Step::RegisterHost,
                };
                // Devices translate by pages.
                let fits = (base ^ addr).is_multiple_of(4096);
                match api.reg_mr_iova2 {
                    Some(reg) if fits && base != addr => {
                        // SAFETY: the caller's promise.
                        let raw = unsafe { reg(self.raw(), at, len, base, rights) };
                        (raw, base, step)
                    }
                    _ => {
                        // SAFETY: the caller's promise.
                        let raw = unsafe { (api.reg_mr)(self.raw(), at, len, rights as c_int) };
                        (raw, addr, step)
                    }
                }
            }
            Source::Dmabuf { fd, offset } => {
                let Some(reg) = api.reg_dmabuf_mr else {
                    return Err(VerbsError::Unsupported {
                        device: self.context().name().to_owned(),
                        what:
                            "this libibverbs registers no dma-buf: rdma-core 34 or later is needed"
                                .to_owned(),
                    });
                };
                let (fd, rights) = (fd.as_raw_fd(), rights as c_int);
                // SAFETY: the caller's promise.
                let raw = unsafe { reg(self.raw(), offset, len, base, fd, rights) };
                (raw, base, Step::RegisterDmabuf)
            }
        };
        let raw = NonNull::new(raw).ok_or_else(|| {
            self.context()
                .refused(step, &format!("{len} bytes"), errno())
        })?;
        Ok(Mr {
            raw,
            pd: self.clone(),
            base,
        })
    }
}

impl Mr {
    /// The key for local use.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is registered; its keys do not change.
        unsafe { self.raw.as_ref() }.lkey
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// The address by which work requests name the first byte.
    pub fn base(&self) -> u64 {
        self.base
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let context = self.pd.context();
        // SAFETY: the region is registered, and nobody uses the handle any more.
        let rc = unsafe { (context.api().dereg_mr)(self.raw.as_ptr()) };
        context.taken_down("deregistering memory", rc);
    }
}
