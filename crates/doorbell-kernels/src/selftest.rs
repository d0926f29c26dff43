//! Kernels that try to break the queue: a random mixture whose outcome is known, and slots as a hostile kernel would write them.

use doorbell_device::{
    Arch, Deadline, Error, Fetch, Key, Local, Post, Qp, Remote, Ticket, Wr,
    layout::NicHandler,
    scope::{Sharing, Thread, sharing as shared},
    sites,
};
use doorbell_wire::Chunk;

use crate::params::{Hammer, Raw, Status, sharing};
use crate::rate::{handle, number, report};

/// Words of a thread's source: as many as may be in flight from it.
const SOURCES: u64 = 64;
/// Largest batch.
const BATCH: u64 = 7;

/// `hammer`.
///
/// # Safety
/// Parameters as [`Hammer`] says.
#[inline(always)]
pub(crate) unsafe fn hammer<A: Arch>(a: A, p: &Hammer) {
    // SAFETY: the caller's promise.
    unsafe {
        match p.sharing {
            sharing::EXCLUSIVE => hammer_as::<A, shared::Exclusive>(a, p),
            sharing::BLOCK => hammer_as::<A, shared::Block>(a, p),
            _ => hammer_as::<A, shared::Gpu>(a, p),
        }
    }
}

#[inline(always)]
unsafe fn hammer_as<A: Arch, M: Sharing>(a: A, p: &Hammer) {
    let start = a.clock_ns();
    let mut status = Status::default();
    // SAFETY: the caller's promise.
    if let Err(e) = unsafe { strike::<A, M>(a, p, Deadline(start + p.deadline_ns), &mut status) } {
        status.error = e.code();
    }
    status.ns = a.clock_ns() - start;
    // SAFETY: the caller's promise.
    unsafe { report(a, p.status, number(a), status) };
}

#[inline(always)]
unsafe fn strike<A: Arch, M: Sharing>(
    a: A,
    p: &Hammer,
    deadline: Deadline,
    status: &mut Status,
) -> Result<(), Error> {
    if p.qp_count == 0 {
        return Err(Error::INVALID);
    }
    let me = number(a);
    // SAFETY: the caller's promise.
    let handle = unsafe { handle(a, p.qps, me % u64::from(p.qp_count)) };
    let sink = Some(Fetch {
        addr: p.sink,
        key: Key(p.key),
    });
    // SAFETY: the caller's promise.
    let post_all =
        |wrs: &[Wr], how: Post| unsafe { Qp::<A, Thread, M>::submit_at(a, handle, sink, wrs, how) };
    let post = |wr: Wr, how: Post| post_all(&[wr], how);
    // SAFETY: the caller's promise.
    let wait = |t: Ticket| unsafe { Qp::<A, Thread, M>::wait_at(a, handle, t, deadline) };
    let source: *mut u64 = core::ptr::with_exposed_provenance_mut(p.source as usize);
    // SAFETY: the caller's promise: 64 words a thread.
    let source = unsafe { source.add((me * SOURCES) as usize) };
    let source_addr = p.source_addr + me * SOURCES * 8;
    let remote = Remote {
        addr: p.words + me * 8,
        key: Key(p.key),
    };
    let signal = Remote {
        addr: p.signal,
        key: Key(p.key),
    };
    let how = Post::by(deadline);
    let from = |n: u64| Local {
        addr: source_addr + (n % SOURCES) * 8,
        key: Key(p.source_key),
        len: 8,
    };
    let put_word = |n: u64| {
        // SAFETY: this thread's own words; the one for `n` left the source when `n - 64` completed.
        unsafe { a.store64(source.add((n % SOURCES) as usize), n, sites::DATA) };
    };
    let mut random = p.seed ^ (me + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut n = 0;
    let mut unread = 0;
    let mut last = None;
    while n < p.iters {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if unread + BATCH > SOURCES
            && let Some(last) = last
        {
            // The source words go round.
            wait(last)?;
            unread = 0;
        }
        let ticket = match random >> 60 {
            0..4 => {
                n += 1;
                post(
                    Wr::PutValue {
                        remote,
                        value: n,
                        len: 8,
                    },
                    how,
                )?
            }
            4..7 => {
                n += 1;
                put_word(n);
                post(
                    Wr::Put {
                        remote,
                        local: from(n),
                    },
                    how,
                )?
            }
            7..9 => {
                n += 1;
                put_word(n);
                status.completed += 1;
                post(
                    Wr::PutSignal {
                        remote,
                        local: from(n),
                        signal,
                        add: 1,
                    },
                    how,
                )?
            }
            9 => post(Wr::Nop, how)?,
            10 => {
                // Published by one call, rung by a later one.
                n += 1;
                post(
                    Wr::PutValue {
                        remote,
                        value: n,
                        len: 8,
                    },
                    how.without_ringing(),
                )?;
                post(Wr::Nop, how)?
            }
            11 => {
                status.completed += 1;
                post(
                    Wr::SignalAdd {
                        remote: signal,
                        add: 1,
                    },
                    how,
                )?
            }
            _ => {
                let batch = (1 + (random >> 32) % BATCH).min(p.iters - n);
                for k in 1..=batch {
                    put_word(n + k);
                }
                let first = n + 1;
                n += batch;
                let mut wrs = [Wr::Nop; BATCH as usize];
                for (k, wr) in wrs.iter_mut().enumerate() {
                    *wr = Wr::Put {
                        remote,
                        local: from(first + k as u64),
                    };
                }
                post_all(wrs.get(..batch as usize).unwrap_or(&[]), how)?
            }
        };
        unread += BATCH;
        last = Some(ticket);
        status.posted = n;
        if random >> 50 & 31 == 0 {
            wait(ticket)?;
            unread = 0;
        }
    }
    if let Some(last) = last {
        wait(last)?;
    }
    Ok(())
}

/// `raw_post`: one thread.
///
/// # Safety
/// Parameters as [`Raw`] says. What the slots say is the engine's to judge.
#[inline(always)]
pub(crate) unsafe fn raw_post<A: Arch>(a: A, p: &Raw) {
    if a.block() != 0 || a.thread() != 0 {
        return;
    }
    let qp = p.qp.qp;
    let slots: *const u64 = core::ptr::with_exposed_provenance(p.slots as usize);
    // SAFETY: the caller's promise: a QP, and `count` slots of eight words.
    unsafe {
        let mask = a.load_const32((&raw const (*qp).sq_wqe_num).cast()) >> 16;
        let address = |field: *const u64| a.load_const64(field) as usize;
        let ring: *mut Chunk =
            core::ptr::with_exposed_provenance_mut(address(&raw const (*qp).sq_wqe_daddr));
        for k in 0..p.count {
            let to = ring.add((p.first.wrapping_add(k) & mask) as usize * 4);
            for c in 0..4 {
                let from = slots.add(k as usize * 8 + c * 2);
                a.store_chunk(
                    to.add(c),
                    Chunk([a.load_const64(from), a.load_const64(from.add(1))]),
                );
            }
        }
        a.fence(sites::RING_FENCE);
        let handler = a.load_const32((&raw const (*qp).nic_handler).cast()) as i32;
        if NicHandler::from_raw(handler) == NicHandler::DoorbellRecord {
            let record = core::ptr::with_exposed_provenance_mut(address(&raw const (*qp).sq_dbrec));
            a.store32(record, p.record, sites::RING_RECORD);
            a.fence(sites::RING_RECORD_FENCE);
        }
        let db = core::ptr::with_exposed_provenance_mut(address(&raw const (*qp).sq_db));
        a.store64(db, p.word, sites::RING_DOORBELL);
    }
}
