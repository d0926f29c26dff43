//! What the kernels take: one structure each, in memory that the GPU reads; the kernel's only argument is its address.
//!
//! Addresses are `u64`s. Those called "WQE addresses" go into work requests with a key, and are what the key's region says (an offset or
//! a virtual address); "pointers" are dereferenced by the kernel. Times are nanoseconds. Every kernel ends by its deadline,
//! and says in its [`Status`] why.

use doorbell_device::QpHandle;

/// A structure that may be copied to the GPU byte by byte.
///
/// # Safety
/// `repr(C)`, without padding, and every bit pattern of the parameters is what the kernel expects or refuses.
pub unsafe trait Params: Copy {
    /// Its bytes.
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: no padding (the trait's promise), so all bytes are initialised.
        unsafe { core::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
}

macro_rules! params {
    ($($t:ty = $size:expr),+ $(,)?) => {
        $(
            // SAFETY: repr(C); the size below is the sum of the fields, so there is no padding.
            unsafe impl Params for $t {}
            const _: () = assert!(size_of::<$t>() == $size);
        )+
    };
}

params! { Rate = 136, Latency = 224, Forward = 72, Proxy = 112, Hammer = 96, Raw = 48, Echo = 88,
Ping = 152, Status = 32 }

/// Remote or local memory of work requests: a base, and how far each thread moves from it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Area {
    /// WQE address of thread 0's part.
    pub addr: u64,
    /// Bytes between the parts of one thread and the next (threads are numbered through the grid).
    pub stride: u64,
    /// Key, host order.
    pub key: u32,
    /// A thread's part is divided into `mask + 1` places of one message each, used in turn; a power of two minus 1.
    pub mask: u32,
}

/// How threads share QPs (`sharing`).
pub mod sharing {
    /// A thread has its QP for itself.
    pub const EXCLUSIVE: u32 = 0;
    /// The threads of a block share one.
    pub const BLOCK: u32 = 1;
    /// All threads may share one.
    pub const GPU: u32 = 2;
}

/// Options of [`Rate`].
pub mod flags {
    /// Do not check for room in the ring.
    pub const NO_SPACE_CHECK: u32 = 1;
    /// Do not wait for completions at the end.
    pub const NO_WAIT: u32 = 2;
    /// One completion a call (collapsed CQs only).
    pub const SIGNAL_LAST: u32 = 4;
    /// Publish without ringing; the CPU rings for what it finds in `sq_ready_index` (initiator "assisted").
    pub const NO_RING: u32 = 8;
    /// QPs are dealt out thread by thread, not block by block.
    pub const QP_BY_THREAD: u32 = 64;
}

/// Operations of [`Rate`] (`op`).
pub mod op {
    /// RDMA WRITE from memory.
    pub const PUT: u32 = 0;
    /// RDMA WRITE of 8 bytes inside the WQE: the message's number.
    pub const PUT_VALUE: u32 = 1;
    /// RDMA READ.
    pub const GET: u32 = 2;
    /// 64-bit fetch and add of 1.
    pub const FETCH_ADD: u32 = 3;
    /// RDMA WRITE, then fetch and add of 1 to the signal.
    pub const PUT_SIGNAL: u32 = 4;
    /// Nothing.
    pub const NOP: u32 = 5;
}

/// `put_bw`, `get_bw`, `atomic_rate`, `post`: each thread posts `iters` messages in batches, then waits for the last.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Pointer to an array of [`QpHandle`]; the block's (or thread's) number modulo `qp_count` chooses.
    pub qps: u64,
    /// QPs in the array.
    pub qp_count: u32,
    /// A [`sharing`] value.
    pub sharing: u32,
    /// An [`op`] value; `get_bw` and `atomic_rate` ignore it.
    pub op: u32,
    /// [`flags`].
    pub flags: u32,
    /// Messages that share one ring; puts of at most 1 GiB share one reservation too (then at most 511).
    pub batch: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Bytes a message.
    pub size: u64,
    /// Messages a thread.
    pub iters: u64,
    /// Stop posting after this long, if not 0.
    pub run_ns: u64,
    /// Give up after this long.
    pub deadline_ns: u64,
    /// Local memory. For FETCH_ADD: where old values go.
    pub local: Area,
    /// Remote memory. For FETCH_ADD: the words.
    pub remote: Area,
    /// Signals' WQE address (PUT_SIGNAL): one word for all threads.
    pub signal: u64,
    /// Signals' key.
    pub signal_key: u32,
    /// Must be 0.
    pub reserved2: u32,
    /// Pointer to one [`Status`] a thread.
    pub status: u64,
}

/// What a thread leaves behind.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// `doorbell_device::Error::code`, 0 for success.
    pub error: u64,
    /// Messages posted.
    pub posted: u64,
    /// Messages known to be complete (or, for ping-pong kernels, answered).
    pub completed: u64,
    /// Nanoseconds from the thread's start to its end.
    pub ns: u64,
}

/// One end of a ping-pong.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// The QP towards the other end; this end has it for itself.
    pub qp: QpHandle,
    /// Pointer to the message this end sends, which it writes itself.
    pub send: u64,
    /// WQE address of the same.
    pub send_addr: u64,
    /// WQE address of where the message goes.
    pub remote_addr: u64,
    /// WQE address of the other end's signal word.
    pub signal_addr: u64,
    /// Pointer to where the other end's message arrives.
    pub recv: u64,
    /// Pointer to this end's signal word.
    pub signal: u64,
    /// Key of `send_addr`.
    pub send_key: u32,
    /// Key of `remote_addr`.
    pub remote_key: u32,
    /// Key of `signal_addr`.
    pub signal_key: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Pointer to one u64 a round, the nanoseconds it took; 0 for none.
    pub samples: u64,
    /// Pointer to this end's [`Status`].
    pub status: u64,
}

/// `put_lat`, `signal_lat`, `get_lat`: one thread a block; block b plays end `first + b`. End 0 begins each round.
///
/// `put_lat` sends a message whose last 8 bytes are the round's number and waits for the answer's; `signal_lat` sends with
/// `put_signal` and waits for the signal; `get_lat` has one end, which reads `size` bytes from `remote_addr` into `send_addr` and waits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// The two ends. Only those that this grid plays need be filled in.
    pub ends: [End; 2],
    /// The end that block 0 plays.
    pub first: u32,
    /// 1: messages of 8 bytes travel inside the WQE (`put_lat`).
    pub inline: u32,
    /// Bytes a message; a multiple of 8, at least 8.
    pub size: u64,
    /// Rounds.
    pub iters: u64,
    /// Give up after this long.
    pub deadline_ns: u64,
}

/// `forward` and `bare_echo`: one thread answers messages of 32 bytes and a flag in one 64-byte line, laid out as [`Line`].
///
/// The first warp of block 0 plays, be it one thread or 32, which read the line faster. Messages count from 1. `forward` answers with RDMA WRITEs, payload inside the WQEs; `bare_echo` with plain stores to
/// `answer`, and needs no QP: what the machine itself costs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// The QP; this kernel has it for itself.
    pub qp: QpHandle,
    /// Pointer to the line that messages arrive in.
    pub line: u64,
    /// WQE address of the line that answers go to (`forward`).
    pub answer_addr: u64,
    /// Pointer to the line that answers go to (`bare_echo`).
    pub answer: u64,
    /// Key of `answer_addr`.
    pub answer_key: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Messages to answer.
    pub iters: u64,
    /// Give up after this long.
    pub deadline_ns: u64,
    /// Pointer to the [`Status`].
    pub status: u64,
}

/// Options of [`Echo`] and [`Ping`].
pub mod message_flags {
    /// Messages are WRITEs with immediate into the other end's places, not SENDs to its receives.
    pub const WRITE: u32 = 1;
    /// The words of each answer are compared with what was sent.
    pub const CHECK: u32 = 2;
}

/// `echo`: one thread receives messages, by SEND or WRITE with immediate, and answers each with its own bytes and immediate, or some of them
/// with none. Message `n` (from 0) lies in place `n & mask` of its buffers, `stride` bytes apart.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Echo {
    /// The QP, with a receive queue; this kernel has it for itself.
    pub qp: QpHandle,
    /// Where messages arrive and answers come from. `stride` is from one place to the next: the longest message.
    pub buffers: Area,
    /// With [`message_flags::WRITE`]: WQE address of the places that answers go to, as far apart.
    pub answer_addr: u64,
    /// Its key.
    pub answer_key: u32,
    /// [`message_flags`].
    pub flags: u32,
    /// 1: answer each message. More: only each so many-th, and the last, with no bytes and the number of messages so far.
    pub every: u64,
    /// Messages to answer.
    pub iters: u64,
    /// Give up after this long.
    pub deadline_ns: u64,
    /// Pointer to the [`Status`]: `completed` messages came, `posted` answers went.
    pub status: u64,
}

/// `ping`: one thread sends messages to an [`Echo`] and takes its answers; immediates are the messages' numbers. An answer that is not what
/// it must be ends it as `Invalid`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ping {
    /// The QP, with a receive queue; this kernel has it for itself.
    pub qp: QpHandle,
    /// Places that messages come from; `stride` as for [`Echo::buffers`].
    pub out: Area,
    /// Places that answers arrive in.
    pub back: Area,
    /// Pointer to the first place of `out`.
    pub out_pointer: u64,
    /// Pointer to the first place of `back`.
    pub back_pointer: u64,
    /// With [`message_flags::WRITE`]: WQE address of the other end's places, as far apart as `out`'s.
    pub target_addr: u64,
    /// Its key.
    pub target_key: u32,
    /// [`message_flags`].
    pub flags: u32,
    /// Bytes a message.
    pub size: u64,
    /// Messages.
    pub iters: u64,
    /// Messages without an answer at a time: 1 for latency; at least `every`, and with answers to all no more than `out` has places.
    pub window: u64,
    /// As [`Echo::every`].
    pub every: u64,
    /// Pointer to one u64 an answer for its round trip in nanoseconds (of use with a window of 1), or 0.
    pub samples: u64,
    /// Give up after this long.
    pub deadline_ns: u64,
    /// Pointer to the [`Status`].
    pub status: u64,
}

/// A message of 32 bytes and its flag in one 64-byte line: three units of 16 bytes, each 12 bytes of the message and the
/// message's number. A unit arrives whole, so its number vouches for it, and a poll of all three needs no second read and no fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line(pub [u32; 12]);

impl Line {
    /// Bytes that are written: three units. The line's last 16 bytes are free.
    pub const BYTES: u32 = 48;

    /// Message `n` with its number. The number is the flag, so 0 is no message's.
    #[inline(always)]
    pub const fn new(m: [u32; 8], n: u32) -> Self {
        Self([m[0], m[1], m[2], n, m[3], m[4], m[5], n, m[6], m[7], 0, n])
    }

    /// The line that three units of two 64-bit words hold.
    #[inline(always)]
    pub const fn from_units(units: [[u64; 2]; 3]) -> Self {
        let [[a, b], [c, d], [e, f]] = units;
        Self([
            a as u32,
            (a >> 32) as u32,
            b as u32,
            (b >> 32) as u32,
            c as u32,
            (c >> 32) as u32,
            d as u32,
            (d >> 32) as u32,
            e as u32,
            (e >> 32) as u32,
            f as u32,
            (f >> 32) as u32,
        ])
    }

    /// Whether all of message `n` is here.
    #[inline(always)]
    pub const fn is(&self, n: u32) -> bool {
        self.0[3] == n && self.0[7] == n && self.0[11] == n
    }

    /// The message.
    #[inline(always)]
    pub const fn message(&self) -> [u32; 8] {
        let l = &self.0;
        [l[0], l[1], l[2], l[4], l[5], l[6], l[8], l[9]]
    }
}

/// A command that `proxy_put` hands to a CPU thread: 32 bytes, written as two 16-byte halves in any order.
///
/// Each half carries the command's number, so that the CPU needs no other sign that both have arrived.
#[repr(C, align(32))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Command {
    /// WQE address of the source.
    pub local: u64,
    /// Bytes.
    pub size: u32,
    /// Low 32 bits of the command's index plus 1.
    pub seq0: u32,
    /// WQE address of the destination.
    pub remote: u64,
    /// QP to use.
    pub qp: u32,
    /// As `seq0`.
    pub seq1: u32,
}

/// `proxy_put`: what NCCL's and NVSHMEM's proxies do. Threads hand [`Command`]s to CPU threads, which post and ring.
///
/// Queue q has `depth` commands at `ring + q * depth * 32`, its producer index at `pi + 64 q` (GPU memory), a copy of the consumer index at
/// `ci_cache + 64 q` (GPU memory), and the consumer index itself at `ci + 64 q`, which the CPU advances when puts have completed, or
/// sets to `1 << 63 | Error::code()` when the queue has failed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Proxy {
    /// Pointer to the command rings.
    pub ring: u64,
    /// Pointer to the producer indexes.
    pub pi: u64,
    /// Pointer to the copies of the consumer indexes.
    pub ci_cache: u64,
    /// Pointer to the consumer indexes.
    pub ci: u64,
    /// Queues; a block uses its number modulo this.
    pub queues: u32,
    /// Commands a queue; a power of two.
    pub depth: u32,
    /// Messages a thread.
    pub iters: u64,
    /// Give up after this long.
    pub deadline_ns: u64,
    /// Bytes a message, below 4 GiB.
    pub size: u64,
    /// WQE address of thread 0's source.
    pub local: u64,
    /// WQE address of thread 0's destination.
    pub remote: u64,
    /// Bytes between threads, at both.
    pub stride: u64,
    /// Places a thread uses in turn, minus 1.
    pub mask: u64,
    /// Pointer to one [`Status`] a thread.
    pub status: u64,
    /// Stop posting after this long, if not 0.
    pub run_ns: u64,
}

/// `hammer`: every thread posts a pseudo-random mixture on shared QPs, whose outcome is known.
///
/// Thread t writes 1, 2, … `iters` in order to word t of `words`, by inline puts or from memory, alone or in small batches, some with a
/// signal of 1. Afterwards word t must be `iters`, and the signal the sum of the threads' [`Status::completed`] signals.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Hammer {
    /// Pointer to an array of [`QpHandle`]; thread number modulo `qp_count` chooses, so lanes of one warp use different QPs.
    pub qps: u64,
    /// QPs in the array.
    pub qp_count: u32,
    /// A [`sharing`] value, not exclusive (unless each thread has its own QP).
    pub sharing: u32,
    /// Writes a thread.
    pub iters: u64,
    /// WQE address of the words.
    pub words: u64,
    /// WQE address of the signal.
    pub signal: u64,
    /// Key of both.
    pub key: u32,
    /// Key of `source`.
    pub source_key: u32,
    /// Pointer to 64 words a thread, the thread's own.
    pub source: u64,
    /// WQE address of the same.
    pub source_addr: u64,
    /// Pointer to one [`Status`] a thread; `posted` counts writes, `completed` signals.
    pub status: u64,
    /// Give up after this long.
    pub deadline_ns: u64,
    /// Start of the pseudo-random sequence.
    pub seed: u64,
    /// WQE address of 8 bytes that take what signals return; its key is `key`.
    pub sink: u64,
}

/// `raw_post`: copies slots into the ring as they are and rings the given word: what a hostile or broken kernel does.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Raw {
    /// The QP.
    pub qp: QpHandle,
    /// Pointer to the slots' bytes.
    pub slots: u64,
    /// How many; they go to the ring from `first` on, modulo its size.
    pub count: u32,
    /// Index of the first slot.
    pub first: u32,
    /// Stored in the doorbell (or producer) word afterwards.
    pub word: u64,
    /// Stored in the doorbell record before, if the QP has one.
    pub record: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// Five seconds: the deadline of the default parameters.
const DEADLINE_NS: u64 = 5_000_000_000;

impl Rate {
    /// One message on one exclusive QP, with a deadline of 5 seconds; addresses, keys and size are 0, to be filled in.
    pub const fn one_message() -> Self {
        const NOWHERE: Area = Area {
            addr: 0,
            stride: 0,
            key: 0,
            mask: 0,
        };
        Self {
            qps: 0,
            qp_count: 1,
            sharing: sharing::EXCLUSIVE,
            op: op::PUT,
            flags: 0,
            batch: 1,
            reserved: 0,
            size: 0,
            iters: 1,
            run_ns: 0,
            deadline_ns: DEADLINE_NS,
            local: NOWHERE,
            remote: NOWHERE,
            signal: 0,
            signal_key: 0,
            reserved2: 0,
            status: 0,
        }
    }
}
