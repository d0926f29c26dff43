//! How many messages a second: each thread posts in batches, under flow control or (`post`) without.
//!
//! Puts from memory, which are what gets measured, are compiled for each way of sharing; all other operations take the general
//! call, which is not inlined. Parameters are copied to registers first: the queue's accesses would force them to be read again each time.

use doorbell_device::{
    Arch, Deadline, Error, Fetch, Key, Local, Post, Qp, QpHandle, Remote, Ticket, Wr,
    scope::{Sharing, Thread, sharing as shared},
    sites,
};

use crate::params::{Area, Rate, Status, flags, op, sharing};

/// Messages between two looks at the clock.
const LOOK: u64 = 64;

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
    let p =
        core::ptr::with_exposed_provenance_mut::<u64>(at as usize).wrapping_add(me as usize * 4);
    // SAFETY: the caller's promise; a Status is four words.
    unsafe {
        a.store64(p, status.error, sites::DATA);
        a.store64(p.add(1), status.posted, sites::DATA);
        a.store64(p.add(2), status.completed, sites::DATA);
        a.store64(p.add(3), status.ns, sites::DATA);
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
    // SAFETY: the caller's promise.
    unsafe {
        match p.op {
            // Beyond 1 GiB a message is several WQEs.
            op::PUT if p.size <= 1 << 30 => puts(a, p, p.flags),
            other => others(a, p, other),
        }
    }
}

/// `get_bw`.
///
/// # Safety
/// Parameters as [`Rate`] says.
#[inline(always)]
pub(crate) unsafe fn get<A: Arch>(a: A, p: &Rate) {
    // SAFETY: the caller's promise.
    unsafe { others(a, p, op::GET) }
}

/// `atomic_rate`.
///
/// # Safety
/// Parameters as [`Rate`] says.
#[inline(always)]
pub(crate) unsafe fn atomic<A: Arch>(a: A, p: &Rate) {
    // SAFETY: the caller's promise.
    unsafe { others(a, p, op::FETCH_ADD) }
}

/// `post`.
///
/// # Safety
/// Parameters as [`Rate`] says.
#[inline(always)]
pub(crate) unsafe fn post<A: Arch>(a: A, p: &Rate) {
    // SAFETY: the caller's promise.
    unsafe { puts(a, p, p.flags | flags::NO_SPACE_CHECK | flags::NO_WAIT) }
}

/// Where a thread's messages lie: base, and how it moves.
#[derive(Clone, Copy)]
struct Places {
    base: u64,
    mask: u64,
    size: u64,
    key: Key,
}

impl Places {
    #[inline(always)]
    fn new(area: Area, me: u64, size: u64) -> Self {
        Self {
            base: area.addr + me * area.stride,
            mask: u64::from(area.mask),
            size,
            key: Key(area.key),
        }
    }

    #[inline(always)]
    fn addr(self, message: u64) -> u64 {
        self.base + (message & self.mask) * self.size
    }

    #[inline(always)]
    fn local(self, message: u64) -> Local {
        Local {
            addr: self.addr(message),
            key: self.key,
            len: self.size,
        }
    }

    #[inline(always)]
    fn remote(self, message: u64) -> Remote {
        Remote {
            addr: self.addr(message),
            key: self.key,
        }
    }
}

/// What all rate kernels do around their posts.
struct Run<A> {
    a: A,
    me: u64,
    start: u64,
    deadline: Deadline,
    how: Post,
    run_ns: u64,
    iters: u64,
    batch: u64,
    local: Places,
    remote: Places,
}

impl<A: Arch> Run<A> {
    #[inline(always)]
    fn new(a: A, p: &Rate, flags: u32) -> Self {
        let start = a.clock_ns();
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
        let me = number(a);
        Self {
            a,
            me,
            start,
            deadline,
            how,
            run_ns: p.run_ns,
            iters: p.iters,
            batch: u64::from(p.batch),
            local: Places::new(p.local, me, p.size),
            remote: Places::new(p.remote, me, p.size),
        }
    }

    /// The QP of this thread.
    ///
    /// # Safety
    /// Parameters as [`Rate`] says.
    #[inline(always)]
    unsafe fn qp(&self, p: &Rate, flags: u32) -> Result<QpHandle, Error> {
        if p.qp_count == 0 || p.batch == 0 {
            return Err(Error::INVALID);
        }
        let which = if flags & flags::QP_BY_THREAD != 0 {
            self.me as u32
        } else {
            self.a.block()
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { handle(self.a, p.qps, u64::from(which % p.qp_count)) })
    }

    /// Posts all messages, `post(first, batch)` a batch; returns the last ticket.
    #[inline(always)]
    fn all(
        &self,
        status: &mut Status,
        post: impl Fn(u64, u32) -> Result<Ticket, Error>,
    ) -> Result<Option<Ticket>, Error> {
        let mut last = None;
        let mut look = LOOK;
        let mut message = 0;
        while message < self.iters {
            let batch = self.batch.min(self.iters - message);
            last = Some(post(message, batch as u32)?);
            message += batch;
            status.posted = message;
            if message >= look {
                look = message + LOOK;
                let now = self.a.clock_ns();
                if self.run_ns != 0 && now - self.start >= self.run_ns {
                    break;
                }
                if now >= self.deadline.0 {
                    return Err(Error::TIMED_OUT);
                }
            }
        }
        Ok(last)
    }

    /// # Safety
    /// `at` points to one [`Status`] a thread.
    #[inline(always)]
    unsafe fn end(&self, at: u64, mut status: Status, result: Result<(), Error>) {
        if let Err(e) = result {
            status.error = e.code();
        }
        status.ns = self.a.clock_ns() - self.start;
        // SAFETY: the caller's promise.
        unsafe { report(self.a, at, self.me, status) };
    }
}

/// Puts from memory.
#[inline(never)]
unsafe fn puts<A: Arch>(a: A, p: &Rate, flags: u32) {
    let run = Run::new(a, p, flags);
    let mut status = Status::default();
    // SAFETY: the caller's promise.
    let result = unsafe {
        match p.sharing {
            sharing::EXCLUSIVE => puts_as::<A, shared::Exclusive>(&run, p, flags, &mut status),
            sharing::BLOCK => puts_as::<A, shared::Block>(&run, p, flags, &mut status),
            _ => puts_as::<A, shared::Gpu>(&run, p, flags, &mut status),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { run.end(p.status, status, result) };
}

#[inline(always)]
unsafe fn puts_as<A: Arch, M: Sharing>(
    run: &Run<A>,
    p: &Rate,
    flags: u32,
    status: &mut Status,
) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    let qp = unsafe { Qp::<A, Thread, M>::new(run.a, run.qp(p, flags)?)? };
    let (local, remote, how) = (run.local, run.remote, run.how);
    let last = if M::EXCLUSIVE && run.batch == 1 {
        run.all(status, |message, _| {
            qp.puts(1, |_| (remote.remote(message), local.local(message)), how)
        })?
    } else {
        run.all(status, |message, batch| {
            let what = |k: u32| {
                let message = message + u64::from(k);
                (remote.remote(message), local.local(message))
            };
            qp.puts(batch, what, how)
        })?
    };
    if flags & flags::NO_WAIT == 0 {
        if let Some(last) = last {
            qp.wait(last, run.deadline)?;
        }
        status.completed = status.posted;
    }
    Ok(())
}

/// All other operations, one call each; all but a batch's last leave the ringing to it.
#[inline(never)]
unsafe fn others<A: Arch>(a: A, p: &Rate, which: u32) {
    let run = Run::new(a, p, p.flags);
    let mut status = Status::default();
    // SAFETY: the caller's promise.
    let result = unsafe {
        match p.sharing {
            sharing::EXCLUSIVE => others_as::<A, shared::Exclusive>(&run, p, which, &mut status),
            sharing::BLOCK => others_as::<A, shared::Block>(&run, p, which, &mut status),
            _ => others_as::<A, shared::Gpu>(&run, p, which, &mut status),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { run.end(p.status, status, result) };
}

#[inline(always)]
unsafe fn others_as<A: Arch, M: Sharing>(
    run: &Run<A>,
    p: &Rate,
    which: u32,
    status: &mut Status,
) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    let handle = unsafe { run.qp(p, p.flags)? };
    let signal = Remote {
        addr: p.signal,
        key: Key(p.signal_key),
    };
    let last = run.all(status, |first, batch| {
        let mut k = 0;
        loop {
            let message = first + u64::from(k);
            let (remote, local) = (run.remote.remote(message), run.local.local(message));
            let wr = match which {
                op::PUT_VALUE => Wr::PutValue {
                    remote,
                    value: message + 1,
                    len: 8,
                },
                op::PUT => Wr::Put { remote, local },
                op::GET => Wr::Get { remote, local },
                op::FETCH_ADD => Wr::FetchAdd {
                    remote,
                    add: 1,
                    to: Fetch {
                        addr: local.addr,
                        key: local.key,
                    },
                },
                op::PUT_SIGNAL => Wr::PutSignal {
                    remote,
                    local,
                    signal,
                    add: 1,
                },
                op::NOP => Wr::Nop,
                _ => return Err(Error::INVALID),
            };
            k += 1;
            let how = if k == batch {
                run.how
            } else {
                run.how.without_ringing()
            };
            // SAFETY: the caller's promise.
            let ticket = unsafe { Qp::<A, Thread, M>::submit_at(run.a, handle, None, &[wr], how)? };
            if k == batch {
                return Ok(ticket);
            }
        }
    })?;
    if p.flags & flags::NO_WAIT == 0 {
        if let Some(last) = last {
            // SAFETY: the caller's promise.
            unsafe { Qp::<A, Thread, M>::wait_at(run.a, handle, last, run.deadline)? };
        }
        status.completed = status.posted;
    }
    Ok(())
}
