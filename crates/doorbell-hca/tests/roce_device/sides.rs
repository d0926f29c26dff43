//! Two ends, and regions that are here or behind a device.

use std::sync::Arc;

use doorbell_hca::dma::Dma;
use doorbell_hca::roce::RocePort;
use doorbell_hca::roce::transport::Config;
use doorbell_hca::{Access, Addressing, HcaConfig, Memory, Mr, MrConfig};
use doorbell_wire::{Local, Remote};
use rand::{Rng, rngs::StdRng};

use crate::common::{MockQp, Options, Region, Rig};
use crate::device::{BASE, Device};
use crate::net;

pub(crate) const DEVICE: usize = 4 << 20;

/// One end: an engine, its port, a queue pair with a receive queue.
pub(crate) struct Side {
    pub(crate) rig: Rig,
    pub(crate) port: RocePort,
    pub(crate) qp: MockQp,
}

impl Side {
    pub(crate) fn new(faults: &str) -> Self {
        let rig = Rig::with(HcaConfig::caller_driven());
        let port = net::port(&rig, faults);
        let qp = rig.qp_with(Options {
            receive: true,
            log_depth: 6,
            ..Options::default()
        });
        Self { rig, port, qp }
    }

    pub(crate) fn connect(&self, other: &Self, config: Config) {
        net::connect(&self.qp, &other.qp, &other.port, Access::ALL, config);
    }
}

pub(crate) fn pair(faults: &str, config: &Config) -> (Side, Side) {
    let (a, b) = (Side::new(faults), Side::new(faults));
    a.connect(&b, config.clone());
    b.connect(&a, config.clone());
    (a, b)
}

/// Drives both until `done`.
pub(crate) fn until(a: &Side, b: &Side, mut done: impl FnMut() -> bool) -> bool {
    a.rig.until(|| {
        b.rig.driver.poll();
        done()
    })
}

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

    pub(crate) fn word(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.bytes(offset, 8).try_into().expect("eight"))
    }
}

/// Half a minute: nothing may need it but what is lost.
pub(crate) fn patient() -> Config {
    Config {
        timeout: 18,
        ..Config::default()
    }
}

pub(crate) fn noise(random: &mut StdRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    random.fill(&mut bytes[..]);
    bytes
}
