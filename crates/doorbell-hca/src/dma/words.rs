//! Who may change a word of device memory: atomics there are a read, a change and a write, so one at a time.
//!
//! The process that owns the memory has one page of locks; its cores use it, and peers that imported memory of it map the
//! same page. A lock holds the number of its holder, so that the owner can free what a dead peer held. Locks are only ever
//! tried, never waited for.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use super::Staging;

/// Locks in a page. Words are told apart by the low bits of their address, which are the same in every process that maps
/// the memory.
const COUNT: usize = 64;

/// Two addresses that agree in these bits have the same lock.
pub(crate) const ALIKE: u64 = COUNT as u64 * 8 - 1;

/// Bytes that the locks take.
pub(crate) const BYTES: usize = COUNT * 4;

/// The number by which the owner's own cores lock.
const OWNER: u32 = u32::MAX;

/// A page of locks with the number of this process.
pub struct Words {
    memory: Staging,
    holder: u32,
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "locks of device words at {:p}, held as {:#x}",
            self.memory.ptr, self.holder
        )
    }
}

impl Words {
    /// Locks in `memory` (zeroed, at least [`BYTES`], 4-byte aligned, accessed by nobody but as locks).
    pub(crate) fn new(memory: Staging, holder: u32) -> Option<Self> {
        let fits = memory.len >= BYTES && memory.ptr.as_ptr().addr().is_multiple_of(4);
        fits.then_some(Self { memory, holder })
    }

    /// The locks of this process.
    pub(crate) fn own() -> &'static Arc<Self> {
        static OWN: OnceLock<Arc<Words>> = OnceLock::new();
        OWN.get_or_init(|| {
            let memory = own_page().unwrap_or_else(|| {
                Staging::heap(BYTES).unwrap_or_else(|why| unreachable!("{why}"))
            });
            Arc::new(Self {
                memory,
                holder: OWNER,
            })
        })
    }

    fn lock(&self, addr: u64) -> &AtomicU32 {
        let index = (addr & ALIKE) as usize / 8;
        // SAFETY: the index is below COUNT, and `memory` has that many aligned words, alive as long as `self`.
        unsafe { AtomicU32::from_ptr(self.memory.ptr.as_ptr().cast::<u32>().add(index)) }
    }

    /// Takes the lock of a word, if it is free.
    pub(super) fn try_lock(self: &Arc<Self>, addr: u64) -> Option<WordLock> {
        let lock = self.lock(addr);
        lock.compare_exchange(0, self.holder, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        Some(WordLock {
            words: Arc::clone(self),
            addr,
        })
    }

    /// Frees what a holder that is gone held.
    #[cfg_attr(miri, allow(dead_code, reason = "peers need memfds"))]
    pub(crate) fn free_all_of(&self, holder: u32) {
        for index in 0..COUNT as u64 {
            let _ = self.lock(index * 8).compare_exchange(
                holder,
                0,
                Ordering::Release,
                Ordering::Relaxed,
            );
        }
    }
}

/// Frees the lock when dropped.
#[derive(Debug)]
pub(super) struct WordLock {
    words: Arc<Words>,
    addr: u64,
}

impl Drop for WordLock {
    fn drop(&mut self) {
        // Not a plain store: the owner may have taken it away, believing this process dead.
        let lock = self.words.lock(self.addr);
        let _ = lock.compare_exchange(self.words.holder, 0, Ordering::Release, Ordering::Relaxed);
    }
}

/// The page that peers can map, if the system gives one.
#[cfg(not(miri))]
fn own_page() -> Option<Staging> {
    let region = own_region().ok()?;
    Some(Staging {
        ptr: region.ptr(),
        len: region.len(),
        keep: Arc::new(()),
    })
}

#[cfg(miri)]
fn own_page() -> Option<Staging> {
    None
}

/// The memory of this process' locks, to be sent to peers.
#[cfg(miri)]
pub(crate) fn own_region() -> Result<&'static crate::shm::SharedRegion, String> {
    Err("no shared memory there".to_owned())
}

/// The memory of this process' locks, to be sent to peers. What there is none for now there may be later.
///
/// # Errors
/// Why there is none, in words.
#[cfg(not(miri))]
pub(crate) fn own_region() -> Result<&'static crate::shm::SharedRegion, String> {
    static REGION: OnceLock<crate::shm::SharedRegion> = OnceLock::new();
    if let Some(region) = REGION.get() {
        return Ok(region);
    }
    let made = crate::shm::SharedRegion::new(BYTES);
    let made = made.map_err(|e| format!("the locks of device words: {e}"))?;
    // Another thread's, if it was first: everybody has the same.
    Ok(REGION.get_or_init(|| made))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(memory: &Staging, holder: u32) -> Arc<Words> {
        Arc::new(Words::new(memory.clone(), holder).unwrap())
    }

    #[test]
    fn a_word_is_locked_by_one_holder_and_its_alias() {
        let memory = Staging::heap(BYTES).unwrap();
        let (a, b) = (words(&memory, 1), words(&memory, 2));
        let held = a.try_lock(0x1000_0008).unwrap();
        assert!(
            b.try_lock(0x7777_0008).is_none(),
            "same low bits: another mapping of the same word"
        );
        assert!(a.try_lock(0x1000_0008).is_none(), "not reentrant");
        let other = b.try_lock(0x1000_0010).unwrap();
        drop(held);
        drop(b.try_lock(0x1000_0008).unwrap());
        drop(other);
    }

    #[test]
    fn the_owner_frees_what_a_dead_holder_held_and_nothing_else() {
        let memory = Staging::heap(BYTES).unwrap();
        let (dead, alive) = (words(&memory, 1), words(&memory, 2));
        let lost = dead.try_lock(0).unwrap();
        let kept = alive.try_lock(8).unwrap();
        alive.free_all_of(1);
        let again = alive.try_lock(0).unwrap();
        // It was not dead after all: it frees nothing that is not its own any more.
        drop(lost);
        assert!(dead.try_lock(0).is_none() && dead.try_lock(8).is_none());
        drop((again, kept));
        assert!(Words::new(Staging::heap(BYTES - 8).unwrap(), 1).is_none());
    }
}
