//! How long a message takes: two ends that answer one another, a read at a time, and an echo to the CPU.

use doorbell_device::{
    Arch, Chunk, Deadline, Error, Key, Local, Post, Qp, Remote, Wr,
    scope::{Thread, sharing},
    sites,
};

use crate::params::{End, Forward, Latency, Line, Status};
use crate::rate::report;

/// Polls of a word between two looks at the clock.
const LOOK: u32 = 64;

type Alone<'a, A> = Qp<'a, A, Thread, sharing::Exclusive>;

/// Waits until the word at `at` is `value` or, counting up, beyond it; ends early if `qp` has an error.
///
/// # Safety
/// `at` points to a word that others may write meanwhile.
#[inline(always)]
unsafe fn await_word<A: Arch>(
    a: A,
    at: u64,
    value: u64,
    deadline: Deadline,
    qp: &Alone<'_, A>,
) -> Result<(), Error> {
    let p = core::ptr::with_exposed_provenance(at as usize);
    let mut polls = 0_u32;
    loop {
        // SAFETY: the caller's promise.
        let has = unsafe { a.load64(p, sites::DATA) };
        if has >= value {
            break;
        }
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(LOOK)
            && let Some(e) = qp.look_waiting(p, (value, has), polls, deadline)
        {
            return Err(e);
        }
        a.relax();
    }
    qp.waited(polls);
    // Polls are relaxed: an acquiring load throws the L1 cache away, and with it what the loop needs next.
    a.fence(sites::SIGNAL_FENCE);
    Ok(())
}

#[inline(always)]
fn word(at: u64) -> *mut u64 {
    core::ptr::with_exposed_provenance_mut(at as usize)
}

/// What one end does in one round.
trait Round: Copy {
    /// What sends message number `n` (from 1); writes the number where the message lies.
    unsafe fn message<A: Arch>(self, a: A, p: &Latency, end: &End, n: u64) -> Wr;
    /// Pointer to the word that counts the other end's messages.
    fn arrivals(self, p: &Latency, end: &End) -> u64;
}

#[inline(always)]
fn there(end: &End) -> Remote {
    Remote {
        addr: end.remote_addr,
        key: Key(end.remote_key),
    }
}

#[inline(always)]
fn here(end: &End, len: u64) -> Local {
    Local {
        addr: end.send_addr,
        key: Key(end.send_key),
        len,
    }
}

#[derive(Clone, Copy)]
struct ByPut;

impl Round for ByPut {
    #[inline(always)]
    unsafe fn message<A: Arch>(self, a: A, p: &Latency, end: &End, n: u64) -> Wr {
        let remote = there(end);
        if p.inline != 0 && p.size == 8 {
            return Wr::PutValue {
                remote,
                value: n,
                len: 8,
            };
        }
        // SAFETY: the caller's promise: `send` is a message of `size` bytes, and the last one has been received, so has left.
        unsafe { a.store64(word(end.send + p.size - 8), n, sites::DATA) };
        Wr::Put {
            remote,
            local: here(end, p.size),
        }
    }

    #[inline(always)]
    fn arrivals(self, p: &Latency, end: &End) -> u64 {
        end.recv + p.size - 8
    }
}

#[derive(Clone, Copy)]
struct BySignal;

impl Round for BySignal {
    #[inline(always)]
    unsafe fn message<A: Arch>(self, a: A, p: &Latency, end: &End, n: u64) -> Wr {
        // SAFETY: as `ByPut`.
        unsafe { a.store64(word(end.send), n, sites::DATA) };
        let signal = Remote {
            addr: end.signal_addr,
            key: Key(end.signal_key),
        };
        Wr::PutSignal {
            remote: there(end),
            local: here(end, p.size),
            signal,
            add: 1,
        }
    }

    #[inline(always)]
    fn arrivals(self, _: &Latency, end: &End) -> u64 {
        end.signal
    }
}

/// `put_lat`.
///
/// # Safety
/// Parameters as [`Latency`] says.
#[inline(always)]
pub(crate) unsafe fn put<A: Arch>(a: A, p: &Latency) {
    // SAFETY: the caller's promise.
    unsafe { play(a, p, |p, end, status| ping_pong(a, p, end, ByPut, status)) }
}

/// `signal_lat`.
///
/// # Safety
/// Parameters as [`Latency`] says.
#[inline(always)]
pub(crate) unsafe fn signal<A: Arch>(a: A, p: &Latency) {
    // SAFETY: the caller's promise.
    unsafe {
        play(a, p, |p, end, status| {
            ping_pong(a, p, end, BySignal, status)
        })
    }
}

/// `get_lat`.
///
/// # Safety
/// Parameters as [`Latency`] says.
#[inline(always)]
pub(crate) unsafe fn get<A: Arch>(a: A, p: &Latency) {
    // SAFETY: the caller's promise.
    unsafe {
        play(a, p, |p, (_, end), status| {
            let deadline = Deadline::after(a, p.deadline_ns);
            let qp = Alone::new(a, end.qp)?;
            for n in 0..p.iters {
                let start = a.clock_ns();
                let ticket = qp.get(there(end), here(end, p.size), Post::by(deadline))?;
                status.posted = n + 1;
                qp.wait(ticket, deadline)?;
                status.completed = n + 1;
                sample(a, end, n, a.clock_ns() - start);
            }
            Ok(())
        });
    }
}

/// Has thread 0 of each block play its end, and reports.
#[inline(always)]
unsafe fn play<A: Arch>(
    a: A,
    p: &Latency,
    f: impl Fn(&Latency, (bool, &End), &mut Status) -> Result<(), Error>,
) {
    let which = p.first.wrapping_add(a.block());
    if a.thread() != 0 || which > 1 {
        return;
    }
    // Copies, in registers: the queue's accesses would force the parameters to be read again each time.
    let end = if which == 0 { p.ends[0] } else { p.ends[1] };
    let p = *p;
    let start = a.clock_ns();
    let mut status = Status::default();
    let result = if p.size < 8 || !p.size.is_multiple_of(8) {
        Err(Error::INVALID)
    } else {
        f(&p, (which == 0, &end), &mut status)
    };
    if let Err(e) = result {
        status.error = e.code();
    }
    status.ns = a.clock_ns() - start;
    // SAFETY: the caller's promise.
    unsafe { report(a, end.status, 0, status) };
}

/// # Safety
/// `end.samples` is 0 or has a place for round `n`.
#[inline(always)]
unsafe fn sample<A: Arch>(a: A, end: &End, n: u64, ns: u64) {
    if end.samples != 0 {
        // SAFETY: the caller's promise.
        unsafe { a.store64(word(end.samples + 8 * n), ns, sites::DATA) };
    }
}

#[inline(always)]
unsafe fn ping_pong<A: Arch>(
    a: A,
    p: &Latency,
    (begins, end): (bool, &End),
    round: impl Round,
    status: &mut Status,
) -> Result<(), Error> {
    let deadline = Deadline::after(a, p.deadline_ns);
    // SAFETY: the caller's promise.
    let qp = unsafe { Alone::new(a, end.qp)? };
    let how = Post::by(deadline);
    let arrivals = round.arrivals(p, end);
    let ahead = u64::from(begins);
    let mut start = a.clock_ns();
    for n in 0..=p.iters {
        if n != 0 {
            // SAFETY: the caller's promise.
            unsafe { await_word(a, arrivals, n, deadline, &qp)? };
            status.completed = n;
            let now = a.clock_ns();
            // SAFETY: the caller's promise.
            unsafe { sample(a, end, n - 1, now - start) };
            start = now;
        }
        // The end that begins is one message ahead.
        let next = n + ahead;
        if next != 0 && next <= p.iters {
            // SAFETY: the caller's promise.
            let wr = unsafe { round.message(a, p, end, next) };
            qp.submit(wr, how)?;
            status.posted = next;
        }
    }
    qp.flush(deadline)
}

/// `forward`.
///
/// # Safety
/// Parameters as [`Forward`] says.
#[inline(always)]
pub(crate) unsafe fn forward<A: Arch>(a: A, p: &Forward) {
    // SAFETY: the caller's promise.
    unsafe {
        echo(a, p, |p, deadline, answered| {
            let qp = Alone::new(a, p.qp)?;
            let remote = Remote {
                addr: p.answer_addr,
                key: Key(p.answer_key),
            };
            for n in 1..=p.iters {
                let line = message(a, p.line, n as u32, deadline, || qp.error())?;
                if a.thread() == 0 {
                    qp.put_inline(remote, line.0, Line::BYTES, Post::by(deadline))?;
                }
                *answered = n;
            }
            if a.thread() == 0 {
                qp.flush(deadline)?;
            }
            Ok(())
        });
    }
}

/// `bare_echo`.
///
/// # Safety
/// Parameters as [`Forward`] says.
#[inline(always)]
pub(crate) unsafe fn bare_echo<A: Arch>(a: A, p: &Forward) {
    // SAFETY: the caller's promise.
    unsafe {
        echo(a, p, |p, deadline, answered| {
            let to = core::ptr::with_exposed_provenance_mut::<Chunk>(p.answer as usize);
            for n in 1..=p.iters {
                let line = message(a, p.line, n as u32, deadline, || None)?;
                for unit in 0..UNITS {
                    // A warp stores the line with one instruction.
                    if unit == a.thread() || a.threads() == 1 {
                        a.store_unit(to.add(unit as usize), unit_of(&line, unit));
                    }
                }
                *answered = n;
            }
            Ok(())
        });
    }
}

/// Units of a [`Line`].
const UNITS: u32 = 3;

#[inline(always)]
fn unit_of(line: &Line, unit: u32) -> Chunk {
    let l = &line.0;
    match unit {
        0 => Chunk::from_words(l[0], l[1], l[2], l[3]),
        1 => Chunk::from_words(l[4], l[5], l[6], l[7]),
        _ => Chunk::from_words(l[8], l[9], l[10], l[11]),
    }
}

/// Waits for message `n`. Each poll reads the whole line, so that the payload is there with the flag. A warp reads it with one
/// instruction, a unit a lane: loads of host memory that one thread issues after one another take their round trips one by one.
#[inline(always)]
unsafe fn message<A: Arch>(
    a: A,
    line: u64,
    n: u32,
    deadline: Deadline,
    error: impl Fn() -> Option<Error>,
) -> Result<Line, Error> {
    let from = core::ptr::with_exposed_provenance::<Chunk>(line as usize);
    let g = a.warp();
    let mut polls = 0_u32;
    loop {
        // SAFETY: the caller's promise: a 64-byte line.
        let [u0, u1, u2] = unsafe {
            if A::LANES > 1 && g.size == A::LANES {
                let place = g.rank & 3;
                let own = a.load_unit(from.add(place.min(UNITS - 1) as usize));
                let [x1, x2, x3] = [1, 2, 3].map(|xor| {
                    Chunk([
                        a.shfl_xor64(g, own.0[0], xor),
                        a.shfl_xor64(g, own.0[1], xor),
                    ])
                });
                // Lane `place` of four holds unit `place`, and `place ^ xor` that of the lane it exchanged with.
                [0, 1, 2].map(|unit| match place ^ unit {
                    0 => own,
                    1 => x1,
                    2 => x2,
                    _ => x3,
                })
            } else {
                [0, 1, 2].map(|unit| a.load_unit(from.add(unit)))
            }
        };
        let got = Line::from_units([u0.0, u1.0, u2.0]);
        if got.is(n) {
            return Ok(got);
        }
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(LOOK) {
            // One lane looks, so that all leave together.
            let verdict = if !g.is_leader() {
                0
            } else if a.aborted() {
                Error::ABORTED.code()
            } else if let Some(e) = error() {
                e.code()
            } else if deadline.passed(a) {
                Error::TIMED_OUT.code()
            } else {
                0
            };
            let verdict = if g.size > 1 {
                a.broadcast64(g, verdict)
            } else {
                verdict
            };
            if let Some(e) = Error::from_code(verdict) {
                return Err(e);
            }
        }
        a.relax();
    }
}

/// Has the grid's first warp answer; its first lane reports. The parameters are copied, so that the loop does not read them again and again.
#[inline(always)]
unsafe fn echo<A: Arch>(
    a: A,
    p: &Forward,
    f: impl Fn(Forward, Deadline, &mut u64) -> Result<(), Error>,
) {
    if a.block() != 0 || a.thread() >= A::LANES {
        return;
    }
    let start = a.clock_ns();
    let mut status = Status::default();
    let p = *p;
    if let Err(e) = f(p, Deadline(start + p.deadline_ns), &mut status.completed) {
        status.error = e.code();
    }
    status.posted = status.completed;
    status.ns = a.clock_ns() - start;
    if a.thread() == 0 {
        // SAFETY: the caller's promise.
        unsafe { report(a, p.status, 0, status) };
    }
}
