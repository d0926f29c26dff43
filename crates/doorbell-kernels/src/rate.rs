//! How many messages a second: each thread posts in batches, under flow control or (`post`) without.

use doorbell_device::{
    Arch, Coalesce, Deadline, Error, Fetch, Key, Local, Post, Qp, QpHandle, Remote, Ticket,
    scope::{Sharing, Thread, sharing as shared},
    sites,
};

use crate::params::{Area, Rate, Status, flags, op, sharing};

/// Messages between two looks at the clock.
const LOOK: u64 = 64;

#[inline(always)]
fn place(area: &Area, me: u64, message: u64, size: u64) -> u64 {
    area.addr + me * area.stride + (message & u64::from(area.mask)) * size
}

/// This thread's number in the grid.
#[inline(always)]
pub(crate) fn number<A: Arch>(a: A) -> u64 {
    u64::from(a.block()) * u64::from(a.threads()) + u64::from(a.thread())
}

/// Leaves what became of a thread.
///
/// # Safety
/// `at` points to an array of [`Status`] with an element `me`.
#[inline(always)]
pub(crate) unsafe fn report<A: Arch>(a: A, at: u64, me: u64, status: Status) {
    let p = core::ptr::with_exposed_provenance_mut::<Status>(at as usize).cast::<u64>();
    for (i, v) in [status.error, status.posted, status.completed, status.ns]
        .into_iter()
        .enumerate()
    {
        // SAFETY: the caller's promise; a Status is four words.
        unsafe { a.store64(p.add(me as usize * 4 + i), v, sites::DATA) };
    }
}

/// The `index`-th handle of an array.
///
/// # Safety
/// `at` points to an array with such an element.
#[inline(always)]
pub(crate) unsafe fn handle<A: Arch>(a: A, at: u64, index: u64) -> QpHandle {
    let p = core::ptr::with_exposed_provenance::<u64>(at as usize);
    // SAFETY: the caller's promise; a handle is two addresses, constant while kernels run.
    let (qp, ext) = unsafe {
        (
            a.load_const64(p.add(index as usize * 2)),
            a.load_const64(p.add(index as usize * 2 + 1)),
        )
    };
    QpHandle {
        qp: core::ptr::with_exposed_provenance_mut(qp as usize),
        ext: core::ptr::with_exposed_provenance_mut(ext as usize),
    }
}

/// `put_bw`.
///
/// # Safety
/// Parameters as [`Rate`] says.
#[inline(always)]
pub(crate) unsafe fn put<A: Arch>(a: A, p: &Rate) {
    match p.op {
        // SAFETY: the caller's promise.
        op::PUT => unsafe { run(a, p, p.flags, Put) },
        // SAFETY: the caller's promise.
        _ => unsafe { run(a, p, p.flags, Other(p.op)) },
    }
}

/// `get_bw`.
///
/// # Safety
/// Parameters as [`Rate`] says.
#[inline(always)]
pub(crate) unsafe fn get<A: Arch>(a: A, p: &Rate) {
    // SAFETY: the caller's promise.
    unsafe { run(a, p, p.flags, Other(op::GET)) }
}

/// `atomic_rate`.
///
/// # Safety
/// Parameters as [`Rate`] says.
#[inline(always)]
pub(crate) unsafe fn atomic<A: Arch>(a: A, p: &Rate) {
    // SAFETY: the caller's promise.
    unsafe { run(a, p, p.flags, Other(op::FETCH_ADD)) }
}

/// `post`.
///
/// # Safety
/// Parameters as [`Rate`] says.
#[inline(always)]
pub(crate) unsafe fn post<A: Arch>(a: A, p: &Rate) {
    // SAFETY: the caller's promise.
    unsafe { run(a, p, p.flags | flags::NO_SPACE_CHECK | flags::NO_WAIT, Put) }
}

/// What is posted.
trait Poster: Copy {
    fn post<A: Arch, M: Sharing>(
        self,
        qp: &Qp<'_, A, Thread, M>,
        p: &Rate,
        at: At,
        how: Post,
    ) -> Result<Ticket, Error>;
}

/// Which messages.
#[derive(Clone, Copy)]
struct At {
    me: u64,
    message: u64,
    batch: u32,
}

impl At {
    #[inline(always)]
    fn local(self, p: &Rate, k: u32) -> Local {
        let addr = place(&p.local, self.me, self.message + u64::from(k), p.size);
        Local {
            addr,
            key: Key(p.local.key),
            len: p.size,
        }
    }

    #[inline(always)]
    fn remote(self, p: &Rate, k: u32) -> Remote {
        let addr = place(&p.remote, self.me, self.message + u64::from(k), p.size);
        Remote {
            addr,
            key: Key(p.remote.key),
        }
    }
}

#[derive(Clone, Copy)]
struct Put;

impl Poster for Put {
    #[inline(always)]
    fn post<A: Arch, M: Sharing>(
        self,
        qp: &Qp<'_, A, Thread, M>,
        p: &Rate,
        at: At,
        how: Post,
    ) -> Result<Ticket, Error> {
        if at.batch == 1 {
            qp.put(at.remote(p, 0), at.local(p, 0), how)
        } else {
            qp.puts(at.batch, |k| (at.remote(p, k), at.local(p, k)), how)
        }
    }
}

/// One message a call; all but a batch's last leave the ringing to it.
#[derive(Clone, Copy)]
struct Other(u32);

impl Poster for Other {
    #[inline(always)]
    fn post<A: Arch, M: Sharing>(
        self,
        qp: &Qp<'_, A, Thread, M>,
        p: &Rate,
        at: At,
        how: Post,
    ) -> Result<Ticket, Error> {
        for k in 1..at.batch {
            self.one(qp, p, at, k - 1, how.without_ringing())?;
        }
        self.one(qp, p, at, at.batch - 1, how)
    }
}

impl Other {
    #[inline(always)]
    fn one<A: Arch, M: Sharing>(
        self,
        qp: &Qp<'_, A, Thread, M>,
        p: &Rate,
        at: At,
        k: u32,
        how: Post,
    ) -> Result<Ticket, Error> {
        let (remote, local) = (at.remote(p, k), at.local(p, k));
        let message = at.message + u64::from(k);
        match self.0 {
            op::PUT_VALUE => qp.put_value(remote, message + 1, 8, how),
            op::GET => qp.get(remote, local, how),
            op::FETCH_ADD => qp.fetch_add(
                remote,
                1,
                Fetch {
                    addr: local.addr,
                    key: local.key,
                },
                how,
            ),
            op::PUT_SIGNAL => qp.put_signal(
                remote,
                local,
                Remote {
                    addr: p.signal,
                    key: Key(p.signal_key),
                },
                1,
                how,
            ),
            op::NOP => qp.nop(how),
            _ => Err(Error::INVALID),
        }
    }
}

#[inline(always)]
unsafe fn run<A: Arch>(a: A, p: &Rate, flags: u32, poster: impl Poster) {
    // SAFETY: the caller's promise.
    unsafe {
        match p.sharing {
            sharing::EXCLUSIVE => run_as::<A, shared::Exclusive>(a, p, flags, poster),
            sharing::BLOCK => run_as::<A, shared::Block>(a, p, flags, poster),
            _ => run_as::<A, shared::Gpu>(a, p, flags, poster),
        }
    }
}

#[inline(always)]
unsafe fn run_as<A: Arch, M: Sharing>(a: A, p: &Rate, flags: u32, poster: impl Poster) {
    let start = a.clock_ns();
    let me = number(a);
    let mut status = Status::default();
    // SAFETY: the caller's promise.
    if let Err(e) = unsafe { messages::<A, M>(a, p, flags, poster, start, &mut status) } {
        status.error = e.code();
    }
    status.ns = a.clock_ns() - start;
    // SAFETY: the caller's promise: one status a thread.
    unsafe { report(a, p.status, me, status) };
}

#[inline(always)]
unsafe fn messages<A: Arch, M: Sharing>(
    a: A,
    p: &Rate,
    flags: u32,
    poster: impl Poster,
    start: u64,
    status: &mut Status,
) -> Result<(), Error> {
    if p.qp_count == 0 || p.batch == 0 {
        return Err(Error::INVALID);
    }
    let me = number(a);
    let which = if flags & flags::QP_BY_THREAD != 0 {
        me as u32
    } else {
        a.block()
    };
    // SAFETY: the caller's promise.
    let qp = unsafe {
        let handle = handle(a, p.qps, u64::from(which % p.qp_count));
        Qp::<A, Thread, M>::new(a, handle)?
    };
    let qp = qp.with_coalescing(match flags & (flags::NO_COALESCE | flags::COALESCE_WHOLE) {
        flags::NO_COALESCE => Coalesce::Off,
        flags::COALESCE_WHOLE => Coalesce::Whole,
        _ => Coalesce::Used,
    });
    let deadline = Deadline(start + p.deadline_ns);
    let mut how = Post::by(deadline);
    if flags & flags::NO_SPACE_CHECK != 0 {
        how = how.without_space_check();
    }
    if flags & flags::SIGNAL_LAST != 0 {
        how = how.signal_last();
    }
    if flags & flags::NO_RING != 0 {
        how = how.without_ringing();
    }
    let mut last = None;
    let mut look = LOOK;
    let mut message = 0;
    while message < p.iters {
        let batch = u64::from(p.batch).min(p.iters - message) as u32;
        last = Some(poster.post(&qp, p, At { me, message, batch }, how)?);
        message += u64::from(batch);
        status.posted = message;
        if message >= look {
            look = message + LOOK;
            let now = a.clock_ns();
            if p.run_ns != 0 && now - start >= p.run_ns {
                break;
            }
            if now >= deadline.0 {
                return Err(Error::TIMED_OUT);
            }
        }
    }
    if flags & flags::NO_WAIT == 0 {
        if let Some(last) = last {
            qp.wait(last, deadline)?;
        }
        status.completed = message;
    }
    Ok(())
}
