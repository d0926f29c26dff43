//! `doorbell_listen`, `doorbell_dial`, `doorbell_peer_*`: sessions with other processes of this host, and queue pairs across them.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, PoisonError};

use doorbell::{Endpoint, Listener, Peer};

use crate::convert::{store, string, timeout, wanted};
use crate::device::{CDevice, DEVICES};
use crate::error::{Failure, Result, guard};
use crate::handle::Table;
use crate::memory::{CMr, REGIONS};
use crate::qp::{CQp, queue};
use crate::status::Status;
use crate::types::doorbell_remote_mr;

/// `struct doorbell_listener`.
#[derive(Debug)]
#[repr(C)]
pub struct CListener(c_void);
/// `struct doorbell_peer`.
#[derive(Debug)]
#[repr(C)]
pub struct CPeer(c_void);

static LISTENERS: Table<Arc<Listener>> = Table::new("doorbell_listener");
static PEERS: Table<Peer> = Table::new("doorbell_peer");

/// # Safety
/// `at` is null or a terminated string.
unsafe fn address<'a>(at: *const c_char) -> Result<&'a str> {
    // SAFETY: passed on.
    unsafe { string("address", at) }?
        .ok_or_else(|| Failure::invalid("address", "NULL", "give a path or @name"))
}

/// `length` bytes at `at`.
///
/// # Safety
/// They are readable, and nobody writes them meanwhile; `at` may be null if `length` is 0.
unsafe fn bytes<'a>(name: &str, at: *const c_void, length: usize) -> Result<&'a [u8]> {
    if length == 0 {
        return Ok(&[]);
    }
    wanted(name, at.cast_mut())?;
    // SAFETY: this function's promise.
    Ok(unsafe { std::slice::from_raw_parts(at.cast(), length) })
}

/// Puts `found` into the caller's memory if it fits.
///
/// # Safety
/// `capacity` bytes at `to` are writable (it may be null if there are none), and `length` is null or writable.
unsafe fn deliver(
    found: &[u8],
    to: *mut c_void,
    capacity: usize,
    length: *mut usize,
) -> Result<()> {
    // SAFETY: this function's promise.
    unsafe { store(length, found.len()) };
    if found.len() > capacity {
        return Err(Failure::invalid(
            "capacity",
            capacity,
            &format!("{} bytes are needed", found.len()),
        ));
    }
    if !found.is_empty() {
        wanted("the result", to)?;
        // SAFETY: this function's promise; it fits.
        unsafe { std::ptr::copy_nonoverlapping(found.as_ptr(), to.cast::<u8>(), found.len()) };
    }
    Ok(())
}

/// See `doorbell.h`.
///
/// # Safety
/// `address` is null or a terminated string; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_listen(
    device: *mut CDevice,
    address: *const c_char,
    out: *mut *mut CListener,
) -> i32 {
    guard("doorbell_listen", || {
        wanted("out", out)?;
        // SAFETY: this function's promise.
        let listener = DEVICES
            .get(device)?
            .listen(unsafe { self::address(address) }?)?;
        // SAFETY: this function's promise.
        unsafe { store(out, LISTENERS.insert(Arc::new(listener))) };
        Ok(())
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_listener_close(listener: *mut CListener) -> i32 {
    guard("doorbell_listener_close", || {
        LISTENERS.remove(listener).map(drop)
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_accept(
    listener: *mut CListener,
    timeout_ns: u64,
    out: *mut *mut CPeer,
) -> i32 {
    guard("doorbell_accept", || {
        wanted("out", out)?;
        let peer = LISTENERS.get(listener)?.accept(timeout(timeout_ns))?;
        // SAFETY: this function's promise.
        unsafe { store(out, PEERS.insert(peer)) };
        Ok(())
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `address` is null or a terminated string; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_dial(
    device: *mut CDevice,
    address: *const c_char,
    timeout_ns: u64,
    out: *mut *mut CPeer,
) -> i32 {
    guard("doorbell_dial", || {
        wanted("out", out)?;
        // SAFETY: this function's promise.
        let peer = DEVICES
            .get(device)?
            .dial(unsafe { self::address(address) }?, timeout(timeout_ns))?;
        // SAFETY: this function's promise.
        unsafe { store(out, PEERS.insert(peer)) };
        Ok(())
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `length` bytes at `mine` are readable, `capacity` bytes at `theirs` are writable, `their_length` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_peer_exchange(
    peer: *mut CPeer,
    mine: *const c_void,
    length: usize,
    theirs: *mut c_void,
    capacity: usize,
    their_length: *mut usize,
    timeout_ns: u64,
) -> i32 {
    guard("doorbell_peer_exchange", || {
        let peer = PEERS.get(peer)?;
        // SAFETY: this function's promise.
        let got = peer.exchange(unsafe { bytes("mine", mine, length) }?, timeout(timeout_ns))?;
        // SAFETY: this function's promise.
        unsafe { deliver(&got, theirs, capacity, their_length) }
    })
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_peer_close(peer: *mut CPeer, timeout_ns: u64) -> i32 {
    guard("doorbell_peer_close", || {
        Ok(PEERS.remove(peer)?.close(timeout(timeout_ns))?)
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `count` handles at `regions` are readable, `capacity` bytes at `endpoint` are writable, `length` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_qp_describe(
    qp: *mut CQp,
    regions: *const *mut CMr,
    count: usize,
    endpoint: *mut c_void,
    capacity: usize,
    length: *mut usize,
) -> i32 {
    guard("doorbell_qp_describe", || {
        let queue = queue(qp)?;
        if count > doorbell::MAX_REGIONS {
            return Err(Failure::invalid(
                "count",
                count,
                &format!("describe at most {} regions", doorbell::MAX_REGIONS),
            ));
        }
        if count > 0 {
            wanted("regions", regions.cast_mut())?;
        }
        let mut offered = Vec::with_capacity(count);
        for i in 0..count {
            // SAFETY: this function's promise.
            let region = REGIONS.get(unsafe { regions.add(i).read_unaligned() })?;
            let region = region.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(region) = region.as_ref() else {
                return Err(Failure::new(
                    Status::Handle,
                    format_args!("region {i} was deregistered meanwhile"),
                ));
            };
            offered.push(region.remote());
        }
        let found = queue.describe(&offered)?;
        // SAFETY: this function's promise.
        unsafe { deliver(&found, endpoint, capacity, length) }
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `length` bytes at `endpoint` are readable, `capacity` structures at `regions` are writable, `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_qp_connect_peer(
    qp: *mut CQp,
    peer: *mut CPeer,
    endpoint: *const c_void,
    length: usize,
    regions: *mut doorbell_remote_mr,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    guard("doorbell_qp_connect_peer", || {
        let queue = queue(qp)?;
        let peer = PEERS.get(peer)?;
        // SAFETY: this function's promise.
        let endpoint = Endpoint::from_bytes(unsafe { bytes("endpoint", endpoint, length) }?)
            .map_err(doorbell::Error::from)?;
        if capacity > 0 && !endpoint.regions.is_empty() {
            wanted("regions", regions)?;
        }
        queue.connect(&peer.destination(&endpoint)?)?;
        for (i, region) in endpoint.regions.iter().take(capacity).enumerate() {
            let region = doorbell_remote_mr {
                address: region.addr,
                length: region.len,
                key: region.key,
                reserved: 0,
            };
            // SAFETY: this function's promise; `i` is below `capacity`.
            unsafe { regions.add(i).write_unaligned(region) };
        }
        // SAFETY: this function's promise.
        unsafe { store(count, endpoint.regions.len()) };
        Ok(())
    })
}
