//! The functions that CUDA C++ code links from the shipped PTX: see `include/doorbell_device.h`, which documents them.
//!
//! Each takes a queue handle by value and a time in nanoseconds, and returns 0 or an error number (`Error::code`); a posting
//! function stores its ticket. They use GPU-wide sharing, or the one of the `flags`.

use doorbell_device::{
    Arch, Deadline, Error, Fetch, Key, Local, Masked, Post, Qp, QpHandle, Remote, Ticket,
    nvptx::Gpu,
    scope::{Sharing, Thread, sharing},
};

/// `DB_EXCLUSIVE`, `DB_BLOCK`: who shares the QP.
const EXCLUSIVE: u32 = 1;
const BLOCK: u32 = 2;
/// `DB_NO_RING`, `DB_NO_SPACE_CHECK`, `DB_SIGNAL_LAST`: how to post.
const NO_RING: u32 = 4;
const NO_SPACE_CHECK: u32 = 8;
const SIGNAL_LAST: u32 = 16;

/// A call, for whatever sharing.
trait Call {
    fn run<M: Sharing>(self, qp: Qp<'_, Gpu, Thread, M>, how: Post) -> Result<u64, Error>;
}

#[inline(always)]
unsafe fn with(h: QpHandle, flags: u32, timeout_ns: u64, ticket: *mut u64, call: impl Call) -> u64 {
    let mut how = Post::by(Deadline::after(Gpu, timeout_ns));
    if flags & NO_RING != 0 {
        how = how.without_ringing();
    }
    if flags & NO_SPACE_CHECK != 0 {
        how = how.without_space_check();
    }
    if flags & SIGNAL_LAST != 0 {
        how = how.signal_last();
    }
    // SAFETY: the C caller's promise: a handle of the host library, used by others only as the flags allow.
    let result = unsafe {
        match flags & (EXCLUSIVE | BLOCK) {
            0 => Qp::<_, _, sharing::Gpu>::new(Gpu, h).and_then(|qp| call.run(qp, how)),
            BLOCK => Qp::<_, _, sharing::Block>::new(Gpu, h).and_then(|qp| call.run(qp, how)),
            _ => Qp::<_, _, sharing::Exclusive>::new(Gpu, h).and_then(|qp| call.run(qp, how)),
        }
    };
    match result {
        Ok(t) => {
            if !ticket.is_null() {
                // SAFETY: the C caller's promise: null, or a word of its own.
                unsafe { *ticket = t };
            }
            0
        }
        Err(e) => e.code(),
    }
}

macro_rules! posting {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $t:ty),*) = |$qp:ident, $how:ident| $body:expr;)+) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            q: QpHandle, $($arg: $t,)* flags: u32, timeout_ns: u64, ticket: *mut u64,
        ) -> u64 {
            struct Args { $($arg: $t),* }
            impl Call for Args {
                #[inline(always)]
                fn run<M: Sharing>(self, $qp: Qp<'_, Gpu, Thread, M>, $how: Post) -> Result<u64, Error> {
                    let Self { $($arg),* } = self;
                    $body.map(|t: Ticket| t.0)
                }
            }
            // SAFETY: the C caller's promise.
            unsafe { with(q, flags, timeout_ns, ticket, Args { $($arg),* }) }
        }
    )+};
}

#[inline(always)]
const fn remote(addr: u64, key: u32) -> Remote {
    Remote {
        addr,
        key: Key(key),
    }
}

#[inline(always)]
const fn local(addr: u64, key: u32, len: u64) -> Local {
    Local {
        addr,
        key: Key(key),
        len,
    }
}

#[inline(always)]
const fn fetch(addr: u64, key: u32) -> Fetch {
    Fetch {
        addr,
        key: Key(key),
    }
}

posting! {
    /// RDMA WRITE.
    fn db_put(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64) =
        |qp, how| qp.put(remote(raddr, rkey), local(laddr, lkey, len), how);
    /// RDMA WRITE of a value of 1, 2, 4 or 8 bytes.
    fn db_put_value(raddr: u64, rkey: u32, value: u64, len: u32) =
        |qp, how| qp.put_value(remote(raddr, rkey), value, len, how);
    /// RDMA WRITE, then an addition to a signal.
    fn db_put_signal(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64, saddr: u64, skey: u32, add: u64) =
        |qp, how| qp.put_signal(remote(raddr, rkey), local(laddr, lkey, len), remote(saddr, skey), add, how);
    /// RDMA WRITE, then, when it is complete, an addition to a local counter.
    fn db_put_counter(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64, caddr: u64, ckey: u32, add: u64) =
        |qp, how| qp.put_counter(remote(raddr, rkey), local(laddr, lkey, len), remote(caddr, ckey), add, how);
    /// RDMA READ.
    fn db_get(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64) =
        |qp, how| qp.get(remote(raddr, rkey), local(laddr, lkey, len), how);
    /// RDMA READ and DUMP.
    fn db_get_visible(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64) =
        |qp, how| qp.get_visible(remote(raddr, rkey), local(laddr, lkey, len), how);
    /// Addition to a signal.
    fn db_signal_add(saddr: u64, skey: u32, add: u64) = |qp, how| qp.signal_add(remote(saddr, skey), add, how);
    /// 64-bit fetch and add.
    fn db_fetch_add(raddr: u64, rkey: u32, add: u64, laddr: u64, lkey: u32) =
        |qp, how| qp.fetch_add(remote(raddr, rkey), add, fetch(laddr, lkey), how);
    /// 64-bit compare and swap.
    fn db_compare_swap(raddr: u64, rkey: u32, compare: u64, swap: u64, laddr: u64, lkey: u32) =
        |qp, how| qp.compare_swap(remote(raddr, rkey), compare, swap, fetch(laddr, lkey), how);
    /// 32-bit fetch and add; the result is big-endian.
    fn db_fetch_add32(raddr: u64, rkey: u32, add: u32, laddr: u64, lkey: u32) =
        |qp, how| qp.masked_fetch_add32(remote(raddr, rkey), add, 0, fetch(laddr, lkey), how);
    /// 64-bit fetch and add in fields.
    fn db_masked_fetch_add(raddr: u64, rkey: u32, add: u64, boundary: u64, laddr: u64, lkey: u32) =
        |qp, how| qp.masked_fetch_add(remote(raddr, rkey), add, boundary, fetch(laddr, lkey), how);
    /// 32-bit compare and swap; the result is big-endian.
    fn db_compare_swap32(raddr: u64, rkey: u32, compare: u32, swap: u32, laddr: u64, lkey: u32) =
        |qp, how| qp.masked_compare_swap32(
            remote(raddr, rkey),
            Masked { compare, compare_mask: u32::MAX, swap, swap_mask: u32::MAX },
            fetch(laddr, lkey),
            how,
        );
    /// 64-bit compare and swap under masks.
    fn db_masked_compare_swap(
        raddr: u64, rkey: u32, compare: u64, compare_mask: u64, swap: u64, swap_mask: u64, laddr: u64, lkey: u32
    ) =
        |qp, how| qp.masked_compare_swap(
            remote(raddr, rkey),
            Masked { compare, compare_mask, swap, swap_mask },
            fetch(laddr, lkey),
            how,
        );
    /// Nothing, in its turn.
    fn db_nop() = |qp, how| qp.nop(how);
    /// Rings for what was posted without ringing.
    fn db_ring() = |qp, how| qp.ring(how.deadline).map(|()| Ticket(0));
    /// Rings if needed and waits for everything published.
    fn db_flush() = |qp, how| qp.flush(how.deadline).map(|()| Ticket(0));
    /// Waits for an operation.
    fn db_wait(which: u64) = |qp, how| qp.wait(Ticket(which), how.deadline).map(|()| Ticket(which));
    /// Looks whether an operation is complete: the "ticket" is 1 if so, else 0.
    fn db_poll(which: u64) = |qp, how| {
        let _: Post = how;
        qp.poll(Ticket(which)).map(|done| Ticket(u64::from(done)))
    };
}

/// Waits until the 64-bit word at `at`, counting up, reaches `value`; returns 0, or the code of a time-out.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn db_wait_signal(at: *const u64, value: u64, timeout_ns: u64) -> u64 {
    let deadline = Deadline::after(Gpu, timeout_ns);
    // SAFETY: the C caller's promise: a word of global memory.
    while unsafe { Gpu.load64(at, doorbell_device::sites::SIGNAL_LOAD) } < value {
        if deadline.passed(Gpu) {
            return Error::TIMED_OUT.code();
        }
    }
    0
}
