//! `doorbell_cpu_*`: the device crate's calls, made by a CPU thread on its own queue pair.

use doorbell::cpu::Ticket;

use crate::call::{fetch, local, post, remote, turn};
use crate::convert::of_device;
use crate::error::guard;
use crate::qp::CQp;

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
        turn(qp, timeout_ns, |cpu, until| {
            cpu.queue()?.wait(Ticket(ticket), until).map_err(of_device)
        })
    })
}
