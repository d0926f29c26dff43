//! Messages: a thread that answers what arrives, and the one that begins, for latency and for rate.
//!
//! Both have their QP for themselves, and count receives from where the last kernel on it stopped. Message `n` lies in place `n & mask` at either
//! end, so that after a run each place says what it must hold.

use doorbell_device::{
    Arch, Deadline, Error, Key, Local, Post, Qp, RecvQueue, Remote, Ticket, Wr,
    scope::{Thread, sharing},
    sites,
};

use crate::params::{Area, Echo, Ping, Status, message_flags};
use crate::rate::report;

type Alone<'a, A> = Qp<'a, A, Thread, sharing::Exclusive>;
type Receives<'a, A> = RecvQueue<'a, A, Thread, sharing::Exclusive>;

/// Messages that share one ring.
const BURST: u64 = 16;

#[inline(always)]
fn place(area: &Area, n: u64, len: u64) -> Local {
    Local {
        addr: area.addr + (n & u64::from(area.mask)) * area.stride,
        key: Key(area.key),
        len,
    }
}

/// A message of `local`, with an immediate: to the peer's next receive, or to `to`.
#[inline(always)]
const fn message(to: Option<Remote>, local: Local, imm: u32) -> Wr {
    match to {
        Some(remote) => Wr::PutImm { remote, local, imm },
        None => Wr::SendImm { local, imm },
    }
}

/// Place `n` of the memory at `addr`, if messages are WRITEs.
#[inline(always)]
fn target(flags: u32, (addr, key): (u64, u32), area: &Area, n: u64) -> Option<Remote> {
    (flags & message_flags::WRITE != 0).then_some(Remote {
        addr: addr + (n & u64::from(area.mask)) * area.stride,
        key: Key(key),
    })
}

/// Has thread 0 of block 0 play, and reports.
#[inline(always)]
unsafe fn play<A: Arch>(
    a: A,
    status_at: u64,
    deadline_ns: u64,
    f: impl Fn(Deadline, &mut Status) -> Result<(), Error>,
) {
    if a.block() != 0 || a.thread() != 0 {
        return;
    }
    let start = a.clock_ns();
    let mut status = Status::default();
    if let Err(e) = f(Deadline(start.saturating_add(deadline_ns)), &mut status) {
        status.error = e.code();
    }
    status.ns = a.clock_ns() - start;
    // SAFETY: the caller's promise.
    unsafe { report(a, status_at, 0, status) };
}

/// `echo`.
///
/// # Safety
/// Parameters as [`Echo`] says.
#[inline(always)]
pub(crate) unsafe fn echo<A: Arch>(a: A, p: &Echo) {
    let p = *p;
    // SAFETY: the caller's promise.
    unsafe {
        play(a, p.status, p.deadline_ns, |by, status| {
            answer(a, &p, by, status)
        })
    }
}

/// # Safety
/// As [`echo`].
#[inline(always)]
unsafe fn answer<A: Arch>(
    a: A,
    p: &Echo,
    deadline: Deadline,
    status: &mut Status,
) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    let (qp, recv) = unsafe { (Alone::new(a, p.qp)?, Receives::new(a, p.qp)?) };
    let (area, every) = (&p.buffers, p.every.max(1));
    let places = u64::from(area.mask) + 1;
    let ahead = places.min(recv.depth().into()).min(p.iters);
    let base = recv.posted();
    // Making receives known costs a fence, which on a GPU takes longer than everything else that a message needs.
    let burst = if every == 1 {
        1
    } else {
        BURST.min(ahead / 2).max(1)
    };
    let mut posted = 0;
    while posted < ahead {
        let n = burst.min(ahead - posted);
        recv.recv_posts(
            n as u32,
            |k| place(area, posted + u64::from(k), area.stride),
            deadline,
        )?;
        posted += n;
    }
    let how = Post::by(deadline);
    let mut first = None;
    for n in 0..p.iters {
        let got = recv.recv_wait(Ticket(base + n), deadline)?;
        status.completed = n + 1;
        let next = n + ahead;
        if every == 1 {
            let local = place(area, n, got.bytes.into());
            let to = target(p.flags, (p.answer_addr, p.answer_key), area, n);
            let ticket = qp.submit(message(to, local, got.imm), how)?;
            status.posted = n + 1;
            let first = *first.get_or_insert(ticket.0 - n);
            // A place takes the next message when the answer from it has gone.
            if next < p.iters && next >= places {
                qp.wait(Ticket(first + next - places), deadline)?;
            }
        } else if (n + 1).is_multiple_of(every) || n + 1 == p.iters {
            let nothing = place(area, n, 0);
            qp.send_imm(nothing, (n + 1) as u32, how)?;
            status.posted += 1;
        }
        let free = p.iters.min(next + 1) - posted;
        if free >= burst || posted + free == p.iters && free > 0 {
            recv.recv_posts(
                free as u32,
                |k| place(area, posted + u64::from(k), area.stride),
                deadline,
            )?;
            posted += free;
        }
    }
    qp.flush(deadline)
}

/// `ping`.
///
/// # Safety
/// Parameters as [`Ping`] says.
#[inline(always)]
pub(crate) unsafe fn ping<A: Arch>(a: A, p: &Ping) {
    let p = *p;
    // SAFETY: the caller's promise.
    unsafe {
        play(a, p.status, p.deadline_ns, |by, status| {
            begin(a, &p, by, status)
        })
    }
}

/// # Safety
/// As [`ping`].
#[inline(always)]
unsafe fn begin<A: Arch>(
    a: A,
    p: &Ping,
    deadline: Deadline,
    status: &mut Status,
) -> Result<(), Error> {
    let (every, out) = (p.every.max(1), &p.out);
    if p.window < every || p.window > u64::from(out.mask) + 1 && every == 1 || p.size > out.stride {
        return Err(Error::INVALID);
    }
    // SAFETY: the caller's promise.
    let (qp, recv) = unsafe { (Alone::new(a, p.qp)?, Receives::new(a, p.qp)?) };
    let answers = p.iters.div_ceil(every);
    let places = u64::from(p.back.mask) + 1;
    let ahead = places.min(recv.depth().into()).min(answers);
    let base = recv.posted();
    for k in 0..ahead {
        recv.recv_post(place(&p.back, k, p.back.stride), deadline)?;
    }
    let how = Post::by(deadline);
    let mut sent = 0;
    let mut start = a.clock_ns();
    for k in 0..answers {
        let until = p.iters.min(k * every + p.window);
        while sent < until {
            let to = target(p.flags, (p.target_addr, p.target_key), out, sent);
            let wr = message(to, place(out, sent, p.size), sent as u32);
            sent += 1;
            let rings = sent == until || sent.is_multiple_of(BURST);
            qp.submit(wr, if rings { how } else { how.without_ringing() })?;
            status.posted = sent;
        }
        let got = recv.recv_wait(Ticket(base + k), deadline)?;
        let now = a.clock_ns();
        if p.samples != 0 {
            let at = core::ptr::with_exposed_provenance_mut((p.samples + 8 * k) as usize);
            // SAFETY: the caller's promise: there is a place for each answer.
            unsafe { a.store64(at, now - start, sites::DATA) };
        }
        let right = if every == 1 {
            // SAFETY: the caller's promise; the answer is here.
            got.imm == k as u32 && u64::from(got.bytes) == p.size && unsafe { same(a, p, k) }
        } else {
            u64::from(got.imm) == (k * every + every).min(p.iters)
        };
        if !right {
            return Err(Error::INVALID);
        }
        status.completed = (k * every + every).min(p.iters);
        if k + ahead < answers {
            recv.recv_post(place(&p.back, k + ahead, p.back.stride), deadline)?;
        }
        start = a.clock_ns();
    }
    qp.flush(deadline)
}

/// Whether the answer to message `n` is what was sent, as far as whole words go.
///
/// # Safety
/// As [`ping`].
#[inline(always)]
unsafe fn same<A: Arch>(a: A, p: &Ping, n: u64) -> bool {
    if p.flags & message_flags::CHECK == 0 {
        return true;
    }
    let at = |base: u64, area: &Area, word: u64| {
        let at = base + (n & u64::from(area.mask)) * area.stride + 8 * word;
        core::ptr::with_exposed_provenance::<u64>(at as usize)
    };
    let mut word = 0;
    while word < p.size / 8 {
        // SAFETY: the caller's promise.
        let (x, y) = unsafe {
            (
                a.load64(at(p.out_pointer, &p.out, word), sites::DATA),
                a.load64(at(p.back_pointer, &p.back, word), sites::DATA),
            )
        };
        if x != y {
            return false;
        }
        word += 1;
    }
    true
}
