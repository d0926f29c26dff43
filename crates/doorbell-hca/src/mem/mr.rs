//! The handle of a registration, and how it ends: revoke, wait for everyone who may still use the memory, let go.
//! The wait is bounded. Memory that cannot be proved unused is leaked, never unmapped under a copy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use doorbell_wire::Key;

use super::{Access, Memory, Region};
use crate::engine::CoreSlot;
use crate::error::{HcaError, Result};
use crate::hca::Hca;

/// A registered memory region. Dropping it deregisters it (see [`Mr::deregister`]) within the configured time.
#[derive(Debug)]
pub struct Mr {
    hca: Hca,
    key: Key,
    region: Option<Arc<Region>>,
}

impl Mr {
    pub(crate) fn new(hca: Hca, key: Key, region: Arc<Region>) -> Self {
        Self {
            hca,
            key,
            region: Some(region),
        }
    }

    /// Its key: lkey and rkey are the same number. Host order; WQEs and the tables of foreign device code hold it big-endian.
    pub fn key(&self) -> Key {
        self.key
    }

    /// The WQE address of the first byte.
    pub fn addr(&self) -> u64 {
        self.region().base
    }

    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.region().memory.len()
    }

    /// Rights.
    pub fn access(&self) -> Access {
        self.region().access
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.region().memory
    }

    /// Its HCA.
    pub fn hca(&self) -> &Hca {
        &self.hca
    }

    /// The region as an RDMA device knows it, for peers; it is registered there now if it was not.
    ///
    /// # Errors
    /// [`HcaError::Verbs`].
    pub fn on_port(&self, port: &crate::verbs::VerbsPort) -> Result<crate::verbs::DeviceKeys> {
        Ok(port.keys(self.region())?)
    }

    fn region(&self) -> &Region {
        self.region
            .as_deref()
            .expect("taken only by deregister and drop")
    }

    /// Revokes the key, waits until no engine and no peer uses the memory, and lets go of it.
    ///
    /// From the start of the call no new work request with this key is executed. A caller-driven core that nobody drives is taken care of.
    ///
    /// # Errors
    /// [`HcaError::StillInUse`] after `timeout`: the key is dead all the same, but the memory stays mapped for ever.
    pub fn deregister(mut self, timeout: Duration) -> Result<()> {
        match self.region.take() {
            Some(region) => release(&self.hca, self.key, region, Some(timeout)),
            None => Ok(()),
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let Some(region) = self.region.take() else {
            return;
        };
        match release(&self.hca, self.key, region, None) {
            Ok(()) => {}
            // Whoever it was has been named already.
            Err(e) if matches!(&e, HcaError::StillInUse { waited, .. } if waited.is_zero()) => {
                tracing::debug!("{e}");
            }
            Err(e) => tracing::error!("{e}"),
        }
    }
}

/// Without a `timeout`, all regions and queue pairs that go share the HCA's.
fn release(hca: &Hca, key: Key, region: Arc<Region>, timeout: Option<Duration>) -> Result<()> {
    let inner = hca.inner();
    let all = inner.closing();
    inner.regions.revoke(key);
    if let Some(record) = &inner.record {
        record.revoked(key.0);
    }
    let exporter = match region.memory {
        Memory::Shared { .. } | Memory::Device { .. } => inner.exporter.get(),
        Memory::Host { .. } => None,
    };
    let ticket = exporter.map(|e| e.revoked(key));
    let grace = inner.grace_begin();
    let start = Instant::now();
    let mut pause = Duration::from_micros(1);
    loop {
        let peers = match (exporter, ticket) {
            (Some(e), Some(t)) => e.released(t),
            _ => true,
        };
        let engines = inner.grace_lagging(grace);
        if peers && engines.is_none() {
            inner.cores.iter().for_each(CoreSlot::answered);
            if exporter.is_some() {
                inner.peers.answered();
            }
            inner.regions.release(key);
            return Ok(());
        }
        let patience = timeout.unwrap_or_else(|| match engines {
            Some(core) => inner.cores[core].patience(all),
            None => inner.peers.left(all, None),
        });
        let waited = match patience.is_zero() {
            true => Duration::ZERO,
            false => start.elapsed(),
        };
        if waited >= patience {
            match engines {
                Some(core) => inner.cores[core].waited_in_vain(waited),
                None => inner.peers.in_vain(waited, None),
            }
            // Devices let go of it in any case.
            region.devices.clear();
            // An engine or a peer may still copy to or from it, so neither memory nor slot may be reused: leak both.
            std::mem::forget(region);
            let who = match engines {
                Some(core) => format!("engine core {core}"),
                None => "a peer process".into(),
            };
            return Err(HcaError::StillInUse { key, who, waited });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_micros(100));
    }
}
