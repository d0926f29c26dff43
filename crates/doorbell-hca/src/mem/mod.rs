//! Memory regions: what a work request may touch, by which key, and how it goes away again.
//! A registration is one slot of the [key table](table); engines read it without locks and cache what they found until the table's
//! epoch changes. Deregistering revokes the key, waits a bounded time until nobody uses the memory, and only then lets go of it.

pub(crate) mod grace;
pub(crate) mod memfd;
mod mr;
pub(crate) mod regions;
pub mod table;

pub use memfd::TableMemory;
pub use mr::Mr;

use core::any::Any;
use core::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use doorbell_wire::Key;

use crate::dma::Dma;
use crate::fault::Fault;
use crate::raw::Shared;

/// Keeps memory alive for as long as an engine may use it: dropped after the last use.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Rights that a region grants, as bits (the numbers are verbs' `IBV_ACCESS_*`). Reading locally needs none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Access(u32);

impl Access {
    /// Nothing but local reads.
    pub const NONE: Self = Self(0);
    /// READ results and old values of atomics may be written here.
    pub const LOCAL_WRITE: Self = Self(1);
    /// Peers may WRITE.
    pub const REMOTE_WRITE: Self = Self(1 << 1);
    /// Peers may READ.
    pub const REMOTE_READ: Self = Self(1 << 2);
    /// Peers may use atomics.
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// All of them.
    pub const ALL: Self = Self(15);
    /// No right but a promise: WRITEs of one queue pair become visible here in their order, even without a signal between them. In GPU
    /// memory that costs each of them a batch of the copy engine.
    pub const ORDERED: Self = Self(1 << 4);

    /// From bits; unknown ones are dropped.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits & (Self::ALL.0 | Self::ORDERED.0))
    }

    /// As bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Both.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Does it grant everything in `need`?
    pub const fn contains(self, need: Self) -> bool {
        self.0 & need.0 == need.0
    }
}

impl core::ops::BitOr for Access {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        self.union(other)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 4] = [
            "LOCAL_WRITE",
            "REMOTE_WRITE",
            "REMOTE_READ",
            "REMOTE_ATOMIC",
        ];
        let mut first = true;
        for (bit, name) in NAMES.iter().enumerate() {
            if self.0 & (1 << bit) != 0 {
                write!(f, "{}{name}", if first { "" } else { "|" })?;
                first = false;
            }
        }
        if first { f.write_str("NONE") } else { Ok(()) }
    }
}

/// How WQE addresses name bytes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// Address 0 is the first byte (NCCL).
    Zero,
    /// The address is the owner's own: host pointer, or device address (NVSHMEM, verbs).
    Address,
    /// The first byte has this address (verbs' `ibv_reg_mr_iova`).
    At(u64),
}

/// The memory of a region.
#[derive(Clone)]
pub enum Memory {
    /// Host memory of this process that peers of this host cannot map.
    Host {
        /// First byte.
        ptr: Shared<u8>,
        /// Bytes.
        len: usize,
        /// Dropped when the memory is no longer used.
        keep: Keep,
    },
    /// Host memory that lies in a sealed memfd, which peers of this host can map.
    Shared {
        /// First byte in this process.
        ptr: Shared<u8>,
        /// Bytes.
        len: usize,
        /// The sealed descriptor.
        memfd: Arc<OwnedFd>,
        /// Offset of the first byte in the descriptor.
        offset: u64,
        /// Dropped when the memory is no longer used.
        keep: Keep,
    },
    /// GPU memory that only a copy engine reaches.
    Device {
        /// Device address of the first byte.
        addr: u64,
        /// Bytes.
        len: usize,
        /// The copy engine.
        dma: Arc<dyn Dma>,
        /// Dropped when the memory is no longer used.
        keep: Keep,
    },
}

impl Memory {
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host { len, .. } | Self::Shared { len, .. } | Self::Device { len, .. } => *len,
        }
    }

    /// Is it empty? Such memory cannot be registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The owner's address of the first byte.
    pub fn addr(&self) -> u64 {
        match self {
            Self::Host { ptr, .. } | Self::Shared { ptr, .. } => ptr.addr() as u64,
            Self::Device { addr, .. } => *addr,
        }
    }

    pub(crate) fn kind(&self) -> table::MemoryKind {
        match self {
            Self::Host { .. } => table::MemoryKind::Host,
            Self::Shared { .. } => table::MemoryKind::Shared,
            Self::Device { .. } => table::MemoryKind::Device,
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} memory at {:#x}, {} bytes",
            self.kind(),
            self.addr(),
            self.len()
        )
    }
}

/// What to register.
#[derive(Clone, Debug)]
pub struct MrConfig {
    /// The memory.
    pub memory: Memory,
    /// Rights granted.
    pub access: Access,
    /// How WQEs address it.
    pub addressing: Addressing,
    /// Protection domain (see [`Hca::alloc_pd`](crate::Hca::alloc_pd)).
    pub pd: u32,
}

/// A registered region, for those who have to know about registrations (see [`Exporter`]).
#[derive(Debug)]
pub struct Region {
    // Before the memory: RDMA devices let go of it first.
    /// What RDMA devices know it as.
    pub devices: crate::verbs::Devices,
    /// The memory.
    pub memory: Memory,
    /// Rights granted.
    pub access: Access,
    /// WQE address of the first byte.
    pub base: u64,
    /// Protection domain.
    pub pd: u32,
}

/// Asked now and then by a registration that waits for peers to map the region: the reason why it is to wait no longer.
pub type GivesUp<'a> = &'a dyn Fn() -> Option<String>;

/// Makes registrations known to peer processes. Set with [`Hca::set_exporter`](crate::Hca::set_exporter).
pub trait Exporter: Send + Sync {
    /// A region in a sealed memfd, or in GPU memory, is being registered. Returns the number by which peers know where it lies; 0: they
    /// cannot reach it. Waits for those that can to have it, unless `gives_up`.
    ///
    /// # Errors
    /// Text for the user; the registration fails.
    fn registering(&self, region: &Region, gives_up: GivesUp<'_>) -> Result<u32, String>;

    /// The registration failed after [`Exporter::registering`] had answered `number`.
    fn abandoned(&self, number: u32) {
        let _ = number;
    }

    /// The region has got its key.
    fn registered(&self, key: Key, region: &Region);

    /// The key is revoked (the epoch has changed): asks every peer to let go of it. Returns a ticket for [`Exporter::released`].
    fn revoked(&self, key: Key) -> u64;

    /// Has every live peer let go? Never blocks.
    fn released(&self, ticket: u64) -> bool;
}

/// Where the bytes behind a key are for this process: the whole region, with the rights already checked.
#[derive(Clone)]
pub struct Span {
    /// WQE address of the first byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Where they are.
    pub place: Place,
    /// [`Access::ORDERED`].
    pub ordered: bool,
}

/// A place that bytes are moved to or from.
#[derive(Clone)]
pub enum Place {
    /// Memory that the CPU loads and stores.
    Host(Shared<u8>),
    /// Memory behind a copy engine.
    Device {
        /// Device address.
        addr: u64,
        /// The engine that reaches it.
        dma: Arc<dyn Dma>,
    },
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Host(ptr) => write!(
                f,
                "{} bytes at {ptr:?} (WQE address {:#x})",
                self.len, self.base
            ),
            Place::Device { addr, .. } => write!(
                f,
                "{} bytes at device {addr:#x} (WQE address {:#x})",
                self.len, self.base
            ),
        }
    }
}

impl Span {
    /// The offset of `[addr, addr + len)` in the region, if it lies inside. No arithmetic overflows.
    #[inline(always)]
    pub fn offset(&self, addr: u64, len: u64) -> Option<u64> {
        let offset = addr.wrapping_sub(self.base);
        (len <= self.len && offset <= self.len - len).then_some(offset)
    }

    /// Where `[addr, addr + len)` is, if it lies inside the region.
    pub fn at(self, addr: u64, len: u64) -> Option<Place> {
        let offset = self.offset(addr, len)?;
        Some(match self.place {
            // SAFETY: the offset lies inside the region.
            Place::Host(base) => Place::Host(unsafe { base.byte_add(offset as usize) }),
            Place::Device { addr, dma } => Place::Device {
                addr: addr + offset,
                dma,
            },
        })
    }
}

/// Which end of a transfer a key names: it decides the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// lkey.
    Local,
    /// rkey.
    Remote,
}

impl End {
    /// The fault of a refused lookup.
    pub fn fault(self, error: table::LookupError) -> Fault {
        use table::LookupError as E;
        match (self, error) {
            (Self::Local, E::Unknown) => Fault::BadLkey,
            (Self::Local, E::Revoked) => Fault::LkeyRevoked,
            (Self::Local, E::Pd) => Fault::LkeyPd,
            (Self::Local, E::Access) => Fault::LkeyAccess,
            (Self::Remote, E::Unknown) => Fault::BadRkey,
            (Self::Remote, E::Revoked) => Fault::RkeyRevoked,
            (Self::Remote, E::Pd) => Fault::RkeyPd,
            (Self::Remote, E::Access) => Fault::RkeyAccess,
        }
    }

    /// The fault of a range that leaves its region.
    pub fn range(self) -> Fault {
        match self {
            Self::Local => Fault::LkeyRange,
            Self::Remote => Fault::RkeyRange,
        }
    }
}
