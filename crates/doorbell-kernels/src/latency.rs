//! How long a message takes: two ends that answer one another, a read at a time, and an echo to the CPU.

use doorbell_device::{
    Arch, Chunk, Deadline, Error, Key, Local, Post, Qp, Remote,
    scope::{Thread, sharing},
    sites,
};

use crate::params::{End, Forward, Latency, Line, Status};
use crate::rate::report;

/// Polls of a word between two looks at the clock.
const LOOK: u32 = 64;

type Alone<'a, A> = Qp<'a, A, Thread, sharing::Exclusive>;

/// Waits until the word at `at` is `value` or, counting up, beyond it; ends early if there is an `error`.
///
/// # Safety
/// `at` points to a word that others may write meanwhile.
#[inline(always)]
unsafe fn await_word<A: Arch>(
    a: A,
    at: u64,
    value: u64,
    deadline: Deadline,
    error: impl Fn() -> Option<Error>,
) -> Result<(), Error> {
    let p = core::ptr::with_exposed_provenance(at as usize);
    let mut polls = 0_u32;
    // SAFETY: the caller's promise.
    while unsafe { a.load64(p, sites::DATA) } < value {
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(LOOK) {
            if a.aborted() {
                return Err(Error::ABORTED);
            }
            if let Some(e) = error() {
                return Err(e);
            }
            if deadline.passed(a) {
                return Err(Error::TIMED_OUT);
            }
        }
        a.relax();
    }
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
    /// Sends message number `n` (from 1).
    unsafe fn send<A: Arch>(
        self,
        qp: &Alone<'_, A>,
        p: &Latency,
        end: &End,
        n: u64,
        how: Post,
    ) -> Result<(), Error>;
    /// Pointer to the word that counts the other end's messages.
    fn arrivals(self, p: &Latency, end: &End) -> u64;
}

#[derive(Clone, Copy)]
struct ByPut;

impl Round for ByPut {
    #[inline(always)]
    unsafe fn send<A: Arch>(
        self,
        qp: &Alone<'_, A>,
        p: &Latency,
        end: &End,
        n: u64,
        how: Post,
    ) -> Result<(), Error> {
        let remote = Remote {
            addr: end.remote_addr,
            key: Key(end.remote_key),
        };
        if p.inline != 0 && p.size == 8 {
            return qp.put_value(remote, n, 8, how).map(|_| ());
        }
        // SAFETY: the caller's promise: `send` is a message of `size` bytes, and the last one has been received, so has left.
        unsafe {
            qp.arch()
                .store64(word(end.send + p.size - 8), n, sites::DATA)
        };
        let local = Local {
            addr: end.send_addr,
            key: Key(end.send_key),
            len: p.size,
        };
        qp.put(remote, local, how).map(|_| ())
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
    unsafe fn send<A: Arch>(
        self,
        qp: &Alone<'_, A>,
        p: &Latency,
        end: &End,
        n: u64,
        how: Post,
    ) -> Result<(), Error> {
        // SAFETY: as `ByPut`.
        unsafe { qp.arch().store64(word(end.send), n, sites::DATA) };
        let remote = Remote {
            addr: end.remote_addr,
            key: Key(end.remote_key),
        };
        let local = Local {
            addr: end.send_addr,
            key: Key(end.send_key),
            len: p.size,
        };
        let signal = Remote {
            addr: end.signal_addr,
            key: Key(end.signal_key),
        };
        qp.put_signal(remote, local, signal, 1, how).map(|_| ())
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
    unsafe { play(a, p, |end, status| ping_pong(a, p, end, ByPut, status)) }
}

/// `signal_lat`.
///
/// # Safety
/// Parameters as [`Latency`] says.
#[inline(always)]
pub(crate) unsafe fn signal<A: Arch>(a: A, p: &Latency) {
    // SAFETY: the caller's promise.
    unsafe { play(a, p, |end, status| ping_pong(a, p, end, BySignal, status)) }
}

/// `get_lat`.
///
/// # Safety
/// Parameters as [`Latency`] says.
#[inline(always)]
pub(crate) unsafe fn get<A: Arch>(a: A, p: &Latency) {
    // SAFETY: the caller's promise.
    unsafe {
        play(a, p, |end, status| {
            let deadline = Deadline::after(a, p.deadline_ns);
            let qp = Alone::new(a, end.qp)?;
            for n in 0..p.iters {
                let start = a.clock_ns();
                let remote = Remote {
                    addr: end.remote_addr,
                    key: Key(end.remote_key),
                };
                let local = Local {
                    addr: end.send_addr,
                    key: Key(end.send_key),
                    len: p.size,
                };
                let ticket = qp.get(remote, local, Post::by(deadline))?;
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
unsafe fn play<A: Arch>(a: A, p: &Latency, f: impl Fn(&End, &mut Status) -> Result<(), Error>) {
    let which = p.first.wrapping_add(a.block());
    if a.thread() != 0 || which > 1 {
        return;
    }
    let end = if which == 0 { &p.ends[0] } else { &p.ends[1] };
    let start = a.clock_ns();
    let mut status = Status::default();
    let result = if p.size < 8 || !p.size.is_multiple_of(8) {
        Err(Error::INVALID)
    } else {
        f(end, &mut status)
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
    end: &End,
    round: impl Round,
    status: &mut Status,
) -> Result<(), Error> {
    let deadline = Deadline::after(a, p.deadline_ns);
    // SAFETY: the caller's promise.
    let qp = unsafe { Alone::new(a, end.qp)? };
    let begins = core::ptr::eq(end, &raw const p.ends[0]);
    let how = Post::by(deadline);
    let arrivals = round.arrivals(p, end);
    let mut start = a.clock_ns();
    for n in 1..=p.iters {
        // SAFETY: the caller's promise.
        unsafe {
            if begins {
                round.send(&qp, p, end, n, how)?;
                status.posted = n;
                await_word(a, arrivals, n, deadline, || qp.error())?;
            } else {
                await_word(a, arrivals, n, deadline, || qp.error())?;
                round.send(&qp, p, end, n, how)?;
                status.posted = n;
            }
            status.completed = n;
            let now = a.clock_ns();
            sample(a, end, n - 1, now - start);
            start = now;
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
                qp.put_inline(remote, line.0, Line::BYTES, Post::by(deadline))?;
                *answered = n;
            }
            qp.flush(deadline)
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
                let Line(l) = message(a, p.line, n as u32, deadline, || None)?;
                a.store_unit(to, Chunk::from_words(l[0], l[1], l[2], l[3]));
                a.store_unit(to.add(1), Chunk::from_words(l[4], l[5], l[6], l[7]));
                a.store_unit(to.add(2), Chunk::from_words(l[8], l[9], l[10], l[11]));
                *answered = n;
            }
            Ok(())
        });
    }
}

/// Waits for message `n`. Each poll reads the whole line, so that the payload is there with the flag.
#[inline(always)]
unsafe fn message<A: Arch>(
    a: A,
    line: u64,
    n: u32,
    deadline: Deadline,
    error: impl Fn() -> Option<Error>,
) -> Result<Line, Error> {
    let from = core::ptr::with_exposed_provenance::<Chunk>(line as usize);
    let mut polls = 0_u32;
    loop {
        // SAFETY: the caller's promise: a 64-byte line.
        let [u0, u1, u2] = unsafe {
            [
                a.load_unit(from),
                a.load_unit(from.add(1)),
                a.load_unit(from.add(2)),
            ]
        };
        let (lo, hi) = (|v: u64| v as u32, |v: u64| (v >> 32) as u32);
        let [u0, u1, u2] = [u0.0, u1.0, u2.0];
        let got = Line([
            lo(u0[0]),
            hi(u0[0]),
            lo(u0[1]),
            hi(u0[1]),
            lo(u1[0]),
            hi(u1[0]),
            lo(u1[1]),
            hi(u1[1]),
            lo(u2[0]),
            hi(u2[0]),
            lo(u2[1]),
            hi(u2[1]),
        ]);
        if got.is(n) {
            return Ok(got);
        }
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(LOOK) {
            if a.aborted() {
                return Err(Error::ABORTED);
            }
            if let Some(e) = error() {
                return Err(e);
            }
            if deadline.passed(a) {
                return Err(Error::TIMED_OUT);
            }
        }
        a.relax();
    }
}

/// Has the grid's first thread answer, and reports. The parameters are copied, so that the loop does not read them again and again.
#[inline(always)]
unsafe fn echo<A: Arch>(
    a: A,
    p: &Forward,
    f: impl Fn(Forward, Deadline, &mut u64) -> Result<(), Error>,
) {
    if a.block() != 0 || a.thread() != 0 {
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
    // SAFETY: the caller's promise.
    unsafe { report(a, p.status, 0, status) };
}
