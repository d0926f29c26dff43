//! What a kind of HCA must offer to the host library.
//!
//! The host library makes memory and exported structures; a [`Provider`] turns them into something that executes work
//! requests. [`soft`] is the software HCA. A ConnectX driven through DEVX would be another implementation: it would
//! register the same rings as user memory and give out the address of a UAR page as the doorbell.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::time::Duration;

use doorbell_device::layout::{CqKind, ErrorWord, NicHandler};
use doorbell_gpu::{Keep, MemKind, RelaxHook};
use doorbell_hca::Access;

use crate::config::OnError;
use crate::connect::{Destination, Offer, VerbsEnd};
use crate::memory::Memory;
use crate::mr::RemoteMr;
use crate::qp::{QpCounters, QpState};
use crate::{AsyncError, Error, Result};

mod roce;
mod verbs;
pub(crate) use roce::{faults as roce_faults, port_config as roce_port};
pub(crate) use verbs::port as verbs_port;
pub mod soft;

/// A kind of HCA, opened.
pub trait Provider: Send + Sync + fmt::Debug {
    /// `soft`, …
    fn name(&self) -> &'static str;

    /// A random number that names this HCA to its peers.
    fn id(&self) -> u64;

    /// Where queue memory must lie for this HCA to read it.
    fn queue_memory(&self) -> MemKind;

    /// A new protection domain.
    fn alloc_pd(&self) -> Result<u32>;

    /// Registers memory.
    fn register(&self, request: &RegisterRequest<'_>) -> Result<Box<dyn ProviderMr>>;

    /// Makes a queue pair out of memory that the host library provides.
    fn create_qp(&self, request: QpRequest) -> Result<Box<dyn ProviderQp>>;

    /// The next asynchronous error of any of its objects, or `None` when `timeout` passes without one.
    fn next_error(&self, timeout: Duration) -> Option<AsyncError>;

    /// What the RoCE port can do by which queue pairs of this engine core are connected; opens it if it was not.
    fn roce_offer(&self, _core: Option<usize>) -> Result<Offer> {
        Err(Error::Unsupported {
            what: "RoCE with this provider",
            remedy: "use the software HCA",
        })
    }

    /// What the RoCE ports guarantee, in words; nothing if none was opened.
    fn roce_describe(&self) -> Vec<String> {
        Vec::new()
    }

    /// The RDMA device of queue pairs that are connected over verbs, in words; opens it if it was not.
    fn verbs_describe(&self) -> Result<String> {
        Err(no_verbs())
    }

    /// What its RoCE ports have counted, by name; nothing if there are none.
    fn roce_counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Runs the engine once on this thread if it has no thread of its own; whether there was work.
    fn drive(&self) -> bool;

    /// How a waiting kernel thread runs the engine; `None` if the engine has threads of its own.
    fn relax_hook(&self) -> Option<RelaxHook>;
}

fn no_verbs() -> Error {
    Error::Unsupported {
        what: "RDMA devices with this provider",
        remedy: "use the software HCA",
    }
}

/// A registered region of a provider. Dropping it revokes the key and lets go of the memory when it is no longer used.
pub trait ProviderMr: Send + Sync {
    /// Its key, in host byte order.
    fn key(&self) -> u32;

    /// The region as peers name it over verbs: by the RDMA device's key, which is made if it was not.
    fn verbs(&self) -> Result<RemoteMr> {
        Err(no_verbs())
    }

    /// Revokes the key and waits until nobody uses the memory.
    fn deregister(self: Box<Self>, timeout: Duration) -> Result<()>;
}

/// What to register.
pub struct RegisterRequest<'a> {
    /// Protection domain.
    pub pd: u32,
    /// The memory.
    pub memory: &'a Memory,
    /// Rights granted.
    pub access: Access,
    /// WQE address of the first byte.
    pub base: u64,
    /// Asked now and then while peers are waited for that have to map it: why that is to end.
    pub gives_up: &'a dyn Fn() -> Option<String>,
}

/// A piece of queue memory.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The CPU's address, if it reaches it.
    pub host: Option<NonNull<u8>>,
    /// The GPU's address.
    pub device: u64,
    /// Bytes.
    pub len: usize,
}

// SAFETY: addresses only; those who use them say why they may.
unsafe impl Send for Piece {}

/// What a queue pair is made of.
pub struct QpRequest {
    /// Protection domain.
    pub pd: u32,
    /// Send ring, 64 bytes a slot.
    pub ring: Piece,
    /// Base-two logarithm of its slots.
    pub log_depth: u8,
    /// CQEs, 64 bytes each.
    pub cq: Piece,
    /// How completions are written.
    pub cq_kind: CqKind,
    /// Doorbell record (a big-endian u32).
    pub record: Piece,
    /// Error word (u64).
    pub error: Piece,
    /// A line in which device code notes long waits.
    pub note: Piece,
    /// Receive queue, if it has one.
    pub recv: Option<RecvRequest>,
    /// How it is rung.
    pub handler: NicHandler,
    /// Engine core; `None` leaves it to the provider.
    pub core: Option<usize>,
    /// What happens after an error.
    pub on_error: OnError,
    /// Signals that [`OnError::Release`] moves past anything awaited: memory, and bytes of it.
    pub signals: Vec<(Memory, Range<usize>)>,
    /// What a peer may do over RoCE.
    pub remote_access: Access,
    /// Keeps the memory mapped; dropped when the provider has let go of it.
    pub keep: Keep,
}

/// What a receive queue is made of.
#[derive(Clone, Copy, Debug)]
pub struct RecvRequest {
    /// Receives: 16-byte data segments.
    pub ring: Piece,
    /// Base-two logarithm of their number.
    pub log_depth: u8,
    /// Bytes from one to the next: 16 times a power of two.
    pub stride: u32,
    /// Doorbell record (a big-endian u32 of 16 bits).
    pub record: Piece,
    /// CQEs, 64 bytes each, one a receive.
    pub cq: Piece,
}

/// A queue pair of a provider. Dropping it destroys it, or leaks it if it does not fall quiet in time.
pub trait ProviderQp: Send + Sync {
    /// QP number, 24 bits.
    fn qpn(&self) -> u32;

    /// CQ number, 24 bits.
    fn cqn(&self) -> u32;

    /// Number of the receive CQ, 24 bits; nothing without a receive queue.
    fn recv_cqn(&self) -> Option<u32>;

    /// The address at which the GPU rings.
    fn doorbell(&self) -> u64;

    /// What was last rung, as an eight-byte word; `None` if it cannot be read back.
    fn peek_doorbell(&self) -> Option<u64> {
        None
    }

    /// Where the posting side keeps its indexes, in host memory, for who looks at them when this process cannot any more.
    ///
    /// # Safety
    /// `at` is a [`doorbell_device::layout::GpuQp`] that is mapped as long as `keep` lives.
    unsafe fn watch_poster(&self, _at: NonNull<u8>, _keep: Keep) {}

    /// `EXT_*` flags of [`doorbell_device::layout::QpExt`].
    fn ext_flags(&self) -> u32;

    /// Which engine core executes it, if there are several.
    fn core(&self) -> Option<usize>;

    /// This side's end of a link of an RDMA device, for the peer; the device's queue pair is made if it was not.
    fn verbs_end(&self) -> Result<VerbsEnd> {
        Err(no_verbs())
    }

    /// Reset to Ready. `psn` is the number of the first packet that it sends, where there are packets.
    fn connect(&self, to: &Destination, psn: u32) -> Result<()>;

    /// Any state to Reset: indices start at zero, CQEs and words are as after creation.
    fn reset(&self, timeout: Duration) -> Result<()>;

    /// Ready to Error: later work requests are flushed.
    fn fail(&self) -> Result<()>;

    /// Ends it. The memory is let go of when this returns without an error.
    fn destroy(&self, timeout: Duration) -> Result<()>;

    /// Its state now.
    fn state(&self) -> QpState;

    /// Its first error since the last reset.
    fn error(&self) -> ErrorWord;

    /// What it has done.
    fn counters(&self) -> QpCounters;

    /// Slots announced and slots complete since the last reset, as the HCA last said; `None` if it does not tell.
    fn indexes(&self) -> Option<(u64, u64)> {
        None
    }

    /// One more than the newest slot whose completion a collapsed CQ ought to show; 0: none yet; `None` if it does not tell.
    fn newest_cqe(&self) -> Option<u64> {
        None
    }

    /// Where its requests go, and the number of the queue pair there; `None` if it does not tell.
    fn target(&self) -> Option<(doorbell_hca::record::Target, u32)> {
        None
    }

    /// Receives posted and filled since the last reset; `None` if it does not tell, or has no receive queue.
    fn receives(&self) -> Option<(u64, u64)> {
        None
    }

    /// What its RoCE connection has counted, by the names of the rdma tool; nothing if it has none.
    fn roce_counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}
