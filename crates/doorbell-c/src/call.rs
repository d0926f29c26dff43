//! What every `doorbell_cpu_*` call does with its arguments: the queue pair's turn within the time limit, addresses with their keys, the ticket.

use std::time::Duration;

use doorbell::cpu::{Deadline, Local, Post, Ticket, deadline};
use doorbell::{CpuQp, CpuQueue};
use doorbell_device::Fetch;
use doorbell_wire::{Key, Remote};

use crate::convert::{of_device, store};
use crate::error::{Result, guard};
use crate::qp::{CQp, queue};

/// Runs `f` with the queue pair when its turn comes, and with the end of the time.
pub(crate) fn turn<R>(
    qp: *mut CQp,
    timeout_ns: u64,
    f: impl FnOnce(&mut CpuQp, Deadline) -> Result<R>,
) -> Result<R> {
    queue(qp)?.with_cpu(Duration::from_nanos(timeout_ns), |cpu, left| {
        f(cpu, deadline(left))
    })
}

/// Posts one request and stores its ticket.
///
/// # Safety
/// `ticket` is null or writable.
pub(crate) unsafe fn post(
    entry: &str,
    qp: *mut CQp,
    timeout_ns: u64,
    ticket: *mut u64,
    request: impl FnOnce(&CpuQueue<'_>, Post) -> std::result::Result<Ticket, doorbell_device::Error>,
) -> i32 {
    guard(entry, || {
        let posted = turn(qp, timeout_ns, |cpu, until| {
            request(&cpu.queue()?, Post::by(until)).map_err(of_device)
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

pub(crate) const fn fetch(addr: u64, key: u32) -> Fetch {
    Fetch {
        addr,
        key: Key(key),
    }
}
