//! Handles are names, not addresses.
//!
//! What C holds as `doorbell_qp *` is a number that is never used again, looked up here at each call. So a handle of
//! another kind, one that was destroyed, or a stray pointer gives `DOORBELL_ERR_HANDLE` instead of undefined behaviour.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Failure, Result};
use crate::status::Status;

/// All live objects of one kind.
pub(crate) struct Table<T> {
    /// The C name of the kind, for messages.
    kind: &'static str,
    live: Mutex<Option<HashMap<usize, T>>>,
}

/// Numbers are odd, so that no aligned address is one by chance, and shared by all kinds, so that no two handles are equal.
static NEXT: AtomicUsize = AtomicUsize::new(0x0b11_0001);

impl<T: Clone> Table<T> {
    pub(crate) const fn new(kind: &'static str) -> Self {
        Self {
            kind,
            live: Mutex::new(None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<HashMap<usize, T>>> {
        // The map is never left half changed: nothing of ours runs while it is held.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `object` a name. `H` is the opaque C type.
    pub(crate) fn insert<H>(&self, object: T) -> *mut H {
        let name = NEXT.fetch_add(2, Ordering::Relaxed);
        self.lock().get_or_insert_default().insert(name, object);
        std::ptr::without_provenance_mut(name)
    }

    /// The object of that name.
    pub(crate) fn get<H>(&self, handle: *const H) -> Result<T> {
        let found = self
            .lock()
            .as_ref()
            .and_then(|live| live.get(&handle.addr()).cloned());
        found.ok_or_else(|| self.unknown(handle))
    }

    /// Takes the name away and returns the object.
    pub(crate) fn remove<H>(&self, handle: *const H) -> Result<T> {
        let found = self
            .lock()
            .as_mut()
            .and_then(|live| live.remove(&handle.addr()));
        found.ok_or_else(|| self.unknown(handle))
    }

    fn unknown<H>(&self, handle: *const H) -> Failure {
        let kind = self.kind;
        if handle.is_null() {
            Failure::new(
                Status::Handle,
                format_args!("the {kind} is NULL: create one first"),
            )
        } else {
            Failure::new(
                Status::Handle,
                format_args!(
                    "{:#x} is not a live {kind}: it was destroyed, or is a handle of another kind",
                    handle.addr()
                ),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Thing {}

    #[test]
    fn names_are_looked_up_and_never_used_again() {
        static TABLE: Table<&str> = Table::new("doorbell_thing");
        static OTHER: Table<&str> = Table::new("doorbell_other");
        let a: *mut Thing = TABLE.insert("a");
        let b: *mut Thing = TABLE.insert("b");
        assert_ne!(a, b);
        assert_eq!(TABLE.get(a).expect("live"), "a");
        assert_eq!(TABLE.remove(a).expect("live"), "a");
        for handle in [a, std::ptr::null_mut(), &raw const OTHER as *mut Thing] {
            let failure = TABLE.get(handle).expect_err("not live");
            assert_eq!(failure.status, Status::Handle);
            assert!(failure.text.contains("doorbell_thing"), "{}", failure.text);
        }
        assert_eq!(
            OTHER.get(b).expect_err("of another kind").status,
            Status::Handle
        );
        let c: *mut Thing = TABLE.insert("c");
        assert!(c != a && c != b);
    }
}
