//! Our own regions: the key table together with what only this process knows, the addresses.
//! Engines resolve keys here without locks; registering and deregistering go through one mutex.

use core::sync::atomic::{AtomicPtr, Ordering};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use doorbell_wire::Key;

use super::memfd::TableMemory;
use super::table::{MemoryKind, NewEntry, TableView};
use super::{Access, End, Memory, Place, Region, Span};
use crate::fault::Fault;

/// The key table of one HCA.
#[derive(Debug)]
pub(crate) struct Regions {
    memory: TableMemory,
    view: TableView,
    /// Per slot: the region, valid while its key is, and until the grace period after its revocation is over.
    local: Box<[AtomicPtr<Region>]>,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    /// Never used so far: `fresh..`.
    fresh: u32,
    /// Used and free again, oldest first, so that a stale key stays recognisable for long.
    free: VecDeque<u32>,
    /// Slots in use or leaked.
    used: u32,
}

impl Regions {
    pub(crate) fn new(log_slots: u32) -> io::Result<Self> {
        let memory = TableMemory::new(log_slots)?;
        let view = memory.view();
        let local = (0..view.slots())
            .map(|_| AtomicPtr::new(core::ptr::null_mut()))
            .collect();
        Ok(Self {
            memory,
            view,
            local,
            slots: Mutex::default(),
        })
    }

    pub(crate) fn memory(&self) -> &TableMemory {
        &self.memory
    }

    /// The view that engines keep; it is used only while the HCA, which owns the memory, lives.
    pub(crate) fn view(&self) -> TableView {
        self.view
    }

    pub(crate) fn used(&self) -> u32 {
        self.slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .used
    }

    /// Gives a region a key; `None` when every slot is taken.
    pub(crate) fn insert(
        &self,
        region: &Arc<Region>,
        shared_number: u32,
        random: u32,
    ) -> Option<Key> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = if slots.fresh < self.view.slots() {
            slots.fresh += 1;
            slots.fresh - 1
        } else {
            slots.free.pop_front()?
        };
        slots.used += 1;
        self.local[slot as usize].store(Arc::as_ptr(region).cast_mut(), Ordering::Release);
        let offset = if let Memory::Shared { offset, .. } = region.memory {
            offset
        } else {
            0
        };
        let entry = NewEntry {
            pd: region.pd,
            access: region.access,
            base: region.base,
            len: region.memory.len() as u64,
            region: shared_number,
            kind: region.memory.kind(),
            offset,
        };
        Some(Key(self.view.publish(slot, random, &entry)))
    }

    /// Makes the key invalid. Its slot stays taken until [`Self::release`].
    pub(crate) fn revoke(&self, key: Key) -> bool {
        self.view.revoke(key.0)
    }

    /// Frees the slot of a revoked key. Only after the grace period: engines may have read the slot's region pointer before.
    pub(crate) fn release(&self, key: Key) {
        let slot = key.0 & (self.view.slots() - 1);
        self.local[slot as usize].store(core::ptr::null_mut(), Ordering::Release);
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.used -= 1;
        slots.free.push_back(slot);
    }

    /// Where the bytes of a key are, rights checked.
    ///
    /// # Safety
    /// The caller is an engine between its grace acknowledgements, or the owner of the region: the answer is used only before the next one.
    pub(crate) unsafe fn resolve(
        &self,
        end: End,
        key: u32,
        pd: u32,
        need: Access,
    ) -> Result<Span, Fault> {
        // SAFETY: passed on.
        let region = unsafe { self.region(end, key, pd, need) }?;
        let place = match &region.memory {
            Memory::Host { ptr, .. } | Memory::Shared { ptr, .. } => Place::Host(*ptr),
            Memory::Device { addr, dma, .. } => Place::Device {
                addr: *addr,
                dma: Arc::clone(dma),
            },
        };
        // Base and length come from the region itself, not from the table, which lies in memory with a descriptor that others hold.
        Ok(Span {
            base: region.base,
            len: region.memory.len() as u64,
            place,
            ordered: region.access.contains(Access::ORDERED),
        })
    }

    /// The region of a key, rights checked.
    ///
    /// # Safety
    /// As for [`Self::resolve`].
    #[inline(always)]
    pub(crate) unsafe fn region(
        &self,
        end: End,
        key: u32,
        pd: u32,
        need: Access,
    ) -> Result<&Region, Fault> {
        let found = self.view.lookup(key, pd, need).map_err(|e| end.fault(e))?;
        let region = self.local[found.slot as usize].load(Ordering::Acquire);
        // SAFETY: the key was valid just now, so the pointer is its region's: it was stored before the key was published, and is replaced and
        // the region freed only after a grace period that this engine has not acknowledged yet.
        let Some(region) = (unsafe { region.as_ref() }) else {
            return Err(end.fault(super::table::LookupError::Revoked));
        };
        debug_assert!(
            found.kind != MemoryKind::Device || matches!(region.memory, Memory::Device { .. })
        );
        Ok(region)
    }
}

/// Checks a registration that was asked for; returns the WQE address of the first byte.
pub(crate) fn check(config: &super::MrConfig) -> Result<u64, crate::HcaError> {
    use super::Addressing;
    let bad = |what: String| Err(crate::HcaError::BadRegion { what });
    let len = config.memory.len() as u64;
    if len == 0 {
        return bad("a region of zero bytes has nothing to protect; give at least one byte".into());
    }
    if config.memory.addr().checked_add(len).is_none() {
        return bad(format!(
            "{:?} goes past the end of the address space",
            config.memory
        ));
    }
    let base = match config.addressing {
        Addressing::Zero => 0,
        Addressing::Address => config.memory.addr(),
        Addressing::At(base) => base,
    };
    if base.checked_add(len).is_none() {
        return bad(format!(
            "WQE addresses {base:#x} and {len:#x} bytes on go past 2^64; choose a lower base"
        ));
    }
    Ok(base)
}
