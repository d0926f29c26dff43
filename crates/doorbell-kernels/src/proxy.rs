//! The baseline: a GPU thread hands each put to a CPU thread as a 32-byte command.
//!
//! Made as fast as we can: lanes of a warp reserve together and write consecutive commands; no store after the commands is needed, since each half
//! carries its number; one release fence a warp orders the payloads.

use doorbell_device::{Arch, Deadline, Error, sites};
use doorbell_wire::Chunk;

use crate::params::{Proxy, Status};
use crate::rate::{number, report};

/// Polls between two looks at the clock.
const LOOK: u32 = 16;

/// In the consumer index: the rest is the code of the queue's first error.
const FAILED: u64 = 1 << 63;

struct Queue {
    ring: *mut Chunk,
    pi: *mut u64,
    ci_cache: *mut u64,
    ci: *const u64,
    depth: u64,
}

/// `proxy_put`.
///
/// # Safety
/// Parameters as [`Proxy`] says.
#[inline(always)]
pub(crate) unsafe fn put<A: Arch>(a: A, p: &Proxy) {
    let start = a.clock_ns();
    let mut status = Status::default();
    // SAFETY: the caller's promise.
    if let Err(e) = unsafe { commands(a, p, start, &mut status) } {
        status.error = e.code();
    }
    status.ns = a.clock_ns() - start;
    // SAFETY: the caller's promise.
    unsafe { report(a, p.status, number(a), status) };
}

#[inline(always)]
unsafe fn commands<A: Arch>(a: A, p: &Proxy, start: u64, status: &mut Status) -> Result<(), Error> {
    if p.queues == 0 || !p.depth.is_power_of_two() || p.depth < A::LANES {
        return Err(Error::INVALID);
    }
    let me = number(a);
    let which = a.block() % p.queues;
    let at = u64::from(which) * 64;
    let queue = Queue {
        ring: ptr(p.ring + u64::from(which) * u64::from(p.depth) * 32),
        pi: ptr(p.pi + at),
        ci_cache: ptr(p.ci_cache + at),
        ci: ptr(p.ci + at),
        depth: u64::from(p.depth),
    };
    let deadline = Deadline(start + p.deadline_ns);
    let mut last = None;
    for message in 0..p.iters {
        let place = me * p.stride + (message & p.mask) * p.size;
        let g = a.group(queue.pi as u64);
        let mut first = 0;
        if g.is_leader() {
            // SAFETY: the caller's promise.
            first = match unsafe { queue.reserve(a, u64::from(g.size), deadline) } {
                Ok(first) => {
                    a.fence(sites::RING_FENCE);
                    first
                }
                Err(e) => FAILED | e.code(),
            };
        }
        let first = if g.size > 1 {
            a.broadcast64(g, first)
        } else {
            first
        };
        if first & FAILED != 0 {
            return Err(Error::from_code(first).unwrap_or(Error::QP_ERROR));
        }
        if g.size > 1 {
            // The leader's fence comes before everybody's command.
            a.sync(g);
        }
        let index = first + u64::from(g.rank);
        // SAFETY: a slot of the ring that is ours until the CPU has consumed it.
        unsafe {
            let slot = queue.ring.add((index & (queue.depth - 1)) as usize * 2);
            let seq = (index as u32).wrapping_add(1);
            let half = |addr: u64, v: u32| Chunk([addr, u64::from(v) | u64::from(seq) << 32]);
            a.store_chunk(slot, half(p.local + place, p.size as u32));
            a.store_chunk(slot.add(1), half(p.remote + place, which));
        }
        last = Some(index);
        status.posted = message + 1;
        if message & 63 == 63 && p.run_ns != 0 && a.clock_ns() - start >= p.run_ns {
            break;
        }
    }
    if let Some(last) = last {
        // SAFETY: the caller's promise.
        unsafe { queue.wait(a, last + 1, deadline)? };
    }
    status.completed = status.posted;
    Ok(())
}

#[inline(always)]
fn ptr<T>(at: u64) -> *mut T {
    core::ptr::with_exposed_provenance_mut(at as usize)
}

impl Queue {
    /// Slots for `need` commands, which are free.
    #[inline(always)]
    unsafe fn reserve<A: Arch>(&self, a: A, need: u64, deadline: Deadline) -> Result<u64, Error> {
        // SAFETY: the caller's promise: words of the queue.
        unsafe {
            let mut next = a.load64(self.pi, sites::RESERVE_LOAD);
            loop {
                let target = (next + need).saturating_sub(self.depth);
                if target > a.load64(self.ci_cache, sites::CI_LOAD) {
                    self.wait(a, target, deadline)?;
                    next = a.load64(self.pi, sites::RESERVE_LOAD);
                    continue;
                }
                let seen = a.cas64(self.pi, next, next + need, sites::RESERVE_CAS);
                if seen == next {
                    return Ok(next);
                }
                next = seen;
            }
        }
    }

    /// Waits until the CPU's consumer index is at least `target`.
    #[inline(always)]
    unsafe fn wait<A: Arch>(&self, a: A, target: u64, deadline: Deadline) -> Result<(), Error> {
        let mut polls = 0_u32;
        loop {
            // SAFETY: the caller's promise: words of the queue.
            unsafe {
                let ci = a.load64(self.ci, sites::SIGNAL_LOAD);
                if ci & FAILED != 0 {
                    return Err(Error::from_code(ci).unwrap_or(Error::QP_ERROR));
                }
                if ci >= target {
                    a.max64(self.ci_cache, ci, sites::CI_MAX);
                    return Ok(());
                }
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(LOOK) {
                if a.aborted() {
                    return Err(Error::ABORTED);
                }
                if deadline.passed(a) {
                    return Err(Error::TIMED_OUT);
                }
            }
            a.relax();
        }
    }
}
