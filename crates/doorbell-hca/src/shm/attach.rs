//! The link and the HCA it belongs to: who holds whom, and what each asks of the other.
//!
//! The link keeps its HCA alive; the HCA knows the link only weakly, so neither keeps the other for ever.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, Weak},
};

use doorbell_wire::Key;

use super::{
    DeviceRegion, Gone, Hooks, PeerId, Shm, ShmConfig, TableExport,
    error::{Result, ShmError},
};
use crate::{
    hca::Hca,
    mem::{Exporter, GivesUp, Region},
};

/// Makes device memory of peers usable in this process.
pub trait DeviceImporter: Send + Sync {
    /// Imports what [`Dma::export`](crate::dma::Dma::export) of the peer's copy engine exported.
    ///
    /// # Errors
    /// Text for the user: keys of that region cannot be used from this process.
    fn import(&self, handle: &[u8], fd: Option<OwnedFd>, len: u64) -> Result<DeviceRegion, String>;
}

struct OfHca {
    hca: Hca,
    importer: Option<Arc<dyn DeviceImporter>>,
}

impl Hooks for OfHca {
    fn grace_begin(&self) -> u64 {
        self.hca.grace_begin()
    }

    fn grace_passed(&self, epoch: u64) -> bool {
        self.hca.grace_passed(epoch)
    }

    fn peer_down(&self, peer: PeerId, why: &Gone) {
        self.hca.peer_down(u64::from(peer.0), &why.to_string());
    }

    fn import(&self, handle: &[u8], fd: Option<OwnedFd>, len: u64) -> Result<DeviceRegion, String> {
        match &self.importer {
            Some(importer) => importer.import(handle, fd, len),
            None => Err("this process imports no device memory".into()),
        }
    }
}

/// After the link is gone nothing is exported, and nobody is left to wait for.
struct WeakExporter(Weak<Shm>);

impl Exporter for WeakExporter {
    fn registering(&self, region: &Region, gives_up: GivesUp<'_>) -> Result<u32, String> {
        self.0
            .upgrade()
            .map_or(Ok(0), |shm| shm.registering(region, gives_up))
    }

    fn registered(&self, key: Key, region: &Region) {
        if let Some(shm) = self.0.upgrade() {
            shm.registered(key, region);
        }
    }

    fn abandoned(&self, number: u32) {
        if let Some(shm) = self.0.upgrade() {
            shm.abandoned(number);
        }
    }

    fn revoked(&self, key: Key) -> u64 {
        self.0.upgrade().map_or(0, |shm| shm.revoked(key))
    }

    fn released(&self, ticket: u64) -> bool {
        self.0.upgrade().is_none_or(|shm| shm.released(ticket))
    }
}

impl Shm {
    /// Gives an HCA its link: regions registered from now on in sealed memfds ([`super::SharedRegion`]) are shared with
    /// its peers. Once for each HCA, before it registers what is to be shared.
    ///
    /// # Errors
    /// [`ShmError::InUse`] when the HCA has a link, else as [`Shm::new`].
    pub fn attach(
        hca: &Hca,
        config: ShmConfig,
        importer: Option<Arc<dyn DeviceImporter>>,
    ) -> Result<Arc<Self>> {
        let memory = hca.table_memory();
        let fd = memory.fd().try_clone_to_owned();
        let fd = fd.map_err(|e| {
            ShmError::os(
                "dup of the key table's memfd",
                format!("{} bytes", memory.bytes()),
                e,
            )
        })?;
        let table = TableExport {
            fd: Arc::new(fd),
            len: memory.bytes() as u64,
        };
        let shm = Arc::new(Self::new(
            config,
            table,
            Arc::new(OfHca {
                hca: hca.clone(),
                importer,
            }),
        )?);
        hca.set_exporter(Arc::new(WeakExporter(Arc::downgrade(&shm))))
            .map_err(|_| ShmError::InUse {
                what: "link",
                value: "of this HCA".into(),
                remedy: "attach one link to each HCA",
            })?;
        Ok(shm)
    }
}
