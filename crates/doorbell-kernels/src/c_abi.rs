//! The functions that CUDA C++ code links from `ptx/doorbell_device.ptx`: see `include/doorbell_device.h`, which documents them.
//!
//! Each takes a queue handle by value and a time in nanoseconds, and returns 0 or an error number (`Error::code`); a posting
//! function stores its ticket. They are small: each hands an operation as data to one function that is not inlined.

use doorbell_device::{
    Arch, Deadline, Error, Fetch, Key, Local, Masked, Post, Qp, QpHandle, Received, RecvQueue,
    Remote, Ticket, Wr,
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

/// Words of the largest inline SEND.
const INLINE: usize = 11;

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
    /// A SEND whose bytes are in the call.
    SendInline {
        words: [u32; INLINE],
        len: u32,
        imm: Option<u32>,
    },
    RecvPost(Local),
    RecvRepost(u32),
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
        if let Call::RecvPost(_) | Call::RecvRepost(_) = call {
            let recv = RecvQueue::<Gpu, Thread, M>::new(Gpu, q)?;
            return match *call {
                Call::RecvPost(local) => recv.recv_post(local, how.deadline),
                Call::RecvRepost(n) => recv.recv_repost(n, how.deadline),
                _ => Err(Error::INVALID),
            }
            .map(|t| t.0);
        }
        let qp = Qp::<Gpu, Thread, M>::new(Gpu, q)?;
        match *call {
            Call::SendInline { words, len, imm } => {
                qp.send_inline(words, len, imm, how).map(|t| t.0)
            }
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
            Call::Post(_) | Call::Wait(_) | Call::RecvPost(_) | Call::RecvRepost(_) => {
                Err(Error::INVALID)
            }
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

/// The first `len` bytes at `bytes` in words, in memory order; none if they are too many.
#[inline(always)]
unsafe fn words(bytes: *const u8, len: u32) -> [u32; INLINE] {
    let mut words = [0; INLINE];
    for at in 0..(len as usize).min(4 * INLINE) {
        // SAFETY: the C caller's promise: `len` bytes.
        words[at / 4] |= u32::from(unsafe { *bytes.add(at) }) << (8 * (at % 4));
    }
    words
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
    /// RDMA WRITE with immediate.
    fn db_write_imm(raddr: u64, rkey: u32, laddr: u64, lkey: u32, len: u64, imm: u32) =
        Call::Post(Wr::PutImm { remote: remote(raddr, rkey), local: local(laddr, lkey, len), imm });
    /// SEND.
    fn db_send(laddr: u64, lkey: u32, len: u64) = Call::Post(Wr::Send { local: local(laddr, lkey, len) });
    /// SEND with immediate.
    fn db_send_imm(laddr: u64, lkey: u32, len: u64, imm: u32) =
        Call::Post(Wr::SendImm { local: local(laddr, lkey, len), imm });
    /// SEND of bytes that travel inside the request.
    fn db_send_inline(bytes: *const u8, len: u32) =
        Call::SendInline { words: words(bytes, len), len, imm: None };
    /// The same with an immediate.
    fn db_send_inline_imm(bytes: *const u8, len: u32, imm: u32) =
        Call::SendInline { words: words(bytes, len), len, imm: Some(imm) };
    /// Posts a receive.
    fn db_recv_post(laddr: u64, lkey: u32, len: u64) = Call::RecvPost(local(laddr, lkey, len));
    /// Posts receives as they were a lap ago.
    fn db_recv_repost(n: u32) = Call::RecvRepost(n);
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

/// `doorbell_received`: 24 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CReceived {
    ticket: u64,
    arrival: u32,
    bytes: u32,
    imm: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<CReceived>() == 24);

/// Tells what took a receive, or that nothing has yet.
unsafe fn tell(got: Result<Option<Received>, Error>, which: u64, out: *mut CReceived) -> u64 {
    let got = match got {
        Ok(got) => got,
        Err(e) => return e.code(),
    };
    if !out.is_null() {
        let said = got.map_or((0, 0, 0), |r| (r.arrival as u32, r.bytes, r.imm));
        let (arrival, bytes, imm) = said;
        // SAFETY: the C caller's promise: null, or a structure of its own.
        unsafe {
            *out = CReceived {
                ticket: which,
                arrival,
                bytes,
                imm,
                reserved: 0,
            };
        }
    }
    0
}

/// Looks whether a message has taken the receive with ticket `which`.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn db_recv_poll(q: QpHandle, which: u64, out: *mut CReceived) -> u64 {
    // SAFETY: the C caller's promise. Looking is the same in every sharing mode.
    unsafe {
        let got = RecvQueue::<Gpu, Thread, sharing::Gpu>::new(Gpu, q)
            .and_then(|recv| recv.recv_poll(Ticket(which)));
        tell(got, which, out)
    }
}

/// Waits for the message that takes the receive with ticket `which`.
///
/// # Safety
/// As the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn db_recv_wait(
    q: QpHandle,
    which: u64,
    timeout_ns: u64,
    out: *mut CReceived,
) -> u64 {
    let deadline = Deadline::after(Gpu, timeout_ns);
    // SAFETY: as for `db_recv_poll`.
    unsafe {
        let got = RecvQueue::<Gpu, Thread, sharing::Gpu>::new(Gpu, q)
            .and_then(|recv| recv.recv_wait(Ticket(which), deadline));
        tell(got.map(Some), which, out)
    }
}
