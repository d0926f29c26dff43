//! Which way the bytes of a piece go: straight, through a staging buffer, or by the CPU.

use std::{ptr::NonNull, sync::Arc};

use super::{Dma, job::Source};
use crate::{mem::Place, raw::Shared};

/// Up to so many bytes the CPU copies through a mapping of device memory, where there is one: faster than any copy engine.
const CPU_MAP_MAX: u64 = 4096;

/// The way of one piece. Channels are named by their engines.
pub(super) enum Route<'a> {
    /// The CPU does it, in the order of the QP.
    Cpu { src: CpuSrc<'a>, dst: CpuDst },
    /// One copy.
    Straight {
        dma: &'a Arc<dyn Dma>,
        src: u64,
        dst: u64,
    },
    /// The CPU fills a buffer now, the engine copies from it.
    Fill {
        dma: &'a Arc<dyn Dma>,
        src: CpuSrc<'a>,
        dst: u64,
    },
    /// Device to buffer, and when that has ended, by another engine (or one without order) to its device.
    Cross {
        from: &'a Arc<dyn Dma>,
        src: u64,
        to: &'a Arc<dyn Dma>,
        dst: u64,
    },
    /// Device to buffer, and when that has ended, by the CPU to host memory.
    Land {
        dma: &'a Arc<dyn Dma>,
        src: u64,
        dst: Shared<u8>,
    },
}

/// Bytes that the CPU reads.
#[derive(Clone, Copy)]
pub(super) enum CpuSrc<'a> {
    Host(Shared<u8>),
    Inline(&'a [u8]),
}

impl CpuSrc<'_> {
    /// Copies `len` bytes from `offset` on.
    ///
    /// # Safety
    /// The source has them; `to` is valid for writing them.
    pub(super) unsafe fn copy(self, offset: u64, to: *mut u8, len: u64) {
        // SAFETY: the caller's promise, for either source.
        unsafe {
            match self {
                Self::Host(ptr) => {
                    crate::copy::copy(to, ptr.as_ptr().add(offset as usize), len as usize);
                }
                Self::Inline(bytes) => {
                    crate::copy::write(to, &bytes[offset as usize..(offset + len) as usize]);
                }
            }
        }
    }
}

/// Memory that the CPU writes.
#[derive(Clone, Copy)]
pub(super) enum CpuDst {
    Host(Shared<u8>),
    /// A mapping of device memory: writes are posted, and read back before they count.
    Mapped(NonNull<u8>),
}

impl CpuDst {
    pub(super) fn ptr(self) -> *mut u8 {
        match self {
            Self::Host(ptr) => ptr.as_ptr(),
            Self::Mapped(ptr) => ptr.as_ptr(),
        }
    }

    /// Makes sure that `len` bytes have arrived.
    ///
    /// # Safety
    /// The destination is mapped for `len` bytes.
    pub(super) unsafe fn settle(self, len: u64) {
        if let (Self::Mapped(ptr), Some(last)) = (self, len.checked_sub(1)) {
            // Write-combining stores are ordered before the read by a full fence; the read then pushes them out of the bridge.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            // SAFETY: the caller's promise.
            unsafe { ptr.as_ptr().add(last as usize).read_volatile() };
        }
    }
}

/// Are the two engines' devices one and the same?
pub(super) fn same_device(a: &Arc<dyn Dma>, b: &Arc<dyn Dma>) -> bool {
    a.identity() == b.identity() || (a.device().is_some() && a.device() == b.device())
}

/// A CPU mapping of device memory, for small copies.
pub(super) fn mapped(dma: &Arc<dyn Dma>, addr: u64, len: u64) -> Option<NonNull<u8>> {
    if len <= CPU_MAP_MAX {
        dma.cpu_map(addr, len)
    } else {
        None
    }
}

/// Chooses.
pub(super) fn route<'a>(src: &'a Source, dst: &'a Place, len: u64) -> Route<'a> {
    let (from, to) = match (src, dst) {
        (Source::Inline(bytes), Place::Host(dst)) => {
            return Route::Cpu {
                src: CpuSrc::Inline(bytes),
                dst: CpuDst::Host(*dst),
            };
        }
        (Source::Inline(bytes), Place::Device { addr, dma }) => {
            let src = CpuSrc::Inline(bytes);
            return match mapped(dma, *addr, len) {
                Some(ptr) => Route::Cpu {
                    src,
                    dst: CpuDst::Mapped(ptr),
                },
                None => Route::Fill {
                    dma,
                    src,
                    dst: *addr,
                },
            };
        }
        (Source::Place(from), to) => (from, to),
    };
    match (from, to) {
        (Place::Host(src), Place::Host(dst)) => Route::Cpu {
            src: CpuSrc::Host(*src),
            dst: CpuDst::Host(*dst),
        },
        (Place::Host(src), Place::Device { addr, dma }) => {
            if let Some(ptr) = mapped(dma, *addr, len) {
                Route::Cpu {
                    src: CpuSrc::Host(*src),
                    dst: CpuDst::Mapped(ptr),
                }
            } else if dma.reaches_host(src.addr() as u64, len) {
                Route::Straight {
                    dma,
                    src: src.addr() as u64,
                    dst: *addr,
                }
            } else {
                Route::Fill {
                    dma,
                    src: CpuSrc::Host(*src),
                    dst: *addr,
                }
            }
        }
        (Place::Device { addr, dma }, Place::Host(dst)) => {
            if let Some(ptr) = mapped(dma, *addr, len) {
                Route::Cpu {
                    src: CpuSrc::Host(Shared::new(ptr)),
                    dst: CpuDst::Host(*dst),
                }
            } else if dma.reaches_host(dst.addr() as u64, len) {
                Route::Straight {
                    dma,
                    src: *addr,
                    dst: dst.addr() as u64,
                }
            } else {
                Route::Land {
                    dma,
                    src: *addr,
                    dst: *dst,
                }
            }
        }
        (
            Place::Device {
                addr: src,
                dma: from,
            },
            Place::Device { addr: dst, dma: to },
        ) => {
            if same_device(from, to) {
                if from.ordered() {
                    Route::Straight {
                        dma: from,
                        src: *src,
                        dst: *dst,
                    }
                } else {
                    Route::Cross {
                        from,
                        src: *src,
                        to: from,
                        dst: *dst,
                    }
                }
            } else if from.reaches_device(&**to) {
                Route::Straight {
                    dma: from,
                    src: *src,
                    dst: *dst,
                }
            } else if to.reaches_device(&**from) {
                Route::Straight {
                    dma: to,
                    src: *src,
                    dst: *dst,
                }
            } else {
                Route::Cross {
                    from,
                    src: *src,
                    to,
                    dst: *dst,
                }
            }
        }
    }
}
