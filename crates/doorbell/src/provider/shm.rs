//! Ties the shared memory link to the software HCA.
//!
//! The link asks the HCA for grace periods and tells it of peers that died; the HCA tells the link which memory comes and
//! goes. Each holds the other by a thread-safe handle, so one of the two directions is weak.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use doorbell_hca::Hca;
use doorbell_hca::mem::{Exporter, Region};
use doorbell_hca::shm::{DeviceRegion, Gone, Hooks, PeerId, Shm, ShmConfig, ShmError, TableExport};
use doorbell_wire::Key;

use crate::{Error, Result};

/// Starts the link of `hca`, before any region is registered.
pub(super) fn start(hca: &Hca, imports: Arc<dyn Imports>) -> Result<Arc<Shm>> {
    let table = hca.table_memory();
    let fd = table
        .fd()
        .try_clone_to_owned()
        .map_err(|source| Error::Os {
            what: "duplicating the descriptor of the key table",
            source,
        })?;
    let table = TableExport {
        fd: Arc::new(fd),
        len: table.bytes() as u64,
    };
    let shm = Shm::new(
        ShmConfig::default(),
        table,
        Arc::new(Engines {
            hca: hca.clone(),
            imports,
        }),
    )?;
    let shm = Arc::new(shm);
    hca.set_exporter(Arc::new(Exports(Arc::downgrade(&shm))))?;
    Ok(shm)
}

/// How memory of a peer's GPU becomes usable here.
pub(crate) trait Imports: Send + Sync {
    /// See [`Hooks::import`].
    fn import(&self, handle: &[u8], fd: Option<OwnedFd>, len: u64) -> Result<DeviceRegion, String>;
}

struct Engines {
    hca: Hca,
    imports: Arc<dyn Imports>,
}

impl Hooks for Engines {
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
        self.imports.import(handle, fd, len)
    }
}

/// What the HCA holds: a link that ends with the device, not with the HCA.
struct Exports(Weak<Shm>);

impl Exporter for Exports {
    fn registering(&self, region: &Region) -> Result<u32, String> {
        self.0.upgrade().map_or_else(
            || Err(ShmError::Down.to_string()),
            |shm| shm.registering(region),
        )
    }

    fn abandoned(&self, number: u32) {
        if let Some(shm) = self.0.upgrade() {
            shm.abandoned(number);
        }
    }

    fn registered(&self, key: Key, region: &Region) {
        if let Some(shm) = self.0.upgrade() {
            shm.registered(key, region);
        }
    }

    fn revoked(&self, key: Key) -> u64 {
        self.0.upgrade().map_or(0, |shm| shm.revoked(key))
    }

    fn released(&self, ticket: u64) -> bool {
        // A link that has ended has said goodbye to its peers: nobody can be using anything.
        self.0.upgrade().is_none_or(|shm| shm.released(ticket))
    }
}
