//! A peer process as this one sees it: its key table, its mapped regions, and whether it is still there.
//!
//! [`PeerView`] is what engines use: lookups without locks, answers checked against what is really mapped. Regions
//! come and go by the control thread, which waits for a grace period of the engines before it unmaps.

use std::{
    any::Any,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering},
    },
};

use super::{
    error::{Refusal, RefusalCode},
    mailbox::MailboxView,
    region::Mapping,
};
use crate::{
    dma::{
        Dma, DmaOp, Staging, Words,
        words::{ALIKE, BYTES},
    },
    fault::Fault,
    mem::{
        Access, End, Place, Span,
        table::{MemoryKind, TableView},
    },
    raw::Shared,
};

/// A region of a peer in this process.
pub(crate) enum PeerRegion {
    /// A mapped memfd.
    Host {
        /// The mapping.
        map: Mapping,
        /// Mapped for writing?
        writable: bool,
    },
    /// Imported device memory.
    Device(DeviceRegion),
}

/// Device memory of a peer, imported into this process.
pub struct DeviceRegion {
    /// Its address here.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The copy engine that reaches it.
    pub dma: Arc<dyn Dma>,
    /// Dropped when the region is no longer used.
    pub keep: Arc<dyn Any + Send + Sync>,
}

/// The regions of a peer by number. Readers are engines between their grace acknowledgements; the one writer
/// is the control thread.
struct RegionMap {
    slots: Box<[AtomicPtr<PeerRegion>]>,
}

impl RegionMap {
    fn new(count: u32) -> Self {
        Self {
            slots: (0..count)
                .map(|_| AtomicPtr::new(std::ptr::null_mut()))
                .collect(),
        }
    }

    fn set(&self, id: u32, region: Option<Box<PeerRegion>>) -> Option<Box<PeerRegion>> {
        let new = region.map_or(std::ptr::null_mut(), Box::into_raw);
        let old = self.slots[id as usize].swap(new, Ordering::AcqRel);
        // SAFETY: what lies in a slot came out of `Box::into_raw` above, and the swap took it out.
        (!old.is_null()).then(|| unsafe { Box::from_raw(old) })
    }
}

impl Drop for RegionMap {
    fn drop(&mut self) {
        for id in 0..self.slots.len() {
            drop(self.set(id as u32, None));
        }
    }
}

/// A peer's tables, mapped.
pub struct PeerView {
    table: TableView,
    _table_map: Mapping,
    mailbox: Arc<MailboxView>,
    regions: RegionMap,
    generation: AtomicU64,
    down: AtomicBool,
    words: Arc<Words>,
}

/// The copy engine of an imported region: the engine that reaches it, and the owner's locks.
struct PeerDma {
    engine: Arc<dyn Dma>,
    words: Arc<Words>,
}

impl Dma for PeerDma {
    fn submit(&self, ops: &[DmaOp], steps: &[usize]) -> Result<u64, String> {
        self.engine.submit(ops, steps)
    }
    fn poll(&self, ticket: u64) -> Result<bool, String> {
        self.engine.poll(ticket)
    }
    fn ordered(&self) -> bool {
        self.engine.ordered()
    }
    fn max_batch(&self) -> usize {
        self.engine.max_batch()
    }
    fn max_in_flight(&self) -> usize {
        self.engine.max_in_flight()
    }
    fn device(&self) -> Option<u64> {
        self.engine.device()
    }
    fn reaches_device(&self, other: &dyn Dma) -> bool {
        self.engine.reaches_device(other)
    }
    fn reaches_host(&self, addr: u64, len: u64) -> bool {
        self.engine.reaches_host(addr, len)
    }
    fn staging(&self, len: usize) -> Result<Staging, String> {
        self.engine.staging(len)
    }
    fn cpu_map(&self, addr: u64, len: u64) -> Option<NonNull<u8>> {
        self.engine.cpu_map(addr, len)
    }
    fn identity(&self) -> usize {
        self.engine.identity()
    }
    fn words(&self) -> Option<Arc<Words>> {
        Some(Arc::clone(&self.words))
    }
}

impl PeerView {
    /// Most regions a peer may share; its table may be larger.
    const MAX_REGIONS: u32 = 1 << 16;

    pub(crate) fn new(
        table_map: Mapping,
        mailbox_map: Mapping,
        words_map: Mapping,
        holder: u32,
    ) -> Result<Self, Refusal> {
        // SAFETY: a mapping is page aligned, readable for its whole length, sealed in size, and lives in the same value
        // as the view.
        let table = unsafe { TableView::open(table_map.ptr(), table_map.len()) }
            .map_err(|e| Refusal::new(RefusalCode::Layout, e.to_string()))?;
        let mailbox = Arc::new(MailboxView::new(mailbox_map)?);
        let (ptr, len) = (words_map.ptr(), words_map.len());
        let locks = Staging {
            ptr,
            len,
            keep: Arc::new(words_map),
        };
        let words = Words::new(locks, holder).ok_or_else(|| {
            Refusal::new(
                RefusalCode::Layout,
                format!("locks of {len} bytes, at least {BYTES} are needed"),
            )
        })?;
        let regions = RegionMap::new(table.slots().saturating_add(1).min(Self::MAX_REGIONS));
        Ok(Self {
            table,
            _table_map: table_map,
            mailbox,
            regions,
            generation: AtomicU64::new(0),
            down: AtomicBool::new(false),
            words: Arc::new(words),
        })
    }

    /// Region numbers are below this.
    pub(crate) fn max_regions(&self) -> u32 {
        self.regions.slots.len() as u32
    }

    pub(crate) fn mailbox(&self) -> &Arc<MailboxView> {
        &self.mailbox
    }

    /// Puts the owner's locks before an imported region, which the owner has at `addr`.
    pub(crate) fn guard(&self, device: DeviceRegion, addr: u64) -> Result<DeviceRegion, Refusal> {
        if (device.addr ^ addr) & ALIKE != 0 {
            let text = format!(
                "device memory at {addr:#x} was imported to {:#x}: its words would have other locks",
                device.addr
            );
            return Err(Refusal::new(RefusalCode::Map, text));
        }
        let dma = Arc::new(PeerDma {
            engine: device.dma,
            words: Arc::clone(&self.words),
        });
        Ok(DeviceRegion { dma, ..device })
    }

    pub(crate) fn insert(&self, id: u32, region: PeerRegion) {
        drop(self.regions.set(id, Some(Box::new(region))));
    }

    /// Takes a region out of sight. The caller keeps it until a grace period has passed.
    pub(crate) fn remove(&self, id: u32) -> Option<Box<PeerRegion>> {
        let region = self.regions.set(id, None);
        self.generation.fetch_add(1, Ordering::Release);
        region
    }

    pub(crate) fn set_down(&self) {
        self.down.store(true, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Is the peer gone?
    #[inline(always)]
    pub fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire)
    }

    /// While both words are the same, cached answers of [`PeerView::resolve`] are valid. The peer's word changes as soon as
    /// it revokes a key; ours before anything of the peer is unmapped, whatever the peer does with its word.
    #[inline(always)]
    pub fn stamp(&self) -> (u64, u64) {
        (
            self.table.epoch().load(Ordering::Acquire),
            self.generation.load(Ordering::Acquire),
        )
    }

    /// Where the bytes behind a key of the peer are in this process. `pd` is the protection domain of the peer's QP.
    ///
    /// # Errors
    /// The fault of the table for an unknown, revoked, foreign or insufficient key; [`Fault::PeerDead`] when the peer is gone;
    /// [`Fault::Unsupported`] for memory that this process cannot reach; [`Fault::BadRkey`] for an entry that claims more
    /// than was mapped (the peer lies).
    ///
    /// # Safety
    /// The caller is an engine between its grace acknowledgements: it uses the answer only before the next one.
    pub unsafe fn resolve(&self, key: u32, pd: u32, need: Access) -> Result<Span, Fault> {
        if self.is_down() {
            return Err(Fault::PeerDead);
        }
        let found = self
            .table
            .lookup(key, pd, need)
            .map_err(|e| End::Remote.fault(e))?;
        let region = match self.regions.slots.get(found.region as usize) {
            Some(slot) if found.region != 0 => slot.load(Ordering::Acquire),
            _ => return Err(Fault::Unsupported),
        };
        // SAFETY: a region is freed only after a grace period that began when it was taken out of its slot; the caller
        // promises not to have acknowledged one since.
        let Some(region) = (unsafe { region.as_ref() }) else {
            return Err(Fault::Unsupported);
        };
        let (mapped, place) = match (region, found.kind) {
            (PeerRegion::Host { map, writable }, MemoryKind::Shared) => {
                if !writable
                    && need.bits() & (Access::REMOTE_WRITE | Access::REMOTE_ATOMIC).bits() != 0
                {
                    // The table grants what the mapping cannot do: without this check a store would fault.
                    return Err(Fault::RkeyAccess);
                }
                let inside = found
                    .offset
                    .checked_add(found.len)
                    .is_some_and(|end| end <= map.len() as u64);
                if !inside {
                    return Err(Fault::BadRkey);
                }
                // SAFETY: `offset <= len` of the mapping was just checked.
                let ptr = unsafe { Shared::new(map.ptr()).byte_add(found.offset as usize) };
                (found.len, Place::Host(ptr))
            }
            (PeerRegion::Device(device), MemoryKind::Device) => {
                let inside = found
                    .offset
                    .checked_add(found.len)
                    .is_some_and(|end| end <= device.len);
                let Some(addr) = device.addr.checked_add(found.offset).filter(|_| inside) else {
                    return Err(Fault::BadRkey);
                };
                (
                    found.len,
                    Place::Device {
                        addr,
                        dma: Arc::clone(&device.dma),
                    },
                )
            }
            _ => return Err(Fault::BadRkey),
        };
        Ok(Span {
            base: found.base,
            len: mapped,
            place,
            ordered: found.ordered,
        })
    }
}

#[cfg(all(test, not(miri)))]
pub(crate) mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::{
        mem::TableMemory,
        mem::table::{NewEntry, TableHeader},
        shm::{mailbox::Mailbox, region::SharedRegion},
    };

    fn view(table: &TableMemory) -> PeerView {
        let mailbox = Mailbox::new(0).unwrap();
        let mailbox = Mapping::of_peer(
            mailbox.region().memfd().as_fd(),
            mailbox.region().len() as u64,
            true,
        )
        .unwrap();
        let table = Mapping::of_peer(table.fd(), table.bytes() as u64, false).unwrap();
        PeerView::new(table, mailbox, locks(), 1).unwrap()
    }

    fn locks() -> Mapping {
        let locks = SharedRegion::new(BYTES).unwrap();
        Mapping::of_peer(locks.memfd().as_fd(), locks.len() as u64, true).unwrap()
    }

    fn entry(region: u32, len: u64, offset: u64, kind: MemoryKind) -> NewEntry {
        NewEntry {
            pd: 3,
            access: Access::ALL,
            base: 0x1000,
            len,
            region,
            kind,
            offset,
        }
    }

    fn host(region: &SharedRegion, writable: bool) -> PeerRegion {
        let map = Mapping::of_peer(region.memfd().as_fd(), region.len() as u64, writable).unwrap();
        PeerRegion::Host { map, writable }
    }

    fn resolve(view: &PeerView, key: u32, pd: u32, need: Access) -> Result<Span, Fault> {
        // SAFETY: single-threaded tests: nothing is taken out while an answer is used.
        unsafe { view.resolve(key, pd, need) }
    }

    #[test]
    fn a_key_leads_to_the_mapped_bytes() {
        let table = TableMemory::new(4).unwrap();
        let region = SharedRegion::new(8192).unwrap();
        let view = view(&table);
        view.insert(1, host(&region, true));
        let key = table
            .view()
            .publish(2, 0xabcd_0000, &entry(1, 4096, 4096, MemoryKind::Shared));
        let span = resolve(&view, key, 3, Access::REMOTE_WRITE).unwrap();
        assert_eq!((span.base, span.len), (0x1000, 4096));
        let Place::Host(ptr) = span.place else {
            panic!("host memory")
        };
        // SAFETY: inside both mappings, no other thread.
        unsafe {
            ptr.store(9);
            assert_eq!(region.ptr().as_ptr().add(4096).read_volatile(), 9);
        }
        assert_eq!(
            resolve(&view, key, 4, Access::REMOTE_WRITE).unwrap_err(),
            Fault::RkeyPd
        );
        assert_eq!(
            resolve(&view, key ^ 0x100, 3, Access::NONE).unwrap_err(),
            Fault::BadRkey
        );
        let stamp = view.stamp();
        table.view().revoke(key);
        assert_ne!(view.stamp(), stamp);
        assert_eq!(
            resolve(&view, key, 3, Access::REMOTE_WRITE).unwrap_err(),
            Fault::RkeyRevoked
        );
    }

    #[test]
    fn an_entry_that_lies_never_leads_outside_the_mapping() {
        let table = TableMemory::new(4).unwrap();
        let region = SharedRegion::new(4096).unwrap();
        let view = view(&table);
        view.insert(1, host(&region, false));
        let refused = |slot, e: NewEntry, need| {
            let key = table.view().publish(slot, 0x7700_0000, &e);
            resolve(&view, key, 3, need).map(|_| ())
        };
        let read = Access::REMOTE_READ;
        assert_eq!(
            refused(0, entry(1, 4096, 0, MemoryKind::Shared), read),
            Ok(())
        );
        assert_eq!(
            refused(
                1,
                entry(1, 4096, 0, MemoryKind::Shared),
                Access::REMOTE_WRITE
            ),
            Err(Fault::RkeyAccess)
        );
        assert_eq!(
            refused(
                2,
                entry(1, 4096, 0, MemoryKind::Shared),
                Access::REMOTE_ATOMIC
            ),
            Err(Fault::RkeyAccess)
        );
        assert_eq!(
            refused(3, entry(1, 4096, 1, MemoryKind::Shared), read),
            Err(Fault::BadRkey)
        );
        assert_eq!(
            refused(4, entry(1, u64::MAX, 2, MemoryKind::Shared), read),
            Err(Fault::BadRkey)
        );
        assert_eq!(
            refused(5, entry(1, 1, u64::MAX, MemoryKind::Shared), read),
            Err(Fault::BadRkey)
        );
        assert_eq!(
            refused(6, entry(1, 64, 0, MemoryKind::Device), read),
            Err(Fault::BadRkey)
        );
        assert_eq!(
            refused(7, entry(0, 64, 0, MemoryKind::Host), read),
            Err(Fault::Unsupported)
        );
        assert_eq!(
            refused(8, entry(2, 64, 0, MemoryKind::Shared), read),
            Err(Fault::Unsupported)
        );
        assert_eq!(
            refused(9, entry(u32::MAX, 64, 0, MemoryKind::Shared), read),
            Err(Fault::Unsupported)
        );
    }

    #[test]
    fn taking_a_region_out_and_going_down_change_the_stamp() {
        let table = TableMemory::new(4).unwrap();
        let region = SharedRegion::new(4096).unwrap();
        let view = view(&table);
        view.insert(1, host(&region, true));
        let key = table
            .view()
            .publish(0, 0x7700_0000, &entry(1, 64, 0, MemoryKind::Shared));
        let stamp = view.stamp();
        assert!(view.remove(1).is_some());
        assert_ne!(
            view.stamp(),
            stamp,
            "although the peer's epoch word did not change"
        );
        assert_eq!(
            resolve(&view, key, 3, Access::REMOTE_READ).unwrap_err(),
            Fault::Unsupported
        );
        let stamp = view.stamp();
        view.set_down();
        assert_ne!(view.stamp(), stamp);
        assert_eq!(
            resolve(&view, key, 3, Access::REMOTE_READ).unwrap_err(),
            Fault::PeerDead
        );
    }

    #[test]
    fn a_table_that_is_none_is_refused() {
        let fake = SharedRegion::new(8192).unwrap();
        let mailbox = Mailbox::new(0).unwrap();
        let map =
            |r: &SharedRegion, w| Mapping::of_peer(r.memfd().as_fd(), r.len() as u64, w).unwrap();
        let refusal = PeerView::new(map(&fake, false), map(mailbox.region(), true), locks(), 1)
            .map(|_| ())
            .unwrap_err();
        assert_eq!(refusal.code, RefusalCode::Layout);
        const { assert!(size_of::<TableHeader>() == 64) };
    }
}
