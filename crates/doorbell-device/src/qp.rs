//! A queue pair as a kernel uses it: the exported structure, its constants in registers, and who calls.
//!
//! [`Qp::new`] reads the constants once; make it outside the loop. Posting is in `post.rs`, waiting in `wait.rs`, the operations
//! in `ops.rs`. A `Qp` owns nothing: the host keeps the queue alive while kernels run.

use core::cell::Cell;
use core::marker::PhantomData;
use core::ptr::addr_of_mut;

use doorbell_wire::{Chunk, Key, Qpn};

use crate::arch::{Arch, At};
use crate::error::Error;
use crate::layout::{
    CqKind, EXT_MAGIC, EXT_SOFT_ENGINE, EXT_VERSION, GpuQp, NicHandler, QpExt, QpHandle,
};
use crate::scope::{Scope, Sharing, Thread, sharing};
use crate::sites;
use crate::wr::{Fetch, Maker};

/// A moment of [`Arch::clock_ns`] at which a wait gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(pub u64);

impl Deadline {
    /// `ns` nanoseconds from now.
    #[inline(always)]
    pub fn after<A: Arch>(arch: A, ns: u64) -> Self {
        Self(arch.clock_ns().saturating_add(ns))
    }

    /// Whether it has passed.
    #[inline(always)]
    pub fn passed<A: Arch>(self, arch: A) -> bool {
        arch.clock_ns() >= self.0
    }

    /// `ns` nanoseconds later.
    #[inline(always)]
    pub(crate) const fn and(self, ns: u64) -> Self {
        Self(self.0.saturating_add(ns))
    }
}

/// What identifies a posted operation: the index of its last WQE's first slot, counted since the QP's last reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// How to post.
#[derive(Clone, Copy, Debug)]
pub struct Post {
    /// When to give up waiting for room in the ring.
    pub deadline: Deadline,
    pub(crate) ring: bool,
    pub(crate) check: bool,
    pub(crate) signal: bool,
}

impl Post {
    /// Ring at once, with a completion; give up at `deadline` if the ring stays full.
    #[inline(always)]
    pub const fn by(deadline: Deadline) -> Self {
        Self {
            deadline,
            ring: true,
            check: true,
            signal: true,
        }
    }

    /// Leave the ringing to a later post or to [`Qp::ring`].
    #[inline(always)]
    pub const fn without_ringing(self) -> Self {
        Self {
            ring: false,
            ..self
        }
    }

    /// Skip the check for room in the ring: for a caller who knows that there is some.
    #[inline(always)]
    pub const fn without_space_check(self) -> Self {
        Self {
            check: false,
            ..self
        }
    }

    /// Ask for one completion a call: that of the last WQE of all that are posted together (a batch's, a warp's). The others count
    /// as complete with it. Collapsed CQs only.
    #[inline(always)]
    pub const fn signal_last(self) -> Self {
        Self {
            signal: false,
            ..self
        }
    }
}

/// A queue pair, for calls by threads of scope `S`, shared by threads as `M` says.
///
/// # Sharing
/// `M` is a promise: [`sharing::Exclusive`] that one thread at a time uses the QP, [`sharing::Block`] that the threads of one block do. A
/// QP may be used in one way by one kernel and in another by the next. Of an exclusive QP there is one `Qp` value at a time, since
/// that value keeps the indexes in registers.
pub struct Qp<'a, A: Arch, S: Scope = Thread, M: Sharing = sharing::Gpu> {
    pub(crate) arch: A,
    pub(crate) qp: *mut GpuQp,
    pub(crate) ext: *mut QpExt,
    pub(crate) ring: *mut Chunk,
    pub(crate) mask: u32,
    pub(crate) qpn: Qpn,
    pub(crate) handler: NicHandler,
    pub(crate) dbrec: *mut u32,
    pub(crate) db: *mut u64,
    pub(crate) cq: *const u32,
    pub(crate) cq_kind: CqKind,
    pub(crate) soft: bool,
    pub(crate) sink: (u64, Key),
    /// Consumer index as last seen: older than the truth at worst, and in a register.
    pub(crate) seen: Cell<u64>,
    /// Exclusive use: `sq_rsvd_index`, which then changes only through this value.
    pub(crate) next: Cell<u64>,
    _life: PhantomData<(&'a GpuQp, S, M)>,
}

impl<'a, A: Arch, S: Scope, M: Sharing> Qp<'a, A, S, M> {
    /// The queue that `handle` names.
    ///
    /// # Errors
    /// [`Error::INVALID`] if the extension is not one of this version.
    ///
    /// # Safety
    /// `handle` comes from a host library that keeps the structures and the memory they name valid for `'a`; the structures are in memory on
    /// which the GPU's atomics work; no other thread uses the QP in a way that `M` excludes.
    #[inline(always)]
    pub unsafe fn new(arch: A, handle: QpHandle) -> Result<Self, Error> {
        let QpHandle { qp, ext } = handle;
        let mut soft = false;
        let mut sink = (0, Key(0));
        if !ext.is_null() {
            // SAFETY: the caller's promise: `ext` is an extension, whose words here are constant.
            let (magic, version, flags, addr, key) = unsafe {
                (
                    arch.load_const32(addr_of_mut!((*ext).magic)),
                    arch.load_const32(addr_of_mut!((*ext).version)),
                    arch.load_const32(addr_of_mut!((*ext).flags)),
                    arch.load_const64(addr_of_mut!((*ext).sink_addr)),
                    arch.load_const32(addr_of_mut!((*ext).sink_key)),
                )
            };
            if magic != EXT_MAGIC || version != EXT_VERSION {
                return Err(Error::INVALID);
            }
            soft = flags & EXT_SOFT_ENGINE != 0;
            sink = (addr, Key(key));
        }
        // SAFETY: the caller's promise; these words are constant while kernels run. `sq_wqe_num` and `sq_wqe_mask` share one
        // word, as do `cqe_size` and `cq_type`.
        unsafe {
            let depth = arch.load_const32(addr_of_mut!((*qp).sq_wqe_num).cast()) & 0xffff;
            let kind = arch.load_const32(addr_of_mut!((*qp).cq_sq.cqe_size).cast());
            let address = |p: *mut u64| arch.load_const64(p) as usize;
            Ok(Self {
                arch,
                qp,
                ext,
                ring: core::ptr::with_exposed_provenance_mut(address(addr_of_mut!(
                    (*qp).sq_wqe_daddr
                ))),
                mask: depth.wrapping_sub(1),
                qpn: Qpn::truncate(arch.load_const32(addr_of_mut!((*qp).sq_num))),
                handler: NicHandler::from_raw(
                    arch.load_const32(addr_of_mut!((*qp).nic_handler).cast()) as i32,
                ),
                dbrec: core::ptr::with_exposed_provenance_mut(address(addr_of_mut!(
                    (*qp).sq_dbrec
                ))),
                db: core::ptr::with_exposed_provenance_mut(address(addr_of_mut!((*qp).sq_db))),
                cq: core::ptr::with_exposed_provenance(address(addr_of_mut!(
                    (*qp).cq_sq.cqe_daddr
                ))),
                cq_kind: CqKind::from_raw((kind >> 8) as u8),
                soft,
                sink,
                seen: Cell::new(0),
                next: Cell::new(if M::EXCLUSIVE {
                    arch.load_own64(addr_of_mut!((*qp).sq_rsvd_index))
                } else {
                    0
                }),
                _life: PhantomData,
            })
        }
    }

    /// Where atomics put results that nobody asks for: 8 bytes at `addr` of the region of `key`. Needed on a bare QP before
    /// [`Qp::signal_add`] and the like; an extension names its own.
    #[inline(always)]
    #[must_use]
    pub const fn with_sink(self, addr: u64, key: Key) -> Self {
        Self {
            sink: (addr, key),
            ..self
        }
    }

    /// The same queue for calls of another scope.
    #[inline(always)]
    pub const fn scoped<T: Scope>(self) -> Qp<'a, A, T, M> {
        let Self {
            arch,
            qp,
            ext,
            ring,
            mask,
            qpn,
            handler,
            dbrec,
            db,
            cq,
            cq_kind,
            soft,
            sink,
            seen,
            next,
            ..
        } = self;
        Qp {
            arch,
            qp,
            ext,
            ring,
            mask,
            qpn,
            handler,
            dbrec,
            db,
            cq,
            cq_kind,
            soft,
            sink,
            seen,
            next,
            _life: PhantomData,
        }
    }

    /// Slots in the ring.
    #[inline(always)]
    pub const fn depth(&self) -> u32 {
        self.mask.wrapping_add(1)
    }

    /// QP number.
    #[inline(always)]
    pub const fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// How completions are written.
    #[inline(always)]
    pub const fn cq_kind(&self) -> CqKind {
        self.cq_kind
    }

    /// The machine, standing for the calling thread.
    #[inline(always)]
    pub const fn arch(&self) -> A {
        self.arch
    }

    /// What this queue adds to the slots of an operation.
    #[inline(always)]
    pub(crate) const fn maker(&self) -> Maker {
        Maker {
            qpn: self.qpn,
            sink: Fetch {
                addr: self.sink.0,
                key: self.sink.1,
            },
        }
    }

    /// After a function that was not inlined has used an exclusive queue: the index that is kept here.
    #[inline(always)]
    pub(crate) fn reload(&self) {
        if M::EXCLUSIVE {
            // SAFETY: a word of the QP, and one thread at a time uses it.
            self.next.set(unsafe { self.arch.load_own64(self.rsvd()) });
        }
    }

    #[inline(always)]
    pub(crate) const fn handle(&self) -> QpHandle {
        QpHandle {
            qp: self.qp,
            ext: self.ext,
        }
    }

    /// The queue once more, from the handle of one that exists, in functions that are not inlined.
    #[inline(always)]
    pub(crate) fn again(arch: A, handle: QpHandle) -> Result<Self, Error> {
        // SAFETY: the promise was made for the queue whose handle this is.
        unsafe { Self::new(arch, handle) }
    }

    #[inline(always)]
    pub(crate) fn rsvd(&self) -> *mut u64 {
        // SAFETY: a field of the structure that `new` was promised; only its address is taken.
        unsafe { addr_of_mut!((*self.qp).sq_rsvd_index) }
    }

    #[inline(always)]
    pub(crate) fn ready(&self) -> *mut u64 {
        // SAFETY: as `rsvd`.
        unsafe { addr_of_mut!((*self.qp).sq_ready_index) }
    }

    #[inline(always)]
    pub(crate) fn rung(&self) -> *mut u64 {
        // SAFETY: as `rsvd`.
        unsafe { addr_of_mut!((*self.qp).sq_wqe_pi) }
    }

    #[inline(always)]
    pub(crate) fn lock(&self) -> *mut u32 {
        // SAFETY: as `rsvd`.
        unsafe { addr_of_mut!((*self.qp).sq_lock).cast() }
    }

    #[inline(always)]
    pub(crate) fn ci(&self) -> *mut u64 {
        // SAFETY: as `rsvd`.
        unsafe { addr_of_mut!((*self.qp).cq_sq.cqe_ci) }
    }

    /// A word of an index that `M` lets one thread, or several, use.
    #[inline(always)]
    pub(crate) fn load(&self, p: *const u64, at: At) -> u64 {
        // SAFETY: `p` is a word of the structures that `new` was promised.
        unsafe {
            if M::EXCLUSIVE {
                self.arch.load_own64(p)
            } else {
                self.arch.load64(p, M::at(at))
            }
        }
    }

    /// Consumer index as last polled.
    #[inline(always)]
    pub(crate) fn consumer(&self) -> u64 {
        let ci = self.load(self.ci(), sites::CI_LOAD);
        self.seen.set(ci);
        ci
    }
}

impl<A: Arch, S: Scope, M: Sharing> core::fmt::Debug for Qp<'_, A, S, M> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Qp")
            .field("qpn", &self.qpn)
            .field("depth", &self.depth())
            .finish_non_exhaustive()
    }
}
