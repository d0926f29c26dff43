//! Two ends whose queue pairs are connected over packets.

use doorbell_hca::roce::RocePort;
use doorbell_hca::roce::transport::Config;
use doorbell_hca::{Access, HcaConfig};
use rand::{Rng, rngs::StdRng};

use crate::common::{MockQp, Options, Rig};
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

/// Half a minute: nothing may need it but what is lost.
pub(crate) fn patient() -> Config {
    Config {
        timeout: 20,
        ..Config::default()
    }
}

pub(crate) fn noise(random: &mut StdRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    random.fill(&mut bytes[..]);
    bytes
}
