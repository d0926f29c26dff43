//! The functions that CUDA C++ code links from `ptx/doorbell_device.ptx`: see `include/doorbell_device.h`, which documents them.
//!
//! Each takes a queue handle by value and a time in nanoseconds, and returns 0 or an error number (`Error::code`); a posting
//! function stores its ticket. They are small: each hands an operation as data to one function that is not inlined.

use doorbell_device::{
    Arch, Deadline, Error, Fetch, Key, Local, Masked, Post, Qp, QpHandle, Remote, Ticket, Wr,
    nvptx::Gpu,
    scope::{Sharing, Thread, sharing},
};

/// `DOORBELL_EXCLUSIVE`, `DOORBELL_BLOCK`: who shares the QP.
const EXCLUSIVE: u32 = 1;
const BLOCK: u32 = 2;
/// `DOORBELL_NO_RING`, `DOORBELL_NO_SPACE_CHECK`, `DOORBELL_SIGNAL_LAST`: how to post.
const NO_RING: u32 = 4;
const NO_SPACE_CHECK: u32 = 8;
const SIGNAL_LAST: u32 = 16;

/// What a call does.
#[derive(Clone, Copy)]
enum Call {
    Post(Wr),
    PutCounter {
        remote: Remote,
        local: Local,
        counter: Remote,
        add: u64,
    },
    Ring,
    Flush,
    Wait(u64),
    Poll(u64),
}

#[inline(never)]
unsafe fn call(q: QpHandle, call: &Call, flags: u32, timeout_ns: u64, ticket: *mut u64) -> u64 {
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
            0 => call_as::<sharing::Gpu>(q, call, how),
            BLOCK => call_as::<sharing::Block>(q, call, how),
            _ => call_as::<sharing::Exclusive>(q, call, how),
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

#[inline(always)]
unsafe fn call_as<M: Sharing>(q: QpHandle, call: &Call, how: Post) -> Result<u64, Error> {
    // SAFETY: the caller's promise.
    unsafe {
        if let Call::Post(wr) = call {
            return Qp::<Gpu, Thread, M>::submit_at(Gpu, q, None, core::slice::from_ref(wr), how)
                .map(|t| t.0);
        }
        if let Call::Wait(which) = *call {
            return Qp::<Gpu, Thread, M>::wait_at(Gpu, q, Ticket(which), how.deadline)
                .map(|()| which);
        }
        let qp = Qp::<Gpu, Thread, M>::new(Gpu, q)?;
        match *call {
            Call::PutCounter {
                remote,
                local,
                counter,
                add,
            } => qp
                .put_counter(remote, local, counter, add, how)
                .map(|t| t.0),
            Call::Ring => qp.ring(how.deadline).map(|()| 0),
            Call::Flush => qp.flush(how.deadline).map(|()| 0),
            Call::Poll(which) => qp.poll(Ticket(which)).map(u64::from),
            Call::Post(_) | Call::Wait(_) => Err(Error::INVALID),
        }
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $t:ty),*) = $call:expr;)+) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            q: QpHandle, $($arg: $t,)* flags: u32, timeout_ns: u64, ticket: *mut u64,
        ) -> u64 {
            // SAFETY: the C caller's promise.
            unsafe { call(q, &$call, flags, timeout_ns, ticket) }
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

functions! {
    /// RDMA WRITE.
    fn db_put(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64) =
        Call::Post(Wr::Put { remote: remote(raddr, rkey), local: local(laddr, lkey, len) });
    /// RDMA WRITE of a value of 1, 2, 4 or 8 bytes.
    fn db_put_value(raddr: u64, rkey: u32, value: u64, len: u32) =
        Call::Post(Wr::PutValue { remote: remote(raddr, rkey), value, len });
    /// RDMA WRITE, then an addition to a signal.
    fn db_put_signal(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64, saddr: u64, skey: u32, add: u64) =
        Call::Post(Wr::PutSignal {
            remote: remote(raddr, rkey),
            local: local(laddr, lkey, len),
            signal: remote(saddr, skey),
            add,
        });
    /// RDMA WRITE, then, when it is complete, an addition to a local counter.
    fn db_put_counter(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64, caddr: u64, ckey: u32, add: u64) =
        Call::PutCounter {
            remote: remote(raddr, rkey),
            local: local(laddr, lkey, len),
            counter: remote(caddr, ckey),
            add,
        };
    /// RDMA READ.
    fn db_get(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64) =
        Call::Post(Wr::Get { remote: remote(raddr, rkey), local: local(laddr, lkey, len) });
    /// RDMA READ and DUMP.
    fn db_get_visible(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64) =
        Call::Post(Wr::GetVisible { remote: remote(raddr, rkey), local: local(laddr, lkey, len) });
    /// Addition to a signal.
    fn db_signal_add(saddr: u64, skey: u32, add: u64) =
        Call::Post(Wr::SignalAdd { remote: remote(saddr, skey), add });
    /// 64-bit fetch and add.
    fn db_fetch_add(raddr: u64, rkey: u32, add: u64, laddr: u64, lkey: u32) =
        Call::Post(Wr::FetchAdd { remote: remote(raddr, rkey), add, to: fetch(laddr, lkey) });
    /// 64-bit compare and swap.
    fn db_compare_swap(raddr: u64, rkey: u32, compare: u64, swap: u64, laddr: u64, lkey: u32) =
        Call::Post(Wr::CompareSwap { remote: remote(raddr, rkey), compare, swap, to: fetch(laddr, lkey) });
    /// 32-bit fetch and add; the result is big-endian.
    fn db_fetch_add32(raddr: u64, rkey: u32, add: u32, laddr: u64, lkey: u32) =
        Call::Post(Wr::MaskedFetchAdd32 {
            remote: remote(raddr, rkey),
            add,
            boundary: 0,
            to: fetch(laddr, lkey),
        });
    /// 64-bit fetch and add in fields.
    fn db_masked_fetch_add(raddr: u64, rkey: u32, add: u64, boundary: u64, laddr: u64, lkey: u32) =
        Call::Post(Wr::MaskedFetchAdd { remote: remote(raddr, rkey), add, boundary, to: fetch(laddr, lkey) });
    /// 32-bit compare and swap; the result is big-endian.
    fn db_compare_swap32(raddr: u64, rkey: u32, compare: u32, swap: u32, laddr: u64, lkey: u32) =
        Call::Post(Wr::MaskedCompareSwap32 {
            remote: remote(raddr, rkey),
            swap: Masked { compare, compare_mask: u32::MAX, swap, swap_mask: u32::MAX },
            to: fetch(laddr, lkey),
        });
    /// 64-bit compare and swap under masks.
    fn db_masked_compare_swap(
        raddr: u64, rkey: u32, compare: u64, compare_mask: u64, swap: u64, swap_mask: u64, laddr: u64, lkey: u32
    ) =
        Call::Post(Wr::MaskedCompareSwap {
            remote: remote(raddr, rkey),
            swap: Masked { compare, compare_mask, swap, swap_mask },
            to: fetch(laddr, lkey),
        });
    /// Nothing, in its turn.
    fn db_nop() = Call::Post(Wr::Nop);
    /// Rings for what was posted without ringing.
    fn db_ring() = Call::Ring;
    /// Rings if needed and waits for everything published.
    fn db_flush() = Call::Flush;
    /// Waits for an operation.
    fn db_wait(which: u64) = Call::Wait(which);
    /// Looks whether an operation is complete: the "ticket" is 1 if so, else 0.
    fn db_poll(which: u64) = Call::Poll(which);
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
