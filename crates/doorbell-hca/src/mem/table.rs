//! The key table: 32-bit keys to memory regions, in a fixed layout that a peer process can map read-only.
//! A key is a slot number (low bits) and a random tag; the whole 32 bits are compared, so a key dies with its registration.
//! Readers take no lock: a slot is filled before its key is released and is not reused until every reader has moved on.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::Access;

/// First word of a table: "DBKEYTB" and the format's number in the last byte.
pub const TABLE_MAGIC: u64 = u64::from_le_bytes(*b"DBKEYTB\x01");
/// Version of the layout; a table of another version is refused.
pub const TABLE_VERSION: u32 = 1;

/// Largest number of slots: 2^20 keys leave a tag of 12 bits.
pub const MAX_LOG_SLOTS: u32 = 20;

/// The first 64 bytes of a table.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct TableHeader {
    /// [`TABLE_MAGIC`].
    pub magic: AtomicU64,
    /// [`TABLE_VERSION`].
    pub version: AtomicU32,
    /// Bytes of an [`Entry`].
    pub entry_bytes: AtomicU32,
    /// Base-two logarithm of the number of slots.
    pub log_slots: AtomicU32,
    reserved: AtomicU32,
    /// Changes whenever a key is revoked: whoever caches a resolution compares it before each batch.
    pub epoch: AtomicU64,
    padding: [AtomicU64; 4],
}

/// One slot: a cache line.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Entry {
    /// The key while it is valid, else 0.
    key: AtomicU32,
    /// The latest key of this slot, kept after revocation so that its use can be told from a made-up key.
    last_key: AtomicU32,
    /// Protection domain.
    pd: AtomicU32,
    /// [`Access`] bits.
    access: AtomicU32,
    /// WQE address of the first byte: 0 for zero-based keys.
    base: AtomicU64,
    /// Bytes.
    len: AtomicU64,
    /// Which shared mapping the bytes lie in; 0 if a peer cannot map them.
    region: AtomicU32,
    /// [`MemoryKind`] as a number.
    kind: AtomicU32,
    /// Offset of the first byte in that mapping.
    offset: AtomicU64,
    padding: [AtomicU64; 2],
}

const _: () = {
    assert!(size_of::<TableHeader>() == 64 && size_of::<Entry>() == 64);
    assert!(core::mem::offset_of!(TableHeader, epoch) == 24);
    assert!(core::mem::offset_of!(Entry, base) == 16 && core::mem::offset_of!(Entry, offset) == 40);
};

/// Where the bytes of a region are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryKind {
    /// Host memory of the owner that peers cannot map.
    Host = 1,
    /// Host memory in a sealed memfd.
    Shared = 2,
    /// GPU memory that the CPU cannot touch: copies go through a DMA engine.
    Device = 3,
}

impl MemoryKind {
    fn from_u32(value: u32) -> Option<Self> {
        match value {
            1 => Some(Self::Host),
            2 => Some(Self::Shared),
            3 => Some(Self::Device),
            _ => None,
        }
    }
}

/// What a slot says, copied out once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Slot number.
    pub slot: u32,
    /// WQE address of the first byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Shared mapping, 0 if none.
    pub region: u32,
    /// Where the bytes are.
    pub kind: MemoryKind,
    /// Offset of the first byte in the shared mapping.
    pub offset: u64,
    /// [`Access::ORDERED`].
    pub ordered: bool,
}

/// Why a key was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupError {
    /// No such key.
    Unknown,
    /// The slot's latest key, which was revoked.
    Revoked,
    /// Another protection domain.
    Pd,
    /// The region does not grant the access.
    Access,
}

/// What a slot is to say.
#[derive(Clone, Copy, Debug)]
pub struct NewEntry {
    /// Protection domain.
    pub pd: u32,
    /// Rights.
    pub access: Access,
    /// WQE address of the first byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Shared mapping, 0 if none.
    pub region: u32,
    /// Where the bytes are.
    pub kind: MemoryKind,
    /// Offset in the shared mapping.
    pub offset: u64,
}

/// Why foreign memory is not a key table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The first word is not [`TABLE_MAGIC`].
    #[error(
        "key table magic is {found:#018x}, expected {TABLE_MAGIC:#018x}: this memory is no key table"
    )]
    Magic {
        /// What was found.
        found: u64,
    },
    /// Another layout.
    #[error(
        "key table version is {found}, this library reads {TABLE_VERSION}: run the same release on both sides"
    )]
    Version {
        /// What was found.
        found: u32,
    },
    /// Sizes that do not fit the mapping.
    #[error(
        "key table claims 2^{log_slots} slots of {entry_bytes} bytes but the mapping has {mapped} bytes"
    )]
    Size {
        /// Slots claimed.
        log_slots: u32,
        /// Slot size claimed.
        entry_bytes: u32,
        /// Bytes mapped.
        mapped: usize,
    },
}

/// A key table somewhere in this address space: our own, or a peer's mapped read-only.
#[derive(Clone, Copy, Debug)]
pub struct TableView {
    header: NonNull<TableHeader>,
    entries: NonNull<Entry>,
    mask: u32,
}

// SAFETY: all fields behind the pointers are atomics; the view itself is two addresses and a mask.
unsafe impl Send for TableView {}
// SAFETY: as for `Send`.
unsafe impl Sync for TableView {}

/// Bytes that a table of 2^`log_slots` slots takes.
pub const fn table_bytes(log_slots: u32) -> usize {
    size_of::<TableHeader>() + (size_of::<Entry>() << log_slots)
}

impl TableView {
    /// Formats zeroed memory as an empty table.
    ///
    /// # Safety
    /// `at` points to [`table_bytes`]`(log_slots)` bytes of zeroed, writable, 64-byte aligned memory that stays mapped as long as the
    /// view (or a copy of it) is used, and `log_slots <= MAX_LOG_SLOTS`.
    pub(crate) unsafe fn format(at: NonNull<u8>, log_slots: u32) -> Self {
        debug_assert!(log_slots <= MAX_LOG_SLOTS);
        // SAFETY: the caller promises the memory; all-zero bytes are valid atomics.
        let header = unsafe { at.cast::<TableHeader>().as_ref() };
        header.version.store(TABLE_VERSION, Ordering::Relaxed);
        header
            .entry_bytes
            .store(size_of::<Entry>() as u32, Ordering::Relaxed);
        header.log_slots.store(log_slots, Ordering::Relaxed);
        header.epoch.store(1, Ordering::Relaxed);
        header.magic.store(TABLE_MAGIC, Ordering::Release);
        Self {
            header: at.cast(),
            // SAFETY: the entries follow the header inside the memory that the caller promised.
            entries: unsafe { at.byte_add(size_of::<TableHeader>()) }.cast(),
            mask: (1 << log_slots) - 1,
        }
    }

    /// Reads a table that somebody else formatted.
    ///
    /// # Errors
    /// [`TableError`] when magic, version or sizes do not fit.
    ///
    /// # Safety
    /// `at` points to `mapped` readable bytes, 64-byte aligned, that stay mapped as long as the view (or a copy of it) is used. Their
    /// contents are not trusted.
    pub unsafe fn open(at: NonNull<u8>, mapped: usize) -> Result<Self, TableError> {
        if mapped < size_of::<TableHeader>() {
            return Err(TableError::Size {
                log_slots: 0,
                entry_bytes: 0,
                mapped,
            });
        }
        // SAFETY: at least a header is mapped, and every field is an atomic.
        let header = unsafe { at.cast::<TableHeader>().as_ref() };
        let found = header.magic.load(Ordering::Acquire);
        if found != TABLE_MAGIC {
            return Err(TableError::Magic { found });
        }
        let found = header.version.load(Ordering::Relaxed);
        if found != TABLE_VERSION {
            return Err(TableError::Version { found });
        }
        let log_slots = header.log_slots.load(Ordering::Relaxed);
        let entry_bytes = header.entry_bytes.load(Ordering::Relaxed);
        if log_slots > MAX_LOG_SLOTS
            || entry_bytes as usize != size_of::<Entry>()
            || table_bytes(log_slots) > mapped
        {
            return Err(TableError::Size {
                log_slots,
                entry_bytes,
                mapped,
            });
        }
        Ok(Self {
            header: at.cast(),
            // SAFETY: checked above: header and all entries lie inside the mapping.
            entries: unsafe { at.byte_add(size_of::<TableHeader>()) }.cast(),
            mask: (1 << log_slots) - 1,
        })
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.mask + 1
    }

    /// The word that changes whenever a key is revoked.
    pub fn epoch(&self) -> &AtomicU64 {
        // SAFETY: the view's promise: header mapped as long as the view is used.
        unsafe { &self.header.as_ref().epoch }
    }

    fn entry(&self, slot: u32) -> &Entry {
        // SAFETY: `slot & mask` is below the number of slots, all of which are mapped.
        unsafe { self.entries.add((slot & self.mask) as usize).as_ref() }
    }

    /// Looks up a key. Never trusts what it reads: the caller checks `region`, `offset` and `len` against its own mapping.
    ///
    /// # Errors
    /// [`LookupError`]: unknown, revoked, wrong protection domain, missing right (in that order).
    pub fn lookup(&self, key: u32, pd: u32, need: Access) -> Result<Found, LookupError> {
        let entry = self.entry(key);
        let unknown = || {
            if key != 0 && entry.last_key.load(Ordering::Relaxed) == key {
                LookupError::Revoked
            } else {
                LookupError::Unknown
            }
        };
        if key == 0 || entry.key.load(Ordering::Acquire) != key {
            return Err(unknown());
        }
        let entry_pd = entry.pd.load(Ordering::Relaxed);
        let access = Access::from_bits(entry.access.load(Ordering::Relaxed));
        let kind = MemoryKind::from_u32(entry.kind.load(Ordering::Relaxed));
        let found = (
            entry.base.load(Ordering::Relaxed),
            entry.len.load(Ordering::Relaxed),
            entry.region.load(Ordering::Relaxed),
            entry.offset.load(Ordering::Relaxed),
        );
        // A slot may be revoked and refilled while it is read (only by an owner that does not wait for us): then the key differs now.
        fence(Ordering::Acquire);
        if entry.key.load(Ordering::Relaxed) != key {
            return Err(unknown());
        }
        let Some(kind) = kind else {
            return Err(LookupError::Unknown);
        };
        if entry_pd != pd {
            return Err(LookupError::Pd);
        }
        if !access.contains(need) {
            return Err(LookupError::Access);
        }
        let (base, len, region, offset) = found;
        Ok(Found {
            slot: key & self.mask,
            base,
            len,
            region,
            kind,
            offset,
            ordered: access.contains(Access::ORDERED),
        })
    }

    /// Fills a free slot and makes its key valid. `tag_bits` supplies randomness; the returned key differs from the slot's latest one.
    pub(crate) fn publish(&self, slot: u32, random: u32, new: &NewEntry) -> u32 {
        let entry = self.entry(slot);
        let slot = slot & self.mask;
        let step = self.mask + 1;
        let mut key = (random & !self.mask) | slot;
        if key == 0 || key == entry.last_key.load(Ordering::Relaxed) {
            key = key.wrapping_add(step);
        }
        if key == 0 {
            key = key.wrapping_add(step);
        }
        entry.pd.store(new.pd, Ordering::Relaxed);
        entry.access.store(new.access.bits(), Ordering::Relaxed);
        entry.base.store(new.base, Ordering::Relaxed);
        entry.len.store(new.len, Ordering::Relaxed);
        entry.region.store(new.region, Ordering::Relaxed);
        entry.kind.store(new.kind as u32, Ordering::Relaxed);
        entry.offset.store(new.offset, Ordering::Relaxed);
        entry.last_key.store(key, Ordering::Relaxed);
        entry.key.store(key, Ordering::Release);
        key
    }

    /// Makes a key invalid and changes the epoch. `false` if it was not valid.
    pub(crate) fn revoke(&self, key: u32) -> bool {
        let was = self
            .entry(key)
            .key
            .compare_exchange(key, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        self.epoch().fetch_add(1, Ordering::Release);
        was
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::memfd::TableMemory;

    fn new_entry() -> NewEntry {
        NewEntry {
            pd: 3,
            access: Access::REMOTE_WRITE,
            base: 0x1000,
            len: 64,
            region: 0,
            kind: MemoryKind::Host,
            offset: 0,
        }
    }

    #[test]
    fn a_key_lives_from_publish_to_revoke() {
        let memory = TableMemory::new(4).expect("table");
        let view = memory.view();
        let key = view.publish(5, 0xabcd_ef00, &new_entry());
        assert_eq!(key & 15, 5);
        let found = view.lookup(key, 3, Access::REMOTE_WRITE).expect("valid");
        assert_eq!((found.slot, found.base, found.len), (5, 0x1000, 64));
        assert_eq!(
            view.lookup(key, 4, Access::REMOTE_WRITE),
            Err(LookupError::Pd)
        );
        assert_eq!(
            view.lookup(key, 3, Access::REMOTE_READ),
            Err(LookupError::Access)
        );
        assert_eq!(
            view.lookup(key ^ 16, 3, Access::REMOTE_WRITE),
            Err(LookupError::Unknown)
        );
        let before = view.epoch().load(Ordering::Relaxed);
        assert!(view.revoke(key));
        assert_ne!(view.epoch().load(Ordering::Relaxed), before);
        assert_eq!(
            view.lookup(key, 3, Access::REMOTE_WRITE),
            Err(LookupError::Revoked)
        );
        let again = view.publish(5, 0xabcd_ef00, &new_entry());
        assert_ne!(again, key, "a slot never gives the same key twice running");
        assert_eq!(view.lookup(0, 3, Access::NONE), Err(LookupError::Unknown));
    }

    #[test]
    fn key_zero_is_never_given() {
        let memory = TableMemory::new(4).expect("table");
        let view = memory.view();
        assert_ne!(view.publish(0, 0, &new_entry()), 0);
        let top = view.publish(0, !0 << 4, &new_entry());
        assert!(view.revoke(top));
        assert_ne!(view.publish(0, !0 << 4, &new_entry()), 0, "wraps past zero");
    }

    #[test]
    fn a_foreign_table_is_checked() {
        let memory = TableMemory::new(4).expect("table");
        let at = memory.ptr();
        let bytes = table_bytes(4);
        // SAFETY: the memory of the table is mapped, aligned and alive.
        unsafe {
            assert!(TableView::open(at, bytes).is_ok());
            assert!(matches!(
                TableView::open(at, bytes - 1),
                Err(TableError::Size { .. })
            ));
            assert!(matches!(
                TableView::open(at, 8),
                Err(TableError::Size { .. })
            ));
            let header = at.cast::<TableHeader>().as_ref();
            header.version.store(9, Ordering::Relaxed);
            assert_eq!(
                TableView::open(at, bytes).err(),
                Some(TableError::Version { found: 9 })
            );
            header.magic.store(1, Ordering::Relaxed);
            assert_eq!(
                TableView::open(at, bytes).err(),
                Some(TableError::Magic { found: 1 })
            );
        }
    }
}
