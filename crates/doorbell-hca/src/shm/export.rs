//! What this process shares: regions by number, counted by the keys that name them.
//!
//! Several keys may lie in one memfd; peers map it once. Engines reach this through [`Exporter`]: a registration waits
//! until every connected peer has mapped the region (so that its key works at once), a deregistration until every peer has
//! let go. A peer that is confined to a protection domain hears of its regions only: no other's keys work over its queue
//! pairs, and nobody waits for it in vain.

use std::{
    collections::{BTreeSet, HashMap},
    os::fd::AsFd,
    sync::{Arc, PoisonError},
    time::Instant,
};

use doorbell_wire::Key;
use rustix::fs::fstat;

use super::{
    control::{ASK, Command, Latch, Shm},
    proto::{MAX_HANDLE, RegionKind},
    region::check_memfd,
    session::Offer,
};
use crate::mem::{Access, Exporter, GivesUp, Memory, Region};

/// What makes two registrations share one region.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Identity {
    Memfd {
        dev: u64,
        ino: u64,
        writable: bool,
        pd: u32,
    },
    Device {
        addr: u64,
        len: usize,
        dma: usize,
        pd: u32,
    },
}

struct Export {
    identity: Identity,
    keys: usize,
    mapped: Arc<Latch>,
}

/// The regions that this process shares.
#[derive(Default)]
pub(crate) struct Exports {
    regions: HashMap<u32, Export>,
    by_identity: HashMap<Identity, u32>,
    by_key: HashMap<u32, u32>,
    next: u32,
    free: BTreeSet<u32>,
    next_ticket: u64,
    /// Tickets whose peers have not all let go, with the region number to be freed then.
    waiting: HashMap<u64, Option<u32>>,
}

impl Exports {
    /// The control thread: every peer has let go.
    pub(crate) fn released(&mut self, ticket: u64) {
        if let Some(Some(id)) = self.waiting.remove(&ticket) {
            self.free.insert(id);
        }
    }

    fn drop_key(&mut self, id: u32) -> bool {
        let Some(export) = self.regions.get_mut(&id) else {
            return false;
        };
        export.keys -= 1;
        if export.keys > 0 {
            return false;
        }
        let identity = export.identity;
        self.regions.remove(&id);
        self.by_identity.remove(&identity);
        true
    }
}

fn identity(region: &Region) -> Result<Option<Identity>, String> {
    let writes = (Access::REMOTE_WRITE | Access::REMOTE_ATOMIC).bits();
    let remote = writes | Access::REMOTE_READ.bits();
    if region.access.bits() & remote == 0 {
        return Ok(None);
    }
    Ok(match &region.memory {
        Memory::Host { .. } => None,
        Memory::Shared {
            memfd, len, offset, ..
        } => {
            let stat = fstat(memfd).map_err(|e| format!("fstat of the region's memfd: {e}"))?;
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            check_memfd(memfd.as_fd(), size).map_err(|refusal| refusal.to_string())?;
            if offset.checked_add(*len as u64).is_none_or(|end| end > size) {
                return Err(format!(
                    "bytes {offset:#x} to {offset:#x}+{len:#x} are not inside its memfd of {size:#x} bytes"
                ));
            }
            Some(Identity::Memfd {
                dev: stat.st_dev,
                ino: stat.st_ino,
                writable: region.access.bits() & writes != 0,
                pd: region.pd,
            })
        }
        Memory::Device { addr, len, dma, .. } => Some(Identity::Device {
            addr: *addr,
            len: *len,
            dma: Arc::as_ptr(dma).cast::<()>() as usize,
            pd: region.pd,
        }),
    })
}

fn offer(id: u32, identity: Identity, region: &Region) -> Result<Option<Offer>, String> {
    match (&region.memory, identity) {
        (Memory::Shared { memfd, .. }, Identity::Memfd { writable, .. }) => {
            let len = fstat(memfd)
                .map_err(|e| format!("fstat of the region's memfd: {e}"))?
                .st_size as u64;
            Ok(Some(Offer {
                id,
                pd: region.pd,
                len,
                kind: RegionKind::Host { writable },
                fd: Some(Arc::clone(memfd)),
            }))
        }
        (Memory::Device { addr, len, dma, .. }, _) => match dma.export(*addr, *len as u64) {
            Ok(handle) if handle.bytes.len() <= MAX_HANDLE => {
                let kind = RegionKind::Device {
                    handle: handle.bytes,
                    fd: handle.fd.is_some(),
                    addr: *addr,
                };
                Ok(Some(Offer {
                    id,
                    pd: region.pd,
                    len: *len as u64,
                    kind,
                    fd: handle.fd,
                }))
            }
            Ok(handle) => Err(format!(
                "device handle of {} bytes, at most {MAX_HANDLE} can be sent",
                handle.bytes.len()
            )),
            Err(why) => {
                tracing::info!(
                    "device memory at {addr:#x} is not reachable over shared memory: {why}"
                );
                Ok(None)
            }
        },
        _ => Ok(None),
    }
}

impl Exporter for Shm {
    fn registering(&self, region: &Region, gives_up: GivesUp<'_>) -> Result<u32, String> {
        if self.shared.is_down() {
            return Err("the control thread of the shared memory link has ended".into());
        }
        let Some(identity) = identity(region)? else {
            return Ok(0);
        };
        let (id, mapped) = {
            let mut exports = self
                .shared
                .exports
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(&id) = exports.by_identity.get(&identity)
                && let Some(export) = exports.regions.get_mut(&id)
            {
                export.keys += 1;
                (id, Arc::clone(&export.mapped))
            } else {
                let id = exports.free.first().copied().unwrap_or(exports.next + 1);
                let Some(offer) = offer(id, identity, region)? else {
                    return Ok(0);
                };
                if !exports.free.remove(&id) {
                    exports.next = id;
                }
                let mapped = Arc::new(Latch::default());
                exports.regions.insert(
                    id,
                    Export {
                        identity,
                        keys: 1,
                        mapped: Arc::clone(&mapped),
                    },
                );
                exports.by_identity.insert(identity, id);
                // In the lock: peers hear of regions in the order in which they come and go.
                self.shared
                    .command(Command::Add(offer, Arc::clone(&mapped)));
                (id, mapped)
            }
        };
        // A peer that does not answer is cut off after `step`, which counts as an answer; the rest is for a busy machine.
        let timeout = self.shared.config.step * 2;
        let deadline = crate::deadline(timeout);
        let why = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if mapped.wait(left.min(ASK)) {
                return Ok(id);
            }
            if let Some(why) = gives_up() {
                break why;
            }
            if left <= ASK {
                break format!("{timeout:.1?} have passed; look whether it hangs");
            }
        };
        // Before those who map it later are told to let go of it.
        let missing = mapped.to_string();
        self.abandoned(id);
        Err(format!("{missing} has not mapped the region: {why}"))
    }

    fn registered(&self, key: Key, region: &Region) {
        let mut exports = self
            .shared
            .exports
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Ok(Some(identity)) = identity(region)
            && let Some(&id) = exports.by_identity.get(&identity)
        {
            exports.by_key.insert(key.0, id);
        }
    }

    fn revoked(&self, key: Key) -> u64 {
        let mut exports = self
            .shared
            .exports
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let ticket = exports.next_ticket;
        exports.next_ticket += 1;
        if let Some(region) = exports.by_key.remove(&key.0) {
            let gone = exports.drop_key(region);
            exports.waiting.insert(ticket, gone.then_some(region));
            self.shared.command(Command::Revoke {
                ticket,
                region,
                gone,
            });
        }
        ticket
    }

    fn released(&self, ticket: u64) -> bool {
        !self
            .shared
            .exports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .waiting
            .contains_key(&ticket)
    }

    fn abandoned(&self, id: u32) {
        let mut exports = self
            .shared
            .exports
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if exports.drop_key(id) {
            let ticket = exports.next_ticket;
            exports.next_ticket += 1;
            exports.waiting.insert(ticket, Some(id));
            self.shared.command(Command::Revoke {
                ticket,
                region: id,
                gone: true,
            });
        }
    }
}
