//! Protection domains and memory regions: which memory a work request may touch, by which key.
//!
//! A [`Mr`] holds on to its [`Memory`] and gives out the numbers that WQEs carry: address and key. Dropping it revokes the
//! key at once; the memory itself stays mapped until no engine, no peer and no kernel of this device can still be using it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use doorbell_hca::Access;

use crate::device::Inner as DeviceInner;
use crate::endpoint::LinkKind;
use crate::memory::Memory;
use crate::provider::{ProviderMr, RegisterRequest};
use crate::qp::QpBuilder;
use crate::{Place, Result};

/// How WQE addresses name the bytes of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Addressing {
    /// By the address that kernels use ([`Memory::device_addr`]): what verbs and NVSHMEM expect.
    #[default]
    Device,
    /// By the offset in the region: what NCCL expects.
    Zero,
    /// From this address on.
    At(u64),
}

/// A protection domain: queue pairs use only regions of their own.
#[derive(Clone)]
pub struct Pd {
    pub(crate) inner: Arc<PdInner>,
}

pub(crate) struct PdInner {
    pub(crate) device: Arc<DeviceInner>,
    pub(crate) number: u32,
    /// Takes what atomics return when nobody asks for it: one line a QP, modulo their number.
    pub(crate) sink: Sink,
}

/// Lines of the sink; more QPs than that share lines, which costs time and nothing else, since nobody reads them.
const SINK_LINES: usize = 512;
const SINK_LINE: usize = 64;

pub(crate) struct Sink {
    mr: MrParts,
    next: std::sync::atomic::AtomicUsize,
}

impl Sink {
    /// Address and key of 8 bytes.
    pub(crate) fn line(&self) -> (u64, u32) {
        let n = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % SINK_LINES;
        (self.mr.base + (n * SINK_LINE) as u64, self.mr.mr.key())
    }
}

struct MrParts {
    // Before the memory: fields drop in order, and the key goes first.
    mr: Box<dyn ProviderMr>,
    memory: Memory,
    base: u64,
}

impl MrParts {
    fn register(
        device: &DeviceInner,
        pd: u32,
        memory: &Memory,
        access: Access,
        addressing: Addressing,
        gives_up: &dyn Fn() -> Option<String>,
    ) -> Result<Self> {
        let base = match addressing {
            Addressing::Device => memory.device_addr(),
            Addressing::Zero => 0,
            Addressing::At(base) => base,
        };
        let mr = device.provider.register(&RegisterRequest {
            pd,
            memory,
            access,
            base,
            gives_up,
        })?;
        Ok(Self {
            mr,
            memory: memory.clone(),
            base,
        })
    }
}

impl Pd {
    pub(crate) fn new(device: &Arc<DeviceInner>) -> Result<Self> {
        let number = device.provider.alloc_pd()?;
        let memory = Memory::alloc(&device.engine, Place::Host, SINK_LINES * SINK_LINE)?;
        let mr = MrParts::register(
            device,
            number,
            &memory,
            Access::LOCAL_WRITE,
            Addressing::Device,
            &|| None,
        )?;
        let sink = Sink {
            mr,
            next: std::sync::atomic::AtomicUsize::new(0),
        };
        Ok(Self {
            inner: Arc::new(PdInner {
                device: Arc::clone(device),
                number,
                sink,
            }),
        })
    }

    /// Its number in the HCA.
    pub fn number(&self) -> u32 {
        self.inner.number
    }

    /// Registers memory, addressed as kernels address it. Several regions may lie in the same memory.
    pub fn register(&self, memory: &Memory, access: Access) -> Result<Mr> {
        self.register_with(memory, access, Addressing::Device)
    }

    /// Registers memory, with a choice of addressing.
    pub fn register_with(
        &self,
        memory: &Memory,
        access: Access,
        addressing: Addressing,
    ) -> Result<Mr> {
        self.register_while(memory, access, addressing, &|| None)
    }

    /// As [`Pd::register_with`], which waits until connected processes have mapped the memory: only until `gives_up`, which is asked now and
    /// then, says why.
    pub fn register_while(
        &self,
        memory: &Memory,
        access: Access,
        addressing: Addressing,
        gives_up: &dyn Fn() -> Option<String>,
    ) -> Result<Mr> {
        let parts = MrParts::register(
            &self.inner.device,
            self.inner.number,
            memory,
            access,
            addressing,
            gives_up,
        )?;
        Ok(Mr {
            pd: self.clone(),
            access,
            parts,
        })
    }

    /// Its device.
    pub fn device(&self) -> crate::Device {
        crate::Device {
            inner: Arc::clone(&self.inner.device),
        }
    }

    /// Begins a queue pair.
    pub fn qp(&self) -> QpBuilder {
        QpBuilder::new(self)
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pd").field(&self.inner.number).finish()
    }
}

/// A registered memory region. Local and remote key are the same number.
pub struct Mr {
    parts: MrParts,
    access: Access,
    pd: Pd,
}

impl Mr {
    /// The key, in host byte order (WQEs carry it big-endian).
    pub fn key(&self) -> u32 {
        self.parts.mr.key()
    }

    /// The key as foreign device code stores it: big-endian.
    pub fn key_be(&self) -> u32 {
        self.key().to_be()
    }

    /// The address by which WQEs name its first byte.
    pub fn addr(&self) -> u64 {
        self.parts.base
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.parts.memory.len()
    }

    /// What it grants.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// Its memory.
    pub fn memory(&self) -> &Memory {
        &self.parts.memory
    }

    /// What a peer must know to use it.
    pub fn remote(&self) -> RemoteMr {
        RemoteMr {
            addr: self.addr(),
            len: self.len() as u64,
            key: self.key(),
        }
    }

    /// As [`Mr::remote`], for a peer that is connected over `link`: over verbs, memory is named by the RDMA device's keys.
    pub fn remote_over(&self, link: LinkKind) -> Result<RemoteMr> {
        match link {
            LinkKind::Verbs => self.parts.mr.verbs(),
            _ => Ok(self.remote()),
        }
    }

    /// [`Memory::read`].
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.parts.memory.read(offset, into)
    }

    /// [`Memory::write`].
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.parts.memory.write(offset, from)
    }

    /// Revokes the key and waits until nobody can be using the memory through it. What is not given up in time is kept
    /// mapped for ever, and the error says by whom.
    pub fn deregister(self, timeout: Duration) -> Result<Memory> {
        let MrParts { mr, memory, .. } = self.parts;
        mr.deregister(timeout)?;
        Ok(memory)
    }
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mr")
            .field("key", &format_args!("{:#010x}", self.key()))
            .field("addr", &format_args!("{:#x}", self.addr()))
            .field("access", &self.access)
            .field("memory", self.memory())
            .finish()
    }
}

/// Somebody's memory region as numbers: what travels to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMr {
    /// Address by which WQEs name its first byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// Its key, in host byte order.
    pub key: u32,
}
