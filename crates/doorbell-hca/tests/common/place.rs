//! Regions of both kinds by one name: memory of this process, and memory that only a device's copy engine reaches.

use std::sync::Arc;

use doorbell_hca::dma::Dma;
use doorbell_hca::{Access, Addressing, Memory, Mr, MrConfig};
use doorbell_wire::{Local, Remote};

use crate::common::{Region, Rig};
use crate::device::{BASE, Device};

/// A region, here or behind a device.
pub(crate) enum Place {
    Host(Region),
    Device(Mr, Arc<Device>, usize),
}

impl Place {
    /// `at`: where on the device, if there is one.
    pub(crate) fn new(rig: &Rig, device: Option<(&Arc<Device>, usize)>, len: usize) -> Self {
        let Some((device, at)) = device else {
            return Self::Host(rig.region(len));
        };
        let dma: Arc<dyn Dma> = device.clone();
        let config = MrConfig {
            memory: Memory::Device {
                addr: BASE + at as u64,
                len,
                dma,
                keep: Arc::new(()),
            },
            access: Access::ALL,
            addressing: Addressing::Zero,
            pd: rig.pd,
        };
        // SAFETY: the device checks its own bounds.
        let mr = unsafe { rig.hca.register(config) }.expect("register");
        Self::Device(mr, Arc::clone(device), at)
    }

    pub(crate) fn remote(&self, addr: u64) -> Remote {
        let key = match self {
            Self::Host(region) => region.key(),
            Self::Device(mr, ..) => mr.key(),
        };
        Remote { addr, key }
    }

    pub(crate) fn local(&self, addr: u64, len: u32) -> Local {
        let Remote { key, .. } = self.remote(addr);
        Local { addr, len, key }
    }

    pub(crate) fn fill(&self, offset: usize, bytes: &[u8]) {
        match self {
            Self::Host(region) => region.fill(offset, bytes),
            Self::Device(_, device, at) => device.fill(at + offset, bytes),
        }
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        match self {
            Self::Host(region) => region.bytes(offset, len),
            Self::Device(_, device, at) => device.bytes(at + offset, len),
        }
    }

    #[allow(dead_code, reason = "not every test program needs it")]
    pub(crate) fn word(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.bytes(offset, 8).try_into().expect("eight"))
    }
}
