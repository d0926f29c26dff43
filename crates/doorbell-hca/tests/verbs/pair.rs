//! Two connected queue pairs over a device in memory.

use std::sync::Arc;

use crate::common::{MockQp, Options, PATIENCE, Region, Rig};
use doorbell_hca::verbs::{VerbsConfig, VerbsEnd, VerbsPort, VerbsTarget};
use doorbell_hca::{Destination, Event, QpState};
use doorbell_verbs_mock::{Config, Mock};
use doorbell_wire::cqe::ErrorCqe;
use doorbell_wire::{Key, Remote, Syndrome, Vendor, Wqe};

/// Two connected queue pairs of one HCA over one device.
pub(crate) struct Pair {
    pub(crate) rig: Rig,
    pub(crate) mock: Mock,
    pub(crate) port: Arc<VerbsPort>,
    pub(crate) a: MockQp,
    pub(crate) b: MockQp,
}

pub(crate) fn target(peer: VerbsEnd, own: VerbsEnd) -> VerbsTarget {
    VerbsTarget {
        peer,
        sq_psn: own.qpn,
        rq_psn: peer.qpn,
        timeout: 14,
        retry: 7,
        rnr_retry: 7,
        min_rnr_timer: 12,
    }
}

pub(crate) fn join(a: &MockQp, b: &MockQp, port: &Arc<VerbsPort>) {
    let ends = [a, b].map(|q| {
        q.hca_qp()
            .prepare(port, PATIENCE)
            .expect("a device's queue pair")
    });
    for (qp, i) in [(a, 0), (b, 1)] {
        let to = Destination::Verbs(Box::new(target(ends[1 - i], ends[i])));
        qp.hca_qp().connect(to, PATIENCE).expect("connects");
    }
}

impl Pair {
    pub(crate) fn new(config: Config) -> Self {
        Self::with(config, Options::default(), |_| {})
    }

    pub(crate) fn with(
        config: Config,
        options: Options,
        change: impl FnOnce(&mut VerbsConfig),
    ) -> Self {
        let (rig, mock) = (Rig::new(), Mock::new(config));
        let mut wanted = VerbsConfig::new(mock.name());
        wanted.calls = config.calls;
        change(&mut wanted);
        let port = rig.hca.open_verbs(&mock.verbs(), &wanted).expect("opens");
        let a = rig.qp_with(options);
        let b = rig.qp_with(Options {
            receive: true,
            ..Options::default()
        });
        join(&a, &b, &port);
        Self {
            rig,
            mock,
            port,
            a,
            b,
        }
    }

    /// The region as the other side names it.
    pub(crate) fn there(&self, region: &Region, offset: u64) -> Remote {
        let keys = region.mr.on_port(&self.port).expect("registers");
        Remote {
            addr: keys.base + offset,
            key: Key(keys.rkey),
        }
    }

    pub(crate) fn run(&mut self, wqe: Wqe) -> u32 {
        let at = self.a.go(wqe);
        self.a.wait(&self.rig, at).byte_cnt
    }

    /// Runs a WQE that fails; its syndromes.
    pub(crate) fn fails(&mut self, wqe: Wqe) -> (Syndrome, Vendor) {
        let at = self.a.go(wqe);
        self.error_of(at)
    }

    pub(crate) fn error_of(&self, at: u64) -> (Syndrome, Vendor) {
        let cqe = self.a.wait_any(&self.rig, at);
        let error = ErrorCqe::parse(&cqe).expect("an error");
        assert_eq!(self.a.state(), QpState::Error);
        let word = self.a.error_word();
        assert_eq!(word.wqe_index(), at as u16, "the first error is this WQE's");
        (error.syndrome, error.vendor)
    }

    /// What the user was told that the device refuses.
    pub(crate) fn refusals(&self) -> Vec<String> {
        let events = std::iter::from_fn(|| self.rig.hca.poll_event());
        let reasons = events.filter_map(|event| match event {
            Event::DeviceRefused { reason, .. } => Some(reason),
            _ => None,
        });
        reasons.collect()
    }

    pub(crate) fn again(&mut self) {
        self.a.reset();
        self.b.reset();
        join(&self.a, &self.b, &self.port);
    }
}

pub(crate) fn both(f: impl Fn(Config)) {
    for calls in [true, false] {
        f(Config {
            calls,
            ..Config::default()
        });
    }
}

/// Long enough for what was rung to be posted.
pub(crate) fn poll_some(rig: &Rig) {
    for _ in 0..200 {
        rig.driver.poll();
    }
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7) ^ seed).collect()
}
