//! `doorbell_cpu_*`: the device crate's calls, made by a CPU thread on its own queue pair.

use std::time::Duration;

use doorbell::cpu::{Local, Post, Ticket, deadline};
use doorbell::{CpuQp, CpuQueue};
use doorbell_device::Fetch;
use doorbell_wire::{Key, Remote};

use crate::convert::{of_device, store};
use crate::error::guard;
use crate::qp::{CQp, queue};

/// Posts one request and stores its ticket.
///
/// # Safety
/// `ticket` is null or writable.
pub(crate) unsafe fn post(
    entry: &str,
    qp: *mut CQp,
    timeout_ns: u64,
    ticket: *mut u64,
    request: impl FnOnce(&CpuQueue<'_>, Post) -> Result<Ticket, doorbell_device::Error>,
) -> i32 {
    guard(entry, || {
        let posted = queue(qp)?.with_cpu(Duration::from_nanos(timeout_ns), |cpu, left| {
            let how = Post::by(deadline(left));
            request(&cpu.queue()?, how).map_err(of_device)
        })?;
        // SAFETY: this function's promise.
        unsafe { store(ticket, posted.0) };
        Ok(())
    })
}

pub(crate) const fn remote(addr: u64, key: u32) -> Remote {
    Remote {
        addr,
        key: Key(key),
    }
}

pub(crate) const fn local(addr: u64, key: u32, len: u64) -> Local {
    Local {
        addr,
        key: Key(key),
        len,
    }
}

const fn fetch(addr: u64, key: u32) -> Fetch {
    Fetch {
        addr,
        key: Key(key),
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_put(
    qp: *mut CQp,
    remote_address: u64,
    remote_key: u32,
    local_address: u64,
    local_key: u32,
    length: u64,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    let (to, from) = (
        remote(remote_address, remote_key),
        local(local_address, local_key, length),
    );
    // SAFETY: passed on.
    unsafe {
        post("doorbell_cpu_put", qp, timeout_ns, ticket, |q, how| {
            q.put(to, from, how)
        })
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_get(
    qp: *mut CQp,
    remote_address: u64,
    remote_key: u32,
    local_address: u64,
    local_key: u32,
    length: u64,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    let (from, to) = (
        remote(remote_address, remote_key),
        local(local_address, local_key, length),
    );
    // SAFETY: passed on.
    unsafe {
        post("doorbell_cpu_get", qp, timeout_ns, ticket, |q, how| {
            q.get(from, to, how)
        })
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_signal_add(
    qp: *mut CQp,
    remote_address: u64,
    remote_key: u32,
    add: u64,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    let at = remote(remote_address, remote_key);
    // SAFETY: passed on.
    unsafe {
        post(
            "doorbell_cpu_signal_add",
            qp,
            timeout_ns,
            ticket,
            |q, how| q.signal_add(at, add, how),
        )
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_fetch_add(
    qp: *mut CQp,
    remote_address: u64,
    remote_key: u32,
    add: u64,
    result_address: u64,
    result_key: u32,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    let (at, to) = (
        remote(remote_address, remote_key),
        fetch(result_address, result_key),
    );
    // SAFETY: passed on.
    unsafe {
        post(
            "doorbell_cpu_fetch_add",
            qp,
            timeout_ns,
            ticket,
            |q, how| q.fetch_add(at, add, to, how),
        )
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_compare_swap(
    qp: *mut CQp,
    remote_address: u64,
    remote_key: u32,
    compare: u64,
    swap: u64,
    result_address: u64,
    result_key: u32,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    let (at, to) = (
        remote(remote_address, remote_key),
        fetch(result_address, result_key),
    );
    // SAFETY: passed on.
    unsafe {
        post(
            "doorbell_cpu_compare_swap",
            qp,
            timeout_ns,
            ticket,
            |q, how| q.compare_swap(at, compare, swap, to, how),
        )
    }
}

/// See `doorbell.h`.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_cpu_wait(qp: *mut CQp, ticket: u64, timeout_ns: u64) -> i32 {
    guard("doorbell_cpu_wait", || {
        queue(qp)?.with_cpu(Duration::from_nanos(timeout_ns), |cpu: &mut CpuQp, left| {
            let until = deadline(left);
            cpu.queue()?.wait(Ticket(ticket), until).map_err(of_device)
        })
    })
}
