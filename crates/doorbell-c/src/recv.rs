//! `doorbell_cpu_send`, `_write_imm` and `doorbell_cpu_recv_*`: messages that take receives, sent and received by a CPU thread.

use doorbell::cpu::{Arrival, Ticket};

use crate::call::{local, post, remote, turn};
use crate::convert::{of_device, store};
use crate::error::guard;
use crate::qp::CQp;
use crate::types::{
    DOORBELL_ARRIVAL_SEND, DOORBELL_ARRIVAL_SEND_IMM, DOORBELL_ARRIVAL_WRITE_IMM, doorbell_message,
    write,
};

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_send(
    qp: *mut CQp,
    local_address: u64,
    local_key: u32,
    length: u64,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    let from = local(local_address, local_key, length);
    // SAFETY: passed on.
    unsafe {
        post("doorbell_cpu_send", qp, timeout_ns, ticket, |q, how| {
            q.send(from, how)
        })
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_send_imm(
    qp: *mut CQp,
    local_address: u64,
    local_key: u32,
    length: u64,
    immediate: u32,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    let from = local(local_address, local_key, length);
    // SAFETY: passed on.
    unsafe {
        post("doorbell_cpu_send_imm", qp, timeout_ns, ticket, |q, how| {
            q.send_imm(from, immediate, how)
        })
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_write_imm(
    qp: *mut CQp,
    remote_address: u64,
    remote_key: u32,
    local_address: u64,
    local_key: u32,
    length: u64,
    immediate: u32,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    let (to, from) = (
        remote(remote_address, remote_key),
        local(local_address, local_key, length),
    );
    // SAFETY: passed on.
    unsafe {
        post(
            "doorbell_cpu_write_imm",
            qp,
            timeout_ns,
            ticket,
            |q, how| q.write_imm(to, from, immediate, how),
        )
    }
}

/// See `doorbell.h`.
///
/// # Safety
/// `ticket` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_recv_post(
    qp: *mut CQp,
    local_address: u64,
    local_key: u32,
    length: u64,
    timeout_ns: u64,
    ticket: *mut u64,
) -> i32 {
    guard("doorbell_cpu_recv_post", || {
        let to = local(local_address, local_key, length);
        let posted = turn(qp, timeout_ns, |cpu, until| {
            let (_, recv) = cpu.queues()?;
            recv.recv_post(to, until).map_err(of_device)
        })?;
        // SAFETY: this function's promise.
        unsafe { store(ticket, posted.0) };
        Ok(())
    })
}

/// See `doorbell.h`.
///
/// # Safety
/// `message` is null or a structure whose `size` bytes are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_cpu_recv_wait(
    qp: *mut CQp,
    ticket: u64,
    timeout_ns: u64,
    message: *mut doorbell_message,
) -> i32 {
    guard("doorbell_cpu_recv_wait", || {
        let got = turn(qp, timeout_ns, |cpu, until| {
            let (_, recv) = cpu.queues()?;
            recv.recv_wait(Ticket(ticket), until).map_err(of_device)
        })?;
        let answer = doorbell_message {
            size: 0,
            arrival: match got.arrival {
                Arrival::WriteImm => DOORBELL_ARRIVAL_WRITE_IMM,
                Arrival::Send => DOORBELL_ARRIVAL_SEND,
                Arrival::SendImm => DOORBELL_ARRIVAL_SEND_IMM,
            },
            length: got.bytes,
            immediate: got.imm,
            reserved: 0,
        };
        // SAFETY: this function's promise.
        unsafe { write(message, answer) }
    })
}
