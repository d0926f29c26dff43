//! The keys a QP used last: a WQE whose key is here costs a compare and a range check, no lookup.
//! Only host memory is kept. Everything is dropped when a table's epoch changes, which is looked at once a turn.

/// One resolved key.
#[derive(Clone, Copy, Debug)]
pub(super) struct CachedKey {
    /// As in the WQE, big-endian. An empty entry has length 0, so nothing fits it.
    pub(super) raw: u32,
    /// WQE address of the first byte.
    pub(super) base: u64,
    /// Bytes.
    pub(super) len: u64,
    /// Where the first byte is.
    pub(super) ptr: *mut u8,
}

impl CachedKey {
    pub(super) const EMPTY: Self = Self {
        raw: 0,
        base: 0,
        len: 0,
        ptr: core::ptr::null_mut(),
    };

    /// The offset of `[addr, addr + len)`, and whether that lies inside.
    #[inline(always)]
    pub(super) fn locate(&self, addr: u64, len: u64) -> (u64, bool) {
        let offset = addr.wrapping_sub(self.base);
        (
            offset,
            len <= self.len && offset <= self.len.wrapping_sub(len),
        )
    }
}

/// What a key is used for: each use needs other rights, so each has its own entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Local, read.
    Source,
    /// Local, written.
    Sink,
    /// Remote, written.
    Write,
    /// Remote, read.
    Read,
    /// Remote, atomics.
    Atomic,
}

/// The keys used last, one per use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys {
    pub(super) source: CachedKey,
    pub(super) write: CachedKey,
    pub(super) sink: CachedKey,
    pub(super) atomic: CachedKey,
    pub(super) read: CachedKey,
}

impl Keys {
    pub(super) const EMPTY: Self = Self {
        source: CachedKey::EMPTY,
        write: CachedKey::EMPTY,
        sink: CachedKey::EMPTY,
        atomic: CachedKey::EMPTY,
        read: CachedKey::EMPTY,
    };

    pub(super) fn entry(&mut self, usage: Use) -> &mut CachedKey {
        match usage {
            Use::Source => &mut self.source,
            Use::Sink => &mut self.sink,
            Use::Write => &mut self.write,
            Use::Read => &mut self.read,
            Use::Atomic => &mut self.atomic,
        }
    }
}
